//! Sessions that end, one at a time or all at once. What is next is `immwire_core::life`'s to say.
//!
//! # Invariants
//!
//! - A session is over only when each of its pieces is reported, and then none of its queue pairs is left. What is
//!   told of its end comes after that.
//! - Of a leaving session nothing is reported but its pieces, as failed, and its end.

use std::time::{Duration, Instant};

use immwire_core::group::WorkError;
use immwire_core::id::PeerId;
use immwire_core::life::Notice;
use immwire_core::parting::{Standing, Step};
use immwire_core::peer::DownReason;

use super::session::{Outlet, Session};
use super::{VerbsError, VerbsProvider};
use crate::provider::{Nobody, Sink};

/// How long leaving may take at the end.
const FAREWELL: Duration = Duration::from_millis(20);

impl VerbsProvider {
    /// The engine wants to be rid of a peer.
    pub(super) fn part<S: Sink>(&mut self, peer: PeerId, reason: Option<DownReason>, sink: &mut S) {
        let now = self.now;
        let seat = self.seats.get(usize::from(peer.index)).copied().flatten();
        let session = seat.and_then(|index| self.session(index));
        if let Some(session) = session.filter(|session| session.peer == peer) {
            session.life.leave(now, Notice::Told, reason);
            self.tend(sink);
        }
    }

    /// Something failed that concerns this peer alone: it is given up.
    pub(super) fn stumble(&mut self, index: u16) {
        let now = self.now;
        if let Some(session) = self.session(index) {
            session.life.leave(now, Notice::Told, Some(DownReason::Disconnected));
        }
        self.urgent = true;
    }

    /// What of a session has not ended.
    fn standing(&mut self, index: u16) -> Option<Standing> {
        let session = self.sessions.get(usize::from(index))?.as_deref()?;
        let lanes = session.outlets.iter().flat_map(Outlet::lanes);
        let lanes = lanes.filter(|id| self.lanes.get(*id).is_some_and(|lane| !lane.is_drained));
        let pairs = session.inlets.iter().flat_map(|inlet| &inlet.pairs).flatten();
        let inlets = pairs.filter(|(_, drained)| !drained);
        let lines = session.lines.iter().filter(|line| line.pair.is_some() && !line.is_drained);
        let undrained = lanes.count() + inlets.count() + lines.count();
        let (notes, writes) = (session.notes(), usize::try_from(session.in_flight).unwrap_or(0));
        Some(Standing { posted: writes + notes, notes, undrained })
    }

    /// Does what is next in ending a session that ends; whether it is over.
    pub(super) fn part_with(&mut self, index: u16) -> bool {
        let now = self.now;
        loop {
            let Some(standing) = self.standing(index) else { return true };
            let Some(session) = self.session(index) else { return true };
            let Some(step) = session.life.step(now, standing) else { return false };
            match step {
                Step::CutPaths => {
                    self.cut_paths(index);
                    self.speak(index);
                }
                Step::CutNotes => {
                    let pairs = session.lines.iter().filter_map(|line| line.pair.as_ref());
                    pairs.for_each(|pair| must(pair.cut()));
                }
                Step::Wait(_) => return false,
                Step::Over => return true,
            }
        }
    }

    /// Cuts all queue pairs of a session but its lines.
    fn cut_paths(&mut self, index: u16) {
        let session = self.sessions.get(usize::from(index)).and_then(Option::as_deref);
        let Some(session) = session else { return };
        for lane in session.outlets.iter().flat_map(Outlet::lanes) {
            if let Some(lane) = self.lanes.get(lane) {
                must(lane.pair.cut());
            }
        }
        let inlets = session.inlets.iter().flat_map(|inlet| &inlet.pairs);
        inlets.flatten().for_each(|(pair, _)| must(pair.cut()));
    }

    /// A session has ended.
    pub(super) fn finish<S: Sink>(&mut self, index: u16, sink: &mut S) {
        // What the queue pairs have taken from the shared queues is to be posted there again.
        for at in 0..self.ports.len() {
            self.poll_nic(at, self.last_rounds, sink);
        }
        let Some(session) = self.session(index) else { return };
        let lanes: Vec<_> = session.outlets.iter().flat_map(Outlet::lanes).collect();
        let inlets = session.inlets.len();
        (0..inlets).for_each(|at| self.close_inlet(index, at));
        for id in lanes {
            let nic = self.lanes.get(id).map_or(0, |lane| lane.nic);
            for work in self.close_lane(id) {
                sink.work_done(nic, work.token, Err(WorkError::Flushed));
            }
        }
        let slot = self.sessions.get_mut(usize::from(index));
        let Some(session) = slot.and_then(Option::take) else { return };
        self.live.retain(|&live| live != index);
        for (line, port) in session.lines.iter().zip(&mut self.ports) {
            if let Some(pair) = &line.pair {
                port.owners.set(pair.number(), None);
            }
        }
        let Session { peer, token, life, .. } = *session;
        drop(session);
        if let Some(seat) = self.seats.get_mut(usize::from(peer.index))
            && *seat == Some(index)
        {
            *seat = None;
        }
        self.memory.regions.with_ledger(|ledger| ledger.close(token, true));
        if let Some(reason) = life.reason() {
            sink.disconnected(peer, reason);
        }
    }

    /// Tells all peers that it is over, and gives that a moment to arrive.
    pub(super) fn farewell(&mut self) {
        self.hang_up_all();
        let now = self.now;
        for at in 0..self.live.len() {
            let Some(&index) = self.live.get(at) else { break };
            if let Some(session) = self.session(index) {
                session.life.leave(now, Notice::Told, None);
            }
            self.part_with(index);
        }
        let until = Instant::now() + FAREWELL;
        let heard = |session: &Option<Box<Session>>| {
            session.as_ref().is_none_or(|session| session.notes() == 0)
        };
        while !self.sessions.iter().all(heard) && Instant::now() < until {
            (0..self.ports.len()).for_each(|at| {
                self.poll_nic(at, 1, &mut Nobody);
            });
            std::thread::yield_now();
        }
    }
}

/// One that could not be cut is destroyed in the end.
pub(super) fn must(cut: Result<(), VerbsError>) {
    if let Err(error) = cut {
        tracing::warn!(%error, "a queue pair could not be cut");
    }
}
