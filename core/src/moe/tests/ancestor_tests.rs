//! The published formulas of another design (arXiv 2510.27656, `p2p-all-to-all`), written down anew from their
//! description: `G` groups of one rank, each on a node of its own, `L = ceil(E / G)` experts a rank, counts `C[g][e]`, and `j`
//! the number of a token of a group for a rank, by expert. There a token travels once for each expert that it chose, so all is
//! compared in choices; their rows of remote sources come first and one's own last, ours lie by source ([`Published::row_here`]).
//!
//! No counterpart have the places of what overflows the private slots: here further chunks take those same slots, later. Nor bit 31
//! of a place, which says that it is in a peer's memory, strides, and writes over several NICs: the core knows no memory and no
//! transport. The number of writes is compared where both send one or two a peer: theirs depends on the routes, ours does not.

use core::cmp::Ordering;
use std::collections::BTreeMap;

use super::*;

/// What stands in a formula with a name of its own is a function of that name.
struct Published {
    counts: Vec<Vec<u32>>,
    experts: usize,
    padding: u32,
}

impl Published {
    fn new(world: &World) -> Self {
        let experts = world.experts() as usize;
        let count = |choices: &Vec<i32>| {
            let mut counts = vec![0; experts];
            for choice in choices.iter().filter(|choice| **choice != DROPPED) {
                counts[*choice as usize] += 1;
            }
            counts
        };
        let counts = world.sources.iter().map(count).collect();
        Self { counts, experts, padding: world.padding }
    }

    fn groups(&self) -> usize {
        self.counts.len()
    }

    /// The first expert of a rank, or of the one after the last.
    fn first(&self, rank: usize) -> usize {
        (rank * self.experts.div_ceil(self.groups())).min(self.experts)
    }

    fn mine(&self, rank: usize) -> core::ops::Range<usize> {
        self.first(rank)..self.first(rank + 1)
    }

    fn tokens_from_group(&self, rank: usize, group: usize) -> u32 {
        self.mine(rank).map(|expert| self.counts[group][expert]).sum()
    }

    fn src_group_offset(&self, rank: usize, group: usize) -> u32 {
        (0..group).map(|earlier| self.tokens_from_group(rank, earlier)).sum()
    }

    /// Where the part for a rank begins in a group's order by expert; at that rank it is `dst_group_offset` of the group.
    fn dispatch_src_offset(&self, group: usize, rank: usize) -> u32 {
        self.counts[group][..self.first(rank)].iter().sum()
    }

    /// The place of token `j` of a group in the receive buffer, if it is private.
    fn private_slot(private: u32, group: u32, j: u32) -> Option<u32> {
        (j < private).then_some(private * group + j)
    }

    /// Padded index of the rows of a rank: of each group the row and the expert of each `j`.
    fn padded_index(&self, rank: usize) -> Vec<Vec<(u32, usize)>> {
        let total = |expert| self.counts.iter().map(|counts| counts[expert]).sum::<u32>();
        let (mut next, mut start) = (vec![0; self.experts], 0);
        for expert in self.mine(rank) {
            next[expert] = start;
            start += total(expert).div_ceil(self.padding) * self.padding;
        }
        let mut rows = vec![Vec::new(); self.groups()];
        let remote = (0..self.groups()).filter(|group| *group != rank);
        for group in remote.chain([rank]) {
            for expert in self.mine(rank) {
                for _ in 0..self.counts[group][expert] {
                    rows[group].push((next[expert], expert));
                    next[expert] += 1;
                }
            }
        }
        rows
    }

    /// Where a row of theirs lies here: a rank's own rows of an expert before those of higher ranks, and not after them.
    fn row_here(&self, rank: usize, group: usize, (row, expert): (u32, usize)) -> u32 {
        match group.cmp(&rank) {
            Ordering::Less => row,
            Ordering::Greater => row + self.counts[rank][expert],
            Ordering::Equal => {
                row - self.counts[rank + 1..].iter().map(|counts| counts[expert]).sum::<u32>()
            }
        }
    }

    /// Writes with immediate that come of one remote group with so many tokens in dispatch.
    fn dispatch_imms_from(tokens: u32, private: u32, nets: u32) -> u32 {
        1 + if tokens > private { nets } else { 0 }
    }

    fn dispatch_imms(&self, rank: usize, private: u32, nets: u32) -> u32 {
        let remote = (0..self.groups()).filter(|group| *group != rank);
        let tokens = remote.map(|group| self.tokens_from_group(rank, group));
        tokens.map(|tokens| Self::dispatch_imms_from(tokens, private, nets)).sum()
    }

    fn combine_imms(&self, nets: u32) -> u32 {
        (self.groups() as u32 - 1) * nets
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

/// Where the choices of one source lie among `experts` if nobody else sends any, by token and choice.
fn alone(source: &Routing<'_>, experts: core::ops::Range<u32>) -> BTreeMap<(u32, u32), u32> {
    rows_of(&[*source], experts, 1).remove(0)
}

/// Where the choices of each source lie among `experts`, by token and choice.
fn rows_of(
    sources: &[Routing<'_>],
    experts: core::ops::Range<u32>,
    padding: u32,
) -> Vec<BTreeMap<(u32, u32), u32>> {
    let mut counts = vec![0; experts.len()];
    for source in sources {
        source.count_experts(experts.clone(), &mut counts).unwrap();
    }
    let (mut offsets, mut given) = (vec![0; experts.len() + 1], vec![0; experts.len()]);
    let mut layout =
        Layout::new(experts, &counts, some(padding), &mut offsets, &mut given).unwrap();
    let place = |source| {
        let mut rows = BTreeMap::new();
        let visit = |arrival: Arrival| {
            rows.insert((arrival.token, arrival.choice), arrival.row);
        };
        layout.place(source, visit).unwrap();
        rows
    };
    sources.iter().map(place).collect()
}

/// Where each of some parts begins if they lie one after the other.
fn starts(parts: &[u32]) -> Vec<u32> {
    let mut starts = vec![0; parts.len() + 1];
    padded_offsets(parts, some(1), &mut starts).unwrap();
    starts
}

/// Compares all that there is of one world, at each of its ranks.
fn compare(world: &World) {
    let published = Published::new(world);
    let placement = Placement::new(&world.firsts).unwrap();
    let routings: Vec<_> = (0..world.world()).map(|source| world.routing(source)).collect();
    // By group and rank.
    let sent = |routing: &Routing<'_>| {
        let mut choices = vec![0; routings.len()];
        routing.count_choices(&placement, &mut choices).unwrap();
        choices
    };
    let sent: Vec<_> = routings.iter().map(sent).collect();
    for rank in 0..routings.len() {
        let mine = placement.experts_of(rank as u32);
        assert_eq!((mine.start as usize)..mine.end as usize, published.mine(rank));
        let from: Vec<_> = sent.iter().map(|sent| sent[rank]).collect();
        let rows = rows_of(&routings, mine.clone(), world.padding);
        let theirs = published.padded_index(rank);
        for (group, routing) in routings.iter().enumerate() {
            let at = format!("{world:?}, from {group} to {rank}");
            assert_eq!(from[group], published.tokens_from_group(rank, group), "{at}");
            let (src, dst) = (starts(&from)[group], starts(&sent[group])[rank]);
            assert_eq!(src, published.src_group_offset(rank, group), "{at}");
            assert_eq!(dst, published.dispatch_src_offset(group, rank), "{at}");
            // Of all its choices, and of those for this rank alone.
            let sorted = alone(routing, 0..world.experts());
            let here = alone(routing, mine.clone());
            let routes = world.routes().into_iter();
            let for_me = routes.filter(|it| it.1 as usize == group && mine.contains(&it.0));
            let choices: Vec<_> = for_me.map(|(_, _, token, choice)| (token, choice)).collect();
            assert_eq!(theirs[group].len(), choices.len(), "{at}");
            for (j, choice) in (0..).zip(&choices) {
                // Where combine takes it from, and where it goes; that is where one's own token is read, too.
                let combine_from = published.src_group_offset(rank, group) + j;
                let combine_to = published.dispatch_src_offset(group, rank) + j;
                assert_eq!(src + here[choice], combine_from, "{j}: {at}");
                assert_eq!(sorted[choice], combine_to, "{j}: {at}");
                let row = published.row_here(rank, group, theirs[group][j as usize]);
                assert_eq!(rows[group][choice], row, "{j}: {at}");
            }
            compare_chunks(from[group], group as u32);
        }
        compare_writes(&published, &from, rank);
    }
}

/// The first chunk is what is private, and all others are what overflows.
fn compare_chunks(tokens: u32, group: u32) {
    for private in 1..=tokens + 1 {
        for j in 0..=tokens {
            let slot = Published::private_slot(private, group, j);
            assert_eq!(slot_of(group, j, private), slot, "{private} for each, {j} of {group}");
        }
        let chunks = Chunks::new(tokens, some(private), some(1));
        let lies = |index| chunks.get(0, index, tokens).unwrap().tokens;
        assert_eq!(lies(0), 0..tokens.min(private));
        if tokens > private {
            // From `private + dispatch_src_offset` on; so many in all, and none that finds no slot.
            assert_eq!(lies(1).start, private);
            let rest: Vec<_> = (1..chunks.count()).map(|index| lies(index).len() as u32).collect();
            assert_eq!(rest.iter().sum::<u32>(), tokens - private);
            assert!(rest.iter().all(|len| *len <= private), "{private} private: {rest:?}");
        }
    }
}

/// As many writes as theirs where nothing overflows or one more write takes all that does, for the most tokens; and so never fewer than for the tokens
/// that there are.
fn compare_writes(published: &Published, from: &[u32], rank: usize) {
    let most = from.iter().copied().max().unwrap();
    let (groups, nets) = (from.len() as u32, 1);
    for private in most.div_ceil(2).max(1)..=most + 1 {
        let expected = Chunks::new(most, some(private), some(1)).expected();
        let most_from_each = Published::dispatch_imms_from(most, private, nets);
        assert_eq!(expected.dispatch, most_from_each, "{most} tokens, {private} private");
        let theirs = published.dispatch_imms(rank, private, nets);
        let ours = expected.dispatch * (groups - 1);
        assert!(theirs <= ours, "{theirs} and {ours}, {private} private: {from:?} to {rank}");
        if private >= most {
            assert_eq!(ours, theirs);
            assert_eq!(expected.combine * (groups - 1), published.combine_imms(nets));
            // And each tells each other its routes.
            let all = (groups - 1) + theirs + published.combine_imms(nets);
            assert_eq!(expected.of_world(groups), all.into());
        }
    }
}

/// Where experts are by their rule.
fn firsts(world: u32, experts: u32) -> Vec<u32> {
    (0..=world).map(|rank| (rank * experts.div_ceil(world)).min(experts)).collect()
}

#[test]
fn rows_and_offsets_are_those_of_the_published_formulas() {
    let mut random = Random(20_251_122);
    for _ in 0..400_u32 {
        let (world, top_k) = (1 + random.below(8), 1 + random.below(4));
        let local = 1 + random.below(5);
        let experts = (world * local).max(top_k);
        let padding = 1 + random.below(9);
        let mut source = || {
            let tokens = random.below(12);
            random.choices(tokens, top_k, experts)
        };
        let sources = (0..world).map(|_| source()).collect();
        compare(&World { firsts: firsts(world, experts), top_k, padding, sources });
    }
}

#[test]
fn small_worlds_are_those_of_the_published_formulas() {
    let mut cases = 0_u32;
    // Ranks, experts, choices of a token, most tokens.
    for (world, experts, top_k, tokens) in
        [(1, 3, 2, 2), (2, 2, 2, 2), (2, 3, 1, 2), (3, 3, 2, 1), (4, 2, 1, 1)]
    {
        let choices = all_choices(tokens, top_k, experts);
        for picks in digits(choices.len() as u32, world) {
            let sources = picks.into_iter().map(|pick| choices[pick as usize].clone()).collect();
            let padding = 1 + cases % 4;
            compare(&World { firsts: firsts(world, experts), top_k, padding, sources });
            cases += 1;
        }
    }
    assert_eq!(cases, 6_873);
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
