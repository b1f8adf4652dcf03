//! libfabric without an engine.
//!
//! It knows the binary interface and two providers' demands (contexts, descriptors and the address vector of
//! `efa`; none of software's).
//!
//! # Invariants
//!
//! - Objects are closed once, the endpoint before its queue and address vector, and registrations before the
//!   domain; contexts outlive the endpoint.

use super::loops::{Seen, Wire};
use super::{DEPTH_MAX, Done, Far, Memory, Piece, RawError, Registered, fits, inside};
use immwire::Region;
use libfabric_sys as sys;
use libfabric_sys::{Library, Version};
use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::zeroed;
use std::ptr::{self, NonNull};

/// Completions read at a time.
const BATCH: usize = 16;
/// Entries of the queue: no peer has more writes under way than it may have in flight.
const ENTRIES: usize = 4096;
/// The version of the interface that is asked for, if the library has it.
const API: Version = Version { major: 1, minor: 20 };
/// Longer than any provider's address.
const ADDRESS_MAX: usize = 128;

/// An `fi_info` of our own, freed when dropped.
struct Info(&'static Library, NonNull<sys::fi_info>);

impl Info {
    fn hints(
        library: &'static Library,
        provider: &str,
        fabric: Option<&CStr>,
        domain: &str,
    ) -> Result<Self, RawError> {
        let named = |text: &str| CString::new(text).map_err(|_| RawError::Name(text.to_owned()));
        let (provider_name, domain_name) = (named(provider)?, named(domain)?);
        // SAFETY: null asks for an empty one (fi_getinfo(3)).
        let raw = unsafe { library.dupinfo(ptr::null()) };
        let info = Self(library, NonNull::new(raw).ok_or(RawError::OutOfMemory("libfabric"))?);
        // SAFETY: `dupinfo` of null allocates all attributes, and nobody else has this one. Strings are
        // from `strdup`, and belong to it from here on; null ones mean no wish.
        unsafe {
            let copy = |text: &CStr| libc::strdup(text.as_ptr());
            let hints = &mut *info.1.as_ptr();
            hints.caps = sys::FI_MSG | sys::FI_RMA;
            hints.mode = sys::FI_CONTEXT | sys::FI_CONTEXT2;
            (*hints.ep_attr).type_ = sys::FI_EP_RDM;
            let attr = &mut *hints.domain_attr;
            attr.mr_mode = sys::FI_MR_LOCAL
                | sys::FI_MR_VIRT_ADDR
                | sys::FI_MR_ALLOCATED
                | sys::FI_MR_PROV_KEY;
            // One thread is all there is: the least that a provider can lock.
            attr.threading = sys::FI_THREAD_DOMAIN;
            attr.data_progress = sys::FI_PROGRESS_MANUAL;
            attr.control_progress = sys::FI_PROGRESS_MANUAL;
            attr.av_type = sys::FI_AV_TABLE;
            attr.cq_data_size = 4;
            attr.name = copy(&domain_name);
            (*hints.fabric_attr).prov_name = copy(&provider_name);
            (*hints.fabric_attr).name = fabric.map_or(ptr::null_mut(), copy);
        }
        Ok(info)
    }

    /// The first device that fits the hints; none if there is none.
    fn first(library: &'static Library, hints: &Self) -> Result<Option<Self>, RawError> {
        let mut list = ptr::null_mut();
        let version = library.version().min(API).code();
        // SAFETY: no node, no service; the hints are this library's; the list is written.
        let code = unsafe {
            let none = ptr::null();
            library.getinfo(version, none, none, 0, hints.1.as_ptr(), &raw mut list)
        };
        if code == -sys::FI_ENODATA {
            return Ok(None);
        }
        check(library, "fi_getinfo", code)?;
        // SAFETY: a list of this library's, freed after its first entry was copied.
        let copy = unsafe {
            let copy = library.dupinfo(list);
            library.freeinfo(list);
            copy
        };
        Ok(Some(Self(library, NonNull::new(copy).ok_or(RawError::OutOfMemory("libfabric"))?)))
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: ours, of this library, a list of one.
        unsafe { self.0.freeinfo(self.1.as_ptr()) }
    }
}

fn check(library: &Library, call: &'static str, code: c_int) -> Result<(), RawError> {
    if code >= 0 {
        return Ok(());
    }
    Err(RawError::Call { call, code: -code, text: library.strerror(-code) })
}

/// A libfabric object, closed when dropped. Each of them begins with its `fid` (`<rdma/fabric.h>`).
struct Object<T>(NonNull<T>);

impl<T> Object<T> {
    /// What `open` makes: it gets the place for it, and returns libfabric's code.
    fn open(
        library: &Library,
        call: &'static str,
        open: impl FnOnce(*mut *mut T) -> c_int,
    ) -> Result<Self, RawError> {
        let mut raw = ptr::null_mut();
        check(library, call, open(&raw mut raw))?;
        NonNull::new(raw).map(Self).ok_or(RawError::OutOfMemory("libfabric"))
    }

    fn raw(&self) -> *mut T {
        self.0.as_ptr()
    }

    fn fid(&self) -> *mut sys::fid {
        self.0.as_ptr().cast()
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: ours, open; fields and values are ordered so that what was opened from it, or bound to
        // it, is closed before.
        let code = unsafe { sys::fi_close(self.fid()) };
        if code != 0 {
            tracing::debug!(code, "libfabric would not close an object of the baseline");
        }
    }
}

/// By number of the operation; the library's while that is in flight, so never referred to.
struct Contexts(*mut [sys::fi_context2]);

impl Contexts {
    fn new() -> Self {
        let empty = sys::fi_context2 { internal: [ptr::null_mut(); 8] };
        Self(Box::into_raw(vec![empty; DEPTH_MAX as usize].into_boxed_slice()))
    }

    fn first(&self) -> *mut sys::fi_context2 {
        self.0.cast()
    }
}

impl Drop for Contexts {
    fn drop(&mut self) {
        // SAFETY: from `new`; the endpoint, and with it every operation, is gone (see `Fabric`).
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// A registration, closed when dropped.
pub(super) struct Registration {
    _object: Object<sys::fid_mr>,
    desc: *mut c_void,
}

/// An endpoint, and all that it needs: closed in this order. Used by one thread.
pub(super) struct Fabric {
    ep: Object<sys::fid_ep>,
    cq: Object<sys::fid_cq>,
    av: Object<sys::fid_av>,
    domain: Object<sys::fid_domain>,
    _fabric: Object<sys::fid_fabric>,
    contexts: Contexts,
    free: Vec<u16>,
    library: &'static Library,
    name: Vec<u8>,
    peer: sys::fi_addr_t,
    virtual_addresses: bool,
    is_device: bool,
    /// Bytes of a write at most.
    longest: u64,
}

impl Fabric {
    /// Opens an endpoint on `domain` of `provider`, with the library that engines use.
    pub(super) fn open(provider: &str, domain: &str) -> Result<Self, RawError> {
        let library = Library::load()?;
        let is_device = provider == "efa";
        // As the engine's provider chooses.
        let fabric = is_device.then_some(c"efa-direct");
        let hints = Info::hints(library, provider, fabric, domain)?;
        let Some(info) = Info::first(library, &hints)? else {
            let device = format!("{domain} of {provider}");
            return Err(RawError::NoDevice { library: "libfabric", device });
        };
        Self::on(library, &info, is_device)
    }

    fn on(library: &'static Library, info: &Info, is_device: bool) -> Result<Self, RawError> {
        let raw_info = info.1.as_ptr();
        // SAFETY: for all of the block: the info is live and has all attributes (fi_getinfo(3)); attributes
        // of ours are zero but for what is set; objects are live, and places for new ones are ours.
        unsafe {
            let none = ptr::null_mut();
            let fabric = Object::open(library, "fi_fabric", |to| {
                library.fabric((*raw_info).fabric_attr, to, none)
            })?;
            let domain = Object::open(library, "fi_domain", |to| {
                sys::fi_domain(fabric.raw(), raw_info, to, none)
            })?;
            let mut attr: sys::fi_cq_attr = zeroed();
            (attr.size, attr.format) = (ENTRIES, sys::FI_CQ_FORMAT_DATA);
            attr.wait_obj = sys::FI_WAIT_NONE;
            let cq = Object::open(library, "fi_cq_open", |to| {
                sys::fi_cq_open(domain.raw(), &raw mut attr, to, none)
            })?;
            let mut attr: sys::fi_av_attr = zeroed();
            (attr.type_, attr.count) = (sys::FI_AV_TABLE, 1);
            let av = Object::open(library, "fi_av_open", |to| {
                sys::fi_av_open(domain.raw(), &raw mut attr, to, none)
            })?;
            let ep = Object::open(library, "fi_endpoint", |to| {
                sys::fi_endpoint(domain.raw(), raw_info, to, none)
            })?;
            let flags = sys::FI_TRANSMIT | sys::FI_RECV;
            check(library, "fi_ep_bind", sys::fi_ep_bind(ep.raw(), cq.fid(), flags))?;
            check(library, "fi_ep_bind", sys::fi_ep_bind(ep.raw(), av.fid(), 0))?;
            check(library, "fi_enable", sys::fi_enable(ep.raw()))?;
            let mut name = vec![0_u8; ADDRESS_MAX];
            let mut len = name.len();
            let code = sys::fi_getname(ep.raw(), name.as_mut_ptr().cast(), &raw mut len);
            check(library, "fi_getname", code)?;
            name.truncate(len);
            let (mut longest, mut len) = (0_usize, size_of::<usize>());
            let (level, option) = (sys::FI_OPT_ENDPOINT, sys::FI_OPT_MAX_RMA_SIZE);
            let to = (&raw mut longest).cast();
            let known = sys::fi_getopt(ep.raw(), level, option, to, &raw mut len) == 0;
            // Not every provider, nor every version, tells writes from messages.
            if !known || longest == 0 {
                longest = (*(*raw_info).ep_attr).max_msg_size;
            }
            let mr_mode = (*(*raw_info).domain_attr).mr_mode;
            Ok(Self {
                ep,
                cq,
                av,
                domain,
                _fabric: fabric,
                contexts: Contexts::new(),
                free: (0..u16::try_from(DEPTH_MAX).unwrap_or(u16::MAX)).rev().collect(),
                library,
                name,
                peer: sys::FI_ADDR_NOTAVAIL,
                virtual_addresses: mr_mode & sys::FI_MR_VIRT_ADDR != 0,
                is_device,
                longest: u64::try_from(longest).unwrap_or(u64::MAX).max(1),
            })
        }
    }

    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    pub(super) const fn longest(&self) -> u64 {
        self.longest
    }

    pub(super) const fn is_software(&self) -> bool {
        !self.is_device
    }

    pub(super) fn meet(&mut self, name: &[u8]) -> Result<(), RawError> {
        if name.len() != self.name.len() {
            let text = "an address of another length".to_owned();
            return Err(RawError::Call { call: "fi_av_insert", code: sys::FI_EINVAL, text });
        }
        // SAFETY: one address, of the length that this provider's have; the handle is written.
        let inserted = unsafe {
            let (from, to) = (name.as_ptr().cast(), &raw mut self.peer);
            sys::fi_av_insert(self.av.raw(), from, 1, to, 0, ptr::null_mut())
        };
        check(self.library, "fi_av_insert", inserted)?;
        if inserted == 1 {
            return Ok(());
        }
        let text = "libfabric refused the address".to_owned();
        Err(RawError::Call { call: "fi_av_insert", code: sys::FI_EINVAL, text })
    }

    /// # Safety
    ///
    /// As for [`super::Raw::register_region`].
    pub(super) unsafe fn register(&self, region: &Region) -> Result<Memory, RawError> {
        let (at, len) = (region.as_ptr(), usize::try_from(region.len()).unwrap_or(0));
        let mut key = [0; 4];
        // Nobody can write here who was not told of it, where the provider lets keys be chosen.
        let random = rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty());
        let call = |code| self.failed("getrandom", code);
        random.map_err(|errno| call(errno.raw_os_error()))?;
        let key = u64::from(u32::from_ne_bytes(key));
        let access = sys::FI_SEND | sys::FI_RECV | sys::FI_WRITE | sys::FI_REMOTE_WRITE;
        let object = Object::open(self.library, "fi_mr_reg", |to| {
            let (from, none) = (at.cast_const().cast(), ptr::null_mut());
            // SAFETY: the domain is live; the memory, by the caller's promise.
            unsafe { sys::fi_mr_reg(self.domain.raw(), from, len, access, 0, key, 0, to, none) }
        })?;
        // SAFETY: a live registration, which keeps both.
        let (desc, key) = unsafe { (sys::fi_mr_desc(object.raw()), sys::fi_mr_key(object.raw())) };
        let registered = Registered::Fabric(Registration { _object: object, desc });
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        let base = if self.virtual_addresses { at as u64 } else { 0 };
        Ok(Memory { registered, at, len, base, key })
    }

    #[cold]
    fn failed(&self, call: &'static str, code: i32) -> RawError {
        RawError::Call { call, code, text: self.library.strerror(code) }
    }

    #[cold]
    fn read_error(&mut self) -> RawError {
        // SAFETY: all zero is a value, and asks for no details; the queue is live, the entry is written.
        let code = unsafe {
            let mut entry: sys::fi_cq_err_entry = zeroed();
            let _ = sys::fi_cq_readerr(self.cq.raw(), &raw mut entry, 0);
            entry.err
        };
        self.failed("fi_cq_read", code)
    }
}

impl Wire for Fabric {
    /// Each write's completion is told: they come in no order.
    #[inline]
    fn post(
        &mut self,
        (memory, far): (&Memory, &Far),
        piece: &Piece,
        (data, done): (u64, Done),
        _signalled: bool,
    ) -> Result<bool, RawError> {
        let &Piece { from, to, len } = piece;
        fits(len, self.longest)?;
        inside(to, len, far.len)?;
        let from = memory.inside(from, len)?;
        let Registered::Fabric(registration) = &memory.registered else {
            return Err(RawError::Unreachable);
        };
        let mut desc = registration.desc;
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let Some(&number) = self.free.last() else { return Ok(false) };
        // Below DEPTH_MAX, as all numbers are.
        let context = self.contexts.first().wrapping_add(number.into()).cast::<c_void>();
        let (ep, peer, address) = (self.ep.raw(), self.peer, far.base.wrapping_add(to));
        // SAFETY: the endpoint is live and enabled; the bytes are in registered memory, which stays until
        // the endpoint is gone, by the promise given to `register_region`; the context is in no other operation,
        // and stays too. What the message points to is read during the call (fi_rma(3)).
        let code = unsafe {
            if self.is_device || done == Done::Early {
                let from = from.cast_const().cast();
                sys::fi_writedata(ep, from, bytes, desc, data, peer, address, far.key, context)
            } else {
                let source = sys::iovec { iov_base: from.cast(), iov_len: bytes };
                let target = sys::fi_rma_iov { addr: address, len: bytes, key: far.key };
                let message = sys::fi_msg_rma {
                    msg_iov: &raw const source,
                    desc: &raw mut desc,
                    iov_count: 1,
                    addr: peer,
                    rma_iov: &raw const target,
                    rma_iov_count: 1,
                    context,
                    data,
                };
                let flags = sys::FI_DELIVERY_COMPLETE | sys::FI_COMPLETION | sys::FI_REMOTE_CQ_DATA;
                sys::fi_writemsg(ep, &raw const message, flags)
            }
        };
        if code == 0 {
            self.free.pop();
            return Ok(true);
        }
        if code == -(sys::FI_EAGAIN as isize) {
            return Ok(false);
        }
        Err(self.failed("fi_writedata", i32::try_from(-code).unwrap_or(sys::FI_EOTHER)))
    }

    #[inline]
    fn read(&mut self, expected: u64) -> Result<Seen, RawError> {
        let none = ptr::null_mut();
        let empty =
            sys::fi_cq_data_entry { op_context: none, flags: 0, len: 0, buf: none, data: 0 };
        let mut entries = [empty; BATCH];
        // SAFETY: the queue is live and of format DATA; BATCH entries are written at most.
        let read = unsafe { sys::fi_cq_read(self.cq.raw(), entries.as_mut_ptr().cast(), BATCH) };
        let mut seen = Seen::default();
        let Ok(read) = usize::try_from(read) else {
            if read == -(sys::FI_EAGAIN as isize) {
                return Ok(seen);
            }
            return Err(self.read_error());
        };
        for entry in entries.iter().take(read) {
            // A provider may say FI_REMOTE_CQ_DATA of our own, but FI_WRITE of no other.
            if entry.flags & sys::FI_REMOTE_CQ_DATA != 0 && entry.flags & sys::FI_WRITE == 0 {
                seen.arrived(entry.data, expected)?;
            } else {
                let first = self.contexts.first() as usize;
                let at = (entry.op_context as usize).wrapping_sub(first);
                let number = at / size_of::<sys::fi_context2>();
                if let Ok(number) = u16::try_from(number) {
                    self.free.push(number);
                }
                seen.own += 1;
            }
        }
        Ok(seen)
    }
}
