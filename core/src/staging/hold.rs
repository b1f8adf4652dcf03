//! Memory that copies under way keep from being taken back: who may begin one, and when the last has ended.
//!
//! One word: a generation in bits 32 to 63, whether copies may begin in bit 31, those under way below it. The engine's thread
//! enters and leaves; whoever owns the memory opens, closes, and waits until it is quiet.
//!
//! # Invariants
//!
//! - Once [`Hold::close`] has returned and [`Hold::is_quiet`] has been true once, nobody is in, and nobody gets in under a
//!   generation before the next [`Hold::open`]'s. All transitions are one read-modify-write of one word. The model in
//!   `verification/` checks it, and that what was written in it is seen by whoever finds it quiet.

use crate::sync::{AtomicU64, Ordering, const_unless_loom};

const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

/// Memory that is not to be taken back while somebody is in.
#[derive(Debug)]
pub struct Hold(AtomicU64);

impl Default for Hold {
    fn default() -> Self {
        Self::new()
    }
}

impl Hold {
    const_unless_loom! {
        /// Closed.
        #[must_use]
        pub fn new() -> Self {
            Self(AtomicU64::new(0))
        }
    }

    /// Lets those in that name this generation. It is closed and quiet. What the caller did before is seen by them.
    pub fn open(&self, generation: u32) {
        // Release, with the acquire in `enter`.
        self.0.store(u64::from(generation) << 32 | OPEN, Ordering::Release);
    }

    /// Gets in, until [`Hold::leave`]; `false`: it is closed, or another generation's.
    #[must_use = "what is not entered may be freed at any time"]
    pub fn enter(&self, generation: u32) -> bool {
        let may = |word: u64| {
            let here = word & OPEN != 0 && word >> 32 == u64::from(generation);
            (here && word & INSIDE < INSIDE).then(|| word + 1)
        };
        // Acquire: what was done before it was opened comes first.
        self.0.fetch_update(Ordering::Acquire, Ordering::Acquire, may).is_ok()
    }

    /// Gets out: what was done inside is seen by whoever finds it quiet.
    pub fn leave(&self) {
        // Only those who are in leave, so it does not wrap.
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Lets nobody in any more.
    pub fn close(&self) {
        // Relaxed: one word; whoever enters afterwards, in its order, finds it closed.
        self.0.fetch_and(!OPEN, Ordering::Relaxed);
    }

    /// Whether nobody is in.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        // Acquire, with the release in `leave`.
        self.0.load(Ordering::Acquire) & INSIDE == 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn nobody_gets_into_what_is_closed_or_another_generation_s() {
        let hold = Hold::new();
        for generation in [0, 1, u32::MAX] {
            assert!(!hold.enter(generation), "closed");
            hold.open(generation);
            for other in [0, 1, u32::MAX] {
                assert_eq!(hold.enter(other), other == generation);
            }
            assert!(hold.enter(generation));
            for inside in [2, 1] {
                assert!(!hold.is_quiet(), "{inside} inside");
                hold.close();
                assert!(!hold.enter(generation));
                hold.leave();
            }
            assert!(hold.is_quiet());
        }
    }
}
