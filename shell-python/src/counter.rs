//! Counters, as Python sees them: awaited, waited for, asked.

use std::collections::HashMap;
use std::ffi::CStr;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use immwire::{CountError, Expected};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping};

use crate::errors;
use crate::fork::Owned;
use crate::sync::{lock, wait};
use crate::transfer::Manner;
use crate::values::{PeerId, seconds};
use crate::waiting::{Bell, Op, Outcome, Waiting};

/// A counter and what was said of its peers.
struct Counter {
    imm: Arc<immwire::ImmCounter>,
    /// Writes by peer that earlier waits for shares have consumed.
    consumed: Mutex<HashMap<immwire::PeerId, u64>>,
    /// Waits that have consumed others, or may, of which nobody said whose they are; a wait that was refused is none.
    mixed: AtomicU64,
}

impl Counter {
    /// Writes were, or may be, consumed of which nobody says whose they are.
    fn mix(&self) {
        // It tells no more than itself.
        self.mixed.fetch_add(1, Ordering::Relaxed);
    }

    /// The writes of a wait were consumed.
    fn settle(&self, writes: u64, expected: &[Expected]) {
        if expected.is_empty() && writes > 0 {
            self.mix();
        }
        let mut consumed = lock(&self.consumed);
        for Expected { peer, writes } in expected {
            let all = consumed.entry(*peer).or_default();
            *all = all.saturating_add(*writes);
        }
    }

    /// The time is up: consumes the writes if they came after all, else says who is late.
    fn late(&self, writes: u64, expected: &[Expected], given: Duration) -> PyResult<()> {
        let ended = if expected.is_empty() {
            self.imm.wait(writes, Duration::ZERO)
        } else {
            self.imm.wait_from(expected, Duration::ZERO)
        };
        if ended.is_ok() && expected.is_empty() && writes > 0 {
            self.mix();
        }
        ended.map_err(|mut error| {
            if let CountError::Timeout { after, peers, .. } = &mut error {
                *after = given;
                let is_mixed = self.mixed.load(Ordering::Relaxed) > 0;
                let consumed = lock(&self.consumed);
                for share in peers {
                    let before = consumed.get(&share.peer).copied().unwrap_or(0);
                    share.arrived = share.arrived.saturating_sub(before);
                    // How many of them are of this wait nobody knows: so nobody is said to be late who is not.
                    share.expected = share.expected.filter(|_| !is_mixed);
                }
            }
            if expected.is_empty() { errors::count(&error) } else { errors::count_from(&error) }
        })
    }
}

/// A counter of writes that arrive. Peers put its ``tag`` into what they send as ``imm``.
///
/// Closing it, or dropping it, makes the tag stale.
#[pyclass(module = "immwire", frozen)]
pub(crate) struct ImmCounter {
    counter: Owned<Mutex<Option<Arc<Counter>>>>,
    tag: immwire::ImmTag,
    manner: Manner,
}

impl ImmCounter {
    pub(crate) fn new(imm: immwire::ImmCounter, manner: Manner) -> Self {
        let tag = imm.tag();
        let (imm, consumed, mixed) = (Arc::new(imm), Mutex::default(), AtomicU64::new(0));
        let counter = Counter { imm, consumed, mixed };
        Self { counter: Owned::new(Mutex::new(Some(Arc::new(counter)))), tag, manner }
    }

    fn get(&self) -> PyResult<Arc<Counter>> {
        let counter = lock(self.counter.get()?).clone();
        counter.ok_or_else(|| errors::closed("counter"))
    }

    /// For others to wait on: `wait` begins that, or is refused, and then the counter is as it was.
    pub(crate) fn lend<R>(
        &self,
        wait: impl FnOnce(&Arc<immwire::ImmCounter>) -> PyResult<R>,
    ) -> PyResult<R> {
        let counter = self.get()?;
        // Before: once it has begun it may have consumed something.
        counter.mix();
        wait(&counter.imm).inspect_err(|_| {
            counter.mixed.fetch_sub(1, Ordering::Relaxed);
        })
    }

    fn op(&self, writes: u64, expected: Vec<Expected>) -> PyResult<Counted> {
        Ok(Counted { counter: self.get()?, writes, expected, waiting: None })
    }

    fn block(
        &self,
        py: Python<'_>,
        writes: u64,
        expected: &[Expected],
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let timeout = timeout.map_or(Ok(self.manner.timeout), seconds)?;
        let counter = self.get()?;
        let reached = wait(py, timeout, |slice| match counter.imm.wait(writes, slice) {
            Err(CountError::Timeout { .. }) => None,
            reached => Some(reached),
        })?;
        match reached {
            Some(Ok(())) => {
                counter.settle(writes, expected);
                Ok(())
            }
            Some(Err(error)) => Err(errors::count(&error)),
            None => counter.late(writes, expected, timeout),
        }
    }
}

/// What each peer is to send, by a mapping, and how much that is.
fn shares(expected: &Bound<'_, PyAny>) -> PyResult<(u64, Vec<Expected>)> {
    let expected: HashMap<PeerId, u64> = if let Ok(dict) = expected.cast::<PyDict>() {
        dict.extract()?
    } else {
        let items = expected.cast::<PyMapping>()?.items()?;
        items.iter().map(|item| item.extract::<(PeerId, u64)>()).collect::<PyResult<_>>()?
    };
    let writes = expected.values().copied().fold(0, u64::saturating_add);
    let mut shares: Vec<Expected> =
        expected.into_iter().map(|(peer, writes)| Expected { peer: peer.into(), writes }).collect();
    shares.sort_unstable_by_key(|share| share.peer);
    Ok((writes, shares))
}

#[pymethods]
impl ImmCounter {
    /// What peers put into their writes to count here: an integer of 20 bits.
    #[getter]
    fn tag(&self) -> u32 {
        self.tag.bits()
    }

    /// Its number among the engine's counters.
    #[getter]
    fn slot(&self) -> u16 {
        self.tag.slot()
    }

    /// Whole writes that have arrived and were not consumed; 0 while a wait is under way.
    #[getter]
    fn available(&self) -> PyResult<u64> {
        Ok(self.get()?.imm.available())
    }

    /// Consumes ``writes`` if so many have arrived; returns whether.
    #[pyo3(signature = (writes, /))]
    fn try_take(&self, writes: u64) -> PyResult<bool> {
        let counter = self.get()?;
        let taken = counter.imm.try_take(writes).map_err(|error| errors::count(&error))?;
        if taken {
            counter.settle(writes, &[]);
        }
        Ok(taken)
    }

    /// To be awaited: until ``writes`` have arrived, and were consumed. Early ones count.
    ///
    /// One wait at a time. After a timeout, or if the task is cancelled, nothing was consumed. A timeout says who has sent what, and
    /// names nobody as late: who owes the rest may not have connected yet.
    #[pyo3(signature = (writes, /, *, timeout = None))]
    fn wait(&self, writes: u64, timeout: Option<f64>) -> PyResult<Waiting> {
        let timeout = timeout.map_or(Ok(self.manner.timeout), seconds)?;
        Ok(Waiting::new(self.op(writes, Vec::new())?, timeout, self.manner.spin))
    }

    /// As ``wait``, for what each peer is to send: a timeout then names who is late. Not where others of the counter's writes
    /// were consumed without saying whose they are, as by ``wait``: shares are then what each has sent for all of these.
    #[pyo3(signature = (expected, /, *, timeout = None))]
    fn wait_from(&self, expected: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<Waiting> {
        let timeout = timeout.map_or(Ok(self.manner.timeout), seconds)?;
        let (writes, expected) = shares(expected)?;
        Ok(Waiting::new(self.op(writes, expected)?, timeout, self.manner.spin))
    }

    /// As ``wait``, without an event loop; other threads run meanwhile.
    #[pyo3(signature = (writes, /, *, timeout = None))]
    fn wait_blocking(&self, py: Python<'_>, writes: u64, timeout: Option<f64>) -> PyResult<()> {
        self.block(py, writes, &[], timeout)
    }

    /// As ``wait_from``, without an event loop; other threads run meanwhile.
    #[pyo3(signature = (expected, /, *, timeout = None))]
    fn wait_from_blocking(
        &self,
        py: Python<'_>,
        expected: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (writes, expected) = shares(expected)?;
        self.block(py, writes, &expected, timeout)
    }

    /// Makes the tag stale: what still arrives for it is not counted. Waits under way go on.
    fn close(&self) -> PyResult<()> {
        let counter = lock(self.counter.get()?).take();
        drop(counter);
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close()
    }

    fn __repr__(&self) -> String {
        let (slot, tag) = (self.tag.slot(), self.tag.bits());
        match self.get() {
            Ok(counter) => {
                format!("<ImmCounter {slot}, tag={tag:#x}, available={}>", counter.imm.available())
            }
            Err(_) => format!("<ImmCounter {slot}, tag={tag:#x}, closed>"),
        }
    }
}

/// A wait that has armed the counter.
type Reached = Pin<Box<dyn Future<Output = Result<(), CountError>> + Send>>;

/// The wait of one task for a count.
struct Counted {
    counter: Arc<Counter>,
    writes: u64,
    expected: Vec<Expected>,
    /// Once the counter is armed; dropped, it disarms.
    waiting: Option<Reached>,
}

impl Counted {
    fn outcome(&self, py: Python<'_>, ended: Result<(), CountError>) -> Outcome {
        ended.map_err(|error| errors::count(&error))?;
        self.counter.settle(self.writes, &self.expected);
        Ok(py.None())
    }

    fn poll(&mut self, py: Python<'_>, waker: &Waker) -> Option<Outcome> {
        let polled = self.waiting.as_mut()?.as_mut().poll(&mut Context::from_waker(waker));
        let Poll::Ready(ended) = polled else { return None };
        self.waiting = None;
        Some(self.outcome(py, ended))
    }
}

impl Op for Counted {
    fn forgotten(&self) -> &'static CStr {
        if self.expected.is_empty() {
            c"ImmCounter.wait was never awaited"
        } else {
            c"ImmCounter.wait_from was never awaited"
        }
    }

    fn look(&mut self, py: Python<'_>) -> Option<Outcome> {
        if self.waiting.is_some() {
            return self.poll(py, Waker::noop());
        }
        match self.counter.imm.try_take(self.writes) {
            Ok(false) => None,
            Ok(true) => Some(self.outcome(py, Ok(()))),
            Err(error) => Some(self.outcome(py, Err(error))),
        }
    }

    fn watch(&mut self, py: Python<'_>, bell: &Arc<Bell>) -> Option<Outcome> {
        if self.waiting.is_none() {
            let (counter, writes) = (Arc::clone(&self.counter), self.writes);
            self.waiting = Some(Box::pin(async move { counter.imm.reached(writes).await }));
        }
        self.poll(py, &Waker::from(Arc::clone(bell)))
    }

    fn late(&mut self, py: Python<'_>, after: Duration) -> Outcome {
        // Disarms: what had arrived can be taken again.
        self.waiting = None;
        self.counter.late(self.writes, &self.expected, after).map(|()| py.None())
    }
}
