//! A CUDA driver library of our own, `libcuda.so.1`, whose GPUs are host memory and threads.
//!
//! It stands in for the driver where there is no GPU: found first on the library path, it is loaded in place of NVIDIA's
//! by whatever uses GPUs through `immwire-cuda`, in as many processes as there are. It has the calls that immwire makes
//! and those around them, and of kernels immwire's own (`cuda/kernels/immwire_cuda.h`, `immwire_moe.h`), whatever image they
//! are loaded from: those that copy done here, those for mixtures of experts run by `verification/moe`, as they are. It is written to the driver's documentation: **a model, not hardware**.
//!
//! # What it holds callers to
//!
//! A broken rule is written to the standard error, and to the file that `IMMWIRE_FAKE_CUDA_LOG` names, and the process
//! aborts (`violation.rs` has the rules). No rule can be switched off; the environment sizes the machine (`config.rs` has
//! the variables). What the driver answers with an error, and callers may try, is answered so.
//!
//! - A GPU's memory is for kernels and copies: the CPU faults at its addresses, and so do `read(2)` and its like.
//! - Kernels, copies and words use live memory that their GPU has access to: its own, a peer's with access enabled or set,
//!   what was opened by a handle, pinned or registered host memory. Other host memory may be one side of a copy, which is
//!   done when the call returns.
//! - What is mapped by hand is mapped where nothing is, unmapped as it was mapped, no part of it, and before its addresses are given
//!   back, all at once. No reference to it is released on another thread meanwhile: the documentation does not say so, but
//!   NVIDIA's driver (580.159.04) breaks its own heap by that.
//! - Nothing is freed, unmapped, closed or unloaded while work that uses it is enqueued or runs. (Pages that a table names,
//!   and tokens whose number lies in memory, are known once the kernel runs; until then the memory at the base is taken to be used.) Nothing is freed that another
//!   process has open by its handle.
//! - Calls that need a current context have one, and are made of its own streams, events and functions. Handles are used
//!   until they are destroyed. Host functions do not call the driver.
//! - While a stream is captured, no thread makes a call that the capture would fail by, but aside of it, and no other stream waits
//!   for an event of it.
//! - Launches are as the kernels' headers say. Of launches that wait for other ranks all blocks find room at once.
//!
//! # What it does to them
//!
//! - Each stream has a thread. Pieces of a launch or copy land in any order; with `IMMWIRE_FAKE_CUDA_SEED` there are
//!   delays up to 200 us between operations, and some within each.
//! - Whoever asks for pinned memory, or gives some or a GPU's back, waits for all streams of the context.
//! - New memory is not zero. Adding to a word in host memory is not atomic for the CPU.
//! - Everything that belongs to a context goes when its last retention does.
//! - GDRCopy's library is in it, too, for whoever is told so (`api/gdr.rs`).
//! - A command is refused, if a test asks for that (`immwire_fake_cuda_refuse`); or none is begun (`immwire_fake_cuda_hold`), as
//!   by a GPU that is stuck.
//! - NICs, which are models too, reach a GPU's memory by DMA-BUFs alone, whose allocations were told to complete copies
//!   (`nic.rs`); where writes are unordered, nobody sees what they wrote before the GPU is flushed.
//!
//! # What it has not
//!
//! Order between default streams and others, streams shared by several contexts, graphs (what is captured is counted, and cannot be
//! launched), managed memory but for what the driver says of it, arrays, events
//! between processes, faults that only later calls report. In a child that was forked after `cuInit` all calls are refused, as by the
//! driver.

mod api;
mod code;
mod config;
mod copy;
mod exchange;
mod ipc;
mod kernel;
mod memory;
mod nic;
mod random;
mod reach;
mod standby;
mod stream;
mod violation;
mod world;
