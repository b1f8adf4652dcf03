//! Which host memory is pinned by this library, in this process: each byte once, for as many as need it.
//!
//! The driver pins nothing twice (`CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`), and does not say by whom it is pinned. So who pins
//! asks here first: what others of ours have pinned is shared, and what is left is to be pinned, as far as it is not the application's.
//!
//! It counts by the byte, as the driver does: what else lies in a page may be the application's, or the driver's own, which does not let it be pinned. But it
//! is pages that are mapped: who waits for what is going waits for all of a page.
//!
//! Pure: bytes are numbers, and the driver is whoever keeps to what is said here.
//!
//! # Invariants
//!
//! 1. No byte is in two pins.
//! 2. A byte of a range that was taken, and not given back, stays pinned, unless nobody could pin it, or the application unpins its own.
//! 3. While one pins or unpins a byte, nobody else takes any of its page; nor from when the last who had it gave it back, be it that the driver is
//!    told later. By then something else may be mapped there: what is pinned is what was, and GPUs would read that.
//! 4. Nor does anybody take a page of a pin that others have, if at any time since it was pinned nobody has had that page: the driver unpins all of
//!    a pin or nothing, so it stays pinned as long as they have it, and something else may be mapped there as well.
//!
//! The tests below go through all short programs of three owners over a few bytes.

use std::ops::Range;

/// A range that was taken in one go.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pin {
    bytes: Range<u64>,
    /// Where each part of it begins that the driver was told to pin: one, if none of it is the application's.
    parts: Vec<u64>,
    /// What they have taken, of which some lies here: a range for each who has it. None, and it is not busy: it could not be unpinned.
    holders: Vec<Range<u64>>,
    /// It is being pinned, or unpinned, or is to be.
    is_busy: bool,
}

impl Pin {
    fn touches(&self, range: &Range<u64>) -> bool {
        self.bytes.start < range.end && range.start < self.bytes.end
    }

    const fn is_stale(&self) -> bool {
        self.holders.is_empty() && !self.is_busy
    }

    /// The first byte of it on these pages whose page, of `page` bytes, none of those who have it has. Who takes that finds no such byte, so each
    /// page that somebody has somebody has had ever since it was pinned.
    fn left_behind(&self, pages: &Range<u64>, page: u64) -> Option<u64> {
        let (mut at, end) = (self.bytes.start.max(pages.start), self.bytes.end.min(pages.end));
        while at < end {
            let held = self.holders.iter().map(|holder| pages_of(holder, page));
            match held.filter(|held| held.contains(&at)).map(|held| held.end).max() {
                Some(end) => at = end,
                None => return Some(at),
            }
        }
        None
    }
}

/// A pin that nobody has any more, to be unpinned: its first byte, and where each part of it begins.
pub(crate) type Going = (u64, Vec<u64>);

/// All of them.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Pins(Vec<Pin>);

/// What whoever takes a range has.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Is pinned already, each by its first byte.
    pub(crate) shared: Vec<u64>,
    /// Is to be pinned now, in this order; for each it is to be [said](Pins::pinned) how that went.
    pub(crate) missing: Vec<Range<u64>>,
}

/// Why a range is not to be had now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotNow {
    /// Some of its pages are busy, to be asked again when they are not; or [stale](Pins::stale).
    Busy,
    /// From this byte on it is pinned with what others have, and has not been had itself all the time since: to be asked again when they have given
    /// that back.
    LeftBehind(u64),
}

/// The pages that a range touches.
pub(crate) fn pages_of(range: &Range<u64>, page: u64) -> Range<u64> {
    let page = page.max(1);
    let end = range.end.saturating_add(page - 1);
    range.start - range.start % page..end - end % page
}

impl Pins {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    /// Takes a range, of pages of `page` bytes each; nothing of it, if not all can be had.
    pub(crate) fn take(&mut self, range: &Range<u64>, page: u64) -> Result<Taken, NotNow> {
        let pages = pages_of(range, page);
        let there = || self.0.iter().filter(|pin| pin.touches(&pages));
        if there().any(|pin| pin.is_busy || pin.is_stale()) {
            return Err(NotNow::Busy);
        }
        if let Some(at) = there().filter_map(|pin| pin.left_behind(&pages, page)).min() {
            return Err(NotNow::LeftBehind(at));
        }
        let mut taken = Taken::default();
        let mut there: Vec<_> = self.0.iter_mut().filter(|pin| pin.touches(range)).collect();
        there.sort_by_key(|pin| pin.bytes.start);
        let mut at = range.start;
        for pin in there {
            pin.holders.push(range.clone());
            taken.shared.push(pin.bytes.start);
            if at < pin.bytes.start {
                taken.missing.push(at..pin.bytes.start);
            }
            at = pin.bytes.end;
        }
        if at < range.end {
            taken.missing.push(at..range.end);
        }
        let busy = |bytes: &Range<u64>| Pin {
            bytes: bytes.clone(),
            parts: Vec::new(),
            holders: vec![range.clone()],
            is_busy: true,
        };
        self.0.extend(taken.missing.iter().map(busy));
        Ok(taken)
    }

    /// How it went with one that was missing: it is pinned, in parts that begin here; if there are none, it is nobody's.
    pub(crate) fn pinned(&mut self, start: u64, parts: Vec<u64>) {
        let Some(at) = self.0.iter().position(|pin| pin.bytes.start == start) else { return };
        match self.0.get_mut(at) {
            Some(pin) if !parts.is_empty() => (pin.parts, pin.is_busy) = (parts, false),
            _ => _ = self.0.swap_remove(at),
        }
    }

    /// What on these pages nobody has, though it is pinned: to be unpinned now, and it is to be [said](Pins::unpinned) how that went.
    pub(crate) fn stale(&mut self, pages: &Range<u64>) -> Vec<Going> {
        let stale = self.0.iter_mut().filter(|pin| pin.touches(pages) && pin.is_stale());
        stale
            .map(|pin| {
                pin.is_busy = true;
                (pin.bytes.start, std::mem::take(&mut pin.parts))
            })
            .collect()
    }

    /// Gives one back, as it was had by who took `range`. If nobody has it any more: where its parts begin; they are to be unpinned, now or later, and
    /// it is to be [said](Pins::unpinned) how that went.
    pub(crate) fn give_back(&mut self, start: u64, range: &Range<u64>) -> Option<Vec<u64>> {
        let pin = self.0.iter_mut().find(|pin| pin.bytes.start == start)?;
        if let Some(at) = pin.holders.iter().position(|holder| holder == range) {
            pin.holders.swap_remove(at);
        }
        pin.is_busy |= pin.holders.is_empty();
        pin.is_busy.then(|| std::mem::take(&mut pin.parts))
    }

    /// How it went: it is unpinned, or these parts stay pinned until somebody wants the pages.
    pub(crate) fn unpinned(&mut self, start: u64, left: Option<Vec<u64>>) {
        let Some(at) = self.0.iter().position(|pin| pin.bytes.start == start) else { return };
        match (self.0.get_mut(at), left) {
            (Some(pin), Some(parts)) => (pin.parts, pin.is_busy) = (parts, false),
            _ => _ = self.0.swap_remove(at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 6;
    const ALL: usize = 6;
    const OWNERS: usize = 3;

    const BUSY: Result<Taken, NotNow> = Err(NotNow::Busy);

    /// What the driver has pinned, by page, and who has what.
    #[derive(Debug, Clone)]
    struct World {
        pins: Pins,
        pinned: [bool; ALL],
        /// What was nobody's for a time, though in a pin: something else may be mapped there.
        was_nobodys: [bool; ALL],
        /// The application's own.
        foreign: Option<u64>,
        held: [Option<(Range<u64>, Vec<u64>)>; OWNERS],
    }

    impl World {
        fn new(foreign: Option<u64>) -> Self {
            Self {
                pins: Pins::new(),
                pinned: [false; ALL],
                was_nobodys: [false; ALL],
                foreign,
                held: [const { None }; OWNERS],
            }
        }

        fn set(&mut self, pages: &Range<u64>, to: bool) {
            for page in pages.clone() {
                let pinned = &mut self.pinned[usize::try_from(page).unwrap()];
                assert_ne!(*pinned, to, "twice");
                *pinned = to;
            }
        }

        /// What of a range is not the application's.
        fn parts(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
            let Some(page) = self.foreign.filter(|page| pages.contains(page)) else {
                return vec![pages.clone()];
            };
            let mut parts = vec![pages.start..page, page + 1..pages.end];
            parts.retain(|part| !part.is_empty());
            parts
        }

        /// As the driver is asked: all that is not pinned, in as few parts as there are. Refused if others keep pinned what may have changed, and only
        /// then; whether it was.
        fn take(&mut self, owner: usize, pages: Range<u64>) -> bool {
            for (start, begun) in self.pins.stale(&pages) {
                assert_eq!(self.pins.take(&pages, 1), BUSY);
                self.unpin(start, begun, false);
            }
            let was_nobodys = |page: &u64| self.was_nobodys[usize::try_from(*page).unwrap()];
            let changed = pages.clone().find(was_nobodys);
            let taken = match self.pins.take(&pages, 1) {
                Ok(taken) => taken,
                Err(why) => {
                    assert_eq!(Some(why), changed.map(NotNow::LeftBehind), "{pages:?}");
                    return false;
                }
            };
            assert_eq!(changed, None, "{pages:?}");
            let mut held = taken.shared;
            for missing in &taken.missing {
                assert_eq!(self.pins.take(missing, 1), BUSY);
                let parts = self.parts(missing);
                parts.iter().for_each(|part| self.set(part, true));
                let begun: Vec<_> = parts.iter().map(|part| part.start).collect();
                if !begun.is_empty() {
                    held.push(missing.start);
                }
                self.pins.pinned(missing.start, begun);
            }
            self.held[owner] = Some((pages, held));
            true
        }

        fn give_back(&mut self, owner: usize, is_stuck: bool) {
            let Some((range, held)) = self.held[owner].take() else { return };
            for start in held {
                if let Some(begun) = self.pins.give_back(start, &range) {
                    self.unpin(start, begun, is_stuck);
                }
            }
            for page in range {
                let pin = self.pins.0.iter().find(|pin| pin.bytes.contains(&page));
                let Some(start) = pin.map(|pin| pin.bytes.start) else { continue };
                // Whoever has only the application's of it need not have the pin.
                let has = |(pages, held): &(Range<u64>, Vec<u64>)| {
                    pages.contains(&page) && held.contains(&start)
                };
                let is_nobodys = !self.held.iter().flatten().any(has);
                self.was_nobodys[usize::try_from(page).unwrap()] |= is_nobodys;
            }
        }

        fn unpin(&mut self, start: u64, begun: Vec<u64>, is_stuck: bool) {
            let pages = self.pins.0.iter().find(|pin| pin.bytes.start == start);
            let pages = pages.unwrap().bytes.clone();
            assert_eq!(self.pins.take(&pages, 1), BUSY);
            assert_eq!(self.pins.stale(&pages), [], "busy");
            let parts = self.parts(&pages);
            assert_eq!(begun, parts.iter().map(|part| part.start).collect::<Vec<_>>());
            if !is_stuck {
                parts.iter().for_each(|part| self.set(part, false));
                for page in pages.clone() {
                    self.was_nobodys[usize::try_from(page).unwrap()] = false;
                }
            }
            self.pins.unpinned(start, is_stuck.then_some(begun));
            if is_stuck {
                assert_eq!(self.pins.take(&pages, 1), BUSY, "what is pinned there may be gone");
            }
        }

        fn check(&self) {
            for (pages, _) in self.held.iter().flatten() {
                for page in pages.clone() {
                    let is_foreign = self.foreign == Some(page);
                    assert_ne!(self.pinned[usize::try_from(page).unwrap()], is_foreign, "{page}");
                    let was_nobodys = self.was_nobodys[usize::try_from(page).unwrap()];
                    assert!(is_foreign || !was_nobodys, "{page}");
                    let known = self.pins.0.iter().any(|pin| pin.bytes.contains(&page));
                    assert!(known || is_foreign, "page {page}");
                }
            }
            for (at, pin) in self.pins.0.iter().enumerate() {
                let held = self.held.iter().flatten();
                let users = held.filter(|(_, held)| held.contains(&pin.bytes.start)).count();
                assert!(pin.holders.len() == users && !pin.is_busy && !pin.bytes.is_empty());
                let later = &self.pins.0[at + 1..];
                let apart = |other: &Pin| {
                    pin.bytes.end <= other.bytes.start || other.bytes.end <= pin.bytes.start
                };
                assert!(later.iter().all(apart), "{:?}", self.pins);
            }
        }
    }

    /// Three owners, each with any range of six pages, take in turn, and give back in any order; a page may be the application's, and
    /// a GPU be stuck in between.
    #[test]
    fn pages_are_pinned_once_and_while_anybody_needs_them() {
        let ranges: Vec<_> =
            (0..PAGES).flat_map(|start| (start + 1..=PAGES).map(move |end| start..end)).collect();
        let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        for foreign in [None, Some(2)] {
            for a in &ranges {
                for b in &ranges {
                    for c in &ranges {
                        for order in orders {
                            for stuck in [None, Some(0), Some(1)] {
                                let mut world = World::new(foreign);
                                for (owner, pages) in [a, b, c].into_iter().enumerate() {
                                    assert!(world.take(owner, pages.clone()));
                                    world.check();
                                }
                                for (at, owner) in order.into_iter().enumerate() {
                                    world.give_back(owner, stuck == Some(at));
                                    world.check();
                                }
                                let left = world.pinned.iter().any(|pinned| *pinned);
                                assert!(!left || stuck.is_some());
                                assert_eq!(left, !world.pins.0.is_empty());
                                // The GPUs have gone on: who comes next has it pinned anew.
                                assert!(world.take(0, 0..PAGES));
                                world.check();
                                world.give_back(0, false);
                                assert_eq!(world.pinned, [false; ALL]);
                            }
                        }
                    }
                }
            }
        }
    }

    /// All programs of so many steps, in each of which an owner takes a range of a few pages, or gives back what it has.
    fn go_on(world: &World, steps: usize) {
        const FEW: u64 = 3;
        world.check();
        if steps == 0 {
            return;
        }
        for owner in 0..OWNERS {
            if world.held[owner].is_some() {
                for is_stuck in [false, true] {
                    let mut next = world.clone();
                    next.give_back(owner, is_stuck);
                    go_on(&next, steps - 1);
                }
                continue;
            }
            for (start, end) in (0..FEW).flat_map(|at| (at + 1..=FEW).map(move |end| (at, end))) {
                let mut next = world.clone();
                if next.take(owner, start..end) {
                    go_on(&next, steps - 1);
                }
            }
            // Those who have nothing are all alike.
            break;
        }
    }

    /// While others have some of a pin, who comes shares of it what somebody has had all the time since it was pinned, and nothing else.
    #[test]
    fn nobody_shares_what_was_nobodys_for_a_time() {
        [None, Some(1)].into_iter().for_each(|foreign| go_on(&World::new(foreign), 6));
    }

    #[test]
    fn what_is_left_behind_is_to_be_had_when_the_others_have_gone() {
        let mut pins = Pins::new();
        assert!(pins.take(&(0..6), 2).is_ok_and(|taken| taken.missing.first() == Some(&(0..6))));
        pins.pinned(0, vec![0]);
        let shared = Ok(Taken { shared: vec![0], missing: vec![] });
        assert_eq!(pins.take(&(3..6), 2), shared);
        assert_eq!(pins.take(&(0..6), 2), shared);
        assert_eq!(pins.give_back(0, &(0..6)), None);
        assert_eq!(pins.take(&(0..3), 2), shared, "one who had it has it still");
        assert_eq!(pins.give_back(0, &(0..3)), None);
        assert_eq!(pins.give_back(0, &(0..6)), None);
        for (range, at) in [(0..3, 0), (1..2, 0), (0..6, 0), (1..4, 0)] {
            assert_eq!(pins.take(&range, 2), Err(NotNow::LeftBehind(at)), "{range:?}");
        }
        // Whoever has a byte of a page has the page.
        assert_eq!(pins.take(&(2..3), 2), shared);
        assert_eq!(pins.give_back(0, &(2..3)), None);
        assert_eq!(pins.give_back(0, &(3..6)), Some(vec![0]));
        assert_eq!(pins.take(&(0..3), 2), BUSY);
        pins.unpinned(0, None);
        assert!(pins.take(&(0..3), 2).is_ok_and(|taken| taken.missing.first() == Some(&(0..3))));
    }

    /// Of a page that two ranges share each has its own bytes, but what is going keeps the other waiting.
    #[test]
    fn ranges_that_share_a_page_share_no_bytes_and_wait_for_each_other() {
        let mut pins = Pins::new();
        let missing = |taken: Result<Taken, NotNow>| {
            taken.map(|it| {
                let ends = it.missing.iter().map(|part| (part.start, part.end));
                (it.shared, ends.collect::<Vec<_>>())
            })
        };
        assert_eq!(missing(pins.take(&(10..20), 8)), Ok((vec![], vec![(10, 20)])));
        assert_eq!(pins.take(&(20..22), 8), BUSY, "it is being pinned");
        assert_eq!(missing(pins.take(&(24..26), 8)), Ok((vec![], vec![(24, 26)])));
        pins.pinned(10, vec![10]);
        assert_eq!(missing(pins.take(&(18..23), 8)), Ok((vec![10], vec![(20, 23)])));
        pins.pinned(20, vec![20]);
        assert_eq!(pins.give_back(10, &(18..23)), None);
        assert_eq!(pins.give_back(10, &(10..20)), Some(vec![10]));
        assert_eq!(pins.take(&(8..9), 8), BUSY, "what is pinned there may be gone");
        assert_eq!(missing(pins.take(&(7..8), 8)), Ok((vec![], vec![(7, 8)])));
    }

    #[test]
    fn a_range_touches_whole_pages() {
        for page in [1, 4, 4096] {
            for start in 0..20 {
                for end in start + 1..24 {
                    let pages = pages_of(&(start..end), page);
                    assert!(pages.start <= start && end <= pages.end);
                    assert!(start - pages.start < page && pages.end - end < page);
                    assert!(pages.start.is_multiple_of(page) && pages.end.is_multiple_of(page));
                }
            }
        }
    }
}
