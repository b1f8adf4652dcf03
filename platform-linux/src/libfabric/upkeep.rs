//! What is to be done beside the way of data: hearing the door, ending sessions, replacing endpoints.
//!
//! How a replacement goes is decided by `immwire_core::recycle`; here it is carried out.
//!
//! # Invariants
//!
//! - A session is over only when none of its pieces is in flight. Then its peer is told, and what its peer
//!   may still have under way is remembered, until that is known to be over: a ghost (`withdrawal`).
//! - Pieces are reported as flushed after the endpoint that they were on is closed, never before.

use std::time::Duration;

use immwire_core::datagram::{Addresses, DATAGRAM_MAX, Malformed, Message, Say};
use immwire_core::group::WorkError;
use immwire_core::id::{NicIndex, Time};
use immwire_core::opening::{Openings, Pairs, Turns};
use immwire_core::peer::DownReason;
use immwire_core::recycle::{Verdict, Which};

use super::door::{Heard, To};
use super::fabric::Failure;
use super::session::{Retired, Routes, Session, State, sent_by};
use super::{Lane, LibfabricError, LibfabricProvider, Posted, Purpose};
use crate::provider::Sink;

/// Messages heard in one go.
const MESSAGES_MAX: usize = 64;
/// How long what is in flight to a peer that has failed may take to fail by itself.
const GRACE: Duration = Duration::from_millis(20);
/// How long what a peer had sent before it left, and was through with, may take to arrive.
const PARTING: Duration = Duration::from_secs(1);
/// How long the other peers may take to move to new endpoints, while we look. Milliseconds if they run; but one whose
/// machine lets it wait for a moment is not to be lost for another that is got rid of.
const MOVE_PATIENCE: Duration = Duration::from_secs(2);
/// How long libfabric may refuse everything for a peer between two NICs that nothing is in flight between: `tcp` says that it is busy
/// while it connects, and also when nobody is there to connect to (`immwire_core::uptake`).
const STUCK: Duration = Duration::from_secs(2);
/// The same, where nothing has got there by these NICs yet: connecting takes longer than going on.
const STUCK_AT_FIRST: Duration = Duration::from_secs(5);
/// When new endpoints are tried again that could not be opened: it may be descriptors that are short, of which each try takes some.
const REOPEN_AFTER: Duration = Duration::from_millis(50);
/// How long leaving may take at the end.
const FAREWELL: Duration = Duration::from_millis(20);

impl LibfabricProvider {
    /// Everything that is not on the way of data. Returns whether there was anything.
    #[cold]
    pub(super) fn upkeep<S: Sink>(&mut self, sink: &mut S) -> bool {
        if self.urgent {
            self.urgent = false;
            let mut word = [0; 8];
            // Empty is as good: they only wake.
            let _ = rustix::io::read(self.memory.regions.wake_fd(), &mut word);
            let _ = rustix::io::read(&self.timer, &mut word);
        }
        self.watch.awake(self.now);
        self.recycle.look(self.now);
        let heard = self.hear(sink);
        self.repeat_calls(sink);
        self.tell_withdrawals();
        self.tend(sink);
        heard
    }

    fn hear<S: Sink>(&mut self, sink: &mut S) -> bool {
        let (mut bytes, now) = ([0; DATAGRAM_MAX], self.now);
        for round in 0..MESSAGES_MAX {
            let (sessions, handshakes) = (&mut self.sessions, &mut self.handshakes);
            let ended = |index: u16, token: u64, is_delivered: bool| {
                let session = sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
                match session.filter(|session| session.token == token) {
                    Some(session) => session.under_way = session.under_way.saturating_sub(1),
                    None => handshakes.ended(token, is_delivered),
                }
            };
            let Some(heard) = self.door.read(&mut bytes, now, ended) else { return round > 0 };
            match heard {
                Heard::Message { len } => {
                    let bytes = bytes.get(..len).unwrap_or(&[]);
                    let understood = match Message::decode(bytes) {
                        Ok(Message::Session { token, say }) => self.hear_say(token, say),
                        Ok(message) => self.hear_handshake(&message, sink),
                        Err(Malformed::Version { .. }) => self.hear_other_version(bytes, sink),
                        Err(Malformed::Bytes) => None,
                    };
                    if understood.is_none() {
                        self.stats.ignored += 1;
                    }
                }
                Heard::Undelivered { index, token, code, untaken } => {
                    if self.session(index).is_some_and(|session| session.token == token) {
                        self.stumble(
                            index,
                            &format_args!("a message to its door ended with {code}"),
                        );
                    } else {
                        self.call_undelivered(token, untaken, sink);
                    }
                }
                Heard::Broken { code } => {
                    self.lose_everybody(Failure { code, detail: 0 });
                    self.fail_calls(sink);
                    return true;
                }
            }
        }
        self.urgent = true;
        true
    }

    /// What a peer says in its session; `None` if that makes no sense.
    fn hear_say(&mut self, token: u64, say: Say) -> Option<()> {
        let now = self.now;
        let current = |turn| self.recycle.is_current(turn);
        let is_current = matches!(&say, Say::Moved { turn, .. } if current(*turn));
        let recycle = self.recycle;
        // Nobody moves to where another is.
        let is_anothers = match &say {
            Say::Move { ports, .. } if !self.wide => {
                let mut others = self.sessions.iter().flatten().filter(|it| it.token != token);
                others.any(|it| it.has_any_of(ports))
            }
            _ => false,
        };
        self.urgent = true;
        let Some(session) = self.session_of_token(token) else {
            // A session that ended before its peer was through.
            let Say::Bye { quiet: true, .. } = say else { return None };
            let laid = self.memory.regions.with_ledger(|ledger| ledger.lay(&[token]));
            return laid.then_some(());
        };
        if matches!(session.state, State::Greeting { .. }) {
            session.state = State::Open;
        }
        match say {
            Say::Ready { gone } => {
                if !session.gone.expect(gone) {
                    session.leave(now.after(GRACE), Some(DownReason::Protocol));
                    return None;
                }
            }
            Say::Gone { part, tenants } => {
                if !session.gone.hear(part) {
                    session.leave(now.after(GRACE), Some(DownReason::Protocol));
                    return None;
                }
                tenants.iter().for_each(|&tenant| session.withdrawn.withdraw(tenant));
            }
            Say::Bye { quiet, sent } => {
                tracing::debug!(peer = %session.peer, "it says that it leaves");
                session.is_quiet = quiet;
                session.is_unheard = false;
                // Of what failed nobody knows how much comes; and who says it again does not gain time.
                if quiet && session.parting.is_none() {
                    session.parting = Some((now.after(PARTING), sent));
                }
                session.leave(now.after(GRACE), Some(DownReason::Disconnected));
            }
            Say::Taken { nic, count } => {
                let allowance = session.allowances.get_mut(usize::from(nic))?;
                if allowance.report(count).is_err() {
                    session.leave(now.after(GRACE), Some(DownReason::Protocol));
                    return None;
                }
            }
            Say::Withdraw(tenant) => {
                session.withdrawn.withdraw(tenant);
                if !session.releasing.add(tenant, session.says.withdrawn.len()) {
                    session.leave(now.after(GRACE), Some(DownReason::Protocol));
                    return None;
                }
            }
            Say::Withdrawn(tenant) => {
                self.memory.regions.with_ledger(|ledger| ledger.withdrawn(token, tenant));
            }
            Say::Move { turn, ports } => {
                let last = session.shift.as_ref().map_or(session.ports_turn, |next| next.0);
                if last.is_after(turn) {
                    // Messages keep no order: it has said since where it is now.
                    return Some(());
                }
                if ports.len() != session.ports.len() || is_anothers {
                    session.leave(now.after(GRACE), Some(DownReason::Protocol));
                    return None;
                }
                if turn == session.ports_turn {
                    // It is known to be there: the answer to its call was late.
                    session.says.moved = Some(turn);
                } else {
                    session.shift = Some((turn, ports));
                }
            }
            Say::Moved { turn, sent } => {
                if !is_current {
                    return None;
                }
                session.arrears = Some((turn, sent));
            }
            Say::Open { turns, pairs } => {
                if session.openings.is_some() {
                    session.leave(now.after(GRACE), Some(DownReason::Protocol));
                    return None;
                }
                // Of endpoints that have been replaced it asks anew.
                let asks = session.ports_turn;
                let is_current = |it: Turns| it.asks == asks && recycle.which(it.opens).is_some();
                session.to_open.add(turns, pairs, is_current);
            }
            Say::Opened { turns, pairs } => {
                session.with_openings(turns, |it| it.opened(turns, pairs));
            }
        }
        Some(())
    }

    // ---- sessions ----

    /// Something failed that concerns this peer alone: it is given up.
    pub(super) fn stumble(&mut self, index: u16, why: &dyn std::fmt::Debug) {
        let cut = self.now.after(GRACE);
        if let Some(session) = self.session(index) {
            if !session.is_leaving() {
                tracing::warn!(peer = %session.peer, ?why, "the peer is given up");
            }
            session.was_cut = true;
            session.is_unheard |= session.parting.is_none();
            session.leave(cut, Some(DownReason::Disconnected));
        }
        self.urgent = true;
    }

    /// The door has failed: the engine is reached by nobody, and reaches nobody.
    fn lose_everybody(&mut self, failure: Failure) {
        tracing::error!(
            code = failure.code,
            "the queue of messages failed: all peers are lost, and none can be had"
        );
        for at in 0..self.live.len() {
            if let Some(&index) = self.live.get(at) {
                self.stumble(index, &"the queue of messages failed");
            }
        }
    }

    /// A lane's completion queue or endpoint has failed: nothing is read of it any more, and whoever it served is lost. If it is the present one, its
    /// endpoint is replaced with all others.
    pub(super) fn lose_lane(&mut self, nic: NicIndex, old: bool, failure: Failure) {
        let Some(port) = self.ports.get_mut(usize::from(nic)) else { return };
        let lane = if old { port.old.as_mut() } else { Some(&mut port.lane) };
        let Some(lane) = lane else { return };
        lane.is_broken = true;
        tracing::error!(
            nic,
            old,
            code = failure.code,
            detail = failure.detail,
            "an endpoint or its queue failed: those that it served are lost"
        );
        self.urgent = true;
        let turn = self.recycle.turn();
        for at in 0..self.live.len() {
            let Some(&index) = self.live.get(at) else { break };
            // Who has moved, and to whom nothing is in flight there, is served by the present one alone.
            let is_served = |it: &mut Session| !old || it.old_in_flight > 0 || it.moved != turn;
            if self.session(index).is_some_and(is_served) {
                self.stumble(index, &"its endpoint or queue failed");
            }
        }
    }

    /// Whether an endpoint that is written to has failed, or lost its queue: until it is replaced, nobody is to learn of it.
    pub(super) fn has_lost_lane(&self) -> bool {
        self.ports.iter().any(|port| port.has_lost(Which::Present))
    }

    /// Tells peers which regions they are not to write to any more.
    fn tell_withdrawals(&mut self) {
        let sessions = self.sessions.iter_mut().flatten();
        let says = sessions.map(|it| (it.token, &mut it.says.withdraw));
        self.memory.regions.look(|ledger| ledger.tell(says));
    }

    /// Does what is due, and ends what can end.
    pub(super) fn tend<S: Sink>(&mut self, sink: &mut S) {
        let now = self.now;
        if self.owing {
            self.settle_what_is_owed();
        }
        let mut replace = self.has_lost_lane();
        let mut at = 0;
        // Not an iterator: a session that ends leaves the list.
        while let Some(&index) = self.live.get(at) {
            self.release(index);
            self.shift(index);
            self.open_pairs(index);
            let Some(session) = self.session(index) else {
                at += 1;
                continue;
            };
            session.settle_arrears();
            let (in_flight, has_ended) = (session.all_in_flight(), session.has_ended(now));
            let stuck = if session.is_refused { self.stuck_pair(index) } else { None };
            let Some(session) = self.session(index) else {
                at += 1;
                continue;
            };
            match (&mut session.state, stuck) {
                (State::Open, Some((nic, remote))) => {
                    tracing::warn!(
                        peer = %session.peer, nic, remote,
                        "libfabric takes nothing for the peer between these NICs: it is given up"
                    );
                    session.leave(now, Some(DownReason::Disconnected));
                }
                (State::Open, None) => {}
                (State::Greeting { until, .. }, _) if now >= *until => {
                    session.leave(now, Some(DownReason::NeverAnswered));
                }
                (State::Greeting { retry, .. }, _) => {
                    session.says.accept |= retry.is_due(now);
                }
                (State::Leaving { .. }, _) if has_ended => {
                    self.finish(index, sink);
                    continue;
                }
                (State::Leaving { cut, .. }, _) => replace |= in_flight > 0 && now >= *cut,
            }
            self.speak(index);
            at += 1;
        }
        replace |= self.memory.regions.look(|ledger| ledger.is_haunted());
        if replace
            && !self.recycle.is_under_way()
            && now >= self.reopens
            && let Err(error) = self.begin_replacing()
        {
            tracing::error!(%error, "new endpoints could not be opened; it is tried again");
            self.reopens = now.after(REOPEN_AFTER);
            return;
        }
        self.go_on_replacing(sink);
    }

    /// A pair of NICs, ours and the peer's, for which libfabric has taken nothing for too long, while nothing was in flight between
    /// them.
    #[cold]
    fn stuck_pair(&mut self, index: u16) -> Option<(NicIndex, NicIndex)> {
        let (now, ports) = (self.now, &self.ports);
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut)?;
        let (is_busy, reached) = (session.all_in_flight() > 0, session.reached);
        let old = session.old_routes.iter_mut().map(|route| (true, route));
        let all = old.chain(session.routes.iter_mut().map(|route| (false, route)));
        let (mut stuck, mut is_refused) = (None, false);
        for (old, (nic, remote, route)) in all.filter(|it| it.1.2.refusals.are_there(now)) {
            let port = ports.get(usize::from(nic))?;
            let lane = if old { port.old.as_ref() } else { Some(&port.lane) };
            let mut flights = lane.iter().flat_map(|lane| lane.flights.iter().flatten());
            if flights.any(|flight| (flight.peer, flight.remote) == (index, remote)) {
                // That it is busy is no wonder: what is in flight ends, or fails.
                route.refusals.taken();
            } else {
                if is_busy {
                    route.refusals.while_others_wait(reached);
                }
                let limit = if route.is_reached { STUCK } else { STUCK_AT_FIRST };
                if route.refusals.last_longer_than(limit, now) {
                    stuck = Some((nic, remote));
                }
            }
            is_refused |= route.refusals.are_there(now);
        }
        session.is_refused = is_refused;
        stuck
    }

    /// Reads all that has come.
    pub(super) fn read_all<S: Sink>(&mut self, sink: &mut S) {
        for at in 0..self.ports.len() {
            let nic = NicIndex::try_from(at).unwrap_or(NicIndex::MAX);
            for old in [true, false] {
                self.drain_lane(nic, old, sink);
            }
        }
    }

    /// A session has ended.
    fn finish<S: Sink>(&mut self, index: u16, sink: &mut S) {
        // What had come before it said farewell is not lost, however much of it there is.
        self.read_all(sink);
        let slot = self.sessions.get_mut(usize::from(index));
        let Some(session) = slot.and_then(Option::take) else { return };
        self.live.retain(|&live| live != index);
        self.forget_ports(index, &session.ports, &session.routes, &session.old_routes);
        self.forget_retired(index, &session.retired);
        self.door.give_up(session.token);
        let say = Say::Bye { quiet: !session.was_cut, sent: session.sent() };
        let message = Message::Session { token: session.their_token, say };
        self.door.part(self.now, &session.door, &message);
        if session.holds_door {
            self.door.release(&session.door);
        }
        self.memory.regions.with_ledger(|it| it.close(session.token, session.is_quiet));
        if let State::Leaving { reason: Some(reason), .. } = session.state {
            sink.disconnected(session.peer, reason);
        }
    }

    /// Makes a peer's ports unknown to our endpoints.
    fn forget_ports(
        &mut self,
        index: u16,
        ports: &Addresses,
        routes: &Routes,
        old_routes: &Routes,
    ) {
        let wide = self.wide;
        for (nic, port) in self.ports.iter_mut().enumerate() {
            let nic = NicIndex::try_from(nic).unwrap_or(NicIndex::MAX);
            for (remote, address) in ports.iter().enumerate() {
                let remote = NicIndex::try_from(remote).unwrap_or(NicIndex::MAX);
                if let Some(handle) = routes.get(nic, remote) {
                    port.lane.endpoint.forget(address);
                    if !wide {
                        port.lane.disown(handle, index);
                    }
                }
                if let (Some(handle), Some(old)) = (old_routes.get(nic, remote), port.old.as_mut())
                {
                    old.endpoint.forget(address);
                    if !wide {
                        old.disown(handle, index);
                    }
                }
            }
        }
    }

    fn forget_retired(&mut self, index: u16, retired: &Retired) {
        self.forget_ports(index, &retired.ports, &retired.routes, &retired.old_routes);
    }

    /// Confirms withdrawals to whose regions nothing is in flight any more.
    fn release(&mut self, index: u16) {
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let Some(session) = session else { return };
        let ports = &self.ports;
        session.releasing.release(&mut session.says.withdrawn, |tenant| {
            let lanes = ports.iter().flat_map(|port| port.old.iter().chain([&port.lane]));
            lanes.flat_map(|lane| lane.flights.iter().flatten()).any(|flight| {
                flight.peer == index && flight.tenant.is_some_and(|other| tenant.covers(other))
            })
        });
    }

    /// Goes over to the peer's new ports once nothing is in flight to the old.
    fn shift(&mut self, index: u16) {
        let Some(session) = self.session(index) else { return };
        if session.all_in_flight() > 0 || session.is_leaving() {
            return;
        }
        let Some((turn, ports)) = session.shift.take() else { return };
        // Taken out, so that its routes can be made with the rest of us.
        let slot = self.sessions.get_mut(usize::from(index));
        let Some(mut session) = slot.and_then(Option::take) else { return };
        let before = Retired {
            ports: std::mem::take(&mut session.ports),
            routes: std::mem::take(&mut session.routes),
            old_routes: std::mem::take(&mut session.old_routes),
        };
        // The peer replaces its endpoints one time after the other: those of the last time are closed.
        self.forget_retired(index, &std::mem::take(&mut session.retired));
        if self.wide {
            // Software takes writes from anywhere.
            self.forget_retired(index, &before);
        } else {
            session.retired = before;
            // It may have said before that it moved to where it was: what is still its own it has not lost with that.
            for (nic, port) in (0..).zip(&mut self.ports) {
                port.lane.attribute_all(nic, &session.retired.routes, index);
                if let Some(old) = &mut port.old {
                    old.attribute_all(nic, &session.retired.old_routes, index);
                }
            }
        }
        let ours = self.recycle.turn();
        let under_way = self.recycle.is_under_way();
        match self.learn_ports(index, &ports) {
            Ok(routes) => {
                session.routes = routes;
                session.ports = ports;
                session.ports_turn = turn;
                session.says.moved = Some(turn);
            }
            Err(error) => {
                tracing::warn!(peer = %session.peer, %error, "the peer's new endpoints are of no use");
                session.leave(self.now, Some(DownReason::Protocol));
            }
        }
        if under_way && session.moved != self.recycle.turn() && !session.is_leaving() {
            session.old_routes = self.learn_old_ports(index, &session.ports).unwrap_or_default();
        }
        session.old_openings = session
            .old_openings
            .map(|it| Openings::new(Turns { opens: turn, ..it.turns() }))
            .filter(|_| under_way);
        session.openings =
            session.openings.map(|_| Openings::new(Turns { asks: ours, opens: turn }));
        if let Some(slot) = self.sessions.get_mut(usize::from(index)) {
            *slot = Some(session);
        }
    }

    /// Opens the connections that the peer has asked for, as far as they are still wanted.
    fn open_pairs(&mut self, index: u16) {
        let Some(session) = self.session(index) else { return };
        if session.to_open.is_empty() || session.is_leaving() {
            return;
        }
        let mut to_open = std::mem::take(&mut session.to_open);
        to_open.retain_mut(|turns, pairs| {
            for (remote, nic) in pairs.iter() {
                match self.open_pair(index, turns, nic, remote) {
                    // Busy, connecting perhaps: tried again.
                    Posted::NoRoom => self.urgent = true,
                    Posted::UnderWay | Posted::Refused(_) => {
                        *pairs = pairs.without(Pairs::one(remote, nic));
                    }
                    Posted::Failed(error) => {
                        self.stumble(index, &error);
                        return false;
                    }
                }
            }
            !pairs.is_empty()
        });
        if let Some(session) = self.session(index) {
            session.to_open = to_open;
        }
    }

    /// Says what is to be said, as far as there is room.
    fn speak(&mut self, index: u16) {
        let port_names = self.port_names();
        let (now, turn, recycle, ports) =
            (self.now, self.recycle.turn(), self.recycle, &self.ports);
        let Some(session) =
            self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut)
        else {
            return;
        };
        if session.says.is_empty() && !session.wants_openings() {
            return;
        }
        let is_read = |which| !ports.iter().any(|port| port.has_lost(which));
        let knows_where = recycle.which(session.moved).is_some_and(is_read);
        let to = To::Peer { index, token: session.token };
        let (door, their_token) = (session.door.clone(), session.their_token);
        let (says, under_way) = (&mut session.says, &mut session.under_way);
        let room = &mut self.door;
        if says.accept {
            let (nonce, proof, claim) =
                (session.nonce, session.accept_proof, session.accept.as_slice());
            let message = Message::Accept { nonce, proof, claim };
            if !room.send(now, &to, &door, under_way, &message) {
                return;
            }
            says.accept = false;
        }
        if matches!(session.state, State::Greeting { .. }) {
            // Messages keep no order: what overtakes our answer is of no session that the peer knows, and lost.
            return;
        }
        let mut say = |say: Say| {
            let message = Message::Session { token: their_token, say };
            room.send(now, &to, &door, under_way, &message)
        };
        // Who hears that we are ready may write: not to endpoints that are closed, or read no more. Messages keep no order, so it is to have
        // answered first where the present ones are.
        if says.ready && knows_where {
            if !say(Say::Ready { gone: session.gone_parts }) {
                return;
            }
            says.ready = false;
        }
        while let Some((part, tenants)) = says.gone.last() {
            if !say(Say::Gone { part: *part, tenants: tenants.clone() }) {
                return;
            }
            says.gone.pop();
        }
        if says.moves {
            if !say(Say::Move { turn, ports: port_names }) {
                return;
            }
            says.moves = false;
        }
        if let Some(turn) = says.moved {
            let sent = sent_by(&session.allowances, session.ports.len());
            if !say(Say::Moved { turn, sent }) {
                return;
            }
            says.moved = None;
        }
        let unasked = [&mut session.old_openings, &mut session.openings].into_iter().flatten();
        for openings in unasked {
            let pairs = openings.unasked();
            if !pairs.is_empty() {
                if !say(Say::Open { turns: openings.turns(), pairs }) {
                    return;
                }
                openings.asked(pairs);
            }
        }
        while let Some((turns, pairs)) = says.opened.last() {
            if !say(Say::Opened { turns, pairs }) {
                return;
            }
            says.opened.pop();
        }
        for (nic, takings) in session.takings.iter_mut().enumerate() {
            let Some(due) = says.taken.get_mut(nic).filter(|due| **due) else { continue };
            let nic = NicIndex::try_from(nic).unwrap_or(NicIndex::MAX);
            let mut reported = *takings;
            if !say(Say::Taken { nic, count: reported.report() }) {
                return;
            }
            *takings = reported;
            *due = false;
        }
        while let Some(&tenant) = says.withdraw.last() {
            if !say(Say::Withdraw(tenant)) {
                return;
            }
            says.withdraw.pop();
        }
        while let Some(&tenant) = says.withdrawn.last() {
            if !say(Say::Withdrawn(tenant)) {
                return;
            }
            says.withdrawn.pop();
        }
    }

    // ---- endpoints ----

    /// Where our endpoints are, by NIC.
    pub(super) fn port_names(&self) -> Addresses {
        self.ports.iter().map(|port| port.lane.endpoint.name().clone()).collect()
    }

    /// When the replacement under way is to be looked at again.
    pub(super) fn recycle_deadline(&self) -> Time {
        let standings = self.live.iter().filter_map(|&index| {
            Some(self.sessions.get(usize::from(index))?.as_ref()?.standing(self.now))
        });
        match self.recycle.verdict(standings) {
            Verdict::Idle => Time::NEVER,
            Verdict::Wait(until) => until,
            Verdict::GiveUp | Verdict::Close => self.now,
        }
    }

    /// As `learn_ports`, on the endpoints that are being replaced.
    pub(super) fn learn_old_ports(
        &mut self,
        index: u16,
        ports: &[immwire_core::datagram::Address],
    ) -> Result<Routes, LibfabricError> {
        self.swap_lanes();
        let learnt = self.learn_ports(index, ports);
        self.swap_lanes();
        learnt
    }

    fn swap_lanes(&mut self) {
        for port in &mut self.ports {
            if let Some(old) = &mut port.old {
                std::mem::swap(old, &mut port.lane);
            }
        }
    }

    /// Regions are registered with the lane's domain no more, if that goes with it.
    fn abandon(&self, lane: &Lane) {
        if lane.endpoint.domain().facts().lonely_endpoints {
            self.memory.abandon(lane.endpoint.domain());
        }
    }

    /// A lane for each NIC, with which all regions are registered; or none is left of any.
    fn open_lanes(&self) -> Result<Vec<Lane>, LibfabricError> {
        let mut lanes = Vec::with_capacity(self.ports.len());
        let peers = self.config.peers.max(1);
        for (nic, port) in self.ports.iter().enumerate() {
            let shared = port.domain.as_ref();
            let opened = Lane::open(&port.device, shared, self.entries, peers, &self.nothing);
            let adopted = opened.and_then(|lane| match shared {
                Some(_) => Ok(lane),
                None => self.memory.adopt(nic, lane.endpoint.domain()).map(|()| lane),
            });
            match adopted {
                Ok(lane) => lanes.push(lane),
                Err(error) => {
                    for lane in &lanes {
                        self.abandon(lane);
                    }
                    return Err(error);
                }
            }
        }
        Ok(lanes)
    }

    fn begin_replacing(&mut self) -> Result<(), LibfabricError> {
        let lanes = self.open_lanes()?;
        if self.recycle.begin(self.now, MOVE_PATIENCE).is_none() {
            return Ok(());
        }
        self.stats.replaced += 1;
        for (port, lane) in self.ports.iter_mut().zip(lanes) {
            port.old = Some(std::mem::replace(&mut port.lane, lane));
        }
        self.watch.forget();
        // With the old endpoints goes all that comes from those who hear of no new ones.
        self.haunting = self.memory.regions.look(|ledger| ledger.ghosts());
        let sessions = self.sessions.iter().flatten();
        self.haunting.extend(sessions.filter(|it| it.is_leaving()).map(|it| it.token));
        let turn = self.recycle.turn();
        for at in 0..self.live.len() {
            let Some(&index) = self.live.get(at) else { break };
            let Some(session) = self.session(index) else { continue };
            session.old_routes = std::mem::take(&mut session.routes);
            session.retired.old_routes = std::mem::take(&mut session.retired.routes);
            session.old_in_flight = std::mem::take(&mut session.in_flight);
            session.old_openings = session.openings;
            let opens = session.ports_turn;
            session.openings = session.openings.map(|_| Openings::new(Turns { asks: turn, opens }));
            if session.is_leaving() {
                continue;
            }
            session.says.moves = true;
            let (ports, retired) = (session.ports.clone(), session.retired.ports.clone());
            let learnt = self.learn_ports(index, &ports).and_then(|routes| {
                if let Some(session) = self.session(index) {
                    session.routes = routes;
                }
                let routes = self.learn_ports(index, &retired)?;
                if let Some(session) = self.session(index) {
                    session.retired.routes = routes;
                }
                Ok(())
            });
            if let Err(error) = learnt {
                self.stumble(index, &error);
            }
        }
        Ok(())
    }

    fn go_on_replacing<S: Sink>(&mut self, sink: &mut S) {
        // Twice at most: whoever is given up is late no more.
        for _ in 0..2 {
            let standings = self.live.iter().filter_map(|&index| {
                Some(self.sessions.get(usize::from(index))?.as_ref()?.standing(self.now))
            });
            match self.recycle.verdict(standings) {
                Verdict::Idle | Verdict::Wait(_) => break,
                Verdict::GiveUp => {
                    let (now, recycle) = (self.now, self.recycle);
                    for session in self.sessions.iter_mut().flatten() {
                        if recycle.is_late(session.standing(now)) {
                            tracing::warn!(peer = %session.peer, "did not move to the new endpoints in time");
                            session.give_up(now);
                        }
                    }
                }
                Verdict::Close => {
                    self.close_old(sink);
                    break;
                }
            }
        }
        // Something may be said at once, or ended.
        for at in 0..self.live.len() {
            if let Some(&index) = self.live.get(at) {
                self.speak(index);
            }
        }
    }

    /// Closes the replaced endpoints, and reports what was in flight on them.
    fn close_old<S: Sink>(&mut self, sink: &mut S) {
        for at in 0..self.ports.len() {
            let nic = NicIndex::try_from(at).unwrap_or(NicIndex::MAX);
            // What has come is not lost.
            self.drain_lane(nic, true, sink);
            let Some(lane) = self.ports.get_mut(at).and_then(|port| port.old.take()) else {
                continue;
            };
            self.abandon(&lane);
            let Lane { endpoint, empty, flights, .. } = lane;
            drop((endpoint, empty));
            for flight in flights.into_iter().flatten() {
                if let Some(session) = self.session(flight.peer) {
                    session.old_in_flight = session.old_in_flight.saturating_sub(1);
                    session.was_cut = true;
                }
                if let Purpose::Work(token) = flight.purpose {
                    sink.work_done(nic, token, Err(WorkError::Flushed));
                }
            }
        }
        self.recycle.closed();
        for session in self.sessions.iter_mut().flatten() {
            session.old_routes = Routes::default();
            session.retired.old_routes = Routes::default();
            session.old_openings = None;
        }
        let over: Vec<u16> = self
            .live
            .iter()
            .copied()
            .filter(|&index| {
                let session = self.sessions.get(usize::from(index)).and_then(Option::as_ref);
                session.is_some_and(|it| it.has_ended(self.now))
            })
            .collect();
        for index in over {
            self.finish(index, sink);
        }
        let haunting = std::mem::take(&mut self.haunting);
        self.memory.regions.with_ledger(|ledger| ledger.lay(&haunting));
    }

    /// Tells all peers that it is over, and gives that a moment to leave the machine.
    pub(super) fn farewell(&mut self) {
        for at in 0..self.live.len() {
            let Some(&index) = self.live.get(at) else { break };
            let Some(session) = self.session(index) else { continue };
            let quiet = session.all_in_flight() == 0 && !session.was_cut;
            let say = Say::Bye { quiet, sent: session.sent() };
            let message = Message::Session { token: session.their_token, say };
            let door = session.door.clone();
            self.door.part(self.now, &door, &message);
        }
        let until = std::time::Instant::now() + FAREWELL;
        let mut bytes = [0; DATAGRAM_MAX];
        while self.door.is_sending_to_strangers() && std::time::Instant::now() < until {
            while self.door.read(&mut bytes, self.now, |_, _, _| ()).is_some() {}
            std::thread::yield_now();
        }
    }
}
