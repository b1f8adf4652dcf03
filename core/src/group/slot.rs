//! What a domain group keeps of each transfer and each peer, in storage that the caller lends.

use super::list::{Link, Links, List, NIL, Place};
use super::paths::{Note, Paths};
use super::{End, TransferError};
use static_assertions::const_assert;

use crate::id::{EngineId, MAX_NICS, NicIndex, PeerId, Time, TransferId};
use crate::nic::{NicState, Routes};
use crate::peer::{Peer, PeerState};
use crate::plan::{PeerTable, Plan};
use crate::region::MrDesc;

/// Storage lent to a group: a boxed slice, an array or a mutable slice will do.
///
/// The length must not change while the group has it.
pub trait Storage<T>: AsRef<[T]> + AsMut<[T]> {}
impl<T, S: AsRef<[T]> + AsMut<[T]>> Storage<T> for S {}

/// Room for one transfer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TransferSlot<P, T> {
    pub(super) generation: u32,
    pub(super) links: [Link; MAX_NICS],
    pub(super) state: SlotState<P, T>,
}

impl<P, T> TransferSlot<P, T> {
    /// An empty slot.
    #[must_use]
    pub const fn new() -> Self {
        Self { generation: 0, links: [Link::LOOSE; MAX_NICS], state: SlotState::Free }
    }

    pub(super) const fn active_ref(&self) -> Option<&Active<P, T>> {
        match &self.state {
            SlotState::Active(active) => Some(active),
            _ => None,
        }
    }

    pub(super) fn active(&mut self) -> Option<&mut Active<P, T>> {
        match &mut self.state {
            SlotState::Active(active) => Some(active),
            _ => None,
        }
    }
}

impl<P, T> Default for TransferSlot<P, T> {
    fn default() -> Self {
        Self::new()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[expect(clippy::large_enum_variant, reason = "slots are preallocated; boxing needs a heap")]
pub(super) enum SlotState<P, T> {
    /// In the list of free slots.
    Free,
    /// Being planned, posted or drained.
    Active(Active<P, T>),
    /// Over; its end waits to be polled.
    Ended { user: u64, end: End },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Active<P, T> {
    pub(super) plan: Plan<P, T>,
    pub(super) user: u64,
    pub(super) lane: Lane,
    /// Queue the transfer stands in, for each NIC.
    pub(super) place: [Place; MAX_NICS],
    /// Pieces posted whose completion is not known.
    pub(super) outstanding: Outstanding,
    /// Whether anything was ever posted.
    pub(super) started: bool,
    /// Why no more is posted, if so: the first reason.
    pub(super) stop: Option<TransferError>,
    /// A piece failed: not everything was written, whatever `stop` says.
    pub(super) failed: bool,
    pub(super) deadline: Time,
    pub(super) drain: Drain,
}

impl<P, T> Active<P, T> {
    /// The next instant at which this transfer wants attention.
    pub(super) fn next_timeout(&self) -> Time {
        match self.drain {
            Drain::No => self.deadline,
            Drain::Begins => Time::ZERO,
            Drain::Waiting { until, .. } | Drain::Forced { until, .. } => until,
        }
    }
}

/// How many pieces of a transfer are in flight, and, while all of them go to one peer, to which.
///
/// Of a transfer to several, sums are kept over the pieces of the numbers of their peers, and of their squares: `count *
/// squares == sum * sum` only if all numbers are equal (Cauchy and Schwarz), whatever was posted and has completed before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Outstanding {
    count: u32,
    /// There may be several peers: the sums are kept.
    several: bool,
    sum: u64,
    squares: u64,
}

impl Outstanding {
    /// Of a transfer that has posted nothing yet, to several peers or to one.
    #[inline(always)]
    pub(super) const fn none(several: bool) -> Self {
        Self { count: 0, several, sum: 0, squares: 0 }
    }

    #[inline]
    pub(super) const fn count(&self) -> u32 {
        self.count
    }

    /// So many pieces to `peer` were posted.
    #[inline]
    pub(super) const fn add(&mut self, peer: u16, pieces: u16) {
        // As many as all queues together have room for, below 2^20: no sum wraps.
        self.count = self.count.wrapping_add(pieces as u32);
        if self.several {
            let (peer, pieces) = (peer as u64, pieces as u64);
            self.sum = self.sum.wrapping_add(pieces.wrapping_mul(peer));
            self.squares = self.squares.wrapping_add(pieces.wrapping_mul(peer.wrapping_mul(peer)));
        }
    }

    /// The only piece of a transfer to one peer was posted.
    #[inline(always)]
    pub(super) const fn set_one(&mut self) {
        self.count = 1;
    }

    /// One of those to `peer` is no longer in flight.
    #[inline]
    pub(super) const fn remove(&mut self, peer: u16) {
        self.count = self.count.wrapping_sub(1);
        if self.several {
            let peer = peer as u64;
            self.sum = self.sum.wrapping_sub(peer);
            self.squares = self.squares.wrapping_sub(peer.wrapping_mul(peer));
        }
    }

    /// Of a transfer to several, the peer that all of them go to; `None` if there are several, or nothing is in flight.
    pub(super) fn sole_peer(&self) -> Option<u16> {
        if !self.several {
            return None;
        }
        let (count, sum, squares) = (u64::from(self.count), self.sum, self.squares);
        let peer = sum.checked_div(count)?;
        let all_alike = count.checked_mul(peer)? == sum && sum.checked_mul(peer)? == squares;
        u16::try_from(peer).ok().filter(|_| all_alike)
    }
}

/// How far a stopped transfer's draining has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Drain {
    /// Not stopped.
    No,
    /// Stopped between two looks at the clock: time runs from the next.
    Begins,
    /// Pieces in flight are given until `until` to complete by themselves.
    Waiting { since: Time, until: Time },
    /// Peers without progress were aborted at `since`; at `until` those are that make none, or every peer that pieces may be
    /// in flight to. `began` is when the first were.
    Forced { since: Time, until: Time, began: Time },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Lane {
    /// Small writes and immediates.
    Latency,
    /// Everything else, in turns.
    Bulk,
}

/// After so many credits taken by the latency lane in a row, a waiting bulk transfer gets one.
pub(super) const LATENCY_BURST: u8 = 16;

/// How many credits there are, and how many of them bulk transfers leave alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Depth {
    pub(super) all: u16,
    pub(super) reserve: u16,
}

/// Credits in use, of a NIC or of a peer on a NIC.
///
/// The reserve limits what bulk transfers hold, not what is left when they ask: so they cannot crowd
/// out small writes, and a flood of small writes cannot shut them out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Credits {
    pub(super) used: u16,
    /// Those of `used` that bulk transfers hold.
    pub(super) bulk: u16,
    /// Taken by the latency lane since the bulk lane took one.
    latency_run: u8,
}

impl Credits {
    pub(super) const NONE_USED: Self = Self { used: 0, bulk: 0, latency_run: 0 };

    /// Whether a transfer of this lane may take one.
    pub(super) const fn left(&self, lane: Lane, depth: Depth) -> bool {
        let quota = match lane {
            Lane::Latency => true,
            Lane::Bulk => self.bulk < depth.all.saturating_sub(depth.reserve),
        };
        quota && self.used < depth.all
    }

    /// How many a transfer of this lane may take.
    pub(super) fn room(&self, lane: Lane, depth: Depth) -> u16 {
        let free = depth.all.saturating_sub(self.used);
        match lane {
            Lane::Latency => free,
            Lane::Bulk => {
                free.min(depth.all.saturating_sub(depth.reserve).saturating_sub(self.bulk))
            }
        }
    }

    /// As so many times [`Credits::take`] for the bulk lane; at least once.
    pub(super) const fn take_bulk(&mut self, count: u16) {
        self.used = self.used.saturating_add(count);
        self.bulk = self.bulk.saturating_add(count);
        self.latency_run = 0;
    }

    pub(super) const fn take(&mut self, lane: Lane) {
        self.pass(lane);
        self.used = self.used.saturating_add(1);
        if matches!(lane, Lane::Bulk) {
            self.bulk = self.bulk.saturating_add(1);
        }
    }

    /// Takes one and gives it back.
    pub(super) const fn pass(&mut self, lane: Lane) {
        match lane {
            // More than a burst is no more than that.
            Lane::Latency => self.latency_run += (self.latency_run < LATENCY_BURST) as u8,
            Lane::Bulk => self.latency_run = 0,
        }
    }

    pub(super) const fn give_back(&mut self, lane: Lane) {
        self.used = self.used.saturating_sub(1);
        if matches!(lane, Lane::Bulk) {
            self.bulk = self.bulk.saturating_sub(1);
        }
    }

    /// Whether `lane` is served first now.
    pub(super) const fn prefers(&self, lane: Lane) -> bool {
        matches!(
            (self.order(), lane),
            ([Lane::Latency, _], Lane::Latency) | ([Lane::Bulk, _], Lane::Bulk)
        )
    }

    /// The lanes in the order in which they are served now.
    pub(super) const fn order(&self) -> [Lane; 2] {
        if self.latency_run >= LATENCY_BURST {
            [Lane::Bulk, Lane::Latency]
        } else {
            [Lane::Latency, Lane::Bulk]
        }
    }
}

/// A queue for each lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Queues {
    latency: List,
    bulk: List,
}

impl Queues {
    pub(super) const EMPTY: Self = Self { latency: List::EMPTY, bulk: List::EMPTY };

    pub(super) const fn is_empty_lane(&self, lane: Lane) -> bool {
        match lane {
            Lane::Latency => self.latency.is_empty(),
            Lane::Bulk => self.bulk.is_empty(),
        }
    }

    pub(super) const fn of(&mut self, lane: Lane) -> &mut List {
        match lane {
            Lane::Latency => &mut self.latency,
            Lane::Bulk => &mut self.bulk,
        }
    }

    pub(super) fn first(&self, lane: Lane) -> Option<u16> {
        match lane {
            Lane::Latency => self.latency.first(),
            Lane::Bulk => self.bulk.first(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.latency.is_empty() && self.bulk.is_empty()
    }
}

/// What there is of one peer on one NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PeerNic {
    /// Pieces posted whose completion is not known.
    pub(super) in_flight: u16,
    /// Those in flight, and those granted to transfers that have not posted yet.
    pub(super) credits: Credits,
    /// Transfers that wait for a credit.
    pub(super) waiting: Queues,
    /// The peer's NICs that are reached from here, a bit each.
    pub(super) whole: u8,
    /// Pieces may have to be moved: a path is broken, or no path leads there from here.
    pub(super) damaged: bool,
}

impl PeerNic {
    pub(super) const IDLE: Self = Self {
        in_flight: 0,
        credits: Credits::NONE_USED,
        waiting: Queues::EMPTY,
        whole: 0,
        damaged: false,
    };

    /// The transfer that is handed a credit next, and its lane, if there is both.
    pub(super) fn next_waiting(&self, depth: Depth) -> Option<(u16, Lane)> {
        self.credits.order().into_iter().find_map(|lane| {
            let index = self.waiting.first(lane)?;
            self.credits.left(lane, depth).then_some((index, lane))
        })
    }
}

/// Room for one peer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PeerSlot {
    pub(super) generation: u32,
    pub(super) entry: Option<PeerEntry>,
    /// Next slot with something to report; the slot's own index if it is the last one.
    pub(super) next_dirty: u16,
}

// Hundreds of peers are ordinary: what an idle one costs here must stay small. The rest of what the core
// keeps of it, its row of tallies, has a word for each counter that is tallied.
const_assert!(size_of::<PeerSlot>() <= 1024);

impl PeerSlot {
    /// An empty slot.
    #[must_use]
    pub const fn new() -> Self {
        Self { generation: 0, entry: None, next_dirty: NIL }
    }

    /// Whether its connection has ended: nothing more can be done that what is in flight to it ends.
    pub(super) fn is_cut_off(&self) -> bool {
        self.entry.as_ref().is_some_and(|entry| entry.stopped)
    }
}

impl Default for PeerSlot {
    fn default() -> Self {
        Self::new()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct PeerEntry {
    pub(super) engine: EngineId,
    pub(super) machine: Peer,
    pub(super) nics: [NicState; MAX_NICS],
    pub(super) nic_count: NicIndex,
    pub(super) routes: Option<Routes>,
    /// Where zero-byte immediates point; known once connected.
    pub(super) control: Option<MrDesc>,
    /// For each NIC of ours.
    pub(super) over: [PeerNic; MAX_NICS],
    /// When a piece to this peer last completed.
    pub(super) last_progress: Time,
    pub(super) abort_wanted: bool,
    /// Something was posted to it since the last timeout that it hears of: bytes alone it does not.
    pub(super) sent: bool,
    /// It was of use since the last timeout: a piece of a transfer to it has completed.
    pub(super) used: bool,
    /// The same of the peer, by what has come of it.
    pub(super) heard_use: bool,
    /// The platform holds no connection to it any more, or was told to drop it.
    pub(super) stopped: bool,
    /// Every path to it over our usable NICs is broken: nothing is posted until one is back.
    pub(super) pathless: bool,
    /// That, or it is asked to part: nothing of transfers is posted.
    pub(super) withheld: bool,
    pub(super) paths: Paths,
}

impl PeerEntry {
    /// The peer's NICs are `nics`, ours are `own`.
    pub(super) fn set_nics(&mut self, nics: &[NicState], own: &[NicState]) {
        for (state, nic) in self.nics.iter_mut().zip(nics) {
            *state = *nic;
        }
        self.nic_count = NicIndex::try_from(nics.len().min(MAX_NICS)).unwrap_or(0);
        self.set_routes(own);
    }

    /// Our NICs are `own` now.
    pub(super) fn set_routes(&mut self, own: &[NicState]) {
        let usable = self.usable();
        let nics = self.nics.get(..usize::from(self.nic_count)).unwrap_or(&[]);
        let paths = self.paths.broken.iter().zip(&self.paths.unreached);
        for (over, (broken, unreached)) in self.over.iter_mut().zip(paths) {
            over.whole = usable & !broken;
            // What was moved to a NIC that does not lead there is to be moved on.
            over.damaged = broken != unreached || *unreached != 0 && over.whole == 0;
        }
        let whole = Routes::avoiding(own, nics, &self.paths.broken);
        // Without any path, transfers are planned for when one is back.
        self.routes = whole.or_else(|| Routes::avoiding(own, nics, &self.paths.unreached));
        self.pathless = whole.is_none() && self.routes.is_some();
        self.withhold();
    }

    /// After a change of what [`PeerEntry::is_open`] follows from.
    pub(super) const fn withhold(&mut self) {
        self.withheld = self.pathless || self.machine.parting().is_some();
    }

    /// Its NICs that can be used, a bit for each.
    fn usable(&self) -> u8 {
        let nics = self.nics.iter().take(self.nic_count.into()).zip(0_u32..);
        let usable = nics.filter(|(nic, _)| nic.healthy && nic.speed > 0);
        usable.fold(0_u8, |mask, (_, at)| mask | 1_u8.unbounded_shl(at))
    }

    /// Whether a path leads there from our NIC `nic`, broken or not.
    pub(super) fn may_reach(&self, nic: usize) -> bool {
        let unreached = self.paths.unreached.get(nic);
        unreached.is_some_and(|unreached| self.usable() & !unreached != 0)
    }

    /// Whether pieces of transfers may be posted to it.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        matches!(self.machine.state(), PeerState::Up | PeerState::Suspect) && !self.withheld
    }

    /// Whether pieces may be posted to it, notes among them.
    #[inline]
    pub(super) fn is_usable(&self) -> bool {
        matches!(self.machine.state(), PeerState::Up | PeerState::Suspect) && !self.pathless
    }

    /// Whether credits that return go to those in line: not while pieces lost with a path want them.
    pub(super) fn is_handing_out(&self) -> bool {
        self.is_open() && self.paths.lost == 0
    }

    pub(super) fn is_down(&self) -> bool {
        matches!(self.machine.state(), PeerState::Down(_))
    }

    /// Whether no piece to it is in flight.
    pub(super) fn quiet(&self) -> bool {
        self.over.iter().all(|over| over.in_flight == 0)
    }
}

/// The peers of a group, seen by a plan.
pub(super) struct PeerView<'a>(pub(super) &'a [PeerSlot]);

impl PeerView<'_> {
    pub(super) fn entry(&self, peer: PeerId) -> Option<&PeerEntry> {
        let slot = self.0.get(usize::from(peer.index))?;
        slot.entry.as_ref().filter(|_| slot.generation == peer.generation)
    }
}

impl PeerView<'_> {
    /// The credits of a peer that pieces may be posted to.
    #[inline]
    pub(super) fn over(&self, peer: PeerId, nic: usize) -> Option<&PeerNic> {
        self.entry(peer).filter(|entry| entry.is_open())?.over.get(nic)
    }
}

impl PeerTable for PeerView<'_> {
    fn routes(&self, peer: PeerId) -> Option<Routes> {
        self.entry(peer)?.routes
    }

    fn control(&self, peer: PeerId) -> Option<MrDesc> {
        self.entry(peer)?.control
    }
}

/// The links of one NIC's queues.
pub(super) struct NicLinks<'a, P, T> {
    pub(super) slots: &'a mut [TransferSlot<P, T>],
    pub(super) nic: usize,
}

impl<P, T> Links for NicLinks<'_, P, T> {
    fn get(&self, index: u16) -> Link {
        let slot = self.slots.get(usize::from(index));
        slot.and_then(|slot| slot.links.get(self.nic)).copied().unwrap_or(Link::LOOSE)
    }

    fn set(&mut self, index: u16, link: Link) {
        let slot = self.slots.get_mut(usize::from(index));
        if let Some(place) = slot.and_then(|slot| slot.links.get_mut(self.nic)) {
            *place = link;
        }
    }
}

/// Bits of a note's token that are not the peer's generation: a NIC, and two for what it is.
const NOTE_BITS: u32 = 5;
const NOTE_ANSWER: u32 = 1 << 3;
const NOTE_BEAT: u32 = 1 << 4;
const_assert!(NOTE_ANSWER as usize == MAX_NICS);

/// What the platform gives back with a completion: transfer, its tenant, and the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(u64);

impl Token {
    pub(super) fn new(id: TransferId, peer: PeerId) -> Self {
        let slots = u64::from(id.index) << 48 | u64::from(peer.index) << 32;
        Self(slots | u64::from(id.generation))
    }

    /// The token as a device carries it (`wr_id`, operation context).
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// A token that a device gave back. Any value is accepted here and checked on use.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The transfer that the piece is of.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the fields are cut out of the word")]
    pub const fn transfer(self) -> TransferId {
        TransferId { index: (self.0 >> 48) as u16, generation: self.0 as u32 }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the field is cut out of the word")]
    pub(super) const fn peer_index(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// Whether it is of a heartbeat, an ask or an answer, for which a provider has room
    /// ([`super::NOTES_PER_PEER`]) and which is not to wait behind transfers.
    #[must_use]
    pub const fn is_note(self) -> bool {
        self.note().is_some()
    }

    /// The token of a note: of a transfer that there cannot be, and the peer's generation.
    pub(super) fn of_note(note: Note, peer: PeerId) -> Self {
        let (kind, nic) = match note {
            Note::Ask(nic) => (0, nic),
            Note::Answer(nic) => (NOTE_ANSWER, nic),
            Note::Beat => (NOTE_BEAT, 0),
        };
        let nic = u32::from(nic) % NOTE_ANSWER;
        let generation = peer.generation << NOTE_BITS | kind | nic;
        Self::new(TransferId { index: NIL, generation }, peer)
    }

    /// The note that the token is of, if it is of one.
    pub(super) const fn note(self) -> Option<Note> {
        let TransferId { index, generation } = self.transfer();
        let nic = (generation % NOTE_ANSWER).to_le_bytes()[0];
        match index {
            NIL if generation & NOTE_BEAT != 0 => Some(Note::Beat),
            NIL if generation & NOTE_ANSWER == 0 => Some(Note::Ask(nic)),
            NIL => Some(Note::Answer(nic)),
            _ => None,
        }
    }
}
