//! Watched words: nothing of one is cleared up while its callback runs, and all of it is, once.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A panic is how a model fails.

use immwire_core::lane::Word;
use immwire_core::watch::Watched;
use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::Ordering;

struct Shared {
    watched: Watched,
    /// What the callback uses, and whoever is last clears up.
    memory: UnsafeCell<u32>,
    cleared: Word,
}

// SAFETY: loom checks every access to the memory, and fails the model if two race.
unsafe impl Sync for Shared {}

impl Shared {
    fn use_memory(&self) {
        // SAFETY: loom fails the model if this races.
        self.memory.with_mut(|memory| unsafe { *memory += 1 });
    }

    fn clear_up(&self) {
        self.use_memory();
        self.cleared.fetch_add(1, Ordering::Relaxed);
    }
}

/// Two calls, while another thread stops the watching.
///
/// *Fails if* `end` or `stop` is `Relaxed` (the clearing up races with the call), or if `stop` tells that it is the last while
/// a call is under way.
#[test]
fn a_watched_word_is_cleared_up_once_and_after_its_last_call() {
    explore(clause::ENDS, Bound::None, 7, || {
        let shared = Arc::new(Shared {
            watched: Watched::new(),
            memory: UnsafeCell::new(0),
            cleared: Word::new(0),
        });
        let caller = {
            let shared = shared.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    if shared.watched.begin() {
                        shared.use_memory();
                        if shared.watched.end() {
                            shared.clear_up();
                        }
                    }
                }
            })
        };
        if shared.watched.stop() {
            shared.clear_up();
        }
        caller.join().unwrap();
        assert_eq!(shared.cleared.load(Ordering::Relaxed), 1);
    });
}
