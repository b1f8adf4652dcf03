//! The core of immwire: decides what to write, where, over which NIC, and when it has all arrived.
//!
//! Pure functions and sans-IO state machines. No allocation, no clock, no device, no thread: time,
//! sizes, addresses and storage come in as arguments, and what is to be done comes out as values.
//! A platform (Linux: the crate `immwire`) posts the work and reports what became of it.
//!
//! | module | decides |
//! |---|---|
//! | [`imm`] | what an immediate means, and when a count is reached |
//! | [`nic`] | which NIC carries which bytes |
//! | [`plan`] | which work requests a transfer is made of |
//! | [`group`] | which of them is posted next, and how a transfer ends |
//! | [`peer`], [`pulse`] | whether a peer is there, and when that is to be seen |
//! | [`calls`] | whose call is taken |
//! | [`span`] | which of two transports leads to a peer |
//! | [`staging`] | how GPUs' memory goes over NICs that do not reach it |
//! | [`mailbox`] | where a two-sided message lands, built on writes |
//! | [`wire`], [`datagram`], [`note`], [`port`] | what bytes mean that come from outside |
//! | [`mod@doorbell`] | when a NIC is told of small pieces: each at once, or several together |
//! | [`credit`], [`shelf`] | how many immediates a receiver has room for, and how long its queues are |
//! | [`tenant`] | which registration a key names, and whether it was withdrawn |
//! | [`courier`], [`mod@line`] | notes over lines that break and are made anew |
//! | [`way`], [`verdict`] | paths of queue pairs that break and are made anew, and what had arrived over them |
//! | [`resolve`] | which addresses are looked up, and how long the answers count |
//! | [`patience`] | how long who is called may not answer |
//! | [`life`], [`parting`] | how far a session over queue pairs is, and how it ends |
//! | [`recycle`] | how an endpoint that serves everybody is replaced |
//! | [`topology`], [`device`] | which NICs belong to which GPU, and which ports of a device are NICs |
//! | [`moe`] | where tokens go when experts are spread over ranks |
//! | [`batch`], [`scale`], [`spread`], [`standby`] | which pieces a GPU is told of together, in which of its queues, and which its waiting warps copy |
//! | [`ring`], [`lane`] | how threads, and processes, hand words to each other |
//! | [`pool`] | which slots of a table are free |
//! | [`hazard`] | how memory is taken back from a peer that maps it |
//! | [`user`] | whether a process runs as our user |
//! | [`wake`] | how a waiter sleeps without missing its wake-up |
//! | [`watch`] | whether a watched word's callback may be called |
//! | [`region`], [`id`] | the vocabulary of the rest |
//!
//! # Invariants
//!
//! - `unsafe` is denied but in [`ring`], whose cells are shared between threads.
//! - Nothing here panics on a value that a peer or a caller supplied; a panic would be a bug.
//! - Atomics are named in `sync` alone, so that loom models run this very text.
#![no_std]
#![deny(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod batch;
pub mod calls;
pub mod courier;
pub mod credit;
pub mod datagram;
pub mod device;
pub mod doorbell;
pub mod doors;
pub mod group;
pub mod hazard;
pub mod id;
pub mod imm;
pub mod lane;
pub mod life;
pub mod line;
pub mod mailbox;
pub mod moe;
pub mod nic;
pub mod note;
pub mod opening;
pub mod origin;
pub mod parting;
pub mod patience;
pub mod peer;
pub mod plan;
pub mod pool;
pub mod port;
pub mod pulse;
pub mod receipt;
pub mod recycle;
pub mod region;
pub mod resolve;
pub mod ring;
pub mod scale;
pub mod shelf;
pub mod signal;
pub mod span;
pub mod spread;
pub mod staging;
pub mod standby;
mod sync;
pub mod tenant;
pub mod topology;
pub mod uptake;
pub mod user;
pub mod verdict;
pub mod wake;
pub mod watch;
pub mod way;
pub mod wire;
