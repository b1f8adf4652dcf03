//! The ring: values reach one consumer each, whole, in order, and none is overwritten.
//!
//! The core's cells are loom's here, so that a value read before it was published, or overwritten
//! before it was read, fails the model by itself.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A panic is how a model fails.

use immwire_core::ring::{Cell, Ring};
use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::sync::Arc;

type Small = Ring<u32, [Cell<u32>; 2]>;

fn ring() -> Arc<Small> {
    Arc::new(Ring::from_array([Cell::new(), Cell::new()]).unwrap())
}

fn pop(ring: &Small) -> u32 {
    loop {
        match ring.try_pop() {
            Some(value) => return value,
            None => thread::yield_now(),
        }
    }
}

fn push(ring: &Small, value: u32) {
    while ring.try_push(value).is_err() {
        thread::yield_now();
    }
}

/// Two callers, one engine.
///
/// *Fails if* the claim is a load and a store (a value is lost: no end), or if a sequence number is
/// published or read `Relaxed` (causality).
#[test]
fn two_producers_reach_one_consumer() {
    explore(clause::STEADY_STATE, Bound::Preemptions(2), 600, || {
        let ring = ring();
        let producers: Vec<_> = (1..=2)
            .map(|value| {
                let ring = ring.clone();
                thread::spawn(move || assert_eq!(ring.try_push(value), Ok(())))
            })
            .collect();
        let mut got = [pop(&ring), pop(&ring)];
        got.sort_unstable();
        assert_eq!(got, [1, 2]);
        assert_eq!(ring.try_pop(), None);
        for producer in producers {
            producer.join().unwrap();
        }
    });
}

/// Two engines take from one caller.
///
/// *Fails if* two consumers can claim the same position (a value comes twice, and is moved out twice).
#[test]
fn two_consumers_share_what_comes() {
    explore(clause::STEADY_STATE, Bound::Preemptions(2), 300, || {
        let ring = ring();
        let consumers: Vec<_> = (0..2)
            .map(|_| {
                let ring = ring.clone();
                thread::spawn(move || ring.try_pop())
            })
            .collect();
        push(&ring, 1);
        push(&ring, 2);
        let mut got: Vec<_> = consumers.into_iter().filter_map(|c| c.join().unwrap()).collect();
        while let Some(value) = ring.try_pop() {
            got.push(value);
        }
        got.sort_unstable();
        assert_eq!(got, [1, 2]);
    });
}

/// A caller that is faster than the engine: three values through two cells.
///
/// *Fails if* a full ring is not noticed (a cell is written while it is read), or if a consumer gives
/// a cell back `Relaxed`.
#[test]
fn a_full_ring_waits_and_keeps_the_order() {
    explore(clause::STEADY_STATE, Bound::None, 150, || {
        let ring = ring();
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || (1..=3).for_each(|value| push(&ring, value)))
        };
        assert_eq!([pop(&ring), pop(&ring), pop(&ring)], [1, 2, 3]);
        assert_eq!(ring.try_pop(), None);
        producer.join().unwrap();
    });
}

/// Two callers compete for the last cell: one is told that the ring is full, and gets its value back.
///
/// *Fails if* both are let in.
#[test]
fn the_last_cell_goes_to_one() {
    explore(clause::STEADY_STATE, Bound::None, 150, || {
        let ring = ring();
        push(&ring, 9);
        let producers: Vec<_> = (1..=2)
            .map(|value| {
                let ring = ring.clone();
                thread::spawn(move || ring.try_push(value))
            })
            .collect();
        let results: Vec<_> = producers.into_iter().map(|p| p.join().unwrap()).collect();
        let (won, lost) = if results[0].is_ok() { (1, 2) } else { (2, 1) };
        assert_eq!(results[lost as usize - 1], Err(lost));
        assert_eq!(results[won as usize - 1], Ok(()));
        assert_eq!((ring.try_pop(), ring.try_pop(), ring.try_pop()), (Some(9), Some(won), None));
    });
}
