//! Counting: adders against the owner who arms, disarms, consumes and retires.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A panic is how a model fails.

use immwire_core::imm::{
    Added, Armed, CounterSlot, CounterTable, Disarmed, Imm, ImmTag, Tally, tallies, tally_words,
};
use immwire_core::wake::{Completed, Completion, Progress};
use immwire_verification_loom::{
    Bound, clause, explore, me, sleep_until,
    thread::{self, Thread},
};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};

const WRITE: u16 = 16;

type Counters = CounterTable<[CounterSlot; 1]>;

fn counters() -> Arc<Counters> {
    Arc::new(CounterTable::new([CounterSlot::new()]))
}

fn tag(generation: u8) -> ImmTag {
    ImmTag::new(0, generation).unwrap()
}

fn imm(units: u16) -> Imm {
    tag(0).with_units(units).unwrap()
}

/// Bytes that a write has brought; loom reports a race if they are read without happening before.
struct Payload(UnsafeCell<u64>);

// SAFETY: loom checks every access to it, and fails the model if two race.
unsafe impl Sync for Payload {}

impl Payload {
    fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    fn write(&self) {
        // SAFETY: loom fails the model if this races.
        self.0.with_mut(|bytes| unsafe { *bytes = 7 });
    }

    fn is_there(&self) -> bool {
        // SAFETY: loom fails the model if this races.
        self.0.with(|bytes| unsafe { *bytes == 7 })
    }
}

/// Adds `units`, and wakes `waiter` if that fired.
fn add(counters: &Counters, units: u16, waiter: &Thread) -> bool {
    match counters.add(imm(units)) {
        Added::Fired => {
            waiter.unpark();
            true
        }
        added => {
            assert_eq!(added, Added::Counted);
            false
        }
    }
}

fn wait(counters: &Counters, writes: u64) -> Armed {
    let armed = counters.arm(tag(0), writes).unwrap();
    if armed != Armed::Ready {
        sleep_until(|| counters.missing(tag(0)).unwrap().is_none());
    }
    armed
}

/// Two pollers add a write each while the owner waits for both: early, late, or in between.
///
/// *Fails if* a change is a load and a store (lost count: deadlock), if `arm` looks first and arms
/// after (missed firing: deadlock), if a target fires twice, or if an exchange is `Relaxed` (a payload
/// is not there for who fires or consumes).
#[test]
fn whoever_learns_of_the_count_sees_every_payload() {
    explore(clause::COUNTING, Bound::None, 90_000, || {
        let (counters, waiter) = (counters(), me());
        let payloads = Arc::new([Payload::new(), Payload::new()]);
        let adders: Vec<_> = (0..2)
            .map(|index| {
                let (counters, waiter) = (counters.clone(), waiter.clone());
                let payloads = payloads.clone();
                thread::spawn(move || {
                    payloads[index].write();
                    let fired = add(&counters, WRITE, &waiter);
                    assert!(!fired || payloads.iter().all(Payload::is_there));
                    usize::from(fired)
                })
            })
            .collect();
        let armed = wait(&counters, 2);
        assert!(payloads.iter().all(Payload::is_there));
        let fired: usize = adders.into_iter().map(|adder| adder.join().unwrap()).sum();
        assert_eq!(fired, usize::from(armed != Armed::Ready));
        assert_eq!(counters.available(tag(0)), Ok(0));
    });
}

/// Somebody looks while two pollers bring what was armed for, and never sleeps. (It is spawned: see
/// the trap in this package's documentation.)
///
/// *Fails if* `missing` reads `Relaxed`: the target is seen to have fired, and a payload races.
#[test]
fn whoever_sees_that_it_fired_sees_every_payload() {
    explore(clause::COUNTING, Bound::None, 3000, || {
        let counters = counters();
        let payloads = Arc::new([Payload::new(), Payload::new()]);
        assert_eq!(counters.arm(tag(0), 2), Ok(Armed::Waiting { missing_units: 32 }));
        let adder = {
            let (counters, payloads) = (counters.clone(), payloads.clone());
            thread::spawn(move || {
                payloads[0].write();
                counters.add(imm(WRITE))
            })
        };
        let watcher = {
            let (counters, payloads) = (counters.clone(), payloads.clone());
            thread::spawn(move || {
                let fired = counters.missing(tag(0)).unwrap().is_none();
                assert!(!fired || payloads.iter().all(Payload::is_there));
            })
        };
        payloads[1].write();
        let added = [counters.add(imm(WRITE)), adder.join().unwrap()];
        assert!(added.contains(&Added::Counted) && added.contains(&Added::Fired));
        watcher.join().unwrap();
    });
}

/// Three pollers, one target.
///
/// *Fails if* a count is lost or a target fires twice; the third thread is what a retry loop that
/// reuses a stale word trips over.
#[test]
fn three_adders_fire_one_target_once() {
    explore(clause::COUNTING, Bound::Preemptions(2), 9000, || {
        let (counters, waiter) = (counters(), me());
        let adders: Vec<_> = (0..3)
            .map(|_| {
                let (counters, waiter) = (counters.clone(), waiter.clone());
                thread::spawn(move || usize::from(add(&counters, WRITE, &waiter)))
            })
            .collect();
        let armed = wait(&counters, 3);
        let fired: usize = adders.into_iter().map(|adder| adder.join().unwrap()).sum();
        assert_eq!(fired, usize::from(armed != Armed::Ready));
        assert_eq!(counters.available(tag(0)), Ok(0));
    });
}

/// Two pollers, and two targets one after the other: what comes early for the second must be kept.
///
/// *Fails if* firing resets the count instead of subtracting (deadlock in round two).
#[test]
fn what_arrives_early_counts_in_the_next_round() {
    explore(clause::COUNTING, Bound::Preemptions(3), 4000, || {
        let (counters, waiter) = (counters(), me());
        let adders: Vec<_> = (0..2)
            .map(|_| {
                let (counters, waiter) = (counters.clone(), waiter.clone());
                thread::spawn(move || usize::from(add(&counters, WRITE, &waiter)))
            })
            .collect();
        let mut waited = 0;
        for _ in 0..2 {
            waited += usize::from(wait(&counters, 1) != Armed::Ready);
        }
        let fired: usize = adders.into_iter().map(|adder| adder.join().unwrap()).sum();
        assert_eq!(fired, waited);
        assert_eq!(counters.available(tag(0)), Ok(0));
    });
}

/// Merged pages bring more than the target, or parts of a write bring less.
///
/// *Fails if* the surplus is dropped when a target fires.
#[test]
fn the_surplus_is_kept() {
    explore(clause::COUNTING, Bound::Preemptions(3), 1500, || {
        let (counters, waiter) = (counters(), me());
        let adders: Vec<_> = [40, 24]
            .into_iter()
            .map(|units| {
                let (counters, waiter) = (counters.clone(), waiter.clone());
                thread::spawn(move || usize::from(add(&counters, units, &waiter)))
            })
            .collect();
        let armed = wait(&counters, 1);
        let fired: usize = adders.into_iter().map(|adder| adder.join().unwrap()).sum();
        assert_eq!(fired, usize::from(armed != Armed::Ready));
        assert_eq!(counters.available(tag(0)), Ok(48));
    });
}

/// The owner gives up while two pollers add: the target fires, or is withdrawn, and not both.
///
/// *Fails if* `disarm` gives back less than arrived, or if it and `add` can both end the target.
#[test]
fn a_withdrawn_target_gives_back_what_came() {
    explore(clause::COUNTING, Bound::None, 4000, || {
        let counters = counters();
        assert_eq!(counters.arm(tag(0), 2), Ok(Armed::Waiting { missing_units: 32 }));
        let adders: Vec<_> = (0..2)
            .map(|_| {
                let (counters, owner) = (counters.clone(), me());
                thread::spawn(move || usize::from(add(&counters, WRITE, &owner)))
            })
            .collect();
        let ended = counters.disarm(tag(0), 2).unwrap();
        let fired: usize = adders.into_iter().map(|adder| adder.join().unwrap()).sum();
        let left = counters.available(tag(0)).unwrap();
        match ended {
            Disarmed::Withdrawn { missing_units } => {
                assert!(missing_units == 32 || missing_units == 16);
                assert_eq!((fired, left), (0, 32));
            }
            Disarmed::AlreadyFired => assert_eq!((fired, left), (1, 0)),
        }
    });
}

/// The owner retires the counter while two pollers add to it.
///
/// *Fails if* a stale generation is counted, or if a retirement overwrites units it did not return.
#[test]
fn a_retired_counter_takes_no_more() {
    explore(clause::COUNTING, Bound::None, 4000, || {
        let counters = counters();
        let adders: Vec<_> = (0..2)
            .map(|_| {
                let counters = counters.clone();
                thread::spawn(move || counters.add(imm(WRITE)))
            })
            .collect();
        let left = counters.retire(tag(0)).unwrap();
        let added: Vec<_> = adders.into_iter().map(|adder| adder.join().unwrap()).collect();
        let counted = added.iter().filter(|added| **added == Added::Counted).count() as u64;
        let stale = added.iter().filter(|added| **added == Added::Stale).count() as u64;
        assert_eq!(counted + stale, 2);
        assert_eq!((left, counters.stale()), (16 * counted, stale));
        assert_eq!(counters.available(tag(1)), Ok(0));
    });
}

/// One poller records who sent, then adds; the owner consumes, and reads the tally.
///
/// *Fails if* an exchange is `Relaxed`: units are consumed whose tally is not there yet.
#[test]
fn tallies_are_there_before_the_count() {
    explore(clause::COUNTING, Bound::None, 100, || {
        let counters = counters();
        let (mut writer, reader) = tallies(Shared::new(), 2).unwrap();
        let poller = {
            let counters = counters.clone();
            thread::spawn(move || {
                for units in [16, 5] {
                    assert!(writer.record(imm(units), 1));
                    assert_eq!(counters.add(imm(units)), Added::Counted);
                }
            })
        };
        if counters.consume(tag(0), 1) == Ok(true) {
            assert!(reader.units(0, 1).unwrap() >= 16);
        }
        if counters.available(tag(0)).unwrap() % 16 == 5 {
            assert_eq!(reader.units(0, 1), Some(21));
        }
        poller.join().unwrap();
        assert_eq!((reader.total(0), reader.units(0, 0)), (Some(21), Some(0)));
    });
}

/// An immediate is late: it is recorded while its counter is retired and its slot given to the next, who reads meanwhile what has come
/// to itself, and finds that alone.
///
/// *Fails if* the writer does not say whose the words are, says so before it has emptied them, or if a reader does not ask.
#[test]
fn tallies_are_of_who_has_the_slot() {
    explore(clause::COUNTING, Bound::None, 330, || {
        let counters = counters();
        let (mut writer, reader) = tallies(Shared::new(), 2).unwrap();
        assert!(writer.record(imm(4), 1));
        assert_eq!(counters.add(imm(4)), Added::Counted);
        let poller = {
            let counters = counters.clone();
            thread::spawn(move || {
                let recorded = writer.record(imm(7), 1);
                assert!(counters.add(imm(7)) != Added::Counted || recorded);
                // If its tag is known already.
                writer.record(tag(1).with_units(5).unwrap(), 1);
            })
        };
        assert!(matches!(counters.retire(tag(0)), Ok(4 | 11)));
        assert!(reader.retire(tag(0)));
        // The search looks back at the last access of a word alone, and the writer loads one before it stores there.
        thread::yield_now();
        let found = reader.units(0, 1).unwrap();
        assert!(found == 0 || found == 5, "{found} units");
        assert_eq!(reader.units(0, 0), Some(0));
        poller.join().unwrap();
        let found = reader.units(0, 1).unwrap();
        assert!(found == 0 || found == 5, "{found} units");
    });
}

/// loom's `Arc` has no `AsRef`.
#[derive(Clone)]
struct Shared(Arc<[Tally; tally_words(2)]>);

impl Shared {
    fn new() -> Self {
        Self(Arc::new(core::array::from_fn(|_| Tally::new())))
    }
}

impl AsRef<[Tally]> for Shared {
    fn as_ref(&self) -> &[Tally] {
        &self.0[..]
    }
}

/// The whole wait as a platform does it: arm, announce, sleep on the completion; a time-out that
/// comes too late still waits for the end that is on its way.
///
/// *Fails if* `arm` misses, if `complete` does not see the sleeper, or if a late `disarm` takes the
/// target from an `add` that has fired.
#[test]
fn a_wait_ends_once_by_count_or_by_time() {
    explore(clause::COUNTING, Bound::Preemptions(3), 4000, || {
        let (counters, waiter) = (counters(), me());
        let done = Arc::new(Completion::new());
        let woken = Arc::new(AtomicUsize::new(0));
        let ticket = done.begin().unwrap();
        let adders: Vec<_> = (0..2)
            .map(|_| {
                let (counters, waiter) = (counters.clone(), waiter.clone());
                let (done, woken) = (done.clone(), woken.clone());
                thread::spawn(move || {
                    if counters.add(imm(WRITE)) == Added::Fired {
                        let ticket = done.pending().unwrap();
                        match done.complete(ticket, 1) {
                            Completed::Wake => waiter.unpark(),
                            Completed::Quiet => {}
                            Completed::TooLate => panic!("completed twice"),
                        }
                        woken.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let mut expected_left = 0;
        if counters.arm(tag(0), 2) != Ok(Armed::Ready) {
            // The deadline has passed already: withdraw if it is not too late.
            match counters.disarm(tag(0), 2).unwrap() {
                Disarmed::Withdrawn { .. } => expected_left = 32,
                Disarmed::AlreadyFired => {
                    sleep_until(|| done.announce_sleeper(ticket) == Progress::Done { code: 1 });
                }
            }
        }
        assert!(done.reset(ticket));
        for adder in adders {
            adder.join().unwrap();
        }
        assert!(woken.load(Ordering::Relaxed) <= 1);
        assert_eq!(counters.available(tag(0)), Ok(expected_left));
    });
}
