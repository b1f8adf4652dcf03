//! Words of pinned host memory, handed out one by one: what GPUs and the CPU tell each other with.
//!
//! It does not know what a number means, nor when a GPU is through with a word: whoever has it does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::provider::{PinnedPage, RegisterError};

/// Words of a page.
const WORDS: usize = 512;
const WORD_BYTES: usize = size_of::<u64>();

/// A word. Its page goes with the last of its words; clones are the same one.
#[derive(Debug, Clone)]
pub(crate) struct Word {
    page: Arc<PinnedPage>,
    offset: usize,
}

impl Word {
    /// The words of a page that `pin` makes, all of them zero.
    pub(crate) fn page(
        pin: impl FnOnce(usize) -> Result<PinnedPage, RegisterError>,
    ) -> Result<impl Iterator<Item = Self>, RegisterError> {
        let page = Arc::new(pin(WORDS * WORD_BYTES)?);
        // The first one is taken first, where they are taken from the end.
        let offsets = (0..WORDS).rev().map(|at| at * WORD_BYTES);
        Ok(offsets.map(move |offset| Self { page: Arc::clone(&page), offset }))
    }

    /// Where it is, for GPUs and for the CPU; a multiple of 8.
    pub(crate) fn address(&self) -> u64 {
        self.page.address() + self.offset as u64
    }

    fn word(&self) -> Option<&AtomicU64> {
        self.page.word(self.offset)
    }

    /// What it is now; what the GPU released with the number is there.
    pub(crate) fn get(&self) -> u64 {
        self.word().map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Whoever sees the number sees what was written before.
    pub(crate) fn set(&self, value: u64) {
        if let Some(word) = self.word() {
            word.store(value, Ordering::Release);
        }
    }

    /// Leaves the page there for good: a GPU may look at the word when nobody knows of it any more.
    pub(crate) fn leak(self) {
        std::mem::forget(self.page);
    }
}
