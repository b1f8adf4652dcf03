//! Finds a libfabric and loads it: where it is looked for, in which order, and which version of its interface is used.
//!
//! Knows the loader (`dlopen`, `dlvsym`) and six symbols. What the library can do is for others to ask it.
//!
//! # Invariants
//!
//! 1. Interface version `FABRIC_1.3` (libfabric 1.9) is bound: every later library still has it, and with it the
//!    structures of [`crate::abi`]. A library without symbol versions is taken by plain names: it allocates its
//!    structures itself, and they only grow. One that says that it is older is refused, whatever names it has.
//! 2. A library is loaded with `RTLD_NOW | RTLD_LOCAL` and never unloaded, and each one has one [`Library`], however often
//!    it is asked for.
//! 3. If the environment names a library, no other is tried.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::fmt;
use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::abi::{
    Dupinfo, Fabric, Freeinfo, GetVersion, Getinfo, Strerror, fi_fabric_attr, fi_info, fid_fabric,
};

/// The environment variable that names the library to load: a path, or a name for the loader.
pub const ENVIRONMENT: &str = "IMMWIRE_LIBFABRIC";

const SONAME: &CStr = c"libfabric.so.1";

/// Where AWS's installer puts the libfabric that knows EFA.
const EFA: [&CStr; 2] =
    [c"/opt/amazon/efa/lib/libfabric.so.1", c"/opt/amazon/efa/lib64/libfabric.so.1"];

/// A loaded libfabric: the functions that are symbols. Lives as long as the process.
#[derive(Debug)]
pub struct Library {
    /// What `dlopen` returned; tells libraries apart.
    handle: usize,
    path: PathBuf,
    getinfo: Getinfo,
    freeinfo: Freeinfo,
    dupinfo: Dupinfo,
    fabric: Fabric,
    version: GetVersion,
    strerror: Strerror,
}

/// The first that has the interface that is bound.
const OLDEST: Version = Version { major: 1, minor: 9 };

/// A version, ordered; of libfabric, or of its API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Changes when users break.
    pub major: u16,
    /// Changes when something is added.
    pub minor: u16,
}

impl Version {
    /// The number that `fi_getinfo` takes for this version of the API.
    #[must_use]
    pub const fn code(self) -> u32 {
        crate::abi::FI_VERSION(self.major as u32, self.minor as u32)
    }

    /// The version of a number as `fi_version`, or an attribute, has it.
    #[must_use]
    pub const fn of(code: u32) -> Version {
        let [major_high, major_low, minor_high, minor_low] = code.to_be_bytes();
        Version {
            major: u16::from_be_bytes([major_high, major_low]),
            minor: u16::from_be_bytes([minor_high, minor_low]),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why there is no libfabric: what was tried, in order. Nothing else was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError {
    /// Each place, and what was wrong with it.
    pub tried: Vec<Tried>,
}

/// One place where a libfabric was looked for, in vain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// What the loader was asked for.
    pub place: OsString,
    /// What it said, or which symbol the library lacks, or how old it is.
    pub why: String,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no libfabric could be loaded: install libfabric (1.9 or later), or set ")?;
        write!(f, "{ENVIRONMENT} to the path of its libfabric.so.1; tried")?;
        for (n, Tried { place, why }) in self.tried.iter().enumerate() {
            let separator = if n == 0 { ":" } else { ";" };
            write!(f, "{separator} {}: {why}", place.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for LoadError {}

/// Every library that was loaded. Held while loading, so that each is loaded once.
static LOADED: Mutex<Vec<&'static Library>> = Mutex::new(Vec::new());

/// The one that [`Library::load`] found.
static FOUND: Mutex<Option<&'static Library>> = Mutex::new(None);

impl Library {
    /// The libfabric to use: the one that the environment names (see [`ENVIRONMENT`]); else one that this process has
    /// already loaded, for two copies would know nothing of each other; else AWS's; else the one that the loader
    /// finds. The first call that succeeds decides for the process; one that fails may be repeated.
    ///
    /// Loading runs the library's initialisers: a few ms. The first `getinfo` probes devices, and takes up to 0.4 s.
    ///
    /// # Errors
    ///
    /// [`LoadError`], if no place has a library with all six symbols.
    pub fn load() -> Result<&'static Library, LoadError> {
        let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = *found {
            return Ok(library);
        }
        let library = match env::var_os(ENVIRONMENT) {
            Some(path) if !path.is_empty() => Library::load_from(&path)?,
            _ => Library::search()?,
        };
        *found = Some(library);
        Ok(library)
    }

    /// The library at `path`; without a slash, the one of that name that the loader finds. Several may be loaded side
    /// by side; asking for one again returns the same.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with this one place: the loader refused it, a symbol is missing, or it is too old.
    pub fn load_from(path: impl AsRef<OsStr>) -> Result<&'static Library, LoadError> {
        let place = path.as_ref();
        let opened = match CString::new(place.as_bytes()) {
            Ok(path) => Library::open(&path, 0),
            Err(_) => Err("a path holds no NUL byte".to_owned()),
        };
        opened.map_err(|why| LoadError { tried: vec![Tried { place: place.to_owned(), why }] })
    }

    fn search() -> Result<&'static Library, LoadError> {
        let places = [(SONAME, libc::RTLD_NOLOAD), (EFA[0], 0), (EFA[1], 0), (SONAME, 0)];
        let mut tried = Vec::new();
        for (place, flag) in places {
            match Library::open(place, flag) {
                Ok(library) => return Ok(library),
                Err(why) => {
                    let place = OsStr::from_bytes(place.to_bytes()).to_owned();
                    tried.push(Tried { place, why });
                }
            }
        }
        Err(LoadError { tried })
    }

    fn open(path: &CStr, flag: c_int) -> Result<&'static Library, String> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: per dlopen(3), `path` is a C string. The library's initialisers run: that it may is what asking for it
        // means.
        let handle = keeping_signals(|| unsafe {
            libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | flag)
        });
        if handle.is_null() {
            let said = said().unwrap_or_else(|| "not loaded in this process".to_owned());
            // It mostly begins with the place, which whoever reads this has just read.
            let place = format!("{}: ", path.to_string_lossy());
            return Err(said.strip_prefix(&place).unwrap_or(&said).to_owned());
        }
        if let Some(&library) = loaded.iter().find(|library| library.handle == handle as usize) {
            return Ok(library);
        }
        let library = Box::leak(Box::new(Library::bind(handle, path)?));
        loaded.push(library);
        Ok(library)
    }

    fn bind(handle: *mut c_void, path: &CStr) -> Result<Library, String> {
        let find = |name: &CStr, version: &CStr| {
            symbol(handle, name, version).ok_or_else(|| format!("lacks {}", name.to_string_lossy()))
        };
        let getinfo = find(c"fi_getinfo", c"FABRIC_1.3")?;
        let freeinfo = find(c"fi_freeinfo", c"FABRIC_1.3")?;
        let dupinfo = find(c"fi_dupinfo", c"FABRIC_1.3")?;
        let fabric = find(c"fi_fabric", c"FABRIC_1.1")?;
        let version = find(c"fi_version", c"FABRIC_1.0")?;
        let strerror = find(c"fi_strerror", c"FABRIC_1.0")?;
        // SAFETY: each is the address of the function of that name, of the version that has the type it is given here
        // (<rdma/fabric.h>, fi_getinfo(3), fi_fabric(3), fi_version(3), fi_errno(3)), in a library that stays loaded.
        let library = unsafe {
            Library {
                handle: handle as usize,
                path: file_of(version).unwrap_or_else(|| OsStr::from_bytes(path.to_bytes()).into()),
                getinfo: core::mem::transmute::<*mut c_void, Getinfo>(getinfo),
                freeinfo: core::mem::transmute::<*mut c_void, Freeinfo>(freeinfo),
                dupinfo: core::mem::transmute::<*mut c_void, Dupinfo>(dupinfo),
                fabric: core::mem::transmute::<*mut c_void, Fabric>(fabric),
                version: core::mem::transmute::<*mut c_void, GetVersion>(version),
                strerror: core::mem::transmute::<*mut c_void, Strerror>(strerror),
            }
        };
        let version = library.version();
        if version < OLDEST {
            return Err(format!("is libfabric {version}; {OLDEST} is needed"));
        }
        Ok(library)
    }

    /// The file it was loaded from.
    #[must_use]
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// The version that the library says it is.
    #[must_use]
    pub fn version(&self) -> Version {
        // SAFETY: per fi_version(3) it takes nothing, and may be called at any time.
        Version::of(unsafe { (self.version)() })
    }

    /// What `errnum` means: a positive `FI_E*`, in the library's words.
    #[must_use]
    pub fn strerror(&self, errnum: c_int) -> String {
        // SAFETY: per fi_errno(3) any number may be asked for, and the answer is a C string that stays.
        unsafe {
            let text = (self.strerror)(errnum);
            if text.is_null() {
                return format!("error {errnum}");
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }

    /// `fi_getinfo`: a list in `info`, or an error, negated. fi_getinfo(3).
    ///
    /// # Safety
    ///
    /// `node` and `service` are null or C strings; `hints` is null, or from this library's [`Library::dupinfo`] and filled
    /// in with pointers that `malloc` gave or that are null; `info` is valid for a write.
    pub unsafe fn getinfo(
        &self,
        version: u32,
        node: *const c_char,
        service: *const c_char,
        flags: u64,
        hints: *const fi_info,
        info: *mut *mut fi_info,
    ) -> c_int {
        // The first call starts the providers, of which some take signals, as some libraries do when they are loaded.
        // SAFETY: the caller's promises are those that fi_getinfo(3) asks for.
        keeping_signals(|| unsafe { (self.getinfo)(version, node, service, flags, hints, info) })
    }

    /// `fi_dupinfo`: a copy of one `fi_info`, or of none: an empty one. Null if memory is out. fi_getinfo(3).
    ///
    /// # Safety
    ///
    /// `info` is null, or an `fi_info` of this library's that was not freed.
    #[must_use]
    pub unsafe fn dupinfo(&self, info: *const fi_info) -> *mut fi_info {
        // SAFETY: the caller's promise is the one that fi_getinfo(3) asks for.
        unsafe { (self.dupinfo)(info) }
    }

    /// `fi_freeinfo`: frees a whole list, with all that its pointers lead to. fi_getinfo(3).
    ///
    /// # Safety
    ///
    /// `info` is the first of a list of this library's, and not used any more; strings that were put into it are from
    /// `malloc`.
    pub unsafe fn freeinfo(&self, info: *mut fi_info) {
        // SAFETY: the caller's promise is the one that fi_getinfo(3) asks for.
        unsafe { (self.freeinfo)(info) }
    }

    /// `fi_fabric`: opens a fabric, or returns an error, negated. fi_fabric(3).
    ///
    /// # Safety
    ///
    /// `attr` is the `fabric_attr` of an `fi_info` of this library's; `fabric` is valid for a write.
    pub unsafe fn fabric(
        &self,
        attr: *mut fi_fabric_attr,
        fabric: *mut *mut fid_fabric,
        context: *mut c_void,
    ) -> c_int {
        // SAFETY: the caller's promises are those that fi_fabric(3) asks for.
        unsafe { (self.fabric)(attr, fabric, context) }
    }
}

/// The highest signal number, by signal(7).
const SIGNALS: c_int = 64;

/// Runs `load`, and sees to it that signals are handled afterwards as before: libraries that providers need (Debian's
/// `libinfinipath`) take SIGINT, SIGTERM, SIGSEGV and others when they are loaded, and end the process in their own way.
fn keeping_signals<T>(load: impl FnOnce() -> T) -> T {
    // SAFETY: per sigaction(2): what is written is a local, all zero is a value of its type, and what is put back is what
    // was there a moment ago. Numbers that cannot be asked for are refused, and left alone.
    let action = |signal| unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        (libc::sigaction(signal, core::ptr::null(), &raw mut action) == 0).then_some(action)
    };
    let before: Vec<_> = (1..=SIGNALS).map(|signal| (signal, action(signal))).collect();
    let result = load();
    for (signal, before) in before {
        let (Some(before), Some(now)) = (before, action(signal)) else { continue };
        if before.sa_sigaction != now.sa_sigaction {
            // SAFETY: as above; the handler is the one that whoever set it still expects to be there.
            unsafe { libc::sigaction(signal, &raw const before, core::ptr::null_mut()) };
        }
    }
    result
}

/// The address of `name`, of `version` if the library has versions.
fn symbol(handle: *mut c_void, name: &CStr, version: &CStr) -> Option<*mut c_void> {
    // SAFETY: per dlvsym(3) and dlsym(3): `handle` is a library's that is never closed, the names are C strings.
    let address = unsafe {
        let versioned = libc::dlvsym(handle, name.as_ptr(), version.as_ptr());
        if versioned.is_null() { libc::dlsym(handle, name.as_ptr()) } else { versioned }
    };
    (!address.is_null()).then_some(address)
}

/// What the loader said last, in this thread.
fn said() -> Option<String> {
    // SAFETY: per dlerror(3) the answer is null, or a C string that stays until this thread's next call of the loader.
    unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}

/// The file that holds the code at `address`.
fn file_of(address: *mut c_void) -> Option<PathBuf> {
    // SAFETY: per dladdr(3): any address may be asked for, `about` is a local, all zero is a value of its type, and if the
    // answer is not zero, its file name is a C string that stays as long as the library, which is never closed.
    unsafe {
        let mut about: libc::Dl_info = core::mem::zeroed();
        if libc::dladdr(address, &raw mut about) == 0 || about.dli_fname.is_null() {
            return None;
        }
        Some(OsStr::from_bytes(CStr::from_ptr(about.dli_fname).to_bytes()).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_as_the_library_counts_them() {
        let version = Version { major: 1, minor: 20 };
        assert_eq!(version.code(), 0x0001_0014);
        assert_eq!(Version::of(0x0002_0005), Version { major: 2, minor: 5 });
        assert_eq!(Version::of(version.code()), version);
        assert!(
            Version { major: 2, minor: 0 } > version && version > Version { major: 1, minor: 9 }
        );
        assert_eq!(version.to_string(), "1.20");
    }

    #[test]
    fn an_error_names_each_place_and_its_fault() {
        let tried = |place: &str, why: &str| Tried { place: place.into(), why: why.into() };
        let error = LoadError {
            tried: vec![tried("/a", "is not there"), tried("b.so", "lacks fi_fabric")],
        };
        let text = error.to_string();
        assert!(text.ends_with("tried: /a: is not there; b.so: lacks fi_fabric"), "{text}");
    }
}
