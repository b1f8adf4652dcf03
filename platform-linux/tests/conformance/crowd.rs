//! Many engines at once: scatter to eight peers, barriers among eight, everybody calling everybody.

use std::sync::Arc;
use std::time::Duration;

use immwire::{NetAddr, PeerId, ScatterWrite, Target};

use crate::agent::{Agent, Ask, Say, Write1, encode, peer_of, plain};
use crate::host::{Host, Own, patience};
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[
    ("scatter_to_eight", Spread::Threads, scatter_to_eight),
    ("scatter_to_eight_polled", Spread::ProcessesBothMotors, scatter_to_eight),
    ("barrier_among_eight", Spread::Places, barrier_among_eight),
    ("barrier_among_eight_polled", Spread::ProcessesBothMotors, barrier_among_eight),
    ("joined_under_load", Spread::Processes, joined_under_load),
    ("crossing_calls", Spread::Places, crossing_calls),
    ("crossing_calls_polled", Spread::ProcessesBothMotors, crossing_calls),
];

fn scatter_to_eight(case: &Case) {
    let me = case.me();
    let mut others: Vec<(Agent, PeerId)> = Vec::new();
    for n in 0..8 {
        let (agent, address) = case.agent(&format!("target {n}"));
        let peer = me.peer(&address);
        others.push((agent, peer));
    }
    let part = 70_001;
    let src = me.memory(8 * part, Own::Engine);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, 8 * part, 0);
    let mut places = Vec::new();
    for (agent, _) in &mut others {
        let (region, desc) = agent.memory(&me, 2 * part, Own::Engine);
        // The same slot everywhere, since one tag serves all.
        let (counter, tag) = agent.counter_of(&me, Some(33));
        agent.tell(&me, Ask::Poison { region, offset: 0, len: 2 * part, byte: 0x3c });
        places.push((region, desc, counter, tag));
    }
    for round in 0..3_u64 {
        let targets: Arc<[Target]> = others
            .iter()
            .zip(&places)
            .zip(0_u64..)
            .map(|(((_, peer), (_, desc, ..)), n)| Target {
                peer: *peer,
                dst: *desc,
                src_offset: (n + round) % 8 * part,
                dst_offset: 100 + n,
                // The last part of all is empty.
                len: if n == 7 { 0 } else { part - n },
            })
            .collect();
        let imm = Some(places[0].3);
        let scatter = ScatterWrite { src: &src, targets: Arc::clone(&targets), imm };
        let transfer = me.engine.submit_scatter(&scatter).expect("submit");
        for ((agent, _), (&(region, _, counter, _), target)) in
            others.iter_mut().zip(places.iter().zip(targets.iter()))
        {
            agent.count(&me, counter, 1);
            let (offset, len, at) = (target.dst_offset, target.len, target.src_offset);
            let ask = Ask::Mismatch { region, offset, len, pattern, at };
            assert_eq!(agent.place(&me, ask), None, "{target:?}");
            agent.check_only(&me, region, 0, offset, 0x3c);
            agent.check_only(&me, region, offset + len, 2 * part - offset - len, 0x3c);
        }
        me.done(&transfer);
    }
}

/// Others come one by one, while all that have come before write to us: what they write is counted, and nothing else. Some go, and as many
/// others take their places.
fn joined_under_load(case: &Case) {
    const PART: u64 = 600;
    let me = case.me();
    let dst = me.memory(9 * PART, Own::Engine);
    let counter = me.engine.counter().expect("a counter");
    let (mut writers, mut taken, mut done) = (Vec::<Agent>::new(), 0, 0);
    for n in 0..12_u64 {
        if n >= 9 {
            // The one that came first of those that are left.
            let mut first = writers.remove(0);
            done += first.number(&me, Ask::Stop);
            first.tell(&me, Ask::Drop);
        }
        let (mut agent, _) = case.agent(&format!("writer {n}"));
        let peer = agent.peer(&me, me.engine.address());
        let (src, _) = agent.memory(&me, PART, Own::Engine);
        let (pattern, offset) = (case.pattern(n), n % 9 * PART);
        agent.tell(&me, Ask::Fill { region: src, offset: 0, len: PART, pattern, at: 0 });
        let (dst, tag) = (encode(&dst.desc()), Some(counter.tag().bits()));
        let peer = plain(peer);
        let write = Write1 { peer, src, src_offset: 0, dst, dst_offset: offset, len: PART, tag };
        agent.tell(&me, Ask::Flood(write));
        writers.push(agent);
        let came = 20 * writers.len() as u64;
        assert_eq!(me.count(&counter, came, patience()), Ok(()), "with {} writers", writers.len());
        taken += came;
    }
    for agent in &mut writers {
        done += agent.number(&me, Ask::Stop);
    }
    assert_eq!(me.count(&counter, done - taken, patience()), Ok(()));
    me.linger(Duration::from_millis(20));
    assert_eq!(counter.available(), 0);
    for n in 3..12 {
        let differs = case.pattern(n).mismatch(&dst, n % 9 * PART, PART, 0);
        assert_eq!(differs, None, "of writer {n}");
    }
}

/// Tells all agents to call all others at the same time; returns whom each knows.
fn mesh(me: &Host, agents: &mut [(Agent, NetAddr)]) -> Vec<Vec<PeerId>> {
    let addresses: Vec<String> = agents.iter().map(|(_, address)| address.to_string()).collect();
    let count = agents.len() - 1;
    // One call of each at a time, so that calls cross.
    for distance in 1..addresses.len() {
        for (n, (agent, _)) in agents.iter_mut().enumerate() {
            let address = addresses[(n + distance) % addresses.len()].clone();
            agent.post(Ask::Peer { address });
        }
        for (agent, _) in agents.iter_mut() {
            assert!(matches!(agent.answer(Some(me)), Say::Peer(_)));
        }
    }
    let known = |(agent, _): &mut (Agent, NetAddr)| match agent.ask(me, Ask::Peers { count }) {
        Say::Peers(peers) => peers.into_iter().map(peer_of).collect(),
        other => panic!("{other:?}"),
    };
    agents.iter_mut().map(known).collect()
}

fn barrier_among_eight(case: &Case) {
    let me = case.me();
    let mut agents: Vec<_> = (0..8).map(|n| case.agent(&format!("member {n}"))).collect();
    let peers = mesh(&me, &mut agents);
    assert!(peers.iter().all(|peers| peers.len() == 7), "{peers:?}");
    let counters: Vec<_> =
        agents.iter_mut().map(|(agent, _)| agent.counter_of(&me, Some(2))).collect();
    for round in 0..20 {
        for late in 0..8 {
            // All but one come; the barrier opens for nobody.
            let (agent, _) = &mut agents[late];
            if round == 0 && late == 3 {
                let ask = Ask::Count { counter: counters[late].0, writes: 7, ms: 5 };
                assert!(matches!(agent.ask(&me, ask), Say::Text(_)));
            }
            let peers = peers[late].iter().copied().map(plain).collect();
            agent.post(Ask::Barrier { peers, tag: counters[late].1.bits() });
        }
        for ((agent, _), &(counter, _)) in agents.iter_mut().zip(&counters) {
            assert_eq!(agent.answer(Some(&me)), Say::Text("Done".into()));
            agent.post(Ask::Count { counter, writes: 7, ms: 20_000 });
        }
        for (agent, _) in &mut agents {
            assert_eq!(agent.answer(Some(&me)), Say::Fine, "round {round}");
        }
    }
    for ((agent, _), &(counter, _)) in agents.iter_mut().zip(&counters) {
        assert_eq!(agent.number(&me, Ask::Available { counter }), 0);
    }
}

/// Two engines call each other at once: one connection comes of it, known to both by one name each.
fn crossing_calls(case: &Case) {
    let me = case.me();
    let (mut one, mut two) = (case.bare_agent("one"), case.bare_agent("two"));
    for round in 0..40 {
        let first = one.build(&case.setup(case.nics.0));
        let second = two.build(&case.setup(case.nics.1));
        one.post(Ask::Peer { address: second.to_string() });
        two.post(Ask::Peer { address: first.to_string() });
        let Say::Peer(to_two) = one.answer(Some(&me)) else { panic!("round {round}") };
        let Say::Peer(to_one) = two.answer(Some(&me)) else { panic!("round {round}") };
        for (from, to, peer) in [(true, "two", to_two), (false, "one", to_one)] {
            let (from, at) = if from { (&mut one, &mut two) } else { (&mut two, &mut one) };
            assert_eq!(
                from.ask(&me, Ask::Peers { count: 1 }),
                Say::Peers(vec![peer]),
                "{round} {to}"
            );
            let (counter, tag) = at.counter(&me);
            let ask = Ask::Imm { peer, tag: tag.bits(), writes: 1 };
            assert_eq!(from.ask(&me, ask), Say::Text("Done".into()), "round {round}, to {to}");
            at.count(&me, counter, 1);
        }
        // In one order and in the other.
        let (last, next) = if round % 2 == 0 { (&mut one, &mut two) } else { (&mut two, &mut one) };
        last.tell(&me, Ask::Drop);
        next.tell(&me, Ask::Drop);
    }
}
