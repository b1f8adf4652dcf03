//! A simulated fabric: real engines in one process, on NICs that exist in numbers only, on a clock that
//! is stepped.
//!
//! For tests of what is built on engines, and for predictions. The engines are the shipped ones, polled
//! by their callers; only their provider and their clock are simulated. Nothing sleeps, nothing reads
//! the machine's clock, and a run follows from the seed and the calls made: the same bytes, in the same
//! order, at the same times. Any number of engines: 512 fit into one process, given a [`crate::Builder`]
//! with few transfers and counters and a small mailbox for each.
//!
//! ```
//! use std::time::Duration;
//! use immwire::sim::{Fabric, FabricConfig, NicModel};
//! use immwire::{End, SingleWrite, TransferEngine};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let fabric = Fabric::new(7, FabricConfig::calm());
//! let nics = [NicModel::CONNECTX7; 2];
//! let (a, driver_a) = fabric.engine(TransferEngine::builder(), &nics)?;
//! let (b, driver_b) = fabric.engine(TransferEngine::builder(), &nics)?;
//! let mut drivers = [driver_a, driver_b];
//!
//! let (src, dst, counter) = (a.alloc(1 << 20)?, b.alloc(1 << 20)?, b.counter()?);
//! let peer = drivers[0].add_peer(b.address())?;
//! let transfer = a.submit_single_write(&SingleWrite {
//!     peer, src: &src, src_offset: 0, dst: &dst.desc(), dst_offset: 0, len: 1 << 20,
//!     imm: Some(counter.tag()),
//! })?;
//! let second = Duration::from_secs(1);
//! assert_eq!(fabric.wait(&mut drivers, &transfer, second)?, End::Done);
//! fabric.wait_count(&mut drivers, &counter, 1, second)?;
//! assert!(fabric.now().as_nanos() < 150_000, "two handshakes' ways, 1 MiB over two NICs");
//! # Ok(())
//! # }
//! ```
//!
//! # What is modelled
//!
//! - *Time of NICs*: each carries its model's goodput in each direction, one message after the other, so
//!   that incast shows at the receiver; a fixed latency between two NICs; a fixed cost of each message.
//! - *Time of processors*: posting a message and polling a completion or an immediate keep their engine
//!   busy; it is not polled meanwhile.
//! - *The provider's contract, at its limits*: bytes are moved in parts, at moments of their own; sources
//!   are read until the completion; immediates come after the bytes of their own write, and in any order
//!   where the NIC's [`Order`] has none; completions later still; posts accept a prefix.
//! - *Runs of pages*, by NICs whose model takes them ([`NicModel::pages_per_piece`]): one message, whose parts are
//!   pages and parts of pages.
//! - *Faults*: late messages, full queues, NICs that go and come back, single paths cut, engines killed
//!   (noticed or not) and new ones in their place, calls refused or slow, registrations that fail.
//!   What was in flight on a lost path has an unknown fate: some has arrived and nobody said so, some is
//!   on its way until the receiver fences the path, the rest is lost; in order, what arrives is a
//!   prefix, and a receipt says how long it is; without order there is no receipt.
//!
//! # What is not
//!
//! - The switches: no congestion but at the ends, no routing, no packets. A NIC serves whole messages: a
//!   large one holds up what comes behind it.
//! - The processor's other work: planning and scheduling run in no time, as do callbacks and memory
//!   copies. PCIe, GPUs and caches do not exist.
//! - Devices' own limits (connections cached on the NIC, receive queues, retries) and their errors, but
//!   that a region which is not there refuses a message.
//! - A refused message leaves its connection intact; on a reliable connection it would not.
//!
//! Engines on the fabric wait through it ([`Fabric::run_until`] and its kin): the waits of handles block
//! on the machine's clock, and those of [`Driver`] let no time pass.

mod memory;
mod model;
mod net;
mod places;
pub mod program;
mod provider;
mod random;
#[cfg(test)]
mod tests;
mod trace;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use immwire_core::id::{MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::peer::PeerState;
use immwire_core::wire::{NetAddr, NicAddr, ProviderKind};

pub use self::memory::SimMemory;
pub use self::model::{FabricConfig, NicModel, Order};
pub use self::provider::SimProvider;
pub use self::trace::{TraceEvent, What};

use self::net::Net;
use crate::clock::{Clock, Stepper};
use crate::counter::ImmCounter;
use crate::engine::{Builder, Driver, TransferEngine};
use crate::error::{BuildError, CountError, End, PeerError, WaitTimeout};
use crate::provider::{NicInfo, NicLimits, Path};
use crate::sync::lock;
use crate::transfer::Transfer;

/// What engines and fabric share.
#[derive(Debug)]
struct Core {
    net: Mutex<Net>,
    stepper: Arc<Stepper>,
}

/// How an engine dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Death {
    /// Its peers lose the connection, each within so long.
    NoticedWithin(Duration),
    /// Nobody is told: its peers learn of it by silence.
    Silent,
}

/// What an engine has posted, and heard, since its figures were reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineStats {
    /// When its processor began to post the first message; [`Time::NEVER`] if there was none.
    pub first_post: Time,
    /// When it had posted the last one.
    pub last_post: Time,
    /// Messages.
    pub posted: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When the first message arrived here; [`Time::NEVER`] if none has.
    pub first_arrival: Time,
}

impl Default for EngineStats {
    fn default() -> Self {
        Self {
            first_post: Time::NEVER,
            last_post: Time::ZERO,
            posted: 0,
            bytes: 0,
            first_arrival: Time::NEVER,
        }
    }
}

/// What engines have done that a provider relies on them not to do. All zero, or an engine is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Breaches {
    /// Messages whose source was withdrawn or released before they were completed.
    pub sources_gone: u64,
    /// Messages posted on a path after the engine was told that it is broken.
    pub posted_on_broken_paths: u64,
}

/// Ways in which the fabric breaks its contract, to show that a check notices.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sabotage {
    /// An immediate is reported before its bytes.
    ImmediateFirst,
    /// An immediate is reported twice.
    ImmediateTwice,
    /// An immediate is not reported.
    ImmediateLost,
    /// A completion is not reported.
    CompletionLost,
    /// A completion is reported twice.
    CompletionTwice,
    /// The bytes of a write are written again after its completion.
    WriteAfterDone,
    /// The last byte of a part is not written.
    TailLost,
    /// What comes late to a withdrawn region is written.
    RevokeIgnored,
    /// A fenced path goes on to deliver.
    FenceLeaks,
    /// A receipt says that one less has arrived.
    ReceiptShort,
}

impl Sabotage {
    /// All that there are.
    pub const ALL: [Self; 10] = [
        Self::ImmediateFirst,
        Self::ImmediateTwice,
        Self::ImmediateLost,
        Self::CompletionLost,
        Self::CompletionTwice,
        Self::WriteAfterDone,
        Self::TailLost,
        Self::RevokeIgnored,
        Self::FenceLeaks,
        Self::ReceiptShort,
    ];
}

/// A fabric, to which engines are added. A handle; cloning it is cheap. See the [module](self).
#[derive(Clone)]
pub struct Fabric {
    core: Arc<Core>,
    fd: Arc<Mutex<Option<Arc<OwnedFd>>>>,
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl Fabric {
    /// A fabric without engines, at instant zero.
    #[must_use]
    pub fn new(seed: u64, config: FabricConfig) -> Self {
        let stepper = Arc::new(Stepper::default());
        let net = Mutex::new(Net::new(seed, config, Arc::clone(&stepper)));
        Self { core: Arc::new(Core { net, stepper }), fd: Arc::default() }
    }

    fn with<R>(&self, run: impl FnOnce(&mut Net) -> R) -> R {
        run(&mut lock(&self.core.net))
    }

    /// A new engine on the fabric, with these NICs (1 to 8; the builder's own number is left aside). Its
    /// number is that of engines made before it.
    ///
    /// # Errors
    ///
    /// [`BuildError`].
    pub fn engine(
        &self,
        builder: Builder,
        nics: &[NicModel],
    ) -> Result<(TransferEngine, Driver), BuildError> {
        let (provider, clock) = self.provider(nics)?;
        builder.build_polled_on(provider, clock)
    }

    fn provider(&self, nics: &[NicModel]) -> Result<(SimProvider, Clock), BuildError> {
        let refused = || BuildError::Config { what: "nics", found: nics.len(), allowed: "1 to 8" };
        if nics.is_empty() || nics.len() > MAX_NICS {
            return Err(refused());
        }
        let fd = self.fd()?;
        let (engine, id, address) = self.with(|net| net.join(nics));
        let info = |(index, nic): (usize, &NicModel)| NicInfo {
            name: format!("{}-{index}", nic.name),
            speed_gbps: nic.speed_gbps,
            limits: NicLimits {
                max_message_bytes: nic.max_message_bytes,
                min_piece_bytes: nic.min_piece_bytes,
                queue_depth: nic.queue_depth,
                inline_bytes: 0,
                max_sge: 1,
                batch_bytes: NicLimits::BATCH_BYTES,
                together: nic.together,
                pages_per_piece: nic.pages_per_piece,
            },
        };
        let infos = nics.iter().enumerate().map(info).collect();
        let address = heapless::Vec::from_slice(&address).map_err(|_| refused())?;
        let of = |nic: &NicModel| NicAddr { speed_gbps: nic.speed_gbps, address: address.clone() };
        let addresses: Vec<NicAddr> = nics.iter().map(of).collect();
        let address = NetAddr::new(ProviderKind::Sim, id, &addresses).map_err(|_| refused())?;
        let provider = SimProvider::new(Arc::clone(&self.core), engine, infos, address, fd);
        Ok((provider, Clock::stepped(Arc::clone(&self.core.stepper), engine)))
    }

    /// A file that is never readable, for those who ask a provider for one.
    fn fd(&self) -> Result<Arc<OwnedFd>, BuildError> {
        let mut fd = lock(&self.fd);
        if let Some(fd) = &*fd {
            return Ok(Arc::clone(fd));
        }
        let made = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
            .map_err(|errno| BuildError::Os { call: "eventfd", source: errno.into() })?;
        Ok(Arc::clone(fd.insert(Arc::new(made))))
    }

    // ---- time ----

    /// The instant that it is on the fabric.
    #[must_use]
    pub fn now(&self) -> Time {
        self.core.stepper.now()
    }

    /// When the next event happens; `None` if none lies ahead.
    #[must_use]
    pub fn next_event(&self) -> Option<Time> {
        self.with(|net| net.next_event())
    }

    /// Lets the next event happen and advances the clock to it; returns when that was. Engines that it
    /// concerns are polled by [`Fabric::poll`]. O(log events).
    pub fn step(&self) -> Option<Time> {
        self.with(Net::step)
    }

    /// Events that have happened so far.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.with(|net| net.delivered())
    }

    /// Polls those of `drivers` that have been given something to do, until none has; no time passes.
    /// Returns whether any was polled.
    pub fn poll(&self, drivers: &mut [Driver]) -> bool {
        let positions = self.positions(drivers);
        self.poll_ready(drivers, &positions)
    }

    /// Where in the list the engines are, by number.
    fn positions(&self, drivers: &[Driver]) -> Vec<Option<usize>> {
        let mut positions = Vec::new();
        for (position, driver) in drivers.iter().enumerate() {
            let engine = driver.clock().engine_of(&self.core.stepper);
            let Some(engine) = engine.and_then(|engine| usize::try_from(engine).ok()) else {
                continue;
            };
            if positions.len() <= engine {
                positions.resize(engine + 1, None);
            }
            if let Some(place) = positions.get_mut(engine) {
                *place = Some(position);
            }
        }
        positions
    }

    fn poll_ready(&self, drivers: &mut [Driver], positions: &[Option<usize>]) -> bool {
        let (mut any, mut absent) = (false, Vec::new());
        while let Some(engine) = self.core.stepper.next() {
            let place = usize::try_from(engine).ok().and_then(|at| positions.get(at).copied());
            let Some(driver) = place.flatten().and_then(|at| drivers.get_mut(at)) else {
                absent.push(engine);
                continue;
            };
            if self.with(|net| net.busy(engine)) {
                continue;
            }
            any = true;
            driver.wake();
            // An engine whose processor has become busy goes on when it is free.
            while driver.poll() && !self.with(|net| net.busy(engine)) {}
            let timeout = driver.next_timeout();
            if timeout != Time::NEVER {
                let soon = self.now().after(Duration::from_nanos(1));
                self.with(|net| net.wake_at(engine, timeout.max(soon)));
            }
        }
        // They still want to be polled, but for those that are gone.
        absent.retain(|&engine| self.with(|net| net.is_alive(engine)));
        absent.into_iter().for_each(|engine| self.core.stepper.mark(engine));
        any
    }

    /// Lets time pass, and polls the engines, until `done` returns something, or `timeout` has passed on
    /// the fabric's clock. `done` is asked first, and then whenever an engine was polled. Engines whose
    /// drivers are not given stand still.
    ///
    /// The cost grows with events, not with engines, but for a look at each at the beginning.
    pub fn run_until<R>(
        &self,
        drivers: &mut [Driver],
        timeout: Duration,
        mut done: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let deadline = self.now().after(timeout);
        let positions = self.positions(drivers);
        // Their callers may have given any of them something to do.
        for engine in (0..).zip(&positions).filter_map(|(engine, at)| at.map(|_| engine)) {
            self.core.stepper.mark(engine);
        }
        loop {
            self.poll_ready(drivers, &positions);
            let result = done();
            if result.is_some() {
                return result;
            }
            loop {
                match self.next_event() {
                    Some(at) if at <= deadline => self.step(),
                    _ => {
                        self.core.stepper.advance(deadline);
                        return None;
                    }
                };
                if self.poll_ready(drivers, &positions) {
                    break;
                }
            }
            let result = done();
            if result.is_some() {
                return result;
            }
        }
    }

    /// Lets so much time pass, and polls the engines.
    pub fn run_for(&self, drivers: &mut [Driver], time: Duration) {
        let _never = self.run_until(drivers, time, || None::<()>);
    }

    /// Lets time pass until the transfer has ended.
    ///
    /// # Errors
    ///
    /// [`WaitTimeout`]: it is still under way, and its memory in use.
    pub fn wait(
        &self,
        drivers: &mut [Driver],
        transfer: &Transfer,
        timeout: Duration,
    ) -> Result<End, WaitTimeout> {
        let ended = self.run_until(drivers, timeout, || transfer.poll_end());
        ended.ok_or(WaitTimeout { after: timeout })
    }

    /// Lets time pass until `writes` have arrived at `counter`, and consumes them.
    ///
    /// # Errors
    ///
    /// [`CountError`]; a time-out names who has sent what.
    pub fn wait_count(
        &self,
        drivers: &mut [Driver],
        counter: &ImmCounter,
        writes: u64,
        timeout: Duration,
    ) -> Result<(), CountError> {
        let taken = self.run_until(drivers, timeout, || match counter.try_take(writes) {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(error) => Some(Err(error)),
        });
        // Not reached: asking once more, with no time left, says who is missing.
        taken.unwrap_or_else(|| counter.late(writes, timeout))
    }

    /// Lets time pass until `engine` sees its peer up.
    ///
    /// # Errors
    ///
    /// [`PeerError`].
    pub fn wait_peer(
        &self,
        drivers: &mut [Driver],
        engine: &TransferEngine,
        peer: PeerId,
        timeout: Duration,
    ) -> Result<(), PeerError> {
        let state = || match engine.peer_state(peer) {
            Some(PeerState::Up | PeerState::Suspect) => Some(Ok(())),
            Some(PeerState::Down(reason)) => Some(Err(PeerError::Down { peer, reason })),
            Some(PeerState::Connecting) => None,
            None => Some(Err(PeerError::Unknown { peer })),
        };
        let waited = self.run_until(drivers, timeout, state);
        waited.unwrap_or(Err(PeerError::Timeout { peer, after: timeout }))
    }

    // ---- faults ----

    /// The number of the engine at that address, if it is one of this fabric's.
    #[must_use]
    pub fn number_of(&self, address: &NetAddr) -> Option<u32> {
        self.with(|net| net.number_of(address.engine()))
    }

    /// Changes what goes wrong by itself from now on.
    pub fn configure(&self, change: impl FnOnce(&mut FabricConfig)) {
        self.with(|net| change(net.config_mut()));
    }

    /// The engine is gone this instant: it is told nothing any more, and what it had on its way arrives
    /// in part. Drop its driver then. It comes back as a new engine ([`Fabric::engine`]).
    pub fn kill(&self, engine: u32, death: Death) {
        self.with(|net| net.kill(engine, death));
    }

    /// A NIC goes down: its engine is told at once, those who write to it within their models' time.
    pub fn nic_down(&self, engine: u32, nic: NicIndex) {
        self.with(|net| net.nic_down(engine, nic));
    }

    /// A NIC is back. Paths that were settled are restored after their models' time.
    pub fn nic_up(&self, engine: u32, nic: NicIndex) {
        self.with(|net| net.nic_up(engine, nic));
    }

    /// Cuts one path from `engine` to its peer: the engine is told within its model's time.
    pub fn cut_path(&self, engine: u32, peer: PeerId, path: Path) {
        self.with(|net| net.cut(engine, peer, path));
    }

    /// Mends a path that was cut; it is restored once it is settled.
    pub fn mend_path(&self, engine: u32, peer: PeerId, path: Path) {
        self.with(|net| net.mend(engine, peer, path));
    }

    /// Breaks the fabric's contract from now on, one time in so many that it could; `None` stops that.
    #[doc(hidden)]
    pub fn sabotage(&self, sabotage: Option<(Sabotage, u32)>) {
        self.with(|net| net.sabotage(sabotage));
    }

    /// How often it did.
    #[doc(hidden)]
    #[must_use]
    pub fn sabotaged(&self) -> u64 {
        self.with(|net| net.sabotaged())
    }

    // ---- what happened ----

    /// Keeps the last `capacity` events from now on; 0 keeps none, which is how it begins.
    pub fn keep_trace(&self, capacity: usize) {
        self.with(|net| net.trace_mut().keep(capacity));
    }

    /// The events that were kept, the oldest first.
    #[must_use]
    pub fn trace(&self) -> Vec<TraceEvent> {
        self.with(|net| net.trace().events())
    }

    /// What an engine has posted since the figures were reset.
    #[must_use]
    pub fn stats(&self, engine: u32) -> EngineStats {
        self.with(|net| net.stats(engine))
    }

    /// Forgets what engines have posted.
    pub fn reset_stats(&self) {
        self.with(Net::reset_stats);
    }

    /// What engines have done that they must not.
    #[must_use]
    pub fn breaches(&self) -> Breaches {
        self.with(|net| net.breaches())
    }
}
