//! The objects that callers hold: a C structure with its tables, and behind it what it stands for.
//!
//! The structures are never freed: a call on a closed object finds that it is closed, and says so, whatever the caller
//! did. A process opens few of them.

use core::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use libfabric_sys as sys;

use crate::lock;
use crate::log::{Rule, refuse};

/// What an object stands for.
pub(crate) trait Kind {
    /// The structure of C.
    type Fid: Copy;
    /// What it is called.
    const NAME: &str;
    /// Tells it from other memory.
    const MAGIC: u64;
}

/// The structure, in room that is the same for all kinds: what is behind it is found before the kind is known.
#[repr(C)]
union Room<F: Copy> {
    fid: F,
    size: [u64; 12],
}

#[repr(C)]
struct Object<T: Kind> {
    fid: Room<T::Fid>,
    magic: u64,
    inner: Mutex<Option<Arc<T>>>,
}

/// Makes an object.
pub(crate) fn publish<T: Kind>(fid: T::Fid, inner: T) -> *mut T::Fid {
    const { assert!(size_of::<Room<T::Fid>>() == size_of::<[u64; 12]>()) };
    let object = Object::<T> {
        fid: Room { fid },
        magic: T::MAGIC,
        inner: Mutex::new(Some(Arc::new(inner))),
    };
    // The structure's pointer, and through it all of the object.
    Box::into_raw(Box::new(object)).cast()
}

/// # Safety
///
/// `fid` is null or an object of this library.
unsafe fn inner<'a, T: Kind>(fid: *const c_void) -> Result<&'a Mutex<Option<Arc<T>>>, c_int> {
    let object = fid.cast::<Object<T>>();
    // SAFETY: null, or an object that `publish` made and nobody frees. Of another kind, it has its number in the same place.
    if object.is_null() || unsafe { (*object).magic } != T::MAGIC {
        return Err(refuse(Rule::Closed, sys::FI_EINVAL, &format!("no {}", T::NAME)));
    }
    // SAFETY: as before, and it is of this kind.
    Ok(unsafe { &(*object).inner })
}

/// Returns what an open object stands for, or an error, negated.
///
/// # Safety
///
/// `fid` is null or an object of this library.
pub(crate) unsafe fn find<T: Kind>(fid: *const c_void) -> Result<Arc<T>, c_int> {
    // SAFETY: the caller's promise.
    let open = lock(unsafe { inner::<T>(fid) }?).clone();
    open.ok_or_else(|| {
        refuse(Rule::Closed, sys::FI_EINVAL, &format!("a {} was used after its close", T::NAME))
    })
}

/// Closes an object: from now on it stands for nothing.
///
/// # Safety
///
/// `fid` is null or an object of this library.
pub(crate) unsafe fn close<T: Kind>(fid: *const c_void) -> Result<Arc<T>, c_int> {
    // SAFETY: the caller's promise.
    let taken = lock(unsafe { inner::<T>(fid) }?).take();
    taken.ok_or_else(|| {
        refuse(Rule::Closed, sys::FI_EINVAL, &format!("a {} was closed twice", T::NAME))
    })
}

/// Returns the head of an object.
pub(crate) fn head(class: usize, context: *mut c_void, ops: &'static sys::fi_ops) -> sys::fid {
    sys::fid { fclass: class, context, ops: table(ops) }
}

/// Returns a table as C has it.
pub(crate) fn table<T>(ops: &'static T) -> *mut T {
    std::ptr::from_ref(ops).cast_mut()
}

/// The number that C expects for a result.
pub(crate) fn number(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// The same, for calls of the data path.
pub(crate) fn long(result: Result<(), c_int>) -> isize {
    number(result) as isize
}
