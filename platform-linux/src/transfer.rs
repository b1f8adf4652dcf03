//! Transfers under way, as their callers see them.
//!
//! Every transfer takes one [`TransferCell`] from submission until its end has been seen by the engine
//! and its handle has been dropped. The cells are made when the engine is built, so that submitting
//! allocates nothing; when all are taken, submitting is refused.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use immwire_core::wake::Ticket;

use crate::error::{End, TransferError, WaitTimeout};
use crate::region::lock;
use crate::shared::{Command, Shared};
use crate::wait::{WaitCell, Waiter};

const CODE_DONE: u8 = 0;
const CODE_FAILED: u8 = 1;

/// Room for one transfer.
#[derive(Default)]
pub(crate) struct TransferCell {
    pub(crate) wait: WaitCell,
    /// The end, if it is not [`End::Done`]; written before completion.
    failure: Mutex<Option<End>>,
    /// Who still needs the cell: the engine, and the caller's handle.
    holders: AtomicU8,
}

impl TransferCell {
    /// Takes the cell for a new transfer; it was empty.
    pub(crate) fn begin(&self) -> Option<Ticket> {
        self.holders.store(2, Ordering::Relaxed);
        self.wait.completion.begin()
    }

    fn end(&self, code: u8) -> End {
        let failure = if code == CODE_FAILED { *lock(&self.failure) } else { None };
        failure.unwrap_or(End::Done)
    }
}

impl Shared {
    /// The engine's side of an end: publishes it and lets go of the cell.
    pub(crate) fn finish(&self, cell: u16, ticket: Ticket, end: End) {
        let Some(slot) = self.cells.get(usize::from(cell)) else { return };
        let code = match end {
            End::Done => CODE_DONE,
            failure => {
                *lock(&slot.failure) = Some(failure);
                CODE_FAILED
            }
        };
        if slot.wait.complete(ticket, code, &self.callbacks) {
            self.let_go(cell, ticket);
        }
    }

    /// Gives back a cell that was taken for nothing.
    pub(crate) fn put_back(&self, cell: u16, ticket: Ticket) {
        let slot = self.cells.get(usize::from(cell));
        if slot.is_some_and(|slot| slot.wait.completion.reset(ticket)) {
            self.give_back(cell);
        }
    }

    /// One holder less; the last one empties the cell.
    fn let_go(&self, cell: u16, ticket: Ticket) {
        let Some(slot) = self.cells.get(usize::from(cell)) else { return };
        // AcqRel: the last holder comes after everything the other one did.
        if slot.holders.fetch_sub(1, Ordering::AcqRel) == 1 {
            slot.wait.forget();
            if slot.wait.completion.reset(ticket) {
                self.give_back(cell);
            }
        }
    }
}

/// A transfer under way. Dropping it lets the transfer go on unwatched.
///
/// Also a future: it resolves with the end, on any executor.
#[must_use = "a transfer's memory is in use until it has ended"]
pub struct Transfer {
    shared: Arc<Shared>,
    cell: u16,
    ticket: Ticket,
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("cell", &self.cell).field("end", &self.poll_end()).finish()
    }
}

impl Transfer {
    pub(crate) const fn new(shared: Arc<Shared>, cell: u16, ticket: Ticket) -> Self {
        Self { shared, cell, ticket }
    }

    fn slot(&self) -> Option<&TransferCell> {
        self.shared.cells.get(usize::from(self.cell))
    }

    /// How it ended; `None` while it is under way. One load.
    #[must_use]
    pub fn poll_end(&self) -> Option<End> {
        let slot = self.slot()?;
        slot.wait.poll(self.ticket).map(|code| slot.end(code))
    }

    /// Waits for the end: spins for some microseconds, then sleeps.
    ///
    /// With a polled engine somebody else must poll meanwhile; see `Driver::wait`.
    ///
    /// # Errors
    ///
    /// [`WaitTimeout`]: it is still under way, and its memory in use.
    pub fn wait(&self, timeout: Duration) -> Result<End, WaitTimeout> {
        let late = WaitTimeout { after: timeout };
        let slot = self.slot().ok_or(late)?;
        slot.wait.wait(self.ticket, timeout).map(|code| slot.end(code)).ok_or(late)
    }

    /// Asks the engine to stop it. It still ends by itself: wait for that before using its memory.
    pub fn cancel(&self) {
        if self.poll_end().is_none() {
            self.shared.send(Command::Cancel { cell: self.cell, ticket: self.ticket });
        }
    }

    /// Leaves a function to be called with the end, on the engine's callback thread (in polled mode,
    /// by whoever polls). At once, if it has ended; after the engine's end, before this returns.
    pub fn on_done(self, call: impl FnOnce(End) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        let (cell, ticket) = (self.cell, self.ticket);
        // The job keeps the handle, and with it the cell, until it has run.
        let job = Box::new(move || {
            let stopped = End::NeverStarted { error: TransferError::EngineStopped };
            call(self.poll_end().unwrap_or(stopped));
        });
        let Some(slot) = shared.cells.get(usize::from(cell)) else { return };
        if let Err((Waiter::Callback(job), _)) = slot.wait.leave(ticket, Waiter::Callback(job)) {
            shared.callbacks.push(job);
        }
    }
}

impl Future for Transfer {
    type Output = End;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<End> {
        let Some(slot) = self.slot() else {
            return Poll::Ready(End::NeverStarted { error: TransferError::EngineStopped });
        };
        if let Some(end) = self.poll_end() {
            return Poll::Ready(end);
        }
        match slot.wait.leave(self.ticket, Waiter::Waker(context.waker().clone())) {
            Ok(()) => self.poll_end().map_or(Poll::Pending, Poll::Ready),
            Err((_, code)) => Poll::Ready(slot.end(code)),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.shared.let_go(self.cell, self.ticket);
    }
}
