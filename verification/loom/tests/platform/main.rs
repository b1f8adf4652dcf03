//! The platform's shared structures: its own files, compiled here against a twin of its `sync`.
//!
//! | module | models of |
//! |---|---|
//! | `waits` | `wait.rs`: sleepers, wakers and callbacks of one completion |
//! | `callbacks` | `callback.rs`: the queue of jobs, its runner, its end |
//! | `transfers` | `cells.rs`: tenancies of transfer cells, and waiting for room |
//! | `commands` | `intake.rs`: commands and questions, the driver's sleep and its end |
//! | `counts` | `counting.rs`: waits for counts, their time-outs, the engine's end |
//! | `regions` | `region.rs`: registrations shared by look-ups, closed, dropped and withdrawn |
//!
//! What a model leaves out is what `sync` hides: the kernel's futex, `eventfd`, and the clock. A wait is
//! given either no time, and then is over when it first asks, at whatever moment that is in an
//! interleaving, or time without end, so that a missed wake-up is a deadlock.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A panic is how a model fails.
#![allow(dead_code, unreachable_pub)] // The models use part of each file, which is part of a crate.

#[path = "../../../../platform-linux/src/callback.rs"]
mod callback;
#[path = "../../../../platform-linux/src/cells.rs"]
mod cells;
#[path = "../../../../platform-linux/src/counting.rs"]
mod counting;
#[path = "../../../../platform-linux/src/intake.rs"]
mod intake;
#[path = "../../../../platform-linux/src/provider.rs"]
mod provider;
#[path = "../../../../platform-linux/src/region.rs"]
mod region;
#[path = "../../../../platform-linux/src/ring.rs"]
mod ring;
#[path = "../../../../platform-linux/src/wait.rs"]
mod wait;
#[path = "../../../../platform-linux/src/wakers.rs"]
mod wakers;

mod callbacks;
mod commands;
mod counts;
mod regions;
mod sync;
mod transfers;
mod waits;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Wake, Waker};

use crate::callback::Job;
use crate::sync::{Thread, current};

/// Counts what was called. Its word is no part of a model: it orders and publishes nothing.
#[derive(Clone, Default)]
struct Calls(Arc<AtomicU32>);

impl Calls {
    fn job(&self) -> Job {
        let calls = self.clone();
        Box::new(move || calls.call())
    }

    fn call(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn made(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Wakes a thread of the model.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A waker of the calling thread.
fn my_waker() -> Waker {
    Waker::from(Arc::new(Unpark(current())))
}
