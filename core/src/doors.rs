//! By which doors a call goes: an engine has one on each of its devices, and so has whoever it calls.
//!
//! Nobody knows which of the other's doors is reached from which of ours. So a call goes by one pair of them after the
//! other until it is answered, and then by the one that was. Knows neither what is said, nor when; what a door is, the
//! platform says.
//!
//! ```text
//!   ours 2, theirs 3:   0-0  1-1  0-2  1-0  0-1  1-2 │ 0-0  1-1 ..
//!                       └── each door once ──┘
//! ```
//!
//! # Invariants
//!
//! 1. Of all pairs each comes once, before any comes again.
//! 2. The first pairs, as many as the end with more doors has, use each door of both ends; no door is used a second time
//!    while its end has one that was not. So what is lost of either end costs a call one pair for each.
//!
//! The tests below go through all numbers of doors.

use heapless::Vec;

use crate::id::MAX_NICS;

/// The pairs of doors of a call.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Ways<D> {
    ours: u8,
    theirs: Vec<D, MAX_NICS>,
    turn: u16,
}

impl<D: PartialEq> Ways<D> {
    /// Of so many doors of ours, and these; one that is named again counts once. `None` if either end has none, or we more than
    /// [`MAX_NICS`], or they.
    #[must_use]
    pub fn new(ours: usize, theirs: impl IntoIterator<Item = D>) -> Option<Self> {
        let mut all = Vec::new();
        for door in theirs {
            if !all.contains(&door) {
                all.push(door).ok()?;
            }
        }
        let ours = u8::try_from(ours).ok()?;
        let some = (1..=MAX_NICS).contains(&ours.into()) && !all.is_empty();
        some.then_some(Self { ours, theirs: all, turn: 0 })
    }

    /// The doors of the other end.
    #[must_use]
    pub fn theirs(&self) -> &[D] {
        &self.theirs
    }

    /// The pair whose turn it is: our door, and theirs.
    #[must_use]
    pub fn pair(&self) -> Option<(usize, &D)> {
        let (ours, theirs) = self.at(self.turn);
        Some((ours, self.theirs.get(theirs)?))
    }

    /// Goes on to the first pair that may be of use, from the one whose turn it is; stays there if none may. O(pairs).
    pub fn start(&mut self, may: impl Fn(usize, &D) -> bool) {
        self.go_on(0, may);
    }

    /// Goes on to the next pair that may be of use; stays there if none other may. Whether there are doors that no pair had
    /// before this one: what has not been tried need not be waited for as long. O(pairs).
    pub fn advance(&mut self, may: impl Fn(usize, &D) -> bool) -> bool {
        let before = self.turn;
        self.go_on(1, may);
        let doors = usize::from(self.ours).max(self.theirs.len());
        self.turn != before && usize::from(self.turn) < doors
    }

    /// An answer came by these two: they are used from now on. O(pairs).
    pub fn choose(&mut self, ours: usize, theirs: &D) {
        let found = self.theirs.iter().position(|door| door == theirs);
        let turn =
            (0..self.pairs()).find(|&turn| Some(self.at(turn)) == found.map(|it| (ours, it)));
        // Of a later round: nothing that comes after it is new.
        self.turn = turn.map_or(self.turn, |turn| turn.saturating_add(self.pairs()));
    }

    fn go_on(&mut self, first: u16, may: impl Fn(usize, &D) -> bool) {
        let turns = (first..self.pairs()).map(|more| self.turn.wrapping_add(more));
        let found = turns.into_iter().find(|&turn| {
            let (ours, theirs) = self.at(turn);
            self.theirs.get(theirs).is_some_and(|theirs| may(ours, theirs))
        });
        let turn = found.unwrap_or(self.turn);
        // So that it never overflows, and never is of the first round again.
        let round = self.pairs();
        self.turn = if turn < round.saturating_mul(2) { turn } else { turn.wrapping_sub(round) };
    }

    /// All pairs: 64 at most.
    fn pairs(&self) -> u16 {
        let theirs = u16::try_from(self.theirs.len()).unwrap_or(1);
        u16::from(self.ours).saturating_mul(theirs).max(1)
    }

    /// The doors of a turn.
    fn at(&self, turn: u16) -> (usize, usize) {
        let (ours, theirs) = (usize::from(self.ours).max(1), self.theirs.len().max(1));
        let turn = usize::from(turn % self.pairs());
        // Side by side, until both ends are at their first door again; then with a shift of one more.
        let together = (1..=ours).find(|by| theirs.wrapping_mul(*by).is_multiple_of(ours));
        let together = theirs.saturating_mul(together.unwrap_or(1)).max(1);
        (turn % ours, turn.wrapping_add(turn / together) % theirs)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::vec::Vec;

    use super::*;

    /// The first turns of a call by so many doors, from the start; and whether each was new.
    fn turns(ours: usize, theirs: u8, many: usize) -> Vec<(usize, u8, bool)> {
        let mut ways = Ways::new(ours, 0..theirs).unwrap();
        let mut all = Vec::new();
        let mut new = true;
        for _ in 0..many {
            let (at, &door) = ways.pair().unwrap();
            all.push((at, door, new));
            new = ways.advance(|_, _| true);
        }
        all
    }

    fn all_numbers() -> impl Iterator<Item = (usize, u8)> {
        (1..=MAX_NICS).flat_map(|ours| (1..=8).map(move |theirs| (ours, theirs)))
    }

    #[test]
    fn each_pair_comes_once_a_round_and_each_door_as_early_as_can_be() {
        for (ours, theirs) in all_numbers() {
            let pairs = ours * usize::from(theirs);
            let most = ours.max(theirs.into());
            let found = turns(ours, theirs, 3 * pairs);
            for (at, round) in found.chunks(pairs).enumerate() {
                let different: HashSet<_> = round.iter().map(|&(a, b, _)| (a, b)).collect();
                assert_eq!(different.len(), pairs, "{ours} and {theirs}");
                assert_eq!(&round[0].1, &found[0].1);
                let same = round.iter().zip(&found).all(|(a, b)| (a.0, a.1) == (b.0, b.1));
                assert!(same, "round {at} of {ours} and {theirs}");
            }
            for (turn, &(_, _, new)) in found.iter().enumerate() {
                assert_eq!(new, turn < most, "turn {turn} of {ours} and {theirs}");
            }
            for many in 1..=most {
                let mine: HashSet<_> = found[..many].iter().map(|it| it.0).collect();
                let other: HashSet<_> = found[..many].iter().map(|it| it.1).collect();
                assert_eq!((mine.len(), other.len()), (many.min(ours), many.min(theirs.into())));
            }
        }
    }

    /// Whichever one door of each end is of no use, and whether that is known here or not.
    #[test]
    fn what_is_lost_of_either_end_costs_a_pair() {
        for (ours, theirs) in all_numbers() {
            for (dead, gone) in (0..ours).flat_map(|dead| (0..theirs).map(move |gone| (dead, gone)))
            {
                let works = |at: usize, door: u8| at != dead && door != gone;
                let some = ours > 1 && theirs > 1;
                let found = turns(ours, theirs, ours * usize::from(theirs));
                let first = found.iter().position(|&(at, door, _)| works(at, door));
                assert_eq!(first.is_some(), some);
                // Of two doors, every other pair has the dead one.
                assert!(first.is_none_or(|it| it <= 3), "{first:?} of {ours} and {theirs}");
                // What we know of is not tried at all.
                let mut ways = Ways::new(ours, 0..theirs).unwrap();
                ways.start(|at, _| at != dead);
                for _ in 0..4 * ours * usize::from(theirs) {
                    assert_eq!(ways.pair().unwrap().0 == dead, ours == 1);
                    ways.advance(|at, _| at != dead);
                }
            }
        }
    }

    #[test]
    fn a_call_stays_with_the_pair_that_was_answered_until_it_is_not() {
        for (ours, theirs) in all_numbers() {
            for (mine, other) in
                (0..ours).flat_map(|mine| (0..theirs).map(move |other| (mine, other)))
            {
                let mut ways = Ways::new(ours, 0..theirs).unwrap();
                ways.choose(mine, &other);
                assert_eq!(ways.pair(), Some((mine, &other)));
                let mut seen = HashSet::from([(mine, other)]);
                for _ in 1..ours * usize::from(theirs) {
                    assert!(!ways.advance(|_, _| true), "nothing is new any more");
                    seen.extend(ways.pair().map(|(at, door)| (at, *door)));
                }
                assert_eq!(seen.len(), ours * usize::from(theirs), "it goes round all the same");
                // Doors that are none of the call's change nothing.
                let before = ways.clone();
                ways.choose(mine, &theirs);
                ways.choose(ours, &other);
                assert_eq!(ways, before);
            }
        }
    }

    #[test]
    fn a_call_needs_a_door_at_each_end_and_counts_none_twice() {
        assert_eq!(Ways::new(0, [1]), None);
        assert_eq!(Ways::new(MAX_NICS + 1, [1]), None);
        assert_eq!(Ways::<u8>::new(1, []), None);
        assert_eq!(Ways::new(1, 0..=u8::try_from(MAX_NICS).unwrap()), None);
        let ways = Ways::new(2, [7, 7, 8, 7, 8]).unwrap();
        assert_eq!(ways.theirs(), [7, 8]);
        // Where nothing may be of use, it stays.
        let mut still = ways.clone();
        still.start(|_, _| false);
        let new = still.advance(|_, _| false);
        assert_eq!((still, new), (ways, false));
    }
}
