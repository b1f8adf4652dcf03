//! Who opens the connection between two endpoints, where a transport opens one at the first write.
//!
//! When both ends of such a transport write first at the same time, two connections cross, and one of them is
//! to be dropped. libfabric's `tcp` at times drops the one that is written to (`xnet_process_connreq` takes
//! it for one of an earlier process), and `ofi_rxm` is known to (ofiwg/libfabric#7396). So of the two ends
//! of a session one opens, and the other asks: it writes to a pair of NICs when it has heard that a
//! write from the other end has got through. Neither needs more connections than it uses.
//!
//! ```text
//!   asks                                        opens
//!    wants to write from NIC 0 to NIC 2
//!    Open { ours, theirs, pairs } ────────────▶
//!                                ◀══════════════  a write without bytes, from 2 to 0
//!                                ◀──────────────  Opened { ours, theirs, pairs }
//!    writes
//! ```
//!
//! Either end may replace its endpoints ([`crate::recycle`]), so a pair is named with the turns of both.
//!
//! # Invariants
//!
//! 1. Who asks writes to a pair only after it was opened, the endpoints being the same.
//! 2. A pair is asked for once, and again with every replacement.
//!
//! The test enumerates the orders of asking, answering and replacing on both sides.

use crate::id::{MAX_NICS, NicIndex};
use crate::recycle::Turn;

/// Pairs of NICs, one of each end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Pairs([u8; MAX_NICS]);

impl Pairs {
    /// No pair.
    pub const NONE: Self = Self([0; MAX_NICS]);

    /// From their form on the wire: a byte for each NIC of the one who asks, a bit for each of the other.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; MAX_NICS]) -> Self {
        Self(bytes)
    }

    /// Their form on the wire.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; MAX_NICS] {
        self.0
    }

    /// Just one. NICs that there cannot be are no pair.
    #[must_use]
    pub fn one(nic: NicIndex, remote: NicIndex) -> Self {
        let mut one = Self::NONE;
        if let Some(bits) = one.0.get_mut(usize::from(nic)) {
            *bits = 1_u8.checked_shl(remote.into()).unwrap_or(0);
        }
        one
    }

    /// Whether this pair is among them.
    #[must_use]
    #[inline]
    pub fn contains(self, nic: NicIndex, remote: NicIndex) -> bool {
        let bits = self.0.get(usize::from(nic)).copied().unwrap_or(0);
        bits & 1_u8.checked_shl(remote.into()).unwrap_or(0) != 0
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// These, and those.
    #[must_use]
    pub fn with(mut self, those: Self) -> Self {
        self.0.iter_mut().zip(those.0).for_each(|(bits, more)| *bits |= more);
        self
    }

    /// These, but not those.
    #[must_use]
    pub fn without(mut self, those: Self) -> Self {
        self.0.iter_mut().zip(those.0).for_each(|(bits, less)| *bits &= !less);
        self
    }

    /// Each of them: the NIC of the one who asks, and the other's.
    pub fn iter(self) -> impl Iterator<Item = (NicIndex, NicIndex)> {
        let nics = (0..).zip(self.0);
        nics.flat_map(|(nic, bits)| {
            (0..NicIndex::try_from(u8::BITS).unwrap_or(0))
                .filter(move |&remote| bits >> remote & 1 != 0)
                .map(move |remote| (nic, remote))
        })
    }
}

/// Which endpoints a pair is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Turns {
    /// Of the one who asks.
    pub asks: Turn,
    /// Of the one who opens.
    pub opens: Turn,
}

/// What the one who asks knows of the pairs between two sets of endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Openings {
    turns: Turns,
    wanted: Pairs,
    asked: Pairs,
    open: Pairs,
}

impl Openings {
    /// Nothing is open.
    #[must_use]
    pub fn new(turns: Turns) -> Self {
        Self { turns, ..Self::default() }
    }

    /// The endpoints.
    #[must_use]
    pub const fn turns(&self) -> Turns {
        self.turns
    }

    /// Whether the pair may be written to.
    #[must_use]
    #[inline]
    pub fn is_open(&self, nic: NicIndex, remote: NicIndex) -> bool {
        self.open.contains(nic, remote)
    }

    /// The pair is to be written to.
    pub fn want(&mut self, nic: NicIndex, remote: NicIndex) {
        self.wanted = self.wanted.with(Pairs::one(nic, remote));
    }

    /// What is to be asked for.
    #[must_use]
    pub fn unasked(&self) -> Pairs {
        self.wanted.without(self.asked)
    }

    /// These have been asked for.
    pub fn asked(&mut self, pairs: Pairs) {
        self.asked = self.asked.with(pairs);
    }

    /// The other end says that these are open.
    pub fn opened(&mut self, turns: Turns, pairs: Pairs) {
        if turns == self.turns {
            self.open = self.open.with(pairs);
        }
    }
}

/// What one end has asked for, or is to be told of, between endpoints that there are. However often that is, it takes the same room: one end's
/// endpoints are those of its last move, and the other's are its present ones, or those that they replace.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Asked(heapless::Vec<(Turns, Pairs), 2>);

impl Asked {
    /// These, too. `is_current` says between which endpoints pairs still count; all others are dropped.
    pub fn add(&mut self, turns: Turns, pairs: Pairs, is_current: impl Fn(Turns) -> bool) {
        self.0.retain(|(those, _)| is_current(*those));
        if !is_current(turns) {
            return;
        }
        match self.0.iter_mut().find(|(those, _)| *those == turns) {
            Some((_, all)) => *all = all.with(pairs),
            // There are no more of which all are current; if there were, nobody would wait for these: they are asked for anew.
            None => _ = self.0.push((turns, pairs)),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those added last between the same endpoints.
    #[must_use]
    pub fn last(&self) -> Option<(Turns, Pairs)> {
        self.0.last().copied()
    }

    /// Drops those.
    pub fn pop(&mut self) {
        self.0.pop();
    }

    /// Keeps those for which `keep`, which may change them, says so.
    pub fn retain_mut(&mut self, mut keep: impl FnMut(Turns, &mut Pairs) -> bool) {
        self.0.retain_mut(|(turns, pairs)| keep(*turns, pairs));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::vec::Vec;

    use super::*;

    /// All sequences of four askings, between three sets of endpoints of one end and two of the other.
    #[test]
    fn what_is_asked_for_again_and_again_takes_no_more_room() {
        let turns = |n: u32| Turns { asks: Turn(n % 3), opens: Turn(n / 3) };
        let one = |n: u32| Pairs::one(u8::try_from(n).unwrap(), 1);
        for plan in 0..6_u32.pow(4) {
            let (mut asked, mut all) = (Asked::default(), Vec::new());
            for (at, n) in
                [plan % 6, plan / 6 % 6, plan / 36 % 6, plan / 216].into_iter().enumerate()
            {
                let at = u32::try_from(at).unwrap();
                // Those of the end that asks are replaced with time.
                let is_current = |it: Turns| it.asks == Turn(at / 2);
                for _ in 0..2 {
                    asked.add(turns(n), one(at), is_current);
                }
                all.push((turns(n), one(at)));
                all.retain(|(those, _)| is_current(*those));
                assert!(asked.0.len() <= 2 && asked.is_empty() == all.is_empty());
                for (those, pairs) in &all {
                    let kept = asked.0.iter().find(|(kept, _)| kept == those).unwrap().1;
                    assert_eq!(kept.with(*pairs), kept, "{plan}");
                }
            }
            while let Some((turns, pairs)) = asked.last() {
                let of_it = all.iter().filter(|(those, _)| *those == turns);
                assert_eq!(pairs, of_it.fold(Pairs::NONE, |sum, (_, it)| sum.with(*it)));
                asked.pop();
            }
        }
    }

    #[test]
    fn pairs_are_a_set() {
        let all = || (0..8_u8).flat_map(|nic| (0..8_u8).map(move |remote| (nic, remote)));
        for (nic, remote) in all() {
            let one = Pairs::one(nic, remote);
            assert_eq!(one.iter().collect::<Vec<_>>(), [(nic, remote)]);
            assert_eq!(Pairs::from_bytes(one.to_bytes()), one);
            for (a, b) in all() {
                let two = one.with(Pairs::one(a, b));
                assert_eq!(one.contains(a, b), (nic, remote) == (a, b));
                assert!(two.contains(a, b) && two.contains(nic, remote));
                let left = two.without(one);
                assert_eq!(left.is_empty(), (nic, remote) == (a, b));
                assert!(!left.contains(nic, remote));
            }
        }
        for (nic, remote) in [(8, 0), (0, 8), (255, 255)] {
            assert!(Pairs::one(nic, remote).is_empty());
            assert!(!Pairs::from_bytes([255; 8]).contains(nic, remote));
        }
    }

    /// One pair of NICs; both ends replace their endpoints up to twice. What travels is never in order.
    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct World {
        asks: Openings,
        /// Which endpoints of its own the opener still has, and which of the other's it knows.
        opener: Vec<Turn>,
        knows: Turn,
        /// Asked, answered, and not heard yet.
        asked: Vec<Turns>,
        answered: Vec<Turns>,
        /// Connections that there are.
        open: Vec<Turns>,
    }

    const MOST: u32 = 2;

    impl World {
        fn next(&self) -> Vec<Self> {
            let mut all = Vec::new();
            let mut step = |change: &dyn Fn(&mut Self)| {
                let mut world = self.clone();
                change(&mut world);
                all.push(world);
            };
            step(&|world| world.asks.want(0, 0));
            if !self.asks.unasked().is_empty() {
                step(&|world| {
                    world.asked.push(world.asks.turns());
                    world.asks.asked(world.asks.unasked());
                });
            }
            for at in 0..self.asked.len() {
                step(&|world| {
                    let turns = world.asked.remove(at);
                    // Of endpoints that are gone, or not known any more, nothing can be opened.
                    if world.opener.contains(&turns.opens) && world.knows == turns.asks {
                        if !world.open.contains(&turns) {
                            world.open.push(turns);
                        }
                        world.answered.push(turns);
                    }
                });
            }
            for at in 0..self.answered.len() {
                step(&|world| {
                    let turns = world.answered.remove(at);
                    world.asks.opened(turns, Pairs::one(0, 0));
                });
            }
            // The asker has new endpoints, that the opener knows.
            let turns = self.asks.turns();
            if turns.asks.0 < MOST {
                step(&|world| {
                    world.knows = Turn(turns.asks.0 + 1);
                    world.asks = Openings::new(Turns { asks: world.knows, ..turns });
                });
            }
            // The opener has; the asker goes over to them; the old ones are closed.
            let newest = self.opener.last().copied().unwrap_or_default();
            if newest.0 < MOST && self.opener.len() == 1 {
                step(&|world| world.opener.push(Turn(newest.0 + 1)));
            }
            if turns.opens != newest {
                step(&|world| world.asks = Openings::new(Turns { opens: newest, ..turns }));
            } else if self.opener.len() > 1 {
                step(&|world| {
                    world.opener.remove(0);
                });
            }
            all
        }
    }

    #[test]
    fn who_asks_writes_only_to_what_is_open() {
        let start = World {
            asks: Openings::default(),
            opener: Vec::from([Turn(0)]),
            knows: Turn(0),
            asked: Vec::new(),
            answered: Vec::new(),
            open: Vec::new(),
        };
        let (mut open, mut seen, mut written) =
            (Vec::from([start]), HashSet::new(), HashSet::new());
        while let Some(world) = open.pop() {
            if !seen.insert(world.clone()) {
                continue;
            }
            let turns = world.asks.turns();
            if world.asks.is_open(0, 0) {
                assert!(world.open.contains(&turns), "{world:?}");
                written.insert(turns);
            }
            open.extend(world.next());
        }
        // All endpoints of the one to all of the other.
        assert_eq!(written.len(), 9, "{} states", seen.len());
    }
}
