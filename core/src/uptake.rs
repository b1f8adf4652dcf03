//! Whether a transport takes what is posted for a peer, over one pair of NICs.
//!
//! libfabric's `tcp` says that it is busy while it connects, and says no more than that when nobody is there to connect to. Nothing is in flight
//! then, and so nothing fails: that it goes on is all there is to see. It is seen for each pair of NICs by itself: what another pair takes
//! says nothing of this one. And only as long as somebody asks: a refusal that nobody has heard again is over, as its piece may have been
//! given up.
//!
//! # Invariants
//!
//! 1. A pair is stuck only if it was refused now and again for longer than the limit, without [`PAUSE`] between two refusals.
//! 2. It is not after something was taken, or seen to be in flight, until it was refused for as long again.
//! 3. Nor while something else is in flight to the peer of which nothing ends.
//!
//! The test runs all short sequences against the whole history.

use core::time::Duration;

use crate::id::Time;

/// Who asks no more for so long has given up what it had to post.
pub const PAUSE: Duration = Duration::from_secs(1);

/// How long nothing has been taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Refusals(Option<Span>);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Span {
    first: Time,
    last: Time,
}

impl Refusals {
    /// Something was not taken.
    pub fn refused(&mut self, now: Time) {
        let goes_on = self.0.filter(|it| now.since(it.last) < PAUSE);
        self.0 = Some(Span { first: goes_on.map_or(now, |it| it.first), last: now });
    }

    /// Something was taken, or is in flight.
    #[inline]
    pub const fn taken(&mut self) {
        self.0 = None;
    }

    /// Something else is in flight to the peer, of which something ended last at `ended`, if ever: as long as nothing has since the first refusal, the
    /// peer may be standing still, which is for whoever listens to it to say. Then what was refused so far counts no more.
    pub fn while_others_wait(&mut self, ended: Option<Time>) {
        if let Some(span) = &mut self.0
            && ended.is_none_or(|ended| ended < span.first)
        {
            span.first = span.last;
        }
    }

    /// Whether the last that was seen is a refusal, not long ago.
    #[must_use]
    pub fn are_there(self, now: Time) -> bool {
        self.0.is_some_and(|it| now.since(it.last) < PAUSE)
    }

    /// Whether nothing has been taken for longer than `limit`, though somebody asks.
    #[must_use]
    pub fn last_longer_than(self, limit: Duration, now: Time) -> bool {
        self.are_there(now) && self.0.is_some_and(|it| now.since(it.first) > limit)
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(2);

    /// A peer that stands still takes nothing, and ends nothing that is in flight to it.
    #[test]
    fn a_pair_is_not_stuck_while_its_peer_stands_still() {
        let at = |step: u64| Time::from_nanos(step * 450_000_000);
        // Something else ends in that step, or never, and none is in flight from that step on.
        for ends in (0..20).map(Some).chain([None]) {
            for idle_from in [0, 10, 40] {
                let mut refusals = Refusals::default();
                let stuck = (0..40).find(|&step| {
                    refusals.refused(at(step));
                    if step < idle_from {
                        refusals.while_others_wait(ends.filter(|&end| end <= step).map(at));
                    }
                    refusals.last_longer_than(LIMIT, at(step))
                });
                // From the last refusal on before something ended, or nothing was in flight any more.
                let begins = ends.unwrap_or(40).min(idle_from).saturating_sub(1);
                assert_eq!(stuck, (begins + 5 < 40).then_some(begins + 5), "{ends:?} {idle_from}");
            }
        }
    }

    /// Seven steps of 450 ms, in each of which something is taken, something is refused, or nobody asks.
    #[test]
    fn a_pair_is_stuck_if_it_is_refused_all_the_time() {
        let mut stuck_ends = 0;
        for plan in 0..3_u32.pow(7) {
            let mut refusals = Refusals::default();
            let mut history = Vec::new();
            for step in 0..7_u32 {
                let now = Time::from_nanos(u64::from(step) * 450_000_000);
                match plan / 3_u32.pow(step) % 3 {
                    0 => refusals.taken(),
                    1 => refusals.refused(now),
                    _ => {}
                }
                history.push(plan / 3_u32.pow(step) % 3);
                // The refusals up to now, backwards, as far as no two are a pause apart and nothing was taken.
                let (mut first, mut last) = (None, None);
                for at in (0..=step).rev() {
                    match history[at as usize] {
                        0 => break,
                        1 if first.is_some_and(|first: u32| first - at >= 3) => break,
                        1 => {
                            last = last.or(Some(at));
                            first = Some(at);
                        }
                        _ => {}
                    }
                }
                let recent = last.is_some_and(|last| step - last < 3);
                let expected = recent && first.is_some_and(|first| step - first > 4);
                assert_eq!(refusals.are_there(now), recent, "{history:?}");
                assert_eq!(refusals.last_longer_than(LIMIT, now), expected, "{history:?}");
                stuck_ends += u32::from(expected);
            }
        }
        assert!(stuck_ends > 20, "{stuck_ends}");
    }
}
