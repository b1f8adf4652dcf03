//! The twin of `shm/copy.rs`: it notes what was copied.

/// # Safety
///
/// None is needed: no byte is touched.
pub unsafe fn copy(src: *const u8, dst: *mut u8, len: usize, _: usize) {
    if len > 0 {
        crate::segment::put(src, dst);
    }
}
