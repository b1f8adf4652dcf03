//! How the models in `tests/` are run: the core's own text on loom's atomics.
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo nextest run -p immwire-verification-loom --cargo-profile model \
//!     --target-dir target-loom
//! ```
//!
//! Without `--cfg loom` this package is empty. `nextest`, because a missed wake-up is a deadlock, which
//! aborts its process: each model has one of its own.
//!
//! | proves | does not prove |
//! |---|---|
//! | no interleaving of the model, and no weak-memory read in it, breaks its assertions, up to the preemption bound it prints | anything beyond the bound, or about more threads than the model has |
//! | no waiter of the model sleeps for ever | that a platform's futex does what `park` does here |
//!
//! # A trap
//!
//! loom decides which orders to try from the *last* access to each location. A thread that loads and
//! then exchanges hides, by its own load, that another thread looked before: if the main thread only
//! looks, and does so first, the order in which it looks last is never tried, and the model passes
//! after one execution. So a thread that only looks is spawned, and runs after what it looks for; and
//! every model states how many executions are known.
//!
//! Variables: `LOOM_MAX_PREEMPTIONS=n` searches every model to that bound instead of its own;
//! `IMMWIRE_LOOM_ANY_COUNT=1` accepts a search of any size, for mutants, which change it: they are to
//! be caught by what a model asserts, not by how often it ran.
#![cfg(loom)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use loom::model::Builder;
use loom::thread::{self, Thread};

/// How far a search goes.
#[derive(Debug, Clone, Copy)]
pub enum Bound {
    /// Every interleaving with at most so many preemptions.
    Preemptions(usize),
    /// Every interleaving.
    None,
}

/// Runs `model` under every interleaving within `bound`, and prints how many there were.
///
/// # Panics
///
/// If the model does, in any interleaving; if the search could be cut short by a limit on time or
/// count, which would pass for a success; or if it ran fewer than `at_least` executions, which means
/// that the model has lost its subject.
pub fn explore(
    name: &str,
    bound: Bound,
    at_least: usize,
    model: impl Fn() + Send + Sync + 'static,
) {
    let mut builder = Builder::new();
    assert!(builder.max_duration.is_none(), "a search with a time limit proves nothing");
    assert!(builder.max_permutations.is_none(), "a search with a count limit proves nothing");
    if builder.preemption_bound.is_none() {
        builder.preemption_bound = match bound {
            Bound::Preemptions(most) => Some(most),
            Bound::None => None,
        };
    }
    let executions = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&executions);
    let started = Instant::now();
    let reach = builder.preemption_bound.map_or("none".to_owned(), |most| most.to_string());
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let executions = executions.load(Ordering::Relaxed);
    println!("{name}: {executions} executions, preemption bound {reach}, {:?}", started.elapsed());
    if std::env::var_os("IMMWIRE_LOOM_ANY_COUNT").is_none() {
        assert!(
            executions >= at_least,
            "{name}: {executions} executions, but {at_least} are known"
        );
    }
}

/// Sleeps until `done`, and looks again after each wake-up. If nobody wakes it, loom reports a deadlock.
pub fn sleep_until(mut done: impl FnMut() -> bool) {
    while !done() {
        thread::park();
    }
}

/// The calling thread, for others to unpark.
#[must_use]
pub fn me() -> Thread {
    thread::current()
}
