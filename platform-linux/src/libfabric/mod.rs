//! The provider for engines on libfabric: TCP between any two hosts, AWS EFA by the book.
//!
//! libfabric is found and loaded at run time; nothing is linked. What is asked of it is the part that all its
//! providers have: reliable datagrams, writes with 8 bytes of data (4 on EFA, which names the source itself), no order, progress
//! by polling.
//!
//! | part | what |
//! |---|---|
//! | `fabric` | libfabric's objects, owned |
//! | `door` | the endpoint that takes messages, where the engine is reached |
//! | `session` | one peer |
//! | `handshake` | calls, and how both ends prove who they are |
//! | `memory` | regions, and how they are taken back |
//! | `survey` | what the machine has, for people |
//! | `upkeep` | what is to be done beside the way of data: sessions' ends, replaced endpoints |
//! | `watch` | what the engine sleeps on |
//!
//! Each NIC has one endpoint for writes, which serves all peers, and a completion queue of its own. To be rid
//! of what is in flight to one peer, the endpoints are replaced (`immwire_core::recycle`).
//!
//! # Whose an immediate is
//!
//! libfabric's software providers do not say who made a write, but carry 8 bytes of data: the upper half
//! is a number that the receiver handed out for the session. EFA carries 4 bytes, and names the source: so there an endpoint is of one
//! session at a time (`immwire_core::origin`).
//!
//! # What done means
//!
//! Software providers are asked to complete a write when it has been placed (`FI_DELIVERY_COMPLETE`); by default
//! they would when it is in the kernel's hands. EFA completes it when the other device has it; that the bytes
//! can be seen there is said by their immediate alone. So on EFA a write without an immediate, or one of more
//! than sixteen times the device's longest (of about 1 GiB), is done a moment before it can be seen. And what is done
//! may arrive after what was said later: a farewell says how many immediates were sent, and the session ends when
//! so many are counted, or after a second. Who finds that a peer is gone, as something for it fails, gives its farewell 20 ms to
//! be heard first.
//!
//! # Trust
//!
//! With a group key, only those that prove to hold it are let in. Without one, anybody is who reaches
//! the port; on EFA, who names another's endpoints as its own before that one connects keeps it out. Nothing is encrypted, and libfabric's own
//! protocol admits whoever knows a region's key: on a network that others share, use a tunnel. Messages and descriptors from outside cannot crash or block this process.
//!
//! # Invariants
//!
//! - Nothing here waits for a peer. Each poll does a bounded amount of work.
//! - The way of data neither allocates nor locks: tables are made with the session.
//! - A piece is reported once: when its completion was read, or its endpoint has been closed.
//! - No queue overruns: entries are granted to peers, and taken before they are sent
//!   (`immwire_core::credit`). Where one does, for a peer that does not keep to that, or fails, it is read no more: those that it served are
//!   lost, and the endpoints are replaced.

mod door;
mod fabric;
mod handshake;
mod memory;
mod session;
mod survey;
mod upkeep;
mod watch;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use immwire_core::credit::grant;
use immwire_core::group::{Token, WorkError, WorkRequest};
use immwire_core::id::{EngineId, MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::opening::{Pairs, Turns};
use immwire_core::recycle::{Recycle, Which};
use immwire_core::signal::{Chain, Link};
use immwire_core::tenant::Tenant;
use immwire_core::wire::{Hello, NetAddr, NicAddr, ProviderKind};
use libfabric_sys::{Library, LoadError};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use self::door::Door;
use self::fabric::{
    Access, Completions, Device, Domain, Done, Endpoint, Facts, Failure, NO_DATA, Registration,
    Wanted, Write,
};
use self::handshake::Handshakes;
pub use self::memory::LibfabricMemory;
use self::session::{Routes, Session, State};
pub use self::survey::{Survey, Surveyed, SurveyedDevice, Unfit, survey};
use self::watch::{AllSigns, Watch};
use crate::gpus::{GPUS_MAX, Known, OpenError};
use crate::provider::{ConnectError, NicInfo, NicLimits, Provider, Sink, pin_hint};
use crate::shm::GroupKey;
use crate::topology::{Misplaced, OverrideError, Pairing};

/// Pieces in flight on a NIC.
const QUEUE_DEPTH: u16 = 256;
/// Heartbeats in flight on a NIC beside these, at most: to peers that are gone, and do not take them.
const BEATS_MAX: u16 = 64;
/// Whatever is in flight on an endpoint has one of so many contexts.
const CONTEXTS: u16 = QUEUE_DEPTH + BEATS_MAX;
/// The longest piece on a software provider: between two, small writes have their turn, and a cancellation
/// is heard.
const PIECE_BYTES: u64 = 1 << 20;
/// The shortest piece worth a NIC of its own.
const PIECE_MIN_BYTES: u64 = 64 << 10;
/// Immediates that a peer may have under way to one NIC, if the queue has room for so many from each.
const GRANT_MAX: u16 = 256;
/// Entries of a completion queue: EFA's devices have about so many, software as many as one likes.
const ENTRIES_MAX_DEVICE: usize = 12 << 10;
const ENTRIES_MAX_SOFTWARE: usize = 128 << 10;
/// Completions read in one poll of a NIC.
const COMPLETIONS_PER_POLL: usize = 64;
/// Completions read in one call of libfabric.
const BATCH: usize = 16;
/// What can wait is looked at so often: with a software provider that is a system call or two, which a ping-pong of
/// small writes feels. Counted in time, as a poll takes one microsecond or, where it moves long writes, a hundred.
const UPKEEP_EVERY: Duration = Duration::from_micros(500);
/// Short writes that a device is told of together: the last asks for all, as far as it keeps order.
const TOGETHER: u16 = 16;
/// Of writes, as many again that are being replaced, and the door's.
const ENDPOINTS_MAX: usize = 2 * MAX_NICS + 1;
/// How long a sleeping engine whose provider has no descriptor sleeps at most.
const NAP: Duration = Duration::from_millis(1);
/// After so long without anything to read, descriptors that stay readable are seen to: that may take a moment, in which
/// nothing else is done.
const HUSH_AFTER: Duration = Duration::from_micros(500);

/// What a [`LibfabricProvider`] is made from.
#[derive(Debug, Clone)]
pub struct LibfabricConfig {
    /// Who the engine is.
    pub engine: EngineId,
    /// How many NICs it is to have, 1 to 8. Several may share a device.
    pub nics: u8,
    /// The most peers at a time: receive queues are divided among so many.
    pub peers: u16,
    /// The library to load; if none, `IMMWIRE_LIBFABRIC` in the environment, or what the machine has.
    pub library: Option<PathBuf>,
    /// libfabric's provider: `efa`, `tcp`, `net`, `tcp;ofi_rxm`. If none, the first of these that has a
    /// device.
    pub provider: Option<String>,
    /// libfabric's domain: a network interface (`eth0`), an EFA device. If none: for an engine with GPUs, the EFA devices
    /// that are [nearest](crate::topology) to these, and otherwise all that there are, but loopback last.
    pub domain: Option<String>,
    /// If given, required of every peer.
    pub group_key: Option<GroupKey>,
    /// The GPUs whose memory it is to read and write, by their numbers in this process: where the devices can.
    pub gpus: Vec<u32>,
    /// Which devices belong to which GPU, where somebody knows better.
    pub pairing: Pairing,
}

impl LibfabricConfig {
    /// One NIC, 256 peers, whatever the machine has, no GPU.
    #[must_use]
    pub const fn new(engine: EngineId) -> Self {
        Self {
            engine,
            nics: 1,
            peers: 256,
            library: None,
            provider: None,
            domain: None,
            group_key: None,
            gpus: Vec::new(),
            pairing: Pairing { table: None, overrides: String::new() },
        }
    }
}

/// Why there is no provider, or a part of it fails.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum LibfabricError {
    /// An engine has 1 to 8 NICs.
    #[error("an engine has 1 to {MAX_NICS} NICs, not {nics}")]
    Nics {
        /// As configured.
        nics: u8,
    },
    /// The device's queue has no room for one immediate of each peer's.
    #[error("an engine has up to {most} peers on this device, not {peers}")]
    Peers {
        /// As configured.
        peers: u16,
        /// That there is room for.
        most: u16,
    },
    /// There is no libfabric.
    #[error("{0}")]
    Load(#[from] LoadError),
    /// libfabric has nothing that fits.
    #[error(
        "libfabric {version} has no device for provider {provider}{}: found {}; `fi_info -t FI_EP_RDM` lists what there is",
        domain.as_ref().map(|name| format!(" on {name}")).unwrap_or_default(),
        if seen.is_empty() { "none".to_owned() } else { seen.join(", ") }
    )]
    NoDevice {
        /// Of the library.
        version: String,
        /// As configured, or `any`.
        provider: String,
        /// As configured.
        domain: Option<String>,
        /// The domains that there are.
        seen: Vec<String>,
    },
    /// Provider `efa` has devices, on its older fabric alone; and nothing else fits.
    #[error("libfabric {version} has EFA with {}", Unfit::OlderFabric)]
    OlderEfa {
        /// Of the library.
        version: String,
    },
    /// The provider is not one that this engine knows how to use.
    #[error("libfabric's provider {name} is not supported; supported are {}", known.join(", "))]
    UnknownProvider {
        /// As configured.
        name: String,
        /// Those that are.
        known: &'static [&'static str],
    },
    /// A name cannot be passed on.
    #[error("{name:?} is no name of libfabric's")]
    Name {
        /// The name.
        name: String,
    },
    /// libfabric returned an error.
    #[error("{call}: {text} ({code}){}", pin_hint(call, Some(*code)))]
    Call {
        /// The function.
        call: &'static str,
        /// `FI_E*`, positive.
        code: i32,
        /// libfabric's words for it.
        text: String,
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
    /// A device that is said to belong to a GPU is not there, or does not fit.
    #[error("the pairing of GPUs and NICs: {name} is none of the devices that fit: {}", found.join(", "))]
    NoSuchNic {
        /// As it is called there.
        name: String,
        /// Those that fit.
        found: Vec<String>,
    },
    /// The provider has no way to a GPU's memory.
    #[error(
        "it takes host memory only (no FI_HMEM; if FI_HMEM is `system` in the environment, or an engine without GPUs came \
         first in this process, libfabric never looked)"
    )]
    HostMemoryOnly,
    /// It was tried in the ways that there are.
    #[error("by DMA-BUF: {by_file}; by its address: {by_address}")]
    NoWay {
        /// Why not the one way.
        by_file: String,
        /// Why not the other.
        by_address: String,
    },
    /// The provider has one, but not by its device.
    #[error(
        "its device does not reach it (FI_OPT_CUDA_API_PERMITTED): GPUDirect RDMA is not available here"
    )]
    NoGpuDirect,
    /// The device would have the peer's processor help with writes.
    #[error("{domain} emulates RDMA writes in software: the device or its driver is too old")]
    EmulatedWrites {
        /// The device.
        domain: String,
    },
    /// An address does not have the length that the provider's have.
    #[error("an address of {found} bytes where {expected} were expected")]
    AddressLength {
        /// Its length.
        found: usize,
        /// The right one.
        expected: usize,
    },
    /// libfabric would not take an address.
    #[error("libfabric refused the address")]
    AddressRefused,
    /// libfabric could not allocate.
    #[error("libfabric is out of memory")]
    OutOfMemory,
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

impl From<OpenError> for LibfabricError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Names => Self::Gpus,
            OpenError::Gpu { ordinal, source } => Self::Gpu { ordinal, source },
        }
    }
}

/// What has happened at the door. Counts since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LibfabricStats {
    /// Messages that were none, or not to be believed.
    pub ignored: u64,
    /// Callers that were told why not.
    pub refused: u64,
    /// Immediates of no session.
    pub strays: u64,
    /// Times that the endpoints were replaced.
    pub replaced: u64,
}

pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

/// What a write is for.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    /// A piece of the engine's.
    Work(Token),
    /// Just to open a connection.
    Open { turns: Turns, pair: Pairs },
    /// Just to answer for those before it.
    Answer,
}

/// A write in flight.
#[derive(Debug, Clone, Copy)]
struct Flight {
    purpose: Purpose,
    peer: u16,
    /// The peer's NIC.
    remote: NicIndex,
    /// The region's, there.
    tenant: Option<Tenant>,
    /// It has spent a grant of that NIC's.
    has_spent: bool,
}

/// What writes without bytes name as their source: never read.
type Nothing = Box<u64>;

/// An endpoint for writes, and what is in flight on it.
#[derive(Debug)]
struct Lane {
    endpoint: Endpoint,
    /// Of the region that writes without bytes name as their source.
    empty: Registration,
    /// By context.
    flights: Vec<Option<Flight>>,
    /// Which of them end with which.
    chain: Chain<Vec<Link>>,
    in_order: bool,
    free: Vec<u16>,
    /// Its completion queue or its endpoint has failed, and it is not read any more.
    is_broken: bool,
    /// Index of the peer by its address's handle, if the provider tells it.
    by_source: Vec<Option<u16>>,
}

impl Lane {
    /// In a domain of its own, unless one is shared. `nothing` is where writes without bytes come from.
    fn open(
        device: &Arc<Device>,
        shared: Option<&Arc<Domain>>,
        entries: usize,
        peers: u16,
        nothing: &Nothing,
    ) -> Result<Self, LibfabricError> {
        let domain = match shared {
            Some(domain) => Arc::clone(domain),
            None => Domain::open(device)?,
        };
        let key = u64::from_ne_bytes(random().map_err(LibfabricError::Random)?);
        let at = std::ptr::NonNull::from(&**nothing).cast::<u8>();
        // SAFETY: on the heap, and kept by the provider until after its lanes.
        let empty = unsafe { domain.register(at, size_of::<u64>(), Access::Source, key, None) }?;
        let in_order = device.facts.in_order;
        let told = if in_order { Completions::Asked } else { Completions::All };
        Ok(Self {
            endpoint: Endpoint::open(&domain, CONTEXTS, entries, peers, told)?,
            empty,
            flights: vec![None; usize::from(CONTEXTS)],
            chain: Chain::new(vec![Link::VACANT; usize::from(CONTEXTS)]),
            in_order,
            free: (0..CONTEXTS).rev().collect(),
            is_broken: false,
            by_source: Vec::new(),
        })
    }

    /// Sees to it that what comes from this handle is the peer's.
    fn attribute(&mut self, handle: u64, peer: u16) {
        let Ok(at) = usize::try_from(handle) else { return };
        if self.by_source.len() <= at {
            self.by_source.resize(at + 1, None);
        }
        if let Some(slot) = self.by_source.get_mut(at) {
            *slot = Some(peer);
        }
    }

    /// The same of several.
    fn attribute_all(&mut self, nic: NicIndex, routes: &Routes, peer: u16) {
        let handles = (0..).map_while(|remote| routes.get(nic, remote));
        handles.for_each(|handle| self.attribute(handle, peer));
    }

    /// A session that knew this handle has ended: what comes from there is nobody's, unless it is another's by now.
    fn disown(&mut self, handle: u64, peer: u16) {
        let slot = usize::try_from(handle).ok().and_then(|at| self.by_source.get_mut(at));
        if let Some(slot) = slot.filter(|owner| **owner == Some(peer)) {
            *slot = None;
        }
    }
}

/// A NIC.
#[derive(Debug)]
struct Port {
    lane: Lane,
    /// The one that is being replaced.
    old: Option<Lane>,
    device: Arc<Device>,
    /// If endpoints may share one.
    domain: Option<Arc<Domain>>,
}

impl Port {
    fn facts(&self) -> &Facts {
        &self.device.facts
    }

    /// Whether what ends on this lane is not read any more.
    fn has_lost(&self, which: Which) -> bool {
        match which {
            Which::Present => self.lane.is_broken,
            Which::Old => self.old.as_ref().is_some_and(|old| old.is_broken),
        }
    }
}

/// The provider. See the [module](self).
#[derive(Debug)]
pub struct LibfabricProvider {
    config: LibfabricConfig,
    nics: Vec<NicInfo>,
    address: NetAddr,
    ports: Vec<Port>,
    door: Door,
    memory: Arc<LibfabricMemory>,
    /// By index of the peer.
    sessions: Vec<Option<Box<Session>>>,
    /// Those that there are.
    live: Vec<u16>,
    handshakes: Handshakes,
    recycle: Recycle,
    /// New endpoints could not be opened, and are not tried again before.
    reopens: Time,
    /// Ghosts that the replacement under way drives out, by token.
    haunting: Vec<u64>,
    /// Entries of each lane's queue, and what each peer is granted of them.
    entries: usize,
    grant: u16,
    wide: bool,
    /// The first write between two endpoints opens a connection: it is to come from one end.
    connects: bool,
    own_keys: bool,
    /// When that which can wait was last looked at.
    tended: Time,
    /// Something is to be done beside the way of data.
    urgent: bool,
    /// Pieces wait for one that asks, and none may come.
    owing: bool,
    now: Time,
    /// When something was last read.
    stirred: Time,
    stats: LibfabricStats,
    watch: Watch,
    timer: OwnedFd,
    /// Dropped after the ports.
    nothing: Nothing,
}

impl LibfabricProvider {
    /// Loads libfabric, opens an engine's endpoints, and begins to listen. Up to half a second, the first
    /// time in a process.
    ///
    /// # Errors
    ///
    /// [`LibfabricError`].
    pub fn new(config: LibfabricConfig) -> Result<Self, LibfabricError> {
        if config.nics == 0 || usize::from(config.nics) > MAX_NICS {
            return Err(LibfabricError::Nics { nics: config.nics });
        }
        let library = match &config.library {
            Some(path) => Library::load_from(path)?,
            None => Library::load()?,
        };
        // Before libfabric looks for CUDA by itself.
        let gpus = Known::open(&config.gpus)?;
        let wanted = Wanted {
            provider: config.provider.as_deref(),
            domain: config.domain.as_deref(),
            device_memory: gpus.is_some(),
        };
        let found = fabric::discover(library, &wanted)?;
        let near = match &gpus {
            Some(gpus) if wanted.domain.is_none() => near(gpus, &config.pairing, &found)?,
            _ => Vec::new(),
        };
        let devices = choose_devices(found, &near, config.nics);
        let Some(first) = devices.first() else {
            return Err(LibfabricError::Nics { nics: config.nics });
        };
        let facts = first.facts.clone();
        // Of a queue that is shorter than what may be in flight, heartbeats keep an eighth.
        let size = u16::try_from(facts.queue_depth).unwrap_or(u16::MAX);
        let beats = BEATS_MAX.min(size / 8);
        let depth = (size - beats).clamp(1, QUEUE_DEPTH);
        let most = if facts.tells_source { ENTRIES_MAX_DEVICE } else { ENTRIES_MAX_SOFTWARE };
        let peers = config.peers.max(1);
        let own = usize::from(depth + beats);
        let entries = (own + usize::from(GRANT_MAX) * usize::from(peers)).min(most);
        let granted = grant(entries, own, peers).min(GRANT_MAX);
        if granted == 0 {
            // A queue that has no room for one of each peer's would be overrun.
            let most = u16::try_from(entries.saturating_sub(own)).unwrap_or(u16::MAX);
            return Err(LibfabricError::Peers { peers, most });
        }
        let os = |call| move |source: io::Error| LibfabricError::Os { call, source };
        let memory = LibfabricMemory::new(config.engine, devices.len(), &facts, gpus);
        let memory = Arc::new(memory.map_err(os("eventfd"))?);
        let nothing = Nothing::default();
        let mut ports = Vec::with_capacity(devices.len());
        for (nic, device) in devices.iter().enumerate() {
            let lonely = device.facts.lonely_endpoints;
            let domain = if lonely { None } else { Some(Domain::open(device)?) };
            let lane = Lane::open(device, domain.as_ref(), entries, peers, &nothing)?;
            memory.adopt(nic, lane.endpoint.domain())?;
            ports.push(Port { lane, old: None, device: Arc::clone(device), domain });
        }
        // In a domain of its own everywhere: no key that peers have is valid there, so that nobody's writes fill its queue, where the device
        // checks keys of writes without bytes and leaves nothing of refused ones there. Tried over the model only.
        let door = Door::open(&Domain::open(first)?, peers, facts.connects)?;
        let limits = |port: &Port| NicLimits {
            // A device carries several at a time, whatever their length; and its acknowledgement does not say
            // that others can see the bytes, so that writes are better not cut into more pieces than carry
            // an immediate each.
            max_message_bytes: if port.facts().closing_fences {
                port.lane.endpoint.max_rma()
            } else {
                PIECE_BYTES.min(port.lane.endpoint.max_rma())
            },
            min_piece_bytes: PIECE_MIN_BYTES,
            queue_depth: depth,
            inline_bytes: 0,
            max_sge: 1,
            batch_bytes: NicLimits::BATCH_BYTES,
            together: TOGETHER,
            pages_per_piece: 1,
        };
        let nics: Vec<_> = ports
            .iter()
            .map(|port| {
                let facts = port.facts();
                let name = format!("{}:{}", facts.provider, facts.domain);
                NicInfo { name, speed_gbps: facts.speed_gbps, limits: limits(port) }
            })
            .collect();
        let entry =
            |nic: &NicInfo| NicAddr { speed_gbps: nic.speed_gbps, address: door.address().clone() };
        let addresses: Vec<_> = nics.iter().map(entry).collect();
        let address = NetAddr::new(ProviderKind::Libfabric, config.engine, &addresses)
            .map_err(|_| LibfabricError::Nics { nics: config.nics })?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(|errno| os("timerfd_create")(errno.into()))?;
        let watch = Watch::new(&[memory.regions.wake_fd(), timer.as_fd()]).map_err(os("epoll"))?;
        Ok(Self {
            handshakes: Handshakes::new().map_err(LibfabricError::Random)?,
            nics,
            address,
            ports,
            door,
            memory,
            sessions: Vec::new(),
            live: Vec::new(),
            recycle: Recycle::default(),
            reopens: Time::ZERO,
            haunting: Vec::new(),
            entries,
            grant: granted,
            wide: facts.protocol.data_bytes >= 8,
            connects: facts.connects,
            own_keys: facts.own_keys,
            tended: Time::ZERO,
            urgent: true,
            owing: false,
            now: Time::ZERO,
            stirred: Time::ZERO,
            stats: LibfabricStats::default(),
            watch,
            timer,
            nothing,
            config,
        })
    }

    /// What has happened so far.
    #[must_use]
    pub const fn stats(&self) -> LibfabricStats {
        self.stats
    }

    fn session(&mut self, index: u16) -> Option<&mut Session> {
        self.sessions.get_mut(usize::from(index))?.as_deref_mut()
    }

    /// The session that a token names: its lower half is the index, and part of the token.
    fn session_of_token(&mut self, token: u64) -> Option<&mut Session> {
        let index = index_of(token);
        self.session(index).filter(|session| session.token == token)
    }

    /// An immediate has come.
    #[inline]
    fn take<S: Sink>(&mut self, nic: NicIndex, old: bool, data: u64, source: u64, sink: &mut S) {
        let index = if self.wide {
            Some(index_of(data >> 32))
        } else {
            let port = self.ports.get(usize::from(nic));
            let lane = port.and_then(|port| if old { port.old.as_ref() } else { Some(&port.lane) });
            let at = usize::try_from(source).ok();
            at.and_then(|at| *lane?.by_source.get(at)?)
        };
        let wide = self.wide;
        let session = index.and_then(|index| self.session(index));
        let known = |session: &&mut Session| !wide || session.token & LOWER == data >> 32;
        let Some(session) = session.filter(known).filter(|_| data != NO_DATA) else {
            self.stats.strays += 1;
            self.say_stray(nic, data, source);
            return;
        };
        let (peer, is_parting) = (session.peer, session.parting.is_some());
        if matches!(session.state, State::Greeting { .. }) {
            // It would not write if it did not know that it may.
            session.state = State::Open;
        }
        if let Some(takings) = session.takings.get_mut(usize::from(nic))
            && takings.take()
        {
            if let Some(due) = session.says.taken.get_mut(usize::from(nic)) {
                *due = true;
            }
            self.urgent = true;
        }
        // It may have been the last that a session that ends waits for.
        self.urgent |= is_parting;
        #[expect(clippy::cast_possible_truncation, reason = "the immediate is the lower half")]
        sink.immediate(nic, peer, data as u32);
    }

    /// An immediate is nobody's. Where a session has not been heard yet it may have been its first, and is missed for ever: that is
    /// said, and less often the more of them there are.
    #[cold]
    fn say_stray(&self, nic: NicIndex, data: u64, source: u64) {
        let strays = self.stats.strays;
        let mut sessions = self.live.iter().filter_map(|&at| self.sessions.get(usize::from(at)));
        let is_awaited = sessions.any(|session| {
            let state = session.as_ref().map(|session| session.state);
            matches!(state, Some(State::Greeting { .. }))
        });
        if is_awaited && data != NO_DATA && strays.is_power_of_two() {
            let source = (source != libfabric_sys::FI_ADDR_NOTAVAIL).then_some(source);
            tracing::warn!(
                nic,
                ?source,
                strays,
                "an immediate is of no session, and a peer has not been heard yet: if it was that one's, a count stays short"
            );
        }
    }

    /// A write of ours has ended, and with it those before it that did not ask.
    #[inline]
    fn complete<S: Sink>(
        &mut self,
        nic: NicIndex,
        old: bool,
        context: u16,
        outcome: Result<(), Failure>,
        sink: &mut S,
    ) {
        let (mut next, mut outcome) = (Some(context), outcome);
        while let Some(context) = next {
            let Some(port) = self.ports.get_mut(usize::from(nic)) else { return };
            let lane = if old { port.old.as_mut() } else { Some(&mut port.lane) };
            let Some(lane) = lane else { return };
            next = lane.chain.ended(context);
            // Whose those before it are, if there are any.
            let flight = next.and_then(|_| lane.flights.get(usize::from(context))?.as_ref());
            let peer = flight.map(|flight| flight.peer);
            self.end_flight(nic, old, context, outcome, sink);
            // Where a connection to the peer broke, libfabric may have made another, over which this one was answered: of what did not ask before
            // it nobody knows.
            let was_cut = |peer| self.session(peer).is_some_and(|session| session.was_cut);
            if outcome.is_ok() && peer.is_some_and(was_cut) {
                outcome = Err(Failure { code: libc::ENOTCONN, detail: 0 });
            }
        }
    }

    /// Whether the completion of this piece was asked for; if not, it says that the bytes have left.
    #[inline]
    fn is_meant(&self, nic: NicIndex, old: bool, context: u16) -> bool {
        let Some(port) = self.ports.get(usize::from(nic)) else { return false };
        let lane = if old { port.old.as_ref() } else { Some(&port.lane) };
        lane.is_some_and(|lane| !lane.in_order || lane.chain.has_asked(context))
    }

    #[inline]
    fn end_flight<S: Sink>(
        &mut self,
        nic: NicIndex,
        old: bool,
        context: u16,
        outcome: Result<(), Failure>,
        sink: &mut S,
    ) {
        let Some(port) = self.ports.get_mut(usize::from(nic)) else { return };
        let lane = if old { port.old.as_mut() } else { Some(&mut port.lane) };
        let Some(lane) = lane else { return };
        let slot = lane.flights.get_mut(usize::from(context));
        let Some(flight) = slot.and_then(Option::take) else { return };
        lane.free.push(context);
        let mut error = outcome.err().map(|failure| self.work_error(failure));
        let now = self.now;
        if let Some(session) = self.session(flight.peer) {
            let count = if old { &mut session.old_in_flight } else { &mut session.in_flight };
            *count = count.saturating_sub(1);
            if error.is_none() {
                session.reached = Some(now);
                let routes = if old { &mut session.old_routes } else { &mut session.routes };
                if let Some(route) = routes.get_mut(nic, flight.remote) {
                    route.is_reached = true;
                }
            }
            // What may be done once nothing is in flight is not forgotten.
            let waits = session.is_leaving()
                || session.shift.is_some()
                || !session.releasing.is_empty()
                || old;
            if session.is_leaving() && error.is_some() {
                error = Some(WorkError::PeerGone);
            }
            // The peer's device has refused it, immediate and all: the peer will never take that.
            if flight.has_spent
                && error == Some(WorkError::RemoteAccess)
                && let Some(allowance) = session.allowances.get_mut(usize::from(flight.remote))
            {
                allowance.restore(1);
            }
            self.urgent |= waits;
        }
        match flight.purpose {
            Purpose::Work(token) => sink.work_done(nic, token, error.map_or(Ok(()), Err)),
            Purpose::Open { turns, pair } => {
                let recycle = self.recycle;
                if let Some(session) = self.session(flight.peer).filter(|_| error.is_none()) {
                    // Of other endpoints it asks anew.
                    let asks = session.ports_turn;
                    let is_current =
                        |it: Turns| it.asks == asks && recycle.which(it.opens).is_some();
                    session.says.opened.add(turns, pair, is_current);
                }
                self.urgent = true;
            }
            Purpose::Answer => {}
        }
        if let Some(error) = error
            && error != WorkError::RemoteAccess
        {
            self.stumble(flight.peer, &error);
        }
    }

    /// What a failure says, as far as it can be told.
    fn work_error(&self, failure: Failure) -> WorkError {
        use libfabric_sys as sys;
        // EFA's own numbers (fi_efa(7)): 7 is a bad remote address or key; the others are a peer that
        // went away.
        if !self.wide {
            return match failure.detail {
                7 => WorkError::RemoteAccess,
                9 | 13 | 14 | 15 => WorkError::PeerGone,
                _ => WorkError::Device(failure.code),
            };
        }
        match failure.code {
            sys::FI_ECANCELED
            | sys::FI_ENOTCONN
            | sys::FI_ECONNRESET
            | sys::FI_ECONNREFUSED
            | sys::FI_ECONNABORTED
            | sys::FI_ESHUTDOWN
            | sys::FI_EIO
            | sys::FI_ETIMEDOUT
            | sys::FI_EHOSTUNREACH => WorkError::PeerGone,
            sys::FI_EACCES | sys::FI_EKEYREJECTED => WorkError::RemoteAccess,
            code => WorkError::Device(code),
        }
    }

    /// Reads all completions of one lane that there are, but not without end where others keep coming.
    fn drain_lane<S: Sink>(&mut self, nic: NicIndex, old: bool, sink: &mut S) {
        // A batch ends before a failure, which is one of its own: of a full queue every batch may be of one.
        for _ in 0..=self.entries {
            if !self.poll_lane(nic, old, 1, sink) {
                break;
            }
        }
    }

    /// Reads completions of one lane, `rounds` batches at most. Returns whether there were any.
    #[inline]
    fn poll_lane<S: Sink>(
        &mut self,
        nic: NicIndex,
        old: bool,
        rounds: usize,
        sink: &mut S,
    ) -> bool {
        let mut any = false;
        for _ in 0..rounds {
            let Some(port) = self.ports.get_mut(usize::from(nic)) else { break };
            let lane = if old { port.old.as_mut() } else { Some(&mut port.lane) };
            let Some(lane) = lane.filter(|lane| !lane.is_broken) else { break };
            let mut batch = heapless::Vec::<Done, BATCH>::new();
            lane.endpoint.read(&mut batch);
            any |= !batch.is_empty();
            // A read of an empty queue makes libfabric look for more, at the price of a system call: what
            // was not there a moment ago is for the next poll.
            let was_all = batch.len() < BATCH;
            let mut shown = false;
            for done in batch {
                match done {
                    Done::Ours { context, outcome, .. } => {
                        if outcome.is_err() || self.is_meant(nic, old, context) {
                            self.complete(nic, old, context, outcome, sink);
                        }
                    }
                    Done::Theirs { data, source } => {
                        if let (Some(gpus), false) = (&self.memory.gpus.0, shown) {
                            gpus.show();
                        }
                        shown = true;
                        self.take(nic, old, data, source, sink);
                    }
                    Done::Broken(failure) => self.lose_lane(nic, old, failure),
                }
            }
            if was_all {
                break;
            }
        }
        any
    }

    /// What becomes of a piece that is to be posted.
    #[inline]
    fn try_post(&mut self, nic: NicIndex, work: &WorkRequest, more: bool) -> Posted {
        let at = usize::from(nic);
        let wide = self.wide;
        let session = self.sessions.get_mut(usize::from(work.peer.index));
        let session = session.and_then(Option::as_deref_mut);
        let Some(session) = session.filter(|session| session.peer == work.peer) else {
            return Posted::Refused(WorkError::PeerGone);
        };
        match session.state {
            State::Open if session.shift.is_none() && session.gone.is_complete() => {}
            State::Leaving { .. } => return Posted::Refused(WorkError::PeerGone),
            State::Open | State::Greeting { .. } => return Posted::NoRoom,
        }
        let Some(port) = self.ports.get_mut(at) else {
            return Posted::Refused(WorkError::LocalAccess);
        };
        let Some(which) = self.recycle.which(session.moved) else {
            // It knows none of these endpoints yet: those that it was told of are closed.
            return Posted::NoRoom;
        };
        let old = which == Which::Old;
        let (lane, routes, openings) = match &mut port.old {
            Some(lane) if old => (lane, &mut session.old_routes, &mut session.old_openings),
            _ => (&mut port.lane, &mut session.routes, &mut session.openings),
        };
        if lane.is_broken {
            // Nothing that ends there is read.
            return Posted::NoRoom;
        }
        if let Some(openings) = openings
            && !openings.is_open(nic, work.remote_nic)
        {
            openings.want(nic, work.remote_nic);
            self.urgent |= !openings.unasked().is_empty();
            return Posted::NoRoom;
        }
        let remote = usize::from(work.remote_nic);
        let (Some(route), Some(allowance)) =
            (routes.get_mut(nic, work.remote_nic), session.allowances.get_mut(remote))
        else {
            return Posted::Refused(WorkError::PeerGone);
        };
        let Ok(imm) = allowance.carries(work.imm) else {
            // The report that it has more may be at the door.
            self.urgent = true;
            return Posted::NoRoom;
        };
        let (mut address, mut key) = (work.dst, work.dst_key);
        let (from, desc);
        let Ok(len) = usize::try_from(work.len) else {
            return Posted::Refused(WorkError::LocalAccess);
        };
        if len == 0 {
            // Without bytes, the address and the key must be valid all the same.
            let mailbox = &session.mailbox;
            let Some(theirs) = mailbox.keys.get(work.remote_nic) else {
                return Posted::Refused(WorkError::RemoteAccess);
            };
            (address, key) = (mailbox.base, theirs);
            (from, desc) = (std::ptr::from_ref(&*self.nothing) as u64, lane.empty.desc());
        } else {
            if !session.withdrawn.allows(key) {
                return Posted::Refused(WorkError::RemoteAccess);
            }
            let Some(found) = self.memory.desc(at, work.src_key) else {
                return Posted::Refused(WorkError::LocalAccess);
            };
            (from, desc) = (work.src, found);
        }
        let Some(context) = lane.free.pop() else { return Posted::NoRoom };
        let data = imm.map(|imm| {
            let imm = u64::from(imm.bits());
            if wide { (session.their_token & LOWER) << 32 | imm } else { imm }
        });
        let wire_key = LibfabricMemory::wire_key(self.own_keys, key);
        let (to, asks) = (route.handle, !lane.in_order || route.channel.asks(more));
        let write = Write { from, len, desc, to, address, key: wire_key, data, asks };
        // SAFETY: the source is registered, and stays so and mapped until the piece is reported: that is
        // the contract of who posts it, and `Memory::revoke` keeps registrations that are in use. The
        // context was free.
        match unsafe { lane.endpoint.write(&write, context) } {
            Ok(true) => {
                route.refusals.taken();
                if lane.in_order {
                    lane.chain.posted(&mut route.channel, context, asks);
                }
                if data.is_some() {
                    allowance.spend();
                }
                let count = if old { &mut session.old_in_flight } else { &mut session.in_flight };
                *count += 1;
                let (peer, tenant) = (work.peer.index, Tenant::of(key));
                if let Some(slot) = lane.flights.get_mut(usize::from(context)) {
                    let (purpose, remote) = (Purpose::Work(work.token), work.remote_nic);
                    let has_spent = data.is_some();
                    *slot = Some(Flight { purpose, peer, remote, tenant, has_spent });
                }
                Posted::UnderWay
            }
            Ok(false) => {
                lane.free.push(context);
                route.refusals.refused(self.now);
                session.is_refused = true;
                Posted::NoRoom
            }
            Err(failure) => {
                lane.free.push(context);
                Posted::Failed(self.work_error(failure))
            }
        }
    }

    /// Whether, once `work` is posted, there is room on our side for the `next`, to the same NIC of the same peer.
    #[inline]
    fn has_room_for_both(&self, nic: NicIndex, work: &WorkRequest, next: &WorkRequest) -> bool {
        let session = self.sessions.get(usize::from(work.peer.index)).and_then(Option::as_deref);
        let allowance = session.and_then(|it| it.allowances.get(usize::from(work.remote_nic)));
        let (Some(session), Some(allowance)) = (session, allowance) else { return false };
        let mut allowance = *allowance;
        if work.imm.is_some() {
            allowance.spend();
        }
        let Some(port) = self.ports.get(usize::from(nic)) else { return false };
        let lane = match &port.old {
            Some(old) if self.recycle.which(session.moved) == Some(Which::Old) => old,
            _ => &port.lane,
        };
        lane.free.len() > 1 && allowance.carries(next.imm).is_ok()
    }

    /// Has a connection opened, as a peer has asked.
    fn open_pair(&mut self, index: u16, turns: Turns, nic: NicIndex, remote: NicIndex) -> Posted {
        let which = self.recycle.which(turns.opens);
        let current = self.session(index).is_some_and(|session| session.ports_turn == turns.asks);
        let purpose = Purpose::Open { turns, pair: Pairs::one(remote, nic) };
        match which.filter(|_| current) {
            Some(which) => self.post_empty(index, which, (nic, remote), purpose),
            None => Posted::Refused(WorkError::PeerGone),
        }
    }

    /// Has those answered for that did not ask, where nobody after them has.
    #[cold]
    fn settle_what_is_owed(&mut self) {
        self.owing = false;
        for at in 0..self.live.len() {
            let Some(&index) = self.live.get(at) else { break };
            let Some(session) = self.session(index) else { continue };
            // There are no more pairs of NICs.
            let owed = |which, routes: &Routes| -> heapless::Vec<_, { MAX_NICS * MAX_NICS }> {
                routes.owed().map(|pair| (which, pair)).take(MAX_NICS * MAX_NICS).collect()
            };
            let present = owed(Which::Present, &session.routes);
            let old = owed(Which::Old, &session.old_routes);
            for (which, pair) in present.into_iter().chain(old) {
                match self.post_empty(index, which, pair, Purpose::Answer) {
                    Posted::NoRoom => (self.owing, self.urgent) = (true, true),
                    Posted::UnderWay | Posted::Refused(_) => {}
                    Posted::Failed(error) => self.stumble(index, &error),
                }
            }
        }
    }

    /// Posts a write without bytes that nobody counts, and that asks.
    fn post_empty(
        &mut self,
        index: u16,
        which: Which,
        (nic, remote): (NicIndex, NicIndex),
        purpose: Purpose,
    ) -> Posted {
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let (Some(session), Some(port)) = (session, self.ports.get_mut(usize::from(nic))) else {
            return Posted::Refused(WorkError::PeerGone);
        };
        let (lane, routes, count) = match (which, &mut port.old) {
            (Which::Present, _) => (&mut port.lane, &mut session.routes, &mut session.in_flight),
            (Which::Old, Some(old)) => (old, &mut session.old_routes, &mut session.old_in_flight),
            (Which::Old, None) => return Posted::Refused(WorkError::PeerGone),
        };
        if lane.is_broken {
            // Nothing that ends there is read; who waits for it asks anew of the next endpoints.
            return Posted::Refused(WorkError::PeerGone);
        }
        let mailbox = &session.mailbox;
        let (Some(route), Some(key)) = (routes.get_mut(nic, remote), mailbox.keys.get(remote))
        else {
            return Posted::Refused(WorkError::PeerGone);
        };
        let Some(context) = lane.free.pop() else { return Posted::NoRoom };
        let write = Write {
            from: std::ptr::from_ref(&*self.nothing) as u64,
            len: 0,
            desc: lane.empty.desc(),
            to: route.handle,
            address: mailbox.base,
            key: LibfabricMemory::wire_key(self.own_keys, key),
            data: None,
            asks: true,
        };
        // SAFETY: nothing is read from the source, which lives as long as the lanes. The context was free.
        match unsafe { lane.endpoint.write(&write, context) } {
            Ok(true) => {
                *count += 1;
                route.refusals.taken();
                if lane.in_order {
                    lane.chain.posted(&mut route.channel, context, true);
                }
                if let Some(slot) = lane.flights.get_mut(usize::from(context)) {
                    let (peer, tenant, has_spent) = (index, None, false);
                    *slot = Some(Flight { purpose, peer, remote, tenant, has_spent });
                }
                Posted::UnderWay
            }
            Ok(false) => {
                lane.free.push(context);
                route.refusals.refused(self.now);
                session.is_refused = true;
                Posted::NoRoom
            }
            Err(failure) => {
                lane.free.push(context);
                Posted::Failed(self.work_error(failure))
            }
        }
    }

    /// When something is to be done, at the earliest, even if nothing happens.
    fn next_deadline(&self) -> Time {
        let sessions = self.live.iter().filter_map(|&index| {
            let session = self.sessions.get(usize::from(index))?.as_ref()?;
            match session.state {
                State::Greeting { until, retry } => Some(until.min(retry.due())),
                State::Leaving { cut, .. } => {
                    let awaits = session.awaits(self.now);
                    match session.all_in_flight() {
                        0 => Some(awaits.unwrap_or(self.now)),
                        // That has deadlines of its own.
                        _ if self.recycle.is_under_way() => awaits,
                        _ => Some(awaits.map_or(cut, |until| until.min(cut))),
                    }
                }
                State::Open => None,
            }
        });
        let reopens = if self.has_lost_lane() && !self.recycle.is_under_way() {
            self.reopens
        } else {
            Time::NEVER
        };
        let sooner = self.handshakes.next_deadline().min(self.recycle_deadline()).min(reopens);
        sessions.fold(sooner, Time::min)
    }
}

/// What became of a piece.
enum Posted {
    UnderWay,
    NoRoom,
    /// It was not posted, and never will be; nothing else is the matter.
    Refused(WorkError),
    /// libfabric would not take it.
    Failed(WorkError),
}

/// The half of a token that travels with immediates.
const LOWER: u64 = u32::MAX as u64;

/// The peer's index in a token, or in its lower half.
#[expect(clippy::cast_possible_truncation, reason = "the lowest 16 bits are what is meant")]
const fn index_of(token: u64) -> u16 {
    token as u16
}

/// A token for a session: the peer's index below, the rest random.
fn token_for(index: u16) -> io::Result<u64> {
    let random = u64::from_ne_bytes(random()?);
    // Not all ones in the half that travels: that is the data of no session.
    Ok((random & !0xffff & !(1 << 31)) | u64::from(index))
}

/// The names of the devices that belong to these GPUs, if any are known. Software sends no GPU's memory: it has none.
fn near(gpus: &Known, pairing: &Pairing, found: &[Device]) -> Result<Vec<String>, LibfabricError> {
    let usable: Vec<_> = found.iter().filter_map(|device| device.facts.rdma_name()).collect();
    if usable.is_empty() {
        return Ok(Vec::new());
    }
    let names = pairing.names(&gpus.addresses()?, &usable)?;
    if let Some(name) = names.iter().find(|name| !usable.contains(&name.as_str())) {
        return Err(LibfabricError::NoSuchNic {
            name: name.clone(),
            found: usable.into_iter().map(Into::into).collect(),
        });
    }
    tracing::info!(nics = ?names, "which NICs belong to the GPUs; if none, all are taken");
    Ok(names)
}

/// A device for each NIC: of those that are `near`, in that order, or else of all, in turn.
fn choose_devices(mut found: Vec<Device>, near: &[String], nics: u8) -> Vec<Arc<Device>> {
    if near.is_empty() {
        // One that others cannot reach is used only if there is no better one.
        let lonely = found.iter().all(|device| device.facts.domain == "lo");
        found.retain(|device| lonely || device.facts.domain != "lo");
    } else {
        let rank = |device: &Device| {
            near.iter().position(|name| Some(name.as_str()) == device.facts.rdma_name())
        };
        found.retain(|device| rank(device).is_some());
        found.sort_by_key(rank);
    }
    let found: Vec<_> = found.into_iter().map(Arc::new).collect();
    found.iter().cycle().take(usize::from(nics)).cloned().collect()
}

impl Provider for LibfabricProvider {
    type Memory = LibfabricMemory;

    fn nics(&self) -> &[NicInfo] {
        &self.nics
    }

    fn memory(&self) -> &Arc<LibfabricMemory> {
        &self.memory
    }

    fn address(&self) -> NetAddr {
        self.address.clone()
    }

    fn reads_gpus(&self, _: PeerId) -> bool {
        self.memory.gpus.0.is_some()
    }

    fn post<S: Sink>(&mut self, nic: NicIndex, work: &[WorkRequest], sink: &mut S) -> usize {
        let goes_on = |this: &WorkRequest, next: &WorkRequest| {
            (this.peer, this.remote_nic) == (next.peer, next.remote_nic)
        };
        let mut silent = false;
        for (accepted, piece) in work.iter().enumerate() {
            let next = work.get(accepted + 1).filter(|next| goes_on(piece, next));
            // Whoever does not ask relies on the next: as good as posted, if not for libfabric.
            let more = next.is_some_and(|next| self.has_room_for_both(nic, piece, next));
            let posted = self.try_post(nic, piece, more);
            // Who follows did not: those before it may have nobody to ask for them.
            let is_broken = silent && !matches!(posted, Posted::UnderWay);
            silent = more;
            (self.owing, self.urgent) = (self.owing | is_broken, self.urgent | is_broken);
            match posted {
                Posted::UnderWay => {}
                Posted::NoRoom => return accepted,
                Posted::Refused(error) => sink.work_done(nic, piece.token, Err(error)),
                Posted::Failed(error) => {
                    sink.work_done(nic, piece.token, Err(error));
                    self.stumble(piece.peer.index, &error);
                }
            }
        }
        work.len()
    }

    fn poll<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool {
        self.now = self.now.max(now);
        let rounds = COMPLETIONS_PER_POLL / BATCH;
        let mut any = false;
        for at in 0..self.ports.len() {
            let nic = NicIndex::try_from(at).unwrap_or(NicIndex::MAX);
            any |= self.poll_lane(nic, false, rounds, sink);
            if self.recycle.is_under_way() {
                any |= self.poll_lane(nic, true, rounds, sink);
            }
        }
        if self.urgent || self.now.since(self.tended) >= UPKEEP_EVERY {
            self.tended = self.now;
            any |= self.upkeep(sink);
        }
        if any {
            self.stirred = self.now;
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
        if address.provider() != ProviderKind::Libfabric {
            let found = address.provider().name().to_owned();
            let expected = ProviderKind::Libfabric.name();
            return Err(ConnectError::OtherProvider { found, expected });
        }
        self.now = self.now.max(now);
        self.urgent = true;
        self.call(peer, address, hello)
    }

    /// What is in flight is reported at later polls: once it has completed, or the endpoints have been
    /// replaced. With no other peer there it is reported here.
    fn disconnect<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        self.hang_up(peer);
        let now = self.now;
        if let Some(session) = self.session(peer.index).filter(|session| session.peer == peer) {
            session.leave(now, None);
            self.tend(sink);
        }
    }

    /// The endpoints are replaced, unless what is in flight ends before all others have moved.
    fn abort<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        let now = self.now;
        if let Some(session) = self.session(peer.index).filter(|session| session.peer == peer) {
            session.leave(now, Some(immwire_core::peer::DownReason::Disconnected));
            self.tend(sink);
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.watch.fd()
    }

    fn arm(&mut self) -> bool {
        if self.urgent {
            return false;
        }
        let mut nap = self.next_deadline().since(self.now);
        if self.door.is_held_up() {
            nap = nap.min(NAP);
        }
        let mut may_sleep = true;
        let quiet = self.now.since(self.stirred) > HUSH_AFTER;
        let lanes =
            self.ports.iter_mut().flat_map(|port| port.old.iter_mut().chain([&mut port.lane]));
        // What is lost says nothing any more, or the same for ever.
        let lanes = lanes.filter(|lane| !lane.is_broken).map(|lane| &mut lane.endpoint);
        let endpoints = lanes.chain(self.door.endpoint_mut());
        let mut all_signs = AllSigns::new();
        for endpoint in endpoints {
            let ready =
                !endpoint.has_signs() || endpoint.may_sleep() && (!quiet || endpoint.hush());
            // Afterwards, as it may have made connections.
            let signs = endpoint.signs();
            may_sleep &= ready && signs.as_ref().is_none_or(|signs| endpoint.is_calm(signs));
            if signs.is_none_or(|signs| all_signs.push(signs).is_err()) {
                nap = nap.min(NAP);
            }
        }
        if may_sleep {
            if !self.watch.queues(&all_signs) {
                nap = nap.min(NAP);
            }
            self.set_timer(nap.max(Duration::from_micros(1)));
        }
        may_sleep
    }

    fn disarm(&mut self) {
        self.urgent = true;
    }
}

impl LibfabricProvider {
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

impl Drop for LibfabricProvider {
    /// Takes leave of the peers. Afterwards the endpoints are closed, and whoever withdraws a region later
    /// waits for nobody.
    fn drop(&mut self) {
        self.farewell();
        self.ports.clear();
        self.memory.regions.with_ledger(|ledger| ledger.stop());
    }
}
