//! One peer, as the provider sees it: where it is written to, what it may be sent, how far its end is.
//!
//! Posts nothing: it remembers what is to be said, and what stands in the way.

use immwire_core::credit::{Allowance, Takings};
use immwire_core::datagram::{Claim, Nonce, Proof, Retry};
use immwire_core::id::{MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::note::{LANES, Passage, Queues};
use immwire_core::parting::{Parting, Standing};
use immwire_core::peer::DownReason;
use immwire_core::port::{Door, Port};
use immwire_core::region::MrDesc;
use immwire_core::tenant::{SLOTS, Tenant, Withdrawn};

use super::device::QueuePair;
use super::lane::LaneId;

/// How far the session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// We have accepted it, and it has not said that it knows: nothing is posted.
    Greeting {
        until: Time,
        retry: Retry,
    },
    Open,
    /// Nothing more is posted. What is in flight is cut off; it is over when all of that is reported.
    Leaving {
        parting: Parting,
        /// To be reported, unless the engine itself wanted it.
        reason: Option<DownReason>,
    },
}

/// One of our ways to one of the peer's NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outlet {
    Closed,
    /// Something is to be written there.
    Wanted,
    /// The peer has been asked to open its ends.
    Asked {
        lanes: [LaneId; LANES],
    },
    Open {
        lanes: [LaneId; LANES],
    },
}

impl Outlet {
    /// Its queue pairs, if there are any.
    pub(super) fn lanes(&self) -> impl Iterator<Item = LaneId> + use<> {
        let lanes = match *self {
            Self::Closed | Self::Wanted => None,
            Self::Asked { lanes } | Self::Open { lanes } => Some(lanes),
        };
        lanes.into_iter().flatten()
    }
}

/// The ends of one of the peer's ways to us.
#[derive(Debug)]
pub(super) struct Inlet {
    pub(super) pairs: [QueuePair; LANES],
}

/// What is to be said to the peer when there is room.
#[derive(Debug, Default)]
pub(super) struct Says {
    pub(super) ready: bool,
    pub(super) bye: bool,
    pub(super) accept: bool,
    /// Of our NICs.
    pub(super) taken: [bool; MAX_NICS],
    pub(super) withdraw: Vec<Tenant>,
    pub(super) withdrawn: Vec<Tenant>,
    pub(super) connected: Vec<(Passage, Queues)>,
    pub(super) connect: Vec<(Passage, Queues)>,
}

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) peer: PeerId,
    /// Ours: names the session within this engine, for good.
    pub(super) token: u64,
    /// Of the call that it came from.
    pub(super) nonce: Nonce,
    /// The acceptor's answer, to be repeated.
    pub(super) accept: Vec<u8>,
    pub(super) accept_proof: Proof,
    pub(super) door: Door,
    pub(super) state: State,
    pub(super) mailbox: MrDesc,
    /// Its NICs.
    pub(super) ports: heapless::Vec<Port, MAX_NICS>,
    /// For notes, between the first NICs.
    pub(super) control: QueuePair,
    /// When it is next to be seen whether the peer's device answers, unless it has by then.
    pub(super) probe: Time,
    /// Something has come, or has got there, since it was last looked at.
    pub(super) is_heard: bool,
    /// Notes that it has not been seen to have, and probes without an answer.
    pub(super) notes: u16,
    /// By our NIC and its.
    pub(super) outlets: Vec<Outlet>,
    /// By its NIC and ours.
    pub(super) inlets: Vec<Option<Inlet>>,
    /// Queue pairs that take from a shared queue, and have not been seen to be done with that.
    pub(super) undrained: usize,
    /// Pieces in flight.
    pub(super) in_flight: u32,
    /// By NIC of its.
    pub(super) allowances: [Allowance; MAX_NICS],
    /// By NIC of ours.
    pub(super) takings: [Takings; MAX_NICS],
    pub(super) withdrawn: Withdrawn<Box<[u32]>>,
    /// Regions of its that are withdrawn, and that something may be in flight to.
    pub(super) releasing: Vec<Tenant>,
    pub(super) says: Says,
}

/// What a session is made from.
pub(super) struct Made {
    pub(super) peer: PeerId,
    pub(super) token: u64,
    pub(super) nonce: Nonce,
    pub(super) door: Door,
    pub(super) ports: heapless::Vec<Port, MAX_NICS>,
    pub(super) control: QueuePair,
    pub(super) granted: u16,
    /// NICs of ours.
    pub(super) nics: usize,
}

impl Session {
    pub(super) fn new(made: Made, claim: &Claim) -> Self {
        let Made { peer, token, nonce, door, ports, control, granted, nics } = made;
        let paths = nics * ports.len();
        Self {
            peer,
            token,
            nonce,
            accept: Vec::new(),
            accept_proof: [0; 32],
            door,
            state: State::Open,
            mailbox: claim.hello.mailbox,
            ports,
            control,
            probe: Time::ZERO,
            is_heard: false,
            notes: 0,
            outlets: vec![Outlet::Closed; paths],
            inlets: (0..paths).map(|_| None).collect(),
            undrained: 1,
            in_flight: 0,
            allowances: [Allowance::new(claim.grant); MAX_NICS],
            takings: [Takings::new(granted); MAX_NICS],
            withdrawn: Withdrawn::new(vec![0; SLOTS].into_boxed_slice()),
            releasing: Vec::new(),
            says: Says::default(),
        }
    }

    pub(super) const fn is_leaving(&self) -> bool {
        matches!(self.state, State::Leaving { .. })
    }

    /// Where the way from one of our NICs to one of its is in `outlets`.
    #[inline]
    pub(super) fn outlet(&self, nic: NicIndex, remote_nic: NicIndex) -> Option<usize> {
        let theirs = self.ports.len();
        let remote = usize::from(remote_nic);
        (remote < theirs).then_some(usize::from(nic) * theirs + remote)
    }

    /// A queue pair has failed: there is nothing to wait for.
    pub(super) fn leave_after_failure(&mut self) {
        self.leave(Time::ZERO, Some(DownReason::Disconnected));
    }

    /// Nothing more is posted; the peer may take until `patience` to hear of it.
    pub(super) fn leave(&mut self, patience: Time, reason: Option<DownReason>) {
        match &mut self.state {
            State::Leaving { parting, reason: first } => {
                parting.hurry(patience);
                // The first reason is the one; but what the engine wants itself, it need not hear of.
                *first = reason.and(*first);
            }
            state => *state = State::Leaving { parting: Parting::new(patience), reason },
        }
    }

    /// What of it has not ended.
    pub(super) const fn standing(&self) -> Standing {
        let notes = self.notes as usize;
        Standing { posted: self.in_flight as usize + notes, notes, undrained: self.undrained }
    }
}
