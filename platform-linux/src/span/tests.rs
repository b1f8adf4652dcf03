//! What each side is told, and what is heard of it: with two providers that write down what they are asked.

use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use immwire_core::id::EngineId;
use immwire_core::mailbox::Geometry;
use immwire_core::plan::PageRun;
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire_core::span::{FAR_NICS_MAX, HOST_BYTES, narrow_hello, widen_hello};
use immwire_core::wire::NicAddr;

use super::*;
use crate::provider::{Memory, NicLimits, Place, RegisterError, Registered, RevokeError};
use crate::sync::lock;

const ENGINE: EngineId = EngineId(9);
const HERE: Host = Host([1; HOST_BYTES]);
const THERE: Host = Host([2; HOST_BYTES]);
const RECEIPT: &[u8] = b"receipt";

/// A side that moves nothing.
#[derive(Debug)]
struct Noted {
    kind: ProviderKind,
    nics: Vec<NicInfo>,
    memory: Arc<NotedMemory>,
    /// What it was asked for.
    asked: Vec<String>,
    /// What it reports at the next poll.
    news: Vec<News>,
    fd: OwnedFd,
    is_idle: bool,
}

#[derive(Debug, Clone)]
enum News {
    Done(NicIndex),
    Immediate(NicIndex, PeerId),
    Incoming(Hello),
    Connected(PeerId, Hello),
    NicLost(NicIndex),
    Broken(Path),
    Restored(Path),
    Undelivered(WorkRequest),
}

impl Noted {
    fn new(kind: ProviderKind, nics: u8, first_key: u64) -> Self {
        let limits = NicLimits {
            max_message_bytes: 1 << 20,
            min_piece_bytes: 1,
            queue_depth: 8,
            inline_bytes: 0,
            max_sge: 1,
            batch_bytes: 1 << 20,
            together: 1,
            pages_per_piece: 1,
        };
        let nic = |nic| NicInfo { name: format!("{kind}{nic}"), speed_gbps: 100, limits };
        let (calls, writing) = (Arc::default(), AtomicU32::new(0));
        let memory = Arc::new(NotedMemory { nics, first_key, calls, writing, behind: 0 });
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        let nics = (0..nics).map(nic).collect();
        Self { kind, nics, memory, asked: Vec::new(), news: Vec::new(), fd, is_idle: true }
    }

    fn note(&mut self, what: String) {
        self.asked.push(what);
    }
}

#[derive(Debug)]
struct NotedMemory {
    nics: u8,
    first_key: u64,
    /// Of both sides, in order.
    calls: Arc<Mutex<Vec<String>>>,
    /// So many revocations come too early.
    writing: AtomicU32,
    /// Bytes behind each mailbox.
    behind: usize,
}

impl NotedMemory {
    fn note(&self, what: &str, region: &Registered) {
        let keys = (region.local.keys.as_slice(), region.desc.keys.as_slice());
        let (id, generation) = (region.id, region.desc.generation);
        lock(&self.calls).push(format!("{what} {id} {generation} {keys:?}"));
    }

    fn region(&self, ptr: NonNull<u8>, len: usize, place: Place) -> Registered {
        let nics = u64::from(self.nics);
        let keys = |first: u64| Keys::new(&(first..first + nics).collect::<Vec<_>>()).unwrap();
        let (base, bytes, rights) = (ptr.as_ptr() as u64, len as u64, Rights::REMOTE_WRITE);
        let generation = u32::try_from(self.first_key).unwrap();
        let local = LocalMr { base, len: bytes, generation, keys: keys(self.first_key) };
        let desc = MrDesc {
            owner: ENGINE,
            base,
            len: bytes,
            generation,
            rights,
            keys: keys(self.first_key + 50),
        };
        Registered { ptr, len, local, desc, id: generation + 7, place }
    }
}

impl Memory for NotedMemory {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        Ok(self.region(NonNull::dangling(), bytes, Place::Host))
    }

    fn alloc_mailbox(&self, bytes: usize, _: &NetAddr) -> Result<Registered, RegisterError> {
        Ok(self.region(NonNull::dangling(), bytes + self.behind, Place::Host))
    }

    fn alloc_gpu(&self, ordinal: u32, bytes: usize) -> Result<Registered, RegisterError> {
        Ok(self.region(NonNull::dangling(), bytes, Place::Gpu(ordinal)))
    }

    unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        _: Rights,
    ) -> Result<Registered, RegisterError> {
        // The far one's NICs do not reach six bytes, and it takes no odd length.
        if self.first_key == 200 && len == 6 {
            let (nics, why) = (String::new(), String::new());
            return Err(RegisterError::NotDirect { nics, ordinal: 1, why });
        }
        if self.first_key == 200 && len % 2 == 1 {
            return Err(RegisterError::Empty);
        }
        Ok(self.region(ptr, len, Place::Host))
    }

    fn revoke(&self, region: &Registered, _: Duration) -> Result<(), RevokeError> {
        self.note("revoke", region);
        let fewer = |left: u32| left.checked_sub(1);
        match self.writing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer) {
            Ok(_) => Err(RevokeError { peer: peer(0) }),
            Err(_) => Ok(()),
        }
    }

    fn release(&self, region: Registered) {
        self.note("release", &region);
    }
}

impl Provider for Noted {
    type Memory = NotedMemory;

    fn nics(&self) -> &[NicInfo] {
        &self.nics
    }

    fn memory(&self) -> &Arc<NotedMemory> {
        &self.memory
    }

    fn address(&self) -> NetAddr {
        let address = [3; 16].into_iter().collect();
        let nics = vec![NicAddr { speed_gbps: 100, address }; self.nics.len()];
        NetAddr::new(self.kind, ENGINE, &nics).unwrap()
    }

    const AT_ONCE_BYTES: u64 = 2;

    fn write_at_once(&mut self, nic: NicIndex, piece: &Piece) -> bool {
        self.note(format!("write {nic} {} {}", piece.remote_nic, piece.len));
        piece.len < 3
    }

    fn post<S: Sink>(&mut self, nic: NicIndex, work: &[WorkRequest], _: &mut S) -> usize {
        for work in work {
            self.note(format!("post {nic} {} {} {}", work.nic, work.remote_nic, work.len));
        }
        // No more than 40 in all.
        work.len().min(40_usize.saturating_sub(self.asked.len() - work.len()))
    }

    fn poll<S: Sink>(&mut self, _: Time, sink: &mut S) -> bool {
        let news = std::mem::take(&mut self.news);
        for news in &news {
            match news.clone() {
                News::Done(nic) => sink.work_done(nic, Token::from_bits(0), Ok(())),
                News::Immediate(nic, peer) => sink.immediate(nic, peer, 5),
                News::Incoming(hello) => {
                    let answer = sink.incoming(&hello);
                    let said = answer.map(|(peer, hello)| (peer.index, hello.address.nics().len()));
                    self.note(format!("answered {said:?}"));
                }
                News::Connected(peer, hello) => sink.connected(peer, &hello),
                News::NicLost(nic) => sink.nic_changed(nic, false),
                News::Broken(path) => sink.path_broken(peer(0), path),
                News::Restored(path) => sink.path_restored(peer(0), path),
                News::Undelivered(work) => sink.undelivered(&work),
            }
        }
        !news.is_empty()
    }

    fn connect(
        &mut self,
        _: Time,
        peer: PeerId,
        address: &NetAddr,
        hello: &Hello,
    ) -> Result<(), ConnectError> {
        let (to, from) = (address.provider(), hello.address.provider());
        let keys = hello.mailbox.keys.as_slice();
        self.note(format!("connect {} {to} {} {from} {keys:?}", peer.index, address.nics().len()));
        Ok(())
    }

    fn disconnect<S: Sink>(&mut self, peer: PeerId, _: &mut S) {
        self.note(format!("disconnect {}", peer.index));
    }

    fn abort<S: Sink>(&mut self, peer: PeerId, _: &mut S) {
        self.note(format!("abort {}", peer.index));
    }

    fn fence<S: Sink>(
        &mut self,
        peer: PeerId,
        path: RemotePath,
        _: &mut S,
    ) -> Result<Receipt, Unfenced> {
        self.note(format!("fence {} {} {}", peer.index, path.from, path.to));
        Ok(Receipt(RECEIPT.iter().copied().collect()))
    }

    fn settle<S: Sink>(
        &mut self,
        peer: PeerId,
        path: Path,
        receipt: &Receipt,
        _: &mut S,
    ) -> Result<(), Unfenced> {
        assert_eq!(receipt.0, RECEIPT);
        self.note(format!("settle {} {} {}", peer.index, path.nic, path.remote_nic));
        Ok(())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn arm(&mut self) -> bool {
        self.note("arm".to_owned());
        self.is_idle
    }

    fn disarm(&mut self) {
        self.note("disarm".to_owned());
    }
}

/// What an engine is told.
#[derive(Default)]
struct Heard {
    all: Vec<String>,
    /// Who the next caller becomes.
    next: u16,
}

impl Sink for Heard {
    fn work_done(&mut self, nic: NicIndex, _: Token, outcome: Result<(), WorkError>) {
        self.all.push(format!("done {nic} {outcome:?}"));
    }

    fn immediate(&mut self, nic: NicIndex, peer: PeerId, imm: u32) {
        self.all.push(format!("immediate {nic} {} {imm}", peer.index));
    }

    fn incoming(&mut self, hello: &Hello) -> Result<(PeerId, Hello), Refusal> {
        let speeds: Vec<_> = hello.address.nics().iter().map(|nic| nic.speed_gbps).collect();
        self.all.push(format!("incoming {} {speeds:?}", hello.address.provider()));
        Ok((peer(self.next), hello_of(&spanning(1, HERE).address())))
    }

    fn connected(&mut self, peer: PeerId, hello: &Hello) {
        self.all.push(format!("connected {} {}", peer.index, hello.address.provider()));
    }

    fn disconnected(&mut self, peer: PeerId, reason: DownReason) {
        self.all.push(format!("disconnected {} {reason}", peer.index));
    }

    fn nic_changed(&mut self, nic: NicIndex, healthy: bool) {
        self.all.push(format!("nic {nic} {healthy}"));
    }

    fn path_broken(&mut self, _: PeerId, path: Path) {
        self.all.push(format!("broken {} {}", path.nic, path.remote_nic));
    }

    fn path_restored(&mut self, _: PeerId, path: Path) {
        self.all.push(format!("restored {} {}", path.nic, path.remote_nic));
    }

    fn undelivered(&mut self, work: &WorkRequest) {
        self.all.push(format!("undelivered {} {}", work.nic, work.remote_nic));
    }

    fn page_run(&self, _: &WorkRequest, _: &mut [u32], _: &mut [u32]) -> Option<RunLayout> {
        None
    }

    fn has_more(&self, _: NicIndex) -> bool {
        false
    }
}

fn peer(index: u16) -> PeerId {
    PeerId { index, generation: 3 }
}

fn spanning(far_nics: u8, host: Host) -> Span<Noted, Noted> {
    let near = Noted::new(ProviderKind::Shm, 1, 100);
    let far = Noted::new(ProviderKind::Verbs, far_nics, 200);
    Span::new(near, far, &host).unwrap()
}

fn hello_of(address: &NetAddr) -> Hello {
    let keys: Vec<u64> = (40..).take(address.nics().len()).collect();
    let mailbox = MrDesc {
        owner: address.engine(),
        base: 4096,
        len: 1 << 20,
        generation: 1,
        rights: Rights::REMOTE_WRITE,
        keys: Keys::new(&keys).unwrap(),
    };
    let geometry = Geometry::new(1, 64).unwrap();
    Hello { address: address.clone(), mailbox, geometry, heartbeat_ms: 9, call: 2 }
}

fn work(nic: NicIndex, remote_nic: NicIndex, len: u64) -> WorkRequest {
    WorkRequest {
        token: Token::from_bits(0),
        nic,
        remote_nic,
        peer: peer(0),
        src: 0,
        src_key: 0,
        dst: 0,
        dst_key: 0,
        len,
        run: PageRun::NONE,
        imm: None,
    }
}

#[test]
fn there_are_one_to_seven_far_nics() {
    for nics in 1..=8 {
        let far = Noted::new(ProviderKind::Verbs, nics, 200);
        let made = Span::new(Noted::new(ProviderKind::Shm, 1, 100), far, &HERE);
        assert_eq!(made.is_ok(), usize::from(nics) <= FAR_NICS_MAX);
        if let Ok(made) = made {
            assert_eq!(
                (made.nics().len(), made.nics()[0].name.as_str()),
                (1 + usize::from(nics), "shm0")
            );
        }
    }
    let other = Noted::new(ProviderKind::Nvlink, 1, 200);
    let made = Span::new(Noted::new(ProviderKind::Shm, 1, 100), other, &HERE);
    assert!(matches!(made, Err(SpanBuildError::Sides(SpanError::Kinds { .. }))));
}

/// A peer of this host is called on the one side, another on the other, each as that side sees it; what is asked about
/// either goes there, and nothing does about one that is gone.
#[test]
fn each_peer_is_one_sides() {
    let (mut span, mut heard) = (spanning(2, HERE), Heard::default());
    let hello = hello_of(&span.address());
    for (index, host) in [(0, HERE), (1, THERE)] {
        let address = spanning(3, host).address();
        let speeds: Vec<_> = span.nics_at(&address).iter().map(|nic| nic.speed).collect();
        assert_eq!(speeds, if index == 0 { [100, 0, 0, 0] } else { [0, 100, 100, 100] });
        span.connect(Time::ZERO, peer(index), &address, &hello).unwrap();
    }
    assert_eq!(span.near.asked, ["connect 0 shm 1 shm [40]"]);
    assert_eq!(span.far.asked, ["connect 1 verbs 3 verbs [41, 42]"]);
    let plain = Noted::new(ProviderKind::Verbs, 1, 1).address();
    let refused = span.connect(Time::ZERO, peer(2), &plain, &hello);
    assert!(matches!(refused, Err(ConnectError::OtherProvider { .. })), "{refused:?}");
    for index in 0..3 {
        span.abort(peer(index), &mut heard);
        let (fenced, settled) = (
            span.fence(peer(index), RemotePath { from: 2, to: 1 }, &mut heard),
            span.settle(
                peer(index),
                Path { nic: 1, remote_nic: 2 },
                &Receipt(RECEIPT.iter().copied().collect()),
                &mut heard,
            ),
        );
        // No path of the near side's leads there.
        assert_eq!((fenced.is_ok(), settled.is_ok()), (index == 1, index == 1));
        assert!(span.fence(peer(index), RemotePath { from: 0, to: 1 }, &mut heard).is_err());
        span.disconnect(peer(index), &mut heard);
        span.disconnect(peer(index), &mut heard);
        span.abort(peer(index), &mut heard);
    }
    assert_eq!(span.near.asked[1..], ["abort 0", "disconnect 0"]);
    assert_eq!(span.far.asked[1..], ["abort 1", "fence 1 1 0", "settle 1 0 1", "disconnect 1"]);
}

/// Each piece goes to the side of its NIC, as that counts them, in order and up to what it takes.
#[test]
fn pieces_go_to_the_side_of_their_nic() {
    let (mut span, mut heard) = (spanning(2, HERE), Heard::default());
    assert_eq!(span.post(0, &[work(0, 0, 1)], &mut heard), 1);
    assert_eq!(span.near.asked, ["post 0 0 0 1"]);
    let many: Vec<_> = (0..50).map(|len| work(2, 1, len)).collect();
    assert_eq!(span.post(2, &many, &mut heard), 40);
    assert_eq!(
        (span.far.asked[0].as_str(), span.far.asked[39].as_str()),
        ("post 1 1 0 0", "post 1 1 0 39")
    );
    // At once, to this host only.
    let piece = |remote_nic, len| {
        let (peer, run, imm) = (peer(0), PageRun::NONE, None);
        Piece { peer, remote_nic, src: 0, src_key: 0, dst: 0, dst_key: 0, len, run, imm }
    };
    assert!(span.write_at_once(0, &piece(0, 2)) && !span.write_at_once(0, &piece(0, 3)));
    assert!(!span.write_at_once(2, &piece(1, 2)));
    assert_eq!(
        (&span.near.asked[1..], span.far.asked.len()),
        (&["write 0 0 2".into(), "write 0 0 3".into()][..], 50)
    );
    // A piece for a NIC of the other side's goes nowhere; those around it do.
    span.far.asked.clear();
    let mixed = [work(1, 1, 5), work(1, 0, 6), work(1, 2, 7)];
    assert_eq!(span.post(1, &mixed, &mut heard), 3);
    assert_eq!(span.far.asked, ["post 0 0 0 5", "post 0 0 1 7"]);
    assert_eq!(heard.all, ["done 1 Err(RemoteAccess)"]);
}

#[test]
fn what_a_side_reports_has_the_engines_numbers() {
    let (mut span, mut heard) = (spanning(2, HERE), Heard::default());
    let path = |nic, remote_nic| Path { nic, remote_nic };
    let news = |nic| {
        vec![
            News::Done(nic),
            News::Immediate(nic, peer(4)),
            News::NicLost(nic),
            News::Broken(path(nic, 0)),
            News::Restored(path(nic, 0)),
            News::Undelivered(work(nic, 0, 1)),
        ]
    };
    (span.near.news, span.far.news) = (news(0), news(1));
    assert!(span.poll(Time::ZERO, &mut heard) && !span.poll(Time::ZERO, &mut heard));
    let said = |nic: u8, far: u8| {
        [
            format!("done {nic} Ok(())"),
            format!("immediate {nic} 4 5"),
            format!("nic {nic} false"),
            format!("broken {nic} {far}"),
            format!("restored {nic} {far}"),
            format!("undelivered {nic} {far}"),
        ]
    };
    assert_eq!(heard.all, [said(0, 0), said(2, 1)].concat());
}

/// An engine that is called, or has called, on one side is refused on the other; so is what no engine of our kind says.
#[test]
fn a_call_on_the_wrong_side_is_refused() {
    let (mut span, mut heard) = (spanning(2, HERE), Heard::default());
    let hello = hello_of(&span.address());
    let address = spanning(1, HERE).address();
    let call = hello_of(&Noted::new(ProviderKind::Verbs, 2, 1).address());
    let wrong = hello_of(&Noted::new(ProviderKind::Shm, 1, 1).address());
    span.connect(Time::ZERO, peer(0), &address, &hello).unwrap();
    span.far.news = vec![News::Incoming(wrong.clone()), News::Incoming(call.clone())];
    assert!(span.poll(Time::ZERO, &mut heard));
    assert_eq!(span.far.asked, ["answered Err(Malformed)", "answered Err(Malformed)"]);
    assert_eq!(heard.all, [""; 0]);
    // Once it is gone, it may be anywhere.
    span.disconnect(peer(0), &mut heard);
    span.far.news = vec![News::Incoming(call.clone())];
    span.poll(Time::ZERO, &mut heard);
    assert_eq!(heard.all, ["incoming shm-verbs [0, 100, 100]"]);
    assert_eq!(span.far.asked.last().unwrap(), "answered Ok((0, 1))");
    span.near.news = vec![News::Incoming(wrong)];
    span.poll(Time::ZERO, &mut heard);
    assert_eq!(span.near.asked.last().unwrap(), "answered Err(Malformed)");
    span.disconnect(peer(0), &mut heard);
    // And an answer that none gives ends the call.
    heard.all.clear();
    span.connect(Time::ZERO, peer(1), &address, &hello).unwrap();
    span.near.news = vec![News::Connected(peer(1), call)];
    span.poll(Time::ZERO, &mut heard);
    assert_eq!(heard.all, [format!("disconnected 1 {}", DownReason::Protocol)]);
    assert_eq!(span.near.asked.last().unwrap(), "disconnect 1");
    assert!(span.sides.get(peer(1)).is_none());
}

#[test]
fn an_engine_sleeps_when_both_sides_do() {
    let mut span = spanning(1, HERE);
    for (near, far, asked) in [
        (true, true, [vec!["arm"], vec!["arm"]]),
        (false, true, [vec!["arm"], vec![]]),
        (true, false, [vec!["arm", "disarm"], vec!["arm"]]),
    ] {
        (span.near.is_idle, span.far.is_idle) = (near, far);
        assert_eq!(span.arm(), near && far);
        assert_eq!(
            [std::mem::take(&mut span.near.asked), std::mem::take(&mut span.far.asked)],
            asked
        );
    }
    let readable = |span: &Span<Noted, Noted>| {
        let mut fds =
            [rustix::event::PollFd::from_borrowed_fd(span.fd(), rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).unwrap() == 1
    };
    for fd in [&span.near.fd, &span.far.fd] {
        assert!(!readable(&span));
        rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
        assert!(readable(&span));
        rustix::io::read(fd, &mut [0_u8; 8]).unwrap();
    }
}

/// Each side gets back exactly what it gave, whatever lies between: the far one first, since the near one may have made
/// the memory; and is asked until nobody writes there.
#[test]
fn a_region_is_registered_with_both_sides() {
    const NEAR: &str = "107 100 ([100], [150])";
    const FAR: &str = "207 200 ([200, 201], [250, 251])";
    let calls = Arc::default();
    let side = |kind, nics, first_key| {
        let mut side = Noted::new(kind, nics, first_key);
        let (calls, writing) = (Arc::clone(&calls), AtomicU32::new(0));
        side.memory = Arc::new(NotedMemory { nics, first_key, calls, writing, behind: 0 });
        side
    };
    let (near, far) = (side(ProviderKind::Shm, 1, 100), side(ProviderKind::Verbs, 2, 200));
    let span = Span::new(near, far, &HERE).unwrap();
    let memory = Arc::clone(span.memory());
    let log = || std::mem::take(&mut *lock(&calls));
    let region = memory.alloc(8).unwrap();
    assert_eq!(region.local.keys.as_slice(), [100, 200, 201]);
    assert_eq!(region.desc.keys.as_slice(), [150, 250, 251]);
    // Somebody near writes, then somebody far, and once more.
    for (near, far, tries) in [(1, 0, 1), (0, 3, 1), (0, 0, 0)] {
        span.near.memory.writing.store(near, Ordering::Relaxed);
        span.far.memory.writing.store(far, Ordering::Relaxed);
        for _ in 0..tries {
            assert!(memory.revoke(&region, Duration::ZERO).is_err());
        }
        log();
        assert!(memory.revoke(&region, Duration::ZERO).is_ok());
        let revoked = [FAR, NEAR, FAR].map(|region| format!("revoke {region}"));
        assert_eq!(log(), revoked, "far peers are told first");
    }
    memory.release(region);
    assert_eq!(log(), [format!("release {FAR}"), format!("release {NEAR}")]);
    // A GPU's as well, or the near side's alone, if NICs do not reach it.
    let region = memory.alloc_gpu(1, 8).unwrap();
    assert_eq!((region.place, region.desc.keys.as_slice()), (Place::Gpu(1), &[150, 250, 251][..]));
    memory.revoke(&region, Duration::ZERO).unwrap();
    memory.release(region);
    log();
    let region = memory.alloc_gpu(1, 6).unwrap();
    assert_eq!((region.place, region.desc.keys.as_slice()), (Place::Gpu(1), &[150][..]));
    memory.revoke(&region, Duration::ZERO).unwrap();
    memory.release(region);
    assert_eq!(log(), [format!("revoke {NEAR}"), format!("release {NEAR}")]);
    // What the far side does not take for any other reason, or of the host's, the near one gives back.
    for region in [memory.alloc(7), memory.alloc_gpu(1, 7), memory.alloc(6)] {
        assert!(region.is_err());
        let undone = ["revoke", "release"].map(|what| format!("{what} {NEAR}"));
        assert_eq!(lock(&calls).drain(..2).collect::<Vec<_>>(), undone);
    }
    assert!(lock(&memory.far_names).is_empty());
}

/// A mailbox for a peer on this host is the near side's, as all memory is; for one on another host it is the far side's, which may have put more
/// behind it, and takes it back last. It is known of a peer where it is, whether we call it or it has called.
#[test]
fn a_mailbox_is_made_by_the_side_that_leads_to_the_peer() {
    const NEAR: &str = "107 100 ([100], [150])";
    const FAR: &str = "207 200 ([200, 201], [250, 251])";
    let calls = Arc::default();
    let side = |kind, nics, first_key, behind| {
        let mut side = Noted::new(kind, nics, first_key);
        let (calls, writing) = (Arc::clone(&calls), AtomicU32::new(0));
        side.memory = Arc::new(NotedMemory { nics, first_key, calls, writing, behind });
        side
    };
    let span = |host| {
        let near = side(ProviderKind::Shm, 1, 100, 0);
        Span::new(near, side(ProviderKind::Verbs, 2, 200, 64), &host).unwrap()
    };
    let (ours, there) = (span(HERE), span(THERE));
    let log = || std::mem::take(&mut *lock(&calls));
    let heard = |from: &Span<Noted, Noted>, side| {
        let said = narrow_hello(&hello_of(&from.address()), side).unwrap();
        widen_hello(from.address().provider(), &said, side).unwrap().address
    };
    let memory = ours.memory();
    for (peer, is_far) in [
        (span(HERE).address(), false),
        (heard(&there, Side::Near), false),
        (there.address(), true),
        (heard(&there, Side::Far), true),
    ] {
        let region = memory.alloc_mailbox(8, &peer).unwrap();
        assert_eq!(region.local.keys.as_slice(), [100, 200, 201]);
        assert_eq!(region.desc.keys.as_slice(), [150, 250, 251]);
        assert_eq!(region.len, if is_far { 72 } else { 8 });
        memory.revoke(&region, Duration::ZERO).unwrap();
        assert_eq!(log(), [FAR, NEAR, FAR].map(|region| format!("revoke {region}")));
        memory.release(region);
        let order = if is_far { [NEAR, FAR] } else { [FAR, NEAR] };
        assert_eq!(log(), order.map(|region| format!("release {region}")));
    }
    assert!(lock(&memory.far_names).is_empty());
}

/// The far side is polled each time while there is something to do with it, and now and then otherwise; and as soon as it
/// is given something.
#[test]
fn a_quiet_far_side_is_looked_at_now_and_then() {
    let start = Instant::now();
    let mut pace = Pace::new(start);
    let (mut at, mut polls) = (start, 0);
    let step = Duration::from_nanos(100);
    let until = |end: Duration, at: &mut Instant, pace: &mut Pace, heard: bool| {
        let mut polls = 0;
        while *at < start + end {
            if pace.is_due(*at) {
                pace.polled(*at, heard);
                polls += 1;
            }
            *at += step;
        }
        polls
    };
    polls += until(STIRRED_FOR, &mut at, &mut pace, false);
    assert_eq!(polls, 500, "each time at first");
    assert_eq!(until(STIRRED_FOR * 2, &mut at, &mut pace, false), 10, "then once in 5 us");
    pace.given = true;
    assert!(pace.is_due(at));
    assert_eq!(until(STIRRED_FOR * 3, &mut at, &mut pace, false), 500, "and each time again");
    assert_eq!(until(STIRRED_FOR * 5, &mut at, &mut pace, true), 1 + 20 * 50 - 50 + 49);
}
