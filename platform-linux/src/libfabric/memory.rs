//! The regions of one engine on libfabric: registered with the domain of each NIC; where endpoints that are replaced
//! take their domain with them, with the next one's before, under the same keys.
//!
//! A region's keys name its registration beside what the device needs (`immwire_core::tenant`), so that a peer can be
//! told what not to write to any more. How regions are taken back is `withdrawal`'s. A registration must not be closed
//! while a peer may write there: a software provider goes on placing what it has begun to receive, and answers the next
//! write to an unknown key by dropping the whole connection. So a ghost is cut off first, by replacing the endpoints.
//!
//! # Invariants
//!
//! - A region is registered with every domain in use, whenever that was adopted.
//! - The table of descriptors is read by the engine without a lock; an entry is set before the region's key
//!   is known to anybody, and stays until the registration is closed.

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use immwire_core::datagram::Tenants;
use immwire_core::id::{EngineId, MAX_NICS, PeerId};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire_core::tenant::{PART, SLOTS, Tenant, device_key};

use super::LibfabricError;
use super::fabric::{Access, Domain, Facts, Registration};
use crate::gpus::{Direct, Gpus, Known};
use crate::provider::{
    GiveBack, Memory, PinnedPage, Place, RegisterError, Registered, RevokeError,
};
use crate::withdrawal::{Mapping, Owned, Region, Regions, tenant_of};

/// What domains have of a region.
#[derive(Debug)]
pub(super) struct Held {
    /// By NIC and domain.
    registrations: Vec<(usize, Registration)>,
    base: NonNull<u8>,
    len: usize,
    /// For each NIC.
    keys: Keys,
    /// How it is reached, if it is a GPU's.
    gpu: Option<Direct>,
}

// SAFETY: `base` is an address; it is passed to libfabric only, while the region's memory is there.
unsafe impl Send for Held {}

/// What regions are registered with, by NIC: two, while endpoints are replaced.
type Domains = Vec<(usize, Arc<Domain>)>;

/// The regions of one engine.
pub struct LibfabricMemory {
    engine: EngineId,
    nics: usize,
    virtual_addresses: bool,
    own_keys: bool,
    /// What its devices are, for people.
    devices: String,
    pub(super) gpus: Gpus,
    /// They take GPUs' memory.
    device_memory: bool,
    /// By slot and NIC: what an operation on the region needs.
    descs: Box<[AtomicPtr<c_void>]>,
    pub(super) regions: Regions<Held, Domains>,
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
    pub(super) fn new(
        engine: EngineId,
        nics: usize,
        facts: &Facts,
        gpus: Option<Arc<Known>>,
    ) -> io::Result<Self> {
        let entries = if facts.local_descs { SLOTS * nics } else { 0 };
        Ok(Self {
            engine,
            nics,
            virtual_addresses: facts.virtual_addresses,
            own_keys: facts.own_keys,
            devices: format!("libfabric's {}", facts.provider),
            gpus: Gpus(gpus),
            device_memory: facts.device_memory,
            descs: (0..entries).map(|_| AtomicPtr::new(ptr::null_mut())).collect(),
            regions: Regions::new(facts.closing_fences)?,
        })
    }

    /// Registers all regions, and those to come, with a NIC's domain. Takes as long as they are many; on
    /// software providers, about a microsecond each.
    pub(super) fn adopt(&self, nic: usize, domain: &Arc<Domain>) -> Result<(), LibfabricError> {
        let mut table = self.regions.table();
        table.common.push((nic, Arc::clone(domain)));
        let adopted = table.held().try_for_each(|(held, remote)| {
            let key = held.keys.get(u8::try_from(nic).unwrap_or(u8::MAX));
            let Some(key) = key else { return Ok(()) };
            let (access, gpu) = (Access::of(remote), held.gpu.as_ref());
            // SAFETY: the region's memory is there until its registrations are closed, which takes the
            // lock that we hold.
            let made = unsafe { domain.register(held.base, held.len, access, key, gpu) }?;
            held.registrations.push((nic, made));
            Ok(())
        });
        drop(table);
        adopted.inspect_err(|_| self.abandon(domain))
    }

    /// Closes all registrations with a domain that is used no more.
    pub(super) fn abandon(&self, domain: &Arc<Domain>) {
        let mut table = self.regions.table();
        table.common.retain(|(_, other)| !Arc::ptr_eq(other, domain));
        for (held, _) in table.held() {
            held.registrations.retain(|(_, registration)| !registration.is_of(domain));
        }
    }

    /// A session begins. Returns what was withdrawn before, in numbered parts, the last one first.
    pub(super) fn open(&self, token: u64, peer: PeerId) -> Vec<(u8, Tenants)> {
        let gone = self.regions.open(token, peer);
        let parts = (0..).zip(gone.chunks(PART));
        let mut parts: Vec<_> =
            parts.map(|(part, tenants)| (part, tenants.iter().copied().collect())).collect();
        parts.reverse();
        parts
    }

    /// What an operation on `nic` needs to read from the region of `key`; `None` if the key is none. A load.
    #[inline]
    pub(super) fn desc(&self, nic: usize, key: u64) -> Option<*mut c_void> {
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

    /// Registers memory with every domain that there is, and puts the region into its slot.
    ///
    /// One after the other, and outside the lock: a device takes its time, and sessions begin meanwhile. Domains may come and
    /// go, too: those that are there in the end are those that it is registered with.
    ///
    /// # Safety
    ///
    /// As for [`Memory::register`].
    unsafe fn hold(
        &self,
        tenant: Tenant,
        random: u32,
        (base, len): (NonNull<u8>, usize),
        remote: bool,
        (gpu, owned): (Option<Direct>, Option<Owned>),
    ) -> io::Result<Keys> {
        let mut keys = [0; MAX_NICS];
        let mut registrations: Vec<(usize, Registration)> = Vec::new();
        loop {
            let mut table = self.regions.table();
            let with = |made: &Registration, (_, domain): &(usize, Arc<Domain>)| made.is_of(domain);
            let abandoned = registrations
                .extract_if(.., |(_, made)| !table.common.iter().any(|it| with(made, it)))
                .collect::<Vec<_>>();
            let is_new =
                |it: &&(usize, Arc<Domain>)| !registrations.iter().any(|(_, made)| with(made, it));
            let Some((nic, domain)) = table.common.iter().find(is_new).cloned() else {
                let keys = keys.get(..self.nics).and_then(Keys::new);
                let keys = keys.ok_or(io::ErrorKind::InvalidInput)?;
                for (nic, registration) in &registrations {
                    let at = usize::from(tenant.slot()) * self.nics + nic;
                    if let Some(desc) = self.descs.get(at) {
                        desc.store(registration.desc(), Ordering::Release);
                    }
                }
                let held = Held { registrations, base, len, keys, gpu };
                table.put(tenant, Some(held), remote, owned);
                // Before what is to be closed.
                drop(table);
                return Ok(keys);
            };
            drop(table);
            drop(abandoned);
            let (access, wanted) = (Access::of(remote), tenant.key(random));
            // SAFETY: the caller's promise; `revoke` and `release` drop the registration in time.
            let made = unsafe { domain.register(base, len, access, wanted, gpu.as_ref()) }?;
            let key = if self.own_keys {
                // There may be devices with longer keys than EFA's.
                let device = u32::try_from(made.key()).map_err(|_| io::ErrorKind::Unsupported)?;
                tenant.key(device)
            } else {
                made.key()
            };
            if let Some(slot) = keys.get_mut(nic) {
                *slot = key;
            }
            registrations.push((nic, made));
        }
    }

    /// How NICs are given memory that may be a GPU's. `None`: it is the host's.
    fn direct(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Option<Direct>, RegisterError> {
        let Some(known) = self.gpus.0.as_ref() else { return Ok(None) };
        let able: Result<(), &dyn fmt::Display> =
            if self.device_memory { Ok(()) } else { Err(&LibfabricError::HostMemoryOnly) };
        known.direct(ptr, len, rights.remote_write(), &self.devices, able)
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
        let home = gpu.as_ref().map(|gpu| gpu.ordinal);
        let failed = |source: io::Error| match home {
            Some(ordinal) if is_no_way(&source) => {
                let (nics, why) = (self.devices.clone(), source.to_string());
                RegisterError::NotDirect { nics, ordinal, why }
            }
            _ => RegisterError::Os { call: "fi_mr_reg", bytes: len, source },
        };
        let random = random_word().map_err(failed)?;
        let tenant = self.regions.table().claim()?;
        // SAFETY: the caller's promise.
        let keys = unsafe { self.hold(tenant, random, (ptr, len), remote, (gpu, owned)) };
        let keys = keys.map_err(|error| {
            self.regions.table().unclaim(tenant);
            failed(error)
        })?;
        let (address, bytes, generation) = (ptr.as_ptr() as u64, len as u64, tenant.serial());
        let base = if self.virtual_addresses { address } else { 0 };
        let local = LocalMr { base: address, len: bytes, generation, keys };
        let desc = MrDesc { owner: self.engine, base, len: bytes, generation, rights, keys };
        let place = home.map_or(Place::Host, Place::Gpu);
        Ok(Registered { ptr, len, local, desc, id: u32::from(tenant.slot()), place })
    }
}

impl Memory for LibfabricMemory {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        let mapping = Mapping::new(bytes)?;
        let (base, rights) = (mapping.base(), Rights::REMOTE_WRITE);
        let owned = Owned::Mapped { _mapping: mapping };
        // SAFETY: the mapping lives as long as the region, which is closed before.
        unsafe { self.insert(base, bytes, rights, (None, Some(owned))) }
    }

    fn alloc_gpu(&self, ordinal: u32, bytes: usize) -> Result<Registered, RegisterError> {
        let (base, memory, _) = self.gpus.alloc(ordinal, bytes)?;
        let rights = Rights::REMOTE_WRITE;
        let gpu = self.direct(base, bytes, rights)?;
        let owned = Owned::Gpu { _memory: memory };
        // SAFETY: the memory lives as long as the region, which is closed before.
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

    fn counts_from_zero(&self) -> bool {
        !self.virtual_addresses
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

/// Whether a GPU's memory is not registered because there is no way to it, not because something is used up.
fn is_no_way(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<LibfabricError>());
    matches!(inner, Some(LibfabricError::NoWay { .. } | LibfabricError::NoGpuDirect))
}

impl From<LibfabricError> for io::Error {
    fn from(error: LibfabricError) -> Self {
        match error {
            LibfabricError::Call { code, .. } if code < 256 => Self::from_raw_os_error(code),
            error => Self::other(error),
        }
    }
}
