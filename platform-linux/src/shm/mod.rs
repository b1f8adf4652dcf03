//! The provider for engines on one host: peers map each other's memory, and a write is a copy.
//!
//! Any machine, no device, no privilege. Memory of [`crate::provider::Memory::alloc`] is written
//! straight; other registered memory by the kernel (`process_vm_writev`) where it allows that and the owner is a
//! process of the same user, else through a ring that its owner empties.
//!
//! | part | what |
//! |---|---|
//! | `segment` | the memory that two engines share, and its layout |
//! | `socket` | messages and files between them |
//! | `handshake` | what the messages mean, and who may talk to us |
//! | `memory` | regions, and how they are taken back |
//! | `session` | one connection's data path |
//! | `bounce` | bytes for memory that cannot be mapped |
//! | `copy` | moving bytes |
//! | `probe` | words at which peers try whether the kernel moves them |
//! | `users` | who this process is among the machine's users |
//! | `gpu` | GPUs' memory, and the copies that they make |
//!
//! Each engine has one listening socket, and one socket and one segment for each peer. The NICs are
//! several only in that each pair of NICs has a lane of its own, so that an engine with several behaves
//! as one on a network does: what goes over different NICs arrives in any order.
//!
//! # Trust
//!
//! Let in are processes of the same user; if a group key is given, those that prove they hold it, and
//! nobody else. Where the kernel gives other users the number of ours (the overflow uid, in a container that has no numbers for
//! them), nobody is let in without a key. A peer that was let in can write what it likes to the regions it was granted, and to the
//! session's segment, at any time: what the hazard words promise, they promise of peers that run this
//! code. It is granted any region that peers may write to, mailboxes of others among them, if it asks for it by its key, and keys
//! are small numbers that can be guessed. It cannot crash or block this process, nor reach other memory.
//!
//! A peer of the same user can stop this process in any case, by a signal. So what it names is written to by the kernel, too, though the
//! writer waits for pages that are not in memory, as of a file, until they are brought: that may take as long as their owner likes
//! (a file system in user space, say). Memory of other users' processes is not written to so.
//!
//! A peer is the process that has made its end of the connection. A session ends with the socket or with that process, whichever
//! is first; with the socket alone, if the kernel does not say who the process is, or it had ended before the handshake.
//!
//! # Invariants
//!
//! - Nothing here waits for a peer. (Ending a session may, for a millisecond: see
//!   [`ShmProvider::disconnect`].) Each poll does a bounded amount of work. An aborted session goes on until its peer is done with the record that it is
//!   taking from the bounce ring, for a second at most.
//! - No call on the data path allocates, locks or makes a system call, but to copy to memory that is not
//!   mapped, to wake a peer that sleeps, and to look at the sockets now and then.
//! - A socket's events name its slot and serial number, so that an event never reaches the next tenant.
//! - A stranger is dropped after [`STRANGER_PATIENCE`], which it has once more if nobody looked when it was over; there are at most [`STRANGERS_MAX`],
//!   and whoever else calls waits in the backlog.

mod bounce;
mod copy;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod gpu;
mod handshake;
mod memory;
mod probe;
mod segment;
mod session;
mod socket;
mod standing;
#[cfg(test)]
mod tests;
mod users;
mod withdrawals;

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use immwire_core::group::{WorkError, WorkRequest};
use immwire_core::id::{EngineId, MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::peer::DownReason;
use immwire_core::plan::Piece;
use immwire_core::user::Users;
use immwire_core::wire::{Hello, NetAddr, NicAddr, PROTOCOL_VERSION, ProviderKind, Refusal, Wire};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

pub use self::handshake::GroupKey;
pub use self::memory::ShmMemory;

use self::gpu::{Copying, Gpus};
use self::handshake::{Claim, Malformed, Message, Nonce, Prover, Terms};
use self::memory::Link;
use self::probe::Probe;
use self::segment::{Geometry, Segment};
use self::session::{Session, Start, Step};
use self::socket::{Credentials, ListenerId, MESSAGE_MAX, NoMessage, is_lack};
use crate::closer::Closer;
use crate::gpus::{GPUS_MAX, Known, OpenError};
use crate::provider::{ConnectError, NicInfo, NicLimits, Nobody, Provider, Sink};

/// The longest piece. Copies run no faster beyond, and between two pieces a cancellation is heard, and
/// small writes get their turn.
const PIECE_BYTES: u64 = 1 << 20;
/// The longest piece where GPUs copy: pieces that adjoin become one copy, so that this only says how many credits it costs.
const GPU_PIECE_BYTES: u64 = 4 << 20;
/// What GPUs are given to copy at once: long enough that its announcement costs nothing beside it.
const GPU_BATCH_BYTES: u64 = 128 << 20;
/// Pieces under way where GPUs copy; a quarter of them to one peer. They stand for many pages each, and end in groups.
const GPU_QUEUE_DEPTH: u16 = 1024;
/// The shortest piece worth a NIC of its own, and the longest that is written at once.
const PIECE_MIN_BYTES: u64 = 64 << 10;
const QUEUE_DEPTH: u16 = 256;
/// Bytes copied in one call of `post`; further pieces are left to the next.
const POST_BYTES: u64 = 2 << 20;
/// The sockets are looked at once in so many polls,
const LOOK_EVERY: u32 = 256;
/// and while an answer is awaited, once in so many;
const LOOK_EVERY_IN_A_HURRY: u32 = 8;
/// and once this is over, however few polls that were: whoever polls an engine may do so as seldom as it likes, and hears all that was said meanwhile.
const LOOK_WITHIN: Duration = Duration::from_millis(1);
/// Events taken in one look at the sockets.
const EVENTS_MAX: usize = 64;
/// Messages taken from one socket in one look.
const MESSAGES_MAX: usize = 32;
/// Callers accepted in one look.
const ACCEPTS_MAX: usize = 16;
/// Callers that may be in the middle of the handshake at a time.
pub const STRANGERS_MAX: usize = 64;
/// How long a caller may take for the handshake.
pub const STRANGER_PATIENCE: Duration = Duration::from_secs(2);
/// Who has not looked for longer has not listened: an engine that sleeps, and is woken by whatever comes, does not sleep for longer.
const UNHEARD: Duration = Duration::from_secs(1);
/// How long nobody is accepted after the process has run out of files.
const OUT_OF_FILES_PAUSE: Duration = Duration::from_millis(100);
/// How long an end that cannot wait for polls to come waits for a peer that is copying out of the bounce ring right then.
const QUIET_PATIENCE: Duration = Duration::from_millis(1);
/// A peer whose call has crossed with ours, and is kept, has called within this, or is asked what became of it.
const CROSSED_PATIENCE: Duration = Duration::from_millis(10);

/// How memory is written that peers cannot map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ForeignPath {
    /// By the kernel if it lets us and the peer runs as the same user, else through the bounce ring.
    #[default]
    Auto,
    /// By the kernel; if it does not let us, or the peer runs as another user, such writes fail with `EPERM`.
    KernelOnly,
    /// Through the bounce ring, always.
    BounceOnly,
}

/// What a [`ShmProvider`] is made from.
#[derive(Debug, Clone)]
pub struct ShmConfig {
    /// Who the engine is.
    pub engine: EngineId,
    /// How many NICs it is to have, 1 to 8.
    pub nics: u8,
    /// The speed that each is said to have, in gigabits per second.
    pub speed_gbps: u32,
    /// If given, required of every peer, whoever runs it; if not, peers must run as the same user.
    pub group_key: Option<GroupKey>,
    /// How memory is written that peers cannot map.
    pub foreign: ForeignPath,
    /// The GPUs that it is to use, by their numbers in this process. If there are any, all host memory that is registered is
    /// pinned for them.
    pub gpus: Vec<u32>,
    /// On how many SMs a GPU may make one copy. Few: they are wanted for other things.
    pub sms: NonZeroU32,
    /// While a GPU makes short copies, warps of it stand by for more, for a tenth of a millisecond after the last, on one SM.
    pub stands_by: bool,
    /// Descriptors count the addresses of a region from 0, not from where it is: as the transport does that is used beside
    /// this one ([`crate::provider::Memory::counts_from_zero`]). The same for all engines that are to meet.
    pub from_zero: bool,
}

impl ShmConfig {
    /// One NIC of 100 Gbit/s, no group key, no GPU.
    #[must_use]
    pub const fn new(engine: EngineId) -> Self {
        Self {
            engine,
            nics: 1,
            speed_gbps: 100,
            group_key: None,
            foreign: ForeignPath::Auto,
            gpus: Vec::new(),
            sms: immwire_cuda::geometry::DEFAULT_SMS,
            stands_by: true,
            from_zero: false,
        }
    }
}

/// Why there is no provider.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// An engine has 1 to 8 NICs.
    #[error("an engine has 1 to {MAX_NICS} NICs, not {nics}")]
    Nics {
        /// As configured.
        nics: u8,
    },
    /// An engine uses each GPU once, and not more than a key can tell apart.
    #[error("an engine uses up to {max} GPUs, each once", max = GPUS_MAX)]
    Gpus,
    /// A GPU cannot be used.
    #[error("GPU {ordinal}: {source}")]
    Gpu {
        /// Its number in this process.
        ordinal: u32,
        /// Why.
        source: immwire_cuda::Error,
    },
    /// The kernel said no.
    #[error("{call}: {source}")]
    Os {
        /// What it was asked for.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// What has happened on the listening socket. Counts since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShmStats {
    /// Connections accepted from the kernel.
    pub accepted: u64,
    /// Callers that were told why not.
    pub refused: u64,
    /// Callers that were dropped: they sent no handshake, or did not finish it in time.
    pub dropped: u64,
}

/// A caller that has not shown who it is.
#[derive(Debug)]
struct Stranger {
    socket: OwnedFd,
    serial: u64,
    who: Credentials,
    deadline: Time,
    /// It has been given more time.
    has_more: bool,
    terms: Option<Terms>,
}

/// A call of ours that has not been answered.
#[derive(Debug)]
struct Call {
    peer: PeerId,
    /// `None` while the listener's backlog is full, or the peer's own call is waited for.
    socket: Option<OwnedFd>,
    /// It is not placed again before.
    again: Time,
    serial: u64,
    address: NetAddr,
    hello: Hello,
    terms: Terms,
    /// Once we have shown who we are.
    segment: Option<Segment>,
    probe: Probe,
}

#[derive(Debug)]
enum Slot {
    Vacant,
    Calling(Box<Call>),
    Up(Box<Session>),
}

/// The provider. See the [module](self).
#[derive(Debug)]
pub struct ShmProvider {
    config: ShmConfig,
    id: ListenerId,
    users: Users,
    nics: Vec<NicInfo>,
    address: NetAddr,
    memory: Arc<ShmMemory>,
    gpus: Copying,
    listener: OwnedFd,
    epoll: OwnedFd,
    /// By index of the peer.
    slots: Vec<Slot>,
    /// Slots that are `Up`, for polling.
    up: Vec<u16>,
    strangers: [Option<Stranger>; STRANGERS_MAX],
    /// Slots that are `Calling`, and strangers.
    handshakes: usize,
    serial: u64,
    polls: u32,
    look_now: bool,
    /// The sockets are looked at by then.
    look_by: Time,
    /// They were looked at last,
    looked: Time,
    /// and not for a while before.
    unheard: bool,
    /// Whether some session awaits an answer.
    expecting: bool,
    /// The listener is not watched until then, or until a stranger leaves its place.
    paused: Option<Time>,
    stats: ShmStats,
}

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Listener,
    Stranger {
        at: usize,
        serial: u64,
    },
    Peer {
        index: u16,
        serial: u64,
    },
    /// The peer's process.
    Process {
        index: u16,
        serial: u64,
    },
}

const SERIAL_BITS: u32 = 40;

impl Source {
    fn data(self) -> EventData {
        let (kind, at, serial) = match self {
            Self::Listener => (0, 0, 0),
            Self::Stranger { at, serial } => (1, at as u64, serial),
            Self::Peer { index, serial } => (2, u64::from(index), serial),
            Self::Process { index, serial } => (3, u64::from(index), serial),
        };
        EventData::new_u64(kind << 62 | at << SERIAL_BITS | serial)
    }

    fn of(data: EventData) -> Self {
        let word = data.u64();
        let serial = word & ((1 << SERIAL_BITS) - 1);
        let at = word >> SERIAL_BITS & 0xffff;
        match (word >> 62, u16::try_from(at)) {
            (1, Ok(at)) => Self::Stranger { at: usize::from(at), serial },
            (2, Ok(index)) => Self::Peer { index, serial },
            (3, Ok(index)) => Self::Process { index, serial },
            _ => Self::Listener,
        }
    }
}

impl From<OpenError> for ShmError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Names => Self::Gpus,
            OpenError::Gpu { ordinal, source } => Self::Gpu { ordinal, source },
        }
    }
}

/// Enqueues what was staged for GPUs, as far as it does not wait for more that may come.
#[inline]
fn launch(gpus: &mut Copying, more: bool) {
    if let Some(gpus) = gpus {
        gpus.launch(more);
    }
}

/// Sends `message` on a socket that carries no session yet.
fn tell(socket: &OwnedFd, message: &Message<'_>, file: Option<&OwnedFd>) -> Result<(), Errno> {
    let mut bytes = [0; MESSAGE_MAX];
    let len = message.encode(&mut bytes).ok_or(Errno::MSGSIZE)?;
    let file = file.map(AsFd::as_fd);
    socket::send(socket, bytes.get(..len).ok_or(Errno::MSGSIZE)?, file.as_slice())
}

/// Why a call of ours has come to nothing, by what a system call says: as `otherwise`, unless something is lacking here, which
/// is no fault of the peer's.
fn why_not(errno: Errno, otherwise: DownReason) -> DownReason {
    if !is_lack(errno) {
        return otherwise;
    }
    tracing::warn!(%errno, "a peer cannot be called: ulimit -n or memory may be too low");
    DownReason::Refused(Refusal::Busy)
}

/// Whether this process's user can be told from others: if not, nobody is let in without a group key.
pub(crate) fn knows_own_user() -> bool {
    let users = users::users();
    users.is_ours(users.ours)
}

fn random<const N: usize>() -> Result<[u8; N], Errno> {
    let mut bytes = [0; N];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

fn nics_of(address: &NetAddr) -> u8 {
    u8::try_from(address.nics().len()).unwrap_or(u8::MAX)
}

impl ShmProvider {
    /// Opens an engine's provider, and starts to listen.
    ///
    /// # Errors
    ///
    /// [`ShmError`].
    pub fn new(config: ShmConfig) -> Result<Self, ShmError> {
        if config.nics == 0 || usize::from(config.nics) > MAX_NICS {
            return Err(ShmError::Nics { nics: config.nics });
        }
        let failed = |call| move |errno: Errno| ShmError::Os { call, source: errno.into() };
        let known = Known::open(&config.gpus)?;
        let gpus = known.clone().map(|known| Gpus::new(known, config.sms, config.stands_by));
        let gpus = gpus.map(|gpus| gpus.map(Box::new)).transpose();
        let gpus = gpus.map_err(|(ordinal, source)| ShmError::Gpu { ordinal, source })?;
        let (piece_bytes, batch_bytes, pages_per_piece, queue_depth) = match gpus {
            Some(_) => (GPU_PIECE_BYTES, GPU_BATCH_BYTES, u16::MAX, GPU_QUEUE_DEPTH),
            None => (PIECE_BYTES, NicLimits::BATCH_BYTES, 1, QUEUE_DEPTH),
        };
        let users = users::users();
        if config.group_key.is_none() && !users.is_ours(users.ours) {
            tracing::warn!(
                uid = users.ours,
                "users that have no number in this container go by the one that this process runs as: without a group key no peer is let in"
            );
        }
        let id: ListenerId = random().map_err(failed("getrandom"))?;
        let listener = socket::listen(&id).map_err(failed("listen"))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("epoll_create"))?;
        epoll::add(&epoll, &listener, Source::Listener.data(), EventFlags::IN)
            .map_err(failed("epoll_ctl"))?;
        let limits = NicLimits {
            max_message_bytes: piece_bytes,
            min_piece_bytes: PIECE_MIN_BYTES,
            queue_depth,
            inline_bytes: 0,
            max_sge: 1,
            batch_bytes,
            together: 1,
            pages_per_piece,
        };
        let speed_gbps = config.speed_gbps;
        let nic = |n| NicInfo { name: format!("shm{n}"), speed_gbps, limits };
        let nics: Vec<_> = (0..config.nics).map(nic).collect();
        let address = heapless::Vec::from_slice(&id).unwrap_or_default();
        let addresses = vec![NicAddr { speed_gbps, address }; nics.len()];
        let address = NetAddr::new(ProviderKind::Shm, config.engine, &addresses)
            .map_err(|_| ShmError::Nics { nics: config.nics })?;
        Ok(Self {
            id,
            users,
            nics,
            address,
            memory: Arc::new(ShmMemory::new(config.engine, config.nics, config.from_zero, known)),
            gpus,
            listener,
            epoll,
            slots: Vec::new(),
            up: Vec::new(),
            strangers: [const { None }; STRANGERS_MAX],
            handshakes: 0,
            serial: 0,
            polls: 0,
            look_now: false,
            look_by: Time::ZERO,
            looked: Time::ZERO,
            unheard: false,
            expecting: false,
            paused: None,
            stats: ShmStats::default(),
            config,
        })
    }

    /// Who gives back what GPUs had, if there are any.
    pub(crate) fn closer(&self) -> Option<Arc<Closer>> {
        self.gpus.as_ref().map(|gpus| Arc::clone(&gpus.known().closer))
    }

    /// What has happened on the listening socket so far.
    #[must_use]
    pub const fn stats(&self) -> ShmStats {
        self.stats
    }

    /// Whether a process runs as our user.
    fn is_same_user(&self, who: Credentials) -> bool {
        self.users.is_ours(who.uid)
    }

    fn next_serial(&mut self) -> u64 {
        self.serial = (self.serial + 1) & ((1 << SERIAL_BITS) - 1);
        self.serial
    }

    fn session(&mut self, peer: PeerId) -> Option<&mut Session> {
        match self.slots.get_mut(usize::from(peer.index)) {
            Some(Slot::Up(session)) if session.peer() == peer => Some(session),
            _ => None,
        }
    }

    fn session_at(&mut self, index: u16) -> Option<&mut Session> {
        match self.slots.get_mut(usize::from(index)) {
            Some(Slot::Up(session)) => Some(session),
            _ => None,
        }
    }

    fn slot(&mut self, index: u16) -> &mut Slot {
        let at = usize::from(index);
        if self.slots.len() <= at {
            self.slots.resize_with(at + 1, || Slot::Vacant);
        }
        // PROOF: just made long enough.
        &mut self.slots[at]
    }

    // ---- sockets ----

    fn watch(&self, socket: &OwnedFd, source: Source) -> Result<(), Errno> {
        epoll::add(&self.epoll, socket, source.data(), EventFlags::IN | EventFlags::RDHUP)
    }

    /// Stops watching; closing alone would not, while a copy of the file is open elsewhere.
    fn unwatch(&self, file: &OwnedFd) {
        let _ = epoll::delete(&self.epoll, file);
    }

    /// Watches a session's socket and, if it can be asked, its peer's process.
    fn watch_session(&self, link: &Link, serial: u64) -> Result<(), Errno> {
        let index = link.peer.index;
        self.watch(&link.socket, Source::Peer { index, serial })?;
        let ended = Source::Process { index, serial }.data();
        link.process().map_or(Ok(()), |it| epoll::add(&self.epoll, it, ended, EventFlags::IN))
    }

    fn look<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool {
        self.look_by = now.after(LOOK_WITHIN);
        self.unheard = now.since(std::mem::replace(&mut self.looked, now)) > UNHEARD;
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; EVENTS_MAX];
        let no_wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let ready = match epoll::wait(&self.epoll, &mut events, Some(&no_wait)) {
            Ok((ready, _)) => ready,
            Err(_) => return false,
        };
        let any = !ready.is_empty();
        for event in ready {
            match Source::of(event.data) {
                Source::Listener => self.accept(now),
                Source::Stranger { at, serial } => self.hear_stranger(at, serial, sink),
                Source::Peer { index, serial } if self.is_calling(index) => {
                    self.hear_answer(index, serial, now, sink);
                }
                Source::Peer { index, serial } => self.hear_peer(index, serial, false, sink),
                Source::Process { index, serial } => self.hear_peer(index, serial, true, sink),
            }
        }
        self.tend(now, sink);
        any
    }

    /// What is to be done now and then, with or without an event.
    fn tend<S: Sink>(&mut self, now: Time, sink: &mut S) {
        if self.handshakes > 0 {
            for at in 0..STRANGERS_MAX {
                if self.is_late(at, now) {
                    self.drop_stranger(at);
                }
            }
            for index in (0..self.slots.len()).filter_map(|at| u16::try_from(at).ok()) {
                self.dial_again(index, now, sink);
            }
        }
        // Once those have been dropped who took too long.
        if self.paused.is_some_and(|until| now >= until) {
            let data = Source::Listener.data();
            if epoll::modify(&self.epoll, &self.listener, data, EventFlags::IN).is_ok() {
                self.paused = None;
            }
        }
        self.expecting = false;
        let known = self.gpus.as_ref().map(|gpus| gpus.known());
        for &index in &self.up {
            if let Some(Slot::Up(session)) = self.slots.get_mut(usize::from(index)) {
                session.sweep();
                session.wake_waiting();
                let heard = session.hear_kept(known);
                if heard.and_then(|()| session.pay(now, &self.memory)).is_err() {
                    // Ends at a later poll.
                    session.close(DownReason::Protocol);
                }
                self.expecting |= session.is_expecting();
            }
        }
    }

    // ---- being called ----

    fn accept(&mut self, now: Time) {
        for _ in 0..ACCEPTS_MAX {
            let Some(at) = self.strangers.iter().position(Option::is_none) else {
                // By then each of them is in or has been dropped.
                return self.pause(now.after(STRANGER_PATIENCE));
            };
            let socket = match socket::accept(&self.listener) {
                Ok(socket) => socket,
                Err(errno) if is_lack(errno) => {
                    return self.pause(now.after(OUT_OF_FILES_PAUSE));
                }
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(_) => return,
            };
            self.stats.accepted += 1;
            self.greet(at, socket, now.after(STRANGER_PATIENCE));
        }
    }

    /// Leaves callers in the backlog until then; watching would wake us for them all the time.
    fn pause(&mut self, until: Time) {
        let data = Source::Listener.data();
        if epoll::modify(&self.epoll, &self.listener, data, EventFlags::empty()).is_ok() {
            self.paused = Some(until);
        }
    }

    /// Hears who has called, and gives it the place `at`, which is vacant.
    fn greet(&mut self, at: usize, socket: OwnedFd, deadline: Time) {
        let Ok(who) = socket::credentials(&socket) else {
            self.stats.dropped += 1;
            return;
        };
        if self.config.group_key.is_none() && !self.is_same_user(who) {
            return self.refuse(&socket, Refusal::Unauthorised);
        }
        let serial = self.next_serial();
        if self.watch(&socket, Source::Stranger { at, serial }).is_err() {
            self.stats.dropped += 1;
            return;
        }
        if let Some(slot) = self.strangers.get_mut(at) {
            *slot = Some(Stranger { socket, serial, who, deadline, has_more: false, terms: None });
            self.handshakes += 1;
        }
    }

    fn refuse(&mut self, socket: &OwnedFd, why: Refusal) {
        self.stats.refused += 1;
        let _ = tell(socket, &Message::Refuse(why), None);
    }

    fn take_stranger(&mut self, at: usize) -> Option<Stranger> {
        let stranger = self.strangers.get_mut(at)?.take()?;
        self.handshakes = self.handshakes.saturating_sub(1);
        self.unwatch(&stranger.socket);
        if let Some(until) = &mut self.paused {
            // Whoever waits in the backlog may have the place.
            *until = Time::ZERO;
        }
        Some(stranger)
    }

    /// Whether the time of the stranger there is up. Nobody is silent while nobody looks: if that is so when its time is up, it has as much again,
    /// once.
    fn is_late(&mut self, at: usize, now: Time) -> bool {
        let Some(Some(stranger)) = self.strangers.get_mut(at) else {
            return false;
        };
        if now < stranger.deadline {
            return false;
        }
        if self.unheard && !std::mem::replace(&mut stranger.has_more, true) {
            stranger.deadline = now.after(STRANGER_PATIENCE);
            return false;
        }
        true
    }

    fn drop_stranger(&mut self, at: usize) {
        if self.take_stranger(at).is_some() {
            self.stats.dropped += 1;
        }
    }

    fn refuse_stranger(&mut self, at: usize, why: Refusal) {
        if let Some(stranger) = self.take_stranger(at) {
            self.refuse(&stranger.socket, why);
        }
    }

    fn hear_stranger<S: Sink>(&mut self, at: usize, serial: u64, sink: &mut S) {
        let Some(Some(stranger)) = self.strangers.get_mut(at) else {
            return;
        };
        if stranger.serial != serial {
            return;
        }
        let mut buffer = [0; MESSAGE_MAX];
        let received = socket::receive(&stranger.socket, &mut buffer);
        let terms = stranger.terms;
        match received {
            Err(NoMessage::Yet) => {}
            Err(NoMessage::Gone | NoMessage::Malformed) => self.drop_stranger(at),
            Ok(received) => {
                let bytes = buffer.get(..received.len).unwrap_or(&[]);
                match (Message::decode(bytes), terms, received.files.as_slice()) {
                    (Ok(Message::Prove { .. }), Some(_), []) if received.is_short => {
                        tracing::warn!(
                            "no descriptor is left for a caller's segment: ulimit -n may be too low"
                        );
                        self.refuse_stranger(at, Refusal::Busy);
                    }
                    (Ok(Message::Call { nonce, target }), None, []) => {
                        self.challenge(at, nonce, target);
                    }
                    (Ok(Message::Prove { proof, claim }), Some(terms), [file]) => {
                        self.admit(at, terms, proof, &claim, file, sink);
                    }
                    (Err(Malformed::Version { theirs }), None, _) => {
                        let ours = PROTOCOL_VERSION;
                        self.refuse_stranger(at, Refusal::Version { ours, theirs });
                    }
                    _ => self.drop_stranger(at),
                }
            }
        }
    }

    fn challenge(&mut self, at: usize, initiator: Nonce, target: ListenerId) {
        let Ok(acceptor) = random() else {
            return self.drop_stranger(at);
        };
        if target != self.id {
            return self.refuse_stranger(at, Refusal::Elsewhere);
        }
        let Some(Some(stranger)) = self.strangers.get_mut(at) else {
            return;
        };
        stranger.terms = Some(Terms { initiator, acceptor, target });
        if tell(&stranger.socket, &Message::Challenge { nonce: acceptor }, None).is_err() {
            self.drop_stranger(at);
        }
    }

    fn admit<S: Sink>(
        &mut self,
        at: usize,
        terms: Terms,
        proof: [u8; 32],
        claim: &Claim<'_>,
        file: &OwnedFd,
        sink: &mut S,
    ) {
        if !terms.verify(self.config.group_key.as_ref(), Prover::Initiator, claim, proof) {
            return self.refuse_stranger(at, Refusal::Unauthorised);
        }
        let (Ok(hello), geometry) = (Hello::decode(claim.hello), claim.geometry) else {
            return self.refuse_stranger(at, Refusal::Malformed);
        };
        if geometry.acceptor_nics != self.config.nics
            || geometry.initiator_nics != nics_of(&hello.address)
        {
            return self.refuse_stranger(at, Refusal::Malformed);
        }
        let segment = match Segment::open(geometry, file) {
            Ok(segment) => segment,
            Err(Errno::INVAL) => return self.refuse_stranger(at, Refusal::Malformed),
            Err(errno) => {
                tracing::warn!(%errno, "a caller's segment cannot be mapped: ulimit -v or vm.max_map_count may be too low");
                return self.refuse_stranger(at, Refusal::Busy);
            }
        };
        let (peer, ours) = match sink.incoming(&hello) {
            Ok(answer) => answer,
            Err(why) => return self.refuse_stranger(at, why),
        };
        // A call of our own to the same peer has crossed with this one, and is given up for it.
        self.hang_up(peer.index);
        let up = self.take_stranger(at).and_then(|stranger| {
            let probe = Probe::deal();
            let (who, nics) = (stranger.who, geometry.initiator_nics);
            self.answer(&stranger.socket, &terms, geometry, &ours, probe).ok()?;
            let link = Arc::new(Link::new(peer, segment, stranger.socket));
            self.open(link, nics, who, probe, claim.probe_address)
        });
        match up {
            Some(()) => sink.connected(peer, &hello),
            None => sink.disconnected(peer, DownReason::Disconnected),
        }
    }

    fn answer(
        &self,
        socket: &OwnedFd,
        terms: &Terms,
        geometry: Geometry,
        hello: &Hello,
        probe: Probe,
    ) -> Result<(), Errno> {
        let mut bytes = [0; Hello::ENCODED_MAX];
        let len = hello.encode(&mut bytes).map_err(|_| Errno::INVAL)?;
        let hello = bytes.get(..len).ok_or(Errno::INVAL)?;
        let claim = Claim { probe_address: probe.address(), geometry, hello };
        let proof = self.prove(terms, Prover::Acceptor, &claim);
        tell(socket, &Message::Accept { proof, claim }, None)
    }

    fn prove(&self, terms: &Terms, prover: Prover, claim: &Claim<'_>) -> [u8; 32] {
        let key = self.config.group_key.as_ref();
        key.map_or([0; 32], |key| *terms.proof(key, prover, claim).as_bytes())
    }

    // ---- calling ----

    /// Calls, or leaves it to later if the listener is busy.
    fn dial(&mut self, call: &mut Call) -> Result<(), Errno> {
        let socket = match socket::call(&call.terms.target) {
            Err(Errno::AGAIN) => return Ok(()),
            called => called?,
        };
        self.introduce(call, socket)
    }

    /// Says to the listener at the other end what the call is, and waits for its answer.
    fn introduce(&mut self, call: &mut Call, socket: OwnedFd) -> Result<(), Errno> {
        // The name may have been taken by somebody else since it was given to us.
        let who = socket::credentials(&socket)?;
        if self.config.group_key.is_none() && !self.is_same_user(who) {
            return Err(Errno::PERM);
        }
        let (nonce, target) = (call.terms.initiator, call.terms.target);
        match tell(&socket, &Message::Call { nonce, target }, None) {
            // It has hung up, and may have said why.
            Ok(()) | Err(Errno::PIPE) => {}
            Err(errno) => return Err(errno),
        }
        self.watch(&socket, Source::Peer { index: call.peer.index, serial: call.serial })?;
        call.socket = Some(socket);
        Ok(())
    }

    fn dial_again<S: Sink>(&mut self, index: u16, now: Time, sink: &mut S) {
        let slot = self.slot(index);
        if !matches!(slot, Slot::Calling(call) if call.socket.is_none() && now >= call.again) {
            return;
        }
        let Slot::Calling(mut call) = std::mem::replace(slot, Slot::Vacant) else {
            return;
        };
        let dialled = self.dial(&mut call);
        let peer = call.peer;
        // Back to its place, from which `fail` takes it if need be.
        *self.slot(index) = Slot::Calling(call);
        match dialled {
            Ok(()) => {}
            Err(Errno::PERM | Errno::ACCESS) => {
                self.fail(peer, DownReason::Refused(Refusal::Unauthorised), sink)
            }
            Err(errno) => self.fail(peer, why_not(errno, DownReason::NeverAnswered), sink),
        }
    }

    /// Waits for the peer's own call, which it keeps. Should the peer die before it has called, or be turned away
    /// here, nothing else would tell us: ours is placed again.
    fn put_off(&mut self, index: u16, now: Time) {
        let serial = self.next_serial();
        if let Slot::Calling(call) = self.slot(index) {
            let socket = call.socket.take();
            call.segment = None;
            call.serial = serial;
            call.again = now.after(CROSSED_PATIENCE);
            if let Some(socket) = socket {
                self.unwatch(&socket);
            }
        }
    }

    /// Ends a call of ours without a report.
    fn hang_up(&mut self, index: u16) {
        if let Slot::Calling(call) = self.slot(index) {
            let socket = call.socket.take();
            *self.slot(index) = Slot::Vacant;
            self.handshakes = self.handshakes.saturating_sub(1);
            if let Some(socket) = socket {
                self.unwatch(&socket);
            }
        }
    }

    fn fail<S: Sink>(&mut self, peer: PeerId, reason: DownReason, sink: &mut S) {
        self.hang_up(peer.index);
        sink.disconnected(peer, reason);
    }

    fn hear_answer<S: Sink>(&mut self, index: u16, serial: u64, now: Time, sink: &mut S) {
        let Slot::Calling(call) = self.slot(index) else {
            return;
        };
        let (peer, proved) = (call.peer, call.segment.is_some());
        let Some(socket) = call.socket.as_ref().filter(|_| call.serial == serial) else {
            return;
        };
        let mut bytes = [0; MESSAGE_MAX];
        let received = match socket::receive(socket, &mut bytes) {
            Ok(received) => received,
            Err(NoMessage::Yet) => return,
            Err(NoMessage::Gone) => return self.fail(peer, DownReason::Disconnected, sink),
            Err(NoMessage::Malformed) => return self.fail(peer, DownReason::Protocol, sink),
        };
        let message = Message::decode(bytes.get(..received.len).unwrap_or(&[]));
        match (message, received.files.as_slice()) {
            (Ok(Message::Challenge { nonce }), []) if !proved => {
                if let Err(errno) = self.respond(index, nonce) {
                    self.fail(peer, why_not(errno, DownReason::Disconnected), sink);
                }
            }
            (Ok(Message::Accept { proof, claim }), []) if proved => {
                self.accepted(index, proof, &claim, sink);
            }
            (Ok(Message::Refuse(Refusal::Crossed)), []) => self.put_off(index, now),
            (Ok(Message::Refuse(why)), []) => self.fail(peer, DownReason::Refused(why), sink),
            (Err(Malformed::Version { theirs }), _) => {
                let why = Refusal::Version { ours: PROTOCOL_VERSION, theirs };
                self.fail(peer, DownReason::Refused(why), sink);
            }
            _ => self.fail(peer, DownReason::Protocol, sink),
        }
    }

    /// Answers the challenge: makes the segment, and shows who we are.
    fn respond(&mut self, index: u16, nonce: Nonce) -> Result<(), Errno> {
        let initiator_nics = self.config.nics;
        let Slot::Calling(call) = self.slot(index) else {
            return Ok(());
        };
        call.terms.acceptor = nonce;
        let geometry = Geometry { initiator_nics, acceptor_nics: nics_of(&call.address) };
        let (segment, file) = Segment::create(geometry)?;
        call.segment = Some(segment);
        let Some(Slot::Calling(call)) = self.slots.get(usize::from(index)) else {
            return Ok(());
        };
        let mut bytes = [0; Hello::ENCODED_MAX];
        let len = call.hello.encode(&mut bytes).map_err(|_| Errno::INVAL)?;
        let hello = bytes.get(..len).ok_or(Errno::INVAL)?;
        let claim = Claim { probe_address: call.probe.address(), geometry, hello };
        let proof = self.prove(&call.terms, Prover::Initiator, &claim);
        let socket = call.socket.as_ref().ok_or(Errno::NOTCONN)?;
        tell(socket, &Message::Prove { proof, claim }, Some(&file))
    }

    fn accepted<S: Sink>(&mut self, index: u16, proof: [u8; 32], claim: &Claim<'_>, sink: &mut S) {
        let ours = self.config.nics;
        let Some(Slot::Calling(call)) = self.slots.get(usize::from(index)) else {
            return;
        };
        let peer = call.peer;
        let key = self.config.group_key.as_ref();
        if !call.terms.verify(key, Prover::Acceptor, claim, proof) {
            return self.fail(peer, DownReason::Refused(Refusal::Unauthorised), sink);
        }
        let nics = nics_of(&call.address);
        let geometry = Geometry { initiator_nics: ours, acceptor_nics: nics };
        let hello = Hello::decode(claim.hello).ok().filter(|hello| {
            hello.engine() == call.address.engine() && nics_of(&hello.address) == nics
        });
        let Some(hello) = hello.filter(|_| claim.geometry == geometry) else {
            return self.fail(peer, DownReason::Protocol, sink);
        };
        let Slot::Calling(call) = std::mem::replace(self.slot(index), Slot::Vacant) else {
            return;
        };
        self.handshakes = self.handshakes.saturating_sub(1);
        let (Some(socket), Some(segment)) = (call.socket, call.segment) else {
            return;
        };
        self.unwatch(&socket);
        let who = socket::credentials(&socket).unwrap_or(Credentials::UNKNOWN);
        let link = Arc::new(Link::new(peer, segment, socket));
        match self.open(link, nics, who, call.probe, claim.probe_address) {
            Some(()) => sink.connected(peer, &hello),
            None => sink.disconnected(peer, DownReason::Disconnected),
        }
    }

    // ---- sessions ----

    fn open(
        &mut self,
        link: Arc<Link>,
        their_nics: u8,
        who: Credentials,
        probe: Probe,
        their_probe_address: u64,
    ) -> Option<()> {
        let (index, serial) = (link.peer.index, self.next_serial());
        if !matches!(self.slot(index), Slot::Vacant) {
            return None;
        }
        self.watch_session(&link, serial).ok()?;
        let (our_nics, foreign) = (self.config.nics, self.config.foreign);
        let from_zero = self.config.from_zero;
        let start = Start {
            link: Arc::clone(&link),
            serial,
            our_nics,
            their_nics,
            pid: who.pid,
            is_same_user: self.is_same_user(who),
            foreign,
            from_zero,
            probe,
            their_probe_address,
        };
        let session = Session::new(start).ok()?;
        self.memory.attach(link);
        *self.slot(index) = Slot::Up(Box::new(session));
        self.up.push(index);
        self.expecting = true;
        Some(())
    }

    fn is_calling(&self, index: u16) -> bool {
        matches!(self.slots.get(usize::from(index)), Some(Slot::Calling(_)))
    }

    /// Takes the peer's messages. Nothing comes after the last from one whose process had `ended` before we looked.
    fn hear_peer<S: Sink>(&mut self, index: u16, serial: u64, ended: bool, sink: &mut S) {
        let mut buffer = [0; MESSAGE_MAX];
        for _ in 0..MESSAGES_MAX {
            let Some(Slot::Up(session)) = self.slots.get_mut(usize::from(index)) else {
                return;
            };
            if session.serial != serial {
                return;
            }
            let known = self.gpus.as_ref().map(|gpus| gpus.known());
            let heard = match socket::receive(&session.link.socket, &mut buffer) {
                Ok(received) => {
                    let bytes = buffer.get(..received.len).unwrap_or(&[]);
                    Message::decode(bytes).ok().and_then(|message| {
                        let files = (received.files, received.is_short);
                        session.handle(message, files, &self.memory, known).ok()
                    })
                }
                Err(NoMessage::Yet) if !ended => return,
                Err(NoMessage::Malformed) => None,
                Err(NoMessage::Gone | NoMessage::Yet) => {
                    return self.lose(index, DownReason::Disconnected, sink);
                }
            };
            if heard.is_none() {
                return self.lose(index, DownReason::Protocol, sink);
            }
        }
    }

    /// Ends a session that cannot go on, and reports it. What has arrived is delivered first.
    fn lose<S: Sink>(&mut self, index: u16, reason: DownReason, sink: &mut S) {
        if let Some(session) = self.session_at(index) {
            let peer = session.peer();
            if reason == DownReason::Disconnected {
                // A lane holds so many and no more: whoever goes on pushing is not waited for.
                let mut rounds = 0..segment::LANE_ENTRIES;
                while rounds.next().is_some() && session.take_immediates(sink) == Ok(true) {}
            }
            if session.is_flying() {
                // Reported when GPUs have done with it: the next poll or the next look ends it.
                return session.close(reason);
            }
            self.end(index, WorkError::PeerGone, sink);
            sink.disconnected(peer, reason);
        }
    }

    /// Ends a session without a report of its own.
    fn end<S: Sink>(&mut self, index: u16, error: WorkError, sink: &mut S) {
        let Slot::Up(session) = self.slot(index) else {
            return;
        };
        session.close(DownReason::Disconnected);
        // Whoever does not leave this to polls has a peer that is gone, lies, or is given up, by its silence or by who removes it; or ends itself. A record
        // takes less than this, unless its reader is held up.
        let until = Instant::now() + QUIET_PATIENCE;
        while !session.bounce_is_quiet() && !session.link.is_gone() && Instant::now() < until {
            std::hint::spin_loop();
        }
        session.flush(error, sink);
        let link = Arc::clone(&session.link);
        self.forget(index, &link);
    }

    fn forget(&mut self, index: u16, link: &Arc<Link>) {
        *self.slot(index) = Slot::Vacant;
        self.up.retain(|&up| up != index);
        self.unwatch(&link.socket);
        if let Some(process) = link.process() {
            self.unwatch(process);
        }
        // We write no more. The peer is told so; until it stops too, the link stays in the memory's list.
        let _ = rustix::net::shutdown(&link.socket, rustix::net::Shutdown::Write);
        self.memory.detach(link);
    }

    fn poll_sessions<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool {
        let mut any = self.poll_gpus(now, sink);
        let mut gpus = self.gpus.take();
        let mut at = 0;
        // Not an iterator: a session that ends leaves the list.
        while let Some(&index) = self.up.get(at) {
            let Some(Slot::Up(session)) = self.slots.get_mut(usize::from(index)) else {
                at += 1;
                continue;
            };
            match session.poll(now, &self.memory, &mut gpus, sink) {
                Ok(more) => {
                    any |= more;
                    at += 1;
                }
                Err(session::Broken) => {
                    let reason = session.closing.unwrap_or(DownReason::Protocol);
                    self.end_reported(index, reason, sink);
                    any = true;
                }
            }
        }
        launch(&mut gpus, true);
        self.gpus = gpus;
        any
    }

    /// Reports what GPUs have copied since the last call.
    #[inline]
    fn poll_gpus<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool {
        let Some(mut gpus) = self.gpus.take() else {
            return false;
        };
        let any = gpus.poll(now, &mut |work, end| match self.session(work.peer) {
            Some(session) => session.land(work, end, sink),
            // Bytes that arrive after the session: nobody is told of them.
            None => sink.work_done(work.nic, work.token, Err(WorkError::Flushed)),
        });
        self.gpus = Some(gpus);
        any
    }

    fn end_reported<S: Sink>(&mut self, index: u16, reason: DownReason, sink: &mut S) {
        let Some(session) = self.session_at(index) else {
            return;
        };
        let peer = session.peer();
        let aborted = reason == DownReason::Disconnected;
        self.end(index, if aborted { WorkError::Flushed } else { WorkError::PeerGone }, sink);
        sink.disconnected(peer, reason);
    }
}

impl Provider for ShmProvider {
    type Memory = ShmMemory;

    fn nics(&self) -> &[NicInfo] {
        &self.nics
    }

    fn memory(&self) -> &Arc<ShmMemory> {
        &self.memory
    }

    fn address(&self) -> NetAddr {
        self.address.clone()
    }

    const AT_ONCE_BYTES: u64 = PIECE_MIN_BYTES;

    #[inline(always)]
    fn write_at_once(&mut self, nic: NicIndex, piece: &Piece) -> bool {
        self.session(piece.peer).is_some_and(|session| session.write_at_once(nic, piece))
    }

    /// Copies here and now, at most about 2 MiB a call: that not all was accepted need not mean that
    /// something is full.
    fn post<S: Sink>(&mut self, nic: NicIndex, work: &[WorkRequest], sink: &mut S) -> usize {
        let mut copied = 0_u64;
        let mut accepted = 0;
        let mut last = None;
        let mut gpus = self.gpus.take();
        for piece in work {
            if copied >= POST_BYTES {
                break;
            }
            if last != Some(piece.peer) {
                self.settle(last);
                last = Some(piece.peer);
            }
            let step = match self.session(piece.peer) {
                Some(session) => session.submit(piece, &mut gpus, sink),
                None => Step::Ended(Err(WorkError::PeerGone)),
            };
            match step {
                Step::Ended(end) => sink.work_done(nic, piece.token, end),
                Step::UnderWay => self.expecting = true,
                Step::NotYet | Step::NoRoom => break,
            }
            accepted += 1;
            // What a GPU copies takes no time here.
            if step != Step::UnderWay {
                copied = copied.saturating_add(piece.len);
            }
        }
        launch(&mut gpus, sink.has_more(nic));
        self.gpus = gpus;
        self.settle(last);
        accepted
    }

    /// Idle, it costs a few loads for each peer, and a system call each `LOOK_EVERY` calls or `LOOK_WITHIN`, whichever is first.
    fn poll<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool {
        let mut any = self.poll_sessions(now, sink);
        self.polls = self.polls.wrapping_add(1);
        let hurry = self.handshakes > 0 || self.expecting;
        let every = if hurry { LOOK_EVERY_IN_A_HURRY } else { LOOK_EVERY };
        if self.look_now || now >= self.look_by || self.polls.is_multiple_of(every) {
            self.look_now = false;
            any |= self.look(now, sink);
        }
        any
    }

    fn connect(
        &mut self,
        _now: Time,
        peer: PeerId,
        address: &NetAddr,
        hello: &Hello,
    ) -> Result<(), ConnectError> {
        if address.provider() != ProviderKind::Shm {
            let found = address.provider().name().to_owned();
            return Err(ConnectError::OtherProvider { found, expected: ProviderKind::Shm.name() });
        }
        let malformed = |what| ConnectError::Malformed { what };
        let first = address.nics().first().map(|nic| nic.address.as_slice());
        let target: ListenerId = first
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or(malformed("an shm address has 16 bytes"))?;
        if address.nics().iter().any(|nic| nic.address.as_slice() != target) {
            return Err(malformed("the NICs of an shm engine share one address"));
        }
        if target == self.id {
            return Err(ConnectError::Myself);
        }
        if !matches!(self.slot(peer.index), Slot::Vacant) {
            return Err(malformed("the peer's slot is in use"));
        }
        let lacks = |errno: Errno| ConnectError::Local { why: io::Error::from(errno).into() };
        let terms = Terms { initiator: random().map_err(lacks)?, acceptor: [0; 32], target };
        let mut call = Call {
            peer,
            socket: None,
            again: Time::ZERO,
            serial: self.next_serial(),
            address: address.clone(),
            hello: hello.clone(),
            terms,
            segment: None,
            probe: Probe::deal(),
        };
        self.dial(&mut call).map_err(|errno| match errno {
            errno if is_lack(errno) => lacks(errno),
            Errno::PERM | Errno::ACCESS => ConnectError::Unauthorised { source: errno.into() },
            _ => ConnectError::Unreachable { source: errno.into() },
        })?;
        *self.slot(peer.index) = Slot::Calling(Box::new(call));
        self.handshakes += 1;
        Ok(())
    }

    fn quiesce(&mut self) {
        if let Some(gpus) = &mut self.gpus {
            gpus.settle();
        }
    }

    /// Returns within a millisecond, as nobody need poll after it. What a GPU is copying is reported when it has. If the peer is held up for longer while it
    /// copies a record out of the bounce ring (stopped by a signal, say), that record, 64 KiB at most, may still reach its own memory when it goes
    /// on, and be counted there.
    fn disconnect<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        match self.slots.get(usize::from(peer.index)) {
            Some(Slot::Up(session)) if session.peer() == peer => {
                self.end(peer.index, WorkError::Flushed, sink);
            }
            Some(Slot::Calling(call)) if call.peer == peer => self.hang_up(peer.index),
            _ => {}
        }
    }

    /// Pieces that wait for the peer are given back at once, as nothing of them was written; those end that a GPU copies, when it has. If any lies in the bounce ring, the ring is closed, and
    /// the next poll ends the rest and the connection; a later one, if the peer is in the middle of a record: when it is done with that, or, as it may be
    /// stopped there, after a second. What is posted meanwhile finds no room.
    fn abort<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        if let Some(session) = self.session(peer) {
            session.return_waiting(sink);
            session.flush_landed(WorkError::Flushed, sink);
            if session.is_bouncing() {
                session.close(DownReason::Disconnected);
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn arm(&mut self) -> bool {
        // A call that could not be placed yet has no socket to wake us.
        let undialled = |slot: &Slot| matches!(slot, Slot::Calling(call) if call.socket.is_none());
        let mut idle = self.handshakes == 0 || !self.slots.iter().any(undialled);
        idle &= !self.gpus.as_ref().is_some_and(|gpus| gpus.is_flying() || gpus.is_closing());
        for &index in &self.up {
            if let Some(Slot::Up(session)) = self.slots.get_mut(usize::from(index)) {
                idle &= session.prepare_sleep() && !session.can_retry();
            }
        }
        if !idle {
            self.disarm();
        }
        idle
    }

    fn disarm(&mut self) {
        for &index in &self.up {
            if let Some(Slot::Up(session)) = self.slots.get(usize::from(index)) {
                session.awake();
            }
        }
        self.look_now = true;
    }
}

impl ShmProvider {
    fn settle(&mut self, peer: Option<PeerId>) {
        if let Some(session) = peer.and_then(|peer| self.session(peer)) {
            session.settle();
        }
    }
}

impl Drop for ShmProvider {
    /// Ends all sessions: peers see it at once, and whoever withdraws a region later need not wait for
    /// peers that have stopped. Then nothing of the caller's memory is to stay pinned.
    fn drop(&mut self) {
        let gpus = self.gpus.take();
        let mut sessions = || {
            while let Some(index) = self.up.pop() {
                self.end(index, WorkError::Flushed, &mut Nobody);
            }
            self.memory.end();
        };
        match gpus {
            Some(gpus) => gpus.end(sessions),
            None => sessions(),
        }
    }
}
