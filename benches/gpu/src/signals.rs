//! How long signals take between GPUs and the CPU: from a kernel's store to a watcher's callback, and from a submission to the
//! stream that waits for its count.
//!
//! # Two clocks
//!
//! A kernel answers a word of ours by a word of its own, and notes its clock (`%globaltimer`) before it does. Every second
//! answer goes to a word that this thread spins on. The fastest of those tells how the GPU's clock stands to the CPU's, but
//! for half of its round trip: as far as the way there and the way back differ, the one-way times are wrong. The round trips
//! are not. Both are given.

use crate::graph::Graph;
use crate::rig::{LIMIT, Random};
use cudarc::driver::sys as cu;
use immwire::{IdlePolicy, Region, SingleWrite, TransferEngine};
use immwire_cuda::{Device, Event, PinnedMemory, Stream};
use serde_json::{Value, json};
use std::error::Error;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Answers of one kernel; the first ones are warm-up.
const ANSWERS: usize = 10_000;
const WARM_UP: usize = 200;
/// Rounds of each write.
const ROUNDS: u64 = 400;

/// Waits until the word at `go` is `i`, for each `i` from 1 to `count`; then stores `i` to `raw` or `word` in turn, and its
/// clock before that to `stamps[i]`. Ends by itself after 20 s.
const ANSWERING: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry answer(
    .param .u64 go, .param .u64 stamps, .param .u64 raw, .param .u64 word, .param .u64 count
) {
    .reg .b64 %r<12>;
    .reg .pred %p<4>;
    ld.param.u64 %r1, [go];
    ld.param.u64 %r2, [stamps];
    ld.param.u64 %r3, [raw];
    ld.param.u64 %r4, [word];
    ld.param.u64 %r5, [count];
    mov.u64 %r6, 1;
    mov.u64 %r7, %globaltimer;
    add.u64 %r8, %r7, 20000000000;
NEXT:
    ld.acquire.sys.global.u64 %r9, [%r1];
    mov.u64 %r7, %globaltimer;
    setp.gt.u64 %p1, %r7, %r8;
    @%p1 bra OVER;
    setp.lt.u64 %p2, %r9, %r6;
    @%p2 bra NEXT;
    and.b64 %r10, %r6, 1;
    setp.eq.u64 %p3, %r10, 1;
    selp.b64 %r11, %r3, %r4, %p3;
    mov.u64 %r7, %globaltimer;
    st.release.sys.global.u64 [%r11], %r6;
    shl.b64 %r10, %r6, 3;
    add.u64 %r10, %r10, %r2;
    st.global.u64 [%r10], %r7;
    add.u64 %r6, %r6, 1;
    setp.le.u64 %p1, %r6, %r5;
    @%p1 bra NEXT;
OVER:
    ret;
}
";

/// Nanoseconds of the CPU's clock.
fn now() -> i64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// Nanoseconds, in microseconds; signed, since clocks are compared.
fn spread(mut all: Vec<i64>) -> Value {
    all.sort_unstable();
    // Of a thousand.
    let at = |part: usize| {
        let at = (all.len() * part / 1000).min(all.len().saturating_sub(1));
        all.get(at).map(|&ns| ns as f64 / 1e3)
    };
    json!({
        "best": at(0), "p50": at(500), "p90": at(900), "p99": at(990), "p999": at(999), "worst": at(1000),
        "of": all.len(), "histogram": histogram(&all),
    })
}

/// How many there are in each quarter of a microsecond, up to 64, by its upper end; those that have any, and how many are longer.
fn histogram(sorted: &[i64]) -> Value {
    const QUARTER_NS: i64 = 250;
    const QUARTERS: i64 = 256;
    let mut buckets: Vec<(f64, usize)> = Vec::new();
    for ns in sorted {
        let quarter = ns.div_euclid(QUARTER_NS).saturating_add(1).min(QUARTERS + 1);
        let upper = if quarter > QUARTERS { f64::INFINITY } else { quarter as f64 / 4.0 };
        match buckets.last_mut() {
            Some((last, count)) if *last == upper => *count += 1,
            _ => buckets.push((upper, 1)),
        }
    }
    // What is longer than all has no number as its end.
    let told =
        buckets.iter().map(|&(upper, count)| json!([upper.is_finite().then_some(upper), count]));
    told.collect()
}

pub(crate) fn call(what: &str, answer: cu::CUresult) -> Outcome<()> {
    if answer == cu::CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(format!("{what}: {answer:?}").into())
    }
}

/// Makes a GPU's context current while `f` runs.
pub(crate) fn within<T>(device: &Device, f: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    // SAFETY: the context lives while `device` does; what is pushed is popped.
    call("cuCtxPushCurrent", unsafe { cu::cuCtxPushCurrent_v2(device.context().cast()) })?;
    let done = f();
    let mut popped = ptr::null_mut();
    // SAFETY: as above.
    call("cuCtxPopCurrent", unsafe { cu::cuCtxPopCurrent_v2(&raw mut popped) })?;
    done
}

fn spin_until(what: &str, mut done: impl FnMut() -> bool) -> Outcome<()> {
    let started = Instant::now();
    while !done() {
        if started.elapsed() > LIMIT {
            return Err(format!("{what} within {LIMIT:?}").into());
        }
        std::hint::spin_loop();
    }
    Ok(())
}

fn settle(device: &Device, stream: &Stream) -> Outcome<()> {
    let event = Event::new(device)?;
    event.record(stream)?;
    Ok(event.wait(LIMIT)?)
}

/// Launches the answering kernel, as a graph: it is in graphs that what is watched is stored to.
fn launch(device: &Device, stream: &Stream, words: [u64; 4]) -> Outcome<Graph> {
    // Before the capture, in which older drivers load nothing.
    let function = within(device, || {
        let text = CString::new(ANSWERING)?;
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a terminated text; handles are written to where they are given. The module stays until the process ends.
        unsafe {
            call("cuModuleLoadData", cu::cuModuleLoadData(&raw mut module, text.as_ptr().cast()))?;
            let name = c"answer".as_ptr();
            call("cuModuleGetFunction", cu::cuModuleGetFunction(&raw mut function, module, name))?;
        }
        Ok(function)
    })?;
    let graph = Graph::new(device, stream, |stream| {
        let [mut go, mut stamps, mut raw, mut word] = words;
        let mut count = ANSWERS as u64;
        let mut parameters =
            [&raw mut go, &raw mut stamps, &raw mut raw, &raw mut word, &raw mut count]
                .map(|value| value.cast::<c_void>());
        // SAFETY: the kernel takes five words, and reaches what they point to for as long as its caller waits.
        unsafe {
            let (stream, parameters) = (stream.raw().cast(), parameters.as_mut_ptr());
            let none = ptr::null_mut();
            let launched =
                cu::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, none);
            call("cuLaunchKernel", launched)
        }
    })?;
    graph.launch(device, stream)?;
    Ok(graph)
}

/// From a kernel's store to the callback, with so many words watched; the one that is stored to is the last.
fn watched(gpu: u32, watchers: usize) -> Outcome<Value> {
    let device = Device::open(gpu)?;
    let engine = TransferEngine::builder().gpus([gpu]).build()?;
    let told: Arc<[AtomicI64]> = (0..=ANSWERS).map(|_| AtomicI64::new(0)).collect();
    let note = Arc::clone(&told);
    let idle = (1..watchers).map(|_| engine.alloc_uvm_watcher(|_, _| {}));
    let _idle = idle.collect::<Result<Vec<_>, _>>()?;
    let watcher = engine.alloc_uvm_watcher(move |_, at| {
        if let Some(told) = usize::try_from(at).ok().and_then(|at| note.get(at)) {
            told.store(now(), Ordering::Release);
        }
    })?;
    let words = PinnedMemory::zeroed(&device, 128)?;
    let stamps = PinnedMemory::zeroed(&device, 8 * (ANSWERS + 1))?;
    let (go, raw) = (words.word(0)?, words.word(64)?);
    let stream = Stream::new(&device)?;
    let places = [words.address(), stamps.address(), words.address() + 64, watcher.address()];
    let graph = launch(&device, &stream, places)?;
    let mut random = Random(1);
    // Of each answer: when it was asked for, and when it was seen.
    let mut times = vec![(0, 0)];
    for (i, number) in (1..=ANSWERS).zip(1u64..) {
        let pause = Duration::from_nanos(random.next() % 20_000);
        let paused = Instant::now();
        while paused.elapsed() < pause {
            std::hint::spin_loop();
        }
        let asked = now();
        go.store(number, Ordering::Release);
        let seen = if i % 2 == 1 {
            spin_until("a kernel has not answered", || raw.load(Ordering::Acquire) >= number)?;
            now()
        } else {
            let told = &told[i];
            spin_until("a callback was not called", || told.load(Ordering::Acquire) != 0)?;
            told.load(Ordering::Acquire)
        };
        times.push((asked, seen));
    }
    settle(&device, &stream)?;
    drop(graph);
    let mut answers = Vec::new();
    for (i, &(asked, seen)) in times.iter().enumerate().skip(WARM_UP) {
        let stored = stamps.word(8 * i)?.load(Ordering::Acquire).cast_signed();
        answers.push((i % 2 == 1, asked, seen, stored));
    }
    let steps = answers.windows(2).map(|two| (two[1].3 - two[0].3).unsigned_abs());
    let step = steps.fold(0, gcd);
    let spun = answers.iter().filter(|answer| answer.0);
    let fastest = spun.min_by_key(|(_, asked, seen, _)| seen - asked).ok_or("no answers")?;
    let &(_, asked, seen, stored) = fastest;
    let offset = asked + (seen - asked) / 2 - stored;
    let trips = |spinning| answers.iter().filter(move |answer| answer.0 == spinning);
    let round =
        |spinning| spread(trips(spinning).map(|(_, asked, seen, _)| seen - asked).collect());
    let back = |spinning| {
        spread(trips(spinning).map(|(.., seen, stored)| seen - stored - offset).collect())
    };
    Ok(json!({
        "watched_words": watchers, "gpu_clock_step_ns": step,
        "one_way_uncertain_by_us": (seen - asked) as f64 / 2e3,
        "round_trip_us": { "spinning": round(true), "callback": round(false) },
        "one_way_us": { "spinning": back(true), "callback": back(false) },
    }))
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Two engines of one process, each with a thread that never sleeps, and a stream at the receiver's GPU.
struct Pair {
    sender: TransferEngine,
    receiver: TransferEngine,
    device: Device,
    stream: Stream,
    /// What the stream has come to.
    mark: PinnedMemory,
    marks: u64,
}

impl Pair {
    fn new(from: u32, to: u32) -> Outcome<Self> {
        let engine = |gpu| TransferEngine::builder().gpus([gpu]).idle(IdlePolicy::busy()).build();
        let device = Device::open(to)?;
        let (stream, mark) = (Stream::new(&device)?, PinnedMemory::zeroed(&device, 8)?);
        Ok(Self { sender: engine(from)?, receiver: engine(to)?, device, stream, mark, marks: 0 })
    }

    /// Has the stream say that it has come so far.
    fn mark(&mut self) -> Outcome<()> {
        self.marks += 1;
        let (stream, mark) = (self.stream.raw().cast(), self.mark.address());
        // SAFETY: the stream is alive, and the word pinned until the stream has written to it, which is waited for.
        let written = unsafe { cu::cuStreamWriteValue64_v2(stream, mark, self.marks, 0) };
        call("cuStreamWriteValue64", written)
    }

    fn is_marked(&self) -> Outcome<bool> {
        Ok(self.mark.word(0)?.load(Ordering::Acquire) == self.marks)
    }

    fn wait_mark(&self) -> Outcome<i64> {
        let word = self.mark.word(0)?;
        spin_until("the stream goes on", || word.load(Ordering::Acquire) == self.marks)?;
        Ok(now())
    }

    /// From a store of this thread until it sees that the stream has gone on: what any wait of a stream costs.
    fn words(&mut self) -> Outcome<Value> {
        let (device, word) = (self.device.clone(), PinnedMemory::zeroed(&self.device, 8)?);
        let mut took = Vec::new();
        for round in 1..=ROUNDS {
            // SAFETY: pinned memory that outlives the wait, which is waited for.
            unsafe { self.stream.after_word(word.address(), round) }?;
            within(&device, || self.mark())?;
            pause();
            let started = now();
            word.word(0)?.store(round, Ordering::Release);
            took.push(self.wait_mark()? - started);
        }
        Ok(spread(took))
    }

    /// From the submission of a write until the receiver's CPU sees the count, or its stream goes on for it.
    fn writes(&mut self, from: u32, to: u32, bytes: u64) -> Outcome<Value> {
        let len = usize::try_from(bytes)?;
        let (src, dst) = (self.sender.alloc_gpu(from, len)?, self.receiver.alloc_gpu(to, len)?);
        let counter = Arc::new(self.receiver.counter()?);
        let peer = self.sender.add_peer(self.receiver.address())?;
        self.sender.wait_peer(peer, LIMIT)?;
        let (device, desc) = (self.device.clone(), dst.desc());
        let write = SingleWrite {
            peer,
            src: &src,
            src_offset: 0,
            dst: &desc,
            dst_offset: 0,
            len: bytes,
            imm: Some(counter.tag()),
        };
        let (mut counted, mut went_on, mut calls) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..2 * ROUNDS {
            let stamp = round.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
            stamp_ends(&src, bytes, &stamp)?;
            let (transfer, took) = if round % 2 == 0 {
                pause();
                let started = now();
                let transfer = self.sender.submit_single_write(&write)?;
                spin_until("a count is reached", || counter.try_take(1).unwrap_or(false))?;
                (transfer, now() - started)
            } else {
                let called = now();
                // SAFETY: a stream of the GPU's primary context, which lives as long as the pair.
                let wait = unsafe {
                    self.receiver.wait_on_stream(to, self.stream.raw(), &counter, 1, LIMIT)
                }?;
                let call = now() - called;
                within(&device, || self.mark())?;
                pause();
                if self.is_marked()? {
                    return Err("the stream has not waited".into());
                }
                let started = now();
                let transfer = self.sender.submit_single_write(&write)?;
                let took = self.wait_mark()? - started;
                wait.poll().ok_or("the stream has gone on without a reason")??;
                calls.push(call);
                (transfer, took)
            };
            for offset in [0, bytes - 8] {
                let mut found = [0; 8];
                dst.read(offset, &mut found)?;
                if found != stamp {
                    return Err(format!(
                        "round {round}: bytes at {offset} are not what was written"
                    )
                    .into());
                }
            }
            transfer.wait(LIMIT)?.ok()?;
            if round >= 40 {
                if round % 2 == 0 { &mut counted } else { &mut went_on }.push(took);
            }
        }
        Ok(
            json!({ "bytes": bytes, "counted_us": spread(counted), "stream_went_on_us": spread(went_on),
                   "call_us": spread(calls) }),
        )
    }
}

/// So that what was enqueued has begun to wait.
fn pause() {
    let paused = Instant::now();
    while paused.elapsed() < Duration::from_micros(50) {
        std::hint::spin_loop();
    }
}

fn stamp_ends(region: &Region, bytes: u64, stamp: &[u8; 8]) -> Outcome<()> {
    region.write(0, stamp)?;
    Ok(region.write(bytes - 8, stamp)?)
}

/// Measures signals of one GPU, and from it to another.
pub(crate) fn measure(from: u32, to: u32) -> Outcome<Value> {
    let mut pair = Pair::new(from, to)?;
    let words = pair.words()?;
    let writes =
        [8, 4 << 10, 64 << 10, 1 << 20].into_iter().map(|bytes| pair.writes(from, to, bytes));
    let writes = writes.collect::<Outcome<Vec<_>>>()?;
    drop(pair);
    let watchers = [1, 64, 500].into_iter().map(|watchers| watched(from, watchers));
    let watchers = watchers.collect::<Outcome<Vec<_>>>()?;
    Ok(json!({
        "from": from, "to": to,
        "stream_waits": { "word_to_stream_us": words, "writes": writes },
        "watchers": watchers,
    }))
}
