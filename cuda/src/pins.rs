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
//!
//! The tests below go through all short programs of three owners over a few bytes.

use std::ops::Range;

/// A range that was taken in one go.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pin {
    bytes: Range<u64>,
    /// Where each part of it begins that the driver was told to pin: one, if none of it is the application's.
    parts: Vec<u64>,
    /// None, and it is not busy: it could not be unpinned.
    users: usize,
    /// It is being pinned, or unpinned, or is to be.
    is_busy: bool,
}

impl Pin {
    fn touches(&self, range: &Range<u64>) -> bool {
        self.bytes.start < range.end && range.start < self.bytes.end
    }

    const fn is_stale(&self) -> bool {
        self.users == 0 && !self.is_busy
    }
}

/// A pin that nobody has any more, to be unpinned: its first byte, and where each part of it begins.
pub(crate) type Going = (u64, Vec<u64>);

/// All of them.
#[derive(Debug)]
pub(crate) struct Pins(Vec<Pin>);

/// What whoever takes a range has.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Is pinned already, each by its first byte.
    pub(crate) shared: Vec<u64>,
    /// Is to be pinned now, in this order; for each it is to be [said](Pins::pinned) how that went.
    pub(crate) missing: Vec<Range<u64>>,
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

    /// Takes a range. `None`: some of its pages, of `page` bytes each, are busy, to be asked again when they are not; or [stale](Pins::stale).
    pub(crate) fn take(&mut self, range: &Range<u64>, page: u64) -> Option<Taken> {
        let pages = pages_of(range, page);
        if self.0.iter().any(|pin| pin.touches(&pages) && (pin.is_busy || pin.is_stale())) {
            return None;
        }
        let mut taken = Taken::default();
        let mut there: Vec<_> = self.0.iter_mut().filter(|pin| pin.touches(range)).collect();
        there.sort_by_key(|pin| pin.bytes.start);
        let mut at = range.start;
        for pin in there {
            pin.users += 1;
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
            users: 1,
            is_busy: true,
        };
        self.0.extend(taken.missing.iter().map(busy));
        Some(taken)
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

    /// Gives one back. If nobody uses it any more: where its parts begin; they are to be unpinned, now or later, and it is to be
    /// [said](Pins::unpinned) how that went.
    pub(crate) fn give_back(&mut self, start: u64) -> Option<Vec<u64>> {
        let pin = self.0.iter_mut().find(|pin| pin.bytes.start == start)?;
        pin.users = pin.users.saturating_sub(1);
        pin.is_busy |= pin.users == 0;
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

    /// What the driver has pinned, by page, and who has what.
    #[derive(Debug)]
    struct World {
        pins: Pins,
        pinned: [bool; ALL],
        /// The application's own.
        foreign: Option<u64>,
        held: [Option<(Range<u64>, Vec<u64>)>; OWNERS],
    }

    impl World {
        fn new(foreign: Option<u64>) -> Self {
            Self {
                pins: Pins::new(),
                pinned: [false; ALL],
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

        /// As the driver is asked: all that is not pinned, in as few parts as there are.
        fn take(&mut self, owner: usize, pages: Range<u64>) {
            for (start, begun) in self.pins.stale(&pages) {
                assert_eq!(self.pins.take(&pages, 1), None, "busy");
                self.unpin(start, begun, false);
            }
            let taken = self.pins.take(&pages, 1).unwrap();
            let mut held = taken.shared;
            for missing in &taken.missing {
                assert_eq!(self.pins.take(missing, 1), None, "busy");
                let parts = self.parts(missing);
                parts.iter().for_each(|part| self.set(part, true));
                let begun: Vec<_> = parts.iter().map(|part| part.start).collect();
                if !begun.is_empty() {
                    held.push(missing.start);
                }
                self.pins.pinned(missing.start, begun);
            }
            self.held[owner] = Some((pages, held));
        }

        fn give_back(&mut self, owner: usize, is_stuck: bool) {
            let Some((_, held)) = self.held[owner].take() else { return };
            for start in held {
                if let Some(begun) = self.pins.give_back(start) {
                    self.unpin(start, begun, is_stuck);
                }
            }
        }

        fn unpin(&mut self, start: u64, begun: Vec<u64>, is_stuck: bool) {
            let pages = self.pins.0.iter().find(|pin| pin.bytes.start == start);
            let pages = pages.unwrap().bytes.clone();
            assert_eq!(self.pins.take(&pages, 1), None, "busy");
            assert_eq!(self.pins.stale(&pages), [], "busy");
            let parts = self.parts(&pages);
            assert_eq!(begun, parts.iter().map(|part| part.start).collect::<Vec<_>>());
            if !is_stuck {
                parts.iter().for_each(|part| self.set(part, false));
            }
            self.pins.unpinned(start, is_stuck.then_some(begun));
            if is_stuck {
                assert_eq!(self.pins.take(&pages, 1), None, "what is pinned there may be gone");
            }
        }

        fn check(&self) {
            for (pages, _) in self.held.iter().flatten() {
                for page in pages.clone() {
                    let is_foreign = self.foreign == Some(page);
                    assert_ne!(self.pinned[usize::try_from(page).unwrap()], is_foreign, "{page}");
                    let known = self.pins.0.iter().any(|pin| pin.bytes.contains(&page));
                    assert!(known || is_foreign, "page {page}");
                }
            }
            for (at, pin) in self.pins.0.iter().enumerate() {
                let held = self.held.iter().flatten();
                let users = held.filter(|(_, held)| held.contains(&pin.bytes.start)).count();
                assert!(pin.users == users && !pin.is_busy && !pin.bytes.is_empty());
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
                                    world.take(owner, pages.clone());
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
                                world.take(0, 0..PAGES);
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

    /// Of a page that two ranges share each has its own bytes, but what is going keeps the other waiting.
    #[test]
    fn ranges_that_share_a_page_share_no_bytes_and_wait_for_each_other() {
        let mut pins = Pins::new();
        let missing = |taken: Option<Taken>| {
            taken.map(|it| {
                let ends = it.missing.iter().map(|part| (part.start, part.end));
                (it.shared, ends.collect::<Vec<_>>())
            })
        };
        assert_eq!(missing(pins.take(&(10..20), 8)), Some((vec![], vec![(10, 20)])));
        assert_eq!(pins.take(&(20..22), 8), None, "it is being pinned");
        assert_eq!(missing(pins.take(&(24..26), 8)), Some((vec![], vec![(24, 26)])));
        pins.pinned(10, vec![10]);
        assert_eq!(missing(pins.take(&(18..23), 8)), Some((vec![10], vec![(20, 23)])));
        pins.pinned(20, vec![20]);
        assert_eq!(pins.give_back(10), None);
        assert_eq!(pins.give_back(10), Some(vec![10]));
        assert_eq!(pins.take(&(8..9), 8), None, "what is pinned there may be gone");
        assert_eq!(missing(pins.take(&(7..8), 8)), Some((vec![], vec![(7, 8)])));
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
