//! libfabric without an engine: the loops that writes over libfabric are compared with.
//!
//! One endpoint with a queue, polled by its thread: what a careful person would write who needs nothing but
//! this one benchmark. No peers to find, no credits, no counters, no thread, nothing to sleep on. It takes
//! raw memory, so that the bytes can be the very ones the benchmark moves.
//!
//! It knows the binary interface and two providers' demands (contexts, descriptors and the address vector of
//! `efa`; none of software's); it decides nothing about what is measured.
//!
//! # Invariants
//!
//! - Objects are closed once, the endpoint before its queue and address vector, and registrations before the
//!   domain; contexts outlive the endpoint.
//! - A write is counted as done once its completion was read, and a peer's once its data was.
//! - No wait is without a deadline; when one passes, the endpoint is of no use any more, only to be dropped.

use immwire::core::wire::ProviderKind;
use immwire::{Region, TransferEngine};
use libfabric_sys as sys;
use libfabric_sys::{Library, LoadError, Version};
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::zeroed;
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

/// Completions read at a time.
const BATCH: usize = 16;
/// Operations in flight at most; no more than the engine has on a NIC.
pub const DEPTH_MAX: u32 = 256;
/// Entries of the queue: no peer has more writes under way than it may have in flight.
const ENTRIES: usize = 4096;
/// The version of the interface that is asked for, if the library has it.
const API: Version = Version { major: 1, minor: 20 };
/// Reads of a queue between two looks at the clock.
const READS_PER_LOOK: u32 = 1 << 10;
/// The data of the write that says that the initiator has read all its completions.
const BYE: u64 = 0xffff_fffe;
/// Longer than any provider's address.
const ADDRESS_MAX: usize = 128;

/// Why there is no baseline on libfabric, or it stopped.
#[derive(Debug, thiserror::Error)]
pub enum RawError {
    /// No library.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// It has no such device any more.
    #[error("libfabric lists no device {domain} of {provider} for the baseline")]
    NoDevice {
        /// libfabric's provider.
        provider: String,
        /// Its domain.
        domain: String,
    },
    /// A name cannot be passed on.
    #[error("{0:?} is no name of libfabric's")]
    Name(String),
    /// libfabric could not allocate.
    #[error("libfabric is out of memory")]
    OutOfMemory,
    /// A call failed.
    #[error("the baseline's {call}: {text} ({code})")]
    Call {
        /// Which.
        call: &'static str,
        /// `FI_E*`, positive.
        code: i32,
        /// libfabric's words.
        text: String,
    },
    /// The other side sent something else.
    #[error("the baseline expected {expected:#x} and got {found:#x}")]
    Wrong {
        /// What should have come.
        expected: u64,
        /// What did.
        found: u64,
    },
    /// The other side did nothing.
    #[error("the baseline's other side did nothing for {0:?}")]
    Silent(Duration),
    /// A piece is not in the memory it was given for.
    #[error("the baseline's bytes {offset}..+{len} are outside of its memory of {memory} bytes")]
    Outside {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes there are.
        memory: u64,
    },
}

/// When a write of a software provider is done. A device's is, when the other device has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Done {
    /// When the bytes are in the peer's memory (`FI_DELIVERY_COMPLETE`), as the engine's are.
    Delivered,
    /// When the provider says so without being asked: the kernel has the bytes.
    Early,
}

/// Memory of a peer's, as its owner tells of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Far {
    /// The endpoint's address.
    pub endpoint: Vec<u8>,
    /// What is added to an offset.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// The key.
    pub key: u64,
}

/// One write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// In our memory.
    pub from: u64,
    /// In the peer's.
    pub to: u64,
    /// Bytes.
    pub len: u64,
}

/// libfabric's provider and domain of the engine's first NIC; none if it is on another transport.
#[must_use]
pub fn device(engine: &TransferEngine) -> Option<(&str, &str)> {
    if engine.address().provider() != ProviderKind::Libfabric {
        return None;
    }
    engine.nics().first()?.name.split_once(':')
}

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
        let info = Self(library, NonNull::new(raw).ok_or(RawError::OutOfMemory)?);
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
        Ok(Some(Self(library, NonNull::new(copy).ok_or(RawError::OutOfMemory)?)))
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
        NonNull::new(raw).map(Self).ok_or(RawError::OutOfMemory)
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

/// Memory known to a [`Raw`], which it is dropped before.
pub struct Memory {
    object: Object<sys::fid_mr>,
    at: *mut u8,
    len: u64,
    virtual_addresses: bool,
}

impl Memory {
    /// What the other side needs to write here.
    #[must_use]
    pub fn far(&self, endpoint: &[u8]) -> Far {
        let base = if self.virtual_addresses { self.at as u64 } else { 0 };
        // SAFETY: a live registration.
        let key = unsafe { sys::fi_mr_key(self.object.raw()) };
        Far { endpoint: endpoint.to_vec(), base, len: self.len, key }
    }

    /// Bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub const fn len(&self) -> u64 {
        self.len
    }

    fn inside(&self, offset: u64, len: u64) -> Result<*mut u8, RawError> {
        inside(offset, len, self.len)?;
        // Inside of an allocation, so it fits.
        Ok(self.at.wrapping_add(usize::try_from(offset).unwrap_or(0)))
    }

    /// The 8 bytes at `offset`, as they are now.
    fn word(&self, offset: u64) -> Result<u64, RawError> {
        let at = self.inside(offset, 8)?;
        // SAFETY: inside the memory, which its owner keeps (`Raw::register_region`). Volatile, since a device may
        // have written it; not aligned, since a message may have any length.
        Ok(u64::from_le_bytes(unsafe { at.cast::<[u8; 8]>().read_volatile() }))
    }

    fn set_word(&self, offset: u64, word: u64) -> Result<(), RawError> {
        let at = self.inside(offset, 8)?;
        // SAFETY: as in `word`; nothing that is under way reads it, or it has the same bytes.
        unsafe { at.cast::<[u8; 8]>().write_volatile(word.to_le_bytes()) };
        Ok(())
    }
}

fn inside(offset: u64, len: u64, memory: u64) -> Result<(), RawError> {
    match offset.checked_add(len) {
        Some(end) if end <= memory => Ok(()),
        _ => Err(RawError::Outside { offset, len, memory }),
    }
}

/// A wait for the other side.
struct Patience {
    reads: u32,
    limit: Duration,
    until: Option<Instant>,
}

impl Patience {
    fn new(limit: Duration) -> Self {
        Self { reads: 0, limit, until: None }
    }

    /// Something has happened.
    fn renew(&mut self) {
        (self.reads, self.until) = (0, None);
    }

    /// Nothing has.
    fn lose(&mut self) -> Result<(), RawError> {
        self.reads += 1;
        if self.reads == READS_PER_LOOK {
            self.reads = 0;
            let now = Instant::now();
            if now >= *self.until.get_or_insert(now + self.limit) {
                return Err(RawError::Silent(self.limit));
            }
        }
        Ok(())
    }
}

/// What was read from the queue.
#[derive(Default)]
struct Seen {
    /// Completions of ours.
    own: u64,
    /// Writes of the peer's with the expected data.
    theirs: u64,
    /// And one with [`BYE`].
    bye: bool,
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
        // SAFETY: from `new`; the endpoint, and with it every operation, is gone (see `Raw`).
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// An endpoint, and all that it needs: closed in this order. Used by one thread.
pub struct Raw {
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
    limit: Duration,
}

impl Raw {
    /// Opens an endpoint on `domain` of `provider`, with the library that engines use. No wait is longer
    /// than `limit`.
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub fn open(provider: &str, domain: &str, limit: Duration) -> Result<Self, RawError> {
        let library = Library::load()?;
        let is_device = provider == "efa";
        // As the engine's provider chooses.
        let fabrics: &[Option<&CStr>] =
            if is_device { &[Some(c"efa-direct"), Some(c"efa")] } else { &[None] };
        let mut found = None;
        for fabric in fabrics {
            let hints = Info::hints(library, provider, *fabric, domain)?;
            found = Info::first(library, &hints)?;
            if found.is_some() {
                break;
            }
        }
        let Some(info) = found else {
            let (provider, domain) = (provider.to_owned(), domain.to_owned());
            return Err(RawError::NoDevice { provider, domain });
        };
        Self::on(library, &info, is_device, limit)
    }

    fn on(
        library: &'static Library,
        info: &Info,
        is_device: bool,
        limit: Duration,
    ) -> Result<Self, RawError> {
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
                limit,
            })
        }
    }

    /// Where the other side reaches it.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// Whether a software provider moves the bytes: whether [`Done`] makes a difference.
    #[must_use]
    pub fn is_software(&self) -> bool {
        !self.is_device
    }

    /// Gets to know the other side. Both must, before the first write.
    ///
    /// # Errors
    ///
    /// [`RawError`]: it has no address of this provider's.
    pub fn meet(&mut self, name: &[u8]) -> Result<(), RawError> {
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

    /// Registers a region of an engine's here too.
    ///
    /// # Safety
    ///
    /// The region is dropped after the registration, that before the endpoint or after its last call. Nobody
    /// else in this process accesses it while a method of this endpoint runs; who is told of it writes there
    /// at any time.
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub unsafe fn register_region(&self, region: &Region) -> Result<Memory, RawError> {
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
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        Ok(Memory { object, at, len, virtual_addresses: self.virtual_addresses })
    }

    /// Posts a write. `false`: its queue is full, or all contexts are taken.
    #[inline]
    fn post(
        &mut self,
        memory: &Memory,
        far: &Far,
        piece: &Piece,
        data: u64,
        done: Done,
    ) -> Result<bool, RawError> {
        let &Piece { from, to, len } = piece;
        inside(to, len, far.len)?;
        let from = memory.inside(from, len)?;
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let Some(&number) = self.free.last() else { return Ok(false) };
        // Below DEPTH_MAX, as all numbers are.
        let context = self.contexts.first().wrapping_add(number.into()).cast::<c_void>();
        let (ep, peer, address) = (self.ep.raw(), self.peer, far.base.wrapping_add(to));
        // SAFETY: the endpoint is live and enabled; the bytes are in registered memory, which stays until
        // the endpoint is gone, by the promise given to `register_region`; the context is in no other operation,
        // and stays too. What the message points to is read during the call (fi_rma(3)).
        let code = unsafe {
            let mut desc = sys::fi_mr_desc(memory.object.raw());
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

    #[cold]
    fn failed(&self, call: &'static str, code: i32) -> RawError {
        RawError::Call { call, code, text: self.library.strerror(code) }
    }

    /// Makes the endpoint move, and reads what there is.
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
                match entry.data {
                    data if data == expected => seen.theirs += 1,
                    BYE => seen.bye = true,
                    found => return Err(RawError::Wrong { expected, found }),
                }
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

    /// Posts what was refused again, and reads, until it is accepted. Returns what was seen meanwhile.
    fn post_soon(
        &mut self,
        memory: &Memory,
        far: &Far,
        piece: &Piece,
        data: u64,
        done: Done,
    ) -> Result<Seen, RawError> {
        let (mut all, mut patience) = (Seen::default(), Patience::new(self.limit));
        while !self.post(memory, far, piece, data, done)? {
            let seen = self.read(data)?;
            all.own += seen.own;
            all.theirs += seen.theirs;
            all.bye |= seen.bye;
            patience.lose()?;
        }
        Ok(all)
    }

    /// As the initiator: `count` writes with `data`, the `n`th of them `piece(n)`, at most `depth` in flight,
    /// until the last bytes are there; how long that took. The other side is in [`Raw::take`].
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub fn stream(
        &mut self,
        memory: &Memory,
        far: &Far,
        count: u64,
        depth: u32,
        (data, done): (u64, Done),
        piece: impl Fn(u64) -> Piece,
    ) -> Result<Duration, RawError> {
        let depth = u64::from(depth.min(DEPTH_MAX));
        let (mut posted, mut ended) = (0, 0);
        let mut patience = Patience::new(self.limit);
        let start = Instant::now();
        while ended < count {
            while posted < count && posted - ended < depth {
                // The last says when all are there, in both forms: bytes of one sender stay in order.
                let done = if posted + 1 == count { Done::Delivered } else { done };
                if !self.post(memory, far, &piece(posted), data, done)? {
                    break;
                }
                posted += 1;
            }
            match self.read(data)?.own {
                0 => patience.lose()?,
                own => {
                    ended += own;
                    patience.renew();
                }
            }
        }
        let took = start.elapsed();
        self.bye(memory, far, &piece(count.saturating_sub(1)))?;
        Ok(took)
    }

    /// Writes the first bytes of `piece` once more, to say that nothing is awaited any more.
    fn bye(&mut self, memory: &Memory, far: &Far, piece: &Piece) -> Result<(), RawError> {
        let piece = Piece { len: piece.len.min(8), ..*piece };
        let seen = self.post_soon(memory, far, &piece, BYE, Done::Early)?;
        let (mut own, mut patience) = (seen.own, Patience::new(self.limit));
        while own == 0 {
            own = self.read(BYE)?.own;
            patience.lose()?;
        }
        Ok(())
    }

    /// As the target: polls until `count` writes with `data` have come, and the initiator knows it.
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub fn take(&mut self, count: u64, data: u64) -> Result<(), RawError> {
        let (mut taken, mut bye, mut patience) = (0, false, Patience::new(self.limit));
        while taken < count || !bye {
            let seen = self.read(data)?;
            taken += seen.theirs;
            bye |= seen.bye;
            if seen.theirs == 0 {
                patience.lose()?;
            } else {
                patience.renew();
            }
        }
        if taken == count { Ok(()) } else { Err(RawError::Wrong { expected: count, found: taken }) }
    }

    /// Sends the message of `turn`, all of `out`: its number in the first and the last 8 bytes.
    fn send(
        &mut self,
        out: &Memory,
        far: &Far,
        turn: u64,
        (data, done): (u64, Done),
    ) -> Result<Seen, RawError> {
        out.set_word(0, turn)?;
        out.set_word(out.len.saturating_sub(8), turn)?;
        let piece = Piece { from: 0, to: 0, len: out.len };
        if self.post(out, far, &piece, data, done)? {
            return Ok(Seen::default());
        }
        self.post_soon(out, far, &piece, data, done)
    }

    /// Waits for the message of `turn` in `inbox`, `bytes` long. `came` was seen of it before. Returns the
    /// completions of ours that were read.
    fn receive(
        &mut self,
        inbox: &Memory,
        bytes: u64,
        turn: u64,
        data: u64,
        came: u64,
    ) -> Result<u64, RawError> {
        let (mut came, mut own, mut patience) = (came, 0, Patience::new(self.limit));
        while came == 0 {
            let seen = self.read(data)?;
            came += seen.theirs;
            own += seen.own;
            patience.lose()?;
        }
        for offset in [0, bytes.saturating_sub(8)] {
            let found = inbox.word(offset)?;
            if found != turn {
                return Err(RawError::Wrong { expected: turn, found });
            }
        }
        Ok(own)
    }

    /// As the side that starts: a ping-pong of `turns` turns, timed in batches of `batch`: seconds
    /// one way. Messages are as long as `out`, of at least 8 bytes; the other side's come to `inbox`.
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub fn ping(
        &mut self,
        ends: &Ends<'_>,
        turns: u64,
        batch: u64,
        how: (u64, Done),
    ) -> Result<Vec<f64>, RawError> {
        let bytes = ends.out.len;
        let (mut own, mut times) = (0, Vec::new());
        let mut from = Instant::now();
        for turn in 1..=turns {
            let seen = self.send(ends.out, ends.far, turn, how)?;
            own += seen.own + self.receive(ends.inbox, bytes, turn, how.0, seen.theirs)?;
            if turn % batch == 0 {
                let now = Instant::now();
                times.push((now - from).as_secs_f64() / batch as f64 / 2.0);
                from = now;
            }
        }
        self.drain(own, turns, how.0)?;
        self.bye(ends.out, ends.far, &Piece { from: 0, to: 0, len: bytes })?;
        Ok(times)
    }

    /// As the side that answers.
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub fn pong(&mut self, ends: &Ends<'_>, turns: u64, how: (u64, Done)) -> Result<(), RawError> {
        let bytes = ends.out.len;
        let mut own = 0;
        for turn in 1..=turns {
            own += self.receive(ends.inbox, bytes, turn, how.0, 0)?;
            own += self.send(ends.out, ends.far, turn, how)?.own;
        }
        let (mut bye, mut patience) = (false, Patience::new(self.limit));
        while !bye || own < turns {
            let seen = self.read(how.0)?;
            (own, bye) = (own + seen.own, bye || seen.bye);
            patience.lose()?;
        }
        Ok(())
    }

    /// Waits until `posted` writes have completed, `own` of which have.
    fn drain(&mut self, own: u64, posted: u64, data: u64) -> Result<(), RawError> {
        let (mut own, mut patience) = (own, Patience::new(self.limit));
        while own < posted {
            own += self.read(data)?.own;
            patience.lose()?;
        }
        Ok(())
    }
}

/// What a ping-pong goes between, on one side.
pub struct Ends<'a> {
    /// Where the other side's messages come in.
    pub inbox: &'a Memory,
    /// What is sent.
    pub out: &'a Memory,
    /// Where to.
    pub far: &'a Far,
}
