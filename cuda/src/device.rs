//! GPUs, streams and events: what of CUDA is used, each with an owner.
//!
//! Everything happens in a GPU's primary context, the one of the CUDA runtime and of PyTorch: it is retained, its flags
//! are left alone, and it is current only inside of a call. Streams of others can be borrowed.
//!
//! # Invariants
//!
//! 1. A context outlives what was made in it: whoever owns a handle of CUDA's owns a [`Device`] too.
//! 2. No call waits for the GPU, but [`Event::wait`], which takes a deadline, and [`Device::synchronize`], which does not; no graph that is being
//!    captured minds either.

use crate::driver::{self, Aside, Current, check, cu};
use crate::error::Error;
use crate::geometry::Gpu;
use crate::share::Uuid;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A GPU, and a share in its primary context. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Device(Arc<Primary>);

#[derive(Debug)]
struct Primary {
    ordinal: u32,
    device: cu::CUdevice,
    context: cu::CUcontext,
    gpu: Gpu,
    host_atomics: bool,
    host_pointers: bool,
}

// SAFETY: a context may be used by any thread, and by several at once (CUDA driver API, "Context Management"); the
// handle is only ever passed to the driver.
unsafe impl Send for Primary {}
// SAFETY: as above.
unsafe impl Sync for Primary {}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: gives back the one retention of `Device::open`; whatever was made in the context owns an `Arc` of
        // this, and so is gone. At the end of a process the driver may be gone too: its refusal changes nothing.
        let _ = unsafe { cu::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Device {
    /// How many GPUs there are here; zero is an answer too, if a driver is installed.
    ///
    /// # Errors
    ///
    /// [`Error::NoDriver`], [`Error::DriverLacks`], or the driver's own.
    pub fn count() -> Result<u32, Error> {
        match driver::load() {
            Err(Error::NoDevice { .. }) => return Ok(0),
            loaded => loaded?,
        }
        let mut count = 0;
        // SAFETY: writes the one number that it is given the place of.
        check("cuDeviceGetCount", unsafe { cu::cuDeviceGetCount(&raw mut count) })?;
        Ok(count.unsigned_abs())
    }

    /// Opens GPU `ordinal`, as `CUDA_VISIBLE_DEVICES` numbers them.
    ///
    /// The first opening in a process makes the context, which takes a tenth of a second and some memory of the GPU;
    /// where PyTorch or the CUDA runtime has made it, it is that one.
    ///
    /// # Errors
    ///
    /// No driver, no such GPU, or what the driver answers.
    pub fn open(ordinal: u32) -> Result<Self, Error> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let device = device_at(ordinal)?;
        use cu::CUdevice_attribute as A;
        let capability = (
            attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let sms = attribute(device, A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_bytes =
            attribute(device, A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let host_atomics =
            attribute(device, A::CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED)? != 0;
        let host_pointers =
            attribute(device, A::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)? != 0;
        let _aside = Aside::step()?;
        let mut context = ptr::null_mut();
        // SAFETY: the device is one; writes the one handle. Given back by `Primary::drop`.
        let retained = unsafe { cu::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check("cuDevicePrimaryCtxRetain", retained)?;
        let gpu = Gpu { capability, sms, shared_bytes };
        let primary = Primary { ordinal, device, context, gpu, host_atomics, host_pointers };
        Ok(Self(Arc::new(primary)))
    }

    /// Opens the GPU of this process that has that name. `None`: it sees none. Others are not opened.
    ///
    /// # Errors
    ///
    /// As for [`Device::open`].
    pub fn named(uuid: Uuid) -> Result<Option<Self>, Error> {
        for ordinal in 0..Self::count()? {
            if uuid_of(device_at(ordinal)?)? == uuid {
                return Self::open(ordinal).map(Some);
            }
        }
        Ok(None)
    }

    /// Which GPU this is, as it was opened.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Its compute capability, number of SMs, and what a block may have of shared memory.
    #[must_use]
    pub fn gpu(&self) -> Gpu {
        self.0.gpu
    }

    /// Whether its atomics on host memory are atomic for the CPU as well. Over PCIe they mostly are not.
    #[must_use]
    pub fn host_atomics(&self) -> bool {
        self.0.host_atomics
    }

    /// Whether host memory that is pinned where it lies ([`crate::Pinned`]) is at the CPU's address for it, too.
    ///
    /// # Errors
    ///
    /// [`Error::NoHostPointers`]: it is not (CUDA driver API, `cuMemHostRegister`).
    pub fn must_use_host_pointers(&self) -> Result<(), Error> {
        let ordinal = self.ordinal();
        if self.0.host_pointers { Ok(()) } else { Err(Error::NoHostPointers { ordinal }) }
    }

    /// Its product name.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn name(&self) -> Result<String, Error> {
        self.text("cuDeviceGetName", |at, len, device| {
            // SAFETY: writes at most `len` bytes, with a terminating zero, to where it is given; so does the one below.
            unsafe { cu::cuDeviceGetName(at, len, device) }
        })
    }

    /// Its address on the PCI bus, `domain:bus:device.function`.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn pci_address(&self) -> Result<String, Error> {
        self.text("cuDeviceGetPCIBusId", |at, len, device| {
            // SAFETY: as in `name`.
            unsafe { cu::cuDeviceGetPCIBusId(at, len, device) }
        })
    }

    /// What names it in every process.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn uuid(&self) -> Result<Uuid, Error> {
        uuid_of(self.0.device)
    }

    /// Whether memory of [`crate::SharedMemory`] may be made for NICs to reach.
    pub(crate) fn nics_reach_shared(&self) -> Result<bool, Error> {
        use cu::CUdevice_attribute as A;
        let which = A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        Ok(attribute(self.0.device, which)? != 0)
    }

    fn text(
        &self,
        call: &'static str,
        get: impl Fn(*mut c_char, c_int, cu::CUdevice) -> cu::CUresult,
    ) -> Result<String, Error> {
        let mut buffer = [0u8; 128];
        check(call, get(buffer.as_mut_ptr().cast(), 128, self.0.device))?;
        let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    /// Lets this GPU's kernels and copies reach memory of `peer`. Nothing changes if they could.
    ///
    /// # Errors
    ///
    /// [`Error::NoPeerAccess`] if there is no way between the two, or what the driver answers.
    pub fn reach(&self, peer: &Device) -> Result<(), Error> {
        if self.0.device == peer.0.device {
            return Ok(());
        }
        let mut can = 0;
        // SAFETY: writes the one number that it is given the place of.
        let asked =
            unsafe { cu::cuDeviceCanAccessPeer(&raw mut can, self.0.device, peer.0.device) };
        check("cuDeviceCanAccessPeer", asked)?;
        if can == 0 {
            return Err(Error::NoPeerAccess { from: self.ordinal(), to: peer.ordinal() });
        }
        let _current = self.enter()?;
        // SAFETY: both contexts are alive, and this one is current.
        match unsafe { cu::cuCtxEnablePeerAccess(peer.0.context, 0) } {
            cu::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            answer => check("cuCtxEnablePeerAccess", answer),
        }
    }

    /// Waits until all that was given to the GPU's primary context is done, whoever gave it, by graphs too: as long as that takes. No graph
    /// that any thread captures minds. Meanwhile the driver keeps other threads waiting that launch, copy, allocate or record events on this GPU; not
    /// those that ask, wait, or have a stream write a word.
    ///
    /// It takes a page of the host's memory and gives it back, which waits for that much (an H200, driver 580.159.04; `benches/gpu` checks it
    /// wherever it runs). `cuCtxSynchronize` is documented to, but loses every capture that is under way, and then does not wait (errors 901 and 900).
    ///
    /// # Errors
    ///
    /// What the driver answers: that the GPU has failed, too.
    pub fn synchronize(&self) -> Result<(), Error> {
        const PAGE: usize = 4096;
        let _current = self.enter()?;
        let mut page = ptr::null_mut();
        // SAFETY: the context is current; writes the one address. What was taken is freed once, and nobody else knows of it.
        unsafe {
            check(
                "cuMemHostAlloc",
                cu::cuMemHostAlloc(&raw mut page, PAGE, cu::CU_MEMHOSTALLOC_PORTABLE),
            )?;
            check("cuMemFreeHost", cu::cuMemFreeHost(page))
        }
    }

    /// The primary context, a `CUcontext`, for calls of CUDA's that this crate does not make. Valid while this lives.
    #[must_use]
    pub fn context(&self) -> *mut c_void {
        self.0.context.cast()
    }

    pub(crate) fn number(&self) -> cu::CUdevice {
        self.0.device
    }

    /// Makes the context current until the guard goes, and has captures of graphs not mind what is called meanwhile.
    pub(crate) fn enter(&self) -> Result<Current, Error> {
        // SAFETY: the context is alive while `self` is, and callers keep the guard no longer.
        unsafe { Current::enter(self.0.context) }
    }

    pub(crate) fn must_be(&self, other: &Device) -> Result<(), Error> {
        if self.0.device == other.0.device {
            return Ok(());
        }
        Err(Error::WrongDevice { belongs_to: self.ordinal(), used_with: other.ordinal() })
    }
}

/// The GPU of this number, of which there is one.
fn device_at(ordinal: u32) -> Result<cu::CUdevice, Error> {
    let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    let mut device = 0;
    // SAFETY: writes the one handle that it is given the place of.
    check("cuDeviceGet", unsafe { cu::cuDeviceGet(&raw mut device, number) })?;
    Ok(device)
}

fn uuid_of(device: cu::CUdevice) -> Result<Uuid, Error> {
    let mut uuid = cu::CUuuid { bytes: [0; 16] };
    // SAFETY: writes the one structure.
    let asked = unsafe { cu::cuDeviceGetUuid_v2(&raw mut uuid, device) };
    check("cuDeviceGetUuid", asked)?;
    Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
}

pub(crate) fn attribute(device: cu::CUdevice, which: cu::CUdevice_attribute) -> Result<u32, Error> {
    let mut value = 0;
    // SAFETY: writes the one number that it is given the place of.
    let asked = unsafe { cu::cuDeviceGetAttribute(&raw mut value, which, device) };
    check("cuDeviceGetAttribute", asked)?;
    Ok(value.unsigned_abs())
}

/// A queue of work of one GPU, done in order. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Stream(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    device: Device,
    raw: cu::CUstream,
    owned: bool,
}

// SAFETY: a stream may be used by any thread, and by several at once; the handle is only ever passed to the driver.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl Drop for Queue {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made by `Stream::new`, and nobody has the handle any more. Work that is enqueued goes on, and the
            // driver frees the stream after it.
            let _ = unsafe { cu::cuStreamDestroy_v2(self.raw) };
        }
    }
}

impl Stream {
    /// Makes a stream that the default stream does not wait for.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn new(device: &Device) -> Result<Self, Error> {
        let _current = device.enter()?;
        let mut raw = ptr::null_mut();
        let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes the one handle; a context is current.
        check("cuStreamCreate", unsafe { cu::cuStreamCreate(&raw mut raw, flags) })?;
        Ok(Self(Arc::new(Queue { device: device.clone(), raw, owned: true })))
    }

    /// Uses a stream of somebody else: a `CUstream` or `cudaStream_t`; null is the default stream.
    ///
    /// # Safety
    ///
    /// It belongs to `device`'s primary context, and is not destroyed while this, or a clone, or what was made with one,
    /// lives.
    #[must_use]
    pub unsafe fn borrow(device: &Device, raw: *mut c_void) -> Self {
        Self(Arc::new(Queue { device: device.clone(), raw: raw.cast(), owned: false }))
    }

    /// The GPU.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The `CUstream`. Valid while this lives.
    #[must_use]
    pub fn raw(&self) -> *mut c_void {
        self.0.raw.cast()
    }

    pub(crate) fn handle(&self) -> cu::CUstream {
        self.0.raw
    }

    /// Whether all that was enqueued is done.
    ///
    /// # Errors
    ///
    /// What the driver answers: of a launch that failed, or of the context that failed with one.
    pub fn is_done(&self) -> Result<bool, Error> {
        let _current = self.device().enter()?;
        // SAFETY: the stream is alive.
        match unsafe { cu::cuStreamQuery(self.0.raw) } {
            cu::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => check("cuStreamQuery", answer).map(|()| true),
        }
    }

    /// Whether what is enqueued now is not done, but made a part of a CUDA graph.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn is_capturing(&self) -> Result<bool, Error> {
        use cu::CUstreamCaptureStatus as Status;
        let _current = self.device().enter()?;
        let mut status = Status::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; writes the one number.
        let answer = unsafe { cu::cuStreamIsCapturing(self.0.raw, &raw mut status) };
        check("cuStreamIsCapturing", answer)?;
        Ok(status != Status::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Holds back what is enqueued from now on until `event` has been recorded. Waits for nothing itself.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn after(&self, event: &Event) -> Result<(), Error> {
        let _current = self.device().enter()?;
        // SAFETY: both are alive.
        check("cuStreamWaitEvent", unsafe { cu::cuStreamWaitEvent(self.0.raw, event.raw, 0) })
    }

    /// Holds back what is enqueued from now on until the word at `address` has reached `value`: until the cyclic
    /// difference `word - value`, as a signed number, is not negative. Waits for nothing itself, and takes no SM.
    ///
    /// What was written before the word was released is seen by what follows in the stream.
    ///
    /// # Safety
    ///
    /// `address` is a `u64` in memory of this GPU, or pinned host memory, until the wait is over.
    ///
    /// # Errors
    ///
    /// [`Error::Misaligned`], or what the driver answers: it may refuse for lack of the feature.
    pub unsafe fn after_word(&self, address: u64, value: u64) -> Result<(), Error> {
        if !address.is_multiple_of(8) {
            return Err(Error::Misaligned { what: "word", address, multiple: 8 });
        }
        let _current = self.device().enter()?;
        let until = cu::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the stream is alive; the word is our caller's promise.
        let answer = unsafe { cu::cuStreamWaitValue64_v2(self.0.raw, address, value, until) };
        check("cuStreamWaitValue64", answer)
    }
}

/// A mark in a stream: done when everything before it is.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: cu::CUevent,
}

// SAFETY: an event may be used by any thread, and by several at once; the handle is only ever passed to the driver.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: made by `Event::new`, and nobody has the handle any more; the driver keeps what is still enqueued.
            let _ = unsafe { cu::cuEventDestroy_v2(self.raw) };
        }
    }
}

impl Event {
    /// Makes an event, done until it is recorded.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn new(device: &Device) -> Result<Self, Error> {
        let _current = device.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: writes the one handle; a context is current.
        check("cuEventCreate", unsafe { cu::cuEventCreate(&raw mut raw, 0) })?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Marks what has been enqueued in `stream` until now; an earlier mark is forgotten.
    ///
    /// # Errors
    ///
    /// [`Error::WrongDevice`], or what the driver answers.
    pub fn record(&self, stream: &Stream) -> Result<(), Error> {
        self.device.must_be(stream.device())?;
        let _current = self.device.enter()?;
        // SAFETY: both are alive, and of one context.
        check("cuEventRecord", unsafe { cu::cuEventRecord(self.raw, stream.handle()) })
    }

    /// Whether everything before the mark is done.
    ///
    /// # Errors
    ///
    /// What the driver answers, of a launch before the mark too.
    pub fn is_done(&self) -> Result<bool, Error> {
        let _current = self.device.enter()?;
        // SAFETY: the event is alive.
        match unsafe { cu::cuEventQuery(self.raw) } {
            cu::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => check("cuEventQuery", answer).map(|()| true),
        }
    }

    /// Waits until everything before the mark is done, for `limit` at most. Spins, then yields.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`], or as [`Event::is_done`].
    pub fn wait(&self, limit: Duration) -> Result<(), Error> {
        const SPIN: Duration = Duration::from_millis(1);
        let started = Instant::now();
        while !self.is_done()? {
            let waited = started.elapsed();
            if waited >= limit {
                return Err(Error::TimedOut { after: limit });
            }
            if waited > SPIN {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// The GPU's time from `earlier` to this, both of which are done; half a microsecond fine.
    ///
    /// # Errors
    ///
    /// What the driver answers: one of the two is not done.
    pub fn since(&self, earlier: &Event) -> Result<Duration, Error> {
        let _current = self.device.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive; writes the one number.
        let asked =
            unsafe { cu::cuEventElapsedTime_v2(&raw mut milliseconds, earlier.raw, self.raw) };
        check("cuEventElapsedTime", asked)?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }
}
