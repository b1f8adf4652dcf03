//! Waits for counts: reached, given up, abandoned, and overtaken by the engine's end.

use std::time::Duration;

use immwire_core::imm::{Added, Imm, ImmTag};
use immwire_core::wake::Ticket;
use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::sync::Arc;

use crate::callback::Callbacks;
use crate::counting::{ArmError, CODE_REACHED, CODE_STOPPED, Counting};
use crate::my_waker;
use crate::sync::park;

struct Shared {
    counting: Counting,
    callbacks: Callbacks,
}

fn tag() -> ImmTag {
    ImmTag::new(0, 0).unwrap()
}

fn write() -> Imm {
    tag().with_units(16).unwrap()
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self { counting: Counting::new(1), callbacks: Callbacks::new(2).unwrap() })
    }

    fn count(&self) {
        let added = self.counting.count(write(), &self.callbacks);
        assert!(matches!(added, Added::Counted | Added::Fired));
    }

    fn arm(&self, writes: u64) -> Result<Option<Ticket>, ArmError> {
        self.counting.arm(tag(), writes, &self.callbacks)
    }

    /// A wait as callers have it: whether the writes came, or how many units were missing.
    fn wait(&self, writes: u64, timeout: Duration) -> Result<(), u64> {
        let Some(ticket) = self.arm(writes).unwrap() else { return Ok(()) };
        match self.counting.wait_cell(tag()).unwrap().wait(ticket, timeout) {
            Some(code) => {
                assert!(self.counting.settle(tag(), ticket, code, writes));
                Ok(())
            }
            None => self.counting.disarm(tag(), ticket, writes).unwrap().map_or(Ok(()), Err),
        }
    }

    fn available(&self) -> u64 {
        self.counting.table().available(tag()).unwrap()
    }
}

fn count(shared: &Arc<Shared>) -> thread::JoinHandle<()> {
    let shared = shared.clone();
    thread::spawn(move || shared.count())
}

/// Two threads count while the owner sleeps until both have.
///
/// *Fails if* the counter is armed before the completion has begun (whoever fires finds nobody: deadlock).
#[test]
fn a_wait_for_a_count_is_woken() {
    explore(clause::COUNTING, Bound::Preemptions(3), 26_000, || {
        let shared = Shared::new();
        let counters = [count(&shared), count(&shared)];
        assert_eq!(shared.wait(2, Duration::MAX), Ok(()));
        for counter in counters {
            counter.join().unwrap();
        }
        assert_eq!(shared.available(), 0);
    });
}

/// A wait runs out of time at any moment, and the next begins at once, with time.
///
/// *Fails if* a time-out that comes too late does not wait for the completion that is on its way, which
/// then ends the next wait before its time, or says that it was in time.
#[test]
fn a_wait_given_up_neither_loses_units_nor_ends_the_next() {
    explore(clause::COUNTING, Bound::Preemptions(3), 7200, || {
        let shared = Shared::new();
        let counter = {
            let shared = shared.clone();
            thread::spawn(move || (0..2).for_each(|_| shared.count()))
        };
        let first = shared.wait(1, Duration::ZERO);
        assert_eq!(shared.wait(1, Duration::MAX), Ok(()));
        assert_eq!(shared.counting.table().missing(tag()), Ok(None), "ended before its time");
        counter.join().unwrap();
        assert_eq!(shared.available(), if first.is_ok() { 0 } else { 16 });
    });
}

/// A future that waits for a count is polled, and dropped while the count is reached.
///
/// *Fails if* what it had consumed is not given back.
#[test]
fn a_future_that_is_dropped_gives_back_what_had_arrived() {
    explore(clause::COUNTING, Bound::Preemptions(3), 22_000, || {
        let shared = Shared::new();
        let counters = [count(&shared), count(&shared)];
        let mut left = 32;
        match shared.arm(2).unwrap() {
            None => left = 0,
            Some(ticket) => {
                let cell = shared.counting.wait_cell(tag()).unwrap();
                let _ = cell.watch(ticket, &my_waker());
                shared.counting.abandon(tag(), ticket, 2, &shared.callbacks);
            }
        }
        for counter in counters {
            counter.join().unwrap();
        }
        assert_eq!(shared.available(), left);
        assert!(shared.counting.wait_cell(tag()).unwrap().completion.begin().is_some());
    });
}

/// A future that waits for a count, and has nothing but its waker.
///
/// *Fails if* the waker is not found by whoever fires (deadlock).
#[test]
fn a_future_that_waits_for_a_count_is_woken() {
    explore(clause::TIME, Bound::None, 1100, || {
        let shared = Shared::new();
        let counter = count(&shared);
        if let Some(ticket) = shared.arm(1).unwrap() {
            let cell = shared.counting.wait_cell(tag()).unwrap();
            let code = loop {
                match cell.watch(ticket, &my_waker()) {
                    Some(code) => break code,
                    None => park(),
                }
            };
            assert_eq!(code, CODE_REACHED);
            assert!(shared.counting.settle(tag(), ticket, code, 1));
        }
        counter.join().unwrap();
        assert_eq!(shared.available(), 0);
    });
}

/// A wait without a limit begins while the engine ends.
///
/// *Fails if* either fence is missing, or if a wait that has begun does not look whether the engine
/// has ended: nobody ends it (deadlock).
#[test]
fn a_wait_begun_while_the_engine_ends_is_ended() {
    explore(clause::TIME, Bound::None, 920, || {
        let shared = Shared::new();
        let ending = {
            let shared = shared.clone();
            thread::spawn(move || shared.counting.end(&shared.callbacks))
        };
        match shared.arm(1) {
            Ok(Some(ticket)) => {
                let cell = shared.counting.wait_cell(tag()).unwrap();
                assert_eq!(cell.wait(ticket, Duration::MAX), Some(CODE_STOPPED));
                assert!(!shared.counting.settle(tag(), ticket, CODE_STOPPED, 1));
            }
            other => assert_eq!(other, Err(ArmError::Ended)),
        }
        ending.join().unwrap();
        assert_eq!(shared.arm(1), Err(ArmError::Ended));
        // The counter is as it was: what comes is kept.
        shared.count();
        assert_eq!(shared.available(), 16);
    });
}
