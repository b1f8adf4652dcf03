//! The other ranks of an exchange: who they are, what is written to them, and what has to come from them.
//!
//! An exchange goes in steps. In each, every rank sends every other one the same number of writes; who has received all of a
//! step, and whose own writes have ended, begins the next. It refuses to know what the writes carry.
//!
//! # Invariants
//!
//! - Nobody begins a step before all have begun the one before, so two counters in turn tell steps apart.
//! - Every wait has a deadline, and names the ranks that are missing. Whose engine is known to be gone is not waited for.

use std::time::{Duration, Instant};

use immwire_core::id::PeerId;
use immwire_core::imm::ImmTag;
use immwire_core::peer::PeerState;
use immwire_core::region::MrDesc;

use super::error::MoeError;
use super::seat::Seat;
use crate::counter::{Expected, ImmCounter};
use crate::engine::TransferEngine;
use crate::error::{CountError, PeerError, SubmitError};
use crate::region::Region;
use crate::request::SingleWrite;
use crate::transfer::Transfer;

/// How long is waited before it is looked whether those that are missing are gone.
const GLANCE: Duration = Duration::from_millis(20);

/// What the ranks must agree on.
#[derive(Debug)]
pub(super) struct Circle {
    pub(super) world: u32,
    /// Of all that must be the same.
    pub(super) digest: u64,
    /// The least that an inbox has.
    pub(super) inbox_bytes: u64,
}

/// This rank, before it knows the others.
#[derive(Debug)]
pub(super) struct Own {
    engine: TransferEngine,
    rank: u32,
    counters: [ImmCounter; 2],
}

/// Another rank.
#[derive(Debug)]
struct Peer {
    rank: u32,
    id: PeerId,
    inbox: MrDesc,
    tags: [ImmTag; 2],
}

/// All ranks but this one.
#[derive(Debug)]
pub(super) struct Others {
    engine: TransferEngine,
    counters: [ImmCounter; 2],
    /// From the next one on: the first writes of all do not go to one rank.
    peers: Vec<Peer>,
    expected: Vec<Expected>,
    sent: Vec<(u32, Transfer)>,
    step: u64,
}

impl Own {
    pub(super) fn new(engine: &TransferEngine, rank: u32) -> Result<Self, MoeError> {
        let counters = [engine.counter()?, engine.counter()?];
        Ok(Self { engine: engine.clone(), rank, counters })
    }

    pub(super) const fn engine(&self) -> &TransferEngine {
        &self.engine
    }

    /// What the other ranks need.
    pub(super) fn seat(&self, inbox: &Region, digest: u64) -> Seat {
        let [even, odd] = &self.counters;
        Seat {
            address: self.engine.address().clone(),
            inbox: inbox.desc(),
            tags: [even.tag(), odd.tag()],
            digest,
        }
    }

    /// Connects to the others.
    pub(super) fn join(
        self,
        seats: &[Seat],
        circle: &Circle,
        until: Until,
    ) -> Result<Others, MoeError> {
        let Self { engine, rank, counters } = self;
        if u32::try_from(seats.len()) != Ok(circle.world) {
            return Err(MoeError::Seats { found: seats.len(), world: circle.world });
        }
        let mut peers = Vec::new();
        for (other, seat) in (0..).zip(seats).filter(|(other, _)| *other != rank) {
            if seat.digest != circle.digest || seat.inbox.len < circle.inbox_bytes {
                return Err(MoeError::OtherShape { rank: other });
            }
            let reach = |error| MoeError::Reach { rank: other, error };
            let id = engine.add_peer(&seat.address).map_err(reach)?;
            peers.push(Peer { rank: other, id, inbox: seat.inbox, tags: seat.tags });
        }
        let lower = peers.iter().take_while(|peer| peer.rank < rank).count();
        peers.rotate_left(lower);
        for peer in &peers {
            engine.wait_peer(peer.id, until.left()).map_err(|error| match error {
                PeerError::Timeout { .. } => MoeError::Late {
                    phase: "set-up",
                    chunk: 0,
                    ranks: vec![peer.rank],
                    after: until.timeout,
                },
                error => MoeError::Gone { rank: peer.rank, error },
            })?;
        }
        let expected = peers.iter().map(|peer| Expected { peer: peer.id, writes: 0 }).collect();
        let sent = Vec::with_capacity(2 * peers.len());
        Ok(Others { engine, counters, peers, expected, sent, step: 0 })
    }
}

impl Others {
    /// How many.
    pub(super) fn len(&self) -> usize {
        self.peers.len()
    }

    /// The rank of one of them.
    pub(super) fn rank(&self, peer: usize) -> u32 {
        self.peers.get(peer).map_or(u32::MAX, |peer| peer.rank)
    }

    /// Who it is, and where it is written to.
    pub(super) fn inbox(&self, peer: usize) -> Option<(PeerId, &MrDesc)> {
        self.peers.get(peer).map(|peer| (peer.id, &peer.inbox))
    }

    /// Writes bytes of a region, from an offset on, to a peer's inbox, as one of this step's writes; also if there are none.
    pub(super) fn write(
        &mut self,
        peer: usize,
        (src, src_offset): (&Region, u64),
        dst_offset: u64,
        len: u64,
        until: Until,
    ) -> Result<(), MoeError> {
        self.submit(peer, until, |engine, peer, imm| {
            if len == 0 {
                return engine.submit_imm(peer.id, imm, 1);
            }
            engine.submit_single_write(&SingleWrite {
                peer: peer.id,
                src,
                src_offset,
                dst: &peer.inbox,
                dst_offset,
                len,
                imm: Some(imm),
            })
        })
    }

    /// A step without any bytes: waits until all ranks have come to it.
    pub(super) fn meet(&mut self, phase: &'static str, until: Until) -> Result<(), MoeError> {
        for peer in 0..self.peers.len() {
            self.submit(peer, until, |engine, peer, imm| engine.submit_imm(peer.id, imm, 1))?;
        }
        self.arrive(phase, 0, 1, until)
    }

    /// Submits one of this step's writes, once there is room.
    fn submit(
        &mut self,
        peer: usize,
        until: Until,
        submit: impl Fn(&TransferEngine, &Peer, ImmTag) -> Result<Transfer, SubmitError>,
    ) -> Result<(), MoeError> {
        let Some(peer) = self.peers.get(peer) else { return Ok(()) };
        let [even, odd] = peer.tags;
        let tag = if self.step.is_multiple_of(2) { even } else { odd };
        loop {
            match submit(&self.engine, peer, tag) {
                Ok(transfer) => {
                    self.sent.push((peer.rank, transfer));
                    return Ok(());
                }
                Err(SubmitError::Full { .. }) if self.engine.wait_capacity(until.left()) => {}
                Err(error) => return Err(MoeError::Submit { rank: peer.rank, error }),
            }
        }
    }

    /// Ends a step: waits for the same number of writes from each rank, and until what was sent is no longer read.
    pub(super) fn arrive(
        &mut self,
        phase: &'static str,
        chunk: u32,
        writes: u64,
        until: Until,
    ) -> Result<(), MoeError> {
        let late = |ranks| MoeError::Late { phase, chunk, ranks, after: until.timeout };
        for expected in &mut self.expected {
            expected.writes = writes;
        }
        let [even, odd] = &self.counters;
        let counter = if self.step.is_multiple_of(2) { even } else { odd };
        while !self.peers.is_empty() {
            let left = until.left();
            let missing = match counter.wait_from(&self.expected, left.min(GLANCE)) {
                Ok(()) => break,
                Err(CountError::Timeout { peers, .. }) => peers,
                Err(error) => return Err(MoeError::Count(error)),
            };
            let mut ranks = Vec::new();
            for (peer, share) in self.peers.iter().zip(missing) {
                if share.arrived < writes {
                    ranks.push(peer.rank);
                    gone(&self.engine, peer)?;
                }
            }
            if left.is_zero() {
                ranks.sort_unstable();
                return Err(late(ranks));
            }
        }
        for (rank, transfer) in &self.sent {
            let end = transfer.wait(until.left()).map_err(|_| late(vec![*rank]))?;
            end.ok().map_err(|error| MoeError::Write { rank: *rank, error })?;
        }
        self.sent.clear();
        self.step += 1;
        Ok(())
    }

    /// A step has failed: what is under way is stopped, and ends by itself.
    pub(super) fn stop(&mut self) {
        for (_, transfer) in self.sent.drain(..) {
            transfer.cancel();
        }
    }
}

/// Whether a peer is known to be gone.
fn gone(engine: &TransferEngine, peer: &Peer) -> Result<(), MoeError> {
    let error = match engine.peer_state(peer.id) {
        Some(PeerState::Down(reason)) => PeerError::Down { peer: peer.id, reason },
        None => PeerError::Unknown { peer: peer.id },
        Some(_) => return Ok(()),
    };
    Err(MoeError::Gone { rank: peer.rank, error })
}

/// When a call has to be over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Until {
    begun: Instant,
    timeout: Duration,
}

impl Until {
    pub(super) fn new(timeout: Duration) -> Self {
        Self { begun: Instant::now(), timeout }
    }

    pub(super) fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.begun.elapsed())
    }
}

/// Tells two shapes apart: FNV-1a of their numbers.
pub(super) fn digest<'a>(numbers: impl IntoIterator<Item = &'a u32>) -> u64 {
    let bytes = numbers.into_iter().flat_map(|number| number.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}
