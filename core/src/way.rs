//! How a path over queue pairs comes to be, breaks, and is made anew, at the end that sends over it.
//!
//! ```text
//!   Closed ── want ──▶ Wanted ── open ──▶ Asked ── answered ──▶ Open ── fail ──▶ Broken ── settled ──▶ Resting
//!                        ▲                  │ fail: Broken       ▲                                      │  ▲
//!                        │                  ▼                    │ proven                               │  │ fail,
//!                        └ the first time  ...  once broken: ── Tried ◀── answered ── Asked ◀── open ───┘  │ sooner
//!                                                                 └──────────────────────────┴─────────────┘ or later
//! ```
//!
//! A path that broke is made anew under another *epoch*, so that no answer to an earlier one is taken for it; and it
//! is in use again only when something has got through. How long it rests before each attempt doubles, from
//! [`REST_MIN`] to [`REST_MAX`], and begins anew when it has worked for as long as the longest rest. Knows no queue pair:
//! what there is to be done comes out, what has become of it comes in.
//!
//! # Invariants
//!
//! 1. Whoever posts over the path is told that it broke once for each time that it was whole, and that it is whole
//!    again once for each time that it broke, when it was settled and proven.
//! 2. Each attempt has an epoch of its own, later than all before it. An answer counts for the last one alone.
//! 3. Between two attempts lies a rest; unless somebody has reason to think that it will work now ([`Way::hurry`]).
//! 4. An attempt begins when nothing is left of the one before ([`Way::next`]).
//! 5. What leaves a NIC for another way does not end the session by that ([`is_led`], [`is_left`], [`is_cut_off`]).
//! 6. At the other end the latest attempt that was asked for counts, in whatever order they come ([`is_later`]).
//!
//! The tests below run all orders of what can happen.

use core::time::Duration;

use crate::id::Time;

/// The rest after a path has broken.
pub const REST_MIN: Duration = Duration::from_millis(100);
/// The longest rest. An attempt may hold up both ends for a moment.
pub const REST_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Stage {
    /// Nobody has wanted it yet.
    Closed,
    Wanted,
    /// The other end has been asked to open its own.
    Asked,
    /// Both ends are open, and it is being seen whether something gets through: on so many queue pairs nothing has.
    Tried(u8),
    Open,
    /// What was in flight is not settled.
    Broken,
    /// Until then.
    Resting(Time),
}

/// What has become of a path that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "whoever posts there is to be told"]
pub enum Failed {
    /// It was taken for whole: it is to be told that it broke.
    Broke,
    /// It was not whole again yet; its ends of this attempt are to be closed.
    Again,
    /// It was not in use, or is broken already.
    Nothing,
}

/// What follows from the other end's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Answered {
    /// It is open.
    Open,
    /// It is to be tried first.
    Try,
    /// It was not asked for, or not this time: nothing.
    Stale,
}

/// What is to be done about a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "nothing is done by itself"]
pub enum Next {
    /// Nothing, now.
    Nothing,
    /// Close the queue pairs of the last attempt: they are of no use any more. Then ask again.
    Close,
    /// Open queue pairs ([`Way::open`]), and have the other end asked for its own.
    Open,
    /// It cannot be opened at all, and whoever wants it is to look for another: it fails ([`Way::fail`]).
    Fail,
}

/// A path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Way {
    stage: Stage,
    /// Of the last attempt; 0 before the first.
    epoch: u32,
    /// It has broken, and is not whole since.
    is_down: bool,
    rest: Duration,
    since: Time,
}

impl Default for Way {
    fn default() -> Self {
        Self::NEW
    }
}

impl Way {
    /// Not wanted yet.
    pub const NEW: Self =
        Self { stage: Stage::Closed, epoch: 0, is_down: false, rest: REST_MIN, since: Time::ZERO };

    /// One that is whole from the start, in epoch 1.
    #[must_use]
    pub const fn opened(now: Time) -> Self {
        Self { stage: Stage::Open, epoch: 1, since: now, ..Self::NEW }
    }

    /// Something can be posted.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open)
    }

    /// It broke, and what was in flight is not settled.
    #[must_use]
    pub const fn is_broken(&self) -> bool {
        matches!(self.stage, Stage::Broken)
    }

    /// It rests: nothing of the last attempt is needed any more.
    #[must_use]
    pub const fn is_resting(&self) -> bool {
        matches!(self.stage, Stage::Resting(_))
    }

    /// It has broken, and is not whole since.
    #[must_use]
    pub const fn is_down(&self) -> bool {
        self.is_down
    }

    /// The other end has been asked, in the attempt of this epoch, and has not answered.
    #[must_use]
    pub const fn is_asked(&self, epoch: u32) -> bool {
        matches!(self.stage, Stage::Asked) && self.epoch == epoch
    }

    /// Which attempt it is, counted from 1.
    #[must_use]
    pub const fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Something is to be posted there. Returns whether that is new.
    pub const fn want(&mut self) -> bool {
        let new = matches!(self.stage, Stage::Closed);
        if new {
            self.stage = Stage::Wanted;
        }
        new
    }

    /// Whether an attempt is due.
    #[must_use]
    pub fn is_due(&self, now: Time) -> bool {
        self.due() <= now
    }

    /// When an attempt is due; [`Time::NEVER`] if none is.
    #[must_use]
    pub const fn due(&self) -> Time {
        match self.stage {
            Stage::Wanted => Time::ZERO,
            Stage::Resting(until) => until,
            _ => Time::NEVER,
        }
    }

    /// What is to be done now. `is_usable` says whether anything can be sent over our NIC; `left` how much was posted on the
    /// queue pairs of the last attempt, and has not completed: `None` if they are closed.
    pub fn next(&self, now: Time, is_usable: bool, left: Option<u32>) -> Next {
        match left {
            Some(0) if self.is_resting() => Next::Close,
            _ if !self.is_due(now) => Next::Nothing,
            // It is known to be broken: it waits for the NIC.
            _ if !is_usable && self.is_down => Next::Nothing,
            _ if !is_usable => Next::Fail,
            Some(_) => Next::Nothing,
            None => Next::Open,
        }
    }

    /// The attempt that is due begins: the other end is being asked. Its epoch.
    pub const fn open(&mut self) -> u32 {
        self.stage = Stage::Asked;
        self.epoch = self.epoch.wrapping_add(1);
        self.epoch
    }

    /// The other end has opened its own for the attempt of this epoch, so many queue pairs.
    pub const fn answered(&mut self, now: Time, epoch: u32, lanes: u8) -> Answered {
        if !matches!(self.stage, Stage::Asked) || epoch != self.epoch {
            return Answered::Stale;
        }
        if self.is_down {
            self.stage = Stage::Tried(lanes);
            return Answered::Try;
        }
        (self.stage, self.since) = (Stage::Open, now);
        Answered::Open
    }

    /// The other end does not open its own for the attempt of this epoch. Returns whether it fails by that.
    #[must_use]
    pub const fn declined(&self, epoch: u32) -> bool {
        epoch == self.epoch && !self.is_open()
    }

    /// Something has got through on one of its queue pairs. Returns whether it is to be told that the path is whole again:
    /// when something has on each.
    pub const fn proven(&mut self, now: Time) -> bool {
        let Stage::Tried(lanes) = &mut self.stage else { return false };
        *lanes = lanes.saturating_sub(1);
        let through = *lanes == 0;
        if through {
            (self.stage, self.since, self.is_down) = (Stage::Open, now, false);
        }
        through
    }

    /// It does not work.
    pub fn fail(&mut self, now: Time) -> Failed {
        match self.stage {
            Stage::Closed | Stage::Broken | Stage::Resting(_) => Failed::Nothing,
            Stage::Asked | Stage::Tried(_) if self.is_down => {
                self.repose(now);
                Failed::Again
            }
            stage => {
                if stage == Stage::Open && now.since(self.since) >= REST_MAX {
                    self.rest = REST_MIN;
                }
                (self.stage, self.is_down) = (Stage::Broken, true);
                Failed::Broke
            }
        }
    }

    fn repose(&mut self, now: Time) {
        self.stage = Stage::Resting(now.after(self.rest));
        self.rest = self.rest.saturating_mul(2).min(REST_MAX);
    }

    /// What was in flight when it broke is accounted for.
    pub fn settled(&mut self, now: Time) {
        if self.stage == Stage::Broken {
            self.repose(now);
        }
    }

    /// There is reason to think that it will work now.
    pub fn hurry(&mut self, now: Time) {
        if let Stage::Resting(until) = &mut self.stage {
            *until = (*until).min(now);
        }
    }
}

/// Whether the attempt of this epoch, which the other end asks for, is later than all that it has asked for before: than the
/// one that our ends are of (0 if there was none), and the one that waits to be opened, if one does.
#[must_use]
pub const fn is_later(epoch: u32, opened: u32, waiting: Option<u32>) -> bool {
    epoch > opened
        && match waiting {
            Some(waiting) => epoch > waiting,
            None => true,
        }
}

/// One of all the paths of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lead {
    /// How it is.
    pub way: Way,
    /// Something can be sent over our NIC.
    pub is_usable: bool,
    /// Our NIC is lost, for good.
    pub is_lost: bool,
}

/// Whether a path of these is left: what is in flight over a NIC that is down need not wait for it. O(paths).
#[must_use]
pub fn is_led(mut paths: impl Iterator<Item = Lead>) -> bool {
    paths.any(|path| path.is_usable && !path.way.is_down())
}

/// Whether a path of ours is left for another of these, all the paths of the session, as something can be sent over its NIC or not: if so,
/// nothing is posted there any more. Without another it stays: the NIC may be back in time. O(paths); O(1) if the NIC can be used.
#[inline]
#[must_use]
pub fn is_left(is_usable: bool, paths: impl Iterator<Item = Lead>) -> bool {
    !is_usable && is_led(paths)
}

/// Whether none of these, all the paths of a session, can be used: it is over. One that was never tried may work. O(paths).
#[must_use]
pub fn is_cut_off(mut paths: impl Iterator<Item = Lead>) -> bool {
    paths.all(|path| path.is_lost || path.way.is_down())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::vec::Vec;

    use super::*;

    const LANES: u8 = 2;

    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    struct World {
        way: Way,
        now: Time,
        /// As whoever posts has been told.
        whole: bool,
        /// In the last epoch.
        settled: bool,
        /// Queue pairs on which something was posted to try them; if there are queue pairs.
        left: Option<u8>,
        steps: u8,
    }

    /// What is asked for, and opened, in all sequences of six: what is taken is later than all that was taken before, and
    /// nothing later is refused.
    #[test]
    fn the_later_of_two_attempts_is_the_one_that_counts() {
        let (mut taken, mut refused) = (0, 0);
        for word in 0..5_usize.pow(6) {
            let (mut opened, mut waiting, mut last) = (0, None, 0);
            for step in 0..6 {
                match u32::try_from(word / 5_usize.pow(step) % 5).unwrap() {
                    // What waits is opened.
                    4 => opened = waiting.take().unwrap_or(opened),
                    epoch => {
                        let later = is_later(epoch, opened, waiting);
                        assert_eq!(later, epoch > last, "{epoch} {opened} {waiting:?}");
                        if later {
                            (waiting, last, taken) = (Some(epoch), epoch, taken + 1);
                        } else {
                            refused += 1;
                        }
                    }
                }
            }
        }
        assert!(taken > 10_000 && refused > 10_000, "{taken} {refused}");
    }

    /// All that can happen, in every order, up to a number of steps: what is told alternates, and each attempt is later
    /// than the one before.
    #[test]
    fn what_is_told_alternates_and_nothing_is_tried_without_rest() {
        let start = World {
            way: Way::NEW,
            now: Time::ZERO,
            whole: true,
            settled: true,
            left: None,
            steps: 0,
        };
        let (mut seen, mut open) = (BTreeSet::new(), Vec::from([start]));
        let (mut broke, mut restored, mut again, mut closed) = (0, 0, 0, 0);
        while let Some(world) = open.pop() {
            if world.steps == 11 || !seen.insert(world) {
                continue;
            }
            let world = World { steps: world.steps + 1, ..world };
            let due = world.way.due();
            for now in [world.now, due, world.now.after(REST_MAX)] {
                if now >= world.now && now < Time::NEVER {
                    open.push(World { now, ..world });
                }
            }
            let mut next = world;
            next.way.want();
            open.push(next);
            for is_usable in [false, true] {
                let mut next = world;
                match world.way.next(world.now, is_usable, world.left.map(u32::from)) {
                    Next::Nothing => {
                        let waits = world.way.is_due(world.now) && is_usable;
                        assert!(
                            !waits || world.left.is_some_and(|left| left > 0),
                            "{world:?}: stuck"
                        );
                    }
                    Next::Close => {
                        assert!(world.settled && !world.way.is_open() && world.left == Some(0));
                        (next.left, closed) = (None, closed + 1);
                        open.push(next);
                    }
                    Next::Open => {
                        assert!(world.way.is_due(world.now) && is_usable);
                        assert!(next.way.open() > world.way.epoch());
                        assert!(world.settled, "{world:?}: it was opened before it was settled");
                        assert_eq!(
                            world.left, None,
                            "it was opened before the last one was closed"
                        );
                        next.left = Some(0);
                        open.push(next);
                    }
                    Next::Fail => {
                        // Who wants it is told once, and not when the NIC is there.
                        assert!(world.whole && !is_usable && world.left.is_none());
                        assert_eq!(next.way.fail(world.now), Failed::Broke);
                        (next.whole, next.settled) = (false, false);
                        open.push(next);
                    }
                }
            }
            for epoch in [world.way.epoch(), world.way.epoch().wrapping_sub(1)] {
                let mut next = world;
                let asked = world.way.is_asked(epoch);
                assert!(!asked || world.way.declined(epoch));
                assert!(!world.way.declined(epoch) || epoch == world.way.epoch());
                match next.way.answered(world.now, epoch, LANES) {
                    Answered::Stale => assert!(next == world && !asked),
                    answer => {
                        assert!(asked && epoch == world.way.epoch());
                        assert_eq!(answer == Answered::Open, world.whole);
                        assert_eq!(next.way.is_open(), world.whole);
                        next.left = Some(if world.whole { 0 } else { LANES });
                        open.push(next);
                    }
                }
            }
            // What was posted to try a queue pair gets through, or is flushed when it has failed.
            if let Some(left) = world.left.filter(|left| *left > 0) {
                let mut next = World { left: Some(left - 1), ..world };
                if next.way.proven(world.now) {
                    assert!(!world.whole && world.settled && next.way.is_open());
                    assert_eq!(next.left, Some(0), "a queue pair was never tried");
                    (next.whole, restored) = (true, restored + 1);
                }
                open.push(next);
            }
            let mut next = world;
            assert!(world.left.is_some_and(|left| left > 0) || !next.way.proven(world.now));
            let mut next = world;
            match next.way.fail(world.now) {
                Failed::Broke => {
                    assert!(world.whole && next.way.is_broken() && next.way.is_down());
                    (next.whole, next.settled, broke) = (false, false, broke + 1);
                    open.push(next);
                }
                Failed::Again => {
                    assert!(!world.whole && next.way.due() >= world.now.after(REST_MIN));
                    again += 1;
                    open.push(next);
                }
                Failed::Nothing => assert_eq!(next, world),
            }
            let mut next = world;
            next.way.settled(world.now);
            if next.way != world.way {
                assert!(!world.settled && next.way.is_resting());
                assert!(next.way.due() >= world.now.after(REST_MIN));
                // Whoever has settled it has closed its queue pairs.
                (next.settled, next.left) = (true, None);
                open.push(next);
            }
            let mut next = world;
            next.way.hurry(world.now);
            assert!(next.way.due() <= world.way.due());
            open.push(next);
        }
        let counts = (broke, restored, again, closed);
        assert!(broke > 100 && restored > 20 && again > 50 && closed > 50, "{counts:?}");
    }

    /// A way in each of its stages.
    fn each() -> [Way; 7] {
        let mut all = [Way::NEW; 7];
        for (at, way) in all.iter_mut().enumerate() {
            let steps: [&dyn Fn(&mut Way); 6] = [
                &|way| assert!(way.want()),
                &|way| assert_eq!(way.open(), 1),
                &|way| assert_eq!(way.answered(Time::ZERO, 1, LANES), Answered::Open),
                &|way| assert_eq!(way.fail(Time::ZERO), Failed::Broke),
                &|way| way.settled(Time::ZERO),
                &|way| {
                    let epoch = way.open();
                    assert_eq!(way.answered(Time::ZERO, epoch, LANES), Answered::Try);
                },
            ];
            steps.iter().take(at).for_each(|step| step(way));
        }
        all
    }

    /// Two NICs with a path each, in all stages: one of a NIC that is down is left only if there is another, so that the session
    /// goes on; and it is over when none is left.
    #[test]
    fn who_leaves_a_nic_has_another_way() {
        let (mut left, mut over) = (0, 0);
        for way in each() {
            for other in each() {
                for (other_usable, other_lost) in [(true, false), (false, false), (false, true)] {
                    let mut paths = [
                        Lead { way, is_usable: false, is_lost: false },
                        Lead { way: other, is_usable: other_usable, is_lost: other_lost },
                    ];
                    let led = is_led(paths.into_iter());
                    assert_eq!(led, other_usable && !other.is_down());
                    assert_eq!(is_left(paths[0].is_usable, paths.into_iter()), led);
                    assert!(!is_left(true, paths.into_iter()), "its NIC can be used");
                    let _ = paths[0].way.fail(Time::ZERO);
                    let cut_off = is_cut_off(paths.into_iter());
                    assert!(!(led && cut_off));
                    assert_eq!(cut_off, paths[0].way.is_down() && (other_lost || other.is_down()));
                    (left, over) = (left + u32::from(led), over + u32::from(cut_off));
                    paths[0].is_lost = true;
                    assert_eq!(is_cut_off(paths.into_iter()), other_lost || other.is_down());
                }
            }
        }
        assert_eq!((left, over), (28, 78));
    }

    #[test]
    fn rests_grow_and_begin_anew_after_it_has_worked() {
        let mut way = Way::opened(Time::ZERO);
        let mut now = Time::ZERO.after(REST_MAX);
        let mut rests = Vec::new();
        assert_eq!(way.fail(now), Failed::Broke);
        way.settled(now);
        for _ in 0..11 {
            rests.push(way.due().since(now).as_millis());
            now = way.due();
            way.open();
            assert_eq!(way.fail(now), Failed::Again);
        }
        assert_eq!(rests, [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
        // One that breaks at once goes on as before; one that has worked does not.
        for (worked, rest) in [(Duration::ZERO, REST_MAX), (REST_MAX, REST_MIN)] {
            now = way.due();
            let epoch = way.open();
            assert_eq!(way.answered(now, epoch, 1), Answered::Try);
            assert!(way.proven(now));
            now = now.after(worked);
            assert_eq!(way.fail(now), Failed::Broke);
            way.settled(now);
            assert_eq!(way.due().since(now), rest);
        }
        way.hurry(now);
        assert!(way.is_due(now));
    }
}
