//! Short copies by warps that stand by: made once or never, with all their bytes, whenever the warp goes.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A panic is how a model fails.

use immwire_core::id::Time;
use immwire_core::lane::Word;
use immwire_core::standby::{Ended, Errand, SEAT_WORDS, Seat, Standby, Warp};
use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::cell::UnsafeCell;
use loom::sync::Arc;

/// A seat, and the memory that copies are from and to.
struct Shared {
    words: [Word; SEAT_WORDS],
    src: UnsafeCell<u32>,
    dst: UnsafeCell<u32>,
}

// SAFETY: loom checks every access to the memory, and fails the model if two race.
unsafe impl Sync for Shared {}

const ERRAND: Errand = Errand { src: 0x1_0000_0002, dst: 0x3_0000_0004, len: 5 };

impl Shared {
    fn new() -> Arc<Self> {
        let words = std::array::from_fn(|_| Word::new(0));
        Arc::new(Self { words, src: UnsafeCell::new(0), dst: UnsafeCell::new(0) })
    }

    fn seat(&self) -> Seat<'_> {
        Seat::new(&self.words).unwrap()
    }

    /// Copies, if it is to; whole or not at all.
    fn perform(&self, errand: Option<Errand>) -> bool {
        let Some(errand) = errand else { return false };
        assert_eq!(errand, ERRAND);
        // SAFETY: loom fails the model if these race.
        let src = self.src.with(|src| unsafe { *src });
        // SAFETY: as above.
        self.dst.with_mut(|dst| unsafe { *dst += src });
        true
    }

    /// A warp that looks twice, and goes.
    fn stand_by(&self, launch: u32) {
        let mut warp = Warp::arrive(self.seat(), launch);
        for _ in 0..2 {
            if self.perform(warp.look()) {
                warp.done();
            }
        }
        warp.go();
    }
}

/// The first launch of an asker that has seen two short copies at one time.
fn sent(seat: Seat<'_>) -> Standby {
    let mut standby = Standby::new();
    assert_eq!(standby.send(Time::ZERO, &[seat]), None);
    assert_eq!(standby.send(Time::ZERO, &[seat]), Some(1));
    standby
}

/// Asks, if the warp is found to be up.
fn asks(standby: &mut Standby, seat: Seat<'_>) -> bool {
    (0..2).any(|_| {
        thread::yield_now();
        standby.ask(ERRAND, &[seat]).is_some()
    })
}

/// An asker finds a warp up, and asks, while that goes: the copy is made by the warp or, once it has gone, by the asker.
///
/// *Fails if* the asker's words are not released or acquired (the warp reads the source before it was written), or the status is not (the
/// asker uses what is not there).
#[test]
fn a_copy_is_made_once_whenever_the_warp_goes() {
    explore(clause::ENDS, Bound::Preemptions(4), 40_000, || {
        let shared = Shared::new();
        let warp = {
            let shared = shared.clone();
            thread::spawn(move || shared.stand_by(1))
        };
        let seat = shared.seat();
        let mut standby = sent(seat);
        // SAFETY: loom fails the model if this races.
        shared.src.with_mut(|src| unsafe { *src = 7 });
        if asks(&mut standby, seat) {
            let ended = loop {
                if let Some(ended) = standby.look(0, seat) {
                    break ended;
                }
                thread::yield_now();
            };
            if ended == Ended::NotDone {
                assert!(shared.perform(Some(ERRAND)));
            }
            // SAFETY: as above.
            assert_eq!(shared.dst.with(|dst| unsafe { *dst }), 7);
        }
        warp.join().unwrap();
    });
}

/// What was asked for while a warp was up, which went and did not see it, is not made by the next.
///
/// *Fails if* the words are not taken back before another is sent.
#[test]
fn what_was_not_made_is_not_made_later() {
    explore(clause::ENDS, Bound::Preemptions(4), 10_000, || {
        let shared = Shared::new();
        let warp = {
            let shared = shared.clone();
            thread::spawn(move || shared.stand_by(1))
        };
        let seat = shared.seat();
        let mut standby = sent(seat);
        // SAFETY: loom fails the model if this races.
        shared.src.with_mut(|src| unsafe { *src = 7 });
        let asked = asks(&mut standby, seat);
        warp.join().unwrap();
        let ended = standby.look(0, seat);
        assert_eq!(ended.is_some(), asked);
        let before = u32::from(ended == Some(Ended::Done)) * 7;
        assert_eq!(standby.send(Time::ZERO, &[seat]), Some(2));
        shared.stand_by(2);
        // SAFETY: as above.
        assert_eq!(shared.dst.with(|dst| unsafe { *dst }), before);
    });
}
