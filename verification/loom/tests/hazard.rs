//! Taking memory back: once its owner is told that all is quiet, no write races with it.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A panic is how a model fails.

use immwire_core::hazard::{NO_KEY, enter, leave, may_continue, quiet, withdraw};
use immwire_core::lane::Word;
use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::cell::UnsafeCell;
use loom::sync::Arc;

const FIRST: u64 = 7;
const SECOND: u64 = 8;

struct Shared {
    active: Word,
    grants: [Word; 2],
    /// The memory of the first region.
    memory: UnsafeCell<u32>,
}

// SAFETY: loom checks every access to the memory, and fails the model if two race.
unsafe impl Sync for Shared {}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            active: Word::new(NO_KEY),
            grants: [Word::new(FIRST), Word::new(SECOND)],
            memory: UnsafeCell::new(0),
        })
    }

    fn write(&self) {
        // SAFETY: loom fails the model if this races.
        self.memory.with_mut(|memory| unsafe { *memory += 1 });
    }

    /// The owner takes the first region back, and uses its memory.
    fn take_back(&self) {
        withdraw(&self.grants[0]);
        while !quiet(&self.active, FIRST) {
            thread::yield_now();
        }
        self.write();
    }
}

/// A writer makes two writes under one grant while the owner takes it back.
///
/// *Fails if* either fence is missing (the writer sees the grant and the owner sees nobody), or if
/// `leave` is `Relaxed` or `quiet` is (the last write races with the owner's).
#[test]
fn memory_that_was_taken_back_is_not_written() {
    explore(clause::ENDS, Bound::None, 90, || {
        let shared = Shared::new();
        let writer = {
            let shared = shared.clone();
            thread::spawn(move || {
                if enter(&shared.active, &shared.grants[0], FIRST) {
                    shared.write();
                    if may_continue(&shared.grants[0], FIRST) {
                        shared.write();
                    }
                    leave(&shared.active);
                }
            })
        };
        shared.take_back();
        writer.join().unwrap();
        assert!(!enter(&shared.active, &shared.grants[0], FIRST));
    });
}

/// A writer goes from one region to the next without a pause, while the owner takes the first back.
///
/// *Fails if* `enter` is `Relaxed`: the owner sees the second key before the first region's bytes.
#[test]
fn a_writer_that_moves_on_leaves_nothing_behind() {
    explore(clause::ENDS, Bound::None, 300, || {
        let shared = Shared::new();
        let writer = {
            let shared = shared.clone();
            thread::spawn(move || {
                if enter(&shared.active, &shared.grants[0], FIRST) {
                    shared.write();
                }
                assert!(enter(&shared.active, &shared.grants[1], SECOND));
                leave(&shared.active);
            })
        };
        shared.take_back();
        writer.join().unwrap();
    });
}
