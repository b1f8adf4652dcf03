//! GPU memory as NICs reach it, GPUDirect RDMA: whether they can, what a range is registered by, and when what they wrote is
//! seen.
//!
//! A range is exported as a DMA-BUF, a file that a NIC's driver maps (CUDA driver API, `cuMemGetHandleForAddressRange`).
//! Files are of whole pages of the host, so a range that does not begin or end with one is exported with its surroundings,
//! and what it starts at is said beside the file. The allocations that it covers, one or several that adjoin, are told to
//! complete the driver's own copies before their calls return (`CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`): a NIC that reads
//! afterwards reads what was copied. Memory that was mapped by hand (`cuMemMap`) has no such attribute; there the context is
//! told, for all that is copied in it (`CU_CTX_SYNC_MEMOPS`).
//!
//! # What it refuses to know
//!
//! NICs, and their registrations. Who is told of a write waits for it, and calls [`Device::flush_writes`] where
//! [`Direct::visibility`] says so.
//!
//! # Invariants
//!
//! 1. What is exported covers the range, and begins and ends at multiples of a page: [`whole_pages`], tried below for all
//!    small ranges.
//! 2. The memory stays for as long as the file is open, or mapped by a NIC, whoever frees it.

use crate::device::{Device, attribute};
use crate::driver::{check, cu};
use crate::error::Error;
use crate::extent::{Allocation, walk};
use crate::share::known;
use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// By whom what a NIC wrote to a GPU's memory is seen that has heard of the write since: without a flush, or by means of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seen {
    /// By nobody for sure.
    ByNobody,
    /// By that GPU.
    ByOwner,
    /// By all GPUs of the machine.
    ByAll,
}

/// What is to be done before somebody is told of what a NIC wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visibility {
    /// Nothing.
    Ordered,
    /// [`Device::flush_writes`].
    Flush,
    /// Nothing would help that the CPU can do: NICs may read the memory, not write to it.
    Never,
}

/// What a GPU offers to NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Direct {
    /// NICs reach its memory.
    pub reachable: bool,
    /// Ranges of it can be had as DMA-BUFs; where not, a NIC's driver needs `nvidia-peermem` to find them by their addresses.
    pub dma_buf: bool,
    /// Who sees what they wrote.
    pub seen: Seen,
    /// The CPU can see to it that all do.
    pub flushes: bool,
}

impl Direct {
    /// What is to be done so that those see what a NIC wrote who are to: the GPU, or others of this process as well. Where others
    /// cannot be made to, that the GPU itself does is enough.
    #[must_use]
    pub const fn visibility(&self, by: Seen) -> Visibility {
        match (self.seen, by, self.flushes) {
            (_, Seen::ByNobody, _)
            | (Seen::ByAll, _, _)
            | (Seen::ByOwner, Seen::ByOwner, _)
            | (Seen::ByOwner, Seen::ByAll, false) => Visibility::Ordered,
            (Seen::ByNobody | Seen::ByOwner, _, true) => Visibility::Flush,
            (Seen::ByNobody, _, false) => Visibility::Never,
        }
    }

    /// From the driver's numbers: `CUGPUDirectRDMAWritesOrdering` and `CUflushGPUDirectRDMAWritesOptions`. What is between
    /// two orders that are known is the weaker.
    const fn read(reachable: bool, dma_buf: bool, order: u32, flushing: u32) -> Self {
        const OWNER: u32 =
            cu::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as u32;
        const ALL: u32 =
            cu::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES
                as u32;
        const BY_CALL: u32 =
            cu::CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
                as u32;
        let seen = match order {
            0..OWNER => Seen::ByNobody,
            OWNER..ALL => Seen::ByOwner,
            ALL.. => Seen::ByAll,
        };
        Self { reachable, dma_buf, seen, flushes: flushing & BY_CALL != 0 }
    }
}

impl Device {
    /// What it offers to NICs. Microseconds.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn direct(&self) -> Result<Direct, Error> {
        use cu::CUdevice_attribute as A;
        let ask = |which| attribute(self.number(), which);
        Ok(Direct::read(
            ask(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)? != 0,
            ask(A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)? != 0,
            ask(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?,
            ask(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?,
        ))
    }

    /// Has this GPU, or all, see what NICs have written to its memory, as far as the calling thread has heard of it. A microsecond or
    /// two. It is done in the context of the GPU whose memory it is, whoever is to see it (CUDA driver API, `cuFlushGPUDirectRDMAWrites`).
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn flush_writes(&self, by: Seen) -> Result<(), Error> {
        use cu::CUflushGPUDirectRDMAWritesScope as Scope;
        let _current = self.enter()?;
        let target =
            cu::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = match by {
            Seen::ByNobody => return Ok(()),
            Seen::ByOwner => Scope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
            Seen::ByAll => Scope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES,
        };
        // SAFETY: takes no pointer; a context is current.
        check("cuFlushGPUDirectRDMAWrites", unsafe {
            cu::cuFlushGPUDirectRDMAWrites(target, scope)
        })
    }
}

/// First byte and length of the pages that a range lies in, `page` bytes each; `None` if they leave the address space, or
/// there are none. `page` is a power of two.
#[must_use]
pub const fn whole_pages(address: u64, bytes: u64, page: u64) -> Option<(u64, u64)> {
    let start = address & !(page - 1);
    let Some(end) = address.checked_add(bytes) else { return None };
    let Some(end) = end.checked_next_multiple_of(page) else { return None };
    if bytes == 0 { None } else { Some((start, end - start)) }
}

/// Which GPU has all of `bytes` bytes from `address`, in one allocation or several that adjoin. `None`: they are not a GPU's.
/// A microsecond for each allocation.
///
/// # Errors
///
/// [`Error::Managed`]; [`Error::Hole`] if they are not all allocated, or of several GPUs; [`Error::NotShareable`] if
/// they are of a GPU that this process does not see; or what the driver answers.
pub fn owner_of(device: &Device, address: u64, bytes: u64) -> Result<Option<u32>, Error> {
    let _current = device.enter()?;
    Ok(walk(address, bytes, known, |_| Ok(()))?.map(|found| found.ordinal))
}

/// Calls `each` with the first byte of each allocation that the range lies over, all of which are to be of GPU `ordinal`. A
/// context is current.
fn allocations(
    address: u64,
    bytes: u64,
    ordinal: u32,
    mut each: impl FnMut(u64) -> Result<(), Error>,
) -> Result<(), Error> {
    let other = |other| Error::Hole { address, before: 0, bytes, ordinal, other };
    let visit = |one: Allocation| {
        if one.ordinal == ordinal { each(one.start) } else { Err(other(Some(one.ordinal))) }
    };
    walk(address, bytes, known, visit)?.map(|_| ()).ok_or(other(None))
}

/// A range of a GPU's memory as a file that NICs' drivers take.
#[derive(Debug)]
pub struct DmaBuf {
    file: OwnedFd,
    start: u64,
    offset: u64,
}

impl DmaBuf {
    /// Exports `bytes` bytes from `address`, all of which are this GPU's ([`owner_of`]), with the pages of `page` bytes that
    /// they lie in. Tens of microseconds.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`], [`Error::Hole`], or what the driver answers: `CUDA_ERROR_NOT_SUPPORTED` where its kernel module is the closed
    /// one, or the kernel older than 5.12.
    pub fn new(device: &Device, address: u64, bytes: u64, page: u64) -> Result<Self, Error> {
        let leaves = Error::OutOfBounds { end: bytes, bytes: 0 };
        let (start, whole) = whole_pages(address, bytes, page).ok_or(leaves)?;
        let whole = usize::try_from(whole).map_err(|_| leaves)?;
        let _current = device.enter()?;
        allocations(address, bytes, device.ordinal(), complete_copies)?;
        let (mut file, kind): (c_int, _) =
            (-1, cu::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);
        // SAFETY: for this type of handle a descriptor is written, which is an `int`.
        let exported = unsafe {
            cu::cuMemGetHandleForAddressRange((&raw mut file).cast(), start, whole, kind, 0)
        };
        check("cuMemGetHandleForAddressRange", exported)?;
        // SAFETY: made just now, for us alone.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        Ok(Self { file, start, offset: address - start })
    }

    /// The address of the file's first byte.
    #[must_use]
    pub const fn start(&self) -> u64 {
        self.start
    }

    /// How far into the file the range begins.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }
}

impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Has the driver's copies from and to an allocation be over when their calls return. Its GPU's context is current.
fn complete_copies(start: u64) -> Result<(), Error> {
    let yes: u32 = 1;
    let which = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
    // SAFETY: reads the one number, which is of this size (CUDA driver API, `cuPointerSetAttribute`).
    match unsafe { cu::cuPointerSetAttribute((&raw const yes).cast(), which, start) } {
        cu::CUresult::CUDA_ERROR_NOT_SUPPORTED => complete_all_copies(),
        set => check("cuPointerSetAttribute", set),
    }
}

/// The same for all copies in the current context.
fn complete_all_copies() -> Result<(), Error> {
    const ALL: u32 = cu::CUctx_flags::CU_CTX_SYNC_MEMOPS as u32;
    let mut flags = 0;
    // SAFETY: writes the one number; a context is current.
    check("cuCtxGetFlags", unsafe { cu::cuCtxGetFlags(&raw mut flags) })?;
    if flags & ALL != 0 {
        return Ok(());
    }
    // SAFETY: takes no pointer; a context is current, and keeps its other flags.
    check("cuCtxSetFlags", unsafe { cu::cuCtxSetFlags(flags | ALL) })
}

/// Has the driver's copies complete for a range that NICs find by its addresses, without a [`DmaBuf`].
///
/// # Errors
///
/// As [`DmaBuf::new`].
pub fn prepare(device: &Device, address: u64, bytes: u64) -> Result<(), Error> {
    let _current = device.enter()?;
    allocations(address, bytes, device.ordinal(), complete_copies)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_cover_the_range_and_not_a_page_more() {
        const PAGE: u64 = 8;
        for address in 0..3 * PAGE {
            for bytes in 1..4 * PAGE {
                let (start, whole) = whole_pages(address, bytes, PAGE).unwrap();
                let (end, last) = (start + whole, address + bytes);
                assert!(start.is_multiple_of(PAGE) && end.is_multiple_of(PAGE));
                assert!(start <= address && last <= end);
                assert!(address - start < PAGE && end - last < PAGE);
            }
        }
        for (address, bytes) in
            [(0, 0), (u64::MAX, 1), (u64::MAX - 7, 8), (1, u64::MAX), (u64::MAX - 9, 3)]
        {
            assert_eq!(whole_pages(address, bytes, PAGE), None, "{bytes} from {address}");
        }
        assert_eq!(whole_pages(u64::MAX - 15, 1, PAGE), Some((u64::MAX - 15, 8)));
    }

    #[test]
    fn what_is_seen_without_a_flush_is_ordered_and_what_cannot_be_flushed_is_never_seen() {
        for flushing in 0..4 {
            let by_call = flushing & 1 != 0;
            let unordered = if by_call { Visibility::Flush } else { Visibility::Never };
            // What its owner sees in order is written to, though others may not see it.
            let by_others = if by_call { Visibility::Flush } else { Visibility::Ordered };
            for (order, seen, by_owner, by_all) in [
                (0, Seen::ByNobody, unordered, unordered),
                (99, Seen::ByNobody, unordered, unordered),
                (100, Seen::ByOwner, Visibility::Ordered, by_others),
                (199, Seen::ByOwner, Visibility::Ordered, by_others),
                (200, Seen::ByAll, Visibility::Ordered, Visibility::Ordered),
                (u32::MAX, Seen::ByAll, Visibility::Ordered, Visibility::Ordered),
            ] {
                let direct = Direct::read(true, true, order, flushing);
                assert_eq!(direct.seen, seen);
                assert_eq!(direct.visibility(Seen::ByOwner), by_owner, "{order} {flushing}");
                assert_eq!(direct.visibility(Seen::ByAll), by_all, "{order} {flushing}");
                assert_eq!(direct.visibility(Seen::ByNobody), Visibility::Ordered);
            }
        }
    }
}
