//! Words that kernels look at, as Python sees them.

use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors;
use crate::fork::Owned;
use crate::sync::lock;

/// A word that kernels of a GPU look at, and that Python stores to. What looks at it must have ended before it is closed, or
/// dropped: the place is given to others.
#[pyclass(module = "immwire", frozen)]
pub(crate) struct GpuFlag {
    flag: Owned<Mutex<Option<immwire::GpuFlag>>>,
    address: u64,
    device: u32,
    place: &'static str,
}

impl GpuFlag {
    pub(crate) fn new(flag: immwire::GpuFlag) -> Self {
        let place = match flag.place() {
            immwire::FlagPlace::Gpu => "gpu",
            immwire::FlagPlace::Host { .. } => "host",
        };
        let (address, device) = (flag.address(), flag.ordinal());
        Self { address, device, place, flag: Owned::new(Mutex::new(Some(flag))) }
    }

    fn with<R>(&self, f: impl FnOnce(&immwire::GpuFlag) -> R) -> PyResult<R> {
        let flag = lock(self.flag.get()?);
        flag.as_ref().map(f).ok_or_else(|| errors::closed("flag"))
    }
}

#[pymethods]
impl GpuFlag {
    /// Where the word is, eight bytes long, for the GPU: not for ``ctypes``.
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    /// Which GPU's it is.
    #[getter]
    fn device(&self) -> u32 {
        self.device
    }

    /// Where it lies: ``"gpu"``, by GDRCopy, or ``"host"``, where each look of a kernel's goes over the bus.
    #[getter]
    fn place(&self) -> &'static str {
        self.place
    }

    /// What was stored last. Zero at first.
    #[getter]
    fn value(&self) -> PyResult<u64> {
        self.with(immwire::GpuFlag::value)
    }

    /// Stores a number.
    #[pyo3(signature = (value, /))]
    fn set(&self, value: u64) -> PyResult<()> {
        self.with(|flag| flag.set(value))
    }

    /// Gives the word back.
    fn close(&self) -> PyResult<()> {
        let flag = lock(self.flag.get()?).take();
        drop(flag);
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close()
    }

    fn __repr__(&self) -> String {
        let Self { address, device, place, .. } = self;
        format!("<immwire.GpuFlag of GPU {device} at {address:#x}, in memory of the {place}>")
    }
}
