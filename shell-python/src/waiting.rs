//! `await`: how a task of an event loop waits for what an engine's thread will tell.
//!
//! ```text
//!  task ── __next__ ──▶ look, spin a little ── there ──▶ the result, without leaving the task
//!                         │ not there
//!                         ▼
//!                  a future of the loop, known to its `Hook` by number
//!  engine's thread ── Bell ──▶ the number joins `ready`; the first one writes to the eventfd
//!  loop ── reader ──▶ futures of all that are ready are resolved; their tasks go on
//! ```
//!
//! An engine's thread never attaches to the interpreter here, so that a busy one does not hold it up. Any
//! loop will do that has `add_reader` and `call_later`.
//!
//! # Invariants
//!
//! - A number is known to a hook from suspension until it is rung, late, or forgotten. Its task is not resumed before.
//! - A hook belongs to what its loop calls: a loop that is closed lets go of it, and with it go the futures, the tasks that
//!   nobody will resume, and what these have begun to take.
//! - A cancelled or forgotten wait gives back what it had begun to take: dropping an [`Op`] does.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyRuntimeWarning, PyStopIteration, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

use crate::fork;
use crate::sync::{fresh_id, lock};

/// How a result is handed to the task.
pub(crate) type Outcome = PyResult<Py<PyAny>>;

/// Something to be waited for, once. Dropped before it is there, it gives back what it took.
pub(crate) trait Op: Send {
    /// The warning, if nobody awaits what was called.
    fn forgotten(&self) -> &'static CStr;

    /// The outcome, if it is there. Cheap: it is called again and again.
    fn look(&mut self, py: Python<'_>) -> Option<Outcome>;

    /// The outcome; or [`None`], and `bell` is rung once it is worth looking again.
    fn watch(&mut self, py: Python<'_>, bell: &Arc<Bell>) -> Option<Outcome>;

    /// The time is up: the outcome if it came after all, else the error that says what is missing.
    fn late(&mut self, py: Python<'_>, after: Duration) -> Outcome;
}

/// What wakes one waiting task.
pub(crate) struct Bell {
    hook: Weak<Hook>,
    id: u64,
}

impl Bell {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn ring(&self) {
        if let Some(hook) = self.hook.upgrade() {
            hook.ring(self.id);
        }
    }

    /// Its task is not to be woken any more.
    fn forget(&self) {
        if let Some(hook) = self.hook.upgrade() {
            hook.forget(self.id);
        }
    }

    /// Whether its task sleeps still.
    fn is_awaited(&self) -> bool {
        let futures = |hook: Arc<Hook>| lock(&hook.waiting).futures.contains_key(&self.id);
        self.hook.upgrade().is_some_and(futures)
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}

/// A thread that waits.
struct Parked(Thread);

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Whoever waits for something, as the one who brings it sees it.
#[derive(Clone)]
pub(crate) enum Waiter {
    Task(Arc<Bell>),
    Thread(Thread),
}

impl Waiter {
    /// For a future of the engine's.
    pub(crate) fn waker(&self) -> Waker {
        match self {
            Self::Task(bell) => Waker::from(Arc::clone(bell)),
            Self::Thread(thread) => Waker::from(Arc::new(Parked(thread.clone()))),
        }
    }

    pub(crate) fn wake(&self) {
        match self {
            Self::Task(bell) => bell.ring(),
            Self::Thread(thread) => thread.unpark(),
        }
    }
}

/// One event loop's waiting tasks.
struct Hook {
    /// An eventfd, readable while `ready` is not empty.
    fd: OwnedFd,
    /// Rung, and not resolved yet.
    ready: Mutex<Vec<u64>>,
    waiting: Mutex<Tasks>,
    made_in: u32,
}

#[derive(Default)]
struct Tasks {
    futures: HashMap<u64, Py<PyAny>>,
    /// Deadlines of these, and of some that are there no more.
    deadlines: BinaryHeap<Reverse<(Instant, u64)>>,
    /// When the loop will call, and the handle to stop it.
    timer: Option<(Instant, Py<PyAny>)>,
}

impl Tasks {
    /// Numbers whose time is up.
    fn expired(&mut self, now: Instant) -> Vec<u64> {
        let mut late = Vec::new();
        while self.deadlines.peek().is_some_and(|Reverse((at, _))| *at <= now) {
            late.extend(self.deadlines.pop().map(|Reverse((_, id))| id));
        }
        late
    }

    fn remember(&mut self, deadline: Instant, id: u64) {
        if self.deadlines.len() > 64 + 2 * self.futures.len() {
            let futures = &self.futures;
            self.deadlines.retain(|Reverse((_, id))| futures.contains_key(id));
        }
        self.deadlines.push(Reverse((deadline, id)));
    }

    /// The next deadline that counts, if the loop does not call as early.
    fn unplanned(&mut self) -> Option<Instant> {
        while let Some(Reverse((at, id))) = self.deadlines.peek() {
            if self.futures.contains_key(id) {
                let planned = self.timer.as_ref().is_some_and(|(call, _)| call <= at);
                return (!planned).then_some(*at);
            }
            self.deadlines.pop();
        }
        None
    }
}

impl Hook {
    /// The hook of `event_loop`; made, and given to the loop, on first use.
    fn of(event_loop: &Bound<'_, PyAny>) -> PyResult<Arc<Self>> {
        static HOOKS: Mutex<Vec<(Py<PyAny>, Weak<Hook>)>> = Mutex::new(Vec::new());
        let py = event_loop.py();
        let known: Vec<(Py<PyAny>, Arc<Self>)> = lock(&HOOKS)
            .iter()
            .filter_map(|(weak, hook)| Some((weak.clone_ref(py), hook.upgrade()?)))
            .collect();
        for (weak, hook) in known {
            if hook.made_in == fork::generation() && weak.bind(py).call0()?.is(event_loop) {
                return Ok(hook);
            }
        }
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let fd = rustix::event::eventfd(0, flags).map_err(std::io::Error::from)?;
        let (ready, waiting) = (Mutex::default(), Mutex::default());
        let hook = Arc::new(Self { fd, ready, waiting, made_in: fork::generation() });
        let reader = Bound::new(py, Reader { hook: Arc::clone(&hook) })?;
        event_loop.call_method1(intern!(py, "add_reader"), (hook.fd.as_raw_fd(), reader))?;
        let weak = py.import(intern!(py, "weakref"))?.getattr(intern!(py, "ref"))?;
        let weak = weak.call1((event_loop,))?.unbind();
        let mut hooks = lock(&HOOKS);
        let (mut live, gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut *hooks).into_iter().partition(|(_, hook)| hook.strong_count() > 0);
        live.push((weak, Arc::downgrade(&hook)));
        *hooks = live;
        drop(hooks);
        // After the lock: what goes with them may run Python code.
        drop(gone);
        Ok(hook)
    }

    fn is_idle(&self) -> bool {
        lock(&self.waiting).futures.is_empty()
    }

    fn ring(&self, id: u64) {
        let mut ready = lock(&self.ready);
        ready.push(id);
        if ready.len() == 1 {
            drop(ready);
            // An eventfd's counter cannot overflow by ones; it is readable either way.
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }

    fn forget(&self, id: u64) {
        let forgotten = lock(&self.waiting).futures.remove(&id);
        drop(forgotten);
    }

    /// Resolves the futures of these numbers; the tasks find out by themselves what became of it.
    fn resolve(&self, py: Python<'_>, ids: Vec<u64>) -> PyResult<()> {
        for id in ids {
            let future = lock(&self.waiting).futures.remove(&id);
            let Some(future) = future.map(|future| future.into_bound(py)) else { continue };
            // A cancelled one stays so.
            if !future.call_method0(intern!(py, "done"))?.is_truthy()? {
                future.call_method1(intern!(py, "set_result"), (py.None(),))?;
            }
        }
        Ok(())
    }

    /// Has the loop call when the next deadline is over, if it is not about to call before.
    fn plan(self: &Arc<Self>, event_loop: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = event_loop.py();
        let Some(at) = lock(&self.waiting).unplanned() else { return Ok(()) };
        // A loop's clock is coarser than ours: a call that comes too early would only come again.
        let delay = at.saturating_duration_since(Instant::now()) + Duration::from_micros(100);
        let late = Bound::new(
            py,
            Late { hook: Arc::downgrade(self), event_loop: event_loop.clone().unbind() },
        )?;
        let handle =
            event_loop.call_method1(intern!(py, "call_later"), (delay.as_secs_f64(), late))?;
        let earlier = lock(&self.waiting).timer.replace((at, handle.unbind()));
        if let Some((_, handle)) = earlier {
            handle.call_method0(py, intern!(py, "cancel"))?;
        }
        Ok(())
    }
}

/// Called by the loop when the eventfd is readable.
#[pyclass(module = "immwire", frozen, name = "_Reader")]
struct Reader {
    hook: Arc<Hook>,
}

#[pymethods]
impl Reader {
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        // Before `ready` is emptied: what is rung in between makes it readable again.
        let _ = rustix::io::read(&self.hook.fd, &mut [0; 8]);
        let ready = std::mem::take(&mut *lock(&self.hook.ready));
        self.hook.resolve(py, ready)
    }
}

/// Called by the loop when a deadline is over.
#[pyclass(module = "immwire", frozen, name = "_Late")]
struct Late {
    /// Which has the handle of this call, in turn.
    hook: Weak<Hook>,
    event_loop: Py<PyAny>,
}

#[pymethods]
impl Late {
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        let Some(hook) = self.hook.upgrade() else { return Ok(()) };
        let (late, timer) = {
            let mut waiting = lock(&hook.waiting);
            (waiting.expired(Instant::now()), waiting.timer.take())
        };
        drop(timer);
        hook.resolve(py, late)?;
        hook.plan(self.event_loop.bind(py))
    }
}

/// A wait, and the iterator that `await` drives. To be awaited once, or made a task of, as a coroutine is.
#[pyclass(module = "immwire", frozen, name = "Waiting")]
pub(crate) struct Waiting {
    state: Mutex<State>,
    made_in: u32,
}

enum State {
    Fresh { op: Box<dyn Op>, timeout: Duration, spin: Duration },
    Suspended { op: Box<dyn Op>, timeout: Duration, deadline: Instant, bell: Arc<Bell> },
    Over,
}

impl Waiting {
    pub(crate) fn new(op: impl Op + 'static, timeout: Duration, spin: Duration) -> Self {
        let state = Mutex::new(State::Fresh { op: Box::new(op), timeout, spin });
        Self { state, made_in: fork::generation() }
    }

    /// Waits in `op` for its bell; returns what the task is to yield.
    fn suspend(
        &self,
        event_loop: &Bound<'_, PyAny>,
        hook: &Arc<Hook>,
        mut op: Box<dyn Op>,
        (timeout, deadline): (Duration, Instant),
    ) -> PyResult<Option<Py<PyAny>>> {
        let py = event_loop.py();
        let future = event_loop.call_method0(intern!(py, "create_future"))?;
        let bell = Arc::new(Bell { hook: Arc::downgrade(hook), id: fresh_id() });
        {
            let mut waiting = lock(&hook.waiting);
            waiting.futures.insert(bell.id, future.clone().unbind());
            waiting.remember(deadline, bell.id);
        }
        if let Some(outcome) = op.watch(py, &bell) {
            hook.forget(bell.id);
            return finish(outcome);
        }
        hook.plan(event_loop).inspect_err(|_| hook.forget(bell.id))?;
        *lock(&self.state) = State::Suspended { op, timeout, deadline, bell };
        // An asyncio future says by its own iterator that somebody waits for it.
        let steps = future.call_method0(intern!(py, "__await__"))?;
        steps.call_method0(intern!(py, "__next__")).map(|step| Some(step.unbind()))
    }
}

/// The end of the iteration: the value of `await`, or what it raises.
fn finish(outcome: Outcome) -> PyResult<Option<Py<PyAny>>> {
    let value = outcome?;
    let none = Python::attach(|py| value.is_none(py));
    if none { Ok(None) } else { Err(PyStopIteration::new_err((value,))) }
}

fn awaited() -> PyErr {
    PyRuntimeError::new_err("this was awaited already: make another")
}

fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    static GET: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let get = GET.get_or_try_init(py, || {
        let asyncio = py.import(intern!(py, "asyncio"))?;
        asyncio.getattr(intern!(py, "get_running_loop")).map(Bound::unbind)
    })?;
    get.bind(py).call0()
}

#[pymethods]
impl Waiting {
    /// For annotations: what ``await`` returns.
    #[classmethod]
    fn __class_getitem__<'py>(
        class: &Bound<'py, PyType>,
        item: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let alias = class.py().import(intern!(class.py(), "types"))?.getattr("GenericAlias")?;
        alias.call1((class, item))
    }

    fn __await__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        if self.made_in != fork::generation() {
            return Err(crate::errors::forked());
        }
        let state = std::mem::replace(&mut *lock(&self.state), State::Over);
        let (mut op, event_loop, hook, times) = match state {
            State::Fresh { mut op, timeout, spin } => {
                if let Some(outcome) = op.look(py) {
                    return finish(outcome);
                }
                let event_loop = running_loop(py)?;
                let hook = Hook::of(&event_loop)?;
                let start = Instant::now();
                // While other tasks wait too, the loop may have something to do for them.
                let spin = if hook.is_idle() { spin.min(timeout) } else { Duration::ZERO };
                while start.elapsed() < spin {
                    for _ in 0..16 {
                        if let Some(outcome) = op.look(py) {
                            return finish(outcome);
                        }
                        std::hint::spin_loop();
                    }
                }
                (op, event_loop, hook, (timeout, start + timeout))
            }
            State::Suspended { mut op, timeout, deadline, bell } => {
                if bell.is_awaited() {
                    // By another task, which goes on.
                    *lock(&self.state) = State::Suspended { op, timeout, deadline, bell };
                    return Err(awaited());
                }
                if let Some(outcome) = op.look(py) {
                    return finish(outcome);
                }
                let event_loop = running_loop(py)?;
                let hook = bell.hook.upgrade().map_or_else(|| Hook::of(&event_loop), Ok)?;
                (op, event_loop, hook, (timeout, deadline))
            }
            State::Over => return Err(awaited()),
        };
        if Instant::now() >= times.1 {
            return finish(op.late(py, times.0));
        }
        self.suspend(&event_loop, &hook, op, times)
    }

    /// As ``next``; what is sent says nothing. With it this is a coroutine to asyncio, which tells one that is cancelled before it
    /// has begun.
    #[pyo3(signature = (_value, /))]
    fn send(&self, py: Python<'_>, _value: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.__next__(py)?.ok_or_else(|| PyStopIteration::new_err(()))
    }

    /// The task was cancelled, or thrown into.
    #[pyo3(signature = (*error))]
    fn throw(&self, error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close();
        let kind = error.get_item(0)?;
        let value = error.get_item(1).ok().filter(|value| !value.is_none());
        let instance = match value {
            Some(value) if value.is_instance_of::<pyo3::exceptions::PyBaseException>() => value,
            Some(value) => kind.call1((value,))?,
            None if kind.is_callable() => kind.call0()?,
            None => kind,
        };
        if !instance.is_instance_of::<pyo3::exceptions::PyBaseException>() {
            return Err(PyTypeError::new_err("only exceptions can be thrown"));
        }
        Err(PyErr::from_value(instance))
    }

    /// Gives the wait up, and back what it took.
    fn close(&self) {
        let state = std::mem::replace(&mut *lock(&self.state), State::Over);
        if let State::Suspended { bell, .. } = &state {
            bell.forget();
        }
    }

    fn __repr__(&self) -> &'static str {
        match &*lock(&self.state) {
            State::Fresh { .. } => "<Waiting, not awaited yet>",
            State::Suspended { .. } => "<Waiting>",
            State::Over => "<Waiting, over>",
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.made_in != fork::generation() {
            // The parent's: see `fork`.
            std::mem::forget(std::mem::replace(&mut *lock(&self.state), State::Over));
            return;
        }
        let forgotten = match &*lock(&self.state) {
            State::Fresh { op, .. } => Some(op.forgotten()),
            State::Suspended { .. } | State::Over => None,
        };
        self.close();
        forgotten.map(warn);
    }
}

/// Warns, as of a coroutine that was never awaited.
pub(crate) fn warn(message: &CStr) {
    // At the interpreter's end nobody would see it.
    let _ = Python::try_attach(|py| {
        // Whoever drops it may be on its way with an exception, which goes on.
        let raised = PyErr::take(py);
        let kind = py.get_type::<PyRuntimeWarning>();
        if let Err(error) = PyErr::warn(py, &kind, message, 1) {
            error.write_unraisable(py, None);
        }
        if let Some(raised) = raised {
            raised.restore(py);
        }
    });
}
