//! Threads of Rust and threads of Python: locks, names of waiters, and waiting so that Ctrl-C is heard.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// How long a blocking wait lasts before it looks whether a signal came.
const SLICE: Duration = Duration::from_millis(100);

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Locks, whatever happened to an earlier holder: what these locks guard is whole at every step. No
/// Python code runs under any of them: an error is made, and an object dropped, once the guard is gone.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A name that no other waiter of this process has.
pub(crate) fn fresh_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Whether this thread runs a callback of some engine, and so must not wait for its threads.
pub(crate) fn in_callback() -> bool {
    IN_CALLBACK.get()
}

/// Calls `call` on a thread of an engine's; what it raises goes to `sys.unraisablehook`. Nothing is
/// called once the interpreter has begun to end.
pub(crate) fn call_back(
    call: &Py<PyAny>,
    run: impl for<'py> FnOnce(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) {
    let outer = IN_CALLBACK.replace(true);
    let _ = Python::try_attach(|py| {
        let call = call.bind(py);
        if let Err(error) = run(call) {
            error.write_unraisable(py, Some(call));
        }
    });
    IN_CALLBACK.set(outer);
}

/// Calls `step` with the time it may wait, detached, until it says something or `timeout` has passed.
pub(crate) fn wait<R: Send>(
    py: Python<'_>,
    timeout: Duration,
    mut step: impl FnMut(Duration) -> Option<R> + Send,
) -> PyResult<Option<R>> {
    let start = Instant::now();
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        if let Some(result) = py.detach(|| step(left.min(SLICE))) {
            return Ok(Some(result));
        }
        py.check_signals()?;
        if left.is_zero() {
            return Ok(None);
        }
    }
}
