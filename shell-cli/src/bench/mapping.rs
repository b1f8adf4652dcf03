//! The very memory that transfers go to, reached without the engine: for the baseline's copies.
//!
//! Memory of the engine's `alloc` is a file in memory. Its owner finds out which of its open files
//! that is ([`locate`]), and a process of the same user opens it through `/proc` ([`open`]). The
//! baseline then copies to the same pages as the transfer that it is compared with.
//!
//! # Invariants
//!
//! What is opened is the file that its owner meant. A process and its descriptor have the same numbers on another host
//! and in another PID namespace, where they are a stranger's, or ours: so a file is known by what the kernel knows it by,
//! and the kernel by its boot.

use crate::shared::{SharedError, SharedMemory};
use rustix::fs::{Mode, OFlags, fstat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;

/// Where a piece of a process's memory is as a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The process.
    pub pid: u32,
    /// Its file.
    pub fd: u32,
    /// Which file that is.
    pub file: FileId,
    /// Where in the file.
    pub offset: u64,
}

impl Place {
    /// The beginning of `memory`, for whoever opens it while it is there.
    ///
    /// # Errors
    ///
    /// [`MappingError`]: what the kernel does not say.
    pub fn of(memory: &SharedMemory) -> Result<Self, MappingError> {
        let fd = memory.as_fd();
        // PROOF: an open descriptor is not negative.
        let number = fd.as_raw_fd().unsigned_abs();
        let file = FileId::of(fd).map_err(MappingError::Open)?;
        Ok(Self { pid: std::process::id(), fd: number, file, offset: 0 })
    }
}

/// Which file, on whichever host: no two have the same while both are open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// The kernel's, as `boot_id` has it: another one since each boot.
    boot: [u64; 2],
    /// `st_dev`.
    device: u64,
    /// `st_ino`.
    inode: u64,
}

impl FileId {
    fn of(file: impl AsFd) -> Result<Self, Errno> {
        let stat = fstat(file)?;
        Ok(Self { boot: boot().ok_or(Errno::NOSYS)?, device: stat.st_dev, inode: stat.st_ino })
    }
}

/// This boot of this kernel.
fn boot() -> Option<[u64; 2]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.trim().split('-').collect();
    let (high, low) = digits.split_at_checked(16)?;
    let half = |digits| u64::from_str_radix(digits, 16).ok();
    Some([half(high)?, half(low)?])
}

/// Why memory cannot be reached so.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The address is not of a file in memory that is still open.
    #[error("the memory is no open file")]
    NotAFile,
    /// The file cannot be opened from here.
    #[error("the peer's memory cannot be opened: {0}")]
    Open(Errno),
    /// Another file has these numbers here.
    #[error("the peer's memory is on another host, or in another PID namespace")]
    Elsewhere,
    /// It cannot be mapped.
    #[error(transparent)]
    Map(#[from] SharedError),
}

/// Where the memory at `address` of this process is as a file.
///
/// # Errors
///
/// [`MappingError::NotAFile`].
pub fn locate(address: usize) -> Result<Place, MappingError> {
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(|_| MappingError::NotAFile)?;
    let (inode, offset) = maps
        .lines()
        .find_map(|line| mapped_at(line, address as u64))
        .ok_or(MappingError::NotAFile)?;
    let boot = boot().ok_or(MappingError::NotAFile)?;
    let files = std::fs::read_dir("/proc/self/fd").map_err(|_| MappingError::NotAFile)?;
    let found = files.flatten().find_map(|file| {
        let link = std::fs::read_link(file.path()).ok()?;
        let is_memory = link.to_str()?.starts_with("/memfd:");
        let metadata = std::fs::metadata(file.path()).ok()?;
        let fd = file.file_name().to_str()?.parse().ok()?;
        let id = FileId { boot, device: metadata.dev(), inode };
        (is_memory && metadata.ino() == inode).then_some((fd, id))
    });
    let (fd, file) = found.ok_or(MappingError::NotAFile)?;
    Ok(Place { pid: std::process::id(), fd, file, offset })
}

/// Inode and file offset of `address`, if this line of a `maps` file covers it.
fn mapped_at(line: &str, address: u64) -> Option<(u64, u64)> {
    let mut words = line.split_whitespace();
    let (first, end) = words.next()?.split_once('-')?;
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (first, end) = (hex(first)?, hex(end)?);
    let offset = hex(words.nth(1)?)?;
    let inode = words.nth(1)?.parse().ok()?;
    (first..end).contains(&address).then(|| (inode, offset + (address - first)))
}

/// Maps what [`locate`] found, in another process of the same user.
///
/// # Errors
///
/// [`MappingError`]; nothing but the file that was meant is opened to be written to.
pub fn open(place: Place) -> Result<SharedMemory, MappingError> {
    let open = |path: String, flags| {
        rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).map_err(MappingError::Open)
    };
    // Opened to be looked at: a stranger's device or pipe is not to notice.
    let found = open(format!("/proc/{}/fd/{}", place.pid, place.fd), OFlags::PATH)?;
    if FileId::of(&found).map_err(MappingError::Open)? != place.file {
        return Err(MappingError::Elsewhere);
    }
    // The same file, whatever the other's number stands for by now.
    let file = open(format!("/proc/self/fd/{}", found.as_raw_fd()), OFlags::RDWR)?;
    Ok(SharedMemory::map(file)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_from_the_engine_is_found_and_is_the_same() {
        let motor =
            crate::motor::Motor::new(&immwire::Transport::Shm, 1, crate::motor::Mode::Polled)
                .unwrap();
        let region = motor.engine().alloc(1 << 20).unwrap();
        let place = locate(region.as_ptr().addr() + 4096).unwrap();
        let mapped = open(place).unwrap();
        region.write(4096, b"here").unwrap();
        let offset = usize::try_from(place.offset).unwrap();
        let word = mapped.word(offset).unwrap().load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(&word.to_le_bytes()[..4], b"here");
    }

    #[test]
    fn other_memory_is_no_file() {
        let word = 7_u64;
        assert!(matches!(locate((&raw const word).addr()), Err(MappingError::NotAFile)));
        assert!(matches!(locate(0), Err(MappingError::NotAFile)));
        let memory = SharedMemory::create(4096, false).unwrap();
        let nobody = Place { pid: u32::MAX, ..Place::of(&memory).unwrap() };
        assert!(matches!(open(nobody), Err(MappingError::Open(_))));
    }

    /// The same numbers on another host, and in another PID namespace, whose files are strangers'.
    #[test]
    fn a_strangers_file_is_not_opened() {
        let [theirs, strange] = [(); 2].map(|()| SharedMemory::create(4096, false).unwrap());
        let (place, stranger) = (Place::of(&theirs).unwrap(), Place::of(&strange).unwrap());
        assert!(open(place).is_ok() && open(stranger).is_ok());
        let FileId { boot: [boot, _], .. } = place.file;
        let elsewhere = FileId { boot: [boot, 0], ..place.file };
        let elsewhere_too = FileId { device: u64::MAX, ..place.file };
        for place in [
            Place { file: elsewhere, ..place },
            Place { file: elsewhere_too, ..place },
            Place { fd: stranger.fd, ..place },
            Place { fd: 0, ..place },
        ] {
            assert!(matches!(open(place), Err(MappingError::Elsewhere)), "{place:?}");
        }
    }

    #[test]
    fn lines_are_read_as_the_kernel_writes_them() {
        let line = "7f00-8f00 rw-s 00001000 00:01 1234 /memfd:x (deleted)";
        assert_eq!(mapped_at(line, 0x7f10), Some((1234, 0x1010)));
        assert_eq!(mapped_at(line, 0x8f00), None);
        assert_eq!(mapped_at("nonsense", 0), None);
    }
}
