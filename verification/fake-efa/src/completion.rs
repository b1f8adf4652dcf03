//! Completion queues, as C sees them.

use core::ffi::{c_char, c_int, c_void};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use libfabric_sys as sys;

use crate::domain::{Domain, NOTHING, close_unused};
use crate::log::{Rule, refuse};
use crate::memory::InUse;
use crate::object::{self, Kind, number, table};
use crate::queue::{Entry, Queue};
use crate::status::Status;
use crate::wired::event_fd;

/// How many entries a queue has if its opener does not say.
const DEFAULT_SIZE: usize = 1024;

/// An open completion queue.
pub(crate) struct Cq {
    pub queue: Arc<Queue>,
    domain: Arc<Domain>,
    _in_use: InUse,
}

impl Kind for Cq {
    type Fid = sys::fid_cq;
    const NAME: &str = "completion queue";
    const MAGIC: u64 = 0xfab_0005;
}

static CQ: sys::fi_ops = sys::fi_ops { close: Some(close), control: Some(control), ..NOTHING };

static CALLS: sys::fi_ops_cq = sys::fi_ops_cq {
    size: size_of::<sys::fi_ops_cq>(),
    read: Some(read),
    readfrom: Some(readfrom),
    readerr: Some(readerr),
    sread: None,
    sreadfrom: None,
    signal: None,
    strerror: Some(strerror),
};

pub(crate) unsafe extern "C" fn open(
    domain: *mut sys::fid_domain,
    attr: *mut sys::fi_cq_attr,
    cq: *mut *mut sys::fid_cq,
    context: *mut c_void,
) -> c_int {
    number((|| {
        // SAFETY: the caller's promise, fi_cq(3). Only fields that every version has are read.
        let (domain, size, flags, format, wait_obj) = unsafe {
            let domain = object::find::<Domain>(domain.cast())?;
            (domain, (*attr).size, (*attr).flags, (*attr).format, (*attr).wait_obj)
        };
        if flags != 0 {
            return Err(refuse(Rule::Flags, sys::FI_EBADFLAGS, "a completion queue with flags"));
        }
        let format = match format {
            sys::FI_CQ_FORMAT_UNSPEC => sys::FI_CQ_FORMAT_CONTEXT,
            sys::FI_CQ_FORMAT_CONTEXT | sys::FI_CQ_FORMAT_MSG | sys::FI_CQ_FORMAT_DATA => format,
            _ => return Err(-sys::FI_ENOSYS),
        };
        let wait = match wait_obj {
            sys::FI_WAIT_NONE => None,
            sys::FI_WAIT_UNSPEC | sys::FI_WAIT_FD => Some(event_fd().map_err(|_| -sys::FI_EMFILE)?),
            _ => return Err(-sys::FI_ENOSYS),
        };
        let size = if size == 0 { DEFAULT_SIZE } else { size };
        let queue = Arc::new(Queue::new(size, format, domain.number, wait));
        let fid =
            sys::fid_cq { fid: object::head(sys::FI_CLASS_CQ, context, &CQ), ops: table(&CALLS) };
        // SAFETY: the caller's promise.
        unsafe {
            cq.write(object::publish(fid, Cq { queue, _in_use: domain.users.enter(), domain }))
        };
        Ok(())
    })())
}

unsafe extern "C" fn close(fid: *mut sys::fid) -> c_int {
    // SAFETY: the table is in our objects only.
    number(unsafe { close_unused::<Cq>(fid, |cq| &cq.queue.users) }.map(drop))
}

unsafe extern "C" fn control(fid: *mut sys::fid, command: c_int, arg: *mut c_void) -> c_int {
    number((|| {
        // SAFETY: the caller's promise, fi_cq(3).
        let cq = unsafe { object::find::<Cq>(fid.cast()) }?;
        match (command, &cq.queue.wait) {
            // SAFETY: as before: `arg` is what the command says.
            (sys::FI_GETWAIT, Some(wait)) => unsafe { arg.cast::<c_int>().write(wait.as_raw_fd()) },
            (sys::FI_GETWAIT, None) => return Err(-sys::FI_ENODATA),
            (sys::FI_GETWAITOBJ, wait) => {
                let object = if wait.is_some() { sys::FI_WAIT_FD } else { sys::FI_WAIT_NONE };
                // SAFETY: as before.
                unsafe { arg.cast::<sys::fi_wait_obj>().write(object) };
            }
            _ => return Err(-sys::FI_ENOSYS),
        }
        Ok(())
    })())
}

/// `fi_trywait`.
///
/// # Safety
///
/// As fi_poll(3) says.
pub(crate) unsafe extern "C" fn trywait(
    _: *mut sys::fid_fabric,
    fids: *mut *mut sys::fid,
    count: c_int,
) -> c_int {
    number((|| {
        for at in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the caller's promise: there are `count` objects with a wait object, and here all are queues.
            let cq = unsafe { object::find::<Cq>(fids.add(at).read().cast()) }?;
            let _inside = cq.domain.enter();
            if cq.queue.wait.is_none() {
                return Err(refuse(
                    Rule::State,
                    sys::FI_EINVAL,
                    "fi_trywait with a queue that has no wait object",
                ));
            }
            if !cq.queue.arm() {
                return Err(-sys::FI_EAGAIN);
            }
        }
        Ok(())
    })())
}

/// Writes an entry as one of format `format` to the `at`-th place of `buf`.
///
/// # Safety
///
/// There is room.
unsafe fn write(format: sys::fi_cq_format, buf: *mut c_void, at: usize, entry: &Entry) {
    // SAFETY: what the entry lent, it lends until it is read, which is now.
    let context = entry.context.map_or(0, |context| unsafe { context.give_back() });
    let op_context = context as *mut c_void;
    let (flags, len, data) = (entry.flags, entry.len, entry.data);
    // SAFETY: the caller's promise.
    unsafe {
        match format {
            sys::FI_CQ_FORMAT_DATA => {
                let entry = sys::fi_cq_data_entry {
                    op_context,
                    flags,
                    len,
                    buf: std::ptr::null_mut(),
                    data,
                };
                buf.cast::<sys::fi_cq_data_entry>().add(at).write(entry);
            }
            sys::FI_CQ_FORMAT_MSG => {
                buf.cast::<sys::fi_cq_msg_entry>().add(at).write(sys::fi_cq_msg_entry {
                    op_context,
                    flags,
                    len,
                });
            }
            _ => buf.cast::<sys::fi_cq_entry>().add(at).write(sys::fi_cq_entry { op_context }),
        }
    }
}

unsafe extern "C" fn read(cq: *mut sys::fid_cq, buf: *mut c_void, count: usize) -> isize {
    // SAFETY: the caller's promise, fi_cq(3).
    unsafe { readfrom(cq, buf, count, std::ptr::null_mut()) }
}

unsafe extern "C" fn readfrom(
    cq: *mut sys::fid_cq,
    buf: *mut c_void,
    count: usize,
    src_addr: *mut sys::fi_addr_t,
) -> isize {
    // SAFETY: the caller's promise, fi_cq(3).
    let cq = match unsafe { object::find::<Cq>(cq.cast()) } {
        Ok(cq) => cq,
        Err(error) => return error as isize,
    };
    let _inside = cq.domain.enter();
    cq.queue.read(count, |at, entry| {
        // SAFETY: the caller's promise: there is room for `count` entries, and as many sources if they are asked for.
        unsafe {
            write(cq.queue.format, buf, at, entry);
            if !src_addr.is_null() {
                let number = entry.source.as_ref().and_then(|(from, peers)| peers.number(*from));
                src_addr.add(at).write(number.unwrap_or(sys::FI_ADDR_NOTAVAIL));
            }
        }
    })
}

unsafe extern "C" fn readerr(
    cq: *mut sys::fid_cq,
    buf: *mut sys::fi_cq_err_entry,
    _flags: u64,
) -> isize {
    // SAFETY: the caller's promise, fi_cq(3).
    let cq = match unsafe { object::find::<Cq>(cq.cast()) } {
        Ok(cq) => cq,
        Err(error) => return error as isize,
    };
    let _inside = cq.domain.enter();
    let entry = match cq.queue.read_error() {
        Ok(entry) => entry,
        Err(error) => return error as isize,
    };
    // SAFETY: what the entry lent, it lends until it is read, which is now.
    let context = entry.context.map_or(0, |context| unsafe { context.give_back() });
    // SAFETY: the caller's promise. Only fields that every version has are written.
    unsafe {
        (*buf).op_context = context as *mut c_void;
        ((*buf).flags, (*buf).len, (*buf).olen) = (entry.flags, entry.len, 0);
        ((*buf).buf, (*buf).data, (*buf).tag) = (std::ptr::null_mut(), entry.data, 0);
        ((*buf).err, (*buf).prov_errno) = (entry.status.errno(), entry.status as c_int);
        (*buf).err_data_size = 0;
    }
    1
}

unsafe extern "C" fn strerror(
    _cq: *mut sys::fid_cq,
    prov_errno: c_int,
    _err_data: *const c_void,
    _buf: *mut c_char,
    _len: usize,
) -> *const c_char {
    Status::from_code(prov_errno.into()).map_or(c"unknown error", Status::text).as_ptr()
}
