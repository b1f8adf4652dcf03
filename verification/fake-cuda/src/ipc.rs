//! Handles by which another process opens memory of `cuMemAlloc`: whose it is, under which file descriptor there, and the
//! file's inode, as descriptors are used again.

use cudarc::driver::sys::CUipcMemHandle;
use std::ffi::c_char;

/// In front of every handle.
const MARK: u64 = u64::from_le_bytes(*b"fakecuda");

/// What a handle says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) process: u32,
    pub(crate) descriptor: u32,
    pub(crate) inode: u64,
}

impl Named {
    pub(crate) fn write(self) -> CUipcMemHandle {
        let place = u64::from(self.process) << 32 | u64::from(self.descriptor);
        let words = [MARK, place, self.inode].map(u64::to_le_bytes);
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        for (to, from) in handle.reserved.iter_mut().zip(words.as_flattened()) {
            *to = from.cast_signed();
        }
        handle
    }

    /// `None`: no handle of ours.
    pub(crate) fn read(handle: &CUipcMemHandle) -> Option<Self> {
        let bytes = handle.reserved.map(c_char::cast_unsigned);
        let words: &[[u8; 8]] = bytes.as_chunks().0;
        let &[mark, place, inode, ref rest @ ..] = words else { return None };
        let [mark, place, inode] = [mark, place, inode].map(u64::from_le_bytes);
        if mark != MARK || rest.as_flattened().iter().any(|&byte| byte != 0) {
            return None;
        }
        let half = |word: u64| u32::try_from(word & u64::from(u32::MAX)).ok();
        Some(Self { process: half(place >> 32)?, descriptor: half(place)?, inode })
    }
}

#[cfg(test)]
mod tests {
    use super::Named;

    #[test]
    fn a_handle_says_what_was_written() {
        let named = Named { process: 77, descriptor: u32::MAX, inode: 1 << 60 | 5 };
        let handle = named.write();
        assert_eq!(Named::read(&handle), Some(named));
        for byte in [0, 7, 24, 63] {
            let mut damaged = handle;
            damaged.reserved[byte] ^= 1;
            assert_eq!(Named::read(&damaged), None, "byte {byte}");
        }
    }
}
