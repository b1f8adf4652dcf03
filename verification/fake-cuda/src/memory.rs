//! Memory: which addresses mean what, to which GPU.
//!
//! A GPU's memory is a memfd. The program is given addresses at which nothing is mapped, as the CPU has no business
//! there; kernels and copies go through a second mapping, the *shadow*, which the program does not know of. Host memory
//! that is pinned or registered is its own shadow.
//!
//! # Invariants
//!
//! 1. Live ranges do not overlap.
//! 2. Whoever holds an `Arc<Range>` may use its shadow: it is unmapped when the last one goes. Work holds those of the
//!    memory that it uses, so that a count above the table's own says that memory is in use.
//! 3. Nothing but [`Table`]'s owner (`world`, behind its lock) adds or removes ranges.

use crate::code::{self, Answer};
use crate::config;
use crate::violation::broken;
use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What addresses and sizes of memory that is mapped by hand are multiples of; what all memory of a GPU starts at.
pub(crate) const GRANULE: u64 = 2 << 20;
/// New memory holds this, not zeroes, as far as [`SPOILT_BYTES`]: nobody may count on zeroes.
const SPOILT: u8 = 0xa5;
const SPOILT_BYTES: u64 = 64 << 10;
/// In front of the GPU's number, in the name of the file that is its memory.
const FILE_NAME: &str = "fake-cuda-gpu-";

pub(crate) fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Addresses that nothing is mapped at, with room on both sides that nobody is given.
#[derive(Debug)]
pub(crate) struct Reserved {
    whole: u64,
    whole_bytes: u64,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

impl Reserved {
    /// `multiple` is a power of two.
    pub(crate) fn new(bytes: u64, multiple: u64) -> Answer<Self> {
        let multiple = multiple.max(GRANULE);
        let whole_bytes = multiple
            .checked_mul(2)
            .and_then(|room| bytes.checked_next_multiple_of(GRANULE)?.checked_add(room))
            .ok_or(code::OUT_OF_MEMORY)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let whole = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                size(whole_bytes),
                ProtFlags::empty(),
                flags,
            )
        };
        let whole = whole.map_err(|_| code::OUT_OF_MEMORY)? as u64;
        Ok(Self { whole, whole_bytes, start: (whole + 1).next_multiple_of(multiple), bytes })
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody is given these addresses any more.
        let _ = unsafe { rustix::mm::munmap(self.whole as *mut _, size(self.whole_bytes)) };
    }
}

/// A GPU's memory: a file, and where kernels and copies reach it.
#[derive(Debug)]
pub(crate) struct Backing {
    pub(crate) file: OwnedFd,
    pub(crate) inode: u64,
    pub(crate) bytes: u64,
    /// The GPU's number on the machine.
    pub(crate) gpu: u8,
    /// Whether it was made to be sent to other processes.
    pub(crate) by_descriptor: bool,
    /// What `cuMemCreate` and its like call it.
    pub(crate) handle: u64,
    shadow: u64,
}

impl Backing {
    pub(crate) fn new(gpu: u8, bytes: u64) -> Answer<Self> {
        let file = rustix::fs::memfd_create(format!("{FILE_NAME}{gpu}"), MemfdFlags::CLOEXEC);
        let file = file.map_err(|_| code::OUT_OF_MEMORY)?;
        rustix::fs::ftruncate(&file, bytes).map_err(|_| code::OUT_OF_MEMORY)?;
        let backing = Self::of(file)?;
        // SAFETY: the shadow was mapped just now, of as many bytes, and nobody else knows of it.
        unsafe {
            ptr::write_bytes(backing.shadow as *mut u8, SPOILT, size(bytes.min(SPOILT_BYTES)));
        }
        Ok(backing)
    }

    /// Memory that somebody's [`Backing::new`] made, wherever the file comes from.
    pub(crate) fn of(file: OwnedFd) -> Answer<Self> {
        use std::os::fd::AsRawFd as _;
        let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let link = link.map_err(|_| code::INVALID_VALUE)?;
        let name = link.to_str().and_then(|link| link.strip_prefix("/memfd:"));
        let gpu = name
            .and_then(|name| name.strip_prefix(FILE_NAME)?.split(' ').next()?.parse().ok())
            .ok_or(code::INVALID_VALUE)?;
        let stat = rustix::fs::fstat(&file).map_err(|_| code::INVALID_VALUE)?;
        let bytes = u64::try_from(stat.st_size).map_err(|_| code::INVALID_VALUE)?;
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let shadow = unsafe {
            rustix::mm::mmap(ptr::null_mut(), size(bytes), both, MapFlags::SHARED, &file, 0)
        };
        let shadow = shadow.map_err(|_| code::OUT_OF_MEMORY)? as u64;
        static MADE: AtomicU64 = AtomicU64::new(1);
        let handle = MADE.fetch_add(1, Ordering::Relaxed);
        Ok(Self { file, inode: stat.st_ino, bytes, gpu, by_descriptor: false, handle, shadow })
    }

    /// Marks it as open by this process, until its file is closed: `file` is an opening of our own, not one that was
    /// sent. False if the owner is freeing it.
    pub(crate) fn lock(&self) -> bool {
        rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockShared).is_ok()
    }

    /// Whether another process has it open by a handle.
    fn is_open_elsewhere(&self) -> bool {
        let locked = rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive);
        locked == Err(Errno::WOULDBLOCK)
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`; no range has it any more, and so no work.
        let _ = unsafe { rustix::mm::munmap(self.shadow as *mut _, size(self.bytes)) };
    }
}

/// Opens the file that another process has as `number`.
pub(crate) fn open_file_of(process: u32, number: u32) -> Answer<OwnedFd> {
    let path = format!("/proc/{process}/fd/{number}");
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|_| code::INVALID_VALUE)
}

/// Another descriptor of the same opening.
pub(crate) fn duplicate(file: impl AsFd) -> Answer<OwnedFd> {
    file.as_fd().try_clone_to_owned().map_err(|_| code::OPERATING_SYSTEM)
}

/// Pages of the host.
#[derive(Debug)]
pub(crate) struct HostPages {
    pub(crate) start: u64,
    bytes: u64,
}

impl HostPages {
    pub(crate) fn new(bytes: u64) -> Answer<Self> {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let start = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), size(bytes), both, MapFlags::PRIVATE)
        };
        let start = start.map_err(|_| code::OUT_OF_MEMORY)?.cast::<u8>();
        // SAFETY: mapped just now, of as many bytes.
        unsafe { ptr::write_bytes(start, SPOILT, size(bytes.min(SPOILT_BYTES))) };
        Ok(Self { start: start as u64, bytes })
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; the program frees it, and no work has it.
        let _ = unsafe { rustix::mm::munmap(self.start as *mut _, size(self.bytes)) };
    }
}

/// How memory came to be where it is.
#[derive(Debug)]
pub(crate) enum Kind {
    /// `cuMemAlloc`. None are reserved for what lies in the room behind another allocation.
    Allocated { backing: Arc<Backing>, _reserved: Option<Reserved> },
    /// `cuIpcOpenMemHandle`, by a context of GPU `by`.
    Opened { backing: Arc<Backing>, _reserved: Reserved, by: u8 },
    /// `cuMemMap`: two bits of access for each GPU, as `CUmemAccess_flags` has them.
    Mapped { backing: Arc<Backing>, access: AtomicU64 },
    /// `cuMemHostAlloc`.
    Pinned { _pages: HostPages },
    /// `cuMemHostRegister`.
    Registered,
    /// `cuMemAllocManaged`, of which only what the driver says is modelled: it stays in the host's memory.
    Managed { _pages: HostPages },
}

/// Live memory.
#[derive(Debug)]
pub(crate) struct Range {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
    /// The context that it goes with; none for memory that is mapped by hand.
    pub(crate) context: Option<u64>,
    /// Which memory of the process's life this is.
    pub(crate) number: u64,
    /// Copies from and to it are over when their calls return (`CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`).
    pub(crate) synchronous: AtomicBool,
}

impl Range {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes
    }

    /// The GPU whose memory it is.
    pub(crate) fn gpu(&self) -> Option<u8> {
        self.backing().map(|backing| backing.gpu)
    }

    pub(crate) fn backing(&self) -> Option<&Arc<Backing>> {
        match &self.kind {
            Kind::Allocated { backing, .. }
            | Kind::Opened { backing, .. }
            | Kind::Mapped { backing, .. } => Some(backing),
            Kind::Pinned { .. } | Kind::Registered | Kind::Managed { .. } => None,
        }
    }

    /// Where the byte at `address` is for us.
    pub(crate) fn shadow(&self, address: u64) -> *mut u8 {
        let start = self.backing().map_or(self.start, |backing| backing.shadow);
        (start + (address - self.start)) as *mut u8
    }

    /// Makes holes of `bytes` bytes from `address`, which read as zeroes; false: not possible.
    pub(crate) fn clear(&self, address: u64, bytes: u64) -> bool {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.backing().is_some_and(|backing| {
            rustix::fs::fallocate(&backing.file, hole, address - self.start, bytes).is_ok()
        })
    }

    /// Whether the access that was set for memory mapped by hand allows this.
    pub(crate) fn allows(&self, gpu: u8, write: bool) -> bool {
        let Kind::Mapped { access, .. } = &self.kind else { return true };
        let bits = access.load(Ordering::Relaxed) >> (2 * gpu) & 3;
        if write { bits == 3 } else { bits & 1 == 1 }
    }
}

/// All live memory of the process.
#[derive(Debug)]
pub(crate) struct Table {
    ranges: BTreeMap<u64, Arc<Range>>,
    made: u64,
    /// `(a, b)`: GPU `a` may reach what GPU `b` has allocated.
    pub(crate) peers: BTreeSet<(u8, u8)>,
}

impl Table {
    pub(crate) const fn new() -> Self {
        Self { ranges: BTreeMap::new(), made: 0, peers: BTreeSet::new() }
    }

    pub(crate) fn add(&mut self, start: u64, bytes: u64, kind: Kind, context: Option<u64>) {
        self.made += 1;
        let (number, synchronous) = (self.made, AtomicBool::new(false));
        let range = Range { start, bytes, kind, context, number, synchronous };
        self.ranges.insert(start, Arc::new(range));
    }

    /// What lives at `address`.
    pub(crate) fn at(&self, address: u64) -> Option<&Arc<Range>> {
        self.ranges.range(..=address).next_back().map(|r| r.1).filter(|r| address < r.end())
    }

    /// Whether `bytes` bytes from `start` go on in memory that adjoins what they begin in, and was allocated, or pinned, in another go. A driver's
    /// copy engine takes that of memory that is mapped by hand; of small allocations within one granule it is not known, and taken here.
    pub(crate) fn is_cut(&self, start: u64, bytes: u64) -> bool {
        let Some(first) = self.at(start).filter(|it| !matches!(it.kind, Kind::Mapped { .. }))
        else {
            return false;
        };
        let next = self.at(first.end()).filter(|_| start.saturating_add(bytes) > first.end());
        next.is_some_and(|next| next.backing().is_none() || next.start.is_multiple_of(GRANULE))
    }

    /// What overlaps `bytes` bytes from `start`, in order.
    pub(crate) fn within(&self, start: u64, bytes: u64) -> impl Iterator<Item = &Arc<Range>> {
        let end = start.saturating_add(bytes);
        let first = self.at(start).map_or(start, |range| range.start);
        self.ranges.range(first..end.max(first)).map(|r| r.1)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Range>> {
        self.ranges.values()
    }

    /// Whether GPU `gpu` has access to what lives there.
    pub(crate) fn is_reached(&self, gpu: u8, range: &Range, write: bool) -> bool {
        let reaches = |owner: u8| owner == gpu || self.peers.contains(&(gpu, owner));
        match &range.kind {
            Kind::Allocated { backing, .. } => reaches(backing.gpu),
            Kind::Opened { backing, by, .. } => {
                *by == gpu || (*by == backing.gpu && reaches(backing.gpu))
            }
            Kind::Mapped { .. } => range.allows(gpu, write),
            Kind::Pinned { .. } | Kind::Registered | Kind::Managed { .. } => true,
        }
    }

    /// What GPU `gpu` reaches at `address`; anything else is a violation, of `what`.
    pub(crate) fn reached(&self, gpu: u8, address: u64, write: bool, what: &str) -> &Arc<Range> {
        let Some(range) = self.at(address) else {
            broken!(NotMemory, "{what} {address:#x}, for GPU {gpu}");
        };
        if !self.is_reached(gpu, range, write) {
            broken!(NoAccess, "GPU {gpu} to the {what} {address:#x}, {range}");
        }
        range
    }

    /// Takes out what starts at `start`, of a kind that `is` one; anything else, or in use, is a violation of `call`.
    pub(crate) fn remove(&mut self, start: u64, call: &str, is: impl Fn(&Kind) -> bool) {
        match self.ranges.get(&start) {
            Some(range) if is(&range.kind) => range.must_be_idle(call),
            _ => broken!(FreedTwice, "{call} {start:#x}"),
        }
        self.ranges.remove(&start);
    }

    /// Takes out what goes with a context that is destroyed.
    pub(crate) fn retire(&mut self, context: u64) {
        self.ranges.retain(|_, range| {
            let goes = range.context == Some(context);
            if goes {
                range.must_be_idle("cuDevicePrimaryCtxRelease");
            }
            !goes
        });
    }
}

impl Range {
    /// No work uses it, and no other process; else a violation.
    fn must_be_idle(self: &Arc<Self>, call: &str) {
        if Arc::strong_count(self) > 1 {
            broken!(MemoryInUse, "{call}: {self}");
        }
        if let Kind::Allocated { backing, .. } = &self.kind
            && backing.is_open_elsewhere()
        {
            broken!(OpenElsewhere, "{call}: {self}");
        }
    }
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes from {:#x}", self.bytes, self.start)?;
        match &self.kind {
            Kind::Allocated { backing, .. } => write!(f, ", allocated on GPU {}", backing.gpu),
            Kind::Opened { backing, by, .. } => {
                write!(f, ", of GPU {}, opened by GPU {by}", backing.gpu)
            }
            Kind::Mapped { backing, .. } => write!(f, ", mapped, of GPU {}", backing.gpu),
            Kind::Pinned { .. } => f.write_str(", pinned host memory"),
            Kind::Registered => f.write_str(", registered host memory"),
            Kind::Managed { .. } => f.write_str(", managed"),
        }
    }
}

/// Whether GPU `a` can be given access to memory of GPU `b`.
pub(crate) fn can_reach(a: u8, b: u8) -> bool {
    a == b || config::get().is_ok_and(|config| config.peers)
}
