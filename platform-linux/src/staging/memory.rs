//! The memory of an engine that stages: pinned once, and divided into slots for what goes out and areas for what comes in;
//! and the regions of GPUs' memory that are reached by way of it.
//!
//! A region of a GPU's is no NIC's: it has a number here, and a key that says so (`StagedKey`). All other memory is the
//! inner transport's. An area is a peer's mailbox with its landing slots behind, registered with the inner transport as long as the
//! session lasts.
//!
//! # Invariants
//!
//! - Copies into a region and out of an area are made between `Hold::enter` and `Hold::leave`: `revoke` says `Ok` only
//!   when there are none, and none begins any more. So a region can be freed, and an area be another peer's.
//! - An entry is filled before its hold is opened, and not changed before it is closed and quiet.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use immwire_core::id::{EngineId, MAX_NICS, PeerId};
use immwire_core::mailbox::Geometry;
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire_core::staging::{
    Bounds, Hold, LANDING_SLOTS, NOTE_BYTES, Note, SLOT_BYTES, StagedKey, TAIL_BYTES,
};
use immwire_core::wire::NetAddr;
use immwire_cuda::{PinnedMemory, SharedMemory};

use super::StagingError;
use crate::gpus::{Gpus, Known};
use crate::provider::{
    GiveBack, Memory, PinnedPage, Place, RegisterError, Registered, RevokeError,
};
use crate::sync::lock;

/// What a [`Registered`] of ours is called: this, and its number. Other transports number up to 2^24.
const STAGED_ID: u32 = 1 << 31;
/// Between two looks at copies that are under way.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Something that copies use: who, last, and whether they do.
#[derive(Debug, Default)]
struct Used {
    hold: Hold,
    /// The peer for whom, by its bits.
    by: AtomicU64,
}

impl Used {
    fn enter(&self, generation: u32, by: PeerId) -> bool {
        let entered = self.hold.enter(generation);
        if entered {
            let bits = u64::from(by.index) << 32 | u64::from(by.generation);
            // Relaxed: for people.
            self.by.store(bits, Ordering::Relaxed);
        }
        entered
    }

    /// Lets no copies begin, and waits for those that have.
    fn close(&self, patience: Duration) -> Result<(), RevokeError> {
        self.hold.close();
        let start = Instant::now();
        while !self.hold.is_quiet() {
            let left = patience.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(RevokeError { peer: self.peer() });
            }
            std::thread::sleep(left.min(LOOK_EVERY));
        }
        Ok(())
    }

    #[expect(clippy::cast_possible_truncation, reason = "the fields are cut out of the word")]
    fn peer(&self) -> PeerId {
        let bits = self.by.load(Ordering::Relaxed);
        PeerId { index: (bits >> 32) as u16, generation: bits as u32 }
    }
}

/// A region of a GPU's memory.
#[derive(Debug, Default)]
struct Staged {
    used: Used,
    base: AtomicU64,
    len: AtomicU64,
    /// The GPU's index; above it whether peers may write.
    gpu: AtomicU64,
}

const REMOTE: u64 = 1 << 32;

/// Where the bytes of a landed piece go. The region is entered: [`Staging::leave`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Destination {
    pub(super) gpu: usize,
    pub(super) address: u64,
    pub(super) region: u16,
}

#[derive(Debug)]
struct Numbers {
    free: Vec<u16>,
    next: u16,
    generation: u32,
    /// What was allocated here.
    owned: BTreeMap<u16, SharedMemory>,
}

/// A part of the pool that is a peer's mailbox, with the landing slots behind it.
#[derive(Debug, Default)]
struct Area {
    used: Used,
}

#[derive(Debug, Default)]
struct Areas {
    free: Vec<u16>,
    /// Those that are in use, by the inner transport's name.
    live: BTreeMap<u32, Live>,
    generation: u32,
}

#[derive(Debug, Clone, Copy)]
struct Live {
    area: u16,
    generation: u32,
    keys: Keys,
}

/// An area of a session's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Opened {
    pub(super) area: u16,
    generation: u32,
}

/// How the pool is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Division {
    pub(super) slots: u16,
    areas: u16,
    area_bytes: u64,
}

impl Division {
    /// Half for what goes out, half for what comes in. `Err`: so many bytes are needed at least.
    pub(super) fn new(bytes: u64, geometry: Geometry) -> Result<Self, u64> {
        let area_bytes = geometry.bytes().saturating_add(TAIL_BYTES);
        let half = bytes / 2;
        let (slots, areas) = (half / SLOT_BYTES, half / area_bytes);
        if areas == 0 {
            return Err(area_bytes.saturating_mul(2));
        }
        let most = |count: u64| u16::try_from(count).unwrap_or(u16::MAX);
        Ok(Self { slots: most(slots), areas: most(areas), area_bytes })
    }

    fn area_at(self, area: u16) -> u64 {
        u64::from(self.slots) * SLOT_BYTES + u64::from(area) * self.area_bytes
    }

    fn bytes(self) -> u64 {
        self.area_at(self.areas)
    }
}

/// What the engine's thread and the registrar share.
#[derive(Debug)]
pub(super) struct Staging {
    engine: EngineId,
    nics: usize,
    /// Peers call the first byte of a region 0, as with the inner transport; else by its address.
    from_zero: bool,
    pub(super) known: Arc<Known>,
    gpus: Gpus,
    /// Given to the closer in the end.
    pool: ManuallyDrop<PinnedMemory>,
    division: Division,
    geometry: Geometry,
    regions: Box<[Staged]>,
    numbers: Mutex<Numbers>,
    areas: Box<[Area]>,
    by_peer: Mutex<Areas>,
}

impl Staging {
    /// For an engine of so many NICs, of which peers count from zero, or not.
    pub(super) fn new(
        (engine, nics, from_zero): (EngineId, usize, bool),
        known: Arc<Known>,
        bytes: u64,
        geometry: Geometry,
    ) -> Result<Self, StagingError> {
        let division = Division::new(bytes, geometry);
        let division = division.map_err(|least| StagingError::TooSmall { bytes, least })?;
        let first = known.first().ok_or(StagingError::NoGpus)?;
        let len = usize::try_from(division.bytes()).unwrap_or(usize::MAX);
        let pool = PinnedMemory::zeroed(first, len);
        let pool = pool.map_err(|source| StagingError::Pool { bytes: division.bytes(), source })?;
        Ok(Self {
            engine,
            nics,
            from_zero,
            gpus: Gpus(Some(Arc::clone(&known))),
            known,
            pool: ManuallyDrop::new(pool),
            geometry,
            regions: (0..StagedKey::NUMBERS).map(|_| Staged::default()).collect(),
            numbers: Mutex::new(Numbers {
                free: Vec::new(),
                next: 0,
                generation: 0,
                owned: BTreeMap::new(),
            }),
            areas: (0..division.areas).map(|_| Area::default()).collect(),
            by_peer: Mutex::new(Areas {
                free: (0..division.areas).rev().collect(),
                ..Areas::default()
            }),
            division,
        })
    }

    pub(super) const fn slots(&self) -> u16 {
        self.division.slots
    }

    /// Landing slots of all areas.
    pub(super) fn landing_slots(&self) -> usize {
        usize::from(self.division.areas) * usize::from(LANDING_SLOTS)
    }

    /// What goes out: to be registered as a source.
    pub(super) fn outgoing(&self) -> Option<(NonNull<u8>, usize)> {
        let bytes = usize::try_from(u64::from(self.slots()) * SLOT_BYTES).ok()?;
        Some((NonNull::new(self.pool.address() as *mut u8)?, bytes))
    }

    /// Where an outgoing slot begins.
    pub(super) fn slot_at(&self, slot: u16) -> u64 {
        self.pool.address() + u64::from(slot) * SLOT_BYTES
    }

    /// Where a landing slot of an area begins.
    pub(super) fn landing_at(&self, area: u16, slot: u8) -> u64 {
        let behind = self.geometry.bytes() + u64::from(slot) * SLOT_BYTES;
        self.pool.address() + self.division.area_at(area) + behind
    }

    /// The area that a mailbox of ours is in.
    pub(super) fn area_of(&self, mailbox: &MrDesc) -> Option<Opened> {
        let areas = lock(&self.by_peer);
        let live = areas.live.values().find(|live| live.keys == mailbox.keys)?;
        Some(Opened { area: live.area, generation: live.generation })
    }

    /// The GPU that a source of this key is in.
    pub(super) fn source(&self, key: StagedKey) -> Option<usize> {
        let region = self.regions.get(usize::from(key.number()))?;
        // The caller's transfer keeps the region as it is.
        usize::try_from(region.gpu.load(Ordering::Acquire) & !REMOTE).ok()
    }

    /// Enters the region that a landed piece is for, and the area that it is in. `None`: it is not to go there.
    pub(super) fn enter(&self, note: &Note, area: Opened, by: PeerId) -> Option<Destination> {
        let region = self.regions.get(usize::from(note.key.number()))?;
        if !region.used.enter(note.key.generation(), by) {
            return None;
        }
        // Relaxed: they were written before the region was opened, which was acquired by entering.
        let (base, len) = (region.base.load(Ordering::Relaxed), region.len.load(Ordering::Relaxed));
        let gpu = region.gpu.load(Ordering::Relaxed);
        let first = self.first(base);
        let offset = Bounds { base: first, len }.offset(note.dst, note.len);
        let may = offset.filter(|_| gpu & REMOTE != 0);
        let entered = may.and_then(|offset| {
            let used = &self.areas.get(usize::from(area.area))?.used;
            used.enter(area.generation, by).then_some(offset)
        });
        let Some(offset) = entered else {
            region.used.hold.leave();
            return None;
        };
        let gpu = usize::try_from(gpu & !REMOTE).unwrap_or(usize::MAX);
        Some(Destination { gpu, address: base + offset, region: note.key.number() })
    }

    /// What peers call the first byte of what lies at `address`.
    const fn first(&self, address: u64) -> u64 {
        if self.from_zero { 0 } else { address }
    }

    /// Ends what [`Staging::enter`] began.
    pub(super) fn leave(&self, region: u16, area: u16) {
        if let Some(region) = self.regions.get(usize::from(region)) {
            region.used.hold.leave();
        }
        if let Some(area) = self.areas.get(usize::from(area)) {
            area.used.hold.leave();
        }
    }

    /// Gives a range of a GPU's memory a number.
    fn insert(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
        ordinal: u32,
        owned: Option<SharedMemory>,
    ) -> Result<Registered, RegisterError> {
        let (index, one) =
            self.known.by_ordinal(ordinal).ok_or(RegisterError::NoGpu { ordinal })?;
        let (address, bytes) = (ptr.as_ptr() as u64, len as u64);
        // Copies that the application makes are to be over when its calls return.
        immwire_cuda::prepare(&one.device, address, bytes).map_err(RegisterError::Gpu)?;
        let full = RegisterError::TableFull { capacity: StagedKey::NUMBERS };
        let keys = [0; MAX_NICS];
        let mut numbers = lock(&self.numbers);
        let number = match numbers.free.pop() {
            Some(number) => number,
            None if usize::from(numbers.next) < StagedKey::NUMBERS => {
                numbers.next += 1;
                numbers.next - 1
            }
            None => return Err(full),
        };
        numbers.generation = (numbers.generation + 1) & StagedKey::LAST_GENERATION;
        let generation = numbers.generation;
        let key = StagedKey::new(number, generation);
        let all = key.and_then(|key| {
            let mut keys = keys;
            keys.fill(key.bits());
            Keys::new(keys.get(..self.nics)?)
        });
        // The number is in range, and an engine has one to eight NICs.
        let (Some(keys), Some(region)) = (all, self.regions.get(usize::from(number))) else {
            return Err(full);
        };
        if let Some(owned) = owned {
            numbers.owned.insert(number, owned);
        }
        drop(numbers);
        let remote = if rights.remote_write() { REMOTE } else { 0 };
        region.base.store(address, Ordering::Relaxed);
        region.len.store(bytes, Ordering::Relaxed);
        region.gpu.store(u64::from(index) | remote, Ordering::Release);
        region.used.hold.open(generation);
        let local = LocalMr { base: address, len: bytes, generation, keys };
        let (owner, base) = (self.engine, self.first(address));
        let desc = MrDesc { owner, base, len: bytes, generation, rights, keys };
        let (id, place) = (STAGED_ID | u32::from(number), Place::Gpu(ordinal));
        Ok(Registered { ptr, len, local, desc, id, place })
    }

    /// The entry of a region of a GPU's; `None`: it is the inner transport's.
    fn staged(&self, region: &Registered) -> Option<(u16, &Staged)> {
        let number = u16::try_from(region.id & !STAGED_ID).ok()?;
        let of_gpu = region.id & STAGED_ID != 0;
        of_gpu.then(|| self.regions.get(usize::from(number)).map(|it| (number, it))).flatten()
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: taken here alone; the field is not used after this, as `self` goes.
        let pool = unsafe { ManuallyDrop::take(&mut self.pool) };
        self.known.closer.give(pool);
    }
}

/// The registrar of an engine that stages. See the [module](super).
#[derive(Debug)]
pub struct StagedMemory<M> {
    pub(super) inner: Arc<M>,
    pub(super) staging: Arc<Staging>,
}

impl<M: Memory> Memory for StagedMemory<M> {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        self.inner.alloc(bytes)
    }

    fn alloc_host(&self, bytes: usize) -> Result<Registered, RegisterError> {
        self.inner.alloc_host(bytes)
    }

    /// An area: the peer that it is for lands there.
    fn alloc_mailbox(&self, bytes: usize, _: &NetAddr) -> Result<Registered, RegisterError> {
        let staging = &self.staging;
        let division = staging.division;
        let full = RegisterError::NoArea { areas: division.areas };
        let mut areas = lock(&staging.by_peer);
        let area = areas.free.pop().ok_or(full)?;
        let at = staging.pool.address() + division.area_at(area);
        let len = usize::try_from(division.area_bytes).unwrap_or(usize::MAX);
        let registered = match NonNull::new(at as *mut u8) {
            Some(base) if bytes as u64 == staging.geometry.bytes() => {
                // SAFETY: the area lies in the pool, and nobody else has it: it was free, so no transport and no copy uses it.
                unsafe { std::ptr::write_bytes(base.as_ptr(), 0, bytes) };
                // What the peer before left would be a note for whoever says that it wrote one.
                for slot in 0..u64::from(LANDING_SLOTS) {
                    let note = staging.geometry.bytes() + slot * SLOT_BYTES;
                    let note = usize::try_from(note).unwrap_or(usize::MAX);
                    if note.saturating_add(NOTE_BYTES) <= len {
                        // SAFETY: as above: it ends before the area does.
                        unsafe { std::ptr::write_bytes(base.as_ptr().add(note), 0, NOTE_BYTES) };
                    }
                }
                // SAFETY: the pool lives as long as `self`, which outlives its regions.
                unsafe { self.inner.register_host(base, len, Rights::REMOTE_WRITE) }
            }
            _ => Err(RegisterError::Empty),
        };
        let registered = registered.inspect_err(|_| areas.free.push(area))?;
        areas.generation = areas.generation.wrapping_add(1);
        let generation = areas.generation;
        if let Some(area) = staging.areas.get(usize::from(area)) {
            area.used.hold.open(generation);
        }
        areas.live.insert(registered.id, Live { area, generation, keys: registered.desc.keys });
        Ok(registered)
    }

    fn alloc_gpu(&self, ordinal: u32, bytes: usize) -> Result<Registered, RegisterError> {
        let (base, memory, _) = self.staging.gpus.alloc(ordinal, bytes)?;
        self.staging.insert(base, bytes, Rights::REMOTE_WRITE, ordinal, Some(memory))
    }

    fn pin(&self, bytes: usize) -> Result<PinnedPage, RegisterError> {
        self.staging.gpus.pin(bytes)
    }

    fn give_back(&self) -> Option<GiveBack> {
        self.staging.gpus.give_back()
    }

    unsafe fn copy_gpu(
        &self,
        region: &Registered,
        offset: usize,
        host: *mut u8,
        len: usize,
        to_host: bool,
    ) -> Result<(), immwire_cuda::Error> {
        // SAFETY: our caller's promise.
        unsafe { self.staging.gpus.copy(region, offset, host, len, to_host) }
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
        let (address, bytes) = (ptr.as_ptr() as u64, len as u64);
        let first = self.staging.known.first().ok_or(RegisterError::NoGpus)?;
        let owner = immwire_cuda::owner_of(first, address, bytes).map_err(RegisterError::Gpu)?;
        match owner {
            Some(ordinal) => self.staging.insert(ptr, len, rights, ordinal, None),
            // SAFETY: our caller's promise.
            None => unsafe { self.inner.register(ptr, len, rights) },
        }
    }

    unsafe fn register_host(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Registered, RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.inner.register_host(ptr, len, rights) }
    }

    unsafe fn after_stream(&self, ordinal: u32, stream: *mut c_void) -> Result<(), RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.staging.gpus.after(ordinal, stream) }
    }

    fn behind(&self, ordinal: u32) -> u64 {
        self.staging.gpus.behind(ordinal)
    }

    fn is_through(&self, ordinal: u32, behind: u64) -> Result<bool, immwire_cuda::Error> {
        self.staging.gpus.is_through(ordinal, behind)
    }

    unsafe fn stream(
        &self,
        ordinal: u32,
        stream: *mut c_void,
    ) -> Result<immwire_cuda::Stream, RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.staging.gpus.stream(ordinal, stream) }
    }

    fn counts_from_zero(&self) -> bool {
        self.inner.counts_from_zero()
    }

    fn takes_runs(&self, src: &LocalMr, dst: &MrDesc) -> bool {
        self.inner.takes_runs(src, dst)
    }

    fn revoke(&self, region: &Registered, patience: Duration) -> Result<(), RevokeError> {
        if let Some((_, staged)) = self.staging.staged(region) {
            return staged.used.close(patience);
        }
        let start = Instant::now();
        self.inner.revoke(region, patience)?;
        let area = lock(&self.staging.by_peer).live.get(&region.id).map(|live| live.area);
        match area.and_then(|area| self.staging.areas.get(usize::from(area))) {
            // Nothing lands there any more; what has may still be read.
            Some(area) => area.used.close(patience.saturating_sub(start.elapsed())),
            None => Ok(()),
        }
    }

    fn release(&self, region: Registered) {
        self.release_by(region, M::release, Gpus::give_back_soon);
    }

    fn release_later(&self, region: Registered) {
        self.release_by(region, M::release_later, Gpus::give_back_later);
    }
}

impl<M: Memory> StagedMemory<M> {
    /// Forgets a region: has the inner transport do so by `inner`, or memory of a GPU's that was allocated here given back by `gpus`.
    fn release_by(
        &self,
        region: Registered,
        inner: impl FnOnce(&M, Registered),
        gpus: impl Fn(&Gpus, SharedMemory),
    ) {
        if let Some((number, _)) = self.staging.staged(&region) {
            let mut numbers = lock(&self.staging.numbers);
            let owned = numbers.owned.remove(&number);
            numbers.free.push(number);
            drop(numbers);
            owned.into_iter().for_each(|owned| gpus(&self.staging.gpus, owned));
            return;
        }
        // Before the inner transport gives the name away again.
        let live = lock(&self.staging.by_peer).live.remove(&region.id);
        inner(&self.inner, region);
        if let Some(live) = live {
            lock(&self.staging.by_peer).free.push(live.area);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_divided_without_overlap_or_refused_with_what_it_needs() {
        let geometry = Geometry::new(2, 128).unwrap();
        let area = geometry.bytes() + TAIL_BYTES;
        assert_eq!(Division::new(2 * area - 1, geometry), Err(2 * area));
        for bytes in [2 * area, 2 * area + 1, 4 * area, 9 * area + 17, 64 << 20] {
            let division = Division::new(bytes, geometry).unwrap();
            assert!(division.bytes() <= bytes);
            assert!(division.slots >= 8 && division.areas >= 1);
            let mut end = u64::from(division.slots) * SLOT_BYTES;
            for area in 0..division.areas {
                assert_eq!(division.area_at(area), end);
                end += division.area_bytes;
            }
            assert_eq!(division.bytes(), end);
        }
    }
}
