//! GPU memory that other processes of this host reach: what is known of an address, how its allocation is handed over, and
//! how one that was handed over is opened.
//!
//! | allocated by | handed over as |
//! |---|---|
//! | `cuMemCreate` with file descriptors allowed (ours; some allocators' expandable segments) | a file |
//! | `cuMemAlloc`, `cudaMalloc` | the 64 bytes of a legacy IPC handle |
//!
//! A handle names a whole allocation, so a range is said by its distance from the allocation's first byte. Of memory of `cuMemCreate`
//! that is the first byte of its mapping: none begins within its allocation (`cuMemMap`: the offset "currently must be zero"). One may
//! be shorter, as far as is documented; whoever opens it maps as many bytes as its owner has, so that does no harm.
//!
//! A range over several allocations ([`Allocations`]) is handed over as so many files, and mapped by whoever opens it one after the
//! other where it has reserved addresses for all of them ([`Joining`]): there it is one range again. Where a handle is opened the
//! driver chooses, so memory of `cudaMalloc` cannot be a part of such a range, even if it happens to adjoin.
//!
//! # Invariants
//!
//! 1. Nothing is taken on trust from an address but what the driver says of it: a range with a hole, managed
//!    memory, and memory of a kind that cannot be handed over are refused with the reason.
//! 2. An opened allocation is closed when its owner here is dropped, once. Whoever drops it sees to it that nothing of the
//!    GPU's goes there any more.
//! 3. What is mapped here stays so, for good, if a GPU is stuck when it is dropped ([`crate::stuck`]); what is pinned, until somebody
//!    pins those pages when none is. Nobody shares it meanwhile.
//! 4. What is mapped is unmapped as it was mapped, each allocation by itself, before its addresses are given back: no
//!    part of a mapping can be unmapped (CUDA driver API, `cuMemUnmap`).

use crate::copier::settle;
use crate::device::{Device, Event, Stream};
use crate::driver::{check, cu};
use crate::error::{CudaCode, Error};
use crate::extent::{Allocation, Found, walk};
use crate::memory::PinnedMemory;
use crate::pins::{Going, NotNow, Pins, Taken, pages_of};
use crate::stuck;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What names a GPU in every process, whatever `CUDA_VISIBLE_DEVICES` says there.
pub type Uuid = [u8; 16];

/// The bytes of a legacy IPC handle (CUDA driver API, `CUipcMemHandle`).
pub const IPC_HANDLE_BYTES: usize = 64;

const FILE: cu::CUmemAllocationHandleType =
    cu::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// How long one piece of a copy between the host and a GPU's memory may take that is waited for.
const COPY_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of such a piece, at most.
const PIECE_BYTES: usize = 1 << 20;

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

/// Asks the driver about `bytes` bytes from `address`, in one allocation or several that adjoin. `None`: that is not memory of a
/// GPU. Some microseconds for each allocation.
///
/// # Errors
///
/// [`Error::Managed`]; [`Error::Hole`] if they are not all allocated, or of several GPUs; [`Error::TooManyAllocations`];
/// [`Error::NotShareable`] if they are of a GPU that this process does not see; or what the driver answers.
pub fn look_up(device: &Device, address: u64, bytes: u64) -> Result<Option<Found>, Error> {
    let _current = device.enter()?;
    walk(address, bytes, known, |_| Ok(()))?.map(Found::for_a_region).transpose()
}

/// What the driver knows of the allocation that `address` is in. `None`: that is not memory of a GPU. A context is current.
pub(crate) fn known(address: u64) -> Result<Option<Allocation>, Error> {
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
    let ordinal = unsafe { fact::<c_int>(A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)? };
    // Of a GPU that this process does not see it is negative.
    let ordinal = u32::try_from(ordinal).map_err(|_| Error::NotShareable { address })?;
    let (start, bytes) = bounds(address)?;
    Ok(Some(Allocation { ordinal, start, bytes }))
}

/// First byte and length of the allocation that `address`, of a GPU's memory, lies in. A context is current.
///
/// What the driver calls the range is, for memory mapped by hand, all that is mapped side by side there: seen on driver 580.159.04, of
/// two allocations as one. (By the documentation it may be all that was reserved.) There the mapping is asked for. For other
/// memory the mapping is the driver's affair, and may have room for neighbours; there the range is what was allocated.
fn bounds(address: u64) -> Result<(u64, u64), Error> {
    use cu::CUpointer_attribute as A;
    let ask = |start, bytes| {
        // SAFETY: numbers of these sizes (CUDA driver API, `cuPointerGetAttribute`).
        let (start, bytes) =
            unsafe { (fact::<u64>(start, address)?, fact::<usize>(bytes, address)?) };
        Ok((start, bytes as u64))
    };
    // The reference goes at once.
    let by_hand = Physical::at(address).is_ok();
    let mapping = (A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE);
    // A driver that has not heard of it (before CUDA 11.7) is right about a mapping that nothing adjoins; what else it says, a
    // peer's driver refuses to map.
    if by_hand && let Ok(found) = ask(mapping.0, mapping.1) {
        return Ok(found);
    }
    ask(A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, A::CU_POINTER_ATTRIBUTE_RANGE_SIZE)
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
    if let Ok(physical) = Physical::at(address) {
        return physical.file_of(address).map(Handover::File);
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
///
/// They go by pinned memory of its own, in pieces: with pageable memory the driver comes back when it is done, however late, and a
/// copy that nobody waits for any more touches no memory of the caller's on the host.
///
/// Invariant: while the event is not done the pinned memory is the stream's.
#[derive(Debug)]
pub struct Shuttle {
    stream: Stream,
    event: Event,
    bounce: PinnedMemory,
}

impl Shuttle {
    /// Takes a stream of the GPU for it, and a MiB of pinned memory.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn new(device: &Device) -> Result<Self, Error> {
        let (stream, event) = (Stream::new(device)?, Event::new(device)?);
        Ok(Self { stream, event, bounce: PinnedMemory::zeroed(device, PIECE_BYTES)? })
    }

    /// Copies as many bytes as `to` has from memory of a GPU, and waits for it.
    ///
    /// # Errors
    ///
    /// What the driver answers; [`Error::TimedOut`], and then a piece may still be read. Part of `to` may have been written; no more
    /// will be. A shuttle that is late answers so until its GPU has gone on.
    ///
    /// # Safety
    ///
    /// The range is allocated; and stays so until the GPU has gone on, if it times out. Nobody writes it meanwhile.
    pub unsafe fn read(&mut self, from: u64, to: &mut [u8]) -> Result<(), Error> {
        self.event.wait(COPY_LIMIT)?;
        let mut at = from;
        for piece in to.chunks_mut(PIECE_BYTES) {
            // SAFETY: our caller's promise; the other range is ours, and nothing is under way there.
            unsafe { self.carry(at, self.bounce.address(), piece.len())? };
            piece.iter_mut().zip(self.bounce.as_slice()).for_each(|(to, from)| *to = *from);
            at = at.saturating_add(piece.len() as u64);
        }
        Ok(())
    }

    /// Copies `from` to memory of a GPU, and waits for it.
    ///
    /// # Errors
    ///
    /// As for [`Shuttle::read`]; a piece may still be written.
    ///
    /// # Safety
    ///
    /// As for [`Shuttle::read`]; nor does anybody read the range meanwhile.
    pub unsafe fn write(&mut self, from: &[u8], to: u64) -> Result<(), Error> {
        self.event.wait(COPY_LIMIT)?;
        let mut at = to;
        for piece in from.chunks(PIECE_BYTES) {
            let bounce = self.bounce.as_mut_slice();
            bounce.iter_mut().zip(piece).for_each(|(to, from)| *to = *from);
            // SAFETY: as in `read`.
            unsafe { self.carry(self.bounce.address(), at, piece.len())? };
            at = at.saturating_add(piece.len() as u64);
        }
        Ok(())
    }

    /// Copies one piece, and waits for it. If it is late, nothing is freed until the GPU has gone on ([`stuck`]).
    ///
    /// # Safety
    ///
    /// Both ranges are allocated; and stay so until the GPU has gone on, if it times out. Nobody else uses `to` meanwhile.
    unsafe fn carry(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        {
            let _current = self.stream.device().enter()?;
            // SAFETY: our caller's promise.
            let copied = unsafe { cu::cuMemcpyAsync(to, from, bytes, self.stream.handle()) };
            check("cuMemcpyAsync", copied)?;
        }
        self.event.record(&self.stream)?;
        let waited = self.event.wait(COPY_LIMIT);
        if matches!(waited, Err(Error::TimedOut { .. })) {
            settle(&self.stream, Duration::ZERO);
        }
        waited
    }
}

/// The allocations that a range lies over: references that keep them, whatever becomes of their mappings, until each has been handed
/// to whoever asks.
///
/// There are no files of them but while they are sent: a process may have a thousand at a time, and regions of hundreds of
/// allocations each.
#[derive(Debug)]
pub struct Allocations {
    device: Device,
    all: Vec<(Physical, u64)>,
}

impl Allocations {
    /// Takes references to all that `found`, of memory of `device`, lies over. Tens of microseconds for each.
    ///
    /// # Errors
    ///
    /// [`Error::Separate`], [`Error::NotShareable`], each with the address of the first of them that cannot be handed over;
    /// [`Error::Hole`], if they have changed since; or what the driver answers.
    pub fn keep(device: &Device, found: &Found) -> Result<Self, Error> {
        let _current = device.enter()?;
        let mut all = Vec::new();
        let keep = |one: Allocation| {
            let address = one.start;
            let physical = Physical::at(address).map_err(|why| match why {
                cu::CUresult::CUDA_ERROR_INVALID_VALUE | cu::CUresult::CUDA_ERROR_NOT_SUPPORTED => {
                    Error::Separate { address, allocations: found.allocations }
                }
                code => Error::Driver { call: "cuMemRetainAllocationHandle", code: CudaCode(code) },
            })?;
            // Whether it can be exported is not told but by doing so.
            physical.file_of(address)?;
            all.push((physical, one.bytes));
            Ok(())
        };
        walk(found.start, found.bytes, known, keep)?;
        Ok(Self { device: device.clone(), all })
    }

    /// How many they are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// A file of the one of this number, in the order of addresses, and how many bytes it has. `None`: there are not so many.
    ///
    /// # Errors
    ///
    /// What the driver answers: the process has no more files, say.
    pub fn export(&self, number: usize) -> Result<Option<(OwnedFd, u64)>, Error> {
        let Some((physical, bytes)) = self.all.get(number) else { return Ok(None) };
        let _current = self.device.enter()?;
        physical.file().map(|file| Some((file, *bytes)))
    }
}

/// Physical memory; a reference to it.
#[derive(Debug)]
struct Physical(cu::CUmemGenericAllocationHandle);

impl Physical {
    /// What of `cuMemCreate` is mapped at an address. A context is current.
    fn at(address: u64) -> Result<Self, cu::CUresult> {
        let mut physical = 0;
        // SAFETY: writes the one handle, which its owner releases; an address of another kind is an error.
        match unsafe { cu::cuMemRetainAllocationHandle(&raw mut physical, address as *mut c_void) }
        {
            cu::CUresult::CUDA_SUCCESS => Ok(Self(physical)),
            why => Err(why),
        }
    }

    /// What another process has exported. A context is current.
    fn import(file: BorrowedFd<'_>) -> Result<Self, Error> {
        let number: RawFd = file.as_raw_fd();
        let mut physical = 0;
        // SAFETY: for this type of handle the descriptor itself is given in place of a pointer; the driver checks
        // that it is one of its own. Writes the one handle, released by its owner.
        let imported = unsafe {
            let number = ptr::without_provenance_mut(usize::try_from(number).unwrap_or(0));
            cu::cuMemImportFromShareableHandle(&raw mut physical, number, FILE)
        };
        check("cuMemImportFromShareableHandle", imported)?;
        Ok(Self(physical))
    }

    fn file(&self) -> Result<OwnedFd, Error> {
        let mut file: c_int = -1;
        // SAFETY: for this type of handle a descriptor is written, which is an `int`.
        let exported =
            unsafe { cu::cuMemExportToShareableHandle((&raw mut file).cast(), self.0, FILE, 0) };
        check("cuMemExportToShareableHandle", exported)?;
        // SAFETY: made just now, for us alone.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    /// The same of what is mapped at `address`. What was not made to be exported is not shareable; what the driver answers
    /// otherwise says nothing of the memory: the process has no more files, say.
    fn file_of(&self, address: u64) -> Result<OwnedFd, Error> {
        use cu::CUresult as C;
        self.file().map_err(|why| match why {
            Error::Driver {
                code:
                    CudaCode(
                        C::CUDA_ERROR_INVALID_VALUE
                        | C::CUDA_ERROR_NOT_SUPPORTED
                        | C::CUDA_ERROR_NOT_PERMITTED,
                    ),
                ..
            } => Error::NotShareable { address },
            why => why,
        })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: one reference of ours, given back once. Mappings of it keep the memory.
        let _ = unsafe { cu::cuMemRelease(self.0) };
    }
}

/// Addresses, and physical memory mapped there, one after the other from the first, that a GPU may use.
#[derive(Debug)]
struct Mapped {
    device: Device,
    at: u64,
    bytes: usize,
    /// Bytes of each mapping, in order.
    each: Vec<usize>,
    /// All of them.
    used: usize,
}

impl Mapped {
    /// Takes addresses; nothing is mapped there yet.
    fn reserve(device: &Device, bytes: usize) -> Result<Self, Error> {
        let _current = device.enter()?;
        let mut at = 0;
        // SAFETY: writes the one address.
        let reserved = unsafe { cu::cuMemAddressReserve(&raw mut at, bytes, 0, 0, 0) };
        check("cuMemAddressReserve", reserved)?;
        Ok(Self { device: device.clone(), at, bytes, each: Vec::new(), used: 0 })
    }

    /// Maps `bytes` bytes behind what is mapped. If that fails, what is there stays; the rest is undone with it.
    fn add(&mut self, physical: &Physical, bytes: usize) -> Result<(), Error> {
        let end = self.used.checked_add(bytes).filter(|end| *end <= self.bytes);
        let leaves = Error::OutOfBounds {
            end: (self.used as u64).saturating_add(bytes as u64),
            bytes: self.bytes as u64,
        };
        let (end, at) = (end.ok_or(leaves)?, self.at + self.used as u64);
        let _current = self.device.enter()?;
        // SAFETY: these addresses were reserved by `reserve`, and nothing is mapped there: all that is lies before. The memory is
        // as long (its maker says so, or the driver refuses).
        check("cuMemMap", unsafe { cu::cuMemMap(at, bytes, 0, physical.0, 0) })?;
        self.each.push(bytes);
        self.used = end;
        let access = cu::CUmemAccessDesc {
            location: location(&self.device),
            flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range is what was mapped just now; the list has the one entry.
        check("cuMemSetAccess", unsafe { cu::cuMemSetAccess(at, bytes, &raw const access, 1) })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Some(_current) = stuck::to_free(&self.device) {
            let mut at = self.at;
            for bytes in &self.each {
                // SAFETY: mapped so by `add`, undone here only; nobody uses it any more (invariant 2).
                let _ = unsafe { cu::cuMemUnmap(at, *bytes) };
                at += *bytes as u64;
            }
            // SAFETY: reserved by `reserve`, given back here only; all that was mapped there is unmapped.
            let _ = unsafe { cu::cuMemAddressFree(self.at, self.bytes) };
        }
    }
}

fn location(device: &Device) -> cu::CUmemLocation {
    let id = c_int::try_from(device.ordinal()).unwrap_or(c_int::MAX);
    cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id }
}

/// Memory that was not zeroed in time, each behind what comes after its zeroes.
static LATE: Mutex<Vec<(Event, SharedMemory)>> = Mutex::new(Vec::new());

fn late() -> MutexGuard<'static, Vec<(Event, SharedMemory)>> {
    LATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives back what has been zeroed since.
fn give_back_late() {
    // In a context that has failed nothing runs.
    let over = |(event, _): &mut (Event, SharedMemory)| !matches!(event.is_done(), Ok(false));
    let over: Vec<_> = late().extract_if(.., over).collect();
    // Without the lock: the driver is called.
    drop(over);
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
    /// What the driver answers; [`Error::TimedOut`], and then it is given back when somebody takes memory and the GPU has gone on.
    pub fn zeroed(device: &Device, bytes: usize) -> Result<Self, Error> {
        give_back_late();
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
        let mut mapped = Mapped::reserve(device, whole)?;
        mapped.add(&physical, whole)?;
        let (stream, event) = (Stream::new(device)?, Event::new(device)?);
        // SAFETY: the range was mapped just now, and nobody else knows of it.
        check("cuMemsetD8Async", unsafe {
            cu::cuMemsetD8Async(mapped.at, 0, whole, stream.handle())
        })?;
        let memory = Self { mapped, _physical: physical };
        match event.record(&stream).and_then(|()| event.wait(COPY_LIMIT)) {
            Ok(()) => Ok(memory),
            Err(why) => {
                // It may be written to for as long as the GPU likes.
                if matches!(why, Error::TimedOut { .. }) {
                    late().push((event, memory));
                } else {
                    std::mem::forget(memory);
                }
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

/// A range over several allocations of another process, being opened for one GPU of this process: so many addresses in a row, and
/// what has come, one allocation after the other, from the first of them on.
#[derive(Debug)]
pub struct Joining(Mapped);

impl Joining {
    /// Takes addresses for `bytes` bytes.
    ///
    /// # Errors
    ///
    /// What the driver answers; [`Error::OutOfBounds`].
    pub fn new(user: &Device, bytes: u64) -> Result<Self, Error> {
        let too_much = Error::OutOfBounds { end: bytes, bytes: usize::MAX as u64 };
        Mapped::reserve(user, usize::try_from(bytes).map_err(|_| too_much)?).map(Self)
    }

    /// Maps the next allocation, of `bytes` bytes. The file is needed no more after that. Some tenths of a millisecond.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if there are not so many addresses left; or what the driver answers: the two GPUs are not
    /// connected, say. Then it is of no more use but to be dropped.
    pub fn add(&mut self, file: BorrowedFd<'_>, bytes: u64) -> Result<(), Error> {
        let too_much = Error::OutOfBounds { end: bytes, bytes: self.0.bytes as u64 };
        let bytes = usize::try_from(bytes).map_err(|_| too_much)?;
        let physical = {
            let _current = self.0.device.enter()?;
            Physical::import(file)?
        };
        // The reference may go: the mapping keeps the memory (CUDA driver API, `cuMemRelease`).
        self.0.add(&physical, bytes)
    }

    /// What was joined, if that is all of it.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]: some is missing.
    pub fn finish(self) -> Result<Opened, Error> {
        let (used, bytes) = (self.0.used as u64, self.0.bytes as u64);
        if used != bytes {
            return Err(Error::OutOfBounds { end: bytes, bytes: used });
        }
        Ok(Opened { at: self.0.at, how: How::Mapped { _mapped: self.0 } })
    }
}

/// Why another process's memory was not opened.
#[derive(Debug)]
pub struct NotOpened {
    /// What the driver answers: the two GPUs are not connected, say, or the handle is of this very process. [`Error::OutOfBounds`]: there is
    /// not as much as was said.
    pub why: Error,
    /// What was opened all the same, of no use but to be closed: for which the driver waits, as for all that was opened by a handle.
    pub left: Option<Opened>,
}

impl fmt::Display for NotOpened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)
    }
}

impl std::error::Error for NotOpened {}

impl From<Error> for NotOpened {
    fn from(why: Error) -> Self {
        Self { why, left: None }
    }
}

/// Another process's memory, opened for one GPU of this process: an allocation, or several that adjoin.
#[derive(Debug)]
pub struct Opened {
    at: u64,
    how: How,
}

#[derive(Debug)]
enum How {
    /// Which keeps the memory, too.
    Mapped { _mapped: Mapped },
    /// `None`: it has been closed, or is to stay open.
    Handle { device: Option<Device> },
}

impl Opened {
    /// Opens an allocation of `bytes` bytes of a GPU's memory, so that kernels and copies of `user` reach it. A millisecond.
    ///
    /// # Errors
    ///
    /// [`NotOpened`].
    pub fn new(user: &Device, allocation: Received<'_>, bytes: u64) -> Result<Self, NotOpened> {
        match allocation {
            Received::File(file) => Ok(Self::map(user, file, bytes)?),
            Received::Handle(handle) => Self::open(user, handle, bytes),
        }
    }

    fn map(user: &Device, file: BorrowedFd<'_>, bytes: u64) -> Result<Self, Error> {
        let mut joining = Joining::new(user, bytes)?;
        joining.add(file, bytes)?;
        joining.finish()
    }

    fn open(user: &Device, handle: [u8; IPC_HANDLE_BYTES], bytes: u64) -> Result<Self, NotOpened> {
        let _current = user.enter()?;
        let handle = cu::CUipcMemHandle {
            reserved: handle.map(|byte| std::ffi::c_char::from_ne_bytes([byte])),
        };
        let lazily = cu::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut at = 0;
        // SAFETY: writes the one address; the driver checks the handle.
        let opened = unsafe { cu::cuIpcOpenMemHandle_v2(&raw mut at, handle, lazily) };
        check("cuIpcOpenMemHandle", opened)?;
        let opened = Self { at, how: How::Handle { device: Some(user.clone()) } };
        // How long it is, its owner says: that is to be no more than there is. A driver that cannot tell is not asked twice.
        if let Ok((start, size)) = bounds(at) {
            let room = size.saturating_sub(at.saturating_sub(start));
            if bytes > room {
                let why = Error::OutOfBounds { end: bytes, bytes: room };
                return Err(NotOpened { why, left: Some(opened) });
            }
        }
        Ok(opened)
    }

    /// The first byte of the first allocation, for the GPU that it was opened for.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.at
    }

    /// Closes it, as dropping it does; what was opened by a handle when the GPU has done all that it was given. `false`: a GPU is stuck, may be using it, and it stays open for good: its owner may not
    /// free it.
    #[must_use = "what stays open may not be freed"]
    pub fn close(mut self) -> bool {
        self.undo()
    }

    fn undo(&mut self) -> bool {
        let How::Handle { device } = &mut self.how else { return true };
        let Some(device) = device.take() else { return true };
        let Some(_current) = stuck::to_free(&device) else { return false };
        // SAFETY: opened by `open`, closed here only, once; nobody uses it any more (invariant 2).
        let _ = unsafe { cu::cuIpcCloseMemHandle(self.at) };
        true
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.undo();
    }
}

/// What of the host's memory is pinned by this library, for whichever of its owners in this process.
static PINS: Mutex<Pins> = Mutex::new(Pins::new());
/// Some of it is being pinned or unpinned no more.
static SETTLED: Condvar = Condvar::new();

/// How long for pages that somebody else is pinning, or unpinning: the driver does so only when GPUs are through.
const SETTLED_WITHIN: Duration = Duration::from_secs(30);

fn pins() -> MutexGuard<'static, Pins> {
    PINS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn settled(change: impl FnOnce(&mut Pins)) {
    change(&mut pins());
    SETTLED.notify_all();
}

/// Host memory of the caller's, pinned for as long as this lives; what others of this library's have pinned of it is shared.
#[derive(Debug)]
pub struct Pinned {
    device: Device,
    /// What was taken.
    range: Range<u64>,
    /// The pins that it lies in, by their first bytes. None: it has been given back.
    held: Vec<u64>,
    /// What of it nobody else needs, once it was [let go of](Pinned::let_go).
    going: Vec<Going>,
}

/// Why host memory was not pinned.
#[derive(Debug)]
pub struct NotPinned {
    /// What the driver answers; [`Error::Busy`] if somebody else does not come back from pinning, or unpinning, some of it.
    pub why: Error,
    /// What of it was pinned all the same, of no use but to be unpinned: for which the driver waits, as for all else.
    pub left: Option<Pinned>,
}

impl fmt::Display for NotPinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)
    }
}

impl std::error::Error for NotPinned {}

impl From<Error> for NotPinned {
    fn from(why: Error) -> Self {
        Self { why, left: None }
    }
}

impl Pinned {
    /// Pins `bytes` bytes from `start`, so that `device`, and every other GPU that [uses the CPU's addresses](Device::must_use_host_pointers), reaches
    /// them there; if `reads_only`, to be read alone, where they are mapped so.
    /// Some tenths of a second for each GiB. What of it the application has pinned, if only some of it, it will have to keep
    /// so; `None`: that is all. `page`: bytes of a page.
    ///
    /// # Safety
    ///
    /// The range is mapped, readable, and writable unless `reads_only`, until this has been let go of, or dropped; and no GPU is given it to use after
    /// that. Pages that are still pinned then, or stay so ([`Pinned::unpin`]), the driver keeps.
    ///
    /// # Errors
    ///
    /// [`NotPinned`]; [`Error::Busy`], too, for pages that stayed pinned, if a GPU is still stuck; [`Error::LeftBehind`]; [`Error::NoHostPointers`].
    pub unsafe fn new(
        device: &Device,
        start: u64,
        bytes: usize,
        page: u64,
        reads_only: bool,
    ) -> Result<Option<Self>, NotPinned> {
        device.must_use_host_pointers()?;
        let range = start..start.saturating_add(bytes as u64);
        let Taken { shared, missing } = take(device, &range, page)?;
        // From here on what is held goes as it must, whatever happens.
        let mut pinned = Self { device: device.clone(), range, held: shared, going: Vec::new() };
        let mut failed = Ok(());
        for part in missing {
            let (start, mut begun) = (part.start, Vec::new());
            // SAFETY: our caller's promise.
            failed =
                failed.and_then(|()| unsafe { register(device, part, reads_only, &mut begun) });
            if !begun.is_empty() {
                pinned.held.push(start);
            }
            settled(|pins| pins.pinned(start, begun));
        }
        let pinned = (!pinned.held.is_empty()).then_some(pinned);
        match failed {
            Ok(()) => Ok(pinned),
            Err(why) => Err(NotPinned { why, left: pinned }),
        }
    }

    /// Says that it will be unpinned, by whom it is given to: who wants any of its pages from now on waits for that, since
    /// something else may be mapped there by then. Calls no driver.
    pub fn let_go(&mut self) {
        let mut pins = pins();
        let held = std::mem::take(&mut self.held).into_iter();
        let given = held.filter_map(|start| Some((start, pins.give_back(start, &self.range)?)));
        self.going.extend(given);
    }

    /// Unpins it, as far as nobody else needs it. `false`: a GPU is stuck, may be using it, and it stays pinned.
    #[must_use = "what stays pinned has to stay mapped"]
    pub fn unpin(mut self) -> bool {
        self.undo()
    }

    fn undo(&mut self) -> bool {
        self.let_go();
        let going = std::mem::take(&mut self.going).into_iter();
        going.fold(true, |all, going| all & unregister(&self.device, going))
    }
}

/// Has the driver unpin it, and says so. `false`: a GPU is stuck.
fn unregister(device: &Device, (start, begun): Going) -> bool {
    let freed = stuck::to_free(device).map(|_current| {
        for at in &begun {
            // SAFETY: pinned by `register`, undone here only, once: nobody else holds it, and nobody takes it until it is said.
            let _ = unsafe { cu::cuMemHostUnregister(*at as *mut c_void) };
        }
    });
    let is_freed = freed.is_some();
    settled(|pins| pins.unpinned(start, (!is_freed).then_some(begun)));
    is_freed
}

/// Takes a range, when nobody is pinning or unpinning any of its pages, or is about to, or has them pinned by what it has beside them; what of them
/// could not be unpinned is unpinned first.
fn take(device: &Device, range: &Range<u64>, page: u64) -> Result<Taken, Error> {
    let start = Instant::now();
    let busy = Error::Busy { address: range.start };
    loop {
        let mut pins = pins();
        let stale = pins.stale(&pages_of(range, page));
        if !stale.is_empty() {
            drop(pins);
            if !stale.into_iter().fold(true, |all, stale| all & unregister(device, stale)) {
                return Err(busy);
            }
            continue;
        }
        match pins.take(range, page) {
            Ok(taken) => return Ok(taken),
            Err(NotNow::Busy) => {}
            // Until a caller closes a region: that is not waited for.
            Err(NotNow::LeftBehind(address)) => return Err(Error::LeftBehind { address }),
        }
        let left = SETTLED_WITHIN.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Err(busy);
        }
        drop(SETTLED.wait_timeout(pins, left).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Has the driver pin what of a range is not pinned, and adds to `begun` where each part begins that it has pinned so.
///
/// The driver takes a range, or none of it if a byte of it is pinned, and counts by the byte: two may share a page (seen on driver
/// 580.159.04, where a refusal takes some ten microseconds). So what it refuses is halved.
///
/// # Safety
///
/// As for [`Pinned::new`].
unsafe fn register(
    device: &Device,
    range: Range<u64>,
    reads_only: bool,
    begun: &mut Vec<u64>,
) -> Result<(), Error> {
    let _current = device.enter()?;
    let (mut at, mut len) = (range.start, range.end - range.start);
    while at < range.end {
        if let Some(end) = pinned_until(at)? {
            (at, len) = (end, range.end.saturating_sub(end));
            continue;
        }
        let pin = |flags| {
            let bytes = usize::try_from(len).unwrap_or(usize::MAX);
            // SAFETY: our caller's promise. With unified addressing the GPUs' address is the CPU's.
            unsafe {
                let flags = flags | cu::CU_MEMHOSTREGISTER_PORTABLE;
                cu::cuMemHostRegister_v2(at as *mut c_void, bytes, flags)
            }
        };
        let answer = match pin(0) {
            // Mapped to be read alone, for one; what else it may be it is then, too.
            cu::CUresult::CUDA_ERROR_INVALID_VALUE if reads_only => {
                match pin(cu::CU_MEMHOSTREGISTER_READ_ONLY) {
                    cu::CUresult::CUDA_SUCCESS => cu::CUresult::CUDA_SUCCESS,
                    _ => cu::CUresult::CUDA_ERROR_INVALID_VALUE,
                }
            }
            answer => answer,
        };
        match answer {
            cu::CUresult::CUDA_SUCCESS => {
                begun.push(at);
                at += len;
                len = range.end - at;
            }
            // What the driver allocated it pinned, too; asked to pin that, it says no more than the latter.
            cu::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
            | cu::CUresult::CUDA_ERROR_INVALID_VALUE
                if len > 1 =>
            {
                len /= 2;
            }
            answer => check("cuMemHostRegister", answer)?,
        }
    }
    Ok(())
}

/// Past the last byte of what was pinned together with the host's memory at `address`, by whomever. `None`: that is not pinned. A
/// context is current.
fn pinned_until(address: u64) -> Result<Option<u64>, Error> {
    use cu::CUpointer_attribute as A;
    if known(address)?.is_some() {
        return Ok(None);
    }
    // SAFETY: numbers of these sizes (CUDA driver API, `cuPointerGetAttribute`).
    let (first, bytes) = unsafe {
        (
            fact::<u64>(A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address),
            fact::<usize>(A::CU_POINTER_ATTRIBUTE_RANGE_SIZE, address),
        )
    };
    // Memory that is not pinned the driver has not heard of.
    let (Ok(first), Ok(bytes)) = (first, bytes) else { return Ok(None) };
    Ok(first.checked_add(bytes as u64).filter(|end| *end > address))
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.undo();
    }
}
