//! The regions of one engine on verbs, and the taking back of what peers were allowed to do with them.
//!
//! A region is registered with the protection domain of each NIC. Its keys name its registration beside what the
//! device needs (`immwire_core::tenant`), so that a peer can be told what not to write to any more.
//!
//! # Taking back
//!
//! A device keeps everybody out of what was deregistered. But whoever writes there then loses the connection by it;
//! so each peer is told to stop first, and says that it has (`Withdraw`, `Withdrawn`). One that has gone has lost its
//! queue pairs here with its session. That is the engine's to do: `Ledger` is what it and the threads that withdraw
//! regions share.
//!
//! # Invariants
//!
//! - [`VerbsMemory::revoke`] returns `Ok` only when no session is left that has not said that it writes there no
//!   more, and the registrations are gone.
//! - A registration is dropped before the memory is given up.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use immwire_core::id::{EngineId, MAX_NICS, PeerId};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire_core::tenant::{LAST_SERIAL, SLOTS, Tenant};
use rustix::event::EventfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::VerbsError;
use super::device::{Domain, Registration};
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
        // SAFETY: ours, and nobody uses it: its registrations were dropped before.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[derive(Debug)]
struct Region {
    /// One for each NIC that was not lost; dropped first.
    registrations: Vec<Registration>,
    remote: bool,
    _mapping: Option<Mapping>,
}

#[derive(Debug)]
struct Slot {
    serial: u32,
    region: Option<Region>,
}

#[derive(Debug, Default)]
struct Table {
    slots: Vec<Slot>,
    free: Vec<u16>,
}

impl Table {
    fn region(&mut self, tenant: Tenant) -> Option<&mut Region> {
        let slot = self.slots.get_mut(usize::from(tenant.slot()))?;
        if slot.serial == tenant.serial() { slot.region.as_mut() } else { None }
    }
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

/// What the engine and those who withdraw regions share.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// All sessions, by our token.
    sessions: Vec<(u64, PeerId)>,
    pub(super) withdrawals: Vec<Withdrawal>,
    /// There are no queue pairs any more.
    pub(super) stopped: bool,
}

impl Ledger {
    /// Who may still be writing to a region that is being withdrawn.
    fn writer(&self, tenant: Tenant) -> Option<PeerId> {
        let withdrawal = self.withdrawals.iter().find(|it| it.tenant == tenant)?;
        withdrawal.waiting.first().map(|&(_, peer)| peer).filter(|_| !self.stopped)
    }

    /// A session has begun: it hears of what is being withdrawn, too.
    pub(super) fn open(&mut self, token: u64, peer: PeerId) {
        self.sessions.push((token, peer));
        for withdrawal in &mut self.withdrawals {
            withdrawal.waiting.push((token, peer));
            withdrawal.told = false;
        }
    }

    /// A session has ended, with all its queue pairs.
    pub(super) fn close(&mut self, token: u64) {
        self.sessions.retain(|&(other, _)| other != token);
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
#[derive(Debug)]
pub struct VerbsMemory {
    engine: EngineId,
    /// By NIC.
    domains: Vec<Arc<Domain>>,
    /// Taken after the ledger, if both are.
    table: Mutex<Table>,
    ledger: Mutex<Ledger>,
    changed: Condvar,
    wake: OwnedFd,
}

impl VerbsMemory {
    pub(super) fn new(engine: EngineId, domains: Vec<Arc<Domain>>) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self {
            engine,
            domains,
            table: Mutex::default(),
            ledger: Mutex::default(),
            changed: Condvar::new(),
            wake: rustix::event::eventfd(0, flags)?,
        })
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

    /// What was withdrawn so far: of each slot the last, which goes for all before it.
    pub(super) fn gone(&self) -> Vec<Tenant> {
        let table = lock(&self.table);
        let last = |(at, slot): (usize, &Slot)| {
            let region = slot.region.as_ref();
            let closed = region.is_some_and(|region| region.registrations.is_empty());
            // One that is registered, or is about to be, is not; the one before it was.
            let serial = if closed { slot.serial } else { slot.serial.saturating_sub(1) };
            Tenant::new(u16::try_from(at).ok()?, serial)
        };
        table.slots.iter().enumerate().filter_map(last).collect()
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
        let tenant = self.claim()?;
        let remote = rights.remote_write();
        let (mut locals, mut remotes) = ([0; MAX_NICS], [0; MAX_NICS]);
        let mut registrations = Vec::with_capacity(self.domains.len());
        // Outside the lock: pinning takes its time, and others register meanwhile.
        for (nic, domain) in self.domains.iter().enumerate() {
            // SAFETY: the caller's promise; `revoke` and `release` drop the registration in time.
            match unsafe { domain.register(ptr, len, remote) } {
                Ok(made) => {
                    if let (Some(ours), Some(theirs)) = (locals.get_mut(nic), remotes.get_mut(nic))
                    {
                        *ours = u64::from(made.local_key());
                        *theirs = tenant.key(made.remote_key());
                    }
                    registrations.push(made);
                }
                // Nobody writes there any more.
                Err(_) if domain.device().is_lost() => {}
                Err(error) => {
                    drop(registrations);
                    self.unclaim(tenant);
                    let source = error.into();
                    return Err(RegisterError::Os { call: "ibv_reg_mr", bytes: len, source });
                }
            }
        }
        let nics = self.domains.len();
        let keys = |keys: &[u64; MAX_NICS]| Keys::new(keys.get(..nics)?);
        let (Some(locals), Some(remotes)) = (keys(&locals), keys(&remotes)) else {
            drop(registrations);
            self.unclaim(tenant);
            return Err(RegisterError::TableFull { capacity: MAX_NICS });
        };
        if let Some(slot) = lock(&self.table).slots.get_mut(usize::from(tenant.slot())) {
            slot.region = Some(Region { registrations, remote, _mapping: mapping });
        }
        let (base, bytes, generation) = (ptr.as_ptr() as u64, len as u64, tenant.serial());
        let local = LocalMr { base, len: bytes, generation, keys: locals };
        let desc =
            MrDesc { owner: self.engine, base, len: bytes, generation, rights, keys: remotes };
        Ok(Registered { ptr, len, local, desc, id: u32::from(tenant.slot()), place: Place::Host })
    }

    fn tenant_of(region: &Registered) -> Option<Tenant> {
        Tenant::new(u16::try_from(region.id).ok()?, region.desc.generation)
    }

    /// Drops the registrations of a region that nobody writes to.
    fn close(&self, tenant: Tenant) {
        // Outside the lock: a device takes its time.
        drop(self.take_registrations(tenant));
    }

    fn take_registrations(&self, tenant: Tenant) -> Vec<Registration> {
        let mut table = lock(&self.table);
        let region = table.region(tenant);
        region.map(|region| std::mem::take(&mut region.registrations)).unwrap_or_default()
    }

    /// Whether peers may write to a region that is still registered.
    fn is_exposed(&self, tenant: Tenant) -> bool {
        let mut table = lock(&self.table);
        table.region(tenant).is_some_and(|it| it.remote && !it.registrations.is_empty())
    }

    /// Waits until no peer writes there; from then on the region is gone, but for its registrations,
    /// which are returned to be dropped.
    fn wait_for_writers(
        &self,
        tenant: Tenant,
        patience: Duration,
    ) -> Result<Vec<Registration>, RevokeError> {
        let deadline = Instant::now().checked_add(patience);
        let mut ledger = lock(&self.ledger);
        if !ledger.withdrawals.iter().any(|it| it.tenant == tenant) {
            let waiting = ledger.sessions.clone();
            ledger.withdrawals.push(Withdrawal { tenant, waiting, told: false });
        }
        loop {
            let Some(peer) = ledger.writer(tenant) else {
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

impl Memory for VerbsMemory {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        if bytes == 0 {
            return Err(RegisterError::Empty);
        }
        let failed = |source| RegisterError::Os { call: "mmap", bytes, source };
        let mapping = Mapping::new(bytes).map_err(failed)?;
        // SAFETY: the mapping lives as long as the region, whose registrations are dropped before.
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

impl From<VerbsError> for io::Error {
    fn from(error: VerbsError) -> Self {
        match error {
            VerbsError::Call { source, .. } | VerbsError::Os { source, .. } => source,
            error => Self::other(error),
        }
    }
}
