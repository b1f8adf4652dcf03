//! How a session over reliable queue pairs ends: who is told, what is cut, and when all of it is over.
//!
//! ```text
//!   Fresh ── cut the paths, say Bye ──▶ Told ── the peer has it, or patience is over: cut the lines ──▶ Cut ──▶ over
//! ```
//!
//! A queue pair that is cut flushes: each request that was posted completes. What it had received before may still be
//! on its way to the completion queue; devices say when that is over (*drained*), but for software ones, which are
//! given [`DRAIN`]. Whatever is not flushed [`FLUSH`] after the cut, by a device that is lost, ends with its queue
//! pair. Knows no queue pair: what there is to be done comes out, what has become of it comes in.
//!
//! # Invariants
//!
//! 1. The paths are cut first and once, the lines, queue pairs for notes, after them and once.
//! 2. It is over when all that was posted is reported and all that was received is read; else [`FLUSH`] after the cut.
//! 3. It is over at the latest [`FLUSH`] after the patience; until then there is always an instant to wait for.
//!
//! The tests below run all orders of what can happen.

use core::time::Duration;

use crate::id::Time;

/// How long a device that does not say when it has drained may take for it.
pub const DRAIN: Duration = Duration::from_millis(20);
/// How long one is waited for that was waited for in vain before: long enough to hear what it has said by then.
pub const SILENT: Duration = Duration::from_micros(100);
/// How long what was posted may take to complete as flushed.
pub const FLUSH: Duration = Duration::from_millis(500);

/// Whether a device says when a queue pair has drained, as far as is known. Who destroys one before it has may lose what it has taken from a
/// shared receive queue and not reported: so that is waited for, for long only with a device that says so or may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Draining {
    is_silent: bool,
}

impl Draining {
    /// How long to wait for it to say so of a queue pair that is cut.
    #[must_use]
    pub const fn patience(self) -> Duration {
        if self.is_silent { SILENT } else { DRAIN }
    }

    /// It has said so of one.
    pub const fn hear(&mut self) {
        self.is_silent = false;
    }

    /// It was waited for as long, and has not.
    pub const fn miss(&mut self) {
        self.is_silent = true;
    }
}

/// What of a session has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Standing {
    /// Writes and notes that are posted, and have not been reported.
    pub posted: usize,
    /// Notes among them.
    pub notes: usize,
    /// Queue pairs that have not been seen to be drained.
    pub undrained: usize,
}

/// What is to be done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Cut all queue pairs but the lines, and say over one of these that it is over. Then ask again.
    CutPaths,
    /// Cut these, too. Then ask again.
    CutNotes,
    /// Nothing, until something ends, or then.
    Wait(Time),
    /// Destroy what is left: nothing of it is under way any more, or never will be reported.
    Over,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Stage {
    Fresh,
    Told,
    Cut(Time),
}

/// A session that ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Parting {
    patience: Time,
    stage: Stage,
}

impl Parting {
    /// It is to end; the peer may take until `patience` to hear of it.
    #[must_use]
    pub const fn new(patience: Time) -> Self {
        Self { patience, stage: Stage::Fresh }
    }

    /// The peer may take until `patience` at most.
    pub fn hurry(&mut self, patience: Time) {
        self.patience = self.patience.min(patience);
    }

    /// Whether notes can still be said.
    #[must_use]
    pub const fn can_say(&self) -> bool {
        !matches!(self.stage, Stage::Cut(_))
    }

    /// What is to be done now. What it says to cut counts as cut.
    pub fn step(&mut self, now: Time, standing: Standing) -> Step {
        match self.stage {
            Stage::Fresh => {
                self.stage = Stage::Told;
                Step::CutPaths
            }
            Stage::Told if standing.notes == 0 || now >= self.patience => {
                self.stage = Stage::Cut(now);
                Step::CutNotes
            }
            Stage::Told => Step::Wait(self.patience),
            Stage::Cut(since) => {
                let (drained, flushed) = (since.after(DRAIN), since.after(FLUSH));
                let reported = standing.posted == 0;
                if now >= flushed || (reported && (standing.undrained == 0 || now >= drained)) {
                    Step::Over
                } else if reported {
                    Step::Wait(drained)
                } else {
                    Step::Wait(flushed)
                }
            }
        }
    }

    /// When it is to be asked again, at the latest, if nothing ends before.
    #[must_use]
    pub fn due(&self, now: Time) -> Time {
        match self.stage {
            Stage::Fresh => now,
            Stage::Told => self.patience,
            Stage::Cut(since) if now < since.after(DRAIN) => since.after(DRAIN),
            Stage::Cut(since) => since.after(FLUSH),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::vec::Vec;

    use super::*;

    const PATIENCE: u64 = 20;

    #[test]
    fn a_device_that_does_not_say_so_is_waited_for_once_and_then_hardly_until_it_does() {
        let mut device = Draining::default();
        assert_eq!(device.patience(), DRAIN);
        device.miss();
        assert_eq!(device.patience(), SILENT);
        device.hear();
        assert_eq!(device.patience(), DRAIN);
    }

    fn millis(millis: u64) -> Time {
        Time::from_nanos(millis * 1_000_000)
    }

    /// A session as the platform has it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    struct World {
        now: u64,
        stage: Stage,
        writes: usize,
        notes: usize,
        undrained: usize,
        cut: [bool; 2],
    }

    impl World {
        const fn standing(&self) -> Standing {
            let Self { writes, notes, undrained, .. } = *self;
            Standing { posted: writes + notes, notes, undrained }
        }
    }

    /// Up to two writes, two notes and two queue pairs, which end in any order, or never, while time passes in steps
    /// from instant to instant that matters.
    #[test]
    fn every_session_ends_when_it_should() {
        let (mut seen, mut open, mut ends) = (BTreeSet::new(), Vec::new(), [0; 3]);
        for count in 0..27 {
            let (writes, notes, undrained) = (count % 3, count / 3 % 3, count / 9);
            let stage = Parting::new(millis(PATIENCE)).stage;
            open.push(World { now: 0, stage, writes, notes, undrained, cut: [false; 2] });
        }
        while let Some(world) = open.pop() {
            if !seen.insert(world) {
                continue;
            }
            let mut parting = Parting { patience: millis(PATIENCE), stage: world.stage };
            let due = parting.due(millis(world.now));
            let step = parting.step(millis(world.now), world.standing());
            let mut next = World { stage: parting.stage, ..world };
            match step {
                Step::CutPaths => {
                    assert_eq!(world.cut, [false, false]);
                    // Saying that it is over is one more note.
                    (next.cut[0], next.notes) = (true, world.notes + 1);
                    open.push(next);
                    continue;
                }
                Step::CutNotes => {
                    assert_eq!(world.cut, [true, false]);
                    assert!(world.notes == 0 || world.now >= PATIENCE);
                    next.cut[1] = true;
                    open.push(next);
                    continue;
                }
                Step::Over => {
                    let Stage::Cut(since) = world.stage else { panic!("{world:?}") };
                    let waited = millis(world.now).since(since);
                    let clean = world.writes + world.notes == 0;
                    match (clean, world.undrained) {
                        (true, 0) => ends[0] += 1,
                        (true, _) if waited >= DRAIN => ends[1] += 1,
                        _ => {
                            assert!(waited >= FLUSH, "{world:?}");
                            ends[2] += 1;
                        }
                    }
                    assert!(millis(world.now) <= millis(PATIENCE).after(FLUSH), "{world:?}");
                    continue;
                }
                Step::Wait(until) => {
                    assert!(until > millis(world.now), "{world:?}: busy waiting");
                    assert!(due <= until && due > millis(world.now), "{world:?}: overslept");
                }
            }
            // Something ends; of what is cut all can, of the rest what is said and written.
            if world.writes > 0 {
                open.push(World { writes: world.writes - 1, ..next });
            }
            if world.notes > 0 {
                open.push(World { notes: world.notes - 1, ..next });
            }
            if world.undrained > 0 && world.cut[0] {
                open.push(World { undrained: world.undrained - 1, ..next });
            }
            // Or nothing does, until it is looked at again.
            let now = due.as_nanos().div_ceil(1_000_000);
            for now in [world.now + 1, now] {
                if now <= PATIENCE + 3 || now == due.as_nanos() / 1_000_000 {
                    open.push(World { now, ..next });
                }
            }
        }
        assert!(ends.iter().all(|count| *count > 20), "{ends:?}");
        assert!(seen.len() > 1000, "{}", seen.len());
    }

    #[test]
    fn who_is_in_a_hurry_waits_for_nobody() {
        let mut parting = Parting::new(millis(20));
        parting.hurry(millis(5));
        parting.hurry(millis(9));
        let standing = Standing { posted: 1, notes: 1, undrained: 0 };
        assert_eq!(parting.step(millis(1), standing), Step::CutPaths);
        assert!(parting.can_say());
        assert_eq!(parting.step(millis(1), standing), Step::Wait(millis(5)));
        assert_eq!(parting.step(millis(5), standing), Step::CutNotes);
        assert!(!parting.can_say());
    }
}
