//! libibverbs's binary interface: the structures, functions and constants that are used, as in `<infiniband/verbs.h>`.
//!
//! Written by hand, and compared by `tests/headers.rs` with the headers of an installed rdma-core: the offset, size and
//! C type of each field, the signature of each symbol, each constant. The macros below define the items and, from the
//! same text, the listings ([`STRUCTS`], [`PLACES`], [`CONSTANTS`], [`ENUMS`], [`SYMBOLS`]) that the test reads, so
//! nothing can be added here without being compared.
//!
//! What it means is in the man pages, named at each structure; fields are documented there. Enumerations are integers:
//! a device may return a value that this file does not know.
//!
//! # Invariants
//!
//! 1. Structures under `PREFIXES` are allocated by the library alone, never here, and declared up to the last field
//!    that is used; those under `SUFFIXES` from the first on.
//! 2. All zero is a valid value of every structure that callers allocate.

// The names are C's, so that its documentation can be searched for them; and fields are documented there.
#![allow(non_camel_case_types, non_snake_case, missing_docs)]

use core::ffi::{c_char, c_int, c_void};

/// A structure as it is declared here, for comparison with a header.
#[derive(Debug, Clone, Copy)]
pub struct Struct {
    /// Its name, in both languages.
    pub name: &'static str,
    /// Its size in bytes.
    pub size: usize,
    /// How much of the header's it is.
    pub part: Part,
    /// Its fields in order.
    pub fields: &'static [Field],
}

/// How much of a header's structure one of this crate's is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// The first fields: it may be longer.
    Prefix,
    /// The last ones, as seen from the last: it may begin earlier.
    Suffix,
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
}

/// Where something lies inside a union of a structure's, or a structure that has no name.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The structure.
    pub name: &'static str,
    /// The way to it, in C.
    pub path: &'static str,
    /// Its offset in bytes from the structure's start.
    pub offset: usize,
    /// Its size in bytes.
    pub size: usize,
}

/// A constant as it is declared here, for comparison with a header.
#[derive(Debug, Clone, Copy)]
pub struct Constant {
    /// Its name, in both languages.
    pub name: &'static str,
    /// Its value.
    pub value: i128,
}

macro_rules! structs {
    ($($list:ident, $part:ident, $doc:literal, {
        $($(#[$meta:meta])* $name:ident { $($field:ident: $ty:ty,)* })*
    })*) => {
        $($($(#[$meta])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub struct $name { $(pub $field: $ty,)* })*

        #[doc = $doc]
        const $list: &[Struct] = &[$(Struct {
            name: stringify!($name),
            size: size_of::<$name>(),
            part: Part::$part,
            fields: &[$(Field {
                name: stringify!($field),
                offset: core::mem::offset_of!($name, $field),
                size: size_of::<$ty>(),
                ty: stringify!($ty),
            },)*],
        },)*];)*

        /// Every structure of this file but the opaque ones.
        pub const STRUCTS: &[&[Struct]] = &[$($list),*];
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
    ($($name:ident)*) => {
        $(/// An enumeration.
        pub type $name = core::ffi::c_uint;)*

        /// The types of this file that are enumerations in C.
        pub const ENUMS: &[&str] = &[$(stringify!($name)),*];
    };
}

macro_rules! constants {
    ($($doc:literal, $ty:ty, { $($name:ident = $value:expr;)* })*) => {
        $($(#[doc = $doc] pub const $name: $ty = $value;)*)*

        /// Every constant of this file.
        pub const CONSTANTS: &[Constant] = &[$($(Constant {
            name: stringify!($name),
            value: $name as i128,
        },)*)*];
    };
}

// A function that the library exports, and the version of the symbol that has this type.
macro_rules! symbols {
    (
        needed { $($(#[$meta:meta])* $name:ident @ $version:literal: $ty:ty;)* }
        later { $($(#[$later_meta:meta])* $later:ident @ $later_version:literal: $later_ty:ty;)* }
    ) => {
        /// The functions of a loaded libibverbs, under their C names. What came later than what is needed may be missing.
        #[derive(Debug, Clone, Copy)]
        pub struct Symbols {
            $($(#[$meta])* pub $name: $ty,)*
            $($(#[$later_meta])* pub $later: Option<$later_ty>,)*
        }

        impl Symbols {
            /// All of them, found by `find`, which is given a name and a version.
            ///
            /// # Safety
            ///
            /// What `find` returns is the address of the function of that name and version, in a library that stays.
            ///
            /// # Errors
            ///
            /// The first of `find`'s, but for what may be missing.
            pub unsafe fn bind<E>(
                find: impl Fn(&'static core::ffi::CStr, &'static core::ffi::CStr) -> Result<core::ptr::NonNull<c_void>, E>,
            ) -> Result<Self, E> {
                Ok(Self { $($name: {
                    const NAME: &core::ffi::CStr = c_str(concat!(stringify!($name), "\0"));
                    const VERSION: &core::ffi::CStr = c_str(concat!($version, "\0"));
                    let address = find(NAME, VERSION)?;
                    // SAFETY: by the caller's promise it is a function of this type; pointers to data and to code
                    // are of one size here.
                    unsafe { core::mem::transmute::<*mut c_void, $ty>(address.as_ptr()) }
                },)* $($later: {
                    const NAME: &core::ffi::CStr = c_str(concat!(stringify!($later), "\0"));
                    const VERSION: &core::ffi::CStr = c_str(concat!($later_version, "\0"));
                    // SAFETY: as above.
                    find(NAME, VERSION).ok().map(|address| unsafe {
                        core::mem::transmute::<*mut c_void, $later_ty>(address.as_ptr())
                    })
                },)* })
            }
        }

        /// The functions: each one's name, and its Rust type as written.
        pub const SYMBOLS: &[(&str, &str)] = &[
            $((stringify!($name), stringify!($ty)),)*
            $((stringify!($later), stringify!($later_ty)),)*
        ];
    };
}

/// Text that ends in its only NUL, as C has it; checked at compile time.
#[expect(clippy::panic, reason = "evaluated when this is compiled")]
const fn c_str(text: &'static str) -> &'static core::ffi::CStr {
    match core::ffi::CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("no NUL, or too many"),
    }
}

symbols! {
    needed {
        /// ibv_fork_init(3).
        ibv_fork_init @ "IBVERBS_1.1": unsafe extern "C" fn() -> c_int;
        /// ibv_get_device_list(3).
        ibv_get_device_list @ "IBVERBS_1.1": unsafe extern "C" fn(num_devices: *mut c_int) -> *mut *mut ibv_device;
        /// ibv_get_device_list(3).
        ibv_free_device_list @ "IBVERBS_1.1": unsafe extern "C" fn(list: *mut *mut ibv_device);
        /// ibv_get_device_name(3).
        ibv_get_device_name @ "IBVERBS_1.1": unsafe extern "C" fn(device: *mut ibv_device) -> *const c_char;
        /// ibv_open_device(3).
        ibv_open_device @ "IBVERBS_1.1": unsafe extern "C" fn(device: *mut ibv_device) -> *mut ibv_context;
        /// ibv_open_device(3).
        ibv_close_device @ "IBVERBS_1.1": unsafe extern "C" fn(context: *mut ibv_context) -> c_int;
        /// ibv_get_async_event(3).
        ibv_get_async_event @ "IBVERBS_1.1": unsafe extern "C" fn(context: *mut ibv_context,
            event: *mut ibv_async_event) -> c_int;
        /// ibv_get_async_event(3).
        ibv_ack_async_event @ "IBVERBS_1.1": unsafe extern "C" fn(event: *mut ibv_async_event);
        /// ibv_query_device(3).
        ibv_query_device @ "IBVERBS_1.1": unsafe extern "C" fn(context: *mut ibv_context,
            device_attr: *mut ibv_device_attr) -> c_int;
        /// ibv_query_port(3). It fills in the [`ibv_port_attr`] up to `flags`.
        ibv_query_port @ "IBVERBS_1.1": unsafe extern "C" fn(context: *mut ibv_context, port_num: u8,
            port_attr: *mut _compat_ibv_port_attr) -> c_int;
        /// ibv_query_gid_ex(3).
        _ibv_query_gid_ex @ "IBVERBS_1.11": unsafe extern "C" fn(context: *mut ibv_context, port_num: u32, gid_index: u32,
            entry: *mut ibv_gid_entry, flags: u32, entry_size: usize) -> c_int;
        /// ibv_alloc_pd(3).
        ibv_alloc_pd @ "IBVERBS_1.1": unsafe extern "C" fn(context: *mut ibv_context) -> *mut ibv_pd;
        /// ibv_alloc_pd(3).
        ibv_dealloc_pd @ "IBVERBS_1.1": unsafe extern "C" fn(pd: *mut ibv_pd) -> c_int;
        /// ibv_reg_mr(3). Optional access flags are left out where the kernel does not know them.
        ibv_reg_mr_iova2 @ "IBVERBS_1.8": unsafe extern "C" fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64,
            access: u32) -> *mut ibv_mr;
        /// ibv_reg_mr(3).
        ibv_dereg_mr @ "IBVERBS_1.1": unsafe extern "C" fn(mr: *mut ibv_mr) -> c_int;
        /// ibv_create_comp_channel(3).
        ibv_create_comp_channel @ "IBVERBS_1.0": unsafe extern "C" fn(context: *mut ibv_context) -> *mut ibv_comp_channel;
        /// ibv_create_comp_channel(3).
        ibv_destroy_comp_channel @ "IBVERBS_1.0": unsafe extern "C" fn(channel: *mut ibv_comp_channel) -> c_int;
        /// ibv_create_cq(3).
        ibv_create_cq @ "IBVERBS_1.1": unsafe extern "C" fn(context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void,
            channel: *mut ibv_comp_channel, comp_vector: c_int) -> *mut ibv_cq;
        /// ibv_create_cq(3).
        ibv_destroy_cq @ "IBVERBS_1.1": unsafe extern "C" fn(cq: *mut ibv_cq) -> c_int;
        /// ibv_resize_cq(3). What is in the queue stays there.
        ibv_resize_cq @ "IBVERBS_1.1": unsafe extern "C" fn(cq: *mut ibv_cq, cqe: c_int) -> c_int;
        /// ibv_get_cq_event(3).
        ibv_get_cq_event @ "IBVERBS_1.1": unsafe extern "C" fn(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq,
            cq_context: *mut *mut c_void) -> c_int;
        /// ibv_get_cq_event(3).
        ibv_ack_cq_events @ "IBVERBS_1.1": unsafe extern "C" fn(cq: *mut ibv_cq, nevents: u32);
        /// ibv_create_srq(3).
        ibv_create_srq @ "IBVERBS_1.1": unsafe extern "C" fn(pd: *mut ibv_pd,
            srq_init_attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
        /// ibv_create_srq(3).
        ibv_destroy_srq @ "IBVERBS_1.1": unsafe extern "C" fn(srq: *mut ibv_srq) -> c_int;
        /// ibv_create_qp(3).
        ibv_create_qp @ "IBVERBS_1.1": unsafe extern "C" fn(pd: *mut ibv_pd,
            qp_init_attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
        /// ibv_create_qp(3).
        ibv_destroy_qp @ "IBVERBS_1.1": unsafe extern "C" fn(qp: *mut ibv_qp) -> c_int;
        /// ibv_create_qp_ex(3). Null, unless the queue pair was made with operations for sends.
        ibv_qp_to_qp_ex @ "IBVERBS_1.6": unsafe extern "C" fn(qp: *mut ibv_qp) -> *mut ibv_qp_ex;
        /// ibv_modify_qp(3).
        ibv_modify_qp @ "IBVERBS_1.1": unsafe extern "C" fn(qp: *mut ibv_qp, attr: *mut ibv_qp_attr,
            attr_mask: c_int) -> c_int;
        /// ibv_create_ah(3).
        ibv_create_ah @ "IBVERBS_1.1": unsafe extern "C" fn(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
        /// ibv_create_ah(3).
        ibv_destroy_ah @ "IBVERBS_1.1": unsafe extern "C" fn(ah: *mut ibv_ah) -> c_int;
        /// The status of a completion, in words.
        ibv_wc_status_str @ "IBVERBS_1.1": unsafe extern "C" fn(status: ibv_wc_status) -> *const c_char;
    }
    later {
        /// ibv_is_fork_initialized(3). Since rdma-core 35.
        ibv_is_fork_initialized @ "IBVERBS_1.13": unsafe extern "C" fn() -> ibv_fork_status;
        /// ibv_reg_mr(3). `fd` is a DMA-BUF, and `offset` where in it the memory begins. Since rdma-core 34.
        ibv_reg_dmabuf_mr @ "IBVERBS_1.12": unsafe extern "C" fn(pd: *mut ibv_pd, offset: u64, length: usize, iova: u64,
            fd: c_int, access: c_int) -> *mut ibv_mr;
    }
}

enums! {
    ibv_fork_status
    ibv_port_state
    ibv_mtu
    ibv_atomic_cap
    ibv_event_type
    ibv_wc_status
    ibv_wc_opcode
    ibv_wr_opcode
    ibv_qp_type
    ibv_qp_state
    ibv_mig_state
}

opaque! {
    ibv_ah
    ibv_mw
    ibv_mw_bind
    ibv_xrcd
    ibv_rwq_ind_table
    _compat_ibv_port_attr
    ibv_query_device_ex_input
}

/// A port's name in its fabric; for RoCE an IPv6 address, or an IPv4 one mapped into it.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_gid {
    pub raw: [u8; 16],
    /// Halves, each in network order; they make the alignment.
    pub global: [u64; 2],
}

impl core::fmt::Debug for ibv_gid {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("ibv_gid")
    }
}

/// What a send of each kind needs beside. ibv_post_send(3).
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_wr_wr {
    pub rdma: ibv_send_wr_rdma,
    pub ud: ibv_send_wr_ud,
    /// Four words of atomics.
    pub atomic: [u64; 4],
}

impl core::fmt::Debug for ibv_send_wr_wr {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("ibv_send_wr_wr")
    }
}

/// Of a one-sided write.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ibv_send_wr_rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// Of a datagram.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ibv_send_wr_ud {
    pub ah: *mut ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

structs! {
    WHOLE, Whole, "Structures that callers allocate.", {
        /// ibv_query_device(3).
        ibv_device_attr {
            fw_ver: [c_char; 64],
            node_guid: u64,
            sys_image_guid: u64,
            max_mr_size: u64,
            page_size_cap: u64,
            vendor_id: u32,
            vendor_part_id: u32,
            hw_ver: u32,
            max_qp: c_int,
            max_qp_wr: c_int,
            device_cap_flags: u32,
            max_sge: c_int,
            max_sge_rd: c_int,
            max_cq: c_int,
            max_cqe: c_int,
            max_mr: c_int,
            max_pd: c_int,
            max_qp_rd_atom: c_int,
            max_ee_rd_atom: c_int,
            max_res_rd_atom: c_int,
            max_qp_init_rd_atom: c_int,
            max_ee_init_rd_atom: c_int,
            atomic_cap: ibv_atomic_cap,
            max_ee: c_int,
            max_rdd: c_int,
            max_mw: c_int,
            max_raw_ipv6_qp: c_int,
            max_raw_ethy_qp: c_int,
            max_mcast_grp: c_int,
            max_mcast_qp_attach: c_int,
            max_total_mcast_qp_attach: c_int,
            max_ah: c_int,
            max_fmr: c_int,
            max_map_per_fmr: c_int,
            max_srq: c_int,
            max_srq_wr: c_int,
            max_srq_sge: c_int,
            max_pkeys: u16,
            local_ca_ack_delay: u8,
            phys_port_cnt: u8,
        }

        /// ibv_query_port(3).
        ibv_port_attr {
            state: ibv_port_state,
            max_mtu: ibv_mtu,
            active_mtu: ibv_mtu,
            gid_tbl_len: c_int,
            port_cap_flags: u32,
            max_msg_sz: u32,
            bad_pkey_cntr: u32,
            qkey_viol_cntr: u32,
            pkey_tbl_len: u16,
            lid: u16,
            sm_lid: u16,
            lmc: u8,
            max_vl_num: u8,
            sm_sl: u8,
            subnet_timeout: u8,
            init_type_reply: u8,
            active_width: u8,
            active_speed: u8,
            phys_state: u8,
            link_layer: u8,
            flags: u8,
            port_cap_flags2: u16,
        }

        /// ibv_query_gid_ex(3).
        ibv_gid_entry {
            gid: ibv_gid,
            gid_index: u32,
            port_num: u32,
            gid_type: u32,
            ndev_ifindex: u32,
        }

        /// ibv_get_async_event(3).
        ibv_async_event {
            element: *mut c_void,
            event_type: ibv_event_type,
        }

        /// ibv_poll_cq(3). `imm_data` is in network order.
        ibv_wc {
            wr_id: u64,
            status: ibv_wc_status,
            opcode: ibv_wc_opcode,
            vendor_err: u32,
            byte_len: u32,
            imm_data: u32,
            qp_num: u32,
            src_qp: u32,
            wc_flags: u32,
            pkey_index: u16,
            slid: u16,
            sl: u8,
            dlid_path_bits: u8,
        }

        /// ibv_create_srq(3).
        ibv_srq_attr {
            max_wr: u32,
            max_sge: u32,
            srq_limit: u32,
        }

        /// ibv_create_srq(3).
        ibv_srq_init_attr {
            srq_context: *mut c_void,
            attr: ibv_srq_attr,
        }

        /// ibv_create_qp(3).
        ibv_qp_cap {
            max_send_wr: u32,
            max_recv_wr: u32,
            max_send_sge: u32,
            max_recv_sge: u32,
            max_inline_data: u32,
        }

        /// ibv_create_qp(3).
        ibv_qp_init_attr {
            qp_context: *mut c_void,
            send_cq: *mut ibv_cq,
            recv_cq: *mut ibv_cq,
            srq: *mut ibv_srq,
            cap: ibv_qp_cap,
            qp_type: ibv_qp_type,
            sq_sig_all: c_int,
        }

        /// ibv_create_ah(3).
        ibv_global_route {
            dgid: ibv_gid,
            flow_label: u32,
            sgid_index: u8,
            hop_limit: u8,
            traffic_class: u8,
        }

        /// ibv_create_ah(3).
        ibv_ah_attr {
            grh: ibv_global_route,
            dlid: u16,
            sl: u8,
            src_path_bits: u8,
            static_rate: u8,
            is_global: u8,
            port_num: u8,
        }

        /// ibv_modify_qp(3).
        ibv_qp_attr {
            qp_state: ibv_qp_state,
            cur_qp_state: ibv_qp_state,
            path_mtu: ibv_mtu,
            path_mig_state: ibv_mig_state,
            qkey: u32,
            rq_psn: u32,
            sq_psn: u32,
            dest_qp_num: u32,
            qp_access_flags: u32,
            cap: ibv_qp_cap,
            ah_attr: ibv_ah_attr,
            alt_ah_attr: ibv_ah_attr,
            pkey_index: u16,
            alt_pkey_index: u16,
            en_sqd_async_notify: u8,
            sq_draining: u8,
            max_rd_atomic: u8,
            max_dest_rd_atomic: u8,
            min_rnr_timer: u8,
            port_num: u8,
            timeout: u8,
            retry_cnt: u8,
            rnr_retry: u8,
            alt_port_num: u8,
            alt_timeout: u8,
            rate_limit: u32,
        }

        /// ibv_create_cq_ex(3). All zero.
        ibv_poll_cq_attr {
            comp_mask: u32,
        }

        /// ibv_post_send(3).
        ibv_sge {
            addr: u64,
            length: u32,
            lkey: u32,
        }

        /// ibv_post_send(3). `imm_data` is in network order.
        ibv_send_wr {
            wr_id: u64,
            next: *mut ibv_send_wr,
            sg_list: *mut ibv_sge,
            num_sge: c_int,
            opcode: ibv_wr_opcode,
            send_flags: u32,
            imm_data: u32,
            wr: ibv_send_wr_wr,
            qp_type: u32,
            bind_mw: [u64; 6],
        }

        /// ibv_post_recv(3).
        ibv_recv_wr {
            wr_id: u64,
            next: *mut ibv_recv_wr,
            sg_list: *mut ibv_sge,
            num_sge: c_int,
        }
    }

    SIZED, Prefix, "Structures that callers allocate, and say of how long they are.", {
        /// ibv_query_device_ex(3). Bits of what is offered; of the transports reliable connections, unreliable ones, datagrams.
        ibv_odp_caps {
            general_caps: u64,
            per_transport_caps: [u32; 3],
        }

        /// ibv_query_device_ex(3).
        ibv_device_attr_ex {
            orig_attr: ibv_device_attr,
            comp_mask: u32,
            odp_caps: ibv_odp_caps,
        }
    }

    MASKED, Prefix, "Structures that callers allocate, and of which they say by a mask what is meant.", {
        /// ibv_create_qp_ex(3).
        ibv_qp_init_attr_ex {
            qp_context: *mut c_void,
            send_cq: *mut ibv_cq,
            recv_cq: *mut ibv_cq,
            srq: *mut ibv_srq,
            cap: ibv_qp_cap,
            qp_type: ibv_qp_type,
            sq_sig_all: c_int,
            comp_mask: u32,
            pd: *mut ibv_pd,
            xrcd: *mut ibv_xrcd,
            create_flags: u32,
            max_tso_header: u16,
            rwq_ind_tbl: *mut ibv_rwq_ind_table,
            rx_hash_conf: [u64; 3],
            source_qpn: u32,
            send_ops_flags: u64,
        }

        /// ibv_create_cq_ex(3).
        ibv_cq_init_attr_ex {
            cqe: u32,
            cq_context: *mut c_void,
            channel: *mut ibv_comp_channel,
            comp_vector: u32,
            wc_flags: u64,
            comp_mask: u32,
            flags: u32,
        }
    }

    SUFFIXES, Suffix, "Structures that the library allocates, and that grow at their beginning.", {
        /// Where a context lies that has more entries than its own table: how much of this there is says `sz`.
        verbs_context {
            query_port: Option<unsafe extern "C" fn(context: *mut ibv_context, port_num: u8,
                port_attr: *mut ibv_port_attr, port_attr_len: usize) -> c_int>,
            advise_mr: *mut c_void,
            alloc_null_mr: *mut c_void,
            read_counters: *mut c_void,
            attach_counters_point_flow: *mut c_void,
            create_counters: *mut c_void,
            destroy_counters: *mut c_void,
            reg_dm_mr: *mut c_void,
            alloc_dm: *mut c_void,
            free_dm: *mut c_void,
            modify_flow_action_esp: *mut c_void,
            destroy_flow_action: *mut c_void,
            create_flow_action_esp: *mut c_void,
            modify_qp_rate_limit: *mut c_void,
            alloc_parent_domain: *mut c_void,
            dealloc_td: *mut c_void,
            alloc_td: *mut c_void,
            modify_cq: *mut c_void,
            post_srq_ops: *mut c_void,
            destroy_rwq_ind_table: *mut c_void,
            create_rwq_ind_table: *mut c_void,
            destroy_wq: *mut c_void,
            modify_wq: *mut c_void,
            create_wq: *mut c_void,
            query_rt_values: *mut c_void,
            create_cq_ex: Option<unsafe extern "C" fn(context: *mut ibv_context,
                init_attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex>,
            r#priv: *mut c_void,
            query_device_ex: Option<unsafe extern "C" fn(context: *mut ibv_context, input: *const ibv_query_device_ex_input,
                attr: *mut ibv_device_attr_ex, attr_size: usize) -> c_int>,
            ibv_destroy_flow: *mut c_void,
            ABI_placeholder2: *mut c_void,
            ibv_create_flow: *mut c_void,
            ABI_placeholder1: *mut c_void,
            open_qp: *mut c_void,
            create_qp_ex: Option<unsafe extern "C" fn(context: *mut ibv_context,
                qp_init_attr_ex: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp>,
            get_srq_num: *mut c_void,
            create_srq_ex: *mut c_void,
            open_xrcd: *mut c_void,
            close_xrcd: *mut c_void,
            _ABI_placeholder3: u64,
            sz: usize,
            context: ibv_context,
        }
    }

    PREFIXES, Prefix, "Structures that the library allocates.", {
        /// ibv_get_device_list(3).
        ibv_device {
            _ops: [*mut c_void; 2],
            node_type: c_int,
            transport_type: c_int,
        }

        /// What a driver does on the way of data; the entries in between are of old.
        ibv_context_ops {
            _compat_query_device: Option<unsafe extern "C" fn(context: *mut ibv_context,
                device_attr: *mut ibv_device_attr) -> c_int>,
            _compat_query_port: Option<unsafe extern "C" fn(context: *mut ibv_context, port_num: u8,
                port_attr: *mut _compat_ibv_port_attr) -> c_int>,
            _compat_alloc_pd: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_dealloc_pd: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_reg_mr: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_rereg_mr: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_dereg_mr: Option<unsafe extern "C" fn() -> *mut c_void>,
            alloc_mw: *mut c_void,
            bind_mw: Option<unsafe extern "C" fn(qp: *mut ibv_qp, mw: *mut ibv_mw, mw_bind: *mut ibv_mw_bind) -> c_int>,
            dealloc_mw: Option<unsafe extern "C" fn(mw: *mut ibv_mw) -> c_int>,
            _compat_create_cq: Option<unsafe extern "C" fn() -> *mut c_void>,
            poll_cq: Option<unsafe extern "C" fn(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int>,
            req_notify_cq: Option<unsafe extern "C" fn(cq: *mut ibv_cq, solicited_only: c_int) -> c_int>,
            _compat_cq_event: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_resize_cq: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_destroy_cq: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_create_srq: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_modify_srq: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_query_srq: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_destroy_srq: Option<unsafe extern "C" fn() -> *mut c_void>,
            post_srq_recv: Option<unsafe extern "C" fn(srq: *mut ibv_srq, recv_wr: *mut ibv_recv_wr,
                bad_recv_wr: *mut *mut ibv_recv_wr) -> c_int>,
            _compat_create_qp: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_query_qp: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_modify_qp: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_destroy_qp: Option<unsafe extern "C" fn() -> *mut c_void>,
            post_send: Option<unsafe extern "C" fn(qp: *mut ibv_qp, wr: *mut ibv_send_wr,
                bad_wr: *mut *mut ibv_send_wr) -> c_int>,
            post_recv: Option<unsafe extern "C" fn(qp: *mut ibv_qp, wr: *mut ibv_recv_wr,
                bad_wr: *mut *mut ibv_recv_wr) -> c_int>,
            _compat_create_ah: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_destroy_ah: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_attach_mcast: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_detach_mcast: Option<unsafe extern "C" fn() -> *mut c_void>,
            _compat_async_event: Option<unsafe extern "C" fn() -> *mut c_void>,
        }

        /// ibv_open_device(3).
        ibv_context {
            device: *mut ibv_device,
            ops: ibv_context_ops,
            cmd_fd: c_int,
            async_fd: c_int,
            num_comp_vectors: c_int,
            mutex: [u64; size_of::<libc::pthread_mutex_t>() / 8],
            abi_compat: *mut c_void,
        }

        /// ibv_alloc_pd(3).
        ibv_pd {
            context: *mut ibv_context,
            handle: u32,
        }

        /// ibv_reg_mr(3).
        ibv_mr {
            context: *mut ibv_context,
            pd: *mut ibv_pd,
            addr: *mut c_void,
            length: usize,
            handle: u32,
            lkey: u32,
            rkey: u32,
        }

        /// ibv_create_comp_channel(3).
        ibv_comp_channel {
            context: *mut ibv_context,
            fd: c_int,
        }

        /// ibv_create_cq(3).
        ibv_cq {
            context: *mut ibv_context,
            channel: *mut ibv_comp_channel,
            cq_context: *mut c_void,
            handle: u32,
            cqe: c_int,
        }

        /// ibv_create_srq(3).
        ibv_srq {
            context: *mut ibv_context,
        }

        /// ibv_create_qp(3).
        ibv_qp {
            context: *mut ibv_context,
            qp_context: *mut c_void,
            pd: *mut ibv_pd,
            send_cq: *mut ibv_cq,
            recv_cq: *mut ibv_cq,
            srq: *mut ibv_srq,
            handle: u32,
            qp_num: u32,
            state: ibv_qp_state,
            qp_type: ibv_qp_type,
            mutex: [u64; size_of::<libc::pthread_mutex_t>() / 8],
            cond: [u64; size_of::<libc::pthread_cond_t>() / 8],
            events_completed: u32,
        }

        /// ibv_wr_post(3).
        ibv_qp_ex {
            qp_base: ibv_qp,
            comp_mask: u64,
            wr_id: u64,
            wr_flags: u32,
            wr_atomic_cmp_swp: *mut c_void,
            wr_atomic_fetch_add: *mut c_void,
            wr_bind_mw: *mut c_void,
            wr_local_inv: *mut c_void,
            wr_rdma_read: *mut c_void,
            wr_rdma_write: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64)>,
            wr_rdma_write_imm: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64,
                imm_data: u32)>,
            wr_send: *mut c_void,
            wr_send_imm: *mut c_void,
            wr_send_inv: *mut c_void,
            wr_send_tso: *mut c_void,
            wr_set_ud_addr: *mut c_void,
            wr_set_xrc_srqn: *mut c_void,
            wr_set_inline_data: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize)>,
            wr_set_inline_data_list: *mut c_void,
            wr_set_sge: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32)>,
            wr_set_sge_list: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, num_sge: usize, sg_list: *const ibv_sge)>,
            wr_start: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex)>,
            wr_complete: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex) -> c_int>,
        }

        /// ibv_create_cq_ex(3). It is an `ibv_cq` up to what is polled.
        ibv_cq_ex {
            context: *mut ibv_context,
            channel: *mut ibv_comp_channel,
            cq_context: *mut c_void,
            handle: u32,
            cqe: c_int,
            mutex: [u64; size_of::<libc::pthread_mutex_t>() / 8],
            cond: [u64; size_of::<libc::pthread_cond_t>() / 8],
            comp_events_completed: u32,
            async_events_completed: u32,
            comp_mask: u32,
            status: ibv_wc_status,
            wr_id: u64,
            start_poll: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int>,
            next_poll: *mut c_void,
            end_poll: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex)>,
            read_opcode: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> ibv_wc_opcode>,
            read_vendor_err: *mut c_void,
            read_byte_len: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
            read_imm_data: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
            read_qp_num: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
            read_src_qp: *mut c_void,
            read_wc_flags: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
            read_slid: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        }
    }
}

/// Where the parts of unions, and of structures without a name, lie.
pub const PLACES: &[Place] = &[
    Place {
        name: "ibv_odp_caps",
        path: "per_transport_caps.rc_odp_caps",
        offset: core::mem::offset_of!(ibv_odp_caps, per_transport_caps),
        size: 4,
    },
    place("wr.rdma.remote_addr", core::mem::offset_of!(ibv_send_wr_rdma, remote_addr), 8),
    place("wr.rdma.rkey", core::mem::offset_of!(ibv_send_wr_rdma, rkey), 4),
    place("wr.ud.ah", core::mem::offset_of!(ibv_send_wr_ud, ah), 8),
    place("wr.ud.remote_qpn", core::mem::offset_of!(ibv_send_wr_ud, remote_qpn), 4),
    place("wr.ud.remote_qkey", core::mem::offset_of!(ibv_send_wr_ud, remote_qkey), 4),
];

const fn place(path: &'static str, offset: usize, size: usize) -> Place {
    Place {
        name: "ibv_send_wr",
        path,
        offset: core::mem::offset_of!(ibv_send_wr, wr) + offset,
        size,
    }
}

constants! {
    "`enum ibv_fork_status`.", ibv_fork_status, {
        IBV_FORK_DISABLED = 0;
        IBV_FORK_ENABLED = 1;
        IBV_FORK_UNNEEDED = 2;
    }
    "`enum ibv_node_type`.", c_int, {
        IBV_NODE_CA = 1;
    }
    "`enum ibv_transport_type`.", c_int, {
        IBV_TRANSPORT_IB = 0;
    }
    "`enum ibv_port_state`.", ibv_port_state, {
        IBV_PORT_DOWN = 1;
        IBV_PORT_ACTIVE = 4;
    }
    "`enum ibv_mtu`.", ibv_mtu, {
        IBV_MTU_256 = 1;
        IBV_MTU_512 = 2;
        IBV_MTU_1024 = 3;
        IBV_MTU_2048 = 4;
        IBV_MTU_4096 = 5;
    }
    "Of `ibv_port_attr.link_layer`.", u8, {
        IBV_LINK_LAYER_UNSPECIFIED = 0;
        IBV_LINK_LAYER_INFINIBAND = 1;
        IBV_LINK_LAYER_ETHERNET = 2;
    }
    "Of `ibv_port_attr.flags`.", u8, {
        IBV_QPF_GRH_REQUIRED = 1 << 0;
    }
    "`enum ibv_gid_type`.", u32, {
        IBV_GID_TYPE_IB = 0;
        IBV_GID_TYPE_ROCE_V1 = 1;
        IBV_GID_TYPE_ROCE_V2 = 2;
    }
    "`enum ibv_access_flags`.", u32, {
        IBV_ACCESS_LOCAL_WRITE = 1;
        IBV_ACCESS_REMOTE_WRITE = 2;
        IBV_ACCESS_ON_DEMAND = 1 << 6;
        IBV_ACCESS_RELAXED_ORDERING = 1 << 20;
    }
    "`enum ibv_odp_general_caps`.", u64, {
        IBV_ODP_SUPPORT = 1 << 0;
    }
    "`enum ibv_odp_transport_cap_bits`.", u32, {
        IBV_ODP_SUPPORT_WRITE = 1 << 2;
    }
    "`enum ibv_qp_type`.", ibv_qp_type, {
        IBV_QPT_RC = 2;
        IBV_QPT_UD = 4;
    }
    "`enum ibv_qp_state`.", ibv_qp_state, {
        IBV_QPS_RESET = 0;
        IBV_QPS_INIT = 1;
        IBV_QPS_RTR = 2;
        IBV_QPS_RTS = 3;
        IBV_QPS_ERR = 6;
    }
    "`enum ibv_qp_attr_mask`.", c_int, {
        IBV_QP_STATE = 1 << 0;
        IBV_QP_ACCESS_FLAGS = 1 << 3;
        IBV_QP_PKEY_INDEX = 1 << 4;
        IBV_QP_PORT = 1 << 5;
        IBV_QP_QKEY = 1 << 6;
        IBV_QP_AV = 1 << 7;
        IBV_QP_PATH_MTU = 1 << 8;
        IBV_QP_TIMEOUT = 1 << 9;
        IBV_QP_RETRY_CNT = 1 << 10;
        IBV_QP_RNR_RETRY = 1 << 11;
        IBV_QP_RQ_PSN = 1 << 12;
        IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13;
        IBV_QP_MIN_RNR_TIMER = 1 << 15;
        IBV_QP_SQ_PSN = 1 << 16;
        IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17;
        IBV_QP_DEST_QPN = 1 << 20;
    }
    "`enum ibv_qp_init_attr_mask`.", u32, {
        IBV_QP_INIT_ATTR_PD = 1 << 0;
        IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 1 << 6;
    }
    "`enum ibv_qp_create_send_ops_flags`.", u64, {
        IBV_QP_EX_WITH_RDMA_WRITE = 1 << 0;
        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 1 << 1;
    }
    "`enum ibv_create_cq_wc_flags`.", u64, {
        IBV_WC_EX_WITH_BYTE_LEN = 1 << 0;
        IBV_WC_EX_WITH_IMM = 1 << 1;
        IBV_WC_EX_WITH_QP_NUM = 1 << 2;
        IBV_WC_EX_WITH_SLID = 1 << 4;
    }
    "`enum ibv_wr_opcode`.", ibv_wr_opcode, {
        IBV_WR_RDMA_WRITE = 0;
        IBV_WR_RDMA_WRITE_WITH_IMM = 1;
        IBV_WR_SEND = 2;
    }
    "`enum ibv_send_flags`.", u32, {
        IBV_SEND_SIGNALED = 1 << 1;
        IBV_SEND_INLINE = 1 << 3;
    }
    "`enum ibv_wc_opcode`.", ibv_wc_opcode, {
        IBV_WC_RECV = 128;
        IBV_WC_RECV_RDMA_WITH_IMM = 129;
    }
    "`enum ibv_wc_flags`.", u32, {
        IBV_WC_GRH = 1;
        IBV_WC_WITH_IMM = 2;
    }
    "`enum ibv_wc_status`.", ibv_wc_status, {
        IBV_WC_SUCCESS = 0;
        IBV_WC_LOC_LEN_ERR = 1;
        IBV_WC_LOC_QP_OP_ERR = 2;
        IBV_WC_LOC_PROT_ERR = 4;
        IBV_WC_WR_FLUSH_ERR = 5;
        IBV_WC_REM_INV_REQ_ERR = 9;
        IBV_WC_REM_ACCESS_ERR = 10;
        IBV_WC_REM_OP_ERR = 11;
        IBV_WC_RETRY_EXC_ERR = 12;
        IBV_WC_RNR_RETRY_EXC_ERR = 13;
    }
    "`enum ibv_event_type`.", ibv_event_type, {
        IBV_EVENT_CQ_ERR = 0;
        IBV_EVENT_QP_FATAL = 1;
        IBV_EVENT_QP_REQ_ERR = 2;
        IBV_EVENT_QP_ACCESS_ERR = 3;
        IBV_EVENT_DEVICE_FATAL = 8;
        IBV_EVENT_PORT_ACTIVE = 9;
        IBV_EVENT_PORT_ERR = 10;
        IBV_EVENT_SRQ_ERR = 14;
        IBV_EVENT_QP_LAST_WQE_REACHED = 16;
        IBV_EVENT_GID_CHANGE = 18;
    }
}
