//! What RDMA devices this machine has, for people.

use ibverbs_sys::Library;
use immwire_core::device::{Calls, NoPaging};

use super::device::{Unfit, discover};
use super::forks::{self, Forks};
use super::{VerbsError, VerbsOptions};

/// A port of a device that an engine can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surveyed {
    /// Its name: the device's, `mlx5_0`, or `mlx5_0:2` where a device has several.
    pub device: String,
    /// Gigabits per second.
    pub speed_gbps: u32,
    /// Its longest packets, in bytes.
    pub mtu: u16,
    /// On Ethernet, or InfiniBand.
    pub is_ethernet: bool,
    /// What it lacks for memory that is not pinned ([`VerbsOptions::on_demand`]), if anything.
    pub pins: Option<NoPaging>,
    /// By which calls it is used, unless told otherwise ([`VerbsOptions::classic`]).
    pub calls: Calls,
}

/// What there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survey {
    /// Ports that fit, by name.
    pub devices: Vec<Surveyed>,
    /// Those that do not, and why.
    pub unfit: Vec<Unfit>,
    /// What becomes of registered memory if a process forks.
    pub forks: Forks,
}

/// Opens each port, and closes it again: some ms for each.
///
/// # Errors
///
/// [`VerbsError::Load`] without a libibverbs; or what it said when it was asked for devices. None at all is no error.
pub fn survey(options: &VerbsOptions) -> Result<Survey, VerbsError> {
    let (mut devices, mut unfit) = (Vec::new(), Vec::new());
    let library = Library::load()?;
    let forks = forks::prepare(library);
    for found in discover(library, options)? {
        match found.nic {
            Ok(device) => devices.push(Surveyed {
                device: device.name.clone(),
                speed_gbps: device.facts.speed_gbps,
                mtu: device.facts.port.mtu.bytes(),
                pins: device.facts.paging.check().err(),
                calls: device.calls(),
                is_ethernet: device.facts.port.kind != immwire_core::port::GidKind::Infiniband,
            }),
            Err(why) => unfit.push(why),
        }
    }
    Ok(Survey { devices, unfit, forks })
}
