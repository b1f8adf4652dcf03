//! `fi_getinfo` and the `fi_info` structures that it makes: what the modelled node offers, and to whom.
//!
//! Matching is as strict as the provider's: an `fi_info` is offered only to a caller that can do what it requires
//! (modes), asks for nothing it has not, and names it or nothing. Memory is the C library's, since callers put strings
//! of their own into their hints, and `fi_freeinfo` frees both.

use core::ffi::{CStr, c_char, c_int, c_void};

use libfabric_sys as sys;

use crate::config::Config;
use crate::log::{Rule, violation};
use crate::packet::{ADDRESS_BYTES, Address};

/// The longest message: the device's MTU.
pub(crate) const MAX_MESSAGE: usize = 8192;
/// The registration modes that `efa-direct` requires.
pub(crate) const MR_MODE: c_int =
    sys::FI_MR_LOCAL | sys::FI_MR_VIRT_ADDR | sys::FI_MR_ALLOCATED | sys::FI_MR_PROV_KEY;
/// The names of the fabrics.
pub(crate) const DIRECT: &CStr = c"efa-direct";
/// See [`DIRECT`].
pub(crate) const PLAIN: &CStr = c"efa";

const PRIMARY: u64 = sys::FI_MSG
    | sys::FI_RMA
    | sys::FI_SEND
    | sys::FI_RECV
    | sys::FI_READ
    | sys::FI_WRITE
    | sys::FI_REMOTE_READ
    | sys::FI_REMOTE_WRITE;
const COMM: u64 = sys::FI_LOCAL_COMM | sys::FI_REMOTE_COMM;
const OFFERED: u64 = PRIMARY | COMM | sys::FI_SOURCE;
const RMA: u64 =
    sys::FI_RMA | sys::FI_READ | sys::FI_WRITE | sys::FI_REMOTE_READ | sys::FI_REMOTE_WRITE;
/// Hints that name no protocol.
const PROTO_UNSPEC: u32 = 0;
/// Native writes are for callers that know of them.
const NATIVE_SINCE: u32 = sys::FI_VERSION(1, 18);
/// Of this library.
pub(crate) const VERSION: u32 = sys::FI_VERSION(2, 4);

/// Returns zeroed memory for a `T`, which is a structure of C that may be all zero.
fn zeroed<T>() -> *mut T {
    // SAFETY: no requirement.
    let memory = unsafe { libc::calloc(1, size_of::<T>()) };
    if memory.is_null() {
        // There is no more to say, and no test goes on without it.
        std::process::abort();
    }
    memory.cast()
}

/// Returns a copy of `bytes` in the C library's memory, and a zero behind them.
fn copied(bytes: &[u8]) -> *mut c_char {
    // SAFETY: no requirement.
    let memory = unsafe { libc::calloc(1, bytes.len() + 1) };
    if memory.is_null() {
        std::process::abort();
    }
    // SAFETY: there are so many bytes, and nobody else knows them.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.cast(), bytes.len()) };
    memory.cast()
}

/// # Safety
///
/// `text` is null or a C string.
unsafe fn copied_text(text: *const c_char) -> *mut c_char {
    if text.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's promise.
    copied(unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// # Safety
///
/// `from` is null or valid to read.
unsafe fn copied_struct<T: Copy>(from: *const T) -> *mut T {
    if from.is_null() {
        return std::ptr::null_mut();
    }
    let to = zeroed::<T>();
    // SAFETY: both are valid, `to` is new.
    unsafe { to.write(from.read()) };
    to
}

/// Returns an empty `fi_info`, with all its attributes.
pub(crate) fn empty() -> *mut sys::fi_info {
    let info = zeroed::<sys::fi_info>();
    // SAFETY: it is new, and zero is a value of it.
    let fields = unsafe { &mut *info };
    fields.tx_attr = zeroed();
    fields.rx_attr = zeroed();
    fields.ep_attr = zeroed();
    fields.domain_attr = zeroed();
    fields.fabric_attr = zeroed();
    info
}

/// Returns a copy of one `fi_info`, and of all it points to but objects.
///
/// # Safety
///
/// `from` is an `fi_info` as `fi_getinfo` and `fi_dupinfo` make them, changed as callers may.
pub(crate) unsafe fn dup(from: *const sys::fi_info) -> *mut sys::fi_info {
    // SAFETY: the caller's promise, for each pointer that is followed; what is written to is new.
    unsafe {
        let info = copied_struct(from);
        let (to, from) = (&mut *info, &*from);
        to.next = std::ptr::null_mut();
        to.tx_attr = copied_struct(from.tx_attr);
        to.rx_attr = copied_struct(from.rx_attr);
        to.ep_attr = copied_struct(from.ep_attr);
        to.domain_attr = copied_struct(from.domain_attr);
        to.fabric_attr = copied_struct(from.fabric_attr);
        for (to, from, len) in [
            (&mut to.src_addr, from.src_addr, from.src_addrlen),
            (&mut to.dest_addr, from.dest_addr, from.dest_addrlen),
        ] {
            if !from.is_null() {
                *to = copied(std::slice::from_raw_parts(from.cast(), len)).cast();
            }
        }
        if let Some(domain) = to.domain_attr.as_mut() {
            domain.name = copied_text(domain.name);
        }
        if let Some(fabric) = to.fabric_attr.as_mut() {
            (fabric.name, fabric.prov_name) =
                (copied_text(fabric.name), copied_text(fabric.prov_name));
        }
        to.nic = dup_nic(from.nic);
        info
    }
}

/// # Safety
///
/// As for [`dup`].
unsafe fn dup_nic(from: *const sys::fid_nic) -> *mut sys::fid_nic {
    // SAFETY: as in `dup`.
    unsafe {
        let nic = copied_struct(from);
        let Some(fields) = nic.as_mut() else { return nic };
        fields.device_attr = copied_struct(fields.device_attr);
        fields.bus_attr = copied_struct(fields.bus_attr);
        fields.link_attr = copied_struct(fields.link_attr);
        if let Some(device) = fields.device_attr.as_mut() {
            for text in device_texts(device) {
                *text = copied_text(*text);
            }
        }
        if let Some(link) = fields.link_attr.as_mut() {
            (link.address, link.network_type) =
                (copied_text(link.address), copied_text(link.network_type));
        }
        nic
    }
}

fn device_texts(device: &mut sys::fi_device_attr) -> [&mut *mut c_char; 6] {
    [
        &mut device.name,
        &mut device.device_id,
        &mut device.device_version,
        &mut device.vendor_id,
        &mut device.driver,
        &mut device.firmware,
    ]
}

/// Frees a list of `fi_info`.
///
/// # Safety
///
/// As for [`dup`]; each of the list is the caller's, and is not used afterwards.
pub(crate) unsafe fn free(mut info: *mut sys::fi_info) {
    // SAFETY: the caller's promise: everything below is the C library's memory or null, and nobody else's.
    unsafe {
        while let Some(fields) = info.as_mut() {
            let next = fields.next;
            if let Some(domain) = fields.domain_attr.as_mut() {
                libc::free(domain.name.cast());
            }
            if let Some(fabric) = fields.fabric_attr.as_mut() {
                libc::free(fabric.name.cast());
                libc::free(fabric.prov_name.cast());
            }
            if let Some(nic) = fields.nic.as_mut() {
                if let Some(device) = nic.device_attr.as_mut() {
                    device_texts(device).into_iter().for_each(|text| libc::free((*text).cast()));
                }
                if let Some(link) = nic.link_attr.as_mut() {
                    libc::free(link.address.cast());
                    libc::free(link.network_type.cast());
                }
                libc::free(nic.device_attr.cast());
                libc::free(nic.bus_attr.cast());
                libc::free(nic.link_attr.cast());
                libc::free(fields.nic.cast());
            }
            for part in [
                fields.src_addr,
                fields.dest_addr,
                fields.tx_attr.cast(),
                fields.rx_attr.cast(),
                fields.ep_attr.cast(),
                fields.domain_attr.cast(),
                fields.fabric_attr.cast(),
                info.cast::<c_void>(),
            ] {
                libc::free(part);
            }
            info = next;
        }
    }
}

/// Returns the name of a device: each is the only one of its bus.
pub(crate) fn device_name(nic: u8) -> String {
    format!("rdmap{nic}s0")
}

/// Returns the name of a device's domain.
pub(crate) fn domain_name(nic: u8) -> String {
    format!("{}-rdm", device_name(nic))
}

fn nic_info(nic: u8) -> *mut sys::fid_nic {
    let fid = zeroed::<sys::fid_nic>();
    // SAFETY: it is new, and so is all that is put into it.
    unsafe {
        let fields = &mut *fid;
        fields.fid.fclass = sys::FI_CLASS_NIC;
        let device = zeroed::<sys::fi_device_attr>();
        (*device).name = copied(device_name(nic).as_bytes());
        (*device).device_id = copied(b"0xefa2");
        (*device).device_version = copied(b"0xefa2");
        (*device).vendor_id = copied(b"0x1d0f");
        (*device).driver = copied(b"fake-efa");
        (*device).firmware = copied(b"0.0.0.0");
        fields.device_attr = device;
        let bus = zeroed::<sys::fi_bus_attr>();
        (*bus).bus_type = sys::FI_BUS_PCI;
        (*bus).attr = sys::fi_pci_attr { domain_id: 0, bus_id: nic, device_id: 0, function_id: 0 };
        fields.bus_attr = bus;
        let link = zeroed::<sys::fi_link_attr>();
        let gid = std::net::Ipv6Addr::from(Address::gid(nic));
        (*link).address = copied(format!("EFA-{gid}").as_bytes());
        (*link).mtu = MAX_MESSAGE;
        (*link).speed = 100_000_000_000;
        (*link).state = sys::FI_LINK_UP;
        (*link).network_type = copied(b"Ethernet");
        fields.link_attr = link;
    }
    fid
}

/// What one device offers in one fabric, before it is fitted to the hints.
fn offer(config: &Config, version: u32, direct: bool, nic: u8) -> *mut sys::fi_info {
    let info = empty();
    // SAFETY: it is new, with all its attributes.
    let (fields, tx, rx, ep, domain, fabric) = unsafe {
        let fields = &mut *info;
        let (tx, rx, ep) = (&mut *fields.tx_attr, &mut *fields.rx_attr, &mut *fields.ep_attr);
        (fields, tx, rx, ep, &mut *(*info).domain_attr, &mut *(*info).fabric_attr)
    };
    fields.caps = if direct && version < NATIVE_SINCE { OFFERED & !RMA } else { OFFERED };
    fields.mode = if direct { sys::FI_CONTEXT2 } else { 0 };
    fields.addr_format = sys::FI_ADDR_EFA;
    fields.src_addrlen = ADDRESS_BYTES;
    fields.src_addr =
        copied(&Address { gid: Address::gid(nic), qpn: 0, qkey: 0 }.to_bytes()).cast();
    fields.nic = nic_info(nic);

    tx.caps = OFFERED
        & !(sys::FI_RECV | sys::FI_REMOTE_READ | sys::FI_REMOTE_WRITE | sys::FI_SOURCE | COMM);
    tx.mode = fields.mode;
    tx.op_flags = sys::FI_COMPLETION | sys::FI_TRANSMIT_COMPLETE;
    tx.inject_size = if direct { 32 } else { 4096 };
    (tx.size, tx.iov_limit, tx.rma_iov_limit) = (config.tx_size, 1, 1);
    rx.caps = OFFERED & !(sys::FI_SEND | sys::FI_READ | sys::FI_WRITE | COMM);
    rx.mode = fields.mode;
    rx.op_flags = sys::FI_COMPLETION;
    (rx.size, rx.iov_limit) = (config.rx_size, 1);

    (ep.type_, ep.protocol, ep.protocol_version) = (sys::FI_EP_RDM, sys::FI_PROTO_EFA, 1);
    ep.max_msg_size = if direct { config.max_rma.max(MAX_MESSAGE) } else { usize::MAX };
    (ep.tx_ctx_cnt, ep.rx_ctx_cnt) = (1, 1);

    domain.name = copied(domain_name(nic).as_bytes());
    domain.threading = if direct { sys::FI_THREAD_DOMAIN } else { sys::FI_THREAD_SAFE };
    domain.control_progress = if direct { sys::FI_PROGRESS_AUTO } else { sys::FI_PROGRESS_MANUAL };
    domain.data_progress = domain.control_progress;
    domain.resource_mgmt = sys::FI_RM_ENABLED;
    domain.av_type = sys::FI_AV_TABLE;
    domain.mr_mode = if direct { MR_MODE } else { MR_MODE & !sys::FI_MR_LOCAL };
    (domain.mr_key_size, domain.cq_data_size, domain.mr_iov_limit) = (4, 4, 1);
    (domain.cq_cnt, domain.ep_cnt, domain.mr_cnt) = (512, 256, 1 << 16);
    (domain.tx_ctx_cnt, domain.rx_ctx_cnt, domain.max_ep_tx_ctx, domain.max_ep_rx_ctx) =
        (256, 256, 1, 1);
    domain.caps = COMM;

    fabric.name = copied(if direct { DIRECT } else { PLAIN }.to_bytes());
    fabric.prov_name = copied(b"efa");
    (fabric.prov_version, fabric.api_version) = (VERSION, version);
    info
}

/// # Safety
///
/// `text` is null or a C string.
unsafe fn names(text: *const c_char, name: &[u8]) -> bool {
    // SAFETY: the caller's promise.
    text.is_null() || unsafe { CStr::from_ptr(text) }.to_bytes() == name
}

/// Fits what is offered to the hints, or says that it does not fit.
///
/// # Safety
///
/// `hints` is as for [`dup`].
unsafe fn fit(
    config: &Config,
    info: &mut sys::fi_info,
    hints: &sys::fi_info,
    direct: bool,
    nic: u8,
) -> bool {
    // SAFETY: `info` is from `offer`; the rest is the caller's promise.
    unsafe {
        let (offered_tx, offered_rx) = (&mut *info.tx_attr, &mut *info.rx_attr);
        let (offered_ep, offered_domain) = (&mut *info.ep_attr, &mut *info.domain_attr);
        if let Some(fabric) = hints.fabric_attr.as_ref() {
            let name = if direct { DIRECT } else { PLAIN };
            if !names(fabric.name, name.to_bytes()) || !names(fabric.prov_name, b"efa") {
                return false;
            }
        }
        // Device memory is offered to those who ask for it.
        if hints.caps & sys::FI_HMEM != 0 && config.hmem {
            for caps in [&mut info.caps, &mut offered_tx.caps, &mut offered_rx.caps] {
                *caps |= sys::FI_HMEM;
            }
            offered_domain.mr_mode |= sys::FI_MR_HMEM;
        }
        // What it can.
        if hints.caps & !info.caps != 0 || info.mode & !hints.mode != 0 {
            return false;
        }
        // Without this mode a write with data must find no need for a receive; with it, it takes one.
        if direct && hints.mode & sys::FI_RX_CQ_DATA != 0 {
            info.mode |= sys::FI_RX_CQ_DATA;
            offered_rx.mode |= sys::FI_RX_CQ_DATA;
        } else if direct && !config.unsolicited {
            if hints.caps & sys::FI_RMA != 0 {
                return false;
            }
            info.caps &= !RMA;
        }
        if hints.caps != 0 {
            let mut caps = hints.caps & (PRIMARY | sys::FI_SOURCE | sys::FI_HMEM);
            if caps & sys::FI_MSG != 0 && caps & (sys::FI_SEND | sys::FI_RECV) == 0 {
                caps |= sys::FI_SEND | sys::FI_RECV;
            }
            if caps & sys::FI_RMA != 0 && caps & (RMA & !sys::FI_RMA) == 0 {
                caps |= RMA;
            }
            caps |= if hints.caps & COMM != 0 { hints.caps & COMM } else { COMM };
            info.caps &= caps;
            offered_tx.caps &= caps;
            offered_rx.caps &= caps;
        }
        if direct && info.caps & sys::FI_RMA == 0 {
            offered_ep.max_msg_size = MAX_MESSAGE;
        }
        if let Some(domain) = hints.domain_attr.as_ref() {
            if !names(domain.name, domain_name(nic).as_bytes())
                || offered_domain.mr_mode & !domain.mr_mode != 0
                || domain.cq_data_size > offered_domain.cq_data_size
                || domain.mr_key_size > offered_domain.mr_key_size
                || domain.threading > sys::FI_THREAD_COMPLETION
            {
                return false;
            }
            if domain.threading != sys::FI_THREAD_UNSPEC {
                offered_domain.threading = domain.threading;
            }
            if domain.mr_mode & sys::FI_MR_LOCAL != 0 {
                offered_domain.mr_mode |= sys::FI_MR_LOCAL;
            }
        }
        if let Some(ep) = hints.ep_attr.as_ref()
            && (!matches!(ep.type_, sys::FI_EP_UNSPEC | sys::FI_EP_RDM)
                || !matches!(ep.protocol, PROTO_UNSPEC | sys::FI_PROTO_EFA)
                || ep.max_msg_size > offered_ep.max_msg_size
                || ep.max_order_waw_size > 0)
        {
            return false;
        }
        if let Some(tx) = hints.tx_attr.as_ref() {
            if tx.size > offered_tx.size
                || tx.iov_limit > 1
                || tx.rma_iov_limit > 1
                || tx.inject_size > offered_tx.inject_size
                || tx.msg_order != 0
                || tx.op_flags & !offered_tx.op_flags != 0
            {
                return false;
            }
            if tx.size > 0 {
                offered_tx.size = tx.size;
            }
        }
        if let Some(rx) = hints.rx_attr.as_ref() {
            if rx.size > offered_rx.size || rx.iov_limit > 1 || rx.msg_order != 0 {
                return false;
            }
            if rx.size > 0 {
                offered_rx.size = rx.size;
            }
        }
        if !matches!(hints.addr_format, sys::FI_FORMAT_UNSPEC | sys::FI_ADDR_EFA) {
            return false;
        }
        if !hints.src_addr.is_null() {
            return hints.src_addrlen == ADDRESS_BYTES
                && *hints.src_addr.cast::<[u8; 16]>() == Address::gid(nic);
        }
        true
    }
}

/// `fi_getinfo`: a list of what fits the hints, `efa-direct` before `efa`, or an error, negated.
///
/// # Safety
///
/// `hints` is null or as for [`dup`].
pub(crate) unsafe fn get(
    config: &Config,
    version: u32,
    node: *const c_char,
    service: *const c_char,
    hints: *const sys::fi_info,
) -> Result<*mut sys::fi_info, c_int> {
    if version > VERSION {
        return Err(-sys::FI_ENOSYS);
    }
    if !node.is_null() || !service.is_null() {
        violation(Rule::NotModelled, "fi_getinfo with a node or a service");
        return Err(-sys::FI_ENODATA);
    }
    let (mut first, mut last) = (std::ptr::null_mut(), std::ptr::null_mut::<sys::fi_info>());
    for direct in
        [true, false].into_iter().filter(|&direct| if direct { config.direct } else { config.efa })
    {
        for nic in 0..config.nics {
            let info = offer(config, version, direct, nic);
            // SAFETY: `info` is new, with all its attributes; `hints` is the caller's promise.
            let fits = unsafe {
                match hints.as_ref() {
                    Some(hints) => fit(config, &mut *info, hints, direct, nic),
                    None => {
                        if direct {
                            (*info).mode |= sys::FI_RX_CQ_DATA;
                            (*(*info).rx_attr).mode |= sys::FI_RX_CQ_DATA;
                        }
                        true
                    }
                }
            };
            if !fits {
                // SAFETY: it is ours, and nobody knows it.
                unsafe { free(info) };
                continue;
            }
            // SAFETY: the last of the list is null, or as valid as all of it.
            match unsafe { std::mem::replace(&mut last, info).as_mut() } {
                Some(last) => last.next = info,
                None => first = info,
            }
        }
    }
    if first.is_null() { Err(-sys::FI_ENODATA) } else { Ok(first) }
}
