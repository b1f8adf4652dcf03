//! Counters of immediates: how a receiver learns that everything has arrived.
//!
//! A counter is a slot of the engine's table with a generation. Its [`ImmTag`] is what peers put into
//! their writes; the tag of a dropped counter is refused, so that a late write of an old round is
//! never counted in a new one.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use immwire_core::id::PeerId;
use immwire_core::imm::{ImmTag, WRITE_UNITS};
use immwire_core::peer::PeerState;
use immwire_core::wake::Ticket;

use crate::counting::{ArmError, CODE_STOPPED};
use crate::error::{CountError, PeerShare, Strays};
use crate::shared::{Shared, Stray};
use crate::sync::lock;
use crate::wait::{OnEnd, Waiter};

/// A counter of this engine's. Dropping it retires its tag.
pub struct ImmCounter {
    shared: Arc<Shared>,
    tag: ImmTag,
    /// Immediates that no counter had taken when this one was made.
    strayed: u64,
}

/// Peers that have gone, and of which a counter still knows what they had sent.
const GONE_PEERS: usize = 64;

/// What a counter needs, beside the units that have come by peer slot, to say what each peer has sent.
#[derive(Debug, Default)]
pub(crate) struct Baseline {
    /// Units by peer slot that are of peers which had it before, or belong to earlier waits. Empty where there was no counter yet.
    before: Box<[u64]>,
    /// Units of peers whose slots others have now, the last that went at the end.
    gone: Vec<(PeerId, u64)>,
}

impl Baseline {
    fn make(&mut self, peers: u16) {
        if self.before.is_empty() {
            self.before = vec![0; usize::from(peers)].into_boxed_slice();
        }
    }

    /// The slot of `from`, if anybody had it, is another peer's from now on; `units` have come by it so far, of as many `peers` as there can be.
    pub(crate) fn pass_on(&mut self, slot: u16, from: Option<PeerId>, units: u64, peers: u16) {
        if units > 0 {
            self.make(peers);
        }
        let Some(before) = self.before.get_mut(usize::from(slot)) else { return };
        let own = units.saturating_sub(mem::replace(before, units));
        if let Some(from) = from.filter(|_| own > 0) {
            if self.gone.len() == GONE_PEERS {
                self.gone.remove(0);
            }
            self.gone.push((from, own));
        }
    }

    /// Units of a peer's that earlier waits have not consumed, where `units` have come by its slot, and it has it or had it.
    fn own(&self, peer: PeerId, has_slot: bool, units: u64) -> u64 {
        if has_slot {
            let before = self.before.get(usize::from(peer.index)).copied();
            return units.saturating_sub(before.unwrap_or(0));
        }
        self.gone.iter().rev().find(|(gone, _)| *gone == peer).map_or(0, |(_, units)| *units)
    }

    /// A wait has consumed units of a peer's.
    fn consume(&mut self, peer: PeerId, has_slot: bool, units: u64) {
        if has_slot {
            if let Some(before) = self.before.get_mut(usize::from(peer.index)) {
                *before = before.saturating_add(units);
            }
        } else if let Some((_, own)) = self.gone.iter_mut().rev().find(|(gone, _)| *gone == peer) {
            *own = own.saturating_sub(units);
        }
    }

    /// The next tenant begins: nothing has come to it.
    pub(crate) fn retire(&mut self) {
        self.before.fill(0);
        self.gone.clear();
    }
}

impl fmt::Debug for ImmCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let available = self.available();
        f.debug_struct("ImmCounter").field("tag", &self.tag).field("available", &available).finish()
    }
}

/// What a wait expects of one peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// The peer.
    pub peer: PeerId,
    /// Its writes and pages.
    pub writes: u64,
}

impl ImmCounter {
    pub(crate) fn new(shared: Arc<Shared>, tag: ImmTag) -> Self {
        if let Some(baseline) = shared.baseline(tag) {
            // What has come to this tenant already is its own: peers may have been told of it before.
            lock(baseline).make(shared.tallies.peers());
        }
        let strayed = shared.stats.refused_immediates.load(Ordering::Relaxed);
        Self { shared, tag, strayed }
    }

    /// What peers put into their writes to count here. 20 bits: `tag().bits()` travels in a message.
    #[must_use]
    pub const fn tag(&self) -> ImmTag {
        self.tag
    }

    /// Whole writes that have arrived and were not consumed; 0 while somebody waits for more than there are, who has them kept.
    #[must_use]
    pub fn available(&self) -> u64 {
        self.shared.counting.table().available(self.tag).unwrap_or(0) / u64::from(WRITE_UNITS)
    }

    /// Consumes `writes` if so many have arrived; returns whether. Two atomic operations at most.
    ///
    /// # Errors
    ///
    /// [`CountError::Busy`] while a wait is under way, [`CountError::Counter`] for more writes than a counter holds.
    pub fn try_take(&self, writes: u64) -> Result<bool, CountError> {
        Ok(self.shared.counting.table().consume(self.tag, writes)?)
    }

    /// Waits until `writes` have arrived, and consumes them. Early ones count.
    ///
    /// With a polled engine somebody else must poll meanwhile; see `Driver::wait_count`.
    ///
    /// # Errors
    ///
    /// [`CountError`]: with [`CountError::Timeout`], nothing was consumed.
    pub fn wait(&self, writes: u64, timeout: Duration) -> Result<(), CountError> {
        self.wait_shares(writes, &[], timeout)
    }

    /// As [`ImmCounter::wait`], for what each peer is to send: a time-out then names who is late. What other ways of waiting have consumed here
    /// before counts as sent still, so one counter is best waited for in one way.
    ///
    /// # Errors
    ///
    /// [`CountError`].
    pub fn wait_from(&self, expected: &[Expected], timeout: Duration) -> Result<(), CountError> {
        let writes = expected.iter().map(|share| share.writes).fold(0, u64::saturating_add);
        self.wait_shares(writes, expected, timeout)?;
        let Some(baseline) = self.shared.baseline(self.tag) else { return Ok(()) };
        for Expected { peer, writes } in expected {
            let has_slot = self.shared.has_slot(*peer);
            lock(baseline).consume(*peer, has_slot, writes.saturating_mul(WRITE_UNITS.into()));
        }
        Ok(())
    }

    fn wait_shares(
        &self,
        writes: u64,
        expected: &[Expected],
        timeout: Duration,
    ) -> Result<(), CountError> {
        let Some(ticket) = self.arm(writes)? else { return Ok(()) };
        let cell = self.shared.counting.wait_cell(self.tag);
        let code = cell.and_then(|cell| cell.wait(ticket, timeout));
        match code {
            Some(code) => self.settle(ticket, code, writes),
            None => self.give_up(ticket, writes, expected, timeout),
        }
    }

    /// Calls `call` when `writes` have arrived and were consumed, on the engine's callback thread (in
    /// polled mode, by whoever polls); at the latest when the engine stops, with the error. One that holds the engine, to submit what
    /// comes next, keeps it until the count is reached.
    ///
    /// # Errors
    ///
    /// [`CountError::Busy`]: a wait is under way. [`CountError::Counter`]: more writes than a counter holds.
    /// [`CountError::EngineStopped`]: it has ended. `call` is dropped.
    pub fn on_count(
        self: &Arc<Self>,
        writes: u64,
        call: impl FnOnce(Result<(), CountError>) + Send + 'static,
    ) -> Result<(), CountError> {
        let Some(ticket) = self.arm(writes)? else {
            self.shared.call(Box::new(move || call(Ok(()))));
            return Ok(());
        };
        let counter = Arc::clone(self);
        let job = Box::new(move || {
            let cell = counter.shared.counting.wait_cell(counter.tag);
            let code = cell.and_then(|cell| cell.poll(ticket));
            call(counter.settle(ticket, code.unwrap_or(CODE_STOPPED), writes));
        });
        let cell = self.shared.counting.wait_cell(self.tag).ok_or(CountError::EngineStopped)?;
        if let Err((Waiter::Callback(job), _)) = cell.leave(ticket, Waiter::Callback(job)) {
            self.shared.call(job);
        }
        Ok(())
    }

    /// A future of the same: resolves when `writes` have arrived and were consumed. Dropping it gives
    /// back what had arrived.
    pub const fn reached(&self, writes: u64) -> Reached<'_> {
        Reached { counter: self, writes, state: State::Idle }
    }

    /// Has `told` told when the wait ends, by whoever ends it. The code, if it has ended: then nobody is.
    pub(crate) fn leave(&self, ticket: Ticket, told: Arc<dyn OnEnd>) -> Option<u8> {
        let cell = self.shared.counting.wait_cell(self.tag)?;
        cell.leave(ticket, Waiter::Inline(told)).err().map(|(_, code)| code)
    }

    /// Gives up a wait whose end nobody asks after: what had arrived is there for the next.
    pub(crate) fn abandon(&self, ticket: Ticket, writes: u64) {
        self.shared.counting.abandon(self.tag, ticket, writes, &self.shared.callbacks);
    }

    /// Puts back what a wait had consumed.
    pub(crate) fn restore(&self, writes: u64) {
        self.shared.counting.restore(self.tag, writes, &self.shared.callbacks);
    }

    /// Arms the counter; `None` if enough was there, and is consumed.
    pub(crate) fn arm(&self, writes: u64) -> Result<Option<Ticket>, CountError> {
        let shared = &self.shared;
        shared.counting.arm(self.tag, writes, &shared.callbacks).map_err(|error| match error {
            ArmError::Busy => CountError::Busy,
            ArmError::Counter(error) => error.into(),
            ArmError::Ended => CountError::EngineStopped,
        })
    }

    /// After completion: empties the cell, and says what the code means.
    pub(crate) fn settle(&self, ticket: Ticket, code: u8, writes: u64) -> Result<(), CountError> {
        let reached = self.shared.counting.settle(self.tag, ticket, code, writes);
        if reached { Ok(()) } else { Err(CountError::EngineStopped) }
    }

    /// The time is up: disarms, or finds that the target was reached after all.
    pub(crate) fn give_up(
        &self,
        ticket: Ticket,
        writes: u64,
        expected: &[Expected],
        after: Duration,
    ) -> Result<(), CountError> {
        let Some(missing_units) = self.disarm(ticket, writes)? else { return Ok(()) };
        let missing = missing_units.div_ceil(WRITE_UNITS.into());
        let peers = self.shares(expected);
        Err(CountError::Timeout { target: writes, missing, after, peers, strays: self.strays() })
    }

    /// Consumes `writes` if they are there; otherwise says who is late, as a wait that had timed out.
    pub(crate) fn late(&self, writes: u64, after: Duration) -> Result<(), CountError> {
        match self.arm(writes)? {
            None => Ok(()),
            Some(ticket) => self.give_up(ticket, writes, &[], after),
        }
    }

    /// Whole writes of a peer that were counted here, consumed or not, but for those that [`ImmCounter::wait_from`] has consumed.
    pub(crate) fn arrived_from(&self, peer: PeerId) -> u64 {
        let Some(baseline) = self.shared.baseline(self.tag) else { return 0 };
        let has_slot = self.shared.has_slot(peer);
        let units = self.shared.tallies.units(self.tag.slot(), peer.index).unwrap_or(0);
        let own = lock(baseline).own(peer, has_slot, units);
        own / u64::from(WRITE_UNITS)
    }

    /// `None`: too late, it was reached.
    fn disarm(&self, ticket: Ticket, writes: u64) -> Result<Option<u64>, CountError> {
        Ok(self.shared.counting.disarm(self.tag, ticket, writes)?)
    }

    /// What has come for no counter while there was this one.
    fn strays(&self) -> Option<Strays> {
        let (count, Stray { peer, tag }) = self.shared.stats.refused_since(self.strayed)?;
        Some(Strays { count, peer, tag, instead: self.tag })
    }

    /// Who had sent what: the peers expected, or, if none were named, all that are there, and of those that went whoever had sent something.
    fn shares(&self, expected: &[Expected]) -> Vec<PeerShare> {
        let share = |peer, expected| {
            let (arrived, state) = (self.arrived_from(peer), self.shared.peers.get(peer));
            PeerShare { peer, arrived, expected, state }
        };
        if expected.is_empty() {
            let all = self.shared.peers.known().into_iter();
            let shares = all.map(|peer| share(peer, None));
            let is_down = |share: &PeerShare| matches!(share.state, Some(PeerState::Down(_)));
            return shares.filter(|share| share.arrived > 0 || !is_down(share)).collect();
        }
        expected.iter().map(|it| share(it.peer, Some(it.writes))).collect()
    }
}

impl Drop for ImmCounter {
    fn drop(&mut self) {
        self.shared.retire_counter(self.tag);
    }
}

enum State {
    Idle,
    Waiting(Ticket),
    Over(Result<(), CountError>),
}

/// Resolves when a count is reached. Made by [`ImmCounter::reached`]. Polled again, it says the same again, and consumes nothing.
#[must_use = "futures do nothing unless polled"]
pub struct Reached<'a> {
    counter: &'a ImmCounter,
    writes: u64,
    state: State,
}

impl Future for Reached<'_> {
    type Output = Result<(), CountError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ticket = match &self.state {
            State::Waiting(ticket) => *ticket,
            State::Over(outcome) => return Poll::Ready(outcome.clone()),
            State::Idle => match self.counter.arm(self.writes) {
                Ok(Some(ticket)) => {
                    self.state = State::Waiting(ticket);
                    ticket
                }
                other => return self.over(other.map(|_| ())),
            },
        };
        let Some(cell) = self.counter.shared.counting.wait_cell(self.counter.tag) else {
            return Poll::Ready(Err(CountError::EngineStopped));
        };
        let Some(code) = cell.watch(ticket, context.waker()) else { return Poll::Pending };
        let outcome = self.counter.settle(ticket, code, self.writes);
        self.over(outcome)
    }
}

impl Reached<'_> {
    fn over(&mut self, outcome: Result<(), CountError>) -> Poll<Result<(), CountError>> {
        self.state = State::Over(outcome.clone());
        Poll::Ready(outcome)
    }
}

impl Drop for Reached<'_> {
    fn drop(&mut self) {
        if let State::Waiting(ticket) = self.state {
            self.counter.abandon(ticket, self.writes);
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const SLOT: u16 = 1;

    #[derive(Debug, Clone, Copy)]
    enum Do {
        /// A counter is made, where there is none.
        Make,
        Arrive(u64),
        /// The next peer has the slot.
        Next,
        /// A wait consumes of the peer of so many before.
        Consume(u32, u64),
        Retire,
    }

    /// Every short program, beside what each peer has sent and waits have consumed.
    #[test]
    fn what_a_peer_has_sent_is_its_own_whoever_has_its_slot_next() {
        let all = [
            Do::Make,
            Do::Arrive(3),
            Do::Next,
            Do::Consume(0, 1),
            Do::Consume(1, 2),
            Do::Consume(1, 9),
            Do::Retire,
        ];
        let len = 6;
        for mut number in 0..all.len().pow(len) {
            let (mut baseline, mut units, mut generation) = (Baseline::default(), 0_u64, 0_u32);
            let mut own = BTreeMap::from([(0_u32, 0_u64)]);
            let peer = |generation| PeerId { index: SLOT, generation };
            let mut program = Vec::new();
            for _ in 0..len {
                let step = all[number % all.len()];
                number /= all.len();
                program.push(step);
                match step {
                    Do::Make => baseline.make(3),
                    Do::Arrive(more) => {
                        units += more;
                        *own.entry(generation).or_default() += more;
                    }
                    Do::Next => {
                        baseline.pass_on(SLOT, Some(peer(generation)), units, 3);
                        generation += 1;
                        own.insert(generation, 0);
                    }
                    Do::Consume(before, writes) => {
                        // Nobody waits where there is no counter.
                        baseline.make(3);
                        let Some(of) = generation.checked_sub(before) else { continue };
                        let had = own[&of];
                        // Of whoever has the slot more may be consumed than has come of it: the next that come.
                        let writes = if before == 0 { writes.min(had) } else { writes };
                        baseline.consume(peer(of), before == 0, writes);
                        own.insert(of, had.saturating_sub(writes));
                    }
                    Do::Retire => {
                        baseline.make(3);
                        baseline.retire();
                        units = 0;
                        own.values_mut().for_each(|own| *own = 0);
                    }
                }
                for (&of, &own) in &own {
                    let found = baseline.own(peer(of), of == generation, units);
                    assert_eq!(found, own, "of {of} after {program:?}");
                }
            }
        }
    }

    #[test]
    fn of_the_peers_that_went_the_last_are_remembered() {
        let mut baseline = Baseline::default();
        let peer = |generation| PeerId { index: 0, generation };
        for generation in 0..100 {
            baseline.pass_on(0, Some(peer(generation)), u64::from(generation) + 1, 1);
        }
        let known: Vec<_> = (0..100).filter(|&it| baseline.own(peer(it), false, 100) > 0).collect();
        assert_eq!(known, (36..100).collect::<Vec<_>>());
    }
}
