//! Strangers at an engine's door: messages that are none, that are cut, repeated or made up. They are counted and
//! answered with little or nothing; nobody else is disturbed.
//!
//! The stranger is a bare endpoint of libfabric's, so this is about what libfabric delivers. What it does with
//! noise on its own sockets is its own affair.

use std::collections::VecDeque;
use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use immwire::core::datagram::{Address, Counts, DATAGRAM_MAX, Message, Nonces, Say as Said};
use immwire::core::group::WorkRequest;
use immwire::core::id::{EngineId, NicIndex, PeerId, Time};
use immwire::core::recycle::Turn;
use immwire::core::tenant::Tenant;
use immwire::core::wire::{Hello, NetAddr, NicAddr, ProviderKind, Refusal};
use immwire::libfabric::{LibfabricConfig, LibfabricMemory, LibfabricProvider, LibfabricStats};
use immwire::provider::{ConnectError, NicInfo, Provider, Sink};
use immwire::shm::GroupKey;
use immwire::{Clock, LivenessConfig, PeerState, TransferEngine};
use libfabric_sys as sys;

use crate::agent::{Agent, Ask, Say, plain};
use crate::host::{Host, Own, Setup, patience};
use crate::operations::{only_peer, write};
use crate::{Case, Random, Spread, Test};

pub const TESTS: &[Test] = &[
    ("noise_at_the_door", Spread::Once, noise_at_the_door),
    ("doors_of_impostors", Spread::Once, doors_of_impostors),
    ("a_recorded_handshake", Spread::Once, |case| a_recorded_handshake(case, None)),
    ("a_recorded_handshake_with_a_key", Spread::Once, |case| {
        a_recorded_handshake(case, Some("a secret"));
    }),
];

// ---- an engine whose door is watched ----

/// A provider that shows what it counts.
struct Watched {
    inner: LibfabricProvider,
    stats: Arc<Mutex<LibfabricStats>>,
}

impl Provider for Watched {
    type Memory = LibfabricMemory;

    fn nics(&self) -> &[NicInfo] {
        self.inner.nics()
    }

    fn memory(&self) -> &Arc<LibfabricMemory> {
        self.inner.memory()
    }

    fn address(&self) -> NetAddr {
        self.inner.address()
    }

    fn post<S: Sink>(&mut self, nic: NicIndex, work: &[WorkRequest], sink: &mut S) -> usize {
        self.inner.post(nic, work, sink)
    }

    fn poll<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool {
        let any = self.inner.poll(now, sink);
        *self.stats.lock().expect("not poisoned") = self.inner.stats();
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

    fn disconnect<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        self.inner.disconnect(peer, sink);
    }

    fn abort<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        self.inner.abort(peer, sink);
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
    stats: Arc<Mutex<LibfabricStats>>,
}

impl Me {
    fn new(case: &Case, key: Option<&str>, connect_deadline: Duration) -> Self {
        let config = LibfabricConfig {
            provider: Some(case.facts().door.expect("a door").to_owned()),
            domain: Some("lo".to_owned()),
            group_key: key.map(|secret| GroupKey::derive(secret.as_bytes())),
            ..LibfabricConfig::new(EngineId(case.random().number()))
        };
        let stats = Arc::default();
        let inner = LibfabricProvider::new(config).expect("a provider");
        let provider = Watched { inner, stats: Arc::clone(&stats) };
        let liveness = LivenessConfig { connect_deadline, ..LivenessConfig::default() };
        let builder = TransferEngine::builder().liveness(liveness);
        let built = builder.build_polled_on(provider, Clock::monotonic());
        let (engine, driver) = built.expect("an engine");
        Self { host: Host::polled(engine, driver), stats }
    }

    fn stats(&self) -> LibfabricStats {
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

// ---- the stranger ----

/// Who has to move while the stranger waits.
trait Moves {
    fn step(&self);
}

impl Moves for Host {
    fn step(&self) {
        Self::step(self);
    }
}

/// The engine is moved elsewhere.
struct Nobody;

impl Moves for Nobody {
    fn step(&self) {
        std::thread::yield_now();
    }
}

const RECEIVES: usize = 16;
/// Longer than any message.
const ROOM: usize = 2 * DATAGRAM_MAX;

/// A bare endpoint that sends what it likes.
struct Stranger {
    provider: CString,
    /// Whose doors it knows, by their number.
    met: Vec<Address>,
    library: &'static sys::Library,
    info: *mut sys::fi_info,
    fabric: *mut sys::fid_fabric,
    domain: *mut sys::fid_domain,
    cq: *mut sys::fid_cq,
    av: *mut sys::fid_av,
    ep: *mut sys::fid_ep,
    mr: *mut sys::fid_mr,
    /// Receives, and one send behind them; libfabric's while posted, so never a reference.
    buffers: *mut [u8],
    contexts: *mut [sys::fi_context2],
    name: Address,
    heard: VecDeque<Vec<u8>>,
    /// How the last send has ended.
    sent: Option<bool>,
}

// SAFETY: objects of FI_THREAD_SAFE domains, and memory of its own; used by one thread at a time.
unsafe impl Send for Stranger {}

fn ok(library: &sys::Library, what: &str, code: i32) {
    assert_eq!(code, 0, "{what}: {}", library.strerror(-code));
}

impl Stranger {
    fn open(case: &Case) -> Self {
        Self::of(CString::new(case.facts().door.expect("a door")).expect("a name"))
    }

    fn of(provider: CString) -> Self {
        let library = sys::Library::load().expect("libfabric");
        let buffers = Box::into_raw(vec![0; ROOM * (RECEIVES + 1)].into_boxed_slice());
        let empty = sys::fi_context2 { internal: [null_mut(); 8] };
        let contexts = Box::into_raw(vec![empty; RECEIVES + 1].into_boxed_slice());
        // SAFETY: the calls of a program in C, in the order and with the arguments that the manual asks for: every
        // object was opened by an earlier call that succeeded, attributes and results are locals, the string
        // that the library frees is from malloc, and the buffers live until after the endpoint.
        let mut stranger = unsafe {
            let hints = library.dupinfo(null());
            let attr = (*hints).domain_attr;
            (*hints).caps = sys::FI_MSG | sys::FI_RMA;
            (*hints).mode = sys::FI_CONTEXT | sys::FI_CONTEXT2;
            (*(*hints).ep_attr).type_ = sys::FI_EP_RDM;
            (*attr).mr_mode = sys::FI_MR_LOCAL
                | sys::FI_MR_VIRT_ADDR
                | sys::FI_MR_ALLOCATED
                | sys::FI_MR_PROV_KEY;
            (*attr).threading = sys::FI_THREAD_SAFE;
            (*attr).cq_data_size = 4;
            (*(*hints).fabric_attr).prov_name = libc::strdup(provider.as_ptr());
            let mut info = null_mut();
            let api = library.version().min(sys::Version { major: 1, minor: 20 }).code();
            let node = c"127.0.0.1".as_ptr();
            let code = library.getinfo(api, node, null(), sys::FI_SOURCE, hints, &raw mut info);
            ok(library, "fi_getinfo", code);
            library.freeinfo(hints);
            let (mut fabric, mut domain) = (null_mut(), null_mut());
            let code = library.fabric((*info).fabric_attr, &raw mut fabric, null_mut());
            ok(library, "fi_fabric", code);
            let code = sys::fi_domain(fabric, info, &raw mut domain, null_mut());
            ok(library, "fi_domain", code);
            let (mut cq, mut av, mut ep, mut mr) = (null_mut(), null_mut(), null_mut(), null_mut());
            let mut cq_attr: sys::fi_cq_attr = std::mem::zeroed();
            cq_attr.size = 256;
            cq_attr.format = sys::FI_CQ_FORMAT_DATA;
            let code = sys::fi_cq_open(domain, &raw mut cq_attr, &raw mut cq, null_mut());
            ok(library, "fi_cq_open", code);
            let mut av_attr: sys::fi_av_attr = std::mem::zeroed();
            av_attr.type_ = sys::FI_AV_TABLE;
            let code = sys::fi_av_open(domain, &raw mut av_attr, &raw mut av, null_mut());
            ok(library, "fi_av_open", code);
            ok(library, "fi_endpoint", sys::fi_endpoint(domain, info, &raw mut ep, null_mut()));
            let both = sys::FI_TRANSMIT | sys::FI_RECV;
            ok(library, "bind cq", sys::fi_ep_bind(ep, &raw mut (*cq).fid, both));
            ok(library, "bind av", sys::fi_ep_bind(ep, &raw mut (*av).fid, 0));
            ok(library, "fi_enable", sys::fi_enable(ep));
            let (at, len) = (buffers.cast::<c_void>(), buffers.len());
            let access = sys::FI_SEND | sys::FI_RECV;
            let code = sys::fi_mr_reg(domain, at, len, access, 0, 1, 0, &raw mut mr, null_mut());
            ok(library, "fi_mr_reg", code);
            let (mut name, mut len) = ([0_u8; 64], 64);
            ok(library, "fi_getname", sys::fi_getname(ep, name.as_mut_ptr().cast(), &raw mut len));
            let name = Address::from_slice(&name[..len]).expect("fits");
            let (heard, sent) = (VecDeque::new(), None);
            Self {
                provider,
                met: Vec::new(),
                library,
                info,
                fabric,
                domain,
                cq,
                av,
                ep,
                mr,
                buffers,
                contexts,
                name,
                heard,
                sent,
            }
        };
        (0..RECEIVES).for_each(|at| stranger.listen(at));
        stranger
    }

    fn buffer(&self, at: usize) -> *mut u8 {
        self.buffers.cast::<u8>().wrapping_add(at * ROOM)
    }

    fn context(&self, at: usize) -> *mut c_void {
        self.contexts.cast::<sys::fi_context2>().wrapping_add(at).cast()
    }

    fn listen(&mut self, at: usize) {
        let (to, context) = (self.buffer(at).cast(), self.context(at));
        // SAFETY: the buffer is registered and not posted now; so is its context.
        let code = unsafe {
            let desc = sys::fi_mr_desc(self.mr);
            sys::fi_recv(self.ep, to, ROOM, desc, sys::FI_ADDR_UNSPEC, context)
        };
        assert_eq!(code, 0, "fi_recv");
    }

    /// The address of somebody's door.
    fn meet(&mut self, door: &Address) -> u64 {
        assert_eq!(door.len(), self.name.len());
        let mut handle = sys::FI_ADDR_NOTAVAIL;
        // SAFETY: one address of this provider's, of its length.
        let count = unsafe {
            let from = door.as_ptr().cast();
            sys::fi_av_insert(self.av, from, 1, &raw mut handle, 0, null_mut())
        };
        assert_eq!(count, 1, "fi_av_insert");
        self.met.push(door.clone());
        handle
    }

    /// Somebody new in its place, who knows the same doors by the same numbers.
    fn renew(&mut self) {
        let met = std::mem::take(&mut self.met);
        *self = Self::of(self.provider.clone());
        for door in &met {
            self.meet(door);
        }
    }

    /// Drives the provider; keeps what is heard.
    fn step(&mut self) {
        // SAFETY: all zero is an entry; the queue is live, and one entry is written at most.
        let mut entry: sys::fi_cq_data_entry = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let read = unsafe { sys::fi_cq_read(self.cq, (&raw mut entry).cast(), 1) };
        let (context, bytes) = if read == 1 {
            (entry.op_context, Some(entry.len))
        } else if read == -(sys::FI_EAVAIL as isize) {
            // SAFETY: all zero is an entry, without room for details.
            let mut failed: sys::fi_cq_err_entry = unsafe { std::mem::zeroed() };
            // SAFETY: as above.
            let read = unsafe { sys::fi_cq_readerr(self.cq, &raw mut failed, 0) };
            if read != 1 {
                return;
            }
            (failed.op_context, None)
        } else {
            return;
        };
        let offset = context as usize - self.contexts.cast::<sys::fi_context2>() as usize;
        let at = offset / size_of::<sys::fi_context2>();
        if at == RECEIVES {
            self.sent = Some(bytes.is_some());
            return;
        }
        if let Some(len) = bytes {
            let mut message = vec![0; len.min(ROOM)];
            // SAFETY: the receive has ended, so the buffer is ours.
            unsafe {
                std::ptr::copy_nonoverlapping(self.buffer(at), message.as_mut_ptr(), message.len());
            }
            self.heard.push_back(message);
        }
        self.listen(at);
    }

    /// Sends bytes, while `me` moves; whether they were delivered.
    fn say(&mut self, me: &impl Moves, to: u64, bytes: &[u8]) -> bool {
        self.sent = None;
        let (mut posted, start) = (false, Instant::now());
        let mut renewed = start;
        while self.sent.is_none() {
            assert!(
                start.elapsed() < patience(),
                "a stranger's message is not {}",
                if posted { "sent" } else { "taken" }
            );
            if !posted {
                // `net` of libfabric 1.17 may lose a request to connect while it closes another connection, and then
                // waits for the answer for ever.
                if renewed.elapsed() > Duration::from_secs(2) {
                    renewed = Instant::now();
                    self.renew();
                }
                let (from, context) = (self.buffer(RECEIVES), self.context(RECEIVES));
                // SAFETY: not under way: each send is waited for.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), from, bytes.len()) };
                // SAFETY: as above; registered; the handle is from `meet`.
                let code = unsafe {
                    let desc = sys::fi_mr_desc(self.mr);
                    sys::fi_send(self.ep, from.cast(), bytes.len(), desc, to, context)
                };
                match code {
                    0 => posted = true,
                    code if code == -(sys::FI_EAGAIN as isize) => {}
                    _ => return false,
                }
            }
            self.step();
            me.step();
        }
        self.sent == Some(true)
    }

    fn tell(&mut self, me: &Host, to: u64, message: &Message<'_>) {
        assert!(self.say(me, to, &encoded(message)), "{message:?} is not delivered");
    }

    /// The next message to it, while `me` moves.
    fn hear(&mut self, me: &impl Moves, limit: Duration) -> Option<Vec<u8>> {
        let start = Instant::now();
        while self.heard.is_empty() && start.elapsed() < limit {
            self.step();
            me.step();
        }
        self.heard.pop_front()
    }

    /// An address that leads here, of the engine that is asked for.
    fn as_engine(&self, engine: EngineId) -> NetAddr {
        let nic = NicAddr { speed_gbps: 100, address: self.name.clone() };
        NetAddr::new(ProviderKind::Libfabric, engine, &[nic]).expect("an address")
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        // SAFETY: in the reverse order, once; memory behind what used it.
        unsafe {
            sys::fi_close(&raw mut (*self.ep).fid);
            sys::fi_close(&raw mut (*self.mr).fid);
            sys::fi_close(&raw mut (*self.cq).fid);
            sys::fi_close(&raw mut (*self.av).fid);
            sys::fi_close(&raw mut (*self.domain).fid);
            sys::fi_close(&raw mut (*self.fabric).fid);
            self.library.freeinfo(self.info);
            drop((Box::from_raw(self.buffers), Box::from_raw(self.contexts)));
        }
    }
}

fn encoded(message: &Message<'_>) -> Vec<u8> {
    let mut bytes = [0; DATAGRAM_MAX];
    let len = message.encode(&mut bytes).expect("fits");
    bytes[..len].to_vec()
}

fn nonce(random: &mut Random) -> [u8; 32] {
    std::array::from_fn(|_| u8::try_from(random.below(256)).expect("small"))
}

/// What a genuine engine says when it calls: its call, and what it proves when challenged.
fn overhear(case: &Case, me: &Host, stranger: &mut Stranger) -> [Vec<u8>; 2] {
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
        let (agent, address) = case.agent("friend");
        Self { agent, peer: me.peer(&address), rounds: 0 }
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
    let mut stranger = Stranger::open(case);
    let mut random = case.random();
    let [call, prove] = overhear(case, host, &mut stranger);
    let to = stranger.meet(&me.door());
    let Ok(Message::Prove { claim, door, nonces, proof }) = Message::decode(&prove) else {
        panic!("{prove:?} proves nothing")
    };

    // What is no message, or none that means anything here, is ignored, and counted so.
    let mut kinds: Vec<(&str, Vec<Vec<u8>>)> = Vec::new();
    let lengths = [0, 1, 7, 8, 9, 100, 1000, DATAGRAM_MAX - 1, DATAGRAM_MAX];
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
    let ports = std::iter::once(stranger.name.clone()).collect();
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
    let refused = |stranger: &mut Stranger, message: &Message<'_>| {
        let before = me.stats();
        stranger.tell(host, to, message);
        let heard = stranger.hear(host, patience()).expect("an answer");
        let Ok(Message::Refuse { why, .. }) = Message::decode(&heard) else { panic!("{heard:?}") };
        assert_eq!((me.stats().refused, me.stats().ignored), (before.refused + 1, before.ignored));
        why
    };
    let mine = stranger.name.clone();
    let first = nonce(&mut random);
    let nobody = EngineId(random.number());
    let wrong = Message::Call { nonce: first, target: nobody, door: mine.clone() };
    assert_eq!(refused(&mut stranger, &wrong), Refusal::Elsewhere);
    let target = host.engine.address().engine();
    stranger.tell(host, to, &Message::Call { nonce: first, target, door: mine.clone() });
    let heard = stranger.hear(host, patience()).expect("a challenge");
    let Ok(Message::Challenge(nonces)) = Message::decode(&heard) else { panic!("{heard:?}") };
    let garbage = Message::Prove { nonces, door: mine, proof, claim: &claim[..claim.len() / 2] };
    assert_eq!(refused(&mut stranger, &garbage), Refusal::Malformed);
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
        stranger.heard.clear();
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
    let mut friend = Friend::new(case, host);
    let mut random = case.random();
    for round in 0..12_u64 {
        let mut stranger = Stranger::open(case);
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
        assert!(start.elapsed() < Duration::from_secs(3), "{error}: {:?}", start.elapsed());
        stop.store(true, Ordering::Relaxed);
        answering.join().expect("no panic");
        assert_eq!(host.engine.peers(), [friend.peer], "round {round}");
        friend.is_served(case, host);
    }
}

/// Somebody has recorded how a peer connected, and says it all again when that peer has a new connection.
fn a_recorded_handshake(case: &Case, key: Option<&str>) {
    let me = Me::new(case, key, Duration::from_secs(10));
    let host = &me.host;
    let mut stranger = Stranger::open(case);
    let to = stranger.meet(&me.door());
    let mut other = case.bare_agent("recorded");
    other.build(&Setup { key: key.map(str::to_owned), ..case.setup(1) });
    // It calls by way of the stranger, who passes all on.
    let detour = stranger.as_engine(host.engine.address().engine()).to_string();
    other.post(Ask::Peer { address: detour });
    let mut recorded = Vec::new();
    while host.engine.peers().is_empty() {
        let heard = stranger.hear(host, patience()).expect("a call, or what is proven");
        assert!(stranger.say(host, to, &heard));
        recorded.push(heard);
        host.linger(Duration::from_millis(10));
    }
    let Say::Peer(_) = other.answer(Some(host)) else { panic!("not connected") };
    host.engine.remove_peer(host.engine.peers()[0]);
    let none = host.until(patience(), || host.engine.peers().is_empty().then_some(()));
    assert!(none.is_some(), "{:?}", host.engine.peers());

    let replay = |stranger: &mut Stranger| {
        for message in &recorded {
            stranger.say(host, to, message);
            host.linger(Duration::from_millis(20));
        }
        stranger.heard.clear();
    };
    // Nobody connects by a recording,
    replay(&mut stranger);
    assert_eq!(host.engine.peers(), [], "connected by a recording");
    // and it does not disturb who really is there.
    other.peer(host, host.engine.address());
    let peer = host.engine.peers()[0];
    replay(&mut stranger);
    assert_eq!(host.engine.peers(), [peer], "lost by a recording");
    assert_eq!(host.engine.peer_state(peer), Some(PeerState::Up));
    let back = only_peer(host, &mut other);
    let tag = host.engine.counter().expect("a counter");
    let ask = Ask::Imm { peer: plain(back), tag: tag.tag().bits(), writes: 1 };
    assert_eq!(other.ask(host, ask), Say::Text("Done".into()));
    host.count(&tag, 1, patience()).expect("its");
}
