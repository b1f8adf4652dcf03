//! What is allowed, and does what it is documented to.

use crate::rig::*;
use crate::{call, got, ok};
use cudarc::driver::sys::{self as cu, CUpointer_attribute as P, CUresult};
use immwire_cuda::args::{RELEASE_ADD, RELEASE_NONE, RELEASE_STORE};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes that tell where they are.
fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    (0..bytes as u64)
        .map(|i| ((i ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
        .collect()
}

/// A GPU's memory with a pattern in it.
fn painted(gpu: &Gpu, bytes: usize, seed: u64) -> u64 {
    let (memory, host) = (gpu.alloc(bytes), pinned(bytes));
    host.bytes(bytes).copy_from_slice(&pattern(bytes, seed));
    gpu.copy(memory, host.0, bytes);
    memory
}

/// What the driver is asked for by others: all of it is there.
const NAMES: [&str; 71] = [
    "cuInit",
    "cuCtxEnablePeerAccess",
    "cuCtxGetCurrent",
    "cuCtxGetFlags",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuCtxSetFlags",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetUuid",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuFlushGPUDirectRDMAWrites",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetProcAddress",
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle",
    "cuLaunchHostFunc",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemGetAddressRange",
    "cuMemGetAllocationGranularity",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemGetHandleForAddressRange",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemRetainAllocationHandle",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuPointerGetAttribute",
    "cuPointerSetAttribute",
    "cuStreamBeginCapture",
    "cuStreamCreate",
    "cuStreamDestroy",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamWaitValue64",
    "cuStreamWriteValue64",
    "cuThreadExchangeStreamCaptureMode",
];

#[test]
fn calls_are_found_by_name() {
    run("kept::calls_are_found_by_name", End::Kept, &[], || {
        let mut addresses = BTreeSet::new();
        for name in NAMES {
            let name = CString::new(name).unwrap();
            let (mut address, mut status) = (
                null_mut(),
                cu::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
            );
            ok!(cuGetProcAddress_v2(name.as_ptr(), &raw mut address, 13000, 0, &raw mut status));
            assert_eq!(status, cu::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS);
            addresses.insert(address);
        }
        assert_eq!(addresses.len(), NAMES.len());
        let mut address = null_mut();
        let answer = call!(cuGetProcAddress_v2(
            c"cuGraphCreate".as_ptr(),
            &raw mut address,
            13000,
            0,
            null_mut()
        ));
        assert_eq!(answer, CUresult::CUDA_ERROR_NOT_FOUND);
        assert!(address.is_null());

        let mut text = null();
        ok!(cuGetErrorName(CUresult::CUDA_ERROR_NOT_READY, &raw mut text));
        // SAFETY: a text of the library's, which lives as long as the process.
        assert_eq!(unsafe { CStr::from_ptr(text) }, c"CUDA_ERROR_NOT_READY");
        ok!(cuGetErrorString(CUresult::CUDA_SUCCESS, &raw mut text));
        // SAFETY: as above.
        assert_eq!(unsafe { CStr::from_ptr(text) }, c"no error");
        assert_eq!(got!(cuDriverGetVersion()), 13_000);
    });
}

#[test]
fn gpus_are_what_they_are_said_to_be() {
    run(
        "kept::gpus_are_what_they_are_said_to_be",
        End::Kept,
        &[("IMMWIRE_FAKE_CUDA_GPUS", "12"), ("CUDA_VISIBLE_DEVICES", "11,3")],
        || {
            ok!(cuInit(0));
            assert_eq!(got!(cuDeviceGetCount()), 2);
            let mut device = 0;
            assert_eq!(call!(cuDeviceGet(&raw mut device, 2)), CUresult::CUDA_ERROR_INVALID_DEVICE);
            let uuid = |device| {
                let uuid: cu::CUuuid = got!(cuDeviceGetUuid_v2(device));
                uuid.bytes.map(i8::cast_unsigned)
            };
            assert_eq!([uuid(0), uuid(1)], [*b"fake-cuda-gpu-11", *b"fake-cuda-gpu-03"]);
            let mut bus = [0; 16];
            ok!(cuDeviceGetPCIBusId(bus.as_mut_ptr(), 16, 0));
            assert_eq!(&bus.map(i8::cast_unsigned)[..13], b"0000:1b:00.0\0");
            use cu::CUdevice_attribute as A;
            assert_eq!(
                got!(cuDeviceGetAttribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 1)),
                9
            );
            assert_eq!(
                got!(cuDeviceGetAttribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1)),
                8
            );
            assert_eq!(got!(cuDeviceCanAccessPeer(0, 1)), 1);
        },
    );
}

#[test]
fn no_gpus() {
    run("kept::no_gpus", End::Kept, &[("IMMWIRE_FAKE_CUDA_GPUS", "0")], || {
        assert_eq!(call!(cuInit(0)), CUresult::CUDA_ERROR_NO_DEVICE);
    });
}

#[test]
fn contexts_are_kept_and_stacked() {
    run("kept::contexts_are_kept_and_stacked", End::Kept, &[], || {
        let current = || -> cu::CUcontext { got!(cuCtxGetCurrent()) };
        let gpu = Gpu::open(0);
        assert_eq!(got!(cuDevicePrimaryCtxRetain(0)), gpu.context);
        let other = Gpu::open(1);
        assert_eq!(current(), other.context);
        let mut popped = null_mut();
        ok!(cuCtxPopCurrent_v2(&raw mut popped));
        assert_eq!((popped, current()), (other.context, gpu.context));
        ok!(cuCtxPopCurrent_v2(null_mut()));
        assert!(current().is_null());
        ok!(cuDevicePrimaryCtxRelease_v2(0));
        ok!(cuCtxPushCurrent_v2(gpu.context));
        gpu.alloc(64);
        ok!(cuDevicePrimaryCtxRelease_v2(0));
    });
}

#[test]
fn refusals_are_answers() {
    run("kept::refusals_are_answers", End::Kept, &[("IMMWIRE_FAKE_CUDA_NO_PEER", "1")], || {
        let gpu = Gpu::open(0);
        let other = Gpu::open(1);
        assert_eq!(got!(cuDeviceCanAccessPeer(0, 1)), 0);
        assert_eq!(
            call!(cuCtxEnablePeerAccess(gpu.context, 0)),
            CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
        );
        let properties = properties(0);
        let address = map(&[got!(cuMemCreate(GRANULE, &raw const properties, 0))]);
        assert_eq!(allow(address, GRANULE, 1, WRITE), CUresult::CUDA_ERROR_INVALID_DEVICE);
        let mut handle = 0;
        let odd = call!(cuMemCreate(&raw mut handle, GRANULE + 4096, &raw const properties, 0));
        assert_eq!(odd, CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(call!(cuMemAlloc_v2(null_mut(), 64)), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(call!(cuMemAlloc_v2(&raw mut handle, 0)), CUresult::CUDA_ERROR_INVALID_VALUE);
        let mut function = null_mut();
        let unknown = call!(cuModuleGetFunction(&raw mut function, gpu.module, c"f".as_ptr()));
        assert_eq!(unknown, CUresult::CUDA_ERROR_NOT_FOUND);

        let mut bytes = [0_u8; 128];
        let at =
            |offset: usize, bytes: &mut [u8; 128]| bytes[offset..].as_mut_ptr().cast::<c_void>();
        let place = at(0, &mut bytes);
        assert_eq!(
            call!(cuMemHostUnregister(place)),
            CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
        );
        ok!(cuMemHostRegister_v2(place, 64, 0));
        let again = call!(cuMemHostRegister_v2(at(63, &mut bytes), 64, 0));
        assert_eq!(again, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        ok!(cuMemHostUnregister(place));
        // What was allocated pinned is not pinned again, and not under that name.
        let mut own = null_mut();
        ok!(cuMemHostAlloc(&raw mut own, 64, 0));
        let again = call!(cuMemHostRegister_v2(own, 64, 0));
        assert_eq!(again, CUresult::CUDA_ERROR_INVALID_VALUE);
        ok!(cuMemFreeHost(own));

        // A handle is for other processes.
        let handle: cu::CUipcMemHandle = got!(cuIpcGetMemHandle(other.alloc(64)));
        let mut opened = 0;
        let mine = call!(cuIpcOpenMemHandle_v2(&raw mut opened, handle, 1));
        assert_eq!(mine, CUresult::CUDA_ERROR_INVALID_CONTEXT);
        let nobody = cu::CUipcMemHandle { reserved: [1; 64] };
        let foreign = call!(cuIpcOpenMemHandle_v2(&raw mut opened, nobody, 1));
        assert_eq!(foreign, CUresult::CUDA_ERROR_INVALID_HANDLE);
        let mut handle = nobody;
        let mapped = call!(cuIpcGetMemHandle(&raw mut handle, address));
        assert_eq!(mapped, CUresult::CUDA_ERROR_INVALID_VALUE);
    });
}

#[test]
fn addresses_tell_what_they_are_of() {
    run("kept::addresses_tell_what_they_are_of", End::Kept, &[], || {
        Gpu::open(0);
        let gpu = Gpu::open(1);
        let (memory, host, plain) = (gpu.alloc(100), pinned(50), 7_u64);
        let kind = |address| attribute::<u32>(P::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
        assert_eq!((kind(memory), kind(memory + 99), kind(host.0)), (Ok(2), Ok(2), Ok(1)));
        let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(
            (kind(memory + 100), kind(memory - 1), kind(&raw const plain as u64)),
            (invalid, invalid, invalid)
        );
        let ordinal = attribute::<i32>(P::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory);
        let managed = attribute::<i32>(P::CU_POINTER_ATTRIBUTE_IS_MANAGED, memory);
        assert_eq!((ordinal, managed), (Ok(1), Ok(0)));
        let start = attribute::<u64>(P::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, memory + 7);
        let bytes = attribute::<usize>(P::CU_POINTER_ATTRIBUTE_RANGE_SIZE, memory + 7);
        assert_eq!((start, bytes), (Ok(memory), Ok(100)));
        // By what it maps it, the driver does not tell how much was allocated.
        let start = attribute::<u64>(P::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, memory + 7);
        let bytes = attribute::<usize>(P::CU_POINTER_ATTRIBUTE_MAPPING_SIZE, memory + 7);
        assert_eq!((start, bytes), (Ok(memory), Ok(GRANULE)));
        let (mut start, mut bytes) = (0, 0);
        ok!(cuMemGetAddressRange_v2(&raw mut start, &raw mut bytes, host.0 + 49));
        assert_eq!((start, bytes), (host.0, 50));
        let properties = properties(0);
        let mapped = map(&[got!(cuMemCreate(GRANULE, &raw const properties, 0))]);
        let by_handle =
            |address| attribute::<i32>(P::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address);
        assert_eq!(
            (by_handle(memory), by_handle(mapped), by_handle(host.0)),
            (Ok(1), Ok(0), Ok(0))
        );
        // Another one at the same place is another one.
        let number =
            |address| attribute::<u64>(P::CU_POINTER_ATTRIBUTE_BUFFER_ID, address).unwrap();
        let before = number(memory);
        ok!(cuMemFree_v2(memory));
        assert_ne!(number(gpu.alloc(100)), before);
    });
}

#[test]
fn copies_and_fills() {
    run("kept::copies_and_fills", End::Kept, &[("IMMWIRE_FAKE_CUDA_SEED", "1")], || {
        let gpu = Gpu::open(0);
        for bytes in [1, 7, 4096, 4097, 100_000, 1 << 20] {
            let memory = painted(&gpu, bytes, 1);
            assert_eq!(gpu.read(memory, bytes), pattern(bytes, 1));
            let other = gpu.alloc(bytes + 2);
            gpu.copy(other + 1, memory, bytes);
            let read = gpu.read(other, bytes + 2);
            assert_eq!((read[0], read[bytes + 1], &read[1..=bytes]), (0, 0, &*pattern(bytes, 1)));
            ok!(cuMemFree_v2(memory));
            ok!(cuMemFree_v2(other));
        }
        // Cleared in part, by the page and across pages.
        let long = 40 << 20;
        let memory = got!(cuMemAlloc_v2(long));
        ok!(cuMemsetD8Async(memory, 7, long, gpu.stream));
        ok!(cuMemsetD8Async(memory + 100, 0, long - 300, gpu.stream));
        let read = gpu.read(memory, long);
        let cleared = |i: usize| (100..long - 200).contains(&i);
        assert!((0..long).all(|i| (read[i] == 0) == cleared(i) && [0, 7].contains(&read[i])));
        ok!(cuMemFree_v2(memory));
        let address: u64 = got!(cuMemAlloc_v2(64));
        assert!(gpu.read(address, 64).iter().all(|&byte| byte != 0), "new memory is not zero");
        let mut host = pattern(64, 2);
        ok!(cuMemHostRegister_v2(host.as_mut_ptr().cast(), 64, 0));
        gpu.copy(address, host.as_ptr() as u64, 64);
        ok!(cuMemHostUnregister(host.as_mut_ptr().cast()));
        assert_eq!(gpu.read(address, 64), host);
        // Plain memory is done with when the call returns.
        let (memory, mut plain) = (painted(&gpu, 100_000, 4), vec![0; 100_000]);
        ok!(cuMemcpyAsync(plain.as_mut_ptr() as u64, memory, 100_000, gpu.stream));
        assert_eq!(plain, pattern(100_000, 4));
        plain.copy_from_slice(&pattern(100_000, 5));
        ok!(cuMemcpyAsync(memory, plain.as_ptr() as u64, 100_000, gpu.stream));
        plain.fill(0);
        assert_eq!(gpu.read(memory, 100_000), pattern(100_000, 5));
    });
}

#[test]
fn words_are_released_last() {
    // Each says that the bytes are there, and that nothing of the launch is used any more.
    run("kept::words_are_released_last", End::Kept, &[("IMMWIRE_FAKE_CUDA_SEED", "2")], || {
        const COUNT: u32 = 64;
        let gpu = Gpu::open(0);
        let (word, arrivals) = (pinned(8), gpu.alloc(4));
        for round in 1..=60_u64 {
            let kernel = [Kernel::Any, Kernel::Vector, Kernel::Bulk][round as usize % 3];
            let bytes = (PAGE * u64::from(COUNT)) as usize;
            let (from, to) = (painted(&gpu, bytes, round), pinned(bytes));
            let launch = pages(kernel, from, to.0, COUNT);
            gpu.launch(&launch.releasing(RELEASE_STORE, word.0, round, arrivals));
            await_word(word.word(0), round);
            ok!(cuMemFree_v2(from));
            let landed = to.bytes(bytes).to_vec();
            ok!(cuMemFreeHost(to.0 as *mut c_void));
            assert_eq!(landed, pattern(bytes, round), "round {round}");
        }
    });
}

#[test]
fn pieces_land_in_any_order() {
    run("kept::pieces_land_in_any_order", End::Kept, &[("IMMWIRE_FAKE_CUDA_SEED", "6")], || {
        const COUNT: usize = 256;
        let gpu = Gpu::open(0);
        let (to, word, arrivals) = (pinned(COUNT * 4096), pinned(8), gpu.alloc(4));
        let from = gpu.alloc(COUNT * 4096);
        ok!(cuMemsetD8Async(from, 1, COUNT * 4096, gpu.stream));
        word.bytes(8).fill(0);
        // Pages whose first byte is there, and not that of a page before them.
        let mut overtook = 0;
        for round in 1..=40 {
            to.bytes(COUNT * 4096).fill(0);
            let launch = pages(Kernel::Vector, from, to.0, COUNT as u32);
            gpu.launch(&launch.releasing(RELEASE_STORE, word.0, round, arrivals));
            while word.word(0).load(Ordering::Acquire) != round {
                let there = |page: u64| to.word(512 * page).load(Ordering::Relaxed) != 0;
                let first_missing = (0..COUNT as u64).find(|&page| !there(page));
                let missing = first_missing.unwrap_or(COUNT as u64);
                overtook += (missing..COUNT as u64).filter(|&page| there(page)).count();
            }
        }
        assert!(overtook > 0);
    });
}

#[test]
fn pages_go_where_tables_say() {
    run("kept::pages_go_where_tables_say", End::Kept, &[("IMMWIRE_FAKE_CUDA_SEED", "3")], || {
        let gpu = Gpu::open(0);
        let (from, to, word) = (painted(&gpu, 1 << 16, 3), gpu.alloc(1 << 16), gpu.alloc(8));
        let (entries, tables) = (pinned(64), gpu.alloc(64));
        let table: Vec<u32> = vec![3, 9, 1, 0, 15, 14, 7, 2];
        for (entry, index) in entries.bytes(32).chunks_exact_mut(4).zip(&table) {
            entry.copy_from_slice(&index.to_le_bytes());
        }
        let arrivals = gpu.alloc(4);
        for (round, kernel) in [Kernel::Any, Kernel::Vector, Kernel::Bulk].into_iter().enumerate() {
            ok!(cuMemsetD8Async(to, 0, 1 << 16, gpu.stream));
            // The table is written in the stream, before the launch that reads it.
            ok!(cuMemcpyAsync(tables, entries.0, 32, gpu.stream));
            let launch = pages(kernel, from, to, 8).releasing(RELEASE_ADD, word, 5, arrivals);
            gpu.launch(&launch.with(|a| a.target.table = tables));
            gpu.settle();
            let (landed, sent) = (gpu.read(to, 1 << 16), pattern(1 << 16, 3));
            let page = |bytes: &[u8], i: usize| bytes[i * 4096..][..4096].to_vec();
            for i in 0..16 {
                match table.iter().position(|&index| index as usize == i) {
                    Some(source) => assert_eq!(page(&landed, i), page(&sent, source)),
                    None => assert!(page(&landed, i).iter().all(|&byte| byte == 0)),
                }
            }
            assert_eq!(gpu.read(word, 8), (5 * (round as u64 + 1)).to_le_bytes());
        }
        gpu.launch(&pages(Kernel::Any, 0, 0, 0).releasing(RELEASE_NONE, 1, 1, 1));
        gpu.settle();
    });
}

#[test]
fn words_hold_streams_back() {
    run("kept::words_hold_streams_back", End::Kept, &[], || {
        let gpu = Gpu::open(0);
        let (word, seen) = (pinned(8), pinned(8));
        let not_before = |flags, value, before: &[u64], after| {
            word.word(0).store(before[0], Ordering::Release);
            seen.word(0).store(0, Ordering::Release);
            ok!(cuStreamWaitValue64_v2(gpu.stream, word.0, value, flags));
            ok!(cuStreamWriteValue64_v2(gpu.stream, seen.0, 1, 0));
            for &number in before {
                word.word(0).store(number, Ordering::Release);
                std::thread::sleep(Duration::from_millis(2));
                assert_eq!(seen.word(0).load(Ordering::Acquire), 0, "{flags} {number}");
                assert_eq!(call!(cuStreamQuery(gpu.stream)), CUresult::CUDA_ERROR_NOT_READY);
            }
            word.word(0).store(after, Ordering::Release);
            await_word(seen.word(0), 1);
        };
        not_before(0, 10, &[9, 0, 10_u64.wrapping_sub(1 << 63)], 11);
        not_before(0, 1, &[u64::MAX, 0], 1);
        not_before(1, 10, &[9, 11], 10);
        not_before(2, 6, &[1, 8], 4);
        not_before(3, u64::MAX << 1, &[1, 3], 2);
        gpu.settle();
        ok!(cuStreamQuery(gpu.stream));
    });
}

#[test]
fn events_are_done_in_order() {
    run("kept::events_are_done_in_order", End::Kept, &[("IMMWIRE_FAKE_CUDA_SEED", "4")], || {
        let gpu = Gpu::open(0);
        let (first, second): (cu::CUevent, cu::CUevent) =
            (got!(cuEventCreate(0)), got!(cuEventCreate(0)));
        ok!(cuEventQuery(first));
        let mut time = 0.0;
        assert_eq!(
            call!(cuEventElapsedTime_v2(&raw mut time, first, second)),
            CUresult::CUDA_ERROR_INVALID_HANDLE
        );
        let go = gpu.hold();
        ok!(cuEventRecord(first, gpu.stream));
        assert_eq!(call!(cuEventQuery(first)), CUresult::CUDA_ERROR_NOT_READY);
        // Another GPU's stream waits for it, and one that is destroyed with its work goes on.
        let other = Gpu::open(1);
        let word = pinned(8);
        word.word(0).store(0, Ordering::Release);
        ok!(cuStreamWaitEvent(other.stream, first, 0));
        ok!(cuStreamWriteValue64_v2(other.stream, word.0, 7, 0));
        ok!(cuStreamDestroy_v2(other.stream));
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(word.word(0).load(Ordering::Acquire), 0);
        go.store(1, Ordering::Release);
        await_word(word.word(0), 7);
        ok!(cuCtxPushCurrent_v2(gpu.context));
        ok!(cuEventRecord(second, gpu.stream));
        gpu.settle();
        ok!(cuEventQuery(second));
        ok!(cuEventElapsedTime_v2(&raw mut time, first, second));
        assert!((2e-6..20e3).contains(&time), "{time} ms");
        ok!(cuEventDestroy_v2(first));
    });
}

#[test]
fn host_functions_run_in_order() {
    run("kept::host_functions_run_in_order", End::Kept, &[("IMMWIRE_FAKE_CUDA_SEED", "5")], || {
        unsafe extern "C" fn look(place: *mut c_void) {
            // SAFETY: two words of pinned memory.
            let words = unsafe { std::slice::from_raw_parts(place.cast::<AtomicU64>(), 2) };
            words[1].store(words[0].load(Ordering::Acquire) + 1, Ordering::Release);
        }
        // Of the default stream as well.
        let gpu = Gpu::open(0);
        for stream in [gpu.stream, null_mut()] {
            let words = pinned(16);
            words.bytes(16).fill(0);
            ok!(cuStreamWriteValue64_v2(stream, words.0, 41, 0));
            ok!(cuLaunchHostFunc(stream, Some(look), words.0 as *mut c_void));
            ok!(cuStreamSynchronize(stream));
            assert_eq!(words.word(1).load(Ordering::Acquire), 42);
        }
    });
}

#[test]
fn peers_reach_each_other() {
    run("kept::peers_reach_each_other", End::Kept, &[], || {
        let gpu = Gpu::open(0);
        let from = painted(&gpu, 1 << 16, 6);
        let other = Gpu::open(1);
        let to = other.alloc(1 << 16);
        ok!(cuCtxEnablePeerAccess(gpu.context, 0));
        assert_eq!(
            call!(cuCtxEnablePeerAccess(gpu.context, 0)),
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
        );
        other.launch(&pages(Kernel::Bulk, from, to, 16));
        other.settle();
        assert_eq!(other.read(to, 1 << 16), pattern(1 << 16, 6));
    });
}

#[test]
fn mapped_memory_is_mapped_in_parts() {
    run("kept::mapped_memory_is_mapped_in_parts", End::Kept, &[], || {
        let gpu = Gpu::open(0);
        let (near, far) = (properties(0), properties(1));
        assert_eq!(
            got!(cuMemGetAllocationGranularity(
                &raw const near,
                cu::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM
            )),
            GRANULE
        );
        let (one, two): (u64, u64) = (
            got!(cuMemCreate(GRANULE, &raw const near, 0)),
            got!(cuMemCreate(GRANULE, &raw const far, 0)),
        );
        let address = map(&[one, two]);
        assert!(address.is_multiple_of(GRANULE as u64));
        assert_eq!(allow(address, 2 * GRANULE, 0, WRITE), CUresult::CUDA_SUCCESS);
        // Mapped memory lives without its handles, and gives them back.
        ok!(cuMemRelease(one));
        ok!(cuMemRelease(two));
        let (edge, host) = (address + GRANULE as u64 - 1000, pinned(2000));
        host.bytes(2000).copy_from_slice(&pattern(2000, 7));
        gpu.copy(edge, host.0, 2000);
        assert_eq!(gpu.read(edge, 2000), pattern(2000, 7));
        let again: u64 =
            got!(cuMemRetainAllocationHandle((address + GRANULE as u64) as *mut c_void));
        assert_eq!(
            got!(cuMemRetainAllocationHandle((address + GRANULE as u64 + 5) as *mut c_void)),
            again
        );
        let mut of = properties(0);
        ok!(cuMemGetAllocationPropertiesFromHandle(&raw mut of, again));
        assert_eq!(of.location.id, 1);
        // The same memory at another place.
        let other = map(&[again]);
        assert_eq!(allow(other, GRANULE, 0, READ), CUresult::CUDA_SUCCESS);
        assert_eq!(gpu.read(other, 1000), pattern(2000, 7)[1000..]);
        // Several mappings go one by one, in any order, or all at once.
        ok!(cuMemUnmap(address, 2 * GRANULE));
        ok!(cuMemAddressFree(address, 2 * GRANULE));
        let once_more = map(&[again, again]);
        ok!(cuMemUnmap(once_more + GRANULE as u64, GRANULE));
        ok!(cuMemMap(once_more + GRANULE as u64, GRANULE, 0, again, 0));
        ok!(cuMemUnmap(once_more, GRANULE));
        ok!(cuMemUnmap(once_more + GRANULE as u64, GRANULE));
        ok!(cuMemAddressFree(once_more, 2 * GRANULE));
        assert_eq!(gpu.read(other, 1000), pattern(2000, 7)[1000..]);
    });
}

/// What was taken by hand is counted until it is given back, each part of it.
#[test]
fn what_is_kept_is_counted() {
    run("kept::what_is_kept_is_counted", End::Kept, &[], || {
        ok!(cuInit(0));
        let properties = properties(0);
        assert_eq!(kept(), 0);
        let one = got!(cuMemCreate(GRANULE, &raw const properties, 0));
        assert_eq!(kept(), 1);
        let address = map(&[one, one]);
        let again: u64 = got!(cuMemRetainAllocationHandle(address as *mut c_void));
        assert_eq!((again, kept()), (one, 5));
        ok!(cuMemRelease(one));
        ok!(cuMemRelease(again));
        assert_eq!(kept(), 3);
        ok!(cuMemUnmap(address, GRANULE));
        assert_eq!(kept(), 2);
        ok!(cuMemUnmap(address + GRANULE as u64, GRANULE));
        ok!(cuMemAddressFree(address, 2 * GRANULE));
        assert_eq!(kept(), 0);
    });
}

/// Mappings side by side in one reservation are one range to the driver, and several mappings.
#[test]
fn mappings_side_by_side_are_one_range() {
    run("kept::mappings_side_by_side_are_one_range", End::Kept, &[], || {
        Gpu::open(0);
        let properties = properties(0);
        let granule = GRANULE as u64;
        let address = map(&[(); 7].map(|()| got!(cuMemCreate(GRANULE, &raw const properties, 0))));
        // A hole at the first, and at the fourth.
        ok!(cuMemUnmap(address, GRANULE));
        ok!(cuMemUnmap(address + 3 * granule, GRANULE));
        map(&[got!(cuMemCreate(GRANULE, &raw const properties, 0))]);
        for (n, first, count) in [(1, 1, 2), (2, 1, 2), (4, 4, 3), (5, 4, 3), (6, 4, 3)] {
            let mapped = address + n * granule;
            for at in [mapped, mapped + 99, mapped + granule - 1] {
                let start = attribute::<u64>(P::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at);
                let bytes = attribute::<usize>(P::CU_POINTER_ATTRIBUTE_RANGE_SIZE, at);
                let run = (address + first * granule, count * GRANULE);
                assert_eq!((start, bytes), (Ok(run.0), Ok(run.1)));
                let start = attribute::<u64>(P::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, at);
                let bytes = attribute::<usize>(P::CU_POINTER_ATTRIBUTE_MAPPING_SIZE, at);
                assert_eq!((start, bytes), (Ok(mapped), Ok(GRANULE)));
                let (mut start, mut bytes) = (0, 0);
                ok!(cuMemGetAddressRange_v2(&raw mut start, &raw mut bytes, at));
                assert_eq!((start, bytes), (mapped, GRANULE));
            }
        }
        let hole = attribute::<u64>(P::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, address);
        assert_eq!(hole, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    });
}

/// One copy, one fill and one launch over several mappings.
#[test]
fn work_goes_over_several_mappings() {
    run("kept::work_goes_over_several_mappings", End::Kept, &[], || {
        let gpu = Gpu::open(0);
        let properties = properties(0);
        let handles = [(); 3].map(|()| got!(cuMemCreate(GRANULE, &raw const properties, 0)));
        let address = map(&handles);
        assert_eq!(allow(address, 3 * GRANULE, 0, WRITE), CUresult::CUDA_SUCCESS);
        let whole = painted(&gpu, 3 * GRANULE, 4);
        gpu.copy(address, whole, 3 * GRANULE);
        assert_eq!(gpu.read(address, 3 * GRANULE), pattern(3 * GRANULE, 4));
        ok!(cuMemsetD8Async(address + 1000, 7, 3 * GRANULE - 2000, gpu.stream));
        gpu.settle();
        assert_eq!(gpu.read(address + 999, GRANULE + 9)[1..], vec![7; GRANULE + 8]);
        let edge = address + 2 * GRANULE as u64 - 2048;
        gpu.launch(&pages(Kernel::Vector, whole, edge, 16));
        gpu.settle();
        assert_eq!(gpu.read(edge, 1 << 16), pattern(1 << 16, 4));
    });
}

/// Allocations that adjoin are two to whoever asks, and one handle opens one of them.
#[test]
fn allocations_may_adjoin() {
    run("kept::allocations_may_adjoin", End::Kept, &[], || {
        let gpu = Gpu::open(0);
        let one = gpu.alloc(4096);
        let two = alloc_behind(one, 512);
        assert_eq!((two, alloc_behind(one, 512)), (one + 4096, 0));
        assert_eq!(attribute::<u64>(P::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, two + 5), Ok(two));
        assert_eq!(attribute::<u64>(P::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, two + 5), Ok(one));
        gpu.copy(one + 4000, one, 512);
        let (a, b): (cu::CUipcMemHandle, cu::CUipcMemHandle) =
            (got!(cuIpcGetMemHandle(one)), got!(cuIpcGetMemHandle(two)));
        assert_ne!(a.reserved, b.reserved);
        ok!(cuMemFree_v2(two));
        ok!(cuMemFree_v2(one));
    });
}

/// By a handle, in a process that sees the GPUs in another order.
#[test]
fn another_process_opens_memory() {
    run("kept::another_process_opens_memory", End::Kept, &[], || {
        if is_peer() {
            let gpu = Gpu::open(0);
            let handle = unhex(&hear());
            let opened: u64 = got!(cuIpcOpenMemHandle_v2(handle, 1));
            assert_eq!(got!(cuIpcOpenMemHandle_v2(handle, 1)), opened);
            assert_eq!(attribute::<i32>(P::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, opened), Ok(1));
            ok!(cuIpcCloseMemHandle(opened));
            let from = painted(&gpu, 1 << 16, 8);
            let launch = pages(Kernel::Vector, from, opened, 16);
            gpu.launch(&launch.releasing(RELEASE_ADD, opened + (1 << 16), 9, gpu.alloc(4)));
            gpu.settle();
            ok!(cuIpcCloseMemHandle(opened));
            // Another context has it elsewhere; closed, it is open no more.
            Gpu::open(1);
            let nearer: u64 = got!(cuIpcOpenMemHandle_v2(handle, 1));
            ok!(cuIpcCloseMemHandle(nearer));
            say("written");
            assert_eq!(hear(), "freed");
            let mut opened = 0;
            assert_eq!(
                call!(cuIpcOpenMemHandle_v2(&raw mut opened, handle, 1)),
                CUresult::CUDA_ERROR_INVALID_VALUE
            );
            return;
        }
        let gpu = Gpu::open(0);
        let memory = gpu.alloc((1 << 16) + 8);
        ok!(cuStreamWaitValue64_v2(gpu.stream, memory + (1 << 16), 9, 0));
        let handle: cu::CUipcMemHandle = got!(cuIpcGetMemHandle(memory + 77));
        let mut peer = peer(&[("CUDA_VISIBLE_DEVICES", "1,0")]);
        peer.tell(&hex(&handle.reserved));
        // The stream has waited for the other process's word.
        assert_eq!(gpu.read(memory, 1 << 16), pattern(1 << 16, 8));
        assert_eq!(peer.hear(), "written");
        ok!(cuMemFree_v2(memory));
        peer.tell("freed");
        peer.end();
    });
}

/// It is told while the call waits, to whoever asks, who does not wait for it.
#[test]
fn calls_that_wait_for_the_gpu_are_counted() {
    run("kept::calls_that_wait_for_the_gpu_are_counted", End::Kept, &[], || {
        let gpu = Gpu::open(0);
        let (memory, context) = (gpu.alloc(64), gpu.context as usize);
        assert_eq!(kept_waiting(), 0);
        let word = gpu.hold();
        let freeing = std::thread::spawn(move || {
            ok!(cuCtxPushCurrent_v2(context as cu::CUcontext));
            ok!(cuMemFree_v2(memory));
        });
        let start = Instant::now();
        while kept_waiting() == 0 {
            assert!(!freeing.is_finished(), "it has not waited");
            if start.elapsed() > PATIENCE {
                // So that the call ends, and with it the process.
                word.store(1, Ordering::Release);
                panic!("it is not told that a call waits");
            }
            std::thread::yield_now();
        }
        assert_eq!(kept_waiting(), 1);
        word.store(1, Ordering::Release);
        freeing.join().unwrap();
        assert_eq!(kept_waiting(), 0);
    });
}

/// By a descriptor, in a process that does not see the GPU.
#[test]
fn another_process_maps_memory() {
    run("kept::another_process_maps_memory", End::Kept, &[], || {
        if is_peer() {
            let gpu = Gpu::open(0);
            let (process, number) = {
                let line = hear();
                let (a, b) = line.split_once(' ').unwrap();
                (a.to_owned(), b.to_owned())
            };
            let file = std::fs::File::options()
                .read(true)
                .write(true)
                .open(format!("/proc/{process}/fd/{number}"))
                .unwrap();
            let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
            let kind = cu::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            let handle: u64 =
                got!(cuMemImportFromShareableHandle(descriptor as usize as *mut c_void, kind));
            drop(file);
            let address = map(&[handle]);
            assert_eq!(allow(address, GRANULE, 0, WRITE), CUresult::CUDA_SUCCESS);
            assert_eq!(attribute::<i32>(P::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address), Ok(-2));
            let from = painted(&gpu, 4096, 10);
            gpu.copy(address + 4096, from, 4096);
            say("written");
            return;
        }
        let gpu = Gpu::open(0);
        let properties = properties(0);
        let handle = got!(cuMemCreate(GRANULE, &raw const properties, 0));
        let kind = cu::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let mut descriptor = -1;
        ok!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, kind, 0));
        let mut peer = peer(&[("CUDA_VISIBLE_DEVICES", "1")]);
        peer.tell(&format!("{} {descriptor}", std::process::id()));
        assert_eq!(peer.hear(), "written");
        peer.end();
        let address = map(&[handle]);
        assert_eq!(allow(address, GRANULE, 0, READ), CUresult::CUDA_SUCCESS);
        assert_eq!(gpu.read(address + 4096, 4096), pattern(4096, 10));
    });
}

/// A range that begins in one allocation and ends in the next is one file, through which a NIC reaches both.
#[test]
fn nics_reach_memory_by_its_file() {
    run("kept::nics_reach_memory_by_its_file", End::Kept, &[], || {
        let gpu = Gpu::open(0);
        let properties = properties(0);
        let handles = [(); 2].map(|()| got!(cuMemCreate(GRANULE, &raw const properties, 0)));
        let mapped = map(&handles);
        assert_eq!(allow(mapped, 2 * GRANULE, 0, WRITE), CUresult::CUDA_SUCCESS);
        let at = mapped + GRANULE as u64 - 5000;
        let import = Import::of(0, at, 10_000);
        let bytes = pattern(10_000, 3);
        assert!(import.write(0, &bytes));
        assert_eq!((import.read(0, 10_000), gpu.read(at, 10_000)), (Some(bytes.clone()), bytes));
        // To the end of the last page, and not beyond.
        let rest = (4096 - (at + 10_000) % 4096) as usize;
        assert!(import.write(10_000, &vec![1; rest]));
        assert!(!import.write(10_000, &vec![1; rest + 1]));
        assert!(import.read(10_001, rest).is_none());
        // An allocation that ends within a page: nothing is there behind it.
        let short = gpu.alloc(100);
        let import = Import::of(0, short + 3, 90);
        assert!(
            import.write(97, &[7; 0]) && import.write(90, &[7; 7]) && !import.write(91, &[7; 7])
        );
        assert_eq!(gpu.read(short + 93, 7), [7; 7]);
    });
}

#[test]
fn unordered_writes_are_seen_after_a_flush() {
    let unordered = [("IMMWIRE_FAKE_CUDA_UNORDERED", "1")];
    run("kept::unordered_writes_are_seen_after_a_flush", End::Kept, &unordered, || {
        let (gpu, other) = (Gpu::open(0), 4096);
        let memory = gpu.alloc(2 * other);
        let import = Import::of(0, memory, 8192);
        let device = immwire_cuda::Device::open(0).unwrap();
        let direct = device.direct().unwrap();
        for by in [immwire_cuda::Seen::ByOwner, immwire_cuda::Seen::ByAll] {
            assert_eq!(direct.visibility(by), immwire_cuda::Visibility::Flush);
        }
        assert!(import.write(0, &[1; 10]));
        assert_eq!(gpu.read(memory, 10), [0; 10]);
        device.flush_writes(immwire_cuda::Seen::ByOwner).unwrap();
        assert_eq!(gpu.read(memory, 10), [1; 10]);
        assert!(import.write(0, &[2; 10]));
        assert_eq!((import.read(0, 10), gpu.read(memory, 10)), (Some(vec![2; 10]), vec![2; 10]));
        assert!(import.write(0, &[3; 10]));
        drop(import);
        assert_eq!(gpu.read(memory, 10), [3; 10]);
    });
}

#[test]
fn what_cannot_be_a_file_is_refused() {
    run("kept::what_cannot_be_a_file_is_refused", End::Kept, &[], || {
        let gpu = Gpu::open(0);
        let memory = gpu.alloc(8192);
        let kind = cu::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let export = |address, bytes| {
            let mut file = -1_i32;
            call!(cuMemGetHandleForAddressRange((&raw mut file).cast(), address, bytes, kind, 0))
        };
        assert_eq!(export(memory, 8192), CUresult::CUDA_SUCCESS);
        for (address, bytes) in [
            (memory + 8, 4096),
            (memory, 100),
            (memory, 0),
            (memory, 12_288),
            (pinned(4096).0, 4096),
        ] {
            assert_eq!(export(address, bytes), CUresult::CUDA_ERROR_INVALID_VALUE, "{bytes}");
        }
        let device = immwire_cuda::Device::open(0).unwrap();
        let owner = |address, bytes| immwire_cuda::owner_of(&device, address, bytes);
        assert_eq!((owner(memory, 8192), owner(pinned(64).0, 64)), (Ok(Some(0)), Ok(None)));
        assert!(owner(memory, 8193).is_err() && owner(memory + 8191, 2).is_err());
        assert!(immwire_cuda::DmaBuf::new(&device, memory, 8193, 4096).is_err());
    });
}

#[test]
fn machines_without_files() {
    let none = [("IMMWIRE_FAKE_CUDA_NO_DMA_BUF", "1")];
    run("kept::machines_without_files", End::Kept, &none, || {
        let memory = Gpu::open(0).alloc(4096);
        let device = immwire_cuda::Device::open(0).unwrap();
        assert!(!device.direct().unwrap().dma_buf);
        let why = immwire_cuda::DmaBuf::new(&device, memory, 4096, 4096).unwrap_err().to_string();
        assert!(why.contains("cuMemGetHandleForAddressRange") && why.contains("801"), "{why}");
    });
}

#[test]
fn gpus_without_the_cpus_addresses() {
    let none = [("IMMWIRE_FAKE_CUDA_NO_HOST_POINTERS", "1")];
    run("kept::gpus_without_the_cpus_addresses", End::Kept, &none, || {
        // Has a context current.
        Gpu::open(0);
        let device = immwire_cuda::Device::open(0).unwrap();
        let memory = vec![0_u8; 4096];
        let start = memory.as_ptr() as u64;
        // SAFETY: the memory outlives what is refused.
        let refused = unsafe { immwire_cuda::Pinned::new(&device, start, 4096, 4096, false) };
        let why = refused.unwrap_err().to_string();
        assert!(why.starts_with("GPU 0 does not use the CPU's addresses"), "{why}");
        // It has not been pinned.
        ok!(cuMemHostRegister_v2(start as *mut c_void, 4096, 0));
        ok!(cuMemHostUnregister(start as *mut c_void));
    });
}

/// Of what was pinned in one go, a part that nobody has any more stays pinned as long as somebody has another: who comes for it is told so, for by
/// then something else may be mapped there.
#[test]
fn what_is_left_behind_is_not_shared() {
    run("kept::what_is_left_behind_is_not_shared", End::Kept, &[], || {
        const BYTES: u64 = 64 << 10;
        let device = immwire_cuda::Device::open(0).unwrap();
        let memory = vec![0_u8; BYTES as usize];
        let first = memory.as_ptr() as u64;
        let pin = |from: u64, bytes: u64| {
            // SAFETY: the memory outlives all pins.
            unsafe { immwire_cuda::Pinned::new(&device, first + from, bytes as usize, 4096, false) }
        };
        let whole = pin(0, BYTES).unwrap().unwrap();
        let half = pin(BYTES / 2, BYTES / 2).unwrap().unwrap();
        assert!(whole.unpin());
        // What the other has is shared.
        assert!(pin(BYTES / 2, 4096).unwrap().unwrap().unpin());
        let why = pin(0, BYTES / 4).unwrap_err().why;
        assert_eq!(why, immwire_cuda::Error::LeftBehind { address: first });
        assert!(half.unpin());
        assert!(pin(0, BYTES / 4).unwrap().unwrap().unpin());
    });
}

#[test]
fn a_forked_child_is_refused() {
    run("kept::a_forked_child_is_refused", End::Kept, &[], || {
        let device = immwire_cuda::Device::open(0).unwrap();
        // SAFETY: what the child does takes no lock that another thread of the parent's may have.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = [call!(cuInit(0)), call!(cuCtxPopCurrent_v2(null_mut()))];
            let all = refused.iter().all(|&it| it == CUresult::CUDA_ERROR_NOT_INITIALIZED);
            let why = immwire_cuda::Device::count().map_err(|why| why.to_string());
            let is_told = why.is_err_and(|why| why.contains("forked"));
            // SAFETY: ends this process, and does nothing else.
            unsafe { libc::_exit(i32::from(!(all && is_told))) };
        }
        assert!(child > 0, "fork");
        let mut status = -1;
        // SAFETY: writes the one number.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        // The parent goes on.
        device.synchronize().unwrap();
    });
}

fn is_captured(gpu: &Gpu) -> bool {
    let mut status = cu::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    ok!(cuStreamIsCapturing(gpu.stream, &raw mut status));
    status == cu::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
}

#[test]
fn what_is_captured_is_counted_and_not_done() {
    run("kept::what_is_captured_is_counted_and_not_done", End::Kept, &[], || {
        use cu::CUstreamCaptureMode as Mode;
        let gpu = Gpu::open(0);
        let memory = gpu.alloc(64);
        for mode in [
            Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
        ] {
            ok!(cuStreamBeginCapture_v2(gpu.stream, mode));
            assert!(is_captured(&gpu));
            let event = got!(cuEventCreate(0));
            ok!(cuMemsetD8Async(memory, 7, 64, gpu.stream));
            ok!(cuEventRecord(event, gpu.stream));
            ok!(cuStreamWaitEvent(gpu.stream, event, 0));
            ok!(cuMemsetD8Async(memory, 8, 64, gpu.stream));
            let mut aside = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
            ok!(cuThreadExchangeStreamCaptureMode(&raw mut aside));
            let asked = call!(cuEventQuery(event));
            assert_eq!(asked, CUresult::CUDA_ERROR_CAPTURED_EVENT);
            let asked = call!(cuStreamQuery(gpu.stream));
            assert_eq!(asked, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            ok!(cuThreadExchangeStreamCaptureMode(&raw mut aside));
            if mode != Mode::CU_STREAM_CAPTURE_MODE_RELAXED {
                let raw = gpu.stream as usize;
                let other = std::thread::spawn(move || {
                    let mut graph = null_mut();
                    call!(cuStreamEndCapture(raw as cu::CUstream, &raw mut graph))
                });
                let answer = other.join().unwrap();
                assert_eq!(answer, CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
            }
            let mut graph = null_mut();
            ok!(cuStreamEndCapture(gpu.stream, &raw mut graph));
            let mut nodes = 0;
            ok!(cuGraphGetNodes(graph, null_mut(), &raw mut nodes));
            ok!(cuGraphDestroy(graph));
            assert_eq!(nodes, 2);
            assert!(!is_captured(&gpu));
            ok!(cuMemsetD8Async(memory, 9, 64, gpu.stream));
            assert_eq!(gpu.read(memory, 64), [9; 64]);
        }
    });
}
