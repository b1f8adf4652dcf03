//! Transfers, as Python sees them: awaited, waited for, called back.
//!
//! The engine tells one waker of a transfer's end; here any number of tasks, threads and callbacks may
//! wait for it.
//!
//! # Invariants
//!
//! - Whoever learns of an end lets go of the engine's handle, with which the transfer's place is free: that Python keeps one that
//!   has ended takes no room (`places`).

use std::collections::VecDeque;
use std::ffi::CStr;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use immwire::End;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::errors;
use crate::fork::Owned;
use crate::places::Places;
use crate::sync::{call_back, fresh_id, lock, wait};
use crate::values::seconds;
use crate::waiting::{Bell, Op, Outcome, Waiter, Waiting};

/// How long a blocking wait spins before it sleeps, as the engine's own do.
const SPIN: Duration = Duration::from_micros(20);

/// A callback with its argument; it reports what is raised.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The thread that runs callbacks of transfers, counts and messages; started by the first.
pub(crate) struct Caller {
    /// Of its engine, which it is known by: no other of this process has it.
    engine: u64,
    state: Mutex<CallerState>,
    changed: Condvar,
}

#[derive(Default)]
struct CallerState {
    jobs: VecDeque<Job>,
    thread: Option<JoinHandle<()>>,
    ended: bool,
}

impl Caller {
    /// That of a new engine.
    pub(crate) fn new() -> Self {
        Self { engine: fresh_id(), state: Mutex::default(), changed: Condvar::new() }
    }

    /// The number of the engine.
    pub(crate) const fn engine(&self) -> u64 {
        self.engine
    }

    /// Has the job run; gives it back if the thread has ended. Runs nothing itself.
    pub(crate) fn queue(&self, job: Job) -> Result<(), Job> {
        let mut state = lock(&self.state);
        if state.ended {
            return Err(job);
        }
        state.jobs.push_back(job);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// As [`Caller::queue`], but runs it here if the thread has ended.
    pub(crate) fn push(&self, job: Job) {
        if let Err(job) = self.queue(job) {
            job();
        }
    }

    /// Starts the thread, if it does not run.
    pub(crate) fn start(self: &Arc<Self>) -> std::io::Result<()> {
        let mut state = lock(&self.state);
        if state.thread.is_none() && !state.ended {
            let caller = Arc::clone(self);
            let thread = std::thread::Builder::new().name("immwire-python".into());
            state.thread = Some(thread.spawn(move || caller.serve())?);
        }
        Ok(())
    }

    fn serve(&self) {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = lock(&self.state);
            } else if state.ended {
                return;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Ends the thread once it has run what there is. Not from a callback, and not attached.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        state.ended = true;
        let thread = state.thread.take();
        drop(state);
        self.changed.notify_one();
        // Its panics are caught by the callbacks it runs.
        let _ = thread.map(JoinHandle::join);
    }
}

/// A transfer and who waits for it.
pub(crate) struct Watched {
    /// Its name among those that have a place.
    id: u64,
    /// Until the end is known: then its place in the engine is free for another.
    transfer: Mutex<Option<immwire::Transfer>>,
    end: OnceLock<End>,
    /// Once it has been, or is about to be.
    is_armed: AtomicBool,
    waiters: Mutex<Waiters>,
    caller: Arc<Caller>,
    places: Arc<Places>,
}

#[derive(Default)]
struct Waiters {
    waiting: Vec<(u64, Waiter)>,
    calls: Vec<Job>,
}

impl Wake for Watched {
    fn wake(self: Arc<Self>) {
        self.tell();
    }
}

impl Watched {
    pub(crate) fn poll_end(&self) -> Option<End> {
        if let Some(end) = self.end.get() {
            return Some(*end);
        }
        let end = lock(&self.transfer).as_ref().map(immwire::Transfer::poll_end);
        match end {
            Some(end) => end.map(|end| self.ended(end)),
            // Whoever took it left the end first.
            None => self.end.get().copied(),
        }
    }

    fn ended(&self, end: End) -> End {
        let end = *self.end.get_or_init(|| end);
        self.let_go();
        end
    }

    /// Gives its place back, if it has one.
    fn let_go(&self) {
        let Some(transfer) = lock(&self.transfer).take() else { return };
        // First: while it is named it may have a place.
        drop(transfer);
        self.places.leave(self.id);
    }

    /// Tells everybody.
    fn tell(&self) {
        let Waiters { waiting, calls } = std::mem::take(&mut *lock(&self.waiters));
        waiting.iter().for_each(|(_, waiter)| waiter.wake());
        calls.into_iter().for_each(|job| self.caller.push(job));
        self.places.tell();
    }

    /// As [`Watched::arm`], for who is content with one that was before: [`Watched::tell`] is called after the end, if not yet.
    pub(crate) fn arm_once(self: &Arc<Self>) {
        // It tells no more than itself: whoever has set it arms.
        if !self.is_armed.swap(true, Ordering::Relaxed) {
            self.arm();
        }
    }

    /// Has [`Watched::tell`] called at the end; at once, if that has come.
    fn arm(self: &Arc<Self>) {
        let waker = Waker::from(Arc::clone(self));
        let mut transfer = lock(&self.transfer);
        let end = transfer
            .as_mut()
            .map(|transfer| Pin::new(transfer).poll(&mut Context::from_waker(&waker)));
        drop(transfer);
        match end {
            Some(Poll::Pending) => {}
            Some(Poll::Ready(end)) => {
                let _ = self.ended(end);
                self.tell();
            }
            None => self.tell(),
        }
    }

    fn watch(self: &Arc<Self>, id: u64, waiter: Waiter) {
        lock(&self.waiters).waiting.push((id, waiter));
        self.arm();
    }

    fn unwatch(&self, id: u64) {
        let mut waiters = lock(&self.waiters);
        let at = waiters.waiting.iter().position(|(waiting, _)| *waiting == id);
        let gone = at.map(|at| waiters.waiting.swap_remove(at));
        drop(waiters);
        // After the lock: the last of a loop's waiters takes the loop's futures with it.
        drop(gone);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// A write, message or barrier under way. ``await`` it, wait for it, or have it call back.
///
/// Dropping it lets the transfer go on unwatched.
#[pyclass(module = "immwire", frozen)]
pub(crate) struct Transfer {
    watched: Owned<Arc<Watched>>,
    what: &'static str,
    /// How long `await` takes at most.
    timeout: Duration,
    spin: Duration,
    deadline: Option<Duration>,
}

/// What an engine gives to each of its transfers.
#[derive(Clone)]
pub(crate) struct Manner {
    pub(crate) caller: Arc<Caller>,
    pub(crate) places: Arc<Places>,
    pub(crate) timeout: Duration,
    pub(crate) spin: Duration,
}

impl Transfer {
    pub(crate) fn new(
        transfer: immwire::Transfer,
        what: &'static str,
        manner: &Manner,
        deadline: Option<Duration>,
    ) -> Self {
        let id = fresh_id();
        let watched = Arc::new(Watched {
            id,
            transfer: Mutex::new(Some(transfer)),
            end: OnceLock::new(),
            is_armed: AtomicBool::new(false),
            waiters: Mutex::default(),
            caller: Arc::clone(&manner.caller),
            places: Arc::clone(&manner.places),
        });
        manner.places.enter(id, &watched);
        let watched = Owned::new(watched);
        Self { watched, what, timeout: manner.timeout, spin: manner.spin, deadline }
    }

    fn op(&self) -> PyResult<Ended> {
        let watched = Arc::clone(self.watched.get()?);
        Ok(Ended { watched, deadline: self.deadline, watching: None })
    }
}

#[pymethods]
impl Transfer {
    /// Waits for the end, for as long as the engine's ``timeout`` says.
    ///
    /// Cancelling the task that waits does not stop the transfer; ``cancel()`` does.
    fn __await__(&self) -> PyResult<Waiting> {
        Ok(Waiting::new(self.op()?, self.timeout, self.spin))
    }

    /// As ``await transfer``, with a timeout of its own, in seconds.
    #[pyo3(signature = (*, timeout = None))]
    fn wait(&self, timeout: Option<f64>) -> PyResult<Waiting> {
        let timeout = timeout.map_or(Ok(self.timeout), seconds)?;
        Ok(Waiting::new(self.op()?, timeout, self.spin))
    }

    /// Waits for the end without an event loop; other threads run meanwhile.
    #[pyo3(signature = (*, timeout = None))]
    fn wait_blocking(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = timeout.map_or(Ok(self.timeout), seconds)?;
        let watched = self.watched.get()?;
        let start = Instant::now();
        let mut watching = None;
        let end = wait(py, timeout, |slice| {
            while start.elapsed() < SPIN.min(timeout) {
                if let Some(end) = watched.poll_end() {
                    return Some(end);
                }
                std::hint::spin_loop();
            }
            if watching.is_none() {
                let id = fresh_id();
                watched.watch(id, Waiter::Thread(std::thread::current()));
                watching = Some(id);
            }
            let from = Instant::now();
            loop {
                let end = watched.poll_end();
                let left = slice.saturating_sub(from.elapsed());
                if end.is_some() || left.is_zero() {
                    return end;
                }
                std::thread::park_timeout(left);
            }
        });
        if let Some(id) = watching {
            watched.unwatch(id);
        }
        match end? {
            Some(end) => errors::end(end, self.deadline).map_or(Ok(()), Err),
            None => Err(late(timeout)),
        }
    }

    /// Whether it has ended, well or not. One load.
    fn done(&self) -> PyResult<bool> {
        Ok(self.watched.get()?.poll_end().is_some())
    }

    /// How it ended: ``"done"``, ``"never_started"``, ``"quiesced"``; ``None`` while under way.
    ///
    /// Each of the three means that its memory is the caller's again.
    #[getter]
    fn end(&self) -> PyResult<Option<&'static str>> {
        Ok(self.watched.get()?.poll_end().map(|end| match end {
            End::Done => "done",
            End::NeverStarted { .. } => "never_started",
            End::Quiesced { .. } => "quiesced",
        }))
    }

    /// Why it did not complete; ``None`` if it did, or is under way.
    fn exception(&self) -> PyResult<Option<Py<PyAny>>> {
        let end = self.watched.get()?.poll_end();
        let error = end.and_then(|end| errors::end(end, self.deadline));
        Ok(error.map(|error| Python::attach(|py| error.into_value(py).into_any())))
    }

    /// Asks the engine to stop it. It still ends by itself: wait for that before using its memory.
    fn cancel(&self) -> PyResult<()> {
        let watched = self.watched.get()?;
        if let Some(transfer) = &*lock(&watched.transfer) {
            transfer.cancel();
        }
        Ok(())
    }

    /// Has ``call(transfer)`` called when it has ended, on a thread of the engine's; at once, if it has.
    ///
    /// What it raises goes to ``sys.unraisablehook``.
    #[pyo3(signature = (call, /))]
    fn add_done_callback(slf: &Bound<'_, Self>, call: Bound<'_, PyAny>) -> PyResult<()> {
        if !call.is_callable() {
            return Err(PyTypeError::new_err("a callback must be callable"));
        }
        let watched = slf.get().watched.get()?;
        let (call, ended) = (call.unbind(), slf.clone().unbind());
        let engine = watched.caller.engine();
        let job = move || call_back(engine, &call, |py| (ended,).into_pyobject(py));
        watched.caller.start()?;
        lock(&watched.waiters).calls.push(Box::new(job));
        watched.arm();
        Ok(())
    }

    fn __repr__(&self) -> String {
        let end = match self.watched.get().map(|watched| watched.poll_end()) {
            Err(_) => "of the parent process".to_owned(),
            Ok(None) => "under way".to_owned(),
            Ok(Some(End::Done)) => "done".to_owned(),
            Ok(Some(End::NeverStarted { error })) => format!("never started: {error}"),
            Ok(Some(End::Quiesced { error })) => format!("quiesced: {error}"),
        };
        format!("<Transfer, {}, {end}>", self.what)
    }
}

fn late(after: Duration) -> PyErr {
    errors::wait(&immwire::WaitTimeout { after }.to_string(), after)
}

/// The wait of one task for a transfer's end.
struct Ended {
    watched: Arc<Watched>,
    deadline: Option<Duration>,
    watching: Option<u64>,
}

impl Op for Ended {
    fn forgotten(&self) -> &'static CStr {
        c"Transfer.wait was never awaited"
    }

    fn look(&mut self, py: Python<'_>) -> Option<Outcome> {
        let end = self.watched.poll_end()?;
        Some(errors::end(end, self.deadline).map_or_else(|| Ok(py.None()), Err))
    }

    fn watch(&mut self, _py: Python<'_>, bell: &Arc<Bell>) -> Option<Outcome> {
        if let Some(id) = self.watching.replace(bell.id()) {
            self.watched.unwatch(id);
        }
        // If the end has come by now, the bell rings, and is heard.
        self.watched.watch(bell.id(), Waiter::Task(Arc::clone(bell)));
        None
    }

    fn late(&mut self, py: Python<'_>, after: Duration) -> Outcome {
        self.look(py).unwrap_or_else(|| Err(late(after)))
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some(id) = self.watching {
            self.watched.unwatch(id);
        }
    }
}
