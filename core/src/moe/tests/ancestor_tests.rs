//! The published formulas of another design (arXiv 2510.27656, `p2p-all-to-all`), written down anew from their
//! description: `G` groups of one rank, `L = ceil(E / G)` experts a rank, counts `C[g][e]`. There the rows of remote
//! sources come first and one's own last, so all is asked of the last rank, where the two orders are the same.

use super::*;

struct Published<'a> {
    counts: &'a [Vec<u32>],
    experts: usize,
    padding: usize,
}

impl Published<'_> {
    fn groups(&self) -> usize {
        self.counts.len()
    }

    fn local(&self) -> usize {
        self.experts.div_ceil(self.groups())
    }

    fn mine(&self, rank: usize) -> core::ops::Range<usize> {
        (rank * self.local()).min(self.experts)..((rank + 1) * self.local()).min(self.experts)
    }

    fn tokens_from_group(&self, rank: usize, group: usize) -> u32 {
        self.mine(rank).map(|expert| self.counts[group][expert]).sum()
    }

    fn src_group_offset(&self, rank: usize, group: usize) -> u32 {
        (0..group).map(|earlier| self.tokens_from_group(rank, earlier)).sum()
    }

    /// Padded index of the rows of a rank, in the order of `j`: by group, by expert, by token.
    fn padded_index(&self, rank: usize) -> Vec<u32> {
        let total =
            |expert| self.counts.iter().map(|counts| counts[expert] as usize).sum::<usize>();
        let mut next = vec![];
        let mut start = 0;
        for expert in self.mine(rank) {
            next.push(start);
            start += total(expert).div_ceil(self.padding) * self.padding;
        }
        let mut rows = Vec::new();
        for group in 0..self.groups() {
            for (at, expert) in self.mine(rank).enumerate() {
                for _ in 0..self.counts[group][expert] {
                    rows.push(next[at] as u32);
                    next[at] += 1;
                }
            }
        }
        rows
    }
}

/// Bytes of one of the two buffers, with `private` slots for each group.
fn buffer_bytes(world: u64, tokens: u64, private: Option<u64>, experts: u64, top_k: u64) -> u64 {
    let (local, padding) = (experts.div_ceil(world), 1);
    let even = (tokens * top_k).div_ceil(experts) as f64;
    let private = private.unwrap_or((even * 1.2) as u64 * local);
    let all = tokens * world;
    let rows = (all * top_k + local * (padding - 1)).min(all * local).max(local * padding);
    let rows = private * world + rows.next_multiple_of(padding);
    let (out, back) = (7168 + 56 * 4 + 16, 7168 * 2);
    rows * std::cmp::max(out, back)
}

#[test]
fn rows_and_offsets_are_those_of_the_published_formulas() {
    let mut random = Random(20_251_122);
    for case in 0..400_u32 {
        let (world, top_k) = (1 + random.below(8), 1 + random.below(4));
        let local = 1 + random.below(5);
        let experts = (world * local).max(top_k);
        let (local, padding) = (experts.div_ceil(world), 1 + random.below(9));
        let firsts: Vec<_> = (0..=world).map(|rank| (rank * local).min(experts)).collect();
        let placement = Placement::new(&firsts).unwrap();
        let mut source = || {
            let tokens = random.below(12);
            random.choices(tokens, top_k, experts)
        };
        let sources: Vec<_> = (0..world).map(|_| source()).collect();
        let routings: Vec<_> =
            sources.iter().map(|source| Routing::new(source, top_k, experts).unwrap()).collect();
        let mut counts = vec![vec![0; experts as usize]; world as usize];
        for (routing, counts) in routings.iter().zip(&mut counts) {
            routing.count_experts(0..experts, counts).unwrap();
        }
        let published =
            Published { counts: &counts, experts: experts as usize, padding: padding as usize };
        let me = world - 1;
        let mine = placement.experts_of(me);
        assert_eq!(mine.len(), published.mine(me as usize).len());
        let mut totals = vec![0; mine.len()];
        for routing in &routings {
            routing.count_experts(mine.clone(), &mut totals).unwrap();
        }
        let (mut offsets, mut given) = (vec![0; mine.len() + 1], vec![0; mine.len()]);
        let mut layout =
            Layout::new(mine, &totals, some(padding), &mut offsets, &mut given).unwrap();
        let theirs = published.padded_index(me as usize);
        for (group, routing) in routings.iter().enumerate() {
            let mut rows = Vec::new();
            layout
                .place(routing, |arrival| rows.push((arrival.local_expert, arrival.row)))
                .unwrap();
            // `j` runs by expert, and in an expert by token.
            rows.sort_unstable();
            let from = published.src_group_offset(me as usize, group) as usize;
            let many = published.tokens_from_group(me as usize, group) as usize;
            let rows: Vec<_> = rows.into_iter().map(|(_, row)| row).collect();
            assert_eq!(rows, theirs[from..from + many], "case {case}, from {group}");
        }
    }
}

/// Their sizes come out as they are known to (GiB of each of two buffers), and ours together are smaller than one.
#[test]
fn buffers_are_smaller_than_by_the_published_formulas() {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let known = [
        (8, 128, Some(256), 0.14),
        (16, 128, Some(256), 0.27),
        (32, 128, Some(256), 0.55),
        (64, 128, Some(256), 0.66),
        (8, 4096, None, 4.0),
        (16, 4096, None, 7.5),
        (32, 4096, None, 14.5),
        (64, 4096, None, 14.5),
    ];
    let mut firsts = [0; 65];
    for (world, tokens, private, expected) in known {
        let theirs = buffer_bytes(world, tokens, private, 256, 8);
        assert!((gib(theirs) - expected).abs() < 0.06, "{world} {tokens} {}", gib(theirs));
        let placement = Placement::even(256, &mut firsts[..=world as usize]).unwrap();
        let (tokens, chunk) = (tokens as u32, tokens.min(512) as u32);
        let ours = Sizes::new(&deepseek(tokens, chunk, 2), &placement).unwrap();
        assert!(ours.total_bytes < theirs, "{world} {tokens}: {ours:?}");
        // Small enough to stand beside a model.
        assert!(ours.total_bytes <= 2 << 30);
    }
}
