//! Ranks in one process, over shared memory, against a gather by routes; bit for bit.

#![expect(clippy::cast_possible_truncation, reason = "small numbers")]

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use immwire_core::moe::TableError;

use super::*;
use crate::engine::{LibfabricOptions, Transport};
use crate::error::CountError;
use crate::sim::{Fabric, FabricConfig, NicModel};

const LONG: Duration = Duration::from_secs(60);

/// Numbers that follow from a seed.
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    fn below(&mut self, end: u32) -> u32 {
        self.next() % end
    }

    /// Between -2 and 2.
    fn value(&mut self) -> f32 {
        f32::from(self.next() as i16) / 16384.0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Routes {
    Uniform,
    /// Low experts more often, a quarter dropped.
    Skewed,
    AllToOne,
    None,
}

/// One rank's tokens in one round.
#[derive(Debug, Clone, PartialEq)]
struct Batch {
    tokens: usize,
    x: Vec<u8>,
    scales: Vec<u8>,
    indices: Vec<i32>,
    weights: Vec<f32>,
    /// What results are added to.
    onto: Option<Vec<u8>>,
    /// Whether dispatch and combine are called in halves.
    halves: bool,
    /// Whether tokens are received in slots.
    slots: bool,
}

impl Batch {
    fn new(config: &Config, routes: Routes, tokens: u32, random: &mut Random) -> Self {
        let experts = *config.firsts.last().unwrap();
        let top_k = config.top_k.min(experts) as usize;
        let mut indices = Vec::new();
        for _ in 0..tokens {
            let mut chosen: Vec<i32> = Vec::new();
            while chosen.len() < top_k {
                let expert = match routes {
                    Routes::Uniform => random.below(experts) as i32,
                    Routes::Skewed if random.below(4) == 0 => -1,
                    Routes::Skewed => {
                        (random.below(experts) * random.below(experts) / experts) as i32
                    }
                    Routes::AllToOne if chosen.is_empty() => experts as i32 - 1,
                    Routes::AllToOne | Routes::None => -1,
                };
                if expert == -1 || !chosen.contains(&expert) {
                    chosen.push(expert);
                }
            }
            chosen.resize(config.top_k as usize, -1);
            indices.extend(chosen);
        }
        let value = |random: &mut Random| config.format.store(random.value()).to_le_bytes();
        let values = tokens * config.token_bytes / 2;
        Self {
            tokens: tokens as usize,
            x: (0..values).flat_map(|_| value(random)).collect(),
            scales: (0..tokens * config.scale_bytes).map(|_| random.next() as u8).collect(),
            weights: indices.iter().map(|_| random.value()).collect(),
            indices,
            onto: (random.below(2) == 0)
                .then(|| (0..tokens * config.hidden).flat_map(|_| value(random)).collect()),
            halves: random.below(2) == 0,
            slots: random.below(2) == 0,
        }
    }

    fn tokens(&self) -> Tokens<'_> {
        Tokens { x: &self.x, scales: &self.scales, indices: &self.indices, weights: &self.weights }
    }
}

/// What an expert makes of a token: each value times a number of its own, plus one of its place.
fn expert(format: Format, number: u32, x: &[u8], hidden: u32) -> Vec<u16> {
    let values: Vec<_> = values(x).map(|bits| format.load(bits)).collect();
    let at = |place: u32| values[place as usize % values.len()];
    let factor = 0.3 + number as f32;
    (0..hidden).map(|place| format.store(at(place).mul_add(factor, place as f32 / 7.0))).collect()
}

/// What one rank has of a round: rows, their scales, offsets, and results.
#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    counts: Vec<u32>,
    offsets: Vec<u32>,
    x: Vec<u8>,
    scales: Vec<u8>,
    out: Vec<u8>,
}

/// The same by looking up each route, without any of the exchange.
fn oracle(config: &Config, batches: &[Batch], rank: usize) -> Outcome {
    let (top_k, format) = (config.top_k as usize, config.format);
    let (bytes, scale_bytes) = (config.token_bytes as usize, config.scale_bytes as usize);
    let experts = |rank: usize| config.firsts[rank]..config.firsts[rank + 1];
    let token = |batch: &Batch, token: usize| batch.x[token * bytes..][..bytes].to_vec();
    let (mut counts, mut offsets) = (vec![], vec![0]);
    let (mut x, mut scales) = (vec![], vec![]);
    for number in experts(rank) {
        let mut count = 0;
        for batch in batches {
            for at in (0..batch.tokens)
                .filter(|at| batch.indices[at * top_k..][..top_k].contains(&(number as i32)))
            {
                x.extend(token(batch, at));
                scales.extend(&batch.scales[at * scale_bytes..][..scale_bytes]);
                count += 1;
            }
        }
        counts.push(count);
        let rows = u32::try_from(x.len() / bytes).unwrap();
        let rows = rows.next_multiple_of(config.padding.get());
        x.resize(rows as usize * bytes, 0);
        scales.resize(rows as usize * scale_bytes, 0);
        offsets.push(rows);
    }
    let mut out = vec![];
    let batch = &batches[rank];
    for at in 0..batch.tokens {
        let hidden = config.hidden as usize;
        let mut total = vec![0.0_f32; hidden];
        if let Some(onto) = &batch.onto {
            total = values(nth(onto, at, 2 * hidden)).map(|value| format.load(value)).collect();
        }
        // Exact sums are those of one rank that has all experts, rounded only at the end.
        let all = 0..*config.firsts.last().unwrap();
        let parts = if config.exact { 1 } else { batches.len() };
        for part in 0..parts {
            let experts = if config.exact { all.clone() } else { experts(part) };
            let mut part = vec![0.0_f32; config.hidden as usize];
            let mut chosen = false;
            for choice in at * top_k..(at + 1) * top_k {
                let Ok(number) = u32::try_from(batch.indices[choice]) else { continue };
                if !experts.contains(&number) {
                    continue;
                }
                chosen = true;
                let y = expert(format, number, &token(batch, at), config.hidden);
                let to = if config.exact { &mut total } else { &mut part };
                for (to, y) in to.iter_mut().zip(y) {
                    *to += batch.weights[choice] * format.load(y);
                }
            }
            for (total, part) in total.iter_mut().zip(part).filter(|_| chosen && !config.exact) {
                *total += format.load(format.store(part));
            }
        }
        out.extend(total.into_iter().flat_map(|value| format.store(value).to_le_bytes()));
    }
    Outcome { counts, offsets, x, scales, out }
}

/// One round of one rank.
fn round(exchange: &mut AllToAll, config: &Config, batch: &Batch) -> Result<Outcome, MoeError> {
    round_within(exchange, config, batch, LONG)
}

fn round_within(
    exchange: &mut AllToAll,
    config: &Config,
    batch: &Batch,
    patience: Duration,
) -> Result<Outcome, MoeError> {
    let (bytes, scale_bytes) = (config.token_bytes as usize, config.scale_bytes as usize);
    let max_rows = exchange.max_rows();
    let room = if batch.slots { exchange.max_slots() } else { max_rows };
    // Padding must become zeros.
    let (mut x, mut scales) = (vec![0xee; room * bytes], vec![0xee; room * scale_bytes]);
    let mut slots = vec![77; max_rows];
    let rows =
        Rows { x: &mut x, scales: &mut scales, slots: batch.slots.then_some(slots.as_mut_slice()) };
    let received = if batch.halves {
        exchange.dispatch_send(&batch.tokens(), patience)?;
        exchange.dispatch_receive(&batch.tokens(), rows, patience)?
    } else {
        exchange.dispatch(&batch.tokens(), rows, patience)?
    };
    let (counts, offsets) = (received.counts.to_vec(), received.offsets.to_vec());
    let rows = *offsets.last().unwrap() as usize;
    if batch.slots {
        // As experts would that gather: from here on it is as if they had come by rows.
        assert!(slots[rows..].iter().all(|slot| *slot == 77));
        let used: BTreeSet<u32> = slots[..rows].iter().copied().filter(|s| *s != NO_SLOT).collect();
        let blank = |slot: usize| {
            x[slot * bytes..][..bytes].iter().all(|byte| *byte == 0xee)
                && scales[slot * scale_bytes..][..scale_bytes].iter().all(|byte| *byte == 0xee)
        };
        let unused = (0..room).filter(|slot| !used.contains(&(*slot as u32)));
        assert!(unused.into_iter().all(blank), "what nobody sent was written");
        let gather = |from: &[u8], bytes: usize| -> Vec<u8> {
            let row = |slot: &u32| match *slot {
                NO_SLOT => vec![0; bytes],
                slot => nth(from, slot as usize, bytes).to_vec(),
            };
            slots[..rows].iter().flat_map(row).collect()
        };
        (x, scales) = (gather(&x, bytes), gather(&scales, scale_bytes));
    }
    let row = config.hidden as usize * 2;
    let mut y = vec![0xee; rows * row];
    let first = config.firsts[config.rank as usize];
    for (local, (count, offset)) in (0..).zip(counts.iter().zip(&offsets)) {
        for at in (*offset..offset + count).map(|at| at as usize) {
            let made =
                expert(config.format, first + local, &x[at * bytes..][..bytes], config.hidden);
            let made: Vec<_> = made.into_iter().flat_map(u16::to_le_bytes).collect();
            y[at * row..][..row].copy_from_slice(&made);
        }
    }
    let mut out = batch.onto.clone().unwrap_or_else(|| vec![0xee; batch.tokens * row]);
    if batch.halves {
        exchange.combine_send(&y, patience)?;
    }
    let results = Results { y: &y, out: &mut out, accumulate: batch.onto.is_some() };
    if batch.halves {
        exchange.combine_receive(results, patience)?;
    } else {
        exchange.combine(results, patience)?;
    }
    x.truncate(rows * bytes);
    scales.truncate(rows * scale_bytes);
    Ok(Outcome { counts, offsets, x, scales, out })
}

/// So many engines, with threads.
fn engines(world: usize, transport: &Transport) -> Vec<TransferEngine> {
    let engine = || TransferEngine::builder().transport(transport.clone()).build().unwrap();
    (0..world).map(|_| engine()).collect()
}

/// The same, each of which has so many transfers.
fn engines_of(world: usize, transfers: u16) -> Vec<TransferEngine> {
    let engine = || TransferEngine::builder().transfers(transfers).build().unwrap();
    (0..world).map(|_| engine()).collect()
}

fn of_rank(config: &Config, rank: u32) -> Config {
    Config { rank, ..config.clone() }
}

/// Exchanges among these engines, joined.
fn join(engines: &[TransferEngine], config: &Config) -> Vec<AllToAll> {
    let open = |(rank, engine)| AllToAll::open(engine, &of_rank(config, rank)).unwrap();
    let joining: Vec<_> = (0..).zip(engines).map(open).collect();
    let seats: Vec<_> = joining.iter().map(Joining::seat).collect();
    thread::scope(|scope| {
        let seats = &seats;
        let join = |joining: Joining| scope.spawn(move || joining.join(seats, LONG).unwrap());
        let threads: Vec<_> = joining.into_iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All rounds, by round and rank; ranks pause as `pauses` has it.
fn run(
    engines: &[TransferEngine],
    config: &Config,
    batches: &[Vec<Batch>],
    pauses: u64,
) -> Vec<Vec<Outcome>> {
    let exchanges = join(engines, config);
    let of_ranks: Vec<Vec<Outcome>> = thread::scope(|scope| {
        let rank = |(rank, mut exchange): (usize, AllToAll)| {
            scope.spawn(move || {
                let mut random = Random(pauses ^ rank as u64);
                let config = of_rank(config, rank as u32);
                let round = |batches: &Vec<Batch>| {
                    thread::sleep(Duration::from_micros(random.below(300).into()));
                    round(&mut exchange, &config, &batches[rank]).unwrap()
                };
                let rounds = batches.iter().map(round).collect();
                assert_eq!(exchange.rounds(), batches.len() as u64);
                rounds
            })
        };
        let threads: Vec<_> = exchanges.into_iter().enumerate().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    (0..batches.len())
        .map(|at| of_ranks.iter().map(|rounds| rounds[at].clone()).collect())
        .collect()
}

fn config(firsts: &[u32]) -> Config {
    Config {
        rank: 0,
        firsts: firsts.to_vec(),
        top_k: 3,
        max_tokens: 7,
        token_bytes: 32,
        scale_bytes: 4,
        hidden: 24,
        format: Format::Bf16,
        padding: NonZeroU32::new(4).unwrap(),
        chunk_tokens: NonZeroU32::new(7).unwrap(),
        exact: false,
    }
}

/// Rounds of batches: by round and rank.
fn batches(config: &Config, routes: &[Routes], random: &mut Random) -> Vec<Vec<Batch>> {
    let world = config.firsts.len() - 1;
    let round = |routes: &Routes, random: &mut Random| {
        (0..world)
            .map(|rank| {
                // One rank in three has nothing.
                let tokens = random.below(config.max_tokens + 1);
                let tokens = if random.below(3) == 0 && rank > 0 { 0 } else { tokens };
                Batch::new(config, *routes, tokens, random)
            })
            .collect()
    };
    routes.iter().map(|routes| round(routes, random)).collect()
}

const ROUTES: [Routes; 6] = [
    Routes::Uniform,
    Routes::Skewed,
    Routes::AllToOne,
    Routes::None,
    Routes::Uniform,
    Routes::Skewed,
];

fn check(engines: &[TransferEngine], config: &Config, seed: u64) -> u32 {
    let mut random = Random(seed);
    let batches = batches(config, &ROUTES, &mut random);
    let first = run(engines, config, &batches, seed);
    let again = run(engines, config, &batches, !seed);
    assert!(first == again, "seed {seed}: another run, other bytes");
    let mut compared = 0;
    for (round, (outcomes, batches)) in first.iter().zip(&batches).enumerate() {
        for (rank, outcome) in outcomes.iter().enumerate() {
            let oracle = oracle(config, batches, rank);
            assert!(*outcome == oracle, "seed {seed}, round {round}, rank {rank} of {config:?}");
            compared += 1;
        }
    }
    compared
}

/// What one rank has of a round that goes half by half.
struct Halves<'a> {
    exchange: &'a mut AllToAll,
    config: Config,
    batch: Batch,
    x: Vec<u8>,
    y: Vec<u8>,
    out: Vec<u8>,
    next: usize,
}

impl<'a> Halves<'a> {
    fn new(exchange: &'a mut AllToAll, config: Config, batch: Batch) -> Self {
        let row = config.hidden as usize * 2;
        let x = vec![0xee; exchange.max_rows() * config.token_bytes as usize];
        let out = batch.onto.clone().unwrap_or_else(|| vec![0xee; batch.tokens * row]);
        Self { exchange, config, batch, x, y: Vec::new(), out, next: 0 }
    }

    /// Tokens out, tokens in and to the experts, results out, results in.
    fn step(&mut self) {
        let (config, tokens) = (&self.config, self.batch.tokens());
        match self.next {
            0 => self.exchange.dispatch_send(&tokens, LONG).unwrap(),
            1 => {
                let mut scales = vec![0; self.exchange.max_rows() * config.scale_bytes as usize];
                let rows = Rows { x: &mut self.x, scales: &mut scales, slots: None };
                let received = self.exchange.dispatch_receive(&tokens, rows, LONG).unwrap();
                let bytes = config.token_bytes as usize;
                let first = config.firsts[config.rank as usize];
                for (local, edges) in (first..).zip(received.offsets.windows(2)) {
                    for row in edges[0]..edges[1] {
                        let x = nth(&self.x, row as usize, bytes);
                        let made = expert(config.format, local, x, config.hidden);
                        self.y.extend(made.into_iter().flat_map(u16::to_le_bytes));
                    }
                }
            }
            2 => self.exchange.combine_send(&self.y, LONG).unwrap(),
            _ => {
                let accumulate = self.batch.onto.is_some();
                let results = Results { y: &self.y, out: &mut self.out, accumulate };
                self.exchange.combine_receive(results, LONG).unwrap();
            }
        }
        self.next += 1;
    }
}

/// Two exchanges of one engine, as two micro-batches overlap: each sends before the other receives, whichever is first at either, and
/// each rank as it likes; also where the engine has no more transfers than one of them sends writes.
#[test]
fn two_exchanges_send_before_either_receives() {
    const ROUNDS: usize = 40;
    let mut compared = 0;
    for (seed, firsts, transfers) in
        [(1, &[0, 3, 6][..], None), (2, &[0, 5, 5, 6, 9], None), (3, &[0, 5, 5, 6, 9], Some(6))]
    {
        let world = firsts.len() - 1;
        let engines = transfers.map_or_else(
            || engines(world, &Transport::Shm),
            |transfers| engines_of(world, transfers),
        );
        // Of different shapes: what one has is of no use to the other.
        let configs = [
            config(firsts),
            Config { exact: true, token_bytes: 48, hidden: 40, top_k: 2, ..config(firsts) },
        ];
        let mut random = Random(seed);
        let routes = [Routes::Uniform, Routes::Skewed].repeat(ROUNDS / 2);
        let drawn = [0, 1].map(|at| batches(&configs[at], &routes, &mut random));
        let [one, other] = [0, 1].map(|at| join(&engines, &configs[at]));
        let outs: Vec<Vec<[Vec<u8>; 2]>> = thread::scope(|scope| {
            let rank = |(rank, mut pair): (usize, [AllToAll; 2])| {
                let (configs, drawn) = (&configs, &drawn);
                scope.spawn(move || {
                    let mut random = Random(seed ^ (rank as u64) << 8);
                    let round = |at: usize| {
                        let [one, other] = &mut pair;
                        let halves = |of: usize, exchange| {
                            let config = of_rank(&configs[of], rank as u32);
                            Halves::new(exchange, config, drawn[of][at][rank].clone())
                        };
                        let mut both = [halves(0, one), halves(1, other)];
                        // Up to which half each goes before the other goes further: out, in and back again, and in.
                        for end in [1, 3, 4] {
                            while both.iter().any(|one| one.next < end) {
                                thread::sleep(Duration::from_micros(random.below(100).into()));
                                let of = random.below(2) as usize;
                                if both[of].next < end {
                                    both[of].step();
                                }
                            }
                        }
                        both.map(|one| one.out)
                    };
                    (0..ROUNDS).map(round).collect()
                })
            };
            let pairs = one.into_iter().zip(other).map(|(one, other)| [one, other]);
            let threads: Vec<_> = pairs.enumerate().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (rank, rounds) in outs.iter().enumerate() {
            for (at, outs) in rounds.iter().enumerate() {
                for (of, out) in outs.iter().enumerate() {
                    let expected = oracle(&configs[of], &drawn[of][at], rank).out;
                    assert!(
                        *out == expected,
                        "seed {seed}, round {at}, exchange {of}, rank {rank}"
                    );
                    compared += 1;
                }
            }
        }
    }
    assert_eq!(compared, 2 * ROUNDS * (2 + 4 + 4));
}

/// Between halves the engine's transfers are anybody's: what the first half has sent has ended, though nobody has come to look.
#[test]
fn what_has_ended_between_halves_takes_no_transfers() {
    let engines = engines_of(2, 2);
    let mut exchanges = join(&engines, &config(&[0, 1, 2]));
    let none = Tokens { x: &[], scales: &[], indices: &[], weights: &[] };
    for exchange in &mut exchanges {
        exchange.dispatch_send(&none, LONG).unwrap();
    }
    for engine in &engines {
        assert!(engine.wait_capacity(LONG / 6), "two writes have the engine's two transfers");
    }
    for exchange in &mut exchanges {
        let rows = Rows { x: &mut [], scales: &mut [], slots: None };
        exchange.dispatch_receive(&none, rows, LONG).unwrap();
        assert_eq!(absent(exchange), []);
    }
}

/// Chunks, choices, and whether sums are exact.
const SUMS: [(u32, u32, bool); 7] = [
    (1, 1, false),
    (3, 3, false),
    (7, 4, false),
    (u32::MAX, 3, false),
    (1, 1, true),
    (3, 4, true),
    (u32::MAX, 3, true),
];

/// Every world up to four, experts spread in every manner, each format, chunks of one, some and all tokens.
#[test]
fn rounds_are_what_a_gather_by_routes_says() {
    let (mut compared, mut seed) = (0, 0);
    let placements: [&[&[u32]]; 4] = [
        &[&[0, 1], &[0, 5]],
        &[&[0, 3, 6], &[0, 0, 4], &[0, 7, 8]],
        &[&[0, 2, 4, 6], &[0, 1, 1, 9]],
        &[&[0, 2, 4, 6, 8], &[0, 5, 5, 6, 9]],
    ];
    for (world, placements) in (1..).zip(placements) {
        let engines = engines(world, &Transport::Shm);
        for firsts in placements {
            for (format, scale_bytes) in [(Format::Bf16, 4), (Format::Fp16, 0)] {
                for (chunk, top_k, exact) in SUMS {
                    let chunk_tokens = NonZeroU32::new(chunk).unwrap();
                    let config = Config {
                        format,
                        scale_bytes,
                        chunk_tokens,
                        top_k,
                        exact,
                        ..config(firsts)
                    };
                    compared += check(&engines, &config, seed);
                    seed += 1;
                }
            }
        }
    }
    // Formats, times chunks, times rounds, times placements of each world and ranks.
    assert_eq!(compared, 2 * 7 * 6 * (2 + 3 * 2 + 2 * 3 + 2 * 4));
}

/// An engine that has fewer transfers than a step has writes: those that have ended make room, and nobody is left out.
#[test]
fn a_few_transfers_are_enough() {
    let config = config(&[0, 2, 3, 5, 6]);
    for transfers in [1, 2, 4] {
        check(&engines_of(4, transfers), &config, transfers.into());
    }
}

/// Of eight ranks and of thirty-two, far more than there are processors.
#[test]
fn rounds_of_many_ranks_are_the_same() {
    for world in [8, 32] {
        let engines = engines(world, &Transport::Shm);
        let ranks = u32::try_from(world).unwrap();
        // Of three in a row one has two experts, and one none.
        let firsts: Vec<u32> =
            (0..=ranks).map(|rank| rank / 3 * 3 + [0, 2, 2][rank as usize % 3]).collect();
        let chunk_tokens = NonZeroU32::new(3).unwrap();
        let config = Config { chunk_tokens, ..config(&firsts) };
        assert_eq!(check(&engines, &config, u64::from(ranks)), 6 * ranks);
    }
}

#[test]
#[ignore = "needs libfabric with a provider for TCP"]
fn rounds_over_tcp_are_the_same() {
    let options = LibfabricOptions::default();
    let engines = engines(3, &Transport::Libfabric(options));
    let chunk_tokens = NonZeroU32::new(3).unwrap();
    for exact in [false, true] {
        let config = Config { chunk_tokens, exact, ..config(&[0, 1, 5, 8]) };
        assert_eq!(check(&engines, &config, 1), 18);
    }
}

/// Engines whose NICs and clock are simulated: while ranks wait on threads of their own, another one has time pass.
#[test]
fn rounds_over_the_simulated_fabric_are_the_same() {
    /// Ends the other thread, also when this one panics.
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let fabric = Fabric::new(5, FabricConfig::calm());
    let engine = |_| fabric.engine(TransferEngine::builder(), &[NicModel::CONNECTX7; 2]).unwrap();
    let (engines, mut drivers): (Vec<_>, Vec<_>) = (0..3).map(engine).unzip();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                fabric.run_for(&mut drivers, Duration::from_micros(20));
            }
        });
        let _ends = Ends(&is_over);
        let chunk_tokens = NonZeroU32::new(3).unwrap();
        for exact in [false, true] {
            let config = Config { chunk_tokens, exact, ..config(&[0, 1, 5, 8]) };
            assert_eq!(check(&engines, &config, 1), 18);
        }
    });
    drop(engines);
}

/// Large enough that writes are cut and sent past the caches, and no token's bytes are another's.
#[test]
fn rows_of_a_large_model_arrive_whole() {
    let engines = engines(2, &Transport::Shm);
    let config = Config {
        top_k: 8,
        max_tokens: 96,
        token_bytes: 7168,
        scale_bytes: 224,
        hidden: 256,
        chunk_tokens: NonZeroU32::new(64).unwrap(),
        ..config(&[0, 16, 32])
    };
    for exact in [false, true] {
        let config = Config { exact, ..config.clone() };
        let mut random = Random(9);
        let batch = |_| Batch::new(&config, Routes::Uniform, 96, &mut random);
        let batches = vec![(0..2).map(batch).collect::<Vec<_>>()];
        let outcomes = run(&engines, &config, &batches, 3);
        for (rank, outcome) in outcomes[0].iter().enumerate() {
            assert!(*outcome == oracle(&config, &batches[0], rank), "rank {rank}");
        }
    }
}

fn no_results() -> Results<'static> {
    Results { y: &[], out: &mut [], accumulate: false }
}

/// Calls `dispatch`, and `combine` if that went well, with nothing at all.
fn silent(exchange: &mut AllToAll, timeout: Duration) -> Result<(), MoeError> {
    silent_dispatch(exchange, timeout)?;
    exchange.combine(no_results(), timeout)
}

fn silent_dispatch(exchange: &mut AllToAll, timeout: Duration) -> Result<(), MoeError> {
    let none = Tokens { x: &[], scales: &[], indices: &[], weights: &[] };
    let rows = Rows { x: &mut [], scales: &mut [], slots: None };
    exchange.dispatch(&none, rows, timeout).map(drop)
}

/// Where four threads wait for each other, though not for one that has failed.
#[derive(Default)]
struct Meeting(AtomicUsize);

impl Meeting {
    fn wait(&self) {
        let all = (self.0.fetch_add(1, Ordering::SeqCst) / 4 + 1) * 4;
        let begun = Instant::now();
        while self.0.load(Ordering::SeqCst) < all {
            assert!(begun.elapsed() < LONG / 3, "somebody did not come");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Who is left out by a rank, and why.
fn absent(exchange: &AllToAll) -> Vec<(u32, Why)> {
    let mut absent: Vec<_> = exchange.control().report().absent;
    absent.sort_by_key(|absent| absent.rank);
    absent.iter().map(|absent| (absent.rank, absent.why)).collect()
}

#[test]
fn a_rank_that_never_comes_is_named_within_the_deadline() {
    let engines = engines(4, &Transport::Shm);
    let short = Duration::from_secs(2);
    for (phase, missed) in [(Phase::Dispatch, 2), (Phase::Combine, 1)] {
        let exchanges = join(&engines, &config(&[0, 1, 2, 3, 4]));
        let met = Meeting::default();
        thread::scope(|scope| {
            for (rank, mut exchange) in (0..).zip(exchanges) {
                let met = &met;
                scope.spawn(move || {
                    if rank == missed {
                        if phase == Phase::Combine {
                            let none = Tokens { x: &[], scales: &[], indices: &[], weights: &[] };
                            let rows = Rows { x: &mut [], scales: &mut [], slots: None };
                            exchange.dispatch(&none, rows, LONG).unwrap();
                        }
                        // It lives, and says nothing.
                        met.wait();
                        if phase == Phase::Combine {
                            // All had come that it is owed in this round.
                            exchange.combine(no_results(), LONG).unwrap();
                            let left = [0, 2, 3].map(|rank| (rank, Why::LeftUs));
                            assert_eq!(absent(&exchange), left);
                        }
                        met.wait();
                        return;
                    }
                    let begun = Instant::now();
                    silent(&mut exchange, short).unwrap();
                    let took = begun.elapsed();
                    let report = exchange.control().report();
                    let why = Why::Late { after: short };
                    let named = Absent { rank: missed, round: 1, phase, chunk: 0, why };
                    assert_eq!(report, Report { absent: vec![named] });
                    // Room for a busy machine.
                    assert!(took >= short && took < 2 * short + Duration::from_secs(2), "{took:?}");
                    let active: Vec<u32> = (0..4).filter(|rank| *rank != missed).collect();
                    assert_eq!(exchange.control().active_ranks(), active);
                    // It is waited for no more.
                    let begun = Instant::now();
                    for _ in 0..3 {
                        silent(&mut exchange, LONG).unwrap();
                    }
                    assert!(begun.elapsed() < LONG / 2);
                    assert_eq!(exchange.control().report(), report);
                    met.wait();
                    met.wait();
                });
            }
        });
    }
    // What is left of those rounds is counted by no later exchange.
    assert_eq!(check(&engines, &config(&[0, 1, 2, 3, 4]), 5), 24);
}

/// Before it is written to, or when all that was sent to it has ended and it is waited for.
#[test]
fn a_rank_that_is_gone_is_not_waited_for() {
    for later in [false, true] {
        // Of one transfer each: when that is free all that was sent has ended.
        let mut engines = if later { engines_of(3, 1) } else { engines(3, &Transport::Shm) };
        let mut exchanges = join(&engines, &config(&[0, 1, 2, 3]));
        let mut last = Some((engines.pop(), exchanges.pop()));
        last.take_if(|_| !later);
        let sent = AtomicUsize::new(0);
        thread::scope(|scope| {
            for (engine, mut exchange) in engines.iter().zip(exchanges) {
                let sent = &sent;
                scope.spawn(move || {
                    let begun = Instant::now();
                    let none = Tokens { x: &[], scales: &[], indices: &[], weights: &[] };
                    let rows = Rows { x: &mut [], scales: &mut [], slots: None };
                    exchange.dispatch_send(&none, LONG).unwrap();
                    assert!(engine.wait_capacity(LONG / 6), "what was sent does not end");
                    sent.fetch_add(1, Ordering::SeqCst);
                    exchange.dispatch_receive(&none, rows, LONG).map(drop).unwrap();
                    exchange.combine(no_results(), LONG).unwrap();
                    let named = absent(&exchange);
                    let [(2, why)] = named[..] else { panic!("{named:?}") };
                    assert!(matches!(why, Why::Gone(_)) || !later && matches!(why, Why::Write(_)));
                    assert!(begun.elapsed() < LONG / 2);
                });
            }
            let begun = Instant::now();
            while sent.load(Ordering::SeqCst) < 2 && begun.elapsed() < LONG / 3 {
                thread::sleep(Duration::from_millis(1));
            }
            // They wait by now, or will.
            thread::sleep(Duration::from_millis(300));
            drop(last);
        });
    }
}

/// An engine that has ended takes all its peers with it: that is no round in which everybody else is missing.
#[test]
fn a_rank_whose_own_engine_has_ended_is_told_so() {
    let (polled, mut driver) =
        TransferEngine::builder().transport(Transport::Shm).build_polled().unwrap();
    let mut engines = engines(1, &Transport::Shm);
    engines.push(polled);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let polls = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                driver.poll();
                thread::yield_now();
            }
            drop(driver);
        });
        let mut exchanges = join(&engines, &config(&[0, 1, 2]));
        let mut own = exchanges.pop().unwrap();
        let none = Tokens { x: &[], scales: &[], indices: &[], weights: &[] };
        let rows = || Rows { x: &mut [], scales: &mut [], slots: None };
        own.dispatch_send(&none, LONG).unwrap();
        is_over.store(true, Ordering::Relaxed);
        polls.join().unwrap();
        let received = own.dispatch_receive(&none, rows(), LONG).map(drop);
        let stopped = MoeError::Count(CountError::EngineStopped);
        assert_eq!(received.unwrap_err().to_string(), stopped.to_string());
        assert_eq!((absent(&own), own.control().active_ranks()), (vec![], vec![0, 1]));
        assert!(matches!(silent(&mut own, LONG), Err(MoeError::Over)));
    });
}

fn lend<'a>(x: &'a mut [u8], scales: &'a mut [u8]) -> Rows<'a> {
    Rows { x, scales, slots: None }
}

/// Where a rank stops in its round.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stops {
    BeforeDispatch,
    AfterAChunk,
    BeforeCombine,
}

/// The batches of a round without what a rank does not send: its experts' results, and its tokens from one on.
fn without(config: &Config, batches: &[Batch], missed: usize, tokens: Option<u32>) -> Vec<Batch> {
    let theirs = config.firsts[missed] as i32..config.firsts[missed + 1] as i32;
    let mut batches = batches.to_vec();
    for batch in &mut batches {
        for index in batch.indices.iter_mut().filter(|index| theirs.contains(*index)) {
            *index = -1;
        }
    }
    let batch = &mut batches[missed];
    match tokens {
        // Not even its choices.
        Some(0) => batch.tokens = 0,
        Some(first) => {
            let first = batch.tokens.min(first as usize);
            batch.x[first * config.token_bytes as usize..].fill(0);
            batch.scales[first * config.scale_bytes as usize..].fill(0);
        }
        None => {}
    }
    batches
}

/// Of a round in which a rank stops anywhere the others have all that it did not owe them, and so of later rounds, though it comes back
/// meanwhile, sends what it has, and has others' counters count it; then it knows that it was left out.
#[test]
fn the_others_have_all_the_rest() {
    const MISSED: usize = 2;
    let patience = Duration::from_secs(3);
    let mut compared = 0;
    for (seed, stops) in
        (0..).zip([Stops::BeforeDispatch, Stops::AfterAChunk, Stops::BeforeCombine])
    {
        for exact in [false, true] {
            let engines = engines(4, &Transport::Shm);
            let chunk_tokens = NonZeroU32::new(3).unwrap();
            let config = Config { chunk_tokens, exact, ..config(&[0, 2, 4, 6, 8]) };
            let mut random = Random(seed);
            let batches: Vec<Vec<Batch>> = (0..6)
                .map(|_| {
                    let batch = |_| Batch::new(&config, Routes::Uniform, 7, &mut random);
                    (0..4).map(batch).collect()
                })
                .collect();
            // In the second round it stops; while the third is under way it comes back.
            let is_back = Meeting::default();
            let ended = Meeting::default();
            let work = |rank: usize, mut exchange: AllToAll| {
                let config = of_rank(&config, rank as u32);
                let batches = &batches;
                let mut outcomes = Vec::new();
                let first = round_within(&mut exchange, &config, &batches[0][rank], LONG);
                outcomes.push(first.unwrap());
                if rank == MISSED {
                    let batch = &batches[1][rank];
                    let (mut x, mut scales) = (vec![0; exchange.max_rows() * 32], vec![0; 4096]);
                    match stops {
                        Stops::BeforeDispatch => {}
                        Stops::AfterAChunk => {
                            exchange.dispatch_send(&batch.tokens(), LONG).unwrap();
                        }
                        Stops::BeforeCombine => {
                            exchange
                                .dispatch(&batch.tokens(), lend(&mut x, &mut scales), LONG)
                                .unwrap();
                        }
                    }
                    is_back.wait();
                    match stops {
                        Stops::BeforeDispatch => {
                            exchange
                                .dispatch(&batch.tokens(), lend(&mut x, &mut scales), patience)
                                .unwrap();
                        }
                        Stops::AfterAChunk => {
                            exchange
                                .dispatch_receive(
                                    &batch.tokens(),
                                    lend(&mut x, &mut scales),
                                    patience,
                                )
                                .unwrap();
                        }
                        Stops::BeforeCombine => {}
                    }
                    let (y, mut out) = (vec![0xff; 48 * 200], [0; 7 * 48]);
                    let results = Results { y: &y, out: &mut out, accumulate: false };
                    exchange.combine(results, patience).unwrap();
                    let left = [0, 1, 3].map(|rank| (rank, Why::LeftUs));
                    assert_eq!(absent(&exchange), left, "{stops:?}");
                    assert_eq!(exchange.control().active_ranks(), [MISSED as u32]);
                } else {
                    for (number, batches) in (1..).zip(&batches[1..]) {
                        if number == 2 {
                            is_back.wait();
                        }
                        let done = round_within(&mut exchange, &config, &batches[rank], patience);
                        outcomes.push(done.unwrap());
                    }
                    let (phase, chunk) = match stops {
                        Stops::BeforeDispatch => (Phase::Dispatch, 0),
                        Stops::AfterAChunk => (Phase::Dispatch, 1),
                        Stops::BeforeCombine => (Phase::Combine, 0),
                    };
                    let why = Why::Late { after: patience };
                    let named = Absent { rank: MISSED as u32, round: 2, phase, chunk, why };
                    assert_eq!(exchange.control().report().absent, [named], "rank {rank}");
                    assert_eq!(exchange.control().active_ranks(), [0, 1, 3]);
                    assert_eq!(exchange.rounds(), 6);
                }
                // Nobody's memory goes before all are through.
                ended.wait();
                outcomes
            };
            let all: Vec<Vec<Outcome>> = thread::scope(|scope| {
                let work = &work;
                let threads: Vec<_> = join(&engines, &config)
                    .into_iter()
                    .enumerate()
                    .map(|(rank, exchange)| scope.spawn(move || work(rank, exchange)))
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            for (rank, outcomes) in all.iter().enumerate() {
                for (number, (outcome, batches)) in outcomes.iter().zip(&batches).enumerate() {
                    let came = match (number, stops) {
                        (0, _) => {
                            assert_eq!(*outcome, oracle(&config, batches, rank));
                            continue;
                        }
                        (1, Stops::BeforeCombine) => None,
                        (1, Stops::AfterAChunk) => Some(3),
                        _ => Some(0),
                    };
                    let rest = without(&config, batches, MISSED, came);
                    // Whose results never come got its tokens.
                    let to_us = oracle(&config, &rest, rank);
                    assert_eq!(
                        *outcome, to_us,
                        "{stops:?}, exact {exact}, round {number}, rank {rank}"
                    );
                    compared += 1;
                }
            }
        }
    }
    assert_eq!(compared, 3 * 2 * 3 * 5);
}

/// Who is kept waiting by one that is missing is not taken for missing by those whom the missing one has served.
#[test]
fn who_is_kept_waiting_is_waited_for() {
    let engines = engines(3, &Transport::Shm);
    let mut exchanges = join(&engines, &config(&[0, 1, 2, 3]));
    let patience = Duration::from_secs(3);
    // Rank 2 sends its choices, and its tokens, which are none, to rank 0 alone.
    let mut dead = exchanges.pop().unwrap();
    let mut vectors = [[0; 4]];
    dead.table().encode(1, &[], &[], &mut vectors).unwrap();
    let bytes: Vec<u8> =
        vectors.as_flattened().iter().flat_map(|word| word.to_le_bytes()).collect();
    dead.outbox.write(0, &bytes).unwrap();
    let (to, here) = (dead.table_at(2), dead.at(Phase::Dispatch, 0, LONG));
    assert_eq!(dead.others.rank(0), 0);
    dead.others.write(0, (&dead.outbox, 0), to, bytes.len() as u64, here).unwrap();
    dead.others.write(0, (&dead.outbox, 0), to, 0, here).unwrap();
    thread::scope(|scope| {
        let work = |(rank, mut exchange): (u32, AllToAll)| {
            scope.spawn(move || {
                // It comes to its deadline after the other, which waits for it and for the dead one then.
                thread::sleep(Duration::from_millis(600) * rank);
                silent_dispatch(&mut exchange, patience).unwrap();
                // Its experts take a while.
                thread::sleep(Duration::from_millis(600) * rank);
                exchange.combine(no_results(), patience).unwrap();
                assert_eq!(absent(&exchange), [(2, Why::Late { after: patience })], "rank {rank}");
                let phase = exchange.control().report().absent[0].phase;
                assert_eq!(phase, [Phase::Combine, Phase::Dispatch][rank as usize]);
                exchange
            })
        };
        let threads: Vec<_> = (0..).zip(exchanges).map(work).collect();
        let all: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        drop(all);
    });
    drop(dead);
}

#[test]
fn an_abort_ends_the_waits_of_its_rank_at_once() {
    let engines = engines(2, &Transport::Shm);
    let mut exchanges = join(&engines, &config(&[0, 1, 2]));
    let never = exchanges.pop().unwrap();
    let mut exchange = exchanges.pop().unwrap();
    let control = Arc::clone(exchange.control());
    thread::scope(|scope| {
        let call = scope.spawn(move || {
            silent(&mut exchange, LONG).unwrap();
            exchange
        });
        thread::sleep(Duration::from_millis(200));
        assert!(!call.is_finished());
        // It can be asked meanwhile.
        assert_eq!((control.report(), control.active_ranks()), (Report::default(), vec![0, 1]));
        let begun = Instant::now();
        control.abort();
        let mut exchange = call.join().unwrap();
        assert!(begun.elapsed() < LONG / 4, "{:?}", begun.elapsed());
        assert_eq!(absent(&exchange), [(1, Why::Aborted)]);
        silent(&mut exchange, LONG).unwrap();
        assert_eq!(control.active_ranks(), [0]);
    });
    drop(never);
}

/// No engine, and no process, has to start again: a new exchange of the same engines takes in all who are there, whether the one that was
/// missing is gone, or comes late and still writes to where the old one was; or another engine has its place.
#[test]
fn all_who_are_there_go_on_in_a_new_exchange() {
    const MISSED: usize = 2;
    let short = Duration::from_secs(2);
    for gone in [false, true] {
        let mut left = engines(4, &Transport::Shm);
        let mut exchanges = join(&left, &config(&[0, 2, 4, 6, 8]));
        let mut missed = Some((exchanges.remove(MISSED), left.remove(MISSED)));
        missed.take_if(|_| gone);
        // Nobody's memory goes while others may write to it still.
        let over: Vec<AllToAll> = thread::scope(|scope| {
            let go_on = |mut exchange: AllToAll| {
                scope.spawn(move || {
                    silent(&mut exchange, if gone { LONG } else { short }).unwrap();
                    let named = absent(&exchange);
                    assert!(matches!(named[..], [(2, _)]), "{named:?}");
                    exchange
                })
            };
            let threads: Vec<_> = exchanges.into_iter().map(go_on).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        drop(over);
        thread::scope(|scope| {
            if let Some((exchange, _)) = &mut missed {
                scope.spawn(|| {
                    silent(exchange, short).unwrap();
                    assert_eq!(exchange.control().active_ranks(), [2], "it has missed its round");
                });
            }
            // Its experts are spread among the others.
            for seed in 0..3 {
                assert_eq!(check(&left, &config(&[0, 3, 5, 8]), seed), 18);
            }
        });
        // It has its place again, or its successor does.
        let returned = missed.map_or_else(|| engines(1, &Transport::Shm).remove(0), |(_, own)| own);
        left.insert(MISSED, returned);
        assert_eq!(check(&left, &config(&[0, 2, 4, 6, 8]), 3), 24);
    }
}

/// A rank that is two rounds ahead, which cannot be, writes to the right places and counts right.
#[test]
fn what_is_of_another_round_is_not_taken_for_this_one() {
    let engines = engines(2, &Transport::Shm);
    let mut exchanges = join(&engines, &config(&[0, 1, 2]));
    exchanges[1].round = 2;
    thread::scope(|scope| {
        for (rank, mut exchange) in (0..).zip(exchanges) {
            scope.spawn(move || {
                silent(&mut exchange, LONG).unwrap();
                let [(from, Why::Table(TableError::Stale { epoch, expected, .. }))] =
                    absent(&exchange)[..]
                else {
                    panic!("{:?}", absent(&exchange));
                };
                let epochs = if rank == 0 { (3, 1) } else { (1, 3) };
                assert_eq!((from, (epoch, expected)), (1 - rank, epochs));
            });
        }
    });
}

#[test]
fn what_cannot_be_sent_is_refused_and_leaves_the_exchange_as_it_was() {
    let engines = engines(1, &Transport::Shm);
    let config = config(&[0, 4]);
    let mut exchange = join(&engines, &config).pop().unwrap();
    let batch = Batch::new(&config, Routes::Uniform, 2, &mut Random(1));
    let (mut x, mut scales) = (vec![0; 32 * 99], vec![0; 4 * 99]);
    let mut refused = |tokens: Tokens<'_>| {
        let rows = Rows { x: &mut x, scales: &mut scales, slots: None };
        exchange.dispatch(&tokens, rows, LONG).map(drop).unwrap_err()
    };
    let good = batch.tokens();
    let what = |error| match error {
        MoeError::Argument { what, .. } => what,
        error => panic!("{error:?}"),
    };
    assert_eq!(what(refused(Tokens { x: &batch.x[1..], ..good })), "x");
    assert_eq!(what(refused(Tokens { scales: &[], ..good })), "scales");
    assert_eq!(what(refused(Tokens { weights: &[], ..good })), "weights");
    assert_eq!(what(refused(Tokens { indices: &[-1; 24], ..good })), "tokens");
    for indices in [&[0; 6][..], &[4, 1, 2, 0, 1, 2], &[0; 5]] {
        let error = refused(Tokens { indices, ..good });
        assert!(matches!(error, MoeError::Routing(_)), "{error:?}");
    }
    let early = exchange.combine(no_results(), LONG);
    assert!(matches!(early, Err(MoeError::OutOfTurn { .. })), "{early:?}");
    let outcome = round(&mut exchange, &config, &batch).unwrap();
    assert_eq!(outcome, oracle(&config, std::slice::from_ref(&batch), 0));
    // In halves: nothing else comes between them, and one that was refused can be called again.
    exchange.dispatch_send(&good, LONG).unwrap();
    let early = exchange.dispatch_send(&good, LONG);
    assert!(matches!(early, Err(MoeError::OutOfTurn { .. })), "{early:?}");
    let rows = || Rows { x: &mut [], scales: &mut [], slots: None };
    let other = exchange.dispatch_receive(&Tokens { x: &batch.x[1..], ..good }, rows(), LONG);
    assert_eq!(what(other.map(drop).unwrap_err()), "x");
    let rows = Rows { x: &mut x, scales: &mut scales, slots: None };
    let received = exchange.dispatch_receive(&good, rows, LONG).unwrap();
    assert_eq!((received.counts, received.offsets), (&outcome.counts[..], &outcome.offsets[..]));
    assert_eq!(x[..outcome.x.len()], outcome.x);
    let early = exchange.combine_receive(no_results(), LONG);
    assert!(matches!(early, Err(MoeError::OutOfTurn { .. })), "{early:?}");
    let y = vec![0; 48 * 99];
    exchange.combine_send(&y, LONG).unwrap();
    let early = exchange.combine(no_results(), LONG);
    assert!(matches!(early, Err(MoeError::OutOfTurn { .. })), "{early:?}");
    let mut out = [0xee; 2 * 48];
    let short = Results { y: &y, out: &mut out[1..], accumulate: false };
    assert_eq!(what(exchange.combine_receive(short, LONG).unwrap_err()), "out");
    exchange.combine_receive(Results { y: &y, out: &mut out, accumulate: false }, LONG).unwrap();
    assert_eq!((out, exchange.rounds()), ([0; 96], 2));
    // Memory for too few rows is found out when they have arrived: that is the end.
    let rows = Rows { x: &mut [0; 32], scales: &mut [0; 4], slots: None };
    let error = exchange.dispatch(&good, rows, LONG).unwrap_err();
    assert!(matches!(error, MoeError::RowsTooMany { lent: 1, .. }), "{error:?}");
    assert!(matches!(silent(&mut exchange, LONG), Err(MoeError::Over)));
}

/// Whoever has called a first half has sent what the others need for their whole round, if it is one chunk.
#[test]
fn first_halves_send() {
    let engines = engines(2, &Transport::Shm);
    let config = config(&[0, 2, 4]);
    let mut random = Random(2);
    let batches = [0, 1].map(|_| Batch::new(&config, Routes::Uniform, 5, &mut random));
    let [mut early, mut late] = <[AllToAll; 2]>::try_from(join(&engines, &config)).unwrap();
    let memory = |exchange: &AllToAll| (vec![0; exchange.max_rows() * 32], vec![0; 1 << 10]);
    let [(mut x, mut scales), (mut late_x, mut late_scales)] = [memory(&early), memory(&late)];
    let (tokens, y) = (batches[0].tokens(), vec![0; 48 * 99]);
    let mut outs = [[0xee; 5 * 48]; 2];
    let [out, late_out] = outs.each_mut().map(|out| Results { y: &y, out, accumulate: false });
    early.dispatch_send(&tokens, LONG).unwrap();
    // The other's whole round goes on while this one does nothing.
    let rows = Rows { x: &mut late_x, scales: &mut late_scales, slots: None };
    late.dispatch(&batches[1].tokens(), rows, LONG).unwrap();
    early
        .dispatch_receive(&tokens, Rows { x: &mut x, scales: &mut scales, slots: None }, LONG)
        .unwrap();
    early.combine_send(&y, LONG).unwrap();
    late.combine(late_out, LONG).unwrap();
    early.combine_receive(out, LONG).unwrap();
    assert_eq!(outs, [[0; 5 * 48]; 2]);
}

#[test]
fn what_cannot_be_joined_is_refused() {
    let engines = engines(2, &Transport::Shm);
    let good = config(&[0, 2, 4]);
    let open =
        |rank, config: &Config| AllToAll::open(&engines[rank as usize % 2], &of_rank(config, rank));
    assert!(matches!(open(2, &good), Err(MoeError::Rank { rank: 2, world: 2 })));
    let bad = |config: Config| open(0, &config).unwrap_err();
    assert!(matches!(bad(config(&[1, 2])), MoeError::Placement(_)));
    assert!(matches!(bad(Config { hidden: 12, ..good.clone() }), MoeError::Sizes(_)));
    assert!(matches!(bad(Config { hidden: u32::MAX, ..good.clone() }), MoeError::Sizes(_)));
    assert!(matches!(bad(Config { top_k: 33, ..good.clone() }), MoeError::Sizes(_)));
    let padding = NonZeroU32::new(8).unwrap();
    let (ours, theirs) =
        (open(0, &good).unwrap(), open(1, &Config { padding, ..good.clone() }).unwrap());
    let seats = [ours.seat(), theirs.seat()];
    let error = ours.join(&seats, LONG).unwrap_err();
    assert!(matches!(error, MoeError::OtherShape { rank: 1 }), "{error:?}");
    let error = theirs.join(&seats[..1], LONG).unwrap_err();
    assert!(matches!(error, MoeError::Seats { found: 1, world: 2 }), "{error:?}");
    // Counters of exchanges that came to nothing are free again.
    for _ in 0..2000 {
        drop(open(0, &config(&[0, 1])).unwrap());
    }
}

#[test]
fn seats_are_read_back_and_every_shorter_or_longer_one_is_refused() {
    let engines = engines(1, &Transport::Shm);
    let joining = AllToAll::open(&engines[0], &config(&[0, 3])).unwrap();
    let bytes = joining.seat().to_bytes();
    assert_eq!(Seat::from_bytes(&bytes), Ok(joining.seat()));
    assert_eq!(joining.seat().address(), engines[0].address());
    let cut = |range: Range<usize>| Seat::from_bytes(&bytes[range]);
    assert!((0..bytes.len()).all(|len| cut(0..len).is_err()));
    assert!((1..bytes.len()).all(|start| cut(start..bytes.len()).is_err()));
    let long = [&bytes[..], &[0]].concat();
    assert_eq!(Seat::from_bytes(&long), Err(SeatError::Length { found: long.len() }));
    let mut tag = bytes.clone();
    tag[bytes.len() - 9] = 0xff;
    assert!(matches!(Seat::from_bytes(&tag), Err(SeatError::Tag { .. })));
}
