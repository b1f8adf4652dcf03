//! One peer, as the provider sees it: where it is written to, what it may be sent, how far its end is.
//!
//! Knows no endpoint and sends nothing: it remembers what is to be said, and what stands in the way.

use immwire_core::credit::{Allowance, Takings, all_taken};
use immwire_core::datagram::{Address, Addresses, Claim, Counts, Nonce, Proof, Retry, Tenants};
use immwire_core::id::{EngineId, MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::opening::{Asked, Openings, Turns};
use immwire_core::origin::{Holder, Recall};
use immwire_core::peer::DownReason;
use immwire_core::recycle::{Standing, Turn};
use immwire_core::region::MrDesc;
use immwire_core::signal::Channel;
use immwire_core::tenant::{Parts, SLOTS, Tenant, Withdrawn};
use immwire_core::uptake::Refusals;

use crate::withdrawal::Releasing;

/// Handles of a peer's ports, by our NIC and its.
#[derive(Debug, Default)]
pub(super) struct Routes {
    all: Vec<Route>,
    theirs: usize,
}

/// From one of our ports to one of a peer's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    pub(super) handle: u64,
    pub(super) channel: Channel,
    /// Whether libfabric takes anything for it.
    pub(super) refusals: Refusals,
    /// Something that was written by it got there.
    pub(super) is_reached: bool,
}

impl Routes {
    pub(super) fn new(theirs: usize) -> Self {
        Self { all: Vec::new(), theirs }
    }

    /// The ports as the next of our NICs reaches them.
    pub(super) fn push(&mut self, handle: u64) {
        let (channel, refusals) = (Channel::default(), Refusals::default());
        self.all.push(Route { handle, channel, refusals, is_reached: false });
    }

    #[inline]
    pub(super) fn get(&self, nic: NicIndex, remote_nic: NicIndex) -> Option<u64> {
        self.all.get(self.at(nic, remote_nic)?).map(|route| route.handle)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, nic: NicIndex, remote_nic: NicIndex) -> Option<&mut Route> {
        let at = self.at(nic, remote_nic)?;
        self.all.get_mut(at)
    }

    #[inline]
    fn at(&self, nic: NicIndex, remote_nic: NicIndex) -> Option<usize> {
        let remote_nic = usize::from(remote_nic);
        (remote_nic < self.theirs).then_some(usize::from(nic) * self.theirs + remote_nic)
    }

    /// Each of them, with our NIC and the peer's.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (NicIndex, NicIndex, &mut Route)> {
        let theirs = self.theirs;
        self.all.iter_mut().enumerate().filter_map(move |(at, route)| {
            let (nic, remote) = (at.checked_div(theirs)?, at.checked_rem(theirs)?);
            Some((NicIndex::try_from(nic).ok()?, NicIndex::try_from(remote).ok()?, route))
        })
    }

    /// Routes whose pieces wait for one that asks: our NIC, and the peer's.
    pub(super) fn owed(&self) -> impl Iterator<Item = (NicIndex, NicIndex)> + '_ {
        let owed = self.all.iter().enumerate().filter(|(_, route)| route.channel.is_owed());
        owed.filter_map(|(at, _)| {
            let (nic, remote) = (at.checked_div(self.theirs)?, at.checked_rem(self.theirs)?);
            Some((NicIndex::try_from(nic).ok()?, NicIndex::try_from(remote).ok()?))
        })
    }
}

/// Ports that are not written to any more, and from which something may still come.
#[derive(Debug, Default)]
pub(super) struct Retired {
    pub(super) ports: Addresses,
    /// From our endpoints, and from those that are being replaced.
    pub(super) routes: Routes,
    pub(super) old_routes: Routes,
}

/// How far the session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// We have accepted it, and it has not said that it knows: nothing is posted.
    Greeting {
        until: Time,
        retry: Retry,
    },
    Open,
    /// Nothing more is posted. It is over when nothing is in flight; what is at `cut`, is cut off.
    Leaving {
        cut: Time,
        /// To be reported, unless the engine itself wanted it.
        reason: Option<DownReason>,
    },
}

/// What is to be said to the peer when there is room.
#[derive(Debug, Default)]
pub(super) struct Says {
    pub(super) ready: bool,
    pub(super) accept: bool,
    /// Of our NICs.
    pub(super) taken: [bool; MAX_NICS],
    pub(super) withdraw: Vec<Tenant>,
    pub(super) withdrawn: Vec<Tenant>,
    pub(super) moves: bool,
    pub(super) moved: Option<Turn>,
    pub(super) opened: Asked,
    /// Parts of what was withdrawn before, the last one first.
    pub(super) gone: Vec<(u8, Tenants)>,
}

impl Says {
    pub(super) fn is_empty(&self) -> bool {
        let Self { ready, accept, taken, withdraw, withdrawn, moves, moved, opened, gone } = self;
        !ready
            && !accept
            && !taken.contains(&true)
            && withdraw.is_empty()
            && withdrawn.is_empty()
            && !moves
            && moved.is_none()
            && opened.is_empty()
            && gone.is_empty()
    }
}

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) peer: PeerId,
    pub(super) engine: EngineId,
    /// Whether its engine calls again, with these endpoints.
    pub(super) recalled: Option<Recall>,
    /// Ours: what the peer puts into what it sends.
    pub(super) token: u64,
    pub(super) their_token: u64,
    /// Of the call that it came from.
    pub(super) nonce: Nonce,
    /// The acceptor's answer, to be repeated.
    pub(super) accept: Vec<u8>,
    pub(super) accept_proof: Proof,
    pub(super) door: Address,
    /// The door is kept known for it.
    pub(super) holds_door: bool,
    pub(super) state: State,
    pub(super) mailbox: MrDesc,
    /// Its ports, and the replacement that they are of.
    pub(super) ports: Addresses,
    pub(super) ports_turn: Turn,
    /// Its next ports: what is in flight to the present ones is to end first.
    pub(super) shift: Option<(Turn, Addresses)>,
    /// From our endpoints, and from those that are being replaced.
    pub(super) routes: Routes,
    pub(super) old_routes: Routes,
    /// Its ports before it replaced them, where a device takes writes of those alone that it knows: something may
    /// be under way from there until they are closed.
    pub(super) retired: Retired,
    /// If it is the peer that opens connections: those between its endpoints and ours, and between its and
    /// those that are being replaced.
    pub(super) openings: Option<Openings>,
    pub(super) old_openings: Option<Openings>,
    /// What it has asked us to open.
    pub(super) to_open: Asked,
    /// Pieces in flight on our endpoints, and on those that are being replaced.
    pub(super) in_flight: u32,
    pub(super) old_in_flight: u32,
    /// The last replacement of ours that it has answered, with all that it sent before taken.
    pub(super) moved: Turn,
    /// It has answered this one; so many of its immediates are to be taken, by NIC of ours.
    pub(super) arrears: Option<(Turn, Counts)>,
    /// What it had sent when it said that it leaves, by NIC of ours, and how long we wait for that.
    pub(super) parting: Option<(Time, Counts)>,
    /// By NIC of its.
    pub(super) allowances: [Allowance; MAX_NICS],
    /// By NIC of ours.
    pub(super) takings: [Takings; MAX_NICS],
    pub(super) withdrawn: Withdrawn<Box<[u32]>>,
    /// Whether it has told us what it withdrew before; and in how many parts we tell it.
    pub(super) gone: Parts,
    pub(super) gone_parts: u8,
    /// Regions of its that are withdrawn, and that something may be in flight to.
    pub(super) releasing: Releasing,
    pub(super) says: Says,
    /// When something that was written to it got there last.
    pub(super) reached: Option<Time>,
    /// Some of its routes may have been refused.
    pub(super) is_refused: bool,
    /// Messages under way to it.
    pub(super) under_way: u8,
    /// It has nothing in flight to us, and never will have.
    pub(super) is_quiet: bool,
    /// Of what we posted, something failed or was cut off: the peer may not know yet.
    pub(super) was_cut: bool,
    /// Something failed as the peer is gone, and it has not said why: its farewell may still come, and what it had written.
    pub(super) is_unheard: bool,
}

/// Immediates sent since the start, by NIC of a peer that has so many.
pub(super) fn sent_by(allowances: &[Allowance; MAX_NICS], nics: usize) -> Counts {
    allowances.iter().map(Allowance::sent).take(nics).collect()
}

impl Session {
    pub(super) fn new(
        peer: PeerId,
        token: u64,
        claim: &Claim,
        door: Address,
        nonce: Nonce,
        granted: u16,
        turn: Turn,
    ) -> Self {
        let nothing = vec![0; SLOTS].into_boxed_slice();
        Self {
            peer,
            engine: claim.hello.engine(),
            recalled: None,
            token,
            their_token: claim.token,
            nonce,
            accept: Vec::new(),
            accept_proof: [0; 32],
            door,
            holds_door: false,
            state: State::Open,
            mailbox: claim.hello.mailbox,
            ports: claim.ports.clone(),
            ports_turn: claim.turn,
            shift: None,
            routes: Routes::default(),
            old_routes: Routes::default(),
            retired: Retired::default(),
            openings: None,
            old_openings: None,
            to_open: Asked::default(),
            in_flight: 0,
            old_in_flight: 0,
            moved: turn,
            arrears: None,
            parting: None,
            allowances: [Allowance::new(claim.grant); MAX_NICS],
            takings: [Takings::new(granted); MAX_NICS],
            withdrawn: Withdrawn::new(nothing),
            gone: Parts::default(),
            gone_parts: 0,
            releasing: Releasing::default(),
            says: Says::default(),
            reached: None,
            is_refused: false,
            under_way: 0,
            is_quiet: false,
            was_cut: false,
            is_unheard: false,
        }
    }

    pub(super) const fn is_leaving(&self) -> bool {
        matches!(self.state, State::Leaving { .. })
    }

    /// Whether what comes from one of these is taken for its own, or will be.
    pub(super) fn has_any_of(&self, ports: &[Address]) -> bool {
        let next = self.shift.iter().flat_map(|(_, next)| next);
        let mut all = self.ports.iter().chain(&self.retired.ports).chain(next);
        all.any(|port| ports.contains(port))
    }

    pub(super) const fn as_holder(&self) -> Holder {
        let Self { engine, recalled, .. } = *self;
        Holder { engine, is_leaving: self.is_leaving(), recalled }
    }

    /// What of it keeps endpoints of ours open that are being replaced: it does not move any more when it leaves, but what
    /// it had sent comes to where it was sent.
    pub(super) fn standing(&self, now: Time) -> Standing {
        let well = !self.is_leaving() || self.awaits(now).is_some();
        Standing { well, moved: self.moved, in_flight: self.old_in_flight }
    }

    /// It keeps nothing open any more, whatever may still come from it.
    pub(super) fn give_up(&mut self, now: Time) {
        self.was_cut = true;
        if let Some((until, _)) = &mut self.parting {
            *until = now.min(*until);
        }
        self.leave(now, Some(DownReason::Disconnected));
    }

    /// Whether the peer is to be asked to open something.
    pub(super) fn wants_openings(&self) -> bool {
        let mut both = [self.old_openings, self.openings].into_iter().flatten();
        both.any(|openings| !openings.unasked().is_empty())
    }

    /// Does so with what is known of the connections between these endpoints.
    pub(super) fn with_openings(&mut self, turns: Turns, change: impl FnOnce(&mut Openings)) {
        let both = [&mut self.old_openings, &mut self.openings].into_iter().flatten();
        if let Some(openings) = both.into_iter().find(|it| it.turns() == turns) {
            change(openings);
        }
    }

    /// Looks whether what the peer had sent before it moved is taken.
    pub(super) fn settle_arrears(&mut self) {
        let Some((turn, sent)) = &self.arrears else { return };
        if all_taken(sent, &self.takings) {
            self.moved = *turn;
            self.arrears = None;
        }
    }

    /// Immediates sent since the start, by NIC of the peer.
    pub(super) fn sent(&self) -> Counts {
        sent_by(&self.allowances, self.ports.len())
    }

    /// If the peer leaves and is through, but not all that it had sent is there; or if it is gone, and its farewell may still come: until
    /// when that is waited for.
    pub(super) fn awaits(&self, now: Time) -> Option<Time> {
        let State::Leaving { cut, reason: Some(_) } = self.state else { return None };
        let until = match &self.parting {
            Some((until, sent)) if !all_taken(sent, &self.takings) => *until,
            None if self.is_unheard => cut,
            _ => return None,
        };
        (now < until).then_some(until)
    }

    /// Whether it is over.
    pub(super) fn has_ended(&self, now: Time) -> bool {
        self.is_leaving() && self.all_in_flight() == 0 && self.awaits(now).is_none()
    }

    pub(super) const fn all_in_flight(&self) -> u32 {
        self.in_flight + self.old_in_flight
    }

    /// Nothing more is posted, and the peer hears of no new endpoints; `cut` is when what is in flight is cut off.
    pub(super) fn leave(&mut self, cut: Time, reason: Option<DownReason>) {
        let (cut, reason) = match self.state {
            // The first reason is the one; but what the engine wants itself, it need not hear of.
            State::Leaving { cut: earlier, reason: first } => (cut.min(earlier), reason.and(first)),
            _ => (cut, reason),
        };
        self.state = State::Leaving { cut, reason };
        self.says.moves = false;
    }
}
