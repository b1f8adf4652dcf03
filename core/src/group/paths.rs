//! Paths that break, and what becomes of the pieces that were in flight on them.
//!
//! A *path* leads from one of our NICs to one of a peer's. When it breaks, nobody here knows which of its
//! pieces arrived: they may have been counted, or still be on their way. Only the receiver can say, so it
//! is asked, and no piece is posted again before it has answered.
//!
//! ```text
//!   sender                                                receiver
//!   path breaks: posting there stops, unposted work moves
//!   ask(path, epoch) ───────── any whole path ──────────▶ fence: nothing of it lands any more,
//!                                                                what did is counted
//!   settle ◀────────────────── receipt ─────────────────── answer(path, epoch)
//!     ├─ arrived:     completed
//!     └─ undelivered: set aside, posted on a whole path (the same bytes, the same immediate)
//! ```
//!
//! What a receipt says is for providers to know; [`crate::receipt`] is how it travels. Asks and answers
//! are pieces of their own: they need no transfer slot and no credit, of which the broken path may hold
//! all, and they are posted again over another NIC when they might be stuck, over each that leads to the peer before one has a
//! second: an ask too many is answered again, an answer too many ignored. Nobody waits for one that stays away but by the clock.
//!
//! Heartbeats go the same way, each by a NIC that has none under way. When one is due and another has not ended, that one may be stuck:
//! then one goes by each NIC that has none, so that NICs that begin to stand still at once cost one interval together, and each holds one of
//! them. So a connection whose peer is there does not end for want of anything that
//! peers who are not may hold: what keeps it is posted beside all credits, and providers have room for it
//! beside their queues ([`NOTES_PER_PEER`]). Transfers have no such room: they wait for their turn.
//!
//! # Invariants
//!
//! 1. A piece on a broken path stays in flight, with its credits, until it is settled; an undelivered one
//!    stays outstanding until it is posted and has completed, or its transfer is stopped.
//! 2. Of a NIC's paths one is asked about at a time, each break in an epoch of its own. An epoch is
//!    fenced once, however often it is asked about, and settled once, however often it is answered.
//! 3. Nobody waits for an answer that is stuck: the next one is laid out over it. What lands late, or in
//!    parts, does not have the epoch that is asked about, or not the sum; then the ask is repeated.
//! 4. A path not settled within the drain time, and a peer without a path for as long, is the end of the
//!    peer: [`DownReason::PathLost`]. So no piece waits for ever.
//! 5. What is set aside and what is in flight are together at most the depths of all NICs.
//! 6. As long as a NIC that leads to a peer has no heartbeat to it under way, the next can be posted; while another has one, the next
//!    goes by each such NIC. A NIC has one of them, or two where it alone led there.
//!
//! The tests of the group explore all of it with a receiver that counts, and pieces that arrive, arrive
//! late, or do not.

use core::time::Duration;

use super::list::Place;
use super::slot::{Depth, PeerEntry, PeerSlot, PeerView, Storage, TransferSlot};
use super::{
    DomainGroup, Event, Token, TransferError, WorkError, WorkRequest, index_of, others, work_of,
};
use crate::id::{MAX_NICS, NicIndex, PeerId, Time, TransferId};
use crate::imm::Imm;
use crate::mailbox::{Control, Round, Usage};
use crate::peer::DownReason;
use crate::plan::{Next, PageList, PageRun, TargetList};
use crate::receipt::{Epoch, SETTLEMENT_BYTES};
use crate::region::LocalMr;

/// An ask that is not answered is repeated this many times before the peer is given up.
const ASKS: u32 = 4;

/// So many of one ask, or of one answer, are in flight at a time.
const MAX_REPEATS: u8 = 16;

/// So many heartbeats are in flight to a peer that one NIC alone leads to: one that may be stuck, and one more. Where several do, it is one
/// on each.
pub(super) const MAX_BEATS: u32 = 2;

/// Pieces that are heartbeats, asks or answers ([`Token::is_note`]) for which a provider has room on each NIC,
/// for each peer, beside its queue depth: those to a peer that is gone are in nobody else's way. A peer with
/// more in flight waits until one of these has ended; that takes several paths that break at a time.
pub const NOTES_PER_PEER: u16 = 16;

/// "No NIC".
const NO_NIC: NicIndex = NicIndex::MAX;

/// Room for one piece that was lost with its path and waits to be posted on another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct LostSlot(pub(super) Option<WorkRequest>);

impl LostSlot {
    /// An empty slot.
    #[must_use]
    pub const fn new() -> Self {
        Self(None)
    }
}

/// Our memory that answers to one peer are written from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Receipts {
    /// Where they are laid out.
    pub src: LocalMr,
    /// Where they start, in bytes, both in `src` and in the peer's control region
    /// ([`Geometry::receipts_offset`](crate::mailbox::Geometry::receipts_offset)).
    pub offset: u64,
}

/// The peer asked what there cannot be: it broke the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AskError;

/// What a group knows of the paths to one peer, and of the peer's to it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Paths {
    /// The peer's NICs that each of ours does not reach, a bit for each: now,
    pub(super) broken: [u8; MAX_NICS],
    /// and ever, as [`GroupConfig::unreached`](super::GroupConfig::unreached) says.
    pub(super) unreached: [u8; MAX_NICS],
    /// For each NIC of ours.
    asks: [Ask; MAX_NICS],
    /// For each NIC of the peer's.
    replies: [Reply; MAX_NICS],
    beat: Beat,
    /// The last time that the peer asked to part and was told that it is to stay.
    stayed: Option<Round>,
    receipts: Option<Receipts>,
    /// When the peer is given up for want of a path.
    pathless_until: Time,
    /// The NIC whose path broke last.
    last_broken: NicIndex,
    /// Of which NICs, a bit for each, an answer was waiting when its time was over: if it is over still, it was none.
    spared: u8,
    /// Pieces to the peer that are set aside.
    pub(super) lost: u16,
    /// Whether the peer counts in [`DomainGroup::aside`]: an ask or answer to it can be posted.
    pub(super) ready: bool,
}

impl Paths {
    /// None is broken.
    pub(super) const fn new(unreached: [u8; MAX_NICS]) -> Self {
        Self {
            broken: unreached,
            unreached,
            asks: [Ask::IDLE; MAX_NICS],
            replies: [Reply::IDLE; MAX_NICS],
            beat: Beat::IDLE,
            stayed: None,
            receipts: None,
            pathless_until: Time::NEVER,
            last_broken: 0,
            spared: 0,
            lost: 0,
            ready: false,
        }
    }

    /// The peer is to hear that the connection was used.
    pub(super) const fn tell_use(&mut self) {
        self.beat.used = true;
    }

    /// What the platform is to do next.
    pub(super) fn poll_event(&mut self, peer: PeerId) -> Option<Event> {
        for (from, reply) in (0..).zip(&mut self.replies) {
            if reply.state == ReplyState::ToFence {
                reply.state = ReplyState::Fencing;
                let Reply { to, epoch, .. } = *reply;
                return Some(Event::Fence { peer, from, to, epoch });
            }
        }
        for (nic, ask) in (0..).zip(&mut self.asks) {
            if core::mem::take(&mut ask.answered) && ask.unsettled != 0 {
                let (remote_nic, epoch) = (ask.remote, ask.epoch);
                return Some(Event::Settle { peer, nic, remote_nic, epoch });
            }
        }
        None
    }

    pub(super) fn next_timeout(&self) -> Time {
        let asks = self.asks.iter().map(|ask| ask.again.min(ask.until));
        asks.fold(self.pathless_until, Time::min)
    }

    #[cfg(test)]
    pub(super) fn is_unsettled(&self, nic: NicIndex, remote: NicIndex) -> bool {
        self.asks[usize::from(nic)].unsettled & 1 << remote != 0
    }

    fn unsettled(&self) -> bool {
        self.asks.iter().any(|ask| ask.unsettled != 0)
    }

    /// Whether one is to be posted, and can be while these NICs of ours, a bit for each, lead to the peer.
    pub(super) fn has_note(&self, leading: u8) -> bool {
        self.beat.ways(leading) != 0
            || self.asks.iter().any(|ask| ask.pending)
            || self.receipts.is_some() && self.replies.iter().any(|reply| reply.pending)
    }
}

/// What one NIC of ours asks the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Ask {
    /// The peer's NICs whose path from here broke and is not settled.
    unsettled: u8,
    /// The one of these that is asked about.
    remote: NicIndex,
    epoch: Epoch,
    /// To be posted.
    pending: bool,
    /// Posted, and not completed; of earlier epochs too.
    in_flight: u8,
    turn: Turn,
    /// An answer arrived, and was not looked at yet.
    answered: bool,
    /// When to ask again.
    again: Time,
    /// When to give up.
    until: Time,
}

impl Ask {
    const IDLE: Self = Self {
        unsettled: 0,
        remote: 0,
        epoch: Epoch::ZERO,
        pending: false,
        in_flight: 0,
        turn: Turn::NONE,
        answered: false,
        again: Time::NEVER,
        until: Time::NEVER,
    };

    /// Asks once more: the last one may be stuck, and an ask too many changes nothing.
    fn repeat(&mut self) {
        self.pending |= self.unsettled != 0 && self.in_flight < MAX_REPEATS;
    }

    /// Asks about the next path, if there is one.
    fn start(&mut self, now: Time, drain: Duration) {
        let in_flight = self.in_flight;
        *self = Self { in_flight, epoch: self.epoch, unsettled: self.unsettled, ..Self::IDLE };
        if self.unsettled != 0 {
            // Below 8.
            self.remote = self.unsettled.trailing_zeros().to_le_bytes()[0];
            self.epoch = self.epoch.next();
            self.repeat();
            self.again = now.after(interval(drain));
            self.until = now.after(drain);
        }
    }
}

/// The NICs that had one ask, or one answer, a bit for each; when all have that lead to the peer, the last one's alone. The last may be stuck,
/// or about to break, and so may several: so each has one before one has a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Turn(u8);

impl Turn {
    const NONE: Self = Self(0);

    /// Whether one went by `nic` since each had one.
    const fn was_of(self, nic: NicIndex) -> bool {
        self.0 & 1_u8.unbounded_shl(nic as u32) != 0
    }

    /// Whether the next may go by `nic`; the NICs `leading` to the peer have a bit each.
    const fn is_of(self, nic: NicIndex, leading: u8) -> bool {
        !self.was_of(nic) || leading & !self.0 == 0
    }

    /// One was posted on `nic`.
    const fn take(&mut self, nic: NicIndex, leading: u8) {
        let bit = 1_u8.unbounded_shl(nic as u32);
        self.0 |= bit;
        if leading & !self.0 == 0 {
            self.0 = bit;
        }
    }
}

fn interval(drain: Duration) -> Duration {
    (drain / ASKS).max(Duration::from_nanos(1))
}

/// What is answered to one NIC of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Reply {
    epoch: Epoch,
    /// Our NIC.
    to: NicIndex,
    state: ReplyState,
    /// The answer is to be posted.
    pending: bool,
    /// Posted, and not completed.
    in_flight: u8,
    turn: Turn,
    /// A later ask, which came while this one was dealt with.
    next: Option<(Epoch, NicIndex)>,
}

/// ```text
///   Never ── ask ──▶ ToFence ──▶ Fencing ──▶ Ready (pending, in flight, arrived; again if asked again)
///                       ▲───── a later ask ────┘
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ReplyState {
    /// Nothing was ever asked.
    Never,
    /// The platform is to be told to fence.
    ToFence,
    /// It was told, and has not answered.
    Fencing,
    /// The answer lies in our memory.
    Ready,
}

impl Reply {
    const IDLE: Self = Self {
        epoch: Epoch::ZERO,
        to: 0,
        state: ReplyState::Never,
        pending: false,
        in_flight: 0,
        turn: Turn::NONE,
        next: None,
    };

    /// The peer asks.
    fn ask(&mut self, epoch: Epoch, to: NicIndex) -> Result<(), AskError> {
        let newest = self.next.unwrap_or((self.epoch, self.to));
        if self.state == ReplyState::Never || epoch.is_after(newest.0) {
            // The asker goes on only when it has what it asked for before.
            self.pending = false;
            self.next = Some((epoch, to));
            self.go_on();
        } else if epoch == newest.0 {
            if to != newest.1 {
                return Err(AskError);
            }
            self.repeat();
        }
        Ok(())
    }

    /// Posts the answer once more: the last one may be stuck, and bytes that are the same do no harm.
    fn repeat(&mut self) {
        let wanted = self.state == ReplyState::Ready && self.next.is_none();
        self.pending |= wanted && self.in_flight < MAX_REPEATS;
    }

    /// Turns to the later ask, if there is one.
    fn go_on(&mut self) {
        let free = self.state != ReplyState::Fencing;
        if let Some((epoch, to)) = self.next.filter(|_| free) {
            let in_flight = self.in_flight;
            *self = Self { epoch, to, state: ReplyState::ToFence, in_flight, ..Self::IDLE };
        }
    }
}

/// Our signs of life to the peer, when there is nothing else to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Beat {
    /// To be posted, by one NIC,
    pending: bool,
    /// and by each of these, a bit for each: by others one is under way, which may be stuck.
    each: u8,
    /// The NICs that one is under way on, posted and not completed, a bit for each,
    once: u8,
    /// and those of them that two are.
    twice: u8,
    /// The NIC that it was posted on last.
    via: NicIndex,
    /// The next is to say that the connection was used,
    used: bool,
    /// and the last said so, which the peer may not have heard.
    told: bool,
    /// Before that, that it stays: to what the peer asked.
    stays: Option<Round>,
}

impl Beat {
    const IDLE: Self = Self {
        pending: false,
        each: 0,
        once: 0,
        twice: 0,
        via: NO_NIC,
        used: false,
        told: false,
        stays: None,
    };

    /// The connection was used, and the peer need not know of it.
    const fn is_use_news(&self) -> bool {
        self.used || self.told
    }

    /// Wants one more, unless enough are under way to tell; one by each NIC that has none, if any is under way. The NICs `leading` to the
    /// peer have a bit each.
    const fn repeat(&mut self, leading: u8) {
        self.pending |= self.has_room(leading);
        if self.pending && self.once != 0 {
            self.each |= leading & !self.once;
        }
    }

    /// Whether one more is of use: those under way may be stuck on a NIC, or on several, and none on the next.
    const fn has_room(&self, leading: u8) -> bool {
        self.once.count_ones() + self.twice.count_ones() < MAX_BEATS || leading & !self.once != 0
    }

    /// Which NICs the next may go by, a bit for each, of those `leading` to the peer; none if none is to be posted. Such as have none under
    /// way, another than the last one's if there is a choice.
    const fn ways(&self, leading: u8) -> u8 {
        let free = leading & !self.once;
        let others = free & !1_u8.unbounded_shl(self.via as u32);
        let next = match (others, free) {
            _ if !self.pending => 0,
            (0, 0) if self.has_room(leading) => leading,
            (0, free) => free,
            (others, _) => others,
        };
        next | (self.each & free)
    }

    /// One was posted on the NIC of this bit, of those that it may go by.
    const fn add(&mut self, bit: u8) {
        self.twice |= self.once & bit;
        self.once |= bit;
        self.each &= !bit;
    }

    /// One ended there. `false` if none was under way.
    const fn remove(&mut self, bit: u8) -> bool {
        let there = self.once & bit;
        self.once &= !bit | self.twice;
        self.twice &= !bit;
        if self.once == 0 {
            // None is stuck.
            self.each = 0;
        }
        there != 0
    }
}

/// A heartbeat, an ask or an answer, in a [`Token`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Note {
    Beat,
    /// About this NIC of ours.
    Ask(NicIndex),
    /// About this NIC of the peer's.
    Answer(NicIndex),
}

/// What became of a note.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoteEnd {
    Arrived,
    Undelivered,
    /// With the connection, or for a reason of its path's.
    Failed(WorkError),
}

/// What a transfer does whose next piece was refused.
pub(super) enum Damaged {
    /// It waits for a credit, or for the peer.
    Wait,
    /// It is not first in this lane any more, or was stopped.
    Moved,
    /// This is posted.
    Piece(WorkRequest),
}

impl<P, T, TS, PS, LS> DomainGroup<P, T, TS, PS, LS>
where
    P: PageList,
    T: TargetList,
    TS: Storage<TransferSlot<P, T>>,
    PS: Storage<PeerSlot>,
    LS: Storage<LostSlot>,
{
    // ---- the sender ----

    /// The path from our NIC `nic` to the peer's NIC `remote_nic` broke: nothing more is posted there. What is
    /// in flight on it is reported once the peer has been asked, after [`Event::Settle`].
    ///
    /// O(transfers) if `nic` reaches the peer no more.
    pub fn handle_path_broken(
        &mut self,
        now: Time,
        peer: PeerId,
        nic: NicIndex,
        remote_nic: NicIndex,
    ) {
        let (drain, at, own_count) = (self.config.drain, usize::from(nic), self.nic_count);
        let Some(entry) = self.peer_entry(peer).filter(|entry| !entry.is_down()) else {
            return;
        };
        let bit = 1_u8.unbounded_shl(remote_nic.into());
        let known = nic < own_count && remote_nic < entry.nic_count;
        let paths = &mut entry.paths;
        let (Some(broken), Some(ask)) = (paths.broken.get_mut(at), paths.asks.get_mut(at)) else {
            return;
        };
        if !known || *broken & bit != 0 {
            return;
        }
        *broken |= bit;
        paths.last_broken = nic;
        let idle = ask.unsettled == 0;
        ask.unsettled |= bit;
        if idle {
            ask.start(now, drain);
        }
        // What was said over this path may have been lost with it, and the path is settled only after
        // others of its NIC, which may be what it was said about.
        paths
            .asks
            .iter_mut()
            .filter(|ask| ask.turn.was_of(nic) && ask.in_flight > 0)
            .for_each(Ask::repeat);
        paths
            .replies
            .iter_mut()
            .filter(|it| it.turn.was_of(nic) && it.in_flight > 0)
            .for_each(Reply::repeat);
        self.routes_changed(now, peer.index);
    }

    /// The path can be posted on again. Nothing is in flight on it from before.
    pub fn handle_path_restored(
        &mut self,
        now: Time,
        peer: PeerId,
        nic: NicIndex,
        remote_nic: NicIndex,
    ) {
        let Some(entry) = self.peer_entry(peer).filter(|entry| !entry.is_down()) else {
            return;
        };
        let bit = 1_u8.unbounded_shl(remote_nic.into());
        let unreached = entry.paths.unreached.get(usize::from(nic)).copied().unwrap_or(0);
        let Some(broken) = entry.paths.broken.get_mut(usize::from(nic)) else {
            return;
        };
        if *broken & !unreached & bit == 0 {
            return;
        }
        *broken &= !bit;
        // Whoever restores a path has settled it, be it by other means than ours.
        self.settled(now, peer, nic, bit);
    }

    /// The answer to what was asked of `nic` lies in our control region for the peer.
    pub fn handle_answer(&mut self, peer: PeerId, nic: NicIndex) {
        let Some(entry) = self.peer_entry(peer) else {
            return;
        };
        if let Some(ask) = entry.paths.asks.get_mut(usize::from(nic)) {
            ask.answered = ask.unsettled != 0;
            self.mark_dirty(peer.index);
        }
    }

    /// After [`Event::Settle`]: every piece that was in flight on the path has been reported, by
    /// [`DomainGroup::handle_completion`] or [`DomainGroup::handle_undelivered`].
    pub fn handle_settled(&mut self, now: Time, peer: PeerId, nic: NicIndex, remote_nic: NicIndex) {
        self.settled(now, peer, nic, 1_u8.unbounded_shl(remote_nic.into()));
    }

    fn settled(&mut self, now: Time, peer: PeerId, nic: NicIndex, bit: u8) {
        let drain = self.config.drain;
        let Some(entry) = self.peer_entry(peer).filter(|entry| !entry.is_down()) else {
            return;
        };
        let Some(ask) = entry.paths.asks.get_mut(usize::from(nic)) else {
            return;
        };
        let asked = ask.unsettled & bit != 0 && 1_u8.unbounded_shl(ask.remote.into()) == bit;
        ask.unsettled &= !bit;
        if asked {
            ask.start(now, drain);
        }
        self.routes_changed(now, peer.index);
        self.stop_stranded(now);
    }

    /// It cannot be told what became of the pieces on a broken path of `nic`, ours or the peer's: the peer
    /// is given up, and its transfers end without having been written.
    pub fn handle_unsettled(&mut self, now: Time, peer: PeerId, nic: NicIndex) {
        self.remove_peer(now, peer, DownReason::PathLost { nic });
    }

    /// A piece did not arrive and never will: it is posted again on another path, unless its transfer was
    /// stopped. As [`DomainGroup::handle_completion`], `false` for what names nothing in flight.
    pub fn handle_undelivered(&mut self, now: Time, work: &WorkRequest) -> bool {
        let (id, at) = (work.token.transfer(), usize::from(work.nic));
        if work.token.note().is_some() {
            return self.note_ended(now, work.nic, work.token, NoteEnd::Undelivered);
        }
        let lost = self.lost_count;
        let slot = self.transfers.as_mut().get_mut(usize::from(id.index));
        let active =
            slot.filter(|slot| slot.generation == id.generation).and_then(TransferSlot::active);
        let Some(active) = active.filter(|active| active.outstanding.count() > 0) else {
            return false;
        };
        let peer_slot = self.peers.as_mut().get_mut(usize::from(work.peer.index));
        let same = work.token.peer_index() == work.peer.index;
        let entry = peer_slot.filter(|slot| same && slot.generation == work.peer.generation);
        let Some(entry) = entry.and_then(|slot| slot.entry.as_mut()) else {
            return false;
        };
        let over = entry.over.get_mut(at).filter(|over| over.in_flight > 0);
        let Some(over) = over else {
            return false;
        };
        over.in_flight -= 1;
        over.credits.give_back(active.lane);
        entry.last_progress = now;
        let gone = entry.stopped && entry.quiet();
        if let Some(state) = self.nics.get_mut(at) {
            state.credits.give_back(active.lane);
        }
        let stopped = active.stop.is_some();
        match self.lost.as_mut().get_mut(lost).filter(|_| !stopped) {
            Some(slot) => {
                *slot = LostSlot(Some(*work));
                entry.paths.lost = entry.paths.lost.saturating_add(1);
                self.lost_count = lost.saturating_add(1);
                self.aside = self.aside.saturating_add(1);
            }
            None => {
                active.outstanding.remove(work.peer.index);
                active.failed = true;
                // As `handle_completion` of a piece that failed: the first reason stays.
                let (peer, nic, error) = (work.peer, work.nic, WorkError::Flushed);
                self.stop(now, id.index, TransferError::Piece { peer, nic, error });
            }
        }
        self.grant(work.peer.index, at);
        if gone {
            self.mark_dirty(work.peer.index);
        }
        true
    }

    /// After [`Event::Heartbeat`]: a heartbeat is the next piece to the peer, before all transfers. It needs no
    /// slot and no credit. O(1); nothing happens if the peer cannot be posted to now, or has enough of them
    /// under way: one that completes is a sign of life to it, one that does not by the next time is followed by one over each other NIC
    /// that leads there.
    pub fn beat(&mut self, peer: PeerId) {
        let usable = self.nics_usable();
        let Some(entry) = self.peer_entry(peer).filter(|entry| entry.is_usable()) else {
            return;
        };
        entry.paths.beat.repeat(entry.leading(usable));
        self.count_notes(peer.index);
    }

    /// The peer asks to part, for the `round`th time ([`Usage::Over`]): it writes nothing until this is answered. All that it wrote before has
    /// been reported, unless the connection is `used` all the same. If it is not, here either, it is ended, with [`Event::Disconnect`];
    /// else the peer is told, and the same question has the same answer from then on: it may come late. O(transfers).
    pub fn handle_parting(&mut self, now: Time, peer: PeerId, round: Round, used: bool) {
        let used = used || self.any_goes_to(peer);
        let usable = self.nics_usable();
        let Some(entry) = self.peer_entry(peer).filter(|entry| entry.is_usable()) else {
            return;
        };
        let leading = entry.leading(usable);
        let paths = &mut entry.paths;
        // That question, or one before: its asker has gone on since.
        let stayed = paths.stayed.filter(|stayed| stayed.wrapping_sub(round) <= Round::MAX / 2);
        if used || entry.used || paths.beat.is_use_news() || stayed.is_some() {
            (paths.stayed, paths.beat.stays) = (stayed.or(Some(round)), Some(round));
            paths.beat.repeat(leading);
            self.count_notes(peer.index);
        } else {
            self.remove_peer(now, peer, DownReason::Idle);
        }
    }

    /// Whether the connection is of use to this end, or was since a heartbeat that the peer has heard of. O(transfers).
    #[must_use]
    pub fn is_used(&self, peer: PeerId) -> bool {
        let is_news = |entry: &PeerEntry| entry.used || entry.paths.beat.is_use_news();
        self.any_goes_to(peer) || self.view().entry(peer).is_some_and(is_news)
    }

    /// The peer answers that it stays ([`Usage::Stays`]): what was submitted since it was asked goes to it.
    pub fn handle_stays(&mut self, now: Time, peer: PeerId, round: Round) {
        let entry = self.peer_entry(peer);
        if entry.is_some_and(|entry| entry.machine.handle_stays(now, round)) {
            self.after_peer_step(now, peer);
            self.routes_changed(now, peer.index);
        }
    }

    // ---- the receiver ----

    /// Where answers to the peer are written from; without it, it gets none.
    pub fn set_receipts(&mut self, peer: PeerId, receipts: Receipts) {
        if let Some(entry) = self.peer_entry(peer) {
            entry.paths.receipts = Some(receipts);
        }
        self.count_notes(peer.index);
    }

    /// The peer asks what arrived over the path from its NIC `from` to ours `to`.
    ///
    /// # Errors
    ///
    /// [`AskError`]: the peer broke the protocol; nothing changed.
    pub fn handle_ask(
        &mut self,
        peer: PeerId,
        from: NicIndex,
        to: NicIndex,
        epoch: Epoch,
    ) -> Result<(), AskError> {
        let own_count = self.nic_count;
        let Some(entry) = self.peer_entry(peer) else {
            return Ok(());
        };
        let known = from < entry.nic_count && to < own_count;
        let reply = entry.paths.replies.get_mut(usize::from(from)).filter(|_| known);
        reply.ok_or(AskError)?.ask(epoch, to)?;
        self.mark_dirty(peer.index);
        self.count_notes(peer.index);
        Ok(())
    }

    /// After [`Event::Fence`]: nothing of the path lands any more, and the answer about the peer's NIC
    /// `from` lies in the memory of [`DomainGroup::set_receipts`].
    pub fn handle_fenced(&mut self, peer: PeerId, from: NicIndex) {
        let Some(entry) = self.peer_entry(peer) else {
            return;
        };
        let reply = entry.paths.replies.get_mut(usize::from(from));
        if let Some(reply) = reply.filter(|reply| reply.state == ReplyState::Fencing) {
            (reply.state, reply.pending) = (ReplyState::Ready, reply.next.is_none());
            reply.go_on();
            self.mark_dirty(peer.index);
        }
        self.count_notes(peer.index);
    }

    // ---- what is posted out of turn ----

    /// As [`DomainGroup::poll_work`], while notes or lost pieces come before all lanes.
    #[cold]
    #[inline(never)]
    pub(super) fn poll_with_aside(&mut self, nic: NicIndex) -> Option<WorkRequest> {
        let first = self.poll_note(nic);
        let first = first.or_else(|| if self.lost_count > 0 { self.poll_lost(nic) } else { None });
        if first.is_some() {
            return first;
        }
        let in_flight: usize = self.nics.iter().map(|nic| usize::from(nic.credits.used)).sum();
        let full = in_flight.saturating_add(self.lost_count) >= self.lost.as_ref().len();
        if full && self.lost_count > 0 {
            // What might yet be lost would find no room.
            return None;
        }
        let order = self.nics.get(usize::from(nic))?.credits.order();
        order.into_iter().find_map(|lane| self.poll_lane(nic, lane))
    }

    fn poll_note(&mut self, nic: NicIndex) -> Option<WorkRequest> {
        let usable = self.nics_usable();
        for index in 0..self.peers.as_ref().len() {
            let slot = self.peers.as_mut().get_mut(index)?;
            let peer = PeerId { index: index_of(index), generation: slot.generation };
            let Some(entry) = slot.entry.as_mut().filter(|entry| entry.paths.ready) else {
                continue;
            };
            let note = entry.next_note(peer, nic, usable);
            if note.is_some() {
                self.count_notes(peer.index);
                return note;
            }
        }
        None
    }

    /// The first piece set aside that can go over this NIC.
    fn poll_lost(&mut self, nic: NicIndex) -> Option<WorkRequest> {
        let at = usize::from(nic);
        let peer_depth = self.peer_depth();
        let reserve = self.config.latency_reserve;
        let state = self.nics.get(at)?;
        let (credits, all) = (state.credits, state.config.queue_depth);
        for place in 0..self.lost_count {
            let Some(LostSlot(Some(work))) = self.lost.as_ref().get(place).copied() else {
                continue;
            };
            let index = work.token.transfer().index;
            let lane = self.transfers.as_mut().get_mut(usize::from(index));
            let Some(lane) = lane.and_then(TransferSlot::active).map(|active| active.lane) else {
                continue;
            };
            let view = self.view();
            let over = view.over(work.peer, at);
            let admitted = over.is_some_and(|over| over.credits.left(lane, peer_depth))
                && credits.left(lane, Depth { all, reserve });
            let Some(moved) = self.moved(&work, nic).filter(|_| admitted) else {
                continue;
            };
            self.remove_lost(place);
            if let Some(over) = self.charge(work.peer, at, work.imm) {
                over.credits.take(lane);
            }
            if let Some(state) = self.nics.get_mut(at) {
                state.credits.take(lane);
            }
            self.grant_all(work.peer.index);
            return Some(moved);
        }
        None
    }

    /// The piece as it is posted on `nic`; `None` if its peer, or a region of it, is not reached from there.
    pub(super) fn moved(&self, work: &WorkRequest, nic: NicIndex) -> Option<WorkRequest> {
        let view = self.view();
        let entry = view.entry(work.peer)?;
        let id = work.token.transfer();
        let slot = self.transfers.as_ref().get(usize::from(id.index))?;
        let active = slot.active_ref().filter(|_| slot.generation == id.generation)?;
        let piece = work.piece();
        // Its own, if that goes: what was written before it may have gone that way, and count only behind it.
        if nic == work.nic && entry.reaches(nic, work.remote_nic) {
            return Some(*work);
        }
        entry.reached_from(nic).find_map(|remote| {
            let piece = active.plan.moved(&piece, nic, remote, &view)?;
            Some(work_of(id, nic, &piece))
        })
    }

    /// Takes a piece out of those set aside. The last one takes its place.
    fn remove_lost(&mut self, place: usize) -> Option<WorkRequest> {
        let last = self.lost_count.checked_sub(1)?;
        let slots = self.lost.as_mut();
        let moved = core::mem::take(slots.get_mut(last)?);
        let taken =
            if place == last { moved } else { core::mem::replace(slots.get_mut(place)?, moved) };
        self.lost_count = last;
        self.aside = self.aside.saturating_sub(1);
        let work = taken.0?;
        if let Some(entry) = self.peer_entry(work.peer) {
            entry.paths.lost = entry.paths.lost.saturating_sub(1);
        }
        Some(work)
    }

    /// A transfer was stopped: what is set aside of it will not be written.
    #[cold]
    #[inline(never)]
    pub(super) fn drop_lost(&mut self, index: u16) {
        let mut place = 0;
        while let Some(LostSlot(Some(work))) = self.lost.as_ref().get(place).copied() {
            if work.token.transfer().index != index {
                place += 1;
                continue;
            }
            self.remove_lost(place);
            let slot = self.transfers.as_mut().get_mut(usize::from(index));
            if let Some(active) = slot.and_then(TransferSlot::active) {
                active.outstanding.remove(work.peer.index);
                active.failed = true;
            }
            self.grant_all(work.peer.index);
        }
    }

    /// Stops the transfers of pieces set aside that no usable NIC can carry, and none will before long.
    pub(super) fn stop_stranded(&mut self, now: Time) {
        let mut place = 0;
        while let Some(LostSlot(Some(work))) = self.lost.as_ref().get(place).copied() {
            let view = self.view();
            let waits = view.entry(work.peer).is_some_and(|entry| {
                // Each of the two ends in bounded time.
                entry.paths.unsettled() || entry.pathless
            });
            let usable = self.nics_usable();
            let mut nics =
                (0..self.nic_count).filter(|nic| usable & 1_u8.unbounded_shl((*nic).into()) != 0);
            if waits || nics.any(|nic| self.moved(&work, nic).is_some()) {
                place += 1;
            } else {
                // This takes it out, and others.
                let index = work.token.transfer().index;
                self.stop(now, index, TransferError::NoNic);
                self.drop_lost(index);
                place = 0;
            }
        }
    }

    /// A note ended, as [`DomainGroup::handle_completion`] was told.
    #[cold]
    #[inline(never)]
    pub(super) fn note_ended(
        &mut self,
        now: Time,
        nic: NicIndex,
        token: Token,
        end: NoteEnd,
    ) -> bool {
        let Some((note, peer)) = token.note().zip(self.peer_of_note(token)) else {
            return false;
        };
        let usable = self.nics_usable();
        let Some(entry) = self.peer_entry(peer) else {
            return false;
        };
        let leading = entry.leading(usable);
        let over = entry.over.get_mut(usize::from(nic)).filter(|over| over.in_flight > 0);
        let paths = &mut entry.paths;
        match (note, over) {
            (Note::Ask(of), Some(over)) => {
                let ask = paths.asks.get_mut(usize::from(of)).filter(|ask| ask.in_flight > 0);
                let Some(ask) = ask else {
                    return false;
                };
                ask.in_flight -= 1;
                // Of whichever epoch it was: an ask too many changes nothing.
                if end == NoteEnd::Undelivered {
                    ask.repeat();
                }
                over.in_flight -= 1;
            }
            (Note::Answer(of), Some(over)) => {
                let reply = paths.replies.get_mut(usize::from(of));
                let Some(reply) = reply.filter(|reply| reply.in_flight > 0) else {
                    return false;
                };
                reply.in_flight -= 1;
                over.in_flight -= 1;
                if end == NoteEnd::Undelivered {
                    reply.repeat();
                }
            }
            (Note::Beat, Some(over)) if paths.beat.remove(1_u8.unbounded_shl(nic.into())) => {
                over.in_flight -= 1;
                if end == NoteEnd::Undelivered {
                    // What it has said is not heard.
                    paths.beat.used = true;
                    paths.beat.repeat(leading);
                }
            }
            _ => return false,
        }
        entry.last_progress = now;
        self.mark_dirty(peer.index);
        self.count_notes(peer.index);
        match end {
            NoteEnd::Arrived | NoteEnd::Undelivered => {}
            // The peer, or the connection with all its paths.
            NoteEnd::Failed(WorkError::PeerGone | WorkError::Flushed) => {
                self.remove_peer(now, peer, DownReason::Disconnected);
            }
            NoteEnd::Failed(_) => self.remove_peer(now, peer, DownReason::PathLost { nic }),
        }
        true
    }

    fn peer_of_note(&self, token: Token) -> Option<PeerId> {
        let index = token.peer_index();
        let slot = self.peers.as_ref().get(usize::from(index))?;
        let peer = PeerId { index, generation: slot.generation };
        token.note().filter(|note| Token::of_note(*note, peer) == token).map(|_| peer)
    }

    // ---- inside ----

    /// Our usable NICs, a bit for each.
    pub(super) fn nics_usable(&self) -> u8 {
        let nics = self.nics.iter().zip(0_u32..);
        let usable = nics.filter(|(nic, _)| nic.usable());
        usable.fold(0, |mask, (_, at)| mask | 1_u8.unbounded_shl(at))
    }

    /// A path, or a NIC of ours, was lost or is back: routes to the peer are made anew.
    pub(super) fn routes_changed(&mut self, now: Time, index: u16) {
        let own = self.nic_states();
        let until = now.after(self.config.drain);
        let slot = self.peers.as_mut().get_mut(usize::from(index));
        let Some(entry) = slot.and_then(|slot| slot.entry.as_mut()) else {
            return;
        };
        entry.set_routes(&own);
        entry.paths.pathless_until = match entry.pathless {
            false => Time::NEVER,
            true => entry.paths.pathless_until.min(until),
        };
        let timeout = entry.paths.next_timeout();
        self.next_timeout = self.next_timeout.min(timeout);
        self.count_notes(index);
        self.grant_all(index);
        for nic in 0..usize::from(self.nic_count) {
            self.wake_cut_off(index, nic);
        }
    }

    /// Counts the peer in [`DomainGroup::aside`] exactly while there is a note that can be posted.
    pub(super) fn count_notes(&mut self, index: u16) {
        let usable = self.nics_usable();
        let slot = self.peers.as_mut().get_mut(usize::from(index));
        let Some(entry) = slot.and_then(|slot| slot.entry.as_mut()) else {
            return;
        };
        let goes = entry.is_usable() && entry.routes.is_some();
        let ready = goes && entry.paths.has_note(entry.leading(usable));
        let before = core::mem::replace(&mut entry.paths.ready, ready);
        match (before, ready) {
            (false, true) => self.aside = self.aside.saturating_add(1),
            (true, false) => self.aside = self.aside.saturating_sub(1),
            _ => {}
        }
    }

    /// What falls due at `now`. Returns when to look again.
    pub(super) fn paths_timeout(&mut self, now: Time, peer: PeerId) -> Time {
        let drain = self.config.drain;
        let Some(entry) = self.peer_entry(peer).filter(|entry| !entry.is_down()) else {
            return Time::NEVER;
        };
        let paths = &mut entry.paths;
        // An answer that has come is looked at first, however late whoever drives this is; one, since others might answer nothing for ever.
        let before = core::mem::take(&mut paths.spared);
        let mut given_up = None;
        for (nic, ask) in (0_u8..).zip(&paths.asks).filter(|(_, ask)| ask.until <= now) {
            let bit = 1_u8.unbounded_shl(nic.into());
            if ask.answered && before & bit == 0 {
                paths.spared |= bit;
            } else {
                given_up = given_up.or(Some(nic));
            }
        }
        let pathless = (paths.pathless_until <= now).then_some(paths.last_broken);
        if let Some(nic) = given_up.or(pathless) {
            self.remove_peer(now, peer, DownReason::PathLost { nic });
            return Time::NEVER;
        }
        for ask in paths.asks.iter_mut().filter(|ask| ask.again <= now) {
            ask.repeat();
            ask.again = now.after(interval(drain));
        }
        let next = paths.next_timeout();
        self.count_notes(peer.index);
        next
    }

    /// Whoever waits in line for the peer's credits on this NIC goes back into its lane, if the NIC reaches
    /// the peer no more but others do: there it is moved to one of those.
    fn wake_cut_off(&mut self, peer: u16, nic: usize) {
        loop {
            let slot = self.peers.as_mut().get_mut(usize::from(peer));
            let Some(entry) = slot.and_then(|slot| slot.entry.as_mut()) else {
                return;
            };
            let cut_off = entry.is_usable();
            let over = entry.over.get(nic).filter(|over| cut_off && over.whole == 0);
            let first = over.and_then(|over| {
                over.credits.order().into_iter().find_map(|lane| over.waiting.first(lane))
            });
            let Some(index) = first else {
                return;
            };
            self.leave_queue(index, nic);
            self.enter_queue(index, nic, Place::Lane);
        }
    }

    /// A transfer's next piece on `nic` was refused. If that was for a broken path: what is to be done then.
    #[cold]
    #[inline(never)]
    pub(super) fn poll_damaged(&mut self, index: u16, nic: NicIndex, peer: PeerId) -> Damaged {
        let at = usize::from(nic);
        let peer_depth = self.peer_depth();
        let view = PeerView(self.peers.as_ref());
        let Some(over) = view.over(peer, at).filter(|over| over.damaged) else {
            return Damaged::Wait;
        };
        if over.whole == 0 {
            return self.move_cut_off(index, nic, peer);
        }
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some(slot) = slot else {
            return Damaged::Wait;
        };
        let id = TransferId { index, generation: slot.generation };
        let Some(active) = slot.active() else {
            return Damaged::Wait;
        };
        let (lane, place) = (active.lane, active.place.get_mut(at));
        let granted = place.filter(|place| **place == Place::Granted(peer.index));
        if granted.is_none() && !over.credits.left(lane, peer_depth) {
            return Damaged::Wait;
        }
        let Next::Piece(piece) = active.plan.next_if(nic, &view, |_| true) else {
            // The list has changed, or there is nowhere to write to: refused a second time, it is stopped.
            let error = TransferError::ListChanged;
            self.stop_untimed(index, error);
            return Damaged::Moved;
        };
        let kept = granted.map(|place| *place = Place::Lane).is_some();
        active.outstanding.add(peer.index, 1);
        active.started = true;
        let left = active.plan.has_work(nic);
        if let Some(state) = self.nics.get_mut(at) {
            state.credits.take(lane);
        }
        if let Some(over) = self.charge(peer, at, piece.imm).filter(|_| !kept) {
            over.credits.take(lane);
        }
        if left {
            self.take_turn(at, lane, index, piece.len);
        } else {
            self.withdraw(index, at);
        }
        // It was planned for a path that may be the broken one.
        let work = work_of(id, nic, &piece);
        if let Some(moved) = self.moved(&work, nic) {
            return Damaged::Piece(moved);
        }
        let then = self.view().entry(peer).map_or(Time::ZERO, |entry| entry.last_progress);
        self.handle_completion(then, nic, work.token, Err(WorkError::RemoteAccess));
        Damaged::Moved
    }

    /// The peer is not reached from `nic`: moves what the transfer has left for it there to a NIC that does.
    fn move_cut_off(&mut self, index: u16, nic: NicIndex, peer: PeerId) -> Damaged {
        let usable = self.nics_usable();
        let view = PeerView(self.peers.as_ref());
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        let Some((entry, active)) = view.entry(peer).zip(slot.and_then(TransferSlot::active))
        else {
            return Damaged::Wait;
        };
        let leads = |other: NicIndex| {
            let over = entry.over.get(usize::from(other));
            usable & 1_u8.unbounded_shl(other.into()) != 0 && over.is_some_and(|it| it.whole != 0)
        };
        let (routes, others) = (entry.routes.as_ref(), others(nic, self.nic_count));
        let moved = active.plan.reroute_next(nic, routes, others, leads);
        if moved {
            self.withdraw(index, usize::from(nic));
            self.enqueue(index);
        } else {
            self.stop_untimed(index, TransferError::NoNic);
        }
        Damaged::Moved
    }

    fn grant_all(&mut self, peer: u16) {
        for nic in 0..usize::from(self.nic_count) {
            self.grant(peer, nic);
        }
    }
}

impl PeerEntry {
    /// Whether the path between two NICs is whole.
    fn reaches(&self, nic: NicIndex, remote: NicIndex) -> bool {
        let whole = self.over.get(usize::from(nic)).map_or(0, |over| over.whole);
        whole & 1_u8.unbounded_shl(remote.into()) != 0
    }

    /// The peer's NICs that `nic` reaches, the one that its routes name first.
    fn reached_from(&self, nic: NicIndex) -> impl Iterator<Item = NicIndex> {
        let routed = self.routes.as_ref().map_or(&[][..], |routes| routes.as_slice());
        let routed =
            routed.iter().filter(move |route| route.local == nic).map(|route| route.remote);
        let reached = move |remote: &NicIndex| self.reaches(nic, *remote);
        let all = 0..index_of(MAX_NICS).to_le_bytes()[0];
        routed.chain(all).filter(reached)
    }

    /// Of our `usable` NICs, a bit for each, those that reach the peer.
    pub(super) fn leading(&self, usable: u8) -> u8 {
        let nics = (0_u32..).zip(&self.over).filter(|(_, over)| over.whole != 0);
        usable & nics.fold(0, |mask, (at, _)| mask | 1_u8.unbounded_shl(at))
    }

    /// The next note, if it can go over `nic`; `usable` are our usable NICs.
    pub(super) fn next_note(
        &mut self,
        peer: PeerId,
        nic: NicIndex,
        usable: u8,
    ) -> Option<WorkRequest> {
        let control = self.control?;
        let remote_nic =
            self.reached_from(nic).find(|remote| control.keys.get(*remote).is_some())?;
        let dst_key = control.keys.get(remote_nic)?;
        let (leading, bit) = (self.leading(usable), 1_u8.unbounded_shl(nic.into()));
        let work = |note, imm: Control| WorkRequest {
            token: Token::of_note(note, peer),
            nic,
            remote_nic,
            peer,
            src: 0,
            src_key: 0,
            dst: control.base,
            dst_key,
            len: 0,
            run: PageRun::NONE,
            imm: Some(Imm::from_bits(imm.encode())),
        };
        let mut posted = None;
        for (from, ask) in (0..).zip(&mut self.paths.asks) {
            if ask.pending && ask.turn.is_of(nic, leading) {
                ask.pending = false;
                ask.in_flight = ask.in_flight.saturating_add(1);
                ask.turn.take(nic, leading);
                let imm = Control::Ask { from, to: ask.remote, epoch: ask.epoch };
                posted = Some(work(Note::Ask(from), imm));
                break;
            }
        }
        if let (None, Some(receipts)) = (posted, self.paths.receipts) {
            let len = SETTLEMENT_BYTES as u64;
            for (of, reply) in (0_u8..).zip(&mut self.paths.replies) {
                if reply.pending && reply.turn.is_of(nic, leading) {
                    let offset = receipts.offset.checked_add(u64::from(of) * len)?;
                    let src = receipts.src.range(offset, len).ok()?;
                    let src_key = receipts.src.keys.get(nic)?;
                    let dst = control.range(offset, len).ok()?;
                    reply.pending = false;
                    reply.turn.take(nic, leading);
                    reply.in_flight = reply.in_flight.saturating_add(1);
                    let note = work(Note::Answer(of), Control::Answer(of));
                    posted = Some(WorkRequest { src, src_key, dst, len, ..note });
                    break;
                }
            }
        }
        // Last: any of the others is a sign of life, too.
        let beat = &mut self.paths.beat;
        if posted.is_none() && beat.ways(leading) & bit != 0 {
            (beat.pending, beat.via) = (false, nic);
            beat.add(bit);
            let usage = match (beat.stays, self.machine.parting()) {
                (Some(round), _) => Usage::Stays(round),
                (None, Some(round)) => Usage::Over(round),
                (None, None) if beat.used => Usage::Some,
                (None, None) => Usage::None,
            };
            // Of several that go together each says it, since any other may be stuck.
            if beat.each & leading == 0 {
                beat.stays = None;
                beat.used &= usage != Usage::Some;
            }
            beat.told = usage == Usage::Some;
            posted = Some(work(Note::Beat, Control::Heartbeat(usage)));
        }
        // When the next heartbeat is due follows from when this one was.
        self.sent |= posted.as_ref()?.token.note() != Some(Note::Beat);
        let over = self.over.get_mut(usize::from(nic))?;
        over.in_flight = over.in_flight.saturating_add(1);
        posted
    }
}
