//! Waits of streams for counts, as Python sees them.

use std::time::Duration;

use pyo3::prelude::*;

use crate::errors;
use crate::fork::Owned;
use crate::sync::wait;
use crate::values::seconds;

/// A stream's wait for a count: whether it is over, and why. Forgetting it changes nothing for the stream.
#[pyclass(module = "immwire", frozen)]
pub(crate) struct StreamWait {
    wait: Owned<immwire::StreamWait>,
    /// How long `result` waits if it is not told.
    timeout: Duration,
}

impl StreamWait {
    pub(crate) fn new(wait: immwire::StreamWait, timeout: Duration) -> Self {
        Self { wait: Owned::new(wait), timeout }
    }
}

#[pymethods]
impl StreamWait {
    /// Whether the stream is held no more, for whatever reason.
    fn done(&self) -> PyResult<bool> {
        Ok(self.wait.get()?.poll().is_some())
    }

    /// Returns once the writes have arrived. Raises what the stream went on for instead: ``WaitTimeout`` with what is missing,
    /// ``EngineClosed``; and ``WaitTimeout`` without if it is held still after ``timeout`` seconds, the engine's if none is
    /// given. Once the stream is seen to have gone on, this waits for nothing.
    #[pyo3(signature = (*, timeout = None))]
    fn result(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = timeout.map_or(Ok(self.timeout), seconds)?;
        let held = self.wait.get()?;
        match wait(py, timeout, |slice| held.wait(slice))? {
            Some(result) => result.map_err(|error| errors::count(&error)),
            None => {
                let message = format!("the stream is held still after {timeout:?}");
                Err(errors::wait(&message, timeout))
            }
        }
    }

    fn __repr__(&self) -> PyResult<&'static str> {
        Ok(match self.wait.get()?.poll() {
            None => "<immwire.StreamWait, held>",
            Some(Ok(())) => "<immwire.StreamWait, all arrived>",
            Some(Err(_)) => "<immwire.StreamWait, gone on without all>",
        })
    }
}
