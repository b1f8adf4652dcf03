//! What an engine's handles and its driver share: rings, cells, counters. Nothing here is locked on
//! the way of a write.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use immwire_core::group::{PeersFull, SubmitError as GroupError};
use immwire_core::id::{PeerId, Time};
use immwire_core::imm::{
    Added, CounterSlot, CounterTable, Imm, ImmTag, MAX_IMM_UNITS, Tallies, Tally, WRITE_UNITS,
};
use immwire_core::peer::{DownReason, PeerState};
use immwire_core::ring::{Cell, Ring};
use immwire_core::wake::{Doorbell, Ticket};
use immwire_core::wire::NetAddr;

use crate::callback::Callbacks;
use crate::clock::Clock;
use crate::counter::{CODE_REACHED, CODE_STOPPED};
use crate::driver::Submission;
use crate::error::{AddPeerError, End, RecvError, SubmitError, TransferError};
use crate::region::lock;
use crate::transfer::TransferCell;
use crate::wait::WaitCell;

/// How long a peer that went down is remembered by name, at most so many of them.
const REMEMBERED_PEERS: usize = 4096;

/// What a caller sends to the driver on the way of a write.
#[expect(clippy::large_enum_variant, reason = "commands lie in a ring that is made at set-up")]
pub(crate) enum Command {
    /// Post this.
    Submit(Submission),
    /// Stop that.
    Cancel { cell: u16, ticket: Ticket },
    /// Put this message into the peer's mailbox.
    Send { cell: u16, ticket: Ticket, peer: PeerId, bytes: Box<[u8]>, deadline: Time },
}

/// What a caller asks of the driver off the way of writes.
pub(crate) enum Control {
    AddPeer { address: Box<NetAddr>, reply: SyncSender<Result<PeerId, AddPeerError>> },
    RemovePeer { peer: PeerId },
    SetNicHealth { nic: u8, healthy: bool },
}

/// A message from a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who sent it.
    pub from: PeerId,
    /// What it says.
    pub bytes: Vec<u8>,
}

/// A function that is called with a message.
pub(crate) type OnMessage = Arc<dyn Fn(Message) + Send + Sync>;

/// Messages that have arrived and wait to be taken.
#[derive(Default)]
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
    arrived: Condvar,
}

#[derive(Default)]
struct InboxState {
    messages: VecDeque<Message>,
    /// Posted receives, and how many messages each is still to get.
    posted: VecDeque<(usize, OnMessage)>,
    /// Messages handed to posted receives whose turn has not come.
    queued: usize,
}

impl Inbox {
    /// Messages kept here at most; the rest wait in the mailboxes, and their senders for credit.
    const CAPACITY: usize = 256;

    /// Whether there is room for another message.
    pub(crate) fn has_room(&self) -> bool {
        lock(&self.state).messages.len() < Self::CAPACITY
    }

    pub(crate) fn try_take(&self) -> Option<Message> {
        lock(&self.state).messages.pop_front()
    }

    fn take(&self, timeout: Duration, stopped: impl Fn() -> bool) -> Result<Message, RecvError> {
        let start = Instant::now();
        let mut state = lock(&self.state);
        loop {
            if let Some(message) = state.messages.pop_front() {
                return Ok(message);
            }
            if stopped() {
                return Err(RecvError::EngineStopped);
            }
            let left = timeout.checked_sub(start.elapsed());
            let left = left.ok_or(RecvError::Timeout { after: timeout })?;
            let waited = self.arrived.wait_timeout(state, left);
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

/// What is known of peers, for those who ask or wait.
#[derive(Default)]
pub(crate) struct PeerBook {
    states: Mutex<PeerStates>,
    changed: Condvar,
}

#[derive(Default)]
struct PeerStates {
    states: HashMap<PeerId, PeerState>,
    /// Peers that are down, the oldest first.
    down: VecDeque<PeerId>,
}

impl PeerBook {
    pub(crate) fn set(&self, peer: PeerId, state: PeerState) {
        let mut book = lock(&self.states);
        book.states.insert(peer, state);
        if matches!(state, PeerState::Down(_)) {
            book.down.push_back(peer);
            if book.down.len() > REMEMBERED_PEERS {
                let forgotten = book.down.pop_front();
                forgotten.and_then(|peer| book.states.remove(&peer));
            }
        }
        self.changed.notify_all();
    }

    pub(crate) fn get(&self, peer: PeerId) -> Option<PeerState> {
        lock(&self.states).states.get(&peer).copied()
    }

    /// The peers that are not down, in order.
    pub(crate) fn known(&self) -> Vec<PeerId> {
        let book = lock(&self.states);
        let live = book.states.iter().filter(|(_, state)| !matches!(state, PeerState::Down(_)));
        let mut peers: Vec<PeerId> = live.map(|(peer, _)| *peer).collect();
        peers.sort_unstable();
        peers
    }

    /// Waits until `done` says something of the peer's state.
    pub(crate) fn wait<R>(
        &self,
        peer: PeerId,
        timeout: Duration,
        done: impl Fn(Option<PeerState>) -> Option<R>,
    ) -> Option<R> {
        let start = Instant::now();
        let mut book = lock(&self.states);
        loop {
            if let Some(result) = done(book.states.get(&peer).copied()) {
                return Some(result);
            }
            let left = timeout.checked_sub(start.elapsed())?;
            let waited = self.changed.wait_timeout(book, left);
            book = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

/// What an engine has done so far.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) posted: AtomicU64,
    pub(crate) completed: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) immediates: AtomicU64,
    pub(crate) refused_immediates: AtomicU64,
    pub(crate) sleeps: AtomicU64,
}

/// Adds to a statistic that one thread writes and others read.
pub(crate) fn bump(statistic: &AtomicU64, by: u64) {
    // Relaxed load and store: the driver is the only writer, so no exchange is needed.
    statistic.store(statistic.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// See the [module](self).
pub(crate) struct Shared {
    pub(crate) clock: Clock,
    pub(crate) commands: Ring<Command, Box<[Cell<Command>]>>,
    pub(crate) control: Mutex<VecDeque<Control>>,
    /// Something is in `control`.
    pub(crate) control_waits: AtomicBool,
    /// Rung after anything was put into `commands` or `control`.
    pub(crate) bell: Doorbell,
    /// Makes a sleeping driver look.
    pub(crate) wake_fd: OwnedFd,
    pub(crate) cells: Box<[TransferCell]>,
    free_cells: Ring<u16, Box<[Cell<u16>]>>,
    capacity: Mutex<()>,
    /// Somebody waits for a free cell.
    capacity_wanted: AtomicBool,
    capacity_returned: Condvar,
    pub(crate) counters: CounterTable<Box<[CounterSlot]>>,
    pub(crate) tallies: Tallies<Arc<[Tally]>>,
    waits: Box<[WaitCell]>,
    counters_taken: Mutex<Box<[bool]>>,
    pub(crate) callbacks: Callbacks,
    pub(crate) inbox: Inbox,
    pub(crate) peers: PeerBook,
    pub(crate) stats: Counters,
    /// No more is taken; the driver is to end.
    pub(crate) stopping: AtomicBool,
    /// The driver has ended.
    stopped: AtomicBool,
}

/// Sizes of what is shared.
pub(crate) struct Sizes {
    pub(crate) transfers: u16,
    pub(crate) counters: u16,
}

fn ring<T>(capacity: usize) -> Option<Ring<T, Box<[Cell<T>]>>> {
    let cells: Box<[Cell<T>]> =
        (0..capacity.next_power_of_two().max(2)).map(|_| Cell::new()).collect();
    // SAFETY: a boxed slice's `as_ref` is the same memory wherever the box is moved, and the ring owns
    // the box.
    unsafe { Ring::from_storage(cells) }.ok()
}

impl Shared {
    /// `None` if a size is beyond what a ring can have.
    pub(crate) fn new(
        sizes: &Sizes,
        tallies: Tallies<Arc<[Tally]>>,
        wake_fd: OwnedFd,
    ) -> Option<Self> {
        let transfers = usize::from(sizes.transfers);
        let counters = usize::from(sizes.counters);
        let free_cells = ring(transfers)?;
        for cell in 0..sizes.transfers {
            // The ring has room for all of them.
            let _ = free_cells.try_push(cell);
        }
        Some(Self {
            clock: Clock::start(),
            // Each transfer has one submission and may have some cancellations under way.
            commands: ring(transfers.saturating_mul(2))?,
            control: Mutex::default(),
            control_waits: AtomicBool::new(false),
            bell: Doorbell::new(),
            wake_fd,
            cells: (0..transfers).map(|_| TransferCell::default()).collect(),
            free_cells,
            capacity: Mutex::default(),
            capacity_wanted: AtomicBool::new(false),
            capacity_returned: Condvar::new(),
            counters: CounterTable::new((0..counters).map(|_| CounterSlot::new()).collect()),
            tallies,
            waits: (0..counters).map(|_| WaitCell::default()).collect(),
            counters_taken: Mutex::new(vec![false; counters].into_boxed_slice()),
            callbacks: Callbacks::new(transfers + counters + Inbox::CAPACITY)?,
            inbox: Inbox::default(),
            peers: PeerBook::default(),
            stats: Counters::default(),
            stopping: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        })
    }

    // ---- submission ----

    /// Takes a cell for a new transfer.
    pub(crate) fn take_cell(&self) -> Result<(u16, Ticket), SubmitError> {
        if self.stopping.load(Ordering::Relaxed) {
            return Err(SubmitError::EngineStopped);
        }
        let full = SubmitError::Full { capacity: self.cells.len() };
        let cell = self.free_cells.try_pop().ok_or(full)?;
        let ticket = self.cells.get(usize::from(cell)).and_then(TransferCell::begin);
        ticket.map(|ticket| (cell, ticket)).ok_or(full)
    }

    /// A cell is empty again.
    pub(crate) fn give_back(&self, cell: u16) {
        // The ring has room for every cell there is.
        let _ = self.free_cells.try_push(cell);
        if self.capacity_wanted.swap(false, Ordering::AcqRel) {
            let _guard = lock(&self.capacity);
            self.capacity_returned.notify_all();
        }
    }

    /// Waits until a cell may be free.
    pub(crate) fn wait_capacity(&self, timeout: Duration) -> bool {
        let start = Instant::now();
        let mut guard = lock(&self.capacity);
        loop {
            self.capacity_wanted.store(true, Ordering::Release);
            // A cell that came back before the flag was seen is found here.
            if !self.free_cells.is_empty() || self.is_stopped() {
                return true;
            }
            let Some(left) = timeout.checked_sub(start.elapsed()) else { return false };
            // Short naps: a notification between the look and the nap costs one of them.
            let nap = left.min(Duration::from_millis(1));
            let waited = self.capacity_returned.wait_timeout(guard, nap);
            guard = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Hands a command to the driver. There is room, since each transfer sends few; a cancellation
    /// that finds none is tried until there is.
    pub(crate) fn send(&self, command: Command) {
        if let Err(command) = self.commands.try_push(command) {
            self.send_late(command);
        }
        self.ring_bell();
        if self.is_stopped() {
            self.refuse_commands();
        }
    }

    #[cold]
    fn send_late(&self, mut command: Command) {
        while let Err(back) = self.commands.try_push(command) {
            if self.is_stopped() {
                self.refuse_commands();
            }
            command = back;
            std::thread::yield_now();
        }
    }

    /// Ends what was submitted to a driver that is no more.
    fn refuse_commands(&self) {
        let error = TransferError::EngineStopped;
        while let Some(command) = self.commands.try_pop() {
            match command {
                Command::Submit(Submission { cell, ticket, .. })
                | Command::Send { cell, ticket, .. } => {
                    self.finish(cell, ticket, End::NeverStarted { error });
                }
                Command::Cancel { .. } => {}
            }
        }
    }

    /// Asks the driver for something off the way of writes. If it has ended the question is dropped,
    /// which whoever waits for the answer notices.
    pub(crate) fn ask(&self, control: Control) {
        lock(&self.control).push_back(control);
        self.control_waits.store(true, Ordering::Release);
        self.ring_bell();
        if self.is_stopped() {
            lock(&self.control).clear();
        }
    }

    /// After a wait was begun: ends it if the driver has ended, and may not have seen it.
    pub(crate) fn complete_if_stopped(&self, cell: &WaitCell, ticket: Ticket) {
        // With the fence in `stop`: either we see the end, or `stop` sees the tenancy.
        fence(Ordering::SeqCst);
        if self.is_stopped() {
            cell.complete(ticket, CODE_STOPPED, &self.callbacks);
        }
    }

    /// Wakes the driver if it sleeps.
    pub(crate) fn ring_bell(&self) {
        if self.bell.ring() {
            // An eventfd's counter cannot overflow by ones; it is readable either way.
            let _ = rustix::io::write(&self.wake_fd, &1_u64.to_ne_bytes());
        }
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake_fd.as_fd()
    }

    // ---- counters ----

    pub(crate) fn wait_cell(&self, tag: ImmTag) -> Option<&WaitCell> {
        self.waits.get(usize::from(tag.slot()))
    }

    /// Counts an immediate, and wakes whoever waited for it.
    pub(crate) fn count(&self, imm: Imm) -> Added {
        let added = self.counters.add(imm);
        if added == Added::Fired
            && let Some(cell) = self.wait_cell(imm.tag())
            && let Some(ticket) = cell.completion.pending()
        {
            cell.complete(ticket, CODE_REACHED, &self.callbacks);
        }
        added
    }

    /// Puts back what a wait had consumed that nobody wants any more.
    pub(crate) fn restore(&self, tag: ImmTag, writes: u64) {
        let mut units = writes.saturating_mul(WRITE_UNITS.into());
        while units > 0 {
            let part = u16::try_from(units).unwrap_or(u16::MAX).min(MAX_IMM_UNITS);
            let Some(imm) = tag.with_units(part) else { return };
            if matches!(self.count(imm), Added::Stale | Added::NoSuchSlot | Added::Overflow) {
                return;
            }
            units -= u64::from(part);
        }
    }

    /// Reserves a counter slot: the one asked for, or the first that is free.
    pub(crate) fn take_counter(&self, asked: Option<u16>) -> Result<ImmTag, Option<u16>> {
        let mut taken = lock(&self.counters_taken);
        let free = match asked {
            Some(slot) => Some(usize::from(slot)).filter(|&at| taken.get(at) == Some(&false)),
            None => taken.iter().position(|&taken| !taken),
        };
        let slot = free.and_then(|at| u16::try_from(at).ok()).ok_or(asked)?;
        let tag = self.counters.tag(slot).ok_or(asked)?;
        if let Some(taken) = taken.get_mut(usize::from(slot)) {
            *taken = true;
        }
        Ok(tag)
    }

    /// Makes a tag stale, and its slot free for the next.
    pub(crate) fn retire_counter(&self, tag: ImmTag) {
        if let Err(error) = self.counters.retire(tag) {
            tracing::debug!(%error, %tag, "a counter could not be retired");
        }
        if let Some(taken) = lock(&self.counters_taken).get_mut(usize::from(tag.slot())) {
            *taken = false;
        }
    }

    // ---- messages ----

    /// Puts a message where it is taken from.
    pub(crate) fn deliver(self: &Arc<Self>, message: Message) {
        lock(&self.inbox.state).messages.push_back(message);
        self.hand_out();
        self.inbox.arrived.notify_one();
    }

    /// Posts receives; messages that have arrived go to them first.
    pub(crate) fn post_recvs(self: &Arc<Self>, count: usize, call: OnMessage) {
        if count > 0 {
            lock(&self.inbox.state).posted.push_back((count, call));
            self.hand_out();
            self.ring_bell();
        }
    }

    /// Gives messages to posted receives, as many as may wait for their callbacks: with a slow one the
    /// rest stays, and in the end their senders wait.
    fn hand_out(self: &Arc<Self>) {
        let mut state = lock(&self.inbox.state);
        while state.queued < Inbox::CAPACITY && !state.posted.is_empty() {
            let Some(message) = state.messages.pop_front() else { break };
            let Some((left, call)) = state.posted.front_mut() else { break };
            *left -= 1;
            let (spent, call) = (*left == 0, Arc::clone(call));
            if spent {
                state.posted.pop_front();
            }
            state.queued += 1;
            let shared = Arc::clone(self);
            // Queued under the lock, so that messages keep their order.
            self.callbacks.queue(Box::new(move || {
                let called = catch_unwind(AssertUnwindSafe(|| call(message)));
                lock(&shared.inbox.state).queued -= 1;
                shared.hand_out();
                // A mailbox may have waited for room.
                shared.ring_bell();
                called.unwrap_or_else(|panic| resume_unwind(panic));
            }));
        }
        drop(state);
        self.callbacks.ring();
    }

    pub(crate) fn recv(&self, timeout: Duration) -> Result<Message, RecvError> {
        let message = self.inbox.take(timeout, || self.is_stopped())?;
        // A mailbox may have waited for room.
        self.ring_bell();
        Ok(message)
    }

    // ---- the end ----

    /// Whether the driver has ended.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// The driver ends: nobody is left waiting for it.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.stopped.store(true, Ordering::Release);
        // With the fence in `Doorbell::ring`, between a push and the look in `send`: whoever pushes
        // after this loop has emptied the ring sees `stopped`, and empties it again.
        fence(Ordering::SeqCst);
        self.refuse_commands();
        lock(&self.control).clear();
        for cell in &self.waits {
            if let Some(ticket) = cell.completion.pending() {
                cell.complete(ticket, CODE_STOPPED, &self.callbacks);
            }
        }
        let live = self.peers.known();
        for peer in live {
            self.peers.set(peer, PeerState::Down(DownReason::Removed));
        }
        drop(lock(&self.inbox.state));
        self.inbox.arrived.notify_all();
        self.capacity_returned.notify_all();
        // After the last of them: none may be pushed to a thread that has gone.
        self.callbacks.end();
    }
}

impl From<PeersFull> for AddPeerError {
    fn from(full: PeersFull) -> Self {
        Self::Full(full)
    }
}

/// The end of a transfer that the scheduler refused.
pub(crate) const fn refused(error: GroupError) -> End {
    End::NeverStarted { error: TransferError::Refused(error) }
}
