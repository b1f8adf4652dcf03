//! Two exchanges at a time on the same GPUs, as two micro-batches of a layer overlap: while what one has sent travels, the other sends.
//!
//! Each rank has a stream for either, and half of its SMs. Knows nothing of rows: each exchange is compared with the oracle as if it were alone.
//!
//! # Invariants
//!
//! The launches of one exchange keep their order; between the two, and between ranks, any order is drawn. At first they take turns by
//! halves: each sends between what the other sends and receives.

use super::{
    Drawn, Outcome, PATIENCE, Style, Way, World, capture, draw, launch, random_shape, sms,
};
use crate::rig::Gpu;
use immwire_cuda::Event;
use immwire_cuda::moe::Half;
use immwire_cuda::moe::geometry::Many;
use immwire_verification_moe::oracle::Random;
use serde_json::{Value, json};

/// Rounds of each exchange that are enqueued at once, each with memory of its own.
const SETS: usize = 3;
/// Exchanges that overlap.
const BOTH: [usize; 2] = [0, 1];

/// One launch: of which exchange, which round, and which part of it.
#[derive(Debug, Clone, Copy)]
struct Step {
    exchange: usize,
    set: usize,
    way: Way,
    half: Half,
}

/// Random pairs of exchanges of 2 and 4 ranks. `few`: none as graphs, which the stand-in for a driver does not have.
pub(super) fn run(gpus: &[Gpu], few: bool) -> Outcome<Value> {
    let (worlds, cases, batches, replays): (&[u32], _, _, _) =
        if few { (&[4], 1, 2, 0) } else { (&[2, 4], 4, 10, 40) };
    let mut replayed = 0;
    for &world in worlds {
        for case in 0..cases {
            let mut random = Random(case * 10 + u64::from(world));
            // Of different shapes: what one has is of no use to the other.
            let mut exchange = |_| {
                let shape = random_shape(&mut random, world, false);
                World::new(gpus, &shape, sms(gpus, world) / 2, None, SETS, PATIENCE)
            };
            let mut pair = [exchange(0)?, exchange(1)?];
            for batch in 0..batches {
                let drawn = fill(&mut pair, &mut random, true, |random, _, _| {
                    let split = batch == 0 || !random.one_in(4);
                    any_style(random, split)
                })?;
                enqueued(&pair, &drawn, &mut random, batch == 0)?;
                compare(&mut pair, &drawn)?;
            }
            if replays > 0 {
                replayed += captured(&mut pair, &mut random, replays)?;
            }
        }
    }
    let exchanges = 2 * cases * worlds.len() as u64;
    Ok(json!({ "exchanges": exchanges, "rounds_each": batches * SETS, "replays": replayed }))
}

fn any_style(random: &mut Random, split: bool) -> Style {
    Style { split, wide: random.one_in(2), clear: random.one_in(2), slots: random.one_in(2) }
}

/// Draws the rounds of both, and clears where they arrive.
fn fill(
    pair: &mut [World<'_>; 2],
    random: &mut Random,
    onto: bool,
    mut style: impl FnMut(&mut Random, usize, usize) -> Style,
) -> Outcome<[Vec<Drawn>; 2]> {
    let mut of = |exchange: usize, all: &mut World<'_>| -> Outcome<Vec<Drawn>> {
        let mut drawn = Vec::new();
        for set in 0..SETS {
            let style = style(random, exchange, set);
            let most = [Many::FEW_TOKENS, all.shape.max_tokens];
            drawn.push(draw(all, random, set, style, most, onto)?);
        }
        all.blank()?;
        Ok(drawn)
    };
    let [one, other] = pair;
    Ok([of(0, one)?, of(1, other)?])
}

/// The launches of one rank in some order, or in turn.
fn order(drawn: &[Vec<Drawn>; 2], random: &mut Random, in_turn: bool) -> Vec<Step> {
    let mut left = BOTH.map(|exchange| {
        let of_set = |(set, drawn): (usize, &Drawn)| {
            let halves = drawn.style.halves();
            let step =
                move |way| halves.iter().map(move |half| Step { exchange, set, way, half: *half });
            [Way::Out, Way::Back].into_iter().flat_map(step)
        };
        drawn[exchange].iter().enumerate().flat_map(of_set).collect::<Vec<_>>().into_iter()
    });
    let mut steps = Vec::new();
    while left.iter().any(|left| left.len() > 0) {
        let of = if in_turn { steps.len() % 2 } else { random.below(2) as usize };
        steps.extend(left[of].next().or_else(|| left[1 - of].next()));
    }
    steps
}

fn enqueue(pair: &[World<'_>; 2], drawn: &[Vec<Drawn>; 2], rank: usize, step: Step) -> Outcome<()> {
    let Step { exchange, set, way, half } = step;
    pair[exchange].enqueue_half(rank, set, way, half, drawn[exchange][set].style)
}

/// Enqueues all, now of this rank and now of that.
fn enqueued(
    pair: &[World<'_>; 2],
    drawn: &[Vec<Drawn>; 2],
    random: &mut Random,
    in_turn: bool,
) -> Outcome<()> {
    let ranks = 0..pair[0].ranks.len();
    let mut left: Vec<_> =
        ranks.clone().map(|_| order(drawn, random, in_turn).into_iter()).collect();
    while left.iter().any(|left| left.len() > 0) {
        let rank = random.below(left.len().try_into()?) as usize;
        if let Some(step) = left[rank].next() {
            enqueue(pair, drawn, rank, step)?;
        }
    }
    Ok(())
}

/// Each rank's launches of both as one graph with two branches, replayed with other tokens each time.
fn captured(pair: &mut [World<'_>; 2], random: &mut Random, replays: u32) -> Outcome<u32> {
    // Whether results are added to something is captured, too.
    let drawn = fill(pair, random, false, |random, _, _| {
        let split = !random.one_in(4);
        any_style(random, split)
    })?;
    let graphs = (0..pair[0].ranks.len())
        .map(|rank| {
            let steps = order(&drawn, random, false);
            let other = &pair[1].ranks[rank].stream;
            let [forks, joins] = [Event::new(other.device())?, Event::new(other.device())?];
            capture(&pair[0], rank, |stream| {
                forks.record(stream)?;
                other.after(&forks)?;
                steps.iter().try_for_each(|step| enqueue(pair, &drawn, rank, *step))?;
                joins.record(other)?;
                Ok(stream.after(&joins)?)
            })
        })
        .collect::<Outcome<Vec<_>>>()?;
    for _ in 0..replays {
        let again = fill(pair, random, false, |_, exchange, set| drawn[exchange][set].style)?;
        let first = random.below(graphs.len().try_into()?) as usize;
        for rank in (first..graphs.len()).chain(0..first) {
            launch(&pair[0], &graphs[rank], rank)?;
        }
        compare(pair, &again)?;
    }
    Ok(replays)
}

/// Waits for all launches, and compares all rounds.
fn compare(pair: &mut [World<'_>; 2], drawn: &[Vec<Drawn>; 2]) -> Outcome<()> {
    for all in pair.iter() {
        all.settle()?;
    }
    for (all, drawn) in pair.iter_mut().zip(drawn) {
        for (set, drawn) in drawn.iter().enumerate() {
            all.check(set, &drawn.tokens, &drawn.results, drawn.style)?;
        }
        all.check_poison()?;
    }
    Ok(())
}
