//! Getting rid of one peer while others write: the endpoints that all share are replaced under them.
//!
//! Where nothing in flight to one peer can be taken back by itself, the engine closes the endpoint that it is on.
//! The others must not notice: not a transfer fails, and not a count is lost or doubled.

use std::time::{Duration, Instant};

use immwire::{End, PeerState};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

use crate::agent::{Agent, Ask, Flood, Write1, encode, plain};
use crate::host::{Host, Memory, Own, Setup, names, patience};
use crate::operations::{only_peer, write};
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[
    ("others_go_on", Spread::Once, |case| others_go_on(case, 20)),
    ("others_go_on_polled_4x4", Spread::Once, |case| {
        let motor = crate::host::Motor::Polled;
        others_go_on(&Case { nics: (4, 4), motor, ..*case }, 5);
    }),
    ("no_descriptors_for_new_endpoints", Spread::Once, no_descriptors_for_new_endpoints),
    ("in_the_place_of_one_that_leaves", Spread::Once, in_the_place_of_one_that_leaves),
];

const DRAIN: Duration = Duration::from_millis(200);
const LEN: u64 = 48 << 10;

/// One that is not to notice: it writes to us, and is written to.
struct Other {
    agent: Agent,
    peer: immwire::PeerId,
    /// Ours, to it.
    flood: Flood,
    counter: usize,
    /// Its, to us.
    mine: immwire::ImmCounter,
    seen: (u64, u64),
    _memory: [Memory; 2],
}

impl Other {
    fn new(case: &Case, me: &Host, name: &str) -> Self {
        let (mut agent, address) = me.meanwhile(|| case.agent(name));
        let peer = me.peer(&address);
        let (src, dst) = (me.memory(LEN, Own::Engine), me.memory(LEN, Own::Engine));
        let (there, desc) = agent.memory(me, LEN, Own::Engine);
        let (counter, tag) = agent.counter(me);
        let mine = me.engine.counter().expect("a counter");
        let write = |peer, src, desc: &immwire::MrDesc, tag: immwire::ImmTag| Write1 {
            peer: plain(peer),
            src,
            src_offset: 0,
            dst: encode(desc),
            dst_offset: 0,
            len: LEN,
            tag: Some(tag.bits()),
        };
        let back = only_peer(me, &mut agent);
        agent.tell(me, Ask::Flood(write(back, there, &dst.desc(), mine.tag())));
        let flood = Flood::of(me, &write(peer, 0, &desc, tag), src.region.clone());
        Self { agent, peer, flood, counter, mine, seen: (0, 0), _memory: [src, dst] }
    }

    /// Both floods go on: neither has failed.
    fn goes_on(&mut self, me: &Host, when: &str) {
        let more = || self.flood.done() > self.seen.0 + 4 || self.flood.failure().is_some();
        let moved = me.until(patience(), || more().then_some(()));
        let state = me.engine.peer_state(self.peer);
        assert_eq!(self.flood.failure(), None, "{when}: the peer is {state:?}");
        assert!(moved.is_some(), "{when}: nothing is written any more");
        self.seen.0 = self.flood.done();
        let start = Instant::now();
        while self.agent.number(me, Ask::Flooded) <= self.seen.1 + 4 {
            assert!(start.elapsed() < patience(), "{when}: it writes nothing any more");
            me.linger(Duration::from_millis(1));
        }
        self.seen.1 = self.agent.number(me, Ask::Flooded);
    }

    /// Both floods end, and every write was counted, once.
    fn must_be_exact(mut self, me: &Host) {
        // If one has failed, what it had in flight may have been counted, and is not among what it did.
        assert_eq!(self.flood.failure(), None, "at the end");
        self.agent.number(me, Ask::Flooded);
        let theirs = self.agent.number(me, Ask::Stop);
        me.count(&self.mine, theirs, patience()).expect("every write of its is counted");
        let ours = self.flood.stop(me);
        self.agent.count(me, self.counter, ours);
        me.linger(Duration::from_millis(20));
        assert_eq!(self.mine.available(), 0, "counted twice here, of {theirs}");
        let more = self.agent.number(me, Ask::Available { counter: self.counter });
        assert_eq!(more, 0, "counted twice there, of {ours}");
    }
}

fn others_go_on(case: &Case, rounds: u32) {
    let drain_ms = u64::try_from(DRAIN.as_millis()).expect("small");
    let me = Host::new(&Setup { drain_ms, ..case.setup(case.nics.0) });
    let mut others = ["one", "two", "three"].map(|name| Other::new(case, &me, name));
    let src = me.memory(1 << 20, Own::Engine);
    let (mut round, mut begun) = (0, Instant::now());
    while round < rounds {
        let (mut stopped, address) = me.meanwhile(|| case.agent("stopped"));
        let peer = me.peer(&address);
        let (_, desc) = stopped.memory(&me, 1 << 20, Own::Engine);
        me.done(&write(&me, peer, &src, &desc, (0, 0, 1 << 20), None));
        me.meanwhile(|| stopped.signal(Signal::STOP));
        // More than a connection holds, so that something stays in flight.
        let limit = Duration::from_millis(100);
        let hurried = me.engine.with_deadline(limit);
        let remove = round % 2 == 0;
        let engine = if remove { &me.engine } else { &hurried };
        let transfers: Vec<_> = (0..40)
            .map(|_| {
                let write = immwire::SingleWrite {
                    peer,
                    src: &src,
                    src_offset: 0,
                    dst: &desc,
                    dst_offset: 0,
                    len: 1 << 20,
                    imm: None,
                };
                engine.submit_single_write(&write).expect("submit")
            })
            .collect();
        me.linger(limit);
        let cut = Instant::now();
        if remove {
            me.engine.remove_peer(peer);
        }
        for (n, transfer) in transfers.iter().enumerate() {
            let end = me.end(transfer);
            // The first may have got there before it was stopped, as far as the kernel is concerned.
            assert!(end == End::Done || names(end, peer), "round {round}, {n}: {end:?}");
        }
        let took = cut.elapsed();
        assert!(took < DRAIN + Duration::from_secs(1), "round {round}: took {took:?}");
        let last = me.end(transfers.last().expect("40"));
        let forced = matches!(last, End::Quiesced { .. } | End::NeverStarted { .. });
        assert!(forced, "round {round}: {last:?}");
        let quiesced = |transfer| matches!(me.end(transfer), End::Quiesced { .. });
        if !transfers.iter().any(quiesced) {
            // The engine's thread did not run by then: all of it was taken back before any was begun.
            assert!(begun.elapsed() < patience(), "round {round}: nothing was in flight");
            me.engine.remove_peer(peer);
            me.meanwhile(|| stopped.signal(Signal::KILL));
            continue;
        }
        let state = me.peer_down(peer, patience());
        assert!(matches!(state, Some(PeerState::Down(_))), "round {round}: {state:?}");
        for other in &mut others {
            other.goes_on(&me, &format!("round {round}"));
        }
        if round % 4 == 3 {
            // It runs again, and is welcome again.
            stopped.signal(Signal::CONT);
            let again = me.peer(&address);
            me.done(&write(&me, again, &src, &desc, (0, 0, 1 << 20), None));
            me.engine.remove_peer(again);
        } else {
            me.meanwhile(|| stopped.signal(Signal::KILL));
        }
        (round, begun) = (round + 1, Instant::now());
    }
    for other in others {
        other.must_be_exact(&me);
    }
}

/// New endpoints cannot be opened for want of descriptors, some of them or all: what they took is given back, and when there are
/// some again what is in flight to one that does not run ends.
fn no_descriptors_for_new_endpoints(case: &Case) {
    let drain_ms = u64::try_from(DRAIN.as_millis()).expect("small");
    let me = Host::new(&Setup { drain_ms, ..case.setup(2) });
    let src = me.memory(1 << 20, Own::Engine);
    let mut held = Vec::new();
    for scarce in [false, false, true, false] {
        let (mut stopped, address) = me.meanwhile(|| case.agent("stopped"));
        let peer = me.peer(&address);
        let (_, desc) = stopped.memory(&me, 1 << 20, Own::Engine);
        me.done(&write(&me, peer, &src, &desc, (0, 0, 1 << 20), None));
        me.meanwhile(|| stopped.signal(Signal::STOP));
        let posted = me.engine.stats().posted;
        let transfers: Vec<_> =
            (0..40).map(|_| write(&me, peer, &src, &desc, (0, 0, 1 << 20), None)).collect();
        // Or what is taken back was never begun.
        let begins = || (me.engine.stats().posted > posted + 1).then_some(());
        me.until(patience(), begins).expect("it is begun");
        me.linger(Duration::from_millis(100));
        let before = getrlimit(Resource::Nofile);
        me.engine.remove_peer(peer);
        if scarce {
            for more in 0..24 {
                let most = held.iter().copied().max().expect("the first round") + more;
                setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..before })
                    .expect("less is allowed");
                me.linger(Duration::from_millis(60));
            }
            setrlimit(Resource::Nofile, before).expect("as before");
        }
        for transfer in &transfers {
            let end = me.end(transfer);
            assert!(end == End::Done || names(end, peer), "{end:?}");
        }
        assert!(transfers.iter().any(|it| matches!(me.end(it), End::Quiesced { .. })));
        me.peer_down(peer, patience());
        me.meanwhile(|| stopped.signal(Signal::KILL));
        drop(stopped);
        me.linger(Duration::from_millis(500));
        held.push(descriptors());
    }
    // Of a peer that is gone a transport may keep something, but not more where descriptors were short.
    let most = held[1] + 2 * held[1].saturating_sub(held[0]);
    let given_back = me.until(patience(), || (descriptors() <= most).then_some(()));
    assert!(given_back.is_some(), "{} descriptors, after {held:?}", descriptors());
}

/// Descriptors that this process has open.
fn descriptors() -> u64 {
    std::fs::read_dir("/proc/self/fd").expect("proc").count() as u64
}

/// A peer that is let go of while it does not run, and was about to write: another takes its place at once, and is reached, though a third takes
/// its time.
fn in_the_place_of_one_that_leaves(case: &Case) {
    let me = case.me();
    let (mut slow, address) = case.agent("slow");
    let slow_peer = me.peer(&address);
    let (mut next, next_address) = case.agent("next");
    let src = me.memory(64, Own::Engine);
    let counter = me.engine.counter().expect("a counter");
    for micros in [400, 600, 700, 800] {
        let (mut gone, address) = case.agent("gone");
        let peer = me.peer(&address);
        let back = plain(only_peer(&me, &mut gone));
        slow.signal(Signal::STOP);
        // It begins to write, and stops wherever it is then.
        gone.post(Ask::Imm { peer: back, tag: counter.tag().bits(), writes: 1 });
        std::thread::sleep(Duration::from_micros(micros));
        gone.signal(Signal::STOP);
        std::thread::sleep(Duration::from_millis(5));
        me.engine.remove_peer(peer);
        let found = me.engine.add_peer(&next_address).expect("a call");
        std::thread::sleep(Duration::from_millis(300));
        slow.signal(Signal::CONT);
        assert_eq!(me.engine.wait_peer(found, patience()), Ok(()), "{micros} us");
        let (_, desc) = next.memory(&me, 64, Own::Engine);
        me.done(&write(&me, found, &src, &desc, (0, 0, 64), None));
        me.engine.remove_peer(found);
        assert!(matches!(me.peer_down(found, patience()), None | Some(PeerState::Down(_))));
        assert_eq!(me.engine.peer_state(slow_peer), Some(PeerState::Up));
    }
}
