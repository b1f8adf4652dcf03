//! Which libfabric there is, and what engines can do with it: asked by a child process.
//!
//! Loading a library runs its code, and the first question makes it probe devices; what a broken one does
//! then happens to the child. That there is none is an answer like any other.

use immwire::libfabric::{LibfabricError, Surveyed, survey};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// The hidden subcommand under which this program is that child.
pub const CHILD_COMMAND: &str = "__probe-libfabric";
/// Half a second is usual.
const PATIENCE: Duration = Duration::from_secs(20);

/// What there is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Libfabric {
    /// A library.
    Found(Fabric),
    /// None, and where it was looked for.
    NotFound(String),
    /// One that fails when it is asked, or whose child was lost.
    Fails(String),
}

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

/// Asks. `program` starts this program, as the child.
#[must_use]
pub fn probe(mut program: Command) -> Libfabric {
    let child = program
        .arg(CHILD_COMMAND)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    match child {
        Ok(child) => answer(Reaped(child), PATIENCE),
        Err(error) => Libfabric::Fails(format!("no child process could be started: {error}")),
    }
}

/// Kills and reaps on every way out.
struct Reaped(Child);

impl Reaped {
    /// How it ended by itself, once its output has.
    fn end(&mut self) -> Option<ExitStatus> {
        self.0.wait().ok()
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn answer(mut child: Reaped, patience: Duration) -> Libfabric {
    let out = child.0.stdout.take();
    let (give, take) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut said = Vec::new();
        if let Some(mut out) = out {
            let _ = out.read_to_end(&mut said);
        }
        let _ = give.send(said);
    });
    let said = take.recv_timeout(patience);
    let result = match &said {
        Ok(said) => serde_json::from_slice(said).unwrap_or_else(|_| {
            let end = child.end().map_or_else(|| "unknown".to_owned(), |end| end.to_string());
            Libfabric::Fails(format!("the process that loaded it said nothing of use ({end})"))
        }),
        Err(_) => Libfabric::Fails(format!("it did not answer within {patience:?}")),
    };
    drop(child);
    // The child is gone, and its output with it.
    let _ = reader.join();
    result
}

/// The child's part: loads, asks, prints.
///
/// # Errors
///
/// An I/O error of the standard output.
pub fn child() -> std::io::Result<()> {
    let found = match survey(None) {
        Ok(survey) => Libfabric::Found(Fabric {
            path: survey.path,
            version: survey.version,
            providers: survey.providers.into_iter().map(FabricProvider::from).collect(),
        }),
        Err(LibfabricError::Load(error)) => Libfabric::NotFound(error.to_string()),
        Err(error) => Libfabric::Fails(error.to_string()),
    };
    let text = serde_json::to_string(&found)?;
    writeln!(std::io::stdout(), "{text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_says_nothing_of_use_is_told_of() {
        let Libfabric::Fails(why) = probe(Command::new("/bin/echo")) else { panic!("it is echo") };
        assert!(why.contains("exit status: 0"), "{why}");
        let Libfabric::Fails(why) = probe(Command::new("/nonexistent")) else {
            panic!("no program")
        };
        assert!(why.contains("no child process"), "{why}");
        let slow = Command::new("/bin/sleep").arg("60").stdout(Stdio::piped()).spawn().unwrap();
        let limit = Duration::from_millis(20);
        assert!(
            matches!(answer(Reaped(slow), limit), Libfabric::Fails(why) if why.contains("20ms"))
        );
    }

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
