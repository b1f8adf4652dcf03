//! `immwire bench moe`: dispatch and combine among ranks of this host, in host memory; among GPUs by [`super::moe_gpu`].
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
use immwire::TransferEngine;
use immwire::core::moe::{Placement, Routing, RoutingError};
use immwire::moe::gpu::MoeReport;
use immwire::moe::{Absent, AllToAll, Config, Format, Joining, MoeError, Results, Rows, Tokens};
use serde::Serialize;

use super::moe_gpu;
use crate::args::{MoeBenchArgs, Provider};
use crate::motor::MotorError;
use crate::report::stats::quantile;
use crate::report::table::figure;
use crate::signals;
use crate::transport::{Carrier, Peers, TransportError};

/// No round takes longer, or something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);
/// Rounds before the first that is timed.
const WARM: u32 = 2;

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum MoeBenchError {
    /// An engine could not be built.
    #[error(transparent)]
    Motor(#[from] MotorError),
    /// The arguments make no exchange, or a round failed.
    #[error("rank {rank}: {error}")]
    Exchange {
        /// Which rank.
        rank: u32,
        /// Why.
        error: MoeError,
    },
    /// A rank did not come.
    #[error("rank {rank} went on without {absent}")]
    Absent {
        /// Which rank says so.
        rank: u32,
        /// Who, and why.
        absent: Absent,
    },
    /// A result was not what it must be.
    #[error("rank {rank} was given wrong results in round {round}")]
    Wrong {
        /// Which rank.
        rank: u32,
        /// Which round.
        round: u32,
    },
    /// An option says nothing here.
    #[error("--{option} has no meaning for dispatch and combine {of}: leave it out")]
    NoMeaning {
        /// The option.
        option: &'static str,
        /// Among whom.
        of: &'static str,
    },
    /// The flags make no transport.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The driver of the GPUs, or there is none.
    #[error(
        "{0}\n  what to do: `immwire doctor` says which GPUs there are and why others cannot be used; without --gpus and \
         --provider nvlink ranks are measured in host memory"
    )]
    Gpu(#[from] immwire_cuda::Error),
    /// Kernels did not get what they waited for, or left something out.
    #[error(
        "rank {rank} reports {report:?}\n  what to do: if several ranks share a GPU, give their streams queues of their own: \
         CUDA_DEVICE_MAX_CONNECTIONS=32"
    )]
    Report {
        /// Which rank.
        rank: u32,
        /// What.
        report: Box<MoeReport>,
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

impl MoeBenchError {
    /// The engine's failure, if it was one.
    pub(crate) const fn motor(&self) -> Option<&MotorError> {
        match self {
            Self::Motor(error) => Some(error),
            _ => None,
        }
    }
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
    /// GPUs, if ranks have such.
    pub gpus: Option<usize>,
    /// Values of a token: bf16 both ways, of GPUs e4m3 with scales on the way out.
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
    /// Bytes of payload that leave a rank for others; the mean over ranks and rounds. With GPUs, for other GPUs.
    pub bytes_out: f64,
    /// Those of all ranks together, a second, at the median / 1e9. With GPUs, what the busiest GPU gets from others.
    pub gb_per_s: f64,
    /// Microseconds that one thread takes to copy as many bytes as leave all ranks, the median. With GPUs, what the wire takes for the
    /// bytes that the busiest gets, at the rate of the driver's own copies; none where there is one GPU.
    pub baseline_us: Option<f64>,
    /// The baseline through the median.
    pub ratio: Option<f64>,
}

/// Runs it, and prints a row for each operation.
///
/// # Errors
///
/// [`MoeBenchError`].
pub fn bench(args: &MoeBenchArgs) -> Result<(), MoeBenchError> {
    let rows = match (args.transport.provider, args.gpus.is_empty()) {
        (None, false) | (Some(Provider::Nvlink), _) => {
            args.transport.for_gpus_alone()?;
            moe_gpu::measure(args)?
        }
        (_, true) => measure(args, &args.transport.without_gpus(Peers::Own)?)?,
        (Some(_), false) => {
            return Err(MoeBenchError::NoMeaning { option: "gpus", of: "in host memory" });
        }
    };
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

/// The first expert of each rank, and how many there are.
pub(super) fn firsts(args: &MoeBenchArgs, ranks: u32) -> Result<Vec<u32>, MoeBenchError> {
    let mut firsts = vec![0; ranks as usize + 1];
    Placement::even(args.experts, &mut firsts)
        .map_err(|error| MoeBenchError::Exchange { rank: 0, error: error.into() })?;
    if args.top_k > args.experts {
        return Err(MoeBenchError::TopK { top_k: args.top_k, experts: args.experts });
    }
    Ok(firsts)
}

/// Ranks in host memory.
fn world(args: &MoeBenchArgs) -> u32 {
    args.ep.unwrap_or(2)
}

fn config(args: &MoeBenchArgs, rank: u32) -> Result<Config, MoeBenchError> {
    const CHUNK: NonZeroU32 = NonZeroU32::MIN.saturating_add(511);
    Ok(Config {
        rank,
        firsts: firsts(args, world(args))?,
        top_k: args.top_k,
        max_tokens: args.tokens,
        token_bytes: args.hidden.saturating_mul(2),
        scale_bytes: 0,
        hidden: args.hidden,
        format: Format::Bf16,
        padding: NonZeroU32::MIN,
        chunk_tokens: args.chunk.unwrap_or(CHUNK),
        exact: args.exact,
    })
}

/// Measures both operations.
///
/// # Errors
///
/// [`MoeBenchError`].
pub fn measure(args: &MoeBenchArgs, carrier: &Carrier) -> Result<Vec<Measured>, MoeBenchError> {
    let mut joining = Vec::new();
    for rank in 0..world(args) {
        let builder = TransferEngine::builder().transport(carrier.transport.clone());
        let engine = builder.shm_on_host(carrier.shm_on_host).build().map_err(MotorError::from)?;
        let opened = AllToAll::open(&engine, &config(args, rank)?);
        joining.push(opened.map_err(|error| MoeBenchError::Exchange { rank, error })?);
    }
    let seats: Vec<_> = joining.iter().map(Joining::seat).collect();
    let meeting = Meeting { ranks: world(args).into(), ..Meeting::default() };
    let ranks: Vec<Vec<Sample>> = thread::scope(|scope| {
        let run = |(rank, joining): (u32, Joining)| {
            let (seats, meeting) = (&seats, &meeting);
            scope.spawn(move || {
                let run = || -> Result<Vec<Sample>, MoeBenchError> {
                    let joined = joining.join(seats, PATIENCE);
                    let mut exchange =
                        joined.map_err(|error| MoeBenchError::Exchange { rank, error })?;
                    let mut lent = Lent::default();
                    let mut round =
                        |number| run_round(args, rank, number, &mut exchange, &mut lent, meeting);
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
        None => Ok(rows(args, carrier.name(), &ranks)),
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

/// Memory of a rank's for what it receives, the same in all rounds: what is new comes in by page faults, which would be measured, too.
#[derive(Default)]
struct Lent {
    rows: Vec<u8>,
    out: Vec<u8>,
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
    Lent { rows: y, out }: &mut Lent,
    meeting: &Meeting,
) -> Result<Sample, MoeBenchError> {
    let failed = |error| MoeBenchError::Exchange { rank, error };
    let config = config(args, rank)?;
    let batch = Batch::new(args, rank, number);
    let weights = batch.weights(args.top_k);
    let bytes = config.token_bytes as usize;
    y.resize(exchange.max_rows() * bytes, 0);
    out.clear();
    out.resize(batch.x.len(), 0);
    let tokens = Tokens { x: &batch.x, scales: &[], indices: &batch.indices, weights: &weights };
    let meetings = u64::from(number) * 2;
    meeting.wait(meetings + 1)?;
    let begun = Instant::now();
    let rows = Rows { x: y, scales: &mut [], slots: None };
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
    let results = Results { y, out, accumulate: false };
    exchange.combine(results, PATIENCE).map_err(failed)?;
    let combine = begun.elapsed().as_secs_f64();
    // A round goes on without who is missing; what is measured then is none.
    if let Some(absent) = exchange.control().report().absent.first() {
        return Err(MoeBenchError::Absent { rank, absent: *absent });
    }
    if *out != batch.expected(args.top_k) {
        return Err(MoeBenchError::Wrong { rank, round: number });
    }
    let rows_out = batch.rows_out(&config).map_err(|error| failed(MoeError::Routing(error)))?;
    Ok(Sample { seconds: [dispatch, combine], rows_out })
}

/// One rank's tokens in one round: small powers of two, and distinct experts for each.
pub(super) struct Batch {
    pub(super) x: Vec<u8>,
    pub(super) indices: Vec<i32>,
}

impl Batch {
    pub(super) fn new(args: &MoeBenchArgs, rank: u32, number: u32) -> Self {
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
        // Such as e4m3 has whatever the largest of them is, too.
        let value = |number: u64| {
            let size = [0.0, 1.0, 2.0, 4.0].into_iter().nth((number % 4) as usize).unwrap_or(0.0);
            Format::Bf16.store(if number & 4 == 0 { size } else { -size })
        };
        let x = (0..values).flat_map(|_| value(next()).to_le_bytes()).collect();
        Self { x, indices }
    }

    /// One through the next power of two, for every choice.
    pub(super) fn weights(&self, top_k: u32) -> Vec<f32> {
        vec![1.0 / top_k.next_power_of_two() as f32; self.indices.len()]
    }

    /// Each value times the sum of its experts' signs, by the power of two that the weights are. All sums are whole
    /// numbers up to 128, which bf16 has.
    pub(super) fn expected(&self, top_k: u32) -> Vec<u8> {
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

    /// Rows of this rank's tokens to each rank, out; and back: for each token that a rank had, or where sums are exact for each choice.
    pub(super) fn rows_by_rank(
        &self,
        firsts: &[u32],
        top_k: u32,
        exact: bool,
    ) -> Result<[Vec<u32>; 2], RoutingError> {
        let experts = firsts.last().copied().unwrap_or(0);
        let routing = Routing::new(&self.indices, top_k, experts)?;
        let mut counts = [(); 2].map(|()| vec![0; firsts.len() - 1]);
        if let Ok(placement) = Placement::new(firsts) {
            let [out, back] = &mut counts;
            routing.count_ranks(&placement, out)?;
            if exact {
                routing.count_choices(&placement, back)?;
            } else {
                routing.count_ranks(&placement, back)?;
            }
        }
        Ok(counts)
    }

    /// Rows that leave the rank for others, out; and back those of others, of which each rank has as many on average.
    fn rows_out(&self, config: &Config) -> Result<[u64; 2], RoutingError> {
        let counts = self.rows_by_rank(&config.firsts, config.top_k, config.exact)?;
        Ok(counts.map(|counts| {
            let others = (0..).zip(&counts).filter(|(rank, _)| *rank != config.rank);
            others.map(|(_, count)| u64::from(*count)).sum()
        }))
    }
}

/// A row for each operation.
fn rows(args: &MoeBenchArgs, provider: &'static str, ranks: &[Vec<Sample>]) -> Vec<Measured> {
    let row = |(op, name): (usize, &'static str)| {
        let of = |round: usize| ranks.iter().filter_map(move |samples| samples.get(round));
        let rounds = 0..args.rounds as usize;
        let slowest = |round| of(round).map(|sample| sample.seconds[op]).fold(0.0, f64::max);
        let mut seconds: Vec<f64> = rounds.clone().map(slowest).collect();
        seconds.sort_unstable_by(f64::total_cmp);
        let rows: u64 = rounds.flat_map(of).map(|sample| sample.rows_out[op]).sum();
        let bytes = rows as f64 * f64::from(args.hidden) * 2.0 / f64::from(args.rounds);
        let p50 = quantile(&seconds, 500).unwrap_or(0.0);
        let baseline = copy_seconds(bytes);
        Measured {
            bench: "moe",
            op: name,
            provider,
            ep: world(args),
            gpus: None,
            tokens: args.tokens,
            hidden: args.hidden,
            experts: args.experts,
            top_k: args.top_k,
            exact: args.exact,
            rounds: args.rounds,
            p50_us: p50 * 1e6,
            p99_us: quantile(&seconds, 990).unwrap_or(0.0) * 1e6,
            bytes_out: bytes / f64::from(world(args)),
            gb_per_s: if p50 > 0.0 { bytes / p50 / 1e9 } else { 0.0 },
            baseline_us: Some(baseline * 1e6),
            ratio: (p50 > 0.0).then_some(baseline / p50),
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
    let gpus = rows.iter().any(|row| row.gpus.is_some());
    let [rate, baseline] = if gpus {
        ["GB/s, busiest GPU", "the wire, us"]
    } else {
        ["GB/s, all ranks", "one copy of it, us"]
    };
    table
        .load_preset(presets::NOTHING)
        .set_header(["moe", "ranks", "tokens", "p50 us", "p99 us", rate, baseline, "ratio"]);
    for row in rows {
        table.add_row([
            row.op.to_string(),
            row.ep.to_string(),
            row.tokens.to_string(),
            figure(row.p50_us),
            figure(row.p99_us),
            figure(row.gb_per_s),
            row.baseline_us.map_or_else(String::new, figure),
            row.ratio.map_or_else(String::new, figure),
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
    use crate::args::TransportArgs;

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
            ep: Some(2),
            transport: TransportArgs::default(),
            gpus: Vec::new(),
            tokens: 1,
            hidden: 8,
            experts: 4,
            top_k: 2,
            chunk: None,
            exact: false,
            rounds: 3,
            seed: 1,
            json: false,
        };
        let sample = |us: f64| Sample { seconds: [us * 1e-6, 1e-3], rows_out: [3, 5] };
        let ranks = [[1.0, 8.0, 2.0].map(sample).into(), [4.0, 3.0, 9.0].map(sample).into()];
        let [dispatch, combine]: [Measured; 2] = rows(&args, "shm", &ranks).try_into().unwrap();
        // Slowest of each round: 4, 8, 9.
        assert!((dispatch.p50_us - 8.0).abs() < 1e-9 && (dispatch.p99_us - 9.0).abs() < 1e-9);
        // Rows of 16 bytes: three of each rank.
        assert!(
            (dispatch.bytes_out - 48.0).abs() < 1e-9 && (combine.bytes_out - 80.0).abs() < 1e-9
        );
        assert!((dispatch.gb_per_s - 96.0 / 8e-6 / 1e9).abs() < 1e-9);
    }
}
