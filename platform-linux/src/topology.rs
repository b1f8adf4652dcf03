//! The GPUs and NICs of this machine, as the table from which [`immwire_core::topology`] decides who goes with whom.
//!
//! Reads sysfs, and nothing else: no device is opened, no library loaded, no privilege needed. What cannot be read
//! is left out of the table, since half of a machine's devices are better than none. Everything is below a root, so
//! that a folder can stand for a machine. A table is text, and may as well have been captured elsewhere.
//!
//! ```no_run
//! use std::path::Path;
//! use immwire::topology::{Table, Topology};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let table = Table::capture(Path::new("/"));
//! let devices = table.devices();
//! for pair in Topology::new(&devices, "gpu0=mlx5_0,mlx5_1")?.pairs() {
//!     let names: Vec<_> = pair.nics.iter().map(|nic| nic.name).collect();
//!     println!("{} has {}: {}", pair.owner, names.join(", "), pair.reason);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Invariants
//!
//! - The text of a [`Table`] can be read: what was captured is read back when it is made. The tests build the tree of
//!   each fixture, capture it, and compare.
//! - An engine with GPUs has no NIC that its provider cannot use, and one that it can, if there is any, unless an
//!   override names others.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

pub use immwire_core::topology::{
    Closeness, Device, Misplaced, Nic, OverrideError, Owner, Pair, Reason, TableError, Topology,
};

/// GPUs and NICs of a machine, ordered by PCI address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    text: String,
}

impl Table {
    /// Reads what is below `root` (`/`, but for tests): NVIDIA's GPUs, all RDMA devices, and network interfaces on the
    /// PCI bus. Takes milliseconds.
    #[must_use]
    pub fn capture(root: &Path) -> Self {
        let mut text = format!("# read from sysfs by immwire {}\n", env!("CARGO_PKG_VERSION"));
        for line in (Sysfs { root }).lines() {
            // A name that would not be read back (it has a blank, say) is not one that anybody can use.
            if Device::parse(&line).is_ok() {
                let _ = writeln!(text, "{line}");
            }
        }
        Self { text }
    }

    /// Takes a table that was captured before, or written by hand.
    ///
    /// # Errors
    ///
    /// [`Misplaced`] for the first line that is no device.
    pub fn from_text(text: impl Into<String>) -> Result<Self, Misplaced<TableError>> {
        let text = text.into();
        let fault = immwire_core::topology::table(&text).find_map(Result::err);
        fault.map_or(Ok(Self { text }), Err)
    }

    /// The text: a line for each device. [`Table::from_text`] takes it.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The devices, in the order of the text.
    #[must_use]
    pub fn devices(&self) -> Vec<Device<'_>> {
        immwire_core::topology::table(&self.text).map_while(Result::ok).collect()
    }
}

struct Sysfs<'a> {
    root: &'a Path,
}

/// What is on one PCI function, or on none.
#[derive(Default)]
struct Function {
    /// Its folder, without links; `None` for what is on no bus.
    folder: Option<PathBuf>,
    rdma: Vec<String>,
    net: Vec<String>,
}

impl Sysfs<'_> {
    /// Lines of the table, in order.
    fn lines(&self) -> Vec<String> {
        let mut functions: BTreeMap<String, Function> = BTreeMap::new();
        for entry in self.entries("bus/pci/devices") {
            if let Some((path, folder)) = bus_path(&entry.real) {
                functions.entry(path).or_default().folder = Some(folder);
            }
        }
        for entry in self.entries("class/infiniband") {
            let (path, folder) = match bus_path(&entry.real) {
                Some((path, folder)) => (path, Some(folder)),
                None => (format!("virtual/{}", entry.name), None),
            };
            let function = functions.entry(path).or_default();
            function.folder = folder;
            function.rdma.push(entry.name);
        }
        for entry in self.entries("class/net") {
            if let Some((path, folder)) = bus_path(&entry.real) {
                let function = functions.entry(path).or_default();
                function.folder = Some(folder);
                function.net.push(entry.name);
            }
        }
        let mut lines: Vec<_> = functions
            .iter()
            .flat_map(|(path, function)| {
                let key = order(path);
                self.devices(path, function).into_iter().map(move |line| (key.clone(), line))
            })
            .collect();
        lines.sort();
        lines.into_iter().map(|(_, line)| line).collect()
    }

    /// The lines of one function: one for each RDMA device; or else for each interface; or the GPU's.
    fn devices(&self, path: &str, function: &Function) -> Vec<String> {
        let file = |name: &str| text(&function.folder.as_ref()?.join(name));
        let hex = |name: &str| {
            let text = file(name)?;
            u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
        };
        let physical = function.folder.as_ref().and_then(|folder| {
            folder.join("physfn").canonicalize().ok()?.file_name()?.to_str().map(str::to_owned)
        });
        let bare = Device {
            path,
            of: physical.as_deref(),
            vendor: hex("vendor").and_then(|id| u16::try_from(id).ok()).unwrap_or(0),
            class: hex("class").unwrap_or(0),
            numa: file("numa_node").and_then(|node| node.parse().ok()),
            ..Device::default()
        };
        let net = function.net.first().map(String::as_str);
        if !function.rdma.is_empty() {
            let line = |name: &String| {
                let (mbit, down) = self.ports(name);
                Device { rdma: Some(name), net, mbit, down, ..bare }.to_string()
            };
            function.rdma.iter().map(line).collect()
        } else if !function.net.is_empty() {
            let line = |name: &String| {
                let (mbit, down) = self.link(name);
                Device { net: Some(name), mbit, down, ..bare }.to_string()
            };
            function.net.iter().map(line).collect()
        } else if bare.is_gpu() {
            vec![bare.to_string()]
        } else {
            Vec::new()
        }
    }

    /// The rate in Mbit/s of an RDMA device's fastest port with a link, or else without; and whether none has one.
    fn ports(&self, device: &str) -> (u32, bool) {
        let ports = self.entries(&format!("class/infiniband/{device}/ports"));
        let port = |entry: &Entry| {
            let active =
                text(&entry.real.join("state")).is_some_and(|state| state.ends_with("ACTIVE"));
            (active, text(&entry.real.join("rate")).and_then(|rate| rate_mbit(&rate)).unwrap_or(0))
        };
        let best = ports.iter().map(port).max().unwrap_or_default();
        (best.1, !best.0)
    }

    /// The rate in Mbit/s of a network interface, and whether it has no link.
    fn link(&self, interface: &str) -> (u32, bool) {
        let folder = self.root.join("sys/class/net").join(interface);
        // Drivers that do not know say "unknown".
        let down = text(&folder.join("operstate"))
            .is_none_or(|state| !matches!(state.as_str(), "up" | "unknown"));
        (number(&folder.join("speed")).unwrap_or(0), down)
    }

    /// What is in a folder below `/sys`, and where it really is; nothing if there is no such folder.
    fn entries(&self, folder: &str) -> Vec<Entry> {
        let Ok(entries) = fs::read_dir(self.root.join("sys").join(folder)) else {
            return Vec::new();
        };
        let mut found: Vec<_> = entries
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                Some(Entry { name, real: entry.path().canonicalize().ok()? })
            })
            .collect();
        found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        found
    }
}

/// Which NICs belong to which GPU, where somebody knows better than this machine's sysfs or than distances.
///
/// ```
/// use immwire::topology::{Pairing, Table};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // A cloud's description of a machine whose bus shows nothing; and one GPU's NIC by name.
/// let table = Table::from_text(
///     "pci0000:10/0000:10:00.0 vendor=10de class=030200\n\
///      pci0000:10/0000:11:00.0 rdma=mlx5_0 mbit=400000\n",
/// )?;
/// let pairing = Pairing { table: Some(table), overrides: "gpu0=mlx5_0".into() };
/// let builder = immwire::TransferEngine::builder().gpus([0]).pairing(pairing);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pairing {
    /// The devices of this machine, if they are not what sysfs says.
    pub table: Option<Table>,
    /// `gpu0=mlx5_0,mlx5_1 0000:52:00.0=mlx5_4`, or nothing: see [`Topology::new`]. GPUs are numbered as in the table,
    /// whatever their numbers are in a process.
    pub overrides: String,
}

impl Pairing {
    /// The names of the NICs of an engine with GPUs at these addresses, if it can use these alone. Empty if nobody knows,
    /// since the table has none of the GPUs, or none of the NICs.
    pub(crate) fn names(
        &self,
        gpus: &[String],
        usable: &[&str],
    ) -> Result<Vec<String>, Misplaced<OverrideError>> {
        let captured;
        let table = match &self.table {
            Some(table) => table,
            None => {
                captured = Table::capture(Path::new("/"));
                &captured
            }
        };
        let mut devices = table.devices();
        for device in &mut devices {
            // What no provider opens is as good as without a link. An override may name it nevertheless, and is told.
            device.down |= device.nic_name().is_some_and(|name| !usable.contains(&name));
        }
        let gpus: Vec<_> = gpus.iter().map(String::as_str).collect();
        let names = Topology::new(&devices, &self.overrides)?.names_for(&gpus);
        Ok(names.into_iter().map(Into::into).collect())
    }
}

struct Entry {
    name: String,
    real: PathBuf,
}

/// The part of a path from the root complex to the innermost PCI function, and the folder of that. A root complex is
/// `pciDDDD:BB`, at times below other buses (ACPI, VMBus, a device tree). `None` if there is no function.
fn bus_path(real: &Path) -> Option<(String, PathBuf)> {
    let steps: Vec<_> = real.iter().map(|step| step.to_str().unwrap_or_default()).collect();
    let root = steps.iter().position(|step| step.starts_with("pci") && step.contains(':'))?;
    let last = steps.iter().rposition(|step| is_address(step)).filter(|last| *last > root)?;
    let path = steps.get(root..=last)?.join("/");
    Some((path, real.iter().take(last.checked_add(1)?).collect()))
}

/// Whether it is a PCI address, `DDDD:BB:DD.F`.
fn is_address(step: &str) -> bool {
    let hex = |text: &str, least: usize| {
        text.len() >= least && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let mut parts = step.split([':', '.']);
    let mut next = |least| parts.next().is_some_and(|part| hex(part, least));
    next(4) && next(2) && next(2) && next(1) && parts.next().is_none()
}

/// Sorts by PCI address, whatever the way to it; longer domains later; what is on no bus last.
fn order(path: &str) -> (bool, usize, String) {
    let address = path.rsplit('/').next().unwrap_or_default();
    (!is_address(address), address.len(), address.to_owned())
}

/// Mbit/s of a rate as the kernel words it: `400 Gb/sec (4X NDR)`, `2.5 Gb/sec (1X SDR)`.
fn rate_mbit(text: &str) -> Option<u32> {
    let (gigabits, _) = text.split_once(" Gb/sec")?;
    let (whole, tenths) = gigabits.split_once('.').unwrap_or((gigabits, "0"));
    let (whole, tenths) = (whole.parse::<u32>().ok()?, tenths.get(..1)?.parse::<u32>().ok()?);
    whole.checked_mul(1000)?.checked_add(tenths.checked_mul(100)?)
}

fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// A number that the kernel knows: it says -1 where it does not.
fn number<N: std::str::FromStr>(path: &Path) -> Option<N> {
    text(path)?.parse().ok()
}

#[cfg(test)]
mod tests;
