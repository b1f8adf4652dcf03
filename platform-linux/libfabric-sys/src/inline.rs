//! The calls that C has as inline functions: each goes through a table of functions behind the object.
//!
//! Named and ordered as in the man pages, which say what they do. They return what the provider returns: zero or a
//! count, or an error, negated. Nothing is checked but that the entry is there; if it is not, `-FI_ENOSYS`, or null.
//!
//! # Invariants
//!
//! 1. No entry is called that libfabric 1.9 did not have, so that no table of a real library can be too short for it.
//!    Tables may leave entries out all the same, so `size` is compared, but on the way of data: there an entry that
//!    every version has had is only compared with null.

// The names are C's.
#![allow(clippy::too_many_arguments)]

use core::ffi::{c_char, c_int, c_void};
use core::mem::offset_of;
use core::ptr;

use crate::abi::*;

// `fn name(object: *mut T, ..) -> R = object.table: Table => entry(arguments);`, `data fn` if on the way of data.
macro_rules! inlines {
    (@there data $table:ident $ops:ty, $entry:ident) => {
        (*$table).$entry
    };
    (@there control $table:ident $ops:ty, $entry:ident) => {
        if !$table.is_null() && (*$table).size > offset_of!($ops, $entry) { (*$table).$entry } else { None }
    };
    ($($(#[$meta:meta])* $way:ident fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty =
        $first:ident $(.$path:ident)+: $ops:ty => $entry:ident($($pass:expr),*), else $missing:expr;)*) => {
        $($(#[$meta])*
        ///
        /// # Safety
        ///
        /// - Objects are live ones that a library made, or that look like it, and capable of the call.
        /// - Other pointers are valid for what the man page says is done with them, and for as long: what an
        ///   operation names stays until it has completed.
        /// - No other thread is in a call that the object's threading model forbids beside this one.
        #[inline]
        pub unsafe fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the object is live, by the caller's promise, so its table is, and was made for this ABI: `size` is
            // its first field, and its entry has the type of the header. The rest of the call's contract is the caller's.
            unsafe {
                let table: *mut $ops = inlines!(@path $first $(.$path)+);
                match inlines!(@there $way table $ops, $entry) {
                    Some(entry) => entry($($pass),*),
                    None => $missing,
                }
            }
        })*
    };
    (@path $first:ident .$a:ident) => {
        (*$first).$a
    };
    (@path $first:ident .$a:ident .$b:ident) => {
        (*$first).$a.$b
    };
}

const NO_CALL: c_int = -FI_ENOSYS;
const NO_SIZE: isize = -(FI_ENOSYS as isize);

inlines! {
    /// Closes any object. fi_close in fi_fabric(3), fi_domain(3), fi_endpoint(3), ...
    control fn fi_close(fid: *mut fid) -> c_int = fid.ops: fi_ops => close(fid), else NO_CALL;

    /// fi_control(3).
    control fn fi_control(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int =
        fid.ops: fi_ops => control(fid, command, arg), else NO_CALL;

    /// fi_domain(3).
    control fn fi_domain(fabric: *mut fid_fabric, info: *mut fi_info, domain: *mut *mut fid_domain,
        context: *mut c_void) -> c_int =
        fabric.ops: fi_ops_fabric => domain(fabric, info, domain, context), else NO_CALL;

    /// fi_eq(3).
    control fn fi_eq_open(fabric: *mut fid_fabric, attr: *mut fi_eq_attr, eq: *mut *mut fid_eq,
        context: *mut c_void) -> c_int =
        fabric.ops: fi_ops_fabric => eq_open(fabric, attr, eq, context), else NO_CALL;

    /// Whether the caller may sleep on the wait objects of `fids`: `-FI_EAGAIN` if there is something to read first.
    /// fi_poll(3).
    control fn fi_trywait(fabric: *mut fid_fabric, fids: *mut *mut fid, count: c_int) -> c_int =
        fabric.ops: fi_ops_fabric => trywait(fabric, fids, count), else NO_CALL;

    /// fi_cq(3).
    control fn fi_cq_open(domain: *mut fid_domain, attr: *mut fi_cq_attr, cq: *mut *mut fid_cq,
        context: *mut c_void) -> c_int =
        domain.ops: fi_ops_domain => cq_open(domain, attr, cq, context), else NO_CALL;

    /// fi_av(3).
    control fn fi_av_open(domain: *mut fid_domain, attr: *mut fi_av_attr, av: *mut *mut fid_av,
        context: *mut c_void) -> c_int =
        domain.ops: fi_ops_domain => av_open(domain, attr, av, context), else NO_CALL;

    /// fi_endpoint(3).
    control fn fi_endpoint(domain: *mut fid_domain, info: *mut fi_info, ep: *mut *mut fid_ep,
        context: *mut c_void) -> c_int =
        domain.ops: fi_ops_domain => endpoint(domain, info, ep, context), else NO_CALL;

    /// fi_mr(3).
    control fn fi_mr_reg(domain: *mut fid_domain, buf: *const c_void, len: usize, access: u64, offset: u64,
        requested_key: u64, flags: u64, mr: *mut *mut fid_mr, context: *mut c_void) -> c_int =
        domain.mr: fi_ops_mr =>
        reg(&raw mut (*domain).fid, buf, len, access, offset, requested_key, flags, mr, context), else NO_CALL;

    /// fi_mr(3).
    control fn fi_mr_regattr(domain: *mut fid_domain, attr: *const fi_mr_attr, flags: u64,
        mr: *mut *mut fid_mr) -> c_int =
        domain.mr: fi_ops_mr => regattr(&raw mut (*domain).fid, attr, flags, mr), else NO_CALL;

    /// Binds a registration to an endpoint, which mode `FI_MR_ENDPOINT` demands. fi_mr(3).
    control fn fi_mr_bind(mr: *mut fid_mr, bfid: *mut fid, flags: u64) -> c_int =
        mr.fid.ops: fi_ops => bind(&raw mut (*mr).fid, bfid, flags), else NO_CALL;

    /// fi_mr(3).
    control fn fi_mr_enable(mr: *mut fid_mr) -> c_int =
        mr.fid.ops: fi_ops => control(&raw mut (*mr).fid, FI_ENABLE, ptr::null_mut()), else NO_CALL;

    /// The number of addresses inserted, or an error. fi_av(3).
    control fn fi_av_insert(av: *mut fid_av, addr: *const c_void, count: usize, fi_addr: *mut fi_addr_t, flags: u64,
        context: *mut c_void) -> c_int =
        av.ops: fi_ops_av => insert(av, addr, count, fi_addr, flags, context), else NO_CALL;

    /// fi_av(3).
    control fn fi_av_remove(av: *mut fid_av, fi_addr: *mut fi_addr_t, count: usize, flags: u64) -> c_int =
        av.ops: fi_ops_av => remove(av, fi_addr, count, flags), else NO_CALL;

    /// fi_av(3).
    control fn fi_av_lookup(av: *mut fid_av, fi_addr: fi_addr_t, addr: *mut c_void, addrlen: *mut usize) -> c_int =
        av.ops: fi_ops_av => lookup(av, fi_addr, addr, addrlen), else NO_CALL;

    /// An address as text, for people; null if the provider has none. fi_av(3).
    control fn fi_av_straddr(av: *mut fid_av, addr: *const c_void, buf: *mut c_char, len: *mut usize) -> *const c_char =
        av.ops: fi_ops_av => straddr(av, addr, buf, len), else ptr::null();

    /// fi_endpoint(3).
    control fn fi_ep_bind(ep: *mut fid_ep, bfid: *mut fid, flags: u64) -> c_int =
        ep.fid.ops: fi_ops => bind(&raw mut (*ep).fid, bfid, flags), else NO_CALL;

    /// fi_endpoint(3).
    control fn fi_enable(ep: *mut fid_ep) -> c_int =
        ep.fid.ops: fi_ops => control(&raw mut (*ep).fid, FI_ENABLE, ptr::null_mut()), else NO_CALL;

    /// fi_endpoint(3). In C this takes the endpoint's `fid`.
    control fn fi_getopt(ep: *mut fid_ep, level: c_int, optname: c_int, optval: *mut c_void,
        optlen: *mut usize) -> c_int =
        ep.ops: fi_ops_ep => getopt(&raw mut (*ep).fid, level, optname, optval, optlen), else NO_CALL;

    /// fi_endpoint(3). In C this takes the endpoint's `fid`.
    control fn fi_setopt(ep: *mut fid_ep, level: c_int, optname: c_int, optval: *const c_void, optlen: usize) -> c_int =
        ep.ops: fi_ops_ep => setopt(&raw mut (*ep).fid, level, optname, optval, optlen), else NO_CALL;

    /// fi_endpoint(3). In C this takes the endpoint's `fid`.
    control fn fi_cancel(ep: *mut fid_ep, context: *mut c_void) -> isize =
        ep.ops: fi_ops_ep => cancel(&raw mut (*ep).fid, context), else NO_SIZE;

    /// The endpoint's own address; `-FI_ETOOSMALL` with the length it needs. fi_cm(3). In C this takes the endpoint's
    /// `fid`.
    control fn fi_getname(ep: *mut fid_ep, addr: *mut c_void, addrlen: *mut usize) -> c_int =
        ep.cm: fi_ops_cm => getname(&raw mut (*ep).fid, addr, addrlen), else NO_CALL;

    /// fi_msg(3).
    data fn fi_recv(ep: *mut fid_ep, buf: *mut c_void, len: usize, desc: *mut c_void, src_addr: fi_addr_t,
        context: *mut c_void) -> isize =
        ep.msg: fi_ops_msg => recv(ep, buf, len, desc, src_addr, context), else NO_SIZE;

    /// fi_msg(3).
    data fn fi_send(ep: *mut fid_ep, buf: *const c_void, len: usize, desc: *mut c_void, dest_addr: fi_addr_t,
        context: *mut c_void) -> isize =
        ep.msg: fi_ops_msg => send(ep, buf, len, desc, dest_addr, context), else NO_SIZE;

    /// fi_rma(3).
    data fn fi_read(ep: *mut fid_ep, buf: *mut c_void, len: usize, desc: *mut c_void, src_addr: fi_addr_t, addr: u64,
        key: u64, context: *mut c_void) -> isize =
        ep.rma: fi_ops_rma => read(ep, buf, len, desc, src_addr, addr, key, context), else NO_SIZE;

    /// fi_rma(3).
    data fn fi_write(ep: *mut fid_ep, buf: *const c_void, len: usize, desc: *mut c_void, dest_addr: fi_addr_t,
        addr: u64, key: u64, context: *mut c_void) -> isize =
        ep.rma: fi_ops_rma => write(ep, buf, len, desc, dest_addr, addr, key, context), else NO_SIZE;

    /// fi_rma(3).
    data fn fi_writedata(ep: *mut fid_ep, buf: *const c_void, len: usize, desc: *mut c_void, data: u64,
        dest_addr: fi_addr_t, addr: u64, key: u64, context: *mut c_void) -> isize =
        ep.rma: fi_ops_rma => writedata(ep, buf, len, desc, data, dest_addr, addr, key, context), else NO_SIZE;

    /// fi_rma(3).
    data fn fi_writemsg(ep: *mut fid_ep, msg: *const fi_msg_rma, flags: u64) -> isize =
        ep.rma: fi_ops_rma => writemsg(ep, msg, flags), else NO_SIZE;

    /// The number of completions read into `buf`; `-FI_EAGAIN` if there is none, `-FI_EAVAIL` if the next one is an
    /// error. fi_cq(3).
    data fn fi_cq_read(cq: *mut fid_cq, buf: *mut c_void, count: usize) -> isize =
        cq.ops: fi_ops_cq => read(cq, buf, count), else NO_SIZE;

    /// The same, and who sent it. fi_cq(3).
    data fn fi_cq_readfrom(cq: *mut fid_cq, buf: *mut c_void, count: usize, src_addr: *mut fi_addr_t) -> isize =
        cq.ops: fi_ops_cq => readfrom(cq, buf, count, src_addr), else NO_SIZE;

    /// One, and the failed operation in `buf`. fi_cq(3).
    control fn fi_cq_readerr(cq: *mut fid_cq, buf: *mut fi_cq_err_entry, flags: u64) -> isize =
        cq.ops: fi_ops_cq => readerr(cq, buf, flags), else NO_SIZE;

    /// Reads, and waits up to `timeout` ms (-1: for ever) for a completion. fi_cq(3).
    control fn fi_cq_sread(cq: *mut fid_cq, buf: *mut c_void, count: usize, cond: *const c_void,
        timeout: c_int) -> isize =
        cq.ops: fi_ops_cq => sread(cq, buf, count, cond, timeout), else NO_SIZE;

    /// Wakes who sleeps in [`fi_cq_sread`]. fi_cq(3).
    control fn fi_cq_signal(cq: *mut fid_cq) -> c_int = cq.ops: fi_ops_cq => signal(cq), else NO_CALL;

    /// The provider's words for its `prov_errno`; null if it has none. fi_cq(3).
    control fn fi_cq_strerror(cq: *mut fid_cq, prov_errno: c_int, err_data: *const c_void, buf: *mut c_char,
        len: usize) -> *const c_char =
        cq.ops: fi_ops_cq => strerror(cq, prov_errno, err_data, buf, len), else ptr::null();

    /// fi_eq(3).
    control fn fi_eq_read(eq: *mut fid_eq, event: *mut u32, buf: *mut c_void, len: usize, flags: u64) -> isize =
        eq.ops: fi_ops_eq => read(eq, event, buf, len, flags), else NO_SIZE;

    /// fi_eq(3).
    control fn fi_eq_readerr(eq: *mut fid_eq, buf: *mut fi_eq_err_entry, flags: u64) -> isize =
        eq.ops: fi_ops_eq => readerr(eq, buf, flags), else NO_SIZE;
}

/// What an operation on local memory of `mr` takes as `desc`. fi_mr(3).
///
/// # Safety
///
/// `mr` is a live registration.
#[inline]
#[must_use]
pub unsafe fn fi_mr_desc(mr: *mut fid_mr) -> *mut c_void {
    // SAFETY: `mr` is live, by the caller's promise.
    unsafe { (*mr).mem_desc }
}

/// What a peer takes as `key` to write to or read from memory of `mr`; `FI_KEY_NOTAVAIL` if the key is a longer one.
/// fi_mr(3).
///
/// # Safety
///
/// `mr` is a live registration.
#[inline]
#[must_use]
pub unsafe fn fi_mr_key(mr: *mut fid_mr) -> u64 {
    // SAFETY: `mr` is live, by the caller's promise.
    unsafe { (*mr).key }
}
