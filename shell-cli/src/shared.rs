//! Memory that two processes map: what the baselines run over.
//!
//! A memfd, sealed against resizing, so that no access through the mapping can fault. Knows no
//! engine; it is there so that a baseline touches the same kind of memory as a transfer does.
//!
//! # Invariants
//!
//! - The mapping is as long as the file, and the file cannot shrink while the mapping is there:
//!   [`SharedMemory::map`] refuses a file without the seal.
//! - The other process may write at any time: bytes are reached by raw copies and atomics, never as
//!   a reference to plain bytes.

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use rustix::param::page_size;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Why shared memory could not be had; nothing is left mapped.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    /// The kernel refused a step.
    #[error("{step} of {bytes} bytes of shared memory failed: {errno}")]
    Kernel {
        /// Which step.
        step: &'static str,
        /// How much was asked for.
        bytes: u64,
        /// What the kernel said.
        errno: Errno,
    },
    /// The file handed to [`SharedMemory::map`] could shrink under the mapping.
    #[error("the shared memory is not sealed against shrinking")]
    NotSealed,
    /// No memory has zero bytes, or more than can be addressed.
    #[error("shared memory cannot have {0} bytes")]
    BadSize(u64),
}

/// A mapping of a memfd, shared with whoever maps the same file.
pub struct SharedMemory {
    file: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and only `Drop` takes it away. All
// access is by raw pointers, whose users promise what they need, or by atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: as for `Send`; `&SharedMemory` gives out pointers and atomics only.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// New shared memory of `bytes` bytes, all zero. The file is inherited by processes started
    /// while it is open only if `inherit`.
    ///
    /// # Errors
    ///
    /// [`SharedError`]: no bytes, or the kernel refused.
    pub fn create(bytes: u64, inherit: bool) -> Result<Self, SharedError> {
        if bytes == 0 {
            return Err(SharedError::BadSize(bytes));
        }
        let failed = |step| move |errno| SharedError::Kernel { step, bytes, errno };
        let close = if inherit { MemfdFlags::empty() } else { MemfdFlags::CLOEXEC };
        let file = memfd_create("immwire-baseline", MemfdFlags::ALLOW_SEALING | close)
            .map_err(failed("creation"))?;
        ftruncate(&file, bytes).map_err(failed("growth"))?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed("sealing"))?;
        Self::map(file)
    }

    /// Maps all of `file`, which another process created.
    ///
    /// # Errors
    ///
    /// [`SharedError`]: not sealed against shrinking, empty, or the kernel refused.
    pub fn map(file: OwnedFd) -> Result<Self, SharedError> {
        let failed = |step, bytes| move |errno| SharedError::Kernel { step, bytes, errno };
        let seals = fcntl_get_seals(&file).map_err(failed("sealing", 0))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(SharedError::NotSealed);
        }
        let size = fstat(&file).map_err(failed("sizing", 0))?.st_size;
        let bytes = u64::try_from(size).unwrap_or(0);
        let len = usize::try_from(bytes).unwrap_or(0);
        if len == 0 || isize::try_from(len).is_err() {
            return Err(SharedError::BadSize(bytes));
        }
        let base = map_aligned(&file, len).map_err(failed("mapping", bytes))?;
        let base = NonNull::new(base.cast()).ok_or(SharedError::BadSize(bytes))?;
        Ok(Self { file, base, len })
    }

    /// The first byte. Valid for reads and writes of [`len`](Self::len) bytes while `self` lives;
    /// another process may write there at the same time.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes mapped.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The 64-bit word at `offset`, to be shared with the other process.
    ///
    /// `None` if it is not aligned or not inside.
    #[must_use]
    pub fn word(&self, offset: usize) -> Option<&AtomicU64> {
        let end = offset.checked_add(size_of::<AtomicU64>())?;
        if end > self.len || !offset.is_multiple_of(align_of::<AtomicU64>()) {
            return None;
        }
        // SAFETY: `offset..end` is inside the mapping, which lives as long as `self` and cannot be
        // truncated (sealed); pages are aligned, so a multiple of 8 is; atomics may be shared, also
        // between processes.
        Some(unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) })
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemory").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Large pages; mappings that start on such a boundary share more of the address translation, which
/// is why the engine's do. A baseline is to have the same.
const HUGE_BYTES: usize = 2 << 20;

/// Maps `len` bytes of `file` at a multiple of [`HUGE_BYTES`].
fn map_aligned(file: &OwnedFd, len: usize) -> Result<*mut core::ffi::c_void, Errno> {
    let Room { kept, space } = room(len, page_size()).ok_or(Errno::NOMEM)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh reservation at an address of the kernel's choice touches no other memory; the
    // file is mapped over a part of it, and the parts before and after are given back. All lengths are
    // multiples of the kernel's page (`room`), as its addresses are.
    unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let start = mmap_anonymous(std::ptr::null_mut(), space, ProtFlags::empty(), flags)?;
        let before = start.align_offset(HUGE_BYTES).min(HUGE_BYTES);
        let at = start.wrapping_byte_add(before);
        if before > 0 {
            munmap(start, before)?;
        }
        if before < HUGE_BYTES {
            munmap(at.wrapping_byte_add(kept), HUGE_BYTES - before)?;
        }
        mmap(at, len, access, MapFlags::SHARED | MapFlags::FIXED, file, 0)
    }
}

/// What is reserved so that a mapping fits in it wherever the reservation starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Room {
    /// What the mapping covers: whole pages.
    kept: usize,
    /// All of it.
    space: usize,
}

/// For `len` bytes in pages of `page` bytes, which the kernel says; `None` if no address space has it.
fn room(len: usize, page: usize) -> Option<Room> {
    let kept = len.checked_next_multiple_of(page)?;
    let space = kept.checked_add(HUGE_BYTES)?;
    Some(Room { kept, space })
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `base..base + len` is the mapping made in `map`; nothing that borrows `self` is
        // left. It cannot fail for a mapping that is there.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn two_mappings_of_one_file_are_one_memory() {
        let ours = SharedMemory::create(4096, false).unwrap();
        let theirs = SharedMemory::map(ours.as_fd().try_clone_to_owned().unwrap()).unwrap();
        ours.word(8).unwrap().store(77, Relaxed);
        assert_eq!(theirs.word(8).unwrap().load(Relaxed), 77);
        assert_eq!((ours.len(), theirs.len()), (4096, 4096));
        assert!(ftruncate(&theirs, 0).is_err(), "sealed");
    }

    #[test]
    fn a_word_is_aligned_and_inside_or_none() {
        let memory = SharedMemory::create(16, false).unwrap();
        for offset in 0..24 {
            assert_eq!(memory.word(offset).is_some(), offset == 0 || offset == 8, "{offset}");
        }
        assert!(memory.word(usize::MAX - 7).is_none());
    }

    #[test]
    fn files_that_could_shrink_and_empty_ones_are_refused() {
        let loose = memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&loose, 4096).unwrap();
        assert!(matches!(SharedMemory::map(loose), Err(SharedError::NotSealed)));
        assert!(matches!(SharedMemory::create(0, false), Err(SharedError::BadSize(0))));
        assert!(SharedMemory::create(u64::MAX, false).is_err());
    }

    #[test]
    fn room_is_made_in_whole_pages_of_any_size() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            for len in [1, page - 1, page, page + 1, HUGE_BYTES, HUGE_BYTES + 4096] {
                let Room { kept, space } = room(len, page).unwrap();
                assert!(kept >= len && kept - len < page, "{len} in pages of {page}");
                assert_eq!(kept % page, 0, "{len} in pages of {page}");
                assert_eq!(space, kept + HUGE_BYTES);
            }
            assert_eq!(room(usize::MAX, page), None);
            assert_eq!(room(usize::MAX - HUGE_BYTES, page), None);
        }
    }
}
