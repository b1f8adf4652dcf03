//! Threads of Rust and threads of Python: locks, names, who may wait for whom, and waiting so that Ctrl-C is heard.
//!
//! # Invariants
//!
//! - Of callbacks that are closing engines none waits for itself: neither for its own engine's end, nor for one that waits, by however many
//!   other callbacks, for that.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// How long a blocking wait lasts before it looks whether a signal came.
const SLICE: Duration = Duration::from_millis(100);

thread_local! {
    /// The engines whose callbacks this thread is in, by number, the innermost last.
    static CALLBACKS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    /// An engine's end waits for this thread.
    static IS_AWAITED: Cell<bool> = const { Cell::new(false) };
}

/// Engines that callbacks are closing.
static CLOSINGS: Mutex<Vec<Edge>> = Mutex::new(Vec::new());

/// Locks, whatever happened to an earlier holder: what these locks guard is whole at every step. No
/// Python code runs under any of them: an error is made, and an object dropped, once the guard is gone.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A name that nothing else of this process has: a waiter's, an engine's.
pub(crate) fn fresh_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Whether this thread runs a callback of some engine, or belongs to one, and so must not wait for its threads.
pub(crate) fn is_awaited() -> bool {
    IS_AWAITED.get() || CALLBACKS.with_borrow(|engines| !engines.is_empty())
}

/// An engine's end will wait for this thread, which is one of its own.
pub(crate) fn set_awaited() {
    IS_AWAITED.set(true);
}

/// A callback of one engine is closing another, and so waits for that one's callbacks.
struct Edge {
    closing: u64,
    by: u64,
    closed: u64,
}

/// Why this thread may not wait for an engine's end.
#[derive(Clone, Copy)]
pub(crate) enum Entangled {
    /// It runs a callback of the engine's.
    Own,
    /// A callback of the engine's waits for one that this thread runs.
    Mutual,
}

/// A thread is closing an engine; until it is dropped.
pub(crate) struct Closing(u64);

impl Closing {
    /// Begins to close the engine of this number, unless callbacks would wait for each other then.
    pub(crate) fn begin(engine: u64) -> Result<Self, Entangled> {
        let closing = fresh_id();
        let mine = CALLBACKS.with_borrow(Vec::clone);
        if mine.contains(&engine) {
            return Err(Entangled::Own);
        }
        let mut closings = lock(&CLOSINGS);
        if mine.iter().any(|&by| waits_for(&closings, engine, by)) {
            return Err(Entangled::Mutual);
        }
        closings.extend(mine.into_iter().map(|by| Edge { closing, by, closed: engine }));
        Ok(Self(closing))
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        lock(&CLOSINGS).retain(|edge| edge.closing != self.0);
    }
}

/// Whether the end of `engine` waits for that of `other`. It ends: no engine's end waits for itself.
fn waits_for(closings: &[Edge], engine: u64, other: u64) -> bool {
    let mut next = closings.iter().filter(|edge| edge.by == engine).map(|edge| edge.closed);
    next.any(|closed| closed == other || waits_for(closings, closed, other))
}

/// Calls `call`, a callback of the engine of this number, on a thread of an engine's; what it raises goes to `sys.unraisablehook`. Nothing
/// is called once the interpreter has begun to end.
pub(crate) fn call_back(
    engine: u64,
    call: &Py<PyAny>,
    arguments: impl for<'py> FnOnce(Python<'py>) -> PyResult<Bound<'py, PyTuple>>,
) {
    CALLBACKS.with_borrow_mut(|engines| engines.push(engine));
    let _ = Python::try_attach(|py| {
        let call = call.bind(py);
        if let Err(error) = arguments(py).and_then(|arguments| call_to_stay(call, &arguments)) {
            error.write_unraisable(py, Some(call));
        }
    });
    CALLBACKS.with_borrow_mut(Vec::pop);
}

/// A thread that CPython ends while it runs what was called stays here for ever instead. Before 3.14 it ends every one but the first that asks for
/// the interpreter when that is over, by `pthread_exit`: on its way out it would drop what needs the interpreter, and bring the process down.
fn call_to_stay<'py>(
    call: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyAny>> {
    unsafe extern "C-unwind" {
        fn PyObject_CallObject(
            callable: *mut ffi::PyObject,
            arguments: *mut ffi::PyObject,
        ) -> *mut ffi::PyObject;
    }
    let stays = Stays;
    // SAFETY: both are objects that are borrowed meanwhile, the second a tuple; this thread is attached.
    let result = unsafe { PyObject_CallObject(call.as_ptr(), arguments.as_ptr()) };
    std::mem::forget(stays);
    // SAFETY: a reference that is ours, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(call.py(), result) }
}

/// Whoever would drop it does not go on.
struct Stays;

impl Drop for Stays {
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
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
