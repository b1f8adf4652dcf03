//! What is to be done beside the way of data: hearing the door and the notes, opening paths, ending sessions.
//!
//! # Invariants
//!
//! - A session is over only when each of its pieces is reported, and then none of its queue pairs is left. What is
//!   told of its end comes after that.
//! - A path is posted on only when the receiver has said that its ends receive.
//! - Of a leaving session nothing is reported but its pieces, as failed, and its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use immwire_core::datagram::Message;
use immwire_core::group::{Token, WorkError, WorkRequest};
use immwire_core::id::{NicIndex, PeerId};
use immwire_core::note::{LANES, Note, Passage, Queues};
use immwire_core::parting::Step;
use immwire_core::peer::DownReason;
use immwire_core::port::PACKET_MAX;
use immwire_core::tenant::{Tenant, device_key};
use immwire_core::wire::{Hello, Refusal};

use super::device::{Depths, Event, QueuePair};
use super::door::Heard;
use super::lane::{Done, Lane, LaneId, Owner, Role};
use super::session::{Inlet, Outlet, Session, State};
use super::{INLINE_BYTES, NOTES, QUEUE_DEPTH, UPKEEP_EVERY, VerbsError, VerbsProvider, tag_of};
use crate::provider::{Path, Sink};

/// Messages heard in one go.
const MESSAGES_MAX: usize = 64;
/// How long a peer may take to hear that we leave.
const GRACE: Duration = Duration::from_millis(20);
/// The same for one that has not said that it knows of the session: until it does, its queue pair hears nothing, and the
/// device repeats what is said.
const GREETED_GRACE: Duration = Duration::from_millis(500);
/// How often it is seen whether a peer's device answers.
const PROBE: Duration = Duration::from_secs(1);
/// How long leaving may take at the end.
const FAREWELL: Duration = Duration::from_millis(20);
/// Batches of completions read before a queue pair is destroyed.
const LAST_ROUNDS: usize = 64;

impl VerbsProvider {
    /// Everything that is not on the way of data. Returns whether there was anything.
    #[cold]
    pub(super) fn upkeep<S: Sink>(&mut self, sink: &mut S) -> bool {
        if self.urgent {
            self.urgent = false;
            let mut word = [0; 8];
            // Empty is as good: they only wake.
            let _ = rustix::io::read(self.memory.wake_fd(), &mut word);
            let _ = rustix::io::read(&self.timer, &mut word);
        }
        let leaving = self.sessions.iter().flatten().any(|session| session.is_leaving());
        if leaving || std::mem::take(&mut self.woken) || self.polls.is_multiple_of(UPKEEP_EVERY) {
            self.hear_devices();
        }
        let heard = self.hear_door(sink);
        self.repeat_calls(sink);
        self.tell_withdrawals();
        self.tend(sink);
        heard
    }

    // ---- hearing ----

    /// Looks for what devices tell by themselves.
    fn hear_devices(&mut self) {
        for at in 0..self.ports.len() {
            while let Some(event) = self.ports.get(at).and_then(|port| port.device().event()) {
                match event {
                    Event::QueuePairFailed { number } => {
                        if let Some(session) = self.owner(at, number) {
                            session.leave_after_failure();
                            self.urgent = true;
                        }
                    }
                    Event::Drained { number } => {
                        if let Some(session) = self.owner(at, number) {
                            session.undrained = session.undrained.saturating_sub(1);
                            self.urgent |= session.is_leaving();
                        }
                    }
                    Event::DeviceFailed { kind } => {
                        tracing::error!(kind, "a device failed");
                        self.lose_nic(NicIndex::try_from(at).unwrap_or(NicIndex::MAX));
                    }
                    Event::Other { kind } => tracing::debug!(kind, "an event of a device's"),
                }
            }
        }
    }

    /// Whose a queue pair is that the device of this NIC has told of; several NICs may share one.
    fn owner(&mut self, at: usize, number: u32) -> Option<&mut Session> {
        let device = Arc::as_ptr(self.ports.get(at)?.device());
        let same = self.ports.iter().filter(|port| Arc::as_ptr(port.device()) == device);
        let owner = same.filter_map(|port| port.owners.get(number)).next()?;
        self.session(owner.session)
    }

    fn hear_door<S: Sink>(&mut self, sink: &mut S) -> bool {
        let mut bytes = [0; PACKET_MAX];
        for round in 0..MESSAGES_MAX {
            match self.door.read(&mut bytes) {
                None => return round > 0,
                Some(Heard::Message { len, from }) => {
                    let message = Message::decode(bytes.get(..len).unwrap_or(&[])).ok();
                    let understood =
                        message.and_then(|message| self.hear_handshake(&message, &from, sink));
                    if understood.is_none() {
                        self.stats.ignored += 1;
                    }
                }
                Some(Heard::Broken) => {
                    self.lose_nic(0);
                    return true;
                }
            }
        }
        self.urgent = true;
        true
    }

    /// What a peer says in its session. What makes no sense ends it.
    pub(super) fn hear_note(&mut self, index: u16, note: Note) {
        self.urgent = true;
        let now = self.now;
        let Some(session) = self.session(index) else { return };
        if matches!(session.state, State::Greeting { .. }) {
            session.state = State::Open;
        }
        let understood = match note {
            Note::Ready => Some(()),
            Note::Bye => {
                session.leave(now.after(GRACE), Some(DownReason::Disconnected));
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
                self.memory.with_ledger(|ledger| ledger.withdrawn(token, tenant));
                Some(())
            }
            Note::Connect(passage, theirs) => self.open_inlet(index, passage, theirs),
            Note::Connected(passage, theirs) => self.finish_outlet(index, passage, theirs),
        };
        if understood.is_none() {
            self.stats.ignored += 1;
            if let Some(session) = self.session(index) {
                session.leave(now.after(GRACE), Some(DownReason::Protocol));
            }
        }
    }

    // ---- paths ----

    /// Opens our ends of what was wanted since, and has the peer asked for its own.
    fn open_outlets(&mut self, index: u16) {
        let Some(session) = self.session(index).filter(|it| it.state == State::Open) else {
            return;
        };
        let theirs = session.ports.len();
        for at in 0..session.outlets.len() {
            let Some(session) = self.session(index) else { return };
            if session.outlets.get(at) != Some(&Outlet::Wanted) {
                continue;
            }
            let (nic, remote) = (at / theirs, at % theirs);
            if let Err(error) = self.open_outlet(index, at, nic, remote) {
                tracing::warn!(index, %error, "a path could not be opened");
                let patience = self.now.after(GRACE);
                if let Some(session) = self.session(index) {
                    session.leave(patience, Some(DownReason::Disconnected));
                }
                return;
            }
        }
    }

    fn open_outlet(
        &mut self,
        index: u16,
        at: usize,
        nic: usize,
        remote: usize,
    ) -> Result<(), VerbsError> {
        let (Ok(from), Ok(to)) = (NicIndex::try_from(nic), NicIndex::try_from(remote)) else {
            return Err(VerbsError::Unreachable);
        };
        let inlines = [0, INLINE_BYTES];
        let (mut lanes, mut queues) = (heapless::Vec::<LaneId, LANES>::new(), Queues::default());
        for (inline, queue) in inlines.into_iter().zip(&mut queues) {
            let port = self.ports.get_mut(nic).ok_or(VerbsError::Unreachable)?;
            let depths = Depths { sends: QUEUE_DEPTH.into(), receives: 0, inline };
            let pair = QueuePair::reliable(&port.domain, &port.completed, &port.shared, depths)?;
            port.owners.set(pair.number(), Some(Owner { session: index, role: Role::Outlet }));
            *queue = pair.queue();
            let lane = Lane::new(pair, from, index, QUEUE_DEPTH.into());
            let _ = lanes.push(self.lanes.open(lane).ok_or(VerbsError::Unreachable)?);
        }
        let lanes = lanes.into_array().map_err(|_| VerbsError::Unreachable)?;
        if let Some(session) = self.session(index)
            && let Some(outlet) = session.outlets.get_mut(at)
        {
            *outlet = Outlet::Asked { lanes };
            session.undrained += LANES;
            session.says.connect.push((Passage { from, to, epoch: 1 }, queues));
        }
        Ok(())
    }

    /// The peer's ends receive: ours send. `None` if that was not asked for.
    fn finish_outlet(&mut self, index: u16, passage: Passage, theirs: Queues) -> Option<()> {
        let options = self.config.options.clone();
        let session = self.sessions.get_mut(usize::from(index))?.as_deref_mut()?;
        let at = session.outlet(passage.from, passage.to)?;
        let outlet = session.outlets.get_mut(at)?;
        let Outlet::Asked { lanes } = *outlet else { return None };
        let there = session.ports.get(usize::from(passage.to))?;
        let here = self.ports.get(usize::from(passage.from))?.device().facts.port;
        let route = here.route(there)?;
        for (lane, theirs) in lanes.into_iter().zip(theirs) {
            if let Err(error) = self.lanes.get(lane)?.pair.connect(&route, theirs, &options) {
                tracing::warn!(peer = %session.peer, %error, "a path could not be opened");
                return None;
            }
        }
        *outlet = Outlet::Open { lanes };
        Some(())
    }

    /// The peer wants to write over a path: opens our ends. `None` if that makes no sense, or cannot be done.
    fn open_inlet(&mut self, index: u16, passage: Passage, theirs: Queues) -> Option<()> {
        let nics = self.ports.len();
        let session = self.sessions.get_mut(usize::from(index))?.as_deref_mut()?;
        let there = session.ports.get(usize::from(passage.from))?;
        let port = self.ports.get_mut(usize::from(passage.to))?;
        let at = usize::from(passage.from) * nics + usize::from(passage.to);
        let inlet = session.inlets.get_mut(at).filter(|inlet| inlet.is_none())?;
        let route = port.device().facts.port.route(there)?;
        let mut pairs = heapless::Vec::<QueuePair, LANES>::new();
        for theirs in theirs {
            let depths = Depths { sends: 1, receives: 0, inline: 0 };
            let pair = QueuePair::reliable(&port.domain, &port.completed, &port.shared, depths);
            let connected = pair.and_then(|pair| {
                pair.connect(&route, theirs, &self.config.options)?;
                Ok(pair)
            });
            match connected {
                Ok(pair) => pairs.push(pair).ok()?,
                Err(error) => {
                    tracing::warn!(peer = %session.peer, %error, "a path could not be opened");
                    return None;
                }
            }
        }
        let pairs = pairs.into_array().ok()?;
        let queues = pairs.each_ref().map(QueuePair::queue);
        for pair in &pairs {
            let owner = Owner { session: index, role: Role::Inlet };
            port.owners.set(pair.number(), Some(owner));
        }
        *inlet = Some(Inlet { pairs });
        session.undrained += LANES;
        session.says.connected.push((passage, queues));
        Some(())
    }

    // ---- sessions ----

    /// The engine wants to be rid of a peer.
    pub(super) fn part<S: Sink>(&mut self, peer: PeerId, reason: Option<DownReason>, sink: &mut S) {
        let now = self.now;
        let seat = self.seats.get(usize::from(peer.index)).copied().flatten();
        let session = seat.and_then(|index| self.session(index));
        if let Some(session) = session.filter(|session| session.peer == peer) {
            let greeting = matches!(session.state, State::Greeting { .. });
            session.leave(now.after(if greeting { GREETED_GRACE } else { GRACE }), reason);
            self.tend(sink);
        }
    }

    /// Something failed that concerns this peer alone: it is given up.
    pub(super) fn stumble(&mut self, index: u16, tag: u32) {
        let patience = self.now.after(GRACE);
        if let Some(session) = self.session(index).filter(|it| tag_of(it.token) == tag) {
            session.leave(patience, Some(DownReason::Disconnected));
        }
        self.urgent = true;
    }

    /// A NIC is lost, and with it all sessions.
    pub(super) fn lose_nic(&mut self, nic: NicIndex) {
        let patience = self.now;
        let mut lost = 0;
        for session in self.sessions.iter_mut().flatten().filter(|it| !it.is_leaving()) {
            session.leave(patience, Some(DownReason::Disconnected));
            lost += 1;
        }
        if lost > 0 {
            tracing::error!(nic, lost, "a NIC is lost, and its peers");
            self.urgent = true;
        }
    }

    /// Tells peers which regions they are not to write to any more.
    fn tell_withdrawals(&mut self) {
        let sessions = &mut self.sessions;
        self.memory.with_ledger(|ledger| {
            for withdrawal in ledger.withdrawals.iter_mut().filter(|it| !it.told) {
                withdrawal.told = true;
                for session in sessions.iter_mut().flatten() {
                    let waits = withdrawal.waiting.iter().any(|&(token, _)| token == session.token);
                    if waits && !session.says.withdraw.contains(&withdrawal.tenant) {
                        session.says.withdraw.push(withdrawal.tenant);
                    }
                }
            }
        });
    }

    /// Does what is due, and ends what can end.
    pub(super) fn tend<S: Sink>(&mut self, sink: &mut S) {
        let mut at = 0;
        // Not an iterator: a session that ends leaves the list.
        while let Some(&index) = self.live.get(at) {
            self.release(index);
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
        let State::Greeting { until, retry } = &mut session.state else { return };
        if now >= *until {
            session.leave(now, Some(DownReason::NeverAnswered));
            return;
        }
        if retry.is_due(now) || std::mem::take(&mut session.says.accept) {
            let (nonce, proof) = (session.nonce, session.accept_proof);
            let message = Message::Accept { nonce, proof, claim: &session.accept };
            // If there is no room, it is repeated.
            self.door.send(&session.door, &message, self.now, &self.config.options);
        }
    }

    /// Sees whether a peer's device answers, if nothing else has shown it since the last time.
    fn probe(&mut self, index: u16) {
        let now = self.now;
        let Some(session) = self.session(index).filter(|session| session.state == State::Open)
        else {
            return;
        };
        if now < session.probe {
            return;
        }
        session.probe = now.after(PROBE);
        if std::mem::take(&mut session.is_heard) {
            return;
        }
        let id = Done::Note { session: index, token: tag_of(session.token) }.encode();
        let (mailbox, to) = (&session.mailbox, session.mailbox.base);
        let key = mailbox.keys.get(0).map_or(0, device_key);
        if session.notes == 0 && session.control.probe(id, to, key).is_ok() {
            session.notes += 1;
        }
    }

    /// Does what is next in ending a session that ends; whether it is over.
    fn part_with(&mut self, index: u16) -> bool {
        let now = self.now;
        loop {
            let Some(session) = self.session(index) else { return true };
            let standing = session.standing();
            let State::Leaving { parting, .. } = &mut session.state else { return false };
            match parting.step(now, standing) {
                Step::CutPaths => {
                    self.cut_paths(index);
                    self.speak(index);
                }
                Step::CutNotes => must(session.control.cut()),
                Step::Wait(_) => return false,
                Step::Over => return true,
            }
        }
    }

    /// Cuts all queue pairs of a session but the one for notes.
    fn cut_paths(&mut self, index: u16) {
        let session = self.sessions.get(usize::from(index)).and_then(Option::as_deref);
        let Some(session) = session else { return };
        for lane in session.outlets.iter().flat_map(Outlet::lanes) {
            if let Some(lane) = self.lanes.get(lane) {
                must(lane.pair.cut());
            }
        }
        let inlets = session.inlets.iter().flatten();
        inlets.flat_map(|inlet| &inlet.pairs).for_each(|pair| must(pair.cut()));
    }

    /// A session has ended.
    fn finish<S: Sink>(&mut self, index: u16, sink: &mut S) {
        // What the queue pairs have taken from the shared queues is to be posted there again.
        for at in 0..self.ports.len() {
            self.poll_nic(at, LAST_ROUNDS, sink);
        }
        let slot = self.sessions.get_mut(usize::from(index));
        let Some(session) = slot.and_then(Option::take) else { return };
        self.live.retain(|&live| live != index);
        let nics = self.ports.len();
        for (at, inlet) in session.inlets.iter().enumerate() {
            if let (Some(inlet), Some(port)) = (inlet, self.ports.get_mut(at % nics)) {
                inlet.pairs.iter().for_each(|pair| port.owners.set(pair.number(), None));
            }
        }
        if let Some(port) = self.ports.first_mut() {
            port.owners.set(session.control.number(), None);
        }
        for id in session.outlets.iter().flat_map(Outlet::lanes) {
            let Some(lane) = self.lanes.close(id) else { continue };
            let Lane { pair, nic, flights, .. } = *lane;
            if let Some(port) = self.ports.get_mut(usize::from(nic)) {
                port.owners.set(pair.number(), None);
                let left = u16::try_from(flights.len()).unwrap_or(u16::MAX);
                port.outstanding = port.outstanding.saturating_sub(left);
            }
            drop(pair);
            for work in flights {
                sink.work_done(nic, work.token, Err(WorkError::Flushed));
            }
        }
        let Session { peer, token, state, .. } = *session;
        if let Some(seat) = self.seats.get_mut(usize::from(peer.index))
            && *seat == Some(index)
        {
            *seat = None;
        }
        self.memory.with_ledger(|ledger| ledger.close(token));
        if let State::Leaving { reason: Some(reason), .. } = state {
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
                other.is_some_and(|it| it.slot() == tenant.slot() && it.serial() <= tenant.serial())
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

    /// Says what is to be said, as far as there is room.
    fn speak(&mut self, index: u16) {
        let Some(session) =
            self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut)
        else {
            return;
        };
        let id = Done::Note { session: index, token: tag_of(session.token) }.encode();
        let (control, notes) = (&session.control, &mut session.notes);
        let mut say = |note: Note| {
            let (bytes, len) = note.encode();
            let bytes = bytes.get(..len).unwrap_or(&[]);
            // One that could not be posted is not lost: its queue pair has failed, and the session with it.
            let said = *notes < NOTES && control.send_inline(id, bytes).is_ok();
            *notes += u16::from(said);
            said
        };
        let says = &mut session.says;
        match session.state {
            State::Greeting { .. } => return,
            State::Leaving { parting, .. } if !parting.can_say() => return,
            State::Leaving { .. } => {
                // Of all that, only that it ends is of interest now.
                if !std::mem::replace(&mut says.bye, true) {
                    say(Note::Bye);
                }
                return;
            }
            State::Open => {}
        }
        if says.ready {
            if !say(Note::Ready) {
                return;
            }
            says.ready = false;
        }
        for (nic, takings) in session.takings.iter_mut().enumerate() {
            let Some(due) = says.taken.get_mut(nic).filter(|due| **due) else { continue };
            let nic = NicIndex::try_from(nic).unwrap_or(NicIndex::MAX);
            let mut reported = *takings;
            if !say(Note::Taken { nic, count: reported.report() }) {
                return;
            }
            *takings = reported;
            *due = false;
        }
        // Before the peer may write.
        while let Some(&tenant) = says.withdraw.last() {
            if !say(Note::Withdraw(tenant)) {
                return;
            }
            says.withdraw.pop();
        }
        while let Some(&(passage, queues)) = says.connect.last() {
            if !say(Note::Connect(passage, queues)) {
                return;
            }
            says.connect.pop();
        }
        while let Some(&(passage, queues)) = says.connected.last() {
            if !say(Note::Connected(passage, queues)) {
                return;
            }
            says.connected.pop();
        }
        while let Some(&tenant) = says.withdrawn.last() {
            if !say(Note::Withdrawn(tenant)) {
                return;
            }
            says.withdrawn.pop();
        }
    }

    /// Tells all peers that it is over, and gives that a moment to arrive.
    pub(super) fn farewell(&mut self) {
        self.hang_up_all();
        let now = self.now;
        for at in 0..self.live.len() {
            let Some(&index) = self.live.get(at) else { break };
            if let Some(session) = self.session(index) {
                session.leave(now.after(GRACE), None);
            }
            self.part_with(index);
        }
        let until = Instant::now() + FAREWELL;
        let heard = |session: &Option<Box<Session>>| {
            session.as_ref().is_none_or(|session| session.notes == 0)
        };
        while !self.sessions.iter().all(heard) && Instant::now() < until {
            self.poll_nic(0, 1, &mut Deaf);
            std::thread::yield_now();
        }
    }
}

/// One that could not be cut is destroyed in the end.
fn must(cut: Result<(), VerbsError>) {
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
}
