//! Waits of tasks for a peer that comes up, and for room for another transfer.

use std::ffi::CStr;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use immwire::{Capacity, PeerError, PeerId, PeerUp};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::engine::Running;
use crate::errors;
use crate::waiting::{Bell, Op, Outcome};

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
pub(crate) struct Room(Asked<Capacity>);

impl Room {
    pub(crate) fn new(core: &Arc<Running>) -> Self {
        Self(Asked::new(core, core.engine.capacity()))
    }

    fn poll(&mut self, py: Python<'_>, waker: &Waker) -> Option<Outcome> {
        let room = self.0.poll(waker)?;
        Some(room.map(|()| answer(py, true)))
    }
}

impl Op for Room {
    fn forgotten(&self) -> &'static CStr {
        c"TransferEngine.wait_capacity was never awaited"
    }

    fn look(&mut self, py: Python<'_>) -> Option<Outcome> {
        self.poll(py, Waker::noop())
    }

    fn watch(&mut self, py: Python<'_>, bell: &Arc<Bell>) -> Option<Outcome> {
        self.poll(py, &Waker::from(Arc::clone(bell)))
    }

    fn late(&mut self, py: Python<'_>, _after: Duration) -> Outcome {
        self.look(py).unwrap_or_else(|| Ok(answer(py, false)))
    }
}

fn answer(py: Python<'_>, is_so: bool) -> Py<PyAny> {
    PyBool::new(py, is_so).to_owned().into_any().unbind()
}
