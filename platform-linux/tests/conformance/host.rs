//! An engine under test, whichever way it is driven, and memory with a pattern in it.

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use immwire::core::group::TransferError as Stopped;
use immwire::{
    Builder, CloseError, CountError, Driver, End, ImmCounter, LivenessConfig, Message, NetAddr,
    PeerId, PeerState, RecvError, Region, Rights, SingleWrite, SubmitError, Transfer,
    TransferEngine, TransferError,
};
use immwire_cuda::{Device, DeviceMemory, Event, Stream};
use serde::{Deserialize, Serialize};

use crate::Provider;
use crate::segment::{PART, Segment};

/// No single step of a test takes longer on a loaded machine, unless it hangs. An emulated guest is another matter:
/// whoever runs the suite in one sets `IMMWIRE_EMULATED=1`.
pub fn patience() -> Duration {
    Duration::from_secs(if is_emulated() { 60 } else { 20 })
}

/// The same in milliseconds, for an agent.
pub fn patience_ms() -> u64 {
    u64::try_from(patience().as_millis()).expect("small")
}

/// Whether all this runs on processors that are emulated.
pub fn is_emulated() -> bool {
    static EMULATED: OnceLock<bool> = OnceLock::new();
    *EMULATED.get_or_init(|| std::env::var_os("IMMWIRE_EMULATED").is_some())
}

/// Who makes an engine move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Motor {
    /// A thread of its own.
    Thread,
    /// Its caller.
    Polled,
}

/// How memory that was registered, not allocated, is to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Foreign {
    Auto,
    Kernel,
    Bounce,
}

/// What an engine under test is built from. Travels to the second process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    pub provider: String,
    pub motor: Motor,
    pub nics: u8,
    pub transfers: u16,
    pub drain_ms: u64,
    /// When a silent peer counts as gone; if not given, as the engine has it.
    pub silent_ms: Option<u64>,
    /// When a peer that is not used is let go; never, if not given.
    pub idle_ms: Option<u64>,
    pub key: Option<String>,
    pub foreign: Foreign,
    /// Names of devices, for providers that have some; if none, as the environment says.
    pub devices: Vec<String>,
    /// Where the engine is, for providers that go different ways to the same host and to others.
    pub host: Option<String>,
}

/// An engine with its motor.
pub struct Host {
    pub engine: TransferEngine,
    driver: Option<RefCell<Driver>>,
    /// Memory is to be a GPU's, or now and then the host's: whose turn it is.
    turn: Option<Cell<u32>>,
}

impl Host {
    pub fn new(setup: &Setup) -> Self {
        let provider = Provider::named(&setup.provider);
        let builder: Builder = (provider.builder)(setup);
        let builder = builder
            .nics(setup.nics)
            .transfers(setup.transfers)
            .drain(Duration::from_millis(setup.drain_ms));
        let builder = match setup.silent_ms.map(Duration::from_millis) {
            None => builder,
            Some(limit) => builder.liveness(LivenessConfig {
                heartbeat: limit / 8,
                suspect_after: limit / 2,
                down_after: limit,
                ..LivenessConfig::default()
            }),
        };
        let builder = match setup.idle_ms.map(Duration::from_millis) {
            None => builder,
            Some(limit) => builder.idle_after(limit),
        };
        let (engine, driver) = match setup.motor {
            Motor::Thread => (builder.build().expect("build"), None),
            Motor::Polled => {
                let (engine, driver) = builder.build_polled().expect("build_polled");
                (engine, Some(RefCell::new(driver)))
            }
        };
        let reaches_gpus = provider.has_gpus() && !are_gpus_unreached();
        let turn = reaches_gpus.then(Cell::default);
        Self { engine, driver, turn }
    }

    /// A polled engine that was built elsewhere.
    pub fn polled(engine: TransferEngine, driver: Driver) -> Self {
        Self { engine, driver: Some(RefCell::new(driver)), turn: None }
    }

    /// Drops the driver before the handle; a thread's engine has none.
    pub fn drop_driver_first(self) {
        drop(self.driver);
        drop(self.engine);
    }

    /// Whether somebody has to call [`Host::step`].
    pub fn is_polled(&self) -> bool {
        self.driver.is_some()
    }

    /// One step of a polled engine.
    pub fn step(&self) {
        if let Some(driver) = &self.driver {
            driver.borrow_mut().poll();
        }
    }

    /// Waits, while the engine moves, until `done` says something.
    pub fn until<R>(&self, limit: Duration, mut done: impl FnMut() -> Option<R>) -> Option<R> {
        let start = Instant::now();
        loop {
            if let Some(result) = done() {
                return Some(result);
            }
            if start.elapsed() >= limit {
                return None;
            }
            match &self.driver {
                Some(driver) => {
                    for _ in 0..64 {
                        driver.borrow_mut().poll();
                    }
                }
                None => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }

    /// Does what takes its time, while the engine moves: to start a process, or to see it die, may take the kernel seconds
    /// where disks and memory are short, and a polled engine would be silent meanwhile.
    pub fn meanwhile<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        std::thread::scope(|scope| {
            let working = scope.spawn(work);
            while !working.is_finished() {
                self.linger(Duration::from_micros(100));
            }
            working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Lets the engine move for a while, in which something must not happen: some hundred steps at least, if we make them, though we be kept from running
    /// meanwhile; but for a while that is no more than a step or some.
    pub fn linger(&self, time: Duration) {
        self.until(time, || None::<()>);
        if time >= Duration::from_millis(5) {
            (0..512).for_each(|_| self.step());
        }
    }

    /// Connects, and waits until the peer is up.
    pub fn peer(&self, address: &NetAddr) -> PeerId {
        self.try_peer(address).unwrap_or_else(|error| panic!("{address}: {error}"))
    }

    /// Connects, and waits until the peer is up or not wanted.
    pub fn try_peer(&self, address: &NetAddr) -> Result<PeerId, String> {
        let peer = self.call(address)?;
        self.met(peer).map(|()| peer)
    }

    /// Begins to connect.
    pub fn call(&self, address: &NetAddr) -> Result<PeerId, String> {
        let peer = match &self.driver {
            None => self.engine.add_peer(address),
            Some(driver) => driver.borrow_mut().add_peer(address),
        };
        peer.map_err(|error| error.to_string())
    }

    /// Waits until the peer is up or not wanted.
    pub fn met(&self, peer: PeerId) -> Result<(), String> {
        let up = match &self.driver {
            None => self.engine.wait_peer(peer, patience()),
            Some(driver) => driver.borrow_mut().wait_peer(peer, patience()),
        };
        up.map_err(|error| error.to_string())
    }

    /// How the peer stands: where it was silent for a while, once it has had the time for a word. Who was kept from running is up again then.
    pub fn stands(&self, peer: PeerId) -> Option<PeerState> {
        let suspect = Some(PeerState::Suspect);
        let state = || Some(self.engine.peer_state(peer)).filter(|state| *state != suspect);
        // Two heartbeats of it.
        self.until(Duration::from_secs(1), state).unwrap_or(suspect)
    }

    /// Waits until the peer is down; returns how it stands after at most `limit`.
    pub fn peer_down(&self, peer: PeerId, limit: Duration) -> Option<PeerState> {
        self.until(limit, || match self.engine.peer_state(peer) {
            down @ Some(PeerState::Down(_)) => Some(down),
            _ => None,
        })
        .unwrap_or_else(|| self.engine.peer_state(peer))
    }

    /// The end of a transfer, which comes.
    pub fn end(&self, transfer: &Transfer) -> End {
        let end = self.end_within(transfer, patience());
        end.unwrap_or_else(|| panic!("{transfer:?} has not ended within {:?}", patience()))
    }

    /// The end of a transfer, if it comes in time.
    pub fn end_within(&self, transfer: &Transfer, limit: Duration) -> Option<End> {
        match &self.driver {
            None => transfer.wait(limit).ok(),
            Some(driver) => driver.borrow_mut().wait(transfer, limit).ok(),
        }
    }

    /// Waits for a transfer that succeeds.
    pub fn done(&self, transfer: &Transfer) {
        assert_eq!(self.end(transfer), End::Done);
    }

    /// Waits for a count.
    pub fn count(
        &self,
        counter: &ImmCounter,
        writes: u64,
        limit: Duration,
    ) -> Result<(), CountError> {
        match &self.driver {
            None => counter.wait(writes, limit),
            Some(driver) => driver.borrow_mut().wait_count(counter, writes, limit),
        }
    }

    /// Waits for a message.
    pub fn recv(&self, limit: Duration) -> Result<Message, RecvError> {
        match &self.driver {
            None => self.engine.recv(limit),
            Some(driver) => driver.borrow_mut().recv(limit),
        }
    }

    /// Submits a write, from the thread that polls if there is one.
    pub fn submit(&self, write: &SingleWrite<'_>) -> Transfer {
        self.try_submit(write).expect("submit")
    }

    pub fn try_submit(&self, write: &SingleWrite<'_>) -> Result<Transfer, SubmitError> {
        match &self.driver {
            None => self.engine.submit_single_write(write),
            Some(driver) => driver.borrow_mut().submit_single_write(write),
        }
    }

    /// Takes a region back.
    pub fn close(&self, region: Region, patience: Duration) -> Result<(), CloseError> {
        match &self.driver {
            None => region.close(patience),
            Some(driver) => driver.borrow_mut().close_region(region, patience),
        }
    }

    /// Takes memory of the test's back, and registers it anew, for nobody but us: what is written there now
    /// is written behind the engine's back.
    pub fn reclaim(&self, memory: Memory, patience: Duration) -> Result<Memory, CloseError> {
        let Memory { region, lent, segment } = memory;
        let lent = lent.expect("memory of the test's");
        let bytes = usize::try_from(region.len()).expect("64-bit");
        self.close(region, patience)?;
        // SAFETY: never unmapped, and no reference to the bytes is ever made.
        let region = unsafe { self.engine.register(lent.ptr, bytes, Rights::LOCAL) };
        Ok(Memory { region: region.expect("register"), lent: Some(lent), segment })
    }

    /// Registers `bytes` bytes from `offset` on of so many allocations of a GPU that adjoin.
    pub fn segment(&self, ordinal: u32, parts: usize, offset: u64, bytes: u64) -> Memory {
        let segment = Segment::new(ordinal, parts);
        let bytes = usize::try_from(bytes).expect("64-bit");
        // SAFETY: unmapped once the region is closed, by `free`, or never; no reference to the bytes is ever made.
        let region =
            unsafe { self.engine.register(segment.ptr(offset), bytes, Rights::REMOTE_WRITE) };
        Memory { region: region.expect("register"), lent: None, segment: Some(segment) }
    }

    /// Takes memory back; if it is over several allocations, these are given to the driver.
    pub fn free(&self, memory: Memory, patience: Duration) -> Result<(), CloseError> {
        let Memory { region, segment, .. } = memory;
        self.close(region, patience)?;
        segment.into_iter().for_each(Segment::free);
        Ok(())
    }

    /// Memory of the engine's, or memory of ours that it registers for its peers.
    pub fn memory(&self, bytes: u64, own: Own) -> Memory {
        if own == Own::Test {
            return self.registered(bytes, Rights::REMOTE_WRITE);
        }
        let bytes = usize::try_from(bytes).expect("64-bit");
        let region = match self.next_gpu(own) {
            Some(gpu) => self.engine.alloc_gpu(gpu, bytes).expect("alloc_gpu"),
            None => self.engine.alloc(bytes).expect("alloc"),
        };
        Memory { region, lent: None, segment: None }
    }

    /// Memory of ours that the engine registers for as much as these rights say.
    pub fn registered(&self, bytes: u64, rights: Rights) -> Memory {
        let bytes = usize::try_from(bytes).expect("64-bit");
        let lent = match self.next_gpu(Own::Test) {
            Some(gpu) => Lent::of_gpu(gpu, bytes),
            None => Lent::new(bytes),
        };
        // SAFETY: never unmapped, and never freed; no reference to the bytes is ever made.
        let region = unsafe { self.engine.register(lent.ptr, bytes, rights) };
        Memory { region: region.expect("register"), lent: Some(lent), segment: None }
    }

    /// The GPU whose memory is to be taken this time, if it is to be one's.
    fn next_gpu(&self, own: Own) -> Option<u32> {
        let turn = self.turn.as_ref()?;
        whose(turn.replace(turn.get() + 1), own)
    }
}

/// Which GPU's memory it is this time; `None`: the host's. The host's is always the engine's: no GPU reaches what a
/// peer's process has for itself.
fn whose(turn: u32, own: Own) -> Option<u32> {
    let gpus = Device::count().expect("GPUs");
    let turn = turn % (gpus + u32::from(own == Own::Engine));
    (turn < gpus).then_some(turn)
}

/// Whether no NIC reaches a GPU's memory: the stand-in for the driver is told to have no DMA-BUFs. What else takes a GPU's memory is
/// nvidia-peermem, which is NVIDIA's.
pub fn are_gpus_unreached() -> bool {
    std::env::var_os("IMMWIRE_FAKE_CUDA_NO_DMA_BUF").is_some_and(|value| value == "1")
}

/// Whether the end is an error that names the peer.
pub fn names(end: End, gone: PeerId) -> bool {
    match end {
        End::Done => false,
        End::NeverStarted { error } | End::Quiesced { error } => match error {
            TransferError::Stopped(
                Stopped::PeerDown { peer, .. }
                | Stopped::Piece { peer, .. }
                | Stopped::DeadlineExceeded { peer: Some(peer), .. },
            ) => peer == gone,
            TransferError::Refused(
                immwire::core::group::SubmitError::NoSuchPeer { peer }
                | immwire::core::group::SubmitError::PeerDown { peer, .. },
            ) => peer == gone,
            _ => false,
        },
    }
}

/// Whose memory it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Own {
    /// `TransferEngine::alloc`: peers on this host map it.
    Engine,
    /// `TransferEngine::register`: a private mapping of the test's.
    Test,
}

/// A region, and what it lies in.
pub struct Memory {
    pub region: Region,
    /// Never unmapped: a peer may write until the region is closed, which a test may well not do.
    lent: Option<Lent>,
    /// The same of memory over several allocations, unless it is freed.
    segment: Option<Segment>,
}

impl std::ops::Deref for Memory {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.region
    }
}

/// A private anonymous mapping that takes memory as it is touched.
pub struct Lent {
    pub ptr: NonNull<u8>,
}

impl Lent {
    pub fn new(bytes: usize) -> Self {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses an address where nothing lies.
        let ptr = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags)
        };
        Self { ptr: NonNull::new(ptr.expect("mmap").cast()).expect("an address") }
    }

    /// Makes all `bytes` of it read only, as files are mapped.
    pub fn protect(&self, bytes: usize) {
        use rustix::mm::{MprotectFlags, mprotect};
        // SAFETY: our own mapping, to which there is no reference.
        unsafe { mprotect(self.ptr.as_ptr().cast(), bytes, MprotectFlags::READ) }
            .expect("mprotect");
    }

    /// `bytes` of address space over `real` of memory, again and again.
    pub fn repeated(bytes: u64, real: u64) -> Self {
        use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let file = memfd_create("repeated", MemfdFlags::CLOEXEC).expect("memfd_create");
        ftruncate(&file, real).expect("ftruncate");
        let (all, real) = [bytes, real].map(|it| usize::try_from(it).expect("64-bit")).into();
        let place = Self::new(all);
        for at in (0..all).step_by(real) {
            let (protection, flags) =
                (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
            // SAFETY: within our own mapping, to which there is no reference.
            let mapped = unsafe {
                mmap(
                    place.ptr.as_ptr().add(at).cast(),
                    real.min(all - at),
                    protection,
                    flags,
                    &file,
                    0,
                )
            };
            mapped.expect("mmap");
        }
        place
    }

    /// In turn of `cudaMalloc`, and over two allocations of `cuMemCreate`.
    fn of_gpu(ordinal: u32, bytes: usize) -> Self {
        static TURNS: AtomicU32 = AtomicU32::new(0);
        if TURNS.fetch_add(1, Ordering::Relaxed) % 2 == 1 {
            return Self::over_two(ordinal, bytes as u64);
        }
        Self::by_handle(ordinal, bytes)
    }

    /// Of `cudaMalloc`.
    pub fn by_handle(ordinal: u32, bytes: usize) -> Self {
        let device = Device::open(ordinal).expect("a GPU");
        let stream = Stream::new(&device).expect("a stream");
        let memory = DeviceMemory::zeroed(&stream, bytes).expect("memory");
        let event = Event::new(&device).expect("an event");
        event.record(&stream).and_then(|()| event.wait(patience())).expect("zeroed");
        let ptr = NonNull::new(memory.address() as *mut u8).expect("an address");
        // Never freed.
        std::mem::forget(memory);
        Self { ptr }
    }

    /// The middle lies where one allocation ends and the next begins.
    fn over_two(ordinal: u32, bytes: u64) -> Self {
        // As aligned as tests may count on.
        let before = bytes / 2 / 64 * 64;
        let each = (bytes - before).div_ceil(PART);
        let parts = usize::try_from(2 * each).expect("64-bit");
        Self { ptr: Segment::new(ordinal, parts).ptr(each * PART - before) }
    }
}

/// Bytes that are told apart by where they belong: byte `i` of pattern `seed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pattern(pub u64);

const CHUNK: usize = 16 << 10;

impl Pattern {
    const fn word(self, at: u64) -> u64 {
        let mut z = self.0.wrapping_add(at.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Calls `each` with the bytes of `at..at + len`, piece by piece; stops when it says so.
    fn pieces(self, at: u64, len: u64, mut each: impl FnMut(u64, &[u8]) -> bool) {
        let mut pieces = [[0; 8]; CHUNK / 8 + 1];
        let mut done = 0;
        while done < len {
            let first = (at + done) / 8;
            let skip = usize::try_from((at + done) % 8).expect("small");
            let take = (len - done).min(CHUNK as u64);
            let take = usize::try_from(take).expect("small");
            let words = (skip + take).div_ceil(8);
            // Without iterators and slices: hardly optimised, those were half of what the suite takes where processors are emulated.
            let mut word = 0;
            while word < words {
                pieces[word] = self.word(first + word as u64).to_le_bytes();
                word += 1;
            }
            if !each(done, &pieces.as_flattened()[skip..skip + take]) {
                return;
            }
            done += take as u64;
        }
    }

    /// Writes bytes `at..at + len` of the pattern to `offset` of the region.
    pub fn fill(self, region: &Region, offset: u64, len: u64, at: u64) {
        self.pieces(at, len, |done, bytes| {
            region.write(offset + done, bytes).expect("inside");
            true
        });
    }

    /// Returns how far behind `offset` the region first differs from bytes `at..at + len`.
    pub fn mismatch(self, region: &Region, offset: u64, len: u64, at: u64) -> Option<u64> {
        let mut found = [0; CHUNK];
        let mut wrong = None;
        self.pieces(at, len, |done, bytes| {
            let found = &mut found[..bytes.len()];
            region.read(offset + done, found).expect("inside");
            if found != bytes {
                let first = found.iter().zip(bytes).position(|(a, b)| a != b).expect("differs");
                wrong = Some(done + first as u64);
            }
            wrong.is_none()
        });
        wrong
    }
}

/// Fills part of a region with one byte.
pub fn poison(region: &Region, offset: u64, len: u64, byte: u8) {
    let bytes = [byte; CHUNK];
    let mut done = 0;
    while done < len {
        let take = (len - done).min(CHUNK as u64);
        region
            .write(offset + done, &bytes[..usize::try_from(take).expect("small")])
            .expect("inside");
        done += take;
    }
}

/// Returns how far behind `offset` the first byte lies that is not `byte`.
pub fn first_other(region: &Region, offset: u64, len: u64, byte: u8) -> Option<u64> {
    let (mut found, bytes) = ([0; CHUNK], [byte; CHUNK]);
    let mut done = 0;
    while done < len {
        let take = (len - done).min(CHUNK as u64);
        let found = &mut found[..usize::try_from(take).expect("small")];
        region.read(offset + done, found).expect("inside");
        // As a whole first: byte by byte it takes most of a test's time where processors are emulated.
        if *found != bytes[..found.len()] {
            let first = found.iter().position(|&other| other != byte).expect("differs");
            return Some(done + first as u64);
        }
        done += take;
    }
    None
}
