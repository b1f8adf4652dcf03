//! Room for transfers: what the engine and a caller's handle share of each one, and who waits for room.
//!
//! ```text
//!  free ── take ──▶ two holders: the engine, and the caller's handle
//!   ▲                 │ finish: the engine lets go, the end is published
//!   │                 │ let_go: the handle is dropped
//!   └── the second of the two empties the cell
//! ```
//!
//! The cells are made when the engine is built, so that submitting allocates nothing; when all are
//! taken, submitting is refused, and [`Cells::wait_room`] waits, as a task does that [`Cells::watch_room`] wakes.
//!
//! # Invariants
//!
//! 1. A cell is free, or has one tenancy, named by its ticket. A ticket of an earlier tenancy changes
//!    nothing of a later one's: neither its end, nor how it failed, nor its holders. (The cell used last is taken first, so
//!    one cell may have all tenancies; a ticket outlives its own only in a cancellation that the driver has not taken yet,
//!    and would be mistaken after 2^21 more of them.)
//! 2. Each cell that was taken comes back once, after both holders are done with it.
//! 3. Whoever waits for room is woken by the next cell that comes back.
//! 4. Whoever sees an end and drops the handle has given the cell back: the engine needs it no more by then.
//! 5. Of each cell one cancellation at most is on its way to the driver, however often it is asked for, and for however many
//!    tenancies: so there is room for all of them.
//!
//! The loom models of `verification/loom` check them on this text.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use immwire_core::pool::{Link, Pool};
use immwire_core::wake::Ticket;

use crate::callback::{Callbacks, Job};
use crate::sync::{AtomicBool, AtomicU32, Condvar, Mutex, Ordering, Timer, lock, sleep_locked};
use crate::wait::{OnEnd, WaitCell, Waiter};
use crate::wakers::{self, Wakers};

const CODE_DONE: u8 = 0;
const CODE_FAILED: u8 = 1;

/// Who still needs a cell, below the generation of its tenancy.
const ENGINE: u32 = 1;
const HANDLE: u32 = 2;
const HOLDERS: u32 = 2;

/// Room for one transfer.
struct TransferCell<F> {
    wait: WaitCell,
    /// How it failed, if it did; written before completion, while the engine holds the cell.
    failure: Mutex<Option<F>>,
    /// Who still needs the cell, and for which tenancy.
    holders: AtomicU32,
    /// The last tenancy that is to be cancelled, while a cancellation is on its way.
    cancelled: Mutex<Option<Ticket>>,
}

/// Room for all transfers that there can be; one that fails has an `F` to say of it.
pub(crate) struct Cells<F> {
    cells: Box<[TransferCell<F>]>,
    free: Pool<Box<[Link]>>,
    /// Somebody waits for a free cell.
    wanted: AtomicBool,
    /// Whether waiting is over: no cell need come back any more.
    closed: Mutex<bool>,
    returned: Condvar,
    /// Tasks that wait for a free cell: left, and taken, under the lock of `closed`.
    tasks: Mutex<Wakers>,
}

impl<F: Copy> Cells<F> {
    /// Room for `count` transfers.
    pub(crate) fn new(count: u16) -> Self {
        let empty = |_| TransferCell {
            wait: WaitCell::default(),
            failure: Mutex::new(None),
            holders: AtomicU32::new(0),
            cancelled: Mutex::new(None),
        };
        Self {
            cells: (0..count).map(empty).collect(),
            free: Pool::new((0..count).map(|_| Link::new()).collect()),
            wanted: AtomicBool::new(false),
            closed: Mutex::new(false),
            returned: Condvar::new(),
            tasks: Mutex::new(Wakers::default()),
        }
    }

    /// How many transfers there is room for.
    pub(crate) fn len(&self) -> usize {
        self.cells.len()
    }

    /// Takes a cell for a new transfer; [`None`] if none is free.
    pub(crate) fn take(&self) -> Option<(u16, Ticket)> {
        let cell = self.free.take()?;
        let slot = self.slot(cell)?;
        let ticket = slot.wait.completion.begin()?;
        // Relaxed: the pool of free cells, and the one that hands the ticket to the engine, order it.
        slot.holders.store(ticket.generation() << HOLDERS | ENGINE | HANDLE, Ordering::Relaxed);
        Some((cell, ticket))
    }

    /// The engine's side of an end: lets go of the cell and publishes it. Nothing, if the ticket is not
    /// the tenancy's or has its end.
    pub(crate) fn finish(
        &self,
        cell: u16,
        ticket: Ticket,
        end: Result<(), F>,
        callbacks: &Callbacks,
    ) {
        let Some(slot) = self.slot(cell) else { return };
        // The engine lets go first: who sees the end, and drops its handle, may take the cell again at once.
        let (is_last, code) = match end {
            Ok(()) => (slot.let_go(ticket, ENGINE), CODE_DONE),
            Err(failure) => {
                let mut kept = lock(&slot.failure);
                // Looked at under the lock, and let go of under it: nobody else writes it before this tenancy is over, nor this one after that.
                if !slot.is_held(ticket, ENGINE) {
                    return;
                }
                *kept = Some(failure);
                (slot.let_go(ticket, ENGINE), CODE_FAILED)
            }
        };
        match is_last {
            // From here on it may be another tenancy's: that is not ended by this, nor are those who wait for it woken.
            Some(false) => {
                slot.wait.complete(ticket, code, callbacks);
            }
            Some(true) => self.empty(cell, ticket),
            None => {}
        }
    }

    /// Gives back a cell that was taken for nothing.
    pub(crate) fn put_back(&self, cell: u16, ticket: Ticket) {
        if self.slot(cell).is_some_and(|slot| slot.wait.completion.reset(ticket)) {
            self.give_back(cell);
        }
    }

    /// The handle is dropped; who lets go last empties the cell.
    pub(crate) fn let_go(&self, cell: u16, ticket: Ticket) {
        let Some(slot) = self.slot(cell) else { return };
        if slot.let_go(ticket, HANDLE) == Some(true) {
            self.empty(cell, ticket);
        }
    }

    /// Nobody needs the cell.
    fn empty(&self, cell: u16, ticket: Ticket) {
        let Some(slot) = self.slot(cell) else { return };
        // Whoever has seen the end may be quicker than who tells it: then it is told here.
        let untold = slot.wait.untold(ticket);
        if slot.wait.completion.reset(ticket) {
            self.give_back(cell);
        }
        // With the place free: it may be what is waited for.
        if let Some(waker) = untold {
            waker.wake();
        }
    }

    /// Asks for a tenancy to be cancelled. Returns whether the driver is to be sent that: not if a cancellation of this cell is
    /// on its way, which asks [`Cells::next_cancelled`] when it has come.
    pub(crate) fn cancel(&self, cell: u16, ticket: Ticket) -> bool {
        self.slot(cell).is_some_and(|slot| lock(&slot.cancelled).replace(ticket).is_none())
    }

    /// A cancellation has come to the driver. Returns the tenancy that was to be cancelled since, if another was: what was
    /// submitted then may come behind this, so the driver sends itself another cancellation.
    pub(crate) fn next_cancelled(&self, cell: u16, ticket: Ticket) -> Option<Ticket> {
        let mut cancelled = lock(&self.slot(cell)?.cancelled);
        if *cancelled == Some(ticket) {
            *cancelled = None;
        }
        *cancelled
    }

    /// How a transfer ended; [`None`] while it is under way. For a holder. One load.
    pub(crate) fn poll(&self, cell: u16, ticket: Ticket) -> Option<Result<(), F>> {
        let slot = self.slot(cell)?;
        slot.wait.poll(ticket).map(|code| slot.end(code))
    }

    /// Waits for the end. For a holder.
    pub(crate) fn wait(
        &self,
        cell: u16,
        ticket: Ticket,
        timeout: Duration,
    ) -> Option<Result<(), F>> {
        let slot = self.slot(cell)?;
        slot.wait.wait(ticket, timeout).map(|code| slot.end(code))
    }

    /// The end, or leaves `waker` to be woken by it. For a holder.
    pub(crate) fn watch(&self, cell: u16, ticket: Ticket, waker: &Waker) -> Option<Result<(), F>> {
        let slot = self.slot(cell)?;
        slot.wait.watch(ticket, waker).map(|code| slot.end(code))
    }

    /// Leaves `job` to be run at the end; gives it back if that has come. For a holder.
    pub(crate) fn leave(&self, cell: u16, ticket: Ticket, job: Job) -> Result<(), Job> {
        let Some(slot) = self.slot(cell) else { return Err(job) };
        match slot.wait.leave(ticket, Waiter::Callback(job)) {
            Err((Waiter::Callback(job), _)) => Err(job),
            Ok(()) | Err((Waiter::Waker(_) | Waiter::Inline(_), _)) => Ok(()),
        }
    }

    /// Has `told` told of the end, by whoever publishes it, then and there. `false`: it has come, and nobody is told. For a holder, as which
    /// `told` takes its place.
    pub(crate) fn tell(&self, cell: u16, ticket: Ticket, told: Arc<dyn OnEnd>) -> bool {
        let slot = self.slot(cell);
        slot.is_some_and(|slot| slot.wait.leave(ticket, Waiter::Inline(told)).is_ok())
    }

    /// Waits until a cell may be free; `false` if `timeout` has passed.
    pub(crate) fn wait_room(&self, timeout: Duration) -> bool {
        let timer = Timer::start(timeout);
        let mut closed = lock(&self.closed);
        loop {
            // One word, exchanged on both sides. If `give_back` comes first, this reads what it wrote
            // and so sees its cell below. If this comes first, `give_back` reads it, and then takes
            // the lock, which is ours until we sleep.
            self.wanted.swap(true, Ordering::AcqRel);
            if *closed || !self.free.is_empty() {
                return true;
            }
            let Some(left) = timer.left() else { return false };
            closed = sleep_locked(&self.returned, closed, left);
        }
    }

    /// Whether a cell may be free; else leaves `waker`, as `id`, to be woken when it is worth looking again.
    pub(crate) fn watch_room(&self, id: &mut Option<u64>, waker: &Waker) -> bool {
        let closed = lock(&self.closed);
        // As in `wait_room`; if `give_back` reads it, it finds the waker.
        self.wanted.swap(true, Ordering::AcqRel);
        let may_be = *closed || !self.free.is_empty();
        let replaced = if may_be { None } else { lock(&self.tasks).leave(id, waker) };
        drop(closed);
        // Not under the locks: a waker's drop may run code of others, and give a cell back.
        drop(replaced);
        may_be
    }

    /// Takes back the waker that `id` stands for.
    pub(crate) fn forget_room(&self, id: Option<u64>) {
        let withdrawn = lock(&self.tasks).withdraw(id);
        drop(withdrawn);
    }

    /// Ends all waiting for room, now and later.
    pub(crate) fn close(&self) {
        *lock(&self.closed) = true;
        self.returned.notify_all();
        let tasks = lock(&self.tasks).take();
        wakers::wake(tasks);
    }

    /// A cell is empty again.
    fn give_back(&self, cell: u16) {
        self.free.give(cell);
        let tasks = self.wanted.swap(false, Ordering::AcqRel).then(|| {
            let _guard = lock(&self.closed);
            self.returned.notify_all();
            lock(&self.tasks).take()
        });
        if let Some(tasks) = tasks {
            // Once the lock is free: a waker may look at once.
            wakers::wake(tasks);
        }
    }

    fn slot(&self, cell: u16) -> Option<&TransferCell<F>> {
        self.cells.get(usize::from(cell))
    }
}

impl<F: Copy> TransferCell<F> {
    fn is_held(&self, ticket: Ticket, holder: u32) -> bool {
        let word = self.holders.load(Ordering::Relaxed);
        word >> HOLDERS == ticket.generation() && word & holder != 0
    }

    /// One holder less; whether it was the last. [`None`]: it had let go before, or the ticket is of another tenancy.
    fn let_go(&self, ticket: Ticket, holder: u32) -> Option<bool> {
        let mut word = self.holders.load(Ordering::Relaxed);
        while word >> HOLDERS == ticket.generation() && word & holder != 0 {
            let without = word & !holder;
            // AcqRel: the last holder comes after everything the other one did.
            match self.holders.compare_exchange_weak(
                word,
                without,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(without & (ENGINE | HANDLE) == 0),
                Err(seen) => word = seen,
            }
        }
        None
    }

    fn end(&self, code: u8) -> Result<(), F> {
        let failure = if code == CODE_FAILED { *lock(&self.failure) } else { None };
        failure.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
#[cfg(not(loom))] // The models have their own.
mod tests {
    use super::*;

    /// Whatever is asked for of two tenancies, and whenever the driver looks: the last one is cancelled, behind its submission,
    /// and there is never more than one cancellation on its way.
    #[test]
    fn one_cancellation_is_on_its_way() {
        // Of each step two bits: the first tenancy is cancelled, the second is, the driver takes one, nothing.
        for steps in 0..4_u32.pow(7) {
            let cells = Cells::<u32>::new(1);
            let tickets = {
                let take = || cells.take().map(|(_, ticket)| ticket);
                let first = take();
                first.iter().for_each(|ticket| cells.put_back(0, *ticket));
                [first, take()].map(|ticket| ticket.expect("free"))
            };
            let (mut ring, mut done, mut last) = (Vec::new(), Vec::new(), None);
            let take = |ring: &mut Vec<Ticket>, done: &mut Vec<Ticket>| {
                if let Some(ticket) = ring.pop() {
                    done.push(ticket);
                    ring.extend(cells.next_cancelled(0, ticket));
                }
            };
            for step in (0..7).map(|at| steps >> (2 * at) & 3) {
                match usize::try_from(step).expect("two bits") {
                    // Nobody cancels an older one afterwards: its handle says that it has ended.
                    0 if last == Some(tickets[1]) => {}
                    at @ 0..2 => {
                        last = Some(tickets[at]);
                        if cells.cancel(0, tickets[at]) {
                            ring.push(tickets[at]);
                        }
                    }
                    2 => take(&mut ring, &mut done),
                    _ => {}
                }
                assert!(ring.len() <= 1, "{steps:#x}");
            }
            while !ring.is_empty() {
                take(&mut ring, &mut done);
            }
            assert_eq!(done.last().copied(), last, "{steps:#x}");
        }
    }
}
