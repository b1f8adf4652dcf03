//! `immwire.moe`: dispatch and combine among ranks, in host memory (`host`) and among GPUs (`gpu`). Here is what both share. It
//! refuses to know what goes where: `immwire::moe` does.
//!
//! # Invariants
//!
//! - One call at a time: the exchange is behind a lock, which only threads that detached hold, and for which
//!   none but a close waits. A second call is refused.
//! - An exchange holds a handle of its engine, and is closed before the engine is stopped.

mod gpu;
mod host;
mod report;

pub(crate) use gpu::{GpuAllToAll, GpuJoining};
pub(crate) use host::{HostAllToAll, Joining, Received};
pub(crate) use report::MoeReport;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use immwire::core::moe::{Placement, PlacementError};
use immwire::moe::gpu::Half;
use immwire::moe::{Format, MoeError, Seat};
use pyo3::prelude::*;

use crate::buffer::View;
use crate::engine::TransferEngine;
use crate::errors;
use crate::fork::Owned;
use crate::memory::{self, Memory};
use crate::sync::lock;

/// Why a call on a slot failed.
enum Failure {
    Busy,
    Closed,
    Joined,
    Moe(MoeError),
}

impl From<MoeError> for Failure {
    fn from(error: MoeError) -> Self {
        Self::Moe(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Busy => errors::exchange_busy(),
            Failure::Closed => errors::closed("exchange"),
            Failure::Joined => errors::joined_already(),
            Failure::Moe(error) => errors::moe(&error),
        }
    }
}

/// The place of an exchange, shared by its Python object and its engine.
struct Slot<H> {
    held: Mutex<H>,
    /// To be asked while a call is under way, and without being in the way of one.
    closed: AtomicBool,
}

impl<H> Slot<H> {
    fn take(&self) -> Result<MutexGuard<'_, H>, Failure> {
        match self.held.try_lock() {
            Ok(held) => Ok(held),
            // A panic inside a round leaves an exchange that knows that it is over.
            Err(TryLockError::Poisoned(held)) => Ok(PoisonError::into_inner(held)),
            Err(TryLockError::WouldBlock) => Err(Failure::Busy),
        }
    }
}

/// What can be closed, and be asked whether it is.
trait Close: Send + Sync {
    /// Ends the exchange, once the call under way has.
    fn close(&self);
    fn is_closed(&self) -> bool;
}

impl<H: Default + Send> Close for Slot<H> {
    fn close(&self) {
        let mut held = lock(&self.held);
        *held = H::default();
        // It tells no more than itself.
        self.closed.store(true, Ordering::Relaxed);
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }
}

/// The exchanges of one engine.
#[derive(Default)]
pub(crate) struct Exchanges(Mutex<Vec<Arc<dyn Close>>>);

impl Exchanges {
    fn add(&self, slot: Arc<dyn Close>) {
        let mut slots = lock(&self.0);
        slots.retain(|slot| !slot.is_closed());
        slots.push(slot);
    }

    /// Ends all; waits for calls under way, which have deadlines.
    pub(crate) fn close(self) {
        let slots = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        for slot in slots {
            slot.close();
        }
    }
}

/// What a Python object has of a slot. Dropped, it closes it.
struct Ours<H: Default + Send>(Arc<Slot<H>>);

impl<H: Default + Send> Drop for Ours<H> {
    fn drop(&mut self) {
        // At the interpreter's end nobody is left to do it, or to need it.
        let _ = Python::try_attach(|py| py.detach(|| self.0.close()));
    }
}

/// What both halves of an exchange share.
struct Common<H: Default + Send> {
    slot: Owned<Ours<H>>,
    /// Not to be stopped while it is needed.
    engine: Py<TransferEngine>,
    rank: u32,
    firsts: Vec<u32>,
}

impl<H: Default + Send + 'static> Common<H> {
    fn new(
        engine: &Bound<'_, TransferEngine>,
        exchanges: &Exchanges,
        held: H,
        rank: u32,
        firsts: &[u32],
    ) -> Self {
        let slot = Arc::new(Slot { held: Mutex::new(held), closed: AtomicBool::new(false) });
        exchanges.add(Arc::clone(&slot) as Arc<dyn Close>);
        let engine = engine.clone().unbind();
        Self { slot: Owned::new(Ours(slot)), engine, rank, firsts: firsts.to_vec() }
    }

    fn describe(&self) -> String {
        let (rank, firsts) = (self.rank, &self.firsts);
        let at = usize::try_from(rank).unwrap_or(usize::MAX);
        let bound = |at: usize| firsts.get(at).copied().unwrap_or(0);
        let (first, next) = (bound(at), bound(at.saturating_add(1)));
        let experts = firsts.last().copied().unwrap_or(0);
        let world = firsts.len().saturating_sub(1);
        format!(
            "rank {rank} of {world}, {} of {experts} experts from {first} on",
            next.saturating_sub(first)
        )
    }

    /// Runs `run`, detached, unless another thread is in a call.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut H) -> Result<R, Failure> + Send,
    ) -> PyResult<R> {
        let slot = &self.slot.get()?.0;
        Ok(py.detach(|| run(&mut *slot.take()?))?)
    }

    /// Of a call; the engine's if none is given.
    fn timeout(&self, timeout: Option<f64>) -> PyResult<Duration> {
        self.engine.get().timeout(timeout)
    }

    /// Seats of all ranks, from their bytes: as many as there are.
    fn seats(&self, seats: &Bound<'_, PyAny>) -> PyResult<Vec<Seat>> {
        let seats = seats_of(seats)?;
        let world = u32::try_from(self.firsts.len()).unwrap_or(u32::MAX).saturating_sub(1);
        if u32::try_from(seats.len()) == Ok(world) {
            return Ok(seats);
        }
        Err(errors::moe(&MoeError::Seats { found: seats.len(), world }))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let slot = &self.slot.get()?.0;
        py.detach(|| slot.close());
        Ok(())
    }

    fn is_closed(&self) -> bool {
        !self.slot.is_ours() || self.slot.peek().0.is_closed()
    }
}

fn seats_of(seats: &Bound<'_, PyAny>) -> PyResult<Vec<Seat>> {
    let mut read = Vec::new();
    for (rank, seat) in seats.try_iter()?.enumerate() {
        let bytes = View::contiguous(&seat?, false)?.to_vec();
        read.push(Seat::from_bytes(&bytes).map_err(|error| errors::seat(rank, error))?);
    }
    Ok(read)
}

/// The first expert of each rank, and the number of experts: as given, or an even spread.
fn placement(
    experts: Option<u32>,
    world: Option<u32>,
    firsts: Option<Vec<u32>>,
) -> PyResult<Vec<u32>> {
    match (experts, world, firsts) {
        (None, None, Some(firsts)) => Ok(firsts),
        (Some(experts), Some(world), None) => even(experts, world),
        _ => Err(errors::config(
            "experts and world are for an even spread, firsts for any other: give the two, or the one",
        )),
    }
}

fn even(experts: u32, world: u32) -> PyResult<Vec<u32>> {
    let wrong = |error: PlacementError| errors::config(&error.to_string());
    // More than there can be are refused, without memory for them.
    let entries = usize::try_from(world.min(1 << 16)).unwrap_or(0) + 1;
    let mut firsts = vec![0; entries];
    Placement::even(experts, &mut firsts).map_err(wrong)?;
    Ok(firsts)
}

/// What numbers of this name are.
fn format(dtype: &str) -> PyResult<Format> {
    match dtype {
        "bfloat16" => Ok(Format::Bf16),
        "float16" => Ok(Format::Fp16),
        _ => Err(errors::config(&format!(
            "numbers of {dtype:?}: \"bfloat16\" and \"float16\" can be"
        ))),
    }
}

fn writable(what: &str, object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let memory = memory::lent(object)?;
    if memory.readonly {
        return Err(errors::request(&format!("{what} is read only")));
    }
    Ok(memory)
}

/// What of a call is done, by its name.
fn half(name: &str) -> PyResult<Half> {
    match name {
        "both" => Ok(Half::Both),
        "send" => Ok(Half::Send),
        "receive" => Ok(Half::Receive),
        _ => Err(errors::request(&format!(
            "half is {name:?}: \"both\", \"send\" and \"receive\" can be"
        ))),
    }
}
