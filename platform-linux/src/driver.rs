//! What an engine does, step by step: takes commands, polls and feeds its provider, tells the ends.
//!
//! [`Drive::poll`] is one step and never waits. The engine's thread repeats it and sleeps in between
//! when nothing is left to do; a caller-polled engine is stepped by its caller. What to post, when a
//! transfer ends and whether a peer is there is decided by the core's `DomainGroup`; this file passes
//! things between it, the provider and the callers.

use std::sync::Arc;
use std::time::Duration;

use immwire_core::calls::{CallSlot, Calls, Taken};
use immwire_core::doorbell;
use immwire_core::group::{
    self, Answer, DomainGroup, Event, LostSlot, Options, PeerSlot, Token, TransferSlot, WorkError,
    WorkRequest,
};
use immwire_core::id::{EngineId, MAX_NICS, NicIndex, PeerId, Time, TransferId};
use immwire_core::imm::{Added, Imm, Tally, TallyWriter};
use immwire_core::mailbox::{self, Geometry, Round, SlotIndex};
use immwire_core::peer::{DownReason, PeerState};
use immwire_core::plan::{self, ControlWrite, Request as PlanRequest, RunLayout, TargetList as _};
use immwire_core::receipt::{Epoch, Settlement};
use immwire_core::region::MrDesc;
use immwire_core::staging::waits_behind;
use immwire_core::wake::Ticket;
use immwire_core::wire::{Hello, NetAddr, Refusal};

use crate::error::{AddPeerError, End, TransferError};
use crate::gpus::number;
use crate::message::{Again, Link, Outgoing, Placed, Undelivered};
use crate::provider::{
    ConnectError, Path, Place, Provider, RemotePath, Sink, Unfenced, nic_states,
};
use crate::region::{Region, Registry};
use crate::request::{Checked, PageIndices, Request, Targets};
use crate::shared::{Command, Control, Shared, Stray, bump, refused};

/// Commands taken in one step.
const COMMANDS_PER_STEP: usize = 64;
/// Pieces handed to the provider at once.
const BATCH: usize = 32;
/// Steps without anything to do between two looks at the clock.
const STEPS_PER_CLOCK: u32 = 16;
/// Between two looks at the clock: after as long, this engine was not run, or slept.
const LATE: Duration = Duration::from_millis(20);
/// Polls at most until all is heard that came meanwhile. Each takes what a provider reports at a time, 64 pieces or so.
const CATCH_UP: u32 = 1024;
/// How long an engine that ends waits at least for peers that are in the middle of a write, whatever [`Builder::drain`](crate::Builder::drain)
/// says of its own.
const QUIET_WITHIN: Duration = Duration::from_secs(1);
/// How often dropped regions are tried again.
const SWEEP_EVERY: Duration = Duration::from_millis(10);

/// Engines that are gone of which it is remembered how often they called.
const REMEMBERED_GONE: usize = 256;

/// How long an engine sleeps at most while some peer has no room for what it is to be sent.
const PARKED_NAP: Duration = Duration::from_millis(1);

/// What the engine's own transfers carry as [`Options::user`]: the highest bit, the peer, and the slot that is
/// given back.
const OWN: u64 = 1 << 63;

fn own_user(peer: PeerId, slot: SlotIndex) -> u64 {
    OWN | u64::from(slot) << 48 | u64::from(peer.index) << 32 | u64::from(peer.generation)
}

/// The credit that a transfer of the engine's own was.
fn credit_of(user: u64) -> (PeerId, SlotIndex) {
    let [a, b, c, d, low, high, slot, _] = user.to_le_bytes();
    let (index, generation) = (u16::from_le_bytes([low, high]), u32::from_le_bytes([a, b, c, d]));
    (PeerId { index, generation }, slot)
}

/// Whether nothing was written of a transfer that is a single piece.
const fn is_unwritten(end: group::End) -> bool {
    // A piece that was posted, and ends for want of a NIC, was settled with its receiver first.
    matches!(
        end,
        group::End::NeverStarted { .. }
            | group::End::Quiesced { error: group::TransferError::NoNic }
    )
}

pub(crate) type Group = DomainGroup<
    PageIndices,
    Targets,
    Box<[TransferSlot<PageIndices, Targets>]>,
    Box<[PeerSlot]>,
    Box<[LostSlot]>,
>;

/// The caller's side of a transfer that the group works on.
#[derive(Default)]
struct Hook {
    /// It is a message, which must not be lost, since later ones wait for it.
    message: Option<Placed>,
    ticket: Option<Ticket>,
    id: Option<TransferId>,
    /// Keeps the source registered; a message's is its peer's ([`State::sources`]).
    hold: Option<Region>,
}

/// An engine with its provider, which goes first: what is left ends when nothing can be read or written for it any more.
pub(crate) struct Engine<P: Provider> {
    provider: P,
    state: State,
    staged: [Vec<WorkRequest>; MAX_NICS],
    /// Pieces whose peer has no room for them now: they do not stand in the way of other peers'.
    parked: [Vec<WorkRequest>; MAX_NICS],
    /// Of each NIC: [`crate::provider::NicLimits::batch_bytes`].
    batch_bytes: [u64; MAX_NICS],
    /// Of each NIC: [`crate::provider::NicLimits::together`].
    together: [u16; MAX_NICS],
    steps: u32,
    /// [`Clock::tick`] when the caller last polled.
    tick: u64,
    next_sweep: Time,
    /// When this last looked at all that it looks at now and then only, or began to sleep, or woke: whoever is silent since is so
    /// while somebody listens.
    looked: Time,
    /// The last step did something: there may be more of it.
    was_busy: bool,
    /// The last poll of the provider found something: there may be more of it.
    found: bool,
    /// Steps since a peer has asked to part.
    parting: u32,
}

/// Everything but the provider, which reports here while it is borrowed.
pub(crate) struct State {
    pub(crate) group: Group,
    pub(crate) shared: Arc<Shared>,
    pub(crate) registry: Arc<Registry>,
    tally: TallyWriter<Arc<[Tally]>>,
    /// By cell.
    hooks: Box<[Hook]>,
    /// By peer slot.
    pub(crate) links: Box<[Option<Link>]>,
    /// What messages and answers to peers that are gone were written from: what is in flight may still be read.
    pub(crate) sources: Vec<(PeerId, Region)>,
    /// Peers whose mailbox has messages that nobody took, or to whom something could not be sent.
    pub(crate) unfinished: Vec<u16>,
    /// Transfers of the engine's own under way: credits.
    pub(crate) own: u16,
    /// The most of them.
    pub(crate) own_room: u16,
    /// Messages that wait for a slot in their peer's mailbox.
    pub(crate) waiting_messages: usize,
    /// Transfers whose sources wait for streams.
    held: Vec<Submission>,
    /// Peers that ask to part, and are to be answered.
    partings: Vec<Asking>,
    /// Paths that broke, and whose pieces may still be staged or parked.
    broken: Vec<(PeerId, Path)>,
    address: NetAddr,
    geometry: Geometry,
    heartbeat_ms: u32,
    /// Calls made so far.
    called: u64,
    /// Whose calls count no more.
    calls: Calls<Box<[CallSlot]>>,
    pub(crate) now: Time,
}

/// What an engine needs to know besides its provider.
pub(crate) struct Setup {
    pub(crate) group: Group,
    pub(crate) shared: Arc<Shared>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) tally: TallyWriter<Arc<[Tally]>>,
    pub(crate) peers: u16,
    pub(crate) geometry: Geometry,
    pub(crate) heartbeat: Duration,
    pub(crate) own_room: u16,
}

/// A transfer that a caller asks for.
pub(crate) struct Submission {
    pub(crate) cell: u16,
    pub(crate) ticket: Ticket,
    pub(crate) request: Checked,
    pub(crate) deadline: Time,
    /// Keeps the source registered until the end.
    pub(crate) hold: Option<Region>,
    /// What the source is to wait for: see [`Region::behind`].
    pub(crate) behind: u64,
}

/// Steps in which all that came before cannot be known to be read, or something of ours is in flight, while a peer waits to be let go.
const STEPS_BEFORE_PARTING: u32 = 256;

/// A peer that asks to part.
#[derive(Debug, Clone, Copy)]
struct Asking {
    peer: PeerId,
    round: Round,
    /// It was of use when the question came.
    used: bool,
}

/// One step at a time, whatever the provider.
pub(crate) trait Drive: Send {
    /// The first half of a step: what the provider has to report. Returns whether there was anything.
    fn arrivals(&mut self) -> bool;
    /// The second half: what callers, the clock and the group want. Returns whether there was anything.
    fn progress(&mut self) -> bool;
    /// One step. Returns whether anything was done.
    fn poll(&mut self) -> bool {
        self.arrivals() | self.progress()
    }
    /// One step of a caller's, who may poll as seldom as it likes: it looks at the clock if that has moved on visibly.
    fn poll_seldom(&mut self) -> bool;
    /// Sleeps until there may be something to do; at most `limit`.
    fn sleep(&mut self, limit: Duration);
    /// Looks at the clock, and has the next step look at all that it looks at now and then only.
    fn wake(&mut self);
    /// When a step has something to do, at the earliest, if nothing else happens.
    fn next_timeout(&self) -> Time;
    /// Takes a request, and posts it as far as that goes.
    fn submit(&mut self, submission: Submission);
    /// Makes a small write, if nothing stands before it and the provider makes such writes while it is called; `false`, and
    /// nothing was done, if not.
    fn write_at_once(&mut self, write: &plan::SingleRef<'_>) -> bool;
    /// Posts a small write at once if nothing stands in its way; `false`, and nothing was done, if
    /// something does.
    fn express(
        &mut self,
        write: &plan::SingleRef<'_>,
        cell: u16,
        ticket: Ticket,
        src: &Region,
    ) -> bool;
    /// Starts to connect to a peer.
    fn add_peer(&mut self, address: &NetAddr) -> Result<PeerId, AddPeerError>;
    /// Ends transfers and connections, within about three times the drain time, and then waits for peers that are in the middle of a
    /// write: once more as long, [`QUIET_WITHIN`] at least. What is left then ends when the engine is dropped, but for such writes.
    fn shut_down(&mut self, drain: Duration);
}

impl<P: Provider> Engine<P> {
    pub(crate) fn new(provider: P, setup: Setup) -> Self {
        let cells = setup.shared.cells.len();
        // More than there can be peers, so that whoever is one is remembered.
        let remembered = usize::from(setup.peers) + REMEMBERED_GONE;
        let state = State {
            group: setup.group,
            registry: setup.registry,
            tally: setup.tally,
            hooks: (0..cells).map(|_| Hook::default()).collect(),
            links: (0..setup.peers).map(|_| None).collect(),
            sources: Vec::new(),
            unfinished: Vec::with_capacity(usize::from(setup.peers)),
            own: 0,
            own_room: setup.own_room,
            waiting_messages: 0,
            held: Vec::new(),
            partings: Vec::with_capacity(usize::from(setup.peers)),
            broken: Vec::new(),
            address: provider.address(),
            geometry: setup.geometry,
            heartbeat_ms: u32::try_from(setup.heartbeat.as_millis()).unwrap_or(u32::MAX),
            called: 0,
            calls: Calls::new(vec![CallSlot::VACANT; remembered].into_boxed_slice()),
            now: setup.shared.clock.now(),
            shared: setup.shared,
        };
        let nics = provider.nics().iter();
        let depths: Vec<_> = nics.map(|nic| usize::from(nic.limits.queue_depth)).collect();
        // No more pieces of transfers than that are in flight, so queueing them allocates nothing.
        let queue = |nic| Vec::with_capacity(depths.get(nic).copied().unwrap_or(0));
        let (staged, parked) = (std::array::from_fn(queue), std::array::from_fn(queue));
        let batch = |nic: usize| provider.nics().get(nic).map_or(0, |nic| nic.limits.batch_bytes);
        let batch_bytes = std::array::from_fn(batch);
        let together = |nic: usize| provider.nics().get(nic).map_or(1, |nic| nic.limits.together);
        let together = std::array::from_fn(together);
        let (next_sweep, looked) = (Time::ZERO, state.now);
        let (steps, was_busy, found, parting) = (0, false, false, 0);
        Self {
            provider,
            state,
            staged,
            parked,
            batch_bytes,
            together,
            steps,
            tick: 0,
            next_sweep,
            looked,
            was_busy,
            found,
            parting,
        }
    }

    /// Posts what the group wants posted on one NIC.
    fn pump(&mut self, nic: NicIndex) -> bool {
        self.retract();
        let unparked = self.unpark(nic);
        let at = usize::from(nic);
        let (Some(staged), Some(parked), Some(&most)) =
            (self.staged.get_mut(at), self.parked.get_mut(at), self.batch_bytes.get(at))
        else {
            return false;
        };
        if staged.is_empty() && !self.state.group.has_work(nic) {
            return unparked;
        }
        let bytes = staged.iter().map(|work| work.len).sum::<u64>();
        let (pieces, bytes) = (BATCH.saturating_sub(staged.len()), most.saturating_sub(bytes));
        self.state.group.poll_batch(nic, pieces, bytes, |work| staged.push(work));
        if staged.is_empty() {
            return unparked;
        }
        let posted = self.provider.post(nic, staged, &mut self.state).min(staged.len());
        bump(&self.state.shared.stats.posted, posted as u64);
        if posted == 0 {
            // There is no room at this peer. The others' turn comes next.
            park(staged, parked);
        } else {
            staged.drain(..posted);
        }
        true
    }

    /// Gives back to the group what was to be posted on a path that has broken since.
    #[inline]
    fn retract(&mut self) {
        if !self.state.broken.is_empty() {
            self.retract_broken();
        }
    }

    #[cold]
    fn retract_broken(&mut self) {
        while let Some((peer, path)) = self.state.broken.pop() {
            let gone = |work: &mut WorkRequest| {
                work.peer == peer && (work.nic, work.remote_nic) == (path.nic, path.remote_nic)
            };
            for queue in self.staged.iter_mut().chain(&mut self.parked) {
                for work in queue.extract_if(.., gone) {
                    self.state.undelivered(&work);
                }
            }
        }
    }

    /// Tries again what was parked, in each step pieces of one peer's, and of these such as wait for the same.
    fn unpark(&mut self, nic: NicIndex) -> bool {
        let Some(parked) = self.parked.get_mut(usize::from(nic)) else { return false };
        let Some(first) = parked.first().copied() else { return false };
        let posted = self.provider.post(nic, parked, &mut self.state).min(parked.len());
        bump(&self.state.shared.stats.posted, posted as u64);
        if posted == 0 {
            let turn = parked.iter().take_while(|work| waits_behind(work, &first)).count();
            parked.rotate_left(turn);
        } else {
            parked.drain(..posted);
        }
        posted > 0
    }

    fn commands(&mut self) -> bool {
        let mut any = false;
        for _ in 0..COMMANDS_PER_STEP {
            let Some(command) = self.state.shared.intake.next() else { break };
            any = true;
            // What was asked before this was submitted is done before it.
            if self.state.shared.intake.is_asked() {
                self.control();
            }
            if let Command::Cancel { cell, ticket } = command
                && let Some(ticket) = self.state.shared.cells.next_cancelled(cell, ticket)
            {
                self.state.shared.send(Command::Cancel { cell, ticket });
            }
            match command {
                Command::Submit(submission) => self.take(submission),
                Command::Cancel { cell, ticket } if self.cancel_held(cell, ticket) => {}
                command => self.state.command(command),
            }
        }
        if self.state.shared.intake.is_asked() {
            any = true;
            self.control();
        }
        any
    }

    /// Whether its source is not to be read yet: it waits for a stream, and what reads it knows none.
    fn is_early(&self, submission: &Submission) -> bool {
        let Submission { request, hold: Some(src), behind: behind @ 1.., .. } = submission else {
            return false;
        };
        let read_by_nics = any_peer(request.request(), |peer| self.provider.reads_gpus(peer));
        // If it cannot be said, `release` says so.
        read_by_nics && !src.is_through(*behind).unwrap_or(false)
    }

    /// Takes a transfer, now or when its source may be read.
    fn take(&mut self, submission: Submission) {
        if !self.is_early(&submission) {
            return self.begin(submission);
        }
        if self.state.held.capacity() == 0 {
            self.state.held.reserve_exact(self.state.hooks.len());
        }
        self.state.held.push(submission);
    }

    /// Goes on with transfers that were held and whose streams are through, and ends those that have no time or no peer any
    /// more. Returns whether there were any.
    fn release(&mut self) -> bool {
        let mut any = false;
        let mut at = 0;
        // What was found not to be through: then what waits for that and more is not, and the driver is not asked again.
        let mut early: Option<(Place, u64)> = None;
        while let Some(submission) = self.state.held.get(at) {
            let behind = submission.behind;
            let through = match &submission.hold {
                Some(src) if early.is_some_and(|it| it.0 == src.place() && it.1 <= behind) => {
                    Ok(false)
                }
                Some(src) => src.is_through(behind),
                None => Ok(true),
            };
            if let (Ok(false), Some(src)) = (&through, &submission.hold) {
                let first =
                    early.filter(|it| it.0 == src.place()).map_or(behind, |it| it.1.min(behind));
                early = Some((src.place(), first));
            }
            let is_gone = |peer| {
                let state = self.state.group.peer_state(peer);
                state.is_none_or(|state| matches!(state, PeerState::Down(_)))
            };
            let is_over = self.state.now >= submission.deadline
                || any_peer(submission.request.request(), is_gone);
            if through == Ok(false) && !is_over {
                at += 1;
                continue;
            }
            any = true;
            let submission = self.state.held.swap_remove(at);
            match through {
                Ok(true) => self.begin(submission),
                // The group has words for why not.
                Ok(false) => self.begin_and(submission, |group, now, id| {
                    // Of this one alone: peers that were not listened to meanwhile are not silent.
                    group.handle_deadline(now, id);
                    // In case that it has none: its source is not to be read.
                    group.cancel(now, id);
                }),
                Err(why) => {
                    let (peer, nic) = (first_peer(submission.request.request()), 0);
                    let error = WorkError::Device(number(why));
                    let error = group::TransferError::Piece { peer, nic, error };
                    let end = End::NeverStarted { error: TransferError::Stopped(error) };
                    let Submission { cell, ticket, hold, .. } = submission;
                    self.state.shared.finish_with(cell, ticket, hold, end);
                }
            }
        }
        any
    }

    /// Answers peers that ask to part. What they wrote before is counted first: all of it is when a poll finds nothing. What callers have
    /// submitted is taken first. Nor is anything of
    /// ours in flight, a heartbeat say, when a connection ends: some transports have more to do then. Where that does not come to be, they
    /// are to stay.
    fn part(&mut self) {
        self.parting += 1;
        let nics = 0..u8::try_from(self.provider.nics().len()).unwrap_or(u8::MAX);
        let group = &self.state.group;
        let is_quiet = |it: &Asking| nics.clone().all(|nic| group.in_flight(it.peer, nic) == 0);
        let is_ready = !self.found
            && self.state.shared.intake.is_empty()
            && self.state.partings.iter().all(is_quiet);
        if !is_ready && self.parting < STEPS_BEFORE_PARTING {
            return;
        }
        self.parting = 0;
        self.state.note_use();
        while let Some(Asking { peer, round, used }) = self.state.partings.pop() {
            self.state.group.handle_parting(self.state.now, peer, round, used || !is_ready);
        }
    }

    /// Cancels a transfer that is held; `false`: it is not.
    fn cancel_held(&mut self, cell: u16, ticket: Ticket) -> bool {
        let is_it = |it: &Submission| (it.cell, it.ticket) == (cell, ticket);
        let Some(at) = self.state.held.iter().position(is_it) else { return false };
        let submission = self.state.held.swap_remove(at);
        self.begin_and(submission, |group, now, id| {
            group.cancel(now, id);
        });
        true
    }

    /// Submits to the group what is to end before anything of it is posted.
    fn begin_and(
        &mut self,
        submission: Submission,
        stop: impl FnOnce(&mut Group, Time, TransferId),
    ) {
        let Submission { cell, ticket, request, deadline, hold, .. } = submission;
        self.state.refresh();
        let options = Options { deadline, user: u64::from(cell) };
        match self.state.group.submit(request, options) {
            Ok(id) => {
                self.state.hook(cell, ticket, id, hold);
                stop(&mut self.state.group, self.state.now, id);
            }
            Err(rejected) => self.refuse((cell, ticket), hold, rejected.error),
        }
    }

    /// Tells that the group did not take a transfer: after all that the group has to tell, for that may be why. Else somebody could hear
    /// from a transfer that its peer is down, ask for the peer, and be told that it is up.
    #[cold]
    fn refuse(
        &mut self,
        (cell, ticket): (u16, Ticket),
        hold: Option<Region>,
        error: group::SubmitError,
    ) {
        self.events();
        self.state.shared.finish_with(cell, ticket, hold, refused(error));
    }

    /// Submits to the group, and posts a piece that goes at once.
    fn begin(&mut self, submission: Submission) {
        let Submission { cell, ticket, request, deadline, hold, .. } = submission;
        let options = Options { deadline, user: u64::from(cell) };
        if let PlanRequest::Single(write) = request.request() {
            let write = write.by_ref();
            if self.make_at_once(&write) {
                return self.state.shared.finish_with(cell, ticket, hold, End::Done);
            }
            if let Some(work) = self.state.group.express(&write, options) {
                self.state.hook(cell, ticket, work.token.transfer(), hold);
                return self.post_now(work);
            }
        }
        match self.state.group.submit(request, options) {
            Ok(id) => self.state.hook(cell, ticket, id, hold),
            Err(rejected) => self.refuse((cell, ticket), hold, rejected.error),
        }
    }

    /// See [`Drive::write_at_once`]. The source is its caller's, who keeps it registered meanwhile.
    #[inline(always)]
    fn make_at_once(&mut self, write: &plan::SingleRef<'_>) -> bool {
        if write.len > P::AT_ONCE_BYTES || write.imm.is_none() {
            return false;
        }
        let Some((nic, piece)) = self.state.group.unhindered(write) else { return false };
        let first = self.staged.get(usize::from(nic)).is_some_and(Vec::is_empty);
        if !first || !self.provider.write_at_once(nic, &piece) {
            return false;
        }
        self.state.group.wrote(self.state.now, nic, &piece);
        let stats = &self.state.shared.stats;
        bump(&stats.posted, 1);
        bump(&stats.completed, 1);
        true
    }

    /// Posts one piece, with those that have waited for it, or has it wait for others (`immwire_core::doorbell`); or parks it, where its
    /// peer has no room.
    #[inline]
    fn post_now(&mut self, work: WorkRequest) {
        self.retract();
        let (nic, at) = (work.nic, usize::from(work.nic));
        let (Some(staged), Some(parked), Some(&together)) =
            (self.staged.get_mut(at), self.parked.get_mut(at), self.together.get(at))
        else {
            return;
        };
        let unposted = staged.len() + 1;
        let given = usize::from(self.state.group.in_flight_on(nic));
        let posted = given.saturating_sub(unposted + parked.len());
        if doorbell::waits(work.len, posted, unposted, together) {
            return staged.push(work);
        }
        if unposted > 1 {
            staged.push(work);
            let posted = self.provider.post(nic, staged, &mut self.state).min(staged.len());
            bump(&self.state.shared.stats.posted, posted as u64);
            staged.drain(..posted);
            return;
        }
        let work = std::slice::from_ref(&work);
        if self.provider.post(nic, work, &mut self.state) > 0 {
            bump(&self.state.shared.stats.posted, 1);
        } else {
            parked.extend_from_slice(work);
        }
    }

    fn control(&mut self) {
        let shared = Arc::clone(&self.state.shared);
        for control in shared.intake.questions() {
            match control {
                Control::AddPeer { address, reply } => {
                    let added = self.connect(&address);
                    // Whoever asked may have given up.
                    let _ = reply.try_send(added);
                }
                Control::RemovePeer { peer } => {
                    let now = self.state.now;
                    self.state.group.remove_peer(now, peer, DownReason::Removed);
                }
                Control::SetNicHealth { nic, healthy } => {
                    let now = self.state.now;
                    self.state.group.set_nic_use(now, nic, healthy);
                    self.state.finish_messages();
                }
            }
        }
    }

    fn connect(&mut self, address: &NetAddr) -> Result<PeerId, AddPeerError> {
        self.state.refresh();
        let engine = address.engine();
        if engine == self.state.address.engine() {
            return Err(ConnectError::Myself.into());
        }
        if let Some(peer) = self.state.live_peer(engine) {
            self.state.group.handle_used(peer);
            return Ok(peer);
        }
        let nics = self.provider.nics_at(address);
        let peer = match self.state.group.add_peer(self.state.now, engine, &nics) {
            Ok(peer) => peer,
            Err(_) => {
                // The place of one that has been removed is free once that has been told.
                self.events();
                self.state.group.add_peer(self.state.now, engine, &nics)?
            }
        };
        self.state.called = self.state.called.saturating_add(1);
        let hello = match self.state.open_link(peer, address) {
            Ok(hello) => hello,
            Err(error) => {
                self.state.forget_peer(peer, DownReason::Removed);
                return Err(error.into());
            }
        };
        self.state.shared.peers.set(peer, PeerState::Connecting);
        if let Err(error) = self.provider.connect(self.state.now, peer, address, &hello) {
            self.state.forget_peer(peer, DownReason::NeverAnswered);
            // Whoever asked finds the peer down, not connecting.
            self.events();
            return Err(error.into());
        }
        Ok(peer)
    }

    /// Tells what the group has to tell. Returns whether there was anything.
    fn events(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.state.group.poll_event() {
            any = true;
            match event {
                Event::Ended { user, end, .. } => self.state.ended(user, end),
                Event::Abort { peer } => {
                    self.flush_stopped(peer);
                    // It may have been no more than that: then the connection is none the worse.
                    if self.is_in_flight(peer) {
                        tracing::debug!(%peer, "what is in flight has not ended in time: it is cut off");
                        self.provider.abort(peer, &mut self.state);
                    }
                }
                Event::Disconnect { peer } => self.drop_peer(peer),
                Event::Heartbeat { peer } => self.state.group.beat(peer),
                Event::Peer { peer, state } => self.state.peer_changed(peer, state),
                Event::Fence { peer, from, to, epoch } => {
                    self.fence(peer, RemotePath { from, to }, epoch);
                }
                Event::Settle { peer, nic, remote_nic, epoch } => {
                    self.settle(peer, Path { nic, remote_nic }, epoch);
                }
            }
        }
        any
    }

    /// The peer asks what arrived over this path of its.
    fn fence(&mut self, peer: PeerId, path: RemotePath, epoch: Epoch) {
        let fenced = self.provider.fence(peer, path, &mut self.state);
        if fenced == Err(Unfenced::Leaving) {
            return;
        }
        let RemotePath { from, to } = path;
        let answered = fenced.is_ok_and(|receipt| {
            self.state.lay_out(peer, &Settlement { epoch, from, to, receipt: receipt.0 })
        });
        let now = self.state.now;
        if answered {
            self.state.group.handle_fenced(peer, from);
        } else {
            tracing::warn!(%peer, ?path, "cannot tell what arrived: the peer is dropped");
            self.state.group.handle_unsettled(now, peer, to);
        }
    }

    /// The peer has told what arrived over this path of ours.
    fn settle(&mut self, peer: PeerId, path: Path, epoch: Epoch) {
        self.state.refresh();
        let now = self.state.now;
        let receipt = match self.state.receipt(peer, path, epoch) {
            Ok(Some(receipt)) => receipt,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%peer, %error, "the peer broke the protocol and is dropped");
                return self.state.group.remove_peer(now, peer, DownReason::Protocol);
            }
        };
        match self.provider.settle(peer, path, &receipt, &mut self.state) {
            Ok(()) => {
                tracing::debug!(%peer, ?path, "a broken path is settled");
                self.state.group.handle_settled(now, peer, path.nic, path.remote_nic);
            }
            Err(Unfenced::Leaving) => {}
            Err(error @ Unfenced::Unknown) => {
                tracing::warn!(%peer, ?path, %error, "the peer is dropped");
                self.state.group.handle_unsettled(now, peer, path.nic);
            }
        }
    }

    /// Whether the provider holds pieces to the peer: more are in flight than wait here, notes all of them.
    fn is_in_flight(&self, peer: PeerId) -> bool {
        let waiting = |at: usize| {
            let queues = self.staged.get(at).into_iter().chain(self.parked.get(at));
            queues.flatten().filter(|work| work.peer == peer).count()
        };
        let nics = 0..self.provider.nics().len();
        let mut nics = nics.filter_map(|at| Some((at, NicIndex::try_from(at).ok()?)));
        nics.any(|(at, nic)| usize::from(self.state.group.in_flight(peer, nic)) > waiting(at))
    }

    /// Drops the connection; what was staged for it fails with what was posted.
    fn drop_peer(&mut self, peer: PeerId) {
        self.flush_unposted(peer, WorkError::PeerGone);
        self.provider.disconnect(peer, &mut self.state);
    }

    /// Ends what the provider has not taken of transfers to the peer that were stopped. All else goes on waiting for room, notes, messages and
    /// credits among it: that there is none for them says nothing against the connection.
    fn flush_stopped(&mut self, peer: PeerId) {
        for queue in self.staged.iter_mut().chain(&mut self.parked) {
            let is_stopped = |work: &mut WorkRequest| {
                let of_it = !work.token.is_note() && work.peer == peer;
                of_it && self.state.group.is_stopped(work.token.transfer())
            };
            let flushed: Vec<_> = queue.extract_if(.., is_stopped).collect();
            for work in flushed {
                self.state.work_done(work.nic, work.token, Err(WorkError::Flushed));
            }
        }
    }

    /// Ends what the provider has not taken of the peer's pieces; nothing of them was written.
    fn flush_unposted(&mut self, peer: PeerId, error: WorkError) {
        for queue in self.staged.iter_mut().chain(&mut self.parked) {
            for work in queue.extract_if(.., |work| work.peer == peer) {
                self.state.work_done(work.nic, work.token, Err(error));
            }
        }
    }
}

/// Whether one of a request's peers is such a one.
fn any_peer(request: &Request, mut is: impl FnMut(PeerId) -> bool) -> bool {
    let mut any = |targets: &Targets| {
        (0..targets.len()).any(|at| targets.get(at).is_some_and(|target| is(target.peer)))
    };
    match request {
        PlanRequest::Scatter(write) => any(&write.targets),
        PlanRequest::Barrier(barrier) => any(&barrier.targets),
        PlanRequest::Single(write) => is(write.peer),
        PlanRequest::Paged(write) => is(write.peer),
        PlanRequest::Imm(write) => is(write.peer),
        PlanRequest::Control(write) => is(write.peer),
    }
}

/// A peer of a request's, to name it by.
fn first_peer(request: &Request) -> PeerId {
    let mut first = PeerId { index: u16::MAX, generation: 0 };
    any_peer(request, |peer| {
        first = peer;
        true
    });
    first
}

/// Takes the first of what is staged, for which there is no room, out of the way, and what would wait behind it. What there may be
/// room for all the same, notes first, goes past: it is tried before them, staged or parked.
fn park(staged: &mut Vec<WorkRequest>, parked: &mut Vec<WorkRequest>) {
    match staged.first().copied() {
        Some(first) if first.token.is_note() => parked.insert(0, staged.remove(0)),
        Some(first) => parked.extend(staged.extract_if(.., |work| waits_behind(work, &first))),
        None => {}
    }
}

impl<P: Provider> Drive for Engine<P> {
    fn arrivals(&mut self) -> bool {
        self.found = self.provider.poll(self.state.now, &mut self.state);
        self.found
    }

    fn progress(&mut self) -> bool {
        let mut busy = false;
        if self.steps == 0 {
            self.steps = STEPS_PER_CLOCK;
            self.state.refresh();
            let now = self.state.now;
            // Not the time that the state has: a report or a request may have set that just now.
            let before = std::mem::replace(&mut self.looked, now);
            if now.since(before) >= LATE {
                // What was heard meanwhile has a time of before, and what has come since was not heard: nobody is silent for that.
                self.state.group.handle_late(before, now);
                for _ in 0..CATCH_UP {
                    if !self.provider.poll(now, &mut self.state) {
                        break;
                    }
                    busy = true;
                }
                self.found |= busy;
            }
            if now >= self.state.group.poll_timeout() {
                // What was submitted by now is of use, and in time.
                for _ in 0..=self.state.shared.intake.capacity() / COMMANDS_PER_STEP {
                    if !self.commands() {
                        break;
                    }
                    busy = true;
                }
                self.state.note_use();
                self.state.group.handle_timeout(now);
            }
            if now >= self.next_sweep {
                self.next_sweep = now.after(SWEEP_EVERY);
                self.state.registry.sweep();
            }
            self.state.finish_messages();
        }
        self.steps -= 1;
        busy |= self.commands();
        if !self.state.held.is_empty() {
            busy |= self.release();
        }
        if !self.state.partings.is_empty() {
            self.part();
        }
        if !self.state.sources.is_empty() {
            self.state.let_go_of_sources();
        }
        for nic in 0..self.provider.nics().len() {
            busy |= self.pump(NicIndex::try_from(nic).unwrap_or(NicIndex::MAX));
        }
        busy |= self.events();
        self.was_busy = busy;
        busy
    }

    fn poll_seldom(&mut self) -> bool {
        let tick = self.state.shared.clock.tick();
        if std::mem::replace(&mut self.tick, tick) != tick {
            self.steps = 0;
        }
        self.poll()
    }

    fn sleep(&mut self, limit: Duration) {
        let shared = Arc::clone(&self.state.shared);
        self.steps = 0;
        // A step takes no more than its share of what there is to post: where it has done something, the next may, too.
        let nothing = !self.was_busy
            && shared.intake.may_sleep()
            // Callbacks that a caller's `poll` is to run, and messages that somebody made room for.
            && !shared.callbacks.wait_for_poll()
            && !self.state.can_deliver()
            && self.state.partings.is_empty()
            && self.staged.iter().all(Vec::is_empty);
        let may_sleep = nothing && self.provider.arm();
        self.state.refresh();
        // Whoever was kept from running since it last looked does not sleep now: the next step is to find that out, and hear what has come, before
        // anybody counts as silent.
        let is_late = self.state.now.since(self.looked) >= LATE;
        if may_sleep && !is_late {
            // Nobody says when a peer that parks pieces has room again, nor when a stream is through.
            let parked = self.parked.iter().any(|parked| !parked.is_empty());
            let looks = parked || !self.state.held.is_empty();
            let limit = if looks { limit.min(PARKED_NAP) } else { limit };
            let due = self.next_timeout();
            let timeout = due.since(self.state.now).min(limit);
            bump(&shared.stats.sleeps, 1);
            let wanted = self.state.now.after(timeout);
            wait_readable(&self.provider, &shared, timeout);
            // What has come since has come now: but for who slept longer than it wanted, for whom more may have come than the next poll takes.
            self.state.refresh();
            if self.state.now.since(wanted) < LATE {
                self.looked = self.state.now;
            }
        }
        self.provider.disarm();
        shared.intake.awake();
    }

    fn wake(&mut self) {
        self.steps = 0;
        self.state.refresh();
        self.looked = self.state.now;
    }

    fn next_timeout(&self) -> Time {
        self.state.group.poll_timeout().min(self.state.message_timeout())
    }

    fn submit(&mut self, submission: Submission) {
        // As for what comes by the ring: what its sender asked before it is done before it.
        if self.state.shared.intake.is_asked() {
            self.control();
        }
        self.take(submission);
        for nic in 0..self.provider.nics().len() {
            self.pump(NicIndex::try_from(nic).unwrap_or(NicIndex::MAX));
        }
        self.events();
    }

    fn write_at_once(&mut self, write: &plan::SingleRef<'_>) -> bool {
        // Questions are answered first, by `submit`.
        let intake = &self.state.shared.intake;
        let made = !intake.is_asked() && !intake.is_stopping() && self.make_at_once(write);
        if made {
            // Of others: whoever does nothing but write at once tells them too.
            self.events();
        }
        made
    }

    fn express(
        &mut self,
        write: &plan::SingleRef<'_>,
        cell: u16,
        ticket: Ticket,
        src: &Region,
    ) -> bool {
        let options = Options { deadline: Time::NEVER, user: u64::from(cell) };
        // Questions are answered first, by `submit`, and what may have to wait for a stream is told apart.
        if self.state.shared.intake.is_asked() || src.behind() > 0 {
            return false;
        }
        let Some(work) = self.state.group.express(write, options) else { return false };
        let id = work.token.transfer();
        // The bookkeeping comes after the write, while that is on its way.
        self.post_now(work);
        self.state.hook(cell, ticket, id, Some(src.clone()));
        self.events();
        true
    }

    fn add_peer(&mut self, address: &NetAddr) -> Result<PeerId, AddPeerError> {
        // Whoever has had the peer removed before wants another one.
        if self.state.shared.intake.is_asked() {
            self.control();
        }
        self.connect(address)
    }

    fn shut_down(&mut self, drain: Duration) {
        self.state.shared.intake.close();
        // Before regions go with their transfers.
        self.provider.quiesce();
        self.state.refresh();
        let start = self.state.now;
        self.state.stop_transfers();
        // Drain, then force, then give the aborts a chance to be reported. On a stepped clock, where
        // no time passes here, leaving the peers forces everything at once.
        let stepped = self.state.shared.clock.is_stepped();
        let patience = if stepped { start } else { start.after(drain.saturating_mul(3)) };
        while self.state.group.active() > 0 && self.state.now < patience {
            self.steps = 0;
            if !self.poll() {
                std::thread::yield_now();
            }
            self.state.stop_transfers();
        }
        let peers: Vec<PeerId> = self.state.group.peers().map(|(peer, ..)| peer).collect();
        for peer in peers {
            let now = self.state.now;
            self.state.group.remove_peer(now, peer, DownReason::Removed);
        }
        self.events();
        // A peer that was writing when its session ended stops at its next look, unless it does not run.
        let registry = Arc::clone(&self.state.registry);
        let left = registry.withdraw_all(drain.max(QUIET_WITHIN), || {
            self.steps = 0;
            if !self.poll() {
                std::thread::yield_now();
            }
        });
        if left > 0 {
            tracing::warn!(
                left,
                "peers were still writing to regions when the engine stopped: closing these says when it is over"
            );
        }
    }
}

/// Waits until the provider or a caller has something; at most `timeout`.
fn wait_readable<P: Provider>(provider: &P, shared: &Shared, timeout: Duration) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Some(wake_fd) = shared.wake_fd() else { return };
    let mut fds = [
        PollFd::from_borrowed_fd(provider.fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(wake_fd, PollFlags::IN),
    ];
    let seconds = i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX);
    let timeout = Timespec { tv_sec: seconds, tv_nsec: i64::from(timeout.subsec_nanos()) };
    // An interruption is a reason to look, like any other.
    let _ = poll(&mut fds, Some(&timeout));
    if !fds[1].revents().is_empty() {
        let _ = rustix::io::read(wake_fd, &mut [0; 8]);
    }
}

impl State {
    /// Looks at the clock.
    pub(crate) fn refresh(&mut self) {
        self.now = self.shared.clock.now();
    }

    fn command(&mut self, command: Command) {
        match command {
            // Taken by the engine, which can post.
            Command::Submit(submission) => self.shared.refuse(Command::Submit(submission)),
            Command::Cancel { cell, ticket } => {
                let hook = self.hooks.get(usize::from(cell));
                match hook.filter(|hook| hook.ticket == Some(ticket)) {
                    None => self.cancel_message(cell, ticket),
                    // A message that has its slot is sent.
                    Some(Hook { message: Some(_), .. }) => {}
                    Some(hook) => {
                        let id = hook.id;
                        self.refresh();
                        id.map(|id| self.group.cancel(self.now, id));
                    }
                }
            }
            Command::Send { cell, ticket, peer, bytes, deadline } => {
                self.send_message(peer, Outgoing { cell, ticket, bytes, deadline });
            }
        }
    }

    /// Remembers whose a transfer is.
    pub(crate) fn hook(&mut self, cell: u16, ticket: Ticket, id: TransferId, hold: Option<Region>) {
        if let Some(hook) = self.hooks.get_mut(usize::from(cell)) {
            *hook = Hook { message: None, ticket: Some(ticket), id: Some(id), hold };
        }
    }

    /// As [`State::hook`], for a message.
    pub(crate) fn hook_message(
        &mut self,
        cell: u16,
        ticket: Ticket,
        id: TransferId,
        placed: Placed,
    ) {
        if let Some(hook) = self.hooks.get_mut(usize::from(cell)) {
            *hook = Hook { message: Some(placed), ticket: Some(ticket), id: Some(id), hold: None };
        }
    }

    fn ended(&mut self, user: u64, end: group::End) {
        let Ok(cell) = u16::try_from(user) else {
            self.own = self.own.saturating_sub(1);
            let (peer, slot) = credit_of(user);
            if let Some(link) = self.link(peer) {
                link.credit_has_ended();
            }
            if end != group::End::Done {
                self.credit_lost(peer, slot, is_unwritten(end));
            }
            return;
        };
        let Some(hook) = self.hooks.get_mut(usize::from(cell)) else { return };
        let Hook { ticket, hold, message, .. } = std::mem::take(hook);
        drop(hold);
        if let (Some(placed), Some(ticket), false) = (message, ticket, end == group::End::Done) {
            let again = Again { cell, ticket, placed, end };
            if is_unwritten(end) && self.send_again(again) {
                return;
            }
            self.group.remove_peer(self.now, placed.peer, DownReason::Disconnected);
        }
        if let Some(ticket) = ticket {
            self.shared.finish(cell, ticket, end.into());
        }
    }

    /// Submits a transfer of the engine's own; `false` if there is no room for it now.
    pub(crate) fn submit_own(&mut self, peer: PeerId, imm: Imm, credit: SlotIndex) -> bool {
        let (own, room) = (self.own, self.own_room);
        if !self.link(peer).is_none_or(|link| link.may_credit(own, room)) {
            return false;
        }
        let request: Request = PlanRequest::Control(ControlWrite {
            peer,
            src: None,
            src_offset: 0,
            dst_offset: 0,
            len: 0,
            imm,
        });
        let Ok(request) = request.check() else { return true };
        let options = Options { deadline: Time::NEVER, user: own_user(peer, credit) };
        match self.group.submit(request, options) {
            Ok(_) => {
                self.own += 1;
                if let Some(link) = self.link(peer) {
                    link.credit_goes();
                }
                true
            }
            // With any other error the peer is gone, and with it the need. NICs may come back.
            Err(rejected) => !matches!(
                rejected.error,
                group::SubmitError::Full { .. }
                    | group::SubmitError::Plan(plan::PlanError::NoRoute { .. })
            ),
        }
    }

    fn peer_changed(&mut self, peer: PeerId, state: PeerState) {
        tracing::info!(%peer, %state, "a peer has changed");
        // Who sees that it is down finds what it had sent.
        if let PeerState::Down(_) = state {
            self.deliver_all(peer);
        }
        self.shared.peers.set(peer, state);
        if let PeerState::Down(_) = state {
            self.close_link(peer);
        }
    }

    fn forget_peer(&mut self, peer: PeerId, reason: DownReason) {
        self.group.handle_disconnected(self.now, peer, reason);
    }

    /// The peer that is, or is becoming, this engine.
    fn live_peer(&self, engine: EngineId) -> Option<PeerId> {
        live_peer(&self.group, engine)
    }

    /// Makes the memory that a peer needs, and what to say to it.
    /// `address` is what is known of the peer's.
    fn open_link(
        &mut self,
        peer: PeerId,
        address: &NetAddr,
    ) -> Result<Hello, crate::provider::RegisterError> {
        self.shared.begin_tallies(peer);
        let link = Link::new(&self.registry, peer, address, self.geometry)?;
        let hello = self.hello(link.mailbox());
        if let Some(slot) = self.links.get_mut(usize::from(peer.index)) {
            *slot = Some(link);
        }
        Ok(hello)
    }

    fn hello(&self, mailbox: MrDesc) -> Hello {
        Hello {
            address: self.address.clone(),
            mailbox,
            geometry: self.geometry,
            heartbeat_ms: self.heartbeat_ms,
            call: self.called,
        }
    }

    /// The peer has said this, in its call or in its answer.
    fn answer(&mut self, peer: PeerId, hello: &Hello) {
        let group = &self.group;
        self.calls.note(hello.engine(), hello.call, |engine| live_peer(group, engine).is_some());
        let nics = nic_states(&hello.address);
        let answer = Answer {
            nics: &nics,
            control: hello.mailbox,
            heartbeat: Duration::from_millis(u64::from(hello.heartbeat_ms)),
        };
        self.group.handle_connected(self.now, peer, &answer);
        if let Some(Some(link)) = self.links.get_mut(usize::from(peer.index)) {
            link.connected(hello.geometry);
            if let Some(receipts) = link.receipts(hello.geometry) {
                self.group.set_receipts(peer, receipts);
            }
        }
        self.shared.peers.set(peer, PeerState::Up);
        self.retry_messages(peer);
    }

    fn stop_transfers(&mut self) {
        while let Some(command) = self.shared.intake.next() {
            self.shared.refuse(command);
        }
        self.end_held();
        let now = self.now;
        for at in 0..self.hooks.len() {
            let hook = self.hooks.get(at).filter(|hook| hook.message.is_none());
            if let Some(id) = hook.and_then(|hook| hook.id) {
                self.group.cancel(now, id);
            }
        }
        self.drop_messages();
    }
}

impl State {
    /// Has the group know whom the connection is of use to beside its transfers: streams are waited for, messages wait for room,
    /// or to be taken. O(peers).
    fn note_use(&mut self) {
        for submission in &self.held {
            self.group.handle_awaited(&submission.request);
        }
        for link in self.links.iter().flatten().filter(|link| link.has_mail()) {
            self.group.handle_used(link.peer());
        }
    }

    /// A peer asks to part; it is answered when all is read that it wrote before.
    pub(crate) fn asked_to_part(&mut self, peer: PeerId, round: Round) {
        let used = self.group.is_used(peer);
        self.partings.retain(|asking| asking.peer != peer);
        self.partings.push(Asking { peer, round, used });
    }

    /// Ends what waits for streams.
    fn end_held(&mut self) {
        for submission in self.held.drain(..) {
            self.shared.refuse(Command::Submit(submission));
        }
    }
}

impl Drop for State {
    /// Whatever is left ends now. The provider is gone, and with it everything that could still have read or written.
    fn drop(&mut self) {
        self.drop_messages();
        self.end_held();
        let error = TransferError::EngineStopped;
        for at in 0..self.hooks.len() {
            let Some(hook) = self.hooks.get_mut(at) else { continue };
            let Hook { ticket, hold, .. } = std::mem::take(hook);
            if let (Some(ticket), Ok(cell)) = (ticket, u16::try_from(at)) {
                self.shared.finish_with(cell, ticket, hold, End::Quiesced { error });
            }
        }
        self.shared.stop();
    }
}

fn live_peer(group: &Group, engine: EngineId) -> Option<PeerId> {
    let mut peers = group.peers();
    let live =
        peers.find(|(_, other, state)| *other == engine && !matches!(state, PeerState::Down(_)));
    live.map(|(peer, ..)| peer)
}

impl Sink for State {
    fn work_done(&mut self, nic: NicIndex, token: Token, outcome: Result<(), WorkError>) {
        let stats = &self.shared.stats;
        bump(if outcome.is_ok() { &stats.completed } else { &stats.failed }, 1);
        if !self.group.handle_completion(self.now, nic, token, outcome) {
            tracing::error!(nic, ?token, "the provider completed a piece that was not in flight");
        }
    }

    fn immediate(&mut self, _nic: NicIndex, peer: PeerId, imm: u32) {
        let control = mailbox::Control::decode(imm);
        self.group.handle_heard(
            self.now,
            peer,
            control.is_none_or(|it| it.is_ok_and(mailbox::Control::is_use)),
        );
        match control {
            None => {
                let imm = Imm::from_bits(imm);
                bump(&self.shared.stats.immediates, 1);
                self.tally.record(imm, peer.index);
                match self.shared.count(imm) {
                    Added::Counted | Added::Fired => {}
                    Added::Stale | Added::NoSuchSlot | Added::Overflow => {
                        self.shared.stats.refuse(Stray { peer, tag: imm.tag() });
                    }
                }
            }
            Some(Ok(control)) => self.control_immediate(peer, control),
            Some(Err(_)) => self.group.remove_peer(self.now, peer, DownReason::Protocol),
        }
    }

    fn incoming(&mut self, hello: &Hello) -> Result<(PeerId, Hello), Refusal> {
        self.refresh();
        if self.shared.intake.is_stopping() {
            return Err(Refusal::ShuttingDown);
        }
        let (mine, engine) = (self.address.engine(), hello.engine());
        let live = self.live_peer(engine);
        let state = live.and_then(|peer| self.group.peer_state(peer));
        match (self.calls.judge(mine, engine, hello.call, state)?, live) {
            (Taken::Crossed, Some(peer)) => return self.crossed(peer, hello),
            (Taken::Replaces, Some(peer)) => {
                self.group.remove_peer(self.now, peer, DownReason::Replaced);
            }
            (Taken::New | Taken::Crossed | Taken::Replaces, _) => {}
        }
        let nics = nic_states(&hello.address);
        let peer = self.group.add_peer(self.now, engine, &nics).map_err(|full| {
            tracing::warn!(
                %engine, %full,
                "a caller is refused: there are as many `peers` as the engine is built for, or one that has gone is not forgotten yet"
            );
            Refusal::Busy
        })?;
        let reply = match self.open_link(peer, &hello.address) {
            Ok(reply) => reply,
            Err(error) => {
                // The caller is told no more than that.
                tracing::warn!(%engine, %error, "a caller is refused: no memory for messages from it");
                self.forget_peer(peer, DownReason::Removed);
                return Err(Refusal::Busy);
            }
        };
        self.answer(peer, hello);
        Ok((peer, reply))
    }

    fn connected(&mut self, peer: PeerId, hello: &Hello) {
        self.refresh();
        self.answer(peer, hello);
    }

    fn disconnected(&mut self, peer: PeerId, reason: DownReason) {
        self.refresh();
        self.group.handle_disconnected(self.now, peer, reason);
    }

    fn nic_changed(&mut self, nic: NicIndex, healthy: bool) {
        self.refresh();
        self.group.set_nic_health(self.now, nic, healthy);
        self.finish_messages();
    }

    fn path_broken(&mut self, peer: PeerId, path: Path) {
        tracing::debug!(%peer, ?path, "a path broke");
        self.refresh();
        self.broken.push((peer, path));
        self.group.handle_path_broken(self.now, peer, path.nic, path.remote_nic);
    }

    fn path_restored(&mut self, peer: PeerId, path: Path) {
        tracing::debug!(%peer, ?path, "a path is back");
        self.refresh();
        self.group.handle_path_restored(self.now, peer, path.nic, path.remote_nic);
        self.finish_messages();
    }

    fn undelivered(&mut self, work: &WorkRequest) {
        if !self.group.handle_undelivered(self.now, work) {
            tracing::error!(?work, "the provider lost a piece that was not in flight");
        }
    }

    #[inline]
    fn page_run(&self, work: &WorkRequest, src: &mut [u32], dst: &mut [u32]) -> Option<RunLayout> {
        self.group.page_run(work, src, dst)
    }

    #[inline]
    fn has_more(&self, nic: NicIndex) -> bool {
        self.group.has_work(nic)
    }
}

impl State {
    /// Both sides called each other, and the peer's call is kept: it answers ours.
    fn crossed(&mut self, peer: PeerId, hello: &Hello) -> Result<(PeerId, Hello), Refusal> {
        let Some(Some(link)) = self.links.get(usize::from(peer.index)) else {
            return Err(Refusal::Busy);
        };
        let reply = self.hello(link.mailbox());
        self.answer(peer, hello);
        Ok((peer, reply))
    }
}

impl State {
    /// Deals with messages that waited for room, and with what could not be sent.
    fn finish_messages(&mut self) {
        self.expire_messages();
        for _ in 0..self.unfinished.len() {
            let Some(index) = self.unfinished.pop() else { return };
            if self.deliver(index) == Undelivered::Some {
                self.unfinished(index);
            }
            let link = self.links.get(usize::from(index)).and_then(Option::as_ref);
            if let Some(peer) = link.map(Link::peer) {
                self.retry_messages(peer);
            }
        }
    }

    /// Remembers to look after the messages of the peer in this slot.
    pub(crate) fn unfinished(&mut self, index: u16) {
        if !self.unfinished.contains(&index) {
            self.unfinished.insert(0, index);
        }
    }
}

#[cfg(test)]
mod tests {
    use immwire_core::staging::StagedKey;

    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Kind {
        Note,
        Plain,
        /// To a GPU's memory, by way of slots.
        Staged,
    }

    fn piece(peer: u16, kind: Kind, serial: u64) -> WorkRequest {
        // A note's token is of a transfer that there cannot be.
        let token = Token::from_bits(if kind == Kind::Note { u64::MAX << 48 } else { 0 });
        assert_eq!(token.is_note(), kind == Kind::Note);
        let peer = PeerId { index: peer, generation: 0 };
        let staged = StagedKey::new(0, 1).unwrap().bits();
        let (src, dst, src_key) = (serial, 0, 0);
        WorkRequest {
            token,
            nic: 0,
            remote_nic: 0,
            peer,
            src,
            src_key,
            dst,
            dst_key: if kind == Kind::Staged { staged } else { 0 },
            len: 1,
            run: immwire_core::plan::PageRun::NONE,
            imm: None,
        }
    }

    /// Every queue of up to five pieces, of two peers' notes, transfers and such as are staged, of which some are parked: nothing
    /// is lost or doubled, what is left staged begins with something else, and nobody is behind what it need not wait for.
    #[test]
    fn nobody_waits_behind_who_needs_more() {
        const KINDS: [Kind; 3] = [Kind::Note, Kind::Plain, Kind::Staged];
        for pieces in 0..6_usize.pow(5) {
            let kinds: Vec<_> = (0..5_u32)
                .map(|at| {
                    let kind = pieces / 6_usize.pow(at) % 6;
                    (u16::from(kind >= 3), KINDS[kind % 3])
                })
                .collect();
            let all: Vec<_> =
                (0..).zip(&kinds).map(|(at, (peer, kind))| piece(*peer, *kind, at)).collect();
            let kind = |work: &WorkRequest| kinds[usize::try_from(work.src).unwrap()].1;
            let (mut staged, mut parked) = (all.clone(), Vec::new());
            while let Some(first) = staged.first().copied() {
                let before = staged.clone();
                park(&mut staged, &mut parked);
                assert!(staged.len() < before.len());
                let serials =
                    |works: &[WorkRequest]| works.iter().map(|it| it.src).collect::<Vec<_>>();
                let mut both = [serials(&staged), serials(&parked)].concat();
                both.sort_unstable();
                assert_eq!(both, [0, 1, 2, 3, 4]);
                for work in &before {
                    let stays = staged.contains(work);
                    let goes_past = match (kind(&first), kind(work)) {
                        // That one alone has no room.
                        (Kind::Note, _) => *work != first,
                        (Kind::Plain, kind) => work.peer != first.peer || kind == Kind::Note,
                        (Kind::Staged, kind) => work.peer != first.peer || kind != Kind::Staged,
                    };
                    assert_eq!(stays, goes_past, "{work:?} behind {first:?}");
                }
                // Notes are tried before all else that is parked.
                let notes = parked.iter().filter(|work| kind(work) == Kind::Note).count();
                assert!(parked.iter().take(notes).all(|work| kind(work) == Kind::Note));
                for (peer, kind_of) in kinds.iter().copied().filter(|it| it.1 != Kind::Note) {
                    let of_it = |it: &&WorkRequest| it.peer.index == peer && kind(it) == kind_of;
                    let serials: Vec<_> = parked.iter().filter(of_it).map(|it| it.src).collect();
                    assert!(serials.is_sorted(), "a peer's pieces keep their order");
                }
            }
        }
    }
}
