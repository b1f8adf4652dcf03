//! The regions of one engine on verbs: registered with the protection domain of each NIC.
//!
//! A region's keys name its registration beside what the device needs (`immwire_core::tenant`), so that a peer can be
//! told what not to write to any more. How regions are taken back is `withdrawal`'s. A device keeps everybody out of
//! what was deregistered. But whoever writes there then loses the connection by it; so each peer is told first. One that
//! has gone has lost its queue pairs here with its session, and leaves no ghost.
//!
//! # Invariants
//!
//! - A key names its region's registration, whether the NIC has one of its own or has failed: a peer that writes there does not
//!   know of that yet, and finds out as the write fails on its way; what names nothing it would refuse, for good.

use std::ffi::c_void;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use immwire_core::id::{EngineId, MAX_NICS};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire_core::tenant::Tenant;

use super::VerbsError;
use super::device::{Access, Domain, Registration};
use crate::gpus::{Direct, Gpus, Known};
use crate::provider::{
    GiveBack, Memory, PinnedPage, Place, RegisterError, Registered, RevokeError,
};
use crate::withdrawal::{Mapping, Owned, Region, Regions, tenant_of};

/// One registration for each NIC that was not lost; and the keys for us and for peers, of all NICs.
type Held = (Vec<Registration>, Keys, Keys);

/// A key of our own: the device's below; above it 1 and the index of the GPU whose memory it is, or 0 for the host's.
fn joined_key(device: u32, home: Option<u8>) -> u64 {
    u64::from(home.map_or(0, |index| u32::from(index) + 1)) << 32 | u64::from(device)
}

/// What [`joined_key`] was made of.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the lower half is what is meant")]
pub(super) fn split_key(key: u64) -> (u32, Option<u8>) {
    (key as u32, (key >> 32).checked_sub(1).map(|index| index as u8))
}

/// A region's keys on one NIC, for us and for peers, from the device's own two; from none, if the device has failed.
fn keys_on(tenant: Tenant, device: Option<(u32, u32)>, home: Option<u8>) -> (u64, u64) {
    let (local, remote) = device.unwrap_or_default();
    (joined_key(local, home), tenant.key(remote))
}

/// The regions of one engine.
#[derive(Debug)]
pub struct VerbsMemory {
    engine: EngineId,
    /// By NIC.
    domains: Vec<Arc<Domain>>,
    /// Memory of the host is not pinned.
    on_demand: bool,
    pub(super) gpus: Gpus,
    pub(super) regions: Regions<Vec<Registration>>,
}

impl VerbsMemory {
    /// Has what NICs have written to GPUs be seen there, unless that was done since the batch was read that `is_shown` is of.
    #[inline]
    pub(super) fn show_once(&self, is_shown: &mut bool) {
        if let (Some(gpus), false) = (&self.gpus.0, *is_shown) {
            gpus.show();
        }
        *is_shown = true;
    }

    pub(super) fn new(
        engine: EngineId,
        domains: Vec<Arc<Domain>>,
        on_demand: bool,
        gpus: Option<Arc<Known>>,
    ) -> io::Result<Self> {
        Ok(Self { engine, domains, on_demand, gpus: Gpus(gpus), regions: Regions::new(true)? })
    }

    /// Registers memory with all NICs.
    ///
    /// # Safety
    ///
    /// As for [`Memory::register`].
    unsafe fn hold(
        &self,
        tenant: Tenant,
        ptr: NonNull<u8>,
        len: usize,
        remote: bool,
        gpu: Option<&Direct>,
    ) -> Result<Held, RegisterError> {
        let (mut locals, mut remotes) = ([0; MAX_NICS], [0; MAX_NICS]);
        let mut registrations = Vec::with_capacity(self.domains.len());
        let access = Access { remote, received: false, on_demand: self.on_demand };
        for ((domain, ours), theirs) in self.domains.iter().zip(&mut locals).zip(&mut remotes) {
            // SAFETY: the caller's promise; `revoke` and `release` drop the registration in time.
            let device = match unsafe { domain.register(ptr, len, access, gpu) } {
                Ok(made) => {
                    let keys = (made.local_key(), made.remote_key());
                    registrations.push(made);
                    Some(keys)
                }
                // Nothing is written there any more.
                Err(_) if domain.device().is_lost() => None,
                Err(error) => {
                    return Err(match (gpu, &error) {
                        (Some(gpu), VerbsError::NoGpuDirect { .. }) => RegisterError::NotDirect {
                            nics: domain.device().name.clone(),
                            ordinal: gpu.ordinal,
                            why: error.to_string(),
                        },
                        _ => {
                            let source = error.into();
                            RegisterError::Os { call: "ibv_reg_mr", bytes: len, source }
                        }
                    });
                }
            };
            (*ours, *theirs) = keys_on(tenant, device, gpu.map(|gpu| gpu.index));
        }
        let keys = |keys: &[u64; MAX_NICS]| Keys::new(keys.get(..self.domains.len())?);
        let keys = keys(&locals).zip(keys(&remotes));
        let (locals, remotes) = keys.ok_or(RegisterError::TableFull { capacity: MAX_NICS })?;
        Ok((registrations, locals, remotes))
    }

    /// How NICs are given memory that may be a GPU's. `None`: it is the host's.
    fn direct(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Option<Direct>, RegisterError> {
        let Some(known) = self.gpus.0.as_ref() else { return Ok(None) };
        known.direct(ptr, len, rights.remote_write(), "RDMA devices", Ok(()))
    }

    /// `gpu`: how it is reached, if it is a GPU's.
    ///
    /// # Safety
    ///
    /// As for [`Memory::register`].
    unsafe fn insert(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
        (gpu, owned): (Option<Direct>, Option<Owned>),
    ) -> Result<Registered, RegisterError> {
        let remote = rights.remote_write();
        let tenant = self.regions.table().claim()?;
        // Outside the lock: pinning takes its time, and others register meanwhile.
        // SAFETY: the caller's promise.
        let held = unsafe { self.hold(tenant, ptr, len, remote, gpu.as_ref()) };
        let (registrations, locals, remotes) = held.inspect_err(|_| {
            self.regions.table().unclaim(tenant);
        })?;
        let registrations = (!registrations.is_empty()).then_some(registrations);
        self.regions.table().put(tenant, registrations, remote, owned);
        let (base, bytes, generation) = (ptr.as_ptr() as u64, len as u64, tenant.serial());
        let local = LocalMr { base, len: bytes, generation, keys: locals };
        let desc =
            MrDesc { owner: self.engine, base, len: bytes, generation, rights, keys: remotes };
        let place = gpu.map_or(Place::Host, |gpu| Place::Gpu(gpu.ordinal));
        Ok(Registered { ptr, len, local, desc, id: u32::from(tenant.slot()), place })
    }
}

impl Memory for VerbsMemory {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        let mapping = Mapping::new(bytes)?;
        let (base, rights) = (mapping.base(), Rights::REMOTE_WRITE);
        let owned = Owned::Mapped { _mapping: mapping };
        // SAFETY: the mapping lives as long as the region, whose registrations are dropped before.
        unsafe { self.insert(base, bytes, rights, (None, Some(owned))) }
    }

    fn alloc_gpu(&self, ordinal: u32, bytes: usize) -> Result<Registered, RegisterError> {
        let (base, memory, _) = self.gpus.alloc(ordinal, bytes)?;
        let rights = Rights::REMOTE_WRITE;
        let gpu = self.direct(base, bytes, rights)?;
        let owned = Owned::Gpu { _memory: memory };
        // SAFETY: the memory lives as long as the region, whose registrations are dropped before.
        unsafe { self.insert(base, bytes, rights, (gpu, Some(owned))) }
    }

    fn pin(&self, bytes: usize) -> Result<PinnedPage, RegisterError> {
        self.gpus.pin(bytes)
    }

    fn give_back(&self) -> Option<GiveBack> {
        self.gpus.give_back()
    }

    unsafe fn copy_gpu(
        &self,
        region: &Registered,
        offset: usize,
        host: *mut u8,
        len: usize,
        to_host: bool,
    ) -> Result<(), immwire_cuda::Error> {
        // SAFETY: the caller's promise.
        unsafe { self.gpus.copy(region, offset, host, len, to_host) }
    }

    unsafe fn after_stream(&self, ordinal: u32, stream: *mut c_void) -> Result<(), RegisterError> {
        // SAFETY: the caller's promise.
        unsafe { self.gpus.after(ordinal, stream) }
    }

    fn behind(&self, ordinal: u32) -> u64 {
        self.gpus.behind(ordinal)
    }

    fn is_through(&self, ordinal: u32, behind: u64) -> Result<bool, immwire_cuda::Error> {
        self.gpus.is_through(ordinal, behind)
    }

    unsafe fn stream(
        &self,
        ordinal: u32,
        stream: *mut c_void,
    ) -> Result<immwire_cuda::Stream, RegisterError> {
        // SAFETY: the caller's promise.
        unsafe { self.gpus.stream(ordinal, stream) }
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
        let gpu = self.direct(ptr, len, rights)?;
        // SAFETY: the caller's promise.
        unsafe { self.insert(ptr, len, rights, (gpu, None)) }
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
        // SAFETY: the caller's promise.
        unsafe { self.insert(ptr, len, rights, (None, None)) }
    }

    fn revoke(&self, region: &Registered, patience: Duration) -> Result<(), RevokeError> {
        tenant_of(region).map_or(Ok(()), |tenant| self.regions.revoke(tenant, patience))
    }

    fn release(&self, region: Registered) {
        let region = tenant_of(&region).and_then(|tenant| self.regions.release(tenant));
        if let Some(region) = region.filter(Region::owns_gpu_memory) {
            self.gpus.give_back_soon(region);
        }
    }

    fn release_later(&self, region: Registered) {
        let region = tenant_of(&region).and_then(|tenant| self.regions.release(tenant));
        if let Some(region) = region.filter(Region::owns_gpu_memory) {
            self.gpus.give_back_later(region);
        }
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

#[cfg(test)]
mod tests {
    use immwire_core::tenant::{LAST_SERIAL, SLOTS, Withdrawn, device_key};

    use super::*;

    /// Where the device has failed, too: peers may write under each key until the region is withdrawn.
    #[test]
    fn each_key_names_its_registration_whether_the_device_has_failed_or_not() {
        for tenant in [(0, 1), (7, 3), (4095, LAST_SERIAL)] {
            let tenant = Tenant::new(tenant.0, tenant.1).unwrap();
            for device in [None, Some((5, 9)), Some((u32::MAX, u32::MAX))] {
                for home in [None, Some(0), Some(63)] {
                    let (ours, theirs) = keys_on(tenant, device, home);
                    let (local, remote) = device.unwrap_or((0, 0));
                    assert_eq!(split_key(ours), (local, home));
                    assert_eq!((Tenant::of(theirs), device_key(theirs)), (Some(tenant), remote));
                    let mut withdrawn = Withdrawn::new(vec![0; SLOTS]);
                    assert!(withdrawn.allows(theirs));
                    withdrawn.withdraw(tenant);
                    assert!(!withdrawn.allows(theirs));
                }
            }
        }
    }

    #[test]
    fn a_key_says_whose_memory_it_is_and_gives_the_device_s_back() {
        for device in [0, 1, u32::MAX] {
            for home in (0..=63).map(Some).chain([None, Some(u8::MAX)]) {
                assert_eq!(split_key(joined_key(device, home)), (device, home));
            }
        }
    }
}
