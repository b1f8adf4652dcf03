//! The 64 bytes that each operation lends the provider (`FI_CONTEXT2`): written while they are lent, and looked at when
//! they are given back.
//!
//! A caller that frees them, or uses them for something else before it has read the completion, is seen: the bytes are
//! not as they were left. One that has operations share them is refused.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::lock;
use crate::log::{Rule, refuse, violation};

/// The size of a context.
const BYTES: usize = size_of::<libfabric_sys::fi_context2>();
const WORDS: usize = BYTES / 8;

/// A context, as it is reported.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context {
    at: usize,
    /// What was written to it; zero if nothing was.
    tag: u64,
}

/// Those that are lent: where, with which tag, by which endpoint's operation.
static LENT: Mutex<BTreeMap<usize, (u64, u64)>> = Mutex::new(BTreeMap::new());

impl Context {
    /// One that only is reported: the fabric does not own its bytes.
    pub(crate) fn plain(at: usize) -> Self {
        Self { at, tag: 0 }
    }

    /// Takes a context for an operation of `endpoint`; an error of libfabric, negated, if it cannot be had.
    ///
    /// # Safety
    ///
    /// If `at` is neither null nor unaligned, 64 bytes there are the provider's until the operation's completion was
    /// read, or its endpoint was closed.
    pub(crate) unsafe fn lend(at: usize, endpoint: u64) -> Result<Self, i32> {
        static TAGS: AtomicU64 = AtomicU64::new(1);
        let einval = libfabric_sys::FI_EINVAL;
        if at == 0 {
            return Err(refuse(
                Rule::ContextMissing,
                einval,
                "a null context: the operation could not be reported",
            ));
        }
        if !at.is_multiple_of(8) {
            return Err(refuse(
                Rule::ContextShared,
                einval,
                "a context that is not aligned to 8 bytes",
            ));
        }
        let mut lent = lock(&LENT);
        let near = lent.range(at.saturating_sub(BYTES - 1)..at.saturating_add(BYTES)).next();
        if let Some((other, _)) = near {
            let detail =
                format!("the context at {at:#x} overlaps that at {other:#x}, which is in flight");
            return Err(refuse(Rule::ContextShared, einval, &detail));
        }
        let context = Self { at, tag: TAGS.fetch_add(1, Ordering::Relaxed) };
        lent.insert(at, (context.tag, endpoint));
        // SAFETY: the caller's promise: the bytes are lent from here on. They are aligned.
        unsafe { context.words() }
            .for_each(|(index, word)| word.store(context.word(index), Ordering::Relaxed));
        Ok(context)
    }

    /// Gives it back, and returns it as it is reported.
    ///
    /// # Safety
    ///
    /// Its bytes were lent until now.
    pub(crate) unsafe fn give_back(self) -> usize {
        let mut lent = lock(&LENT);
        // One that its endpoint's close gave back already may be lent again.
        if lent.get(&self.at).is_some_and(|&(tag, _)| tag == self.tag) {
            lent.remove(&self.at);
            // SAFETY: the caller's promise.
            unsafe { self.look() };
        }
        self.at
    }

    /// Gives back all that operations of `endpoint` still had: nothing will be reported of them.
    ///
    /// # Safety
    ///
    /// The bytes of those were lent until now.
    pub(crate) unsafe fn give_back_all(endpoint: u64) {
        let mut all = Vec::new();
        lock(&LENT).retain(|&at, &mut (tag, owner)| {
            if owner == endpoint {
                all.push(Self { at, tag });
            }
            owner != endpoint
        });
        for context in all {
            // SAFETY: the caller's promise.
            unsafe { context.look() };
        }
    }

    fn word(self, index: u64) -> u64 {
        self.tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (index << 60)
    }

    /// # Safety
    ///
    /// The bytes are lent.
    unsafe fn words(self) -> impl Iterator<Item = (u64, &'static AtomicU64)> {
        let first = self.at as *mut AtomicU64;
        // SAFETY: 64 bytes that are aligned and lent, so nobody else uses them but by mistake: atomics make that a value
        // that differs. The references do not leave this file's functions, which end while the bytes are lent.
        (0..WORDS as u64).zip((0..WORDS).map(move |index| unsafe { &*first.add(index) }))
    }

    /// Looks whether the bytes are as they were left, and leaves them as something else: their content means nothing.
    ///
    /// # Safety
    ///
    /// The bytes are lent.
    unsafe fn look(self) {
        // SAFETY: the caller's promise.
        let words = unsafe { self.words() };
        let damaged = words.filter(|(index, word)| {
            word.swap(!self.word(*index), Ordering::Relaxed) != self.word(*index)
        });
        let damaged = damaged.count();
        if damaged != 0 {
            let detail =
                format!("{damaged} of 8 words of the context at {:#x} changed in flight", self.at);
            violation(Rule::ContextDamaged, &detail);
        }
    }
}
