//! The pool of numbers: each has one taker, none is lost, and what its last one left is there for the next.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A panic is how a model fails.

use immwire_core::pool::{Link, Pool};
use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering::Relaxed};

type Numbers = Pool<Vec<Link>>;

fn pool(count: u16) -> Arc<Numbers> {
    Arc::new(Pool::new((0..count).map(|_| Link::new()).collect()))
}

fn taking(pool: &Arc<Numbers>) -> thread::JoinHandle<Option<u16>> {
    let pool = pool.clone();
    thread::spawn(move || pool.take())
}

/// All that are free.
fn rest(pool: &Numbers) -> Vec<u16> {
    std::iter::from_fn(|| pool.take()).collect()
}

/// While one thread is taking the first number, another one takes it and the next, and gives the first back.
///
/// *Fails if* the first word is the same after it was changed twice (the second number is taken twice), or if a taking is
/// a load and a store.
#[test]
fn a_number_has_one_taker() {
    explore(clause::STEADY_STATE, Bound::Preemptions(3), 100, || {
        let pool = pool(2);
        let other = taking(&pool);
        let mut held = Vec::new();
        if let Some(first) = pool.take() {
            held.extend(pool.take());
            pool.give(first);
        }
        held.extend(other.join().unwrap());
        held.extend(rest(&pool));
        held.sort_unstable();
        assert_eq!(held, [0, 1]);
    });
}

/// Numbers come back while one is taken.
///
/// *Fails if* the first word is read without what was written before it (a link is from before, and the numbers behind it
/// are lost).
#[test]
fn no_number_is_lost() {
    explore(clause::STEADY_STATE, Bound::None, 140, || {
        let pool = pool(2);
        assert_eq!(rest(&pool), [0, 1]);
        let giver = {
            let pool = pool.clone();
            thread::spawn(move || {
                pool.give(0);
                pool.give(1);
            })
        };
        let taker = taking(&pool);
        giver.join().unwrap();
        let mut all: Vec<_> = taker.join().unwrap().into_iter().collect();
        all.extend(rest(&pool));
        all.sort_unstable();
        assert_eq!(all, [0, 1]);
    });
}

/// Two threads use what the one number stands for.
///
/// *Fails if* a number is given back before what was done with it, or taken without that (one of the uses is lost).
#[test]
fn the_next_taker_sees_what_the_last_one_left() {
    explore(clause::STEADY_STATE, Bound::None, 90, || {
        let shared = Arc::new((pool(1), AtomicU32::new(0)));
        let use_it = |(pool, slot): &(Arc<Numbers>, AtomicU32)| {
            let Some(number) = pool.take() else { return 0 };
            // Whoever has the number has the slot, and needs no exchange.
            slot.store(slot.load(Relaxed) + 1, Relaxed);
            pool.give(number);
            1
        };
        let other = {
            let shared = shared.clone();
            thread::spawn(move || use_it(&shared))
        };
        let uses = use_it(&shared) + other.join().unwrap();
        assert_eq!(shared.0.take(), Some(0));
        assert_eq!(shared.1.load(Relaxed), uses);
    });
}
