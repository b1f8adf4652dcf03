//! Providers in pairs, in one process: handshakes, writes by each path, taking back, death, sleep.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use immwire_core::group::Token;
use immwire_core::imm::{Imm, ImmTag};
use immwire_core::peer::{Crossing, resolve_crossing};
use immwire_core::plan::{PageRun, RunLayout};
use immwire_core::region::Rights;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;
use crate::provider::{Memory, Path, Registered};

/// Runs that test in a process of its own, as what it counts there other tests have, too. Returns whether this is it.
fn is_own_process(test: &str) -> bool {
    const CHILD: &str = "IMMWIRE_TEST_ALONE";
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let test = format!("shm::tests::{test}");
    let ran = command.args(["--exact", &test]).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    let also = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && said.contains(" 1 passed"), "{said}{also}");
    false
}

/// What a provider reported.
struct Record {
    hello: Hello,
    refuse: Option<Refusal>,
    peers: BTreeMap<EngineId, PeerId>,
    calling: BTreeMap<EngineId, PeerId>,
    next: u16,
    done: Vec<(u64, Result<(), WorkError>)>,
    /// Undelivered: those that were not begun.
    given_back: Vec<u64>,
    immediates: Vec<(NicIndex, PeerId, u32)>,
    connected: Vec<PeerId>,
    lost: Vec<(PeerId, DownReason)>,
}

impl Record {
    fn new_peer(&mut self) -> PeerId {
        self.next += 1;
        PeerId { index: self.next, generation: 1 }
    }
}

impl Sink for Record {
    fn work_done(&mut self, _: NicIndex, token: Token, outcome: Result<(), WorkError>) {
        self.done.push((token.bits(), outcome));
    }

    fn immediate(&mut self, nic: NicIndex, peer: PeerId, imm: u32) {
        self.immediates.push((nic, peer, imm));
    }

    fn incoming(&mut self, hello: &Hello) -> Result<(PeerId, Hello), Refusal> {
        if let Some(refusal) = self.refuse {
            return Err(refusal);
        }
        let engine = hello.engine();
        let peer = match self.calling.get(&engine) {
            Some(&peer) => match resolve_crossing(self.hello.engine(), engine) {
                Crossing::KeepTheirs => peer,
                _ => return Err(Refusal::Crossed),
            },
            None => self.new_peer(),
        };
        self.peers.insert(engine, peer);
        Ok((peer, self.hello.clone()))
    }

    fn connected(&mut self, peer: PeerId, hello: &Hello) {
        self.calling.remove(&hello.engine());
        self.peers.insert(hello.engine(), peer);
        self.connected.push(peer);
    }

    fn disconnected(&mut self, peer: PeerId, reason: DownReason) {
        self.lost.push((peer, reason));
    }

    fn nic_changed(&mut self, _: NicIndex, _: bool) {
        panic!("shared memory loses no nic");
    }

    fn path_broken(&mut self, _: PeerId, _: Path) {
        panic!("shared memory breaks no path");
    }

    fn path_restored(&mut self, _: PeerId, _: Path) {
        panic!("shared memory breaks no path");
    }

    fn undelivered(&mut self, work: &WorkRequest) {
        self.given_back.push(work.token.bits());
    }

    fn page_run(&self, _: &WorkRequest, _: &mut [u32], _: &mut [u32]) -> Option<RunLayout> {
        None
    }

    fn has_more(&self, _: NicIndex) -> bool {
        false
    }
}

struct Node {
    provider: ShmProvider,
    record: Record,
    mailbox: Registered,
    clock: Instant,
    /// Where its time stands still, if it does.
    stands: Option<Time>,
}

impl Node {
    fn with(config: ShmConfig) -> Self {
        let provider = ShmProvider::new(config).unwrap();
        let geometry = immwire_core::mailbox::Geometry::new(2, 128).unwrap();
        let bytes = usize::try_from(geometry.bytes()).unwrap();
        let mailbox = provider.memory().alloc(bytes).unwrap();
        let hello = Hello {
            address: provider.address(),
            mailbox: mailbox.desc,
            geometry,
            heartbeat_ms: 100,
            call: 1,
        };
        let record = Record {
            hello,
            refuse: None,
            peers: BTreeMap::new(),
            calling: BTreeMap::new(),
            next: 0,
            done: vec![],
            given_back: vec![],
            immediates: vec![],
            connected: vec![],
            lost: vec![],
        };
        Self { provider, record, mailbox, clock: Instant::now(), stands: None }
    }

    fn new(engine: u64) -> Self {
        Self::with(ShmConfig::new(EngineId(engine)))
    }

    fn now(&self) -> Time {
        self.stands.unwrap_or_else(|| Time::ZERO.after(self.clock.elapsed()))
    }

    /// No time passes for it from now on: whatever it gives up, it gives up for another reason.
    fn stand_still(&mut self) {
        self.stands = Some(self.now());
    }

    fn poll(&mut self) -> bool {
        let now = self.now();
        self.provider.poll(now, &mut self.record)
    }

    fn call(&mut self, other: &Self) -> PeerId {
        let peer = self.record.new_peer();
        let address = other.provider.address();
        self.record.calling.insert(address.engine(), peer);
        let hello = self.record.hello.clone();
        self.provider.connect(self.now(), peer, &address, &hello).unwrap();
        peer
    }

    fn peer(&self, other: &Self) -> PeerId {
        self.record.peers[&other.record.hello.engine()]
    }

    /// Writes at once what is one piece, if that goes, as engines do; else posts.
    fn post(&mut self, work: &[WorkRequest]) -> usize {
        let nic = work.first().map_or(0, |work| work.nic);
        if let [work] = work
            && self.provider.write_at_once(nic, &work.piece())
        {
            self.record.work_done(nic, work.token, Ok(()));
            return 1;
        }
        self.provider.post(nic, work, &mut self.record)
    }
}

/// Polls both until `done`; fails the test after a few seconds.
fn run(a: &mut Node, b: &mut Node, mut done: impl FnMut(&mut Node, &mut Node) -> bool) {
    let start = Instant::now();
    while !done(a, b) {
        a.poll();
        b.poll();
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{:?} {:?}",
            a.provider.slots,
            b.provider.slots
        );
    }
}

fn join(mut a: Node, mut b: Node) -> (Node, Node) {
    let peer = a.call(&b);
    run(&mut a, &mut b, |a, b| !a.record.connected.is_empty() && !b.record.connected.is_empty());
    assert_eq!(a.record.connected, [peer]);
    (a, b)
}

fn pair() -> (Node, Node) {
    join(Node::new(1), Node::new(2))
}

fn pair_by(foreign: ForeignPath) -> (Node, Node) {
    let config = |engine| ShmConfig { foreign, ..ShmConfig::new(EngineId(engine)) };
    join(Node::with(config(1)), Node::with(config(2)))
}

/// A source, written before and left alone after.
fn source(node: &Node, bytes: usize, seed: u8) -> Registered {
    let region = node.provider.memory().alloc(bytes).unwrap();
    for at in 0..bytes {
        // SAFETY: inside the region; nobody else has its address yet.
        unsafe { region.ptr.as_ptr().add(at).write(pattern(at, seed)) };
    }
    region
}

fn pattern(at: usize, seed: u8) -> u8 {
    u8::try_from(at % 251).unwrap() ^ seed
}

fn bytes(region: &Registered) -> Vec<u8> {
    // SAFETY: reads bytes of the region one by one; who writes to it has been heard of.
    (0..region.len).map(|at| unsafe { region.ptr.as_ptr().add(at).read_volatile() }).collect()
}

fn imm(units: u16) -> Imm {
    ImmTag::new(5, 3).unwrap().with_units(units).unwrap()
}

fn write(token: u64, peer: PeerId, src: &Registered, dst: &Registered) -> WorkRequest {
    WorkRequest {
        token: Token::from_bits(token),
        nic: 0,
        remote_nic: 0,
        peer,
        src: src.local.base,
        src_key: 0,
        dst: dst.desc.base,
        dst_key: dst.desc.keys.get(0).unwrap(),
        len: (src.len.min(dst.len)) as u64,
        run: PageRun::NONE,
        imm: Some(imm(16)),
    }
}

/// Memory of this process that no file stands behind.
struct Foreign {
    memory: Box<[AtomicU8]>,
    region: Registered,
}

fn foreign(node: &Node, len: usize) -> Foreign {
    let memory: Box<[AtomicU8]> = (0..len).map(|_| AtomicU8::new(0)).collect();
    let ptr = NonNull::new(memory.as_ptr().cast_mut().cast()).unwrap();
    // SAFETY: `memory` lives beside the region, and is accessed as atomics only.
    let region =
        unsafe { node.provider.memory().register(ptr, len, Rights::REMOTE_WRITE) }.unwrap();
    Foreign { memory, region }
}

impl Foreign {
    fn bytes(&self) -> Vec<u8> {
        self.memory.iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }
}

// ---- handshake ----

#[test]
fn both_sides_learn_of_each_other() {
    let (a, b) = pair();
    assert_eq!(b.record.connected, [b.peer(&a)]);
    assert_eq!(b.provider.stats(), ShmStats { accepted: 1, refused: 0, dropped: 0 });
}

#[test]
fn a_refusal_reaches_the_caller() {
    for refusal in [Refusal::Busy, Refusal::ShuttingDown] {
        let (mut a, mut b) = (Node::new(1), Node::new(2));
        b.record.refuse = Some(refusal);
        let peer = a.call(&b);
        run(&mut a, &mut b, |a, b| b.provider.stats.refused == 1 && a.provider.handshakes == 0);
        assert_eq!(a.record.lost, [(peer, DownReason::Refused(refusal))]);
        assert!(b.record.connected.is_empty());
    }
}

/// The peer's own call is waited for; should it not come, the peer is asked again, and what it says then holds.
#[test]
fn who_keeps_its_own_call_is_called_again_if_it_does_not_come() {
    for stays in [true, false] {
        let (mut a, mut b) = (Node::new(1), Node::new(2));
        b.record.refuse = Some(Refusal::Crossed);
        let peer = a.call(&b);
        run(&mut a, &mut b, |_, b| b.provider.stats.refused == 3);
        assert!(a.record.lost.is_empty() && a.record.connected.is_empty());
        if stays {
            b.record.refuse = None;
            run(&mut a, &mut b, |a, _| a.record.connected == [peer]);
            assert!(a.record.lost.is_empty());
        } else {
            let mut other = Node::new(3);
            drop(b);
            run(&mut a, &mut other, |a, _| !a.record.lost.is_empty());
            let why = a.record.lost.first().map(|lost| lost.1);
            // As it was on its way, or was to be placed again.
            assert!(
                matches!(why, Some(DownReason::NeverAnswered | DownReason::Disconnected)),
                "{why:?}"
            );
        }
        assert_eq!(a.provider.handshakes, 0);
    }
}

#[test]
fn calls_that_cross_end_in_one_session() {
    for (first, second) in [(1, 2), (2, 1)] {
        let (mut a, mut b) = (Node::new(first), Node::new(second));
        let (to_b, to_a) = (a.call(&b), b.call(&a));
        run(&mut a, &mut b, |a, b| {
            a.provider.handshakes + b.provider.handshakes == 0 && !a.provider.up.is_empty()
        });
        assert_eq!(
            (a.record.connected.clone(), b.record.connected.clone()),
            (vec![to_b], vec![to_a])
        );
        assert!(a.record.lost.is_empty() && b.record.lost.is_empty());
        let (src, dst) = (source(&a, 64, 1), b.provider.memory().alloc(64).unwrap());
        a.post(&[write(1, to_b, &src, &dst)]);
        run(&mut a, &mut b, |_, b| b.record.immediates == [(0, to_a, imm(16).bits())]);
    }
}

#[test]
fn a_group_key_is_asked_of_everybody() {
    let key = |secret: &[u8]| Some(GroupKey::derive(secret));
    for (ours, theirs, good) in [
        (key(b"x"), key(b"x"), true),
        (key(b"x"), key(b"y"), false),
        (key(b"x"), None, false),
        (None, key(b"x"), false),
    ] {
        let node = |engine, group_key| {
            Node::with(ShmConfig { group_key, ..ShmConfig::new(EngineId(engine)) })
        };
        let (mut a, mut b) = (node(1, ours), node(2, theirs));
        let peer = a.call(&b);
        run(&mut a, &mut b, |a, _| a.record.connected.len() + a.record.lost.len() > 0);
        if good {
            assert_eq!(a.record.connected, [peer]);
        } else {
            let why = DownReason::Refused(Refusal::Unauthorised);
            assert_eq!(a.record.lost, [(peer, why)]);
            run(&mut a, &mut b, |_, b| b.provider.up.is_empty() && b.provider.handshakes == 0);
        }
    }
}

/// Whoever is refused by who it is has said something by then that nobody reads, or finds the line dead when it is to. It hears why all the same.
#[test]
fn a_refusal_that_comes_before_the_call_was_read_reaches_the_caller() {
    for is_quick in [false, true] {
        let group_key = Some(GroupKey::derive(b"x"));
        let (mut a, mut b) =
            (Node::with(ShmConfig { group_key, ..ShmConfig::new(EngineId(1)) }), Node::new(2));
        b.provider.users.ours ^= 1;
        let peer = a.call(&b);
        if is_quick {
            // Again, and as if the refusal had come first.
            let called = std::mem::replace(a.provider.slot(peer.index), Slot::Vacant);
            let Slot::Calling(mut call) = called else { panic!("it calls") };
            let socket = socket::call(&call.terms.target).unwrap();
            while b.provider.stats.refused < 2 {
                b.poll();
            }
            a.provider.introduce(&mut call, socket).unwrap();
            *a.provider.slot(peer.index) = Slot::Calling(call);
        }
        run(&mut a, &mut b, |a, _| !a.record.lost.is_empty());
        let why = DownReason::Refused(Refusal::Unauthorised);
        assert_eq!(a.record.lost, [(peer, why)]);
    }
}

#[test]
fn an_address_that_cannot_be_is_an_error_at_once() {
    let mut a = Node::new(1);
    let hello = a.record.hello.clone();
    let peer = PeerId { index: 0, generation: 0 };
    let nic = |bytes: &[u8]| NicAddr {
        speed_gbps: 1,
        address: heapless::Vec::from_slice(bytes).unwrap(),
    };
    let mut connect = |kind, nics: &[NicAddr]| {
        let address = NetAddr::new(kind, EngineId(9), nics).unwrap();
        a.provider.connect(Time::ZERO, peer, &address, &hello).unwrap_err()
    };
    use ProviderKind::{Shm, Verbs};
    assert!(matches!(connect(Verbs, &[nic(&[0; 16])]), ConnectError::OtherProvider { .. }));
    assert!(matches!(connect(Shm, &[nic(&[0; 15])]), ConnectError::Malformed { .. }));
    let two = [nic(&[0; 16]), nic(&[1; 16])];
    assert!(matches!(connect(Shm, &two), ConnectError::Malformed { .. }));
    assert!(matches!(connect(Shm, &[nic(&[0; 16])]), ConnectError::Unreachable { .. }));
    let own = a.provider.address();
    let to_self = a.provider.connect(Time::ZERO, peer, &own, &hello);
    assert!(matches!(to_self, Err(ConnectError::Myself)));
}

/// There is somebody at that address, on this host, and running.
#[test]
fn an_engine_of_another_user_is_not_an_absent_one() {
    let (mut a, b) = (Node::new(1), Node::new(2));
    a.provider.users.ours ^= 1;
    let (hello, peer) = (a.record.hello.clone(), a.record.new_peer());
    let called = a.provider.connect(Time::ZERO, peer, &b.provider.address(), &hello).unwrap_err();
    assert!(matches!(called, ConnectError::Unauthorised { .. }), "{called}");
    assert_eq!(a.provider.handshakes, 0);
}

// ---- hostile callers ----

#[test]
fn garbage_on_the_listening_socket_is_dropped_and_others_are_served() {
    let (mut a, mut b) = pair();
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..200 {
        let socket = socket::call(&b.provider.id).unwrap();
        let mut bytes = [0; MESSAGE_MAX];
        let len = match round % 3 {
            0 => usize::from(random().to_le_bytes()[0]) + 1,
            1 => {
                Message::Call { nonce: [0; 32], target: b.provider.id }.encode(&mut bytes).unwrap()
            }
            _ => Message::MapRequest { key: random() }.encode(&mut bytes).unwrap(),
        };
        match round % 3 {
            0 => bytes[..len].iter_mut().for_each(|byte| *byte = random().to_le_bytes()[0]),
            1 => bytes[usize::from(random().to_le_bytes()[0]) % 8] ^= 1,
            _ => {}
        }
        socket::send(&socket, &bytes[..len], &[socket.as_fd()]).unwrap();
        let before = b.provider.stats();
        run(&mut a, &mut b, |_, b| {
            let now = b.provider.stats();
            now.refused + now.dropped > before.refused + before.dropped
        });
        assert_eq!(b.provider.handshakes, 0);
    }
    assert_eq!(b.provider.up.len(), 1);
    join(Node::new(3), b);
}

#[test]
fn whoever_does_not_finish_is_dropped_in_time_and_the_number_is_bounded() {
    let mut b = Node::new(2);
    let mut callers = Vec::new();
    let far = |n: u64| Time::from_nanos(n * 1_000_000_000);
    for _ in 0..STRANGERS_MAX + 5 {
        callers.push(socket::call(&b.provider.id).unwrap());
        b.provider.look(far(1), &mut b.record);
    }
    // The others are not turned away: they wait where nobody is woken for them.
    assert_eq!(b.provider.handshakes, STRANGERS_MAX);
    let accepted = |n: usize, dropped: usize| ShmStats {
        accepted: n as u64,
        refused: 0,
        dropped: dropped as u64,
    };
    assert_eq!(b.provider.stats, accepted(STRANGERS_MAX, 0));
    assert!(!is_readable(&b, 0));
    // The one who has gone half the way is no better.
    tell(&callers[0], &Message::Call { nonce: [0; 32], target: b.provider.id }, None).unwrap();
    b.provider.look(far(2), &mut b.record);
    assert_eq!(b.provider.handshakes, STRANGERS_MAX);
    b.provider.look(far(3), &mut b.record);
    assert_eq!((b.provider.handshakes, b.provider.stats.dropped), (0, STRANGERS_MAX as u64));
    assert!(is_readable(&b, 0), "there is room now");
    b.provider.look(far(3), &mut b.record);
    assert_eq!(b.provider.stats, accepted(STRANGERS_MAX + 5, STRANGERS_MAX));
    assert_eq!(b.provider.handshakes, 5);
}

/// Those who have called while nobody looked may finish, though they are more than one look hears; but have no longer for that than others.
#[test]
fn whoever_has_called_while_nobody_looked_is_not_late() {
    let (mut a, mut b) = pair();
    let far = |n: u64| Time::from_nanos(n * 1_000_000_000);
    let mut callers = Vec::new();
    for _ in 0..STRANGERS_MAX {
        callers.push(socket::call(&b.provider.id).unwrap());
        b.provider.look(far(10), &mut b.record);
    }
    assert_eq!(b.provider.handshakes, STRANGERS_MAX);
    let to_b = a.peer(&b);
    // One more event than a look takes.
    tell(&a.provider.session(to_b).unwrap().link.socket, &Message::Kick, None).unwrap();
    for caller in &callers {
        tell(caller, &Message::Call { nonce: [0; 32], target: b.provider.id }, None).unwrap();
    }
    b.provider.look(far(15), &mut b.record);
    assert_eq!((b.provider.handshakes, b.provider.stats.dropped), (STRANGERS_MAX, 0));
    b.provider.look(far(16), &mut b.record);
    assert_eq!(b.provider.handshakes, STRANGERS_MAX);
    b.provider.look(far(17), &mut b.record);
    assert_eq!((b.provider.handshakes, b.provider.stats.dropped), (0, STRANGERS_MAX as u64));
}

/// Whoever looks seldom does not keep places for those who never say anything.
#[test]
fn whoever_stays_silent_is_late_though_nobody_looks() {
    let mut b = Node::new(2);
    let _silent = socket::call(&b.provider.id).unwrap();
    for (s, there) in [(10, 1), (20, 1), (30, 0), (40, 0)] {
        b.provider.look(Time::from_nanos(s * 1_000_000_000), &mut b.record);
        assert_eq!(b.provider.handshakes, there, "after {s} s");
    }
    assert_eq!(b.provider.stats, ShmStats { accepted: 1, refused: 0, dropped: 1 });
}

/// More calls at once than there are places: the rest has its turn, as soon as one is free.
#[test]
fn whoever_finds_no_place_is_let_in_when_one_is_free() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    // Or those who say nothing would leave, sooner or later.
    a.stand_still();
    b.stand_still();
    let mut idle: Vec<_> =
        (0..STRANGERS_MAX).map(|_| socket::call(&b.provider.id).unwrap()).collect();
    while b.provider.handshakes < STRANGERS_MAX {
        b.poll();
    }
    let peer = a.call(&b);
    let start = Instant::now();
    run(&mut a, &mut b, |_, _| start.elapsed() > Duration::from_millis(20));
    assert!(a.record.lost.is_empty() && a.record.connected.is_empty());
    idle.pop();
    run(&mut a, &mut b, |a, _| a.record.connected.len() + a.record.lost.len() > 0);
    assert_eq!((&a.record.connected[..], b.provider.stats.refused), (&[peer][..], 0));
}

#[test]
fn another_version_is_told_ours() {
    let mut b = Node::new(2);
    let socket = socket::call(&b.provider.id).unwrap();
    let mut bytes = [0; MESSAGE_MAX];
    let len = Message::Call { nonce: [0; 32], target: b.provider.id }.encode(&mut bytes).unwrap();
    bytes[4..6].copy_from_slice(&9_u16.to_le_bytes());
    socket::send(&socket, &bytes[..len], &[]).unwrap();
    b.provider.look(Time::ZERO, &mut b.record);
    b.provider.look(Time::ZERO, &mut b.record);
    let got = socket::receive(&socket, &mut bytes).unwrap();
    let version = Refusal::Version { ours: PROTOCOL_VERSION, theirs: 9 };
    assert_eq!(Message::decode(&bytes[..got.len]), Ok(Message::Refuse(version)));
}

#[test]
fn a_segment_that_is_not_sealed_or_not_of_the_size_is_refused() {
    let geometry = Geometry { initiator_nics: 1, acceptor_nics: 1 };
    let short = segment::sealed_file("x", geometry.bytes() - 1).unwrap();
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING | rustix::fs::MemfdFlags::CLOEXEC;
    let open = rustix::fs::memfd_create("y", flags).unwrap();
    rustix::fs::ftruncate(&open, geometry.bytes() as u64).unwrap();
    for file in [short, open] {
        let (a, mut b) = (Node::new(1), Node::new(2));
        let socket = socket::call(&b.provider.id).unwrap();
        let call = Message::Call { nonce: [0; 32], target: b.provider.id };
        tell(&socket, &call, None).unwrap();
        let mut hello = [0; Hello::ENCODED_MAX];
        let len = a.record.hello.encode(&mut hello).unwrap();
        let claim = Claim { probe_address: 0, geometry, hello: &hello[..len] };
        tell(&socket, &Message::Prove { proof: [0; 32], claim }, Some(&file)).unwrap();
        for _ in 0..4 {
            b.provider.look(Time::ZERO, &mut b.record);
        }
        assert!(b.record.connected.is_empty());
        assert_eq!((b.provider.handshakes, b.provider.stats.refused), (0, 1));
    }
}

#[test]
fn a_peer_that_scribbles_into_the_segment_loses_its_session_only() {
    type Scribble = fn(&Segment);
    let scribbles: [(&str, Scribble); 6] = [
        ("a lane that is not there", |s| {
            s.outbound().lanes_used().store(u64::MAX, Ordering::SeqCst)
        }),
        ("a lap that cannot be", |s| {
            s.outbound().lane(0)[0][0].store(77, Ordering::SeqCst);
            s.outbound().lanes_used().store(1, Ordering::SeqCst);
        }),
        ("a bounce head too far on", |s| {
            s.outbound().bounce_head().store(1 << 40, Ordering::SeqCst);
        }),
        ("a record longer than the ring", |s| {
            s.outbound().bounce()[2].store(u64::from(u32::MAX), Ordering::SeqCst);
            s.outbound().bounce_head().store(128, Ordering::SeqCst);
        }),
        ("a record for a NIC that is not there", |s| {
            s.outbound().bounce()[2].store(9 << 40, Ordering::SeqCst);
            s.outbound().bounce_head().store(64, Ordering::SeqCst);
        }),
        ("a credit ahead of the lane", |s| s.inbound().credit(0).store(5, Ordering::SeqCst)),
    ];
    for (what, scribble) in scribbles {
        let (mut a, mut b) = pair();
        let (to_a, to_b) = (b.peer(&a), a.peer(&b));
        scribble(&a.provider.session(to_b).unwrap().link.segment);
        // The credit is looked at by whoever posts.
        let (src, dst) = (source(&b, 8, 0), a.provider.memory().alloc(8).unwrap());
        b.post(&[write(1, to_a, &src, &dst)]);
        run(&mut a, &mut b, |_, b| !b.record.lost.is_empty());
        assert_eq!(b.record.lost, [(to_a, DownReason::Protocol)], "{what}");
        assert_eq!(b.record.done.len(), 1, "{what}");
        run(&mut a, &mut b, |a, _| a.record.lost == [(to_b, DownReason::Disconnected)]);
        join(Node::new(3), b);
    }
}

// ---- writes ----

#[test]
fn a_write_of_any_size_arrives_by_every_path() {
    for path in [ForeignPath::Auto, ForeignPath::KernelOnly, ForeignPath::BounceOnly] {
        let (mut a, mut b) = pair_by(path);
        let peer = a.peer(&b);
        for (token, len) in (0_u64..).zip([1, 63, 64, 65, 4096, 65_536, 65_537, 200_000, 1 << 20]) {
            for mapped in [true, false] {
                a.record.done.clear();
                b.record.immediates.clear();
                let src = source(&a, len, token.to_le_bytes()[0]);
                let room = len + 128;
                let far = foreign(&b, room);
                let near = b.provider.memory().alloc(room).unwrap();
                let dst = if mapped { &near } else { &far.region };
                let mut work = write(token, peer, &src, dst);
                work.dst += 64;
                // Then once more, when it is known what the region is: at once, if it is mapped and not long.
                for time in 1..3 {
                    assert_eq!(a.post(&[work]), 1);
                    run(&mut a, &mut b, |a, b| {
                        a.record.done.len() == time && b.record.immediates.len() == time
                    });
                    assert_eq!(a.record.done, [(token, Ok(()))].repeat(time));
                    if time == 1 {
                        let there = if mapped { near.ptr } else { far.region.ptr };
                        // SAFETY: inside the region, which nobody writes now.
                        unsafe { there.as_ptr().write_bytes(0, room) };
                    }
                }
                let got = if mapped { bytes(&near) } else { far.bytes() };
                let want: Vec<u8> = (0..room)
                    .map(|at| {
                        if (64..64 + len).contains(&at) {
                            pattern(at - 64, token.to_le_bytes()[0])
                        } else {
                            0
                        }
                    })
                    .collect();
                assert!(got == want, "{path:?} {len} {mapped}");
                for (node, region) in [(&a, src), (&b, near), (&b, far.region)] {
                    node.provider.memory().revoke(&region, Duration::from_secs(1)).unwrap();
                    node.provider.memory().release(region);
                }
            }
        }
    }
}

#[test]
fn bare_immediates_and_silent_writes_are_told_apart() {
    let (mut a, mut b) = pair();
    let peer = a.peer(&b);
    let (src, dst) = (source(&a, 8, 1), b.provider.memory().alloc(8).unwrap());
    let silent = WorkRequest { imm: None, ..write(1, peer, &src, &dst) };
    // The key of a bare immediate is not looked at.
    let bare = WorkRequest { len: 0, dst_key: 0, ..write(2, peer, &src, &dst) };
    a.post(&[silent, bare]);
    run(&mut a, &mut b, |a, _| a.record.done.len() == 2);
    run(&mut a, &mut b, |_, b| b.record.immediates.len() == 1);
    assert_eq!(bytes(&dst), bytes(&src));
}

#[test]
fn every_pair_of_nics_has_a_way_whatever_their_numbers() {
    for (ours, theirs) in [(1, 4), (4, 1), (3, 2), (8, 8)] {
        let node =
            |engine, nics| Node::with(ShmConfig { nics, ..ShmConfig::new(EngineId(engine)) });
        let (mut a, mut b) = join(node(1, ours), node(2, theirs));
        for turn in 0..2 {
            let (peer, back) = (a.peer(&b), b.peer(&a));
            let (src, dst) = (source(&a, 8, 1), b.provider.memory().alloc(8).unwrap());
            let (from, to) = if turn == 0 { (ours, theirs) } else { (theirs, ours) };
            let mut want = Vec::new();
            for nic in 0..from {
                for remote_nic in 0..to {
                    let tag = imm(u16::from(nic) * 8 + u16::from(remote_nic) + 1);
                    let work = WorkRequest {
                        nic,
                        remote_nic,
                        imm: Some(tag),
                        ..write(1, peer, &src, &dst)
                    };
                    assert_eq!(a.post(&[work]), 1);
                    want.push((remote_nic, back, tag.bits()));
                }
            }
            run(&mut a, &mut b, |_, b| b.record.immediates.len() >= want.len());
            b.record.immediates.sort_unstable();
            want.sort_unstable();
            assert_eq!(b.record.immediates, want);
            let beyond = WorkRequest { remote_nic: to, ..write(7, peer, &src, &dst) };
            a.post(&[beyond]);
            assert_eq!(a.record.done.last(), Some(&(7, Err(WorkError::LocalAccess))));
            std::mem::swap(&mut a, &mut b);
        }
    }
}

#[test]
fn what_does_not_fit_is_left_to_the_caller_and_goes_later() {
    let (mut a, mut b) = pair();
    let peer = a.peer(&b);
    let (src, dst) = (source(&a, 8, 1), b.provider.memory().alloc(8).unwrap());
    let work = |token| WorkRequest { len: 0, ..write(token, peer, &src, &dst) };
    let total = 5000_u64;
    let (mut next, mut turned_away) = (0, false);
    while next < total {
        let batch: Vec<_> = (next..total.min(next + 100)).map(work).collect();
        let accepted = a.post(&batch) as u64;
        next += accepted;
        if accepted < batch.len() as u64 {
            turned_away = true;
            assert_eq!(a.record.done.len() as u64, next);
            // Asleep it would be woken; awake it is not idle once the other side has read.
            b.poll();
            run(&mut a, &mut b, |a, _| !a.provider.arm());
        }
    }
    assert!(turned_away);
    run(&mut a, &mut b, |_, b| b.record.immediates.len() as u64 == total);
}

#[test]
fn writes_out_of_bounds_or_under_a_wrong_key_are_refused_and_write_nothing() {
    for path in [ForeignPath::KernelOnly, ForeignPath::BounceOnly] {
        let (mut a, mut b) = pair_by(path);
        let peer = a.peer(&b);
        let src = source(&a, 64, 1);
        let far = foreign(&b, 64);
        let near = b.provider.memory().alloc(64).unwrap();
        // SAFETY: `far` lives on; peers are not to write to it.
        let local = unsafe { b.provider.memory().register(far.region.ptr, 64, Rights::LOCAL) };
        let local = local.unwrap();
        let are_refused = |a: &mut Node, b: &mut Node, byte: u8| {
            let left = (bytes(&near), far.bytes(), b.record.immediates.len());
            let src = source(a, 64, byte);
            for dst in [&near, &far.region] {
                let good = write(1, peer, &src, dst);
                for bad in [
                    WorkRequest { dst: good.dst + 1, ..good },
                    WorkRequest { dst: good.dst - 1, ..good },
                    WorkRequest { dst: u64::MAX, ..good },
                    WorkRequest { dst_key: good.dst_key + (1 << 32), ..good },
                    WorkRequest { dst_key: 0, ..good },
                    WorkRequest { dst_key: u64::MAX, ..good },
                    WorkRequest { dst_key: local.desc.keys.get(0).unwrap(), ..good },
                ] {
                    a.record.done.clear();
                    assert_eq!(a.post(&[bad]), 1);
                    run(a, b, |a, _| a.record.done.len() == 1);
                    assert_eq!(a.record.done, [(1, Err(WorkError::RemoteAccess))], "{bad:?}");
                }
            }
            assert_eq!((bytes(&near), far.bytes(), b.record.immediates.len()), left);
        };
        are_refused(&mut a, &mut b, 1);
        a.record.done.clear();
        for fine in [&near, &far.region] {
            a.post(&[write(2, peer, &src, fine)]);
        }
        run(&mut a, &mut b, |a, b| a.record.done.len() == 2 && b.record.immediates.len() == 2);
        // Known now, `near` is written at once.
        are_refused(&mut a, &mut b, 3);
        a.post(&[write(4, peer, &source(&a, 64, 5), &near)]);
        run(&mut a, &mut b, |_, b| b.record.immediates.len() == 3);
        assert_eq!(bytes(&near), bytes(&source(&a, 64, 5)));
    }
}

/// A region that has the number of one that is gone, of which the writer still has the mapping.
#[test]
fn short_writes_go_to_the_region_that_there_is() {
    let (mut a, mut b) = pair();
    let peer = a.peer(&b);
    let memory = Arc::clone(b.provider.memory());
    let mut numbers = BTreeMap::new();
    for round in 0..8_u8 {
        let (src, dst) = (source(&a, 64, round), memory.alloc(64).unwrap());
        let key = dst.desc.keys.get(0).unwrap();
        *numbers.entry(key & u64::from(u32::MAX)).or_insert(0) += 1;
        for token in 0..3 {
            a.record.done.clear();
            while a.post(&[write(token, peer, &src, &dst)]) == 0 {
                a.poll();
                b.poll();
            }
            run(&mut a, &mut b, |a, _| a.record.done == [(token, Ok(()))]);
        }
        assert_eq!(bytes(&dst), bytes(&src), "round {round}");
        memory.revoke(&dst, Duration::from_secs(2)).unwrap();
        memory.release(dst);
    }
    assert!(numbers.values().any(|regions| *regions > 1), "no number was used twice: {numbers:?}");
}

#[test]
fn many_new_regions_at_once_are_all_asked_for() {
    let (mut a, mut b) = pair();
    let peer = a.peer(&b);
    let src = source(&a, 8, 3);
    let regions: Vec<_> = (0..100).map(|_| b.provider.memory().alloc(8).unwrap()).collect();
    let work: Vec<_> =
        (0..).zip(&regions).map(|(token, dst)| write(token, peer, &src, dst)).collect();
    assert_eq!(a.post(&work), 100);
    run(&mut a, &mut b, |a, b| a.record.done.len() == 100 && b.record.immediates.len() == 100);
    assert!(regions.iter().all(|region| bytes(region) == bytes(&src)));
}

/// Runs `body` while this process gets only so many more descriptors.
fn with_descriptors<R>(more: u64, body: impl FnOnce() -> R) -> R {
    let limits = getrlimit(Resource::Nofile);
    // As many as there are lower numbers: one that is duplicated has the lowest free.
    let next = rustix::io::dup(std::io::stdin()).unwrap();
    let current = u64::try_from(next.as_raw_fd()).unwrap();
    drop(next);
    setrlimit(Resource::Nofile, Rlimit { current: Some(current + more), ..limits }).unwrap();
    let made = body();
    setrlimit(Resource::Nofile, limits).unwrap();
    made
}

/// Files for which there is no descriptor do not come, and that is told from a message that carries too many.
#[test]
fn files_that_find_no_descriptor_are_missed() {
    if !is_own_process("files_that_find_no_descriptor_are_missed") {
        return;
    }
    let kind = rustix::net::SocketType::SEQPACKET;
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let (a, b) =
        rustix::net::socketpair(rustix::net::AddressFamily::UNIX, kind, flags, None).unwrap();
    let mut buffer = [0; MESSAGE_MAX];
    for (room, sent) in [(0, 1), (0, 2), (1, 2), (1, socket::FILES_MAX), (2, 2)] {
        socket::send(&a, b"some", &vec![a.as_fd(); sent]).unwrap();
        let got = with_descriptors(room, || socket::receive(&b, &mut buffer)).unwrap();
        let came = usize::try_from(room).unwrap().min(sent);
        assert_eq!((got.len, got.files.len(), got.is_short), (4, came, came < sent));
    }
}

/// What is short on this side is not the peer's doing: the write says so, the session stays, and the next write goes.
#[test]
fn without_descriptors_a_write_fails_and_nothing_else() {
    if !is_own_process("without_descriptors_a_write_fails_and_nothing_else") {
        return;
    }
    let (mut a, mut b) = pair();
    let peer = a.peer(&b);
    let src = source(&a, 64, 1);
    let [known, new] = [(); 2].map(|()| b.provider.memory().alloc(64).unwrap());
    a.post(&[write(1, peer, &src, &known)]);
    run(&mut a, &mut b, |_, b| b.record.immediates.len() == 1);
    a.record.done.clear();
    with_descriptors(0, || {
        for token in 2..5 {
            a.record.done.clear();
            assert_eq!(a.post(&[write(token, peer, &src, &new)]), 1);
            run(&mut a, &mut b, |a, _| a.record.done.len() == 1);
            let short = Err(WorkError::Device(Errno::MFILE.raw_os_error()));
            assert_eq!(a.record.done, [(token, short)]);
        }
        a.record.done.clear();
        a.post(&[write(5, peer, &src, &known)]);
        run(&mut a, &mut b, |a, _| a.record.done == [(5, Ok(()))]);
    });
    a.record.done.clear();
    a.post(&[write(6, peer, &src, &new)]);
    run(&mut a, &mut b, |a, b| a.record.done == [(6, Ok(()))] && b.record.immediates.len() == 3);
    assert_eq!(bytes(&new), bytes(&src));
    assert!(a.record.lost.is_empty() && b.record.lost.is_empty());
    // Nor is a caller to blame: it is told to come again.
    let mut c = Node::new(3);
    let caller = c.call(&b);
    while !c
        .provider
        .slots
        .iter()
        .any(|slot| matches!(slot, Slot::Calling(it) if it.segment.is_some()))
    {
        b.poll();
        c.poll();
    }
    with_descriptors(0, || b.provider.look(Time::ZERO, &mut b.record));
    run(&mut c, &mut b, |c, _| !c.record.lost.is_empty());
    assert_eq!(c.record.lost, [(caller, DownReason::Refused(Refusal::Busy))]);
}

/// A caller that has a descriptor for its socket and none for the segment, or none for another socket when its call is placed again; one that is
/// called and has no addresses left: what is short on one's own side is not told as a lost connection, an absent peer or a bad message.
#[test]
fn what_is_short_while_connecting_is_nobodys_fault() {
    if !is_own_process("what_is_short_while_connecting_is_nobodys_fault") {
        return;
    }
    const BUSY: DownReason = DownReason::Refused(Refusal::Busy);
    let mut b = Node::new(2);
    let mut a = Node::new(1);
    let called = a.call(&b);
    // Accepted, and challenged.
    (0..4).for_each(|_| _ = b.provider.look(Time::ZERO, &mut b.record));
    with_descriptors(0, || a.provider.look(Time::ZERO, &mut a.record));
    assert_eq!(a.record.lost, [(called, BUSY)]);
    // The peer's own call is waited for, and does not come.
    let mut a = Node::new(1);
    b.record.refuse = Some(Refusal::Crossed);
    let called = a.call(&b);
    let waits = |slot: &Slot| matches!(slot, Slot::Calling(call) if call.socket.is_none());
    run(&mut a, &mut b, |a, _| a.provider.slots.iter().any(waits));
    let later = a.now().after(CROSSED_PATIENCE);
    with_descriptors(0, || a.provider.look(later, &mut a.record));
    assert_eq!(a.record.lost, [(called, BUSY)]);
    b.record.refuse = None;
    let mut a = Node::new(1);
    let called = a.call(&b);
    let proves = |slot: &Slot| matches!(slot, Slot::Calling(call) if call.segment.is_some());
    while !a.provider.slots.iter().any(proves) {
        b.poll();
        a.poll();
    }
    // No address more, of whoever asks.
    let limits = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(0), ..limits }).unwrap();
    b.provider.look(Time::ZERO, &mut b.record);
    setrlimit(Resource::As, limits).unwrap();
    run(&mut a, &mut b, |a, _| !a.record.lost.is_empty());
    assert_eq!(a.record.lost, [(called, BUSY)]);
    join(Node::new(3), b);
}

/// Files on their way between two sockets of ours: more than `limit` of them. The kernel counts those of a user together.
fn files_on_their_way(limit: usize) -> [OwnedFd; 2] {
    let kind = rustix::net::SocketType::SEQPACKET;
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let (a, b) =
        rustix::net::socketpair(rustix::net::AddressFamily::UNIX, kind, flags, None).unwrap();
    for _ in 0..limit.div_ceil(socket::FILES_MAX) + 1 {
        socket::send(&a, b"some", &[a.as_fd(); socket::FILES_MAX]).unwrap();
    }
    [a, b]
}

/// Gives up the rights to have more files on their way than the limit says.
fn keep_to_limits() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::SYS_RESOURCE | CapabilitySet::SYS_ADMIN);
    set_capabilities(None, sets).unwrap();
}

/// Too many files of this user's are on their way, to whomever: whoever asks for a region has its answer when there is room again, and is
/// not refused for that. What it knows already, it goes on writing to.
#[test]
fn answers_wait_while_too_many_files_are_on_their_way() {
    if !is_own_process("answers_wait_while_too_many_files_are_on_their_way") {
        return;
    }
    const ROOM: u64 = 64;
    let (mut a, mut b) = pair();
    let (peer, asker) = (a.peer(&b), b.peer(&a));
    let src = source(&a, 64, 1);
    let known = b.provider.memory().alloc(64).unwrap();
    a.post(&[write(0, peer, &src, &known)]);
    run(&mut a, &mut b, |_, b| b.record.immediates.len() == 1);
    a.record.done.clear();
    // More than may be asked about at a time.
    let new: Vec<_> = (0..40).map(|_| b.provider.memory().alloc(64).unwrap()).collect();
    keep_to_limits();
    let limit =
        usize::try_from(ROOM).unwrap() + std::fs::read_dir("/proc/self/fd").unwrap().count();
    let ahead = files_on_their_way(limit + 8);
    with_descriptors(ROOM, || {
        let work: Vec<_> =
            (1..).zip(&new).map(|(token, dst)| write(token, peer, &src, dst)).collect();
        assert_eq!(a.post(&work), new.len());
        run(&mut a, &mut b, |_, b| b.provider.session(asker).unwrap().owes());
        let start = Instant::now();
        run(&mut a, &mut b, |_, _| start.elapsed() > Duration::from_millis(20));
        assert_eq!(
            (&a.record.done[..], b.provider.arm()),
            (&[][..], false),
            "nobody would wake it"
        );
        a.post(&[write(99, peer, &src, &known)]);
        run(&mut a, &mut b, |a, _| a.record.done == [(99, Ok(()))]);
        drop(ahead);
        run(&mut a, &mut b, |a, _| a.record.done.len() == 1 + new.len());
    });
    assert!(a.record.done.iter().all(|done| done.1.is_ok()), "{:?}", a.record.done);
    assert!(new.iter().all(|region| bytes(region) == bytes(&src)));
    run(&mut a, &mut b, |_, b| !b.provider.session(asker).unwrap().owes());
    assert!(a.record.lost.is_empty() && b.record.lost.is_empty());
}

/// What has been lacking for long is refused after all, and whoever asks for more than it may has broken the protocol.
#[test]
fn answers_do_not_wait_for_ever() {
    if !is_own_process("answers_do_not_wait_for_ever") {
        return;
    }
    let (mut a, mut b) = pair();
    let (peer, asker) = (a.peer(&b), b.peer(&a));
    let (src, new) = (source(&a, 64, 1), b.provider.memory().alloc(64).unwrap());
    keep_to_limits();
    let _ahead = files_on_their_way(200);
    with_descriptors(64, || {
        // It is owed from now on, however late this thread is.
        b.stand_still();
        a.post(&[write(1, peer, &src, &new)]);
        run(&mut a, &mut b, |_, b| b.provider.session(asker).unwrap().owes());
        let (now, late) = (b.now(), session::OWED_PATIENCE);
        b.provider.look(now, &mut b.record);
        for (after, owes) in [(late.mul_f32(0.9), true), (late + Duration::from_secs(1), false)] {
            b.provider.look(now.after(after), &mut b.record);
            assert_eq!(b.provider.session(asker).unwrap().owes(), owes, "{after:?}");
        }
        run(&mut a, &mut b, |a, _| a.record.done == [(1, Err(WorkError::RemoteAccess))]);
        assert!(b.record.lost.is_empty());
        let key = b.provider.memory().alloc(64).unwrap().desc.keys.get(0).unwrap();
        let asking = &a.provider.session(peer).unwrap().link;
        (0..17).for_each(|_| tell(&asking.socket, &Message::MapRequest { key }, None).unwrap());
        run(&mut a, &mut b, |_, b| b.record.lost == [(asker, DownReason::Protocol)]);
    });
}

/// Whoever goes by the number of all users that have none may be anybody. Who holds the key is let in all the same.
#[test]
fn who_cannot_be_told_from_others_is_nobody() {
    for has_key in [false, true] {
        let group_key = || has_key.then(|| GroupKey::derive(b"x"));
        let node = |engine| {
            Node::with(ShmConfig { group_key: group_key(), ..ShmConfig::new(EngineId(engine)) })
        };
        let (mut a, mut b) = (node(1), node(2));
        let users = Users { overflow: b.provider.users.ours, maps_all: false, ..b.provider.users };
        b.provider.users = users;
        let peer = a.call(&b);
        run(&mut a, &mut b, |a, _| a.record.connected.len() + a.record.lost.len() > 0);
        if has_key {
            assert_eq!(a.record.connected, [peer]);
        } else {
            let why = DownReason::Refused(Refusal::Unauthorised);
            assert_eq!(a.record.lost, [(peer, why)]);
        }
        b.provider.users.maps_all = true;
        join(node(3), b);
    }
}

/// Memory of another user's may be a file of its own making, which a write there would wait for: nothing is tried.
#[test]
fn the_kernel_is_not_asked_to_write_to_another_user_s_process() {
    if !is_own_process("the_kernel_is_not_asked_to_write_to_another_user_s_process") {
        return;
    }
    let group_key = Some(GroupKey::derive(b"x"));
    for foreign_path in [ForeignPath::Auto, ForeignPath::KernelOnly] {
        let config = |engine| ShmConfig {
            group_key: group_key.clone(),
            foreign: foreign_path,
            ..ShmConfig::new(EngineId(engine))
        };
        let (mut a, mut b) = (Node::with(config(1)), Node::with(config(2)));
        b.provider.users.ours ^= 1;
        let peer = a.call(&b);
        let Slot::Calling(call) = a.provider.slot(peer.index) else { panic!("it calls") };
        let probe = call.probe;
        run(&mut a, &mut b, |a, _| !a.record.connected.is_empty());
        run(&mut a, &mut b, |a, b| !a.provider.expecting && !b.provider.expecting);
        assert!(probe.holds(0), "the word was written");
        let (to_a, src, far) = (b.peer(&a), source(&b, 64, 3), foreign(&a, 64));
        b.post(&[write(1, to_a, &src, &far.region)]);
        run(&mut a, &mut b, |_, b| b.record.done.len() == 1);
        if foreign_path == ForeignPath::Auto {
            assert_eq!((&b.record.done[..], far.bytes()), (&[(1, Ok(()))][..], bytes(&src)));
        } else {
            let refused = Err(WorkError::Device(Errno::PERM.raw_os_error()));
            assert_eq!(b.record.done, [(1, refused)]);
        }
    }
}

// ---- taking back ----

#[test]
fn after_a_region_is_taken_back_nothing_writes_to_it() {
    for (path, mapped, len) in [
        (ForeignPath::Auto, true, 256 << 10),
        // One at a time: they are written at once.
        (ForeignPath::Auto, true, 64),
        (ForeignPath::Auto, true, 64 << 10),
        (ForeignPath::KernelOnly, false, 256 << 10),
        (ForeignPath::BounceOnly, false, 256 << 10),
    ] {
        let (mut a, mut b) = pair_by(path);
        let peer = a.peer(&b);
        let src = source(&a, len, 0xff);
        let memory = Arc::clone(b.provider.memory());
        let at_once = if len > 64 << 10 { 2 } else { 1 };
        for _ in 0..20 {
            let near = memory.alloc(len).unwrap();
            let far = foreign(&b, len);
            let dst = if mapped { &near } else { &far.region };
            let base = write(0, peer, &src, dst);
            let stop = AtomicBool::new(false);
            a.record.done.clear();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        a.post(&[base; 2][..at_once]);
                        a.poll();
                        b.poll();
                    }
                });
                std::thread::sleep(Duration::from_millis(3));
                memory.revoke(dst, Duration::from_secs(2)).unwrap();
                // The canary: whatever was written is overwritten, and stays so.
                for at in 0..len {
                    // SAFETY: inside the region.
                    unsafe { dst.ptr.as_ptr().add(at).write_volatile(0x55) };
                }
                std::thread::sleep(Duration::from_millis(3));
                assert!(bytes(dst).iter().all(|byte| *byte == 0x55), "{path:?}");
                stop.store(true, Ordering::Relaxed);
            });
            // However the writer was scheduled: from now on it is refused.
            a.record.done.clear();
            let mut accepted = false;
            run(&mut a, &mut b, |a, _| {
                // What is not accepted is posted again; what is accepted must be reported.
                let work = WorkRequest { token: Token::from_bits(9), ..base };
                accepted = accepted || a.post(&[work]) == 1;
                a.record.done.contains(&(9, Err(WorkError::RemoteAccess)))
            });
            memory.release(near);
            memory.release(far.region);
        }
    }
}

#[test]
fn a_mapping_of_a_region_taken_back_is_given_up_by_its_peer() {
    if !is_own_process("a_mapping_of_a_region_taken_back_is_given_up_by_its_peer") {
        return;
    }
    let (mut a, mut b) = pair();
    let peer = a.peer(&b);
    let maps = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("immwire-region")).count()
    };
    let (src, before) = (source(&a, 8, 1), maps());
    for round in 0..50 {
        let dst = b.provider.memory().alloc(8).unwrap();
        a.post(&[write(round, peer, &src, &dst)]);
        run(&mut a, &mut b, |_, b| b.record.immediates.len() as u64 == round + 1);
        b.provider.memory().revoke(&dst, Duration::ZERO).unwrap();
        b.provider.memory().release(dst);
    }
    run(&mut a, &mut b, |_, _| maps() == before);
    assert!(a.record.done.iter().all(|done| done.1.is_ok()));
}

// ---- ends ----

#[test]
fn a_peer_that_goes_is_reported_after_what_it_sent_and_others_are_served() {
    let (mut a, mut b) = pair();
    let (to_b, to_a) = (a.peer(&b), b.peer(&a));
    let c = Node::new(3);
    let (mut c, b2) = join(c, b);
    b = b2;
    let (src, dst) = (source(&a, 64, 1), b.provider.memory().alloc(64).unwrap());
    let other = b.provider.memory().alloc(64).unwrap();
    a.post(&[write(1, to_b, &src, &dst)]);
    run(&mut a, &mut b, |a, _| a.record.done.len() == 1);
    b.record.immediates.clear();
    // Forty are sent and not looked at; `b` waits for an answer that will not come.
    a.post(&[write(2, to_b, &src, &dst); 40]);
    let back = source(&b, 64, 1);
    b.post(&[WorkRequest { dst_key: 77 << 32, ..write(9, to_a, &back, &src) }]);
    drop(a);
    run(&mut c, &mut b, |_, b| !b.record.lost.is_empty());
    assert_eq!(b.record.immediates.len(), 40);
    assert_eq!(b.record.lost, [(to_a, DownReason::Disconnected)]);
    assert_eq!(b.record.done, [(9, Err(WorkError::PeerGone))]);
    b.post(&[write(10, to_a, &back, &src)]);
    assert_eq!(b.record.done.last(), Some(&(10, Err(WorkError::PeerGone))));
    let (src, peer) = (source(&c, 64, 1), c.peer(&b));
    c.post(&[write(3, peer, &src, &other)]);
    run(&mut c, &mut b, |_, b| b.record.immediates.len() == 41);
}

#[test]
fn abort_and_disconnect_end_every_piece_once() {
    for by_abort in [true, false] {
        let (mut a, mut b) = pair_by(ForeignPath::BounceOnly);
        let peer = a.peer(&b);
        let src = source(&a, 1 << 20, 1);
        let far = foreign(&b, 1 << 20);
        // The first write makes the region known.
        a.post(&[WorkRequest { len: 1, ..write(0, peer, &src, &far.region) }]);
        run(&mut a, &mut b, |a, _| a.record.done.len() == 1);
        a.record.done.clear();
        // More than the ring holds, and one that waits for an answer.
        let mut work: Vec<_> = (1..6).map(|n| write(n, peer, &src, &far.region)).collect();
        work.push(WorkRequest { dst_key: 77 << 32 | 99, ..write(6, peer, &src, &far.region) });
        for piece in work {
            assert_eq!(a.post(&[piece]), 1);
        }
        if by_abort {
            a.provider.abort(peer, &mut a.record);
            // It was not begun: whoever wants may post it again.
            assert_eq!((&a.record.given_back[..], a.record.done.len()), (&[6][..], 0));
            a.record.done.push((6, Err(WorkError::Flushed)));
            a.poll();
            assert_eq!(a.record.lost, [(peer, DownReason::Disconnected)]);
        } else {
            a.provider.disconnect(peer, &mut a.record);
            assert!(a.record.lost.is_empty());
        }
        a.record.done.sort_unstable_by_key(|done| done.0);
        let want: Vec<_> = (1..7).map(|n| (n, Err(WorkError::Flushed))).collect();
        assert_eq!(a.record.done, want);
        b.record.immediates.clear();
        let before = far.bytes();
        run(&mut a, &mut b, |_, b| !b.record.lost.is_empty());
        assert!(b.record.immediates.is_empty());
        assert!(far.bytes() == before);
        assert_eq!((a.record.done.len(), a.record.given_back.len()), (6, by_abort.into()));
    }
}

/// `b` takes a record of a piece of `a`'s, or is done with it.
fn take_record(a: &Node, b: &mut Node, key: u64) {
    let to_a = b.peer(a);
    let link = &b.provider.session(to_a).unwrap().link;
    link.segment.inbound().bounce_active().store(key, Ordering::SeqCst);
}

/// An abort while `b` is in the middle of a record. While it is, and was not for too long, nothing ends, nor is anything posted that could end. Returns
/// when the first poll after it was.
fn abort_in_a_record(a: &mut Node, b: &mut Node, far: &Foreign) -> Time {
    let peer = a.peer(b);
    let src = source(a, 1 << 20, 1);
    // The first write makes the region known.
    a.post(&[WorkRequest { len: 1, ..write(0, peer, &src, &far.region) }]);
    run(a, b, |a, _| a.record.done.len() == 1);
    a.record.done.clear();
    b.record.immediates.clear();
    assert_eq!(a.post(&[write(1, peer, &src, &far.region)]), 1);
    take_record(a, b, bounce::OPEN);
    a.provider.abort(peer, &mut a.record);
    let now = a.now();
    for ms in [0, 20, 200, 999] {
        a.provider.poll(now.after(Duration::from_millis(ms)), &mut a.record);
        let beat = WorkRequest { len: 0, ..write(2, peer, &src, &far.region) };
        assert_eq!(a.post(&[beat]), 0, "after {ms} ms");
        assert!(a.record.done.is_empty() && a.record.lost.is_empty(), "after {ms} ms");
        assert!(!a.provider.arm(), "nobody wakes it when it may go on");
    }
    now
}

fn is_aborted(a: &mut Node, b: &Node) {
    let peer = a.peer(b);
    assert_eq!(a.record.done, [(1, Err(WorkError::Flushed))]);
    assert_eq!(a.record.lost, [(peer, DownReason::Disconnected)]);
    assert!(a.provider.arm(), "nothing is left to be done");
}

/// What a slow peer is putting to its place lands before the end is told.
#[test]
fn an_abort_waits_for_a_peer_that_is_slow_in_the_middle_of_a_record() {
    let (mut a, mut b) = pair_by(ForeignPath::BounceOnly);
    let far = foreign(&b, 1 << 20);
    let start = abort_in_a_record(&mut a, &mut b, &far);
    take_record(&a, &mut b, immwire_core::hazard::NO_KEY);
    a.provider.poll(start.after(Duration::from_millis(999)), &mut a.record);
    is_aborted(&mut a, &b);
    run(&mut a, &mut b, |_, b| !b.record.lost.is_empty());
    assert!(b.record.immediates.is_empty());
}

/// Whoever is stopped while it takes a record does not say any more that it is done with it.
#[test]
fn an_abort_ends_though_the_peer_is_stopped_in_the_middle_of_a_record() {
    let (mut a, mut b) = pair_by(ForeignPath::BounceOnly);
    let far = foreign(&b, 1 << 20);
    let start = abort_in_a_record(&mut a, &mut b, &far);
    a.provider.poll(start.after(session::RECORD_PATIENCE), &mut a.record);
    is_aborted(&mut a, &b);
    // It goes on.
    take_record(&a, &mut b, immwire_core::hazard::NO_KEY);
    run(&mut a, &mut b, |_, b| !b.record.lost.is_empty());
    assert!(b.record.immediates.is_empty());
}

#[test]
fn an_abort_with_nothing_in_the_ring_keeps_the_session() {
    let (mut a, mut b) = pair();
    let peer = a.peer(&b);
    let (src, dst) = (source(&a, 64, 1), b.provider.memory().alloc(64).unwrap());
    a.post(&[write(1, peer, &src, &dst)]);
    a.provider.abort(peer, &mut a.record);
    assert_eq!((&a.record.given_back[..], a.record.done.len()), (&[1][..], 0));
    a.post(&[write(2, peer, &src, &dst)]);
    run(&mut a, &mut b, |_, b| b.record.immediates.len() == 1);
    assert_eq!((&a.record.given_back[..], &a.record.done[..]), (&[1][..], &[(2, Ok(()))][..]));
}

#[test]
fn nothing_of_the_process_is_left_when_all_is_dropped() {
    if !is_own_process("nothing_of_the_process_is_left_when_all_is_dropped") {
        return;
    }
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("memfd:immwire")).count()
    };
    let before = (files(), maps());
    for _ in 0..5 {
        let (mut a, mut b) = pair();
        let peer = a.peer(&b);
        let (src, dst) = (source(&a, 64, 1), b.provider.memory().alloc(64).unwrap());
        a.post(&[write(1, peer, &src, &dst)]);
        run(&mut a, &mut b, |_, b| b.record.immediates.len() == 1);
        let _half_open = socket::call(&b.provider.id).unwrap();
        a.poll();
        b.provider.look(Time::ZERO, &mut b.record);
        assert!(files() > before.0 && maps() > before.1);
        let _ = b.mailbox.len;
    }
    assert_eq!((files(), maps()), before);
}

// ---- sleep ----

fn is_readable(node: &Node, patience_ms: i64) -> bool {
    let fd = node.provider.fd();
    assert!(fd.as_raw_fd() >= 0);
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let wait = rustix::event::Timespec {
        tv_sec: patience_ms / 1000,
        tv_nsec: patience_ms % 1000 * 1_000_000,
    };
    rustix::event::poll(&mut fds, Some(&wait)).unwrap() == 1
}

fn settle_down(a: &mut Node, b: &mut Node) {
    // The first answers to probes are in.
    run(a, b, |a, b| !a.provider.expecting && !b.provider.expecting);
    for _ in 0..2 * LOOK_EVERY {
        a.poll();
        b.poll();
    }
}

#[test]
fn a_sleeper_is_woken_by_each_thing_that_can_happen() {
    for path in [ForeignPath::Auto, ForeignPath::BounceOnly] {
        let (mut a, mut b) = pair_by(path);
        let peer = a.peer(&b);
        let (src, dst) = (source(&a, 64, 1), b.provider.memory().alloc(64).unwrap());
        let far = foreign(&b, 64);
        for region in [&dst, &far.region] {
            // Twice: the first asks for the region by a message.
            for _ in 0..2 {
                settle_down(&mut a, &mut b);
                b.record.immediates.clear();
                assert!(b.provider.arm());
                assert!(!is_readable(&b, 0));
                a.post(&[write(1, peer, &src, region)]);
                let mut rounds = 0;
                loop {
                    assert!(is_readable(&b, 1000));
                    b.provider.disarm();
                    // Awake until it finds nothing to do.
                    while b.poll() || !b.provider.arm() {}
                    if !b.record.immediates.is_empty() {
                        break;
                    }
                    (0..LOOK_EVERY).for_each(|_| _ = a.poll());
                    rounds += 1;
                    assert!(rounds < 5);
                }
            }
        }
        settle_down(&mut a, &mut b);
        assert!(b.provider.arm());
        // Before the kick there is the work: whoever arms later sees it.
        a.post(&[write(1, peer, &src, &dst)]);
        b.provider.disarm();
        assert!(!b.provider.arm());
        settle_down(&mut a, &mut b);
        assert!(b.provider.arm());
        drop(a);
        assert!(is_readable(&b, 1000));
    }
}

/// The sockets are looked at by the clock, too: whoever is polled seldom does not hear callers, questions and ends after many polls only.
#[test]
fn whoever_is_polled_seldom_looks_at_its_sockets_each_time() {
    for ms in [50, 700, 1000, 1001, 1500, 2000, 2001, 2019, 3000] {
        for polls in 0..LOOK_EVERY_IN_A_HURRY {
            looks_at_its_sockets_each_time(Duration::from_millis(ms), polls);
        }
    }
}

/// Though it is polled once in a `pause`. It was so many times before.
fn looks_at_its_sockets_each_time(pause: Duration, polls: u32) {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    b.provider.polls = polls;
    let to_b = a.call(&b);
    let mut now = b.now();
    let mut few_polls =
        |a: Option<&mut Node>, b: &mut Node, done: &dyn Fn(&Record, &Record) -> bool| {
            let mut a = a;
            for _ in 0..6 {
                // An engine polls before it looks at the clock, and then again.
                b.provider.poll(now, &mut b.record);
                now = now.after(pause);
                for _ in 0..2 {
                    b.provider.poll(now, &mut b.record);
                }
                let Some(a) = &mut a else {
                    if done(&b.record, &b.record) {
                        return true;
                    }
                    continue;
                };
                for _ in 0..2 * LOOK_EVERY {
                    a.poll();
                }
                if done(&a.record, &b.record) {
                    return true;
                }
            }
            false
        };
    assert!(few_polls(Some(&mut a), &mut b, &|a, b| {
        a.connected == [to_b] && b.connected.len() == 1
    }));
    assert!(!few_polls(Some(&mut a), &mut b, &|_, _| false));
    let (src, dst) = (source(&a, 64, 1), b.provider.memory().alloc(64).unwrap());
    a.post(&[write(1, to_b, &src, &dst)]);
    assert!(few_polls(Some(&mut a), &mut b, &|a, _| a.done == [(1, Ok(()))]));
    assert!(!few_polls(Some(&mut a), &mut b, &|_, _| false));
    drop(a);
    assert!(few_polls(None, &mut b, &|_, b| !b.lost.is_empty()));
}

#[test]
fn an_idle_pair_sends_nothing() {
    let (mut a, mut b) = pair();
    settle_down(&mut a, &mut b);
    assert!(a.provider.arm() && b.provider.arm());
    assert!(!is_readable(&a, 20) && !is_readable(&b, 0));
}
