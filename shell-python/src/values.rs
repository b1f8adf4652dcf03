//! Values that travel: addresses, descriptors, names of peers, messages. Immutable, equal by value.

use std::time::Duration;

use immwire::core::wire::Wire;
use immwire::provider::NicInfo;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};

use crate::errors;

/// The longest duration that is told from forever.
const FOREVER_SECONDS: f64 = 1e9;

/// Seconds as Python gives them; what is longer than some thirty years is that.
pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err(format!("{seconds} seconds is not a time to wait")));
    }
    Ok(Duration::from_secs_f64(seconds.min(FOREVER_SECONDS)))
}

fn frame<'py, T: Wire>(py: Python<'py>, value: &T) -> PyResult<Bound<'py, PyBytes>> {
    let mut bytes = vec![0; T::ENCODED_MAX];
    let len = value.encode(&mut bytes).map_err(|error| errors::request(&error.to_string()))?;
    Ok(PyBytes::new(py, bytes.get(..len).unwrap_or(&[])))
}

fn unframe<T: Wire>(bytes: &[u8]) -> PyResult<T> {
    T::decode(bytes).map_err(|error| errors::request(&error.to_string()))
}

/// The name of a peer of one engine.
#[pyclass(module = "immwire", frozen, eq, ord, hash, from_py_object)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PeerId {
    /// The engine's slot for it.
    #[pyo3(get)]
    index: u16,
    /// Which tenant of the slot it is: a peer that returns is another.
    #[pyo3(get)]
    generation: u32,
}

impl From<immwire::PeerId> for PeerId {
    fn from(peer: immwire::PeerId) -> Self {
        Self { index: peer.index, generation: peer.generation }
    }
}

impl From<PeerId> for immwire::PeerId {
    fn from(peer: PeerId) -> Self {
        Self { index: peer.index, generation: peer.generation }
    }
}

#[pymethods]
impl PeerId {
    /// One by its numbers, as an error's ``peer`` is made again in another process.
    #[new]
    #[pyo3(signature = (index, generation, /))]
    fn new(index: u16, generation: u32) -> Self {
        Self { index, generation }
    }

    /// What it is pickled as.
    fn __reduce__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyType>, (u16, u32)) {
        (py.get_type::<Self>(), (self.index, self.generation))
    }

    fn __repr__(&self) -> String {
        format!("<PeerId {}.{}>", self.index, self.generation)
    }
}

/// All that is needed to reach an engine. As text (``str``) it survives copying and pasting.
#[pyclass(module = "immwire", frozen, eq, hash)]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct NetAddr(pub(crate) immwire::NetAddr);

#[pymethods]
impl NetAddr {
    /// The address of a text that ``str`` made.
    #[new]
    #[pyo3(signature = (text, /))]
    fn new(text: &str) -> PyResult<Self> {
        let parsed = text.parse().map_err(|error: immwire::core::wire::ParseAddrError| {
            errors::request(&error.to_string())
        });
        parsed.map(Self)
    }

    /// The address of bytes that ``bytes`` made.
    #[classmethod]
    #[pyo3(signature = (data, /))]
    fn from_bytes(_class: &Bound<'_, PyType>, data: &[u8]) -> PyResult<Self> {
        unframe(data).map(Self)
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        frame(py, &self.0)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("NetAddr('{}')", self.0)
    }

    /// How the engine is reached: ``"shm"``, ...
    #[getter]
    fn provider(&self) -> &'static str {
        self.0.provider().name()
    }

    /// NICs of the engine.
    #[getter]
    fn nics(&self) -> usize {
        self.0.nics().len()
    }
}

/// All that a peer needs to write to a region.
#[pyclass(module = "immwire", frozen, eq, hash)]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct MrDesc(pub(crate) immwire::MrDesc);

#[pymethods]
impl MrDesc {
    /// The descriptor of bytes that ``bytes`` made.
    #[classmethod]
    #[pyo3(signature = (data, /))]
    fn from_bytes(_class: &Bound<'_, PyType>, data: &[u8]) -> PyResult<Self> {
        unframe(data).map(Self)
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        frame(py, &self.0)
    }

    /// Bytes of the region.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len
    }

    /// Whether peers may write there.
    #[getter]
    fn remote_write(&self) -> bool {
        self.0.rights.remote_write()
    }

    fn __repr__(&self) -> String {
        let immwire::MrDesc { owner, base, len, .. } = self.0;
        let rights = if self.0.rights.remote_write() { "writable" } else { "source only" };
        format!("<MrDesc {len} bytes at {base:#x} of engine {owner}, {rights}>")
    }
}

/// A message from a peer.
#[pyclass(module = "immwire", frozen, get_all)]
#[derive(Debug)]
pub(crate) struct Message {
    /// Who sent it.
    peer: PeerId,
    /// What it says.
    data: Py<PyBytes>,
}

impl Message {
    pub(crate) fn new(py: Python<'_>, message: &immwire::Message) -> Self {
        Self { peer: message.from.into(), data: PyBytes::new(py, &message.bytes).unbind() }
    }
}

#[pymethods]
impl Message {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let len = self.data.bind(py).len()?;
        Ok(format!("<Message of {len} bytes from {}>", immwire::PeerId::from(self.peer)))
    }
}

/// A part of a scatter: which bytes go to whom, and where.
#[pyclass(module = "immwire", frozen)]
#[derive(Debug)]
pub(crate) struct Target(pub(crate) immwire::Target);

#[pymethods]
impl Target {
    #[new]
    #[pyo3(signature = (*, peer, dst, len, src_offset = 0, dst_offset = 0))]
    fn new(peer: PeerId, dst: &MrDesc, len: u64, src_offset: u64, dst_offset: u64) -> Self {
        let peer = peer.into();
        Self(immwire::Target { peer, dst: dst.0, src_offset, dst_offset, len })
    }

    fn __repr__(&self) -> String {
        let immwire::Target { peer, src_offset, dst_offset, len, .. } = self.0;
        format!("<Target {len} bytes, {src_offset} -> {dst_offset} of {peer}>")
    }
}

/// Peers that barriers go to.
#[pyclass(module = "immwire", frozen)]
#[derive(Debug)]
pub(crate) struct PeerGroup(pub(crate) immwire::PeerGroup);

#[pymethods]
impl PeerGroup {
    /// The peers, in the order given.
    #[getter]
    fn peers(&self) -> Vec<PeerId> {
        self.0.peers().iter().copied().map(PeerId::from).collect()
    }

    fn __len__(&self) -> usize {
        self.0.peers().len()
    }

    fn __repr__(&self) -> String {
        format!("<PeerGroup of {}>", self.0.peers().len())
    }
}

/// A NIC of an engine.
#[pyclass(module = "immwire", frozen, get_all)]
#[derive(Debug)]
pub(crate) struct Nic {
    /// ``"shm0"``, ``"mlx5_2"``, ...
    name: String,
    /// Gigabits per second; relative speeds decide how work is shared out.
    speed_gbps: u32,
    /// The largest piece it takes, in bytes.
    max_message_bytes: u64,
}

impl From<&NicInfo> for Nic {
    fn from(nic: &NicInfo) -> Self {
        let max_message_bytes = nic.limits.max_message_bytes;
        Self { name: nic.name.clone(), speed_gbps: nic.speed_gbps, max_message_bytes }
    }
}

#[pymethods]
impl Nic {
    fn __repr__(&self) -> String {
        format!("<Nic {}, {} Gbit/s>", self.name, self.speed_gbps)
    }
}

/// What an engine has done so far.
#[pyclass(module = "immwire", frozen, get_all)]
#[derive(Debug)]
pub(crate) struct Stats {
    /// Pieces handed to NICs.
    posted: u64,
    /// Pieces that completed.
    completed: u64,
    /// Pieces that failed.
    failed: u64,
    /// Immediates that arrived for counters.
    immediates: u64,
    /// Immediates that were not counted: of a stale tag, or of no counter.
    refused_immediates: u64,
    /// Of those, the ones of a stale tag.
    stale_immediates: u64,
    /// Times that the engine went to sleep.
    sleeps: u64,
}

impl From<immwire::Stats> for Stats {
    fn from(stats: immwire::Stats) -> Self {
        Self {
            posted: stats.posted,
            completed: stats.completed,
            failed: stats.failed,
            immediates: stats.immediates,
            refused_immediates: stats.refused_immediates,
            stale_immediates: stats.stale_immediates,
            sleeps: stats.sleeps,
        }
    }
}

#[pymethods]
impl Stats {
    fn __repr__(&self) -> String {
        let Self { posted, completed, failed, immediates, refused_immediates: refused, .. } = self;
        format!(
            "<Stats posted={posted} completed={completed} failed={failed} immediates={immediates} \
             refused_immediates={refused}>"
        )
    }
}
