//! Mixtures of experts: tokens to the GPUs of their experts, and results back, by stores into each other's memory.
//!
//! Every rank has an [`Exchange`] and an inbox in its GPU's memory, to which all ranks write. A round is one
//! [`Exchange::dispatch`] and one [`Exchange::combine`] at every rank; between them the experts work. Dispatch sends each token once
//! to every GPU that has one of its experts, where it is laid out by expert, source and token, or lies once for experts that gather;
//! combine sends one row a token back from each, the weighted sum of its experts' results, and adds these up, or each result by
//! itself where sums are to be exact ([`geometry::Shape::exact`]).
//!
//! Nothing waits for the host, and no argument changes from round to round: both can be captured in a CUDA graph and replayed.
//! Each can be done in two halves, with no SM taken in between ([`Half`]). A rank that does not come within the time given is
//! named ([`Exchange::report`]), and left out from the next round on; what it did not send counts as zeros.
//!
//! How it is done, and why that is right, is said in `kernels/moe.cu`. With the few hundred tokens of decoding,
//! some blocks send, and each of the others looks at the choices of all tokens; with more ([`geometry::Many::is_for`]), blocks share them out.
//!
//! | module | what | needs a GPU |
//! |---|---|---|
//! | [`args`] | the structures that the kernels take, as in `kernels/immwire_moe.h` | no |
//! | [`geometry`] | which exchanges there can be, and how large everything is | no |
//! | [`Exchange`] | launches | yes |
//!
//! It knows addresses and numbers of ranks, not how they find each other: the inboxes' addresses are the caller's to get, from
//! memory of one process ([`crate::DeviceMemory`], [`crate::Device::reach`]) or of several ([`crate::SharedMemory`],
//! [`crate::Opened`]).

pub mod args;
mod exchange;
pub mod geometry;

pub use exchange::{Count, Exchange, Half, Left, NotMade, Results, Rows, Tokens};

/// From which compute capability on kernels make e4m3 of values.
pub(crate) const QUANTISES_FROM: (u32, u32) = (8, 9);
