//! One completion, and those who wait for it.

use std::time::Duration;

use immwire_core::wake::Ticket;
use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::cell::UnsafeCell;
use loom::sync::Arc;

use crate::callback::Callbacks;
use crate::sync::park;
use crate::wait::{WaitCell, Waiter};
use crate::{Calls, my_waker};

struct Shared {
    cell: WaitCell,
    callbacks: Callbacks,
    /// What the completer has to show.
    result: UnsafeCell<u32>,
}

// SAFETY: loom checks every access to the result, and fails the model if two race.
unsafe impl Sync for Shared {}

impl Shared {
    fn new() -> (Arc<Self>, Ticket) {
        let (cell, callbacks) = (WaitCell::default(), Callbacks::new(2).unwrap());
        let shared = Self { cell, callbacks, result: UnsafeCell::new(0) };
        let ticket = shared.cell.completion.begin().unwrap();
        (Arc::new(shared), ticket)
    }

    fn complete(&self, ticket: Ticket) {
        // SAFETY: loom fails the model if this races.
        self.result.with_mut(|result| unsafe { *result = 5 });
        assert!(self.cell.complete(ticket, 3, &self.callbacks));
    }

    fn result(&self) -> u32 {
        // SAFETY: loom fails the model if this races.
        self.result.with(|result| unsafe { *result })
    }
}

/// A completer, and a thread that sleeps in the kernel until it has come.
///
/// *Fails if* the sleep is not announced, or nobody wakes the word (deadlock).
#[test]
fn a_blocked_thread_is_woken_by_the_completion() {
    explore(clause::TIME, Bound::None, 100, || {
        let (shared, ticket) = Shared::new();
        let completer = {
            let shared = shared.clone();
            thread::spawn(move || shared.complete(ticket))
        };
        assert_eq!(shared.cell.wait(ticket, Duration::MAX), Some(3));
        assert_eq!(shared.result(), 5);
        completer.join().unwrap();
    });
}

/// Two threads sleep on one completion.
///
/// *Fails if* only one is woken, or the second announcement undoes the first (deadlock).
#[test]
fn all_who_are_blocked_are_woken() {
    explore(clause::TIME, Bound::Preemptions(3), 8500, || {
        let (shared, ticket) = Shared::new();
        let completer = {
            let shared = shared.clone();
            thread::spawn(move || shared.complete(ticket))
        };
        let other = {
            let shared = shared.clone();
            thread::spawn(move || shared.cell.wait(ticket, Duration::MAX))
        };
        assert_eq!(shared.cell.wait(ticket, Duration::MAX), Some(3));
        assert_eq!(other.join().unwrap(), Some(3));
        completer.join().unwrap();
    });
}

/// A wait runs out of time at any moment; the next one, with time, finds what came in between.
///
/// *Fails if* a wait that runs out of time undoes the announcement or the completion.
#[test]
fn a_wait_that_was_given_up_can_be_taken_up_again() {
    explore(clause::TIME, Bound::None, 140, || {
        let (shared, ticket) = Shared::new();
        let completer = {
            let shared = shared.clone();
            thread::spawn(move || shared.complete(ticket))
        };
        let seen = shared.cell.wait(ticket, Duration::ZERO);
        assert!(seen.is_none() || shared.result() == 5);
        assert_eq!(shared.cell.wait(ticket, Duration::MAX), Some(3));
        completer.join().unwrap();
    });
}

/// A future that moves from one task to another between two polls.
///
/// *Fails if* the first waker is kept, or if the completer does not look for one (deadlock).
#[test]
fn the_last_waker_that_was_left_is_woken() {
    explore(clause::TIME, Bound::None, 620, || {
        let (shared, ticket) = Shared::new();
        let completer = {
            let shared = shared.clone();
            thread::spawn(move || shared.complete(ticket))
        };
        let mut seen = shared.cell.watch(ticket, std::task::Waker::noop());
        while seen.is_none() {
            seen = shared.cell.watch(ticket, &my_waker());
            if seen.is_none() {
                park();
            }
        }
        assert_eq!((seen, shared.result()), (Some(3), 5));
        completer.join().unwrap();
    });
}

/// A callback is left while the completer comes: one of the two sees to it that it runs.
///
/// *Fails if* the completer does not take it, if it is left after the sleep is announced, or if whoever
/// leaves it does not take it back when the completion was first (not called).
#[test]
fn a_callback_that_is_left_runs_once() {
    explore(clause::ENDS, Bound::None, 7, || {
        let (shared, ticket) = Shared::new();
        let completer = {
            let shared = shared.clone();
            thread::spawn(move || shared.complete(ticket))
        };
        let calls = Calls::default();
        if let Err((Waiter::Callback(job), code)) =
            shared.cell.leave(ticket, Waiter::Callback(calls.job()))
        {
            assert_eq!((code, shared.result()), (3, 5));
            job();
        }
        completer.join().unwrap();
        shared.callbacks.run_pending();
        assert_eq!(calls.made(), 1);
    });
}

/// The tenant sees its completion by itself and leaves; the next one leaves a callback, while the
/// first's completer has not come to waking anybody yet.
///
/// *Fails if* the completer takes whatever waiter it finds (called before its own completion).
#[test]
fn a_slow_completer_leaves_the_next_tenants_callback_alone() {
    explore(clause::ENDS, Bound::None, 170, || {
        let (shared, first) = Shared::new();
        let completer = {
            let shared = shared.clone();
            thread::spawn(move || shared.complete(first))
        };
        // Announces a sleep, so that the completer looks for somebody to wake.
        while shared.cell.wait(first, Duration::ZERO).is_none() {
            thread::yield_now();
        }
        assert!(shared.cell.completion.reset(first));
        let second = shared.cell.completion.begin().unwrap();
        let calls = Calls::default();
        assert!(shared.cell.leave(second, Waiter::Callback(calls.job())).is_ok());
        completer.join().unwrap();
        shared.callbacks.run_pending();
        assert_eq!(calls.made(), 0, "called before its own completion");
        assert!(shared.cell.complete(second, 0, &shared.callbacks));
        shared.callbacks.run_pending();
        assert_eq!(calls.made(), 1);
    });
}
