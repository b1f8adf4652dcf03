//! Which work requests a transfer is made of.
//!
//! A [`Request`] says what to move. [`Request::check`] proves that all of it lies inside its regions. A
//! [`Plan`] then yields it lazily, one [`Piece`] at a time for whichever NIC has room. It knows no queue
//! and no completion: what is posted when, and what a failure means, is [`crate::group`]'s.
//!
//! What is a single piece anyway is planned by `whole`, everything else by `lanes`.
//!
//! A piece is one range, or, for NICs that take them, a *run*: up to [`PlanLimits::pages_per_piece`] pages,
//! wherever they lie. Planning a run does not look at each page; whoever posts it reads their numbers
//! ([`Plan::page_run`]).
//!
//! # Invariants
//!
//! - Every byte of the request is in exactly one piece, and every piece inside what was checked.
//! - The units of the immediates of one write, or page, add up to [`WRITE_UNITS`]; with more than
//!   [`WRITE_UNITS`] pieces they carry none, and after [`Plan::drained`] an immediate follows on each route that
//!   carries any of its bytes: that the pieces have completed does not say that another NIC's immediate, or another
//!   queue's, is behind them (InfiniBand Architecture Specification 1, 9.5: no order between queue pairs). Of
//!   what goes another way because a path broke, or a NIC was lost, this does not hold.
//! - No piece is longer than [`PlanLimits::max_message_bytes`], and no run has more than
//!   [`PlanLimits::pages_per_piece`] pages.
//!
//! The tests paint every byte of enumerated requests and add up the units.

use core::fmt;
use core::num::{NonZeroU16, NonZeroU64};

pub use self::request::{
    Barrier, Checked, ControlWrite, ImmWrite, MAX_ITEMS, PageList, PagedWrite, Pages, Request,
    RequestError, ScatterWrite, Side, SingleRef, SingleWrite, Target, TargetList,
};
use crate::id::{MAX_NICS, NicIndex, PeerId};
use crate::imm::{Imm, ImmTag, WRITE_UNITS};
use crate::nic::{Routes, SplitRule};
use crate::region::{Keys, LocalMr, MrDesc, RegionError};

use lanes::Lanes;
pub(crate) use whole::Whole;

mod lanes;
mod request;
#[cfg(test)]
mod tests;
mod whole;

/// What a plan must respect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlanLimits {
    /// The longest message of any of the ports that may carry a piece.
    pub max_message_bytes: NonZeroU64,
    /// Pages that one piece may carry without being adjacent, on any of these ports. 1: every piece is one range.
    pub pages_per_piece: NonZeroU16,
    /// When a NIC is worth using, and where it may start.
    pub rule: SplitRule,
}

/// What a plan asks about peers.
pub trait PeerTable {
    /// Routes to the peer; `None` if it is unknown, or there is none.
    fn routes(&self, peer: PeerId) -> Option<Routes>;
    /// Where immediates go that belong to no region; `None` while connecting.
    fn control(&self, peer: PeerId) -> Option<MrDesc>;
}

/// Why a checked request cannot be planned now. Nothing was posted.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlanError {
    /// No pair of usable NICs leads to the peer, or it is unknown.
    NoRoute {
        /// The peer.
        peer: PeerId,
    },
    /// A region is not registered with a NIC that would carry it.
    KeyMissing {
        /// Whose region.
        side: Side,
        /// Whom the write goes to.
        peer: PeerId,
        /// The NIC, of that side.
        nic: NicIndex,
    },
    /// A control write does not fit the region that the peer keeps for us.
    ControlRegion {
        /// The peer.
        peer: PeerId,
        /// What is wrong with the range.
        error: RegionError,
    },
    /// The request is planned as a whole.
    NotLong,
    /// A control write, which is never cut, is longer than a message can be.
    ControlTooLong {
        /// Bytes.
        len: u64,
        /// The most there may be.
        max: u64,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRoute { peer } => write!(f, "no usable route to {peer}"),
            Self::KeyMissing { side, peer, nic } => {
                write!(
                    f,
                    "the {side} region of a write to {peer} is not registered with NIC {nic}; that of a GPU is with none \
                     that leads to another host"
                )
            }
            Self::NotLong => f.write_str("a single piece is not planned as many"),
            Self::ControlRegion { peer, error } => write!(f, "control region of {peer}: {error}"),
            Self::ControlTooLong { len, max } => {
                write!(f, "a control write of {len} bytes, a message has at most {max}")
            }
        }
    }
}

impl core::error::Error for PlanError {}

/// Pages of a paged write that are one piece, wherever they lie: those at the places `first` and following in
/// both of its lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageRun {
    /// Place of the first page in the lists.
    pub first: u32,
    /// How many pages, at most [`MAX_MERGED`](crate::imm::MAX_MERGED). 0: the piece is no run, but one range.
    pub count: u32,
}

impl PageRun {
    /// Of a piece that is one range.
    pub const NONE: Self = Self { first: 0, count: 0 };
    /// Of a range, or an immediate without bytes, of a write of more than [`WRITE_UNITS`] pieces, whose immediates follow: all
    /// of it that goes between the same two NICs is to go by the same queue, as an immediate is behind the bytes of its
    /// own, and of no other.
    pub const BULK: Self = Self { first: u32::MAX, count: 0 };
}

/// Where the pages of a run lie: that of number `n` at `src_base + n * src_stride` here, and at `dst_base + n *
/// dst_stride` there, each with its own number on each side. All of them lie inside both regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RunLayout {
    /// Our address of page number 0.
    pub src_base: u64,
    /// Bytes from one number to the next, here.
    pub src_stride: u64,
    /// The peer's address of page number 0.
    pub dst_base: u64,
    /// Bytes from one number to the next, there.
    pub dst_stride: u64,
    /// Bytes of each page.
    pub page_bytes: u64,
}

/// One work request: a write of `len` bytes, with an immediate or without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Who receives.
    pub peer: PeerId,
    /// Which of the peer's NICs.
    pub remote_nic: NicIndex,
    /// Our address; 0 if there are no bytes. Of a run, that of page number 0.
    pub src: u64,
    /// Our key for it; 0 if there are no bytes.
    pub src_key: u64,
    /// The peer's address. Of a run, that of page number 0.
    pub dst: u64,
    /// The peer's key for it.
    pub dst_key: u64,
    /// Bytes, at most [`PlanLimits::max_message_bytes`]. Of a run, those of all its pages.
    pub len: u64,
    /// The pages that it is a run of; [`PageRun::NONE`] or [`PageRun::BULK`] if it is one range.
    pub run: PageRun,
    /// What the receiver is told.
    pub imm: Option<Imm>,
}

/// What [`Plan::next_if`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "a piece that is not posted is lost"]
pub enum Next {
    /// To be posted.
    Piece(Piece),
    /// This NIC has nothing (more) in this phase, or a list yields less than it did.
    Nothing,
    /// This peer was not admitted.
    Refused(PeerId),
    /// The piece cannot be made: this peer's control region is not there yet, or too small.
    Impossible(PeerId),
}

/// A checked request on its way: yields the work requests for each NIC, lazily and in constant space.
///
/// ```text
///   data ── nic_mask() == 0, all completed, drained() == true ──▶ trailing immediates
///     └──── drained() == false: that was all ◀── drained() ────────────┘
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Plan<P, T>(Shape<P, T>);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[expect(
    clippy::large_enum_variant,
    reason = "plans lie in preallocated slots; boxing needs a heap"
)]
enum Shape<P, T> {
    /// A single piece, which has been taken.
    Taken(PeerId, Option<PathKeys>),
    /// With the keys of the region that it goes to, if they were kept.
    Whole(Whole, Option<Keys>),
    Lanes(Lanes<P, T>),
}

impl<P: PageList, T: TargetList> Plan<P, T> {
    /// Plans `request`; item `i` starts at route `turn + i`, so a caller that counts `turn` up spreads
    /// small transfers over the NICs. O(targets) for a scatter or barrier, else constant.
    ///
    /// # Errors
    ///
    /// [`PlanError`]: a peer cannot be reached, or a region lacks the key of a NIC. Nothing was posted.
    pub fn new(
        request: Checked<P, T>,
        limits: PlanLimits,
        table: &impl PeerTable,
        turn: u32,
    ) -> Result<Self, PlanError> {
        match Whole::new(request.request(), &limits, table, turn)? {
            Some(whole) => {
                let mut plan = Self::of(whole);
                if let Request::Single(write) = request.request() {
                    plan.keep_whole(write);
                }
                Ok(plan)
            }
            None => Self::long(request, limits, table, turn),
        }
    }

    /// The plan of a request that [`Whole::new`] plans. Its piece cannot be moved to another path, unless
    /// [`Plan::keep_whole`] is called too: most have no other, and need not carry all keys about.
    #[inline(always)]
    pub(crate) const fn of(whole: Whole) -> Self {
        Self(Shape::Whole(whole, None))
    }

    /// The plan of a single piece to `peer` that was taken already. As with [`Plan::of`], see
    /// [`Plan::keep_taken`].
    #[inline(always)]
    pub(crate) const fn taken(peer: PeerId) -> Self {
        Self(Shape::Taken(peer, None))
    }

    /// Keeps the keys of a piece that was taken, so that it can be moved.
    #[inline(always)]
    pub(crate) const fn keep_taken(&mut self, src: &Keys, dst: &Keys) {
        if let Shape::Taken(_, keys) = &mut self.0 {
            *keys = Some(PathKeys { src: Some(*src), dst: *dst });
        }
    }

    /// Keeps the keys of a single piece's regions, so that it can be moved.
    #[inline(always)]
    pub(crate) const fn keep_whole(&mut self, write: &SingleWrite) {
        if let Shape::Whole(whole, keys) = &mut self.0 {
            whole.keep(&write.src.keys);
            *keys = Some(write.dst.keys);
        }
    }

    /// The single piece that this is the plan of, if it was not [`Plan::taken`] when the plan was made.
    #[inline(always)]
    pub(crate) const fn as_whole(&mut self) -> Option<&mut Whole> {
        match &mut self.0 {
            Shape::Whole(whole, _) => Some(whole),
            Shape::Taken(..) | Shape::Lanes(_) => None,
        }
    }

    /// The plan of a request that [`Whole::new`] does not plan.
    pub(crate) fn long(
        request: Checked<P, T>,
        limits: PlanLimits,
        table: &impl PeerTable,
        turn: u32,
    ) -> Result<Self, PlanError> {
        // The requests that are not planned as lanes are all single pieces.
        let lanes = Lanes::new(request, limits, table, turn)?;
        lanes.map(|lanes| Self(Shape::Lanes(lanes))).ok_or(PlanError::NotLong)
    }

    /// The one peer it goes to; `None` if there may be several.
    #[must_use]
    pub const fn sole_peer(&self) -> Option<PeerId> {
        match &self.0 {
            Shape::Taken(peer, _) => Some(*peer),
            Shape::Whole(whole, _) => Some(whole.peer()),
            Shape::Lanes(lanes) => lanes.sole_peer(),
        }
    }

    /// Calls `f` for each peer that it goes to. O(targets).
    pub fn each_peer(&self, mut f: impl FnMut(PeerId)) {
        match &self.0 {
            Shape::Taken(peer, _) => f(*peer),
            Shape::Whole(whole, _) => f(whole.peer()),
            Shape::Lanes(lanes) => lanes.each_peer(f),
        }
    }

    /// Whether any of it goes to `peer`. O(targets).
    #[must_use]
    pub fn goes_to(&self, peer: PeerId) -> bool {
        match &self.0 {
            Shape::Taken(taken, _) => *taken == peer,
            Shape::Whole(whole, _) => whole.peer() == peer,
            Shape::Lanes(lanes) => lanes.goes_to(peer),
        }
    }

    /// Local NICs that still have work in this phase, a bit each.
    #[must_use]
    #[inline]
    pub fn nic_mask(&self) -> u8 {
        match &self.0 {
            Shape::Taken(..) => 0,
            Shape::Whole(whole, _) => whole.nic_mask(),
            Shape::Lanes(lanes) => lanes.nic_mask(),
        }
    }

    /// Whether `nic` has (more) work in this phase: its bit of [`Self::nic_mask`].
    #[must_use]
    #[inline]
    pub fn has_work(&self, nic: NicIndex) -> bool {
        match &self.0 {
            Shape::Taken(..) => false,
            Shape::Whole(whole, _) => whole.peek(nic).is_some(),
            Shape::Lanes(lanes) => lanes.has_work(nic),
        }
    }

    /// Whom the next piece on `nic` goes to; `None` if this NIC has nothing (more) in this phase.
    #[inline]
    pub fn peek(&mut self, nic: NicIndex) -> Option<PeerId> {
        match &mut self.0 {
            Shape::Taken(..) => None,
            Shape::Whole(whole, _) => whole.peek(nic),
            Shape::Lanes(lanes) => lanes.peek(nic),
        }
    }

    /// The next piece on `nic`, if `admit` lets its peer have one; it is then the caller's to post.
    /// Nothing changes unless the result is [`Next::Piece`].
    #[inline]
    pub fn next_if(
        &mut self,
        nic: NicIndex,
        table: &impl PeerTable,
        admit: impl FnOnce(PeerId) -> bool,
    ) -> Next {
        match &mut self.0 {
            Shape::Taken(..) => Next::Nothing,
            Shape::Whole(whole, _) => whole.next_if(nic, table, admit),
            Shape::Lanes(lanes) => lanes.next_if(nic, table, admit),
        }
    }

    /// The next pieces on `nic`, if they are ranges of whole pages: gives each to `take`, as long as that
    /// returns `true`. Nothing for any other plan: a run has so many pages that what it costs does not matter.
    #[inline]
    pub(crate) fn pages(&mut self, nic: NicIndex, take: impl FnMut(&Piece) -> bool) {
        if let Shape::Lanes(lanes) = &mut self.0 {
            lanes.pages(nic, take);
        }
    }

    /// What a run that this plan yielded is made of: copies the numbers of its pages into the first `count` of
    /// `src` and of `dst`, and returns where pages of which number lie. O(pages), a copy for lists of `u32`.
    ///
    /// `None`, whatever the slices hold then, if it is no run of this plan, a slice is too short, or a list yields
    /// less than it did.
    #[inline]
    pub fn page_run(&self, run: PageRun, src: &mut [u32], dst: &mut [u32]) -> Option<RunLayout> {
        match &self.0 {
            Shape::Taken(..) | Shape::Whole(..) => None,
            Shape::Lanes(lanes) => lanes.page_run(run, src, dst),
        }
    }

    /// The next piece on `nic`, whoever it goes to; `None` if there is none, or none that is possible.
    pub fn next(&mut self, nic: NicIndex, table: &impl PeerTable) -> Option<Piece> {
        match self.next_if(nic, table, |_| true) {
            Next::Piece(piece) => Some(piece),
            Next::Nothing | Next::Refused(_) | Next::Impossible(_) => None,
        }
    }

    /// Moves all that was not yielded yet from local NIC `from` to `to`.
    ///
    /// `false`, and nothing moves, if `to` is no NIC or the source region is not registered with it.
    pub fn reroute(&mut self, from: NicIndex, to: NicIndex) -> bool {
        match &mut self.0 {
            Shape::Taken(..) => usize::from(to) < MAX_NICS,
            Shape::Whole(whole, _) => whole.reroute(from, to),
            Shape::Lanes(lanes) => lanes.reroute(from, to),
        }
    }

    /// Moves what is next on local NIC `from`, which does not lead to its peer, to one that does, by these `routes`
    /// to it or else by one that `others` names, if `leads` says so. Of a plan for one peer all goes along.
    ///
    /// `false`, and nothing moves, if there is none.
    pub(crate) fn reroute_next(
        &mut self,
        from: NicIndex,
        routes: Option<&Routes>,
        others: impl Iterator<Item = NicIndex>,
        leads: impl Fn(NicIndex) -> bool,
    ) -> bool {
        let several = match &mut self.0 {
            Shape::Lanes(lanes) if lanes.sole_peer().is_none() => Some(lanes),
            _ => None,
        };
        let Some(lanes) = several else {
            let mut others = others;
            return others.any(|to| leads(to) && self.reroute(from, to));
        };
        // Each lane has a NIC of its own again, when its next item is for such a peer.
        let home = lanes.lane_of(from).zip(routes).and_then(|(lane, routes)| {
            routes.get(lane.checked_rem(routes.as_slice().len())?).map(|route| route.local)
        });
        let mut nics = home.into_iter().chain(others).filter(|to| *to != from);
        nics.any(|to| leads(to) && lanes.reroute_next(from, to))
    }

    /// The same piece on the path from our NIC `nic` to the peer's `remote`: `piece` was yielded by this
    /// plan, for another path, and has not arrived. O(1), but O(targets) for scatters.
    ///
    /// `None` if a region of it is not registered with these NICs.
    pub(crate) fn moved(
        &self,
        piece: &Piece,
        nic: NicIndex,
        remote: NicIndex,
        table: &impl PeerTable,
    ) -> Option<Piece> {
        let keys = match &self.0 {
            Shape::Taken(_, keys) => (*keys)?,
            Shape::Whole(whole, dst) => whole.keys(*dst, table)?,
            Shape::Lanes(lanes) => lanes.keys(piece, table)?,
        };
        let src_key = match keys.src {
            Some(keys) if piece.len > 0 => keys.get(nic)?,
            _ => 0,
        };
        Some(Piece { remote_nic: remote, src_key, dst_key: keys.dst.get(remote)?, ..*piece })
    }

    /// To be called when [`Self::nic_mask`] is 0 and every piece yielded so far has completed.
    ///
    /// `true`: trailing immediates have become available. `false`: that was all (or there still is work,
    /// and nothing changes).
    #[inline]
    pub fn drained(&mut self) -> bool {
        match &mut self.0 {
            Shape::Taken(..) | Shape::Whole(..) => false,
            Shape::Lanes(lanes) => lanes.drained(),
        }
    }
}

/// The keys of a piece, whatever the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PathKeys {
    /// `None` if it has no bytes.
    pub(crate) src: Option<Keys>,
    pub(crate) dst: Keys,
}

const fn bit(index: usize) -> u8 {
    if index < MAX_NICS { 1 << index } else { 0 }
}

/// Whether `len` bytes stay on one route: see [`Split::bytes`].
const fn is_small(len: u64, rule: SplitRule) -> bool {
    len / 2 < rule.min_piece_bytes.get()
}

fn check_keys(routes: &Routes, src: &LocalMr, dst: &MrDesc, peer: PeerId) -> Result<(), PlanError> {
    for route in routes.as_slice() {
        let missing = |side, nic| Err(PlanError::KeyMissing { side, peer, nic });
        if src.keys.get(route.local).is_none() {
            return missing(Side::Source, route.local);
        }
        if dst.keys.get(route.remote).is_none() {
            return missing(Side::Destination, route.remote);
        }
    }
    Ok(())
}

/// What a control write needs that its request alone does not tell; a region not there yet is looked at
/// when the piece is made.
fn check_control(
    write: &ControlWrite,
    routes: &Routes,
    limits: &PlanLimits,
    table: &impl PeerTable,
) -> Result<(), PlanError> {
    let (peer, len) = (write.peer, write.len);
    let max = limits.max_message_bytes.get();
    if len > max {
        return Err(PlanError::ControlTooLong { len, max });
    }
    if let Some(control) = table.control(peer) {
        let fits = control.range(write.dst_offset, len);
        fits.map_err(|error| PlanError::ControlRegion { peer, error })?;
    }
    let keyless = |src: &LocalMr| {
        let mut nics = routes.as_slice().iter().map(|route| route.local);
        nics.find(|nic| src.keys.get(*nic).is_none())
    };
    match write.src.as_ref().and_then(keyless) {
        Some(nic) => Err(PlanError::KeyMissing { side: Side::Source, peer, nic }),
        None => Ok(()),
    }
}

/// The immediate that counts for `writes` writes.
fn merged(tag: Option<ImmTag>, writes: u64) -> Option<Imm> {
    // Nobody merges more than MAX_MERGED writes, so the units fit.
    tag?.with_units(u16::try_from(writes).ok()?.checked_mul(WRITE_UNITS)?)
}

/// The NIC of the peer that lane `r`, now on local NIC `nic`, writes to; one that `dst` has a key for.
fn remote_of(routes: &Routes, r: usize, nic: NicIndex, dst: &MrDesc) -> NicIndex {
    let all = routes.as_slice();
    let own = all.get(r).filter(|route| route.local == nic);
    let from_nic = || all.iter().filter(|route| route.local == nic);
    let nth = |count: usize| r.checked_rem(count).unwrap_or(0);
    let route =
        own.or_else(|| from_nic().nth(nth(from_nic().count()))).or_else(|| all.get(nth(all.len())));
    let remote = route.map_or(0, |route| route.remote);
    if dst.keys.get(remote).is_some() {
        return remote;
    }
    // The peer's NICs have changed since its region was checked: any key is better than none.
    remote.checked_rem(dst.keys.nics()).unwrap_or(0)
}
