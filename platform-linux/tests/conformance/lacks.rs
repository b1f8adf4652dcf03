//! What there is too little of, where GPUs copy: files, regions, GPUs of one's own, time. Whose lack it is, is told, and nobody waits for the
//! driver who need not.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use immwire::core::group::{TransferError as Stopped, WorkError};
use immwire::moe::gpu::{AllToAll, Config, Joining, Number, Payload, Shape};
use immwire::moe::{MoeError, Seat};
use immwire::{End, MrDesc, PeerId, RegisterError, Rights, ScatterWrite, Target, TransferError};
use immwire_cuda::{Device, NotOpened, Opened, PinnedMemory, Received, Stream};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::agent::{Ask, Say, Write1, encode, plain};
use crate::gpus::refuse;
use crate::host::{Host, Lent, Motor, Own, Setup, patience};
use crate::operations::{only_peer, write};
use crate::segment::{PART, driver_s, stick, until_kept_waiting};
use crate::stalls::Stalls;
use crate::{Case, Spread, Test};

pub const COPYING: &[Test] = &[
    ("closed_between_two_launches", Spread::Once, closed_between_two_launches),
    ("files_that_cannot_be_had_now", Spread::Once, files_that_cannot_be_had_now),
    ("full_while_the_gpu_is_busy", Spread::Once, full_while_the_gpu_is_busy),
    (
        "no_memory_for_an_exchange_while_the_gpu_is_busy",
        Spread::Once,
        no_memory_for_an_exchange_while_the_gpu_is_busy,
    ),
    ("refused_as_an_exchange_starts_over", Spread::Once, refused_as_an_exchange_starts_over),
    ("memory_that_cannot_be_opened_now", Spread::Once, memory_that_cannot_be_opened_now),
    ("gpus_that_nobody_named", Spread::Once, gpus_that_nobody_named),
    ("handle_of_less_than_was_said", Spread::Once, handle_of_less_than_was_said),
    ("short_writes_at_the_end", Spread::Once, short_writes_at_the_end),
];

/// Runs `body` while this process gets no more descriptors.
pub fn without_descriptors<R>(body: impl FnOnce() -> R) -> R {
    let limits = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limits }).expect("setrlimit");
    let made = body();
    setrlimit(Resource::Nofile, limits).expect("setrlimit");
    made
}

/// A stream of GPU 0 that waits for a word until this is dropped: also when a test fails.
struct Busy {
    stream: Stream,
    word: PinnedMemory,
}

impl Busy {
    fn new() -> Self {
        let device = Device::open(0).expect("GPU 0");
        let word = PinnedMemory::zeroed(&device, 8).expect("pinned");
        let stream = Stream::new(&device).expect("a stream");
        // SAFETY: the word is pinned memory that is freed when the wait has ended: `drop` waits for that.
        unsafe { stream.after_word(word.address(), 1) }.expect("a wait");
        Self { stream, word }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.word.word(0).expect("eight bytes").store(1, Ordering::Release);
        let start = Instant::now();
        while matches!(self.stream.is_done(), Ok(false)) && start.elapsed() < patience() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Copies to three peers are launched one after the other, while the GPU is busy. Between the first and the second, somebody else begins to unpin memory, for
/// which the driver keeps all its callers waiting: the engine finds that out, and goes on with what needs no driver.
fn closed_between_two_launches(case: &Case) {
    const BYTES: u64 = 64 << 10;
    let me = Host::new(&Setup { motor: Motor::Polled, ..case.setup(1) });
    let beside = case.me();
    let mut others: Vec<_> = (0..3).map(|n| case.agent(&format!("other {n}"))).collect();
    let src = me.engine.alloc_gpu(0, usize::try_from(BYTES).expect("small")).expect("memory");
    let there: Vec<_> = others
        .iter_mut()
        .map(|(other, address)| (me.peer(address), other.memory(&me, BYTES, Own::Engine).1))
        .collect();
    let write_all = || -> Vec<_> {
        there.iter().map(|(to, dst)| write(&me, *to, &src, dst, (0, 0, BYTES), None)).collect()
    };
    // The peers tell where their memory is, first.
    write_all().iter().for_each(|transfer| me.done(transfer));
    let lent = Lent::new(4096);
    // SAFETY: never unmapped, and no reference to the bytes is ever made.
    let region = unsafe { beside.engine.register(lent.ptr, 4096, Rights::LOCAL) };
    let region = Mutex::new(Some(region.expect("register")));
    let busy = Busy::new();
    let (came_back, waits) = channel::<()>();
    // Lets the GPU go on, or nobody would come back.
    let watch = std::thread::spawn(move || {
        let came = waits.recv_timeout(patience() / 2);
        drop(busy);
        came != Err(RecvTimeoutError::Timeout)
    });
    // The first is refused, which is logged, on this thread, before the second is launched.
    let (closing, closes) = channel();
    let closes_now = move || {
        let region = region.lock().expect("no panic").take();
        if let Some(region) = region {
            let closer = std::thread::spawn(move || region.close(patience()).is_ok());
            until_kept_waiting(std::thread::sleep);
            closing.send(closer).expect("the test");
        }
        std::io::stderr()
    };
    let log = tracing_subscriber::fmt().with_max_level(tracing::Level::ERROR);
    let log = log.with_writer(closes_now).finish();
    // All three in one call of `post`.
    let target = |(peer, dst): &(PeerId, MrDesc)| {
        let (peer, dst, src_offset, dst_offset) = (*peer, *dst, 0, 0);
        Target { peer, dst, src_offset, dst_offset, len: BYTES }
    };
    let targets: Arc<[Target]> = there.iter().map(target).collect();
    let scatter = ScatterWrite { src: &src, targets, imm: None };
    let transfer = me.engine.submit_scatter(&scatter).expect("submit");
    assert!(refuse(1), "only the stand-in for the driver refuses");
    tracing::subscriber::with_default(log, || (0..1000).for_each(|_| me.step()));
    let closer = closes.try_recv().expect("a copy was refused");
    assert!(!closer.is_finished(), "it is unpinned while the GPU is busy");
    // It may have given up.
    let _ = came_back.send(());
    assert!(watch.join().expect("no panic"), "the engine was caught in the driver");
    refuse(0);
    assert!(closer.join().expect("no panic"), "it was closed");
    assert_ne!(me.end(&transfer), End::Done, "one was refused");
    write_all().iter().for_each(|transfer| me.done(transfer));
}

/// The owner of a region over several allocations has no descriptor left when it is asked for them: whoever asks has them when there are
/// some again. One process, so that both sides have none; the other needs none to ask.
fn files_that_cannot_be_had_now(case: &Case) {
    let (me, owner) = (case.me(), case.me());
    let peer = me.peer(owner.engine.address());
    let there = owner.segment(0, 3, 0, 3 * PART);
    let src = me.engine.alloc_gpu(0, 4096).expect("memory of GPU 0");
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, 4096, 0);
    let transfer = without_descriptors(|| {
        let transfer = write(&me, peer, &src, &there.desc(), (0, PART - 100, 4096), None);
        assert_eq!(me.end_within(&transfer, Duration::from_millis(100)), None);
        transfer
    });
    me.done(&transfer);
    assert_eq!(pattern.mismatch(&there, PART - 100, 4096, 0), None);
}

/// A peer's memory that our driver does not open, for want of a descriptor, is not refused by its owner: that write fails by an error of our own, and a
/// later one goes. Then its owner has it back.
fn memory_that_cannot_be_opened_now(case: &Case) {
    const BYTES: u64 = 4096;
    let (me, mut other, peer) = case.pair();
    let src = me.engine.alloc_gpu(0, 4096).expect("memory of GPU 0");
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, BYTES, 0);
    // By a handle.
    let (there, desc) = other.memory(&me, BYTES, Own::Test);
    let submit = || write(&me, peer, &src, &desc, (0, 0, BYTES), None);
    for _ in 0..3 {
        let end = without_descriptors(|| me.end(&submit()));
        assert!(is_of(end, WorkError::Unopened), "{end:?}");
    }
    me.done(&submit());
    let ask = Ask::Mismatch { region: there, offset: 0, len: BYTES, pattern, at: 0 };
    assert_eq!(other.place(&me, ask), None);
    let ms = u64::try_from(patience().as_millis()).expect("small");
    assert_eq!(other.ask(&me, Ask::Reclaim { region: there, ms }), Say::Fine);
}

/// Whether a piece failed for this.
fn is_of(end: End, why: WorkError) -> bool {
    matches!(end.ok(), Err(TransferError::Stopped(Stopped::Piece { error, .. })) if error == why)
}

/// The table of regions is full, so memory that was pinned for one more is unpinned again, for which the driver waits until the GPU is idle.
/// Only who registers waits with it: peers that ask for regions have their answers, and write, and are written to.
fn full_while_the_gpu_is_busy(case: &Case) {
    let (me, mut other, to) = case.pair();
    let back = only_peer(&me, &mut other);
    let (counter, tag) = other.counter(&me);
    let came = me.engine.counter().expect("a counter");
    let gpus = Device::count().expect("GPUs");
    // The last is the host's.
    let (from, _) = (0..=gpus).map(|_| other.memory(&me, 4096, Own::Engine)).last().expect("one");
    let new: Vec<_> = (0..5).map(|_| me.engine.alloc(4096).expect("memory")).collect();
    let register = |ptr, bytes| {
        // SAFETY: never unmapped, and no reference to the bytes is ever made.
        unsafe { me.engine.register(ptr, bytes, Rights::LOCAL) }
    };
    // A byte each, from the last on: none is a part of another.
    const MANY: usize = 1 << 15;
    let bytes = Lent::new(MANY).ptr;
    let mut all = Vec::new();
    let full = (0..MANY).rev().find_map(|at| {
        // SAFETY: inside the mapping.
        register(unsafe { bytes.add(at) }, 1).map(|region| all.push(region)).err()
    });
    let full = full.expect("no more than so many");
    assert!(matches!(full, RegisterError::TableFull { .. }), "{full}");
    std::thread::scope(|scope| {
        let busy = Busy::new();
        let registering = scope.spawn(|| register(Lent::new(4096).ptr, 4096).is_err());
        until_kept_waiting(|nap| me.linger(nap));
        for region in &new {
            // Asked for by the first write there.
            let (peer, src, src_offset, dst) = (plain(back), from, 0, encode(&region.desc()));
            let (dst_offset, len, came_by) = (0, 4096, Some(came.tag().bits()));
            let write = Write1 { peer, src, src_offset, dst, dst_offset, len, tag: came_by };
            other.post(Ask::Write(write));
            me.count(&came, 1, patience()).expect("it arrives");
            assert_eq!(other.answer(Some(&me)), Say::Text("Done".into()));
            me.done(&me.engine.submit_imm(to, tag, 1).expect("submit"));
            other.count(&me, counter, 1);
        }
        assert!(!registering.is_finished(), "nothing was to be unpinned");
        drop(busy);
        assert!(registering.join().expect("no panic"));
    });
    // That takes a while, and is the engine's end otherwise.
    all.into_iter().for_each(std::mem::forget);
}

/// Has the driver refuse the `nth` piece of a GPU's memory that is taken or set from now on; 0: none.
fn refuse_memory(nth: u32) {
    let call: extern "C" fn(u32) =
        driver_s(c"immwire_fake_cuda_refuse_memory").expect("only the stand-in refuses");
    call(nth);
}

/// An exchange of so many ranks, each of which has a GPU of its own, as far as there are enough.
fn exchange(rank: u32, world: u32) -> Config {
    let shape = Shape {
        firsts: (0..=world).collect(),
        top_k: 1,
        max_tokens: 4,
        payload: Payload::Raw { token_bytes: 32, scale_bytes: 0 },
        values: 16,
        results: Number::Bf16,
        padding: 1,
        exact: false,
    };
    let gpu = rank % Device::count().expect("GPUs");
    Config { rank, gpu, shape, sms: 2, timeout: patience() }
}

/// While the GPU is busy, memory for an exchange is refused, the first piece of it or a later one. What there was by then is given back, for which the
/// driver waits until the GPU is idle: whoever opens the exchange does not, nor does the engine.
fn no_memory_for_an_exchange_while_the_gpu_is_busy(case: &Case) {
    const BYTES: u64 = 4096;
    let (me, mut other, peer) = case.pair();
    let (counter, tag) = other.counter(&me);
    let src = me.engine.alloc_gpu(0, 4096).expect("memory of GPU 0");
    let (_, desc) = other.memory(&me, BYTES, Own::Engine);
    let submit = || write(&me, peer, &src, &desc, (0, 0, BYTES), Some(tag));
    me.done(&submit());
    other.count(&me, counter, 1);
    // Three pieces, each of which is taken, and then set. What is pinned after that waits for the GPU by itself.
    for nth in 1..=6 {
        let busy = Busy::new();
        let (said, heard) = channel();
        let engine = me.engine.clone();
        refuse_memory(nth);
        let opening = std::thread::spawn(move || {
            let _ = said.send(AllToAll::open(&engine, &exchange(0, 1)).map(drop));
        });
        let refused = heard.recv_timeout(patience()).expect("nobody waits for the GPU");
        refuse_memory(0);
        let why = refused.expect_err("it was refused");
        assert!(matches!(why, MoeError::Gpu(_)), "{nth}: {why}");
        me.done(&me.engine.submit_imm(peer, tag, 1).expect("submit"));
        other.count(&me, counter, 1);
        drop(busy);
        opening.join().expect("no panic");
        // Once all has been given back GPUs copy again.
        me.done(&submit());
        other.count(&me, counter, 1);
    }
}

/// All ranks have come to start over, and at one of them the driver refuses to clear its memory: it says so to the other, which need not wait until it
/// would be late.
fn refused_as_an_exchange_starts_over(case: &Case) {
    let hosts = [case.me(), case.me()];
    let open = |(rank, host): (u32, &Host)| {
        AllToAll::open(&host.engine, &exchange(rank, 2)).expect("an exchange")
    };
    let joining: Vec<Joining> = (0..).zip(&hosts).map(open).collect();
    let seats: Vec<Seat> = joining.iter().map(Joining::seat).collect();
    let start = Instant::now();
    let mut ends: Vec<MoeError> = std::thread::scope(|scope| {
        let seats = &seats;
        let join = |joining: Joining| {
            scope.spawn(move || joining.join(seats, patience()).expect("they are all there"))
        };
        let joined: Vec<_> = joining.into_iter().map(join).collect();
        let joined: Vec<_> = joined.into_iter().map(|rank| rank.join().expect("joined")).collect();
        refuse_memory(1);
        let begin = |mut rank: AllToAll| {
            scope.spawn(move || rank.start_over(10 * patience()).expect_err("one was refused"))
        };
        let ends: Vec<_> = joined.into_iter().map(begin).collect();
        ends.into_iter().map(|end| end.join().expect("no panic")).collect()
    });
    refuse_memory(0);
    assert!(start.elapsed() < 5 * patience(), "{:?}", start.elapsed());
    // Whose memory was to be cleared first.
    ends.sort_by_key(|end| matches!(end, MoeError::LeftOut { .. }));
    assert!(matches!(ends[..], [MoeError::Gpu(_), MoeError::LeftOut { .. }]), "{ends:?}");
}

/// An engine that was given no GPUs writes to memory of a peer's that is a GPU's: that is no refusal of the peer's. Other memory of the same
/// peer's is written to.
fn gpus_that_nobody_named(case: &Case) {
    let (mut other, address) = case.agent("other");
    // As engines are that have none.
    let provider = if case.facts().host.is_some() { "span-near" } else { "shm" };
    let me = Host::new(&Setup { provider: provider.into(), ..case.setup(1) });
    let peer = me.peer(&address);
    let src = me.engine.alloc(4096).expect("memory");
    let (counter, tag) = other.counter(&me);
    let gpus = Device::count().expect("GPUs");
    let own = [Own::Engine, Own::Test];
    let mut ends = Vec::new();
    for own in own {
        for _ in 0..gpus {
            let (_, desc) = other.memory(&me, 4096, own);
            // Asked for each time: whoever builds the engine anew need not.
            for _ in 0..3 {
                ends.push(me.end(&write(&me, peer, &src, &desc, (0, 0, 4096), Some(tag))));
            }
        }
        if own == Own::Engine {
            let (_, desc) = other.memory(&me, 4096, own);
            me.done(&write(&me, peer, &src, &desc, (0, 0, 4096), Some(tag)));
            other.count(&me, counter, 1);
        }
    }
    for end in ends {
        assert!(is_of(end, WorkError::NoGpus), "{end:?}");
    }
}

/// A peer says of a handle that it stands for more memory than it does. It has been opened when that is found out, and to close it the driver
/// waits for the GPU: whoever opens it does not.
fn handle_of_less_than_was_said(case: &Case) {
    const BYTES: u64 = 4 << 20;
    let (me, mut other, _) = case.pair();
    let Say::Message { bytes: handle, .. } = other.ask(&me, Ask::Handle { bytes: BYTES }) else {
        panic!("no handle")
    };
    let received = Received::Handle(handle.try_into().expect("as long as one"));
    let device = Device::open(0).expect("GPU 0");
    drop(Opened::new(&device, received, BYTES).expect("so much there is"));
    let busy = Busy::new();
    let (said, heard) = channel();
    let opening = std::thread::spawn(move || {
        // So much no driver adds to it.
        let _ = said.send(Opened::new(&device, received, 1 << 40));
    });
    let not = heard.recv_timeout(patience()).expect("nobody waits for the GPU");
    let Err(NotOpened { why, left }) = not else { panic!("{not:?}") };
    assert!(matches!(why, immwire_cuda::Error::OutOfBounds { end, .. } if end == 1 << 40), "{why}");
    drop(busy);
    opening.join().expect("no panic");
    assert!(left.expect("what was opened").close());
}

/// An engine ends as its GPU's warps leave without having looked at what they were asked for last: that ends with it, and is not waited for.
fn short_writes_at_the_end(case: &Case) {
    const DRAIN: Duration = Duration::from_secs(4);
    let made: extern "C" fn() -> u64 =
        driver_s(c"immwire_fake_cuda_stood_by").expect("the stand-in");
    let overlook: extern "C" fn(u32) = driver_s(c"immwire_fake_cuda_deaf").expect("the stand-in");
    let drain_ms = u64::try_from(DRAIN.as_millis()).expect("small");
    let stalls = Stalls::watch();
    let mut left = 0;
    for _ in 0..10 {
        let me = Host::new(&Setup { drain_ms, ..case.setup(1) });
        let (mut other, address) = case.agent("other");
        let peer = me.peer(&address);
        let (_, desc) = other.memory(&me, 4096, Own::Engine);
        let src = me.engine.alloc_gpu(0, 4096).expect("memory of GPU 0");
        let short = || write(&me, peer, &src, &desc, (0, 0, 64), None);
        // Two at a time: the second comes soon after the first.
        let before = made();
        let start = Instant::now();
        while made() == before {
            [short(), short()].iter().for_each(|transfer| me.done(transfer));
            assert!(start.elapsed() < patience(), "no warps stand by");
        }
        // They stay, and look at nothing.
        overlook(1);
        stick(true);
        let last = short();
        me.linger(Duration::from_millis(20));
        let start = Instant::now();
        std::thread::scope(|scope| {
            let ending = scope.spawn(move || {
                drop(me);
                drop(src);
            });
            std::thread::sleep(Duration::from_millis(100));
            stick(false);
            ending.join().expect("no panic");
        });
        assert_eq!(stalls.beyond(start, DRAIN / 2), None);
        overlook(0);
        left += u32::from(last.poll_end().expect("it ends") != End::Done);
    }
    assert!(left > 0, "warps were asked for nothing");
}
