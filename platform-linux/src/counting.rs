//! Waiting for counts: the counter's word, which says when a target is reached, and the completion
//! beside it, which wakes whoever waits.
//!
//! ```text
//!   owner                                   whoever counts
//!   arm: begin the completion,              count: add to the word; if that fires,
//!        then arm the word                         complete what is pending
//!   disarm: withdraw the word's target;
//!           too late: wait for the completion that is on its way
//! ```
//!
//! # Invariants
//!
//! 1. A target that fires completes the wait that armed it, and no other: the completion is pending
//!    before the word is armed, and is not reset between a firing and its completion.
//! 2. A wait that is begun while the engine ends is ended: by [`Counting::end`] or by itself.
//! 3. Units are consumed once, by the wait that reports them reached, or are there for the next.
//!
//! The loom models of `verification/loom` check them on this text.

use immwire_core::imm::{
    Added, Armed, CounterError, CounterSlot, CounterTable, Disarmed, Imm, ImmTag, MAX_IMM_UNITS,
    WRITE_UNITS,
};
use immwire_core::wake::Ticket;

use crate::callback::Callbacks;
use crate::sync::{AtomicBool, Ordering, fence, yield_now};
use crate::wait::WaitCell;

/// The target was reached.
pub(crate) const CODE_REACHED: u8 = 0;
/// The engine was stopped.
pub(crate) const CODE_STOPPED: u8 = 1;

/// Why a wait cannot begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArmError {
    /// Another wait on the counter is under way.
    Busy,
    /// The counter cannot be used so.
    Counter(CounterError),
    /// The engine has ended.
    Ended,
}

impl From<CounterError> for ArmError {
    fn from(error: CounterError) -> Self {
        match error {
            CounterError::AlreadyArmed { .. } => Self::Busy,
            other => Self::Counter(other),
        }
    }
}

/// The counters of an engine, and a completion for each.
pub(crate) struct Counting {
    table: CounterTable<Box<[CounterSlot]>>,
    waits: Box<[WaitCell]>,
    /// Nobody counts any more.
    ended: AtomicBool,
}

impl Counting {
    /// `slots` counters at nothing.
    pub(crate) fn new(slots: u16) -> Self {
        Self {
            table: CounterTable::new((0..slots).map(|_| CounterSlot::new()).collect()),
            waits: (0..slots).map(|_| WaitCell::default()).collect(),
            ended: AtomicBool::new(false),
        }
    }

    /// The words.
    pub(crate) const fn table(&self) -> &CounterTable<Box<[CounterSlot]>> {
        &self.table
    }

    /// Where whoever waits on a counter waits.
    pub(crate) fn wait_cell(&self, tag: ImmTag) -> Option<&WaitCell> {
        self.waits.get(usize::from(tag.slot()))
    }

    /// Counts an immediate, and wakes whoever waited for it.
    pub(crate) fn count(&self, imm: Imm, callbacks: &Callbacks) -> Added {
        let added = self.table.add(imm);
        if added == Added::Fired
            && let Some(cell) = self.wait_cell(imm.tag())
            && let Some(ticket) = cell.completion.pending()
        {
            cell.complete(ticket, CODE_REACHED, callbacks);
        }
        added
    }

    /// Begins a wait for `writes`; [`None`] if they were there, and are consumed.
    pub(crate) fn arm(
        &self,
        tag: ImmTag,
        writes: u64,
        callbacks: &Callbacks,
    ) -> Result<Option<Ticket>, ArmError> {
        if self.table.consume(tag, writes)? {
            return Ok(None);
        }
        if self.has_ended() {
            return Err(ArmError::Ended);
        }
        let cell = self.wait_cell(tag).ok_or(ArmError::Ended)?;
        // Pending before armed: whoever fires finds the ticket.
        let ticket = cell.completion.begin().ok_or(ArmError::Busy)?;
        match self.table.arm(tag, writes) {
            Ok(Armed::Waiting { .. }) => {
                // With the fence in `end`: either we see the end, or it sees the tenancy.
                fence(Ordering::SeqCst);
                if self.has_ended() {
                    cell.complete(ticket, CODE_STOPPED, callbacks);
                }
                Ok(Some(ticket))
            }
            Ok(Armed::Ready) => {
                let _ = cell.completion.reset(ticket);
                Ok(None)
            }
            Err(error) => {
                let _ = cell.completion.reset(ticket);
                Err(error.into())
            }
        }
    }

    /// After a wait's completion with `code`: empties its cell; returns whether the target was reached.
    pub(crate) fn settle(&self, tag: ImmTag, ticket: Ticket, code: u8, writes: u64) -> bool {
        if code != CODE_REACHED {
            // Nobody counts any more: the counter is left as a time-out would leave it.
            let _ = self.table.disarm(tag, writes);
        }
        if let Some(cell) = self.wait_cell(tag) {
            let _ = cell.completion.reset(ticket);
        }
        code == CODE_REACHED
    }

    /// Gives up a wait for `writes`: the units that were missing, or [`None`] if it is too late, and
    /// the writes are consumed.
    pub(crate) fn disarm(
        &self,
        tag: ImmTag,
        ticket: Ticket,
        writes: u64,
    ) -> Result<Option<u64>, CounterError> {
        let Some(cell) = self.wait_cell(tag) else { return Ok(Some(0)) };
        let missing = match self.table.disarm(tag, writes)? {
            Disarmed::Withdrawn { missing_units } => Some(missing_units),
            Disarmed::AlreadyFired => {
                // Whoever fired is about to complete the ticket. Not to wait for that would let it
                // complete the next one.
                while cell.poll(ticket).is_none() && !self.has_ended() {
                    yield_now();
                }
                None
            }
        };
        cell.forget();
        let _ = cell.completion.reset(ticket);
        Ok(missing)
    }

    /// Gives up a wait that nobody asks after any more: what had arrived is there for the next, also if
    /// the target was reached.
    pub(crate) fn abandon(&self, tag: ImmTag, ticket: Ticket, writes: u64, callbacks: &Callbacks) {
        if let Ok(None) = self.disarm(tag, ticket, writes) {
            self.restore(tag, writes, callbacks);
        }
    }

    /// Puts back what a wait had consumed.
    pub(crate) fn restore(&self, tag: ImmTag, writes: u64, callbacks: &Callbacks) {
        let mut units = writes.saturating_mul(WRITE_UNITS.into());
        while units > 0 {
            let part = u16::try_from(units).unwrap_or(u16::MAX).min(MAX_IMM_UNITS);
            let Some(imm) = tag.with_units(part) else { return };
            let added = self.count(imm, callbacks);
            if matches!(added, Added::Stale | Added::NoSuchSlot | Added::Overflow) {
                return;
            }
            units -= u64::from(part);
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Nobody counts any more: ends every wait that is under way.
    pub(crate) fn end(&self, callbacks: &Callbacks) {
        self.ended.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        for cell in &self.waits {
            if let Some(ticket) = cell.completion.pending() {
                cell.complete(ticket, CODE_STOPPED, callbacks);
            }
        }
    }
}
