//! How the device says that an operation failed: its status codes (rdma-core's `efa_io_comp_status`, in
//! `fi_cq_err_entry.prov_errno`), and libfabric's error for each.

use libfabric_sys as sys;

macro_rules! statuses {
    ($($status:ident = $code:literal, $errno:expr, $text:literal;)*) => {
        /// A status of a completed operation; `Ok` has code 0.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Status { $($status = $code,)* }

        impl Status {
            /// Returns the status that has this code.
            pub(crate) fn from_code(code: i64) -> Option<Self> {
                match code { $($code => Some(Self::$status),)* _ => None }
            }

            /// Returns libfabric's error for it.
            pub(crate) fn errno(self) -> i32 {
                match self { $(Self::$status => $errno,)* }
            }

            /// Returns what it means.
            pub(crate) fn text(self) -> &'static core::ffi::CStr {
                match self { $(Self::$status => $text,)* }
            }
        }
    };
}

statuses! {
    Ok = 0, sys::FI_SUCCESS, c"success";
    Flushed = 1, libc::EHOSTDOWN, c"flushed, as the queue pair is in error";
    QueuePair = 2, sys::FI_EINVAL, c"a fault of the queue pair's own";
    LocalKey = 5, sys::FI_EINVAL, c"local key invalid, or does not cover the buffer";
    LocalLength = 6, sys::FI_EMSGSIZE, c"message longer than the buffer";
    RemoteAddress = 7, sys::FI_EINVAL, c"remote key not registered, or does not cover the address";
    RemoteQpn = 9, sys::FI_ENOTCONN, c"no such queue pair at the remote device";
    RemoteLength = 11, sys::FI_EMSGSIZE, c"remote buffer too short";
    Unresponsive = 13, sys::FI_ECONNABORTED, c"remote was responsive, and is no longer";
    UnknownPeer = 14, sys::FI_ENOTCONN, c"the remote side does not know this address, as writes require";
    Unreachable = 15, sys::FI_EHOSTUNREACH, c"remote never responded";
    Feature = 18, sys::FI_EOTHER, c"the two sides differ in how a write with data is received";
}
