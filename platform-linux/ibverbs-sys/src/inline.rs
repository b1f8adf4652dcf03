//! What C programs call as `static inline` functions of `<infiniband/verbs.h>`: calls through a context's table.
//!
//! Each returns what the C function returns, or `ENOSYS` where a driver left the entry empty, which none does.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::{self, NonNull};

use crate::abi::{
    IBV_QP_INIT_ATTR_PD, IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, ibv_context, ibv_cq, ibv_cq_ex,
    ibv_cq_init_attr_ex, ibv_device_attr_ex, ibv_poll_cq_attr, ibv_port_attr, ibv_qp, ibv_qp_ex,
    ibv_qp_init_attr_ex, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_srq, ibv_wc, ibv_wc_opcode,
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

/// A structure with room behind it. Drivers of before rdma-core 34 fill in what they know of a device, however long they are
/// told that the structure is; and later ones may look at fields that came later, before they look at the mask.
#[repr(C)]
struct Room<T> {
    attr: T,
    _behind: [u64; 64],
}

impl<T> Room<T> {
    const fn new(attr: T) -> Self {
        Self { attr, _behind: [0; 64] }
    }
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
        let mut room = Room::new(core::mem::zeroed::<ibv_device_attr_ex>());
        let attr = (&raw mut room).cast::<ibv_device_attr_ex>();
        match query(context, ptr::null(), attr, size_of::<ibv_device_attr_ex>()) {
            0 => Ok(room.attr),
            code => Err(code),
        }
    }
}

/// Asks for all of a port; the exported function of this name leaves out `flags` and what comes after them. An error is an `errno`:
/// `ENOSYS` where library or driver knows no such question. ibv_query_port(3).
///
/// # Errors
///
/// The `errno`.
///
/// # Safety
///
/// `context` is live.
pub unsafe fn ibv_query_port_whole(
    context: *mut ibv_context,
    port: u8,
) -> Result<ibv_port_attr, c_int> {
    // SAFETY: by the caller's promise; the entry is there, as far as the context says. All zero is a value of the structure, of which
    // the library writes no more than it is told that there is.
    unsafe {
        let whole = extended(context, offset_of!(verbs_context, query_port)).ok_or(libc::ENOSYS)?;
        let query = (&raw const (*whole.as_ptr()).query_port).read().ok_or(libc::ENOSYS)?;
        let mut attr = core::mem::zeroed::<ibv_port_attr>();
        match query(context, port, &raw mut attr, size_of::<ibv_port_attr>()) {
            0 => Ok(attr),
            code => Err(code),
        }
    }
}

/// What `errno` says when a call that returns a pointer has failed.
fn last_error() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Makes a completion queue that is read by [`ibv_start_poll`] (or, as an `ibv_cq`, in the old way). An error is an `errno`:
/// `ENOSYS` or `EOPNOTSUPP` where library or driver has no such queues. ibv_create_cq_ex(3).
///
/// # Errors
///
/// The `errno`.
///
/// # Safety
///
/// `context` is live, and the channel, if there is one, of the same.
pub unsafe fn ibv_create_cq_ex(
    context: *mut ibv_context,
    attr: ibv_cq_init_attr_ex,
) -> Result<NonNull<ibv_cq_ex>, c_int> {
    // SAFETY: by the caller's promise; the entry is there, as far as the context says.
    unsafe {
        let whole =
            extended(context, offset_of!(verbs_context, create_cq_ex)).ok_or(libc::ENOSYS)?;
        let create = (&raw const (*whole.as_ptr()).create_cq_ex).read().ok_or(libc::ENOSYS)?;
        let mut room = Room::new(attr);
        NonNull::new(create(context, (&raw mut room).cast())).ok_or_else(last_error)
    }
}

/// Makes a queue pair of `pd` whose sends may be built by [`ibv_wr_start`] and what follows there, of the kinds that `send_ops`
/// names. Its `ibv_qp_ex` is `ibv_qp_to_qp_ex`'s to say. An error is an `errno`: `ENOSYS` or `EOPNOTSUPP` where library or
/// driver has none such. ibv_create_qp_ex(3).
///
/// # Errors
///
/// The `errno`.
///
/// # Safety
///
/// `context` is live, and all that `attr` names of the same.
pub unsafe fn ibv_create_qp_ex(
    context: *mut ibv_context,
    mut attr: ibv_qp_init_attr_ex,
    send_ops: u64,
) -> Result<NonNull<ibv_qp>, c_int> {
    attr.comp_mask |= IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attr.send_ops_flags = send_ops;
    // SAFETY: by the caller's promise; the entry is there, as far as the context says.
    unsafe {
        let whole =
            extended(context, offset_of!(verbs_context, create_qp_ex)).ok_or(libc::ENOSYS)?;
        let create = (&raw const (*whole.as_ptr()).create_qp_ex).read().ok_or(libc::ENOSYS)?;
        let mut room = Room::new(attr);
        NonNull::new(create(context, (&raw mut room).cast())).ok_or_else(last_error)
    }
}

/// Whether a queue pair has all that is called below to build writes.
///
/// # Safety
///
/// `qp` is live.
#[must_use]
pub const unsafe fn has_writes(qp: NonNull<ibv_qp_ex>) -> bool {
    // SAFETY: live; its driver has filled in what it has.
    let qp = unsafe { qp.as_ref() };
    qp.wr_start.is_some()
        && qp.wr_rdma_write.is_some()
        && qp.wr_rdma_write_imm.is_some()
        && qp.wr_set_inline_data.is_some()
        && qp.wr_set_sge.is_some()
        && qp.wr_set_sge_list.is_some()
        && qp.wr_complete.is_some()
}

/// Begins to build work; until [`ibv_wr_complete`] nobody else gets in. ibv_wr_post(3).
///
/// # Safety
///
/// `qp` is live, as for all that follow; and none is called but between this and [`ibv_wr_complete`].
#[inline]
pub unsafe fn ibv_wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: a live queue pair's table was filled in by its driver.
    unsafe { (*qp).wr_start.into_iter().for_each(|call| call(qp)) }
}

/// Begins a write, with the number and flags that it will have. One setter is to follow. ibv_wr_post(3).
///
/// # Safety
///
/// As for [`ibv_wr_start`].
#[inline]
pub unsafe fn ibv_wr_rdma_write(
    qp: *mut ibv_qp_ex,
    (wr_id, wr_flags): (u64, u32),
    rkey: u32,
    remote_addr: u64,
) {
    // SAFETY: as above.
    unsafe {
        ((*qp).wr_id, (*qp).wr_flags) = (wr_id, wr_flags);
        (*qp).wr_rdma_write.into_iter().for_each(|call| call(qp, rkey, remote_addr));
    }
}

/// The same, with an immediate in network order. ibv_wr_post(3).
///
/// # Safety
///
/// As for [`ibv_wr_start`].
#[inline]
pub unsafe fn ibv_wr_rdma_write_imm(
    qp: *mut ibv_qp_ex,
    (wr_id, wr_flags): (u64, u32),
    rkey: u32,
    remote_addr: u64,
    imm_data: u32,
) {
    // SAFETY: as above.
    unsafe {
        ((*qp).wr_id, (*qp).wr_flags) = (wr_id, wr_flags);
        let call = (*qp).wr_rdma_write_imm;
        call.into_iter().for_each(|call| call(qp, rkey, remote_addr, imm_data));
    }
}

/// Its bytes, which are copied now. ibv_wr_post(3). Soft-RoCE looks for them only if the work's flags have
/// `IBV_SEND_INLINE`, too, of which others take no notice.
///
/// # Safety
///
/// As for [`ibv_wr_start`]; and the bytes are there.
#[inline]
pub unsafe fn ibv_wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    // SAFETY: as above.
    unsafe { (*qp).wr_set_inline_data.into_iter().for_each(|call| call(qp, addr, length)) }
}

/// Where its bytes are; not for none. ibv_wr_post(3).
///
/// # Safety
///
/// As for [`ibv_wr_start`]; and the bytes stay until the completion.
#[inline]
pub unsafe fn ibv_wr_set_sge(qp: *mut ibv_qp_ex, sge: &ibv_sge) {
    // SAFETY: as above.
    unsafe {
        let call = (*qp).wr_set_sge;
        call.into_iter().for_each(|call| call(qp, sge.lkey, sge.addr, sge.length));
    }
}

/// That it has no bytes: a list of none. ibv_wr_post(3).
///
/// # Safety
///
/// As for [`ibv_wr_start`].
#[inline]
pub unsafe fn ibv_wr_set_nothing(qp: *mut ibv_qp_ex) {
    let none = ibv_sge { addr: 0, length: 0, lkey: 0 };
    // SAFETY: as above; no element is read.
    unsafe { (*qp).wr_set_sge_list.into_iter().for_each(|call| call(qp, 0, &raw const none)) }
}

/// Posts what was built. Zero, or an `errno`: then nothing of it is posted. ibv_wr_post(3).
///
/// # Safety
///
/// After [`ibv_wr_start`].
#[inline]
pub unsafe fn ibv_wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: as above.
    unsafe { (*qp).wr_complete.map_or(libc::ENOSYS, |call| call(qp)) }
}

/// Whether a completion queue has all that is called below.
///
/// # Safety
///
/// `cq` is live.
#[must_use]
pub const unsafe fn has_polls(cq: NonNull<ibv_cq_ex>) -> bool {
    // SAFETY: live; its driver has filled in what it has.
    let cq = unsafe { cq.as_ref() };
    cq.start_poll.is_some()
        && cq.end_poll.is_some()
        && cq.read_opcode.is_some()
        && cq.read_byte_len.is_some()
        && cq.read_imm_data.is_some()
        && cq.read_qp_num.is_some()
        && cq.read_slid.is_some()
        && cq.read_wc_flags.is_some()
}

/// Goes to the next completion: zero, and it can be read, until [`ibv_end_poll`]; `ENOENT` if there is none, or another
/// `errno`, and nothing was begun. ibv_create_cq_ex(3).
///
/// # Safety
///
/// `cq` is live, as for all that follow; none of which is called but between this and [`ibv_end_poll`], by one thread.
#[inline]
pub unsafe fn ibv_start_poll(cq: *mut ibv_cq_ex) -> c_int {
    let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
    // SAFETY: a live queue's table was filled in by its driver.
    unsafe { (*cq).start_poll.map_or(libc::ENOSYS, |call| call(cq, &raw mut attr)) }
}

/// Done with the completion. ibv_create_cq_ex(3).
///
/// # Safety
///
/// After an [`ibv_start_poll`] that returned zero.
#[inline]
pub unsafe fn ibv_end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: as above.
    unsafe { (*cq).end_poll.into_iter().for_each(|call| call(cq)) }
}

macro_rules! reads {
    ($($(#[$meta:meta])* $name:ident = $field:ident -> $ty:ty;)*) => {
        $($(#[$meta])*
        /// ibv_create_cq_ex(3).
        ///
        /// # Safety
        ///
        /// As for [`ibv_end_poll`]; the queue was made with it, and the completion has it.
        #[inline]
        #[must_use]
        pub unsafe fn $name(cq: *mut ibv_cq_ex) -> $ty {
            // SAFETY: as above.
            unsafe { (*cq).$field.map_or(0, |call| call(cq)) }
        })*
    };
}

reads! {
    /// What has completed.
    ibv_wc_read_opcode = read_opcode -> ibv_wc_opcode;
    /// How many bytes came.
    ibv_wc_read_byte_len = read_byte_len -> u32;
    /// The immediate, in network order.
    ibv_wc_read_imm_data = read_imm_data -> u32;
    /// The number of the queue pair.
    ibv_wc_read_qp_num = read_qp_num -> u32;
    /// The port that a datagram came from.
    ibv_wc_read_slid = read_slid -> u32;
    /// What else came with it: of [`IBV_WC_GRH`](crate::IBV_WC_GRH) and its like.
    ibv_wc_read_wc_flags = read_wc_flags -> u32;
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

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn query_port(
        _: *mut ibv_context,
        port: u8,
        attr: *mut ibv_port_attr,
        len: usize,
    ) -> c_int {
        assert_eq!(len, size_of::<ibv_port_attr>());
        if port != 1 {
            return libc::EINVAL;
        }
        // SAFETY: the caller's room, of that length.
        unsafe { (*attr).flags = crate::IBV_QPF_GRH_REQUIRED };
        0
    }

    /// As far as contexts go back: those of old, those of libraries that end before the question, drivers without an answer, and with one.
    #[test]
    fn a_port_is_asked_where_there_is_somebody_to_ask() {
        let all = size_of::<verbs_context>();
        let end = all - offset_of!(verbs_context, query_port) - size_of::<usize>();
        for (abi, size, driver, port, expected) in [
            (ptr::null_mut(), all, true, 1, Err(libc::ENOSYS)),
            (IS_EXTENDED, end, true, 1, Err(libc::ENOSYS)),
            (IS_EXTENDED, all, false, 1, Err(libc::ENOSYS)),
            (IS_EXTENDED, all, true, 2, Err(libc::EINVAL)),
            (IS_EXTENDED, all, true, 1, Ok(crate::IBV_QPF_GRH_REQUIRED)),
        ] {
            // SAFETY: all zero is a value of the type.
            let mut whole: Box<verbs_context> = unsafe { Box::new(core::mem::zeroed()) };
            (whole.sz, whole.context.abi_compat) = (size, abi);
            whole.query_port = if driver { Some(query_port) } else { None };
            let context =
                Box::into_raw(whole).wrapping_byte_add(offset_of!(verbs_context, context));
            // SAFETY: it lies in what was made above, which is given back after.
            let answer = unsafe { ibv_query_port_whole(context.cast(), port) };
            let whole = context.wrapping_byte_sub(offset_of!(verbs_context, context));
            // SAFETY: made above, and nobody else's.
            drop(unsafe { Box::from_raw(whole) });
            assert_eq!(answer.map(|attr| attr.flags), expected);
        }
    }
}
