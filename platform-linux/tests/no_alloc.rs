//! From submission to completion a write allocates nothing, on either side, on any thread.
//!
//! The allocator of this process counts; both engines live in it, with all their threads. A process of its
//! own, with nothing else in it, so that every allocation is a write's.
//!
//! With memory of GPUs it is to be asked for (`--ignored`): it needs two, or the stand-in for their driver
//! (`verification/fake-cuda`), which has an allocator of its own. By way of the host's, over TCP, it needs libfabric's too
//! (`IMMWIRE_LIBFABRIC`), which is not counted either.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what is wrong by panicking"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::panic::catch_unwind;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use immwire::{
    Driver, End, ImmCounter, LibfabricOptions, MrDesc, PageIndices, PagedWrite, Pages, PeerId,
    Region, SingleWrite, Staging, Transfer, TransferEngine, Transport,
};
use libtest_mimic::{Arguments, Failed, Trial};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged, whose promises are kept thereby.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: our caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: our caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: our caller's promise.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LIMIT: Duration = Duration::from_secs(60);
/// Writes of each kind, in steady state; and where `IMMWIRE_FULL=1` is set.
const WRITES: u64 = 100_000;
const FULL_WRITES: u64 = 1_000_000;
/// The same with memory of GPUs, where each copy is some microseconds of a driver's.
const GPU_WRITES: u64 = 30_000;
/// And by way of the host's, over TCP.
const STAGED_WRITES: u64 = 20_000;
/// Before that.
const WARM_UP: u64 = 20_000;
/// Writes that one count is waited for.
const ROUND: u64 = 500;
/// Transfers under way at a time.
const WINDOW: usize = 32;

/// Two engines, and what they write with.
struct Pair {
    sender: TransferEngine,
    /// Held for its engine.
    _receiver: TransferEngine,
    drivers: Option<(Driver, Driver)>,
    peer: PeerId,
    src: Region,
    dst: MrDesc,
    counter: ImmCounter,
    list: PageIndices,
    window: [Option<Transfer>; WINDOW],
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Single(u64),
    Imm,
    Paged,
}

/// Whose memory it is, and how it gets there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Host,
    /// GPUs copy.
    Gpus,
    /// By way of the host's memory, over TCP.
    Staged,
}

impl Pair {
    /// Engines with `nics` NICs, and memory of the host or of GPUs 0 and 1.
    fn new(polled: bool, nics: u8, place: Place) -> Self {
        let with_gpus = place != Place::Host;
        let gpus: &[u32] = if with_gpus { &[0, 1] } else { &[] };
        for gpu in gpus {
            // What is asked only of a GPU that takes long: a function of the driver's is looked up when it is called first.
            let device = immwire_cuda::Device::open(*gpu).expect("a GPU");
            let stream = immwire_cuda::Stream::new(&device).expect("a stream");
            assert_eq!(stream.is_done(), Ok(true));
        }
        let builder = || {
            let builder = TransferEngine::builder().nics(nics).gpus(gpus);
            if place != Place::Staged {
                return builder;
            }
            let (provider, domain) = (Some("tcp".into()), Some("lo".into()));
            let options = LibfabricOptions { provider, domain, ..Default::default() };
            builder.transport(Transport::Libfabric(options)).staging(Staging::default())
        };
        let (sender, receiver, mut drivers) = if polled {
            let (sender, first) = builder().build_polled().expect("build");
            let (receiver, second) = builder().build_polled().expect("build");
            (sender, receiver, Some((first, second)))
        } else {
            (builder().build().expect("build"), builder().build().expect("build"), None)
        };
        let peer = match &mut drivers {
            None => sender.add_peer(receiver.address()),
            Some((first, _)) => first.add_peer(receiver.address()),
        };
        let peer = peer.expect("add_peer");
        let start = Instant::now();
        while sender.peer_state(peer) != Some(immwire::PeerState::Up) {
            step(&mut drivers);
            assert!(start.elapsed() < LIMIT, "not connected");
        }
        let alloc = |engine: &TransferEngine, gpu| match with_gpus {
            true => engine.alloc_gpu(gpu, 1 << 20),
            false => engine.alloc(1 << 20),
        };
        let src = alloc(&sender, 0).expect("alloc");
        let there = alloc(&receiver, 1).expect("alloc");
        let list: Arc<[u32]> = (0..32).map(|i| i * 7 % 256).collect();
        Self {
            dst: there.desc(),
            counter: receiver.counter().expect("counter"),
            list: list.into(),
            window: [const { None }; WINDOW],
            sender,
            _receiver: receiver,
            drivers,
            peer,
            src,
        }
        .keep(there)
    }

    /// The destination stays until the process ends.
    fn keep(self, there: Region) -> Self {
        std::mem::forget(there);
        self
    }

    /// Submits one transfer; returns what it counts.
    fn submit(&self, kind: Kind) -> (Transfer, u64) {
        let (peer, imm) = (self.peer, Some(self.counter.tag()));
        let (src, dst) = (&self.src, &self.dst);
        match kind {
            Kind::Single(len) => {
                let (src_offset, dst_offset) = (64, 128);
                let write = SingleWrite { peer, src, src_offset, dst, dst_offset, len, imm };
                (self.sender.submit_single_write(&write).expect("submit"), 1)
            }
            Kind::Imm => (self.sender.submit_imm(peer, self.counter.tag(), 1).expect("submit"), 1),
            Kind::Paged => {
                let pages = Pages { indices: self.list.clone(), stride: 4096, offset: 0 };
                let write = PagedWrite {
                    peer,
                    page_bytes: 256,
                    src,
                    src_pages: pages.clone(),
                    dst,
                    dst_pages: pages,
                    imm,
                };
                (self.sender.submit_paged_writes(&write).expect("submit"), 32)
            }
        }
    }

    fn wait(&mut self, transfer: &Transfer) {
        let end = if self.drivers.is_some() {
            let start = Instant::now();
            loop {
                step(&mut self.drivers);
                if let Some(end) = transfer.poll_end() {
                    break end;
                }
                assert!(start.elapsed() < LIMIT, "a transfer hangs");
            }
        } else {
            transfer.wait(LIMIT).expect("ends")
        };
        assert_eq!(end, End::Done);
    }

    /// Submits until `writes` have been done and counted.
    fn run(&mut self, kind: Kind, writes: u64) {
        let mut done = 0;
        while done < writes {
            let mut round = 0;
            while round < ROUND {
                for at in 0..WINDOW {
                    if let Some(transfer) = self.window[at].take() {
                        self.wait(&transfer);
                    }
                    let (transfer, counts) = self.submit(kind);
                    self.window[at] = Some(transfer);
                    round += counts;
                }
            }
            if self.drivers.is_some() {
                let start = Instant::now();
                while !self.counter.try_take(round).expect("not armed") {
                    step(&mut self.drivers);
                    assert!(start.elapsed() < LIMIT, "a count hangs");
                }
            } else {
                self.counter.wait(round, LIMIT).expect("counted");
            }
            done += round;
        }
        for at in 0..WINDOW {
            if let Some(transfer) = self.window[at].take() {
                self.wait(&transfer);
            }
        }
    }
}

fn step(drivers: &mut Option<(Driver, Driver)>) {
    if let Some((first, second)) = drivers {
        first.poll();
        second.poll();
    }
}

fn main() -> ExitCode {
    let trial = |name: &str, test: fn()| {
        Trial::test(name, move || catch_unwind(test).map_err(|_| Failed::from("see above")))
    };
    let trials = vec![
        trial("the_steady_state_allocates_nothing", || steady_state(Place::Host)),
        trial("nor_with_memory_of_gpus", || steady_state(Place::Gpus)).with_ignored_flag(true),
        trial("nor_by_way_of_the_hosts", || steady_state(Place::Staged)).with_ignored_flag(true),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn steady_state(place: Place) {
    // That the allocator counts at all.
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    drop(std::hint::black_box(Box::new([0_u8; 100])));
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before + 1);

    let kinds = [Kind::Single(8), Kind::Single(3000), Kind::Imm, Kind::Paged];
    let writes = match place {
        Place::Host if std::env::var_os("IMMWIRE_FULL").is_some_and(|full| full == "1") => {
            FULL_WRITES
        }
        Place::Host => WRITES,
        Place::Gpus => GPU_WRITES,
        Place::Staged => STAGED_WRITES,
    };
    let mut wrong = 0;
    for (polled, nics) in [(false, 1), (true, 1), (false, 4)] {
        let mut pair = Pair::new(polled, nics, place);
        for kind in kinds {
            pair.run(kind, WARM_UP);
            let (before, start) = (ALLOCATIONS.load(Ordering::Relaxed), Instant::now());
            pair.run(kind, writes);
            let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
            let seconds = start.elapsed().as_secs_f64();
            let motor = if polled { "polled" } else { "thread" };
            println!(
                "{kind:?}, {motor}, {nics} NICs, {place:?}: {allocations} allocations in {writes} writes, {seconds:.2} s"
            );
            wrong += u64::from(allocations > 0);
        }
    }
    assert_eq!(wrong, 0, "the steady state allocates");
}
