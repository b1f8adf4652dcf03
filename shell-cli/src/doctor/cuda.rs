//! Which GPUs the CUDA driver has, and which of them engines can use: asked by a child process.

use super::child::{self, Asked};
use crate::transport::cuda_advice;
use immwire_cuda::geometry::Tuning;
use immwire_cuda::{Copier, Device, Direct, Error, Stream, Uuid, kernels_built_in};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// The hidden subcommand under which this program is that child.
pub const CHILD_COMMAND: &str = "__probe-cuda";

/// What there is.
pub type Cuda = Asked<Gpus>;

/// What a driver has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpus {
    /// Whether this program was built with kernels for them.
    pub kernels: bool,
    /// The GDRCopy by which flags lie in GPUs' memory, or why they lie in the host's.
    pub flags: String,
    /// What `CUDA_DEVICE_MAX_CONNECTIONS` is, if it is set: hardware queues for the streams of each.
    pub connections: Option<String>,
    /// As `CUDA_VISIBLE_DEVICES` leaves them, by number.
    pub gpus: Vec<CudaGpu>,
}

/// A GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaGpu {
    /// For `--gpus`.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// What names it in every process.
    pub uuid: String,
    /// Address on the PCI bus.
    pub pci: String,
    /// Numbers of the others whose memory it reaches.
    pub reaches: Vec<u32>,
    /// Whether NICs reach its memory, and by what.
    pub nics: Nics,
    /// Why engines cannot use it.
    pub why_not: Option<String>,
    /// Whether it cannot even be opened.
    pub unopened: bool,
}

/// How NICs get at a GPU's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Nics {
    /// The driver says not at all.
    #[default]
    Never,
    /// By its address, for which the kernel needs `nvidia-peermem`: the driver has no DMA-BUF of it.
    ByAddress,
    /// By its DMA-BUF, or by its address.
    ByDmaBuf,
}

impl Gpus {
    /// Those that engines can use.
    pub fn usable(&self) -> impl Iterator<Item = &CudaGpu> {
        self.gpus.iter().filter(|gpu| gpu.why_not.is_none())
    }

    /// Those whose memory can be had, be there kernels for them or not.
    pub fn opened(&self) -> impl Iterator<Item = &CudaGpu> {
        self.gpus.iter().filter(|gpu| !gpu.unopened)
    }
}

/// The child's part: loads, asks, tries the kernels, prints. A context is made in each GPU, some tenths of a second.
///
/// # Errors
///
/// An I/O error of the standard output.
pub fn tell() -> std::io::Result<()> {
    let found = match survey() {
        Ok(gpus) => Cuda::Found(gpus),
        Err(error @ Error::NoDriver) => {
            let advice = cuda_advice(&error).unwrap_or_default();
            Cuda::NotFound(format!("{error}; {advice}"))
        }
        Err(error) => Cuda::Fails(error.to_string()),
    };
    child::say(&found)
}

fn survey() -> Result<Gpus, Error> {
    let opened: Vec<_> =
        (0..Device::count()?).map(|ordinal| (ordinal, Device::open(ordinal))).collect();
    let known: Vec<_> = opened.iter().filter_map(|(_, device)| device.as_ref().ok()).collect();
    let gpus = opened.iter().map(|(ordinal, device)| match device {
        Ok(device) => describe(device, &known),
        Err(error) => {
            let (ordinal, why_not) = (*ordinal, Some(error.to_string()));
            CudaGpu { ordinal, why_not, unopened: true, ..CudaGpu::default() }
        }
    });
    let flags = match immwire::gdrcopy_version() {
        Ok((major, minor)) => format!("in GPUs' memory, by GDRCopy {major}.{minor}"),
        Err(why) => format!("in pinned memory of the host: {why}"),
    };
    let connections = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
    Ok(Gpus { kernels: kernels_built_in(), flags, connections, gpus: gpus.collect() })
}

fn describe(device: &Device, all: &[&Device]) -> CudaGpu {
    let others = all.iter().filter(|other| other.ordinal() != device.ordinal());
    // That so many are reached already says nothing of an engine with fewer.
    let is_apart = |why| matches!(why, Error::NoPeerAccess { .. } | Error::TooManyPeers { .. });
    let reached = others.filter(|other| !device.reach(other).is_err_and(is_apart));
    let runs = Stream::new(device).and_then(|stream| Copier::new(&stream, Tuning::default()));
    CudaGpu {
        ordinal: device.ordinal(),
        name: device.name().unwrap_or_default(),
        uuid: device.uuid().map_or_else(|_| String::new(), |uuid| uuid_text(&uuid)),
        pci: device.pci_address().unwrap_or_default().to_ascii_lowercase(),
        reaches: reached.map(|other| other.ordinal()).collect(),
        nics: match device.direct() {
            Ok(Direct { reachable: true, dma_buf: true, .. }) => Nics::ByDmaBuf,
            Ok(Direct { reachable: true, .. }) => Nics::ByAddress,
            Ok(_) | Err(_) => Nics::Never,
        },
        why_not: runs.err().map(|error| error.to_string()),
        unopened: false,
    }
}

/// As `nvidia-smi -L` writes it.
fn uuid_text(uuid: &Uuid) -> String {
    let mut text = "GPU-".to_owned();
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_the_tools_of_the_driver_do() {
        let uuid = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255];
        assert_eq!(uuid_text(&uuid), "GPU-00010203-0405-0607-0809-0a0b0c0d0eff");
    }
}
