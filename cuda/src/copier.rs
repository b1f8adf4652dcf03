//! Launches: a request becomes one launch of a kernel, or one copy of the copy engine and a launch that announces it.
//!
//! What is launched how is decided in [`crate::geometry`]; here are addresses, handles and lifetimes.
//!
//! # Invariants
//!
//! 1. The launches of one [`Copier`] are in one stream, so that they share one word of arrivals, and one of turns that were asked for: each
//!    finds both zero, and leaves them so (`kernels/copy.cu`).
//! 2. Kernels and these words live until every launch that uses them has ended: [`Copier`]'s drop waits, and as long as
//!    the stream is stuck nothing is freed ([`crate::stuck`]).

use crate::args::{self, CopyArgs, PagesArgs, ReleaseArgs, TurnsArgs};
use crate::device::{Device, Event, Stream};
use crate::driver::{check, cu};
use crate::error::Error;
use crate::geometry::{self, GeometryError, Kernel, Launch, Method, Plan, Shape, Tuning};
use crate::memory::DeviceMemory;
use crate::module::{Function, Module};
use crate::standby::Standby;
use crate::stuck;
use std::num::NonZeroU32;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

/// Where the word of turns is, behind that of arrivals: in a line of its own.
const ASKED_AT: u64 = 128;
const WORDS_BYTES: usize = 256;

/// The compiled kernels; empty where there was no compiler.
static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/copy.fatbin"));

/// Whether the crate was built with a CUDA compiler, and so has kernels.
#[must_use]
pub const fn kernels_built_in() -> bool {
    !IMAGE.is_empty()
}

/// Where the pages of one side are: page `i` starts at `base + stride * index(i)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pages {
    /// Address of the page of index 0.
    pub base: u64,
    /// Bytes from one index to the next.
    pub stride: u64,
    /// Address of one `u32` for each page, its index, in memory that the GPU reaches; `None`: the page's own number.
    /// Pinned host memory will do: each entry is read once, 32 at a time.
    pub table: Option<u64>,
}

/// A request: pages from anywhere to anywhere that the GPU reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagedCopy {
    /// Where pages are read.
    pub source: Pages,
    /// Where pages are written.
    pub target: Pages,
    /// Bytes of each page.
    pub page_bytes: u64,
    /// Pages.
    pub page_count: u32,
}

impl PagedCopy {
    /// One range of `bytes` bytes.
    #[must_use]
    pub const fn contiguous(source: u64, target: u64, bytes: u64) -> Self {
        Self {
            source: Pages { base: source, stride: 0, table: None },
            target: Pages { base: target, stride: 0, table: None },
            page_bytes: bytes,
            page_count: 1,
        }
    }

    fn shape(&self, adds: bool) -> Shape {
        let plain = |p: &Pages| p.table.is_none();
        let contiguous = self.page_count == 1 && plain(&self.source) && plain(&self.target);
        let sides =
            [&self.source, &self.target].map(|p| p.base | if contiguous { 0 } else { p.stride });
        let bits = sides.iter().fold(self.page_bytes, |bits, side| bits | side);
        // The lowest bit that is set in any of them; all zero is a multiple of everything.
        let multiple = bits & bits.wrapping_neg();
        let (page_bytes, page_count) = (self.page_bytes, self.page_count);
        Shape { page_bytes, page_count, multiple, contiguous, adds }
    }
}

/// What is announced once every byte is visible to the whole system: to whoever acquires the word at system scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Release {
    /// Nothing: the stream's order tells.
    #[default]
    Nothing,
    /// The word becomes `value`. One writer at a time. In memory of a GPU or of the host.
    Store {
        /// Address of a `u64`.
        word: u64,
        /// What it becomes.
        value: u64,
    },
    /// `amount` is added, atomically among GPUs. In host memory it is atomic for the CPU's own writes only where
    /// [`Device::host_atomics`] says so.
    Add {
        /// Address of a `u64`.
        word: u64,
        /// What is added; the sum wraps.
        amount: u64,
    },
}

/// What was enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// By the copy engine; a launch of one block announces it, if anything is announced.
    CopyEngine,
    /// By this launch.
    Launch(Launch),
}

/// Copies in the order of one stream.
#[derive(Debug)]
pub struct Copier {
    stream: Stream,
    tuning: Tuning,
    kernels: Arc<Kernels>,
    /// Of arrivals, and of turns that were asked for.
    words: DeviceMemory,
    /// It was waited for in vain.
    is_stuck: bool,
}

impl Copier {
    /// Loads the kernels into the GPU of `stream`, whose order all requests are done in.
    ///
    /// Some milliseconds; some hundred where the driver has to compile for a GPU later than Hopper.
    ///
    /// # Errors
    ///
    /// [`Error::KernelsAbsent`], [`Error::NoKernelsFor`], or what the driver answers.
    pub fn new(stream: &Stream, tuning: Tuning) -> Result<Self, Error> {
        let kernels = Arc::new(Kernels::load(stream.device())?);
        let words = DeviceMemory::zeroed(stream, WORDS_BYTES)?;
        Ok(Self { stream: stream.clone(), tuning, kernels, words, is_stuck: false })
    }

    /// Another, in the order of another stream of the same GPU's: the kernels are there already.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn beside(&self) -> Result<Self, Error> {
        let stream = Stream::new(self.stream.device())?;
        let words = DeviceMemory::zeroed(&stream, WORDS_BYTES)?;
        let (tuning, kernels) = (self.tuning, Arc::clone(&self.kernels));
        Ok(Self { stream, tuning, kernels, words, is_stuck: false })
    }

    /// The stream that requests are enqueued in.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Waits until the stream has done all that it was given, for `limit` at most. `false`: it is stuck, and until it has nothing that this
    /// crate has made is freed, but kept for good when it is dropped.
    pub fn settle(&mut self, limit: Duration) -> bool {
        self.is_stuck = !settle(&self.stream, limit);
        !self.is_stuck
    }

    /// Seats of warps that stand by, in a stream of their own, on the same GPU.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn standby(&self) -> Result<Standby, Error> {
        Standby::new(Stream::new(self.stream.device())?, Arc::clone(&self.kernels))
    }

    /// Enqueues a request, on at most `sms` SMs, and what it announces. Waits for nothing; a few microseconds.
    ///
    /// # Safety
    ///
    /// From now until the request has ended (an event recorded after it is done, or its word has been acquired):
    ///
    /// - every page and table of `copy`, and the word of `release`, lie in memory that the GPU of the stream reaches, and
    ///   that stays allocated and mapped;
    /// - nobody writes the source pages and tables, and nobody reads or writes the target pages;
    /// - no target page overlaps another, a source page, or a table;
    /// - nobody else stores to a word of [`Release::Store`].
    ///
    /// # Errors
    ///
    /// Nothing was enqueued; or, if the copy engine was to copy and the launch that announces was refused, the copy alone.
    pub unsafe fn submit(
        &self,
        copy: &PagedCopy,
        release: Release,
        method: Method,
        sms: NonZeroU32,
    ) -> Result<Submitted, Error> {
        let release = self.release(release)?;
        for side in [&copy.source, &copy.target] {
            if let Some(address) = side.table.filter(|table| !table.is_multiple_of(4)) {
                return Err(Error::Misaligned { what: "page table", address, multiple: 4 });
            }
        }
        let gpu = self.stream.device().gpu();
        let shape = copy.shape(release.kind == args::RELEASE_ADD);
        let plan =
            |method| geometry::plan(shape, method, sms, gpu, &self.tuning).map_err(Error::Geometry);
        let first = plan(method)?;
        let _current = self.stream.device().enter()?;
        match first {
            Plan::Launch(launch) => {
                // SAFETY: the layout is that of this request; the rest is our caller's promise.
                unsafe { self.launch(copy, release, launch)? };
                Ok(Submitted::Launch(launch))
            }
            Plan::CopyEngine => {
                let bytes = usize::try_from(copy.page_bytes).unwrap_or(usize::MAX);
                // SAFETY: one range on both sides; the rest is our caller's promise. Unified addressing tells the driver
                // where the two are.
                let enqueued = unsafe {
                    cu::cuMemcpyAsync(
                        copy.target.base,
                        copy.source.base,
                        bytes,
                        self.stream.handle(),
                    )
                };
                // The driver takes no range over two of its allocations, or over host memory that was pinned in two goes, though they
                // adjoin (seen on 580.159.04; of memory that is mapped by hand it does). To a kernel addresses are addresses.
                if enqueued == cu::CUresult::CUDA_ERROR_INVALID_VALUE
                    && method == Method::Auto
                    && let Plan::Launch(launch) = plan(Method::Launch)?
                {
                    // SAFETY: as above; nothing was enqueued.
                    unsafe { self.launch(copy, release, launch)? };
                    return Ok(Submitted::Launch(launch));
                }
                check("cuMemcpyAsync", enqueued)?;
                // SAFETY: the context is current; the word is our caller's promise.
                unsafe { self.announce(release)? };
                Ok(Submitted::CopyEngine)
            }
        }
    }

    /// Announces what is in the stream so far.
    ///
    /// # Safety
    ///
    /// The context is current, and the word as [`Copier::submit`] asks for it.
    unsafe fn announce(&self, release: ReleaseArgs) -> Result<(), Error> {
        if release.kind == args::RELEASE_NONE {
            return Ok(());
        }
        if release.kind == args::RELEASE_STORE {
            // By default a fence of the whole stream, at system scope, comes before the write (CUDA driver API,
            // "Stream Memory Operations"). It costs less than a launch.
            let fenced = cu::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
            let (word, value) = (release.word, release.value);
            // SAFETY: the stream is alive; the word is our caller's promise.
            let answer =
                unsafe { cu::cuStreamWriteValue64_v2(self.stream.handle(), word, value, fenced) };
            match answer {
                // Not every GPU can, nor reach all memory so. A kernel can.
                cu::CUresult::CUDA_ERROR_NOT_SUPPORTED | cu::CUresult::CUDA_ERROR_INVALID_VALUE => {
                }
                answer => return check("cuStreamWriteValue64", answer),
            }
        }
        let nothing = PagedCopy { page_count: 0, ..PagedCopy::contiguous(0, 0, 0) };
        let gpu = self.stream.device().gpu();
        let layout =
            geometry::plan(nothing.shape(false), Method::Auto, NonZeroU32::MIN, gpu, &self.tuning);
        match layout.map_err(Error::Geometry)? {
            // SAFETY: reads and writes nothing but the word, after all that is before it in the stream.
            Plan::Launch(launch) => unsafe { self.launch(&nothing, release, launch) },
            // Never for no bytes; if ever, then it must not pass for an announcement.
            Plan::CopyEngine => {
                Err(Error::Geometry(GeometryError::NotContiguous { page_count: 0 }))
            }
        }
    }

    fn release(&self, release: Release) -> Result<ReleaseArgs, Error> {
        let (kind, word, value) = match release {
            Release::Nothing => return Ok(ReleaseArgs::default()),
            Release::Store { word, value } => (args::RELEASE_STORE, word, value),
            Release::Add { word, amount } => (args::RELEASE_ADD, word, amount),
        };
        if !word.is_multiple_of(8) {
            return Err(Error::Misaligned { what: "word", address: word, multiple: 8 });
        }
        Ok(ReleaseArgs { word, value, arrivals: self.words.address(), kind, reserved: 0 })
    }

    /// # Safety
    ///
    /// As [`Copier::submit`], and `launch` is the layout of `copy` on this GPU, whose context is current.
    unsafe fn launch(
        &self,
        copy: &PagedCopy,
        release: ReleaseArgs,
        launch: Launch,
    ) -> Result<(), Error> {
        let side =
            |p: &Pages| PagesArgs { base: p.base, stride: p.stride, table: p.table.unwrap_or(0) };
        let mut args = CopyArgs {
            source: side(&copy.source),
            target: side(&copy.target),
            release,
            page_bytes: copy.page_bytes,
            piece_bytes: launch.piece_bytes,
            pieces_per_page: launch.pieces_per_page,
            piece_count: launch.piece_count,
            page_count: copy.page_count,
            stage_bytes: launch.stage_bytes,
            stage_count: launch.stage_count,
            turns: TurnsArgs {
                asked: self.words.address() + ASKED_AT,
                dealt: launch.turns.dealt,
                pieces: launch.turns.pieces,
                count: launch.turns.count,
                reserved: 0,
            },
        };
        let function = self.kernels.function(launch.kernel);
        let mut parameters = [(&raw mut args).cast()];
        // SAFETY: the function takes one `CopyArgs` by value (asserted equal on both sides), which the driver copies
        // before it returns; grid, block and shared memory are within the kernel's limits (`geometry`, invariant 3); the
        // function and the stream are of the context that is current; memory is our caller's promise.
        let launched = unsafe {
            cu::cuLaunchKernel(
                function,
                launch.blocks,
                1,
                1,
                launch.threads,
                1,
                1,
                launch.shared_bytes,
                self.stream.handle(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", launched)
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        /// Launches end by themselves; this is for a stream that waits for what never comes.
        const LIMIT: Duration = Duration::from_secs(5);
        self.settle(if self.is_stuck { Duration::ZERO } else { LIMIT });
    }
}

/// Waits until a stream has done what it was given. `false`: not within `limit`, and until it has nothing is freed ([`stuck`]).
pub(crate) fn settle(stream: &Stream, limit: Duration) -> bool {
    let recorded =
        Event::new(stream.device()).and_then(|event| event.record(stream).map(|()| event));
    // A context that has failed does nothing any more.
    let Ok(event) = recorded else { return true };
    let is_stuck = matches!(event.wait(limit), Err(Error::TimedOut { .. }));
    if is_stuck {
        stuck::give_up(event);
    }
    !is_stuck
}

/// The kernels, loaded into one GPU.
#[derive(Debug)]
pub(crate) struct Kernels {
    _module: Module,
    any: Function,
    vector: Function,
    bulk: Function,
    standby: Function,
}

impl Kernels {
    fn load(device: &Device) -> Result<Self, Error> {
        let module = Module::load(device, IMAGE)?;
        let any = module.function(c"immwire_copy_any")?;
        let vector = module.function(c"immwire_copy_vector")?;
        let bulk = module.function(c"immwire_copy_bulk")?;
        let standby = module.function(c"immwire_standby")?;
        let room = device.gpu().bulk_shared_bytes();
        if room > 0 {
            module.allow_shared(bulk, room)?;
        }
        Ok(Self { _module: module, any, vector, bulk, standby })
    }

    pub(crate) fn standby(&self) -> Function {
        self.standby
    }

    fn function(&self, kernel: Kernel) -> cu::CUfunction {
        let function = match kernel {
            Kernel::Any => self.any,
            Kernel::Vector => self.vector,
            Kernel::Bulk => self.bulk,
        };
        function.handle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(bases: (u64, u64), strides: (u64, u64), page_bytes: u64) -> PagedCopy {
        let side = |base, stride| Pages { base, stride, table: Some(64) };
        let (source, target) = (side(bases.0, strides.0), side(bases.1, strides.1));
        PagedCopy { source, target, page_bytes, page_count: 9 }
    }

    #[test]
    fn the_least_aligned_number_decides() {
        let multiple = |copy: PagedCopy| copy.shape(false).multiple;
        assert_eq!(multiple(copy((4096, 8192), (4096, 1 << 20), 4096)), 4096);
        assert_eq!(multiple(copy((4096 + 16, 8192), (4096, 4096), 4096)), 16);
        assert_eq!(multiple(copy((4096, 8192 + 1), (4096, 4096), 4096)), 1);
        assert_eq!(multiple(copy((4096, 8192), (4100, 4096), 4096)), 4);
        assert_eq!(multiple(copy((4096, 8192), (4096, 4104), 4096)), 8);
        assert_eq!(multiple(copy((4096, 8192), (4096, 4096), 704)), 64);
        assert_eq!(multiple(copy((0, 0), (0, 0), 0)), 0);
    }

    #[test]
    fn one_page_without_tables_is_one_range() {
        let range = PagedCopy::contiguous(256, 512, 1024);
        assert!(range.shape(true).contiguous && range.shape(true).adds);
        // The stride of a single range is of no matter.
        let odd = PagedCopy { source: Pages { stride: 3, ..range.source }, ..range };
        assert_eq!(odd.shape(false).multiple, 256);
        let listed = PagedCopy { source: Pages { table: Some(64), ..range.source }, ..range };
        assert!(!listed.shape(false).contiguous);
        assert!(!PagedCopy { page_count: 2, ..range }.shape(false).contiguous);
    }
}
