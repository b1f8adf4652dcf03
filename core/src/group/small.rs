//! Writes of one piece, by the shortest way.
//!
//! Most writes are small, and what they cost is what users wait for. What [`super`] does for any transfer is
//! done here for a write that is one piece whatever the NICs, with one look each at its peer, its NIC and its
//! slot. It is written by somebody who has done so when the call returns, and never becomes a transfer
//! ([`DomainGroup::unhindered`]); or taken and posted at once ([`DomainGroup::express`]); or else taken into its
//! lane, and later posted from there. What to do when something stands in its way is not known here.
//!
//! # Invariants
//!
//! 1. Taking a write into its lane, and posting it from there, leave the group as the general way does.
//! 2. Whatever is not done leaves the group as it was. Where anything is out of the ordinary (no credit, no
//!    peer, a broken path, a missing key) nothing is done, and the general way is taken.
//! 3. A write passes nobody on one way that it would not pass on another: what is unhindered could be expressed,
//!    were a slot free.
//!
//! The tests of the group compare whole groups with those that went the general way, at every step of the
//! programs that they enumerate.

use super::slot::{Depth, Lane, NicLinks, PeerSlot, PeerView, Storage, TransferSlot};
use super::{DomainGroup, Options, Place, WorkRequest, work_of};
use crate::id::{NicIndex, Time, TransferId};
use crate::imm::WRITE_UNITS;
use crate::plan::{PageList, PageRun, Piece, Plan, SingleRef, SingleWrite, TargetList, Whole};

impl<P, T, TS, PS, LS> DomainGroup<P, T, TS, PS, LS>
where
    P: PageList,
    T: TargetList,
    TS: Storage<TransferSlot<P, T>>,
    PS: Storage<PeerSlot>,
    LS: Storage<super::LostSlot>,
{
    /// What a write posts, and on which NIC, if nothing at all stands before it: it is a single piece and in bounds,
    /// its peer is up, credits are free, and nobody waits for them. Changes nothing. O(1).
    ///
    /// For providers that write while they are called: what is done when the call returns needs no slot and no
    /// credit meanwhile. After a success tell the group so by [`DomainGroup::wrote`].
    #[inline(always)]
    #[must_use]
    pub fn unhindered(&self, write: &SingleRef<'_>) -> Option<(NicIndex, Piece)> {
        self.clear(write).map(|(nic, _, piece)| (nic, piece))
    }

    /// The piece that [`DomainGroup::unhindered`] has just given was written: the group is as after one that was
    /// expressed, posted and completed.
    #[inline(always)]
    pub fn wrote(&mut self, now: Time, nic: NicIndex, piece: &Piece) {
        let (at, lane) = (usize::from(nic), self.lane_by_len(piece.len));
        self.turn = self.turn.wrapping_add(1);
        let slot = self.peers.as_mut().get_mut(usize::from(piece.peer.index));
        if let Some(entry) = slot.and_then(|slot| slot.entry.as_mut())
            && let (Some(over), Some(state)) = (entry.over.get_mut(at), self.nics.get_mut(at))
        {
            entry.sent |= piece.imm.is_some();
            entry.last_progress = now;
            entry.used = true;
            over.credits.pass(lane);
            state.credits.pass(lane);
        }
    }

    const fn lane_by_len(&self, len: u64) -> Lane {
        if len <= self.small_bytes { Lane::Latency } else { Lane::Bulk }
    }

    /// See [`DomainGroup::unhindered`]; and the lane.
    #[inline(always)]
    fn clear(&self, write: &SingleRef<'_>) -> Option<(NicIndex, Lane, Piece)> {
        let (peer, len) = (write.peer, write.len);
        if len == 0 || len > self.express_bytes {
            return None;
        }
        let lane = self.lane_by_len(len);
        let src = write.src.range(write.src_offset, len).ok()?;
        let dst = write.dst.range(write.dst_offset, len).ok()?;
        let slot = self.peers.as_ref().get(usize::from(peer.index))?;
        let entry = slot.entry.as_ref().filter(|_| slot.generation == peer.generation)?;
        // Of the engines' own counters: the general way says what is wrong.
        if !entry.is_open()
            || entry.engine != write.dst.owner
            || write.imm.is_some_and(|tag| !tag.is_users())
        {
            return None;
        }
        let routes = entry.routes.as_ref()?;
        let route = routes.get(routes.at_turn(self.turn.wrapping_add(1)))?;
        let (nic, at) = (route.local, usize::from(route.local));
        let (src_key, dst_key) = (write.src.keys.get(nic)?, write.dst.keys.get(route.remote)?);
        let over = entry.over.get(at)?;
        let state = self.nics.get(at).filter(|nic| nic.usable())?;
        let depth = Depth { all: state.config.queue_depth, reserve: self.config.latency_reserve };
        let small = matches!(lane, Lane::Latency);
        let first = small && state.lanes.is_empty_lane(lane) && state.credits.prefers(lane);
        // Whoever stands in the peer's line has no credit for its lane, by invariant 3: behind those of
        // this lane `left` is false, and small writes may pass bulk there as they may in the lanes.
        let clear = (first || state.lanes.is_empty())
            && state.credits.left(lane, depth)
            && over.credits.left(lane, self.peer_depth())
            && self.aside == 0;
        if !clear {
            return None;
        }
        let imm = match write.imm {
            Some(tag) => Some(tag.with_units(WRITE_UNITS)?),
            None => None,
        };
        let (remote_nic, run) = (route.remote, PageRun::NONE);
        Some((nic, lane, Piece { peer, remote_nic, src, src_key, dst, dst_key, len, run, imm }))
    }

    /// Takes a write, and returns it to be posted at once, as from [`DomainGroup::poll_work`].
    ///
    /// `None`, and nothing changes, unless the write is [unhindered](DomainGroup::unhindered) and a slot is free. Submit
    /// it then: that says what is wrong, or waits. O(1), a fraction of what submitting and polling cost.
    // Inlined, so that the piece is made where it is posted from: what was written in parts a moment ago, and is
    // copied in larger ones, has to wait until it is out of the store buffer.
    #[inline(always)]
    pub fn express(&mut self, write: &SingleRef<'_>, options: Options) -> Option<WorkRequest> {
        let (nic, lane, piece) = self.clear(write)?;
        let (peer, at, movable) = (write.peer, usize::from(nic), self.is_movable(write.dst));
        let index = self.free.first()?;
        let slot = self.peers.as_mut().get_mut(usize::from(peer.index))?;
        let entry = slot.entry.as_mut()?;
        let (over, state) = (entry.over.get_mut(at)?, self.nics.get_mut(at)?);
        self.turn = self.turn.wrapping_add(1);
        entry.sent |= piece.imm.is_some();
        over.in_flight = over.in_flight.saturating_add(1);
        over.credits.take(lane);
        state.credits.take(lane);
        let id = self.begin(index, (Plan::taken(peer), false), lane, options);
        let slot = self.transfers.as_mut().get_mut(usize::from(index));
        if let Some(active) = slot.and_then(TransferSlot::active) {
            active.outstanding.set_one();
            active.started = true;
            if movable {
                active.plan.keep_taken(&write.src.keys, &write.dst.keys);
            }
        }
        Some(work_of(id, nic, &piece))
    }

    /// Takes a small write into its lane, as [`DomainGroup::submit_any`] would; `None` if that has to look
    /// closer.
    #[inline(always)]
    pub(super) fn submit_small(
        &mut self,
        write: &SingleWrite,
        options: Options,
    ) -> Option<TransferId> {
        let (peer, len) = (write.peer, write.len);
        if len == 0 || len > self.small_bytes {
            return None;
        }
        let lane = Lane::Latency;
        let view = PeerView(self.peers.as_ref());
        let entry = view.entry(peer)?;
        // A route leads from a NIC of ours to one of the peer's: with a key for each of these, none is
        // missing on any route.
        let (own, theirs) = (write.src.keys.nics(), write.dst.keys.nics());
        let registered = own >= self.nic_count && theirs >= entry.nic_count;
        if !registered || entry.is_down() || entry.engine != write.dst.owner {
            return None;
        }
        let turn = self.turn.wrapping_add(1);
        let whole = Whole::routed(write, entry.routes.as_ref()?, turn)?;
        let at = usize::from(whole.nic()?);
        self.nics.get(at).filter(|nic| nic.usable())?;
        let index = self.free.first()?;
        self.turn = turn;
        let movable = self.is_movable(&write.dst);
        let id = self.begin(index, (Plan::of(whole), false), lane, options);
        let slots = self.transfers.as_mut();
        if let Some(active) = slots.get_mut(usize::from(index)).and_then(TransferSlot::active)
            && let Some(place) = active.place.get_mut(at)
            && let Some(state) = self.nics.get_mut(at)
        {
            if movable {
                active.plan.keep_whole(write);
            }
            *place = Place::Lane;
            state.lanes.of(lane).push_back(&mut NicLinks { slots, nic: at }, index);
        }
        Some(id)
    }

    /// Gives `take` the next small write to post on `nic`, if it is what [`DomainGroup::poll_work`] would
    /// return, and returns its length; `None` if that has to look closer. The write is one that holds a credit
    /// of its peer, if `granted`, or else one that finds a credit.
    #[inline(always)]
    pub(super) fn poll_small(
        &mut self,
        nic: NicIndex,
        granted: bool,
        take: &mut impl FnMut(WorkRequest),
    ) -> Option<u64> {
        let (at, lane, peer_depth) = (usize::from(nic), Lane::Latency, self.peer_depth());
        let reserve = self.config.latency_reserve;
        let state = self.nics.get_mut(at)?;
        // A copy, so that it is not read again after what is written in between.
        let mut queue = *state.lanes.of(lane);
        let index = queue.first()?;
        let depth = Depth { all: state.config.queue_depth, reserve };
        let first = state.lanes.is_empty_lane(Lane::Bulk) || state.credits.prefers(lane);
        if !first || !state.usable() || self.aside > 0 || !state.credits.left(lane, depth) {
            return None;
        }
        let slots = self.transfers.as_mut();
        let slot = slots.get_mut(usize::from(index))?;
        let id = TransferId { index, generation: slot.generation };
        let active = slot.active()?;
        let whole = active.plan.as_whole()?;
        let peer = whole.ready(nic)?;
        let place = active.place.get_mut(at)?;
        let peer_slot = self.peers.as_mut().get_mut(usize::from(peer.index))?;
        let expected = if granted { Place::Granted(peer.index) } else { Place::Lane };
        if *place != expected || peer_slot.generation != peer.generation {
            return None;
        }
        let entry = peer_slot.entry.as_mut()?;
        if !entry.is_open() {
            return None;
        }
        let over = entry.over.get_mut(at)?;
        if over.damaged || !(granted || over.credits.left(lane, peer_depth)) {
            return None;
        }
        let piece = whole.take();
        entry.sent |= piece.imm.is_some();
        if !granted {
            over.credits.take(lane);
        }
        over.in_flight = over.in_flight.saturating_add(1);
        *place = Place::Nowhere;
        // There is no other piece of it.
        active.outstanding.set_one();
        active.started = true;
        take(WorkRequest { run: PageRun::NONE, ..work_of(id, nic, piece) });
        let len = piece.len;
        state.credits.take(lane);
        queue.pop_front(&mut NicLinks { slots, nic: at });
        *state.lanes.of(lane) = queue;
        Some(len)
    }
}
