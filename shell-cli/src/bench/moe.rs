//! `immwire bench moe`: dispatch and combine among ranks of this host, in host memory.
//!
//! Each rank is a thread with an engine of its own. Knows nothing of routing: `immwire::moe` does. Each rank begins an
//! operation when all are ready, and a round takes as long as its slowest rank.
//!
//! # Invariants
//!
//! Every result of every round is compared with what experts that only change signs must give, which is exact in bf16. A
//! row is printed only if all were right.

use std::io::Write;
use std::num::NonZeroU32;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use immwire::core::moe::{Placement, Routing, RoutingError};
use immwire::moe::{AllToAll, Config, Format, Joining, MoeError, Results, Rows, Tokens};
use immwire::{BuildError, TransferEngine};
use serde::Serialize;

use crate::args::MoeBenchArgs;
use crate::report::stats::quantile;
use crate::report::table::figure;
use crate::signals;

/// No round takes longer, or something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);
/// Rounds before the first that is timed.
const WARM: u32 = 2;

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum MoeBenchError {
    /// An engine could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The arguments make no exchange, or a round failed.
    #[error("rank {rank}: {error}")]
    Exchange {
        /// Which rank.
        rank: u32,
        /// Why.
        error: MoeError,
    },
    /// A result was not what it must be.
    #[error("rank {rank} was given wrong results in round {round}")]
    Wrong {
        /// Which rank.
        rank: u32,
        /// Which round.
        round: u32,
    },
    /// More choices than experts.
    #[error("{top_k} of {experts} experts cannot be chosen")]
    TopK {
        /// Choices.
        top_k: u32,
        /// Experts.
        experts: u32,
    },
    /// Another rank failed, which is what is told, or never came.
    #[error("not all ranks were there within {PATIENCE:?}")]
    Alone,
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
    /// The output is gone.
    #[error("cannot write the result: {0}")]
    Output(#[from] std::io::Error),
}

/// What was measured of one operation. Serialises to one flat JSON object.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// `moe`.
    pub bench: &'static str,
    /// `dispatch` or `combine`.
    pub op: &'static str,
    /// What carries the bytes.
    pub provider: &'static str,
    /// Ranks.
    pub ep: u32,
    /// Tokens of each rank.
    pub tokens: u32,
    /// Values of a token, bf16 both ways.
    pub hidden: u32,
    /// Experts of all ranks.
    pub experts: u32,
    /// Choices of a token.
    pub top_k: u32,
    /// Whether each choice's result came back by itself.
    pub exact: bool,
    /// Rounds that were timed.
    pub rounds: u32,
    /// Microseconds of the slowest rank, median over rounds.
    pub p50_us: f64,
    /// What 99 % of rounds do not exceed.
    pub p99_us: f64,
    /// Bytes of payload that leave a rank for others; the mean over ranks and rounds.
    pub bytes_out: f64,
    /// Those of all ranks together, a second, at the median / 1e9.
    pub gb_per_s: f64,
    /// Microseconds that one thread takes to copy as many bytes as leave all ranks, the median.
    pub baseline_us: f64,
}

/// Runs it, and prints a row for each operation.
///
/// # Errors
///
/// [`MoeBenchError`].
pub fn bench(args: &MoeBenchArgs) -> Result<(), MoeBenchError> {
    let rows = measure(args)?;
    let mut out = std::io::stdout();
    if args.json {
        for row in &rows {
            let line = serde_json::to_string(row).map_err(std::io::Error::from)?;
            writeln!(out, "{line}")?;
        }
    } else {
        writeln!(out, "{}", table(&rows))?;
    }
    Ok(())
}

fn config(args: &MoeBenchArgs, rank: u32) -> Result<Config, MoeBenchError> {
    let wrong = |error: MoeError| MoeBenchError::Exchange { rank, error };
    let mut firsts = vec![0; args.ep as usize + 1];
    Placement::even(args.experts, &mut firsts).map_err(|error| wrong(error.into()))?;
    if args.top_k > args.experts {
        return Err(MoeBenchError::TopK { top_k: args.top_k, experts: args.experts });
    }
    Ok(Config {
        rank,
        firsts,
        top_k: args.top_k,
        max_tokens: args.tokens,
        token_bytes: args.hidden.saturating_mul(2),
        scale_bytes: 0,
        hidden: args.hidden,
        format: Format::Bf16,
        padding: NonZeroU32::MIN,
        chunk_tokens: args.chunk,
        exact: args.exact,
    })
}

/// Measures both operations.
///
/// # Errors
///
/// [`MoeBenchError`].
pub fn measure(args: &MoeBenchArgs) -> Result<Vec<Measured>, MoeBenchError> {
    let mut joining = Vec::new();
    for rank in 0..args.ep {
        let engine = TransferEngine::builder().build()?;
        let opened = AllToAll::open(&engine, &config(args, rank)?);
        joining.push(opened.map_err(|error| MoeBenchError::Exchange { rank, error })?);
    }
    let seats: Vec<_> = joining.iter().map(Joining::seat).collect();
    let meeting = Meeting { ranks: args.ep.into(), ..Meeting::default() };
    let ranks: Vec<Vec<Sample>> = thread::scope(|scope| {
        let run = |(rank, joining): (u32, Joining)| {
            let (seats, meeting) = (&seats, &meeting);
            scope.spawn(move || {
                let run = || -> Result<Vec<Sample>, MoeBenchError> {
                    let joined = joining.join(seats, PATIENCE);
                    let mut exchange =
                        joined.map_err(|error| MoeBenchError::Exchange { rank, error })?;
                    let mut round = |number| run_round(args, rank, number, &mut exchange, meeting);
                    (0..WARM).try_for_each(|number| round(number).map(drop))?;
                    (WARM..WARM + args.rounds).map(round).collect()
                };
                run().unwrap_or_else(|error| {
                    meeting.fail(error);
                    Vec::new()
                })
            })
        };
        let threads: Vec<_> = (0..).zip(joining).map(run).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    match meeting.failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(rows(args, &ranks)),
    }
}

/// Where ranks wait for each other, unless one has failed.
#[derive(Default)]
struct Meeting {
    ranks: u64,
    arrived: AtomicU64,
    failure: Mutex<Option<MoeBenchError>>,
}

impl Meeting {
    /// The first failure is the one to tell: others follow from it.
    fn fail(&self, error: MoeBenchError) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(error);
    }

    /// Waits for all, the `number`-th time.
    fn wait(&self, number: u64) -> Result<(), MoeBenchError> {
        let begun = Instant::now();
        self.arrived.fetch_add(1, Ordering::AcqRel);
        while self.arrived.load(Ordering::Acquire) < number * self.ranks {
            let failed = self.failure.lock().unwrap_or_else(PoisonError::into_inner).is_some();
            if failed || begun.elapsed() > PATIENCE {
                return Err(MoeBenchError::Alone);
            }
            if signals::interrupted() {
                return Err(MoeBenchError::Interrupted);
            }
            thread::yield_now();
        }
        Ok(())
    }
}

/// What one rank took, and what left it.
struct Sample {
    seconds: [f64; 2],
    rows_out: [u64; 2],
}

fn run_round(
    args: &MoeBenchArgs,
    rank: u32,
    number: u32,
    exchange: &mut AllToAll,
    meeting: &Meeting,
) -> Result<Sample, MoeBenchError> {
    let failed = |error| MoeBenchError::Exchange { rank, error };
    let config = config(args, rank)?;
    let batch = Batch::new(args, rank, number);
    let weight = 1.0 / f64::from(args.top_k.next_power_of_two());
    #[expect(clippy::cast_possible_truncation, reason = "a power of two")]
    let weights = vec![weight as f32; batch.indices.len()];
    let bytes = config.token_bytes as usize;
    let mut y = vec![0; exchange.max_rows() * bytes];
    let mut out = vec![0; batch.x.len()];
    let tokens = Tokens { x: &batch.x, scales: &[], indices: &batch.indices, weights: &weights };
    let meetings = u64::from(number) * 2;
    meeting.wait(meetings + 1)?;
    let begun = Instant::now();
    let rows = Rows { x: &mut y, scales: &mut [], slots: None };
    let received = exchange.dispatch(&tokens, rows, PATIENCE).map_err(failed)?;
    let dispatch = begun.elapsed().as_secs_f64();
    let first = config.firsts.get(rank as usize).copied().unwrap_or(0);
    let edges = received.offsets.iter().zip(received.offsets.iter().skip(1));
    for (_, (from, to)) in (first..).zip(edges).filter(|(expert, _)| expert % 2 == 1) {
        let rows = y.get_mut(*from as usize * bytes..*to as usize * bytes).unwrap_or_default();
        // The sign of a bf16 is the upper bit of its second byte.
        rows.iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80);
    }
    meeting.wait(meetings + 2)?;
    let begun = Instant::now();
    let results = Results { y: &y, out: &mut out, accumulate: false };
    exchange.combine(results, PATIENCE).map_err(failed)?;
    let combine = begun.elapsed().as_secs_f64();
    if out != batch.expected(args.top_k) {
        return Err(MoeBenchError::Wrong { rank, round: number });
    }
    let rows_out = batch.rows_out(&config).map_err(|error| failed(MoeError::Routing(error)))?;
    Ok(Sample { seconds: [dispatch, combine], rows_out })
}

/// One rank's tokens in one round: small whole numbers, and distinct experts for each.
struct Batch {
    x: Vec<u8>,
    indices: Vec<i32>,
}

impl Batch {
    fn new(args: &MoeBenchArgs, rank: u32, number: u32) -> Self {
        let mut state = args.seed ^ u64::from(rank) << 32 ^ u64::from(number);
        let mut next = || {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ mixed >> 31
        };
        let (experts, top_k) = (u64::from(args.experts), args.top_k as usize);
        let mut indices = Vec::new();
        for _ in 0..args.tokens {
            let first = indices.len();
            while indices.len() < first + top_k {
                let expert = i32::try_from(next() % experts).unwrap_or(0);
                let fresh = indices.iter().skip(first).all(|other| *other != expert);
                indices.extend(fresh.then_some(expert));
            }
        }
        let values = u64::from(args.tokens) * u64::from(args.hidden);
        // Whole numbers from -4 to 4.
        let value =
            |number: u64| Format::Bf16.store(f32::from(i8::try_from(number % 9).unwrap_or(4) - 4));
        let x = (0..values).flat_map(|_| value(next()).to_le_bytes()).collect();
        Self { x, indices }
    }

    /// Each value times the sum of its experts' signs, by the power of two that the weights are. All sums are whole
    /// numbers up to 128, which bf16 has.
    fn expected(&self, top_k: u32) -> Vec<u8> {
        let top_k = top_k as usize;
        let tokens = self.indices.chunks_exact(top_k);
        let bytes = self.x.len() / tokens.len().max(1);
        let mut expected = Vec::with_capacity(self.x.len());
        for (chosen, x) in tokens.zip(self.x.chunks_exact(bytes.max(1))) {
            let odd = chosen.iter().filter(|expert| *expert % 2 == 1).count();
            let sum = (top_k as f32 - 2.0 * odd as f32) / top_k.next_power_of_two() as f32;
            for value in x.chunks_exact(2) {
                let value = value.iter().rev().fold(0, |bits, byte| bits << 8 | u16::from(*byte));
                // A sum that comes to nothing is +0, whatever the signs of what was added.
                let result = Format::Bf16.load(value) * sum + 0.0;
                expected.extend(Format::Bf16.store(result).to_le_bytes());
            }
        }
        expected
    }

    /// Rows that leave the rank for others, out; and back those of others, of which each rank has as many on average: for each
    /// token that it had, or where sums are exact for each choice.
    fn rows_out(&self, config: &Config) -> Result<[u64; 2], RoutingError> {
        let experts = config.firsts.last().copied().unwrap_or(0);
        let routing = Routing::new(&self.indices, config.top_k, experts)?;
        let mut counts = [(); 2].map(|()| vec![0; config.firsts.len() - 1]);
        if let Ok(placement) = Placement::new(&config.firsts) {
            let [out, back] = &mut counts;
            routing.count_ranks(&placement, out)?;
            if config.exact {
                routing.count_choices(&placement, back)?;
            } else {
                routing.count_ranks(&placement, back)?;
            }
        }
        Ok(counts.map(|counts| {
            let others = (0..).zip(&counts).filter(|(rank, _)| *rank != config.rank);
            others.map(|(_, count)| u64::from(*count)).sum()
        }))
    }
}

/// A row for each operation.
fn rows(args: &MoeBenchArgs, ranks: &[Vec<Sample>]) -> Vec<Measured> {
    let row = |(op, name): (usize, &'static str)| {
        let of = |round: usize| ranks.iter().filter_map(move |samples| samples.get(round));
        let rounds = 0..args.rounds as usize;
        let slowest = |round| of(round).map(|sample| sample.seconds[op]).fold(0.0, f64::max);
        let mut seconds: Vec<f64> = rounds.clone().map(slowest).collect();
        seconds.sort_unstable_by(f64::total_cmp);
        let rows: u64 = rounds.flat_map(of).map(|sample| sample.rows_out[op]).sum();
        let bytes = rows as f64 * f64::from(args.hidden) * 2.0 / f64::from(args.rounds);
        let p50 = quantile(&seconds, 500).unwrap_or(0.0);
        Measured {
            bench: "moe",
            op: name,
            provider: "shm",
            ep: args.ep,
            tokens: args.tokens,
            hidden: args.hidden,
            experts: args.experts,
            top_k: args.top_k,
            exact: args.exact,
            rounds: args.rounds,
            p50_us: p50 * 1e6,
            p99_us: quantile(&seconds, 990).unwrap_or(0.0) * 1e6,
            bytes_out: bytes / f64::from(args.ep),
            gb_per_s: if p50 > 0.0 { bytes / p50 / 1e9 } else { 0.0 },
            baseline_us: copy_seconds(bytes) * 1e6,
        }
    };
    [(0, "dispatch"), (1, "combine")].into_iter().map(row).collect()
}

/// How long one thread takes to copy so many bytes; the median of nine.
fn copy_seconds(bytes: f64) -> f64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes there were")]
    let (from, mut to) = (vec![1_u8; bytes as usize], vec![0_u8; bytes as usize]);
    let copy = |_| {
        let begun = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        begun.elapsed().as_secs_f64()
    };
    let mut seconds: Vec<f64> = (0..9).map(copy).collect();
    seconds.sort_unstable_by(f64::total_cmp);
    quantile(&seconds, 500).unwrap_or(0.0)
}

fn table(rows: &[Measured]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "moe",
        "ranks",
        "tokens",
        "p50 us",
        "p99 us",
        "GB/s, all ranks",
        "one copy of it, us",
    ]);
    for row in rows {
        table.add_row([
            row.op.to_string(),
            row.ep.to_string(),
            row.tokens.to_string(),
            figure(row.p50_us),
            figure(row.p99_us),
            figure(row.gb_per_s),
            figure(row.baseline_us),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_the_sum_of_the_signs_of_a_tokens_experts() {
        let x: Vec<u8> = [1.0_f32, -3.0].map(|x| Format::Bf16.store(x).to_le_bytes()).concat();
        for (indices, factor) in [([0, 2], 1.0), ([0, 3], 0.0), ([5, 3], -1.0)] {
            let batch = Batch { x: x.clone(), indices: indices.to_vec() };
            let expected = [factor, -3.0 * factor].map(|x: f32| Format::Bf16.store(x + 0.0));
            assert_eq!(batch.expected(2), expected.map(u16::to_le_bytes).concat());
        }
    }

    #[test]
    fn a_round_takes_as_long_as_its_slowest_rank() {
        let args = MoeBenchArgs {
            ep: 2,
            tokens: 1,
            hidden: 8,
            experts: 4,
            top_k: 2,
            chunk: NonZeroU32::MIN,
            exact: false,
            rounds: 3,
            seed: 1,
            json: false,
        };
        let sample = |us: f64| Sample { seconds: [us * 1e-6, 1e-3], rows_out: [3, 5] };
        let ranks = [[1.0, 8.0, 2.0].map(sample).into(), [4.0, 3.0, 9.0].map(sample).into()];
        let [dispatch, combine]: [Measured; 2] = rows(&args, &ranks).try_into().unwrap();
        // Slowest of each round: 4, 8, 9.
        assert!((dispatch.p50_us - 8.0).abs() < 1e-9 && (dispatch.p99_us - 9.0).abs() < 1e-9);
        // Rows of 16 bytes: three of each rank.
        assert!(
            (dispatch.bytes_out - 48.0).abs() < 1e-9 && (combine.bytes_out - 80.0).abs() < 1e-9
        );
        assert!((dispatch.gb_per_s - 96.0 / 8e-6 / 1e9).abs() < 1e-9);
    }
}
