//! What can go wrong in an exchange, and who is missing.

use std::time::Duration;

use immwire_core::moe::{
    ChunkError, LayoutError, PlacementError, RoutingError, SizesError, TableError,
};
use immwire_core::region::RegionError;
use immwire_core::wire::WireError;

use crate::error::{AddPeerError, CountError, CounterTaken, PeerError, SubmitError, TransferError};
use crate::provider::RegisterError;
use crate::region::AccessError;

/// Why an exchange could not be made, or a round did not complete.
///
/// A call that was refused ([`MoeError::Argument`], [`MoeError::Routing`], [`MoeError::OutOfTurn`]) has changed nothing, and can
/// be made again; among GPUs nor has a round that the driver refused ([`MoeError::Gpu`]): nothing was enqueued. After any other error the exchange
/// is over: all calls return [`MoeError::Over`]. That another rank does not come, or is
/// gone, is no error of a round in host memory: it is left out ([`AllToAll::control`](super::AllToAll::control)).
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum MoeError {
    /// The experts cannot be placed so.
    #[error("{0}")]
    Placement(#[from] PlacementError),
    /// The shape cannot be.
    #[error("{0}")]
    Sizes(#[from] SizesError),
    /// There is no such rank.
    #[error("rank {rank} of {world}")]
    Rank {
        /// The rank.
        rank: u32,
        /// Ranks there are.
        world: u32,
    },
    /// As many seats as ranks are needed.
    #[error("{found} seats for {world} ranks")]
    Seats {
        /// Seats given.
        found: usize,
        /// Ranks there are.
        world: u32,
    },
    /// A rank's exchange is of another shape or placement, or its version lays out what ranks write to each other another way.
    #[error(
        "rank {rank} was set up for another shape or placement, or by another version: give all ranks the same"
    )]
    OtherShape {
        /// The rank.
        rank: u32,
    },
    /// A slice has another length than it must have.
    #[error("{what} has {found} entries instead of {needed}")]
    Argument {
        /// Which.
        what: &'static str,
        /// Its length.
        found: usize,
        /// What it must be.
        needed: usize,
    },
    /// More rows arrived than the caller lent memory for.
    #[error("{rows} rows arrived, memory was lent for {lent}")]
    RowsTooMany {
        /// Rows, padding included.
        rows: u32,
        /// Rows lent.
        lent: usize,
    },
    /// This rank's own choices are none.
    #[error("{0}")]
    Routing(RoutingError),
    /// Another rank's are none.
    #[error("from rank {rank}: {error}")]
    PeerRouting {
        /// The rank.
        rank: u32,
        /// What is wrong with them.
        error: RoutingError,
    },
    /// What came from a rank is no table of this round.
    #[error("from rank {rank}: {error}")]
    Table {
        /// The rank; our own, if ours could not be written.
        rank: u32,
        /// Why.
        error: TableError,
    },
    /// Rows cannot be laid out.
    #[error("{0}")]
    Layout(#[from] LayoutError),
    /// Tokens cannot be cut.
    #[error("{0}")]
    Chunk(#[from] ChunkError),
    /// Dispatch and combine take turns.
    #[error("{found} was called where {expected} comes next")]
    OutOfTurn {
        /// What was called.
        found: &'static str,
        /// What comes next.
        expected: &'static str,
    },
    /// An earlier round failed.
    #[error("an earlier round failed: make a new exchange with those who are left")]
    Over,
    /// Some ranks sent nothing in time, or did not take what was sent.
    #[error(
        "chunk {chunk} of {phase}: ranks {ranks:?} did not send, or take what was sent to them, within {after:?}"
    )]
    Late {
        /// Dispatch, combine, or the set-up.
        phase: &'static str,
        /// Which chunk of it.
        chunk: u32,
        /// Who.
        ranks: Vec<u32>,
        /// The time given.
        after: Duration,
    },
    /// A rank is gone.
    #[error("rank {rank}: {error}")]
    Gone {
        /// The rank.
        rank: u32,
        /// How it is known.
        error: PeerError,
    },
    /// A rank goes on without this one.
    #[error("rank {rank} has left this one out")]
    LeftOut {
        /// The rank.
        rank: u32,
    },
    /// What was sent to a rank that is left out is still read.
    #[error("a write to rank {rank} was stopped, and has not ended within {after:?}")]
    Unended {
        /// The rank.
        rank: u32,
        /// The time given.
        after: Duration,
    },
    /// A write to a rank failed.
    #[error("write to rank {rank}: {error}")]
    Write {
        /// The rank.
        rank: u32,
        /// Why.
        error: TransferError,
    },
    /// A write could not be submitted.
    #[error("write to rank {rank}: {error}")]
    Submit {
        /// The rank.
        rank: u32,
        /// Why.
        error: SubmitError,
    },
    /// A rank cannot be reached.
    #[error("rank {rank}: {error}")]
    Reach {
        /// The rank.
        rank: u32,
        /// Why.
        error: AddPeerError,
    },
    /// The engine does not count.
    #[error("{0}")]
    Count(CountError),
    /// The shape cannot be among GPUs.
    #[error("{0}")]
    Shape(super::gpu::ShapeError),
    /// What the driver of the GPUs answered.
    #[error("{0}")]
    Gpu(#[from] immwire_cuda::Error),
    /// Our GPU's kernels cannot write to a rank's inbox.
    #[error(
        "GPU {gpu} does not reach the inbox of rank {rank}: both engines need gpus and shared memory, on one host, and the GPUs \
         a link (`nvidia-smi topo -p2p w`)"
    )]
    NotReached {
        /// The rank.
        rank: u32,
        /// Our GPU.
        gpu: u32,
    },
    /// No counter is free.
    #[error("{0}")]
    Counter(#[from] CounterTaken),
    /// Buffers could not be had.
    #[error("{0}")]
    Memory(#[from] RegisterError),
    /// Buffers could not be read or written.
    #[error("{0}")]
    Access(#[from] AccessError),
    /// Part of a buffer lies outside of it.
    #[error("{0}")]
    Region(#[from] RegionError),
}

/// Why bytes are no seat.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SeatError {
    /// They end too early, or too late.
    #[error("a seat does not have {found} bytes")]
    Length {
        /// Bytes given.
        found: usize,
    },
    /// The address or the descriptor in them is none.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// No counter has such a tag.
    #[error("{bits:#x} is no counter's tag")]
    Tag {
        /// What was found.
        bits: u32,
    },
}
