//! How long nothing may be heard of one who is called, until nobody is believed to be there.
//!
//! Knows neither who is called nor what is said. Time comes in with each look.
//!
//! # Invariants
//!
//! 1. It is over when as much time as it was begun with has been used up, and no sooner.
//! 2. While what is to be said waits for something of ours ([`Patience::wait`]), nothing is used up: nobody answers what could not be said.
//! 3. Time in which we did not look uses up no more than [`BLINK`] for each look ([`Patience::look`]): an answer may have lain there unread, or is
//!    still on its way because we have only now said what it is to.
//!
//! The tests below run all short sequences against a record of what was used up.

use core::time::Duration;

use crate::id::Time;

/// What passes between two looks uses up so much at most, but for time in which we slept, and would have been woken.
pub const BLINK: Duration = Duration::from_millis(20);

/// What is left of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Patience {
    began: Time,
    until: Time,
    /// Since when it is not used up.
    waits: Option<Time>,
}

impl Patience {
    /// It begins now.
    #[must_use]
    pub fn start(now: Time, limit: Duration) -> Self {
        Self { began: now, until: now.after(limit), waits: None }
    }

    /// Whether what is to be said waits, from now on.
    pub fn wait(&mut self, now: Time, waits: bool) {
        if waits {
            self.waits.get_or_insert(now);
        } else if let Some(since) = self.waits.take() {
            self.until = self.until.after(now.since(since));
        }
    }

    /// Whether nothing can be said for now.
    #[must_use]
    pub const fn is_waiting(&self) -> bool {
        self.waits.is_some()
    }

    /// We look again, for the first time since `before`, or since we were to be woken then, if we slept: to be called before anything is decided
    /// by the time that it is now.
    pub fn look(&mut self, before: Time, now: Time) {
        if !self.is_waiting() {
            let gap = now.since(before.max(self.began));
            self.until = self.until.after(gap.saturating_sub(BLINK));
        }
    }

    /// When it is over; [`Time::NEVER`] while nothing can be said.
    #[must_use]
    pub const fn due(&self) -> Time {
        if self.is_waiting() { Time::NEVER } else { self.until }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What happens in a step, after a time that is short, or long.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Act {
        Nothing,
        /// That time we sleep.
        Sleep,
        /// What is to be said waits, or is said.
        Wait(bool),
        /// Something is heard, before we look.
        Start,
    }

    const LIMIT: Duration = Duration::from_millis(50);
    const ACTS: [Act; 5] =
        [Act::Nothing, Act::Sleep, Act::Wait(true), Act::Wait(false), Act::Start];
    const GAPS: [u64; 4] = [0, 10, 20, 200];

    #[test]
    fn it_is_used_up_while_something_was_said_and_we_look() {
        const KINDS: usize = ACTS.len() * GAPS.len();
        let mut over = 0;
        for word in 0..KINDS.pow(4) {
            let (mut now, mut waits, mut used) = (Time::ZERO, false, Duration::ZERO);
            let mut patience = Patience::start(now, LIMIT);
            for step in 0..4 {
                let kind = word / KINDS.pow(step) % KINDS;
                let (act, gap) = (ACTS[kind / 4], Duration::from_millis(GAPS[kind % 4]));
                let before = if act == Act::Sleep { now.after(gap) } else { now };
                now = now.after(gap);
                if act == Act::Start {
                    (patience, waits, used) = (Patience::start(now, LIMIT), false, Duration::ZERO);
                }
                patience.look(before, now);
                used += match act {
                    _ if waits => Duration::ZERO,
                    Act::Start => Duration::ZERO,
                    Act::Sleep => gap,
                    Act::Nothing | Act::Wait(_) => gap.min(BLINK),
                };
                let is_over = now >= patience.due();
                assert_eq!(is_over, !waits && used >= LIMIT, "{word} at step {step}");
                over += u32::from(is_over);
                if let Act::Wait(now_waits) = act {
                    waits = now_waits;
                    patience.wait(now, waits);
                }
                assert_eq!(patience.is_waiting(), waits);
            }
        }
        assert!(over > 0);
    }
}
