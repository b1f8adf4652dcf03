//! Memory for messages: registered with a device, and cut into pieces of one size.
//!
//! # Invariants
//!
//! No reference to a piece lives longer than a call: while an operation is under way the piece is the device's.

use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as sys;

use super::VerbsError;
use super::device::{Access, Domain, Registration};

/// Pieces of registered memory. Whoever posts operations on them sees to it that these are over before it is dropped.
#[derive(Debug)]
pub(super) struct Slab {
    /// Dropped before the memory is.
    registration: Option<Registration>,
    base: NonNull<u8>,
    each: usize,
    count: usize,
}

// SAFETY: an address of memory that the owner alone uses, or lends the device.
unsafe impl Send for Slab {}

impl Slab {
    /// `count` pieces of `each` bytes, zero.
    pub(super) fn new(domain: &Arc<Domain>, each: usize, count: usize) -> Result<Self, VerbsError> {
        let memory = Box::leak(vec![0_u8; each * count].into_boxed_slice());
        let mut slab = Self { registration: None, base: NonNull::from(memory).cast(), each, count };
        let access = Access { received: true, ..Access::default() };
        // SAFETY: the memory lives until after the registration is dropped.
        slab.registration =
            Some(unsafe { domain.register(slab.base, each * count, access, None) }?);
        Ok(slab)
    }

    /// Piece `index`, as an operation names it; the first, if there are not so many.
    pub(super) fn sge(&self, index: usize, len: usize) -> sys::ibv_sge {
        let index = if index < self.count { index } else { 0 };
        sys::ibv_sge {
            addr: self.base.as_ptr().wrapping_add(index * self.each) as u64,
            length: u32::try_from(len.min(self.each)).unwrap_or(0),
            lkey: self.registration.as_ref().map_or(0, Registration::local_key),
        }
    }

    /// Copies from `skip` bytes behind the start of piece `index`, as much as there is and `into` takes.
    ///
    /// # Safety
    ///
    /// No operation on the piece is under way.
    pub(super) unsafe fn read(&self, index: usize, skip: usize, into: &mut [u8]) {
        if index >= self.count || skip > self.each {
            return;
        }
        let len = into.len().min(self.each - skip);
        let from = self.base.as_ptr().wrapping_add(index * self.each + skip);
        // SAFETY: inside the piece; nobody writes there, by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), len) };
    }

    /// Lets `fill` write to piece `index`; what it returns.
    ///
    /// # Safety
    ///
    /// No operation on the piece is under way.
    pub(super) unsafe fn write<T>(
        &mut self,
        index: usize,
        fill: impl FnOnce(&mut [u8]) -> Option<T>,
    ) -> Option<T> {
        if index >= self.count {
            return None;
        }
        let at = self.base.as_ptr().wrapping_add(index * self.each);
        // SAFETY: inside the memory, ours alone by the caller's promise, and for this call only.
        fill(unsafe { std::slice::from_raw_parts_mut(at, self.each) })
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.registration = None;
        let memory = NonNull::slice_from_raw_parts(self.base, self.each * self.count);
        // SAFETY: made so by `new`; no operation is under way.
        drop(unsafe { Box::from_raw(memory.as_ptr()) });
    }
}
