//! One peer, as the provider sees it: where it is written to, what it may be sent, how far its end is.
//!
//! Posts nothing: it remembers what is to be said, and what stands in the way.

use immwire_core::courier::Courier;
use immwire_core::credit::{Allowance, Takings};
use immwire_core::datagram::{Claim, Nonce, Proof};
use immwire_core::id::{MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::life::Life;
use immwire_core::line;
use immwire_core::note::{Kind, LANES, Note, Passage, Queues, order};
use immwire_core::port::{Door, Port, Queue};
use immwire_core::pulse::{Pulse, Watch};
use immwire_core::region::MrDesc;
use immwire_core::tenant::{SLOTS, Tenant, Withdrawn};
use immwire_core::way::Way;

use super::LETTERS;
use super::device::QueuePair;
use super::lane::LaneId;
use crate::provider::Unfenced;
use crate::withdrawal::Releasing;

/// One of our ways to one of the peer's NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Outlet {
    pub(super) way: Way,
    /// Of the last attempt, until all of it has ended.
    pub(super) lanes: Option<[LaneId; LANES]>,
    /// The peer's ends of that attempt, until its address is known.
    pub(super) answer: Option<(Passage, Queues)>,
}

impl Outlet {
    /// Its queue pairs, if there are any.
    pub(super) fn lanes(&self) -> impl Iterator<Item = LaneId> + use<> {
        self.lanes.into_iter().flatten()
    }
}

/// The ends of one of the peer's ways to us.
#[derive(Debug, Default)]
pub(super) struct Inlet {
    /// Which of those that there have been; 0 if none.
    pub(super) epoch: u32,
    /// Until it is fenced, and whether each is done with the shared receive queue.
    pub(super) pairs: Option<[(QueuePair, bool); LANES]>,
    /// Immediates that were taken, on each lane.
    pub(super) arrived: [u64; LANES],
    /// The peer's ends of the next, until its address is known.
    pub(super) asked: Option<(Passage, Queues)>,
}

/// A queue pair for letters, from one of our NICs to the peer's of the same number.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) pair: Option<QueuePair>,
    pub(super) is_drained: bool,
    /// How far it is, and how many letters and probes have not completed.
    pub(super) state: line::Line,
    /// How many have, on whichever queue pair.
    pub(super) completed: u32,
    pub(super) watch: Watch,
}

/// What is to be said to the peer when there is room.
#[derive(Debug, Default)]
pub(super) struct Says {
    pub(super) ready: bool,
    pub(super) bye: bool,
    pub(super) accept: bool,
    /// Of our NICs.
    pub(super) taken: [bool; MAX_NICS],
    pub(super) back: Vec<NicIndex>,
    pub(super) withdraw: Vec<Tenant>,
    pub(super) withdrawn: Vec<Tenant>,
    pub(super) connected: Vec<(Passage, Queues)>,
    pub(super) declined: Vec<Passage>,
    pub(super) connect: Vec<(Passage, Queues)>,
    pub(super) link: Vec<(Passage, Queue)>,
    pub(super) linked: Vec<(Passage, Queue)>,
}

/// Answers of each kind that wait to be said: some for each path, of which there are [`MAX_NICS`] times as many at most.
const ANSWERS: usize = 4 * MAX_NICS * MAX_NICS;

impl Says {
    /// Whether more waits to be said than a peer that listens has asked for.
    pub(super) const fn is_flooded(&self) -> bool {
        self.connected.len() > ANSWERS
            || self.declined.len() > ANSWERS
            || self.linked.len() > ANSWERS
    }
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
    /// Where it takes answers, and by which of our doors they go.
    pub(super) door: Door,
    pub(super) through: u8,
    pub(super) life: Life,
    pub(super) mailbox: MrDesc,
    /// Its NICs.
    pub(super) ports: heapless::Vec<Port, MAX_NICS>,
    /// By NIC of both.
    pub(super) lines: heapless::Vec<Line, MAX_NICS>,
    pub(super) courier: Courier<LETTERS>,
    pub(super) pulse: Pulse,
    /// By our NIC and its.
    pub(super) outlets: Vec<Outlet>,
    /// By its NIC and ours.
    pub(super) inlets: Vec<Inlet>,
    /// Writes whose completion was not read.
    pub(super) in_flight: u32,
    /// By NIC of its.
    pub(super) allowances: [Allowance; MAX_NICS],
    /// By NIC of ours.
    pub(super) takings: [Takings; MAX_NICS],
    pub(super) withdrawn: Withdrawn<Box<[u32]>>,
    pub(super) releasing: Releasing,
    pub(super) says: Says,
}

/// What a session is made from.
pub(super) struct Made {
    pub(super) peer: PeerId,
    pub(super) token: u64,
    pub(super) nonce: Nonce,
    pub(super) door: Door,
    pub(super) through: u8,
    pub(super) ports: heapless::Vec<Port, MAX_NICS>,
    /// Those that are whole have a queue pair.
    pub(super) lines: heapless::Vec<Line, MAX_NICS>,
    pub(super) granted: u16,
    /// NICs of ours.
    pub(super) nics: usize,
}

impl Session {
    pub(super) fn new(made: Made, claim: &Claim) -> Self {
        let Made { peer, token, nonce, door, through, ports, lines, granted, nics } = made;
        let paths = nics * ports.len();
        let whole = (0_u32..).zip(&lines).filter(|(_, line)| line.pair.is_some());
        let whole = whole.fold(0, |lines, (at, _)| lines | 1_u8.unbounded_shl(at));
        Self {
            peer,
            token,
            nonce,
            accept: Vec::new(),
            accept_proof: [0; 32],
            door,
            through,
            life: Life::OPEN,
            mailbox: claim.hello.mailbox,
            ports,
            lines,
            courier: Courier::new(whole),
            pulse: Pulse::default(),
            outlets: vec![Outlet::default(); paths],
            inlets: (0..paths).map(|_| Inlet::default()).collect(),
            in_flight: 0,
            allowances: [Allowance::new(claim.grant); MAX_NICS],
            takings: [Takings::new(granted); MAX_NICS],
            withdrawn: Withdrawn::new(vec![0; SLOTS].into_boxed_slice()),
            releasing: Releasing::default(),
            says: Says::default(),
        }
    }

    pub(super) const fn is_leaving(&self) -> bool {
        self.life.is_leaving()
    }

    /// An error, if what arrived over its paths is not to be asked any more.
    pub(super) const fn must_stay(&self) -> Result<(), Unfenced> {
        match self.life.reason() {
            _ if !self.is_leaving() => Ok(()),
            Some(_) => Err(Unfenced::Leaving),
            None => Err(Unfenced::Unknown),
        }
    }

    /// Where the way from one of our NICs to one of its is in `outlets`.
    #[inline]
    pub(super) fn outlet(&self, nic: NicIndex, remote_nic: NicIndex) -> Option<usize> {
        let theirs = self.ports.len();
        let remote = usize::from(remote_nic);
        (remote < theirs).then_some(usize::from(nic) * theirs + remote)
    }

    /// Whether the path, which is there in `outlets`, has broken, and is not whole since.
    pub(super) fn is_down(&self, at: usize) -> bool {
        self.outlets.get(at).is_some_and(|outlet| outlet.way.is_down())
    }

    /// One of our NICs, or of the peer's, can be reached again: what has broken there is tried now.
    pub(super) fn hurry(&mut self, now: Time, ours: Option<NicIndex>, theirs: Option<NicIndex>) {
        let count = self.ports.len().max(1);
        let is = |nic: Option<NicIndex>, at| nic.is_none_or(|nic| usize::from(nic) == at);
        for (at, outlet) in self.outlets.iter_mut().enumerate() {
            if is(ours, at / count) && is(theirs, at % count) {
                outlet.way.hurry(now);
            }
        }
        for (at, line) in self.lines.iter_mut().enumerate() {
            if is(ours, at) && is(theirs, at) {
                line.state.hurry(now);
            }
        }
    }

    /// Says what is to be said, as far as there is room.
    pub(super) fn say_all(&mut self) {
        let _ = order().into_iter().all(|kind| self.say_kind(kind));
    }

    /// Says all of this kind; whether there was room for all.
    fn say_kind(&mut self, kind: Kind) -> bool {
        let (courier, says) = (&mut self.courier, &mut self.says);
        match kind {
            Kind::Ready => {
                says.ready = says.ready && !courier.say(Note::Ready);
                !says.ready
            }
            Kind::Taken => {
                let due = says.taken.iter_mut().zip(&mut self.takings).zip(0..);
                due.filter(|((due, _), _)| **due).all(|((due, takings), nic)| {
                    let mut reported = *takings;
                    let said = courier.say(Note::Taken { nic, count: reported.report() });
                    if said {
                        (*due, *takings) = (false, reported);
                    }
                    said
                })
            }
            Kind::Withdraw => say_each(courier, &mut says.withdraw, Note::Withdraw),
            Kind::Back => say_each(courier, &mut says.back, |nic| Note::Back { nic }),
            Kind::Declined => say_each(courier, &mut says.declined, Note::Declined),
            Kind::Link => say_each(courier, &mut says.link, |(at, queue)| Note::Link(at, queue)),
            Kind::Linked => {
                say_each(courier, &mut says.linked, |(at, queue)| Note::Linked(at, queue))
            }
            Kind::Connect => {
                say_each(courier, &mut says.connect, |(at, ends)| Note::Connect(at, ends))
            }
            Kind::Connected => {
                say_each(courier, &mut says.connected, |(at, ends)| Note::Connected(at, ends))
            }
            Kind::Withdrawn => say_each(courier, &mut says.withdrawn, Note::Withdrawn),
        }
    }

    /// Letters and probes whose completion was not read.
    pub(super) fn notes(&self) -> usize {
        self.lines.iter().map(|line| usize::from(line.state.posted())).sum()
    }
}

/// Says all of these, in their order, as long as there is room; whether there was for all.
fn say_each<T: Copy>(
    courier: &mut Courier<LETTERS>,
    all: &mut Vec<T>,
    note: impl Fn(T) -> Note,
) -> bool {
    let said = all.iter().take_while(|one| courier.say(note(**one))).count();
    all.drain(..said);
    all.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than there is room for: an attempt is not asked for behind a later one, which would be taken for nonsense.
    #[test]
    fn what_is_to_be_said_is_said_in_its_order() {
        let mut courier = Courier::new(1);
        let mut all: Vec<NicIndex> = (0..MAX_NICS).flat_map(NicIndex::try_from).collect();
        assert!(!say_each(&mut courier, &mut all, |nic| Note::Back { nic }));
        assert_eq!(all, [7], "the last one waits");
        for expected in 0..7 {
            let (_, letter) = courier.next().unwrap();
            assert_eq!(letter.note, Some(Note::Back { nic: expected }));
            courier.post();
        }
        all.clear();
        assert!(say_each(&mut courier, &mut all, |nic| Note::Back { nic }));
    }
}
