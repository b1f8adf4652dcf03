//! Dispatch and combine among GPUs: every kind of exchange against the oracle, bit by bit, and how long rounds take.
//!
//! All ranks are in this process, each with a stream, but for those of `processes`; ranks share GPUs where they are more. Times are the GPU's: rounds are
//! captured in a graph for each rank and replayed, with the clock taken between the launches: a kernel of its own, which is part of the
//! figures. So it is taken twice after each round, and what lies between, where nothing is done, is told, too: what a stream takes longer for a
//! launch is the difference. Whole rounds are measured without it. Of each round the slowest rank counts.

use crate::graph::Graph;
use crate::rig::{Gpu, LIMIT};
use crate::signals::{call, within};
use cudarc::driver::sys as cu;
use immwire::moe::slot_of;
use immwire_cuda::moe::args::{MoeReport, NO_ROW};
use immwire_cuda::moe::geometry::{Geometry, Many, Number, Payload, Scales, Shape};
use immwire_cuda::moe::{Count, Exchange, Half, Results, Rows, Tokens};
use immwire_cuda::{
    DeviceMemory, Event, Handover, Opened, PinnedMemory, Received, SharedMemory, Stream, hand_over,
};
use immwire_verification_moe::oracle::{Layout, Maker, Random, Round, Tokens as Sent, bytes_of};
use serde_json::{Value, json};
use std::error::Error;
use std::ffi::CStr;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

mod overlap;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// How long tokens are waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// What is there before it is written.
const UNTOUCHED: u8 = 0xa5;

/// Memory of a GPU for one rank, and what it holds in host memory.
struct Buffer {
    there: DeviceMemory,
    here: PinnedMemory,
}

impl Buffer {
    fn new(gpu: &Gpu, bytes: usize) -> Outcome<Self> {
        let bytes = bytes.max(16);
        Ok(Self { there: gpu.memory(bytes)?, here: gpu.pinned(bytes)? })
    }

    fn at(&self) -> u64 {
        self.there.address()
    }

    fn put(&mut self, gpu: &Gpu, bytes: &[u8]) -> Outcome<()> {
        self.here.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        if !bytes.is_empty() {
            gpu.move_range(self.here.address(), self.at(), bytes.len())?;
        }
        Ok(())
    }

    fn fill(&mut self, gpu: &Gpu, byte: u8) -> Outcome<()> {
        self.here.as_mut_slice().fill(byte);
        Ok(gpu.move_range(self.here.address(), self.at(), self.here.bytes())?)
    }

    fn get(&mut self, gpu: &Gpu) -> Outcome<&[u8]> {
        gpu.move_range(self.at(), self.here.address(), self.here.bytes())?;
        Ok(self.here.as_slice())
    }
}

/// What a rank lends.
enum Inbox {
    /// To ranks in this process.
    Here(DeviceMemory),
    /// To others.
    Shared(SharedMemory),
}

impl Inbox {
    fn at(&self) -> u64 {
        match self {
            Self::Here(memory) => memory.address(),
            Self::Shared(memory) => memory.address(),
        }
    }
}

struct Rank {
    number: usize,
    gpu: usize,
    stream: Stream,
    exchange: Exchange,
    inbox: Inbox,
    /// What takes turns from round to round.
    sets: Vec<Set>,
}

/// What a round reads and writes.
struct Set {
    x: Buffer,
    scales: Buffer,
    indices: Buffer,
    weights: Buffer,
    count: Buffer,
    rows_x: Buffer,
    rows_scales: Buffer,
    slots: Buffer,
    counts: Buffer,
    offsets: Buffer,
    y: Buffer,
    out: Buffer,
    /// What results are added to.
    onto: Option<Vec<u8>>,
}

struct World<'a> {
    gpus: &'a [Gpu],
    shape: Shape,
    geometry: Geometry,
    rows: u32,
    /// Those of this process.
    ranks: Vec<Rank>,
}

impl<'a> World<'a> {
    /// Ranks on GPUs in turn, each with `sms` blocks (0: all).
    fn new(
        gpus: &'a [Gpu],
        shape: &Shape,
        sms: u32,
        rows: Option<u32>,
        sets: usize,
        patience: Duration,
    ) -> Outcome<Self> {
        let world = u32::try_from(shape.firsts.len() - 1)?;
        let mut world = Self::apart(gpus, shape, 0..world, sms, rows, sets, patience)?;
        let inboxes: Vec<u64> = world.ranks.iter().map(|rank| rank.inbox.at()).collect();
        world.connect(&inboxes)?;
        Ok(world)
    }

    fn connect(&mut self, inboxes: &[u64]) -> Outcome<()> {
        for rank in &mut self.ranks {
            rank.exchange.connect(inboxes)?;
        }
        Ok(())
    }

    /// Only these ranks, not connected yet.
    fn apart(
        gpus: &'a [Gpu],
        shape: &Shape,
        ranks: Range<u32>,
        sms: u32,
        rows: Option<u32>,
        sets: usize,
        patience: Duration,
    ) -> Outcome<Self> {
        let shares = ranks.len() + 1 < shape.firsts.len();
        let geometry = Geometry::new(shape)?;
        let rows = rows.unwrap_or(u32::try_from(geometry.max_rows)?);
        let rank = |rank: u32| -> Outcome<Rank> {
            let number = rank as usize % gpus.len();
            let gpu = &gpus[number];
            let stream = Stream::new(&gpu.device)?;
            let exchange = Exchange::new(&stream, shape, rank, sms, patience)?;
            let bytes = usize::try_from(geometry.inbox_bytes)?;
            let inbox = if shares {
                Inbox::Shared(SharedMemory::zeroed(&gpu.device, bytes)?)
            } else {
                Inbox::Here(DeviceMemory::zeroed(&stream, bytes)?)
            };
            // SAFETY: it was allocated just now.
            unsafe { exchange.clear_inbox(&stream, inbox.at())? };
            let tokens = shape.max_tokens as usize;
            let (x, choices) = (tokens * shape.values as usize * 2, tokens * shape.top_k as usize);
            let local = (shape.firsts[rank as usize + 1] - shape.firsts[rank as usize]) as usize;
            let rows = rows as usize;
            // Of rows, or of slots for the tokens of all ranks.
            let room = rows.max(geometry.world as usize * tokens);
            let set = |_| -> Outcome<Set> {
                Ok(Set {
                    x: Buffer::new(gpu, x.max(tokens * geometry.token_bytes as usize))?,
                    scales: Buffer::new(gpu, tokens * geometry.scale_bytes as usize)?,
                    indices: Buffer::new(gpu, choices * 8)?,
                    weights: Buffer::new(gpu, choices * 4)?,
                    count: Buffer::new(gpu, 4)?,
                    rows_x: Buffer::new(gpu, room * geometry.token_bytes as usize)?,
                    rows_scales: Buffer::new(gpu, room * geometry.scale_bytes as usize)?,
                    slots: Buffer::new(gpu, rows * 4)?,
                    counts: Buffer::new(gpu, local * 4)?,
                    offsets: Buffer::new(gpu, local * 4 + 4)?,
                    y: Buffer::new(gpu, rows * shape.values as usize * 2)?,
                    out: Buffer::new(gpu, x)?,
                    onto: None,
                })
            };
            let sets = (0..sets).map(set).collect::<Outcome<_>>()?;
            Ok(Rank { number: rank as usize, gpu: number, exchange, inbox, sets, stream })
        };
        let ranks = ranks.map(rank).collect::<Outcome<Vec<_>>>()?;
        let world = Self { gpus, shape: shape.clone(), geometry, rows, ranks };
        world.settle()?;
        Ok(world)
    }

    fn maker(&self) -> Maker<'_> {
        Maker { shape: &self.shape }
    }

    fn settle(&self) -> Outcome<()> {
        self.ranks.iter().try_for_each(Rank::settle)
    }

    fn put(&mut self, set: usize, tokens: &[Sent], results: &[Vec<u8>], wide: bool) -> Outcome<()> {
        for rank in &mut self.ranks {
            let number = rank.number;
            let (gpu, sent) = (&self.gpus[rank.gpu], &tokens[number]);
            let set = &mut rank.sets[set];
            set.x.put(gpu, &sent.x)?;
            set.scales.put(gpu, &sent.scales)?;
            let indices = if wide {
                bytes_of(&sent.indices.iter().map(|index| i64::from(*index)).collect::<Vec<_>>())
            } else {
                bytes_of(&sent.indices)
            };
            set.indices.put(gpu, &indices)?;
            set.weights.put(gpu, &bytes_of(&sent.weights))?;
            set.count.put(gpu, &sent.count.to_ne_bytes())?;
            set.onto.clone_from(&sent.onto);
            set.y.put(gpu, &results[number])?;
        }
        Ok(())
    }

    /// Enqueues one way of a rank: one launch, or both its halves.
    fn enqueue(&self, rank: usize, set: usize, way: Way, style: Style) -> Outcome<()> {
        for half in style.halves() {
            self.enqueue_half(rank, set, way, *half, style)?;
        }
        Ok(())
    }

    fn enqueue_half(
        &self,
        rank: usize,
        set: usize,
        way: Way,
        half: Half,
        style: Style,
    ) -> Outcome<()> {
        let rank = &self.ranks[rank];
        let set = &rank.sets[set];
        match way {
            Way::Out => {
                let tokens = Tokens {
                    count: Count::At { address: set.count.at(), most: self.shape.max_tokens },
                    x: set.x.at(),
                    scales: set.scales.at(),
                    indices: set.indices.at(),
                    wide_indices: style.wide,
                    weights: set.weights.at(),
                };
                let rows = Rows {
                    x: set.rows_x.at(),
                    scales: set.rows_scales.at(),
                    slots: if style.slots { set.slots.at() } else { 0 },
                    rows: self.rows,
                    counts: set.counts.at(),
                    offsets: set.offsets.at(),
                    clear_padding: style.clear,
                };
                // SAFETY: all memory is the world's, which waits for launches before it goes; GPUs do nothing else.
                unsafe { rank.exchange.dispatch(&rank.stream, half, &tokens, &rows)? };
            }
            Way::Back => {
                let (y, out) = (set.y.at(), set.out.at());
                let (rows, accumulate) = (self.rows, set.onto.is_some());
                let tokens = self.shape.max_tokens;
                let results = Results { y, rows, out, tokens, accumulate };
                // SAFETY: as above.
                unsafe { rank.exchange.combine(&rank.stream, half, &results)? };
            }
        }
        Ok(())
    }

    /// Compares one round, whose launches have ended.
    fn check(
        &mut self,
        set: usize,
        tokens: &[Sent],
        results: &[Vec<u8>],
        style: Style,
    ) -> Outcome<()> {
        self.check_without(None, set, tokens, results, style)
    }

    /// The same, if this rank did not come, and was found missing in the first round.
    fn check_without(
        &mut self,
        missing: Option<usize>,
        set: usize,
        tokens: &[Sent],
        results: &[Vec<u8>],
        style: Style,
    ) -> Outcome<()> {
        let everybody = 0..self.geometry.world as usize;
        let all: Vec<usize> = everybody.clone().filter(|rank| Some(*rank) != missing).collect();
        let mut expected_report = MoeReport::default();
        if let Some(missing) = missing {
            expected_report.late_table[missing] = 1;
        }
        let round = Round { shape: &self.shape, geometry: &self.geometry, tokens, results };
        let layouts: Vec<Option<Layout>> = everybody
            .map(|rank| (Some(rank) != missing).then(|| round.layout(rank, &all)))
            .collect();
        let (x, scales) = (self.geometry.token_bytes as usize, self.geometry.scale_bytes as usize);
        for rank in &mut self.ranks {
            let number = rank.number;
            if Some(number) == missing {
                continue;
            }
            let (gpu, layout) =
                (&self.gpus[rank.gpu], layouts[number].as_ref().ok_or("no layout")?);
            let differs = |what: &str, at: usize| -> Box<dyn Error> {
                format!("{what} {at} of rank {number} differs: {:?}", round.shape).into()
            };
            let own = &mut rank.sets[set];
            let report = rank.exchange.report();
            if report != expected_report {
                return Err(format!("rank {number} reports {report:?}").into());
            }
            let counts = bytes_of(&layout.counts);
            if own.counts.get(gpu)?[..counts.len()] != counts {
                return Err(differs("the count", 0));
            }
            let offsets = bytes_of(&layout.offsets);
            if own.offsets.get(gpu)?[..offsets.len()] != offsets {
                return Err(differs("the offset", 0));
            }
            let (found_x, found_scales) = (own.rows_x.get(gpu)?, own.rows_scales.get(gpu)?);
            let end = layout.offsets[layout.offsets.len() - 1] as usize;
            let all_slots = (self.geometry.world * self.shape.max_tokens) as usize;
            let mut used = vec![false; if style.slots { all_slots } else { self.rows as usize }];
            let mut slots = vec![u32::from_ne_bytes([UNTOUCHED; 4]); self.rows as usize];
            if style.slots && style.clear {
                slots[..end].fill(NO_ROW);
            }
            let places: Vec<_> = layout.rows.iter().collect();
            let mut coming: Vec<(usize, u32)> =
                places.iter().map(|(place, _)| (place.0, place.1)).collect();
            coming.dedup();
            let arrived = in_parallel(coming.len(), |at| round.arrives(coming[at].0, coming[at].1));
            let mut last = 0;
            for (&(source, token, _), &row) in places {
                let mut row = row as usize;
                if style.slots {
                    let slot = slot_of(u32::try_from(source)?, token, self.shape.max_tokens);
                    slots[row] = slot.ok_or("no slot")?;
                    row = slots[row] as usize;
                }
                used[row] = true;
                last += usize::from(coming[last] != (source, token));
                let expected = &arrived[last];
                if found_x[row * x..][..x] != expected.0
                    || found_scales[row * scales..][..scales] != expected.1
                {
                    return Err(differs("row", row));
                }
            }
            if style.slots && own.slots.get(gpu)? != bytes_of(&slots) {
                return Err(differs("the slots", 0));
            }
            for row in (0..used.len()).filter(|row| !used[*row]) {
                let byte = if style.clear && !style.slots && row < end { 0 } else { UNTOUCHED };
                let blank = |bytes: &[u8]| bytes.iter().all(|found| *found == byte);
                if !blank(&found_x[row * x..][..x])
                    || !blank(&found_scales[row * scales..][..scales])
                {
                    return Err(differs("what nobody has in row", row));
                }
            }
            let bytes = self.shape.values as usize * 2;
            let found = own.out.get(gpu)?;
            let count = tokens[number].count as usize;
            let results = in_parallel(count, |token| {
                let token = u32::try_from(token).unwrap_or(u32::MAX);
                round.result(number, token, &layouts)
            });
            let differ = |token: &usize| found[token * bytes..][..bytes] != results[*token];
            if let Some(token) = (0..count).find(differ) {
                return Err(differs("the result of token", token));
            }
            let written = tokens[number].count as usize * bytes;
            let rest = self.shape.max_tokens as usize * bytes;
            if found[written..rest].iter().any(|byte| *byte != UNTOUCHED) {
                return Err(differs("the result of no token", written / bytes));
            }
        }
        Ok(())
    }

    fn blank(&mut self) -> Outcome<()> {
        for rank in &mut self.ranks {
            let gpu = &self.gpus[rank.gpu];
            for set in &mut rank.sets {
                for buffer in [&mut set.rows_x, &mut set.rows_scales, &mut set.slots, &mut set.out]
                {
                    buffer.fill(gpu, UNTOUCHED)?;
                }
                if let Some(onto) = &set.onto {
                    set.out.here.as_mut_slice()[..onto.len()].copy_from_slice(onto);
                    let bytes = set.out.here.bytes();
                    gpu.move_range(set.out.here.address(), set.out.at(), bytes)?;
                }
            }
        }
        Ok(())
    }

    /// Every slot of every inbox holds poison again.
    fn check_poison(&self) -> Outcome<()> {
        for rank in &self.ranks {
            let (number, gpu) = (rank.number, &self.gpus[rank.gpu]);
            let bytes = usize::try_from(self.geometry.inbox_bytes)?;
            let here = gpu.pinned(bytes)?;
            gpu.move_range(rank.inbox.at(), here.address(), bytes)?;
            let slots = &here.as_slice()[usize::try_from(self.geometry.dispatch_at)?..];
            if let Some(at) = slots.iter().position(|byte| *byte != 0xff) {
                return Err(format!(
                    "something is left at {at} of rank {number}: {:?}",
                    self.shape
                )
                .into());
            }
        }
        Ok(())
    }
}

impl Drop for World<'_> {
    fn drop(&mut self) {
        // Launches use what goes now.
        let _ = self.settle();
    }
}

/// `count` values, each made by itself, on all processors.
fn in_parallel<T: Send>(count: usize, make: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let each = count.div_ceil(thread::available_parallelism().map_or(1, NonZero::get)).max(8);
    let mut made: Vec<Option<T>> = (0..count).map(|_| None).collect();
    thread::scope(|scope| {
        for (part, places) in made.chunks_mut(each).enumerate() {
            let make = &make;
            scope.spawn(move || {
                for (at, place) in places.iter_mut().enumerate() {
                    *place = Some(make(part * each + at));
                }
            });
        }
    });
    // Each place had its thread.
    made.into_iter().flatten().collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Out,
    Back,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Style {
    split: bool,
    wide: bool,
    clear: bool,
    /// Whether each token is received once, in a slot.
    slots: bool,
}

impl Style {
    fn halves(self) -> &'static [Half] {
        if self.split { &[Half::Send, Half::Receive] } else { &[Half::Both] }
    }
}

/// Ranks that share a GPU share its SMs.
fn sms(gpus: &[Gpu], world: u32) -> u32 {
    let each = world.div_ceil(u32::try_from(gpus.len()).unwrap_or(1));
    gpus[0].device.gpu().sms / each.max(1)
}

fn firsts(world: u32, experts: u32) -> Vec<u32> {
    (0..=world).map(|rank| rank * experts / world).collect()
}

fn random_shape(random: &mut Random, world: u32, large: bool) -> Shape {
    let mut firsts = vec![0];
    for rank in 0..world {
        let most = 1 + random.below(if large { 32 } else { 6 });
        let local = if random.one_in(6) && rank + 1 < world { 0 } else { most };
        firsts.push(firsts[rank as usize] + local);
    }
    let of = [Number::Bf16, Number::Fp16][usize::from(random.one_in(2))];
    let scales = [Scales::Float, Scales::Power][usize::from(random.one_in(2))];
    let payload = if random.one_in(2) {
        Payload::Fp8 { from: of, scales }
    } else {
        Payload::Raw {
            token_bytes: 16 * (1 + random.below(if large { 1000 } else { 60 })),
            scale_bytes: 4 * random.below(120),
        }
    };
    // Rows of results are multiples of 16 bytes; what is quantised has twice that.
    let step = if matches!(payload, Payload::Raw { .. }) { 8 } else { 16 };
    Shape {
        firsts,
        top_k: 1 + random.below(if large { 32 } else { 8 }),
        max_tokens: 1 + random.below(if large { 300 } else { 40 }),
        payload,
        values: step * (1 + random.below(if large { 500 } else { 60 })),
        results: [Number::Bf16, Number::Fp16][usize::from(random.one_in(2))],
        padding: [1, 4, 16, 128][random.below(4) as usize],
        exact: random.one_in(2),
    }
}

/// Random exchanges of 1 to 16 ranks against the oracle.
pub(crate) fn check(gpus: &[Gpu], few: bool) -> Outcome<Value> {
    let mut counts = serde_json::Map::new();
    for world in [1, 2, 3, 4, 8, 16] {
        let started = Instant::now();
        let cases = match world {
            16 if few => continue,
            16 => 4,
            _ if few => 1,
            _ => 12,
        };
        for case in 0..cases {
            let mut random = Random(case * 100 + u64::from(world));
            let large = case % 3 == 2 && !few && world < 8;
            let mut shape = random_shape(&mut random, world, large);
            // Of few cases, too, some have exact sums; that with many tokens has not, which have kernels of their own.
            shape.exact = (u64::from(world) + case) % 2 == u64::from(few);
            // Of some there are so many tokens that the kernels for many take them.
            let many = if few { world == 2 } else { case % 3 == 1 && world < 8 };
            if many {
                shape.max_tokens = Many::FROM_TOKENS + random.below(500);
            }
            // Of some one rank has so many experts that those for few have no room.
            let lopsided = case == if few { 0 } else { 3 } && world == 3;
            if lopsided {
                let last = shape.firsts.len() - 1;
                shape.firsts[..last].fill(0);
                shape.firsts[last] = 1024;
                (shape.max_tokens, shape.padding) = (416, 1);
            }
            // And of some all have as many experts and choices as there can be.
            let widest = case == 4 && world == 4;
            if widest {
                (shape.firsts, shape.top_k) = (firsts(world, 1024), 32);
            }
            // Large ones take gigabytes each.
            let sets = if large || many || lopsided { 1 } else { ROUNDS_EACH };
            let mut all = World::new(gpus, &shape, sms(gpus, world), None, sets, PATIENCE)?;
            rounds(&mut all, &mut random, if few { 64 } else { Many::FEW_TOKENS })?;
            all.check_poison()?;
        }
        eprintln!(
            "{world} ranks: {cases} exchanges of {ROUNDS_EACH} rounds right, {:.1} s",
            started.elapsed().as_secs_f64()
        );
        counts.insert(world.to_string(), json!(cases));
    }
    let aborted = abort(gpus, if few { 2 } else { 40 })?;
    for room in [None, Some(Many::FROM_TOKENS)] {
        missing(gpus, room)?;
    }
    for room in [None, Some(Many::FROM_TOKENS)] {
        halves(gpus, room)?;
    }
    let overlapped = overlap::run(gpus, few)?;
    Ok(json!({
        "exchanges_by_ranks": counts, "rounds_each": ROUNDS_EACH, "abort_ms": aborted, "missed": true, "halves_end": true,
        "overlapped": overlapped,
    }))
}

/// Rounds of a random exchange.
const ROUNDS_EACH: usize = 3;

/// Random rounds, each compared. As many are enqueued at once as there are sets for: a rank may be ahead of another as far as it need
/// not wait. All processes that have ranks of this world draw alike. Who has few tokens has up to `few_tokens`: threads that are fibers
/// take long for them.
fn rounds(all: &mut World<'_>, random: &mut Random, few_tokens: u32) -> Outcome<()> {
    let sets = all.ranks[0].sets.len();
    for _ in 0..ROUNDS_EACH / sets {
        let mut drawn = Vec::new();
        for set in 0..sets {
            let style = Style {
                split: random.one_in(3),
                wide: random.one_in(2),
                clear: random.one_in(2),
                slots: random.one_in(2),
            };
            let most = most_of_round(random, &all.shape, few_tokens);
            drawn.push(draw(all, random, set, style, [few_tokens, most], true)?);
        }
        all.blank()?;
        for (set, drawn) in drawn.iter().enumerate() {
            for way in [Way::Out, Way::Back] {
                for rank in 0..all.ranks.len() {
                    all.enqueue(rank, set, way, drawn.style)?;
                }
            }
        }
        all.settle()?;
        for (set, drawn) in drawn.iter().enumerate() {
            all.check(set, &drawn.tokens, &drawn.results, drawn.style)?;
        }
    }
    all.check_poison()
}

/// Where the tokens of all ranks go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// As they were drawn.
    Drawn,
    /// All to one expert, by one of their choices, which is not always the first.
    One { expert: i32, choice: u32 },
    /// Nowhere: every choice is dropped.
    Nowhere,
}

impl Route {
    fn draw(random: &mut Random, shape: &Shape) -> Self {
        let experts = shape.firsts.last().copied().unwrap_or(0);
        match random.below(8) {
            0 => Self::Nowhere,
            1 if experts > 0 => Self::One {
                expert: random.below(experts).cast_signed(),
                choice: random.below(shape.top_k),
            },
            _ => Self::Drawn,
        }
    }

    fn lay(self, indices: &mut [i32], top_k: u32) {
        if self != Self::Drawn {
            indices.fill(-1);
        }
        if let Self::One { expert, choice } = self {
            indices
                .iter_mut()
                .skip(choice as usize)
                .step_by(top_k as usize)
                .for_each(|it| *it = expert);
        }
    }
}

/// What one round has.
struct Drawn {
    tokens: Vec<Sent>,
    results: Vec<Vec<u8>>,
    style: Style,
}

/// Draws a round of up to `most` tokens each, and puts it in this set; who has few of them has up to so many. `onto`: some results are added to what is there.
fn draw(
    all: &mut World<'_>,
    random: &mut Random,
    set: usize,
    style: Style,
    [few_tokens, most]: [u32; 2],
    onto: bool,
) -> Outcome<Drawn> {
    let world = all.geometry.world;
    let has_both = all.shape.max_tokens > Many::FEW_TOKENS;
    let route = Route::draw(random, &all.shape);
    let tokens = |_| {
        let mut tokens = loop {
            let tokens = all.maker().random_tokens_up_to(random, most);
            if !has_both || tokens.count <= few_tokens || tokens.count > Many::FEW_TOKENS {
                break tokens;
            }
        };
        route.lay(&mut tokens.indices, all.shape.top_k);
        if onto { all.maker().perhaps_onto(random, tokens) } else { tokens }
    };
    let tokens: Vec<Sent> = (0..world).map(tokens).collect();
    let results: Vec<Vec<u8>> =
        (0..world).map(|_| all.maker().numbers(random, all.rows, all.shape.results)).collect();
    all.put(set, &tokens, &results, style.wide)?;
    Ok(Drawn { tokens, results, style })
}

/// The most tokens of a rank in a round: every other one with room for many is one of few.
fn most_of_round(random: &mut Random, shape: &Shape, few_tokens: u32) -> u32 {
    let is_few = shape.max_tokens > Many::FEW_TOKENS && random.one_in(2);
    if is_few { few_tokens } else { shape.max_tokens }
}

/// A round in which every rank has so many tokens, put in the first set; what is received is cleared.
fn full(
    all: &mut World<'_>,
    random: &mut Random,
    tokens: u32,
) -> Outcome<(Vec<Sent>, Vec<Vec<u8>>)> {
    let ranks = 0..all.geometry.world;
    let sent: Vec<Sent> = ranks.clone().map(|_| all.maker().tokens(random, tokens)).collect();
    let result = |_| all.maker().numbers(random, all.rows, all.shape.results);
    let results: Vec<Vec<u8>> = ranks.map(result).collect();
    all.put(0, &sent, &results, false)?;
    all.blank()?;
    Ok((sent, results))
}

/// A rank that never comes is named by all others, who are right without it, in this round, in the next, and where there is room for many in one of
/// few.
fn missing(gpus: &[Gpu], room: Option<u32>) -> Outcome<()> {
    const WORLD: u32 = 3;
    const MISSING: usize = 1;
    let mut random = Random(3);
    let mut shape = random_shape(&mut random, WORLD, false);
    shape.max_tokens = room.unwrap_or(shape.max_tokens);
    let patience = Duration::from_secs(1);
    let mut all = World::new(gpus, &shape, sms(gpus, WORLD), None, 1, patience)?;
    for most in [shape.max_tokens, shape.max_tokens, shape.max_tokens.min(9)] {
        let (tokens, results) = full(&mut all, &mut random, most)?;
        for way in [Way::Out, Way::Back] {
            for rank in (0..WORLD as usize).filter(|rank| *rank != MISSING) {
                all.enqueue(rank, 0, way, Style::default())?;
            }
        }
        all.settle()?;
        all.check_without(Some(MISSING), 0, &tokens, &results, Style::default())?;
    }
    Ok(())
}

/// What has been sent needs no SM until it is received: a rank's half that sends ends while no other rank has begun, whichever way.
fn halves(gpus: &[Gpu], room: Option<u32>) -> Outcome<()> {
    const WORLD: u32 = 3;
    let mut random = Random(4);
    let mut shape = random_shape(&mut random, WORLD, false);
    shape.max_tokens = room.unwrap_or(shape.max_tokens);
    let mut all = World::new(gpus, &shape, sms(gpus, WORLD), None, 1, PATIENCE)?;
    let style = Style { split: true, ..Style::default() };
    for most in [shape.max_tokens, shape.max_tokens.min(9)] {
        let (tokens, results) = full(&mut all, &mut random, most)?;
        for way in [Way::Out, Way::Back] {
            for rank in 0..all.ranks.len() {
                all.enqueue_half(rank, 0, way, Half::Send, style)?;
                all.settle()?;
            }
            for rank in 0..all.ranks.len() {
                all.enqueue_half(rank, 0, way, Half::Receive, style)?;
            }
            all.settle()?;
        }
        all.check(0, &tokens, &results, style)?;
        all.check_poison()?;
    }
    Ok(())
}

/// Random exchanges of ranks that are each in a process of its own, and lend each other shared memory.
pub(crate) fn processes(count: u32) -> Outcome<Value> {
    const CASES: u32 = 3;
    if count < 2 {
        return Err("2 processes or more".into());
    }
    for case in 0..CASES {
        let ranks = (0..count)
            .map(|rank| Process::start([count, rank, case]))
            .collect::<Outcome<Vec<_>>>()?;
        // Whose file has come has a clear inbox.
        let mut files = Vec::new();
        for rank in &ranks {
            files.extend(rank.there.hear()?);
        }
        for rank in &ranks {
            rank.there.say(&files)?;
        }
        // Nobody goes before all have ended their rounds: inboxes are used until then.
        for rank in &ranks {
            rank.there.hear()?;
        }
        for rank in ranks {
            rank.end()?;
        }
    }
    Ok(json!({ "processes": count, "exchanges": CASES, "rounds_each": ROUNDS_EACH }))
}

/// One rank of them. Its standard input is a socket, of the process that has started it.
pub(crate) fn process(gpus: &[Gpu], world: u32, rank: u32, case: u32) -> Outcome<()> {
    let there = Line(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut random = Random(u64::from(case * 100 + world));
    let shape = random_shape(&mut random, world, false);
    let blocks = sms(gpus, world);
    let mut own = World::apart(gpus, &shape, rank..rank + 1, blocks, None, ROUNDS_EACH, PATIENCE)?;
    let device = &gpus[own.ranks[0].gpu].device;
    let Inbox::Shared(inbox) = &own.ranks[0].inbox else { return Err("an only rank".into()) };
    let (at, bytes) = (inbox.address(), inbox.bytes() as u64);
    let Handover::File(file) = hand_over(device, at)? else { return Err("no file".into()) };
    there.say(&[file])?;
    let files = there.hear()?;
    let mut opened = Vec::new();
    for file in &files {
        opened.push(Opened::new(device, Received::File(file.as_fd()), bytes)?);
    }
    let mut inboxes: Vec<u64> = opened.iter().map(Opened::address).collect();
    *inboxes.get_mut(rank as usize).ok_or("a file is missing")? = at;
    own.connect(&inboxes)?;
    rounds(&mut own, &mut random, Many::FEW_TOKENS)?;
    there.say(&[])?;
    // Until the end: nothing more is said.
    let _ = there.hear();
    // No launch of any rank goes on: all have said so.
    drop(opened);
    Ok(())
}

/// A process that has one rank.
struct Process {
    child: Child,
    there: Line,
}

impl Process {
    fn start(words: [u32; 3]) -> Outcome<Self> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let child = Command::new(std::env::current_exe()?)
            .arg("moe-process")
            .args(words.map(|word| word.to_string()))
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()?;
        Ok(Self { child, there: Line(ours) })
    }

    /// Lets it go, and waits until it has.
    fn end(mut self) -> Outcome<()> {
        rustix::net::shutdown(&self.there.0, rustix::net::Shutdown::Both)?;
        if self.child.wait()?.success() { Ok(()) } else { Err("a rank's process failed".into()) }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Between two processes: messages of files.
struct Line(OwnedFd);

impl Line {
    fn say(&self, files: &[OwnedFd]) -> Outcome<()> {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let mut space = [MaybeUninit::uninit(); FILES_SPACE];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err("too many files".into());
        }
        sendmsg(&self.0, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// The files of the next message; an error if the other process has ended.
    fn hear(&self) -> Outcome<Vec<OwnedFd>> {
        use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
        let mut space = [MaybeUninit::uninit(); FILES_SPACE];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = recvmsg(&self.0, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
        if got.bytes == 0 {
            return Err("the other process has ended".into());
        }
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                files.extend(received);
            }
        }
        Ok(files)
    }
}

/// Room for the files of all ranks.
const FILES_SPACE: usize = rustix::cmsg_space!(ScmRights(32));

/// A launch on all SMs that waits for a rank which never comes ends when it is told to, as does one that is queued behind it, however many
/// streams a process has: some of them share a queue of the hardware, which has 32 at most. Returns the longest time that it took, in
/// milliseconds.
fn abort(gpus: &[Gpu], streams: usize) -> Outcome<f64> {
    let patience = Duration::from_secs(30);
    let shape = Shape { max_tokens: 200, ..random_shape(&mut Random(1), 2, false) };
    let mut random = Random(2);
    let (mut others, mut longest) = (Vec::new(), Duration::ZERO);
    for stream in 0..streams {
        let mut all = World::new(gpus, &shape, 0, None, 1, patience)?;
        let tokens: Vec<Sent> = (0..2).map(|_| all.maker().tokens(&mut random, 200)).collect();
        let results = vec![Vec::new(); 2];
        all.put(0, &tokens, &results, false)?;
        let another = Stream::new(&gpus[0].device)?;
        all.enqueue(0, 0, Way::Out, Style::default())?;
        all.enqueue(0, 0, Way::Out, Style::default())?;
        std::thread::sleep(Duration::from_millis(20));
        if all.ranks[0].stream.is_done()? {
            return Err("a launch did not wait for a rank that never came".into());
        }
        let told = Instant::now();
        all.ranks[0].exchange.abort(&another)?;
        all.settle()?;
        longest = longest.max(told.elapsed());
        if told.elapsed() > patience / 2 {
            return Err(format!(
                "stream {stream}: told to end, it waited on: {:?}",
                told.elapsed()
            )
            .into());
        }
        if all.ranks[0].exchange.report().late_table[1] == 0 {
            return Err("the rank that never came was not named".into());
        }
        others.push(another);
    }
    Ok(longest.as_secs_f64() * 1e3)
}

/// What is replayed.
struct Replayed {
    what: &'static str,
    ranks_each: u32,
    payload: Payload,
    exact: bool,
    style: Style,
    max_tokens: u32,
    rounds: u32,
}

/// Captured rounds of each rank, replayed over and over, each rank as fast as it goes but for pauses that are drawn, in its graphs and between
/// them. Three sets of tokens, routes and results take turns from round to round, so that what is left of another round is wrong; they
/// change between replays. And a fiftieth as many rounds with room for many tokens, some of few; quantised, with exact sums; in slots; by halves; and
/// with two ranks on each GPU.
pub(crate) fn replay(gpus: &[Gpu], rounds: u32) -> Outcome<Value> {
    // Somebody has to be waited for.
    let alone = u32::from(gpus.len() == 1);
    let plain = || Replayed {
        what: "few tokens",
        ranks_each: 1 + alone,
        payload: Payload::Raw { token_bytes: 512, scale_bytes: 16 },
        exact: false,
        style: Style { clear: true, ..Style::default() },
        max_tokens: 24,
        rounds: rounds / 50,
    };
    let quantised = Payload::Fp8 { from: Number::Bf16, scales: Scales::Float };
    let all = [
        Replayed { rounds, ..plain() },
        Replayed { what: "room for many", max_tokens: Many::FROM_TOKENS + 76, ..plain() },
        Replayed { what: "e4m3, exact sums", payload: quantised, exact: true, ..plain() },
        Replayed {
            what: "slots",
            style: Style { slots: true, clear: true, ..Style::default() },
            ..plain()
        },
        Replayed {
            what: "halves",
            style: Style { split: true, clear: true, ..Style::default() },
            ..plain()
        },
        Replayed { what: "two ranks on a GPU", ranks_each: 2, ..plain() },
    ];
    all.iter().map(|replayed| replay_one(gpus, replayed)).collect()
}

fn replay_one(gpus: &[Gpu], replayed: &Replayed) -> Outcome<Value> {
    const EACH: usize = 40;
    // As many as rounds between two pauses: what each has written is there at the next.
    const SETS: usize = 4;
    let Replayed { style, max_tokens, .. } = *replayed;
    let world = u32::try_from(gpus.len())? * replayed.ranks_each;
    let shape = Shape {
        firsts: firsts(world, 16),
        top_k: 4,
        max_tokens,
        payload: replayed.payload,
        values: 256,
        results: Number::Bf16,
        padding: 4,
        exact: replayed.exact,
    };
    let mut all = World::new(gpus, &shape, sms(gpus, world), None, SETS, PATIENCE)?;
    let mut random = Random(5);
    let results: Vec<Vec<Vec<u8>>> = (0..SETS)
        .map(|_| {
            let each = |_| all.maker().numbers(&mut random, all.rows, shape.results);
            (0..world).map(each).collect()
        })
        .collect();
    let pauses = all.ranks.iter().map(|rank| Pauses::new(&gpus[rank.gpu], EACH));
    let mut pauses = pauses.collect::<Outcome<Vec<_>>>()?;
    let digests = all.ranks.iter().map(|rank| Digests::new(&gpus[rank.gpu], rank, EACH / SETS));
    let mut digests = digests.collect::<Outcome<Vec<_>>>()?;
    for (rank, digests) in all.ranks.iter().zip(&mut digests) {
        digests.prove(&gpus[rank.gpu], rank)?;
    }
    let graphs = (0..all.ranks.len())
        .map(|rank| {
            capture(&all, rank, |stream| {
                for round in 0..EACH {
                    // Between most rounds there is none: a dispatch may begin while the combine before it is still there.
                    if round % SETS == 0 {
                        all.ranks[rank].blank(stream)?;
                        pauses[rank].take(stream, round)?;
                    }
                    for way in [Way::Out, Way::Back] {
                        all.enqueue(rank, round % SETS, way, style)?;
                    }
                    if round % SETS == SETS - 1 {
                        digests[rank].take(stream, round / SETS)?;
                    }
                }
                Ok(())
            })
        })
        .collect::<Outcome<Vec<_>>>()?;
    let mut compared = 0;
    let replays = replayed.rounds as usize / EACH;
    let every = (replays / 100).max(4);
    for turn in 0..replays {
        let mut tokens = Vec::new();
        for (set, results) in results.iter().enumerate() {
            let most = most_of_round(&mut random, &shape, Many::FEW_TOKENS);
            let sent: Vec<Sent> =
                (0..world).map(|_| all.maker().random_tokens_up_to(&mut random, most)).collect();
            all.put(set, &sent, results, false)?;
            tokens.push(sent);
        }
        for (rank, pauses) in all.ranks.iter().zip(&mut pauses) {
            pauses.draw(&gpus[rank.gpu], &mut random)?;
        }
        for (rank, digests) in all.ranks.iter().zip(&mut digests) {
            digests.sums.fill(&gpus[rank.gpu], 0)?;
        }
        for (rank, graph) in graphs.iter().enumerate() {
            // One may be far ahead of the other: up to where it has to wait.
            if random.one_in(4) {
                std::thread::sleep(Duration::from_micros(u64::from(random.below(300))));
            }
            launch(&all, graph, rank)?;
        }
        all.settle()?;
        for (rank, digests) in all.ranks.iter().zip(&mut digests) {
            digests.check(&gpus[rank.gpu]).map_err(|why| format!("rank {}: {why}", rank.number))?;
        }
        if turn % every == 0 {
            for set in 0..SETS {
                all.check(set, &tokens[set], &results[set], style)?;
            }
            compared += 1;
        }
    }
    for (number, rank) in all.ranks.iter().enumerate() {
        if rank.exchange.report() != Default::default() {
            return Err(format!("rank {number} reports {:?}", rank.exchange.report()).into());
        }
    }
    all.check_poison()?;
    Ok(json!({
        "what": replayed.what, "ranks": world, "room": max_tokens, "rounds": replays * EACH, "replays": replays, "replays_compared": compared,
        "rounds_digested": replays * EACH,
    }))
}

impl Set {
    /// What a round writes.
    fn written(&self) -> [&Buffer; 6] {
        [&self.rows_x, &self.rows_scales, &self.slots, &self.counts, &self.offsets, &self.out]
    }
}

impl Rank {
    fn settle(&self) -> Outcome<()> {
        let event = Event::new(self.stream.device())?;
        event.record(&self.stream)?;
        Ok(event.wait(LIMIT)?)
    }

    /// What rounds write is as before any, when the stream comes there. To be called with the GPU's context current.
    fn blank(&self, stream: &Stream) -> Outcome<()> {
        for buffer in self.sets.iter().flat_map(Set::written) {
            // SAFETY: memory of this rank's, as long as that; it lives as long as the graphs do.
            call("cuMemsetD8Async", unsafe {
                cu::cuMemsetD8Async(
                    buffer.at(),
                    UNTOUCHED,
                    buffer.here.bytes(),
                    stream.raw().cast(),
                )
            })?;
        }
        Ok(())
    }
}

/// A number for all that a set's round has written, which differs where a byte does, for each set and each time that all sets were
/// written. With the same tokens it is to be the same each time: so no round is left out, of those that the oracle is not asked about either.
struct Digests {
    function: cu::CUfunction,
    /// Where each sum goes, and of what it is.
    tables: Buffer,
    table_bytes: usize,
    sums: Buffer,
    sets: usize,
}

impl Digests {
    fn new(gpu: &Gpu, rank: &Rank, times: usize) -> Outcome<Self> {
        let sets = rank.sets.len();
        let sums = Buffer::new(gpu, times * sets * 8)?;
        let (mut words, mut table_bytes) = (Vec::new(), 0);
        for time in 0..times {
            for (number, set) in rank.sets.iter().enumerate() {
                let ranges = set.written();
                let began = words.len();
                words.push(sums.at() + 8 * (time * sets + number) as u64);
                words.push(ranges.len() as u64);
                words.extend(ranges.iter().flat_map(|it| [it.at(), it.here.bytes() as u64 / 4]));
                table_bytes = 8 * (words.len() - began);
            }
        }
        let mut tables = Buffer::new(gpu, 8 * words.len())?;
        let words: Vec<i64> = words.into_iter().map(u64::cast_signed).collect();
        tables.put(gpu, &bytes_of(&words))?;
        Ok(Self { function: function(gpu, DIGEST, c"digest")?, tables, table_bytes, sums, sets })
    }

    /// An error, unless one byte makes a difference, and only to its set.
    fn prove(&mut self, gpu: &Gpu, rank: &Rank) -> Outcome<()> {
        self.sums.fill(gpu, 0)?;
        within(&gpu.device, || {
            rank.blank(&rank.stream)?;
            self.take(&rank.stream, 0)?;
            let out = &rank.sets[0].out;
            let last = out.at() + out.here.bytes() as u64 - 1;
            // SAFETY: the last byte of memory that lives as long as the rank.
            call("cuMemsetD8Async", unsafe {
                cu::cuMemsetD8Async(last, UNTOUCHED ^ 1, 1, rank.stream.raw().cast())
            })?;
            self.take(&rank.stream, 1)
        })?;
        rank.settle()?;
        let sets = self.sets;
        let sums = self.sums.get(gpu)?;
        let sum = |time: usize, set: usize| &sums[8 * (time * sets + set)..][..8];
        let differ: Vec<bool> = (0..sets).map(|set| sum(0, set) != sum(1, set)).collect();
        if differ.iter().enumerate().any(|(set, differs)| *differs != (set == 0)) {
            return Err(format!("digests do not tell a byte: {differ:?}").into());
        }
        Ok(())
    }

    /// To be called with the GPU's context current.
    fn take(&self, stream: &Stream, time: usize) -> Outcome<()> {
        for set in 0..self.sets {
            let at = self.tables.at() + (self.table_bytes * (time * self.sets + set)) as u64;
            launch_few(self.function, stream, at, 512, false)?;
        }
        Ok(())
    }

    fn check(&mut self, gpu: &Gpu) -> Outcome<()> {
        let sets = self.sets;
        let sums: Vec<u64> = self.sums.get(gpu)?.chunks_exact(8).map(u64_of).collect();
        for (at, sum) in sums.iter().enumerate() {
            if *sum == 0 || *sum != sums[at % sets] {
                return Err(format!(
                    "what round {at} of a graph wrote is not what round {} did",
                    at % sets
                )
                .into());
            }
        }
        Ok(())
    }
}

fn u64_of(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(bytes);
    u64::from_ne_bytes(word)
}

/// Adds what `digest` makes of some memory to a word: each four bytes mixed with their place. The address is of a table: that word's, how many
/// ranges there are, and of each the address and how many times four bytes it has.
const DIGEST: &CStr = c"
.version 7.8
.target sm_80
.address_size 64
.visible .entry digest(.param .u64 place) {
  .reg .u64 %table, %sum, %ranges, %base, %words, %at, %all, %i, %wide, %step;
  .reg .u32 %me, %threads, %v, %k, %salt;
  .reg .pred %over;
  ld.param.u64 %table, [place];
  ld.global.u64 %sum, [%table];
  ld.global.u64 %ranges, [%table+8];
  mov.u32 %me, %tid.x;
  mov.u32 %threads, %ntid.x;
  cvt.u64.u32 %step, %threads;
  mov.u64 %all, 1;
  mov.u32 %salt, 0;
range:
  setp.eq.u64 %over, %ranges, 0;
  @%over bra done;
  add.u64 %table, %table, 16;
  ld.global.u64 %base, [%table];
  ld.global.u64 %words, [%table+8];
  cvt.u64.u32 %i, %me;
word:
  setp.ge.u64 %over, %i, %words;
  @%over bra next;
  shl.b64 %at, %i, 2;
  add.u64 %at, %at, %base;
  ld.global.u32 %v, [%at];
  cvt.u32.u64 %k, %i;
  mul.lo.u32 %k, %k, 2654435761;
  add.u32 %k, %k, %salt;
  xor.b32 %v, %v, %k;
  mul.lo.u32 %v, %v, 2246822507;
  cvt.u64.u32 %wide, %v;
  add.u64 %all, %all, %wide;
  add.u64 %i, %i, %step;
  bra word;
next:
  add.u32 %salt, %salt, 2135587861;
  sub.u64 %ranges, %ranges, 1;
  bra range;
done:
  red.global.add.u64 [%sum], %all;
  ret;
}
";

/// Pauses of a stream, in a graph: a kernel each that lets so much time pass as its place in memory says.
struct Pauses {
    function: cu::CUfunction,
    places: Buffer,
    count: usize,
}

impl Pauses {
    fn new(gpu: &Gpu, count: usize) -> Outcome<Self> {
        Ok(Self {
            function: function(gpu, PAUSE, c"pause")?,
            places: Buffer::new(gpu, count * 8)?,
            count,
        })
    }

    /// Up to 40 us, longer than a round takes, for every other place, and none for the rest. No graph is being replayed.
    fn draw(&mut self, gpu: &Gpu, random: &mut Random) -> Outcome<()> {
        let mut one = |_| if random.one_in(2) { i64::from(random.below(40_000)) } else { 0 };
        let pauses: Vec<i64> = (0..self.count).map(&mut one).collect();
        self.places.put(gpu, &bytes_of(&pauses))
    }

    /// To be called with the GPU's context current.
    fn take(&self, stream: &Stream, place: usize) -> Outcome<()> {
        launch_one(self.function, stream, self.places.at() + 8 * place as u64, false)
    }
}

/// Work of one rank, captured.
fn capture(
    all: &World<'_>,
    rank: usize,
    work: impl FnOnce(&Stream) -> Outcome<()>,
) -> Outcome<Graph> {
    let rank = &all.ranks[rank];
    Graph::new(&all.gpus[rank.gpu].device, &rank.stream, work)
}

fn launch(all: &World<'_>, graph: &Graph, rank: usize) -> Outcome<()> {
    let rank = &all.ranks[rank];
    graph.launch(&all.gpus[rank.gpu].device, &rank.stream)
}

/// A kernel that writes down the GPU's clock,
const CLOCK: &CStr = c"
.version 7.8
.target sm_80
.address_size 64
.visible .entry stamp(.param .u64 place) {
  .reg .u64 %at, %time;
  ld.param.u64 %at, [place];
  mov.u64 %time, %globaltimer;
  st.global.u64 [%at], %time;
  ret;
}
";
/// and one that may begin before what is ahead of it in its stream has ended, for which it waits.
const EARLY_CLOCK: &CStr = c"
.version 7.8
.target sm_90
.address_size 64
.visible .entry stamp(.param .u64 place) {
  .reg .u64 %at, %time;
  ld.param.u64 %at, [place];
  griddepcontrol.wait;
  mov.u64 %time, %globaltimer;
  st.global.u64 [%at], %time;
  ret;
}
";

/// A kernel that lets so many nanoseconds pass.
const PAUSE: &CStr = c"
.version 7.8
.target sm_80
.address_size 64
.visible .entry pause(.param .u64 place) {
  .reg .u64 %at, %long, %began, %time;
  .reg .pred %early;
  ld.param.u64 %at, [place];
  ld.global.u64 %long, [%at];
  mov.u64 %began, %globaltimer;
again:
  mov.u64 %time, %globaltimer;
  sub.u64 %time, %time, %began;
  setp.lt.u64 %early, %time, %long;
  @%early bra again;
  ret;
}
";

/// How the clock is taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clock {
    /// By a kernel like any other.
    Plain,
    /// By one that begins early, as the exchange's do, where the GPU lets it (compute capability 9.0).
    Early,
}

/// A kernel of a text, which stays until the process ends.
fn function(gpu: &Gpu, text: &CStr, name: &CStr) -> Outcome<cu::CUfunction> {
    within(&gpu.device, || {
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: terminated texts; handles are written to where they are given.
        unsafe {
            call("cuModuleLoadData", cu::cuModuleLoadData(&raw mut module, text.as_ptr().cast()))?;
            call(
                "cuModuleGetFunction",
                cu::cuModuleGetFunction(&raw mut function, module, name.as_ptr()),
            )?;
        }
        Ok(function)
    })
}

/// Launches one thread of [`CLOCK`]'s kernel, or of another that takes one address. To be called with the GPU's context current.
fn launch_one(
    function: cu::CUfunction,
    stream: &Stream,
    at: u64,
    begins_early: bool,
) -> Outcome<()> {
    launch_few(function, stream, at, 1, begins_early)
}

/// The same with as many threads, in one block.
fn launch_few(
    function: cu::CUfunction,
    stream: &Stream,
    mut at: u64,
    threads: u32,
    begins_early: bool,
) -> Outcome<()> {
    let mut parameters = [(&raw mut at).cast()];
    let mut early = cu::CUlaunchAttribute {
        id: cu::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: cu::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = cu::CUlaunchConfig {
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: stream.raw().cast(),
        attrs: &raw mut early,
        numAttrs: u32::from(begins_early),
    };
    // SAFETY: the kernel takes one address, of memory of its GPU that lives as long as the graphs do; where it may begin early, it waits.
    call("cuLaunchKernelEx", unsafe {
        let none = ptr::null_mut();
        cu::cuLaunchKernelEx(&raw const config, function, parameters.as_mut_ptr(), none)
    })
}

/// Points in time of one GPU, in its memory: a kernel that stores to the host's ends only when the host has the store. To take one takes
/// half a microsecond or more.
struct Stamps {
    function: cu::CUfunction,
    begins_early: bool,
    places: Buffer,
}

impl Stamps {
    fn new(gpu: &Gpu, count: usize, clock: Clock) -> Outcome<Self> {
        let begins_early = clock == Clock::Early && gpu.device.gpu().capability >= (9, 0);
        let text = if begins_early { EARLY_CLOCK } else { CLOCK };
        let function = function(gpu, text, c"stamp")?;
        Ok(Self { function, begins_early, places: Buffer::new(gpu, count * 8)? })
    }

    /// To be called with the GPU's context current.
    fn take(&self, stream: &Stream, place: usize) -> Outcome<()> {
        launch_one(self.function, stream, self.places.at() + 8 * place as u64, self.begins_early)
    }

    /// All of them, in microseconds. The launches have ended.
    fn read(&mut self, gpu: &Gpu) -> Outcome<Vec<f64>> {
        let words = self.places.get(gpu)?.chunks_exact(8);
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        Ok(words.map(|bytes| (word(bytes) % (1 << 52)) as f64 / 1e3).collect())
    }
}

fn percentile(sorted: &[f64], share: f64) -> f64 {
    let at = ((sorted.len() as f64 - 1.0) * share).round();
    #[allow(clippy::cast_possible_truncation, reason = "the place in a list")]
    let at = at as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

/// Rounds that are measured at a time, after some that bring the ranks together.
const ROUNDS: usize = 40;
/// Clocks taken for each.
const TAKEN: usize = 3;
const SETTLING: usize = 4;
/// Times that these rounds are replayed in one go; the first of them is not counted.
const REPLAYS: usize = 12;

/// Rows that are drawn where results are only to be timed; a prime.
const DRAWN_ROWS: u32 = 1021;

/// What a link carries of stores from all sides at once, in bytes per microsecond.
const WIRE: f64 = 354e3;

/// Microseconds of the slowest rank, of each launch; of each rank, between two clocks with no launch in between; and of whole rounds, each
/// the mean over one replay.
#[derive(Default)]
struct Times {
    out: Vec<f64>,
    back: Vec<f64>,
    clock: Vec<f64>,
    rounds: Vec<f64>,
}

/// An exchange of one shape that can be measured again and again. All its results are compared before, and again at the end.
struct Timed<'a> {
    /// With the clock taken in between, and without; none where there are no graphs.
    graphs: Option<[Vec<Graph>; 2]>,
    stamps: Vec<Stamps>,
    all: World<'a>,
    tokens: Vec<Sent>,
    results: Vec<Vec<u8>>,
    style: Style,
}

impl<'a> Timed<'a> {
    /// `tokens`: how many each rank has, up to what there is room for. `routes`: the experts of all tokens of all ranks; drawn evenly if there
    /// are none. Replayed in graphs if a clock is named. `blocks`: the SMs that each rank takes.
    fn new(
        gpus: &'a [Gpu],
        shape: &Shape,
        style: Style,
        (tokens, blocks): (u32, u32),
        routes: Option<&[i32]>,
        clock: Option<Clock>,
    ) -> Outcome<Self> {
        let world = u32::try_from(shape.firsts.len() - 1)?;
        let choices = tokens as usize * shape.top_k as usize;
        let most = shape.max_tokens as usize * shape.top_k as usize;
        // Routes are even: no rank has twice its part.
        let rows =
            u32::try_from((most * 2 + 4096).min(usize::try_from(Geometry::new(shape)?.max_rows)?))?;
        let mut all = World::new(gpus, shape, blocks, Some(rows), 1, PATIENCE)?;
        let mut random = Random(11);
        let experts = shape.firsts[world as usize];
        let mut sends = Vec::new();
        for rank in 0..world as usize {
            let mut sent = all.maker().tokens(&mut random, tokens);
            match routes {
                Some(routes) => {
                    let own = routes.get(rank * choices..(rank + 1) * choices);
                    sent.indices = own.ok_or("too few routes")?.to_vec();
                }
                None => sent
                    .indices
                    .chunks_exact_mut(shape.top_k as usize)
                    .for_each(|row| row.copy_from_slice(&evenly(&mut random, row.len(), experts))),
            }
            if sent.indices.iter().any(|expert| !(0..experts.cast_signed()).contains(expert)) {
                return Err("a route to no expert".into());
            }
            sends.push(sent);
        }
        // Gigabytes of them: some, again and again.
        let some = all.rows.min(DRAWN_ROWS);
        let bytes = all.rows as usize * shape.values as usize * 2;
        let mut results = || {
            let drawn = all.maker().numbers(&mut random, some, shape.results);
            drawn.into_iter().cycle().take(bytes).collect()
        };
        let results: Vec<Vec<u8>> = (0..world).map(|_| results()).collect();
        all.put(0, &sends, &results, style.wide)?;
        let mut timed =
            Self { graphs: None, stamps: Vec::new(), all, tokens: sends, results, style };
        timed.compare(|timed| {
            for way in [Way::Out, Way::Back] {
                for rank in 0..timed.all.ranks.len() {
                    timed.all.enqueue(rank, 0, way, style)?;
                }
            }
            Ok(())
        })?;
        if let Some(clock) = clock {
            let ranks = &timed.all.ranks;
            let stamps = |rank: &Rank| Stamps::new(&gpus[rank.gpu], TAKEN * ROUNDS + 1, clock);
            let stamps = ranks.iter().map(stamps);
            timed.stamps = stamps.collect::<Outcome<_>>()?;
            timed.graphs = Some([timed.capture(true)?, timed.capture(false)?]);
        }
        Ok(timed)
    }

    /// Of each rank: so many rounds, with the clock taken after each launch and once more, or after all rounds only.
    fn capture(&self, each: bool) -> Outcome<Vec<Graph>> {
        let of = |rank: usize| {
            let (all, stamps, style) = (&self.all, &self.stamps[rank], self.style);
            capture(all, rank, |stream| {
                for round in 0..ROUNDS + SETTLING {
                    let at = round.checked_sub(SETTLING);
                    if at == Some(0) {
                        stamps.take(stream, 0)?;
                    }
                    all.enqueue(rank, 0, Way::Out, style)?;
                    if let Some(at) = at.filter(|_| each) {
                        stamps.take(stream, TAKEN * at + 1)?;
                    }
                    all.enqueue(rank, 0, Way::Back, style)?;
                    if let Some(at) = at.filter(|_| each) {
                        stamps.take(stream, TAKEN * at + 2)?;
                    }
                    if let Some(at) = at.filter(|at| each || at + 1 == ROUNDS) {
                        stamps.take(stream, TAKEN * at + 3)?;
                    }
                }
                Ok(())
            })
        };
        (0..self.all.ranks.len()).map(of).collect()
    }

    /// Clears all that is received, has `rounds` done, and compares what is there then.
    fn compare(&mut self, rounds: impl FnOnce(&Self) -> Outcome<()>) -> Outcome<()> {
        self.all.blank()?;
        rounds(self)?;
        self.all.settle()?;
        self.all.check(0, &self.tokens, &self.results, self.style)?;
        self.all.check_poison()
    }

    fn launch(all: &World<'_>, graphs: &[Graph]) -> Outcome<()> {
        for (rank, graph) in graphs.iter().enumerate() {
            launch(all, graph, rank)?;
        }
        all.settle()
    }

    /// What a round of all of these takes, in microseconds, where each goes through its rounds as fast as it can beside the others: of the slowest
    /// rank, from the first clock to the last.
    fn spans(all: &mut [&mut Self]) -> Outcome<f64> {
        for timed in all.iter() {
            let Some([_, plain]) = &timed.graphs else { return Err("not captured".into()) };
            for (rank, graph) in plain.iter().enumerate() {
                launch(&timed.all, graph, rank)?;
            }
        }
        let mut spans: Vec<(f64, f64)> = Vec::new();
        for timed in all {
            timed.all.settle()?;
            let ranks = timed.all.ranks.iter().zip(&mut timed.stamps).enumerate();
            for (number, (rank, stamps)) in ranks {
                let at = stamps.read(&timed.all.gpus[rank.gpu])?;
                let (from, to) = (at[0], at[TAKEN * ROUNDS]);
                match spans.get_mut(number) {
                    Some(span) => *span = (span.0.min(from), span.1.max(to)),
                    None => spans.push((from, to)),
                }
            }
        }
        Ok(spans.iter().map(|(from, to)| to - from).fold(0f64, f64::max) / ROUNDS as f64)
    }

    /// Measures once more.
    fn turn(&mut self) -> Outcome<Times> {
        let Some([marked, plain]) = &self.graphs else { return self.called() };
        let mut times = Times::default();
        let (all, stamps) = (&self.all, &mut self.stamps);
        let mut read = || -> Outcome<Vec<Vec<f64>>> {
            let of = |(rank, stamps): (&Rank, &mut Stamps)| stamps.read(&all.gpus[rank.gpu]);
            all.ranks.iter().zip(stamps.iter_mut()).map(of).collect()
        };
        let slowest = |ranks: &[Vec<f64>], from: usize, to: usize| {
            ranks.iter().map(|at| at[to] - at[from]).fold(0f64, f64::max)
        };
        for replay in 0..REPLAYS {
            Self::launch(all, marked)?;
            let at = read()?;
            for round in (0..ROUNDS).filter(|_| replay > 0) {
                let start = TAKEN * round;
                times.out.push(slowest(&at, start, start + 1));
                times.back.push(slowest(&at, start + 1, start + 2));
                times.clock.extend(at.iter().map(|at| at[start + 3] - at[start + 2]));
            }
            Self::launch(all, plain)?;
            if replay > 0 {
                times.rounds.push(slowest(&read()?, 0, TAKEN * ROUNDS) / ROUNDS as f64);
            }
        }
        Ok(times)
    }

    /// The same without graphs, by the CPU's clock, until all have ended: what the calls take is in it.
    fn called(&self) -> Outcome<Times> {
        let mut times = Times::default();
        for _ in 0..3 {
            let started = Instant::now();
            let [out, back] = [Way::Out, Way::Back].map(|way| -> Outcome<f64> {
                let started = Instant::now();
                for rank in 0..self.all.ranks.len() {
                    self.all.enqueue(rank, 0, way, self.style)?;
                }
                self.all.settle()?;
                Ok(started.elapsed().as_secs_f64() * 1e6)
            });
            times.out.push(out?);
            times.back.push(back?);
            times.rounds.push(started.elapsed().as_secs_f64() * 1e6);
        }
        Ok(times)
    }

    /// Compares what rounds leave, once more.
    fn end(mut self) -> Outcome<()> {
        self.compare(|timed| match &timed.graphs {
            Some([_, plain]) => Self::launch(&timed.all, plain),
            None => timed.called().map(drop),
        })
    }

    /// What the busiest GPU receives from others, in bytes: out, and back.
    fn wire_bytes(&self) -> [u64; 2] {
        let (shape, geometry) = (&self.all.shape, &self.all.geometry);
        let gpus: Vec<usize> = self.all.ranks.iter().map(|rank| rank.gpu).collect();
        let routes: Vec<&[i32]> = self.tokens.iter().map(|sent| &sent.indices[..]).collect();
        let [out, back] = crossing(shape, &gpus, &routes);
        let token_bytes = u64::from(geometry.token_bytes + geometry.scale_bytes);
        [out * token_bytes, back * u64::from(shape.values) * 2]
    }
}

/// Tokens that the busiest GPU receives from others, each once for each rank: out, and back. `gpus` and `routes`: of each rank.
fn crossing(shape: &Shape, gpus: &[usize], routes: &[&[i32]]) -> [u64; 2] {
    let mut into = vec![[0; 2]; gpus.iter().max().map_or(0, |last| last + 1)];
    for (routes, &from) in routes.iter().zip(gpus) {
        let ranks = gpus.iter().zip(shape.firsts.windows(2));
        for (&to, experts) in ranks.filter(|(to, _)| **to != from) {
            let experts = experts[0].cast_signed()..experts[1].cast_signed();
            let rows = routes.chunks_exact(shape.top_k as usize);
            let hits =
                rows.filter(|row| row.iter().any(|expert| experts.contains(expert))).count() as u64;
            into[to][0] += hits;
            into[from][1] += hits;
        }
    }
    [0, 1].map(|way| into.iter().map(|ways| ways[way]).max().unwrap_or(0))
}

/// Different experts, each as likely as the others.
fn evenly(random: &mut Random, count: usize, experts: u32) -> Vec<i32> {
    let mut chosen: Vec<i32> = Vec::new();
    while chosen.len() < count {
        let expert = random.below(experts).cast_signed();
        if !chosen.contains(&expert) {
            chosen.push(expert);
        }
    }
    chosen
}

/// Rounds of one shape: of each launch the slowest rank's time, with the clock taken in between, and whole rounds without. `blocks`: the SMs of each
/// rank, all that it can have if there is no number.
fn measure(
    gpus: &[Gpu],
    name: &str,
    shape: &Shape,
    style: Style,
    tokens: u32,
    blocks: Option<u32>,
) -> Outcome<Value> {
    let blocks = blocks.unwrap_or(sms(gpus, u32::try_from(shape.firsts.len() - 1)?));
    let mut timed = Timed::new(gpus, shape, style, (tokens, blocks), None, Some(Clock::Early))?;
    let mut times = timed.turn()?;
    let wire = timed.wire_bytes();
    let ranks = timed.all.ranks.len();
    timed.end()?;
    for times in [&mut times.out, &mut times.back, &mut times.clock, &mut times.rounds] {
        times.sort_by(f64::total_cmp);
    }
    let told = |times: &[f64]| json!({ "p50": percentile(times, 0.5), "p99": percentile(times, 0.99), "least": percentile(times, 0.0) });
    let result = json!({
        "what": name, "ranks": ranks, "gpus": gpus.len(), "tokens": tokens, "room": shape.max_tokens, "split": style.split, "sms_at_most": blocks,
        "dispatch_us": told(&times.out), "combine_us": told(&times.back),
        "clock_us": told(&times.clock), "round_us": told(&times.rounds),
        "dispatch_wire_us": wire[0] as f64 / WIRE, "combine_wire_us": wire[1] as f64 / WIRE,
    });
    eprintln!("{result}");
    Ok(result)
}

/// Two exchanges of one shape at a time, as two micro-batches overlap, each with half of the SMs and a stream of its own: how long a round of both
/// takes beside a round of one with all SMs, and with half of them.
fn overlapped(gpus: &[Gpu], shape: &Shape) -> Outcome<Value> {
    let all = sms(gpus, u32::try_from(shape.firsts.len() - 1)?);
    let new = |blocks| {
        let size = (shape.max_tokens, blocks);
        Timed::new(gpus, shape, Style::default(), size, None, Some(Clock::Plain))
    };
    let mut whole = new(all)?;
    let mut halves = [new(all / 2)?, new(all / 2)?];
    let (mut one, mut half, mut both) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..REPLAYS {
        one.push(Timed::spans(&mut [&mut whole])?);
        let [first, second] = &mut halves;
        half.push(Timed::spans(&mut [first])?);
        both.push(Timed::spans(&mut [first, second])?);
    }
    whole.end()?;
    for timed in halves {
        timed.end()?;
    }
    let told = |mut times: Vec<f64>| {
        // The first of them brings the ranks together.
        times.remove(0);
        times.sort_by(f64::total_cmp);
        json!({ "p50": percentile(&times, 0.5), "most": percentile(&times, 1.0), "least": percentile(&times, 0.0) })
    };
    let result = json!({
        "what": "rounds of two exchanges at a time", "ranks": shape.firsts.len() - 1, "gpus": gpus.len(), "tokens": shape.max_tokens,
        "sms": all, "round_of_one_us": told(one), "round_of_one_with_half_us": told(half), "round_of_both_us": told(both),
    });
    eprintln!("{result}");
    Ok(result)
}

/// Measures one shape whenever a line comes on the standard input, so that others can be measured in between, and writes what it
/// took as a line, after one of how many GPUs there are. At the end of the input results are compared once more, and a last line says
/// that they were right. What is asked for is a JSON object: `values`, `experts`, `top_k`, `tokens`, `ranks`; `ready`, whether tokens
/// come in e4m3 with scales rather than as bf16; `once`, whether each token is received once, with a list of rows; `routes`, a file of
/// 32-bit numbers, `[ranks][tokens][top_k]`; and `graphs`.
pub(crate) fn turns(gpus: &[Gpu], asked: &str) -> Outcome<()> {
    let asked: Value = serde_json::from_str(asked)?;
    let number = |name: &str| -> Outcome<u32> {
        let number = asked[name].as_u64().and_then(|number| u32::try_from(number).ok());
        number.ok_or_else(|| format!("no number of {name}").into())
    };
    let says = |name: &str| asked[name].as_bool().ok_or(format!("{name}: true or false"));
    let (ranks, values, experts) = (number("ranks")?, number("values")?, number("experts")?);
    if ranks == 0 || gpus.is_empty() {
        return Err("no rank, or no GPU".into());
    }
    let gpus = &gpus[..gpus.len().min(ranks as usize)];
    let payload = if says("ready")? {
        Payload::Raw { token_bytes: values, scale_bytes: values.div_ceil(128) * 4 }
    } else {
        Payload::Fp8 { from: Number::Bf16, scales: Scales::Float }
    };
    let shape = Shape {
        firsts: firsts(ranks, experts),
        top_k: number("top_k")?,
        max_tokens: number("tokens")?,
        payload,
        values,
        results: Number::Bf16,
        padding: 1,
        exact: false,
    };
    let routes = std::fs::read(asked["routes"].as_str().ok_or("no file of routes")?)?;
    let routes: Vec<i32> = routes
        .chunks_exact(4)
        .map(|bytes| i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();
    // What it is beside takes it so, too.
    let clock = says("graphs")?.then_some(Clock::Plain);
    let size = (shape.max_tokens, sms(gpus, ranks));
    let style = Style { slots: says("once")?, ..Style::default() };
    let mut timed = Timed::new(gpus, &shape, style, size, Some(&routes), clock)?;
    println!("{}", json!({ "gpus": gpus.len() }));
    for line in std::io::stdin().lines() {
        line?;
        let times = timed.turn()?;
        let told =
            json!({ "dispatch_us": times.out, "combine_us": times.back, "round_us": times.rounds });
        println!("{told}");
    }
    timed.end()?;
    println!("{}", json!({ "right": true }));
    Ok(())
}

/// DeepSeek-V3's shape: 7,168 values, the best 8 of 256 experts, e4m3 out and bf16 back; and what of it matters. With 384 experts it is
/// Kimi K2's.
/// With as many tokens as there is room for, and with fewer, as batches that are decoded are. `only`: the shapes with room for so many alone.
pub(crate) fn time(gpus: &[Gpu], only: Option<u32>) -> Outcome<Value> {
    let pairs = u32::try_from(gpus.len())?;
    let of_experts = |experts: u32, world: u32, tokens: u32| Shape {
        firsts: firsts(world, experts),
        top_k: 8,
        max_tokens: tokens,
        payload: Payload::Fp8 { from: Number::Bf16, scales: Scales::Float },
        values: 7168,
        results: Number::Bf16,
        padding: 1,
        exact: false,
    };
    let shape = |world, tokens| of_experts(256, world, tokens);
    let bytes = |tokens, token_bytes, scale_bytes| Shape {
        payload: Payload::Raw { token_bytes, scale_bytes },
        ..shape(pairs, tokens)
    };
    let (plain, split) = (Style::default(), Style { split: true, ..Style::default() });
    let quantised = "e4m3 out, bf16 back";
    let few = [1, 8, 32, 64, 128, 256, 512].map(|tokens| (quantised, shape(pairs, tokens), plain));
    let mut all = few.to_vec();
    all.push((quantised, shape(pairs, 128), split));
    for tokens in [8, 128] {
        all.push(("7,168 bytes and 224 of scales out", bytes(tokens, 7168, 224), plain));
        all.push(("bf16 out", bytes(tokens, 14336, 0), plain));
    }
    for tokens in [1, 128] {
        let exact = Shape { exact: true, ..shape(pairs, tokens) };
        all.push(("e4m3 out, bf16 of each choice back", exact, plain));
    }
    for ranks in [2, 4] {
        all.push(("several ranks on a GPU", shape(pairs * ranks, 128), plain));
    }
    let once = Style { slots: true, ..Style::default() };
    let lists = "e4m3 out, each token once and a list of rows, bf16 back";
    all.push((lists, shape(pairs, 1), once));
    for tokens in [128, 4096] {
        all.push((lists, shape(pairs, tokens), once));
        all.push(("of 384 experts: e4m3 out, bf16 back", of_experts(384, pairs, tokens), plain));
    }
    all.push((quantised, shape(pairs, 4096), plain));
    for tokens in [128, 4096] {
        let once_raw = "7,168 bytes and 224 of scales out, each token once and a list of rows";
        all.push((once_raw, bytes(tokens, 7168, 224), once));
    }
    all.push(("7,168 bytes and 224 of scales out", bytes(4096, 7168, 224), plain));
    let full = all.into_iter().map(|(what, shape, style)| {
        let tokens = shape.max_tokens;
        (what, shape, style, tokens)
    });
    let less = [
        (128, 1),
        (128, 8),
        (128, 32),
        (512, 1),
        (512, 128),
        (4096, 1),
        (4096, 128),
        (4096, 512),
        (4096, 1000),
    ];
    let less = less.map(|(room, tokens)| (quantised, shape(pairs, room), plain, tokens));
    let wanted =
        full.chain(less).filter(|(_, it, ..)| only.is_none_or(|room| room == it.max_tokens));
    let measured =
        wanted.map(|(what, shape, style, tokens)| measure(gpus, what, &shape, style, tokens, None));
    let mut measured = measured.collect::<Outcome<Vec<_>>>()?;
    for (tokens, blocks) in [(128, 64), (128, 32), (128, 16), (4096, 64), (4096, 32), (4096, 16)] {
        if only.is_none_or(|room| room == tokens) {
            let (what, shape) = ("on some of the SMs", shape(pairs, tokens));
            // With many tokens each of a few SMs may have more to count than it has room for.
            let geometry = Geometry::new(&shape)?;
            if Many::is_for(&geometry, &shape) && Many::new(&geometry, &shape, blocks).is_err() {
                measured.push(json!({ "what": what, "tokens": tokens, "sms_at_most": blocks, "no_room": true }));
            } else {
                measured.push(measure(gpus, what, &shape, plain, tokens, Some(blocks))?);
            }
        }
    }
    for tokens in [128, 4096] {
        if only.is_none_or(|room| room == tokens) {
            measured.push(overlapped(gpus, &shape(pairs, tokens))?);
        }
    }
    Ok(Value::Array(measured))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What crosses, of 8 experts, the best two, and one token of each rank.
    fn crosses(gpus: &[usize], routes: &[[i32; 2]]) -> [u64; 2] {
        let shape = Shape {
            firsts: firsts(u32::try_from(gpus.len()).unwrap(), 8),
            top_k: 2,
            max_tokens: 1,
            payload: Payload::Fp8 { from: Number::Bf16, scales: Scales::Float },
            values: 128,
            results: Number::Bf16,
            padding: 1,
            exact: false,
        };
        let routes: Vec<&[i32]> = routes.iter().map(|row| &row[..]).collect();
        crossing(&shape, gpus, &routes)
    }

    #[test]
    fn ranks_that_share_a_gpu_share_its_wire() {
        // Ranks that share nothing.
        assert_eq!(crosses(&[0, 1], &[[0, 4], [0, 4]]), [1, 1]);
        assert_eq!(crosses(&[0, 1], &[[4, 5], [4, 5]]), [1, 1]);
        assert_eq!(crosses(&[0, 1], &[[0, 1], [6, 7]]), [0, 0]);
        // Two on each of two GPUs: each sends to both of the other.
        assert_eq!(crosses(&[0, 1, 0, 1], &[[2, 6], [0, 4], [2, 6], [0, 4]]), [4, 4]);
        // All to one rank.
        assert_eq!(crosses(&[0, 1, 0, 1], &[[0, 1]; 4]), [2, 2]);
        assert_eq!(crosses(&[0, 1, 2, 3], &[[0, 1]; 4]), [3, 1]);
        // One rank to two others.
        assert_eq!(crosses(&[0, 1, 2, 3], &[[2, 4], [2, 3], [4, 5], [6, 7]]), [1, 2]);
        assert_eq!(crosses(&[0; 4], &[[0, 2], [4, 6], [0, 2], [4, 6]]), [0, 0]);
    }
}
