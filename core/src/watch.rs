//! Whether a watched word's callback may be called, and when nothing of it is used any more.
//!
//! One thread looks at the word and calls back; any other may stop that, at any time, and so may the callback itself.
//! Nobody waits for a callback to return: of the call and the stop, the later one is told that it is the last.
//!
//! # Invariants
//!
//! - No call begins once [`Watched::stop`] has returned.
//! - Exactly one of [`Watched::end`] and [`Watched::stop`] returns `true`, once, and whoever is told so sees all that
//!   calls have done.

use crate::sync::{AtomicU32, Ordering};

const IDLE: u32 = 0;
const CALLING: u32 = 1;
const STOPPED: u32 = 2;

/// The calls of one watched word.
#[derive(Debug)]
pub struct Watched(AtomicU32);

impl Watched {
    /// Of which there has been none.
    #[must_use]
    #[expect(
        clippy::new_without_default,
        reason = "there is nothing that it would be the default of"
    )]
    pub fn new() -> Self {
        Self(AtomicU32::new(IDLE))
    }

    /// A call is to begin; whether it may. If so, [`Watched::end`] is to follow. For one thread only.
    #[must_use = "a word that is watched no more has no callback"]
    pub fn begin(&self) -> bool {
        let begun = self.0.compare_exchange(IDLE, CALLING, Ordering::Relaxed, Ordering::Relaxed);
        begun.is_ok()
    }

    /// The call has returned. `true`: there is no other, ever, and nothing of it is used any more.
    #[must_use = "whoever is last has to clear up"]
    pub fn end(&self) -> bool {
        // Release: whoever stops it later sees what the call did.
        let idle = self.0.compare_exchange(CALLING, IDLE, Ordering::Release, Ordering::Relaxed);
        idle.is_err()
    }

    /// Ends the watching; the second time, it does nothing. `true`: no call is under way, nor ever will be, and nothing of
    /// it is used any more. `false`: the call that is under way will be told so.
    #[must_use = "whoever is last has to clear up"]
    pub fn stop(&self) -> bool {
        // Acquire, with the release in `end`. What this thread did before is not for the call to see.
        self.0.swap(STOPPED, Ordering::Acquire) == IDLE
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::vec::Vec;

    use super::*;

    /// All orders of up to three calls, each begun and ended, and two stops: after the first stop none begins, and one
    /// of them all is told that it is the last.
    #[test]
    fn the_last_is_told_once_and_no_call_begins_after_a_stop() {
        // In which places of eight the stops are.
        let orders = (0..8_usize).flat_map(|first| (first..8).map(move |second| [first, second]));
        for stops in orders {
            let watched = Watched::new();
            let (mut calling, mut stopped, mut last) = (false, false, Vec::new());
            for step in 0..8 {
                for _ in stops.iter().filter(|&&at| at == step) {
                    let is_last = watched.stop();
                    assert_eq!(is_last, !stopped && !calling, "{stops:?}");
                    stopped = true;
                    last.extend(is_last.then_some(step));
                }
                if std::mem::take(&mut calling) {
                    let is_last = watched.end();
                    assert_eq!(is_last, stopped, "{stops:?}");
                    last.extend(is_last.then_some(step));
                } else {
                    calling = watched.begin();
                    assert_eq!(calling, !stopped, "{stops:?}");
                }
            }
            if calling && watched.end() {
                last.push(8);
            }
            assert_eq!(last.len(), 1, "{stops:?}");
        }
    }
}
