//! `TransferEngine`: arguments in, requests out.
//!
//! # Invariants
//!
//! - An engine's threads are never waited for by one of them, nor by a callback that they wait for (`sync`), nor while attached to the interpreter, which
//!   they may need to end. Nor is a GPU's driver, which waits for what others give it, and pins memory for as
//!   long as that takes.
//! - Memory that was registered is let go of, but for what was closed, only when they have been joined, and nobody writes there (`region`).
//! - Who waits for an engine's end hears signals, and the interpreter's end waits for all of them some seconds at most: engines are stopped by
//!   threads of their own (`Stopping`).
//! - A thread that closes an engine inside of a call of its own on it does not wait for that call: where Python code runs, an
//!   object's property or a signal's handler, it may do that. The call stops the engine as it returns.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::ptr::with_exposed_provenance_mut;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use immwire::shm::{ForeignPath, GroupKey};
use immwire::topology::{Pairing, Table};
use immwire::{
    Builder, IdlePolicy, ImmTag, LibfabricOptions, PagedWrite, Pages, Rights, ScatterWrite,
    SingleWrite, Staging, Transport, VerbsOptions,
};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};

use crate::buffer::View;
use crate::counter::ImmCounter;
use crate::errors;
use crate::flag::GpuFlag;
use crate::fork::{self, Owned};
use crate::memory::{self, Keep};
use crate::messages::{Mailbox, Recv};
use crate::moe::Exchanges;
use crate::pages;
use crate::peers::{Room, Up};
use crate::region::{self, Lingering, RegionBase};
use crate::streams::StreamWait;
use crate::sync::{Closing, call_back, is_awaited, is_engines, lock, wait};
use crate::transfer::{Caller, Manner, Transfer};
use crate::values::{Message, MrDesc, NetAddr, Nic, PeerGroup, PeerId, Stats, Target, seconds};
use crate::waiting::Waiting;
use crate::watcher::UvmWatcher;

/// How long the interpreter's end waits for engines that other threads are using.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long it waits, in all, for engines that stop; and how long the last user of one does that nobody has closed.
const STOPPED: Duration = Duration::from_secs(5);

/// Transports by name.
const PROVIDERS: [&str; 3] = ["shm", "libfabric", "verbs"];

/// A running engine and what must not outlive it, or be outlived by it.
pub(crate) struct Core {
    pub(crate) engine: immwire::TransferEngine,
    pub(crate) manner: Manner,
    pub(crate) mailbox: Arc<Mailbox>,
    /// It writes from and to the memory of GPUs.
    has_gpus: bool,
    lingering: Arc<Lingering>,
    /// They hold handles of the engine.
    pub(crate) exchanges: Exchanges,
}

impl Core {
    /// Stops the engine: its transfers end, its threads are joined, and then what nobody uses of its memory is let go of.
    fn stop(self) {
        let Self { engine, manner, mailbox, lingering, exchanges, .. } = self;
        exchanges.close();
        // Callbacks that the engine's end waits for may be waiting for messages.
        mailbox.dismiss();
        // The last handle: the others are made for one call each, and `Core` is counted.
        drop(engine);
        mailbox.close();
        manner.caller.end();
        lingering.stop();
    }
}

/// A counted [`Core`] that is stopped when the last one is dropped, wherever that is.
pub(crate) struct Running(Option<Core>);

impl std::ops::Deref for Running {
    type Target = Core;

    #[expect(clippy::expect_used, reason = "only `drop` takes it")]
    fn deref(&self) -> &Core {
        self.0.as_ref().expect("an engine that was not dropped")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(core) = self.0.take() else { return };
        let mut core = Some(core);
        let mut stop = || core.take().map(Stopping::begin);
        if is_awaited() {
            // This thread would wait for itself.
            match stop() {
                Some(Ok(stopping)) => stopping.leave(),
                // What cannot be stopped here goes on.
                core => std::mem::forget(core),
            }
            return;
        }
        let stopped = Python::try_attach(|py| {
            py.detach(|| match stop() {
                Some(Ok(stopping)) if !stopping.is_over(STOPPED) => stopping.leave(),
                Some(Ok(stopping)) => stopping.join(),
                Some(Err(Some(core))) => core.stop(),
                Some(Err(None)) | None => {}
            });
        });
        if stopped.is_none() {
            // The interpreter is ending: callbacks could not be waited for. The kernel frees the rest.
            std::mem::forget(core);
        }
    }
}

/// An engine that a thread of its own stops: callbacks under way are waited for, and they may take for ever.
struct Stopping {
    thread: JoinHandle<()>,
    /// Nothing comes: it ends with the thread.
    over: Receiver<()>,
    made_in: u32,
}

/// Those that nobody waits for any more, until the interpreter ends.
static LEFT: Mutex<Vec<Stopping>> = Mutex::new(Vec::new());

impl Stopping {
    /// Gives the engine back, as it was, where there can be no thread.
    fn begin(core: Core) -> Result<Self, Option<Box<Core>>> {
        let (held, over) = mpsc::channel::<()>();
        let core = Arc::new(Mutex::new(Some(Box::new(core))));
        let its = Arc::clone(&core);
        let thread = std::thread::Builder::new().name("immwire-reaper".into()).spawn(move || {
            let core = lock(&its).take();
            drop(its);
            if let Some(core) = core {
                core.stop();
            }
            drop(held);
        });
        match thread {
            Ok(thread) => Ok(Self { thread, over, made_in: fork::generation() }),
            Err(_) => Err(lock(&core).take()),
        }
    }

    /// Whether the engine is stopped, within `timeout`.
    fn is_over(&self, timeout: Duration) -> bool {
        self.over.recv_timeout(timeout) == Err(RecvTimeoutError::Disconnected)
    }

    fn join(self) {
        // Its panics are those of callbacks, which were caught.
        let _ = self.thread.join();
    }

    /// Waits for it no longer.
    fn leave(self) {
        let mut left = lock(&LEFT);
        let over = left
            .extract_if(.., |it| it.made_in == fork::generation() && it.is_over(Duration::ZERO));
        let over: Vec<_> = over.collect();
        left.push(self);
        drop(left);
        over.into_iter().for_each(Self::join);
    }
}

/// The end of an engine that somebody waits for.
enum Ending {
    /// Other threads' calls may have it, which end soon.
    Used(Arc<Running>),
    Stopping(Stopping),
    Over,
}

impl Ending {
    /// Stops the engine once nobody else has it; whether it is over, within `timeout`. Not attached.
    fn go_on(&mut self, timeout: Duration) -> Option<()> {
        let from = Instant::now();
        loop {
            let left = timeout.saturating_sub(from.elapsed());
            match std::mem::replace(self, Self::Over) {
                Self::Used(shared) => match Arc::try_unwrap(shared) {
                    Ok(mut last) => match last.0.take().map(Stopping::begin) {
                        Some(Ok(stopping)) => *self = Self::Stopping(stopping),
                        Some(Err(Some(core))) => core.stop(),
                        Some(Err(None)) | None => {}
                    },
                    Err(shared) => {
                        *self = Self::Used(shared);
                        if left.is_zero() {
                            return None;
                        }
                        std::thread::sleep(Duration::from_millis(1));
                    }
                },
                Self::Stopping(stopping) => {
                    if !stopping.is_over(left) {
                        *self = Self::Stopping(stopping);
                        return None;
                    }
                    stopping.join();
                }
                Self::Over => return Some(()),
            }
        }
    }

    /// Leaves it to those who still use it, and to the thread that stops it.
    fn leave(self) {
        if let Self::Stopping(stopping) = self {
            stopping.leave();
        }
    }
}

thread_local! {
    /// The engines that calls of this thread are using, by number.
    static USED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// An engine for the time of one call, which stays on its thread. Python code may run meanwhile.
pub(crate) struct Using {
    core: Arc<Running>,
    /// Others may look at it, but not have it.
    _stays: PhantomData<MutexGuard<'static, ()>>,
}

impl Using {
    fn begin(core: Arc<Running>) -> Self {
        USED.with_borrow_mut(|used| used.push(core.manner.caller.engine()));
        Self { core, _stays: PhantomData }
    }

    /// Whether a call of this thread is using the engine of this number.
    fn is_here(engine: u64) -> bool {
        USED.with_borrow(|used| used.contains(&engine))
    }
}

impl std::ops::Deref for Using {
    type Target = Arc<Running>;

    fn deref(&self) -> &Arc<Running> {
        &self.core
    }
}

impl Drop for Using {
    fn drop(&mut self) {
        let engine = self.core.manner.caller.engine();
        USED.with_borrow_mut(|used| {
            if let Some(at) = used.iter().rposition(|&other| other == engine) {
                used.swap_remove(at);
            }
        });
    }
}

/// Engines that are to be stopped before the interpreter ends.
static ENGINES: Mutex<Vec<Weak<Handle>>> = Mutex::new(Vec::new());

/// What a Python object holds of an engine.
struct Handle {
    core: Mutex<Option<Arc<Running>>>,
    made_in: u32,
}

/// Stops all engines of this process. Python calls it before its end, when callbacks still can run.
#[pyfunction(name = "_close_all")]
pub(crate) fn close_all(py: Python<'_>) {
    let engines = std::mem::take(&mut *lock(&ENGINES));
    let mut endings = Vec::new();
    for handle in engines.iter().filter_map(Weak::upgrade) {
        if handle.made_in == fork::generation() {
            endings.extend(lock(&handle.core).take().map(Ending::Used));
        } else {
            // A parent's: see `fork`.
            std::mem::forget(handle);
        }
    }
    for left in std::mem::take(&mut *lock(&LEFT)) {
        if left.made_in == fork::generation() {
            endings.push(Ending::Stopping(left));
        } else {
            std::mem::forget(left);
        }
    }
    py.detach(|| {
        let from = Instant::now();
        for ending in &mut endings {
            ending.go_on(Duration::ZERO);
        }
        for ending in &mut endings {
            ending.go_on(PATIENCE.saturating_sub(from.elapsed()));
        }
        for ending in endings.iter_mut().filter(|it| matches!(it, Ending::Stopping(_))) {
            ending.go_on(STOPPED.saturating_sub(from.elapsed()));
        }
        // One that is still in use then is stopped by its last user, if that is in time.
        endings.into_iter().for_each(Ending::leave);
    });
}

/// Moves memory to peers by one-sided writes, and counts what arrives.
///
/// Close it, or use it in a ``with``: callbacks that wait for it keep it alive otherwise.
///
/// All arguments have defaults:
///
/// - ``provider``: the transport; ``"shm"`` is between processes of one host, ``"libfabric"`` is TCP to any
///   host, or AWS EFA, ``"verbs"`` is RoCE and InfiniBand NICs, by libibverbs.
/// - ``fabric``, ``interface``, ``library``: which of libfabric's providers (``"tcp"``, ``"efa"``, ...), on
///   which network interface or device, and which ``libfabric.so.1``. Unless told, whatever is there.
/// - ``devices``, ``gid_index``, ``traffic_class``: which of libibverbs' devices, or ports of them (``["mlx5_0", "mlx5_1:2"]``),
///   which entry of their ports' tables of global names, and what their packets are marked with. Unless told, all that fit.
/// - ``service_level``, ``ack_timeout``, ``retry_count``: with ``"verbs"``, the packets' priority where the traffic class does not
///   decide, 0 to 15; how long a device waits for an acknowledgement, 4.096 us times two to this power, 1 to 31, 14 unless told;
///   how often it sends again what was not acknowledged, 0 to 7, 7 unless told.
/// - ``on_demand``: with ``"verbs"``, memory of the host is not pinned; devices ask for its pages when they need them, if all
///   of them offer that, as ``immwire doctor`` says.
/// - ``classic``: with ``"verbs"``, devices are used by the calls that all drivers have, also where they offer the extended ones.
/// - ``gpus``: numbers of the GPUs (as ``CUDA_VISIBLE_DEVICES`` leaves them) whose memory is written from and to. With
///   ``"shm"``, or ``shm_on_host``, by copies that they make themselves; all memory of the host that is registered is
///   then pinned. By NICs, with ``"verbs"`` and EFA, where they reach it: ``immwire doctor`` says so. Over TCP, and by other
///   NICs, with ``staging``.
/// - ``staging``: bytes of the host's memory, pinned once, by way of which all memory of ``gpus`` goes, at both ends: who
///   writes to it needs some, too. 64 MiB (``64 << 20``) will do for 12 peers.
/// - ``pairing``, ``topology``: which NICs belong to which GPU, with ``"verbs"`` and EFA: ``"gpu0=mlx5_0,mlx5_1"``, where
///   GPUs are numbered as by ``immwire doctor``; and a file with the table of the machine's devices, as that takes and
///   gives it. Unless told, an engine with ``gpus`` has the NICs that are nearest to these, by what sysfs says.
/// - ``sms``: on how many of its SMs a GPU may make one copy; 10, unless told, which fill a link of NVLink.
/// - ``stand_by``: whether warps of a GPU that makes short copies (32 KiB at most) stand by for more, a block of 128 threads on one SM, for a
///   tenth of a millisecond after the last: each takes half as long then. ``torch.cuda.synchronize()`` waits for them, too.
/// - ``shm_on_host``: peers on this host are reached through shared memory, and their GPUs over NVLink or PCIe, all others
///   by the provider; all engines of a group choose the same. There is one NIC more then, the first, and ``nics`` are
///   1 to 7. ``host``: engines with the same name are on one host, whatever the kernel says.
/// - ``nics``: NICs, 1 to 8; ``"shm"`` makes as many, the others take the devices in turn, or those of ``gpus``.
/// - ``transfers``, ``peers``, ``counters``: how many there may be at a time.
/// - ``group_key``: the secret (bytes) that every engine of the group must have. Without one, only
///   processes of the same user are let in, and over a network whoever reaches the port.
/// - ``idle_spin``: seconds that the engine's thread, with nothing to do, looks on, and then lets others run
///   between looks, before it sleeps; ``math.inf`` on a core of its own, which is ``pin_cpu`` if given: a CPU that is not there, or
///   not for this process, is refused.
/// - ``timeout``: seconds that a wait takes at most, unless it is told otherwise.
/// - ``spin``: seconds that an ``await`` looks for its result before it lets other tasks run, if none
///   waits already. Unless told, 20 microseconds on four CPUs or more, where nobody else needs this one.
/// - ``drain``: seconds that pieces of a stopped transfer may take to complete. As long, a second at least, ``close`` waits for peers that are
///   writing to this engine's memory.
/// - ``heartbeat``, ``suspect_after``, ``down_after``: a peer is sent something every so many seconds, after a lone write within twice as
///   many, 0.5 unless told (it is asked to do likewise, and the shorter interval counts); it is suspected when nothing was heard of it for so many, 2, and given up after so many,
///   10, but with ``"shm"`` never for silence alone, unless told: there its death is seen at once. ``math.inf`` is never. Less than two heartbeats are refused.
/// - ``connect_deadline``: seconds after which a peer that was added and has not answered is given up, 10 unless told.
/// - ``idle_after``: seconds after which a peer is asked to end the connection, if neither end has used it: its place is free for others then,
///   and it can be added again. Unless told, never. Who only waits for a count does not use it;
///   ranks of an ``AllToAll`` in host memory that were let go are left out of it for good, and one among GPUs, whose rounds never use it,
///   cannot start over any more.
/// - ``mailbox_slots``, ``mailbox_slot_bytes``: how messages of each peer are kept.
/// - ``latency_bytes``: single writes up to this size overtake bulk transfers.
/// - ``foreign_path``: how ``"shm"`` writes to memory that was registered: ``"auto"``, ``"kernel"`` or
///   ``"bounce"``.
#[pyclass(module = "immwire", frozen, weakref)]
pub(crate) struct TransferEngine {
    handle: Owned<Arc<Handle>>,
    address: immwire::NetAddr,
    manner: Owned<Manner>,
}

impl TransferEngine {
    pub(crate) fn core(&self) -> PyResult<Using> {
        let core = lock(&self.handle.get()?.core).clone();
        core.map(Using::begin).ok_or_else(|| errors::closed("engine"))
    }

    pub(crate) fn timeout(&self, timeout: Option<f64>) -> PyResult<Duration> {
        timeout.map_or(Ok(self.manner.peek().timeout), seconds)
    }

    /// Hands a request to the engine.
    fn submit(
        &self,
        what: &'static str,
        deadline: Option<f64>,
        submit: impl Fn(&immwire::TransferEngine) -> Result<immwire::Transfer, immwire::SubmitError>,
    ) -> PyResult<Transfer> {
        let core = self.core()?;
        let deadline = deadline.map(seconds).transpose()?;
        let attempt = || match deadline {
            None => submit(&core.engine),
            Some(deadline) => submit(&core.engine.with_deadline(deadline)),
        };
        let transfer = match attempt() {
            // Some may have ended, and are kept by whoever has not looked.
            Err(immwire::SubmitError::Full { .. }) => {
                // Or another thread has looked just now: it is tried again in any case.
                core.manner.places.sweep();
                attempt()
            }
            first => first,
        };
        let transfer = transfer.map_err(|error| errors::submit(&error))?;
        Ok(Transfer::new(transfer, what, &core.manner, deadline))
    }

    /// Waits in slices, so that the engine may be closed meanwhile.
    fn wait_with<R: Send>(
        &self,
        py: Python<'_>,
        timeout: Duration,
        step: impl Fn(&immwire::TransferEngine, Duration) -> Option<R> + Sync,
    ) -> PyResult<Option<R>> {
        self.core()?;
        let handle = self.handle.get()?;
        let found = wait(py, timeout, |slice| {
            let core = lock(&handle.core).clone();
            match core {
                None => Some(None),
                Some(core) => step(&core.engine, slice).map(Some),
            }
        })?;
        match found {
            Some(None) => Err(errors::closed("engine")),
            Some(found) => Ok(found),
            None => Ok(None),
        }
    }
}

/// Two engines' threads and a waiting one are three: where they share a CPU, looking keeps off whoever is to be
/// seen.
fn default_spin() -> Duration {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if cpus > 3 { Duration::from_micros(20) } else { Duration::ZERO }
}

fn tag(imm: Option<u32>) -> PyResult<Option<ImmTag>> {
    imm.map(needed_tag).transpose()
}

fn needed_tag(imm: u32) -> PyResult<ImmTag> {
    let bad = || errors::request(&format!("{imm:#x} is no counter's tag, which has 20 bits"));
    ImmTag::from_bits(imm).ok_or_else(bad)
}

fn callable(call: Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    if call.is_callable() {
        return Ok(call.unbind());
    }
    Err(PyTypeError::new_err("a callback must be callable"))
}

/// An address, as one or as its text or bytes.
fn address(given: &Bound<'_, PyAny>) -> PyResult<immwire::NetAddr> {
    if let Ok(address) = given.cast::<NetAddr>() {
        return Ok(address.get().0.clone());
    }
    let class = given.py().get_type::<NetAddr>();
    let made = if given.is_instance_of::<PyString>() {
        class.call1((given,))?
    } else if given.is_instance_of::<PyBytes>() {
        class.call_method1(intern!(given.py(), "from_bytes"), (given,))?
    } else {
        return Err(PyTypeError::new_err("an address is a NetAddr, or its text or bytes"));
    };
    Ok(made.cast::<NetAddr>()?.get().0.clone())
}

#[pymethods]
impl TransferEngine {
    #[new]
    #[pyo3(signature = (
        *, provider = "shm", fabric = None, interface = None, library = None, devices = None, gid_index = None,
        traffic_class = None, service_level = None, ack_timeout = None, retry_count = None, on_demand = false, classic = false, gpus = None, pairing = None, topology = None, sms = None, stand_by = true, shm_on_host = false, host = None, staging = None, nics = 1, transfers = 1024, peers = 256, counters = 1024,
        group_key = None, idle_spin = 50e-6, pin_cpu = None, timeout = 30.0, spin = None, drain = 1.0,
        heartbeat = None, suspect_after = None, down_after = None, connect_deadline = None, idle_after = None, mailbox_slots = 8, mailbox_slot_bytes = 65536, latency_bytes = 8192, foreign_path = "auto",
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword with a default")]
    fn new(
        py: Python<'_>,
        provider: &str,
        fabric: Option<String>,
        interface: Option<String>,
        library: Option<PathBuf>,
        devices: Option<Vec<String>>,
        gid_index: Option<u8>,
        traffic_class: Option<u8>,
        service_level: Option<u8>,
        ack_timeout: Option<u8>,
        retry_count: Option<u8>,
        on_demand: bool,
        classic: bool,
        gpus: Option<Vec<u32>>,
        pairing: Option<String>,
        topology: Option<PathBuf>,
        sms: Option<u32>,
        stand_by: bool,
        shm_on_host: bool,
        host: Option<String>,
        staging: Option<u64>,
        nics: u8,
        transfers: u16,
        peers: u16,
        counters: u16,
        group_key: Option<&[u8]>,
        idle_spin: f64,
        pin_cpu: Option<usize>,
        timeout: f64,
        spin: Option<f64>,
        drain: f64,
        heartbeat: Option<f64>,
        suspect_after: Option<f64>,
        down_after: Option<f64>,
        connect_deadline: Option<f64>,
        idle_after: Option<f64>,
        mailbox_slots: u8,
        mailbox_slot_bytes: u32,
        latency_bytes: u64,
        foreign_path: &str,
    ) -> PyResult<Self> {
        if !PROVIDERS.contains(&provider) {
            let all = PROVIDERS.join("\", \"");
            let message = format!("there is no provider {provider:?}; there is \"{all}\"");
            return Err(errors::config(&message));
        }
        if provider != "libfabric" && (fabric.is_some() || interface.is_some() || library.is_some())
        {
            let message = "fabric, interface and library are for provider=\"libfabric\"";
            return Err(errors::config(message));
        }
        let numbers = [gid_index, traffic_class, service_level, ack_timeout, retry_count];
        let of_ports = devices.is_some() || numbers.iter().any(Option::is_some);
        if provider != "verbs" && (of_ports || on_demand || classic) {
            let message = "devices, gid_index, traffic_class, service_level, ack_timeout, retry_count, on_demand and \
                           classic are for provider=\"verbs\"";
            return Err(errors::config(message));
        }
        let gpus = gpus.unwrap_or_default();
        if host.is_some() && !shm_on_host {
            return Err(errors::config("host is for shm_on_host=True"));
        }
        let gpus_copy = !gpus.is_empty() && (provider == "shm" || shm_on_host);
        if !gpus_copy && sms.is_some() {
            let message = "sms are those of gpus that copy, with \"shm\" or shm_on_host: give both";
            return Err(errors::config(message));
        }
        if (pairing.is_some() || topology.is_some()) && (gpus.is_empty() || provider == "shm") {
            let message = "pairing and topology say which NICs belong to gpus, with \"libfabric\" or \"verbs\": give these";
            return Err(errors::config(message));
        }
        let table = |path: PathBuf| {
            let fault = |why: String| errors::config(&format!("{}: {why}", path.display()));
            let text = std::fs::read_to_string(&path).map_err(|error| fault(error.to_string()))?;
            Table::from_text(text).map_err(|error| fault(error.to_string()))
        };
        let table = topology.map(table).transpose()?;
        let pairing = Pairing { table, overrides: pairing.unwrap_or_default() };
        let transport = match provider {
            "libfabric" => Transport::Libfabric(LibfabricOptions {
                library,
                provider: fabric,
                domain: interface,
            }),
            "verbs" => {
                let usual = VerbsOptions::default();
                Transport::Verbs(VerbsOptions {
                    devices: devices.unwrap_or_default(),
                    gid_index,
                    traffic_class: traffic_class.unwrap_or(usual.traffic_class),
                    service_level: service_level.unwrap_or(usual.service_level),
                    ack_timeout: ack_timeout.unwrap_or(usual.ack_timeout),
                    retry_count: retry_count.unwrap_or(usual.retry_count),
                    on_demand,
                    classic,
                })
            }
            _ => Transport::Shm,
        };
        let has_gpus = !gpus.is_empty();
        let mut builder = Builder::default()
            .transport(transport)
            .nics(nics)
            .transfers(transfers)
            .peers(peers)
            .counters(counters)
            .drain(seconds(drain)?)
            .mailbox(mailbox_slots, mailbox_slot_bytes)
            .latency_bytes(latency_bytes)
            .shm_on_host(shm_on_host)
            .gpus(gpus)
            .stand_by(stand_by)
            .pairing(pairing);
        if let Some(host) = host {
            builder = builder.host(host);
        }
        if let Some(bytes) = staging {
            builder = builder.staging(Staging { bytes });
        }
        if let Some(sms) = sms {
            let none = || errors::config("a GPU copies on one of its SMs at least");
            builder = builder.sms(NonZeroU32::new(sms).ok_or_else(none)?);
        }
        builder = builder.idle(if idle_spin.is_infinite() {
            IdlePolicy::busy()
        } else {
            let spin = seconds(idle_spin)?;
            IdlePolicy { spin, yielding: spin, block: true }
        });
        builder = match foreign_path {
            "auto" => builder,
            "kernel" => builder.foreign_path(ForeignPath::KernelOnly),
            "bounce" => builder.foreign_path(ForeignPath::BounceOnly),
            _ => return Err(errors::config("foreign_path is \"auto\", \"kernel\" or \"bounce\"")),
        };
        let given = |time: Option<f64>| time.map(seconds).transpose();
        let (heartbeat, suspect_after) = (given(heartbeat)?, given(suspect_after)?);
        let (down_after, connect_deadline) = (given(down_after)?, given(connect_deadline)?);
        builder = builder.liveness_with(|usual| {
            usual.heartbeat = heartbeat.unwrap_or(usual.heartbeat);
            usual.suspect_after = suspect_after.unwrap_or(usual.suspect_after);
            usual.down_after = down_after.unwrap_or(usual.down_after);
            usual.connect_deadline = connect_deadline.unwrap_or(usual.connect_deadline);
        });
        if let Some(idle) = given(idle_after)? {
            builder = builder.idle_after(idle);
        }
        if let Some(cpu) = pin_cpu {
            builder = builder.pin_cpu(cpu);
        }
        if let Some(key) = group_key {
            builder = builder.group_key(GroupKey::derive(key));
        }
        let (timeout, spin) =
            (seconds(timeout)?, spin.map_or_else(|| Ok(default_spin()), seconds)?);
        let engine = py.detach(|| builder.build()).map_err(|error| errors::build(&error))?;
        let address = engine.address().clone();
        let caller = Arc::new(Caller::new());
        let manner = Manner { caller, places: Arc::default(), timeout, spin };
        let mailbox = Arc::new(Mailbox::new(Arc::clone(&manner.caller)));
        let lingering = Arc::default();
        let exchanges = Exchanges::default();
        let core = Core { engine, manner: manner.clone(), mailbox, has_gpus, lingering, exchanges };
        let core = Mutex::new(Some(Arc::new(Running(Some(core)))));
        let handle = Arc::new(Handle { core, made_in: fork::generation() });
        let mut engines = lock(&ENGINES);
        engines.retain(|handle| handle.strong_count() > 0);
        engines.push(Arc::downgrade(&handle));
        drop(engines);
        Ok(Self { handle: Owned::new(handle), address, manner: Owned::new(manner) })
    }

    /// What peers need to reach this engine.
    #[getter]
    fn address(&self) -> NetAddr {
        NetAddr(self.address.clone())
    }

    /// The transport that leads from here to the engine at this address, by what the two addresses say: ``"shm"``,
    /// ``"libfabric"`` or ``"verbs"``; ``None`` if they have none in common. Opens nothing.
    #[pyo3(signature = (address, /))]
    fn transport_to(&self, address: &Bound<'_, PyAny>) -> PyResult<Option<&'static str>> {
        let (core, address) = (self.core()?, self::address(address)?);
        Ok(core.engine.transport_to(&address).map(|kind| kind.name()))
    }

    /// The NICs of the engine.
    #[getter]
    fn nics(&self) -> PyResult<Vec<Nic>> {
        Ok(self.core()?.engine.nics().iter().map(Nic::from).collect())
    }

    /// What was done so far.
    fn stats(&self) -> PyResult<Stats> {
        Ok(self.core()?.engine.stats().into())
    }

    // ---- memory ----

    /// Zeroed memory that peers on this host can map: the fastest to write to. It has a buffer, for
    /// ``memoryview`` or ``numpy.frombuffer``.
    ///
    /// With ``device``, memory of that GPU, one of the engine's ``gpus``: it has ``__cuda_array_interface__``, for
    /// ``torch.as_tensor`` or ``cupy.asarray``, and no buffer.
    #[pyo3(signature = (nbytes, /, *, device = None))]
    fn alloc<'py>(
        &self,
        py: Python<'py>,
        nbytes: usize,
        device: Option<u32>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let core = self.core()?;
        let allocated = py.detach(|| {
            core.lingering.sweep();
            match device {
                None => core.engine.alloc(nbytes),
                Some(ordinal) => core.engine.alloc_gpu(ordinal, nbytes),
            }
        });
        let region = allocated.map_err(|error| errors::register(&error))?;
        region::make(py, region, Keep::Nothing, false, &core.lingering)
    }

    /// Registers memory of another object: anything with a buffer, ``__array_interface__`` or
    /// ``__dlpack__`` (numpy arrays, CPU tensors, bytearrays, ...), or a tuple ``(address, nbytes)``.
    ///
    /// Peers may write to it, unless it is read only or ``remote_write`` is false. The object is held until
    /// the region is closed. What lies at an address is the caller's to keep until then: that the engine is closed is not
    /// enough where peers may write.
    ///
    /// Memory of a GPU (``__cuda_array_interface__``, ``__dlpack__`` or an address) is taken if the engine uses that GPU.
    /// The GPU's work on it is not waited for: what is to be written elsewhere must be there when it is submitted, or come
    /// from a stream that ``after_stream`` was told of.
    #[pyo3(signature = (memory, /, *, remote_write = None))]
    fn register<'py>(
        &self,
        py: Python<'py>,
        memory: &Bound<'_, PyAny>,
        remote_write: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let core = self.core()?;
        py.detach(|| core.lingering.sweep());
        let found = memory::find(memory, core.has_gpus)?;
        let writable = remote_write.unwrap_or(!found.readonly);
        if writable && found.readonly {
            let message = "peers cannot be let write to memory that is read only";
            return Err(errors::request(message));
        }
        let rights = if writable { Rights::REMOTE_WRITE } else { Rights::LOCAL };
        let (engine, place) = (&core.engine, &found);
        // SAFETY: the memory is mapped, and stays so while `keep` is held: until the registration was closed
        // (`region`); of an address, the caller promises it. References to such
        // memory are formed neither here nor by Python, which reads and writes it through pointers.
        let registered =
            py.detach(move || unsafe { engine.register(place.ptr, place.len, rights) });
        let region = registered.map_err(|error| errors::register(&error))?;
        region::make(py, region, found.keep, found.readonly, &core.lingering)
    }

    /// Orders what is submitted after this behind what is in a stream of GPU ``device`` now: a source that kernels are
    /// still writing may be submitted at once. Waits for nothing itself.
    ///
    /// Not one transfer waits, but all from that GPU's memory that are submitted after this, to whatever peer and by whatever
    /// thread; and of others, from the host to it and earlier ones, what the GPU has not begun to copy. So one call is for any
    /// number of transfers, and the stream must not itself be waiting for what comes of a later one, nor, between GPUs of one
    /// host, of an earlier one that is not done.
    ///
    /// A stream that itself waits by other means than events may hold up others with which it shares one of the GPU's connections: see
    /// ``wait_on_stream`` on ``CUDA_DEVICE_MAX_CONNECTIONS``.
    ///
    /// ``stream`` is one of that GPU's primary context, which the CUDA runtime and torch use: anything with
    /// ``__cuda_stream__``, or its handle (``torch.cuda.current_stream().cuda_stream``; 0 is the default stream). A number
    /// that is no stream's handle ends the process.
    #[pyo3(signature = (stream, /, *, device))]
    fn after_stream(&self, py: Python<'_>, stream: &Bound<'_, PyAny>, device: u32) -> PyResult<()> {
        let core = self.core()?;
        let stream = memory::stream(stream)?;
        let ordered = py.detach(|| {
            let stream = with_exposed_provenance_mut(stream);
            // SAFETY: a stream of the GPU's primary context, as the caller promises.
            unsafe { core.engine.after_stream(device, stream) }
        });
        ordered.map_err(|error| errors::register(&error))
    }

    /// Holds a stream of GPU ``device`` back until ``writes`` have arrived at ``counter``, and consumes them: what the stream is
    /// given after this finds their bytes. Waits for nothing itself. ``stream`` is as for ``after_stream``.
    ///
    /// The stream goes on in any case, at the latest after ``timeout`` seconds, the engine's if none are given, or when the
    /// engine is closed; the result says why.
    ///
    /// CUDA does not see what the stream waits for, and streams that share one of the GPU's connections, 8 by default, may wait for it, too: that by which
    /// the writes are copied, say, until the deadline. ``CUDA_DEVICE_MAX_CONNECTIONS=32`` in the environment before CUDA begins makes that
    /// unlikely; it was not measured with the default.
    #[pyo3(signature = (stream, /, *, device, counter, writes, timeout = None))]
    fn wait_on_stream(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, PyAny>,
        device: u32,
        counter: &ImmCounter,
        writes: u64,
        timeout: Option<f64>,
    ) -> PyResult<StreamWait> {
        let core = self.core()?;
        let (stream, timeout) = (memory::stream(stream)?, self.timeout(timeout)?);
        let held = counter.lend(|imm| {
            let held = py.detach(|| {
                let stream = with_exposed_provenance_mut(stream);
                // SAFETY: a stream of the GPU's primary context, as the caller promises.
                unsafe { core.engine.wait_on_stream(device, stream, imm, writes, timeout) }
            });
            held.map_err(|error| errors::stream(&error))
        })?;
        Ok(StreamWait::new(held, self.timeout(None)?))
    }

    /// A word that GPUs store to: calls ``callback(before, now)`` when it has changed, on a thread of its own, which takes
    /// a processor as long as anything is watched. Numbers that were stored in between are not told. So a kernel, inside of
    /// a CUDA graph too, says how far it is; the callback may submit what has become ready.
    #[pyo3(signature = (callback, /))]
    fn alloc_uvm_watcher(
        &self,
        py: Python<'_>,
        callback: Bound<'_, PyAny>,
    ) -> PyResult<UvmWatcher> {
        let (core, call) = (self.core()?, callable(callback)?);
        let engine = core.manner.caller.engine();
        let job = move |before: u64, now: u64| {
            call_back(engine, &call, |py| (before, now).into_pyobject(py))
        };
        let watcher = py.detach(|| core.engine.alloc_uvm_watcher(job));
        watcher.map(UvmWatcher::new).map_err(|error| errors::register(&error))
    }

    /// A word, zero, that kernels of GPU ``device`` look at, and that ``set`` stores to: how a running kernel is told
    /// something. With GDRCopy it lies in the GPU's memory, else in pinned memory of the host.
    #[pyo3(signature = (*, device))]
    fn alloc_gpu_flag(&self, py: Python<'_>, device: u32) -> PyResult<GpuFlag> {
        let core = self.core()?;
        let flag = py.detach(|| core.engine.alloc_gpu_flag(device));
        flag.map(GpuFlag::new).map_err(|error| errors::register(&error))
    }

    // ---- peers ----

    /// Starts to connect to a peer, by its ``address`` as such, or as text or bytes. Transfers to it may be
    /// submitted at once. The same engine added twice is the same peer.
    #[pyo3(signature = (address, /))]
    fn add_peer(&self, py: Python<'_>, address: &Bound<'_, PyAny>) -> PyResult<PeerId> {
        let core = self.core()?;
        let address = self::address(address)?;
        let added = py.detach(|| core.engine.add_peer(&address));
        added.map(PeerId::from).map_err(|error| errors::add_peer(&error))
    }

    /// To be awaited: until the peer is up.
    #[pyo3(signature = (peer, /, *, timeout = None))]
    fn wait_peer(&self, peer: PeerId, timeout: Option<f64>) -> PyResult<Waiting> {
        let timeout = self.timeout(timeout)?;
        Ok(Waiting::new(Up::new(&*self.core()?, peer.into()), timeout, Duration::ZERO))
    }

    /// Waits until the peer is up; other threads run meanwhile.
    #[pyo3(signature = (peer, /, *, timeout = None))]
    fn wait_peer_blocking(
        &self,
        py: Python<'_>,
        peer: PeerId,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let after = self.timeout(timeout)?;
        let peer = peer.into();
        let up =
            self.wait_with(py, after, |engine, slice| match engine.wait_peer(peer, slice) {
                Err(immwire::PeerError::Timeout { .. }) => None,
                up => Some(up),
            })?;
        let timed_out = Err(immwire::PeerError::Timeout { peer, after });
        up.unwrap_or(timed_out).map_err(errors::peer)
    }

    /// Where a peer stands, in words; ``None`` if it is not, or no longer, known.
    #[pyo3(signature = (peer, /))]
    fn peer_state(&self, peer: PeerId) -> PyResult<Option<String>> {
        let state = self.core()?.engine.peer_state(peer.into());
        Ok(state.map(|state| state.to_string()))
    }

    /// The peers that are connecting or up, whoever called.
    #[getter]
    fn peers(&self) -> PyResult<Vec<PeerId>> {
        Ok(self.core()?.engine.peers().into_iter().map(PeerId::from).collect())
    }

    /// Leaves a peer: transfers to it are stopped, and end.
    #[pyo3(signature = (peer, /))]
    fn remove_peer(&self, peer: PeerId) -> PyResult<()> {
        self.core()?.engine.remove_peer(peer.into());
        Ok(())
    }

    /// Peers that barriers go to.
    #[pyo3(signature = (peers, /))]
    #[expect(clippy::needless_pass_by_value, reason = "made for this call")]
    fn add_peer_group(&self, peers: Vec<PeerId>) -> PyResult<PeerGroup> {
        let peers: Vec<immwire::PeerId> = peers.iter().copied().map(Into::into).collect();
        Ok(PeerGroup(self.core()?.engine.add_peer_group(&peers)))
    }

    /// Takes a NIC out of use, or back into it. What was not posted on it goes by the others.
    #[pyo3(signature = (nic, /, *, healthy))]
    fn set_nic_health(&self, nic: u8, healthy: bool) -> PyResult<()> {
        let core = self.core()?;
        let nics = core.engine.nics().len();
        if usize::from(nic) >= nics {
            return Err(errors::request(&format!("there is no NIC {nic}: the engine has {nics}")));
        }
        core.engine.set_nic_health(nic, healthy);
        Ok(())
    }

    // ---- counters ----

    /// A counter: any that is free, or the one of a ``slot`` that both sides agreed on.
    #[pyo3(signature = (*, slot = None))]
    fn counter(&self, slot: Option<u16>) -> PyResult<ImmCounter> {
        let core = self.core()?;
        let taken = match slot {
            None => core.engine.counter(),
            Some(slot) => core.engine.counter_at(slot),
        };
        let imm = taken.map_err(errors::counter_taken)?;
        Ok(ImmCounter::new(imm, core.manner.clone()))
    }

    /// Calls ``callback(error)`` once ``writes`` have arrived at ``counter`` and were consumed, on a thread of
    /// the engine's; ``error`` is then ``None``. At the latest when the engine stops, with the error.
    #[pyo3(signature = (*, counter, writes, callback))]
    fn expect_imm_count(
        &self,
        counter: &ImmCounter,
        writes: u64,
        callback: Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let core = self.core()?;
        let call = callable(callback)?;
        let caller = Arc::clone(&core.manner.caller);
        caller.start()?;
        // What the engine itself calls only passes it on: messages come by the same thread of the engine's.
        let job = move |reached: Result<(), immwire::CountError>| {
            let engine = caller.engine();
            let told = move || {
                call_back(engine, &call, |py| {
                    let error = reached.err().map(|error| errors::count(&error));
                    (error.map(|error| error.into_value(py)),).into_pyobject(py)
                });
            };
            caller.push(Box::new(told));
        };
        counter.lend(|imm| {
            core.engine.expect_imm_count(imm, writes, job).map_err(|error| errors::count(&error))
        })
    }

    // ---- transfers ----

    /// Writes one contiguous range of ``src`` to ``dst``: ``len`` bytes, or all from ``src_offset`` on. It counts
    /// as one write at the peer's counter ``imm``. A transfer not done ``deadline`` seconds from now is
    /// stopped.
    #[pyo3(signature = (
        *, peer, src, dst, len = None, src_offset = 0, dst_offset = 0, imm = None, deadline = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword")]
    fn submit_single_write(
        &self,
        peer: PeerId,
        src: &RegionBase,
        dst: &MrDesc,
        len: Option<u64>,
        src_offset: u64,
        dst_offset: u64,
        imm: Option<u32>,
        deadline: Option<f64>,
    ) -> PyResult<Transfer> {
        let (src, imm) = (src.region()?, tag(imm)?);
        let len = len.unwrap_or_else(|| src.len().saturating_sub(src_offset));
        let (peer, src, dst) = (peer.into(), &src, &dst.0);
        let write = SingleWrite { peer, src, src_offset, dst, dst_offset, len, imm };
        self.submit("a write", deadline, |engine| engine.submit_single_write(&write))
    }

    /// Writes pages of ``page_bytes``, each to a place of its own: page ``i`` of a side lies at
    /// ``offset + stride * pages[i]``, strides being ``page_bytes`` unless told. Each page counts as one write.
    ///
    /// Page numbers are an array or buffer of 32- or 64-bit integers, or ``PageIndices``.
    #[pyo3(signature = (
        *, peer, page_bytes, src, src_pages, dst, dst_pages, src_stride = None, src_offset = 0,
        dst_stride = None, dst_offset = 0, imm = None, deadline = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword")]
    fn submit_paged_writes(
        &self,
        peer: PeerId,
        page_bytes: u64,
        src: &RegionBase,
        src_pages: &Bound<'_, PyAny>,
        dst: &MrDesc,
        dst_pages: &Bound<'_, PyAny>,
        src_stride: Option<u64>,
        src_offset: u64,
        dst_stride: Option<u64>,
        dst_offset: u64,
        imm: Option<u32>,
        deadline: Option<f64>,
    ) -> PyResult<Transfer> {
        let side = |pages, stride: Option<u64>, offset| {
            let stride = stride.unwrap_or(page_bytes);
            pages::of(pages).map(|indices| Pages { indices, stride, offset })
        };
        let write = PagedWrite {
            peer: peer.into(),
            page_bytes,
            src: &src.region()?,
            src_pages: side(src_pages, src_stride, src_offset)?,
            dst: &dst.0,
            dst_pages: side(dst_pages, dst_stride, dst_offset)?,
            imm: tag(imm)?,
        };
        self.submit("a write of pages", deadline, |engine| engine.submit_paged_writes(&write))
    }

    /// Writes parts of one region, each to a peer of its own; each counts as one write there. Over each NIC they go in the order of the
    /// targets: one that is not up yet, or has no room, keeps what follows it waiting, and, if it never comes, from ever going.
    #[pyo3(signature = (*, src, targets, imm = None, deadline = None))]
    #[expect(clippy::needless_pass_by_value, reason = "made for this call")]
    fn submit_scatter(
        &self,
        src: &RegionBase,
        targets: Vec<PyRef<'_, Target>>,
        imm: Option<u32>,
        deadline: Option<f64>,
    ) -> PyResult<Transfer> {
        let targets = targets.iter().map(|target| target.0).collect();
        let write = ScatterWrite { src: &src.region()?, targets, imm: tag(imm)? };
        self.submit("a scatter", deadline, |engine| engine.submit_scatter(&write))
    }

    /// Tells every peer of the group that this engine has come here: one write each for the counter ``imm``.
    /// To wait for the others, wait for as many on the own counter of the same tag. A peer that is not up yet keeps those behind it from being
    /// told: wait for all before the first barrier.
    #[pyo3(signature = (*, group, imm, deadline = None))]
    fn submit_barrier(
        &self,
        group: &PeerGroup,
        imm: u32,
        deadline: Option<f64>,
    ) -> PyResult<Transfer> {
        let imm = needed_tag(imm)?;
        self.submit("a barrier", deadline, |engine| engine.submit_barrier(&group.0, imm))
    }

    /// Tells a peer that ``writes`` (1 to 255) have been done, without bytes.
    #[pyo3(signature = (*, peer, imm, writes = 1, deadline = None))]
    fn submit_imm(
        &self,
        peer: PeerId,
        imm: u32,
        writes: u16,
        deadline: Option<f64>,
    ) -> PyResult<Transfer> {
        let imm = needed_tag(imm)?;
        self.submit("an immediate", deadline, |engine| engine.submit_imm(peer.into(), imm, writes))
    }

    /// Sends a message: bytes that the peer takes with ``recv``. Those of one peer arrive in order. Done
    /// means that it lies in the peer's mailbox.
    #[pyo3(signature = (*, peer, data, deadline = None))]
    fn submit_send(
        &self,
        peer: PeerId,
        data: &Bound<'_, PyAny>,
        deadline: Option<f64>,
    ) -> PyResult<Transfer> {
        let view = View::contiguous(data, false)?;
        let bytes = view.to_vec();
        self.submit("a message", deadline, |engine| engine.submit_send(peer.into(), &bytes))
    }

    /// Each of the next ``count`` messages is given to ``callback(message)``, on a thread of the engine's.
    #[pyo3(signature = (*, count, callback))]
    fn submit_recvs(&self, count: usize, callback: Bound<'_, PyAny>) -> PyResult<()> {
        let core = self.core()?;
        Ok(core.mailbox.call(&core.engine, count, callable(callback)?)?)
    }

    /// To be awaited: a message, whoever sends it. One that lies there is taken at once, also with ``timeout=0``.
    #[pyo3(signature = (*, timeout = None))]
    fn recv(&self, timeout: Option<f64>) -> PyResult<Waiting> {
        let timeout = self.timeout(timeout)?;
        Ok(Waiting::new(Recv::new(&*self.core()?), timeout, Duration::ZERO))
    }

    /// Waits for a message, whoever sends it; other threads run meanwhile. One that lies there is taken at once, also with
    /// ``timeout=0``.
    #[pyo3(signature = (*, timeout = None))]
    fn recv_blocking(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Message> {
        let timeout = self.timeout(timeout)?;
        // Held by the wait weakly only: the engine may be closed meanwhile.
        let wait = Recv::new(&*self.core()?);
        wait.block(py, timeout)
    }

    /// To be awaited: until another transfer can be submitted; whether it can. Those that have ended are in nobody's way, whoever
    /// keeps them.
    #[pyo3(signature = (*, timeout = None))]
    fn wait_capacity(&self, timeout: Option<f64>) -> PyResult<Waiting> {
        let timeout = self.timeout(timeout)?;
        Ok(Waiting::new(Room::new(&*self.core()?), timeout, Duration::ZERO))
    }

    /// Waits until another transfer can be submitted; returns whether it can. Other threads run meanwhile. Those that have
    /// ended are in nobody's way, whoever keeps them.
    #[pyo3(signature = (*, timeout = None))]
    fn wait_capacity_blocking(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout = self.timeout(timeout)?;
        // Held by the wait weakly only: the engine may be closed meanwhile.
        let wait = Room::new(&*self.core()?);
        wait.block(py, timeout)
    }

    // ---- the end ----

    /// Stops the engine: transfers under way end, peers are left, threads are joined. What was closed stays
    /// so; to close it again does nothing. Regions can be closed after it, too.
    ///
    /// Its callbacks that run are waited for, however long they take: Ctrl-C is heard meanwhile, raises ``KeyboardInterrupt``, and the engine goes
    /// on stopping by itself. (The interpreter's end waits for it five seconds at most.) So a callback can close any engine but the one whose it is, and one that has a
    /// callback which is closing that. What closes the engine inside of a call on it, as a signal's handler may, does not wait: the
    /// engine stops when that call returns.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let handle = self.handle.get()?;
        if lock(&handle.core).is_none() {
            return Ok(());
        }
        let engine = self.manner.peek().caller.engine();
        let _closing = Closing::begin(engine).map_err(errors::in_callback)?;
        let Some(core) = lock(&handle.core).take() else { return Ok(()) };
        if Using::is_here(engine) || is_engines() {
            // The last one stops it: that call, or another thread's. Or nobody waits: an engine's end may wait for this thread.
            py.detach(|| drop(core));
            return Ok(());
        }
        let mut ending = Ending::Used(core);
        let waited = wait(py, Duration::MAX, |slice| ending.go_on(slice));
        ending.leave();
        waited.map(drop)
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        Ok(lock(&self.handle.get()?.core).is_none())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let state = match self.core() {
            Ok(core) => format!("{} peers", core.engine.peers().len()),
            Err(_) if self.handle.is_ours() => "closed".to_owned(),
            Err(_) => "of the parent process".to_owned(),
        };
        let (provider, nics) = (self.address.provider(), self.address.nics().len());
        format!("<TransferEngine {provider}, {nics} NICs, {state}>")
    }
}
