//! How long nothing may be heard of one who is called, until nobody is believed to be there.
//!
//! Knows neither who is called nor what is said. Time comes in with each look.
//!
//! # Invariants
//!
//! 1. It is over when as much time as it was begun with has been used up, and no sooner.
//! 2. Time in which we did not look uses up no more than [`BLINK`] for each look ([`Patience::look`]): an answer may have lain there unread, or is
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
}

impl Patience {
    /// It begins now.
    #[must_use]
    pub fn start(now: Time, limit: Duration) -> Self {
        Self { began: now, until: now.after(limit) }
    }

    /// We look again, for the first time since `before`, or since we were to be woken then, if we slept: to be called before anything is decided
    /// by the time that it is now.
    pub fn look(&mut self, before: Time, now: Time) {
        let gap = now.since(before.max(self.began));
        self.until = self.until.after(gap.saturating_sub(BLINK));
    }

    /// When it is over.
    #[must_use]
    pub const fn due(&self) -> Time {
        self.until
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
        /// Something is heard, before we look.
        Start,
    }

    const LIMIT: Duration = Duration::from_millis(50);
    const ACTS: [Act; 3] = [Act::Nothing, Act::Sleep, Act::Start];
    const GAPS: [u64; 4] = [0, 10, 20, 200];
    const STEPS: u32 = 5;

    #[test]
    fn it_is_used_up_while_we_look() {
        const KINDS: usize = ACTS.len() * GAPS.len();
        let (mut over, mut spared) = (0, 0);
        for word in 0..KINDS.pow(STEPS) {
            let (mut now, mut used) = (Time::ZERO, Duration::ZERO);
            let mut patience = Patience::start(now, LIMIT);
            let mut began = now;
            for step in 0..STEPS {
                let kind = word / KINDS.pow(step) % KINDS;
                let (act, gap) = (ACTS[kind / 4], Duration::from_millis(GAPS[kind % 4]));
                let before = if act == Act::Sleep { now.after(gap) } else { now };
                now = now.after(gap);
                if act == Act::Start {
                    (patience, used, began) = (Patience::start(now, LIMIT), Duration::ZERO, now);
                }
                patience.look(before, now);
                used += match act {
                    Act::Start => Duration::ZERO,
                    Act::Sleep => gap,
                    Act::Nothing => gap.min(BLINK),
                };
                let is_over = now >= patience.due();
                assert_eq!(is_over, used >= LIMIT, "{word} at step {step}");
                over += u32::from(is_over);
                spared += u32::from(!is_over && now.since(began) >= LIMIT);
            }
        }
        assert!(over > 10_000 && spared > 10_000, "{over} {spared}");
    }
}
