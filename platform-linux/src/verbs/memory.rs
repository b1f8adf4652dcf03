//! The regions of one engine on verbs: registered with the protection domain of each NIC.
//!
//! A region's keys name its registration beside what the device needs (`immwire_core::tenant`), so that a peer can be
//! told what not to write to any more. How regions are taken back is `withdrawal`'s. A device keeps everybody out of
//! what was deregistered. But whoever writes there then loses the connection by it; so each peer is told first. One that
//! has gone has lost its queue pairs here with its session, and leaves no ghost.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use immwire_core::id::{EngineId, MAX_NICS};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire_core::tenant::Tenant;

use super::VerbsError;
use super::device::{Domain, Registration};
use crate::provider::{Memory, Place, RegisterError, Registered, RevokeError};
use crate::withdrawal::{Mapping, Regions, tenant_of};

/// One registration for each NIC that was not lost; and the keys for us and for peers, of all NICs.
type Held = (Vec<Registration>, Keys, Keys);

/// The regions of one engine.
#[derive(Debug)]
pub struct VerbsMemory {
    engine: EngineId,
    /// By NIC.
    domains: Vec<Arc<Domain>>,
    pub(super) regions: Regions<Vec<Registration>>,
}

impl VerbsMemory {
    pub(super) fn new(engine: EngineId, domains: Vec<Arc<Domain>>) -> io::Result<Self> {
        Ok(Self { engine, domains, regions: Regions::new(true)? })
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
    ) -> Result<Held, RegisterError> {
        let (mut locals, mut remotes) = ([0; MAX_NICS], [0; MAX_NICS]);
        let mut registrations = Vec::with_capacity(self.domains.len());
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
                    let source = error.into();
                    return Err(RegisterError::Os { call: "ibv_reg_mr", bytes: len, source });
                }
            }
        }
        let keys = |keys: &[u64; MAX_NICS]| Keys::new(keys.get(..self.domains.len())?);
        let keys = keys(&locals).zip(keys(&remotes));
        let (locals, remotes) = keys.ok_or(RegisterError::TableFull { capacity: MAX_NICS })?;
        Ok((registrations, locals, remotes))
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
        let tenant = self.regions.table().claim()?;
        let remote = rights.remote_write();
        // Outside the lock: pinning takes its time, and others register meanwhile.
        // SAFETY: the caller's promise.
        let held = unsafe { self.hold(tenant, ptr, len, remote) };
        let (registrations, locals, remotes) = held.inspect_err(|_| {
            self.regions.table().unclaim(tenant);
        })?;
        let registrations = (!registrations.is_empty()).then_some(registrations);
        self.regions.table().put(tenant, registrations, remote, mapping);
        let (base, bytes, generation) = (ptr.as_ptr() as u64, len as u64, tenant.serial());
        let local = LocalMr { base, len: bytes, generation, keys: locals };
        let desc =
            MrDesc { owner: self.engine, base, len: bytes, generation, rights, keys: remotes };
        Ok(Registered { ptr, len, local, desc, id: u32::from(tenant.slot()), place: Place::Host })
    }
}

impl Memory for VerbsMemory {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        let mapping = Mapping::new(bytes)?;
        // SAFETY: the mapping lives as long as the region, whose registrations are dropped before.
        unsafe { self.insert(mapping.base(), bytes, Rights::REMOTE_WRITE, Some(mapping)) }
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

    fn revoke(&self, region: &Registered, patience: Duration) -> Result<(), RevokeError> {
        tenant_of(region).map_or(Ok(()), |tenant| self.regions.revoke(tenant, patience))
    }

    fn release(&self, region: Registered) {
        tenant_of(&region).into_iter().for_each(|tenant| self.regions.release(tenant));
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
