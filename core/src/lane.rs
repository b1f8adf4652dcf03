//! A queue of 32-bit words from one process to another, through memory that both map.
//!
//! Neither side trusts the other. What decides is private: each side keeps its own position, a count
//! of entries that never wraps in practice. Shared are the entries, two atomic words each, and one
//! *credit* word in which the consumer says how far it has read.
//!
//! ```text
//!   entry, 2 x 64 bits: value (32) | lap (32), note (64)      lap of position p = p / capacity + 1, modulo 2^32
//!
//!   producer ── store(Release) ──▶ entries ── load(Acquire) ──▶ consumer
//!      ▲                                                           │
//!      └────────────── load(Acquire) ── credit ◀── store(Release) ─┘   every quarter of a lap
//! ```
//!
//! The lap says whether an entry is new, so that one store publishes it and one load finds it, and zeroed memory
//! is an empty lane. The note comes with its value and in the same cache line: the consumer knows it for no more than it
//! pays anyway. The memory is passed at each call: a half is plain data, and may be cloned, compared and hashed.
//!
//! # Invariants
//!
//! 1. The producer never overwrites an entry that the consumer has not read: it goes by the last
//!    credit that was possible (not backwards, not past its own position).
//! 2. The consumer takes entries in order, each once, and each with its own note.
//! 3. Whatever the other side writes, a call takes a bounded number of steps, stays inside the slices
//!    it was given, and answers with words that were written or with an error. A lying producer can
//!    only send words, which it may do anyway; a lying consumer can only lose words of its own.
//!
//! The tests below check 1 and 2 for every short schedule, and 3 for hostile words; the loom model of
//! `verification/loom` adds weak memory.

use core::fmt;

use crate::sync::{AtomicU64, Ordering};

/// A word that two processes share; 8 bytes, and any bits are a valid one.
pub type Word = AtomicU64;

/// What one value takes: a word for it and its lap, and its note. Aligned to 16 bytes it lies in one cache line.
pub type Entry = [Word; 2];

/// Why a word did not pass.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LaneError {
    /// All entries are in use; nothing changed. The producer may try again after the consumer read.
    Full,
    /// The consumer published a position that it cannot have: the other side is broken, or hostile.
    CorruptCredit {
        /// What it published.
        credit: u64,
        /// The least that was possible: what it published before.
        from: u64,
        /// The most that was possible: the entries written so far.
        to: u64,
    },
    /// An entry is of a lap that its producer cannot have reached: the other side is broken, or hostile.
    CorruptEntry {
        /// The entry's position.
        position: u64,
        /// The lap found.
        lap: u32,
    },
    /// The lane was made for another number of entries; the caller's fault.
    WrongCapacity {
        /// Entries given.
        entries: usize,
    },
}

impl fmt::Display for LaneError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the lane is full"),
            Self::CorruptCredit { credit, from, to } => {
                write!(f, "the peer claims to have read {credit} words, not {from} to {to}")
            }
            Self::CorruptEntry { position, lap } => {
                write!(f, "the peer wrote lap {lap} to the lane's position {position}")
            }
            Self::WrongCapacity { entries } => write!(f, "a lane cannot have {entries} entries"),
        }
    }
}

impl core::error::Error for LaneError {}

/// How positions map to words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Geometry {
    capacity: u32,
}

impl Geometry {
    const fn new(capacity: u32) -> Result<Self, LaneError> {
        if capacity.is_power_of_two() {
            Ok(Self { capacity })
        } else {
            Err(LaneError::WrongCapacity { entries: capacity as usize })
        }
    }

    /// The entry of `position`, and its lap.
    fn locate(self, entries: &[Entry], position: u64) -> Result<(&Entry, u32), LaneError> {
        let wrong = LaneError::WrongCapacity { entries: entries.len() };
        if entries.len() != self.capacity as usize {
            return Err(wrong);
        }
        let index = position & (u64::from(self.capacity) - 1);
        let lap = (position >> self.capacity.trailing_zeros()).wrapping_add(1);
        let entry = usize::try_from(index).ok().and_then(|at| entries.get(at)).ok_or(wrong)?;
        Ok((entry, low(lap)))
    }
}

#[allow(clippy::cast_possible_truncation)] // It is what the name says.
const fn low(word: u64) -> u32 {
    word as u32
}

/// The writing half. There is one for each lane: a second one would overwrite its entries.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Producer {
    geometry: Geometry,
    /// Entries written.
    position: u64,
    /// Entries that the consumer has said it read.
    read: u64,
}

impl Producer {
    /// The writing half of a new lane of `capacity` entries.
    ///
    /// # Errors
    ///
    /// [`LaneError::WrongCapacity`] if `capacity` is not a power of two.
    pub const fn new(capacity: u32) -> Result<Self, LaneError> {
        match Geometry::new(capacity) {
            Ok(geometry) => Ok(Self { geometry, position: 0, read: 0 }),
            Err(error) => Err(error),
        }
    }

    /// Appends `value` with its `note` to the lane in `entries`, whose consumer publishes its position in `credit`.
    ///
    /// What this thread wrote before is visible to whoever pops the value. Two stores to one line; `credit` is
    /// loaded only when the lane looks full.
    ///
    /// # Errors
    ///
    /// [`LaneError`]; the value was not appended.
    pub fn push(
        &mut self,
        entries: &[Entry],
        credit: &Word,
        value: u32,
        note: u64,
    ) -> Result<(), LaneError> {
        let ([word, beside], lap) = self.geometry.locate(entries, self.position)?;
        if self.in_use() >= u64::from(self.geometry.capacity) {
            self.refresh(credit)?;
            if self.in_use() >= u64::from(self.geometry.capacity) {
                return Err(LaneError::Full);
            }
        }
        // Relaxed: published by the next store.
        beside.store(note, Ordering::Relaxed);
        // Release: whoever pops this entry sees what this side wrote before it, note and payload included.
        word.store(u64::from(value) << 32 | u64::from(lap), Ordering::Release);
        self.position = self.position.wrapping_add(1);
        Ok(())
    }

    /// Values that can be pushed now without [`LaneError::Full`], after a look at `credit`.
    ///
    /// # Errors
    ///
    /// [`LaneError::CorruptCredit`].
    pub fn room(&mut self, credit: &Word) -> Result<u32, LaneError> {
        self.refresh(credit)?;
        let room = u64::from(self.geometry.capacity).saturating_sub(self.in_use());
        Ok(u32::try_from(room).unwrap_or(self.geometry.capacity))
    }

    /// How many entries were written, ever.
    #[must_use]
    pub const fn position(&self) -> u64 {
        self.position
    }

    const fn in_use(&self) -> u64 {
        self.position.saturating_sub(self.read)
    }

    fn refresh(&mut self, credit: &Word) -> Result<(), LaneError> {
        // Acquire: the consumer's load of an entry happens before our next store to it.
        let credit = credit.load(Ordering::Acquire);
        let (from, to) = (self.read, self.position);
        if credit < from || credit > to {
            return Err(LaneError::CorruptCredit { credit, from, to });
        }
        self.read = credit;
        Ok(())
    }
}

/// The reading half. There is one for each lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Consumer {
    geometry: Geometry,
    /// Entries read.
    position: u64,
    /// Entries that the credit word says were read.
    published: u64,
}

impl Consumer {
    /// The reading half of a new lane of `capacity` entries, all 0, with a credit word of 0.
    ///
    /// # Errors
    ///
    /// [`LaneError::WrongCapacity`] if `capacity` is not a power of two.
    pub const fn new(capacity: u32) -> Result<Self, LaneError> {
        match Geometry::new(capacity) {
            Ok(geometry) => Ok(Self { geometry, position: 0, published: 0 }),
            Err(error) => Err(error),
        }
    }

    /// Takes the oldest value of the lane in `entries`, and its note; `None` if it is empty.
    ///
    /// What the producer wrote before it pushed the value is visible. One load of an empty lane, two of one line
    /// otherwise. The position goes to
    /// `credit` once a quarter of the lane has been read, so that the line does not bounce for each
    /// entry: a consumer that has read all leaves the producer at least three quarters of the lane.
    ///
    /// # Errors
    ///
    /// [`LaneError`]; nothing was taken, and the same call fails again unless the entry is repaired.
    pub fn pop(
        &mut self,
        entries: &[Entry],
        credit: &Word,
    ) -> Result<Option<(u32, u64)>, LaneError> {
        let ([word, beside], lap) = self.geometry.locate(entries, self.position)?;
        // Acquire: pairs with the producer's release; its payload is visible from here on.
        let entry = word.load(Ordering::Acquire);
        let found = low(entry);
        if found != lap {
            // Empty, if the entry is the last lap's (0 in a new lane). A later lap would mean that
            // the producer overwrote what we had not read.
            return if found == lap.wrapping_sub(1) {
                Ok(None)
            } else {
                Err(LaneError::CorruptEntry { position: self.position, lap: found })
            };
        }
        // Relaxed: read after what published it, and before the credit that lets it be overwritten.
        let note = beside.load(Ordering::Relaxed);
        self.position = self.position.wrapping_add(1);
        let unpublished = self.position.wrapping_sub(self.published);
        if unpublished >= u64::from((self.geometry.capacity / 4).max(1)) {
            self.published = self.position;
            // Release: our loads of the entries happen before the producer's next store to them.
            credit.store(self.position, Ordering::Release);
        }
        Ok(Some(((entry >> 32) as u32, note)))
    }

    /// How many entries were read, ever.
    #[must_use]
    pub const fn position(&self) -> u64 {
        self.position
    }

    /// How many entries the credit word says were read. A change over a [`Consumer::pop`] means that
    /// a producer that waits for room can go on.
    #[must_use]
    pub const fn published(&self) -> u64 {
        self.published
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    struct Lane {
        entries: Vec<Entry>,
        credit: Word,
        producer: Producer,
        consumer: Consumer,
    }

    impl Lane {
        fn new(capacity: u32) -> Self {
            Self {
                entries: (0..capacity).map(|_| [Word::new(0), Word::new(0)]).collect(),
                credit: Word::new(0),
                producer: Producer::new(capacity).unwrap(),
                consumer: Consumer::new(capacity).unwrap(),
            }
        }

        /// A lane that `position` values have gone through, at least a lap.
        fn at(capacity: u32, position: u64) -> Self {
            let mut lane = Self::new(capacity);
            for last in position - u64::from(capacity)..position {
                let ([word, _], lap) = lane.producer.geometry.locate(&lane.entries, last).unwrap();
                word.store(u64::from(lap), Ordering::Relaxed);
            }
            lane.credit.store(position, Ordering::Relaxed);
            (lane.producer.position, lane.producer.read) = (position, position);
            (lane.consumer.position, lane.consumer.published) = (position, position);
            lane
        }

        fn push(&mut self, value: u32) -> Result<(), LaneError> {
            self.producer.push(&self.entries, &self.credit, value, Self::note_of(value))
        }

        fn pop(&mut self) -> Result<Option<u32>, LaneError> {
            let popped = self.consumer.pop(&self.entries, &self.credit)?;
            Ok(popped.map(|(value, note)| {
                assert_eq!(note, Self::note_of(value));
                value
            }))
        }

        /// All bits of it depend on the value.
        fn note_of(value: u32) -> u64 {
            u64::from(value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
        }
    }

    #[test]
    fn only_powers_of_two_make_a_lane() {
        for capacity in 0..70u32 {
            let fits = [1, 2, 4, 8, 16, 32, 64].contains(&capacity);
            let wrong = LaneError::WrongCapacity { entries: capacity as usize };
            assert_eq!(Producer::new(capacity).err(), (!fits).then_some(wrong));
            assert_eq!(Consumer::new(capacity).err(), (!fits).then_some(wrong));
        }
        let mut lane = Lane::new(4);
        let few = &lane.entries[..3];
        let wrong = LaneError::WrongCapacity { entries: 3 };
        assert_eq!(lane.producer.push(few, &lane.credit, 1, 0), Err(wrong));
        assert_eq!(lane.consumer.pop(few, &lane.credit), Err(wrong));
    }

    #[test]
    fn every_schedule_agrees_with_a_deque() {
        for capacity in [1u32, 2, 4, 8] {
            for schedule in 0..1u32 << 13 {
                let mut lane = Lane::new(capacity);
                let mut deque = VecDeque::new();
                for step in 0..13u32 {
                    let value = u32::MAX - step;
                    if schedule >> step & 1 == 1 {
                        assert_eq!(lane.pop(), Ok(deque.pop_front()));
                    } else if let Ok(()) = lane.push(value) {
                        deque.push_back(value);
                        assert!(deque.len() <= capacity as usize);
                    } else {
                        // Full may be said early by what was not published: under a quarter.
                        let unpublished = (capacity / 4).max(1) - 1;
                        assert!(deque.len() + unpublished as usize >= capacity as usize);
                    }
                }
            }
        }
    }

    #[test]
    fn a_lane_that_was_read_out_has_three_quarters_free() {
        for capacity in [1u32, 2, 4, 8, 64] {
            for backlog in 1..=capacity {
                let mut lane = Lane::new(capacity);
                for round in 0..5 {
                    for value in 0..backlog.min(lane.producer.room(&lane.credit).unwrap()) {
                        assert_eq!(lane.push(value + round), Ok(()));
                    }
                    while lane.pop().unwrap().is_some() {}
                    assert_eq!(lane.consumer.position(), lane.producer.position());
                    let room = lane.producer.room(&lane.credit).unwrap();
                    assert!(4 * room >= 3 * capacity, "{capacity} {backlog} {round}: {room}");
                }
            }
        }
    }

    #[test]
    fn laps_may_wrap() {
        for before in 0..12u64 {
            let mut lane = Lane::at(4, (4 << 32) - before);
            for value in 0..40 {
                assert_eq!(lane.pop(), Ok(None));
                assert_eq!((lane.push(value), lane.push(!value)), (Ok(()), Ok(())));
                assert_eq!((lane.pop(), lane.pop()), (Ok(Some(value)), Ok(Some(!value))));
            }
        }
    }

    #[test]
    fn an_impossible_credit_is_reported_and_changes_nothing() {
        for (written, read) in (0..=4u64).flat_map(|w| (0..=w).map(move |r| (w, r))) {
            for credit in [0, 1, 2, 3, 4, 5, 1 << 32, u64::MAX] {
                let mut lane = Lane::new(4);
                (lane.producer.position, lane.producer.read) = (written, read);
                let before = lane.producer.clone();
                lane.credit.store(credit, Ordering::Relaxed);
                let possible = (read..=written).contains(&credit);
                let corrupt = LaneError::CorruptCredit { credit, from: read, to: written };
                let room = lane.producer.room(&lane.credit);
                let expected = if possible { Ok(4 - (written - credit)) } else { Err(corrupt) };
                assert_eq!(room.map(u64::from), expected);
                lane.producer = before.clone();
                let pushed = lane.push(7);
                if written - read < 4 {
                    assert_eq!(pushed, Ok(()));
                } else if !possible {
                    assert_eq!((pushed, lane.producer), (Err(corrupt), before));
                } else {
                    assert_eq!(pushed.is_err(), credit == 0);
                }
            }
        }
    }

    #[test]
    fn an_entry_of_another_lap_is_reported_and_not_taken() {
        for lap in [0u32, 1, 2, 3, 4, 5, u32::MAX] {
            let mut lane = Lane::at(2, 4);
            lane.entries[0][0].store(9 << 32 | u64::from(lap), Ordering::Relaxed);
            lane.entries[0][1].store(Lane::note_of(9), Ordering::Relaxed);
            let before = lane.consumer.clone();
            let expected = match lap {
                3 => Ok(Some(9)),
                2 => Ok(None),
                lap => Err(LaneError::CorruptEntry { position: 4, lap }),
            };
            assert_eq!(lane.pop(), expected);
            assert_eq!(lane.consumer == before, lap != 3);
        }
    }

    proptest! {
        #[test]
        fn hostile_words_get_an_answer(
            position in any::<u64>(), published in any::<u64>(), credit in any::<u64>(),
            words in proptest::collection::vec(any::<(u64, u64)>(), 8)
        ) {
            let mut lane = Lane::new(8);
            for ([word, beside], (bits, note)) in lane.entries.iter().zip(&words) {
                word.store(*bits, Ordering::Relaxed);
                beside.store(*note, Ordering::Relaxed);
            }
            lane.credit.store(credit, Ordering::Relaxed);
            (lane.producer.position, lane.producer.read) = (position, published.min(position));
            (lane.consumer.position, lane.consumer.published) = (position, published.min(position));
            for value in 0..20 {
                if let Ok(Some(popped)) = lane.consumer.pop(&lane.entries, &lane.credit) {
                    let written = |(word, note)| ((word >> 32) as u32, note) == popped;
                    prop_assert!(words.iter().copied().any(written));
                }
                let _ = lane.producer.room(&lane.credit);
                let _ = lane.producer.push(&[], &lane.credit, value, 0);
            }
            let pushed = (0..20).take_while(|value| lane.push(*value).is_ok()).count();
            prop_assert!(pushed <= 16, "{pushed}: an old credit and a new one, a lap each");
        }
    }
}
