//! `golden.txt` of the core, read as anybody reads it who implements the same: what the kernels lay is what it says.
//!
//! Nothing is worked out here, and no other test's oracle takes part. A token's bytes say whose it is and which, so that
//! each row tells what lies there. The order of rows is promised (`kernels/moe.cu`, 5), and compared as it is. All worlds of the
//! file are within the kernels' limits; of one that is not, [`World::new`] says which it passes.

use super::world::{Style, UNTOUCHED, World};
use super::{for_seeds, random_style, run};
use immwire_core::moe::NO_SLOT;
use immwire_cuda::moe::geometry::{Number, Payload, Shape};
use immwire_verification_moe::Launch;
use immwire_verification_moe::oracle::{Random, Tokens, bytes_of};
use std::collections::BTreeMap;

const TEXT: &str = include_str!("../../../../core/src/moe/golden.txt");
const TOKEN_BYTES: usize = 16;
const SCALE_BYTES: usize = 8;

/// A token: its source, and its number there.
type Who = (usize, usize);

/// What its bytes and its scales say.
fn bytes_of_token((source, token): Who) -> (Vec<u8>, Vec<u8>) {
    // From 1 on: no token looks like padding.
    let who = bytes_of(&[source as u32 + 1, token as u32 + 1]);
    (who.repeat(TOKEN_BYTES / SCALE_BYTES), who)
}

/// A world of the file: its facts, by what stands before their numbers.
struct Golden {
    name: &'static str,
    facts: BTreeMap<&'static str, Vec<i64>>,
}

impl Golden {
    fn read(case: &'static str) -> Self {
        let mut lines = case.lines();
        let name = lines.next().unwrap();
        let fact = |line: &'static str| {
            let (name, numbers) = line.split_once(':').or_else(|| line.split_once(' ')).unwrap();
            (name, numbers.split_whitespace().map(|number| number.parse().unwrap()).collect())
        };
        Self { name, facts: lines.map(fact).collect() }
    }

    fn fact(&self, name: &str) -> &[i64] {
        self.facts.get(name).ok_or_else(|| format!("{}: no {name}", self.name)).unwrap()
    }

    /// A fact without dropped choices.
    fn numbers(&self, name: &str) -> Vec<u32> {
        self.fact(name).iter().map(|number| u32::try_from(*number).unwrap()).collect()
    }

    fn world(&self) -> World {
        let (firsts, top_k) = (self.numbers("firsts"), self.numbers("top_k")[0]);
        let tokens = |source: usize| {
            let indices: Vec<_> =
                self.fact(&format!("indices {source}")).iter().map(|i| *i as i32).collect();
            let count = indices.len() / top_k as usize;
            let (x, scales): (Vec<_>, Vec<_>) =
                (0..count).map(|token| bytes_of_token((source, token))).unzip();
            Tokens {
                count: count as u32,
                x: x.concat(),
                scales: scales.concat(),
                weights: vec![1.0; indices.len()],
                indices,
                onto: None,
            }
        };
        let tokens: Vec<_> = (0..firsts.len() - 1).map(tokens).collect();
        let mut world = World::new(&Shape {
            firsts,
            top_k,
            max_tokens: tokens.iter().map(|tokens| tokens.count).max().unwrap(),
            payload: Payload::Raw {
                token_bytes: TOKEN_BYTES as u32,
                scale_bytes: SCALE_BYTES as u32,
            },
            values: 8,
            results: Number::Bf16,
            padding: self.numbers("padding")[0],
            exact: false,
        });
        world.add_turn(tokens, &mut Random(0));
        world
    }

    /// Whose each of so many rows of a rank is, and how many are anybody's.
    fn rows(&self, world: &World, rank: usize) -> (Vec<Option<Who>>, usize) {
        let (mut rows, mut used) = (vec![None; world.rows as usize], 0);
        for source in 0..world.ranks.len() {
            let at = self.fact(&format!("rows {source} {rank}"));
            for (choice, row) in at.iter().enumerate().filter(|(_, row)| **row >= 0) {
                let row = &mut rows[*row as usize];
                assert_eq!(*row, None, "{}: one row for two choices", self.name);
                *row = Some((source, choice / world.shape.top_k as usize));
                used += 1;
            }
        }
        (rows, used)
    }

    /// Compares all that a dispatch wrote at a rank, and returns how many rows are some token's.
    fn check(&self, world: &World, rank: usize, style: Style) -> usize {
        let at = format!("{}, rank {rank}, {style:?}", self.name);
        let own = &world.ranks[rank].turns[0];
        let counts = self.numbers(&format!("counts {rank}"));
        let offsets = self.numbers(&format!("offsets {rank}"));
        assert_eq!(own.counts.words(counts.len()), counts, "counts: {at}");
        assert_eq!(own.offsets.words(offsets.len()), offsets, "offsets: {at}");
        let (rows, used) = self.rows(world, rank);
        let end = offsets[counts.len()] as usize;
        let pads = |row: usize| style.clear && row < end;
        if !style.slots {
            for (row, who) in rows.into_iter().enumerate() {
                let blank = if pads(row) { 0 } else { UNTOUCHED };
                assert_eq!(lies_at(world, rank, row), bytes_or(who, blank), "row {row}: {at}");
            }
            return used;
        }
        let most = world.shape.max_tokens as usize;
        let untouched = u32::from_ne_bytes([UNTOUCHED; 4]);
        let slot = |(row, who): (usize, &Option<Who>)| match who {
            Some((source, token)) => (source * most + token) as u32,
            None if pads(row) => NO_SLOT,
            None => untouched,
        };
        let slots: Vec<_> = rows.iter().enumerate().map(slot).collect();
        assert_eq!(own.slots.words(slots.len()), slots, "slots of rows: {at}");
        // Each token that goes here lies in its slot, and nothing in the others.
        for source in 0..world.ranks.len() {
            let here = self.fact(&format!("tokens {source} {rank}"));
            for token in 0..most {
                let who = here.contains(&(token as i64)).then_some((source, token));
                let found = lies_at(world, rank, source * most + token);
                assert_eq!(found, bytes_or(who, UNTOUCHED), "{token} of {source}: {at}");
            }
        }
        used
    }
}

/// The bytes of a token, if there is to be one, or blank ones.
fn bytes_or(who: Option<Who>, blank: u8) -> (Vec<u8>, Vec<u8>) {
    who.map_or_else(|| (vec![blank; TOKEN_BYTES], vec![blank; SCALE_BYTES]), bytes_of_token)
}

/// The bytes and the scales at a row, or a slot.
fn lies_at(world: &World, rank: usize, place: usize) -> (Vec<u8>, Vec<u8>) {
    let own = &world.ranks[rank].turns[0];
    let nth = |memory: &super::world::Memory, each: usize| {
        memory.bytes((place * each) as u64, each).to_vec()
    };
    (nth(&own.rows_x, TOKEN_BYTES), nth(&own.rows_scales, SCALE_BYTES))
}

/// Each world in one launch or two at a rank, by the kernels for few tokens and for many, with rows and with slots.
#[test]
fn the_golden_file_is_what_the_kernels_lay() {
    let worlds: Vec<_> = TEXT.split("\ncase ").skip(1).map(Golden::read).collect();
    for_seeds(40, |seed| {
        let mut random = Random(seed + 900);
        let mut used = 0;
        for golden in &worlds {
            let world = golden.world();
            let styles: Vec<_> = world.ranks.iter().map(|_| random_style(&mut random)).collect();
            let launches = styles.iter().enumerate().flat_map(|(rank, style)| {
                world.launches(rank, 0, *style).into_iter().filter(|one| !one.kernel.combines())
            });
            run(&world, &launches.collect::<Vec<Launch>>(), random.draw());
            for (rank, style) in styles.iter().enumerate() {
                used += golden.check(&world, rank, *style);
                assert_eq!(world.report(rank), Default::default(), "{}: rank {rank}", golden.name);
            }
        }
        // Or nothing was compared.
        assert!(worlds.len() == 8 && used > 150, "{} worlds, {used} rows", worlds.len());
    });
}
