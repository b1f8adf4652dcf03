//! Which RDMA devices libibverbs has, and which of them engines can use: asked by a child process.

use super::child::{self, Asked};
use immwire::VerbsOptions;
use immwire::verbs::{Survey, VerbsError, survey};
use serde::{Deserialize, Serialize};

/// The hidden subcommand under which this program is that child.
pub const CHILD_COMMAND: &str = "__probe-verbs";

/// What there is.
pub type Verbs = Asked<Rdma>;

/// What a libibverbs has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rdma {
    /// Ports that fit, by name.
    pub devices: Vec<Fitting>,
    /// Those that do not.
    pub unfit: Vec<Unfitting>,
    /// What becomes of registered memory if a process forks.
    pub forks: String,
}

/// A port of a device that an engine can use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fitting {
    /// For `--device`: the device's, with the port's number if it has several.
    pub name: String,
    /// Gigabits per second.
    pub gbps: u32,
    /// Its longest packets, in bytes.
    pub mtu_bytes: u16,
    /// On Ethernet (RoCE), or InfiniBand.
    pub ethernet: bool,
    /// What it lacks for `--on-demand`, if anything.
    pub no_on_demand: Option<String>,
    /// By which calls it is used, without `--classic`.
    pub calls: String,
}

/// One that it cannot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unfitting {
    /// Its name.
    pub name: String,
    /// What is the matter.
    pub why: String,
}

impl From<Survey> for Rdma {
    fn from(Survey { devices, unfit, forks }: Survey) -> Self {
        let fitting = |device: immwire::verbs::Surveyed| Fitting {
            name: device.device,
            gbps: device.speed_gbps,
            mtu_bytes: device.mtu,
            ethernet: device.is_ethernet,
            no_on_demand: device.pins.map(|lacks| lacks.to_string()),
            calls: device.calls.to_string(),
        };
        let unfitting =
            |unfit: immwire::verbs::Unfit| Unfitting { name: unfit.device, why: unfit.why };
        Self {
            devices: devices.into_iter().map(fitting).collect(),
            unfit: unfit.into_iter().map(unfitting).collect(),
            forks: forks.to_string(),
        }
    }
}

/// The child's part: loads, asks, prints.
///
/// # Errors
///
/// An I/O error of the standard output.
pub fn tell() -> std::io::Result<()> {
    let found = match survey(&VerbsOptions::default()) {
        Ok(survey) => Verbs::Found(survey.into()),
        Err(VerbsError::Load(error)) => Verbs::NotFound(error.to_string()),
        Err(error) => Verbs::Fails(error.to_string()),
    };
    child::say(&found)
}
