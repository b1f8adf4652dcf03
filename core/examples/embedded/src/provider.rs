//! A provider: it moves the bytes of a work request, and counts its immediate where they went.
//!
//! Memory to memory, in one address space. A real one posts to a device here, and its completions come
//! later; this one keeps them back, and reports the latest first, to show that no order is assumed.

use core::ptr;

use heapless::Vec;
use immwire_core::group::{Token, WorkError, WorkRequest};
use immwire_core::imm::{Added, CounterSlot, CounterTable};

/// The counters that writes to an engine are counted at.
pub type Counters = CounterTable<[CounterSlot; crate::COUNTERS]>;

/// Pieces that may be in flight.
pub const DEPTH: u16 = 32;

/// The way to the other engine.
pub struct Memory {
    peer: *const Counters,
    peer_key: u64,
    completed: Vec<(Token, Result<(), WorkError>), { DEPTH as usize }>,
}

impl Memory {
    /// The way to the engine that counts at `peer` and whose arena has the key `peer_key`.
    ///
    /// # Safety
    ///
    /// `peer` points to counters, for as long as this is used.
    pub const unsafe fn new(peer: *const Counters, peer_key: u64) -> Self {
        Self { peer, peer_key, completed: Vec::new() }
    }

    /// Does what `work` says, and keeps how it ended for [`Memory::poll`].
    ///
    /// `false`, and nothing is done, if [`DEPTH`] pieces were not polled yet.
    ///
    /// # Safety
    ///
    /// `work.src` and `work.dst` are addresses of `work.len` bytes that may be read and written.
    #[must_use = "a piece that was not posted is never polled"]
    pub unsafe fn post(&mut self, work: &WorkRequest) -> bool {
        if self.completed.is_full() {
            return false;
        }
        // SAFETY: our caller's promise.
        let outcome = unsafe { self.write(work) };
        self.completed.push((work.token, outcome)).is_ok()
    }

    /// How a piece that was posted ended, if one has.
    pub fn poll(&mut self) -> Option<(Token, Result<(), WorkError>)> {
        self.completed.pop()
    }

    /// # Safety
    ///
    /// As for [`Memory::post`].
    unsafe fn write(&self, work: &WorkRequest) -> Result<(), WorkError> {
        if work.dst_key != self.peer_key {
            return Err(WorkError::RemoteAccess);
        }
        let (src, dst) = (work.src as *const u8, work.dst as *mut u8);
        if let Ok(len) = usize::try_from(work.len) {
            // SAFETY: our caller's promise; `copy` does not mind if they overlap.
            unsafe { ptr::copy(src, dst, len) };
        }
        let Some(imm) = work.imm else { return Ok(()) };
        // SAFETY: the promise of `new`'s caller.
        let counters = unsafe { &*self.peer };
        match counters.add(imm) {
            Added::Counted | Added::Fired => Ok(()),
            Added::Stale | Added::NoSuchSlot | Added::Overflow => Err(WorkError::RemoteAccess),
        }
    }
}
