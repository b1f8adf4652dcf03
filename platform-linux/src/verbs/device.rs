//! libibverbs's objects, owned: devices, protection domains, registrations, queues and queue pairs.
//!
//! Knows the binary interface and its traps; knows nothing of peers, sessions, or what the engine wants.
//!
//! # Invariants
//!
//! - Every object is destroyed once, after all that were made from it: each holds what it was made from.
//! - Nothing is used of a failed completion but its number, its status and its queue pair: the rest is undefined
//!   then (ibv_poll_cq(3)).
//! - By which calls writes are posted and completions read is found out once for each device, by making what they need
//!   ([`Device::calls`]); no post and no poll asks. So is how many bytes sends carry themselves, when it is opened ([`Device::inline_bytes`]):
//!   a device whose queue pairs would be refused later does not fit.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::sync::{Arc, OnceLock};

use ibverbs_sys as sys;
use ibverbs_sys::Library;
use immwire_core::device::{Calls, Paging, PortName, PortState, may_grow};
use immwire_core::port::{
    Gid, GidEntry, GidKind, Link, Mtu, Number24, Port, Queue, Route, choose_gid, find_gid,
    speed_gbps,
};
use rustix::system::uname;

use super::{INLINE_BYTES, LANE_DEPTH, LETTER_BYTES, VerbsError, VerbsOptions};
use crate::gpus::Direct;

/// How far packets may be routed.
const HOP_LIMIT: u8 = 64;
/// What a receiver without a posted receive asks the sender to wait: 0.12 ms.
const RNR_TIMER: u8 = 7;
/// Ask such a receiver for ever: it is the engine that says when a peer is gone.
const RNR_RETRY: u8 = 7;

fn failed(call: &'static str) -> VerbsError {
    VerbsError::Call { call, source: io::Error::last_os_error() }
}

/// What functions return that return an `errno`.
fn check(call: &'static str, code: c_int) -> Result<(), VerbsError> {
    if code == 0 {
        return Ok(());
    }
    // Some drivers return -1, and the reason apart.
    let source =
        if code > 0 { io::Error::from_raw_os_error(code) } else { io::Error::last_os_error() };
    Err(VerbsError::Call { call, source })
}

/// What was refused with an `errno`.
fn refused(call: &'static str, errno: c_int) -> VerbsError {
    VerbsError::Call { call, source: io::Error::from_raw_os_error(errno) }
}

/// Says that something could not be destroyed, which leaks it.
fn must(call: &'static str, code: c_int) {
    if let Err(error) = check(call, code) {
        tracing::error!(%error, "an object of libibverbs's could not be destroyed");
    }
}

/// An open device.
#[derive(Debug)]
struct Context {
    library: &'static Library,
    raw: NonNull<sys::ibv_context>,
}

impl Context {
    /// # Safety
    ///
    /// `device` is one of a list that has not been freed.
    unsafe fn open(
        library: &'static Library,
        device: *mut sys::ibv_device,
    ) -> Result<Self, VerbsError> {
        // SAFETY: by the caller's promise.
        if unsafe { (*device).transport_type } != sys::IBV_TRANSPORT_IB {
            return Err(VerbsError::Unfit { why: "it is no InfiniBand or RoCE device" });
        }
        // SAFETY: as above.
        let raw = NonNull::new(unsafe { (library.symbols.ibv_open_device)(device) });
        Ok(Self { library, raw: raw.ok_or_else(|| failed("ibv_open_device"))? })
    }

    const fn as_ptr(&self) -> *mut sys::ibv_context {
        self.raw.as_ptr()
    }

    fn attributes(&self) -> Result<sys::ibv_device_attr, VerbsError> {
        let query = self.library.symbols.ibv_query_device;
        // SAFETY: all zero is a value of the type, and the library writes no more than it.
        unsafe {
            let mut device: sys::ibv_device_attr = core::mem::zeroed();
            check("ibv_query_device", query(self.as_ptr(), &raw mut device))?;
            Ok(device)
        }
    }

    fn port(&self, number: u8) -> Result<sys::ibv_port_attr, VerbsError> {
        let query = self.library.symbols.ibv_query_port;
        // SAFETY: all zero is a value of the type, and the library writes no more than it: see the symbol.
        unsafe {
            let mut port: sys::ibv_port_attr = core::mem::zeroed();
            let out = (&raw mut port).cast();
            check("ibv_query_port", query(self.as_ptr(), number, out))?;
            Ok(port)
        }
    }

    /// Whether all that an InfiniBand port sends has to carry global names: a virtual function's may share its LID with others. Libraries that
    /// cannot be asked are older than such ports.
    fn is_global(&self, number: u8) -> bool {
        // SAFETY: the context is open.
        match unsafe { sys::ibv_query_port_whole(self.as_ptr(), number) } {
            Ok(port) => port.flags & sys::IBV_QPF_GRH_REQUIRED != 0,
            Err(errno) => {
                tracing::debug!(errno, "a device does not say all of a port");
                false
            }
        }
    }

    /// What it offers for memory that is not pinned; nothing, if it cannot be asked.
    fn paging(&self) -> Paging {
        // SAFETY: the context is open.
        let attr = match unsafe { sys::ibv_query_device_ex(self.as_ptr()) } {
            Ok(attr) => attr,
            Err(errno) => {
                tracing::debug!(errno, "a device does not say what it offers");
                return Paging::default();
            }
        };
        let [reliable, ..] = attr.odp_caps.per_transport_caps;
        Paging {
            any: attr.odp_caps.general_caps & sys::IBV_ODP_SUPPORT != 0,
            write: reliable & sys::IBV_ODP_SUPPORT_WRITE != 0,
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: ours; all that was made from it held it.
        must("ibv_close_device", unsafe { (self.library.symbols.ibv_close_device)(self.as_ptr()) });
    }
}

/// One port of a device, which is opened anew for each: so what is told of the device by itself is told of one port, and of
/// the queue pairs on it. And what is known of both.
#[derive(Debug)]
pub(super) struct Device {
    library: &'static Library,
    context: Context,
    /// The NIC's name: the device's, with the port's number if there are several.
    pub(super) name: String,
    /// The port's number.
    port: u8,
    pub(super) facts: Facts,
    /// Where its GID was last in the port's table.
    gid_index: AtomicU8,
    /// Nothing is to be used that not all drivers have.
    is_classic: bool,
    calls: OnceLock<Calls>,
    /// Bytes that a send carries itself, set before anybody else has the device.
    inline: OnceLock<u32>,
    is_lost: AtomicBool,
    /// It was said that GPUs' memory is registered by its address.
    is_by_address: AtomicBool,
}

// SAFETY: contexts are used by any thread: libibverbs's functions lock what they share.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// What a device and its port can do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts {
    pub(super) port: Port,
    gid: GidEntry,
    pub(super) speed_gbps: u32,
    pub(super) max_message: u32,
    pub(super) max_completions: u32,
    pub(super) max_receives: u32,
    /// Whether completion queues can be made longer while they are in use, if the driver does it at all.
    pub(super) may_grow: bool,
    pub(super) paging: Paging,
}

/// A device, or a port of one, that will not do, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfit {
    /// Its name.
    pub device: String,
    /// What is the matter.
    pub why: String,
}

/// A port that there is.
#[derive(Debug)]
pub(super) struct Found {
    /// The device's name.
    pub(super) device: String,
    pub(super) port: u8,
    pub(super) state: PortState,
    /// Opened, if it fits.
    pub(super) nic: Result<Arc<Device>, Unfit>,
}

/// Opens the ports that fit, and says why others do not: in the order of their devices' names, then of their numbers. Of
/// devices, those that options name, if they name any. Some ms for each.
pub(super) fn discover(
    library: &'static Library,
    options: &VerbsOptions,
) -> Result<Vec<Found>, VerbsError> {
    let mut count = 0;
    // SAFETY: per ibv_get_device_list(3): a local to write to.
    let list = unsafe { (library.symbols.ibv_get_device_list)(&raw mut count) };
    if list.is_null() {
        let error = io::Error::last_os_error();
        // A kernel without RDMA has no device, and says so in one of these ways.
        if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::ENOENT)) {
            return Ok(Vec::new());
        }
        return Err(VerbsError::Call { call: "ibv_get_device_list", source: error });
    }
    let mut devices = Vec::new();
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has so many entries, which are devices until it is freed, and their names C strings.
        devices.push(unsafe {
            let device = *list.add(at);
            let name = (library.symbols.ibv_get_device_name)(device);
            (CStr::from_ptr(name).to_string_lossy().into_owned(), device)
        });
    }
    devices.sort();
    let is_device = |name: &str| devices.iter().any(|(device, _)| device == name);
    let wanted: Vec<_> =
        options.devices.iter().map(|name| PortName::read(name, is_device).device).collect();
    let mut found = Vec::new();
    for (name, device) in
        devices.iter().filter(|(it, _)| wanted.is_empty() || wanted.contains(&it.as_str()))
    {
        // SAFETY: the list is freed below.
        unsafe { open_ports(library, *device, name, options, &mut found) };
    }
    // SAFETY: from `ibv_get_device_list`; what is opened stays open without it.
    unsafe { (library.symbols.ibv_free_device_list)(list) };
    Ok(found)
}

/// Opens each port of a device that fits. One that cannot be opened counts as one port.
///
/// # Safety
///
/// `device` is one of a list that has not been freed.
unsafe fn open_ports(
    library: &'static Library,
    device: *mut sys::ibv_device,
    name: &str,
    options: &VerbsOptions,
    found: &mut Vec<Found>,
) {
    // SAFETY: by the caller's promise.
    let open = || unsafe { Context::open(library, device) };
    let opened = open().and_then(|context| match context.attributes()?.phys_port_cnt {
        0 => Err(VerbsError::Unfit { why: "it has no port" }),
        ports => Ok((ports, context)),
    });
    let mut add = |port, nic: String, opened: Result<Arc<Device>, (PortState, VerbsError)>| {
        let state = opened.as_ref().map_or_else(|(state, _)| *state, |_| PortState::Fit);
        let why = |(_, why): (PortState, VerbsError)| Unfit { device: nic, why: why.to_string() };
        let nic = opened.map_err(why);
        found.push(Found { device: name.to_owned(), port, state, nic });
    };
    let down = |why| (PortState::Down, why);
    let (ports, first) = match opened {
        Ok(opened) => opened,
        Err(why) => return add(1, name.to_owned(), Err(down(why))),
    };
    let mut first = Some(first);
    for port in 1..=ports {
        let nic = match ports {
            1 => name.to_owned(),
            _ => PortName { device: name, port: Some(port) }.to_string(),
        };
        // The first has the device as it was opened to be asked.
        let context = first.take().map_or_else(open, Ok).map_err(down);
        let opened = context.and_then(|context| Device::new(context, nic.clone(), port, options));
        add(port, nic, opened);
    }
}

impl Device {
    /// The port of that number of an open device, if it fits; or else how far it can be used.
    fn new(
        context: Context,
        name: String,
        port: u8,
        options: &VerbsOptions,
    ) -> Result<Arc<Self>, (PortState, VerbsError)> {
        let attr = context.port(port).map_err(|why| (PortState::Down, why))?;
        if attr.state != sys::IBV_PORT_ACTIVE {
            let why = VerbsError::Unfit { why: "its port is not active" };
            return Err((PortState::Down, why));
        }
        let facts = Facts {
            port: Port {
                kind: GidKind::Infiniband,
                mtu: Mtu::B256,
                lid: 0,
                gid: Gid::NONE,
                is_global: false,
            },
            gid: GidEntry { index: 0, gid: Gid::NONE, kind: GidKind::Infiniband },
            speed_gbps: 0,
            max_message: 0,
            max_completions: 0,
            max_receives: 0,
            may_grow: false,
            paging: Paging::default(),
        };
        let mut opened = Self {
            library: context.library,
            context,
            name,
            port,
            facts,
            gid_index: AtomicU8::new(0),
            is_classic: options.classic,
            calls: OnceLock::new(),
            inline: OnceLock::new(),
            is_lost: AtomicBool::new(false),
            is_by_address: AtomicBool::new(false),
        };
        let learnt = opened.learn(&attr, options);
        opened.facts = learnt.map_err(|why| (PortState::Active, why))?;
        opened.gid_index = AtomicU8::new(opened.facts.gid.index);
        set_nonblocking(opened.event_fd()).map_err(|why| (PortState::Active, why))?;
        let opened = Arc::new(opened);
        let inline = opened.carried().map_err(|why| (PortState::Active, why))?;
        let _ = opened.inline.set(inline);
        Ok(opened)
    }

    fn learn(
        &self,
        port: &sys::ibv_port_attr,
        options: &VerbsOptions,
    ) -> Result<Facts, VerbsError> {
        let device = self.context.attributes()?;
        // Devices of before link layers had names are InfiniBand's.
        let link = match port.link_layer {
            sys::IBV_LINK_LAYER_ETHERNET => Link::Ethernet,
            _ => Link::Infiniband,
        };
        let entry = match options.gid_index {
            Some(index) => Some(given_gid(index, self.gid(index))?),
            None => {
                choose_gid(link, (0..=u8::MAX).map_while(|index| self.gid(index).ok()).flatten())
            }
        };
        let entry =
            entry.ok_or(VerbsError::Unfit { why: "its port has no GID that can be used" })?;
        if (entry.kind == GidKind::Infiniband) != (link == Link::Infiniband) {
            return Err(VerbsError::Unfit {
                why: "the GID of that index is not of its kind of link",
            });
        }
        let mtu = u8::try_from(port.active_mtu).ok().and_then(Mtu::from_code);
        let mtu = mtu.filter(|mtu| *mtu >= Mtu::B1024);
        let mtu =
            mtu.ok_or(VerbsError::Unfit { why: "its packets are shorter than 1024 bytes" })?;
        if device.max_srq <= 0 || device.max_srq_wr <= 0 {
            return Err(VerbsError::Unfit { why: "it has no shared receive queues" });
        }
        let most = |limit: c_int| u32::try_from(limit).unwrap_or(0);
        Ok(Facts {
            port: Port {
                kind: entry.kind,
                mtu,
                lid: port.lid,
                gid: entry.gid,
                is_global: self.context.is_global(self.port) && link == Link::Infiniband,
            },
            gid: entry,
            speed_gbps: speed_gbps(port.active_width, port.active_speed),
            max_message: port.max_msg_sz,
            max_completions: most(device.max_cqe),
            max_receives: most(device.max_srq_wr).min(most(device.max_qp_wr)),
            may_grow: may_grow(device.vendor_id, &uname().release().to_string_lossy()),
            paging: self.context.paging(),
        })
    }

    /// An entry of the table; `None` if it is empty, an error past the table's end.
    fn gid(&self, index: u8) -> Result<Option<GidEntry>, VerbsError> {
        // SAFETY: all zero is a value of the type, whose size the library is told.
        let entry = unsafe {
            let mut entry: sys::ibv_gid_entry = core::mem::zeroed();
            let query = self.library.symbols._ibv_query_gid_ex;
            let size = size_of::<sys::ibv_gid_entry>();
            let (context, port) = (self.context.as_ptr(), u32::from(self.port));
            match query(context, port, u32::from(index), &raw mut entry, 0, size) {
                0 => entry,
                libc::ENODATA => return Ok(None),
                code => {
                    check("ibv_query_gid_ex", code)?;
                    return Ok(None);
                }
            }
        };
        let kind = match entry.gid_type {
            sys::IBV_GID_TYPE_IB => GidKind::Infiniband,
            sys::IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
            sys::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            _ => return Ok(None),
        };
        // SAFETY: any bytes are a GID.
        let gid = Gid(unsafe { entry.gid.raw });
        Ok(Some(GidEntry { index, gid, kind }))
    }

    /// Where its GID is now in the port's table. A call of the kernel's, and one for each entry where it has moved.
    fn gid_index(&self) -> Result<u8, VerbsError> {
        let (last, wanted) = (self.gid_index.load(Relaxed), &self.facts.gid);
        let entry = |index| self.gid(index).ok();
        let found = find_gid(wanted, entry(last).flatten())
            .or_else(|| find_gid(wanted, (0..=u8::MAX).map_while(entry).flatten()));
        let gone = VerbsError::Unfit {
            why: "its GID is gone from the port's table: its address was taken from the interface",
        };
        let index = found.ok_or(gone)?;
        self.gid_index.store(index, Relaxed);
        Ok(index)
    }

    /// Which of the extended calls are used with it: those that it offers, which is tried out by the first who asks.
    pub(super) fn calls(self: &Arc<Self>) -> Calls {
        *self.calls.get_or_init(|| {
            if self.is_classic {
                return Calls::CLASSIC;
            }
            self.offered().unwrap_or_else(|error| {
                tracing::debug!(device = self.name, %error, "extended calls cannot be tried");
                Calls::CLASSIC
            })
        })
    }

    /// Tries to make a completion queue and a queue pair with the extended calls, and takes them away again.
    fn offered(self: &Arc<Self>) -> Result<Calls, VerbsError> {
        let lacks =
            |error: &VerbsError| tracing::debug!(device = self.name, %error, "not extended");
        let extended = Completed::extended(self, 1).inspect_err(lacks);
        let polls = extended.is_ok();
        let completed = extended.or_else(|_| Completed::classic(self, 1))?;
        let depths = Depths { sends: 1, receives: 1, inline: self.inline_bytes() };
        let (domain, completed) = (Domain::open(self)?, Arc::new(completed));
        let pair = QueuePair::extended(&domain, &completed, None, depths).inspect_err(lacks);
        Ok(Calls { posts: pair.is_ok(), polls })
    }

    /// How many bytes a send may carry itself.
    pub(super) fn inline_bytes(&self) -> u32 {
        self.inline.get().copied().unwrap_or(0)
    }

    /// Tries how many, with queue pairs as long as those for writes, and takes these away again.
    fn carried(self: &Arc<Self>) -> Result<u32, VerbsError> {
        let (domain, completed) = (Domain::open(self)?, Arc::new(Completed::classic(self, 1)?));
        carried(|inline| {
            let depths = Depths { sends: LANE_DEPTH.into(), receives: 1, inline };
            QueuePair::open(&domain, &completed, None, sys::IBV_QPT_RC, depths).map(drop)
        })
    }

    /// What has happened to the device, if anything.
    pub(super) fn event(&self) -> Option<Event> {
        let symbols = &self.library.symbols;
        // SAFETY: per ibv_get_async_event(3): the descriptor does not block, all zero is a value of the type, and an
        // event that was got is acknowledged before the next, and before what it is about is destroyed. Of the union
        // what is read is what the kind of event says is there: a pointer to a live queue pair, whose number never
        // changes, a port's number, or nothing.
        unsafe {
            let mut event: sys::ibv_async_event = core::mem::zeroed();
            if (symbols.ibv_get_async_event)(self.context.as_ptr(), &raw mut event) != 0 {
                return None;
            }
            let number = || (*event.element.cast::<sys::ibv_qp>()).qp_num;
            // A number of C's type, which lies where the pointers do.
            let is_ours =
                || (&raw const event.element).cast::<c_int>().read() == c_int::from(self.port);
            let what = match event.event_type {
                sys::IBV_EVENT_QP_FATAL | sys::IBV_EVENT_QP_REQ_ERR => {
                    Event::QueuePairFailed { number: number() }
                }
                sys::IBV_EVENT_QP_ACCESS_ERR => Event::PeerFailed { number: number() },
                sys::IBV_EVENT_GID_CHANGE if is_ours() => Event::Gids,
                sys::IBV_EVENT_PORT_ACTIVE if is_ours() => Event::Port { is_up: true },
                sys::IBV_EVENT_PORT_ERR if is_ours() => Event::Port { is_up: false },
                sys::IBV_EVENT_QP_LAST_WQE_REACHED => Event::Drained { number: number() },
                sys::IBV_EVENT_CQ_ERR | sys::IBV_EVENT_SRQ_ERR | sys::IBV_EVENT_DEVICE_FATAL => {
                    Event::DeviceFailed { kind: event.event_type }
                }
                kind => Event::Other { kind },
            };
            (symbols.ibv_ack_async_event)(&raw mut event);
            Some(what)
        }
    }

    /// It has failed, for good.
    pub(super) fn lose(&self) {
        // Relaxed: nothing else is told by it.
        self.is_lost.store(true, Relaxed);
    }

    /// A GPU's memory is registered by its address, as it could not be by its DMA-BUF. That is said once.
    fn say_by_address(&self, why: &str, len: usize) {
        // Relaxed: nothing else is told by it.
        if !self.is_by_address.swap(true, Relaxed) {
            let device = self.name.as_str();
            tracing::info!(
                device,
                why,
                len,
                "not by DMA-BUF: GPUs' memory is registered by address"
            );
        }
    }

    /// Whether it has failed.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Relaxed)
    }

    /// Becomes readable when there is an event.
    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the device is.
        unsafe { BorrowedFd::borrow_raw((*self.context.as_ptr()).async_fd) }
    }
}

/// The entry that was asked for by its index, or what to do about it: it may be empty, of no kind that is known, or past the table's end.
fn given_gid(
    index: u8,
    found: Result<Option<GidEntry>, VerbsError>,
) -> Result<GidEntry, VerbsError> {
    match found {
        Ok(Some(entry)) => Ok(entry),
        Ok(None) => Err(VerbsError::NoGid { index }),
        Err(VerbsError::Call { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
            Err(VerbsError::NoGid { index })
        }
        Err(error) => Err(error),
    }
}

/// How many bytes sends carry themselves, where `make` makes a queue pair for so many: what short writes want, or else what letters need.
///
/// # Errors
///
/// A device whose sends carry less; or what one says that makes no queue pair at all.
fn carried(make: impl Fn(u32) -> Result<(), VerbsError>) -> Result<u32, VerbsError> {
    const TOO_FEW: &str = "its sends carry fewer than 32 bytes themselves";
    const { assert!(LETTER_BYTES == 32, "as it is said") };
    let found = [INLINE_BYTES, LETTER_BYTES].into_iter().find(|&bytes| make(bytes).is_ok());
    match found {
        Some(bytes) => Ok(bytes),
        None => Err(make(0).err().unwrap_or(VerbsError::Unfit { why: TOO_FEW })),
    }
}

/// What a device tells by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// A queue pair is in error, by a fault of a device's.
    QueuePairFailed { number: u32 },
    /// A queue pair is in error, because its peer wanted to write where it may not.
    PeerFailed { number: u32 },
    /// The port can be used again, or cannot.
    Port { is_up: bool },
    /// The port's table of GIDs has changed.
    Gids,
    /// A queue pair in error takes no more from its shared receive queue.
    Drained { number: u32 },
    /// The device, or one of its queues, is in error.
    DeviceFailed { kind: u32 },
    /// Of no consequence here: what follows from it shows elsewhere.
    Other { kind: u32 },
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), VerbsError> {
    let os = |source: rustix::io::Errno| VerbsError::Os { call: "fcntl", source: source.into() };
    let flags = rustix::fs::fcntl_getfl(fd).map_err(os)?;
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK).map_err(os)
}

/// What registered memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Access {
    /// Peers write there.
    pub(super) remote: bool,
    /// Receives land there.
    pub(super) received: bool,
    /// It is not pinned, if it is the host's: the device asks for pages when it needs them.
    pub(super) on_demand: bool,
}

impl Access {
    /// As libibverbs has it, for a GPU's memory or the host's.
    const fn flags(self, of_gpu: bool) -> u32 {
        let mut flags = 0;
        if self.remote || self.received {
            // Not of what is read alone: pages that this process may not write could not be pinned. Whatever peers write
            // must have it, too (ibv_reg_mr(3)).
            flags |= sys::IBV_ACCESS_LOCAL_WRITE;
        }
        if self.remote {
            // No order is assumed of the writes to a region; that they come before the completion that announces them is
            // the device's promise all the same.
            flags |= sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_RELAXED_ORDERING;
        }
        if self.on_demand && !of_gpu {
            flags |= sys::IBV_ACCESS_ON_DEMAND;
        }
        flags
    }
}

/// A protection domain: what is made from one can be used together.
#[derive(Debug)]
pub(super) struct Domain {
    raw: NonNull<sys::ibv_pd>,
    device: Arc<Device>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Domain {}
// SAFETY: as for `Device`.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn open(device: &Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: an open device's.
        let raw = unsafe { (device.library.symbols.ibv_alloc_pd)(device.context.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("ibv_alloc_pd"))?;
        Ok(Arc::new(Self { raw, device: Arc::clone(device) }))
    }

    pub(super) const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Registers memory. Its pages are pinned, unless `access` says otherwise: as long as it is large, about a second for
    /// 16 GiB of small pages.
    ///
    /// # Safety
    ///
    /// `len` bytes from `at` are mapped, or allocated on a GPU, and stay so while the registration lives. If `access` has it,
    /// peers write there.
    pub(super) unsafe fn register(
        self: &Arc<Self>,
        at: NonNull<u8>,
        len: usize,
        access: Access,
        gpu: Option<&Direct>,
    ) -> Result<Registration, VerbsError> {
        let access = access.flags(gpu.is_some());
        let (address, iova) = (at.as_ptr().cast::<c_void>(), at.as_ptr() as u64);
        let by_file = match gpu {
            None => None,
            Some(gpu) => match self.register_file(gpu, len, iova, access) {
                Ok(raw) => return Ok(Registration { raw, domain: Arc::clone(self) }),
                Err(why) => Some(why),
            },
        };
        let register = self.device.library.symbols.ibv_reg_mr_iova2;
        // SAFETY: per ibv_reg_mr(3): a live domain; the memory is there, by the caller's promise. Of a GPU's the kernel finds
        // out with nvidia-peermem's help, or refuses the address.
        let raw = unsafe { register(self.raw.as_ptr(), address, len, iova, access) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(match (by_file, io::Error::last_os_error()) {
                // Not for want of something.
                (Some(by_file), by_address) if is_unable(&by_address) => {
                    VerbsError::NoGpuDirect { by_file, by_address }
                }
                (_, source) => VerbsError::Call { call: "ibv_reg_mr", source },
            });
        };
        if let Some(why) = by_file {
            self.device.say_by_address(&why, len);
        }
        Ok(Registration { raw, domain: Arc::clone(self) })
    }

    /// Registers a GPU's memory by its DMA-BUF, or says why not.
    fn register_file(
        &self,
        gpu: &Direct,
        len: usize,
        iova: u64,
        access: u32,
    ) -> Result<NonNull<sys::ibv_mr>, String> {
        let file = gpu.file.as_ref().map_err(ToString::to_string)?;
        let register = self.device.library.symbols.ibv_reg_dmabuf_mr;
        let register = register.ok_or("this libibverbs has no ibv_reg_dmabuf_mr")?;
        let number = file.as_fd().as_raw_fd();
        let access = i32::try_from(access).unwrap_or(0);
        // SAFETY: per ibv_reg_mr(3): a live domain, and a file that holds its memory.
        let raw = unsafe { register(self.raw.as_ptr(), file.offset(), len, iova, number, access) };
        NonNull::new(raw)
            .ok_or_else(|| format!("ibv_reg_dmabuf_mr: {}", io::Error::last_os_error()))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: ours; all that was made from it held it.
        must("ibv_dealloc_pd", unsafe {
            (self.device.library.symbols.ibv_dealloc_pd)(self.raw.as_ptr())
        });
    }
}

/// Whether memory is not registered for what it is.
fn is_unable(error: &io::Error) -> bool {
    let unable = [libc::EFAULT, libc::EINVAL, libc::EOPNOTSUPP, libc::ENOSYS, libc::EPERM];
    error.raw_os_error().is_some_and(|errno| unable.contains(&errno))
}

/// Registered memory. When it is dropped, the device does not touch the memory any more.
#[derive(Debug)]
pub(super) struct Registration {
    raw: NonNull<sys::ibv_mr>,
    domain: Arc<Domain>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Registration {}

impl Registration {
    /// Names it in our own work requests.
    pub(super) const fn local_key(&self) -> u32 {
        // SAFETY: live, and its keys never change.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    /// Names it in peers'.
    pub(super) const fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.raw.as_ptr()).rkey }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody names its keys any more, or has a queue pair that fails by it.
        must("ibv_dereg_mr", unsafe {
            (self.domain.device.library.symbols.ibv_dereg_mr)(self.raw.as_ptr())
        });
    }
}

/// Where completion queues of a device signal.
#[derive(Debug)]
struct Channel {
    raw: NonNull<sys::ibv_comp_channel>,
    device: Arc<Device>,
}

impl Channel {
    fn open(device: &Arc<Device>) -> Result<Self, VerbsError> {
        let create = device.library.symbols.ibv_create_comp_channel;
        // SAFETY: an open device's.
        let raw = unsafe { create(device.context.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("ibv_create_comp_channel"))?;
        let channel = Self { raw, device: Arc::clone(device) };
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the channel is.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: ours; its queue was destroyed before.
        must("ibv_destroy_comp_channel", unsafe {
            (self.device.library.symbols.ibv_destroy_comp_channel)(self.raw.as_ptr())
        });
    }
}

/// Completions read in one call.
pub(super) const BATCH: usize = 16;

/// Completions that were read, and not looked at yet.
#[derive(Debug)]
pub(super) struct Completions {
    batch: Box<[sys::ibv_wc; BATCH]>,
    next: usize,
    end: usize,
}

impl Completions {
    pub(super) fn new() -> Self {
        // SAFETY: all zero is a value of the type.
        let batch = Box::new(unsafe { core::mem::zeroed() });
        Self { batch, next: 0, end: 0 }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.next == self.end
    }
}

impl Iterator for Completions {
    type Item = sys::ibv_wc;

    #[inline]
    fn next(&mut self) -> Option<sys::ibv_wc> {
        let done = *self.batch.get(self.next..self.end)?.first()?;
        self.next += 1;
        Some(done)
    }
}

/// A completion queue, with a channel of its own.
#[derive(Debug)]
pub(super) struct Completed {
    raw: NonNull<sys::ibv_cq>,
    /// The same, if it is read by the extended calls, all of which it has.
    extended: Option<NonNull<sys::ibv_cq_ex>>,
    channel: Channel,
}

// SAFETY: as for `Device`.
unsafe impl Send for Completed {}
// SAFETY: as for `Device`.
unsafe impl Sync for Completed {}

impl Completed {
    /// With room for so many completions.
    pub(super) fn open(device: &Arc<Device>, entries: u32) -> Result<Arc<Self>, VerbsError> {
        let made = if device.calls().polls { Self::extended } else { Self::classic };
        made(device, entries).map(Arc::new)
    }

    fn classic(device: &Arc<Device>, entries: u32) -> Result<Self, VerbsError> {
        let channel = Channel::open(device)?;
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        let create = device.library.symbols.ibv_create_cq;
        let context = device.context.as_ptr();
        // SAFETY: per ibv_create_cq(3): an open device's, and a channel of the same.
        let raw = unsafe { create(context, entries, ptr::null_mut(), channel.raw.as_ptr(), 0) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("ibv_create_cq"))?;
        Ok(Self { raw, extended: None, channel })
    }

    fn extended(device: &Arc<Device>, entries: u32) -> Result<Self, VerbsError> {
        let channel = Channel::open(device)?;
        let attr = sys::ibv_cq_init_attr_ex {
            cqe: entries,
            cq_context: ptr::null_mut(),
            channel: channel.raw.as_ptr(),
            comp_vector: 0,
            wc_flags: sys::IBV_WC_EX_WITH_BYTE_LEN
                | sys::IBV_WC_EX_WITH_IMM
                | sys::IBV_WC_EX_WITH_QP_NUM
                | sys::IBV_WC_EX_WITH_SLID,
            comp_mask: 0,
            flags: 0,
        };
        // SAFETY: per ibv_create_cq_ex(3): an open device's, and a channel of the same.
        let raw = unsafe { sys::ibv_create_cq_ex(device.context.as_ptr(), attr) };
        let raw = raw.map_err(|errno| refused("ibv_create_cq_ex", errno))?;
        // Dropped, if something is missing.
        let made = Self { raw: raw.cast(), extended: Some(raw), channel };
        // SAFETY: live.
        if unsafe { sys::has_polls(raw) } {
            Ok(made)
        } else {
            Err(refused("ibv_create_cq_ex", libc::EOPNOTSUPP))
        }
    }

    /// Makes it as long as this. Not every device can.
    pub(super) fn resize(&self, entries: u32) -> Result<(), VerbsError> {
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: per ibv_resize_cq(3): a live queue; nobody reads it meanwhile, as who may is our caller.
        let code = unsafe {
            (self.channel.device.library.symbols.ibv_resize_cq)(self.raw.as_ptr(), entries)
        };
        check("ibv_resize_cq", code)
    }

    /// Reads a batch, if nothing is left of the last. Whether the queue is well.
    #[inline]
    pub(super) fn read(&self, into: &mut Completions) -> bool {
        if !into.is_empty() {
            return true;
        }
        if let Some(queue) = self.extended {
            return Self::read_extended(queue, into);
        }
        let entries = c_int::try_from(BATCH).unwrap_or(0);
        let batch = into.batch.as_mut_ptr();
        // SAFETY: per ibv_poll_cq(3): a live queue, and room for so many.
        let count = unsafe { sys::ibv_poll_cq(self.raw.as_ptr(), entries, batch) };
        let Ok(count) = usize::try_from(count) else { return false };
        (into.next, into.end) = (0, count.min(BATCH));
        true
    }

    /// The same by the extended calls: of each completion what is used of it. Each is begun and ended by itself: to go on to the
    /// next without, Soft-RoCE and others want different ends where there is none.
    #[inline]
    fn read_extended(queue: NonNull<sys::ibv_cq_ex>, into: &mut Completions) -> bool {
        let queue = queue.as_ptr();
        (into.next, into.end) = (0, 0);
        for slot in into.batch.iter_mut() {
            // SAFETY: per ibv_create_cq_ex(3): a live queue that has all of these calls; what is begun is ended, and a
            // completion's parts are read in between, those that it has.
            unsafe {
                match sys::ibv_start_poll(queue) {
                    0 => {}
                    libc::ENOENT => return true,
                    // Those before it are told of first; it is not well the next time either.
                    _ => return into.end > 0,
                }
                (slot.wr_id, slot.status) = ((*queue).wr_id, (*queue).status);
                let good = slot.status == sys::IBV_WC_SUCCESS;
                slot.opcode = if good { sys::ibv_wc_read_opcode(queue) } else { 0 };
                let came = slot.opcode & sys::IBV_WC_RECV != 0;
                if came || !good {
                    slot.qp_num = sys::ibv_wc_read_qp_num(queue);
                }
                if slot.opcode == sys::IBV_WC_RECV {
                    slot.wc_flags = sys::ibv_wc_read_wc_flags(queue);
                }
                if came {
                    slot.byte_len = sys::ibv_wc_read_byte_len(queue);
                    slot.imm_data = sys::ibv_wc_read_imm_data(queue);
                    // Local identifiers have 16 bits.
                    slot.slid = sys::ibv_wc_read_slid(queue)
                        .to_le_bytes()
                        .first_chunk()
                        .copied()
                        .map_or(0, u16::from_le_bytes);
                }
                sys::ibv_end_poll(queue);
            }
            into.end += 1;
        }
        true
    }

    /// Asks for the descriptor to be signalled by the next completion.
    pub(super) fn arm(&self) -> bool {
        // SAFETY: a live queue with a channel.
        unsafe { sys::ibv_req_notify_cq(self.raw.as_ptr(), 0) == 0 }
    }

    /// Takes what the descriptor was signalled with.
    pub(super) fn disarm(&self) {
        let symbols = &self.channel.device.library.symbols;
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: per ibv_get_cq_event(3): the channel is live and does not block; what is got is acknowledged.
        unsafe {
            let channel = self.channel.raw.as_ptr();
            while (symbols.ibv_get_cq_event)(channel, &raw mut cq, &raw mut context) == 0 {
                (symbols.ibv_ack_cq_events)(cq, 1);
            }
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    /// A status in words.
    pub(super) fn status_text(&self, status: sys::ibv_wc_status) -> String {
        self.channel.device.library.status_text(status)
    }
}

impl Drop for Completed {
    fn drop(&mut self) {
        self.disarm();
        // SAFETY: ours; the queue pairs that use it held it, and its events are acknowledged.
        must("ibv_destroy_cq", unsafe {
            (self.channel.device.library.symbols.ibv_destroy_cq)(self.raw.as_ptr())
        });
    }
}

/// A receive queue that queue pairs share.
#[derive(Debug)]
pub(super) struct Shared {
    raw: NonNull<sys::ibv_srq>,
    domain: Arc<Domain>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Shared {}
// SAFETY: as for `Device`.
unsafe impl Sync for Shared {}

/// Receives that are posted in one call.
pub(super) const RECEIVES: usize = 32;

impl Shared {
    pub(super) fn open(domain: &Arc<Domain>, entries: u32) -> Result<Arc<Self>, VerbsError> {
        let attr = sys::ibv_srq_attr { max_wr: entries, max_sge: 1, srq_limit: 0 };
        let mut attr = sys::ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        let create = domain.device.library.symbols.ibv_create_srq;
        // SAFETY: per ibv_create_srq(3): a live domain, and a local.
        let raw = unsafe { create(domain.raw.as_ptr(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("ibv_create_srq"))?;
        Ok(Arc::new(Self { raw, domain: Arc::clone(domain) }))
    }

    /// Posts receives: a number, and where the bytes go. How many of them are posted now: the first so many.
    ///
    /// # Safety
    ///
    /// What each names stays, and nobody else uses it, until its completion was read or all queue pairs of this queue
    /// are gone.
    pub(super) unsafe fn post(&self, receives: &[(u64, sys::ibv_sge)]) -> usize {
        // SAFETY: all zero is a value of both types.
        let (mut sges, mut works): ([sys::ibv_sge; RECEIVES], [sys::ibv_recv_wr; RECEIVES]) =
            unsafe { core::mem::zeroed() };
        let count = receives.len().min(RECEIVES);
        let mut next = ptr::null_mut();
        let slots = works.iter_mut().zip(&mut sges).zip(receives).take(count);
        for ((work, sge), (number, place)) in slots.rev() {
            *sge = *place;
            *work = sys::ibv_recv_wr { wr_id: *number, next, sg_list: sge, num_sge: 1 };
            next = work;
        }
        if next.is_null() {
            return 0;
        }
        let mut bad = ptr::null_mut();
        // SAFETY: per ibv_post_srq_recv(3): a live queue, a list that ends in null, all of it read before this returns;
        // the places are as the caller promises.
        let code = unsafe { sys::ibv_post_srq_recv(self.raw.as_ptr(), next, &raw mut bad) };
        if code == 0 {
            return count;
        }
        works.iter().take(count).position(|work| ptr::eq(work, bad)).unwrap_or(0)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: ours; the queue pairs that use it held it.
        must("ibv_destroy_srq", unsafe {
            (self.domain.device.library.symbols.ibv_destroy_srq)(self.raw.as_ptr())
        });
    }
}

/// What a queue pair is to have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Depths {
    pub(super) sends: u32,
    /// Of its own; none if it shares a queue.
    pub(super) receives: u32,
    /// Bytes that a send may carry itself.
    pub(super) inline: u32,
}

impl Depths {
    fn cap(self) -> sys::ibv_qp_cap {
        sys::ibv_qp_cap {
            max_send_wr: self.sends,
            max_recv_wr: self.receives,
            max_send_sge: 1,
            max_recv_sge: u32::from(self.receives > 0),
            max_inline_data: self.inline,
        }
    }
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct QueuePair {
    raw: NonNull<sys::ibv_qp>,
    /// The same, if writes are posted there by the extended calls, all of which it has.
    extended: Option<NonNull<sys::ibv_qp_ex>>,
    /// The number of its first packet.
    psn: Number24,
    domain: Arc<Domain>,
    _completed: Arc<Completed>,
    _shared: Option<Arc<Shared>>,
}

// SAFETY: as for `Device`.
unsafe impl Send for QueuePair {}

/// What all work of a chain's has in common, and room for it.
#[derive(Debug)]
pub(super) struct Chain {
    works: Box<[sys::ibv_send_wr; CHAIN]>,
    sges: Box<[sys::ibv_sge; CHAIN]>,
    len: usize,
}

// SAFETY: the pointers in it are set when it is posted, to its own elements.
unsafe impl Send for Chain {}

/// Work that is posted in one call, at most.
pub(super) const CHAIN: usize = 32;

/// A one-sided write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Write {
    pub(super) number: u64,
    pub(super) from: u64,
    pub(super) len: u32,
    pub(super) local_key: u32,
    pub(super) to: u64,
    pub(super) remote_key: u32,
    pub(super) imm: Option<u32>,
    /// The bytes are read before the post returns.
    pub(super) inline: bool,
}

impl Chain {
    pub(super) fn new() -> Self {
        // SAFETY: all zero is a value of both types.
        let (works, sges) = unsafe { (core::mem::zeroed(), core::mem::zeroed()) };
        Self { works: Box::new(works), sges: Box::new(sges), len: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) const fn is_full(&self) -> bool {
        self.len == CHAIN
    }

    /// Puts a write behind the others. Without effect if the chain is full.
    #[inline]
    pub(super) fn push(&mut self, write: &Write, signalled: bool) {
        let (Some(work), Some(sge)) = (self.works.get_mut(self.len), self.sges.get_mut(self.len))
        else {
            return;
        };
        *sge = sys::ibv_sge { addr: write.from, length: write.len, lkey: write.local_key };
        work.wr_id = write.number;
        work.num_sge = c_int::from(write.len > 0);
        (work.opcode, work.imm_data) = match write.imm {
            Some(imm) => (sys::IBV_WR_RDMA_WRITE_WITH_IMM, imm.to_be()),
            None => (sys::IBV_WR_RDMA_WRITE, 0),
        };
        work.send_flags = if signalled { sys::IBV_SEND_SIGNALED } else { 0 };
        if write.inline {
            work.send_flags |= sys::IBV_SEND_INLINE;
        }
        let rdma = sys::ibv_send_wr_rdma { remote_addr: write.to, rkey: write.remote_key };
        work.wr = sys::ibv_send_wr_wr { rdma };
        self.len += 1;
    }

    /// Has the last one's completion signalled.
    #[inline]
    pub(super) fn signal_last(&mut self) {
        if let Some(work) = self.len.checked_sub(1).and_then(|last| self.works.get_mut(last)) {
            work.send_flags |= sys::IBV_SEND_SIGNALED;
        }
    }

    /// Empties it, unposted.
    pub(super) const fn clear(&mut self) {
        self.len = 0;
    }
}

impl QueuePair {
    fn open(
        domain: &Arc<Domain>,
        completed: &Arc<Completed>,
        shared: Option<&Arc<Shared>>,
        kind: sys::ibv_qp_type,
        depths: Depths,
    ) -> Result<Self, VerbsError> {
        let mut attr = sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: completed.raw.as_ptr(),
            recv_cq: completed.raw.as_ptr(),
            srq: shared.map_or(ptr::null_mut(), |shared| shared.raw.as_ptr()),
            cap: depths.cap(),
            qp_type: kind,
            sq_sig_all: 0,
        };
        let create = domain.device.library.symbols.ibv_create_qp;
        // SAFETY: per ibv_create_qp(3): live objects of one device, which the queue pair holds.
        let raw = unsafe { create(domain.raw.as_ptr(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("ibv_create_qp"))?;
        Self::holding(raw, domain, completed, shared)
    }

    /// A reliable one, where writes are posted by the extended calls.
    fn extended(
        domain: &Arc<Domain>,
        completed: &Arc<Completed>,
        shared: Option<&Arc<Shared>>,
        depths: Depths,
    ) -> Result<Self, VerbsError> {
        // SAFETY: all zero is a value of the type.
        let mut attr: sys::ibv_qp_init_attr_ex = unsafe { core::mem::zeroed() };
        (attr.send_cq, attr.recv_cq) = (completed.raw.as_ptr(), completed.raw.as_ptr());
        attr.srq = shared.map_or(ptr::null_mut(), |shared| shared.raw.as_ptr());
        (attr.cap, attr.qp_type) = (depths.cap(), sys::IBV_QPT_RC);
        attr.pd = domain.raw.as_ptr();
        let writes = sys::IBV_QP_EX_WITH_RDMA_WRITE | sys::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
        let device = &domain.device;
        // SAFETY: per ibv_create_qp_ex(3): live objects of one device, which the queue pair holds.
        let raw = unsafe { sys::ibv_create_qp_ex(device.context.as_ptr(), attr, writes) };
        let raw = raw.map_err(|errno| refused("ibv_create_qp_ex", errno))?;
        let mut made = Self::holding(raw, domain, completed, shared)?;
        // SAFETY: live, and made with operations for sends, so that there may be more of it.
        made.extended = unsafe {
            let whole = NonNull::new((device.library.symbols.ibv_qp_to_qp_ex)(raw.as_ptr()));
            whole.filter(|whole| sys::has_writes(*whole))
        };
        match made.extended {
            Some(_) => Ok(made),
            None => Err(refused("ibv_qp_to_qp_ex", libc::EOPNOTSUPP)),
        }
    }

    fn holding(
        raw: NonNull<sys::ibv_qp>,
        domain: &Arc<Domain>,
        completed: &Arc<Completed>,
        shared: Option<&Arc<Shared>>,
    ) -> Result<Self, VerbsError> {
        let mut made = Self {
            raw,
            extended: None,
            psn: Number24::default(),
            domain: Arc::clone(domain),
            _completed: Arc::clone(completed),
            _shared: shared.cloned(),
        };
        let psn = super::random().map(u32::from_ne_bytes).map_err(VerbsError::Random)?;
        made.psn = Number24::new(psn);
        Ok(made)
    }

    /// One that is to be connected; it may be written through to all that is registered with its domain.
    pub(super) fn reliable(
        domain: &Arc<Domain>,
        completed: &Arc<Completed>,
        shared: &Arc<Shared>,
        depths: Depths,
    ) -> Result<Self, VerbsError> {
        Self::open(domain, completed, Some(shared), sys::IBV_QPT_RC, depths)?.initialised()
    }

    /// The same, for writes of ours.
    pub(super) fn for_writes(
        domain: &Arc<Domain>,
        completed: &Arc<Completed>,
        shared: &Arc<Shared>,
        depths: Depths,
    ) -> Result<Self, VerbsError> {
        if !domain.device.calls().posts {
            return Self::reliable(domain, completed, shared, depths);
        }
        Self::extended(domain, completed, Some(shared), depths)?.initialised()
    }

    fn initialised(self) -> Result<Self, VerbsError> {
        let mut attr = Self::attr(sys::IBV_QPS_INIT);
        attr.port_num = self.domain.device.port;
        attr.qp_access_flags = sys::IBV_ACCESS_REMOTE_WRITE;
        let mask = sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS;
        self.modify("ibv_modify_qp(INIT)", attr, mask)?;
        Ok(self)
    }

    /// One that takes datagrams from everybody who knows `key`, and sends some.
    pub(super) fn datagrams(
        domain: &Arc<Domain>,
        completed: &Arc<Completed>,
        depths: Depths,
        key: u32,
    ) -> Result<Self, VerbsError> {
        let pair = Self::open(domain, completed, None, sys::IBV_QPT_UD, depths)?;
        pair.start(key)?;
        Ok(pair)
    }

    /// Has one for datagrams send and receive, which is new, or was reset.
    pub(super) fn start(&self, key: u32) -> Result<(), VerbsError> {
        let mut attr = Self::attr(sys::IBV_QPS_INIT);
        attr.port_num = self.domain.device.port;
        attr.qkey = key;
        let mask = sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_QKEY;
        self.modify("ibv_modify_qp(INIT)", attr, mask)?;
        self.modify("ibv_modify_qp(RTR)", Self::attr(sys::IBV_QPS_RTR), 0)?;
        let mut attr = Self::attr(sys::IBV_QPS_RTS);
        attr.sq_psn = self.psn.get();
        self.modify("ibv_modify_qp(RTS)", attr, sys::IBV_QP_SQ_PSN)
    }

    /// Takes from one for datagrams all that is posted: it sends and receives nothing until it is started again. No completion of what was
    /// posted comes after those that are there.
    pub(super) fn reset(&self) -> Result<(), VerbsError> {
        self.modify("ibv_modify_qp(RESET)", Self::attr(sys::IBV_QPS_RESET), 0)
    }

    const fn attr(state: sys::ibv_qp_state) -> sys::ibv_qp_attr {
        // SAFETY: all zero is a value of the type.
        let mut attr: sys::ibv_qp_attr = unsafe { core::mem::zeroed() };
        attr.qp_state = state;
        attr
    }

    fn modify(
        &self,
        call: &'static str,
        mut attr: sys::ibv_qp_attr,
        mask: c_int,
    ) -> Result<(), VerbsError> {
        let modify = self.domain.device.library.symbols.ibv_modify_qp;
        // SAFETY: per ibv_modify_qp(3): ours, and a local of which what the mask names is set.
        check(call, unsafe { modify(self.raw.as_ptr(), &raw mut attr, sys::IBV_QP_STATE | mask) })
    }

    /// What a peer has to know of it.
    pub(super) const fn queue(&self) -> Queue {
        Queue { number: Number24::new(self.number()), psn: self.psn }
    }

    /// As completions have it.
    pub(super) const fn number(&self) -> u32 {
        // SAFETY: live, and its number never changes.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    /// Connects it to `theirs`: from now on it receives, and sends. On RoCE the kernel looks the address up, unless it was
    /// asked for it a moment ago: up to a second if nobody answers.
    pub(super) fn connect(
        &self,
        route: &Route,
        theirs: Queue,
        options: &VerbsOptions,
    ) -> Result<(), VerbsError> {
        let mut attr = Self::attr(sys::IBV_QPS_RTR);
        attr.ah_attr = address(&self.domain.device, route, options)?;
        attr.path_mtu = sys::ibv_mtu::from(route.mtu.code());
        attr.dest_qp_num = theirs.number.get();
        attr.rq_psn = theirs.psn.get();
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = RNR_TIMER;
        let mask = sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC
            | sys::IBV_QP_MIN_RNR_TIMER;
        self.modify("ibv_modify_qp(RTR)", attr, mask)?;
        let mut attr = Self::attr(sys::IBV_QPS_RTS);
        attr.sq_psn = self.psn.get();
        attr.timeout = options.ack_timeout;
        attr.retry_cnt = options.retry_count;
        attr.rnr_retry = RNR_RETRY;
        attr.max_rd_atomic = 1;
        let mask = sys::IBV_QP_SQ_PSN
            | sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("ibv_modify_qp(RTS)", attr, mask)
    }

    /// Cuts it: nothing more is sent or received, and what is posted completes as flushed.
    pub(super) fn cut(&self) -> Result<(), VerbsError> {
        self.modify("ibv_modify_qp(ERR)", Self::attr(sys::IBV_QPS_ERR), 0)
    }

    /// Posts the chain, and empties it; returns how many of it were taken: the first so many.
    ///
    /// # Safety
    ///
    /// The sources are registered with its domain, and stay so, unchanged, until the completion of their write, or of
    /// a later one, was read, or the queue pair is gone.
    #[inline]
    pub(super) unsafe fn post(&self, chain: &mut Chain) -> Result<(), (usize, io::Error)> {
        let count = core::mem::take(&mut chain.len);
        if let Some(queue) = self.extended {
            let works = chain.works.iter().zip(chain.sges.iter()).take(count);
            // SAFETY: the caller's promise.
            return unsafe { Self::post_extended(queue, works) };
        }
        let mut next = ptr::null_mut();
        for (work, sge) in chain.works.iter_mut().zip(chain.sges.iter_mut()).take(count).rev() {
            work.next = next;
            work.sg_list = sge;
            next = work;
        }
        if next.is_null() {
            return Ok(());
        }
        let mut bad = ptr::null_mut();
        // SAFETY: per ibv_post_send(3): ours; a list that ends in null, all of it read before this returns; the
        // sources are as the caller promises.
        let code = unsafe { sys::ibv_post_send(self.raw.as_ptr(), next, &raw mut bad) };
        if code == 0 {
            return Ok(());
        }
        let taken = chain.works.iter().take(count).position(|work| ptr::eq(work, bad)).unwrap_or(0);
        Err((taken, io::Error::from_raw_os_error(code.abs())))
    }

    /// The same by the extended calls: all are taken, or none.
    ///
    /// # Safety
    ///
    /// As for [`QueuePair::post`].
    #[inline]
    unsafe fn post_extended<'a>(
        queue: NonNull<sys::ibv_qp_ex>,
        works: impl Iterator<Item = (&'a sys::ibv_send_wr, &'a sys::ibv_sge)>,
    ) -> Result<(), (usize, io::Error)> {
        let queue = queue.as_ptr();
        // SAFETY: per ibv_wr_post(3): a live queue pair that has all of these calls; each write has one setter, and what was begun
        // is completed. Of `wr`, what is read is what `Chain::push` has set. Inline bytes are read here, where the caller has
        // them mapped, and the others stay by its promise.
        unsafe {
            sys::ibv_wr_start(queue);
            for (work, sge) in works {
                let sys::ibv_send_wr_rdma { remote_addr, rkey } = work.wr.rdma;
                let head = (work.wr_id, work.send_flags);
                if work.opcode == sys::IBV_WR_RDMA_WRITE_WITH_IMM {
                    sys::ibv_wr_rdma_write_imm(queue, head, rkey, remote_addr, work.imm_data);
                } else {
                    sys::ibv_wr_rdma_write(queue, head, rkey, remote_addr);
                }
                if work.num_sge == 0 {
                    sys::ibv_wr_set_nothing(queue);
                } else if work.send_flags & sys::IBV_SEND_INLINE != 0 {
                    let bytes =
                        ptr::with_exposed_provenance_mut(usize::try_from(sge.addr).unwrap_or(0));
                    sys::ibv_wr_set_inline_data(
                        queue,
                        bytes,
                        usize::try_from(sge.length).unwrap_or(0),
                    );
                } else {
                    sys::ibv_wr_set_sge(queue, sge);
                }
            }
            match sys::ibv_wr_complete(queue) {
                0 => Ok(()),
                code => Err((0, io::Error::from_raw_os_error(code.abs()))),
            }
        }
    }

    /// Sends bytes that travel inside the request; its completion is signalled.
    pub(super) fn send_inline(&self, number: u64, bytes: &[u8]) -> io::Result<()> {
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let mut sge = sys::ibv_sge { addr: bytes.as_ptr() as u64, length, lkey: 0 };
        // SAFETY: all zero is a value of the type.
        let mut work: sys::ibv_send_wr = unsafe { core::mem::zeroed() };
        work.wr_id = number;
        (work.sg_list, work.num_sge) = (&raw mut sge, 1);
        work.opcode = sys::IBV_WR_SEND;
        work.send_flags = sys::IBV_SEND_SIGNALED | sys::IBV_SEND_INLINE;
        // SAFETY: per ibv_post_send(3): ours, one request, whose bytes are read before this returns.
        unsafe { self.send(&mut work) }
    }

    /// Writes nothing, to see whether the other end answers; its completion is signalled.
    pub(super) fn probe(&self, number: u64, to: u64, remote_key: u32) -> io::Result<()> {
        // SAFETY: all zero is a value of the type.
        let mut work: sys::ibv_send_wr = unsafe { core::mem::zeroed() };
        work.wr_id = number;
        work.opcode = sys::IBV_WR_RDMA_WRITE;
        work.send_flags = sys::IBV_SEND_SIGNALED;
        let rdma = sys::ibv_send_wr_rdma { remote_addr: to, rkey: remote_key };
        work.wr = sys::ibv_send_wr_wr { rdma };
        // SAFETY: per ibv_post_send(3): ours, one request, without a source.
        unsafe { self.send(&mut work) }
    }

    /// Sends a datagram.
    ///
    /// # Safety
    ///
    /// The source is registered, and stays so, unchanged, until the completion.
    pub(super) unsafe fn send_to(
        &self,
        to: &AddressHandle,
        number: Number24,
        key: u32,
        id: u64,
        mut from: sys::ibv_sge,
    ) -> io::Result<()> {
        // SAFETY: all zero is a value of the type.
        let mut work: sys::ibv_send_wr = unsafe { core::mem::zeroed() };
        work.wr_id = id;
        (work.sg_list, work.num_sge) = (&raw mut from, 1);
        work.opcode = sys::IBV_WR_SEND;
        work.send_flags = sys::IBV_SEND_SIGNALED;
        let (ah, remote_qpn) = (to.raw.as_ptr(), number.get());
        let ud = sys::ibv_send_wr_ud { ah, remote_qpn, remote_qkey: key };
        work.wr = sys::ibv_send_wr_wr { ud };
        // SAFETY: per ibv_post_send(3): ours, one request; the source is as the caller promises.
        unsafe { self.send(&mut work) }
    }

    /// # Safety
    ///
    /// As ibv_post_send(3) asks for.
    unsafe fn send(&self, work: &mut sys::ibv_send_wr) -> io::Result<()> {
        let mut bad = ptr::null_mut();
        // SAFETY: by the caller's promise.
        match unsafe { sys::ibv_post_send(self.raw.as_ptr(), work, &raw mut bad) } {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code.abs())),
        }
    }

    /// Posts a receive, to a queue pair that shares none.
    ///
    /// # Safety
    ///
    /// What `into` names stays, and nobody else uses it, until the completion was read or the queue pair is gone.
    pub(super) unsafe fn receive(&self, id: u64, mut into: sys::ibv_sge) -> bool {
        let (sg_list, next) = (&raw mut into, ptr::null_mut());
        let mut work = sys::ibv_recv_wr { wr_id: id, next, sg_list, num_sge: 1 };
        let mut bad = ptr::null_mut();
        // SAFETY: per ibv_post_recv(3): ours, one request, whose place is as the caller promises.
        unsafe { sys::ibv_post_recv(self.raw.as_ptr(), &raw mut work, &raw mut bad) == 0 }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: ours. Afterwards the device neither reads nor writes on its behalf.
        must("ibv_destroy_qp", unsafe {
            (self.domain.device.library.symbols.ibv_destroy_qp)(self.raw.as_ptr())
        });
    }
}

fn address(
    device: &Device,
    route: &Route,
    options: &VerbsOptions,
) -> Result<sys::ibv_ah_attr, VerbsError> {
    // Without a global route no entry is used.
    let sgid_index = if route.dgid.is_some() { device.gid_index()? } else { 0 };
    Ok(sys::ibv_ah_attr {
        grh: sys::ibv_global_route {
            dgid: sys::ibv_gid { raw: route.dgid.unwrap_or(Gid::NONE).0 },
            flow_label: 0,
            sgid_index,
            hop_limit: HOP_LIMIT,
            traffic_class: options.traffic_class,
        },
        dlid: route.dlid,
        sl: options.service_level,
        src_path_bits: 0,
        static_rate: 0,
        is_global: u8::from(route.dgid.is_some()),
        port_num: device.port,
    })
}

/// Where a datagram goes.
#[derive(Debug)]
pub(super) struct AddressHandle {
    raw: NonNull<sys::ibv_ah>,
    domain: Arc<Domain>,
}

// SAFETY: as for `Device`.
unsafe impl Send for AddressHandle {}
// SAFETY: as for `Device`; it is never changed.
unsafe impl Sync for AddressHandle {}

impl AddressHandle {
    /// On RoCE the kernel looks the address up, which takes it up to a second if nobody answers.
    pub(super) fn new(
        domain: &Arc<Domain>,
        route: &Route,
        options: &VerbsOptions,
    ) -> Result<Self, VerbsError> {
        let mut attr = address(&domain.device, route, options)?;
        let create = domain.device.library.symbols.ibv_create_ah;
        // SAFETY: per ibv_create_ah(3): a live domain, and a local.
        let raw = unsafe { create(domain.raw.as_ptr(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| failed("ibv_create_ah"))?;
        Ok(Self { raw, domain: Arc::clone(domain) })
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        // SAFETY: ours; the sends that used it have completed, or their queue pair is gone.
        must("ibv_destroy_ah", unsafe {
            (self.domain.device.library.symbols.ibv_destroy_ah)(self.raw.as_ptr())
        });
    }
}

#[cfg(test)]
mod tests;
