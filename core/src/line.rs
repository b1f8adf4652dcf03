//! How a line, a queue pair for notes, breaks and is made anew, at each of its ends.
//!
//! ```text
//!   the end that has called                          the other
//!   whole ── fail ──▶ rests
//!   Open: a new queue pair ───────── Link ─────────▶ Cut, if it took its own for whole
//!                                                    Answer: a new queue pair, connected to that one
//!   Try: connects its own, ◀──────── Linked ────────
//!        and posts a word  ═════════════════════════▶ heard: whole
//!   proven: whole
//! ```
//!
//! `Link` and `Linked` go over another line. Which lines are whole, and what goes over which, is [`crate::courier`]'s to
//! know; how long one rests, [`crate::way`]'s. Knows no queue pair and no address: what there is to be done comes out,
//! what has become of it comes in.
//!
//! # Invariants
//!
//! 1. A queue pair is replaced only when all that was posted on it has completed: so no queue overruns by it, and no
//!    completion is taken for one of the next.
//! 2. An end takes the line for whole when something has got through between the queue pairs of one attempt.
//! 3. A queue pair that its end has given up is cut, so that the other end notices.
//! 4. What is said of an earlier attempt changes nothing, in whatever order it comes.
//! 5. When nothing breaks any more, both ends come to take it for whole.
//!
//! The tests below run two ends, in all orders of what can happen to them.

use crate::id::Time;
use crate::port::Queue;
use crate::way::{Answered, Failed, Way};

/// Which of a line's two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// Of the one who has called: it asks.
    Caller,
    /// Of the one who was called: it answers.
    Called,
}

/// What is to be done about a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "it counts as begun"]
pub enum Step {
    /// Nothing, now.
    Nothing,
    /// Make a queue pair, in the place of the one that there is, and ask the other end for its own ([`Note::Link`]).
    ///
    /// [`Note::Link`]: crate::note::Note::Link
    Open {
        /// Which attempt it is.
        epoch: u32,
    },
    /// Connect it to this one, and post a word on it.
    Try(Queue),
    /// The line does not work: the other end has given it up. Say so to all who take it for whole; then ask again.
    Cut,
    /// Make a queue pair, in the place of the one that there is, connected to this one; and answer ([`Note::Linked`]),
    /// with none if that fails, or if there is none to connect it to.
    ///
    /// [`Note::Linked`]: crate::note::Note::Linked
    Answer {
        /// Of the attempt that is answered.
        epoch: u32,
        /// The other end, unless the NIC cannot be used.
        theirs: Option<Queue>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    Caller {
        way: Way,
        /// The other end of the attempt that is under way.
        answer: Option<Queue>,
    },
    Called {
        /// Of the last attempt that was heard of.
        epoch: u32,
        /// The other end, until it is answered.
        asked: Option<Queue>,
        /// It is answered, and nothing was heard over it yet.
        is_fresh: bool,
    },
}

/// One end of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Line {
    stage: Stage,
    posted: u16,
}

impl Line {
    /// As a session begins, whole or broken.
    #[must_use]
    pub fn new(now: Time, end: End, is_whole: bool) -> Self {
        let stage = match end {
            End::Caller => Stage::Caller { way: Way::opened(now), answer: None },
            End::Called => Stage::Called { epoch: 0, asked: None, is_fresh: false },
        };
        let mut line = Self { stage, posted: 0 };
        if !is_whole {
            let _ = line.fail(now); // It has no queue pair.
        }
        line
    }

    /// What was posted, and has not completed.
    #[must_use]
    pub const fn posted(&self) -> u16 {
        self.posted
    }

    /// Something was posted.
    pub const fn post(&mut self) {
        self.posted = self.posted.saturating_add(1);
    }

    /// Something that was posted has completed, however.
    pub const fn complete(&mut self) {
        self.posted = self.posted.saturating_sub(1);
    }

    /// The other end asks for the line to be made anew, to this one. Returns whether it may ask that.
    #[must_use]
    pub const fn asked(&mut self, of: u32, theirs: Queue) -> bool {
        let Stage::Called { epoch, asked, is_fresh } = &mut self.stage else { return false };
        if of > *epoch {
            // Over what was answered before nothing will be heard.
            (*epoch, *asked, *is_fresh) = (of, Some(theirs), false);
        }
        true
    }

    /// The other end answers, with this one, or with none. Returns whether it may.
    #[must_use]
    pub const fn answered(&mut self, epoch: u32, theirs: Queue) -> bool {
        let Stage::Caller { way, answer } = &mut self.stage else { return false };
        if way.is_asked(epoch) {
            *answer = Some(theirs);
        }
        true
    }

    /// Whether the address of the other end is needed, for what is to be done next.
    #[must_use]
    pub const fn needs_address(&self) -> bool {
        matches!(
            self.stage,
            Stage::Caller { answer: Some(_), .. } | Stage::Called { asked: Some(_), .. }
        )
    }

    /// What is to be done now. `is_usable` says whether anything can be sent over the NIC, `is_whole` whether the line is
    /// taken for whole, and `is_known` whether the other end's address is known, or known not to answer.
    pub fn next(&mut self, now: Time, is_usable: bool, is_whole: bool, is_known: bool) -> Step {
        let idle = self.posted == 0;
        match &mut self.stage {
            Stage::Caller { way, answer: answer @ Some(_) } => {
                let theirs = if is_known { answer.take() } else { None };
                let wanted = |_: &Queue| way.answered(now, way.epoch(), 1) != Answered::Stale;
                theirs.filter(wanted).map_or(Step::Nothing, Step::Try)
            }
            Stage::Caller { way, answer: None } => {
                let due = idle && is_usable && way.is_due(now);
                if due { Step::Open { epoch: way.open() } } else { Step::Nothing }
            }
            Stage::Called { asked: None, .. } => Step::Nothing,
            Stage::Called { .. } if is_usable && !is_known => Step::Nothing,
            Stage::Called { .. } if is_whole => Step::Cut,
            Stage::Called { .. } if !idle => Step::Nothing,
            Stage::Called { epoch, asked, is_fresh } => {
                let theirs = asked.take().filter(|_| is_usable);
                *is_fresh = theirs.is_some();
                Step::Answer { epoch: *epoch, theirs }
            }
        }
    }

    /// It does not work, or an attempt to make it anew has failed. Returns whether its queue pair is to be cut: also one
    /// that was not whole yet, or the other end would take it for whole alone.
    #[must_use]
    pub fn fail(&mut self, now: Time) -> bool {
        match &mut self.stage {
            Stage::Caller { way, answer } => {
                *answer = None;
                let failed = way.fail(now);
                // What was on it the courier sends again.
                if failed == Failed::Broke {
                    way.settled(now);
                }
                failed != Failed::Nothing
            }
            Stage::Called { is_fresh, .. } => {
                *is_fresh = false;
                true
            }
        }
    }

    /// Something has come over it. Returns whether the line is whole by that.
    #[must_use]
    pub const fn hear(&mut self) -> bool {
        let Stage::Called { is_fresh, .. } = &mut self.stage else { return false };
        core::mem::replace(is_fresh, false)
    }

    /// Something that was posted has got through. Returns whether the line is whole by that.
    #[must_use]
    pub const fn prove(&mut self, now: Time) -> bool {
        let Stage::Caller { way, .. } = &mut self.stage else { return false };
        way.proven(now)
    }

    /// There is reason to think that it will work now.
    pub fn hurry(&mut self, now: Time) {
        if let Stage::Caller { way, .. } = &mut self.stage {
            way.hurry(now);
        }
    }

    /// When there is something to be done, even if nothing happens; [`Time::NEVER`] if there is not.
    #[must_use]
    pub const fn due(&self, is_usable: bool) -> Time {
        match self.stage {
            Stage::Caller { way, .. } if is_usable && self.posted == 0 => way.due(),
            _ => Time::NEVER,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::{BuildHasher, RandomState};
    use std::vec::Vec;

    use super::*;
    use crate::port::Number24;

    /// Attempts that are followed; in each later one the same happens.
    const EPOCHS: u32 = 4;

    /// The queue pair that an end has made in this attempt.
    fn queue(epoch: u32) -> Queue {
        Queue { number: Number24::new(epoch), psn: Number24::new(0) }
    }

    /// What an end has.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    struct Side {
        line: Line,
        /// It takes the line for whole.
        whole: bool,
        /// Of which attempt its queue pair is, and whether that is cut.
        pair: u32,
        cut: bool,
        is_usable: bool,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    struct World {
        now: Time,
        caller: Side,
        called: Side,
        /// The caller's queue pair is connected.
        connected: bool,
        /// Posted on the queue pair that there is, and not completed.
        words: u8,
        letters: u8,
        /// What is said, in no order, a bit for each attempt: links, and answers without and with a queue pair.
        links: u8,
        linked: [u8; 2],
        /// What may still go wrong.
        breaks: u8,
        flips: u8,
    }

    impl World {
        fn new(is_whole: bool) -> Self {
            let side = |end| Side {
                line: Line::new(Time::ZERO, end, is_whole),
                whole: is_whole,
                pair: 1,
                cut: !is_whole,
                is_usable: true,
            };
            let (caller, called) = (side(End::Caller), side(End::Called));
            let (links, linked) = (0, [0; 2]);
            let (now, connected) = (Time::ZERO, is_whole);
            let (words, letters, breaks, flips) = (0, 0, 2, 1);
            Self { now, caller, called, connected, words, letters, links, linked, breaks, flips }
        }

        /// What is posted at one end is received at the other.
        fn is_well(&self) -> bool {
            let there = self.connected && self.caller.pair == self.called.pair;
            there && !self.caller.cut && !self.called.cut
        }

        fn fail(&mut self, end: End) {
            let now = self.now;
            let side = self.side(end);
            side.whole = false;
            side.cut |= side.line.fail(now);
        }

        fn side(&mut self, end: End) -> &mut Side {
            match end {
                End::Caller => &mut self.caller,
                End::Called => &mut self.called,
            }
        }

        /// The caller's end does what is to be done; `None` if that is nothing.
        fn caller_next(mut self, is_made: bool) -> Option<Self> {
            let Side { is_usable, whole, .. } = self.caller;
            match self.caller.line.next(self.now, is_usable, whole, true) {
                Step::Open { epoch } => {
                    assert!(is_usable && !whole && self.words == 0, "{self:?}: it was replaced");
                    (self.caller.pair, self.caller.cut, self.connected) = (epoch, !is_made, false);
                    if is_made {
                        self.links |= 1 << epoch;
                    } else {
                        self.fail(End::Caller);
                    }
                }
                Step::Try(theirs) => {
                    assert!(!whole);
                    if theirs.is_some() && is_made {
                        assert_eq!(theirs, queue(self.caller.pair), "it is of another attempt");
                        self.connected = true;
                        self.caller.line.post();
                        self.words += 1;
                    } else {
                        self.fail(End::Caller);
                    }
                }
                Step::Nothing => return None,
                step => panic!("{step:?}"),
            }
            Some(self)
        }

        fn called_next(mut self, is_made: bool) -> Option<Self> {
            let Side { is_usable, whole, .. } = self.called;
            match self.called.line.next(self.now, is_usable, whole, true) {
                Step::Cut => {
                    assert!(whole);
                    self.fail(End::Called);
                }
                Step::Answer { epoch, theirs } => {
                    assert!(!whole && self.letters == 0, "{self:?}: it was replaced");
                    assert_eq!(theirs, is_usable.then(|| queue(epoch)));
                    let is_made = is_made && is_usable;
                    (self.called.pair, self.called.cut) = (epoch, !is_made);
                    if !is_made {
                        self.fail(End::Called);
                    }
                    self.linked[usize::from(is_made)] |= 1 << epoch;
                }
                Step::Nothing => return None,
                step => panic!("{step:?}"),
            }
            Some(self)
        }

        /// A word or a letter of this end's arrives, and that is known or not; or it does not.
        fn end(mut self, end: End, arrives: bool, is_known: bool) -> Self {
            let is_well = self.is_well();
            let now = self.now;
            if arrives {
                match end {
                    End::Caller if self.called.line.hear() => {
                        assert!(is_well && !self.called.whole);
                        self.called.whole = true;
                    }
                    End::Caller => assert!(self.called.whole, "{self:?}: it was not noticed"),
                    End::Called => assert!(!self.caller.line.hear()),
                }
            }
            match end {
                End::Caller => self.words -= 1,
                End::Called => self.letters -= 1,
            }
            self.side(end).line.complete();
            if !is_known {
                self.fail(end);
            } else if self.side(end).line.prove(now) {
                assert!(is_well && !self.caller.whole && end == End::Caller);
                self.caller.whole = true;
            }
            self
        }

        /// All that can happen next: what comes by itself, and what goes wrong.
        fn next(&self) -> (Vec<Self>, Vec<Self>) {
            let (mut due, mut wrong) = (Vec::new(), Vec::new());
            due.extend(self.caller_next(true));
            due.extend(self.called_next(true));
            if self.breaks > 0 {
                let world = Self { breaks: self.breaks - 1, ..*self };
                wrong.extend(world.caller_next(false));
                wrong.extend(world.called_next(false));
            }
            for epoch in 0..8 {
                let mut world = *self;
                world.links &= !(1 << epoch);
                if world != *self {
                    assert!(world.called.line.asked(epoch, queue(epoch)));
                    due.push(world);
                }
                for (made, theirs) in [Queue::default(), queue(epoch)].into_iter().enumerate() {
                    let mut world = *self;
                    world.linked[made] &= !(1 << epoch);
                    if world != *self {
                        assert!(world.caller.line.answered(epoch, theirs));
                        due.push(world);
                    }
                }
            }
            for (end, posted) in [(End::Caller, self.words), (End::Called, self.letters)] {
                if posted > 0 && self.is_well() {
                    due.push(self.end(end, true, true));
                    if self.breaks > 0 {
                        let world = Self { breaks: self.breaks - 1, ..*self };
                        wrong.push(world.end(end, true, false));
                    }
                } else if posted > 0 {
                    due.push(self.end(end, false, false));
                }
                let mut world = *self;
                let side = *world.side(end);
                if side.whole && posted == 0 {
                    // Something is said, or asked; where nobody is that is seen.
                    world.side(end).line.post();
                    match end {
                        End::Caller => world.words += 1,
                        End::Called => world.letters += 1,
                    }
                    if self.is_well() { wrong.push(world) } else { due.push(world) }
                }
                if self.breaks > 0 {
                    let mut world = Self { breaks: self.breaks - 1, ..*self };
                    world.fail(end);
                    wrong.push(world);
                }
                if self.flips > 0 {
                    let mut world = Self { flips: self.flips - 1, ..*self };
                    world.side(end).is_usable ^= true;
                    wrong.push(world);
                }
            }
            let next = self.caller.line.due(self.caller.is_usable);
            assert_eq!(self.called.line.due(true), Time::NEVER);
            if next > self.now && next < Time::NEVER {
                due.push(Self { now: next, ..*self });
            }
            (due, wrong)
        }
    }

    /// Two ends of one line: whatever breaks, twice, and in whatever order notes come. When nothing more breaks, and both
    /// NICs can be used, both ends take the line for whole, and it is.
    #[test]
    fn a_line_is_whole_again_at_both_ends_and_never_at_one_that_is_not() {
        // Of worlds that were seen only a hash is kept: two with the same would hide one, and are not to be expected.
        let hasher = RandomState::new();
        let (mut seen, mut good) = (HashSet::new(), HashSet::new());
        let mut open = Vec::from([World::new(true), World::new(false)]);
        let (mut attempts, mut outdated) = ([0; EPOCHS as usize], 0);
        while let Some(world) = open.pop() {
            if !seen.insert(hasher.hash_one(world)) {
                continue;
            }
            let said = [world.links, world.linked[0] | world.linked[1]];
            outdated += usize::from(said.iter().any(|said| said.count_ones() > 1));
            let mut last = world;
            (last.caller.is_usable, last.called.is_usable) = (true, true);
            let mut followed = Vec::new();
            loop {
                let hash = hasher.hash_one(last);
                if good.contains(&hash) {
                    break;
                }
                followed.push(hash);
                assert!(followed.len() < 32, "{world:?}: it goes on for ever");
                let Some(next) = last.next().0.into_iter().next() else {
                    let both = last.caller.whole && last.called.whole;
                    assert!(both && last.is_well(), "{world:?} ends as {last:?}");
                    break;
                };
                last = next;
            }
            good.extend(followed);
            if let Some(count) = attempts.get_mut(world.caller.pair as usize - 1) {
                *count += 1;
                let (due, wrong) = world.next();
                open.extend(due);
                open.extend(wrong);
            }
        }
        assert!(
            attempts.iter().all(|count| *count > 100) && outdated > 100,
            "{attempts:?} {outdated}"
        );
    }

    #[test]
    fn each_end_is_told_only_what_the_other_may_say() {
        let mut caller = Line::new(Time::ZERO, End::Caller, false);
        let mut called = Line::new(Time::ZERO, End::Called, false);
        assert!(!caller.asked(1, queue(1)) && !called.answered(1, queue(1)));
        assert!(caller.answered(1, queue(1)) && !caller.needs_address(), "nobody has asked");
        assert!(called.asked(2, queue(2)) && called.needs_address());
        assert_eq!(called.next(Time::ZERO, true, false, false), Step::Nothing, "not known yet");
        assert!(called.asked(1, queue(1)));
        let answer = Step::Answer { epoch: 2, theirs: Some(queue(2)) };
        assert_eq!(called.next(Time::ZERO, true, false, true), answer);
        assert!(called.asked(2, queue(2)) && !called.needs_address(), "a second time");
    }

    #[test]
    fn who_has_reason_to_hopes_at_once() {
        let mut line = Line::new(Time::ZERO, End::Caller, false);
        assert!(line.due(true) > Time::ZERO && line.due(false) == Time::NEVER);
        line.post();
        line.hurry(Time::ZERO);
        assert_eq!(line.due(true), Time::NEVER, "what was posted has not completed");
        line.complete();
        assert_eq!(line.due(true), Time::ZERO);
    }
}
