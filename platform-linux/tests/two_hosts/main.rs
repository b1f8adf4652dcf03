//! Two hosts, as far as the kernel can make two of one: each in a network of its own, joined by a link that is
//! slow, loses packets, and breaks. Engines write, count, meet at barriers and send messages across it, by
//! libfabric over TCP: whichever libfabric `IMMWIRE_LIBFABRIC` names.
//!
//! Each test is a process of its own, which is one host; the agent of the conformance suite is the other. It
//! needs root, `ip`, `nsenter` and `/dev/net/tun`, and fails where they are missing, unless
//! `IMMWIRE_WITHOUT_NETNS=1` says that this is meant.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test says what is wrong by panicking"
)]

#[allow(dead_code, reason = "the conformance suite uses the rest")]
#[path = "../conformance/agent.rs"]
mod agent;
#[allow(dead_code, reason = "as above")]
#[path = "../conformance/host.rs"]
mod host;
mod net;
#[allow(dead_code, reason = "as above")]
#[path = "../conformance/segment.rs"]
mod segment;

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use immwire::{
    Builder, DownReason, End, ImmTag, LibfabricOptions, MrDesc, PagedWrite, Pages, PeerId,
    PeerState, SingleWrite, Transfer, TransferEngine, Transport,
};
use libtest_mimic::{Arguments, Trial};
use rustix::process::Signal;

use crate::agent::{Agent, Ask, Say, peer_of};
use crate::host::{Foreign, Host, Memory, Motor, Own, Pattern, Setup, names, patience};
use crate::net::{Missing, NIC, Wire};

/// What engines are built from; the conformance suite has several of these.
pub struct Provider {
    pub builder: fn(&Setup) -> Builder,
}

impl Provider {
    pub fn named(_: &str) -> &'static Self {
        &Self {
            builder: |_| {
                let domain = Some(NIC.to_owned());
                let options = LibfabricOptions { domain, ..LibfabricOptions::default() };
                TransferEngine::builder().transport(Transport::Libfabric(options))
            },
        }
    }

    pub fn has_gpus(&self) -> bool {
        false
    }
}

/// In the environment of a process that runs one test.
const INSIDE: &str = "IMMWIRE_TWO_HOSTS_TEST";
/// The exit status of one that could not.
const IS_MISSING: i32 = 77;
/// No test takes longer.
const LIFE: Duration = Duration::from_secs(100);

type Body = fn() -> Result<(), Missing>;

const TESTS: [(&str, Body); 6] = [
    ("as_ever", as_ever),
    ("slow_and_lossy", slow_and_lossy),
    ("link_down_and_up", || broken_for_a_while(Break::Link)),
    ("silence_and_back", || broken_for_a_while(Break::Silence)),
    ("killed", || ended(false)),
    ("powered_off", || ended(true)),
];

fn main() -> ExitCode {
    let inside = std::env::var(INSIDE).ok();
    if let Some(test) = inside {
        // Every process but the first is a host.
        let left = net::leave();
        if left.is_ok() && agent::serve_if_asked() {
            return ExitCode::SUCCESS;
        }
        let (_, body) = TESTS.iter().find(|(name, _)| *name == test).expect("a test");
        return match left.and_then(|()| body()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(Missing(what)) => {
                eprintln!("missing: {what}");
                ExitCode::from(u8::try_from(IS_MISSING).expect("small"))
            }
        };
    }
    let trials = TESTS.map(|(name, _)| Trial::test(name, move || apart(name).map_err(Into::into)));
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit_code()
}

/// Runs one test in a process of its own.
fn apart(name: &str) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let log = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    let output = log.reopen().map_err(|error| error.to_string())?;
    let mut child = Command::new(program)
        .env(INSIDE, name)
        .stderr(output)
        .spawn()
        .map_err(|error| error.to_string())?;
    let start = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break Some(status),
            None if start.elapsed() > LIFE => {
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let said = std::fs::read_to_string(log.path()).unwrap_or_default();
    match status {
        Some(status) if status.success() => {
            eprint!("{said}");
            Ok(())
        }
        Some(status) if status.code() == Some(IS_MISSING) => {
            if std::env::var_os("IMMWIRE_WITHOUT_NETNS").is_some_and(|value| value == "1") {
                println!("NOT RUN: IMMWIRE_WITHOUT_NETNS=1, and {said}");
                return Ok(());
            }
            Err(format!("{said}; or set IMMWIRE_WITHOUT_NETNS=1 to go without this test"))
        }
        Some(status) => Err(format!("{status}\n{said}")),
        None => Err(format!("hangs\n{said}")),
    }
}

// ---- the two hosts ----

fn setup(nics: u8, silent_ms: Option<u64>) -> Setup {
    Setup {
        provider: "any".to_owned(),
        motor: Motor::Thread,
        nics,
        transfers: 1024,
        drain_ms: 500,
        silent_ms,
        idle_ms: None,
        key: Some("of the two hosts".to_owned()),
        foreign: Foreign::Auto,
        devices: Vec::new(),
        host: None,
    }
}

/// The other host: up, in a network of its own, without an engine.
fn other_host() -> Agent {
    let mut agent = Agent::process("the other host");
    agent.post(Ask::Census { gpus: false });
    let up = agent.answer(None);
    assert!(matches!(up, Say::Census { .. }), "{up:?}");
    agent
}

/// Both engines, connected, and memory for writes.
struct Pair {
    me: Host,
    other: Agent,
    address: immwire::NetAddr,
    peer: PeerId,
    src: Memory,
    there: usize,
    desc: MrDesc,
    counter: usize,
    tag: ImmTag,
}

const SIZE: u64 = 4 << 20;

impl Pair {
    fn new(mut other: Agent, setup: &Setup) -> Self {
        let me = Host::new(setup);
        let address = other.build(setup);
        let peer = me.peer(&address);
        let src = me.memory(SIZE, Own::Engine);
        let (there, desc) = other.memory(&me, SIZE, Own::Engine);
        let (counter, tag) = other.counter(&me);
        Self { me, other, address, peer, src, there, desc, counter, tag }
    }

    fn submit(&self, len: u64, imm: Option<ImmTag>, limit: Duration) -> Transfer {
        let engine = self.me.engine.with_deadline(limit);
        let write = SingleWrite {
            peer: self.peer,
            src: &self.src,
            src_offset: 0,
            dst: &self.desc,
            dst_offset: 0,
            len,
            imm,
        };
        engine.submit_single_write(&write).expect("submit")
    }

    /// A write whose every byte is checked.
    fn write(&mut self, seed: u64, len: u64) {
        let pattern = Pattern(seed);
        pattern.fill(&self.src, 0, len, 0);
        let transfer = self.submit(len, Some(self.tag), patience());
        self.me.done(&transfer);
        self.other.count(&self.me, self.counter, 1);
        self.other.check(&self.me, self.there, 0, len, pattern);
    }

    /// All operations, both ways.
    fn everything(&mut self, lengths: &[u64], pages: u32, messages: u8) {
        for (seed, &len) in (1..).zip(lengths) {
            self.write(seed, len);
        }
        let pattern = Pattern(99);
        pattern.fill(&self.src, 0, u64::from(pages) * 4096, 0);
        let from: Vec<u32> = (0..pages).rev().collect();
        let list = |indices: Vec<u32>| Pages { indices: indices.into(), stride: 4096, offset: 0 };
        let transfer = self.me.engine.submit_paged_writes(&PagedWrite {
            peer: self.peer,
            page_bytes: 4096,
            src: &self.src,
            src_pages: list(from.clone()),
            dst: &self.desc,
            dst_pages: list((0..pages).collect()),
            imm: Some(self.tag),
        });
        self.me.done(&transfer.expect("submit"));
        self.other.count(&self.me, self.counter, pages.into());
        let ask = Ask::MismatchedPage { region: self.there, pages: from, pattern };
        assert_eq!(self.other.place(&self.me, ask), None, "the first page that is wrong");
        // They meet at a barrier: each has heard of the other.
        let Say::Peers(back) = self.other.ask(&self.me, Ask::Peers { count: 1 }) else { panic!() };
        let mine = self.me.engine.counter().expect("a counter");
        for _ in 0..3 {
            let tag = mine.tag().bits();
            self.other.post(Ask::Barrier { peers: back.clone(), tag });
            let group = self.me.engine.add_peer_group(&[self.peer]);
            let barrier = self.me.engine.submit_barrier(&group, self.tag).expect("submit");
            self.me.done(&barrier);
            self.me.count(&mine, 1, patience()).expect("the other's");
            assert_eq!(self.other.answer(Some(&self.me)), Say::Text("Done".into()));
            self.other.count(&self.me, self.counter, 1);
        }
        for n in 0..messages {
            let bytes = vec![n; 100 * usize::from(n)];
            self.me.done(&self.me.engine.submit_send(self.peer, &bytes).expect("submit"));
            let got = self.other.ask(&self.me, Ask::Recv { ms: 20_000 });
            assert_eq!(got, Say::Message { from: back[0], bytes: bytes.clone() });
            let ask = Ask::Send { peer: back[0], bytes: bytes.clone() };
            assert_eq!(self.other.ask(&self.me, ask), Say::Text("Done".into()));
            let message = self.me.recv(patience()).expect("a message");
            assert_eq!((message.from, message.bytes), (self.peer, bytes));
        }
        let left = self.other.number(&self.me, Ask::Available { counter: self.counter });
        assert_eq!((left, mine.available()), (0, 0), "counted twice");
    }

    /// The peer is up, or is called again.
    fn is_there_again(&mut self) {
        let mut peers = self.me.engine.peers();
        if peers.is_empty() {
            self.me.peer(&self.address);
            peers = self.me.engine.peers();
        }
        assert_eq!(peers.len(), 1, "{peers:?}");
        self.peer = peers[0];
        let Say::Peers(back) = self.other.ask(&self.me, Ask::Peers { count: 1 }) else { panic!() };
        assert_eq!(back.len(), 1, "{:?}", back.into_iter().map(peer_of).collect::<Vec<_>>());
    }
}

// ---- the tests ----

fn as_ever() -> Result<(), Missing> {
    for nics in [1, 4] {
        let other = other_host();
        net::veth(other.pid())?;
        let mut pair = Pair::new(other, &setup(nics, None));
        pair.everything(&[0, 1, 4097, 1 << 20, SIZE], 1000, 20);
        drop(pair);
        net::unlink()?;
    }
    Ok(())
}

fn slow_and_lossy() -> Result<(), Missing> {
    let other = other_host();
    let wire = Wire::new(other.pid(), 0x5eed)?;
    wire.be_bad(Duration::from_millis(20), 10, 50);
    let start = Instant::now();
    let mut pair = Pair::new(other, &setup(2, None));
    pair.everything(&[0, 1, 4097, 200_000], 40, 5);
    assert!(start.elapsed() > Duration::from_millis(500), "not as slow as it should be");
    assert_eq!(pair.me.engine.peer_state(pair.peer), Some(PeerState::Up));
    Ok(())
}

/// How a link breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Break {
    /// The interface is down, and the kernel knows.
    Link,
    /// Packets vanish.
    Silence,
}

/// Nothing gets through for three seconds. Transfers go on afterwards, or have ended by their deadlines; nothing
/// hangs, and errors name the peer. Then all is as before.
fn broken_for_a_while(how: Break) -> Result<(), Missing> {
    let other = other_host();
    let wire = match how {
        Break::Silence => Some(Wire::new(other.pid(), 1)?),
        Break::Link => {
            net::veth(other.pid())?;
            None
        }
    };
    let cut = |is_down| match &wire {
        Some(wire) => {
            wire.cut(is_down);
            Ok(())
        }
        None => net::ip(&format!("link set {NIC} {}", if is_down { "down" } else { "up" })),
    };
    let mut pair = Pair::new(other, &setup(1, None));
    pair.write(1, SIZE);
    let patient: Vec<_> =
        (0..4).map(|_| pair.submit(SIZE, None, Duration::from_secs(30))).collect();
    cut(true)?;
    let start = Instant::now();
    let limit = Duration::from_secs(1);
    let hurried: Vec<_> = (0..4).map(|_| pair.submit(SIZE, None, limit)).collect();
    // The deadline, the drain, and the time to be rid of what is in flight.
    for transfer in &hurried {
        let end = pair.me.end_within(transfer, Duration::from_secs(3)).expect("ends in time");
        assert!(names(end, pair.peer), "{end:?}");
    }
    assert!(start.elapsed() >= limit, "ended before its deadline: {:?}", start.elapsed());
    std::thread::sleep(Duration::from_secs(3).saturating_sub(start.elapsed()));
    cut(false)?;
    for transfer in &patient {
        let end = pair.me.end_within(transfer, Duration::from_secs(32)).expect("ends in time");
        assert!(end == End::Done || names(end, pair.peer), "{end:?}");
    }
    pair.is_there_again();
    // The counter may have got what was written before; what is written now is checked byte by byte.
    let (counter, tag) = pair.other.counter(&pair.me);
    (pair.counter, pair.tag) = (counter, tag);
    pair.everything(&[1, 1 << 20], 100, 3);
    Ok(())
}

/// The other host's process is killed under load; its kernel says so, or nothing is heard of it any more.
fn ended(power_off: bool) -> Result<(), Missing> {
    let other = other_host();
    let silent_ms = power_off.then_some(2000);
    let wire = if power_off {
        Some(Wire::new(other.pid(), 2)?)
    } else {
        net::veth(other.pid())?;
        None
    };
    let network = (!power_off).then(|| net::keep(other.pid()));
    let mut pair = Pair::new(other, &setup(1, silent_ms));
    pair.write(1, SIZE);
    let mine = pair.me.engine.counter().expect("a counter");
    let transfers: Vec<_> =
        (0..50).map(|_| pair.submit(SIZE, Some(pair.tag), Duration::from_secs(60))).collect();
    pair.me.done(&transfers[0]);
    let start = Instant::now();
    if let Some(wire) = &wire {
        // First, so that the kernel of the dead cannot tell.
        wire.cut(true);
    }
    pair.other.signal(Signal::KILL);
    let soon = Duration::from_secs(6);
    for transfer in &transfers[1..] {
        let end = pair.me.end_within(transfer, soon).expect("ends in time");
        assert!(end == End::Done || names(end, pair.peer), "{end:?}");
    }
    let last = pair.me.end(&transfers[49]);
    assert!(names(last, pair.peer), "{last:?}");
    let state = pair.me.peer_down(pair.peer, soon);
    assert!(matches!(state, Some(PeerState::Down(_))), "{state:?}");
    assert!(start.elapsed() < soon, "{:?}", start.elapsed());
    if power_off {
        // Less the time since it was last heard of.
        assert!(start.elapsed() > Duration::from_secs(1), "{:?}", start.elapsed());
        let silent = Some(PeerState::Down(DownReason::Silent { for_ms: 2000 }));
        assert_eq!(state, silent);
    }
    eprintln!("    known after {:?}: {state:?}", start.elapsed());
    let expected = [immwire::Expected { peer: pair.peer, writes: 1 }];
    let late = mine.wait_from(&expected, Duration::from_millis(50)).expect_err("it is gone");
    assert!(late.to_string().contains(&pair.peer.to_string()), "{late}");
    let error = pair.me.try_peer(&pair.address).expect_err("nobody is there");
    assert!(error.contains("never answered"), "{error}");
    drop(network);
    Ok(())
}
