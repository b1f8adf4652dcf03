//! An application that captures a CUDA graph while engines move its GPU's memory: neither disturbs the other, in any of CUDA's
//! three modes of capturing, whatever is asked of an engine meanwhile, by the capturing thread or by another.
//!
//! The stand-in for the driver (`verification/fake-cuda`) has rules for it, and this shows whether the driver has them; what was
//! captured is launched here. Waiting for all that a GPU has to do, graphs too, is among what is asked: that no documentation of CUDA's promises
//! what it rests on, so it is looked at here ([`immwire_cuda::Device::synchronize`]).

use crate::graph::Graph;
use crate::rig::{Gpu, LIMIT, Random};
use crate::signals::{call, within};
use cudarc::driver::sys as cu;
use immwire::{Driver, ImmCounter, PagedWrite, Pages, PeerId, Region, TransferEngine};
use immwire_cuda::{DeviceMemory, PinnedMemory, Stream};
use serde_json::{Value, json};
use std::error::Error;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn Error>>;

const PAGE: u64 = 16 << 10;
const PAGES: u32 = 64;
/// Requests of each capture.
const REQUESTS: u64 = 20;
/// How long a GPU is held up while it is waited for.
const HELD: Duration = Duration::from_millis(100);

const MODES: [(&str, cu::CUstreamCaptureMode); 3] = [
    ("global", cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL),
    ("thread_local", cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
    ("relaxed", cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED),
];

/// Two engines on one GPU, one that a thread of its own moves and one that the capturing thread polls.
struct World {
    gpu: u32,
    sender: TransferEngine,
    receiver: TransferEngine,
    driver: Driver,
    peer: PeerId,
    src: Region,
    dst: Region,
    counter: ImmCounter,
    random: Random,
}

impl World {
    fn new(gpu: &Gpu) -> Outcome<Self> {
        let ordinal = gpu.device.ordinal();
        let sender = TransferEngine::builder().gpus([ordinal]).build()?;
        let (receiver, mut driver) = TransferEngine::builder().gpus([ordinal]).build_polled()?;
        let bytes = usize::try_from(PAGE * u64::from(PAGES))?;
        let src = sender.alloc_gpu(ordinal, bytes)?;
        let dst = receiver.alloc_gpu(ordinal, bytes)?;
        let peer = sender.add_peer(receiver.address())?;
        let up = || sender.wait_peer(peer, std::time::Duration::ZERO).ok();
        driver.run_until(LIMIT, up).ok_or("the engines do not find each other")?;
        let counter = receiver.counter()?;
        let random = Random(1);
        Ok(Self { gpu: ordinal, sender, receiver, driver, peer, src, dst, counter, random })
    }

    /// One request, to its end; the pages are looked at.
    fn move_pages(&mut self) -> Outcome<()> {
        let number = usize::try_from(PAGES)?;
        let (from, to) =
            (self.random.distinct(number, number), self.random.distinct(number, number));
        let stamps: Vec<u64> = (0..PAGES).map(|_| self.random.next()).collect();
        for (page, stamp) in (0..).zip(&stamps) {
            self.src.write(page * PAGE, &stamp.to_le_bytes())?;
        }
        let pages =
            |indices: &[u32]| Pages { indices: indices.to_vec().into(), stride: PAGE, offset: 0 };
        let transfer = self.sender.submit_paged_writes(&PagedWrite {
            peer: self.peer,
            page_bytes: PAGE,
            src: &self.src,
            src_pages: pages(&from),
            dst: &self.dst.desc(),
            dst_pages: pages(&to),
            imm: Some(self.counter.tag()),
        })?;
        self.driver.wait_count(&self.counter, PAGES.into(), LIMIT)?;
        transfer.wait(LIMIT)?.ok()?;
        for (from, to) in from.iter().zip(&to) {
            let mut found = [0; 8];
            self.dst.read(u64::from(*to) * PAGE, &mut found)?;
            let wanted = stamps.get(usize::try_from(*from)?).copied();
            if wanted != Some(u64::from_le_bytes(found)) {
                return Err(format!("page {from} has not come to {to}").into());
            }
        }
        Ok(())
    }

    /// What engines do with CUDA when they are asked for memory, and what they refuse.
    fn ask(&mut self) -> Outcome<()> {
        let region = self.sender.alloc_gpu(self.gpu, 1 << 20)?;
        drop(region);
        let region = self.sender.alloc(1 << 20)?;
        drop(region);
        let flag = self.sender.alloc_gpu_flag(self.gpu)?;
        flag.set(7);
        drop(flag);
        drop(self.sender.alloc_uvm_watcher(|_, _| {})?);
        Ok(())
    }
}

/// A step of the capture, and what came of it.
struct Steps(Vec<String>);

impl Steps {
    fn take(&mut self, name: &str, done: Outcome<()>) {
        if let Err(why) = done {
            self.0.push(format!("{name}: {why}"));
        }
    }
}

fn fill(stream: &Stream, memory: &DeviceMemory, at: u64, value: u32) -> Outcome<()> {
    // SAFETY: inside the memory, which outlives what is captured; the stream is alive.
    call("cuMemsetD32Async", unsafe {
        cu::cuMemsetD32Async(memory.address() + at, value, 1024, stream.raw().cast())
    })
}

/// Work of a GPU that does not begin before a word says so, some of it in a graph.
struct Held<'a> {
    gpu: &'a Gpu,
    stream: Stream,
    /// Writes the word: another thread has it do so while one waits for the GPU, as [`immwire::moe::gpu::Control::abort`] does.
    other: Stream,
    _from: DeviceMemory,
    to: PinnedMemory,
    word: PinnedMemory,
    graph: Graph,
}

impl<'a> Held<'a> {
    fn new(gpu: &'a Gpu) -> Outcome<Self> {
        const BYTES: usize = 1 << 20;
        let (from, to) = (gpu.memory(BYTES)?, gpu.pinned(BYTES)?);
        let (stream, other) = (Stream::new(&gpu.device)?, Stream::new(&gpu.device)?);
        // SAFETY: as long as the memory, which is kept with the stream.
        let filled = within(&gpu.device, || unsafe {
            let raw = stream.raw().cast();
            call("cuMemsetD8Async", cu::cuMemsetD8Async(from.address(), 0x5a, BYTES, raw))?;
            call("cuStreamSynchronize", cu::cuStreamSynchronize(raw))
        });
        filled?;
        let graph = Graph::new(&gpu.device, &stream, |stream| {
            // SAFETY: as above.
            call("cuMemcpyDtoHAsync", unsafe {
                let host = to.address() as *mut std::ffi::c_void;
                cu::cuMemcpyDtoHAsync_v2(host, from.address(), BYTES, stream.raw().cast())
            })
        })?;
        Ok(Self { gpu, stream, other, _from: from, to, word: gpu.pinned(8)?, graph })
    }

    /// [`immwire_cuda::Device::synchronize`] comes back when the last byte is there, and not before.
    fn is_waited_for(&mut self) -> Outcome<()> {
        self.to.as_mut_slice().fill(0);
        let word = self.word.address();
        self.word.word(0)?.store(0, Ordering::Release);
        // SAFETY: the word is kept with the stream, and written below.
        unsafe { self.stream.after_word(word, 1) }?;
        let launched = self.graph.launch(&self.gpu.device, &self.stream);
        if launched.is_err() {
            // Nobody else does.
            self.word.word(0)?.store(1, Ordering::Release);
        }
        launched?;
        let (device, raw) = (&self.gpu.device, self.other.raw() as usize);
        let (waited, there, released) = std::thread::scope(|scope| {
            let release = scope.spawn(move || {
                std::thread::sleep(HELD);
                // SAFETY: the stream is alive, and the word is kept with it.
                let write = || unsafe {
                    let raw = raw as cu::CUstream;
                    call("cuStreamWriteValue64", cu::cuStreamWriteValue64_v2(raw, word, 1, 0))
                };
                within(device, write).map_err(|why| why.to_string())
            });
            let waited = device.synchronize();
            let there = self.to.as_slice().iter().all(|&byte| byte == 0x5a);
            // Also where it was not waited for: nothing is left to be done.
            let released = release.join();
            (waited, there, released)
        });
        released.map_err(|_| "it panicked")??;
        waited?;
        if there { Ok(()) } else { Err("it came back before the GPU's work was done".into()) }
    }
}

/// Captures two nodes, and all that engines do between them.
fn capture(
    gpu: &Gpu,
    held: &mut [Held<'_>],
    world: &mut World,
    mode: cu::CUstreamCaptureMode,
    steps: &mut Steps,
) -> Outcome<()> {
    let memory = gpu.memory(8192)?;
    let stream = Stream::new(&gpu.device)?;
    let raw: cu::CUstream = stream.raw().cast();
    let (mut graph, mut ready) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the stream is alive, and nobody else captures it.
    call("cuStreamBeginCapture", unsafe { cu::cuStreamBeginCapture_v2(raw, mode) })?;
    fill(&stream, &memory, 0, 1)?;
    let moved: Outcome<()> = (0..REQUESTS).try_for_each(|_| world.move_pages());
    steps.take("moving pages", moved);
    // SAFETY: a stream of the GPU's primary context.
    match unsafe { world.sender.after_stream(world.gpu, raw.cast()) } {
        Err(immwire::RegisterError::Capturing) => {}
        other => steps.take("after_stream", Err(format!("{other:?}").into())),
    }
    let counter = Arc::new(world.receiver.counter()?);
    // SAFETY: as above.
    let wait = unsafe { world.receiver.wait_on_stream(world.gpu, raw.cast(), &counter, 1, LIMIT) };
    match wait {
        Err(immwire::StreamWaitError::Capturing) => {}
        other => steps.take("wait_on_stream", Err(format!("{other:?}").into())),
    }
    drop(counter);
    steps.take("asking", world.ask());
    let asked = std::thread::scope(|scope| {
        scope.spawn(|| world.ask().map_err(|why| why.to_string())).join()
    });
    match asked {
        Ok(asked) => steps.take("another thread's asking", asked.map_err(Into::into)),
        Err(_) => steps.take("another thread's asking", Err("it panicked".into())),
    }
    for one in held {
        steps.take("waiting for the GPU", one.is_waited_for());
    }
    steps.take("moving pages again", world.move_pages());
    fill(&stream, &memory, 4096, 2)?;
    // SAFETY: writes the one handle.
    call("cuStreamEndCapture", unsafe { cu::cuStreamEndCapture(raw, &raw mut graph) })?;
    let mut nodes = 0;
    // SAFETY: counts, since no list is given.
    call("cuGraphGetNodes", unsafe {
        cu::cuGraphGetNodes(graph, ptr::null_mut(), &raw mut nodes)
    })?;
    if nodes != 2 {
        steps.take("the graph", Err(format!("{nodes} nodes, not two").into()));
    }
    // SAFETY: writes the one handle; the graph is alive; what was made is destroyed once, after its end was waited for.
    unsafe {
        call("cuGraphInstantiate", cu::cuGraphInstantiateWithFlags(&raw mut ready, graph, 0))?;
        call("cuGraphLaunch", cu::cuGraphLaunch(ready, raw))?;
        call("cuStreamSynchronize", cu::cuStreamSynchronize(raw))?;
        call("cuGraphExecDestroy", cu::cuGraphExecDestroy(ready))?;
        call("cuGraphDestroy", cu::cuGraphDestroy(graph))?;
    }
    let mut words = [0_u32; 2048];
    // SAFETY: as many bytes as there are on either side; nothing writes there any more.
    call("cuMemcpyDtoH", unsafe {
        cu::cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), memory.address(), 8192)
    })?;
    let (first, second) = words.split_at(1024);
    if first != [1; 1024] || second != [2; 1024] {
        steps.take("the graph", Err("it has not done what was captured".into()));
    }
    Ok(())
}

/// All of it in each mode; every step that failed is named.
pub(crate) fn run(gpus: &[Gpu]) -> Outcome<Value> {
    let gpu = gpus.first().ok_or("no GPU here")?;
    let mut world = World::new(gpu)?;
    world.move_pages()?;
    let mut held = gpus.iter().map(Held::new).collect::<Outcome<Vec<_>>>()?;
    let mut failed = Steps(Vec::new());
    let started = Instant::now();
    for (name, mode) in MODES {
        let mut steps = Steps(Vec::new());
        let captured =
            within(&gpu.device, || capture(gpu, &mut held, &mut world, mode, &mut steps));
        steps.take("the capture", captured);
        failed.0.extend(steps.0.into_iter().map(|step| format!("{name}: {step}")));
    }
    if failed.0.is_empty() {
        let took = started.elapsed().as_secs_f64();
        Ok(json!({ "modes": MODES.len(), "requests": REQUESTS + 1, "seconds": took }))
    } else {
        Err(failed.0.join("\n").into())
    }
}
