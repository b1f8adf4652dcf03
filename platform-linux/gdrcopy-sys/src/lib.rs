//! GDRCopy's libgdrapi from Rust: what it takes to have a GPU's memory mapped for the CPU, found and loaded at run time.
//!
//! Nothing is linked, and nothing of GDRCopy is needed to build. That there is the library says nothing of its kernel module,
//! gdrdrv: without that, `gdr_open` returns null.
//!
//! This crate knows C types and calling conventions, and nothing of what is done with them: no handle is owned, nothing is
//! unmapped, no error is interpreted.
//!
//! # Invariants
//!
//! 1. Types and signatures are those of `gdrapi.h` of version 2, read from its repository (2.5). Debian and PyPI have no such
//!    header, so that no compiler compares them here; sizes and offsets are fixed below as C lays them out.
//! 2. [`gdr_info_v2`] is what callers allocate and the library fills in: it has room for more than 2.5 writes.
//! 3. A library is never unloaded.

#![allow(non_camel_case_types, reason = "the library's names")]

use core::ffi::{c_int, c_ulong, c_void};
use std::env;
use std::ffi::{CStr, CString, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, PoisonError};

/// The environment variable that names the library to load: a path, or a name for the loader.
pub const ENVIRONMENT: &str = "IMMWIRE_GDRAPI";

const SONAME: &CStr = c"libgdrapi.so.2";

/// What a GPU's memory is pinned in multiples of, and where they begin.
pub const GPU_PAGE_SIZE: usize = 1 << 16;

/// An opened driver: `gdr_t`.
#[repr(C)]
#[derive(Debug)]
pub struct gdr {
    _opaque: [u8; 0],
}

/// Pinned memory. Passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct gdr_mh_t {
    /// The library's own.
    pub h: c_ulong,
}

/// What became of pinned memory: `gdr_get_info_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct gdr_info_v2 {
    /// What the mapping's first byte is to the GPU: at or before what was asked for.
    pub va: u64,
    /// Bytes that can be mapped.
    pub mapped_size: u64,
    /// Of the GPU's pages.
    pub page_size: u32,
    _tm_cycles: u64,
    _cycles_per_ms: u32,
    /// `mapped`, then `wc_mapping`: one bit each.
    _bits: u32,
    _mapping_type: u32,
    /// For versions to come.
    _room: [u64; 8],
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<gdr_mh_t>() == size_of::<c_ulong>());
    assert!(offset_of!(gdr_info_v2, mapped_size) == 8);
    assert!(offset_of!(gdr_info_v2, page_size) == 16);
    assert!(offset_of!(gdr_info_v2, _tm_cycles) == 24);
    assert!(offset_of!(gdr_info_v2, _cycles_per_ms) == 32);
    assert!(offset_of!(gdr_info_v2, _bits) == 36);
    assert!(offset_of!(gdr_info_v2, _mapping_type) == 40);
    assert!(offset_of!(gdr_info_v2, _room) == 48);
};

/// The functions of a loaded libgdrapi, under their C names. Those that answer a number answer 0, or an `errno`.
#[derive(Debug, Clone, Copy)]
pub struct Symbols {
    /// Opens the kernel module's device; null if there is none, or no leave.
    pub gdr_open: unsafe extern "C" fn() -> *mut gdr,
    /// Closes it. What was pinned with it is unpinned.
    pub gdr_close: unsafe extern "C" fn(g: *mut gdr) -> c_int,
    /// Pins `size` bytes of a GPU's memory from `addr`; both multiples of [`GPU_PAGE_SIZE`]. The token and space are 0.
    pub gdr_pin_buffer: unsafe extern "C" fn(
        g: *mut gdr,
        addr: c_ulong,
        size: usize,
        p2p_token: u64,
        va_space: u32,
        handle: *mut gdr_mh_t,
    ) -> c_int,
    /// Undoes [`Symbols::gdr_pin_buffer`]; what is mapped is to be unmapped before.
    pub gdr_unpin_buffer: unsafe extern "C" fn(g: *mut gdr, handle: gdr_mh_t) -> c_int,
    /// Says what was pinned.
    pub gdr_get_info_v2:
        unsafe extern "C" fn(g: *mut gdr, handle: gdr_mh_t, info: *mut gdr_info_v2) -> c_int,
    /// Maps `size` bytes of it for the CPU.
    pub gdr_map: unsafe extern "C" fn(
        g: *mut gdr,
        handle: gdr_mh_t,
        va: *mut *mut c_void,
        size: usize,
    ) -> c_int,
    /// Undoes [`Symbols::gdr_map`].
    pub gdr_unmap:
        unsafe extern "C" fn(g: *mut gdr, handle: gdr_mh_t, va: *mut c_void, size: usize) -> c_int,
    /// The library's version.
    pub gdr_runtime_get_version: unsafe extern "C" fn(major: *mut c_int, minor: *mut c_int),
}

/// A loaded libgdrapi. Lives as long as the process.
#[derive(Debug)]
pub struct Library {
    /// Its functions.
    pub symbols: Symbols,
    /// Its version.
    pub version: (c_int, c_int),
}

/// Why there is no libgdrapi: what was tried. Nothing else was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError {
    /// What the loader was asked for.
    pub place: OsString,
    /// What it said, or what is the matter with the library.
    pub why: String,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.place.display();
        write!(
            f,
            "no libgdrapi could be loaded: tried {place} ({ENVIRONMENT} names another): {}",
            self.why
        )
    }
}

impl std::error::Error for LoadError {}

/// The library, once it was loaded. Held while loading, so that that happens once.
static LOADED: Mutex<Option<&'static Library>> = Mutex::new(None);

impl Library {
    /// The libgdrapi that the environment names (see [`ENVIRONMENT`]), or that the loader finds. The first call that succeeds
    /// decides for the process; one that fails may be repeated.
    ///
    /// # Errors
    ///
    /// [`LoadError`], if there is none, or it is not of version 2.
    pub fn load() -> Result<&'static Self, LoadError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = *loaded {
            return Ok(library);
        }
        let named = env::var_os(ENVIRONMENT).filter(|path| !path.is_empty());
        let place = named.unwrap_or_else(|| SONAME.to_string_lossy().into_owned().into());
        let opened = match CString::new(place.as_bytes()) {
            Ok(path) => Self::open(&path),
            Err(_) => Err("a path holds no NUL byte".to_owned()),
        };
        let library = opened.map_err(|why| LoadError { place, why })?;
        *loaded = Some(library);
        Ok(library)
    }

    fn open(path: &CStr) -> Result<&'static Self, String> {
        // SAFETY: per dlopen(3), `path` is a C string. The library's initialisers run: that it may is what asking for it
        // means.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(said().unwrap_or_else(|| "refused".to_owned()));
        }
        // SAFETY: the handle is never closed; each is the function of that name, as `gdrapi.h` declares it.
        let symbols = unsafe {
            Symbols {
                gdr_open: find(handle, c"gdr_open")?,
                gdr_close: find(handle, c"gdr_close")?,
                gdr_pin_buffer: find(handle, c"gdr_pin_buffer")?,
                gdr_unpin_buffer: find(handle, c"gdr_unpin_buffer")?,
                gdr_get_info_v2: find(handle, c"gdr_get_info_v2")?,
                gdr_map: find(handle, c"gdr_map")?,
                gdr_unmap: find(handle, c"gdr_unmap")?,
                gdr_runtime_get_version: find(handle, c"gdr_runtime_get_version")?,
            }
        };
        let mut version = (0, 0);
        // SAFETY: writes the two numbers.
        unsafe { (symbols.gdr_runtime_get_version)(&raw mut version.0, &raw mut version.1) };
        if version.0 != 2 {
            return Err(format!("it is of version {}.{}, not 2", version.0, version.1));
        }
        Ok(Box::leak(Box::new(Self { symbols, version })))
    }
}

/// # Safety
///
/// `handle` is a library's that is never closed, and `F` the type of its function of this name.
unsafe fn find<F: Copy>(handle: *mut c_void, name: &CStr) -> Result<F, String> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: per dlsym(3): a handle, and a C string.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if found.is_null() {
        return Err(format!("lacks {}", name.to_string_lossy()));
    }
    // SAFETY: not null, so the function, of that type by the caller's promise; pointers to data and to code are of one size.
    Ok(unsafe { core::mem::transmute_copy(&found) })
}

/// What the loader said last, in this thread.
fn said() -> Option<String> {
    // SAFETY: per dlerror(3) the answer is null, or a C string that stays until this thread's next call of the loader.
    unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_libgdrapi_is_said_to_be_none() {
        let absent = Library::open(c"/nonexistent/libgdrapi.so.2").unwrap_err();
        assert!(absent.contains("/nonexistent/libgdrapi.so.2"), "{absent}");
        let other = Library::open(c"libc.so.6").unwrap_err();
        assert_eq!(other, "lacks gdr_open");
        let text = LoadError { place: "/l".into(), why: other }.to_string();
        assert!(text.contains("/l") && text.ends_with("lacks gdr_open"), "{text}");
    }
}
