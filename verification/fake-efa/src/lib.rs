//! A libfabric library of our own, which behaves as the provider `efa` is documented to in its fabric `efa-direct`.
//!
//! It stands in for Amazon's Elastic Fabric Adapter where there is none: named by `IMMWIRE_LIBFABRIC`, it is loaded in
//! place of libfabric. It is written to the documentation (fi_efa(7), the comparison of the two fabrics, the provider's
//! behaviour where that is silent): **a model, not hardware**. What passes with it follows the rules as they were
//! understood; that the device has no others, nobody has seen.
//!
//! It knows nothing of who uses it. Endpoints of one host reach each other, by abstract Unix sockets.
//!
//! # What it holds callers to
//!
//! Each broken rule is answered with the documented error and written to the file that `FAKE_EFA_LOG` names
//! (`log.rs` has the names), so that a test can demand that there is none; where it names none, the process ends. No rule can be switched off; the environment
//! sizes the device (`config.rs` has the variables).
//!
//! - `fi_getinfo` offers what the hints can use: required modes and registration modes granted, nothing asked for that
//!   the device has not. `FI_RX_CQ_DATA` in the hints switches unsolicited receives off; a device without them
//!   (`FAKE_EFA_UNSOLICITED=0`) is offered to those hints only. Before API 1.18 there are no writes.
//! - An endpoint needs completion queues and an address vector that no other endpoint has.
//! - An operation has one buffer, of an open registration of its domain that allows it, a destination in the address
//!   vector, a key and data of four bytes, at most the device's length, and an `FI_CONTEXT2` of its own: 64 bytes that
//!   are written while they are lent, and checked when the completion is read.
//! - With `FI_THREAD_DOMAIN` (no other mode is watched), one thread at a time is in calls on a domain's queues, endpoints and address vectors.
//! - Nothing is closed, or removed, under an operation in flight.
//!
//! # What it does to them
//!
//! - The target needs no call of its application: bytes land by themselves.
//! - No order: neither of writes, nor of the pieces of one, nor of events, nor of completions. An event says that its
//!   own write has landed. A completion says that the remote device has the bytes, which may land later, even after the
//!   event of a write that was posted after the completion (`FAKE_EFA_EARLY_ACK=0`: never later).
//! - `-FI_EAGAIN` if the send queue is full (its places are free once completions are read), and now and then anyway.
//! - A completion queue has the size that was asked for. One entry more, and it is dead.
//! - A target that did not insert the initiator fails its writes with 14; a key or range that is not registered, with
//!   7; a dead process, late, with 13 if it ever responded, else with 9 (no such queue pair) or 15 (no such device); a
//!   closed endpoint with 9; two sides that differ in unsolicited receives with 18.
//! - After `fi_close` of a registration has returned no byte of it is written; what was acknowledged has landed.
//! - A queue pair in error (`FAKE_EFA_BREAKS`) stays so: what is posted there ends with 2, once, and then with 1, as does what was
//!   under way, receives too; it hears nothing.
//! - `fi_close` of an endpoint drops what is in flight, and some completions that were not read.
//!
//! Fabric `efa`, if `FAKE_EFA_FABRICS` has it, is the same device with these rules lifted: contexts, descriptors unless
//! `FI_MR_LOCAL` was asked for, the target's insertion, the length of a write. It needs no progress by calls either,
//! though it says so.
//!
//! All that is chosen follows from `FAKE_EFA_SEED`, the how-many-th endpoint of its process, and the number of its
//! operation; threads add what they add. The log has the seed, and counts at each endpoint's close how much was overtaken.
//!
//! # What it has not
//!
//! Reads, inline operations, several buffers, selective completion, blocking reads of a queue, counters, event queues,
//! device memory, names to look up. Its symbols have no versions: the loader falls back to the plain ones. The bytes
//! of objects that were closed stay allocated.

use core::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libfabric_sys as sys;

mod completion;
mod config;
mod context;
mod device;
pub mod disorder;
mod domain;
mod endpoint;
mod engine;
mod info;
mod log;
mod memory;
mod object;
mod packet;
mod peers;
mod queue;
mod status;
mod wired;

/// Locks; a thread that panicked with the lock leaves the state as it was.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `fi_getinfo`. fi_getinfo(3).
///
/// # Safety
///
/// As the man page says: `hints` is null or an `fi_info` that [`fi_dupinfo`] made, `info` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_getinfo(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    _flags: u64,
    hints: *const sys::fi_info,
    info: *mut *mut sys::fi_info,
) -> c_int {
    let Ok(config) = config::get() else { return -sys::FI_EINVAL };
    // SAFETY: the caller's promise.
    match unsafe { info::get(config, version, node, service, hints) } {
        Ok(list) => {
            // SAFETY: the caller's promise.
            unsafe { info.write(list) };
            0
        }
        Err(error) => error,
    }
}

/// `fi_dupinfo`: a copy, or an empty one for null. fi_getinfo(3).
///
/// # Safety
///
/// `info` is null or an `fi_info` that [`fi_getinfo`] or this function made.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_dupinfo(info: *const sys::fi_info) -> *mut sys::fi_info {
    if info.is_null() {
        return info::empty();
    }
    // SAFETY: the caller's promise.
    unsafe { info::dup(info) }
}

/// `fi_freeinfo`. fi_getinfo(3).
///
/// # Safety
///
/// `info` is null or a list that [`fi_getinfo`] or [`fi_dupinfo`] made, and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_freeinfo(info: *mut sys::fi_info) {
    // SAFETY: the caller's promise.
    unsafe { info::free(info) };
}

/// `fi_fabric`. fi_fabric(3).
///
/// # Safety
///
/// As the man page says: `attr` is of an `fi_info` of this library, `fabric` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_fabric(
    attr: *mut sys::fi_fabric_attr,
    fabric: *mut *mut sys::fid_fabric,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    object::number(unsafe { domain::open_fabric(attr, fabric, context) })
}

/// `fi_version`: 2.4. fi_version(3).
#[unsafe(no_mangle)]
pub extern "C" fn fi_version() -> u32 {
    info::VERSION
}

/// `fi_strerror`. fi_errno(3).
#[unsafe(no_mangle)]
pub extern "C" fn fi_strerror(errno: c_int) -> *const c_char {
    domain::strerror(errno)
}
