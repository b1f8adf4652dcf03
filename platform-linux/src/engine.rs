//! The engine as callers hold it: [`TransferEngine`], its [`Builder`], and the polled [`Driver`].

use std::ffi::c_void;
use std::fmt;
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use immwire_core::group::{
    DomainGroup, GroupConfig, LostSlot, NicConfig, PeerSlot, PieceLimits, TransferSlot,
};
use immwire_core::id::{EngineId, MAX_NICS, PeerId, Time};
use immwire_core::imm::{Imm, ImmTag, Tally, tallies, tally_words};
use immwire_core::mailbox::{Geometry, USER_COUNTERS, credit_room};
use immwire_core::nic::{NicState, SplitRule};
use immwire_core::peer::{LivenessConfig, PeerState};
use immwire_core::plan::{self, PlanLimits};
use immwire_core::region::{MrDesc, Rights};
use immwire_core::span::{self, FAR_NICS_MAX, Side};
use immwire_core::wake::Ticket;
use immwire_core::wire::{NetAddr, ProviderKind};

use crate::clock::Clock;
use crate::closer::Closer;
use crate::counter::ImmCounter;
use crate::driver::{Drive, Engine, Setup, Submission};
use crate::error::{
    AddPeerError, BuildError, CountError, CounterTaken, End, PeerError, RecvError, SubmitError,
    WaitTimeout,
};
use crate::flag::{Flags, GpuFlag};
use crate::gate::{Gates, StreamWait, StreamWaitError};
use crate::libfabric::{LibfabricConfig, LibfabricProvider};
use crate::provider::{GiveBack, Memory, NicInfo, Provider, RegisterError, Window};
use crate::region::{CloseError, Region, Registry};
use crate::request::{
    Checked, PagedWrite, Pages, PeerGroup, Request, ScatterWrite, SingleWrite, Targets,
};
use crate::shared::{Command, Control, Message, OnMessage, Shared, Sizes};
use crate::shm::{ForeignPath, GroupKey, ShmConfig, ShmProvider, knows_own_user};
use crate::span::{Span, find_host};
use crate::staging::{Staged, Staging, StagingError};
use crate::sync::lock;
use crate::thread;
use crate::topology::Pairing;
use crate::transfer::Transfer;
use crate::verbs::{VerbsConfig, VerbsOptions, VerbsProvider};
use crate::waits::{self, Capacity, PeerUp};
use crate::watch::{UvmWatcher, Watch};

/// A polled engine that waits looks for arrivals so often for each full step.
const LOOKS_PER_STEP: u32 = 4;
/// How long a caller waits for the engine's thread to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// What an engine's thread does when there is nothing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdlePolicy {
    /// It looks again at once, for so long.
    pub spin: Duration,
    /// Then it lets others run between looks, for so long.
    pub yielding: Duration,
    /// Then it sleeps until something happens; otherwise it keeps yielding.
    pub block: bool,
}

impl Default for IdlePolicy {
    /// 50 microseconds of each, then sleep: an idle engine costs next to nothing.
    fn default() -> Self {
        Self { spin: Duration::from_micros(50), yielding: Duration::from_micros(50), block: true }
    }
}

impl IdlePolicy {
    /// Never sleeps nor yields: the lowest latency, for a core of its own.
    #[must_use]
    pub const fn busy() -> Self {
        Self { spin: Duration::MAX, yielding: Duration::ZERO, block: false }
    }
}

/// What carries an engine's writes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Transport {
    /// Shared memory: peers on this host.
    #[default]
    Shm,
    /// libfabric: TCP to any host, or AWS EFA.
    Libfabric(LibfabricOptions),
    /// libibverbs: RDMA NICs, InfiniBand or RoCE.
    Verbs(VerbsOptions),
}

/// Which libfabric, and what of it. By default whatever the machine has: EFA before TCP.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LibfabricOptions {
    /// The library to load. If none: the one that `IMMWIRE_LIBFABRIC` names, or that the machine has.
    pub library: Option<PathBuf>,
    /// libfabric's provider: `efa`, `tcp`, `net` or `tcp;ofi_rxm`.
    pub provider: Option<String>,
    /// libfabric's domain: a network interface (`eth0`, `lo`), or an EFA device. If none, all there are;
    /// loopback only if there is nothing else.
    pub domain: Option<String>,
}

/// What an engine is made of. Every choice has a default.
#[derive(Debug, Clone)]
pub struct Builder {
    transport: Transport,
    nics: u8,
    transfers: u16,
    peers: u16,
    counters: u16,
    group_key: Option<GroupKey>,
    idle: IdlePolicy,
    cpu: Option<usize>,
    drain: Duration,
    liveness: Option<LivenessConfig>,
    idle_after: Option<Duration>,
    mailbox_slots: u8,
    mailbox_slot_bytes: u32,
    latency_bytes: u64,
    foreign_path: ForeignPath,
    gpus: Vec<u32>,
    sms: NonZeroU32,
    stands_by: bool,
    pairing: Pairing,
    shm_on_host: bool,
    host: Option<String>,
    staging: Option<Staging>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            transport: Transport::Shm,
            nics: 1,
            transfers: 1024,
            peers: 256,
            counters: 1024,
            group_key: None,
            idle: IdlePolicy::default(),
            cpu: None,
            drain: Duration::from_secs(1),
            liveness: None,
            idle_after: None,
            mailbox_slots: 8,
            mailbox_slot_bytes: 64 << 10,
            latency_bytes: 8 << 10,
            foreign_path: ForeignPath::default(),
            gpus: Vec::new(),
            sms: immwire_cuda::geometry::DEFAULT_SMS,
            stands_by: true,
            pairing: Pairing::default(),
            shm_on_host: false,
            host: None,
            staging: None,
        }
    }
}

impl Builder {
    /// What carries the writes. Default: shared memory.
    #[must_use]
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// NICs of the group: 1 to 8. Shared memory makes as many endpoints; libfabric and libibverbs take the machine's devices
    /// in turn, or those of the [GPUs](Builder::gpus), and share them if there are fewer. Default 1.
    #[must_use]
    pub const fn nics(mut self, nics: u8) -> Self {
        self.nics = nics;
        self
    }

    /// Transfers that may be under way at a time: 1 to 60,000. One that has ended counts as long as there is a handle of it. The
    /// [`Driver`] of a polled engine may keep one of them for the next small write. Default 1024.
    #[must_use]
    pub const fn transfers(mut self, transfers: u16) -> Self {
        self.transfers = transfers;
        self
    }

    /// Peers at a time: 1 to 60,000. Default 256.
    #[must_use]
    pub const fn peers(mut self, peers: u16) -> Self {
        self.peers = peers;
        self
    }

    /// Counters: 1 to 16,381. Default 1024. Each has eight bytes for each of [`Builder::peers`], who may write to it: 2 MiB by default for all of
    /// them; and with GPUs 16 bytes of pinned memory, for streams that wait.
    #[must_use]
    pub const fn counters(mut self, counters: u16) -> Self {
        self.counters = counters;
        self
    }

    /// The secret that every engine of the group must prove to have. Without one shared memory lets in processes of the same
    /// user, and libfabric and libibverbs whoever reaches the engine. One derived of nothing is refused.
    #[must_use]
    pub fn group_key(mut self, key: GroupKey) -> Self {
        self.group_key = Some(key);
        self
    }

    /// What the engine's thread does when idle.
    #[must_use]
    pub const fn idle(mut self, idle: IdlePolicy) -> Self {
        self.idle = idle;
        self
    }

    /// The CPU that the engine's thread is pinned to; one that it cannot be pinned to is refused. Default: none.
    #[must_use]
    pub const fn pin_cpu(mut self, cpu: usize) -> Self {
        self.cpu = Some(cpu);
        self
    }

    /// How long a stopped transfer's pieces may take to complete before they are forced. Default 1 s. As long, a second at least, an engine
    /// that stops waits for peers that are writing.
    #[must_use]
    pub const fn drain(mut self, drain: Duration) -> Self {
        self.drain = drain;
        self
    }

    /// When a silent peer is suspected and counts as gone. Default: suspected after 2 s; gone after 10 s,
    /// but through shared memory never by silence alone, since there its death is seen at once; with
    /// [`Builder::shm_on_host`] it is as for the other transport. What gives peers up before they are heard
    /// ([`LivenessConfig::gives_time`]) is refused.
    #[must_use]
    pub const fn liveness(mut self, liveness: LivenessConfig) -> Self {
        self.liveness = Some(liveness);
        self
    }

    /// As [`Builder::liveness`], but for what `change` leaves as it would be: choose the transport before.
    #[must_use]
    pub fn liveness_with(self, change: impl FnOnce(&mut LivenessConfig)) -> Self {
        let mut liveness = self.liveness_config();
        change(&mut liveness);
        self.liveness(liveness)
    }

    /// [`LivenessConfig::idle_after`] alone: a peer to whom nothing went and from whom nothing came for so long is asked whether it can be
    /// let go. If it has no use for the connection either, it ends that: both are told
    /// [`DownReason::Idle`](crate::DownReason::Idle), and its place, queue pairs and messages' memory are free for others; to use it
    /// again, add it again. Default: never. At least [`LivenessConfig::heartbeat`].
    ///
    /// Of use are transfers and messages, also those that wait for anything. Whoever only waits for a count, for longer than this, is not
    /// known to: its peer may be let go meanwhile. What is submitted to a peer that is asked waits for the answer, which comes when that
    /// engine is polled next, and may then end [`End::NeverStarted`](crate::End::NeverStarted). Exchanges of experts
    /// ([`moe`](crate::moe)) add no peer again: give their engines none, or in host memory one longer than any pause. Among GPUs rounds do
    /// not use the connection at all: they go on without it, but cannot start over.
    #[must_use]
    pub const fn idle_after(mut self, idle_after: Duration) -> Self {
        self.idle_after = Some(idle_after);
        self
    }

    /// How messages from each peer are kept: 1 to 64 slots, each of a multiple of 64 bytes, of 256 MiB together at most. Default 8
    /// of 64 KiB; memory is taken as it is used.
    #[must_use]
    pub const fn mailbox(mut self, slots: u8, slot_bytes: u32) -> Self {
        self.mailbox_slots = slots;
        self.mailbox_slot_bytes = slot_bytes;
        self
    }

    /// Single writes up to this size overtake bulk transfers. Default 8 KiB.
    #[must_use]
    pub const fn latency_bytes(mut self, bytes: u64) -> Self {
        self.latency_bytes = bytes;
        self
    }

    /// Which way bytes take to memory that was registered, not allocated. Default: the fastest that
    /// the kernel allows.
    #[must_use]
    pub const fn foreign_path(mut self, path: ForeignPath) -> Self {
        self.foreign_path = path;
        self
    }

    /// Peers on this host are reached through shared memory, and their GPUs over NVLink or PCIe, all others by the
    /// [transport](Builder::transport): each peer by one of the two, whichever side calls. One transfer may go to both, and
    /// one counter count what comes from both. All engines of a group choose the same.
    ///
    /// The engine then has one NIC more than [`Builder::nics`], which are 1 to 7: the first is shared memory. Two engines
    /// are on one host if the same kernel has booted them into one network namespace, and if they run as one user or
    /// have the same key. Default: no. With [`Transport::Shm`] it changes nothing.
    #[must_use]
    pub const fn shm_on_host(mut self, yes: bool) -> Self {
        self.shm_on_host = yes;
        self
    }

    /// For [`Builder::shm_on_host`]: engines that are given the same name are taken to be on one host, whatever the kernel
    /// says, and those with different names on two. Containers that share a kernel but no shared memory have different
    /// ones. Default: what the kernel says.
    #[must_use]
    pub fn host(mut self, name: impl Into<String>) -> Self {
        self.host = Some(name.into());
        self
    }

    /// GPUs whose memory is written from and to, by their numbers in this process (`CUDA_VISIBLE_DEVICES`). Default: none.
    ///
    /// Over shared memory GPUs copy, to peers on this host, over NVLink or PCIe; then all host memory that is registered is
    /// pinned for them, and while a GPU copies, the engine's thread does not sleep. RDMA devices and EFA read and write a
    /// GPU's memory themselves, where machine and device let them (`immwire doctor` says so); over TCP none goes, but by
    /// [staging](Builder::staging). With [`Builder::shm_on_host`] either is used, by where the peer is; where the devices are not
    /// let at it, and it is not staged, a GPU's memory goes to peers on this host alone.
    #[must_use]
    pub fn gpus(mut self, gpus: impl Into<Vec<u32>>) -> Self {
        self.gpus = gpus.into();
        self
    }

    /// All that is in the [GPUs](Builder::gpus)' memory goes by way of pinned host memory, at both ends: for NICs that do not
    /// reach it, over TCP or without GPUDirect RDMA. Default: no, and registration says why such memory cannot be used.
    ///
    /// Who writes to such memory needs it, too. Pieces are 64 KiB at most then, of host memory as well; they are copied once
    /// more at each end; a peer whose path is lost is lost. Not over shared memory; [beside it](Builder::shm_on_host) for peers on
    /// other hosts.
    #[must_use]
    pub const fn staging(mut self, staging: Staging) -> Self {
        self.staging = Some(staging);
        self
    }

    /// Which NICs belong to which GPU, where somebody knows better. Default: each GPU has those that are
    /// [nearest](crate::topology), as `immwire doctor` says. An engine with [`Builder::gpus`] takes of RDMA and EFA devices
    /// its GPUs' alone, in turn for [`Builder::nics`], unless devices are named.
    #[must_use]
    pub fn pairing(mut self, pairing: Pairing) -> Self {
        self.pairing = pairing;
        self
    }

    /// On how many of its SMs a GPU may make one copy; two to one peer may be under way at a time, and while it copies to several peers at
    /// once each has its part of them. Default 10, which fill a link of NVLink 4.
    #[must_use]
    pub const fn sms(mut self, sms: NonZeroU32) -> Self {
        self.sms = sms;
        self
    }

    /// Whether warps of a GPU stand by for short writes to peers of the same host, up to 32 KiB: when two have come within 100 µs, one block
    /// of 128 threads stays on one SM until none has come for as long, and never for more than a millisecond. Default: yes. Such a write takes
    /// half as long then, and none of the driver's time; whoever waits for all that the GPU does waits for as long.
    #[must_use]
    pub const fn stand_by(mut self, stands_by: bool) -> Self {
        self.stands_by = stands_by;
        self
    }

    /// An engine with a thread of its own.
    ///
    /// # Errors
    ///
    /// [`BuildError`].
    pub fn build(self) -> Result<TransferEngine, BuildError> {
        let (idle, cpu, drain) = (self.idle, self.cpu, self.drain);
        cpu.map_or(Ok(()), pinnable)?;
        let parts = self.parts()?;
        let inner = Arc::new(parts.inner);
        let mut engine = parts.drive;
        let shared = Arc::clone(&inner.shared);
        let serve = Arc::clone(&inner.shared);
        let callbacks = spawn("immwire-callbacks", move || {
            serve.callbacks.serve();
        })?;
        let progress = spawn("immwire-engine", move || {
            if let Some((cpu, Err(error))) = cpu.map(|cpu| (cpu, thread::pin(cpu))) {
                // It has gone since it was tried.
                tracing::warn!(cpu, %error, "the engine's thread could not be pinned");
            }
            run(&mut *engine, &shared, idle);
            engine.shut_down(drain);
        })?;
        // The engine's own comes first: see `Inner::drop`.
        *lock(&inner.threads) = vec![progress, callbacks];
        Ok(TransferEngine { inner, deadline: None })
    }

    /// An engine without a thread: somebody polls its [`Driver`].
    ///
    /// # Errors
    ///
    /// [`BuildError`].
    pub fn build_polled(self) -> Result<(TransferEngine, Driver), BuildError> {
        let drain = self.drain;
        Ok(self.parts()?.polled(drain))
    }

    /// As [`Builder::build_polled`], on a transport of the caller's, whose NICs they are. Choices that
    /// are the shared-memory transport's alone are left aside.
    ///
    /// # Errors
    ///
    /// [`BuildError`].
    pub fn build_polled_on<P: Provider>(
        self,
        provider: P,
        clock: Clock,
    ) -> Result<(TransferEngine, Driver), BuildError> {
        self.check()?;
        let drain = self.drain;
        Ok(self.assemble(provider, clock)?.polled(drain))
    }

    fn liveness_config(&self) -> LivenessConfig {
        let default = LivenessConfig::default();
        let liveness = self.liveness.unwrap_or(match self.transport {
            // The socket tells of a peer's death at once; silence alone may be a caller that computes, or a
            // debugger.
            Transport::Shm => LivenessConfig { down_after: Duration::MAX, ..default },
            // With shared memory beside it or not: silence tells nothing else of a peer far away.
            Transport::Libfabric(_) | Transport::Verbs(_) => default,
        });
        LivenessConfig { idle_after: self.idle_after.unwrap_or(liveness.idle_after), ..liveness }
    }

    /// Whether there are two transports.
    fn spans(&self) -> bool {
        self.shm_on_host && self.transport != Transport::Shm
    }

    fn check(&self) -> Result<(), BuildError> {
        let nics = match self.spans() {
            true => ("nics beside shared memory", usize::from(self.nics), FAR_NICS_MAX, "1 to 7"),
            false => ("nics", usize::from(self.nics), MAX_NICS, "1 to 8"),
        };
        let limits = [
            nics,
            ("transfers", usize::from(self.transfers), 60_000, "1 to 60000"),
            ("peers", usize::from(self.peers), 60_000, "1 to 60000"),
            ("counters", usize::from(self.counters), usize::from(USER_COUNTERS), "1 to 16381"),
        ];
        for (what, found, max, allowed) in limits {
            if found == 0 || found > max {
                return Err(BuildError::Config { what, found, allowed });
            }
        }
        let liveness = self.liveness_config();
        if !liveness.gives_time() {
            let found = usize::try_from(liveness.down_after.as_millis()).unwrap_or(usize::MAX);
            let what = "milliseconds after which a silent peer is given up (down_after)";
            return Err(BuildError::Config { what, found, allowed: "two heartbeats or more" });
        }
        if self.group_key.as_ref().is_some_and(GroupKey::is_of_nothing) {
            let what = "bytes that the group key is derived of";
            return Err(BuildError::Config { what, found: 0, allowed: "1 or more, hard to guess" });
        }
        Ok(())
    }

    fn parts(self) -> Result<Parts, BuildError> {
        self.check()?;
        let mut id = [0; 8];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| BuildError::Os { call: "getrandom", source: errno.into() })?;
        let engine = EngineId(u64::from_ne_bytes(id));
        let (group_key, gpus) = (self.group_key.clone(), self.gpus.clone());
        let pairing = self.pairing.clone();
        match self.transport.clone() {
            Transport::Shm if self.staging.is_some() => {
                Err(BuildError::Staging(StagingError::NoNics))
            }
            Transport::Shm => {
                let provider = self.shm(engine, self.nics, false)?;
                self.assemble(provider, Clock::monotonic())
            }
            Transport::Libfabric(LibfabricOptions { library, provider, domain }) => {
                let (nics, peers) = (self.nics, self.peers);
                let provider = LibfabricProvider::new(LibfabricConfig {
                    engine,
                    nics,
                    peers,
                    library,
                    provider,
                    domain,
                    group_key,
                    gpus,
                    pairing,
                });
                self.assemble_with_shm(engine, provider.map_err(BuildError::Libfabric)?)
            }
            Transport::Verbs(options) => {
                let (nics, peers) = (self.nics, self.peers);
                let config = VerbsConfig { engine, nics, peers, options, group_key, gpus, pairing };
                let provider = VerbsProvider::new(config).map_err(BuildError::Verbs)?;
                self.assemble_with_shm(engine, provider)
            }
        }
    }

    fn shm(&self, engine: EngineId, nics: u8, from_zero: bool) -> Result<ShmProvider, BuildError> {
        let config = ShmConfig {
            nics,
            group_key: self.group_key.clone(),
            foreign: self.foreign_path,
            gpus: self.gpus.clone(),
            sms: self.sms,
            stands_by: self.stands_by,
            from_zero,
            ..ShmConfig::new(engine)
        };
        ShmProvider::new(config).map_err(BuildError::Provider)
    }

    /// As [`Builder::assemble`], with staging around it and shared memory beside that, as far as they are wanted.
    fn assemble_with_shm<P: Provider>(self, engine: EngineId, far: P) -> Result<Parts, BuildError> {
        let near = match self.spans() {
            true => Some(self.shm(engine, 1, far.memory().counts_from_zero())?),
            false => None,
        };
        let Some(staging) = self.staging else { return self.assemble_beside(near, far) };
        // While the one side's closer waits for a driver, that keeps the other's callers waiting.
        let own = || Arc::new(Closer::new(&self.gpus));
        let closer = near.as_ref().and_then(ShmProvider::closer).unwrap_or_else(own);
        let geometry = self.geometry()?;
        let staged = Staged::beside(far, staging, (&self.gpus, closer), self.sms, geometry);
        let staged = staged.map_err(BuildError::Staging)?;
        self.assemble_beside(near, staged)
    }

    /// As [`Builder::assemble`], with shared memory beside it if there is any.
    fn assemble_beside<P: Provider>(
        self,
        near: Option<ShmProvider>,
        far: P,
    ) -> Result<Parts, BuildError> {
        let Some(near) = near else { return self.assemble(far, Clock::monotonic()) };
        let from_zero = far.memory().counts_from_zero();
        let knows_user = knows_own_user();
        let host = find_host(self.host.as_deref(), self.group_key.as_ref(), from_zero, knows_user);
        let host = host.map_err(|source| BuildError::Os { call: "finding the host", source })?;
        let both = Span::new(near, far, &host).map_err(BuildError::Span)?;
        self.assemble(both, Clock::monotonic())
    }

    fn geometry(&self) -> Result<Geometry, BuildError> {
        Geometry::new(self.mailbox_slots, self.mailbox_slot_bytes).map_err(BuildError::Mailbox)
    }

    /// Puts an engine together around a provider.
    fn assemble<P: Provider>(self, provider: P, clock: Clock) -> Result<Parts, BuildError> {
        let nics: Vec<NicInfo> = provider.nics().to_vec();
        let geometry = self.geometry()?;
        let words = usize::from(self.counters) * tally_words(self.peers);
        let table: Arc<[Tally]> = (0..words).map(|_| Tally::new()).collect();
        let (writer, reader) = tallies(table, self.peers).map_err(|_| BuildError::Config {
            what: "peers",
            found: usize::from(self.peers),
            allowed: "1 to 60000",
        })?;
        let wake_fd = if clock.is_stepped() { None } else { Some(eventfd()?) };
        let sizes = Sizes { transfers: self.transfers, counters: self.counters };
        let shared = Shared::new(&sizes, reader, clock, wake_fd).ok_or(BuildError::Config {
            what: "transfers",
            found: usize::from(self.transfers),
            allowed: "1 to 60000",
        })?;
        let shared = Arc::new(shared);
        let memory = Arc::clone(provider.memory());
        let registry = Registry::new(memory);
        // Made now: to pin memory waits for all streams, and so for those that are held.
        let words = if self.gpus.is_empty() { 0 } else { 2 * usize::from(self.counters) };
        let gates = Gates::new(words, |bytes| registry.pin(bytes)).map_err(BuildError::Memory)?;
        let depth = nics.iter().map(|nic| nic.limits.queue_depth).min().unwrap_or(0);
        let own_room = credit_room(self.peers, depth);
        let group = self.group(&nics, provider.unreached(), own_room).map_err(BuildError::Group)?;
        let address = provider.address();
        let setup = Setup {
            group,
            shared: Arc::clone(&shared),
            registry: Arc::clone(&registry),
            tally: writer,
            peers: self.peers,
            geometry,
            heartbeat: self.liveness_config().heartbeat,
            own_room,
        };
        let drive: Box<dyn Drive> = Box::new(Engine::new(provider, setup));
        let max_message = geometry.max_message_bytes() as usize;
        let inner = Inner {
            shared,
            registry,
            address,
            nics,
            max_message,
            threads: Mutex::default(),
            watch: Arc::default(),
            flags: Arc::default(),
            gates,
            drain: self.drain,
        };
        Ok(Parts { inner, drive })
    }

    fn group(
        &self,
        nics: &[NicInfo],
        unreached: [u8; MAX_NICS],
        own_room: u16,
    ) -> Result<crate::driver::Group, immwire_core::group::ConfigError> {
        let at_least_one = |bytes: u64| NonZeroU64::new(bytes).unwrap_or(NonZeroU64::MIN);
        let all = || nics.iter().map(|nic| &nic.limits);
        let depth = all().map(|nic| nic.queue_depth).min().unwrap_or(0);
        let min_piece_bytes = all().map(|nic| nic.min_piece_bytes).max().unwrap_or(1);
        let config = GroupConfig {
            limits: PlanLimits {
                max_message_bytes: NonZeroU64::MAX,
                pages_per_piece: NonZeroU16::MAX,
                rule: SplitRule {
                    min_piece_bytes: at_least_one(min_piece_bytes),
                    granule_bytes: at_least_one(64),
                },
            },
            unreached,
            // A peer that does not take what it is sent leaves the NIC to others.
            peer_depth: (depth / 4).max(1),
            latency_bytes: self.latency_bytes,
            latency_reserve: (depth / 8).min(16),
            turn_bytes: 256 << 10,
            drain: self.drain,
            liveness: self.liveness_config(),
        };
        let nics: Vec<NicConfig> = nics
            .iter()
            .map(|nic| NicConfig {
                state: NicState { speed: nic.speed_gbps, healthy: true },
                queue_depth: nic.limits.queue_depth,
                takes: PieceLimits {
                    max_message_bytes: at_least_one(nic.limits.max_message_bytes),
                    pages_per_piece: NonZeroU16::new(nic.limits.pages_per_piece)
                        .unwrap_or(NonZeroU16::MIN),
                },
            })
            .collect();
        // Callers have theirs to themselves.
        let slots = usize::from(self.transfers) + usize::from(own_room);
        let transfers = (0..slots).map(|_| TransferSlot::new()).collect();
        let peers = (0..self.peers).map(|_| PeerSlot::new()).collect();
        let pieces = nics.iter().map(|nic| usize::from(nic.queue_depth)).sum();
        let lost = vec![LostSlot::new(); pieces].into_boxed_slice();
        DomainGroup::with_failover(config, &nics, transfers, peers, lost)
    }
}

struct Parts {
    inner: Inner,
    drive: Box<dyn Drive>,
}

impl Parts {
    /// The handle and the motor of an engine without a thread.
    fn polled(self, drain: Duration) -> (TransferEngine, Driver) {
        let inner = Arc::new(self.inner);
        let shared = Arc::clone(&inner.shared);
        let driver = Driver {
            engine: self.drive,
            _last: LastCallbacks(Arc::clone(&shared)),
            gates: Arc::clone(&inner.gates),
            registry: Arc::downgrade(&inner.registry),
            shared,
            drain,
            spare: None,
        };
        (TransferEngine { inner, deadline: None }, driver)
    }
}

/// What a sleeping engine is woken by.
fn eventfd() -> Result<OwnedFd, BuildError> {
    use rustix::event::EventfdFlags;
    let made = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    made.map_err(|errno| BuildError::Os { call: "eventfd", source: errno.into() })
}

fn spawn<R: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> R + Send + 'static,
) -> Result<JoinHandle<R>, BuildError> {
    thread::spawn(name, body).map_err(|source| BuildError::Os { call: "starting a thread", source })
}

/// Whether a thread of this process can be pinned to a CPU: tried by one that ends.
fn pinnable(cpu: usize) -> Result<(), BuildError> {
    let tried = spawn("immwire-pin", move || thread::pin(cpu))?.join();
    let allowed = "one of the machine's, which this process may use";
    let what = "the CPU that the engine's thread is pinned to";
    // It does not panic.
    match tried {
        Ok(Ok(())) => Ok(()),
        _ => Err(BuildError::Config { what, found: cpu, allowed }),
    }
}

/// Steps until told to stop, idling as configured.
fn run(engine: &mut dyn Drive, shared: &Shared, idle: IdlePolicy) {
    let limit = Duration::from_secs(1);
    let mut idle_since: Option<Instant> = None;
    let mut looks = 0_u32;
    while !shared.intake.is_stopping() {
        if engine.poll() {
            idle_since = None;
            continue;
        }
        std::hint::spin_loop();
        looks = looks.wrapping_add(1);
        if !looks.is_multiple_of(16) {
            continue;
        }
        let idle_for = idle_since.get_or_insert_with(Instant::now).elapsed();
        if idle_for < idle.spin {
            continue;
        }
        if idle.block && idle_for >= idle.spin.saturating_add(idle.yielding) {
            engine.sleep(limit);
            idle_since = None;
        } else {
            std::thread::yield_now();
        }
    }
}

struct Inner {
    shared: Arc<Shared>,
    registry: Arc<Registry>,
    address: NetAddr,
    nics: Vec<NicInfo>,
    max_message: usize,
    threads: Mutex<Vec<JoinHandle<()>>>,
    watch: Arc<Watch>,
    flags: Arc<Flags>,
    gates: Arc<Gates>,
    drain: Duration,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.intake.request_stop();
        // Before the threads end: they give memory back, which waits for streams.
        self.gates.stop();
        // After both: a watcher's callback may wait for what the engine does, or for a stream, and is waited for.
        self.watch.stop();
        let me = std::thread::current().id();
        let threads = std::mem::take(&mut *lock(&self.threads));
        // A waker may drop the last handle on the engine's own thread, which the other one waits for:
        // both end by themselves, right after.
        let is_engines = threads.first().is_some_and(|engine| engine.thread().id() == me);
        for thread in threads.into_iter().filter(|_| !is_engines) {
            // A callback may drop the last handle: its thread ends by itself, right after.
            if thread.thread().id() != me && thread.join().is_err() {
                tracing::error!("a thread of the engine panicked");
            }
        }
    }
}

/// Moves memory to peers by one-sided writes, and counts what arrives. A handle; cloning it is cheap.
///
/// When the last handle goes, transfers under way are stopped and drained, peers are left, and the
/// engine's threads are joined; a polled engine does so when its [`Driver`] is dropped, and takes nothing new from the last handle's end on
/// ([`Driver::is_stopping`]). Handles of transfers, counters and regions may live longer.
///
/// # Forks
///
/// An engine is its process's. In a forked child it has no threads, and what it shares with its peers is not mapped: there nothing of it, regions
/// and their parts included, may be used or dropped, but is left as it is ([`std::mem::forget`]); whoever calls `fork` sees to that. The
/// child may build engines of its own; with [GPUs](Builder::gpus) only if nobody in its parent had begun to use CUDA, which does not let a child use it
/// then (a process that is started anew, by `exec`, may). What an address ([`Region::as_ptr`]) of memory of [`TransferEngine::alloc`] points to can be
/// read and written there: where it is shared memory, it is the parent's, to which its peers go on to write, else a copy; and it is given back
/// to the system when such children have ended, too. Before Linux 5.13 what was
/// given to RDMA NICs is not there at all.
#[derive(Clone)]
pub struct TransferEngine {
    inner: Arc<Inner>,
    /// Given to each transfer submitted through this handle.
    deadline: Option<Duration>,
}

impl fmt::Debug for TransferEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferEngine")
            .field("address", &format_args!("{}", self.inner.address))
            .field("nics", &self.inner.nics.len())
            .finish_non_exhaustive()
    }
}

/// What an engine has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Pieces handed to NICs.
    pub posted: u64,
    /// Pieces that completed.
    pub completed: u64,
    /// Pieces that failed.
    pub failed: u64,
    /// Immediates that arrived for counters.
    pub immediates: u64,
    /// Immediates that were not counted: of a stale tag, or of no counter.
    pub refused_immediates: u64,
    /// Of those, the ones of a stale tag.
    pub stale_immediates: u64,
    /// Times that the engine went to sleep.
    pub sleeps: u64,
}

impl TransferEngine {
    /// Choices to be made.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// A handle to the same engine that gives each transfer a deadline: one that has not completed by
    /// then is stopped and drained. A message only while it waits for room, as for [`TransferEngine::submit_send`].
    #[must_use]
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        Self { inner: Arc::clone(&self.inner), deadline: Some(deadline) }
    }

    /// What peers need to reach this engine; as text it survives copying and pasting.
    #[must_use]
    pub fn address(&self) -> &NetAddr {
        &self.inner.address
    }

    /// The transport that leads from here to the engine at this address, by what the two addresses say. `None`: they have
    /// none in common. Opens nothing.
    #[must_use]
    pub fn transport_to(&self, address: &NetAddr) -> Option<ProviderKind> {
        let (ours, kind) = (&self.inner.address, address.provider());
        match (kind.sides(), span::side(ours, address)) {
            (Some((near, _)), Some(Side::Near)) => Some(near),
            (Some((_, far)), Some(Side::Far)) => Some(far),
            _ => (kind.sides().is_none() && kind == ours.provider()).then_some(kind),
        }
    }

    /// The NICs of the group.
    #[must_use]
    pub fn nics(&self) -> &[NicInfo] {
        &self.inner.nics
    }

    /// What was done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let (shared, stats) = (&self.inner.shared, &self.inner.shared.stats);
        Stats {
            posted: stats.posted.load(Ordering::Relaxed),
            completed: stats.completed.load(Ordering::Relaxed),
            failed: stats.failed.load(Ordering::Relaxed),
            immediates: stats.immediates.load(Ordering::Relaxed),
            refused_immediates: stats.refused_immediates.load(Ordering::Relaxed),
            stale_immediates: shared.counting.table().stale(),
            sleeps: stats.sleeps.load(Ordering::Relaxed),
        }
    }

    // ---- memory ----

    /// Zeroed memory that peers on this host can map: the fastest to write to.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    pub fn alloc(&self, bytes: usize) -> Result<Region, RegisterError> {
        self.inner.registry.alloc(bytes)
    }

    /// Memory of a GPU, zeroed, that peers on this host can open, and NICs be given; one of [`Builder::gpus`]. Rounded up to
    /// 2 MiB inside.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    pub fn alloc_gpu(&self, ordinal: u32, bytes: usize) -> Result<Region, RegisterError> {
        self.inner.registry.alloc_gpu(ordinal, bytes)
    }

    /// A word that GPUs store to, and a callback that is told the number before and the number now each time it has changed:
    /// how a kernel, inside of a CUDA graph too, says how far it is. Numbers that were stored in between are not told.
    ///
    /// Callbacks run one after another on a thread of their own, which takes a processor as long as anything is watched. One
    /// that holds the engine, to submit what has become ready, keeps it until the watcher is dropped.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let engine = immwire::TransferEngine::builder().gpus([0]).build()?;
    /// let layers = engine.alloc_uvm_watcher(|before, now| println!("layers {before}..{now} are ready"))?;
    /// // To the kernel: adds one to it when a layer is done.
    /// println!("{:#x}", layers.address());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`RegisterError::NoGpus`], [`RegisterError::Gpu`] with the driver's answer, [`RegisterError::Os`].
    pub fn alloc_uvm_watcher(
        &self,
        callback: impl Fn(u64, u64) + Send + Sync + 'static,
    ) -> Result<UvmWatcher, RegisterError> {
        let pin = |bytes| self.inner.registry.pin(bytes);
        self.inner.watch.add(pin, Box::new(callback))
    }

    /// A word, zero, that kernels of GPU `ordinal` look at, and that the CPU stores to: how a running kernel is told that it may
    /// go on, by a callback of a counter's, say. With GDRCopy it lies in the GPU's memory, else in pinned memory of the host
    /// ([`GpuFlag::place`]). The first one of a GPU takes a page, a millisecond or so; later ones nothing.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// let engine = immwire::TransferEngine::builder().gpus([0]).build()?;
    /// let (arrived, flag) = (engine.counter()?, engine.alloc_gpu_flag(0)?);
    /// // ... launches a kernel that spins on the word at `flag.address()`; and when 64 writes are there:
    /// arrived.wait(64, Duration::from_secs(1))?;
    /// flag.set(64);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`RegisterError::NoGpu`], [`RegisterError::Gpu`] with the driver's answer.
    pub fn alloc_gpu_flag(&self, ordinal: u32) -> Result<GpuFlag, RegisterError> {
        let registry = &self.inner.registry;
        // SAFETY: null is the GPU's default stream; it is not used.
        let stream = || unsafe { registry.stream(ordinal, std::ptr::null_mut()) };
        let device = || stream().map(|stream| stream.device().clone());
        let give_back = || self.give_back();
        self.inner.flags.alloc(ordinal, device, |bytes| registry.pin(bytes), give_back)
    }

    /// Orders what is submitted after this behind what is in a stream now: GPU `ordinal` copies nothing for this engine that
    /// it has not begun to, until the stream has come so far. So a source that kernels of the stream are writing may be
    /// submitted at once. Waits for nothing itself; some microseconds. Writes from other GPUs go on; those from the host to
    /// this GPU wait, too.
    ///
    /// Without it, whatever writes a source must have ended before the submission: streams of the application's know nothing
    /// of the engine's. Where NICs read the memory, the engine waits, and takes up no transfer from it that was submitted
    /// after this, before the stream has come so far; all others go on.
    ///
    /// Where GPUs copy themselves, on one host, what was submitted before waits, too, if its GPU has not been given it yet: because the peer is not
    /// up, or its region is written to for the first time, or the GPU's queues are full. So a stream that itself waits for what such a
    /// write brings about, an answer say, is not to be named before that write is done: else both wait for each other: until a deadline, if there is one.
    ///
    /// A stream that waits by other means than events may hold up others with which it shares one of the GPU's connections, as
    /// [`TransferEngine::wait_on_stream`] says: `CUDA_DEVICE_MAX_CONNECTIONS=32` is for that.
    ///
    /// # Safety
    ///
    /// `stream` is a stream (`cudaStream_t`, `CUstream`; null: the default one) of that GPU's primary context, which the CUDA
    /// runtime and PyTorch use.
    ///
    /// # Errors
    ///
    /// [`RegisterError::NoGpu`]; [`RegisterError::Capturing`]: what is in the stream is a graph's, and not to be waited for; or
    /// [`RegisterError::Gpu`] with the driver's answer.
    pub unsafe fn after_stream(
        &self,
        ordinal: u32,
        stream: *mut c_void,
    ) -> Result<(), RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.inner.registry.after_stream(ordinal, stream) }
    }

    /// Holds a stream of GPU `ordinal` back until `writes` have arrived at `counter`, and consumes them: what the stream is
    /// given after this finds their bytes. Waits for nothing itself, and no thread does; some microseconds. Early ones count.
    ///
    /// The stream goes on in any case: at the latest after `timeout`, or when the engine ends. The [`StreamWait`] says why;
    /// what runs in the stream cannot tell. Whoever polls an engine must go on polling it meanwhile. Calls of CUDA's that wait for
    /// all of a GPU (`cudaFree`, `cudaMallocHost`, the loading of a kernel; so does another engine of the process when it
    /// ends) wait for the stream, too, and may hold up what it waits for: until the deadline at most.
    ///
    /// CUDA does not see what a held stream waits for ("Stream Memory Operations", CUDA driver API), and may serve streams one after the other
    /// that share one of the GPU's connections: 8 by default, and an engine takes ten streams of each GPU. So it may hold up the very copy that
    /// the count depends on, until the deadline: set `CUDA_DEVICE_MAX_CONNECTIONS=32` in the environment before CUDA begins. That was not measured with the default.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # let kernels_stream: *mut std::ffi::c_void = std::ptr::null_mut();
    /// let engine = immwire::TransferEngine::builder().gpus([0]).build()?;
    /// let layer = std::sync::Arc::new(engine.counter()?);
    /// // SAFETY: a stream of GPU 0 that outlives the wait.
    /// let wait = unsafe { engine.wait_on_stream(0, kernels_stream, &layer, 64, Duration::from_secs(1)) }?;
    /// // ... launches kernels that read the 64 pages; and when their results are there:
    /// wait.poll().expect("the stream has gone on")?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    ///
    /// `stream` is a stream of that GPU's primary context, as for [`TransferEngine::after_stream`].
    ///
    /// # Errors
    ///
    /// [`StreamWaitError`]: nothing was consumed, and the stream does not wait.
    pub unsafe fn wait_on_stream(
        &self,
        ordinal: u32,
        stream: *mut c_void,
        counter: &Arc<ImmCounter>,
        writes: u64,
        timeout: Duration,
    ) -> Result<StreamWait, StreamWaitError> {
        // SAFETY: our caller's promise; the borrowing ends here.
        let stream = unsafe { self.inner.registry.stream(ordinal, stream) }?;
        self.inner.gates.hold(&stream, counter, writes, timeout)
    }

    /// As [`Memory::stream`](crate::provider::Memory::stream).
    ///
    /// # Safety
    ///
    /// As there.
    pub(crate) unsafe fn stream(
        &self,
        ordinal: u32,
        stream: *mut c_void,
    ) -> Result<immwire_cuda::Stream, RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.inner.registry.stream(ordinal, stream) }
    }

    /// As [`Memory::give_back`](crate::provider::Memory::give_back).
    pub(crate) fn give_back(&self) -> Option<GiveBack> {
        self.inner.registry.give_back()
    }

    /// As [`Memory::window`](crate::provider::Memory::window).
    pub(crate) fn window(&self, peer: PeerId, dst: &MrDesc, ordinal: u32) -> Option<Window> {
        self.inner.registry.window(peer, dst, ordinal)
    }

    /// Registers memory of the caller's; a GPU's too, if it is one of [`Builder::gpus`]: a range of one allocation, or over several of
    /// `cuMemCreate` that adjoin ([`immwire_cuda::ALLOCATIONS_MAX`]), some tens of microseconds for each. A range inside one that is
    /// registered costs a look-up.
    ///
    /// Host memory that is pinned for GPUs is pinned once, however many regions of the process overlap, and what was pinned in one go stays so as long
    /// as one of them has any of it. Pages of it that none has had for a time are refused until then ([`immwire_cuda::Error::LeftBehind`]):
    /// something else may be mapped there.
    ///
    /// # Safety
    ///
    /// `len` bytes from `ptr` are mapped, and no reference to them is used while peers may write. They
    /// stay so until [`Region::close`] of the last handle has returned `Ok`, be it after the engine has stopped; if peers may not write there
    /// ([`Rights::LOCAL`]), until then or until the engine has stopped. But of the host's memory, if the engine has [GPUs](Builder::gpus), the latter is
    /// not enough while one of them is busy, with whatever work: its driver unpins nothing meanwhile, which an engine that stops waits for
    /// no longer than some seconds. `close` waits for it.
    ///
    /// That the engine has stopped is not enough where peers may write: one on this host whose process is held up in the middle of a write
    /// (by a signal, a debugger or slow storage) ends that when it goes on. It is waited for, but for [`Builder::drain`] at most, a second at least.
    ///
    /// [`Region::read`] and [`Region::write`] go there, too, by any handle. So neither is called once the bytes are mapped no more, though handles
    /// may outlive the engine; while `read` runs nobody uses an exclusive reference to them, while `write` runs none at all, what the call itself
    /// was given included; and `write` is for bytes that may be written, so none behind a `&[u8]`. If `rights` let peers write, all of them may be written.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    pub unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Region, RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.inner.registry.register(ptr, len, rights) }
    }

    // ---- peers ----

    /// Starts to connect to a peer. Transfers to it may be submitted at once. The same engine added
    /// twice is the same peer.
    ///
    /// # Errors
    ///
    /// [`AddPeerError`].
    pub fn add_peer(&self, address: &NetAddr) -> Result<PeerId, AddPeerError> {
        let (reply, answer) = std::sync::mpsc::sync_channel(1);
        let address = Box::new(address.clone());
        self.inner.shared.intake.ask(Control::AddPeer { address, reply });
        answer.recv_timeout(ANSWER).unwrap_or(Err(AddPeerError::NoAnswer))
    }

    /// Waits until the peer is up.
    ///
    /// # Errors
    ///
    /// [`PeerError`].
    pub fn wait_peer(&self, peer: PeerId, timeout: Duration) -> Result<(), PeerError> {
        let waited = self.inner.shared.peers.wait(peer, timeout, |state| waits::is_up(peer, state));
        waited.unwrap_or(Err(PeerError::Timeout { peer, after: timeout }))
    }

    /// A future of the same, without a timeout: resolves when the peer is up, or will not be.
    pub fn peer_up(&self, peer: PeerId) -> PeerUp {
        PeerUp::new(Arc::clone(&self.inner.shared), peer)
    }

    /// Waits until the peer is down; returns whether it is.
    #[must_use]
    pub fn wait_peer_down(&self, peer: PeerId, timeout: Duration) -> bool {
        let down = |state| match state {
            Some(PeerState::Down(_)) | None => Some(()),
            Some(_) => None,
        };
        self.inner.shared.peers.wait(peer, timeout, down).is_some()
    }

    /// Where a peer stands; `None` if it is not, or no longer, known.
    #[must_use]
    pub fn peer_state(&self, peer: PeerId) -> Option<PeerState> {
        self.inner.shared.peers.get(peer)
    }

    /// The peers that are connecting or up, whoever called.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerId> {
        self.inner.shared.peers.live()
    }

    /// Leaves a peer: transfers to it are stopped, and end.
    pub fn remove_peer(&self, peer: PeerId) {
        self.inner.shared.intake.ask(Control::RemovePeer { peer });
    }

    /// Peers that barriers go to.
    #[must_use]
    pub fn add_peer_group(&self, peers: &[PeerId]) -> PeerGroup {
        PeerGroup(peers.into())
    }

    /// [`Builder::drain`].
    pub(crate) fn drain(&self) -> Duration {
        self.inner.drain
    }

    /// Whether the engine ends, or has ended, though there are handles: true before anything of a peer's or a transfer's ends by that.
    pub(crate) fn is_stopping(&self) -> bool {
        self.inner.shared.intake.is_stopping()
    }

    /// Takes a NIC out of use, or back into it. What was not posted on it goes by the others. One that was taken out of use stays so when its link
    /// goes and comes back.
    pub fn set_nic_health(&self, nic: u8, healthy: bool) {
        self.inner.shared.intake.ask(Control::SetNicHealth { nic, healthy });
    }

    // ---- counters ----

    /// A counter that is free.
    ///
    /// # Errors
    ///
    /// [`CounterTaken::AllTaken`].
    pub fn counter(&self) -> Result<ImmCounter, CounterTaken> {
        let shared = &self.inner.shared;
        let taken = CounterTaken::AllTaken { capacity: shared.counting.table().slots() };
        let tag = shared.take_counter(None).map_err(|_| taken)?;
        Ok(ImmCounter::new(Arc::clone(shared), tag))
    }

    /// The counter of a slot that both sides agreed on beforehand.
    ///
    /// # Errors
    ///
    /// [`CounterTaken`].
    pub fn counter_at(&self, slot: u16) -> Result<ImmCounter, CounterTaken> {
        let shared = &self.inner.shared;
        let capacity = shared.counting.table().slots();
        if slot >= capacity {
            return Err(CounterTaken::NoSuchCounter { slot, capacity });
        }
        let tag = shared.take_counter(Some(slot)).map_err(|_| CounterTaken::InUse { slot })?;
        Ok(ImmCounter::new(Arc::clone(shared), tag))
    }

    /// Calls `call` when `writes` immediates have arrived at `counter` and were consumed. One that holds the engine keeps it until then.
    ///
    /// # Errors
    ///
    /// Those of [`ImmCounter::on_count`].
    pub fn expect_imm_count(
        &self,
        counter: &Arc<ImmCounter>,
        writes: u64,
        call: impl FnOnce(Result<(), CountError>) + Send + 'static,
    ) -> Result<(), CountError> {
        counter.on_count(writes, call)
    }

    // ---- transfers ----

    /// Writes one contiguous range.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was posted.
    pub fn submit_single_write(&self, write: &SingleWrite<'_>) -> Result<Transfer, SubmitError> {
        self.submit(plan::Request::Single(single(write)), Some(write.src))
    }

    /// Writes pages, each to a place of its own. Every range is checked first: O(pages).
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was posted.
    pub fn submit_paged_writes(&self, write: &PagedWrite<'_>) -> Result<Transfer, SubmitError> {
        let pages = |pages: &Pages| plan::Pages {
            indices: pages.indices.clone(),
            stride: pages.stride,
            offset: pages.offset,
        };
        let request = plan::Request::Paged(plan::PagedWrite {
            peer: write.peer,
            page_bytes: write.page_bytes,
            src: write.src.local(),
            src_pages: pages(&write.src_pages),
            dst: *write.dst,
            dst_pages: pages(&write.dst_pages),
            imm: write.imm,
        });
        self.submit(request, Some(write.src))
    }

    /// Writes parts of one region, each to a peer of its own. Over each NIC they go in the order of the targets: one that is not up yet, or has no
    /// room, keeps what follows it waiting, and, if it never comes, from ever going.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was posted.
    pub fn submit_scatter(&self, write: &ScatterWrite<'_>) -> Result<Transfer, SubmitError> {
        let request = plan::Request::Scatter(plan::ScatterWrite {
            src: write.src.local(),
            targets: Targets::Writes(Arc::clone(&write.targets)),
            imm: write.imm,
        });
        self.submit(request, Some(write.src))
    }

    /// Tells every peer of the group that this engine has come here: one write each for the counter
    /// `imm`. To wait for the others, wait for as many on the own counter of the same tag. As of [`Self::submit_scatter`], a peer that is not up yet keeps
    /// those behind it from being told: wait for all ([`Self::wait_peer`]) before the first barrier.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was posted.
    pub fn submit_barrier(&self, group: &PeerGroup, imm: ImmTag) -> Result<Transfer, SubmitError> {
        let targets = Targets::Peers(Arc::clone(&group.0));
        self.submit(plan::Request::Barrier(plan::Barrier { targets, imm }), None)
    }

    /// Tells a peer that `writes` (1 to 255) have been done, without bytes.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was posted.
    pub fn submit_imm(
        &self,
        peer: PeerId,
        imm: ImmTag,
        writes: u16,
    ) -> Result<Transfer, SubmitError> {
        self.submit(plan::Request::Imm(plan::ImmWrite { peer, imm, writes }), None)
    }

    /// Says to a peer what only engines say to each other, true or not. For tests of peers that break rules: [`TransferEngine::submit_imm`]
    /// refuses it.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was posted.
    #[doc(hidden)]
    pub fn submit_lie(&self, peer: PeerId, imm: Imm) -> Result<Transfer, SubmitError> {
        let lie = plan::ControlWrite { peer, src: None, src_offset: 0, dst_offset: 0, len: 0, imm };
        self.submit(plan::Request::Control(lie), None)
    }

    /// Sends a message: bytes that the peer takes with [`TransferEngine::recv`]. Messages of one peer
    /// arrive in order. Done means that it lies in the peer's mailbox. Once there is room for it there it has its place in the order,
    /// and is sent whatever its sender wants by then: a deadline, or [`Transfer::cancel`], stops one that still waits for room.
    ///
    /// # Errors
    ///
    /// [`SubmitError`].
    pub fn submit_send(&self, peer: PeerId, bytes: &[u8]) -> Result<Transfer, SubmitError> {
        let (len, max) = (bytes.len(), self.inner.max_message);
        if len > max {
            return Err(SubmitError::MessageTooLarge { len, max });
        }
        let shared = &self.inner.shared;
        let (cell, ticket) = shared.take_cell()?;
        let deadline = shared.clock.deadline(self.deadline);
        shared.send(Command::Send { cell, ticket, peer, bytes: bytes.into(), deadline });
        Ok(Transfer::new(Arc::clone(shared), cell, ticket))
    }

    /// Posts receives: each of the next `count` messages is given to `call`, on the callback thread (in
    /// polled mode, by whoever polls). It is dropped after the last of them, or, of those that have come, once the engine has stopped.
    ///
    /// One that holds the engine, to answer, keeps it until it was given all of them: for good, if `count` has no end.
    pub fn submit_recvs(&self, count: usize, call: impl Fn(Message) + Send + Sync + 'static) {
        let call: OnMessage = Arc::new(call);
        self.inner.shared.post_recvs(count, call);
    }

    /// Waits for a message, whoever sends it.
    ///
    /// # Errors
    ///
    /// [`RecvError`].
    pub fn recv(&self, timeout: Duration) -> Result<Message, RecvError> {
        self.inner.shared.recv(timeout)
    }

    /// Waits until another transfer can be submitted, or the engine has stopped: until one has ended whose handle is dropped. `false`: `timeout` has
    /// passed first.
    #[must_use]
    pub fn wait_capacity(&self, timeout: Duration) -> bool {
        self.inner.shared.cells.wait_room(timeout)
    }

    /// A future of the same, without a timeout: resolves when another transfer can be submitted, or the engine has stopped.
    pub fn capacity(&self) -> Capacity {
        Capacity::new(Arc::clone(&self.inner.shared))
    }

    fn submit(&self, request: Request, src: Option<&Region>) -> Result<Transfer, SubmitError> {
        let registry = Arc::as_ptr(&self.inner.registry);
        if !src.is_none_or(|src| src.is_of(registry)) {
            return Err(SubmitError::ForeignRegion);
        }
        let request = checked(request, src)?;
        let shared = &self.inner.shared;
        let (cell, ticket) = shared.take_cell()?;
        let deadline = shared.clock.deadline(self.deadline);
        let (hold, behind) = (src.cloned(), src.map_or(0, Region::behind));
        shared.send(Command::Submit(Submission { cell, ticket, request, deadline, hold, behind }));
        Ok(Transfer::new(Arc::clone(shared), cell, ticket))
    }
}

/// A request that may be planned, in a way that its regions allow.
#[inline]
fn checked(request: Request, src: Option<&Region>) -> Result<Checked, plan::RequestError> {
    let in_runs = match (&request, src) {
        (plan::Request::Paged(write), Some(src)) => src.takes_runs(&write.dst),
        _ => true,
    };
    let checked = request.check()?;
    Ok(if in_runs { checked } else { checked.without_runs() })
}

/// A single write in the core's terms.
#[inline]
fn single(write: &SingleWrite<'_>) -> plan::SingleWrite {
    plan::SingleWrite {
        peer: write.peer,
        src: write.src.local(),
        src_offset: write.src_offset,
        dst: *write.dst,
        dst_offset: write.dst_offset,
        len: write.len,
        imm: write.imm,
    }
}

/// The polled engine's motor: nothing moves unless [`Driver::poll`] is called, heartbeats neither. Peers take an engine
/// for gone that was not polled for as long as their [`LivenessConfig::down_after`]. Dropping it stops the engine.
pub struct Driver {
    engine: Box<dyn Drive>,
    /// After the engine.
    _last: LastCallbacks,
    gates: Arc<Gates>,
    /// To know the engine's own regions by.
    registry: Weak<Registry>,
    shared: Arc<Shared>,
    drain: Duration,
    /// Taken beforehand, for the next small write.
    spare: Option<(u16, Ticket)>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

impl Driver {
    /// One step: takes what was submitted, posts, reports what arrived, runs callbacks. Never waits.
    /// Returns whether anything was done.
    pub fn poll(&mut self) -> bool {
        let busy = self.engine.poll_seldom();
        busy | self.shared.callbacks.run_pending()
    }

    /// As [`Region::close`], polling meanwhile: some transports ask peers to stop, and have to hear that they
    /// did.
    ///
    /// # Errors
    ///
    /// [`CloseError`].
    pub fn close_region(
        &mut self,
        mut region: Region,
        patience: Duration,
    ) -> Result<(), CloseError> {
        let deadline = Instant::now().checked_add(patience);
        loop {
            match region.close(Duration::ZERO) {
                Err(CloseError::StillWriting { region: back, error }) => {
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return Err(CloseError::StillWriting { region: back, error });
                    }
                    region = back;
                    self.poll();
                }
                closed => return closed,
            }
        }
    }

    /// Whether the last handle of the engine is gone: nothing new can be asked of it, and dropping this is what is left to do. Until then all that is under
    /// way goes on, but for streams that wait ([`TransferEngine::wait_on_stream`]) and watchers, which the last handle ends.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.shared.intake.is_stopping()
    }

    /// The clock that the engine reads.
    pub(crate) fn clock(&self) -> &Clock {
        &self.shared.clock
    }

    /// Looks at the clock; to be called when it was stepped, before [`Driver::poll`].
    pub(crate) fn wake(&mut self) {
        self.engine.wake();
    }

    /// When a poll has something to do, at the earliest, if nothing else happens.
    pub(crate) fn next_timeout(&self) -> Time {
        self.engine.next_timeout()
    }

    /// As [`TransferEngine::submit_single_write`], from the thread that polls: the write is posted before
    /// this returns, if nothing stands before it; one of up to 4 KiB, on a NIC with 16 under way, with those that follow, and at the
    /// latest at the next poll (`immwire_core::doorbell`). Up to 64 KiB with an immediate, to memory of this host that both sides map, it is
    /// done then, and takes none of the [`Builder::transfers`]: no [`SubmitError::Full`] says that it is time to poll.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was posted.
    pub fn submit_single_write(
        &mut self,
        write: &SingleWrite<'_>,
    ) -> Result<Transfer, SubmitError> {
        let SingleWrite { peer, src, src_offset, dst, dst_offset, len, imm } = *write;
        if !src.is_of(self.registry.as_ptr()) {
            return Err(SubmitError::ForeignRegion);
        }
        let part = src.part(src_offset, len).map(|(src, src_offset)| plan::SingleRef {
            peer,
            src,
            src_offset,
            dst,
            dst_offset,
            len,
            imm,
        });
        if part.is_some_and(|write| self.engine.write_at_once(&write)) {
            return Ok(Transfer::done(Arc::clone(&self.shared)));
        }
        let (cell, ticket) = self.take_cell()?;
        if part.is_some_and(|write| self.engine.express(&write, cell, ticket, src)) {
            // For the next one; without one now, it will be asked for then.
            self.spare = self.shared.take_cell().ok();
            return Ok(Transfer::new(Arc::clone(&self.shared), cell, ticket));
        }
        self.spare = Some((cell, ticket));
        let submitted = self.submit(plan::Request::Single(single(write)), Some(src));
        if submitted.is_err() {
            self.give_spare_back();
        }
        submitted
    }

    /// So that whoever submits otherwise has all places.
    fn give_spare_back(&mut self) {
        if let Some((cell, ticket)) = self.spare.take() {
            self.shared.cells.put_back(cell, ticket);
        }
    }

    fn take_cell(&mut self) -> Result<(u16, Ticket), SubmitError> {
        // One that was taken before the engine began to stop is none to begin with.
        let spare = self.spare.take_if(|_| !self.shared.intake.is_stopping());
        spare.map_or_else(|| self.shared.take_cell(), Ok)
    }

    /// As [`TransferEngine::submit_imm`], from the thread that polls.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; nothing was posted.
    pub fn submit_imm(
        &mut self,
        peer: PeerId,
        imm: ImmTag,
        writes: u16,
    ) -> Result<Transfer, SubmitError> {
        self.submit(plan::Request::Imm(plan::ImmWrite { peer, imm, writes }), None)
    }

    fn submit(&mut self, request: Request, src: Option<&Region>) -> Result<Transfer, SubmitError> {
        let registry = self.registry.as_ptr();
        if !src.is_none_or(|src| src.is_of(registry)) {
            return Err(SubmitError::ForeignRegion);
        }
        let request = checked(request, src)?;
        let (cell, ticket) = self.take_cell()?;
        let (hold, behind) = (src.cloned(), src.map_or(0, Region::behind));
        let deadline = Time::NEVER;
        self.engine.submit(Submission { cell, ticket, request, deadline, hold, behind });
        Ok(Transfer::new(Arc::clone(&self.shared), cell, ticket))
    }

    /// As [`TransferEngine::add_peer`], from the thread that polls.
    ///
    /// # Errors
    ///
    /// [`AddPeerError`].
    pub fn add_peer(&mut self, address: &NetAddr) -> Result<PeerId, AddPeerError> {
        self.engine.add_peer(address)
    }

    /// Polls until `done` returns something, or `timeout` has passed. On a clock that is stepped no time
    /// passes here, so it returns after some polls; see [`crate::sim::Fabric::run_until`].
    pub fn run_until<R>(
        &mut self,
        timeout: Duration,
        mut done: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let start = Instant::now();
        loop {
            for look in 0..64 {
                // What arrives is looked at more often than what is to be done.
                let arrived = self.engine.arrivals();
                if let Some(result) = done() {
                    return Some(result);
                }
                if arrived || look % LOOKS_PER_STEP == 0 {
                    self.engine.progress();
                    self.shared.callbacks.run_pending();
                    if let Some(result) = done() {
                        return Some(result);
                    }
                }
                // Lets the other thread of this core, which may be the peer's, have it.
                std::hint::spin_loop();
            }
            if self.shared.clock.is_stepped() || start.elapsed() >= timeout {
                return None;
            }
        }
    }

    /// Polls until the transfer has ended.
    ///
    /// # Errors
    ///
    /// [`WaitTimeout`]: it is still under way, and its memory in use.
    pub fn wait(&mut self, transfer: &Transfer, timeout: Duration) -> Result<End, WaitTimeout> {
        let ended = self.run_until(timeout, || transfer.poll_end());
        ended.ok_or(WaitTimeout { after: timeout })
    }

    /// Polls until `writes` have arrived at `counter`, and consumes them.
    ///
    /// # Errors
    ///
    /// [`CountError`].
    pub fn wait_count(
        &mut self,
        counter: &ImmCounter,
        writes: u64,
        timeout: Duration,
    ) -> Result<(), CountError> {
        let taken = self.run_until(timeout, || match counter.try_take(writes) {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(error) => Some(Err(error)),
        });
        // Not reached: asking once more, with no time left, says who is missing.
        taken.unwrap_or_else(|| counter.late(writes, timeout))
    }

    /// Polls until the peer is up.
    ///
    /// # Errors
    ///
    /// [`PeerError`].
    pub fn wait_peer(&mut self, peer: PeerId, timeout: Duration) -> Result<(), PeerError> {
        let shared = Arc::clone(&self.shared);
        let waited = self.run_until(timeout, || waits::is_up(peer, shared.peers.get(peer)));
        waited.unwrap_or(Err(PeerError::Timeout { peer, after: timeout }))
    }

    /// Polls until a message is there.
    ///
    /// # Errors
    ///
    /// [`RecvError`].
    pub fn recv(&mut self, timeout: Duration) -> Result<Message, RecvError> {
        let shared = Arc::clone(&self.shared);
        let message = self.run_until(timeout, || shared.inbox.try_take());
        message.ok_or(RecvError::Timeout { after: timeout })
    }

    /// Sleeps until there may be something to poll; at most `limit`. Not at all, once the last handle is gone ([`Driver::is_stopping`]).
    pub fn sleep(&mut self, limit: Duration) {
        self.engine.sleep(limit);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.give_spare_back();
        // As in `Inner`.
        self.gates.stop();
        self.engine.shut_down(self.drain);
    }
}

/// Runs, when it is dropped, the callbacks of what ended with an engine.
struct LastCallbacks(Arc<Shared>);

impl Drop for LastCallbacks {
    fn drop(&mut self) {
        self.0.callbacks.run_pending();
    }
}
