//! Numbers that threads take and give back: the last one given is the first one taken.
//!
//! A number stands for a slot of some table, and the slot used last is the one that a processor still has in
//! its caches; in a queue each slot would be the one that was not touched for longest. The free numbers are a list:
//! one word names the first, and each number's [`Link`] the next. Nobody waits for anybody: whoever is stopped on its way
//! makes nobody's exchange fail for ever.
//!
//! # Invariants
//!
//! 1. A number is in the list, or with one taker.
//! 2. The first word changes with each exchange, if not in the number then in the turn beside it. So who succeeds in replacing
//!    it has read the link of a number that was first all the time: in between, it may have been taken, and given back
//!    in front of another one.
//! 3. All changes of the first word are exchanges, so that whoever reads it with acquire sees what every giver so far did
//!    before it gave (a release sequence).

use core::fmt;

use crate::sync::{AtomicU32, AtomicU64, Ordering, const_unless_loom};

/// The end of the list.
const NONE: u16 = u16::MAX;

/// Which number follows another one in the list. Storage for a [`Pool`].
#[derive(Debug)]
pub struct Link(AtomicU32);

impl Link {
    const_unless_loom! {
        /// In no list.
        #[must_use]
        pub fn new() -> Self {
            Self(AtomicU32::new(0))
        }
    }
}

impl Default for Link {
    fn default() -> Self {
        Self::new()
    }
}

/// The first number, and how often it was exchanged. On lines of its own: 128 bytes, as ARM servers have them and x86
/// fetches lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct First(AtomicU64);

/// What [`First`] says. The turn has 48 bits: they come round in months.
#[derive(Clone, Copy)]
struct Word(u64);

impl Word {
    const fn new(number: u16) -> Self {
        Self(number as u64)
    }

    #[expect(clippy::cast_possible_truncation, reason = "the lower 16 bits are the number")]
    const fn number(self) -> u16 {
        self.0 as u16
    }

    /// With another number, and the next turn.
    const fn then(self, number: u16) -> Self {
        Self((self.0 >> 16).wrapping_add(1) << 16 | number as u64)
    }
}

/// The numbers below that of the links lent, at most 65,535 of them, each with one taker at a time.
pub struct Pool<S: AsRef<[Link]>> {
    first: First,
    links: S,
}

impl<S: AsRef<[Link]>> Pool<S> {
    /// All numbers are free; 0 is taken first.
    #[must_use]
    pub fn new(links: S) -> Self {
        let mut first = NONE;
        for (number, link) in (0..NONE).zip(links.as_ref()).rev() {
            // Relaxed: the pool is not shared yet, and whoever shares it publishes this with it.
            link.0.store(first.into(), Ordering::Relaxed);
            first = number;
        }
        Self { first: First(AtomicU64::new(Word::new(first).0)), links }
    }

    /// Takes a number; `None` if none is free. Lock-free: one exchange where nobody competes. What was done before it was
    /// given back happened before.
    pub fn take(&self) -> Option<u16> {
        let mut word = Word(self.first.0.load(Ordering::Acquire));
        loop {
            let link = self.link(word.number())?;
            // Relaxed: `word` was read with acquire, and so is not older than the link of its number. Newer it may
            // be; then the exchange fails (invariant 2).
            let next = u16::try_from(link.0.load(Ordering::Relaxed)).unwrap_or(NONE);
            // Acquire: what the number stands for was left by its giver. No release: invariant 3.
            match self.first.0.compare_exchange_weak(
                word.0,
                word.then(next).0,
                Ordering::Acquire,
                Ordering::Acquire,
            ) {
                Ok(_) => return Some(word.number()),
                Err(seen) => word = Word(seen),
            }
        }
    }

    /// Gives a number back that was taken, once. Others are ignored. Lock-free: one exchange where nobody competes.
    pub fn give(&self, number: u16) {
        let Some(link) = self.link(number) else { return };
        let mut word = Word(self.first.0.load(Ordering::Relaxed));
        loop {
            link.0.store(word.number().into(), Ordering::Relaxed);
            // Release: who takes it sees the link, and what was done with what it stands for.
            match self.first.0.compare_exchange_weak(
                word.0,
                word.then(number).0,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(seen) => word = Word(seen),
            }
        }
    }

    /// Whether there is nothing that [`Pool::take`] would take now.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        Word(self.first.0.load(Ordering::Acquire)).number() == NONE
    }

    /// The link of a number that there is.
    fn link(&self, number: u16) -> Option<&Link> {
        if number == NONE { None } else { self.links.as_ref().get(usize::from(number)) }
    }
}

impl<S: AsRef<[Link]>> fmt::Debug for Pool<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("of", &self.links.as_ref().len())
            .field("is_empty", &self.is_empty())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::vec::Vec;

    use super::*;

    fn pool(count: usize) -> Pool<Box<[Link]>> {
        Pool::new((0..count).map(|_| Link::new()).collect())
    }

    #[test]
    fn every_schedule_of_takes_and_gives_agrees_with_a_stack() {
        for count in 0..4_u16 {
            for schedule in 0..1_u32 << 14 {
                let pool = pool(usize::from(count));
                let mut free: Vec<u16> = (0..count).rev().collect();
                let mut taken = Vec::new();
                for step in 0..14 {
                    if schedule >> step & 1 == 0 {
                        let number = pool.take();
                        assert_eq!(number, free.pop());
                        taken.extend(number);
                    } else if !taken.is_empty() {
                        // Not in the order they were taken.
                        let number = taken.remove(0);
                        pool.give(number);
                        free.push(number);
                    }
                    assert_eq!(pool.is_empty(), free.is_empty());
                }
            }
        }
    }

    #[test]
    fn all_numbers_there_can_be_are_taken_once() {
        for count in [0, 1, 65_534, 65_535, 65_536, 70_000] {
            let pool = pool(count);
            let all: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
            let expected: Vec<_> = (0..u16::try_from(count).unwrap_or(NONE)).collect();
            assert_eq!(all, expected);
            pool.give(NONE);
            assert!(pool.is_empty());
        }
    }

    #[test]
    fn threads_have_no_number_together() {
        let pool = pool(3);
        let users: Vec<_> = (0..3).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let Some(number) = pool.take() else { continue };
                        let users = &users[usize::from(number)];
                        assert_eq!(users.fetch_add(1, Ordering::Relaxed), 0);
                        users.fetch_sub(1, Ordering::Relaxed);
                        pool.give(number);
                    }
                });
            }
        });
        let mut all: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2]);
    }
}
