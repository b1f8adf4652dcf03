//! Transfer engine for LLM systems: one-sided writes with immediate, and counters that say when all
//! of them have arrived.
//!
//! A write goes from memory here to memory of a peer without the peer's doing; the immediate that
//! comes with it counts at one of the peer's counters. No order is assumed between writes, so the
//! same program is right on every transport. See `ARCHITECTURE.md` for the contract.
//!
//! ```
//! use std::time::Duration;
//! use immwire::{SingleWrite, TransferEngine};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (sender, receiver) = (TransferEngine::builder().build()?, TransferEngine::builder().build()?);
//! let second = Duration::from_secs(1);
//!
//! // The receiver offers memory, and a counter; descriptor, tag and address travel as bytes.
//! let (there, counter) = (receiver.alloc(4096)?, receiver.counter()?);
//!
//! let here = sender.alloc(4096)?;
//! here.write(0, b"hello")?;
//! let peer = sender.add_peer(receiver.address())?;
//! let transfer = sender.submit_single_write(&SingleWrite {
//!     peer, src: &here, src_offset: 0, dst: &there.desc(), dst_offset: 8, len: 5,
//!     imm: Some(counter.tag()),
//! })?;
//!
//! counter.wait(1, second)?;
//! let mut bytes = [0; 5];
//! there.read(8, &mut bytes)?;
//! assert_eq!(&bytes, b"hello");
//! transfer.wait(second)?.ok()?;
//! # Ok(())
//! # }
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`provider`] | what a transport must do |
//! | [`shm`] | the transport for processes of one host |
//! | [`libfabric`] | the transport for hosts on TCP, or AWS EFA |
//! | [`verbs`] | the transport for RDMA NICs |
//! | [`span`] | two transports in one: shared memory on this host, another to others |
//! | [`staging`] | GPUs' memory over NICs that do not reach it |
//! | [`topology`] | which NICs belong to which GPU |
//! | [`moe`] | tokens to the ranks of their experts, and back |
//! | [`sim`] | a simulated fabric in one process, with a virtual clock and faults |
//!
//! # Invariants
//!
//! - Whatever can be decided without a device is decided by [`immwire_core`].
//! - Every wait has a deadline; every thread is joined when the last [`TransferEngine`] is dropped; but for one that a GPU's driver does
//!   not come back to within some seconds, since the GPU is busy with something else (`closer.rs`).
//! - From submission to completion a write allocates nothing and takes no lock.

mod callback;
mod cells;
mod clock;
mod closer;
mod counter;
mod counting;
mod driver;
mod engine;
mod error;
mod flag;
mod follow;
mod gate;
mod gpus;
mod intake;
mod largest;
pub mod libfabric;
mod message;
pub mod moe;
mod proof;
pub mod provider;
mod region;
mod request;
mod ring;
mod shared;
pub mod shm;
pub mod sim;
pub mod span;
pub mod staging;
mod sync;
#[cfg(test)]
mod tests;
mod thread;
pub mod topology;
mod transfer;
pub mod verbs;
mod wait;
mod waits;
mod wakers;
mod watch;
mod withdrawal;
mod words;

pub use immwire_core as core;
pub use immwire_core::id::{EngineId, PeerId};
pub use immwire_core::imm::ImmTag;
pub use immwire_core::peer::{DownReason, LivenessConfig, PeerState};
pub use immwire_core::plan::Target;
pub use immwire_core::region::{MrDesc, Rights};
pub use immwire_core::wire::NetAddr;

pub use clock::Clock;
pub use counter::{Expected, ImmCounter, Reached};
pub use engine::{Builder, Driver, IdlePolicy, LibfabricOptions, Stats, TransferEngine, Transport};
pub use error::{
    AddPeerError, BuildError, CountError, CounterTaken, End, PeerError, PeerShare, RecvError,
    Strays, SubmitError, TransferError, WaitTimeout,
};
pub use flag::{FlagPlace, GpuFlag, gdrcopy_version};
pub use follow::Following;
pub use gate::{StreamWait, StreamWaitError};
pub use provider::{Place, RegisterError};
pub use region::{AccessError, CloseError, Region};
pub use request::{PageIndices, PagedWrite, Pages, PeerGroup, ScatterWrite, SingleWrite};
pub use shared::Message;
pub use staging::Staging;
pub use transfer::Transfer;
pub use verbs::VerbsOptions;
pub use waits::{Capacity, PeerUp};
pub use watch::UvmWatcher;

/// Its program in Rust is compiled, and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
