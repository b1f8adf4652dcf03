//! Regions, as Python sees them: memory with a buffer, and whose it is until when.
//!
//! # Invariants
//!
//! - While a view of a region's memory exists, the region cannot be closed. Of a GPU's memory there are none: what
//!   its `__cuda_array_interface__` is given to cannot be counted.
//! - Memory of another object is held until its registration was closed: a region that is dropped while transfers, peers or parts of it
//!   use it goes to [`Lingering`], and its memory with it. That the engine has stopped is not enough: a peer's process may be held up in
//!   the middle of a write. What such a one may still write to, and no region is left of, is held for good.
//! - A region says that it is closed once nobody writes there any more, and not while somebody still waits for that: then that it is
//!   being closed.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use immwire::CloseError;
use immwire::core::region::Keys;
use immwire::provider::Place;
use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::buffer::{Exporter, Offer, View, exporting_class};
use crate::errors;
use crate::fork::Owned;
use crate::memory::Keep;
use crate::sync::{lock, set_awaited, wait};
use crate::values::{MrDesc, seconds};
use crate::waiting::warn;

/// How long closing waits for transfers and peers that are just letting go.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often what lingers is tried again.
const SWEEP_EVERY: Duration = Duration::from_millis(20);
/// So much is copied without the interpreter; less takes no longer than giving it up and getting it back may.
const LONG_BYTES: usize = 64 << 10;

/// A handle to a registration, and what keeps its memory.
struct Held {
    region: immwire::Region,
    keep: Vec<Keep>,
}

impl Held {
    /// Which registration: no other has these keys while it lives.
    fn registration(&self) -> Keys {
        self.region.desc().keys
    }
}

/// Handles to registrations, and those that were dropped while in use, until they are not. A thread sees to these, from the first on, until
/// the engine has stopped; while there are none it sleeps. After that whoever drops another handle to the same registration does.
#[derive(Default)]
pub(crate) struct Lingering {
    state: Mutex<LingeringState>,
    changed: Condvar,
}

#[derive(Default)]
struct LingeringState {
    held: VecDeque<Held>,
    /// Regions of Python by registration.
    regions: HashMap<Keys, usize>,
    stopped: bool,
    /// It was said that memory is held for good.
    warned: bool,
    thread: Option<JoinHandle<()>>,
}

impl Drop for LingeringState {
    fn drop(&mut self) {
        for Held { region, keep } in std::mem::take(&mut self.held) {
            if region.close(Duration::ZERO).is_err() {
                // Nobody is left who could ask again.
                std::mem::forget(keep);
            }
        }
    }
}

impl Lingering {
    /// One region of Python more; returns whether it shares its registration.
    fn enter(&self, registration: Keys) -> bool {
        let mut state = lock(&self.state);
        let regions = state.regions.entry(registration).or_default();
        *regions += 1;
        *regions > 1
    }

    /// One region of Python less; returns whether others have the same registration.
    fn leave(&self, registration: Keys) -> bool {
        let mut state = lock(&self.state);
        let Some(regions) = state.regions.get_mut(&registration) else { return false };
        *regions -= 1;
        let is_shared = *regions > 0;
        if !is_shared {
            state.regions.remove(&registration);
        }
        is_shared
    }

    /// Whether another region of Python has the same registration.
    fn is_shared(&self, registration: Keys) -> bool {
        lock(&self.state).regions.get(&registration).is_some_and(|&regions| regions > 1)
    }

    fn add(self: &Arc<Self>, held: Held) {
        let mut state = lock(&self.state);
        state.held.push_back(held);
        if state.thread.is_none() && !state.stopped {
            let lingering = Arc::clone(self);
            let thread = std::thread::Builder::new().name("immwire-linger".into());
            // Without one it is looked again when memory is next registered.
            state.thread = thread.spawn(move || lingering.serve()).ok();
        }
        drop(state);
        self.changed.notify_one();
    }

    /// A peer is writing to what lingers: once the engine has stopped, that is said, once.
    fn say_written_to(&self) {
        let is_news = {
            let mut state = lock(&self.state);
            state.stopped && !std::mem::replace(&mut state.warned, true)
        };
        // After the lock: Python code may run.
        if is_news {
            warn(
                c"a peer is in the middle of a write to memory of a region that was not closed before its engine: that memory is \
                  held for good",
            );
        }
    }

    /// Lets go of what is in use no more, until the engine has stopped.
    fn serve(self: &Arc<Self>) {
        set_awaited();
        let mut state = lock(&self.state);
        while !state.stopped {
            if state.held.is_empty() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            drop(state);
            std::thread::sleep(SWEEP_EVERY);
            self.sweep();
            state = lock(&self.state);
        }
    }

    /// Takes over what keeps the memory from handles that linger: there is one handle then.
    fn adopt(&self, registration: Keys, keep: &mut Vec<Keep>) {
        let is_same = |held: &Held| held.registration() == registration;
        let same: VecDeque<Held> = {
            let mut state = lock(&self.state);
            let all = std::mem::take(&mut state.held).into_iter();
            let (same, others) = all.partition(is_same);
            state.held = others;
            same
        };
        // After the lock: handles go here.
        keep.extend(same.into_iter().flat_map(|held| held.keep));
    }

    /// Lets go of the memory, now or once nobody uses it.
    fn release(self: &Arc<Self>, held: Held) {
        let registration = held.registration();
        let Held { region, mut keep } = held;
        self.adopt(registration, &mut keep);
        if keep.iter().all(|keep| matches!(keep, Keep::Nothing)) {
            // The engine's own memory: it waits by itself. Or an address, which is the caller's to keep.
            return drop(region);
        }
        // Nobody tries again soon, once the engine has stopped: and who would write, and finds that it may not, looks for a moment as if it did.
        let patience = if lock(&self.state).stopped { SWEEP_EVERY } else { Duration::ZERO };
        match region.close(patience) {
            Ok(()) => {}
            Err(CloseError::InUse { region }) => self.add(Held { region, keep }),
            Err(CloseError::StillWriting { region, .. }) => {
                self.add(Held { region, keep });
                self.say_written_to();
            }
        }
    }

    /// Lets go of what is in use no more. One by one: a GPU's driver may be waited for, and whoever closes a region meanwhile finds
    /// the other handles here.
    pub(crate) fn sweep(self: &Arc<Self>) {
        let all = lock(&self.state).held.len();
        for _ in 0..all {
            let first = lock(&self.state).held.pop_front();
            let Some(held) = first else { return };
            self.release(held);
        }
    }

    /// The engine has stopped: no transfer uses any of it, and peers are refused there. Not attached.
    pub(crate) fn stop(self: &Arc<Self>) {
        let thread = {
            let mut state = lock(&self.state);
            state.stopped = true;
            state.thread.take()
        };
        self.changed.notify_one();
        // Where no other could be had this thread stops the engine itself, with the last that lingered: then it ends next.
        let is_own = |thread: &JoinHandle<()>| thread.thread().id() == std::thread::current().id();
        // It panics on nothing that a caller does, and waits for no engine's end.
        let _ = thread.filter(|thread| !is_own(thread)).map(JoinHandle::join);
        // What parts remain of, or peers are writing to, stays.
        self.sweep();
    }
}

/// What the class `Region` is but for its buffer.
#[pyclass(module = "immwire", name = "_Region", subclass, frozen)]
pub(crate) struct RegionBase {
    inner: Owned<Inner>,
    desc: immwire::MrDesc,
    ptr: usize,
    /// The GPU that has the memory.
    device: Option<u32>,
    readonly: bool,
}

struct Inner {
    state: Mutex<State>,
    lingering: Arc<Lingering>,
    /// When it was made, another region had the same registration.
    is_part: bool,
}

struct State {
    stage: Stage,
    views: usize,
}

enum Stage {
    Open(Held),
    /// Somebody waits for transfers and peers to let go.
    Closing,
    Closed,
}

/// Why a region is not there to be used.
enum Away {
    Closing,
    Closed,
}

impl From<Away> for PyErr {
    fn from(away: Away) -> Self {
        match away {
            Away::Closing => errors::being_closed(),
            Away::Closed => errors::region_closed(),
        }
    }
}

impl Stage {
    const fn held(&self) -> Result<&Held, Away> {
        match self {
            Self::Open(held) => Ok(held),
            Self::Closing => Err(Away::Closing),
            Self::Closed => Err(Away::Closed),
        }
    }
}

/// What somebody finds who is to close a region.
enum Taken {
    /// It is to be closed by this caller, who says then what became of it.
    Held(Held),
    /// Another is at it.
    Another,
    Closed,
    /// So many views of its memory exist.
    Viewed(usize),
}

impl Inner {
    fn take(&self) -> Taken {
        let mut state = lock(&self.state);
        match (state.views, &state.stage) {
            (_, Stage::Closed) => Taken::Closed,
            (_, Stage::Closing) => Taken::Another,
            (0, Stage::Open(_)) => match std::mem::replace(&mut state.stage, Stage::Closing) {
                Stage::Open(held) => Taken::Held(held),
                Stage::Closing | Stage::Closed => Taken::Another,
            },
            (views, Stage::Open(_)) => Taken::Viewed(views),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let stage = std::mem::replace(&mut lock(&self.state).stage, Stage::Closed);
        let Stage::Open(held) = stage else { return };
        let is_shared = self.lingering.leave(held.registration());
        let mut held = Some(held);
        let mut release = || match held.take() {
            // As `close` does: the registration stays, and what keeps this part may be a view of the whole, which could
            // never be closed while it lingers.
            Some(part) if self.is_part && is_shared => drop(part),
            Some(held) => self.lingering.release(held),
            None => {}
        };
        // A GPU's driver may be waited for.
        if Python::try_attach(|py| py.detach(&mut release)).is_none() {
            // The interpreter is ending: nobody is kept waiting by this thread.
            release();
        }
    }
}

/// A region on its way into Python: what the class is called with, which nobody else can.
#[pyclass(module = "immwire", name = "_NewRegion", frozen)]
struct NewRegion(Mutex<Option<RegionBase>>);

/// The class, made on first use.
pub(crate) fn class(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let class = CLASS.get_or_try_init(py, || {
        exporting_class::<RegionBase>(py, c"immwire.Region").map(Bound::unbind)
    })?;
    Ok(class.bind(py))
}

/// A region for Python.
pub(crate) fn make<'py>(
    py: Python<'py>,
    region: immwire::Region,
    keep: Keep,
    readonly: bool,
    lingering: &Arc<Lingering>,
) -> PyResult<Bound<'py, PyAny>> {
    let (desc, ptr) = (region.desc(), region.as_ptr().expose_provenance());
    let device = match region.place() {
        Place::Host => None,
        Place::Gpu(ordinal) => Some(ordinal),
    };
    let is_part = lingering.enter(desc.keys);
    let stage = Stage::Open(Held { region, keep: vec![keep] });
    let state = Mutex::new(State { stage, views: 0 });
    let inner = Owned::new(Inner { state, lingering: Arc::clone(lingering), is_part });
    let base = RegionBase { inner, desc, ptr, device, readonly };
    class(py)?.call1((NewRegion(Mutex::new(Some(base))),))
}

impl RegionBase {
    /// Another handle to the registration.
    pub(crate) fn region(&self) -> PyResult<immwire::Region> {
        let inner = self.inner.get()?;
        let region = lock(&inner.state).stage.held().map(|held| held.region.clone());
        Ok(region?)
    }
}

impl Exporter for RegionBase {
    fn exported(&self) -> PyResult<Offer> {
        if let Some(device) = self.device {
            self.region()?;
            return Err(PyBufferError::new_err(format!(
                "the region is memory of GPU {device}, which has no buffer: copy bytes with read and write, or give the \
                 region to torch.as_tensor or cupy.asarray"
            )));
        }
        let mut state = lock(&self.inner.get()?.state);
        let (held, readonly) = (state.stage.held(), self.readonly);
        let offer = held.map(|Held { region, .. }| Offer {
            ptr: region.as_ptr(),
            len: region.len(),
            readonly,
        });
        state.views += usize::from(offer.is_ok());
        drop(state);
        Ok(offer?)
    }

    fn released(&self) {
        // In a child too: the view that is given back may have been taken by the parent.
        let mut state = lock(&self.inner.peek().state);
        state.views = state.views.saturating_sub(1);
    }
}

#[pymethods]
impl RegionBase {
    #[new]
    fn new(made: &NewRegion) -> PyResult<Self> {
        let used = || pyo3::exceptions::PyTypeError::new_err("this region was made already");
        let made = lock(&made.0).take();
        made.ok_or_else(used)
    }

    /// What a peer needs to write here; ``bytes(desc)`` travels.
    #[getter]
    fn desc(&self) -> MrDesc {
        MrDesc(self.desc)
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.desc.len
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.desc.len).unwrap_or(usize::MAX)
    }

    /// Where the first byte lies in this process.
    #[getter]
    fn ptr(&self) -> usize {
        self.ptr
    }

    /// The number of the GPU that has the memory; ``None``: it is the host's.
    #[getter]
    fn device(&self) -> Option<u32> {
        self.device
    }

    /// The bytes, for ``torch.as_tensor``, ``cupy.asarray`` and others; of a GPU's memory only. What was made of it must not
    /// be used once the region is closed.
    #[getter(__cuda_array_interface__)]
    fn cuda_array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.device.is_none() {
            // So that `hasattr` says no.
            return Err(PyAttributeError::new_err("__cuda_array_interface__ is of a GPU's memory"));
        }
        self.region()?;
        let fields = PyDict::new(py);
        fields.set_item(intern!(py, "shape"), (self.desc.len,))?;
        fields.set_item(intern!(py, "typestr"), "|u1")?;
        fields.set_item(intern!(py, "data"), (self.ptr, self.readonly))?;
        fields.set_item(intern!(py, "version"), 3)?;
        fields.set_item(intern!(py, "strides"), py.None())?;
        // Nobody need wait for a stream: what a counter has counted is there.
        fields.set_item(intern!(py, "stream"), py.None())?;
        Ok(fields)
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        Ok(matches!(lock(&self.inner.get()?.state).stage, Stage::Closed))
    }

    /// Part of the region, with a descriptor of its own. Peers still may write to the whole.
    #[pyo3(signature = (offset, length, /))]
    fn slice<'py>(&self, py: Python<'py>, offset: u64, length: u64) -> PyResult<Bound<'py, PyAny>> {
        let part = self.region()?.slice(offset, length).map_err(|error| errors::region(&error))?;
        if part.is_empty() {
            return Err(errors::request("a region has at least one byte"));
        }
        // The whole keeps the memory: until it can be closed, which the part forbids.
        make(py, part, Keep::Nothing, self.readonly, &self.inner.get()?.lingering)
    }

    /// A copy of bytes. What a peer is writing at the same time comes torn.
    #[pyo3(signature = (offset = 0, length = None, /))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: u64,
        length: Option<u64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let region = self.region()?;
        let length = length.unwrap_or_else(|| region.len().saturating_sub(offset));
        region.slice(offset, length).map_err(|error| errors::region(&error))?;
        PyBytes::new_with(py, usize::try_from(length).unwrap_or(usize::MAX), |bytes| {
            // A GPU is waited for.
            py.detach(|| region.read(offset, bytes)).map_err(|error| errors::access(&error))
        })
    }

    /// Copies bytes in. Of a GPU's memory this, as ``read``, takes some hundred microseconds at least.
    #[pyo3(signature = (offset, data, /))]
    fn write(&self, py: Python<'_>, offset: u64, data: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.readonly {
            return Err(errors::request("the region's memory is read only"));
        }
        let region = self.region()?;
        let view = View::contiguous(data, false)?;
        let length = u64::try_from(view.len()).unwrap_or(u64::MAX);
        region.slice(offset, length).map_err(|error| errors::region(&error))?;
        if self.device.is_some() {
            let bytes = view.to_vec();
            let written = py.detach(|| region.write(offset, &bytes));
            return written.map_err(|error| errors::access(&error));
        }
        // What peers may not write to may be mapped read only, whatever its object says.
        region.check_write(offset, view.len()).map_err(|error| errors::access(&error))?;
        let copy = || {
            let to = region.as_ptr().wrapping_add(usize::try_from(offset).unwrap_or(usize::MAX));
            // SAFETY: for `copy`:
            // - `to` is valid for `length` bytes, to be written, too: `check_write` has looked, and `region` keeps it mapped;
            // - the view's memory is valid for reading while it is held;
            // - they may overlap, which `copy` allows, and others may write to either meanwhile, in which case
            //   the copy is torn: no reference is formed to them, and bytes have no invalid values.
            unsafe { std::ptr::copy(view.ptr(), to, view.len()) };
        };
        if view.len() < LONG_BYTES {
            copy()
        } else {
            py.detach(copy)
        }
        Ok(())
    }

    /// Withdraws the region from peers: afterwards nobody writes there any more.
    ///
    /// Waits up to ``timeout`` seconds (1, unless told) for transfers and peers that use it. Raises
    /// ``RegionInUse`` if they, or views of its memory, or parts of it remain; it can be used here as before then. If it was a
    /// peer that had not ended, peers are refused from then on: register it again for others to write to. Of a part, and of memory
    /// that was registered already, only this handle is closed.
    #[pyo3(signature = (*, timeout = None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = timeout.map_or(Ok(PATIENCE), seconds)?;
        let (inner, start) = (self.inner.get()?, Instant::now());
        // Another thread may be at it, and may not succeed.
        let taken = wait(py, timeout, |slice| {
            let from = Instant::now();
            loop {
                let taken = inner.take();
                if !matches!(taken, Taken::Another) {
                    return Some(taken);
                }
                if from.elapsed() >= slice {
                    return None;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        })?;
        let held = match taken {
            Some(Taken::Held(held)) => held,
            Some(Taken::Closed) => return Ok(()),
            Some(Taken::Viewed(views)) => return Err(errors::region_views(views)),
            Some(Taken::Another) | None => return Err(errors::being_closed()),
        };
        let registration = held.registration();
        if inner.is_part && inner.lingering.is_shared(registration) {
            // The registration is another region's too, and stays.
            inner.lingering.leave(registration);
            lock(&inner.state).stage = Stage::Closed;
            return Ok(());
        }
        let Held { region, mut keep } = held;
        let timeout = timeout.saturating_sub(start.elapsed());
        let start = Instant::now();
        let mut region = Some(region);
        let mut reason = None;
        let closed = wait(py, timeout, |slice| {
            let from = Instant::now();
            loop {
                // Each time: one that lingers may have been at its trial just now, and be back.
                if !inner.lingering.is_shared(registration) {
                    inner.lingering.adopt(registration, &mut keep);
                }
                let (kept, error) = match region.take()?.close(slice) {
                    Ok(()) => return Some(()),
                    Err(CloseError::InUse { region }) => (region, errors::in_use()),
                    Err(CloseError::StillWriting { region, error }) => {
                        (region, errors::still_writing(error))
                    }
                };
                region = Some(kept);
                reason = Some(error);
                if from.elapsed() >= slice || start.elapsed() >= timeout {
                    return None;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        if region.is_none() {
            inner.lingering.leave(registration);
        }
        let stage = match region {
            Some(region) => Stage::Open(Held { region, keep }),
            None => Stage::Closed,
        };
        lock(&inner.state).stage = stage;
        match (closed?, reason) {
            (None, Some(reason)) => Err(reason),
            _ => Ok(()),
        }
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, None)
    }

    fn __repr__(&self) -> String {
        let (len, ptr) = (self.desc.len, self.ptr);
        let rights = if self.desc.rights.remote_write() { "writable" } else { "source only" };
        let closed = match self.inner.get() {
            Ok(inner) => match lock(&inner.state).stage {
                Stage::Open(_) => "",
                Stage::Closing => ", being closed",
                Stage::Closed => ", closed",
            },
            Err(_) => ", of the parent process",
        };
        let of = self.device.map_or(String::new(), |device| format!(" of GPU {device}"));
        format!("<Region {len} bytes at {ptr:#x}{of}, {rights}{closed}>")
    }
}
