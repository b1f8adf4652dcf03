//! Every kind of request against the oracle, bit by bit.
//!
//! The target is filled with other random bytes first, with room around the pages, and compared as a whole: a byte too
//! few, too many or in the wrong place is seen. Each request announces itself, and the word is looked at as well.

use crate::rig::{Gpu, LIMIT, Random, sms, write_table};
use cudarc::driver::sys as cu;
use immwire_cuda::args;
use immwire_cuda::geometry::{self, Kernel, Method, Tuning};
use immwire_cuda::oracle::{self, Side};
use immwire_cuda::{Copier, DeviceMemory, Event, PagedCopy, Pages, PinnedMemory, Release, Stream};
use serde_json::{Value, json};
use std::error::Error;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Bytes of each side's memory.
const SPAN: usize = 16 << 20;
/// Where the second table starts.
const SECOND: usize = 1 << 18;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Gpu(usize),
    Host,
}

#[derive(Debug, Clone)]
struct Case {
    by: usize,
    tuning: usize,
    from: Place,
    to: Place,
    page_bytes: usize,
    page_count: usize,
    source: (usize, usize),
    target: (usize, usize),
    source_table: Option<Vec<u32>>,
    target_table: Option<Vec<u32>>,
    tables_on_gpu: bool,
    method: Method,
    sms: u32,
    add: bool,
}

/// Pieces and rings of different sizes, so that their ends fall everywhere.
fn tunings() -> Vec<Tuning> {
    let small = |piece, stages, vector| Tuning {
        bulk_from_bytes: 0,
        bulk_page_from_bytes: 0,
        bulk_piece_bytes: piece,
        bulk_stages: stages,
        vector_piece_bytes: vector,
        ..Tuning::default()
    };
    vec![
        Tuning::default(),
        small(128, 3, 16),
        small(1024, 16, 512),
        small(8192, 3, 16384),
        small(4096, 7, 48),
    ]
}

struct Bench<'a> {
    gpus: &'a [Gpu],
    copiers: Vec<Vec<Copier>>,
    random: PinnedMemory,
    other: PinnedMemory,
    landed: PinnedMemory,
    tables: PinnedMemory,
    words: PinnedMemory,
    host_target: PinnedMemory,
    sources: Vec<DeviceMemory>,
    targets: Vec<DeviceMemory>,
    gpu_tables: Vec<DeviceMemory>,
    gpu_words: Vec<DeviceMemory>,
    expected: Vec<u8>,
    done: u64,
}

impl<'a> Bench<'a> {
    fn new(gpus: &'a [Gpu]) -> Result<Self, Box<dyn Error>> {
        let first = &gpus[0];
        let mut random = first.pinned(SPAN)?;
        let mut other = first.pinned(SPAN)?;
        Random(1).fill(random.as_mut_slice());
        Random(2).fill(other.as_mut_slice());
        let each = |bytes| gpus.iter().map(|g| g.memory(bytes)).collect::<Result<Vec<_>, _>>();
        let sources = each(SPAN)?;
        for (gpu, source) in gpus.iter().zip(&sources) {
            gpu.move_range(random.address(), source.address(), SPAN)?;
        }
        let copiers = |gpu: &Gpu| {
            tunings()
                .into_iter()
                .map(|t| Copier::new(&gpu.stream, t))
                .collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            gpus,
            copiers: gpus.iter().map(copiers).collect::<Result<_, _>>()?,
            random,
            other,
            landed: first.pinned(SPAN)?,
            tables: first.pinned(2 * SECOND)?,
            words: first.pinned(64)?,
            host_target: first.pinned(SPAN)?,
            sources,
            targets: each(SPAN)?,
            gpu_tables: each(2 * SECOND)?,
            gpu_words: each(64)?,
            expected: vec![0; SPAN],
            done: 0,
        })
    }

    fn run(&mut self, case: &Case) -> Result<(), Box<dyn Error>> {
        let gpu = &self.gpus[case.by];
        self.done += 1;
        let last = |table: &Option<Vec<u32>>| match table {
            Some(table) => table.iter().max().copied().unwrap_or(0) as usize,
            None => case.page_count.saturating_sub(1),
        };
        let extent =
            case.target.0 + case.target.1 * last(&case.target_table) + case.page_bytes + 100;
        let extent = extent.min(SPAN);
        let target = match case.to {
            Place::Gpu(i) => {
                gpu.move_range(self.other.address(), self.targets[i].address(), extent)?;
                self.targets[i].address()
            }
            Place::Host => {
                self.host_target.as_mut_slice()[..extent]
                    .copy_from_slice(&self.other.as_slice()[..extent]);
                self.host_target.address()
            }
        };
        let source = match case.from {
            Place::Gpu(i) => self.sources[i].address(),
            Place::Host => self.random.address(),
        };

        for (at, table) in [(0, &case.source_table), (SECOND, &case.target_table)] {
            write_table(&mut self.tables, at, table.as_deref().unwrap_or(&[]));
        }
        let mut tables = self.tables.address();
        if case.tables_on_gpu {
            gpu.move_range(tables, self.gpu_tables[case.by].address(), 2 * SECOND)?;
            tables = self.gpu_tables[case.by].address();
        }
        let side = |base, place: (usize, usize), table: &Option<Vec<u32>>, at: usize| Pages {
            base: base + place.0 as u64,
            stride: place.1 as u64,
            table: table.as_ref().map(|_| tables + at as u64),
        };
        let copy = PagedCopy {
            source: side(source, case.source, &case.source_table, 0),
            target: side(target, case.target, &case.target_table, SECOND),
            page_bytes: case.page_bytes as u64,
            page_count: u32::try_from(case.page_count)?,
        };
        // Added where the target is, if that is a GPU; else stored in host memory.
        let to_gpu = match case.to {
            Place::Gpu(i) if case.add => Some(i),
            _ => None,
        };
        let host_word = self.words.address();
        let release = match to_gpu {
            Some(i) => Release::Add { word: self.gpu_words[i].address(), amount: 3 },
            None => Release::Store { word: host_word, value: self.done },
        };
        let before = match to_gpu {
            Some(i) => self.gpu_word(gpu, i)?,
            None => 0,
        };
        // SAFETY: all of it is memory of `self`, pages of a case do not overlap, and we wait before we look.
        unsafe {
            self.copiers[case.by][case.tuning].submit(&copy, release, case.method, sms(case.sms))?
        };
        gpu.settle()?;
        match to_gpu {
            Some(i) => {
                let after = self.gpu_word(gpu, i)?;
                if after != before + 3 {
                    return Err(
                        format!("the word went from {before} to {after}, not up by 3").into()
                    );
                }
            }
            None => {
                let word = self.words.word(0)?.load(Ordering::Acquire);
                if word != self.done {
                    return Err(format!("the word is {word}, not {}", self.done).into());
                }
            }
        }

        let landed = match case.to {
            Place::Gpu(i) => {
                gpu.move_range(self.targets[i].address(), self.landed.address(), extent)?;
                &self.landed
            }
            Place::Host => &self.host_target,
        };
        let expected = &mut self.expected[..extent];
        expected.copy_from_slice(&self.other.as_slice()[..extent]);
        let from = Side {
            base: case.source.0,
            stride: case.source.1,
            table: case.source_table.as_deref(),
        };
        let to = Side {
            base: case.target.0,
            stride: case.target.1,
            table: case.target_table.as_deref(),
        };
        oracle::copy(self.random.as_slice(), from, expected, to, case.page_bytes, case.page_count)
            .map_err(|e| format!("the case itself is wrong: {e:?}"))?;
        let landed = &landed.as_slice()[..extent];
        if expected == landed {
            return Ok(());
        }
        let at = expected.iter().zip(landed).position(|(a, b)| a != b).unwrap_or(extent);
        Err(format!("byte {at} of {extent} differs").into())
    }

    fn gpu_word(&self, gpu: &Gpu, of: usize) -> Result<u64, Box<dyn Error>> {
        gpu.move_range(self.gpu_words[of].address(), self.words.address() + 8, 8)?;
        Ok(self.words.word(8)?.load(Ordering::Acquire))
    }
}

fn single(gpus: usize) -> Case {
    Case {
        by: 0,
        tuning: 0,
        from: Place::Gpu(0),
        to: Place::Gpu(gpus - 1),
        page_bytes: 0,
        page_count: 1,
        source: (0, 0),
        target: (0, 0),
        source_table: None,
        target_table: None,
        tables_on_gpu: false,
        method: Method::Auto,
        sms: 16,
        add: false,
    }
}

/// One range of every small size, and at every pair of offsets within 16 bytes.
fn ranges(gpus: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let sizes = (0..=70).chain([
        127, 128, 129, 511, 512, 1023, 1040, 4095, 4096, 4097, 12_345, 65_536, 65_537, 1_000_003,
    ]);
    for page_bytes in sizes {
        for sms in [1, 16] {
            cases.push(Case { page_bytes, sms, add: sms == 1, ..single(gpus) });
        }
    }
    for source in 0..16 {
        for target in 0..16 {
            for page_bytes in [1, 16, 31, 100, 4096, 9000] {
                cases.push(Case {
                    page_bytes,
                    source: (1024 + source, 0),
                    target: (512 + target, 0),
                    ..single(gpus)
                });
            }
        }
    }
    let ways = [
        Method::CopyEngine,
        Method::Kernel(Kernel::Bulk),
        Method::Kernel(Kernel::Vector),
        Method::Kernel(Kernel::Any),
    ];
    for method in ways {
        for page_bytes in [16, 48, 4096, 4112, 65_536, 1 << 20, 8 << 20] {
            for sms in [1, 2, 7, 132] {
                cases.push(Case {
                    page_bytes,
                    sms,
                    method,
                    source: (32, 0),
                    target: (48, 0),
                    ..single(gpus)
                });
            }
        }
    }
    cases
}

/// Pages of all sizes, counts, tables, offsets, gaps, budgets and places, drawn at random.
fn pages(gpus: usize, count: usize, random: &mut Random) -> Vec<Case> {
    const BYTES: [usize; 32] = [
        1, 2, 3, 4, 8, 12, 15, 16, 17, 32, 48, 100, 128, 255, 256, 704, 1024, 1152, 1408, 4080,
        4095, 4096, 4097, 4112, 8192, 16_384, 16_385, 16_400, 36_864, 65_536, 65_537, 131_088,
    ];
    const COUNTS: [usize; 16] =
        [1, 2, 3, 7, 31, 32, 33, 64, 65, 100, 500, 1000, 1024, 5000, 20_000, 40_000];
    let places: Vec<Place> = (0..gpus).map(Place::Gpu).chain([Place::Host]).collect();
    let mut cases = Vec::new();
    while cases.len() < count {
        let page_bytes = random.pick(&BYTES);
        let by_16 = page_bytes.is_multiple_of(16) && random.below(4) > 0;
        let grain = if by_16 { 16 } else { 1 };
        let mut side = || {
            let stride = page_bytes + grain * random.pick(&[0, 0, 1, 3, 7]);
            let room = (SPAN - 4096) / stride;
            let offset = grain * random.below(64);
            (offset, stride, room)
        };
        let (source, target) = (side(), side());
        let room = source.2.min(target.2);
        let page_count = random.pick(&COUNTS).min(room);
        let mut table = |room: usize| {
            // Some of what there is room for, so that there are gaps.
            let spread = (page_count + random.below(page_count + 8)).min(room);
            (random.below(5) > 0).then(|| random.distinct(page_count, spread))
        };
        let (source_table, target_table) = (table(source.2), table(target.2));
        let methods = [
            Method::Auto,
            Method::Auto,
            Method::Kernel(Kernel::Vector),
            Method::Kernel(Kernel::Bulk),
        ];
        let method = if by_16 { random.pick(&methods) } else { Method::Kernel(Kernel::Any) };
        let (from, to) = (random.pick(&places), random.pick(&places));
        cases.push(Case {
            by: random.below(gpus),
            tuning: random.below(tunings().len()),
            from,
            to,
            page_bytes,
            page_count,
            source: (source.0, source.1),
            target: (target.0, target.1),
            source_table,
            target_table,
            tables_on_gpu: random.below(4) == 0,
            method,
            sms: random.pick(&[1, 2, 3, 7, 8, 16, 33, 132, 200]),
            add: random.below(2) == 0,
        });
    }
    cases
}

/// By what the rounds below are copied.
const WAYS: [Method; 4] = [
    Method::Kernel(Kernel::Bulk),
    Method::Kernel(Kernel::Vector),
    Method::Kernel(Kernel::Any),
    Method::CopyEngine,
];

/// Consecutive pages on both sides; one range for the copy engine.
fn consecutive(source: u64, target: u64, page_bytes: u64, count: u32, by: Method) -> PagedCopy {
    if by == Method::CopyEngine {
        return PagedCopy::contiguous(source, target, page_bytes * u64::from(count));
    }
    let pages = |base| Pages { base, stride: page_bytes, table: None };
    PagedCopy { source: pages(source), target: pages(target), page_bytes, page_count: count }
}

/// The CPU sees the word, and at once all bytes: `rounds` times for each way, into host memory.
fn seen_by_the_cpu(bench: &mut Bench<'_>, rounds: u64) -> Result<u64, Box<dyn Error>> {
    let (page_bytes, page_count) = (1024, 512);
    let bytes = usize::try_from(page_bytes)? * page_count as usize;
    let mut total = 0;
    for method in WAYS {
        for round in 0..rounds {
            let first = usize::try_from(round % 64 * 16)?;
            let source = bench.sources[0].address() + first as u64;
            let target = bench.host_target.address();
            let copy = consecutive(source, target, page_bytes, page_count, method);
            bench.done += 1;
            let release = Release::Store { word: bench.words.address(), value: bench.done };
            // SAFETY: memory of `bench`; the bytes are looked at once the word says that they are there.
            unsafe { bench.copiers[0][0].submit(&copy, release, method, sms(33))? };
            let started = Instant::now();
            while bench.words.word(0)?.load(Ordering::Acquire) != bench.done {
                if started.elapsed() > LIMIT {
                    return Err("the word never came".into());
                }
                std::hint::spin_loop();
            }
            let expected = &bench.random.as_slice()[first..first + bytes];
            if &bench.host_target.as_slice()[..bytes] != expected {
                return Err(format!("round {round} of {method:?}: the word was there first").into());
            }
            total += 1;
        }
    }
    Ok(total)
}

/// One warp is slow: its pages come from host memory, the others' from the GPU's. The word waits for it all the same.
///
/// *Fails if* a block announces without waiting for its other warps, or for the other blocks.
fn slow_warps_are_waited_for(bench: &mut Bench<'_>, rounds: u64) -> Result<u64, Box<dyn Error>> {
    /// Between source pages: 48 bits of addresses are in reach of a table's 32.
    const STRIDE: u64 = 1 << 16;
    const BLOCKS: u32 = 8;
    let (page_bytes, page_count) = (512usize, 8192u32);
    let mut random = Random(11);
    let slots = SPAN as u64 / STRIDE - 1;
    let first = bench.random.address() % STRIDE;
    if !bench.sources[0].address().is_multiple_of(STRIDE) {
        return Err("the GPU's memory does not start where this needs it to".into());
    }
    let mut total = 0;
    for (kernel, threads) in [
        (Kernel::Bulk, args::BULK_THREADS),
        (Kernel::Vector, args::VECTOR_THREADS),
        (Kernel::Any, args::ANY_THREADS),
    ] {
        let workers = BLOCKS * threads / 32;
        for _ in 0..rounds {
            let slow = u32::try_from(random.below(workers as usize))?;
            // Of those that are dealt: who is slow takes no turns, or few.
            let (from, count) = geometry::share(page_count.div_ceil(2), workers, slow);
            let slot = |page: u32| u64::from(page) * 7 % slots;
            let table = (0..page_count).map(|page| {
                let place = match (from..from + count).contains(&page) {
                    true => bench.random.address() - first,
                    false => bench.sources[0].address(),
                };
                u32::try_from(place / STRIDE + slot(page))
            });
            let table = table.collect::<Result<Vec<_>, _>>()?;
            write_table(&mut bench.tables, 0, &table);
            let bytes = page_bytes * page_count as usize;
            bench.host_target.as_mut_slice()[..bytes]
                .copy_from_slice(&bench.other.as_slice()[..bytes]);
            let copy = PagedCopy {
                source: Pages { base: first, stride: STRIDE, table: Some(bench.tables.address()) },
                target: Pages {
                    base: bench.host_target.address(),
                    stride: page_bytes as u64,
                    table: None,
                },
                page_bytes: page_bytes as u64,
                page_count,
            };
            bench.done += 1;
            let release = Release::Store { word: bench.words.address(), value: bench.done };
            let method = Method::Kernel(kernel);
            // SAFETY: memory of `bench`; the bytes are looked at once the word says that they are there.
            unsafe { bench.copiers[0][0].submit(&copy, release, method, sms(BLOCKS))? };
            let started = Instant::now();
            while bench.words.word(0)?.load(Ordering::Acquire) != bench.done {
                if started.elapsed() > LIMIT {
                    return Err("the word never came".into());
                }
                std::hint::spin_loop();
            }
            // The slow ones first, and the last of them before the others.
            for page in (from..from + count).rev().chain(0..page_count) {
                let at = page as usize * page_bytes;
                // In host memory the first slot starts at the first byte, on the GPU `first` bytes further.
                let on_host = (from..from + count).contains(&page);
                let there = slot(page) * STRIDE + if on_host { 0 } else { first };
                let there = usize::try_from(there)?;
                let expected = &bench.random.as_slice()[there..there + page_bytes];
                if &bench.host_target.as_slice()[at..at + page_bytes] != expected {
                    let which = if on_host { "slow" } else { "other" };
                    return Err(format!(
                        "{kernel:?}: the word did not wait for {which} page {page}"
                    )
                    .into());
                }
            }
            total += 1;
        }
    }
    Ok(total)
}

/// The other GPU's stream waits for the word, and reads what was written; no CPU in between.
fn seen_by_the_other_gpu(bench: &mut Bench<'_>, rounds: u64) -> Result<u64, Box<dyn Error>> {
    let (page_bytes, page_count) = (4096, 700);
    let bytes = usize::try_from(page_bytes)? * page_count as usize;
    let there = bench.gpus.len() - 1;
    let word = bench.gpus[there].memory(8)?;
    for round in 1..=rounds {
        let method = WAYS[usize::try_from(round % 4)?];
        let first = usize::try_from(round % 64 * 16)?;
        let source = bench.sources[0].address() + first as u64;
        let between = bench.targets[there].address();
        let end = bench.host_target.address();
        let push = consecutive(source, between, page_bytes, page_count, method);
        let vector = Method::Kernel(Kernel::Vector);
        let pull = consecutive(between, end, page_bytes, page_count, vector);
        let release = match round % 8 < 4 {
            true => Release::Add { word: word.address(), amount: 1 },
            false => Release::Store { word: word.address(), value: round },
        };
        let reader = &bench.copiers[there][1];
        // SAFETY: memory of `bench`; the reader starts when the word says that the bytes are there, and we wait for it.
        unsafe {
            if there != 0 {
                reader.stream().after_word(word.address(), round)?;
            }
            bench.copiers[0][0].submit(&push, release, method, sms(24))?;
            reader.submit(&pull, Release::Nothing, vector, sms(132))?;
        }
        bench.gpus[there].settle()?;
        let expected = &bench.random.as_slice()[first..first + bytes];
        if &bench.host_target.as_slice()[..bytes] != expected {
            return Err(format!("round {round} of {method:?}: the stream went on too early").into());
        }
    }
    Ok(rounds)
}

/// Streams of others, the default stream among them, and whatever context they have current.
fn callers_keep_their_own(bench: &mut Bench<'_>) -> Result<(), Box<dyn Error>> {
    let (gpu, other) = (&bench.gpus[0], &bench.gpus[bench.gpus.len() - 1]);
    let theirs: cu::CUcontext = other.device.context().cast();
    let done = |answer: cu::CUresult| match answer {
        cu::CUresult::CUDA_SUCCESS => Ok(()),
        answer => Err(format!("a context's stack: {answer:?}")),
    };
    // SAFETY: the context is alive; it is popped below.
    done(unsafe { cu::cuCtxPushCurrent_v2(theirs) })?;
    for raw in [gpu.stream.raw(), std::ptr::null_mut()] {
        // SAFETY: a stream of this GPU's primary context, which outlives the borrower; so does the default stream.
        let stream = unsafe { Stream::borrow(&gpu.device, raw) };
        let copier = Copier::new(&stream, Tuning::default())?;
        let (source, target) = (bench.random.address(), bench.host_target.address());
        for method in WAYS {
            bench.host_target.as_mut_slice()[..65_536].fill(0);
            let copy = consecutive(source, target, 4096, 16, method);
            let word = Release::Store { word: bench.words.address(), value: u64::MAX };
            // SAFETY: memory of `bench` that nobody else uses; waited for.
            unsafe { copier.submit(&copy, word, method, sms(2))? };
            let event = Event::new(&gpu.device)?;
            event.record(&stream)?;
            event.wait(LIMIT)?;
            if bench.host_target.as_slice()[..65_536] != bench.random.as_slice()[..65_536] {
                return Err(format!("{method:?} in a stream of others differs").into());
            }
            let mut now = std::ptr::null_mut();
            // SAFETY: writes the one handle.
            done(unsafe { cu::cuCtxGetCurrent(&raw mut now) })?;
            if now != theirs {
                return Err(format!("{method:?} leaves another context current").into());
            }
        }
    }
    let mut popped = std::ptr::null_mut();
    // SAFETY: takes off what was pushed above.
    done(unsafe { cu::cuCtxPopCurrent_v2(&raw mut popped) })?;
    Ok(())
}

/// Runs all checks, or some of them, for tools under which each launch takes long.
pub(crate) fn run(gpus: &[Gpu], few: bool) -> Result<Value, Box<dyn Error>> {
    let started = Instant::now();
    let mut bench = Bench::new(gpus)?;
    let mut cases = ranges(gpus.len());
    if few {
        cases = cases.into_iter().step_by(40).collect();
    }
    let ranges = cases.len();
    cases.extend(pages(gpus.len(), if few { 60 } else { 2500 }, &mut Random(7)));
    for case in &cases {
        if few && case.page_bytes * case.page_count > 1 << 20 {
            continue;
        }
        bench.run(case).map_err(|why| format!("{why}: {}", describe(case)))?;
    }
    let rounds = if few { 20 } else { 3000 };
    callers_keep_their_own(&mut bench)?;
    let cpu = seen_by_the_cpu(&mut bench, rounds)?;
    let slow = slow_warps_are_waited_for(&mut bench, rounds / 10)?;
    let other = seen_by_the_other_gpu(&mut bench, rounds)?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(json!({
        "ranges": ranges, "paged": cases.len() - ranges, "rounds_seen_by_cpu": cpu,
        "rounds_with_a_slow_warp": slow, "rounds_seen_by_other_stream": other, "gpus": gpus.len(), "seconds": seconds, "differences": 0,
    }))
}

fn describe(case: &Case) -> String {
    let short = Case { source_table: None, target_table: None, ..case.clone() };
    let tables = (case.source_table.is_some(), case.target_table.is_some());
    format!("{short:?}, tables {tables:?}")
}
