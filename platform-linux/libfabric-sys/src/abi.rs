//! libfabric's binary interface: its structures, tables of functions, and constants, as in `<rdma/*.h>`.
//!
//! Written by hand, and compared by `tests/headers.rs` with the headers of an installed libfabric: the offset, size
//! and C type of each field, the signature of each table entry, each constant. The macros below define the items and,
//! from the same text, the listings ([`STRUCTS`], [`CONSTANTS`], [`ENUMS`], [`SYMBOLS`]) that the test reads, so nothing can be
//! added here without being compared.
//!
//! What it means is in libfabric's man pages, named at each structure; fields are documented there. Enumerations are
//! integers: a later library may return a value that this file does not know.
//!
//! # Invariants
//!
//! 1. `fi_info` and the attributes it points to are allocated by the library alone (`fi_dupinfo` of null), never here:
//!    later versions append fields to them.
//! 2. [`fi_mr_attr`], [`fi_cq_attr`] and [`fi_cq_err_entry`] are the caller's, have no version, and have grown: they are
//!    declared at the largest size known. All zero is a valid value of every structure here that callers allocate.

// The names are C's, so that its documentation can be searched for them; and fields are documented there.
#![allow(non_camel_case_types, non_snake_case, missing_docs)]

use core::ffi::{c_char, c_int, c_void};

pub use libc::{iovec, pollfd};

/// A structure as it is declared here, for comparison with a header.
#[derive(Debug, Clone, Copy)]
pub struct Struct {
    /// Its name, in both languages.
    pub name: &'static str,
    /// Its size in bytes.
    pub size: usize,
    /// Its fields in order.
    pub fields: &'static [Field],
}

/// A field of a [`Struct`].
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name, in both languages.
    pub name: &'static str,
    /// Its offset in bytes.
    pub offset: usize,
    /// Its size in bytes.
    pub size: usize,
    /// Its Rust type, as written.
    pub ty: &'static str,
    /// A libfabric version that has it, (major, minor), if 1.17 has not.
    pub since: Option<(u32, u32)>,
}

/// A constant as it is declared here, for comparison with a header.
#[derive(Debug, Clone, Copy)]
pub struct Constant {
    /// Its name, in both languages.
    pub name: &'static str,
    /// Its value.
    pub value: i128,
    /// A libfabric version that has it, (major, minor), if 1.17 has not.
    pub since: Option<(u32, u32)>,
}

macro_rules! since {
    () => {
        None
    };
    ($major:literal, $minor:literal) => {
        Some(($major, $minor))
    };
}

// `@since(a, b)` before a field: libfabric a.b has it, and 1.17 has not.
macro_rules! structs {
    ($($(#[$meta:meta])* $name:ident {
        $($(#[$note:meta])* $(@since($major:literal, $minor:literal))? $field:ident: $ty:ty,)*
    })*) => {
        $($(#[$meta])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub struct $name { $($(#[$note])* pub $field: $ty,)* })*

        /// Every structure of this file but the opaque ones.
        pub const STRUCTS: &[Struct] = &[$(Struct {
            name: stringify!($name),
            size: size_of::<$name>(),
            fields: &[$(Field {
                name: stringify!($field),
                offset: core::mem::offset_of!($name, $field),
                size: size_of::<$ty>(),
                ty: stringify!($ty),
                since: since!($($major, $minor)?),
            },)*],
        },)*];
    };
}

macro_rules! opaque {
    ($($name:ident)*) => {
        $(/// Used behind pointers only.
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name { _opaque: [u8; 0] })*
    };
}

macro_rules! enums {
    ($($(#[$meta:meta])* $name:ident)*) => {
        $($(#[$meta])* pub type $name = core::ffi::c_uint;)*

        /// The types of this file that are enumerations in C.
        pub const ENUMS: &[&str] = &[$(stringify!($name)),*];
    };
}

// A group has a text, a type, and a version that has it: `None`, if 1.17 has.
macro_rules! constants {
    ($($doc:literal, $ty:ty, $since:expr, { $($name:ident = $value:expr;)* })*) => {
        $($(#[doc = $doc] pub const $name: $ty = $value;)*)*

        /// Every constant of this file.
        pub const CONSTANTS: &[Constant] = &[$($(Constant {
            name: stringify!($name),
            value: $name as i128,
            since: $since,
        },)*)*];
    };
}

// A function that the library exports: the name of its type here, and of itself.
macro_rules! symbols {
    ($($(#[$meta:meta])* $name:ident, $symbol:literal = $ty:ty;)*) => {
        $($(#[$meta])* pub type $name = $ty;)*

        /// The functions that are symbols of the library: each one's name, and its Rust type as written.
        pub const SYMBOLS: &[(&str, &str)] = &[$(($symbol, stringify!($ty))),*];
    };
}

/// A libfabric version as `fi_version` reports it and `fi_getinfo` takes it.
#[must_use]
pub const fn FI_VERSION(major: u32, minor: u32) -> u32 {
    (major << 16) | minor
}

/// An address vector's number for a peer, fi_av(3).
pub type fi_addr_t = u64;

symbols! {
    /// fi_getinfo(3).
    Getinfo, "fi_getinfo" = unsafe extern "C" fn(version: u32, node: *const c_char, service: *const c_char, flags: u64,
        hints: *const fi_info, info: *mut *mut fi_info) -> c_int;
    /// fi_getinfo(3).
    Freeinfo, "fi_freeinfo" = unsafe extern "C" fn(info: *mut fi_info);
    /// fi_getinfo(3).
    Dupinfo, "fi_dupinfo" = unsafe extern "C" fn(info: *const fi_info) -> *mut fi_info;
    /// fi_fabric(3).
    Fabric, "fi_fabric" = unsafe extern "C" fn(attr: *mut fi_fabric_attr, fabric: *mut *mut fid_fabric,
        context: *mut c_void) -> c_int;
    /// fi_version(3).
    GetVersion, "fi_version" = unsafe extern "C" fn() -> u32;
    /// fi_errno(3).
    Strerror, "fi_strerror" = unsafe extern "C" fn(errnum: c_int) -> *const c_char;
}

enums! {
    /// fi_av(3).
    fi_av_type
    /// fi_domain(3).
    fi_progress
    /// fi_domain(3).
    fi_threading
    /// fi_domain(3).
    fi_resource_mgmt
    /// fi_endpoint(3).
    fi_ep_type
    /// fi_nic(3).
    fi_bus_type
    /// fi_nic(3).
    fi_link_state
    /// fi_mr(3).
    fi_hmem_iface
    /// fi_cq(3), fi_eq(3).
    fi_wait_obj
    /// fi_cq(3).
    fi_cq_format
    /// fi_cq(3).
    fi_cq_wait_cond
    /// fi_atomic(3).
    fi_datatype
    /// fi_atomic(3).
    fi_op
    /// fi_collective(3).
    fi_collective_op
}

opaque! {
    fid_pep
    fid_wait
    fid_poll
    fid_cntr
    fid_stx
    fid_mc
    fid_av_set
    fid_xpu_ctx
    fi_wait_attr
    fi_poll_attr
    fi_cntr_attr
    fi_atomic_attr
    fi_collective_attr
    fi_av_set_attr
    fi_ops_tagged
    fi_ops_atomic
    fi_ops_collective
}

/// Which device memory is on; `cuda` with `FI_HMEM_CUDA`. All of `reserved` is to be zero beside it. fi_mr(3).
#[repr(C)]
#[derive(Clone, Copy)]
pub union fi_mr_device {
    pub reserved: u64,
    pub cuda: c_int,
}

impl core::fmt::Debug for fi_mr_device {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("fi_mr_device")
    }
}

structs! {
    /// The head of every object: its class, the opener's context, its table. fi_fabric(3), fi_control(3).
    fid {
        fclass: usize,
        context: *mut c_void,
        ops: *mut fi_ops,
    }

    /// What can be done with any object.
    fi_ops {
        size: usize,
        close: Option<unsafe extern "C" fn(fid: *mut fid) -> c_int>,
        bind: Option<unsafe extern "C" fn(fid: *mut fid, bfid: *mut fid, flags: u64) -> c_int>,
        control: Option<unsafe extern "C" fn(fid: *mut fid, command: c_int, arg: *mut c_void) -> c_int>,
        ops_open: Option<unsafe extern "C" fn(fid: *mut fid, name: *const c_char, flags: u64, ops: *mut *mut c_void,
            context: *mut c_void) -> c_int>,
        tostr: Option<unsafe extern "C" fn(fid: *const fid, buf: *mut c_char, len: usize) -> c_int>,
        ops_set: Option<unsafe extern "C" fn(fid: *mut fid, name: *const c_char, flags: u64, ops: *mut c_void,
            context: *mut c_void) -> c_int>,
    }

    /// Room that an operation lends the provider until it completes, with mode `FI_CONTEXT`. fi_getinfo(3).
    fi_context {
        internal: [*mut c_void; 4],
    }

    /// The same with mode `FI_CONTEXT2`.
    fi_context2 {
        internal: [*mut c_void; 8],
    }

    /// One thing that the library offers, or is asked for. Allocated by the library only. fi_getinfo(3).
    fi_info {
        next: *mut fi_info,
        caps: u64,
        mode: u64,
        addr_format: u32,
        src_addrlen: usize,
        dest_addrlen: usize,
        src_addr: *mut c_void,
        dest_addr: *mut c_void,
        handle: *mut fid,
        tx_attr: *mut fi_tx_attr,
        rx_attr: *mut fi_rx_attr,
        ep_attr: *mut fi_ep_attr,
        domain_attr: *mut fi_domain_attr,
        fabric_attr: *mut fi_fabric_attr,
        nic: *mut fid_nic,
    }

    /// fi_endpoint(3).
    fi_tx_attr {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        inject_size: usize,
        size: usize,
        iov_limit: usize,
        rma_iov_limit: usize,
        tclass: u32,
    }

    /// fi_endpoint(3).
    fi_rx_attr {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        total_buffered_recv: usize,
        size: usize,
        iov_limit: usize,
    }

    /// fi_endpoint(3). Allocated by the library only: 2.7 appends to it.
    fi_ep_attr {
        type_: fi_ep_type,
        protocol: u32,
        protocol_version: u32,
        max_msg_size: usize,
        msg_prefix_size: usize,
        max_order_raw_size: usize,
        max_order_war_size: usize,
        max_order_waw_size: usize,
        mem_tag_format: u64,
        tx_ctx_cnt: usize,
        rx_ctx_cnt: usize,
        auth_key_size: usize,
        auth_key: *mut u8,
    }

    /// fi_domain(3). Allocated by the library only: 1.20, 2.0, 2.5 and 2.7 append to it.
    fi_domain_attr {
        domain: *mut fid_domain,
        name: *mut c_char,
        threading: fi_threading,
        control_progress: fi_progress,
        data_progress: fi_progress,
        resource_mgmt: fi_resource_mgmt,
        av_type: fi_av_type,
        mr_mode: c_int,
        mr_key_size: usize,
        cq_data_size: usize,
        cq_cnt: usize,
        ep_cnt: usize,
        tx_ctx_cnt: usize,
        rx_ctx_cnt: usize,
        max_ep_tx_ctx: usize,
        max_ep_rx_ctx: usize,
        max_ep_stx_ctx: usize,
        max_ep_srx_ctx: usize,
        cntr_cnt: usize,
        mr_iov_limit: usize,
        caps: u64,
        mode: u64,
        auth_key: *mut u8,
        auth_key_size: usize,
        max_err_data: usize,
        mr_cnt: usize,
        tclass: u32,
    }

    /// fi_fabric(3).
    fi_fabric_attr {
        fabric: *mut fid_fabric,
        name: *mut c_char,
        prov_name: *mut c_char,
        prov_version: u32,
        api_version: u32,
    }

    /// What is known of a NIC; each pointer may be null. fi_nic(3).
    fid_nic {
        fid: fid,
        device_attr: *mut fi_device_attr,
        bus_attr: *mut fi_bus_attr,
        link_attr: *mut fi_link_attr,
        prov_attr: *mut c_void,
    }

    /// fi_nic(3).
    fi_device_attr {
        name: *mut c_char,
        device_id: *mut c_char,
        device_version: *mut c_char,
        vendor_id: *mut c_char,
        driver: *mut c_char,
        firmware: *mut c_char,
    }

    /// fi_nic(3).
    fi_pci_attr {
        domain_id: u16,
        bus_id: u8,
        device_id: u8,
        function_id: u8,
    }

    /// fi_nic(3).
    fi_bus_attr {
        bus_type: fi_bus_type,
        /// A union of one member in C.
        attr: fi_pci_attr,
    }

    /// fi_nic(3).
    fi_link_attr {
        address: *mut c_char,
        mtu: usize,
        speed: usize,
        state: fi_link_state,
        network_type: *mut c_char,
    }

    /// fi_fabric(3).
    fid_fabric {
        fid: fid,
        ops: *mut fi_ops_fabric,
        api_version: u32,
    }

    /// fi_fabric(3), fi_domain(3), fi_eq(3), fi_poll(3).
    fi_ops_fabric {
        size: usize,
        domain: Option<unsafe extern "C" fn(fabric: *mut fid_fabric, info: *mut fi_info, dom: *mut *mut fid_domain,
            context: *mut c_void) -> c_int>,
        passive_ep: Option<unsafe extern "C" fn(fabric: *mut fid_fabric, info: *mut fi_info, pep: *mut *mut fid_pep,
            context: *mut c_void) -> c_int>,
        eq_open: Option<unsafe extern "C" fn(fabric: *mut fid_fabric, attr: *mut fi_eq_attr, eq: *mut *mut fid_eq,
            context: *mut c_void) -> c_int>,
        wait_open: Option<unsafe extern "C" fn(fabric: *mut fid_fabric, attr: *mut fi_wait_attr,
            waitset: *mut *mut fid_wait) -> c_int>,
        trywait: Option<unsafe extern "C" fn(fabric: *mut fid_fabric, fids: *mut *mut fid, count: c_int) -> c_int>,
        domain2: Option<unsafe extern "C" fn(fabric: *mut fid_fabric, info: *mut fi_info, dom: *mut *mut fid_domain,
            flags: u64, context: *mut c_void) -> c_int>,
    }

    /// fi_domain(3).
    fid_domain {
        fid: fid,
        ops: *mut fi_ops_domain,
        mr: *mut fi_ops_mr,
    }

    /// fi_domain(3), fi_endpoint(3), fi_cq(3), fi_av(3).
    fi_ops_domain {
        size: usize,
        av_open: Option<unsafe extern "C" fn(domain: *mut fid_domain, attr: *mut fi_av_attr, av: *mut *mut fid_av,
            context: *mut c_void) -> c_int>,
        cq_open: Option<unsafe extern "C" fn(domain: *mut fid_domain, attr: *mut fi_cq_attr, cq: *mut *mut fid_cq,
            context: *mut c_void) -> c_int>,
        endpoint: Option<unsafe extern "C" fn(domain: *mut fid_domain, info: *mut fi_info, ep: *mut *mut fid_ep,
            context: *mut c_void) -> c_int>,
        scalable_ep: Option<unsafe extern "C" fn(domain: *mut fid_domain, info: *mut fi_info, sep: *mut *mut fid_ep,
            context: *mut c_void) -> c_int>,
        cntr_open: Option<unsafe extern "C" fn(domain: *mut fid_domain, attr: *mut fi_cntr_attr,
            cntr: *mut *mut fid_cntr, context: *mut c_void) -> c_int>,
        poll_open: Option<unsafe extern "C" fn(domain: *mut fid_domain, attr: *mut fi_poll_attr,
            pollset: *mut *mut fid_poll) -> c_int>,
        stx_ctx: Option<unsafe extern "C" fn(domain: *mut fid_domain, attr: *mut fi_tx_attr, stx: *mut *mut fid_stx,
            context: *mut c_void) -> c_int>,
        srx_ctx: Option<unsafe extern "C" fn(domain: *mut fid_domain, attr: *mut fi_rx_attr, rx_ep: *mut *mut fid_ep,
            context: *mut c_void) -> c_int>,
        query_atomic: Option<unsafe extern "C" fn(domain: *mut fid_domain, datatype: fi_datatype, op: fi_op,
            attr: *mut fi_atomic_attr, flags: u64) -> c_int>,
        query_collective: Option<unsafe extern "C" fn(domain: *mut fid_domain, coll: fi_collective_op,
            attr: *mut fi_collective_attr, flags: u64) -> c_int>,
        endpoint2: Option<unsafe extern "C" fn(domain: *mut fid_domain, info: *mut fi_info, ep: *mut *mut fid_ep,
            flags: u64, context: *mut c_void) -> c_int>,
    }

    /// fi_mr(3).
    fi_ops_mr {
        size: usize,
        reg: Option<unsafe extern "C" fn(fid: *mut fid, buf: *const c_void, len: usize, access: u64, offset: u64,
            requested_key: u64, flags: u64, mr: *mut *mut fid_mr, context: *mut c_void) -> c_int>,
        regv: Option<unsafe extern "C" fn(fid: *mut fid, iov: *const iovec, count: usize, access: u64, offset: u64,
            requested_key: u64, flags: u64, mr: *mut *mut fid_mr, context: *mut c_void) -> c_int>,
        regattr: Option<unsafe extern "C" fn(fid: *mut fid, attr: *const fi_mr_attr, flags: u64,
            mr: *mut *mut fid_mr) -> c_int>,
    }

    /// fi_mr(3).
    fid_mr {
        fid: fid,
        mem_desc: *mut c_void,
        key: u64,
    }

    /// fi_mr(3). The caller's; zero all of it first.
    fi_mr_attr {
        /// With flag `FI_MR_DMABUF`, from 1.20: a [`fi_mr_dmabuf`] in place of the `iovec`. A union in C from then on.
        mr_iov: *const iovec,
        iov_count: usize,
        access: u64,
        offset: u64,
        requested_key: u64,
        context: *mut c_void,
        auth_key_size: usize,
        auth_key: *mut u8,
        iface: fi_hmem_iface,
        device: fi_mr_device,
        @since(1, 20) hmem_data: *mut c_void,
        @since(2, 0) page_size: usize,
        @since(2, 0) base_mr: *const fid_mr,
        @since(2, 0) sub_mr_cnt: usize,
    }

    /// Device memory as a DMA-BUF file, for [`fi_mr_attr`] with `FI_MR_DMABUF`. fi_mr(3).
    fi_mr_dmabuf {
        @since(1, 20) fd: c_int,
        @since(1, 20) offset: u64,
        @since(1, 20) len: usize,
        @since(1, 20) base_addr: *mut c_void,
    }

    /// fi_av(3).
    fid_av {
        fid: fid,
        ops: *mut fi_ops_av,
    }

    /// fi_av(3).
    fi_av_attr {
        type_: fi_av_type,
        rx_ctx_bits: c_int,
        count: usize,
        ep_per_node: usize,
        name: *const c_char,
        map_addr: *mut c_void,
        flags: u64,
    }

    /// fi_av(3).
    fi_ops_av {
        size: usize,
        insert: Option<unsafe extern "C" fn(av: *mut fid_av, addr: *const c_void, count: usize,
            fi_addr: *mut fi_addr_t, flags: u64, context: *mut c_void) -> c_int>,
        insertsvc: Option<unsafe extern "C" fn(av: *mut fid_av, node: *const c_char, service: *const c_char,
            fi_addr: *mut fi_addr_t, flags: u64, context: *mut c_void) -> c_int>,
        insertsym: Option<unsafe extern "C" fn(av: *mut fid_av, node: *const c_char, nodecnt: usize,
            service: *const c_char, svccnt: usize, fi_addr: *mut fi_addr_t, flags: u64,
            context: *mut c_void) -> c_int>,
        remove: Option<unsafe extern "C" fn(av: *mut fid_av, fi_addr: *mut fi_addr_t, count: usize,
            flags: u64) -> c_int>,
        lookup: Option<unsafe extern "C" fn(av: *mut fid_av, fi_addr: fi_addr_t, addr: *mut c_void,
            addrlen: *mut usize) -> c_int>,
        straddr: Option<unsafe extern "C" fn(av: *mut fid_av, addr: *const c_void, buf: *mut c_char,
            len: *mut usize) -> *const c_char>,
        av_set: Option<unsafe extern "C" fn(av: *mut fid_av, attr: *mut fi_av_set_attr, av_set: *mut *mut fid_av_set,
            context: *mut c_void) -> c_int>,
    }

    /// fi_endpoint(3). A table is null if the endpoint has not the capability.
    fid_ep {
        fid: fid,
        ops: *mut fi_ops_ep,
        cm: *mut fi_ops_cm,
        msg: *mut fi_ops_msg,
        rma: *mut fi_ops_rma,
        tagged: *mut fi_ops_tagged,
        atomic: *mut fi_ops_atomic,
        collective: *mut fi_ops_collective,
    }

    /// fi_endpoint(3).
    fi_ops_ep {
        size: usize,
        cancel: Option<unsafe extern "C" fn(fid: *mut fid, context: *mut c_void) -> isize>,
        getopt: Option<unsafe extern "C" fn(fid: *mut fid, level: c_int, optname: c_int, optval: *mut c_void,
            optlen: *mut usize) -> c_int>,
        setopt: Option<unsafe extern "C" fn(fid: *mut fid, level: c_int, optname: c_int, optval: *const c_void,
            optlen: usize) -> c_int>,
        tx_ctx: Option<unsafe extern "C" fn(sep: *mut fid_ep, index: c_int, attr: *mut fi_tx_attr,
            tx_ep: *mut *mut fid_ep, context: *mut c_void) -> c_int>,
        rx_ctx: Option<unsafe extern "C" fn(sep: *mut fid_ep, index: c_int, attr: *mut fi_rx_attr,
            rx_ep: *mut *mut fid_ep, context: *mut c_void) -> c_int>,
        rx_size_left: Option<unsafe extern "C" fn(ep: *mut fid_ep) -> isize>,
        tx_size_left: Option<unsafe extern "C" fn(ep: *mut fid_ep) -> isize>,
    }

    /// fi_cm(3).
    fi_ops_cm {
        size: usize,
        setname: Option<unsafe extern "C" fn(fid: *mut fid, addr: *mut c_void, addrlen: usize) -> c_int>,
        getname: Option<unsafe extern "C" fn(fid: *mut fid, addr: *mut c_void, addrlen: *mut usize) -> c_int>,
        getpeer: Option<unsafe extern "C" fn(ep: *mut fid_ep, addr: *mut c_void, addrlen: *mut usize) -> c_int>,
        connect: Option<unsafe extern "C" fn(ep: *mut fid_ep, addr: *const c_void, param: *const c_void,
            paramlen: usize) -> c_int>,
        listen: Option<unsafe extern "C" fn(pep: *mut fid_pep) -> c_int>,
        accept: Option<unsafe extern "C" fn(ep: *mut fid_ep, param: *const c_void, paramlen: usize) -> c_int>,
        reject: Option<unsafe extern "C" fn(pep: *mut fid_pep, handle: *mut fid, param: *const c_void,
            paramlen: usize) -> c_int>,
        shutdown: Option<unsafe extern "C" fn(ep: *mut fid_ep, flags: u64) -> c_int>,
        join: Option<unsafe extern "C" fn(ep: *mut fid_ep, addr: *const c_void, flags: u64, mc: *mut *mut fid_mc,
            context: *mut c_void) -> c_int>,
    }

    /// fi_msg(3).
    fi_msg {
        msg_iov: *const iovec,
        desc: *mut *mut c_void,
        iov_count: usize,
        addr: fi_addr_t,
        context: *mut c_void,
        data: u64,
    }

    /// fi_msg(3).
    fi_ops_msg {
        size: usize,
        recv: Option<unsafe extern "C" fn(ep: *mut fid_ep, buf: *mut c_void, len: usize, desc: *mut c_void,
            src_addr: fi_addr_t, context: *mut c_void) -> isize>,
        recvv: Option<unsafe extern "C" fn(ep: *mut fid_ep, iov: *const iovec, desc: *mut *mut c_void, count: usize,
            src_addr: fi_addr_t, context: *mut c_void) -> isize>,
        recvmsg: Option<unsafe extern "C" fn(ep: *mut fid_ep, msg: *const fi_msg, flags: u64) -> isize>,
        send: Option<unsafe extern "C" fn(ep: *mut fid_ep, buf: *const c_void, len: usize, desc: *mut c_void,
            dest_addr: fi_addr_t, context: *mut c_void) -> isize>,
        sendv: Option<unsafe extern "C" fn(ep: *mut fid_ep, iov: *const iovec, desc: *mut *mut c_void, count: usize,
            dest_addr: fi_addr_t, context: *mut c_void) -> isize>,
        sendmsg: Option<unsafe extern "C" fn(ep: *mut fid_ep, msg: *const fi_msg, flags: u64) -> isize>,
        inject: Option<unsafe extern "C" fn(ep: *mut fid_ep, buf: *const c_void, len: usize,
            dest_addr: fi_addr_t) -> isize>,
        senddata: Option<unsafe extern "C" fn(ep: *mut fid_ep, buf: *const c_void, len: usize, desc: *mut c_void,
            data: u64, dest_addr: fi_addr_t, context: *mut c_void) -> isize>,
        injectdata: Option<unsafe extern "C" fn(ep: *mut fid_ep, buf: *const c_void, len: usize, data: u64,
            dest_addr: fi_addr_t) -> isize>,
    }

    /// fi_rma(3).
    fi_rma_iov {
        addr: u64,
        len: usize,
        key: u64,
    }

    /// fi_rma(3).
    fi_msg_rma {
        msg_iov: *const iovec,
        desc: *mut *mut c_void,
        iov_count: usize,
        addr: fi_addr_t,
        rma_iov: *const fi_rma_iov,
        rma_iov_count: usize,
        context: *mut c_void,
        data: u64,
    }

    /// fi_rma(3).
    fi_ops_rma {
        size: usize,
        read: Option<unsafe extern "C" fn(ep: *mut fid_ep, buf: *mut c_void, len: usize, desc: *mut c_void,
            src_addr: fi_addr_t, addr: u64, key: u64, context: *mut c_void) -> isize>,
        readv: Option<unsafe extern "C" fn(ep: *mut fid_ep, iov: *const iovec, desc: *mut *mut c_void, count: usize,
            src_addr: fi_addr_t, addr: u64, key: u64, context: *mut c_void) -> isize>,
        readmsg: Option<unsafe extern "C" fn(ep: *mut fid_ep, msg: *const fi_msg_rma, flags: u64) -> isize>,
        write: Option<unsafe extern "C" fn(ep: *mut fid_ep, buf: *const c_void, len: usize, desc: *mut c_void,
            dest_addr: fi_addr_t, addr: u64, key: u64, context: *mut c_void) -> isize>,
        writev: Option<unsafe extern "C" fn(ep: *mut fid_ep, iov: *const iovec, desc: *mut *mut c_void, count: usize,
            dest_addr: fi_addr_t, addr: u64, key: u64, context: *mut c_void) -> isize>,
        writemsg: Option<unsafe extern "C" fn(ep: *mut fid_ep, msg: *const fi_msg_rma, flags: u64) -> isize>,
        inject: Option<unsafe extern "C" fn(ep: *mut fid_ep, buf: *const c_void, len: usize, dest_addr: fi_addr_t,
            addr: u64, key: u64) -> isize>,
        writedata: Option<unsafe extern "C" fn(ep: *mut fid_ep, buf: *const c_void, len: usize, desc: *mut c_void,
            data: u64, dest_addr: fi_addr_t, addr: u64, key: u64, context: *mut c_void) -> isize>,
        injectdata: Option<unsafe extern "C" fn(ep: *mut fid_ep, buf: *const c_void, len: usize, data: u64,
            dest_addr: fi_addr_t, addr: u64, key: u64) -> isize>,
    }

    /// fi_eq(3).
    fid_eq {
        fid: fid,
        ops: *mut fi_ops_eq,
    }

    /// fi_eq(3).
    fi_eq_attr {
        size: usize,
        flags: u64,
        wait_obj: fi_wait_obj,
        signaling_vector: c_int,
        wait_set: *mut fid_wait,
    }

    /// fi_eq(3).
    fi_eq_entry {
        fid: *mut fid,
        context: *mut c_void,
        data: u64,
    }

    /// fi_eq(3).
    fi_eq_err_entry {
        fid: *mut fid,
        context: *mut c_void,
        data: u64,
        err: c_int,
        prov_errno: c_int,
        err_data: *mut c_void,
        err_data_size: usize,
    }

    /// fi_eq(3).
    fi_ops_eq {
        size: usize,
        read: Option<unsafe extern "C" fn(eq: *mut fid_eq, event: *mut u32, buf: *mut c_void, len: usize,
            flags: u64) -> isize>,
        readerr: Option<unsafe extern "C" fn(eq: *mut fid_eq, buf: *mut fi_eq_err_entry, flags: u64) -> isize>,
        write: Option<unsafe extern "C" fn(eq: *mut fid_eq, event: u32, buf: *const c_void, len: usize,
            flags: u64) -> isize>,
        sread: Option<unsafe extern "C" fn(eq: *mut fid_eq, event: *mut u32, buf: *mut c_void, len: usize,
            timeout: c_int, flags: u64) -> isize>,
        strerror: Option<unsafe extern "C" fn(eq: *mut fid_eq, prov_errno: c_int, err_data: *const c_void,
            buf: *mut c_char, len: usize) -> *const c_char>,
    }

    /// fi_cq(3).
    fid_cq {
        fid: fid,
        ops: *mut fi_ops_cq,
    }

    /// fi_cq(3). The caller's; zero all of it first.
    fi_cq_attr {
        size: usize,
        flags: u64,
        format: fi_cq_format,
        wait_obj: fi_wait_obj,
        signaling_vector: c_int,
        wait_cond: fi_cq_wait_cond,
        wait_set: *mut fid_wait,
        @since(2, 7) xpu_ctx: *mut fid_xpu_ctx,
    }

    /// What `FI_GETWAIT` fills in for a queue with `FI_WAIT_POLLFD`: `nfds` says how long the array at `fd` is, and then how
    /// many there are. fi_cq(3).
    fi_wait_pollfd {
        change_index: u64,
        nfds: usize,
        fd: *mut pollfd,
    }

    /// A completion in format `FI_CQ_FORMAT_CONTEXT`. fi_cq(3).
    fi_cq_entry {
        op_context: *mut c_void,
    }

    /// A completion in format `FI_CQ_FORMAT_MSG`. fi_cq(3).
    fi_cq_msg_entry {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
    }

    /// A completion in format `FI_CQ_FORMAT_DATA`. fi_cq(3).
    fi_cq_data_entry {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
    }

    /// A completion in format `FI_CQ_FORMAT_TAGGED`. fi_cq(3).
    fi_cq_tagged_entry {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
        tag: u64,
    }

    /// An operation that failed. The caller's; zero all of it first: `err_data` and its size are read. fi_cq(3).
    fi_cq_err_entry {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
        tag: u64,
        olen: usize,
        err: c_int,
        prov_errno: c_int,
        err_data: *mut c_void,
        err_data_size: usize,
        @since(1, 20) src_addr: fi_addr_t,
    }

    /// fi_cq(3).
    fi_ops_cq {
        size: usize,
        read: Option<unsafe extern "C" fn(cq: *mut fid_cq, buf: *mut c_void, count: usize) -> isize>,
        readfrom: Option<unsafe extern "C" fn(cq: *mut fid_cq, buf: *mut c_void, count: usize,
            src_addr: *mut fi_addr_t) -> isize>,
        readerr: Option<unsafe extern "C" fn(cq: *mut fid_cq, buf: *mut fi_cq_err_entry, flags: u64) -> isize>,
        sread: Option<unsafe extern "C" fn(cq: *mut fid_cq, buf: *mut c_void, count: usize, cond: *const c_void,
            timeout: c_int) -> isize>,
        sreadfrom: Option<unsafe extern "C" fn(cq: *mut fid_cq, buf: *mut c_void, count: usize,
            src_addr: *mut fi_addr_t, cond: *const c_void, timeout: c_int) -> isize>,
        signal: Option<unsafe extern "C" fn(cq: *mut fid_cq) -> c_int>,
        strerror: Option<unsafe extern "C" fn(cq: *mut fid_cq, prov_errno: c_int, err_data: *const c_void,
            buf: *mut c_char, len: usize) -> *const c_char>,
    }
}

constants! {
    "A capability, or what an operation was, or what a registration allows: fi_getinfo(3), fi_cq(3), fi_mr(3).",
    u64, None, {
        FI_MSG = 1 << 1;
        FI_RMA = 1 << 2;
        FI_TAGGED = 1 << 3;
        FI_ATOMIC = 1 << 4;
        FI_READ = 1 << 8;
        FI_WRITE = 1 << 9;
        FI_RECV = 1 << 10;
        FI_SEND = 1 << 11;
        FI_TRANSMIT = FI_SEND;
        FI_REMOTE_READ = 1 << 12;
        FI_REMOTE_WRITE = 1 << 13;
        FI_HMEM = 1 << 47;
        FI_LOCAL_COMM = 1 << 51;
        FI_REMOTE_COMM = 1 << 52;
        FI_RMA_EVENT = 1 << 56;
        FI_SOURCE = 1 << 57;
        FI_DIRECTED_RECV = 1 << 59;
    }

    "How an operation is to be done, or was: fi_rma(3), fi_msg(3), fi_cq(3).",
    u64, None, {
        FI_MULTI_RECV = 1 << 16;
        FI_REMOTE_CQ_DATA = 1 << 17;
        FI_MORE = 1 << 18;
        FI_FENCE = 1 << 21;
        FI_COMPLETION = 1 << 24;
        FI_INJECT = 1 << 25;
        FI_INJECT_COMPLETE = 1 << 26;
        FI_TRANSMIT_COMPLETE = 1 << 27;
        FI_DELIVERY_COMPLETE = 1 << 28;
    }

    "A flag of `fi_getinfo`: fi_getinfo(3).",
    u64, None, {
        FI_NUMERICHOST = 1 << 55;
        FI_PROV_ATTR_ONLY = 1 << 54;
    }

    "A flag for binding an endpoint to a completion queue: only operations that ask for a completion get one. fi_endpoint(3).",
    u64, None, {
        FI_SELECTIVE_COMPLETION = 1 << 59;
    }

    "A flag of a registration: fi_mr(3).",
    u64, None, {
        FI_HMEM_HOST_ALLOC = 1 << 45;
        FI_HMEM_DEVICE_ONLY = 1 << 46;
    }

    "A flag of a registration: the memory is a DMA-BUF. fi_mr(3).",
    u64, Some((1, 20)), {
        FI_MR_DMABUF = 1 << 40;
    }

    "A flag of an operation: many small writes per second matter most; fi_efa(7).",
    u64, Some((2, 6)), {
        FI_EFA_WR_HIGH_PPS = 1 << 60;
    }

    "What the provider demands of its user: fi_getinfo(3).",
    u64, None, {
        FI_CONTEXT = 1 << 59;
        FI_MSG_PREFIX = 1 << 58;
        FI_RX_CQ_DATA = 1 << 56;
        FI_CONTEXT2 = 1 << 52;
    }

    "What the provider demands of registrations: fi_mr(3).",
    c_int, None, {
        FI_MR_LOCAL = 1 << 2;
        FI_MR_VIRT_ADDR = 1 << 4;
        FI_MR_ALLOCATED = 1 << 5;
        FI_MR_PROV_KEY = 1 << 6;
        FI_MR_RMA_EVENT = 1 << 8;
        FI_MR_ENDPOINT = 1 << 9;
        FI_MR_HMEM = 1 << 10;
    }

    "An order that is kept: fi_endpoint(3).",
    u64, None, {
        FI_ORDER_RAR = 1 << 0;
        FI_ORDER_RAW = 1 << 1;
        FI_ORDER_RAS = 1 << 2;
        FI_ORDER_WAR = 1 << 3;
        FI_ORDER_WAW = 1 << 4;
        FI_ORDER_WAS = 1 << 5;
        FI_ORDER_SAR = 1 << 6;
        FI_ORDER_SAW = 1 << 7;
        FI_ORDER_SAS = 1 << 8;
        FI_ORDER_RMA_WAW = 1 << 35;
    }

    "No such thing: fi_av(3), fi_mr(3).",
    u64, None, {
        FI_ADDR_UNSPEC = u64::MAX;
        FI_ADDR_NOTAVAIL = u64::MAX;
        FI_KEY_NOTAVAIL = u64::MAX;
    }

    "What an address looks like: fi_getinfo(3).",
    u32, None, {
        FI_FORMAT_UNSPEC = 0;
        FI_SOCKADDR = 1;
        FI_SOCKADDR_IN = 2;
        FI_SOCKADDR_IN6 = 3;
        FI_ADDR_STR = 9;
        FI_ADDR_EFA = 12;
    }

    "What an endpoint speaks: fi_endpoint(3).",
    u32, None, {
        FI_PROTO_EFA = 20;
    }

    "A traffic class: fi_endpoint(3).",
    u32, None, {
        FI_TC_UNSPEC = 0;
        FI_TC_LOW_LATENCY = 0x201;
    }

    "An `fi_ep_type`: fi_endpoint(3).",
    fi_ep_type, None, {
        FI_EP_UNSPEC = 0;
        FI_EP_MSG = 1;
        FI_EP_DGRAM = 2;
        FI_EP_RDM = 3;
    }

    "An `fi_av_type`: fi_av(3).",
    fi_av_type, None, {
        FI_AV_UNSPEC = 0;
        FI_AV_MAP = 1;
        FI_AV_TABLE = 2;
    }

    "An `fi_progress`: fi_domain(3).",
    fi_progress, None, {
        FI_PROGRESS_UNSPEC = 0;
        FI_PROGRESS_AUTO = 1;
        FI_PROGRESS_MANUAL = 2;
    }

    "An `fi_progress`: fi_domain(3).",
    fi_progress, Some((2, 0)), {
        FI_PROGRESS_CONTROL_UNIFIED = 3;
    }

    "An `fi_threading`: fi_domain(3).",
    fi_threading, None, {
        FI_THREAD_UNSPEC = 0;
        FI_THREAD_SAFE = 1;
        FI_THREAD_DOMAIN = 3;
        FI_THREAD_COMPLETION = 4;
    }

    "An `fi_resource_mgmt`: fi_domain(3).",
    fi_resource_mgmt, None, {
        FI_RM_UNSPEC = 0;
        FI_RM_DISABLED = 1;
        FI_RM_ENABLED = 2;
    }

    "An `fi_cq_format`: fi_cq(3).",
    fi_cq_format, None, {
        FI_CQ_FORMAT_UNSPEC = 0;
        FI_CQ_FORMAT_CONTEXT = 1;
        FI_CQ_FORMAT_MSG = 2;
        FI_CQ_FORMAT_DATA = 3;
        FI_CQ_FORMAT_TAGGED = 4;
    }

    "An `fi_wait_obj`: fi_cq(3).",
    fi_wait_obj, None, {
        FI_WAIT_NONE = 0;
        FI_WAIT_UNSPEC = 1;
        FI_WAIT_FD = 3;
        FI_WAIT_YIELD = 5;
        FI_WAIT_POLLFD = 6;
    }

    "An `fi_cq_wait_cond`: fi_cq(3).",
    fi_cq_wait_cond, None, {
        FI_CQ_COND_NONE = 0;
        FI_CQ_COND_THRESHOLD = 1;
    }

    "An `fi_hmem_iface`: fi_mr(3).",
    fi_hmem_iface, None, {
        FI_HMEM_SYSTEM = 0;
        FI_HMEM_CUDA = 1;
        FI_HMEM_ROCR = 2;
        FI_HMEM_ZE = 3;
        FI_HMEM_NEURON = 4;
        FI_HMEM_SYNAPSEAI = 5;
    }

    "An `fi_bus_type`: fi_nic(3).",
    fi_bus_type, None, {
        FI_BUS_UNSPEC = 0;
        FI_BUS_PCI = 1;
    }

    "An `fi_link_state`: fi_nic(3).",
    fi_link_state, None, {
        FI_LINK_UNKNOWN = 0;
        FI_LINK_DOWN = 1;
        FI_LINK_UP = 2;
    }

    "What kind of object a `fid` is the head of.",
    usize, None, {
        FI_CLASS_UNSPEC = 0;
        FI_CLASS_FABRIC = 1;
        FI_CLASS_DOMAIN = 2;
        FI_CLASS_EP = 3;
        FI_CLASS_AV = 11;
        FI_CLASS_MR = 12;
        FI_CLASS_EQ = 13;
        FI_CLASS_CQ = 14;
        FI_CLASS_NIC = 20;
    }

    "A command of `fi_control`: fi_control(3), fi_cq(3).",
    c_int, None, {
        FI_GETWAIT = 5;
        FI_ENABLE = 6;
        FI_GETWAITOBJ = 16;
    }

    "An event of an event queue: fi_eq(3).",
    u32, None, {
        FI_NOTIFY = 0;
        FI_MR_COMPLETE = 4;
        FI_AV_COMPLETE = 5;
    }

    "The one level of options: fi_endpoint(3).",
    c_int, None, {
        FI_OPT_ENDPOINT = 0;
    }

    "An option of an endpoint: fi_endpoint(3).",
    c_int, None, {
        FI_OPT_MIN_MULTI_RECV = 0;
        FI_OPT_TX_SIZE = 6;
        FI_OPT_RX_SIZE = 7;
        FI_OPT_FI_HMEM_P2P = 8;
    }

    "An option of an endpoint, a C `bool` (one byte): fi_endpoint(3).",
    c_int, Some((1, 18)), {
        FI_OPT_CUDA_API_PERMITTED = 10;
        FI_OPT_SHARED_MEMORY_PERMITTED = 11;
    }

    "An option of an endpoint, a `size_t`: fi_endpoint(3).",
    c_int, Some((2, 0)), {
        FI_OPT_MAX_MSG_SIZE = 12;
        FI_OPT_MAX_RMA_SIZE = 14;
        FI_OPT_INJECT_MSG_SIZE = 16;
        FI_OPT_INJECT_RMA_SIZE = 18;
    }

    "A value of `FI_OPT_FI_HMEM_P2P`: fi_endpoint(3).",
    c_int, None, {
        FI_HMEM_P2P_ENABLED = 0;
        FI_HMEM_P2P_REQUIRED = 1;
        FI_HMEM_P2P_PREFERRED = 2;
        FI_HMEM_P2P_DISABLED = 3;
    }

    "An option of an EFA endpoint, a `size_t`: fi_efa(7).",
    c_int, None, {
        FI_OPT_EFA_RNR_RETRY = -(0xefa << 16);
    }

    "An option of an EFA endpoint, a C `bool` (one byte): fi_efa(7).",
    c_int, Some((1, 18)), {
        FI_OPT_EFA_EMULATED_READ = FI_OPT_EFA_RNR_RETRY + 1;
        FI_OPT_EFA_EMULATED_WRITE = FI_OPT_EFA_RNR_RETRY + 2;
        FI_OPT_EFA_EMULATED_ATOMICS = FI_OPT_EFA_RNR_RETRY + 3;
        FI_OPT_EFA_USE_DEVICE_RDMA = FI_OPT_EFA_RNR_RETRY + 4;
    }

    "An option of an EFA endpoint, a C `bool` (one byte): fi_efa(7).",
    c_int, Some((1, 20)), {
        FI_OPT_EFA_SENDRECV_IN_ORDER_ALIGNED_128_BYTES = FI_OPT_EFA_RNR_RETRY + 5;
        FI_OPT_EFA_WRITE_IN_ORDER_ALIGNED_128_BYTES = FI_OPT_EFA_RNR_RETRY + 6;
    }

    "An option of an EFA endpoint, a C `bool` (one byte): fi_efa(7).",
    c_int, Some((2, 1)), {
        FI_OPT_EFA_HOMOGENEOUS_PEERS = FI_OPT_EFA_RNR_RETRY + 7;
    }

    "An option of an EFA endpoint, a C `bool` (one byte): fi_efa(7).",
    c_int, Some((2, 4)), {
        FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV = FI_OPT_EFA_RNR_RETRY + 8;
    }

    "An error, returned negated: fi_errno(3).",
    c_int, None, {
        FI_SUCCESS = 0;
        FI_EPERM = libc::EPERM;
        FI_ENOENT = libc::ENOENT;
        FI_EINTR = libc::EINTR;
        FI_EIO = libc::EIO;
        FI_E2BIG = libc::E2BIG;
        FI_EBADF = libc::EBADF;
        FI_EAGAIN = libc::EAGAIN;
        FI_ENOMEM = libc::ENOMEM;
        FI_EACCES = libc::EACCES;
        FI_EFAULT = libc::EFAULT;
        FI_EBUSY = libc::EBUSY;
        FI_ENODEV = libc::ENODEV;
        FI_EINVAL = libc::EINVAL;
        FI_EMFILE = libc::EMFILE;
        FI_ENOSPC = libc::ENOSPC;
        FI_ENOSYS = libc::ENOSYS;
        FI_ENOMSG = libc::ENOMSG;
        FI_ENODATA = libc::ENODATA;
        FI_EOVERFLOW = libc::EOVERFLOW;
        FI_EMSGSIZE = libc::EMSGSIZE;
        FI_ENOPROTOOPT = libc::ENOPROTOOPT;
        FI_EOPNOTSUPP = libc::EOPNOTSUPP;
        FI_EADDRINUSE = libc::EADDRINUSE;
        FI_EADDRNOTAVAIL = libc::EADDRNOTAVAIL;
        FI_ENETDOWN = libc::ENETDOWN;
        FI_ENETUNREACH = libc::ENETUNREACH;
        FI_ECONNABORTED = libc::ECONNABORTED;
        FI_ECONNRESET = libc::ECONNRESET;
        FI_ENOBUFS = libc::ENOBUFS;
        FI_EISCONN = libc::EISCONN;
        FI_ENOTCONN = libc::ENOTCONN;
        FI_ESHUTDOWN = libc::ESHUTDOWN;
        FI_ETIMEDOUT = libc::ETIMEDOUT;
        FI_ECONNREFUSED = libc::ECONNREFUSED;
        FI_EHOSTDOWN = libc::EHOSTDOWN;
        FI_EHOSTUNREACH = libc::EHOSTUNREACH;
        FI_EALREADY = libc::EALREADY;
        FI_EINPROGRESS = libc::EINPROGRESS;
        FI_EREMOTEIO = libc::EREMOTEIO;
        FI_ECANCELED = libc::ECANCELED;
        FI_EKEYREJECTED = libc::EKEYREJECTED;
        FI_EOTHER = 256;
        FI_ETOOSMALL = 257;
        FI_EOPBADSTATE = 258;
        FI_EAVAIL = 259;
        FI_EBADFLAGS = 260;
        FI_ENOEQ = 261;
        FI_EDOMAIN = 262;
        FI_ENOCQ = 263;
        FI_ECRC = 264;
        FI_ETRUNC = 265;
        FI_ENOKEY = 266;
        FI_ENOAV = 267;
        FI_EOVERRUN = 268;
        FI_ENORX = 269;
    }
}
