//! Transfers under way, as their callers see them.
//!
//! A transfer has a cell of the engine's (`cells`) from submission until it has ended and its
//! handle has been dropped; one that was done when it was submitted needs none. Who comes late to look at the ends of many has
//! them [`Kept`], so that none that has ended has a cell.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use immwire_core::wake::Ticket;

use crate::callback::Job;
use crate::error::{End, TransferError, WaitTimeout};
use crate::region::Region;
use crate::shared::{Command, Shared};
use crate::sync::{Timer, lock, sleep_locked};
use crate::wait::OnEnd;

impl Shared {
    /// The engine's side of an end: lets go of the cell and publishes it.
    pub(crate) fn finish(&self, cell: u16, ticket: Ticket, end: End) {
        let outcome = if end == End::Done { Ok(()) } else { Err(end) };
        self.cells.finish(cell, ticket, outcome, &self.callbacks);
    }

    /// As [`Shared::finish`], of a transfer with a source, which is let go of first: whoever is told may close it.
    pub(crate) fn finish_with(&self, cell: u16, ticket: Ticket, source: Option<Region>, end: End) {
        drop(source);
        self.finish(cell, ticket, end);
    }
}

/// A transfer under way. Dropping it lets the transfer go on unwatched.
///
/// Also a future: it resolves with the end, on any executor.
#[must_use = "a transfer's memory is in use until it has ended"]
pub struct Transfer {
    shared: Arc<Shared>,
    /// `None`: it was done when it was submitted.
    cell: Option<(u16, Ticket)>,
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("cell", &self.cell).field("end", &self.poll_end()).finish()
    }
}

fn end_of(outcome: Result<(), End>) -> End {
    outcome.err().unwrap_or(End::Done)
}

impl Transfer {
    pub(crate) const fn new(shared: Arc<Shared>, cell: u16, ticket: Ticket) -> Self {
        Self { shared, cell: Some((cell, ticket)) }
    }

    /// One that was done when it was submitted.
    pub(crate) const fn done(shared: Arc<Shared>) -> Self {
        Self { shared, cell: None }
    }

    /// How it ended; `None` while it is under way. One load.
    #[must_use]
    pub fn poll_end(&self) -> Option<End> {
        let Some((cell, ticket)) = self.cell else { return Some(End::Done) };
        self.shared.cells.poll(cell, ticket).map(end_of)
    }

    /// Waits for the end: spins for some microseconds, then sleeps.
    ///
    /// With a polled engine somebody else must poll meanwhile; see `Driver::wait`.
    ///
    /// # Errors
    ///
    /// [`WaitTimeout`]: it is still under way, and its memory in use.
    pub fn wait(&self, timeout: Duration) -> Result<End, WaitTimeout> {
        let Some((cell, ticket)) = self.cell else { return Ok(End::Done) };
        let outcome = self.shared.cells.wait(cell, ticket, timeout);
        outcome.map(end_of).ok_or(WaitTimeout { after: timeout })
    }

    /// Asks the engine to stop it. It still ends by itself: wait for that before using its memory. A message that has its place in the
    /// order is sent all the same ([`TransferEngine::submit_send`](crate::TransferEngine::submit_send)).
    pub fn cancel(&self) {
        if let Some(command) = self.cancellation() {
            self.shared.send(command);
        }
    }

    /// What the driver is to be sent to stop it; nothing, if it has ended, or that is on its way.
    fn cancellation(&self) -> Option<Command> {
        let (cell, ticket) = self.cell?;
        let is_to_be_sent = self.poll_end().is_none() && self.shared.cells.cancel(cell, ticket);
        is_to_be_sent.then_some(Command::Cancel { cell, ticket })
    }

    /// Leaves a function to be called with the end, on the engine's callback thread (in polled mode,
    /// by whoever polls). At once, if it has ended; after the engine's end, before this returns.
    pub fn on_done(self, call: impl FnOnce(End) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        let cell = self.cell;
        // The job keeps the handle, and with it the cell, until the end is known.
        let job = Box::new(move || {
            let stopped = End::NeverStarted { error: TransferError::EngineStopped };
            let end = self.poll_end().unwrap_or(stopped);
            // It may submit the next, in the place of this.
            drop(self);
            call(end);
        });
        let left = match cell {
            Some((cell, ticket)) => shared.cells.leave(cell, ticket, job),
            None => Err(job as Job),
        };
        if let Err(job) = left {
            shared.call(job);
        }
    }
}

impl Future for Transfer {
    type Output = End;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<End> {
        let Some((cell, ticket)) = self.cell else { return Poll::Ready(End::Done) };
        let outcome = self.shared.cells.watch(cell, ticket, context.waker());
        outcome.map(end_of).map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Some((cell, ticket)) = self.cell {
            self.shared.cells.let_go(cell, ticket);
        }
    }
}

/// A transfer whose handle goes when it ends, and with it the cell, not when somebody comes to look. One after the other, without
/// allocating.
///
/// With its lock held nothing is sent to the driver, nor is a handle dropped: either may tell ends, on this thread.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    state: Mutex<KeptState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct KeptState {
    /// Until it ends.
    transfer: Option<Transfer>,
    /// Since its cell is another's.
    end: Option<End>,
}

impl Kept {
    /// Keeps a transfer. The one before has ended.
    pub(crate) fn keep(self: &Arc<Self>, transfer: Transfer) {
        let (shared, cell) = (Arc::clone(&transfer.shared), transfer.cell);
        *lock(&self.state) = KeptState { transfer: Some(transfer), end: None };
        // Nobody drops the handle before this.
        let is_told = cell.is_some_and(|(cell, ticket)| {
            let told: Arc<dyn OnEnd> = Arc::<Self>::clone(self);
            shared.cells.tell(cell, ticket, told)
        });
        if !is_told {
            self.settle();
        }
    }

    /// It has ended.
    fn settle(&self) {
        let Some(transfer) = lock(&self.state).transfer.take() else { return };
        let end = transfer.poll_end();
        // First: whoever sees the end may submit the next in its place.
        drop(transfer);
        lock(&self.state).end = end;
        self.ended.notify_all();
    }

    /// How it ended; [`None`] while it is under way.
    pub(crate) fn poll_end(&self) -> Option<End> {
        lock(&self.state).end
    }

    /// Waits for the end, as [`Transfer::wait`] does.
    pub(crate) fn wait(&self, timeout: Duration) -> Option<End> {
        let timer = Timer::start(timeout);
        if let Some(end) = timer.spin(|| self.poll_end()) {
            return Some(end);
        }
        let mut state = lock(&self.state);
        while state.end.is_none() {
            state = sleep_locked(&self.ended, state, timer.left()?);
        }
        state.end
    }

    /// As [`Transfer::cancel`].
    pub(crate) fn cancel(&self) {
        let cancellation =
            |transfer: &Transfer| Some((Arc::clone(&transfer.shared), transfer.cancellation()?));
        let asked = lock(&self.state).transfer.as_ref().and_then(cancellation);
        if let Some((shared, command)) = asked {
            shared.send(command);
        }
    }
}

impl OnEnd for Kept {
    fn ended(self: Arc<Self>, _: Ticket, _: u8) {
        self.settle();
    }
}
