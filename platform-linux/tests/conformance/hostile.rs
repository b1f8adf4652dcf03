//! Strangers at the listening socket, and peers that have gone mad: nobody else is disturbed.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use immwire::core::id::EngineId;
use immwire::core::wire::NicAddr;
use immwire::{DownReason, NetAddr, PeerState};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
    connect, listen, recv, send, socket_with,
};

use crate::agent::{Agent, Ask};
use crate::host::{Host, Own, patience};
use crate::operations::write;
use crate::{Case, Random, Spread, Test};

/// Where strangers reach a socket.
pub const AT_A_SOCKET: &[Test] = &[
    ("noise_on_the_socket", Spread::ProcessesBothMotors, noise_on_the_socket),
    ("answers_that_are_noise", Spread::ProcessesBothMotors, answers_that_are_noise),
];

/// Where peers share memory with us.
pub const IN_SHARED_MEMORY: &[Test] = &[
    ("a_session_of_noise", Spread::ProcessesBothMotors, a_session_of_noise),
    ("a_session_of_noise_1x4", Spread::Processes, |case| {
        a_session_of_noise(&Case { nics: (1, 4), ..*case });
    }),
];

fn raw(kind: SocketType) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, kind, flags, None).expect("a socket")
}

fn address(name: &str) -> SocketAddrUnix {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name")
}

/// What a genuine engine says first, as a stranger would overhear it.
fn first_words(case: &Case) -> (Vec<u8>, NetAddr) {
    let (listener, fake) = impostor(case);
    let me = Host::new(&case.setup(1));
    let call = std::thread::spawn(move || hear(&listener).1);
    // Nobody answers, so nothing comes of it.
    let driver_less = me.engine.clone();
    let adding = std::thread::spawn(move || driver_less.add_peer(&fake));
    let added = me.until(patience(), || adding.is_finished().then_some(()));
    assert!(added.is_some());
    adding.join().expect("adds").expect("a call was started");
    let heard = me.until(patience(), || call.is_finished().then_some(()));
    assert!(heard.is_some());
    (call.join().expect("heard"), me.engine.address().clone())
}

/// A listening socket of ours that pretends to be an engine, and its address.
fn impostor(case: &Case) -> (OwnedFd, NetAddr) {
    // Tests run side by side.
    static IMPOSTORS: AtomicU64 = AtomicU64::new(0);
    let salt = IMPOSTORS.fetch_add(1, Ordering::Relaxed);
    let id =
        (u128::from(case.seed) << 64 | u128::from(std::process::id()) << 16 | u128::from(salt))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    let listener = raw(SocketType::SEQPACKET);
    bind(&listener, &address(&format!("immwire-{id:032x}"))).expect("bind");
    listen(&listener, 16).expect("listen");
    let nic = NicAddr {
        speed_gbps: 100,
        address: heapless::Vec::from_slice(&id.to_be_bytes()).expect("fits"),
    };
    let kind = immwire::core::wire::ProviderKind::Shm;
    let address = NetAddr::new(kind, EngineId(case.seed ^ salt), &[nic]).expect("an address");
    (listener, address)
}

/// Waits for a caller, and for its first message.
fn hear(listener: &OwnedFd) -> (OwnedFd, Vec<u8>) {
    let start = std::time::Instant::now();
    let mut socket = None;
    while start.elapsed() < patience() {
        socket = socket.or_else(|| accept(listener).ok());
        let mut bytes = [0; 8192];
        if let Some(caller) = &socket
            && let Ok((len, _)) = recv(caller, &mut bytes, RecvFlags::DONTWAIT)
        {
            return (socket.expect("accepted"), bytes[..len].to_vec());
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    panic!("nobody calls");
}

/// Bytes of which some are right.
fn noise(random: &mut Random, good: &[u8]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    match random.below(6) {
        0 => bytes.truncate(usize::try_from(random.below(good.len() as u64)).expect("small")),
        1 => bytes.extend((0..random.below(4000)).map(|n| u8::try_from(n % 256).expect("small"))),
        2 => bytes = (0..60_000).map(|_| u8::try_from(random.below(256)).expect("small")).collect(),
        3 => {
            let len = random.below(300);
            bytes = (0..len).map(|_| u8::try_from(random.below(256)).expect("small")).collect();
        }
        _ => {
            for _ in 0..=random.below(4) {
                let at = usize::try_from(random.below(good.len() as u64)).expect("small");
                bytes[at] = u8::try_from(random.below(256)).expect("small");
            }
        }
    }
    bytes
}

/// Calls with noise, again and again; keeps some of the connections and says nothing on them.
fn pester(name: &str, good: &[u8], mut random: Random, stop: &AtomicBool, calls: &AtomicU64) {
    let mut kept = std::collections::VecDeque::new();
    while !stop.load(Ordering::Relaxed) {
        let socket = raw(SocketType::SEQPACKET);
        // The wrong kind of socket is refused by the kernel.
        assert!(connect(raw(SocketType::STREAM), &address(name)).is_err());
        if connect(&socket, &address(name)).is_err() {
            // As many as can wait do.
            std::thread::sleep(Duration::from_micros(100));
            continue;
        }
        calls.fetch_add(1, Ordering::Relaxed);
        match random.below(4) {
            // Says nothing, and stays.
            0 => {}
            // Says the right thing once, then noise.
            1 => {
                let _ = send(&socket, good, SendFlags::NOSIGNAL);
                let _ = send(&socket, &noise(&mut random, good), SendFlags::NOSIGNAL);
            }
            _ => {
                for _ in 0..random.below(4) {
                    let _ = send(&socket, &noise(&mut random, good), SendFlags::NOSIGNAL);
                }
            }
        }
        if random.below(8) == 0 {
            kept.push_back(socket);
            if kept.len() > 40 {
                kept.pop_front();
            }
        }
    }
}

fn noise_on_the_socket(case: &Case) {
    let socket_name = case.facts().socket_name.expect("a socket");
    let (good, _) = first_words(case);
    let (me, mut other, peer) = case.pair();
    let name = socket_name(&me.engine);
    let (stop, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let pesterers: Vec<_> = (0..2_u64)
        .map(|n| {
            let (name, good) = (name.clone(), good.clone());
            let (stop, calls) = (Arc::clone(&stop), Arc::clone(&calls));
            let random = Random(case.seed.rotate_left(7 * u32::try_from(n).expect("small")) | 1);
            std::thread::spawn(move || pester(&name, &good, random, &stop, &calls))
        })
        .collect();
    let src = me.memory(300_000, Own::Engine);
    let (there, desc) = other.memory(&me, 300_000, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let mut rounds = 0;
    // Traffic goes on meanwhile, with every byte and count right.
    while calls.load(Ordering::Relaxed) < 1500 || rounds < 50 {
        let pattern = case.pattern(rounds);
        pattern.fill(&src, 0, 300_000, 0);
        let transfer = write(&me, peer, &src, &desc, (0, 0, 300_000), Some(tag));
        other.count(&me, counter, 1);
        other.check(&me, there, 0, 300_000, pattern);
        me.done(&transfer);
        rounds += 1;
        let (first, all) = (rounds == 3000, calls.load(Ordering::Relaxed));
        assert!(!first, "only {all} calls in {rounds} rounds");
    }
    stop.store(true, Ordering::Relaxed);
    let over = || pesterers.iter().all(|thread| thread.is_finished()).then_some(());
    assert!(me.until(patience(), over).is_some(), "somebody still calls");
    pesterers.into_iter().for_each(|thread| thread.join().expect("no panic"));
    // They have all been seen off, and friends are let in.
    let (mut third, address) = case.agent("third");
    let back = third.peer(&me, me.engine.address());
    let named = me.engine.peers();
    assert_eq!(named.len(), 2, "{named:?}");
    let mine = me.engine.counter().expect("a counter");
    let (index, generation) = (back.index, back.generation);
    third.ask(&me, Ask::Imm { peer: (index, generation), tag: mine.tag().bits(), writes: 1 });
    me.count(&mine, 1, patience()).expect("the third's");
    assert!(me.peer(&address).index != peer.index);
}

/// The address leads to somebody who is no engine: the call fails with a reason, and costs no more.
fn answers_that_are_noise(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let mut random = case.random();
    for round in 0..24 {
        let (listener, fake) = impostor(case);
        let seed = random.number();
        let answering = std::thread::spawn(move || {
            let mut random = Random(seed | 1);
            let (socket, good) = hear(&listener);
            // Silence, an end, or noise.
            match random.below(8) {
                0 => drop(socket),
                _ => {
                    let answer = noise(&mut random, &good);
                    let _ = send(&socket, &answer, SendFlags::NOSIGNAL);
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        });
        me.try_peer(&fake).expect_err("an impostor is no peer");
        answering.join().expect("no panic");
        let known = me.engine.peers();
        assert_eq!(known, [peer], "round {round}");
    }
    let (counter, tag) = other.counter(&me);
    me.done(&me.engine.submit_imm(peer, tag, 1).expect("submit"));
    other.count(&me, counter, 1);
}

/// A peer that writes random words over all that it shares with us, while both sides write. It may be
/// dropped, or be served; we must live, and serve others, byte for byte.
fn a_session_of_noise(case: &Case) {
    let me = case.me();
    let (mut third, address) = case.agent("third");
    let to_third = me.peer(&address);
    let src = me.memory(300_000, Own::Engine);
    let (there, desc) = third.memory(&me, 300_000, Own::Engine);
    let (counter, tag) = third.counter(&me);
    // Most rounds' lies hit nothing that is read: as many more as it takes until one was noticed.
    let (mut dropped, mut round) = (0, 0);
    while round < 10 || (dropped == 0 && round < 100) {
        round += 1;
        let (mut mad, address): (Agent, NetAddr) = case.agent("mad");
        let peer = me.peer(&address);
        let (_, to) =
            mad.memory(&me, 1 << 20, if round % 2 == 0 { Own::Engine } else { Own::Test });
        let (_, mad_tag) = mad.counter(&me);
        let long = me.memory(1 << 20, Own::Engine);
        me.done(&write(&me, peer, &long, &to, (0, 0, 1 << 20), Some(mad_tag)));
        mad.may_die();
        mad.post(Ask::Scribble { seed: case.seed.wrapping_add(round), ms: 60 });
        // As long as it scribbles, and longer: an engine that sleeps does not look.
        let (start, mut n) = (Instant::now(), 0);
        while n < 40 || start.elapsed() < Duration::from_millis(80) {
            n += 1;
            let limited = me.engine.with_deadline(Duration::from_secs(1));
            let ours = limited.submit_single_write(&immwire::SingleWrite {
                peer,
                src: &long,
                src_offset: 0,
                dst: &to,
                dst_offset: 0,
                len: 1 << 20,
                imm: Some(mad_tag),
            });
            let pattern = case.pattern(1000 * round + n);
            pattern.fill(&src, 0, 300_000, 0);
            let transfer = write(&me, to_third, &src, &desc, (0, 0, 300_000), Some(tag));
            third.count(&me, counter, 1);
            third.check(&me, there, 0, 300_000, pattern);
            me.done(&transfer);
            // It ends somehow, in time.
            let _ = me.end(&ours.expect("submit"));
        }
        // It may have died of what it did to itself.
        let scribbled = mad.answer_if_alive(&me);
        assert_ne!(scribbled, Some(crate::agent::Say::Number(0)), "nothing was scribbled over");
        if let Some(PeerState::Down(reason)) = me.engine.peer_state(peer) {
            assert!(
                matches!(reason, DownReason::Protocol | DownReason::Disconnected),
                "{reason:?}"
            );
            dropped += 1;
        }
        me.engine.remove_peer(peer);
        let state = me.peer_down(peer, patience());
        assert!(matches!(state, None | Some(PeerState::Down(_))), "{state:?}");
    }
    assert!(dropped > 0, "no lie was ever noticed");
}
