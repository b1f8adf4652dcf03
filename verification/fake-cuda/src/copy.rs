//! immwire's kernels that copy, done by the CPU: the same structure, the same result, the pieces in a mixed order.
//!
//! What `cuda/kernels/immwire_cuda.h` asks of a launch is asked here, and what it promises is kept; no more: the order of
//! pieces is nobody's to rely on.

use crate::kernel::Size;
use crate::random::Random;
use crate::reach::Reach;
use crate::violation::broken;
use crate::world::World;
use immwire_cuda::args::{self, CopyArgs, PagesArgs};
use std::sync::atomic::Ordering;

/// What all but one kernel want multiples of.
const ALIGNED_BYTES: u64 = 16;
/// What a stage's size is a multiple of.
const STAGE_GRAIN: u32 = 128;

/// Which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    Any,
    Vector,
    Bulk,
}

impl Kernel {
    pub(crate) fn named(name: &[u8]) -> Option<Self> {
        match name {
            b"immwire_copy_any" => Some(Self::Any),
            b"immwire_copy_vector" => Some(Self::Vector),
            b"immwire_copy_bulk" => Some(Self::Bulk),
            _ => None,
        }
    }

    fn threads(self) -> u32 {
        match self {
            Self::Any => args::ANY_THREADS,
            Self::Vector => args::VECTOR_THREADS,
            Self::Bulk => args::BULK_THREADS,
        }
    }
}

/// One launch.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) kernel: Kernel,
    pub(crate) args: CopyArgs,
}

impl Launch {
    /// Everything that can be told from the numbers alone is as the header says; else a violation.
    pub(crate) fn check(&self, size: Size, most_shared_bytes: u32) {
        let (a, kernel) = (&self.args, self.kernel);
        let must = |right: bool, what: &str| {
            if !right {
                broken!(Geometry, "{what}: {kernel:?}, {size:?}, {a:?}");
            }
        };
        must(size.grid[0] > 0 && size.grid[1..] == [1, 1], "grid");
        must(size.block == [kernel.threads(), 1, 1], "threads");
        must(size.shared_bytes <= most_shared_bytes, "more shared memory than was asked for");
        must(
            a.piece_bytes > 0 && u64::from(a.piece_bytes).is_multiple_of(ALIGNED_BYTES),
            "piece_bytes",
        );
        must(
            u64::from(a.pieces_per_page) == a.page_bytes.div_ceil(u64::from(a.piece_bytes)),
            "pieces_per_page",
        );
        must(a.page_count.checked_mul(a.pieces_per_page) == Some(a.piece_count), "piece_count");
        must(
            kernel == Kernel::Any
                || a.page_bytes.is_multiple_of(ALIGNED_BYTES)
                || a.page_count == 0,
            "page_bytes",
        );
        must(a.release.kind <= args::RELEASE_ADD && a.release.reserved == 0, "release");
        let turns = &a.turns;
        let left = a.piece_count.checked_sub(turns.dealt);
        must(left.is_some() && turns.reserved == 0, "turns.dealt");
        must((1..=args::TURN_MAX_PIECES).contains(&turns.pieces), "turns.pieces");
        must(
            left.map(|left| left.div_ceil(turns.pieces.max(1))) == Some(turns.count),
            "turns.count",
        );
        let warps = size.grid[0].checked_mul(kernel.threads() / 32);
        must(warps.and_then(|warps| warps.checked_add(turns.count)).is_some(), "turns and warps");
        if kernel == Kernel::Bulk {
            let stages = args::BULK_LAG + 1..=args::BULK_MAX_STAGES;
            must(stages.contains(&a.stage_count), "stage_count");
            must(a.stage_bytes > 0 && a.stage_bytes.is_multiple_of(STAGE_GRAIN), "stage_bytes");
            must(a.piece_bytes <= a.stage_bytes, "a piece that fits no stage");
            let all =
                u64::from(args::BULK_WARPS) * u64::from(a.stage_bytes) * u64::from(a.stage_count);
            must(u64::from(size.shared_bytes) == all, "shared memory");
        }
    }

    /// Claims all memory that is known now. Pages of a table are looked up when the kernel runs: what is before it in the
    /// stream may write the table.
    pub(crate) fn claim(&self, world: &World, reach: &mut Reach) {
        let (a, memory) = (&self.args, &world.memory);
        if a.release.kind != args::RELEASE_NONE {
            reach.claim_words(memory, a.release.word, (8, 1), true, "word");
            reach.claim_words(memory, a.release.arrivals, (4, 1), true, "arrivals");
            if !reach.is_own(a.release.arrivals) {
                broken!(Arrivals, "{:#x} is not of GPU {}", a.release.arrivals, reach.gpu);
            }
        }
        if a.turns.count > 0 {
            reach.claim_words(memory, a.turns.asked, (4, 1), true, "turns asked for");
            if !reach.is_own(a.turns.asked) {
                broken!(Turns, "{:#x} is not of GPU {}", a.turns.asked, reach.gpu);
            }
        }
        if a.piece_count == 0 {
            return;
        }
        for (pages, write, what) in [(&a.source, false, "source"), (&a.target, true, "target")] {
            if pages.table != 0 {
                reach.claim_words(
                    memory,
                    pages.table,
                    (4, u64::from(a.page_count)),
                    false,
                    "table",
                );
                reach.claim_if_any(memory, pages.base, write);
                continue;
            }
            for page in 0..a.page_count {
                reach.claim(memory, start(pages, page), a.page_bytes, write, what);
            }
        }
    }

    /// Copies, then announces.
    pub(crate) fn run(&self, reach: &mut Reach, random: &mut Random) {
        let (a, release) = (&self.args, &self.args.release);
        let announces = release.kind != args::RELEASE_NONE;
        if announces {
            let before =
                reach.half_word(release.arrivals, true, "arrivals").swap(1, Ordering::AcqRel);
            if before != 0 {
                broken!(Arrivals, "{before} at {:#x} before a launch", release.arrivals);
            }
        }
        if a.turns.count > 0 {
            let before = reach.half_word(a.turns.asked, true, "turns").swap(1, Ordering::AcqRel);
            if before != 0 {
                broken!(Turns, "{before} at {:#x} before a launch", a.turns.asked);
            }
        }
        random.each(u64::from(a.piece_count), |piece| {
            let per_page = u64::from(a.pieces_per_page);
            // Both are of 32 bits: a piece's number is.
            let page = u32::try_from(piece / per_page).unwrap_or(u32::MAX);
            let offset = piece % per_page * u64::from(a.piece_bytes);
            let bytes = (a.page_bytes - offset).min(u64::from(a.piece_bytes));
            let [from, to] = [&a.source, &a.target].map(|pages| find(pages, page, reach));
            if self.kernel != Kernel::Any && !(from | to).is_multiple_of(ALIGNED_BYTES) {
                broken!(Misaligned, "page {page}, from {from:#x} to {to:#x}: {:?}", self.kernel);
            }
            reach.copy(to.wrapping_add(offset), from.wrapping_add(offset), bytes);
        });
        if a.turns.count > 0 {
            reach.half_word(a.turns.asked, true, "turns").store(0, Ordering::Release);
        }
        if !announces {
            return;
        }
        reach.half_word(release.arrivals, true, "arrivals").store(0, Ordering::Release);
        let (adds, on_host) = (release.kind == args::RELEASE_ADD, reach.is_host(release.word));
        reach.announce(release.word, |word| match (adds, on_host) {
            (false, _) => word.store(release.value, Ordering::Release),
            (true, false) => {
                word.fetch_add(release.value, Ordering::AcqRel);
            }
            // The link has no atomics: what the CPU adds meanwhile is lost.
            (true, true) => {
                let before = word.load(Ordering::Acquire);
                random.delay();
                word.store(before.wrapping_add(release.value), Ordering::Release);
            }
        });
    }
}

/// Where a page starts, its index looked up.
fn find(pages: &PagesArgs, page: u32, reach: &mut Reach) -> u64 {
    if pages.table == 0 {
        return start(pages, page);
    }
    let entry = pages.table + 4 * u64::from(page);
    start(pages, reach.half_word(entry, false, "table").load(Ordering::Relaxed))
}

/// Where the page of this index starts. Wraps, as the kernels' arithmetic does.
fn start(pages: &PagesArgs, index: u32) -> u64 {
    pages.base.wrapping_add(pages.stride.wrapping_mul(u64::from(index)))
}
