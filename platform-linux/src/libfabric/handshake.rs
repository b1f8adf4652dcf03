//! Calls: how a session comes to be, and how both ends prove who they are.
//!
//! The messages and their order are `immwire_core::datagram`'s. A proof is a keyed hash over both nonces,
//! the engine that was called, and everything the prover claims; the roles differ, so it can be neither
//! reflected nor relayed, and the number of the call in the claim keeps a recorded one from being of use
//! again. Without a group key the proofs are not looked at.
//!
//! # Invariants
//!
//! - Whoever calls costs one message in answer, and no memory, until it has shown that it is reached where
//!   it says.
//! - A session is open here before its peer learns that it may write, and written to only when that has
//!   been said.
//! - Nor is it written to from endpoints that it may not have been told of: which it has heard of it shows by moving (`immwire_core::recycle`).
//! - Where a device tells who wrote by the endpoint alone, an endpoint is of one session at a time (`immwire_core::origin`).

use std::io;
use std::time::Duration;

use immwire_core::datagram::{
    Address, Claim, DATAGRAM_MAX, GivenUp, Message, Nonce, Nonces, Proof, Retry, Uptake,
};
use immwire_core::id::{EngineId, PeerId, Time};
use immwire_core::opening::{Openings, Turns};
use immwire_core::origin::{self, Origin, Recall};
use immwire_core::peer::DownReason;
use immwire_core::recycle::{Told, Turn};
use immwire_core::wire::{Hello, NetAddr, PROTOCOL_VERSION, Refusal};

use super::door::To;
use super::session::{Routes, Session, State};
use super::{LibfabricError, LibfabricProvider, index_of, random, token_for};
use crate::proof::{Prover, challenge, is_proven, proof};
use crate::provider::{ConnectError, Sink};

/// How long the one who called may take to say that it has heard our answer.
const GREETING_PATIENCE: Duration = Duration::from_secs(3);
/// Calls that were given up and are known to have been, at most.
const GIVEN_UP: usize = 64;
/// Messages of a call that may fail to be delivered, until nobody is believed to be there.
const FAILURES_MAX: u32 = 3;

/// A call of ours that has not been answered.
#[derive(Debug)]
struct Call {
    peer: PeerId,
    token: u64,
    target: EngineId,
    door: Address,
    /// The door is kept known for it.
    held: bool,
    hello: Hello,
    initiator: Nonce,
    /// Our endpoints, as they were each time that we told the peer of them. It may have heard any one of these times:
    /// what it lets be said again it keeps nothing of.
    told: Told,
    /// Of the challenge, once it has come.
    acceptor: Option<Nonce>,
    retry: Retry,
    uptake: Uptake,
    under_way: u8,
    failures: u32,
}

impl Call {
    /// When something is next to be said.
    fn due(&self) -> Time {
        self.uptake.again().unwrap_or(self.retry.due())
    }
}

/// The calls of ours, and what our answers to others' follow from.
#[derive(Debug)]
pub(super) struct Handshakes {
    secret: [u8; 32],
    calls: Vec<Call>,
    given_up: GivenUp<Address, GIVEN_UP>,
}

impl Handshakes {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { secret: random()?, calls: Vec::new(), given_up: GivenUp::new() })
    }

    /// When a call is to be repeated.
    pub(super) fn next_deadline(&self) -> Time {
        self.calls.iter().map(Call::due).min().unwrap_or(Time::NEVER)
    }

    /// What a caller has to show that it has received.
    fn challenge(&self, initiator: &Nonce, door: &Address) -> Nonces {
        challenge(&self.secret, initiator, door)
    }

    /// One message of a call's is not under way any more.
    pub(super) fn ended(&mut self, token: u64, is_delivered: bool) {
        if let Some(call) = self.calls.iter_mut().find(|call| call.token == token) {
            call.under_way = call.under_way.saturating_sub(1);
            if is_delivered {
                call.uptake.delivered();
            }
        }
    }
}

impl LibfabricProvider {
    // ---- calling ----

    pub(super) fn call(
        &mut self,
        peer: PeerId,
        address: &NetAddr,
        hello: &Hello,
    ) -> Result<(), ConnectError> {
        let malformed = |what| ConnectError::Malformed { what };
        let first = address.nics().first().map(|nic| nic.address.clone());
        let door = first.ok_or(malformed("it names no endpoint"))?;
        if address.nics().iter().any(|nic| nic.address != door) {
            return Err(malformed("the NICs of an engine on libfabric share one address"));
        }
        if door.len() != self.door.address().len() {
            let facts = self.ports.first().map(|port| port.facts());
            let names = facts.map(|it| (it.provider.clone(), it.domain.clone()));
            let (provider, domain) = names.unwrap_or_default();
            return Err(ConnectError::OtherNetwork { provider, domain });
        }
        if door == *self.door.address() {
            return Err(ConnectError::Ours);
        }
        let lacks = |why: io::Error| ConnectError::Local { why: why.into() };
        if self.door.is_shut() {
            return Err(lacks(io::Error::other("its endpoint for messages has failed")));
        }
        let token = token_for(peer.index).map_err(lacks)?;
        let initiator = random().map_err(lacks)?;
        let held = self.door.hold(&door);
        let call = Call {
            peer,
            token,
            target: address.engine(),
            door,
            held,
            hello: hello.clone(),
            initiator,
            told: Told::default(),
            acceptor: None,
            retry: Retry::start(self.now),
            uptake: Uptake::default(),
            under_way: 0,
            failures: 0,
        };
        self.handshakes.calls.push(call);
        self.say_call(self.handshakes.calls.len() - 1);
        Ok(())
    }

    /// Gives up a call of ours.
    pub(super) fn hang_up(&mut self, peer: PeerId) {
        while let Some(at) = self.handshakes.calls.iter().position(|call| call.peer == peer) {
            let call = self.handshakes.calls.swap_remove(at);
            if call.acceptor.is_some() {
                self.revoke(call.initiator, &call.door);
                self.handshakes.given_up.note(call.initiator, call.door.clone());
            }
            self.door.give_up(call.token);
            self.let_go(&call);
        }
    }

    /// Tells an acceptor that the call is given up. If it is lost, it is told again when it answers.
    fn revoke(&mut self, nonce: Nonce, door: &Address) {
        self.answer(door, &Message::Refuse { nonce, why: Refusal::Stale });
    }

    /// The call of that nonce, which has been answered.
    fn take_call(&mut self, initiator: &Nonce) -> Option<Call> {
        let mut calls = self.handshakes.calls.iter();
        let at = calls.position(|call| call.initiator == *initiator)?;
        Some(self.handshakes.calls.swap_remove(at))
    }

    /// The call is over, and whatever came of it holds its door itself.
    fn let_go(&mut self, call: &Call) {
        if call.held {
            self.door.release(&call.door);
        }
    }

    /// Repeats what has not been answered, or taken; gives up whom nothing can be said to.
    pub(super) fn repeat_calls<S: Sink>(&mut self, sink: &mut S) {
        let now = self.now;
        let mut at = 0;
        // Not an iterator: a call that is given up leaves the list.
        while let Some(call) = self.handshakes.calls.get_mut(at) {
            let peer = call.peer;
            if call.uptake.is_over(now) {
                self.fail_call(peer, DownReason::NeverAnswered, sink);
                continue;
            }
            let due = match call.uptake.again() {
                Some(again) => now >= again,
                None => call.retry.is_due(now),
            };
            if due {
                self.say_call(at);
            }
            at += 1;
        }
    }

    /// Says what is next in a call. If it is not taken, it is said again soon.
    fn say_call(&mut self, at: usize) {
        let Some(call) = self.handshakes.calls.get(at) else { return };
        let to = To::Peer { index: call.peer.index, token: call.token };
        let mut claim = [0; DATAGRAM_MAX];
        let (len, shown) = match call.acceptor {
            None => (0, None),
            Some(acceptor) => {
                let nonces = Nonces { initiator: call.initiator, acceptor };
                let said = self.claim(call.token, 0, call.hello.clone());
                let Some(len) = said.encode(&mut claim) else { return };
                let key = self.config.group_key.as_ref();
                let bytes = claim.get(..len).unwrap_or(&[]);
                (len, Some((nonces, proof(key, Prover::Initiator, &nonces, call.target, bytes))))
            }
        };
        let door = self.door.address().clone();
        let claim = claim.get(..len).unwrap_or(&[]);
        let turn = self.recycle.turn();
        let Some(call) = self.handshakes.calls.get_mut(at) else { return };
        if shown.is_some() {
            call.told.say(turn);
        }
        let message = match shown {
            None => Message::Call { nonce: call.initiator, target: call.target, door },
            Some((nonces, proof)) => {
                Message::Prove { nonces, door, proof: *proof.as_bytes(), claim }
            }
        };
        let taken = self.door.send(self.now, &to, &call.door, &mut call.under_way, &message);
        // What waits behind messages of ours that are under way is no sign of anything.
        if taken || call.under_way > 0 {
            call.uptake.taken();
        } else {
            call.uptake.refused(self.now);
        }
    }

    /// What we say of ourselves.
    fn claim(&self, token: u64, gone: u8, hello: Hello) -> Claim {
        let facts = self.ports.first().map(|port| port.facts().protocol);
        let nothing = immwire_core::datagram::Protocol { number: 0, version: 0, data_bytes: 0 };
        Claim {
            token,
            grant: self.grant,
            protocol: facts.unwrap_or(nothing),
            turn: self.recycle.turn(),
            ports: self.port_names(),
            gone,
            hello,
        }
    }

    /// Nobody hears us any more.
    pub(super) fn fail_calls<S: Sink>(&mut self, sink: &mut S) {
        while let Some(call) = self.handshakes.calls.first() {
            self.fail_call(call.peer, DownReason::Disconnected, sink);
        }
    }

    fn fail_call<S: Sink>(&mut self, peer: PeerId, reason: DownReason, sink: &mut S) {
        self.hang_up(peer);
        sink.disconnected(peer, reason);
    }

    /// A message of a call's was not delivered, and from `untaken` on not taken once more.
    pub(super) fn call_undelivered<S: Sink>(
        &mut self,
        token: u64,
        untaken: Option<Time>,
        sink: &mut S,
    ) {
        let call = self.handshakes.calls.iter_mut().find(|call| call.token == token);
        let Some(call) = call else { return };
        if let Some(since) = untaken {
            call.uptake.undelivered(since);
        }
        call.failures += 1;
        if call.failures >= FAILURES_MAX {
            let peer = call.peer;
            self.fail_call(peer, DownReason::NeverAnswered, sink);
        }
    }

    // ---- hearing ----

    /// A message that belongs to a handshake; `None` if it is none, or not to be believed.
    pub(super) fn hear_handshake<S: Sink>(
        &mut self,
        message: &Message<'_>,
        sink: &mut S,
    ) -> Option<()> {
        match *message {
            Message::Call { nonce, target, ref door } => self.challenge(nonce, target, door),
            Message::Challenge(nonces) => self.challenged(&nonces),
            Message::Prove { ref nonces, ref door, proof, claim } => {
                self.proven(nonces, door, proof, claim, sink)
            }
            Message::Accept { nonce, proof, claim } => self.accepted(&nonce, proof, claim, sink),
            Message::Refuse { nonce, why } => self.refused(&nonce, why, sink),
            Message::Session { .. } => None,
        }
    }

    /// A message of another version of the protocol: whoever calls is told so, and so is who is refused.
    pub(super) fn hear_other_version<S: Sink>(&mut self, bytes: &[u8], sink: &mut S) -> Option<()> {
        match Message::decode_of_any_version(bytes).ok()? {
            (theirs, Message::Call { nonce, target, ref door }) => {
                let is_us = target == self.config.engine;
                let version = Refusal::Version { ours: PROTOCOL_VERSION, theirs };
                self.refuse(nonce, door, if is_us { version } else { Refusal::Elsewhere })
            }
            (_, message) => self.hear_handshake(&message, sink),
        }
    }

    fn answer(&mut self, door: &Address, message: &Message<'_>) {
        // If there is no room, the caller repeats its message.
        self.door.send(self.now, &To::Stranger, door, &mut 0, message);
    }

    fn refuse(&mut self, nonce: Nonce, door: &Address, why: Refusal) -> Option<()> {
        self.stats.refused += 1;
        self.answer(door, &Message::Refuse { nonce, why });
        Some(())
    }

    fn challenge(&mut self, nonce: Nonce, target: EngineId, door: &Address) -> Option<()> {
        if target != self.config.engine {
            // Somebody else had this address before us.
            return self.refuse(nonce, door, Refusal::Elsewhere);
        }
        let nonces = self.handshakes.challenge(&nonce, door);
        self.answer(door, &Message::Challenge(nonces));
        Some(())
    }

    fn challenged(&mut self, nonces: &Nonces) -> Option<()> {
        let mut calls = self.handshakes.calls.iter();
        let at = calls.position(|call| call.initiator == nonces.initiator)?;
        let call = self.handshakes.calls.get_mut(at)?;
        // The first challenge counts: whoever made up another does not keep us from proving to this one.
        if call.acceptor.is_none() {
            call.acceptor = Some(nonces.acceptor);
            call.retry = Retry::start(self.now);
            self.say_call(at);
        }
        Some(())
    }

    fn proven<S: Sink>(
        &mut self,
        nonces: &Nonces,
        door: &Address,
        shown: Proof,
        claim: &[u8],
        sink: &mut S,
    ) -> Option<()> {
        let initiator = nonces.initiator;
        if self.handshakes.challenge(&initiator, door) != *nonces {
            return None;
        }
        let key = self.config.group_key.as_ref();
        let expected = proof(key, Prover::Initiator, nonces, self.config.engine, claim);
        if key.is_some() && !is_proven(expected, shown) {
            return self.refuse(initiator, door, Refusal::Unauthorised);
        }
        let known = self.live.iter().copied().find(|&index| {
            let session = self.sessions.get(usize::from(index)).and_then(Option::as_ref);
            session.is_some_and(|session| session.nonce == initiator)
        });
        if let Some(session) = known.and_then(|index| self.session(index)) {
            // Our answer was lost, or is late.
            session.says.accept = matches!(session.state, State::Greeting { .. });
            self.urgent = true;
            return Some(());
        }
        let claim = match Claim::decode(claim) {
            Ok(claim) if claim.protocol == self.claim_protocol() => claim,
            _ => return self.refuse(initiator, door, Refusal::Malformed),
        };
        if self.is_any_going() || self.has_lost_lane() {
            return Some(()); // It is said again.
        }
        let (now, wide) = (self.now, self.wide);
        let sessions = self.sessions.iter_mut().flatten();
        for session in sessions.filter(|it| !wide && it.has_any_of(&claim.ports)) {
            session.recalled = Some(Recall::heard(session.recalled, now));
        }
        match self.origin_of(&claim) {
            Origin::Granted => {}
            Origin::Later => return Some(()), // So is this.
            Origin::Never => return self.refuse(initiator, door, Refusal::Malformed),
        }
        // What has come from there so far is the earlier session's, if that has not said farewell.
        if self.sessions.iter().flatten().any(|session| session.recalled.is_some()) {
            self.read_all(sink);
        }
        let (peer, hello) = match sink.incoming(&claim.hello) {
            Ok(answer) => answer,
            Err(why) => {
                // It does not count: the session that it may have been taken for the end of is well.
                let sessions = self.sessions.iter_mut().flatten();
                let same = sessions.filter(|session| session.engine == claim.hello.engine());
                same.for_each(|session| session.recalled = None);
                return self.refuse(initiator, door, why);
            }
        };
        // A call of our own to the same peer has crossed with this one, and is given up for it.
        self.hang_up(peer);
        let opened = self.welcome(peer, nonces, door, &claim, hello);
        match opened {
            Ok(()) => sink.connected(peer, &claim.hello),
            Err(error) => {
                tracing::warn!(%peer, %error, "a session could not be opened");
                let now = self.now;
                match self.session(peer.index).filter(|session| session.peer == peer) {
                    Some(session) => session.leave(now, Some(DownReason::Disconnected)),
                    None => sink.disconnected(peer, DownReason::Disconnected),
                }
            }
        }
        Some(())
    }

    fn claim_protocol(&self) -> immwire_core::datagram::Protocol {
        let facts = self.ports.first().map(|port| port.facts().protocol);
        facts.unwrap_or(immwire_core::datagram::Protocol { number: 0, version: 0, data_bytes: 0 })
    }

    /// Opens our side for one who has called.
    fn welcome(
        &mut self,
        peer: PeerId,
        nonces: &Nonces,
        door: &Address,
        claim: &Claim,
        hello: Hello,
    ) -> Result<(), LibfabricError> {
        let token = token_for(peer.index).map_err(LibfabricError::Random)?;
        let turn = self.recycle.turn();
        self.open_session(peer, token, claim, door, nonces.initiator, turn)?;
        let ours = self.claim(token, self.gone_parts(peer.index), hello);
        let mut accept = vec![0; DATAGRAM_MAX];
        let len = ours.encode(&mut accept).ok_or(LibfabricError::OutOfMemory)?;
        accept.truncate(len);
        let key = self.config.group_key.as_ref();
        // About the one who called: so that it is told from an answer to somebody else.
        let target = claim.hello.engine();
        let proof = proof(key, Prover::Acceptor, nonces, target, &accept);
        let retry = Retry::start(self.now);
        let until = self.now.after(GREETING_PATIENCE);
        let turns = Turns { asks: turn, opens: claim.turn };
        let asks = self.connects;
        if let Some(session) = self.session(peer.index) {
            session.state = State::Greeting { until, retry };
            // Who called opens connections.
            session.openings = asks.then(|| Openings::new(turns));
            session.accept = accept;
            session.accept_proof = *proof.as_bytes();
            session.says.accept = true;
        }
        self.urgent = true;
        Ok(())
    }

    fn accepted<S: Sink>(
        &mut self,
        nonce: &Nonce,
        shown: Proof,
        bytes: &[u8],
        sink: &mut S,
    ) -> Option<()> {
        let call = self.handshakes.calls.iter().find(|call| call.initiator == *nonce);
        let Some(call) = call else {
            if let Some(door) = self.handshakes.given_up.answered(nonce).cloned() {
                self.revoke(*nonce, &door);
                return Some(());
            }
            // It has not heard that we know: it is told again.
            let claim = Claim::decode(bytes).ok()?;
            let mut live = self.live.iter().copied();
            let index = live.find(|&index| {
                let session = self.sessions.get(usize::from(index)).and_then(Option::as_ref);
                session.is_some_and(|it| it.nonce == *nonce && it.their_token == claim.token)
            })?;
            self.session(index)?.says.ready = true;
            self.urgent = true;
            return Some(());
        };
        let nonces = Nonces { initiator: *nonce, acceptor: call.acceptor? };
        let key = self.config.group_key.as_ref();
        let expected = proof(key, Prover::Acceptor, &nonces, self.config.engine, bytes);
        let peer = call.peer;
        if key.is_some() && !is_proven(expected, shown) {
            self.fail_call(peer, DownReason::Refused(Refusal::Unauthorised), sink);
            return Some(());
        }
        let claim = Claim::decode(bytes).ok().filter(|claim| {
            claim.hello.engine() == call.target && claim.protocol == self.claim_protocol()
        });
        let Some(claim) = claim else {
            self.fail_call(peer, DownReason::Protocol, sink);
            return Some(());
        };
        if self.sessions.get(usize::from(peer.index)).is_some_and(Option::is_some) {
            return Some(()); // It is said again, until we confirm it.
        }
        if self.has_lost_lane() {
            return Some(()); // The same.
        }
        match self.origin_of(&claim) {
            Origin::Granted => {}
            // So is this. Nobody calls whom it has a session with that is well: that one ends.
            Origin::Later => return Some(()),
            Origin::Never => {
                self.fail_call(peer, DownReason::Protocol, sink);
                return Some(());
            }
        }
        let call = self.take_call(nonce)?;
        let (token, door) = (call.token, &call.door);
        // If it may know other ones than these, it is to say first that it has moved.
        let turn = call.told.surely().unwrap_or(self.recycle.nowhere());
        let opened = self.open_session(peer, token, &claim, door, *nonce, turn);
        self.let_go(&call);
        let moves = turn != self.recycle.turn();
        match opened {
            Ok(()) => {
                if let Some(session) = self.session(peer.index) {
                    session.under_way = call.under_way;
                    // What it says else was checked as it was read.
                    session.gone.expect(claim.gone);
                    session.says.ready = true;
                    // Our endpoints were replaced meanwhile, or as we called.
                    session.says.moves = moves;
                }
                self.urgent = true;
                sink.connected(peer, &claim.hello);
            }
            Err(error) => {
                tracing::warn!(%peer, %error, "a session could not be opened");
                sink.disconnected(peer, DownReason::Disconnected);
            }
        }
        Some(())
    }

    /// A call of ours is refused, or a peer's is given up that we have answered.
    fn refused<S: Sink>(&mut self, nonce: &Nonce, why: Refusal, sink: &mut S) -> Option<()> {
        if why == Refusal::Crossed {
            // The peer keeps its own call to us. When that is answered ours is over; but the peer may give its up,
            // so that ours is repeated until then.
            let mut calls = self.handshakes.calls.iter_mut();
            calls.find(|call| call.initiator == *nonce)?.retry = Retry::start(self.now);
            return Some(());
        }
        if let Some(call) = self.take_call(nonce) {
            self.door.give_up(call.token);
            self.let_go(&call);
            sink.disconnected(call.peer, DownReason::Refused(why));
            return Some(());
        }
        // Whoever knows the nonce of a call that nobody has confirmed has made it, or heard it.
        let now = self.now;
        let greeted = |session: &&mut Box<Session>| {
            session.nonce == *nonce && matches!(session.state, State::Greeting { .. })
        };
        let session = self.sessions.iter_mut().flatten().find(greeted)?;
        session.leave(now, Some(DownReason::Disconnected));
        self.urgent = true;
        Some(())
    }

    // ---- sessions ----

    /// Whether any session leaves that the engine has let go of already: its number may be another peer's by now, and its place is not free
    /// while something of ours is in flight to it that the engine knows nothing of, as what opens a connection.
    fn is_any_going(&self) -> bool {
        let mut live = self.live.iter().filter_map(|&index| self.sessions.get(usize::from(index)));
        live.any(|it| {
            it.as_ref().is_some_and(|it| matches!(it.state, State::Leaving { reason: None, .. }))
        })
    }

    /// Whether the endpoints may be its own that an engine says are.
    fn origin_of(&self, claim: &Claim) -> Origin {
        if self.wide {
            return Origin::Granted; // The session is said with each immediate.
        }
        let sessions = self.sessions.iter().flatten();
        let holders = sessions.filter(|session| session.has_any_of(&claim.ports));
        origin::judge(self.now, claim.hello.engine(), holders.map(|session| session.as_holder()))
    }

    /// Makes an open session. The peer knows our endpoints as they were when `turn` was their number; none, if there are none of it.
    fn open_session(
        &mut self,
        peer: PeerId,
        token: u64,
        claim: &Claim,
        door: &Address,
        nonce: Nonce,
        turn: Turn,
    ) -> Result<(), LibfabricError> {
        let at = usize::from(peer.index);
        if self.sessions.len() <= at {
            self.sessions.resize_with(at + 1, || None);
        }
        if self.sessions.get(at).is_some_and(Option::is_some) {
            return Err(LibfabricError::AddressRefused);
        }
        let granted = self.grant;
        let mut session = Session::new(peer, token, claim, door.clone(), nonce, granted, turn);
        session.routes = self.learn_ports(index_of(token), &claim.ports)?;
        if turn != self.recycle.turn() && self.recycle.is_under_way() {
            session.old_routes =
                self.learn_old_ports(index_of(token), &claim.ports).unwrap_or_default();
        }
        session.holds_door = self.door.hold(door);
        // From now on it is told what is withdrawn; and now, what was.
        session.says.gone = self.memory.open(token, peer);
        session.gone_parts = u8::try_from(session.says.gone.len()).unwrap_or(u8::MAX);
        if let Some(slot) = self.sessions.get_mut(at) {
            *slot = Some(Box::new(session));
            self.live.push(peer.index);
        }
        Ok(())
    }

    /// In how many parts the peer is told what was withdrawn before.
    fn gone_parts(&self, index: u16) -> u8 {
        let session = self.sessions.get(usize::from(index)).and_then(Option::as_ref);
        session.map_or(0, |session| session.gone_parts)
    }

    /// Makes a peer's ports known to each of our endpoints.
    pub(super) fn learn_ports(
        &mut self,
        index: u16,
        ports: &[Address],
    ) -> Result<Routes, LibfabricError> {
        let mut routes = Routes::new(ports.len());
        let wide = self.wide;
        for at in 0..self.ports.len() {
            for (n, address) in ports.iter().enumerate() {
                let Some(port) = self.ports.get_mut(at) else { continue };
                match port.lane.endpoint.learn(address) {
                    Ok(handle) => routes.push(handle),
                    Err(error) => {
                        // What was learnt is forgotten again.
                        for (earlier, port) in self.ports.iter_mut().enumerate().take(at + 1) {
                            let learnt = if earlier < at { ports.len() } else { n };
                            for address in ports.iter().take(learnt) {
                                port.lane.endpoint.forget(address);
                            }
                        }
                        return Err(error);
                    }
                }
            }
        }
        // Only now: until then another session of the peer's may have them.
        for (nic, port) in (0..).zip(self.ports.iter_mut()).filter(|_| !wide) {
            port.lane.attribute_all(nic, &routes, index);
        }
        Ok(routes)
    }
}
