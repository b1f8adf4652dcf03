//! GPU memory that other processes of this host reach: what is known of an address, how its allocation is handed over, and
//! how one that was handed over is opened.
//!
//! | allocated by | handed over as |
//! |---|---|
//! | `cuMemCreate` with file descriptors allowed (ours; some allocators' expandable segments) | a file |
//! | `cuMemAlloc`, `cudaMalloc` | the 64 bytes of a legacy IPC handle |
//!
//! A handle names a whole allocation, so a range is said by its distance from the allocation's first byte.
//!
//! # Invariants
//!
//! 1. Nothing is taken on trust from an address but what the driver says of it: a range that leaves its allocation, managed
//!    memory, and memory of a kind that cannot be handed over are refused with the reason.
//! 2. An opened allocation is closed when its owner here is dropped, once. Whoever drops it sees to it that nothing of the
//!    GPU's goes there any more.

use crate::device::{Device, Event, Stream};
use crate::driver::{check, cu};
use crate::error::{CudaCode, Error};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

/// What names a GPU in every process, whatever `CUDA_VISIBLE_DEVICES` says there.
pub type Uuid = [u8; 16];

/// The bytes of a legacy IPC handle (CUDA driver API, `CUipcMemHandle`).
pub const IPC_HANDLE_BYTES: usize = 64;

const FILE: cu::CUmemAllocationHandleType =
    cu::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// How long a copy between the host and a GPU's memory may take that is waited for.
const COPY_LIMIT: Duration = Duration::from_secs(10);

/// A range of a GPU's memory, as the driver knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Which GPU has it, as this process numbers them.
    pub ordinal: u32,
    /// First byte of the allocation that the range lies in.
    pub start: u64,
    /// Bytes of that allocation.
    pub bytes: u64,
}

/// How an allocation is handed to another process.
#[derive(Debug)]
pub enum Handover {
    /// A file descriptor, to be sent along.
    File(OwnedFd),
    /// A legacy IPC handle. Of no use in the process that made it.
    Handle([u8; IPC_HANDLE_BYTES]),
}

/// The same, received.
#[derive(Debug, Clone, Copy)]
pub enum Received<'a> {
    /// See [`Handover::File`].
    File(BorrowedFd<'a>),
    /// See [`Handover::Handle`].
    Handle([u8; IPC_HANDLE_BYTES]),
}

/// Asks the driver about `bytes` bytes from `address`. `None`: that is not memory of a GPU.
///
/// # Errors
///
/// [`Error::Managed`]; [`Error::OutOfBounds`] if the range leaves its allocation; [`Error::NotShareable`] if it is of a GPU
/// that this process does not see; or what the driver answers.
pub fn look_up(device: &Device, address: u64, bytes: u64) -> Result<Option<Found>, Error> {
    let _current = device.enter()?;
    let Some(found) = known(address)? else { return Ok(None) };
    let end = address.checked_sub(found.start).and_then(|offset| offset.checked_add(bytes));
    match end {
        Some(end) if end <= found.bytes => Ok(Some(found)),
        end => Err(Error::OutOfBounds { end: end.unwrap_or(u64::MAX), bytes: found.bytes }),
    }
}

/// What the driver knows of the allocation that `address` is in. `None`: that is not memory of a GPU. A context is current.
pub(crate) fn known(address: u64) -> Result<Option<Found>, Error> {
    use cu::CUpointer_attribute as A;
    const DEVICE: u32 = cu::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;
    // SAFETY: a number of this size (CUDA driver API, `cuPointerGetAttribute`); so are those below.
    let kind = match unsafe { fact::<u32>(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) } {
        // Memory that the driver has not heard of is the host's.
        Err(Error::Driver { code: CudaCode(cu::CUresult::CUDA_ERROR_INVALID_VALUE), .. }) => {
            return Ok(None);
        }
        kind => kind?,
    };
    // SAFETY: as above.
    if unsafe { fact::<u32>(A::CU_POINTER_ATTRIBUTE_IS_MANAGED, address)? } != 0 {
        return Err(Error::Managed { address });
    }
    if kind != DEVICE {
        return Ok(None);
    }
    // SAFETY: as above.
    let (ordinal, start, whole) = unsafe {
        (
            fact::<c_int>(A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)?,
            fact::<u64>(A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address)?,
            fact::<usize>(A::CU_POINTER_ATTRIBUTE_RANGE_SIZE, address)?,
        )
    };
    // Of a GPU that this process does not see it is negative.
    let ordinal = u32::try_from(ordinal).map_err(|_| Error::NotShareable { address })?;
    Ok(Some(Found { ordinal, start, bytes: whole as u64 }))
}

/// Which GPU memory is of, as this process numbers them; half a microsecond. `None`: it is not memory that the driver knows.
///
/// # Errors
///
/// What the driver answers.
pub fn gpu_of(device: &Device, address: u64) -> Result<Option<u32>, Error> {
    let _current = device.enter()?;
    let ordinal = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: a number of this size (CUDA driver API, `cuPointerGetAttribute`).
    match unsafe { fact::<c_int>(ordinal, address) } {
        Err(Error::Driver { code: CudaCode(cu::CUresult::CUDA_ERROR_INVALID_VALUE), .. }) => {
            Ok(None)
        }
        // Of a GPU that this process does not see it is negative.
        found => Ok(u32::try_from(found?).ok()),
    }
}

/// # Safety
///
/// The attribute is a number of this type.
unsafe fn fact<T: Default>(which: cu::CUpointer_attribute, address: u64) -> Result<T, Error> {
    let mut value = T::default();
    // SAFETY: writes the one number, which is of this type by our caller's promise.
    let asked = unsafe { cu::cuPointerGetAttribute((&raw mut value).cast(), which, address) };
    check("cuPointerGetAttribute", asked)?;
    Ok(value)
}

/// Makes a handle for the allocation that `address`, of this GPU's memory, lies in. Microseconds.
///
/// # Errors
///
/// [`Error::NotShareable`], or what the driver answers.
pub fn hand_over(device: &Device, address: u64) -> Result<Handover, Error> {
    let _current = device.enter()?;
    let mut physical = 0;
    // SAFETY: writes the one handle, which is released below; an address of another kind is an error.
    let retained =
        unsafe { cu::cuMemRetainAllocationHandle(&raw mut physical, address as *mut c_void) };
    if retained == cu::CUresult::CUDA_SUCCESS {
        let physical = Physical(physical);
        return physical.file().map(Handover::File).map_err(|_| Error::NotShareable { address });
    }
    let mut handle = cu::CUipcMemHandle { reserved: [0; IPC_HANDLE_BYTES] };
    // SAFETY: writes the one structure.
    match unsafe { cu::cuIpcGetMemHandle(&raw mut handle, address) } {
        cu::CUresult::CUDA_SUCCESS => {
            Ok(Handover::Handle(handle.reserved.map(|byte| byte.to_ne_bytes()[0])))
        }
        // Of a pool, or made without leave to be shared.
        cu::CUresult::CUDA_ERROR_INVALID_VALUE | cu::CUresult::CUDA_ERROR_NOT_SUPPORTED => {
            Err(Error::NotShareable { address })
        }
        answer => check("cuIpcGetMemHandle", answer).and(Err(Error::NotShareable { address })),
    }
}

/// Copies between a GPU's memory and the host that are waited for: slow, and meant to be.
#[derive(Debug)]
pub struct Shuttle {
    stream: Stream,
    event: Event,
}

impl Shuttle {
    /// Takes a stream of the GPU for it.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self { stream: Stream::new(device)?, event: Event::new(device)? })
    }

    /// Copies `bytes` bytes, and waits for it.
    ///
    /// # Errors
    ///
    /// What the driver answers; [`Error::TimedOut`], and then the copy may go on.
    ///
    /// # Safety
    ///
    /// Both ranges are allocated; and stay so for ever, if it times out. Nobody else uses `to` meanwhile.
    pub unsafe fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        {
            let _current = self.stream.device().enter()?;
            // SAFETY: our caller's promise.
            let copied = unsafe { cu::cuMemcpyAsync(to, from, bytes, self.stream.handle()) };
            check("cuMemcpyAsync", copied)?;
        }
        self.event.record(&self.stream)?;
        self.event.wait(COPY_LIMIT)
    }
}

/// Physical memory; a reference to it.
#[derive(Debug)]
struct Physical(cu::CUmemGenericAllocationHandle);

impl Physical {
    fn file(&self) -> Result<OwnedFd, Error> {
        let mut file: c_int = -1;
        // SAFETY: for this type of handle a descriptor is written, which is an `int`.
        let exported =
            unsafe { cu::cuMemExportToShareableHandle((&raw mut file).cast(), self.0, FILE, 0) };
        check("cuMemExportToShareableHandle", exported)?;
        // SAFETY: made just now, for us alone.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: one reference of ours, given back once. Mappings of it keep the memory.
        let _ = unsafe { cu::cuMemRelease(self.0) };
    }
}

/// Addresses, and physical memory mapped there that some GPUs may use.
#[derive(Debug)]
struct Mapped {
    device: Device,
    at: u64,
    bytes: usize,
}

impl Mapped {
    fn new(physical: &Physical, bytes: usize, users: &[&Device]) -> Result<Self, Error> {
        let device = users.first().copied().ok_or(Error::NoDevice { ordinal: 0, count: 0 })?;
        let _current = device.enter()?;
        let mut at = 0;
        // SAFETY: writes the one address.
        let reserved = unsafe { cu::cuMemAddressReserve(&raw mut at, bytes, 0, 0, 0) };
        check("cuMemAddressReserve", reserved)?;
        // SAFETY: the addresses were reserved just now; the memory is as long (its maker says so, or the driver refuses).
        let mapped = unsafe { cu::cuMemMap(at, bytes, 0, physical.0, 0) };
        if let Err(why) = check("cuMemMap", mapped) {
            // SAFETY: reserved above, and nothing is mapped there.
            let _ = unsafe { cu::cuMemAddressFree(at, bytes) };
            return Err(why);
        }
        let mapped = Self { device: device.clone(), at, bytes };
        let access = |user: &&Device| cu::CUmemAccessDesc {
            location: location(user),
            flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let access: Vec<_> = users.iter().map(access).collect();
        // SAFETY: the range is mapped; the list has as many entries as are said.
        let set = unsafe { cu::cuMemSetAccess(at, bytes, access.as_ptr(), access.len()) };
        check("cuMemSetAccess", set)?;
        Ok(mapped)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: mapped and reserved by `new`, undone here only; nobody uses it any more (invariant 2).
            let _ = unsafe { cu::cuMemUnmap(self.at, self.bytes) };
            // SAFETY: as above.
            let _ = unsafe { cu::cuMemAddressFree(self.at, self.bytes) };
        }
    }
}

fn location(device: &Device) -> cu::CUmemLocation {
    let id = c_int::try_from(device.ordinal()).unwrap_or(c_int::MAX);
    cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id }
}

/// Memory of one GPU that can be handed over as a file, and that NICs can be given where they can take it.
#[derive(Debug)]
pub struct SharedMemory {
    mapped: Mapped,
    _physical: Physical,
}

impl SharedMemory {
    /// Takes at least `bytes`, at least one, of the GPU's memory, zeroed. A hundred microseconds; rounded up to 2 MiB.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn zeroed(device: &Device, bytes: usize) -> Result<Self, Error> {
        let _current = device.enter()?;
        let wanted = cu::CUmemAllocationProp {
            type_: cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: FILE,
            location: location(device),
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: cu::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(device.nics_reach_shared()?),
                usage: 0,
                reserved: [0; 4],
            },
        };
        let mut grain = 0;
        let least = cu::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: reads the one structure, writes the one number.
        let asked =
            unsafe { cu::cuMemGetAllocationGranularity(&raw mut grain, &raw const wanted, least) };
        check("cuMemGetAllocationGranularity", asked)?;
        let too_much = Error::OutOfBounds { end: bytes as u64, bytes: usize::MAX as u64 };
        let whole = bytes.max(1).checked_next_multiple_of(grain.max(1)).ok_or(too_much)?;
        let mut physical = 0;
        // SAFETY: as above; the handle is released by its owner.
        let made = unsafe { cu::cuMemCreate(&raw mut physical, whole, &raw const wanted, 0) };
        check("cuMemCreate", made)?;
        let physical = Physical(physical);
        let mapped = Mapped::new(&physical, whole, &[device])?;
        let stream = Stream::new(device)?;
        // SAFETY: the range was mapped just now, and nobody else knows of it.
        check("cuMemsetD8Async", unsafe {
            cu::cuMemsetD8Async(mapped.at, 0, whole, stream.handle())
        })?;
        let done = Event::new(device)
            .and_then(|event| event.record(&stream).map(|()| event))
            .and_then(|event| event.wait(COPY_LIMIT));
        let memory = Self { mapped, _physical: physical };
        match done {
            Ok(()) => Ok(memory),
            Err(why) => {
                // It may be written to for as long as the GPU likes.
                std::mem::forget(memory);
                Err(why)
            }
        }
    }

    /// The first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.mapped.at
    }

    /// Bytes, whole multiples of what the driver maps at once.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.mapped.bytes
    }
}

/// Another process's allocation, opened for one GPU of this process.
#[derive(Debug)]
pub struct Opened {
    at: u64,
    how: How,
}

#[derive(Debug)]
enum How {
    Mapped { _mapped: Mapped, _physical: Physical },
    Handle { device: Device },
}

impl Opened {
    /// Opens an allocation of `bytes` bytes of a GPU's memory, so that kernels and copies of `user` reach it. A millisecond.
    ///
    /// # Errors
    ///
    /// What the driver answers: the two GPUs are not connected, say, or the handle is of this very process.
    pub fn new(user: &Device, allocation: Received<'_>, bytes: u64) -> Result<Self, Error> {
        match allocation {
            Received::File(file) => Self::map(user, file, bytes),
            Received::Handle(handle) => Self::open(user, handle),
        }
    }

    fn map(user: &Device, file: BorrowedFd<'_>, bytes: u64) -> Result<Self, Error> {
        let too_much = Error::OutOfBounds { end: bytes, bytes: usize::MAX as u64 };
        let bytes = usize::try_from(bytes).map_err(|_| too_much)?;
        let physical = {
            let _current = user.enter()?;
            let number: RawFd = file.as_raw_fd();
            let mut physical = 0;
            // SAFETY: for this type of handle the descriptor itself is given in place of a pointer; the driver checks
            // that it is one of its own. Writes the one handle, released by its owner.
            let imported = unsafe {
                let number = ptr::without_provenance_mut(usize::try_from(number).unwrap_or(0));
                cu::cuMemImportFromShareableHandle(&raw mut physical, number, FILE)
            };
            check("cuMemImportFromShareableHandle", imported)?;
            Physical(physical)
        };
        let mapped = Mapped::new(&physical, bytes, &[user])?;
        Ok(Self { at: mapped.at, how: How::Mapped { _mapped: mapped, _physical: physical } })
    }

    fn open(user: &Device, handle: [u8; IPC_HANDLE_BYTES]) -> Result<Self, Error> {
        let _current = user.enter()?;
        let handle = cu::CUipcMemHandle {
            reserved: handle.map(|byte| std::ffi::c_char::from_ne_bytes([byte])),
        };
        let lazily = cu::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut at = 0;
        // SAFETY: writes the one address; the driver checks the handle.
        let opened = unsafe { cu::cuIpcOpenMemHandle_v2(&raw mut at, handle, lazily) };
        check("cuIpcOpenMemHandle", opened)?;
        Ok(Self { at, how: How::Handle { device: user.clone() } })
    }

    /// The first byte of the allocation, for the GPU that it was opened for.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.at
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let How::Handle { device } = &self.how
            && let Ok(_current) = device.enter()
        {
            // SAFETY: opened by `open`, closed here only; nobody uses it any more (invariant 2).
            let _ = unsafe { cu::cuIpcCloseMemHandle(self.at) };
        }
    }
}

/// Host memory of the caller's, pinned for as long as this lives.
#[derive(Debug)]
pub struct Pinned {
    device: Device,
    start: u64,
}

impl Pinned {
    /// Pins `bytes` bytes from `start`, so that every GPU reaches them at the CPU's address. Some tenths of a second for
    /// each GiB. `None`: that is pinned already, by somebody else, who will have to keep it so.
    ///
    /// # Safety
    ///
    /// The range is mapped, readable and writable, until this has been dropped.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub unsafe fn new(device: &Device, start: u64, bytes: usize) -> Result<Option<Self>, Error> {
        let _current = device.enter()?;
        // SAFETY: our caller's promise. With unified addressing the GPUs' address is the CPU's.
        let pinned = unsafe {
            let portable = cu::CU_MEMHOSTREGISTER_PORTABLE;
            cu::cuMemHostRegister_v2(start as *mut c_void, bytes, portable)
        };
        match pinned {
            cu::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => Ok(None),
            answer => check("cuMemHostRegister", answer)
                .map(|()| Some(Self { device: device.clone(), start })),
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: pinned by `new`, undone here only.
            let _ = unsafe { cu::cuMemHostUnregister(self.start as *mut c_void) };
        }
    }
}
