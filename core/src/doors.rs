//! By which doors a call goes: an engine has one on each of its devices, and so has whoever it calls.
//!
//! Nobody knows which of the other's doors is reached from which of ours. So a call goes by one pair of them after the
//! other until it is answered, and then by the one that was. Knows neither what is said, nor when; what a door is, the
//! platform says.
//!
//! Where a door is may have to be looked up first. That takes a while where nobody is, and keeps the lookups of other calls waiting: so a call has few
//! under way at a time. But it goes on to other pairs all the while, and who waits for an address goes by another that is known.
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
//! 3. No more than [`LOOKUPS`] addresses of a call are looked up at a time, or wait to be.
//! 4. Those are passed over that are looked up, or were not found: none of them keeps a call from another pair.
//!
//! The tests below go through all numbers of doors.

use heapless::Vec;

use crate::id::MAX_NICS;
use crate::resolve::Known;

/// Addresses of a call that are looked up at a time: all those that two doors at each end make.
pub const LOOKUPS: usize = 4;

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

    /// As [`Ways::advance`], to the next pair that is of use now: of which the address is known, or can be looked up, while fewer than [`LOOKUPS`] are.
    /// O(pairs).
    pub fn try_another(&mut self, known: impl Fn(usize, &D) -> Known) -> bool {
        let has_room = self.has_room(&known);
        self.advance(|ours, theirs| match known(ours, theirs) {
            Known::Found => true,
            Known::Nothing => has_room,
            Known::Asked | Known::Waits | Known::Failed => false,
        })
    }

    /// Whether something may be said by the pair whose turn it is: not if its address would be looked up, and [`LOOKUPS`] others are. O(pairs).
    #[must_use]
    pub fn may_say(&self, known: impl Fn(usize, &D) -> Known) -> bool {
        let pair = self.pair().map(|(ours, theirs)| known(ours, theirs));
        pair.is_some_and(|it| it != Known::Nothing || self.has_room(&known))
    }

    /// What was to be said waits, and addresses were looked up: whether one is known now. Then it is the turn of the first such pair, from the one whose
    /// turn it was. O(pairs).
    pub fn resume(&mut self, known: impl Fn(usize, &D) -> Known) -> bool {
        self.start(|ours, theirs| known(ours, theirs) == Known::Found);
        self.pair().is_some_and(|(ours, theirs)| known(ours, theirs) == Known::Found)
    }

    /// Whether nothing can be said, by any pair, and no address is looked up for that yet, since others' are: that is no one's silence. O(pairs).
    #[must_use]
    pub fn is_held_up(&self, known: impl Fn(usize, &D) -> Known) -> bool {
        let mut waits = false;
        let is_begun = self.all(&known).any(|it| {
            waits |= it == Known::Waits;
            matches!(it, Known::Found | Known::Asked)
        });
        waits && !is_begun
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

    /// Whether another address may be looked up.
    fn has_room(&self, known: &impl Fn(usize, &D) -> Known) -> bool {
        let asked = self.all(known).filter(|it| matches!(it, Known::Asked | Known::Waits));
        asked.count() < LOOKUPS
    }

    /// How much is known of each pair's address.
    fn all(&self, known: &impl Fn(usize, &D) -> Known) -> impl Iterator<Item = Known> {
        (0..self.pairs()).filter_map(move |turn| {
            let (ours, theirs) = self.at(turn);
            Some(known(ours, self.theirs.get(theirs)?))
        })
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
    use std::vec;
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

    /// What is known of a pair's address, and since which tick.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Stand {
        Nothing,
        Asked(usize),
        Found,
        Failed(usize),
    }

    /// Ticks, with each of which a call is repeated: how long a lookup takes that nobody answers, and how long it is not made again.
    const LOOKUP: usize = 20;

    /// A call that nobody answers, by pairs of which `good` says which have an address, which is found after so many ticks: when each pair was
    /// first said by.
    fn said(ours: usize, theirs: u8, good: u32, after: usize) -> Vec<Option<usize>> {
        let pairs = ours * usize::from(theirs);
        let place = |at: usize, door: u8| at * usize::from(theirs) + usize::from(door);
        let mut ways = Ways::new(ours, 0..theirs).unwrap();
        let mut stands = vec![Stand::Nothing; pairs];
        let mut first = vec![None; pairs];
        let mut waits = false;
        for tick in 0..(pairs + 2) * LOOKUP {
            let mut any = false;
            for (at, stand) in stands.iter_mut().enumerate() {
                let is_good = good >> at & 1 == 1;
                let takes = if is_good { after } else { LOOKUP };
                match *stand {
                    Stand::Asked(since) if tick - since >= takes => {
                        *stand = if is_good { Stand::Found } else { Stand::Failed(tick) };
                        any = true;
                    }
                    Stand::Failed(since) if tick - since >= LOOKUP => *stand = Stand::Nothing,
                    _ => {}
                }
            }
            let known = |at: usize, door: &u8| match stands[place(at, *door)] {
                Stand::Nothing => Known::Nothing,
                Stand::Asked(_) => Known::Asked,
                Stand::Found => Known::Found,
                Stand::Failed(_) => Known::Failed,
            };
            let is_resumed = waits && any && ways.resume(known);
            if tick > 0 && !is_resumed {
                ways.try_another(known);
            }
            let may_say = ways.may_say(known);
            let (at, &door) = ways.pair().unwrap();
            let stand = &mut stands[place(at, door)];
            if may_say && *stand == Stand::Nothing {
                *stand = Stand::Asked(tick);
            }
            waits = *stand != Stand::Found;
            if !waits {
                first[place(at, door)].get_or_insert(tick);
            }
            let asked = stands.iter().filter(|it| matches!(it, Stand::Asked(_))).count();
            assert!(asked <= LOOKUPS, "{asked} at tick {tick}");
        }
        first
    }

    /// Up to three doors at each end, and all ways in which their pairs lead somewhere or nowhere: something is said by each of which the address is
    /// found, and by the first of them soon.
    #[test]
    fn a_call_has_few_addresses_looked_up_and_uses_each_that_is_found() {
        for (ours, theirs) in (1..=3).flat_map(|ours| (1..=3).map(move |theirs| (ours, theirs))) {
            let pairs = ours * usize::from(theirs);
            for (good, after) in
                (0..1 << pairs).flat_map(|good| [1, 2, LOOKUP - 1].map(|after| (good, after)))
            {
                let found = said(ours, theirs, good, after);
                for (at, tick) in found.iter().enumerate() {
                    assert_eq!(tick.is_some(), good >> at & 1 == 1, "{good:b} of {ours}, {theirs}");
                }
                // As many as lead nowhere were waited for, so many at a time.
                let bad = pairs - found.iter().flatten().count();
                let most = (bad / LOOKUPS) * (LOOKUP + LOOKUPS) + LOOKUPS + after + 1;
                let soon = found.iter().flatten().min().is_none_or(|&tick| tick <= most);
                assert!(soon, "{found:?}, {good:b} of {ours}, {theirs}: {most}");
            }
        }
    }

    #[test]
    fn who_waits_for_an_address_goes_by_another_that_is_known() {
        let mut ways = Ways::new(2, 0..2_u8).unwrap();
        let look =
            |known: [[Known; 2]; 2]| move |at: usize, door: &u8| known[at][usize::from(*door)];
        let (nothing, asked) = (Known::Nothing, Known::Asked);
        let known = [[asked, nothing], [nothing, nothing]];
        assert!(!ways.resume(look(known)) && ways.may_say(look(known)));
        assert_eq!(ways.pair(), Some((0, &0)), "it stays");
        assert!(ways.try_another(look(known)), "its doors are new");
        assert_eq!(ways.pair(), Some((1, &1)));
        // The first is found when it is the second's turn.
        let known = [[Known::Found, nothing], [nothing, asked]];
        assert!(ways.resume(look(known)));
        assert_eq!(ways.pair(), Some((0, &0)));
        // Those that are looked up, or were not found, are passed over.
        let known = [[Known::Found, Known::Failed], [nothing, Known::Waits]];
        assert!(!ways.try_another(look(known)));
        assert_eq!(ways.pair(), Some((1, &0)));
        ways.try_another(look(known));
        assert_eq!(ways.pair(), Some((0, &0)));
    }

    /// Three pairs, and all that can be known of them.
    #[test]
    fn a_call_is_held_up_while_all_its_addresses_wait_for_others() {
        const ALL: [Known; 5] =
            [Known::Found, Known::Asked, Known::Waits, Known::Failed, Known::Nothing];
        let ways = Ways::new(1, 0..3_u8).unwrap();
        for word in 0..ALL.len().pow(3) {
            let known = [1, 5, 25].map(|by| ALL[word / by % 5]);
            let has = |it| known.contains(&it);
            let expected = has(Known::Waits) && !has(Known::Found) && !has(Known::Asked);
            let is_held_up = ways.is_held_up(|_, door| known[usize::from(*door)]);
            assert_eq!(is_held_up, expected, "{known:?}");
        }
    }

    /// As many as may be are looked up: no other is, and what is known is said all the same.
    #[test]
    fn no_more_addresses_are_looked_up_than_may_be() {
        let mut ways = Ways::new(1, 0..6_u8).unwrap();
        let look = |last| {
            move |_: usize, door: &u8| match door {
                0 => Known::Nothing,
                1..5 => Known::Asked,
                _ => last,
            }
        };
        for last in [Known::Nothing, Known::Failed, Known::Asked] {
            ways.try_another(look(last));
            assert_eq!(ways.pair(), Some((0, &0)));
            assert!(!ways.may_say(look(last)));
        }
        ways.try_another(look(Known::Found));
        assert_eq!(ways.pair(), Some((0, &5)));
        assert!(ways.may_say(look(Known::Found)));
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
