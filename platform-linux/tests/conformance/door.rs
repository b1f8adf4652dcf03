//! Strangers at an engine's door: messages that are none, that are cut, repeated or made up, and callers by the hundred.
//! They are counted and answered with little or nothing; nobody else is disturbed.
//!
//! The strangers are bare endpoints of libfabric's, or queue pairs, so this is about what these deliver. What libfabric does with
//! noise on its own sockets is its own affair.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use immwire::core::datagram::{Address, Claim, Counts, DATAGRAM_MAX, Message, Nonces, Say as Said};
use immwire::core::group::WorkRequest;
use immwire::core::id::{EngineId, MAX_NICS, NicIndex, PeerId, Time};
use immwire::core::nic::NicState;
use immwire::core::plan::Piece;
use immwire::core::recycle::Turn;
use immwire::core::tenant::Tenant;
use immwire::core::wire::{Hello, NetAddr, NicAddr, PROTOCOL_VERSION, ProviderKind, Refusal};
use immwire::libfabric::{LibfabricConfig, LibfabricProvider};
use immwire::provider::{
    ConnectError, NicInfo, Path, Provider, Receipt, RemotePath, Sink, Unfenced,
};
use immwire::shm::GroupKey;
use immwire::verbs::{VerbsConfig, VerbsProvider};
use immwire::{Clock, LivenessConfig, PeerState, TransferEngine};

use crate::agent::{Agent, Ask, Say, plain};
use crate::host::{Host, Own, Setup, is_emulated, patience};
use crate::operations::{only_peer, write};
use crate::stranger::{Datagrams, Endpoint, Nobody, Stranger, encoded};
use crate::{Case, Door, Random, Spread, Test, verbs_options};

pub const TESTS: &[Test] = &[
    ("noise_at_the_door", Spread::Once, noise_at_the_door),
    ("doors_of_impostors", Spread::Once, doors_of_impostors),
    ("a_recorded_handshake", Spread::Once, |case| a_recorded_handshake(case, None)),
    ("a_recorded_handshake_with_a_key", Spread::Once, |case| {
        a_recorded_handshake(case, Some("a secret"));
    }),
    ("a_thousand_callers", Spread::Once, a_thousand_callers),
    ("another_version", Spread::Once, another_version),
];

/// Where it is an endpoint of libfabric's, whose addresses do not say of which provider they are.
pub const AT_AN_ENDPOINT: &[Test] =
    &[("an_address_of_another_network", Spread::Once, an_address_of_another_network)];

// ---- an engine whose door is watched ----

/// What has happened at its door. Counts since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Seen {
    ignored: u64,
    refused: u64,
}

/// A provider that counts what happens at its door.
trait Doorkeeper: Provider {
    fn seen(&self) -> Seen;
}

impl Doorkeeper for LibfabricProvider {
    fn seen(&self) -> Seen {
        let stats = self.stats();
        Seen { ignored: stats.ignored, refused: stats.refused }
    }
}

impl Doorkeeper for VerbsProvider {
    fn seen(&self) -> Seen {
        let stats = self.stats();
        Seen { ignored: stats.ignored, refused: stats.refused }
    }
}

/// It shows that.
struct Watched<P> {
    inner: P,
    stats: Arc<Mutex<Seen>>,
}

impl<P: Doorkeeper> Provider for Watched<P> {
    type Memory = P::Memory;

    const AT_ONCE_BYTES: u64 = P::AT_ONCE_BYTES;

    fn nics(&self) -> &[NicInfo] {
        self.inner.nics()
    }

    fn memory(&self) -> &Arc<P::Memory> {
        self.inner.memory()
    }

    fn address(&self) -> NetAddr {
        self.inner.address()
    }

    fn unreached(&self) -> [u8; MAX_NICS] {
        self.inner.unreached()
    }

    fn nics_at(&self, address: &NetAddr) -> heapless::Vec<NicState, MAX_NICS> {
        self.inner.nics_at(address)
    }

    fn reads_gpus(&self, peer: PeerId) -> bool {
        self.inner.reads_gpus(peer)
    }

    fn write_at_once(&mut self, nic: NicIndex, piece: &Piece) -> bool {
        self.inner.write_at_once(nic, piece)
    }

    fn post<S: Sink>(&mut self, nic: NicIndex, work: &[WorkRequest], sink: &mut S) -> usize {
        self.inner.post(nic, work, sink)
    }

    fn poll<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool {
        let any = self.inner.poll(now, sink);
        *self.stats.lock().expect("not poisoned") = self.inner.seen();
        any
    }

    fn connect(
        &mut self,
        now: Time,
        peer: PeerId,
        address: &NetAddr,
        hello: &Hello,
    ) -> Result<(), ConnectError> {
        self.inner.connect(now, peer, address, hello)
    }

    fn quiesce(&mut self) {
        self.inner.quiesce();
    }

    fn disconnect<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        self.inner.disconnect(peer, sink);
    }

    fn abort<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        self.inner.abort(peer, sink);
    }

    fn fence<S: Sink>(
        &mut self,
        peer: PeerId,
        path: RemotePath,
        sink: &mut S,
    ) -> Result<Receipt, Unfenced> {
        self.inner.fence(peer, path, sink)
    }

    fn settle<S: Sink>(
        &mut self,
        peer: PeerId,
        path: Path,
        receipt: &Receipt,
        sink: &mut S,
    ) -> Result<(), Unfenced> {
        self.inner.settle(peer, path, receipt, sink)
    }

    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.inner.fd()
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }
}

/// An engine of the test's, polled, and what has happened at its door.
struct Me {
    host: Host,
    stats: Arc<Mutex<Seen>>,
}

impl Me {
    fn new(case: &Case, key: Option<&str>, connect_deadline: Duration) -> Self {
        let liveness = LivenessConfig { connect_deadline, ..LivenessConfig::default() };
        Self::with_peers(case, key, liveness, 256)
    }

    /// With room for so many.
    fn with_peers(case: &Case, key: Option<&str>, liveness: LivenessConfig, peers: u16) -> Self {
        let engine = EngineId(case.random().number());
        let group_key = key.map(|secret| GroupKey::derive(secret.as_bytes()));
        match case.facts().door.expect("a door") {
            Door::Endpoint(provider) => {
                let config = LibfabricConfig {
                    provider: Some(provider.to_owned()),
                    domain: Some("lo".to_owned()),
                    group_key,
                    peers,
                    ..LibfabricConfig::new(engine)
                };
                Self::on(LibfabricProvider::new(config).expect("a provider"), liveness, peers)
            }
            Door::QueuePair => {
                let options = verbs_options(&case.setup(1));
                let config = VerbsConfig { options, group_key, peers, ..VerbsConfig::new(engine) };
                Self::on(VerbsProvider::new(config).expect("a provider"), liveness, peers)
            }
        }
    }

    fn on<P: Doorkeeper>(inner: P, liveness: LivenessConfig, peers: u16) -> Self {
        let stats = Arc::default();
        let provider = Watched { inner, stats: Arc::clone(&stats) };
        let builder = TransferEngine::builder().liveness(liveness).peers(peers);
        let built = builder.build_polled_on(provider, Clock::monotonic());
        let (engine, driver) = built.expect("an engine");
        Self { host: Host::polled(engine, driver), stats }
    }

    /// Somebody who comes to its door.
    fn stranger(&self, case: &Case) -> Box<dyn Stranger> {
        match case.facts().door.expect("a door") {
            Door::Endpoint(provider) => Box::new(Endpoint::open(provider)),
            Door::QueuePair => Box::new(Datagrams::open(&self.door())),
        }
    }

    fn stats(&self) -> Seen {
        *self.stats.lock().expect("not poisoned")
    }

    fn door(&self) -> Address {
        self.host.engine.address().nics()[0].address.clone()
    }

    /// Waits until so many messages more than at first have been ignored, and no more than that.
    fn has_ignored(&self, first: u64, more: u64, what: &str) {
        let host = &self.host;
        host.until(patience(), || (self.stats().ignored >= first + more).then_some(()));
        host.linger(Duration::from_millis(20));
        assert_eq!(self.stats().ignored - first, more, "{what}: ignored");
    }
}

// ---- what it hears of strangers ----

fn nonce(random: &mut Random) -> [u8; 32] {
    std::array::from_fn(|_| u8::try_from(random.below(256)).expect("small"))
}

/// What a genuine engine says when it calls: its call, and what it proves when challenged.
fn overhear(case: &Case, me: &Host, stranger: &mut dyn Stranger) -> [Vec<u8>; 2] {
    let (mut caller, _) = case.agent("caller");
    let mut random = case.random();
    let address = stranger.as_engine(EngineId(random.number())).to_string();
    caller.post(Ask::TryPeer { address });
    let call = stranger.hear(me, patience()).expect("a call");
    let Ok(Message::Call { nonce: initiator, door, .. }) = Message::decode(&call) else {
        panic!("{call:?} is no call")
    };
    let to = stranger.meet(&door);
    let nonces = Nonces { initiator, acceptor: nonce(&mut random) };
    stranger.tell(me, to, &Message::Challenge(nonces));
    let proves = |bytes: &[u8]| matches!(Message::decode(bytes), Ok(Message::Prove { .. }));
    let prove = loop {
        // It may have called again before it heard us.
        let heard = stranger.hear(me, patience()).expect("an answer to the challenge");
        if proves(&heard) {
            break heard;
        }
    };
    stranger.tell(me, to, &Message::Refuse { nonce: initiator, why: Refusal::Busy });
    let Say::Text(why) = caller.answer(Some(me)) else { panic!("a stranger is no peer") };
    assert!(why.contains("no room"), "{why}");
    [call, prove]
}

/// A peer, and the traffic that goes on whatever strangers say.
struct Friend {
    agent: Agent,
    peer: PeerId,
    rounds: u64,
}

impl Friend {
    fn new(case: &Case, me: &Host) -> Self {
        Self::called_for(case, me, Duration::ZERO)
    }

    /// Called again and again for so long, where the engine gives up calls soon.
    fn called_for(case: &Case, me: &Host, limit: Duration) -> Self {
        let (agent, address) = case.agent("friend");
        let start = Instant::now();
        let peer = loop {
            match me.try_peer(&address) {
                Ok(peer) => break peer,
                Err(why) => assert!(start.elapsed() < limit, "{address}: {why}"),
            }
        };
        Self { agent, peer, rounds: 0 }
    }

    fn is_served(&mut self, case: &Case, me: &Host) {
        self.rounds += 1;
        let src = me.memory(100_000, Own::Engine);
        let (there, desc) = self.agent.memory(me, 100_000, Own::Engine);
        let (counter, tag) = self.agent.counter(me);
        let pattern = case.pattern(self.rounds);
        pattern.fill(&src, 0, 100_000, 0);
        me.done(&write(me, self.peer, &src, &desc, (0, 0, 100_000), Some(tag)));
        self.agent.count(me, counter, 1);
        self.agent.check(me, there, 0, 100_000, pattern);
    }
}

/// Bytes of which some are right; more than a message has, where that is survived.
fn mangled(case: &Case, random: &mut Random, good: &[u8]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    let byte = |random: &mut Random| u8::try_from(random.below(256)).expect("small");
    match random.below(4) {
        0 => bytes.truncate(usize::try_from(random.below(good.len() as u64)).expect("small")),
        1 => bytes.extend((0..random.below(1500)).map(|_| byte(random))),
        _ => {
            for _ in 0..=random.below(4) {
                let at = usize::try_from(random.below(good.len() as u64)).expect("small");
                bytes[at] = byte(random);
            }
        }
    }
    if !case.facts().survives_long_messages {
        bytes.truncate(DATAGRAM_MAX);
    }
    bytes
}

fn noise_at_the_door(case: &Case) {
    let me = Me::new(case, None, Duration::from_secs(10));
    let host = &me.host;
    let mut friend = Friend::new(case, host);
    let mut stranger = me.stranger(case);
    let mut random = case.random();
    let [call, prove] = overhear(case, host, &mut *stranger);
    let to = stranger.meet(&me.door());
    let Ok(Message::Prove { claim, door, nonces, proof }) = Message::decode(&prove) else {
        panic!("{prove:?} proves nothing")
    };

    // What is no message, or none that means anything here, is ignored, and counted so.
    let mut kinds: Vec<(&str, Vec<Vec<u8>>)> = Vec::new();
    let longest = stranger.longest();
    let lengths = [0, 1, 7, 8, 9, 100, 1000, longest - 1, longest];
    let mut byte = || u8::try_from(random.below(256)).expect("small");
    kinds.push((
        "random bytes",
        lengths.iter().map(|&len| (0..len).map(|_| byte()).collect()).collect(),
    ));
    kinds.push((
        "a call that is cut",
        (0..call.len()).step_by(5).map(|len| call[..len].to_vec()).collect(),
    ));
    kinds.push((
        "a proof that is cut",
        (0..prove.len()).step_by(29).map(|len| prove[..len].to_vec()).collect(),
    ));
    kinds.push(("somebody else's proof", vec![prove.clone(); 20]));
    let unasked = [
        Message::Challenge(nonces),
        Message::Accept { nonce: nonce(&mut random), proof, claim },
        Message::Refuse { nonce: nonce(&mut random), why: Refusal::Busy },
    ];
    kinds.push(("answers to nothing", unasked.iter().map(encoded).collect()));
    let ports = std::iter::once(stranger.name().clone()).collect();
    let tenant = Tenant::new(1, 1).expect("valid");
    let mut sayings = Vec::new();
    for say in [
        Said::Ready { gone: 0 },
        Said::Bye { quiet: true, sent: std::iter::once(u64::MAX).collect() },
        Said::Bye { quiet: false, sent: Counts::new() },
        Said::Taken { nic: 0, count: u64::MAX },
        Said::Withdraw(tenant),
        Said::Withdrawn(tenant),
        Said::Move { turn: Turn(1), ports },
        Said::Moved { turn: Turn(0), sent: std::iter::once(0).collect() },
    ] {
        // Of the friend's place in the table, but not its word.
        let token = random.number() & !0xffff | u64::from(friend.peer.index);
        sayings.push(encoded(&Message::Session { token, say }));
    }
    kinds.push(("what no peer says", sayings));
    for (what, messages) in &kinds {
        let before = me.stats();
        for message in messages {
            assert!(stranger.say(host, to, message), "{what}: not delivered");
        }
        me.has_ignored(before.ignored, messages.len() as u64, what);
        assert_eq!(me.stats().refused, before.refused, "{what}");
        // Whoever was overheard may have said it again before it gave up.
        let mut heard = std::iter::from_fn(|| stranger.hear(host, Duration::from_millis(5)));
        let answer = heard.find(|heard| ![&call, &prove].contains(&heard));
        assert_eq!(answer, None, "{what}");
        friend.is_served(case, host);
    }

    // What may be a mistake is refused with a reason.
    let refused = |stranger: &mut dyn Stranger, message: &Message<'_>| {
        let before = me.stats();
        stranger.tell(host, to, message);
        let heard = stranger.hear(host, patience()).expect("an answer");
        let Ok(Message::Refuse { why, .. }) = Message::decode(&heard) else { panic!("{heard:?}") };
        assert_eq!((me.stats().refused, me.stats().ignored), (before.refused + 1, before.ignored));
        why
    };
    let mine = stranger.name().clone();
    let first = nonce(&mut random);
    let nobody = EngineId(random.number());
    let wrong = Message::Call { nonce: first, target: nobody, door: mine.clone() };
    assert_eq!(refused(&mut *stranger, &wrong), Refusal::Elsewhere);
    let target = host.engine.address().engine();
    stranger.tell(host, to, &Message::Call { nonce: first, target, door: mine.clone() });
    let heard = stranger.hear(host, patience()).expect("a challenge");
    let Ok(Message::Challenge(nonces)) = Message::decode(&heard) else { panic!("{heard:?}") };
    let garbage = Message::Prove { nonces, door: mine, proof, claim: &claim[..claim.len() / 2] };
    assert_eq!(refused(&mut *stranger, &garbage), Refusal::Malformed);
    // The challenge was for the stranger, and for nobody else.
    let before = me.stats();
    stranger.tell(host, to, &Message::Prove { nonces, door, proof, claim });
    me.has_ignored(before.ignored, 1, "a proof from elsewhere");

    // A storm of messages of which parts are right, longer ones than there may be among them.
    let good: Vec<Vec<u8>> = kinds.into_iter().flat_map(|(_, messages)| messages).collect();
    // A provider may drop the connection of whoever sends such a one, and what is under way there: it is sent more.
    let (before, start) = (me.stats(), Instant::now());
    for n in 0_usize.. {
        let ignored = me.stats().ignored - before.ignored;
        if n >= 1500 && ignored > 1000 {
            break;
        }
        assert!(start.elapsed() < patience(), "{:?} of {n}, {before:?}", me.stats());
        let at = usize::try_from(random.below(good.len() as u64)).expect("small");
        let bytes = if good[at].is_empty() { call.clone() } else { good[at].clone() };
        stranger.say(host, to, &mangled(case, &mut random, &bytes));
        stranger.heard().clear();
        if n % 300 == 0 {
            friend.is_served(case, host);
        }
    }
    friend.is_served(case, host);
    assert_eq!(host.engine.peers(), [friend.peer]);
    assert_eq!(host.engine.peer_state(friend.peer), Some(PeerState::Up));
}

/// The address leads to somebody who is no engine: the call fails with a reason, in time.
fn doors_of_impostors(case: &Case) {
    let me = Me::new(case, None, Duration::from_millis(400));
    let host = &me.host;
    let mut friend = Friend::called_for(case, host, patience());
    let mut random = case.random();
    for round in 0..12_u64 {
        let mut stranger = me.stranger(case);
        let address = stranger.as_engine(EngineId(random.number()));
        let (seed, stop) = (random.number(), Arc::new(AtomicBool::new(false)));
        let (stopping, copy) = (Arc::clone(&stop), *case);
        let quiet = round % 4 == 0;
        let answering = std::thread::spawn(move || {
            let mut random = Random(seed | 1);
            while !stopping.load(Ordering::Relaxed) {
                let Some(heard) = stranger.hear(&Nobody, Duration::from_millis(1)) else {
                    continue;
                };
                let Ok(Message::Call { nonce: initiator, door, .. }) = Message::decode(&heard)
                else {
                    continue;
                };
                if quiet {
                    continue;
                }
                let to = stranger.meet(&door);
                let nonces = Nonces { initiator, acceptor: nonce(&mut random) };
                let accept = Message::Accept { nonce: initiator, proof: [0; 32], claim: &heard };
                let answers = [encoded(&Message::Challenge(nonces)), encoded(&accept)];
                for answer in &answers {
                    stranger.say(&Nobody, to, &mangled(&copy, &mut random, answer));
                    stranger.say(&Nobody, to, answer);
                }
            }
        });
        let start = Instant::now();
        let error = host.try_peer(&address).expect_err("an impostor is no peer");
        let limit = Duration::from_secs(if is_emulated() { 10 } else { 3 });
        assert!(start.elapsed() < limit, "{error}: {:?}", start.elapsed());
        stop.store(true, Ordering::Relaxed);
        answering.join().expect("no panic");
        assert_eq!(host.engine.peers(), [friend.peer], "round {round}");
        friend.is_served(case, host);
    }
}

/// Whoever calls and speaks another version of the protocol is told so at once, and so is who calls such a one. Nothing else of theirs is listened to.
fn another_version(case: &Case) {
    let me = Me::new(case, None, Duration::from_secs(10));
    let host = &me.host;
    let mut stranger = me.stranger(case);
    let mut random = case.random();
    let to = stranger.meet(&me.door());
    let (mine, target) = (stranger.name().clone(), host.engine.address().engine());
    for theirs in [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1] {
        let of_theirs = |message: &Message<'_>| {
            let mut bytes = encoded(message);
            bytes[4..6].copy_from_slice(&theirs.to_le_bytes());
            bytes
        };
        let before = me.stats();
        let initiator = nonce(&mut random);
        let call = Message::Call { nonce: initiator, target, door: mine.clone() };
        assert!(stranger.say(host, to, &of_theirs(&call)));
        let why = loop {
            let heard = stranger.hear(host, patience()).expect("an answer");
            match Message::decode(&heard) {
                Ok(Message::Refuse { nonce, why }) if nonce == initiator => break why,
                // Of the caller below, which may have called again before it heard us.
                Ok(Message::Call { .. }) => {}
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(why, Refusal::Version { ours: PROTOCOL_VERSION, theirs });
        assert_eq!(me.stats().refused, before.refused + 1);
        let acceptor = nonce(&mut random);
        let unheard = Message::Challenge(Nonces { initiator, acceptor });
        assert!(stranger.say(host, to, &of_theirs(&unheard)));
        me.has_ignored(before.ignored, 1, "a challenge of another version");

        let (mut caller, _) = case.agent("caller");
        let address = stranger.as_engine(EngineId(random.number())).to_string();
        caller.post(Ask::TryPeer { address });
        let call = stranger.hear(host, patience()).expect("a call");
        let Ok(Message::Call { nonce: initiator, door, .. }) = Message::decode(&call) else {
            panic!("{call:?} is no call")
        };
        let back = stranger.meet(&door);
        let why = Refusal::Version { ours: theirs, theirs: PROTOCOL_VERSION };
        let refuse = Message::Refuse { nonce: initiator, why };
        assert!(stranger.say(host, back, &of_theirs(&refuse)));
        let Say::Text(why) = caller.answer(Some(host)) else { panic!("a stranger is no peer") };
        let versions = [theirs.to_string(), PROTOCOL_VERSION.to_string()];
        assert!(versions.iter().all(|it| why.contains(it)) && why.contains("version"), "{why}");
    }
}

/// Somebody has recorded how a peer connected, and says it all again when that peer has a new connection.
fn a_recorded_handshake(case: &Case, key: Option<&str>) {
    let me = Me::new(case, key, Duration::from_secs(10));
    let host = &me.host;
    let mut stranger = me.stranger(case);
    let to = stranger.meet(&me.door());
    let mut other = case.bare_agent("recorded");
    other.build(&Setup { key: key.map(str::to_owned), ..case.setup(1) });
    // It calls by way of the stranger, who passes all on.
    let detour = stranger.as_engine(host.engine.address().engine()).to_string();
    other.post(Ask::Peer { address: detour });
    let mut recorded = Vec::new();
    let start = Instant::now();
    while host.engine.peers().is_empty() {
        assert!(start.elapsed() < patience(), "{} messages, and no peer", recorded.len());
        // The last word may have been said, and not been heard yet.
        let Some(heard) = stranger.hear(host, Duration::from_millis(50)) else { continue };
        assert!(stranger.say(host, to, &heard));
        recorded.push(heard);
        host.linger(Duration::from_millis(10));
    }
    let Say::Peer(_) = other.answer(Some(host)) else { panic!("not connected") };
    host.engine.remove_peer(host.engine.peers()[0]);
    let none = host.until(patience(), || host.engine.peers().is_empty().then_some(()));
    assert!(none.is_some(), "{:?}", host.engine.peers());

    let replay = |stranger: &mut dyn Stranger| {
        for message in &recorded {
            stranger.say(host, to, message);
            host.linger(Duration::from_millis(20));
        }
        stranger.heard().clear();
    };
    // Nobody connects by a recording,
    replay(&mut *stranger);
    assert_eq!(host.engine.peers(), [], "connected by a recording");
    // and it does not disturb who really is there.
    other.peer(host, host.engine.address());
    // The caller may know of it first.
    let peer =
        host.until(patience(), || host.engine.peers().first().copied()).expect("it is there");
    replay(&mut *stranger);
    assert_eq!(host.engine.peers(), [peer], "lost by a recording");
    assert_eq!(host.engine.peer_state(peer), Some(PeerState::Up));
    let back = only_peer(host, &mut other);
    let tag = host.engine.counter().expect("a counter");
    let ask = Ask::Imm { peer: plain(back), tag: tag.tag().bits(), writes: 1 };
    assert_eq!(other.ask(host, ask), Say::Text("Done".into()));
    host.count(&tag, 1, patience()).expect("its");
}

/// One of many who call, each as an engine of its own.
struct Caller {
    engine: EngineId,
    nonce: [u8; 32],
    /// What it was challenged with, and how often it has answered that.
    challenge: Option<(Nonces, u32)>,
    /// Whether it was let in.
    answer: Option<bool>,
}

impl Caller {
    /// What it says next: a call, or the proof that it was asked for. Where that is not answered it calls again.
    fn says(&mut self, target: EngineId, door: &Address, claim: &Claim) -> Vec<u8> {
        if self.challenge.is_some_and(|(_, times)| times == 4) {
            self.challenge = None;
        }
        let door = door.clone();
        let Some((nonces, times)) = &mut self.challenge else {
            return encoded(&Message::Call { nonce: self.nonce, target, door });
        };
        *times += 1;
        let mut claim = claim.clone();
        let address = &claim.hello.address;
        let address =
            NetAddr::new(address.provider(), self.engine, address.nics()).expect("another's");
        claim.hello.address = address;
        claim.hello.mailbox.owner = self.engine;
        let mut bytes = [0; DATAGRAM_MAX];
        let len = claim.encode(&mut bytes).expect("fits");
        let (nonces, proof) = (*nonces, [0; 32]);
        encoded(&Message::Prove { nonces, door, proof, claim: &bytes[..len] })
    }
}

/// A thousand that say they are engines call at once, and prove what they are asked to, as they may where there is no key. As many are let in
/// as there is room for, the others are told that there is none; who is there is served as before. Those let in say nothing more, and
/// when that has been noticed there is room again.
fn a_thousand_callers(case: &Case) {
    const PEERS: u16 = 8;
    let me = Me::with_peers(case, None, LivenessConfig::default(), PEERS);
    let host = &me.host;
    let mut friend = Friend::new(case, host);
    let mut stranger = me.stranger(case);
    // Not those by which the engine is named.
    let mut random = Random(case.seed.rotate_left(32) | 1);
    let [_, prove] = overhear(case, host, &mut *stranger);
    let Ok(Message::Prove { claim, .. }) = Message::decode(&prove) else {
        panic!("{prove:?} proves nothing")
    };
    let claim = Claim::decode(claim).expect("a claim");
    let to = stranger.meet(&me.door());
    let target = host.engine.address().engine();
    let mut callers: Vec<_> = (0..1000)
        .map(|_| {
            let (engine, nonce) = (EngineId(random.number()), nonce(&mut random));
            Caller { engine, nonce, challenge: None, answer: None }
        })
        .collect();
    let (mut said, start, mut most) = (0_u64, Instant::now(), 0);
    while callers.iter().any(|caller| caller.answer.is_none()) {
        for at in 0..callers.len() {
            if callers[at].answer.is_some() {
                continue;
            }
            let words = callers[at].says(target, stranger.name(), &claim);
            stranger.say(host, to, &words);
            said += 1;
            while let Some(heard) = stranger.heard().pop_front() {
                let Ok(message) = Message::decode(&heard) else { panic!("{heard:?}") };
                let nonce = match &message {
                    Message::Challenge(nonces) => nonces.initiator,
                    Message::Accept { nonce, .. } | Message::Refuse { nonce, .. } => *nonce,
                    // The one that was overheard.
                    _ => continue,
                };
                let Some(caller) = callers.iter_mut().find(|it| it.nonce == nonce) else {
                    continue;
                };
                match message {
                    Message::Challenge(nonces) => {
                        caller.challenge = caller.challenge.or(Some((nonces, 0)));
                    }
                    Message::Accept { .. } => caller.answer = Some(true),
                    Message::Refuse { why: Refusal::Busy, .. } => {
                        caller.answer = caller.answer.or(Some(false));
                    }
                    // It was let in, did not hear of it, and is gone.
                    Message::Refuse { why: Refusal::Stale, .. } => caller.answer = Some(true),
                    Message::Refuse { why, .. } => panic!("{why}"),
                    _ => {}
                }
            }
            most = most.max(host.engine.peers().len());
            if said % 500 == 0 {
                friend.is_served(case, host);
            }
            assert!(start.elapsed() < 4 * patience(), "{said} messages, {most} peers at most");
        }
    }
    let taken = callers.iter().filter(|caller| caller.answer == Some(true)).count();
    println!("    {said} messages, {taken} of {} callers let in", callers.len());
    assert!((usize::from(PEERS) - 1..callers.len()).contains(&taken), "{taken} let in");
    assert_eq!(most, usize::from(PEERS));
    friend.is_served(case, host);

    let gone = host.until(2 * patience(), || (host.engine.peers() == [friend.peer]).then_some(()));
    assert!(gone.is_some(), "{:?}", host.engine.peers());
    let (mut late, address) = case.agent("late");
    host.peer(&address);
    let back = only_peer(host, &mut late);
    let tag = host.engine.counter().expect("a counter");
    let ask = Ask::Imm { peer: plain(back), tag: tag.tag().bits(), writes: 1 };
    assert_eq!(late.ask(host, ask), Say::Text("Done".into()));
    host.count(&tag, 1, patience()).expect("its");
    friend.is_served(case, host);
}

/// The address of an engine that is on libfabric by another provider, or by addresses of another family: nothing is wrong with it, and who
/// adds it is told what to do.
fn an_address_of_another_network(case: &Case) {
    let me = Host::new(&case.setup(1));
    let Some(Door::Endpoint(provider)) = case.facts().door else { panic!("a door of libfabric's") };
    let own = me.engine.address().nics()[0].address.len();
    // IPv4's, IPv6's, EFA's.
    let lens = [16, 28, 32].into_iter().filter(|len| *len != own);
    for (engine, len) in (1..).zip(lens) {
        let address = Address::from_slice(&vec![7; len]).expect("short");
        let nic = NicAddr { speed_gbps: 1, address };
        let address = NetAddr::new(ProviderKind::Libfabric, EngineId(engine), &[nic]);
        let said = me.engine.add_peer(&address.expect("one NIC")).expect_err("another's");
        let said = said.to_string();
        assert!(said.contains(provider) && !said.contains("damaged"), "{len}: {said}");
    }
    assert!(me.engine.peers().is_empty());
}
