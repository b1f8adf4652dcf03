//! The lane: words in order, with what was written before them, and room that is really free.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A panic is how a model fails.

use immwire_core::lane::{Consumer, Entry, LaneError, Producer, Word};
use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::cell::UnsafeCell;
use loom::sync::Arc;

const CAPACITY: u32 = 2;
const VALUES: u32 = 3;

struct Shared {
    entries: [Entry; CAPACITY as usize],
    credit: Word,
    /// Bytes that a write has brought, one for each value.
    payloads: [UnsafeCell<u32>; VALUES as usize],
    /// What the consumer did before it took the next value.
    answers: [UnsafeCell<u32>; VALUES as usize],
}

// SAFETY: loom checks every access to the cells, and fails the model if two race.
unsafe impl Sync for Shared {}

fn shared() -> Arc<Shared> {
    Arc::new(Shared {
        entries: [(); CAPACITY as usize].map(|()| [Word::new(0), Word::new(0)]),
        credit: Word::new(0),
        payloads: [0; VALUES as usize].map(UnsafeCell::new),
        answers: [0; VALUES as usize].map(UnsafeCell::new),
    })
}

fn set(cell: &UnsafeCell<u32>, value: u32) {
    // SAFETY: loom fails the model if this races.
    cell.with_mut(|cell| unsafe { *cell = value });
}

fn get(cell: &UnsafeCell<u32>) -> u32 {
    // SAFETY: loom fails the model if this races.
    cell.with(|cell| unsafe { *cell })
}

/// What comes with a value.
fn note(value: u32) -> u64 {
    u64::from(value) + 300
}

/// Three words through a lane of two, each with a note and a payload.
///
/// *Fails if* the entry is published or read `Relaxed` (the payload races), if the note is stored after it is published
/// (an old note comes), if the producer does not go by the credit (an entry is overwritten: a later lap), or if the lap
/// does not change (an old entry is taken again).
#[test]
fn words_come_in_order_with_their_payload() {
    explore(clause::TRANSPORT, Bound::None, 4000, || {
        let shared = shared();
        let writer = {
            let shared = shared.clone();
            thread::spawn(move || {
                let mut producer = Producer::new(CAPACITY).unwrap();
                for value in 0..VALUES {
                    set(&shared.payloads[value as usize], value + 100);
                    loop {
                        match producer.push(&shared.entries, &shared.credit, value, note(value)) {
                            Ok(()) => break,
                            Err(LaneError::Full) => thread::yield_now(),
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            })
        };
        let mut consumer = Consumer::new(CAPACITY).unwrap();
        for expected in 0..VALUES {
            let (value, beside) = loop {
                match consumer.pop(&shared.entries, &shared.credit).unwrap() {
                    Some(popped) => break popped,
                    None => thread::yield_now(),
                }
            };
            assert_eq!((value, beside), (expected, note(expected)));
            assert_eq!(get(&shared.payloads[value as usize]), value + 100);
        }
        assert_eq!(consumer.pop(&shared.entries, &shared.credit), Ok(None));
        writer.join().unwrap();
    });
}

/// What the consumer did before it took a word is visible to a producer that sees the credit for it.
///
/// *Fails if* the credit is stored or loaded `Relaxed`.
#[test]
fn credit_carries_what_the_consumer_did() {
    explore(clause::TRANSPORT, Bound::None, 10, || {
        let shared = shared();
        let mut producer = Producer::new(CAPACITY).unwrap();
        for value in 0..2 {
            producer.push(&shared.entries, &shared.credit, value, note(value)).unwrap();
        }
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || {
                let mut consumer = Consumer::new(CAPACITY).unwrap();
                for value in 0..2 {
                    set(&shared.answers[value as usize], value + 200);
                    let popped = consumer.pop(&shared.entries, &shared.credit);
                    assert_eq!(popped, Ok(Some((value, note(value)))));
                }
            })
        };
        let room = producer.room(&shared.credit).unwrap();
        for value in 0..room {
            assert_eq!(get(&shared.answers[value as usize]), value + 200);
        }
        reader.join().unwrap();
        assert_eq!(producer.room(&shared.credit), Ok(2));
    });
}
