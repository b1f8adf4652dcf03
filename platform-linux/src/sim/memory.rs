//! Registered memory on the fabric, and the registrar of one engine.
//!
//! Messages arrive under the fabric's lock, and so is memory withdrawn: after [`Memory::revoke`] nothing
//! is written to a region, and it need not wait for anybody. A message that comes later is refused.
//!
//! # Invariants
//!
//! - Bytes are moved only inside regions that are registered, and not withdrawn, on both sides.
//! - A key names slot, tenant and NIC: that of an earlier tenant, or of another NIC, opens nothing.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use immwire_core::id::{EngineId, MAX_NICS, NicIndex};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::Core;
use super::trace::What;
use crate::provider::{Memory, Place, RegisterError, Registered, RevokeError};
use crate::sync::lock;

/// Regions start at multiples of this, as far as the fabric allocates them.
const ALIGN: usize = 64;
const ID_BITS: u32 = 28;
const NIC_BITS: u32 = 4;

/// From this size on memory is mapped for itself: it is zero, and takes pages only as it is used,
/// whatever the allocator has lying about.
const MAPPED_BYTES: usize = 256 << 10;

/// Memory that the fabric allocated; freed when dropped.
#[derive(Debug)]
enum Owned {
    Allocated { start: NonNull<u8>, layout: Layout },
    Mapped { start: NonNull<u8>, bytes: usize },
}

// SAFETY: the memory is this value's alone, and is followed under the fabric's lock only.
unsafe impl Send for Owned {}

impl Owned {
    /// Zeroed, with its first byte at a multiple of [`ALIGN`].
    fn new(bytes: usize) -> Option<(Self, NonNull<u8>)> {
        if bytes >= MAPPED_BYTES {
            let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            // SAFETY: a new mapping, placed by the kernel.
            let start = unsafe {
                mmap_anonymous(std::ptr::null_mut(), bytes, rights, flags | MapFlags::NORESERVE)
            };
            let start = NonNull::new(start.ok()?.cast())?;
            return Some((Self::Mapped { start, bytes }, start));
        }
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).ok()?;
        // SAFETY: the layout has a size.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some((Self::Allocated { start, layout }, start))
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        match *self {
            // SAFETY: allocated in `new` with this layout, and freed once.
            Self::Allocated { start, layout } => unsafe { dealloc(start.as_ptr(), layout) },
            Self::Mapped { start, bytes } => {
                // SAFETY: mapped in `new` with this length, and unmapped once; the kernel cannot refuse.
                let _ = unsafe { munmap(start.as_ptr().cast(), bytes) };
            }
        }
    }
}

#[derive(Debug)]
struct Region {
    base: u64,
    len: u64,
    rights: Rights,
    withdrawn: bool,
    _owned: Option<Owned>,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    region: Option<Region>,
}

/// The regions of one engine.
#[derive(Debug, Default)]
pub(super) struct Regions {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

/// What a range is to be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    Source,
    Destination,
}

impl Regions {
    fn insert(&mut self, region: Region) -> Option<(u32, u32)> {
        if let Some(id) = self.free.pop() {
            let slot = self.slots.get_mut(usize::try_from(id).ok()?)?;
            slot.region = Some(region);
            return Some((id, slot.generation));
        }
        let id = u32::try_from(self.slots.len()).ok().filter(|id| id >> ID_BITS == 0)?;
        self.slots.push(Slot { generation: 1, region: Some(region) });
        Some((id, 1))
    }

    fn of_key(&self, key: u64, nic: NicIndex) -> Option<&Region> {
        let id = usize::try_from(key & ((1 << ID_BITS) - 1)).ok()?;
        let of = key >> ID_BITS & ((1 << NIC_BITS) - 1);
        let slot = self.slots.get(id).filter(|_| of == u64::from(nic))?;
        slot.region.as_ref().filter(|_| key >> 32 == u64::from(slot.generation))
    }

    /// Whether all of `len` bytes from `address` may be used so, under this key of this NIC.
    pub(super) fn admits(&self, key: u64, nic: NicIndex, address: u64, len: u64, to: Use) -> bool {
        let region = self.of_key(key, nic).filter(|region| !region.withdrawn);
        region.is_some_and(|region| {
            let offset = address.checked_sub(region.base);
            let end = offset.and_then(|offset| offset.checked_add(len));
            let allowed = to == Use::Source || region.rights.remote_write();
            allowed && end.is_some_and(|end| end <= region.len)
        })
    }

    /// As [`Regions::admits`], for a fabric that was told to write to withdrawn regions.
    pub(super) fn is_registered(&self, key: u64, nic: NicIndex) -> bool {
        self.of_key(key, nic).is_some()
    }
}

/// The registrar of one engine.
#[derive(Debug)]
pub struct SimMemory {
    core: Arc<Core>,
    engine: u32,
    id: EngineId,
    nics: usize,
}

impl SimMemory {
    pub(super) const fn new(core: Arc<Core>, engine: u32, id: EngineId, nics: usize) -> Self {
        Self { core, engine, id, nics }
    }

    fn insert(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
        owned: Option<Owned>,
    ) -> Result<Registered, RegisterError> {
        // Exposed: the fabric moves bytes between addresses that come from messages.
        let (base, bytes) = (ptr.as_ptr().expose_provenance() as u64, len as u64);
        let full = RegisterError::TableFull { capacity: 1 << ID_BITS };
        let mut net = lock(&self.core.net);
        if net.registration_fails(self.engine) {
            net.record(self.engine, None, What::RegistrationFailed);
            let source = std::io::Error::from_raw_os_error(libc::ENOMEM);
            return Err(RegisterError::Os { call: "simulated registration", bytes: len, source });
        }
        let Some(endpoint) = net.endpoint(self.engine) else { return Err(full) };
        let region = Region { base, len: bytes, rights, withdrawn: false, _owned: owned };
        let Some((id, generation)) = endpoint.memory.insert(region) else { return Err(full) };
        drop(net);
        let mut keys = [0; MAX_NICS];
        for (nic, key) in (0_u64..).zip(&mut keys) {
            *key = u64::from(generation) << 32 | nic << ID_BITS | u64::from(id);
        }
        let Some(keys) = keys.get(..self.nics).and_then(Keys::new) else { return Err(full) };
        let local = LocalMr { base, len: bytes, generation, keys };
        let desc = MrDesc { owner: self.id, base, len: bytes, generation, rights, keys };
        Ok(Registered { ptr, len, local, desc, id, place: Place::Host })
    }
}

impl Memory for SimMemory {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        if bytes == 0 {
            return Err(RegisterError::Empty);
        }
        let source = || std::io::Error::from(std::io::ErrorKind::OutOfMemory);
        let refused = || RegisterError::Os { call: "alloc", bytes, source: source() };
        let (owned, base) = Owned::new(bytes).ok_or_else(refused)?;
        self.insert(base, bytes, Rights::REMOTE_WRITE, Some(owned))
    }

    unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Registered, RegisterError> {
        if len == 0 {
            return Err(RegisterError::Empty);
        }
        self.insert(ptr, len, rights, None)
    }

    /// Never waits.
    fn revoke(&self, region: &Registered, _patience: Duration) -> Result<(), RevokeError> {
        let mut net = lock(&self.core.net);
        let slots = net.endpoint(self.engine).map(|endpoint| &mut endpoint.memory.slots);
        let slot = slots.and_then(|slots| slots.get_mut(usize::try_from(region.id).ok()?));
        let slot = slot.filter(|slot| slot.generation == region.desc.generation);
        if let Some(found) = slot.and_then(|slot| slot.region.as_mut()) {
            found.withdrawn = true;
        }
        Ok(())
    }

    fn release(&self, region: Registered) {
        let mut net = lock(&self.core.net);
        let Some(memory) = net.endpoint(self.engine).map(|endpoint| &mut endpoint.memory) else {
            return;
        };
        let slot = usize::try_from(region.id).ok().and_then(|id| memory.slots.get_mut(id));
        let Some(slot) = slot.filter(|slot| slot.generation == region.desc.generation) else {
            return;
        };
        let gone = slot.region.take();
        // A slot whose generations are used up is not used again.
        if let (Some(next), Some(_)) = (slot.generation.checked_add(1), &gone) {
            slot.generation = next;
            memory.free.push(region.id);
        }
        drop(net);
        // Freed outside the lock: it takes long for much memory.
        drop(gone);
    }
}
