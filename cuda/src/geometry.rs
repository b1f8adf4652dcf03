//! How a copy is laid out over the GPU: by what, on how many SMs, in which pieces.
//!
//! Pure arithmetic on sizes; no address, no device, no allocation. The figures in [`Tuning`] were measured
//! (`benches/results/`), and only decide between ways that are all right.
//!
//! # Invariants
//!
//! 1. The pieces of a page, in order, cover it exactly: `pieces_per_page = ceil(page_bytes / piece_bytes)`.
//! 2. [`share`] deals the first pieces to the warps of a launch, and [`Turns::turn`] makes turns of the others: each piece is dealt to one
//!    warp, or is in one turn. The kernels have the same functions.
//! 3. Every launch keeps the limits that `kernels/immwire_cuda.h` names: grid, threads, shared memory, stages, multiples
//!    of 16.
//!
//! The tests below enumerate all three over small requests, and try the limits of the large ones.

use crate::args;
use std::fmt;
use std::num::NonZeroU32;

/// What the bulk kernel's barriers take of shared memory.
const BULK_BARRIER_BYTES: u32 = args::BULK_WARPS * args::BULK_MAX_STAGES * 8;

/// What the bulk kernel may use of shared memory beside its barriers where there is most of it, on compute capability 9.0.
pub const BULK_SHARED_BYTES: u32 = 227 * 1024 - BULK_BARRIER_BYTES;

/// The multiple that addresses and sizes must be of for all but [`Kernel::Any`].
pub const ALIGNED_BYTES: u64 = 16;

/// A cache line. The bulk kernel loses a third where pages cut through lines, the others hardly anything.
pub const LINE_BYTES: u64 = 128;

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Any address and size; the slowest.
    Any,
    /// 16 bytes a thread, through registers. Addresses and sizes are multiples of 16.
    Vector,
    /// Whole pieces through shared memory, by the SM's copy unit. Multiples of 16; compute capability 9.0.
    Bulk,
}

/// SMs that fill a link of NVLink 4 with pages of 4 KiB and more: between two H200s 8 carry 341 to 353 GB/s, 10 carry 348 to 369, and all
/// 132 carry 353 to 369 (`benches/README.md`).
pub const DEFAULT_SMS: NonZeroU32 = NonZeroU32::new(10).unwrap();

/// By what a request is to be copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Method {
    /// What was measured to be quickest for its size.
    #[default]
    Auto,
    /// The kernel that was measured to be quickest.
    Launch,
    /// This kernel.
    Kernel(Kernel),
    /// The GPU's copy engine, which takes no SM; one range only.
    CopyEngine,
}

/// What of a request matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of each page.
    pub page_bytes: u64,
    /// Pages.
    pub page_count: u32,
    /// What every page on both sides starts at a multiple of, and is as long as a multiple of: a power of two, or more.
    pub multiple: u64,
    /// Whether it is one range on both sides.
    pub contiguous: bool,
    /// Whether a number is to be added in the end: the copy engine needs a launch after it for that.
    pub adds: bool,
}

/// What of a GPU matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpu {
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Shared memory that a block may have, if it asks: 227 KiB on compute capability 9.0, 99 KiB on 8.9 and 12.0.
    pub shared_bytes: u32,
}

impl Gpu {
    /// What the bulk kernel may use beside its barriers; 0 where there is no such kernel.
    pub(crate) const fn bulk_shared_bytes(self) -> u32 {
        let room = self.shared_bytes.saturating_sub(BULK_BARRIER_BYTES);
        match self.capability.0 >= 9 {
            true if room < BULK_SHARED_BYTES => room,
            true => BULK_SHARED_BYTES,
            false => 0,
        }
    }
}

/// Where one way of copying takes over from another, and the sizes of pieces.
///
/// The defaults were measured between two H200s (`benches/results/`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// One range of as many bytes goes by the copy engine: it takes no SM, starts sooner than a launch, and is a tenth
    /// quicker in the end.
    pub copy_engine_from_bytes: u64,
    /// The same, if a number is to be added: the launch that adds it costs what a copy of many MiB takes.
    pub copy_engine_adds_from_bytes: u64,
    /// Requests of as many bytes go by the bulk kernel, if its conditions are met, and pages are whole lines.
    pub bulk_from_bytes: u64,
    /// Pages of as many bytes, likewise: shorter ones leave its copy unit waiting.
    pub bulk_page_from_bytes: u64,
    /// The longest piece of the bulk kernel; a multiple of 128.
    pub bulk_piece_bytes: u32,
    /// Pieces in flight for each of its warps.
    pub bulk_stages: u32,
    /// The longest piece of the other two; a multiple of 16.
    pub vector_piece_bytes: u32,
    /// From so many pieces a warp on half of them are dealt, the others make up turns: who is slower, as others of its part of the GPU
    /// want the same way out of it, makes fewer.
    pub turns_from_pieces: u32,
    /// Pieces of a turn: those of as many whole pages as there are in so many, or of one; but none is longer than twice that, nor than
    /// [`args::TURN_MAX_PIECES`]. 0: there are no turns.
    pub turn_pieces: u32,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            copy_engine_from_bytes: 1,
            copy_engine_adds_from_bytes: 32 << 20,
            bulk_from_bytes: 1 << 20,
            bulk_page_from_bytes: 4 << 10,
            bulk_piece_bytes: 4 << 10,
            bulk_stages: 6,
            vector_piece_bytes: 4 << 10,
            turns_from_pieces: 32,
            turn_pieces: 8,
        }
    }
}

/// How a request is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// By the copy engine.
    CopyEngine,
    /// By this launch.
    Launch(Launch),
}

/// One launch, but for addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Blocks of the grid. No SM runs two of them while another has none, so these are SMs.
    pub blocks: u32,
    /// Threads of each block.
    pub threads: u32,
    /// Dynamic shared memory of each block.
    pub shared_bytes: u32,
    /// Bytes of each piece, but for the last of a page.
    pub piece_bytes: u32,
    /// Pieces of each page.
    pub pieces_per_page: u32,
    /// Pieces of all pages.
    pub piece_count: u32,
    /// Bulk: shared memory of each piece in flight.
    pub stage_bytes: u32,
    /// Bulk: pieces in flight for each warp.
    pub stage_count: u32,
    /// Who copies which.
    pub turns: Turns,
}

/// Who copies which pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turns {
    /// Pieces that are dealt ([`share`]), the first of all; all if there are no turns.
    pub dealt: u32,
    /// Pieces of each turn but the last.
    pub pieces: u32,
    /// Turns.
    pub count: u32,
}

impl Turns {
    /// For so many pieces, of pages that have so many each, and so many warps.
    fn new(piece_count: u32, pieces_per_page: u32, workers: u32, tuning: &Tuning) -> Self {
        let some = tuning.turn_pieces.min(args::TURN_MAX_PIECES);
        if some == 0 || piece_count / workers.max(1) < tuning.turns_from_pieces.max(2) {
            return Self { dealt: piece_count, pieces: some.max(1), count: 0 };
        }
        let pages = some / pieces_per_page.max(1);
        let pieces =
            if pages > 0 { pages * pieces_per_page } else { pieces_per_page.min(2 * some) };
        let pieces = pieces.clamp(1, args::TURN_MAX_PIECES);
        // Whole pages, where turns are.
        let half = piece_count.div_ceil(2);
        let dealt = match pieces.is_multiple_of(pieces_per_page.max(1)) {
            true => half.next_multiple_of(pieces_per_page.max(1)).min(piece_count),
            false => half,
        };
        Self { dealt, pieces, count: (piece_count - dealt).div_ceil(pieces) }
    }

    /// The pieces of turn `number`, of a launch that has `piece_count`: the first, and how many; `None`: there is no such turn. As the
    /// kernels have it.
    #[must_use]
    pub fn turn(&self, piece_count: u32, number: u32) -> Option<(u32, u32)> {
        let first = number.checked_mul(self.pieces)?.checked_add(self.dealt)?;
        (number < self.count).then(|| (first, piece_count.saturating_sub(first).min(self.pieces)))
    }
}

/// Why a request has no layout. Everything follows from the arguments.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GeometryError {
    /// The kernel that was asked for wants multiples of 16.
    NotAligned {
        /// The kernel.
        kernel: Kernel,
    },
    /// The kernel that was asked for wants compute capability 9.0.
    NeedsBulkCopies {
        /// What the GPU has.
        capability: (u32, u32),
    },
    /// The copy engine was asked for, for what is more than one range.
    NotContiguous {
        /// Pages of the request.
        page_count: u32,
    },
    /// More pieces than are counted in 32 bits.
    TooManyPieces {
        /// Bytes of each page.
        page_bytes: u64,
        /// Pages.
        page_count: u32,
    },
    /// The stages of a [`Tuning`] do not fit the bulk kernel.
    Stages {
        /// Bytes of each.
        bytes: u32,
        /// How many.
        count: u32,
    },
}

impl fmt::Display for GeometryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAligned { kernel } => {
                write!(f, "{kernel:?} copies multiples of 16 bytes only")
            }
            Self::NeedsBulkCopies { capability: (major, minor) } => {
                write!(f, "bulk copies need compute capability 9.0, this GPU has {major}.{minor}")
            }
            Self::NotContiguous { page_count } => {
                write!(f, "the copy engine copies one range, not {page_count} pages")
            }
            Self::TooManyPieces { page_bytes, page_count } => {
                write!(
                    f,
                    "{page_count} pages of {page_bytes} bytes are too many pieces for one launch"
                )
            }
            Self::Stages { bytes, count } => {
                write!(f, "{count} stages of {bytes} bytes do not fit the bulk kernel")
            }
        }
    }
}

/// Lays out a request for `gpu`, on at most `sms` of its SMs.
///
/// A request of no bytes becomes a launch that only announces. O(1).
///
/// # Errors
///
/// What was asked for cannot be had for this request; [`Method::Auto`] and [`Method::Launch`] fail only for
/// [`GeometryError::TooManyPieces`] and an impossible `tuning`.
pub fn plan(
    shape: Shape,
    method: Method,
    sms: NonZeroU32,
    gpu: Gpu,
    tuning: &Tuning,
) -> Result<Plan, GeometryError> {
    let bytes = u128::from(shape.page_bytes) * u128::from(shape.page_count);
    let engine_from = match shape.adds {
        false => tuning.copy_engine_from_bytes,
        true => tuning.copy_engine_adds_from_bytes,
    };
    let kernel = match method {
        Method::CopyEngine if !shape.contiguous => {
            return Err(GeometryError::NotContiguous { page_count: shape.page_count });
        }
        Method::CopyEngine if bytes > 0 => return Ok(Plan::CopyEngine),
        Method::Auto if shape.contiguous && bytes >= u128::from(engine_from.max(1)) => {
            return Ok(Plan::CopyEngine);
        }
        Method::Auto | Method::Launch | Method::CopyEngine => quickest(shape, bytes, gpu, tuning),
        Method::Kernel(kernel) => kernel,
    };
    if kernel != Kernel::Any && !shape.multiple.is_multiple_of(ALIGNED_BYTES) {
        return Err(GeometryError::NotAligned { kernel });
    }
    launch(shape, kernel, sms, gpu, tuning).map(Plan::Launch)
}

fn quickest(shape: Shape, bytes: u128, gpu: Gpu, tuning: &Tuning) -> Kernel {
    if !shape.multiple.is_multiple_of(ALIGNED_BYTES) {
        return Kernel::Any;
    }
    let long = bytes >= u128::from(tuning.bulk_from_bytes)
        && shape.page_bytes >= tuning.bulk_page_from_bytes;
    // A tuning that is none for any GPU is to be heard of.
    let has_room = || gpu.bulk_shared_bytes() == BULK_SHARED_BYTES || stages(gpu, tuning).is_ok();
    match long && shape.multiple.is_multiple_of(LINE_BYTES) && has_room() {
        true => Kernel::Bulk,
        false => Kernel::Vector,
    }
}

fn launch(
    shape: Shape,
    kernel: Kernel,
    sms: NonZeroU32,
    gpu: Gpu,
    tuning: &Tuning,
) -> Result<Launch, GeometryError> {
    let (threads, longest) = match kernel {
        Kernel::Any => (args::ANY_THREADS, tuning.vector_piece_bytes),
        Kernel::Vector => (args::VECTOR_THREADS, tuning.vector_piece_bytes),
        Kernel::Bulk => (args::BULK_THREADS, tuning.bulk_piece_bytes),
    };
    let (stage_bytes, stage_count, shared_bytes) = match kernel {
        Kernel::Any | Kernel::Vector => (0, 0, 0),
        Kernel::Bulk => stages(gpu, tuning)?,
    };
    let too_many =
        GeometryError::TooManyPieces { page_bytes: shape.page_bytes, page_count: shape.page_count };
    let piece_bytes = piece(shape.page_bytes, longest);
    let pieces_per_page =
        u32::try_from(shape.page_bytes.div_ceil(u64::from(piece_bytes))).map_err(|_| too_many)?;
    let piece_count = pieces_per_page.checked_mul(shape.page_count).ok_or(too_many)?;
    let blocks = sms.get().min(gpu.sms).min(piece_count).max(1);
    let workers = blocks * (threads / 32);
    let turns = Turns::new(piece_count, pieces_per_page, workers, tuning);
    // The kernels number warps in 32 bits, a warp's block of pieces, and turns and warps together: all are far below.
    Ok(Launch {
        turns,
        kernel,
        blocks,
        threads,
        shared_bytes,
        piece_bytes,
        pieces_per_page,
        piece_count,
        stage_bytes,
        stage_count,
    })
}

/// The length of a page's pieces: as even as multiples of 16 allow, none above `longest`.
fn piece(page_bytes: u64, longest: u32) -> u32 {
    let grain = ALIGNED_BYTES;
    let longest = (u64::from(longest) / grain * grain).max(grain);
    let pieces = page_bytes.div_ceil(longest).max(1);
    let even = page_bytes.div_ceil(pieces).div_ceil(grain).max(1) * grain;
    // At most `longest`, which is 32 bits: a multiple of 16 that is no less than the even share.
    u32::try_from(even.min(longest)).unwrap_or(u32::MAX)
}

/// Stage bytes, stage count and shared memory of the bulk kernel: as the tuning says, or with fewer stages where a block may have less memory.
fn stages(gpu: Gpu, tuning: &Tuning) -> Result<(u32, u32, u32), GeometryError> {
    if gpu.capability < (9, 0) {
        return Err(GeometryError::NeedsBulkCopies { capability: gpu.capability });
    }
    let (bytes, count) = (tuning.bulk_piece_bytes, tuning.bulk_stages);
    let fits = bytes > 0
        && bytes.is_multiple_of(128)
        && (args::BULK_LAG + 1..=args::BULK_MAX_STAGES).contains(&count);
    let shared = bytes.checked_mul(count).and_then(|b| b.checked_mul(args::BULK_WARPS));
    match shared {
        Some(shared) if fits && shared <= BULK_SHARED_BYTES => {}
        _ => return Err(GeometryError::Stages { bytes, count }),
    }
    let of_one = bytes * args::BULK_WARPS;
    let there = count.min(gpu.bulk_shared_bytes() / of_one);
    if there > args::BULK_LAG {
        Ok((bytes, there, of_one * there))
    } else {
        Err(GeometryError::Stages { bytes, count })
    }
}

/// The pieces of worker `worker` of `workers`: the first, and how many. As the kernels have it.
///
/// Workers `0..workers` in order get consecutive blocks, which differ by at most one in length.
///
/// # Panics
///
/// Panics if `workers` is zero.
#[must_use]
pub fn share(pieces: u32, workers: u32, worker: u32) -> (u32, u32) {
    let (each, extra) = (pieces / workers, pieces % workers);
    (worker * each + worker.min(extra), each + u32::from(worker < extra))
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Gpu = Gpu { capability: (9, 0), sms: 132, shared_bytes: 227 << 10 };
    const A100: Gpu = Gpu { capability: (8, 0), sms: 108, shared_bytes: 163 << 10 };
    /// Blackwell without the data center's shared memory.
    const RTX: Gpu = Gpu { capability: (12, 0), sms: 188, shared_bytes: 99 << 10 };
    const SMS: NonZeroU32 = NonZeroU32::new(16).unwrap();

    fn pages(page_bytes: u64, page_count: u32) -> Shape {
        Shape {
            page_bytes,
            page_count,
            multiple: page_bytes & page_bytes.wrapping_neg(),
            contiguous: page_count == 1,
            adds: false,
        }
    }

    fn launched(shape: Shape, method: Method, sms: u32, gpu: Gpu, tuning: &Tuning) -> Launch {
        match plan(shape, method, NonZeroU32::new(sms).unwrap(), gpu, tuning) {
            Ok(Plan::Launch(launch)) => launch,
            other => panic!("{shape:?} by {method:?}: {other:?}"),
        }
    }

    #[test]
    fn shares_cover_every_piece_once() {
        for workers in 1..=40 {
            for pieces in 0..=130 {
                let mut next = 0;
                for worker in 0..workers {
                    let (first, count) = share(pieces, workers, worker);
                    assert_eq!(first, next, "{pieces} over {workers}");
                    assert!(count.abs_diff(pieces / workers) <= 1);
                    next += count;
                }
                assert_eq!(next, pieces);
            }
        }
        let (first, count) = share(u32::MAX, 132 * 24, 132 * 24 - 1);
        assert_eq!(first + count, u32::MAX);
    }

    /// Every way in which warps come to ask for turns: each turn is given out once, and the counter is zero in the end, which wraps at the
    /// last number that is asked for. As `kernels/copy.cu` does it.
    fn give_out(turns: u32, asking: &mut Vec<bool>, counter: u32, given: &mut Vec<u32>) -> u32 {
        let last = turns + u32::try_from(asking.len()).unwrap() - 1;
        let mut ways = 0;
        for warp in 0..asking.len() {
            if !asking[warp] {
                continue;
            }
            let next = if counter >= last { 0 } else { counter + 1 };
            let goes_on = counter < turns;
            (asking[warp], ways) = (goes_on, ways + 1);
            if goes_on {
                given.push(counter);
            }
            if asking.iter().any(|asks| *asks) {
                give_out(turns, asking, next, given);
            } else {
                assert_eq!((next, given.len()), (0, turns as usize));
                assert!(given.iter().copied().eq(0..turns));
            }
            if goes_on {
                given.pop();
            }
            asking[warp] = true;
        }
        ways
    }

    #[test]
    fn each_turn_is_given_out_once_and_the_counter_wraps() {
        for turns in 1..=4 {
            for warps in 1..=3 {
                let ways = give_out(turns, &mut vec![true; warps], 0, &mut Vec::new());
                assert_eq!(ways as usize, warps);
            }
        }
    }

    #[test]
    fn what_is_dealt_and_the_turns_cover_every_piece_once() {
        let mut with_turns = 0;
        for (turn_pieces, turns_from_pieces) in [(0, 0), (1, 0), (3, 2), (8, 32), (40, 5)] {
            let tuning = Tuning { turn_pieces, turns_from_pieces, ..Tuning::default() };
            for per_page in [1, 2, 3, 7, 8, 9, 16, 17, 300] {
                for workers in [1, 2, 5, 64] {
                    for piece_count in (0..200).chain([64 * 31, 64 * 32, 64 * 33 + 1]) {
                        let turns = Turns::new(piece_count, per_page, workers, &tuning);
                        let mut next = turns.dealt;
                        for number in 0..turns.count {
                            let (first, count) = turns.turn(piece_count, number).unwrap();
                            assert_eq!(first, next);
                            assert!((1..=args::TURN_MAX_PIECES).contains(&count));
                            next += count;
                        }
                        assert_eq!(next, piece_count, "{turns:?}");
                        assert_eq!(turns.turn(piece_count, turns.count), None);
                        with_turns += u32::from(turns.count > 0);
                    }
                }
            }
        }
        assert!(with_turns > 10_000, "{with_turns}");
        // Whole pages, as long as they are not too long.
        let pieces = |per_page| Turns::new(1 << 20, per_page, 64, &Tuning::default()).pieces;
        assert_eq!([1, 2, 3, 4, 8, 9, 16, 17, 256].map(pieces), [8, 8, 6, 8, 8, 9, 16, 16, 16]);
        let most = Turns::new(u32::MAX, 1, 1, &Tuning { turn_pieces: 1, ..Tuning::default() });
        assert_eq!(most.turn(u32::MAX, most.count - 1), Some((u32::MAX - 1, 1)));
        assert_eq!(most.turn(u32::MAX, u32::MAX), None);
    }

    #[test]
    fn pieces_cover_each_page_exactly() {
        let sizes = (1..700).chain([4095, 4096, 4097, 65535, 65536, 65552, 1 << 20]);
        for longest in [128, 512, 4096] {
            let tuning = Tuning {
                vector_piece_bytes: longest,
                bulk_piece_bytes: longest,
                ..Tuning::default()
            };
            for page_bytes in sizes.clone() {
                let launch = launched(pages(page_bytes, 3), Method::Auto, 16, H200, &tuning);
                let (longest, piece) = (u64::from(longest), u64::from(launch.piece_bytes));
                let count = u64::from(launch.pieces_per_page);
                assert!(piece <= longest && piece.is_multiple_of(16));
                assert!((count - 1) * piece < page_bytes && page_bytes <= count * piece);
                assert_eq!(launch.piece_count, launch.pieces_per_page * 3);
                // No more pieces than the longest would make: the evening out costs none.
                assert_eq!(count, page_bytes.div_ceil(longest));
            }
        }
    }

    #[test]
    fn launches_keep_the_kernels_limits() {
        for gpu in [H200, A100, RTX] {
            for page_bytes in [1, 15, 16, 704, 4096, 5120, 65536, 1 << 22] {
                for page_count in [0, 1, 2, 33, 1024, 40_000] {
                    for sms in [1, 8, 16, 132, 1000] {
                        let shape = Shape { contiguous: false, ..pages(page_bytes, page_count) };
                        let launch = launched(shape, Method::Auto, sms, gpu, &Tuning::default());
                        assert!(launch.blocks >= 1 && launch.blocks <= sms.min(gpu.sms));
                        assert!(launch.blocks <= launch.piece_count.max(1));
                        assert!(launch.shared_bytes <= gpu.bulk_shared_bytes());
                        assert_eq!(launch.kernel == Kernel::Any, !page_bytes.is_multiple_of(16));
                        if launch.kernel == Kernel::Bulk {
                            assert!(gpu.capability >= (9, 0));
                            assert!(launch.piece_bytes <= launch.stage_bytes);
                            assert!(launch.stage_bytes.is_multiple_of(128));
                            assert!(launch.stage_count > args::BULK_LAG);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_choose_the_way() {
        let tuning = Tuning::default();
        let kernel = |shape, gpu| launched(shape, Method::Auto, 16, gpu, &tuning).kernel;
        assert_eq!(kernel(pages(4096, 1024), H200), Kernel::Bulk);
        assert_eq!(kernel(pages(4096, 1024), A100), Kernel::Vector);
        assert_eq!(kernel(pages(4096, 1024), RTX), Kernel::Bulk);
        assert_eq!(kernel(pages(4096, 8), H200), Kernel::Vector);
        assert_eq!(kernel(pages(256, 40_000), H200), Kernel::Vector);
        assert_eq!(kernel(pages(4096 + 64, 1024), H200), Kernel::Vector);
        assert_eq!(kernel(pages(4097, 1024), H200), Kernel::Any);
        let shifted = Shape { multiple: 8, ..pages(4096, 1024) };
        assert_eq!(kernel(shifted, H200), Kernel::Any);

        let whole = |bytes, adds| {
            let shape = Shape { adds, ..pages(bytes, 1) };
            plan(shape, Method::Auto, SMS, H200, &tuning)
        };
        assert_eq!(whole(1, false), Ok(Plan::CopyEngine));
        let edge = tuning.copy_engine_adds_from_bytes;
        assert_eq!(whole(edge, true), Ok(Plan::CopyEngine));
        assert!(matches!(whole(edge - 128, true), Ok(Plan::Launch(_))));
        for adds in [false, true] {
            let nothing = whole(0, adds);
            assert!(matches!(nothing, Ok(Plan::Launch(Launch { piece_count: 0, blocks: 1, .. }))));
        }
    }

    #[test]
    fn what_cannot_be_had_is_refused() {
        let tuning = Tuning::default();
        let tried = |shape, method, gpu| plan(shape, method, SMS, gpu, &tuning);
        for kernel in [Kernel::Vector, Kernel::Bulk] {
            assert_eq!(
                tried(pages(17, 2), Method::Kernel(kernel), H200),
                Err(GeometryError::NotAligned { kernel })
            );
        }
        assert_eq!(
            tried(pages(4096, 2), Method::Kernel(Kernel::Bulk), A100),
            Err(GeometryError::NeedsBulkCopies { capability: (8, 0) })
        );
        assert_eq!(
            tried(pages(4096, 2), Method::CopyEngine, H200),
            Err(GeometryError::NotContiguous { page_count: 2 })
        );
        let (page_bytes, page_count) = (1 << 40, 1 << 10);
        assert_eq!(
            tried(pages(page_bytes, page_count), Method::Auto, H200),
            Err(GeometryError::TooManyPieces { page_bytes, page_count })
        );
        assert!(tried(pages(u64::MAX, 2), Method::Auto, H200).is_err());
        for (bytes, count) in
            [(4096, 2), (4096, 17), (4096, 8), (100, 4), (0, 4), (u32::MAX - 127, 16)]
        {
            let odd = Tuning { bulk_piece_bytes: bytes, bulk_stages: count, ..tuning };
            assert_eq!(
                plan(pages(4096, 1024), Method::Auto, SMS, H200, &odd),
                Err(GeometryError::Stages { bytes, count })
            );
        }
    }

    /// Of every size of a block's shared memory: as many stages as fit, no more than were asked for, and by registers where fewer fit than the kernel takes.
    #[test]
    fn stages_fit_what_a_block_may_have() {
        let tuning = Tuning::default();
        let mut kernels = [0, 0];
        for shared_bytes in (0..=228 << 10).step_by(512) {
            let gpu = Gpu { shared_bytes, ..RTX };
            let launch = launched(pages(4096, 1024), Method::Auto, 16, gpu, &tuning);
            let of_one = tuning.bulk_piece_bytes * args::BULK_WARPS;
            let fit = shared_bytes.saturating_sub(BULK_BARRIER_BYTES) / of_one;
            if fit > args::BULK_LAG {
                assert_eq!(launch.kernel, Kernel::Bulk, "{shared_bytes}");
                assert_eq!(launch.stage_count, fit.min(tuning.bulk_stages));
                assert_eq!(launch.shared_bytes, launch.stage_count * of_one);
                kernels[0] += 1;
            } else {
                assert_eq!(launch.kernel, Kernel::Vector, "{shared_bytes}");
                let asked = Method::Kernel(Kernel::Bulk);
                let refused = plan(pages(4096, 1024), asked, SMS, gpu, &tuning);
                let (bytes, count) = (tuning.bulk_piece_bytes, tuning.bulk_stages);
                assert_eq!(refused, Err(GeometryError::Stages { bytes, count }));
                kernels[1] += 1;
            }
        }
        assert!(kernels.iter().all(|&count| count > 100), "{kernels:?}");
    }
}
