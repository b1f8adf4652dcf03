//! Which NIC carries which bytes.
//!
//! Pure arithmetic over speeds and lengths. It knows no device, no region and no peer: the platform
//! says how fast and how healthy the NICs are, and [`crate::plan`] turns ranges into work requests.
//!
//! # Invariants
//!
//! - [`Routes`] holds one to [`MAX_NICS`] routes, none over a broken path; no weight is 0. Without broken
//!   paths it uses every usable NIC of both sides, with them every one of ours that has a path left.
//! - The ranges of a [`Split`] cover `0..len` exactly, whatever the length: no gap, no overlap. Each is
//!   empty, or the whole, or at least the minimum long; inner edges lie on a granule of the destination.
//!
//! The tests enumerate both over one to eight NICs on either side, and sample full-width lengths.

use core::num::{NonZeroU8, NonZeroU32, NonZeroU64, NonZeroU128};
use core::ops::Range;

use heapless::Vec;

use crate::id::{MAX_NICS, NicIndex};

/// What is known of one NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NicState {
    /// Relative speed, Gbit/s for example; 0 makes the NIC unusable.
    pub speed: u32,
    /// Whether work may be posted on it.
    pub healthy: bool,
}

impl NicState {
    const fn usable(&self) -> bool {
        self.healthy && self.speed > 0
    }
}

/// A way from one of our NICs to one of a peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// Our NIC.
    pub local: NicIndex,
    /// The peer's NIC.
    pub remote: NicIndex,
    /// Share of the bytes it should carry, relative to the other routes; never 0.
    pub weight: u32,
}

/// All routes to one peer, in a fixed order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Routes {
    routes: [Route; MAX_NICS],
    count: NonZeroU8,
}

/// Divisible by every number of routes that can share a NIC, so that shares of a speed are exact.
const SHARES: u64 = 840;

impl Routes {
    const UNUSED: Route = Route { local: 0, remote: 0, weight: 0 };

    /// Routes over the usable NICs of both sides, as many as the side with more of them has.
    ///
    /// Route `r` joins our usable NIC `r % L` to the peer's usable NIC `r % R`, in index order. Its weight
    /// is the smaller of the two speeds, each shared evenly by the routes that meet at that NIC.
    /// `None` if a side has no usable NIC, or more than [`MAX_NICS`] NICs.
    #[must_use]
    pub fn new(local: &[NicState], remote: &[NicState]) -> Option<Self> {
        Self::avoiding(local, remote, &[0; MAX_NICS])
    }

    /// As [`Routes::new`], but over no broken path: bit `j` of `broken[i]` says that nothing gets from our
    /// NIC `i` to the peer's NIC `j`.
    ///
    /// A NIC without an unbroken path is left out. A route whose path is broken takes the peer's next NIC
    /// that its own reaches, so that of the peer's NICs some may go unused. `None` if no path is left.
    #[must_use]
    pub fn avoiding(
        local: &[NicState],
        remote: &[NicState],
        broken: &[u8; MAX_NICS],
    ) -> Option<Self> {
        let (mut local, mut remote) = (usable(local)?, usable(remote)?);
        let whole = |from: NicIndex, to: NicIndex| {
            broken
                .get(usize::from(from))
                .is_some_and(|broken| broken & 1_u8.unbounded_shl(to.into()) == 0)
        };
        let (all_local, all_remote) = (local.clone(), remote.clone());
        local.retain(|(from, _)| all_remote.iter().any(|(to, _)| whole(*from, *to)));
        remote.retain(|(to, _)| all_local.iter().any(|(from, _)| whole(*from, *to)));
        let count = local.len().max(remote.len());
        let mut routes = [Self::UNUSED; MAX_NICS];
        for (r, route) in routes.iter_mut().take(count).enumerate() {
            let (from, _) = *local.get(r.checked_rem(local.len())?)?;
            let mut reached = (0..remote.len()).filter_map(|step| {
                let (to, _) = *remote.get(r.saturating_add(step).checked_rem(remote.len())?)?;
                whole(from, to).then_some(to)
            });
            *route = Route { local: from, remote: reached.next()?, weight: 1 };
        }
        let mut shares = [0_u64; MAX_NICS];
        for (route, share) in routes.iter().zip(&mut shares).take(count) {
            let all = || routes.iter().take(count);
            let at_local = all().filter(|other| other.local == route.local).count();
            let at_remote = all().filter(|other| other.remote == route.remote).count();
            *share =
                part(&local, route.local, at_local)?.min(part(&remote, route.remote, at_remote)?);
        }
        scale(&mut shares);
        for (route, share) in routes.iter_mut().zip(shares).take(count) {
            route.weight = u32::try_from(share).unwrap_or(u32::MAX).max(1);
        }
        Some(Self { routes, count: NonZeroU8::new(u8::try_from(count).ok()?)? })
    }

    /// One route, from NIC 0 to NIC 0: stands in where there is nobody to write to.
    pub(crate) const fn one() -> Self {
        let mut routes = [Self::UNUSED; MAX_NICS];
        routes[0].weight = 1;
        Self { routes, count: NonZeroU8::MIN }
    }

    /// The routes, in order; never empty.
    #[must_use]
    pub fn as_slice(&self) -> &[Route] {
        self.routes.get(..usize::from(self.count.get())).unwrap_or(&[])
    }

    /// Route number `route`; `None` past the last.
    #[must_use]
    pub fn get(&self, route: usize) -> Option<Route> {
        self.as_slice().get(route).copied()
    }

    /// How many routes there are, 1 to [`MAX_NICS`].
    #[must_use]
    pub const fn count(&self) -> NonZeroU8 {
        self.count
    }

    /// The route whose turn it is: `turn` modulo their number.
    #[must_use]
    pub fn at_turn(&self, turn: u32) -> usize {
        // A remainder of a u8 fits everywhere.
        usize::try_from(turn % NonZeroU32::from(self.count)).unwrap_or(0)
    }
}

type Usable = Vec<(NicIndex, u32), MAX_NICS>;

/// Index and speed of each usable NIC; `None` if there is none, or too many NICs to index.
fn usable(nics: &[NicState]) -> Option<Usable> {
    if nics.len() > MAX_NICS {
        return None;
    }
    let mut usable = Usable::new();
    // Pushed one by one: `collect` would panic where this returns `None`.
    for (index, nic) in (0..).zip(nics).filter(|(_, nic)| nic.usable()) {
        usable.push((index, nic.speed)).ok()?;
    }
    (!usable.is_empty()).then_some(usable)
}

/// What each of `sharing` routes has of this NIC's speed.
fn part(nics: &Usable, nic: NicIndex, sharing: usize) -> Option<u64> {
    let (_, speed) = *nics.iter().find(|(index, _)| *index == nic)?;
    (u64::from(speed) * SHARES).checked_div(u64::try_from(sharing).ok()?)
}

/// Divides by the common divisor, then halves until every share fits a weight.
fn scale(shares: &mut [u64; MAX_NICS]) {
    let divisor = shares.iter().fold(0, |divisor, share| common_divisor(divisor, *share));
    let largest = shares.iter().fold(0, |largest: u64, share| largest.max(*share));
    let largest = largest.checked_div(divisor).unwrap_or(0);
    let shift = (u64::BITS - largest.leading_zeros()).saturating_sub(u32::BITS);
    for share in shares {
        *share = share.checked_div(divisor).unwrap_or(0) >> shift;
    }
}

fn common_divisor(mut a: u64, mut b: u64) -> u64 {
    while let Some(rest) = a.checked_rem(b) {
        (a, b) = (b, rest);
    }
    a
}

/// When a NIC is worth using, and where it may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SplitRule {
    /// A piece below this many bytes is not worth a NIC of its own.
    pub min_piece_bytes: NonZeroU64,
    /// Edges between NICs are multiples of this many bytes in the destination's address space.
    pub granule_bytes: NonZeroU64,
}

/// Which contiguous part of a transfer each route carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Split {
    /// Part `i` is `edges[i]..edges[i + 1]`.
    edges: [u64; MAX_NICS + 1],
    /// The route that carries part 0; its successors, cyclically, carry the next parts.
    first: usize,
    routes: NonZeroU8,
}

impl Split {
    /// Splits `len` bytes that go to address `dst`.
    ///
    /// As many routes share, from route `turn` on, as find [`SplitRule::min_piece_bytes`] each; each
    /// carries bytes in proportion to its weight. A part that rounding or a small weight leaves below the
    /// minimum goes to a neighbour, so less than twice the minimum stays whole.
    /// At most seven divisions; cannot overflow.
    #[must_use]
    pub fn bytes(len: u64, dst: u64, routes: &Routes, rule: SplitRule, turn: u32) -> Self {
        Self::cut(len, dst, routes, rule, turn)
    }

    /// Splits `items` things of equal size, pages for example: any number of them is worth a route.
    #[must_use]
    pub fn count(items: u64, routes: &Routes, turn: u32) -> Self {
        let rule = SplitRule { min_piece_bytes: NonZeroU64::MIN, granule_bytes: NonZeroU64::MIN };
        Self::cut(items, 0, routes, rule, turn)
    }

    /// What route `route` carries: empty if nothing, or if there is no such route.
    #[must_use]
    pub fn range(&self, route: usize) -> Range<u64> {
        let count = usize::from(self.routes.get());
        let cycled = if route < self.first { count } else { 0 };
        let part = route.saturating_add(cycled).saturating_sub(self.first);
        match self.edges.get(part..) {
            Some(&[start, end, ..]) if route < count => start..end,
            _ => 0..0,
        }
    }

    fn cut(len: u64, dst: u64, routes: &Routes, rule: SplitRule, turn: u32) -> Self {
        let first = routes.at_turn(turn);
        let mut edges = [len; MAX_NICS + 1];
        if let Some(start) = edges.first_mut() {
            *start = 0;
        }
        let worthwhile = len / rule.min_piece_bytes;
        let parts = usize::try_from(worthwhile).unwrap_or(usize::MAX).min(routes.as_slice().len());
        if let Some(inner) = edges.get_mut(1..parts) {
            place(inner, len, dst, routes, rule, first);
        }
        Self { edges, first, routes: routes.count }
    }
}

/// Places the inner edges: one after each route from `first` on but the last.
fn place(inner: &mut [u64], len: u64, dst: u64, routes: &Routes, rule: SplitRule, first: usize) {
    let min = rule.min_piece_bytes.get();
    let (later, sooner) = routes.as_slice().split_at_checked(first).unwrap_or_default();
    let in_turn = || sooner.iter().chain(later).map(|route| u64::from(route.weight));
    // At most eight 32-bit weights: the sums fit.
    let total = in_turn().take(inner.len().saturating_add(1)).sum();
    let (mut carried, mut start) = (0_u64, 0_u64);
    for (edge, weight) in inner.iter_mut().zip(in_turn()) {
        carried = carried.saturating_add(weight);
        let exact = proportion(len, carried, total);
        let edge_at = align_down(dst, exact, rule.granule_bytes);
        // A part that would be too small stays empty: the next route carries it.
        if edge_at.saturating_sub(start) >= min {
            start = edge_at;
        }
        *edge = start;
    }
    if len.saturating_sub(start) < min {
        // The last part is too small: the one before it carries it.
        for edge in inner.iter_mut().filter(|edge| **edge == start) {
            *edge = len;
        }
    }
}

/// `len * part / whole`, rounded down, for `part <= whole`.
fn proportion(len: u64, part: u64, whole: u64) -> u64 {
    let exact = match len.checked_mul(part) {
        Some(product) => product.checked_div(whole),
        None => (u128::from(len) * u128::from(part))
            .checked_div(u128::from(whole))
            .and_then(|exact| u64::try_from(exact).ok()),
    };
    exact.unwrap_or(len)
}

/// The largest offset up to `offset` at which `dst + offset` is a multiple of `granule`; 0 if there is
/// none.
pub(crate) fn align_down(dst: u64, offset: u64, granule: NonZeroU64) -> u64 {
    let past = match dst.checked_add(offset) {
        Some(address) => address % granule,
        None => {
            let past = (u128::from(dst) + u128::from(offset)) % NonZeroU128::from(granule);
            u64::try_from(past).unwrap_or(0) // Smaller than the granule: it fits.
        }
    };
    offset.saturating_sub(past)
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "counts of NICs")]
mod tests {
    use proptest::prelude::*;
    use std::vec::Vec;

    use super::*;

    fn nics(speeds: &[u32]) -> Vec<NicState> {
        let nic = |speed: &u32| NicState { speed: *speed, healthy: true };
        speeds.iter().map(nic).collect()
    }

    /// Routes with these weights, or multiples of them.
    fn weighted(weights: &[u32]) -> Routes {
        let routes = Routes::new(&nics(weights), &nics(weights)).unwrap();
        let pairs = routes.as_slice().iter().zip(weights);
        for (route, weight) in pairs {
            let first = routes.as_slice()[0].weight;
            assert_eq!(route.weight * weights[0], first * weight);
        }
        routes
    }

    fn rule(min: u64, granule: u64) -> SplitRule {
        SplitRule {
            min_piece_bytes: NonZeroU64::new(min).unwrap(),
            granule_bytes: NonZeroU64::new(granule).unwrap(),
        }
    }

    /// The non-empty parts, by offset, with their routes. Panics unless they cover `0..len` exactly.
    fn parts(split: &Split, len: u64) -> Vec<(Range<u64>, usize)> {
        let used = |route: usize| (split.range(route), route);
        let mut parts: Vec<_> = (0..MAX_NICS + 2).map(used).collect();
        parts.retain(|(range, _)| !range.is_empty());
        parts.sort_by_key(|(range, _)| range.start);
        let end = parts.iter().fold(0, |end, (range, route)| {
            assert_eq!(range.start, end, "gap or overlap before route {route}");
            range.end
        });
        assert_eq!(end, len, "not all is covered");
        parts
    }

    /// Checks everything promised of a split but the proportions.
    fn check_split(len: u64, dst: u64, routes: &Routes, rule: SplitRule, turn: u32) {
        let split = Split::bytes(len, dst, routes, rule, turn);
        let (min, granule) = (rule.min_piece_bytes.get(), rule.granule_bytes.get());
        let count = routes.as_slice().len();
        let parts = parts(&split, len);
        let worthwhile = usize::try_from(len / min).unwrap_or(count).clamp(1, count);
        assert!(parts.len() <= worthwhile);
        let first = usize::try_from(turn).unwrap() % count;
        for (range, route) in &parts {
            let place = (route + count - first) % count;
            assert!(place < worthwhile, "route {route} is not among the next");
            assert!(parts.len() == 1 || range.end - range.start >= min);
            let address = u128::from(dst) + u128::from(range.start);
            assert!(range.start == 0 || address % u128::from(granule) == 0);
        }
        if worthwhile == 1 && len > 0 {
            assert_eq!(parts, [(0..len, first)], "small ones stay whole");
        }
        let in_turn = |(_, route): &(Range<u64>, usize)| (route + count - first) % count;
        assert!(parts.is_sorted_by_key(in_turn));
    }

    #[test]
    fn routes_join_all_usable_nics_evenly() {
        // Which NICs of eight are usable, on both sides: all 255 x 255 pairs.
        for local in 1..=255_u32 {
            for remote in 1..=255_u32 {
                check_usable(local, remote);
            }
        }
    }

    fn check_usable(local: u32, remote: u32) {
        let states = |mask: u32| {
            // Unusable by turns for want of speed and for want of health.
            (0..8).map(move |nic| match mask >> nic & 1 {
                1 => (100, true),
                _ if nic % 2 == 0 => (0, true),
                _ => (100, false),
            })
        };
        let state = |(speed, healthy)| NicState { speed, healthy };
        let of = |mask| states(mask).map(state).collect::<Vec<_>>();
        let routes = Routes::new(&of(local), &of(remote)).unwrap();
        let (l, r) = (local.count_ones(), remote.count_ones());
        let count = l.max(r);
        assert_eq!(routes.as_slice().len() as u32, count);
        let mut uses = [[0; 8]; 2];
        for route in routes.as_slice() {
            assert!(route.weight > 0);
            uses[0][usize::from(route.local)] += 1;
            uses[1][usize::from(route.remote)] += 1;
        }
        for (uses, (mask, usable)) in uses.iter().zip([(local, l), (remote, r)]) {
            for (nic, uses) in uses.iter().enumerate() {
                let fair = count / usable..=count.div_ceil(usable);
                assert!(if mask >> nic & 1 == 1 { fair.contains(uses) } else { *uses == 0 });
            }
        }
    }

    #[test]
    fn weights_are_exact_shares_of_the_slower_end() {
        // As fractions with denominator 840, by hand: each route's share of either end.
        let routes = |local: &[u32], remote: &[u32]| {
            let routes = Routes::new(&nics(local), &nics(remote)).unwrap();
            routes.as_slice().iter().map(|r| (r.local, r.remote, r.weight)).collect::<Vec<_>>()
        };
        assert_eq!(routes(&[400], &[400]), [(0, 0, 1)]);
        assert_eq!(routes(&[400; 2], &[200; 2]), [(0, 0, 1), (1, 1, 1)]);
        assert_eq!(routes(&[400, 100], &[400; 2]), [(0, 0, 4), (1, 1, 1)]);
        // One NIC of 400 shared by three: 133.3 each; the third remote NIC is slower.
        assert_eq!(routes(&[400], &[200, 200, 100]), [(0, 0, 4), (0, 1, 4), (0, 2, 3)]);
        // Remote NIC 0 carries routes 0 and 2.
        assert_eq!(routes(&[100; 3], &[100; 2]), [(0, 0, 1), (1, 1, 2), (2, 0, 1)]);
        // The widest ratio there is, halved into 32 bits, still knows both.
        let widest = routes(&[u32::MAX, 1], &[u32::MAX, 1]);
        assert_eq!(widest, [(0, 0, u32::MAX), (1, 1, 1)]);
        let all: Vec<_> = (1..=8).map(|r| u32::MAX / r).collect();
        assert!(routes(&all, &all).iter().all(|route| route.2 > 0));
    }

    #[test]
    fn no_usable_nic_and_too_many_nics_are_no_routes() {
        let one = nics(&[1]);
        assert_eq!(Routes::new(&[], &one), None);
        assert_eq!(Routes::new(&one, &[]), None);
        assert_eq!(Routes::new(&one, &nics(&[0, 0])), None);
        let sick = NicState { speed: 1, healthy: false };
        assert_eq!(Routes::new(&[sick], &one), None);
        assert_eq!(Routes::new(&nics(&[1; 9]), &one), None);
        assert_eq!(Routes::new(&one, &nics(&[1; 9])), None);
        let routes = Routes::new(&one, &nics(&[1; 8])).unwrap();
        assert_eq!((routes.count().get(), routes.get(8)), (8, None));
        assert_eq!(Routes::one().as_slice(), Routes::new(&one, &one).unwrap().as_slice());
    }

    /// Every set of broken paths between up to three NICs on either side, healthy or not.
    #[test]
    fn routes_avoid_every_set_of_broken_paths() {
        let good = NicState { speed: 7, healthy: true };
        let sick = NicState { speed: 7, healthy: false };
        let mut cases = 0;
        for (locals, remotes) in (1..=3_usize).flat_map(|l| (1..=3).map(move |r| (l, r))) {
            for set in 0..1_u16 << (locals * remotes) {
                let cut = |from: usize, to: usize| set >> (from * remotes + to) & 1 != 0;
                for ill in 0..1_u8 << locals {
                    let state = |nic: usize| if ill >> nic & 1 == 0 { good } else { sick };
                    let local: Vec<_> = (0..locals).map(state).collect();
                    let mut broken = [0_u8; MAX_NICS];
                    for (from, to) in (0..locals).flat_map(|l| (0..remotes).map(move |r| (l, r))) {
                        broken[from] |= u8::from(cut(from, to)) << to;
                    }
                    let open =
                        |from: usize| local[from].healthy && (0..remotes).any(|to| !cut(from, to));
                    let routes = Routes::avoiding(&local, &[good; 3][..remotes], &broken);
                    cases += 1;
                    assert_eq!(routes.is_some(), (0..locals).any(open));
                    let Some(routes) = routes else { continue };
                    for route in routes.as_slice() {
                        assert!(open(route.local.into()) && route.weight > 0);
                        assert!(!cut(route.local.into(), route.remote.into()));
                    }
                    let used = |nic: usize| {
                        routes.as_slice().iter().any(|route| usize::from(route.local) == nic)
                    };
                    assert!((0..locals).all(|nic| used(nic) == open(nic)));
                }
            }
        }
        assert_eq!(cases, 5_036);
    }

    #[test]
    fn every_small_split_covers_and_keeps_its_promises() {
        let weights: [&[u32]; 11] = [
            &[1],
            &[1; 2],
            &[1; 3],
            &[1; 4],
            &[1; 5],
            &[1; 6],
            &[1; 7],
            &[1; 8],
            &[4, 1],
            &[1, 400, 2],
            &[3, 1, 1, 7],
        ];
        for weights in weights {
            let routes = weighted(weights);
            let count = weights.len() as u64;
            for (min, granule) in [(1, 1), (4, 4), (8, 4), (5, 4), (3, 8), (1, 3)] {
                let rule = rule(min, granule);
                for len in 0..=3 * granule.max(min) * count {
                    for dst in 0..granule {
                        for turn in 0..weights.len() as u32 {
                            check_split(len, dst, &routes, rule, turn);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_around_multiples_of_the_granule_lose_no_tail() {
        for count in 1..=8_u64 {
            let routes = weighted(&std::vec![1; count as usize]);
            for multiple in 0..4 {
                for len in 0..=2 * count {
                    // 8192 * multiple * count - count ..= 8192 * multiple * count + count
                    let Some(len) = (8192 * multiple * count + len).checked_sub(count) else {
                        continue;
                    };
                    for rule in [rule(1, 8192), rule(8192, 8192), rule(4096, 64)] {
                        for (dst, turn) in [(0, 0), (1, 1), (8191, u32::MAX)] {
                            check_split(len, dst, &routes, rule, turn);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn bytes_follow_the_weights() {
        let even = Split::bytes(4 << 30, 1 << 20, &weighted(&[1; 4]), rule(65536, 4096), 2);
        assert_eq!(even.range(2), 0..1 << 30);
        assert_eq!(even.range(1), 3 << 30..4 << 30);
        let lens = |weights: &[u32], len, turn| {
            let split = Split::bytes(len, 0, &weighted(weights), rule(64, 64), turn);
            let len = |route| split.range(route).end - split.range(route).start;
            (0..weights.len()).map(len).collect::<Vec<_>>()
        };
        assert_eq!(lens(&[4, 1], 5 << 40, 0), [4 << 40, 1 << 40]);
        assert_eq!(lens(&[4, 1], 5 << 40, 1), [4 << 40, 1 << 40]);
        // The products of length and weight need more than 64 bits.
        for turn in 0..3 {
            for (got, weight) in lens(&[2, 1, 1], u64::MAX, turn).iter().zip([2, 1, 1]) {
                assert!((u64::MAX / 4 * weight).abs_diff(*got) <= 66);
            }
        }
        // Exactly enough for each; a byte less, and one fewer carry it.
        assert_eq!(lens(&[1; 4], 256, 3), [64; 4]);
        assert_eq!(lens(&[1; 4], 192, 3), [64, 64, 0, 64]);
        // The slow one's part would be too small: the fast one carries all.
        assert_eq!(lens(&[400, 1], 6392, 0), [6392, 0]);
        assert_eq!(lens(&[400, 1], 6392, 1), [6392, 0]);
        assert_eq!(lens(&[1, 400, 1], 6392, 0), [0, 6392, 0]);
        // Far from the minimum, every part is within a granule of its share.
        for len in (100_000..101_000).step_by(7) {
            for (got, weight) in lens(&[3, 1, 1, 7], len, 1).iter().zip([3, 1, 1, 7]) {
                assert!((len * weight / 12).abs_diff(*got) <= 65, "{len} {weight} {got}");
            }
        }
    }

    #[test]
    fn counts_spread_and_cover() {
        for count in 1..=8 {
            let routes = weighted(&std::vec![1; count]);
            for items in 0..=3 * count as u64 {
                for turn in 0..count as u32 {
                    let split = Split::count(items, &routes, turn);
                    let parts = parts(&split, items);
                    assert_eq!(parts.len() as u64, items.min(count as u64));
                    let lens = parts.iter().map(|(range, _)| range.end - range.start);
                    let (least, most) = (lens.clone().min(), lens.max());
                    assert!(least.zip(most).is_none_or(|(least, most)| most <= least + 1));
                }
            }
        }
        let split = Split::count(10, &weighted(&[4, 1]), 0);
        assert_eq!((split.range(0), split.range(1)), (0..8, 8..10));
    }

    fn speeds() -> impl Strategy<Value = Vec<u32>> {
        proptest::collection::vec(prop_oneof![1..=8_u32, any::<u32>()], 1..=MAX_NICS)
    }

    proptest! {
        #[test]
        fn any_width_covers(
            len in any::<u64>(),
            dst in any::<u64>(),
            shift in 0..64_u32,
            min in 1..=u64::MAX,
            granule in 1..=u64::MAX,
            local in speeds(),
            remote in speeds(),
            turn in any::<u32>(),
        ) {
            let Some(routes) = Routes::new(&nics(&local), &nics(&remote)) else {
                return Err(TestCaseError::reject("all NICs have speed 0"));
            };
            let (min, granule) = ((min >> shift).max(1), (granule >> shift).max(1));
            check_split(len, dst, &routes, rule(min, granule), turn);
            parts(&Split::count(len, &routes, turn), len);
        }

        #[test]
        fn any_speeds_keep_their_proportions(local in speeds(), remote in speeds()) {
            let Some(routes) = Routes::new(&nics(&local), &nics(&remote)) else {
                return Ok(());
            };
            // In floating point, from the definition.
            let share = |route: &Route| {
                let all = routes.as_slice().iter();
                let at_local = all.clone().filter(|other| other.local == route.local).count();
                let at_remote = all.filter(|other| other.remote == route.remote).count();
                let local = f64::from(local[usize::from(route.local)]) / at_local as f64;
                local.min(f64::from(remote[usize::from(route.remote)]) / at_remote as f64)
            };
            let top = routes.as_slice().iter().map(share).fold(0.0, f64::max);
            let top_weight = routes.as_slice().iter().map(|r| r.weight).max().unwrap();
            for route in routes.as_slice() {
                let (want, got) = (share(route) / top, f64::from(route.weight) / f64::from(top_weight));
                prop_assert!((want - got).abs() < 2e-9, "{want} {got}");
            }
        }
    }
}
