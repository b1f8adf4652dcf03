//! What two processes share beside lanes: the platform's own files, compiled here against twins of what they
//! stand on.
//!
//! | module | models of |
//! |---|---|
//! | `bounced` | `shm/bounce.rs`: head and tail of the ring, the statuses between them, its closing |
//! | `withdrawn` | `shm/withdrawals.rs`: the count of withdrawn grants, and the sleep of whoever looks at it |
//!
//! What a model leaves out: the bytes of a record are one cell that loom watches, since its atomics are no
//! memory that can be copied to; the ring has room for two records.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A panic is how a model fails.
#![allow(dead_code, unreachable_pub)] // The models use part of each file, which is part of a crate.

#[path = "../../../../platform-linux/src/shm/bounce.rs"]
mod bounce;
#[path = "../../../../platform-linux/src/shm/withdrawals.rs"]
mod withdrawals;

mod bounced;
mod copy;
mod memory;
mod segment;
mod sync;
mod withdrawn;
