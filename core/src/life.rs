//! How far a session over reliable queue pairs is, how long its peer is waited for, and what is told of its end.
//!
//! ```text
//!   we have called:            Open ── leave ──▶ Leaving: crate::parting says what is done, until it is over
//!                               ▲                   ▲
//!   we were called: Greeting ───┘ heard             │
//!                      └── leave, or not heard for GREETING
//! ```
//!
//! Until the one who has called says that it knows of the session, its queue pairs hear nothing, and the device repeats
//! what is said: so nothing is said but our answer, through the door, and a leave is given more time. Knows neither
//! door nor queue pairs.
//!
//! # Invariants
//!
//! 1. Whoever leaves does not come back.
//! 2. The peer is waited for until the earliest instant that any leave has named, and less than [`GREETED_GRACE`].
//! 3. Of several reasons the first is told; and none, if the engine itself wanted the end, before or after.
//! 4. Nobody is given up for its silence before all was read that had come by then ([`Greet::Overdue`]).
//!
//! The tests below run all short sequences of what can happen against a record of it.

use core::time::Duration;

use crate::datagram::Retry;
use crate::id::Time;
use crate::parting::{Parting, Standing, Step};
use crate::peer::DownReason;

/// How long the one who called may take to say that it has heard our answer.
pub const GREETING: Duration = Duration::from_secs(3);
/// How long a peer may take to hear that we leave.
pub const GRACE: Duration = Duration::from_millis(20);
/// The same for one that has not said that it knows of the session.
pub const GREETED_GRACE: Duration = Duration::from_millis(500);

/// Whether the peer is waited for when a session ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Notice {
    /// It is told, and given a moment to hear it.
    Told,
    /// It does not hear, or is to hear nothing more.
    Untold,
}

/// What can be said to the peer over the session's own queue pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Says {
    /// Nothing: it does not hear yet, or its queue pairs are cut.
    Nothing,
    /// Whatever there is.
    All,
    /// Only that it ends: of all else nothing is of interest now.
    Bye,
}

/// What is to be done about one who has called, and was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "nothing is done by itself"]
pub enum Greet {
    /// Nothing, now.
    Nothing,
    /// Our answer is to be sent again; it counts as sent.
    Say,
    /// Its time is over, and nothing was heard. Its word may have come, and not have been read yet, after a pause above all: all that has
    /// come is to be read, then [`Life::miss`].
    Overdue,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    Greeting { until: Time, retry: Retry },
    Open,
    Leaving { parting: Parting, reason: Option<DownReason> },
}

/// A session's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Life(Stage);

impl Life {
    /// Of one whom we have called, and who has answered.
    pub const OPEN: Self = Self(Stage::Open);

    /// Of one who has called us, and whom we have answered now.
    #[must_use]
    pub fn greeting(now: Time) -> Self {
        Self(Stage::Greeting { until: now.after(GREETING), retry: Retry::start(now) })
    }

    /// Something may be written, and asked for.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        matches!(self.0, Stage::Open)
    }

    /// We have answered, and nothing was heard since.
    #[must_use]
    pub const fn is_greeting(&self) -> bool {
        matches!(self.0, Stage::Greeting { .. })
    }

    /// It ends: nothing more is posted.
    #[must_use]
    pub const fn is_leaving(&self) -> bool {
        matches!(self.0, Stage::Leaving { .. })
    }

    /// Something has come over the session's own queue pairs.
    pub const fn hear(&mut self) {
        if self.is_greeting() {
            self.0 = Stage::Open;
        }
    }

    /// Whether our answer to the one who has called is to be sent again now, or nothing was heard of it for too long. `is_asked`: it was
    /// asked for.
    pub fn greet(&mut self, now: Time, is_asked: bool) -> Greet {
        match &mut self.0 {
            Stage::Greeting { until, .. } if now >= *until => Greet::Overdue,
            Stage::Greeting { retry, .. } => {
                let is_due = retry.is_due(now) || is_asked;
                if is_due { Greet::Say } else { Greet::Nothing }
            }
            Stage::Open | Stage::Leaving { .. } => Greet::Nothing,
        }
    }

    /// All was read that had come by `now`: who has not said in time that it has heard our answer is left.
    pub fn miss(&mut self, now: Time) {
        if let Stage::Greeting { until, .. } = self.0
            && now >= until
        {
            self.leave(now, Notice::Untold, Some(DownReason::NeverAnswered));
        }
    }

    /// It is to end. `reason` is what the engine is to be told; nothing, if it wanted that itself.
    pub fn leave(&mut self, now: Time, notice: Notice, reason: Option<DownReason>) {
        let grace = match notice {
            Notice::Untold => Duration::ZERO,
            Notice::Told if self.is_greeting() => GREETED_GRACE,
            Notice::Told => GRACE,
        };
        let patience = now.after(grace);
        match &mut self.0 {
            Stage::Leaving { parting, reason: first } => {
                parting.hurry(patience);
                *first = reason.and(*first);
            }
            stage => *stage = Stage::Leaving { parting: Parting::new(patience), reason },
        }
    }

    /// What is to be done now to end it, if it ends; see [`Parting::step`].
    pub fn step(&mut self, now: Time, standing: Standing) -> Option<Step> {
        match &mut self.0 {
            Stage::Leaving { parting, .. } => Some(parting.step(now, standing)),
            Stage::Greeting { .. } | Stage::Open => None,
        }
    }

    /// What can be said now.
    #[must_use]
    pub const fn says(&self) -> Says {
        match self.0 {
            Stage::Open => Says::All,
            Stage::Leaving { parting, .. } if parting.can_say() => Says::Bye,
            Stage::Greeting { .. } | Stage::Leaving { .. } => Says::Nothing,
        }
    }

    /// When there is something to be done at the latest, even if nothing happens; `open` says that of an open one.
    #[must_use]
    pub fn due(&self, now: Time, open: impl FnOnce() -> Time) -> Time {
        match self.0 {
            Stage::Greeting { until, retry } => until.min(retry.due()),
            Stage::Open => open(),
            Stage::Leaving { parting, .. } => parting.due(now),
        }
    }

    /// What the engine is to be told when it is over; `None` if nothing.
    #[must_use]
    pub const fn reason(&self) -> Option<DownReason> {
        match self.0 {
            Stage::Leaving { reason, .. } => reason,
            Stage::Greeting { .. } | Stage::Open => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    const REASONS: [Option<DownReason>; 3] =
        [None, Some(DownReason::Disconnected), Some(DownReason::Protocol)];

    #[derive(Debug, Clone, Copy)]
    enum Event {
        Heard,
        Leave(Notice, Option<DownReason>),
        /// So much later our answer is looked at; whether the peer's word lies there unread.
        Greet(Duration, bool),
    }

    fn events() -> Vec<Event> {
        let mut all = Vec::from([Event::Heard]);
        for reason in REASONS {
            all.extend([Notice::Told, Notice::Untold].map(|notice| Event::Leave(notice, reason)));
        }
        for later in [GRACE / 2, GREETING] {
            all.extend([false, true].map(|unread| Event::Greet(later, unread)));
        }
        all
    }

    /// What has happened to a session, and when.
    #[derive(Debug, Clone, Default)]
    struct Record {
        now: Time,
        is_called: bool,
        heard: bool,
        /// Until when the peer was to be waited for at most, and why.
        leaves: Vec<(Time, Option<DownReason>)>,
    }

    impl Record {
        fn greets(&self) -> bool {
            self.is_called && !self.heard && self.leaves.is_empty()
        }

        fn is_over(&self) -> bool {
            self.greets() && self.now >= Time::ZERO.after(GREETING)
        }

        fn add(&mut self, event: Event) {
            match event {
                Event::Heard => self.heard |= self.leaves.is_empty(),
                Event::Leave(notice, reason) => {
                    let grace = if self.greets() { GREETED_GRACE } else { GRACE };
                    let grace = if notice == Notice::Told { grace } else { Duration::ZERO };
                    self.leaves.push((self.now.after(grace), reason));
                }
                Event::Greet(later, unread) => {
                    self.now = self.now.after(later);
                    if self.is_over() && unread {
                        self.heard = true;
                    } else if self.is_over() {
                        self.leaves.push((self.now, Some(DownReason::NeverAnswered)));
                    }
                }
            }
        }

        /// Everything that can be asked of a life is as it was recorded.
        fn check(&self, life: Life) {
            let greets = self.greets();
            assert_eq!(life.is_greeting(), greets);
            assert_eq!(life.is_leaving(), !self.leaves.is_empty());
            assert_eq!(life.is_open(), !greets && self.leaves.is_empty());
            let standing = Standing { posted: 1, notes: 1, undrained: 0 };
            let Some(patience) = self.leaves.iter().map(|leave| leave.0).min() else {
                assert_eq!(life.says(), if greets { Says::Nothing } else { Says::All });
                assert_eq!(life.reason(), None);
                assert_eq!(life.clone().step(self.now, standing), None);
                let due = life.due(self.now, || Time::NEVER);
                assert_eq!(due <= Time::ZERO.after(GREETING), greets);
                return;
            };
            let wanted = self.leaves.iter().any(|leave| leave.1.is_none());
            assert_eq!(life.reason(), self.leaves[0].1.filter(|_| !wanted));
            // It is told, waited for until then, and not longer.
            let mut life = life;
            assert_eq!(life.says(), Says::Bye);
            assert_eq!(life.step(self.now, standing), Some(Step::CutPaths));
            let before = Time::from_nanos(patience.as_nanos().saturating_sub(1));
            if before < patience {
                assert_eq!(life.step(before, standing), Some(Step::Wait(patience)));
            }
            assert_eq!((life.says(), life.due(self.now, || self.now)), (Says::Bye, patience));
            assert_eq!(life.step(patience, standing), Some(Step::CutNotes));
            assert_eq!(life.says(), Says::Nothing);
        }
    }

    /// Both kinds of sessions, and all sequences of five events.
    #[test]
    fn every_end_is_as_it_was_asked_for() {
        let events = events();
        let (mut leaves, mut late) = ([0; 6], 0);
        for word in 0..2 * events.len().pow(5) {
            let mut record = Record { is_called: word % 2 == 1, ..Record::default() };
            let mut life = if record.is_called { Life::greeting(Time::ZERO) } else { Life::OPEN };
            for step in 0..5 {
                let event = events[word / 2 / events.len().pow(step) % events.len()];
                let greets = record.greets();
                let before = record.clone();
                record.add(event);
                match event {
                    Event::Heard => life.hear(),
                    Event::Leave(notice, reason) => life.leave(record.now, notice, reason),
                    Event::Greet(_, unread) => {
                        let is_asked = word % 3 == 0;
                        let greet = life.greet(record.now, is_asked);
                        let is_over = Record { now: record.now, ..before }.is_over();
                        assert_eq!(greet == Greet::Overdue, is_over);
                        if is_over {
                            assert!(life.is_greeting(), "what has come was not read");
                            late += 1;
                        }
                        if is_over && unread {
                            life.hear();
                        }
                        life.miss(record.now);
                        let said = greet == Greet::Say;
                        assert!(!said || greets);
                        assert!(said || !record.greets() || !is_asked, "it was asked for");
                    }
                }
                record.check(life);
            }
            leaves[record.leaves.len()] += 1;
        }
        assert!(leaves.iter().all(|count| *count > 100) && late > 100, "{leaves:?} {late}");
    }

    /// Our answer is repeated, later each time, as long as it may be heard.
    #[test]
    fn who_does_not_answer_is_greeted_until_it_is_given_up() {
        let mut life = Life::greeting(Time::ZERO);
        let (mut now, mut said) = (Time::ZERO, 0);
        while life.is_greeting() {
            now = life.due(now, || Time::NEVER);
            said += usize::from(life.greet(now, false) == Greet::Say);
            life.miss(now);
        }
        assert_eq!((now, said), (Time::ZERO.after(GREETING), 6));
        assert_eq!(life.reason(), Some(DownReason::NeverAnswered));
    }
}
