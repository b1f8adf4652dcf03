//! The structures that the kernels that copy take, as in `kernels/immwire_cuda.h`.
//!
//! Plain numbers: addresses are those of the launching GPU's address space. Nothing here is checked against memory.
//!
//! # Invariants
//!
//! Names, sizes and offsets are those of the header: asserted here, asserted there, and compared by a C compiler in
//! `tests/header.rs`.

use std::mem::{offset_of, size_of};

/// Where the pages of one side are: page `i` starts at `base + stride * (table ? table[i] : i)`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PagesArgs {
    /// Address of the page of index 0.
    pub base: u64,
    /// Bytes from one index to the next.
    pub stride: u64,
    /// Address of a `u32` for each page, a multiple of 4; 0: none.
    pub table: u64,
}

/// What is announced when every byte of the launch is visible to the whole system.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReleaseArgs {
    /// Address of a `u64`, a multiple of 8.
    pub word: u64,
    /// What is stored or added.
    pub value: u64,
    /// Address of a `u32` that counts the blocks that are done; zero before and after a launch.
    pub arrivals: u64,
    /// [`RELEASE_NONE`], [`RELEASE_STORE`] or [`RELEASE_ADD`].
    pub kind: u32,
    /// Zero.
    pub reserved: u32,
}

/// Who copies which pieces: some are dealt to the warps in blocks, the others make up turns, which warps take as they come to them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TurnsArgs {
    /// Address of a `u32` that counts who has asked for a turn; zero before and after a launch.
    pub asked: u64,
    /// Pieces that are dealt, the first of all; all if there are no turns.
    pub dealt: u32,
    /// Pieces of each turn but the last, at most [`TURN_MAX_PIECES`].
    pub pieces: u32,
    /// Turns.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// One launch.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopyArgs {
    /// Where pages are read.
    pub source: PagesArgs,
    /// Where pages are written.
    pub target: PagesArgs,
    /// What is announced.
    pub release: ReleaseArgs,
    /// Bytes of each page.
    pub page_bytes: u64,
    /// Bytes of each piece of a page, but for the last.
    pub piece_bytes: u32,
    /// `ceil(page_bytes / piece_bytes)`.
    pub pieces_per_page: u32,
    /// `page_count * pieces_per_page`.
    pub piece_count: u32,
    /// Pages.
    pub page_count: u32,
    /// Bulk: bytes of shared memory for each piece in flight.
    pub stage_bytes: u32,
    /// Bulk: pieces in flight for each warp.
    pub stage_count: u32,
    /// Who copies which pieces.
    pub turns: TurnsArgs,
}

/// One launch of `immwire_standby`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StandbyArgs {
    /// Address of [`STANDBY_SEATS`] seats of [`SEAT_BYTES`], a multiple of as many.
    pub seats: u64,
    /// Warps leave when nothing was asked for so long.
    pub idle_ns: u64,
    /// They leave after so long, whatever is asked.
    pub shift_ns: u64,
    /// The launch's number, below 2^30.
    pub launch: u32,
    /// Zero.
    pub reserved: u32,
}

/// Nothing is announced.
pub const RELEASE_NONE: u32 = 0;
/// The value is stored: one writer at a time.
pub const RELEASE_STORE: u32 = 1;
/// The value is added, atomically.
pub const RELEASE_ADD: u32 = 2;

/// The most pieces of a turn.
pub const TURN_MAX_PIECES: u32 = 32;
/// Threads of a block of `immwire_copy_any`.
pub const ANY_THREADS: u32 = 512;
/// Threads of a block of `immwire_copy_vector`.
pub const VECTOR_THREADS: u32 = 768;
/// Threads of a block of `immwire_copy_bulk`.
pub const BULK_THREADS: u32 = 256;
/// Warps of a block of `immwire_copy_bulk`.
pub const BULK_WARPS: u32 = BULK_THREADS / 32;
/// The most stages of a warp's ring.
pub const BULK_MAX_STAGES: u32 = 16;
/// Pieces between a stage's store and its refill.
pub const BULK_LAG: u32 = 2;
/// Warps of the block of `immwire_standby`, each with a seat.
pub const STANDBY_SEATS: u32 = 4;
/// Threads of that block.
pub const STANDBY_THREADS: u32 = 128;
/// Bytes of a seat.
pub const SEAT_BYTES: u32 = 128;
/// The word of a seat that its warp writes.
pub const SEAT_STATUS: u32 = 8;

const _: () = {
    assert!(size_of::<PagesArgs>() == 24);
    assert!(offset_of!(PagesArgs, stride) == 8);
    assert!(offset_of!(PagesArgs, table) == 16);
    assert!(size_of::<ReleaseArgs>() == 32);
    assert!(offset_of!(ReleaseArgs, value) == 8);
    assert!(offset_of!(ReleaseArgs, arrivals) == 16);
    assert!(offset_of!(ReleaseArgs, kind) == 24);
    assert!(offset_of!(ReleaseArgs, reserved) == 28);
    assert!(size_of::<TurnsArgs>() == 24);
    assert!(offset_of!(TurnsArgs, dealt) == 8);
    assert!(offset_of!(TurnsArgs, pieces) == 12);
    assert!(offset_of!(TurnsArgs, count) == 16);
    assert!(offset_of!(TurnsArgs, reserved) == 20);
    assert!(size_of::<CopyArgs>() == 136);
    assert!(offset_of!(CopyArgs, target) == 24);
    assert!(offset_of!(CopyArgs, release) == 48);
    assert!(offset_of!(CopyArgs, page_bytes) == 80);
    assert!(offset_of!(CopyArgs, piece_bytes) == 88);
    assert!(offset_of!(CopyArgs, pieces_per_page) == 92);
    assert!(offset_of!(CopyArgs, piece_count) == 96);
    assert!(offset_of!(CopyArgs, page_count) == 100);
    assert!(offset_of!(CopyArgs, stage_bytes) == 104);
    assert!(offset_of!(CopyArgs, stage_count) == 108);
    assert!(offset_of!(CopyArgs, turns) == 112);
    assert!(size_of::<StandbyArgs>() == 32);
    assert!(offset_of!(StandbyArgs, idle_ns) == 8);
    assert!(offset_of!(StandbyArgs, shift_ns) == 16);
    assert!(offset_of!(StandbyArgs, launch) == 24);
    assert!(offset_of!(StandbyArgs, reserved) == 28);
};
