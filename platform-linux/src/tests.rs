//! Promises to callers at the edges of an engine's life, which the conformance suite cannot time.

mod sources;
#[path = "../tests/conformance/stalls.rs"]
mod stalls;

use std::future::Future;
use std::os::unix::ffi::OsStrExt;
use std::pin::pin;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use immwire_core::group as core_group;
use immwire_core::imm::ImmTag;
use immwire_core::mailbox::SendError;
use immwire_core::region::Rights;

use crate::{
    AccessError, AddPeerError, BuildError, CountError, Driver, End, ImmCounter, LivenessConfig,
    NetAddr, PagedWrite, Pages, PeerError, PeerId, PeerState, Region, SingleWrite, SubmitError,
    TransferEngine, TransferError,
};

use self::stalls::Stalls;

const LONG: Duration = Duration::from_secs(10);

/// An engine with a thread, and a peer of it that is called and does not answer.
fn with_silent_peer() -> (TransferEngine, PeerId, (TransferEngine, Driver)) {
    let engine = TransferEngine::builder().build().unwrap();
    let silent = TransferEngine::builder().build_polled().unwrap();
    let peer = engine.add_peer(silent.0.address()).unwrap();
    (engine, peer, silent)
}

/// Two engines with threads, the first of which knows the second.
fn pair() -> (TransferEngine, TransferEngine, PeerId) {
    let (a, b) =
        (TransferEngine::builder().build().unwrap(), TransferEngine::builder().build().unwrap());
    let peer = a.add_peer(b.address()).unwrap();
    a.wait_peer(peer, LONG).unwrap();
    (a, b, peer)
}

/// An engine with a thread that `driver`'s knows, and a counter of it.
fn met(driver: &mut Driver) -> (TransferEngine, ImmCounter, PeerId) {
    let other = TransferEngine::builder().build().unwrap();
    let counter = other.counter().unwrap();
    let peer = driver.add_peer(other.address()).unwrap();
    driver.wait_peer(peer, LONG).unwrap();
    (other, counter, peer)
}

fn address_of_nobody() -> NetAddr {
    TransferEngine::builder().build().unwrap().address().clone()
}

#[test]
fn callbacks_of_a_stopped_engine_are_called() {
    for polled in [false, true] {
        let (sender, calls) = mpsc::channel();
        let (engine, driver) = if polled {
            let (engine, driver) = TransferEngine::builder().build_polled().unwrap();
            (engine, Some(driver))
        } else {
            (TransferEngine::builder().build().unwrap(), None)
        };
        let (silent, _motor) = TransferEngine::builder().build_polled().unwrap();
        let peer = match driver {
            None => engine.add_peer(silent.address()).unwrap(),
            // Unknown: refused in the end, which is as good.
            Some(_) => PeerId { index: 3, generation: 0 },
        };
        let (early, late) = (engine.submit_send(peer, b"1"), engine.submit_send(peer, b"2"));
        let counter = Arc::new(engine.counter().unwrap());
        let tell = sender.clone();
        early.unwrap().on_done(move |end| tell.send(format!("{:?}", end.ok().is_ok())).unwrap());
        let tell = sender.clone();
        counter.on_count(1, move |got| tell.send(format!("{got:?}")).unwrap()).unwrap();
        drop((driver, engine));
        let said: Vec<String> = (0..2).map(|_| calls.recv_timeout(LONG).unwrap()).collect();
        assert!(said.contains(&"false".into()) && said.contains(&"Err(EngineStopped)".into()));
        late.unwrap().on_done(move |end| sender.send(format!("{:?}", end.ok().is_ok())).unwrap());
        assert_eq!(calls.try_recv().as_deref(), Ok("false"), "before `on_done` returned");
    }
}

/// The place of a transfer is free for the next as soon as somebody knows its end and has dropped the handle, or is called with it.
#[test]
fn a_transfer_that_has_ended_makes_room_for_the_next() {
    fn chain(
        engine: TransferEngine,
        peer: PeerId,
        tag: ImmTag,
        left: u32,
        over: mpsc::Sender<u32>,
    ) {
        let next = engine.submit_imm(peer, tag, 1).expect("the last one has ended");
        next.on_done(move |end| match left {
            _ if end != End::Done => panic!("{end:?}"),
            0 => over.send(left).unwrap(),
            left => chain(engine, peer, tag, left - 1, over),
        });
    }
    let builder = || TransferEngine::builder().transfers(1);
    let other = TransferEngine::builder().build().unwrap();
    let counter = other.counter().unwrap();
    let tag = counter.tag();
    let engine = builder().build().unwrap();
    let peer = engine.add_peer(other.address()).unwrap();
    engine.wait_peer(peer, LONG).unwrap();
    for _ in 0..500 {
        let transfer = engine.submit_imm(peer, tag, 1).expect("the last one has ended");
        assert_eq!(transfer.wait(LONG), Ok(End::Done));
    }
    let (over, said) = mpsc::channel();
    chain(engine.clone(), peer, tag, 20, over);
    assert_eq!(said.recv_timeout(LONG), Ok(0));
    let (engine, mut driver) = builder().build_polled().unwrap();
    let peer = driver.add_peer(other.address()).unwrap();
    driver.wait_peer(peer, LONG).unwrap();
    let (over, said) = mpsc::channel();
    chain(engine, peer, tag, 20, over);
    let start = Instant::now();
    while said.try_recv().is_err() {
        driver.poll();
        assert!(start.elapsed() < LONG);
    }
    counter.wait(500 + 2 * 21, LONG).unwrap();
    // Its last handle went with the last callback.
    assert!(driver.is_stopping());
    driver.sleep(LONG);
    assert!(start.elapsed() < LONG);
}

/// A wait that begins while the engine ends: it is told, and does not sit out its time.
#[test]
fn a_count_that_is_awaited_while_the_engine_stops_ends() {
    for round in 0..60 {
        let engine = TransferEngine::builder().build().unwrap();
        let counters: Vec<_> = (0..50).map(|_| engine.counter().unwrap()).collect();
        let waiting = std::thread::spawn(move || {
            let start = Instant::now();
            for counter in counters {
                assert!(counter.wait(1, LONG).is_err());
                assert!(start.elapsed() < LONG / 2, "it slept through the end");
            }
        });
        std::thread::sleep(Duration::from_micros(round * 7));
        drop(engine);
        waiting.join().unwrap();
    }
}

/// Cancelling again and again while nobody polls does not wait for room.
#[test]
fn cancelled_many_times_is_cancelled_once() {
    let silent = TransferEngine::builder().build_polled().unwrap();
    for capacity in [1, 3] {
        let built = TransferEngine::builder().transfers(capacity).build_polled().unwrap();
        let (engine, mut driver) = built;
        let peer = driver.add_peer(silent.0.address()).unwrap();
        for _ in 0..3 {
            let send = |_| engine.submit_send(peer, b"never").unwrap();
            let transfers: Vec<_> = (0..capacity).map(send).collect();
            for _ in 0..50 {
                transfers.iter().for_each(crate::Transfer::cancel);
            }
            let start = Instant::now();
            while transfers.iter().any(|it| it.poll_end().is_none()) && start.elapsed() < LONG {
                driver.poll();
            }
            let ends = transfers.iter().map(crate::Transfer::poll_end);
            assert!(ends.into_iter().all(|end| matches!(end, Some(End::NeverStarted { .. }))));
        }
    }
}

/// Anybody has the key of an empty secret: of a variable that is not set, say.
#[test]
fn a_group_key_of_nothing_is_refused() {
    let build = |secret: &[u8]| {
        TransferEngine::builder().group_key(crate::shm::GroupKey::derive(secret)).build_polled()
    };
    assert!(build(b"x").is_ok());
    assert!(matches!(build(b""), Err(BuildError::Config { found: 0, .. })));
}

#[test]
fn peers_that_would_be_given_up_before_they_are_heard_are_refused() {
    let build = |down_ms| {
        let builder = TransferEngine::builder().liveness_with(|usual| {
            usual.heartbeat = Duration::from_millis(50);
            usual.down_after = Duration::from_millis(down_ms);
        });
        builder.build_polled()
    };
    assert!(build(100).is_ok());
    assert!(matches!(build(99), Err(BuildError::Config { found: 99, .. })));
}

#[test]
fn a_mailbox_that_cannot_be_is_refused_by_what_is_wrong_with_it() {
    for (slots, bytes, said) in [
        (0, 65_536, "a mailbox must have 1 to 64 slots, not 0"),
        (65, 65_536, "a mailbox must have 1 to 64 slots, not 65"),
        (4, 100, "a mailbox must have slots of a multiple of 64 bytes, not 100"),
        (
            64,
            8 << 20,
            "a mailbox must have slots of 268435456 bytes together at most, not 536870912",
        ),
    ] {
        let built = TransferEngine::builder().mailbox(slots, bytes).build();
        assert_eq!(built.err().map(|error| error.to_string()).as_deref(), Some(said));
    }
}

#[test]
fn a_stopped_engine_answers_at_once() {
    let (engine, driver) = TransferEngine::builder().build_polled().unwrap();
    drop(driver);
    let start = Instant::now();
    assert!(matches!(engine.add_peer(&address_of_nobody()), Err(AddPeerError::NoAnswer)));
    assert!(start.elapsed() < Duration::from_secs(5));
}

/// A waker that holds the last handle of the engine that wakes it.
struct LastHandle(Mutex<Option<TransferEngine>>);

impl Wake for LastHandle {
    fn wake(self: Arc<Self>) {
        drop(self.0.lock().unwrap().take());
    }
}

#[test]
fn a_waker_may_drop_the_last_handle() {
    let (engine, peer, silent) = with_silent_peer();
    let counter = engine.counter().unwrap();
    let mut transfer = pin!(engine.submit_send(peer, b"never").unwrap());
    let waker = Waker::from(Arc::new(LastHandle(Mutex::new(Some(engine.clone())))));
    assert!(transfer.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    transfer.cancel();
    drop(engine);
    // The end comes; the engine's thread, having dropped the engine, goes on to end.
    assert_eq!(counter.wait(1, LONG), Err(CountError::EngineStopped));
    let polled = transfer.as_mut().poll(&mut Context::from_waker(&waker));
    assert!(matches!(polled, Poll::Ready(End::NeverStarted { .. })), "{polled:?}");
    drop(silent);
}

/// More messages than there is room for callbacks, and one callback that is slow: all come, in order.
#[test]
fn a_slow_callback_loses_no_message() {
    const MESSAGES: u32 = 4000;
    // As many have room, whoever is slow.
    const ROOM: u32 = 256;
    let (a, b, peer) = pair();
    let (go, wait) = mpsc::channel::<()>();
    let (got, calls) = mpsc::channel();
    let wait = Mutex::new(Some(wait));
    // As many as can be: that is no reason to make a list of them.
    b.submit_recvs(usize::MAX, move |message| {
        if let Some(wait) = wait.lock().unwrap().take() {
            wait.recv().unwrap();
        }
        got.send(u32::from_le_bytes(message.bytes.try_into().unwrap())).unwrap();
    });
    let send = |i: u32| a.submit_send(peer, &i.to_le_bytes()).unwrap();
    let mut sent = 0;
    let mut unsent = None;
    // Until the senders wait: nothing ends any more.
    while sent < MESSAGES {
        let transfer = send(sent);
        sent += 1;
        let limit = if sent <= ROOM { LONG } else { Duration::from_millis(300) };
        if transfer.wait(limit).is_err() {
            unsent = Some(transfer);
            break;
        }
    }
    let waits = unsent.is_some() && (ROOM + 1..1000).contains(&sent);
    assert!(waits, "{sent} were taken while the callback slept");
    go.send(()).unwrap();
    for i in sent..MESSAGES {
        assert_eq!(send(i).wait(LONG).unwrap(), End::Done);
    }
    for i in 0..MESSAGES {
        assert_eq!(calls.recv_timeout(LONG).unwrap(), i);
    }
}

/// What a posted receive holds goes with the engine, though handles of it live: be it one of these, or what somebody waits for.
#[test]
fn posted_receives_are_let_go_of_when_the_engine_stops() {
    for polled in [false, true] {
        let (engine, driver) = if polled {
            let (engine, driver) = TransferEngine::builder().build_polled().unwrap();
            (engine, Some(driver))
        } else {
            (TransferEngine::builder().build().unwrap(), None)
        };
        let (counter, held) = (engine.counter().unwrap(), engine.counter().unwrap());
        let (live, is_live) = mpsc::channel::<()>();
        let holds = (held, live.clone());
        engine.submit_recvs(1, move |_| drop((holds.0.tag(), holds.1.clone())));
        let holds = live;
        engine.submit_recvs(usize::MAX, move |_| drop(holds.clone()));
        assert_eq!(is_live.try_recv(), Err(mpsc::TryRecvError::Empty));
        if driver.is_some() {
            // The handle is there when the engine is not.
            drop(driver);
            assert_eq!(is_live.try_recv(), Err(mpsc::TryRecvError::Disconnected));
            let (late, is_late) = mpsc::channel::<()>();
            engine.submit_recvs(1, move |_| drop(late.clone()));
            assert_eq!(is_late.try_recv(), Err(mpsc::TryRecvError::Disconnected));
        }
        drop(engine);
        assert_eq!(is_live.try_recv(), Err(mpsc::TryRecvError::Disconnected), "{polled}");
        drop(counter);
    }
}

/// One that holds the engine's last handle lets go of it where callbacks run, and with no lock held.
#[test]
fn a_posted_receive_may_hold_the_engine() {
    let (engine, driver) = TransferEngine::builder().build_polled().unwrap();
    let (last, live) = (engine.clone(), Arc::new(()));
    let is_live = Arc::downgrade(&live);
    engine.submit_recvs(2, move |message| {
        let _ = (last.submit_send(message.from, &message.bytes), &live);
    });
    drop(engine);
    assert!(is_live.upgrade().is_some());
    drop(driver);
    assert!(is_live.upgrade().is_none());
}

/// The engine ends while more has arrived than may wait for callbacks: all that has come is given to them, and then they are let go of.
#[test]
fn what_has_arrived_is_given_to_posted_receives_at_the_end() {
    const MESSAGES: u32 = 300;
    let (a, b, peer) = pair();
    let counter = b.counter().unwrap();
    let (go, wait) = mpsc::channel::<()>();
    let (got, calls) = mpsc::channel();
    let wait = Mutex::new(Some(wait));
    b.submit_recvs(usize::MAX, move |message| {
        if let Some(wait) = wait.lock().unwrap().take() {
            wait.recv().unwrap();
        }
        got.send(u32::from_le_bytes(message.bytes.try_into().unwrap())).unwrap();
    });
    for i in 0..MESSAGES {
        assert_eq!(a.submit_send(peer, &i.to_le_bytes()).unwrap().wait(LONG), Ok(End::Done));
    }
    // What comes behind them has been taken, and so have they.
    let last = a.submit_imm(peer, counter.tag(), 1).unwrap();
    counter.wait(1, LONG).unwrap();
    drop(last);
    std::thread::scope(|scope| {
        scope.spawn(|| drop(b));
        // Its engine has begun to end.
        let start = Instant::now();
        while a.peer_state(peer) == Some(PeerState::Up) {
            assert!(start.elapsed() < LONG, "it does not leave");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(50));
        go.send(()).unwrap();
    });
    assert!(calls.try_iter().eq(0..MESSAGES));
    assert_eq!(calls.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    drop(counter);
}

/// Of memory that the process has mapped to read it a source is made as of any; who would write there is told.
#[test]
fn what_may_not_be_written_is_not() {
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
    const PAGE: usize = 64 << 10;
    let engine = TransferEngine::builder().build().unwrap();
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // Among the mappings of the process is one of a file whose name is no text.
    let folder = tempfile::tempdir().unwrap();
    let name = folder.path().join(std::ffi::OsStr::from_bytes(b"poids_\xe9.bin"));
    std::fs::write(&name, [7; 4096]).unwrap();
    let file = std::fs::File::open(&name).unwrap();
    let read = ProtFlags::READ;
    // SAFETY: the kernel chooses an address where nothing lies.
    unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, read, MapFlags::SHARED, &file, 0) }
        .unwrap();
    // SAFETY: the kernel chooses an address where nothing lies.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), 3 * PAGE, access, flags) }.unwrap();
    let at = NonNull::new(at.cast::<u8>()).unwrap();
    // SAFETY: never unmapped, and no reference to it is made.
    let register = |len| unsafe { engine.register(at, len, Rights::LOCAL) }.unwrap();
    let whole = register(3 * PAGE);
    let (first, second) = (PAGE as u64 - 1, PAGE as u64);
    whole.write(first, b"yes").unwrap();
    drop(whole);
    // SAFETY: a page of the mapping, to which there is no reference.
    unsafe { mprotect(at.as_ptr().add(PAGE).cast(), PAGE, MprotectFlags::READ) }.unwrap();
    let whole = register(3 * PAGE);
    for (offset, is_refused) in [
        (second, true),
        (first, true),
        (2 * second - 1, true),
        (0, false),
        (first - 1, false),
        (2 * second, false),
    ] {
        let refused = whole.write(offset, b"no") == Err(AccessError::ReadOnly);
        assert_eq!(refused, is_refused, "at {offset}");
    }
    whole.write(second, b"").unwrap();
    let mut bytes = [0; 2];
    whole.read(second, &mut bytes).unwrap();
    assert_eq!(&bytes, b"es");
    let part = whole.slice(second, second).unwrap();
    assert_eq!(part.write(1, b"no"), Err(AccessError::ReadOnly));
}

#[test]
fn a_count_that_is_polled_again_says_the_same() {
    let (engine, other, peer) = pair();
    let (counter, again) = (other.counter().unwrap(), Waker::noop());
    let context = &mut Context::from_waker(again);
    {
        let mut first = pin!(counter.reached(1));
        let mut second = pin!(counter.reached(1));
        assert!(first.as_mut().poll(context).is_pending());
        for _ in 0..2 {
            assert_eq!(second.as_mut().poll(context), Poll::Ready(Err(CountError::Busy)));
        }
    }
    for writes in [1, 2] {
        let sent = engine.submit_imm(peer, counter.tag(), writes).unwrap();
        assert_eq!(sent.wait(LONG), Ok(End::Done));
    }
    counter.wait(1, LONG).unwrap();
    let mut reached = pin!(counter.reached(1));
    while reached.as_mut().poll(context).is_pending() {}
    for _ in 0..2 {
        assert_eq!(reached.as_mut().poll(context), Poll::Ready(Ok(())));
    }
    assert_eq!(counter.wait(1, LONG), Ok(()), "it was consumed once");
    let mut never = pin!(counter.reached(1));
    assert!(never.as_mut().poll(context).is_pending());
    drop(other);
    for _ in 0..2 {
        assert_eq!(never.as_mut().poll(context), Poll::Ready(Err(CountError::EngineStopped)));
    }
}

/// A message that waits for its peer ends by its deadline, though nothing else happens: its engine sleeps until then, and no longer.
#[test]
fn a_waiting_message_wakes_its_engine_in_time() {
    let deadline = Duration::from_millis(100);
    let (silent, _motor) = TransferEngine::builder().build_polled().unwrap();
    let (engine, mut driver) = TransferEngine::builder().build_polled().unwrap();
    let peer = driver.add_peer(silent.address()).unwrap();
    driver.poll();
    let otherwise = driver.next_timeout();
    let start = Instant::now();
    let transfer = engine.with_deadline(deadline).submit_send(peer, b"1").unwrap();
    let due = driver.clock().now().after(deadline);
    assert!(otherwise > due, "something else happens");
    driver.poll();
    while transfer.poll_end().is_none() {
        assert!(driver.next_timeout() <= due, "it would sleep on");
        driver.sleep(LONG);
        assert!(start.elapsed() < LONG / 2, "it sleeps on");
        driver.poll();
    }
    assert!(matches!(transfer.poll_end(), Some(End::NeverStarted { .. })));
    assert!(start.elapsed() >= deadline, "{:?}", start.elapsed());
    // A thread that is asleep when the message comes would, if nobody woke it, sleep for a second.
    let (engine, peer, _silent) = with_silent_peer();
    std::thread::sleep(Duration::from_millis(20));
    let (stalls, start) = (Stalls::watch(), Instant::now());
    let transfer = engine.with_deadline(deadline).submit_send(peer, b"1").unwrap();
    assert!(matches!(transfer.wait(LONG).unwrap(), End::NeverStarted { .. }));
    assert_eq!(stalls.beyond(start, 4 * deadline), None);
    assert!(start.elapsed() >= deadline, "{:?}", start.elapsed());
}

#[test]
fn messages_that_wait_while_both_sides_call_each_other_arrive_once() {
    for round in 0..20_u8 {
        let mut both = [(); 2].map(|()| TransferEngine::builder().build_polled().unwrap());
        let addresses = [0, 1].map(|at: usize| both[at].0.address().clone());
        let mut sent = Vec::new();
        for (at, (engine, driver)) in both.iter_mut().enumerate() {
            let peer = driver.add_peer(&addresses[1 - at]).unwrap();
            sent.push([1, 2, 3].map(|n| engine.submit_send(peer, &[round, n]).unwrap()));
        }
        let mut got = [Vec::new(), Vec::new()];
        let start = Instant::now();
        while got.iter().any(|got| got.len() < 3) && start.elapsed() < LONG {
            for (got, (engine, driver)) in got.iter_mut().zip(&mut both) {
                driver.poll();
                got.extend(engine.recv(Duration::ZERO).map(|message| message.bytes));
            }
        }
        let wanted: Vec<Vec<u8>> = [1, 2, 3].map(|n| vec![round, n]).into();
        assert_eq!(got, [wanted.clone(), wanted]);
        for (sent, (_, driver)) in sent.iter().zip(&mut both) {
            for transfer in sent {
                driver.wait(transfer, LONG).unwrap().ok().unwrap();
            }
        }
    }
}

/// A waker that closes what the transfer was from.
struct Closes(Mutex<Option<Region>>, mpsc::Sender<bool>);

impl Wake for Closes {
    fn wake(self: Arc<Self>) {
        let region = self.0.lock().unwrap().take();
        let closed = region.is_none_or(|region| region.close(Duration::ZERO).is_ok());
        self.1.send(closed).unwrap();
    }
}

/// Whoever is told of an end may close the source at once, in the engine's thread too: nothing holds it any more.
#[test]
fn a_source_may_be_closed_by_whoever_is_told_of_the_end() {
    let (a, b, peer) = pair();
    let counter = b.counter().unwrap();
    let dst = b.alloc(64).unwrap();
    let (desc, tag) = (dst.desc(), counter.tag());
    let (told, closed) = mpsc::channel();
    let (mut pending, start) = (0, Instant::now());
    while pending < 20 {
        assert!(
            start.elapsed() < LONG,
            "{pending} transfers were pending when they were looked at"
        );
        // Asleep, the engine takes longer to end it than this thread to look.
        std::thread::sleep(Duration::from_millis(1));
        let src = a.alloc(64).unwrap();
        let (dst, imm) = (&desc, Some(tag));
        let write = SingleWrite { peer, src: &src, src_offset: 0, dst, dst_offset: 0, len: 8, imm };
        let mut transfer = pin!(a.submit_single_write(&write).unwrap());
        let waker = Waker::from(Arc::new(Closes(Mutex::new(Some(src)), told.clone())));
        if transfer.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            assert!(closed.recv_timeout(LONG).unwrap(), "the source was in use still");
            assert_eq!(transfer.poll_end(), Some(End::Done));
            pending += 1;
        }
    }
}

/// The same of transfers that never start: refused by the engine, or left over when it stops.
#[test]
fn a_source_may_be_closed_by_whoever_is_told_that_nothing_starts() {
    let other = TransferEngine::builder().build().unwrap();
    let (desc, tag) = (other.alloc(64).unwrap().desc(), other.counter().unwrap().tag());
    let nobody = PeerId { index: 3, generation: 7 };
    let (told, closed) = mpsc::channel();
    for polls in [true, false] {
        let (engine, mut driver) = TransferEngine::builder().build_polled().unwrap();
        let src = engine.alloc(64).unwrap();
        let (dst, imm) = (&desc, Some(tag));
        let write =
            SingleWrite { peer: nobody, src: &src, src_offset: 0, dst, dst_offset: 0, len: 8, imm };
        let mut transfer = pin!(engine.submit_single_write(&write).unwrap());
        let waker = Waker::from(Arc::new(Closes(Mutex::new(Some(src)), told.clone())));
        assert!(transfer.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        if polls {
            driver.poll();
        }
        drop(driver);
        assert!(closed.try_recv().unwrap(), "the source was in use still");
        assert!(matches!(transfer.poll_end(), Some(End::NeverStarted { .. })));
    }
}

/// A waker that says that it was woken.
struct Tells(mpsc::Sender<()>);

impl Wake for Tells {
    fn wake(self: Arc<Self>) {
        self.0.send(()).unwrap();
    }
}

/// A peer that comes up, room for a transfer, and the end of the engine: whoever waits for them by a future is woken.
#[test]
fn futures_of_a_peer_and_of_room_are_woken() {
    let (sender, woken) = mpsc::channel();
    let waker = Waker::from(Arc::new(Tells(sender)));
    let look = &mut Context::from_waker(&waker);
    let (engine, mut driver) = TransferEngine::builder().transfers(1).build_polled().unwrap();
    let other = TransferEngine::builder().build().unwrap();
    let peer = driver.add_peer(other.address()).unwrap();
    let mut up = pin!(engine.peer_up(peer));
    assert!(up.as_mut().poll(look).is_pending());
    drop(engine.peer_up(peer));
    driver.wait_peer(peer, LONG).unwrap();
    woken.try_recv().unwrap();
    assert_eq!(up.as_mut().poll(look), Poll::Ready(Ok(())));
    let nobody = PeerId { index: 3, generation: 7 };
    let unknown = Poll::Ready(Err(PeerError::Unknown { peer: nobody }));
    assert_eq!(pin!(engine.peer_up(nobody)).poll(look), unknown);

    let mut room = pin!(engine.capacity());
    assert_eq!(room.as_mut().poll(look), Poll::Ready(()));
    let counter = other.counter().unwrap();
    let transfer = engine.submit_imm(peer, counter.tag(), 1).unwrap();
    assert!(room.as_mut().poll(look).is_pending());
    driver.wait(&transfer, LONG).unwrap().ok().unwrap();
    assert!(woken.try_recv().is_err(), "a handle keeps the place");
    drop(transfer);
    woken.try_recv().unwrap();
    assert_eq!(room.as_mut().poll(look), Poll::Ready(()));

    // What nobody drives does not connect, nor end.
    let silent = TransferEngine::builder().build_polled().unwrap();
    let absent = driver.add_peer(silent.0.address()).unwrap();
    let _transfer = engine.submit_imm(peer, counter.tag(), 1).unwrap();
    let (mut up, mut room) = (pin!(engine.peer_up(absent)), pin!(engine.capacity()));
    assert!(up.as_mut().poll(look).is_pending() && room.as_mut().poll(look).is_pending());
    drop(driver);
    assert_eq!(woken.try_iter().count(), 2);
    assert!(matches!(up.poll(look), Poll::Ready(Err(PeerError::Down { .. }))));
    assert_eq!(room.poll(look), Poll::Ready(()));
}

/// A waker that says how a peer of the engine's stands.
struct Looks(TransferEngine, PeerId, mpsc::Sender<Option<PeerState>>);

impl Wake for Looks {
    fn wake(self: Arc<Self>) {
        self.2.send(self.0.peer_state(self.1)).unwrap();
    }
}

/// Whoever is told by a transfer that its peer is down finds it down, in the engine's thread too: of a peer that is removed, and
/// of one that ends, a write or message that was submitted before the engine knows is refused in the step that finds it out.
#[test]
fn whoever_is_told_that_a_peer_is_down_finds_it_down() {
    for (removed, is_message) in [(true, false), (false, false), (true, true), (false, true)] {
        let (engine, mut driver) = TransferEngine::builder().build_polled().unwrap();
        let (other, _counter, peer) = met(&mut driver);
        let (src, dst) = (engine.alloc(64).unwrap(), other.alloc(64).unwrap());
        // Too long to be written at once.
        let (dst, src) = (&dst.desc(), &src);
        let write =
            SingleWrite { peer, src, src_offset: 0, dst, dst_offset: 0, len: 64, imm: None };
        let (told, state) = mpsc::channel();
        let mut other = Some(other);
        let start = Instant::now();
        let refused = loop {
            assert!(start.elapsed() < LONG, "the peer is never down");
            let transfer = if is_message {
                engine.submit_send(peer, &[7; 64])
            } else {
                engine.submit_single_write(&write)
            };
            let mut transfer = pin!(transfer.unwrap());
            let waker = Waker::from(Arc::new(Looks(engine.clone(), peer, told.clone())));
            assert!(transfer.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            if let Some(other) = other.take() {
                if removed {
                    engine.remove_peer(peer);
                }
                drop(other);
            }
            driver.poll();
            match transfer.poll_end() {
                Some(End::NeverStarted { error }) => break error,
                _ => while state.try_recv().is_ok() {},
            }
        };
        let is_down = match refused {
            TransferError::Refused(error) => {
                !is_message && matches!(error, core_group::SubmitError::PeerDown { .. })
            }
            TransferError::Message(error) => is_message && error == SendError::Closed,
            _ => false,
        };
        assert!(is_down, "removed: {removed}, {refused:?}");
        let seen = state.try_recv().unwrap();
        assert!(matches!(seen, Some(PeerState::Down(_))), "removed: {removed}, {seen:?}");
    }
}

/// A polled engine whose last handle is gone takes nothing more, however small.
#[test]
fn a_stopping_engine_writes_nothing_at_once() {
    let (engine, mut driver) = TransferEngine::builder().build_polled().unwrap();
    let (other, counter, peer) = met(&mut driver);
    let (src, dst) = (engine.alloc(64).unwrap(), other.alloc(64).unwrap());
    let (dst, imm) = (&dst.desc(), Some(counter.tag()));
    let write = SingleWrite { peer, src: &src, src_offset: 0, dst, dst_offset: 0, len: 8, imm };
    for _ in 0..2 {
        let transfer = driver.submit_single_write(&write).unwrap();
        assert_eq!(driver.wait(&transfer, LONG), Ok(End::Done));
    }
    drop(engine);
    assert_eq!(driver.submit_single_write(&write).err(), Some(SubmitError::EngineStopped));
    counter.wait(2, LONG).unwrap();
    assert_eq!(counter.available(), 0);
}

/// What another engine has registered is not this one's to read from: that one may give the memory back meanwhile.
#[test]
fn a_source_is_a_region_of_the_same_engine() {
    let (engine, mut driver) = TransferEngine::builder().build_polled().unwrap();
    let (other, _counter, peer) = met(&mut driver);
    let (src, dst) = (engine.alloc(64).unwrap(), other.alloc(64).unwrap());
    let desc = dst.desc();
    let write = |src| SingleWrite {
        peer,
        src,
        src_offset: 0,
        dst: &desc,
        dst_offset: 0,
        len: 8,
        imm: None,
    };
    let pages = || Pages { indices: (&[0_u32][..]).into(), stride: 8, offset: 0 };
    let (src_pages, dst_pages) = (pages(), pages());
    let paged =
        PagedWrite { peer, page_bytes: 8, src: &dst, src_pages, dst: &desc, dst_pages, imm: None };
    for _ in 0..2 {
        let own = driver.submit_single_write(&write(&src)).unwrap();
        assert_eq!(driver.wait(&own, LONG), Ok(End::Done));
        // By the thread that polls, and by handle; at once, had it been its own.
        let refused = [
            driver.submit_single_write(&write(&dst)),
            engine.submit_single_write(&write(&dst)),
            engine.submit_paged_writes(&paged),
        ];
        for refused in refused {
            assert_eq!(refused.err(), Some(SubmitError::ForeignRegion));
        }
    }
}

/// A small write to memory that is mapped is done when it was submitted, however its end is asked for, takes nobody's
/// place, and has arrived; one that something stands before is not, and ends like any other.
#[test]
fn a_small_write_to_this_host_is_done_when_it_was_submitted() {
    let (engine, mut driver) = TransferEngine::builder().transfers(4).build_polled().unwrap();
    let (other, counter, peer) = met(&mut driver);
    let (src, dst) = (engine.alloc(1 << 20).unwrap(), other.alloc(1 << 20).unwrap());
    let (desc, tag) = (dst.desc(), counter.tag());
    let write = |at: u64, len: u64| SingleWrite {
        peer,
        src: &src,
        src_offset: at,
        dst: &desc,
        dst_offset: at,
        len,
        imm: Some(tag),
    };
    // The first one finds out what the memory is.
    let first = driver.submit_single_write(&write(0, 8)).unwrap();
    assert_eq!((first.poll_end(), driver.wait(&first, LONG)), (None, Ok(End::Done)));
    drop(first);
    let before = engine.stats();
    let (told, ends) = mpsc::channel();
    // More than there is room for: each is over before the next one.
    let mut held = Vec::new();
    for at in 1..50_u64 {
        src.write(at * 8, &at.to_le_bytes()).unwrap();
        let mut transfer = driver.submit_single_write(&write(at * 8, 8)).unwrap();
        assert_eq!(transfer.poll_end(), Some(End::Done));
        transfer.cancel();
        assert_eq!(transfer.wait(Duration::ZERO), Ok(End::Done));
        let mut context = Context::from_waker(Waker::noop());
        let polled = std::pin::Pin::new(&mut transfer).poll(&mut context);
        assert_eq!(polled, Poll::Ready(End::Done));
        assert!(format!("{transfer:?}").contains("Done"));
        if at % 2 == 0 {
            let told = told.clone();
            transfer.on_done(move |end| told.send(end).unwrap());
        } else {
            held.push(transfer);
        }
    }
    // Before a step may tell the peer that it is there.
    let stats = engine.stats();
    driver.poll();
    assert_eq!(ends.try_iter().collect::<Vec<_>>(), [End::Done; 24]);
    counter.wait(50, LONG).unwrap();
    let mut arrived = [0; 8];
    for at in 1..50_u64 {
        dst.read(at * 8, &mut arrived).unwrap();
        assert_eq!(u64::from_le_bytes(arrived), at);
    }
    assert_eq!((stats.posted - before.posted, stats.completed - before.completed), (49, 49));
    // Not so: what is longer than the provider writes at once, what is out of bounds, what comes after a question.
    let long = driver.submit_single_write(&write(0, 1 << 20)).unwrap();
    assert_eq!(driver.wait(&long, LONG), Ok(End::Done));
    assert!(driver.submit_single_write(&write((1 << 20) - 4, 8)).is_err());
    engine.set_nic_health(0, false);
    let lost = driver.submit_single_write(&write(0, 8)).unwrap();
    assert!(driver.wait(&lost, LONG).unwrap().ok().is_err());
    counter.wait(1, LONG).unwrap();
    assert_eq!(counter.available(), 0);
}

/// What was asked of a polled engine is done before what is submitted after it, by whichever way: its NIC was lost
/// and is back, or is lost.
#[test]
fn a_polled_engine_answers_before_it_takes_what_was_submitted_later() {
    let (engine, mut driver) = TransferEngine::builder().build_polled().unwrap();
    let (other, counter, peer) = met(&mut driver);
    let (src, dst) = (engine.alloc(64).unwrap(), other.alloc(64).unwrap());
    let (desc, tag) = (dst.desc(), counter.tag());
    let write = SingleWrite {
        peer,
        src: &src,
        src_offset: 0,
        dst: &desc,
        dst_offset: 0,
        len: 8,
        imm: Some(tag),
    };
    for round in 0..20 {
        for healthy in [false, true] {
            // Each way in turn is the first to come after the change.
            engine.set_nic_health(0, healthy);
            let submitted = match round % 3 {
                0 => driver.submit_single_write(&write),
                1 => driver.submit_imm(peer, tag, 1),
                _ => engine.submit_single_write(&write),
            };
            let end = driver.wait(&submitted.unwrap(), LONG).unwrap();
            assert_eq!(end == End::Done, healthy, "round {round}: {end:?}");
        }
    }
}

/// What was submitted before a peer is asked to part is of use to the connection, whether or not the engine has had time to take it.
#[test]
fn what_was_submitted_is_of_use_before_it_is_taken() {
    let idle = Duration::from_millis(200);
    let liveness = LivenessConfig {
        heartbeat: Duration::from_millis(50),
        idle_after: idle,
        ..LivenessConfig::default()
    };
    // Each with a peer of its own: when a write has ended, whoever is kept from running just then may ask to part.
    for _ in 0..5 {
        let builder = TransferEngine::builder().liveness(liveness);
        let (engine, mut driver) = builder.build_polled().unwrap();
        let (other, counter, peer) = met(&mut driver);
        let (src, dst) = (engine.alloc(64).unwrap(), other.alloc(64).unwrap());
        let write = SingleWrite {
            peer,
            src: &src,
            src_offset: 0,
            dst: &dst.desc(),
            dst_offset: 0,
            len: 64,
            imm: Some(counter.tag()),
        };
        let transfer = engine.submit_single_write(&write).unwrap();
        // The caller has something else to do.
        std::thread::sleep(idle * 3 / 2);
        assert_eq!(driver.wait(&transfer, LONG), Ok(End::Done));
        assert_eq!(engine.peer_state(peer), Some(PeerState::Up));
        counter.wait(1, LONG).unwrap();
    }
}

/// Who is polled a few times in the time that its peers wait for a word of it is not silent, though it has nothing else to do.
#[test]
fn an_engine_that_is_polled_seldom_is_heard() {
    // Nobody is kept from running for ten times as long.
    const POLLED: Duration = Duration::from_millis(250);
    let config = |down_after| LivenessConfig {
        heartbeat: POLLED / 5,
        suspect_after: 4 * POLLED,
        down_after,
        ..LivenessConfig::default()
    };
    let (engine, mut driver) =
        TransferEngine::builder().liveness(config(Duration::MAX)).build_polled().unwrap();
    let other = TransferEngine::builder().liveness(config(10 * POLLED)).build().unwrap();
    let peer = driver.add_peer(other.address()).unwrap();
    driver.wait_peer(peer, LONG).unwrap();
    for _ in 0..16 {
        std::thread::sleep(POLLED);
        driver.poll();
        assert_eq!(other.peers().len(), 1, "the other has given it up");
    }
    // The other may have been kept from running just now.
    let start = Instant::now();
    while engine.peer_state(peer) == Some(PeerState::Suspect) && start.elapsed() < LONG {
        driver.poll();
    }
    assert_eq!(engine.peer_state(peer), Some(PeerState::Up));
}

/// Polls `seldom`, as one does a few times a second, and the other in between as one that does nothing else, until it is `done`. Returns how
/// often the former was polled: however late that is, it is not more often.
fn polls_until(seldom: &mut Driver, other: &mut Driver, done: impl Fn() -> bool) -> u32 {
    // More than go by between two looks at its sockets, though all of the time be a stall.
    const STEPS: u32 = 300;
    let mut polls = 0;
    while polls < 1000 {
        let (start, mut steps) = (Instant::now(), 0);
        while steps < STEPS || start.elapsed() < Duration::from_millis(50) {
            other.poll();
            if done() {
                return polls;
            }
            steps += 1;
        }
        seldom.poll();
        polls += 1;
    }
    panic!("not after {polls} polls");
}

/// Who calls an engine that is polled a few times a second is answered, and so is its first write.
#[test]
fn an_engine_that_is_polled_seldom_is_met() {
    let (engine, mut driver) = TransferEngine::builder().build_polled().unwrap();
    let (other, mut caller) = TransferEngine::builder().build_polled().unwrap();
    let (src, dst) = (other.alloc(64).unwrap(), engine.alloc(64).unwrap());
    let peer = caller.add_peer(engine.address()).unwrap();
    let is_up = || other.peer_state(peer) == Some(PeerState::Up);
    // Three seconds' worth.
    let needed = polls_until(&mut driver, &mut caller, is_up);
    assert!(needed <= 60, "{needed} polls to be met");
    let desc = dst.desc();
    let write = SingleWrite {
        peer,
        src: &src,
        src_offset: 0,
        dst: &desc,
        dst_offset: 0,
        len: 64,
        imm: None,
    };
    let transfer = other.submit_single_write(&write).unwrap();
    let needed = polls_until(&mut driver, &mut caller, || transfer.poll_end().is_some());
    assert_eq!(transfer.poll_end(), Some(End::Done));
    // One second's.
    assert!(needed <= 20, "{needed} polls to be written to");
}

/// The place of a peer that was removed is another's at once.
#[test]
fn a_peer_takes_the_place_of_one_that_was_removed() {
    let (engine, mut driver) = TransferEngine::builder().peers(1).build_polled().unwrap();
    let others: [_; 3] = std::array::from_fn(|_| TransferEngine::builder().build().unwrap());
    for other in &others {
        let peer = driver.add_peer(other.address()).unwrap();
        driver.wait_peer(peer, LONG).unwrap();
        engine.remove_peer(peer);
    }
}

/// An engine that was not polled for longer than a peer may be silent hears first what the peer has said meanwhile.
#[test]
fn a_peer_is_not_silent_while_nobody_listens() {
    let limit = Duration::from_millis(400);
    let liveness = LivenessConfig {
        heartbeat: limit / 40,
        suspect_after: limit / 2,
        down_after: limit,
        ..LivenessConfig::default()
    };
    let builder = TransferEngine::builder().liveness(liveness);
    let (engine, mut driver) = builder.build_polled().unwrap();
    // By this thread, too: it says something whenever it is to, before the engine looks, however late either is.
    let (other, mut talks) = TransferEngine::builder().build_polled().unwrap();
    let peer = driver.add_peer(other.address()).unwrap();
    let start = Instant::now();
    while engine.peer_state(peer) != Some(PeerState::Up) {
        talks.poll();
        driver.poll();
        assert!(start.elapsed() < LONG, "{:?}", engine.peer_state(peer));
    }
    for _ in 0..2 {
        let start = Instant::now();
        while start.elapsed() < 2 * limit {
            std::thread::sleep(Duration::from_millis(1));
            talks.poll();
        }
        // More steps than go by between two looks at the clock.
        for _ in 0..40 {
            talks.poll();
            driver.poll();
        }
        assert_eq!(engine.peer_state(peer), Some(PeerState::Up));
    }
}
