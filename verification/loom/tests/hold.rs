//! Memory that GPUs' copies keep from being taken back: once it is quiet, no copy races with its owner.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A panic is how a model fails.

use immwire_core::staging::Hold;
use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::cell::UnsafeCell;
use loom::sync::Arc;

const FIRST: u32 = 7;
const SECOND: u32 = 8;

struct Shared {
    hold: Hold,
    memory: UnsafeCell<u32>,
}

// SAFETY: loom checks every access to the memory, and fails the model if two race.
unsafe impl Sync for Shared {}

impl Shared {
    fn write(&self) {
        // SAFETY: loom fails the model if this races.
        self.memory.with_mut(|memory| unsafe { *memory += 1 });
    }

    /// As a copy: under the hold, if it may.
    fn copy(&self, generation: u32) -> bool {
        let entered = self.hold.enter(generation);
        if entered {
            self.write();
            self.hold.leave();
        }
        entered
    }
}

/// A copier makes copies into a region, and into the one that takes its place, while the owner takes the first back, uses its memory, and
/// lends it again.
///
/// *Fails if* `leave` or `is_quiet` is `Relaxed` (the owner does not see the copy's end), if `open` or `enter` is (the copy
/// does not see the owner's), or if `enter` looks at the generation or at the open bit before it exchanges, and not with it.
#[test]
fn memory_that_is_quiet_is_its_owner_s() {
    explore(clause::ENDS, Bound::None, 52, || {
        let (hold, memory) = (Hold::new(), UnsafeCell::new(0));
        hold.open(FIRST);
        let shared = Arc::new(Shared { hold, memory });
        let copier = {
            let shared = shared.clone();
            thread::spawn(move || {
                let first = shared.copy(FIRST);
                let second = shared.copy(SECOND);
                u32::from(first) + u32::from(second)
            })
        };
        shared.hold.close();
        while !shared.hold.is_quiet() {
            thread::yield_now();
        }
        shared.write();
        shared.hold.open(SECOND);
        let copies = copier.join().unwrap();
        // SAFETY: the copier has ended.
        let written = shared.memory.with(|memory| unsafe { *memory });
        assert_eq!(written, copies + 1);
    });
}
