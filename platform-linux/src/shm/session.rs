//! One connection: the data path to one peer, and what the peer sends back.
//!
//! A piece ends in one of five ways: bytes copied by a GPU, if they come from or go to the memory of one; else, tried in
//! this order: copied straight into the peer's mapped region; copied there by the kernel; put into the bounce ring for the
//! peer to copy; refused. A piece
//! to a region that was never written before waits until the peer has answered what kind it is.
//!
//! # Invariants
//!
//! - A piece with an immediate starts only when its lane has room, so that what was written can be
//!   announced at once, and a piece that was not accepted has written nothing. Of what a GPU has copied, some may have to
//!   wait in `landed` for room.
//! - Bytes are written to a peer's region between `hazard::enter` and `hazard::leave` for its key only.
//!   `held` is the key entered; [`Session::settle`] leaves, and is called before control goes back to
//!   the engine.
//! - Every piece that was accepted is reported once: by [`Session::submit`], or from one of `waiting`,
//!   `landed` and the bounce writer's jobs, by [`Session::poll`] or [`Session::flush`].
//! - What the peer says is checked where it is used: positions by `lane` and `bounce`, a region's
//!   file by its seals and size, those of a GPU's allocations by the driver, their number and turn against what was asked for,
//!   addresses against the region's bounds. A lie costs the liar its session or its own bytes.
//! - Each question under way is one message of the peer's to come. What is asked on, as a region over several allocations
//!   has more files than go with one, takes the place of what was answered.
//! - Each question of the peer's is answered once. What cannot be for want of files or memory is `owed`, and answered when there
//!   is enough, or refused when that has lasted: a peer that was refused does not ask again.
//! - No driver is asked that keeps its callers waiting for a busy GPU. What needs it, of what the peer asks, is `owed` for as long; of what it
//!   answers, `kept`, with the files: the pieces that wait for it end in time, or not, as they would behind a busy GPU.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use immwire_core::group::{WorkError, WorkRequest};
use immwire_core::hazard::{self, NO_KEY};
use immwire_core::id::{NicIndex, PeerId, Time};
use immwire_core::imm::Imm;
use immwire_core::lane::{Consumer, LaneError, Producer};
use immwire_core::peer::DownReason;
use immwire_core::plan::Piece;
use rustix::io::Errno;

use super::bounce;
use super::copy::{bring, can_claim, can_demote, claim, copy, copy_short, demote, write_process};
use super::gpu::{Arriving, Copying, Handed, Kind, NotReached, Reached, Staging, received};
use super::handshake::{Answer, By, Message, Sizes};
use super::memory::{Granted, Link, ShmMemory, id_of};
use super::probe::Probe;
use super::segment::{LANE_ENTRIES, Mapping, REGIONS_MAX, Use, is_sealed};
use super::socket::{self, MESSAGE_MAX, is_lack};
use super::withdrawals::Seen;
use super::{ForeignPath, PIECE_MIN_BYTES};
use crate::gpus::Known;
use crate::provider::Sink;

/// The place of bytes that are not few.
const NOWHERE: u64 = 0;
/// Pieces that may wait for a peer to answer what a region is.
const WAITING_MAX: usize = 2048;
/// Questions about regions that may be under way: few enough that the answers fit the socket.
const ASKED_MAX: usize = 16;
/// What is owed to the peer is tried again so often, and refused after so long.
const OWED_PAUSE: Duration = Duration::from_millis(1);
pub(super) const OWED_PATIENCE: Duration = Duration::from_secs(10);
/// A session that ends is over then, though its peer is still in the middle of a bounced record. Longer than a page takes to come from a slow disk, or
/// a thread to have its turn on a crowded processor: a peer that is held up for longer is taken for stopped.
pub(super) const RECORD_PATIENCE: Duration = Duration::from_secs(1);
/// A piece that the peer reads soon after it was told, and is told where: well below what is copied past the caches.
const SHORT_BYTES: u64 = 4 << 10;
/// Entries of a lane that share a cache line. Not more are taken from one lane in one poll: whether the
/// next line holds any is a question to another core's cache, and what was taken should not wait for it.
const LINE_ENTRIES: u64 = 4;
/// Bounced records taken in one poll.
const RECORD_BATCH: usize = 4;
/// Waiting pieces tried in one poll.
const RETRY_BATCH: usize = 16;
/// A piece of this size or more is announced to a sleeping peer before the next one is copied.
const RING_EARLY_BYTES: u64 = 16 << 10;

/// The session cannot go on: the peer broke the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Broken;

impl From<LaneError> for Broken {
    fn from(_: LaneError) -> Self {
        Self
    }
}

impl From<bounce::Corrupt> for Broken {
    fn from(_: bounce::Corrupt) -> Self {
        Self
    }
}

/// Where both sides answer each other with few bytes: what had better be in this core's cache soon.
///
/// A message is two lines that move from core to core, one with the bytes and one with the immediate. Whoever has to
/// answer reads the bytes next, and then most often writes its answer where the last one went: both lines are asked for
/// while the immediate is still on its way. In a stream, lines had better stay with who writes them.
#[derive(Debug, Default)]
struct Turns {
    /// Something was sent since the peer was last heard,
    spoke: bool,
    /// and the other way round.
    heard: bool,
    /// Where the last answer was, as we call it,
    place: u64,
    /// and where ours went; 0: nowhere yet, or the processor claims no lines.
    dst: usize,
    claims: bool,
}

impl Turns {
    #[inline(always)]
    fn spoke(&mut self) {
        self.spoke = true;
    }

    /// The peer sent something; its bytes are at `place`.
    #[inline(always)]
    fn is_answered(&mut self, place: u64) {
        self.heard = true;
        if std::mem::replace(&mut self.spoke, false) {
            // Of neither is the address one that has just come: a processor that foresees that something comes asks for
            // them together with it.
            if self.place != NOWHERE {
                bring(self.place);
            }
            if self.dst != 0 {
                claim(self.dst);
            }
            if place != self.place && place != NOWHERE {
                bring(place);
                self.place = place;
            }
        }
    }

    /// Bytes were written to `dst`; returns whether that answers the peer.
    #[inline(always)]
    fn answers(&mut self, dst: *const u8) -> bool {
        if self.claims {
            self.dst = dst.addr();
        }
        std::mem::replace(&mut self.heard, false)
    }
}

/// A lane to the peer.
#[derive(Debug, Clone)]
struct LaneOut {
    producer: Producer,
    /// Entries there is room for at least; the peer's credit is looked at only when it is zero.
    room: u32,
}

/// A lane from the peer, and the NIC of ours that it leads to.
#[derive(Debug, Clone)]
struct LaneIn {
    consumer: Consumer,
    nic: NicIndex,
}

/// What is known of one of the peer's regions.
#[derive(Debug)]
enum Target {
    Unknown,
    Asked {
        key: u64,
    },
    /// Memory of a GPU over several allocations, whose files are coming.
    Arriving {
        key: u64,
        arriving: Box<Arriving>,
    },
    /// `base` is what pieces call the first byte, `start` what its owner does. And, once one has written there, what our
    /// GPUs know of it.
    Mapped {
        key: u64,
        mapping: Arc<Mapping>,
        base: u64,
        start: u64,
        len: u64,
        reached: Option<Arc<Reached>>,
    },
    Gpu {
        key: u64,
        reached: Arc<Reached>,
    },
    Process {
        key: u64,
        base: u64,
        start: u64,
        len: u64,
    },
    Refused {
        key: u64,
    },
    /// This process lacked something for it. The next piece is told so, and the one after asks again.
    Failed {
        key: u64,
        why: WorkError,
    },
}

impl Target {
    fn key(&self) -> u64 {
        match self {
            Self::Unknown => NO_KEY,
            Self::Asked { key }
            | Self::Arriving { key, .. }
            | Self::Refused { key }
            | Self::Failed { key, .. }
            | Self::Mapped { key, .. }
            | Self::Gpu { key, .. }
            | Self::Process { key, .. } => *key,
        }
    }
}

/// What the peer asks about a region of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Question {
    /// What it is.
    Kind { key: u64 },
    /// Files of its allocations, from number `from` on.
    Files { key: u64, from: u32 },
}

/// What became of a question of the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answered {
    Yes,
    /// Something is lacking here that there may be enough of soon.
    NotYet,
    /// A driver would keep us waiting.
    Busy,
}

/// What the peer answers to a question of ours.
#[derive(Debug, Clone, Copy)]
enum Reply {
    Kind { key: u64, answer: Answer },
    Files { key: u64, from: u32, sizes: Sizes },
}

impl Reply {
    /// Whether a driver is asked for what it brings.
    fn needs_driver(&self) -> bool {
        matches!(self, Self::Files { .. } | Self::Kind { answer: Answer::Gpu { .. }, .. })
    }
}

/// A question that has to wait for its answer.
#[derive(Debug, Clone, Copy)]
struct Owed {
    question: Question,
    /// It is refused then. `None`: nobody has looked at the time since it was asked.
    until: Option<Time>,
}

/// Whether the kernel copies to the peer's memory for us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ByKernel {
    /// A word was written to the peer to try; it has not said yet whether it arrived.
    Trying,
    Yes,
    No,
}

/// What became of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// It has ended, and is to be reported.
    Ended(Result<(), WorkError>),
    /// It was taken over, and will be reported by a later poll.
    UnderWay,
    /// It has to wait for an answer of the peer's; nothing was done.
    NotYet,
    /// There is no room; nothing was done.
    NoRoom,
}

/// Where the bytes of a piece go.
enum Place {
    /// At this address, in a region of so many bytes.
    Here(*mut u8, usize),
    /// At this one of the peer's.
    Process(u64),
    Bounce,
    Gpu(Arc<Reached>),
}

/// A live connection.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) link: Arc<Link>,
    pub(super) serial: u64,
    our_nics: u8,
    their_nics: u8,
    lanes_out: Vec<LaneOut>,
    lanes_in: Vec<LaneIn>,
    lanes_used: u64,
    /// Lanes that turned a piece away since they last had room.
    lanes_full: u64,
    targets: Vec<Target>,
    asked: usize,
    /// The peer's questions that could not be answered, as many as it may have under way, and when they are tried again.
    owed: heapless::Vec<Owed, ASKED_MAX>,
    owed_again: Time,
    /// Its answers that wait for a driver, with their files: no more than we may have asked for.
    kept: heapless::Vec<(Reply, Vec<OwnedFd>), ASKED_MAX>,
    /// It was said that there is no GPU of ours to write to the peer's with.
    told_of_gpus: bool,
    /// The peer's count of withdrawn grants that `targets` was last compared with.
    withdrawals: Seen,
    waiting: VecDeque<WorkRequest>,
    /// Pieces that GPUs are copying, and those that they have copied and that are still to be announced.
    flying: usize,
    landed: VecDeque<WorkRequest>,
    /// Whether something happened that waiting pieces may have waited for, and how many are untried.
    retry: usize,
    bounce_out: bounce::Writer,
    bounce_in: bounce::Reader,
    /// Nothing more is posted, and the session ends for this reason: at the next poll, or when GPUs have done with it and the peer with the bounced
    /// record that it is taking.
    pub(super) closing: Option<DownReason>,
    /// The peer is not waited for any longer then. `None`: nobody has looked at the time since the session is closing.
    closed_by: Option<Time>,
    held: u64,
    /// Something was made visible that the peer has not been rung for.
    unrung: bool,
    turns: Turns,
    demotes: bool,
    pid: i32,
    foreign: ForeignPath,
    /// Pieces count the addresses of a region from 0.
    from_zero: bool,
    by_kernel: ByKernel,
    /// Where the peer tries to write to us.
    probe: Probe,
}

/// What a session starts from.
pub(super) struct Start {
    pub(super) link: Arc<Link>,
    pub(super) serial: u64,
    pub(super) our_nics: u8,
    pub(super) their_nics: u8,
    pub(super) pid: i32,
    pub(super) is_same_user: bool,
    pub(super) foreign: ForeignPath,
    pub(super) from_zero: bool,
    pub(super) probe: Probe,
    pub(super) their_probe_address: u64,
}

impl Session {
    /// A session whose handshake is over. Tries whether the kernel copies to the peer.
    pub(super) fn new(start: Start) -> Result<Self, Broken> {
        let lanes = start.link.segment.lanes();
        let entries = u32::try_from(LANE_ENTRIES).map_err(|_| Broken)?;
        bounce::Writer::open(start.link.segment.outbound());
        let mut session = Self {
            link: start.link,
            serial: start.serial,
            our_nics: start.our_nics,
            their_nics: start.their_nics,
            lanes_out: vec![LaneOut { producer: Producer::new(entries)?, room: 0 }; lanes],
            // Lane by lane, our NIC turns fastest: see `step`, which is the peer's side of it.
            lanes_in: (0..start.our_nics)
                .cycle()
                .take(lanes)
                .map(|nic| Ok(LaneIn { consumer: Consumer::new(entries)?, nic }))
                .collect::<Result<_, Broken>>()?,
            lanes_used: 0,
            lanes_full: 0,
            targets: Vec::new(),
            asked: 0,
            owed: heapless::Vec::new(),
            owed_again: Time::ZERO,
            kept: heapless::Vec::new(),
            told_of_gpus: false,
            withdrawals: Seen::default(),
            waiting: VecDeque::new(),
            flying: 0,
            landed: VecDeque::new(),
            retry: 0,
            bounce_out: bounce::Writer::default(),
            bounce_in: bounce::Reader::default(),
            closing: None,
            closed_by: None,
            held: NO_KEY,
            unrung: false,
            turns: Turns { claims: can_claim(), ..Turns::default() },
            demotes: can_demote(),
            pid: start.pid,
            foreign: start.foreign,
            from_zero: start.from_zero,
            by_kernel: ByKernel::No,
            probe: start.probe,
        };
        session.try_kernel(start.their_probe_address, start.is_same_user);
        Ok(session)
    }

    pub(super) fn peer(&self) -> PeerId {
        self.link.peer
    }

    /// Writes a random word to the peer and asks whether it arrived: the pid may mean another process
    /// there than here, and an error would come too late. Not to another user's process: what it names may be memory
    /// whose pages it brings as late as it likes, and whoever writes there waits for them.
    fn try_kernel(&mut self, address: u64, is_same_user: bool) {
        if self.foreign == ForeignPath::BounceOnly || self.pid <= 0 || !is_same_user {
            return;
        }
        // The pid is the peer's as long as its process lives.
        if self.link.is_gone() {
            return;
        }
        let mut nonce = [0; 8];
        if rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty()).is_err() {
            return;
        }
        let written = write_process(self.pid, nonce.as_ptr() as u64, address, nonce.len());
        let nonce = u64::from_ne_bytes(nonce);
        if written.is_ok() && self.send(&Message::Probe { nonce }, &[]).is_ok() {
            self.by_kernel = ByKernel::Trying;
        }
    }

    fn send(&self, message: &Message<'_>, files: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut bytes = [0; MESSAGE_MAX];
        let len = message.encode(&mut bytes).ok_or(Errno::MSGSIZE)?;
        let bytes = bytes.get(..len).ok_or(Errno::MSGSIZE)?;
        socket::send(&self.link.socket, bytes, files)
    }

    // ---- out ----

    /// Takes a piece, or not ([`Step::NoRoom`]).
    pub(super) fn submit<S: Sink>(
        &mut self,
        work: &WorkRequest,
        gpus: &mut Copying,
        sink: &S,
    ) -> Step {
        if self.closing.is_some() {
            // While the peer is waited for nothing fails, a heartbeat least of all: with that the connection would go before its time.
            let waits = !self.bounce_is_quiet();
            return if waits { Step::NoRoom } else { Step::Ended(Err(WorkError::PeerGone)) };
        }
        match self.step(work, gpus, sink) {
            Step::NotYet if self.waiting.len() < WAITING_MAX => {
                self.waiting.push_back(*work);
                Step::UnderWay
            }
            Step::NotYet => Step::NoRoom,
            step => step,
        }
    }

    /// Writes a piece that is no longer than a NIC's least, and settles, where nothing is to be found out first: the region
    /// was written to before, the lane was used before and has room. `false`: it did nothing that counts. (If the peer is
    /// found to have broken the protocol, the bytes may be there; whoever tries again is told.)
    #[inline(always)]
    pub(super) fn write_at_once(&mut self, nic: NicIndex, piece: &Piece) -> bool {
        self.try_write_at_once(nic, piece).is_some()
    }

    #[inline(always)]
    fn try_write_at_once(&mut self, nic: NicIndex, piece: &Piece) -> Option<()> {
        let (key, imm) = (piece.dst_key, piece.imm?);
        let len = usize::try_from(piece.len).ok().filter(|_| piece.len <= PIECE_MIN_BYTES)?;
        let short = piece.len <= SHORT_BYTES;
        let here = piece.run.count == 0 && Kind::of(piece.src_key).is_host();
        let near = nic < self.our_nics && piece.remote_nic < self.their_nics;
        if !here || !near || self.closing.is_some() {
            return None;
        }
        let target = self.targets.get(usize::try_from(id_of(key)).ok()?)?;
        let Target::Mapped { key: known, mapping, base, start, len: bytes, .. } = target else {
            return None;
        };
        let offset = offset_in(piece.dst, piece.len, *base, *bytes).filter(|_| *known == key)?;
        let there = if short { start.wrapping_add(offset as u64) } else { NOWHERE };
        let area = usize::try_from(*bytes).unwrap_or(usize::MAX);
        let dst = mapping.base().as_ptr().wrapping_add(offset);
        let lane = self.lane_of(nic, piece.remote_nic);
        self.lanes_out.get(lane).filter(|lane| lane.room > 0)?;
        if !self.hold(key) {
            return None;
        }
        // SAFETY:
        // - the source may be read: the engine has ranges of regions written that stay registered, and so mapped,
        //   until the call returns (`Provider::write_at_once`);
        // - the destination lies inside the mapping: `offset_in` checked it, the file behind it cannot shrink, and
        //   `targets` keeps it mapped;
        // - no overlap: the mapping is one of our own making, and no region is in it.
        unsafe {
            if short {
                copy_short(piece.src as *const u8, dst, len);
            } else {
                copy(piece.src as *const u8, dst, len, area);
            }
        }
        if short && self.turns.answers(dst) && self.demotes {
            demote(dst);
        }
        let announced = self.announce(imm, lane, there);
        self.settle();
        announced.ok()
    }

    fn step<S: Sink>(&mut self, work: &WorkRequest, gpus: &mut Copying, sink: &S) -> Step {
        if work.nic >= self.our_nics || work.remote_nic >= self.their_nics {
            return Step::Ended(Err(WorkError::LocalAccess));
        }
        let lane = self.lane_of(work.nic, work.remote_nic);
        if work.imm.is_some() {
            match self.has_room(lane) {
                Ok(true) => {}
                Ok(false) => return Step::NoRoom,
                Err(Broken) => return self.broken(),
            }
        }
        if work.len > 0 {
            let place = match self.place(work, gpus) {
                Ok(place) => place,
                Err(step) => return step,
            };
            let step = match place {
                Place::Gpu(reached) => self.fly(work, &reached, gpus, sink),
                place => self.move_bytes(work, place),
            };
            if step != Step::Ended(Ok(())) {
                return step;
            }
        }
        self.announce_piece(work, lane)
    }

    fn lane_of(&self, nic: NicIndex, remote_nic: NicIndex) -> usize {
        usize::from(nic) * usize::from(self.their_nics) + usize::from(remote_nic)
    }

    /// Sends a piece's immediate, if it has one, for which its lane has room.
    fn announce_piece(&mut self, work: &WorkRequest, lane: usize) -> Step {
        if let Some(imm) = work.imm {
            if self.announce(imm, lane, NOWHERE) == Err(Broken) {
                return self.broken();
            }
            if work.len >= RING_EARLY_BYTES {
                self.ring();
            }
        }
        Step::Ended(Ok(()))
    }

    /// Sends an immediate, for which its lane has room. `place` is where the peer will look for the bytes, as it calls it,
    /// if they are few: it can have them brought while it counts.
    #[inline(always)]
    fn announce(&mut self, imm: Imm, lane: usize, place: u64) -> Result<(), Broken> {
        let out = self.link.segment.outbound();
        let bit = 1_u64 << lane;
        let to = self.lanes_out.get_mut(lane).ok_or(Broken)?;
        to.producer.push(out.lane(lane), out.credit(lane), imm.bits(), place)?;
        to.room = to.room.saturating_sub(1);
        if self.lanes_used & bit == 0 {
            self.lanes_used |= bit;
            // Release: whoever looks into the lane because of it sees the entry.
            out.lanes_used().store(self.lanes_used, Ordering::Release);
        }
        self.unrung = true;
        self.turns.spoke();
        Ok(())
    }

    fn has_room(&mut self, lane: usize) -> Result<bool, Broken> {
        let out = self.lanes_out.get_mut(lane).ok_or(Broken)?;
        if out.room == 0 {
            out.room = out.producer.room(self.link.segment.outbound().credit(lane))?;
        }
        let room = out.room > 0;
        let bit = 1 << lane;
        self.lanes_full = if room { self.lanes_full & !bit } else { self.lanes_full | bit };
        Ok(room)
    }

    /// The peer broke the protocol: ends the piece, and the session at a later poll.
    fn broken(&mut self) -> Step {
        self.close(DownReason::Protocol);
        Step::Ended(Err(WorkError::PeerGone))
    }

    /// Has a GPU copy a piece.
    fn fly<S: Sink>(
        &mut self,
        work: &WorkRequest,
        reached: &Arc<Reached>,
        gpus: &mut Copying,
        sink: &S,
    ) -> Step {
        let Some(gpus) = gpus.as_mut() else {
            return Step::Ended(Err(WorkError::LocalAccess));
        };
        match gpus.stage(work, reached, sink) {
            Staging::Taken => {
                self.flying += 1;
                Step::UnderWay
            }
            Staging::NoRoom => Step::NoRoom,
            Staging::Withdrawn => {
                self.forget(work.dst_key);
                Step::Ended(Err(WorkError::RemoteAccess))
            }
            Staging::Failed(error) => Step::Ended(Err(error)),
        }
    }

    /// A GPU has copied a piece, or has failed to.
    pub(super) fn land<S: Sink>(
        &mut self,
        work: WorkRequest,
        end: Result<(), WorkError>,
        sink: &mut S,
    ) {
        self.flying = self.flying.saturating_sub(1);
        let first = self.landed.is_empty();
        match end {
            Ok(()) if work.imm.is_some() => {
                self.landed.push_back(work);
                if first {
                    self.announce_landed(sink);
                }
            }
            end => sink.work_done(work.nic, work.token, end),
        }
    }

    /// Announces what GPUs have copied, as far as there is room; returns whether there was any.
    fn announce_landed<S: Sink>(&mut self, sink: &mut S) -> bool {
        let mut any = false;
        while let Some(work) = self.landed.front().copied() {
            let lane = self.lane_of(work.nic, work.remote_nic);
            let end = match self.has_room(lane) {
                Ok(true) => match self.announce_piece(&work, lane) {
                    Step::Ended(end) => end,
                    Step::UnderWay | Step::NotYet | Step::NoRoom => Ok(()),
                },
                Ok(false) => break,
                Err(Broken) => {
                    self.close(DownReason::Protocol);
                    Err(WorkError::PeerGone)
                }
            };
            self.landed.pop_front();
            sink.work_done(work.nic, work.token, end);
            any = true;
        }
        any
    }

    /// Whether GPUs are copying to the peer.
    pub(super) fn is_flying(&self) -> bool {
        self.flying > 0
    }

    /// Where the bytes of a piece go; else what is to be done with the piece instead.
    fn place(&mut self, work: &WorkRequest, gpus: &mut Copying) -> Result<Place, Step> {
        const REFUSED: Step = Step::Ended(Err(WorkError::RemoteAccess));
        let key = work.dst_key;
        let id = usize::try_from(id_of(key)).unwrap_or(usize::MAX);
        let target = self.targets.get(id).unwrap_or(&Target::Unknown);
        let have = target.key();
        // The keys of a slot only grow: if the peer has shown us a later one, this one's tenant is gone.
        let known = !matches!(
            target,
            Target::Unknown
                | Target::Asked { .. }
                | Target::Arriving { .. }
                | Target::Refused { .. }
                | Target::Failed { .. }
        );
        let stale = have > key && known;
        if stale || id >= REGIONS_MAX || key == NO_KEY {
            return Err(REFUSED);
        }
        match target {
            // Whatever is asked about this slot is answered first.
            Target::Asked { .. } | Target::Arriving { .. } => Err(Step::NotYet),
            _ if have != key => {
                self.ask(id, key);
                Err(Step::NotYet)
            }
            // Bounds are checked where it is known which pages a run has.
            Target::Gpu { reached, .. } => Ok(Place::Gpu(Arc::clone(reached))),
            // A GPU reaches no memory that only the peer has.
            Target::Process { .. } if !Kind::of(work.src_key).is_host() => Err(REFUSED),
            Target::Mapped { .. } if !Kind::of(work.src_key).is_host() => {
                self.reach(id, gpus).map(Place::Gpu)
            }
            // What is not for GPUs is never planned so: `Memory::takes_runs`.
            Target::Mapped { .. } | Target::Process { .. } if work.run.count > 0 => Err(REFUSED),
            Target::Mapped { mapping, base, len, .. } => {
                let offset = offset_in(work.dst, work.len, *base, *len).ok_or(REFUSED)?;
                let area = usize::try_from(*len).unwrap_or(usize::MAX);
                Ok(Place::Here(mapping.base().as_ptr().wrapping_add(offset), area))
            }
            Target::Process { base, start, len, .. } => {
                let offset = offset_in(work.dst, work.len, *base, *len).ok_or(REFUSED)?;
                let there = start.wrapping_add(offset as u64);
                match (self.by_kernel, self.foreign) {
                    (ByKernel::Trying, _) => Err(Step::NotYet),
                    (ByKernel::Yes, _) => Ok(Place::Process(there)),
                    (ByKernel::No, ForeignPath::KernelOnly) => {
                        let code = Errno::PERM.raw_os_error();
                        Err(Step::Ended(Err(WorkError::Device(code))))
                    }
                    (ByKernel::No, _) => Ok(Place::Bounce),
                }
            }
            Target::Refused { .. } | Target::Unknown => Err(REFUSED),
            Target::Failed { why, .. } => {
                let why = *why;
                if let Some(target) = self.targets.get_mut(id) {
                    *target = Target::Unknown;
                }
                Err(Step::Ended(Err(why)))
            }
        }
    }

    /// What our GPUs need to write to host memory of the peer's; made the first time. Asks no driver.
    fn reach(&mut self, id: usize, gpus: &Copying) -> Result<Arc<Reached>, Step> {
        const LOCAL: Step = Step::Ended(Err(WorkError::LocalAccess));
        const REFUSED: Step = Step::Ended(Err(WorkError::RemoteAccess));
        let gpus = gpus.as_ref().ok_or(LOCAL)?;
        let Some(Target::Mapped { key, mapping, base, len, reached, .. }) =
            self.targets.get_mut(id)
        else {
            return Err(REFUSED);
        };
        if let Some(reached) = reached {
            return Ok(Arc::clone(reached));
        }
        let made = Reached::host(gpus.known(), &self.link, *key, *base, mapping, *len);
        let made = Arc::new(made);
        *reached = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Asks the peer about `key`, unless too much was asked already; the piece's next try asks again.
    fn ask(&mut self, id: usize, key: u64) {
        if self.targets.len() <= id {
            self.targets.resize_with(id + 1, || Target::Unknown);
        }
        if self.asked >= ASKED_MAX || self.send(&Message::MapRequest { key }, &[]).is_err() {
            return;
        }
        if let Some(target) = self.targets.get_mut(id) {
            self.asked += 1;
            *target = Target::Asked { key };
        }
    }

    fn move_bytes(&mut self, work: &WorkRequest, place: Place) -> Step {
        let Ok(len) = usize::try_from(work.len) else {
            return Step::Ended(Err(WorkError::LocalAccess));
        };
        if let Place::Bounce = place {
            if !self.bounce_out.has_room() {
                return Step::NoRoom;
            }
            self.bounce_out.start(*work);
            self.unrung |= self.bounce_out.pump(self.link.segment.outbound());
            return Step::UnderWay;
        }
        if !self.hold(work.dst_key) {
            self.forget(work.dst_key);
            return Step::Ended(Err(WorkError::RemoteAccess));
        }
        match place {
            Place::Here(dst, area) => {
                // SAFETY:
                // - the source may be read: the engine posts ranges of regions that stay registered,
                //   and so mapped, until the piece is reported (`Provider::post`);
                // - the destination lies inside the mapping: `offset_in` checked it, and the file
                //   behind it cannot shrink; `targets` keeps it mapped;
                // - no overlap: the mapping is one of our own making, and no region is in it.
                unsafe { copy(work.src as *const u8, dst, len, area) };
                Step::Ended(Ok(()))
            }
            Place::Process(there) => self.move_by_kernel(work, there, len),
            Place::Bounce | Place::Gpu(_) => Step::Ended(Err(WorkError::LocalAccess)),
        }
    }

    fn move_by_kernel(&mut self, work: &WorkRequest, there: u64, len: usize) -> Step {
        // The pid is the peer's as long as its process lives; its socket may be open longer, in a child of it, or less long,
        // if it has started another program.
        if self.link.is_gone() {
            return Step::Ended(Err(WorkError::PeerGone));
        }
        match write_process(self.pid, work.src, there, len) {
            Ok(()) => Step::Ended(Ok(())),
            Err(Errno::PERM) => {
                // Allowed before, and not now: the peer has changed its credentials, or a policy.
                self.by_kernel = ByKernel::No;
                Step::NotYet
            }
            Err(Errno::FAULT) => Step::Ended(Err(WorkError::RemoteAccess)),
            Err(Errno::SRCH) => Step::Ended(Err(WorkError::PeerGone)),
            Err(errno) => Step::Ended(Err(WorkError::Device(errno.raw_os_error()))),
        }
    }

    /// Enters under `key`, if that has not been done; returns whether writing is allowed.
    fn hold(&mut self, key: u64) -> bool {
        let out = self.link.segment.outbound();
        let Some(grant) = out.grant(id_of(key)) else {
            return false;
        };
        if self.held == key {
            return hazard::may_continue(grant, key);
        }
        let granted = hazard::enter(out.active(), grant, key);
        self.held = if granted { key } else { NO_KEY };
        granted
    }

    /// Lets go of a region that the peer has withdrawn.
    fn forget(&mut self, key: u64) {
        self.leave();
        if let Some(target) =
            usize::try_from(id_of(key)).ok().and_then(|id| self.targets.get_mut(id))
        {
            *target = Target::Refused { key };
        }
    }

    fn leave(&mut self) {
        if self.held != NO_KEY {
            hazard::leave(self.link.segment.outbound().active());
            self.held = NO_KEY;
        }
    }

    fn ring(&mut self) {
        self.unrung = false;
        self.link.ring();
    }

    /// Ends a run of pieces: nothing is being written any more, and a sleeping peer is woken.
    pub(super) fn settle(&mut self) {
        self.leave();
        if self.unrung {
            self.ring();
        }
    }

    // ---- in ----

    /// Takes what the peer sent, and goes on with what waits. Returns whether there was anything.
    ///
    /// Idle, it costs three loads and one for each lane in use.
    pub(super) fn poll<S: Sink>(
        &mut self,
        now: Time,
        memory: &ShmMemory,
        gpus: &mut Copying,
        sink: &mut S,
    ) -> Result<bool, Broken> {
        let mut any = self.take_immediates(sink)?;
        if !self.landed.is_empty() {
            any |= self.announce_landed(sink);
        }
        let inn = self.link.segment.inbound();
        if self.bounce_in.has_news(inn) {
            any |= self.take_records(memory, sink)?;
        }
        if !self.bounce_out.is_idle() {
            any |= self.reap(sink)?;
        }
        if self.retry > 0 {
            any |= self.retry_waiting(gpus, sink);
        }
        self.settle();
        if self.closing.is_some() && self.is_over(now) { Err(Broken) } else { Ok(any) }
    }

    /// Whether a session that is closing may end. A peer that is slow in the middle of a record is waited for: what it is putting to its place would land
    /// after the end was told. Stopped there, by a signal or the freezer, it says no more, and is not waited for without end. (If it
    /// dies there, its socket tells.)
    #[cold]
    fn is_over(&mut self, now: Time) -> bool {
        let closed_by = *self.closed_by.get_or_insert(now.after(RECORD_PATIENCE));
        self.flying == 0 && (self.bounce_is_quiet() || now >= closed_by)
    }

    /// Whether nothing that was put into the bounce ring can be delivered any more, or there is nothing.
    pub(super) fn bounce_is_quiet(&self) -> bool {
        self.bounce_out.is_idle() || bounce::Writer::is_quiet(self.link.segment.outbound())
    }

    /// Delivers immediates, of each lane those in the line that is read; returns whether there were any.
    pub(super) fn take_immediates<S: Sink>(&mut self, sink: &mut S) -> Result<bool, Broken> {
        let inn = self.link.segment.inbound();
        // Acquire: pairs with the store that announced the lane.
        let mut used = inn.lanes_used().load(Ordering::Acquire);
        let mut any = false;
        let mut freed = false;
        while used != 0 {
            let lane = used.trailing_zeros();
            used &= used - 1;
            let lane = usize::try_from(lane).map_err(|_| Broken)?;
            // A bit of a lane that does not exist is a lie.
            let LaneIn { consumer, nic } = self.lanes_in.get_mut(lane).ok_or(Broken)?;
            let published = consumer.published();
            while let Some((imm, place)) = consumer.pop(inn.lane(lane), inn.credit(lane))? {
                self.turns.is_answered(place);
                sink.immediate(*nic, self.link.peer, imm);
                any = true;
                if consumer.position().is_multiple_of(LINE_ENTRIES) {
                    break;
                }
            }
            freed |= consumer.published() != published;
        }
        self.unrung |= freed;
        Ok(any)
    }

    fn take_records<S: Sink>(&mut self, memory: &ShmMemory, sink: &mut S) -> Result<bool, Broken> {
        let inn = self.link.segment.inbound();
        let mut any = false;
        for _ in 0..RECORD_BATCH {
            let Some(taken) = self.bounce_in.take(inn, memory, self.our_nics)? else {
                break;
            };
            if let Some((nic, imm)) = taken.imm {
                sink.immediate(nic, self.link.peer, imm);
            }
            any = true;
        }
        self.unrung |= any;
        Ok(any)
    }

    fn reap<S: Sink>(&mut self, sink: &mut S) -> Result<bool, Broken> {
        let out = self.link.segment.outbound();
        let any =
            self.bounce_out.reap(out, |work, end| sink.work_done(work.nic, work.token, end))?;
        if any && self.closing.is_none() {
            self.unrung |= self.bounce_out.pump(out);
        }
        Ok(any)
    }

    fn retry_waiting<S: Sink>(&mut self, gpus: &mut Copying, sink: &mut S) -> bool {
        let mut any = false;
        for _ in 0..RETRY_BATCH.min(self.retry) {
            self.retry -= 1;
            let Some(work) = self.waiting.pop_front() else {
                break;
            };
            match self.step(&work, gpus, sink) {
                Step::Ended(end) => sink.work_done(work.nic, work.token, end),
                Step::UnderWay => {}
                Step::NotYet | Step::NoRoom => {
                    self.waiting.push_back(work);
                    continue;
                }
            }
            any = true;
        }
        any
    }

    /// Tries the waiting pieces again at the next poll.
    pub(super) fn wake_waiting(&mut self) {
        self.retry = self.waiting.len();
    }

    /// Whether pieces wait for nothing that the peer has to say.
    pub(super) fn can_retry(&self) -> bool {
        self.asked == 0 && self.by_kernel != ByKernel::Trying && !self.waiting.is_empty()
    }

    /// Whether the peer owes an answer, or we do, or pieces wait for other reasons.
    pub(super) fn is_expecting(&self) -> bool {
        let trying = self.by_kernel == ByKernel::Trying;
        self.asked > 0 || self.owes() || !self.waiting.is_empty() || trying
    }

    /// Whether a question of the peer's could not be answered yet.
    pub(super) fn owes(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Unmaps what the peer has withdrawn since the last call. A load, if that is nothing.
    pub(super) fn sweep(&mut self) {
        let out = self.link.segment.outbound();
        if !self.withdrawals.take(out.withdrawals()) {
            return;
        }
        for target in &mut self.targets {
            if let Target::Mapped { key, .. }
            | Target::Process { key, .. }
            | Target::Gpu { key, .. } = target
            {
                let key = *key;
                let granted =
                    out.grant(id_of(key)).is_some_and(|word| hazard::may_continue(word, key));
                if !granted {
                    *target = Target::Refused { key };
                }
            }
        }
    }

    /// Acts on a message of the peer's.
    pub(super) fn handle(
        &mut self,
        message: Message<'_>,
        (files, is_short): (Vec<OwnedFd>, bool),
        memory: &ShmMemory,
        gpus: Option<&Arc<Known>>,
    ) -> Result<(), Broken> {
        match message {
            Message::MapReply { key, .. } | Message::FilesReply { key, .. } if is_short => {
                self.lack(key, Errno::MFILE)?;
            }
            Message::Kick => {}
            Message::Probe { nonce } => {
                let arrived = self.probe.holds(nonce);
                self.reply(&Message::Probed { arrived })?;
            }
            Message::Probed { arrived } => {
                if self.by_kernel == ByKernel::Trying {
                    self.by_kernel = if arrived { ByKernel::Yes } else { ByKernel::No };
                    self.wake_waiting();
                }
            }
            Message::MapRequest { key } => self.answer(Question::Kind { key }, memory)?,
            Message::MapReply { key, answer } => {
                self.hear(Reply::Kind { key, answer }, files, gpus)?;
            }
            Message::FilesRequest { key, from } => {
                self.answer(Question::Files { key, from }, memory)?;
            }
            Message::FilesReply { key, from, sizes } => {
                self.hear(Reply::Files { key, from, sizes }, files, gpus)?;
            }
            _ => return Err(Broken),
        }
        Ok(())
    }

    /// Acts on an answer of the peer's, or keeps it while a driver would keep us waiting.
    fn hear(
        &mut self,
        reply: Reply,
        files: Vec<OwnedFd>,
        gpus: Option<&Arc<Known>>,
    ) -> Result<(), Broken> {
        if reply.needs_driver() && gpus.is_some_and(|known| known.closer.is_busy()) {
            return self.kept.push((reply, files)).map_err(|_| Broken);
        }
        match reply {
            Reply::Kind { key, answer } => self.learn(key, answer, files, gpus),
            Reply::Files { key, from, sizes } => {
                self.take_files(key, from, &files, sizes.as_slice(), gpus)
            }
        }
    }

    /// Acts on the answers that were kept, as far as that goes by now.
    pub(super) fn hear_kept(&mut self, gpus: Option<&Arc<Known>>) -> Result<(), Broken> {
        if self.kept.is_empty() {
            return Ok(());
        }
        let mut kept = std::mem::take(&mut self.kept).into_iter();
        kept.try_for_each(|(reply, files)| self.hear(reply, files, gpus))
    }

    /// Answers a question, or notes that it is still to be: a peer has no more under way than there is room for.
    fn answer(&mut self, question: Question, memory: &ShmMemory) -> Result<(), Broken> {
        let answered = self.try_answer(question, memory, false)?;
        if answered == Answered::NotYet {
            tracing::warn!(
                "a peer cannot be handed a region's memory for now, and waits: ulimit -n may be too low for all that this user's engines send, \
                 or a GPU's driver refuses, which is said at the level of debug"
            );
        }
        if answered != Answered::Yes {
            self.owed.push(Owed { question, until: None }).map_err(|_| Broken)?;
        }
        Ok(())
    }

    /// Answers what is owed, as far as that goes by now.
    pub(super) fn pay(&mut self, now: Time, memory: &ShmMemory) -> Result<(), Broken> {
        if self.owed.is_empty() || now < self.owed_again {
            return Ok(());
        }
        self.owed_again = now.after(OWED_PAUSE);
        for mut owed in std::mem::take(&mut self.owed) {
            let is_late = now >= *owed.until.get_or_insert(now.after(OWED_PATIENCE));
            match self.try_answer(owed.question, memory, is_late)? {
                Answered::Yes => continue,
                Answered::NotYet => {}
                // Nothing is lacking.
                Answered::Busy => owed.until = None,
            }
            self.owed.push(owed).map_err(|_| Broken)?;
        }
        Ok(())
    }

    /// Answers a question, unless something is lacking for that; `is_late`: then it is refused.
    fn try_answer(
        &self,
        question: Question,
        memory: &ShmMemory,
        is_late: bool,
    ) -> Result<Answered, Broken> {
        match question {
            Question::Kind { key } => self.tell_kind(key, memory, is_late),
            Question::Files { key, from } => self.hand_files(key, from, memory, is_late),
        }
    }

    fn tell_kind(&self, key: u64, memory: &ShmMemory, is_late: bool) -> Result<Answered, Broken> {
        let (answer, file) = match memory.grant(&self.link, key) {
            Granted::File { file, base, len } => (Answer::File { base, len }, Some(file)),
            Granted::Process { base, len } => (Answer::Process { base, len }, None),
            Granted::Gpu { region, by, file } => (Answer::Gpu { region, by }, file),
            Granted::Refused => (Answer::Refused, None),
        };
        let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        let refusal = Message::MapReply { key, answer: Answer::Refused };
        self.reply_with(&Message::MapReply { key, answer }, &files, &refusal, is_late)
    }

    /// Sends files of a region over several allocations, from number `from` on; none, if it was withdrawn or has not so many.
    fn hand_files(
        &self,
        key: u64,
        from: u32,
        memory: &ShmMemory,
        is_late: bool,
    ) -> Result<Answered, Broken> {
        let refusal = Message::FilesReply { key, from, sizes: Sizes::default() };
        let (files, sizes) = match memory.files(&self.link, key, from) {
            Handed::These(files, sizes) => (files, sizes),
            Handed::Busy => return Ok(Answered::Busy),
            Handed::Lacking if !is_late => return Ok(Answered::NotYet),
            Handed::Lacking => {
                tracing::warn!("a peer is refused a region whose memory could not be handed over");
                return self.reply(&refusal).map(|()| Answered::Yes);
            }
            Handed::Nothing => {
                return self.reply(&refusal).map(|()| Answered::Yes);
            }
        };
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        self.reply_with(&Message::FilesReply { key, from, sizes }, &files, &refusal, is_late)
    }

    /// Sends a message with files, or a refusal, if they do not go; unless they may go soon, and it is not `is_late`.
    fn reply_with(
        &self,
        message: &Message<'_>,
        files: &[BorrowedFd<'_>],
        refusal: &Message<'_>,
        is_late: bool,
    ) -> Result<Answered, Broken> {
        match self.send(message, files) {
            Ok(()) => Ok(Answered::Yes),
            Err(Errno::AGAIN) => Err(Broken),
            // Too many of this user's are on their way, to whomever.
            Err(why) if is_lack(why) && !is_late => Ok(Answered::NotYet),
            // That has lasted, or the peer is gone.
            Err(why) => {
                if !files.is_empty() && !self.link.is_gone() {
                    tracing::warn!(%why, files = files.len(), "a peer cannot be sent files");
                }
                self.reply(refusal).map(|()| Answered::Yes)
            }
        }
    }

    fn reply(&self, message: &Message<'_>) -> Result<(), Broken> {
        match self.send(message, &[]) {
            // A peer keeps to a number of questions whose answers fit the socket.
            Err(Errno::AGAIN) => Err(Broken),
            // If it is gone, the socket says so when it is read.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// What was asked for has come, but this process cannot take it.
    fn lack(&mut self, key: u64, errno: Errno) -> Result<(), Broken> {
        let target = usize::try_from(id_of(key)).ok().and_then(|id| self.targets.get(id));
        let is_awaited = match target {
            Some(Target::Asked { key: asked } | Target::Arriving { key: asked, .. }) => {
                *asked == key
            }
            _ => false,
        };
        if !is_awaited {
            return Err(Broken);
        }
        self.settle_target(key, lacking(key, errno))
    }

    fn learn(
        &mut self,
        key: u64,
        answer: Answer,
        files: Vec<OwnedFd>,
        gpus: Option<&Arc<Known>>,
    ) -> Result<(), Broken> {
        let (link, same) = (&self.link, self.pid == rustix::process::getpid().as_raw_pid());
        let first = |start| if self.from_zero { 0 } else { start };
        let target = usize::try_from(id_of(key)).ok().and_then(|id| self.targets.get(id));
        if !matches!(target, Some(Target::Asked { key: asked }) if *asked == key) {
            return Err(Broken);
        }
        let learnt = match answer {
            Answer::File { base: start, len } => {
                let file = <[OwnedFd; 1]>::try_from(files).ok().map(|[file]| file);
                map(key, first(start), start, len, file)
            }
            Answer::Process { base: start, len } => {
                Target::Process { key, base: first(start), start, len }
            }
            Answer::Gpu { region, by } => match (gpus, by) {
                (None, _) => Target::Failed { key, why: WorkError::NoGpus },
                (Some(gpus), By::Files(count)) => match Arriving::new(gpus, region, count) {
                    Ok(arriving) => Target::Arriving { key, arriving: Box::new(arriving) },
                    Err(not) => not_reached(link, key, not),
                },
                (Some(gpus), by) => {
                    let base = first(region.base);
                    let device =
                        |received| Reached::device(gpus, link, key, base, &region, received, same);
                    let reached = received(by, &files).ok_or(NotReached::Refused).and_then(device);
                    opened(link, key, reached)
                }
            },
            Answer::Refused => Target::Refused { key },
        };
        let needs_gpus = matches!(learnt, Target::Failed { why: WorkError::NoGpus, .. });
        if needs_gpus && !std::mem::replace(&mut self.told_of_gpus, true) {
            tracing::warn!(
                "a peer's memory is a GPU's: to write there, name the GPUs when the engine is built"
            );
        }
        self.settle_target(key, learnt)
    }

    /// Files of a region over several allocations have come: as many as asked for, fewer, or none, if they are refused.
    fn take_files(
        &mut self,
        key: u64,
        from: u32,
        files: &[OwnedFd],
        sizes: &[u64],
        gpus: Option<&Arc<Known>>,
    ) -> Result<(), Broken> {
        let first = |start| if self.from_zero { 0 } else { start };
        let id = usize::try_from(id_of(key)).map_err(|_| Broken)?;
        let target = self.targets.get_mut(id).ok_or(Broken)?;
        let awaited = matches!(target, Target::Arriving { key: asked, arriving }
            if *asked == key && arriving.next() == Some(from) && arriving.has_room(files));
        if !awaited || files.len() != sizes.len() {
            return Err(Broken);
        }
        let (Target::Arriving { mut arriving, .. }, Some(gpus)) =
            (std::mem::replace(target, Target::Refused { key }), gpus)
        else {
            return Err(Broken);
        };
        let learnt = if files.is_empty() {
            Target::Refused { key }
        } else if let Err(not) = arriving.take(files, sizes) {
            not_reached(&self.link, key, not)
        } else if arriving.next().is_some() {
            Target::Arriving { key, arriving }
        } else {
            let base = first(arriving.base());
            opened(&self.link, key, Reached::joined(gpus, &self.link, key, base, *arriving))
        };
        self.settle_target(key, learnt)
    }

    /// Notes what was learnt of a region that was asked about, and asks on if that is not all.
    fn settle_target(&mut self, key: u64, learnt: Target) -> Result<(), Broken> {
        let next = match &learnt {
            Target::Arriving { arriving, .. } => arriving.next(),
            _ => None,
        };
        let target = usize::try_from(id_of(key)).ok().and_then(|id| self.targets.get_mut(id));
        *target.ok_or(Broken)? = learnt;
        if let Some(from) = next {
            // As many questions are under way as before.
            return self.reply(&Message::FilesRequest { key, from });
        }
        self.asked = self.asked.saturating_sub(1);
        self.wake_waiting();
        Ok(())
    }

    // ---- sleep and end ----

    /// Announces that the engine is about to sleep; returns whether there is nothing to do.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        let inn = self.link.segment.inbound();
        inn.doorbell().prepare_sleep();
        let out = self.link.segment.outbound();
        let bounced = self.bounce_in.has_news(inn) || self.bounce_out.has_news(out);
        // Pieces that wait for no answer are tried again in time: nobody would wake us for them.
        let stuck =
            !self.waiting.is_empty() && self.asked == 0 && self.by_kernel != ByKernel::Trying;
        let withdrawn = self.withdrawals.is_news(out.withdrawals());
        let ending = self.closing.is_some();
        // What a GPU has done, nobody tells but the word that is polled.
        let flying = self.flying > 0;
        // What is owed goes when there is room elsewhere, which nobody tells either.
        let owes = self.owes();
        // Nor that a driver has come back.
        let keeps = !self.kept.is_empty();
        let busy =
            keeps || flying || bounced || stuck || withdrawn || ending || owes || self.retry > 0;
        !(busy || self.has_immediates() || self.has_found_room())
    }

    fn has_immediates(&self) -> bool {
        let inn = self.link.segment.inbound();
        let used = inn.lanes_used().load(Ordering::Acquire);
        let nowhere = AtomicU64::new(0);
        self.lanes_in.iter().enumerate().any(|(lane, from)| {
            // A copy looks, so that nothing is taken. An error is something to do, too.
            let look = || from.consumer.clone().pop(inn.lane(lane), &nowhere) != Ok(None);
            used >> lane & 1 == 1 && look()
        })
    }

    fn has_found_room(&mut self) -> bool {
        let full = self.lanes_full;
        if !self.landed.is_empty() && full == 0 {
            return true;
        }
        (0..self.lanes_out.len())
            .any(|lane| full >> lane & 1 == 1 && self.has_room(lane) != Ok(false))
    }

    pub(super) fn awake(&self) {
        self.link.segment.inbound().doorbell().awake();
    }

    /// Calls back what lies in the bounce ring, and posts nothing more. The session is lost by it.
    pub(super) fn close(&mut self, reason: DownReason) {
        self.settle();
        self.closing.get_or_insert(reason);
        bounce::Writer::close(self.link.segment.outbound());
    }

    /// Whether anything lies in the bounce ring.
    pub(super) fn is_bouncing(&self) -> bool {
        !self.bounce_out.is_idle()
    }

    /// Ends the pieces that GPUs have copied and that cannot be announced any more.
    pub(super) fn flush_landed<S: Sink>(&mut self, error: WorkError, sink: &mut S) {
        for work in self.landed.drain(..) {
            sink.work_done(work.nic, work.token, Err(error));
        }
    }

    /// Ends the pieces that wait; nothing of them has been written.
    pub(super) fn flush_waiting<S: Sink>(&mut self, error: WorkError, sink: &mut S) {
        for work in self.waiting.drain(..) {
            sink.work_done(work.nic, work.token, Err(error));
        }
        self.retry = 0;
    }

    /// Gives the pieces back that wait: nothing of them has been written, and what nobody has stopped is posted again.
    pub(super) fn return_waiting<S: Sink>(&mut self, sink: &mut S) {
        for work in self.waiting.drain(..) {
            sink.undelivered(&work);
        }
        self.retry = 0;
    }

    /// Ends all pieces. The bounce ring is closed, and the peer not in the middle of a record, gone, or not waited for there any longer.
    pub(super) fn flush<S: Sink>(&mut self, error: WorkError, sink: &mut S) {
        self.flush_waiting(error, sink);
        self.flush_landed(error, sink);
        self.bounce_out.flush(error, |work, end| sink.work_done(work.nic, work.token, end));
    }
}

/// How far into the region of `len` bytes from `base` on those `bytes` start that go to `dst`, if they lie inside.
#[inline(always)]
fn offset_in(dst: u64, bytes: u64, base: u64, len: u64) -> Option<usize> {
    let offset = dst.checked_sub(base)?;
    let end = offset.checked_add(bytes)?;
    if end <= len { usize::try_from(offset).ok() } else { None }
}

/// Whether the peer has granted us the region and not withdrawn it.
fn is_granted(link: &Link, key: u64) -> bool {
    let granted = link.segment.outbound().grant(id_of(key));
    granted.is_some_and(|word| hazard::may_continue(word, key))
}

/// A region that no GPU of ours gets at. One that was withdrawn may be gone by now: that its owner has freed it is no failure of ours.
fn not_reached(link: &Link, key: u64, not: NotReached) -> Target {
    match not {
        NotReached::Failed if is_granted(link, key) => {
            Target::Failed { key, why: WorkError::Unopened }
        }
        NotReached::Failed | NotReached::Refused => Target::Refused { key },
    }
}

/// A region of GPU memory that was opened; refused, if it was withdrawn meanwhile, so that it is not kept open until the next is.
fn opened(link: &Link, key: u64, reached: Result<Reached, NotReached>) -> Target {
    let reached = match reached {
        Ok(reached) => Arc::new(reached),
        Err(not) => return not_reached(link, key, not),
    };
    if !is_granted(link, key) {
        return Target::Refused { key };
    }
    link.has_reached(key, &reached);
    Target::Gpu { key, reached }
}

/// A region that this process cannot reach, which is no fault of its owner's.
fn lacking(key: u64, errno: Errno) -> Target {
    tracing::warn!(%errno, "a peer's region cannot be reached: ulimit -n, ulimit -v or vm.max_map_count may be too low");
    Target::Failed { key, why: WorkError::Device(errno.raw_os_error()) }
}

/// Maps a region whose file the peer has sent.
fn map(key: u64, base: u64, start: u64, len: u64, file: Option<OwnedFd>) -> Target {
    let file = file.filter(|file| is_sealed(file, len)).zip(usize::try_from(len).ok());
    match file.map(|(file, bytes)| Mapping::new(file, bytes, Use::Peers)) {
        Some(Ok(mapping)) => {
            Target::Mapped { key, mapping: Arc::new(mapping), base, start, len, reached: None }
        }
        Some(Err(errno)) => lacking(key, errno),
        None => Target::Refused { key },
    }
}
