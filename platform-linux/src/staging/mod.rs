//! GPUs' memory over NICs that do not reach it: a provider around another, whose pieces from and to such memory go by way of
//! pinned host memory at both ends.
//!
//! What a piece, its slots and its ends are is decided in [`immwire_core::staging`]; here slots are filled and emptied by GPUs,
//! and writes handed to the inner transport, which goes on seeing host memory alone. All else is passed on as it is.
//!
//! # Invariants
//!
//! - A piece holds one slot of ours from when it is taken until it is reported, and is one write of the inner transport's.
//! - Of the room in a NIC's queue some is kept back from the core, so that slots can be returned when transfers
//!   fill the rest. A peer that takes nothing holds a quarter of either at most.
//! - `disconnected` is passed on after the last piece of that peer was reported, though a GPU may still be reading its source
//!   when the connection is gone.
//! - Nobody is disconnected here. A signal that cannot be is passed on as it is: whoever drives us refuses it, as it does where
//!   nobody stages, and has what is in flight end before the connection.
//! - A landing slot is given out again when it came back, or was never written to. Whose write failed is in doubt until then; when
//!   all are, pieces that need one fail.
//! - Paths that break are not settled: who had something in a landing slot could not be told whether it was counted.

mod copies;
mod memory;

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::num::NonZeroU32;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use immwire_core::group::{Token, WorkError, WorkRequest};
use immwire_core::id::{MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::imm::Imm;
use immwire_core::mailbox::Geometry;
use immwire_core::nic::NicState;
use immwire_core::peer::DownReason;
use immwire_core::plan::{PageRun, RunLayout};
use immwire_core::region::{MrDesc, Rights};
use immwire_core::staging::{
    Grants, LANDING_SLOTS, Landings, Leaves, Misuse, NOTE_BYTES, Need, Next, NoNote, Note,
    PIECE_BYTES, Piece, Signal, SlotIndex, StagedKey, Verdict, slot_offset,
};
use immwire_core::wire::{Hello, NetAddr, Refusal};

use self::copies::{Copies, Range, Way};
pub use self::memory::StagedMemory;
use self::memory::{Opened, Staging as Shared};
use crate::closer::Closer;
use crate::gpus::{CLOSED_WITHIN, Known, OpenError};
use crate::provider::{
    ConnectError, Memory, NicInfo, Path, Provider, Receipt, RegisterError, Registered, RemotePath,
    Sink, Unfenced,
};

/// Host memory that GPUs' memory goes by way of, where NICs do not reach it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Staging {
    /// Bytes to be pinned. Half of them are for what this engine writes, 64 KiB for each piece under way; half for what it is
    /// written: each peer takes 2 MiB and its mailbox (512 KiB, unless `Builder::mailbox` says otherwise).
    pub bytes: u64,
}

impl Default for Staging {
    /// 64 MiB: enough for 12 peers.
    fn default() -> Self {
        Self { bytes: 64 << 20 }
    }
}

/// Why an engine cannot stage.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum StagingError {
    /// It is GPUs' memory that is staged.
    #[error(
        "staging is for GPUs' memory, and the engine has no GPU: name some, or do not ask for it"
    )]
    NoGpus,
    /// Over shared memory GPUs copy by themselves.
    #[error(
        "staging is for NICs: choose libfabric or libibverbs as transport, or do not ask for it"
    )]
    NoNics,
    /// The pool is too small.
    #[error("a staging pool of {bytes} bytes has no room for a peer: give it {least} at least")]
    TooSmall {
        /// What was given.
        bytes: u64,
        /// What one peer needs.
        least: u64,
    },
    /// The pool cannot be pinned.
    #[error("{bytes} bytes for staging cannot be pinned: {source}")]
    Pool {
        /// How many.
        bytes: u64,
        /// What the driver answers.
        source: immwire_cuda::Error,
    },
    /// The NICs do not take the pool.
    #[error("the staging pool cannot be registered: {0}")]
    Register(#[source] RegisterError),
    /// A GPU cannot be used.
    #[error("GPU {ordinal} cannot be used for staging: {source}")]
    Gpu {
        /// Its number in this process.
        ordinal: u32,
        /// What the driver answers.
        source: immwire_cuda::Error,
    },
    /// Copies cannot be made.
    #[error("copies for staging cannot be made: {0}")]
    Copies(#[source] immwire_cuda::Error),
}

/// What the tokens of our own writes are of: transfers that there cannot be, as an engine has 60,064 at most.
const PIECES: u16 = u16::MAX - 1;
const RETURNS: u16 = u16::MAX - 2;

fn piece_token(index: u16) -> Token {
    Token::from_bits(u64::from(PIECES) << 48 | u64::from(index))
}

fn return_token(peer: PeerId) -> Token {
    let peer = u64::from(peer.index) << 32 | u64::from(peer.generation);
    Token::from_bits(u64::from(RETURNS) << 48 | peer)
}

/// Whose a token is.
enum Whose {
    Core,
    Piece(u16),
    Return(PeerId),
}

#[expect(clippy::cast_possible_truncation, reason = "the fields are cut out of the word")]
fn whose(token: Token) -> Whose {
    let bits = token.bits();
    match (bits >> 48) as u16 {
        PIECES => Whose::Piece(bits as u16),
        RETURNS => Whose::Return(PeerId { index: (bits >> 32) as u16, generation: bits as u32 }),
        _ => Whose::Core,
    }
}

/// How much of a NIC's queue the core does not hear of: for slots that are returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reserve {
    all: u16,
    each_peer: u16,
}

impl Reserve {
    fn of(depth: u16) -> Self {
        let all = (depth / 8).clamp(1, 64).min(depth.saturating_sub(1));
        Self { all, each_peer: (all / 4).max(1) }
    }
}

/// What is known of a peer's landing slots.
#[derive(Debug, Clone, Copy)]
struct Theirs {
    mailbox: MrDesc,
    geometry: Geometry,
}

/// A connection, as far as staging goes.
#[derive(Debug)]
struct Session {
    peer: PeerId,
    /// Where it lands here.
    area: Option<Opened>,
    theirs: Option<Theirs>,
    grants: Grants,
    /// By slot of the peer's: the piece that it was taken for.
    taken: [Option<u16>; LANDING_SLOTS as usize],
    landings: Landings,
    /// By slot of ours: the way back, from our NIC to the peer's.
    ways: [(NicIndex, NicIndex); LANDING_SLOTS as usize],
    /// Outgoing slots that it holds, and returns in flight.
    held: u16,
    returning: u16,
}

/// A piece under way.
#[derive(Debug)]
struct Flight {
    work: WorkRequest,
    piece: Piece,
}

/// A copy under way.
#[derive(Debug)]
enum Job {
    Out(u16),
    In(Arrival),
}

/// A landed piece that is copied to its place.
#[derive(Debug)]
struct Arrival {
    peer: PeerId,
    nic: NicIndex,
    slot: SlotIndex,
    imm: Option<Imm>,
    region: u16,
    area: u16,
}

/// The provider. See the [module](self).
#[derive(Debug)]
pub struct Staged<P: Provider> {
    /// First: when it is gone, nothing reads or writes slots any more but GPUs.
    inner: P,
    _source: Source<P::Memory>,
    nics: Vec<NicInfo>,
    memory: Arc<StagedMemory<P::Memory>>,
    copies: ManuallyDrop<Copies<Job>>,
    desk: Desk,
}

/// Outgoing slots, as the inner transport has them registered.
#[derive(Debug)]
struct Source<M: Memory> {
    memory: Arc<M>,
    registered: Option<Registered>,
}

impl<M: Memory> Drop for Source<M> {
    fn drop(&mut self) {
        // No peer writes there.
        if let Some(registered) = self.registered.take()
            && self.memory.revoke(&registered, Duration::ZERO).is_ok()
        {
            self.memory.release(registered);
        }
    }
}

/// Pieces, slots and sessions: all but what moves bytes.
#[derive(Debug)]
struct Desk {
    shared: Arc<Shared>,
    /// By outgoing slot.
    flights: Box<[Option<Flight>]>,
    free: Vec<u16>,
    each_peer: u16,
    /// Local keys of the outgoing slots.
    keys: [u64; MAX_NICS],
    sessions: Vec<Option<Session>>,
    /// To be posted; some may have ended since.
    ready: VecDeque<u16>,
    /// Peers to whom slots are to be returned.
    owing: VecDeque<PeerId>,
    reserve: Reserve,
    returning: u16,
    /// Connections that are gone, and of which something is still to be reported.
    down: Vec<(PeerId, DownReason)>,
}

impl<P: Provider> Staged<P> {
    /// Puts staging around a provider, for engines whose mailboxes are divided so.
    ///
    /// # Errors
    ///
    /// [`StagingError`].
    pub fn new(
        inner: P,
        staging: Staging,
        gpus: &[u32],
        sms: NonZeroU32,
        geometry: Geometry,
    ) -> Result<Self, StagingError> {
        let closer = Arc::new(Closer::new(gpus));
        Self::beside(inner, staging, (gpus, closer), sms, geometry)
    }

    /// As [`Staged::new`], for an engine that gives GPUs' things back by this closer.
    pub(crate) fn beside(
        inner: P,
        staging: Staging,
        (gpus, closer): (&[u32], Arc<Closer>),
        sms: NonZeroU32,
        geometry: Geometry,
    ) -> Result<Self, StagingError> {
        let known = Known::beside(gpus, closer).map_err(|error| match error {
            // The inner transport was given the same, and has refused such lists.
            OpenError::Names => StagingError::NoGpus,
            OpenError::Gpu { ordinal, source } => StagingError::Gpu { ordinal, source },
        })?;
        let known = known.ok_or(StagingError::NoGpus)?;
        let (engine, nics) = (inner.address().engine(), inner.nics().len());
        let from_zero = inner.memory().counts_from_zero();
        let own = (engine, nics, from_zero);
        let shared = Shared::new(own, Arc::clone(&known), staging.bytes, geometry)?;
        let (slots, landing) = (shared.slots(), shared.landing_slots());
        let copies = Copies::new(&known, sms, (usize::from(slots), landing));
        let copies = copies.map_err(StagingError::Copies)?;
        let shared = Arc::new(shared);
        let (base, bytes) = shared.outgoing().ok_or(StagingError::NoGpus)?;
        // SAFETY: the pool outlives this registration, which ends with `Source`, before `Desk` and with it `shared` goes.
        let source = unsafe { inner.memory().register(base, bytes, Rights::LOCAL) };
        let source = source.map_err(StagingError::Register)?;
        let mut keys = [0; MAX_NICS];
        for (key, of_nic) in keys.iter_mut().zip(source.local.keys.as_slice()) {
            *key = *of_nic;
        }
        let depth = inner.nics().iter().map(|nic| nic.limits.queue_depth).min().unwrap_or(1);
        let reserve = Reserve::of(depth);
        let limited = inner.nics().iter().cloned().map(|mut nic| {
            nic.limits.queue_depth = nic.limits.queue_depth.saturating_sub(reserve.all).max(1);
            nic.limits.max_message_bytes = nic.limits.max_message_bytes.min(PIECE_BYTES);
            // A slot holds one range.
            nic.limits.pages_per_piece = 1;
            nic
        });
        let desk = Desk {
            flights: (0..slots).map(|_| None).collect(),
            free: (0..slots).rev().collect(),
            each_peer: (slots / 4).max(1),
            keys,
            sessions: Vec::new(),
            ready: VecDeque::with_capacity(2 * usize::from(slots)),
            owing: VecDeque::with_capacity(landing),
            reserve,
            returning: 0,
            down: Vec::new(),
            shared: Arc::clone(&shared),
        };
        let nics = limited.collect();
        let memory = StagedMemory { inner: Arc::clone(inner.memory()), staging: shared };
        let (memory, source) = (Arc::new(memory), Some(source));
        let copies = ManuallyDrop::new(copies);
        let source = Source { memory: Arc::clone(inner.memory()), registered: source };
        Ok(Self { inner, _source: source, nics, memory, copies, desk })
    }

    /// Does something with the inner transport, which reports to `sink` through us.
    fn on<S: Sink, T>(
        &mut self,
        sink: &mut S,
        what: impl FnOnce(&mut P, &mut Through<'_, S>) -> T,
    ) -> T {
        let mut through = Through { sink, desk: &mut self.desk, copies: &mut self.copies };
        what(&mut self.inner, &mut through)
    }

    /// Posts what is ready, and returns slots, as far as there is room. Returns whether anything was posted.
    fn flush<S: Sink>(&mut self, sink: &mut S) -> bool {
        let mut any = false;
        for _ in 0..self.desk.ready.len() {
            let Some(index) = self.desk.ready.pop_front() else { break };
            let Some(work) = self.desk.hand_over(index) else { continue };
            match self.on(sink, |inner, to| inner.post(work.nic, &[work], to)) {
                0 => self.desk.unposted(index, sink),
                _ => any = true,
            }
        }
        for _ in 0..self.desk.owing.len() {
            let Some(peer) = self.desk.owing.pop_front() else { break };
            while let Some(work) = self.desk.next_return(peer) {
                if self.on(sink, |inner, to| inner.post(work.nic, &[work], to)) == 0 {
                    self.desk.unsaid(&work);
                    break;
                }
                any = true;
            }
            self.desk.still_owes(peer);
        }
        any
    }

    /// Reports copies that are over.
    fn poll_copies<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool {
        let desk = &mut self.desk;
        self.copies.poll(now, &mut |job, outcome| match job {
            Job::Out(index) => desk.advance(index, |piece| piece.copied(outcome), sink),
            Job::In(arrival) => desk.arrived(&arrival, outcome, sink),
        })
    }
}

impl Desk {
    fn session(&mut self, peer: PeerId) -> Option<&mut Session> {
        let session = self.sessions.get_mut(usize::from(peer.index))?.as_mut();
        session.filter(|session| session.peer == peer)
    }

    /// A connection begins, or is called from both ends: our mailbox for it, and what is known of its.
    fn open(&mut self, peer: PeerId, mailbox: &MrDesc, theirs: Option<Theirs>) {
        if let Some(session) = self.session(peer) {
            session.theirs = theirs.or(session.theirs);
            return;
        }
        let at = usize::from(peer.index);
        if self.sessions.len() <= at {
            self.sessions.resize_with(at + 1, || None);
        }
        let area = self.shared.area_of(mailbox);
        if let Some(place) = self.sessions.get_mut(at) {
            *place = Some(Session {
                peer,
                area,
                theirs,
                grants: Grants::default(),
                taken: [None; LANDING_SLOTS as usize],
                landings: Landings::default(),
                ways: [(0, 0); LANDING_SLOTS as usize],
                held: 0,
                returning: 0,
            });
        }
    }

    fn forget(&mut self, peer: PeerId) {
        if self.session(peer).is_some()
            && let Some(place) = self.sessions.get_mut(usize::from(peer.index))
        {
            *place = None;
        }
    }

    /// Goes on with a piece.
    fn advance<S: Sink>(
        &mut self,
        index: u16,
        step: impl FnOnce(&mut Piece) -> Next,
        sink: &mut S,
    ) {
        let flight = self.flights.get_mut(usize::from(index)).and_then(Option::as_mut);
        let Some(flight) = flight else { return };
        let next = step(&mut flight.piece);
        self.follow(index, next, sink);
    }

    fn follow<S: Sink>(&mut self, index: u16, next: Next, sink: &mut S) {
        match next {
            Next::Wait => {}
            Next::Post => self.ready.push_back(index),
            Next::End(outcome) => self.end(index, outcome, sink),
        }
    }

    fn end<S: Sink>(&mut self, index: u16, outcome: Result<(), WorkError>, sink: &mut S) {
        let place = self.flights.get_mut(usize::from(index));
        let Some(Flight { work, piece }) = place.and_then(Option::take) else { return };
        self.free.push(index);
        if let Some(session) = self.session(work.peer) {
            session.held = session.held.saturating_sub(1);
            let slot = piece.slot();
            let taken = slot.and_then(|slot| session.taken.get_mut(usize::from(slot)));
            if let (Some(slot), Some(taken)) = (slot, taken)
                && *taken == Some(index)
            {
                *taken = None;
                match piece.leaves() {
                    Leaves::Unwritten => {
                        // It was taken for this piece.
                        let _ = session.grants.give(slot);
                    }
                    Leaves::Written => {}
                    Leaves::Doubtful => session.grants.doubt(slot),
                }
            }
        }
        sink.work_done(work.nic, work.token, outcome);
    }

    /// What the inner transport is to post for a piece; `None`: it is not to be posted any more.
    fn hand_over(&mut self, index: u16) -> Option<WorkRequest> {
        let flight = self.flights.get_mut(usize::from(index))?.as_mut()?;
        if !flight.piece.is_ready() {
            return None;
        }
        flight.piece.posted();
        let (work, slot) = (flight.work, flight.piece.slot());
        let src_key = self.keys.get(usize::from(work.nic)).copied().unwrap_or(0);
        let (note, token) = (self.shared.slot_at(index), piece_token(index));
        let Some(slot) = slot else {
            return Some(WorkRequest { token, src: note + NOTE_BYTES as u64, src_key, ..work });
        };
        let at = self.session(work.peer).and_then(|session| {
            let Theirs { mailbox, geometry } = session.theirs?;
            let key = mailbox.keys.get(work.remote_nic)?;
            Some((mailbox.base + slot_offset(&mailbox, geometry, slot)?, key))
        });
        // Of a connection that is gone: the inner transport says so.
        let (dst, dst_key) = at.unwrap_or((0, 0));
        let (len, imm) = (work.len + NOTE_BYTES as u64, Some(Signal::Landed(slot).encode()));
        Some(WorkRequest { token, src: note, src_key, dst, dst_key, len, imm, ..work })
    }

    fn unposted<S: Sink>(&mut self, index: u16, sink: &mut S) {
        self.advance(index, Piece::unposted, sink);
    }

    /// A slot that is to be returned to this peer, if there is room for another return.
    fn next_return(&mut self, peer: PeerId) -> Option<WorkRequest> {
        let (reserve, all) = (self.reserve, self.returning);
        let session = self.session(peer)?;
        let theirs = session.theirs?;
        if all >= reserve.all || session.returning >= reserve.each_peer {
            return None;
        }
        let (slot, verdict) = session.landings.give_back()?;
        let (nic, remote_nic) = session.ways.get(usize::from(slot)).copied()?;
        session.returning += 1;
        self.returning += 1;
        Some(WorkRequest {
            token: return_token(peer),
            nic,
            remote_nic,
            peer,
            src: 0,
            src_key: 0,
            dst: theirs.mailbox.base,
            dst_key: theirs.mailbox.keys.get(remote_nic).unwrap_or(0),
            len: 0,
            run: PageRun::NONE,
            imm: Some(Signal::Returned(slot, verdict).encode()),
        })
    }

    fn return_ended(&mut self, peer: PeerId) {
        self.returning = self.returning.saturating_sub(1);
        if let Some(session) = self.session(peer) {
            session.returning = session.returning.saturating_sub(1);
            self.still_owes(peer);
        }
    }

    /// A return that did not go.
    fn unsaid(&mut self, work: &WorkRequest) {
        self.return_ended(work.peer);
        let signal = work.imm.and_then(|imm| Signal::decode(imm.bits()));
        if let (Some(session), Some(Signal::Returned(slot, verdict))) =
            (self.session(work.peer), signal)
        {
            // It was vacant, and nobody was told so.
            let _ = session.landings.unsaid(slot, verdict);
            self.still_owes(work.peer);
        }
    }

    fn still_owes(&mut self, peer: PeerId) {
        let owes = self.session(peer).is_some_and(|session| session.landings.owes());
        if owes && !self.owing.contains(&peer) {
            self.owing.push_back(peer);
        }
    }

    /// A slot of a peer's came back.
    fn returned<S: Sink>(
        &mut self,
        peer: PeerId,
        slot: SlotIndex,
        verdict: Verdict,
        sink: &mut S,
    ) -> Result<(), Broken> {
        let Some(session) = self.session(peer) else { return Ok(()) };
        let taken = session.taken.get(usize::from(slot)).copied().flatten();
        let flight = taken.and_then(|index| self.flights.get_mut(usize::from(index)));
        let next = match (taken, flight.and_then(Option::as_mut)) {
            (Some(index), Some(flight)) => Some((index, flight.piece.returned(slot, verdict)?)),
            // Its piece has ended before, as failed; or it was not taken.
            _ => None,
        };
        let Some(session) = self.session(peer) else { return Ok(()) };
        session.grants.give(slot)?;
        if let Some(taken) = session.taken.get_mut(usize::from(slot)) {
            *taken = None;
        }
        if let Some((index, next)) = next {
            self.follow(index, next, sink);
        }
        Ok(())
    }

    /// What was copied out of a landing slot is at its place, or not.
    fn arrived<S: Sink>(
        &mut self,
        arrival: &Arrival,
        outcome: Result<(), WorkError>,
        sink: &mut S,
    ) {
        let Arrival { peer, nic, slot, imm, region, area } = *arrival;
        self.shared.leave(region, area);
        let Some(session) = self.session(peer) else { return };
        let verdict = if outcome.is_ok() { Verdict::Done } else { Verdict::Failed };
        // It was being copied.
        let _ = session.landings.over(slot, verdict);
        if let (Some(imm), Ok(())) = (imm, outcome) {
            sink.immediate(nic, peer, imm.bits());
        }
        self.still_owes(peer);
    }

    /// Ends a peer's pieces, as far as nothing is under way for them.
    fn stop<S: Sink>(&mut self, peer: PeerId, error: WorkError, sink: &mut S) {
        for index in 0..self.shared.slots() {
            let flight = self.flights.get(usize::from(index)).and_then(Option::as_ref);
            if flight.is_some_and(|flight| flight.work.peer == peer) {
                self.advance(index, |piece| piece.stop(error), sink);
            }
        }
    }

    /// A connection is gone: that is told when all of it was reported.
    fn lost<S: Sink>(&mut self, peer: PeerId, reason: DownReason, sink: &mut S) {
        self.stop(peer, WorkError::PeerGone, sink);
        self.forget(peer);
        self.down.push((peer, reason));
        self.tell_lost(sink);
    }

    #[cold]
    fn tell_lost<S: Sink>(&mut self, sink: &mut S) {
        let flights = &self.flights;
        self.down.retain(|(peer, reason)| {
            let mut left = flights.iter().flatten();
            let waits = left.any(|flight| flight.work.peer == *peer);
            if !waits {
                sink.disconnected(*peer, *reason);
            }
            waits
        });
    }
}

/// What became of a piece that was to be staged.
enum Taken {
    Yes,
    NoRoom,
    Refused(WorkError),
}

fn is_staged(work: &WorkRequest) -> bool {
    Need::of(work) >= Need::Slot
}

/// What a peer says cannot be.
struct Broken;

impl From<Misuse> for Broken {
    fn from(_: Misuse) -> Self {
        Self
    }
}

impl From<NoNote> for Broken {
    fn from(_: NoNote) -> Self {
        Self
    }
}

impl Desk {
    /// Takes a piece, fills its slot or has a GPU fill it.
    fn take(&mut self, work: &WorkRequest, copies: &mut Copies<Job>) -> Taken {
        let (from, to) = (StagedKey::of(work.src_key), StagedKey::of(work.dst_key));
        let gpu = match from.map(|key| self.shared.source(key)) {
            Some(None) => return Taken::Refused(WorkError::LocalAccess),
            Some(Some(gpu)) => Some(gpu),
            None => None,
        };
        let Ok(len) = u32::try_from(work.len) else {
            return Taken::Refused(WorkError::LocalAccess);
        };
        if work.len > PIECE_BYTES {
            return Taken::Refused(WorkError::LocalAccess);
        }
        if gpu.is_some_and(|gpu| !copies.takes(gpu, Way::Out)) {
            return Taken::NoRoom;
        }
        let (each_peer, free) = (self.each_peer, self.free.last().copied());
        let Some(session) = self.session(work.peer) else {
            return Taken::Refused(WorkError::PeerGone);
        };
        let Some(index) = free.filter(|_| session.held < each_peer) else { return Taken::NoRoom };
        let mut slot = None;
        if to.is_some() {
            let Some(Theirs { mailbox, geometry }) = session.theirs else { return Taken::NoRoom };
            if slot_offset(&mailbox, geometry, 0).is_none() {
                // Who stages has them.
                return Taken::Refused(WorkError::RemoteAccess);
            }
            if session.grants.are_lost() {
                // None may ever come back.
                return Taken::Refused(WorkError::Flushed);
            }
            slot = session.grants.take();
            let taken = slot.and_then(|slot| session.taken.get_mut(usize::from(slot)));
            let Some(taken) = taken else { return Taken::NoRoom };
            *taken = Some(index);
        }
        session.held += 1;
        let _ = self.free.pop();
        let at = self.shared.slot_at(index);
        let payload = at + NOTE_BYTES as u64;
        if let Some(key) = to {
            let note = Note { nic: work.nic, key, dst: work.dst, len, imm: work.imm }.to_bytes();
            // SAFETY: the slot is in the pool, is the piece's alone, and nothing reads it yet.
            unsafe { std::ptr::copy_nonoverlapping(note.as_ptr(), at as *mut u8, NOTE_BYTES) };
        }
        let piece = if let Some(gpu) = gpu {
            let range = Range { from: work.src, to: payload, bytes: work.len };
            // SAFETY: the source is registered and stays so until the piece is reported (`Provider::post`), which is not before
            // the copy is; the slot is in the pool, pinned, and the piece's as long; that nobody writes the source is for callers
            // of the engine to see to.
            unsafe { copies.submit(gpu, Way::Out, range, Job::Out(index)) };
            Piece::copying(slot)
        } else {
            self.ready.push_back(index);
            // SAFETY: the source is `len` bytes of host memory, mapped until the piece is reported (`Provider::post`); the slot is as
            // long, and nothing else uses it.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    work.src as *const u8,
                    payload as *mut u8,
                    len as usize,
                );
            }
            Piece::ready(slot)
        };
        if let Some(place) = self.flights.get_mut(usize::from(index)) {
            *place = Some(Flight { work: *work, piece });
        }
        Taken::Yes
    }

    /// A piece lies in a landing slot of ours: it is copied to its place, if there is one.
    fn landed(
        &mut self,
        nic: NicIndex,
        peer: PeerId,
        slot: SlotIndex,
        copies: &mut Copies<Job>,
    ) -> Result<(), Broken> {
        let shared = Arc::clone(&self.shared);
        let Some(session) = self.session(peer) else { return Ok(()) };
        let area = session.area.ok_or(Broken)?;
        session.landings.landed(slot)?;
        let at = shared.landing_at(area.area, slot);
        // SAFETY: the slot lies in the pool, and bytes have no invalid values; the peer may be writing there, against the rules,
        // so it is read once, and no reference is formed.
        let bytes = unsafe { (at as *const [u8; NOTE_BYTES]).read_volatile() };
        let note = Note::from_bytes(&bytes)?;
        // To a NIC that it has not, the slot would never get back, and would be tried for ever.
        if session.theirs.is_some_and(|theirs| theirs.mailbox.keys.get(note.nic).is_none()) {
            return Err(Broken);
        }
        if let Some(way) = session.ways.get_mut(usize::from(slot)) {
            *way = (nic, note.nic);
        }
        let place = shared.enter(&note, area, peer);
        let copied = place.is_some_and(|place| {
            let (region, area) = (place.region, area.area);
            let job = Job::In(Arrival { peer, nic, slot, imm: note.imm, region, area });
            let bytes = u64::from(note.len);
            let range = Range { from: at + NOTE_BYTES as u64, to: place.address, bytes };
            // SAFETY: the destination lies in a region that was entered, and the source in an area that was: both stay until they
            // are left, which is when the copy is reported. That nobody else uses them meanwhile is for the peer and the callers
            // of the engine to see to; if they do not, the bytes are a mixture.
            let taken = unsafe { copies.submit(place.gpu, Way::In, range, job) };
            if !taken {
                shared.leave(region, area);
            }
            taken
        });
        if !copied {
            // It is being copied, as far as the slot knows.
            let _ = session.landings.over(slot, Verdict::Refused);
            self.still_owes(peer);
        }
        Ok(())
    }
}

impl<P: Provider> Provider for Staged<P> {
    type Memory = StagedMemory<P::Memory>;

    fn nics(&self) -> &[NicInfo] {
        &self.nics
    }

    fn memory(&self) -> &Arc<Self::Memory> {
        &self.memory
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

    /// By streams of ours, which nobody else's wait for.
    fn reads_gpus(&self, _: PeerId) -> bool {
        true
    }

    fn post<S: Sink>(&mut self, nic: NicIndex, work: &[WorkRequest], sink: &mut S) -> usize {
        let mut accepted = 0;
        while let Some(rest) = work.get(accepted..).filter(|rest| !rest.is_empty()) {
            let plain = rest.iter().position(is_staged).unwrap_or(rest.len());
            if let Some(plain) = rest.get(..plain).filter(|plain| !plain.is_empty()) {
                let taken = self.on(sink, |inner, to| inner.post(nic, plain, to));
                accepted += taken;
                if taken < plain.len() {
                    break;
                }
                continue;
            }
            let Some(piece) = rest.first() else { break };
            match self.desk.take(piece, &mut self.copies) {
                Taken::Yes => {}
                Taken::NoRoom => break,
                Taken::Refused(error) => sink.work_done(nic, piece.token, Err(error)),
            }
            accepted += 1;
        }
        self.flush(sink);
        accepted
    }

    fn poll<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool {
        let mut any = self.poll_copies(now, sink);
        any |= self.on(sink, |inner, to| inner.poll(now, to));
        any |= self.flush(sink);
        if !self.desk.down.is_empty() {
            self.desk.tell_lost(sink);
        }
        any
    }

    fn connect(
        &mut self,
        now: Time,
        peer: PeerId,
        address: &NetAddr,
        hello: &Hello,
    ) -> Result<(), ConnectError> {
        self.inner.connect(now, peer, address, hello)?;
        self.desk.open(peer, &hello.mailbox, None);
        Ok(())
    }

    fn quiesce(&mut self) {
        self.inner.quiesce();
    }

    fn disconnect<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        self.on(sink, |inner, to| inner.disconnect(peer, to));
        self.desk.stop(peer, WorkError::PeerGone, sink);
        self.desk.forget(peer);
        self.desk.down.retain(|(lost, _)| *lost != peer);
    }

    fn abort<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        self.on(sink, |inner, to| inner.abort(peer, to));
        self.desk.stop(peer, WorkError::Flushed, sink);
    }

    fn fence<S: Sink>(&mut self, _: PeerId, _: RemotePath, _: &mut S) -> Result<Receipt, Unfenced> {
        Err(Unfenced::Unknown)
    }

    fn settle<S: Sink>(
        &mut self,
        _: PeerId,
        _: Path,
        _: &Receipt,
        _: &mut S,
    ) -> Result<(), Unfenced> {
        Err(Unfenced::Unknown)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.inner.fd()
    }

    /// Nothing wakes anybody when a GPU has copied.
    fn arm(&mut self) -> bool {
        let desk = &self.desk;
        let idle = desk.ready.is_empty() && desk.owing.is_empty();
        idle && self.copies.is_idle() && self.inner.arm()
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }
}

impl<P: Provider> Drop for Staged<P> {
    /// Waits for copies that are under way. If a GPU is stuck, what it may still use stays, regions and areas in use, too.
    fn drop(&mut self) {
        // SAFETY: taken here alone; the field is not used after this, as `self` goes.
        let mut copies = unsafe { ManuallyDrop::take(&mut self.copies) };
        if copies.settle() {
            for job in copies.drain() {
                if let Job::In(Arrival { region, area, .. }) = job {
                    self.desk.shared.leave(region, area);
                }
            }
        }
        // By the closer, which waits for a driver that keeps its callers waiting; and waited for, so that it is not the closer who lets go
        // of the GPUs last, if it comes back.
        let known = Arc::clone(&self.desk.shared.known);
        known.closer.give(copies);
        known.closer.end(CLOSED_WITHIN);
    }
}

/// What the inner transport reports, as far as it is not ours.
struct Through<'a, S> {
    sink: &'a mut S,
    desk: &'a mut Desk,
    copies: &'a mut Copies<Job>,
}

impl<S: Sink> Sink for Through<'_, S> {
    #[inline]
    fn work_done(&mut self, nic: NicIndex, token: Token, outcome: Result<(), WorkError>) {
        match whose(token) {
            Whose::Core => self.sink.work_done(nic, token, outcome),
            Whose::Piece(index) => {
                self.desk.advance(index, |piece| piece.written(outcome), self.sink);
            }
            Whose::Return(peer) => self.desk.return_ended(peer),
        }
    }

    #[inline]
    fn immediate(&mut self, nic: NicIndex, peer: PeerId, imm: u32) {
        let done = match Signal::decode(imm) {
            None => return self.sink.immediate(nic, peer, imm),
            Some(Signal::Landed(slot)) => self.desk.landed(nic, peer, slot, self.copies),
            Some(Signal::Returned(slot, verdict)) => {
                self.desk.returned(peer, slot, verdict, self.sink)
            }
        };
        if let Err(Broken) = done {
            tracing::warn!(%peer, "a peer broke the rules of staging");
            self.sink.immediate(nic, peer, imm);
        }
    }

    fn incoming(&mut self, hello: &Hello) -> Result<(PeerId, Hello), Refusal> {
        let (peer, answer) = self.sink.incoming(hello)?;
        let theirs = Theirs { mailbox: hello.mailbox, geometry: hello.geometry };
        self.desk.open(peer, &answer.mailbox, Some(theirs));
        Ok((peer, answer))
    }

    fn connected(&mut self, peer: PeerId, hello: &Hello) {
        let theirs = Theirs { mailbox: hello.mailbox, geometry: hello.geometry };
        if let Some(session) = self.desk.session(peer) {
            session.theirs = Some(theirs);
        }
        self.sink.connected(peer, hello);
    }

    fn disconnected(&mut self, peer: PeerId, reason: DownReason) {
        self.desk.lost(peer, reason, self.sink);
    }

    fn nic_changed(&mut self, nic: NicIndex, healthy: bool) {
        self.sink.nic_changed(nic, healthy);
    }

    fn path_broken(&mut self, peer: PeerId, path: Path) {
        self.sink.path_broken(peer, path);
    }

    fn path_restored(&mut self, peer: PeerId, path: Path) {
        self.sink.path_restored(peer, path);
    }

    fn undelivered(&mut self, work: &WorkRequest) {
        match whose(work.token) {
            Whose::Core => self.sink.undelivered(work),
            Whose::Piece(index) => self.desk.unposted(index, self.sink),
            Whose::Return(_) => self.desk.unsaid(work),
        }
    }

    #[inline]
    fn page_run(&self, work: &WorkRequest, src: &mut [u32], dst: &mut [u32]) -> Option<RunLayout> {
        self.sink.page_run(work, src, dst)
    }

    #[inline]
    fn has_more(&self, nic: NicIndex) -> bool {
        self.sink.has_more(nic)
    }
}
