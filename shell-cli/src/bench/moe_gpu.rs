//! `immwire bench moe --gpus`: dispatch and combine among GPUs of this host.
//!
//! Each rank has an engine, and a stream on its GPU. Rounds are enqueued some at a time behind a word that all streams wait for,
//! so that the GPUs go on alone once it is stored: times are theirs, between events in the streams, and of each round the slowest
//! rank's counts. Knows nothing of routing: `immwire::moe::gpu` does.
//!
//! # Invariants
//!
//! - A row is printed only if all results were what experts that only change signs must give, which is exact in e4m3 and in bf16:
//!   of a first round, in which the experts are the CPU, and of the last round of all that are enqueued at a time. The latter has
//!   also brought the rows that the first brought.
//! - Memory that launches use stays until the GPU has ended them.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use immwire::TransferEngine;
use immwire::moe::gpu::{
    AllToAll, Config, Count, Half, Joining, MoeReport, Number, Payload, Results, Rows, Scales,
    Shape, Tokens,
};
use immwire::moe::{Format, MoeError};
use immwire_cuda::geometry::{Method, Tuning};
use immwire_cuda::{
    Copier, Device, DeviceMemory, Error, Event, PagedCopy, PinnedMemory, Release, Shuttle, Stream,
};

use super::moe::{Batch, Measured, MoeBenchError, firsts};
use crate::args::MoeBenchArgs;
use crate::motor::MotorError;
use crate::report::stats::quantile;
use crate::signals;

/// How long a rank's kernels wait for others'.
const KERNELS_WAIT: Duration = Duration::from_secs(5);
/// No rounds take longer, or something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);
/// Rounds that are enqueued at a time and timed, after one that brings the ranks together.
const HELD: usize = 16;
/// What is copied to learn what the wire carries, and how often.
const COPIED_BYTES: usize = 64 << 20;
const COPIES: usize = 5;
/// What is in memory for results before they come.
const UNTOUCHED: u8 = 0xee;

/// Measures both operations.
///
/// # Errors
///
/// [`MoeBenchError`].
pub fn measure(args: &MoeBenchArgs) -> Result<Vec<Measured>, MoeBenchError> {
    if args.chunk.is_some() {
        return Err(MoeBenchError::NoMeaning { option: "chunk", of: "among GPUs" });
    }
    let there = Device::count()?;
    let gpus = if args.gpus.is_empty() { (0..there).collect() } else { args.gpus.clone() };
    let devices = gpus.iter().map(|gpu| Device::open(*gpu)).collect::<Result<Vec<_>, _>>()?;
    let Some(first) = devices.first() else {
        return Err(Error::NoDevice { ordinal: 0, count: there }.into());
    };
    let count = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    let world = args.ep.unwrap_or(count);
    let shape = Shape {
        firsts: firsts(args, world)?,
        top_k: args.top_k,
        max_tokens: args.tokens.max(1),
        payload: Payload::Fp8 { from: Number::Bf16, scales: Scales::Float },
        values: args.hidden,
        results: Number::Bf16,
        padding: 1,
        exact: args.exact,
    };
    // Ranks that share a GPU share its SMs; 0 stands for all.
    let sms = if world > count { first.gpu().sms / world.div_ceil(count) } else { 0 };
    let wire = wire_rate(&devices)?;
    let exchanges = join(&gpus, &shape, sms)?;
    let mut ranks = (0..)
        .zip(exchanges)
        .zip(devices.iter().cycle())
        .map(|((rank, exchange), device)| Rank::new(device, args, &shape, rank, exchange))
        .collect::<Result<Vec<_>, _>>()?;
    checked_round(&mut ranks)?;
    let mut times = [Vec::new(), Vec::new()];
    while times[0].len() < args.rounds as usize {
        if signals::interrupted() {
            return Err(MoeBenchError::Interrupted);
        }
        held_rounds(&mut ranks, &mut times)?;
    }
    let crossing = Crossing::new(&ranks, &shape)?;
    let row = |(op, name): (usize, &'static str)| {
        let mut times = times[op].clone();
        times.truncate(args.rounds as usize);
        times.sort_unstable_by(f64::total_cmp);
        let p50 = quantile(&times, 500).unwrap_or(0.0);
        let busiest = crossing.busiest(op);
        let floor = wire.filter(|_| busiest > 0.0).map(|rate| busiest / rate);
        Measured {
            bench: "moe",
            op: name,
            provider: "nvlink",
            ep: world,
            gpus: Some(gpus.len()),
            tokens: args.tokens,
            hidden: args.hidden,
            experts: args.experts,
            top_k: args.top_k,
            exact: args.exact,
            rounds: args.rounds,
            p50_us: p50 * 1e6,
            p99_us: quantile(&times, 990).unwrap_or(0.0) * 1e6,
            bytes_out: crossing.all(op) / f64::from(world),
            gb_per_s: if p50 > 0.0 { busiest / p50 / 1e9 } else { 0.0 },
            baseline_us: floor.map(|floor| floor * 1e6),
            ratio: floor.filter(|_| p50 > 0.0).map(|floor| floor / p50),
        }
    };
    Ok([(0, "dispatch"), (1, "combine")].into_iter().map(row).collect())
}

/// Bytes a second that the driver copies from a GPU to the next, of the slowest pair; none if there is one GPU.
fn wire_rate(devices: &[Device]) -> Result<Option<f64>, MoeBenchError> {
    let pairs = devices.iter().zip(devices.iter().cycle().skip(1));
    let mut rates = Vec::new();
    for (from, to) in pairs.filter(|(from, to)| from.ordinal() != to.ordinal()) {
        rates.push(copy_rate(from, to)?);
    }
    Ok(rates.into_iter().reduce(f64::min))
}

/// The best of some copies.
fn copy_rate(from: &Device, to: &Device) -> Result<f64, Error> {
    from.reach(to)?;
    let (stream, far) = (Stream::new(from)?, Stream::new(to)?);
    let source = DeviceMemory::zeroed(&stream, COPIED_BYTES)?;
    let target = DeviceMemory::zeroed(&far, COPIED_BYTES)?;
    let zeroed = Event::new(to)?;
    zeroed.record(&far)?;
    zeroed.wait(PATIENCE)?;
    let copier = Copier::new(&stream, Tuning::default())?;
    let (start, end) = (Event::new(from)?, Event::new(from)?);
    let whole = PagedCopy::contiguous(source.address(), target.address(), COPIED_BYTES as u64);
    let copy = || {
        start.record(&stream)?;
        // SAFETY: both are of this length, ours, and stay until the copy has ended, or for ever.
        unsafe { copier.submit(&whole, Release::Nothing, Method::CopyEngine, NonZeroU32::MIN)? };
        end.record(&stream)?;
        end.wait(PATIENCE)?;
        end.since(&start)
    };
    let mut least = Duration::MAX;
    for _ in 0..COPIES {
        match copy() {
            Ok(took) => least = least.min(took),
            Err(error) => {
                std::mem::forget((source, target));
                return Err(error);
            }
        }
    }
    Ok(COPIED_BYTES as f64 / least.as_secs_f64().max(1e-9))
}

/// An exchange for each rank, on GPUs in turn.
fn join(gpus: &[u32], shape: &Shape, sms: u32) -> Result<Vec<AllToAll>, MoeBenchError> {
    let of = |rank| move |error| MoeBenchError::Exchange { rank, error };
    let mut joining = Vec::new();
    for (rank, gpu) in (0..).zip(gpus.iter().cycle()).take(shape.firsts.len() - 1) {
        let engine = TransferEngine::builder().gpus([*gpu]).build().map_err(MotorError::from)?;
        let config = Config { rank, gpu: *gpu, shape: shape.clone(), sms, timeout: KERNELS_WAIT };
        joining.push(AllToAll::open(&engine, &config).map_err(of(rank))?);
    }
    let seats: Vec<_> = joining.iter().map(Joining::seat).collect();
    thread::scope(|scope| {
        let seats = &seats;
        let join = |joining: Joining| scope.spawn(move || joining.join(seats, PATIENCE));
        let threads: Vec<_> = joining.into_iter().map(join).collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        (0..).zip(joined).map(|(rank, joined)| joined.map_err(of(rank))).collect()
    })
}

/// A first round, whose rows go through the CPU; what its experts answer stays for the rounds to come.
fn checked_round(ranks: &mut [Rank]) -> Result<(), MoeBenchError> {
    ranks.iter().try_for_each(Rank::dispatch)?;
    for rank in &mut *ranks {
        rank.settle()?;
        rank.work()?;
    }
    ranks.iter_mut().try_for_each(Rank::blank)?;
    ranks.iter().try_for_each(Rank::combine)?;
    ranks.iter_mut().try_for_each(Rank::check)
}

/// Enqueues rounds for all ranks, lets them go, and adds what each took to `times`: out, and back.
fn held_rounds(ranks: &mut [Rank], times: &mut [Vec<f64>; 2]) -> Result<(), MoeBenchError> {
    ranks.iter_mut().try_for_each(Rank::blank)?;
    ranks.iter_mut().try_for_each(Rank::blank_rows)?;
    let enqueued = ranks.iter_mut().try_for_each(Rank::enqueue_held);
    // Also if something went wrong: who holds back nothing ends.
    let opened = ranks.iter().try_for_each(Rank::open_gate);
    enqueued.and(opened)?;
    ranks.iter_mut().try_for_each(Rank::check)?;
    ranks.iter_mut().try_for_each(Rank::check_rows)?;
    for round in 0..HELD {
        for (op, times) in times.iter_mut().enumerate() {
            let at = 2 * round + op;
            let mut slowest = 0.0_f64;
            for rank in &*ranks {
                slowest = slowest.max(rank.took(at)?.as_secs_f64());
            }
            times.push(slowest);
        }
    }
    Ok(())
}

/// One rank, and the memory of its rounds, on its GPU.
struct Rank {
    number: u32,
    exchange: AllToAll,
    stream: Stream,
    shuttle: Shuttle,
    /// The word that its stream waits for, and how often it has.
    gate: PinnedMemory,
    turn: u64,
    /// Between launches.
    marks: Vec<Event>,
    batch: Batch,
    expected: Vec<u8>,
    /// The rows of the first round, and their scales: each round brings them anew.
    received: [Vec<u8>; 2],
    experts: Range<u32>,
    tokens: u32,
    room: u32,
    token_bytes: usize,
    scale_bytes: usize,
    x: DeviceMemory,
    indices: DeviceMemory,
    weights: DeviceMemory,
    rows_x: DeviceMemory,
    rows_scales: DeviceMemory,
    counts: DeviceMemory,
    offsets: DeviceMemory,
    y: DeviceMemory,
    out: DeviceMemory,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // Whatever went wrong: launches use what goes now. They wait for nothing that has no deadline.
        let _ = self.open_gate();
        let _ = self.stream.device().synchronize();
    }
}

impl Rank {
    fn new(
        device: &Device,
        args: &MoeBenchArgs,
        shape: &Shape,
        number: u32,
        exchange: AllToAll,
    ) -> Result<Self, MoeBenchError> {
        let mut edges = shape.firsts.iter().skip(number as usize).copied();
        let experts = edges.next().unwrap_or(0)..edges.next().unwrap_or(0);
        let geometry = exchange.geometry();
        let (token_bytes, scale_bytes) =
            (geometry.token_bytes as usize, geometry.scale_bytes as usize);
        let room = u32::try_from(geometry.max_rows).unwrap_or(u32::MAX);
        let (rows, local) = (room as usize, experts.len());
        let batch = Batch::new(args, number, 0);
        let stream = Stream::new(device)?;
        let memory = |bytes: usize| DeviceMemory::zeroed(&stream, bytes.max(16));
        let mut made = Self {
            number,
            shuttle: Shuttle::new(device)?,
            gate: PinnedMemory::zeroed(device, 8)?,
            turn: 0,
            marks: (0..=2 * HELD).map(|_| Event::new(device)).collect::<Result<_, _>>()?,
            expected: batch.expected(args.top_k),
            received: Default::default(),
            experts,
            tokens: args.tokens,
            room,
            token_bytes,
            scale_bytes,
            x: memory(batch.x.len())?,
            indices: memory(batch.indices.len() * 4)?,
            weights: memory(batch.indices.len() * 4)?,
            rows_x: memory(rows * token_bytes)?,
            rows_scales: memory(rows * scale_bytes)?,
            counts: memory(local * 4)?,
            offsets: memory(local * 4 + 4)?,
            y: memory(rows * args.hidden as usize * Format::BYTES)?,
            out: memory(batch.x.len())?,
            batch,
            exchange,
            stream,
        };
        made.settle()?;
        let indices: Vec<u8> =
            made.batch.indices.iter().flat_map(|index| index.to_ne_bytes()).collect();
        let weights = made.batch.weights(args.top_k);
        let weights: Vec<u8> = weights.iter().flat_map(|weight| weight.to_ne_bytes()).collect();
        let x = made.batch.x.clone();
        for (at, bytes) in [(&made.x, &x), (&made.indices, &indices), (&made.weights, &weights)]
            .map(|(memory, bytes)| (memory.address(), bytes))
        {
            made.put(at, bytes)?;
        }
        Ok(made)
    }

    /// Copies to memory of this rank, which is as long.
    fn put(&mut self, to: u64, bytes: &[u8]) -> Result<(), MoeBenchError> {
        // SAFETY: callers name memory of ours that is as long, which no launch uses now, and which is not freed before the GPU has
        // gone on.
        unsafe { self.shuttle.write(bytes, to)? };
        Ok(())
    }

    /// Copies from memory of this rank, which is at least as long.
    fn get(&mut self, from: u64, bytes: usize) -> Result<Vec<u8>, MoeBenchError> {
        let mut found = vec![0; bytes];
        // SAFETY: as in `put`, the other way.
        unsafe { self.shuttle.read(from, &mut found)? };
        Ok(found)
    }

    fn dispatch(&self) -> Result<(), MoeBenchError> {
        let tokens = Tokens {
            count: Count::Here(self.tokens),
            x: self.x.address(),
            scales: 0,
            indices: self.indices.address(),
            wide_indices: false,
            weights: self.weights.address(),
        };
        let rows = Rows {
            x: self.rows_x.address(),
            scales: self.rows_scales.address(),
            slots: 0,
            rows: self.room,
            counts: self.counts.address(),
            offsets: self.offsets.address(),
            clear_padding: false,
        };
        let stream = self.stream.raw();
        // SAFETY: a stream of the GPU's own context, which has all launches of this exchange, in turn; memory of so many tokens and
        // rows, which stays until the GPU has ended them (`drop`); ranks that share a GPU share its SMs.
        let enqueued = unsafe { self.exchange.dispatch(stream, Half::Both, &tokens, &rows) };
        enqueued.map_err(|error| MoeBenchError::Exchange { rank: self.number, error })
    }

    fn combine(&self) -> Result<(), MoeBenchError> {
        let results = Results {
            y: self.y.address(),
            rows: self.room,
            out: self.out.address(),
            tokens: self.tokens,
            accumulate: false,
        };
        // SAFETY: as above.
        let enqueued = unsafe { self.exchange.combine(self.stream.raw(), Half::Both, &results) };
        enqueued.map_err(|error| MoeBenchError::Exchange { rank: self.number, error })
    }

    /// What the experts do with the rows received: those of odd numbers change signs.
    fn work(&mut self) -> Result<(), MoeBenchError> {
        let offsets = self.get(self.offsets.address(), self.experts.len() * 4 + 4)?;
        let offsets: Vec<usize> = offsets
            .chunks_exact(4)
            .map(|bytes| bytes.iter().rev().fold(0, |word, byte| word << 8 | usize::from(*byte)))
            .collect();
        let rows = offsets.last().map_or(0, |rows| (*rows).min(self.room as usize));
        let x = self.get(self.rows_x.address(), rows * self.token_bytes)?;
        let scales = self.get(self.rows_scales.address(), rows * self.scale_bytes)?;
        let mut y = Vec::with_capacity(x.len() * Format::BYTES);
        let edges = offsets.iter().zip(offsets.iter().skip(1));
        for (expert, (first, next)) in self.experts.clone().zip(edges) {
            let sign = if expert % 2 == 1 { -1.0 } else { 1.0 };
            let x = x.chunks_exact(self.token_bytes).zip(scales.chunks_exact(self.scale_bytes));
            for (x, scales) in x.take(*next).skip(*first) {
                for (codes, scale) in x.chunks(GROUP).zip(scales.chunks_exact(4)) {
                    let scale = scale.try_into().map_or(0.0, f32::from_ne_bytes);
                    let value = |code: &u8| Format::Bf16.store(sign * scale * e4m3(*code));
                    y.extend(codes.iter().flat_map(|code| value(code).to_ne_bytes()));
                }
            }
        }
        self.received = [x, scales];
        self.put(self.y.address(), &y)
    }

    /// Clears where results arrive.
    fn blank(&mut self) -> Result<(), MoeBenchError> {
        let bytes = vec![UNTOUCHED; self.batch.x.len()];
        self.put(self.out.address(), &bytes)
    }

    /// Clears where rows arrive.
    fn blank_rows(&mut self) -> Result<(), MoeBenchError> {
        let [rows, scales] = &self.received;
        let blank = vec![UNTOUCHED; rows.len().max(scales.len())];
        for (to, len) in
            [(self.rows_x.address(), rows.len()), (self.rows_scales.address(), scales.len())]
        {
            self.put(to, blank.get(..len).unwrap_or_default())?;
        }
        Ok(())
    }

    /// Compares the last rows; all launches have ended.
    fn check_rows(&mut self) -> Result<(), MoeBenchError> {
        let [rows, scales] = std::mem::take(&mut self.received);
        let (x, s) = (self.rows_x.address(), self.rows_scales.address());
        let found = [self.get(x, rows.len())?, self.get(s, scales.len())?];
        let received = [rows, scales];
        if found != received {
            let round = u32::try_from(self.turn).unwrap_or(u32::MAX);
            return Err(MoeBenchError::Wrong { rank: self.number, round });
        }
        self.received = received;
        Ok(())
    }

    /// Waits for all launches, and compares the last results.
    fn check(&mut self) -> Result<(), MoeBenchError> {
        self.settle()?;
        let (rank, report) = (self.number, self.exchange.report());
        if report != MoeReport::default() {
            return Err(MoeBenchError::Report { rank, report: Box::new(report) });
        }
        if self.get(self.out.address(), self.expected.len())? != self.expected {
            let round = u32::try_from(self.turn).unwrap_or(u32::MAX);
            return Err(MoeBenchError::Wrong { rank, round });
        }
        Ok(())
    }

    fn settle(&self) -> Result<(), MoeBenchError> {
        let event = Event::new(self.stream.device())?;
        event.record(&self.stream)?;
        Ok(event.wait(PATIENCE)?)
    }

    /// Rounds that wait for the gate.
    fn enqueue_held(&mut self) -> Result<(), MoeBenchError> {
        self.turn += 1;
        // SAFETY: a word of pinned memory that stays until the stream has ended all (`drop`).
        unsafe { self.stream.after_word(self.gate.address(), self.turn)? };
        // The first brings the ranks together.
        self.dispatch()?;
        self.combine()?;
        let mut marks = self.marks.iter();
        let mut mark = || marks.next().map_or(Ok(()), |mark| mark.record(&self.stream));
        mark()?;
        for _ in 0..HELD {
            self.dispatch()?;
            mark()?;
            self.combine()?;
            mark()?;
        }
        Ok(())
    }

    fn open_gate(&self) -> Result<(), MoeBenchError> {
        self.gate.word(0)?.store(self.turn, Ordering::Release);
        Ok(())
    }

    /// From one mark to the next.
    fn took(&self, at: usize) -> Result<Duration, MoeBenchError> {
        match (self.marks.get(at), self.marks.get(at + 1)) {
            (Some(start), Some(end)) => Ok(end.since(start)?),
            _ => Ok(Duration::ZERO),
        }
    }
}

/// Values of one scale.
const GROUP: usize = 128;

/// The value of an e4m3 code that is a number.
fn e4m3(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = if exponent == 0 {
        fraction * 2f32.powi(-9)
    } else {
        (8.0 + fraction) * 2f32.powi(exponent - 10)
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// Bytes that go from GPU to GPU in a round, by the GPU that gets them: out, and back.
#[derive(Default)]
struct Crossing(BTreeMap<u32, [f64; 2]>);

impl Crossing {
    fn new(ranks: &[Rank], shape: &Shape) -> Result<Self, MoeBenchError> {
        let mut into = BTreeMap::<u32, [f64; 2]>::new();
        let gpu = |rank: &Rank| rank.stream.device().ordinal();
        for source in ranks {
            let rows = source.batch.rows_by_rank(&shape.firsts, shape.top_k, shape.exact);
            let [out, back] = rows.map_err(|error| MoeBenchError::Exchange {
                rank: source.number,
                error: MoeError::Routing(error),
            })?;
            let others = ranks.iter().zip(out.iter().zip(&back));
            for (other, (out, back)) in others.filter(|(other, _)| gpu(other) != gpu(source)) {
                let token_bytes = (source.token_bytes + source.scale_bytes) as f64;
                let result_bytes = f64::from(shape.values) * Format::BYTES as f64;
                into.entry(gpu(other)).or_default()[0] += f64::from(*out) * token_bytes;
                into.entry(gpu(source)).or_default()[1] += f64::from(*back) * result_bytes;
            }
        }
        Ok(Self(into))
    }

    fn of(&self, op: usize) -> impl Iterator<Item = f64> {
        self.0.values().filter_map(move |bytes| bytes.get(op).copied())
    }

    fn busiest(&self, op: usize) -> f64 {
        self.of(op).fold(0.0, f64::max)
    }

    fn all(&self, op: usize) -> f64 {
        self.of(op).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes of the values that a batch has, divided by a scale that makes the largest 448.
    #[test]
    fn e4m3_has_what_a_batch_sends() {
        for (code, value) in [(0, 0.0), (0x6e, 112.0), (0x76, 224.0), (0x7e, 448.0), (0xf6, -224.0)]
        {
            assert!((e4m3(code) - value).abs() < f32::EPSILON, "{code:#x}");
        }
        assert!((e4m3(1) - 2f32.powi(-9)).abs() < f32::EPSILON);
    }
}
