//! Lists of page numbers that count from different places, told of as one list.
//!
//! A list says where pages are by a base, a stride, and a number for each. Those of two layers of a cache count from two places, those
//! of two tensors may have strides of their own. If all that lies between their pages is multiples of one step, all of them can be counted from
//! one place by that step, and a device copies them together: runs of several transfers, that come in turn, are one copy.
//!
//! Knows neither whose the pages are nor whether there are such pages.
//!
//! # Invariants
//!
//! 1. Counted anew, every page is where it was.
//! 2. No number is more than 32 bits have.
//! 3. What cannot be counted together is left as it was.

use crate::plan::RunLayout;

/// Where pages are: that of number `n` begins at `base + n * step`, modulo 2^64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Scale {
    base: u64,
    step: u64,
}

/// Numbers below the lowest page, where there are so many: a page that comes later may lie before all others.
const BELOW: u64 = 1 << 30;

impl Scale {
    /// Where the other scale begins on this one, and how many steps of this one its step is.
    fn along(self, other: Self) -> Option<(u64, u64)> {
        let apart = other.base.checked_sub(self.base)?;
        let is_multiple =
            apart.checked_rem(self.step)? == 0 && other.step.checked_rem(self.step)? == 0;
        is_multiple.then_some((apart / self.step, other.step / self.step))
    }

    /// Whether all pages of `other` up to that of number `largest` have numbers here.
    fn holds(self, other: Self, largest: u32) -> bool {
        let last = self
            .along(other)
            .and_then(|(first, times)| times.checked_mul(u64::from(largest))?.checked_add(first));
        last.is_some_and(|last| u32::try_from(last).is_ok())
    }

    /// The longest step by which both can be counted from one place, up to these numbers.
    fn common(self, largest: u32, other: Self, other_largest: u32) -> Option<Self> {
        let lowest = self.base.min(other.base);
        let bits = self.step | other.step | self.base.abs_diff(other.base);
        let step = bits & bits.wrapping_neg();
        let below = lowest.checked_div(step)?.min(BELOW);
        let all = Self { base: lowest - below * step, step };
        (all.holds(self, largest) && all.holds(other, other_largest)).then_some(all)
    }

    /// Numbers that count on this scale, counted on `to`, which holds their pages.
    fn recount(self, to: Self, numbers: &mut [u32]) {
        if self == to {
            return;
        }
        let Some((first, times)) = to.along(self) else { return };
        let (first, times) = (low(first), low(times));
        for number in numbers {
            // Modulo 2^32 as well as without, as the sum has no more bits.
            *number = number.wrapping_mul(times).wrapping_add(first);
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "modulo 2^32")]
const fn low(word: u64) -> u32 {
    word as u32
}

fn largest(numbers: &[u32]) -> u32 {
    numbers.iter().fold(0, |largest, number| largest.max(*number))
}

/// Two lists of pages, those that there are and the next ones, as one: the layout of both, on which all of their numbers count now. `None`, and
/// nothing has changed: they cannot be one list. O(pages), and mostly O(next pages): the numbers that there are seldom change.
pub fn join(
    (all, next): (RunLayout, RunLayout),
    (sources, next_sources): (&mut [u32], &mut [u32]),
    (targets, next_targets): (&mut [u32], &mut [u32]),
) -> Option<RunLayout> {
    if all.page_bytes != next.page_bytes {
        return None;
    }
    let common = |all: Scale, next: Scale, numbers: &[u32], next_numbers: &[u32]| {
        let most = largest(next_numbers);
        // Mostly; then those that there are need not be looked at.
        if all.holds(next, most) { Some(all) } else { all.common(largest(numbers), next, most) }
    };
    let sides = |run: &RunLayout| {
        let src = Scale { base: run.src_base, step: run.src_stride };
        [src, Scale { base: run.dst_base, step: run.dst_stride }]
    };
    let ([src, dst], [next_src, next_dst]) = (sides(&all), sides(&next));
    let new_src = common(src, next_src, sources, next_sources)?;
    let new_dst = common(dst, next_dst, targets, next_targets)?;
    src.recount(new_src, sources);
    next_src.recount(new_src, next_sources);
    dst.recount(new_dst, targets);
    next_dst.recount(new_dst, next_targets);
    Some(RunLayout {
        src_base: new_src.base,
        src_stride: new_src.step,
        dst_base: new_dst.base,
        dst_stride: new_dst.step,
        page_bytes: all.page_bytes,
    })
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::vec::Vec;

    fn layout(src: (u64, u64), dst: (u64, u64)) -> RunLayout {
        let ((src_base, src_stride), (dst_base, dst_stride)) = (src, dst);
        RunLayout { src_base, src_stride, dst_base, dst_stride, page_bytes: 4096 }
    }

    /// Where the pages are, on both sides.
    fn places(run: &RunLayout, sources: &[u32], targets: &[u32]) -> Vec<(u64, u64)> {
        let at =
            |base: u64, stride: u64, n: u32| base.wrapping_add(stride.wrapping_mul(u64::from(n)));
        let both = sources.iter().zip(targets);
        both.map(|(n, m)| {
            (at(run.src_base, run.src_stride, *n), at(run.dst_base, run.dst_stride, *m))
        })
        .collect()
    }

    /// Joins lists one after the other, as they come; how many were joined.
    fn joined(lists: &[(RunLayout, Vec<u32>, Vec<u32>)]) -> usize {
        let (mut all, mut sources, mut targets) = lists[0].clone();
        let mut expected = places(&all, &sources, &targets);
        for (n, (next, from, to)) in lists.iter().enumerate().skip(1) {
            let wanted = places(next, from, to);
            let (mut from, mut to) = (from.clone(), to.clone());
            let before = (sources.clone(), targets.clone(), from.clone(), to.clone());
            let run = join((all, *next), (&mut sources, &mut from), (&mut targets, &mut to));
            let Some(run) = run else {
                assert_eq!(before, (sources, targets, from, to), "nothing has changed");
                return n;
            };
            sources.extend(from);
            targets.extend(to);
            (all, expected) = (run, [expected, wanted].concat());
            assert_eq!(places(&all, &sources, &targets), expected, "{lists:?}");
        }
        lists.len()
    }

    /// All of three lists with bases, strides and numbers around those where something changes: whatever becomes one list has every page where
    /// it was.
    #[test]
    fn every_page_stays_where_it_is() {
        let base = 0x7f00_0000_0000;
        let bases =
            [0, 12, base, base + 4096, base - 4096, base + (1 << 42), base + 8, base - (1 << 45)];
        let strides = [0, 4, 4096, 61 * 4096, 1 << 33];
        let numbers = [[0, 1], [7, 0], [u32::MAX, 1 << 29]];
        let mut sides = Vec::new();
        for (base, stride) in bases.iter().flat_map(|base| strides.map(|stride| (*base, stride))) {
            sides.extend(numbers.map(|numbers| (base, stride, numbers)));
        }
        let usual =
            (layout((base, 4096), (base, 4096)), Vec::from([3_u32, 9]), Vec::from([5_u32, 2]));
        let (mut one, mut both) = (0_u32, 0_u32);
        for a in &sides {
            for b in &sides {
                let list = |side: &(u64, u64, [u32; 2])| {
                    let (base, stride, numbers) = *side;
                    (layout((base, stride), (1 << 40, 8192)), numbers.to_vec(), Vec::from([1, 4]))
                };
                match joined(&[list(a), list(b), usual.clone()]) {
                    1 => one += 1,
                    2 => both += 1,
                    _ => {}
                }
                // And on the other side.
                let turned = |(run, from, to): (RunLayout, Vec<u32>, Vec<u32>)| {
                    let (src, dst) =
                        ((run.dst_base, run.dst_stride), (run.src_base, run.src_stride));
                    (layout(src, dst), to, from)
                };
                joined(&[turned(list(a)), turned(list(b)), usual.clone()]);
            }
        }
        assert!(one > 1000 && both > 1000, "{one} {both} of {}", sides.len() * sides.len());
    }

    /// The layers of caches, in any order: one list, whose numbers change once.
    #[test]
    fn layers_are_one_list() {
        let page: u64 = 4096;
        // Each layer of a range, and all layers of each page side by side.
        let apart = |layer: u64| (0x7f00_0000_0000 + layer * (1 << 30), page);
        let side_by_side =
            |layer: u64, layers: u64| (0x7e00_0000_0000 + layer * page, layers * page);
        for (order, layers) in [(1_u64, 61), (60, 61), (7, 61), (7, 64)] {
            let list = |n: u64| {
                let layer = n * order % layers;
                let pages: Vec<u32> = (0..255).map(|page| page * 7 % 255).collect();
                (layout(apart(layer), side_by_side(layer, layers)), pages.clone(), pages)
            };
            let all: Vec<_> = (0..layers).map(list).collect();
            assert_eq!(joined(&all), all.len());
        }
        let both = |layer: u64| layout(apart(layer), side_by_side(layer, 61));
        // What was counted on once holds what comes later.
        let two = join((both(9), both(3)), (&mut [1], &mut [2]), (&mut [1], &mut [2])).unwrap();
        let mut numbers = [1, 2];
        let three = join((two, both(0)), (&mut numbers, &mut [4]), (&mut [1], &mut [4])).unwrap();
        assert_eq!((three, numbers), (two, [1, 2]));
    }

    #[test]
    fn pages_of_other_sizes_and_of_nowhere_near_are_another_list() {
        let one = layout((1 << 20, 4096), (1 << 20, 4096));
        let mut other = one;
        other.page_bytes = 8192;
        assert_eq!(join((one, other), (&mut [1], &mut [1]), (&mut [1], &mut [1])), None);
        // A step of one byte reaches 4 GiB.
        for (apart, may) in [((2 << 30) + 1, true), ((5 << 30) + 1, false)] {
            let far = layout(((1 << 20) + apart, 4096), (1 << 20, 4096));
            let run = join((one, far), (&mut [0], &mut [0]), (&mut [1], &mut [2]));
            assert_eq!(run.is_some(), may, "{run:?}");
        }
        // The same place for every number.
        let still = layout((1 << 20, 0), (1 << 20, 4096));
        let mut numbers = [5, 6];
        assert_eq!(join((still, still), (&mut numbers, &mut [9]), (&mut [1], &mut [2])), None);
        assert_eq!(numbers, [5, 6]);
    }
}
