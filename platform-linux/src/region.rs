//! Memory that an engine reads from and that peers may write to.
//!
//! A [`Region`] is a handle to a registration, or to a part of one. The registration goes when the
//! last handle goes; a transfer under way holds one. Registering a range that lies inside a live
//! registration costs a look-up and yields another handle to it.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, TryLockError, Weak};
use std::time::{Duration, Instant};

use immwire_core::id::PeerId;
use immwire_core::region::{LocalMr, MrDesc, RegionError, Rights};
use immwire_core::wire::NetAddr;

use crate::provider::{
    GiveBack, Memory, PinnedPage, Place, RegisterError, Registered, RevokeError, Window,
};
use crate::sync::{AtomicBool, Counted, Mutex, Ordering, Uncounted, lock, yield_now};

/// A range of registered memory. Cloning it is cheap.
#[derive(Clone)]
pub struct Region {
    registration: Counted<Registration>,
    offset: u64,
    len: u64,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("ptr", &self.as_ptr()).field("len", &self.len).finish()
    }
}

impl Region {
    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// A region has at least one byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whose memory it is.
    #[must_use]
    pub fn place(&self) -> Place {
        self.registration.registered.place
    }

    /// The first byte. Peers may write there at any time, and handles by [`Region::write`]: follow it with that in mind; and not at all if it
    /// is in a GPU ([`Region::place`]).
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        let base = self.registration.registered.ptr.as_ptr();
        base.wrapping_add(usize::try_from(self.offset).unwrap_or(usize::MAX))
    }

    /// What a peer needs to write here.
    #[must_use]
    pub fn desc(&self) -> MrDesc {
        let whole = self.registration.registered.desc;
        MrDesc { base: whole.base.saturating_add(self.offset), len: self.len, ..whole }
    }

    /// As a source, in the core's terms.
    pub(crate) fn local(&self) -> LocalMr {
        let whole = self.registration.registered.local;
        LocalMr { base: whole.base.saturating_add(self.offset), len: self.len, ..whole }
    }

    /// The same of part of it, without a copy: the registration, and where in it the part begins. `None`: it is not all
    /// inside.
    #[inline]
    pub(crate) fn part(&self, offset: u64, len: u64) -> Option<(&LocalMr, u64)> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then_some((&self.registration.registered.local, self.offset.saturating_add(offset)))
    }

    /// Part of this region, with a descriptor of its own. Peers still may write to the whole.
    ///
    /// # Errors
    ///
    /// [`RegionError::OutOfBounds`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<Self, RegionError> {
        self.local().range(offset, len)?;
        Ok(Self {
            registration: Counted::clone(&self.registration),
            offset: self.offset.saturating_add(offset),
            len,
        })
    }

    /// Copies bytes out. What a peer is writing at the same time comes torn. Out of a GPU's memory it takes some hundred
    /// microseconds at least.
    ///
    /// Where the driver keeps its callers waiting for ten seconds, nothing is copied ([`immwire_cuda::Error::KeptWaiting`]).
    /// A copy that a GPU does not come to is given up after ten seconds, [`immwire_cuda::Error::TimedOut`]. It may use the region
    /// later, though not `bytes`: the region stays registered for good, and [`Region::close`] says that it is in use.
    ///
    /// # Errors
    ///
    /// [`AccessError`]; if [`AccessError::Region`], nothing was copied.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), AccessError> {
        let from = self.at(offset, bytes.len())?;
        if self.place() != Place::Host {
            return self.copy_gpu(offset, bytes.as_mut_ptr(), bytes.len(), true);
        }
        // SAFETY: for `copy`:
        // - `from` is valid for `bytes.len()` bytes: `at` checked the range against the registration, and it is mapped now: what
        //   `alloc` has made stays so while `self` lives; of other memory `register`'s caller promised that nobody calls this otherwise;
        // - `bytes` is an exclusive slice of ours; it is no part of the region, by the same promise, and `copy` would allow that it were;
        // - another process may be writing the source: no reference is formed to it, and bytes have no
        //   invalid values, so the worst is a torn copy, as documented.
        unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Whether [`Region::write`] may write `len` bytes there. Nothing is copied.
    ///
    /// # Errors
    ///
    /// [`AccessError::Region`], [`AccessError::ReadOnly`].
    pub fn check_write(&self, offset: u64, len: usize) -> Result<(), AccessError> {
        let to = self.at(offset, len)?;
        let may = self.place() != Place::Host || self.registration.may_write(to.addr(), len);
        if may { Ok(()) } else { Err(AccessError::ReadOnly) }
    }

    /// Copies bytes in; into a GPU's memory as slowly as [`Region::read`] out of it, and given up as that is. Of the host's memory that
    /// was registered for no peer to write to, the kernel is asked whether this process may, until it has said so of all of it.
    ///
    /// # Errors
    ///
    /// [`AccessError`]; if [`AccessError::Region`] or [`AccessError::ReadOnly`], nothing was copied.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let to = self.at(offset, bytes.len())?;
        if self.place() != Place::Host {
            return self.copy_gpu(offset, bytes.as_ptr().cast_mut(), bytes.len(), false);
        }
        self.check_write(offset, bytes.len())?;
        // SAFETY: as in `read`, with the roles exchanged; the region's bytes may be written, by `alloc`
        // or by the promise of `register`'s caller.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// As [`Memory::behind`], of the GPU whose memory it is; 0 for the host's.
    #[inline]
    pub(crate) fn behind(&self) -> u64 {
        match self.place() {
            Place::Host => 0,
            Place::Gpu(ordinal) => self.registration.memory.behind(ordinal),
        }
    }

    /// As [`Memory::is_through`].
    pub(crate) fn is_through(&self, behind: u64) -> Result<bool, immwire_cuda::Error> {
        match self.place() {
            Place::Host => Ok(true),
            Place::Gpu(ordinal) => self.registration.memory.is_through(ordinal, behind),
        }
    }

    /// Whether it is registered with the engine of that registry, whose devices know it, and who keeps it for as long as they may read it.
    #[inline]
    pub(crate) fn is_of(&self, registry: *const Registry) -> bool {
        self.registration.registry.as_ptr() == registry
    }

    /// Whether pages from here to there may be handed over in runs.
    pub(crate) fn takes_runs(&self, dst: &MrDesc) -> bool {
        self.registration.memory.takes_runs(&self.local(), dst)
    }

    fn copy_gpu(
        &self,
        offset: u64,
        host: *mut u8,
        len: usize,
        to_host: bool,
    ) -> Result<(), AccessError> {
        let registration = &self.registration;
        let at = usize::try_from(self.offset.saturating_add(offset)).unwrap_or(usize::MAX);
        // SAFETY: `at` checked the range, which lies in the registration that `self` keeps, and that is kept below if the copy is late;
        // the host's is a slice of our caller's, written only if it is to be.
        let copied = unsafe {
            registration.memory.copy_gpu(&registration.registered, at, host, len, to_host)
        };
        if matches!(copied, Err(immwire_cuda::Error::TimedOut { .. })) {
            std::mem::forget(Counted::clone(registration));
        }
        copied.map_err(AccessError::Gpu)
    }

    /// Withdraws the region from peers, and forgets it: afterwards nobody writes there any more.
    ///
    /// Dropping does the same later, in the background, and cannot say when. On libfabric and libibverbs, and where memory is
    /// staged, the engine must be polled meanwhile: if that is done by this very thread, use `Driver::close_region`.
    ///
    /// Host memory that an engine with GPUs has pinned is unpinned before this returns, for which the driver takes as long as the GPU is
    /// busy, whatever `patience` is: until then it may not be freed. So it is when the engine has ended before, too.
    ///
    /// It stays pinned if another region of this process, of whichever engine, overlaps it: all of it does, until that is closed, too. What none has
    /// any more may be freed, but is not registered again before ([`immwire_cuda::Error::LeftBehind`]).
    ///
    /// # Errors
    ///
    /// [`CloseError`] gives the region back: other handles or transfers use it, or a peer was still
    /// writing after `patience`. The memory must stay valid.
    pub fn close(self, patience: Duration) -> Result<(), CloseError> {
        let mut registration = match sole(self.registration, patience) {
            Ok(registration) => registration,
            Err(registration) => {
                let region = Self { registration, ..self };
                return Err(CloseError::InUse { region });
            }
        };
        match registration.memory.revoke(&registration.registered, patience) {
            // Dropping it releases it.
            Ok(()) => {
                registration.at_once = true;
                Ok(())
            }
            Err(error) => {
                registration.is_withdrawn = true;
                let registration = Counted::new(registration);
                if let Some(registry) = registration.registry.upgrade() {
                    registry.remember(&registration);
                }
                let region = Self { registration, ..self };
                Err(CloseError::StillWriting { region, error })
            }
        }
    }

    fn at(&self, offset: u64, len: usize) -> Result<*mut u8, RegionError> {
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        self.local().range(offset, len)?;
        Ok(self.as_ptr().wrapping_add(usize::try_from(offset).unwrap_or(usize::MAX)))
    }
}

/// Why bytes of a region could not be copied.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// They are not all inside.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// They are not this process's to write: it has mapped the memory to read it.
    #[error("the region's memory is mapped to be read only")]
    ReadOnly,
    /// They are in a GPU's memory, and this is what the driver answered.
    #[error("a GPU's memory cannot be copied: {0}")]
    Gpu(immwire_cuda::Error),
}

/// Why a region could not be closed.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    /// Another handle exists, or a transfer under way holds one.
    #[error("the region is in use by another handle or by a transfer under way")]
    InUse {
        /// The region, for another try.
        region: Region,
    },
    /// A peer was writing.
    #[error("{error}")]
    StillWriting {
        /// The region, for another try.
        region: Region,
        /// Who.
        error: RevokeError,
    },
}

/// The registration, if no other handle has it. Who looks at it because the engine ends is waited for, up to `patience`.
fn sole(
    registration: Counted<Registration>,
    patience: Duration,
) -> Result<Registration, Counted<Registration>> {
    let shared = match Counted::try_unwrap(registration) {
        Ok(sole) => return Ok(sole),
        Err(shared) => shared,
    };
    let Some(registry) = shared.registry.upgrade() else { return Err(shared) };
    let start = Instant::now();
    loop {
        match registry.looks.try_lock() {
            Err(TryLockError::WouldBlock) if start.elapsed() < patience => {
                yield_now();
            }
            Err(TryLockError::WouldBlock) => return Err(shared),
            nobody_looks => {
                let sole = Counted::try_unwrap(shared);
                drop(nobody_looks);
                return sole;
            }
        }
    }
}

struct Registration {
    /// Taken only by `drop`.
    registered: std::mem::ManuallyDrop<Registered>,
    /// It is withdrawn, and whoever drops it waits until it is forgotten: it is being closed. Others may be the engine's thread, which
    /// waits for no GPU.
    at_once: bool,
    /// Peers are refused, though one that had begun to write may not have ended: it is not handed out any more.
    is_withdrawn: bool,
    /// The kernel was asked, and this process may write to all of it.
    is_writable: AtomicBool,
    memory: Arc<dyn Memory>,
    registry: Weak<Registry>,
}

impl Registration {
    /// Whether this process may write `len` bytes at `address`, which are in it, as far as can be known. Of what peers may write to nobody is asked.
    fn may_write(&self, address: usize, len: usize) -> bool {
        let whole = self.registered.desc;
        // Relaxed: it says nothing of other memory, and whoever misses it asks again.
        if len == 0 || whole.rights.remote_write() || self.is_writable.load(Ordering::Relaxed) {
            return true;
        }
        let base = self.registered.ptr.addr().get();
        let is_writable = !is_read_only(base, self.registered.len);
        self.is_writable.store(is_writable, Ordering::Relaxed);
        is_writable || !is_read_only(address, len)
    }
}

/// Whether a mapping of these bytes is known not to be written to. O(mappings of the process).
fn is_read_only(address: usize, len: usize) -> bool {
    // Names of files are whatever bytes they are.
    let Ok(maps) = std::fs::read("/proc/self/maps") else { return false };
    let end = address.saturating_add(len);
    maps.split(|byte| *byte == b'\n')
        .any(|line| holds_read_only(&String::from_utf8_lossy(line), address, end).unwrap_or(false))
}

/// Whether a line of `/proc/self/maps` tells of a mapping that has some of these bytes, and is not to be written to.
fn holds_read_only(line: &str, address: usize, end: usize) -> Option<bool> {
    let (range, rest) = line.split_once(' ')?;
    let (from, to) = range.split_once('-')?;
    let number = |digits| usize::from_str_radix(digits, 16).ok();
    let overlaps = number(from)? < end && address < number(to)?;
    Some(overlaps && !rest.get(..4)?.contains('w'))
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: `drop` runs once, and nothing uses the field after it.
        let registered = unsafe { std::mem::ManuallyDrop::take(&mut self.registered) };
        if self.at_once {
            // Not asked once more: whoever would write, and finds that it may not, looks for a moment as if it did.
            return self.memory.release(registered);
        }
        match self.memory.revoke(&registered, Duration::ZERO) {
            Ok(()) => self.memory.release_later(registered),
            Err(error) => {
                tracing::debug!(%error, "a dropped region is withdrawn later");
                if let Some(registry) = self.registry.upgrade() {
                    lock(&registry.lingering).push(registered);
                }
            }
        }
    }
}

/// A registration, and what tells whether a range is part of it: who looks for another one does not hold it meanwhile, be it
/// that its owner is closing it.
struct Known {
    registration: Uncounted<Registration>,
    len: u64,
    rights: Rights,
    is_withdrawn: bool,
}

/// The registrations of one engine, off the data path.
pub(crate) struct Registry {
    memory: Arc<dyn Memory>,
    /// By first byte, then by the provider's name: several may start at the same byte.
    ranges: Mutex<BTreeMap<(u64, u32), Known>>,
    /// Taken by who looks at registrations that are others': while nobody does, each handle is a user's.
    looks: Mutex<()>,
    /// Dropped while a peer was still writing.
    lingering: Mutex<Vec<Registered>>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}

impl Registry {
    pub(crate) fn new(memory: Arc<dyn Memory>) -> Arc<Self> {
        let (ranges, lingering) = (Mutex::new(BTreeMap::new()), Mutex::new(Vec::new()));
        Arc::new(Self { memory, ranges, looks: Mutex::new(()), lingering })
    }

    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize) -> Result<Region, RegisterError> {
        let registered = self.memory.alloc(bytes)?;
        let registration = self.adopt(registered);
        self.remember(&registration);
        Ok(Region::whole(registration))
    }

    /// As [`Memory::alloc_host`].
    pub(crate) fn alloc_host(self: &Arc<Self>, bytes: usize) -> Result<Region, RegisterError> {
        let registered = self.memory.alloc_host(bytes)?;
        let registration = self.adopt(registered);
        self.remember(&registration);
        Ok(Region::whole(registration))
    }

    /// As [`Memory::alloc_mailbox`].
    pub(crate) fn alloc_mailbox(
        self: &Arc<Self>,
        bytes: usize,
        peer: &NetAddr,
    ) -> Result<Region, RegisterError> {
        let registered = self.memory.alloc_mailbox(bytes, peer)?;
        let registration = self.adopt(registered);
        self.remember(&registration);
        Ok(Region::whole(registration))
    }

    pub(crate) fn alloc_gpu(
        self: &Arc<Self>,
        ordinal: u32,
        bytes: usize,
    ) -> Result<Region, RegisterError> {
        let registered = self.memory.alloc_gpu(ordinal, bytes)?;
        let registration = self.adopt(registered);
        self.remember(&registration);
        Ok(Region::whole(registration))
    }

    /// As [`Memory::pin`].
    pub(crate) fn pin(&self, bytes: usize) -> Result<PinnedPage, RegisterError> {
        self.memory.pin(bytes)
    }

    /// As [`Memory::give_back`].
    pub(crate) fn give_back(&self) -> Option<GiveBack> {
        self.memory.give_back()
    }

    /// As [`Memory::window`].
    pub(crate) fn window(&self, peer: PeerId, dst: &MrDesc, ordinal: u32) -> Option<Window> {
        self.memory.window(peer, dst, ordinal)
    }

    /// # Safety
    ///
    /// As [`Memory::stream`].
    pub(crate) unsafe fn stream(
        &self,
        ordinal: u32,
        stream: *mut c_void,
    ) -> Result<immwire_cuda::Stream, RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.memory.stream(ordinal, stream) }
    }

    /// # Safety
    ///
    /// As [`Memory::after_stream`].
    pub(crate) unsafe fn after_stream(
        &self,
        ordinal: u32,
        stream: *mut c_void,
    ) -> Result<(), RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.memory.after_stream(ordinal, stream) }
    }

    /// # Safety
    ///
    /// As [`Memory::register`].
    pub(crate) unsafe fn register(
        self: &Arc<Self>,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Region, RegisterError> {
        let base = ptr.addr().get() as u64;
        let bytes = len as u64;
        let part = |start: u64, known: &Known| {
            // The address here: what peers use may count from elsewhere.
            let offset = base.saturating_sub(start);
            let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= known.len);
            if len == 0 || !is_inside || known.rights != rights || known.is_withdrawn {
                return None;
            }
            Region::whole(known.registration.upgrade()?).slice(offset, bytes).ok()
        };
        let ranges = lock(&self.ranges);
        // Not only the nearest: a small region may lie before the range inside the large one around it.
        let mut before = ranges.range(..=(base, u32::MAX)).rev();
        if let Some(part) = before.find_map(|((start, _), known)| part(*start, known)) {
            return Ok(part);
        }
        drop(ranges);
        // SAFETY: our caller's promise.
        let registered = unsafe { self.memory.register(ptr, len, rights) }?;
        let registration = self.adopt(registered);
        self.remember(&registration);
        Ok(Region::whole(registration))
    }

    fn remember(&self, registration: &Counted<Registration>) {
        let mut ranges = lock(&self.ranges);
        // Those that are gone are cleared out whenever the number has doubled: a share of O(1) for each.
        if ranges.len().is_power_of_two() {
            ranges.retain(|_, known| known.registration.strong_count() > 0);
        }
        let Registered { local, desc, id, .. } = &*registration.registered;
        let known = Known {
            registration: Counted::downgrade(registration),
            len: desc.len,
            rights: desc.rights,
            is_withdrawn: registration.is_withdrawn,
        };
        ranges.insert((local.base, *id), known);
    }

    fn adopt(self: &Arc<Self>, registered: Registered) -> Counted<Registration> {
        Counted::new(Registration {
            registered: std::mem::ManuallyDrop::new(registered),
            at_once: false,
            is_withdrawn: false,
            is_writable: AtomicBool::new(false),
            memory: Arc::clone(&self.memory),
            registry: Arc::downgrade(self),
        })
    }

    /// Withdraws everything from peers, at the engine's end; returns how many regions are still being
    /// written to after `patience`, all told. `go_on` is called again and again meanwhile: some transports
    /// have to hear from peers, or to be rid of them, first.
    pub(crate) fn withdraw_all(&self, patience: Duration, mut go_on: impl FnMut()) -> usize {
        let ranges = std::mem::take(&mut *lock(&self.ranges));
        let deadline = Instant::now().checked_add(patience);
        let mut live: Vec<_> = ranges.into_values().map(|known| known.registration).collect();
        let is_written_to =
            |registered: &Registered| self.memory.revoke(registered, Duration::ZERO).is_err();
        loop {
            // Held for the look alone: its owner may be closing it, and waits for whoever writes, not for us.
            live.retain(|live| {
                let _looks = lock(&self.looks);
                live.upgrade().is_some_and(|live| is_written_to(&live.registered))
            });
            // Those that were dropped are their owners' to free once the engine has stopped.
            self.sweep();
            let left = live.len() + lock(&self.lingering).len();
            if left == 0 || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return left;
            }
            go_on();
        }
    }

    /// Tries again to withdraw what was dropped too early. Cheap when there is nothing.
    pub(crate) fn sweep(&self) {
        let Ok(mut lingering) = self.lingering.try_lock() else { return };
        for registered in std::mem::take(&mut *lingering) {
            match self.memory.revoke(&registered, Duration::ZERO) {
                Ok(()) => self.memory.release_later(registered),
                Err(_) => lingering.push(registered),
            }
        }
    }
}

impl Region {
    fn whole(registration: Counted<Registration>) -> Self {
        let len = registration.registered.desc.len;
        Self { registration, offset: 0, len }
    }
}

#[cfg(test)]
#[cfg(not(loom))] // The models have their own.
mod tests {
    use super::*;
    use immwire_core::id::{EngineId, PeerId};
    use immwire_core::region::Keys;

    /// Registers anything, and is told who is still being written to.
    #[derive(Default)]
    struct Fake {
        next: Mutex<u32>,
        written_to: Mutex<Vec<u32>>,
        revoked: Mutex<Vec<u32>>,
        released: Mutex<Vec<u32>>,
        /// Somebody is being told, and stays until he may go on.
        stays: AtomicBool,
        inside: AtomicBool,
        /// From the second look on.
        then_written_to: AtomicBool,
    }

    impl Memory for Fake {
        fn alloc(&self, _bytes: usize) -> Result<Registered, RegisterError> {
            Err(RegisterError::Empty)
        }

        unsafe fn register(
            &self,
            ptr: NonNull<u8>,
            len: usize,
            rights: Rights,
        ) -> Result<Registered, RegisterError> {
            let mut next = lock(&self.next);
            *next += 1;
            let (generation, keys) = (*next, Keys::new(&[0]).unwrap());
            let (base, bytes) = (ptr.addr().get() as u64, len as u64);
            let owner = EngineId(1);
            let desc = MrDesc { owner, base, len: bytes, generation, rights, keys };
            let local = LocalMr { base, len: bytes, generation, keys };
            Ok(Registered { ptr, len, local, desc, id: generation, place: Place::Host })
        }

        fn revoke(&self, region: &Registered, _patience: Duration) -> Result<(), RevokeError> {
            self.inside.store(true, Ordering::Relaxed);
            while self.stays.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            if lock(&self.written_to).contains(&region.id) {
                return Err(RevokeError { peer: PeerId { index: 0, generation: 0 } });
            }
            lock(&self.revoked).push(region.id);
            if self.then_written_to.load(Ordering::Relaxed) {
                lock(&self.written_to).push(region.id);
            }
            Ok(())
        }

        fn release(&self, region: Registered) {
            lock(&self.released).push(region.id);
        }
    }

    fn registry() -> (Arc<Fake>, Arc<Registry>) {
        let fake = Arc::new(Fake::default());
        let registry = Registry::new(Arc::<Fake>::clone(&fake));
        (fake, registry)
    }

    /// Nothing follows the address.
    fn register(registry: &Arc<Registry>, base: usize, len: usize) -> Region {
        let ptr = NonNull::without_provenance(base.try_into().unwrap());
        // SAFETY: the fake registrar hands the range to no peer, and the tests do not follow it.
        unsafe { registry.register(ptr, len, Rights::REMOTE_WRITE) }.unwrap()
    }

    #[test]
    fn mappings_are_found_by_their_bytes() {
        let line = "7f0a00001000-7f0a00003000 r--p 00000000 08:01 1234    /some file";
        let (from, end) = (0x7f0a_0000_1000, 0x7f0a_0000_3000);
        for (at, to, is) in [
            (from - 1, from, false),
            (from - 1, from + 1, true),
            (from, end, true),
            (end - 1, end + 1, true),
            (end, end + 1, false),
        ] {
            assert_eq!(holds_read_only(line, at, to), Some(is), "{at:#x} to {to:#x}");
            let writable = line.replace("r--p", "rw-s");
            assert_eq!(holds_read_only(&writable, at, to), Some(false));
        }
        for garbage in
            ["", "a", "a-b", "-1 rw-p", "7f0a00001000-7f0a00003000 r", "a-é \u{e9}\u{e9}\u{e9}"]
        {
            assert_eq!(holds_read_only(garbage, 0, usize::MAX), None, "{garbage}");
        }
    }

    #[test]
    fn a_range_inside_any_registered_one_is_found() {
        // Registered in this order: nested, from one byte, overlapping. All stay alive.
        let first = [(1000, 100), (1010, 10), (1010, 200), (1050, 5), (1000, 30)];
        for base in 1000..1220 {
            for len in [1, 5, 6, 30, 31, 100, 200] {
                let (fake, registry) = registry();
                let live: Vec<Region> =
                    first.iter().map(|&(base, len)| register(&registry, base, len)).collect();
                let before = *lock(&fake.next);
                let inside = first.iter().any(|&(b, l)| base >= b && base + len <= b + l);
                let region = register(&registry, base, len);
                assert_eq!((region.desc().base, region.len()), (base as u64, len as u64));
                assert_eq!(*lock(&fake.next) == before, inside, "{base} {len}");
                drop(live);
            }
        }
    }

    #[test]
    fn the_engines_end_withdraws_every_registration() {
        let (fake, registry) = registry();
        // From one byte; dropped while written to; closed in vain.
        let (small, large) = (register(&registry, 4096, 10), register(&registry, 4096, 20));
        let (dropped, closed) = (register(&registry, 8192, 10), register(&registry, 12288, 10));
        lock(&fake.written_to).extend([3, 4]);
        drop(dropped);
        let Err(CloseError::StillWriting { region, .. }) = closed.close(Duration::ZERO) else {
            panic!("closed while written to")
        };
        assert_eq!(registry.withdraw_all(Duration::ZERO, || ()), 2);
        lock(&fake.written_to).clear();
        registry.sweep();
        let mut revoked = std::mem::take(&mut *lock(&fake.revoked));
        revoked.sort_unstable();
        assert_eq!(revoked, [1, 2, 3]);
        assert_eq!(*lock(&fake.released), [3]);
        drop((small, large, region));
    }

    /// While the engine ends, too, whoever closes a region hears who writes there.
    #[test]
    fn at_the_engines_end_a_region_in_use_names_its_writer() {
        let (fake, registry) = registry();
        lock(&fake.written_to).push(1);
        let mut region = Some(register(&registry, 4096, 100));
        let left = registry.withdraw_all(Duration::from_secs(60), || {
            match region.take().map(|region| region.close(Duration::ZERO)) {
                Some(Err(CloseError::StillWriting { region: back, .. })) => region = Some(back),
                Some(Err(CloseError::InUse { .. })) => panic!("nobody else has it"),
                Some(Ok(())) => panic!("closed while written to"),
                None => {}
            }
            lock(&fake.written_to).clear();
        });
        assert_eq!(left, 0);
        assert!(region.expect("it was given back").close(Duration::ZERO).is_ok());
    }

    /// It may take long to withdraw a region, and the engine's end is no other use of it.
    #[test]
    fn at_the_engines_end_a_region_that_is_looked_at_can_be_closed() {
        let (fake, registry) = registry();
        let region = register(&registry, 4096, 100);
        fake.stays.store(true, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let ends = scope.spawn(|| registry.withdraw_all(Duration::from_secs(60), || ()));
            while !fake.inside.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            let Err(CloseError::InUse { region }) = region.close(Duration::from_millis(10)) else {
                panic!("closed while it was looked at")
            };
            let closes = scope.spawn(|| region.close(Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(20));
            fake.stays.store(false, Ordering::Relaxed);
            assert!(closes.join().unwrap().is_ok());
            assert_eq!(ends.join().unwrap(), 0);
        });
        assert_eq!(*lock(&fake.released), [1]);
    }

    /// A peer that would write, and may not, looks for a moment as if it did: that is too late to keep what is closed.
    #[test]
    fn what_was_closed_is_released() {
        let (fake, registry) = registry();
        fake.then_written_to.store(true, Ordering::Relaxed);
        assert!(register(&registry, 4096, 10).close(Duration::ZERO).is_ok());
        assert_eq!(*lock(&fake.released), [1]);
    }

    /// Peers are refused there for good, so whoever registers the range again needs another registration.
    #[test]
    fn what_was_closed_in_vain_is_not_handed_out() {
        let (fake, registry) = registry();
        lock(&fake.written_to).push(1);
        let Err(CloseError::StillWriting { region, .. }) =
            register(&registry, 4096, 100).close(Duration::ZERO)
        else {
            panic!("closed while written to")
        };
        let again = register(&registry, 4096, 100);
        let part = register(&registry, 4100, 10);
        assert_eq!((region.desc().generation, again.desc().generation), (1, 2));
        assert_eq!(part.desc().generation, 2);
        drop((again, part));
        assert_eq!(*lock(&fake.released), [2]);
        // For another try, or the engine's end.
        assert_eq!(registry.withdraw_all(Duration::ZERO, || ()), 1);
        lock(&fake.written_to).clear();
        assert!(region.close(Duration::ZERO).is_ok());
        assert_eq!(*lock(&fake.released), [2, 1]);
    }

    /// Somebody else looks for a registration while one that it is no part of is closed.
    #[test]
    fn who_looks_holds_nothing_else() {
        let (_fake, registry) = registry();
        let closed = register(&registry, 4096, 10);
        let busy = std::sync::atomic::AtomicBool::new(true);
        std::thread::scope(|scope| {
            let looks = || {
                while busy.load(std::sync::atomic::Ordering::Relaxed) {
                    drop(register(&registry, 8192, 10));
                }
            };
            let looks = scope.spawn(looks);
            let mut closed = Some(closed);
            let mut refused = 0;
            for at in 0..2000 {
                let region = closed.take().unwrap_or_else(|| register(&registry, 4096 + at, 10));
                refused += u32::from(region.close(Duration::ZERO).is_err());
            }
            busy.store(false, std::sync::atomic::Ordering::Relaxed);
            looks.join().unwrap();
            assert_eq!(refused, 0);
        });
    }

    /// Peers may be in the middle of a write for longer than the engine's end waits for them: closing says when that is over.
    #[test]
    fn after_the_engines_end_a_region_tells_whether_it_is_written_to() {
        let (fake, registry) = registry();
        let region = register(&registry, 4096, 100);
        lock(&fake.written_to).push(1);
        assert_eq!(registry.withdraw_all(Duration::ZERO, || ()), 1);
        drop(registry);
        let Err(CloseError::StillWriting { region, .. }) = region.close(Duration::ZERO) else {
            panic!("closed while written to")
        };
        lock(&fake.written_to).clear();
        assert!(region.close(Duration::ZERO).is_ok());
        assert_eq!(*lock(&fake.released), [1]);
    }

    #[test]
    fn the_engines_end_releases_what_was_dropped_too_early() {
        let (fake, registry) = registry();
        lock(&fake.written_to).push(1);
        drop(register(&registry, 4096, 10));
        lock(&fake.written_to).clear();
        assert_eq!(registry.withdraw_all(Duration::ZERO, || ()), 0);
        assert_eq!(*lock(&fake.released), [1]);
    }
}
