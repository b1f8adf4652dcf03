//! Calls: how a session comes to be, and how both ends prove who they are.
//!
//! The messages and their order are `immwire_core::datagram`'s. A proof is a keyed hash over both nonces, the engine
//! that was called, and everything the prover claims; the roles differ, so it can be neither reflected nor relayed,
//! and the number of the call in the claim keeps a recorded one from being of use again. Without a group key the
//! proofs are not looked at.
//!
//! A claim names the prover's ports, and with each of them a queue pair for the session's letters: its end of a line.
//! The acceptor has connected its own to them, and so can hear, before it answers, with those that it could connect; the initiator says
//! that it is ready through one of them.
//!
//! Who gives up a call that it has proven says so, and again whenever it is answered (`GivenUp`).
//!
//! Each device has a door. A call goes from one of ours to one of theirs, and by another pair each time that it is
//! repeated, until it is answered (`immwire_core::doors`); answers go by the door that was asked, to the one that the
//! question names. A challenge is good for the door that it was sent to. A pair whose address is not known is passed over until it is found. A call of which
//! nothing could be said yet because others' addresses are looked up first uses up no patience (`immwire_core::patience`). When a peer has accepted,
//! or shown that it holds the group's key, its addresses are looked up before those of peers of which nothing was heard (`immwire_core::resolve`).
//!
//! # Invariants
//!
//! - Whoever calls costs one message in answer, and no memory, until it has shown that it is reached where it says; but
//!   for messages that are put off until an address was looked up, which are so many at most.
//! - Nobody is waited for: what needs an address that is not known is put off, and heard again when it is.
//! - A session is open here before its peer learns that it may write, and written to only when that has been said.
//! - What an answer names receives: a NIC whose line could not be connected has none in it.

use std::io;
use std::iter;
use std::time::Duration;

use immwire_core::datagram::{
    Address, Claim, DATAGRAM_MAX, GivenUp, Malformed, Message, Nonce, Nonces, Proof, Protocol,
    Retry,
};
use immwire_core::doors::Ways;
use immwire_core::id::{EngineId, MAX_NICS, PeerId, Time};
use immwire_core::life::{Life, Notice};
use immwire_core::line::{self, End};
use immwire_core::patience::Patience;
use immwire_core::peer::DownReason;
use immwire_core::port::{Door as Place, Queue, Stand, reaches};
use immwire_core::pulse::Watch;
use immwire_core::recycle::Turn;
use immwire_core::resolve::{Asker, Known, Reach};
use immwire_core::wire::{Hello, NetAddr, PROTOCOL_VERSION, Refusal};

use super::device::QueuePair;
use super::door::{From, Sent};
use super::lane::{Owner, Role};
use super::session::{Line, Made, Session};
use super::{Nic, VerbsError, VerbsProvider, new_token, random};
use crate::proof::{Prover, challenge, is_proven, proof};
use crate::provider::{ConnectError, Sink};

/// How long nothing may be heard of an engine that is called, until nobody is believed to be there: datagrams to nobody
/// are not refused. Whoever is there answers each message that is repeated.
const UNANSWERED: Duration = Duration::from_millis(2500);
/// How long a message is kept that waits for addresses, at most: each of them is known, or known not to answer, long
/// before.
const PUT_OFF_FOR: Duration = Duration::from_secs(3);
/// Messages that wait for addresses, at most: others are repeated by who sent them.
const PUT_OFF_MAX: usize = 64;
/// Calls that were given up, and are answered so, at most.
const GIVEN_UP: usize = 64;
/// What both ends must have in common: notes, paths and immediates as they are here.
const PROTOCOL: Protocol =
    Protocol { number: u32::from_be_bytes(*b"IWrc"), version: 2, data_bytes: 4 };

/// A call of ours that has not been answered.
#[derive(Debug)]
struct Call {
    peer: PeerId,
    token: u64,
    target: EngineId,
    ways: Ways<Place>,
    hello: Hello,
    /// Where its session is to sit.
    seat: u16,
    /// By NIC of both; of nobody yet.
    lines: Lines,
    initiator: Nonce,
    /// By door of ours, once a challenge has come to it: the nonce in it.
    acceptors: [Option<Nonce>; MAX_NICS],
    retry: Retry,
    /// It is given up if nothing more is heard.
    patience: Patience,
    /// Nothing has been said by the pair whose turn it is: its address is not known.
    waits: bool,
    /// Its answer has waited for addresses.
    put_off: bool,
}

impl Call {
    /// When something is next to be done.
    fn due(&self) -> Time {
        self.retry.due().min(self.patience.due())
    }

    /// The one who is called is there.
    fn heard(&mut self, now: Time) {
        self.retry = Retry::start(now);
        self.patience = Patience::start(now, UNANSWERED);
    }

    /// The peer may have opened its side.
    fn is_proven(&self) -> bool {
        self.acceptors.iter().any(Option::is_some)
    }
}

/// What has become of a message that makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hearing {
    Done,
    /// Nothing yet: it is to be heard again when addresses that it needs were looked up.
    Later,
}

/// A message that is to be heard again.
#[derive(Debug)]
struct PutOff {
    bytes: Vec<u8>,
    from: From,
    until: Time,
}

/// The calls of ours, and what our answers to others' follow from.
#[derive(Debug)]
pub(super) struct Handshakes {
    secret: [u8; 32],
    calls: Vec<Call>,
    given_up: GivenUp<Ways<Place>, GIVEN_UP>,
    put_off: Vec<PutOff>,
}

impl Handshakes {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            secret: random()?,
            calls: Vec::new(),
            given_up: GivenUp::new(),
            put_off: Vec::new(),
        })
    }

    /// When a call is to be repeated.
    pub(super) fn next_deadline(&self) -> Time {
        self.calls.iter().map(Call::due).min().unwrap_or(Time::NEVER)
    }

    /// We look again, for the first time since `before`.
    pub(super) fn look(&mut self, before: Time, now: Time) {
        self.calls.iter_mut().for_each(|call| call.patience.look(before, now));
    }

    /// Gives all calls up.
    pub(super) fn clear(&mut self) {
        self.calls.clear();
    }

    /// What a caller has to show that it has received.
    fn challenge(&self, initiator: &Nonce, door: &Address) -> Nonces {
        challenge(&self.secret, initiator, door)
    }

    /// A message waits for addresses.
    pub(super) fn put_off(&mut self, now: Time, bytes: &[u8], from: From) {
        let known = self.put_off.iter().any(|it| it.bytes == bytes);
        if !known && self.put_off.len() < PUT_OFF_MAX {
            let until = now.after(PUT_OFF_FOR);
            self.put_off.push(PutOff { bytes: bytes.to_vec(), from, until });
        }
    }

    /// The call of that nonce, which has been answered.
    fn take(&mut self, initiator: &Nonce) -> Option<Call> {
        let at = self.calls.iter().position(|call| call.initiator == *initiator)?;
        Some(self.calls.swap_remove(at))
    }
}

/// A claim's ports, and the queue pair for letters that comes with each.
fn stands(claim: &Claim) -> Option<heapless::Vec<Stand, MAX_NICS>> {
    claim.ports.iter().map(|address| Stand::decode(address)).collect()
}

/// Our ends of a session's lines; `None` where a NIC cannot be used.
type Lines = heapless::Vec<Option<QueuePair>, MAX_NICS>;

/// The number of the door at this place.
fn door_at(at: usize) -> u8 {
    u8::try_from(at).unwrap_or(u8::MAX)
}

impl VerbsProvider {
    // ---- calling ----

    pub(super) fn call(
        &mut self,
        peer: PeerId,
        address: &NetAddr,
        hello: &Hello,
    ) -> Result<(), ConnectError> {
        let malformed = |what| ConnectError::Malformed { what };
        let doors = address.nics().iter().map(|nic| Place::decode(&nic.address));
        let doors: Option<heapless::Vec<_, MAX_NICS>> = doors.collect();
        let mut doors = doors.ok_or(malformed("it is no door's"))?;
        // One that is ours leads to nobody else: it was another's before, or two networks have the same addresses.
        let named = doors.len();
        doors.retain(|door| !self.doors.places().any(|ours| ours == door));
        if named > 0 && doors.is_empty() {
            return Err(ConnectError::Ours);
        }
        let ways = Ways::new(self.doors.count(), doors);
        let mut ways = ways.ok_or(malformed("it names no door"))?;
        let theirs = ways.theirs().iter().map(|door| &door.port);
        reaches(self.doors.places().map(|door| &door.port), theirs)
            .map_err(|why| ConnectError::NoRoute { why })?;
        ways.start(self.may_lead());
        let may_say = ways.may_say(self.known());
        let lacks = |why: VerbsError| ConnectError::Local { why: why.into() };
        let token = new_token().map_err(VerbsError::Random).map_err(lacks)?;
        let initiator = random().map_err(VerbsError::Random).map_err(lacks)?;
        let seat = self.vacant().map_err(lacks)?;
        let lines = self.lines(address.nics().len(), seat).map_err(lacks)?;
        let call = Call {
            peer,
            token,
            target: address.engine(),
            ways,
            hello: hello.clone(),
            seat,
            lines,
            initiator,
            acceptors: [None; MAX_NICS],
            retry: Retry::start(self.now),
            patience: Patience::start(self.now, UNANSWERED),
            waits: true,
            put_off: false,
        };
        self.handshakes.calls.push(call);
        if may_say {
            self.say_call(self.handshakes.calls.len() - 1);
        }
        Ok(())
    }

    /// Gives up a call of ours.
    pub(super) fn hang_up(&mut self, peer: PeerId) {
        while let Some(at) = self.handshakes.calls.iter().position(|call| call.peer == peer) {
            let call = self.handshakes.calls.swap_remove(at);
            if !call.is_proven() {
                continue; // It holds nothing for us yet.
            }
            if let Some((ours, door)) = call.ways.pair() {
                self.revoke_call(call.initiator, ours, door);
            }
            self.handshakes.given_up.note(call.initiator, call.ways);
        }
    }

    /// Gives up all calls of ours.
    pub(super) fn hang_up_all(&mut self) {
        while let Some(peer) = self.handshakes.calls.first().map(|call| call.peer) {
            self.hang_up(peer);
        }
    }

    /// Says of a call of ours that it is given up; that may be lost.
    fn revoke_call(&mut self, nonce: Nonce, ours: usize, door: &Place) {
        let message = Message::Refuse { nonce, why: Refusal::Stale };
        let to = (door_at(ours), door, Asker::Us);
        self.doors.send(&mut self.resolver, to, &message, self.now);
    }

    /// Whether there may be a way from a door of ours to one of a peer's, as far as is known here.
    fn may_lead(&self) -> impl Fn(usize, &Place) -> bool {
        move |ours, theirs| {
            let nic = self.doors.nic(ours).and_then(|nic| self.ports.get(nic));
            let ours = self.doors.place(ours).filter(|_| nic.is_some_and(Nic::is_usable));
            ours.is_some_and(|ours| ours.port.route(&theirs.port).is_ok())
        }
    }

    /// How much is known of the address of a peer's door, from one of ours.
    fn known(&self) -> impl Fn(usize, &Place) -> Known {
        let may_lead = self.may_lead();
        move |ours, theirs| {
            let nic = self.doors.nic(ours).filter(|_| may_lead(ours, theirs));
            nic.map_or(Known::Failed, |nic| self.resolver.known(self.now, nic, &theirs.port))
        }
    }

    /// Addresses were looked up: says and hears what has waited for them.
    pub(super) fn resume<S: Sink>(&mut self, sink: &mut S) {
        let now = self.now;
        for at in 0..self.handshakes.calls.len() {
            let waiting = self.handshakes.calls.get(at).filter(|call| call.waits);
            let Some(mut ways) = waiting.map(|call| call.ways.clone()) else { continue };
            let is_known = ways.resume(self.known());
            let Some(call) = self.handshakes.calls.get_mut(at) else { break };
            let soon = Retry::start(now);
            if is_known {
                (call.ways, call.retry) = (ways, soon);
                self.say_call(at);
            } else {
                if soon.due() < call.retry.due() {
                    // There may be room to look for another.
                    call.retry = soon;
                }
                self.be_patient(at);
            }
        }
        for PutOff { bytes, from, until } in std::mem::take(&mut self.handshakes.put_off) {
            if now < until && self.hear_packet(&bytes, &from, sink) == Some(Hearing::Later) {
                self.handshakes.put_off.push(PutOff { bytes, from, until });
            }
        }
    }

    /// What has come through the door.
    pub(super) fn hear_packet<S: Sink>(
        &mut self,
        bytes: &[u8],
        from: &From,
        sink: &mut S,
    ) -> Option<Hearing> {
        let heard = match Message::decode(bytes) {
            Ok(message) => self.hear_handshake(&message, from, sink),
            Err(Malformed::Version { .. }) => self.hear_other_version(bytes, from, sink),
            Err(Malformed::Bytes) => None,
        };
        self.stats.ignored += u64::from(heard.is_none());
        heard
    }

    /// Repeats what has not been answered; gives up whom nothing is heard of.
    pub(super) fn repeat_calls<S: Sink>(&mut self, sink: &mut S) {
        let now = self.now;
        let mut at = 0;
        // Not an iterator: a call that is given up leaves the list.
        while let Some(call) = self.handshakes.calls.get_mut(at) {
            if now >= call.patience.due() {
                let peer = call.peer;
                self.fail_call(peer, DownReason::NeverAnswered, sink);
                continue;
            }
            if call.retry.is_due(now) && self.try_another(at) {
                self.say_call(at);
            }
            at += 1;
        }
    }

    /// A call was not answered, or not said: what is said next goes by another pair of doors, if there is one that is of use now. Whether anything may
    /// be said.
    fn try_another(&mut self, at: usize) -> bool {
        let Some(mut ways) = self.handshakes.calls.get(at).map(|call| call.ways.clone()) else {
            return false;
        };
        let is_new = ways.try_another(self.known());
        let may_say = ways.may_say(self.known());
        if let Some(call) = self.handshakes.calls.get_mut(at) {
            call.ways = ways;
            if is_new {
                call.retry = Retry::start(self.now);
            }
        }
        may_say
    }

    /// Says what is next in a call.
    fn say_call(&mut self, at: usize) {
        let Some(call) = self.handshakes.calls.get(at) else { return };
        let Some((ours, door)) = call.ways.pair() else { return };
        let Some(own) = self.doors.address(ours).cloned() else { return };
        let to = (door_at(ours), door, Asker::Us);
        let Some(acceptor) = call.acceptors.get(ours).copied().flatten() else {
            let message = Message::Call { nonce: call.initiator, target: call.target, door: own };
            let sent = self.doors.send(&mut self.resolver, to, &message, self.now);
            self.was_said(at, sent);
            return;
        };
        let nonces = Nonces { initiator: call.initiator, acceptor };
        let queue = |line: &Option<QueuePair>| line.as_ref().map(QueuePair::queue);
        let said = self.claim(call.token, call.lines.iter().map(queue), call.hello.clone());
        let mut bytes = [0; DATAGRAM_MAX];
        let Some(claim) = said.encode(&mut bytes).and_then(|len| bytes.get(..len)) else { return };
        let key = self.config.group_key.as_ref();
        let proof = proof(key, Prover::Initiator, &nonces, call.target, claim);
        let message = Message::Prove { nonces, door: own, proof: *proof.as_bytes(), claim };
        let sent = self.doors.send(&mut self.resolver, to, &message, self.now);
        self.was_said(at, sent);
    }

    /// What was to be said in a call was sent, or not.
    fn was_said(&mut self, at: usize, sent: Sent) {
        if let Some(call) = self.handshakes.calls.get_mut(at) {
            call.waits = sent != Sent::Posted;
        }
        self.be_patient(at);
    }

    /// While nothing can be said in a call because others' addresses are looked up first, it uses up no patience.
    fn be_patient(&mut self, at: usize) {
        let Some(call) = self.handshakes.calls.get(at) else { return };
        let is_held_up = call.waits && call.ways.is_held_up(self.known());
        let now = self.now;
        if let Some(call) = self.handshakes.calls.get_mut(at) {
            call.patience.wait(now, is_held_up);
        }
    }

    /// What we say of ourselves, with our ends of lines by NIC, as far as there are any.
    fn claim(&self, token: u64, lines: impl Iterator<Item = Option<Queue>>, hello: Hello) -> Claim {
        let queues = lines.chain(iter::repeat(None)).map(Option::unwrap_or_default);
        let ports = self.ports.iter().map(|port| port.device().facts.port).zip(queues);
        let ports = ports.map(|(port, queue)| Stand { port, queue }.encode()).collect();
        // What is withdrawn is told by notes, which come in order.
        let (grant, protocol, turn, gone) = (self.grant, PROTOCOL, Turn::default(), 0);
        Claim { token, grant, protocol, turn, ports, gone, hello }
    }

    fn fail_call<S: Sink>(&mut self, peer: PeerId, reason: DownReason, sink: &mut S) {
        self.hang_up(peer);
        sink.disconnected(peer, reason);
    }

    // ---- hearing ----

    /// A message that belongs to a handshake; `None` if it is none, or not to be believed.
    fn hear_handshake<S: Sink>(
        &mut self,
        message: &Message<'_>,
        from: &From,
        sink: &mut S,
    ) -> Option<Hearing> {
        match *message {
            Message::Call { nonce, target, ref door } => self.challenge(nonce, target, door, from),
            Message::Challenge(nonces) => self.challenged(&nonces, from),
            Message::Prove { ref nonces, ref door, proof, claim } => {
                self.proven(nonces, door, proof, (claim, from), sink)
            }
            Message::Accept { nonce, proof, claim } => {
                self.accepted(&nonce, proof, (claim, from), sink)
            }
            Message::Refuse { nonce, why } => self.refused(&nonce, why, from, sink),
            // What is said in a session does not come through the door.
            Message::Session { .. } => None,
        }
    }

    /// A message of another version of the protocol: whoever calls is told so, and so is who is refused.
    fn hear_other_version<S: Sink>(
        &mut self,
        bytes: &[u8],
        from: &From,
        sink: &mut S,
    ) -> Option<Hearing> {
        match Message::decode_of_any_version(bytes).ok()? {
            (theirs, Message::Call { nonce, target, ref door }) => {
                let place = Place::decode(door).filter(|place| from.is(&place.port))?;
                let is_us = target == self.config.engine;
                let version = Refusal::Version { ours: PROTOCOL_VERSION, theirs };
                let why = if is_us { version } else { Refusal::Elsewhere };
                self.refuse(nonce, (from.door, &place), why)
            }
            (_, message) => self.hear_handshake(&message, from, sink),
        }
    }

    fn refuse(
        &mut self,
        nonce: Nonce,
        (through, door): (u8, &Place),
        why: Refusal,
    ) -> Option<Hearing> {
        let message = Message::Refuse { nonce, why };
        let to = (through, door, Asker::Stranger);
        // If it is lost, the caller repeats its message.
        if self.doors.send(&mut self.resolver, to, &message, self.now) == Sent::Waits {
            return Some(Hearing::Later);
        }
        self.stats.refused += 1;
        Some(Hearing::Done)
    }

    /// Whether the lines of a session can be connected ([`Reach::of_all`]).
    fn can_connect(&mut self, stands: &[Stand], asker: Asker) -> Reach {
        let (now, resolver) = (self.now, &mut self.resolver);
        let pairs = self.ports.iter().enumerate().zip(stands);
        // All of them are asked for, so that they are looked up at a time.
        let reaches: heapless::Vec<_, MAX_NICS> = pairs
            .filter(|((_, port), stand)| port.is_usable() && stand.queue.is_some())
            .map(|((nic, _), stand)| resolver.reach(now, nic, &stand.port, asker))
            .collect();
        Reach::of_all(reaches)
    }

    fn challenge(
        &mut self,
        nonce: Nonce,
        target: EngineId,
        door: &Address,
        from: &From,
    ) -> Option<Hearing> {
        // Nobody has us answer somebody else, or look for somebody who is not there.
        let place = Place::decode(door).filter(|place| from.is(&place.port))?;
        if target != self.config.engine {
            // Somebody else had this address before us.
            return self.refuse(nonce, (from.door, &place), Refusal::Elsewhere);
        }
        let message = Message::Challenge(self.handshakes.challenge(&nonce, door));
        let to = (from.door, &place, Asker::Stranger);
        Some(match self.doors.send(&mut self.resolver, to, &message, self.now) {
            Sent::Waits => Hearing::Later,
            Sent::Posted | Sent::Lost => Hearing::Done,
        })
    }

    fn challenged(&mut self, nonces: &Nonces, from: &From) -> Option<Hearing> {
        let mut calls = self.handshakes.calls.iter();
        let at = calls.position(|call| call.initiator == nonces.initiator)?;
        let call = self.handshakes.calls.get_mut(at)?;
        let is_first = !call.is_proven();
        let acceptor = call.acceptors.get_mut(usize::from(from.door))?;
        // The first challenge counts: whoever made up another does not keep us from proving to this one.
        if acceptor.is_some() {
            return Some(Hearing::Done);
        }
        *acceptor = Some(nonces.acceptor);
        // Of a pair that is not used any more, it is kept for when it is.
        let ours = usize::from(from.door);
        if is_first || call.ways.pair().is_some_and(|pair| pair.0 == ours) {
            call.heard(self.now);
            let answered = call.ways.theirs().iter().find(|door| from.is(&door.port)).copied();
            if let Some(door) = answered {
                call.ways.choose(ours, &door);
            }
            self.say_call(at);
        }
        Some(Hearing::Done)
    }

    fn proven<S: Sink>(
        &mut self,
        nonces: &Nonces,
        door: &Address,
        shown: Proof,
        (claim, from): (&[u8], &From),
        sink: &mut S,
    ) -> Option<Hearing> {
        let initiator = nonces.initiator;
        let place = Place::decode(door).filter(|place| from.is(&place.port))?;
        if self.handshakes.challenge(&initiator, door) != *nonces {
            return None;
        }
        let key = self.config.group_key.as_ref();
        let expected = proof(key, Prover::Initiator, nonces, self.config.engine, claim);
        let caller = (from.door, &place);
        if key.is_some() && !is_proven(expected, shown) {
            return self.refuse(initiator, caller, Refusal::Unauthorised);
        }
        let known = self.live.iter().copied().find(|&index| {
            let session = self.sessions.get(usize::from(index)).and_then(Option::as_ref);
            session.is_some_and(|session| session.nonce == initiator)
        });
        if let Some(session) = known.and_then(|index| self.session(index)) {
            // Our answer was lost, or is late. It goes where it is asked for now.
            (session.through, session.door) = (from.door, place);
            session.says.accept = session.life.is_greeting();
            self.urgent = true;
            return Some(Hearing::Done);
        }
        let claim = match Claim::decode(claim) {
            Ok(claim) if claim.protocol == PROTOCOL => claim,
            _ => return self.refuse(initiator, caller, Refusal::Malformed),
        };
        let Some(stands) = stands(&claim) else {
            return self.refuse(initiator, caller, Refusal::Malformed);
        };
        // Whoever holds the key may have us look for more, and sooner.
        let has_key = self.config.group_key.is_some();
        let asker = if has_key { Asker::Heard } else { Asker::Stranger };
        match self.can_connect(&stands, asker) {
            Reach::Waits => return Some(Hearing::Later),
            // It is repeated.
            Reach::Full => return Some(Hearing::Done),
            Reach::Lost | Reach::NoRoute => return self.refuse(initiator, caller, Refusal::NoWay),
            Reach::Reached => {}
        }
        let (peer, hello) = match sink.incoming(&claim.hello) {
            Ok(answer) => answer,
            Err(why) => return self.refuse(initiator, caller, why),
        };
        // A call of our own to the same peer has crossed with this one, and is given up for it.
        self.hang_up(peer);
        match self.welcome(peer, nonces, caller, &claim, hello) {
            Ok(()) => sink.connected(peer, &claim.hello),
            Err(error) => {
                tracing::warn!(%peer, %error, "a session could not be opened");
                sink.disconnected(peer, DownReason::Disconnected);
                // Its next word would be a call that was answered.
                let no_way = matches!(error, VerbsError::Unreachable);
                let why = if no_way { Refusal::NoWay } else { Refusal::Busy };
                return self.refuse(initiator, caller, why);
            }
        }
        Some(Hearing::Done)
    }

    /// Opens our side for one who has called.
    fn welcome(
        &mut self,
        peer: PeerId,
        nonces: &Nonces,
        (through, door): (u8, &Place),
        claim: &Claim,
        hello: Hello,
    ) -> Result<(), VerbsError> {
        let token = new_token().map_err(VerbsError::Random)?;
        let seat = self.vacant()?;
        let pairs = self.lines(claim.ports.len(), seat)?;
        let stands = stands(claim).ok_or(VerbsError::Unreachable)?;
        let lines = self.connected(peer, (End::Called, pairs), &stands)?;
        let queue = |line: &Line| line.pair.as_ref().map(QueuePair::queue);
        let ours = self.claim(token, lines.iter().map(queue), hello);
        let mut accept = vec![0; DATAGRAM_MAX];
        let len = ours.encode(&mut accept).ok_or(VerbsError::Unreachable)?;
        accept.truncate(len);
        let key = self.config.group_key.as_ref();
        // About the one who called: so that it is told from an answer to somebody else.
        let target = claim.hello.engine();
        let proof = proof(key, Prover::Acceptor, nonces, target, &accept);
        let life = Life::greeting(self.now);
        let (caller, ends) = ((through, *door), (seat, lines, &*stands));
        let index = self.open_session(peer, token, claim, caller, nonces.initiator, ends);
        if let Some(session) = self.session(index) {
            session.life = life;
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
        (bytes, from): (&[u8], &From),
        sink: &mut S,
    ) -> Option<Hearing> {
        let call = self.handshakes.calls.iter().find(|call| call.initiator == *nonce);
        let Some(call) = call else {
            if let Some(ways) = self.handshakes.given_up.answered(nonce) {
                let answered = ways.theirs().iter().find(|door| from.is(&door.port)).copied();
                self.revoke_call(*nonce, from.door.into(), &answered?);
                return Some(Hearing::Done);
            }
            // Repeated, while our word that we know was on its way.
            let claim = Claim::decode(bytes).ok()?;
            let sessions = self.sessions.iter().flatten();
            let known = |session: &Session| session.nonce == *nonce;
            return (claim.protocol == PROTOCOL && sessions.map(Box::as_ref).any(known))
                .then_some(Hearing::Done);
        };
        if !call.is_proven() {
            return None;
        }
        let key = self.config.group_key.as_ref();
        // To whichever of our doors it had been challenged when it opened its side.
        let is_shown = call.acceptors.iter().flatten().any(|&acceptor| {
            let nonces = Nonces { initiator: *nonce, acceptor };
            is_proven(proof(key, Prover::Acceptor, &nonces, self.config.engine, bytes), shown)
        });
        let peer = call.peer;
        if key.is_some() && !is_shown {
            self.fail_call(peer, DownReason::Refused(Refusal::Unauthorised), sink);
            return Some(Hearing::Done);
        }
        let claim = Claim::decode(bytes).ok();
        let claim =
            claim.filter(|claim| claim.hello.engine() == call.target && claim.protocol == PROTOCOL);
        let Some((claim, stands)) = claim.and_then(|it| stands(&it).map(|stands| (it, stands)))
        else {
            self.fail_call(peer, DownReason::Protocol, sink);
            return Some(Hearing::Done);
        };
        // It waits for us, as those that we call and nobody hears of do not.
        match self.can_connect(&stands, Asker::Heard) {
            Reach::Reached => {}
            Reach::Lost | Reach::NoRoute => {
                self.fail_call(peer, DownReason::Refused(Refusal::NoWay), sink);
                return Some(Hearing::Done);
            }
            Reach::Waits | Reach::Full => {
                let now = self.now;
                let mut calls = self.handshakes.calls.iter_mut();
                let call = calls.find(|call| call.initiator == *nonce)?;
                // The peer is there. It is given time once, however often it answers.
                if !std::mem::replace(&mut call.put_off, true) {
                    call.heard(now);
                }
                return Some(Hearing::Later);
            }
        }
        let Call { token, ways, seat, lines, .. } = self.handshakes.take(nonce)?;
        let (ours, door) = ways.pair()?;
        let door = *door;
        match self.connected(peer, (End::Caller, lines), &stands) {
            Ok(lines) => {
                let (called, ends) = ((door_at(ours), door), (seat, lines, &*stands));
                let index = self.open_session(peer, token, &claim, called, *nonce, ends);
                if let Some(session) = self.session(index) {
                    session.says.ready = true;
                }
                self.urgent = true;
                sink.connected(peer, &claim.hello);
            }
            Err(error) => {
                tracing::warn!(%peer, %error, "a session could not be opened");
                self.revoke_call(*nonce, ours, &door);
                self.handshakes.given_up.note(*nonce, ways);
                sink.disconnected(peer, DownReason::Disconnected);
            }
        }
        Some(Hearing::Done)
    }

    /// A call of ours is refused, or a peer's is taken back that we have answered.
    fn refused<S: Sink>(
        &mut self,
        nonce: &Nonce,
        why: Refusal,
        from: &From,
        sink: &mut S,
    ) -> Option<Hearing> {
        if why == Refusal::Crossed {
            // The peer keeps its own call to us. When that is answered ours is over; but the peer may give its up,
            // so that ours is repeated until then.
            let mut calls = self.handshakes.calls.iter_mut();
            calls.find(|call| call.initiator == *nonce)?.heard(self.now);
            return Some(Hearing::Done);
        }
        if let Some(call) = self.handshakes.take(nonce) {
            sink.disconnected(call.peer, DownReason::Refused(why));
            return Some(Hearing::Done);
        }
        let now = self.now;
        let session = self.sessions.iter_mut().flatten().find(|session| {
            session.nonce == *nonce && session.life.is_greeting() && from.is(&session.door.port)
        })?;
        session.life.leave(now, Notice::Untold, Some(DownReason::Disconnected));
        self.urgent = true;
        Some(Hearing::Done)
    }

    // ---- sessions ----

    /// A seat in which no session sits, and that none of our calls is to have. O(sessions and calls).
    fn vacant(&self) -> Result<u16, VerbsError> {
        let calls = &self.handshakes.calls;
        let mut taken: Vec<bool> = self.sessions.iter().map(Option::is_some).collect();
        taken.resize(taken.len() + calls.len() + 1, false);
        for call in calls {
            if let Some(taken) = taken.get_mut(usize::from(call.seat)) {
                *taken = true;
            }
        }
        let seat = taken.iter().position(|taken| !taken).unwrap_or(taken.len());
        u16::try_from(seat).map_err(|_| VerbsError::Unreachable)
    }

    /// Our ends of lines to a peer of so many NICs, not connected yet, for a session in this seat. A NIC that has none to give does without.
    fn lines(&mut self, theirs: usize, seat: u16) -> Result<Lines, VerbsError> {
        let (mut lines, mut failed) = (Lines::new(), None);
        for port in self.ports.iter_mut().take(theirs) {
            let line = port.is_usable().then(|| port.line(seat)).transpose();
            let line = line.unwrap_or_else(|error| {
                tracing::warn!(nic = port.device().name, %error, "a line could not be made");
                failed = Some(error);
                None
            });
            let _ = lines.push(line);
        }
        match failed {
            Some(error) if lines.iter().all(Option::is_none) => Err(error),
            _ => Ok(lines),
        }
    }

    /// Connects our ends of lines to the peer's, as far as can be. Those that cannot be connected are gone.
    fn connected(
        &mut self,
        peer: PeerId,
        (end, pairs): (End, Lines),
        stands: &[Stand],
    ) -> Result<heapless::Vec<Line, MAX_NICS>, VerbsError> {
        let mut lines = heapless::Vec::new();
        for (at, (pair, stand)) in pairs.into_iter().zip(stands).enumerate() {
            let pair = pair.filter(|_| stand.queue.is_some()).filter(|pair| {
                let there = (&stand.port, stand.queue);
                let connected = self.resolver.connect(self.now, (at, pair), there);
                let said = |error: &_| tracing::warn!(%peer, %error, "a line could not be opened");
                connected.inspect_err(said).is_ok()
            });
            let state = line::Line::new(self.now, end, pair.is_some());
            let watch = Watch::default();
            let _ = lines.push(Line { pair, is_drained: false, state, completed: 0, watch });
        }
        if lines.iter().all(|line: &Line| line.pair.is_none()) {
            return Err(VerbsError::Unreachable);
        }
        Ok(lines)
    }

    /// Makes an open session of connected lines, in this seat; where it is.
    fn open_session(
        &mut self,
        peer: PeerId,
        token: u64,
        claim: &Claim,
        (through, door): (u8, Place),
        nonce: Nonce,
        (index, lines, stands): (u16, heapless::Vec<Line, MAX_NICS>, &[Stand]),
    ) -> u16 {
        let (granted, nics) = (self.grant, self.ports.len());
        for (line, port) in lines.iter().zip(&mut self.ports) {
            if let Some(pair) = &line.pair {
                port.owners.set(pair.number(), Some(Owner { session: index, role: Role::Line }));
            }
        }
        let ports = stands.iter().map(|stand| stand.port).collect();
        let made = Made { peer, token, nonce, door, through, ports, lines, granted, nics };
        let mut session = Box::new(Session::new(made, claim));
        // What was withdrawn while there was no session, its peer may hold descriptors of all the same. It hears of it
        // before it may write: notes keep their order.
        session.says.withdraw = self.memory.regions.open(token, peer);
        let session = Some(session);
        // Those before it may be of calls that are not answered yet.
        let seats = self.sessions.len().max(usize::from(index) + 1);
        self.sessions.resize_with(seats, || None);
        if let Some(slot) = self.sessions.get_mut(usize::from(index)) {
            *slot = session;
        }
        self.live.push(index);
        let seat = usize::from(peer.index);
        if self.seats.len() <= seat {
            self.seats.resize(seat + 1, None);
        }
        if let Some(slot) = self.seats.get_mut(seat) {
            *slot = Some(index);
        }
        index
    }
}
