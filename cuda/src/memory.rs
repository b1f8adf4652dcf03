//! Memory of a GPU, and host memory that GPUs reach: each freed by its owner.
//!
//! # Invariants
//!
//! An address that is given out is valid until its owner is dropped, in every context of the process; for good, if a GPU is stuck
//! then ([`crate::stuck`]).

use crate::device::{Device, Stream};
use crate::driver::{check, cu};
use crate::error::Error;
use crate::stuck;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::AtomicU64;

/// Memory of one GPU.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Device,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Takes `bytes`, at least one, of the GPU's memory, zeroed in the order of `stream`.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn zeroed(stream: &Stream, bytes: usize) -> Result<Self, Error> {
        let memory = Self::taken(stream.device(), bytes)?;
        memory.zero(stream)?;
        Ok(memory)
    }

    /// Takes it, whatever is in it.
    pub(crate) fn taken(device: &Device, bytes: usize) -> Result<Self, Error> {
        let _current = device.enter()?;
        let mut address = 0;
        // SAFETY: writes the one address; a context is current.
        check("cuMemAlloc", unsafe { cu::cuMemAlloc_v2(&raw mut address, bytes) })?;
        Ok(Self { device: device.clone(), address, bytes })
    }

    /// Zeroes it, in the order of `stream`: for who has told nobody of it yet.
    pub(crate) fn zero(&self, stream: &Stream) -> Result<(), Error> {
        let _current = self.device.enter()?;
        // SAFETY: the range is ours, and nobody else knows of it.
        check("cuMemsetD8Async", unsafe {
            cu::cuMemsetD8Async(self.address, 0, self.bytes, stream.handle())
        })
    }

    /// The first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Some(_current) = stuck::to_free(&self.device) {
            // SAFETY: allocated by `zeroed`, freed here only. The driver waits for what the GPU is doing.
            let _ = unsafe { cu::cuMemFree_v2(self.address) };
        }
    }
}

/// Host memory that stays where it is, and that every GPU reaches at the address that the CPU has for it.
#[derive(Debug)]
pub struct PinnedMemory {
    device: Device,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory of the process, owned by this value.
unsafe impl Send for PinnedMemory {}
// SAFETY: shared references give reads and atomic words only.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Pins `bytes`, at least one, zeroed. Milliseconds for each GiB.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn zeroed(device: &Device, bytes: usize) -> Result<Self, Error> {
        let _current = device.enter()?;
        let mut start: *mut c_void = ptr::null_mut();
        // SAFETY: writes the one address; a context is current. With unified addressing (all 64-bit Linux), the CPU's
        // address is the GPUs'.
        let taken =
            unsafe { cu::cuMemHostAlloc(&raw mut start, bytes, cu::CU_MEMHOSTALLOC_PORTABLE) };
        check("cuMemHostAlloc", taken)?;
        let code = crate::error::CudaCode(cu::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let start = NonNull::new(start.cast::<u8>())
            .ok_or(Error::Driver { call: "cuMemHostAlloc", code })?;
        // SAFETY: `bytes` bytes from `start` were allocated just now, and nobody else knows of them.
        unsafe { ptr::write_bytes(start.as_ptr(), 0, bytes) };
        Ok(Self { device: device.clone(), start, bytes })
    }

    /// The first byte, for a GPU and for the CPU.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes. Nobody writes them meanwhile: that is promised for each launch that names them.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated, initialised, and alive as long as `self`; GPUs write only as `Copier::submit`'s callers
        // promise.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// The bytes, to be written. No GPU reads or writes them meanwhile: that is promised for each launch that names them.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed for as long.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// These words of it, of four bytes, to be written; `None`: there are not so many. No GPU reads or writes them meanwhile, which is
    /// promised for each launch that names them; what it does with others is of no matter.
    #[must_use]
    pub fn words_mut(&mut self, words: Range<usize>) -> Option<&mut [u32]> {
        if words.start > words.end || words.end > self.bytes / size_of::<u32>() {
            return None;
        }
        // SAFETY: inside of it, see above, and `self` is borrowed for as long; any bits are a `u32`; the driver's pinned memory
        // begins with a page.
        unsafe {
            let first = self.start.as_ptr().cast::<u32>().add(words.start);
            Some(slice::from_raw_parts_mut(first, words.len()))
        }
    }

    /// These words of it, of eight bytes; `None`: there are not so many. GPUs and the CPU may read and write them meanwhile.
    #[must_use]
    pub fn words(&self, words: Range<usize>) -> Option<&[AtomicU64]> {
        if words.start > words.end || words.end > self.bytes / size_of::<u64>() {
            return None;
        }
        // SAFETY: inside of it, alive as long as `self`, initialised, any bits are a word; the driver's pinned memory begins with a
        // page. Who else writes them does so atomically, or has `self` borrowed for it.
        unsafe {
            let first = self.start.as_ptr().cast::<AtomicU64>().add(words.start);
            Some(slice::from_raw_parts(first, words.len()))
        }
    }

    /// The word at `offset`, which a GPU may release while it is read here.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`], [`Error::Misaligned`].
    pub fn word(&self, offset: usize) -> Result<&AtomicU64, Error> {
        let end = offset.checked_add(8).filter(|&end| end <= self.bytes);
        let (Some(_), at) = (end, self.address() + offset as u64) else {
            return Err(Error::OutOfBounds {
                end: (offset as u64).saturating_add(8),
                bytes: self.bytes as u64,
            });
        };
        if !at.is_multiple_of(8) {
            return Err(Error::Misaligned { what: "word", address: at, multiple: 8 });
        }
        // SAFETY: eight initialised bytes at a multiple of 8, within what `self` owns for as long as the reference.
        Ok(unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(offset).cast()) })
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if let Some(_current) = stuck::to_free(&self.device) {
            // SAFETY: allocated by `zeroed`, freed here only. The driver waits for what GPUs are doing.
            let _ = unsafe { cu::cuMemFreeHost(self.start.as_ptr().cast()) };
        }
    }
}
