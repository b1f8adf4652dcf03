//! Engines that go one way to peers of their own host, and another to all others.

use std::sync::Arc;

use immwire::core::group::SubmitError;
use immwire::core::plan::{PlanError, Side};
use immwire::{End, PeerId, Place, ScatterWrite, Target, TransferError};

use crate::agent::{Agent, Ask, Say, Write1, encode, plain};
use crate::host::{Host, Own, Setup, patience};
use crate::operations::{only_peer, write};
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[
    ("one_transfer_goes_both_ways", Spread::Places, one_transfer_goes_both_ways),
    ("either_way_fails_alone", Spread::Processes, either_way_fails_alone),
];

/// Where there is TCP.
pub const OTHERS: &[Test] = &[("others_are_no_peers", Spread::Processes, others_are_no_peers)];

/// Where only what is near is written from and to the memory of GPUs.
pub const GPUS_NEAR: &[Test] =
    &[("gpus_stay_on_their_host", Spread::Places, gpus_stay_on_their_host)];

const HERE: &str = "here";

/// An engine on that host, which knows us, and we it.
fn on(case: &Case, me: &Host, host: &str) -> (Agent, PeerId) {
    let mut agent = case.bare_agent(host);
    let setup = Setup { host: Some(host.to_owned()), ..case.setup(case.nics.1) };
    let address = agent.build(&setup);
    let (near, far) = address.provider().sides().expect("two transports");
    let by = if host == HERE { near } else { far };
    assert_eq!(me.engine.transport_to(&address), Some(by));
    let peer = me.peer(&address);
    (agent, peer)
}

fn here(case: &Case) -> Host {
    Host::new(&Setup { host: Some(HERE.to_owned()), ..case.setup(case.nics.0) })
}

/// One scatter to two peers near and two far, and one counter for what all four write back.
fn one_transfer_goes_both_ways(case: &Case) {
    const PART: u64 = 300_001;
    let me = here(case);
    let mut others: Vec<_> =
        [HERE, "there", HERE, "elsewhere"].map(|host| on(case, &me, host)).into();
    let src = me.memory(4 * PART, Own::Engine);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, 4 * PART, 0);
    let back = me.memory(4 * PART, Own::Engine);
    let counter = me.engine.counter().expect("a counter");
    let known: Vec<_> = others.iter_mut().map(|(agent, _)| only_peer(&me, agent)).collect();
    let mut places = Vec::new();
    for (agent, _) in &mut others {
        let (region, desc) = agent.memory(&me, PART, Own::Engine);
        let (counter, tag) = agent.counter_of(&me, Some(33));
        places.push((region, desc, counter, tag));
    }
    for round in 0..10_u64 {
        let targets: Arc<[Target]> = (0_u64..)
            .zip(others.iter().zip(&places))
            .map(|(n, ((_, peer), (_, desc, ..)))| Target {
                peer: *peer,
                dst: *desc,
                src_offset: (n + round) % 4 * PART,
                dst_offset: n,
                len: PART - n,
            })
            .collect();
        let imm = Some(places[0].3);
        let scatter = ScatterWrite { src: &src, targets: Arc::clone(&targets), imm };
        let transfer = me.engine.submit_scatter(&scatter).expect("submit");
        for (((agent, _), place), target) in others.iter_mut().zip(&places).zip(targets.iter()) {
            agent.count(&me, place.2, 1);
            let (offset, len, at) = (target.dst_offset, target.len, target.src_offset);
            let ask = Ask::Mismatch { region: place.0, offset, len, pattern, at };
            assert_eq!(agent.place(&me, ask), None, "{target:?}");
        }
        me.done(&transfer);
        // And back, what each has got, all counted by one.
        for (n, ((agent, _), place)) in (0..).zip(others.iter_mut().zip(&places)) {
            agent.post(Ask::Write(Write1 {
                peer: plain(known[n]),
                src: place.0,
                src_offset: 0,
                dst: encode(&back.desc()),
                dst_offset: n as u64 * PART,
                len: PART,
                tag: Some(counter.tag().bits()),
            }));
        }
        for (agent, _) in &mut others {
            assert_eq!(agent.answer(Some(&me)), Say::Text("Done".into()));
        }
        me.count(&counter, 4, patience()).expect("four arrive");
        for (n, target) in (0_u64..).zip(targets.iter()) {
            let (offset, len, at) = (n * PART + target.dst_offset, target.len, target.src_offset);
            assert_eq!(pattern.mismatch(&back, offset, len, at), None, "{target:?}");
        }
    }
}

/// Without a NIC that leads to it a peer is not written to; the others are, as before.
fn either_way_fails_alone(case: &Case) {
    let me = here(case);
    let mut others = [HERE, "there"].map(|host| on(case, &me, host));
    let src = me.memory(4096, Own::Engine);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, 4096, 0);
    let places = others.each_mut().map(|(agent, _)| agent.memory(&me, 4096, Own::Engine));
    for (nic, lost) in [(0, 0), (1, 1)] {
        me.engine.set_nic_health(nic, false);
        for (n, (_, peer)) in others.iter().enumerate() {
            let (_, desc) = &places[n];
            let end = me.end(&write(&me, *peer, &src, desc, (0, 0, 4096), None));
            let no_way =
                TransferError::Refused(SubmitError::Plan(PlanError::NoRoute { peer: *peer }));
            let refused = End::NeverStarted { error: no_way };
            assert_eq!(end, if n == lost { refused } else { End::Done });
        }
        me.engine.set_nic_health(nic, true);
    }
    for ((agent, peer), (region, desc)) in others.iter_mut().zip(&places) {
        me.done(&write(&me, *peer, &src, desc, (0, 0, 4096), None));
        agent.check(&me, *region, 0, 4096, pattern);
    }
}

/// An engine with one of the two transports alone is told that it is another kind, and the other way round.
fn others_are_no_peers(case: &Case) {
    let me = here(case);
    for provider in ["shm", "tcp"] {
        let plain = Setup { provider: provider.to_owned(), host: None, ..case.setup(1) };
        let plain = Host::new(&plain);
        assert_eq!(me.engine.transport_to(plain.engine.address()), None);
        assert_eq!(plain.engine.transport_to(me.engine.address()), None);
        for (one, other) in [(&me, &plain), (&plain, &me)] {
            let error = one.try_peer(other.engine.address()).expect_err("of another kind");
            assert!(error.contains("this engine uses"), "{error}");
        }
    }
}

/// GPUs' memory is written from and to on the own host; to another nothing leads from there, and that is said at once.
/// What is in the host's memory goes everywhere.
fn gpus_stay_on_their_host(case: &Case) {
    let me = here(case);
    let src = me.engine.alloc_gpu(0, 4096).expect("memory of a GPU");
    let plain = me.engine.alloc(4096).expect("memory of the host");
    let pattern = case.pattern(0);
    for region in [&src, &plain] {
        pattern.fill(region, 0, 4096, 0);
    }
    for host in [HERE, "there"] {
        let (mut agent, peer) = on(case, &me, host);
        let (counter, tag) = agent.counter(&me);
        // Of a GPU, and of the host, in whatever order.
        for _ in 0..3 {
            let (there, desc) = agent.memory(&me, 4096, Own::Engine);
            let is_host = desc.keys.nics() > 1;
            for from in [&src, &plain] {
                let end = me.end(&write(&me, peer, from, &desc, (0, 0, 4096), Some(tag)));
                let side = match (from.place(), is_host) {
                    _ if host == HERE => None,
                    (Place::Gpu(_), _) => Some(Side::Source),
                    (Place::Host, false) => Some(Side::Destination),
                    (Place::Host, true) => None,
                };
                let Some(side) = side else {
                    assert_eq!(end, End::Done);
                    agent.count(&me, counter, 1);
                    agent.check(&me, there, 0, 4096, pattern);
                    continue;
                };
                let error = PlanError::KeyMissing { side, peer, nic: 1 };
                let error = TransferError::Refused(SubmitError::Plan(error));
                assert_eq!(end, End::NeverStarted { error });
            }
        }
    }
}
