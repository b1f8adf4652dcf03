//! Regions that both sides know: registered with each, under one name.
//!
//! # Invariants
//!
//! - A region has the near side's name and generation, and a key of the near side's before those of the far one, so that
//!   the near part of it follows from the whole; of the far part, the rest is in `far_names`.
//! - Of the two sides the one that has made a region's memory registers it first, and releases it last. The far side makes mailboxes
//!   for peers on other hosts, which may have more behind them; all else is the near side's, or the application's.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use immwire_core::id::PeerId;
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire_core::span::{self, Side};
use immwire_core::wire::NetAddr;

use crate::provider::{
    GiveBack, Memory, PinnedPage, Place, RegisterError, Registered, RevokeError, Window,
};
use crate::sync::lock;

/// What of a far registration does not follow from the whole.
#[derive(Debug, Clone, Copy)]
pub(super) struct FarName {
    id: u32,
    generation: u32,
    /// The memory is the far side's.
    made: bool,
}

/// The registrars of both sides as one. See the [module](super).
#[derive(Debug)]
pub struct SpanMemory<N, F> {
    near: Arc<N>,
    far: Arc<F>,
    /// The engine's.
    address: NetAddr,
    /// By the near side's names.
    pub(super) far_names: Mutex<BTreeMap<u32, FarName>>,
}

fn keys(keys: &Keys, which: impl FnOnce(&[u64]) -> Option<&[u64]>) -> Option<Keys> {
    Keys::new(which(keys.as_slice())?)
}

fn joined(near: &Keys, far: &Keys) -> Option<Keys> {
    let mut all = heapless::Vec::<u64, { immwire_core::id::MAX_NICS }>::new();
    all.extend_from_slice(near.as_slice()).ok()?;
    all.extend_from_slice(far.as_slice()).ok()?;
    Keys::new(&all)
}

/// The part of a region that has these of its keys.
fn part(
    region: &Registered,
    name: FarName,
    which: fn(&[u64]) -> Option<&[u64]>,
) -> Option<Registered> {
    let FarName { id, generation, .. } = name;
    let (local, desc) = (region.local, region.desc);
    Some(Registered {
        ptr: region.ptr,
        len: region.len,
        local: LocalMr { generation, keys: keys(&local.keys, which)?, ..local },
        desc: MrDesc { generation, keys: keys(&desc.keys, which)?, ..desc },
        id,
        place: region.place,
    })
}

impl<N: Memory, F: Memory> SpanMemory<N, F> {
    pub(super) fn new(near: Arc<N>, far: Arc<F>, address: NetAddr) -> Self {
        Self { near, far, address, far_names: Mutex::default() }
    }

    /// As the near side knows it.
    fn near_of(region: &Registered) -> Option<Registered> {
        let name = FarName { id: region.id, generation: region.local.generation, made: false };
        part(region, name, |keys| keys.get(..1))
    }

    /// As the far side does, if it knows it; and whether it has made it.
    fn far_of(&self, region: &Registered) -> Option<(Registered, bool)> {
        let name = lock(&self.far_names).get(&region.id).copied()?;
        Some((part(region, name, |keys| keys.get(1..))?, name.made))
    }

    /// Registers with the far side what the near one has registered; a GPU's memory, if it can be.
    fn add_far(&self, near: Registered) -> Result<Registered, RegisterError> {
        // SAFETY: the near side has it mapped, or our caller has promised that it is, until it is revoked: by
        // `Self::revoke`, which revokes it here too, before it says `Ok`; and `Self::release` releases it here first.
        let far = unsafe { self.far.register(near.ptr, near.len, near.desc.rights) };
        let far = match far {
            Ok(far) => far,
            Err(error @ RegisterError::NotDirect { .. }) if near.place != Place::Host => {
                tracing::warn!(%error, "peers on other hosts cannot write to a region, nor it to them");
                return Ok(near);
            }
            Err(error) => {
                self.undo(near);
                return Err(error);
            }
        };
        self.join(near, far, false)
    }

    /// The same of memory that is the CPU's and NICs' alone.
    fn add_far_host(&self, near: Registered) -> Result<Registered, RegisterError> {
        // SAFETY: as in `Self::add_far`.
        match unsafe { self.far.register_host(near.ptr, near.len, near.desc.rights) } {
            Ok(far) => self.join(near, far, false),
            Err(error) => {
                self.undo(near);
                Err(error)
            }
        }
    }

    /// What both sides have registered, under one name; `made` by the far one.
    fn join(
        &self,
        near: Registered,
        far: Registered,
        made: bool,
    ) -> Result<Registered, RegisterError> {
        let local = joined(&near.local.keys, &far.local.keys);
        let desc = joined(&near.desc.keys, &far.desc.keys);
        // The core makes no engine of more NICs than there can be keys.
        let (Some(local), Some(desc)) = (local, desc) else {
            if made {
                self.undo(near);
                undo(&*self.far, far);
            } else {
                undo(&*self.far, far);
                self.undo(near);
            }
            return Err(RegisterError::TableFull { capacity: immwire_core::id::MAX_NICS });
        };
        let name = FarName { id: far.id, generation: far.local.generation, made };
        lock(&self.far_names).insert(near.id, name);
        Ok(Registered {
            local: LocalMr { keys: local, ..near.local },
            desc: MrDesc { keys: desc, ..near.desc },
            ..near
        })
    }

    fn undo(&self, near: Registered) {
        undo(&*self.near, near);
    }

    /// Has both sides release a region: `of_near` and `of_far` are how.
    fn release_by(
        &self,
        region: &Registered,
        of_near: impl Fn(&N, Registered),
        of_far: impl Fn(&F, Registered),
    ) {
        let (near, far) = (Self::near_of(region), self.far_of(region));
        // Before the near side gives the name away again.
        lock(&self.far_names).remove(&region.id);
        match (near, far) {
            (Some(near), Some((far, true))) => {
                of_near(&self.near, near);
                of_far(&self.far, far);
            }
            (near, far) => {
                far.into_iter().for_each(|(far, _)| of_far(&self.far, far));
                near.into_iter().for_each(|near| of_near(&self.near, near));
            }
        }
    }
}

/// Gives back what nobody was told of.
fn undo<M: Memory>(memory: &M, region: Registered) {
    if memory.revoke(&region, Duration::ZERO).is_ok() {
        memory.release(region);
    }
}

impl<N: Memory, F: Memory> Memory for SpanMemory<N, F> {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        self.add_far(self.near.alloc(bytes)?)
    }

    fn alloc_host(&self, bytes: usize) -> Result<Registered, RegisterError> {
        self.add_far_host(self.near.alloc_host(bytes)?)
    }

    /// Of the side's that leads to the peer.
    fn alloc_mailbox(&self, bytes: usize, peer: &NetAddr) -> Result<Registered, RegisterError> {
        if span::towards(&self.address, peer) != Some(Side::Far) {
            return self.add_far_host(self.near.alloc_mailbox(bytes, peer)?);
        }
        let far = self.far.alloc_mailbox(bytes, peer)?;
        // SAFETY: the far side has it mapped until it is revoked and released, which `Self::revoke` and `Self::release_by` have the near one do
        // before.
        match unsafe { self.near.register_host(far.ptr, far.len, far.desc.rights) } {
            Ok(near) => self.join(near, far, true),
            Err(error) => {
                undo(&*self.far, far);
                Err(error)
            }
        }
    }

    fn alloc_gpu(&self, ordinal: u32, bytes: usize) -> Result<Registered, RegisterError> {
        self.add_far(self.near.alloc_gpu(ordinal, bytes)?)
    }

    fn pin(&self, bytes: usize) -> Result<PinnedPage, RegisterError> {
        self.near.pin(bytes)
    }

    fn give_back(&self) -> Option<GiveBack> {
        self.near.give_back()
    }

    unsafe fn copy_gpu(
        &self,
        region: &Registered,
        offset: usize,
        host: *mut u8,
        len: usize,
        to_host: bool,
    ) -> Result<(), immwire_cuda::Error> {
        let near = Self::near_of(region).ok_or(immwire_cuda::Error::NoDriver)?;
        // SAFETY: our caller's promises, of the same range.
        unsafe { self.near.copy_gpu(&near, offset, host, len, to_host) }
    }

    unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Registered, RegisterError> {
        // SAFETY: our caller's promise.
        self.add_far(unsafe { self.near.register(ptr, len, rights) }?)
    }

    unsafe fn register_host(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Registered, RegisterError> {
        // SAFETY: our caller's promise.
        self.add_far_host(unsafe { self.near.register_host(ptr, len, rights) }?)
    }

    unsafe fn after_stream(&self, ordinal: u32, stream: *mut c_void) -> Result<(), RegisterError> {
        // SAFETY: our caller's promise.
        unsafe {
            self.near.after_stream(ordinal, stream)?;
            self.far.after_stream(ordinal, stream)
        }
    }

    /// The near side copies by streams, which wait by themselves.
    fn behind(&self, ordinal: u32) -> u64 {
        self.far.behind(ordinal)
    }

    fn is_through(&self, ordinal: u32, behind: u64) -> Result<bool, immwire_cuda::Error> {
        self.far.is_through(ordinal, behind)
    }

    unsafe fn stream(
        &self,
        ordinal: u32,
        stream: *mut c_void,
    ) -> Result<immwire_cuda::Stream, RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.near.stream(ordinal, stream) }
    }

    fn counts_from_zero(&self) -> bool {
        self.far.counts_from_zero()
    }

    /// The near side's key comes first in either end's descriptors.
    fn window(&self, peer: PeerId, dst: &MrDesc, ordinal: u32) -> Option<Window> {
        self.near.window(peer, dst, ordinal)
    }

    /// Asked of the near side; NICs of the far one say by themselves whether they take any.
    fn takes_runs(&self, src: &LocalMr, dst: &MrDesc) -> bool {
        self.near.takes_runs(src, dst)
    }

    fn revoke(&self, region: &Registered, patience: Duration) -> Result<(), RevokeError> {
        let (start, far) = (Instant::now(), self.far_of(region).map(|(far, _)| far));
        if let Some(far) = &far {
            // So that far peers are told at once, too; whether they write no more is asked below.
            let _ = self.far.revoke(far, Duration::ZERO);
        }
        if let Some(near) = Self::near_of(region) {
            self.near.revoke(&near, patience)?;
        }
        match &far {
            Some(far) => self.far.revoke(far, patience.saturating_sub(start.elapsed())),
            None => Ok(()),
        }
    }

    fn release(&self, region: Registered) {
        self.release_by(&region, N::release, F::release);
    }

    fn release_later(&self, region: Registered) {
        self.release_by(&region, N::release_later, F::release_later);
    }
}
