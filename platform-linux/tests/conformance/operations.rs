//! Every operation, done right: data arrive where they belong and nowhere else, counts are exact.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use immwire::core::imm::MAX_COUNTERS;
use immwire::core::mailbox::USER_COUNTERS;
use immwire::core::plan::RequestError;
use immwire::{
    CountError, CounterTaken, End, Expected, ImmTag, PagedWrite, Pages, PeerId, PeerState, Region,
    SingleWrite, Strays, SubmitError, TransferError,
};

use crate::agent::{Agent, Ask, Say, Write1, plain};
use crate::foreign::lost_and_back;
use crate::host::{Host, Own, patience};
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[
    ("single_writes", Spread::All, single_writes),
    ("paged_writes", Spread::All, paged_writes),
    ("immediates", Spread::All, immediates),
    ("messages", Spread::All, messages),
    ("posted_receives", Spread::All, posted_receives),
    ("early_arrivals", Spread::All, early_arrivals),
    ("callbacks_and_futures", Spread::All, callbacks_and_futures),
    ("a_future_of_a_count", Spread::All, a_future_of_a_count),
    ("stale_tags", Spread::All, stale_tags),
    ("who_is_missing", Spread::All, who_is_missing),
    ("early_writes_have_a_name", Spread::ProcessesBothMotors, early_writes_have_a_name),
    ("sixty_four_counters", Spread::Threads, sixty_four_counters),
    ("refused_before_posting", Spread::ProcessesBothMotors, refused_before_posting),
    ("a_slow_callback", Spread::Processes, a_slow_callback),
];

/// Writes `len` bytes, and announces them if there is a tag.
pub fn write(
    me: &Host,
    peer: PeerId,
    src: &Region,
    dst: &immwire::MrDesc,
    range: (u64, u64, u64),
    imm: Option<immwire::ImmTag>,
) -> immwire::Transfer {
    let (src_offset, dst_offset, len) = range;
    let write = SingleWrite { peer, src, src_offset, dst, dst_offset, len, imm };
    me.engine.submit_single_write(&write).expect("submit")
}

fn single_writes(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let (size, guard) = (160_u64 << 10, 0xa5);
    let src = me.memory(size, Own::Engine);
    let (there, desc) = other.memory(&me, size, Own::Engine);
    let (counter, tag) = other.counter(&me);
    for (n, &len) in [0, 1, 7, 63, 64, 65, 4095, 4096, 4097, 65_536].iter().enumerate() {
        let pattern = case.pattern(n as u64);
        for (src_offset, dst_offset) in [(0, 0), (3, 4097), (size - len, size - len)] {
            pattern.fill(&src, src_offset, len, 0);
            other.tell(&me, Ask::Poison { region: there, offset: 0, len: size, byte: guard });
            let transfer = write(&me, peer, &src, &desc, (src_offset, dst_offset, len), Some(tag));
            other.count(&me, counter, 1);
            other.check(&me, there, dst_offset, len, pattern);
            other.check_only(&me, there, 0, dst_offset, guard);
            other.check_only(&me, there, dst_offset + len, size - dst_offset - len, guard);
            me.done(&transfer);
            // Without an immediate: done means that it is there.
            let again = case.pattern(1000 + n as u64);
            again.fill(&src, src_offset, len, 0);
            me.done(&write(&me, peer, &src, &desc, (src_offset, dst_offset, len), None));
            other.check(&me, there, dst_offset, len, again);
        }
    }
    assert_eq!(other.number(&me, Ask::Available { counter }), 0);
}

fn paged_writes(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let mut random = case.random();
    let (counter, tag) = other.counter(&me);
    // Page size, stride, pages: dense, sparse, and pages of odd sizes.
    for (page, stride, pages) in
        [(4096, 4096, 0), (4096, 4096, 1), (4096, 4096, 257), (100, 112, 64), (1, 3, 300)]
    {
        let (offset, size) = (48, 48 + stride * pages.max(1));
        let (src, pattern) = (me.memory(size, Own::Engine), case.pattern(page));
        let (there, desc) = other.memory(&me, size, Own::Engine);
        pattern.fill(&src, 0, size, 0);
        other.tell(&me, Ask::Poison { region: there, offset: 0, len: size, byte: 0x5a });
        let mut from: Vec<u32> = (0..u32::try_from(pages).expect("small")).collect();
        let mut to = from.clone();
        random.shuffle(&mut from);
        random.shuffle(&mut to);
        let transfer = me.engine.submit_paged_writes(&PagedWrite {
            peer,
            page_bytes: page,
            src: &src,
            src_pages: Pages { indices: from.clone().into(), stride, offset },
            dst: &desc,
            dst_pages: Pages { indices: to.clone().into(), stride, offset },
            imm: Some(tag),
        });
        let transfer = transfer.expect("submit");
        other.count(&me, counter, pages);
        for (from, to) in from.iter().zip(&to).take(64) {
            let (from, to) = (offset + stride * u64::from(*from), offset + stride * u64::from(*to));
            let ask = Ask::Mismatch { region: there, offset: to, len: page, pattern, at: from };
            assert_eq!(other.place(&me, ask), None, "page of {page} from {from} to {to}");
            other.check_only(&me, there, to + page, stride - page, 0x5a);
        }
        other.check_only(&me, there, 0, offset, 0x5a);
        me.done(&transfer);
        assert_eq!(other.number(&me, Ask::Available { counter }), 0);
    }
}

fn immediates(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let (counter, tag) = other.counter(&me);
    for writes in [1, 2, 255] {
        me.done(&me.engine.submit_imm(peer, tag, writes).expect("submit"));
        other.count(&me, counter, u64::from(writes));
    }
    for writes in [0, 256, u16::MAX] {
        let refused = me.engine.submit_imm(peer, tag, writes).expect_err("refused");
        assert_eq!(refused, SubmitError::Request(RequestError::Writes { writes }));
    }
    // What engines say to each other is said by nobody else: the peer would take it for a broken protocol.
    let src = me.memory(64, Own::Engine);
    let (_, desc) = other.memory(&me, 64, Own::Engine);
    for slot in USER_COUNTERS..MAX_COUNTERS {
        let tag = ImmTag::new(slot, 0).expect("a tag");
        let reserved = SubmitError::Request(RequestError::Reserved { slot });
        let refused = me.engine.submit_imm(peer, tag, 1).expect_err("refused");
        assert_eq!(refused, reserved);
        for len in [0, 8, 64] {
            let (src, dst, imm) = (&src, &desc, Some(tag));
            let write = SingleWrite { peer, src, src_offset: 0, dst, dst_offset: 0, len, imm };
            for refused in [me.engine.submit_single_write(&write), me.try_submit(&write)] {
                assert_eq!(refused.expect_err("refused"), reserved);
            }
        }
    }
    // And the other way, over the same connection.
    let mine = me.engine.counter().expect("a counter");
    let back = only_peer(&me, &mut other);
    let ask = Ask::Imm { peer: plain(back), tag: mine.tag().bits(), writes: 3 };
    assert_eq!(other.ask(&me, ask), Say::Text("Done".into()));
    me.count(&mine, 3, patience()).expect("three");
    assert_eq!(mine.available(), 0);
}

/// The other side's only peer: us.
pub fn only_peer(me: &Host, other: &mut Agent) -> PeerId {
    match other.ask(me, Ask::Peers { count: 1 }) {
        Say::Peers(peers) if peers.len() == 1 => crate::agent::peer_of(peers[0]),
        other => panic!("{other:?}"),
    }
}

fn messages(case: &Case) {
    let (me, mut other, peer) = case.pair();
    // More than the mailbox has slots, none of them taken: they wait, and come in order.
    let sent: Vec<Vec<u8>> = (0..40_u8).map(|n| vec![n; usize::from(n) * 37]).collect();
    let transfers: Vec<_> =
        sent.iter().map(|bytes| me.engine.submit_send(peer, bytes).expect("submit")).collect();
    let back = only_peer(&me, &mut other);
    for bytes in &sent {
        let Say::Message { from, bytes: got } = other.ask(&me, Ask::Recv { ms: 20_000 }) else {
            panic!("no message of {} bytes", bytes.len())
        };
        assert_eq!((from, &got), (plain(back), bytes));
    }
    transfers.iter().for_each(|transfer| me.done(transfer));
    let echo = other.ask(&me, Ask::Send { peer: plain(back), bytes: b"back".to_vec() });
    assert_eq!(echo, Say::Text("Done".into()));
    let message = me.recv(patience()).expect("a message");
    assert_eq!((message.from, message.bytes.as_slice()), (peer, b"back".as_slice()));
    let long = vec![0; 1 << 20];
    let refused = me.engine.submit_send(peer, &long).expect_err("refused");
    assert!(matches!(refused, SubmitError::MessageTooLarge { len: 1_048_576, .. }), "{refused}");
    assert!(me.recv(Duration::from_millis(5)).is_err());
}

fn posted_receives(case: &Case) {
    let (me, mut other, _) = case.pair();
    let back = only_peer(&me, &mut other);
    let taken = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&taken);
    me.engine.submit_recvs(5, move |message| keep.lock().unwrap().push(message.bytes));
    for n in 0..6_u8 {
        let said = other.ask(&me, Ask::Send { peer: plain(back), bytes: vec![n] });
        assert_eq!(said, Say::Text("Done".into()));
    }
    let five = me.until(patience(), || (taken.lock().unwrap().len() == 5).then_some(()));
    assert!(five.is_some(), "{:?}", taken.lock().unwrap());
    assert_eq!(*taken.lock().unwrap(), (0..5).map(|n| vec![n]).collect::<Vec<_>>());
    // The sixth was not posted for.
    assert_eq!(me.recv(patience()).expect("the sixth").bytes, [5]);
}

fn early_arrivals(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let (counter, tag) = other.counter(&me);
    for _ in 0..10 {
        me.done(&me.engine.submit_imm(peer, tag, 1).expect("submit"));
    }
    other.count(&me, counter, 3);
    other.count(&me, counter, 7);
    let ask = Ask::Count { counter, writes: 1, ms: 20 };
    let Say::Text(late) = other.ask(&me, ask) else { panic!("counted what never came") };
    assert!(late.starts_with("1 of 1 writes had not arrived after 20ms"), "{late}");
    // What a timed-out wait saw is kept for the next.
    me.done(&me.engine.submit_imm(peer, tag, 2).expect("submit"));
    // Done is not yet counted, by an engine that has no processor.
    let start = Instant::now();
    while other.number(&me, Ask::Available { counter }) != 2 {
        assert!(start.elapsed() < patience(), "never counted");
    }
    let ask = Ask::Count { counter, writes: 5, ms: 20 };
    let Say::Text(late) = other.ask(&me, ask) else { panic!("counted what never came") };
    assert!(late.starts_with("3 of 5 writes had not arrived"), "{late}");
    assert_eq!(other.number(&me, Ask::Available { counter }), 2);
    me.done(&me.engine.submit_imm(peer, tag, 3).expect("submit"));
    other.count(&me, counter, 5);
    // try_take, on our side.
    let mine = me.engine.counter().expect("a counter");
    assert_eq!(mine.try_take(1), Ok(false));
    let back = only_peer(&me, &mut other);
    let ask = Ask::Imm { peer: plain(back), tag: mine.tag().bits(), writes: 2 };
    assert_eq!(other.ask(&me, ask), Say::Text("Done".into()));
    assert_eq!(me.until(patience(), || (mine.available() == 2).then_some(())), Some(()));
    assert_eq!(
        (mine.try_take(3), mine.try_take(2), mine.try_take(1)),
        (Ok(false), Ok(true), Ok(false))
    );
}

/// Sets a flag when woken.
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// The smallest executor: polls when woken, and only then.
fn run<F: Future>(me: &Host, future: F) -> F::Output {
    let flag = Arc::new(Flag(AtomicBool::new(true)));
    let waker = Waker::from(Arc::clone(&flag));
    let mut future = pin!(future);
    let done = me.until(patience(), || {
        if !flag.0.swap(false, Ordering::AcqRel) {
            return None;
        }
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    });
    done.expect("the future resolves")
}

fn callbacks_and_futures(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let len = 3 << 20;
    let src = me.memory(len, Own::Engine);
    let (_, desc) = other.memory(&me, len, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let seen = Arc::new(Mutex::new(Vec::new()));
    for round in 0..20_u64 {
        // Long ones are under way when asked about, short ones often over.
        let range = (0, 0, if round % 2 == 0 { len } else { 8 });
        let transfer = write(&me, peer, &src, &desc, range, Some(tag));
        let keep = Arc::clone(&seen);
        transfer.on_done(move |end| keep.lock().unwrap().push(end));
        assert_eq!(run(&me, write(&me, peer, &src, &desc, range, Some(tag))), End::Done);
    }
    let all = me.until(patience(), || (seen.lock().unwrap().len() == 20).then_some(()));
    assert!(all.is_some(), "{} of 20 callbacks", seen.lock().unwrap().len());
    assert!(seen.lock().unwrap().iter().all(|end| *end == End::Done));
    other.count(&me, counter, 40);
}

fn a_future_of_a_count(case: &Case) {
    let (me, mut other, _) = case.pair();
    let back = only_peer(&me, &mut other);
    let mine = Arc::new(me.engine.counter().expect("a counter"));
    let (called, calls) = (Arc::new(AtomicU64::new(0)), 6_u64);
    for round in 0..calls {
        let ask = Ask::Imm { peer: plain(back), tag: mine.tag().bits(), writes: 4 };
        // Before and after the wait begins, by turns.
        if round % 2 == 0 {
            other.post(ask.clone());
        }
        let count = Arc::clone(&called);
        let call = move |reached: Result<(), CountError>| {
            reached.expect("reached");
            count.fetch_add(1, Ordering::Relaxed);
        };
        if round % 3 == 0 {
            me.engine.expect_imm_count(&mine, 4, call).expect("armed");
        }
        if round % 2 == 1 {
            other.post(ask);
        }
        if round % 3 == 0 {
            let reached = || (called.load(Ordering::Relaxed) == round / 3 + 1).then_some(());
            assert!(me.until(patience(), reached).is_some(), "the callback of round {round}");
        } else {
            run(&me, mine.reached(4)).expect("reached");
        }
        assert_eq!(other.answer(Some(&me)), Say::Text("Done".into()));
        assert_eq!(mine.available(), 0, "round {round}");
    }
    // A future that is dropped takes nothing with it.
    {
        let mut future = pin!(mine.reached(2));
        let waker = Waker::noop();
        assert!(future.as_mut().poll(&mut Context::from_waker(waker)).is_pending());
        let busy = mine.wait(1, Duration::from_millis(1)).expect_err("armed by the future");
        assert_eq!(busy, CountError::Busy);
    }
    let ask = Ask::Imm { peer: plain(back), tag: mine.tag().bits(), writes: 2 };
    assert_eq!(other.ask(&me, ask), Say::Text("Done".into()));
    me.count(&mine, 2, patience()).expect("kept");
}

fn stale_tags(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let back = only_peer(&me, &mut other);
    let old = me.engine.counter_at(5).expect("free");
    let taken = me.engine.counter_at(5).expect_err("taken");
    assert_eq!(taken, CounterTaken::InUse { slot: 5 });
    let tag = old.tag();
    drop(old);
    let new = me.engine.counter_at(5).expect("free again");
    assert_ne!(new.tag(), tag);
    let before = me.engine.stats();
    for tag in [tag, new.tag()] {
        let ask = Ask::Imm { peer: plain(back), tag: tag.bits(), writes: 1 };
        assert_eq!(other.ask(&me, ask), Say::Text("Done".into()));
    }
    me.count(&new, 1, patience()).expect("the one of the new tag");
    let stale = me.until(patience(), || {
        let after = me.engine.stats();
        (after.stale_immediates == before.stale_immediates + 1).then_some(after)
    });
    let after = stale.unwrap_or_else(|| panic!("{:?}", me.engine.stats()));
    assert_eq!(after.refused_immediates, before.refused_immediates + 1);
    assert_eq!(new.available(), 0);
    // Who waits for what was sent elsewhere is told so; and whose counter is younger than that is not.
    let late = new.wait(1, Duration::from_millis(10)).expect_err("it went to the old tag");
    let CountError::Timeout { strays, .. } = late else { panic!("{late:?}") };
    assert_eq!(strays, Some(Strays { count: 1, peer, tag, instead: new.tag() }));
    let words = format!("1 immediate came that no counter takes, the last from {peer} for {tag} ");
    assert!(late.to_string().contains(&words), "{late}");
    let another = me.engine.counter().expect("a counter");
    let late = another.wait(1, Duration::from_millis(10)).expect_err("nothing was sent");
    assert!(matches!(late, CountError::Timeout { strays: None, .. }), "{late:?}");
}

fn who_is_missing(case: &Case) {
    let (me, mut one, first) = case.pair();
    let (mut two, address) = case.agent("second");
    let second = me.peer(&address);
    let mine = me.engine.counter().expect("a counter");
    let tag = mine.tag().bits();
    for (agent, writes) in [(&mut one, 3), (&mut two, 1)] {
        let back = only_peer(&me, agent);
        let ask = Ask::Imm { peer: plain(back), tag, writes };
        assert_eq!(agent.ask(&me, ask), Say::Text("Done".into()));
    }
    assert!(me.until(patience(), || (mine.available() == 4).then_some(())).is_some());
    let expected = [Expected { peer: first, writes: 3 }, Expected { peer: second, writes: 2 }];
    let late = mine.wait_from(&expected, Duration::from_millis(10)).expect_err("one is missing");
    let CountError::Timeout { target: 5, missing: 1, ref peers, .. } = late else {
        panic!("{late:?}")
    };
    let shares: Vec<_> = peers.iter().map(|p| (p.peer, p.arrived, p.expected)).collect();
    assert_eq!(shares, [(first, 3, Some(3)), (second, 1, Some(2))]);
    // Who was kept from running is suspected.
    let state = match peers[1].state {
        Some(PeerState::Up) => "",
        Some(PeerState::Suspect) => ", suspect,",
        other => panic!("{other:?}"),
    };
    assert!(late.to_string().contains(&format!("({second}{state} sent 1 of 2)")), "{late}");
    // The late one comes; then the same again, with the counts of the first round behind.
    for missing in [1, 2] {
        let back = only_peer(&me, &mut two);
        let ask = Ask::Imm { peer: plain(back), tag, writes: missing };
        assert_eq!(two.ask(&me, ask), Say::Text("Done".into()));
        if missing == 1 {
            assert!(me.until(patience(), || (mine.available() == 5).then_some(())).is_some());
            mine.wait_from(&expected, patience()).expect("all there");
        }
    }
    assert!(me.until(patience(), || (mine.available() == 2).then_some(())).is_some());
    let late = mine.wait_from(&expected, Duration::from_millis(10)).expect_err("three are missing");
    let CountError::Timeout { missing: 3, peers, .. } = late else { panic!("{late:?}") };
    assert_eq!(peers.iter().map(|p| p.arrived).collect::<Vec<_>>(), [0, 2]);
}

/// Writes that come before their counter is made, at a slot that was agreed on, are their peer's by name; and those of the counter
/// before, in the same slot, are not.
fn early_writes_have_a_name(case: &Case) {
    const SLOT: u16 = 37;
    let (me, mut one, first) = case.pair();
    let (mut two, address) = case.agent("second");
    let second = me.peer(&address);
    let send = |agent: &mut Agent, tag: ImmTag, writes| {
        let back = only_peer(&me, agent);
        let ask = Ask::Imm { peer: plain(back), tag: tag.bits(), writes };
        assert_eq!(agent.ask(&me, ask), Say::Text("Done".into()));
    };
    for round in 0..3 {
        let early = round == 0;
        if early {
            send(&mut one, ImmTag::new(SLOT, 0).expect("a tag"), 3);
        }
        let mine = me.engine.counter_at(SLOT).expect("a counter");
        if !early {
            send(&mut one, mine.tag(), 3);
        }
        assert!(me.until(patience(), || (mine.available() == 3).then_some(())).is_some());
        let expected = [Expected { peer: first, writes: 4 }, Expected { peer: second, writes: 2 }];
        let late = mine.wait_from(&expected, Duration::from_millis(10)).expect_err("missing");
        let CountError::Timeout { missing: 3, peers, .. } = late else { panic!("{late:?}") };
        assert_eq!(peers.iter().map(|p| p.arrived).collect::<Vec<_>>(), [3, 0], "round {round}");
        send(&mut one, mine.tag(), 1);
        send(&mut two, mine.tag(), 3);
        // Who waits does not poll.
        assert!(me.until(patience(), || (mine.available() == 7).then_some(())).is_some());
        mine.wait_from(&expected, patience()).expect("all there");
        let late = mine.wait_from(&expected, Duration::from_millis(10)).expect_err("missing");
        let CountError::Timeout { peers, .. } = late else { panic!("{late:?}") };
        assert_eq!(peers.iter().map(|p| p.arrived).collect::<Vec<_>>(), [0, 1], "round {round}");
    }
}

fn sixty_four_counters(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let mut random = case.random();
    let src = me.memory(1 << 20, Own::Engine);
    let (_, desc) = other.memory(&me, 1 << 20, Own::Engine);
    let counters: Vec<_> = (0..64).map(|_| other.counter(&me)).collect();
    // Counter `n` is to get n writes of 200 KiB, n immediates, and n pages: all of them mixed.
    let mut todo: Vec<(usize, u8)> =
        (0..64).flat_map(|n| (0..n).flat_map(move |_| [(n, 0), (n, 1)])).collect();
    todo.extend((1..64).map(|n| (n, 2)));
    random.shuffle(&mut todo);
    let mut under_way = std::collections::VecDeque::new();
    for (n, kind) in todo {
        let tag = counters[n].1;
        let transfer = match kind {
            0 => write(&me, peer, &src, &desc, (0, 0, 64 + 3000 * n as u64), Some(tag)),
            1 => me.engine.submit_imm(peer, tag, 1).expect("submit"),
            _ => {
                let pages: Vec<u32> =
                    (0..u32::try_from(n).expect("small")).map(|i| 2 * i).collect();
                let pages = Pages { indices: pages.into(), stride: 4096, offset: 0 };
                let write = PagedWrite {
                    peer,
                    page_bytes: 4096,
                    src: &src,
                    src_pages: pages.clone(),
                    dst: &desc,
                    dst_pages: pages,
                    imm: Some(tag),
                };
                me.engine.submit_paged_writes(&write).expect("submit")
            }
        };
        under_way.push_back(transfer);
        if under_way.len() > 500 {
            me.done(&under_way.pop_front().expect("500"));
        }
    }
    under_way.iter().for_each(|transfer| me.done(transfer));
    for (n, &(counter, _)) in counters.iter().enumerate() {
        other.count(&me, counter, 3 * n as u64);
    }
    for &(counter, _) in &counters {
        assert_eq!(other.number(&me, Ask::Available { counter }), 0);
    }
}

fn refused_before_posting(case: &Case) {
    let (me, mut other, mut peer) = case.pair();
    let src = me.memory(4096, Own::Engine);
    let (there, desc) = other.memory(&me, 4096, Own::Engine);
    other.tell(&me, Ask::Poison { region: there, offset: 0, len: 4096, byte: 7 });
    for (src_offset, dst_offset, len) in [
        (0, 1, 4096),
        (1, 0, 4096),
        (4097, 0, 0),
        (0, 4097, 0),
        (0, u64::MAX, 2),
        (u64::MAX, 0, 1),
        (0, 0, u64::MAX),
    ] {
        let write =
            SingleWrite { peer, src: &src, src_offset, dst: &desc, dst_offset, len, imm: None };
        assert!(me.engine.submit_single_write(&write).is_err(), "{src_offset} {dst_offset} {len}");
    }
    let pages = |list: &[u32]| Pages { indices: list.into(), stride: 1024, offset: 0 };
    for (from, to) in [(&[0, 1][..], &[0][..]), (&[4], &[0]), (&[0], &[4]), (&[u32::MAX], &[0])] {
        let write = PagedWrite {
            peer,
            page_bytes: 1024,
            src: &src,
            src_pages: pages(from),
            dst: &desc,
            dst_pages: pages(to),
            imm: None,
        };
        assert!(me.engine.submit_paged_writes(&write).is_err(), "{from:?} {to:?}");
    }
    // Another engine's memory, which no device of this one knows.
    let strange = case.me();
    let theirs = strange.memory(4096, Own::Engine);
    let write_from = SingleWrite {
        peer,
        src: &theirs,
        src_offset: 0,
        dst: &desc,
        dst_offset: 0,
        len: 8,
        imm: None,
    };
    let refused = me.engine.submit_single_write(&write_from);
    assert_eq!(refused.err(), Some(SubmitError::ForeignRegion));
    // Nobody's memory, and nobody.
    let mine = src.desc();
    let end = me.end(&write(&me, peer, &src, &mine, (0, 0, 8), None));
    assert!(matches!(end, End::NeverStarted { error: TransferError::Refused(_) }), "{end:?}");
    let nobody = PeerId { index: 77, generation: 9 };
    let end = me.end(&write(&me, nobody, &src, &desc, (0, 0, 8), None));
    assert!(matches!(end, End::NeverStarted { error: TransferError::Refused(_) }), "{end:?}");
    // A descriptor with the key of a region that was never there: the peer says no.
    let forged = immwire::MrDesc {
        keys: immwire::core::region::Keys::new(&vec![0x7_0000_0123; usize::from(desc.keys.nics())])
            .expect("keys"),
        ..desc
    };
    let end = me.end(&write(&me, peer, &src, &forged, (0, 0, 8), None));
    assert!(matches!(end, End::Quiesced { .. } | End::NeverStarted { .. }), "{end:?}");
    other.check_only(&me, there, 0, 4096, 7);
    if !case.facts().refuses_access_softly {
        peer = lost_and_back(case, &me, &mut other, peer);
    }
    me.done(&write(&me, peer, &src, &desc, (0, 0, 4096), None));
}

fn a_slow_callback(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let src = me.memory(4096, Own::Engine);
    let (_, desc) = other.memory(&me, 4096, Own::Engine);
    let (release, held) = std::sync::mpsc::channel::<()>();
    let over = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&over);
    write(&me, peer, &src, &desc, (0, 0, 8), None).on_done(move |_| {
        held.recv().expect("released");
        set.store(true, Ordering::Release);
    });
    // The engine goes on while the callback does not return.
    for _ in 0..1000 {
        me.done(&write(&me, peer, &src, &desc, (0, 0, 64), None));
    }
    assert!(!over.load(Ordering::Acquire));
    release.send(()).expect("waiting");
    assert!(me.until(patience(), || over.load(Ordering::Acquire).then_some(())).is_some());
    // The same at the other side: it writes to us while our callback is stuck.
    let back = only_peer(&me, &mut other);
    let there = other.memory(&me, 4096, Own::Engine).0;
    let dst = crate::agent::encode(&src.desc());
    let (peer, src) = (plain(back), there);
    let write = Write1 { peer, src, src_offset: 0, dst, dst_offset: 0, len: 64, tag: None };
    assert_eq!(other.ask(&me, Ask::Write(write)), Say::Text("Done".into()));
}
