//! What can go wrong, as values.

use cudarc::driver::sys::CUresult;
use std::fmt;
use std::time::Duration;

/// What the compiler of kernels that was found had to say as it failed, cut short; nothing if there was none, or it did not.
const COMPILER_FAILED: &str = include_str!(concat!(env!("OUT_DIR"), "/compiler_failed.txt"));

/// An answer of the driver other than success.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CudaCode(pub(crate) CUresult);

impl CudaCode {
    /// The number, as `CUresult` has it in `cuda.h`.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0 as u32
    }
}

impl fmt::Debug for CudaCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} ({})", self.0, self.number())
    }
}

/// Why something of this crate failed.
///
/// Unless the variant says otherwise nothing was enqueued and nothing is left behind. A [`Error::Driver`] may also be
/// the late report of an earlier launch that faulted; the context is then of no more use to anybody.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// No CUDA driver is installed here: `libcuda.so.1` cannot be loaded.
    NoDriver,
    /// The driver is too old: it lacks this function.
    DriverLacks {
        /// The function's name.
        symbol: &'static str,
    },
    /// The driver refused.
    Driver {
        /// The function that was called.
        call: &'static str,
        /// What it answered.
        code: CudaCode,
    },
    /// There is no such GPU.
    NoDevice {
        /// What was asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// This GPU cannot reach the other's memory.
    NoPeerAccess {
        /// The one that would read and write.
        from: u32,
        /// The one whose memory it is.
        to: u32,
    },
    /// The crate was built without a CUDA compiler, or with one that failed: it has no kernels.
    KernelsAbsent,
    /// The kernels have no code for this GPU.
    NoKernelsFor {
        /// The GPU's compute capability, major and minor.
        capability: (u32, u32),
    },
    /// What belongs to one GPU was used with another.
    WrongDevice {
        /// The one that it belongs to.
        belongs_to: u32,
        /// The one that it was used with.
        used_with: u32,
    },
    /// The request does not fit the kernel that was asked for, or any.
    Geometry(crate::geometry::GeometryError),
    /// There can be no such exchange of tokens.
    Shape(crate::moe::geometry::ShapeError),
    /// There is no such rank, or the inboxes given are not as many as ranks.
    NoRank {
        /// Which, or how many.
        rank: u32,
        /// Ranks there are.
        world: u32,
    },
    /// An address is not a multiple of what it must be.
    Misaligned {
        /// What it is the address of.
        what: &'static str,
        /// The address.
        address: u64,
        /// What it must be a multiple of.
        multiple: u64,
    },
    /// A range lies outside of the memory.
    OutOfBounds {
        /// First byte after the range.
        end: u64,
        /// Bytes that there are.
        bytes: u64,
    },
    /// Memory that somebody else of this process does not come back from pinning, or from unpinning.
    Busy {
        /// Its first byte.
        address: u64,
    },
    /// Host memory that was given back, or let go of, while what was pinned in one go with it was not: that keeps it pinned, too, as it was mapped then,
    /// and something else may be mapped there by now.
    LeftBehind {
        /// Its first byte.
        address: u64,
    },
    /// A GPU that does not use the CPU's addresses for host memory that is pinned where it lies.
    NoHostPointers {
        /// Which.
        ordinal: u32,
    },
    /// The driver keeps all callers waiting until what some thread of the process gives back to it is free, which a GPU that is busy uses: it was
    /// not asked.
    KeptWaiting {
        /// The GPU.
        ordinal: u32,
        /// For how long it was waited for that.
        after: Duration,
    },
    /// Not all of a range is allocated, or not all of it on one GPU.
    Hole {
        /// Its first byte that is not.
        address: u64,
        /// Bytes of it before that.
        before: u64,
        /// All bytes of it.
        bytes: u64,
        /// The GPU that has its first byte.
        ordinal: u32,
        /// The GPU that has the byte in question, if one does.
        other: Option<u32>,
    },
    /// A range lies over more allocations than a region may.
    TooManyAllocations {
        /// How many they are.
        count: u32,
        /// How many there may be.
        most: u32,
    },
    /// A range lies over several allocations, of which this one is not of `cuMemCreate`. Peers would open each by a handle of its
    /// own, at an address of the driver's choice, and nowhere as one range.
    Separate {
        /// Where it begins.
        address: u64,
        /// How many allocations the range lies over.
        allocations: u32,
    },
    /// The memory moves between the host and GPUs as it is used (`cuMemAllocManaged`): nobody could say where to write.
    Managed {
        /// Where.
        address: u64,
    },
    /// The allocation was made without leave to be used by other processes: from a pool, or with `cuMemCreate` but no
    /// handle type asked for.
    NotShareable {
        /// Where.
        address: u64,
    },
    /// The work was not done in time. It goes on.
    TimedOut {
        /// The time given.
        after: Duration,
    },
}

/// That there are no kernels, by what a compiler had to say.
struct Absence(&'static str);

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            "" => f.write_str(
                "built without a CUDA compiler, so there are no kernels: build it again with IMMWIRE_NVCC, or CUDA_HOME, telling where \
                 nvcc is (cuda/toolchain fetches one)",
            ),
            failed => write!(
                f,
                "there are no kernels: when this was built, {failed}; build it again with IMMWIRE_NVCC, or CUDA_HOME, telling where \
                 another nvcc is (cuda/toolchain fetches one)"
            ),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDriver => f.write_str("no CUDA driver: libcuda.so.1 cannot be loaded"),
            Self::DriverLacks { symbol } => write!(f, "the CUDA driver is too old: no {symbol}"),
            Self::Driver { call: call @ "cuMemExportToShareableHandle", code } => {
                write!(
                    f,
                    "{call}: {code:?}; it takes a file descriptor for each allocation, and the process may have no more (ulimit -n)"
                )
            }
            Self::Driver { call, code: code @ CudaCode(CUresult::CUDA_ERROR_NOT_INITIALIZED) } => {
                write!(
                    f,
                    "{call}: {code:?}; so CUDA answers a process that was forked by one that had begun to use it: start the process anew \
                     (multiprocessing's spawn), or have the parent begin with CUDA after it has forked"
                )
            }
            Self::Driver { call, code } => write!(f, "{call}: {code:?}"),
            Self::NoDevice { ordinal, count } => write!(f, "no GPU {ordinal}: there are {count}"),
            Self::NoPeerAccess { from, to } => {
                write!(f, "GPU {from} cannot reach the memory of GPU {to}")
            }
            Self::KernelsAbsent => Absence(COMPILER_FAILED).fmt(f),
            Self::NoKernelsFor { capability: (major, minor) } => {
                write!(
                    f,
                    "no kernels for compute capability {major}.{minor}: 8.0 and later are served, 8.9 and later where tokens are \
                     quantised"
                )
            }
            Self::WrongDevice { belongs_to, used_with } => {
                write!(f, "what belongs to GPU {belongs_to} was used with GPU {used_with}")
            }
            Self::Geometry(why) => why.fmt(f),
            Self::Shape(why) => why.fmt(f),
            Self::NoRank { rank, world } => {
                write!(f, "rank {rank}, or so many inboxes, of {world} ranks")
            }
            Self::Misaligned { what, address, multiple } => {
                write!(f, "the {what} at {address:#x} is not at a multiple of {multiple}")
            }
            Self::OutOfBounds { end, bytes } => {
                write!(f, "the range ends at {end} of {bytes} bytes")
            }
            Self::Busy { address } => {
                write!(
                    f,
                    "the driver has not come back from pinning, or unpinning, the host's memory at {address:#x}: it waits for what its \
                     GPUs are doing"
                )
            }
            Self::LeftBehind { address } => {
                write!(
                    f,
                    "the host's memory at {address:#x} stays pinned, as it was mapped when it was registered before, by another region that \
                     overlaps the one that it was in: close that first, and register it again"
                )
            }
            Self::NoHostPointers { ordinal } => {
                write!(
                    f,
                    "GPU {ordinal} does not use the CPU's addresses for host memory that is registered with its driver \
                     (CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 0), so none can be pinned for it: have an engine \
                     without GPUs for the host's memory"
                )
            }
            Self::KeptWaiting { ordinal, after } => {
                write!(
                    f,
                    "GPU {ordinal} has been busy for {after:?} with what uses memory that is being given back, for which its driver keeps \
                     callers waiting: nothing was done"
                )
            }
            Self::Hole { address, before, bytes, ordinal, other } => {
                write!(f, "the range of {bytes} bytes has {before} on GPU {ordinal}; ")?;
                match other {
                    Some(other) => {
                        write!(f, "what follows, at {address:#x}, is memory of GPU {other}")
                    }
                    None => write!(f, "what follows, at {address:#x}, is not allocated"),
                }?;
                f.write_str(": register what is of one GPU by itself")
            }
            Self::TooManyAllocations { count, most } => {
                let parts = count.div_ceil((*most).max(1));
                write!(
                    f,
                    "the range lies over {count} allocations, and one region may lie over {most}: register it in {parts} parts or \
                     more, or allocate it in larger pieces"
                )
            }
            Self::Separate { address, allocations } => {
                write!(
                    f,
                    "the range lies over {allocations} allocations, and the one at {address:#x} was not made by cuMemCreate, so \
                     that other processes cannot map them side by side: register each by itself"
                )
            }
            Self::Managed { address } => {
                write!(f, "the memory at {address:#x} is managed: use memory of one GPU, or pinned")
            }
            Self::NotShareable { address } => {
                write!(
                    f,
                    "the memory at {address:#x} was not allocated to be shared with other processes"
                )
            }
            Self::TimedOut { after } => write!(f, "not done within {after:?}; it goes on"),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number alone tells nobody what to do.
    #[test]
    fn a_forked_process_is_told_what_cuda_does_not_allow() {
        let code = |code| Error::Driver { call: "cuDeviceGetCount", code: CudaCode(code) };
        let forked = code(CUresult::CUDA_ERROR_NOT_INITIALIZED).to_string();
        let number = "cuDeviceGetCount: CUDA_ERROR_NOT_INITIALIZED (3); ";
        assert!(forked.starts_with(number), "{forked}");
        assert!(forked.contains("forked") && forked.contains("spawn"), "{forked}");
        let other = code(CUresult::CUDA_ERROR_INVALID_VALUE).to_string();
        assert_eq!(other, "cuDeviceGetCount: CUDA_ERROR_INVALID_VALUE (1)");
    }

    #[test]
    fn who_lacks_kernels_is_told_what_the_compiler_said() {
        let none = Absence("").to_string();
        assert!(none.starts_with("built without a CUDA compiler"), "{none}");
        let failed = Absence("/opt/nvcc cannot compile kernels/copy.cu: too old").to_string();
        assert!(failed.contains("when this was built, /opt/nvcc cannot"), "{failed}");
        assert!(!failed.contains("without"), "{failed}");
        assert_eq!(Error::KernelsAbsent.to_string(), Absence(COMPILER_FAILED).to_string());
    }
}
