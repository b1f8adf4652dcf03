//! Endpoints, as C sees them: options, binding, posting.

use core::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

use libfabric_sys as sys;

use crate::completion::Cq;
use crate::context::Context;
use crate::domain::{Av, Domain, NOTHING, copy_address, described};
use crate::info::MAX_MESSAGE;
use crate::lock;
use crate::log::{self, Rule, refuse, violation};
use crate::memory::{InUse, Region};
use crate::object::{self, Kind, long, number, table};
use crate::peers::Peers;
use crate::queue::Queue;
use crate::status::Status;
use crate::wired::{self, Op, Parts, Receive, Settings, Transfer, Wired};

/// What an endpoint has before it is enabled.
#[derive(Default)]
struct Bound {
    peers: Option<(Arc<Peers>, InUse)>,
    tx: Option<(Arc<Queue>, InUse)>,
    rx: Option<(Arc<Queue>, InUse)>,
    /// `FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV`, once it was set.
    unsolicited: Option<bool>,
    /// `FI_OPT_CUDA_API_PERMITTED` and `FI_OPT_SHARED_MEMORY_PERMITTED`: the caller said no.
    no_cuda: bool,
    no_shared_memory: bool,
}

/// What is wrong with an operation that is posted all the same, and fails.
type Wrong = Option<(Rule, &'static str)>;

/// An open endpoint.
pub(crate) struct Endpoint {
    domain: Arc<Domain>,
    caps: u64,
    mode: u64,
    tx_size: usize,
    rx_size: usize,
    bound: Mutex<Bound>,
    wired: OnceLock<Arc<Wired>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    _in_use: InUse,
}

impl Kind for Endpoint {
    type Fid = sys::fid_ep;
    const NAME: &str = "endpoint";
    const MAGIC: u64 = 0xfab_0006;
}

static EP: sys::fi_ops =
    sys::fi_ops { close: Some(close), bind: Some(bind), control: Some(control), ..NOTHING };

static EP_CALLS: sys::fi_ops_ep = sys::fi_ops_ep {
    size: size_of::<sys::fi_ops_ep>(),
    cancel: None,
    getopt: Some(getopt),
    setopt: Some(setopt),
    tx_ctx: None,
    rx_ctx: None,
    rx_size_left: None,
    tx_size_left: None,
};

static CM_CALLS: sys::fi_ops_cm = sys::fi_ops_cm {
    size: size_of::<sys::fi_ops_cm>(),
    setname: None,
    getname: Some(getname),
    getpeer: None,
    connect: None,
    listen: None,
    accept: None,
    reject: None,
    shutdown: None,
    join: None,
};

static MSG_CALLS: sys::fi_ops_msg = sys::fi_ops_msg {
    size: size_of::<sys::fi_ops_msg>(),
    recv: Some(recv),
    recvv: None,
    recvmsg: None,
    send: Some(send),
    sendv: None,
    sendmsg: None,
    inject: Some(no_inject),
    senddata: Some(senddata),
    injectdata: Some(no_injectdata),
};

static RMA_CALLS: sys::fi_ops_rma = sys::fi_ops_rma {
    size: size_of::<sys::fi_ops_rma>(),
    read: Some(no_read),
    readv: None,
    readmsg: None,
    write: Some(write),
    writev: Some(writev),
    writemsg: Some(writemsg),
    inject: Some(no_rma_inject),
    writedata: Some(writedata),
    injectdata: Some(no_rma_injectdata),
};

pub(crate) unsafe extern "C" fn open(
    domain: *mut sys::fid_domain,
    info: *mut sys::fi_info,
    ep: *mut *mut sys::fid_ep,
    context: *mut c_void,
) -> c_int {
    number((|| {
        // SAFETY: the caller's promise, fi_endpoint(3): our domain, and an `fi_info` of ours for it.
        let (domain, info, tx, rx) = unsafe {
            let domain = object::find::<Domain>(domain.cast())?;
            (domain, &*info, (*info).tx_attr.as_ref(), (*info).rx_attr.as_ref())
        };
        if domain.direct && info.mode & sys::FI_CONTEXT2 == 0 {
            return Err(refuse(
                Rule::Mode,
                sys::FI_EINVAL,
                "fi_endpoint with an fi_info without FI_CONTEXT2",
            ));
        }
        if !domain.direct && info.mode & sys::FI_RX_CQ_DATA != 0 {
            return Err(refuse(Rule::Mode, sys::FI_EINVAL, "fabric efa takes no FI_RX_CQ_DATA"));
        }
        let inner = Endpoint {
            caps: info.caps,
            mode: info.mode,
            tx_size: tx.map_or(0, |tx| tx.size).clamp(1, domain.config.tx_size),
            rx_size: rx.map_or(0, |rx| rx.size).clamp(1, domain.config.rx_size),
            bound: Mutex::default(),
            wired: OnceLock::new(),
            thread: Mutex::default(),
            _in_use: domain.users.enter(),
            domain,
        };
        let fid = sys::fid_ep {
            fid: object::head(sys::FI_CLASS_EP, context, &EP),
            ops: table(&EP_CALLS),
            cm: table(&CM_CALLS),
            msg: table(&MSG_CALLS),
            rma: table(&RMA_CALLS),
            tagged: std::ptr::null_mut(),
            atomic: std::ptr::null_mut(),
            collective: std::ptr::null_mut(),
        };
        // SAFETY: the caller's promise.
        unsafe { ep.write(object::publish(fid, inner)) };
        Ok(())
    })())
}

unsafe extern "C" fn close(fid: *mut sys::fid) -> c_int {
    // SAFETY: the table is in our objects only.
    let closed = unsafe { object::close::<Endpoint>(fid.cast()) };
    number(closed.map(|endpoint| {
        let Some(wired) = endpoint.wired.get() else { return };
        wired.close();
        if let Some(thread) = lock(&endpoint.thread).take()
            && thread.join().is_err()
        {
            violation(Rule::NotModelled, "the model's own thread panicked");
        }
        let discarded = wired.discard();
        log::event("discarded", &[("qpn", wired.address.qpn.into()), ("completions", discarded)]);
        // SAFETY: what was lent is lent until now: the thread has ended, and the caller is still in this call.
        unsafe { Context::give_back_all(wired.number) };
    }))
}

unsafe extern "C" fn bind(fid: *mut sys::fid, other: *mut sys::fid, flags: u64) -> c_int {
    number((|| {
        // SAFETY: the caller's promise, fi_endpoint(3): both are open objects, of ours.
        let endpoint = unsafe { object::find::<Endpoint>(fid.cast()) }?;
        if endpoint.wired.get().is_some() {
            return Err(refuse(Rule::State, sys::FI_EOPBADSTATE, "fi_ep_bind after fi_enable"));
        }
        let mut bound = lock(&endpoint.bound);
        let foreign =
            || refuse(Rule::NotBound, sys::FI_EINVAL, "bound to an object of another domain");
        // SAFETY: as before.
        match unsafe { (*other).fclass } {
            sys::FI_CLASS_CQ => {
                if flags & (sys::FI_TRANSMIT | sys::FI_RECV) == 0
                    || flags & !(sys::FI_TRANSMIT | sys::FI_RECV) != 0
                {
                    return Err(refuse(
                        Rule::Flags,
                        sys::FI_EBADFLAGS,
                        "a queue bound for neither side, or selectively",
                    ));
                }
                // SAFETY: its class says that it is one.
                let cq = unsafe { object::find::<Cq>(other.cast()) }?;
                if cq.queue.domain != endpoint.domain.number {
                    return Err(foreign());
                }
                let Bound { tx, rx, .. } = &mut *bound;
                for (place, flag) in [(tx, sys::FI_TRANSMIT), (rx, sys::FI_RECV)] {
                    if flags & flag == 0 {
                        continue;
                    }
                    if place.is_some() {
                        return Err(refuse(
                            Rule::State,
                            sys::FI_EINVAL,
                            "a second completion queue for one side",
                        ));
                    }
                    *place = Some((cq.queue.clone(), cq.queue.users.enter()));
                }
            }
            sys::FI_CLASS_AV => {
                // SAFETY: its class says that it is one.
                let av = unsafe { object::find::<Av>(other.cast()) }?;
                if av.peers.domain != endpoint.domain.number {
                    return Err(foreign());
                }
                if bound.peers.is_some() {
                    return Err(refuse(
                        Rule::State,
                        sys::FI_EINVAL,
                        "a second address vector for an endpoint",
                    ));
                }
                let in_use = av.peers.users.enter_below(1).ok_or_else(|| {
                    refuse(
                        Rule::AvShared,
                        sys::FI_ENOSYS,
                        "an address vector that has an endpoint already",
                    )
                })?;
                bound.peers = Some((av.peers.clone(), in_use));
            }
            _ => {
                return Err(refuse(
                    Rule::NotModelled,
                    sys::FI_ENOSYS,
                    "bound to neither a queue nor an address vector",
                ));
            }
        }
        Ok(())
    })())
}

unsafe extern "C" fn control(fid: *mut sys::fid, command: c_int, _arg: *mut c_void) -> c_int {
    if command != sys::FI_ENABLE {
        return -sys::FI_ENOSYS;
    }
    // SAFETY: the caller's promise, fi_endpoint(3).
    number(unsafe { object::find::<Endpoint>(fid.cast()) }.and_then(|endpoint| endpoint.enable()))
}

impl Endpoint {
    fn enable(&self) -> Result<(), c_int> {
        let bound = lock(&self.bound);
        if self.wired.get().is_some() {
            return Err(refuse(Rule::State, sys::FI_EOPBADSTATE, "enabled twice"));
        }
        let Some((peers, _)) = &bound.peers else {
            return Err(refuse(Rule::NotBound, sys::FI_ENOAV, "enabled without an address vector"));
        };
        let (Some((tx, _)), Some((rx, _))) = (&bound.tx, &bound.rx) else {
            return Err(refuse(
                Rule::NotBound,
                sys::FI_ENOCQ,
                "enabled without completion queues for both sides",
            ));
        };
        let parts = Parts {
            settings: self.settings(&bound),
            keys: self.domain.keys.clone(),
            peers: peers.clone(),
            tx: tx.clone(),
            rx: rx.clone(),
        };
        let (wired, thread) =
            wired::start(self.domain.config, parts).map_err(|_| -sys::FI_ENOMEM)?;
        *lock(&self.thread) = Some(thread);
        let permitted = |no: bool| u64::from(!no);
        log::event(
            "enabled",
            &[
                ("qpn", wired.address.qpn.into()),
                ("cuda", permitted(bound.no_cuda)),
                ("shared_memory", permitted(bound.no_shared_memory)),
            ],
        );
        // The lock on `bound` is held, so nobody else has.
        let _ = self.wired.set(wired);
        Ok(())
    }

    fn settings(&self, bound: &Bound) -> Settings {
        let (domain, config) = (&self.domain, self.domain.config);
        let default = config.unsolicited && self.mode & sys::FI_RX_CQ_DATA == 0 || !domain.direct;
        Settings {
            direct: domain.direct,
            nic: domain.nic,
            unsolicited: bound.unsolicited.unwrap_or(default),
            source: self.caps & sys::FI_SOURCE != 0,
            rma: self.caps & sys::FI_RMA != 0,
            max_rma: if domain.direct { config.max_rma } else { u32::MAX as usize },
            max_message: MAX_MESSAGE,
        }
    }

    /// Returns the device behind an enabled endpoint.
    fn wired(&self) -> Result<&Arc<Wired>, c_int> {
        self.wired
            .get()
            .ok_or_else(|| refuse(Rule::State, sys::FI_EOPBADSTATE, "used before fi_enable"))
    }

    /// # Safety
    ///
    /// As for [`Context::lend`], if the fabric is `efa-direct`.
    unsafe fn lend(&self, wired: &Wired, context: *mut c_void) -> Result<Context, c_int> {
        if self.domain.direct {
            // SAFETY: the caller's promise.
            unsafe { Context::lend(context.addr(), wired.number) }
        } else {
            Ok(Context::plain(context.addr()))
        }
    }

    /// Returns the registration for a buffer, and what is wrong with it, if only the device would notice.
    ///
    /// # Safety
    ///
    /// Without a descriptor, where none is needed, the buffer stays until the operation has completed.
    unsafe fn buffer(
        &self,
        desc: *mut c_void,
        address: u64,
        len: usize,
        use_: u64,
    ) -> Result<(Option<Arc<Region>>, Wrong), c_int> {
        if len == 0 {
            return Ok((None, None));
        }
        if desc.is_null() && !self.domain.local {
            // SAFETY: the caller's promise.
            let region = unsafe { Region::new(address, len as u64, use_, 0, self.domain.number) };
            return Ok((Some(Arc::new(region)), None));
        }
        if desc.is_null() {
            return Err(refuse(
                Rule::DescMissing,
                sys::FI_EINVAL,
                "FI_MR_LOCAL, and a null descriptor",
            ));
        }
        let Some(region) = described(desc) else {
            return Err(refuse(
                Rule::DescUnknown,
                sys::FI_EINVAL,
                "a descriptor of no open registration",
            ));
        };
        if region.access & use_ == 0 {
            return Err(refuse(
                Rule::MrAccess,
                sys::FI_EACCES,
                "a registration that is not for this operation",
            ));
        }
        let wrong = if region.domain != self.domain.number {
            Some((Rule::DescUnknown, "a descriptor of another domain"))
        } else if !region.covers(address, len as u64) {
            Some((Rule::DescRange, "a descriptor that does not cover the buffer"))
        } else {
            None
        };
        Ok((Some(region), wrong))
    }
}

/// Where an operation's bytes are, and what it is called by.
struct Local {
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    context: *mut c_void,
}

/// Posts a write or a message.
///
/// # Safety
///
/// As fi_rma(3) and fi_msg(3) say: `ep` is ours, buffer and context stay until the completion was read.
unsafe fn post(
    ep: *mut sys::fid_ep,
    local: &Local,
    to: u64,
    transfer: Transfer,
) -> Result<(), c_int> {
    // SAFETY: the caller's promise.
    let endpoint = unsafe { object::find::<Endpoint>(ep.cast()) }?;
    let _inside = endpoint.domain.enter();
    let wired = endpoint.wired()?;
    let settings = &wired.settings;
    let (limit, rule, use_) = match transfer {
        Transfer::Write { .. } if !settings.rma => {
            return Err(refuse(Rule::Capability, sys::FI_EOPNOTSUPP, "a write without FI_RMA"));
        }
        Transfer::Write { .. } => (settings.max_rma, Rule::RmaTooLong, sys::FI_WRITE),
        Transfer::Send { .. } => (settings.max_message, Rule::MessageTooLong, sys::FI_SEND),
    };
    if local.len > limit {
        let detail = format!("{} bytes of at most {limit}", local.len);
        return Err(refuse(rule, sys::FI_EMSGSIZE, &detail));
    }
    let address = local.buf.addr() as u64;
    // SAFETY: the caller's promise.
    let (region, wrong) = unsafe { endpoint.buffer(local.desc, address, local.len, use_) }?;
    let Some((peer, destination)) = wired.peers.destination(to) else {
        return Err(refuse(
            Rule::AddressUnknown,
            sys::FI_EINVAL,
            "a destination that is not in the address vector",
        ));
    };
    if wired.is_full_at_random() {
        return Err(-sys::FI_EAGAIN);
    }
    let slot = wired.tx_slots.enter_below(endpoint.tx_size).ok_or(-sys::FI_EAGAIN)?;
    // SAFETY: the caller's promise: the context is the provider's from a post that succeeds, which this one will.
    let context = unsafe { endpoint.lend(wired, local.context) }?;
    let used = region.as_ref().map(|region| region.users.enter());
    // Said once it is posted: who is told to try again has done nothing yet.
    if let Some((rule, text)) = wrong {
        violation(rule, text);
    }
    wired.post(Op {
        transfer,
        to: peer,
        source: region.map(|region| (region, address)),
        len: local.len,
        context,
        doomed: wrong.map(|_| Status::LocalKey).or_else(|| wired.fault()),
        slot,
        uses: (destination, used),
    });
    Ok(())
}

/// Returns a number that the device takes in four bytes.
fn four_bytes(value: u64) -> Result<u32, c_int> {
    u32::try_from(value).map_err(|_| {
        refuse(
            Rule::TooWide,
            sys::FI_EINVAL,
            &format!("{value:#x} as immediate data or a key: it has four bytes"),
        )
    })
}

unsafe extern "C" fn write(
    ep: *mut sys::fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    dest_addr: sys::fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    long(four_bytes(key).and_then(|key| {
        let transfer = Transfer::Write { data: None, key, address: addr };
        // SAFETY: the caller's promise, fi_rma(3).
        unsafe { post(ep, &Local { buf, len, desc, context }, dest_addr, transfer) }
    }))
}

unsafe extern "C" fn writedata(
    ep: *mut sys::fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    data: u64,
    dest_addr: sys::fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    long(four_bytes(key).and_then(|key| {
        let transfer = Transfer::Write { data: Some(four_bytes(data)?), key, address: addr };
        // SAFETY: the caller's promise, fi_rma(3).
        unsafe { post(ep, &Local { buf, len, desc, context }, dest_addr, transfer) }
    }))
}

unsafe extern "C" fn writev(
    ep: *mut sys::fid_ep,
    iov: *const libc::iovec,
    desc: *mut *mut c_void,
    count: usize,
    dest_addr: sys::fi_addr_t,
    addr: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    if count != 1 {
        return refuse(Rule::IovLimit, sys::FI_EINVAL, "a write from other than one buffer")
            as isize;
    }
    // SAFETY: the caller's promise, fi_rma(3).
    unsafe {
        let desc = if desc.is_null() { std::ptr::null_mut() } else { *desc };
        write(ep, (*iov).iov_base, (*iov).iov_len, desc, dest_addr, addr, key, context)
    }
}

unsafe extern "C" fn writemsg(
    ep: *mut sys::fid_ep,
    msg: *const sys::fi_msg_rma,
    flags: u64,
) -> isize {
    const FLAGS: u64 =
        sys::FI_REMOTE_CQ_DATA | sys::FI_COMPLETION | sys::FI_MORE | sys::FI_TRANSMIT_COMPLETE;
    if flags & sys::FI_INJECT != 0 {
        return refuse(Rule::Inject, sys::FI_ENOSYS, "fi_writemsg with FI_INJECT") as isize;
    }
    if flags & !FLAGS != 0 {
        return refuse(Rule::Flags, sys::FI_EBADFLAGS, "fi_writemsg with flags that are not offered")
            as isize;
    }
    // SAFETY: the caller's promise, fi_rma(3).
    unsafe {
        let msg = &*msg;
        if msg.iov_count != 1 || msg.rma_iov_count != 1 {
            return refuse(
                Rule::IovLimit,
                sys::FI_EINVAL,
                "fi_writemsg with other than one buffer at each side",
            ) as isize;
        }
        let (iov, remote) = (&*msg.msg_iov, &*msg.rma_iov);
        if iov.iov_len != remote.len {
            return refuse(Rule::IovLimit, sys::FI_EINVAL, "fi_writemsg with two lengths") as isize;
        }
        let desc = if msg.desc.is_null() { std::ptr::null_mut() } else { *msg.desc };
        let (buf, len, context) = (iov.iov_base, iov.iov_len, msg.context);
        if flags & sys::FI_REMOTE_CQ_DATA == 0 {
            write(ep, buf, len, desc, msg.addr, remote.addr, remote.key, context)
        } else {
            writedata(ep, buf, len, desc, msg.data, msg.addr, remote.addr, remote.key, context)
        }
    }
}

unsafe extern "C" fn send(
    ep: *mut sys::fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    dest_addr: sys::fi_addr_t,
    context: *mut c_void,
) -> isize {
    // SAFETY: the caller's promise, fi_msg(3).
    long(unsafe {
        post(ep, &Local { buf, len, desc, context }, dest_addr, Transfer::Send { data: None })
    })
}

unsafe extern "C" fn senddata(
    ep: *mut sys::fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    data: u64,
    dest_addr: sys::fi_addr_t,
    context: *mut c_void,
) -> isize {
    long(four_bytes(data).and_then(|data| {
        let transfer = Transfer::Send { data: Some(data) };
        // SAFETY: the caller's promise, fi_msg(3).
        unsafe { post(ep, &Local { buf, len, desc, context }, dest_addr, transfer) }
    }))
}

unsafe extern "C" fn recv(
    ep: *mut sys::fid_ep,
    buf: *mut c_void,
    len: usize,
    desc: *mut c_void,
    _src_addr: sys::fi_addr_t,
    context: *mut c_void,
) -> isize {
    long((|| {
        // SAFETY: the caller's promise, fi_msg(3).
        let endpoint = unsafe { object::find::<Endpoint>(ep.cast()) }?;
        let _inside = endpoint.domain.enter();
        let wired = endpoint.wired()?;
        let address = buf.addr() as u64;
        // SAFETY: as before.
        let (region, wrong) = unsafe { endpoint.buffer(desc, address, len, sys::FI_RECV) }?;
        if let Some((rule, text)) = wrong {
            return Err(refuse(rule, sys::FI_EINVAL, text));
        }
        let slot = wired.rx_slots.enter_below(endpoint.rx_size).ok_or(-sys::FI_EAGAIN)?;
        // SAFETY: as before: this post succeeds.
        let context = unsafe { endpoint.lend(wired, context) }?;
        let used = region.as_ref().map(|region| region.users.enter());
        // Whatever it says: the device flushes it.
        let _ = wired.fault();
        wired.post_receive(Receive { region, address, len, context, slot, used });
        Ok(())
    })())
}

unsafe extern "C" fn no_inject(
    _: *mut sys::fid_ep,
    _: *const c_void,
    _: usize,
    _: sys::fi_addr_t,
) -> isize {
    refuse(Rule::Inject, sys::FI_ENOSYS, "fi_inject") as isize
}

unsafe extern "C" fn no_injectdata(
    _: *mut sys::fid_ep,
    _: *const c_void,
    _: usize,
    _: u64,
    _: sys::fi_addr_t,
) -> isize {
    refuse(Rule::Inject, sys::FI_ENOSYS, "fi_injectdata") as isize
}

unsafe extern "C" fn no_rma_inject(
    _: *mut sys::fid_ep,
    _: *const c_void,
    _: usize,
    _: sys::fi_addr_t,
    _: u64,
    _: u64,
) -> isize {
    refuse(Rule::Inject, sys::FI_ENOSYS, "fi_inject_write") as isize
}

unsafe extern "C" fn no_rma_injectdata(
    _: *mut sys::fid_ep,
    _: *const c_void,
    _: usize,
    _: u64,
    _: sys::fi_addr_t,
    _: u64,
    _: u64,
) -> isize {
    refuse(Rule::Inject, sys::FI_ENOSYS, "fi_inject_writedata") as isize
}

unsafe extern "C" fn no_read(
    _: *mut sys::fid_ep,
    _: *mut c_void,
    _: usize,
    _: *mut c_void,
    _: sys::fi_addr_t,
    _: u64,
    _: u64,
    _: *mut c_void,
) -> isize {
    refuse(Rule::NotModelled, sys::FI_ENOSYS, "fi_read") as isize
}

unsafe extern "C" fn getname(fid: *mut sys::fid, addr: *mut c_void, addrlen: *mut usize) -> c_int {
    number((|| {
        // SAFETY: the caller's promise, fi_cm(3).
        let endpoint = unsafe { object::find::<Endpoint>(fid.cast()) }?;
        let address = endpoint.wired()?.address;
        // SAFETY: as before: `addrlen` says how much room there is.
        if unsafe { copy_address(address, addr, addrlen) } {
            Ok(())
        } else {
            Err(-sys::FI_ETOOSMALL)
        }
    })())
}

/// An option's value.
enum Value {
    Size(usize),
    Bool(bool),
    Int(c_int),
}

unsafe extern "C" fn getopt(
    fid: *mut sys::fid,
    level: c_int,
    name: c_int,
    optval: *mut c_void,
    optlen: *mut usize,
) -> c_int {
    number((|| {
        // SAFETY: the caller's promise, fi_endpoint(3).
        let endpoint = unsafe { object::find::<Endpoint>(fid.cast()) }?;
        if level != sys::FI_OPT_ENDPOINT {
            return Err(-sys::FI_ENOPROTOOPT);
        }
        let (direct, settings) =
            (endpoint.domain.direct, endpoint.settings(&lock(&endpoint.bound)));
        let value = match name {
            sys::FI_OPT_MAX_MSG_SIZE => Value::Size(settings.max_message),
            sys::FI_OPT_MAX_RMA_SIZE if direct => Value::Size(settings.max_rma),
            sys::FI_OPT_MAX_RMA_SIZE => Value::Size(usize::MAX),
            sys::FI_OPT_INJECT_MSG_SIZE => Value::Size(32),
            sys::FI_OPT_INJECT_RMA_SIZE => Value::Size(0),
            sys::FI_OPT_EFA_RNR_RETRY => Value::Size(7),
            sys::FI_OPT_FI_HMEM_P2P => Value::Int(sys::FI_HMEM_P2P_REQUIRED),
            sys::FI_OPT_EFA_EMULATED_WRITE | sys::FI_OPT_EFA_EMULATED_READ => {
                Value::Bool(endpoint.domain.config.emulated_write)
            }
            sys::FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV => Value::Bool(settings.unsolicited),
            _ => return Err(-sys::FI_ENOPROTOOPT),
        };
        let needed = match value {
            Value::Size(_) => size_of::<usize>(),
            Value::Bool(_) => 1,
            Value::Int(_) => size_of::<c_int>(),
        };
        // SAFETY: as before: `optlen` says how much room there is.
        unsafe {
            if optlen.replace(needed) < needed {
                return Err(-sys::FI_ETOOSMALL);
            }
            match value {
                Value::Size(value) => optval.cast::<usize>().write_unaligned(value),
                Value::Bool(value) => optval.cast::<u8>().write(value.into()),
                Value::Int(value) => optval.cast::<c_int>().write_unaligned(value),
            }
        }
        Ok(())
    })())
}

unsafe extern "C" fn setopt(
    fid: *mut sys::fid,
    level: c_int,
    name: c_int,
    optval: *const c_void,
    optlen: usize,
) -> c_int {
    number((|| {
        // SAFETY: the caller's promise, fi_endpoint(3).
        let endpoint = unsafe { object::find::<Endpoint>(fid.cast()) }?;
        if level != sys::FI_OPT_ENDPOINT {
            return Err(-sys::FI_ENOPROTOOPT);
        }
        let size = |len: usize| {
            if optlen == len {
                Ok(())
            } else {
                Err(refuse(Rule::Flags, sys::FI_EINVAL, "an option of another size"))
            }
        };
        let early = || match endpoint.wired.get() {
            None => Ok(()),
            Some(_) => Err(refuse(
                Rule::State,
                sys::FI_EINVAL,
                "an option that is to be set before fi_enable",
            )),
        };
        let on = || -> Result<bool, c_int> {
            size(1)?;
            // SAFETY: as before: there is a C `bool`.
            Ok(unsafe { optval.cast::<u8>().read() } != 0)
        };
        match name {
            sys::FI_OPT_CUDA_API_PERMITTED | sys::FI_OPT_SHARED_MEMORY_PERMITTED => {
                let no = !on()?;
                early()?;
                let bound = &mut *lock(&endpoint.bound);
                if name == sys::FI_OPT_CUDA_API_PERMITTED {
                    bound.no_cuda = no;
                } else {
                    bound.no_shared_memory = no;
                }
                Ok(())
            }
            sys::FI_OPT_EFA_HOMOGENEOUS_PEERS => {
                on()?;
                early()
            }
            sys::FI_OPT_EFA_USE_DEVICE_RDMA => {
                let lacks = !on()? && endpoint.caps & sys::FI_RMA != 0;
                if lacks { Err(-sys::FI_EOPNOTSUPP) } else { early() }
            }
            // Neither device nor network keeps an order.
            sys::FI_OPT_EFA_WRITE_IN_ORDER_ALIGNED_128_BYTES
            | sys::FI_OPT_EFA_SENDRECV_IN_ORDER_ALIGNED_128_BYTES => {
                if on()? {
                    Err(-sys::FI_EOPNOTSUPP)
                } else {
                    Ok(())
                }
            }
            sys::FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV => {
                let on = on()?;
                early()?;
                if !on && endpoint.mode & sys::FI_RX_CQ_DATA == 0 && endpoint.domain.direct
                    || on && !endpoint.domain.config.unsolicited
                {
                    return Err(-sys::FI_EOPNOTSUPP);
                }
                lock(&endpoint.bound).unsolicited = Some(on);
                Ok(())
            }
            sys::FI_OPT_EFA_RNR_RETRY => {
                size(size_of::<usize>())?;
                early()
            }
            sys::FI_OPT_FI_HMEM_P2P => size(size_of::<c_int>()),
            _ => Err(-sys::FI_ENOPROTOOPT),
        }
    })())
}
