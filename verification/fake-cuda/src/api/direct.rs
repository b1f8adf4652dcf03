//! What lets NICs at a GPU's memory.

use super::{Out, calls};
use crate::code;
use crate::config;
use crate::memory::Kind;
use crate::nic;
use crate::violation::broken;
use crate::world::begin;
use cudarc::driver::sys as cu;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::IntoRawFd as _;
use std::sync::atomic::Ordering;

calls! {
    fn cuMemGetHandleForAddressRange(
        handle: *mut c_void,
        address: u64,
        bytes: usize,
        kind: c_uint,
        flags: c_ulonglong,
    ) {
        let world = begin("cuMemGetHandleForAddressRange");
        world.current("cuMemGetHandleForAddressRange");
        let handle = Out::<c_int>(handle.cast());
        handle.is_there()?;
        let file = cu::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as c_uint;
        if kind != file || flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        if !config::get().is_ok_and(|config| config.dma_buf) {
            return Err(code::NOT_SUPPORTED);
        }
        handle.put(nic::export(&world.memory, address, bytes as u64)?.into_raw_fd())
    }

    /// Of the whole allocation that the address is in; none that was mapped by hand.
    fn cuPointerSetAttribute(value: *const c_void, attribute: c_uint, address: u64) {
        let world = begin("cuPointerSetAttribute");
        if attribute != cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as c_uint {
            broken!(NotModelled, "cuPointerSetAttribute {attribute}");
        }
        let range = world.memory.at(address).ok_or(code::INVALID_VALUE)?;
        if range.gpu().is_none() || value.is_null() {
            return Err(code::INVALID_VALUE);
        }
        if matches!(range.kind, Kind::Mapped { .. }) {
            return Err(code::NOT_SUPPORTED);
        }
        // SAFETY: not null, so a number of the attribute's size: the caller's promise.
        let yes = unsafe { value.cast::<c_uint>().read_unaligned() } != 0;
        range.synchronous.store(yes, Ordering::Relaxed);
        Ok(())
    }

    fn cuFlushGPUDirectRDMAWrites(target: c_uint, scope: c_uint) {
        use cu::CUflushGPUDirectRDMAWritesScope as S;
        use cu::CUflushGPUDirectRDMAWritesTarget as T;
        let gpu = begin("cuFlushGPUDirectRDMAWrites").current("cuFlushGPUDirectRDMAWrites").gpu;
        let scopes = [
            S::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER as c_uint,
            S::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES as c_uint,
        ];
        if target != T::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX as c_uint
            || !scopes.contains(&scope)
        {
            return Err(code::INVALID_VALUE);
        }
        nic::flush(gpu);
        Ok(())
    }
}
