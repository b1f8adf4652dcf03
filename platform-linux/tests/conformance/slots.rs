//! Landing slots and ends of the staging pool, over a transport that does as it is told.
//!
//! Knows of no network: what was posted, how it ended and what the peer says is the test's to choose.

use std::fs::File;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use immwire::core::group::{Token, WorkError, WorkRequest};
use immwire::core::id::{EngineId, NicIndex, PeerId, Time};
use immwire::core::mailbox::Geometry;
use immwire::core::plan::{PageRun, RunLayout};
use immwire::core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire::core::staging::{
    LANDING_SLOTS, NOTE_BYTES, Note, SLOT_BYTES, Signal, SlotIndex, StagedKey, TAIL_BYTES, Verdict,
};
use immwire::core::wire::{Hello, NetAddr, NicAddr, ProviderKind, Refusal};
use immwire::provider::{
    ConnectError, Memory, NicInfo, NicLimits, Path, Place, Provider, RegisterError, Registered,
    RevokeError, Sink,
};
use immwire::staging::Staged;
use immwire::{DownReason, Staging};

use crate::gpus::refuse;
use crate::host::patience;
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[
    ("slots_come_back_after_errors", Spread::Once, slots_come_back_after_errors),
    ("slots_in_doubt_are_not_reused", Spread::Once, slots_in_doubt_are_not_reused),
    ("what_cannot_be_is_passed_on", Spread::Once, what_cannot_be_is_passed_on),
];

const PIECE: u64 = 64;

/// Host memory as it is.
#[derive(Debug)]
struct Plain(Mutex<u32>);

impl Memory for Plain {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        let memory = Box::leak(vec![0_u8; bytes].into_boxed_slice());
        // SAFETY: never freed.
        unsafe { self.register(NonNull::from(memory).cast(), bytes, Rights::REMOTE_WRITE) }
    }

    unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Registered, RegisterError> {
        let mut last = self.0.lock().expect("no panic");
        *last += 1;
        let (id, base) = (*last, ptr.as_ptr() as u64);
        let keys = Keys::new(&[id.into()]).expect("one NIC");
        let local = LocalMr { base, len: len as u64, generation: id, keys };
        let (owner, len_64) = (EngineId(1), len as u64);
        let desc = MrDesc { owner, base, len: len_64, generation: id, rights, keys };
        Ok(Registered { ptr, len, local, desc, id, place: Place::Host })
    }

    fn revoke(&self, _: &Registered, _: Duration) -> Result<(), RevokeError> {
        Ok(())
    }

    fn release(&self, _: Registered) {}
}

/// What is told at the next poll.
enum Tell {
    Hello(Box<Hello>),
    Ended(WorkRequest, Result<(), WorkError>),
    Undelivered(WorkRequest),
    Imm(PeerId, u32),
}

#[derive(Default)]
struct Script {
    room: usize,
    posted: Vec<WorkRequest>,
    tell: Vec<Tell>,
    disconnected: Vec<PeerId>,
}

struct Inner {
    nics: Vec<NicInfo>,
    memory: Arc<Plain>,
    script: Arc<Mutex<Script>>,
    fd: File,
}

impl Provider for Inner {
    type Memory = Plain;

    fn nics(&self) -> &[NicInfo] {
        &self.nics
    }

    fn memory(&self) -> &Arc<Plain> {
        &self.memory
    }

    fn address(&self) -> NetAddr {
        address(1)
    }

    fn post<S: Sink>(&mut self, _: NicIndex, work: &[WorkRequest], _: &mut S) -> usize {
        let mut script = self.script.lock().expect("no panic");
        let taken = script.room.min(work.len());
        script.posted.extend(&work[..taken]);
        taken
    }

    fn poll<S: Sink>(&mut self, _: Time, sink: &mut S) -> bool {
        let tell = std::mem::take(&mut self.script.lock().expect("no panic").tell);
        for one in tell {
            match one {
                Tell::Hello(hello) => {
                    sink.incoming(&hello).expect("it is let in");
                }
                Tell::Ended(work, outcome) => sink.work_done(work.nic, work.token, outcome),
                Tell::Undelivered(work) => sink.undelivered(&work),
                Tell::Imm(peer, imm) => sink.immediate(0, peer, imm),
            }
        }
        true
    }

    fn connect(&mut self, _: Time, _: PeerId, _: &NetAddr, _: &Hello) -> Result<(), ConnectError> {
        Ok(())
    }

    fn disconnect<S: Sink>(&mut self, peer: PeerId, _: &mut S) {
        self.script.lock().expect("no panic").disconnected.push(peer);
    }

    /// Nothing is under way but what the test ends.
    fn abort<S: Sink>(&mut self, _: PeerId, _: &mut S) {}

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}
}

fn address(engine: u64) -> NetAddr {
    let nic = NicAddr { speed_gbps: 1, address: heapless::Vec::new() };
    NetAddr::new(ProviderKind::Sim, EngineId(engine), &[nic]).expect("one NIC")
}

/// What is reported.
#[derive(Default)]
struct Seen {
    ended: Vec<(Token, Result<(), WorkError>)>,
    immediates: Vec<(PeerId, u32)>,
    disconnected: Vec<PeerId>,
    /// Who comes in next, and what it is answered.
    next: Option<(PeerId, Hello)>,
}

impl Sink for Seen {
    fn work_done(&mut self, _: NicIndex, token: Token, outcome: Result<(), WorkError>) {
        self.ended.push((token, outcome));
    }

    fn immediate(&mut self, _: NicIndex, peer: PeerId, imm: u32) {
        self.immediates.push((peer, imm));
    }

    fn incoming(&mut self, _: &Hello) -> Result<(PeerId, Hello), Refusal> {
        self.next.take().ok_or(Refusal::Busy)
    }

    fn connected(&mut self, _: PeerId, _: &Hello) {}

    fn disconnected(&mut self, peer: PeerId, _: DownReason) {
        self.disconnected.push(peer);
    }

    fn nic_changed(&mut self, _: NicIndex, _: bool) {}

    fn path_broken(&mut self, _: PeerId, _: Path) {}

    fn path_restored(&mut self, _: PeerId, _: Path) {}

    fn undelivered(&mut self, _: &WorkRequest) {}

    fn page_run(&self, _: &WorkRequest, _: &mut [u32], _: &mut [u32]) -> Option<RunLayout> {
        None
    }

    fn has_more(&self, _: NicIndex) -> bool {
        false
    }
}

/// An engine's staging, and a peer of it.
struct World {
    staged: Staged<Inner>,
    script: Arc<Mutex<Script>>,
    seen: Seen,
    geometry: Geometry,
    /// Ours, with the slots behind, for the peer to write to.
    mailbox: Option<NonNull<u8>>,
    peer: PeerId,
    source: Registered,
    gpu: Registered,
    tokens: u64,
}

impl World {
    fn new() -> Self {
        let limits = NicLimits {
            max_message_bytes: 1 << 30,
            min_piece_bytes: 1,
            queue_depth: 512,
            inline_bytes: 0,
            max_sge: 1,
            batch_bytes: 1 << 20,
            together: 1,
            pages_per_piece: 1,
        };
        let nics = vec![NicInfo { name: "none".to_owned(), speed_gbps: 1, limits }];
        let script = Arc::new(Mutex::new(Script { room: usize::MAX, ..Script::default() }));
        let (memory, fd) = (Arc::new(Plain(Mutex::default())), File::open("/dev/null"));
        let inner = Inner { nics, memory, script: Arc::clone(&script), fd: fd.expect("null") };
        let geometry = Geometry::new(2, 128).expect("a mailbox");
        let staged = Staged::new(inner, Staging::default(), &[0], NonZeroU32::MIN, geometry);
        let staged = staged.expect("staging");
        let source = staged.memory().alloc(4096).expect("memory");
        let gpu = staged.memory().alloc_gpu(0, 4096).expect("memory of GPU 0");
        let peer = PeerId { index: 0, generation: 0 };
        let seen = Seen::default();
        let (mailbox, tokens) = (None, 0);
        let mut world = Self { staged, script, seen, geometry, mailbox, peer, source, gpu, tokens };
        world.session();
        world
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().expect("no panic")
    }

    fn poll(&mut self) {
        self.staged.poll(Time::ZERO, &mut self.seen);
    }

    fn tell(&mut self, tell: impl IntoIterator<Item = Tell>) {
        self.script().tell.extend(tell);
        self.poll();
    }

    /// The peer, or the next one in its place, comes in.
    fn session(&mut self) {
        self.peer.generation += 1;
        let bytes = usize::try_from(self.geometry.bytes()).expect("small");
        let mailbox = self.staged.memory().alloc_mailbox(bytes, &address(2)).expect("an area");
        self.mailbox = Some(mailbox.ptr);
        let hello = |engine: u64, mailbox| Hello {
            address: address(engine),
            mailbox,
            geometry: self.geometry,
            heartbeat_ms: 1000,
            call: 1,
        };
        self.seen.next = Some((self.peer, hello(1, mailbox.desc)));
        let theirs = MrDesc {
            owner: EngineId(2),
            base: 1 << 20,
            len: self.geometry.bytes() + TAIL_BYTES,
            generation: 1,
            rights: Rights::REMOTE_WRITE,
            keys: Keys::new(&[77]).expect("one NIC"),
        };
        let hello = Box::new(hello(2, theirs));
        self.tell([Tell::Hello(hello)]);
        assert!(self.seen.next.is_none());
    }

    /// Posts a piece to a GPU of the peer's, from the host's memory or a GPU's; `None`: it is not taken.
    fn post(&mut self, from: &LocalMr) -> Option<Token> {
        self.tokens += 1;
        let token = Token::from_bits(self.tokens);
        let work = WorkRequest {
            token,
            nic: 0,
            remote_nic: 0,
            peer: self.peer,
            src: from.base,
            src_key: from.keys.get(0).expect("a key"),
            dst: 1 << 30,
            dst_key: StagedKey::new(5, 1).expect("a key").bits(),
            len: PIECE,
            run: PageRun::NONE,
            imm: None,
        };
        let taken = self.staged.post(0, &[work], &mut self.seen);
        (taken == 1).then_some(token)
    }

    /// Posts one from host memory, which is written to this slot.
    fn written(&mut self) -> (Token, WorkRequest, SlotIndex) {
        let from = self.source.local;
        let token = self.post(&from).expect("it is taken");
        let work = self.script().posted.pop().expect("it is posted");
        (token, work, slot_of(&work))
    }

    /// The peer writes a note to a slot of ours, and says so.
    fn lands(&mut self, slot: SlotIndex, note: Note) -> u32 {
        let behind = self.geometry.bytes() + u64::from(slot) * SLOT_BYTES;
        let to = self.mailbox.expect("a session").as_ptr();
        let to = to.wrapping_add(usize::try_from(behind).expect("small"));
        // SAFETY: the slot is in the area that the mailbox begins, which is there as long as the staging; nobody reads it before it is told.
        unsafe { to.cast::<[u8; NOTE_BYTES]>().write(note.to_bytes()) };
        let bits = Signal::Landed(slot).encode().bits();
        self.tell([Tell::Imm(self.peer, bits)]);
        bits
    }

    fn returns(&self, slot: SlotIndex, verdict: Verdict) -> Tell {
        Tell::Imm(self.peer, Signal::Returned(slot, verdict).encode().bits())
    }

    /// How a piece ended, which has.
    fn end(&mut self, token: Token) -> Result<(), WorkError> {
        let ended = std::mem::take(&mut self.seen.ended);
        assert_eq!(ended.iter().map(|end| end.0).collect::<Vec<_>>(), [token]);
        ended[0].1
    }

    /// The slots that can be had, all at a time; they are given back.
    fn slots(&mut self) -> Vec<SlotIndex> {
        let from = self.source.local;
        let mut tokens = Vec::new();
        while let Some(token) = self.post(&from) {
            tokens.push(token);
        }
        let posted = std::mem::take(&mut self.script().posted);
        let mut slots: Vec<_> = posted.iter().map(slot_of).collect();
        for (work, slot) in posted.into_iter().zip(slots.clone()) {
            let back = self.returns(slot, Verdict::Done);
            self.tell([Tell::Ended(work, Ok(())), back]);
        }
        let ended = std::mem::take(&mut self.seen.ended);
        assert_eq!(ended.len(), tokens.len());
        assert!(ended.iter().all(|end| end.1.is_ok() && tokens.contains(&end.0)));
        slots.sort_unstable();
        slots
    }
}

fn slot_of(work: &WorkRequest) -> SlotIndex {
    match work.imm.and_then(|imm| Signal::decode(imm.bits())) {
        Some(Signal::Landed(slot)) => slot,
        other => panic!("{other:?}"),
    }
}

fn all() -> Vec<SlotIndex> {
    (0..LANDING_SLOTS).collect()
}

/// However a piece fails, its landing slot is there for the next one once it is back, or was never written to.
fn slots_come_back_after_errors(_: &Case) {
    let mut world = World::new();
    assert_eq!(world.slots(), all());
    for _ in 0..2 * LANDING_SLOTS {
        for (verdict, error) in
            [(Verdict::Refused, WorkError::RemoteAccess), (Verdict::Failed, WorkError::Device(0))]
        {
            // Written, then back.
            let (token, work, slot) = world.written();
            let back = world.returns(slot, verdict);
            world.tell([Tell::Ended(work, Ok(())), back]);
            assert_eq!(world.end(token), Err(error));
            // Back before it is known to be written, or as if it were not.
            for outcome in [Ok(()), Err(WorkError::Device(5))] {
                let (token, work, slot) = world.written();
                let back = world.returns(slot, verdict);
                world.tell([back, Tell::Ended(work, outcome)]);
                assert_eq!(world.end(token), Err(error));
            }
            // It failed, and arrived all the same.
            let (token, work, slot) = world.written();
            world.tell([Tell::Ended(work, Err(WorkError::Device(5)))]);
            assert_eq!(world.end(token), Err(WorkError::Device(5)));
            let back = world.returns(slot, verdict);
            world.tell([back]);
        }
        // It was lost with a path, and is written again.
        let (token, work, slot) = world.written();
        world.tell([Tell::Undelivered(work)]);
        let again = world.script().posted.pop().expect("it is posted again");
        assert_eq!(slot_of(&again), slot);
        let back = world.returns(slot, Verdict::Refused);
        world.tell([Tell::Ended(again, Ok(())), back]);
        assert_eq!(world.end(token), Err(WorkError::RemoteAccess));
        // It is given up where the receiver has it, which says so later.
        let (token, work, slot) = world.written();
        world.tell([Tell::Ended(work, Ok(()))]);
        world.staged.abort(world.peer, &mut world.seen);
        assert_eq!(world.end(token), Err(WorkError::Flushed));
        let back = world.returns(slot, Verdict::Done);
        world.tell([back]);
        // It is given up before there was room for it.
        world.script().room = 0;
        let from = world.source.local;
        let token = world.post(&from).expect("it is taken");
        world.staged.abort(world.peer, &mut world.seen);
        assert_eq!(world.end(token), Err(WorkError::Flushed));
        world.script().room = usize::MAX;
        world.poll();
        // The driver does not copy its source.
        assert!(refuse(1), "only the stand-in for the driver can be made to refuse");
        let from = world.gpu.local;
        let token = world.post(&from).expect("it is taken");
        refuse(0);
        let start = std::time::Instant::now();
        while world.seen.ended.is_empty() && start.elapsed() < patience() {
            world.poll();
        }
        assert!(matches!(world.end(token), Err(WorkError::Device(_))));
        assert!(world.script().posted.is_empty());
        assert_eq!(world.slots(), all());
    }
    assert!(world.seen.immediates.is_empty(), "nothing of it is against the rules");
}

/// A slot to which a write has failed, and which has not come back, is not written to. When no other is left, pieces fail, and do not
/// wait for what may never come. It ends with the session.
fn slots_in_doubt_are_not_reused(_: &Case) {
    let mut world = World::new();
    let mut left = all();
    let mut doubted = Vec::new();
    while !left.is_empty() {
        let (token, work, slot) = world.written();
        world.tell([Tell::Ended(work, Err(WorkError::Device(5)))]);
        assert_eq!(world.end(token), Err(WorkError::Device(5)));
        left.retain(|other| *other != slot);
        doubted.push(slot);
        if !left.is_empty() {
            assert_eq!(world.slots(), left);
        }
    }
    let from = world.source.local;
    for _ in 0..3 {
        let token = world.post(&from).expect("it does not wait");
        assert_eq!(world.end(token), Err(WorkError::Flushed));
    }
    while let Some(slot) = doubted.pop() {
        let back = world.returns(slot, Verdict::Done);
        world.tell([back]);
        left.push(slot);
        left.sort_unstable();
        assert_eq!(world.slots(), left);
    }
    // Another session has slots of its own.
    let (token, work, _) = world.written();
    world.tell([Tell::Ended(work, Err(WorkError::Device(5)))]);
    assert_eq!(world.end(token), Err(WorkError::Device(5)));
    assert_eq!(world.slots().len(), all().len() - 1);
    world.staged.disconnect(world.peer, &mut world.seen);
    world.session();
    assert_eq!(world.slots(), all());
}

/// A signal that cannot be is passed on as it is, once, and nothing else is done: the connection ends when whoever drives the
/// transport says so, and what is in flight is reported by then or later, but by nobody else.
fn what_cannot_be_is_passed_on(_: &Case) {
    let mut world = World::new();
    let (token, work, slot) = world.written();
    let lies = [
        // Nothing lies there.
        Signal::Landed(3),
        // It was not taken.
        Signal::Returned((slot + 1) % LANDING_SLOTS, Verdict::Done),
    ];
    for lie in lies {
        let bits = lie.encode().bits();
        world.tell([Tell::Imm(world.peer, bits)]);
        assert_eq!(std::mem::take(&mut world.seen.immediates), [(world.peer, bits)]);
    }
    // To a region that there is not: it is given back, refused, to the NIC that the note names; where the peer has none, nothing is.
    let key = StagedKey::new(5, 1).expect("a key");
    let note = Note { nic: 0, key, dst: 1 << 30, len: 64, imm: None };
    world.lands(1, note);
    let back = world.script().posted.pop().expect("it is posted");
    let refused = Signal::Returned(1, Verdict::Refused).encode();
    assert_eq!((back.remote_nic, back.imm), (0, Some(refused)));
    world.tell([Tell::Ended(back, Ok(()))]);
    for (slot, nic) in [(2, 1), (3, 7), (4, 200)] {
        let bits = world.lands(slot, Note { nic, ..note });
        assert_eq!(std::mem::take(&mut world.seen.immediates), [(world.peer, bits)]);
        assert!(world.script().posted.is_empty(), "to NIC {nic}");
    }
    world.poll();
    assert!(world.seen.ended.is_empty(), "{:?}", world.seen.ended);
    assert!(world.seen.disconnected.is_empty() && world.script().disconnected.is_empty());
    world.staged.disconnect(world.peer, &mut world.seen);
    assert_eq!(world.script().disconnected, [world.peer]);
    assert!(world.seen.ended.is_empty(), "the transport still has it");
    world.tell([Tell::Ended(work, Err(WorkError::PeerGone))]);
    assert_eq!(world.end(token), Err(WorkError::PeerGone));
    assert!(world.seen.disconnected.is_empty(), "whoever disconnects is not told");
}
