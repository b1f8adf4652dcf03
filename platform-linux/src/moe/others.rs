//! The other ranks of an exchange: who they are, what is written to them, what has to come from them, and who is left out.
//!
//! An exchange goes in steps. In each, every rank sends every other one the same number of writes; who has received all of a
//! step, and whose own writes have ended, begins the next. It refuses to know what the writes carry, and decides nothing: who is
//! left out says [`immwire_core::moe::Patience`].
//!
//! # Invariants
//!
//! - Of two ranks that go on with each other neither begins a step before the other has begun the one before, so two counters in turn
//!   tell steps apart.
//! - What counts is what each rank has sent by itself (its tally): what one that was left out still sends is added to nobody's.
//! - Who is left out is written to no more, and told so; a step ends only when what was sent to it has ended, too.
//! - A write takes one of the engine's transfers until it has ended, not until the next call here: between halves they are anybody's,
//!   other exchanges' too.
//! - Every wait has a deadline. Whose engine is known to be gone is not waited for.

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use immwire_core::id::PeerId;
use immwire_core::imm::ImmTag;
use immwire_core::moe::{Absence, Outgoing, Patience, RankMask, Seen, Verdict};
use immwire_core::peer::PeerState;
use immwire_core::region::MrDesc;

use super::error::MoeError;
use super::report::{Absent, Control, Phase, Why};
use super::seat::{COUNTERS, Seat};
use crate::counter::ImmCounter;
use crate::engine::TransferEngine;
use crate::error::{CountError, PeerError, SubmitError, TransferError};
use crate::region::Region;
use crate::request::SingleWrite;
use crate::transfer::{Kept, Transfer};

/// How long is waited before it is looked whether those that are missing are gone.
const GLANCE: Duration = Duration::from_millis(20);

/// How long what was sent to ranks that are left out may take to end once it is stopped, at least, and beyond the twice that
/// the engine is given to drain, in which it sees to it.
const END_LIMIT: Duration = Duration::from_secs(30);
const END_SLACK: Duration = Duration::from_secs(10);

/// Which counter is for what: two for writes of steps, in turn, one for signs of who is kept waiting, one for being left out.
const SIGN: usize = 2;
const LEFT: usize = 3;

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
    counters: [ImmCounter; COUNTERS],
}

/// Another rank.
#[derive(Debug)]
struct Peer {
    rank: u32,
    id: PeerId,
    inbox: MrDesc,
    tags: [ImmTag; COUNTERS],
    is_present: bool,
    /// Writes of earlier steps, by the counter of the step.
    before: [u64; 2],
    /// Signs seen, and when the last of this step was.
    signs: u64,
    sign: Option<Instant>,
    outgoing: Outgoing,
}

/// All ranks but this one.
#[derive(Debug)]
pub(super) struct Others {
    engine: TransferEngine,
    counters: [ImmCounter; COUNTERS],
    /// From the next one on: the first writes of all do not go to one rank.
    peers: Vec<Peer>,
    /// Writes of this step, each with the number of its peer.
    sent: Vec<(usize, Arc<Kept>)>,
    /// For those to come.
    spare: Vec<Arc<Kept>>,
    step: u64,
    absent: RankMask,
    control: Arc<Control>,
}

impl Own {
    pub(super) fn new(engine: &TransferEngine, rank: u32) -> Result<Self, MoeError> {
        let counters = [engine.counter()?, engine.counter()?, engine.counter()?, engine.counter()?];
        Ok(Self { engine: engine.clone(), rank, counters })
    }

    pub(super) const fn engine(&self) -> &TransferEngine {
        &self.engine
    }

    /// What the other ranks need.
    pub(super) fn seat(&self, inbox: &Region, digest: u64) -> Seat {
        Seat {
            address: self.engine.address().clone(),
            inbox: inbox.desc(),
            tags: self.counters.each_ref().map(ImmCounter::tag),
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
            peers.push(Peer {
                rank: other,
                id,
                inbox: seat.inbox,
                tags: seat.tags,
                is_present: true,
                before: [0; 2],
                signs: 0,
                sign: None,
                outgoing: Outgoing::Ended,
            });
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
        // In no step are there more than two for each: then sending allocates nothing.
        let most = 2 * peers.len();
        let sent = Vec::with_capacity(most);
        let spare = (0..most).map(|_| Arc::default()).collect();
        let control = Arc::new(Control::new(circle.world));
        let absent = RankMask::EMPTY;
        Ok(Others { engine, counters, peers, sent, spare, step: 0, absent, control })
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

    /// Whether a peer is left out.
    pub(super) fn is_absent(&self, peer: usize) -> bool {
        self.peers.get(peer).is_none_or(|peer| !peer.is_present)
    }

    /// The same of a rank.
    pub(super) fn is_rank_absent(&self, rank: u32) -> bool {
        self.absent.contains(rank)
    }

    /// What is known of who is left out, and whether this rank's caller is tired of waiting.
    pub(super) const fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Writes bytes of a region, from an offset on, to a peer's inbox, as one of this step's writes; also if there are none. Nothing,
    /// if it is left out; it is if there was no room in time.
    ///
    /// # Errors
    ///
    /// [`MoeError::Submit`]: no such write can be, or our own engine has stopped.
    pub(super) fn write(
        &mut self,
        peer: usize,
        (src, src_offset): (&Region, u64),
        dst_offset: u64,
        len: u64,
        at: At,
    ) -> Result<(), MoeError> {
        self.submit(peer, at, |engine, peer, imm| {
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
    ///
    /// # Errors
    ///
    /// [`MoeError`] of the first that did not.
    pub(super) fn meet(&mut self, at: At) -> Result<(), MoeError> {
        for peer in 0..self.peers.len() {
            self.submit(peer, at, |engine, peer, imm| engine.submit_imm(peer.id, imm, 1))?;
        }
        self.arrive(1, at)?;
        self.all(at)
    }

    /// Whether nobody is left out.
    ///
    /// # Errors
    ///
    /// [`MoeError`]: who is, and why. Of those that are late all are named.
    pub(super) fn all(&self, at: At) -> Result<(), MoeError> {
        let absent = self.control.report().absent;
        // Who has left us out had its reasons, which are likely to be among the others.
        let is_reason = |absent: &&Absent| matches!(absent.why, Why::Gone(_) | Why::Write(_));
        let first = absent.iter().find(is_reason).or(absent.first());
        let Some(&Absent { rank, why, .. }) = first else { return Ok(()) };
        Err(match why {
            Why::Gone(error) => MoeError::Gone { rank, error },
            Why::Write(error) => MoeError::Write { rank, error },
            Why::LeftUs => MoeError::LeftOut { rank },
            _ => {
                let mut ranks: Vec<u32> = absent.iter().map(|absent| absent.rank).collect();
                ranks.sort_unstable();
                MoeError::Late { phase: at.phase.name(), chunk: at.chunk, ranks, after: at.given }
            }
        })
    }

    /// Submits one of this step's writes, once there is room.
    fn submit(
        &mut self,
        number: usize,
        at: At,
        submit: impl Fn(&TransferEngine, &Peer, ImmTag) -> Result<Transfer, SubmitError>,
    ) -> Result<(), MoeError> {
        let Some(peer) = self.peers.get(number).filter(|peer| peer.is_present) else {
            return Ok(());
        };
        let tag = peer.tags[self.parity()];
        let begun = Instant::now();
        loop {
            match submit(&self.engine, peer, tag) {
                Ok(transfer) => {
                    let kept = self.spare.pop().unwrap_or_default();
                    kept.keep(transfer);
                    self.sent.push((number, kept));
                    return Ok(());
                }
                Err(SubmitError::Full { .. }) => {
                    let left = at.limit.saturating_sub(begun.elapsed());
                    let is_over = left.is_zero() || self.control.is_aborted();
                    if !is_over {
                        // It is asked again in any case.
                        let _ = self.engine.wait_capacity(left.min(GLANCE));
                        continue;
                    }
                    self.leave(number, at, Why::NoRoom { after: at.limit });
                    return Ok(());
                }
                Err(error) => return Err(MoeError::Submit { rank: peer.rank, error }),
            }
        }
    }

    /// The counter of this step, of two.
    const fn parity(&self) -> usize {
        (self.step % 2) as usize
    }

    /// Ends a step: waits for the same number of writes from each rank that is not left out, or until it is; and until what was sent is
    /// no longer read.
    ///
    /// # Errors
    ///
    /// [`MoeError::Count`]: our engine has stopped. [`MoeError::Unended`].
    pub(super) fn arrive(&mut self, writes: u64, at: At) -> Result<(), MoeError> {
        let limit = at.limit;
        let patience = Patience { limit_ns: nanoseconds(limit) };
        let begun = Instant::now();
        let parity = self.parity();
        let (mut signs, mut is_stopped) = (0, None);
        let end_limit =
            END_LIMIT.max(self.engine.drain().saturating_mul(2).saturating_add(END_SLACK));
        for peer in &mut self.peers {
            peer.sign = None;
        }
        loop {
            let waited = begun.elapsed();
            // Before it is looked who has sent what: who arrives in between is waited for too briefly, not too long.
            let counted = self.counters[parity].available();
            let missing = self.judge(patience, begun, waited, writes, at)?;
            let still = self.sent.iter().find(|(_, sent)| sent.poll_end().is_none());
            if missing == 0 && still.is_none() {
                break;
            }
            let is_sent_in_vain =
                still.is_some_and(|(number, _)| self.is_absent(*number)) && missing == 0;
            if is_sent_in_vain && is_stopped.get_or_insert_with(Instant::now).elapsed() > end_limit
            {
                let rank = still.map_or(u32::MAX, |(number, _)| self.rank(*number));
                return Err(MoeError::Unended { rank, after: end_limit });
            }
            if patience.sign_is_due(nanoseconds(waited), signs) {
                signs += 1;
                self.tell_all(SIGN);
            }
            if missing > 0 {
                let glance = GLANCE.min(limit.saturating_sub(waited).max(Duration::from_millis(1)));
                match self.counters[parity].wait(counted.saturating_add(missing), glance) {
                    Ok(()) | Err(CountError::Timeout { .. }) => {}
                    Err(error) => return Err(MoeError::Count(error)),
                }
            } else if let Some((_, sent)) = still {
                // Its end is asked for above.
                let _ = sent.wait(GLANCE);
            }
        }
        if signs > 0 {
            self.tell_all(SIGN);
        }
        let counter = &self.counters[parity];
        // What is behind us: nobody waits on it meanwhile, and how much is left says nothing.
        let _ = counter.try_take(counter.available());
        for peer in &mut self.peers {
            peer.before[parity] += writes;
        }
        self.spare.extend(self.sent.drain(..).map(|(_, kept)| kept));
        self.step += 1;
        Ok(())
    }

    /// Leaves out who is to be left out, and returns how many writes of the others are missing.
    ///
    /// # Errors
    ///
    /// [`MoeError::Count`]: it is our own engine that has stopped.
    fn judge(
        &mut self,
        patience: Patience,
        begun: Instant,
        waited: Duration,
        writes: u64,
        at: At,
    ) -> Result<u64, MoeError> {
        let is_aborted = self.control.is_aborted();
        let parity = self.parity();
        for peer in &mut self.peers {
            peer.outgoing = Outgoing::Ended;
        }
        for (number, sent) in &self.sent {
            let Some(peer) = self.peers.get_mut(*number) else { continue };
            match sent.poll_end() {
                None if peer.outgoing == Outgoing::Ended => peer.outgoing = Outgoing::UnderWay,
                Some(end) if end.ok().is_err() => peer.outgoing = Outgoing::Failed,
                _ => {}
            }
        }
        let mut missing = 0;
        for number in 0..self.peers.len() {
            let counters = &self.counters;
            let Some(peer) = self.peers.get_mut(number).filter(|peer| peer.is_present) else {
                continue;
            };
            let counted = |counter: usize| counters[counter].arrived_from(peer.id);
            let before = peer.before[parity];
            let lacks = || writes.saturating_sub(counted(parity).saturating_sub(before));
            // What a rank has sent is looked at after what says that it sends no more: it may be whole by then.
            let (signs, left_us) = (counted(SIGN), counted(LEFT) > 0);
            if signs > mem::replace(&mut peer.signs, signs) {
                peer.sign = Some(Instant::now());
            }
            let gone = if lacks() > 0 { gone(&self.engine, peer.id) } else { None };
            let lacks = lacks();
            let seen = Seen {
                arrived: lacks == 0,
                outgoing: peer.outgoing,
                gone: gone.is_some(),
                left_us,
                sign_ns: peer.sign.map(|sign| nanoseconds(sign.saturating_duration_since(begun))),
            };
            // A sign that came meanwhile is no later than now.
            let waited = nanoseconds(waited);
            match patience.judge(&seen, waited, is_aborted) {
                Verdict::Complete => {}
                Verdict::Wait => missing += lacks,
                Verdict::Leave(absence) => {
                    // By the end of our own engine all are gone, and all that is under way fails.
                    let stopped = Why::Write(TransferError::EngineStopped);
                    if self.engine.is_stopping() || self.failure(number) == stopped {
                        return Err(MoeError::Count(CountError::EngineStopped));
                    }
                    let why = match (absence, gone) {
                        (Absence::Gone, Some(error)) => Why::Gone(error),
                        (Absence::Aborted, _) => Why::Aborted,
                        (Absence::LeftUs, _) => Why::LeftUs,
                        (Absence::Failed, _) => self.failure(number),
                        (Absence::Untaken, _) => Why::NotTaken { after: at.limit },
                        _ => Why::Late { after: at.limit },
                    };
                    self.leave(number, at, why);
                }
            }
        }
        Ok(missing)
    }

    /// Leaves out, from a step on that has not begun, who has left us out by now: of the steps before, what came whole counts.
    pub(super) fn heed(&mut self, at: At) {
        for number in 0..self.peers.len() {
            let told = |peer: &Peer| self.counters[LEFT].arrived_from(peer.id) > 0;
            if self.peers.get(number).is_some_and(|peer| peer.is_present && told(peer)) {
                self.leave(number, at, Why::LeftUs);
            }
        }
    }

    /// Why a write to a peer failed.
    fn failure(&self, number: usize) -> Why {
        let ends = self.sent.iter().filter(|(to, _)| *to == number);
        let mut errors = ends.filter_map(|(_, sent)| sent.poll_end()?.ok().err());
        errors.next().map_or(Why::LeftUs, Why::Write)
    }

    /// Leaves a peer out from now on: stops what is under way to it, says why, and tells it.
    pub(super) fn leave(&mut self, number: usize, at: At, why: Why) {
        let Some(peer) = self.peers.get_mut(number).filter(|peer| peer.is_present) else { return };
        peer.is_present = false;
        self.absent.insert(peer.rank);
        for (_, sent) in self.sent.iter().filter(|(to, _)| *to == number) {
            sent.cancel();
        }
        self.tell(number, LEFT);
        let absent = Absent {
            rank: self.rank(number),
            round: at.round,
            phase: at.phase,
            chunk: at.chunk,
            why,
        };
        tracing::warn!(%absent, "a rank is left out");
        self.control.put_down(absent);
    }

    /// Tells a peer something that is no more than a number; or does not, if there is no room now.
    fn tell(&self, number: usize, what: usize) {
        if let Some(peer) = self.peers.get(number) {
            // Nothing is read from: nobody has to know when it ends.
            let _ = self.engine.submit_imm(peer.id, peer.tags[what], 1);
        }
    }

    fn tell_all(&self, what: usize) {
        for number in (0..self.peers.len()).filter(|number| !self.is_absent(*number)) {
            self.tell(number, what);
        }
    }

    /// A step has failed: what is under way is stopped, and ends by itself; the others need not wait.
    pub(super) fn stop(&mut self) {
        for (_, sent) in self.sent.drain(..) {
            sent.cancel();
        }
        self.tell_all(LEFT);
    }
}

/// Whether a peer is known to be gone.
fn gone(engine: &TransferEngine, peer: PeerId) -> Option<PeerError> {
    match engine.peer_state(peer) {
        Some(PeerState::Down(reason)) => Some(PeerError::Down { peer, reason }),
        None => Some(PeerError::Unknown { peer }),
        Some(_) => None,
    }
}

/// Where in an exchange a call is, and how long it waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct At {
    pub(super) round: u64,
    pub(super) phase: Phase,
    pub(super) chunk: u32,
    pub(super) limit: Duration,
    /// What the caller gave for all of it, of which that is left.
    pub(super) given: Duration,
}

impl At {
    /// Of a call that has so long for all it does.
    pub(super) fn set_up(until: Until) -> Self {
        let (limit, given) = (until.left(), until.timeout);
        Self { round: 0, phase: Phase::SetUp, chunk: 0, limit, given }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
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
