//! Which token goes to which expert's rank, where it lies there, and how much comes from whom.
//!
//! Experts are spread over ranks ([`Placement`]), each token of a rank chose some of them ([`Routing`]). A token
//! crosses to each rank once, however many of its experts are there ([`RankMask`]). Whoever has the routing
//! of all ranks knows all the rest without asking anybody: how many rows come from whom, where each lies
//! ([`Layout`], [`Routing::tokens_at`]), and what to wait for ([`Chunks`], [`Expected`]).
//!
//! Pure functions over slices that the caller lends. It knows no memory, no transport, no number format and no epoch
//! but as a number: a platform moves the bytes, and the arithmetic on them is its own.
//!
//! | what | where |
//! |---|---|
//! | experts to ranks, even or not | [`Placement`] |
//! | a rank's choices: counts, masks, order of rows | [`Routing`] |
//! | the same as 16-byte vectors, as they travel | [`TableShape`] |
//! | rows by expert, padded for a grouped GEMM, or each token once and a list of which row is which | [`Layout`], [`slot_of`] |
//! | bytes of every buffer | [`Sizes`] |
//! | chunks, what may be sent when, how many immediates come | [`Chunks`], [`Expected`] |
//! | who is waited for, and who is left out | [`Patience`] |
//! | the lines by which a kernel tells its host that a chunk is complete | [`Doorbells`] |
//!
//! # Invariants
//!
//! 1. A token is in the rows for a rank exactly if one of its choices is an expert of that rank, and then once.
//! 2. Rows of an expert lie together, by source rank and then by token, from a multiple of the padding on: the same in every
//!    run, and at everyone who computes it.
//! 3. Any choice is an expert or [`DROPPED`]; none is named twice by a token. What breaks this is refused with its place.
//! 4. No size and no count wraps: what does not fit is an error.
//! 5. The number of immediates of a round follows from the shape, not from the routes.
//!
//! The tests enumerate small worlds for 1, 2 and 5, compare with published formulas of another design and with
//! `golden.txt`, which kernels are checked against too.
//!
//! Figures of others are from arXiv 2510.27656 and its published code.

mod absence;
mod chunk;
mod doorbell;
mod layout;
mod placement;
mod routing;
mod size;
mod table;
#[cfg(test)]
mod tests;

pub use absence::{Absence, LIMITS, Outgoing, Patience, Seen, Verdict};
pub use chunk::{Chunk, ChunkError, Chunks, Expected};
pub use doorbell::{DESTINATIONS_PER_LINE, Doorbell, DoorbellError, Doorbells, LINE_WORDS, Op};
pub use layout::{Arrival, Layout, LayoutError, NO_SLOT, padded_offsets, slot_of};
pub use placement::{Placement, PlacementError};
pub use routing::{DROPPED, RankMask, Routing, RoutingError};
pub use size::{ROW_ALIGN_BYTES, Shape, Sizes, SizesError};
pub use table::{TableError, TableShape, VECTOR_WORDS, Vector};

/// The most experts there may be.
pub const MAX_EXPERTS: u32 = 1024;
/// The most experts that a token may choose.
pub const MAX_TOP_K: u32 = 32;
/// The most ranks there may be.
pub const MAX_WORLD: u32 = 512;

/// A number as an index. The core runs on targets whose `usize` has 32 bits or more.
const fn index(number: u32) -> usize {
    number as usize
}
