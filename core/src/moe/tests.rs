//! Small worlds enumerated against a gather over sorted lists, large ones sampled; another design's formulas; golden vectors.

#![expect(clippy::cast_possible_truncation, reason = "small numbers")]

use core::num::NonZeroU32;
use std::collections::BTreeSet;
use std::format;
use std::string::{String, ToString};
use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;

mod ancestor_tests;
mod golden_tests;

fn some(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).unwrap()
}

/// A world, and what follows from it by sorting a list of all routes: slow, and without any of the shipped code.
#[derive(Debug, Clone)]
struct World {
    firsts: Vec<u32>,
    top_k: u32,
    padding: u32,
    /// Of each rank.
    sources: Vec<Vec<i32>>,
}

/// One choice that was not dropped: expert, source, token, choice.
type Route = (u32, u32, u32, u32);

impl World {
    fn world(&self) -> u32 {
        self.firsts.len() as u32 - 1
    }

    fn experts(&self) -> u32 {
        *self.firsts.last().unwrap()
    }

    fn rank_of(&self, expert: u32) -> u32 {
        let has = |rank: &u32| {
            (self.firsts[*rank as usize]..self.firsts[*rank as usize + 1]).contains(&expert)
        };
        (0..self.world()).find(has).unwrap()
    }

    /// All routes, by expert, source, token, choice.
    fn routes(&self) -> Vec<Route> {
        let mut routes = Vec::new();
        for (source, indices) in (0..).zip(&self.sources) {
            for (at, &index) in (0..).zip(indices) {
                if index >= 0 {
                    routes.push((index as u32, source, at / self.top_k, at % self.top_k));
                }
            }
        }
        routes.sort_unstable();
        routes
    }

    fn count(&self, expert: u32) -> u32 {
        self.routes().iter().filter(|route| route.0 == expert).count() as u32
    }

    /// Tokens of a source that go to each rank.
    fn tokens(&self, source: u32, rank: u32) -> Vec<u32> {
        let routes = self.routes().into_iter();
        let mine = routes.filter(|route| route.1 == source && self.rank_of(route.0) == rank);
        mine.map(|route| route.2).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Offsets of a rank's experts, padded, and the row of each route that ends there.
    fn rows(&self, rank: u32) -> (Vec<u32>, Vec<(Route, u32)>) {
        let (mut offsets, mut rows) = (vec![0], Vec::new());
        for expert in self.firsts[rank as usize]..self.firsts[rank as usize + 1] {
            let mine = self.routes().into_iter().filter(|route| route.0 == expert);
            let mut row = *offsets.last().unwrap();
            for route in mine {
                rows.push((route, row));
                row += 1;
            }
            while row % self.padding != 0 {
                row += 1;
            }
            offsets.push(row);
        }
        (offsets, rows)
    }

    fn routing(&self, source: u32) -> Routing<'_> {
        Routing::new(&self.sources[source as usize], self.top_k, self.experts()).unwrap()
    }

    /// Compares everything that the shipped code says of this world with the above.
    fn check(&self) {
        let placement = Placement::new(&self.firsts).unwrap();
        assert_eq!((placement.world(), placement.experts()), (self.world(), self.experts()));
        let (world, top_k) = (self.world(), self.top_k);
        for source in 0..world {
            let routing = self.routing(source);
            let mut counts = vec![7; world as usize];
            routing.count_ranks(&placement, &mut counts).unwrap();
            let mut choices = vec![7; world as usize];
            routing.count_choices(&placement, &mut choices).unwrap();
            for (rank, count) in (0..).zip(&choices) {
                let experts = self.firsts[rank as usize]..self.firsts[rank as usize + 1];
                let here =
                    |choice: &&i32| u32::try_from(**choice).is_ok_and(|e| experts.contains(&e));
                assert_eq!(
                    *count as usize,
                    self.sources[source as usize].iter().filter(here).count()
                );
            }
            for (rank, count) in (0..).zip(&counts) {
                let tokens = self.tokens(source, rank);
                assert_eq!(*count as usize, tokens.len());
                let experts = placement.experts_of(rank);
                assert_eq!(routing.tokens_at(experts.clone()).collect::<Vec<_>>(), tokens);
                for token in 0..routing.tokens() {
                    let mask = routing.ranks_of(token, &placement);
                    assert_eq!(mask.contains(rank), tokens.contains(&token));
                    assert_eq!(mask.contains(rank), routing.choices_among(token, &experts) != 0);
                }
            }
        }
        for rank in 0..world {
            self.check_rank(&placement, rank, top_k);
        }
    }

    fn check_rank(&self, placement: &Placement<'_>, rank: u32, top_k: u32) {
        let experts = placement.experts_of(rank);
        let mut counts = vec![0; experts.len()];
        for source in 0..self.world() {
            self.routing(source).count_experts(experts.clone(), &mut counts).unwrap();
        }
        let naive: Vec<_> = experts.clone().map(|expert| self.count(expert)).collect();
        assert_eq!(counts, naive);
        let (offsets, expected) = self.rows(rank);
        let (mut ours, mut given) = (vec![9; offsets.len()], vec![9; counts.len()]);
        let padding = some(self.padding);
        let mut layout =
            Layout::new(experts.clone(), &counts, padding, &mut ours, &mut given).unwrap();
        assert_eq!(layout.offsets(), offsets);
        let mut rows = Vec::new();
        for source in 0..self.world() {
            let visit = |arrival: Arrival| {
                let expert = arrival.local_expert + experts.start;
                rows.push(((expert, source, arrival.token, arrival.choice), arrival.row));
            };
            layout.place(&self.routing(source), visit).unwrap();
        }
        rows.sort_unstable();
        assert_eq!(rows, expected);
        // A layout that is full takes no token more.
        if let Some((full, _)) = naive.iter().zip(experts.clone()).find(|(count, _)| **count > 0) {
            let busiest = (0..self.world()).find(|source| !self.tokens(*source, rank).is_empty());
            let error = layout.place(&self.routing(busiest.unwrap()), |_| ());
            assert!(matches!(error, Err(LayoutError::Uncounted { .. })), "{full} {error:?}");
        }
        let total = *offsets.last().unwrap();
        let most = self.sources.iter().map(|source| source.len() as u32 / top_k).max().unwrap();
        let shape = Shape {
            top_k,
            max_tokens: most,
            token_bytes: 16,
            scale_bytes: 0,
            result_bytes: 16,
            padding,
            chunk_tokens: some(1),
            dispatch_depth: some(2),
            combine_depth: some(1),
            exact: false,
        };
        let sizes = Sizes::new(&shape, placement).unwrap();
        assert!(u64::from(total) <= sizes.expanded_rows, "{total} {sizes:?}");
    }
}

/// Every list of so many digits below `base`.
fn digits(base: u32, len: u32) -> impl Iterator<Item = Vec<u32>> {
    let digit = move |number: u32, at: u32| number / base.pow(at) % base;
    (0..base.pow(len)).map(move |number| (0..len).map(|at| digit(number, at)).collect())
}

/// Every way to place so many experts on so many ranks.
fn placements(experts: u32, world: u32) -> impl Iterator<Item = Vec<u32>> {
    digits(experts + 1, world - 1).filter_map(move |inner| {
        let firsts: Vec<_> = [0].into_iter().chain(inner).chain([experts]).collect();
        firsts.is_sorted().then_some(firsts)
    })
}

/// All choices that up to `tokens` tokens can make.
fn all_choices(tokens: u32, top_k: u32, experts: u32) -> Vec<Vec<i32>> {
    let lists = (0..=tokens).flat_map(|tokens| digits(experts + 1, tokens * top_k));
    let choices = lists.map(|list| list.into_iter().map(|digit| digit as i32 - 1).collect());
    choices.filter(|list: &Vec<_>| Routing::new(list, top_k, experts).is_ok()).collect()
}

#[test]
fn every_small_world_is_as_sorted_lists_have_it() {
    let mut cases = 0_u32;
    // Ranks, experts, choices of a token, most tokens.
    let domains =
        [(1, 3, 2, 2), (1, 3, 3, 1), (2, 2, 2, 2), (2, 3, 1, 2), (3, 3, 2, 1), (4, 2, 1, 1)];
    for (world, experts, top_k, tokens) in domains {
        let choices = all_choices(tokens, top_k, experts);
        for firsts in placements(experts, world) {
            for picks in digits(choices.len() as u32, world) {
                let pick = |pick: u32| choices[pick as usize].clone();
                let sources = picks.into_iter().map(pick).collect();
                let padding = 1 + cases % 4;
                World { firsts: firsts.clone(), top_k, padding, sources }.check();
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 41_729);
}

#[test]
fn even_placements_differ_by_one_at_most_and_every_expert_has_its_rank() {
    let mut firsts = [0; 1 + MAX_WORLD as usize];
    for world in (1..=20).chain([63, 64, 65, 511, 512]) {
        for experts in (1..=40).chain([255, 256, 257, 383, 1023, 1024]) {
            let placement = Placement::even(experts, &mut firsts[..=world]).unwrap();
            let lens = (0..world as u32).map(|rank| placement.experts_of(rank).len());
            let (least, most) = (lens.clone().min().unwrap(), lens.max().unwrap());
            assert!(most - least <= 1 && most as u32 == placement.most_local());
            for expert in 0..experts {
                let rank = placement.rank_of(expert).unwrap();
                assert!(placement.experts_of(rank).contains(&expert));
            }
            assert_eq!(placement.rank_of(experts), None);
            assert!(placement.experts_of(world as u32).is_empty());
        }
    }
}

#[test]
fn what_is_no_placement_is_refused() {
    use PlacementError::*;
    let refused = |firsts: &[u32]| Placement::new(firsts).unwrap_err();
    assert_eq!(refused(&[]), World { entries: 0 });
    assert_eq!(refused(&[0]), World { entries: 1 });
    assert_eq!(refused(&[1; 514]), World { entries: 514 });
    assert_eq!(refused(&[1, 2]), Start { first: 1 });
    assert_eq!(refused(&[0, 5, 3, 9]), Falls { rank: 1, first: 5, next: 3 });
    assert_eq!(refused(&[0, 0]), Experts { experts: 0 });
    assert_eq!(refused(&[0, 1025]), Experts { experts: 1025 });
    assert_eq!(Placement::even(4, &mut [0]), Err(World { entries: 1 }));
    assert_eq!(Placement::even(4, &mut []), Err(World { entries: 0 }));
    assert_eq!(Placement::even(u32::MAX, &mut [0; 514]), Err(World { entries: 514 }));
    assert_eq!(Placement::even(u32::MAX, &mut [0; 3]), Err(Experts { experts: u32::MAX }));
    assert!(Placement::new(&[0, 0, 1024, 1024]).is_ok());
}

#[test]
fn what_is_no_routing_is_refused_with_its_place() {
    use RoutingError::*;
    for top_k in [0, 33, u32::MAX] {
        assert_eq!(Routing::new(&[], top_k, 4), Err(TopK { top_k }));
    }
    for experts in [0, 1025] {
        assert_eq!(Routing::new(&[], 1, experts), Err(Experts { experts }));
    }
    assert_eq!(Routing::new(&[0, 1, 2], 2, 4), Err(Length { indices: 3, top_k: 2 }));
    for index in [4, -2, i32::MIN, i32::MAX] {
        let error = NoExpert { token: 1, choice: 1, index, experts: 4 };
        assert_eq!(Routing::new(&[0, 1, 3, index], 2, 4), Err(error));
    }
    let twice = Twice { token: 1, choice: 2, index: 3 };
    assert_eq!(Routing::new(&[0, 1, 2, 3, -1, 3], 3, 4), Err(twice));
    let all: Vec<_> = (992..1024).collect();
    let routing = Routing::new(&all, 32, 1024).unwrap();
    assert_eq!((routing.tokens(), routing.choices_among(0, &(0..1024))), (1, u32::MAX));
    assert_eq!(routing.choices_among(0, &(993..995)), 0b110);
    let dropped = Routing::new(&[-1, -1], 2, 1).unwrap();
    assert_eq!((dropped.tokens(), dropped.tokens_at(0..1).count()), (1, 0));
    let placement = Placement::new(&[0, 512, 1024]).unwrap();
    let short = OutputTooSmall { needed: 2, available: 1 };
    assert_eq!(routing.count_ranks(&placement, &mut [0]), Err(short));
    assert_eq!(routing.count_choices(&placement, &mut [0]), Err(short));
    assert_eq!(routing.count_experts(5..7, &mut [0]), Err(short));
    assert_eq!(routing.count_experts(1023..1024, &mut [u32::MAX]), Err(Overflow));
    assert_eq!(routing.choices(1), &[] as &[i32]);
}

#[test]
fn parts_of_a_routing_are_its_tokens() {
    let indices: Vec<_> = (0..12).collect();
    let routing = Routing::new(&indices, 3, 12).unwrap();
    for start in 0..6 {
        for end in 0..6 {
            let part = routing.part(start..end);
            let tokens = (start..end.min(4)).map(|token| routing.choices(token));
            let ours = (0..part.tokens()).map(|token| part.choices(token));
            assert!(ours.eq(tokens.filter(|choices| !choices.is_empty())), "{start}..{end}");
        }
    }
}

#[test]
fn every_pair_of_ranks_in_a_mask_is_found_again() {
    for low in 0..MAX_WORLD {
        for high in [low, low + 1, low + 63, low + 64, 511] {
            let mut mask = RankMask::EMPTY;
            assert!(mask.is_empty());
            mask.insert(high);
            mask.insert(low);
            mask.insert(MAX_WORLD);
            let set: BTreeSet<_> = [low, high].into_iter().filter(|rank| *rank < 512).collect();
            assert!(mask.iter().eq(set.iter().copied()) && mask.len() as usize == set.len());
            for rank in [0, low, low + 1, high, high + 1, 512, u32::MAX] {
                assert_eq!(mask.contains(rank), set.contains(&rank));
                assert_eq!(mask.below(rank) as usize, set.range(..rank).count());
            }
            let turned: Vec<_> = mask.iter_from(low + 1).collect();
            let naive = set.range(low + 1..).chain(set.range(..=low)).copied();
            assert_eq!(turned, naive.collect::<Vec<_>>());
        }
    }
}

#[test]
fn rows_that_cannot_be_counted_are_refused() {
    let mut offsets = [0; 4];
    let full = padded_offsets(&[u32::MAX - 1, 1, 0], some(1), &mut offsets);
    assert_eq!((full, offsets), (Ok(u32::MAX), [0, u32::MAX - 1, u32::MAX, u32::MAX]));
    let over = |local_expert| Err(LayoutError::Overflow { local_expert });
    assert_eq!(padded_offsets(&[u32::MAX, 1], some(1), &mut offsets), over(1));
    assert_eq!(padded_offsets(&[u32::MAX], some(2), &mut offsets), over(0));
    assert_eq!(padded_offsets(&[1, 1], some(u32::MAX), &mut offsets), over(1));
    let short = |needed, available| Err(LayoutError::TooSmall { needed, available });
    assert_eq!(padded_offsets(&[0; 4], some(1), &mut offsets), short(5, 4));
    assert_eq!(padded_offsets(&[], some(8), &mut []), short(1, 0));
    let layout = Layout::new(0..1, &[1], some(4), &mut offsets, &mut [0]).unwrap().rows();
    assert_eq!(layout, 4);
    assert!(Layout::new(0..2, &[1], some(4), &mut offsets, &mut [0; 2]).is_err());
    assert!(Layout::new(0..2, &[1; 2], some(4), &mut offsets, &mut [0]).is_err());
}

#[test]
fn every_token_of_every_source_has_a_slot_of_its_own() {
    for max_tokens in 0..6 {
        let all = (0..6).flat_map(|source| (0..6).map(move |token| (source, token)));
        let slots: Vec<_> = all.filter_map(|(s, token)| slot_of(s, token, max_tokens)).collect();
        assert!(slots.into_iter().eq(0..6 * max_tokens));
    }
    assert_eq!(slot_of(1, u32::MAX - 2, u32::MAX - 1), None);
    assert_eq!(slot_of(65_536, 65_534, 65_535), Some(u32::MAX - 1));
    // That would be the number of no slot, or wrap.
    assert_eq!(slot_of(0, u32::MAX, u32::MAX), None);
    assert_eq!(slot_of(1, 0, u32::MAX), None);
    assert_eq!(slot_of(65_537, 0, 65_535), None);
    assert_eq!(slot_of(2, 0, 1 << 31), None);
}

fn deepseek(max_tokens: u32, chunk_tokens: u32, combine_depth: u32) -> Shape {
    Shape {
        top_k: 8,
        max_tokens,
        token_bytes: 7168,
        scale_bytes: 224,
        result_bytes: 14336,
        padding: some(128),
        chunk_tokens: some(chunk_tokens),
        dispatch_depth: some(2),
        combine_depth: some(combine_depth),
        exact: false,
    }
}

/// The lines of the table in the documentation of `size`, anew.
#[test]
fn documented_sizes_are_these() {
    let text = include_str!("size.rs");
    let lines: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("//! | ")).collect();
    let rows = [
        (2, 128, 128, 1),
        (4, 128, 128, 1),
        (8, 128, 128, 1),
        (64, 128, 128, 1),
        (8, 4096, 4096, 1),
        (8, 4096, 512, 2),
        (64, 4096, 512, 2),
    ];
    let mut firsts = [0; 65];
    let mut computed = Vec::new();
    for (world, tokens, chunk, back) in rows {
        let placement = Placement::even(256, &mut firsts[..=world]).unwrap();
        let sizes = Sizes::new(&deepseek(tokens, chunk, back), &placement).unwrap();
        let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
        let thousands = |number: u64| {
            let digits = number.to_string();
            let mut text = String::new();
            for (at, digit) in digits.chars().enumerate() {
                if at > 0 && (digits.len() - at).is_multiple_of(3) {
                    text.push(',');
                }
                text.push(digit);
            }
            text
        };
        computed.push(format!(
            "{world} | {} | {chunk} x 2; {chunk} x {back} | {} | {} | {} | {} | {} |",
            thousands(tokens.into()),
            mib(sizes.tables_bytes),
            mib(sizes.dispatch_bytes),
            mib(sizes.combine_bytes),
            mib(sizes.total_bytes),
            thousands(sizes.expanded_rows),
        ));
    }
    let documented: Vec<_> = lines[1..].iter().map(ToString::to_string).collect();
    assert_eq!(documented, computed);
}

#[test]
fn sizes_without_room_in_64_bits_are_refused() {
    let placement = Placement::new(&[0, 512, 1024]).unwrap();
    let sizes = |shape: &Shape| Sizes::new(shape, &placement);
    let good = deepseek(128, 128, 1);
    assert!(sizes(&good).is_ok());
    for bytes in [0, 8, 7169] {
        let error = Err(SizesError::Payload { bytes });
        assert_eq!(sizes(&Shape { token_bytes: bytes, ..good }), error);
        assert_eq!(sizes(&Shape { result_bytes: bytes, ..good }), error);
    }
    for top_k in [0, 33] {
        assert_eq!(sizes(&Shape { top_k, ..good }), Err(SizesError::TopK { top_k }));
    }
    let most = some(u32::MAX);
    let huge = Shape { max_tokens: u32::MAX, chunk_tokens: most, ..good };
    let overflow = Err(SizesError::Overflow);
    assert_eq!(sizes(&Shape { dispatch_depth: most, ..huge }), overflow);
    assert_eq!(sizes(&Shape { combine_depth: most, ..huge }), overflow);
    assert_eq!(
        sizes(&Shape { token_bytes: u32::MAX - 15, dispatch_depth: most, ..huge }),
        overflow
    );
    // The widest that fits, in 128 bits by hand.
    let wide = sizes(&Shape { scale_bytes: 1 << 29, ..huge }).unwrap();
    let row = (7168_u128 + (1 << 29)).next_multiple_of(128);
    assert_eq!(u128::from(wide.dispatch_bytes), 2 * 2 * u128::from(u32::MAX) * row);
    // A result of each choice, of which a rank has no more than experts.
    let by_rank = sizes(&good).unwrap();
    let exact = sizes(&Shape { exact: true, ..good }).unwrap();
    assert_eq!((by_rank.combine_each, exact.combine_each), (1, 8));
    assert_eq!((exact.fan, exact.combine_bytes), (2, 8 * by_rank.combine_bytes));
    let few = Sizes::new(&Shape { exact: true, ..good }, &Placement::new(&[0, 3, 3]).unwrap());
    assert_eq!(few.unwrap().combine_each, 3);
    // No tokens need no room but for the heads of the tables.
    let none = sizes(&Shape { max_tokens: 0, ..good }).unwrap();
    assert_eq!((none.total_bytes, none.expanded_rows), (2 * 2 * 16, 0));
}

/// All rounds of small exchanges: a sender that keeps to `needs` never overwrites what was not taken, and never waits for
/// what cannot come.
#[test]
fn chunks_cover_every_token_and_never_share_a_slot() {
    let mut cases = 0;
    for (max, size, depth) in (0..=9)
        .flat_map(|max| (1..=4).flat_map(move |size| (1..=3).map(move |depth| (max, size, depth))))
    {
        let chunks = Chunks::new(max, some(size), some(depth));
        let mut number = 0;
        // By slot, the number that lies there.
        let mut slots = vec![None; depth as usize];
        for (round, tokens) in (0..).zip((0..=max).chain([0, max])) {
            let mut covered = 0;
            for at in 0..chunks.count() {
                let chunk = chunks.get(round, at, tokens).unwrap();
                assert_eq!((chunk.index, chunk.number, chunk.tokens.start), (at, number, covered));
                assert!(chunk.tokens.len() as u32 <= size);
                covered = chunk.tokens.end;
                // Taken in order: with exactly `needs` of them taken, the slot is free, and with one less it is not.
                let slot = &mut slots[chunk.slot as usize];
                assert!(slot.is_none_or(|old| old < chunk.needs));
                assert!(chunk.needs == 0 || *slot == Some(chunk.needs - 1));
                assert!(chunk.needs <= number);
                *slot = Some(number);
                number += 1;
                cases += 1;
            }
            assert_eq!(covered, tokens);
        }
        let (count, over) = (chunks.count(), max + 1);
        assert_eq!(
            chunks.get(0, count, 0),
            Err(ChunkError::NoChunk { index: count, chunks: count })
        );
        assert_eq!(chunks.get(0, 0, over), Err(ChunkError::Tokens { tokens: over, max }));
        let expected = chunks.expected();
        assert_eq!((expected.tables, expected.dispatch, expected.combine), (1, count, count));
        for world in [1, 2, 512] {
            let all = u64::from(world - 1) * u64::from(1 + 2 * count);
            assert_eq!(expected.of_world(world), all);
        }
    }
    assert!(cases > 1000, "{cases}");
    let most = Chunks::new(u32::MAX, some(1), some(1));
    assert_eq!(most.get(u64::MAX, 0, 0), Err(ChunkError::Overflow));
    let last = most.get(0, u32::MAX - 1, u32::MAX).unwrap();
    assert_eq!(last.tokens, u32::MAX - 1..u32::MAX);
    assert_eq!(most.expected().of_world(512), 511 * (1 + 2 * u64::from(u32::MAX)));
}

#[test]
fn each_doorbell_has_a_line_of_its_own_and_is_read_back() {
    let mut cases = 0;
    for (chunks, destinations) in (1..5).flat_map(|c| [0, 1, 11, 12, 13, 25].map(|d| (c, d))) {
        let bells = Doorbells { chunks, destinations };
        let mut lines = vec![[0; LINE_WORDS]; bells.lines().unwrap() as usize];
        let mut seen = BTreeSet::new();
        let places = || {
            [Op::Dispatch, Op::Combine].into_iter().flat_map(move |op| {
                [6, 7].into_iter().flat_map(move |epoch| {
                    (0..chunks).flat_map(move |chunk| {
                        (0..bells.parts()).map(move |part| (op, epoch, chunk, part))
                    })
                })
            })
        };
        for (op, epoch, chunk, part) in places() {
            let line = bells.line(op, epoch, chunk, part).unwrap();
            assert!(seen.insert(line), "two bells share line {line}");
            let rows = core::array::from_fn(|n| 100 * line + n as u32);
            let bell = Doorbell { epoch, op, chunk, part, rows };
            lines[line as usize] = bell.encode();
        }
        assert_eq!(seen.len(), lines.len());
        for (op, epoch, chunk, part) in places() {
            let line = bells.line(op, epoch, chunk, part).unwrap();
            let words = lines[line as usize];
            let read = |words: &_, epoch, max| Doorbell::read(words, epoch, op, chunk, part, max);
            let bell = read(&words, epoch, u32::MAX).unwrap().unwrap();
            for destination in 0..destinations {
                let nth = destination.checked_sub(12 * part).filter(|nth| *nth < 12);
                assert_eq!(bell.rows_for(destination), nth.map(|nth| 100 * line + nth));
            }
            // Not yet, of an older round, and torn in either half.
            assert_eq!(read(&[0; LINE_WORDS], epoch, u32::MAX), Ok(None));
            assert_eq!(read(&words, epoch + 2, u32::MAX), Ok(None));
            for torn in 1..LINE_WORDS {
                let next = Doorbell { epoch: epoch + 2, ..bell }.encode();
                let mixed = core::array::from_fn(|n| if n < torn { next[n] } else { words[n] });
                assert_eq!(read(&mixed, epoch + 2, u32::MAX), Ok(None));
            }
            let most = 100 * line + 11;
            let error = DoorbellError::Rows { destination: 11, rows: most, max: most - 1 };
            assert_eq!(
                (read(&words, epoch, most - 1), read(&words, epoch, most).is_ok()),
                (Err(error), true)
            );
            let elsewhere = Doorbell::read(&words, epoch, op, chunk + 1, part, u32::MAX);
            assert!(matches!(elsewhere, Err(DoorbellError::Misplaced { .. })));
            cases += 1;
        }
        assert_eq!(bells.line(Op::Combine, 0, chunks, 0), None);
        assert_eq!(bells.line(Op::Combine, 0, 0, bells.parts()), None);
    }
    assert_eq!(cases, 4 * (1 + 2 + 3 + 4) * (1 + 1 + 1 + 2 + 3));
    assert_eq!(Doorbells { chunks: u32::MAX, destinations: 1 }.lines(), None);
    assert_eq!(Doorbells { chunks: 1 << 29, destinations: 24 }.line(Op::Dispatch, 0, 0, 0), None);
}

#[test]
fn every_small_table_is_read_back_and_every_changed_word_is_noticed_or_is_a_choice() {
    let mut cases = 0;
    for top_k in 1..=3 {
        for tokens in 0..=2 {
            let shape = TableShape { top_k, max_tokens: 2 };
            for list in digits(3, tokens * top_k) {
                let indices: Vec<_> = list.iter().map(|digit| *digit as i32 - 1).collect();
                let weights: Vec<_> = list.iter().map(|digit| *digit as f32 / 3.0).collect();
                check_table(shape, &indices, &weights);
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 1 + 3 + 9 + 1 + 9 + 81 + 1 + 27 + 729);
}

fn check_table(shape: TableShape, indices: &[i32], weights: &[f32]) {
    let (tokens, top_k) = (indices.len() as u32 / shape.top_k, shape.top_k);
    let mut table = [[0; VECTOR_WORDS]; 5];
    let vectors = shape.encode(5, indices, weights, &mut table).unwrap();
    assert_eq!(Some(vectors), shape.vectors(tokens));
    let (mut i, mut w) = ([7; 6], [7.0; 6]);
    let mut decode = |epoch, table: &[Vector]| {
        let tokens = shape.decode(epoch, table, &mut i, &mut w)?;
        let len = (tokens * top_k) as usize;
        Ok::<_, TableError>((i[..len].to_vec(), w[..len].to_vec()))
    };
    assert_eq!(decode(5, &table[..vectors]), Ok((indices.to_vec(), weights.to_vec())));
    assert!(decode(5, &table[..vectors - 1]).is_err());
    assert_eq!(decode(6, &table), Err(TableError::Stale { vector: 0, epoch: 5, expected: 6 }));
    for vector in 0..vectors {
        for word in 0..VECTOR_WORDS {
            let mut other = table;
            other[vector][word] ^= 1 << 31;
            let read = decode(5, &other[..vectors]);
            let is_choice = vector > 0 && word < 3;
            assert!(is_choice || read.is_err(), "word {word} of vector {vector}");
        }
    }
}

#[test]
fn what_is_no_table_is_refused() {
    use TableError::*;
    let shape = TableShape { top_k: 1, max_tokens: 2 };
    let mut table = [[0; VECTOR_WORDS]; 3];
    let mut encode =
        |indices: &[i32], weights: &[f32]| shape.encode(1, indices, weights, &mut table);
    assert_eq!(encode(&[0; 3], &[0.0; 3]), Err(Tokens { tokens: 3, max: 2 }));
    assert_eq!(encode(&[0; 2], &[0.0; 1]), Err(Length { indices: 2, weights: 1 }));
    for index in [-2, 65535, i32::MIN] {
        assert_eq!(encode(&[3, index], &[0.0; 2]), Err(Index { at: 1, index }));
    }
    assert_eq!(encode(&[65534, -1], &[0.5; 2]), Ok(3));
    let mut read = [0; 2];
    assert_eq!(shape.decode(1, &table, &mut read, &mut [0.0; 2]), Ok(2));
    assert_eq!(read, [65534, -1]);
    let short = TooSmall { needed: 2, available: 1 };
    assert_eq!(shape.decode(1, &table, &mut read, &mut [0.0; 1]), Err(short));
    assert_eq!(shape.decode(1, &[], &mut [], &mut []), Err(TooSmall { needed: 1, available: 0 }));
    let small = TooSmall { needed: 2, available: 1 };
    assert_eq!(shape.encode(1, &[0], &[0.0], &mut [[0; 4]]), Err(small));
    let other = TableShape { max_tokens: 3, ..shape };
    let error = OtherShape { max_tokens: 2, ours: 3 };
    assert_eq!(other.decode(1, &table, &mut read, &mut [0.0; 2]), Err(error));
    table[0][0] = 3;
    assert_eq!(
        shape.decode(1, &table, &mut read, &mut [0.0; 2]),
        Err(Tokens { tokens: 3, max: 2 })
    );
    table[0][0] = 2;
    table[2][2] = 0;
    assert_eq!(shape.decode(1, &table, &mut read, &mut [0.0; 2]), Err(Surplus { vector: 2 }));
    for top_k in [0, 33] {
        let shape = TableShape { top_k, max_tokens: 1 };
        assert_eq!(shape.encode(1, &[], &[], &mut table), Err(TopK { top_k }));
        assert_eq!(shape.decode(1, &table, &mut [], &mut []), Err(TopK { top_k }));
    }
}

/// Numbers that follow from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(end)) as u32
    }

    /// Distinct experts, some dropped.
    fn choices(&mut self, tokens: u32, top_k: u32, experts: u32) -> Vec<i32> {
        let mut indices = Vec::new();
        for _ in 0..tokens {
            let first = indices.len();
            while indices.len() < first + top_k as usize {
                let expert = self.below(experts) as i32;
                let fresh = !indices[first..].contains(&expert) && self.below(8) != 0;
                indices.push(if fresh { expert } else { DROPPED });
            }
        }
        indices
    }

    fn firsts(&mut self, world: u32, experts: u32) -> Vec<u32> {
        let mut firsts: Vec<_> = (1..world).map(|_| self.below(experts + 1)).collect();
        firsts.extend([0, experts]);
        firsts.sort_unstable();
        firsts
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_world_is_as_sorted_lists_have_it(
        world in 1..=6_u32,
        experts in 1..=MAX_EXPERTS,
        top_k in 1..=MAX_TOP_K,
        padding in 1..=128_u32,
        most in 0..6_u32,
        seed in any::<u64>(),
    ) {
        let mut random = Random(seed);
        // Few experts, so that the oracle is done today; numbers up to the last one.
        let experts = if seed % 4 == 0 { experts } else { experts.min(24) };
        let firsts = random.firsts(world, experts);
        let mut source = || {
            let tokens = random.below(most + 1);
            random.choices(tokens, top_k, experts)
        };
        let sources = (0..world).map(|_| source()).collect();
        World { firsts, top_k, padding, sources }.check();
    }

    #[test]
    fn any_table_from_outside_is_read_or_refused(
        words in proptest::collection::vec(any::<[u32; 4]>(), 0..20),
        top_k in any::<u32>(),
        max_tokens in any::<u32>(),
        plausible in any::<bool>(),
    ) {
        let (mut words, top_k) = (words, if plausible { top_k % 33 } else { top_k });
        if let (true, Some(head)) = (plausible, words.first_mut()) {
            *head = [head[0] % 20, max_tokens, 1, 1];
        }
        let (mut indices, mut weights) = ([0; 64], [0.0; 64]);
        let shape = TableShape { top_k, max_tokens };
        if let Ok(tokens) = shape.decode(1, &words, &mut indices, &mut weights) {
            let len = (tokens * top_k) as usize;
            prop_assert!(tokens <= max_tokens && len <= 64);
            let _either = Routing::new(&indices[..len], top_k, 1024);
        }
    }

    #[test]
    fn any_size_is_exact_or_refused(
        top_k in 1..=MAX_TOP_K,
        widths in any::<[u32; 7]>(),
        shifts in any::<[u8; 7]>(),
        experts in 1..=MAX_EXPERTS,
        world in 1..=MAX_WORLD,
        exact in any::<bool>(),
    ) {
        let [max_tokens, token, scale_bytes, result, padding, chunk, depth] =
            core::array::from_fn(|n| widths[n] >> (shifts[n] % 32));
        let shape = Shape {
            top_k,
            max_tokens,
            token_bytes: (token & !15).max(16),
            scale_bytes,
            result_bytes: (result & !15).max(16),
            padding: some(padding.max(1)),
            chunk_tokens: some(chunk.max(1)),
            dispatch_depth: some(depth.max(1)),
            combine_depth: some(depth.max(1)),
            exact,
        };
        let mut firsts = vec![0; world as usize + 1];
        let placement = Placement::even(experts, &mut firsts).unwrap();
        let wide = |number: u32| u128::from(number);
        let row = (wide(shape.token_bytes) + wide(scale_bytes)).next_multiple_of(128);
        let back = wide(shape.result_bytes).next_multiple_of(128);
        let rows = wide(depth.max(1)) * wide(chunk.max(1).min(max_tokens));
        let tables = 2 * wide(world) * 16 * (1 + wide(max_tokens) * wide(top_k.div_ceil(2)));
        let each = if exact { top_k.min(placement.most_local()) } else { 1 };
        let (out, home) = (wide(world).checked_mul(rows * row), rows.checked_mul(wide(world) * wide(each) * back));
        let total = out.zip(home).and_then(|(out, home)| out.checked_add(home)?.checked_add(tables));
        match (Sizes::new(&shape, &placement), total) {
            (Ok(sizes), Some(total)) => prop_assert_eq!(u128::from(sizes.total_bytes), total),
            (Ok(sizes), None) => prop_assert!(false, "{:?}", sizes),
            // All that is added up is below 2^64 unless the whole, or the rows by expert, are not.
            (Err(_), total) => {
                let by_expert = wide(placement.most_local()) * (wide(world) * wide(max_tokens) + 2 * wide(padding.max(1)));
                prop_assert!(total.is_none_or(|total| total > u64::MAX.into()) || by_expert > u64::MAX.into());
            }
        }
    }
}
