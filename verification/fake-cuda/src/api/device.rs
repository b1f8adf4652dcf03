//! The driver itself, its GPUs, and their contexts.

use super::{Out, calls};
use crate::code::{self, Answer};
use crate::config::{self, Config, SMS};
use crate::memory;
use crate::violation::broken;
use crate::world::{begin, initialize, stack};
use cudarc::driver::sys as cu;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

/// CUDA 13.0.
const VERSION: c_int = 13_000;
/// As an H200, but for its number of SMs.
const CAPABILITY: (c_int, c_int) = (9, 0);
/// What a block may have of shared memory on such a GPU, if it asks.
const SHARED_BYTES: c_int = 227 << 10;
/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`.
const OWNER_SEES: c_int = 100;
/// The first GPU's bus.
const FIRST_BUS: u8 = 0x10;

fn config() -> Answer<&'static Config> {
    config::get().map_err(|_| code::INVALID_VALUE)
}

/// The number on the machine of a GPU that this process calls `device`.
pub(super) fn gpu(device: c_int) -> Answer<u8> {
    let index = usize::try_from(device).map_err(|_| code::INVALID_DEVICE)?;
    config()?.visible.get(index).copied().ok_or(code::INVALID_DEVICE)
}

/// What this process calls a GPU; `CU_DEVICE_INVALID` if it does not see it.
pub(super) fn ordinal(gpu: u8) -> c_int {
    const INVALID: c_int = -2;
    let visible = config().map_or(&[][..], |config| &config.visible);
    let index = visible.iter().position(|&one| one == gpu);
    index.and_then(|index| c_int::try_from(index).ok()).unwrap_or(INVALID)
}

/// Writes text and its zero, as much as there is room for.
fn text(to: *mut c_char, room: c_int, text: &str) -> Answer {
    let room = usize::try_from(room).map_err(|_| code::INVALID_VALUE)?;
    if to.is_null() || room == 0 {
        return Err(code::INVALID_VALUE);
    }
    let bytes = text.len().min(room - 1);
    // SAFETY: the caller has `room` bytes there; written are `bytes`, less than that, and a zero.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), bytes);
        to.add(bytes).write(0);
    }
    Ok(())
}

calls! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        match config::get() {
            Err(why) => {
                // Nobody else can say it: the caller learns a number only.
                eprintln!("fake-cuda: {why}");
                Err(code::INVALID_VALUE)
            }
            Ok(config) if config.visible.is_empty() => Err(code::NO_DEVICE),
            Ok(_) => {
                initialize();
                Ok(())
            }
        }
    }

    fn cuDriverGetVersion(version: Out<c_int>) {
        version.put(VERSION)
    }

    fn cuGetErrorName(error: c_uint, name: Out<*const c_char>) {
        let (words, _) = code::words(error).ok_or(code::INVALID_VALUE)?;
        name.put(words)
    }

    fn cuGetErrorString(error: c_uint, text: Out<*const c_char>) {
        let (_, words) = code::words(error).ok_or(code::INVALID_VALUE)?;
        text.put(words)
    }

    fn cuGetProcAddress_v2(
        symbol: *const c_char,
        address: Out<*mut c_void>,
        _version: c_int,
        _flags: u64,
        status: Out<c_uint>,
    ) {
        if symbol.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: not null, so a text with its zero: the caller's promise.
        let name = unsafe { CStr::from_ptr(symbol) }.to_str().map_err(|_| code::INVALID_VALUE)?;
        let found = super::find(name);
        address.put(found.unwrap_or(ptr::null_mut()))?;
        if status.is_there().is_ok() {
            status.put(u32::from(found.is_none()))?;
        }
        found.map(|_| ()).ok_or(code::NOT_FOUND)
    }

    fn cuDeviceGetCount(count: Out<c_int>) {
        let _world = begin("cuDeviceGetCount");
        count.put(c_int::try_from(config()?.visible.len()).map_err(|_| code::INVALID_VALUE)?)
    }

    fn cuDeviceGet(device: Out<cu::CUdevice>, ordinal: c_int) {
        let _world = begin("cuDeviceGet");
        gpu(ordinal)?;
        device.put(ordinal)
    }

    fn cuDeviceGetName(name: *mut c_char, room: c_int, device: cu::CUdevice) {
        let _world = begin("cuDeviceGetName");
        gpu(device)?;
        text(name, room, "immwire's stand-in for a GPU")
    }

    fn cuDeviceGetPCIBusId(name: *mut c_char, room: c_int, device: cu::CUdevice) {
        let _world = begin("cuDeviceGetPCIBusId");
        text(name, room, &format!("0000:{:02x}:00.0", FIRST_BUS + gpu(device)?))
    }

    /// The same for a GPU in all processes of all machines.
    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: cu::CUdevice) {
        let _world = begin("cuDeviceGetUuid");
        let gpu = gpu(device)?;
        let mut bytes = *b"fake-cuda-gpu-00";
        (bytes[14], bytes[15]) = (b'0' + gpu / 10, b'0' + gpu % 10);
        uuid.put(bytes)
    }

    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_uint, device: cu::CUdevice) {
        use cu::CUdevice_attribute as A;
        let _world = begin("cuDeviceGetAttribute");
        let gpu = gpu(device)?;
        let is = |known: A| attribute == known as c_uint;
        let answer = if is(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) {
            CAPABILITY.0
        } else if is(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) {
            CAPABILITY.1
        } else if is(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) {
            c_int::try_from(SMS).map_err(|_| code::INVALID_VALUE)?
        } else if is(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) {
            SHARED_BYTES
        } else if is(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) {
            c_int::from(FIRST_BUS + gpu)
        } else if is(A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)
            || is(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)
            || is(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
            || is(A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)
            || is(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)
            || is(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
            || is(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)
        {
            1
        } else if is(A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) {
            c_int::from(config()?.dma_buf)
        } else if is(A::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) {
            c_int::from(config()?.host_pointers)
        } else if is(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) {
            if config()?.unordered { 0 } else { OWNER_SEES }
        } else if is(A::CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED)
            || is(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)
            || is(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)
            || is(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)
            || is(A::CU_DEVICE_ATTRIBUTE_INTEGRATED)
        {
            0
        } else {
            broken!(NotModelled, "cuDeviceGetAttribute {attribute}");
        };
        value.put(answer)
    }

    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: cu::CUdevice, peer: cu::CUdevice) {
        let _world = begin("cuDeviceCanAccessPeer");
        let (from, to) = (gpu(device)?, gpu(peer)?);
        can.put(c_int::from(from != to && memory::can_reach(from, to)))
    }

    fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: cu::CUdevice) {
        let mut world = begin("cuDevicePrimaryCtxRetain");
        let gpu = gpu(device)?;
        context.is_there()?;
        context.put(world.retain(gpu))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: cu::CUdevice) {
        let mut world = begin("cuDevicePrimaryCtxRelease");
        world.release(gpu(device)?);
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: u64) {
        begin("cuCtxPushCurrent").context("cuCtxPushCurrent", context);
        stack(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: Out<u64>) {
        drop(begin("cuCtxPopCurrent"));
        let Some(popped) = stack(Vec::pop) else {
            broken!(PoppedTooOften, "cuCtxPopCurrent");
        };
        if context.is_there().is_ok() {
            context.put(popped)?;
        }
        Ok(())
    }

    /// Captures are lost by it, aside of them or not (seen on driver 580.159.04).
    fn cuCtxSynchronize() {
        let streams = {
            let world = begin("cuCtxSynchronize");
            if !world.captures.is_empty() {
                broken!(Captured, "cuCtxSynchronize");
            }
            world.streams_of(world.current("cuCtxSynchronize").context)
        };
        for stream in streams {
            stream.wait(stream.enqueued());
        }
        Ok(())
    }

    fn cuCtxGetFlags(flags: Out<c_uint>) {
        let world = begin("cuCtxGetFlags");
        let current = world.current("cuCtxGetFlags").context;
        flags.put(world.context("cuCtxGetFlags", current).flags)
    }

    /// Of those that may be set the one that matters here.
    fn cuCtxSetFlags(flags: c_uint) {
        let mut world = begin("cuCtxSetFlags");
        let current = world.current("cuCtxSetFlags").context;
        if flags & !(cu::CUctx_flags::CU_CTX_SYNC_MEMOPS as c_uint) != 0 {
            broken!(NotModelled, "cuCtxSetFlags {flags:#x}");
        }
        if let Some(context) = world.contexts.get_mut(&current) {
            context.flags = flags;
        }
        Ok(())
    }

    /// 0 if none is.
    fn cuCtxGetCurrent(context: Out<u64>) {
        drop(begin("cuCtxGetCurrent"));
        context.put(stack(|stack| stack.last().copied().unwrap_or(0)))
    }

    fn cuCtxEnablePeerAccess(peer: u64, flags: c_uint) {
        let mut world = begin("cuCtxEnablePeerAccess");
        let from = world.current("cuCtxEnablePeerAccess").gpu;
        let to = world.context("cuCtxEnablePeerAccess", peer).gpu;
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        if from == to {
            return Err(code::INVALID_CONTEXT);
        }
        if !memory::can_reach(from, to) {
            return Err(code::PEER_ACCESS_UNSUPPORTED);
        }
        match world.memory.peers.insert((from, to)) {
            true => Ok(()),
            false => Err(code::PEER_ACCESS_ALREADY_ENABLED),
        }
    }
}
