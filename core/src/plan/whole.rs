//! The plan of a request that is a single piece: a small write, an immediate, a control write.
//!
//! Most requests are of this kind, and what they cost is what users wait for. Such a plan is a fraction of
//! the general one in size, and its piece is made when it is planned: nothing is cut.

use super::{
    ControlWrite, ImmWrite, Next, PageRun, PathKeys, Piece, PlanError, PlanLimits, Request,
    SingleWrite, bit, check_control, check_keys, is_small, merged, remote_of,
};
use super::{PeerTable, TargetList};
use crate::id::{MAX_NICS, NicIndex, PeerId};
use crate::nic::{Route, Routes};
use crate::region::Keys;

/// One piece that was not yielded yet, or was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Whole {
    /// As far as it is known: see [`To`].
    piece: Piece,
    to: To,
    /// The local NIC; [`NOBODY`] once there is nothing to yield.
    nic: NicIndex,
    /// The route that it was planned for.
    route: u8,
    /// The source's keys, if there are bytes and the piece may have to move.
    src_keys: Option<Keys>,
}

/// No NIC.
const NOBODY: NicIndex = NicIndex::MAX;

/// Where the piece goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum To {
    /// Where it says, which the request told.
    Region,
    /// To an offset into the peer's control region, which may not be known yet.
    Control { offset: u64 },
}

impl Whole {
    /// The plan of `request` if that is a single piece whatever the NICs; `None` if it is not.
    pub(crate) fn new<P, T: TargetList>(
        request: &Request<P, T>,
        limits: &PlanLimits,
        table: &impl PeerTable,
        turn: u32,
    ) -> Result<Option<Self>, PlanError> {
        let no_route = |peer| PlanError::NoRoute { peer };
        let routes = |peer| table.routes(peer).ok_or(no_route(peer));
        let (whole, peer) = match request {
            Request::Single(write) if is_whole(write, limits) => {
                let routes = routes(write.peer)?;
                // Every NIC of the routes, not only this one's: a lost NIC's work moves to another.
                check_keys(&routes, &write.src, &write.dst, write.peer)?;
                (Self::routed(write, &routes, turn), write.peer)
            }
            Request::Imm(write) => (Self::imm(write, &routes(write.peer)?, turn), write.peer),
            Request::Control(write) => {
                let routes = routes(write.peer)?;
                check_control(write, &routes, limits, table)?;
                (Self::control(write, &routes, turn), write.peer)
            }
            _ => return Ok(None),
        };
        whole.map(Some).ok_or(no_route(peer))
    }

    /// The plan of a write that is a single piece, for the route whose turn it is; `None` if a key for that is
    /// missing. It keeps no keys: see [`super::Plan::keep_whole`].
    #[inline(always)]
    pub(crate) fn routed(write: &SingleWrite, routes: &Routes, turn: u32) -> Option<Self> {
        let (route, at) = start(routes, turn)?;
        let (src_key, dst_key) = (write.src.keys.get(at.local)?, write.dst.keys.get(at.remote)?);
        let empty = write.len == 0;
        // The request was checked: both sums lie inside their regions. Without bytes, an immediate points to
        // the start of the region.
        let src = write.src.base.wrapping_add(write.src_offset);
        let dst = write.dst.base.wrapping_add(if empty { 0 } else { write.dst_offset });
        let piece = Piece {
            peer: write.peer,
            remote_nic: at.remote,
            src: if empty { 0 } else { src },
            src_key: if empty { 0 } else { src_key },
            dst,
            dst_key,
            len: write.len,
            run: PageRun::NONE,
            imm: merged(write.imm, 1),
        };
        let nothing = empty && write.imm.is_none();
        let nic = if nothing { NOBODY } else { at.local };
        Some(Self { piece, to: To::Region, nic, route, src_keys: None })
    }

    fn imm(write: &ImmWrite, routes: &Routes, turn: u32) -> Option<Self> {
        let imm = merged(Some(write.imm), u64::from(write.writes));
        let piece = Piece { imm, ..Self::unknown(write.peer) };
        Self::controlling(piece, 0, None, routes, turn)
    }

    fn control(write: &ControlWrite, routes: &Routes, turn: u32) -> Option<Self> {
        let src = write.src.map_or(0, |src| src.base.wrapping_add(write.src_offset));
        let imm = Some(write.imm);
        let piece = Piece { src, len: write.len, imm, ..Self::unknown(write.peer) };
        let src_keys = write.src.map(|src| src.keys);
        Self::controlling(piece, write.dst_offset, src_keys, routes, turn)
    }

    fn controlling(
        piece: Piece,
        offset: u64,
        src_keys: Option<Keys>,
        routes: &Routes,
        turn: u32,
    ) -> Option<Self> {
        let (route, at) = start(routes, turn)?;
        let src_key = src_keys.map_or(Some(0), |keys| keys.get(at.local))?;
        let piece = Piece { src_key, ..piece };
        Some(Self { piece, to: To::Control { offset }, nic: at.local, route, src_keys })
    }

    /// A piece of which nothing is known but whom it goes to.
    const fn unknown(peer: PeerId) -> Piece {
        let (remote_nic, src, src_key, dst, dst_key) = (0, 0, 0, 0, 0);
        let run = PageRun::NONE;
        Piece { peer, remote_nic, src, src_key, dst, dst_key, len: 0, run, imm: None }
    }

    /// Keeps the source's keys, so that the piece can be moved. Control writes keep theirs from the start.
    #[inline(always)]
    pub(super) const fn keep(&mut self, src: &Keys) {
        if self.piece.len > 0 {
            self.src_keys = Some(*src);
        }
    }

    pub(crate) const fn peer(&self) -> PeerId {
        self.piece.peer
    }

    /// The local NIC that carries it, if anything is left to yield.
    #[inline(always)]
    pub(crate) fn nic(&self) -> Option<NicIndex> {
        (self.nic != NOBODY).then_some(self.nic)
    }

    pub(crate) fn nic_mask(&self) -> u8 {
        bit(usize::from(self.nic))
    }

    pub(crate) fn peek(&self, nic: NicIndex) -> Option<PeerId> {
        (self.nic() == Some(nic)).then_some(self.piece.peer)
    }

    /// See [`super::Plan::next_if`].
    #[inline]
    pub(crate) fn next_if(
        &mut self,
        nic: NicIndex,
        table: &impl PeerTable,
        admit: impl FnOnce(PeerId) -> bool,
    ) -> Next {
        match self.peek(nic) {
            None => Next::Nothing,
            Some(peer) if !admit(peer) => Next::Refused(peer),
            Some(peer) => self.piece(nic, table).map_or(Next::Impossible(peer), Next::Piece),
        }
    }

    #[inline]
    fn piece(&mut self, nic: NicIndex, table: &impl PeerTable) -> Option<Piece> {
        if let To::Control { offset } = self.to {
            let peer = self.piece.peer;
            let (control, routes) = (table.control(peer)?, table.routes(peer)?);
            let remote_nic = remote_of(&routes, usize::from(self.route), nic, &control);
            let dst = control.range(offset, self.piece.len).ok()?;
            let dst_key = control.keys.get(remote_nic)?;
            self.piece = Piece { remote_nic, dst, dst_key, ..self.piece };
        }
        Some(*self.take())
    }

    /// Whom it goes to, if its piece is known and `nic`, one that there is, carries it: what [`Whole::take`]
    /// returns can be posted then.
    #[inline(always)]
    pub(crate) fn ready(&self, nic: NicIndex) -> Option<PeerId> {
        match self.to {
            To::Region if self.nic == nic => Some(self.piece.peer),
            _ => None,
        }
    }

    /// Its piece, of which there is no more then.
    #[inline(always)]
    pub(crate) const fn take(&mut self) -> &Piece {
        self.nic = NOBODY;
        &self.piece
    }

    /// The keys of its piece; `dst` are those of the region that it goes to, if it goes to one.
    pub(super) fn keys(&self, dst: Option<Keys>, table: &impl PeerTable) -> Option<PathKeys> {
        let dst = match self.to {
            To::Region => dst?,
            To::Control { .. } => table.control(self.piece.peer)?.keys,
        };
        Some(PathKeys { src: self.src_keys, dst })
    }

    pub(crate) fn reroute(&mut self, from: NicIndex, to: NicIndex) -> bool {
        let src_key = match &self.src_keys {
            Some(keys) => keys.get(to),
            None => (self.piece.len == 0).then_some(0),
        };
        let Some(src_key) = src_key.filter(|_| usize::from(to) < MAX_NICS) else {
            return false;
        };
        if self.nic() == Some(from) {
            self.nic = to;
            self.piece.src_key = src_key;
        }
        true
    }
}

/// Whether a write is never cut, neither over NICs nor by the port's largest message.
fn is_whole(write: &SingleWrite, limits: &PlanLimits) -> bool {
    write.len <= limits.max_message_bytes.get() && is_small(write.len, limits.rule)
}

/// The route whose turn it is, and its number.
#[inline(always)]
fn start(routes: &Routes, turn: u32) -> Option<(u8, Route)> {
    let at = routes.at_turn(turn);
    Some((u8::try_from(at).ok()?, routes.get(at)?))
}
