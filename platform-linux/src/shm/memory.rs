//! The regions of one engine, and the taking back of what peers were allowed to do with them.
//!
//! A region is a slot in a table; its key is the slot's number below, the kind of memory, and its tenancy above, so that a
//! key of an earlier tenant opens nothing. Peers are told of a region when they ask for its key: that
//! is when the grant is written into their session's segment.
//!
//! # Invariants
//!
//! - Grants are given under the table's lock, to regions that are not withdrawn; withdrawing marks the
//!   region under the same lock and then clears its grant in every session. So when the lock is given
//!   up no grant is left, and none is given any more.
//! - [`ShmMemory::revoke`] returns `Ok` when, after that, each session was seen once with nobody writing
//!   under the key (`immwire_core::hazard`), or with its peer gone. A peer is gone when the kernel has
//!   closed its end of the socket, or its process has ended. Both come only after each of the process's
//!   threads has left user mode for good, and a system call that a thread was in has ended; a peer that
//!   shuts its end down itself does so on the thread that writes, between two writes.
//! - A child that a peer forked has its socket and its mappings, and is not the peer: an engine is its process's, and a child
//!   does not write with it. Where the peer's process cannot be asked, such a child keeps the session up until it ends itself:
//!   writes to the peer go on, and a region that the peer died writing to is not given back before.
//! - Who has taken a region out of the table is the last to hold anything of its memory: references to a GPU's allocations, too.
//! - A session that we closed stays listed until its peer has stopped writing.
//! - Nothing of a region's is given back under the table's lock: the driver may wait for GPUs to be idle before it does.
//! - The caller's memory, which may be unmapped when the engine has ended, stays pinned for no handle that lives longer
//!   ([`ShmMemory::end`]); who closes such a region after that waits until it is unpinned ([`Unpinned`]). Whose pin leaves the table has let go
//!   of it under the table's lock ([`Pinned::let_go`]): who is told after that that the memory is free, and registers what is there next, shares no
//!   pages with what was.
//! - Lock order: table, then links. Neither is taken by the data path, but for the delivery of bounced
//!   records.

use std::ffi::c_void;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use immwire_core::hazard::{self, NO_KEY};
use immwire_core::id::{EngineId, MAX_NICS, PeerId};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire_cuda::{Found, NotPinned, Pinned, SharedMemory, Stream, Uuid};
use rustix::io::Errno;

use super::copy::copy;
use super::gpu::{Described, Handed, Kind, Reachable, Reached, Shared, files_of};
use super::handshake::{By, Message};
use super::segment::{Mapping, REGIONS_MAX, Segment, Use, sealed_file};
use super::socket;
use super::withdrawals;
use crate::gpus::{FREED_WITHIN, Gpus, Known, page_bytes};
use crate::provider::{
    GiveBack, Memory, PinnedPage, Place, RegisterError, Registered, RevokeError, Window,
};

/// The key of tenant `generation` of slot `id`. Never [`NO_KEY`], as generations start at 1.
fn key_of(id: u32, generation: NonZeroU32, kind: Kind) -> u64 {
    u64::from(generation.get()) << 32 | kind.bits() | u64::from(id)
}

/// The slot that `key` names; whether it has that tenant is to be checked.
pub(super) fn id_of(key: u64) -> u32 {
    // The kind of memory lies above it: see `Kind`.
    (key & 0x00ff_ffff) as u32
}

/// A region that is not pinned: as a source it is known by that.
fn unreached(region: Registered) -> Registered {
    let mark = |key: &u64| *key | Kind::Unreached.bits();
    let keys: heapless::Vec<u64, MAX_NICS> =
        region.local.keys.as_slice().iter().map(mark).collect();
    // As many as there were.
    let keys = Keys::new(&keys).unwrap_or(region.local.keys);
    Registered { local: LocalMr { keys, ..region.local }, ..region }
}

static_assertions::const_assert!(REGIONS_MAX <= 1 << 24);

/// One session, as far as the taking back of grants is concerned.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) peer: PeerId,
    pub(super) segment: Segment,
    pub(super) socket: OwnedFd,
    /// Its process, if there is one to ask: a child of it may hold the socket, and what its GPUs write outlives that.
    process: Option<OwnedFd>,
    /// We have ended the session. What the peer may be in the middle of is still awaited.
    closed: AtomicBool,
    /// Its regions of GPU memory that were opened, by key. The session keeps them.
    reached: Mutex<Vec<(u64, Weak<Reached>)>>,
}

impl Link {
    pub(super) fn new(peer: PeerId, segment: Segment, socket: OwnedFd) -> Self {
        // One that has ended, or whose number was dealt anew, is not who has just shaken hands: whoever that is goes by the
        // socket alone.
        let ended = |process: &OwnedFd| socket::is_gone_or_ended(&socket, process);
        let process = socket::process(&socket).filter(|process| !ended(process));
        Self {
            peer,
            segment,
            socket,
            process,
            closed: AtomicBool::new(false),
            reached: Mutex::default(),
        }
    }

    /// The peer's process, if there is one to ask.
    pub(super) fn process(&self) -> Option<&OwnedFd> {
        self.process.as_ref()
    }

    /// Whether the peer is gone: its processor writes no more for it. One system call.
    pub(super) fn is_gone(&self) -> bool {
        match &self.process {
            Some(process) => socket::is_gone_or_ended(&self.socket, process),
            None => socket::is_gone(&self.socket),
        }
    }

    /// Whether no GPU writes for the peer any more because the kernel has let go of all that was its. A child that it forked
    /// has the driver's files as well as the socket: with both open, GPUs may be at work.
    fn process_is_gone(&self) -> bool {
        // Of one that cannot be asked nobody knows: its socket may go before its GPUs stop.
        self.process.as_ref().is_some_and(socket::is_readable) && socket::is_gone(&self.socket)
    }

    /// Tells the peer that there is something in the segment, if it sleeps. Costs a fence if not.
    pub(super) fn ring(&self) {
        if self.segment.outbound().doorbell().ring() {
            self.kick();
        }
    }

    fn kick(&self) {
        let mut bytes = [0; socket::MESSAGE_MAX];
        // If the socket is full, the peer has messages to wake up for; if it is gone, nobody sleeps.
        if let Some(message) = Message::Kick.encode(&mut bytes).and_then(|len| bytes.get(..len)) {
            let _ = socket::send(&self.socket, message, &[]);
        }
    }

    /// Lists a region of the peer's that was opened.
    pub(super) fn has_reached(&self, key: u64, reached: &Arc<Reached>) {
        let mut all = lock(&self.reached);
        all.retain(|(_, reached)| reached.strong_count() > 0);
        all.push((key, Arc::downgrade(reached)));
    }

    fn withdraw(&self, id: u32) {
        let inn = self.segment.inbound();
        if let Some(grant) = inn.grant(id).filter(|grant| grant.load(Ordering::Relaxed) != NO_KEY) {
            // Tells the peer to give the mapping back.
            withdrawals::withdraw(grant, inn.withdrawals());
            self.ring();
        }
    }

    /// Whether, after the grant of `key` was withdrawn, the peer will not write under it any more.
    fn is_quiet(&self, key: u64) -> bool {
        let inn = self.segment.inbound();
        let gpu = inn.gpu_active(id_of(key));
        (hazard::quiet(inn.active(), key) || self.is_gone())
            && (gpu.is_none_or(|active| hazard::quiet(active, key)) || self.process_is_gone())
    }

    /// Whether nothing can be written any more, all grants of a closed session being withdrawn.
    fn is_over(&self) -> bool {
        let inn = self.segment.inbound();
        let active = inn.active().load(Ordering::Acquire);
        self.closed.load(Ordering::Relaxed)
            && (active == NO_KEY || self.is_gone())
            && (inn.gpu_claims().load(Ordering::Acquire) == 0 || self.process_is_gone())
    }
}

/// Ends when all is unpinned that an engine's end gave the closer: of memory of the caller's, which is a region still.
#[derive(Debug, Clone)]
struct Unpinned(Arc<Mutex<Receiver<()>>>);

impl Unpinned {
    fn wait(&self) {
        // It never says anything: it ends. Whoever else waits for the lock waits for the same.
        let _ = lock(&self.0).recv();
    }
}

#[derive(Debug)]
enum Backing {
    /// Peers map the file.
    File { file: Arc<OwnedFd>, mapping: Reachable<Mapping> },
    /// Memory of this process alone, which our GPUs reach.
    Process { pinned: Option<Pinned> },
    /// The same, when the engine has ended.
    LetGo(Unpinned),
    /// Of a GPU: peers open it, if they may write there, by what is shared with them; what they may not need not be shareable.
    Gpu {
        index: u8,
        found: Found,
        uuid: Uuid,
        shared: Option<Shared>,
        _owned: Option<SharedMemory>,
    },
}

impl Backing {
    /// Takes the pin of the caller's memory, which stays a region; it has been let go of.
    fn let_go(&mut self) -> Option<Pinned> {
        let Self::Process { pinned } = self else { return None };
        pinned.take().map(|mut pinned| {
            pinned.let_go();
            pinned
        })
    }

    fn kind(&self) -> Kind {
        match self {
            Self::File { .. } | Self::Process { .. } | Self::LetGo(_) => Kind::Host,
            Self::Gpu { index, .. } => Kind::Gpu(*index),
        }
    }
}

#[derive(Debug)]
struct Region {
    base: NonNull<u8>,
    len: usize,
    rights: Rights,
    backing: Backing,
    withdrawn: bool,
}

// SAFETY: `base` is an address; it is followed in `ShmMemory::deliver` only, under the table's lock.
unsafe impl Send for Region {}

impl Region {
    fn base(&self) -> u64 {
        self.base.as_ptr() as u64
    }
}

#[derive(Debug)]
struct Slot {
    generation: NonZeroU32,
    region: Option<Region>,
}

#[derive(Debug, Default)]
struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// The engine has ended.
    is_over: bool,
}

impl Table {
    /// The region of `key`, if it is the slot's present tenant.
    fn get_mut(&mut self, key: u64) -> Option<&mut Region> {
        let id = id_of(key);
        let slot = self.slots.get_mut(usize::try_from(id).ok()?)?;
        let generation = slot.generation;
        slot.region.as_mut().filter(|region| key_of(id, generation, region.backing.kind()) == key)
    }

    /// The region of `key`, if peers may write to it now.
    fn writable(&mut self, key: u64) -> Option<&mut Region> {
        self.get_mut(key).filter(|region| region.rights.remote_write() && !region.withdrawn)
    }

    /// Gives a region a slot, or back, if all are taken.
    fn insert(&mut self, region: Region) -> Result<(u32, NonZeroU32), Box<Region>> {
        if let Some(id) = self.free.pop() {
            let slot = usize::try_from(id).ok().and_then(|at| self.slots.get_mut(at));
            if let Some(slot) = slot {
                slot.region = Some(region);
                return Ok((id, slot.generation));
            }
        }
        let id = u32::try_from(self.slots.len()).ok().filter(|_| self.slots.len() < REGIONS_MAX);
        let Some(id) = id else { return Err(Box::new(region)) };
        let generation = NonZeroU32::MIN;
        self.slots.push(Slot { generation, region: Some(region) });
        Ok((id, generation))
    }

    fn remove(&mut self, id: u32) -> Option<Region> {
        let slot = self.slots.get_mut(usize::try_from(id).ok()?)?;
        let mut region = slot.region.take()?;
        if let Backing::Process { pinned: Some(pinned) } = &mut region.backing {
            pinned.let_go();
        }
        // A slot whose generations are used up is not used again.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push(id);
        }
        Some(region)
    }
}

/// What a peer gets that asks for a region.
#[derive(Debug)]
pub(super) enum Granted {
    File { file: Arc<OwnedFd>, base: u64, len: u64 },
    Process { base: u64, len: u64 },
    Gpu { region: Described, by: By, file: Option<Arc<OwnedFd>> },
    Refused,
}

/// The regions of one engine.
#[derive(Debug)]
pub struct ShmMemory {
    engine: EngineId,
    nics: usize,
    /// Peers count a region's addresses from 0.
    from_zero: bool,
    gpus: Gpus,
    table: Mutex<Table>,
    links: Mutex<Vec<Arc<Link>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What the locks guard is consistent between any two statements: a panic elsewhere is no reason
    // to stop serving.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for ShmMemory {
    /// What nobody could take back, since somebody may still write there, goes when the driver has time for it, as all else does.
    fn drop(&mut self) {
        let slots = std::mem::take(&mut lock(&self.table).slots);
        if let Some(known) = &self.gpus.0
            && slots.iter().any(|slot| slot.region.is_some())
        {
            known.closer.give(slots);
        }
    }
}

impl ShmMemory {
    pub(super) fn new(
        engine: EngineId,
        nics: u8,
        from_zero: bool,
        gpus: Option<Arc<Known>>,
    ) -> Self {
        let (table, links, gpus) = (Mutex::default(), Mutex::default(), Gpus(gpus));
        Self { engine, nics: usize::from(nics).min(MAX_NICS), from_zero, gpus, table, links }
    }

    /// What peers call the first byte of a region that begins at `base` here.
    const fn first(&self, base: u64) -> u64 {
        if self.from_zero { 0 } else { base }
    }

    /// Lists a session, before its peer is granted anything.
    pub(super) fn attach(&self, link: Arc<Link>) {
        let mut links = lock(&self.links);
        links.retain(|link| !link.is_over());
        links.push(link);
    }

    /// Memory of our own is unpinned, and unmapped, when its time has come; what its owner has to wait for comes back.
    fn part_with(&self, backing: Backing) -> Option<Backing> {
        match (backing, &self.gpus.0) {
            (Backing::File { mapping, .. }, Some(known)) => {
                known.closer.give(mapping);
                None
            }
            (backing @ Backing::Gpu { _owned: Some(_), .. }, Some(known)) => {
                known.closer.give(backing);
                None
            }
            // Mapped, and that is all.
            (Backing::File { .. }, None) => None,
            (backing, _) => Some(backing),
        }
    }

    /// The same, and waits for what its owner may unmap, or free, next: for the driver to unpin it, by the closer, so that who has to do with the
    /// same GPU knows that it may have to.
    fn part_with_and_wait(&self, backing: Backing) {
        match (self.part_with(backing), &self.gpus.0) {
            (Some(backing @ Backing::Process { pinned: Some(_) }), Some(known)) => {
                known.closer.give_and_wait(backing);
            }
            (Some(Backing::LetGo(unpinned)), _) => unpinned.wait(),
            (backing, _) => drop(backing),
        }
    }

    /// Ends a session: withdraws all that its peer was granted, and lets go of it when that is safe.
    pub(super) fn detach(&self, link: &Arc<Link>) {
        let slots = lock(&self.table).slots.len();
        for id in (0..slots).filter_map(|id| u32::try_from(id).ok()) {
            link.withdraw(id);
        }
        link.closed.store(true, Ordering::Relaxed);
        lock(&self.links).retain(|link| !link.is_over());
    }

    /// The engine has ended, and no GPU does anything for it any more. The caller's memory is given to be unpinned, whoever has handles: it may be
    /// unmapped next. Who ends the closer waits for that, for some seconds; who closes a region, however long it takes.
    pub(super) fn end(&self) {
        let (last, over) = mpsc::channel();
        let unpinned = Unpinned(Arc::new(Mutex::new(over)));
        let pinned: Vec<_> = {
            let mut table = lock(&self.table);
            table.is_over = true;
            let regions = table.slots.iter_mut().filter_map(|slot| slot.region.as_mut());
            let let_go = |region: &mut Region| {
                let pinned = region.backing.let_go()?;
                region.backing = Backing::LetGo(unpinned.clone());
                Some(pinned)
            };
            regions.filter_map(let_go).collect()
        };
        if let Some(known) = self.gpus.0.as_ref().filter(|_| !pinned.is_empty()) {
            // Dropped in this order.
            known.closer.give((pinned, last));
        }
    }

    /// Allows the peer of `link` to write to the region of `key`, and says how, or refuses.
    pub(super) fn grant(&self, link: &Link, key: u64) -> Granted {
        let mut table = lock(&self.table);
        let (Some(region), Some(grant)) =
            (table.writable(key), link.segment.inbound().grant(id_of(key)))
        else {
            return Granted::Refused;
        };
        let (base, len) = (region.base(), region.len as u64);
        let granted = match &region.backing {
            Backing::File { file, .. } => Granted::File { file: Arc::clone(file), base, len },
            Backing::Process { .. } | Backing::LetGo(_) => Granted::Process { base, len },
            Backing::Gpu { found, uuid, shared: Some(shared), .. } => {
                let (start, whole) = (found.start, found.bytes);
                let region = Described { uuid: *uuid, base, len, start, whole };
                let (by, file) = shared.by();
                Granted::Gpu { region, by, file }
            }
            // Nobody may write there: none are `writable`.
            Backing::Gpu { shared: None, .. } => return Granted::Refused,
        };
        hazard::grant(grant, key);
        granted
    }

    /// Files of the region of `key`, over several allocations, from number `from` on, for the peer of `link`, which it was granted;
    /// nothing, if it was withdrawn, or has not so many. The driver is not asked while it would keep us waiting. Made under the table's lock: whoever takes the region out of it, and may
    /// free its memory then, finds that nobody does anything with it any more.
    pub(super) fn files(&self, link: &Link, key: u64, from: u32) -> Handed<OwnedFd> {
        let mut table = lock(&self.table);
        let region = table.writable(key);
        let grant = link.segment.inbound().grant(id_of(key));
        match (region.map(|region| &region.backing), grant) {
            (Some(Backing::Gpu { shared: Some(Shared::Files(all)), .. }), Some(grant))
                if hazard::may_continue(grant, key) =>
            {
                let is_busy = self.gpus.0.as_ref().is_some_and(|known| known.closer.is_busy());
                if is_busy { Handed::Busy } else { files_of(all, from) }
            }
            _ => Handed::Nothing,
        }
    }

    /// Copies `parts`, one after the other, to what peers call address `dst` in the region of `key`; returns whether the
    /// region is there, is writable for peers, and has room for all of it there. If not, nothing is
    /// written.
    ///
    /// The parts lie in the segment of a session, where the peer may write at any time.
    pub(super) fn deliver(&self, key: u64, dst: u64, parts: [(*mut u8, usize); 2]) -> bool {
        let mut table = lock(&self.table);
        let host = |region: &&mut Region| region.backing.kind() == Kind::Host;
        let Some(region) = table.writable(key).filter(host) else {
            return false;
        };
        let len: usize = parts.iter().map(|part| part.1).sum();
        let offset = dst.checked_sub(self.first(region.base()));
        let offset = offset.and_then(|offset| usize::try_from(offset).ok());
        let Some(mut offset) =
            offset.filter(|offset| offset.checked_add(len).is_some_and(|end| end <= region.len))
        else {
            return false;
        };
        for (src, bytes) in parts {
            // SAFETY: the source is a run of the bounce ring, mapped while the session lives; the
            // destination was just checked to lie in the region, which stays valid until it is
            // withdrawn (`Memory::register`), and that takes the lock that we hold.
            unsafe { copy(src, region.base.as_ptr().add(offset), bytes, region.len) };
            offset += bytes;
        }
        true
    }

    fn insert(&self, mut region: Region) -> Result<Registered, RegisterError> {
        let (ptr, len, rights, base) = (region.base, region.len, region.rights, region.base());
        let kind = region.backing.kind();
        let place = match (kind, &self.gpus.0) {
            (Kind::Gpu(index), Some(gpus)) => gpus.ordinal(index).map_or(Place::Host, Place::Gpu),
            _ => Place::Host,
        };
        let (inserted, late) = {
            let mut table = lock(&self.table);
            let late = if table.is_over { region.backing.let_go() } else { None };
            (table.insert(region), late)
        };
        // Without the lock.
        if late.is_some() {
            self.part_with_and_wait(Backing::Process { pinned: late });
        }
        let (id, generation) = inserted.map_err(|refused| {
            self.part_with_and_wait(refused.backing);
            RegisterError::TableFull { capacity: REGIONS_MAX }
        })?;
        let keys = [key_of(id, generation, kind); MAX_NICS];
        // PROOF: an engine has 1 to MAX_NICS NICs; `ShmProvider::new` checks it.
        let keys = keys.get(..self.nics).and_then(Keys::new);
        let Some(keys) = keys else {
            return Err(RegisterError::TableFull { capacity: REGIONS_MAX });
        };
        let (generation, owner) = (generation.get(), self.engine);
        let local = LocalMr { base, len: len as u64, generation, keys };
        let base = self.first(base);
        let desc = MrDesc { owner, base, len: len as u64, generation, rights, keys };
        Ok(Registered { ptr, len, local, desc, id, place })
    }

    fn insert_file(
        &self,
        file: OwnedFd,
        mapping: Mapping,
        bytes: usize,
        pinned: Option<Pinned>,
    ) -> Result<Registered, RegisterError> {
        let (base, rights) = (mapping.base(), Rights::REMOTE_WRITE);
        let mapping = Reachable::new(pinned, mapping);
        let backing = Backing::File { file: Arc::new(file), mapping };
        self.insert(Region { base, len: bytes, rights, backing, withdrawn: false })
    }

    /// Pins host memory for the GPUs, if there are any. `None`: there are none, or it is pinned.
    ///
    /// # Safety
    ///
    /// The range stays mapped until what is returned has been dropped.
    unsafe fn pin(
        &self,
        base: NonNull<u8>,
        bytes: usize,
        rights: Rights,
    ) -> Result<Option<Pinned>, NotPinned> {
        let Some(known) = &self.gpus.0 else { return Ok(None) };
        known.must_use_host_pointers()?;
        let Some(device) = known.first() else { return Ok(None) };
        let (start, reads_only) = (base.as_ptr() as u64, !rights.remote_write());
        // SAFETY: our caller's promise. GPUs write to what peers may write to alone.
        unsafe { Pinned::new(device, start, bytes, page_bytes(), reads_only) }
    }

    /// What is known of memory that may be a GPU's.
    fn look_up(&self, ptr: NonNull<u8>, len: usize) -> Result<Option<Found>, RegisterError> {
        let device = self.gpus.0.as_ref().and_then(|gpus| gpus.first());
        let look = |device| immwire_cuda::look_up(device, ptr.as_ptr() as u64, len as u64);
        device.map_or(Ok(None), look).map_err(RegisterError::Gpu)
    }

    fn insert_gpu(
        &self,
        found: Found,
        base: NonNull<u8>,
        len: usize,
        rights: Rights,
        owned: Option<SharedMemory>,
    ) -> Result<Registered, RegisterError> {
        let ordinal = found.ordinal;
        let gpus = self.gpus.0.as_ref().ok_or(RegisterError::NoGpu { ordinal })?;
        let (index, gpu) = gpus.by_ordinal(ordinal).ok_or(RegisterError::NoGpu { ordinal })?;
        let uuid = gpu.uuid;
        let share = || Shared::new(&gpu.device, &found).map_err(RegisterError::Gpu);
        let shared = rights.remote_write().then(share).transpose()?;
        let backing = Backing::Gpu { index, found, uuid, shared, _owned: owned };
        self.insert(Region { base, len, rights, backing, withdrawn: false })
    }
}

/// Memory that peers can map. A forked child has it, too: its user may have views of it there.
fn map_file(bytes: usize) -> Result<(OwnedFd, Mapping), RegisterError> {
    if bytes == 0 {
        return Err(RegisterError::Empty);
    }
    let failed = |call| move |errno: Errno| RegisterError::Os { call, bytes, source: errno.into() };
    let file = sealed_file("immwire-region", bytes).map_err(failed("memfd_create"))?;
    let mapping = Mapping::new(&file, bytes, Use::Own).map_err(failed("mmap"))?;
    Ok((file, mapping))
}

impl Memory for ShmMemory {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        let (file, mapping) = map_file(bytes)?;
        // SAFETY: the mapping is as long, and goes after the pin, or not at all (`Reachable`).
        match unsafe { self.pin(mapping.base(), bytes, Rights::REMOTE_WRITE) } {
            Ok(pinned) => self.insert_file(file, mapping, bytes, pinned),
            Err(NotPinned { why, left }) => {
                let (file, mapping) = (Arc::new(file), Reachable::new(left, mapping));
                self.part_with_and_wait(Backing::File { file, mapping });
                Err(RegisterError::Gpu(why))
            }
        }
    }

    fn alloc_host(&self, bytes: usize) -> Result<Registered, RegisterError> {
        let (file, mapping) = map_file(bytes)?;
        Ok(unreached(self.insert_file(file, mapping, bytes, None)?))
    }

    fn alloc_gpu(&self, ordinal: u32, bytes: usize) -> Result<Registered, RegisterError> {
        let (base, owned, found) = self.gpus.alloc(ordinal, bytes)?;
        self.insert_gpu(found, base, bytes, Rights::REMOTE_WRITE, Some(owned))
    }

    fn pin(&self, bytes: usize) -> Result<PinnedPage, RegisterError> {
        self.gpus.pin(bytes)
    }

    fn give_back(&self) -> Option<GiveBack> {
        self.gpus.give_back()
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
        if let Some(found) = self.look_up(ptr, len)? {
            return self.insert_gpu(found, ptr, len, rights, None);
        }
        // SAFETY: the range stays mapped until the region was revoked, and is released only then, or until the engine has ended, by our caller's
        // promise; it is let go of by then (`ShmMemory::end`). What a GPU that is stuck then still uses are its pages, which the driver keeps.
        let pinned = match unsafe { self.pin(ptr, len, rights) } {
            Ok(pinned) => pinned,
            Err(NotPinned { why, left }) => {
                self.part_with_and_wait(Backing::Process { pinned: left });
                return Err(RegisterError::Gpu(why));
            }
        };
        let backing = Backing::Process { pinned };
        self.insert(Region { base: ptr, len, rights, backing, withdrawn: false })
    }

    unsafe fn register_host(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Registered, RegisterError> {
        if len == 0 {
            return Err(RegisterError::Empty);
        }
        let backing = Backing::Process { pinned: None };
        let region = Region { base: ptr, len, rights, backing, withdrawn: false };
        Ok(unreached(self.insert(region)?))
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
        unsafe { self.gpus.copy(region, offset, host, len, to_host) }
    }

    unsafe fn after_stream(&self, ordinal: u32, stream: *mut c_void) -> Result<(), RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.gpus.after(ordinal, stream) }
    }

    unsafe fn stream(&self, ordinal: u32, stream: *mut c_void) -> Result<Stream, RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.gpus.stream(ordinal, stream) }
    }

    fn window(&self, peer: PeerId, dst: &MrDesc, ordinal: u32) -> Option<Window> {
        let (gpu, _) = self.gpus.0.as_ref()?.by_ordinal(ordinal)?;
        let key = dst.keys.get(0)?;
        let links = lock(&self.links);
        let mut open =
            links.iter().filter(|link| link.peer == peer && !link.closed.load(Ordering::Relaxed));
        let reached = open.find_map(|link| {
            let all = lock(&link.reached);
            all.iter().find(|(known, _)| *known == key)?.1.upgrade()
        })?;
        reached.window(usize::from(gpu), dst)
    }

    fn takes_runs(&self, src: &LocalMr, dst: &MrDesc) -> bool {
        let gpus = |keys: &Keys| keys.get(0).is_some_and(|key| !Kind::of(key).is_host());
        gpus(&src.keys) || gpus(&dst.keys)
    }

    fn revoke(&self, region: &Registered, patience: Duration) -> Result<(), RevokeError> {
        let deadline = Instant::now().checked_add(patience);
        let Some(key) = region.desc.keys.get(0) else {
            return Ok(());
        };
        let mut links = {
            let mut table = lock(&self.table);
            let Some(found) = table.get_mut(key) else {
                return Ok(());
            };
            found.withdrawn = true;
            let links = lock(&self.links).clone();
            links.iter().for_each(|link| link.withdraw(region.id));
            links
        };
        // Each session needs to be seen quiet once only.
        for round in 0_u32.. {
            links.retain(|link| !link.is_quiet(key));
            let Some(link) = links.first() else { break };
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(RevokeError { peer: link.peer });
            }
            if round < 100 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    }

    fn release(&self, region: Registered) {
        let gone = lock(&self.table).remove(region.id);
        if let Some(gone) = gone {
            self.part_with_and_wait(gone.backing);
        }
        if let (Place::Gpu(_), Some(known)) = (region.place, &self.gpus.0) {
            // There is to be room for the next, unless the driver keeps everybody waiting.
            known.closer.catch_up(FREED_WITHIN);
        }
    }

    fn release_later(&self, region: Registered) {
        // Unmapped outside the lock: it takes long for much memory.
        let gone = lock(&self.table).remove(region.id);
        let backing = gone.and_then(|gone| self.part_with(gone.backing));
        if let Some((backing, known)) = backing.zip(self.gpus.0.as_ref()) {
            known.closer.give(backing);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;
    use crate::shm::segment::Geometry;

    const GEOMETRY: Geometry = Geometry { initiator_nics: 1, acceptor_nics: 1 };
    const PEER: PeerId = PeerId { index: 3, generation: 4 };

    fn link() -> (Arc<Link>, Segment, OwnedFd) {
        use rustix::net::{AddressFamily, SocketFlags, SocketType};
        let kind = SocketType::SEQPACKET;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let (segment, file) = Segment::create(GEOMETRY).unwrap();
        let peers = Segment::open(GEOMETRY, &file).unwrap();
        (Arc::new(Link::new(PEER, segment, ours)), peers, theirs)
    }

    fn memory() -> ShmMemory {
        ShmMemory::new(EngineId(1), 2, false, None)
    }

    #[test]
    fn a_region_is_zeroed_described_and_found_until_it_is_withdrawn() {
        let memory = memory();
        let (link, peers, _socket) = link();
        memory.attach(Arc::clone(&link));
        let region = memory.alloc(5000).unwrap();
        assert_eq!((region.len, region.desc.len, region.desc.keys.nics()), (5000, 5000, 2));
        assert_eq!(region.desc.base, region.ptr.as_ptr() as u64);
        let key = region.desc.keys.get(1).unwrap();
        let granted = memory.grant(&link, key);
        assert!(matches!(granted, Granted::File { len: 5000, .. }));
        let grant = peers.outbound().grant(id_of(key)).unwrap();
        assert!(hazard::may_continue(grant, key));
        memory.revoke(&region, Duration::ZERO).unwrap();
        assert!(!hazard::may_continue(grant, key));
        assert_eq!(peers.outbound().withdrawals().load(Ordering::Relaxed), 1);
        assert!(matches!(memory.grant(&link, key), Granted::Refused));
        memory.release(region);
        let again = memory.alloc(1).unwrap();
        assert_eq!((again.id, again.desc.generation), (id_of(key), 2));
        assert!(matches!(memory.grant(&link, key), Granted::Refused));
    }

    /// As a source only: what peers write to is the host's to them.
    #[test]
    fn what_is_not_pinned_says_so_as_a_source() {
        let memory = memory();
        let (link, _peers, _socket) = link();
        memory.attach(Arc::clone(&link));
        let kinds = |region: &Registered| {
            let kind = |keys: &Keys| keys.as_slice().iter().map(|&key| Kind::of(key)).collect();
            (kind(&region.local.keys), kind(&region.desc.keys))
        };
        let expected = |source| (vec![source; 2], vec![Kind::Host; 2]);
        let pinned = memory.alloc(1).unwrap();
        assert_eq!(kinds(&pinned), expected(Kind::Host));
        let mut byte = 0_u8;
        let ptr = NonNull::from(&mut byte);
        // SAFETY: `byte` outlives the registration.
        let lent = unsafe { memory.register_host(ptr, 1, Rights::REMOTE_WRITE) }.unwrap();
        for region in [memory.alloc_host(1).unwrap(), lent] {
            assert_eq!(kinds(&region), expected(Kind::Unreached));
            let key = region.desc.keys.get(0).unwrap();
            assert!(!matches!(memory.grant(&link, key), Granted::Refused));
            memory.revoke(&region, Duration::ZERO).unwrap();
            memory.release(region);
        }
    }

    #[test]
    fn a_peer_in_mid_write_is_named_until_it_stops_or_dies() {
        for dies in [false, true] {
            let memory = memory();
            let (link, peers, socket) = link();
            memory.attach(Arc::clone(&link));
            let region = memory.alloc(1).unwrap();
            let key = region.desc.keys.get(0).unwrap();
            assert!(matches!(memory.grant(&link, key), Granted::File { .. }));
            let out = peers.outbound();
            assert!(hazard::enter(out.active(), out.grant(id_of(key)).unwrap(), key));
            // Ending the session must not make us forget that it is writing.
            memory.detach(&link);
            let refused = memory.revoke(&region, Duration::from_millis(5));
            assert_eq!(refused, Err(RevokeError { peer: PEER }));
            if dies {
                drop(socket);
            } else {
                hazard::leave(out.active());
            }
            memory.revoke(&region, Duration::ZERO).unwrap();
            memory.detach(&link);
            assert!(lock(&memory.links).is_empty());
        }
    }

    /// A process that has ended, though its socket is open, in a child of its own, say.
    #[test]
    fn a_dead_process_writes_no_more_whoever_has_its_socket() {
        let memory = memory();
        let (link, peers, _socket) = link();
        let Ok(link) = Arc::try_unwrap(link) else { panic!("ours alone") };
        let mut child = std::process::Command::new("cat");
        let mut child = child.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let link = Arc::new(Link { process: Some(process), ..link });
        memory.attach(Arc::clone(&link));
        let region = memory.alloc(1).unwrap();
        let key = region.desc.keys.get(0).unwrap();
        assert!(matches!(memory.grant(&link, key), Granted::File { .. }));
        let out = peers.outbound();
        assert!(hazard::enter(out.active(), out.grant(id_of(key)).unwrap(), key));
        let refused = memory.revoke(&region, Duration::from_millis(5));
        assert_eq!((refused, link.is_gone()), (Err(RevokeError { peer: PEER }), false));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(link.is_gone() && !socket::is_gone(&link.socket));
        memory.revoke(&region, Duration::ZERO).unwrap();
        memory.detach(&link);
        assert!(lock(&memory.links).is_empty());
    }

    /// What a GPU writes is over when the peer's process is, not when its socket is; of one that cannot be asked, never.
    #[test]
    fn what_a_peers_gpu_writes_outlives_its_socket() {
        for can_be_asked in [true, false] {
            let memory = memory();
            let (link, peers, socket) = link();
            // Ours, which goes on.
            assert!(link.process.is_some());
            let link = match can_be_asked {
                true => link,
                false => {
                    let Ok(link) = Arc::try_unwrap(link) else { panic!("ours alone") };
                    Arc::new(Link { process: None, ..link })
                }
            };
            memory.attach(Arc::clone(&link));
            let region = memory.alloc(1).unwrap();
            let key = region.desc.keys.get(0).unwrap();
            assert!(matches!(memory.grant(&link, key), Granted::File { .. }));
            let out = peers.outbound();
            let (active, grant) = (out.gpu_active(id_of(key)).unwrap(), out.grant(id_of(key)));
            assert!(hazard::enter(active, grant.unwrap(), key));
            drop(socket);
            let refused = memory.revoke(&region, Duration::from_millis(5));
            assert_eq!(refused, Err(RevokeError { peer: PEER }), "{can_be_asked}");
            hazard::leave(active);
            memory.revoke(&region, Duration::ZERO).unwrap();
        }
    }

    #[test]
    fn delivery_stays_inside_the_region() {
        let memory = memory();
        let mut bytes = [0_u8; 4];
        let ptr = NonNull::new(bytes.as_mut_ptr()).unwrap();
        for rights in [Rights::REMOTE_WRITE, Rights::LOCAL] {
            // SAFETY: `bytes` outlives the registration, and is looked at by raw pointer meanwhile.
            let region = unsafe { memory.register(ptr, 4, rights) }.unwrap();
            let (base, key) = (region.desc.base, region.desc.keys.get(0).unwrap());
            let source = [1_u8, 2, 3, 4, 5, 6];
            let from = source.as_ptr().cast_mut();
            for offset in -2..7_i64 {
                for first in 0..3 {
                    for second in 0..3_usize {
                        let dst = base.wrapping_add_signed(offset);
                        let len = i64::try_from(first + second).unwrap();
                        let fits = offset >= 0 && offset + len <= 4;
                        let parts = [(from, first), (from.wrapping_add(first), second)];
                        // SAFETY: reset and read below, through the pointer that was registered.
                        unsafe { ptr.cast::<[u8; 4]>().write([0; 4]) };
                        let done = memory.deliver(key, dst, parts);
                        assert_eq!(done, fits && rights.remote_write());
                        // SAFETY: as above.
                        let got = unsafe { ptr.cast::<[u8; 4]>().read() };
                        let mut want = [0; 4];
                        if done {
                            let at = usize::try_from(offset).unwrap();
                            want[at..at + first + second]
                                .copy_from_slice(&source[..first + second]);
                        }
                        assert_eq!(got, want, "{offset} {first} {second}");
                    }
                }
            }
            assert!(!memory.deliver(key, u64::MAX, [(from, 2), (from, 0)]));
            assert!(!memory.deliver(key ^ 1 << 40, base, [(from, 1), (from, 0)]));
            memory.revoke(&region, Duration::ZERO).unwrap();
            assert!(!memory.deliver(key, base, [(from, 1), (from, 0)]));
            memory.release(region);
        }
    }

    #[test]
    fn nothing_and_too_many_are_refused() {
        let memory = memory();
        assert!(matches!(memory.alloc(0), Err(RegisterError::Empty)));
        assert!(matches!(memory.alloc(usize::MAX), Err(RegisterError::Os { .. })));
        let mut byte = 0_u8;
        let ptr = NonNull::from(&mut byte);
        // SAFETY: `byte` outlives all registrations.
        let register = || unsafe { memory.register(ptr, 1, Rights::LOCAL) };
        let all: Vec<_> = (0..REGIONS_MAX).map(|_| register().unwrap()).collect();
        assert!(matches!(register(), Err(RegisterError::TableFull { .. })));
        all.into_iter().for_each(|region| memory.release(region));
        assert_eq!(register().unwrap().desc.generation, 2);
    }
}
