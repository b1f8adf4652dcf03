//! The plan of a request that is a single piece: a small write, an immediate, a control write.
//!
//! Most requests are of this kind, and what they cost is what users wait for. Such a plan is a tenth
//! of the general one in size, and makes its piece without cutting anything.

use super::{
    ControlWrite, ImmWrite, Next, PathKeys, Piece, PlanError, PlanLimits, Request, Side,
    SingleWrite, bit, check_control, is_small, merged, remote_of,
};
use super::{PeerTable, TargetList};
use crate::id::{MAX_NICS, NicIndex, PeerId};
use crate::imm::Imm;
use crate::nic::Routes;
use crate::region::Keys;

/// One piece that was not yielded yet, or was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Whole {
    peer: PeerId,
    /// The local NIC, a bit; 0 once there is nothing to yield.
    mask: u8,
    /// The route that it was planned for.
    route: u8,
    src: u64,
    /// The source's keys, if there are bytes.
    src_keys: Option<Keys>,
    to: To,
    len: u64,
    imm: Option<Imm>,
}

/// Where the piece goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum To {
    /// An address, known from the request.
    Region { dst: u64, key: u64, remote: NicIndex },
    /// An offset into the peer's control region, which may not be known yet.
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
        let routes = |peer| table.routes(peer).ok_or(PlanError::NoRoute { peer });
        match request {
            Request::Single(write) if is_whole(write, limits) => {
                Self::single(write, &routes(write.peer)?, turn).map(Some)
            }
            Request::Imm(write) => Ok(Some(Self::imm(write, &routes(write.peer)?, turn))),
            Request::Control(write) => {
                let routes = routes(write.peer)?;
                check_control(write, &routes, limits, table)?;
                Ok(Some(Self::control(write, &routes, turn)))
            }
            _ => Ok(None),
        }
    }

    fn single(write: &SingleWrite, routes: &Routes, turn: u32) -> Result<Self, PlanError> {
        let peer = write.peer;
        // Every NIC of the routes, not only this one's: a lost NIC's work moves to another.
        super::check_keys(routes, &write.src, &write.dst, peer)?;
        let (route, mask, remote) = start(routes, turn);
        let side = Side::Destination;
        let key =
            write.dst.keys.get(remote).ok_or(PlanError::KeyMissing { side, peer, nic: remote })?;
        let nothing = write.len == 0 && write.imm.is_none();
        Ok(Self {
            peer,
            mask: if nothing { 0 } else { mask },
            route,
            // The request was checked: both sums lie inside their regions.
            src: if write.len == 0 { 0 } else { write.src.base.wrapping_add(write.src_offset) },
            src_keys: (write.len > 0).then_some(write.src.keys),
            to: To::Region {
                // Without bytes, an immediate points to the start of the region.
                dst: if write.len == 0 {
                    write.dst.base
                } else {
                    write.dst.base.wrapping_add(write.dst_offset)
                },
                key,
                remote,
            },
            len: write.len,
            imm: merged(write.imm, 1),
        })
    }

    fn imm(write: &ImmWrite, routes: &Routes, turn: u32) -> Self {
        let (route, mask, _) = start(routes, turn);
        let imm = merged(Some(write.imm), u64::from(write.writes));
        let to = To::Control { offset: 0 };
        Self { peer: write.peer, mask, route, src: 0, src_keys: None, to, len: 0, imm }
    }

    fn control(write: &ControlWrite, routes: &Routes, turn: u32) -> Self {
        let (route, mask, _) = start(routes, turn);
        Self {
            peer: write.peer,
            mask,
            route,
            src: write.src.map_or(0, |src| src.base.wrapping_add(write.src_offset)),
            src_keys: write.src.map(|src| src.keys),
            to: To::Control { offset: write.dst_offset },
            len: write.len,
            imm: Some(write.imm),
        }
    }

    pub(crate) const fn peer(&self) -> PeerId {
        self.peer
    }

    pub(crate) const fn nic_mask(&self) -> u8 {
        self.mask
    }

    pub(crate) fn peek(&self, nic: NicIndex) -> Option<PeerId> {
        (self.mask & bit(usize::from(nic)) != 0).then_some(self.peer)
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
        let (dst, dst_key, remote_nic) = match self.to {
            To::Region { dst, key, remote } => (dst, key, remote),
            To::Control { offset } => {
                let control = table.control(self.peer)?;
                let routes = table.routes(self.peer)?;
                let remote = remote_of(&routes, usize::from(self.route), nic, &control);
                (control.range(offset, self.len).ok()?, control.keys.get(remote)?, remote)
            }
        };
        let src_key = match &self.src_keys {
            Some(keys) => keys.get(nic)?,
            None => 0,
        };
        self.mask = 0;
        let (peer, src, len, imm) = (self.peer, self.src, self.len, self.imm);
        Some(Piece { peer, remote_nic, src, src_key, dst, dst_key, len, imm })
    }

    /// The keys of its piece; `dst` are those of the region that it goes to, if it goes to one.
    pub(super) fn keys(&self, dst: Option<Keys>, table: &impl PeerTable) -> Option<PathKeys> {
        let dst = match self.to {
            To::Region { .. } => dst?,
            To::Control { .. } => table.control(self.peer)?.keys,
        };
        Some(PathKeys { src: self.src_keys, dst })
    }

    pub(crate) fn reroute(&mut self, from: NicIndex, to: NicIndex) -> bool {
        let registered = self.src_keys.is_none_or(|keys| keys.get(to).is_some());
        if !registered || usize::from(to) >= MAX_NICS {
            return false;
        }
        if self.mask & bit(usize::from(from)) != 0 {
            self.mask = bit(usize::from(to));
        }
        true
    }
}

/// Whether a write is never cut, neither over NICs nor by the port's largest message.
fn is_whole(write: &SingleWrite, limits: &PlanLimits) -> bool {
    write.len <= limits.max_message_bytes.get() && is_small(write.len, limits.rule)
}

/// The route whose turn it is: its number, its local NIC as a bit, its remote NIC.
fn start(routes: &Routes, turn: u32) -> (u8, u8, NicIndex) {
    let at = routes.at_turn(turn);
    let route = routes.get(at);
    let mask = route.map_or(0, |route| bit(usize::from(route.local)));
    // At most MAX_NICS routes.
    (u8::try_from(at).unwrap_or(0), mask, route.map_or(0, |route| route.remote))
}
