//! A domain group: the NICs of one device, and what is posted on them next.
//!
//! Sans-IO. The platform submits requests, asks [`DomainGroup::poll_work`] what to post on a NIC,
//! posts it, and reports each completion; it passes the time, and asks [`DomainGroup::poll_event`]
//! what became of transfers and peers. The group opens no device and reads no clock.
//!
//! ```text
//!            submit                 poll_work              handle_completion
//!  request ─────────▶ lanes of NIC ───────────▶ in flight ──────────────────▶ Ended { Done }
//!                        │   ▲  credit handed over  │
//!         no credit left ▼   │                      │ cancel, deadline, peer or NIC lost
//!                   waiting line of peer            ▼
//!                                      draining ──▶ Ended { NeverStarted | Quiesced }
//!                                         └ past the drain deadline: Event::Abort
//! ```
//!
//! # Invariants
//!
//! 1. A transfer ends exactly once, and only when none of its pieces is in flight: only then may its
//!    buffers be reused. A deadline alone ends nothing; it stops the posting and starts the drain.
//! 2. Of transfers, on a NIC at most `queue_depth` pieces are in flight, to a peer over one NIC at most
//!    `peer_depth`; of both, bulk transfers hold at most all but `latency_reserve`. What keeps a connection
//!    comes beside these, so that nobody can hold it up: heartbeats, asks and answers.
//! 3. A transfer that waits for one peer's credits stands in that peer's line, not in anybody's way.
//!    While it does there is no credit for its lane: one that returns is handed to the first in line,
//!    but that pieces lost with a path come before everybody.
//! 4. What does not fit is refused and given back; nothing is dropped.
//! 5. Nothing is posted of a stopped transfer, to a peer that is not up, on a lost NIC or a broken path.
//!
//! What becomes of the pieces on a path that breaks is told in `paths`. `small` is the shortest way of
//! writes that are one piece.
//!
//! The tests enumerate small groups against 1 to 5; `verification/` explores this very type, which
//! is `Clone + Eq + Hash` when its storage is.

mod list;
mod paths;
mod slot;
mod small;
#[cfg(test)]
mod tests;

pub use paths::{AskError, LostSlot, NOTES_PER_PEER, Receipts};
pub use slot::{PeerSlot, Storage, Token, TransferSlot};

use core::fmt;
use core::marker::PhantomData;
use core::num::{NonZeroU16, NonZeroU64};
use core::time::Duration;

use crate::id::{EngineId, MAX_NICS, NicIndex, PeerId, Time, TransferId};
use crate::imm::Imm;
use crate::nic::NicState;
use crate::peer::{self, DownReason, LivenessConfig, Peer, PeerState};
use crate::plan::{
    Checked, Next, PageList, PageRun, Piece, Plan, PlanError, PlanLimits, Request, RunLayout,
    TargetList, Whole,
};
use crate::receipt::Epoch;
use crate::region::MrDesc;
use list::{Line, NIL, Place, sole_of};
use paths::{Damaged, NoteEnd, Paths};
use slot::{
    Active, Credits, Depth, Drain, Lane, NicLinks, Outstanding, PeerEntry, PeerNic, PeerView,
    Queues, SlotState,
};

/// How long a transport may take to report what was in flight to a peer that was cut off, as a rule: one that replaces an endpoint for that waits two
/// seconds for each of the others, and may be at another replacement before.
const CUT_OFF_WITHIN: Duration = Duration::from_secs(5);

/// How long a drain deadline is at least when it is set anew: an end to waiting, not a busy loop.
const MIN_FORCE_INTERVAL: Duration = Duration::from_millis(1);

/// What a piece costs of a turn at least, whatever its size.
const MIN_TURN_COST_BYTES: u64 = 256;

/// One piece of work, as a provider posts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkRequest {
    /// To be given back with the completion.
    pub token: Token,
    /// NIC to post on.
    pub nic: NicIndex,
    /// NIC of the peer that it goes to.
    pub remote_nic: NicIndex,
    /// The peer.
    pub peer: PeerId,
    /// Address of the first byte here. Of a run, that of page number 0.
    pub src: u64,
    /// Key of the source region on `nic`.
    pub src_key: u64,
    /// Address of the first byte there. Of a run, that of page number 0.
    pub dst: u64,
    /// Key of the destination region on `remote_nic`.
    pub dst_key: u64,
    /// Bytes; zero for a bare immediate. Of a run, those of all its pages.
    pub len: u64,
    /// The pages that it is a run of, whose numbers [`DomainGroup::page_run`] tells; none if it is one range, as
    /// all are unless [`PlanLimits::pages_per_piece`] is above 1.
    pub run: PageRun,
    /// Immediate to deliver once the bytes are visible.
    pub imm: Option<Imm>,
}

impl WorkRequest {
    /// A piece, as it is posted on `nic`.
    #[inline(always)]
    #[must_use]
    pub const fn new(token: Token, nic: NicIndex, piece: &Piece) -> Self {
        Self {
            token,
            nic,
            remote_nic: piece.remote_nic,
            peer: piece.peer,
            src: piece.src,
            src_key: piece.src_key,
            dst: piece.dst,
            dst_key: piece.dst_key,
            len: piece.len,
            run: piece.run,
            imm: piece.imm,
        }
    }

    /// Whether all of the same write that goes between the same two NICs is to go by the same queue: see [`PageRun::BULK`].
    #[inline(always)]
    #[must_use]
    pub fn is_bulk(&self) -> bool {
        self.run == PageRun::BULK
    }

    /// The piece that it is, whoever posts it.
    #[inline(always)]
    #[must_use]
    pub const fn piece(&self) -> Piece {
        Piece {
            peer: self.peer,
            remote_nic: self.remote_nic,
            src: self.src,
            src_key: self.src_key,
            dst: self.dst,
            dst_key: self.dst_key,
            len: self.len,
            run: self.run,
            imm: self.imm,
        }
    }
}

/// Why a posted piece failed.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkError {
    /// The connection was aborted while the piece was in flight.
    Flushed,
    /// The peer went away.
    PeerGone,
    /// The peer's region is not what the descriptor says, or was withdrawn.
    RemoteAccess,
    /// The source region is not registered with this NIC.
    LocalAccess,
    /// The peer's host memory, which a GPU was to write to, cannot be pinned for it here.
    Unpinned,
    /// The peer's memory is a GPU's, and this engine was given none.
    NoGpus,
    /// The peer's memory is a GPU's, and the driver opens it for none of this engine's GPUs.
    Unopened,
    /// The GPU that has the source does not get at the peer's memory, though another of this engine's does.
    NotConnected,
    /// The device or the kernel said so: an `errno`, or the provider's own number.
    Device(i32),
}

impl fmt::Display for WorkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flushed => f.write_str("the connection was aborted with the piece in flight"),
            Self::PeerGone => f.write_str("the peer went away"),
            Self::RemoteAccess => f.write_str("the peer refused access: its region was withdrawn or is not what the descriptor says"),
            Self::LocalAccess => f.write_str("the source region is not registered with this nic"),
            Self::Unpinned => f.write_str("the peer's host memory cannot be pinned for the gpu that has the source: the log has the driver's answer; a source in host memory needs no pinning"),
            Self::NoGpus => f.write_str("the peer's memory is a gpu's, and this engine was given none: name the gpu in `gpus` when it is built"),
            Self::Unopened => f.write_str("the peer's memory is a gpu's, and no gpu of this engine can open it: name one in `gpus` that has peer access to it, and see that `ulimit -n` leaves descriptors; the log has the driver's answer"),
            Self::NotConnected => f.write_str("the gpu that has the source has no peer access to the peer's gpu memory: `nvidia-smi topo -p2p r` says who reaches whom; write from a gpu that does, or go by way of host memory"),
            Self::Device(code) => write!(f, "the device reported error {code}"),
        }
    }
}

/// Why a transfer did not complete.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransferError {
    /// The caller cancelled it.
    Cancelled,
    /// Its deadline passed.
    DeadlineExceeded {
        /// Pieces that were in flight then.
        outstanding: u32,
        /// The peer, if it goes to one only, or all of these do; if there are none, whose turn it is.
        peer: Option<PeerId>,
    },
    /// A peer it goes to is gone.
    PeerDown {
        /// Which.
        peer: PeerId,
        /// Why.
        reason: DownReason,
    },
    /// A piece failed.
    Piece {
        /// The peer it went to.
        peer: PeerId,
        /// The NIC it was posted on.
        nic: NicIndex,
        /// Why.
        error: WorkError,
    },
    /// No healthy NIC is left to post the rest on.
    NoNic,
    /// A list of pages or targets yields other entries than when it was checked.
    ListChanged,
}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cancelled => f.write_str("cancelled"),
            Self::DeadlineExceeded { outstanding: 0, peer: Some(peer) } => {
                write!(
                    f,
                    "deadline exceeded with nothing in flight, and more to be posted to {peer}"
                )
            }
            Self::DeadlineExceeded { outstanding, peer: Some(peer) } => {
                write!(f, "deadline exceeded with {outstanding} pieces in flight to {peer}")
            }
            Self::DeadlineExceeded { outstanding, peer: None } => {
                write!(f, "deadline exceeded with {outstanding} pieces in flight")
            }
            Self::PeerDown { peer, reason } => write!(f, "{peer} is down: {reason}"),
            Self::Piece { peer, nic, error } => write!(f, "write to {peer} on nic {nic}: {error}"),
            Self::NoNic => f.write_str("no healthy nic is left"),
            Self::ListChanged => f.write_str("a list changed while a transfer referred to it"),
        }
    }
}

impl core::error::Error for TransferError {}

/// How a transfer ended. In every case its buffers are the caller's again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "only `Done` means that the bytes arrived"]
pub enum End {
    /// Everything was written and, where asked for, announced.
    Done,
    /// Nothing of it was ever posted.
    NeverStarted {
        /// Why.
        error: TransferError,
    },
    /// Some of it may have been written; nothing more will be.
    Quiesced {
        /// Why.
        error: TransferError,
    },
}

/// Why a request was not taken. Nothing was posted.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SubmitError {
    /// All slots are taken: poll events until a transfer has ended, then submit again.
    Full {
        /// Slots there are.
        capacity: usize,
    },
    /// There is no such peer, or no longer.
    NoSuchPeer {
        /// As named by the request.
        peer: PeerId,
    },
    /// The peer is going away.
    PeerDown {
        /// Which.
        peer: PeerId,
        /// Why.
        reason: DownReason,
    },
    /// A descriptor belongs to another engine than the peer it is used with.
    WrongOwner {
        /// The peer.
        peer: PeerId,
        /// The engine that the peer is.
        expected: EngineId,
        /// The engine whose memory the descriptor describes.
        found: EngineId,
    },
    /// The request cannot be planned.
    Plan(PlanError),
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full { capacity } => write!(f, "all {capacity} transfer slots are in use"),
            Self::NoSuchPeer { peer } => write!(f, "there is no {peer}"),
            Self::PeerDown { peer, reason } => write!(f, "{peer} is down: {reason}"),
            Self::WrongOwner { peer, expected, found } => {
                write!(
                    f,
                    "{peer} is engine {expected}, but the descriptor belongs to engine {found}"
                )
            }
            Self::Plan(error) => write!(f, "{error}"),
        }
    }
}

impl core::error::Error for SubmitError {}

/// A request that was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected<P, T> {
    /// Why.
    pub error: SubmitError,
    /// The request, if it may be submitted again later: with [`SubmitError::Full`].
    pub request: Option<Checked<P, T>>,
}

/// What the caller of a transfer may choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Options {
    /// When to give up; [`Time::NEVER`] for never.
    pub deadline: Time,
    /// Given back with the end.
    pub user: u64,
}

/// One NIC of the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NicConfig {
    /// Speed and health.
    pub state: NicState,
    /// Pieces of transfers that may be in flight on it.
    pub queue_depth: u16,
    /// What it takes in a piece.
    pub takes: PieceLimits,
}

/// What one NIC takes in a piece. [`GroupConfig::limits`] bounds it further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PieceLimits {
    /// The longest message.
    pub max_message_bytes: NonZeroU64,
    /// Pages that it may carry without being adjacent; 1 if it takes no runs.
    pub pages_per_piece: NonZeroU16,
}

impl PieceLimits {
    /// Whatever the group allows.
    pub const ANY: Self =
        Self { max_message_bytes: NonZeroU64::MAX, pages_per_piece: NonZeroU16::MAX };

    fn bound(self, limits: PlanLimits) -> PlanLimits {
        PlanLimits {
            max_message_bytes: limits.max_message_bytes.min(self.max_message_bytes),
            pages_per_piece: limits.pages_per_piece.min(self.pages_per_piece),
            rule: limits.rule,
        }
    }
}

/// How a group schedules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupConfig {
    /// How transfers are cut, where the NICs do not take less: those that lead to its peer, or, if it has several
    /// peers, any.
    pub limits: PlanLimits,
    /// For each of our NICs those of a peer's to which no path leads, a bit each, whoever the peer is: NICs of two
    /// networks, say. Not the same as broken: nobody waits for them. Usually none.
    pub unreached: [u8; MAX_NICS],
    /// Pieces of transfers that may be in flight to one peer over one NIC. A peer that is gone holds so many at
    /// most, until that is known.
    pub peer_depth: u16,
    /// Single writes up to this size go by the latency lane, as immediates and barriers do.
    pub latency_bytes: u64,
    /// Credits of each NIC, and of each peer, that bulk transfers leave alone.
    pub latency_reserve: u16,
    /// Bytes that a bulk transfer posts on a NIC before it is the next one's turn.
    pub turn_bytes: u64,
    /// How long a stopped transfer's pieces may take to complete before they are forced.
    pub drain: Duration,
    /// When a peer counts as gone.
    pub liveness: LivenessConfig,
}

/// Why a group cannot be made.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConfigError {
    /// There must be 1 to [`MAX_NICS`] NICs.
    NicCount {
        /// How many were given.
        found: usize,
    },
    /// Storage for transfers or peers is empty, or has more slots than an index can name.
    Capacity {
        /// How many slots were lent.
        found: usize,
    },
    /// `latency_reserve` leaves bulk transfers no credit.
    ReserveTooLarge {
        /// Credits kept back.
        reserve: u16,
        /// The smallest of the depths it is taken from.
        depth: u16,
    },
    /// Storage for pieces lost with a path is neither empty nor enough for all that can be in flight.
    LostSlots {
        /// How many slots were lent.
        found: usize,
        /// The queue depths of all NICs.
        needed: usize,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NicCount { found } => {
                write!(f, "{found} nics given, 1 to {MAX_NICS} are possible")
            }
            Self::Capacity { found } => write!(f, "{found} slots lent, 1 to {} are possible", NIL),
            Self::ReserveTooLarge { reserve, depth } => {
                write!(f, "a latency reserve of {reserve} leaves nothing of a depth of {depth}")
            }
            Self::LostSlots { found, needed } => {
                write!(f, "{found} slots lent for lost pieces, {needed} can be in flight")
            }
        }
    }
}

impl core::error::Error for ConfigError {}

/// What a peer says of itself when it connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Answer<'a> {
    /// Its NICs.
    pub nics: &'a [NicState],
    /// Where zero-byte immediates to it point.
    pub control: MrDesc,
    /// How often it wants to hear from us.
    pub heartbeat: Duration,
}

/// All peer slots are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeersFull {
    /// Slots there are.
    pub capacity: usize,
}

impl fmt::Display for PeersFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "all {} peer slots are in use", self.capacity)
    }
}

impl core::error::Error for PeersFull {}

/// What has become of something, or is to be done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// A transfer is over; its slot is free again.
    Ended {
        /// Which.
        id: TransferId,
        /// From [`Options::user`].
        user: u64,
        /// How.
        end: End,
    },
    /// Force every piece in flight to this peer to a completion, be it a failure.
    Abort {
        /// Which.
        peer: PeerId,
    },
    /// The peer has not heard of us for a while: send it something, or call [`DomainGroup::beat`].
    Heartbeat {
        /// Which.
        peer: PeerId,
    },
    /// Drop the connection: report what is in flight as failed, and forget the peer.
    Disconnect {
        /// Which.
        peer: PeerId,
    },
    /// The peer asks what arrived over the path from its NIC `from` to ours `to`. See to it that nothing
    /// more does, lay the answer out, and call [`DomainGroup::handle_fenced`] or
    /// [`DomainGroup::handle_unsettled`].
    Fence {
        /// Which.
        peer: PeerId,
        /// Its NIC.
        from: NicIndex,
        /// Ours.
        to: NicIndex,
        /// To be repeated in the answer.
        epoch: Epoch,
    },
    /// The peer answered what arrived over a broken path: if its answer is of this epoch, report each
    /// piece that was in flight on the path, then call [`DomainGroup::handle_settled`] or
    /// [`DomainGroup::handle_unsettled`].
    Settle {
        /// Which.
        peer: PeerId,
        /// Our NIC.
        nic: NicIndex,
        /// The peer's.
        remote_nic: NicIndex,
        /// What was asked.
        epoch: Epoch,
    },
    /// The peer's state changed. After [`PeerState::Down`] the identifier names nobody.
    Peer {
        /// Which.
        peer: PeerId,
        /// Its state now.
        state: PeerState,
    },
}

/// One NIC's queues and credits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Nic {
    config: NicConfig,
    credits: Credits,
    lanes: Queues,
    /// What is left of the first bulk transfer's turn.
    turn_left: u64,
    /// What the transport said last.
    alive: bool,
    /// The caller has taken it out of use, whatever the transport says.
    withheld: bool,
}

impl Nic {
    const ABSENT: Self = Self {
        config: NicConfig {
            state: NicState { speed: 0, healthy: false },
            queue_depth: 0,
            takes: PieceLimits::ANY,
        },
        credits: Credits::NONE_USED,
        lanes: Queues::EMPTY,
        turn_left: 0,
        alive: false,
        withheld: false,
    };

    /// One without speed counts as not healthy, from the beginning.
    const fn usable(&self) -> bool {
        self.config.state.healthy
    }
}

/// The scheduler of one device's NICs. See the [module](self).
///
/// `TS` and `PS` are the storage for transfers and peers, `P` and `T` the lists that requests carry, and
/// `LS` is for pieces lost with a path: without any, they are not posted again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DomainGroup<P, T, TS, PS, LS = [LostSlot; 0]> {
    config: GroupConfig,
    /// How what may go over any NIC is cut.
    common: PlanLimits,
    nics: [Nic; MAX_NICS],
    nic_count: NicIndex,
    transfers: TS,
    peers: PS,
    /// Pieces that are set aside are the first `lost_count`.
    lost: LS,
    lost_count: usize,
    /// Pieces set aside, and peers that a note can be posted to: nothing, but in trouble and for a heartbeat.
    aside: usize,
    free: Line,
    ended: Line,
    dirty: u16,
    /// Advances with each transfer, so that small ones spread over the NICs.
    turn: u32,
    /// No transfer and no peer wants attention before this instant.
    next_timeout: Time,
    active: usize,
    /// Writes up to this size are one piece on every route.
    express_bytes: u64,
    /// Those up to this one go by the latency lane as well.
    small_bytes: u64,
    lists: PhantomData<(P, T)>,
}

impl<P, T, TS, PS> DomainGroup<P, T, TS, PS>
where
    P: PageList,
    T: TargetList,
    TS: Storage<TransferSlot<P, T>>,
    PS: Storage<PeerSlot>,
{
    /// A group of `nics`, with room for as many transfers and peers as there are slots lent. A piece that is
    /// lost with its path ends its transfer.
    ///
    /// # Errors
    ///
    /// [`ConfigError`]: what was given cannot work together.
    pub fn new(
        config: GroupConfig,
        nics: &[NicConfig],
        transfers: TS,
        peers: PS,
    ) -> Result<Self, ConfigError> {
        Self::with_failover(config, nics, transfers, peers, [])
    }
}

impl<P, T, TS, PS, LS> DomainGroup<P, T, TS, PS, LS>
where
    P: PageList,
    T: TargetList,
    TS: Storage<TransferSlot<P, T>>,
    PS: Storage<PeerSlot>,
    LS: Storage<LostSlot>,
{
    /// As [`DomainGroup::new`], with room for the pieces that are lost with a path and posted again on
    /// another: for as many as can be in flight, the sum of all queue depths.
    ///
    /// # Errors
    ///
    /// [`ConfigError`]: what was given cannot work together.
    pub fn with_failover(
        config: GroupConfig,
        nics: &[NicConfig],
        mut transfers: TS,
        mut peers: PS,
        mut lost: LS,
    ) -> Result<Self, ConfigError> {
        let nic_count = NicIndex::try_from(nics.len()).unwrap_or(NicIndex::MAX);
        if nics.is_empty() || nics.len() > MAX_NICS {
            return Err(ConfigError::NicCount { found: nics.len() });
        }
        for found in [transfers.as_ref().len(), peers.as_ref().len()] {
            if found == 0 || found > usize::from(NIL) {
                return Err(ConfigError::Capacity { found });
            }
        }
        let depths = nics.iter().map(|nic| nic.queue_depth);
        let depth = depths.min().unwrap_or(0).min(config.peer_depth);
        if config.latency_reserve >= depth {
            return Err(ConfigError::ReserveTooLarge { reserve: config.latency_reserve, depth });
        }
        let needed = nics.iter().map(|nic| usize::from(nic.queue_depth)).sum();
        let found = lost.as_ref().len();
        if found != 0 && found < needed {
            return Err(ConfigError::LostSlots { found, needed });
        }
        lost.as_mut().fill_with(LostSlot::new);
        let common = nics.iter().fold(config.limits, |limits, nic| nic.takes.bound(limits));
        let express_bytes = common.max_message_bytes.min(common.rule.min_piece_bytes).get();
        let mut all = [Nic::ABSENT; MAX_NICS];
        for (nic, own) in all.iter_mut().zip(nics) {
            nic.config = *own;
            nic.config.state.healthy &= own.state.speed > 0;
            nic.alive = nic.config.state.healthy;
            nic.turn_left = config.turn_bytes;
        }
        let mut free = Line::EMPTY;
        transfers.as_mut().fill_with(TransferSlot::new);
        peers.as_mut().fill_with(PeerSlot::new);
        for index in 0..transfers.as_ref().len() {
            let slots = transfers.as_mut();
            free.push_back(&mut NicLinks { slots, nic: 0 }, index_of(index));
        }
        Ok(Self {
            config,
            common,
            nics: all,
            nic_count,
            transfers,
            peers,
            lost,
            lost_count: 0,
            aside: 0,
            free,
            ended: Line::EMPTY,
            dirty: NIL,
            turn: 0,
            next_timeout: Time::NEVER,
            active: 0,
            express_bytes,
            small_bytes: express_bytes.min(config.latency_bytes),
            lists: PhantomData,
        })
    }

    // ---- peers ----

    /// A peer that the platform starts connecting to. Transfers to it may be submitted at once.
    ///
    /// `nics` are the peer's, as its address lists them.
    ///
    /// # Errors
    ///
    /// [`PeersFull`].
    pub fn add_peer(
        &mut self,
        now: Time,
        engine: EngineId,
        nics: &[NicState],
    ) -> Result<PeerId, PeersFull> {
        let machine = Peer::new(self.config.liveness, now);
        self.insert_peer(now, engine, nics, None, machine)
    }

    /// A peer that has connected to us, and is up.
    ///
    /// # Errors
    ///
    /// [`PeersFull`].
    pub fn accept_peer(
        &mut self,
        now: Time,
        engine: EngineId,
        answer: &Answer<'_>,
    ) -> Result<PeerId, PeersFull> {
        let machine = Peer::accepted(self.config.liveness, answer.heartbeat, now);
        self.insert_peer(now, engine, answer.nics, Some(answer.control), machine)
    }

    fn insert_peer(
        &mut self,
        now: Time,
        engine: EngineId,
        nics: &[NicState],
        control: Option<MrDesc>,
        machine: Peer,
    ) -> Result<PeerId, PeersFull> {
        let (own, unreached) = (self.nic_states(), self.config.unreached);
        let slots = self.peers.as_mut();
        let capacity = slots.len();
        let vacant = slots.iter_mut().enumerate().find(|(_, slot)| slot.entry.is_none());
        let Some((index, slot)) = vacant else {
            return Err(PeersFull { capacity });
        };
        let timeout = machine.next_timeout();
        let entry = slot.entry.insert(PeerEntry {
            engine,
            machine,
            nics: [NicState { speed: 0, healthy: false }; MAX_NICS],
            nic_count: 0,
            routes: None,
            control,
            over: [PeerNic::IDLE; MAX_NICS],
            last_progress: now,
            abort_wanted: false,
            sent: false,
            used: false,
            heard_use: false,
            stopped: false,
            pathless: false,
            withheld: false,
            paths: Paths::new(unreached),
        });
        entry.set_nics(nics, &own);
        let id = PeerId { index: index_of(index), generation: slot.generation };
        self.next_timeout = self.next_timeout.min(timeout);
        self.mark_dirty(id.index);
        Ok(id)
    }

    /// The peer answered: transfers that waited for it go. Ignored unless it is connecting.
    pub fn handle_connected(&mut self, now: Time, peer: PeerId, answer: &Answer<'_>) {
        let own = self.nic_states();
        let Some(entry) = self.peer_entry(peer) else {
            return;
        };
        if entry.machine.state() != PeerState::Connecting {
            return;
        }
        entry.control = Some(answer.control);
        entry.set_nics(answer.nics, &own);
        entry.machine.handle_connected(answer.heartbeat, now);
        self.after_peer_step(now, peer);
        self.routes_changed(now, peer.index);
    }

    /// The connection is gone. Pieces in flight must be reported as failed, before or after this.
    pub fn handle_disconnected(&mut self, now: Time, peer: PeerId, reason: DownReason) {
        let Some(entry) = self.peer_entry(peer) else {
            return;
        };
        entry.stopped = true;
        entry.machine.handle_disconnected(reason);
        self.after_peer_step(now, peer);
    }

    /// Nothing more is wanted of this peer: its transfers stop, its connection is dropped.
    pub fn remove_peer(&mut self, now: Time, peer: PeerId, reason: DownReason) {
        let Some(entry) = self.peer_entry(peer) else {
            return;
        };
        entry.machine.close(reason);
        self.after_peer_step(now, peer);
    }

    /// Something arrived from the peer: what says that it is used ([`Control::is_use`], and all immediates of users), or not.
    ///
    /// [`Control::is_use`]: crate::mailbox::Control::is_use
    pub fn handle_heard(&mut self, now: Time, peer: PeerId, used: bool) {
        let Some(entry) = self.peer_entry(peer) else {
            return;
        };
        let before = entry.machine.state();
        entry.machine.handle_heard(now);
        entry.heard_use |= used;
        if before != entry.machine.state() {
            self.after_peer_step(now, peer);
        }
    }

    /// The connection is of use for what the group does not know of, of ours or of the peer's.
    pub fn handle_used(&mut self, peer: PeerId) {
        set_used(self.peers.as_mut(), peer);
    }

    /// As [`DomainGroup::handle_used`], for whomever a request goes to that is yet to be submitted. O(targets).
    pub fn handle_awaited(&mut self, request: &Checked<P, T>) {
        let peers = self.peers.as_mut();
        let _ = each_peer(request.request(), |peer, _| {
            set_used(peers, peer);
            Ok::<_, core::convert::Infallible>(())
        });
    }

    /// Whether any transfer that has not ended goes there. O(transfers).
    pub(super) fn any_goes_to(&self, peer: PeerId) -> bool {
        let mut active = self.transfers.as_ref().iter().filter_map(TransferSlot::active_ref);
        active.any(|it| it.plan.goes_to(peer))
    }

    /// Nobody looked at the clock from `since` until `now`: what was heard in between may have come as late as that.
    pub fn handle_late(&mut self, since: Time, now: Time) {
        for entry in self.peers.as_mut().iter_mut().filter_map(|slot| slot.entry.as_mut()) {
            entry.machine.handle_late(since, now);
        }
    }

    /// The state of a peer; `None` once it is down, all of that was polled, and nothing is in flight.
    #[must_use]
    pub fn peer_state(&self, peer: PeerId) -> Option<PeerState> {
        self.view().entry(peer).map(|entry| entry.machine.state())
    }

    /// Whether what is sent to the peer goes somewhere: it is not down, whether that was polled yet or not, and there is a NIC to go by. If not, a request to
    /// it is refused, with [`SubmitError::PeerDown`], [`SubmitError::NoSuchPeer`] or [`PlanError::NoRoute`].
    #[must_use]
    pub fn reaches(&self, peer: PeerId) -> bool {
        self.view().entry(peer).is_some_and(|entry| entry.routes.is_some() && !entry.is_down())
    }

    /// The peers there are.
    pub fn peers(&self) -> impl Iterator<Item = (PeerId, EngineId, PeerState)> {
        self.peers.as_ref().iter().enumerate().filter_map(|(index, slot)| {
            let entry = slot.entry.as_ref()?;
            let id = PeerId { index: index_of(index), generation: slot.generation };
            Some((id, entry.engine, entry.machine.state()))
        })
    }

    /// Pieces in flight to `peer` over `nic`.
    #[must_use]
    pub fn in_flight(&self, peer: PeerId, nic: NicIndex) -> u16 {
        let view = self.view();
        let entry = view.entry(peer);
        entry.and_then(|entry| entry.over.get(usize::from(nic))).map_or(0, |over| over.in_flight)
    }

    /// Pieces of transfers in flight on `nic`, to whomever: those that were given out and have not been reported.
    #[must_use]
    #[inline]
    pub fn in_flight_on(&self, nic: NicIndex) -> u16 {
        self.nics.get(usize::from(nic)).map_or(0, |nic| nic.credits.used)
    }

    // ---- transfers ----

    /// Takes a request. It is posted as [`DomainGroup::poll_work`] is asked, and ends with an
    /// [`Event::Ended`].
    ///
    /// O(1) for single writes and pages, O(targets) for scatters and barriers.
    ///
    /// # Errors
    ///
    /// [`Rejected`] says why, and gives the request back if only room was lacking.
    #[expect(clippy::result_large_err, reason = "a refused request is given back, without a heap")]
    #[inline]
    pub fn submit(
        &mut self,
        request: Checked<P, T>,
        options: Options,
    ) -> Result<TransferId, Rejected<P, T>> {
        if let Request::Single(write) = request.request()
            && let Some(id) = self.submit_small(write, options)
        {
            return Ok(id);
        }
        self.submit_any(request, options)
    }

    /// As [`DomainGroup::submit`], for whatever request.
    #[expect(clippy::result_large_err, reason = "as above")]
    #[inline(never)]
    fn submit_any(
        &mut self,
        request: Checked<P, T>,
        options: Options,
    ) -> Result<TransferId, Rejected<P, T>> {
        let reject = |error| Rejected { error, request: None };
        self.check_peers(request.request()).map_err(reject)?;
        let Some(index) = self.free.first() else {
            let error = SubmitError::Full { capacity: self.transfers.as_ref().len() };
            return Err(Rejected { error, request: Some(request) });
        };
        let lane = self.lane_of(&request);
        self.turn = self.turn.wrapping_add(1);
        let view = PeerView(self.peers.as_ref());
        let unplanned = |error| reject(SubmitError::Plan(error));
        let limits = &self.limits_for(request.request());
        let whole = Whole::new(request.request(), limits, &view, self.turn).map_err(unplanned)?;
        let id = match whole {
            Some(whole) => {
                let mut plan = Plan::of(whole);
                if let Request::Single(write) = request.request()
                    && self.is_movable(&write.dst)
                {
                    plan.keep_whole(write);
                }
                self.begin(index, (plan, false), lane, options)
            }
            None => {
                let plan = Plan::long(request, *limits, &view, self.turn).map_err(unplanned)?;
                let several = plan.sole_peer().is_none();
                self.begin(index, (plan, several), lane, options)
            }
        };
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let idle = slot.and_then(TransferSlot::active).is_some_and(|it| it.plan.nic_mask() == 0);
        if idle {
            self.settle(index);
        } else {
            self.enqueue(index);
        }
        Ok(id)
    }

    /// How a request is cut: as every NIC takes it that may come to carry a piece of it.
    #[inline]
    fn limits_for(&self, request: &Request<P, T>) -> PlanLimits {
        let peer = match request {
            Request::Single(write) => write.peer,
            Request::Paged(write) => write.peer,
            _ => return self.common,
        };
        if self.config.unreached == [0; MAX_NICS] {
            return self.common;
        }
        let view = PeerView(self.peers.as_ref());
        let leads = |nic: usize| view.entry(peer).is_some_and(|entry| entry.may_reach(nic));
        let nics = self.nics.iter().take(self.nic_count.into()).enumerate();
        nics.filter(|(nic, _)| leads(*nic))
            .fold(self.config.limits, |limits, (_, nic)| nic.config.takes.bound(limits))
    }

    /// Whether a single piece can have another path than the one it was planned for, and needs its keys.
    #[inline(always)]
    const fn is_movable(&self, dst: &MrDesc) -> bool {
        self.nic_count > 1 || dst.keys.nics() > 1
    }

    /// Notes that a piece to this peer goes out on this NIC, and whether the peer will hear of it.
    fn charge(&mut self, peer: PeerId, nic: usize, imm: Option<Imm>) -> Option<&mut PeerNic> {
        let slot = self.peers.as_mut().get_mut(usize::from(peer.index))?;
        let entry = slot.entry.as_mut()?;
        entry.sent |= imm.is_some();
        let over = entry.over.get_mut(nic)?;
        over.in_flight = over.in_flight.saturating_add(1);
        Some(over)
    }

    /// Puts a plan, which may be for several peers, into slot `index`, the first that is free. Inlined, so that the plan is built in place.
    #[inline(always)]
    fn begin(
        &mut self,
        index: u16,
        (plan, several): (Plan<P, T>, bool),
        lane: Lane,
        options: Options,
    ) -> TransferId {
        let slots = self.transfers.as_mut();
        self.free.pop_front(&mut NicLinks { slots, nic: 0 });
        let Some(slot) = slots.get_mut(usize::from(index)) else {
            // `index` came from the list of free slots.
            return TransferId { index, generation: 0 };
        };
        slot.state = SlotState::Active(Active {
            plan,
            user: options.user,
            lane,
            // A constant is copied in two moves, eight places are written in eight.
            place: const { [Place::Nowhere; MAX_NICS] },
            outstanding: Outstanding::none(several),
            started: false,
            stop: None,
            failed: false,
            deadline: options.deadline,
            drain: Drain::No,
        });
        let id = TransferId { index, generation: slot.generation };
        self.active += 1;
        self.next_timeout = self.next_timeout.min(options.deadline);
        id
    }

    /// Stops a transfer: no more of it is posted. It ends when what is in flight has drained.
    ///
    /// Returns `false` if there is no such transfer any more.
    pub fn cancel(&mut self, now: Time, id: TransferId) -> bool {
        let known = self.is_active(id);
        if known {
            self.stop(now, id.index, TransferError::Cancelled);
        }
        known
    }

    /// What [`DomainGroup::handle_timeout`] does for one transfer, and for nothing else: it is stopped if its deadline is over. For whoever knows
    /// the time, but has not listened to peers for as long.
    pub fn handle_deadline(&mut self, now: Time, id: TransferId) {
        if self.is_active(id) {
            self.transfer_timeout(now, id.index);
        }
    }

    /// Whether the transfer was stopped, and waits for what is in flight of it: of any other, what was not written yet may still be.
    #[must_use]
    pub fn is_stopped(&self, id: TransferId) -> bool {
        let slot = self.transfers.as_ref().get(usize::from(id.index));
        let slot = slot.filter(|slot| slot.generation == id.generation);
        slot.and_then(TransferSlot::active_ref).is_some_and(|active| active.stop.is_some())
    }

    /// Whether `nic` has something that might be posted now. Cheap: for idle loops.
    #[must_use]
    pub fn has_work(&self, nic: NicIndex) -> bool {
        let nic = self.nics.get(usize::from(nic));
        nic.is_some_and(|nic| (!nic.lanes.is_empty() || self.aside > 0) && nic.usable())
    }

    /// Transfers that have not ended, or whose end has not been polled.
    #[must_use]
    pub const fn active(&self) -> usize {
        self.active
    }

    /// The next piece to post on `nic`; `None` if there is none, or no credit for it.
    ///
    /// The piece counts as in flight from here on: it must be posted, and its completion reported,
    /// be it as failed. O(1), but that each transfer found to have no credit with its peer, or nothing
    /// left for this NIC, is put aside first; that happens to it once for each credit it is handed.
    pub fn poll_work(&mut self, nic: NicIndex) -> Option<WorkRequest> {
        let state = self.nics.get(usize::from(nic)).filter(|nic| nic.usable())?;
        let (order, lanes) = (state.credits.order(), state.lanes);
        if self.aside > 0 {
            return self.poll_with_aside(nic);
        }
        for lane in order {
            if !lanes.is_empty_lane(lane) {
                let work = self.poll_lane(nic, lane);
                if work.is_some() {
                    return work;
                }
            }
        }
        None
    }

    /// Gives `take` what [`DomainGroup::poll_work`] would return: the same pieces in the same order, until
    /// there are `pieces`, or `bytes` together, or none is left to post now. Runs of pages, and small writes,
    /// cost half of what they do one by one.
    pub fn poll_batch(
        &mut self,
        nic: NicIndex,
        pieces: usize,
        bytes: u64,
        take: impl FnMut(WorkRequest),
    ) {
        let more = |group: &Self, room: Room| group.has_work(nic) && room.is_some();
        let mut room = Room { pieces, bytes };
        // Asked before anything else: most NICs have nothing most of the time.
        if !more(self, room) {
            return;
        }
        let mut take = take;
        loop {
            if let Some(len) = self.poll_small(nic, false, &mut take) {
                room.use_up(len);
            } else if let Some(left) = self.poll_any(nic, room, &mut take) {
                room = left;
            } else {
                return;
            }
            if !more(self, room) {
                return;
            }
        }
    }

    /// What a run of pages that was polled is made of: copies the numbers of its pages into the first
    /// [`PageRun::count`] of `src` and of `dst`, in the order in which the two sides correspond, and returns
    /// where pages of which number lie. O(pages).
    ///
    /// `None`, whatever the slices hold then, if the work is no run, a slice is too short, its transfer has ended,
    /// or a list yields less than it did: such a piece is to be reported as failed.
    #[must_use]
    pub fn page_run(
        &self,
        work: &WorkRequest,
        src: &mut [u32],
        dst: &mut [u32],
    ) -> Option<RunLayout> {
        let id = work.token.transfer();
        let slot = self.transfers.as_ref().get(usize::from(id.index))?;
        let active = slot.active_ref().filter(|_| slot.generation == id.generation)?;
        active.plan.page_run(work.run, src, dst)
    }

    /// Gives `take` whatever is the next piece, and the pages that follow it. Returns the room that is left;
    /// `None` if there is no piece.
    #[inline(never)]
    fn poll_any(
        &mut self,
        nic: NicIndex,
        mut room: Room,
        take: &mut impl FnMut(WorkRequest),
    ) -> Option<Room> {
        if let Some(len) = self.poll_small(nic, true, take) {
            room.use_up(len);
            return Some(room);
        }
        let work = self.poll_work(nic)?;
        room.use_up(work.len);
        take(work);
        self.poll_pages(nic, work.token.transfer(), &mut room, take);
        Some(room)
    }

    /// Further pages of a transfer that has just had a piece, as long as nobody else's turn comes.
    #[inline]
    fn poll_pages(
        &mut self,
        nic: NicIndex,
        id: TransferId,
        room: &mut Room,
        take: &mut impl FnMut(WorkRequest),
    ) {
        let (at, lane, index) = (usize::from(nic), Lane::Bulk, id.index);
        let (reserve, peer_depth) = (self.config.latency_reserve, self.peer_depth());
        let first = |nic: &&mut Nic| {
            nic.lanes.is_empty_lane(Lane::Latency) && nic.lanes.first(lane) == Some(index)
        };
        let Some(state) = self.nics.get_mut(at).filter(first) else {
            return;
        };
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some(active) = slot.and_then(TransferSlot::active) else {
            return;
        };
        // A credit that was granted is another story.
        let queued = active.place.get(at) == Some(&Place::Lane);
        let Some(peer) = active.plan.sole_peer().filter(|_| queued && self.aside == 0) else {
            return;
        };
        let slot = self.peers.as_mut().get_mut(usize::from(peer.index));
        let entry = slot.filter(|slot| slot.generation == peer.generation);
        let entry = entry.and_then(|slot| slot.entry.as_mut()).filter(|entry| entry.is_open());
        let Some(entry) = entry else {
            return;
        };
        let Some(over) = entry.over.get_mut(at).filter(|over| !over.damaged) else {
            return;
        };
        let depth = Depth { all: state.config.queue_depth, reserve };
        let credits = state.credits.room(lane, depth).min(over.credits.room(lane, peer_depth));
        if credits == 0 || !room.is_some() {
            return;
        }
        let (mut taken, mut turn_left, mut heard) = (0_u16, state.turn_left, false);
        active.plan.pages(nic, |piece| {
            taken = taken.saturating_add(1);
            heard |= piece.imm.is_some();
            turn_left = turn_left.saturating_sub(piece.len.max(MIN_TURN_COST_BYTES));
            room.use_up(piece.len);
            take(work_of(id, nic, piece));
            taken < credits && turn_left > 0 && room.is_some()
        });
        if taken == 0 {
            return;
        }
        entry.sent |= heard;
        over.in_flight = over.in_flight.saturating_add(taken);
        over.credits.take_bulk(taken);
        state.credits.take_bulk(taken);
        active.outstanding.add(peer.index, taken);
        if !active.plan.has_work(nic) {
            self.withdraw(index, at);
        } else if turn_left > 0 {
            state.turn_left = turn_left;
        } else {
            state.turn_left = self.config.turn_bytes;
            self.rotate(at, lane, index);
        }
    }

    #[inline]
    fn poll_lane(&mut self, nic: NicIndex, lane: Lane) -> Option<WorkRequest> {
        let at = usize::from(nic);
        let reserve = self.config.latency_reserve;
        let peer_depth = self.peer_depth();
        loop {
            let state = self.nics.get_mut(at)?;
            let depth = Depth { all: state.config.queue_depth, reserve };
            let index = state.lanes.first(lane)?;
            if !state.credits.left(lane, depth) {
                return None;
            }
            let slot = self.transfers.as_mut().get_mut(usize::from(index))?;
            let id = TransferId { index, generation: slot.generation };
            let active = slot.active()?;
            let place = active.place.get_mut(at)?;
            let view = PeerView(self.peers.as_ref());
            let granted_to = match *place {
                Place::Granted(peer) => Some(peer),
                _ => None,
            };
            let admit = |peer: PeerId| {
                let over = view.over(peer, at).filter(|over| !over.damaged);
                granted_to == Some(peer.index) && over.is_some()
                    || over.is_some_and(|over| over.credits.left(lane, peer_depth))
            };
            let piece = match active.plan.next_if(nic, &view, admit) {
                Next::Piece(piece) => piece,
                Next::Nothing => {
                    let rest = active.plan.has_work(nic);
                    self.withdraw(index, at);
                    if rest {
                        self.stop_untimed(index, TransferError::ListChanged);
                    }
                    continue;
                }
                Next::Refused(peer) => {
                    if view.over(peer, at).is_some_and(|over| over.damaged) {
                        match self.poll_damaged(index, nic, peer) {
                            Damaged::Wait => {}
                            Damaged::Moved => continue,
                            Damaged::Piece(work) => return Some(work),
                        }
                    }
                    self.block(index, at, lane, peer.index);
                    continue;
                }
                Next::Impossible(peer) => {
                    let error = TransferError::Piece { peer, nic, error: WorkError::RemoteAccess };
                    self.stop_untimed(index, error);
                    continue;
                }
            };
            let peer = piece.peer;
            let granted = granted_to == Some(peer.index);
            // A grant of another peer's is kept until its piece comes up.
            if granted {
                *place = Place::Lane;
            }
            active.outstanding.add(peer.index, 1);
            active.started = true;
            state.credits.take(lane);
            let left = active.plan.has_work(nic);
            let over = self.charge(peer, at, piece.imm).filter(|_| !granted);
            if let Some(over) = over {
                over.credits.take(lane);
            }
            if left {
                self.take_turn(at, lane, index, piece.len);
            } else {
                self.withdraw(index, at);
            }
            return Some(work_of(id, nic, &piece));
        }
    }

    /// Lets the next transfer of the lane have its turn when this one's is used up.
    fn take_turn(&mut self, nic: usize, lane: Lane, index: u16, len: u64) {
        let turn_bytes = self.config.turn_bytes;
        let Some(state) = self.nics.get_mut(nic) else {
            return;
        };
        if lane == Lane::Bulk {
            let left = state.turn_left.saturating_sub(len.max(MIN_TURN_COST_BYTES));
            state.turn_left = if left == 0 { turn_bytes } else { left };
            if left != 0 {
                return;
            }
        }
        self.rotate(nic, lane, index);
    }

    /// Moves the first transfer of a lane behind the others.
    fn rotate(&mut self, nic: usize, lane: Lane, index: u16) {
        let Some(state) = self.nics.get_mut(nic) else {
            return;
        };
        let queue = state.lanes.of(lane);
        if !queue.is_single() {
            let slots = self.transfers.as_mut();
            let mut links = NicLinks { slots, nic };
            queue.remove(&mut links, index);
            queue.push_back(&mut links, index);
        }
    }

    /// A posted piece completed, or failed. Returns `false` for a token that names nothing in flight,
    /// which is a provider's fault; nothing changes then.
    pub fn handle_completion(
        &mut self,
        now: Time,
        nic: NicIndex,
        token: Token,
        outcome: Result<(), WorkError>,
    ) -> bool {
        let id = token.transfer();
        let at = usize::from(nic);
        let slot = self.transfers.as_mut().get_mut(usize::from(id.index));
        let active =
            slot.filter(|slot| slot.generation == id.generation).and_then(TransferSlot::active);
        let Some(active) = active.filter(|active| active.outstanding.count() > 0) else {
            let end = outcome.map_or_else(NoteEnd::Failed, |()| NoteEnd::Arrived);
            return self.note_ended(now, nic, token, end);
        };
        let peer_index = token.peer_index();
        let peer_slot = self.peers.as_mut().get_mut(usize::from(peer_index));
        let Some(peer_slot) = peer_slot else {
            return false;
        };
        let peer = PeerId { index: peer_index, generation: peer_slot.generation };
        let Some(entry) = peer_slot.entry.as_mut() else {
            return false;
        };
        let over = entry.over.get_mut(at).filter(|over| over.in_flight > 0);
        let Some(over) = over else {
            return false;
        };
        over.in_flight -= 1;
        over.credits.give_back(active.lane);
        let waited_for = !over.waiting.is_empty();
        entry.last_progress = now;
        entry.used = true;
        let gone = entry.stopped && entry.quiet();
        active.outstanding.remove(peer_index);
        let drained = active.outstanding.count() == 0;
        if let Some(state) = self.nics.get_mut(at) {
            state.credits.give_back(active.lane);
        }
        if let Err(error) = outcome {
            active.failed = true;
            self.stop(now, id.index, TransferError::Piece { peer, nic, error });
        } else if drained {
            self.settle(id.index);
        }
        if waited_for {
            self.grant(peer_index, at);
        }
        if gone {
            self.mark_dirty(peer_index);
        }
        true
    }

    // ---- time ----

    /// When [`DomainGroup::handle_timeout`] wants to be called next; [`Time::NEVER`] if never.
    #[must_use]
    pub const fn poll_timeout(&self) -> Time {
        self.next_timeout
    }

    /// Time has passed. O(1) before [`DomainGroup::poll_timeout`]; O(transfers and their targets, and peers) after.
    pub fn handle_timeout(&mut self, now: Time) {
        if now < self.next_timeout {
            return;
        }
        self.next_timeout = Time::NEVER;
        self.note_use();
        let beats = self.peers.as_ref().iter().any(|slot| {
            let entry = slot.entry.as_ref();
            entry.is_some_and(|entry| !entry.sent && entry.machine.is_beat_due(now))
        });
        for index in 0..self.peers.as_ref().len() {
            self.peer_timeout(now, index_of(index), beats);
        }
        for index in 0..self.transfers.as_ref().len() {
            self.transfer_timeout(now, index_of(index));
        }
    }

    /// Whoever a transfer goes to that has not ended is of use, be it that nothing of it was posted yet.
    fn note_use(&mut self) {
        let peers = self.peers.as_mut();
        for active in self.transfers.as_ref().iter().filter_map(TransferSlot::active_ref) {
            active.plan.each_peer(|peer| set_used(peers, peer));
        }
    }

    /// `beats` tells that the heartbeat of some peer goes now.
    fn peer_timeout(&mut self, now: Time, index: u16, beats: bool) {
        let Some(slot) = self.peers.as_mut().get_mut(usize::from(index)) else {
            return;
        };
        let peer = PeerId { index, generation: slot.generation };
        let Some(entry) = slot.entry.as_mut() else {
            return;
        };
        if entry.is_down() {
            return;
        }
        if core::mem::take(&mut entry.sent) {
            entry.machine.handle_sent(now);
        }
        // From now on: the clock may not have been looked at since.
        if core::mem::take(&mut entry.heard_use) | entry.used {
            entry.machine.handle_used(now);
        }
        if core::mem::take(&mut entry.used) {
            entry.paths.tell_use();
        }
        entry.machine.handle_timeout(now);
        if beats {
            entry.machine.beat_along(now);
        }
        self.after_peer_step(now, peer);
        let paths = self.paths_timeout(now, peer);
        if let Some(entry) = self.peer_entry(peer) {
            let next = entry.machine.next_timeout();
            self.next_timeout = self.next_timeout.min(next).min(paths);
        }
    }

    fn transfer_timeout(&mut self, now: Time, index: u16) {
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some(active) = slot.and_then(TransferSlot::active) else {
            return;
        };
        if active.next_timeout() <= now {
            let outstanding = active.outstanding.count();
            match active.drain {
                Drain::No => {
                    let late = active.outstanding.sole_peer();
                    let to = |index: u16| {
                        let slot = self.peers.as_ref().get(usize::from(index))?;
                        Some(PeerId { index, generation: slot.generation })
                    };
                    // What is not posted waits for who has no room, or is not there yet.
                    let awaited =
                        || sole_of(active.place.iter().filter_map(|place| place.blocked()));
                    let late = if outstanding == 0 { awaited() } else { late };
                    let peer = active.plan.sole_peer().or_else(|| late.and_then(to));
                    self.stop(now, index, TransferError::DeadlineExceeded { outstanding, peer });
                }
                Drain::Begins => {
                    let until = now.after(self.config.drain);
                    active.drain = Drain::Waiting { since: now, until };
                }
                Drain::Waiting { since, .. } => self.force(now, index, since, None),
                Drain::Forced { since, began, .. } => self.force(now, index, since, Some(began)),
            }
        }
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        if let Some(active) = slot.and_then(TransferSlot::active) {
            self.next_timeout = self.next_timeout.min(active.next_timeout());
        }
    }

    // ---- NICs ----

    /// The transport has lost a NIC, or has it back. What was not posted yet on a lost one moves to the others; what is
    /// in flight on it must be reported as completed or failed. One that the caller has taken out of use stays so.
    pub fn set_nic_health(&mut self, now: Time, nic: NicIndex, healthy: bool) {
        self.judge_nic(now, nic, |state| state.alive = healthy);
    }

    /// The caller takes a NIC out of use, or back into it, as far as the transport has it.
    pub fn set_nic_use(&mut self, now: Time, nic: NicIndex, used: bool) {
        self.judge_nic(now, nic, |state| state.withheld = !used);
    }

    fn judge_nic(&mut self, now: Time, nic: NicIndex, told: impl FnOnce(&mut Nic)) {
        let Some(state) = self.nics.get_mut(usize::from(nic)) else {
            return;
        };
        told(state);
        let healthy = state.alive && !state.withheld && state.config.state.speed > 0;
        if nic >= self.nic_count || state.config.state.healthy == healthy {
            return;
        }
        state.config.state.healthy = healthy;
        for index in 0..self.peers.as_ref().len() {
            self.routes_changed(now, index_of(index));
        }
        if !healthy {
            for index in 0..self.transfers.as_ref().len() {
                self.evacuate(now, index_of(index), nic);
            }
            self.stop_stranded(now);
        }
    }

    /// Moves what is not posted yet of a transfer from a lost NIC to the next healthy one, with what
    /// may still follow there. Stops the transfer if that cannot be, unless nothing is left to post.
    fn evacuate(&mut self, now: Time, index: u16, lost: NicIndex) {
        self.withdraw(index, usize::from(lost));
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some(active) = slot.and_then(TransferSlot::active) else {
            return;
        };
        if active.stop.is_some() {
            return;
        }
        // Those first that lead where it did.
        let unreached = |nic: NicIndex| self.config.unreached.get(usize::from(nic));
        let alike = |nic: &NicIndex| unreached(*nic) == unreached(lost);
        let all = || others(lost, self.nic_count);
        let mut others = all().filter(alike).chain(all().filter(|nic| !alike(nic)));
        let usable = |nic: NicIndex| self.nics.get(usize::from(nic)).is_some_and(Nic::usable);
        let left = active.plan.nic_mask() & (1 << lost) != 0;
        if others.any(|nic| usable(nic) && active.plan.reroute(lost, nic)) {
            self.enqueue(index);
        } else if left {
            self.stop(now, index, TransferError::NoNic);
        }
    }

    // ---- events ----

    /// What happened, or is to be done, next; `None` when all has been told.
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(event) = self.poll_peer_event() {
            return Some(event);
        }
        let slots = self.transfers.as_mut();
        let index = self.ended.pop_front(&mut NicLinks { slots, nic: 0 })?;
        let slot = slots.get_mut(usize::from(index))?;
        let SlotState::Ended { user, end } = slot.state else {
            return None;
        };
        let id = TransferId { index, generation: slot.generation };
        slot.state = SlotState::Free;
        slot.generation = slot.generation.wrapping_add(1);
        self.active = self.active.saturating_sub(1);
        // The next to be taken, while it is in the caches.
        self.free.push_front(&mut NicLinks { slots, nic: 0 }, index);
        Some(Event::Ended { id, user, end })
    }

    fn poll_peer_event(&mut self) -> Option<Event> {
        while self.dirty != NIL {
            let index = self.dirty;
            let slot = self.peers.as_mut().get_mut(usize::from(index))?;
            let peer = PeerId { index, generation: slot.generation };
            let event = slot.entry.as_mut().and_then(|entry| next_peer_event(peer, entry));
            if event.is_some() {
                return event;
            }
            let gone = slot.entry.as_ref().is_some_and(|entry| entry.stopped && entry.quiet());
            let down = slot.entry.as_ref().is_some_and(PeerEntry::is_down);
            if gone && down {
                slot.entry = None;
                slot.generation = slot.generation.wrapping_add(1);
            }
            let next = slot.next_dirty;
            slot.next_dirty = NIL;
            self.dirty = if next == index { NIL } else { next };
        }
        None
    }

    // ---- inside ----

    fn view(&self) -> PeerView<'_> {
        PeerView(self.peers.as_ref())
    }

    fn peer_entry(&mut self, peer: PeerId) -> Option<&mut PeerEntry> {
        let slot = self.peers.as_mut().get_mut(usize::from(peer.index))?;
        if slot.generation != peer.generation {
            return None;
        }
        slot.entry.as_mut()
    }

    /// Our NICs; those that there are not are unusable.
    fn nic_states(&self) -> [NicState; MAX_NICS] {
        self.nics.map(|nic| nic.config.state)
    }

    const fn peer_depth(&self) -> Depth {
        Depth { all: self.config.peer_depth, reserve: self.config.latency_reserve }
    }

    fn is_active(&mut self, id: TransferId) -> bool {
        let slot = self.transfers.as_mut().get_mut(usize::from(id.index));
        slot.is_some_and(|slot| slot.generation == id.generation && slot.active().is_some())
    }

    fn lane_of(&self, request: &Checked<P, T>) -> Lane {
        match request.request() {
            Request::Imm(_) | Request::Control(_) | Request::Barrier(_) => Lane::Latency,
            Request::Single(write) if write.len <= self.config.latency_bytes => Lane::Latency,
            _ => Lane::Bulk,
        }
    }

    /// Every peer of the request is there, and its descriptors are that peer's.
    fn check_peers(&self, request: &Request<P, T>) -> Result<(), SubmitError> {
        let view = self.view();
        each_peer(request, |peer, desc| {
            let entry = view.entry(peer).ok_or(SubmitError::NoSuchPeer { peer })?;
            if let PeerState::Down(reason) = entry.machine.state() {
                return Err(SubmitError::PeerDown { peer, reason });
            }
            match desc {
                Some(desc) if desc.owner != entry.engine => {
                    Err(SubmitError::WrongOwner { peer, expected: entry.engine, found: desc.owner })
                }
                _ => Ok(()),
            }
        })
    }

    fn mark_dirty(&mut self, index: u16) {
        let head = self.dirty;
        let Some(slot) = self.peers.as_mut().get_mut(usize::from(index)) else {
            return;
        };
        if slot.next_dirty == NIL {
            slot.next_dirty = if head == NIL { index } else { head };
            self.dirty = index;
        }
    }

    /// After the peer's machine moved: tell what there is to tell, and stop what cannot go on.
    fn after_peer_step(&mut self, now: Time, peer: PeerId) {
        self.mark_dirty(peer.index);
        self.count_notes(peer.index);
        let Some(entry) = self.peer_entry(peer) else {
            return;
        };
        entry.withhold();
        let timeout = entry.machine.next_timeout();
        let state = entry.machine.state();
        self.next_timeout = self.next_timeout.min(timeout);
        let PeerState::Down(reason) = state else {
            return;
        };
        for index in 0..self.transfers.as_ref().len() {
            let index = index_of(index);
            let slot = self.transfers.as_mut().get_mut(usize::from(index));
            let Some(active) = slot.and_then(TransferSlot::active) else {
                continue;
            };
            if active.stop.is_none() && active.plan.goes_to(peer) {
                self.stop(now, index, TransferError::PeerDown { peer, reason });
            }
        }
    }

    /// Stops the posting of a transfer, and ends it if nothing is in flight. The first reason stays.
    fn stop(&mut self, now: Time, index: u16, error: TransferError) {
        let until = now.after(self.config.drain);
        self.stop_with(index, error, Drain::Waiting { since: now, until });
    }

    /// The same for whoever does not know the time.
    fn stop_untimed(&mut self, index: u16, error: TransferError) {
        self.stop_with(index, error, Drain::Begins);
    }

    fn stop_with(&mut self, index: u16, error: TransferError, drain: Drain) {
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some(active) = slot.and_then(TransferSlot::active) else {
            return;
        };
        if active.stop.is_none() {
            active.stop = Some(error);
            active.drain = drain;
            self.next_timeout = self.next_timeout.min(active.next_timeout());
            self.withdraw_all(index);
            if self.lost_count > 0 {
                self.drop_lost(index);
            }
        }
        self.settle(index);
    }

    /// The drain took too long: abort the peers that made no progress since it began, or since the last time. If that did not
    /// do, and there are none, one path of a peer is stuck beside others: every peer of the transfer that has anything in
    /// flight. Or, of either, that one alone that all which the transfer has in flight goes to.
    ///
    /// Who is cut off makes no progress until all that was in flight to it is reported. If that takes long, it is of another transfer, and waits for
    /// something else ([`CUT_OFF_WITHIN`]): it is none of those then. `began` is when the drain first took too long, if it has before.
    fn force(&mut self, now: Time, index: u16, since: Time, began: Option<Time>) {
        let until = now.after(self.config.drain.max(MIN_FORCE_INTERVAL));
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some(active) = slot.and_then(TransferSlot::active) else {
            return;
        };
        active.drain = Drain::Forced { since: now, until, began: began.unwrap_or(now) };
        let is_long = began.is_some_and(|began| began.after(CUT_OFF_WITHIN) <= now);
        let mut is_some = false;
        for peer in 0..self.peers.as_ref().len() {
            let peer = index_of(peer);
            let is_off =
                self.peers.as_ref().get(usize::from(peer)).is_some_and(PeerSlot::is_cut_off);
            let counts = !(is_long && is_off);
            is_some |= self.force_peer(index, peer, Some(since)) && counts;
        }
        if !is_some && began.is_some() {
            for peer in 0..self.peers.as_ref().len() {
                self.force_peer(index, index_of(peer), None);
            }
        }
    }

    /// Wants the peer aborted if the transfer goes to it and it is stuck, and tells whether it is.
    fn force_peer(&mut self, index: u16, peer_index: u16, since: Option<Time>) -> bool {
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some(active) = slot.and_then(TransferSlot::active) else {
            return false;
        };
        let Some(slot) = self.peers.as_mut().get_mut(usize::from(peer_index)) else {
            return false;
        };
        let peer = PeerId { index: peer_index, generation: slot.generation };
        let Some(entry) = slot.entry.as_mut() else {
            return false;
        };
        let stuck = since.is_none_or(|since| entry.last_progress <= since);
        let awaited = active.outstanding.sole_peer().is_none_or(|sole| sole == peer_index);
        let is_forced = stuck && awaited && !entry.quiet() && active.plan.goes_to(peer);
        if is_forced {
            entry.abort_wanted = true;
            self.mark_dirty(peer_index);
        }
        is_forced
    }

    /// Ends a transfer that has nothing in flight and nothing to post.
    fn settle(&mut self, index: u16) {
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some(active) = slot.and_then(TransferSlot::active) else {
            return;
        };
        if active.outstanding.count() > 0 {
            return;
        }
        let posted_all = active.plan.nic_mask() == 0;
        let end = match active.stop {
            None if !posted_all => return,
            None if active.plan.drained() => return self.enqueue(index),
            None => End::Done,
            // Withdrawn too late: everything had been written and announced.
            Some(error)
                if is_withdrawal(error)
                    && !active.failed
                    && posted_all
                    && !active.plan.drained() =>
            {
                End::Done
            }
            Some(error) if active.started => End::Quiesced { error },
            Some(error) => End::NeverStarted { error },
        };
        let user = active.user;
        self.withdraw_all(index);
        if let Some(slot) = self.transfers.as_mut().get_mut(usize::from(index)) {
            slot.state = SlotState::Ended { user, end };
        }
        let slots = self.transfers.as_mut();
        self.ended.push_back(&mut NicLinks { slots, nic: 0 }, index);
    }

    /// Puts a transfer into its lane on every NIC that it has work for.
    fn enqueue(&mut self, index: u16) {
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some(active) = slot.and_then(TransferSlot::active) else {
            return;
        };
        let mut nics = active.plan.nic_mask();
        for (nic, place) in active.place.iter().enumerate() {
            if *place != Place::Nowhere {
                nics &= !(1 << nic);
            }
        }
        while nics != 0 {
            let nic = nics.trailing_zeros() as usize;
            nics &= nics - 1;
            if !self.nics.get(nic).is_some_and(Nic::usable) {
                // What it still has to say it cannot: the NIC was lost, and none could take over.
                return self.stop_untimed(index, TransferError::NoNic);
            }
            self.enter_queue(index, nic, Place::Lane);
        }
    }

    fn enter_queue(&mut self, index: u16, nic: usize, place: Place) {
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some(active) = slot.and_then(TransferSlot::active) else {
            return;
        };
        let queue = match place {
            Place::Nowhere => None,
            Place::Lane | Place::Granted(_) => self.nics.get_mut(nic).map(|state| &mut state.lanes),
            Place::Blocked(peer) => {
                peer_nic(self.peers.as_mut(), peer, nic).map(|over| &mut over.waiting)
            }
        };
        let lane = active.lane;
        if let (Some(queue), Some(current)) = (queue, active.place.get_mut(nic)) {
            *current = place;
            let slots = self.transfers.as_mut();
            queue.of(lane).push_back(&mut NicLinks { slots, nic }, index);
        }
    }

    /// Takes a transfer out of the queue that it stands in on this NIC, with the place it had there.
    fn leave_queue(&mut self, index: u16, nic: usize) -> Place {
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some(active) = slot.and_then(TransferSlot::active) else {
            return Place::Nowhere;
        };
        let lane = active.lane;
        let Some(current) = active.place.get_mut(nic) else {
            return Place::Nowhere;
        };
        let place = core::mem::replace(current, Place::Nowhere);
        let slots = self.transfers.as_mut();
        let mut links = NicLinks { slots, nic };
        match place {
            Place::Nowhere => {}
            Place::Lane | Place::Granted(_) => {
                if let Some(state) = self.nics.get_mut(nic) {
                    if lane == Lane::Bulk && state.lanes.first(lane) == Some(index) {
                        state.turn_left = self.config.turn_bytes;
                    }
                    state.lanes.of(lane).remove(&mut links, index);
                }
            }
            Place::Blocked(peer) => {
                if let Some(over) = peer_nic(self.peers.as_mut(), peer, nic) {
                    over.waiting.of(lane).remove(&mut links, index);
                }
            }
        }
        place
    }

    /// Takes a transfer out of its queue on this NIC; a credit it was granted goes to the next in line.
    fn withdraw(&mut self, index: u16, nic: usize) {
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let lane = slot.and_then(TransferSlot::active).map(|active| active.lane);
        let place = self.leave_queue(index, nic);
        if let (Place::Granted(peer), Some(lane)) = (place, lane) {
            if let Some(over) = peer_nic(self.peers.as_mut(), peer, nic) {
                over.credits.give_back(lane);
            }
            self.grant(peer, nic);
        }
    }

    fn withdraw_all(&mut self, index: u16) {
        for nic in 0..usize::from(self.nic_count) {
            self.withdraw(index, nic);
        }
    }

    /// Hands the credits of this peer on this NIC that nobody uses to those that wait for them. The
    /// latency lane comes first, but that it leaves one in [`slot::LATENCY_BURST`] to the other.
    fn grant(&mut self, peer: u16, nic: usize) {
        let depth = self.peer_depth();
        let slot = self.peers.as_mut().get_mut(usize::from(peer));
        let entry = slot.and_then(|slot| slot.entry.as_mut());
        let over =
            entry.filter(|entry| entry.is_handing_out()).and_then(|entry| entry.over.get_mut(nic));
        let (Some(over), Some(state)) = (over, self.nics.get_mut(nic)) else {
            return;
        };
        let slots = self.transfers.as_mut();
        while let Some((index, lane)) = over.next_waiting(depth) {
            over.credits.take(lane);
            over.waiting.of(lane).pop_front(&mut NicLinks { slots, nic });
            state.lanes.of(lane).push_back(&mut NicLinks { slots, nic }, index);
            set_place(slots, index, nic, Place::Granted(peer));
        }
    }

    /// Moves a transfer, the first of its lane on this NIC, into the line of a peer that it needs a credit of.
    fn block(&mut self, index: u16, nic: usize, lane: Lane, peer: u16) {
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let place = slot.and_then(TransferSlot::active).and_then(|it| it.place.get_mut(nic));
        let over = peer_nic(self.peers.as_mut(), peer, nic);
        match (place, over, self.nics.get_mut(nic)) {
            (Some(place), Some(over), Some(state)) if *place == Place::Lane => {
                *place = Place::Blocked(peer);
                if lane == Lane::Bulk {
                    state.turn_left = self.config.turn_bytes;
                }
                let slots = self.transfers.as_mut();
                state.lanes.of(lane).pop_front(&mut NicLinks { slots, nic });
                over.waiting.of(lane).push_back(&mut NicLinks { slots, nic }, index);
            }
            // A credit that it holds and cannot use is handed on.
            _ => {
                self.withdraw(index, nic);
                self.enter_queue(index, nic, Place::Blocked(peer));
            }
        }
    }
}

/// How much more a batch may take.
#[derive(Clone, Copy)]
struct Room {
    pieces: usize,
    bytes: u64,
}

impl Room {
    const fn is_some(&self) -> bool {
        self.pieces > 0 && self.bytes > 0
    }

    const fn use_up(&mut self, len: u64) {
        self.pieces = self.pieces.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(len);
    }
}

/// Notes which queue of a NIC a transfer stands in.
fn set_place<P, T>(slots: &mut [TransferSlot<P, T>], index: u16, nic: usize, place: Place) {
    let active = slots.get_mut(usize::from(index)).and_then(TransferSlot::active);
    if let Some(current) = active.and_then(|active| active.place.get_mut(nic)) {
        *current = place;
    }
}

/// Notes that a connection is of use to this end.
fn set_used(peers: &mut [PeerSlot], peer: PeerId) {
    let slot = peers.get_mut(usize::from(peer.index));
    let slot = slot.filter(|slot| slot.generation == peer.generation);
    if let Some(entry) = slot.and_then(|slot| slot.entry.as_mut()) {
        entry.used = true;
    }
}

fn peer_nic(peers: &mut [PeerSlot], peer: u16, nic: usize) -> Option<&mut PeerNic> {
    let entry = peers.get_mut(usize::from(peer))?.entry.as_mut()?;
    entry.over.get_mut(nic)
}

/// The next thing to tell of a peer.
fn next_peer_event(peer: PeerId, entry: &mut PeerEntry) -> Option<Event> {
    let down = entry.is_down();
    if core::mem::take(&mut entry.abort_wanted) && !entry.quiet() {
        return Some(Event::Abort { peer });
    }
    if let Some(event) = Some(&mut entry.paths).filter(|_| !down).and_then(|it| it.poll_event(peer))
    {
        return Some(event);
    }
    match entry.machine.poll_action()? {
        peer::Action::SendHeartbeat => Some(Event::Heartbeat { peer }),
        peer::Action::Report(state) => Some(Event::Peer { peer, state }),
        peer::Action::Disconnect => {
            entry.stopped = true;
            Some(Event::Disconnect { peer })
        }
    }
}

/// Whether the error only withdraws what is not posted, and says nothing of what is.
const fn is_withdrawal(error: TransferError) -> bool {
    matches!(error, TransferError::Cancelled | TransferError::DeadlineExceeded { .. })
}

/// Calls `f` for each peer of a request, with the descriptor used there, until it fails.
fn each_peer<P, T: TargetList, E>(
    request: &Request<P, T>,
    mut f: impl FnMut(PeerId, Option<&MrDesc>) -> Result<(), E>,
) -> Result<(), E> {
    match request {
        Request::Single(write) => f(write.peer, Some(&write.dst)),
        Request::Paged(write) => f(write.peer, Some(&write.dst)),
        Request::Imm(write) => f(write.peer, None),
        Request::Control(write) => f(write.peer, None),
        Request::Scatter(write) => {
            let mut targets = (0..write.targets.len()).filter_map(|i| write.targets.get(i));
            targets.try_for_each(|target| f(target.peer, Some(&target.dst)))
        }
        Request::Barrier(barrier) => {
            // The list may be one of peers alone.
            let mut peers = (0..barrier.targets.len()).filter_map(|i| barrier.targets.peer(i));
            peers.try_for_each(|peer| f(peer, None))
        }
    }
}

/// A piece as it is posted.
#[inline(always)]
fn work_of(id: TransferId, nic: NicIndex, piece: &Piece) -> WorkRequest {
    WorkRequest::new(Token::new(id, piece.peer), nic, piece)
}

/// All NICs but this one, of so many, from the one behind it on.
fn others(nic: NicIndex, count: NicIndex) -> impl Iterator<Item = NicIndex> {
    (nic.saturating_add(1)..count).chain(0..nic.min(count))
}

/// An index into storage whose length was checked to fit.
fn index_of(index: usize) -> u16 {
    u16::try_from(index).unwrap_or(NIL)
}
