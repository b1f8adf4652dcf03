//! Which libfabric there is, and what engines can do with it: asked by a child process.

use super::child::{self, Asked};
use immwire::libfabric::{LibfabricError, Surveyed, survey};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The hidden subcommand under which this program is that child.
pub const CHILD_COMMAND: &str = "__probe-libfabric";

/// What there is.
pub type Libfabric = Asked<Fabric>;

/// A libfabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fabric {
    /// The file.
    pub path: PathBuf,
    /// Its version.
    pub version: String,
    /// Those that fit first, best first.
    pub providers: Vec<FabricProvider>,
}

/// One of its providers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricProvider {
    /// For `--fabric`.
    pub name: String,
    /// For `--interface`, each once.
    pub interfaces: Vec<String>,
    /// Why there are none.
    pub why_not: Option<String>,
}

impl From<Surveyed> for FabricProvider {
    fn from(Surveyed { name, devices, unfit }: Surveyed) -> Self {
        let mut interfaces: Vec<String> = Vec::new();
        for device in devices {
            if !interfaces.contains(&device.domain) {
                interfaces.push(device.domain);
            }
        }
        Self { name, interfaces, why_not: unfit.map(|unfit| unfit.to_string()) }
    }
}

impl FabricProvider {
    /// Those that lead to other hosts.
    pub fn outward(&self) -> impl Iterator<Item = &str> {
        self.interfaces.iter().map(String::as_str).filter(|name| *name != "lo")
    }
}

/// The child's part: loads, asks, prints.
///
/// # Errors
///
/// An I/O error of the standard output.
pub fn tell() -> std::io::Result<()> {
    let found = match survey(None) {
        Ok(survey) => Libfabric::Found(Fabric {
            path: survey.path,
            version: survey.version,
            providers: survey.providers.into_iter().map(FabricProvider::from).collect(),
        }),
        Err(LibfabricError::Load(error)) => Libfabric::NotFound(error.to_string()),
        Err(error) => Libfabric::Fails(error.to_string()),
    };
    child::say(&found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_named_once_and_loopback_leads_nowhere() {
        use immwire::libfabric::SurveyedDevice;
        let device = |domain: &str, fabric: &str| SurveyedDevice {
            domain: domain.into(),
            fabric: fabric.into(),
        };
        let devices = vec![device("rdma0", "efa-direct"), device("rdma0", "efa"), device("lo", "")];
        let found: FabricProvider = Surveyed { name: "x".into(), devices, unfit: None }.into();
        assert_eq!(found.interfaces, ["rdma0", "lo"]);
        assert_eq!(found.outward().collect::<Vec<_>>(), ["rdma0"]);
    }
}
