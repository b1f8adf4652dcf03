//! Rules that are broken.

use crate::rig::*;
use crate::{call, got, ok};
use cudarc::driver::sys::{self as cu, CUresult};
use immwire_cuda::args::{RELEASE_ADD, RELEASE_STORE};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::Duration;

/// A kernel is launched that `change` has made wrong.
fn wrong(kernel: Kernel, change: impl FnOnce(&mut Launch, u64)) {
    let gpu = Gpu::open(0);
    let (from, to) = (gpu.alloc(1 << 20), gpu.alloc(1 << 20));
    let mut launch = pages(kernel, from, to, 8);
    change(&mut launch, from);
    gpu.launch(&launch);
    gpu.settle();
}

/// A release of `word`, with arrivals of the GPU's own.
fn announced(gpu: &Gpu, kind: u32, word: u64) -> Launch {
    let (from, to) = (gpu.alloc(1 << 16), gpu.alloc(1 << 16));
    pages(Kernel::Any, from, to, 8).releasing(kind, word, 1, gpu.alloc(4))
}

#[test]
fn cpu_reads_gpu_memory() {
    run("broken::cpu_reads_gpu_memory", End::Faults, &[], || {
        let address = Gpu::open(0).alloc(64);
        // SAFETY: none; it must fault.
        let byte = unsafe { (address as *const u8).read_volatile() };
        println!("read {byte}");
    });
}

#[test]
fn not_initialised() {
    run("broken::not_initialised", End::Broken("not initialised"), &[], || {
        let mut count = 0;
        call!(cuDeviceGetCount(&raw mut count));
    });
}

#[test]
fn no_context() {
    run("broken::no_context", End::Broken("no context is current"), &[], || {
        ok!(cuInit(0));
        let mut address = 0;
        call!(cuMemAlloc_v2(&raw mut address, 64));
    });
}

#[test]
fn context_of_another_thread() {
    run("broken::context_of_another_thread", End::Broken("no context is current"), &[], || {
        let gpu = Gpu::open(0);
        assert!(!gpu.context.is_null());
        std::thread::spawn(|| {
            let mut address = 0;
            call!(cuMemAlloc_v2(&raw mut address, 64))
        })
        .join()
        .unwrap();
    });
}

#[test]
fn popped_too_often() {
    run("broken::popped_too_often", End::Broken("popped, not pushed"), &[], || {
        Gpu::open(0);
        let mut context = null_mut();
        ok!(cuCtxPopCurrent_v2(&raw mut context));
        call!(cuCtxPopCurrent_v2(&raw mut context));
    });
}

#[test]
fn context_used_after_its_release() {
    run("broken::context_used_after_its_release", End::Broken("no such handle"), &[], || {
        let gpu = Gpu::open(0);
        ok!(cuDevicePrimaryCtxRelease_v2(0));
        call!(cuCtxPushCurrent_v2(gpu.context));
    });
}

#[test]
fn context_released_under_work() {
    run("broken::context_released_under_work", End::Broken("memory in use"), &[], || {
        let gpu = Gpu::open(0);
        gpu.hold();
        call!(cuDevicePrimaryCtxRelease_v2(0));
    });
}

#[test]
fn memory_freed_after_its_context() {
    run("broken::memory_freed_after_its_context", End::Broken("freed, not allocated"), &[], || {
        let address = Gpu::open(0).alloc(64);
        ok!(cuDevicePrimaryCtxRelease_v2(0));
        Gpu::open(0);
        call!(cuMemFree_v2(address));
    });
}

#[test]
fn stream_destroyed_twice() {
    run("broken::stream_destroyed_twice", End::Broken("no such handle"), &[], || {
        let gpu = Gpu::open(0);
        ok!(cuStreamDestroy_v2(gpu.stream));
        call!(cuStreamDestroy_v2(gpu.stream));
    });
}

#[test]
fn event_used_after_its_destruction() {
    run("broken::event_used_after_its_destruction", End::Broken("no such handle"), &[], || {
        let gpu = Gpu::open(0);
        let event = got!(cuEventCreate(0));
        ok!(cuEventDestroy_v2(event));
        call!(cuEventRecord(event, gpu.stream));
    });
}

#[test]
fn function_used_after_its_module() {
    run("broken::function_used_after_its_module", End::Broken("no such handle"), &[], || {
        let gpu = Gpu::open(0);
        let launch = pages(Kernel::Any, 0, 0, 0);
        let function = gpu.function(launch.kernel);
        ok!(cuModuleUnload(gpu.module));
        gpu.launch_as(&launch, function, [1, 1, 1], [launch.threads, 1, 1]);
    });
}

#[test]
fn stream_of_another_context() {
    run("broken::stream_of_another_context", End::Broken("wrong context"), &[], || {
        let gpu = Gpu::open(0);
        let address = gpu.alloc(64);
        Gpu::open(1);
        call!(cuMemsetD8Async(address, 0, 64, gpu.stream));
    });
}

#[test]
fn event_of_another_context() {
    run("broken::event_of_another_context", End::Broken("wrong context"), &[], || {
        Gpu::open(0);
        let event = got!(cuEventCreate(0));
        let other = Gpu::open(1);
        call!(cuEventRecord(event, other.stream));
    });
}

#[test]
fn function_of_another_context() {
    run("broken::function_of_another_context", End::Broken("wrong context"), &[], || {
        let gpu = Gpu::open(0);
        let other = Gpu::open(1);
        Gpu { module: gpu.module, ..other }.launch(&pages(Kernel::Any, 0, 0, 0));
    });
}

#[test]
fn module_unloaded_under_a_launch() {
    run("broken::module_unloaded_under_a_launch", End::Broken("module in use"), &[], || {
        let gpu = Gpu::open(0);
        gpu.hold();
        gpu.launch(&pages(Kernel::Any, 0, 0, 0));
        call!(cuModuleUnload(gpu.module));
    });
}

#[test]
fn freed_twice() {
    run("broken::freed_twice", End::Broken("freed, not allocated"), &[], || {
        let address = Gpu::open(0).alloc(64);
        ok!(cuMemFree_v2(address));
        call!(cuMemFree_v2(address));
    });
}

#[test]
fn freed_not_from_its_start() {
    run("broken::freed_not_from_its_start", End::Broken("freed, not allocated"), &[], || {
        let address = Gpu::open(0).alloc(64);
        call!(cuMemFree_v2(address + 8));
    });
}

#[test]
fn pinned_memory_freed_as_a_gpu_s() {
    run("broken::pinned_memory_freed_as_a_gpu_s", End::Broken("freed, not allocated"), &[], || {
        Gpu::open(0);
        let host = pinned(64);
        call!(cuMemFree_v2(host.0));
    });
}

#[test]
fn freed_under_a_copy() {
    run("broken::freed_under_a_copy", End::Broken("memory in use"), &[], || {
        let gpu = Gpu::open(0);
        let (from, to) = (gpu.alloc(64), gpu.alloc(64));
        gpu.hold();
        ok!(cuMemcpyAsync(to, from, 64, gpu.stream));
        call!(cuMemFree_v2(from));
    });
}

#[test]
fn freed_under_a_launch() {
    run("broken::freed_under_a_launch", End::Broken("memory in use"), &[], || {
        let gpu = Gpu::open(0);
        let (from, to) = (gpu.alloc(1 << 16), gpu.alloc(1 << 16));
        gpu.hold();
        gpu.launch(&pages(Kernel::Vector, from, to, 16));
        call!(cuMemFree_v2(to));
    });
}

#[test]
fn freed_under_a_launch_with_a_table() {
    run("broken::freed_under_a_launch_with_a_table", End::Broken("memory in use"), &[], || {
        let gpu = Gpu::open(0);
        let (from, to, table) = (gpu.alloc(1 << 16), gpu.alloc(1 << 16), pinned(64));
        gpu.hold();
        gpu.launch(&pages(Kernel::Vector, from, to, 16).with(|a| a.source.table = table.0));
        call!(cuMemFree_v2(from));
    });
}

#[test]
fn table_freed_under_a_launch() {
    run("broken::table_freed_under_a_launch", End::Broken("memory in use"), &[], || {
        let gpu = Gpu::open(0);
        let (from, to, table) = (gpu.alloc(1 << 16), gpu.alloc(1 << 16), pinned(64));
        gpu.hold();
        gpu.launch(&pages(Kernel::Vector, from, to, 16).with(|a| a.target.table = table.0));
        call!(cuMemFreeHost(table.0 as *mut c_void));
    });
}

#[test]
fn word_freed_under_a_wait() {
    run("broken::word_freed_under_a_wait", End::Broken("memory in use"), &[], || {
        let gpu = Gpu::open(0);
        let word = gpu.alloc(8);
        ok!(cuStreamWaitValue64_v2(gpu.stream, word, 1, 0));
        call!(cuMemFree_v2(word));
    });
}

#[test]
fn unregistered_under_a_copy() {
    run("broken::unregistered_under_a_copy", End::Broken("memory in use"), &[], || {
        let gpu = Gpu::open(0);
        let (to, mut from) = (gpu.alloc(64), [7_u8; 64]);
        ok!(cuMemHostRegister_v2(from.as_mut_ptr().cast(), 64, 0));
        gpu.hold();
        ok!(cuMemcpyAsync(to, from.as_ptr() as u64, 64, gpu.stream));
        call!(cuMemHostUnregister(from.as_mut_ptr().cast()));
    });
}

#[test]
fn unmapped_under_a_fill() {
    run("broken::unmapped_under_a_fill", End::Broken("memory in use"), &[], || {
        let gpu = Gpu::open(0);
        let properties = properties(0);
        let address = map(&[got!(cuMemCreate(GRANULE, &raw const properties, 0))]);
        assert_eq!(allow(address, GRANULE, 0, WRITE), CUresult::CUDA_SUCCESS);
        gpu.hold();
        ok!(cuMemsetD8Async(address, 1, 64, gpu.stream));
        call!(cuMemUnmap(address, GRANULE));
    });
}

#[test]
fn addresses_freed_while_mapped() {
    run("broken::addresses_freed_while_mapped", End::Broken("memory in use"), &[], || {
        ok!(cuInit(0));
        let properties = properties(0);
        let address = map(&[got!(cuMemCreate(GRANULE, &raw const properties, 0))]);
        call!(cuMemAddressFree(address, GRANULE));
    });
}

/// Two of 2 MiB, side by side.
fn two_mapped() -> u64 {
    ok!(cuInit(0));
    let properties = properties(0);
    map(&[(); 2].map(|()| got!(cuMemCreate(GRANULE, &raw const properties, 0))))
}

#[test]
fn addresses_freed_while_a_part_is_mapped() {
    run(
        "broken::addresses_freed_while_a_part_is_mapped",
        End::Broken("memory in use"),
        &[],
        || {
            let address = two_mapped();
            ok!(cuMemUnmap(address, GRANULE));
            call!(cuMemAddressFree(address, 2 * GRANULE));
        },
    );
}

#[test]
fn half_of_the_addresses_freed() {
    run("broken::half_of_the_addresses_freed", End::Broken("not as it was mapped"), &[], || {
        let address = two_mapped();
        ok!(cuMemUnmap(address, 2 * GRANULE));
        call!(cuMemAddressFree(address, GRANULE));
    });
}

#[test]
fn unmapped_in_half() {
    run("broken::unmapped_in_half", End::Broken("not as it was mapped"), &[], || {
        ok!(cuInit(0));
        let properties = properties(0);
        let handle = got!(cuMemCreate(2 * GRANULE, &raw const properties, 0));
        let address = got!(cuMemAddressReserve(2 * GRANULE, 0, 0, 0));
        ok!(cuMemMap(address, 2 * GRANULE, 0, handle, 0));
        call!(cuMemUnmap(address, GRANULE));
    });
}

#[test]
fn unmapped_twice() {
    run("broken::unmapped_twice", End::Broken("not as it was mapped"), &[], || {
        let address = two_mapped();
        ok!(cuMemUnmap(address, GRANULE));
        call!(cuMemUnmap(address, 2 * GRANULE));
    });
}

#[test]
fn released_while_another_thread_unmaps_it() {
    run(
        "broken::released_while_another_thread_unmaps_it",
        End::Broken("released while it is unmapped"),
        &[],
        || {
            ok!(cuInit(0));
            let properties = properties(0);
            // Once they meet.
            for round in 0..1000 {
                let handle = got!(cuMemCreate(GRANULE, &raw const properties, 0));
                let address = map(&[handle]);
                let other = std::thread::spawn(move || ok!(cuMemUnmap(address, GRANULE)));
                std::thread::sleep(Duration::from_micros(round % 100));
                ok!(cuMemRelease(handle));
                other.join().expect("no panic");
                ok!(cuMemAddressFree(address, GRANULE));
            }
        },
    );
}

#[test]
fn mapped_over_a_mapping() {
    run("broken::mapped_over_a_mapping", End::Broken("mapped over a mapping"), &[], || {
        let address = two_mapped();
        let properties = properties(0);
        let other = got!(cuMemCreate(GRANULE, &raw const properties, 0));
        call!(cuMemMap(address + GRANULE as u64, GRANULE, 0, other, 0));
    });
}

#[test]
fn copied_over_a_hole() {
    run("broken::copied_over_a_hole", End::Broken("not in live memory"), &[], || {
        let gpu = Gpu::open(0);
        let properties = properties(0);
        let handles = [(); 3].map(|()| got!(cuMemCreate(GRANULE, &raw const properties, 0)));
        let address = map(&handles);
        assert_eq!(allow(address, 3 * GRANULE, 0, WRITE), CUresult::CUDA_SUCCESS);
        ok!(cuMemUnmap(address + GRANULE as u64, GRANULE));
        call!(cuMemsetD8Async(address, 1, 3 * GRANULE, gpu.stream));
    });
}

#[test]
fn released_too_often() {
    run("broken::released_too_often", End::Broken("no such handle"), &[], || {
        ok!(cuInit(0));
        let properties = properties(0);
        let handle = got!(cuMemCreate(GRANULE, &raw const properties, 0));
        ok!(cuMemRelease(handle));
        call!(cuMemRelease(handle));
    });
}

#[test]
fn copied_from_freed_memory() {
    run("broken::copied_from_freed_memory", End::Broken("not in live memory"), &[], || {
        let gpu = Gpu::open(0);
        let (from, to) = (gpu.alloc(64), gpu.alloc(64));
        ok!(cuMemFree_v2(from));
        call!(cuMemcpyAsync(to, from, 64, gpu.stream));
    });
}

#[test]
fn copied_to_freed_memory() {
    run("broken::copied_to_freed_memory", End::Broken("not in live memory"), &[], || {
        let gpu = Gpu::open(0);
        let (from, to) = (gpu.alloc(64), gpu.alloc(64));
        ok!(cuMemFree_v2(to));
        call!(cuMemcpyAsync(to, from, 64, gpu.stream));
    });
}

#[test]
fn copied_past_the_end() {
    run("broken::copied_past_the_end", End::Broken("not in live memory"), &[], || {
        let gpu = Gpu::open(0);
        let (from, to) = (gpu.alloc(64), gpu.alloc(64));
        call!(cuMemcpyAsync(to, from + 1, 64, gpu.stream));
    });
}

#[test]
fn copied_between_plain_memory() {
    run("broken::copied_between_plain_memory", End::Broken("not in live memory"), &[], || {
        let gpu = Gpu::open(0);
        let (mut to, from) = ([0_u8; 64], [7_u8; 64]);
        call!(cuMemcpyAsync(to.as_mut_ptr() as u64, from.as_ptr() as u64, 64, gpu.stream));
    });
}

#[test]
fn released_word_in_plain_memory() {
    run("broken::released_word_in_plain_memory", End::Broken("not in live memory"), &[], || {
        let gpu = Gpu::open(0);
        let word = 0_u64;
        gpu.launch(&announced(&gpu, RELEASE_STORE, &raw const word as u64));
    });
}

#[test]
fn page_past_the_end() {
    run("broken::page_past_the_end", End::Broken("not in live memory"), &[], || {
        wrong(Kernel::Vector, |launch, from| {
            launch.args.source.base = from + (1 << 20) - 7 * PAGE;
        });
    });
}

#[test]
fn page_of_a_table_past_the_end() {
    run("broken::page_of_a_table_past_the_end", End::Broken("not in live memory"), &[], || {
        wrong(Kernel::Any, |launch, _| {
            let table = pinned(32);
            for (entry, index) in
                table.bytes(32).chunks_exact_mut(4).zip([0_u32, 1, 2, 3, 256, 4, 5, 6])
            {
                entry.copy_from_slice(&index.to_le_bytes());
            }
            launch.args.target.table = table.0;
        });
    });
}

#[test]
fn table_past_the_end() {
    run("broken::table_past_the_end", End::Broken("not in live memory"), &[], || {
        wrong(Kernel::Any, |launch, _| launch.args.source.table = pinned(31).0);
    });
}

#[test]
fn memory_of_a_peer_without_access() {
    run("broken::memory_of_a_peer_without_access", End::Broken("no access"), &[], || {
        let gpu = Gpu::open(0);
        let to = gpu.alloc(64);
        let other = Gpu::open(1);
        let from = other.alloc(64);
        call!(cuMemcpyAsync(to, from, 64, other.stream));
    });
}

#[test]
fn pages_of_a_peer_by_a_table_without_access() {
    run("broken::pages_of_a_peer_by_a_table_without_access", End::Broken("no access"), &[], || {
        let from = Gpu::open(0).alloc(1 << 16);
        let gpu = Gpu::open(1);
        let (to, table) = (gpu.alloc(1 << 16), pinned(64));
        table.bytes(64).fill(0);
        gpu.launch(&pages(Kernel::Any, from, to, 1).with(|a| a.source.table = table.0));
        gpu.settle();
    });
}

#[test]
fn access_is_not_mutual() {
    run("broken::access_is_not_mutual", End::Broken("no access"), &[], || {
        let gpu = Gpu::open(0);
        let from = gpu.alloc(64);
        let other = Gpu::open(1);
        let to = other.alloc(64);
        ok!(cuCtxPushCurrent_v2(gpu.context));
        ok!(cuCtxEnablePeerAccess(other.context, 0));
        gpu.copy(to, from, 64);
        ok!(cuCtxPushCurrent_v2(other.context));
        call!(cuMemcpyAsync(to, from, 64, other.stream));
    });
}

#[test]
fn mapped_memory_before_access_is_set() {
    run("broken::mapped_memory_before_access_is_set", End::Broken("no access"), &[], || {
        let gpu = Gpu::open(0);
        let properties = properties(0);
        let address = map(&[got!(cuMemCreate(GRANULE, &raw const properties, 0))]);
        call!(cuMemsetD8Async(address, 1, 64, gpu.stream));
    });
}

#[test]
fn mapped_memory_that_may_only_be_read() {
    run("broken::mapped_memory_that_may_only_be_read", End::Broken("no access"), &[], || {
        let gpu = Gpu::open(0);
        let properties = properties(1);
        let address = map(&[got!(cuMemCreate(GRANULE, &raw const properties, 0))]);
        assert_eq!(allow(address, GRANULE, 0, READ), CUresult::CUDA_SUCCESS);
        assert_eq!(gpu.read(address, 64).len(), 64);
        call!(cuMemsetD8Async(address, 1, 64, gpu.stream));
    });
}

#[test]
fn closed_too_often() {
    run("broken::closed_too_often", End::Broken("freed, not allocated"), &[], || {
        call!(cuIpcCloseMemHandle(Gpu::open(0).alloc(64)));
    });
}

#[test]
fn closed_under_a_copy() {
    run("broken::closed_under_a_copy", End::Broken("memory in use"), &[], || {
        if is_peer() {
            let gpu = Gpu::open(0);
            let memory = gpu.alloc(64);
            let handle: cu::CUipcMemHandle = got!(cuIpcGetMemHandle(memory));
            say(&hex(&handle.reserved));
            stay();
        }
        let mut peer = peer(&[]);
        let handle = unhex(&peer.hear());
        let gpu = Gpu::open(0);
        let opened = got!(cuIpcOpenMemHandle_v2(handle, 1));
        gpu.hold();
        ok!(cuMemsetD8Async(opened, 1, 64, gpu.stream));
        call!(cuIpcCloseMemHandle(opened));
    });
}

#[test]
fn freed_while_open_in_another_process() {
    run(
        "broken::freed_while_open_in_another_process",
        End::Broken("freed, open in another process"),
        &[],
        || {
            if is_peer() {
                Gpu::open(0);
                let opened: u64 = got!(cuIpcOpenMemHandle_v2(unhex(&hear()), 1));
                say(&format!("opened {opened}"));
                stay();
            }
            let memory = Gpu::open(0).alloc(64);
            let handle: cu::CUipcMemHandle = got!(cuIpcGetMemHandle(memory));
            let mut peer = peer(&[]);
            peer.tell(&hex(&handle.reserved));
            assert!(peer.hear().starts_with("opened"));
            call!(cuMemFree_v2(memory));
        },
    );
}

#[test]
fn misaligned_word_of_a_wait() {
    run("broken::misaligned_word_of_a_wait", End::Broken("misaligned"), &[], || {
        let gpu = Gpu::open(0);
        let word = gpu.alloc(64);
        call!(cuStreamWaitValue64_v2(gpu.stream, word + 4, 1, 0));
    });
}

#[test]
fn misaligned_word_of_a_write() {
    run("broken::misaligned_word_of_a_write", End::Broken("misaligned"), &[], || {
        let gpu = Gpu::open(0);
        let word = gpu.alloc(64);
        call!(cuStreamWriteValue64_v2(gpu.stream, word + 1, 1, 0));
    });
}

#[test]
fn misaligned_word_of_a_launch() {
    run("broken::misaligned_word_of_a_launch", End::Broken("misaligned"), &[], || {
        let gpu = Gpu::open(0);
        let word = gpu.alloc(64) + 4;
        gpu.launch(&announced(&gpu, RELEASE_ADD, word));
    });
}

#[test]
fn misaligned_table() {
    run("broken::misaligned_table", End::Broken("misaligned"), &[], || {
        wrong(Kernel::Any, |launch, _| launch.args.source.table = pinned(64).0 + 2);
    });
}

#[test]
fn misaligned_page() {
    run("broken::misaligned_page", End::Broken("misaligned"), &[], || {
        wrong(Kernel::Vector, |launch, from| launch.args.source.base = from + 8);
    });
}

#[test]
fn misaligned_page_of_the_bulk_kernel() {
    run("broken::misaligned_page_of_the_bulk_kernel", End::Broken("misaligned"), &[], || {
        wrong(Kernel::Bulk, |launch, _| launch.args.target.stride += 8);
    });
}

#[test]
fn too_few_threads() {
    run("broken::too_few_threads", End::Broken("geometry"), &[], || {
        wrong(Kernel::Any, |launch, _| launch.threads -= 32);
    });
}

#[test]
fn two_dimensions() {
    run("broken::two_dimensions", End::Broken("geometry"), &[], || {
        let gpu = Gpu::open(0);
        let launch = pages(Kernel::Any, 0, 0, 0);
        let function = gpu.function(Kernel::Any);
        gpu.launch_as(&launch, function, [1, 2, 1], [launch.threads, 1, 1]);
    });
}

#[test]
fn no_blocks() {
    run("broken::no_blocks", End::Broken("geometry"), &[], || {
        let gpu = Gpu::open(0);
        let launch = pages(Kernel::Any, 0, 0, 0);
        let function = gpu.function(Kernel::Any);
        gpu.launch_as(&launch, function, [0, 1, 1], [launch.threads, 1, 1]);
    });
}

#[test]
fn too_few_pieces() {
    run("broken::too_few_pieces", End::Broken("geometry"), &[], || {
        wrong(Kernel::Any, |launch, _| launch.args.piece_count -= 1);
    });
}

#[test]
fn pieces_that_do_not_cover_a_page() {
    run("broken::pieces_that_do_not_cover_a_page", End::Broken("geometry"), &[], || {
        wrong(Kernel::Any, |launch, _| {
            (launch.args.page_bytes, launch.args.page_count) = (4097, 8)
        });
    });
}

#[test]
fn pieces_of_odd_bytes() {
    run("broken::pieces_of_odd_bytes", End::Broken("geometry"), &[], || {
        wrong(Kernel::Any, |launch, _| launch.args.piece_bytes = 1032);
    });
}

#[test]
fn pages_of_odd_bytes() {
    run("broken::pages_of_odd_bytes", End::Broken("geometry"), &[], || {
        wrong(Kernel::Vector, |launch, _| launch.args.page_bytes = 4088);
    });
}

#[test]
fn an_unknown_release() {
    run("broken::an_unknown_release", End::Broken("geometry"), &[], || {
        wrong(Kernel::Any, |launch, _| launch.args.release.kind = 3);
    });
}

#[test]
fn two_stages() {
    run("broken::two_stages", End::Broken("geometry"), &[], || {
        wrong(Kernel::Bulk, |launch, _| launch.args.stage_count = 2);
    });
}

#[test]
fn a_piece_longer_than_its_stage() {
    run("broken::a_piece_longer_than_its_stage", End::Broken("geometry"), &[], || {
        wrong(Kernel::Bulk, |launch, _| {
            (launch.args.stage_bytes, launch.args.stage_count) = (512, 8)
        });
    });
}

#[test]
fn too_little_shared_memory() {
    run("broken::too_little_shared_memory", End::Broken("geometry"), &[], || {
        wrong(Kernel::Bulk, |launch, _| launch.shared_bytes /= 2);
    });
}

#[test]
fn shared_memory_that_was_not_asked_for() {
    run("broken::shared_memory_that_was_not_asked_for", End::Broken("geometry"), &[], || {
        let gpu = Gpu::open(0);
        let (from, to) = (gpu.alloc(1 << 16), gpu.alloc(1 << 16));
        let mut launch = pages(Kernel::Bulk, from, to, 8).with(|a| a.stage_count = 8);
        launch.shared_bytes = 8 * 8 * 1024;
        let function = got!(cuModuleGetFunction(gpu.module, c"immwire_copy_bulk".as_ptr()));
        gpu.launch_as(&launch, function, [1, 1, 1], [launch.threads, 1, 1]);
    });
}

#[test]
fn arrivals_that_are_not_zero() {
    run("broken::arrivals_that_are_not_zero", End::Broken("arrivals"), &[], || {
        let gpu = Gpu::open(0);
        let launch = announced(&gpu, RELEASE_STORE, pinned(8).0);
        ok!(cuMemsetD8Async(launch.args.release.arrivals, 1, 4, gpu.stream));
        gpu.launch(&launch);
        gpu.settle();
    });
}

#[test]
fn arrivals_in_host_memory() {
    run("broken::arrivals_in_host_memory", End::Broken("arrivals"), &[], || {
        let gpu = Gpu::open(0);
        let launch = announced(&gpu, RELEASE_STORE, pinned(8).0);
        gpu.launch(&launch.with(|a| a.release.arrivals = pinned(8).0));
    });
}

/// A launch of 32 pieces, half of them in turns of three, with a counter of the GPU's own.
fn in_turns(gpu: &Gpu) -> Launch {
    let (from, to) = (gpu.alloc(1 << 16), gpu.alloc(1 << 16));
    pages(Kernel::Any, from, to, 8).in_turns(16, 3, gpu.alloc(4))
}

#[test]
fn turns_asked_for_before_a_launch() {
    run("broken::turns_asked_for_before_a_launch", End::Broken("turns"), &[], || {
        let gpu = Gpu::open(0);
        let launch = in_turns(&gpu);
        ok!(cuMemsetD8Async(launch.args.turns.asked, 1, 4, gpu.stream));
        gpu.launch(&launch);
        gpu.settle();
    });
}

#[test]
fn turns_counted_in_host_memory() {
    run("broken::turns_counted_in_host_memory", End::Broken("turns"), &[], || {
        let gpu = Gpu::open(0);
        gpu.launch(&in_turns(&gpu).with(|a| a.turns.asked = pinned(8).0));
    });
}

#[test]
fn too_few_turns() {
    run("broken::too_few_turns", End::Broken("geometry"), &[], || {
        let gpu = Gpu::open(0);
        gpu.launch(&in_turns(&gpu).with(|a| a.turns.count -= 1));
    });
}

#[test]
fn more_pieces_dealt_than_there_are() {
    run("broken::more_pieces_dealt_than_there_are", End::Broken("geometry"), &[], || {
        wrong(Kernel::Any, |launch, _| launch.args.turns.dealt += 1);
    });
}

#[test]
fn turns_longer_than_a_warp_looks_up() {
    run("broken::turns_longer_than_a_warp_looks_up", End::Broken("geometry"), &[], || {
        let gpu = Gpu::open(0);
        gpu.launch(&in_turns(&gpu).in_turns(0, 33, gpu.alloc(4)));
    });
}

#[test]
fn host_function_calls_the_driver() {
    run(
        "broken::host_function_calls_the_driver",
        End::Broken("called in a host function"),
        &[],
        || {
            unsafe extern "C" fn query(stream: *mut c_void) {
                call!(cuStreamQuery(stream.cast()));
            }
            let gpu = Gpu::open(0);
            ok!(cuLaunchHostFunc(gpu.stream, Some(query), gpu.stream.cast()));
            gpu.settle();
        },
    );
}

#[test]
fn a_nic_is_given_memory_whose_copies_may_be_under_way() {
    let name = "broken::a_nic_is_given_memory_whose_copies_may_be_under_way";
    run(name, End::Broken("copies not completed for NICs"), &[], || {
        let memory = Gpu::open(0).alloc(4096);
        let kind = cu::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let mut file = -1_i32;
        ok!(cuMemGetHandleForAddressRange((&raw mut file).cast(), memory, 4096, kind, 0));
        import(file);
    });
}

#[test]
fn freed_under_a_nic() {
    run("broken::freed_under_a_nic", End::Broken("memory in use"), &[], || {
        let memory = Gpu::open(0).alloc(4096);
        let _import = Import::of(0, memory, 4096);
        call!(cuMemFree_v2(memory));
    });
}

#[test]
fn imported_after_it_was_freed() {
    run("broken::imported_after_it_was_freed", End::Broken("not in live memory"), &[], || {
        let memory = Gpu::open(0).alloc(4096);
        let device = immwire_cuda::Device::open(0).unwrap();
        let file = immwire_cuda::DmaBuf::new(&device, memory, 4096, 4096).unwrap();
        ok!(cuMemFree_v2(memory));
        import(std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&file)));
    });
}

/// Two threads, of which the first captures and the second asks for memory; or the first does both.
fn asks_while_captured(mode: cu::CUstreamCaptureMode, by_another: bool) {
    let gpu = Gpu::open(0);
    ok!(cuStreamBeginCapture_v2(gpu.stream, mode));
    if by_another {
        let context = gpu.context as usize;
        let other = std::thread::spawn(move || {
            ok!(cuCtxPushCurrent_v2(context as cu::CUcontext));
            let _: u64 = got!(cuMemAlloc_v2(64));
        });
        other.join().unwrap();
    } else {
        gpu.alloc(64);
    }
    println!("nobody minded");
}

#[test]
fn a_capture_minds_its_own_thread() {
    const END: End = End::Broken("while a stream is captured");
    run("broken::a_capture_minds_its_own_thread", END, &[], || {
        asks_while_captured(cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, false);
    });
}

#[test]
fn a_global_capture_minds_other_threads() {
    const END: End = End::Broken("while a stream is captured");
    run("broken::a_global_capture_minds_other_threads", END, &[], || {
        asks_while_captured(cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL, true);
    });
}

#[test]
fn a_local_capture_minds_no_other_thread() {
    run("broken::a_local_capture_minds_no_other_thread", End::Kept, &[], || {
        asks_while_captured(cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, true);
    });
}

#[test]
fn a_stream_is_drawn_into_a_graph() {
    const END: End = End::Broken("while a stream is captured");
    run("broken::a_stream_is_drawn_into_a_graph", END, &[], || {
        let gpu = Gpu::open(0);
        let other = got!(cuStreamCreate(1));
        let event = got!(cuEventCreate(0));
        let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        ok!(cuStreamBeginCapture_v2(gpu.stream, mode));
        ok!(cuEventRecord(event, gpu.stream));
        call!(cuStreamWaitEvent(other, event, 0));
    });
}
