//! Words that the CPU stores to and kernels of a GPU look at: how a running kernel is told of something.
//!
//! With GDRCopy (gdrdrv's device, and its library, which is looked for at run time) they lie in the GPU's own memory, mapped for
//! the CPU: a kernel that spins on one reads its own memory, and a store takes the CPU no longer than any other. Without, they
//! lie in pinned host memory, where each look of the kernel's goes over the bus.
//!
//! # What it refuses to know
//!
//! What the numbers mean, and who looks at them.
//!
//! # Invariants
//!
//! - A flag is zero when it is handed out, and nobody else's until it is dropped.
//! - A page goes with the last of its flags: unmapped, unpinned, then freed; by a thread of the engine's, since the driver frees memory
//!   only when the GPU is idle.

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use gdrcopy_sys::{GPU_PAGE_SIZE, Library, gdr, gdr_info_v2, gdr_mh_t};
use immwire_cuda::{Device, DeviceMemory, Event, Stream};

use crate::provider::{GiveBack, PinnedPage, RegisterError};
use crate::sync::lock;
use crate::words::Word;

/// Flags do not share what a GPU fetches at once.
const FLAG_BYTES: usize = 64;
/// How long the zeroing of a page may take.
const ZEROED_WITHIN: Duration = Duration::from_secs(10);

/// Where a flag lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FlagPlace {
    /// In the GPU's memory, which GDRCopy has mapped.
    Gpu,
    /// In pinned memory of the host.
    Host {
        /// Why not in the GPU's.
        why: String,
    },
}

/// The version of the GDRCopy that flags would be mapped by.
///
/// # Errors
///
/// Why there is none: the library, or its kernel module.
pub fn gdrcopy_version() -> Result<(i32, i32), String> {
    let library = Library::load().map_err(|error| error.to_string())?;
    Driver::open(library).map(|_| library.version)
}

/// GDRCopy's device, open.
struct Driver {
    library: &'static Library,
    raw: NonNull<gdr>,
}

impl Driver {
    fn open(library: &'static Library) -> Result<Self, String> {
        // SAFETY: takes nothing; the handle is closed by `drop`.
        let raw = NonNull::new(unsafe { (library.symbols.gdr_open)() });
        let raw = raw.ok_or("gdrdrv's device cannot be opened: load the kernel module")?;
        Ok(Self { library, raw })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // SAFETY: ours, and what was pinned with it was unpinned before.
        unsafe { (self.library.symbols.gdr_close)(self.raw.as_ptr()) };
    }
}

/// Pinned memory of a GPU.
struct Pin {
    driver: Driver,
    handle: gdr_mh_t,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let Driver { library, raw } = &self.driver;
        // SAFETY: pinned with this driver, once, and not mapped any more.
        unsafe { (library.symbols.gdr_unpin_buffer)(raw.as_ptr(), self.handle) };
    }
}

/// Memory of a GPU, which whoever drops it does not wait for.
struct Given {
    /// Until it is dropped.
    memory: Option<DeviceMemory>,
    give_back: Option<GiveBack>,
}

impl Drop for Given {
    fn drop(&mut self) {
        match (self.memory.take(), &self.give_back) {
            (Some(memory), Some(give_back)) => give_back(Box::new(memory)),
            (memory, _) => drop(memory),
        }
    }
}

/// A page of a GPU's memory, mapped for the CPU.
struct MappedPage {
    pin: Pin,
    /// The mapping, and how long it is.
    mapping: (NonNull<c_void>, usize),
    /// Its first flag, for the CPU and for the GPU.
    cpu: NonNull<u8>,
    gpu: u64,
    /// Goes last.
    _memory: Given,
}

// SAFETY: addresses and handles, which no thread owns; words of the page are accessed as atomics.
unsafe impl Send for MappedPage {}
// SAFETY: as above.
unsafe impl Sync for MappedPage {}

impl MappedPage {
    fn new(device: &Device, give_back: Option<GiveBack>) -> Result<Self, String> {
        let library = Library::load().map_err(|error| error.to_string())?;
        let driver = Driver::open(library)?;
        let cuda = |error: immwire_cuda::Error| error.to_string();
        let stream = Stream::new(device).map_err(cuda)?;
        // Twice as much, so that a whole page is in it.
        let memory = DeviceMemory::zeroed(&stream, 2 * GPU_PAGE_SIZE).map_err(cuda)?;
        let gpu = memory.address().next_multiple_of(GPU_PAGE_SIZE as u64);
        let memory = Given { memory: Some(memory), give_back };
        let zeroed = Event::new(device).map_err(cuda)?;
        zeroed.record(&stream).and_then(|()| zeroed.wait(ZEROED_WITHIN)).map_err(cuda)?;
        immwire_cuda::prepare(device, gpu, GPU_PAGE_SIZE as u64).map_err(cuda)?;
        let call = |name: &str, errno: i32| match errno {
            0 => Ok(()),
            errno => Err(format!("{name}: {}", io::Error::from_raw_os_error(errno.abs()))),
        };
        let raw = driver.raw.as_ptr();
        let mut handle = gdr_mh_t::default();
        // SAFETY: an open driver, a range of memory that lives as long as the pin; writes the one handle.
        let pinned = unsafe {
            (library.symbols.gdr_pin_buffer)(raw, gpu, GPU_PAGE_SIZE, 0, 0, &raw mut handle)
        };
        call("gdr_pin_buffer", pinned)?;
        let pin = Pin { driver, handle };
        let mut info = gdr_info_v2::default();
        // SAFETY: a pin; writes the one structure, which has room for more.
        let told = unsafe { (library.symbols.gdr_get_info_v2)(raw, handle, &raw mut info) };
        call("gdr_get_info_v2", told)?;
        // The mapping may begin before what was asked for.
        let offset = gpu.checked_sub(info.va).and_then(|offset| usize::try_from(offset).ok());
        let bytes = usize::try_from(info.mapped_size).ok();
        let fits = |(offset, bytes): &(usize, usize)| {
            *bytes >= GPU_PAGE_SIZE && *offset <= bytes - GPU_PAGE_SIZE
        };
        let (offset, bytes) =
            offset.zip(bytes).filter(fits).ok_or("gdr_get_info_v2: not what was pinned")?;
        let mut mapped = ptr::null_mut();
        // SAFETY: a pin of so many bytes; writes the one address.
        let answer = unsafe { (library.symbols.gdr_map)(raw, handle, &raw mut mapped, bytes) };
        call("gdr_map", answer)?;
        let start = NonNull::new(mapped).ok_or("gdr_map: no address")?;
        // SAFETY: `offset` is inside of the mapping, with a page behind it.
        let cpu = unsafe { start.cast::<u8>().add(offset) };
        Ok(Self { pin, mapping: (start, bytes), cpu, gpu, _memory: memory })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset + 8 <= GPU_PAGE_SIZE && offset.is_multiple_of(8));
        // SAFETY: offsets are those that `Table::page` hands out, all inside of the page, which is mapped as long as `self` is
        // there; eight bytes at a multiple of 8, any bits of which are a number.
        unsafe { AtomicU64::from_ptr(self.cpu.as_ptr().add(offset).cast()) }
    }
}

impl Drop for MappedPage {
    fn drop(&mut self) {
        let Driver { library, raw } = &self.pin.driver;
        let (start, bytes) = self.mapping;
        // SAFETY: mapped by `new`, of so many bytes, and nobody has a flag in it any more.
        unsafe {
            (library.symbols.gdr_unmap)(raw.as_ptr(), self.pin.handle, start.as_ptr(), bytes)
        };
    }
}

#[derive(Clone)]
enum Place {
    Gpu { page: Arc<MappedPage>, offset: usize },
    Host { word: Word, why: Arc<str> },
}

impl Place {
    fn address(&self) -> u64 {
        match self {
            Self::Gpu { page, offset } => page.gpu + *offset as u64,
            Self::Host { word, .. } => word.address(),
        }
    }

    fn set(&self, value: u64) {
        match self {
            Self::Gpu { page, offset } => {
                // What was written to the host's memory before is there first: a store to memory that combines stores may appear to
                // come before earlier ones to other memory, though it is a release.
                flush_store();
                page.word(*offset).store(value, Ordering::Release);
                flush_store();
            }
            Self::Host { word, .. } => word.set(value),
        }
    }
}

/// Has a store to memory that combines stores go out now; one that follows, after all that came before.
#[inline]
fn flush_store() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64; nothing is accessed.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    fence(Ordering::SeqCst);
}

/// The flags of an engine that nobody has, by the GPU's number.
#[derive(Default)]
pub(crate) struct Flags {
    free: Mutex<Vec<(u32, Place)>>,
}

impl Flags {
    /// A flag for a GPU; `device` finds it, `pin` makes memory of the host, `give_back` says how the GPU's is given back.
    pub(crate) fn alloc(
        self: &Arc<Self>,
        ordinal: u32,
        device: impl FnOnce() -> Result<Device, RegisterError>,
        pin: impl FnOnce(usize) -> Result<PinnedPage, RegisterError>,
        give_back: impl FnOnce() -> Option<GiveBack>,
    ) -> Result<GpuFlag, RegisterError> {
        let free = || {
            let mut free = lock(&self.free);
            let at = free.iter().rposition(|(of, _)| *of == ordinal)?;
            Some(free.swap_remove(at).1)
        };
        let place = match free() {
            Some(place) => place,
            None => {
                // Without the lock: to make a page takes a while, and whoever drops a flag does not wait for that.
                let mut page = Self::page(&device()?, pin, give_back())?;
                // PROOF: a page has hundreds.
                let first = page.pop().ok_or(RegisterError::Empty)?;
                lock(&self.free).extend(page.into_iter().map(|place| (ordinal, place)));
                first
            }
        };
        let (flags, last) = (Arc::downgrade(self), AtomicU64::new(0));
        Ok(GpuFlag { ordinal, place, last, flags })
    }

    fn page(
        device: &Device,
        pin: impl FnOnce(usize) -> Result<PinnedPage, RegisterError>,
        give_back: Option<GiveBack>,
    ) -> Result<Vec<Place>, RegisterError> {
        match MappedPage::new(device, give_back) {
            Ok(page) => {
                let page = Arc::new(page);
                let offsets = (0..GPU_PAGE_SIZE).step_by(FLAG_BYTES);
                Ok(offsets.map(|offset| Place::Gpu { page: Arc::clone(&page), offset }).collect())
            }
            Err(why) => {
                tracing::debug!(%why, "flags lie in the host's memory");
                let why: Arc<str> = why.into();
                let words = Word::page(pin)?;
                Ok(words.map(|word| Place::Host { word, why: Arc::clone(&why) }).collect())
            }
        }
    }
}

/// A word that kernels of one GPU look at, and that the CPU stores to.
///
/// Kernels read it as what another processor changes: `ld.acquire.sys`, or through `volatile` with a fence. Dropping it makes
/// it another's: what looks at it must have ended before.
pub struct GpuFlag {
    ordinal: u32,
    place: Place,
    /// To read a GPU's memory would take a microsecond.
    last: AtomicU64,
    flags: Weak<Flags>,
}

impl GpuFlag {
    /// Where the word is, for the GPU; eight bytes at a multiple of 8. The CPU must not follow it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.place.address()
    }

    /// Which GPU's it is, as this process numbers them.
    #[must_use]
    pub const fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Where it lies.
    #[must_use]
    pub fn place(&self) -> FlagPlace {
        match &self.place {
            Place::Gpu { .. } => FlagPlace::Gpu,
            Place::Host { why, .. } => FlagPlace::Host { why: why.to_string() },
        }
    }

    /// Stores a number. Who sees it sees what this thread has written to the host's memory before; and of a GPU's what a count
    /// that it knows of announced. From any thread; of two at a time either is last.
    pub fn set(&self, value: u64) {
        self.last.store(value, Ordering::Relaxed);
        self.place.set(value);
    }

    /// What was stored last. Zero at first.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.last.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for GpuFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuFlag")
            .field("gpu", &self.ordinal)
            .field("address", &format_args!("{:#x}", self.address()))
            .field("value", &self.value())
            .finish()
    }
}

impl Drop for GpuFlag {
    fn drop(&mut self) {
        if let Some(flags) = self.flags.upgrade() {
            self.place.set(0);
            lock(&flags.free).push((self.ordinal, self.place.clone()));
        }
    }
}
