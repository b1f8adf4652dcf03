//! How an endpoint that serves everybody is replaced, to be rid of one peer.
//!
//! On a connectionless transport nothing in flight to one peer can be taken back by itself: only closing
//! the endpoint ends it, and that would end everybody's. So a second endpoint is opened beside the first;
//! the other peers are asked to move to it, one by one, while the first still serves them; and when only
//! what is to be got rid of is left on the first, it is closed.
//!
//! ```text
//!   us                                          a peer that is well
//!    open the new endpoint
//!    Move { epoch, addresses } ───────────────▶  posts nothing more to the old one,
//!    posts on the old one still                   lets what is in flight complete,
//!    posts on the new one now  ◀───────────────  Moved { epoch }; posts to the new one
//!    … what is in flight on the old one completes
//!
//!   all moved, nothing of theirs left on the old one ──▶ close it; the rest of it has ended
//!   some not moved in time ──▶ these are got rid of, too
//! ```
//!
//! # Invariants
//!
//! 1. An endpoint is closed only when no peer that is well has anything in flight on it, in either
//!    direction: what closing cuts off is of peers that are given up.
//! 2. A replacement ends within the patience that it was begun with: whoever is not over by then is given
//!    up, and [`Recycle::verdict`] then says [`Verdict::Close`].
//! 3. Only time in which we looked ([`Recycle::look`]) uses up patience: while our own thread does not run, the
//!    answer of a peer that is well may lie there unread.
//! 4. An answer to an earlier replacement does not count for this one.
//! 5. Who was told of one endpoint, and then of another, and does not say which it heard of, knows neither until it
//!    has answered ([`Told`]).
//!
//! The tests below enumerate three peers, and every order in which they answer, drain, fail or are late, and in
//! which we look in time or do not.

use core::time::Duration;

use crate::id::Time;

/// The replacements of an engine's endpoints, counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Turn(pub u32);

impl Turn {
    /// Whether it is a later one than `other`. They are counted round and round.
    #[must_use]
    pub const fn is_after(self, other: Self) -> bool {
        let ahead = self.0.wrapping_sub(other.0);
        ahead != 0 && ahead < 1 << 31
    }
}

/// What a peer may have been told: the same thing was said to it several times, it has heard any one of them, and the
/// endpoint may have been another each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Told {
    first_and_last: Option<(Turn, Turn)>,
}

impl Told {
    /// It was told of this endpoint, or may have been: the present one, so that none is older than the last.
    pub fn say(&mut self, turn: Turn) {
        let first = self.first_and_last.map_or(turn, |(first, _)| first);
        self.first_and_last = Some((first, turn));
    }

    /// The endpoint that it knows, whatever it has heard.
    #[must_use]
    pub fn surely(&self) -> Option<Turn> {
        self.first_and_last.filter(|(first, last)| first == last).map(|(first, _)| first)
    }
}

/// How far one peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Standing {
    /// It is not given up; or it leaves, and what it had sent is still waited for.
    pub well: bool,
    /// The last replacement that it has answered.
    pub moved: Turn,
    /// Pieces of ours in flight to it on the endpoint that is to be closed.
    pub in_flight: u32,
}

/// One of the endpoints that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Which {
    /// What is written with.
    Present,
    /// What is being replaced.
    Old,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// No endpoint is being replaced.
    Idle,
    /// Wait, and look again at this instant at the latest.
    Wait(Time),
    /// Give up those for whom [`Recycle::is_late`] says so, and ask again.
    GiveUp,
    /// Close the old endpoint, then call [`Recycle::closed`].
    Close,
}

/// The state of a replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Recycle {
    turn: Turn,
    under_way: Option<UnderWay>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct UnderWay {
    patience: Duration,
    looked: Time,
}

/// What passes between two looks uses up so much patience at most. A thread that polls, or is woken by what
/// comes, looks more often; if it did not, it was not run.
pub const BLINK: Duration = Duration::from_millis(5);

impl Recycle {
    /// The present endpoint's number.
    #[must_use]
    pub const fn turn(&self) -> Turn {
        self.turn
    }

    /// The endpoint of this number, if there is one.
    #[must_use]
    pub fn which(&self, turn: Turn) -> Option<Which> {
        let old = Turn(self.turn.0.wrapping_sub(1));
        match turn {
            turn if turn == self.turn => Some(Which::Present),
            turn if turn == old && self.is_under_way() => Some(Which::Old),
            _ => None,
        }
    }

    /// The number of no endpoint that there is, or will be for long: what a peer has moved to of which nobody knows where
    /// it is.
    #[must_use]
    pub const fn nowhere(&self) -> Turn {
        Turn(self.turn.0.wrapping_sub(2))
    }

    /// Whether one is under way.
    #[must_use]
    pub const fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Begins to replace the endpoint; `None` while that is under way already. The new endpoint's number
    /// is to be sent to all peers that are well.
    pub fn begin(&mut self, now: Time, patience: Duration) -> Option<Turn> {
        if self.is_under_way() {
            return None;
        }
        self.turn.0 = self.turn.0.wrapping_add(1);
        self.under_way = Some(UnderWay { patience, looked: now });
        Some(self.turn)
    }

    /// To be called whenever what has come is about to be seen to.
    pub fn look(&mut self, now: Time) {
        if let Some(it) = &mut self.under_way {
            it.patience = it.patience.saturating_sub(now.since(it.looked).min(BLINK));
            it.looked = it.looked.max(now);
        }
    }

    /// Whether an answer is to this replacement, or to the last.
    #[must_use]
    pub fn is_current(&self, answered: Turn) -> bool {
        answered == self.turn
    }

    /// Whether the peer keeps the old endpoint open.
    #[must_use]
    pub fn is_late(&self, peer: Standing) -> bool {
        peer.well && (peer.moved != self.turn || peer.in_flight > 0)
    }

    /// What is to be done, `peers` being all there are. O(peers).
    #[must_use]
    pub fn verdict(&self, mut peers: impl Iterator<Item = Standing>) -> Verdict {
        match self.under_way {
            None => Verdict::Idle,
            Some(_) if !peers.any(|peer| self.is_late(peer)) => Verdict::Close,
            Some(UnderWay { patience: Duration::ZERO, .. }) => Verdict::GiveUp,
            Some(UnderWay { patience, looked }) => Verdict::Wait(looked.after(patience.min(BLINK))),
        }
    }

    /// The old endpoint is closed.
    pub const fn closed(&mut self) {
        self.under_way = None;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::vec::Vec;

    use super::*;

    /// Not a multiple of what a look may use up.
    const PATIENCE: Duration = Duration::from_millis(12);
    const LOOKS: u32 = 3;

    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct World {
        recycle: Recycle,
        now: Time,
        looks: u32,
        peers: [Standing; 3],
        /// What is on its way to us.
        answers: [Option<Turn>; 3],
    }

    impl World {
        fn verdict(&self) -> Verdict {
            self.recycle.verdict(self.peers.into_iter())
        }

        /// Everything that can happen next.
        fn next(&self) -> Vec<Self> {
            let mut all = Vec::new();
            let mut step = |change: &dyn Fn(&mut Self)| {
                let mut world = self.clone();
                change(&mut world);
                all.push(world);
            };
            for at in 0..3 {
                let peer = self.peers[at];
                if peer.in_flight > 0 {
                    step(&|world| world.peers[at].in_flight -= 1);
                }
                if peer.well {
                    step(&|world| world.peers[at].well = false);
                }
                if self.answers[at].is_none() && peer.well && self.recycle.is_under_way() {
                    step(&|world| world.answers[at] = Some(world.recycle.turn()));
                }
                if let Some(turn) = self.answers[at] {
                    step(&|world| {
                        world.answers[at] = None;
                        if world.recycle.is_current(turn) {
                            world.peers[at].moved = turn;
                        }
                    });
                }
            }
            // In time, and after a time in which we were not run.
            for late in [Duration::ZERO, Duration::from_secs(9)] {
                step(&|world| {
                    world.now = world.now.after(BLINK + late);
                    world.recycle.look(world.now);
                    world.looks += 1;
                });
            }
            all
        }
    }

    #[test]
    fn turns_follow_each_other_round_and_round() {
        for turn in [0, 1, 2, (1 << 31) - 1, 1 << 31, u32::MAX - 1, u32::MAX] {
            let after = |ahead: u32| Turn(turn.wrapping_add(ahead));
            assert!(!after(0).is_after(Turn(turn)));
            for ahead in [1, 2, 77, (1 << 31) - 1] {
                assert!(after(ahead).is_after(Turn(turn)), "{turn} and {ahead} more");
                assert!(!Turn(turn).is_after(after(ahead)), "{turn} and {ahead} more");
            }
        }
    }

    /// Every order of saying, replacing and closing: an endpoint is taken to be known only if it is the one that was named
    /// each time; and who knows none is taken for late, and stays so until it answers.
    #[test]
    fn who_was_told_of_several_endpoints_is_written_to_from_none() {
        const STEPS: u32 = 7;
        let (mut surely, mut unknown, mut old) = (0, 0, 0);
        // From where they are counted round, too.
        for (start, history) in
            [0, u32::MAX - 1].into_iter().flat_map(|it| (0..3_u32.pow(STEPS)).map(move |n| (it, n)))
        {
            let mut recycle = Recycle { turn: Turn(start), under_way: None };
            let (mut told, mut said) = (Told::default(), HashSet::new());
            for step in 0..STEPS {
                match history / 3_u32.pow(step) % 3 {
                    0 => {
                        told.say(recycle.turn());
                        said.insert(recycle.turn());
                    }
                    1 => _ = recycle.begin(Time::ZERO, PATIENCE),
                    _ => recycle.closed(),
                }
                let moved = told.surely().unwrap_or(recycle.nowhere());
                match recycle.which(moved) {
                    Some(which) => {
                        assert_eq!(said, HashSet::from([moved]), "{history}");
                        old += u32::from(which == Which::Old);
                    }
                    None if said.len() == 1 => {
                        assert_eq!((told.surely(), said.contains(&moved)), (Some(moved), true));
                    }
                    None => unknown += 1,
                }
                surely += u32::from(told.surely().is_some());
                assert_eq!(told.surely().is_some(), said.len() == 1, "{history}");
                if told.surely().is_none() {
                    let peer = Standing { well: true, moved, in_flight: 0 };
                    let mut later = recycle;
                    for _ in 0..STEPS {
                        assert_eq!((later.which(moved), later.is_late(peer)), (None, true));
                        later.closed();
                        later.begin(Time::ZERO, PATIENCE).unwrap();
                    }
                }
            }
        }
        assert!(surely > 0 && unknown > 0 && old > 0, "{surely} {unknown} {old}");
    }

    /// Nobody who is well is cut off, whatever the order, and every replacement comes to its end.
    #[test]
    fn an_endpoint_is_closed_when_nobody_who_is_well_needs_it() {
        let fresh = |in_flight| Standing { well: true, moved: Turn(0), in_flight };
        let mut recycle = Recycle::default();
        assert_eq!(recycle.verdict([fresh(1)].into_iter()), Verdict::Idle);
        let turn = recycle.begin(Time::ZERO, PATIENCE).unwrap();
        assert_eq!(recycle.begin(Time::ZERO, PATIENCE), None);
        assert_eq!(turn, Turn(1));
        let which = |recycle: Recycle| [0, 1, 2, u32::MAX].map(|turn| recycle.which(Turn(turn)));
        assert_eq!(which(recycle), [Some(Which::Old), Some(Which::Present), None, None]);
        assert_eq!(which(Recycle::default()), [Some(Which::Present), None, None, None]);
        let peers = [fresh(0), fresh(1), Standing { well: false, ..fresh(1) }];
        // Of an earlier replacement, and late.
        let answers = [Some(Turn(0)), None, None];
        let mut open = Vec::from([World { recycle, now: Time::ZERO, looks: 0, peers, answers }]);
        let (mut seen, mut closed, mut given_up) = (HashSet::new(), 0, 0);
        while let Some(mut world) = open.pop() {
            if !seen.insert(world.clone()) {
                continue;
            }
            match world.verdict() {
                Verdict::Close => {
                    for peer in world.peers.iter().filter(|peer| peer.well) {
                        assert_eq!((peer.moved, peer.in_flight), (turn, 0), "{world:?}");
                    }
                    world.recycle.closed();
                    assert_eq!(world.verdict(), Verdict::Idle);
                    closed += 1;
                    continue;
                }
                Verdict::GiveUp => {
                    assert_eq!(world.looks, LOOKS, "{world:?}");
                    let recycle = world.recycle;
                    for peer in world.peers.iter_mut().filter(|peer| recycle.is_late(**peer)) {
                        peer.well = false;
                    }
                    assert_eq!(world.verdict(), Verdict::Close);
                    given_up += 1;
                }
                Verdict::Wait(until) => {
                    assert!(world.looks < LOOKS, "{world:?}");
                    let last = world.looks + 1 == LOOKS;
                    let wait = if last { Duration::from_millis(2) } else { BLINK };
                    assert_eq!(until, world.now.after(wait), "{world:?}");
                    let next = world.next();
                    assert!(!next.is_empty());
                    open.extend(next);
                }
                Verdict::Idle => panic!("it ended by itself: {world:?}"),
            }
        }
        assert!(closed > 100 && given_up > 100, "{closed} {given_up} {}", seen.len());
    }
}
