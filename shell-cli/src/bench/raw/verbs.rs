//! libibverbs without an engine: a reliable connected queue pair with receives of its own.
//!
//! It knows the binary interface. The port is the engine's, with the name that the engine chose for it.
//!
//! # Invariants
//!
//! - Objects are destroyed once, the queue pair before its queue and domain, and registrations before the domain.
//! - Completions of a queue pair come in order, so one tells of all writes before it.
//! - There is a receive posted for each write that the other side may have in flight, and room for its completion.

use super::loops::{Seen, Wire};
use super::{DEPTH_MAX, Done, Far, Memory, Piece, RawError, Registered, fits, inside};
use ibverbs_sys as sys;
use ibverbs_sys::Library;
use immwire::Region;
use immwire::core::device::PortName;
use immwire::core::port::{Number24, Port, Queue, Stand};
use std::ffi::{CStr, c_int};
use std::io;
use std::mem::zeroed;
use std::ptr::{self, NonNull};

/// Completions read at a time.
const BATCH: usize = 16;
/// Receives posted at a time.
const RECEIVES: usize = 64;
/// Receives of the queue pair: more than the other side has writes in flight, so that batches can be waited for.
const RECEIVES_MAX: u32 = 4 * DEPTH_MAX;
/// Bytes that travel inside a work request: as the engine's, if the device takes so many.
const INLINE_BYTES: u32 = 64;
/// A peer's answer is awaited for 4.096 us times two to this power, seven times: half a second.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 6;
/// Wait 0.12 ms for a receive, for ever.
const RNR_TIMER: u8 = 7;
const RNR_RETRY: u8 = 7;
const HOP_LIMIT: u8 = 64;

/// An object of libibverbs', destroyed when dropped.
struct Object<T>(NonNull<T>, unsafe extern "C" fn(*mut T) -> c_int);

impl<T> Object<T> {
    fn new(
        call: &'static str,
        raw: *mut T,
        destroy: unsafe extern "C" fn(*mut T) -> c_int,
    ) -> Result<Self, RawError> {
        let last = || failed(call, io::Error::last_os_error());
        Ok(Self(NonNull::new(raw).ok_or_else(last)?, destroy))
    }

    const fn raw(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: ours, live; fields and values are ordered so that what was made from it is destroyed before.
        let code = unsafe { (self.1)(self.0.as_ptr()) };
        if code != 0 {
            tracing::debug!(code, "libibverbs would not destroy an object of the baseline");
        }
    }
}

/// A registration.
pub(super) struct Registration(Object<sys::ibv_mr>);

/// A queue pair, and all that it needs: destroyed in this order. Used by one thread.
pub(super) struct Verbs {
    pair: Object<sys::ibv_qp>,
    cq: Object<sys::ibv_cq>,
    pd: Object<sys::ibv_pd>,
    _context: Object<sys::ibv_context>,
    library: &'static Library,
    port: Port,
    port_number: u8,
    gid_index: u8,
    queue: Queue,
    name: Vec<u8>,
    /// Writes that were posted, and those of them that have completed.
    posted: u64,
    ended: u64,
    /// Writes since the last that is signalled.
    unsignalled: u32,
    /// Receives that were used up.
    owed: usize,
    inline: u32,
    /// Bytes of a message at most.
    longest: u64,
}

fn failed(call: &'static str, error: io::Error) -> RawError {
    RawError::Call { call, code: error.raw_os_error().unwrap_or(0), text: error.to_string() }
}

fn check(call: &'static str, code: c_int) -> Result<(), RawError> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(failed(call, io::Error::from_raw_os_error(code))),
        _ => Err(failed(call, io::Error::last_os_error())),
    }
}

/// Opens the device of that NIC's name, and says which of its ports it is.
fn open_device(
    library: &'static Library,
    wanted: &str,
) -> Result<(Object<sys::ibv_context>, u8), RawError> {
    let symbols = &library.symbols;
    let mut count = 0;
    // SAFETY: per ibv_get_device_list(3): a local to write to.
    let list = unsafe { (symbols.ibv_get_device_list)(&raw mut count) };
    if list.is_null() {
        return Err(failed("ibv_get_device_list", io::Error::last_os_error()));
    }
    let mut devices = Vec::new();
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has so many devices, which stay until it is freed; their names are C strings.
        devices.push(unsafe {
            let device = *list.add(at);
            let name = CStr::from_ptr((symbols.ibv_get_device_name)(device));
            (name.to_string_lossy().into_owned(), device)
        });
    }
    let port = PortName::read(wanted, |name| devices.iter().any(|(device, _)| device == name));
    let device = devices.iter().find(|(name, _)| name == port.device);
    // SAFETY: of the list, which is freed below.
    let opened = device.map(|(_, device)| unsafe { (symbols.ibv_open_device)(*device) });
    // SAFETY: from `ibv_get_device_list`; what is opened stays open.
    unsafe { (symbols.ibv_free_device_list)(list) };
    match opened {
        Some(context) => {
            let context = Object::new("ibv_open_device", context, symbols.ibv_close_device)?;
            Ok((context, port.port.unwrap_or(1)))
        }
        None => Err(RawError::NoDevice { library: "libibverbs", device: wanted.to_owned() }),
    }
}

impl Verbs {
    /// Opens a queue pair on the device `name`, whose port is `port`.
    pub(super) fn open(name: &str, port: Port) -> Result<Self, RawError> {
        let library = Library::load()?;
        let symbols = &library.symbols;
        let (context, port_number) = open_device(library, name)?;
        let gid_index = gid_index(library, (&context, port_number), &port)?;
        // SAFETY: per ibv_query_port(3): live, and a local, all zero of which is a value, and all of which it may write.
        let longest = unsafe {
            let mut attr: sys::ibv_port_attr = zeroed();
            let out = (&raw mut attr).cast();
            check("ibv_query_port", (symbols.ibv_query_port)(context.raw(), port_number, out))?;
            u64::from(attr.max_msg_sz.max(1))
        };
        // SAFETY: for each of these calls, per its manual page: what it is given is live and of one device, attributes
        // are locals whose rest is zero, and what is made is destroyed before what it was made from.
        let (pd, cq) = unsafe {
            let pd = (symbols.ibv_alloc_pd)(context.raw());
            let pd = Object::new("ibv_alloc_pd", pd, symbols.ibv_dealloc_pd)?;
            let entries = c_int::try_from(DEPTH_MAX + RECEIVES_MAX).unwrap_or(c_int::MAX);
            let none = ptr::null_mut();
            let cq = (symbols.ibv_create_cq)(context.raw(), entries, none, ptr::null_mut(), 0);
            (pd, Object::new("ibv_create_cq", cq, symbols.ibv_destroy_cq)?)
        };
        // SAFETY: all zero is a value of the type.
        let mut attr: sys::ibv_qp_init_attr = unsafe { zeroed() };
        (attr.send_cq, attr.recv_cq, attr.qp_type) = (cq.raw(), cq.raw(), sys::IBV_QPT_RC);
        attr.cap = sys::ibv_qp_cap {
            max_send_wr: DEPTH_MAX,
            max_recv_wr: RECEIVES_MAX,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: INLINE_BYTES,
        };
        // SAFETY: as above.
        let pair = unsafe { (symbols.ibv_create_qp)(pd.raw(), &raw mut attr) };
        let pair = Object::new("ibv_create_qp", pair, symbols.ibv_destroy_qp)?;
        let mut psn = [0; 4];
        let random = rustix::rand::getrandom(&mut psn, rustix::rand::GetRandomFlags::empty());
        random.map_err(|errno| failed("getrandom", errno.into()))?;
        // SAFETY: live.
        let number = unsafe { (*pair.raw()).qp_num };
        let queue =
            Queue { number: Number24::new(number), psn: Number24::new(u32::from_ne_bytes(psn)) };
        let mut verbs = Self {
            pair,
            cq,
            pd,
            _context: context,
            library,
            port,
            port_number,
            gid_index,
            queue,
            name: Stand { port, queue }.encode().to_vec(),
            posted: 0,
            ended: 0,
            unsignalled: 0,
            owed: RECEIVES_MAX as usize,
            inline: attr.cap.max_inline_data.min(INLINE_BYTES),
            longest,
        };
        let mut attr = Self::attr(sys::IBV_QPS_INIT);
        attr.port_num = verbs.port_number;
        attr.qp_access_flags = sys::IBV_ACCESS_REMOTE_WRITE;
        let mask = sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS;
        verbs.modify("ibv_modify_qp(INIT)", attr, mask)?;
        verbs.refill()?;
        Ok(verbs)
    }

    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    pub(super) const fn longest(&self) -> u64 {
        self.longest
    }

    const fn attr(state: sys::ibv_qp_state) -> sys::ibv_qp_attr {
        // SAFETY: all zero is a value of the type.
        let mut attr: sys::ibv_qp_attr = unsafe { zeroed() };
        attr.qp_state = state;
        attr
    }

    fn modify(
        &self,
        call: &'static str,
        mut attr: sys::ibv_qp_attr,
        mask: c_int,
    ) -> Result<(), RawError> {
        let modify = self.library.symbols.ibv_modify_qp;
        // SAFETY: per ibv_modify_qp(3): live, and a local of which what the mask names is set.
        check(call, unsafe { modify(self.pair.raw(), &raw mut attr, sys::IBV_QP_STATE | mask) })
    }

    pub(super) fn meet(&mut self, name: &[u8]) -> Result<(), RawError> {
        let there = Stand::decode(name).ok_or(RawError::Unreachable)?;
        let route = self.port.route(&there.port)?;
        let mut attr = Self::attr(sys::IBV_QPS_RTR);
        attr.ah_attr.grh.dgid = sys::ibv_gid { raw: route.dgid.unwrap_or_default().0 };
        attr.ah_attr.grh.sgid_index = self.gid_index;
        attr.ah_attr.grh.hop_limit = HOP_LIMIT;
        attr.ah_attr.dlid = route.dlid;
        attr.ah_attr.is_global = u8::from(route.dgid.is_some());
        attr.ah_attr.port_num = self.port_number;
        attr.path_mtu = sys::ibv_mtu::from(route.mtu.code());
        attr.dest_qp_num = there.queue.number.get();
        attr.rq_psn = there.queue.psn.get();
        (attr.max_dest_rd_atomic, attr.min_rnr_timer) = (1, RNR_TIMER);
        let mask = sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC
            | sys::IBV_QP_MIN_RNR_TIMER;
        self.modify("ibv_modify_qp(RTR)", attr, mask)?;
        let mut attr = Self::attr(sys::IBV_QPS_RTS);
        attr.sq_psn = self.queue.psn.get();
        (attr.timeout, attr.retry_cnt) = (TIMEOUT, RETRIES);
        (attr.rnr_retry, attr.max_rd_atomic) = (RNR_RETRY, 1);
        let mask = sys::IBV_QP_SQ_PSN
            | sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("ibv_modify_qp(RTS)", attr, mask)
    }

    /// # Safety
    ///
    /// As for [`super::Raw::register_region`].
    pub(super) unsafe fn register(&self, region: &Region) -> Result<Memory, RawError> {
        let symbols = &self.library.symbols;
        let (at, len) = (region.as_ptr(), usize::try_from(region.len()).unwrap_or(0));
        let access = sys::IBV_ACCESS_LOCAL_WRITE
            | sys::IBV_ACCESS_REMOTE_WRITE
            | sys::IBV_ACCESS_RELAXED_ORDERING;
        // SAFETY: per ibv_reg_mr(3): the domain is live; the memory, by the caller's promise.
        let raw =
            unsafe { (symbols.ibv_reg_mr_iova2)(self.pd.raw(), at.cast(), len, at as u64, access) };
        let object = Object::new("ibv_reg_mr", raw, symbols.ibv_dereg_mr)?;
        // SAFETY: live.
        let key = unsafe { (*object.raw()).rkey }.into();
        let registered = Registered::Verbs(Registration(object));
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        Ok(Memory { registered, at, len, base: at as u64, key })
    }

    /// Posts the receives that were used up, in batches.
    fn refill(&mut self) -> Result<(), RawError> {
        while self.owed >= RECEIVES {
            // SAFETY: all zero is a value of the type: a receive without a place for bytes.
            let mut works: [sys::ibv_recv_wr; RECEIVES] = unsafe { zeroed() };
            let mut next = ptr::null_mut();
            for work in works.iter_mut().rev() {
                work.next = next;
                next = work;
            }
            let mut bad = ptr::null_mut();
            // SAFETY: per ibv_post_recv(3): live; a list that ends in null, read before this returns.
            let code = unsafe { sys::ibv_post_recv(self.pair.raw(), next, &raw mut bad) };
            check("ibv_post_recv", code)?;
            self.owed -= RECEIVES;
        }
        Ok(())
    }
}

/// Where the port's name is in the device's table.
fn gid_index(
    library: &Library,
    (context, port_number): (&Object<sys::ibv_context>, u8),
    port: &Port,
) -> Result<u8, RawError> {
    for index in 0..=u8::MAX {
        // SAFETY: per ibv_query_gid_ex(3): a local, all zero of which is a value, whose size the library is told.
        let (code, gid) = unsafe {
            let mut entry: sys::ibv_gid_entry = zeroed();
            let (number, size) = (port_number.into(), size_of::<sys::ibv_gid_entry>());
            let query = library.symbols._ibv_query_gid_ex;
            let code = query(context.raw(), number, index.into(), &raw mut entry, 0, size);
            // RoCE v1 and v2 have the same name twice; engines prefer v2.
            let kind = entry.gid_type != sys::IBV_GID_TYPE_ROCE_V1;
            (code, kind.then_some(entry.gid.raw))
        };
        match code {
            0 if gid == Some(port.gid.0) => return Ok(index),
            0 | libc::ENODATA => {}
            _ => break, // Past the table's end.
        }
    }
    Err(RawError::Unreachable)
}

impl Wire for Verbs {
    #[inline]
    fn post(
        &mut self,
        (memory, far): (&Memory, &Far),
        piece: &Piece,
        (data, _): (u64, Done),
        signalled: bool,
    ) -> Result<bool, RawError> {
        let &Piece { from, to, len } = piece;
        fits(len, self.longest)?;
        inside(to, len, far.len)?;
        let from = memory.inside(from, len)?;
        let Registered::Verbs(Registration(registration)) = &memory.registered else {
            return Err(RawError::Unreachable);
        };
        if self.posted - self.ended >= DEPTH_MAX.into() {
            return Ok(false);
        }
        let (Ok(length), Ok(rkey), Ok(data)) =
            (u32::try_from(len), u32::try_from(far.key), u32::try_from(data))
        else {
            return Err(RawError::Unreachable);
        };
        // A queue of writes none of which tells would never be seen to end.
        let signalled = signalled || self.unsignalled >= DEPTH_MAX / 2;
        // SAFETY: all zero is a value of the type; the registration is live.
        let (mut work, lkey): (sys::ibv_send_wr, u32) =
            unsafe { (zeroed(), (*registration.raw()).lkey) };
        let mut sge = sys::ibv_sge { addr: from as u64, length, lkey };
        work.wr_id = self.posted + 1;
        (work.sg_list, work.num_sge) = (&raw mut sge, c_int::from(len > 0));
        (work.opcode, work.imm_data) = (sys::IBV_WR_RDMA_WRITE_WITH_IMM, data.to_be());
        work.send_flags = if signalled { sys::IBV_SEND_SIGNALED } else { 0 };
        if len > 0 && length <= self.inline {
            work.send_flags |= sys::IBV_SEND_INLINE;
        }
        let remote_addr = far.base.wrapping_add(to);
        work.wr = sys::ibv_send_wr_wr { rdma: sys::ibv_send_wr_rdma { remote_addr, rkey } };
        let mut bad = ptr::null_mut();
        // SAFETY: per ibv_post_send(3): live and ready to send; one request, read before this returns, whose source
        // is registered and stays until the queue pair is gone, by the promise given to `register`.
        let code = unsafe { sys::ibv_post_send(self.pair.raw(), &raw mut work, &raw mut bad) };
        match code.abs() {
            0 => {}
            libc::ENOMEM => return Ok(false),
            code => return Err(failed("ibv_post_send", io::Error::from_raw_os_error(code))),
        }
        self.posted += 1;
        self.unsignalled = if signalled { 0 } else { self.unsignalled + 1 };
        Ok(true)
    }

    #[inline]
    fn read(&mut self, expected: u64) -> Result<Seen, RawError> {
        // SAFETY: all zero is a value of the type.
        let mut entries: [sys::ibv_wc; BATCH] = unsafe { zeroed() };
        let room = c_int::try_from(BATCH).unwrap_or(0);
        // SAFETY: per ibv_poll_cq(3): live, and room for so many.
        let read = unsafe { sys::ibv_poll_cq(self.cq.raw(), room, entries.as_mut_ptr()) };
        let read = usize::try_from(read)
            .map_err(|_| failed("ibv_poll_cq", io::Error::from_raw_os_error(libc::EIO)))?;
        let mut seen = Seen::default();
        for entry in entries.iter().take(read) {
            if entry.status != sys::IBV_WC_SUCCESS {
                let code = i32::try_from(entry.status).unwrap_or(i32::MAX);
                let text = self.library.status_text(entry.status);
                return Err(RawError::Call { call: "ibv_poll_cq", code, text });
            }
            if entry.opcode & sys::IBV_WC_RECV != 0 {
                self.owed += 1;
                seen.arrived(u32::from_be(entry.imm_data).into(), expected)?;
            } else {
                seen.own += entry.wr_id.saturating_sub(self.ended);
                self.ended = self.ended.max(entry.wr_id);
            }
        }
        if self.owed >= RECEIVES {
            self.refill()?;
        }
        Ok(seen)
    }
}
