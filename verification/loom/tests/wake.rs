//! Waiters that really sleep: a wake-up that is missed is a deadlock, which loom reports.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A panic is how a model fails.

use immwire_core::wake::{Completed, Completion, Doorbell, Progress};
use immwire_verification_loom::{
    Bound, clause, explore, me, sleep_until,
    thread::{self, Thread},
};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Mutex};

struct Shared {
    completion: Completion,
    result: UnsafeCell<u32>,
    /// Where a platform keeps a future's waker.
    waker: Mutex<Option<Thread>>,
}

// SAFETY: loom checks every access to the result, and fails the model if two race.
unsafe impl Sync for Shared {}

impl Shared {
    fn new() -> Arc<Self> {
        let (result, waker) = (UnsafeCell::new(0), Mutex::new(None));
        Arc::new(Self { completion: Completion::new(), result, waker })
    }

    fn set_result(&self, value: u32) {
        // SAFETY: loom fails the model if this races.
        self.result.with_mut(|result| unsafe { *result = value });
    }

    fn result(&self) -> u32 {
        // SAFETY: loom fails the model if this races.
        self.result.with(|result| unsafe { *result })
    }
}

fn doorbell_model(producers: usize) {
    let bell = Arc::new(Doorbell::new());
    let work: Arc<Vec<_>> = Arc::new((0..producers).map(|_| AtomicU32::new(0)).collect());
    let sleeper = me();
    let producers: Vec<_> = (0..producers)
        .map(|index| {
            let (bell, work, sleeper) = (bell.clone(), work.clone(), sleeper.clone());
            thread::spawn(move || {
                work[index].store(1, Ordering::Relaxed);
                if bell.ring() {
                    sleeper.unpark();
                }
            })
        })
        .collect();
    let all_there = || work.iter().all(|work| work.load(Ordering::Relaxed) == 1);
    while !all_there() {
        bell.prepare_sleep();
        if !all_there() {
            thread::park();
        }
        bell.awake();
    }
    for producer in producers {
        producer.join().unwrap();
    }
}

/// An engine sleeps while a producer makes work.
///
/// *Fails if* either fence is missing (both sides miss what the other wrote: deadlock).
#[test]
fn a_doorbell_is_not_missed() {
    explore(clause::TIME, Bound::None, 80, || doorbell_model(1));
}

/// Two producers, of which one may pay for the wake-up of both.
///
/// *Fails if* either fence is missing, or if `ring` clears the announcement without saying so.
#[test]
fn one_wake_up_serves_two_producers() {
    explore(clause::TIME, Bound::Preemptions(3), 6000, || doorbell_model(2));
}

/// A blocking wait: announce, then sleep; the completer wakes whom it is told to wake.
///
/// *Fails if* `complete` forgets the sleeper bit or loads and stores around it (deadlock), or if it is
/// `Relaxed` (the result races).
#[test]
fn a_sleeper_is_woken_and_sees_the_result() {
    explore(clause::TIME, Bound::None, 12, || {
        let (shared, sleeper) = (Shared::new(), me());
        let ticket = shared.completion.begin().unwrap();
        let completer = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.set_result(5);
                if shared.completion.complete(ticket, 3) == Completed::Wake {
                    sleeper.unpark();
                }
            })
        };
        sleep_until(|| shared.completion.announce_sleeper(ticket) == Progress::Done { code: 3 });
        assert_eq!(shared.result(), 5);
        completer.join().unwrap();
    });
}

/// Somebody who polls and never sleeps. (It is spawned: see the trap in this package's documentation.)
///
/// *Fails if* `poll` or `complete` is `Relaxed` (the result races).
#[test]
fn a_poller_sees_the_result() {
    explore(clause::TIME, Bound::None, 6, || {
        let shared = Shared::new();
        let ticket = shared.completion.begin().unwrap();
        let poller = {
            let shared = shared.clone();
            thread::spawn(move || {
                let done = shared.completion.poll(ticket) == Progress::Done { code: 0 };
                assert!(!done || shared.result() == 5);
            })
        };
        shared.set_result(5);
        assert_eq!(shared.completion.complete(ticket, 0), Completed::Quiet);
        poller.join().unwrap();
        assert_eq!(shared.completion.poll(ticket), Progress::Done { code: 0 });
    });
}

/// A future: its waker lies behind a mutex, which the completer takes only when told to.
///
/// *Fails if* the sleeper bit is dropped (the waker stays where it is: deadlock).
#[test]
fn a_registered_waker_is_found() {
    explore(clause::TIME, Bound::None, 12, || {
        let shared = Shared::new();
        let ticket = shared.completion.begin().unwrap();
        let completer = {
            let shared = shared.clone();
            thread::spawn(move || {
                if shared.completion.complete(ticket, 1) == Completed::Wake {
                    let waker = shared.waker.lock().unwrap().take();
                    waker.expect("the waker is stored before the sleep is announced").unpark();
                }
            })
        };
        sleep_until(|| {
            *shared.waker.lock().unwrap() = Some(me());
            shared.completion.announce_sleeper(ticket) == Progress::Done { code: 1 }
        });
        completer.join().unwrap();
    });
}

/// Two threads complete (an end, and a cancellation): one of them decides.
///
/// *Fails if* both can (completed twice), or if the loser overwrites the code.
#[test]
fn one_of_two_completers_decides() {
    explore(clause::TIME, Bound::None, 9000, || {
        let (shared, sleeper) = (Shared::new(), me());
        let ticket = shared.completion.begin().unwrap();
        let completers: Vec<_> = (1..=2)
            .map(|code| {
                let (shared, sleeper) = (shared.clone(), sleeper.clone());
                thread::spawn(move || {
                    let completed = shared.completion.complete(ticket, code);
                    if completed == Completed::Wake {
                        sleeper.unpark();
                    }
                    (completed != Completed::TooLate).then_some(code)
                })
            })
            .collect();
        sleep_until(|| {
            !matches!(shared.completion.announce_sleeper(ticket), Progress::Pending { .. })
        });
        let won: Vec<_> = completers.into_iter().filter_map(|c| c.join().unwrap()).collect();
        assert_eq!(won.len(), 1);
        assert_eq!(shared.completion.poll(ticket), Progress::Done { code: won[0] });
    });
}

/// The owner gives up and begins again, while the old tenancy's completer and a watcher are late.
///
/// *Fails if* the generation is not compared, or does not change: the late ones then touch or see the
/// next tenancy.
#[test]
fn a_late_ticket_does_not_touch_the_next_tenancy() {
    explore(clause::TIME, Bound::None, 30_000, || {
        let shared = Shared::new();
        let old = shared.completion.begin().unwrap();
        let late = {
            let shared = shared.clone();
            thread::spawn(move || {
                let completed = shared.completion.complete(old, 1);
                assert_ne!(completed, Completed::Wake);
                completed == Completed::Quiet
            })
        };
        let watcher = {
            let shared = shared.clone();
            thread::spawn(move || shared.completion.poll(old))
        };
        assert!(shared.completion.reset(old));
        let new = shared.completion.begin().unwrap();
        assert_ne!(old, new);
        assert_eq!(shared.completion.complete(new, 2), Completed::Quiet);
        assert_eq!(shared.completion.poll(new), Progress::Done { code: 2 });
        let completed = late.join().unwrap();
        let seen = watcher.join().unwrap();
        assert!(seen != Progress::Done { code: 2 });
        assert!(completed || seen != Progress::Done { code: 1 });
        assert_eq!(shared.completion.poll(old), Progress::Stale);
    });
}

/// A slot is given back while another thread wants it for the next tenancy.
///
/// *Fails if* `reset` or `begin` is `Relaxed`: the tenants then race for what belongs to the slot.
#[test]
fn the_next_tenant_comes_after_the_last() {
    explore(clause::TIME, Bound::None, 6, || {
        let shared = Shared::new();
        let ticket = shared.completion.begin().unwrap();
        let next = {
            let shared = shared.clone();
            thread::spawn(move || {
                let begun = shared.completion.begin();
                if begun.is_some() {
                    shared.set_result(2);
                }
                begun.is_some()
            })
        };
        shared.set_result(1);
        assert!(shared.completion.reset(ticket));
        let begun = next.join().unwrap();
        assert_eq!(shared.result(), if begun { 2 } else { 1 });
        assert_eq!(shared.completion.pending().is_some(), begun);
    });
}

/// Two threads want the same slot for a tenancy.
///
/// *Fails if* both get it.
#[test]
fn one_of_two_begins() {
    explore(clause::TIME, Bound::None, 50, || {
        let shared = Shared::new();
        let others: Vec<_> = (0..2)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || shared.completion.begin())
            })
            .collect();
        let begun: Vec<_> = others.into_iter().filter_map(|o| o.join().unwrap()).collect();
        assert_eq!(begun.len(), 1);
        assert_eq!(shared.completion.pending(), Some(begun[0]));
    });
}
