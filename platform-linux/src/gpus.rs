//! The GPUs that an engine uses, as all of its threads know them, whatever its transport: opened, their memory told from the
//! host's, and their streams' order kept.
//!
//! A transport of NICs is given a GPU's memory by its DMA-BUF, or where there is none by its address ([`Known::direct`]). Before
//! it tells of what peers have written there, it has the GPUs see it ([`Known::show`]): a load, where none needs that. What it
//! reads there waits for streams of the application's, if that was asked for ([`Known::is_held`]): a load, where nothing is.
//!
//! # What it refuses to know
//!
//! How bytes get there: `shm::gpu` copies, NICs read and write.
//!
//! # Invariants
//!
//! - Memory that NICs may write to, and whose GPU does not see what they wrote, is of a GPU that [`Known::show`] flushes, from
//!   before its registration is made.
//! - A hold ends when its event has, in whatever order they do, or with the GPU.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use immwire_cuda::{
    Device, DmaBuf, Error, Event, Found, PinnedMemory, SharedMemory, Shuttle, Stream, Uuid,
    Visibility,
};

use crate::provider::{Place, RegisterError, Registered};
use crate::sync::lock;

/// The most GPUs that one engine may use: keys have room for so many.
pub(crate) const GPUS_MAX: usize = 64;

/// The GPUs of an engine.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) devices: Vec<One>,
    /// Some of them are to be flushed.
    flushing: AtomicBool,
}

/// One of them.
#[derive(Debug)]
pub(crate) struct One {
    pub(crate) device: Device,
    pub(crate) uuid: Uuid,
    /// For copies that the application waits for.
    shuttle: Mutex<Shuttle>,
    /// Those that the engine's copies are enqueued in; none where NICs move the bytes.
    pub(crate) streams: OnceLock<Vec<Stream>>,
    /// NICs write to its memory, and it does not see it by itself.
    flushed: AtomicBool,
    /// What NICs wait for before they read its memory; and how many there are.
    holds: Mutex<Vec<Event>>,
    held: AtomicU32,
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

impl One {
    fn new(ordinal: u32) -> Result<Self, Error> {
        let device = Device::open(ordinal)?;
        Ok(Self {
            uuid: device.uuid()?,
            shuttle: Mutex::new(Shuttle::new(&device)?),
            device,
            streams: OnceLock::new(),
            flushed: AtomicBool::new(false),
            holds: Mutex::default(),
            held: AtomicU32::new(0),
        })
    }

    /// Holds back what is enqueued or posted from now on until what is in `stream` now is done.
    ///
    /// # Safety
    ///
    /// It is a stream of the GPU's primary context.
    unsafe fn after(&self, stream: *mut c_void) -> Result<(), Error> {
        // SAFETY: our caller's promise; the borrowing ends here.
        let stream = unsafe { Stream::borrow(&self.device, stream) };
        let event = Event::new(&self.device)?;
        event.record(&stream)?;
        if let Some(streams) = self.streams.get() {
            // The event may go: the driver keeps what is waited for.
            return streams.iter().try_for_each(|own| own.after(&event));
        }
        let mut holds = lock(&self.holds);
        // Those that are over go: nobody may have looked since. One that fails says so when it is looked at.
        holds.retain(|event| !event.is_done().unwrap_or(false));
        holds.push(event);
        // Release: whoever is told to post after this finds it.
        self.held.store(u32::try_from(holds.len()).unwrap_or(u32::MAX), Ordering::Release);
        Ok(())
    }

    /// Whether NICs are to leave its memory alone for now.
    #[cold]
    fn look_at_holds(&self) -> Result<bool, Error> {
        // Whoever has it adds another one.
        let Ok(mut holds) = self.holds.try_lock() else { return Ok(true) };
        let mut failed = None;
        holds.retain(|event| match event.is_done() {
            Ok(done) => !done,
            Err(why) => {
                failed = Some(why);
                false
            }
        });
        self.held.store(u32::try_from(holds.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
        failed.map_or(Ok(!holds.is_empty()), Err)
    }
}

impl Known {
    /// Opens GPUs, so that each reaches the memory of the others where there is a way. `None`: none are named.
    pub(crate) fn open(ordinals: &[u32]) -> Result<Option<Arc<Self>>, OpenError> {
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
        Ok(Some(Arc::new(Self { devices, flushing: AtomicBool::new(false) })))
    }

    /// Any of them, for calls that need one.
    pub(crate) fn first(&self) -> Option<&Device> {
        self.devices.first().map(|one| &one.device)
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
    /// host memory. `nics` names those that ask, for people.
    pub(crate) fn direct(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        remote: bool,
        nics: &str,
    ) -> Result<Option<Direct>, RegisterError> {
        let (address, bytes) = (ptr.as_ptr() as u64, len as u64);
        let Some(first) = self.first() else { return Ok(None) };
        let owner = immwire_cuda::owner_of(first, address, bytes).map_err(RegisterError::Gpu)?;
        let Some(ordinal) = owner else { return Ok(None) };
        let (index, one) = self.by_ordinal(ordinal).ok_or(RegisterError::NoGpu { ordinal })?;
        let offers = one.device.direct().map_err(RegisterError::Gpu)?;
        let refused = |why: &str| {
            Err(RegisterError::NotDirect { nics: nics.into(), ordinal, why: why.into() })
        };
        if !offers.reachable {
            return refused("CUDA says that this GPU lets no NIC at its memory");
        }
        match offers.visibility() {
            Visibility::Ordered => {}
            Visibility::Never if remote => {
                return refused("the GPU may not see what NICs write, and cannot be made to");
            }
            Visibility::Flush if remote => {
                one.flushed.store(true, Ordering::Relaxed);
                // Release: whoever sees it sees which. Peers learn of the region after this.
                self.flushing.store(true, Ordering::Release);
            }
            Visibility::Never | Visibility::Flush => {}
        }
        let page = rustix::param::page_size() as u64;
        let file = DmaBuf::new(&one.device, address, bytes, page);
        if file.is_err() {
            immwire_cuda::prepare(&one.device, address, bytes).map_err(RegisterError::Gpu)?;
        }
        Ok(Some(Direct { ordinal, index, file }))
    }

    /// Has GPUs see what peers have written to their memory, as far as the calling thread has heard of it. A load, where all
    /// see it by themselves.
    #[inline]
    pub(crate) fn show(&self) {
        if self.flushing.load(Ordering::Acquire) {
            self.flush();
        }
    }

    #[cold]
    fn flush(&self) {
        for one in self.devices.iter().filter(|one| one.flushed.load(Ordering::Relaxed)) {
            // A GPU that cannot has failed. Whoever uses its memory is told so by every call of CUDA's.
            if let Err(why) = one.device.flush_writes() {
                tracing::error!(%why, gpu = one.device.ordinal(), "a GPU cannot be flushed");
            }
        }
    }

    /// Whether NICs are not to read the memory of the GPU of this index now: a stream of the application's has not come as far
    /// as was asked for. A load, where nothing was.
    ///
    /// # Errors
    ///
    /// The driver's: the GPU has failed.
    #[inline]
    pub(crate) fn is_held(&self, index: u8) -> Result<bool, Error> {
        match self.devices.get(usize::from(index)) {
            // Acquire, with the release in `after`.
            Some(one) if one.held.load(Ordering::Acquire) > 0 => one.look_at_holds(),
            _ => Ok(false),
        }
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
        let owned = SharedMemory::zeroed(&one.device, bytes).map_err(RegisterError::Gpu)?;
        let found = Found { ordinal, start: owned.address(), bytes: owned.bytes() as u64 };
        // PROOF: no driver gives out address 0.
        let base = NonNull::new(owned.address() as *mut u8).ok_or(RegisterError::Empty)?;
        Ok((base, owned, found))
    }

    /// As [`crate::provider::Memory::pin`].
    pub(crate) fn pin(&self, bytes: usize) -> Result<PinnedMemory, RegisterError> {
        let first = self.0.as_ref().and_then(|known| known.first()).ok_or(RegisterError::NoGpus)?;
        PinnedMemory::zeroed(first, bytes).map_err(RegisterError::Gpu)
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
        let (there, here) = (region.local.base.saturating_add(offset as u64), host as u64);
        let (from, to) = if to_host { (there, here) } else { (here, there) };
        // SAFETY: our caller's promise.
        unsafe { lock(&one.shuttle).copy(from, to, len) }
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
        unsafe { self.one(ordinal)?.after(stream) }.map_err(RegisterError::Gpu)
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
