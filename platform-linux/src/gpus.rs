//! The GPUs that an engine uses, as all of its threads know them, whatever its transport: opened, their memory told from the
//! host's, and their streams' order kept.
//!
//! A transport of NICs is given a GPU's memory by its DMA-BUF, or where there is none by its address ([`Known::direct`]). Before
//! it tells of what peers have written there, it has the GPUs see it ([`Known::show`]): a load, where none needs that. What it
//! reads there waits for streams of the application's that were to be waited for when it was submitted ([`Known::behind`]).
//!
//! # What it refuses to know
//!
//! How bytes get there: `shm::gpu` copies, NICs read and write.
//!
//! # Invariants
//!
//! - Memory that NICs may write to, and whose GPU does not see what they wrote, is of a GPU that [`Known::show`] flushes, from
//!   before its registration is made.
//! - What NICs read waits for the streams that were named before it was submitted, and for none that is named later: else what a stream
//!   itself waits for could come to wait for that stream.
//! - What GPUs copy themselves waits for the streams that were named before it is enqueued, which may be later: the queues know no more. So
//!   there it can come to that, as `TransferEngine::after_stream` says.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use immwire_cuda::{
    Device, DmaBuf, Error, Event, Found, PinnedMemory, SharedMemory, Shuttle, Stream, Uuid,
    Visibility,
};

use crate::closer::Closer;
use crate::provider::{GiveBack, PinnedPage, Place, RegisterError, Registered};
use crate::sync::lock;

/// The most GPUs that one engine may use: keys have room for so many.
pub(crate) const GPUS_MAX: usize = 64;

/// How long, at the end, for GPUs that are busy with what is not the engine's: the driver takes nothing back meanwhile.
pub(crate) const CLOSED_WITHIN: Duration = Duration::from_secs(5);
/// How long a copy that the application waits for waits itself for a driver that keeps its callers waiting.
const ASKED_WITHIN: Duration = Duration::from_secs(10);
/// How often it is looked whether it still does.
const LOOK_PAUSE: Duration = Duration::from_micros(100);
/// How long for a GPU's memory to be given back.
pub(crate) const FREED_WITHIN: Duration = Duration::from_millis(500);

/// The GPUs of an engine.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) devices: Vec<One>,
    /// A bit for each of them that NICs write to, and that does not see it by itself.
    flushing: AtomicU64,
    /// One of these could not be.
    has_failed: AtomicBool,
    /// Gives back what the driver takes back when they are idle; the same for both sides of an engine that has two.
    pub(crate) closer: Arc<Closer>,
}

/// There are as many bits.
const _: () = assert!(GPUS_MAX <= u64::BITS as usize);

/// One of them.
#[derive(Debug)]
pub(crate) struct One {
    pub(crate) device: Device,
    pub(crate) uuid: Uuid,
    /// For copies that the application waits for.
    shuttle: Mutex<Shuttle>,
    /// Those that the engine's copies are enqueued in; none where NICs move the bytes.
    pub(crate) streams: OnceLock<Vec<Stream>>,
    /// What is waited for, before its memory is read, by those who are in none of its streams: NICs, and warps that stand by.
    /// By number, from 1.
    holds: Mutex<Vec<(u64, Event)>>,
    /// How many of these there have been; and up to which all are over.
    issued: AtomicU64,
    over: AtomicU64,
}

/// Why GPUs cannot be used.
#[derive(Debug)]
pub(crate) enum OpenError {
    /// They are too many, or one is named twice.
    Names,
    /// This one cannot be opened.
    Gpu { ordinal: u32, source: Error },
}

/// How a NIC's driver is given a range of a GPU's memory.
#[derive(Debug)]
pub(crate) struct Direct {
    /// The GPU, by its number in this process, and by its index here.
    pub(crate) ordinal: u32,
    pub(crate) index: u8,
    /// By this; or, as the driver had none, by its address.
    pub(crate) file: Result<DmaBuf, Error>,
}

/// What the driver pins, and hands out, is whole pages of the host's.
pub(crate) fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

impl One {
    fn new(ordinal: u32) -> Result<Self, Error> {
        let device = Device::open(ordinal)?;
        Ok(Self {
            uuid: device.uuid()?,
            shuttle: Mutex::new(Shuttle::new(&device)?),
            device,
            streams: OnceLock::new(),
            holds: Mutex::default(),
            issued: AtomicU64::new(0),
            over: AtomicU64::new(0),
        })
    }

    /// Holds back what is enqueued or submitted from now on until what is in `stream` now is done.
    ///
    /// # Safety
    ///
    /// It is a stream of the GPU's primary context.
    unsafe fn after(&self, stream: *mut c_void) -> Result<(), RegisterError> {
        // SAFETY: our caller's promise; the borrowing ends here.
        let stream = unsafe { Stream::borrow(&self.device, stream) };
        let failed = RegisterError::Gpu;
        // What is behind an event of a graph's is a part of that graph, or can never be asked whether it is over.
        if stream.is_capturing().map_err(failed)? {
            return Err(RegisterError::Capturing);
        }
        let event = Event::new(&self.device).map_err(failed)?;
        event.record(&stream).map_err(failed)?;
        let mut own = self.streams.get().into_iter().flatten();
        own.try_for_each(|own| own.after(&event)).map_err(failed)?;
        let mut holds = lock(&self.holds);
        // Those that are over go: nobody may have looked since.
        let _ = self.look(&mut holds);
        let number = self.issued.load(Ordering::Relaxed) + 1;
        holds.push((number, event));
        // Release: whoever is told to submit after this finds it.
        self.issued.store(number, Ordering::Release);
        Ok(())
    }

    /// Whether anything is held back still, or nobody can say. Two loads where nothing was.
    pub(crate) fn is_held(&self) -> bool {
        // Acquire: who was told to submit by whoever held it back finds that.
        if self.issued.load(Ordering::Acquire) == self.over.load(Ordering::Acquire) {
            return false;
        }
        let mut holds = lock(&self.holds);
        self.look(&mut holds).is_err() || !holds.is_empty()
    }

    /// Forgets holds that are over. An error leaves them: nothing is to be read that may not be there.
    fn look(&self, holds: &mut Vec<(u64, Event)>) -> Result<(), Error> {
        let mut failed = Ok(());
        holds.retain(|(_, event)| match event.is_done() {
            Ok(done) => !done,
            Err(why) => {
                failed = Err(why);
                true
            }
        });
        let issued = self.issued.load(Ordering::Relaxed);
        let over = over(issued, holds.iter().map(|(number, _)| *number));
        self.over.store(over, Ordering::Release);
        failed
    }
}

/// Up to which number all are over, of so many that there have been, of which these are not.
fn over(issued: u64, pending: impl Iterator<Item = u64>) -> u64 {
    pending.min().map_or(issued, |first| first.saturating_sub(1))
}

impl Known {
    /// Opens GPUs, so that each reaches the memory of the others where there is a way. `None`: none are named.
    pub(crate) fn open(ordinals: &[u32]) -> Result<Option<Arc<Self>>, OpenError> {
        Self::beside(ordinals, Arc::new(Closer::new(ordinals)))
    }

    /// The same, for an engine that gives GPUs' things back by this one.
    pub(crate) fn beside(
        ordinals: &[u32],
        closer: Arc<Closer>,
    ) -> Result<Option<Arc<Self>>, OpenError> {
        let twice = |(at, ordinal)| ordinals.iter().take(at).any(|before| before == ordinal);
        if ordinals.len() > GPUS_MAX || ordinals.iter().enumerate().any(twice) {
            return Err(OpenError::Names);
        }
        if ordinals.is_empty() {
            return Ok(None);
        }
        let failed = |ordinal| move |source| OpenError::Gpu { ordinal, source };
        let open = |&ordinal: &u32| One::new(ordinal).map_err(failed(ordinal));
        let devices: Vec<One> = ordinals.iter().map(open).collect::<Result<_, _>>()?;
        for One { device: one, .. } in &devices {
            for One { device: other, .. } in &devices {
                match one.reach(other) {
                    // Then a write from one to the other is refused, when there is one.
                    Ok(()) | Err(Error::NoPeerAccess { .. }) => {}
                    Err(why) => return Err(failed(one.ordinal())(why)),
                }
            }
        }
        let (flushing, has_failed) = (AtomicU64::new(0), AtomicBool::new(false));
        Ok(Some(Arc::new(Self { devices, flushing, has_failed, closer })))
    }

    /// Waits until nothing of these GPUs is being given back, by whichever engine of the process, for `limit` at most: the driver would keep whoever
    /// calls it waiting. `false`: something still is.
    pub(crate) fn is_free_within(&self, limit: Duration) -> bool {
        ends_within(limit, || self.closer.is_busy())
    }

    /// Where each of them is on the PCI bus.
    pub(crate) fn addresses(&self) -> Result<Vec<String>, OpenError> {
        let address = |one: &One| {
            let failed = |source| OpenError::Gpu { ordinal: one.device.ordinal(), source };
            one.device.pci_address().map_err(failed)
        };
        self.devices.iter().map(address).collect()
    }

    /// Any of them, for calls that need one.
    pub(crate) fn first(&self) -> Option<&Device> {
        self.devices.first().map(|one| &one.device)
    }

    /// Whether host memory that is pinned where it lies is at the CPU's address for all of them.
    pub(crate) fn must_use_host_pointers(&self) -> Result<(), Error> {
        self.devices.iter().try_for_each(|one| one.device.must_use_host_pointers())
    }

    /// By its number in this process: its index here, and the GPU.
    pub(crate) fn by_ordinal(&self, ordinal: u32) -> Option<(u8, &One)> {
        let at = self.devices.iter().position(|one| one.device.ordinal() == ordinal)?;
        Some((u8::try_from(at).ok()?, self.devices.get(at)?))
    }

    /// The number, in this process, of the GPU of an index.
    pub(crate) fn ordinal(&self, index: u8) -> Option<u32> {
        self.devices.get(usize::from(index)).map(|one| one.device.ordinal())
    }

    pub(crate) fn by_uuid(&self, uuid: Uuid) -> Option<usize> {
        self.devices.iter().position(|one| one.uuid == uuid)
    }

    /// What a NIC's driver is to be given for `len` bytes from `ptr`, which peers are to write to if `remote`. `None`: it is
    /// host memory. `nics` names those that ask, for people, and `able` says why they take no GPU's, if so.
    pub(crate) fn direct(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        remote: bool,
        nics: &str,
        able: Result<(), &dyn fmt::Display>,
    ) -> Result<Option<Direct>, RegisterError> {
        let (address, bytes) = (ptr.as_ptr() as u64, len as u64);
        let Some(first) = self.first() else { return Ok(None) };
        let owner = immwire_cuda::owner_of(first, address, bytes).map_err(RegisterError::Gpu)?;
        let Some(ordinal) = owner else { return Ok(None) };
        let (index, one) = self.by_ordinal(ordinal).ok_or(RegisterError::NoGpu { ordinal })?;
        let refused = |why: &dyn fmt::Display| {
            Err(RegisterError::NotDirect { nics: nics.into(), ordinal, why: why.to_string() })
        };
        // Before anything of the GPU's is changed for them.
        if let Err(why) = able {
            return refused(why);
        }
        let offers = one.device.direct().map_err(RegisterError::Gpu)?;
        if !offers.reachable {
            return refused(&"CUDA says that this GPU lets no NIC at its memory");
        }
        match offers.visibility() {
            Visibility::Ordered => {}
            Visibility::Never if remote => {
                return refused(&"the GPU may not see what NICs write, and cannot be made to");
            }
            Visibility::Flush if remote => {
                // Release: peers learn of the region after this.
                self.flushing.fetch_or(1 << index, Ordering::Release);
            }
            Visibility::Never | Visibility::Flush => {}
        }
        let file = DmaBuf::new(&one.device, address, bytes, page_bytes());
        if file.is_err()
            && let Err(why) = immwire_cuda::prepare(&one.device, address, bytes)
        {
            return refused(&why);
        }
        Ok(Some(Direct { ordinal, index, file }))
    }

    /// Has GPUs see what peers have written to their memory, as far as the calling thread has heard of it. A load, where all
    /// see it by themselves.
    ///
    /// A GPU that cannot be flushed has failed: what the driver answers then is that its context is gone, and so it does
    /// whoever wants to use the memory. So counts are told all the same.
    #[inline]
    pub(crate) fn show(&self) {
        let which = self.flushing.load(Ordering::Acquire);
        if which != 0 {
            self.flush(which);
        }
    }

    #[cold]
    fn flush(&self, which: u64) {
        for (index, one) in self.devices.iter().enumerate() {
            if which >> index & 1 == 1
                && let Err(why) = one.device.flush_writes()
                && !self.has_failed.swap(true, Ordering::Relaxed)
            {
                tracing::error!(%why, gpu = one.device.ordinal(), "a GPU cannot be flushed");
            }
        }
    }
}

impl Drop for Known {
    /// Waits for what is given back, and for what there is of the GPUs themselves, but not for good.
    fn drop(&mut self) {
        self.closer.give(std::mem::take(&mut self.devices));
        self.closer.end(CLOSED_WITHIN);
    }
}

/// What the driver answered, as a number: of the driver's, or an `errno`.
pub(crate) fn number(why: Error) -> i32 {
    match why {
        Error::Driver { code, .. } => i32::try_from(code.number()).unwrap_or(i32::MAX),
        _ => rustix::io::Errno::IO.raw_os_error(),
    }
}

/// What a registrar does with its engine's GPUs, if there are any.
#[derive(Clone)]
pub(crate) struct Gpus(pub(crate) Option<Arc<Known>>);

impl fmt::Debug for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gpus").field(&self.0.as_ref().map(|known| known.devices.len())).finish()
    }
}

impl Gpus {
    fn one(&self, ordinal: u32) -> Result<&One, RegisterError> {
        let found = self.0.as_ref().and_then(|known| known.by_ordinal(ordinal));
        found.map(|(_, one)| one).ok_or(RegisterError::NoGpu { ordinal })
    }

    /// Zeroed memory of GPU `ordinal`, that other processes can open and NICs be given.
    pub(crate) fn alloc(
        &self,
        ordinal: u32,
        bytes: usize,
    ) -> Result<(NonNull<u8>, SharedMemory, Found), RegisterError> {
        if bytes == 0 {
            return Err(RegisterError::Empty);
        }
        let one = self.one(ordinal)?;
        let zeroed = || SharedMemory::zeroed(&one.device, bytes);
        let owned = zeroed().or_else(|why| match &self.0 {
            // What was let go of may be in its place still.
            Some(known) if known.closer.is_busy() => {
                known.closer.catch_up(FREED_WITHIN);
                zeroed()
            }
            _ => Err(why),
        });
        let owned = owned.map_err(RegisterError::Gpu)?;
        let (start, bytes) = (owned.address(), owned.bytes() as u64);
        let found = Found { ordinal, start, bytes, allocations: 1 };
        // PROOF: no driver gives out address 0.
        let base = NonNull::new(owned.address() as *mut u8).ok_or(RegisterError::Empty)?;
        Ok((base, owned, found))
    }

    /// As [`crate::provider::Memory::pin`].
    pub(crate) fn pin(&self, bytes: usize) -> Result<PinnedPage, RegisterError> {
        let known = self.0.as_ref().ok_or(RegisterError::NoGpus)?;
        let first = known.first().ok_or(RegisterError::NoGpus)?;
        let memory = PinnedMemory::zeroed(first, bytes).map_err(RegisterError::Gpu)?;
        let known = Arc::clone(known);
        Ok(PinnedPage::new(memory, move |memory| known.closer.give(memory)))
    }

    /// As [`crate::provider::Memory::give_back`].
    pub(crate) fn give_back(&self) -> Option<GiveBack> {
        let known = Arc::clone(self.0.as_ref()?);
        Some(Arc::new(move |remains| known.closer.give(remains)))
    }

    /// Has what was a region of a GPU's given back by the closer; waits for nothing.
    pub(crate) fn give_back_later(&self, remains: impl Send + 'static) {
        if let Some(known) = &self.0 {
            known.closer.give(remains);
        }
    }

    /// The same, and there is to be room for the next when it returns, unless the driver keeps everybody waiting.
    pub(crate) fn give_back_soon(&self, remains: impl Send + 'static) {
        if let Some(known) = &self.0 {
            known.closer.give(remains);
            known.closer.catch_up(FREED_WITHIN);
        }
    }

    /// As [`crate::provider::Memory::copy_gpu`].
    ///
    /// # Safety
    ///
    /// As there.
    pub(crate) unsafe fn copy(
        &self,
        region: &Registered,
        offset: usize,
        host: *mut u8,
        len: usize,
        to_host: bool,
    ) -> Result<(), Error> {
        let Place::Gpu(ordinal) = region.place else { return Err(Error::NoDriver) };
        let one = self.one(ordinal).map_err(|_| Error::NoDriver)?;
        // Before the shuttle is locked: who comes later is to wait no longer than this.
        if !ends_within(ASKED_WITHIN, || Closer::is_busy_at(ordinal)) {
            return Err(Error::KeptWaiting { ordinal, after: ASKED_WITHIN });
        }
        let there = region.local.base.saturating_add(offset as u64);
        let mut shuttle = lock(&one.shuttle);
        // SAFETY: the host's range is a slice of that kind, and the GPU's is registered, as is our caller's promise.
        unsafe {
            if to_host {
                shuttle.read(there, std::slice::from_raw_parts_mut(host, len))
            } else {
                shuttle.write(std::slice::from_raw_parts(host, len), there)
            }
        }
    }

    /// As [`crate::provider::Memory::after_stream`].
    ///
    /// # Safety
    ///
    /// As there.
    pub(crate) unsafe fn after(
        &self,
        ordinal: u32,
        stream: *mut c_void,
    ) -> Result<(), RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.one(ordinal)?.after(stream) }
    }

    /// As [`crate::provider::Memory::behind`].
    pub(crate) fn behind(&self, ordinal: u32) -> u64 {
        let Ok(one) = self.one(ordinal) else { return 0 };
        // Acquire, with the release in `after`.
        match one.issued.load(Ordering::Acquire) {
            issued if issued == one.over.load(Ordering::Acquire) => 0,
            issued => issued,
        }
    }

    /// As [`crate::provider::Memory::is_through`].
    pub(crate) fn is_through(&self, ordinal: u32, behind: u64) -> Result<bool, Error> {
        let Ok(one) = self.one(ordinal) else { return Ok(true) };
        let is_over = || one.over.load(Ordering::Acquire) >= behind;
        if is_over() {
            return Ok(true);
        }
        // The driver would not answer before its GPU is idle (`crate::closer`).
        if self.0.as_ref().is_some_and(|known| known.closer.is_busy()) {
            return Ok(false);
        }
        one.look(&mut lock(&one.holds))?;
        Ok(is_over())
    }

    /// As [`crate::provider::Memory::stream`].
    ///
    /// # Safety
    ///
    /// As there.
    pub(crate) unsafe fn stream(
        &self,
        ordinal: u32,
        stream: *mut c_void,
    ) -> Result<Stream, RegisterError> {
        // SAFETY: our caller's promise.
        Ok(unsafe { Stream::borrow(&self.one(ordinal)?.device, stream) })
    }
}

/// Whether something is over within `limit`.
fn ends_within(limit: Duration, goes_on: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while goes_on() {
        if start.elapsed() >= limit {
            return false;
        }
        std::thread::sleep(LOOK_PAUSE);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streams end in every order: what was submitted behind the first of them goes when these are over, and not before, no
    /// matter which others have been named since.
    #[test]
    fn what_waits_for_the_first_streams_waits_for_no_others() {
        for issued in 0..6_u64 {
            for pending in 0..1_u64 << issued {
                let numbers = (1..=issued).filter(|number| pending >> (number - 1) & 1 == 1);
                let over = over(issued, numbers.clone());
                for behind in 0..=issued {
                    let waits = numbers.clone().any(|number| number <= behind);
                    assert_eq!(over >= behind, !waits, "{pending:b} of {issued}, behind {behind}");
                }
            }
        }
    }
}
