//! Fabrics, domains, registrations and address vectors, as C sees them.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libfabric_sys as sys;

use crate::completion;
use crate::config::{self, Config};
use crate::device::DmaBuf;
use crate::disorder::{Choice, Disorder};
use crate::endpoint;
use crate::info;
use crate::lock;
use crate::log::{Rule, refuse, refuse_tried, violation};
use crate::memory::{InUse, Keys, Region, Users, is_mapped, is_writable};
use crate::object::{self, Kind, number, table};
use crate::packet::{ADDRESS_BYTES, Address};
use crate::peers::Peers;

/// An open fabric.
pub(crate) struct Fabric {
    direct: bool,
    api_version: u32,
    users: Users,
}

impl Kind for Fabric {
    type Fid = sys::fid_fabric;
    const NAME: &str = "fabric";
    const MAGIC: u64 = 0xfab_0001;
}

/// An open domain: one device.
pub(crate) struct Domain {
    pub config: &'static Config,
    pub number: u64,
    pub nic: u8,
    /// The fabric is `efa-direct`.
    pub direct: bool,
    /// `FI_MR_LOCAL`: operations need descriptors.
    pub local: bool,
    /// `FI_HMEM` and `FI_MR_HMEM`: a GPU's memory may be registered.
    hmem: bool,
    /// That was asked for.
    api_version: u32,
    pub keys: Arc<Keys>,
    pub users: Users,
    /// `FI_THREAD_DOMAIN`.
    serial: bool,
    /// The thread that is in a call now; zero if none is.
    inside: AtomicU64,
    _fabric: InUse,
}

impl Kind for Domain {
    type Fid = sys::fid_domain;
    const NAME: &str = "domain";
    const MAGIC: u64 = 0xfab_0002;
}

/// A thread in a call on a domain's objects.
pub(crate) struct Inside<'a>(Option<&'a AtomicU64>);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if let Some(inside) = self.0 {
            inside.store(0, Ordering::Release);
        }
    }
}

impl Domain {
    /// Enters a call of the data path, and sees whether another thread is in one, where that is forbidden.
    pub(crate) fn enter(&self) -> Inside<'_> {
        static THREADS: AtomicU64 = AtomicU64::new(1);
        thread_local!(static ME: u64 = THREADS.fetch_add(1, Ordering::Relaxed));
        if !self.serial {
            return Inside(None);
        }
        let me = ME.with(|me| *me);
        match self.inside.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Inside(Some(&self.inside)),
            Err(_) => {
                violation(
                    Rule::Threads,
                    "FI_THREAD_DOMAIN, and two threads in calls on one domain",
                );
                Inside(None)
            }
        }
    }
}

/// An open registration.
struct Mr {
    region: Arc<Region>,
    domain: Arc<Domain>,
    _in_use: InUse,
}

impl Kind for Mr {
    type Fid = sys::fid_mr;
    const NAME: &str = "registration";
    const MAGIC: u64 = 0xfab_0003;
}

/// The open registrations of the process, by descriptor.
static DESCRIPTORS: Mutex<Option<HashMap<usize, Arc<Region>>>> = Mutex::new(None);

/// Returns the open registration with this descriptor.
pub(crate) fn described(desc: *mut c_void) -> Option<Arc<Region>> {
    lock(&DESCRIPTORS).as_ref()?.get(&desc.addr()).cloned()
}

/// An open address vector.
pub(crate) struct Av {
    pub peers: Arc<Peers>,
    domain: Arc<Domain>,
    _in_use: InUse,
}

impl Kind for Av {
    type Fid = sys::fid_av;
    const NAME: &str = "address vector";
    const MAGIC: u64 = 0xfab_0004;
}

static FABRIC: sys::fi_ops = sys::fi_ops { close: Some(close_fabric), ..NOTHING };
static DOMAIN: sys::fi_ops = sys::fi_ops { close: Some(close_domain), ..NOTHING };
static MR: sys::fi_ops = sys::fi_ops { close: Some(close_mr), ..NOTHING };
static AV: sys::fi_ops = sys::fi_ops { close: Some(close_av), ..NOTHING };

/// A table with no entry.
pub(crate) const NOTHING: sys::fi_ops = sys::fi_ops {
    size: size_of::<sys::fi_ops>(),
    close: None,
    bind: None,
    control: None,
    ops_open: None,
    tostr: None,
    ops_set: None,
};

static FABRIC_CALLS: sys::fi_ops_fabric = sys::fi_ops_fabric {
    size: size_of::<sys::fi_ops_fabric>(),
    domain: Some(open_domain),
    passive_ep: None,
    eq_open: None,
    wait_open: None,
    trywait: Some(completion::trywait),
    domain2: None,
};

static DOMAIN_CALLS: sys::fi_ops_domain = sys::fi_ops_domain {
    size: size_of::<sys::fi_ops_domain>(),
    av_open: Some(open_av),
    cq_open: Some(completion::open),
    endpoint: Some(endpoint::open),
    scalable_ep: None,
    cntr_open: None,
    poll_open: None,
    stx_ctx: None,
    srx_ctx: None,
    query_atomic: None,
    query_collective: None,
    endpoint2: None,
};

static MR_CALLS: sys::fi_ops_mr = sys::fi_ops_mr {
    size: size_of::<sys::fi_ops_mr>(),
    reg: Some(reg),
    regv: Some(regv),
    regattr: Some(regattr),
};

static AV_CALLS: sys::fi_ops_av = sys::fi_ops_av {
    size: size_of::<sys::fi_ops_av>(),
    insert: Some(insert),
    insertsvc: None,
    insertsym: None,
    remove: Some(remove),
    lookup: Some(lookup),
    straddr: None,
    av_set: None,
};

/// `fi_fabric`.
///
/// # Safety
///
/// As fi_fabric(3) says.
pub(crate) unsafe fn open_fabric(
    attr: *mut sys::fi_fabric_attr,
    fabric: *mut *mut sys::fid_fabric,
    context: *mut c_void,
) -> Result<(), c_int> {
    let config = config::get().map_err(|_| -sys::FI_EINVAL)?;
    // SAFETY: the caller's promise.
    let attr = unsafe { &*attr };
    if attr.name.is_null() {
        return Err(-sys::FI_EINVAL);
    }
    // SAFETY: the caller's promise: a C string.
    let name = unsafe { CStr::from_ptr(attr.name) };
    let direct = name == info::DIRECT;
    if !(if direct { config.direct } else { config.efa && name == info::PLAIN }) {
        return Err(-sys::FI_ENODATA);
    }
    let fid = sys::fid_fabric {
        fid: object::head(sys::FI_CLASS_FABRIC, context, &FABRIC),
        ops: table(&FABRIC_CALLS),
        api_version: attr.api_version,
    };
    // SAFETY: the caller's promise.
    unsafe {
        fabric.write(object::publish(
            fid,
            Fabric { direct, api_version: attr.api_version, users: Users::default() },
        ))
    };
    Ok(())
}

unsafe extern "C" fn close_fabric(fid: *mut sys::fid) -> c_int {
    // SAFETY: the table is in our objects only.
    number(unsafe { close_unused::<Fabric>(fid, |fabric| &fabric.users) }.map(drop))
}

/// Closes an object that nothing stands on.
///
/// # Safety
///
/// `fid` is an object of this library.
pub(crate) unsafe fn close_unused<T: Kind>(
    fid: *mut sys::fid,
    users: impl Fn(&T) -> &Users,
) -> Result<Arc<T>, c_int> {
    // SAFETY: the caller's promise.
    let count = users(&*unsafe { object::find::<T>(fid.cast()) }?).count();
    if count != 0 {
        return Err(refuse(
            Rule::CloseBusy,
            sys::FI_EBUSY,
            &format!("a {} with {count} on it", T::NAME),
        ));
    }
    // SAFETY: the caller's promise.
    unsafe { object::close::<T>(fid.cast()) }
}

unsafe extern "C" fn open_domain(
    fabric: *mut sys::fid_fabric,
    info: *mut sys::fi_info,
    domain: *mut *mut sys::fid_domain,
    context: *mut c_void,
) -> c_int {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    number((|| {
        let config = config::get().map_err(|_| -sys::FI_EINVAL)?;
        // SAFETY: per fi_domain(3), as the caller promises: our fabric, and an `fi_info` of ours for it.
        let (fabric, info, attr) = unsafe {
            (object::find::<Fabric>(fabric.cast())?, &*info, (*info).domain_attr.as_ref())
        };
        let attr = attr.filter(|attr| !attr.name.is_null()).ok_or(-sys::FI_EINVAL)?;
        // SAFETY: a C string, as before.
        let name = unsafe { CStr::from_ptr(attr.name) }.to_string_lossy();
        let nic =
            (0..config.nics).find(|&nic| info::domain_name(nic) == name).ok_or(-sys::FI_ENODEV)?;
        if fabric.direct
            && (info.mode & sys::FI_CONTEXT2 == 0 || info::MR_MODE & !attr.mr_mode != 0)
        {
            return Err(refuse(
                Rule::Mode,
                sys::FI_EINVAL,
                "fi_domain with an fi_info without what efa-direct requires",
            ));
        }
        let inner = Domain {
            config,
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            nic,
            direct: fabric.direct,
            local: fabric.direct || attr.mr_mode & sys::FI_MR_LOCAL != 0,
            hmem: info.caps & sys::FI_HMEM != 0 && attr.mr_mode & sys::FI_MR_HMEM != 0,
            api_version: fabric.api_version,
            keys: Arc::default(),
            users: Users::default(),
            serial: attr.threading == sys::FI_THREAD_DOMAIN,
            inside: AtomicU64::new(0),
            _fabric: fabric.users.enter(),
        };
        let fid = sys::fid_domain {
            fid: object::head(sys::FI_CLASS_DOMAIN, context, &DOMAIN),
            ops: table(&DOMAIN_CALLS),
            mr: table(&MR_CALLS),
        };
        // SAFETY: the caller's promise.
        unsafe { domain.write(object::publish(fid, inner)) };
        Ok(())
    })())
}

unsafe extern "C" fn close_domain(fid: *mut sys::fid) -> c_int {
    // SAFETY: the table is in our objects only.
    number(unsafe { close_unused::<Domain>(fid, |domain| &domain.users) }.map(drop))
}

/// What a registration is asked for.
struct Asked {
    base: u64,
    len: usize,
    access: u64,
    offset: u64,
    flags: u64,
    /// The file that the memory is registered by, and how far into it.
    dma_buf: Option<(c_int, u64)>,
    context: *mut c_void,
}

/// # Safety
///
/// As fi_mr(3) says: `fid` is a domain of ours, and the memory stays until the registration is closed.
unsafe fn register(
    fid: *mut sys::fid,
    asked: &Asked,
    mr: *mut *mut sys::fid_mr,
) -> Result<(), c_int> {
    const ACCESS: u64 = sys::FI_SEND
        | sys::FI_RECV
        | sys::FI_READ
        | sys::FI_WRITE
        | sys::FI_REMOTE_READ
        | sys::FI_REMOTE_WRITE;
    /// What takes its time to be pinned, if anything does.
    const LONG: usize = 1 << 20;
    /// Each registration's key is another, in all domains: a stale one finds nothing, nor does one of another device.
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    // SAFETY: the caller's promise.
    let domain = unsafe { object::find::<Domain>(fid.cast()) }?;
    let refused = |errno, text: &str| Err(refuse(Rule::MrRegister, errno, text));
    if asked.flags != 0 {
        return refused(sys::FI_EBADFLAGS, "a registration with flags other than FI_MR_DMABUF");
    }
    if asked.access == 0 || asked.access & !ACCESS != 0 {
        return refused(sys::FI_EINVAL, "a registration for no use, or for one that is unknown");
    }
    if asked.len == 0 || asked.offset != 0 {
        return refused(sys::FI_EINVAL, "a registration of nothing, or with an offset");
    }
    if asked.dma_buf.is_none() && !is_mapped(asked.base, asked.len as u64) {
        return refused(sys::FI_EFAULT, "FI_MR_ALLOCATED: memory that is not mapped");
    }
    // What a device writes to is pinned for writing (ibv_reg_mr(3)). A caller may find out by this: no rule is broken.
    let writes = asked.access & (sys::FI_RECV | sys::FI_READ | sys::FI_REMOTE_WRITE) != 0;
    if asked.dma_buf.is_none() && writes && !is_writable(asked.base, asked.len as u64) {
        return Err(-sys::FI_EFAULT);
    }
    if let Some(file) = domain.config.pin_until.as_ref().filter(|_| asked.len >= LONG) {
        while !file.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let device = match asked.dma_buf.map(|(file, offset)| DmaBuf::import(file, offset)) {
        Some(None) => return refused(sys::FI_EINVAL, "a DMA-BUF of no GPU that is known here"),
        device => device.flatten(),
    };
    let disorder =
        Disorder::new(domain.config.seed, u64::from(std::process::id()), domain.config.delay);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let candidate = |n: u64| disorder.word(Choice::Name, n, serial);
    let (range, access, number) = ((asked.base, asked.len as u64), asked.access, domain.number);
    let make = |key| match device {
        Some(device) => Region::on_device(range, device, access, key, number),
        // SAFETY: the caller's promise, until `close_mr`, which calls `Region::close`.
        None => unsafe { Region::new(range.0, range.1, access, key, number) },
    };
    let region = domain.keys.enter(candidate, make);
    let fid = sys::fid_mr {
        fid: object::head(sys::FI_CLASS_MR, asked.context, &MR),
        mem_desc: std::ptr::null_mut(),
        key: region.key.into(),
    };
    let published =
        object::publish(fid, Mr { region: region.clone(), _in_use: domain.users.enter(), domain });
    // SAFETY: it is new. Its own address, which no other object ever has, is its descriptor.
    unsafe { (*published).mem_desc = published.cast() };
    lock(&DESCRIPTORS).get_or_insert_default().insert(published.addr(), region);
    // SAFETY: the caller's promise.
    unsafe { mr.write(published) };
    Ok(())
}

unsafe extern "C" fn reg(
    fid: *mut sys::fid,
    buf: *const c_void,
    len: usize,
    access: u64,
    offset: u64,
    _requested_key: u64,
    flags: u64,
    mr: *mut *mut sys::fid_mr,
    context: *mut c_void,
) -> c_int {
    let base = buf.addr() as u64;
    let asked = Asked { base, len, access, offset, flags, dma_buf: None, context };
    // SAFETY: the caller's promise, fi_mr(3).
    number(unsafe { register(fid, &asked, mr) })
}

unsafe extern "C" fn regv(
    fid: *mut sys::fid,
    iov: *const libc::iovec,
    count: usize,
    access: u64,
    offset: u64,
    requested_key: u64,
    flags: u64,
    mr: *mut *mut sys::fid_mr,
    context: *mut c_void,
) -> c_int {
    if count != 1 {
        return refuse(Rule::IovLimit, sys::FI_EINVAL, "a registration of other than one buffer");
    }
    // SAFETY: the caller's promise, fi_mr(3).
    unsafe {
        reg(fid, (*iov).iov_base, (*iov).iov_len, access, offset, requested_key, flags, mr, context)
    }
}

unsafe extern "C" fn regattr(
    fid: *mut sys::fid,
    attr: *const sys::fi_mr_attr,
    flags: u64,
    mr: *mut *mut sys::fid_mr,
) -> c_int {
    let refused = |errno, text: &str| refuse(Rule::MrRegister, errno, text);
    // SAFETY: the caller's promise, fi_mr(3). Only fields that every version has are read, and with FI_MR_DMABUF, which is for
    // those who know it, what the union is then.
    unsafe {
        let (attr, by_file) = (&*attr, flags & sys::FI_MR_DMABUF != 0);
        let domain = match object::find::<Domain>(fid.cast()) {
            Ok(domain) => domain,
            Err(code) => return code,
        };
        if (attr.iface != sys::FI_HMEM_SYSTEM || by_file) && !domain.hmem {
            return refused(sys::FI_EOPNOTSUPP, "a registration of device memory, without FI_HMEM");
        }
        if attr.iface == sys::FI_HMEM_SYSTEM && by_file {
            return refused(
                sys::FI_EINVAL,
                "a DMA-BUF as the system's memory: a CPU would read it",
            );
        }
        if attr.iface == sys::FI_HMEM_SYSTEM {
            let (iov, count, key) = (attr.mr_iov, attr.iov_count, attr.requested_key);
            return regv(fid, iov, count, attr.access, attr.offset, key, flags, mr, attr.context);
        }
        if attr.iface != sys::FI_HMEM_CUDA || attr.device.cuda < 0 {
            return refused(sys::FI_ENOSYS, "memory of a device other than CUDA's");
        }
        if !by_file {
            let text = "device memory by its address: there is no peermem";
            return refuse_tried(Rule::MrRegister, sys::FI_EOPNOTSUPP, text);
        }
        if domain.api_version < sys::FI_VERSION(1, 20) || attr.iov_count != 1 {
            return refused(sys::FI_EINVAL, "a DMA-BUF before API 1.20, or more than one");
        }
        let file = &*attr.mr_iov.cast::<sys::fi_mr_dmabuf>();
        let (access, offset, context) = (attr.access, attr.offset, attr.context);
        let base = (file.base_addr.addr() as u64).wrapping_add(file.offset);
        let (len, flags) = (file.len, flags & !sys::FI_MR_DMABUF);
        let dma_buf = Some((file.fd, file.offset));
        number(register(fid, &Asked { base, len, access, offset, flags, dma_buf, context }, mr))
    }
}

unsafe extern "C" fn close_mr(fid: *mut sys::fid) -> c_int {
    // SAFETY: the table is in our objects only.
    let closed = unsafe { object::close::<Mr>(fid.cast()) };
    number(closed.map(|mr| {
        if mr.region.users.count() != 0 {
            violation(Rule::MrInUse, "a registration was closed under a local operation in flight");
        }
        if let Some(descriptors) = lock(&DESCRIPTORS).as_mut() {
            descriptors.remove(&fid.addr());
        }
        mr.domain.keys.remove(mr.region.key);
        mr.region.close();
    }))
}

unsafe extern "C" fn open_av(
    domain: *mut sys::fid_domain,
    attr: *mut sys::fi_av_attr,
    av: *mut *mut sys::fid_av,
    context: *mut c_void,
) -> c_int {
    number((|| {
        // SAFETY: the caller's promise, fi_av(3).
        let (domain, attr) = unsafe { (object::find::<Domain>(domain.cast())?, &*attr) };
        if attr.flags != 0 || !attr.name.is_null() {
            return Err(refuse(
                Rule::Flags,
                sys::FI_ENOSYS,
                "an address vector with flags or a name",
            ));
        }
        let peers = Arc::new(Peers::new(domain.number));
        let fid = sys::fid_av {
            fid: object::head(sys::FI_CLASS_AV, context, &AV),
            ops: table(&AV_CALLS),
        };
        // SAFETY: the caller's promise.
        unsafe {
            av.write(object::publish(fid, Av { peers, _in_use: domain.users.enter(), domain }))
        };
        Ok(())
    })())
}

unsafe extern "C" fn close_av(fid: *mut sys::fid) -> c_int {
    // SAFETY: the table is in our objects only.
    number(unsafe { close_unused::<Av>(fid, |av| &av.peers.users) }.map(drop))
}

unsafe extern "C" fn insert(
    av: *mut sys::fid_av,
    addr: *const c_void,
    count: usize,
    fi_addr: *mut sys::fi_addr_t,
    flags: u64,
    _context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise, fi_av(3).
    let av = match unsafe { object::find::<Av>(av.cast()) } {
        Ok(av) => av,
        Err(error) => return error,
    };
    let _inside = av.domain.enter();
    if flags & !sys::FI_MORE != 0 {
        return refuse(Rule::Flags, sys::FI_EBADFLAGS, "fi_av_insert with flags");
    }
    let mut inserted = 0;
    for at in 0..count {
        // SAFETY: the caller's promise: there are `count` addresses of the length that `fi_info` says.
        let bytes = unsafe { addr.cast::<[u8; ADDRESS_BYTES]>().add(at).read() };
        let place = Address::from_bytes(&bytes).map(|address| av.peers.insert(address));
        inserted += c_int::from(place.is_some());
        if !fi_addr.is_null() {
            // SAFETY: the caller's promise: null, or room for `count`.
            unsafe { fi_addr.add(at).write(place.unwrap_or(sys::FI_ADDR_NOTAVAIL)) };
        }
    }
    inserted
}

unsafe extern "C" fn remove(
    av: *mut sys::fid_av,
    fi_addr: *mut sys::fi_addr_t,
    count: usize,
    flags: u64,
) -> c_int {
    number((|| {
        // SAFETY: the caller's promise, fi_av(3).
        let av = unsafe { object::find::<Av>(av.cast()) }?;
        let _inside = av.domain.enter();
        if flags != 0 {
            return Err(refuse(Rule::Flags, sys::FI_EBADFLAGS, "fi_av_remove with flags"));
        }
        for at in 0..count {
            // SAFETY: the caller's promise: there are `count`.
            match av.peers.remove(unsafe { fi_addr.add(at).read() }) {
                None => {
                    return Err(refuse(
                        Rule::AddressUnknown,
                        sys::FI_EINVAL,
                        "an address removed that is not there",
                    ));
                }
                Some(0) => {}
                Some(count) => {
                    let detail =
                        format!("an address was removed with {count} operations to it in flight");
                    violation(Rule::AddressInUse, &detail);
                }
            }
        }
        Ok(())
    })())
}

unsafe extern "C" fn lookup(
    av: *mut sys::fid_av,
    fi_addr: sys::fi_addr_t,
    addr: *mut c_void,
    addrlen: *mut usize,
) -> c_int {
    number((|| {
        // SAFETY: the caller's promise, fi_av(3).
        let av = unsafe { object::find::<Av>(av.cast()) }?;
        let address = av.peers.address(fi_addr).ok_or(-sys::FI_EINVAL)?;
        // SAFETY: as before: `addrlen` says how much room there is.
        unsafe { copy_address(address, addr, addrlen) };
        Ok(())
    })())
}

/// Copies as much of an address as there is room for, and says how long it is. Returns whether that was all.
///
/// # Safety
///
/// There is room for `*addrlen` bytes at `addr`.
pub(crate) unsafe fn copy_address(
    address: Address,
    addr: *mut c_void,
    addrlen: *mut usize,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let room = addrlen.replace(ADDRESS_BYTES);
        let len = room.min(ADDRESS_BYTES);
        if len > 0 {
            std::ptr::copy_nonoverlapping(address.to_bytes().as_ptr(), addr.cast::<u8>(), len);
        }
        room >= ADDRESS_BYTES
    }
}

/// Returns a text for an error of libfabric.
pub(crate) fn strerror(errno: c_int) -> *const c_char {
    let text = match errno.abs() {
        sys::FI_EOTHER => c"unspecified error",
        sys::FI_ETOOSMALL => c"provided buffer is too small",
        sys::FI_EOPBADSTATE => c"operation not permitted in current state",
        sys::FI_EAVAIL => c"error available",
        sys::FI_EBADFLAGS => c"flags not supported",
        sys::FI_ENOEQ => c"missing or unavailable event queue",
        sys::FI_EDOMAIN => c"invalid resource domain",
        sys::FI_ENOCQ => c"missing or unavailable completion queue",
        sys::FI_ENOKEY => c"required key not available",
        sys::FI_ENOAV => c"missing or unavailable address vector",
        sys::FI_EOVERRUN => c"queue has been overrun",
        sys::FI_ENORX => c"receiver not ready, no receive buffers available",
        // SAFETY: the C library's texts live on.
        errno => return unsafe { libc::strerror(errno) },
    };
    text.as_ptr()
}
