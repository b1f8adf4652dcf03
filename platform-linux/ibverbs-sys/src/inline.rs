//! What C programs call as `static inline` functions of `<infiniband/verbs.h>`: calls through a context's table.
//!
//! Each returns what the C function returns, or `ENOSYS` where a driver left the entry empty, which none does.

use core::ffi::c_int;

use crate::abi::{ibv_cq, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_srq, ibv_wc};

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
