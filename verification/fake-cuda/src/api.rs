//! The calls, by the names and signatures of `cuda.h`.
//!
//! # Invariants
//!
//! 1. Nothing is changed before it is known that the call will succeed.
//! 2. Numbers of an enumeration are taken as numbers: a caller may have one that is not known here.

mod device;
mod direct;
mod gdr;
mod mapped;
mod memory;
mod work;

use crate::code::{self, Answer};
use std::ffi::c_void;

/// Where a caller wants something written: null, or room for a `T`.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Whether there is room.
    fn is_there(self) -> Answer {
        if self.0.is_null() { Err(code::INVALID_VALUE) } else { Ok(()) }
    }

    fn put(self, value: T) -> Answer {
        self.is_there()?;
        // SAFETY: not null, so room for a `T`: only callers of the C interface make a value of this type, and promise so.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }
}

/// What a caller gives to be read: null, or a `T`.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    fn get(&self) -> Answer<T> {
        if self.0.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: not null, so a `T`: only callers of the C interface make a value of this type, and promise so.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

/// Defines calls, and `find`, which has the address of each by its name.
macro_rules! calls {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the driver's names")]
            pub(super) extern "C" fn $name($($argument: $type),*) -> ::cudarc::driver::sys::CUresult {
                if $crate::world::is_forked() {
                    return $crate::code::NOT_INITIALIZED;
                }
                let body = || -> $crate::code::Answer { $body };
                match body() {
                    Ok(()) => $crate::code::SUCCESS,
                    Err(code) => code,
                }
            }
        )*

        pub(super) fn find(name: &str) -> Option<*mut ::std::ffi::c_void> {
            match name {
                $(stringify!($name) => Some($name as *mut ::std::ffi::c_void),)*
                _ => None,
            }
        }
    };
}
pub(crate) use calls;

/// No driver's: of the kernels, copies and words to be written that this process enqueues, the `nth` from now on is answered
/// `CUDA_ERROR_OUT_OF_MEMORY`, and not enqueued. 0: none.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_refuse(nth: u32) {
    crate::world::begin("immwire_fake_cuda_refuse").refused_in = nth;
}

/// No driver's: from now on this process's kernels and copies do not begin, or, 0, do again, those that were enqueued meanwhile first.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_hold(held: u32) {
    crate::stream::hold(held != 0);
}

/// No driver's: how many streams of this process are held up so.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_held_up() -> u64 {
    crate::stream::held_up()
}

/// No driver's: how much this process has that it took by hand and has to give back by hand: references of `cuMemCreate` and its like,
/// mappings of `cuMemMap`, and addresses of `cuMemAddressReserve`, each counted.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_kept() -> u64 {
    use crate::memory::Kind;
    let world = crate::world::begin("immwire_fake_cuda_kept");
    let references: u64 = world.created.values().map(|(_, count)| u64::from(*count)).sum();
    let mapped = world.memory.all().filter(|range| matches!(range.kind, Kind::Mapped { .. }));
    references + (mapped.count() + world.reserved.len()) as u64
}

/// The address of a call, by its name with or without the suffix of its version.
fn find(name: &str) -> Option<*mut c_void> {
    let one = |name: &str| {
        let parts = [device::find, memory::find, mapped::find, work::find, direct::find];
        parts.into_iter().find_map(|find| find(name))
    };
    one(&format!("{name}_v2")).or_else(|| one(name))
}
