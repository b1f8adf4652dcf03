//! Registrations: which memory the device may read and write, and until when.
//!
//! # Invariants
//!
//! 1. Once [`Region::close`] has returned, no byte of the region is read or written again: each access holds the lock
//!    that closing takes.
//! 2. A byte that was acknowledged lands: what is held back lands at the latest when the region closes.
//! 3. A key and a descriptor are never given twice in a process, so that a stale one finds nothing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard};

use crate::device::DmaBuf;
use crate::lock;

/// A count of the local operations that use something; an [`InUse`] stands for each.
#[derive(Debug, Default, Clone)]
pub(crate) struct Users(Arc<AtomicUsize>);

impl Users {
    /// Adds one, until what is returned is dropped.
    pub(crate) fn enter(&self) -> InUse {
        self.0.fetch_add(1, Ordering::AcqRel);
        InUse(self.clone())
    }

    /// Adds one unless there are `limit`.
    pub(crate) fn enter_below(&self, limit: usize) -> Option<InUse> {
        let below = |count| (count < limit).then_some(count + 1);
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, below)
            .ok()
            .map(|_| InUse(self.clone()))
    }

    /// Returns how many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

/// One of [`Users`].
#[derive(Debug)]
pub(crate) struct InUse(Users);

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Bytes that were acknowledged and have not landed.
#[derive(Debug)]
struct Held {
    id: u64,
    address: u64,
    bytes: Vec<u8>,
}

/// One registration.
#[derive(Debug)]
pub(crate) struct Region {
    base: u64,
    len: u64,
    /// If it is a GPU's: until it is closed.
    device: RwLock<Option<DmaBuf>>,
    /// What `fi_mr_reg` was told that it is for.
    pub access: u64,
    /// The remote key.
    pub key: u32,
    /// The number of the domain it is of.
    pub domain: u64,
    /// Local operations from or into it.
    pub users: Users,
    open: RwLock<bool>,
    held: Mutex<Vec<Held>>,
}

impl Region {
    /// Describes the memory of `len` bytes at `base`.
    ///
    /// # Safety
    ///
    /// Until [`close`](Self::close) has returned, the memory stays mapped, readable, and writable if `access` has a right
    /// that writes; and Rust code in this process does not rely on its content, but as the owner of a device's memory may.
    pub(crate) unsafe fn new(base: u64, len: u64, access: u64, key: u32, domain: u64) -> Self {
        let (open, held) = (RwLock::new(true), Mutex::default());
        let (users, device) = (Users::default(), RwLock::default());
        Self { base, len, device, access, key, domain, users, open, held }
    }

    /// Describes memory of a GPU, of `len` bytes, which operations know as `base`.
    pub(crate) fn on_device(
        (base, len): (u64, u64),
        device: DmaBuf,
        access: u64,
        key: u32,
        domain: u64,
    ) -> Self {
        // SAFETY: no byte at `base` is touched: all goes through `device`.
        let region = unsafe { Self::new(base, len, access, key, domain) };
        Self { device: RwLock::new(Some(device)), ..region }
    }

    /// Returns whether `len` bytes at `address` are all of it, or a part.
    pub(crate) fn covers(&self, address: u64, len: u64) -> bool {
        address
            .checked_sub(self.base)
            .and_then(|offset| offset.checked_add(len))
            .is_some_and(|end| end <= self.len)
    }

    /// Writes `bytes` to `address`. `false`, and nothing done, if it is closed or does not cover them.
    pub(crate) fn land(&self, address: u64, bytes: &[u8]) -> bool {
        let open = self.open.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        *open && self.copy_in(address, bytes)
    }

    fn copy_in(&self, address: u64, bytes: &[u8]) -> bool {
        let covered = self.covers(address, bytes.len() as u64);
        if let Some(device) = &*read(&self.device) {
            return covered && device.write(address.wrapping_sub(self.base), bytes);
        }
        if covered && !bytes.is_empty() {
            // SAFETY: per `Region::new`, and the caller holds `open`:
            // - the range is a part of the region, so it is mapped and writable, and nobody relies on its content;
            // - `bytes` is this process's own copy, so the two do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len())
            };
        }
        covered
    }

    /// Appends `len` bytes at `address` to `out`. `false`, and nothing done, if it is closed or does not cover them.
    pub(crate) fn take(&self, address: u64, len: usize, out: &mut Vec<u8>) -> bool {
        let open = self.open.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let take = *open && self.covers(address, len as u64);
        if let Some(device) = &*read(&self.device) {
            let (at, before) = (address.wrapping_sub(self.base), out.len());
            out.resize(before + if take { len } else { 0 }, 0);
            return take && device.read(at, out.get_mut(before..).unwrap_or_default());
        }
        if take && len > 0 {
            out.reserve(len);
            // SAFETY: per `Region::new`, and `open` is held: the range is mapped and readable. `out` has room for `len`
            // bytes behind what it holds, all of which the copy sets.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    address as *const u8,
                    out.as_mut_ptr().add(out.len()),
                    len,
                );
                out.set_len(out.len() + len);
            }
        }
        take
    }

    /// Keeps `bytes` for [`land_held`](Self::land_held) with this `id`. `false` if it is closed or does not cover them.
    pub(crate) fn hold(&self, id: u64, address: u64, bytes: &[u8]) -> bool {
        let open = self.open.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let hold = *open && self.covers(address, bytes.len() as u64);
        if hold {
            lock(&self.held).push(Held { id, address, bytes: bytes.to_vec() });
        }
        hold
    }

    /// Writes what is held with this `id`, if it has not landed yet.
    pub(crate) fn land_held(&self, id: u64) {
        let _open = self.open.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut held = lock(&self.held);
        if let Some(at) = held.iter().position(|held| held.id == id) {
            let held = held.swap_remove(at);
            self.copy_in(held.address, &held.bytes);
        }
    }

    /// Ends it: what is held lands now, and nothing is read or written afterwards.
    pub(crate) fn close(&self) {
        let mut open = self.open.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        for held in lock(&self.held).drain(..) {
            self.copy_in(held.address, &held.bytes);
        }
        *open = false;
        // Its memory may be freed now.
        drop(self.device.write().unwrap_or_else(|poisoned| poisoned.into_inner()).take());
    }
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The open registrations of a domain, by key.
#[derive(Debug, Default)]
pub(crate) struct Keys(Mutex<HashMap<u32, Arc<Region>>>);

impl Keys {
    /// Enters a region, made for a key that `candidate` names and that is in no use.
    pub(crate) fn enter(
        &self,
        candidate: impl Fn(u64) -> u32,
        make: impl FnOnce(u32) -> Region,
    ) -> Arc<Region> {
        let mut keys = lock(&self.0);
        let mut tries = 0..;
        let key = loop {
            let key = tries.next().map_or(1, &candidate);
            if key != 0 && !keys.contains_key(&key) {
                break key;
            }
        };
        let region = Arc::new(make(key));
        keys.insert(key, region.clone());
        region
    }

    /// Returns the open region with this key.
    pub(crate) fn find(&self, key: u32) -> Option<Arc<Region>> {
        lock(&self.0).get(&key).cloned()
    }

    /// Takes a region out: its key finds nothing from now on.
    pub(crate) fn remove(&self, key: u32) {
        lock(&self.0).remove(&key);
    }
}

/// Returns whether all of a range is mapped: only then can a device pin it.
pub(crate) fn is_mapped(base: u64, len: u64) -> bool {
    let page = rustix::param::page_size() as u64;
    let start = base / page * page;
    let Some(bytes) = base.checked_add(len).map(|end| end - start) else { return false };
    let Ok(bytes) = usize::try_from(bytes) else { return false };
    let mut resident = vec![0_u8; bytes.div_ceil(rustix::param::page_size())];
    // SAFETY: `start` is on a page, and `resident` has a byte for each page of the range; the call reads no memory.
    unsafe { libc::mincore(start as *mut libc::c_void, bytes, resident.as_mut_ptr().cast()) == 0 }
}

/// Returns whether this process may write to all of a range that is mapped.
pub(crate) fn is_writable(base: u64, len: u64) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return false };
    let end = base.saturating_add(len);
    // proc(5): `start-end rwxp ...`, in hexadecimal.
    let fixed = maps.lines().filter_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let [from, to] = [from, to].map(|address| u64::from_str_radix(address, 16).ok());
        (rest.as_bytes().get(1) != Some(&b'w')).then_some((from?, to?))
    });
    fixed.into_iter().all(|(from, to)| to <= base || from >= end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_constant_is_not_writable_and_what_is_on_the_stack_is() {
        static FIXED: [u8; 64] = [1; 64];
        let variable = [1_u8; 64];
        assert!(is_writable(variable.as_ptr() as u64, 64));
        assert!(!is_writable(FIXED.as_ptr() as u64, 64));
    }

    fn region(memory: &mut [u8]) -> Region {
        // SAFETY: the tests keep the memory beyond the region, and look at it only between calls.
        unsafe { Region::new(memory.as_mut_ptr() as u64, memory.len() as u64, 0, 1, 0) }
    }

    #[test]
    fn bounds_hold_at_both_ends_and_against_overflow() {
        let mut memory = vec![0_u8; 64];
        let base = memory.as_mut_ptr() as u64;
        let region = region(&mut memory);
        assert!(region.covers(base, 64) && region.covers(base + 64, 0));
        for (address, len) in
            [(base - 1, 1), (base, 65), (base + 64, 1), (base + 1, u64::MAX), (u64::MAX, 1), (0, 0)]
        {
            assert!(!region.covers(address, len), "{len} at {address}");
        }
        assert!(!region.land(base + 60, &[1; 5]));
        assert_eq!(memory, [0; 64]);
    }

    #[test]
    fn what_is_held_lands_once_and_at_the_latest_at_the_close() {
        let mut memory = vec![0_u8; 8];
        let base = memory.as_mut_ptr() as u64;
        let region = region(&mut memory);
        assert!(region.hold(1, base, &[1]) && region.hold(2, base + 1, &[2]));
        region.land_held(1);
        assert!(region.land(base, &[9]));
        region.land_held(1);
        region.close();
        assert!(!region.land(base + 2, &[3]) && !region.hold(3, base + 2, &[3]));
        region.land_held(2);
        assert!(!region.take(base, 1, &mut Vec::new()));
        assert_eq!(memory, [9, 2, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn only_mapped_memory_can_be_pinned() {
        let memory = vec![0_u8; 1 << 16];
        assert!(is_mapped(memory.as_ptr() as u64, 1 << 16));
        assert!(!is_mapped(4096, 1 << 16));
        assert!(!is_mapped(u64::MAX - 10, 100));
    }

    #[test]
    fn users_are_counted_and_limited() {
        let users = Users::default();
        let (one, two) = (users.enter(), users.enter_below(2));
        assert!(two.is_some() && users.enter_below(2).is_none());
        drop(one);
        assert_eq!(users.count(), 1);
    }
}
