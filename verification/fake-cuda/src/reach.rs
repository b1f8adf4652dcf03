//! A piece of work's memory: what it claims when it is enqueued, what it finds when it runs, and gives up when it is done.
//!
//! # Invariants
//!
//! 1. A claim is made behind the world's lock, from live memory that the GPU has access to; anything else is a violation.
//! 2. What is claimed is given up before anybody can know that the work is done: whoever knows may free it.

use crate::memory::{Range, Table};
use crate::violation::broken;
use crate::world::{Module, world};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// From how many bytes on memory is cleared by the kernel.
const CLEARED_BYTES: u64 = 1 << 20;

/// Which side of a copy is host memory that is neither pinned nor registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Host {
    Source,
    Target,
}

/// The claim.
#[derive(Debug)]
pub(crate) struct Reach {
    pub(crate) gpu: u8,
    held: BTreeMap<u64, Arc<Range>>,
    /// The module whose kernel runs.
    pub(crate) module: Option<Arc<Module>>,
}

impl Reach {
    pub(crate) fn new(gpu: u8) -> Self {
        Self { gpu, held: BTreeMap::new(), module: None }
    }

    fn held(&self, address: u64, write: bool) -> Option<&Arc<Range>> {
        let range = self.held.range(..=address).next_back()?.1;
        (address < range.end() && range.allows(self.gpu, write)).then_some(range)
    }

    fn hold(&mut self, table: &Table, address: u64, write: bool, what: &str) -> Arc<Range> {
        let range = table.reached(self.gpu, address, write, what);
        self.held.insert(range.start, Arc::clone(range));
        Arc::clone(range)
    }

    /// Claims `bytes` bytes from `address`.
    pub(crate) fn claim(
        &mut self,
        table: &Table,
        address: u64,
        bytes: u64,
        write: bool,
        what: &str,
    ) {
        let Some(end) = address.checked_add(bytes) else {
            broken!(NotMemory, "{what} {address:#x}, {bytes} bytes");
        };
        let mut at = address;
        while at < end {
            at = match self.held(at, write) {
                Some(range) => range.end(),
                None => self.hold(table, at, write, what).end(),
            };
        }
    }

    /// Claims a word of `bytes` bytes, or several, that start at a multiple of as many.
    pub(crate) fn claim_words(
        &mut self,
        table: &Table,
        address: u64,
        (bytes, count): (u64, u64),
        write: bool,
        what: &str,
    ) {
        must_be_aligned(address, bytes, what);
        self.claim(table, address, bytes * count, write, what);
    }

    /// Claims what is at `address`, if that is memory that the GPU has access to.
    pub(crate) fn claim_if_any(&mut self, table: &Table, address: u64, write: bool) {
        if let Some(range) = table.at(address)
            && table.is_reached(self.gpu, range, write)
        {
            self.held.insert(range.start, Arc::clone(range));
        }
    }

    /// Where we find the byte at `address`, and how many are there in a row.
    fn find(&mut self, address: u64, write: bool, what: &str) -> (*mut u8, u64) {
        let found = |range: &Arc<Range>| (range.shadow(address), range.end() - address);
        match self.held(address, write) {
            Some(range) => found(range),
            None => found(&self.hold(&world().memory, address, write, what)),
        }
    }

    /// Where we find `bytes` bytes, a power of two, at a multiple of as many.
    fn aligned(&mut self, address: u64, bytes: u64, write: bool, what: &str) -> *mut u8 {
        must_be_aligned(address, bytes, what);
        let (pointer, room) = self.find(address, write, what);
        if room < bytes {
            broken!(NotMemory, "{what} {address:#x}: {room} bytes of {bytes}");
        }
        pointer
    }

    /// The word at `address`.
    pub(crate) fn word(&mut self, address: u64, write: bool, what: &str) -> &AtomicU64 {
        let pointer = self.aligned(address, 8, write, what);
        // SAFETY: eight bytes of memory that is mapped while it is held, and that `self` holds until it is borrowed anew;
        // a shadow is aligned as its address is. Everybody else uses the word atomically, too.
        unsafe { AtomicU64::from_ptr(pointer.cast()) }
    }

    /// The word of 32 bits at `address`.
    pub(crate) fn half_word(&mut self, address: u64, write: bool, what: &str) -> &AtomicU32 {
        let pointer = self.aligned(address, 4, write, what);
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(pointer.cast()) }
    }

    /// Where we find `bytes` bytes in a row; 0 if there are none.
    pub(crate) fn whole(&mut self, address: u64, bytes: u64, write: bool, what: &str) -> u64 {
        if bytes == 0 {
            return 0;
        }
        let (pointer, room) = self.find(address, write, what);
        if room < bytes {
            // No memory at all is another violation.
            self.find(address.wrapping_add(room), write, what);
            broken!(NotModelled, "{what} {address:#x}: {bytes} bytes of memory mapped in parts");
        }
        pointer as u64
    }

    /// Whether the byte at `address` is in host memory.
    pub(crate) fn is_host(&self, address: u64) -> bool {
        self.held(address, false).is_some_and(|range| range.gpu().is_none())
    }

    /// Whether the byte at `address` is in memory of this GPU.
    pub(crate) fn is_own(&self, address: u64) -> bool {
        self.held(address, false).is_some_and(|range| range.gpu() == Some(self.gpu))
    }

    /// Copies, plainly.
    pub(crate) fn copy(&mut self, mut to: u64, mut from: u64, mut bytes: u64) {
        while bytes > 0 {
            let (target, room) = self.find(to, true, "target");
            let (source, left) = self.find(from, false, "source");
            let step = bytes.min(room).min(left);
            // SAFETY: `step` bytes of memory that is mapped while it is held; they may overlap.
            unsafe { ptr::copy(source, target, crate::memory::size(step)) };
            (to, from, bytes) = (to + step, from + step, bytes - step);
        }
    }

    /// Copies between memory of the world's and host memory that it does not know; a violation if there is none.
    pub(crate) fn copy_plain(
        &mut self,
        host: Host,
        mut plain: u64,
        mut known: u64,
        mut bytes: u64,
    ) {
        let writes = host == Host::Source;
        while bytes > 0 {
            let (ours, room) = self.find(known, writes, "other side of a copy");
            let part = |base: *mut u8| libc::iovec {
                iov_base: base.cast(),
                iov_len: crate::memory::size(bytes.min(room)),
            };
            let (local, remote) = (part(ours), part(plain as *mut u8));
            // SAFETY: on our side memory that is mapped while it is held. The other is the caller's, whose call has not
            // returned; the kernel looks whether it is there at all.
            let done = unsafe {
                let copy = if writes { libc::process_vm_readv } else { libc::process_vm_writev };
                copy(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
            };
            let Some(done) = u64::try_from(done).ok().filter(|&done| done > 0) else {
                let why = std::io::Error::last_os_error();
                broken!(NotMemory, "{host:?} of a copy, {plain:#x}: {why}");
            };
            (plain, known, bytes) = (plain + done, known + done, bytes - done);
        }
    }

    /// Fills. Much that is cleared takes no memory until it is written.
    pub(crate) fn fill(&mut self, mut at: u64, byte: u8, mut bytes: u64) {
        while bytes > 0 {
            let (target, room) = self.find(at, true, "target");
            let step = bytes.min(room);
            let cleared = byte == 0
                && step >= CLEARED_BYTES
                && self.held(at, true).is_some_and(|range| range.clear(at, step));
            if !cleared {
                // SAFETY: `step` bytes of memory that is mapped while it is held.
                unsafe { ptr::write_bytes(target, byte, crate::memory::size(step)) };
            }
            (at, bytes) = (at + step, bytes - step);
        }
    }

    /// Gives up everything, and lets `change` tell the word at `address` that the work is done: nobody can free the
    /// memory in between.
    pub(crate) fn announce(&mut self, address: u64, change: impl FnOnce(&AtomicU64)) {
        let pointer = self.aligned(address, 8, true, "word");
        let _world = world();
        self.held.clear();
        self.module = None;
        // SAFETY: as in `word`; while the world is locked, nothing is unmapped.
        change(unsafe { AtomicU64::from_ptr(pointer.cast()) });
    }
}

pub(crate) fn must_be_aligned(address: u64, multiple: u64, what: &str) {
    if !address.is_multiple_of(multiple) {
        broken!(Misaligned, "{what} {address:#x}, not at a multiple of {multiple}");
    }
}
