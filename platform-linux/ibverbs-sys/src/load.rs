//! Finding libibverbs, loading it, and its symbols.
//!
//! # Invariants
//!
//! - A library that was loaded stays, and so do its functions.
//! - Loading happens once; what it found is the same for the whole process.

use std::env;
use std::ffi::{CStr, CString, OsString, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use crate::abi::{Symbols, ibv_wc_status};

/// The environment variable that names the library to load: a path, or a name for the loader.
pub const ENVIRONMENT: &str = "IMMWIRE_LIBIBVERBS";

const SONAME: &CStr = c"libibverbs.so.1";

/// A loaded libibverbs. Lives as long as the process.
#[derive(Debug)]
pub struct Library {
    /// Its functions.
    pub symbols: Symbols,
}

/// Why there is no libibverbs: what was tried. Nothing else was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError {
    /// The place, and what was wrong with it.
    pub tried: Tried,
}

/// Where a libibverbs was looked for, in vain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// What the loader was asked for.
    pub place: OsString,
    /// What it said, or which symbol the library lacks.
    pub why: String,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tried { place, why } = &self.tried;
        write!(
            f,
            "no libibverbs could be loaded: install rdma-core's libibverbs (32 or later), or set {ENVIRONMENT} to the \
             path of its libibverbs.so.1; tried {}: {why}",
            place.display()
        )
    }
}

impl std::error::Error for LoadError {}

/// The library, once it was loaded. Held while loading, so that that happens once.
static LOADED: Mutex<Option<&'static Library>> = Mutex::new(None);

impl Library {
    /// The libibverbs that the environment names (see [`ENVIRONMENT`]), or that the loader finds. The first call that
    /// succeeds decides for the process; one that fails may be repeated. A few ms.
    ///
    /// # Errors
    ///
    /// [`LoadError`], if there is none, or it lacks a symbol: then it is older than rdma-core 32 (2020).
    pub fn load() -> Result<&'static Library, LoadError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = *loaded {
            return Ok(library);
        }
        let named = env::var_os(ENVIRONMENT).filter(|path| !path.is_empty());
        let place = named.unwrap_or_else(|| SONAME.to_string_lossy().into_owned().into());
        let opened = match CString::new(place.as_bytes()) {
            Ok(path) => Library::open(&path),
            Err(_) => Err("a path holds no NUL byte".to_owned()),
        };
        let library = opened.map_err(|why| LoadError { tried: Tried { place, why } })?;
        *loaded = Some(library);
        Ok(library)
    }

    fn open(path: &CStr) -> Result<&'static Library, String> {
        // SAFETY: per dlopen(3), `path` is a C string. The library's initialisers run: that it may is what asking for it
        // means.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(said().unwrap_or_else(|| "refused".to_owned()));
        }
        let find = |name: &'static CStr, version: &'static CStr| {
            symbol(handle, name, version).ok_or_else(|| format!("lacks {}", name.to_string_lossy()))
        };
        // SAFETY: the handle is never closed, and a versioned symbol is the function of that name and version.
        let symbols = unsafe { Symbols::bind(find) }?;
        Ok(Box::leak(Box::new(Library { symbols })))
    }

    /// What a completion's status means, in the library's words.
    #[must_use]
    pub fn status_text(&self, status: ibv_wc_status) -> String {
        // SAFETY: any number may be asked for, and the answer is a C string that stays.
        unsafe {
            let text = (self.symbols.ibv_wc_status_str)(status);
            if text.is_null() {
                return format!("status {status}");
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

/// The address of `name`, of `version` if the library has versions.
fn symbol(handle: *mut c_void, name: &CStr, version: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: per dlvsym(3) and dlsym(3): `handle` is a library's that is never closed, the names are C strings.
    unsafe {
        let versioned = NonNull::new(libc::dlvsym(handle, name.as_ptr(), version.as_ptr()));
        versioned.or_else(|| NonNull::new(libc::dlsym(handle, name.as_ptr())))
    }
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
    fn what_is_no_libibverbs_is_said_to_be_none() {
        let absent = Library::open(c"/nonexistent/libibverbs.so.1").unwrap_err();
        assert!(absent.contains("/nonexistent/libibverbs.so.1"), "{absent}");
        // A library that is there, and another.
        let other = Library::open(c"libc.so.6").unwrap_err();
        assert_eq!(other, "lacks ibv_fork_init");
        let error = LoadError { tried: Tried { place: "/l".into(), why: other } };
        let text = error.to_string();
        assert!(text.ends_with("tried /l: lacks ibv_fork_init"), "{text}");
    }
}
