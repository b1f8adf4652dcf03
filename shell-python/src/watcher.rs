//! Words that GPUs store to, as Python sees them.

use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors;
use crate::fork::Owned;
use crate::sync::lock;

/// A word that GPUs store to. Until it is closed, or dropped, or the engine is, its callback is told of changes. What
/// stores to it must have ended before: the place is given to others.
#[pyclass(module = "immwire", frozen)]
pub(crate) struct UvmWatcher {
    watcher: Owned<Mutex<Option<immwire::UvmWatcher>>>,
    address: u64,
}

impl UvmWatcher {
    pub(crate) fn new(watcher: immwire::UvmWatcher) -> Self {
        Self { address: watcher.address(), watcher: Owned::new(Mutex::new(Some(watcher))) }
    }
}

#[pymethods]
impl UvmWatcher {
    /// Where the word is, eight bytes long, for GPUs and for the CPU.
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    /// What it is now. Zero at first.
    #[getter]
    fn value(&self) -> PyResult<u64> {
        let value = lock(self.watcher.get()?).as_ref().map(immwire::UvmWatcher::value);
        value.ok_or_else(|| errors::closed("watcher"))
    }

    /// Ends the watching; a callback may do so itself. No call begins afterwards; one that runs is not waited for.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let watcher = lock(self.watcher.get()?).take();
        // Whoever makes one may be waiting for a GPU's driver, and is waited for.
        py.detach(|| drop(watcher));
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
        format!("<immwire.UvmWatcher at {:#x}>", self.address)
    }
}
