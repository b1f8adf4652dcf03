//! What C programs call as `static inline` functions of `<infiniband/verbs.h>`: calls through a context's table.
//!
//! Each returns what the C function returns, or `ENOSYS` where a driver left the entry empty, which none does.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::{self, NonNull};

use crate::abi::{
    ibv_context, ibv_cq, ibv_device_attr_ex, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_srq, ibv_wc,
    verbs_context,
};

/// What a context's `abi_compat` is, if it lies in a [`verbs_context`].
const IS_EXTENDED: *mut c_void = ptr::without_provenance_mut(usize::MAX);

/// What `context` lies in, if that goes back as far as `offset` bytes into what is declared of it.
///
/// # Safety
///
/// `context` is live.
unsafe fn extended(context: *mut ibv_context, offset: usize) -> Option<NonNull<verbs_context>> {
    // SAFETY: live, and a library that says that it is extended has allocated what it lies in, with the size of what there is
    // of that right before it.
    unsafe {
        if (*context).abi_compat != IS_EXTENDED {
            return None;
        }
        let whole = context.byte_sub(offset_of!(verbs_context, context)).cast::<verbs_context>();
        let size = (&raw const (*whole).sz).read();
        (size >= size_of::<verbs_context>() - offset).then_some(NonNull::new(whole)?)
    }
}

/// Room for what a device says. Drivers of before rdma-core 34 fill in what they know of, however long they are told that the
/// structure is: that lands behind it.
#[repr(C)]
struct Room {
    attr: ibv_device_attr_ex,
    _behind: [u64; 64],
}

/// Asks a device for more than `ibv_query_device` does. An error is an `errno`: `ENOSYS` or `EOPNOTSUPP` where library or
/// driver knows no such question. ibv_query_device_ex(3).
///
/// # Errors
///
/// The `errno`.
///
/// # Safety
///
/// `context` is live.
pub unsafe fn ibv_query_device_ex(context: *mut ibv_context) -> Result<ibv_device_attr_ex, c_int> {
    // SAFETY: by the caller's promise; the entry is there, as far as the context says. All zero is a value of the room,
    // which is longer than any driver's idea of the structure: 400 bytes in rdma-core 44.
    unsafe {
        let Some(whole) = extended(context, offset_of!(verbs_context, query_device_ex)) else {
            return Err(libc::ENOSYS);
        };
        let query = (&raw const (*whole.as_ptr()).query_device_ex).read().ok_or(libc::ENOSYS)?;
        let mut room: Room = core::mem::zeroed();
        let attr = (&raw mut room).cast::<ibv_device_attr_ex>();
        match query(context, ptr::null(), attr, size_of::<ibv_device_attr_ex>()) {
            0 => Ok(room.attr),
            code => Err(code),
        }
    }
}

/// Posts a list of sends, in order; `bad` is the first that was not. Zero, or an `errno`. ibv_post_send(3).
///
/// # Safety
///
/// `qp` is live, and nobody else calls with it at this time unless the library locks; the list ends in null, and its
/// elements and what they point to are as ibv_post_send(3) asks for. Buffers that are not sent inline stay until the
/// completion.
#[inline]
pub unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a live queue pair has a live context, whose table was filled in by its driver.
    unsafe { (*(*qp).context).ops.post_send.map_or(libc::ENOSYS, |post| post(qp, wr, bad)) }
}

/// Posts a list of receives, in order; `bad` is the first that was not. Zero, or an `errno`. ibv_post_recv(3).
///
/// # Safety
///
/// As for [`ibv_post_send`]; the device writes to the buffers until the completion.
#[inline]
pub unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as above.
    unsafe { (*(*qp).context).ops.post_recv.map_or(libc::ENOSYS, |post| post(qp, wr, bad)) }
}

/// The same, to a shared receive queue. ibv_post_srq_recv(3).
///
/// # Safety
///
/// As for [`ibv_post_recv`].
#[inline]
pub unsafe fn ibv_post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as above.
    unsafe { (*(*srq).context).ops.post_srq_recv.map_or(libc::ENOSYS, |post| post(srq, wr, bad)) }
}

/// Takes up to `entries` completions; returns how many, or a negative number. ibv_poll_cq(3).
///
/// # Safety
///
/// `cq` is live, nobody else calls with it at this time unless the library locks, and `wc` is valid for writes of so
/// many.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: as above.
    unsafe { (*(*cq).context).ops.poll_cq.map_or(-libc::ENOSYS, |poll| poll(cq, entries, wc)) }
}

/// Has the next completion signal the queue's channel, once. Zero, or an `errno`. ibv_req_notify_cq(3).
///
/// # Safety
///
/// `cq` is live, and was made with a channel.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as above.
    unsafe {
        (*(*cq).context).ops.req_notify_cq.map_or(libc::ENOSYS, |notify| notify(cq, solicited_only))
    }
}
