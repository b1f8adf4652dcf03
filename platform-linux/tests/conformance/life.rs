//! Beginnings and ends of engines: nothing is left behind, whatever was going on.

use std::time::{Duration, Instant};

use immwire::core::id::EngineId;
use immwire::{DownReason, End, NetAddr, PeerState, SingleWrite, SubmitError, TransferError};
use rustix::process::Signal;

use crate::agent::{Agent, Ask, Say, Write1, encode, plain};
use crate::host::{Foreign, Host, Motor, Own, Setup, is_emulated, patience, patience_ms};
use crate::operations::{only_peer, write};
use crate::stalls::Stalls;
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[
    ("sender_stops_under_load", Spread::ProcessesBothMotors, |case| stop_under_load(case, true)),
    ("receiver_stops_under_load", Spread::ProcessesBothMotors, |case| stop_under_load(case, false)),
    ("both_stop_in_one_process", Spread::ProcessesBothMotors, both_stop),
    ("returning_peer", Spread::Places, returning_peer),
    ("called_again_at_once", Spread::ProcessesBothMotors, called_again_at_once),
    ("calls_after_a_pause", Spread::Once, calls_after_a_pause),
    ("full_and_capacity", Spread::Places, full_and_capacity),
    ("waits_end_with_the_engine", Spread::Once, waits_end_with_the_engine),
    ("handles_outlive_the_engine", Spread::Once, handles_outlive_the_engine),
    ("idle_costs_nothing", Spread::Once, idle_costs_nothing),
    ("let_go_when_not_used", Spread::Once, let_go_when_not_used),
    ("parting_loses_nothing", Spread::ProcessesBothMotors, parting_loses_nothing),
    ("nobody_oversleeps", Spread::Threads, nobody_oversleeps),
    ("messages_outlive_their_sender", Spread::ProcessesBothMotors, messages_outlive_their_sender),
    ("addresses_that_lead_nowhere", Spread::ProcessesBothMotors, addresses_that_lead_nowhere),
];

/// At queue pairs: they take messages though nobody polls, and hold nothing for a caller that it could be too late for.
pub const AT_QUEUE_PAIRS: &[Test] = &[("pauses_in_a_call", Spread::Once, pauses_in_a_call)];

/// Where memory of a process that does not run is written all the same, over several NICs.
pub const TOO_LATE: &[Test] =
    &[("counted_when_the_writer_is_gone", Spread::Once, counted_when_the_writer_is_gone)];

/// Threads, and what each open file is.
type Census = (u64, Vec<String>);

fn census(case: &Case, me: &Host, agent: &mut Agent) -> Census {
    match agent.ask(me, Ask::Census { gpus: case.facts().has_gpus }) {
        Say::Census { threads, files } => (threads, files),
        other => panic!("{other:?}"),
    }
}

/// Sockets that libfabric was seen to forget at an engine's end: five, of connections that were being made.
const FORGOTTEN_MAX: usize = 8;

/// What an agent had before its engines, and whether any of them has left nothing behind.
struct Tidy {
    before: Census,
    one_was_clean: bool,
}

impl Tidy {
    fn new(case: &Case, me: &Host, agent: &mut Agent) -> Self {
        Self { before: census(case, me, agent), one_was_clean: false }
    }

    /// Waits until the agent's threads and files are as many as before its last engine. Where sockets are forgotten now
    /// and then, they may be a few more.
    fn check(&mut self, case: &Case, me: &Host, agent: &mut Agent) {
        // A thread that was joined may be listed for a moment more; that of a flood ends by itself.
        let (stalls, start) = (Stalls::watch(), Instant::now());
        let mut now = census(case, me, agent);
        while now != self.before && stalls.beyond(start, Duration::from_secs(2)).is_none() {
            me.linger(Duration::from_millis(2));
            now = census(case, me, agent);
        }
        let is_clean = now == self.before;
        let before = std::mem::replace(&mut self.before, now.clone());
        let but_sockets = |census: &Census| {
            let others = census.1.iter().filter(|file| *file != "socket");
            (census.0, others.cloned().collect::<Vec<_>>())
        };
        let may_be = !case.facts().closes_all_sockets
            && but_sockets(&now) == but_sockets(&before)
            && now.1.len() <= before.1.len() + FORGOTTEN_MAX;
        assert!(is_clean || may_be, "threads and files, after and before: {now:?}, {before:?}");
        self.one_was_clean |= is_clean;
    }

    /// After all engines.
    fn judge(&self) {
        assert!(self.one_was_clean, "each engine leaves sockets behind: {:?}", self.before);
    }
}

/// One agent floods another, and one of them stops. Neither leaves anything behind, nor waits long.
fn stop_under_load(case: &Case, sender_stops: bool) {
    let (me, stalls) = (case.me(), Stalls::watch());
    for &(foreign, own) in case.facts().ways {
        let (mut sender, mut receiver) = (case.bare_agent("sender"), case.bare_agent("receiver"));
        let mut tidy = (Tidy::new(case, &me, &mut sender), Tidy::new(case, &me, &mut receiver));
        for round in 0..3 {
            let setup = Setup { foreign, ..case.setup(if round == 2 { 4 } else { 1 }) };
            sender.build(&setup);
            let address = receiver.build(&setup);
            let peer = sender.peer(&me, &address);
            // Places of the agent's own lists; those of earlier rounds are gone.
            let (src, _) = sender.memory(&me, 1 << 20, Own::Engine);
            let (_, desc) = receiver.memory(&me, 1 << 20, own);
            let (counter, tag) = receiver.counter(&me);
            sender.tell(
                &me,
                Ask::Flood(Write1 {
                    peer: plain(peer),
                    src,
                    src_offset: 0,
                    dst: encode(&desc),
                    dst_offset: 0,
                    len: 1 << 20,
                    tag: Some(tag.bits()),
                }),
            );
            receiver.count(&me, counter, 10);
            let start = Instant::now();
            let (first, second) = if sender_stops {
                (&mut sender, &mut receiver)
            } else {
                (&mut receiver, &mut sender)
            };
            first.tell(&me, Ask::Drop);
            assert_eq!(stalls.beyond(start, Duration::from_secs(4)), None, "took too long");
            let known = if sender_stops { None } else { Some(peer) };
            if let Some(peer) = known {
                let dropped = Instant::now();
                let down = second.ask(&me, Ask::Down { peer: plain(peer), ms: patience_ms() });
                assert_eq!(down, Say::Text("Some(Down(Disconnected))".into()), "{foreign:?}");
                assert_eq!(stalls.beyond(dropped, Duration::from_secs(2)), None, "{foreign:?}");
            }
            second.tell(&me, Ask::Drop);
            assert_eq!(stalls.beyond(start, Duration::from_secs(6)), None, "took too long");
            tidy.0.check(case, &me, &mut sender);
            tidy.1.check(case, &me, &mut receiver);
        }
        tidy.0.judge();
        tidy.1.judge();
    }
}

/// Both engines in one process, of which nothing is left afterwards.
fn both_stop(case: &Case) {
    let me = case.me();
    // The agent's process hosts one engine, and the flood comes from a thread agent in it.
    let mut agent = case.bare_agent("both");
    let mut tidy = Tidy::new(case, &me, &mut agent);
    for round in 0..5 {
        let setup = case.setup(if round % 2 == 0 { 1 } else { 4 });
        match agent.ask(&me, Ask::LoadAndDrop(setup)) {
            Say::Text(end) => assert_ne!(end, "Done", "round {round}: not caught on its way"),
            other => panic!("{other:?}"),
        }
        tidy.check(case, &me, &mut agent);
    }
    tidy.judge();
}

/// A peer leaves, and calls again before it can know what was heard of that: what it writes then is counted as what it wrote before.
fn called_again_at_once(case: &Case) {
    const WRITES: u64 = 100;
    let me = case.me();
    let (mut other, address) = case.agent("other");
    let src = me.memory(WRITES, Own::Engine);
    let (there, desc) = other.memory(&me, WRITES, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, WRITES, 0);
    for _ in 0..12 {
        let peer = me.peer(&address);
        other.tell(&me, Ask::Poison { region: there, offset: 0, len: WRITES, byte: 0xa5 });
        let one = |at| write(&me, peer, &src, &desc, (at, at, 1), Some(tag));
        let transfers: Vec<_> = (0..WRITES).map(one).collect();
        transfers.iter().for_each(|transfer| me.done(transfer));
        other.count(&me, counter, WRITES);
        other.check(&me, there, 0, WRITES, pattern);
        me.engine.remove_peer(peer);
    }
}

/// A peer that went and came back is another peer; its old name stays refused.
fn returning_peer(case: &Case) {
    let me = case.me();
    let mut other = case.bare_agent("returning");
    let src = me.memory(4096, Own::Engine);
    let mut old = Vec::new();
    let mut last = None;
    for round in 0..6 {
        let address = other.build(&case.setup(case.nics.1));
        let peer = me.peer(&address);
        let (there, desc) = other.memory(&me, 4096, Own::Engine);
        let pattern = case.pattern(round);
        pattern.fill(&src, 0, 4096, 0);
        assert!(!old.contains(&peer), "{peer} again");
        for &gone in &old {
            let end = me.end(&write(&me, gone, &src, &desc, (0, 0, 64), None));
            assert!(
                matches!(end, End::NeverStarted { error: TransferError::Refused(_) }),
                "{end:?}"
            );
        }
        // What described the memory of the last engine does not describe that of the new one.
        if let Some(stale) = last.replace(desc) {
            let end = me.end(&write(&me, peer, &src, &stale, (0, 0, 64), None));
            assert!(
                matches!(end, End::NeverStarted { error: TransferError::Refused(_) }),
                "{end:?}"
            );
        }
        me.done(&write(&me, peer, &src, &desc, (0, 0, 4096), None));
        other.check(&me, there, 0, 4096, pattern);
        // It leaves, or we leave it, or it calls us again without having left.
        match round % 3 {
            0 => other.tell(&me, Ask::Drop),
            1 => me.engine.remove_peer(peer),
            _ => {
                me.engine.remove_peer(peer);
                let state = me.peer_down(peer, patience());
                assert_eq!(state, Some(PeerState::Down(DownReason::Removed)));
                // The same engine calls, once it knows that it was left: a new peer.
                let Say::Peers(mut names) = other.ask(&me, Ask::Peers { count: 0 }) else {
                    panic!("names")
                };
                if let Some(peer) = names.pop() {
                    let down = other.ask(&me, Ask::Down { peer, ms: patience_ms() });
                    assert!(format!("{down:?}").contains("Down("), "{down:?}");
                }
                let back = other.peer(&me, me.engine.address());
                let tag = me.engine.counter().expect("a counter");
                let ask = Ask::Imm { peer: plain(back), tag: tag.tag().bits(), writes: 1 };
                assert_eq!(other.ask(&me, ask), Say::Text("Done".into()));
                me.count(&tag, 1, patience()).expect("one");
                let now = me.engine.peers();
                assert!(now.len() == 1 && now[0] != peer, "{now:?}");
                old.push(now[0]);
                me.engine.remove_peer(now[0]);
            }
        }
        let state = me.peer_down(peer, patience());
        assert!(matches!(state, Some(PeerState::Down(_))), "{state:?}");
        old.push(peer);
        other.tell(&me, Ask::Drop);
        let none = me.until(patience(), || me.engine.peers().is_empty().then_some(()));
        assert!(none.is_some(), "{:?}", me.engine.peers());
    }
}

/// A polled engine that nobody has polled for longer than any call takes to be given up calls as any other does.
fn calls_after_a_pause(case: &Case) {
    let me = Host::new(&Setup { motor: Motor::Polled, ..case.setup(case.nics.0) });
    let (_other, address) = case.agent("other");
    me.step();
    std::thread::sleep(Duration::from_secs(4));
    me.peer(&address);
}

/// One that nobody polls after it has called, for longer than an answer may take: the answer lies there, and the rest of the call follows.
fn pauses_in_a_call(case: &Case) {
    let me = Host::new(&Setup { motor: Motor::Polled, ..case.setup(case.nics.0) });
    // From then on it is known how a peer there is reached.
    let (_first, known) = case.agent("first");
    me.peer(&known);
    let (_other, address) = case.agent("other");
    let peer = me.call(&address).expect("a call");
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(me.met(peer), Ok(()));
}

/// Full is an answer, and one can wait for the opposite.
fn full_and_capacity(case: &Case) {
    let me = Host::new(&Setup { transfers: 4, ..case.setup(case.nics.0) });
    let (mut other, address) = case.agent("other");
    let peer = me.peer(&address);
    let size = 8 << 20;
    let src = me.memory(size, Own::Engine);
    let (_, desc) = other.memory(&me, size, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let (mut under_way, mut full) = (Vec::new(), 0);
    let single = immwire::SingleWrite {
        peer,
        src: &src,
        src_offset: 0,
        dst: &desc,
        dst_offset: 0,
        len: size,
        imm: Some(tag),
    };
    for _ in 0..100 {
        let transfer = loop {
            match me.engine.submit_single_write(&single) {
                Ok(transfer) => break transfer,
                Err(SubmitError::Full { capacity: 4 }) => full += 1,
                Err(error) => panic!("{error}"),
            }
            // Handles of what has ended keep their places.
            under_way.retain(|transfer: &immwire::Transfer| transfer.poll_end().is_none());
            assert!(me.engine.wait_capacity(patience()));
        };
        under_way.push(transfer);
        if under_way.len() == 4 {
            assert!(me.engine.submit_imm(peer, tag, 1).is_err());
            me.done(&under_way.remove(0));
        }
    }
    under_way.iter().for_each(|transfer| me.done(transfer));
    let kept = under_way.len();
    drop(under_way);
    other.count(&me, counter, 100);
    assert_eq!(other.number(&me, Ask::Available { counter }), 0);
    eprintln!("    full {full} times, {kept} at the end");
    // Dropped handles do not hold a place, and what they stood for goes on.
    for _ in 0..40 {
        while let Err(SubmitError::Full { .. }) = me.engine.submit_imm(peer, tag, 1).map(drop) {
            assert!(me.engine.wait_capacity(patience()));
        }
    }
    other.count(&me, counter, 40);
    // While all are taken, waiting ends when its time is up.
    let mut held = Vec::new();
    while held.len() < 4 {
        match me.engine.submit_imm(peer, tag, 1) {
            Ok(transfer) => held.push(transfer),
            // What was counted there may not have ended here yet.
            Err(SubmitError::Full { .. }) => assert!(me.engine.wait_capacity(patience())),
            Err(error) => panic!("{error}"),
        }
    }
    let start = Instant::now();
    assert!(!me.engine.wait_capacity(Duration::from_millis(30)));
    assert!(start.elapsed() >= Duration::from_millis(30) && start.elapsed() < patience());
}

fn waits_end_with_the_engine(case: &Case) {
    let (me, _other, peer) = case.pair();
    let counter = me.engine.counter().expect("a counter");
    let waiting = std::thread::spawn(move || (counter.wait(1, patience()), counter));
    let receiver = me.engine.clone();
    let called = std::sync::Arc::new(std::sync::Mutex::new(None));
    let keep = std::sync::Arc::clone(&called);
    let watched = std::sync::Arc::new(me.engine.counter().expect("a counter"));
    let call = move |result| *keep.lock().unwrap() = Some(result);
    me.engine.expect_imm_count(&watched, 1, call).expect("armed");
    assert_eq!(me.stands(peer), Some(PeerState::Up));
    drop(receiver);
    me.linger(Duration::from_millis(5));
    let (stalls, start) = (Stalls::watch(), Instant::now());
    drop(me);
    let (result, counter) = waiting.join().expect("no panic");
    assert_eq!(result, Err(immwire::CountError::EngineStopped));
    assert_eq!(*called.lock().unwrap(), Some(Err(immwire::CountError::EngineStopped)));
    assert_eq!(stalls.beyond(start, Duration::from_secs(3)), None, "took too long");
    assert_eq!(counter.wait(1, patience()), Err(immwire::CountError::EngineStopped));
}

/// Handles of all kinds are used and dropped after their engine.
fn handles_outlive_the_engine(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let src = me.memory(4096, Own::Engine);
    let (_, desc) = other.memory(&me, 4096, Own::Engine);
    let counter = me.engine.counter().expect("a counter");
    let transfers: Vec<_> =
        (0..200).map(|_| write(&me, peer, &src, &desc, (0, 0, 4096), None)).collect();
    drop(me);
    for transfer in &transfers {
        transfer.cancel();
        assert!(transfer.poll_end().is_some(), "{transfer:?}");
        assert!(transfer.wait(Duration::ZERO).is_ok());
    }
    assert!(counter.try_take(1).is_ok_and(|taken| !taken));
    crate::host::poison(&src, 0, 4096, 1);
    assert_eq!(crate::host::first_other(&src, 0, 4096, 1), None);
    src.region.close(Duration::from_secs(1)).expect("nobody writes");
}

/// Four engines, all connected, with nothing to do, wake for their heartbeats and little else, and do not spin.
///
/// What a wake-up costs depends on who else runs (100 us each and 0.1 % of a core on an idle machine, ten times that on
/// a busy one), so how often they wake is what is held. An emulated processor is charged for what it waits for one that is real, too: 5 ms
/// each were seen; an engine that spins has all of it.
fn idle_costs_nothing(case: &Case) {
    let me = case.me();
    let mut agents: Vec<_> = (0..4).map(|n| case.agent(&format!("idle {n}"))).collect();
    let addresses: Vec<_> = agents.iter().map(|(_, address)| address.clone()).collect();
    for n in 1..4 {
        for address in &addresses[..n] {
            agents[n].0.peer(&me, address);
        }
    }
    // RDMA devices are a guest's software here, and their counts are not known.
    let most = if case.provider.contains("verbs") { 100 } else { 60 };
    // What was started by connecting goes on until none of them wakes more often than that, for as long as an answer may take.
    let (stalls, start) = (Stalls::watch(), Instant::now());
    let (short, long) = (Duration::from_millis(500), Duration::from_secs(3));
    loop {
        let naps = |(agent, _): &mut (Agent, NetAddr)| agent.number(&me, Ask::Naps);
        let before = agents.iter_mut().map(naps).collect::<Vec<_>>();
        me.linger(short);
        let after = agents.iter_mut().map(naps).collect::<Vec<_>>();
        let woken = after.iter().zip(&before).map(|(after, before)| after - before);
        let woken: Vec<u64> = woken.collect();
        if woken.iter().all(|naps| *naps < most / 4) {
            break;
        }
        let late = stalls.beyond(start, long);
        assert_eq!(late, None, "idle engines woke {woken:?} times in {short:?}");
    }
    let used = |agent: &mut Agent| (agent.number(&me, Ask::Naps), agent.number(&me, Ask::Cpu));
    let start = Instant::now();
    let before = agents.iter_mut().map(|(agent, _)| used(agent)).collect::<Vec<_>>();
    let window = Duration::from_secs(2);
    std::thread::sleep(window);
    for ((agent, _), before) in agents.iter_mut().zip(before) {
        let (naps, cpu) = used(agent);
        let (naps, cpu) = (naps - before.0, cpu - before.1);
        let [wall, ran] = [start.elapsed(), stalls.ran(start)]
            .map(|time| u64::try_from(time.as_micros()).expect("small"));
        let facts = format!("an idle engine woke {naps} times, and used {cpu} us of {wall}");
        eprintln!("    {facts}");
        let parts = if is_emulated() { 2 } else { 10 };
        let in_window = u128::from(naps) * window.as_micros() / u128::from(wall);
        // Who was there when its processor stood still may be charged for that.
        let charged = cpu.saturating_sub(wall.saturating_sub(ran));
        assert!(in_window < u128::from(most) && charged * parts < ran, "{facts}, {ran} of it ran");
    }
}

/// A peer is kept while either end writes to the other, be it bytes of which no immediate tells; then it is let go, its end
/// hears of that, and both begin anew.
fn let_go_when_not_used(case: &Case) {
    let idle = Duration::from_millis(if is_emulated() { 3000 } else { 2000 });
    let idle_ms = u64::try_from(idle.as_millis()).expect("small");
    let me = Host::new(&Setup { idle_ms: Some(idle_ms), ..case.setup(case.nics.0) });
    let (mut other, address) = case.agent("not used");
    let first = me.peer(&address);
    let back = only_peer(&me, &mut other);
    let (src, dst) = (me.memory(4096, Own::Engine), me.memory(4096, Own::Engine));
    let (there, desc) = other.memory(&me, 4096, Own::Engine);
    let write_back = Write1 {
        peer: plain(back),
        src: there,
        src_offset: 0,
        dst: encode(&dst.desc()),
        dst_offset: 0,
        len: 64,
        tag: None,
    };
    other.tell(&me, Ask::Flood(write_back));
    me.linger(idle * 2);
    assert_eq!(me.stands(first), Some(PeerState::Up), "it writes");
    assert!(other.number(&me, Ask::Stop) > 0);
    let begun = Instant::now();
    let mut last = begun;
    while begun.elapsed() < idle * 2 {
        last = Instant::now();
        me.done(&write(&me, first, &src, &desc, (0, 0, 64), None));
        me.linger(idle / 20);
    }
    assert_eq!(me.stands(first), Some(PeerState::Up), "we write");
    let down = Some(PeerState::Down(DownReason::Idle));
    assert_eq!(me.peer_down(first, idle + patience()), down);
    // Since its last write was begun; the engine may have looked at its clock some moments before, that are small beside it.
    assert!(last.elapsed() > idle / 2, "{:?}", last.elapsed());
    let Say::Text(gone) = other.ask(&me, Ask::Down { peer: plain(back), ms: patience_ms() }) else {
        panic!("no state")
    };
    assert_eq!(gone, format!("{down:?}"));

    let (counter, tag) = other.counter(&me);
    let again = me.peer(&address);
    assert_ne!(again, first);
    me.done(&write(&me, again, &src, &desc, (0, 0, 64), Some(tag)));
    other.count(&me, counter, 1);
}

/// Both ends would let the other go after as long as we wait between two writes, more or less: each write is counted, or has not been begun.
fn parting_loses_nothing(case: &Case) {
    // No less than a heartbeat.
    const IDLE_MS: u64 = 500;
    let setup = Setup { idle_ms: Some(IDLE_MS), ..case.setup(1) };
    let me = Host::new(&setup);
    let mut other = case.bare_agent("as idle");
    let address = other.build(&setup);
    let src = me.memory(4096, Own::Engine);
    let (_, desc) = other.memory(&me, 4096, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let start = Instant::now();
    // Who calls and is kept from looking for as long as the other waits sees no more than that they have parted.
    let call = |parted: &mut u64| loop {
        match me.try_peer(&address) {
            Ok(peer) => break peer,
            Err(why) => assert!(why.contains(&DownReason::Idle.to_string()), "{why}"),
        }
        *parted += 1;
        assert!(start.elapsed() < patience() + patience(), "parted {parted} times");
    };
    let (mut done, mut parted) = (0, 0);
    let mut peer = call(&mut parted);
    let mut random = case.random();
    // Fourteen turns, and as many more as it takes until both have been seen: with longer waits if nobody has parted, with shorter ones if nothing
    // was done, since how long it takes to part is the transport's.
    let mut turns = 0;
    while turns < 14 || done == 0 || parted == 0 {
        turns += 1;
        let ends = start.elapsed() < patience() + patience();
        assert!(ends, "{done} writes done, parted {parted} times in {turns} turns");
        let about = match 40 * u64::saturating_sub(turns, 14) {
            more if parted == 0 => IDLE_MS + more,
            less if done == 0 => IDLE_MS.saturating_sub(less).max(80),
            _ => IDLE_MS,
        };
        me.linger(Duration::from_millis(about - 80 + random.below(160)));
        let write = SingleWrite {
            peer,
            src: &src,
            src_offset: 0,
            dst: &desc,
            dst_offset: 0,
            len: 64,
            imm: Some(tag),
        };
        let end = me.engine.submit_single_write(&write).map(|transfer| me.end(&transfer));
        match end {
            Ok(End::Done) => done += 1,
            Ok(End::NeverStarted { .. }) | Err(_) => {
                assert_eq!(me.peer_down(peer, patience()).filter(|it| !is_idle(*it)), None);
                parted += 1;
                peer = call(&mut parted);
            }
            Ok(end) => panic!("{end:?}"),
        }
    }
    eprintln!("    {done} writes done, parted {parted} times");
    other.count(&me, counter, done);
    me.linger(Duration::from_millis(50));
    assert_eq!(other.number(&me, Ask::Available { counter }), 0);
}

fn is_idle(state: PeerState) -> bool {
    state == PeerState::Down(DownReason::Idle)
}

/// Of whoever runs its engine itself, and looks at it too late: all that a peer had done before it left is counted, whichever NIC it came by;
/// also if that is more than is read at a time, and what is sent back fails meanwhile.
fn counted_when_the_writer_is_gone(case: &Case) {
    counted_when_gone(case, 4, true, |other| {
        other.post(Ask::Drop);
        assert_eq!(other.answer(None), Say::Fine);
    });
}

/// The same of one that is killed, while a child of it holds its connection.
pub fn counted_when_the_forked_writer_is_killed(case: &Case) {
    counted_when_gone(case, 1, false, |other| {
        other.post(Ask::Fork { ms: 60_000 });
        assert_eq!(other.answer(None), Say::Fine);
        other.signal(Signal::KILL);
    });
}

/// `many`: also when that is more than is read at a time, and something goes back.
fn counted_when_gone(case: &Case, nics: u8, many: bool, leave: fn(&mut Agent)) {
    for round in 0..6 {
        let me = Host::new(&Setup { motor: Motor::Polled, ..case.setup(nics) });
        let mut other = case.bare_agent("gone");
        other.build(&case.setup(nics));
        let peer = other.peer(&me, me.engine.address());
        let counter = me.engine.counter().expect("a counter");
        let (peer, tag) = (plain(peer), counter.tag().bits());
        // The paths are there.
        for _ in 0..8 {
            let end = other.ask(&me, Ask::Imm { peer, tag, writes: 1 });
            assert_eq!(end, Say::Text("Done".into()));
        }
        assert_eq!(me.count(&counter, 8, patience()), Ok(()));
        let writes = if many && round > 3 { 320 } else { 12 };
        for _ in 0..writes {
            other.post(Ask::Imm { peer, tag, writes: 1 });
            assert_eq!(other.answer(None), Say::Text("Done".into()));
        }
        leave(&mut other);
        let back = me.engine.peers().first().copied().filter(|_| many && round > 4);
        let sent = back.map(|back| me.engine.submit_send(back, b"too late").expect("submit"));
        assert_eq!(me.count(&counter, writes, patience()), Ok(()), "round {round}");
        assert!(sent.is_none_or(|sent| !matches!(me.end(&sent), immwire::End::Done)));
    }
}

/// Engines that sleep are woken by whatever there is to do. A lost wake-up is made good after a second, and
/// so would be seen by no other test.
fn nobody_oversleeps(case: &Case) {
    let (late, stalls) = (Duration::from_millis(600), Stalls::watch());
    // Nor is it made good by a heartbeat: there is one each thirty seconds.
    let silent_ms = Some(240_000);
    // Where the peer has to copy, it is to be woken for that, too.
    let ways = case.facts().ways.iter().filter(|(foreign, _)| *foreign != Foreign::Kernel);
    for &(foreign, own) in ways {
        let me = Host::new(&Setup { foreign, silent_ms, ..case.setup(case.nics.0) });
        let mut other = case.bare_agent("sleepy");
        let address = other.build(&Setup { silent_ms, ..case.setup(case.nics.1) });
        let peer = me.peer(&address);
        let src = me.memory(1 << 20, Own::Engine);
        let (counter, tag) = other.counter(&me);
        let back = only_peer(&me, &mut other);
        let (there, _) = other.memory(&me, 4096, Own::Engine);
        let mine = me.engine.counter().expect("a counter");
        let mut random = case.random();
        for round in 0..40 {
            // Around the time at which they fall asleep.
            let nap = Duration::from_micros(50 + random.below(300));
            std::thread::sleep(nap);
            let start = Instant::now();
            match round % 4 {
                0 => me.done(&me.engine.submit_imm(peer, tag, 1).expect("submit")),
                1 => {
                    // A region that it is asked about first.
                    let (_, desc) = other.memory(&me, 1 << 20, own);
                    std::thread::sleep(nap);
                    me.done(&write(&me, peer, &src, &desc, (0, 0, 1 << 20), Some(tag)));
                }
                2 => {
                    me.done(&me.engine.submit_send(peer, &[1]).expect("submit"));
                    let got = other.ask(&me, Ask::Recv { ms: 20_000 });
                    assert!(matches!(got, Say::Message { .. }), "{got:?}");
                    me.done(&me.engine.submit_imm(peer, tag, 1).expect("submit"));
                }
                _ => {
                    let dst = encode(&src.desc());
                    let write = Write1 {
                        peer: plain(back),
                        src: there,
                        src_offset: 0,
                        dst,
                        dst_offset: 0,
                        len: 8,
                        tag: Some(mine.tag().bits()),
                    };
                    assert_eq!(other.ask(&me, Ask::Write(write)), Say::Text("Done".into()));
                    me.count(&mine, 1, patience()).expect("written to us");
                    me.done(&me.engine.submit_imm(peer, tag, 1).expect("submit"));
                }
            }
            other.count(&me, counter, 1);
            assert_eq!(stalls.beyond(start, late), None, "{foreign:?}, round {round}");
        }
    }
}

/// Of [`immwire::core::wire::Refusal::Elsewhere`].
const SOMEBODY_ELSE: &str = "another engine has the address";

/// What lies in a mailbox, its sender told so, is received when the sender has left, however much the receiver has not taken by then.
fn messages_outlive_their_sender(case: &Case) {
    const MANY: u32 = 260;
    let me = case.me();
    let (mut busy, its_address) = case.agent("busy");
    let (mut brief, address) = case.agent("brief");
    for address in [&its_address, &address] {
        me.peer(address);
    }
    let send = |agent: &mut Agent, bytes: Vec<u8>| {
        let peer = plain(only_peer(&me, agent));
        let done = agent.ask(&me, Ask::Send { peer, bytes });
        assert_eq!(done, Say::Text("Done".into()));
    };
    // More than are kept beside the mailboxes.
    for n in 0..MANY {
        send(&mut busy, n.to_le_bytes().to_vec());
    }
    send(&mut brief, b"the last word".to_vec());
    let brief_one = me.engine.peers().into_iter().max().expect("two peers");
    brief.tell(&me, Ask::Drop);
    let state = me.peer_down(brief_one, patience());
    assert!(matches!(state, Some(PeerState::Down(_))), "{state:?}");
    let all: Vec<_> = (0..=MANY)
        .map(|n| me.recv(patience()).unwrap_or_else(|why| panic!("{why} after {n} messages")))
        .collect();
    let more = me.recv(Duration::from_millis(100));
    assert!(more.is_err(), "{more:?} after all that were sent");
    let word = all.iter().filter(|it| it.from == brief_one && it.bytes == b"the last word");
    assert_eq!(word.count(), 1);
    let others = all.iter().filter(|it| it.from != brief_one).map(|it| it.bytes.clone());
    assert!(others.eq((0..MANY).map(|n| n.to_le_bytes().to_vec())), "{} messages", all.len());
}

fn addresses_that_lead_nowhere(case: &Case) {
    let me = case.me();
    let mut other = case.bare_agent("gone");
    let address = other.build(&case.setup(1));
    other.tell(&me, Ask::Drop);
    let (stalls, start) = (Stalls::watch(), Instant::now());
    let error = me.try_peer(&address).expect_err("nobody is there");
    let said = if case.facts().tells_death { "nobody listens" } else { "never answered" };
    // Unless a third engine was given the address that became free.
    assert!(error.contains(said) || error.contains(SOMEBODY_ELSE), "{error}");
    let own = me.engine.address().clone();
    let error = me.try_peer(&own).expect_err("myself");
    assert!(error.contains("itself"), "{error}");
    assert_eq!(stalls.beyond(start, Duration::from_secs(3)), None, "took too long");
    assert!(me.engine.peers().is_empty());
    // Another engine is not taken for the one that had its address before.
    let address = other.build(&case.setup(1));
    let gone = EngineId(case.random().number());
    let stale = NetAddr::new(address.provider(), gone, address.nics()).expect("an address");
    let error = me.try_peer(&stale).expect_err("somebody else");
    // Of shared memory, addresses are never given twice: such a one was made up.
    assert!(error.contains(SOMEBODY_ELSE) || error.contains("broke the protocol"), "{error}");
    assert!(me.engine.peers().is_empty());
    // Twice the same engine is the same peer.
    let peer = me.peer(&address);
    assert_eq!(me.peer(&address), peer);
    assert_eq!(me.engine.peers(), [peer]);
    let _ = only_peer(&me, &mut other);
}
