//! libfabric's objects, owned: what a machine offers, domains, registrations, endpoints with their queues.
//!
//! Knows the binary interface and its traps; knows nothing of peers, sessions, or what the engine wants.
//!
//! # Invariants
//!
//! - Every object is closed once, after all that were opened from it: an endpoint before its queue and
//!   its address vector, these and registrations before their domain, that before its fabric.
//! - Nothing is used of a completion but what every provider fills in: no lengths, no order, and of a
//!   remote write only that it is none of ours, and its data.
//! - An operation's context is an entry of its endpoint's own table, which outlives the endpoint.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use immwire_core::datagram::{Address, Protocol};
use libfabric_sys as sys;
use libfabric_sys::{Library, Version};

use super::LibfabricError;
use super::survey::Unfit;
use crate::gpus::Direct;

/// The version of the API that is asked for, if the library has it. Behind it nothing is needed.
pub(super) const API: Version = Version { major: 1, minor: 20 };
/// Providers in the order of preference.
pub(super) const PREFERENCE: [&str; 4] = ["efa", "tcp", "net", "tcp;ofi_rxm"];
/// The fabric of provider `efa` that engines use. Its other one, `efa`, numbers messages by the sender's entry for an address,
/// which the door makes anew: the receiver takes the next one for a repetition, and ends the process.
const EFA_FABRIC: &str = "efa-direct";
/// That other one.
const OLDER_EFA_FABRIC: &str = "efa";
/// The most that one operation carries where the device says nothing.
const RMA_MAX: u64 = 1 << 30;

/// One `fi_info`, and the library that allocated it.
pub(super) struct Info {
    library: &'static Library,
    raw: NonNull<sys::fi_info>,
}

// SAFETY: an `fi_info` is plain memory, changed by nobody after `discover` has made it.
unsafe impl Send for Info {}
// SAFETY: as above.
unsafe impl Sync for Info {}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: ours, from this library, a list of one.
        unsafe { self.library.freeinfo(self.raw.as_ptr()) }
    }
}

/// Text of C's, or nothing.
///
/// # Safety
///
/// `text` is null or a C string that stays during the call.
unsafe fn text(text: *const std::ffi::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// What a device is, and demands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    /// `tcp`, `efa`, ...
    pub(super) provider: String,
    /// `efa-direct`, an IP network, ...
    pub(super) fabric: String,
    /// `eth0`, `rdmap0s31-rdm`, ...
    pub(super) domain: String,
    pub(super) protocol: Protocol,
    /// Remote addresses are virtual ones; if not, offsets into the region.
    pub(super) virtual_addresses: bool,
    /// The device chooses keys.
    pub(super) own_keys: bool,
    /// Operations need a descriptor of the local memory.
    pub(super) local_descs: bool,
    /// It was asked for, and GPUs' memory can be registered (`FI_HMEM`).
    pub(super) device_memory: bool,
    /// Endpoints need a domain each: `tcp` (2.5) uses what it has freed if one is closed while somebody is
    /// connecting to it, and its domain goes on being polled.
    pub(super) lonely_endpoints: bool,
    /// The initiator of a write is told by the queue; if not, by the upper half of the data.
    pub(super) tells_source: bool,
    /// A registration that was closed is not written any more by anything that is under way.
    pub(super) closing_fences: bool,
    /// The first write between two endpoints opens a connection.
    pub(super) connects: bool,
    /// Writes over one connection are placed, and complete, in order.
    pub(super) in_order: bool,
    /// Once a completion was reported, the queue's descriptor stays readable, until a read that may wait finds nothing:
    /// `net` (1.17) forgets that in `fi_trywait`.
    pub(super) descriptor_stays_readable: bool,
    pub(super) queue_depth: usize,
    pub(super) speed_gbps: u32,
}

impl Facts {
    /// What the kernel calls the RDMA device, if it is one: `rdmap0s31` of the domain `rdmap0s31-rdm`.
    pub(super) fn rdma_name(&self) -> Option<&str> {
        if self.provider == "efa" { self.domain.strip_suffix("-rdm") } else { None }
    }
}

/// One device: a way to open a domain.
pub(super) struct Device {
    pub(super) info: Info,
    pub(super) facts: Facts,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.facts).finish()
    }
}

/// What is asked of `discover`.
#[derive(Debug, Clone, Default)]
pub(super) struct Wanted<'a> {
    pub(super) provider: Option<&'a str>,
    pub(super) domain: Option<&'a str>,
    /// That can be given GPUs' memory, if there are any.
    pub(super) device_memory: bool,
}

/// Hints, until they are freed.
struct Hints(Info);

impl Hints {
    fn new(library: &'static Library) -> Result<Self, LibfabricError> {
        // SAFETY: null asks for an empty one.
        let raw = unsafe { library.dupinfo(ptr::null()) };
        let raw = NonNull::new(raw).ok_or(LibfabricError::OutOfMemory)?;
        Ok(Self(Info { library, raw }))
    }

    fn duplicate(text: &str) -> Result<*mut std::ffi::c_char, LibfabricError> {
        let text = CString::new(text).map_err(|_| LibfabricError::Name { name: text.into() })?;
        // SAFETY: a C string; what strdup gives is freed by fi_freeinfo.
        let copy = unsafe { libc::strdup(text.as_ptr()) };
        if copy.is_null() { Err(LibfabricError::OutOfMemory) } else { Ok(copy) }
    }

    /// Everything that this provider can work with.
    fn fill(
        &mut self,
        provider: &str,
        fabric: Option<&str>,
        device_memory: bool,
    ) -> Result<(), LibfabricError> {
        let is_efa = provider == "efa";
        let (name, fabric) = (Self::duplicate(provider)?, fabric.map(Self::duplicate).transpose()?);
        // SAFETY: `dupinfo` of null allocates all attributes, and nobody else has this one. The names
        // come from `strdup`, and belong to it now.
        unsafe {
            let info = &mut *self.0.raw.as_ptr();
            info.caps = sys::FI_MSG | sys::FI_RMA;
            if is_efa {
                info.caps |= sys::FI_SOURCE;
            }
            // Never FI_RX_CQ_DATA: that would switch EFA's unsolicited writes off.
            info.mode = sys::FI_CONTEXT | sys::FI_CONTEXT2;
            (*info.ep_attr).type_ = sys::FI_EP_RDM;
            let domain = &mut *info.domain_attr;
            domain.mr_mode = sys::FI_MR_LOCAL
                | sys::FI_MR_VIRT_ADDR
                | sys::FI_MR_ALLOCATED
                | sys::FI_MR_PROV_KEY;
            if device_memory {
                info.caps |= sys::FI_HMEM;
                domain.mr_mode |= sys::FI_MR_HMEM;
            }
            domain.threading = sys::FI_THREAD_SAFE;
            domain.data_progress = sys::FI_PROGRESS_MANUAL;
            domain.control_progress = sys::FI_PROGRESS_MANUAL;
            domain.av_type = sys::FI_AV_TABLE;
            domain.cq_data_size = 4;
            (*info.fabric_attr).prov_name = name;
            if let Some(fabric) = fabric {
                (*info.fabric_attr).name = fabric;
            }
        }
        Ok(())
    }
}

/// What libfabric is told by its environment, if nobody has told it otherwise, and why.
///
/// It reads these at the first `fi_getinfo` of the process.
const ENVIRONMENT: [(&str, &str); 3] = [
    // Every region is registered by its user: nobody has to patch `mmap` and `free` to watch for others.
    ("FI_MR_CACHE_MONITOR", "disabled"),
    // Writes need no buffers of ofi_rxm's to arrive in, the few messages at the door do. Over tcp 1.17 makes as many as
    // tcp would take, a hundred megabytes for each endpoint, not the 128 that fi_rxm(7) says are the default: two seconds
    // to open four on a busy machine, in which the engine does nothing else.
    ("FI_OFI_RXM_MSG_RX_SIZE", "128"),
    NO_DEVICE_MEMORY,
];

/// Where no GPU is used, libfabric has no reason to start a CUDA runtime in the process.
const NO_DEVICE_MEMORY: (&str, &str) = ("FI_HMEM", "system");

/// Sets what is not set, if that is safe: the environment belongs to all threads, and nothing guards it.
fn prepare_environment(device_memory: bool) {
    let unset = ENVIRONMENT
        .into_iter()
        .filter(|variable| !device_memory || *variable != NO_DEVICE_MEMORY)
        .filter(|(name, _)| std::env::var_os(name).is_none());
    let threads = std::fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count);
    for (name, value) in unset {
        if threads == 1 {
            // SAFETY: this is the only thread, so no other reads or writes the environment meanwhile; and
            // none is started here.
            unsafe { std::env::set_var(name, value) };
        } else {
            tracing::debug!(name, value, "not set: the process has threads; it may be set outside");
        }
    }
}

/// The devices that fit, best first: of the first provider that has any.
///
/// The first call in a process probes hardware: up to 0.4 s.
pub(super) fn discover(
    library: &'static Library,
    wanted: &Wanted<'_>,
) -> Result<Vec<Device>, LibfabricError> {
    static PREPARED: Once = Once::new();
    PREPARED.call_once(|| prepare_environment(wanted.device_memory));
    let mut seen = Vec::new();
    let mut older_efa = false;
    for provider in
        PREFERENCE.into_iter().filter(|it| wanted.provider.is_none_or(|want| want == *it))
    {
        // Those that take GPUs' memory before those that do not.
        let attempts: &[bool] = if wanted.device_memory { &[true, false] } else { &[false] };
        for &device_memory in attempts {
            let mut devices = list(library, provider, device_memory)?;
            seen.extend(devices.iter().map(|device| device.facts.domain.clone()));
            devices.retain(|device| wanted.domain.is_none_or(|want| device.facts.domain == want));
            if wanted.domain.is_none() {
                // Loopback is reached from this host alone.
                devices.sort_by_key(|device| device.facts.domain == "lo");
            }
            if !devices.is_empty() {
                return Ok(devices);
            }
        }
        if provider == "efa" && has_older_efa_only(library) {
            older_efa = true;
            tracing::warn!(why = %Unfit::OlderFabric, "libfabric's provider efa is passed over");
        }
    }
    if let Some(name) = wanted.provider.filter(|want| !PREFERENCE.contains(want)) {
        return Err(LibfabricError::UnknownProvider { name: name.into(), known: &PREFERENCE });
    }
    if older_efa && seen.is_empty() {
        return Err(LibfabricError::OlderEfa { version: library.version().to_string() });
    }
    Err(LibfabricError::NoDevice {
        version: library.version().to_string(),
        provider: wanted.provider.unwrap_or("any").into(),
        domain: wanted.domain.map(Into::into),
        seen,
    })
}

/// All devices of one provider, on the fabric that engines use; those alone that take GPUs' memory, if that is wanted.
pub(super) fn list(
    library: &'static Library,
    provider: &str,
    device_memory: bool,
) -> Result<Vec<Device>, LibfabricError> {
    list_on(library, provider, (provider == "efa").then_some(EFA_FABRIC), device_memory)
}

/// Whether provider `efa` has devices, but none on the fabric that engines use. What fails has none.
pub(super) fn has_older_efa_only(library: &'static Library) -> bool {
    let has = |fabric| list_on(library, "efa", Some(fabric), false).is_ok_and(|it| !it.is_empty());
    !has(EFA_FABRIC) && has(OLDER_EFA_FABRIC)
}

fn list_on(
    library: &'static Library,
    provider: &str,
    fabric: Option<&str>,
    device_memory: bool,
) -> Result<Vec<Device>, LibfabricError> {
    let mut hints = Hints::new(library)?;
    hints.fill(provider, fabric, device_memory)?;
    let mut raw = ptr::null_mut();
    let version = library.version().min(API).code();
    // SAFETY: no node, no service; hints from this library; `raw` is written on success.
    let found = unsafe {
        library.getinfo(version, ptr::null(), ptr::null(), 0, hints.0.raw.as_ptr(), &raw mut raw)
    };
    if found == -sys::FI_ENODATA {
        return Ok(Vec::new());
    }
    check(library, "fi_getinfo", found)?;
    let mut devices: Vec<Device> = Vec::new();
    let mut next = raw;
    // SAFETY: a list of `fi_info`, whose attributes the library allocated; strings are null or C strings.
    unsafe {
        while let Some(entry) = next.as_ref() {
            next = entry.next;
            let Some(facts) = facts(entry) else { continue };
            // One for each domain: the same one is listed for each address format.
            let known = devices.iter().any(|device| device.facts.domain == facts.domain);
            if facts.provider == provider && !known {
                let copy =
                    NonNull::new(library.dupinfo(entry)).ok_or(LibfabricError::OutOfMemory)?;
                devices.push(Device { info: Info { library, raw: copy }, facts });
            }
        }
        if !raw.is_null() {
            library.freeinfo(raw);
        }
    }
    Ok(devices)
}

/// # Safety
///
/// `info` is from `fi_getinfo`.
unsafe fn facts(info: &sys::fi_info) -> Option<Facts> {
    // SAFETY: by the caller's promise; attributes that are missing are seen.
    unsafe {
        let (domain, fabric) = (info.domain_attr.as_ref()?, info.fabric_attr.as_ref()?);
        let (ep, tx) = (info.ep_attr.as_ref()?, info.tx_attr.as_ref()?);
        let provider = text(fabric.prov_name);
        let is_efa = provider == "efa";
        if is_efa && info.caps & sys::FI_SOURCE == 0 {
            return None;
        }
        let wide = domain.cq_data_size >= 8;
        // Without either, nobody could say whose an immediate is.
        if !wide && !is_efa || domain.cq_data_size < 4 {
            return None;
        }
        let link = info.nic.as_ref().and_then(|nic| nic.link_attr.as_ref());
        let speed = link.map_or(0, |link| link.speed / 1_000_000_000);
        Some(Facts {
            fabric: text(fabric.name),
            domain: text(domain.name),
            protocol: Protocol {
                number: ep.protocol,
                version: ep.protocol_version,
                data_bytes: if wide && !is_efa { 8 } else { 4 },
            },
            virtual_addresses: domain.mr_mode & sys::FI_MR_VIRT_ADDR != 0,
            own_keys: domain.mr_mode & sys::FI_MR_PROV_KEY != 0,
            local_descs: domain.mr_mode & sys::FI_MR_LOCAL != 0,
            device_memory: info.caps & sys::FI_HMEM != 0 && domain.mr_mode & sys::FI_MR_HMEM != 0,
            lonely_endpoints: !is_efa && domain.mr_mode & sys::FI_MR_PROV_KEY == 0,
            tells_source: is_efa,
            connects: !is_efa,
            in_order: matches!(&*provider, "tcp" | "net")
                && tx.msg_order & sys::FI_ORDER_RMA_WAW != 0,
            descriptor_stays_readable: provider == "net",
            closing_fences: is_efa,
            queue_depth: tx.size,
            speed_gbps: u32::try_from(speed).ok().filter(|&speed| speed > 0).unwrap_or(100),
            provider,
        })
    }
}

pub(super) fn check(
    library: &Library,
    call: &'static str,
    code: i32,
) -> Result<(), LibfabricError> {
    if code >= 0 {
        return Ok(());
    }
    Err(LibfabricError::Call { call, code: -code, text: library.strerror(-code) })
}

fn opened<T>(
    library: &Library,
    call: &'static str,
    code: i32,
    raw: *mut T,
) -> Result<NonNull<T>, LibfabricError> {
    check(library, call, code)?;
    NonNull::new(raw).ok_or(LibfabricError::OutOfMemory)
}

/// Closes an object; that it cannot be closed is a bug here, and leaks.
///
/// # Safety
///
/// `fid` is live, nothing opened from it is, and nobody uses it again.
unsafe fn close(what: &'static str, fid: *mut sys::fid) {
    // SAFETY: the caller's promise.
    let code = unsafe { sys::fi_close(fid) };
    if code != 0 {
        tracing::error!(what, code, "libfabric would not close an object");
    }
}

/// What registered memory is for, beside being the source of writes and sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Nothing: this process need not be able to write there itself.
    Source,
    /// Receives land there.
    Received,
    /// Peers write there.
    Remote,
}

impl Access {
    pub(super) const fn of(remote: bool) -> Self {
        if remote { Self::Remote } else { Self::Source }
    }

    /// As libfabric has it. A device cannot pin read-only pages for what writes (fi_mr(3), ibv_reg_mr(3)).
    const fn flags(self) -> u64 {
        let source = sys::FI_SEND | sys::FI_WRITE;
        match self {
            Self::Source => source,
            Self::Received => source | sys::FI_RECV,
            Self::Remote => source | sys::FI_REMOTE_WRITE,
        }
    }
}

/// An open domain, shared by endpoints and registrations.
pub(super) struct Domain {
    library: &'static Library,
    fabric: NonNull<sys::fid_fabric>,
    raw: NonNull<sys::fid_domain>,
    device: Arc<Device>,
    /// It takes GPUs' memory, but its device does not reach it by itself.
    is_indirect: AtomicBool,
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Domain").field(&self.device.facts).finish()
    }
}

// SAFETY: the domain was opened with FI_THREAD_SAFE: any thread may call into it (fi_domain(3)).
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn open(device: &Arc<Device>) -> Result<Arc<Self>, LibfabricError> {
        let library = device.info.library;
        let info = device.info.raw.as_ptr();
        let (mut fabric, mut domain) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the info is live, of this library, and has both attributes (`facts` looked).
        unsafe {
            let code = library.fabric((*info).fabric_attr, &raw mut fabric, ptr::null_mut());
            let fabric = opened(library, "fi_fabric", code, fabric)?;
            let code = sys::fi_domain(fabric.as_ptr(), info, &raw mut domain, ptr::null_mut());
            match opened(library, "fi_domain", code, domain) {
                Ok(raw) => {
                    let device = Arc::clone(device);
                    let is_indirect = AtomicBool::new(false);
                    Ok(Arc::new(Self { library, fabric, raw, device, is_indirect }))
                }
                Err(error) => {
                    close("fabric", &raw mut (*fabric.as_ptr()).fid);
                    Err(error)
                }
            }
        }
    }

    pub(super) fn facts(&self) -> &Facts {
        &self.device.facts
    }

    /// Registers memory, and returns it with the key that peers use. `gpu` says how it is reached, if it is a GPU's.
    ///
    /// # Safety
    ///
    /// `len` bytes from `at` stay mapped, or allocated, until the registration is dropped.
    pub(super) unsafe fn register(
        self: &Arc<Self>,
        at: NonNull<u8>,
        len: usize,
        access: Access,
        key: u64,
        gpu: Option<&Direct>,
    ) -> Result<Registration, LibfabricError> {
        let access = access.flags();
        let mut raw = ptr::null_mut();
        let call = match gpu {
            None => "fi_mr_reg",
            Some(_) if !self.facts().device_memory => return Err(LibfabricError::HostMemoryOnly),
            Some(_) if self.is_indirect.load(Ordering::Relaxed) => {
                return Err(LibfabricError::NoGpuDirect);
            }
            Some(_) => "fi_mr_regattr",
        };
        let (domain, start) = (self.raw.as_ptr(), at.as_ptr().cast::<c_void>());
        // SAFETY: the domain is live; the memory, by the caller's promise.
        let code = unsafe {
            match gpu {
                None => {
                    let none = ptr::null_mut();
                    sys::fi_mr_reg(domain, start, len, access, 0, key, 0, &raw mut raw, none)
                }
                Some(gpu) => self.register_gpu((start, len), access, key, gpu, &raw mut raw)?,
            }
        };
        let raw = opened(self.library, call, code, raw)?;
        Ok(Registration { raw, domain: Arc::clone(self) })
    }

    /// Memory of a GPU: by its DMA-BUF, if it has one and the library takes it; else by its address, for which the library or
    /// the kernel has ways of its own. Always as CUDA's: a provider that took it for the host's would have the CPU read short
    /// writes.
    ///
    /// # Safety
    ///
    /// As for [`Domain::register`].
    unsafe fn register_gpu(
        &self,
        (start, len): (*mut c_void, usize),
        access: u64,
        key: u64,
        gpu: &Direct,
        raw: *mut *mut sys::fid_mr,
    ) -> Result<i32, LibfabricError> {
        // SAFETY: numbers and addresses, of which zero is one: unused ones are to be zero.
        let mut attr: sys::fi_mr_attr = unsafe { std::mem::zeroed() };
        (attr.iov_count, attr.access, attr.requested_key) = (1, access, key);
        attr.iface = sys::FI_HMEM_CUDA;
        attr.device.cuda = i32::try_from(gpu.ordinal).unwrap_or(i32::MAX);
        let by_file = match &gpu.file {
            Err(why) => why.to_string(),
            Ok(_) if self.library.version() < API => "this libfabric is older than 1.20".to_owned(),
            Ok(file) => {
                // fi_mr(3): with FI_MR_DMABUF, from 1.20 on, the union is this in place of an iovec.
                let base = usize::try_from(file.start()).unwrap_or(usize::MAX);
                let file = sys::fi_mr_dmabuf {
                    fd: file.as_fd().as_raw_fd(),
                    offset: file.offset(),
                    len,
                    base_addr: ptr::without_provenance_mut(base),
                };
                attr.mr_iov = (&raw const file).cast();
                let (domain, flags) = (self.raw.as_ptr(), sys::FI_MR_DMABUF);
                // SAFETY: the domain is live, and what the attributes point to is read during the call; the memory, by the
                // caller's promise.
                let code = unsafe { sys::fi_mr_regattr(domain, &raw const attr, flags, raw) };
                if !is_unable(code) {
                    return Ok(code);
                }
                self.library.strerror(-code)
            }
        };
        let address = sys::iovec { iov_base: start, iov_len: len };
        attr.mr_iov = &raw const address;
        // SAFETY: as above.
        let code = unsafe { sys::fi_mr_regattr(self.raw.as_ptr(), &raw const attr, 0, raw) };
        if !is_unable(code) {
            return Ok(code);
        }
        let by_address = self.library.strerror(-code);
        Err(LibfabricError::NoWay { by_file, by_address })
    }
}

/// Whether memory is not registered for what it is, not for want of something.
fn is_unable(code: i32) -> bool {
    let unable = [sys::FI_EOPNOTSUPP, sys::FI_ENOSYS, sys::FI_EINVAL, libc::EFAULT, sys::FI_EPERM];
    unable.contains(&-code)
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: endpoints and registrations hold the domain, so none is left; the fabric is ours alone.
        unsafe {
            close("domain", &raw mut (*self.raw.as_ptr()).fid);
            close("fabric", &raw mut (*self.fabric.as_ptr()).fid);
        }
    }
}

/// Memory known to a domain.
pub(super) struct Registration {
    raw: NonNull<sys::fid_mr>,
    domain: Arc<Domain>,
}

// SAFETY: as for `Domain`.
unsafe impl Send for Registration {}
// SAFETY: as for `Domain`.
unsafe impl Sync for Registration {}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registration").field(&self.domain.facts().domain).finish()
    }
}

impl Registration {
    pub(super) fn is_of(&self, domain: &Arc<Domain>) -> bool {
        Arc::ptr_eq(&self.domain, domain)
    }

    pub(super) fn key(&self) -> u64 {
        // SAFETY: live.
        unsafe { sys::fi_mr_key(self.raw.as_ptr()) }
    }

    pub(super) fn desc(&self) -> *mut c_void {
        // SAFETY: live.
        unsafe { sys::fi_mr_desc(self.raw.as_ptr()) }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: ours; who drops it sees to it that no operation uses it.
        unsafe { close("registration", &raw mut (*self.raw.as_ptr()).fid) }
    }
}

/// A completion, as far as it can be relied on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    /// The operation of this context has ended.
    Ours { context: u16, outcome: Result<(), Failure>, bytes: usize },
    /// A peer's write with data. `source` is the initiator's address, if it is told and known.
    Theirs { data: u64, source: u64 },
    /// The queue itself failed, or the endpoint: nothing more can be expected of it.
    Broken(Failure),
}

/// Why an operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Failure {
    /// An `FI_E*`.
    pub(super) code: i32,
    /// The provider's own number.
    pub(super) detail: i32,
}

/// What an address means to one endpoint, and how many use it.
#[derive(Debug)]
struct Known {
    handle: sys::fi_addr_t,
    users: u32,
}

/// An endpoint with a queue and an address vector of its own, and room for operations in flight.
pub(super) struct Endpoint {
    ep: NonNull<sys::fid_ep>,
    cq: NonNull<sys::fid_cq>,
    av: NonNull<sys::fid_av>,
    /// The provider's while their operation is in flight; never moved, freed after the endpoint.
    contexts: *mut [sys::fi_context2],
    known: HashMap<Address, Known>,
    name: Address,
    wait: Wait,
    /// A descriptor was readable when nothing was to be read.
    restless: bool,
    /// Something was read since the descriptor was last known to be unreadable.
    has_reported: bool,
    /// Read by a read that waited.
    kept: Option<Done>,
    tells_source: bool,
    is_device: bool,
    max_rma: u64,
    domain: Arc<Domain>,
}

// SAFETY: used by one thread at a time (`&mut`), and the domain is thread safe.
unsafe impl Send for Endpoint {}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("domain", &self.domain).field("name", &self.name).finish()
    }
}

/// Of which operations an endpoint tells that they have completed; it tells of all that fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Completions {
    All,
    /// Of writes those that ask.
    Asked,
}

/// What a queue's owner can sleep on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    Nothing,
    /// A descriptor.
    One,
    /// Several. The one that stands for them all would be the `epoll` of an `epoll` of the sockets, and be woken with each
    /// packet, whether somebody sleeps on it or not.
    Several,
}

impl Wait {
    /// In the order of preference.
    const OF_SOFTWARE: [Self; 3] = [Self::Several, Self::One, Self::Nothing];
    const OF_DEVICES: [Self; 2] = [Self::One, Self::Nothing];

    const fn object(self) -> sys::fi_wait_obj {
        match self {
            Self::Nothing => sys::FI_WAIT_NONE,
            Self::One => sys::FI_WAIT_FD,
            Self::Several => sys::FI_WAIT_POLLFD,
        }
    }
}

/// Descriptors of one queue at most; four were the most that was seen (`tcp;ofi_rxm`).
const SIGNS_MAX: usize = 16;

/// What becomes readable when there is something in a queue: descriptors, which belong to libfabric and stay as long as the
/// queue and [`Signs::change`] do, and what to wait for (poll(2)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Signs {
    /// Another number when there are others.
    pub(super) change: u64,
    pub(super) all: heapless::Vec<(RawFd, i16), SIGNS_MAX>,
}

impl Signs {
    /// Whether one of them is, now.
    fn are_readable(&self) -> bool {
        let polled = |&(fd, events): &(RawFd, i16)| sys::pollfd { fd, events, revents: 0 };
        let mut all: heapless::Vec<_, SIGNS_MAX> = self.all.iter().map(polled).collect();
        let count = libc::nfds_t::try_from(all.len()).unwrap_or(0);
        // SAFETY: so many entries. Whatever is open by their numbers, asking changes nothing of it.
        unsafe { libc::poll(all.as_mut_ptr(), count, 0) > 0 }
    }
}

/// What was opened so far; closed again if the rest fails.
struct Half {
    ep: Option<NonNull<sys::fid_ep>>,
    cq: Option<NonNull<sys::fid_cq>>,
    av: Option<NonNull<sys::fid_av>>,
}

impl Drop for Half {
    fn drop(&mut self) {
        // SAFETY: ours, the endpoint first.
        unsafe {
            if let Some(ep) = self.ep.take() {
                close("endpoint", &raw mut (*ep.as_ptr()).fid);
            }
            if let Some(cq) = self.cq.take() {
                close("completion queue", &raw mut (*cq.as_ptr()).fid);
            }
            if let Some(av) = self.av.take() {
                close("address vector", &raw mut (*av.as_ptr()).fid);
            }
        }
    }
}

impl Endpoint {
    /// Opens one. `contexts`: operations in flight at most. `entries`: of the queue.
    pub(super) fn open(
        domain: &Arc<Domain>,
        contexts: u16,
        entries: usize,
        peers: u16,
        completions: Completions,
    ) -> Result<Self, LibfabricError> {
        let (library, raw) = (domain.library, domain.raw.as_ptr());
        let is_efa = domain.facts().provider == "efa";
        let mut half = Half { ep: None, cq: None, av: None };
        let mut cq = ptr::null_mut();
        // SAFETY: the attributes are the caller's, zeroed but for what is set; all objects are live.
        unsafe {
            let mut attr: sys::fi_cq_attr = std::mem::zeroed();
            attr.size = entries;
            attr.format = sys::FI_CQ_FORMAT_DATA;
            let mut code = 0;
            let mut wait = Wait::Nothing;
            for way in if is_efa { &Wait::OF_DEVICES[..] } else { &Wait::OF_SOFTWARE } {
                wait = *way;
                attr.wait_obj = way.object();
                code = sys::fi_cq_open(raw, &raw mut attr, &raw mut cq, ptr::null_mut());
                if code == 0 {
                    break;
                }
            }
            let cq = opened(library, "fi_cq_open", code, cq)?;
            half.cq = Some(cq);
            let mut attr: sys::fi_av_attr = std::mem::zeroed();
            attr.type_ = sys::FI_AV_TABLE;
            attr.count = usize::from(peers).max(1);
            let mut av = ptr::null_mut();
            let code = sys::fi_av_open(raw, &raw mut attr, &raw mut av, ptr::null_mut());
            let av = opened(library, "fi_av_open", code, av)?;
            half.av = Some(av);
            let mut ep = ptr::null_mut();
            let info = domain.device.info.raw.as_ptr();
            let code = sys::fi_endpoint(raw, info, &raw mut ep, ptr::null_mut());
            let ep = opened(library, "fi_endpoint", code, ep)?;
            half.ep = Some(ep);
            let transmit = match completions {
                Completions::All => sys::FI_TRANSMIT,
                Completions::Asked => sys::FI_TRANSMIT | sys::FI_SELECTIVE_COMPLETION,
            };
            for flags in [transmit, sys::FI_RECV] {
                let code = sys::fi_ep_bind(ep.as_ptr(), &raw mut (*cq.as_ptr()).fid, flags);
                check(library, "fi_ep_bind", code)?;
            }
            let code = sys::fi_ep_bind(ep.as_ptr(), &raw mut (*av.as_ptr()).fid, 0);
            check(library, "fi_ep_bind", code)?;
            if is_efa && !efa_options(ep)? && domain.facts().device_memory {
                domain.is_indirect.store(true, Ordering::Relaxed);
            }
            check(library, "fi_enable", sys::fi_enable(ep.as_ptr()))?;
            if is_efa {
                efa_native(ep, domain.facts())?;
            }
            let name = own_name(library, ep)?;
            let max_rma = max_rma(ep, &*(*info).ep_attr);
            // Whole again: nothing below fails.
            let (_, _, _) = (half.ep.take(), half.cq.take(), half.av.take());
            let empty = sys::fi_context2 { internal: [ptr::null_mut(); 8] };
            Ok(Self {
                ep,
                cq,
                av,
                contexts: Box::into_raw(vec![empty; usize::from(contexts)].into_boxed_slice()),
                known: HashMap::new(),
                name,
                wait,
                restless: false,
                has_reported: false,
                kept: None,
                tells_source: domain.facts().tells_source,
                is_device: is_efa,
                max_rma,
                domain: Arc::clone(domain),
            })
        }
    }

    /// What it was opened from.
    pub(super) const fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Where peers reach it.
    pub(super) const fn name(&self) -> &Address {
        &self.name
    }

    /// The largest write.
    pub(super) const fn max_rma(&self) -> u64 {
        self.max_rma
    }

    /// Whether there is anything to sleep on.
    pub(super) fn has_signs(&self) -> bool {
        self.wait != Wait::Nothing
    }

    /// What becomes readable when there is a completion, after [`Endpoint::may_sleep`]; none if the provider has no such
    /// thing. No system call.
    pub(super) fn signs(&self) -> Option<Signs> {
        let fid = self.cq.as_ptr().cast::<sys::fid>();
        let mut polled = [sys::pollfd { fd: -1, events: 0, revents: 0 }; SIGNS_MAX];
        let (change, count) = match self.wait {
            Wait::Nothing => return None,
            Wait::One => {
                let [one, ..] = &mut polled;
                one.events = libc::POLLIN;
                // SAFETY: the queue is live, and has FI_WAIT_FD: an `int` is written.
                let code =
                    unsafe { sys::fi_control(fid, sys::FI_GETWAIT, (&raw mut one.fd).cast()) };
                (0, usize::from(code == 0))
            }
            Wait::Several => {
                let mut list = sys::fi_wait_pollfd {
                    change_index: 0,
                    nfds: SIGNS_MAX,
                    fd: polled.as_mut_ptr(),
                };
                // SAFETY: the queue is live, and has FI_WAIT_POLLFD: so many entries are written at most.
                let code = unsafe { sys::fi_control(fid, sys::FI_GETWAIT, (&raw mut list).cast()) };
                (list.change_index, if code == 0 { list.nfds } else { 0 })
            }
        };
        let all = polled.iter().take(count).map(|one| (one.fd, one.events));
        let signs = Signs { change, all: all.filter(|(fd, _)| *fd >= 0).collect() };
        (!signs.all.is_empty()).then_some(signs)
    }

    /// Whether nothing is to be read before sleeping on its [`Signs`].
    pub(super) fn may_sleep(&mut self) -> bool {
        // SAFETY: all live; the array has one entry.
        let may = unsafe {
            let mut fids = [&raw mut (*self.cq.as_ptr()).fid];
            sys::fi_trywait(self.domain.fabric.as_ptr(), fids.as_mut_ptr(), 1) == 0
        };
        self.restless &= may;
        may && self.kept.is_none()
    }

    /// Whether its [`Signs`] say what [`Endpoint::may_sleep`] has said. What libfabric watches is put on the list of several
    /// descriptors by a read that may wait, and until then one of the list is readable though nothing is to be read: after the
    /// second time in a row that is done, for a millisecond at most.
    pub(super) fn is_calm(&mut self, signs: &Signs) -> bool {
        let restless = self.wait == Wait::Several && signs.are_readable();
        if restless && self.restless {
            self.read_waiting();
        }
        self.restless = restless;
        !restless
    }

    /// Has the descriptor be readable for nothing but what is still to be read, where that takes a read that may wait:
    /// for a millisecond at most. `false`: something has come.
    pub(super) fn hush(&mut self) -> bool {
        if !self.has_reported || !self.domain.facts().descriptor_stays_readable {
            return true;
        }
        // Whatever else there is, an error perhaps, is for the next read.
        self.has_reported = self.read_waiting() != -(sys::FI_EAGAIN as isize);
        !self.has_reported
    }

    /// A read that waits for a millisecond at most, to be called when nothing is kept. Keeps what it read for the next
    /// [`Endpoint::read`].
    fn read_waiting(&mut self) -> isize {
        const WAIT_MS: i32 = 1;
        let none = ptr::null_mut();
        let mut entry =
            sys::fi_cq_data_entry { op_context: none, flags: 0, len: 0, buf: none, data: 0 };
        // SAFETY: the queue is live, of format DATA; one entry is written at most.
        let read = unsafe {
            let (cq, to) = (self.cq.as_ptr(), (&raw mut entry).cast());
            sys::fi_cq_sread(cq, to, 1, ptr::null(), WAIT_MS)
        };
        if read == 1 {
            self.kept = Some(self.understand(&entry, sys::FI_ADDR_NOTAVAIL));
        }
        read
    }

    /// Makes an address usable; each call is undone by one of [`Endpoint::forget`].
    pub(super) fn learn(&mut self, address: &Address) -> Result<sys::fi_addr_t, LibfabricError> {
        if let Some(known) = self.known.get_mut(address) {
            known.users += 1;
            return Ok(known.handle);
        }
        let expected = self.name.len();
        if address.len() != expected {
            return Err(LibfabricError::AddressLength { found: address.len(), expected });
        }
        let mut handle = sys::FI_ADDR_NOTAVAIL;
        // SAFETY: one address of the length that this provider's have; the handle is written.
        let inserted = unsafe {
            let from = address.as_ptr().cast();
            sys::fi_av_insert(self.av.as_ptr(), from, 1, &raw mut handle, 0, ptr::null_mut())
        };
        check(self.domain.library, "fi_av_insert", inserted)?;
        if inserted != 1 || handle == sys::FI_ADDR_NOTAVAIL {
            return Err(LibfabricError::AddressRefused);
        }
        self.known.insert(address.clone(), Known { handle, users: 1 });
        Ok(handle)
    }

    /// Undoes one [`Endpoint::learn`].
    pub(super) fn forget(&mut self, address: &Address) {
        let Some(known) = self.known.get_mut(address) else { return };
        known.users -= 1;
        if known.users == 0 {
            let mut handle = known.handle;
            self.known.remove(address);
            // SAFETY: a handle that this vector gave out.
            let code = unsafe { sys::fi_av_remove(self.av.as_ptr(), &raw mut handle, 1, 0) };
            if code != 0 {
                tracing::debug!(code, "libfabric would not remove an address");
            }
        }
    }

    fn context(&self, context: u16) -> *mut c_void {
        debug_assert!(usize::from(context) < self.contexts.len());
        self.contexts.cast::<sys::fi_context2>().wrapping_add(context.into()).cast()
    }

    /// Posts a receive. `false`: try again later.
    ///
    /// # Safety
    ///
    /// `len` bytes from `to` are registered as `desc` says, and nobody else's until the operation ends; the
    /// context is not in use, and below the number given to [`Endpoint::open`].
    pub(super) unsafe fn receive(
        &mut self,
        to: *mut u8,
        len: usize,
        desc: *mut c_void,
        context: u16,
    ) -> Result<bool, Failure> {
        let context = self.context(context);
        // SAFETY: the caller's promise.
        posted(unsafe {
            let anybody = sys::FI_ADDR_UNSPEC;
            sys::fi_recv(self.ep.as_ptr(), to.cast(), len, desc, anybody, context)
        })
    }

    /// Posts a send. `false`: try again later.
    ///
    /// # Safety
    ///
    /// As for [`Endpoint::receive`], the bytes being read; `to` is from [`Endpoint::learn`].
    pub(super) unsafe fn send(
        &mut self,
        from: *const u8,
        len: usize,
        desc: *mut c_void,
        to: sys::fi_addr_t,
        context: u16,
    ) -> Result<bool, Failure> {
        let context = self.context(context);
        // SAFETY: the caller's promise.
        posted(unsafe { sys::fi_send(self.ep.as_ptr(), from.cast(), len, desc, to, context) })
    }

    /// Posts a write, with data or without. `false`: try again later.
    ///
    /// # Safety
    ///
    /// As for [`Endpoint::send`]. The remote address and key are checked by whoever they belong to.
    #[inline]
    pub(super) unsafe fn write(&mut self, write: &Write, context: u16) -> Result<bool, Failure> {
        let context = self.context(context);
        let &Write { from, len, desc, to, address, key, data, asks } = write;
        let (ep, from) = (self.ep.as_ptr(), from as *const c_void);
        // SAFETY: the caller's promise.
        if self.is_device {
            // SAFETY: the caller's promise.
            return posted(unsafe {
                match data {
                    Some(data) => {
                        sys::fi_writedata(ep, from, len, desc, data, to, address, key, context)
                    }
                    None => sys::fi_write(ep, from, len, desc, to, address, key, context),
                }
            });
        }
        // A device completes a write when the other device has it. A software provider would, when it has
        // handed the bytes to the kernel: it is asked for more, with each operation, since `net` does not
        // listen to a default.
        let mut flags = if asks { sys::FI_DELIVERY_COMPLETE | sys::FI_COMPLETION } else { 0 };
        if data.is_some() {
            flags |= sys::FI_REMOTE_CQ_DATA;
        }
        let source = sys::iovec { iov_base: from.cast_mut(), iov_len: len };
        let target = sys::fi_rma_iov { addr: address, len, key };
        let mut desc = desc;
        let message = sys::fi_msg_rma {
            msg_iov: &raw const source,
            desc: &raw mut desc,
            iov_count: 1,
            addr: to,
            rma_iov: &raw const target,
            rma_iov_count: 1,
            context,
            data: data.unwrap_or(0),
        };
        // SAFETY: as above; the message and what it points to are read during the call (fi_rma(3)).
        posted(unsafe { sys::fi_writemsg(ep, &raw const message, flags) })
    }

    /// Drives the provider, and reads completions into `batch`, which is empty; none if there are none.
    #[inline]
    pub(super) fn read<const N: usize>(&mut self, batch: &mut heapless::Vec<Done, N>) {
        if let Some(kept) = self.kept.take() {
            batch.extend([kept]);
            return;
        }
        // Most reads find nothing: nothing is prepared for what they might.
        let mut entries = [const { MaybeUninit::<sys::fi_cq_data_entry>::uninit() }; N];
        let mut sources = [const { MaybeUninit::<u64>::uninit() }; N];
        let (cq, to) = (self.cq.as_ptr(), entries.as_mut_ptr().cast());
        // SAFETY: the queue is live, of format DATA; N entries, and as many sources, are written at most.
        let read = unsafe {
            if self.tells_source {
                sys::fi_cq_readfrom(cq, to, N, sources.as_mut_ptr().cast())
            } else {
                sys::fi_cq_read(cq, to, N)
            }
        };
        match usize::try_from(read) {
            Ok(read) => batch.extend(entries.iter().zip(&sources).take(read).map(|read| {
                // SAFETY: so many entries were written, and as many sources if they were asked for (fi_cq(3)).
                let (entry, source) = unsafe {
                    let source = match self.tells_source {
                        true => read.1.assume_init(),
                        false => sys::FI_ADDR_NOTAVAIL,
                    };
                    (read.0.assume_init_ref(), source)
                };
                self.understand(entry, source)
            })),
            Err(_) if read == -(sys::FI_EAGAIN as isize) => {}
            Err(_) => batch.extend([self.read_error()]),
        }
        self.has_reported |= !batch.is_empty();
    }

    #[inline]
    fn understand(&self, entry: &sys::fi_cq_data_entry, source: u64) -> Done {
        // A provider sets FI_REMOTE_CQ_DATA on the initiator's side as well, but FI_WRITE only there. A message may carry data, too:
        // anybody's, and its buffer is ours to post again.
        let message = sys::FI_MSG | sys::FI_RECV;
        let is_message = entry.flags & message == message;
        let remote = entry.flags & sys::FI_REMOTE_CQ_DATA != 0
            && entry.flags & sys::FI_WRITE == 0
            && !is_message;
        match self.index_of(entry.op_context) {
            Some(context) if !remote => Done::Ours { context, outcome: Ok(()), bytes: entry.len },
            _ if remote => Done::Theirs { data: entry.data, source },
            _ => Done::Broken(Failure { code: sys::FI_EOTHER, detail: 0 }),
        }
    }

    /// Which of our contexts a pointer is.
    fn index_of(&self, context: *mut c_void) -> Option<u16> {
        let first = self.contexts.cast::<sys::fi_context2>() as usize;
        let offset = (context as usize).checked_sub(first)?;
        let index = offset / size_of::<sys::fi_context2>();
        let whole = offset % size_of::<sys::fi_context2>() == 0;
        if whole && index < self.contexts.len() { u16::try_from(index).ok() } else { None }
    }

    #[cold]
    fn read_error(&mut self) -> Done {
        // SAFETY: zeroed, as it must be: no buffer for details is offered.
        let mut entry: sys::fi_cq_err_entry = unsafe { std::mem::zeroed() };
        // SAFETY: live; the entry is written.
        let read = unsafe { sys::fi_cq_readerr(self.cq.as_ptr(), &raw mut entry, 0) };
        if read < 0 && read != -(sys::FI_EAGAIN as isize) {
            let code = i32::try_from(-read).unwrap_or(sys::FI_EOTHER);
            return Done::Broken(Failure { code, detail: 0 });
        }
        let failure = Failure { code: entry.err, detail: entry.prov_errno };
        if self.tells_source && EFA_BROKEN.contains(&failure.detail) {
            return Done::Broken(failure);
        }
        match self.index_of(entry.op_context) {
            Some(context) => Done::Ours { context, outcome: Err(failure), bytes: 0 },
            // Of no operation of ours: a write of a peer's that failed here, which the peer hears of too.
            None if entry.err != sys::FI_EOVERRUN => {
                Done::Theirs { data: NO_DATA, source: sys::FI_ADDR_NOTAVAIL }
            }
            None => Done::Broken(failure),
        }
    }
}

/// How EFA ends what was posted on a queue pair in error, where it stays: flushed, and by a fault of its own (fi_efa(7)).
const EFA_BROKEN: [i32; 2] = [1, 2];

/// The data of a remote write that failed: of no session.
pub(super) const NO_DATA: u64 = u64::MAX;

impl Drop for Endpoint {
    fn drop(&mut self) {
        // SAFETY: all three are ours; the endpoint goes first, and with it every use of the contexts.
        unsafe {
            close("endpoint", &raw mut (*self.ep.as_ptr()).fid);
            close("completion queue", &raw mut (*self.cq.as_ptr()).fid);
            close("address vector", &raw mut (*self.av.as_ptr()).fid);
            drop(Box::from_raw(self.contexts));
        }
    }
}

/// One write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Write {
    pub(super) from: u64,
    pub(super) len: usize,
    pub(super) desc: *mut c_void,
    pub(super) to: sys::fi_addr_t,
    pub(super) address: u64,
    pub(super) key: u64,
    pub(super) data: Option<u64>,
    /// Tell when it has been placed. Devices always do.
    pub(super) asks: bool,
}

#[inline]
fn posted(code: isize) -> Result<bool, Failure> {
    if code == 0 {
        return Ok(true);
    }
    if code == -(sys::FI_EAGAIN as isize) {
        return Ok(false);
    }
    let code = i32::try_from(code.unsigned_abs()).unwrap_or(sys::FI_EOTHER);
    Err(Failure { code, detail: 0 })
}

/// # Safety
///
/// The endpoint is live and enabled.
unsafe fn own_name(library: &Library, ep: NonNull<sys::fid_ep>) -> Result<Address, LibfabricError> {
    let mut bytes = [0_u8; immwire_core::wire::NIC_ADDRESS_MAX];
    let mut len = bytes.len();
    // SAFETY: the caller's promise; `len` bytes are written at most.
    let code = unsafe { sys::fi_getname(ep.as_ptr(), bytes.as_mut_ptr().cast(), &raw mut len) };
    if code == -sys::FI_ETOOSMALL {
        return Err(LibfabricError::AddressLength { found: len, expected: bytes.len() });
    }
    check(library, "fi_getname", code)?;
    let expected = bytes.len();
    let name = bytes.get(..len).and_then(|name| Address::from_slice(name).ok());
    name.ok_or(LibfabricError::AddressLength { found: len, expected })
}

/// # Safety
///
/// The endpoint is live and enabled.
unsafe fn max_rma(ep: NonNull<sys::fid_ep>, attr: &sys::fi_ep_attr) -> u64 {
    let mut max = 0_usize;
    let mut len = size_of::<usize>();
    let (level, option) = (sys::FI_OPT_ENDPOINT, sys::FI_OPT_MAX_RMA_SIZE);
    // SAFETY: the caller's promise; the option is a `size_t`.
    let code =
        unsafe { sys::fi_getopt(ep.as_ptr(), level, option, (&raw mut max).cast(), &raw mut len) };
    let max = if code == 0 && max > 0 { max } else { attr.max_msg_size };
    u64::try_from(max).unwrap_or(u64::MAX).clamp(1, RMA_MAX)
}

/// Returns whether the device reaches GPUs' memory by itself, as far as that is told.
///
/// # Safety
///
/// The endpoint is live, and not enabled yet.
unsafe fn efa_options(ep: NonNull<sys::fid_ep>) -> Result<bool, LibfabricError> {
    let (no, mut is_direct) = (false, true);
    // Neither CUDA calls nor a second way for peers on the host. A version that does not know an option
    // does not do what it switches off, or has no device memory here.
    for option in [sys::FI_OPT_CUDA_API_PERMITTED, sys::FI_OPT_SHARED_MEMORY_PERMITTED] {
        // SAFETY: the caller's promise; the options are a C `bool`.
        let code = unsafe {
            let level = sys::FI_OPT_ENDPOINT;
            sys::fi_setopt(ep.as_ptr(), level, option, (&raw const no).cast(), size_of::<bool>())
        };
        if code == -sys::FI_EOPNOTSUPP && option == sys::FI_OPT_CUDA_API_PERMITTED {
            // fi_endpoint(3): without CUDA's calls it could not.
            is_direct = false;
        }
        if code != 0 && ![sys::FI_ENOPROTOOPT, sys::FI_EOPNOTSUPP, sys::FI_EINVAL].contains(&-code)
        {
            return Err(LibfabricError::Call {
                call: "fi_setopt",
                code: -code,
                text: String::new(),
            });
        }
    }
    Ok(is_direct)
}

/// A write that the target's processor has to help with is none of ours: it would wait for the peer's.
///
/// # Safety
///
/// The endpoint is live and enabled.
unsafe fn efa_native(ep: NonNull<sys::fid_ep>, facts: &Facts) -> Result<(), LibfabricError> {
    let mut emulated = 0_u8;
    let mut len = size_of::<bool>();
    let (level, option) = (sys::FI_OPT_ENDPOINT, sys::FI_OPT_EFA_EMULATED_WRITE);
    // SAFETY: the caller's promise; the option is a C `bool`, one byte.
    let code = unsafe {
        sys::fi_getopt(ep.as_ptr(), level, option, (&raw mut emulated).cast(), &raw mut len)
    };
    if code != 0 || emulated != 0 {
        return Err(LibfabricError::EmulatedWrites { domain: facts.domain.clone() });
    }
    Ok(())
}
