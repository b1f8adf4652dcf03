//! The provider for engines on RDMA NICs: ConnectX and other InfiniBand or RoCE devices, by libibverbs.
//!
//! libibverbs is found and loaded at run time; nothing is linked. What has to be there is the part that all drivers
//! have, Soft-RoCE's among them: reliable connected queue pairs, one-sided writes with immediate, shared receive queues. Extended posts and
//! polls, queues that grow, DMA-BUFs and on-demand paging are used where a device offers them.
//!
//! | part | what |
//! |---|---|
//! | `choose` | which ports an engine has |
//! | `device` | libibverbs's objects, owned |
//! | `slab` | registered memory for messages |
//! | `lane` | queue pairs for writes, what is in flight on them, and whose a queue pair is |
//! | `door` | the queue pairs that take datagrams, where the engine is reached |
//! | `resolver` | addresses, looked up on threads of its own |
//! | `session` | one peer |
//! | `handshake` | calls, and how both ends prove who they are |
//! | `memory` | regions, and how they are taken back |
//! | `survey` | what the machine has, for people |
//! | `upkeep` | what is to be done beside the way of data, in its turn: |
//! | `nics` | what devices tell, and NICs that are lost or back |
//! | `notes` | what peers say, and are told |
//! | `paths`, `lines` | queue pairs for writes, and for notes, made anew |
//! | `endings` | sessions that end |
//!
//! A session has for each NIC that both ends have one queue pair for notes (`immwire_core::note`), a *line*, of which each
//! end uses one at a time; and for each path that something is written over, from a NIC of the writer's to one of the
//! receiver's, two of its own, which are opened when they are first needed: long writes go by one, short ones by the
//! other, so that they do not wait. Each NIC has one completion queue for all, and receive queues of which each is shared by the
//! sessions in some seats (`immwire_core::shelf`): with these the one becomes longer, and of the others there are more.
//!
//! # Queues
//!
//! No queue overruns: a completion queue has room for all receives that are ever posted and all sends that are ever
//! in flight. Beside that each peer is granted a number of immediates (`immwire_core::credit`), so that it finds a
//! receive posted for each, and leaves some to others. One that does not keep to it waits at its own side, as does
//! whoever comes when it has taken all: the transport asks again, by itself.
//!
//! # What done means
//!
//! A write is done when the other device has acknowledged it. That the bytes can be seen there is said by its
//! immediate, as everywhere; so a write without one is done a moment before it can be seen. Nor does an immediate say so of
//! what went by another queue pair: of a write whose immediates follow without bytes, all goes by the long ones
//! (`WorkRequest::is_bulk`), and an immediate behind it by each.
//!
//! # What breaks
//!
//! A queue pair that fails takes nobody else along: the transport has tried for as long as the options say.
//!
//! - *A path's.* Both its queue pairs are cut, and the engine is told. What was in flight stays there, until the receiver has
//!   said how many immediates came over each (`immwire_core::verdict`), having destroyed its own ends before: so
//!   each piece is done, or can be posted on another path. Then the path rests, is opened anew, and is in use again when
//!   something has got through (`immwire_core::way`).
//! - *A line's.* Notes go over another, those again of which it is not known whether they were taken
//!   (`immwire_core::courier`). The end that has called opens the line anew (`immwire_core::line`).
//! - *A port that goes down.* If there is another way, what is in flight is taken for broken, and nothing more is posted there: a path on
//!   which something would be breaks then. Else the transport tries until it gives up, or the port is up again.
//! - *A device.* Its NICs are lost for good: their queue pairs are cut, and what these had received is read, as far as that can be.
//!
//! A session ends when it has no line left, or all its paths are broken at a time, or a write names memory that it may
//! not: that fails on every path alike.
//!
//! # Cutting off
//!
//! A queue pair that is set to error sends and receives nothing more, and all that was posted on it completes. That
//! concerns one peer; nobody else notices. What it had sent may still be on its way, until the receiver ends its side.
//!
//! What it had taken from its shared receive queue completes, too, and is posted again. With some devices it goes with the queue
//! pair if that is destroyed before (ConnectX, by libmlx5's text), and each path that breaks would leave the queue shorter. So one that receives is destroyed when its
//! device has said that it takes no more (`IBV_EVENT_QP_LAST_WQE_REACHED`) and
//! all was read. Soft-RoCE of Linux 6.1 does not say so: a device is waited for once for 20 ms, in which the engine does nothing else, and then
//! for 0.1 ms until it does.
//!
//! # Who is gone
//!
//! A peer whose process is gone has no queue pairs any more: what is sent to it is not answered, and fails after the
//! retries. Because nothing may be under way, a peer that was not heard for a second is sent a write without bytes,
//! which takes nothing of its processor. It is down a second or two after its process has ended; after three or four where the
//! device tries without end. There a line is given up of which nothing has completed for twice the time that a device would
//! have tried; and a path that stands still as long, if the line of one of its NICs is broken by then, or eight times as long, if
//! one has none. While there are lines it is slow, not broken.
//!
//! # Forks
//!
//! Before Linux 5.13 a process that forks, or starts a program, may lose what peers write to it, without a word. So libibverbs is asked to
//! prepare for that when an engine begins ([`Forks`]): where the kernel does not copy registered pages for a child, they are left out of it.
//!
//! # Trust
//!
//! With a group key, only those that prove to hold it are let in. Without one, anybody is who reaches a door. Nothing
//! is encrypted, and who can send packets in another's name can write to its regions: RDMA networks are to be closed
//! ones. Messages and descriptors from outside cannot crash this process.
//!
//! # Limits
//!
//! - The default partition.
//! - Two engines connect if their NICs of one number, at least, reach each other: notes go between NICs of the same number.
//! - What is held of a device that has failed is given back when the engine ends. Linux waits for that, if it is asked to
//!   remove a device whose driver cannot be taken from under its users (Soft-RoCE's, say); it works until then.
//! - A port that comes back under another address is not found by peers.
//! - On RoCE the kernel looks addresses up, which takes up to a second if nobody answers. Threads have it do so before the
//!   engine does anything that needs it; but if the kernel forgets an address again within three seconds, because nobody
//!   answers there any more, the engine may wait. And an engine that ends waits for lookups that are under way.
//!
//! # Invariants
//!
//! - Nothing here waits for a peer, nor for the network to say where one is. Each poll does a bounded amount of work, but where queue pairs are
//!   drained: see above.
//! - The way of data neither allocates nor locks nor hashes: tables are made with the session.
//! - A piece is reported once: when its completion, or a later one of its queue pair, was read, or the queue pair has
//!   been destroyed; and one on a broken path when that is settled, or its session ends.

mod choose;
mod device;
mod door;
mod endings;
mod forks;
mod handshake;
mod lane;
mod lines;
mod memory;
mod nics;
mod notes;
mod paths;
mod resolver;
mod session;
mod slab;
mod survey;
mod upkeep;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ibverbs_sys as sys;
use ibverbs_sys::{Library, LoadError};
use immwire_core::courier::{LETTER_MAX, Letter};
use immwire_core::credit::Allowance;
use immwire_core::device::{Health, NoPaging};
use immwire_core::group::{NOTES_PER_PEER, WorkError, WorkRequest};
use immwire_core::id::{EngineId, MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::imm::Imm;
use immwire_core::life::Notice;
use immwire_core::note::LANES;
use immwire_core::parting::Draining;
use immwire_core::patience::BLINK;
use immwire_core::peer::DownReason;
use immwire_core::pulse::patience;
use immwire_core::shelf::{Lengths, Needs, Room, SHELVES_MAX};
use immwire_core::tenant::device_key;
use immwire_core::verdict::{self, Verdict};
use immwire_core::way::is_left;
use immwire_core::wire::{Hello, NetAddr, NicAddr, ProviderKind};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

pub use self::device::Unfit;
use self::device::{
    BATCH, Chain, Completed, Completions, Depths, Device, Domain, QueuePair, RECEIVES, Shared,
    Write,
};
use self::door::Doors;
pub use self::forks::Forks;
use self::handshake::Handshakes;
use self::lane::{Done, LaneId, Lanes, Owner, Owners, Role};
pub use self::memory::VerbsMemory;
use self::memory::split_key;
use self::paths::leads;
use self::resolver::Resolver;
use self::session::Session;
use self::slab::Slab;
pub use self::survey::{Survey, Surveyed, survey};
use crate::gpus::{GPUS_MAX, Known, OpenError};
use crate::provider::{
    ConnectError, NicInfo, NicLimits, Path, Provider, Receipt, RemotePath, Sink, Unfenced, pin_hint,
};
use crate::shm::GroupKey;
use crate::topology::{Misplaced, OverrideError, Pairing};

/// Pieces of transfers in flight on a NIC.
const QUEUE_DEPTH: u16 = 256;
/// Writes that one queue pair holds. A power of two less one: Soft-RoCE makes it one more, and rounds that up.
const LANE_DEPTH: u16 = 127;
/// The engine's notes in flight on a NIC beside these, at most: those of 64 peers.
const ENGINE_NOTES_MAX: u16 = 64 * NOTES_PER_PEER;
/// The longest piece: between two, small writes have their turn, and a cancellation is heard.
const PIECE_BYTES: u64 = 1 << 20;
/// The shortest piece worth a NIC of its own.
const PIECE_MIN_BYTES: u64 = 64 << 10;
/// The longest write that does not wait behind longer ones.
const SHORT_BYTES: u64 = 8 << 10;
/// Bytes that travel inside a work request, if the device takes so many.
const INLINE_BYTES: u32 = 64;
/// A letter's, at most, which always do.
const LETTER_BYTES: u32 = 32;
const _: () = assert!(LETTER_MAX == LETTER_BYTES as usize && LETTER_BYTES <= INLINE_BYTES);
/// Immediates that a peer may have under way to one NIC, if the queue has room for so many from each.
const GRANT_MAX: u16 = 256;
/// Receives that wait to be posted again, on a shelf, at most.
const TAKEN_TOGETHER: u16 = 31;
const _: () = assert!(TAKEN_TOGETHER as usize + 1 == RECEIVES);
/// Small pieces that a device is told of together.
const TOGETHER: u16 = 16;
/// Receives posted on a NIC, at most.
const RECEIVES_MAX: u32 = 32 << 10;
/// Letters, and probes, under way to one peer on one line.
const NOTES: u16 = 8;
/// Notes to one peer of which it is not known whether it has taken them.
const LETTERS: usize = NOTES as usize;
/// Completions read in one poll of a NIC.
const ROUNDS: usize = 4;
/// How often what can wait is looked at.
const UPKEEP_EVERY: Duration = Duration::from_micros(500);
/// How often it is said, at most, what led to nothing.
const SAID_EVERY: Duration = Duration::from_secs(1);

/// Which devices, and how their packets travel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerbsOptions {
    /// The NICs by name, in this order: `mlx5_0:2` is a port of a device, `mlx5_0` the device's first that is active. If none:
    /// for an engine with GPUs, all active ports of the [nearest](crate::topology) devices, and otherwise of all that there
    /// are, in the order of their names; each device's first before any second.
    pub devices: Vec<String>,
    /// Which entry of each port's table of global names is used. If none: RoCE v2 before v1, IPv4 before IPv6.
    pub gid_index: Option<u8>,
    /// Traffic class: the DSCP of RoCE v2 in its upper six bits.
    pub traffic_class: u8,
    /// InfiniBand's service level, RoCE's priority where the traffic class does not decide. 0 to 15.
    pub service_level: u8,
    /// How long a packet may go without an answer: 4.096 us times two to this power. 1 to 31. On a network on which packets
    /// queue for longer than that, more is sent twice than arrives.
    pub ack_timeout: u8,
    /// How often it is sent again then. 0 to 7. Soft-RoCE takes 7 for no end; with less, paths break there where many packets overtake
    /// others, each of which it counts as a loss.
    pub retry_count: u8,
    /// Regions of the host's memory are not pinned: the devices ask for pages when they need them (on-demand paging), so that
    /// more can be registered than there is memory, in no time; the first write to each page takes longer for it. Only
    /// where all devices offer it: [`VerbsError::NoPaging`] otherwise.
    pub on_demand: bool,
    /// Writes are posted, and completions read, by the calls that all drivers have, also where a device offers the extended ones
    /// (`ibv_wr_start`, `ibv_start_poll`).
    pub classic: bool,
}

impl Default for VerbsOptions {
    /// All devices, and a device gives a peer up that does not answer for about half a second.
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            gid_index: None,
            traffic_class: 0,
            service_level: 0,
            ack_timeout: 14,
            retry_count: 7,
            on_demand: false,
            classic: false,
        }
    }
}

/// What a [`VerbsProvider`] is made from.
#[derive(Debug, Clone)]
pub struct VerbsConfig {
    /// Who the engine is.
    pub engine: EngineId,
    /// How many NICs it is to have, 1 to 8. Several may share a device.
    pub nics: u8,
    /// The most peers at a time: receive queues are divided among so many.
    pub peers: u16,
    /// Which devices, and how their packets travel.
    pub options: VerbsOptions,
    /// If given, required of every peer.
    pub group_key: Option<GroupKey>,
    /// The GPUs whose memory it is to read and write, by their numbers in this process: where the devices can.
    pub gpus: Vec<u32>,
    /// Which devices belong to which GPU, where somebody knows better.
    pub pairing: Pairing,
}

impl VerbsConfig {
    /// One NIC, 256 peers, whatever the machine has, no GPU.
    #[must_use]
    pub fn new(engine: EngineId) -> Self {
        let options = VerbsOptions::default();
        let pairing = Pairing::default();
        Self { engine, nics: 1, peers: 256, options, group_key: None, gpus: Vec::new(), pairing }
    }
}

/// Why there is no provider, or a part of it fails.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// An engine has 1 to 8 NICs.
    #[error("an engine has 1 to {MAX_NICS} NICs, not {nics}")]
    Nics {
        /// As configured.
        nics: u8,
    },
    /// An option is out of its range.
    #[error("{option} must be {allowed}, not {found}")]
    Option {
        /// Which.
        option: &'static str,
        /// What is possible.
        allowed: &'static str,
        /// As configured.
        found: u8,
    },
    /// There is no libibverbs.
    #[error("{0}")]
    Load(#[from] LoadError),
    /// No device fits.
    #[error(
        "no RDMA device that fits{}{}; `ibv_devinfo` lists what there is",
        if wanted.is_empty() { String::new() } else { format!(", of {}", wanted.join(", ")) },
        unfit.iter().map(|it| format!("; {}: {}", it.device, it.why)).collect::<String>(),
    )]
    NoDevice {
        /// As configured.
        wanted: Vec<String>,
        /// Those that do not, and why.
        unfit: Vec<Unfit>,
    },
    /// A device is not one that can be used.
    #[error("{why}")]
    Unfit {
        /// What is the matter.
        why: &'static str,
    },
    /// There is nothing at the index that was given.
    #[error(
        "its table of GIDs has nothing that can be used at index {index}, which was given: leave gid_index out, or name another \
         (`show_gids`, `rdma link`)"
    )]
    NoGid {
        /// As given.
        index: u8,
    },
    /// libibverbs returned an error.
    #[error("{call}: {source}{}", pin_hint(call, source.raw_os_error()))]
    Call {
        /// The function.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
    /// An engine uses each GPU once, and not more than it can tell apart.
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
    /// What is said of the GPUs' devices cannot be.
    #[error("the pairing of GPUs and NICs: {0}")]
    Pairing(#[from] Misplaced<OverrideError>),
    /// Memory was not to be pinned, and a device must have it so.
    #[error(
        "{device} cannot be given memory that is not pinned: {lacks}; leave on-demand paging out, or name other devices"
    )]
    NoPaging {
        /// The device.
        device: String,
        /// What is missing.
        lacks: NoPaging,
    },
    /// A device does not take a GPU's memory, in neither of the two ways.
    #[error(
        "by DMA-BUF: {by_file}; by its address: {by_address}. One of two is needed: the open kernel module of NVIDIA's with \
         Linux 5.12 or later, and a device that takes DMA-BUFs; or the module nvidia-peermem"
    )]
    NoGpuDirect {
        /// Why not the one way.
        by_file: String,
        /// Why not the other.
        by_address: io::Error,
    },
    /// The peer's ports cannot be reached from ours.
    #[error("the peer's ports cannot be reached from ours")]
    Unreachable,
    /// The kernel has no random bytes.
    #[error("random bytes: {0}")]
    Random(#[source] io::Error),
    /// The kernel said no.
    #[error("{call}: {source}")]
    Os {
        /// What it was asked for.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
}

impl From<OpenError> for VerbsError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Names => Self::Gpus,
            OpenError::Gpu { ordinal, source } => Self::Gpu { ordinal, source },
        }
    }
}

/// What has happened at the doors. Counts since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VerbsStats {
    /// Messages that were none, or not to be believed.
    pub ignored: u64,
    /// Callers that were told why not.
    pub refused: u64,
    /// What came for no session.
    pub strays: u64,
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

/// What notes' completions carry of a token.
#[expect(clippy::cast_possible_truncation, reason = "the lower half is what is meant")]
const fn tag_of(token: u64) -> u32 {
    token as u32
}

/// A token for a session: tells it from all others that there have been.
fn new_token() -> io::Result<u64> {
    random().map(u64::from_ne_bytes)
}

/// A NIC.
#[derive(Debug)]
struct Nic {
    /// Read, and not looked at yet.
    stash: Completions,
    owners: Owners,
    /// Sends whose completion was not read, and how many there may be. The engine sees to it that pieces of
    /// transfers are no more than the depth it was told.
    outstanding: u16,
    pieces: u16,
    shelves: heapless::Vec<Shelf, SHELVES_MAX>,
    completed: Arc<Completed>,
    /// Whether that is made longer for each shelf; else it is as long as for all of them.
    grows: bool,
    lengths: Lengths,
    domain: Arc<Domain>,
    /// Bytes that a write may carry itself.
    inline: u32,
    health: Health,
    /// Its completion queue cannot be read.
    is_mute: bool,
    draining: Draining,
}

/// How long queues are that fit all of the devices.
fn lengths_of(devices: &[Arc<Device>], peers: u16) -> Lengths {
    let least = |limit: fn(&Device) -> u32| devices.iter().map(|it| limit(it)).min().unwrap_or(0);
    let completions = least(|device| device.facts.max_completions);
    let receives = least(|device| device.facts.max_receives);
    let needs = Needs {
        peers,
        pieces: QUEUE_DEPTH,
        notes: ENGINE_NOTES_MAX,
        letters: NOTES,
        grant: GRANT_MAX,
        receives: RECEIVES_MAX,
        together: TAKEN_TOGETHER,
    };
    Lengths::fitting(Room { completions, receives }, needs)
}

/// A receive queue that the sessions in some seats share (`immwire_core::shelf`).
#[derive(Debug)]
struct Shelf {
    /// Pieces of the slab that are not posted, by the number of their receive.
    unposted: Vec<u32>,
    /// So many of them are posted together.
    together: usize,
    shared: Arc<Shared>,
    /// What letters are received into; outlives the queue that it is posted to.
    slab: Slab,
}

/// Receives of a shelf have numbers of so many bits, below that of the shelf.
const SHELF_BITS: u32 = 24;

/// Of a receive's number: where its shelf is, and which piece of that one's slab.
#[inline]
const fn shelf_and_piece(number: u32) -> (usize, usize) {
    ((number >> SHELF_BITS) as usize, (number & ((1 << SHELF_BITS) - 1)) as usize)
}

impl Shelf {
    /// The shelf of this number, all of its receives posted.
    fn open(domain: &Arc<Domain>, at: u8, receives: u32) -> Result<Self, VerbsError> {
        let shared = Shared::open(domain, receives)?;
        let count = usize::try_from(receives).unwrap_or(usize::MAX);
        let slab = Slab::new(domain, LETTER_MAX, count)?;
        let first = u32::from(at) << SHELF_BITS;
        let unposted = (first..first + receives).rev().collect();
        let mut shelf = Self { unposted, together: 1, shared, slab };
        shelf.refill();
        // Where there are few, none is to wait for as many as there are.
        shelf.together = (count / 2).clamp(1, RECEIVES);
        Ok(shelf)
    }

    /// Posts receives again, as long as there are enough to be posted.
    #[inline]
    fn refill(&mut self) {
        while self.unposted.len() >= self.together {
            let mut batch = heapless::Vec::<_, RECEIVES>::new();
            for &number in self.unposted.iter().rev().take(RECEIVES) {
                let place = self.slab.sge(shelf_and_piece(number).1, LETTER_MAX);
                let _ = batch.push((Done::Receive { number }.encode(), place));
            }
            // SAFETY: the pieces are in the slab, which outlives the queue, and are not posted.
            let posted = unsafe { self.shared.post(&batch) };
            self.unposted.truncate(self.unposted.len() - posted);
            if posted < batch.len() {
                break;
            }
        }
    }
}

impl Nic {
    /// With the first shelf.
    fn open(domain: Arc<Domain>, lengths: Lengths) -> Result<Self, VerbsError> {
        let device = domain.device();
        let (first, all) = (lengths.completions(1), lengths.completions(lengths.shelves()));
        let (completed, grows) = match Self::growing(device, first) {
            Some(completed) => (completed, true),
            None => (Completed::open(device, all)?, false),
        };
        let inline = device.inline_bytes();
        tracing::info!(name = device.name, calls = %device.calls(), inline, "a NIC is open");
        let mut nic = Self {
            stash: Completions::new(),
            owners: Owners::new(),
            outstanding: 0,
            pieces: 0,
            shelves: heapless::Vec::new(),
            completed,
            grows,
            lengths,
            domain,
            inline,
            health: Health::Up,
            is_mute: false,
            draining: Draining::default(),
        };
        nic.open_shelf(0)?;
        Ok(nic)
    }

    /// A completion queue of this length, which can be made longer; none, if the device cannot. Seen now: later there are peers.
    fn growing(device: &Arc<Device>, first: u32) -> Option<Arc<Completed>> {
        if !device.facts.may_grow {
            return None;
        }
        let made = Completed::open(device, (first / 2).max(1));
        let grown = made.and_then(|completed| completed.resize(first).map(|()| completed));
        let said = |error: &VerbsError| {
            tracing::debug!(name = device.name, %error, "completion queues keep their length");
        };
        grown.inspect_err(said).ok()
    }

    fn device(&self) -> &Arc<Device> {
        self.domain.device()
    }

    fn open_shelf(&mut self, at: u8) -> Result<(), VerbsError> {
        if self.grows {
            self.completed.resize(self.lengths.completions(at + 1))?;
        }
        let shelf = Shelf::open(&self.domain, at, self.lengths.receives(at))?;
        tracing::debug!(name = self.device().name, at, "a shelf of receives is open");
        let _ = self.shelves.push(shelf);
        self.pieces = self.lengths.pieces(at + 1);
        Ok(())
    }

    /// The receive queue of the session in this seat.
    fn shared(&mut self, seat: u16) -> Result<Arc<Shared>, VerbsError> {
        let at = self.lengths.shelf_of(seat);
        while let Ok(open) = u8::try_from(self.shelves.len())
            && open <= at
        {
            self.open_shelf(open)?;
        }
        let shelf = self.shelves.get(usize::from(at));
        shelf.map(|shelf| Arc::clone(&shelf.shared)).ok_or(VerbsError::Unreachable)
    }

    /// Posts receives again, where there are enough of them.
    #[inline]
    fn refill(&mut self) {
        for shelf in &mut self.shelves {
            shelf.refill();
        }
    }

    /// A receive has ended, and what it was of can be posted again.
    #[inline]
    fn take_back(&mut self, number: u32) {
        if let Some(shelf) = self.shelves.get_mut(shelf_and_piece(number).0) {
            shelf.unposted.push(number);
        }
    }

    /// Whether something can be sent over it.
    const fn is_usable(&self) -> bool {
        self.health.is_usable()
    }

    /// A queue pair for letters, of the session in this seat.
    fn line(&mut self, seat: u16) -> Result<QueuePair, VerbsError> {
        let depths = Depths { sends: NOTES.into(), receives: 0, inline: LETTER_BYTES };
        let shared = self.shared(seat)?;
        QueuePair::reliable(&self.domain, &self.completed, &shared, depths)
    }

    /// Reads completions, if none are left. Whether the queue is well.
    #[inline]
    fn read(&mut self) -> bool {
        self.completed.read(&mut self.stash)
    }
}

/// Writes that are to be posted together.
#[derive(Debug, Clone, Copy)]
struct Chained {
    lane: LaneId,
    session: u16,
    nic: NicIndex,
    remote_nic: NicIndex,
    /// As it was before the first of them.
    allowance: Allowance,
    /// Which of the pieces given the first is.
    first: usize,
}

/// What the engine is to be told.
#[derive(Debug, Clone, Copy)]
enum Tiding {
    Broken(PeerId, Path),
    Restored(PeerId, Path),
    Nic(NicIndex, bool),
}

/// The provider. See the [module](self).
#[derive(Debug)]
pub struct VerbsProvider {
    config: VerbsConfig,
    nics: Vec<NicInfo>,
    address: NetAddr,
    /// In any order: one that ends is here longer than its peer is. Dropped, as all that has queue pairs, before the
    /// NICs.
    sessions: Vec<Option<Box<Session>>>,
    /// By index of the peer: where its session is.
    seats: Vec<Option<u16>>,
    lanes: Lanes,
    handshakes: Handshakes,
    doors: Doors,
    resolver: Resolver,
    ports: Vec<Nic>,
    memory: Arc<VerbsMemory>,
    /// Sessions that there are.
    live: Vec<u16>,
    /// In the order in which it happened.
    tidings: Vec<Tiding>,
    chain: Chain,
    chained: Option<Chained>,
    grant: u16,
    /// Batches of completions read before a queue pair is destroyed: as many as a queue may have, for what is not read by then is lost.
    last_rounds: usize,
    /// When it was polled last, or when it was to be woken if it sleeps.
    looked: Time,
    /// When all that can wait was looked at last.
    tended: Time,
    /// Something is to be done beside the way of data.
    urgent: bool,
    /// GPUs have been shown what came with the completions that were read last.
    is_shown: bool,
    /// The engine has slept, and may have been woken by a device.
    woken: bool,
    now: Time,
    /// How long nothing may complete of what is under way on a queue pair.
    patience: Duration,
    stats: VerbsStats,
    /// As they were when they were last said, and when.
    said: (VerbsStats, Time),
    epoll: OwnedFd,
    timer: OwnedFd,
}

/// Options that verbs has room for.
fn check(config: &VerbsConfig) -> Result<(), VerbsError> {
    if config.nics == 0 || usize::from(config.nics) > MAX_NICS {
        return Err(VerbsError::Nics { nics: config.nics });
    }
    let options = &config.options;
    for (option, found, range, allowed) in [
        ("the service level", options.service_level, 0..=15, "0 to 15"),
        ("the timeout of acknowledgements", options.ack_timeout, 1..=31, "1 to 31"),
        ("the retry count", options.retry_count, 0..=7, "0 to 7"),
    ] {
        if !range.contains(&found) {
            return Err(VerbsError::Option { option, allowed, found });
        }
    }
    Ok(())
}

impl VerbsProvider {
    /// Loads libibverbs, opens an engine's devices, and begins to listen. Some ms for each NIC.
    ///
    /// # Errors
    ///
    /// [`VerbsError`].
    pub fn new(config: VerbsConfig) -> Result<Self, VerbsError> {
        check(&config)?;
        let gpus = Known::open(&config.gpus)?;
        let library = Library::load()?;
        let forks = forks::prepare(library);
        if matches!(forks, Forks::Unsafe { .. }) {
            tracing::warn!("{forks}");
        }
        let found = device::discover(library, &config.options)?;
        let asked = gpus.as_ref().filter(|_| config.options.devices.is_empty());
        let addresses = asked.map(|gpus| gpus.addresses()).transpose()?;
        let chosen = choose::choose(&config, found, addresses.as_deref())?;
        let nics = usize::from(config.nics);
        let devices: Vec<_> = chosen.iter().cycle().take(nics).cloned().collect();
        if devices.is_empty() {
            return Err(VerbsError::NoDevice { wanted: Vec::new(), unfit: Vec::new() });
        }
        for device in devices.iter().filter(|_| config.options.on_demand) {
            let lacks = |lacks| VerbsError::NoPaging { device: device.name.clone(), lacks };
            device.facts.paging.check().map_err(lacks)?;
        }
        let lengths = lengths_of(&devices, config.peers);
        let mut ports = Vec::with_capacity(devices.len());
        for device in &devices {
            ports.push(Nic::open(Domain::open(device)?, lengths)?);
        }
        let (doors, entrances) = Doors::open(&devices)?;
        let resolver = Resolver::new(entrances.into_iter(), &config.options)?;
        let os = |call| move |source: io::Error| VerbsError::Os { call, source };
        let domains = ports.iter().map(|port| Arc::clone(&port.domain)).collect();
        let memory = VerbsMemory::new(config.engine, domains, config.options.on_demand, gpus)
            .map_err(os("eventfd"))?;
        let nics: Vec<_> = devices.iter().map(|device| info(device)).collect();
        let entry = |(at, nic): (usize, &NicInfo)| {
            Some(NicAddr { speed_gbps: nic.speed_gbps, address: doors.address_of(at)?.clone() })
        };
        let addresses: Vec<_> = nics.iter().enumerate().filter_map(entry).collect();
        let address = NetAddr::new(ProviderKind::Verbs, config.engine, &addresses)
            .map_err(|_| VerbsError::Nics { nics: config.nics })?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|errno| os("epoll_create")(errno.into()))?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(|errno| os("timerfd_create")(errno.into()))?;
        let provider = Self {
            handshakes: Handshakes::new().map_err(VerbsError::Random)?,
            nics,
            address,
            sessions: Vec::new(),
            seats: Vec::new(),
            lanes: Lanes::default(),
            doors,
            resolver,
            ports,
            memory: Arc::new(memory),
            live: Vec::new(),
            tidings: Vec::new(),
            chain: Chain::new(),
            chained: None,
            grant: lengths.grant,
            last_rounds: usize::try_from(lengths.completions(lengths.shelves()))
                .unwrap_or(usize::MAX)
                / BATCH
                + 1,
            looked: Time::ZERO,
            tended: Time::ZERO,
            urgent: true,
            woken: true,
            is_shown: false,
            now: Time::ZERO,
            patience: patience(config.options.ack_timeout, config.options.retry_count),
            stats: VerbsStats::default(),
            said: (VerbsStats::default(), Time::ZERO),
            epoll,
            timer,
            config,
        };
        provider.watch_all(&chosen).map_err(|errno| os("epoll_ctl")(errno.into()))?;
        Ok(provider)
    }

    /// What has happened so far.
    #[must_use]
    pub const fn stats(&self) -> VerbsStats {
        self.stats
    }

    fn watch_all(&self, devices: &[Arc<Device>]) -> rustix::io::Result<()> {
        let watch =
            |fd: BorrowedFd<'_>| epoll::add(&self.epoll, fd, EventData::new_u64(0), EventFlags::IN);
        watch(self.memory.regions.wake_fd())?;
        watch(self.timer.as_fd())?;
        self.doors.fds().try_for_each(watch)?;
        watch(self.resolver.fd())?;
        self.ports.iter().try_for_each(|port| watch(port.completed.fd()))?;
        let used = devices.iter().take(self.ports.len());
        used.map(|device| device.event_fd()).try_for_each(watch)
    }

    /// Where the peer's session is.
    fn seat(&mut self, peer: PeerId) -> Option<u16> {
        let index = self.seats.get(usize::from(peer.index)).copied().flatten()?;
        self.session(index).filter(|session| session.peer == peer).map(|_| index)
    }

    fn session(&mut self, index: u16) -> Option<&mut Session> {
        self.sessions.get_mut(usize::from(index))?.as_deref_mut()
    }

    // ---- what has completed ----

    /// Reads the completions of one NIC, so many batches at most. Returns whether there were any.
    #[inline]
    fn poll_nic<S: Sink>(&mut self, at: usize, rounds: usize, sink: &mut S) -> bool {
        let nic = NicIndex::try_from(at).unwrap_or(NicIndex::MAX);
        let mut any = false;
        for _ in 0..rounds {
            // One that is lost, too: what it has received was acknowledged, and counts.
            let Some(port) = self.ports.get_mut(at).filter(|port| !port.is_mute) else { break };
            if !port.read() {
                port.is_mute = true;
                self.lose_nic(nic);
                break;
            }
            self.is_shown = false;
            let mut count = 0;
            while let Some(done) = self.ports.get_mut(at).and_then(|port| port.stash.next()) {
                self.complete(nic, &done, sink);
                count += 1;
            }
            any |= count > 0;
            if count < BATCH {
                break;
            }
        }
        if any && let Some(port) = self.ports.get_mut(at) {
            port.refill();
        }
        any
    }

    #[inline]
    fn complete<S: Sink>(&mut self, nic: NicIndex, done: &sys::ibv_wc, sink: &mut S) {
        match Done::decode(done.wr_id) {
            Some(Done::Receive { number }) => self.received(nic, number, done, sink),
            Some(Done::Write { lane, number }) => self.written(lane, number, done.status, sink),
            Some(Done::Note { session, token }) => self.said(nic, session, token, done),
            Some(Done::Trial { lane }) => self.tried(lane, done.status == sys::IBV_WC_SUCCESS),
            None => self.stats.strays += 1,
        }
    }

    /// A write of ours has ended, and with it those before it. What is in flight on a path that has broken stays, until
    /// it is settled.
    #[inline]
    fn written<S: Sink>(
        &mut self,
        id: LaneId,
        number: u32,
        status: sys::ibv_wc_status,
        sink: &mut S,
    ) {
        let Some(lane) = self.lanes.get(id) else { return };
        let (nic, remote_nic, index) = (lane.nic, lane.remote_nic, lane.session);
        let read = lane.read(number);
        let good = status == sys::IBV_WC_SUCCESS;
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let Some(session) = session else { return };
        let leaving = session.is_leaving();
        session.in_flight = session.in_flight.saturating_sub(read);
        if good && nic == remote_nic {
            session.pulse.hear(nic);
        }
        self.urgent |= leaving || !session.releasing.is_empty();
        if let Some(port) = self.ports.get_mut(usize::from(nic)) {
            port.outstanding = port.outstanding.saturating_sub(u16::try_from(read).unwrap_or(0));
        }
        let why = || self.ports.first().map(|port| port.completed.status_text(status));
        if !good && !leaving && !is_of_the_piece(status) {
            if session.outlet(nic, remote_nic).is_some_and(|at| !session.is_down(at)) {
                tracing::warn!(peer = %session.peer, nic, remote_nic, why = why(), "a path broke");
                self.break_path(index, nic, remote_nic);
            }
            return;
        }
        for left in (0..lane.ended(number)).rev() {
            let Some(work) = lane.flights.pop_front() else { break };
            lane.announced += u64::from(good && work.imm.is_some());
            let outcome = match left {
                _ if good => Ok(()),
                _ if leaving => Err(WorkError::Flushed),
                0 => Err(work_error(status)),
                // Those before it had no completion of their own: it is not known whether they got there.
                _ => Err(WorkError::Flushed),
            };
            sink.work_done(nic, work.token, outcome);
        }
        if !good && !leaving {
            tracing::warn!(peer = %session.peer, why = why(), "a piece was refused: the peer is given up");
            self.stumble(index);
        }
    }

    /// A letter, or a probe, has ended.
    fn said(&mut self, nic: NicIndex, index: u16, token: u32, done: &sys::ibv_wc) {
        let session = self.session(index).filter(|session| tag_of(session.token) == token);
        let line = session.and_then(|session| session.lines.get_mut(usize::from(nic)));
        let Some(line) = line else { return };
        line.state.complete();
        line.completed = line.completed.wrapping_add(1);
        let good = done.status == sys::IBV_WC_SUCCESS;
        self.urgent = true;
        if good {
            self.prove_line(index, nic);
        } else {
            self.break_line(index, nic);
        }
    }

    /// Something of a peer's has come.
    #[inline]
    fn received<S: Sink>(&mut self, nic: NicIndex, number: u32, done: &sys::ibv_wc, sink: &mut S) {
        let Some(port) = self.ports.get_mut(usize::from(nic)) else { return };
        let owner = port.owners.get(done.qp_num);
        port.take_back(number);
        let Some(Owner { session: index, role }) = owner else {
            self.stats.strays += 1;
            return;
        };
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let Some(session) = session else { return };
        if session.is_leaving() {
            // What the peer wrote before it left may be read after that: another NIC has it. The engine does not know yet that it is gone.
            let is_counted = session.life.reason().is_some()
                && matches!(role, Role::Inlet { .. })
                && (done.status, done.opcode)
                    == (sys::IBV_WC_SUCCESS, sys::IBV_WC_RECV_RDMA_WITH_IMM);
            if is_counted {
                self.memory.show_once(&mut self.is_shown);
                sink.immediate(nic, session.peer, u32::from_be(done.imm_data));
            }
            return;
        }
        if matches!(role, Role::OldLine { .. }) {
            return;
        }
        if done.status != sys::IBV_WC_SUCCESS {
            match (role, done.status) {
                // What is more than a letter, or not for the one who writes it.
                (_, sys::IBV_WC_LOC_LEN_ERR | sys::IBV_WC_REM_ACCESS_ERR) => {
                    session.life.leave(self.now, Notice::Untold, Some(DownReason::Protocol));
                    self.urgent = true;
                }
                (Role::Line, _) => self.break_line(index, nic),
                // Its queue pair failed or was cut; whoever writes there is told by its own.
                _ => {}
            }
            return;
        }
        match (role, done.opcode) {
            (Role::Inlet { from, lane }, sys::IBV_WC_RECV_RDMA_WITH_IMM) => {
                let at = usize::from(from) * self.nics.len() + usize::from(nic);
                let inlet = session.inlets.get_mut(at);
                let Some(count) = inlet.and_then(|it| it.arrived.get_mut(usize::from(lane))) else {
                    return;
                };
                *count += 1;
                if from == nic {
                    session.pulse.hear(nic);
                }
                if let Some(takings) = session.takings.get_mut(usize::from(nic))
                    && takings.take()
                {
                    if let Some(due) = session.says.taken.get_mut(usize::from(nic)) {
                        *due = true;
                    }
                    self.urgent = true;
                }
                self.memory.show_once(&mut self.is_shown);
                sink.immediate(nic, session.peer, u32::from_be(done.imm_data));
            }
            (Role::Line, sys::IBV_WC_RECV) => {
                let mut bytes = [0; LETTER_MAX];
                let (shelf, piece) = shelf_and_piece(number);
                let Some(shelf) = port.shelves.get(shelf) else { return };
                // SAFETY: the receive has ended, and the piece is posted again only by `refill`.
                unsafe { shelf.slab.read(piece, 0, &mut bytes) };
                let len = usize::try_from(done.byte_len).unwrap_or(usize::MAX);
                let letter = bytes.get(..len).and_then(Letter::decode);
                self.hear_letter(index, nic, letter);
            }
            _ => {
                self.stats.ignored += 1;
                session.life.leave(self.now, Notice::Untold, Some(DownReason::Protocol));
                self.urgent = true;
            }
        }
    }

    // ---- what is to be posted ----

    /// What becomes of a piece: a write on a lane, or none.
    #[inline]
    fn admit(&mut self, nic: NicIndex, work: &WorkRequest) -> Admitted {
        let seat = self.seats.get(usize::from(work.peer.index)).copied().flatten();
        let Some(index) = seat else { return Admitted::Refused(WorkError::PeerGone) };
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let Some(session) = session.filter(|session| session.peer == work.peer) else {
            return Admitted::Refused(WorkError::PeerGone);
        };
        if session.is_leaving() {
            return Admitted::Refused(WorkError::PeerGone);
        }
        if !session.life.is_open() {
            return Admitted::NoRoom;
        }
        let outlet = session.outlet(nic, work.remote_nic);
        let Some(outlet) = outlet.and_then(|at| session.outlets.get_mut(at)) else {
            return Admitted::Refused(WorkError::PeerGone);
        };
        let Some([long, short]) = outlet.lanes.filter(|_| outlet.way.is_open()) else {
            // On one that broke nothing is posted: whoever has not heard of it yet hears of it next.
            self.urgent |= outlet.way.want();
            return Admitted::NoRoom;
        };
        let remote = usize::from(work.remote_nic);
        let Some(allowance) = session.allowances.get(remote) else {
            return Admitted::Refused(WorkError::PeerGone);
        };
        let Some(port) = self.ports.get(usize::from(nic)) else { return Admitted::NoRoom };
        if port.outstanding >= port.pieces || !allowance.admits(work.imm) {
            return Admitted::NoRoom;
        }
        let Ok(len) = u32::try_from(work.len) else {
            return Admitted::Refused(WorkError::LocalAccess);
        };
        let (local_key, home) = split_key(work.src_key);
        let (mut to, mut key) = (work.dst, work.dst_key);
        if len == 0 {
            // Nothing is written, but some devices look at the address and the key all the same.
            let mailbox = &session.mailbox;
            let Some(theirs) = mailbox.keys.get(work.remote_nic) else {
                return Admitted::Refused(WorkError::RemoteAccess);
            };
            (to, key) = (mailbox.base, theirs);
        } else if !session.withdrawn.allows(key) {
            return Admitted::Refused(WorkError::RemoteAccess);
        }
        let is_short = work.len <= SHORT_BYTES && !work.is_bulk();
        let lane = if is_short { short } else { long };
        if self.lanes.get(lane).is_none_or(|lane| lane.unread() >= LANE_DEPTH.into()) {
            return Admitted::NoRoom;
        }
        // Not sooner: who waits for room waits for the peer to look, which is to say what came over a path that broke.
        if is_left(port.is_usable(), leads(session, &self.ports)) {
            self.break_path(index, nic, work.remote_nic);
            return Admitted::NoRoom;
        }
        let write = Write {
            number: 0,
            from: work.src,
            len,
            local_key,
            to,
            remote_key: device_key(key),
            imm: work.imm.map(Imm::bits),
            // The CPU would read them.
            inline: is_short && len > 0 && len <= port.inline && home.is_none(),
        };
        Admitted::Write { session: index, lane, write }
    }

    /// Puts an admitted piece into the chain, which is its lane's.
    #[inline]
    fn take_up(
        &mut self,
        (index, lane): (u16, LaneId),
        mut write: Write,
        at: usize,
        work: &WorkRequest,
    ) {
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let (Some(session), Some(flights)) = (session, self.lanes.get(lane)) else { return };
        let Some(allowance) = session.allowances.get_mut(usize::from(work.remote_nic)) else {
            return;
        };
        self.chained.get_or_insert(Chained {
            lane,
            session: index,
            nic: flights.nic,
            remote_nic: work.remote_nic,
            allowance: *allowance,
            first: at,
        });
        if work.imm.is_some() {
            allowance.spend();
        }
        session.in_flight += 1;
        let (number, signalled) = flights.push(work);
        write.number = Done::Write { lane, number }.encode();
        if let Some(port) = self.ports.get_mut(usize::from(flights.nic)) {
            port.outstanding += 1;
        }
        self.chain.push(&write, signalled);
    }

    /// Posts the chain, if there is one. `Err`: from this one of the pieces on, none is posted.
    #[inline]
    fn flush(&mut self, work: &[WorkRequest]) -> Result<(), usize> {
        let Some(chained) = self.chained.take() else { return Ok(()) };
        let count = self.chain.len();
        let Some(lane) = self.lanes.get(chained.lane) else {
            self.chain.clear();
            return Ok(());
        };
        self.chain.signal_last();
        lane.signalled();
        // SAFETY: the sources are registered, and stay so and mapped until the piece is reported: that is the
        // contract of who posts it. They may be written to meanwhile: what arrives then is the caller's affair.
        match unsafe { lane.pair.post(&mut self.chain) } {
            Ok(()) => Ok(()),
            Err((taken, error)) => Err(self.take_back(&chained, count, taken, &error, work)),
        }
    }

    /// Of a chain of `count`, only the first `taken` were posted; returns which piece is the first that was not.
    #[cold]
    fn take_back(
        &mut self,
        chained: &Chained,
        count: usize,
        taken: usize,
        error: &io::Error,
        work: &[WorkRequest],
    ) -> usize {
        let back = count.saturating_sub(taken);
        if let Some(lane) = self.lanes.get(chained.lane) {
            lane.retract(back);
            if let Some(port) = self.ports.get_mut(usize::from(lane.nic)) {
                port.outstanding =
                    port.outstanding.saturating_sub(u16::try_from(back).unwrap_or(0));
            }
        }
        let first = chained.first.saturating_add(taken);
        if let Some(session) = self.session(chained.session) {
            session.in_flight = session.in_flight.saturating_sub(u32::try_from(back).unwrap_or(0));
            if let Some(slot) = session.allowances.get_mut(usize::from(chained.remote_nic)) {
                let mut allowance = chained.allowance;
                let posted = work.get(chained.first..first).unwrap_or(&[]);
                for _ in posted.iter().filter(|work| work.imm.is_some()) {
                    allowance.spend();
                }
                *slot = allowance;
            }
            tracing::warn!(peer = %session.peer, %error, "a write could not be posted");
        }
        self.break_path(chained.session, chained.nic, chained.remote_nic);
        first
    }

    /// When something is to be done, at the earliest, even if nothing happens.
    fn next_deadline(&self) -> Time {
        let sessions = self.live.iter().filter_map(|&index| {
            let session = self.sessions.get(usize::from(index))?.as_ref()?;
            Some(session.life.due(self.now, || self.open_deadline(session)))
        });
        sessions.fold(self.handshakes.next_deadline(), Time::min)
    }

    /// Has the descriptor become readable after `nap`; for ever, if that is very long.
    fn set_timer(&self, nap: Duration) {
        let seconds = i64::try_from(nap.as_secs()).unwrap_or(i64::MAX).min(1 << 30);
        let it_value = Timespec { tv_sec: seconds, tv_nsec: i64::from(nap.subsec_nanos()) };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let (value, flags) = (Itimerspec { it_interval, it_value }, TimerfdTimerFlags::empty());
        if let Err(error) = timerfd_settime(&self.timer, flags, &value) {
            tracing::error!(%error, "the timer could not be set");
        }
    }
}

/// Whether it is the piece that does not fit the memory it names, at either end: on no path it would. That a request is
/// *invalid* is another matter: none of ours is, but Soft-RoCE says so at times of one that it has sent twice.
const fn is_of_the_piece(status: sys::ibv_wc_status) -> bool {
    let at_home = matches!(status, sys::IBV_WC_LOC_PROT_ERR | sys::IBV_WC_LOC_LEN_ERR);
    at_home || status == sys::IBV_WC_REM_ACCESS_ERR
}

/// What becomes of a piece.
enum Admitted {
    Write {
        session: u16,
        lane: LaneId,
        write: Write,
    },
    NoRoom,
    /// It is not posted, and never will be; nothing else is the matter.
    Refused(WorkError),
}

/// What a device's status says, as far as it can be told.
fn work_error(status: sys::ibv_wc_status) -> WorkError {
    match status {
        sys::IBV_WC_WR_FLUSH_ERR => WorkError::Flushed,
        sys::IBV_WC_RETRY_EXC_ERR | sys::IBV_WC_RNR_RETRY_EXC_ERR => WorkError::PeerGone,
        sys::IBV_WC_REM_ACCESS_ERR | sys::IBV_WC_REM_INV_REQ_ERR => WorkError::RemoteAccess,
        sys::IBV_WC_LOC_PROT_ERR | sys::IBV_WC_LOC_LEN_ERR => WorkError::LocalAccess,
        status => WorkError::Device(i32::try_from(status).unwrap_or(i32::MAX)),
    }
}

fn info(device: &Device) -> NicInfo {
    let facts = &device.facts;
    let limits = NicLimits {
        max_message_bytes: PIECE_BYTES.min(facts.max_message.into()),
        min_piece_bytes: PIECE_MIN_BYTES,
        queue_depth: QUEUE_DEPTH,
        inline_bytes: device.inline_bytes(),
        max_sge: 1,
        batch_bytes: NicLimits::BATCH_BYTES,
        together: TOGETHER,
        pages_per_piece: 1,
    };
    NicInfo { name: device.name.clone(), speed_gbps: facts.speed_gbps, limits }
}

impl Provider for VerbsProvider {
    type Memory = VerbsMemory;

    fn nics(&self) -> &[NicInfo] {
        &self.nics
    }

    fn memory(&self) -> &Arc<VerbsMemory> {
        &self.memory
    }

    fn address(&self) -> NetAddr {
        self.address.clone()
    }

    fn reads_gpus(&self, _: PeerId) -> bool {
        self.memory.gpus.0.is_some()
    }

    fn post<S: Sink>(&mut self, nic: NicIndex, work: &[WorkRequest], sink: &mut S) -> usize {
        for (at, piece) in work.iter().enumerate() {
            match self.admit(nic, piece) {
                Admitted::Write { session, lane, write } => {
                    let other = self.chained.is_some_and(|chained| chained.lane != lane);
                    if (other || self.chain.is_full())
                        && let Err(first) = self.flush(work)
                    {
                        return first;
                    }
                    self.take_up((session, lane), write, at, piece);
                }
                Admitted::NoRoom => return self.flush(work).err().unwrap_or(at),
                Admitted::Refused(error) => {
                    // Those before it first: what was not posted is not accepted, nor anything behind it.
                    if let Err(first) = self.flush(work) {
                        return first;
                    }
                    sink.work_done(nic, piece.token, Err(error));
                }
            }
        }
        self.flush(work).err().unwrap_or(work.len())
    }

    fn poll<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool {
        self.now = self.now.max(now);
        let before = std::mem::replace(&mut self.looked, self.now);
        if self.now.since(before) >= BLINK {
            // Answers may have come meanwhile: nobody has been silent for that.
            self.handshakes.look(before, self.now);
        }
        let mut any = false;
        for at in 0..self.ports.len() {
            any |= self.poll_nic(at, ROUNDS, sink);
        }
        if self.urgent || self.now.since(self.tended) >= UPKEEP_EVERY {
            any |= self.upkeep(sink);
        }
        any
    }

    fn connect(
        &mut self,
        now: Time,
        peer: PeerId,
        address: &NetAddr,
        hello: &Hello,
    ) -> Result<(), ConnectError> {
        if address.provider() != ProviderKind::Verbs {
            let found = address.provider().name().to_owned();
            let expected = ProviderKind::Verbs.name();
            return Err(ConnectError::OtherProvider { found, expected });
        }
        self.now = self.now.max(now);
        self.urgent = true;
        self.call(peer, address, hello)
    }

    /// What is in flight is cut off, and reported at later polls.
    fn disconnect<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        self.hang_up(peer);
        let session = self.seat(peer).and_then(|index| self.session(index));
        if session.is_some_and(|session| session.life.reason().is_some()) {
            // It has left by itself, and that may have been read, by one NIC, before all that it had written, by another.
            for at in 0..self.ports.len() {
                self.poll_nic(at, self.last_rounds, sink);
            }
        }
        self.part(peer, None, sink);
    }

    /// What is in flight is cut off, and reported at later polls.
    fn abort<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        self.part(peer, Some(DownReason::Disconnected), sink);
    }

    /// The peer's ends of the path are destroyed, after which their device writes nothing on their behalf. What has come
    /// and is read only later is not counted: the peer is told that it did not arrive, and sends it again.
    fn fence<S: Sink>(
        &mut self,
        peer: PeerId,
        path: RemotePath,
        sink: &mut S,
    ) -> Result<Receipt, Unfenced> {
        let index = self.seat(peer).ok_or(Unfenced::Unknown)?;
        let nics = self.ports.len();
        let at = usize::from(path.from) * nics + usize::from(path.to);
        let session = self.session(index).ok_or(Unfenced::Unknown)?;
        session.must_stay()?;
        session.inlets.get(at).ok_or(Unfenced::Unknown)?;
        self.drain_inlet(index, at, sink);
        self.close_inlet(index, at);
        let session = self.session(index).ok_or(Unfenced::Unknown)?;
        let inlet = session.inlets.get(at).ok_or(Unfenced::Unknown)?;
        let verdict = Verdict { epoch: inlet.epoch, arrived: inlet.arrived };
        Ok(Receipt(verdict.encode()))
    }

    fn settle<S: Sink>(
        &mut self,
        peer: PeerId,
        path: Path,
        receipt: &Receipt,
        sink: &mut S,
    ) -> Result<(), Unfenced> {
        let index = self.seat(peer).ok_or(Unfenced::Unknown)?;
        let verdict = Verdict::decode(&receipt.0).ok_or(Unfenced::Unknown)?;
        // What the device knows by now it need not be told.
        self.poll_nic(usize::from(path.nic), self.last_rounds, sink);
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let session = session.ok_or(Unfenced::Unknown)?;
        session.must_stay()?;
        let at = session.outlet(path.nic, path.remote_nic).ok_or(Unfenced::Unknown)?;
        let outlet = session.outlets.get_mut(at).ok_or(Unfenced::Unknown)?;
        if !outlet.way.is_broken() {
            return Ok(());
        }
        let claimed = verdict.of(outlet.way.epoch()).ok_or(Unfenced::Unknown)?;
        let mut done = heapless::Vec::<(LaneId, usize), LANES>::new();
        for (id, claimed) in outlet.lanes().zip(claimed) {
            let lane = self.lanes.get(id).ok_or(Unfenced::Unknown)?;
            let announced = lane.flights.iter().map(|work| work.imm.is_some());
            let arrived =
                verdict::arrived(lane.announced, claimed, announced).ok_or(Unfenced::Unknown)?;
            let _ = done.push((id, arrived));
        }
        outlet.way.settled(self.now);
        outlet.lanes = None;
        for (id, arrived) in done {
            let flights = self.close_lane(id);
            let mut lost = 0;
            for (place, work) in flights.iter().enumerate() {
                if place < arrived {
                    sink.work_done(path.nic, work.token, Ok(()));
                } else {
                    lost += u64::from(work.imm.is_some());
                    sink.undelivered(work);
                }
            }
            let session = self.session(index).ok_or(Unfenced::Unknown)?;
            if let Some(allowance) = session.allowances.get_mut(usize::from(path.remote_nic)) {
                allowance.restore(lost);
            }
        }
        self.urgent = true;
        Ok(())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn arm(&mut self) -> bool {
        if self.urgent {
            return false;
        }
        let nap = self.next_deadline().since(self.now);
        // All are asked, so that none is left out when they are asked for nothing the next time.
        let mut may_sleep = self.doors.arm();
        for port in self.ports.iter_mut().filter(|port| !port.is_mute) {
            // Nobody waits for the signals of one that is lost.
            let armed = port.health.is_lost() || port.completed.arm();
            may_sleep &= armed && port.read() && port.stash.is_empty();
        }
        if may_sleep {
            self.looked = self.now.after(nap);
            self.set_timer(nap.max(Duration::from_micros(1)));
        }
        may_sleep
    }

    fn disarm(&mut self) {
        self.doors.disarm();
        for port in &self.ports {
            port.completed.disarm();
        }
        (self.urgent, self.woken) = (true, true);
    }
}

impl Drop for VerbsProvider {
    /// Takes leave of the peers. Afterwards no queue pair is left, and whoever withdraws a region later waits for
    /// nobody.
    fn drop(&mut self) {
        self.farewell();
        self.sessions.clear();
        self.lanes.clear();
        self.handshakes.clear();
        self.memory.regions.with_ledger(|ledger| ledger.stop());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_refused_by_name() {
        let with = |change: fn(&mut VerbsConfig)| {
            let mut config = VerbsConfig::new(EngineId(1));
            change(&mut config);
            check(&config).map_err(|error| error.to_string())
        };
        assert_eq!(with(|_| ()), Ok(()));
        for (change, text) in [
            ((|it| it.nics = 9) as fn(&mut VerbsConfig), "1 to 8 NICs, not 9"),
            (|it| it.nics = 0, "not 0"),
            (|it| it.options.service_level = 16, "the service level must be 0 to 15, not 16"),
            (
                |it| it.options.ack_timeout = 0,
                "the timeout of acknowledgements must be 1 to 31, not 0",
            ),
            (|it| it.options.retry_count = 8, "the retry count must be 0 to 7, not 8"),
        ] {
            let said = with(change).unwrap_err();
            assert!(said.contains(text), "{said}");
        }
    }

    /// A name that no device has: an answer on every machine, with or without libibverbs or devices.
    #[test]
    fn a_device_that_is_not_there_is_named() {
        let mut config = VerbsConfig::new(EngineId(1));
        config.options.devices = vec!["mlx5_99".to_owned()];
        match VerbsProvider::new(config) {
            Err(error @ VerbsError::NoDevice { .. }) => {
                assert!(error.to_string().contains("of mlx5_99"), "{error}");
            }
            Err(VerbsError::Load(error)) => assert!(error.to_string().contains("rdma-core")),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_a_device_says_is_told_apart() {
        for (status, error) in [
            (sys::IBV_WC_WR_FLUSH_ERR, WorkError::Flushed),
            (sys::IBV_WC_RETRY_EXC_ERR, WorkError::PeerGone),
            (sys::IBV_WC_REM_ACCESS_ERR, WorkError::RemoteAccess),
            (sys::IBV_WC_LOC_PROT_ERR, WorkError::LocalAccess),
            (sys::IBV_WC_REM_OP_ERR, WorkError::Device(11)),
        ] {
            assert_eq!(work_error(status), error);
        }
    }
}
