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
//! 3. What cannot be counted together, or would be copied slower then, is left as it was.

use crate::plan::RunLayout;

/// Where pages are: that of number `n` begins at `base + n * step`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Scale {
    base: u64,
    step: u64,
}

/// The smallest and the largest of some numbers.
#[derive(Debug, Clone, Copy)]
struct Ends {
    least: u32,
    most: u32,
}

impl Ends {
    /// O(numbers). Of none: of the first page.
    fn of(numbers: &[u32]) -> Self {
        let first = numbers.first().copied().unwrap_or(0);
        let all = Self { least: first, most: first };
        let both = |Self { least, most }: Self, number: &u32| Self {
            least: least.min(*number),
            most: most.max(*number),
        };
        numbers.iter().fold(all, both)
    }
}

/// Numbers below the lowest page, where there are so many: a page that comes later may lie before all others.
const BELOW: u64 = 1 << 30;

/// What pages lie on decides how they are copied: by a GPU, units of 16 bytes are quicker than others, and of 128 quicker still.
pub const GRIDS: [u64; 2] = [16, 128];

impl Scale {
    /// Where the page of this number is.
    fn address(self, number: u32) -> i128 {
        i128::from(self.base) + i128::from(self.step) * i128::from(number)
    }

    /// How many steps the page of that number on another scale is from the base of this one.
    fn number(self, other: Self, number: u32) -> Option<i128> {
        let apart = other.address(number) - i128::from(self.base);
        let step = i128::from(self.step);
        (apart.checked_rem(step)? == 0).then_some(apart / step)
    }

    /// Whether all pages of `other` between these numbers have numbers here.
    fn holds(self, other: Self, ends: Ends) -> bool {
        let has = |number| self.number(other, number).is_some_and(|it| u32::try_from(it).is_ok());
        let is_multiple = || other.step.checked_rem(self.step) == Some(0);
        self == other || (is_multiple() && has(ends.least) && has(ends.most))
    }

    /// The longest step, a power of two, by which both can be counted from one place, between these numbers.
    fn common(self, ends: Ends, other: Self, other_ends: Ends) -> Option<Self> {
        let lowest = self.address(ends.least).min(other.address(other_ends.least));
        let lowest = u64::try_from(lowest).ok()?;
        let bits = self.step | other.step | self.base.abs_diff(other.base);
        let step = bits & bits.wrapping_neg();
        let below = lowest.checked_div(step)?.min(BELOW);
        let all = Self { base: lowest - below * step, step };
        (all.holds(self, ends) && all.holds(other, other_ends)).then_some(all)
    }

    /// Numbers that count on this scale, counted on `to`, which holds their pages.
    fn recount(self, to: Self, numbers: &mut [u32]) {
        if self == to {
            return;
        }
        let (Some(first), Some(times)) = (to.number(self, 0), self.step.checked_div(to.step))
        else {
            return;
        };
        // Modulo 2^32 as well as without: the sum is no more, nor less than nothing.
        let (first, times) = (low(first), low(i128::from(times)));
        for number in numbers {
            *number = number.wrapping_mul(times).wrapping_add(first);
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "modulo 2^32")]
const fn low(word: i128) -> u32 {
    word as u32
}

/// How many of the [`GRIDS`] all pages lie on.
fn grids(run: &RunLayout) -> usize {
    let bits = run.src_base | run.src_stride | run.dst_base | run.dst_stride | run.page_bytes;
    GRIDS.iter().filter(|grid| bits.is_multiple_of(**grid)).count()
}

/// Two lists of pages, those that there are and the next ones, as one: the layout of both, on which all of their numbers count now. `None`, and
/// nothing has changed: they cannot be one list, or the one would make the other slower. O(pages), and mostly O(next pages): the numbers that there
/// are seldom change.
pub fn join(
    (all, next): (RunLayout, RunLayout),
    (sources, next_sources): (&mut [u32], &mut [u32]),
    (targets, next_targets): (&mut [u32], &mut [u32]),
) -> Option<RunLayout> {
    if all.page_bytes != next.page_bytes || grids(&all) != grids(&next) {
        return None;
    }
    let common = |all: Scale, next: Scale, numbers: &[u32], next_numbers: &[u32]| {
        let ends = Ends::of(next_numbers);
        // Mostly; then those that there are need not be looked at.
        if all.holds(next, ends) { Some(all) } else { all.common(Ends::of(numbers), next, ends) }
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
        // Tensors a few pages long, each at some multiple of 512 bytes, in all orders: however fine the step has become, there is room.
        let tensors = [7, 4, 2, 0, 13, 1].map(|at: u64| 0x7e00_0000_0000 + 512 * at + (at << 14));
        for order in 0..6_usize.pow(6) {
            let order = [1, 6, 36, 216, 1296, 7776].map(|unit| order / unit % 6);
            let list = |n: &usize| {
                let run = layout((tensors[*n], 4096), (tensors[5 - n], 8192));
                (run, Vec::from([0, 1, 2]), Vec::from([2, 0, 1]))
            };
            assert_eq!(joined(&order.iter().map(list).collect::<Vec<_>>()), order.len());
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
            let at = |offset: u64| layout(((1 << 20) + offset, 4096), (1 << 20, 4096));
            let run = join((at(1), at(1 + apart)), (&mut [0], &mut [0]), (&mut [1], &mut [2]));
            assert_eq!(run.is_some(), may, "{run:?}");
        }
        // What lies on every 128th byte is not made to wait for what does not; likes are joined.
        for (one, other, may) in [
            (8, 0, false),
            (16, 0, false),
            (16, 8, false),
            (24, 8, true),
            (48, 16, true),
            (384, 0, true),
        ] {
            let at = |offset: u64| layout(((1 << 20) + offset, 4096), (1 << 20, 4096));
            let run = join((at(one), at(other)), (&mut [1], &mut [1]), (&mut [1], &mut [2]));
            assert_eq!(run.is_some(), may, "{one} {other}");
        }
        // One place for all numbers.
        let still = layout((1 << 20, 0), (1 << 20, 4096));
        let mut later = still;
        later.dst_base += 4096;
        let mut numbers = [5, 6];
        let run = join((still, later), (&mut numbers, &mut [9, 9]), (&mut [1, 2], &mut [2, 3]));
        assert_eq!(run.map(|run| (run.src_base, run.src_stride)), Some((1 << 20, 0)));
        assert_eq!(numbers, [5, 6]);
    }
}
