//! GDRCopy's library, by the names and signatures of `gdrapi.h` 2.5: what it maps for the CPU is memory of the stand-in.
//!
//! No driver's: programs are told of it as libgdrapi (`IMMWIRE_GDRAPI`). Answers are `errno`s.

use crate::config;
use crate::memory::{Kind, Range, size};
use crate::violation::broken;
use crate::world::world;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const INVALID: c_int = 22;
/// What is pinned begins and ends at multiples of it.
const PAGE: u64 = 1 << 16;

/// Pinned memory.
struct Pin {
    range: Arc<Range>,
    start: u64,
    bytes: u64,
    is_mapped: bool,
}

static PINS: Mutex<BTreeMap<u64, Pin>> = Mutex::new(BTreeMap::new());

fn pins() -> MutexGuard<'static, BTreeMap<u64, Pin>> {
    PINS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `gdr_info_v2_t`.
#[repr(C)]
pub(crate) struct Info {
    va: u64,
    mapped_size: u64,
    page_size: u32,
    tm_cycles: u64,
    cycles_per_ms: u32,
    bits: u32,
    mapping_type: u32,
}

/// Null where there is no kernel module.
#[unsafe(no_mangle)]
extern "C" fn gdr_open() -> *mut c_void {
    static OPEN: u8 = 0;
    let there = config::get().is_ok_and(|config| config.gdrdrv);
    if there { (&raw const OPEN).cast_mut().cast() } else { std::ptr::null_mut() }
}

#[unsafe(no_mangle)]
extern "C" fn gdr_close(_g: *mut c_void) -> c_int {
    0
}

/// Only of memory that was allocated whole, and whose copies complete.
#[unsafe(no_mangle)]
extern "C" fn gdr_pin_buffer(
    g: *mut c_void,
    address: u64,
    bytes: usize,
    token: u64,
    space: u32,
    handle: *mut u64,
) -> c_int {
    static MADE: AtomicU64 = AtomicU64::new(1);
    let bytes = bytes as u64;
    let whole = bytes > 0 && address.is_multiple_of(PAGE) && bytes.is_multiple_of(PAGE);
    if g.is_null() || handle.is_null() || !whole || (token, space) != (0, 0) {
        return INVALID;
    }
    let world = world();
    let there = world.memory.at(address).filter(|range| address + bytes <= range.end());
    let Some(range) = there.filter(|range| matches!(range.kind, Kind::Allocated { .. })) else {
        return INVALID;
    };
    if !range.synchronous.load(Ordering::Relaxed) {
        broken!(NotSynchronous, "gdr_pin_buffer: {range}");
    }
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let pin = Pin { range: Arc::clone(range), start: address, bytes, is_mapped: false };
    pins().insert(number, pin);
    // SAFETY: not null, so room for a handle: the caller's promise.
    unsafe { handle.write(number) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn gdr_unpin_buffer(_g: *mut c_void, handle: u64) -> c_int {
    match pins().remove(&handle) {
        None => broken!(Handle, "gdr_unpin_buffer {handle}"),
        Some(Pin { is_mapped: true, start, .. }) => {
            broken!(MemoryInUse, "gdr_unpin_buffer of {start:#x}, which is mapped")
        }
        Some(_) => 0,
    }
}

#[unsafe(no_mangle)]
extern "C" fn gdr_get_info_v2(_g: *mut c_void, handle: u64, info: *mut Info) -> c_int {
    let pins = pins();
    let (Some(pin), false) = (pins.get(&handle), info.is_null()) else { return INVALID };
    let (page_size, bits) = (1 << 16, u32::from(pin.is_mapped));
    let told = Info {
        va: pin.start,
        mapped_size: pin.bytes,
        page_size,
        tm_cycles: 0,
        cycles_per_ms: 0,
        bits,
        mapping_type: 0,
    };
    // SAFETY: not null, so room for the structure: the caller's promise.
    unsafe { info.write(told) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn gdr_map(_g: *mut c_void, handle: u64, to: *mut *mut c_void, bytes: usize) -> c_int {
    let mut pins = pins();
    match pins.get_mut(&handle) {
        Some(pin) if !pin.is_mapped && !to.is_null() && bytes <= size(pin.bytes) => {
            pin.is_mapped = true;
            // SAFETY: not null, so room for an address: the caller's promise.
            unsafe { to.write(pin.range.shadow(pin.start).cast()) };
            0
        }
        _ => INVALID,
    }
}

#[unsafe(no_mangle)]
extern "C" fn gdr_unmap(_g: *mut c_void, handle: u64, at: *mut c_void, _bytes: usize) -> c_int {
    match pins().get_mut(&handle) {
        Some(pin) if pin.is_mapped && pin.range.shadow(pin.start).cast() == at => {
            pin.is_mapped = false;
            0
        }
        _ => broken!(FreedTwice, "gdr_unmap {at:?}"),
    }
}

#[unsafe(no_mangle)]
extern "C" fn gdr_runtime_get_version(major: *mut c_int, minor: *mut c_int) {
    // SAFETY: room for two numbers: the caller's promise.
    unsafe {
        major.write(2);
        minor.write(5);
    }
}
