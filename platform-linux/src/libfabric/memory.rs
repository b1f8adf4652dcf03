//! The regions of one engine on libfabric, and the taking back of what peers were allowed to do with them.
//!
//! A region is registered with the domain of each NIC; where endpoints that are replaced take their domain
//! with them, with the next one's before, under the same keys. Its keys name its registration beside what
//! the device needs (`immwire_core::tenant`), so that a peer can be told what not to write to any more.
//!
//! # Taking back
//!
//! A registration must not be closed while a peer may write there: a software provider goes on placing what
//! it has begun to receive, and answers the next write to an unknown key by dropping the whole connection.
//! So each peer is told to stop, and says that it has (`Withdraw`, `Withdrawn`); one that is gone without a
//! word is cut off first, by replacing the endpoints. That is the engine's to do: `Ledger` is what it and
//! the threads that withdraw regions share.
//!
//! # Invariants
//!
//! - [`LibfabricMemory::revoke`] returns `Ok` only when no session is left that has not said that it writes
//!   there no more, and no ghost: a session that ended with something of its peer's perhaps under way.
//! - A registration is closed after that, and before the memory is given up.
//! - The table of descriptors is read by the engine without a lock; an entry is set before the region's key
//!   is known to anybody, and stays until the registration is closed.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use immwire_core::datagram::Tenants;
use immwire_core::id::{EngineId, MAX_NICS, PeerId};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire_core::tenant::{LAST_SERIAL, PART, SLOTS, Tenant, device_key};
use rustix::event::EventfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::LibfabricError;
use super::fabric::{Domain, Facts, Registration};
use crate::provider::{Memory, Place, RegisterError, Registered, RevokeError};
use crate::sync::lock;

/// Memory that we mapped.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range; unmapped once, by its owner.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(len: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, flags) }?;
        NonNull::new(base.cast())
            .map(|base| Self { base, len })
            .ok_or(io::ErrorKind::OutOfMemory.into())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody uses it: its registrations were closed before.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[derive(Debug)]
struct Region {
    /// By NIC and domain; closed first.
    registrations: Vec<(usize, Registration)>,
    base: NonNull<u8>,
    len: usize,
    remote: bool,
    /// For each NIC.
    keys: Keys,
    _mapping: Option<Mapping>,
}

// SAFETY: `base` is an address; it is passed to libfabric only, while the region's memory is there.
unsafe impl Send for Region {}

#[derive(Debug)]
struct Slot {
    serial: u32,
    region: Option<Region>,
}

#[derive(Debug, Default)]
struct Table {
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// What regions are registered with, by NIC: two, while endpoints are replaced.
    domains: Vec<(usize, Arc<Domain>)>,
}

/// How far the taking back of one region is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Withdrawal {
    pub(super) tenant: Tenant,
    /// Sessions that have not said that they are through with it, by token.
    pub(super) waiting: Vec<(u64, PeerId)>,
    /// The engine has told them.
    pub(super) told: bool,
}

/// A session that ended while its peer may still have been writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ghost {
    pub(super) token: u64,
    pub(super) peer: PeerId,
}

/// What the engine and those who withdraw regions share.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// All sessions, by our token.
    pub(super) sessions: Vec<(u64, PeerId)>,
    pub(super) ghosts: Vec<Ghost>,
    pub(super) withdrawals: Vec<Withdrawal>,
    /// The endpoints are closed for good.
    pub(super) stopped: bool,
}

impl Ledger {
    /// Who may still be writing to a region that is being withdrawn, if it is.
    fn writer(&self, tenant: Tenant, ghosts_matter: bool) -> Option<PeerId> {
        if self.stopped {
            return None;
        }
        let withdrawal = self.withdrawals.iter().find(|it| it.tenant == tenant)?;
        let ghost = self.ghosts.first().filter(|_| ghosts_matter).map(|ghost| ghost.peer);
        withdrawal.waiting.first().map(|&(_, peer)| peer).or(ghost)
    }

    /// Whether a withdrawal waits for a ghost.
    pub(super) fn is_haunted(&self) -> bool {
        !self.ghosts.is_empty() && self.withdrawals.iter().any(|it| it.waiting.is_empty())
    }

    /// A session has begun: it hears of what is being withdrawn, too.
    pub(super) fn open(&mut self, token: u64, peer: PeerId) {
        self.sessions.push((token, peer));
        for withdrawal in &mut self.withdrawals {
            withdrawal.waiting.push((token, peer));
            withdrawal.told = false;
        }
    }

    /// A session has ended; quietly, if its peer has nothing under way.
    pub(super) fn close(&mut self, token: u64, quiet: bool) {
        let session = self.sessions.iter().position(|&(other, _)| other == token);
        if let Some((token, peer)) = session.map(|at| self.sessions.swap_remove(at))
            && !quiet
        {
            self.ghosts.push(Ghost { token, peer });
        }
        for withdrawal in &mut self.withdrawals {
            withdrawal.waiting.retain(|&(other, _)| other != token);
        }
    }

    /// The session's peer writes to the region no more.
    pub(super) fn withdrawn(&mut self, token: u64, tenant: Tenant) {
        for withdrawal in self.withdrawals.iter_mut().filter(|it| it.tenant == tenant) {
            withdrawal.waiting.retain(|&(other, _)| other != token);
        }
    }
}

/// The regions of one engine.
pub struct LibfabricMemory {
    engine: EngineId,
    nics: usize,
    virtual_addresses: bool,
    own_keys: bool,
    /// Closing a registration keeps everybody out, ghosts too.
    closing_fences: bool,
    /// Taken after the ledger, if both are.
    table: Mutex<Table>,
    /// By slot and NIC: what an operation on the region needs.
    descs: Box<[AtomicPtr<std::ffi::c_void>]>,
    ledger: Mutex<Ledger>,
    changed: Condvar,
    wake: OwnedFd,
}

impl fmt::Debug for LibfabricMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LibfabricMemory").field("engine", &self.engine).finish_non_exhaustive()
    }
}

fn random_word() -> io::Result<u32> {
    let mut bytes = [0; 4];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u32::from_ne_bytes(bytes))
}

impl LibfabricMemory {
    pub(super) fn new(engine: EngineId, nics: usize, facts: &Facts) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let entries = if facts.local_descs { SLOTS * nics } else { 0 };
        Ok(Self {
            engine,
            nics,
            virtual_addresses: facts.virtual_addresses,
            own_keys: facts.own_keys,
            closing_fences: facts.closing_fences,
            descs: (0..entries).map(|_| AtomicPtr::new(ptr::null_mut())).collect(),
            table: Mutex::default(),
            ledger: Mutex::default(),
            changed: Condvar::new(),
            wake: rustix::event::eventfd(0, flags)?,
        })
    }

    /// Registers all regions, and those to come, with a NIC's domain. Takes as long as they are many; on
    /// software providers, about a microsecond each.
    pub(super) fn adopt(&self, nic: usize, domain: &Arc<Domain>) -> Result<(), LibfabricError> {
        let mut table = lock(&self.table);
        table.domains.push((nic, Arc::clone(domain)));
        for slot in &mut table.slots {
            // A region without registrations is one that is being given up.
            let region = slot.region.as_mut().filter(|region| !region.registrations.is_empty());
            let Some(region) = region else { continue };
            let Some(key) = region.keys.get(u8::try_from(nic).unwrap_or(u8::MAX)) else { continue };
            // SAFETY: the region's memory is there until its registrations are closed, which takes the
            // lock that we hold.
            let made = unsafe { domain.register(region.base, region.len, region.remote, key) };
            match made {
                Ok(registration) => region.registrations.push((nic, registration)),
                Err(error) => {
                    drop(table);
                    self.abandon(domain);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Closes all registrations with a domain that is used no more.
    pub(super) fn abandon(&self, domain: &Arc<Domain>) {
        let mut table = lock(&self.table);
        table.domains.retain(|(_, other)| !Arc::ptr_eq(other, domain));
        for region in table.slots.iter_mut().filter_map(|slot| slot.region.as_mut()) {
            region.registrations.retain(|(_, registration)| !registration.is_of(domain));
        }
    }

    /// Becomes readable when the ledger has something for the engine.
    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Looks into the ledger, or writes there; whoever waits for it looks again.
    pub(super) fn with_ledger<T>(&self, f: impl FnOnce(&mut Ledger) -> T) -> T {
        let result = f(&mut lock(&self.ledger));
        self.changed.notify_all();
        result
    }

    /// What an operation on `nic` needs to read from the region of `key`; `None` if the key is none. A load.
    #[inline]
    pub(super) fn desc(&self, nic: usize, key: u64) -> Option<*mut std::ffi::c_void> {
        if self.descs.is_empty() {
            return Some(ptr::null_mut());
        }
        let slot = usize::from(Tenant::of(key)?.slot());
        // Acquire, with the release in `insert`: whoever sees it sees the registration made.
        let desc = self.descs.get(slot * self.nics + nic)?.load(Ordering::Acquire);
        Some(desc)
    }

    /// What goes onto the wire for a key that a descriptor has.
    #[inline]
    pub(super) const fn wire_key(own_keys: bool, key: u64) -> u64 {
        if own_keys { device_key(key) as u64 } else { key }
    }

    /// A slot, and the serial number of its next tenant.
    fn claim(&self) -> Result<Tenant, RegisterError> {
        let mut table = lock(&self.table);
        let full = RegisterError::TableFull { capacity: SLOTS };
        if let Some(slot) = table.free.pop() {
            let serial = table.slots.get(usize::from(slot)).map_or(0, |slot| slot.serial);
            return Tenant::new(slot, serial).ok_or(full);
        }
        let slot = u16::try_from(table.slots.len()).ok();
        let tenant = slot.and_then(|slot| Tenant::new(slot, 1)).ok_or(full)?;
        table.slots.push(Slot { serial: 1, region: None });
        Ok(tenant)
    }

    /// Gives a slot back; one whose numbers are used up is not used again.
    fn unclaim(&self, tenant: Tenant) -> Option<Region> {
        let mut table = lock(&self.table);
        let slot = table.slots.get_mut(usize::from(tenant.slot()))?;
        if slot.serial != tenant.serial() {
            return None;
        }
        let region = slot.region.take();
        slot.serial += 1;
        if slot.serial <= LAST_SERIAL {
            table.free.push(tenant.slot());
        }
        region
    }

    /// # Safety
    ///
    /// As for [`Memory::register`].
    unsafe fn insert(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
        mapping: Option<Mapping>,
    ) -> Result<Registered, RegisterError> {
        let failed =
            |source: io::Error| RegisterError::Os { call: "fi_mr_reg", bytes: len, source };
        let random = random_word().map_err(failed)?;
        let tenant = self.claim()?;
        let remote = rights.remote_write();
        // Under the lock: so that a domain that is adopted meanwhile is not left out.
        let mut table = lock(&self.table);
        let wanted = tenant.key(random);
        let mut keys = [0; MAX_NICS];
        let mut registrations = Vec::with_capacity(table.domains.len());
        let mut failure = None;
        for (nic, domain) in &table.domains {
            // SAFETY: the caller's promise; `revoke` and `release` drop the registration in time.
            match unsafe { domain.register(ptr, len, remote, wanted) } {
                Ok(registration) => {
                    let key = match u32::try_from(registration.key()) {
                        _ if !self.own_keys => registration.key(),
                        Ok(device) => tenant.key(device),
                        // A device with longer keys than EFA's.
                        Err(_) => {
                            failure = Some(io::ErrorKind::Unsupported.into());
                            break;
                        }
                    };
                    if let Some(slot) = keys.get_mut(*nic) {
                        *slot = key;
                    }
                    registrations.push((*nic, registration));
                }
                Err(error) => {
                    failure = Some(error.into());
                    break;
                }
            }
        }
        let keys = keys.get(..self.nics).and_then(Keys::new).filter(|_| failure.is_none());
        let (Some(keys), Some(slot)) = (keys, table.slots.get_mut(usize::from(tenant.slot())))
        else {
            drop((registrations, table));
            self.unclaim(tenant);
            return Err(failed(failure.unwrap_or_else(|| io::ErrorKind::InvalidInput.into())));
        };
        for (nic, registration) in &registrations {
            let at = usize::from(tenant.slot()) * self.nics + nic;
            if let Some(desc) = self.descs.get(at) {
                desc.store(registration.desc(), Ordering::Release);
            }
        }
        slot.region =
            Some(Region { registrations, base: ptr, len, remote, keys, _mapping: mapping });
        drop(table);
        let (address, bytes, generation) = (ptr.as_ptr() as u64, len as u64, tenant.serial());
        let base = if self.virtual_addresses { address } else { 0 };
        let local = LocalMr { base: address, len: bytes, generation, keys };
        let desc = MrDesc { owner: self.engine, base, len: bytes, generation, rights, keys };
        Ok(Registered { ptr, len, local, desc, id: u32::from(tenant.slot()), place: Place::Host })
    }

    fn tenant_of(region: &Registered) -> Option<Tenant> {
        Tenant::new(u16::try_from(region.id).ok()?, region.desc.generation)
    }

    /// Closes the registrations of a region that nobody writes to.
    fn close(&self, tenant: Tenant) {
        // Outside the lock: a device takes its time.
        drop(self.take_registrations(tenant));
    }

    fn take_registrations(&self, tenant: Tenant) -> Vec<(usize, Registration)> {
        let mut table = lock(&self.table);
        let slot = table.slots.get_mut(usize::from(tenant.slot()));
        let slot = slot.filter(|slot| slot.serial == tenant.serial());
        let region = slot.and_then(|slot| slot.region.as_mut());
        region.map(|region| std::mem::take(&mut region.registrations)).unwrap_or_default()
    }

    /// Registrations that were withdrawn, by slot the last one; numbered parts, the last one first. O(slots).
    pub(super) fn gone(&self) -> Vec<(u8, Tenants)> {
        let table = lock(&self.table);
        let last = |(slot, it): (usize, &Slot)| {
            let region = it.region.as_ref();
            let is_closed = region.is_some_and(|region| region.registrations.is_empty());
            let serial = if is_closed { it.serial } else { it.serial.checked_sub(1)? };
            Tenant::new(u16::try_from(slot).ok()?, serial)
        };
        let all: Vec<Tenant> = table.slots.iter().enumerate().filter_map(last).collect();
        let parts = (0..).zip(all.chunks(PART));
        let mut parts: Vec<_> =
            parts.map(|(part, tenants)| (part, tenants.iter().copied().collect())).collect();
        parts.reverse();
        parts
    }

    /// Whether peers may write to a region that is still registered.
    fn is_exposed(&self, tenant: Tenant) -> bool {
        let table = lock(&self.table);
        let slot = table.slots.get(usize::from(tenant.slot()));
        let region = slot
            .filter(|slot| slot.serial == tenant.serial())
            .and_then(|slot| slot.region.as_ref());
        region.is_some_and(|region| region.remote && !region.registrations.is_empty())
    }
}

impl Memory for LibfabricMemory {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        if bytes == 0 {
            return Err(RegisterError::Empty);
        }
        let failed = |source| RegisterError::Os { call: "mmap", bytes, source };
        let mapping = Mapping::new(bytes).map_err(failed)?;
        // SAFETY: the mapping lives as long as the region, which is closed before.
        unsafe { self.insert(mapping.base, bytes, Rights::REMOTE_WRITE, Some(mapping)) }
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
        // SAFETY: the caller's promise.
        unsafe { self.insert(ptr, len, rights, None) }
    }

    /// The engine must be polled meanwhile, by its thread or its caller, unless there is no peer.
    fn revoke(&self, region: &Registered, patience: Duration) -> Result<(), RevokeError> {
        let Some(tenant) = Self::tenant_of(region) else { return Ok(()) };
        if self.is_exposed(tenant) {
            let registrations = self.wait_for_writers(tenant, patience)?;
            // Outside the locks: a device takes its time.
            drop(registrations);
        }
        self.close(tenant);
        Ok(())
    }

    fn release(&self, region: Registered) {
        let Some(tenant) = Self::tenant_of(&region) else { return };
        self.close(tenant);
        let gone = self.unclaim(tenant);
        lock(&self.ledger).withdrawals.retain(|it| it.tenant != tenant);
        drop(gone);
    }
}

impl LibfabricMemory {
    /// Waits until no peer writes there; from then on the region is gone, but for its registrations,
    /// which are returned to be closed.
    fn wait_for_writers(
        &self,
        tenant: Tenant,
        patience: Duration,
    ) -> Result<Vec<(usize, Registration)>, RevokeError> {
        let deadline = Instant::now().checked_add(patience);
        let mut ledger = lock(&self.ledger);
        if !ledger.withdrawals.iter().any(|it| it.tenant == tenant) {
            let waiting = ledger.sessions.clone();
            ledger.withdrawals.push(Withdrawal { tenant, waiting, told: false });
        }
        loop {
            let Some(peer) = ledger.writer(tenant, !self.closing_fences) else {
                // Under the lock: a session that begins later finds it among those that are gone.
                ledger.withdrawals.retain(|it| it.tenant != tenant);
                return Ok(self.take_registrations(tenant));
            };
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(RevokeError { peer });
            }
            // Looked at again now and then: whoever polls the engine may need the wake-up more than once.
            let left = left.unwrap_or(Duration::MAX).min(Duration::from_millis(10));
            ledger = crate::sync::sleep_locked(&self.changed, ledger, left);
        }
    }
}

impl From<LibfabricError> for io::Error {
    fn from(error: LibfabricError) -> Self {
        match error {
            LibfabricError::Call { code, .. } if code < 256 => Self::from_raw_os_error(code),
            error => Self::other(error),
        }
    }
}
