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
/// The interpreter says that it is over a moment after it has begun to end threads.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

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

/// Whether this thread belongs to an engine.
pub(crate) fn is_engines() -> bool {
    IS_AWAITED.get()
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
        match arguments(py) {
            Ok(arguments) => call_to_stay(call, arguments),
            Err(error) => error.write_unraisable(py, Some(call)),
        }
    });
    CALLBACKS.with_borrow_mut(Vec::pop);
}

/// Calls it; what it raises goes to `sys.unraisablehook`. A thread that CPython ends meanwhile stays here for ever instead: before 3.14 it ends, by
/// `pthread_exit`, every one that asks for the interpreter when that is over. On its way out it would drop what needs the interpreter, and bring the
/// process down.
fn call_to_stay(call: &Bound<'_, PyAny>, arguments: Bound<'_, PyTuple>) {
    // As the bindings declare them but for that.
    unsafe extern "C-unwind" {
        fn PyObject_CallObject(
            callable: *mut ffi::PyObject,
            arguments: *mut ffi::PyObject,
        ) -> *mut ffi::PyObject;
        fn PyErr_WriteUnraisable(object: *mut ffi::PyObject);
        fn Py_DecRef(object: *mut ffi::PyObject);
    }
    let (call, arguments) = (call.as_ptr(), arguments.into_ptr());
    let stays = Stays;
    // SAFETY: this thread is attached. `call` is borrowed meanwhile; the reference to the tuple is ours, and goes here. So is that to the result; where
    // it is null an exception is set, which is taken.
    unsafe {
        let result = PyObject_CallObject(call, arguments);
        if result.is_null() {
            PyErr_WriteUnraisable(call);
        } else {
            Py_DecRef(result);
        }
        Py_DecRef(arguments);
    }
    std::mem::forget(stays);
}

/// Whoever would drop it does not go on.
struct Stays;

impl Drop for Stays {
    fn drop(&mut self) {
        let from = Instant::now();
        loop {
            // SAFETY: may be asked at any time, by any thread.
            let goes_on = unsafe { ffi::Py_IsInitialized() } != 0;
            if goes_on && from.elapsed() > ENDS_WITHIN {
                // It is not CPython that ends it: with the interpreter held, all would stand still.
                eprintln!(
                    "immwire: a callback ends its thread, or throws what is no Python exception"
                );
                std::process::abort();
            }
            std::thread::sleep(SLICE);
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
