//! Waits of tasks for a peer that comes up, and for room for another transfer.

use std::ffi::CStr;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use immwire::{Capacity, PeerError, PeerId, PeerUp};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::engine::Running;
use crate::errors;
use crate::places::Places;
use crate::sync::{fresh_id, wait};
use crate::waiting::{Bell, Op, Outcome, Waiter};

/// A future of the engine's, which is held by it weakly only: it may be closed meanwhile.
struct Asked<F> {
    core: Weak<Running>,
    future: Pin<Box<F>>,
}

impl<F: Future> Asked<F> {
    fn new(core: &Arc<Running>, future: F) -> Self {
        Self { core: Arc::downgrade(core), future: Box::pin(future) }
    }

    /// What the future says; what it is told of the engine's end, the error says better.
    fn poll(&mut self, waker: &Waker) -> Option<PyResult<F::Output>> {
        let polled = self.future.as_mut().poll(&mut Context::from_waker(waker));
        match polled {
            _ if self.core.strong_count() == 0 => Some(Err(errors::closed("engine"))),
            Poll::Ready(output) => Some(Ok(output)),
            Poll::Pending => None,
        }
    }
}

/// A wait until a peer is up.
pub(crate) struct Up {
    asked: Asked<PeerUp>,
    peer: PeerId,
}

impl Up {
    pub(crate) fn new(core: &Arc<Running>, peer: PeerId) -> Self {
        Self { asked: Asked::new(core, core.engine.peer_up(peer)), peer }
    }

    fn poll(&mut self, py: Python<'_>, waker: &Waker) -> Option<Outcome> {
        let up = self.asked.poll(waker)?;
        Some(up.and_then(|up| up.map_err(errors::peer)).map(|()| py.None()))
    }
}

impl Op for Up {
    fn forgotten(&self) -> &'static CStr {
        c"TransferEngine.wait_peer was never awaited"
    }

    fn look(&mut self, py: Python<'_>) -> Option<Outcome> {
        self.poll(py, Waker::noop())
    }

    fn watch(&mut self, py: Python<'_>, bell: &Arc<Bell>) -> Option<Outcome> {
        self.poll(py, &Waker::from(Arc::clone(bell)))
    }

    fn late(&mut self, py: Python<'_>, after: Duration) -> Outcome {
        let peer = self.peer;
        let late = || Err(errors::peer(PeerError::Timeout { peer, after }));
        self.look(py).unwrap_or_else(late)
    }
}

/// A wait until there is room for another transfer; says whether there is.
pub(crate) struct Room {
    asked: Asked<Capacity>,
    places: Arc<Places>,
    /// As whom it waits for an end.
    id: Option<u64>,
}

impl Room {
    pub(crate) fn new(core: &Arc<Running>) -> Self {
        let places = Arc::clone(&core.manner.places);
        Self { asked: Asked::new(core, core.engine.capacity()), places, id: None }
    }

    /// What there is, with what transfers that have ended leave.
    fn find(&mut self, waker: &Waker) -> Option<PyResult<()>> {
        let found = self.asked.poll(waker);
        if found.is_none() && self.places.sweep() { self.asked.poll(waker) } else { found }
    }

    /// As [`Room::find`]; or has `waiter` woken, as `id`, when it is worth looking again.
    fn stand_by(&mut self, id: u64, waiter: Waiter) -> Option<PyResult<()>> {
        let waker = waiter.waker();
        let found = self.asked.poll(&waker);
        if found.is_some() {
            return found;
        }
        if let Some(before) = self.id.replace(id) {
            self.places.forget(before);
        }
        self.places.watch(id, waiter);
        // After that: what has ended before tells nobody.
        self.find(&waker)
    }

    /// Waits without an event loop.
    pub(crate) fn block(mut self, py: Python<'_>, timeout: Duration) -> PyResult<bool> {
        let id = fresh_id();
        let found = wait(py, timeout, |slice| {
            let from = Instant::now();
            loop {
                let found = self.stand_by(id, Waiter::Thread(std::thread::current()));
                let left = slice.saturating_sub(from.elapsed());
                if found.is_some() || left.is_zero() {
                    return found;
                }
                std::thread::park_timeout(left);
            }
        })?;
        Ok(found.transpose()?.is_some())
    }
}

impl Op for Room {
    fn forgotten(&self) -> &'static CStr {
        c"TransferEngine.wait_capacity was never awaited"
    }

    fn look(&mut self, py: Python<'_>) -> Option<Outcome> {
        let found = self.find(Waker::noop())?;
        Some(found.map(|()| answer(py, true)))
    }

    fn watch(&mut self, py: Python<'_>, bell: &Arc<Bell>) -> Option<Outcome> {
        let found = self.stand_by(bell.id(), Waiter::Task(Arc::clone(bell)))?;
        Some(found.map(|()| answer(py, true)))
    }

    fn late(&mut self, py: Python<'_>, _after: Duration) -> Outcome {
        self.look(py).unwrap_or_else(|| Ok(answer(py, false)))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.places.forget(id);
        }
    }
}

fn answer(py: Python<'_>, is_so: bool) -> Py<PyAny> {
    PyBool::new(py, is_so).to_owned().into_any().unbind()
}
