//! Whose endpoints a peer may say are its own, where a device tells who wrote by the endpoint alone.
//!
//! Such a device (EFA) carries no word of the session with an immediate: what comes from an endpoint is of whoever has said that it is its own. So
//! no two may have said so. An engine that comes back has the endpoints that it had, and what it wrote in its earlier session may lie
//! unread, or still be on its way: that session is to end first, with all that it waits for. Whoever calls says so again, so it is told nothing
//! until then.
//!
//! ```text
//!   nobody has them ─────────────────────────────────────────────▶ Granted
//!   an earlier session of its has, and leaves ───────────────────▶ Later
//!   … and does not: its farewell is late ── FAREWELL is over ────▶ Granted, if the call counts: the caller has lost that session
//!   somebody else has ───────────────────────────────────────────▶ Never
//! ```
//!
//! A call alone ends no session here: it may be an old one that comes late. Whether it counts is for [`crate::calls`] to say.
//!
//! Knows no addresses: whether two have an endpoint in common comes in as an argument.
//!
//! # Invariants
//!
//! 1. Nobody is granted what a session of another engine's has.
//! 2. Nobody is granted what a session has that leaves.
//! 3. A farewell is waited for no longer than [`FAREWELL`].
//!
//! The test enumerates up to two sessions.

use core::time::Duration;

use crate::id::{EngineId, Time};

/// How long the farewell of an earlier session may take to come, once its engine calls again: a network without order may bring the call first.
pub const FAREWELL: Duration = Duration::from_secs(1);

/// After so long without a call, the next is a new one, and its farewell may take its time.
const PAUSE: Duration = Duration::from_secs(3);

/// An engine calls again that there is a session with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Recall {
    since: Time,
    last: Time,
}

impl Recall {
    /// It calls, after `before` if that was not for the first time.
    #[must_use]
    pub fn heard(before: Option<Self>, now: Time) -> Self {
        let goes_on = before.filter(|it| now.since(it.last) < PAUSE);
        Self { since: goes_on.map_or(now, |it| it.since), last: now }
    }

    fn is_over(self, now: Time) -> bool {
        now.since(self.since) >= FAREWELL
    }
}

/// A session that has one of the endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Holder {
    /// Whose it is.
    pub engine: EngineId,
    /// It ends.
    pub is_leaving: bool,
    /// Whether its engine calls again.
    pub recalled: Option<Recall>,
}

/// What is said to one who claims endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// They are its own.
    Granted,
    /// Nothing, for now: it is to ask again.
    Later,
    /// They are another's.
    Never,
}

/// What is said to `claimant`, `holders` being the sessions that have one of the endpoints it names. O(holders).
#[must_use]
pub fn judge(now: Time, claimant: EngineId, holders: impl Iterator<Item = Holder>) -> Origin {
    holders.fold(Origin::Granted, |so_far, holder| {
        let waits = holder.is_leaving || !holder.recalled.is_some_and(|it| it.is_over(now));
        match so_far {
            Origin::Never => Origin::Never,
            _ if holder.engine != claimant => Origin::Never,
            _ if waits => Origin::Later,
            so_far => so_far,
        }
    })
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    #[test]
    fn endpoints_are_of_one_session_at_a_time() {
        let now = Time::ZERO.after(FAREWELL * 3);
        let (mine, other) = (EngineId(1), EngineId(2));
        let long_ago =
            Time::from_nanos(now.as_nanos() - u64::try_from(FAREWELL.as_nanos()).unwrap());
        let soon_ago = Time::from_nanos(long_ago.as_nanos() + 1);
        let mut all = Vec::from([None]);
        for engine in [mine, other] {
            for is_leaving in [false, true] {
                let recalls =
                    [now, soon_ago, long_ago].map(|since| Some(Recall { since, last: now }));
                for recalled in recalls.into_iter().chain([None]) {
                    all.push(Some(Holder { engine, is_leaving, recalled }));
                }
            }
        }
        let mut seen = [0; 3];
        for (one, two) in all.iter().flat_map(|one| all.iter().map(move |two| (*one, *two))) {
            let holders = [one, two];
            let holders = holders.iter().flatten();
            let said = judge(now, mine, holders.clone().copied());
            let foreign = holders.clone().any(|it| it.engine == other);
            let lost =
                |it: &Holder| !it.is_leaving && it.recalled.is_some_and(|it| it.since == long_ago);
            let expected = match (foreign, holders.clone().all(lost)) {
                (true, _) => Origin::Never,
                (false, true) => Origin::Granted,
                (false, false) => Origin::Later,
            };
            assert_eq!(said, expected, "{one:?} {two:?}");
            seen[said as usize] += 1;
        }
        assert!(seen.iter().all(|count| *count > 3), "{seen:?}");
    }

    #[test]
    fn a_call_that_came_alone_takes_no_patience_of_a_later_one() {
        let at = |millis: u64| Time::from_nanos(millis * 1_000_000);
        let first = Recall::heard(None, at(100));
        assert!(!first.is_over(at(1099)) && first.is_over(at(1100)));
        let again = Recall::heard(Some(first), at(1100));
        assert!(again.is_over(at(1100)));
        let later = Recall::heard(Some(again), at(4100));
        assert!(!later.is_over(at(5099)) && later.is_over(at(5100)));
    }
}
