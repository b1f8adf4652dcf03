//! Addresses that nobody has: who calls them, or finds one among a peer's NICs, hears nothing, and does not keep anybody
//! else waiting meanwhile.
//!
//! For NICs of a network that is known: those of `verification/rdma-guest`. There the kernel asks for about a second who
//! has an address, and nobody answers.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use immwire::core::port::{Door, Gid, GidKind, NoRoute};
use immwire::core::wire::NicAddr;
use immwire::provider::ConnectError;
use immwire::{AddPeerError, DownReason, End, NetAddr, PeerError, TransferEngine};

use crate::agent::Agent;
use crate::host::{Host, Own, Setup, patience};
use crate::operations::write;
use crate::ports::{APART, Port};
use crate::stalls::Stalls;
use crate::{Case, Spread, Test};

/// In a guest.
pub const TESTS: &[Test] = &[
    ("calls_to_nobody", Spread::Once, calls_to_nobody),
    ("another_network", Spread::Once, another_network),
];
/// In a guest with four devices.
pub const FOUR_DEVICES: &[Test] =
    &[("a_nic_without_answer", Spread::TwoNics, a_nic_without_answer)];
/// There, of addresses of NICs alone.
pub const ALONE: &[Test] = &[("one_among_absent_engines", Spread::Once, one_among_absent_engines)];

/// Between the ends of two writes, at most, while addresses are looked up: half of what one lookup takes the kernel.
const GAP: Duration = Duration::from_millis(500);

/// Says so when it is over, also by a panic.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The longest time between the ends of two writes to a peer that is there, while `meanwhile` runs, but for what processors stood still. Goes
/// on for a while after it.
fn longest_gap(
    me: &Host,
    (other, peer): (&mut Agent, immwire::PeerId),
    meanwhile: impl FnOnce(&TransferEngine) + Send,
) -> Duration {
    let src = me.memory(4096, Own::Engine);
    let (_, desc) = other.memory(me, 4096, Own::Engine);
    let one = || assert_eq!(me.end(&write(me, peer, &src, &desc, (0, 0, 4096), None)), End::Done);
    one();
    let over = AtomicBool::new(false);
    let mut gap = Duration::ZERO;
    let mut writes = 0_u32;
    let (engine, stalls) = (&me.engine, Stalls::watch());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _over = Over(&over);
            meanwhile(engine);
            std::thread::sleep(Duration::from_millis(500));
        });
        let mut last = Instant::now();
        while !over.load(Ordering::Acquire) {
            one();
            let took = last.elapsed();
            gap = gap.max(if took < GAP { took } else { stalls.ran(last) });
            last = Instant::now();
            writes += 1;
        }
    });
    println!("{writes} writes, {} ms between two at most", gap.as_millis());
    gap
}

/// The same engine's, where nobody is: each NIC's at an address of its own, from that one on.
fn absent(address: &NetAddr, host: u8) -> NetAddr {
    let mut hosts = host..;
    changed(address, host.into(), |door| {
        *door.port.gid.0.last_mut().expect("bytes") = hosts.next().expect("few");
    })
}

/// Another engine's, with doors as these would be but for a change.
fn changed(address: &NetAddr, engine: u64, mut change: impl FnMut(&mut Door)) -> NetAddr {
    let nics = address.nics().iter().map(|nic| {
        let mut door = Door::decode(&nic.address).expect("a door");
        change(&mut door);
        NicAddr { speed_gbps: nic.speed_gbps, address: door.encode() }
    });
    let nics: Vec<_> = nics.collect();
    NetAddr::new(address.provider(), immwire::core::id::EngineId(engine), &nics)
        .expect("an address")
}

/// Peers whose packets these devices would not send or take: who calls them is told so at once, and why.
fn another_network(case: &Case) {
    let me = Host::new(&case.setup(1));
    let (_other, there) = case.agent("other");
    let mut ipv6 = Gid([0; 16]);
    (ipv6.0[0], ipv6.0[15]) = (0x20, 1);
    type Change<'a> = &'a dyn Fn(&mut Door);
    let changes: [(Change<'_>, NoRoute); 4] = [
        (&|door| door.port.kind = GidKind::RoceV1, NoRoute::OtherRoce),
        (&|door| door.port.gid = ipv6, NoRoute::OtherFamily),
        (&|door| (door.port.kind, door.port.lid) = (GidKind::Infiniband, 1), NoRoute::OtherLink),
        (&|door| door.port.gid = Gid::NONE, NoRoute::Unnamed),
    ];
    for (engine, (change, expected)) in (1..).zip(changes) {
        let found = me.engine.add_peer(&changed(&there, engine, change));
        let Err(AddPeerError::Connect(ConnectError::NoRoute { why })) = found else {
            panic!("{expected:?}: {found:?}");
        };
        assert_eq!(why, expected);
    }
    // As it is, it is reached.
    me.peer(&there);
}

/// Several engines that are not there are called, while much is written to one that is.
fn calls_to_nobody(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let (another, there) = case.agent("another");
    let quiet =
        longest_gap(&me, (&mut other, peer), |_| std::thread::sleep(Duration::from_secs(2)));
    let gap = longest_gap(&me, (&mut other, peer), |engine| {
        let called = engine.add_peer(&absent(&there, 200)).expect("a call");
        assert!(engine.wait_peer(called, patience()).is_err());
    });
    assert!(gap < GAP, "{gap:?} without a write; {quiet:?} when nobody was called");
    let gap = longest_gap(&me, (&mut other, peer), |engine| {
        let called: Vec<_> = (201..206)
            .map(|host| {
                std::thread::sleep(Duration::from_millis(300));
                engine.add_peer(&absent(&there, host)).expect("a call")
            })
            .collect();
        // One that is there is not kept waiting by those who are not.
        let start = Instant::now();
        let found = engine.add_peer(&there).expect("a call");
        assert_eq!(engine.wait_peer(found, patience()), Ok(()));
        println!("one that is there was up after {} ms", start.elapsed().as_millis());
        for peer in called {
            let reason = DownReason::NeverAnswered;
            assert_eq!(engine.wait_peer(peer, patience()), Err(PeerError::Down { peer, reason }));
        }
    });
    assert!(gap < GAP, "{gap:?} without a write; {quiet:?} when nobody was called");
    drop(another);
}

/// Three engines of four NICs that are not there are called, and a moment later one that is: of that one something is said before all that is asked
/// of the others was answered.
fn one_among_absent_engines(case: &Case) {
    let me = Host::new(&case.setup(4));
    let mut other = case.bare_agent("other");
    let there = other.build(&case.setup(4));
    let called = [200, 210, 220].map(|host| me.call(&absent(&there, host)).expect("a call"));
    std::thread::sleep(Duration::from_millis(400));
    let (stalls, start) = (Stalls::watch(), Instant::now());
    let found = me.call(&there).expect("a call");
    assert_eq!(me.met(found), Ok(()));
    println!("one that is there was up after {} ms", start.elapsed().as_millis());
    // All that is asked of the others takes six seconds.
    assert_eq!(stalls.beyond(start, Duration::from_secs(3)), None);
    for peer in called {
        let reason = DownReason::NeverAnswered;
        assert_eq!(me.engine.wait_peer(peer, patience()), Err(PeerError::Down { peer, reason }));
    }
}

/// One of a peer's NICs is not answered from: the peer is reached by the other, and nobody waits for that.
fn a_nic_without_answer(case: &Case) {
    let setup = |names: &[&str]| {
        let devices = names.iter().map(|&name| name.to_owned()).collect();
        Setup { devices, ..case.setup(2) }
    };
    let me = Host::new(&setup(APART[0]));
    let (mut near, mut far) = (case.bare_agent("near"), case.bare_agent("far"));
    let peer = me.peer(&near.build(&setup(APART[0])));
    let address = far.build(&setup(APART[1]));
    let mute = Port(3);
    mute.set("netem loss 100%");
    // What the kernel has learned from other tests.
    let forgotten = Command::new("ip").args(["neigh", "flush", "all"]).status();
    assert!(forgotten.is_ok_and(|status| status.success()));
    let gap = longest_gap(&me, (&mut near, peer), |engine| {
        let start = Instant::now();
        let found = engine.add_peer(&address).expect("a call");
        assert_eq!(engine.wait_peer(found, patience()), Ok(()));
        println!("the peer was up after {} ms", start.elapsed().as_millis());
    });
    let found = me.peer(&address);
    let src = me.memory(1 << 20, Own::Engine);
    let (there, desc) = far.memory(&me, 1 << 20, Own::Engine);
    let (counter, tag) = far.counter(&me);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, 1 << 20, 0);
    let start = Instant::now();
    let transfer = write(&me, found, &src, &desc, (0, 0, 1 << 20), Some(tag));
    let end = me.end(&transfer);
    println!("a write there ended after {} ms", start.elapsed().as_millis());
    mute.set("netem");
    assert!(gap < GAP, "{gap:?} without a write");
    assert_eq!(end, End::Done);
    far.count(&me, counter, 1);
    far.check(&me, there, 0, 1 << 20, pattern);
}
