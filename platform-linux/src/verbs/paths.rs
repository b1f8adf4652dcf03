//! Queue pairs for writes: opened, tried, cut, and closed, at both ends. What is next is `immwire_core::way`'s to say.
//!
//! # Invariants
//!
//! - A queue pair is connected when the address of its other end is known; what needs it waits until then.
//! - A path is posted on only when the receiver has said that its ends receive. If the port is down by then, and there is another way, it
//!   breaks instead.
//! - What was in flight on a path that broke stays there until it is settled, or its session ends; and its queue pairs
//!   are there as long, cut. A path is opened anew when they are gone.

use std::collections::VecDeque;

use immwire_core::group::WorkRequest;
use immwire_core::id::NicIndex;
use immwire_core::life::Notice;
use immwire_core::note::{LANES, Passage, Queues};
use immwire_core::peer::DownReason;
use immwire_core::resolve::{Asker, Reach};
use immwire_core::tenant::device_key;
use immwire_core::way::{Answered, Failed, Lead, Next, is_cut_off, is_later, is_left};

use super::device::{Depths, QueuePair};
use super::endings::must;
use super::lane::{Done, Lane, LaneId, Owner, Role};
use super::session::{Inlet, Session};
use super::upkeep::{bit, nic_at};
use super::{LANE_DEPTH, Nic, Tiding, VerbsError, VerbsProvider};
use crate::provider::{Path, Sink};

/// Queue pairs of a path.
const LANES_EACH: u8 = {
    assert!(LANES < 256, "they are counted in a byte");
    LANES.to_le_bytes()[0]
};

/// All the paths of a session.
pub(super) fn leads(session: &Session, ports: &[Nic]) -> impl Iterator<Item = Lead> {
    let theirs = session.ports.len().max(1);
    session.outlets.iter().enumerate().map(move |(at, outlet)| {
        let port = ports.get(at / theirs);
        let is_usable = port.is_some_and(Nic::is_usable);
        Lead { way: outlet.way, is_usable, is_lost: port.is_none_or(|port| port.health.is_lost()) }
    })
}

impl VerbsProvider {
    /// Opens our ends of paths that are wanted, or have rested, and has the peer asked for its own.
    pub(super) fn open_outlets(&mut self, index: u16) {
        let now = self.now;
        let outlets = self.session(index).map_or(0, |session| session.outlets.len());
        for at in 0..outlets {
            let Some(session) = self.session(index).filter(|it| it.life.is_open()) else {
                return;
            };
            let way = session.outlets.get(at).map(|outlet| outlet.way);
            if way.is_some_and(|way| way.is_resting() || way.is_due(now)) {
                while self.mend_path(index, at) {}
            }
        }
    }

    /// Does what is next for a path of ours; whether there may be more.
    fn mend_path(&mut self, index: u16, at: usize) -> bool {
        let now = self.now;
        let Some(session) = self.sessions.get(usize::from(index)).and_then(Option::as_deref) else {
            return false;
        };
        let Some(outlet) = session.outlets.get(at).copied() else { return false };
        let theirs = session.ports.len().max(1);
        let (nic, remote) = (at / theirs, at % theirs);
        let usable = self.ports.get(nic).is_some_and(Nic::is_usable);
        let lanes = &mut self.lanes;
        let unread = |id| lanes.get(id).map_or(0, |lane| lane.unread());
        match outlet.way.next(now, usable, outlet.lanes.map(|ids| ids.map(unread).iter().sum())) {
            Next::Nothing => return false,
            Next::Close => {
                if let Some(outlet) = self.session(index).and_then(|it| it.outlets.get_mut(at)) {
                    outlet.lanes = None;
                }
                for id in outlet.lanes() {
                    self.close_lane(id);
                }
                return true;
            }
            Next::Open => {
                let Err(error) = self.open_outlet(index, at) else { return false };
                tracing::warn!(index, nic, remote, %error, "a path could not be opened");
            }
            Next::Fail => {}
        }
        self.break_path(index, nic_at(nic), nic_at(remote));
        false
    }

    fn open_outlet(&mut self, index: u16, at: usize) -> Result<(), VerbsError> {
        let session = self.session(index).ok_or(VerbsError::Unreachable)?;
        let theirs = session.ports.len();
        let outlet = session.outlets.get_mut(at).ok_or(VerbsError::Unreachable)?;
        let (from, to) = (nic_at(at / theirs), nic_at(at % theirs));
        let epoch = outlet.way.open();
        let port = self.ports.get_mut(usize::from(from)).ok_or(VerbsError::Unreachable)?;
        let shared = port.shared(index)?;
        let mut pairs = heapless::Vec::<QueuePair, LANES>::new();
        for inline in [0, port.inline] {
            let depths = Depths { sends: LANE_DEPTH.into(), receives: 0, inline };
            let pair = QueuePair::for_writes(&port.domain, &port.completed, &shared, depths)?;
            let _ = pairs.push(pair);
        }
        let (mut lanes, mut queues) = (heapless::Vec::<LaneId, LANES>::new(), Queues::default());
        for (pair, queue) in pairs.into_iter().zip(&mut queues) {
            let number = pair.number();
            *queue = pair.queue();
            let lane = Lane::new(pair, (from, to), index, LANE_DEPTH.into());
            let Some(lane) = self.lanes.open(lane) else { break };
            let _ = lanes.push(lane);
            port.owners.set(number, Some(Owner { session: index, role: Role::Outlet { lane } }));
        }
        let lanes = lanes.into_array().map_err(|opened| {
            for id in opened {
                self.close_lane(id);
            }
            VerbsError::Unreachable
        })?;
        if let Some(session) = self.session(index)
            && let Some(outlet) = session.outlets.get_mut(at)
        {
            outlet.lanes = Some(lanes);
            session.says.connect.push((Passage { from, to, epoch }, queues));
        }
        Ok(())
    }

    /// The peer's ends receive: ours send, once its address is known. `None` if there is no such path.
    pub(super) fn answered(&mut self, index: u16, passage: Passage, theirs: Queues) -> Option<()> {
        self.ports.get(usize::from(passage.from))?;
        let session = self.session(index)?;
        session.ports.get(usize::from(passage.to))?;
        session.mailbox.keys.get(passage.to)?;
        let outlet = session.outlet(passage.from, passage.to);
        let outlet = outlet.and_then(|at| session.outlets.get_mut(at))?;
        if outlet.way.is_asked(passage.epoch) {
            outlet.answer = Some((passage, theirs));
        }
        Some(())
    }

    /// Whether a queue pair of this NIC can be connected to a NIC of the peer's.
    pub(super) fn reach(&mut self, index: u16, nic: NicIndex, remote_nic: NicIndex) -> Reach {
        let session = self.sessions.get(usize::from(index)).and_then(Option::as_deref);
        let there = session.and_then(|session| session.ports.get(usize::from(remote_nic)));
        let Some(there) = there else { return Reach::NoRoute };
        match self.resolver.reach(self.now, nic.into(), there, Asker::Us) {
            // Not for long: all that there is room for is answered.
            Reach::Full => Reach::Waits,
            reach => reach,
        }
    }

    /// Does what has waited for addresses of the peer's that are known by now, or known not to answer.
    pub(super) fn connect_paths<S: Sink>(&mut self, index: u16, sink: &mut S) {
        let open = self.session(index).filter(|session| session.life.is_open());
        // As many inlets, too.
        let paths = open.map_or(0, |session| session.outlets.len());
        for at in 0..paths {
            let answer = self.session(index).and_then(|it| it.outlets.get(at)?.answer);
            if let Some((passage, theirs)) = answer
                && self.reach(index, passage.from, passage.to) != Reach::Waits
            {
                self.finish_outlet(index, passage, theirs);
            }
        }
        for at in 0..paths {
            let asked = self.session(index).and_then(|it| it.inlets.get(at)?.asked);
            if let Some((passage, theirs)) = asked
                && self.reach(index, passage.to, passage.from) != Reach::Waits
            {
                self.open_inlet(index, passage, theirs, sink);
            }
        }
    }

    fn finish_outlet(&mut self, index: u16, passage: Passage, theirs: Queues) -> Option<()> {
        let now = self.now;
        let session = self.sessions.get_mut(usize::from(index))?.as_deref_mut()?;
        let at = session.outlet(passage.from, passage.to)?;
        let there = session.ports.get(usize::from(passage.to))?;
        let usable = self.ports.get(usize::from(passage.from))?.is_usable();
        let left = is_left(usable, leads(session, &self.ports));
        let port = self.ports.get_mut(usize::from(passage.from))?;
        let outlet = session.outlets.get_mut(at)?;
        if left && outlet.way.is_asked(passage.epoch) {
            outlet.answer = None;
            self.break_path(index, passage.from, passage.to);
            return Some(());
        }
        // There is to be room for what it may be tried with.
        if usize::from(port.pieces.saturating_sub(port.outstanding)) < LANES {
            outlet.answer = Some((passage, theirs));
            self.urgent = true;
            return Some(());
        }
        outlet.answer = None;
        let answered = outlet.way.answered(now, passage.epoch, LANES_EACH);
        if answered == Answered::Stale {
            return Some(());
        }
        let (to, key) = (session.mailbox.base, session.mailbox.keys.get(passage.to)?);
        for (id, theirs) in outlet.lanes().zip(theirs) {
            let lane = self.lanes.get(id)?;
            let pair = (usize::from(passage.from), &lane.pair);
            let connected = self.resolver.connect(now, pair, (there, theirs)).and_then(|()| {
                if answered == Answered::Open {
                    return Ok(());
                }
                let number = Done::Trial { lane: id }.encode();
                let tried = lane.pair.probe(number, to, device_key(key));
                tried.map_err(|source| VerbsError::Call { call: "ibv_post_send", source })?;
                lane.is_tried = true;
                session.in_flight += 1;
                port.outstanding += 1;
                Ok(())
            });
            if let Err(error) = connected {
                tracing::warn!(peer = %session.peer, %error, "a path could not be opened");
                self.break_path(index, passage.from, passage.to);
                break;
            }
        }
        Some(())
    }

    /// The peer does not open its ends now. `None` if there is no such path.
    pub(super) fn declined(&mut self, index: u16, passage: Passage) -> Option<()> {
        let session = self.session(index)?;
        let outlet = session.outlets.get(session.outlet(passage.from, passage.to)?)?;
        if outlet.way.declined(passage.epoch) {
            self.break_path(index, passage.from, passage.to);
        }
        Some(())
    }

    /// The write that a lane was tried with has ended.
    pub(super) fn tried(&mut self, id: LaneId, good: bool) {
        let now = self.now;
        let Some(lane) = self.lanes.get(id) else { return };
        if !std::mem::take(&mut lane.is_tried) {
            return;
        }
        let (nic, remote_nic, index) = (lane.nic, lane.remote_nic, lane.session);
        if let Some(port) = self.ports.get_mut(usize::from(nic)) {
            port.outstanding = port.outstanding.saturating_sub(1);
        }
        let Some(session) = self.sessions.get_mut(usize::from(index)).and_then(Option::as_mut)
        else {
            return;
        };
        session.in_flight = session.in_flight.saturating_sub(1);
        self.urgent = true;
        if !good {
            return self.break_path(index, nic, remote_nic);
        }
        let at = session.outlet(nic, remote_nic);
        let Some(outlet) = at.and_then(|at| session.outlets.get_mut(at)) else { return };
        if outlet.way.proven(now) {
            tracing::info!(peer = %session.peer, nic, remote_nic, "a path is back");
            self.tidings.push(Tiding::Restored(session.peer, Path { nic, remote_nic }));
        }
    }

    /// The path of this lane does not work.
    pub(super) fn break_lane(&mut self, id: LaneId) {
        if let Some(lane) = self.lanes.get(id) {
            let (session, nic, remote_nic) = (lane.session, lane.nic, lane.remote_nic);
            self.break_path(session, nic, remote_nic);
        }
    }

    /// A path does not work: it is cut. What is in flight there waits to be settled.
    pub(super) fn break_path(&mut self, index: u16, nic: NicIndex, remote_nic: NicIndex) {
        let now = self.now;
        self.urgent = true;
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let Some(session) = session.filter(|session| !session.is_leaving()) else { return };
        let at = session.outlet(nic, remote_nic);
        let Some(outlet) = at.and_then(|at| session.outlets.get_mut(at)) else { return };
        let failed = outlet.way.fail(now);
        for id in outlet.lanes().filter(|_| failed != Failed::Nothing) {
            if let Some(lane) = self.lanes.get(id) {
                must(lane.pair.cut());
            }
        }
        if failed != Failed::Broke {
            return;
        }
        self.tidings.push(Tiding::Broken(session.peer, Path { nic, remote_nic }));
        // Lines of these NICs may have gone the same way: that is seen now.
        session.courier.doubt(bit(nic) | bit(remote_nic), true);
        session.pulse.doubt(now);
        if is_cut_off(leads(session, &self.ports)) {
            session.life.leave(now, Notice::Told, Some(DownReason::Disconnected));
        }
    }

    /// Takes a lane out, and its queue pair; returns what was in flight there.
    pub(super) fn close_lane(&mut self, id: LaneId) -> VecDeque<WorkRequest> {
        let Some(lane) = self.lanes.close(id) else { return VecDeque::new() };
        let unread = lane.unread();
        let Lane { pair, nic, session, flights, .. } = *lane;
        if let Some(port) = self.ports.get_mut(usize::from(nic)) {
            port.owners.set(pair.number(), None);
            let unread = u16::try_from(unread).unwrap_or(u16::MAX);
            port.outstanding = port.outstanding.saturating_sub(unread);
        }
        if let Some(session) = self.session(session) {
            session.in_flight = session.in_flight.saturating_sub(unread);
        }
        drop(pair);
        flights
    }

    /// Cuts all ends of the peer's paths to this NIC. The peer notices by its own.
    pub(super) fn cut_inlets(&mut self, index: u16, nic: NicIndex) {
        let nics = self.ports.len().max(1);
        let Some(session) = self.session(index) else { return };
        let inlets = session.inlets.iter().skip(usize::from(nic)).step_by(nics);
        for (pair, _) in inlets.filter_map(|inlet| inlet.pairs.as_ref()).flatten() {
            must(pair.cut());
        }
    }

    /// Cuts the ends of a path of the peer's, if there are any, and reads what they have received.
    pub(super) fn drain_inlet<S: Sink>(&mut self, index: u16, at: usize, sink: &mut S) {
        let inlet = self.session(index).and_then(|session| session.inlets.get(at));
        let Some(pairs) = inlet.and_then(|inlet| inlet.pairs.as_ref()) else { return };
        let numbers = pairs.each_ref().map(|(pair, _)| {
            must(pair.cut());
            pair.number()
        });
        self.drain(at % self.ports.len().max(1), &numbers, sink);
    }

    /// Destroys the ends of a path of the peer's, if there are any: nothing is written on their behalf any more.
    pub(super) fn close_inlet(&mut self, index: u16, at: usize) {
        let nics = self.ports.len().max(1);
        let Some(session) = self.sessions.get_mut(usize::from(index)).and_then(Option::as_mut)
        else {
            return;
        };
        let Some(inlet) = session.inlets.get_mut(at) else { return };
        for (pair, _) in inlet.pairs.take().into_iter().flatten() {
            if let Some(port) = self.ports.get_mut(at % nics) {
                port.owners.set(pair.number(), None);
            }
        }
    }

    /// The peer wants to write over a path: our ends are opened when its address is known. `None` if that makes no sense.
    pub(super) fn asked(&mut self, index: u16, passage: Passage, theirs: Queues) -> Option<()> {
        let nics = self.ports.len();
        let at = usize::from(passage.from) * nics + usize::from(passage.to);
        self.ports.get(usize::from(passage.to))?;
        let session = self.session(index)?;
        session.ports.get(usize::from(passage.from))?;
        let inlet = session.inlets.get_mut(at)?;
        let waiting = inlet.asked.map(|(passage, _)| passage.epoch);
        if !is_later(passage.epoch, inlet.epoch, waiting) {
            return None;
        }
        inlet.asked = Some((passage, theirs));
        Some(())
    }

    /// Opens our ends of a path of the peer's, or says that we cannot.
    fn open_inlet<S: Sink>(
        &mut self,
        index: u16,
        passage: Passage,
        theirs: Queues,
        sink: &mut S,
    ) -> Option<()> {
        let at = usize::from(passage.from) * self.ports.len() + usize::from(passage.to);
        // Nothing is in flight there, or the peer would have asked what arrived first.
        self.drain_inlet(index, at, sink);
        self.close_inlet(index, at);
        let opened = self.inlet_pairs(index, passage, theirs);
        let session = self.session(index)?;
        let inlet = session.inlets.get_mut(at)?;
        // What has been asked for meanwhile waits.
        let asked = inlet.asked.filter(|(later, _)| later.epoch != passage.epoch);
        *inlet = Inlet { epoch: passage.epoch, asked, ..Inlet::default() };
        match opened {
            Ok(pairs) => {
                let queues = pairs.each_ref().map(QueuePair::queue);
                inlet.pairs = Some(pairs.map(|pair| (pair, false)));
                session.says.connected.push((passage, queues));
            }
            Err(error) => {
                tracing::warn!(peer = %session.peer, %error, "a path could not be opened");
                session.says.declined.push(passage);
            }
        }
        Some(())
    }

    /// Our ends of a path of the peer's.
    fn inlet_pairs(
        &mut self,
        index: u16,
        passage: Passage,
        theirs: Queues,
    ) -> Result<[QueuePair; LANES], VerbsError> {
        let unreachable = || VerbsError::Unreachable;
        let Passage { from, to, .. } = passage;
        let there = self.session(index).and_then(|it| it.ports.get(usize::from(from)).copied());
        let port = self.ports.get_mut(usize::from(to)).filter(|port| port.is_usable());
        let port = port.ok_or_else(unreachable)?;
        let there = there.ok_or_else(unreachable)?;
        let shared = port.shared(index)?;
        let mut pairs = heapless::Vec::<QueuePair, LANES>::new();
        for theirs in theirs {
            let depths = Depths { sends: 1, receives: 0, inline: 0 };
            let pair = QueuePair::reliable(&port.domain, &port.completed, &shared, depths)?;
            self.resolver.connect(self.now, (to.into(), &pair), (&there, theirs))?;
            let _ = pairs.push(pair);
        }
        for (pair, lane) in pairs.iter().zip(0..) {
            let role = Role::Inlet { from, lane };
            port.owners.set(pair.number(), Some(Owner { session: index, role }));
        }
        pairs.into_array().map_err(|_| VerbsError::Unreachable)
    }
}
