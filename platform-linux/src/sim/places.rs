//! Where the bytes of a message lie: in one range on either side, or in the pages of a run.
//!
//! A message's bytes are numbered from 0, a run's page after page, whatever their addresses; what is late,
//! torn or lost of a message is a range of these numbers.

use std::sync::Arc;

use immwire_core::group::WorkRequest;

use crate::provider::Sink;

/// Where the bytes of one message come from and go to.
#[derive(Debug, Clone)]
pub(super) enum Places {
    /// From one address on to another.
    Range { src: u64, dst: u64 },
    /// Pages of so many bytes, each from its address to its address.
    Pages { bytes: u64, pages: Arc<[(u64, u64)]> },
}

impl Places {
    /// Where the bytes of `work` lie; `None` if it is a run of which the engine tells nothing, or another length
    /// than its pages have.
    pub(super) fn of<S: Sink>(work: &WorkRequest, sink: &S) -> Option<Self> {
        let count = usize::try_from(work.run.count).ok()?;
        if count == 0 {
            return Some(Self::Range { src: work.src, dst: work.dst });
        }
        let (mut src, mut dst) = (vec![0; count], vec![0; count]);
        let run = sink.page_run(work, &mut src, &mut dst)?;
        let at = |base: u64, stride: u64, n: u32| base.checked_add(stride.checked_mul(n.into())?);
        let page = |(src, dst): (&u32, &u32)| {
            let src = at(run.src_base, run.src_stride, *src)?;
            Some((src, at(run.dst_base, run.dst_stride, *dst)?))
        };
        let pages = src.iter().zip(&dst).map(page).collect::<Option<Arc<[_]>>>()?;
        let bytes = run.page_bytes;
        let all = bytes.checked_mul(work.run.count.into()) == Some(work.len);
        all.then_some(Self::Pages { bytes, pages })
    }

    /// Source, destination and length of what lies in bytes `start..end` of the message, in order.
    pub(super) fn ranges(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, u64)> {
        let mut at = start;
        std::iter::from_fn(move || {
            let left = end.checked_sub(at).filter(|left| *left > 0)?;
            let (src, dst, within, room) = match self {
                Self::Range { src, dst } => (*src, *dst, at, left),
                Self::Pages { bytes, pages } => {
                    let (page, within) = (at.checked_div(*bytes)?, at.checked_rem(*bytes)?);
                    let &(src, dst) = pages.get(usize::try_from(page).ok()?)?;
                    (src, dst, within, bytes.saturating_sub(within))
                }
            };
            let len = left.min(room);
            at = at.saturating_add(len);
            Some((src.saturating_add(within), dst.saturating_add(within), len))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every part of every small message: all of its bytes, each from its place to its place, in order.
    #[test]
    fn every_part_of_a_message_lies_where_its_pages_do() {
        for (count, bytes) in (0..4_u64).flat_map(|count| (1..4).map(move |bytes| (count, bytes))) {
            let page = |n: u64| (100 + 7 * (n * 3 % 4), 500 + 9 * (n * 5 % 3));
            let range = Places::Range { src: 100, dst: 500 };
            let pages = Places::Pages { bytes, pages: (0..count).map(page).collect() };
            let len = count * bytes;
            for (start, end) in (0..=len).flat_map(|end| (0..=end).map(move |start| (start, end))) {
                let spread = |places: &Places| -> Vec<(u64, u64)> {
                    let ranges = places.ranges(start, end);
                    ranges
                        .flat_map(|(src, dst, len)| (0..len).map(move |i| (src + i, dst + i)))
                        .collect()
                };
                let expected: Vec<_> = (start..end).map(|i| (100 + i, 500 + i)).collect();
                assert_eq!(spread(&range), expected);
                let in_page =
                    |i: u64| (page(i / bytes).0 + i % bytes, page(i / bytes).1 + i % bytes);
                assert_eq!(spread(&pages), (start..end).map(in_page).collect::<Vec<_>>());
            }
        }
    }
}
