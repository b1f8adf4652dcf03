//! How long copies take, beside the driver's own in the same run.
//!
//! Three figures for each request: `alone_us`, the GPU's time for one launch with nothing before it; `queued_us`, the GPU's
//! time for each of many in a row; and `seen_us`, the wall time from before the submission until the CPU sees the word in
//! host memory. All are medians. Before shuffled pages are timed, one request of each shape by each kernel is compared with the oracle;
//! ranges, other tunings and what streams do are timed as they are: that copies are right is for `check` to say.

use crate::rig::{Gpu, LIMIT, Random, sms, write_table};
use cudarc::driver::sys as cu;
use immwire_cuda::geometry::{DEFAULT_SMS, Kernel, Method, Tuning};
use immwire_cuda::oracle::{self, Side};
use immwire_cuda::{
    Copier, DeviceMemory, Event, PagedCopy, Pages, PinnedMemory, Release, Stream, Submitted,
};
use serde_json::{Value, json};
use std::error::Error;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Bytes of each GPU's pool: many times the second-level cache.
const POOL: usize = 2 << 30;
/// Page tables that take turns, so that pages do not come from the cache.
const TURNS: usize = 8;
/// The most pages of a request.
const MOST: usize = 40_000;

pub(crate) struct Bench<'a> {
    gpus: &'a [Gpu],
    near: DeviceMemory,
    far: DeviceMemory,
    host: PinnedMemory,
    landed: PinnedMemory,
    tables: PinnedMemory,
    words: PinnedMemory,
    start: Event,
    end: Event,
    seen: u64,
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// GB/s, of 10^9 bytes.
fn rate(bytes: u64, microseconds: f64) -> f64 {
    bytes as f64 / microseconds / 1e3
}

impl<'a> Bench<'a> {
    pub(crate) fn new(gpus: &'a [Gpu]) -> Outcome<Self> {
        let (one, other) = (&gpus[0], &gpus[gpus.len() - 1]);
        let mut host = one.pinned(POOL / 2)?;
        Random(3).fill(host.as_mut_slice());
        let near = one.memory(POOL)?;
        for half in [0, POOL / 2] {
            one.move_range(host.address(), near.address() + half as u64, POOL / 2)?;
        }
        Ok(Self {
            gpus,
            near,
            far: other.memory(POOL)?,
            host,
            landed: one.pinned(POOL / 2)?,
            tables: one.pinned(2 * TURNS * MOST * 4)?,
            words: one.pinned(64)?,
            start: Event::new(&one.device)?,
            end: Event::new(&one.device)?,
            seen: 0,
        })
    }

    /// Times something that enqueues one request in the first GPU's stream: alone and queued, in microseconds.
    fn device_time(
        &self,
        rounds: usize,
        mut enqueue: impl FnMut(usize) -> Outcome<()>,
    ) -> Outcome<(f64, f64)> {
        let stream = &self.gpus[0].stream;
        for turn in 0..3 {
            enqueue(turn)?;
        }
        let mut alone = Vec::new();
        for turn in 0..rounds.max(5) {
            self.start.record(stream)?;
            enqueue(turn)?;
            self.end.record(stream)?;
            self.end.wait(LIMIT)?;
            alone.push(us(self.end.since(&self.start)?));
        }
        let mut queued = Vec::new();
        for _ in 0..3 {
            self.start.record(stream)?;
            for turn in 0..rounds {
                enqueue(turn)?;
            }
            self.end.record(stream)?;
            self.end.wait(LIMIT)?;
            queued.push(us(self.end.since(&self.start)?) / rounds as f64);
        }
        Ok((median(alone), median(queued)))
    }

    /// The wall time until the CPU sees the word of a request, and what of it the submission took.
    fn seen(
        &mut self,
        copier: &Copier,
        copy: impl Fn(usize) -> PagedCopy,
        method: Method,
        on: u32,
    ) -> Outcome<Value> {
        let (mut whole, mut submitting) = (Vec::new(), Vec::new());
        for turn in 0..120 {
            let copy = copy(turn);
            self.seen += 1;
            let release = Release::Store { word: self.words.address(), value: self.seen };
            let word = self.words.word(0)?;
            let started = Instant::now();
            // SAFETY: memory of `self`, not looked at before the word; targets of a request are written by it alone.
            unsafe { copier.submit(&copy, release, method, sms(on))? };
            let submitted = started.elapsed();
            while word.load(Ordering::Acquire) != self.seen {
                if started.elapsed() > LIMIT {
                    return Err("the word never came".into());
                }
                std::hint::spin_loop();
            }
            if turn >= 20 {
                whole.push(us(started.elapsed()));
                submitting.push(us(submitted));
            }
        }
        Ok(json!({ "seen_us": median(whole), "submit_us": median(submitting) }))
    }

    fn driver_copy(&self, source: u64, target: u64, bytes: usize) -> Outcome<()> {
        let (one, other) = (&self.gpus[0], &self.gpus[self.gpus.len() - 1]);
        // SAFETY: ranges of memory of `self`; the stream and both contexts are alive.
        let answer = unsafe {
            cu::cuMemcpyPeerAsync(
                target,
                other.device.context().cast(),
                source,
                one.device.context().cast(),
                bytes,
                one.stream.raw().cast(),
            )
        };
        if answer == cu::CUresult::CUDA_SUCCESS {
            Ok(())
        } else {
            Err(format!("cuMemcpyPeerAsync: {answer:?}").into())
        }
    }

    /// Stores to a word in the stream's order: what the driver has to announce a copy with.
    fn driver_store(&self, word: u64) -> Outcome<()> {
        let stream = self.gpus[0].stream.raw().cast();
        // SAFETY: a word of memory that the caller holds; the stream is alive.
        match unsafe { cu::cuStreamWriteValue64_v2(stream, word, 1, 0) } {
            cu::CUresult::CUDA_SUCCESS => Ok(()),
            answer => Err(format!("cuStreamWriteValue64: {answer:?}").into()),
        }
    }

    /// Contiguous ranges by every way, beside `cuMemcpyPeerAsync` alone, and with a word that announces it.
    pub(crate) fn contiguous(&mut self) -> Outcome<Value> {
        let gpus = self.gpus;
        let copier = &gpus[0].plain;
        let announcing = gpus[gpus.len() - 1].memory(8)?;
        let word = announcing.address();
        let mut rows = Vec::new();
        for power in 12..=30 {
            let bytes = 1usize << power;
            let rounds = ((1usize << 33) >> power).clamp(8, 100);
            let turn_at = |turn: usize| (turn % (POOL / bytes).min(TURNS) * bytes) as u64;
            let (near, far) = (self.near.address(), self.far.address());
            let plain = |bench: &Self| {
                bench.device_time(rounds, |turn| {
                    bench.driver_copy(near + turn_at(turn), far + turn_at(turn), bytes)
                })
            };
            let announced = |bench: &Self| {
                bench.device_time(rounds, |turn| {
                    bench.driver_copy(near + turn_at(turn), far + turn_at(turn), bytes)?;
                    bench.driver_store(word)
                })
            };
            let (plain_before, announced_before) = (plain(self)?, announced(self)?);
            let copy = |turn: usize| {
                PagedCopy::contiguous(near + turn_at(turn), far + turn_at(turn), bytes as u64)
            };
            let few = DEFAULT_SMS.get();
            let mut ways =
                vec![("auto", Method::Auto, few), ("copy engine", Method::CopyEngine, few)];
            for on in [few, 32, 132] {
                ways.push(("vector", Method::Kernel(Kernel::Vector), on));
                ways.push(("bulk", Method::Kernel(Kernel::Bulk), on));
            }
            let mut timed = Vec::new();
            for (name, method, on) in ways {
                let time = |release| {
                    self.device_time(rounds, |turn| {
                        // SAFETY: memory of `self` that nobody looks at meanwhile.
                        unsafe { copier.submit(&copy(turn), release, method, sms(on))? };
                        Ok(())
                    })
                };
                let silent = time(Release::Nothing)?;
                let stored = time(Release::Store { word, value: 1 })?;
                let added = time(Release::Add { word, amount: 1 })?;
                let seen = match bytes <= 64 << 20 {
                    true => self.seen(copier, copy, method, on)?,
                    false => Value::Null,
                };
                timed.push(json!({
                    "way": name, "sms": on, "end_to_end": seen,
                    "silent": { "alone_us": silent.0, "queued_us": silent.1 },
                    "stored": { "alone_us": stored.0, "queued_us": stored.1 },
                    "added": { "alone_us": added.0, "queued_us": added.1 },
                }));
            }
            let (plain_after, announced_after) = (plain(self)?, announced(self)?);
            let quicker = |a: (f64, f64), b: (f64, f64)| (a.0.min(b.0), a.1.min(b.1));
            let driver = quicker(plain_before, plain_after);
            let storing = quicker(announced_before, announced_after);
            rows.push(json!({
                "bytes": bytes, "ways": timed,
                "cuMemcpyPeerAsync": { "alone_us": driver.0, "queued_us": driver.1,
                    "queued_GBps": rate(bytes as u64, driver.1) },
                "cuMemcpyPeerAsync and cuStreamWriteValue64":
                    { "alone_us": storing.0, "queued_us": storing.1 },
            }));
        }
        Ok(json!(rows))
    }

    /// Fills the page tables for pages of `page_bytes`, shuffled over the pools; gives the requests, one for each turn.
    fn requests(&mut self, page_bytes: usize, page_count: usize, pull: bool) -> Vec<PagedCopy> {
        let room = POOL / page_bytes;
        let mut random = Random(page_bytes as u64 + page_count as u64);
        let mut requests = Vec::new();
        let (mut from, mut to) = (self.near.address(), self.far.address());
        if pull {
            (from, to) = (to, from);
        }
        for turn in 0..TURNS {
            let mut side = |base, which: usize| {
                let at = (2 * turn + which) * MOST * 4;
                write_table(&mut self.tables, at, &random.distinct(page_count, room));
                Pages {
                    base,
                    stride: page_bytes as u64,
                    table: Some(self.tables.address() + at as u64),
                }
            };
            let (source, target) = (side(from, 0), side(to, 1));
            let page_count = u32::try_from(page_count).unwrap_or(u32::MAX);
            requests.push(PagedCopy { source, target, page_bytes: page_bytes as u64, page_count });
        }
        requests
    }

    /// One request compared with the oracle, over the whole target pool's first half.
    fn compare(
        &mut self,
        copier: &Copier,
        page_bytes: usize,
        page_count: usize,
        method: Method,
        on: u32,
    ) -> Outcome<()> {
        let half = POOL / 2;
        let room = half / page_bytes;
        let page_count = page_count.min(room);
        let mut random = Random(99 + page_bytes as u64);
        let (from, to) = (random.distinct(page_count, room), random.distinct(page_count, room));
        write_table(&mut self.tables, 0, &from);
        write_table(&mut self.tables, MOST * 4, &to);
        let side = |base, at: usize| Pages {
            base,
            stride: page_bytes as u64,
            table: Some(self.tables.address() + (at * MOST * 4) as u64),
        };
        let copy = PagedCopy {
            source: side(self.near.address(), 0),
            target: side(self.far.address(), 1),
            page_bytes: page_bytes as u64,
            page_count: u32::try_from(page_count)?,
        };
        let gpu = &self.gpus[0];
        // What is there before: the source's bytes, one page further, so that no page is right by chance.
        let shift = page_bytes;
        gpu.move_range(self.near.address() + shift as u64, self.far.address(), half)?;
        // SAFETY: memory of `self`; looked at when the stream is done.
        unsafe { copier.submit(&copy, Release::Nothing, method, sms(on))? };
        gpu.settle()?;
        gpu.move_range(self.far.address(), self.landed.address(), half)?;
        let source = self.host.as_slice();
        let mut expected = Vec::with_capacity(half);
        expected.extend_from_slice(&source[shift..]);
        expected.extend_from_slice(&source[..shift]);
        let from = Side { base: 0, stride: page_bytes, table: Some(&from) };
        let to = Side { base: 0, stride: page_bytes, table: Some(&to) };
        oracle::copy(source, from, &mut expected, to, page_bytes, page_count)
            .map_err(|e| format!("{e:?}"))?;
        if expected != self.landed.as_slice() {
            return Err(format!(
                "{page_count} pages of {page_bytes} by {method:?} on {on} SMs differ"
            )
            .into());
        }
        Ok(())
    }

    fn time_pages(
        &mut self,
        copier: &Copier,
        requests: &[PagedCopy],
        method: Method,
        on: u32,
        ends: bool,
    ) -> Outcome<Value> {
        let bytes = requests[0].page_bytes * u64::from(requests[0].page_count);
        let rounds = usize::try_from((2u64 << 30) / bytes)?.clamp(6, 60);
        let word = self.words.address() + 8;
        let mut launched = None;
        let (alone, queued) = self.device_time(rounds, |turn| {
            let release = Release::Store { word, value: 1 };
            // SAFETY: memory of `self` that nobody looks at meanwhile.
            launched =
                Some(unsafe { copier.submit(&requests[turn % TURNS], release, method, sms(on))? });
            Ok(())
        })?;
        let seen = if ends {
            self.seen(copier, |turn| requests[turn % TURNS], method, on)?
        } else {
            Value::Null
        };
        let (way, blocks) = match launched {
            Some(Submitted::Launch(launch)) => (format!("{:?}", launch.kernel), launch.blocks),
            other => (format!("{other:?}"), 0),
        };
        Ok(
            json!({ "kernel": way, "sms": blocks, "alone_us": alone, "queued_us": queued, "end_to_end": seen,
            "alone_GBps": rate(bytes, alone), "queued_GBps": rate(bytes, queued) }),
        )
    }

    /// Shuffled pages to the other GPU, by kernel and number of SMs.
    pub(crate) fn pages(&mut self) -> Outcome<Value> {
        const SHAPES: [(usize, usize); 9] = [
            (1024, 4096),
            (16_384, 4096),
            (40_000, 4096),
            (1024, 16_384),
            (16_384, 16_384),
            (40_000, 16_384),
            (1024, 65_536),
            (8192, 65_536),
            (16_384, 65_536),
        ];
        let gpus = self.gpus;
        let copier = &gpus[0].plain;
        let mut rows = Vec::new();
        for (page_count, page_bytes) in SHAPES {
            for kernel in [Kernel::Bulk, Kernel::Vector] {
                self.compare(copier, page_bytes, page_count, Method::Kernel(kernel), 16)?;
            }
            let requests = self.requests(page_bytes, page_count, false);
            let mut ways = Vec::new();
            for kernel in [Kernel::Bulk, Kernel::Vector] {
                for on in [1, 2, 4, 6, 7, 8, 9, 10, 12, 16, 24, 32, 64, 132] {
                    ways.push(self.time_pages(
                        copier,
                        &requests,
                        Method::Kernel(kernel),
                        on,
                        [8, 32, 132].contains(&on),
                    )?);
                }
            }
            rows.push(json!({ "pages": page_count, "page_bytes": page_bytes, "ways": ways }));
        }
        Ok(json!(rows))
    }

    /// Pages on as many SMs as it takes to fill the link, all dealt to warps, and half of them taken in turns.
    pub(crate) fn turns(&mut self) -> Outcome<Value> {
        let gpus = self.gpus;
        let mut rows = Vec::new();
        for (page_count, page_bytes) in
            [(4096, 4096), (16_384, 4096), (16_384, 16_384), (8192, 65_536)]
        {
            let requests = self.requests(page_bytes, page_count, false);
            for turn_pieces in [0, Tuning::default().turn_pieces] {
                let tuning = Tuning { turn_pieces, ..Tuning::default() };
                let copier = Copier::new(&gpus[0].stream, tuning)?;
                for kernel in [Kernel::Bulk, Kernel::Vector] {
                    for on in [7, 8, 9, 10, 12, 16, 24, 32, 132] {
                        let method = Method::Kernel(kernel);
                        let mut row = self.time_pages(&copier, &requests, method, on, false)?;
                        for (key, value) in [
                            ("pages", page_count),
                            ("page_bytes", page_bytes),
                            ("turn_pieces", turn_pieces as usize),
                        ] {
                            row[key] = json!(value);
                        }
                        rows.push(row);
                    }
                }
            }
        }
        Ok(json!(rows))
    }

    /// The bulk kernel's pieces and rings, on few SMs.
    pub(crate) fn rings(&mut self) -> Outcome<Value> {
        let gpus = self.gpus;
        let mut rows = Vec::new();
        for (page_count, page_bytes) in
            [(1024, 4096), (16_384, 4096), (16_384, 16_384), (8192, 65_536)]
        {
            let requests = self.requests(page_bytes, page_count, false);
            for (piece, stages) in [
                (1024, 16),
                (2048, 8),
                (2048, 13),
                (4096, 3),
                (4096, 4),
                (4096, 6),
                (4096, 7),
                (8192, 3),
            ] {
                let tuning =
                    Tuning { bulk_piece_bytes: piece, bulk_stages: stages, ..Tuning::default() };
                let copier = Copier::new(&gpus[0].stream, tuning)?;
                for on in [4, 8, 16] {
                    let mut row = self.time_pages(
                        &copier,
                        &requests,
                        Method::Kernel(Kernel::Bulk),
                        on,
                        false,
                    )?;
                    for (key, value) in [
                        ("pages", page_count),
                        ("page_bytes", page_bytes),
                        ("piece", piece as usize),
                        ("stages", stages as usize),
                    ] {
                        row[key] = json!(value);
                    }
                    rows.push(row);
                }
            }
        }
        Ok(json!(rows))
    }

    /// The same pages fetched instead of sent; both directions at once; and small, odd, unaligned ones.
    pub(crate) fn others(&mut self) -> Outcome<Value> {
        let gpus = self.gpus;
        let copier = &gpus[0].plain;
        let mut pulls = Vec::new();
        let requests = self.requests(4096, 16_384, true);
        for (kernel, on) in
            [(Kernel::Bulk, 8), (Kernel::Bulk, 16), (Kernel::Vector, 16), (Kernel::Vector, 132)]
        {
            pulls.push(self.time_pages(copier, &requests, Method::Kernel(kernel), on, false)?);
        }
        let mut odd = Vec::new();
        let all = [Kernel::Bulk, Kernel::Vector, Kernel::Any];
        for page_bytes in [64, 128, 256, 512, 704, 1024, 1152, 1408, 2048, 4097, 4100, 4112] {
            let requests = self.requests(page_bytes, 40_000, false);
            for kernel in all.iter().skip(if page_bytes.is_multiple_of(16) { 0 } else { 2 }) {
                for on in [8, 132] {
                    let method = Method::Kernel(*kernel);
                    let mut row = self.time_pages(copier, &requests, method, on, on == 8)?;
                    row["page_bytes"] = json!(page_bytes);
                    odd.push(row);
                }
            }
        }
        let mut unlike = self.requests(4096, 16_384, false);
        for (shift, first) in [(64, 0), (32, 0), (16, 0), (4, 2), (1, 2)] {
            for request in &mut unlike {
                request.target.base = self.far.address() + shift;
                request.page_bytes = 4032;
            }
            for kernel in all.iter().skip(first) {
                let method = Method::Kernel(*kernel);
                let mut row = self.time_pages(copier, &unlike, method, 8, false)?;
                row["page_bytes"] = json!(4032);
                row["target_apart"] = json!(shift);
                odd.push(row);
            }
        }
        Ok(json!({
            "pulled_16384_x_4096": pulls,
            "odd": odd,
            "both_ways": self.both_ways()?,
            "host": self.host_pages()?,
        }))
    }

    /// Both GPUs send 16,384 pages of 16 KiB to each other.
    fn both_ways(&mut self) -> Outcome<Value> {
        if self.gpus.len() < 2 {
            return Ok(Value::Null);
        }
        let there = self.requests(16_384, 16_384, false);
        let back: Vec<_> = there
            .iter()
            .map(|r| PagedCopy {
                // From one half of a pool to the other half of the other: nothing is read that is being written.
                source: Pages { base: self.far.address(), stride: 8192, ..r.source },
                target: Pages {
                    base: self.near.address() + POOL as u64 / 2,
                    stride: 8192,
                    ..r.target
                },
                page_bytes: 8192,
                ..*r
            })
            .collect();
        let there: Vec<_> = there
            .iter()
            .map(|r| PagedCopy {
                source: Pages { stride: 8192, ..r.source },
                target: Pages {
                    base: self.far.address() + POOL as u64 / 2,
                    stride: 8192,
                    ..r.target
                },
                page_bytes: 8192,
                ..*r
            })
            .collect();
        let mut rows = Vec::new();
        for (kernel, on) in [(Kernel::Bulk, 8), (Kernel::Bulk, 16), (Kernel::Vector, 132)] {
            let started = Instant::now();
            let rounds = 40;
            for turn in 0..rounds {
                // SAFETY: memory of `self` that nobody looks at meanwhile; the halves keep sources and targets apart.
                unsafe {
                    self.gpus[0].plain.submit(
                        &there[turn % TURNS],
                        Release::Nothing,
                        Method::Kernel(kernel),
                        sms(on),
                    )?;
                    self.gpus[1].plain.submit(
                        &back[turn % TURNS],
                        Release::Nothing,
                        Method::Kernel(kernel),
                        sms(on),
                    )?;
                }
            }
            self.gpus[0].settle()?;
            self.gpus[1].settle()?;
            let bytes = (rounds * 16_384 * 8192) as u64;
            rows.push(json!({ "kernel": format!("{kernel:?}"), "sms": on, "GBps_each_way": rate(bytes, us(started.elapsed())) }));
        }
        Ok(json!(rows))
    }

    /// Pages between a GPU and pinned host memory.
    fn host_pages(&mut self) -> Outcome<Value> {
        let copier = &self.gpus[0].plain;
        let mut rows = Vec::new();
        let (page_bytes, page_count) = (16_384usize, 8192u32);
        let room = POOL / 2 / page_bytes;
        let mut random = Random(5);
        for at in 0..2 {
            write_table(
                &mut self.tables,
                at * MOST * 4,
                &random.distinct(page_count as usize, room),
            );
        }
        let side = |base, at: usize| Pages {
            base,
            stride: page_bytes as u64,
            table: Some(self.tables.address() + (at * MOST * 4) as u64),
        };
        for (name, from, to) in [
            ("to host", self.near.address(), self.landed.address()),
            ("from host", self.host.address(), self.near.address()),
        ] {
            let copy = PagedCopy {
                source: side(from, 0),
                target: side(to, 1),
                page_bytes: page_bytes as u64,
                page_count,
            };
            let bytes = page_bytes as u64 * u64::from(page_count);
            for (kernel, on) in [(Kernel::Bulk, 4), (Kernel::Bulk, 16), (Kernel::Vector, 16)] {
                let (alone, _) = self.device_time(5, |_| {
                    // SAFETY: memory of `self` that nobody looks at meanwhile.
                    unsafe {
                        copier.submit(&copy, Release::Nothing, Method::Kernel(kernel), sms(on))?
                    };
                    Ok(())
                })?;
                rows.push(json!({ "way": name, "kernel": format!("{kernel:?}"), "sms": on, "GBps": rate(bytes, alone) }));
            }
            let whole = PagedCopy::contiguous(from, to, bytes);
            let (alone, _) = self.device_time(5, |_| {
                // SAFETY: as above.
                unsafe { copier.submit(&whole, Release::Nothing, Method::CopyEngine, sms(1))? };
                Ok(())
            })?;
            rows.push(json!({ "way": name, "kernel": "copy engine, one range", "GBps": rate(bytes, alone) }));
        }
        Ok(json!(rows))
    }

    /// Requests of 1,024 pages in turns over several streams, which hide each other's beginnings and ends; and what the
    /// CPU does for a request of 40,000.
    pub(crate) fn streams(&mut self) -> Outcome<Value> {
        let device = &self.gpus[0].device;
        let mut rows = Vec::new();
        for page_bytes in [4096, 16_384, 65_536] {
            let requests = self.requests(page_bytes, 1024, false);
            for (streams, each) in [(1, 8), (2, 4), (2, 8), (4, 2), (4, 4), (8, 1), (8, 2)] {
                let copiers = (0..streams)
                    .map(|_| Copier::new(&Stream::new(device)?, Tuning::default()))
                    .collect::<Result<Vec<_>, _>>()?;
                let words = self.gpus[0].pinned(streams * 64)?;
                let bytes = (page_bytes * 1024) as u64;
                let rounds = usize::try_from((4u64 << 30) / bytes)?.min(400);
                let mut rates = Vec::new();
                for _ in 0..4 {
                    let started = Instant::now();
                    for turn in 0..rounds {
                        let word = words.address() + (turn % streams * 64) as u64;
                        let release = Release::Store { word, value: turn as u64 };
                        let copier = &copiers[turn % streams];
                        let request = &requests[turn % TURNS];
                        // SAFETY: memory of `self` that nobody looks at meanwhile. Where two requests overlap in their
                        // targets, nobody asks which of them is seen.
                        unsafe { copier.submit(request, release, Method::Auto, sms(each))? };
                    }
                    for copier in &copiers {
                        self.end.record(copier.stream())?;
                        self.end.wait(LIMIT)?;
                    }
                    rates.push(rate(bytes * rounds as u64, us(started.elapsed())));
                }
                rows.push(json!({ "pages": 1024, "page_bytes": page_bytes, "streams": streams,
                    "sms_of_each": each, "GBps": median(rates) }));
            }
        }
        let table: Vec<u32> = Random(4).distinct(MOST, MOST);
        let mut times = Vec::new();
        for turn in 0..50 {
            let started = Instant::now();
            write_table(&mut self.tables, turn % TURNS * 2 * MOST * 4, &table);
            write_table(&mut self.tables, (turn % TURNS * 2 + 1) * MOST * 4, &table);
            times.push(us(started.elapsed()));
        }
        Ok(json!({ "in_turns": rows, "two_tables_of_40000_us": median(times) }))
    }

    /// From one GPU's submission to the other GPU's stream going on, and its word seen by the CPU.
    pub(crate) fn hand_over(&mut self) -> Outcome<Value> {
        let there = self.gpus.len() - 1;
        let word = self.gpus[there].memory(8)?;
        let mut rows = Vec::new();
        for bytes in [16u64, 4096, 65_536] {
            let mut times = Vec::new();
            for turn in 0..220u64 {
                self.seen += 1;
                let copy = PagedCopy::contiguous(self.near.address(), self.far.address(), bytes);
                let nothing = PagedCopy { page_count: 0, ..copy };
                let reader = &self.gpus[there].plain;
                let seen = Release::Store { word: self.words.address(), value: self.seen };
                // SAFETY: memory of `self`; the word lives until the reader has said that it went on.
                unsafe {
                    if there != 0 {
                        reader.stream().after_word(word.address(), self.seen)?;
                        reader.submit(&nothing, seen, Method::Auto, sms(1))?;
                    }
                }
                let started = Instant::now();
                // SAFETY: as above.
                unsafe {
                    let release = Release::Store { word: word.address(), value: self.seen };
                    self.gpus[0].plain.submit(&copy, release, Method::Auto, sms(16))?;
                    if there == 0 {
                        reader.submit(&nothing, seen, Method::Auto, sms(1))?;
                    }
                }
                while self.words.word(0)?.load(Ordering::Acquire) != self.seen {
                    if started.elapsed() > LIMIT {
                        return Err("the word never came".into());
                    }
                    std::hint::spin_loop();
                }
                if turn >= 20 {
                    times.push(us(started.elapsed()));
                }
            }
            rows.push(json!({ "bytes": bytes, "us": median(times) }));
        }
        Ok(json!(rows))
    }
}
