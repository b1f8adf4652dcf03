//! The plan of a request of many pieces: a cursor for each route.
//!
//! A plan is a set of *lanes*, one for each route. A lane belongs to one local NIC at a time, so NICs
//! advance at their own pace and a lost NIC's lanes move to another. What a lane carries is a function
//! of the request, the lane's number and what was frozen when the plan was made: never of the peer
//! table, which may change while the plan runs.
//!
//! # Invariants
//!
//! A lane in `active` stands on a piece that can be yielded.

use core::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use core::ops::Range;

use super::{
    Barrier, Checked, MAX_ITEMS, Next, PageList, PageRun, PagedWrite, PathKeys, PeerTable, Piece,
    PlanError, PlanLimits, Request, RunLayout, ScatterWrite, SingleWrite, TargetList, bit,
    check_keys, is_small, merged, remote_of,
};
use crate::id::{MAX_NICS, NicIndex, PeerId};
use crate::imm::{Imm, ImmTag, MAX_MERGED, WRITE_UNITS};
use crate::nic::{Routes, Split, align_down};
use crate::region::{LocalMr, MrDesc};

// A normalised turn plus an item's number does not wrap: where items go depends on the sum modulo the
// number of routes.
static_assertions::const_assert!(MAX_ITEMS as usize + MAX_NICS <= u32::MAX as usize);

/// Units of an immediate without bytes, but for the last of a lane.
const NOTE_UNITS: u64 = MAX_MERGED as u64 * WRITE_UNITS as u64;

/// The requests that may be of many pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Long<P, T> {
    Single(SingleWrite),
    Paged(PagedWrite<P>),
    Scatter(ScatterWrite<T>),
    Barrier(Barrier<T>),
}

/// How lanes walk through the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Walk {
    /// Each lane has whole pages, `at..end`, and merges neighbours.
    Pages,
    /// Each lane has whole pages, `at..end`, and takes so many at a time, wherever they lie.
    Runs,
    /// Each lane has its range `at..end` of every item (the single write, one page, one target).
    Items,
    /// Each lane has the units `at..end` to announce by immediates without bytes.
    Notes,
}

/// Where one route is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Lane {
    /// Next page, byte of the item, or unit to announce.
    at: u64,
    /// One past the last.
    end: u64,
    /// The item in hand.
    item: u32,
    /// Number of the next piece, or immediate without bytes, among those of the item that carry units.
    piece: u8,
    /// How many of the item carry units; 0: the pieces carry none.
    pieces: u8,
}

/// A checked request on its way: yields the work requests for each NIC, lazily and in constant space.
///
/// ```text
///   data ── nic_mask() == 0, all completed, drained() == true ──▶ trailing immediates
///     └──── drained() == false: that was all ◀── drained() ────────────┘
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Lanes<P, T> {
    request: Long<P, T>,
    limits: PlanLimits,
    /// Frozen when the plan was made: it decides what each lane carries.
    routes: Routes,
    lanes: [Lane; MAX_NICS],
    /// Lanes of each local NIC, a bit each.
    on_nic: [u8; MAX_NICS],
    /// Lanes that have a piece to yield.
    active: u8,
    /// Lanes that have had their turn in this round.
    served: u8,
    walk: Walk,
    trailing: bool,
    /// The route that item 0 starts at.
    turn: u32,
    items: u32,
    /// Items from one that a lane looks at to the next.
    stride: u32,
    /// The most pages that one piece may carry.
    merge: u64,
    /// Some items were cut into too many pieces to carry immediates.
    owes: bool,
}

impl<P: PageList, T: TargetList> Lanes<P, T> {
    /// Plans `request`; item `i` starts at route `turn + i`, so a caller that counts `turn` up spreads
    /// small transfers over the NICs. O(targets) for a scatter or barrier, else constant.
    ///
    /// # Errors
    ///
    /// [`PlanError`]: a peer cannot be reached, or a region lacks the key of a NIC. Nothing was posted.
    pub(super) fn new(
        request: Checked<P, T>,
        limits: PlanLimits,
        table: &impl PeerTable,
        turn: u32,
    ) -> Result<Option<Self>, PlanError> {
        let Checked { request, longest, items, narrow, .. } = request;
        let request = match request {
            Request::Single(write) => Long::Single(write),
            Request::Paged(write) => Long::Paged(write),
            Request::Scatter(write) => Long::Scatter(write),
            Request::Barrier(barrier) => Long::Barrier(barrier),
            Request::Imm(_) | Request::Control(_) => return Ok(None),
        };
        let routes = frozen_routes(&request, table)?;
        let turn = turn % NonZeroU32::from(routes.count());
        let lane_count = u32::from(routes.count().get());
        let small = is_small(longest, limits.rule);
        let fits = longest <= limits.max_message_bytes.get();
        let walk = match &request {
            Long::Paged(_) if longest == 0 => Walk::Notes,
            Long::Paged(_) if fits && (small || items >= lane_count) => {
                if narrow && limits.pages_per_piece > NonZeroU16::MIN {
                    Walk::Runs
                } else {
                    Walk::Pages
                }
            }
            _ => Walk::Items,
        };
        let fitting = limits.max_message_bytes.get().checked_div(longest);
        let merge = match walk {
            Walk::Pages => fitting,
            Walk::Runs => fitting.map(|most| most.min(limits.pages_per_piece.get().into())),
            Walk::Items | Walk::Notes => None,
        };
        let mut on_nic = [0; MAX_NICS];
        for (r, route) in routes.as_slice().iter().enumerate() {
            if let Some(lanes) = on_nic.get_mut(usize::from(route.local)) {
                *lanes |= bit(r);
            }
        }
        let mut plan = Self {
            request,
            limits,
            routes,
            lanes: [Lane::default(); MAX_NICS],
            on_nic,
            active: 0,
            served: 0,
            walk,
            trailing: false,
            turn,
            items,
            stride: if small { lane_count } else { 1 },
            merge: merge.map_or(1, |most| most.min(MAX_MERGED.into())),
            owes: false,
        };
        match walk {
            Walk::Pages | Walk::Runs => plan.start_pages(),
            Walk::Items => plan.start_items(),
            Walk::Notes if plan.tag().is_some() => plan.start_notes(),
            Walk::Notes => {}
        }
        Ok(Some(plan))
    }

    /// The one peer it goes to; `None` if there may be several.
    pub(super) const fn sole_peer(&self) -> Option<PeerId> {
        match &self.request {
            Long::Single(write) => Some(write.peer),
            Long::Paged(write) => Some(write.peer),
            Long::Scatter(_) | Long::Barrier(_) => None,
        }
    }

    /// Calls `f` for each peer that it goes to. O(targets).
    pub(super) fn each_peer(&self, mut f: impl FnMut(PeerId)) {
        let mut all =
            |targets: &T| (0..targets.len()).filter_map(|i| targets.peer(i)).for_each(&mut f);
        match &self.request {
            Long::Single(write) => f(write.peer),
            Long::Paged(write) => f(write.peer),
            Long::Scatter(write) => all(&write.targets),
            Long::Barrier(barrier) => all(&barrier.targets),
        }
    }

    /// Whether any of it goes to `peer`. O(targets).
    pub(super) fn goes_to(&self, peer: PeerId) -> bool {
        let among = |targets: &T| (0..targets.len()).any(|i| targets.peer(i) == Some(peer));
        match &self.request {
            Long::Single(write) => write.peer == peer,
            Long::Paged(write) => write.peer == peer,
            Long::Scatter(write) => among(&write.targets),
            Long::Barrier(barrier) => among(&barrier.targets),
        }
    }

    /// Local NICs that still have work in this phase, a bit each.
    pub(super) fn nic_mask(&self) -> u8 {
        let nics = self.on_nic.iter().enumerate();
        let with_work = nics.filter(|(_, lanes)| **lanes & self.active != 0);
        with_work.fold(0, |mask, (nic, _)| mask | bit(nic))
    }

    /// Whether `nic` has (more) work in this phase.
    #[inline]
    pub(super) fn has_work(&self, nic: NicIndex) -> bool {
        self.on_nic.get(usize::from(nic)).is_some_and(|lanes| lanes & self.active != 0)
    }

    /// Whom the next piece on `nic` goes to; `None` if this NIC has nothing (more) in this phase.
    pub(super) fn peek(&mut self, nic: NicIndex) -> Option<PeerId> {
        let r = self.lane_of(nic)?;
        self.peer_of(self.lanes.get(r)?)
    }

    /// See [`super::Plan::next_if`].
    #[inline]
    pub(super) fn next_if(
        &mut self,
        nic: NicIndex,
        table: &impl PeerTable,
        admit: impl FnOnce(PeerId) -> bool,
    ) -> Next {
        let Some(r) = self.lane_of(nic) else { return Next::Nothing };
        let Some(mut lane) = self.lanes.get(r).copied() else { return Next::Nothing };
        let Some(peer) = self.peer_of(&lane) else { return Next::Nothing };
        if !admit(peer) {
            return Next::Refused(peer);
        }
        let piece = match self.walk {
            Walk::Pages => self.page_piece(nic, r, &mut lane, None).map(|(piece, _)| piece),
            Walk::Runs => self.run_piece(nic, r, &mut lane),
            Walk::Items => self.item_piece(nic, r, &mut lane, table),
            Walk::Notes => self.note_piece(r, &mut lane),
        };
        let Some(piece) = piece else {
            return match &self.request {
                // The peer is not connected yet.
                Long::Barrier(_) => Next::Impossible(peer),
                // A list has changed since it was checked.
                _ => Next::Nothing,
            };
        };
        self.served |= bit(r);
        if let Some(slot) = self.lanes.get_mut(r) {
            *slot = lane;
        }
        if lane.at >= lane.end {
            if self.walk == Walk::Items {
                self.settle(r, lane.item.saturating_add(self.stride), None);
            } else {
                self.active &= !bit(r);
            }
        }
        Next::Piece(piece)
    }

    /// See [`super::Plan::pages`].
    #[inline]
    pub(super) fn pages(&mut self, nic: NicIndex, mut take: impl FnMut(&Piece) -> bool) {
        if self.walk != Walk::Pages {
            return;
        }
        // The lane that was looked at last, and the page that it stands on.
        let mut ahead = None;
        while self.has_work(nic) {
            let Some(r) = self.lane_of(nic) else { return };
            let Some(mut lane) = self.lanes.get(r).copied() else { return };
            let known = ahead.take().filter(|(of, _)| *of == r).map(|(_, page)| page);
            let Some((piece, next)) = self.page_piece(nic, r, &mut lane, known) else { return };
            ahead = next.map(|page| (r, page));
            self.served |= bit(r);
            if let Some(slot) = self.lanes.get_mut(r) {
                slot.at = lane.at;
            }
            if lane.at >= lane.end {
                self.active &= !bit(r);
            }
            if !take(&piece) {
                return;
            }
        }
    }

    #[inline]
    fn peer_of(&self, lane: &Lane) -> Option<PeerId> {
        match &self.request {
            Long::Single(write) => Some(write.peer),
            Long::Paged(write) => Some(write.peer),
            Long::Scatter(write) => write.targets.peer(usize::try_from(lane.item).ok()?),
            Long::Barrier(barrier) => barrier.targets.peer(usize::try_from(lane.item).ok()?),
        }
    }

    /// Moves all that was not yielded yet from local NIC `from` to `to`.
    ///
    /// `false`, and nothing moves, if `to` is no NIC or the source region is not registered with it.
    pub(super) fn reroute(&mut self, from: NicIndex, to: NicIndex) -> bool {
        self.move_lanes(from, to, u8::MAX)
    }

    /// As [`Self::reroute`], of what is next on `from`, and of all that follows it in its lane.
    pub(super) fn reroute_next(&mut self, from: NicIndex, to: NicIndex) -> bool {
        self.lane_of(from).is_some_and(|r| self.move_lanes(from, to, bit(r)))
    }

    fn move_lanes(&mut self, from: NicIndex, to: NicIndex, which: u8) -> bool {
        let registered = match &self.request {
            Long::Single(write) => write.src.keys.get(to).is_some(),
            Long::Paged(write) => write.src.keys.get(to).is_some(),
            Long::Scatter(write) => write.src.keys.get(to).is_some(),
            Long::Barrier(_) => true,
        };
        if !registered || usize::from(to) >= MAX_NICS {
            return false;
        }
        let mut moved = 0;
        if let Some(lanes) = self.on_nic.get_mut(usize::from(from)) {
            moved = *lanes & which;
            *lanes &= !which;
        }
        if let Some(lanes) = self.on_nic.get_mut(usize::from(to)) {
            *lanes |= moved;
        }
        true
    }

    /// The keys of a piece that this plan has yielded. O(targets) for a scatter.
    pub(super) fn keys(&self, piece: &Piece, table: &impl PeerTable) -> Option<PathKeys> {
        let (src, dst) = match &self.request {
            Long::Single(write) => (Some(write.src.keys), write.dst.keys),
            Long::Paged(write) => (Some(write.src.keys), write.dst.keys),
            Long::Scatter(write) => {
                let mut targets = (0..write.targets.len()).filter_map(|i| write.targets.get(i));
                let target = targets.find(|target| {
                    let dst = &target.dst;
                    let start = dst.base.wrapping_add(target.dst_offset);
                    let inside = match piece.len {
                        0 => piece.dst == dst.base,
                        len => {
                            let offset = piece.dst.wrapping_sub(start);
                            offset.checked_add(len).is_some_and(|end| end <= target.len)
                        }
                    };
                    target.peer == piece.peer
                        && inside
                        && dst.keys.get(piece.remote_nic) == Some(piece.dst_key)
                })?;
                (Some(write.src.keys), target.dst.keys)
            }
            Long::Barrier(_) => (None, table.control(piece.peer)?.keys),
        };
        Some(PathKeys { src, dst })
    }

    /// To be called when [`Self::nic_mask`] is 0 and every piece yielded so far has completed.
    ///
    /// `true`: trailing immediates have become available. `false`: that was all (or there still is work,
    /// and nothing changes).
    pub(super) fn drained(&mut self) -> bool {
        if self.active != 0 || self.trailing || !self.owes {
            return false;
        }
        self.trailing = true;
        if self.sole_peer().is_none() {
            self.start_items();
            return true;
        }
        self.walk = Walk::Notes;
        for (r, owed) in self.owed().into_iter().enumerate() {
            if let Some(lane) = self.lanes.get_mut(r) {
                *lane = Lane { end: owed, ..Lane::default() };
            }
            self.active |= if owed == 0 { 0 } else { bit(r) };
        }
        true
    }

    /// Units of each lane's share of the items that were cut into too many pieces to carry immediates. O(items), of which each
    /// was more than [`WRITE_UNITS`] pieces to post.
    fn owed(&self) -> [u64; MAX_NICS] {
        let mut all = [0_u64; MAX_NICS];
        for cut in (0..self.items).filter_map(|item| self.cut(item)) {
            if cut.pieces(0).1 <= u64::from(WRITE_UNITS) {
                continue;
            }
            for (r, owed) in all.iter_mut().enumerate().filter(|(r, _)| !cut.range(*r).is_empty()) {
                let (way, ways) = cut.ways(r);
                *owed = owed.saturating_add(share(way, ways).unwrap_or(0).into());
            }
        }
        all
    }

    /// The lane that is next on `nic`: those of one NIC take turns.
    #[inline]
    pub(super) fn lane_of(&mut self, nic: NicIndex) -> Option<usize> {
        let lanes = *self.on_nic.get(usize::from(nic))?;
        let ready = lanes & self.active;
        if ready & !self.served == 0 {
            self.served &= !lanes;
        }
        let lane = (ready & !self.served).trailing_zeros();
        usize::try_from(lane).ok().filter(|lane| *lane < MAX_NICS)
    }

    const fn tag(&self) -> Option<ImmTag> {
        match &self.request {
            Long::Single(write) => write.imm,
            Long::Paged(write) => write.imm,
            Long::Scatter(write) => write.imm,
            Long::Barrier(barrier) => Some(barrier.imm),
        }
    }

    fn start_pages(&mut self) {
        let split = Split::count(u64::from(self.items), &self.routes, self.turn);
        for (r, lane) in self.lanes.iter_mut().enumerate() {
            let run = split.range(r);
            *lane = Lane { at: run.start, end: run.end, ..Lane::default() };
            self.active |= if run.is_empty() { 0 } else { bit(r) };
        }
    }

    /// Deals pages without bytes out as immediates for as many as each can count.
    fn start_notes(&mut self) {
        let units = u64::from(self.items).saturating_mul(WRITE_UNITS.into());
        let split = Split::count(units.div_ceil(NOTE_UNITS), &self.routes, self.turn);
        for (r, lane) in self.lanes.iter_mut().enumerate() {
            let run = split.range(r);
            let (at, end) =
                (run.start.saturating_mul(NOTE_UNITS), run.end.saturating_mul(NOTE_UNITS));
            *lane = Lane { at, end: end.min(units), ..Lane::default() };
            self.active |= if run.is_empty() { 0 } else { bit(r) };
        }
    }

    fn start_items(&mut self) {
        let lanes = NonZeroU32::from(self.routes.count());
        if self.stride == 1 {
            // All lanes share the first item: it is cut once.
            let cut = self.cut(0);
            for r in 0..lanes.get() {
                self.settle(r as usize, 0, cut.as_ref());
            }
            return;
        }
        for r in 0..lanes.get().min(self.items) {
            // All items are small: a lane looks at none but those whose turn is its own.
            let own = (self.turn + r) % lanes;
            self.settle(own as usize, r, None);
        }
    }

    /// Puts lane `r` on the first item from `item` on of which it carries something.
    ///
    /// `first` is how `item` is cut, if that is known already.
    fn settle(&mut self, r: usize, mut item: u32, mut first: Option<&Cut>) {
        self.active &= !bit(r);
        while item < self.items {
            let carried = match first.take() {
                Some(cut) => self.carried(r, item, cut),
                None => self.cut(item).and_then(|cut| self.carried(r, item, &cut)),
            };
            if let Some(lane) = carried {
                if let Some(slot) = self.lanes.get_mut(r) {
                    *slot = lane;
                    self.active |= bit(r);
                }
                return;
            }
            item = item.saturating_add(self.stride);
        }
    }

    /// How an item is cut over the lanes.
    fn cut(&self, item: u32) -> Option<Cut> {
        let (len, dst) = self.extent(item)?;
        let turn = self.turn.wrapping_add(item);
        let rule = self.limits.rule;
        let split = || Split::bytes(len, dst, &self.routes, rule, turn);
        Some(Cut {
            len,
            whole: self.routes.at_turn(turn),
            split: (!is_small(len, rule)).then(split),
            cutter: Cutter::new(dst, &self.limits),
        })
    }

    /// What lane `r` carries of item `item`, in this phase.
    fn carried(&mut self, r: usize, item: u32, cut: &Cut) -> Option<Lane> {
        let note = Lane { item, pieces: 1, ..Lane::default() };
        let announced = self.tag().is_some();
        if cut.len == 0 {
            return (r == cut.whole && announced && !self.trailing).then_some(note);
        }
        let range = cut.range(r);
        if range.is_empty() {
            return None;
        }
        let lane = Lane { at: range.start, end: range.end, item, ..Lane::default() };
        let (before, pieces) = cut.pieces(r);
        if !announced {
            return Some(lane).filter(|_| !self.trailing);
        }
        if pieces > u64::from(WRITE_UNITS) {
            if self.trailing {
                let (piece, pieces) = cut.ways(r);
                return Some(Lane { piece, pieces, ..note });
            }
            self.owes = true;
            return Some(lane);
        }
        if self.trailing {
            return None;
        }
        // At most WRITE_UNITS pieces: both fit.
        let (piece, pieces) = (u8::try_from(before).ok()?, u8::try_from(pieces).ok()?);
        Some(Lane { piece, pieces, ..lane })
    }

    /// Length and destination of an item.
    fn extent(&self, item: u32) -> Option<(u64, u64)> {
        match &self.request {
            Long::Single(write) => Some((write.len, write.dst.base.wrapping_add(write.dst_offset))),
            Long::Paged(write) => Some((write.page_bytes, write.page(u64::from(item))?.1)),
            Long::Scatter(write) => {
                let target = write.targets.get(usize::try_from(item).ok()?)?;
                Some((target.len, target.dst.base.wrapping_add(target.dst_offset)))
            }
            Long::Barrier(_) => Some((0, 0)),
        }
    }

    /// The lane's next run of pages, and where the page after it lies, if that was looked at. `known` is
    /// where its first page lies, if that was.
    #[inline]
    fn page_piece(
        &self,
        nic: NicIndex,
        r: usize,
        lane: &mut Lane,
        known: Option<(u64, u64)>,
    ) -> Option<(Piece, Option<(u64, u64)>)> {
        let Long::Paged(write) = &self.request else {
            return None;
        };
        let (src, dst) = match known {
            Some(page) => page,
            None => write.page(lane.at)?,
        };
        let room = self.merge.min(lane.end.saturating_sub(lane.at));
        let (mut pages, mut len, mut next) = (1, write.page_bytes, None);
        while pages < room {
            let following = (src.wrapping_add(len), dst.wrapping_add(len));
            next = write.page(lane.at.wrapping_add(pages));
            if next != Some(following) {
                break;
            }
            next = None;
            pages = pages.wrapping_add(1);
            len = len.wrapping_add(write.page_bytes); // At most the largest message.
        }
        let remote = self.routes.get(r)?.remote;
        let piece = Piece {
            peer: write.peer,
            remote_nic: remote,
            src,
            src_key: write.src.keys.get(nic)?,
            dst,
            dst_key: write.dst.keys.get(remote)?,
            len,
            run: PageRun::NONE,
            imm: merged(write.imm, pages),
        };
        lane.at = lane.at.wrapping_add(pages);
        Some((piece, next))
    }

    /// The lane's next pages, wherever they lie. Of their numbers only the last is looked at: a list that has
    /// become shorter is not to be found out by whoever posts.
    fn run_piece(&self, nic: NicIndex, r: usize, lane: &mut Lane) -> Option<Piece> {
        let Long::Paged(write) = &self.request else {
            return None;
        };
        let pages = self.merge.min(lane.end.saturating_sub(lane.at));
        let end = lane.at.wrapping_add(pages); // At most MAX_ITEMS.
        write.page(end.checked_sub(1)?)?;
        let remote = self.routes.get(r)?.remote;
        let (src, dst) = write.origin();
        let run =
            PageRun { first: u32::try_from(lane.at).ok()?, count: u32::try_from(pages).ok()? };
        let piece = Piece {
            peer: write.peer,
            remote_nic: remote,
            src,
            src_key: write.src.keys.get(nic)?,
            dst,
            dst_key: write.dst.keys.get(remote)?,
            len: pages.wrapping_mul(write.page_bytes), // At most the largest message.
            run,
            imm: merged(write.imm, pages),
        };
        lane.at = end;
        Some(piece)
    }

    /// See [`super::Plan::page_run`].
    #[inline]
    pub(super) fn page_run(
        &self,
        run: PageRun,
        src: &mut [u32],
        dst: &mut [u32],
    ) -> Option<RunLayout> {
        match &self.request {
            Long::Paged(write) if self.walk == Walk::Runs => write.run(run, src, dst),
            _ => None,
        }
    }

    fn note_piece(&self, r: usize, lane: &mut Lane) -> Option<Piece> {
        let (peer, dst, tag) = match &self.request {
            Long::Single(write) => (write.peer, &write.dst, write.imm),
            Long::Paged(write) => (write.peer, &write.dst, write.imm),
            Long::Scatter(_) | Long::Barrier(_) => return None,
        };
        let units = NOTE_UNITS.min(lane.end.saturating_sub(lane.at));
        let remote = self.routes.get(r)?.remote;
        let imm = tag?.with_units(u16::try_from(units).ok()?);
        let piece = note(peer, remote, dst, imm)?;
        lane.at = lane.at.wrapping_add(units);
        Some(Piece { run: layout(self.trailing), ..piece })
    }

    fn item_piece(
        &self,
        nic: NicIndex,
        r: usize,
        lane: &mut Lane,
        table: &impl PeerTable,
    ) -> Option<Piece> {
        let index = usize::try_from(lane.item).ok()?;
        match &self.request {
            Long::Single(write) => {
                let remote = self.routes.get(r)?.remote;
                let src = write.src.base.wrapping_add(write.src_offset);
                let dst = write.dst.base.wrapping_add(write.dst_offset);
                self.part(nic, lane, &write.src, src, (write.peer, remote, &write.dst, dst))
            }
            Long::Paged(write) => {
                let remote = self.routes.get(r)?.remote;
                let (src, dst) = write.page(u64::from(lane.item))?;
                self.part(nic, lane, &write.src, src, (write.peer, remote, &write.dst, dst))
            }
            Long::Scatter(write) => {
                let target = write.targets.get(index)?;
                let routes = table.routes(target.peer).unwrap_or(self.routes);
                let remote = remote_of(&routes, r, nic, &target.dst);
                let src = write.src.base.wrapping_add(target.src_offset);
                let dst = target.dst.base.wrapping_add(target.dst_offset);
                self.part(nic, lane, &write.src, src, (target.peer, remote, &target.dst, dst))
            }
            Long::Barrier(barrier) => {
                let peer = barrier.targets.peer(index)?;
                self.control_note(nic, r, peer, table)
            }
        }
    }

    /// The next piece of an item whose bytes start at `src_base` and go to `to`.
    fn part(
        &self,
        nic: NicIndex,
        lane: &mut Lane,
        src: &LocalMr,
        src_base: u64,
        to: (PeerId, NicIndex, &MrDesc, u64),
    ) -> Option<Piece> {
        let (peer, remote_nic, dst, dst_base) = to;
        let imm = share(lane.piece, lane.pieces).and_then(|units| self.tag()?.with_units(units));
        if lane.at == lane.end {
            let piece = note(peer, remote_nic, dst, imm)?;
            return Some(Piece { run: layout(self.trailing), ..piece });
        }
        let cutter = Cutter::new(dst_base, &self.limits);
        let (at, end) = (lane.at, cutter.cut(lane.at, lane.end));
        let piece = Piece {
            peer,
            remote_nic,
            src: src_base.wrapping_add(at),
            src_key: src.keys.get(nic)?,
            dst: dst_base.wrapping_add(at),
            dst_key: dst.keys.get(remote_nic)?,
            len: end.saturating_sub(at),
            run: layout(imm.is_none() && self.tag().is_some()),
            imm,
        };
        lane.at = end;
        lane.piece = lane.piece.wrapping_add(1);
        Some(piece)
    }

    fn control_note(
        &self,
        nic: NicIndex,
        r: usize,
        peer: PeerId,
        table: &impl PeerTable,
    ) -> Option<Piece> {
        let control = table.control(peer)?;
        let routes = table.routes(peer).unwrap_or(self.routes);
        let remote = remote_of(&routes, r, nic, &control);
        note(peer, remote, &control, merged(self.tag(), 1))
    }
}

/// The routes that decide what each lane carries: those to the peer, or to the one of several peers that
/// has the most.
fn frozen_routes<P: PageList, T: TargetList>(
    request: &Long<P, T>,
    table: &impl PeerTable,
) -> Result<Routes, PlanError> {
    let single = |peer| table.routes(peer).ok_or(PlanError::NoRoute { peer });
    let mut widest: Option<Routes> = None;
    let mut widen = |routes: Routes| {
        if widest.is_none_or(|widest| widest.count() < routes.count()) {
            widest = Some(routes);
        }
    };
    match request {
        Long::Single(write) => {
            let routes = single(write.peer)?;
            check_keys(&routes, &write.src, &write.dst, write.peer)?;
            return Ok(routes);
        }
        Long::Paged(write) => {
            let routes = single(write.peer)?;
            check_keys(&routes, &write.src, &write.dst, write.peer)?;
            return Ok(routes);
        }
        Long::Scatter(write) => {
            for target in (0..write.targets.len()).filter_map(|i| write.targets.get(i)) {
                let routes = single(target.peer)?;
                check_keys(&routes, &write.src, &target.dst, target.peer)?;
                widen(routes);
            }
        }
        Long::Barrier(barrier) => {
            for peer in (0..barrier.targets.len()).filter_map(|i| barrier.targets.peer(i)) {
                widen(single(peer)?);
            }
        }
    }
    // Without targets there is nothing to carry, on any route.
    Ok(widest.unwrap_or(Routes::one()))
}

/// The units of piece `piece` of `pieces`, which add up to [`WRITE_UNITS`]; `None` for 0 pieces.
fn share(piece: u8, pieces: u8) -> Option<u16> {
    let edge = |piece: u16| WRITE_UNITS.checked_mul(piece)?.checked_div(u16::from(pieces));
    let piece = u16::from(piece);
    edge(piece.checked_add(1)?)?.checked_sub(edge(piece)?)
}

/// How a range is laid out, of a write whose immediates follow, or of another.
const fn layout(bulk: bool) -> PageRun {
    if bulk { PageRun::BULK } else { PageRun::NONE }
}

/// A write without bytes, to the start of `dst`.
fn note(peer: PeerId, remote_nic: NicIndex, dst: &MrDesc, imm: Option<Imm>) -> Option<Piece> {
    let dst_key = dst.keys.get(remote_nic)?;
    let (dst, run) = (dst.base, PageRun::NONE);
    Some(Piece { peer, remote_nic, src: 0, src_key: 0, dst, dst_key, len: 0, run, imm })
}

/// How one item is cut over the lanes.
struct Cut {
    len: u64,
    /// The route that carries it if it is not split.
    whole: usize,
    /// `None` if it is not split.
    split: Option<Split>,
    cutter: Cutter,
}

impl Cut {
    /// What route `route` carries.
    fn range(&self, route: usize) -> Range<u64> {
        match &self.split {
            Some(split) => split.range(route),
            None if route == self.whole => 0..self.len,
            None => 0..0,
        }
    }

    /// Pieces on the routes before `route`, and on all of them.
    fn pieces(&self, route: usize) -> (u64, u64) {
        let Some(split) = &self.split else {
            return (0, self.cutter.pieces(0, self.len));
        };
        let (mut before, mut all) = (0_u64, 0_u64);
        for other in 0..MAX_NICS {
            let range = split.range(other);
            let pieces = self.cutter.pieces(range.start, range.end);
            before = before.saturating_add(if other < route { pieces } else { 0 });
            all = all.saturating_add(pieces);
        }
        (before, all)
    }

    /// Routes before `route` that carry any of it, and how many do.
    fn ways(&self, route: usize) -> (u8, u8) {
        let carries = |route: &usize| !self.range(*route).is_empty();
        let count =
            |routes: Range<usize>| routes.filter(carries).fold(0_u8, |n, _| n.wrapping_add(1));
        (count(0..route), count(0..MAX_NICS)) // At most MAX_NICS.
    }
}

/// Cuts a range of an item at the largest message, on granules of the destination where they fit.
struct Cutter {
    /// Address of the item's first byte.
    dst: u64,
    max: NonZeroU64,
    granule: NonZeroU64,
}

impl Cutter {
    const fn new(dst: u64, limits: &PlanLimits) -> Self {
        Self { dst, max: limits.max_message_bytes, granule: limits.rule.granule_bytes }
    }

    /// Where the piece ends that starts at `at`; past `at`, for `at < end`.
    fn cut(&self, at: u64, end: u64) -> u64 {
        let Some(limit) = at.checked_add(self.max.get()).filter(|limit| *limit < end) else {
            return end;
        };
        if self.max < self.granule {
            return limit;
        }
        align_down(self.dst, limit, self.granule)
    }

    /// How many pieces `at..end` makes.
    fn pieces(&self, at: u64, end: u64) -> u64 {
        if at >= end {
            return 0;
        }
        let first = self.cut(at, end);
        if first == end {
            return 1;
        }
        // From the first cut on, every start lies on a granule, and every piece but the last is equal.
        let step = if self.max < self.granule {
            self.max.get()
        } else {
            align_down(0, self.max.get(), self.granule)
        };
        let rest = end.saturating_sub(first);
        let beyond = rest.saturating_sub(self.max.get());
        beyond.div_ceil(step.max(1)).saturating_add(2)
    }
}
