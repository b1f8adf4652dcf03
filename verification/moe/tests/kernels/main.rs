//! The kernels against what must come of them, on a CPU: random worlds, shapes, routes and orders; ranks that are late, dead,
//! or wrong. Each case prints its seed if it fails; `IMMWIRE_SEEDS=FIRST..LAST` runs others.

#![allow(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "small numbers, and failed tests"
)]

mod golden;
mod world;

use immwire_cuda::moe::args::{self, MoeArgs, MoeControl};
use immwire_cuda::moe::geometry::{Number, Payload, Scales, Shape};
use immwire_verification_moe::oracle::{Layout, Random, Tokens};
use immwire_verification_moe::{Launch, emulate};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use world::{Style, UNTOUCHED, World};

/// Runs one case for each of so many seeds.
fn for_seeds(cases: u64, case: impl Fn(u64)) {
    let seeds = match std::env::var("IMMWIRE_SEEDS") {
        Ok(given) => {
            let (first, last) = given.split_once("..").unwrap();
            first.parse().unwrap()..last.parse().unwrap()
        }
        Err(_) => 0..cases,
    };
    for seed in seeds {
        if let Err(why) = catch_unwind(AssertUnwindSafe(|| case(seed))) {
            eprintln!("IMMWIRE_SEEDS={seed}..{}", seed + 1);
            std::panic::resume_unwind(why);
        }
    }
}

fn run(world: &World, launches: &[Launch], seed: u64) {
    // SAFETY: all addresses are of memory that the world owns.
    unsafe { emulate(launches, world.ranks.len() as u32, seed) }.unwrap();
}

/// A round of all ranks, each in the same style: all rows and results are right, and nothing is left in slots.
fn run_whole(world: &World, turn: usize, style: Style, seed: u64) {
    let ranks = 0..world.ranks.len();
    let launches: Vec<Launch> = ranks.flat_map(|rank| world.launches(rank, turn, style)).collect();
    run(world, &launches, seed);
    world.check_whole(turn, style);
    world.check_poison();
}

fn random_shape(random: &mut Random, world: u32) -> Shape {
    let mut firsts = vec![0];
    for rank in 0..world {
        let most = 1 + random.below(5);
        let local = if random.one_in(6) && rank + 1 < world { 0 } else { most };
        firsts.push(firsts[rank as usize] + local);
    }
    let values = 16 * (1 + random.below(20));
    let of = if random.one_in(2) { Number::Bf16 } else { Number::Fp16 };
    let payload = match random.below(3) {
        0 => {
            let scales = if random.one_in(2) { Scales::Float } else { Scales::Power };
            Payload::Fp8 { from: of, scales }
        }
        // Of one part, so that some ranks of a test may send as if there were many tokens while others receive as if there were few.
        _ => Payload::Raw {
            token_bytes: 16 * (1 + random.below(40)),
            scale_bytes: 4 * random.below(12),
        },
    };
    Shape {
        firsts,
        top_k: 1 + random.below(6),
        max_tokens: [1 + random.below(8), 1 + random.below(70)][usize::from(random.one_in(5))],
        payload,
        values,
        results: if random.one_in(2) { Number::Bf16 } else { Number::Fp16 },
        padding: [1, 1, 4, 16][random.below(4) as usize],
        exact: random.one_in(2),
    }
}

fn random_style(random: &mut Random) -> Style {
    let chunks = random.one_in(2);
    Style {
        blocks: 1 + random.below(3),
        threads: if random.one_in(3) { 64 } else { 32 },
        split: random.one_in(3),
        wide: random.one_in(3),
        clear: random.one_in(2),
        tokens_in_memory: random.one_in(2),
        many: random.one_in(2),
        chunk_tokens: 1 + random.below([4, args::CHUNK][usize::from(chunks)]),
        few_tokens: [0, random.below(10), u32::MAX][random.below(3) as usize],
        slots: random.one_in(2),
    }
}

/// Rounds in which everybody takes part, each rank as it likes.
fn exchange(world: &World, random: &mut Random, rounds: usize) -> Vec<Vec<Style>> {
    let ranks = world.ranks.len();
    let mut styles = vec![Vec::new(); ranks];
    for rank in &mut styles {
        rank.extend((0..rounds).map(|_| random_style(random)));
    }
    let mut launches = Vec::new();
    for (rank, styles) in styles.iter().enumerate() {
        for (turn, style) in styles.iter().enumerate() {
            launches.extend(world.launches(rank, turn, *style));
        }
    }
    run(world, &launches, random.draw());
    styles
}

fn whole_rounds(seed: u64, world: u32, rounds: usize) {
    let mut random = Random(seed * 1000 + u64::from(world));
    let shape = random_shape(&mut random, world);
    let mut world = World::new(&shape);
    for _ in 0..rounds {
        let tokens = |_| {
            let tokens = world.maker().random_tokens(&mut random);
            world.maker().perhaps_onto(&mut random, tokens)
        };
        let tokens = (0..world.ranks.len()).map(tokens).collect();
        world.add_turn(tokens, &mut random);
    }
    let styles = exchange(&world, &mut random, rounds);
    let all: Vec<usize> = (0..world.ranks.len()).collect();
    for (rank, styles) in styles.iter().enumerate() {
        for (turn, style) in styles.iter().enumerate() {
            let layout = world.round(turn).layout(rank, &all);
            world.check_rows(rank, turn, &layout, *style, |_| true);
        }
    }
    (0..rounds).for_each(|turn| world.check_results(turn));
    world.check_poison();
    for rank in 0..world.ranks.len() {
        assert_eq!(world.report(rank), Default::default(), "nothing was wrong, at rank {rank}");
        let control = world.control(rank);
        assert_eq!(control.next_epoch, rounds as u32 + 1);
        assert_eq!(control.next_parity, rounds as u32 % 2);
        assert_eq!(
            (control.absent, control.left_out, control.missed, control.suspects),
            (0, 0, 0, 0)
        );
    }
}

#[test]
fn one_rank() {
    for_seeds(30, |seed| whole_rounds(seed, 1, 3));
}

#[test]
fn two_ranks() {
    for_seeds(40, |seed| whole_rounds(seed, 2, 4));
}

#[test]
fn three_to_five_ranks() {
    for_seeds(80, |seed| whole_rounds(seed, 3 + (seed % 3) as u32, 3));
}

/// Blocks as on a GPU, the most choices, many experts, more tokens than blocks.
#[test]
fn the_largest_of_each() {
    [false, true].into_iter().for_each(largest);
}

fn largest(exact: bool) {
    let shape = Shape {
        // More ranks than the vectors of a token's choices can go to side by side.
        firsts: vec![0, if exact { 512 } else { 500 }, 1000, 1024],
        top_k: 32,
        max_tokens: 9,
        payload: Payload::Raw { token_bytes: 16 * 530, scale_bytes: 4 * 520 },
        values: 8 * 520,
        results: Number::Bf16,
        padding: 1,
        exact,
    };
    let mut random = Random(7);
    let mut world = World::new(&shape);
    let tokens = (0..3).map(|_| world.maker().tokens(&mut random, 9)).collect();
    world.add_turn(tokens, &mut random);
    let style = Style {
        blocks: 2,
        threads: args::THREADS,
        split: false,
        wide: false,
        clear: false,
        tokens_in_memory: false,
        many: false,
        chunk_tokens: 5,
        few_tokens: 0,
        slots: exact,
    };
    let launches: Vec<Launch> = (0..3).flat_map(|rank| world.launches(rank, 0, style)).collect();
    run(&world, &launches, 1);
    world.check_whole(0, style);
    world.check_poison();
    // By the kernels for many tokens, too.
    let tokens = (0..3).map(|_| world.maker().tokens(&mut random, 9)).collect();
    world.add_turn(tokens, &mut random);
    let style = Style { many: true, ..style };
    let launches: Vec<Launch> = (0..3).flat_map(|rank| world.launches(rank, 1, style)).collect();
    run(&world, &launches, 2);
    world.check_whole(1, style);
    world.check_poison();
    // And by those as few are.
    let tokens = (0..3).map(|_| world.maker().tokens(&mut random, 9)).collect();
    world.add_turn(tokens, &mut random);
    let style = Style { few_tokens: 9, ..style };
    let launches: Vec<Launch> = (0..3).flat_map(|rank| world.launches(rank, 2, style)).collect();
    run(&world, &launches, 3);
    world.check_whole(2, style);
    world.check_poison();
}

/// Scales go out when a warp has one for each lane: of tokens that end just before that, with it and after it. And part by part.
#[test]
fn scales_of_long_tokens() {
    for (scales, steps) in [(Scales::Float, 8), (Scales::Power, 32)] {
        for values in [512 * steps - 16, 512 * steps, 512 * steps + 16, 1024 * steps + 528] {
            let payload = Payload::Fp8 { from: Number::Bf16, scales };
            let shape = Shape {
                firsts: vec![0, 2, 3],
                top_k: 2,
                max_tokens: 3, // Of which two warps are dealt one each, and take turns with the third.
                payload,
                values,
                results: Number::Bf16,
                padding: 1,
                exact: false,
            };
            let mut random = Random(u64::from(values));
            let mut world = World::new(&shape);
            let style = Style {
                blocks: 2,
                threads: 64,
                split: false,
                wide: false,
                clear: false,
                tokens_in_memory: false,
                many: true,
                chunk_tokens: 1,
                few_tokens: 0,
                slots: false,
            };
            for (turn, slots) in [false, true].into_iter().enumerate() {
                let style = Style { slots, ..style };
                let tokens = (0..2).map(|_| world.maker().tokens(&mut random, 3)).collect();
                world.add_turn(tokens, &mut random);
                run_whole(&world, turn, style, 1 + turn as u64);
            }
        }
    }
}

/// Each part of a token has a key of its own where warps send them, and each warp that shares one takes the key of a block's: tokens of
/// whole parts, of one vector more, of as many parts as there are keys, and of more, when parts are longer. With much poison in all of
/// them. In some rounds one rank has few tokens and sends by blocks, while the other receives many; some are split.
#[test]
fn keys_of_long_tokens() {
    let part = 16 * 2 * 32;
    let most = args::KEYS * part;
    for token_bytes in [16, part, part + 16, 7 * part, most - 16, most, most + 16, 2 * most + 528] {
        for scale_bytes in [0, 4, 4 * 70] {
            let shape = Shape {
                firsts: vec![0, 2, 3],
                top_k: 2,
                max_tokens: 4,
                payload: Payload::Raw { token_bytes, scale_bytes },
                values: 16,
                results: Number::Bf16,
                padding: 1,
                exact: false,
            };
            let mut random = Random(u64::from(token_bytes + scale_bytes));
            let mut world = World::new(&shape);
            let plain = Style { threads: 64, many: true, chunk_tokens: 1, ..PLAIN };
            for turn in 0..8 {
                let few = [0, 2, 0, u32::MAX][turn % 4];
                let (slots, split, blocks) = (turn >= 4, turn % 4 == 2, 1 + turn as u32 % 3);
                let style = Style { slots, split, blocks, few_tokens: few, ..plain };
                let tokens = [4, if few == 0 { 4 } else { 2 }]
                    .map(|count| world.maker().tokens(&mut random, count));
                world.add_turn(tokens.into(), &mut random);
                run_whole(&world, turn, style, 1 + turn as u64);
            }
        }
    }
}

/// Keys of a token that a block has sent come one by one: none is forgotten before all have come, nor before all warps that share the token
/// have theirs, be it for vectors, for scales alone, or for nothing.
#[test]
fn keys_come_one_by_one() {
    for_seeds(900, |seed| {
        let mut random = Random(seed + 900);
        let vectors = [1 + random.below(3), 33 + random.below(32)][usize::from(random.one_in(2))];
        let shape = Shape {
            firsts: vec![0, 1, 2],
            top_k: 2,
            max_tokens: 1,
            payload: Payload::Raw { token_bytes: 16 * vectors, scale_bytes: 4 * random.below(70) },
            values: 16,
            results: Number::Bf16,
            padding: 1,
            exact: false,
        };
        let mut world = World::new(&shape);
        for turn in 0..2 {
            let tokens = (0..2).map(|_| world.maker().tokens(&mut random, 1)).collect();
            world.add_turn(tokens, &mut random);
            // For the tokens of both ranks: one warp takes each, or two or four share it.
            let threads = [64, 128, 256][random.below(3) as usize];
            let style = Style { blocks: 1, threads, ..PLAIN };
            run_whole(&world, turn, style, random.draw());
        }
    });
}

/// Few tokens for many warps: up to eight share one, and some of them have no part of it.
#[test]
fn warps_share_a_token() {
    let fp8 = Payload::Fp8 { from: Number::Bf16, scales: Scales::Float };
    for payload in [fp8, Payload::Raw { token_bytes: 16 * 150, scale_bytes: 4 * 70 }] {
        for (count, values) in [(1, 2400), (2, 2400), (1, 160), (3, 1040)] {
            let shape = Shape {
                firsts: vec![0, 2, 3],
                top_k: 3,
                max_tokens: count,
                payload,
                values,
                results: Number::Bf16,
                padding: 1,
                exact: false,
            };
            let mut random = Random(u64::from(values + count));
            let mut world = World::new(&shape);
            for (turn, slots) in [false, true].into_iter().enumerate() {
                let tokens = (0..2).map(|_| world.maker().tokens(&mut random, count)).collect();
                world.add_turn(tokens, &mut random);
                let style = Style { blocks: 3, threads: 256, slots, ..PLAIN };
                run_whole(&world, turn, style, 1 + turn as u64);
            }
        }
    }
}

/// Epochs start anew after the last one, and are never what memory holds at first.
#[test]
fn epochs_wrap() {
    for_seeds(4, |seed| {
        let mut random = Random(seed);
        let shape = random_shape(&mut random, 2);
        let mut world = World::new(&shape);
        for rank in 0..2 {
            world.set_control(
                rank,
                MoeControl { next_epoch: args::LAST_EPOCH - 1, ..MoeControl::default() },
            );
        }
        for _ in 0..4 {
            let tokens = (0..2).map(|_| world.maker().random_tokens(&mut random)).collect();
            world.add_turn(tokens, &mut random);
        }
        exchange(&world, &mut random, 4);
        (0..4).for_each(|turn| world.check_results(turn));
        assert_eq!(world.control(0).next_epoch, 3);
    });
}

const PLAIN: Style = Style {
    blocks: 2,
    threads: 32,
    split: false,
    wide: false,
    clear: true,
    tokens_in_memory: false,
    many: false,
    chunk_tokens: 2,
    few_tokens: 0,
    slots: false,
};

/// The same, perhaps for many tokens.
fn plain(random: &mut Random) -> Style {
    Style { many: random.one_in(2), few_tokens: 3 * random.below(3), ..PLAIN }
}

/// A small world, some rounds.
fn small(random: &mut Random, ranks: u32, rounds: usize) -> World {
    let mut shape = random_shape(random, ranks);
    shape.max_tokens = shape.max_tokens.min(6);
    let mut world = World::new(&shape);
    world.timeout_ns = 1_600_000;
    for _ in 0..rounds {
        let tokens = (0..ranks).map(|_| world.maker().random_tokens(random)).collect();
        world.add_turn(tokens, random);
    }
    world
}

/// What a round brings if only some ranks are there.
fn check_without(world: &World, turn: usize, there: &[usize]) {
    let layouts: Vec<Option<Layout>> = (0..world.ranks.len())
        .map(|rank| there.contains(&rank).then(|| world.round(turn).layout(rank, there)))
        .collect();
    for &rank in there {
        let layout = layouts[rank].as_ref().unwrap();
        world.check_rows(rank, turn, layout, PLAIN, |_| true);
        for token in 0..world.tokens[turn][rank].count {
            let expected = world.round(turn).result(rank, token, &layouts);
            assert_eq!(world.found(rank, turn, token), expected, "result {token} at {rank}");
        }
    }
}

/// A rank that never comes is named, and the others have all the rest, in this round and in those after.
#[test]
fn a_rank_that_never_comes() {
    never_comes(12, 1, plain);
}

/// Only some blocks have choices of it to count: those that have none, and wait for those, wait longer than they do.
#[test]
fn a_rank_that_never_comes_to_many_blocks() {
    never_comes(12, 4, |random| {
        let few_tokens = 3 * random.below(3);
        Style { many: true, few_tokens, blocks: 5 + random.below(4), chunk_tokens: 1, ..PLAIN }
    });
}

fn never_comes(seeds: u64, longer: u64, plain: impl Fn(&mut Random) -> Style) {
    for_seeds(seeds, |seed| {
        let mut random = Random(seed + 100);
        let mut world = small(&mut random, 3, 3);
        world.timeout_ns *= longer;
        let dead = random.below(3) as usize;
        let there: Vec<usize> = (0..3).filter(|rank| *rank != dead).collect();
        let mut launches = Vec::new();
        for &rank in &there {
            for turn in 0..3 {
                launches.extend(world.launches(rank, turn, plain(&mut random)));
            }
        }
        run(&world, &launches, random.draw());
        (0..3).for_each(|turn| check_without(&world, turn, &there));
        for rank in there {
            let (report, control) = (world.report(rank), world.control(rank));
            let mut late = [0; args::MAX_RANKS];
            late[dead] = 1;
            assert_eq!(report.late_table, late, "at rank {rank}");
            assert_eq!((report.late_tokens, report.late_results), Default::default());
            assert_eq!((control.absent, control.left_out), (1 << dead, 1 << dead));
        }
    });
}

/// A rank that says what it will send, and does not, or all but a key of each token: its rows are zeros, and no others; and it is sent no
/// results.
#[test]
fn tokens_that_never_come() {
    for_seeds(60, |seed| {
        let mut random = Random(seed + 200);
        let mut shape = random_shape(&mut random, 3);
        shape.firsts = vec![0, 2, 4, 6];
        if seed % 2 == 0 {
            // Nothing that could turn what was not sent into zeros by itself.
            shape.payload = Payload::Fp8 { from: Number::Bf16, scales: Scales::Float };
        }
        shape.top_k = shape.top_k.min(4);
        let mut world = World::new(&shape);
        // Of everybody's steps: a block with one warp takes some 20,000 of them for each token while others wait, and there may be 210. Who
        // is there is not to be missed for that.
        world.timeout_ns = if shape.max_tokens > 8 { 6_400_000 } else { 1_600_000 };
        let most = shape.max_tokens;
        let tokens = (0..3).map(|_| world.maker().tokens(&mut random, most)).collect();
        world.add_turn(tokens, &mut random);
        let dead = random.below(3) as usize;
        let there: Vec<usize> = (0..3).filter(|rank| *rank != dead).collect();
        let mut launches = Vec::new();
        for &rank in &there {
            world.put_table(dead, rank, 0, 1, 0);
            if let (Payload::Raw { .. }, 1) = (shape.payload, seed % 4) {
                world.put_tokens_without_a_key(dead, rank, &mut random);
            }
            launches.extend(world.launches(rank, 0, plain(&mut random)));
        }
        run(&world, &launches, random.draw());
        // Whoever was late is sent nothing.
        world.check_results_poison();
        let layouts: Vec<Option<Layout>> = (0..3)
            .map(|rank| (rank != dead).then(|| world.round(0).layout(rank, &[0, 1, 2])))
            .collect();
        for rank in there {
            let layout = layouts[rank].as_ref().unwrap();
            world.check_rows(rank, 0, layout, PLAIN, |source| source != dead);
            let own = &world.ranks[rank].turns[0];
            let (x, scales) =
                (u64::from(world.geometry.token_bytes), u64::from(world.geometry.scale_bytes));
            let missed: Vec<u32> =
                layout.rows.iter().filter(|(at, _)| at.0 == dead).map(|(_, row)| *row).collect();
            for row in &missed {
                let found = own.rows_x.bytes(u64::from(*row) * x, x as usize);
                assert!(found.iter().all(|byte| *byte == 0), "row {row} at rank {rank}");
                let found = own.rows_scales.bytes(u64::from(*row) * scales, scales as usize);
                assert!(found.iter().all(|byte| *byte == 0), "scales {row} at rank {rank}");
            }
            let report = world.report(rank);
            assert_eq!(report.late_table, [0; args::MAX_RANKS]);
            assert_eq!(report.late_tokens[dead] != 0, !missed.is_empty(), "at rank {rank}");
            for token in 0..world.tokens[0][rank].count {
                let expected = world.round(0).result(rank, token, &layouts);
                assert_eq!(world.found(rank, 0, token), expected, "result {token} at {rank}");
            }
        }
    });
}

/// A rank that dies between the way out and the way back: what it owed is left out, and it is named by those it owed.
#[test]
fn results_that_never_come() {
    for_seeds(12, |seed| {
        let mut random = Random(seed + 300);
        let world = small(&mut random, 3, 2);
        let dead = random.below(3) as usize;
        let there: Vec<usize> = (0..3).filter(|rank| *rank != dead).collect();
        let mut launches = vec![world.launches(dead, 0, plain(&mut random))[0]];
        for &rank in &there {
            for turn in 0..2 {
                launches.extend(world.launches(rank, turn, plain(&mut random)));
            }
        }
        run(&world, &launches, random.draw());
        let layouts: Vec<Option<Layout>> = (0..3)
            .map(|rank| (rank != dead).then(|| world.round(0).layout(rank, &[0, 1, 2])))
            .collect();
        let all_of_dead = world.round(0).layout(dead, &[0, 1, 2]);
        for &rank in &there {
            let layout = layouts[rank].as_ref().unwrap();
            world.check_rows(rank, 0, layout, PLAIN, |_| true);
            for token in 0..world.tokens[0][rank].count {
                let expected = world.round(0).result(rank, token, &layouts);
                assert_eq!(world.found(rank, 0, token), expected, "result {token} at {rank}");
            }
            let (report, owed) =
                (world.report(rank), all_of_dead.rows.keys().any(|at| at.0 == rank));
            assert_eq!(report.late_results[dead] == 1, owed, "at rank {rank}");
            assert_eq!(report.late_table[dead] == 2, !owed, "at rank {rank}");
        }
        check_without(&world, 1, &there);
    });
}

/// A rank whose results come when nobody waits for them any more: they are not taken for anybody's in later rounds.
#[test]
fn results_that_come_too_late() {
    for_seeds(24, |seed| {
        let mut random = Random(seed + 900);
        let mut shape = random_shape(&mut random, 3);
        shape.firsts = vec![0, 2, 4, 6];
        shape.max_tokens = shape.max_tokens.min(6);
        shape.exact = seed % 4 != 0;
        let mut world = World::new(&shape);
        world.timeout_ns = 1_600_000;
        let late = random.below(3) as usize;
        for _ in 0..3 {
            let most = shape.max_tokens;
            let mut tokens: Vec<Tokens> =
                (0..3).map(|_| world.maker().tokens(&mut random, most)).collect();
            for tokens in &mut tokens {
                // It owes something to everybody, who all find it missing in the first round.
                let first = &mut tokens.indices[..shape.top_k as usize];
                first.fill(-1);
                first[0] = shape.firsts[late] as i32;
            }
            world.add_turn(tokens, &mut random);
        }
        let there: Vec<usize> = (0..3).filter(|rank| *rank != late).collect();
        let halves = world.launches(late, 0, Style { split: true, ..plain(&mut random) });
        let mut launches = halves[..2].to_vec();
        for &rank in &there {
            launches.extend(world.launches(rank, 0, plain(&mut random)));
        }
        run(&world, &launches, random.draw());
        // Now it sends its results of the first round.
        run(&world, &halves[2..3], random.draw());
        let mut launches = Vec::new();
        for &rank in &there {
            (1..3).for_each(|turn| launches.extend(world.launches(rank, turn, plain(&mut random))));
        }
        run(&world, &launches, random.draw());
        (1..3).for_each(|turn| check_without(&world, turn, &there));
    });
}

/// Ranks that are about as late as is waited for: blocks find different things, and still agree. What a rank has of ranks it
/// never missed is right, and everything ends.
#[test]
fn ranks_that_are_just_too_late() {
    let [absent, present] = just_too_late(150, PLAIN);
    // Or nothing was tried.
    if std::env::var_os("IMMWIRE_SEEDS").is_none() {
        assert!(absent > 20 && present > 0, "decided absent {absent} times, present {present}");
    }
}

/// Warps of a block look by themselves, too.
#[test]
fn ranks_that_are_just_too_late_for_several_warps() {
    just_too_late(60, Style { threads: 96, ..PLAIN });
}

#[test]
fn ranks_that_are_just_too_late_among_many_tokens() {
    just_too_late(100, Style { many: true, threads: 64, ..PLAIN });
}

/// With room for many they agree, too, whether this is a round of few.
#[test]
fn ranks_that_are_just_too_late_in_rounds_of_few_or_many() {
    for few_tokens in [3, 6] {
        just_too_late(150, Style { many: true, few_tokens, threads: 64, ..PLAIN });
    }
}

/// Returns how often a rank was decided upon to be absent, and to be present.
fn just_too_late(seeds: u64, plain: Style) -> [u32; 2] {
    let outcomes = [const { Cell::new(0) }; 2];
    for_seeds(seeds, |seed| {
        let mut random = Random(seed + 400);
        let ranks = 2 + random.below(2);
        let mut world = small(&mut random, ranks, 2);
        world.timeout_ns = 1000 << random.below(9);
        let mut launches = Vec::new();
        // With many, a rank's own tokens are at their places before it is known whose choices count.
        let style = Style { blocks: 4, slots: !plain.many && random.one_in(2), ..plain };
        // One of them is held up for about as long, by waiting for somebody else.
        let mut elsewhere = small(&mut random, 2, 1);
        elsewhere.timeout_ns = world.timeout_ns * u64::from(90 + random.below(20)) / 100;
        let held_up = random.below(ranks);
        let wait = Launch { stream: held_up, ..elsewhere.launches(0, 0, PLAIN)[0] };
        launches.push(wait);
        for rank in 0..ranks as usize {
            (0..2).for_each(|turn| launches.extend(world.launches(rank, turn, style)));
        }
        run(&world, &launches, random.draw());
        for rank in 0..ranks as usize {
            let report = world.report(rank);
            for decided in world.control(rank).decisions.into_iter().filter(|word| *word != 0) {
                let met = &outcomes[decided as usize % 2];
                met.set(met.get() + 1);
            }
            let mut absent: Vec<usize> = Vec::new();
            for turn in 0..2 {
                let epoch = turn as u32 + 1;
                let missed_by_all = |other: usize| {
                    report.late_table[other] != 0 && report.late_table[other] <= epoch
                };
                let left_out = |other: usize, from: &[u32; args::MAX_RANKS]| {
                    from[other] != 0 && from[other] < epoch
                };
                for other in 0..ranks as usize {
                    let gone = missed_by_all(other)
                        || left_out(other, &report.late_tokens)
                        || left_out(other, &report.late_results);
                    if gone && !absent.contains(&other) {
                        absent.push(other);
                    }
                }
                let there: Vec<usize> =
                    (0..ranks as usize).filter(|r| !absent.contains(r)).collect();
                // One layout at all blocks, whatever each has seen.
                let layout = world.round(turn).layout(rank, &there);
                world.check_rows(rank, turn, &layout, style, |source| {
                    report.late_tokens[source] == 0
                });
            }
        }
    });
    outcomes.map(|met| met.get())
}

/// Who was left out by itself, too, has what the others still send it.
#[test]
fn a_rank_that_left_itself_out() {
    for_seeds(12, |seed| {
        let mut random = Random(seed + 800);
        let world = small(&mut random, 2, 1);
        let control = MoeControl { next_epoch: 1, absent: 1, left_out: 1, ..MoeControl::default() };
        world.set_control(0, control);
        let launches: Vec<Launch> =
            (0..2).flat_map(|rank| world.launches(rank, 0, plain(&mut random))).collect();
        run(&world, &launches, random.draw());
        let layouts = [world.round(0).layout(0, &[1]), world.round(0).layout(1, &[0, 1])];
        for (rank, layout) in layouts.iter().enumerate() {
            world.check_rows(rank, 0, layout, PLAIN, |_| true);
        }
        let [here, there] = layouts.map(Some);
        for (rank, layouts) in [[None, there.clone()], [here, there]].iter().enumerate() {
            assert_eq!(world.report(rank), Default::default(), "nothing was late, at rank {rank}");
            for token in 0..world.tokens[0][rank].count {
                let expected = world.round(0).result(rank, token, layouts);
                assert_eq!(world.found(rank, 0, token), expected, "result {token} at {rank}");
            }
        }
    });
}

/// Blocks that find no room on the GPU are not waited for beyond the deadline: nobody's table counts then.
#[test]
fn blocks_that_never_come() {
    for_seeds(20, |seed| {
        let mut random = Random(seed + 600);
        let mut world = small(&mut random, 2, 1);
        world.timeout_ns = 200_000;
        let style = Style { many: true, split: true, blocks: 3, ..PLAIN };
        let mut launches = Vec::new();
        for rank in 0..2 {
            let [send, receive, ..] = world.launches(rank, 0, style)[..] else { unreachable!() };
            launches.extend([send, Launch { missing: 1, ..receive }]);
        }
        run(&world, &launches, random.draw());
        for rank in 0..2 {
            assert_eq!(world.report(rank).late_table[..2], [1, 1]);
            assert_eq!(world.control(rank).absent, 3);
            let layout = world.round(0).layout(rank, &[]);
            world.check_rows(rank, 0, &layout, style, |_| true);
        }
    });
}

/// Whoever sets the word ends all waits.
#[test]
fn an_abort_ends_waits() {
    for (many, few_tokens) in [(false, 0), (true, 0), (true, 6)] {
        let mut random = Random(500);
        let mut world = small(&mut random, 2, 1);
        world.timeout_ns = 1 << 60;
        world.set_control(0, MoeControl { next_epoch: 1, abort: 1, ..MoeControl::default() });
        let launches = world.launches(0, 0, Style { many, few_tokens, ..PLAIN });
        run(&world, &launches, 1);
        assert_eq!(world.report(0).late_table[1], 1);
    }
}

/// A choice that is none is dropped and reported, and the rest goes on.
#[test]
fn choices_that_are_none() {
    for (wrong, at) in [(vec![4, 1], 0), (vec![0, -2], 1), (vec![2, 2], 1), (vec![i32::MAX, 0], 0)]
    {
        for wide in [false, true] {
            let shape = Shape {
                firsts: vec![0, 2, 4],
                top_k: 2,
                max_tokens: 3,
                payload: Payload::Raw { token_bytes: 32, scale_bytes: 4 },
                values: 16,
                results: Number::Bf16,
                padding: 1,
                exact: false,
            };
            let mut random = Random(600);
            let mut world = World::new(&shape);
            let mut tokens: Vec<Tokens> =
                (0..2).map(|_| world.maker().tokens(&mut random, 3)).collect();
            tokens[0].indices = vec![0, 3, wrong[0], wrong[1], 3, -1];
            world.add_turn(tokens.clone(), &mut random);
            let style = Style { wide, ..PLAIN };
            let launches: Vec<Launch> =
                (0..2).flat_map(|rank| world.launches(rank, 0, style)).collect();
            run(&world, &launches, 3);
            let report = world.report(0);
            assert_eq!(
                (report.refused, report.token, report.choice),
                (1, 1, at as u32),
                "{wrong:?}"
            );
            assert_eq!(report.index, wrong[at]);
            assert_eq!(world.report(1).refused, 0);
            // As if it had been dropped.
            world.tokens[0][0].indices[2 + at] = -1;
            world.check_whole(0, style);
        }
    }
}

/// Rows for which there is no room are left out and reported, and so are tokens that are too many.
#[test]
fn no_room() {
    for exact in [false, true] {
        [false, true].into_iter().for_each(|many| too_little_room(exact, many));
    }
}

fn too_little_room(exact: bool, many: bool) {
    // One of the two with slots.
    let plain = Style { slots: exact, many, ..PLAIN };
    let mut random = Random(700);
    let shape = Shape {
        firsts: vec![0, 1, 2],
        top_k: 1,
        max_tokens: 4,
        payload: Payload::Raw { token_bytes: 16, scale_bytes: 0 },
        values: 8,
        results: Number::Bf16,
        padding: 1,
        exact,
    };
    let mut world = World::new(&shape);
    let tokens = (0..2)
        .map(|_| Tokens { indices: vec![0; 4], ..world.maker().tokens(&mut random, 4) })
        .collect();
    world.add_turn(tokens, &mut random);
    world.rows = 5;
    let launches: Vec<Launch> = (0..2).flat_map(|rank| world.launches(rank, 0, plain)).collect();
    run(&world, &launches, 3);
    let past = world.ranks[0].turns[0].rows_x.bytes(5 * 16, 3 * 16);
    // Slots there are enough.
    assert!(exact || past.iter().all(|byte| *byte == UNTOUCHED), "a row without room");
    let mut layout = world.round(0).layout(0, &[0, 1]);
    world.check_rows(0, 0, &layout, plain, |_| true);
    assert_eq!((world.report(0).rows_left_out, world.report(1).rows_left_out), (1, 0));
    // What was left out counts as nothing, and is not waited for.
    layout.rows.retain(|_, row| *row < 5);
    assert_eq!((world.report(0).late_results, world.report(1).late_results), Default::default());
    let layouts = [Some(layout), Some(world.round(0).layout(1, &[0, 1]))];
    for rank in 0..2 {
        for token in 0..4 {
            assert_eq!(world.found(rank, 0, token), world.round(0).result(rank, token, &layouts));
        }
    }

    let mut world = World::new(&shape);
    let tokens = (0..2).map(|_| world.maker().tokens(&mut random, 4)).collect();
    world.add_turn(tokens, &mut random);
    let launches: Vec<Launch> = (0..2)
        .flat_map(|rank| world.launches(rank, 0, plain))
        .map(|launch| Launch {
            args: MoeArgs { tokens: 4 + u32::from(launch.stream == 1), ..launch.args },
            ..launch
        })
        .collect();
    run(&world, &launches, 4);
    world.check_whole(0, plain);
    assert_eq!((world.report(0).tokens_left_out, world.report(1).tokens_left_out), (0, 1));

    // Sums for which there is no room; and then a round in which there is.
    let mut world = World::new(&shape);
    for _ in 0..2 {
        let tokens = (0..2).map(|_| world.maker().tokens(&mut random, 4)).collect();
        world.add_turn(tokens, &mut random);
    }
    let launches: Vec<Launch> = (0..2)
        .flat_map(|rank| world.launches(rank, 0, plain))
        .map(|launch| {
            let short = launch.kernel.combines() && launch.stream == 0;
            let tokens = if short { 3 } else { launch.args.tokens };
            Launch { args: MoeArgs { tokens, ..launch.args }, ..launch }
        })
        .collect();
    run(&world, &launches, 6);
    assert_eq!((world.report(0).tokens_left_out, world.report(1).tokens_left_out), (1, 0));
    assert!(world.found(0, 0, 3).iter().all(|byte| *byte == UNTOUCHED), "past the room");
    world.check_poison();
    let launches: Vec<Launch> = (0..2).flat_map(|rank| world.launches(rank, 1, plain)).collect();
    run(&world, &launches, 7);
    world.check_whole(1, plain);
    world.check_poison();

    (0..2).for_each(|holder| results_past_the_end(&shape, plain, holder));

    // A number in memory that is below zero: no tokens.
    let style = Style { tokens_in_memory: true, ..plain };
    for below in [-1, i32::MIN] {
        let mut world = World::new(&shape);
        let mut tokens: Vec<_> = (0..2).map(|_| world.maker().tokens(&mut random, 4)).collect();
        tokens[1].count = below.cast_unsigned();
        world.add_turn(tokens, &mut random);
        let launches: Vec<Launch> = (0..2)
            .flat_map(|rank| world.launches(rank, 0, style))
            .map(|launch| Launch { args: MoeArgs { tokens: 4, ..launch.args }, ..launch })
            .collect();
        run(&world, &launches, 8);
        world.tokens[0][1].count = 0;
        world.tokens[0][1].indices.clear();
        world.check_whole(0, style);
        world.check_poison();
        assert_eq!((world.report(0).tokens_left_out, world.report(1).tokens_left_out), (0, 1));
    }
}

/// Rows of rank `holder` that have no results, and tokens that have no memory, whatever the number in memory says. Of rank 1 the last row
/// is one of its own tokens'.
fn results_past_the_end(shape: &Shape, plain: Style, holder: usize) {
    let mut random = Random(701);
    let mut world = World::new(shape);
    world.rows = 5;
    let tokens = (0..2)
        .map(|_| Tokens { indices: vec![holder as i32; 3], ..world.maker().tokens(&mut random, 3) })
        .collect();
    world.add_turn(tokens, &mut random);
    let style = Style { tokens_in_memory: true, ..plain };
    let launches: Vec<Launch> = (0..2)
        .flat_map(|rank| world.launches(rank, 0, style))
        .map(|launch| {
            let rows = if launch.kernel.combines() { 4 } else { launch.args.rows };
            let tokens = if launch.stream == 1 { 2 } else { launch.args.tokens };
            Launch { args: MoeArgs { rows, tokens, ..launch.args }, ..launch }
        })
        .collect();
    run(&world, &launches, 5);
    assert_eq!((world.report(0).tokens_left_out, world.report(1).tokens_left_out), (0, 1));
    for rank in 0..2 {
        assert_eq!(world.report(rank).rows_left_out, u32::from(rank == holder));
    }
    world.tokens[0][1].count = 2;
    world.tokens[0][1].indices.truncate(2);
    let mut layouts: Vec<_> = (0..2).map(|rank| world.round(0).layout(rank, &[0, 1])).collect();
    world.check_rows(holder, 0, &layouts[holder], style, |_| true);
    layouts[holder].rows.retain(|_, row| *row < 4);
    let layouts: Vec<_> = layouts.into_iter().map(Some).collect();
    for rank in 0..2 {
        for token in 0..world.tokens[0][rank].count {
            assert_eq!(world.found(rank, 0, token), world.round(0).result(rank, token, &layouts));
        }
    }
}

/// Keys are different for more turns than a token has words, and none of them is poison.
#[test]
fn keys_are_enough() {
    let key = |turn: u32| turn.wrapping_mul(args::KEY);
    assert_eq!(args::KEY % 2, 1);
    // Odd, so that all are different; the turn whose key is poison is far away.
    let poison = (1..=u32::MAX).find(|turn| key(*turn) == u32::MAX).unwrap();
    assert!(poison > 1 << 24, "{poison}");
}
