//! Notes between the two ends of a session, each heard once and in order, over lines any of which may break.
//!
//! A *line* keeps the order of what is sent over it, and loses nothing as long as it is whole. When it breaks, nobody
//! knows which of the last notes got through. So notes are numbered, and kept until the other end has said that it has
//! taken them; on another line all that are kept are sent again, from the first on, and what comes twice is dropped by
//! its number. Each end chooses its own line to send on, and hears on all.
//!
//! ```text
//!   say ──▶ kept: [ sent | to be sent ] ── post, on the line in use ──▶ hear: the next number? taken. Seen? dropped.
//!             ▲                    │ another line: all are to be sent      │
//!             └── forgotten ◀──────┴──────────── "taken so far" ◀──────────┘ in each letter, or one of its own
//! ```
//!
//! What a note says is [`crate::note`]'s; what a line is, the platform's.
//!
//! # Invariants
//!
//! 1. Each note that is said is heard once, in the order of saying, as long as some line stays whole.
//! 2. Less than `W` notes are kept, and a last one: who says more waits. Whoever has taken half as many says so, without
//!    being asked.
//! 3. What is sent over a line begins with a note that the other end has not taken, and goes on without a gap: so a gap
//!    is the other end's fault ([`Garbled`]), and nothing has to be put in order.
//!
//! The tests below run two ends over two lines, which break at any moment with any part of what is under way.

use heapless::Vec;

use crate::id::NicIndex;
use crate::note::{NOTE_BYTES, Note};

/// Bytes of a letter before its note.
pub const HEAD_BYTES: usize = 8;

/// The longest letter, in bytes.
pub const LETTER_MAX: usize = HEAD_BYTES + NOTE_BYTES;

/// What is sent over a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Letter {
    /// The note's number, or the next one's: they are counted from 0, and begin again after 2^32.
    pub number: u32,
    /// The number of the first note that the sender has not taken.
    pub taken: u32,
    /// There may be none.
    pub note: Option<Note>,
}

impl Letter {
    /// The bytes, and how many of them count.
    #[must_use]
    pub fn encode(&self) -> ([u8; LETTER_MAX], usize) {
        let mut bytes = [0; LETTER_MAX];
        let (note, len) = self.note.map_or(([0; NOTE_BYTES], 0), |note| note.encode());
        let head = self.number.to_be_bytes().into_iter().chain(self.taken.to_be_bytes());
        for (byte, from) in bytes.iter_mut().zip(head.chain(note)) {
            *byte = from;
        }
        (bytes, HEAD_BYTES.saturating_add(len))
    }

    /// The letter that all of `bytes` are; `None` if they are none.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk()?;
        let (taken, rest) = rest.split_first_chunk()?;
        let note = if rest.is_empty() { None } else { Some(Note::decode(rest)?) };
        Some(Self { number: u32::from_be_bytes(*number), taken: u32::from_be_bytes(*taken), note })
    }
}

/// The other end sent what there cannot be: a note before those that come before it, or word of notes that it was never
/// sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Garbled;

/// One end: keeps less than `W` notes, and a last one. `W` is at least 2.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Courier<const W: usize> {
    /// Whole lines, a bit for each.
    open: u8,
    /// Those of them that are not to be used while there are others.
    doubtful: u8,
    line: Option<NicIndex>,
    kept: Vec<Note, W>,
    /// The number of the first that is kept.
    first: u32,
    /// So many of them were posted on the line in use,
    posted: usize,
    /// and so many on any.
    sent: usize,
    /// The number of the first note that was not taken here.
    taken: u32,
    /// The same, as the other end was last told.
    told: u32,
    /// It is to be told in any case.
    owes: bool,
}

/// The bit of a line.
const fn bit(line: NicIndex) -> u8 {
    1_u8.unbounded_shl(line as u32)
}

/// How far `number` is ahead of `from`, if it is not behind it.
fn ahead(number: u32, from: u32) -> Option<usize> {
    let distance = number.wrapping_sub(from);
    if distance < 1 << 31 { usize::try_from(distance).ok() } else { None }
}

impl<const W: usize> Courier<W> {
    /// Nothing was said. `lines` are whole, a bit for each.
    #[must_use]
    pub fn new(lines: u8) -> Self {
        let mut made = Self {
            open: lines,
            doubtful: 0,
            line: None,
            kept: Vec::new(),
            first: 0,
            posted: 0,
            sent: 0,
            taken: 0,
            told: 0,
            owes: false,
        };
        made.choose();
        made.owes = false;
        made
    }

    /// Whether there is a whole line.
    #[must_use]
    pub const fn is_connected(&self) -> bool {
        self.open != 0
    }

    /// Whether the line is whole.
    #[must_use]
    pub const fn is_open(&self, line: NicIndex) -> bool {
        self.open & bit(line) != 0
    }

    /// Whether one of these, a bit for each, is whole.
    #[must_use]
    pub const fn is_led(&self, lines: u8) -> bool {
        self.open & lines != 0
    }

    /// Uses another line, if the one in use is broken, or doubtful and another is not.
    fn choose(&mut self) {
        let sound = self.open & !self.doubtful;
        let best = if sound == 0 { self.open } else { sound };
        if self.line.is_some_and(|line| best & bit(line) != 0) {
            return;
        }
        // Below 8, if there is one.
        let first = best.trailing_zeros().to_le_bytes()[0];
        self.line = (best != 0).then_some(first);
        // What was said last on the old one may be lost, as may be our word of what was taken.
        (self.posted, self.owes) = (0, true);
    }

    /// The line broke. Returns whether there is another.
    pub fn break_line(&mut self, line: NicIndex) -> bool {
        self.open &= !bit(line);
        self.choose();
        self.is_connected()
    }

    /// The line is whole; nothing of what was sent over it before will arrive.
    pub fn open_line(&mut self, line: NicIndex) {
        self.open |= bit(line);
        self.choose();
    }

    /// Those lines, a bit for each, are doubtful from now on, or are not any more; the others stay as they are.
    pub fn doubt(&mut self, lines: u8, is_doubtful: bool) {
        let kept = self.doubtful & !lines;
        let doubtful = if is_doubtful { kept | lines } else { kept };
        if self.doubtful != doubtful {
            self.doubtful = doubtful;
            self.choose();
        }
    }

    /// Says a note; `false` if there is no room for it now.
    pub fn say(&mut self, note: Note) -> bool {
        let room = self.kept.len().saturating_add(1) < W;
        room && self.kept.push(note).is_ok()
    }

    /// Says the last note: there is always room for it, and what was said and never posted is forgotten.
    pub fn say_last(&mut self, note: Note) {
        self.kept.truncate(self.sent);
        // Less than `W` were said before it.
        let _ = self.kept.push(note);
    }

    /// A letter without a note: shows that a line works, and says what was taken.
    #[must_use]
    pub const fn word(&self) -> Letter {
        Letter { number: self.first, taken: self.taken, note: None }
    }

    /// What is to be posted next, and on which line; [`Courier::post`] says that it was.
    #[must_use]
    pub fn next(&self) -> Option<(NicIndex, Letter)> {
        let line = self.line?;
        let note = self.kept.get(self.posted).copied();
        let untold = ahead(self.taken, self.told).unwrap_or(0);
        let due = self.owes || untold.saturating_mul(2) >= W;
        let number = self.first.wrapping_add(u32::try_from(self.posted).unwrap_or(0));
        (note.is_some() || due).then_some((line, Letter { number, taken: self.taken, note }))
    }

    /// What [`Courier::next`] said was posted.
    pub fn post(&mut self) {
        if self.posted < self.kept.len() {
            self.posted = self.posted.saturating_add(1);
            self.sent = self.sent.max(self.posted);
        }
        (self.told, self.owes) = (self.taken, false);
    }

    /// A letter has come, over any line; the note in it, if that is new.
    ///
    /// # Errors
    ///
    /// [`Garbled`]: the other end has broken the protocol.
    pub fn hear(&mut self, letter: &Letter) -> Result<Option<Note>, Garbled> {
        // An older word, over another line, says nothing new.
        if let Some(more) = ahead(letter.taken, self.first) {
            if more > self.sent {
                return Err(Garbled);
            }
            let left = self.kept.get(more..).and_then(|left| Vec::from_slice(left).ok());
            self.kept = left.unwrap_or_default();
            self.first = letter.taken;
            self.posted = self.posted.saturating_sub(more);
            self.sent = self.sent.saturating_sub(more);
        }
        let Some(note) = letter.note else { return Ok(None) };
        match ahead(letter.number, self.taken) {
            Some(0) => {
                self.taken = self.taken.wrapping_add(1);
                Ok(Some(note))
            }
            Some(_) => Err(Garbled),
            None => {
                // The other end does not know that it was taken.
                self.owes = true;
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};
    use std::hash::{BuildHasher, RandomState};
    use std::vec::Vec as List;

    use super::*;

    const KEPT: usize = 3;
    const LINES: usize = 2;
    /// What each end says.
    const NOTES: [u32; 2] = [3, 1];

    fn note(number: u32) -> Note {
        Note::Taken { nic: 0, count: number.into() }
    }

    /// What is under way on a line, from each end to the other.
    type Line = [VecDeque<Letter>; 2];

    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct World {
        ends: [Courier<KEPT>; 2],
        lines: [Line; LINES],
        /// Whether each end takes the line for whole.
        whole: [[bool; 2]; LINES],
        said: [u32; 2],
        heard: [u32; 2],
        /// Breaks that are left, mendings, and doubts.
        breaks: u8,
        mends: u8,
        doubts: u8,
    }

    impl World {
        fn new(start: u32) -> Self {
            let mut end = Courier::new(0b11);
            (end.first, end.taken, end.told) = (start, start, start);
            Self {
                ends: [end.clone(), end],
                lines: Default::default(),
                whole: [[true; 2]; LINES],
                said: [0; 2],
                heard: [0; 2],
                breaks: 1,
                mends: 1,
                doubts: 1,
            }
        }

        /// All that can happen next.
        fn next(&self) -> List<Self> {
            let mut all = List::new();
            for (end, &most) in NOTES.iter().enumerate() {
                if self.said[end] < most {
                    let mut world = self.clone();
                    if world.ends[end].say(note(world.said[end])) {
                        world.said[end] += 1;
                        all.push(world);
                    }
                }
                if let Some((line, letter)) = self.ends[end].next() {
                    let mut world = self.clone();
                    world.ends[end].post();
                    // Over one that the other end has cut, nothing arrives.
                    if self.whole[usize::from(line)][1 - end] {
                        world.lines[usize::from(line)][end].push_back(letter);
                    }
                    all.push(world);
                }
                for line in 0..LINES {
                    let mut world = self.clone();
                    if let Some(letter) = world.lines[line][end].pop_front() {
                        let heard = world.ends[1 - end].hear(&letter).expect("nothing garbled");
                        if let Some(heard) = heard {
                            assert_eq!(heard, note(world.heard[1 - end]), "{self:?}");
                            world.heard[1 - end] += 1;
                        }
                        all.push(world);
                    }
                }
            }
            all.extend(self.next_of_lines());
            all
        }

        fn next_of_lines(&self) -> List<Self> {
            let mut all = List::new();
            for line in 0..LINES {
                let at = u8::try_from(line).unwrap();
                for end in 0..2 {
                    // One end notices that the line broke: what the other has sent is lost, but for what was received.
                    if self.whole[line][end] && (self.breaks > 0 || !self.whole[line][1 - end]) {
                        for kept in 0..=self.lines[line][1 - end].len() {
                            let mut world = self.clone();
                            if world.whole[line][1 - end] {
                                world.breaks -= 1;
                            }
                            world.whole[line][end] = false;
                            world.lines[line][1 - end].truncate(kept);
                            world.ends[end].break_line(at);
                            all.push(world);
                        }
                    }
                    // An end is told that the line is not to be trusted.
                    if self.doubts > 0 {
                        let mut world = self.clone();
                        world.doubts -= 1;
                        world.ends[end].doubt(u8::MAX, false);
                        world.ends[end].doubt(1 << at, true);
                        all.push(world);
                    }
                }
                let dead = self.whole[line] == [false; 2];
                if dead && self.mends > 0 && self.lines[line].iter().all(VecDeque::is_empty) {
                    let mut world = self.clone();
                    world.mends -= 1;
                    world.whole[line] = [true; 2];
                    world.ends.iter_mut().for_each(|end| end.open_line(at));
                    all.push(world);
                }
            }
            all
        }
    }

    /// All orders of saying, sending, hearing, doubting, breaking and mending: nothing is heard twice or out of order; and
    /// where nothing is left to happen but breaks, all has been heard. Numbers begin again meanwhile.
    #[test]
    fn every_note_is_heard_once_while_a_line_is_left() {
        // Of worlds that were seen only a hash is kept: two with the same would hide one, and are not to be expected.
        let hasher = RandomState::new();
        let (mut seen, mut open) = (HashSet::new(), List::from([World::new(u32::MAX)]));
        let (mut ends, mut repeated) = (0, 0);
        while let Some(world) = open.pop() {
            if !seen.insert(hasher.hash_one(&world)) {
                continue;
            }
            let quiet = world.lines.iter().flatten().all(VecDeque::is_empty)
                && world.ends.iter().all(|end| end.next().is_none());
            if quiet && world.whole.iter().all(|it| it[0] == it[1]) {
                assert_eq!(world.heard, [world.said[1], world.said[0]], "{world:?}");
                // Who says no more because there is no room must get some.
                assert!(world.ends[0].kept.len() + 1 < KEPT, "stuck: {world:?}");
                ends += 1;
            }
            repeated += usize::from(world.ends.iter().any(|end| end.posted < end.sent));
            open.extend(world.next());
        }
        assert!(ends >= 10 && repeated > 10_000 && seen.len() > 100_000, "{ends} {repeated}");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let mut end = Courier::<4>::new(1);
        let letter = |number, taken, note| Letter { number, taken, note };
        assert_eq!(end.hear(&letter(1, 0, Some(note(0)))), Err(Garbled));
        assert_eq!(end.hear(&letter(0, 1, None)), Err(Garbled));
        assert!(end.say(note(0)));
        assert_eq!(end.hear(&letter(0, 1, None)), Err(Garbled), "it was not sent");
        end.post();
        assert_eq!(end.hear(&letter(0, 1, None)), Ok(None));
        assert_eq!(end.hear(&letter(0, 0, Some(note(7)))), Ok(Some(note(7))));
        assert_eq!(end.hear(&letter(0, 0, Some(note(7)))), Ok(None), "a second time");
        assert_eq!(end.next(), Some((0, letter(1, 1, None))), "who repeats is told");
    }

    #[test]
    fn there_is_room_for_the_last_note() {
        let mut end = Courier::<3>::new(1);
        assert!(end.say(note(0)) && end.say(note(1)) && !end.say(note(2)));
        end.post();
        let mut hurried = end.clone();
        hurried.say_last(Note::Bye);
        let next = |end: &Courier<3>| end.next().unwrap().1;
        assert_eq!((next(&hurried).number, next(&hurried).note), (1, Some(Note::Bye)));
        end.post();
        end.say_last(Note::Bye);
        assert_eq!((next(&end).number, next(&end).note), (2, Some(Note::Bye)));
    }

    #[test]
    fn the_line_in_use_stays_until_there_is_a_better_one() {
        let mut end = Courier::<4>::new(0b110);
        let line = |end: &mut Courier<4>| {
            end.owes = true;
            end.next().map(|(line, _)| line)
        };
        assert_eq!(line(&mut end), Some(1));
        end.open_line(0);
        assert_eq!(line(&mut end), Some(1));
        end.doubt(0b011, true);
        assert_eq!(line(&mut end), Some(2));
        assert!(end.break_line(2) && !end.is_open(2));
        assert!(end.is_led(0b101) && !end.is_led(0b1100));
        assert_eq!(line(&mut end), Some(0), "doubtful, but there is no other");
        assert!(end.break_line(0) && !end.break_line(1));
        assert_eq!(line(&mut end), None);
    }

    /// Three lines, doubted and trusted again in all sequences of four: each is as was said last of it, and what is used is
    /// sound while a sound one is whole.
    #[test]
    fn a_doubt_is_of_the_lines_that_it_names_alone() {
        let mut changes = 0;
        for word in 0..16_u32.pow(4) {
            let mut end = Courier::<4>::new(0b011);
            let mut doubted = [false; 3];
            for step in 0..4 {
                let [said, ..] = (word >> (4 * step)).to_le_bytes();
                let (lines, is_doubtful) = (said & 0b111, said & 0b1000 != 0);
                let before = end.line;
                end.doubt(lines, is_doubtful);
                for (line, doubted) in doubted.iter_mut().enumerate() {
                    if lines & 1 << line != 0 {
                        *doubted = is_doubtful;
                    }
                }
                let used = usize::from(end.line.unwrap());
                assert!(used < 2 && (!doubted[used] || (doubted[0] && doubted[1])));
                let kept = before.filter(|&line| !doubted[usize::from(line)]);
                assert!(kept.is_none_or(|line| end.line == Some(line)), "it was sound");
                changes += usize::from(end.line != before);
            }
        }
        assert!(changes > 1000, "{changes}");
    }

    #[test]
    fn letters_survive_the_way_and_nothing_else_does() {
        let some = [None, Some(Note::Ready), Some(note(u32::MAX))];
        for note in some {
            let letter = Letter { number: u32::MAX, taken: 7, note };
            let (bytes, len) = letter.encode();
            assert_eq!(Letter::decode(&bytes[..len]), Some(letter));
            for short in 0..len {
                let cut = Letter::decode(&bytes[..short]);
                assert_eq!(cut.is_some(), short == HEAD_BYTES, "{short} of {letter:?}");
            }
            assert_eq!(Letter::decode(&[&bytes[..len], &[9]].concat()), None);
        }
    }
}
