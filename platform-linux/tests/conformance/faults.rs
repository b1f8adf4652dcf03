//! Peers that die, stop or fall silent, and NICs that fail: whoever is left gets a typed error in time,
//! and serves the others.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use immwire::core::group;
use immwire::{
    CountError, DownReason, End, Expected, MrDesc, PagedWrite, Pages, PeerId, PeerState, Transfer,
    TransferEngine, TransferError,
};
use rustix::process::Signal;

use crate::agent::{Agent, Ask, Say, Write1, encode, plain};
use crate::ends::flood;
use crate::host::{
    Foreign, Host, Memory, Motor, Own, Pattern, Setup, names, patience, patience_ms,
};
use crate::operations::{only_peer, write};
use crate::stalls::Stalls;
use crate::{Case, Spread, Test, foreign, life};

pub const TESTS: &[Test] = &[
    ("receiver_killed", Spread::ProcessesBothMotors, receiver_killed),
    ("full_receiver_killed", Spread::ProcessesBothMotors, full_receiver_killed),
    ("sender_killed", Spread::ProcessesBothMotors, sender_killed),
    ("down_before_refused", Spread::ProcessesBothMotors, down_before_refused),
    ("silent_peer", Spread::ProcessesBothMotors, silent_peer),
    ("not_run_for_a_while", Spread::Once, not_run_for_a_while),
    ("no_nic_left", Spread::Places, no_nic_left),
];

/// Where the death of a process is told, not the end of its connection only.
pub const DEATHS: &[Test] = &[
    ("forked_peer_killed", Spread::ProcessesBothMotors, forked_peer_killed),
    (
        "counted_when_the_forked_writer_is_killed",
        Spread::Once,
        life::counted_when_the_forked_writer_is_killed,
    ),
];

/// Where memory of a process that does not run is written all the same.
pub const WRITTEN_WHILE_STOPPED: &[Test] = &[
    ("peer_stopped", Spread::ProcessesBothMotors, peer_stopped),
    ("peer_stopped_in_the_bounce_ring", Spread::ProcessesBothMotors, |case| {
        peer_stopped_and_cut(case, Foreign::Bounce);
    }),
];

/// Where it is not.
pub const NOT_WRITTEN_WHILE_STOPPED: &[Test] = &[
    ("peer_held_up", Spread::ProcessesBothMotors, peer_held_up),
    ("peer_stopped_and_cut", Spread::ProcessesBothMotors, |case| {
        peer_stopped_and_cut(case, Foreign::Auto);
    }),
];

/// Where an engine can do without one of its NICs.
pub const WITH_SEVERAL_NICS: &[Test] =
    &[("nics_fail_and_return", Spread::Places, nics_fail_and_return)];

/// What has not moved for so long, in which an engine has served others so often, does not; but for heartbeats, which are no more than so many
/// meanwhile.
const STILL: Duration = Duration::from_millis(500);
const BEATS: u32 = 20;
const HEARTBEATS: u64 = 4;

/// How soon others are served, and waits end.
const SOON: Duration = Duration::from_secs(2);

/// A third engine, and proof that it is served.
struct Third {
    agent: Agent,
    peer: PeerId,
    there: usize,
    desc: MrDesc,
    src: Memory,
    rounds: u64,
    stalls: Stalls,
}

impl Third {
    fn new(case: &Case, me: &Host) -> Self {
        let (mut agent, address) = case.agent("third");
        let peer = me.peer(&address);
        let src = me.memory(300_000, Own::Engine);
        let (there, desc) = agent.memory(me, 300_000, Own::Engine);
        Self { agent, peer, there, desc, src, rounds: 0, stalls: Stalls::watch() }
    }

    /// Bytes, counts, and the way back.
    fn is_served(&mut self, me: &Host) {
        self.rounds += 1;
        let pattern = Pattern(self.rounds);
        pattern.fill(&self.src, 0, 300_000, 0);
        let (counter, tag) = self.agent.counter(me);
        let start = Instant::now();
        let transfer = write(me, self.peer, &self.src, &self.desc, (0, 0, 300_000), Some(tag));
        me.done(&transfer);
        self.is_soon(start, "the third engine is served");
        self.agent.count(me, counter, 1);
        self.agent.check(me, self.there, 0, 300_000, pattern);
        let back = only_peer(me, &mut self.agent);
        let mine = me.engine.counter().expect("a counter");
        let write = Write1 {
            peer: plain(back),
            src: self.there,
            src_offset: 0,
            dst: encode(&self.src.desc()),
            dst_offset: 0,
            len: 300_000,
            tag: Some(mine.tag().bits()),
        };
        self.agent.post(Ask::Write(write));
        me.count(&mine, 1, patience()).expect("the way back");
        self.agent.answer(Some(me));
    }

    /// What has just come to be did not take long from then on.
    fn is_soon(&self, start: Instant, what: &str) {
        assert_eq!(self.stalls.beyond(start, SOON), None, "{what}");
    }

    /// Nobody writes to this memory of ours any more, or will: it is given back soon.
    fn is_given_back(&self, me: &Host, mine: Memory) {
        let start = Instant::now();
        me.close(mine.region, patience()).expect("nobody writes");
        self.is_soon(start, "it is given back");
    }
}

/// A transfer that takes a while: `pages` of 4 KiB out of a region of 1 MiB, none next to the last.
fn pages(
    me: &Host,
    peer: PeerId,
    src: &Memory,
    desc: &MrDesc,
    pages: u32,
    imm: Option<immwire::ImmTag>,
    limit: Option<Duration>,
) -> Transfer {
    let list = |by: u32| Pages {
        indices: (0..pages).map(|i| i * by % 256).collect::<Vec<_>>().into(),
        stride: 4096,
        offset: 0,
    };
    let engine = limit.map_or_else(|| me.engine.clone(), |limit| me.engine.with_deadline(limit));
    let (src_pages, dst_pages) = (list(7), list(11));
    let write = PagedWrite { peer, page_bytes: 4096, src, src_pages, dst: desc, dst_pages, imm };
    engine.submit_paged_writes(&write).expect("submit")
}

/// How transfers to a peer end that was killed just now: soon, with its name; and it is down.
fn ends_of_the_dead(case: &Case, me: &Host, peer: PeerId, transfers: &[Transfer]) -> Vec<End> {
    let (stalls, killed) = (Stalls::watch(), Instant::now());
    let ends: Vec<_> = transfers.iter().map(|it| me.end(it)).collect();
    let late = stalls.beyond(killed, case.soon());
    // GPUs may have been through with some: they ask nobody for room.
    let may_be_done = |end| case.facts().has_gpus && end == End::Done;
    assert!(ends.iter().all(|&end| names(end, peer) || may_be_done(end)), "{ends:?}");
    assert_eq!(late, None, "ended");
    let ended = Instant::now();
    let state = me.peer_down(peer, patience());
    assert!(matches!(state, Some(PeerState::Down(DownReason::Disconnected))), "{state:?}");
    assert_eq!(stalls.beyond(ended, case.soon()), None, "down");
    ends
}

fn receiver_killed(case: &Case) {
    for &(way, own) in case.facts().ways {
        let (me, mut other, peer) = foreign::pair(case, way);
        let mut third = Third::new(case, &me);
        third.is_served(&me);
        let src = me.memory(1 << 20, Own::Engine);
        let (_, desc) = other.memory(&me, 1 << 20, own);
        let (_, tag) = other.counter(&me);
        let transfers: Vec<_> = (0..5)
            .map(|_| pages(&me, peer, &src, &desc, case.facts().pages_for_a_while, Some(tag), None))
            .collect();
        let some = if case.facts().has_gpus { 64 } else { 2000 };
        let under_way = || (me.engine.stats().completed > some).then_some(());
        assert!(me.until(patience(), under_way).is_some(), "{:?}", me.engine.stats());
        other.signal(Signal::KILL);
        let ends = ends_of_the_dead(case, &me, peer, &transfers);
        assert!(ends.iter().any(|&end| names(end, peer)), "{way:?}: too late");
        // What comes later is told the same.
        let end = me.end(&write(&me, peer, &src, &desc, (0, 0, 8), None));
        assert!(names(end, peer), "{way:?} {end:?}");
        third.is_served(&me);
    }
}

/// A peer that is killed in the middle of writing to us, while a child that it has forked holds its connection: it is down,
/// what we write to it ends, and our memory is given back.
fn forked_peer_killed(case: &Case) {
    for &(way, own) in case.facts().ways {
        let (me, mut other, peer) = foreign::pair(case, way);
        let mut third = Third::new(case, &me);
        let mine = me.memory(1 << 20, own);
        flood(&me, &mut other, &mine);
        let src = me.memory(1 << 20, Own::Engine);
        let (_, desc) = other.memory(&me, 1 << 20, own);
        other.tell(&me, Ask::Fork { ms: 60_000 });
        let transfers: Vec<_> = (0..5)
            .map(|_| pages(&me, peer, &src, &desc, case.facts().pages_for_a_while, None, None))
            .collect();
        let under_way = || (me.engine.stats().completed > 2000).then_some(());
        assert!(me.until(patience(), under_way).is_some(), "{:?}", me.engine.stats());
        other.signal(Signal::KILL);
        let ends = ends_of_the_dead(case, &me, peer, &transfers);
        assert!(ends.iter().any(|&end| names(end, peer)), "{way:?}: too late");
        third.is_given_back(&me, mine);
        third.is_served(&me);
    }
}

/// A peer whose engine is not polled, so that it takes nothing of what arrives: once it can be sent no more, nothing is in
/// flight to it. That it dies then is noticed all the same.
fn full_receiver_killed(case: &Case) {
    // For as long as this takes, on processors that are emulated, too, silence is no death.
    let limit = u64::try_from(patience().as_millis()).expect("small");
    let setup = |nics| Setup { silent_ms: Some(limit), ..case.setup(nics) };
    let me = Host::new(&setup(case.nics.0));
    let mut other = case.bare_agent("other");
    let address = other.build(&Setup { motor: Motor::Polled, ..setup(case.nics.1) });
    let peer = me.peer(&address);
    let mut third = Third::new(case, &me);
    third.is_served(&me);
    let src = me.memory(1 << 20, Own::Engine);
    let (_, desc) = other.memory(&me, 1 << 20, Own::Engine);
    let (_, tag) = other.counter(&me);
    // It is reached, and takes what comes, until it does nothing.
    me.done(&write(&me, peer, &src, &desc, (0, 0, 8), Some(tag)));
    other.post(Ask::Doze { ms: 60_000 });
    let transfers: Vec<_> = (0..5)
        .map(|_| pages(&me, peer, &src, &desc, case.facts().pages_for_a_while, Some(tag), None))
        .collect();
    // The engine goes on: it serves the third. If it has room for more, that moves as well.
    let (_, beat) = third.agent.counter(&me);
    let (mut from, mut beats, start) = (0, 0, Instant::now());
    while beats < BEATS {
        me.done(&me.engine.submit_imm(third.peer, beat, 1).expect("submit"));
        beats += 1;
        let now = me.engine.stats().completed;
        if now > from + u64::from(beats) + HEARTBEATS {
            (from, beats) = (now, 0);
        }
        me.linger(STILL / BEATS);
        assert!(start.elapsed() < patience(), "more and more is sent to it");
    }
    other.signal(Signal::KILL);
    ends_of_the_dead(case, &me, peer, &transfers);
    third.is_served(&me);
}

/// What an engine said of a peer at the moment at which a transfer's end was told.
struct Told {
    engine: TransferEngine,
    peer: PeerId,
    state: OnceLock<Option<PeerState>>,
}

impl Told {
    fn look(&self) {
        self.state.get_or_init(|| self.engine.peer_state(self.peer));
    }
}

impl Wake for Told {
    fn wake(self: Arc<Self>) {
        self.look();
    }
}

/// Whether it ended because the peer is down. That a connection broke under it is said sooner: it need not be the only one.
fn is_down(end: End) -> bool {
    let (End::NeverStarted { error } | End::Quiesced { error }) = end else { return false };
    matches!(
        error,
        TransferError::Stopped(group::TransferError::PeerDown { .. })
            | TransferError::Refused(
                group::SubmitError::PeerDown { .. } | group::SubmitError::NoSuchPeer { .. }
            )
    )
}

/// A peer dies while write after write to it is submitted. Whoever learns from a write's end that it is down, also of one that
/// comes just then and is refused, is told the same by the engine.
fn down_before_refused(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let src = me.memory(4096, Own::Engine);
    let (_, desc) = other.memory(&me, 4096, Own::Engine);
    let mut under_way = VecDeque::new();
    let mut is_refused = false;
    let start = Instant::now();
    for n in 0_u64.. {
        assert!(start.elapsed() < patience(), "nobody says that the peer is down");
        if n == 100 {
            other.signal(Signal::KILL);
        }
        let state = OnceLock::new();
        let told = Arc::new(Told { engine: me.engine.clone(), peer, state });
        let mut transfer = Box::pin(write(&me, peer, &src, &desc, (0, 0, 8), None));
        let waker = Waker::from(Arc::clone(&told));
        if Pin::new(&mut transfer).poll(&mut Context::from_waker(&waker)).is_ready() {
            told.look();
        }
        under_way.push_back((transfer, told));
        // One step, where it is we who make them: what was submitted before it is refused in that which finds the peer down.
        me.step();
        while let Some((transfer, told)) = under_way.front() {
            let limit = if under_way.len() < 64 { Duration::ZERO } else { patience() };
            let Some(end) = me.until(limit, || transfer.poll_end()) else { break };
            if is_down(end) {
                // Of what was under way it may be told first.
                is_refused |= matches!(end, End::NeverStarted { .. });
                me.until(patience(), || told.state.get().copied()).expect("woken");
                let state = told.state.get();
                let down = matches!(state, Some(Some(PeerState::Down(_))));
                assert!(down, "{n}: {end:?}, and the peer is {state:?}");
                if is_refused {
                    return;
                }
            }
            assert!(end == End::Done || names(end, peer), "{n}: {end:?}");
            under_way.pop_front();
        }
    }
}

fn sender_killed(case: &Case) {
    for &(way, own) in case.facts().ways {
        let me = case.me();
        let mut other = case.bare_agent("killed");
        let address = other.build(&Setup { foreign: way, ..case.setup(case.nics.1) });
        let peer = me.peer(&address);
        let mut third = Third::new(case, &me);
        let mine = me.memory(1 << 20, own);
        let counter = me.engine.counter().expect("a counter");
        let back = only_peer(&me, &mut other);
        let (src, _) = other.memory(&me, 1 << 20, Own::Engine);
        other.tell(
            &me,
            Ask::Flood(Write1 {
                peer: plain(back),
                src,
                src_offset: 0,
                dst: encode(&mine.desc()),
                dst_offset: 0,
                len: 1 << 20,
                tag: Some(counter.tag().bits()),
            }),
        );
        me.count(&counter, 5, patience()).expect("the flood comes");
        other.signal(Signal::KILL);
        let killed = Instant::now();
        let state = me.peer_down(peer, patience());
        assert!(matches!(state, Some(PeerState::Down(DownReason::Disconnected))), "{state:?}");
        assert_eq!(third.stalls.beyond(killed, case.soon()), None, "down");
        // Whoever waits for more is told of whom, in time.
        let start = Instant::now();
        let expected = [Expected { peer, writes: 1_000_000 }];
        let late = counter.wait_from(&expected, Duration::from_millis(50)).expect_err("dead");
        third.is_soon(start, "told");
        let CountError::Timeout { peers, .. } = &late else { panic!("{late:?}") };
        assert!(peers.iter().any(|share| share.peer == peer && share.arrived >= 5), "{late:?}");
        assert!(peers.iter().all(|share| share.state == state), "{late:?}");
        assert!(
            late.to_string().contains(&format!("({peer}, down: connection lost, sent ")),
            "{late}"
        );
        // Also where nobody said whose they are.
        let late = counter.wait(1_000_000, Duration::from_millis(50)).expect_err("dead");
        let CountError::Timeout { peers, .. } = &late else { panic!("{late:?}") };
        let of = peers.iter().find(|share| share.peer == peer);
        assert!(of.is_some_and(|it| it.arrived >= 5 && it.state == state), "{late:?}");
        third.is_served(&me);
        third.is_given_back(&me, mine);
    }
}

/// A peer that does not run: writes to its memory go on for as long as there is room to announce them,
/// waits end in time, others are served, and when it runs again nothing is lost.
fn peer_stopped(case: &Case) {
    // Where a GPU still makes copies when the drain is over, they end within another one.
    let me = Host::new(&Setup { drain_ms: 500, ..case.setup(case.nics.0) });
    let (mut other, address) = case.agent("other");
    let peer = me.peer(&address);
    let mut third = Third::new(case, &me);
    let src = me.memory(1 << 20, Own::Engine);
    let (there, desc) = other.memory(&me, 1 << 20, Own::Engine);
    let (counter, tag) = other.counter(&me);
    // It knows the region, so that what follows needs no answer.
    me.done(&write(&me, peer, &src, &desc, (0, 0, 8), None));
    other.signal(Signal::STOP);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, 1 << 20, 0);
    me.done(&write(&me, peer, &src, &desc, (0, 0, 1 << 20), Some(tag)));
    // More announcements than there is room for.
    let limit = Duration::from_millis(200);
    let start = Instant::now();
    let many = if case.facts().has_gpus { case.facts().pages_for_a_while } else { 5000 };
    let transfer = pages(&me, peer, &src, &desc, many, Some(tag), Some(limit));
    // Behind them; nobody stops it.
    let message = me.engine.submit_send(peer, b"when you run").expect("submit");
    third.is_served(&me);
    let end = me.end(&transfer);
    assert!(start.elapsed() >= limit, "{:?}", start.elapsed());
    third.is_soon(start, "ended");
    assert!(names(end, peer), "{end:?}");
    third.is_served(&me);
    let mine = me.engine.counter().expect("a counter");
    let waited = Instant::now();
    let late = mine.wait_from(&[Expected { peer, writes: 1 }], Duration::from_millis(50));
    assert!(matches!(late, Err(CountError::Timeout { .. })), "{late:?}");
    third.is_soon(waited, "told");
    other.signal(Signal::CONT);
    other.count(&me, counter, 1);
    // At its next heartbeat.
    let runs = Instant::now();
    assert_eq!(me.stands(peer), Some(PeerState::Up));
    third.is_soon(runs, "up again");
    me.done(&message);
    let (done, ms) = (Instant::now(), patience_ms());
    let Say::Message { bytes, .. } = other.ask(&me, Ask::Recv { ms }) else {
        panic!("no message");
    };
    third.is_soon(done, "received");
    assert_eq!(bytes, b"when you run");
    pattern.fill(&src, 0, 1 << 20, 0);
    me.done(&write(&me, peer, &src, &desc, (0, 0, 1 << 20), Some(tag)));
    other.check(&me, there, 0, 1 << 20, pattern);
}

/// The same, where nothing is written to it meanwhile: what was begun goes on when it runs again.
fn peer_held_up(case: &Case) {
    // For as long as this takes, silence is no death.
    let setup = Setup { silent_ms: Some(60_000), ..case.setup(1) };
    let me = Host::new(&setup);
    let mut other = case.bare_agent("held up");
    let address = other.build(&setup);
    let peer = me.peer(&address);
    let mut third = Third::new(case, &me);
    let src = me.memory(1 << 20, Own::Engine);
    let (there, desc) = other.memory(&me, 1 << 20, Own::Engine);
    let (counter, tag) = other.counter(&me);
    me.done(&write(&me, peer, &src, &desc, (0, 0, 8), None));
    other.signal(Signal::STOP);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, 1 << 20, 0);
    let transfers = [
        write(&me, peer, &src, &desc, (0, 0, 1 << 20), Some(tag)),
        pages(&me, peer, &src, &desc, 5000, Some(tag), None),
        write(&me, peer, &src, &desc, (0, 0, 1 << 20), Some(tag)),
    ];
    third.is_served(&me);
    let last = &transfers[2];
    assert_eq!(me.end_within(last, Duration::from_millis(1500)), None, "it does not run");
    third.is_served(&me);
    let mine = me.engine.counter().expect("a counter");
    let waited = Instant::now();
    let late = mine.wait_from(&[Expected { peer, writes: 1 }], Duration::from_millis(50));
    assert!(matches!(late, Err(CountError::Timeout { .. })), "{late:?}");
    third.is_soon(waited, "told");
    assert_eq!(me.engine.peer_state(peer), Some(PeerState::Up));
    other.signal(Signal::CONT);
    transfers.iter().for_each(|transfer| me.done(transfer));
    other.count(&me, counter, 5002);
    assert_eq!(other.number(&me, Ask::Available { counter }), 0);
    // The last one again: the pages have gone to other places than they came from.
    me.done(&write(&me, peer, &src, &desc, (0, 0, 1 << 20), None));
    other.check(&me, there, 0, 1 << 20, pattern);
}

/// A transfer to a peer that has to do something for it, and does not run, is forced to an end, and the
/// connection with it. The peer returns when it runs again.
fn peer_stopped_and_cut(case: &Case, foreign: Foreign) {
    let setup = Setup { foreign, drain_ms: 200, ..case.setup(1) };
    let me = Host::new(&setup);
    let (mut other, address) = case.agent("stopped");
    let peer = me.peer(&address);
    let back = only_peer(&me, &mut other);
    let mut third = Third::new(case, &me);
    let src = me.memory(1 << 20, Own::Engine);
    let (there, desc) = other.memory(&me, 1 << 20, Own::Test);
    me.done(&write(&me, peer, &src, &desc, (0, 0, 8), None));
    other.signal(Signal::STOP);
    let start = Instant::now();
    let limit = Duration::from_millis(200);
    let transfer = pages(&me, peer, &src, &desc, 5000, None, Some(limit));
    third.is_served(&me);
    let end = me.end(&transfer);
    assert!(start.elapsed() >= limit, "{:?}", start.elapsed());
    third.is_soon(start, "ended");
    assert!(names(end, peer), "{end:?}");
    third.is_served(&me);
    other.signal(Signal::CONT);
    // What it had not copied by then never comes; what the network still held, not to closed regions.
    if case.facts().flushes_at_the_receiver {
        let gone = other.ask(&me, Ask::Down { peer: plain(back), ms: patience_ms() });
        assert!(matches!(&gone, Say::Text(state) if state.contains("Down")), "{gone:?}");
    } else {
        other.tell(&me, Ask::Reclaim { region: there, ms: 5000 });
    }
    other.tell(&me, Ask::Poison { region: there, offset: 0, len: 1 << 20, byte: 0x99 });
    me.linger(Duration::from_millis(50));
    other.check_only(&me, there, 0, 1 << 20, 0x99);
    let again = me.peer(&address);
    let (_, desc) = other.memory(&me, 1 << 20, Own::Test);
    me.done(&write(&me, again, &src, &desc, (0, 0, 1 << 20), None));
    third.is_served(&me);
}

/// An engine whose process does not run for longer than it takes others to be silent, while several write to it as much as it takes and one has
/// nothing to say but that it is there: when it runs again nobody was silent.
fn not_run_for_a_while(case: &Case) {
    const WRITERS: u64 = 4;
    const WRITES: u64 = 100;
    // What comes late on a machine that has much to do comes within a quarter of it.
    let silent = Duration::from_secs(6);
    let mut held = case.bare_agent("held up");
    let silent_ms = u64::try_from(silent.as_millis()).ok();
    let address = held.build(&Setup { silent_ms, ..case.setup(1) });
    // They wait for longer, and are heard as often as it asks.
    let waits = || Host::new(&Setup { silent_ms: Some(60_000), ..case.setup(1) });
    let me = waits();
    let peer = me.peer(&address);
    let (counter, tag) = held.counter(&me);
    let (_, desc) = held.memory(&me, 4096, Own::Engine);
    let src = me.memory(4096, Own::Engine);
    me.done(&write(&me, peer, &src, &desc, (0, 0, 8), Some(tag)));
    let writers: Vec<_> = (0..WRITERS)
        .map(|_| {
            let host = waits();
            let (peer, src) = (host.peer(&address), host.memory(4096, Own::Engine));
            host.done(&write(&host, peer, &src, &desc, (0, 0, 8), Some(tag)));
            (host, peer, src)
        })
        .collect();
    held.count(&me, counter, 1 + WRITERS);
    held.signal(Signal::STOP);
    let mut transfers = Vec::new();
    for (host, peer, src) in &writers {
        for _ in 0..WRITES {
            transfers.push((host, write(host, *peer, src, &desc, (0, 0, 8), Some(tag))));
        }
    }
    me.linger(silent + silent / 4);
    held.signal(Signal::CONT);
    held.count(&me, counter, WRITERS * WRITES);
    for (host, transfer) in &transfers {
        host.done(transfer);
    }
    for (host, peer, src) in
        writers.iter().map(|(host, peer, src)| (host, *peer, src)).chain([(&me, peer, &src)])
    {
        host.done(&write(host, peer, src, &desc, (0, 0, 8), Some(tag)));
    }
    held.count(&me, counter, 1 + WRITERS);
}

fn silent_peer(case: &Case) {
    let silent = Duration::from_millis(2400);
    let silent_ms = u64::try_from(silent.as_millis()).ok();
    let me = Host::new(&Setup { silent_ms, ..case.setup(1) });
    let mut other = case.bare_agent("silent");
    let address = other.build(&Setup { silent_ms, ..case.setup(1) });
    let peer = me.peer(&address);
    let src = me.memory(4096, Own::Engine);
    let (_, desc) = other.memory(&me, 4096, Own::Engine);
    // As long as both live, idle or not, nobody is given up; nor suspected for longer than a processor is somebody else's.
    if !me.is_polled() {
        me.linger(2 * silent);
        assert_eq!(me.stands(peer), Some(PeerState::Up), "nobody was silent");
    }
    other.signal(Signal::STOP);
    let (stalls, stopped) = (Stalls::watch(), Instant::now());
    let state = me.peer_down(peer, patience());
    assert!(matches!(state, Some(PeerState::Down(DownReason::Silent { .. }))), "{state:?}");
    assert_eq!(stalls.beyond(stopped, silent + case.soon()), None);
    let end = me.end(&write(&me, peer, &src, &desc, (0, 0, 8), None));
    assert!(names(end, peer), "{end:?}");
    other.signal(Signal::CONT);
    let again = me.peer(&address);
    assert_ne!(again, peer);
    me.done(&write(&me, again, &src, &desc, (0, 0, 8), None));
}

/// NICs are taken out of use and put back while much is under way: all of it arrives, once, and every byte is where it belongs. Each transfer
/// has a place of its own until all are looked at, and then other bytes are written.
fn nics_fail_and_return(case: &Case) {
    // Under way at a time.
    const PLACES: u64 = 20;
    const LEN: u64 = 1 << 20;
    const SIZE: u64 = PLACES * LEN;
    let me = Host::new(&case.setup(4));
    let (mut other, address) = case.agent("other");
    let peer = me.peer(&address);
    let src = me.memory(SIZE, Own::Engine);
    let (there, desc) = other.memory(&me, SIZE, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let mut random = case.random();
    for lap in 0..15 {
        let pattern = case.pattern(lap);
        pattern.fill(&src, 0, SIZE, 0);
        let mut submitted = 0;
        let mut under_way = Vec::new();
        for place in 0..PLACES {
            let healthy = random.below(2) == 0;
            // The last one always stays.
            me.engine.set_nic_health(u8::try_from(random.below(3)).expect("small"), healthy);
            let offset = place * LEN;
            under_way.push(if (lap + place).is_multiple_of(3) {
                // Four times each page: page 7 i of the place goes to page 7 i, never one next to the last.
                let indices: Vec<u32> = (0..1024).map(|i| i * 7 % 256).collect();
                let pages = || Pages { indices: indices.clone().into(), stride: 4096, offset };
                let (page_bytes, imm) = (4096, Some(tag));
                let (src_pages, dst_pages) = (pages(), pages());
                let (src, dst) = (&src, &desc);
                let write = PagedWrite { peer, page_bytes, src, src_pages, dst, dst_pages, imm };
                submitted += 1024;
                me.engine.submit_paged_writes(&write).expect("submit")
            } else {
                submitted += 1;
                write(&me, peer, &src, &desc, (offset, offset, LEN), Some(tag))
            });
        }
        under_way.iter().for_each(|transfer| me.done(transfer));
        other.count(&me, counter, submitted);
        assert_eq!(other.number(&me, Ask::Available { counter }), 0);
        other.check(&me, there, 0, SIZE, pattern);
    }
    other.tell(&me, Ask::Poison { region: there, offset: 0, len: SIZE, byte: 0 });
    me.done(&write(&me, peer, &src, &desc, (0, 0, SIZE), None));
    other.check(&me, there, 0, SIZE, case.pattern(14));
}

fn no_nic_left(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let src = me.memory(1 << 20, Own::Engine);
    let (_, desc) = other.memory(&me, 1 << 20, Own::Engine);
    let set_all = |healthy| {
        for (nic, _) in (0..).zip(me.engine.nics()) {
            me.engine.set_nic_health(nic, healthy);
        }
    };
    set_all(false);
    let end = me.end(&write(&me, peer, &src, &desc, (0, 0, 8), None));
    let route = immwire::core::plan::PlanError::NoRoute { peer };
    let error = TransferError::Refused(immwire::core::group::SubmitError::Plan(route));
    assert_eq!(end, End::NeverStarted { error });
    set_all(true);
    me.done(&write(&me, peer, &src, &desc, (0, 0, 1 << 20), None));
}
