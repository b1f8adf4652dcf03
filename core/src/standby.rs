//! Short copies by warps of a GPU that stand by: asked for, and found done, by words in pinned memory, with no call of the driver.
//!
//! To launch a kernel takes some ten microseconds until it has copied a few bytes, the copy engine almost as long, and half of that is the
//! driver's. A kernel that is there already takes three. Its warps look at words, a *seat* for each: for as long as short copies come
//! soon after one another, and not for longer than a *shift*, as whoever waits for the GPU waits for it, too. Then they go, whatever has just
//! been asked for:
//!
//! ```text
//!   asker, a CPU                           warp
//!   ask:    asked = copy, with a tag       asked, all with tag done + 1 ?   copy, status = done + 1
//!   look:   status = that tag ?  made      no, and its time is over ?       status = gone
//!           status = gone ?      never
//! ```
//!
//! Knows the words and when warps come and go; not what a GPU is, whose the bytes are, nor who copies what the warps do not.
//!
//! # Invariants
//!
//! 1. A copy is made once, and as it was asked for, or not at all: each of its words carries its tag.
//! 2. What is not made when the warp says that it has gone is never made: the words are taken back, before there is another warp to see
//!    them. One word says both, so that neither can be seen without the other.
//! 3. Whoever sees that a copy has been made sees its bytes.
//! 4. A seat has one warp at a time: nobody is sent while there is one, or one may still come.
//!
//! The test below goes through all orders in which an asker, and a kernel that is sent for, can do their steps; a model in `verification/`
//! through those of their loads and stores.

use core::time::Duration;

use crate::id::Time;
use crate::lane::Word;
use crate::sync::Ordering;

/// Seats of a GPU, a warp for each: short copies under way at a time.
pub const SEATS: usize = 4;
/// Longer copies are not taken: the copy engine does them as soon.
pub const SHORT_BYTES: u32 = 32 << 10;
/// How soon after one another short copies must come for warps to stand by, and how long they do so in vain.
pub const IDLE: Duration = Duration::from_micros(100);
/// How long they stay at most.
pub const SHIFT: Duration = Duration::from_millis(1);
/// 64-bit words of a seat: two cache lines, one written by the asker, the other by the warp.
pub const SEAT_WORDS: usize = 16;
/// Words that say what is to be copied; the first of a seat.
pub const ASKED_WORDS: usize = 5;
/// The word of a seat that the warp writes.
pub const STATUS: usize = 8;

/// What is to be copied: `len` bytes, as the GPU has addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Errand {
    /// First byte to be read.
    pub src: u64,
    /// First byte to be written.
    pub dst: u64,
    /// Bytes.
    pub len: u32,
}

/// The lower half of a word.
#[expect(clippy::cast_possible_truncation, reason = "the upper half is another number")]
const fn low(word: u64) -> u32 {
    word as u32
}

/// The upper half of a word.
const fn high(word: u64) -> u32 {
    low(word >> 32)
}

impl Errand {
    const fn to_words(self, tag: u32) -> [u64; ASKED_WORDS] {
        const LOW: u64 = u32::MAX as u64;
        let (src, dst, tag) = (self.src, self.dst, (tag as u64) << 32);
        [tag | src & LOW, tag | src >> 32, tag | dst & LOW, tag | dst >> 32, tag | self.len as u64]
    }

    fn of(words: [u64; ASKED_WORDS], tag: u32) -> Option<Self> {
        if words.iter().any(|word| high(*word) != tag) {
            return None;
        }
        let [src, src_high, dst, dst_high, len] = words.map(low);
        let join = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        Some(Self { src: join(src, src_high), dst: join(dst, dst_high), len })
    }
}

/// Where a warp is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// There never was one.
    None,
    /// It looks.
    Up,
    /// It does not look any more.
    Gone,
}

/// What the warp of a seat says: one word, so that all of it is of one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Tag of the last copy that was made here, by this warp or one before.
    pub done: u32,
    /// The launch that the warp is of, modulo 2^30.
    pub launch: u32,
    /// Where it is.
    pub phase: Phase,
}

/// What a launch's number has.
const LAUNCH_BITS: u32 = 30;

impl Status {
    const fn to_word(self) -> u64 {
        (self.done as u64) << 32 | (self.launch << 2) as u64 | self.phase as u64
    }

    const fn of(word: u64) -> Self {
        let phase = match word & 3 {
            0 => Phase::None,
            1 => Phase::Up,
            _ => Phase::Gone,
        };
        Self { done: high(word), launch: low(word) >> 2, phase }
    }
}

/// The words of one seat; zero before there was a warp.
#[derive(Debug, Clone, Copy)]
pub struct Seat<'a> {
    asked: &'a [Word; ASKED_WORDS],
    status: &'a Word,
}

impl<'a> Seat<'a> {
    /// Of [`SEAT_WORDS`] words; `None`: there are not so many.
    #[must_use]
    pub fn new(words: &'a [Word]) -> Option<Self> {
        Some(Self { asked: words.first_chunk()?, status: words.get(STATUS)? })
    }

    /// Acquire: with it come the bytes of what is done.
    fn status(self) -> Status {
        Status::of(self.status.load(Ordering::Acquire))
    }

    fn ask(self, errand: Errand, tag: u32) {
        for (word, value) in self.asked.iter().zip(errand.to_words(tag)) {
            // Release: the warp reads what the caller wrote before.
            word.store(value, Ordering::Release);
        }
    }

    /// Takes back what was asked for with this tag; the warp has gone, and nobody has been sent since.
    fn take_back(self, tag: u32) {
        for word in self.asked {
            word.store(u64::from(tag.wrapping_sub(1)) << 32, Ordering::Relaxed);
        }
    }
}

/// The warp of a seat: what a kernel's does, as a CPU does it. For models, and for drivers in host memory; kernels have it in
/// their own language.
#[derive(Debug)]
pub struct Warp<'a> {
    seat: Seat<'a>,
    said: Status,
}

impl<'a> Warp<'a> {
    /// Comes to a seat that none before it looks at any more.
    #[must_use]
    pub fn arrive(seat: Seat<'a>, launch: u32) -> Self {
        let said = Status { launch, phase: Phase::Up, ..seat.status() };
        let warp = Self { seat, said };
        warp.say(said);
        warp
    }

    /// Release: whoever sees it sees all bytes copied so far.
    fn say(&self, status: Status) {
        self.seat.status.store(status.to_word(), Ordering::Release);
    }

    /// What it is to copy now, if all words say so; [`Warp::done`] when it has.
    #[must_use]
    pub fn look(&self) -> Option<Errand> {
        // Acquire: what the asker wrote before is there.
        let words = self.seat.asked.each_ref().map(|word| word.load(Ordering::Acquire));
        Errand::of(words, self.said.done.wrapping_add(1))
    }

    /// The copy has been made.
    pub fn done(&mut self) {
        self.said.done = self.said.done.wrapping_add(1);
        self.say(self.said);
    }

    /// Says that it has gone, after a look that was in vain: it does not look any more.
    pub fn go(mut self) {
        self.said.phase = Phase::Gone;
        self.say(self.said);
    }
}

/// What became of a copy that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Its bytes are there.
    Done,
    /// Nobody has made it, nor ever will.
    NotDone,
}

/// One GPU's seats, as who asks has them. One thread's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Standby {
    /// The number of the last launch; 0: there was none.
    launch: u32,
    /// When a short copy was last made in another way.
    last: Option<Time>,
    chairs: [Chair; SEATS],
}

/// What the asker knows of a seat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Chair {
    /// Tag of the last copy that is known to have been made.
    done: u32,
    /// The next one is asked for.
    is_asked: bool,
}

impl Default for Standby {
    fn default() -> Self {
        Self::new()
    }
}

impl Standby {
    /// None is asked for, nobody was sent.
    #[must_use]
    pub const fn new() -> Self {
        Self { launch: 0, last: None, chairs: [Chair { done: 0, is_asked: false }; SEATS] }
    }

    /// Has a warp make a short copy. Returns the number of its seat; `None`: no warp is up that has nothing to do, or the copy is none for
    /// them. `seats`: all of them, in order.
    #[inline]
    pub fn ask(&mut self, errand: Errand, seats: &[Seat<'_>]) -> Option<usize> {
        let at = self.find(errand, seats)?;
        self.put(at, errand, *seats.get(at)?);
        Some(at)
    }

    /// A seat with nothing to do whose warp is up.
    fn find(&self, errand: Errand, seats: &[Seat<'_>]) -> Option<usize> {
        let is_up = |seat: &Seat<'_>| {
            let status = seat.status();
            status.phase == Phase::Up && status.launch == self.launch
        };
        let mut all = self.chairs.iter().zip(seats);
        if errand.len > SHORT_BYTES {
            return None;
        }
        all.position(|(chair, seat)| !chair.is_asked && is_up(seat))
    }

    /// Asks there. The warp may have gone since: [`Standby::look`] tells.
    fn put(&mut self, at: usize, errand: Errand, seat: Seat<'_>) {
        if let Some(chair) = self.chairs.get_mut(at) {
            chair.is_asked = true;
            seat.ask(errand, chair.done.wrapping_add(1));
        }
    }

    /// What became of what was asked for at a seat; once. `None`: nothing yet, or nothing was asked for.
    pub fn look(&mut self, at: usize, seat: Seat<'_>) -> Option<Ended> {
        let chair = self.chairs.get_mut(at).filter(|chair| chair.is_asked)?;
        let (tag, status) = (chair.done.wrapping_add(1), seat.status());
        let ended = if status.done == tag {
            chair.done = tag;
            Ended::Done
        } else if status.phase == Phase::Gone {
            seat.take_back(tag);
            Ended::NotDone
        } else {
            return None;
        };
        chair.is_asked = false;
        Some(ended)
    }

    /// A short copy is made in another way. Returns the number of a launch if warps are to come now.
    ///
    /// Whoever cannot launch them does not ask here again.
    pub fn send(&mut self, now: Time, seats: &[Seat<'_>]) -> Option<u32> {
        let is_soon = self.last.is_some_and(|last| now <= last.after(IDLE));
        self.last = Some(now);
        let is_gone = |seat: &Seat<'_>| {
            let status = seat.status();
            status.phase == Phase::Gone && status.launch == self.launch
        };
        let is_asked = self.chairs.iter().any(|chair| chair.is_asked);
        if !is_soon || is_asked || (self.launch != 0 && !seats.iter().all(is_gone)) {
            return None;
        }
        self.launch = (self.launch + 1) % (1 << LAUNCH_BITS);
        self.launch = self.launch.max(1);
        Some(self.launch)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;
    use std::vec::Vec;

    use super::*;

    const FAR: Errand = Errand { src: 0x0123_4567_89ab_cdef, dst: u64::MAX - 1, len: 32 << 10 };

    #[test]
    fn words_say_what_was_meant_and_nothing_if_one_is_of_another() {
        for tag in [0, 1, u32::MAX] {
            let words = FAR.to_words(tag);
            assert_eq!(Errand::of(words, tag), Some(FAR));
            for at in 0..ASKED_WORDS {
                let mut torn = words;
                torn[at] = FAR.to_words(tag.wrapping_add(1))[at];
                assert_eq!(Errand::of(torn, tag), None);
            }
        }
        for phase in [Phase::None, Phase::Up, Phase::Gone] {
            for (done, launch) in [(0, 0), (u32::MAX, (1 << LAUNCH_BITS) - 1), (7, 1)] {
                let status = Status { done, launch, phase };
                assert_eq!(Status::of(status.to_word()), status);
            }
        }
        assert_eq!(Status::of(0), Status { done: 0, launch: 0, phase: Phase::None });
        assert!(Seat::new(&[const { Word::new(0) }; STATUS]).is_none());
    }

    /// Copies that are asked for, and launches, in the test below.
    const ERRANDS: usize = 3;
    const LAUNCHES: u32 = 3;

    /// One seat, its asker, and what is at it.
    #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
    struct World {
        words: [u64; SEAT_WORDS],
        standby: Standby,
        /// Found to be up, and not yet asked.
        found: Option<usize>,
        /// Under way.
        asked: Option<usize>,
        /// Launched, and not there yet.
        to_come: Option<u32>,
        /// What it said last, and what it copies.
        warp: Option<(u64, Option<usize>)>,
        next: usize,
        made: [u8; ERRANDS],
        not_done: [bool; ERRANDS],
    }

    impl World {
        /// Does step `step`, if it can be done now.
        fn step(&mut self, step: usize) -> Option<()> {
            let words = self.words.map(Word::new);
            let seat = Seat::new(&words)?;
            let errand = Errand { src: self.next as u64, dst: !(self.next as u64), len: 8 };
            let resumed = |(said, _)| Warp { seat, said: Status::of(said) };
            match step {
                0 if self.asked.is_none() && self.found.is_none() && self.next < ERRANDS => {
                    self.found = self.standby.find(errand, &[seat]);
                    if self.found.is_none() && self.standby.launch < LAUNCHES {
                        let sent = self.standby.send(Time::ZERO, &[seat]);
                        assert!(sent.is_none() || (self.warp.is_none() && self.to_come.is_none()));
                        self.to_come = self.to_come.or(sent);
                    }
                }
                1 => {
                    self.standby.put(self.found.take()?, errand, seat);
                    self.asked = Some(self.next);
                    self.next += 1;
                }
                2 => {
                    let number = self.asked?;
                    let made = self.made[number];
                    match self.standby.look(0, seat)? {
                        Ended::Done => assert_eq!(made, 1),
                        Ended::NotDone => {
                            assert_eq!(made, 0);
                            self.not_done[number] = true;
                        }
                    }
                    self.asked = None;
                }
                3 if self.warp.is_none() => {
                    let warp = Warp::arrive(seat, self.to_come.take()?);
                    self.warp = Some((warp.said.to_word(), None));
                }
                4 => {
                    let warp = resumed(self.warp.filter(|warp| warp.1.is_none())?);
                    let number = usize::try_from(warp.look()?.src).ok()?;
                    self.warp = Some((warp.said.to_word(), Some(number)));
                }
                5 => {
                    let (said, errand) = self.warp?;
                    self.made[errand?] += 1;
                    let mut warp = resumed((said, errand));
                    warp.done();
                    self.warp = Some((warp.said.to_word(), None));
                }
                // It has looked, and may have been asked since.
                6 => {
                    let warp = self.warp.filter(|(_, errand)| errand.is_none())?;
                    self.warp = None;
                    resumed(warp).go();
                }
                _ => return None,
            }
            self.words = words.map(|word| word.load(Ordering::Relaxed));
            assert!(self.made.iter().zip(self.not_done).all(|(made, not)| *made <= u8::from(!not)));
            Some(())
        }
    }

    /// Three copies, three launches, all orders of finding a seat, asking, looking, coming, looking, copying and going.
    #[test]
    fn each_copy_is_made_once_or_never_will_be() {
        let start = World {
            words: [0; SEAT_WORDS],
            standby: Standby::new(),
            found: None,
            asked: None,
            to_come: None,
            warp: None,
            next: 0,
            made: [0; ERRANDS],
            not_done: [false; ERRANDS],
        };
        let (mut seen, mut open) = (BTreeSet::new(), Vec::from([start]));
        let mut ends = BTreeSet::new();
        while let Some(world) = open.pop() {
            if !seen.insert(world.clone()) {
                continue;
            }
            let mut is_end = true;
            for step in 0..7 {
                let mut next = world.clone();
                if next.step(step).is_some() && next != world {
                    is_end = false;
                    open.push(next);
                }
            }
            if is_end {
                assert!(world.asked.is_none() && world.found.is_none(), "{world:?}");
                ends.insert((world.made, world.not_done));
            }
        }
        // Among the ends are those where nobody made any, where all were made, and where each was not.
        let all = |made| (made, [false; ERRANDS]);
        assert!(ends.contains(&all([1; ERRANDS])));
        for at in 0..ERRANDS {
            assert!(ends.iter().any(|(_, not_done)| not_done[at]));
        }
    }

    #[test]
    fn warps_are_sent_when_short_copies_come_soon_after_one_another() {
        let words: [Word; SEATS * SEAT_WORDS] = [const { Word::new(0) }; SEATS * SEAT_WORDS];
        let seats: Vec<_> = words.chunks(SEAT_WORDS).filter_map(Seat::new).collect();
        let (mut standby, at) = (Standby::new(), |nanos| Time::from_nanos(nanos));
        let idle = u64::try_from(IDLE.as_nanos()).unwrap();
        assert_eq!(standby.send(at(5), &seats), None);
        assert_eq!(standby.send(at(6 + idle), &seats), None);
        assert_eq!(standby.send(at(6 + 2 * idle), &seats), Some(1));
        // They may still come.
        assert_eq!(standby.send(at(6 + 2 * idle), &seats), None);
        assert_eq!(standby.ask(FAR, &seats), None);
        let mut warps: Vec<_> = seats.iter().map(|seat| Warp::arrive(*seat, 1)).collect();
        assert_eq!(standby.send(at(6 + 2 * idle), &seats), None);
        // Each takes one, and none takes what is too long.
        let long = Errand { len: FAR.len + 1, ..FAR };
        assert_eq!(standby.ask(long, &seats), None);
        for number in 0..SEATS {
            assert_eq!(standby.ask(FAR, &seats), Some(number));
            assert_eq!(warps[number].look(), Some(FAR));
            assert_eq!(standby.look(number, seats[number]), None);
        }
        assert_eq!(standby.ask(FAR, &seats), None);
        for (number, warp) in warps.iter_mut().enumerate() {
            warp.done();
            assert_eq!(standby.look(number, seats[number]), Some(Ended::Done));
            assert_eq!(standby.look(number, seats[number]), None);
            assert!(warp.look().is_none());
        }
        // One after the other they go; only when all have are others sent.
        for warp in warps {
            assert_eq!(standby.send(at(6 + 2 * idle), &seats), None);
            warp.go();
        }
        assert_eq!(standby.send(at(6 + 2 * idle), &seats), Some(2));
    }

    #[test]
    fn numbers_come_round() {
        let words = [const { Word::new(0) }; SEAT_WORDS];
        let seat = Seat::new(&words).unwrap();
        let mut standby = Standby::new();
        standby.last = Some(Time::ZERO);
        standby.launch = (1 << LAUNCH_BITS) - 1;
        seat.status.store(
            Status { done: u32::MAX, launch: standby.launch, phase: Phase::Gone }.to_word(),
            Ordering::Relaxed,
        );
        standby.chairs[0].done = u32::MAX;
        // Never the number of no launch.
        assert_eq!(standby.send(Time::ZERO, &[seat]), Some(1));
        let mut warp = Warp::arrive(seat, 1);
        assert_eq!(standby.ask(FAR, &[seat]), Some(0));
        assert_eq!(warp.look(), Some(FAR));
        warp.done();
        assert_eq!(standby.look(0, seat), Some(Ended::Done));
    }
}
