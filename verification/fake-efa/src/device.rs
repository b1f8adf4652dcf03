//! A GPU's memory: reached through `verification/fake-cuda`, whose DMA-BUFs this model takes.
//!
//! That library is found where the program has loaded it as its driver. With NVIDIA's there is none of this: a model in
//! software reaches no GPU.

use core::ffi::{c_int, c_void};
use std::ffi::CStr;
use std::sync::OnceLock;

/// What `fake-cuda` has for models of NICs (its `nic.rs`).
#[derive(Debug)]
struct Calls {
    import: extern "C" fn(c_int) -> u64,
    release: extern "C" fn(u64),
    write: extern "C" fn(u64, u64, *const u8, u64) -> c_int,
    read: extern "C" fn(u64, u64, *mut u8, u64) -> c_int,
}

/// # Safety
///
/// `F` is the type of the function of this name.
unsafe fn find<F: Copy>(library: *mut c_void, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the library is loaded, and stays so.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    // SAFETY: not null, so the function, by the caller's promise; of a pointer's size.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}

fn calls() -> Option<&'static Calls> {
    static CALLS: OnceLock<Option<Calls>> = OnceLock::new();
    let load = || {
        let flags = libc::RTLD_NOLOAD | libc::RTLD_LAZY;
        // SAFETY: finds what is loaded, and loads nothing.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), flags) };
        if library.is_null() {
            return None;
        }
        // SAFETY: their types are those of `nic.rs`.
        unsafe {
            Some(Calls {
                import: find(library, c"immwire_fake_cuda_import")?,
                release: find(library, c"immwire_fake_cuda_release")?,
                write: find(library, c"immwire_fake_cuda_nic_write")?,
                read: find(library, c"immwire_fake_cuda_nic_read")?,
            })
        }
    };
    CALLS.get_or_init(load).as_ref()
}

/// A part of a DMA-BUF, imported.
#[derive(Debug)]
pub(crate) struct DmaBuf {
    calls: &'static Calls,
    handle: u64,
    offset: u64,
}

impl DmaBuf {
    /// `None`: the file is none of a GPU that this model reaches.
    pub(crate) fn import(file: c_int, offset: u64) -> Option<Self> {
        let calls = calls()?;
        let handle = (calls.import)(file);
        (handle != 0).then_some(Self { calls, handle, offset })
    }

    /// Writes `bytes`, from the part's byte `at` on. `false`: some of them lie outside.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> bool {
        let at = self.offset.saturating_add(at);
        (self.calls.write)(self.handle, at, bytes.as_ptr(), bytes.len() as u64) != 0
    }

    /// Reads into all of `bytes`, from the part's byte `at` on. `false`: some of them lie outside.
    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) -> bool {
        let at = self.offset.saturating_add(at);
        (self.calls.read)(self.handle, at, bytes.as_mut_ptr(), bytes.len() as u64) != 0
    }
}

impl Drop for DmaBuf {
    fn drop(&mut self) {
        (self.calls.release)(self.handle);
    }
}
