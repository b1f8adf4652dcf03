//! What is to be done beside the way of data: hearing the door, the notes and the devices, opening paths and lines anew,
//! ending sessions.
//!
//! # Invariants
//!
//! - A session is over only when each of its pieces is reported, and then none of its queue pairs is left. What is
//!   told of its end comes after that.
//! - A queue pair is connected when the address of its other end is known; what needs it waits until then.
//! - A path is posted on only when the receiver has said that its ends receive.
//! - What was in flight on a path that broke stays there until it is settled, or its session ends; and its queue pairs
//!   are there as long, cut. A path is opened anew when they are gone.
//! - A line is opened anew when all that was posted on it before has completed: so no queue overruns by it.
//! - Of a leaving session nothing is reported but its pieces, as failed, and its end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use immwire_core::courier::Letter;
use immwire_core::datagram::Message;
use immwire_core::group::{Token, WorkError, WorkRequest};
use immwire_core::id::{MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::life::{Notice, Says};
use immwire_core::line;
use immwire_core::note::{LANES, Note, Passage, Queues};
use immwire_core::parting::{Standing, Step};
use immwire_core::peer::DownReason;
use immwire_core::plan::RunLayout;
use immwire_core::port::{PACKET_MAX, Queue};
use immwire_core::resolve::Asker;
use immwire_core::tenant::{Tenant, device_key};
use immwire_core::way::{Answered, Failed, Lead, Next, is_cut_off, is_led};
use immwire_core::wire::{Hello, Refusal};

use super::device::{Depths, Event, QueuePair};
use super::door::{Heard, Sent};
use super::handshake::Hearing;
use super::lane::{Done, Lane, LaneId, Owner, Role};
use super::resolver::Reach;
use super::session::{Inlet, Outlet, Session};
use super::{
    INLINE_BYTES, LAST_ROUNDS, NOTES, QUEUE_DEPTH, Tiding, UPKEEP_EVERY, VerbsError, VerbsProvider,
    tag_of,
};
use crate::provider::{Path, Sink};

/// Paths between two engines, one way, at most.
const PATHS: usize = MAX_NICS * MAX_NICS;
/// Queue pairs of a path.
const LANES_EACH: u8 = {
    assert!(LANES < 256, "they are counted in a byte");
    LANES.to_le_bytes()[0]
};
/// Messages heard in one go.
const MESSAGES_MAX: usize = 64;
/// How long leaving may take at the end.
const FAREWELL: Duration = Duration::from_millis(20);

/// A NIC's bit.
fn bit(nic: NicIndex) -> u8 {
    1_u8.unbounded_shl(nic.into())
}

/// The number of what is at this place in a table by NIC.
fn nic_at(at: usize) -> NicIndex {
    NicIndex::try_from(at).unwrap_or(NicIndex::MAX)
}

/// All the paths of a session.
fn leads(session: &Session, ports: &[super::Nic]) -> impl Iterator<Item = Lead> {
    let theirs = session.ports.len().max(1);
    session.outlets.iter().enumerate().map(move |(at, outlet)| {
        let port = ports.get(at / theirs);
        let is_usable = port.is_some_and(super::Nic::is_usable);
        Lead { way: outlet.way, is_usable, is_lost: port.is_none_or(|port| port.is_lost) }
    })
}

impl VerbsProvider {
    /// Everything that is not on the way of data. Returns whether there was anything.
    #[cold]
    pub(super) fn upkeep<S: Sink>(&mut self, sink: &mut S) -> bool {
        if self.urgent {
            self.urgent = false;
            let mut word = [0; 8];
            // Empty is as good: they only wake.
            let _ = rustix::io::read(self.memory.regions.wake_fd(), &mut word);
            let _ = rustix::io::read(&self.timer, &mut word);
            self.resolver.disarm();
        }
        let leaving = self.sessions.iter().flatten().any(|session| session.is_leaving());
        if leaving || std::mem::take(&mut self.woken) || self.polls.is_multiple_of(UPKEEP_EVERY) {
            self.hear_devices();
        }
        let heard = self.hear_door(sink);
        if self.resolver.take(self.now) {
            self.resume(sink);
        }
        self.repeat_calls(sink);
        self.tell_withdrawals();
        self.tell(sink);
        self.tend(sink);
        self.tell(sink);
        heard
    }

    /// Tells what has become of NICs and paths.
    fn tell<S: Sink>(&mut self, sink: &mut S) {
        for tiding in std::mem::take(&mut self.tidings) {
            match tiding {
                Tiding::Broken(peer, path) if self.is_staying(peer) => sink.path_broken(peer, path),
                Tiding::Restored(peer, path) if self.is_staying(peer) => {
                    sink.path_restored(peer, path);
                }
                Tiding::Broken(..) | Tiding::Restored(..) => {}
                Tiding::Nic(nic, healthy) => sink.nic_changed(nic, healthy),
            }
        }
    }

    fn is_staying(&mut self, peer: PeerId) -> bool {
        let session = self.seat(peer).and_then(|index| self.session(index));
        session.is_some_and(|session| !session.is_leaving())
    }

    // ---- hearing ----

    /// Looks for what devices tell by themselves.
    fn hear_devices(&mut self) {
        for at in 0..self.ports.len() {
            while let Some(event) = self.ports.get(at).and_then(|port| port.device().event()) {
                self.urgent = true;
                match event {
                    Event::QueuePairFailed { number } => match self.owner(at, number) {
                        Some((_, Owner { role: Role::Outlet { lane }, .. })) => {
                            self.break_lane(lane)
                        }
                        Some((nic, Owner { session, role: Role::Line })) => {
                            self.break_line(session, nic);
                        }
                        // Whoever writes there will notice.
                        Some((_, Owner { role: Role::Inlet { .. }, .. })) | None => {}
                    },
                    Event::PeerFailed { number } => {
                        let (now, owner) = (self.now, self.owner(at, number));
                        if let Some(session) = owner.and_then(|(_, it)| self.session(it.session)) {
                            // There is nothing to wait for.
                            session.life.leave(now, Notice::Untold, Some(DownReason::Disconnected));
                        }
                    }
                    Event::Drained { number } => {
                        if let Some((nic, owner)) = self.owner(at, number) {
                            self.drained(nic, owner, number);
                        }
                    }
                    Event::Port { is_up } => self.port_changed(at, is_up),
                    Event::DeviceFailed { kind } => {
                        tracing::error!(kind, "a device failed");
                        for nic in self.sharing(at) {
                            self.lose_nic(nic);
                        }
                    }
                    Event::Other { kind } => tracing::debug!(kind, "an event of a device's"),
                }
            }
        }
    }

    /// The NICs that share the device of this one.
    fn sharing(&self, at: usize) -> Vec<NicIndex> {
        let device = self.ports.get(at).map(|port| Arc::as_ptr(port.device()));
        let ports = self.ports.iter().enumerate();
        let same = ports.filter(|(_, port)| Some(Arc::as_ptr(port.device())) == device);
        same.map(|(at, _)| nic_at(at)).collect()
    }

    /// Whose a queue pair is that the device of this NIC has told of, and on which of those that share it.
    fn owner(&self, at: usize, number: u32) -> Option<(NicIndex, Owner)> {
        self.sharing(at).into_iter().find_map(|nic| {
            let port = self.ports.get(usize::from(nic))?;
            port.owners.get(number).map(|owner| (nic, owner))
        })
    }

    /// A queue pair takes no more from its shared receive queue.
    fn drained(&mut self, nic: NicIndex, owner: Owner, number: u32) {
        let nics = self.ports.len();
        let Owner { session: index, role } = owner;
        match role {
            Role::Outlet { lane } => {
                if let Some(lane) = self.lanes.get(lane) {
                    lane.is_drained = true;
                }
            }
            Role::Line => {
                let session = self.session(index);
                if let Some(line) = session.and_then(|it| it.lines.get_mut(usize::from(nic))) {
                    line.is_drained = true;
                }
            }
            Role::Inlet { from, .. } => {
                let at = usize::from(from) * nics + usize::from(nic);
                let inlet = self.session(index).and_then(|session| session.inlets.get_mut(at));
                let pairs = inlet.and_then(|inlet| inlet.pairs.as_mut()).into_iter().flatten();
                for (_, drained) in pairs.filter(|(pair, _)| pair.number() == number) {
                    *drained = true;
                }
            }
        }
    }

    /// The port of this NIC's device is down, or up again.
    fn port_changed(&mut self, at: usize, is_up: bool) {
        let now = self.now;
        for nic in self.sharing(at) {
            let port = self.ports.get_mut(usize::from(nic));
            let Some(port) = port.filter(|port| !port.is_lost && port.is_up != is_up) else {
                continue;
            };
            port.is_up = is_up;
            tracing::warn!(nic, is_up, "a port has changed");
            self.resolver.forget_nic(nic.into());
            self.tidings.push(Tiding::Nic(nic, is_up));
            for session in self.sessions.iter_mut().flatten() {
                session.doubt(bit(nic), !is_up);
                if is_up {
                    session.hurry(now, Some(nic), None);
                    if !session.says.back.contains(&nic) {
                        session.says.back.push(nic);
                    }
                }
            }
        }
        if !is_up {
            for nic in self.sharing(at) {
                self.live.clone().into_iter().for_each(|index| self.leave_port(index, nic));
            }
        }
    }

    /// What is in flight over a NIC whose port is down does not wait for the transport to give it up, if there is another
    /// way; else it may be up again in time.
    fn leave_port(&mut self, index: u16, nic: NicIndex) {
        let usable = |at: usize| self.ports.get(at).is_some_and(super::Nic::is_usable);
        let session = self.sessions.get(usize::from(index)).and_then(Option::as_deref);
        let Some(session) = session else { return };
        let theirs = session.ports.len().max(1);
        let usable = (0..8).filter(|&at| usable(usize::from(at)));
        let has_line = session.courier.is_led(usable.fold(0, |lines, at| lines | bit(at)));
        let has_path = is_led(leads(session, &self.ports));
        let ways = session.outlets.iter().skip(usize::from(nic) * theirs).take(theirs);
        let lanes: Vec<_> = ways.filter_map(|it| it.lanes.filter(|_| it.way.is_open())).collect();
        if has_line {
            self.break_line(index, nic);
        }
        for id in lanes.into_iter().filter(|_| has_path).flatten() {
            if self.lanes.get(id).is_some_and(|lane| lane.unread() > 0) {
                self.break_lane(id);
            }
        }
    }

    fn hear_door<S: Sink>(&mut self, sink: &mut S) -> bool {
        if self.is_mute {
            return false;
        }
        let mut bytes = [0; PACKET_MAX];
        for round in 0..MESSAGES_MAX {
            match self.door.read(&mut bytes) {
                None => return round > 0,
                Some(Heard::Message { len, from }) => {
                    let bytes = bytes.get(..len).unwrap_or(&[]);
                    if self.hear_packet(bytes, &from, sink) == Some(Hearing::Later) {
                        self.handshakes.put_off(self.now, bytes, from);
                    }
                }
                Some(Heard::Broken) => {
                    tracing::error!("the door's device has failed: nobody new can connect");
                    self.is_mute = true;
                    self.lose_nic(0);
                    return true;
                }
            }
        }
        self.urgent = true;
        true
    }

    /// A letter of a session's has come over the line of this NIC; `None` if what has come is none.
    pub(super) fn hear_letter(&mut self, index: u16, nic: NicIndex, letter: Option<Letter>) {
        self.urgent = true;
        let now = self.now;
        let Some(session) = self.session(index) else { return };
        session.life.hear();
        session.pulse.hear(nic);
        let line = session.lines.get_mut(usize::from(nic));
        if line.is_some_and(|line| line.state.hear()) {
            session.courier.open_line(nic);
        }
        match letter.map(|letter| session.courier.hear(&letter)) {
            Some(Ok(Some(note))) => self.hear_note(index, note),
            Some(Ok(None)) => {}
            Some(Err(_)) | None => {
                session.life.leave(now, Notice::Told, Some(DownReason::Protocol));
                self.stats.ignored += 1;
            }
        }
    }

    /// What a peer says in its session. What makes no sense ends it.
    fn hear_note(&mut self, index: u16, note: Note) {
        let now = self.now;
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let Some(session) = session else { return };
        let understood = match note {
            Note::Ready => Some(()),
            Note::Bye => {
                session.life.leave(now, Notice::Told, Some(DownReason::Disconnected));
                Some(())
            }
            Note::Taken { nic, count } => {
                let allowance = session.allowances.get_mut(usize::from(nic));
                allowance.and_then(|allowance| allowance.report(count).ok())
            }
            Note::Withdraw(tenant) => {
                session.withdrawn.withdraw(tenant);
                if !session.releasing.contains(&tenant) {
                    session.releasing.push(tenant);
                }
                Some(())
            }
            Note::Withdrawn(tenant) => {
                let token = session.token;
                self.memory.regions.with_ledger(|ledger| ledger.withdrawn(token, tenant));
                Some(())
            }
            Note::Connect(passage, theirs) => self.asked(index, passage, theirs),
            Note::Connected(passage, theirs) => self.answered(index, passage, theirs),
            Note::Declined(passage) => self.declined(index, passage),
            Note::Link(Passage { from, to, epoch }, queue) => {
                let line = session.lines.get_mut(usize::from(from)).filter(|_| from == to);
                line.is_some_and(|line| line.state.asked(epoch, queue)).then_some(())
            }
            Note::Linked(Passage { from, epoch, .. }, queue) => {
                let line = session.lines.get_mut(usize::from(from));
                line.is_some_and(|line| line.state.answered(epoch, queue)).then_some(())
            }
            Note::Back { nic } => {
                if let Some(port) = session.ports.get(usize::from(nic)) {
                    self.resolver.forget_port(port);
                }
                session.hurry(now, None, Some(nic));
                Some(())
            }
        };
        if understood.is_none() {
            self.stats.ignored += 1;
            if let Some(session) = self.session(index) {
                session.life.leave(now, Notice::Told, Some(DownReason::Protocol));
            }
        }
    }

    // ---- paths ----

    /// Opens our ends of paths that are wanted, or have rested, and has the peer asked for its own.
    fn open_outlets(&mut self, index: u16) {
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
        let usable = self.ports.get(nic).is_some_and(super::Nic::is_usable);
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
        let mut pairs = heapless::Vec::<QueuePair, LANES>::new();
        for inline in [0, INLINE_BYTES] {
            let depths = Depths { sends: QUEUE_DEPTH.into(), receives: 0, inline };
            let pair = QueuePair::reliable(&port.domain, &port.completed, &port.shared, depths)?;
            let _ = pairs.push(pair);
        }
        let (mut lanes, mut queues) = (heapless::Vec::<LaneId, LANES>::new(), Queues::default());
        for (pair, queue) in pairs.into_iter().zip(&mut queues) {
            let number = pair.number();
            *queue = pair.queue();
            let lane = Lane::new(pair, (from, to), index, QUEUE_DEPTH.into());
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
    fn answered(&mut self, index: u16, passage: Passage, theirs: Queues) -> Option<()> {
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
    fn reach(&mut self, index: u16, nic: NicIndex, remote_nic: NicIndex) -> Reach {
        let session = self.sessions.get(usize::from(index)).and_then(Option::as_deref);
        let there = session.and_then(|session| session.ports.get(usize::from(remote_nic)));
        let Some(there) = there else { return Reach::Lost };
        match self.resolver.reach(self.now, nic.into(), there, Asker::Us) {
            // Not for long: all that there is room for is answered.
            Reach::Full => Reach::Waits,
            reach => reach,
        }
    }

    /// Does what has waited for addresses of the peer's that are known by now, or known not to answer.
    fn connect_paths(&mut self, index: u16) {
        let Some(session) = self.session(index).filter(|it| it.life.is_open()) else {
            return;
        };
        // There are no more of each than there is room for: neither end has more NICs.
        let answers: heapless::Vec<_, PATHS> =
            session.outlets.iter().filter_map(|it| it.answer).collect();
        let asked: heapless::Vec<_, PATHS> =
            session.inlets.iter().filter_map(|it| it.asked).collect();
        for (passage, theirs) in answers {
            if self.reach(index, passage.from, passage.to) != Reach::Waits {
                self.finish_outlet(index, passage, theirs);
            }
        }
        for (passage, theirs) in asked {
            if self.reach(index, passage.to, passage.from) != Reach::Waits {
                self.open_inlet(index, passage, theirs);
            }
        }
    }

    fn finish_outlet(&mut self, index: u16, passage: Passage, theirs: Queues) -> Option<()> {
        let now = self.now;
        let session = self.sessions.get_mut(usize::from(index))?.as_deref_mut()?;
        let at = session.outlet(passage.from, passage.to)?;
        let there = session.ports.get(usize::from(passage.to))?;
        let port = self.ports.get_mut(usize::from(passage.from))?;
        let outlet = session.outlets.get_mut(at)?;
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
    fn declined(&mut self, index: u16, passage: Passage) -> Option<()> {
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
    fn break_lane(&mut self, id: LaneId) {
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
        session.doubt(bit(nic) | bit(remote_nic), true);
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
    fn asked(&mut self, index: u16, passage: Passage, theirs: Queues) -> Option<()> {
        let nics = self.ports.len();
        let at = usize::from(passage.from) * nics + usize::from(passage.to);
        self.ports.get(usize::from(passage.to))?;
        let session = self.session(index)?;
        session.ports.get(usize::from(passage.from))?;
        let inlet = session.inlets.get_mut(at).filter(|inlet| inlet.epoch < passage.epoch)?;
        if inlet.asked.is_some_and(|(other, _)| passage.epoch <= other.epoch) {
            return None;
        }
        inlet.asked = Some((passage, theirs));
        Some(())
    }

    /// Opens our ends of a path of the peer's, or says that we cannot.
    fn open_inlet(&mut self, index: u16, passage: Passage, theirs: Queues) -> Option<()> {
        let at = usize::from(passage.from) * self.ports.len() + usize::from(passage.to);
        // Nothing is in flight there, or the peer would have asked what arrived first.
        self.close_inlet(index, at);
        let opened = self.inlet_pairs(index, passage, theirs);
        let session = self.session(index)?;
        let inlet = session.inlets.get_mut(at)?;
        *inlet = Inlet { epoch: passage.epoch, ..Inlet::default() };
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
        let mut pairs = heapless::Vec::<QueuePair, LANES>::new();
        for theirs in theirs {
            let depths = Depths { sends: 1, receives: 0, inline: 0 };
            let pair = QueuePair::reliable(&port.domain, &port.completed, &port.shared, depths)?;
            self.resolver.connect(self.now, (to.into(), &pair), (&there, theirs))?;
            let _ = pairs.push(pair);
        }
        for (pair, lane) in pairs.iter().zip(0..) {
            let role = Role::Inlet { from, lane };
            port.owners.set(pair.number(), Some(Owner { session: index, role }));
        }
        pairs.into_array().map_err(|_| VerbsError::Unreachable)
    }

    // ---- lines ----

    /// The line of this NIC does not work: it is cut. Notes go over another; without one the session is over.
    pub(super) fn break_line(&mut self, index: u16, nic: NicIndex) {
        let now = self.now;
        self.urgent = true;
        let Some(session) = self.session(index).filter(|session| !session.is_leaving()) else {
            return;
        };
        let Some(line) = session.lines.get_mut(usize::from(nic)) else { return };
        if line.state.fail(now) {
            line.pair.iter().for_each(|pair| must(pair.cut()));
        }
        if !session.courier.is_open(nic) {
            return;
        }
        tracing::warn!(peer = %session.peer, nic, "a line broke");
        if !session.courier.break_line(nic) {
            session.life.leave(now, Notice::Untold, Some(DownReason::Disconnected));
        }
    }

    /// Something has got through on the line of this NIC.
    pub(super) fn prove_line(&mut self, index: u16, nic: NicIndex) {
        let now = self.now;
        let usable = self.ports.get(usize::from(nic)).is_some_and(super::Nic::is_usable);
        let Some(session) = self.session(index).filter(|session| !session.is_leaving()) else {
            return;
        };
        session.pulse.hear(nic);
        if usable {
            session.doubt(bit(nic), false);
        }
        let line = session.lines.get_mut(usize::from(nic));
        if line.is_some_and(|line| line.state.prove(now)) {
            tracing::info!(peer = %session.peer, nic, "a line is back");
            session.courier.open_line(nic);
        }
    }

    /// Has lines made anew that have rested, or that the peer asks for.
    fn open_lines(&mut self, index: u16) {
        let lines = self.session(index).map_or(0, |session| session.lines.len());
        for at in 0..lines {
            while self.mend_line(index, nic_at(at)) {}
        }
    }

    /// Does what is next for a line; whether there may be more.
    fn mend_line(&mut self, index: u16, nic: NicIndex) -> bool {
        let (now, at) = (self.now, usize::from(nic));
        let usable = self.ports.get(at).is_some_and(super::Nic::is_usable);
        let session = self.session(index).filter(|it| it.life.is_open());
        let line = session.and_then(|session| session.lines.get(at));
        let waits = line.is_some_and(|line| line.state.needs_address())
            && self.reach(index, nic, nic) == Reach::Waits;
        let Some(session) = self.session(index).filter(|it| it.life.is_open()) else {
            return false;
        };
        let is_whole = session.courier.is_open(nic);
        let Some(line) = session.lines.get_mut(at) else { return false };
        match line.state.next(now, usable, is_whole, !waits) {
            line::Step::Nothing => false,
            line::Step::Open { epoch } => {
                let made = self.line_pair(index, at, None);
                match self.session(index).zip(made.ok()) {
                    Some((session, queue)) => {
                        session.says.link.push((Passage { from: nic, to: nic, epoch }, queue));
                    }
                    None => self.break_line(index, nic),
                }
                false
            }
            line::Step::Try(theirs) => {
                if self.try_line(index, nic, theirs).is_none() {
                    self.break_line(index, nic);
                }
                false
            }
            line::Step::Cut => {
                self.break_line(index, nic);
                true
            }
            line::Step::Answer { epoch, theirs } => {
                let made = theirs.ok_or(()).and_then(|it| self.line_pair(index, at, Some(it)));
                if made.is_err() {
                    self.break_line(index, nic);
                }
                if let Some(session) = self.session(index) {
                    let passage = Passage { from: nic, to: nic, epoch };
                    session.says.linked.push((passage, made.unwrap_or_default()));
                }
                false
            }
        }
    }

    /// Makes our end of a line anew, connected if the other is given.
    fn line_pair(&mut self, index: u16, at: usize, theirs: Option<Queue>) -> Result<Queue, ()> {
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let (session, port) = session.zip(self.ports.get_mut(at)).ok_or(())?;
        let line = session.lines.get_mut(at).ok_or(())?;
        if let Some(old) = line.pair.take() {
            port.owners.set(old.number(), None);
        }
        let there = session.ports.get(at).ok_or(())?;
        let pair = port.line().and_then(|pair| {
            if let Some(theirs) = theirs {
                self.resolver.connect(self.now, (at, &pair), (there, theirs))?;
            }
            Ok(pair)
        });
        let pair = pair.map_err(|error| {
            tracing::warn!(peer = %session.peer, at, %error, "a line could not be opened");
        })?;
        port.owners.set(pair.number(), Some(Owner { session: index, role: Role::Line }));
        line.is_drained = false;
        let queue = pair.queue();
        line.pair = Some(pair);
        Ok(queue)
    }

    /// The other end of a line receives: a word is sent over ours. `None` if that cannot be.
    fn try_line(&mut self, index: u16, nic: NicIndex, theirs: Queue) -> Option<()> {
        let at = usize::from(nic);
        let session = self.sessions.get_mut(usize::from(index))?.as_deref_mut()?;
        let there = session.ports.get(at)?;
        let id = Done::Note { session: index, token: tag_of(session.token) }.encode();
        let (word, len) = session.courier.word().encode();
        let line = session.lines.get_mut(at)?;
        let pair = line.pair.as_ref().filter(|_| theirs.is_some())?;
        self.resolver.connect(self.now, (at, pair), (there, theirs)).ok()?;
        pair.send_inline(id, word.get(..len)?).ok()?;
        line.state.post();
        Some(())
    }

    // ---- sessions ----

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

    /// A NIC is lost for good, and with it all paths and lines from there.
    pub(super) fn lose_nic(&mut self, nic: NicIndex) {
        let port = self.ports.get_mut(usize::from(nic)).filter(|port| !port.is_lost);
        let Some(port) = port else { return };
        port.device().lose();
        (port.is_lost, self.urgent) = (true, true);
        tracing::error!(nic, "a NIC is lost");
        self.tidings.push(Tiding::Nic(nic, false));
        for index in self.live.clone() {
            let theirs = self.session(index).map_or(0, |session| session.ports.len());
            (0..theirs).for_each(|remote| self.break_path(index, nic, nic_at(remote)));
            self.break_line(index, nic);
        }
    }

    /// Tells peers which regions they are not to write to any more.
    fn tell_withdrawals(&mut self) {
        let sessions = self.sessions.iter_mut().flatten();
        let says = sessions.map(|it| (it.token, &mut it.says.withdraw));
        self.memory.regions.look(|ledger| ledger.tell(says));
    }

    /// Does what is due, and ends what can end.
    pub(super) fn tend<S: Sink>(&mut self, sink: &mut S) {
        let mut at = 0;
        // Not an iterator: a session that ends leaves the list.
        while let Some(&index) = self.live.get(at) {
            self.release(index);
            self.connect_paths(index);
            self.open_lines(index);
            self.open_outlets(index);
            self.greet(index);
            self.speak(index);
            self.probe(index);
            if self.part_with(index) {
                self.finish(index, sink);
            } else {
                at += 1;
            }
        }
    }

    /// Repeats our answer to whoever has called, until it is heard.
    fn greet(&mut self, index: u16) {
        let now = self.now;
        let Some(session) =
            self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut)
        else {
            return;
        };
        if session.life.greet(now, session.says.accept) {
            let (nonce, proof) = (session.nonce, session.accept_proof);
            let message = Message::Accept { nonce, proof, claim: &session.accept };
            // If there is no room, it is repeated.
            let to = (&session.door, Asker::Us);
            let sent = self.door.send(&mut self.resolver, to, &message, now);
            session.says.accept = sent == Sent::Waits;
        }
    }

    /// Sees whether a peer's devices answer, if nothing else has shown it since the last time.
    fn probe(&mut self, index: u16) {
        let now = self.now;
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let Some(session) = session.filter(|session| session.life.is_open()) else { return };
        let Some(silent) = session.pulse.look(now) else { return };
        let id = Done::Note { session: index, token: tag_of(session.token) }.encode();
        let (to, keys) = (session.mailbox.base, session.mailbox.keys);
        let mut broken = 0;
        for ((nic, line), port) in (0..).zip(&mut session.lines).zip(&self.ports) {
            let open = silent & bit(nic) != 0
                && session.courier.is_open(nic)
                && port.is_usable()
                && line.state.posted() == 0;
            let Some(pair) = line.pair.as_ref().filter(|_| open) else { continue };
            let key = keys.get(nic).map_or(0, device_key);
            if pair.probe(id, to, key).is_ok() {
                line.state.post();
            } else {
                broken |= bit(nic);
            }
        }
        for nic in (0..8).filter(|&nic| broken & bit(nic) != 0) {
            self.break_line(index, nic);
        }
    }

    /// When something is to be done for an open session, at the earliest, even if nothing happens.
    pub(super) fn open_deadline(&self, session: &Session) -> Time {
        let theirs = session.ports.len().max(1);
        let usable = |nic: usize| self.ports.get(nic).is_some_and(super::Nic::is_usable);
        let outlets = session.outlets.iter().enumerate();
        let outlets = outlets.filter(|(at, _)| usable(at / theirs)).map(|(_, it)| it.way.due());
        let lines = session.lines.iter().enumerate();
        let lines = lines.map(|(at, line)| line.state.due(usable(at)));
        outlets.chain(lines).fold(session.pulse.due(), Time::min)
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
    fn part_with(&mut self, index: u16) -> bool {
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
    fn finish<S: Sink>(&mut self, index: u16, sink: &mut S) {
        // What the queue pairs have taken from the shared queues is to be posted there again.
        for at in 0..self.ports.len() {
            self.poll_nic(at, LAST_ROUNDS, sink);
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

    /// Whether a piece is in flight to a region of the peer's.
    fn is_in_flight_to(&mut self, index: u16, tenant: Tenant) -> bool {
        let Some(session) = self.sessions.get(usize::from(index)).and_then(Option::as_deref) else {
            return false;
        };
        let lanes = &mut self.lanes;
        session.outlets.iter().flat_map(Outlet::lanes).any(|lane| {
            let flights = lanes.get(lane).map(|lane| lane.flights.iter());
            flights.into_iter().flatten().any(|work| {
                let other = Tenant::of(work.dst_key).filter(|_| work.len > 0);
                other.is_some_and(|it| tenant.covers(it))
            })
        })
    }

    /// Confirms withdrawals to whose regions nothing is in flight any more.
    fn release(&mut self, index: u16) {
        let waiting = match self.session(index) {
            Some(session) if !session.releasing.is_empty() => {
                std::mem::take(&mut session.releasing)
            }
            _ => return,
        };
        let (busy, free): (Vec<_>, Vec<_>) =
            waiting.into_iter().partition(|&tenant| self.is_in_flight_to(index, tenant));
        if let Some(session) = self.session(index) {
            session.releasing = busy;
            session.says.withdrawn.extend(free);
        }
    }

    /// Says what is to be said, and posts letters, as far as there is room.
    fn speak(&mut self, index: u16) {
        let Some(session) = self.session(index) else { return };
        match session.life.says() {
            Says::Nothing => return,
            Says::Bye => {
                if !std::mem::replace(&mut session.says.bye, true) {
                    session.courier.say_last(Note::Bye);
                }
            }
            Says::All => session.say_all(),
        }
        while let Some(broken) = self.post_letters(index) {
            self.break_line(index, broken);
        }
    }

    /// Posts letters; a line on which one could not be posted.
    fn post_letters(&mut self, index: u16) -> Option<NicIndex> {
        let session = self.sessions.get_mut(usize::from(index))?.as_deref_mut()?;
        let id = Done::Note { session: index, token: tag_of(session.token) }.encode();
        while let Some((nic, letter)) = session.courier.next() {
            let line = session.lines.get_mut(usize::from(nic))?;
            // While its port is down it waits, if there is no other.
            if line.state.posted() >= NOTES || !self.ports.get(usize::from(nic))?.is_usable() {
                return None;
            }
            let (bytes, len) = letter.encode();
            let bytes = bytes.get(..len)?;
            if line.pair.as_ref()?.send_inline(id, bytes).is_err() {
                return (!session.is_leaving()).then_some(nic);
            }
            line.state.post();
            session.courier.post();
        }
        None
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
                self.poll_nic(at, 1, &mut Deaf);
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

/// Hears nothing: the engine is not there any more.
struct Deaf;

impl Sink for Deaf {
    fn work_done(&mut self, _: NicIndex, _: Token, _: Result<(), WorkError>) {}

    fn immediate(&mut self, _: NicIndex, _: PeerId, _: u32) {}

    fn incoming(&mut self, _: &Hello) -> Result<(PeerId, Hello), Refusal> {
        Err(Refusal::Stale)
    }

    fn connected(&mut self, _: PeerId, _: &Hello) {}

    fn disconnected(&mut self, _: PeerId, _: DownReason) {}

    fn nic_changed(&mut self, _: NicIndex, _: bool) {}

    fn path_broken(&mut self, _: PeerId, _: Path) {}

    fn path_restored(&mut self, _: PeerId, _: Path) {}

    fn undelivered(&mut self, _: &WorkRequest) {}

    fn page_run(&self, _: &WorkRequest, _: &mut [u32], _: &mut [u32]) -> Option<RunLayout> {
        None
    }
}
