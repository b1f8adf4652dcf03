//! Who speaks to an engine's door and is no engine: what it sends is up to the test.
//!
//! Bare endpoints of what engines are reached by: a reliable datagram endpoint of libfabric's, and a queue pair for unreliable datagrams
//! on an RDMA device. They know no protocol; each message is one datagram.

use std::collections::VecDeque;
use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use ibverbs_sys as ib;
use immwire::core::datagram::{Address, DATAGRAM_MAX, Message};
use immwire::core::id::EngineId;
use immwire::core::port::{Door as Place, HEADER_BYTES, Number24, PACKET_MAX};
use immwire::core::wire::{NetAddr, NicAddr, ProviderKind};
use libfabric_sys as sys;

use crate::host::{Host, patience};

/// Who has to move while the stranger waits.
pub trait Moves {
    fn step(&self);
}

impl Moves for Host {
    fn step(&self) {
        Self::step(self);
    }
}

/// The engine is moved elsewhere.
pub struct Nobody;

impl Moves for Nobody {
    fn step(&self) {
        std::thread::yield_now();
    }
}

/// A bare endpoint that sends what it likes.
pub trait Stranger: Send {
    /// What engines are that it speaks to.
    fn kind(&self) -> ProviderKind;

    /// Its own door, as engines have addresses.
    fn name(&self) -> &Address;

    /// The longest message that a genuine engine sends there.
    fn longest(&self) -> usize;

    /// The address of somebody's door.
    fn meet(&mut self, door: &Address) -> u64;

    /// Sends bytes, while `me` moves; whether they were delivered, or sent, where that is not told.
    fn say(&mut self, me: &dyn Moves, to: u64, bytes: &[u8]) -> bool;

    /// Looks once for what has come.
    fn step(&mut self);

    /// What has come, and was not looked at.
    fn heard(&mut self) -> &mut VecDeque<Vec<u8>>;

    /// The next message to it, while `me` moves.
    fn hear(&mut self, me: &dyn Moves, limit: Duration) -> Option<Vec<u8>> {
        let start = Instant::now();
        while self.heard().is_empty() && start.elapsed() < limit {
            self.step();
            me.step();
        }
        self.heard().pop_front()
    }

    fn tell(&mut self, me: &dyn Moves, to: u64, message: &Message<'_>) {
        assert!(self.say(me, to, &encoded(message)), "{message:?} is not delivered");
    }

    /// An address that leads here, of the engine that is asked for.
    fn as_engine(&self, engine: EngineId) -> NetAddr {
        let nic = NicAddr { speed_gbps: 100, address: self.name().clone() };
        NetAddr::new(self.kind(), engine, &[nic]).expect("an address")
    }
}

pub fn encoded(message: &Message<'_>) -> Vec<u8> {
    let mut bytes = [0; DATAGRAM_MAX];
    let len = message.encode(&mut bytes).expect("fits");
    bytes[..len].to_vec()
}

// ---- an endpoint ----

const RECEIVES: usize = 16;
/// Longer than any message.
const ROOM: usize = 2 * DATAGRAM_MAX;

/// A bare endpoint of libfabric's.
pub struct Endpoint {
    provider: CString,
    /// Whose doors it knows, by their number.
    met: Vec<Address>,
    library: &'static sys::Library,
    info: *mut sys::fi_info,
    fabric: *mut sys::fid_fabric,
    domain: *mut sys::fid_domain,
    cq: *mut sys::fid_cq,
    av: *mut sys::fid_av,
    ep: *mut sys::fid_ep,
    mr: *mut sys::fid_mr,
    /// Receives, and one send behind them; libfabric's while posted, so never a reference.
    buffers: *mut [u8],
    contexts: *mut [sys::fi_context2],
    name: Address,
    heard: VecDeque<Vec<u8>>,
    /// How the last send has ended.
    sent: Option<bool>,
}

// SAFETY: objects of FI_THREAD_SAFE domains, and memory of its own; used by one thread at a time.
unsafe impl Send for Endpoint {}

fn ok(library: &sys::Library, what: &str, code: i32) {
    assert_eq!(code, 0, "{what}: {}", library.strerror(-code));
}

impl Endpoint {
    pub fn open(provider: &str) -> Self {
        Self::of(CString::new(provider).expect("a name"))
    }

    fn of(provider: CString) -> Self {
        let library = sys::Library::load().expect("libfabric");
        let buffers = Box::into_raw(vec![0; ROOM * (RECEIVES + 1)].into_boxed_slice());
        let empty = sys::fi_context2 { internal: [null_mut(); 8] };
        let contexts = Box::into_raw(vec![empty; RECEIVES + 1].into_boxed_slice());
        // SAFETY: the calls of a program in C, in the order and with the arguments that the manual asks for: every
        // object was opened by an earlier call that succeeded, attributes and results are locals, the string
        // that the library frees is from malloc, and the buffers live until after the endpoint.
        let mut stranger = unsafe {
            let hints = library.dupinfo(null());
            let attr = (*hints).domain_attr;
            (*hints).caps = sys::FI_MSG | sys::FI_RMA;
            (*hints).mode = sys::FI_CONTEXT | sys::FI_CONTEXT2;
            (*(*hints).ep_attr).type_ = sys::FI_EP_RDM;
            (*attr).mr_mode = sys::FI_MR_LOCAL
                | sys::FI_MR_VIRT_ADDR
                | sys::FI_MR_ALLOCATED
                | sys::FI_MR_PROV_KEY;
            (*attr).threading = sys::FI_THREAD_SAFE;
            (*attr).cq_data_size = 4;
            (*(*hints).fabric_attr).prov_name = libc::strdup(provider.as_ptr());
            let mut info = null_mut();
            let api = library.version().min(sys::Version { major: 1, minor: 20 }).code();
            let node = c"127.0.0.1".as_ptr();
            let code = library.getinfo(api, node, null(), sys::FI_SOURCE, hints, &raw mut info);
            ok(library, "fi_getinfo", code);
            library.freeinfo(hints);
            let (mut fabric, mut domain) = (null_mut(), null_mut());
            let code = library.fabric((*info).fabric_attr, &raw mut fabric, null_mut());
            ok(library, "fi_fabric", code);
            let code = sys::fi_domain(fabric, info, &raw mut domain, null_mut());
            ok(library, "fi_domain", code);
            let (mut cq, mut av, mut ep, mut mr) = (null_mut(), null_mut(), null_mut(), null_mut());
            let mut cq_attr: sys::fi_cq_attr = std::mem::zeroed();
            cq_attr.size = 256;
            cq_attr.format = sys::FI_CQ_FORMAT_DATA;
            let code = sys::fi_cq_open(domain, &raw mut cq_attr, &raw mut cq, null_mut());
            ok(library, "fi_cq_open", code);
            let mut av_attr: sys::fi_av_attr = std::mem::zeroed();
            av_attr.type_ = sys::FI_AV_TABLE;
            let code = sys::fi_av_open(domain, &raw mut av_attr, &raw mut av, null_mut());
            ok(library, "fi_av_open", code);
            ok(library, "fi_endpoint", sys::fi_endpoint(domain, info, &raw mut ep, null_mut()));
            let both = sys::FI_TRANSMIT | sys::FI_RECV;
            ok(library, "bind cq", sys::fi_ep_bind(ep, &raw mut (*cq).fid, both));
            ok(library, "bind av", sys::fi_ep_bind(ep, &raw mut (*av).fid, 0));
            ok(library, "fi_enable", sys::fi_enable(ep));
            let (at, len) = (buffers.cast::<c_void>(), buffers.len());
            let access = sys::FI_SEND | sys::FI_RECV;
            let code = sys::fi_mr_reg(domain, at, len, access, 0, 1, 0, &raw mut mr, null_mut());
            ok(library, "fi_mr_reg", code);
            let (mut name, mut len) = ([0_u8; 64], 64);
            ok(library, "fi_getname", sys::fi_getname(ep, name.as_mut_ptr().cast(), &raw mut len));
            let name = Address::from_slice(&name[..len]).expect("fits");
            let (heard, sent) = (VecDeque::new(), None);
            Self {
                provider,
                met: Vec::new(),
                library,
                info,
                fabric,
                domain,
                cq,
                av,
                ep,
                mr,
                buffers,
                contexts,
                name,
                heard,
                sent,
            }
        };
        (0..RECEIVES).for_each(|at| stranger.listen(at));
        stranger
    }

    fn buffer(&self, at: usize) -> *mut u8 {
        self.buffers.cast::<u8>().wrapping_add(at * ROOM)
    }

    fn context(&self, at: usize) -> *mut c_void {
        self.contexts.cast::<sys::fi_context2>().wrapping_add(at).cast()
    }

    fn listen(&mut self, at: usize) {
        let (to, context) = (self.buffer(at).cast(), self.context(at));
        // SAFETY: the buffer is registered and not posted now; so is its context.
        let code = unsafe {
            let desc = sys::fi_mr_desc(self.mr);
            sys::fi_recv(self.ep, to, ROOM, desc, sys::FI_ADDR_UNSPEC, context)
        };
        assert_eq!(code, 0, "fi_recv");
    }

    /// Somebody new in its place, who knows the same doors by the same numbers.
    fn renew(&mut self) {
        let met = std::mem::take(&mut self.met);
        *self = Self::of(self.provider.clone());
        for door in &met {
            self.meet(door);
        }
    }

    /// Drives the provider; keeps what is heard.
    fn step(&mut self) {
        // SAFETY: all zero is an entry; the queue is live, and one entry is written at most.
        let mut entry: sys::fi_cq_data_entry = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let read = unsafe { sys::fi_cq_read(self.cq, (&raw mut entry).cast(), 1) };
        let (context, bytes) = if read == 1 {
            (entry.op_context, Some(entry.len))
        } else if read == -(sys::FI_EAVAIL as isize) {
            // SAFETY: all zero is an entry, without room for details.
            let mut failed: sys::fi_cq_err_entry = unsafe { std::mem::zeroed() };
            // SAFETY: as above.
            let read = unsafe { sys::fi_cq_readerr(self.cq, &raw mut failed, 0) };
            if read != 1 {
                return;
            }
            (failed.op_context, None)
        } else {
            return;
        };
        let offset = context as usize - self.contexts.cast::<sys::fi_context2>() as usize;
        let at = offset / size_of::<sys::fi_context2>();
        if at == RECEIVES {
            self.sent = Some(bytes.is_some());
            return;
        }
        if let Some(len) = bytes {
            let mut message = vec![0; len.min(ROOM)];
            // SAFETY: the receive has ended, so the buffer is ours.
            unsafe {
                std::ptr::copy_nonoverlapping(self.buffer(at), message.as_mut_ptr(), message.len());
            }
            self.heard.push_back(message);
        }
        self.listen(at);
    }
}

impl Stranger for Endpoint {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Libfabric
    }

    fn name(&self) -> &Address {
        &self.name
    }

    fn longest(&self) -> usize {
        DATAGRAM_MAX
    }

    fn meet(&mut self, door: &Address) -> u64 {
        assert_eq!(door.len(), self.name.len());
        let mut handle = sys::FI_ADDR_NOTAVAIL;
        // SAFETY: one address of this provider's, of its length.
        let count = unsafe {
            let from = door.as_ptr().cast();
            sys::fi_av_insert(self.av, from, 1, &raw mut handle, 0, null_mut())
        };
        assert_eq!(count, 1, "fi_av_insert");
        self.met.push(door.clone());
        handle
    }

    fn say(&mut self, me: &dyn Moves, to: u64, bytes: &[u8]) -> bool {
        self.sent = None;
        let (mut posted, start) = (false, Instant::now());
        let mut renewed = start;
        while self.sent.is_none() {
            assert!(
                start.elapsed() < patience(),
                "a stranger's message is not {}",
                if posted { "sent" } else { "taken" }
            );
            if !posted {
                // `net` of libfabric 1.17 may lose a request to connect while it closes another connection, and then
                // waits for the answer for ever.
                if renewed.elapsed() > Duration::from_secs(2) {
                    renewed = Instant::now();
                    self.renew();
                }
                let (from, context) = (self.buffer(RECEIVES), self.context(RECEIVES));
                // SAFETY: not under way: each send is waited for.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), from, bytes.len()) };
                // SAFETY: as above; registered; the handle is from `meet`.
                let code = unsafe {
                    let desc = sys::fi_mr_desc(self.mr);
                    sys::fi_send(self.ep, from.cast(), bytes.len(), desc, to, context)
                };
                match code {
                    0 => posted = true,
                    code if code == -(sys::FI_EAGAIN as isize) => {}
                    _ => return false,
                }
            }
            self.step();
            me.step();
        }
        self.sent == Some(true)
    }

    fn step(&mut self) {
        Self::step(self);
    }

    fn heard(&mut self) -> &mut VecDeque<Vec<u8>> {
        &mut self.heard
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // SAFETY: in the reverse order, once; memory behind what used it.
        unsafe {
            sys::fi_close(&raw mut (*self.ep).fid);
            sys::fi_close(&raw mut (*self.mr).fid);
            sys::fi_close(&raw mut (*self.cq).fid);
            sys::fi_close(&raw mut (*self.av).fid);
            sys::fi_close(&raw mut (*self.domain).fid);
            sys::fi_close(&raw mut (*self.fabric).fid);
            self.library.freeinfo(self.info);
            drop((Box::from_raw(self.buffers), Box::from_raw(self.contexts)));
        }
    }
}

// ---- a queue pair ----

/// Buffers for what comes, and one behind them for what is sent.
const TAKES: u16 = 64;
const SPACE: usize = HEADER_BYTES + PACKET_MAX;

/// A bare queue pair for datagrams, on an RDMA device.
pub struct Datagrams {
    library: &'static ib::Library,
    context: *mut ib::ibv_context,
    pd: *mut ib::ibv_pd,
    cq: *mut ib::ibv_cq,
    qp: *mut ib::ibv_qp,
    mr: *mut ib::ibv_mr,
    /// The device's while posted, so never a reference.
    buffers: *mut [u8],
    /// Where our port's name is in its table.
    gid_index: u8,
    name: Address,
    met: Vec<(*mut ib::ibv_ah, Place)>,
    heard: VecDeque<Vec<u8>>,
    /// How the last send has ended.
    sent: Option<bool>,
}

// SAFETY: libibverbs locks what its objects share; the memory is its own, and it is used by one thread at a time.
unsafe impl Send for Datagrams {}

impl Datagrams {
    /// On the device whose port that engine's door is on.
    pub fn open(beside: &Address) -> Self {
        let library = ib::Library::load().expect("libibverbs");
        let place = Place::decode(beside).expect("a door");
        let symbols = &library.symbols;
        let (context, gid_index) = device_of(library, &place);
        let buffers = Box::into_raw(vec![0; SPACE * (usize::from(TAKES) + 1)].into_boxed_slice());
        // SAFETY: the calls of a program in C, in the order and with the arguments that the manual asks for: every
        // object was made by an earlier call that succeeded, attributes are locals, and the buffers live until after the
        // queue pair.
        let mut stranger = unsafe {
            let pd = (symbols.ibv_alloc_pd)(context);
            let cq = (symbols.ibv_create_cq)(context, 256, null_mut(), null_mut(), 0);
            assert!(!pd.is_null() && !cq.is_null(), "ibv_alloc_pd, ibv_create_cq");
            let at = buffers.cast::<u8>();
            let access = ib::IBV_ACCESS_LOCAL_WRITE;
            let mr = (symbols.ibv_reg_mr_iova2)(pd, at.cast(), buffers.len(), at as u64, access);
            assert!(!mr.is_null(), "ibv_reg_mr");
            let mut init: ib::ibv_qp_init_attr = std::mem::zeroed();
            (init.send_cq, init.recv_cq, init.qp_type) = (cq, cq, ib::IBV_QPT_UD);
            (init.cap.max_send_wr, init.cap.max_recv_wr) = (4, TAKES.into());
            (init.cap.max_send_sge, init.cap.max_recv_sge) = (1, 1);
            let qp = (symbols.ibv_create_qp)(pd, &raw mut init);
            assert!(!qp.is_null(), "ibv_create_qp");
            let mut attr: ib::ibv_qp_attr = std::mem::zeroed();
            (attr.port_num, attr.qkey) = (1, place.key);
            let first = ib::IBV_QP_PKEY_INDEX | ib::IBV_QP_PORT | ib::IBV_QP_QKEY;
            for (state, more) in [
                (ib::IBV_QPS_INIT, first),
                (ib::IBV_QPS_RTR, 0),
                (ib::IBV_QPS_RTS, ib::IBV_QP_SQ_PSN),
            ] {
                attr.qp_state = state;
                let code = (symbols.ibv_modify_qp)(qp, &raw mut attr, ib::IBV_QP_STATE | more);
                assert_eq!(code, 0, "ibv_modify_qp to {state}");
            }
            let number = Number24::new((*qp).qp_num);
            let (name, met) = (Place { number, ..place }.encode(), Vec::new());
            let (heard, sent) = (VecDeque::new(), None);
            Self { library, context, pd, cq, qp, mr, buffers, gid_index, name, met, heard, sent }
        };
        (0..TAKES).for_each(|at| stranger.listen(at));
        stranger
    }

    /// Buffer number `at`, as it is posted.
    fn sge(&self, at: u16, len: usize) -> ib::ibv_sge {
        let addr = self.buffer(at) as u64;
        let length = u32::try_from(len).expect("small");
        // SAFETY: live.
        ib::ibv_sge { addr, length, lkey: unsafe { (*self.mr).lkey } }
    }

    fn buffer(&self, at: u16) -> *mut u8 {
        self.buffers.cast::<u8>().wrapping_add(usize::from(at) * SPACE)
    }

    fn listen(&mut self, at: u16) {
        let mut sge = self.sge(at, SPACE);
        let (sg_list, next) = (&raw mut sge, null_mut());
        let mut work = ib::ibv_recv_wr { wr_id: at.into(), next, sg_list, num_sge: 1 };
        let mut bad = null_mut();
        // SAFETY: the buffer is registered and not posted now.
        let code = unsafe { ib::ibv_post_recv(self.qp, &raw mut work, &raw mut bad) };
        assert_eq!(code, 0, "ibv_post_recv");
    }
}

/// Opens the device that has that port, its first and of RoCE v2, and finds where the port's name is in its table.
fn device_of(library: &ib::Library, place: &Place) -> (*mut ib::ibv_context, u8) {
    let symbols = &library.symbols;
    let mut count = 0;
    // SAFETY: the list has so many devices until it is freed; what is opened outlives it; entries are locals.
    unsafe {
        let list = (symbols.ibv_get_device_list)(&raw mut count);
        assert!(!list.is_null(), "ibv_get_device_list");
        let devices = (0..usize::try_from(count).expect("a count")).map(|at| *list.add(at));
        let mut found = None;
        for device in devices {
            let context = (symbols.ibv_open_device)(device);
            assert!(!context.is_null(), "ibv_open_device");
            let is_it = |index: &u8| {
                let mut entry: ib::ibv_gid_entry = std::mem::zeroed();
                let size = size_of::<ib::ibv_gid_entry>();
                let query = symbols._ibv_query_gid_ex;
                let code = query(context, 1, (*index).into(), &raw mut entry, 0, size);
                // Soft-RoCE has each address twice, for RoCE v1 and v2, or once, for v2.
                let is_v2 = entry.gid_type == ib::IBV_GID_TYPE_ROCE_V2;
                code == 0 && is_v2 && entry.gid.raw == place.port.gid.0
            };
            match (0..64).find(is_it) {
                Some(index) if found.is_none() => found = Some((context, index)),
                _ => assert_eq!((symbols.ibv_close_device)(context), 0),
            }
        }
        (symbols.ibv_free_device_list)(list);
        found.expect("the device that the engine is on")
    }
}

impl Stranger for Datagrams {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Verbs
    }

    fn name(&self) -> &Address {
        &self.name
    }

    fn longest(&self) -> usize {
        PACKET_MAX
    }

    fn meet(&mut self, door: &Address) -> u64 {
        let place = Place::decode(door).expect("a door");
        // SAFETY: all zero is a value of the type.
        let mut attr: ib::ibv_ah_attr = unsafe { std::mem::zeroed() };
        attr.grh.dgid = ib::ibv_gid { raw: place.port.gid.0 };
        (attr.grh.sgid_index, attr.grh.hop_limit) = (self.gid_index, 64);
        (attr.is_global, attr.port_num) = (1, 1);
        // SAFETY: a live domain, and a local.
        let handle = unsafe { (self.library.symbols.ibv_create_ah)(self.pd, &raw mut attr) };
        assert!(!handle.is_null(), "ibv_create_ah");
        self.met.push((handle, place));
        self.met.len() as u64 - 1
    }

    fn say(&mut self, me: &dyn Moves, to: u64, bytes: &[u8]) -> bool {
        self.sent = None;
        let (handle, place) = self.met[usize::try_from(to).expect("small")];
        let bytes = &bytes[..bytes.len().min(PACKET_MAX)];
        // SAFETY: not under way: each send is waited for.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.buffer(TAKES), bytes.len());
        }
        let mut sge = self.sge(TAKES, bytes.len());
        // SAFETY: all zero is a value of the type.
        let mut work: ib::ibv_send_wr = unsafe { std::mem::zeroed() };
        work.wr_id = TAKES.into();
        (work.sg_list, work.num_sge) = (&raw mut sge, 1);
        (work.opcode, work.send_flags) = (ib::IBV_WR_SEND, ib::IBV_SEND_SIGNALED);
        let (ah, remote_qpn, remote_qkey) = (handle, place.number.get(), place.key);
        work.wr = ib::ibv_send_wr_wr { ud: ib::ibv_send_wr_ud { ah, remote_qpn, remote_qkey } };
        let mut bad = null_mut();
        // SAFETY: ours, one request, whose buffer is registered and waited for.
        let code = unsafe { ib::ibv_post_send(self.qp, &raw mut work, &raw mut bad) };
        assert_eq!(code, 0, "ibv_post_send");
        let start = Instant::now();
        while self.sent.is_none() {
            assert!(start.elapsed() < patience(), "a stranger's message is not sent");
            Stranger::step(self);
            me.step();
        }
        self.sent == Some(true)
    }

    fn step(&mut self) {
        // SAFETY: all zero is a value of the type.
        let mut done: ib::ibv_wc = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is live, and one completion is written at most.
        if unsafe { ib::ibv_poll_cq(self.cq, 1, &raw mut done) } != 1 {
            return;
        }
        let at = u16::try_from(done.wr_id).expect("ours");
        let is_good = done.status == ib::IBV_WC_SUCCESS;
        if at == TAKES {
            self.sent = Some(is_good);
            return;
        }
        assert!(is_good, "a receive failed: {}", self.library.status_text(done.status));
        let len = usize::try_from(done.byte_len).expect("small") - HEADER_BYTES;
        let mut message = vec![0; len];
        // SAFETY: the receive has ended, so the buffer is ours, and has so much behind the header.
        unsafe {
            let from = self.buffer(at).wrapping_add(HEADER_BYTES);
            std::ptr::copy_nonoverlapping(from, message.as_mut_ptr(), len);
        }
        self.heard.push_back(message);
        self.listen(at);
    }

    fn heard(&mut self) -> &mut VecDeque<Vec<u8>> {
        &mut self.heard
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        let symbols = &self.library.symbols;
        // SAFETY: in the reverse order, once; memory behind what used it.
        unsafe {
            for &(handle, _) in &self.met {
                (symbols.ibv_destroy_ah)(handle);
            }
            (symbols.ibv_destroy_qp)(self.qp);
            (symbols.ibv_dereg_mr)(self.mr);
            (symbols.ibv_destroy_cq)(self.cq);
            (symbols.ibv_dealloc_pd)(self.pd);
            (symbols.ibv_close_device)(self.context);
            drop(Box::from_raw(self.buffers));
        }
    }
}
