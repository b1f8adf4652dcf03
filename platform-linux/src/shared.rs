//! What an engine's handles and its driver share: rings, cells, counters. Nothing here is locked on
//! the way of a write.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex};
use std::task::Waker;
use std::time::{Duration, Instant};

use immwire_core::group::{PeersFull, SubmitError as GroupError};
use immwire_core::id::{PeerId, Time};
use immwire_core::imm::{Added, Imm, ImmTag, Tallies, Tally};
use immwire_core::peer::{DownReason, PeerState};
use immwire_core::wake::Ticket;
use immwire_core::wire::NetAddr;

use crate::callback::{Callbacks, Job};
use crate::cells::Cells;
use crate::clock::Clock;
use crate::counter::Baseline;
use crate::counting::Counting;
use crate::driver::Submission;
use crate::error::{AddPeerError, End, RecvError, SubmitError, TransferError};
use crate::intake::{Intake, Wake};
use crate::sync::lock;
use crate::wakers::{self, Wakers};

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
    /// Of all of them, and of those that are handed to posted receives until these have been called.
    bytes: u64,
    /// Posted receives, and how many messages each is still to get.
    posted: VecDeque<(usize, OnMessage)>,
    /// Messages handed to posted receives whose turn has not come.
    queued: usize,
    /// The engine has stopped: no message will arrive.
    ended: bool,
}

impl InboxState {
    fn put(&mut self, message: Message) {
        self.bytes += message.bytes.len() as u64;
        self.messages.push_back(message);
    }

    fn take(&mut self) -> Option<Message> {
        let message = self.messages.pop_front()?;
        self.bytes -= message.bytes.len() as u64;
        Some(message)
    }
}

impl Inbox {
    /// Messages kept here at most; the rest wait in the mailboxes, and their senders for credit.
    const CAPACITY: usize = 256;
    /// With those of peers that have gone, and their mailboxes with them: so many, and so many bytes, which one message may have.
    const CAPACITY_WITH_LEFT: usize = 64 * Self::CAPACITY;
    const BYTES_WITH_LEFT: u64 = 256 << 20;

    /// Whether there is room for another message: of a peer that is there, or of so many bytes of one that goes.
    pub(crate) fn has_room(&self, of_gone: Option<u64>) -> bool {
        let state = lock(&self.state);
        match of_gone {
            None => state.messages.len() < Self::CAPACITY,
            Some(bytes) => {
                let fits = state.bytes.saturating_add(bytes) <= Self::BYTES_WITH_LEFT;
                fits && state.messages.len() + state.queued < Self::CAPACITY_WITH_LEFT
            }
        }
    }

    pub(crate) fn try_take(&self) -> Option<Message> {
        lock(&self.state).take()
    }

    fn take(&self, timeout: Duration, stopped: impl Fn() -> bool) -> Result<Message, RecvError> {
        let start = Instant::now();
        let mut state = lock(&self.state);
        loop {
            if let Some(message) = state.take() {
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
    /// Tasks that wait for a change.
    tasks: Wakers,
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
        let tasks = book.tasks.take();
        drop(book);
        wakers::wake(tasks);
    }

    /// What `done` says of the peer's state; if that is nothing, leaves `waker`, as `id`, to be woken when some peer's state changes.
    pub(crate) fn watch<R>(
        &self,
        peer: PeerId,
        done: impl Fn(Option<PeerState>) -> Option<R>,
        id: &mut Option<u64>,
        waker: &Waker,
    ) -> Option<R> {
        let mut book = lock(&self.states);
        let result = done(book.states.get(&peer).copied());
        let replaced = if result.is_none() { book.tasks.leave(id, waker) } else { None };
        drop(book);
        // Not under the lock: a waker's drop may run code of others.
        drop(replaced);
        result
    }

    /// Takes back the waker that `id` stands for.
    pub(crate) fn forget(&self, id: Option<u64>) {
        let withdrawn = lock(&self.states).tasks.withdraw(id);
        drop(withdrawn);
    }

    pub(crate) fn get(&self, peer: PeerId) -> Option<PeerState> {
        lock(&self.states).states.get(&peer).copied()
    }

    /// The peers that are not down, in order.
    pub(crate) fn live(&self) -> Vec<PeerId> {
        let book = lock(&self.states);
        let live = book.states.iter().filter(|(_, state)| !matches!(state, PeerState::Down(_)));
        sorted(live.map(|(peer, _)| *peer))
    }

    /// The same, and those that went, as far as they are remembered.
    pub(crate) fn known(&self) -> Vec<PeerId> {
        sorted(lock(&self.states).states.keys().copied())
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

fn sorted(peers: impl Iterator<Item = PeerId>) -> Vec<PeerId> {
    let mut peers: Vec<PeerId> = peers.collect();
    peers.sort_unstable();
    peers
}

/// What an engine has done so far.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) posted: AtomicU64,
    pub(crate) completed: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) immediates: AtomicU64,
    pub(crate) refused_immediates: AtomicU64,
    /// The last of those: [`Stray::pack`].
    pub(crate) last_refused: AtomicU64,
    pub(crate) sleeps: AtomicU64,
}

impl Counters {
    /// An immediate was not counted.
    pub(crate) fn refuse(&self, stray: Stray) {
        self.last_refused.store(stray.pack(), Ordering::Relaxed);
        bump(&self.refused_immediates, 1);
    }

    /// Those of which there were more than `before` by now, and the last. That is read later, and may be one more than were told.
    pub(crate) fn refused_since(&self, before: u64) -> Option<(u64, Stray)> {
        let count = self.refused_immediates.load(Ordering::Relaxed).wrapping_sub(before);
        let last = Stray::unpack(self.last_refused.load(Ordering::Relaxed))?;
        (count > 0).then_some((count, last))
    }
}

/// Whose an immediate was that no counter took, and for which it was meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stray {
    pub(crate) peer: PeerId,
    pub(crate) tag: ImmTag,
}

impl Stray {
    const TAG: u32 = 20;
    const INDEX: u32 = 16;
    const GENERATION: u32 = u64::BITS - Self::TAG - Self::INDEX;

    /// In one word, so that it is read whole. Of the peer's generation 28 bits: more than a slot has tenants in a process's life.
    pub(crate) const fn pack(self) -> u64 {
        let generation = (self.peer.generation as u64) << (u64::BITS - Self::GENERATION);
        generation | (self.peer.index as u64) << Self::TAG | self.tag.bits() as u64
    }

    #[expect(clippy::cast_possible_truncation, reason = "each part is cut to its width")]
    pub(crate) fn unpack(word: u64) -> Option<Self> {
        let tag = ImmTag::from_bits(word as u32 & ((1 << Self::TAG) - 1))?;
        let index = (word >> Self::TAG) as u16;
        let generation = (word >> (Self::TAG + Self::INDEX)) as u32;
        Some(Self { peer: PeerId { index, generation }, tag })
    }
}

/// Adds to a statistic that one thread writes and others read.
pub(crate) fn bump(statistic: &AtomicU64, by: u64) {
    // Relaxed load and store: the driver is the only writer, so no exchange is needed.
    statistic.store(statistic.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// See the [module](self).
pub(crate) struct Shared {
    pub(crate) clock: Clock,
    pub(crate) intake: Intake<Command, Control, Sleeper>,
    pub(crate) cells: Cells<End>,
    pub(crate) counting: Counting,
    pub(crate) tallies: Tallies<Arc<[Tally]>>,
    /// By counter slot.
    baselines: Box<[Mutex<Baseline>]>,
    /// By peer slot, who has it, or had it last.
    tenants: Mutex<Box<[Option<PeerId>]>>,
    counters_taken: Mutex<Box<[bool]>>,
    pub(crate) callbacks: Callbacks,
    pub(crate) inbox: Inbox,
    pub(crate) peers: PeerBook,
    pub(crate) stats: Counters,
}

/// How a driver is made to look.
pub(crate) struct Sleeper {
    clock: Clock,
    /// An eventfd that it waits for when it sleeps. None on a stepped clock, where nobody sleeps.
    wake_fd: Option<OwnedFd>,
}

impl Wake for Sleeper {
    fn wake(&self) {
        if let Some(wake_fd) = &self.wake_fd {
            // An eventfd's counter cannot overflow by ones; it is readable either way.
            let _ = rustix::io::write(wake_fd, &1_u64.to_ne_bytes());
        }
    }

    fn step(&self) -> bool {
        self.clock.ring()
    }
}

/// Sizes of what is shared.
pub(crate) struct Sizes {
    pub(crate) transfers: u16,
    pub(crate) counters: u16,
}

impl Shared {
    /// `None` if a size is beyond what a ring can have.
    pub(crate) fn new(
        sizes: &Sizes,
        tallies: Tallies<Arc<[Tally]>>,
        clock: Clock,
        wake_fd: Option<OwnedFd>,
    ) -> Option<Self> {
        let transfers = usize::from(sizes.transfers);
        let counters = usize::from(sizes.counters);
        let sleeper = Sleeper { clock: clock.clone(), wake_fd };
        Some(Self {
            clock,
            // Each cell has one submission and one cancellation on its way.
            intake: Intake::new(transfers.saturating_mul(2), sleeper)?,
            cells: Cells::new(sizes.transfers),
            counting: Counting::new(sizes.counters),
            baselines: (0..sizes.counters).map(|_| Mutex::default()).collect(),
            tenants: Mutex::new(vec![None; usize::from(tallies.peers())].into_boxed_slice()),
            tallies,
            counters_taken: Mutex::new(vec![false; counters].into_boxed_slice()),
            callbacks: Callbacks::new(transfers + counters + Inbox::CAPACITY)?,
            inbox: Inbox::default(),
            peers: PeerBook::default(),
            stats: Counters::default(),
        })
    }

    /// Readable once a sleeping driver is to look.
    pub(crate) fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.intake.sleeper.wake_fd.as_ref().map(AsFd::as_fd)
    }

    // ---- submission ----

    /// Takes a cell for a new transfer.
    pub(crate) fn take_cell(&self) -> Result<(u16, Ticket), SubmitError> {
        if self.intake.is_stopping() {
            return Err(SubmitError::EngineStopped);
        }
        self.cells.take().ok_or(SubmitError::Full { capacity: self.cells.len() })
    }

    /// Hands a command to the driver. There is room: see [`Cells`].
    pub(crate) fn send(&self, command: Command) {
        self.intake.send(command, |command| self.refuse(command));
    }

    /// Ends what was submitted to a driver that is no more, or takes no more.
    pub(crate) fn refuse(&self, command: Command) {
        let end = End::NeverStarted { error: TransferError::EngineStopped };
        match command {
            Command::Submit(Submission { cell, ticket, hold, .. }) => {
                self.finish_with(cell, ticket, hold, end);
            }
            Command::Send { cell, ticket, .. } => self.finish(cell, ticket, end),
            Command::Cancel { .. } => {}
        }
    }

    /// Has a job run that is due now; a polled driver that sleeps is woken for it.
    pub(crate) fn call(&self, job: Job) {
        self.callbacks.push(job);
        self.intake.ring();
    }

    // ---- counters ----

    pub(crate) fn baseline(&self, tag: ImmTag) -> Option<&Mutex<Baseline>> {
        self.baselines.get(usize::from(tag.slot()))
    }

    /// A peer begins: what the last tenant of its slot has sent is not its own. O(counters that there have been at a time).
    pub(crate) fn begin_tallies(&self, peer: PeerId) {
        let mut tenants = lock(&self.tenants);
        let Some(tenant) = tenants.get_mut(usize::from(peer.index)) else { return };
        let from = tenant.replace(peer);
        for (slot, baseline) in (0..).zip(&self.baselines) {
            // Under the lock: the slot's counter may be retired meanwhile, and what it had is not the next one's.
            let mut baseline = lock(baseline);
            let units = self.tallies.units(slot, peer.index).unwrap_or(0);
            baseline.pass_on(peer.index, from, units, self.tallies.peers());
        }
    }

    /// Whether the peer's slot is still its own, so that what has come by it last is from it.
    pub(crate) fn has_slot(&self, peer: PeerId) -> bool {
        lock(&self.tenants).get(usize::from(peer.index)).copied().flatten() == Some(peer)
    }

    /// Counts an immediate, and wakes whoever waited for it.
    pub(crate) fn count(&self, imm: Imm) -> Added {
        self.counting.count(imm, &self.callbacks)
    }

    /// Reserves a counter slot: the one asked for, or the first that is free.
    pub(crate) fn take_counter(&self, asked: Option<u16>) -> Result<ImmTag, Option<u16>> {
        let mut taken = lock(&self.counters_taken);
        let free = match asked {
            Some(slot) => Some(usize::from(slot)).filter(|&at| taken.get(at) == Some(&false)),
            None => taken.iter().position(|&taken| !taken),
        };
        let slot = free.and_then(|at| u16::try_from(at).ok()).ok_or(asked)?;
        let tag = self.counting.table().tag(slot).ok_or(asked)?;
        if let Some(taken) = taken.get_mut(usize::from(slot)) {
            *taken = true;
        }
        Ok(tag)
    }

    /// Makes a tag stale, and its slot free for the next.
    pub(crate) fn retire_counter(&self, tag: ImmTag) {
        if let Err(error) = self.counting.table().retire(tag) {
            tracing::debug!(%error, %tag, "a counter could not be retired");
        }
        if let Some(baseline) = self.baseline(tag) {
            let mut baseline = lock(baseline);
            self.tallies.retire(tag);
            baseline.retire();
        }
        if let Some(taken) = lock(&self.counters_taken).get_mut(usize::from(tag.slot())) {
            *taken = false;
        }
    }

    // ---- messages ----

    /// Puts a message where it is taken from.
    pub(crate) fn deliver(self: &Arc<Self>, message: Message) {
        lock(&self.inbox.state).put(message);
        self.hand_out();
        self.inbox.arrived.notify_one();
    }

    /// Posts receives; messages that have arrived go to them first.
    pub(crate) fn post_recvs(self: &Arc<Self>, count: usize, call: OnMessage) {
        if count > 0 {
            lock(&self.inbox.state).posted.push_back((count, call));
            self.hand_out();
            self.intake.ring();
        }
    }

    /// Gives messages to posted receives, as many as may wait for their callbacks: with a slow one the
    /// rest stays, and in the end their senders wait. Once no more will arrive, and the last has been called, those
    /// that are left are let go of, where callbacks run: what they hold may be a handle of this engine, and its drop runs code of others.
    fn hand_out(self: &Arc<Self>) {
        let mut state = lock(&self.inbox.state);
        while state.queued < Inbox::CAPACITY && !state.posted.is_empty() {
            let Some(message) = state.messages.pop_front() else { break };
            let bytes = message.bytes.len() as u64;
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
                {
                    let mut state = lock(&shared.inbox.state);
                    state.queued -= 1;
                    state.bytes -= bytes;
                }
                shared.hand_out();
                // A mailbox may have waited for room.
                shared.intake.ring();
                called.unwrap_or_else(|panic| resume_unwind(panic));
            }));
        }
        if state.ended && state.queued == 0 && !state.posted.is_empty() {
            let unused = std::mem::take(&mut state.posted);
            self.callbacks.queue(Box::new(move || drop(unused)));
        }
        drop(state);
        self.callbacks.ring();
    }

    pub(crate) fn recv(&self, timeout: Duration) -> Result<Message, RecvError> {
        let message = self.inbox.take(timeout, || self.intake.is_stopped())?;
        // A mailbox may have waited for room.
        self.intake.ring();
        Ok(message)
    }

    // ---- the end ----

    /// The driver ends: nobody is left waiting for it.
    pub(crate) fn stop(self: &Arc<Self>) {
        self.intake.stop(|command| self.refuse(command));
        self.counting.end(&self.callbacks);
        let live = self.peers.live();
        for peer in live {
            self.peers.set(peer, PeerState::Down(DownReason::Removed));
        }
        lock(&self.inbox.state).ended = true;
        self.hand_out();
        self.inbox.arrived.notify_all();
        self.cells.close();
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Peers that come, send and go take no more memory than that, however often.
    #[test]
    fn what_the_gone_have_sent_is_bounded_in_number_and_bytes() {
        let inbox = Inbox::default();
        let message =
            |len| Message { from: PeerId { index: 0, generation: 0 }, bytes: vec![0; len] };
        for kept in 0..Inbox::CAPACITY_WITH_LEFT {
            assert_eq!((inbox.has_room(None), inbox.has_room(Some(1))), (kept < 256, true));
            lock(&inbox.state).put(message(1));
        }
        assert!(!inbox.has_room(Some(1)));
        // What is on its way to callbacks is there, too.
        let _ = inbox.try_take();
        assert!(inbox.has_room(Some(1)));
        lock(&inbox.state).queued = 1;
        assert!(!inbox.has_room(Some(1)));
        lock(&inbox.state).queued = 0;
        while inbox.try_take().is_some() {}
        assert_eq!(lock(&inbox.state).bytes, 0);
        // The longest that there can be has room, and nothing beside it.
        assert!(inbox.has_room(Some(Inbox::BYTES_WITH_LEFT)));
        lock(&inbox.state).put(message(1));
        assert!(!inbox.has_room(Some(Inbox::BYTES_WITH_LEFT)));
        assert!(inbox.has_room(Some(Inbox::BYTES_WITH_LEFT - 1)) && inbox.has_room(None));
    }

    #[test]
    fn strays_are_what_was_packed() {
        for generation in [0, 1, (1 << Stray::GENERATION) - 1] {
            for index in [0, 1, u16::MAX] {
                for tag in [0, 1, (1 << Stray::TAG) - 1] {
                    let tag = ImmTag::from_bits(tag).expect("20 bits");
                    let stray = Stray { peer: PeerId { index, generation }, tag };
                    assert_eq!(Stray::unpack(stray.pack()), Some(stray));
                }
            }
        }
    }
}
