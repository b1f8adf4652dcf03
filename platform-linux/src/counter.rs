//! Counters of immediates: how a receiver learns that everything has arrived.
//!
//! A counter is a slot of the engine's table with a generation. Its [`ImmTag`] is what peers put into
//! their writes; the tag of a dropped counter is refused, so that a late write of an old round is
//! never counted in a new one.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use immwire_core::id::PeerId;
use immwire_core::imm::{ImmTag, WRITE_UNITS};
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

/// Units by peer slot that are not this tenant's, or belong to earlier waits. Empty where there was no
/// counter yet.
pub(crate) type Baseline = Mutex<Box<[u64]>>;

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
            let mut baseline = lock(baseline);
            // What has come to its first tenant already is its own: peers were told of the slot before. Of a later one it is as the
            // last has left it.
            if baseline.is_empty() {
                *baseline = vec![0; usize::from(shared.tallies.peers())].into_boxed_slice();
            }
        }
        let strayed = shared.stats.refused_immediates.load(Ordering::Relaxed);
        Self { shared, tag, strayed }
    }

    /// What peers put into their writes to count here. 20 bits: `tag().bits()` travels in a message.
    #[must_use]
    pub const fn tag(&self) -> ImmTag {
        self.tag
    }

    /// Whole writes that have arrived and were not consumed.
    #[must_use]
    pub fn available(&self) -> u64 {
        self.shared.counting.table().available(self.tag).unwrap_or(0) / u64::from(WRITE_UNITS)
    }

    /// Consumes `writes` if so many have arrived; returns whether. Two atomic operations at most.
    ///
    /// # Errors
    ///
    /// [`CountError::Busy`] while a wait is under way.
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

    /// As [`ImmCounter::wait`], for what each peer is to send: a time-out then names who is late.
    ///
    /// # Errors
    ///
    /// [`CountError`].
    pub fn wait_from(&self, expected: &[Expected], timeout: Duration) -> Result<(), CountError> {
        let writes = expected.iter().map(|share| share.writes).fold(0, u64::saturating_add);
        self.wait_shares(writes, expected, timeout)?;
        let Some(baseline) = self.shared.baseline(self.tag) else { return Ok(()) };
        let mut baseline = lock(baseline);
        for share in expected {
            if let Some(units) = baseline.get_mut(usize::from(share.peer.index)) {
                *units = units.saturating_add(share.writes.saturating_mul(WRITE_UNITS.into()));
            }
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
    /// polled mode, by whoever polls); at the latest when the engine stops, with the error.
    ///
    /// # Errors
    ///
    /// [`CountError::Busy`]: a wait is under way; `call` is dropped.
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
        let units = self.shared.tallies.units(self.tag.slot(), peer.index).unwrap_or(0);
        let before = lock(baseline).get(usize::from(peer.index)).copied().unwrap_or(0);
        units.saturating_sub(before) / u64::from(WRITE_UNITS)
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

    /// Who had sent what: the peers expected, or, if none were named, all who ever sent.
    fn shares(&self, expected: &[Expected]) -> Vec<PeerShare> {
        let share = |peer, expected| {
            let (arrived, state) = (self.arrived_from(peer), self.shared.peers.get(peer));
            PeerShare { peer, arrived, expected, state }
        };
        if expected.is_empty() {
            return self.shared.peers.known().into_iter().map(|peer| share(peer, None)).collect();
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
    Over,
}

/// Resolves when a count is reached. Made by [`ImmCounter::reached`].
#[must_use = "futures do nothing unless polled"]
pub struct Reached<'a> {
    counter: &'a ImmCounter,
    writes: u64,
    state: State,
}

impl Future for Reached<'_> {
    type Output = Result<(), CountError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ticket = match self.state {
            State::Waiting(ticket) => ticket,
            State::Over => return Poll::Ready(Ok(())),
            State::Idle => match self.counter.arm(self.writes) {
                Ok(Some(ticket)) => {
                    self.state = State::Waiting(ticket);
                    ticket
                }
                other => {
                    self.state = State::Over;
                    return Poll::Ready(other.map(|_| ()));
                }
            },
        };
        let Some(cell) = self.counter.shared.counting.wait_cell(self.counter.tag) else {
            return Poll::Ready(Err(CountError::EngineStopped));
        };
        let Some(code) = cell.watch(ticket, context.waker()) else { return Poll::Pending };
        self.state = State::Over;
        Poll::Ready(self.counter.settle(ticket, code, self.writes))
    }
}

impl Drop for Reached<'_> {
    fn drop(&mut self) {
        if let State::Waiting(ticket) = self.state {
            self.counter.abandon(ticket, self.writes);
        }
    }
}
