//! Words that kernels look at, as Python sees them.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::counter::ImmCounter;
use crate::errors;
use crate::fork::Owned;
use crate::sync::lock;

/// A word that kernels of a GPU look at, and that Python stores to. What looks at it must have ended before it is closed, or
/// dropped: the place is given to others.
#[pyclass(module = "immwire", frozen)]
pub(crate) struct GpuFlag {
    flag: Owned<Mutex<Option<Arc<immwire::GpuFlag>>>>,
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
        Self { address, device, place, flag: Owned::new(Mutex::new(Some(Arc::new(flag)))) }
    }

    fn flag(&self) -> PyResult<Arc<immwire::GpuFlag>> {
        let flag = lock(self.flag.get()?).clone();
        flag.ok_or_else(|| errors::closed("flag"))
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
        Ok(self.flag()?.value())
    }

    /// Stores a number.
    #[pyo3(signature = (value, /))]
    fn set(&self, value: u64) -> PyResult<()> {
        self.flag()?.set(value);
        Ok(())
    }

    /// Lets the number go up by one whenever ``writes`` have arrived at ``counter``, and consumes them; early ones count. Whoever counts
    /// the last of them stores it: no thread of Python's takes part. Until what is returned is closed, or dropped, or the engine
    /// is; meanwhile the counter takes no other wait, the flag should not be ``set``, and closing it does not give the word back.
    #[pyo3(signature = (counter, *, writes))]
    fn follow(&self, counter: &Bound<'_, ImmCounter>, writes: u64) -> PyResult<Following> {
        let none = || errors::request("writes is 1 at least");
        let writes = NonZeroU64::new(writes).ok_or_else(none)?;
        let flag = self.flag()?;
        let following = counter
            .get()
            .lend(|imm| flag.follow(imm, writes).map_err(|error| errors::count(&error)))?;
        Ok(Following { following: Owned::new(Mutex::new(Some(following))) })
    }

    /// Gives the word back.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let flag = lock(self.flag.get()?).take();
        // Whoever makes one may be waiting for a GPU's driver, and is waited for.
        py.detach(|| drop(flag));
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let Self { address, device, place, .. } = self;
        format!("<immwire.GpuFlag of GPU {device} at {address:#x}, in memory of the {place}>")
    }
}

/// A flag that goes up as a counter does. Made by ``GpuFlag.follow``.
#[pyclass(module = "immwire", frozen)]
pub(crate) struct Following {
    following: Owned<Mutex<Option<immwire::Following>>>,
}

#[pymethods]
impl Following {
    /// Whether it goes on: not if it was closed, or the engine was.
    #[getter]
    fn active(&self) -> PyResult<bool> {
        let following = lock(self.following.get()?);
        Ok(following.as_ref().is_some_and(|following| following.why_over().is_none()))
    }

    /// Ends it. The flag stays as it is, and what had arrived for the next step is there for the next wait.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let following = lock(self.following.get()?).take();
        // It may be the last that has the flag, whose word is given back then.
        py.detach(|| drop(following));
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}
