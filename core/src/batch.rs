//! Which pieces become one copy of a device that is told of each: pieces that adjoin, pieces of one length, and pieces of several long ranges.
//!
//! To tell a device of a copy takes microseconds, so pieces that may be told of together are. What is cut into pieces comes as them, in turn with
//! those of whatever else is under way: so a piece goes on where any of the ranges ends that there are, not only the last. Long ranges are
//! told of one by one, which costs little beside their bytes: what copies ranges is often another part of the device than what copies a
//! list of them, is quicker, and takes no processor from anybody (a GPU's copy engine).
//!
//! Knows neither what a device is nor whose the bytes are.
//!
//! # Invariants
//!
//! 1. Whatever was taken, its [`Form`] copies each byte of each piece once, to where it belongs, and no other.
//! 2. Lists are of pieces of one length. What is told of one by one is one range, or [`RANGES`] at most, of [`LONG_BYTES`] on average, or of
//!    [`TOGETHER_BYTES`] each or more.
//! 3. Nothing is taken that would have no form.
//!
//! The tests below go through all sequences of pieces of three transfers.

use heapless::Vec;

/// Ranges that are told of one by one, at most. Each takes a GPU's driver some two microseconds, in which nobody else is served.
pub const RANGES: usize = 16;

/// Ranges of so many bytes each, on average, are told of one by one. 43 us of an H200's link. Two H200s copied
/// ranges of 8 MiB slower so than as a list, and those of 16 quicker.
pub const LONG_BYTES: u64 = 16 << 20;

/// What can be no list is one copy all the same if each of its ranges has so many bytes: more than is copied while one is told of.
pub const TOGETHER_BYTES: u64 = 2 << 20;

/// Bytes that lie side by side, where they are and where they go, as the device has addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First byte to be read.
    pub src: u64,
    /// First byte to be written.
    pub dst: u64,
    /// Bytes.
    pub len: u64,
}

impl Range {
    /// Whether `next` begins where this ends, on both sides. The last byte of all addresses has nothing behind it.
    fn is_before(&self, next: &Self) -> bool {
        self.src.checked_add(self.len) == Some(next.src)
            && self.dst.checked_add(self.len) == Some(next.dst)
    }
}

/// How a copy is told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form<'a> {
    /// These, one by one; none: there is nothing to be copied.
    Ranges(&'a [Range]),
    /// A list, each of them so long.
    List {
        /// Sources and targets.
        places: &'a [(u64, u64)],
        /// Bytes of each.
        len: u64,
    },
}

impl<'a> Form<'a> {
    /// The same range by range, in any form.
    pub fn ranges(self) -> impl Iterator<Item = Range> + 'a {
        let (ranges, places, len) = match self {
            Self::Ranges(ranges) => (ranges, [].as_slice(), 0),
            Self::List { places, len } => ([].as_slice(), places, len),
        };
        let listed = places.iter().map(move |(src, dst)| Range { src: *src, dst: *dst, len });
        ranges.iter().copied().chain(listed)
    }
}

/// Pieces that become one copy; `N` at most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch<const N: usize> {
    /// Of each piece.
    places: Vec<(u64, u64), N>,
    /// Of each piece, as long as they are of one length.
    len: Option<u64>,
    /// The same bytes, as few ranges; [`Batch::is_few`] says whether all are among them.
    ranges: Vec<Range, RANGES>,
    is_few: bool,
    bytes: u64,
}

impl<const N: usize> Default for Batch<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Batch<N> {
    /// Of no piece.
    #[must_use]
    pub const fn new() -> Self {
        Self { places: Vec::new(), len: None, ranges: Vec::new(), is_few: true, bytes: 0 }
    }

    /// Of no piece, again.
    pub fn clear(&mut self) {
        self.places.clear();
        self.ranges.clear();
        (self.len, self.is_few, self.bytes) = (None, true, 0);
    }

    /// The only piece there is.
    #[must_use]
    pub fn only(&self) -> Option<Range> {
        let [(src, dst)] = self.places.as_slice() else { return None };
        Some(Range { src: *src, dst: *dst, len: self.bytes })
    }

    /// Whether a piece can be part of this copy. O([`RANGES`]).
    #[must_use]
    pub fn takes(&self, piece: Range) -> bool {
        self.after(piece).is_some()
    }

    /// Adds a piece; `false`: it is none for this copy, which stays as it was. O([`RANGES`]).
    pub fn add(&mut self, piece: Range) -> bool {
        let Some(After { goes_on, is_few, len, bytes }) = self.after(piece) else { return false };
        if self.places.push((piece.src, piece.dst)).is_err() {
            return false;
        }
        (self.is_few, self.len, self.bytes) = (is_few, len, bytes);
        match goes_on.and_then(|at| self.ranges.get_mut(at)) {
            Some(range) => range.len += piece.len,
            // Without room there are not few of them, and none is told of.
            None => drop(self.ranges.push(piece)),
        }
        true
    }

    /// What it is with that piece, if it may be.
    fn after(&self, piece: Range) -> Option<After> {
        let bytes = self.bytes.checked_add(piece.len)?;
        let is_even = self.places.is_empty() || self.len == Some(piece.len);
        let goes_on = self.ranges.iter().position(|range| range.is_before(&piece));
        let ranges = self.ranges.len() + usize::from(goes_on.is_none());
        let is_few = self.is_few && ranges <= RANGES;
        // What is short is not to wait for what is long, whichever was first.
        let is_long = |bytes: u64| bytes >= TOGETHER_BYTES;
        let are_long = || self.ranges.iter().all(|range| is_long(range.len));
        let goes_along = || (goes_on.is_some() || is_long(piece.len)) && are_long();
        let may = is_even || (is_few && (ranges == 1 || goes_along()));
        let after = After { goes_on, is_few, len: is_even.then_some(piece.len), bytes };
        (may && !self.places.is_full()).then_some(after)
    }

    /// How it is told of.
    #[must_use]
    pub fn form(&self) -> Form<'_> {
        let ranges = self.ranges.len();
        let average = self.bytes.checked_div(ranges as u64).unwrap_or(0);
        let by_one = self.is_few && (ranges <= 1 || average >= LONG_BYTES);
        match self.len.filter(|_| !by_one) {
            Some(len) => Form::List { places: &self.places, len },
            None => Form::Ranges(&self.ranges),
        }
    }
}

/// A batch with one piece more.
struct After {
    /// The range that the piece goes on with.
    goes_on: Option<usize>,
    is_few: bool,
    len: Option<u64>,
    bytes: u64,
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::collections::BTreeMap;
    use std::vec::Vec;

    const MIB: u64 = 1 << 20;
    const PIECES: usize = 32;
    const GRID: u64 = MIB / 2;

    fn range(src: u64, dst: u64, len: u64) -> Range {
        Range { src, dst, len }
    }

    /// Where each [`GRID`] bytes go, of what is a whole number of them; each once.
    fn spread(ranges: impl IntoIterator<Item = Range>) -> BTreeMap<u64, u64> {
        let mut all = BTreeMap::new();
        for Range { src, dst, len } in ranges {
            for at in (0..len / GRID).map(|at| at * GRID) {
                assert_eq!(all.insert(dst + at, src + at), None, "written twice");
            }
        }
        all
    }

    /// All sequences of eight pieces of three transfers, the pieces of each side by side, in all combinations of three lengths: whatever
    /// is taken is told of, byte for byte, and what is told of keeps to its bounds.
    #[test]
    fn each_byte_of_what_was_taken_is_told_of_once() {
        let (mut lists, mut several, mut refused) = (0, 0, 0);
        for lengths in 0..3_u32.pow(3) {
            let lengths = [1, 3, 9].map(|base| [1, 8, 18][(lengths / base % 3) as usize] * GRID);
            for order in 0..3_u32.pow(8) {
                let (mut batch, mut at, mut taken) = (Batch::<PIECES>::new(), [0; 3], Vec::new());
                for step in 0..8 {
                    let of = (order / 3_u32.pow(step) % 3) as usize;
                    let (from, to) = (of as u64 * 1024 * MIB, (8 + of as u64) * 1024 * MIB);
                    let piece = range(from + at[of], to + at[of], lengths[of]);
                    at[of] += lengths[of];
                    let (before, takes) = (batch.clone(), batch.takes(piece));
                    assert_eq!(batch.add(piece), takes);
                    match takes {
                        true => taken.push(piece),
                        false => {
                            refused += 1;
                            assert_eq!(batch, before);
                        }
                    }
                }
                assert_eq!(batch.places.len(), taken.len());
                assert_eq!(batch.bytes, taken.iter().map(|piece| piece.len).sum::<u64>());
                assert_eq!(spread(batch.form().ranges()), spread(taken.iter().copied()));
                match batch.form() {
                    Form::Ranges(&[] | &[_]) => {}
                    Form::Ranges(ranges) => {
                        several += 1;
                        assert!(ranges.len() <= RANGES, "{ranges:?}");
                        let each = batch.bytes / ranges.len() as u64;
                        let least = ranges.iter().map(|range| range.len).min();
                        assert!(each >= LONG_BYTES || least >= Some(TOGETHER_BYTES), "{ranges:?}");
                        let even = taken.iter().all(|piece| piece.len == taken[0].len);
                        assert!(each >= LONG_BYTES || !even, "{ranges:?}");
                    }
                    Form::List { .. } => lists += 1,
                }
            }
        }
        assert!(
            lists > 5_000 && several > 50_000 && refused > 5_000,
            "{lists} {several} {refused}"
        );
    }

    /// What comes in turn is told of as if it had come one after the other: eight transfers of long ranges, and of short ones.
    #[test]
    fn transfers_that_take_turns_are_a_range_each() {
        for (pieces, is_list) in [(1, true), (3, true), (4, false)] {
            let mut batch = Batch::<PIECES>::new();
            let place = |of: u64| (of << 40, (of << 40) + (1 << 39));
            for (turn, of) in (0..pieces).flat_map(|turn| (0..8).map(move |of| (turn, of))) {
                let ((src, dst), at) = (place(of), turn * 4 * MIB);
                assert!(batch.add(range(src + at, dst + at, 4 * MIB)));
            }
            let whole = (0..8).map(|of| range(place(of).0, place(of).1, pieces * 4 * MIB));
            match batch.form() {
                Form::List { places, len } => {
                    assert!(is_list && places.len() as u64 == 8 * pieces && len == 4 * MIB)
                }
                Form::Ranges(ranges) => assert!(!is_list && whole.eq(ranges.iter().copied())),
            }
        }
    }

    /// More ranges than are told of one by one are a list, if they can be one; and a range's last piece may be of any length.
    #[test]
    fn too_many_ranges_are_a_list_of_one_length() {
        let long = |of: u64, len| range(of << 40, (of << 40) + (1 << 39), len);
        let mut batch = Batch::<PIECES>::new();
        assert!((0..RANGES as u64).all(|of| batch.add(long(of, LONG_BYTES))));
        assert!(matches!(batch.form(), Form::Ranges(ranges) if ranges.len() == RANGES));
        let last = range((3 << 40) + LONG_BYTES, (3 << 40) + (1 << 39) + LONG_BYTES, 5);
        let mut ended = batch.clone();
        assert!(ended.add(last) && ended.only().is_none());
        assert!(matches!(ended.form(), Form::Ranges(ranges) if ranges[3].len == LONG_BYTES + 5));
        assert!(
            !ended.add(long(40, LONG_BYTES)),
            "there is no room for another range, nor is it even"
        );
        assert!(batch.add(long(40, LONG_BYTES)));
        assert!(
            matches!(batch.form(), Form::List { places, len: LONG_BYTES } if places.len() == RANGES + 1)
        );
        assert!(!batch.add(last), "of another length");
        assert!((41..).take(PIECES - RANGES - 1).all(|of| batch.add(long(of, LONG_BYTES))));
        assert!(!batch.takes(long(99, LONG_BYTES)), "full");
        batch.clear();
        assert_eq!(batch, Batch::new());
        assert_eq!(batch.form(), Form::Ranges(&[]));
    }

    /// A short piece goes on with a long range, and is none of its own beside them.
    #[test]
    fn what_is_short_does_not_wait_for_what_is_long() {
        for len in [1, TOGETHER_BYTES - 1, TOGETHER_BYTES] {
            let mut batch = Batch::<PIECES>::new();
            assert!(batch.add(range(0, 1 << 40, 4 * LONG_BYTES)));
            assert_eq!(batch.takes(range(1 << 41, 1 << 42, len)), len == TOGETHER_BYTES);
            assert!(batch.takes(range(4 * LONG_BYTES, (1 << 40) + 4 * LONG_BYTES, len)));
        }
        // Nor does one that came first, or do several that are a list.
        for count in [1, 2, 8] {
            let mut batch = Batch::<PIECES>::new();
            assert!((0..count).all(|of| batch.add(range(of << 20, of << 40, 1 << 10))));
            assert!(!batch.takes(range(1 << 41, 1 << 50, 100 * LONG_BYTES)));
            let goes_on = range(1 << 10, 1 << 10, 100 * LONG_BYTES);
            assert_eq!(batch.takes(goes_on), count == 1);
        }
    }

    #[test]
    fn nothing_goes_on_behind_all_addresses_nor_by_one_side() {
        let mut batch = Batch::<PIECES>::new();
        assert!(batch.add(range(u64::MAX - 4, 8, 5)));
        assert_eq!(batch.only(), Some(range(u64::MAX - 4, 8, 5)));
        for (src, dst) in [(0, 13), (u64::MAX, 13), (0, 0)] {
            assert!(!batch.takes(range(src, dst, 4)));
            assert!(batch.clone().add(range(src, dst, 5)), "a list");
        }
        let mut batch = Batch::<PIECES>::new();
        assert!(batch.add(range(0, 100, 7)));
        assert!(!batch.takes(range(7, 108, 3)) && !batch.takes(range(8, 107, 3)));
        assert!(batch.add(range(7, 107, 3)) && !batch.takes(range(0, 0, u64::MAX)));
        assert_eq!(batch.form(), Form::Ranges(&[range(0, 100, 10)]));
    }
}
