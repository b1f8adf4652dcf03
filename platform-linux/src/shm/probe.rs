//! The words at which peers try whether the kernel lets them write to this process.
//!
//! A peer writes to such a word when it opens its side of a session, by the address that it was told. Our side may be
//! gone by then: the call given up or replaced, the engine dropped; nothing keeps the peer from writing all the same,
//! and the kernel writes wherever it is told to. So a word must never be memory that has become something else's.
//!
//! # Invariants
//!
//! - The words live as long as the process, and are nothing else.
//! - They are dealt out in turn. A write that comes after [`WORDS`] later sessions may spoil the word of the last of
//!   these, whose peer then believes that the kernel does not let it, and goes through the bounce ring.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// How many there are: more than there are handshakes at a time.
const WORDS: usize = 4096;

static ALL: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
static DEALT: AtomicUsize = AtomicUsize::new(0);

/// A word of a session's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Probe(&'static AtomicU64);

impl Probe {
    /// The next word.
    pub(super) fn deal() -> Self {
        // Relaxed: it only has to be another one each time.
        let turn = DEALT.fetch_add(1, Ordering::Relaxed);
        // PROOF: a remainder of the length lies below it.
        Self(&ALL[turn % WORDS])
    }

    /// Where the peer is to write, in this process.
    pub(super) fn address(self) -> u64 {
        std::ptr::from_ref(self.0) as u64
    }

    /// Whether this was written last.
    pub(super) fn holds(self, word: u64) -> bool {
        // Acquire: the kernel wrote it before the peer sent its question.
        self.0.load(Ordering::Acquire) == word
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_word_lies_in_memory_that_is_never_given_back() {
        let all = ALL.as_ptr_range();
        let inside = |address: u64| address >= all.start as u64 && address + 8 <= all.end as u64;
        let dealt: Vec<u64> = (0..3 * WORDS).map(|_| Probe::deal().address()).collect();
        assert!(dealt.iter().all(|&address| inside(address) && address % 8 == 0));
        // Other tests of this process may be dealt some in between.
        assert!(dealt.iter().collect::<HashSet<_>>().len() > WORDS / 2);
    }

    #[test]
    fn what_was_written_is_found() {
        let probe = Probe::deal();
        probe.0.store(7, Ordering::Release);
        assert!(probe.holds(7) && !probe.holds(8));
    }
}
