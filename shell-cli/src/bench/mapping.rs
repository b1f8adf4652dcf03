//! The very memory that transfers go to, reached without the engine: for the baseline's copies.
//!
//! Memory of the engine's `alloc` is a file in memory. Its owner finds out which of its open files
//! that is ([`locate`]), and a process of the same user opens it through `/proc` ([`open`]). The
//! baseline then copies to the same pages as the transfer that it is compared with.

use crate::shared::{SharedError, SharedMemory};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::os::unix::fs::MetadataExt;

/// Where a piece of a process's memory is as a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The process.
    pub pid: u32,
    /// Its file.
    pub fd: u32,
    /// Where in the file.
    pub offset: u64,
}

/// Why memory cannot be reached so.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The address is not of a file in memory that is still open.
    #[error("the memory is no open file")]
    NotAFile,
    /// The file cannot be opened from here.
    #[error("the peer's memory cannot be opened: {0}")]
    Open(rustix::io::Errno),
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
    let files = std::fs::read_dir("/proc/self/fd").map_err(|_| MappingError::NotAFile)?;
    let fd = files.flatten().find_map(|file| {
        let link = std::fs::read_link(file.path()).ok()?;
        let is_memory = link.to_str()?.starts_with("/memfd:");
        let same = std::fs::metadata(file.path()).ok()?.ino() == inode;
        (is_memory && same).then(|| file.file_name().to_str()?.parse().ok())?
    });
    let fd = fd.ok_or(MappingError::NotAFile)?;
    Ok(Place { pid: std::process::id(), fd, offset })
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
/// [`MappingError`].
pub fn open(place: Place) -> Result<SharedMemory, MappingError> {
    let path = format!("/proc/{}/fd/{}", place.pid, place.fd);
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(MappingError::Open)?;
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
        let nobody = Place { pid: u32::MAX, fd: 0, offset: 0 };
        assert!(matches!(open(nobody), Err(MappingError::Open(_))));
    }

    #[test]
    fn lines_are_read_as_the_kernel_writes_them() {
        let line = "7f00-8f00 rw-s 00001000 00:01 1234 /memfd:x (deleted)";
        assert_eq!(mapped_at(line, 0x7f10), Some((1234, 0x1010)));
        assert_eq!(mapped_at(line, 0x8f00), None);
        assert_eq!(mapped_at("nonsense", 0), None);
    }
}
