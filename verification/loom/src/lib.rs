//! How the models in `tests/` are run: the shipped text, the core's and the platform's, on loom's atomics.
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo nextest run -p immwire-verification-loom --target-dir target-loom
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
//! The core is a dependency of the models, built with `cfg(loom)`. The platform's files that share memory
//! between threads are compiled into `tests/platform`, against a twin of the one file that they take
//! locks, flags and sleeps from; those of shared memory into `tests/shm`, with twins of what they stand on.
//!
//! # Traps
//!
//! loom decides which orders to try from the *last* access to each location. A thread that loads and
//! then exchanges hides, by its own load, that another thread looked before: if the main thread only
//! looks, and does so first, the order in which it looks last is never tried, and the model passes
//! after one execution. So a thread that only looks is spawned, and runs after what it looks for; and
//! every model states how many executions are known.
//!
//! loom's `unpark` is forgotten if its thread yields at that moment, and mistaken for another wake-up if
//! the thread is blocked by a lock or a join. Where that can happen the models park by a lock and a
//! condition variable (`tests/platform/sync.rs`).
//!
//! loom lets a thread read its own exchange although another thread's plain store has come after it, as if
//! the order of the two were open; a word that is exchanged by some is best exchanged by all.
//!
//! # Report
//!
//! If `IMMWIRE_REPORT` names a file, each model that held appends a line to it: one JSON object with the
//! clause of the contract, the claim (the model's name), the bound and the number of executions as they
//! were in this run, and `check`, the name that `verification/mutants` knows the model by.
//!
//! Variables: `LOOM_MAX_PREEMPTIONS=n` searches every model to that bound instead of its own;
//! `IMMWIRE_LOOM_ANY_COUNT=1` accepts a search of any size, for mutants, which change it: they are to
//! be caught by what a model asserts, not by how often it ran.
#![cfg(loom)]

use std::any::type_name;
use std::cell::Cell;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use loom::model::Builder;

use crate::thread::Thread;

/// Clauses of the contract that models hold.
pub mod clause {
    #![allow(missing_docs)]
    pub const TRANSPORT: &str = "1 Transport";
    pub const COUNTING: &str = "2 Counting";
    pub const ENDS: &str = "3 Ends";
    pub const TIME: &str = "4 Time";
    pub const STEADY_STATE: &str = "7 Steady state";
}

/// loom's threads, counted.
pub mod thread {
    pub use loom::thread::{JoinHandle, Thread, current, park, yield_now};

    /// Spawns a thread of the model.
    pub fn spawn<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        super::SPAWNED.with(|spawned| spawned.set(spawned.get() + 1));
        loom::thread::spawn(body)
    }
}

thread_local! {
    /// Threads spawned in this execution. loom runs them all on the thread that explores.
    static SPAWNED: Cell<usize> = const { Cell::new(0) };
}

/// How far a search goes.
#[derive(Debug, Clone, Copy)]
pub enum Bound {
    /// Every interleaving with at most so many preemptions.
    Preemptions(usize),
    /// Every interleaving.
    None,
}

/// Runs `model` under every interleaving within `bound`, prints how many there were, and reports it.
///
/// The claim that holds is the name of the function that calls this, a test.
///
/// # Panics
///
/// If the model does, in any interleaving; if the search could be cut short by a limit on time or
/// count, which would pass for a success; or if it ran fewer than `at_least` executions, which means
/// that the model has lost its subject.
pub fn explore<M: Fn() + Send + Sync + 'static>(
    clause: &str,
    bound: Bound,
    at_least: usize,
    model: M,
) {
    let check = type_name::<M>().trim_end_matches("::{{closure}}");
    let mut builder = Builder::new();
    assert!(builder.max_duration.is_none(), "a search with a time limit proves nothing");
    assert!(builder.max_permutations.is_none(), "a search with a count limit proves nothing");
    if builder.preemption_bound.is_none() {
        builder.preemption_bound = match bound {
            Bound::Preemptions(most) => Some(most),
            Bound::None => None,
        };
    }
    let reach = match builder.preemption_bound {
        Some(most) => format!("{most} preemptions"),
        None => "every interleaving".to_owned(),
    };
    let executions = Arc::new(AtomicUsize::new(0));
    let threads = Arc::new(AtomicUsize::new(0));
    let (counted, most) = (Arc::clone(&executions), Arc::clone(&threads));
    let started = Instant::now();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        SPAWNED.with(|spawned| spawned.set(0));
        model();
        most.fetch_max(1 + SPAWNED.with(Cell::get), Ordering::Relaxed);
    });
    let executions = executions.load(Ordering::Relaxed);
    let threads = threads.load(Ordering::Relaxed);
    let bound = format!("{threads} threads, {reach}, {} executions", grouped(executions));
    println!("{check}: {bound}, {:?}", started.elapsed());
    if std::env::var_os("IMMWIRE_LOOM_ANY_COUNT").is_none() {
        assert!(
            executions >= at_least,
            "{check}: {executions} executions, but {at_least} are known"
        );
        report(clause, check, &bound, started.elapsed());
    }
}

/// Appends what was established to the report, if one is wanted.
fn report(clause: &str, check: &str, bound: &str, took: Duration) {
    let Some(path) = std::env::var_os("IMMWIRE_REPORT") else { return };
    let claim = check.rsplit("::").next().unwrap_or(check).replace('_', " ");
    // None of the texts has a character that JSON would have escaped.
    let line = format!(
        "{{\"clause\":\"{clause}\",\"claim\":\"{claim}\",\"method\":\"loom\",\"bound\":\"{bound}\",\
         \"check\":\"{check}\",\"seconds\":{:.2}}}\n",
        took.as_secs_f64()
    );
    let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
    let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
    assert!(written.is_ok(), "the report could not be written: {written:?}");
}

/// With a comma before every three digits.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
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
