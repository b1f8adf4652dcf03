//! What peers do that are no engines of ours, or that happens to engines of ours and takes luck: each here as often as the test wants.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use immwire::core::datagram::{Address, Claim, Counts, Message, Nonces, Say as Said};
use immwire::core::id::EngineId;
use immwire::core::opening::{Pairs, Turns};
use immwire::core::recycle::Turn;
use immwire::core::region::{Keys, MrDesc};
use immwire::core::tenant::Parts;
use immwire::core::wire::{NetAddr, Refusal};
use immwire::{DownReason, End, ImmCounter, LivenessConfig, PeerId, PeerState, Transfer};

use crate::rogue::{Rogue, address, insert};
use crate::side::{Other, PATIENCE, Pair, Side, builder, logged};
use crate::{log, submit};

/// Immediates that count one write each.
fn imms(counter: &ImmCounter, times: usize) -> impl Iterator<Item = u32> {
    std::iter::repeat_n(counter.tag().bits() << 12 | 16, times)
}

pub fn until<R>(side: &mut Side, what: &str, mut done: impl FnMut() -> Option<R>) -> R {
    let start = Instant::now();
    loop {
        if let Some(result) = done() {
            return result;
        }
        assert!(start.elapsed() < PATIENCE, "never {what}");
        side.driver.poll();
    }
}

fn poll_for(side: &mut Side, time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        side.driver.poll();
    }
}

/// Nobody is written to but as the test says.
fn silent() -> LivenessConfig {
    LivenessConfig {
        heartbeat: Duration::from_secs(30),
        suspect_after: Duration::from_secs(60),
        down_after: Duration::from_secs(60),
        ..LivenessConfig::default()
    }
}

fn count(nics: usize, sent: u64) -> Counts {
    std::iter::repeat_n(sent, nics).collect()
}

// ---- whose endpoints they are ----

/// A peer leaves, and is back, with the endpoints that it had, while what it had written lies there unread, or is still to come.
pub fn what_was_sent_before_a_peer_came_back_is_not_of_its_new_session() {
    const SENT: u64 = 240;
    for round in 0..3 {
        let mut pair = Pair::new((1, 1), |builder| builder.peers(2).transfers(2000));
        let counter = pair.there.engine.counter().unwrap();
        let here = pair.here.engine.clone();
        let peer = pair.peer;
        let submit = |_| here.submit_imm(peer, counter.tag(), 1).unwrap();
        let transfers: Vec<Transfer> = (0..SENT).map(submit).collect();
        let all = || transfers.iter().all(|it| it.poll_end().is_some()).then_some(());
        until(&mut pair.here, "done", all);
        here.remove_peer(peer);
        until(&mut pair.here, "gone", || here.peers().is_empty().then_some(()));
        let door = pair.there.engine.address().clone();
        pair.peer = pair.here.driver.add_peer(&door).unwrap();
        let peer = pair.peer;
        pair.until("up", || (here.peer_state(peer) == Some(PeerState::Up)).then_some(()));
        pair.until("counted", || (counter.available() >= SENT).then_some(()));
        // One at a time: more that is taken than was sent is noticed at the first report.
        for _ in 0..300 {
            let transfer = here.submit_imm(peer, counter.tag(), 1).unwrap();
            pair.is_done(&transfer);
        }
        pair.counts(&counter, SENT + 300);
        assert_eq!(counter.available(), 0, "round {round}");
        assert_eq!(here.peer_state(peer), Some(PeerState::Up), "round {round}");
        pair.back = *pair.there.engine.peers().first().expect("a peer");
        assert_eq!(pair.there.engine.peer_state(pair.back), Some(PeerState::Up), "round {round}");
    }
}

/// The endpoints of an engine that calls a rogue.
fn overheard(rogue: &mut Rogue, caller: &mut Side) -> Vec<Address> {
    let nobody = Rogue::engine();
    let door: NetAddr = rogue.as_engine(nobody);
    caller.driver.add_peer(&door).unwrap();
    let (initiator, back) = rogue.hear(
        "a call",
        || _ = caller.driver.poll(),
        |message| match message {
            Message::Call { nonce, door, .. } => Some((*nonce, door.clone())),
            _ => None,
        },
    );
    rogue.tell(&back, &Message::Challenge(Nonces { initiator, acceptor: [7; 32] }));
    let ports = rogue.hear(
        "a proof",
        || _ = caller.driver.poll(),
        |message| match message {
            Message::Prove { claim, .. } => {
                let claim = Claim::decode(claim).unwrap();
                Some(claim.ports.to_vec())
            }
            _ => None,
        },
    );
    rogue.tell(&back, &Message::Refuse { nonce: initiator, why: Refusal::Busy });
    ports
}

/// Who says that another engine's endpoints are its own, when it calls or when it moves, does not get what comes from there.
pub fn endpoints_of_others_are_nobodys_to_claim() {
    let configure = |builder: immwire::Builder| builder.peers(3).transfers(2000);
    let mut pair = Pair::new((1, 1), configure);
    let (mut rogue, counter) = (Rogue::new(), pair.there.engine.counter().unwrap());
    let theirs = overheard(&mut rogue, &mut pair.here);
    let all_count = |pair: &mut Pair| {
        // More than has room unless they are taken for whose they are.
        let (engine, peer) = (pair.here.engine.clone(), pair.peer);
        let submit = |_| engine.submit_imm(peer, counter.tag(), 1).unwrap();
        let transfers: Vec<Transfer> = (0..900).map(submit).collect();
        pair.counts(&counter, 900);
        transfers.iter().for_each(|transfer| pair.is_done(transfer));
    };
    let claim = claimed(&rogue, &theirs, 0);
    let answer = rogue.call(&mut pair.there, &claim).map(|accepted| accepted.token);
    all_count(&mut pair);
    assert_eq!(answer, Err(Refusal::Malformed));
    // With endpoints of its own, first.
    let own = vec![address(&rogue.port)];
    let claim = claimed(&rogue, &own, 0);
    let accepted = rogue.call(&mut pair.there, &claim).unwrap();
    let ports = theirs.iter().cloned().collect();
    rogue.say(&pair.there, &accepted, Said::Move { turn: Turn(1), ports });
    let engine = pair.there.engine.clone();
    pair.until("gone", || (engine.peers().len() == 1).then_some(()));
    all_count(&mut pair);
}

/// What an engine says of itself that nobody has seen yet.
fn claimed(rogue: &Rogue, ports: &[Address], turn: u32) -> Claim {
    rogue.claim(Rogue::engine(), ports, turn)
}

/// A peer says that it has moved to where it is, as one does that was late to say where that is. Then it moves indeed: what is under way
/// from where it was is its own until it is said to be known where it is now.
pub fn who_moves_to_where_it_is_loses_nothing() {
    for (first, then) in [(0, 1), (1, 2)] {
        let mut host = Side::new(builder(1).peers(2).liveness(silent()));
        let (mut rogue, counter) = (Rogue::new(), host.engine.counter().unwrap());
        let here = vec![address(&rogue.port)];
        let claim = claimed(&rogue, &here, 0);
        let accepted = rogue.call(&mut host, &claim).unwrap();
        let elsewhere = rogue.another_port();
        let moves = [(first, here.clone()), (then, vec![address(&elsewhere)])];
        for (turn, ports) in moves {
            let (turn, ports) = (Turn(turn), ports.iter().cloned().collect());
            rogue.say(&host, &accepted, Said::Move { turn, ports });
            rogue.hear(
                "moved",
                || _ = host.driver.poll(),
                |message| match message {
                    Message::Session { say: Said::Moved { turn: moved, .. }, .. } => {
                        (*moved == turn).then_some(())
                    }
                    _ => None,
                },
            );
        }
        let to = insert(&rogue.port, &accepted);
        assert_eq!(rogue.immediates(&rogue.port, to, &accepted, imms(&counter, 20)), 20);
        let counted = || (counter.available() >= 20).then_some(());
        until(&mut host, &format!("counted, first to {first}"), counted);
        assert_eq!(counter.available(), 20, "first to {first}");
    }
}

/// A peer says that it had withdrawn more than there can be: that never comes, and nothing could ever be written to it.
pub fn who_withdrew_more_than_there_can_be_is_no_peer() {
    let mut host = Side::new(builder(1).peers(2).liveness(silent()));
    let mut rogue = Rogue::new();
    let claim = claimed(&rogue, &[address(&rogue.port)], 0);
    let accepted = rogue.call(&mut host, &claim).unwrap();
    let engine = host.engine.clone();
    let peer = *engine.peers().first().expect("a peer");
    until(&mut host, "up", || (engine.peer_state(peer) == Some(PeerState::Up)).then_some(()));
    poll_for(&mut host, Duration::from_millis(20));
    assert_eq!(engine.peer_state(peer), Some(PeerState::Up));
    rogue.say(&host, &accepted, Said::Ready { gone: Parts::MAX + 1 });
    let protocol = Some(PeerState::Down(DownReason::Protocol));
    until(&mut host, "down", || (engine.peer_state(peer) == protocol).then_some(()));
}

/// An engine's call to a rogue, which is proven, and not answered yet.
struct Called {
    peer: PeerId,
    id: EngineId,
    nonce: [u8; 32],
    /// The engine's door.
    back: Address,
    theirs: Claim,
}

impl Called {
    fn new(rogue: &mut Rogue, host: &mut Side) -> Self {
        let id = Rogue::engine();
        let peer = host.driver.add_peer(&rogue.as_engine(id)).unwrap();
        let (nonce, back) = rogue.hear(
            "a call",
            || _ = host.driver.poll(),
            |message| match message {
                Message::Call { nonce, door, .. } => Some((*nonce, door.clone())),
                _ => None,
            },
        );
        rogue.tell(&back, &Message::Challenge(Nonces { initiator: nonce, acceptor: [7; 32] }));
        let theirs = rogue.hear(
            "a proof",
            || _ = host.driver.poll(),
            |message| match message {
                Message::Prove { claim, .. } => Claim::decode(claim).ok(),
                _ => None,
            },
        );
        Self { peer, id, nonce, back, theirs }
    }

    fn accept(&self, rogue: &mut Rogue) {
        let ours = rogue.claim(self.id, &[address(&rogue.port)], 0);
        let mut bytes = [0; immwire::core::datagram::DATAGRAM_MAX];
        let len = ours.encode(&mut bytes).unwrap();
        let (nonce, claim) = (self.nonce, &bytes[..len]);
        rogue.tell(&self.back, &Message::Accept { nonce, proof: [0; 32], claim });
    }

    /// Where the engine says that it is now.
    fn moves(rogue: &mut Rogue, host: &mut Side) -> (Turn, Vec<Address>) {
        rogue.hear(
            "where the next endpoints are",
            || _ = host.driver.poll(),
            |message| match message {
                Message::Session { say: Said::Move { turn, ports }, .. } => {
                    Some((*turn, ports.to_vec()))
                }
                _ => None,
            },
        )
    }

    fn has_moved(&self, rogue: &mut Rogue, turn: Turn) {
        let say = Said::Moved { turn, sent: count(1, 0) };
        rogue.tell(&self.back, &Message::Session { token: self.theirs.token, say });
    }

    /// It may write from now on.
    fn hears_ready(rogue: &mut Rogue, host: &mut Side) {
        rogue.hear(
            "ready",
            || _ = host.driver.poll(),
            |message| match message {
                Message::Session { say: Said::Ready { .. }, .. } => Some(()),
                _ => None,
            },
        );
    }
}

/// A peer stops, with writes to it in flight.
fn stop(host: &mut Side, other: &Other, peer: PeerId) -> Vec<Transfer> {
    let src = host.region(64 << 10);
    other.stop();
    let submit = |_| submit(&host.engine, peer, &src, &other.desc, (0, 64 << 10));
    let stuck = (0..8).map(submit).collect();
    host.driver.poll();
    stuck
}

/// Endpoints are replaced, and closed, while the answer to a call is on its way that named them. Who has answered may write only when it
/// knows the new ones.
pub fn who_is_ready_has_said_where_it_is() {
    let mut host = Side::new(builder(1).liveness(silent()).drain(Duration::from_millis(1)));
    let engine = host.engine.clone();
    let stopped = Other::start();
    let peer = host.driver.add_peer(&stopped.address).unwrap();
    let up = || (engine.peer_state(peer) == Some(PeerState::Up)).then_some(());
    until(&mut host, "up", up);
    let stuck = stop(&mut host, &stopped, peer);
    let mut rogue = Rogue::new();
    let called = Called::new(&mut rogue, &mut host);
    let theirs = &called.theirs;
    let closed = logged(&log(), "endpoint", "ops").len();
    engine.remove_peer(peer);
    let ended = || stuck.iter().all(|it| it.poll_end().is_some()).then_some(());
    until(&mut host, "ended", ended);
    assert!(logged(&log(), "endpoint", "ops").len() > closed, "nothing was replaced");
    rogue.heard.clear();
    called.accept(&mut rogue);
    // The network keeps no order: what is said first is what may come first.
    let mut said = BTreeSet::new();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(300) || said.is_empty() {
        assert!(start.elapsed() < PATIENCE, "it says nothing");
        host.driver.poll();
        rogue.step();
        while let Some(heard) = rogue.heard.pop_front() {
            match Message::decode(&heard) {
                Ok(Message::Session { say: Said::Ready { .. }, .. }) => _ = said.insert("ready"),
                Ok(Message::Session { say: Said::Move { turn, .. }, .. }) => {
                    assert_ne!(turn, theirs.turn);
                    said.insert("moves");
                }
                _ => {}
            }
        }
    }
    assert_eq!(said.into_iter().collect::<Vec<_>>(), ["moves"]);
    let turn = Turn(theirs.turn.0 + 1);
    called.has_moved(&mut rogue, turn);
    Called::hears_ready(&mut rogue, &mut host);
    assert_eq!(engine.peer_state(called.peer), Some(PeerState::Up));
}

/// Who may not know the endpoints that there are is not written to from them, whichever of them it was told of.
pub fn who_was_told_of_older_endpoints_is_not_lost() {
    who_knows_neither_the_old_nor_the_next();
    who_has_heard_of_the_next_alone();
}

/// Endpoints are replaced while a call is repeated: who is called has kept nothing of what was said first, and answers when it hears of the next
/// ones. The old ones are open still, and it was never told of them.
fn who_has_heard_of_the_next_alone() {
    let configure = builder(1).peers(4).liveness(silent()).drain(Duration::from_millis(1));
    let mut host = Side::new(configure);
    let engine = host.engine.clone();
    let (mut stays, mut rogue) = (Rogue::new(), Rogue::new());
    // It never says that it has moved: until it is given up, what it was told of first stays open.
    let claim = claimed(&stays, &[address(&stays.port)], 0);
    stays.call(&mut host, &claim).unwrap();
    let slow = *engine.peers().first().expect("a peer");
    let stopped = Other::start();
    let peer = host.driver.add_peer(&stopped.address).unwrap();
    let up = || (engine.peer_state(peer) == Some(PeerState::Up)).then_some(());
    until(&mut host, "up", up);
    let _stuck = stop(&mut host, &stopped, peer);
    let called = Called::new(&mut rogue, &mut host);
    engine.remove_peer(peer);
    let next = Turn(called.theirs.turn.0 + 1);
    let again = rogue.hear(
        "a proof that names the next endpoints",
        || _ = host.driver.poll(),
        |message| match message {
            Message::Prove { claim, .. } => {
                Claim::decode(claim).ok().filter(|claim| claim.turn == next)
            }
            _ => None,
        },
    );
    rogue.port.insert(again.ports[0].as_slice().try_into().unwrap());
    called.accept(&mut rogue);
    let (turn, ports) = Called::moves(&mut rogue, &mut host);
    assert_eq!((turn, ports), (next, again.ports.to_vec()));
    let tag = engine.counter().unwrap().tag();
    let transfer = engine.submit_imm(called.peer, tag, 1).unwrap();
    poll_for(&mut host, Duration::from_millis(100));
    assert!(engine.peers().contains(&slow), "the old endpoints are closed already");
    assert_eq!(engine.peer_state(called.peer), Some(PeerState::Up));
    assert_eq!(
        transfer.poll_end(),
        None,
        "it was written to from an endpoint that it was not told of"
    );
    called.has_moved(&mut rogue, turn);
    assert_eq!(until(&mut host, "written", || transfer.poll_end()), End::Done);
    assert_eq!(engine.peer_state(called.peer), Some(PeerState::Up));
}

/// Endpoints are replaced twice while the answer to a call is on its way: once before it comes, and once more before it is answered where the
/// next ones are. Who has answered was never told of those that are replaced then, and is not written to from there.
fn who_knows_neither_the_old_nor_the_next() {
    let mut host = Side::new(builder(1).liveness(silent()).drain(Duration::from_millis(1)));
    let engine = host.engine.clone();
    let others = [Other::start(), Other::start()];
    let peers = others.each_ref().map(|other| {
        let peer = host.driver.add_peer(&other.address).unwrap();
        let up = || (engine.peer_state(peer) == Some(PeerState::Up)).then_some(());
        until(&mut host, "up", up);
        peer
    });
    let mut rogue = Rogue::new();
    let stuck = stop(&mut host, &others[0], peers[0]);
    let called = Called::new(&mut rogue, &mut host);
    engine.remove_peer(peers[0]);
    let ended = || stuck.iter().all(|it| it.poll_end().is_some()).then_some(());
    until(&mut host, "ended", ended);
    called.accept(&mut rogue);
    let (next, _) = Called::moves(&mut rogue, &mut host);
    let _stuck = stop(&mut host, &others[1], peers[1]);
    engine.remove_peer(peers[1]);
    let (turn, ports) = Called::moves(&mut rogue, &mut host);
    assert_eq!([next.0, turn.0], [1, 2].map(|more| called.theirs.turn.0 + more));
    let tag = engine.counter().unwrap().tag();
    let transfer = engine.submit_imm(called.peer, tag, 1).unwrap();
    poll_for(&mut host, Duration::from_millis(100));
    assert_eq!(engine.peer_state(called.peer), Some(PeerState::Up));
    assert_eq!(
        transfer.poll_end(),
        None,
        "it was written to from an endpoint that it does not know"
    );
    rogue.port.insert(ports[0].as_slice().try_into().unwrap());
    called.has_moved(&mut rogue, turn);
    assert_eq!(until(&mut host, "written", || transfer.poll_end()), End::Done);
    assert_eq!(engine.peer_state(called.peer), Some(PeerState::Up));
}

/// What a peer says of where it is overtakes what it said earlier: it stays where it moved last.
pub fn an_older_move_does_not_count() {
    let mut host = Side::new(builder(1).peers(2).liveness(silent()));
    let mut rogue = Rogue::new();
    let claim = claimed(&rogue, &[address(&rogue.port)], u32::MAX - 1);
    let accepted = rogue.call(&mut host, &claim).unwrap();
    let engine = host.engine.clone();
    let peer = *engine.peers().first().expect("a peer");
    let [last, older, next] = std::array::from_fn(|_| rogue.another_port());
    insert(&last, &accepted);
    let moves = |turn, port| {
        let ports = std::iter::once(address(port)).collect();
        Said::Move { turn: Turn(turn), ports }
    };
    let moved = |rogue: &mut Rogue, host: &mut Side| {
        let moved = |message: &Message<'_>| match message {
            Message::Session { say: Said::Moved { turn, .. }, .. } => Some(*turn),
            _ => None,
        };
        rogue.hear("moved", || _ = host.driver.poll(), moved)
    };
    rogue.say(&host, &accepted, moves(0, &last));
    assert_eq!(moved(&mut rogue, &mut host), Turn(0));
    // Counted round. More often than it has messages under way: most have come when the last one is sent.
    for _ in 0..100 {
        rogue.say(&host, &accepted, moves(u32::MAX, &older));
    }
    // And each step hears some dozens.
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(5));
        host.driver.poll();
    }
    let transfer = engine.submit_imm(peer, engine.counter().unwrap().tag(), 1).unwrap();
    assert_eq!(until(&mut host, "written", || transfer.poll_end()), End::Done);
    // What was said before it has been heard: it answers to none but the next.
    rogue.say(&host, &accepted, moves(1, &next));
    assert_eq!(moved(&mut rogue, &mut host), Turn(1));
    assert_eq!(engine.peer_state(peer), Some(PeerState::Up));
}

// ---- queues ----

/// A peer writes more than it was granted, and the device loses the queue. Its peers are lost, and not the engine.
pub fn a_lost_queue_is_replaced() {
    let mut host = Side::new(builder(1).peers(2));
    let (mut rogue, counter) = (Rogue::new(), host.engine.counter().unwrap());
    for _ in 0..2 {
        let ports = vec![address(&rogue.port)];
        let claim = claimed(&rogue, &ports, 0);
        let accepted = rogue.call(&mut host, &claim).unwrap();
        let to = insert(&rogue.port, &accepted);
        rogue.immediates(&rogue.port, to, &accepted, imms(&counter, 700));
        let engine = host.engine.clone();
        until(&mut host, "gone", || engine.peers().is_empty().then_some(()));
        let mut pair = Pair::of(Side::new(builder(1).peers(2)), host);
        pair.write_both_ways(4, &[1, 4096]);
        // Nothing is read that is lost: nothing is left to be done.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(20) {
            pair.turn();
        }
        pair.write_both_ways(1, &[64]);
        host = pair.there;
        let engine = host.engine.clone();
        drop(pair.here);
        until(&mut host, "left", || engine.peers().is_empty().then_some(()));
    }
}

/// Has the process's how many-th endpoint be in error: an engine's first is for writes, its second is its door.
fn break_endpoint(number: u32) {
    std::fs::write("broken", number.to_string()).unwrap();
}

/// What is in flight on a queue pair in error fails, and so does all that follows there. Its peers are lost; who comes then is served
/// by another.
pub fn a_broken_endpoint_is_replaced() {
    let mut pair = Pair::new((1, 1), |builder| builder);
    pair.write_both_ways(4, &[1, 4096]);
    break_endpoint(0);
    let (src, dst) = (pair.here.region(64), pair.there.region(64));
    let (here, peer, desc) = (pair.here.engine.clone(), pair.peer, dst.desc());
    let writes: Vec<_> = (0..8).map(|_| submit(&here, peer, &src, &desc, (0, 64))).collect();
    for write in &writes {
        assert_ne!(pair.end(write), End::Done);
    }
    let there = pair.there.engine.clone();
    pair.until("left", || [&here, &there].iter().all(|it| it.peers().is_empty()).then_some(()));
    let Pair { here, there, .. } = pair;
    let mut pair = Pair::of(here, there);
    pair.write_both_ways(4, &[1, 4096, 100_000]);
}

/// An endpoint fails, and is replaced, while the answer to a call is on its way that named it, and stays open for a while, as something may
/// still come there of a peer that leaves. Who has answered writes, and is written to, when it knows the next one.
pub fn who_comes_while_a_broken_endpoint_is_replaced_is_kept() {
    let mut host = Side::new(builder(1).peers(4).liveness(silent()));
    let engine = host.engine.clone();
    let tag = engine.counter().unwrap().tag();
    let (mut written, mut leaves, mut rogue) = (Rogue::new(), Rogue::new(), Rogue::new());
    let claim = claimed(&written, &[address(&written.port)], 0);
    written.call(&mut host, &claim).unwrap();
    let first = *engine.peers().first().expect("a peer");
    let claim = claimed(&leaves, &[address(&leaves.port)], 0);
    let accepted = leaves.call(&mut host, &claim).unwrap();
    let called = Called::new(&mut rogue, &mut host);
    poll_for(&mut host, Duration::from_millis(50));
    break_endpoint(0);
    leaves.say(&host, &accepted, Said::Bye { quiet: true, sent: count(1, 1) });
    std::thread::sleep(Duration::from_millis(10));
    poll_for(&mut host, Duration::from_millis(10));
    let opened = logged(&log(), "enabled", "cuda").len();
    let lost = engine.submit_imm(first, tag, 1).unwrap();
    let is_replaced = || (logged(&log(), "enabled", "cuda").len() > opened).then_some(());
    until(&mut host, "replaced", is_replaced);
    called.accept(&mut rogue);
    let up = || (engine.peer_state(called.peer) == Some(PeerState::Up)).then_some(());
    until(&mut host, "up", up);
    let transfer = engine.submit_imm(called.peer, tag, 1).unwrap();
    let (turn, ports) = Called::moves(&mut rogue, &mut host);
    assert_eq!(turn.0, called.theirs.turn.0 + 1);
    assert_eq!(transfer.poll_end(), None, "it is nowhere yet");
    rogue.port.insert(ports[0].as_slice().try_into().unwrap());
    called.has_moved(&mut rogue, turn);
    Called::hears_ready(&mut rogue, &mut host);
    assert_eq!(until(&mut host, "written", || transfer.poll_end()), End::Done);
    assert_ne!(until(&mut host, "ended", || lost.poll_end()), End::Done);
    assert_eq!(engine.peer_state(called.peer), Some(PeerState::Up));
}

/// A peer writes to the door, with the key of the mailbox that it was given, and more than that has room for: it is refused, and nobody else is lost.
pub fn nobody_writes_to_a_door() {
    const WRITES: usize = 1300;
    let mut pair = Pair::new((1, 1), |builder| builder.peers(2));
    let counter = pair.there.engine.counter().unwrap();
    let mut rogue = Rogue::new();
    let claim = claimed(&rogue, &[address(&rogue.port)], 0);
    let accepted = rogue.call(&mut pair.there, &claim).unwrap();
    insert(&rogue.port, &accepted);
    let arrived = rogue.knock(&pair.there, &accepted, imms(&counter, WRITES));
    pair.write_both_ways(4, &[1, 4096]);
    assert_eq!((arrived, counter.available()), (0, 0));
    for (side, peer) in [(&pair.here, pair.peer), (&pair.there, pair.back)] {
        assert_eq!(side.engine.peer_state(peer), Some(PeerState::Up));
    }
}

/// Whatever the door has posted fails, and would again. Its peers are lost, and that is all that there is to do.
pub fn a_broken_door_ends_all_and_no_poll_stays() {
    let mut pair = Pair::new((1, 1), |builder| builder);
    pair.write_both_ways(1, &[64]);
    break_endpoint(1);
    // It calls, so that the door has something to post.
    let mut caller = Side::new(builder(1));
    let address = pair.here.engine.address().clone();
    caller.driver.add_peer(&address).unwrap();
    let engine = pair.here.engine.clone();
    pair.until("lost", || {
        caller.driver.poll();
        engine.peers().is_empty().then_some(())
    });
    poll_for(&mut pair.here, Duration::from_millis(50));
    // All that were posted, each once.
    let flushed: u64 = logged(&log(), "flushed", "receives").iter().sum();
    assert!((1..=129).contains(&flushed), "{flushed}");
}

/// What fails for one peer lies in the queue between what has come from another, which leaves without being through.
pub fn what_has_come_is_not_lost_among_failures() {
    const ROUNDS: usize = 40;
    const EACH: usize = 3;
    let mut host = Side::new(builder(1).peers(3).liveness(silent()));
    let counter = host.engine.counter().unwrap();
    let mut rogues = [Rogue::new(), Rogue::new()];
    let [leaves, stays] = &mut rogues;
    let mut connect = |rogue: &mut Rogue| {
        let ports = vec![address(&rogue.port)];
        let claim = claimed(rogue, &ports, 0);
        let accepted = rogue.call(&mut host, &claim).unwrap();
        (accepted, claim)
    };
    let ((accepted, _), (knows, claim)) = (connect(leaves), connect(stays));
    insert(&stays.port, &knows);
    let engine = host.engine.clone();
    let peer = *engine.peers().last().expect("peers");
    // Until it has heard that all is open.
    poll_for(&mut host, Duration::from_millis(50));
    let of_it = claim.hello.mailbox;
    let bad =
        MrDesc { keys: Keys::new(&[of_it.keys.get(0).unwrap() ^ 0x7777 << 32]).unwrap(), ..of_it };
    let (src, to) = (host.region(64), insert(&leaves.port, &accepted));
    let mut failing = Vec::new();
    for _ in 0..ROUNDS {
        let write = immwire::SingleWrite {
            peer,
            src: &src,
            src_offset: 0,
            dst: &bad,
            dst_offset: 0,
            len: 64,
            imm: None,
        };
        failing.push(host.driver.submit_single_write(&write).unwrap());
        std::thread::sleep(Duration::from_millis(2));
        leaves.immediates(&leaves.port, to, &accepted, imms(&counter, EACH));
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(counter.available(), 0, "it is not to be read yet");
    leaves.say(
        &host,
        &accepted,
        Said::Bye { quiet: false, sent: count(1, (ROUNDS * EACH) as u64) },
    );
    std::thread::sleep(Duration::from_millis(20));
    until(&mut host, "gone", || (engine.peers().len() == 1).then_some(()));
    assert_eq!(counter.available(), (ROUNDS * EACH) as u64);
    until(&mut host, "failed", || failing.iter().all(|it| it.poll_end().is_some()).then_some(()));
    assert_eq!(logged(&log(), "failed", "prov_errno"), [7; ROUNDS]);
}

// ---- what is said at doors ----

/// Many are left at once, and each of them hears of it.
pub fn everybody_hears_a_farewell() {
    const PEERS: usize = 200;
    let mut host = Side::new(builder(1).peers(200).liveness(silent()));
    let mut rogues: Vec<Rogue> = (0..PEERS / 8).map(|_| Rogue::new()).collect();
    let mut tokens = BTreeSet::new();
    for rogue in &mut rogues {
        for _ in 0..8 {
            let ports = vec![address(&rogue.another_port())];
            let claim = claimed(rogue, &ports, 0);
            rogue.call(&mut host, &claim).unwrap();
            tokens.insert(claim.token);
        }
    }
    assert_eq!((host.engine.peers().len(), tokens.len()), (PEERS, PEERS));
    // What else was to be said has been.
    poll_for(&mut host, Duration::from_millis(50));
    host.engine.peers().into_iter().for_each(|peer| host.engine.remove_peer(peer));
    let start = Instant::now();
    while !tokens.is_empty() && start.elapsed() < Duration::from_secs(3) {
        host.driver.poll();
        for rogue in &mut rogues {
            rogue.step();
            while let Some(heard) = rogue.heard.pop_front() {
                if let Ok(Message::Session { token, say: Said::Bye { .. } }) =
                    Message::decode(&heard)
                {
                    tokens.remove(&token);
                }
            }
        }
    }
    assert_eq!(tokens.len(), 0, "so many heard nothing");
}

/// A peer asks again and again for connections, and hears no answer: what it is to be told is not kept as often.
pub fn what_nobody_hears_is_not_kept_again_and_again() {
    let mut host = Side::new(builder(1).peers(2).liveness(silent()));
    let (mut rogue, mut other) = (Rogue::new(), Rogue::new());
    let ports = vec![address(&rogue.port)];
    let claim = claimed(&rogue, &ports, 0);
    let accepted = rogue.call(&mut host, &claim).unwrap();
    insert(&rogue.port, &accepted);
    let turns = Turns { asks: Turn(0), opens: accepted.theirs.turn };
    const ASKED: usize = 300;
    for _ in 0..ASKED {
        // It is said elsewhere: who asks does not look at its door.
        other.say(&host, &accepted, Said::Open { turns, pairs: Pairs::one(0, 0) });
        poll_for(&mut host, Duration::from_millis(3));
    }
    let (mut told, start) = (0, Instant::now());
    while start.elapsed() < Duration::from_millis(500) || told == 0 {
        assert!(start.elapsed() < PATIENCE, "it tells nobody");
        host.driver.poll();
        rogue.step();
        while let Some(heard) = rogue.heard.pop_front() {
            let heard = Message::decode(&heard);
            told +=
                usize::from(matches!(heard, Ok(Message::Session { say: Said::Opened { .. }, .. })));
        }
    }
    assert!((1..ASKED / 3).contains(&told), "told {told} times");
}
