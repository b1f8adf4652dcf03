//! Memory by the piece: a GPU's, the host's, and what other processes have.

use super::device::ordinal;
use super::{Out, calls};
use crate::code;
use crate::ipc::Named;
use crate::memory::{self, Backing, GRANULE, HostPages, Kind, Range, Reserved, open_file_of};
use crate::violation::broken;
use crate::world::{Closing, Current, World, begin};
use cudarc::driver::sys as cu;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, MutexGuard};

/// `CU_MEMHOSTREGISTER_*` and `CU_MEMHOSTALLOC_*`.
const HOST_FLAGS: c_uint = 0xf;

/// Waits until what the context's streams have been given by now is done.
fn wait_for_all(world: MutexGuard<'_, World>, current: Current) {
    let streams = world.streams_of(current.context);
    drop(world);
    streams.iter().for_each(|stream| stream.wait(stream.enqueued()));
}

/// The same, and few others get through meanwhile.
fn wait_for_all_alone(world: MutexGuard<'_, World>, current: Current) {
    let _closing = Closing::begin(current.context);
    wait_for_all(world, current);
}

/// What `CU_POINTER_ATTRIBUTE_RANGE_*` say: first byte and length. Of memory mapped by hand that is all that is mapped side by side in
/// one reservation, as NVIDIA's driver 580.159.04 was seen to answer on H200s: of two allocations of 2 MiB, in a reservation of
/// 4 MiB, the first byte of the first, and 4 MiB. (By the documentation it may be the whole reservation: that one had no room left.)
fn range_of(world: &World, range: &memory::Range) -> (u64, u64) {
    let is_mapped = |range: &memory::Range| matches!(range.kind, Kind::Mapped { .. });
    let reserved = world.reserved.range(..=range.start).next_back().map(|(_, reserved)| reserved);
    let Some(reserved) = reserved.filter(|_| is_mapped(range)) else {
        return (range.start, range.bytes);
    };
    let (mut start, mut end) = (reserved.start, reserved.start);
    for next in world.memory.within(reserved.start, reserved.bytes) {
        if next.start != end {
            if end > range.start {
                break;
            }
            start = next.start;
        }
        end = next.end();
    }
    (start, end - start)
}

/// What `CU_POINTER_ATTRIBUTE_MAPPING_*` say: the one mapping, of memory mapped by hand. How a driver maps other memory is its own
/// affair: here by granules, whoever else's memory lies in them, so that nobody takes that for what was allocated.
fn mapping_of(range: &memory::Range) -> (u64, u64) {
    if matches!(range.kind, Kind::Mapped { .. }) {
        return (range.start, range.bytes);
    }
    let start = range.start - range.start % GRANULE;
    (start, range.end().next_multiple_of(GRANULE) - start)
}

/// No driver's: as `cuMemAlloc`, right behind the allocation that starts at `before`, as small ones of a driver's may lie by chance. It
/// is to be freed before that one. 0: that has not so much room behind it.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_alloc_behind(before: u64, bytes: u64) -> u64 {
    let mut world = begin("immwire_fake_cuda_alloc_behind");
    let current = world.current("immwire_fake_cuda_alloc_behind");
    let Some(range) = world.memory.at(before).filter(|range| range.start == before) else {
        return 0;
    };
    let start = range.end();
    let free = world.memory.within(start, bytes).next().is_none();
    if !matches!(range.kind, Kind::Allocated { .. }) || !free || !(1..=GRANULE).contains(&bytes) {
        return 0;
    }
    let Ok(backing) = Backing::new(current.gpu, bytes) else { return 0 };
    let kind = Kind::Allocated { backing: Arc::new(backing), _reserved: None };
    world.memory.add(start, bytes, kind, Some(current.context));
    start
}

calls! {
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        let mut world = begin("cuMemAlloc");
        let current = world.current("cuMemAlloc");
        address.is_there()?;
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        world.take_memory()?;
        let backing = Arc::new(Backing::new(current.gpu, bytes as u64)?);
        let reserved = Reserved::new(bytes as u64, GRANULE)?;
        let start = reserved.start;
        let kind = Kind::Allocated { backing, _reserved: Some(reserved) };
        world.memory.add(start, bytes as u64, kind, Some(current.context));
        address.put(start)
    }

    /// What it is, and no more: see [`Kind::Managed`].
    fn cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: c_uint) {
        const GLOBAL_OR_HOST: [c_uint; 2] = [1, 2];
        let mut world = begin("cuMemAllocManaged");
        let current = world.current("cuMemAllocManaged");
        address.is_there()?;
        if bytes == 0 || !GLOBAL_OR_HOST.contains(&flags) {
            return Err(code::INVALID_VALUE);
        }
        let pages = HostPages::new(bytes as u64)?;
        let start = pages.start;
        let kind = Kind::Managed { _pages: pages };
        world.memory.add(start, bytes as u64, kind, Some(current.context));
        address.put(start)
    }

    /// Waits for the context's streams, which do not use it.
    fn cuMemFree_v2(address: u64) {
        let mut world = begin("cuMemFree");
        let current = world.current("cuMemFree");
        if address != 0 {
            world
                .memory
                .remove(address, "cuMemFree", |kind| matches!(kind, Kind::Allocated { .. } | Kind::Managed { .. }));
        }
        wait_for_all_alone(world, current);
        Ok(())
    }

    /// Waits for the context's streams ("Implicit Synchronization" in CUDA's programming guide).
    fn cuMemHostAlloc(address: Out<u64>, bytes: usize, flags: c_uint) {
        let world = begin("cuMemHostAlloc");
        let current = world.current("cuMemHostAlloc");
        wait_for_all(world, current);
        let mut world = begin("cuMemHostAlloc");
        address.is_there()?;
        if bytes == 0 || flags & !HOST_FLAGS != 0 {
            return Err(code::INVALID_VALUE);
        }
        let pages = HostPages::new(bytes as u64)?;
        let start = pages.start;
        world.memory.add(
            start,
            bytes as u64,
            Kind::Pinned { _pages: pages },
            Some(current.context),
        );
        address.put(start)
    }

    /// Waits for the context's streams, which do not use it.
    fn cuMemFreeHost(address: u64) {
        let mut world = begin("cuMemFreeHost");
        let current = world.current("cuMemFreeHost");
        world.memory.remove(address, "cuMemFreeHost", |kind| matches!(kind, Kind::Pinned { .. }));
        wait_for_all_alone(world, current);
        Ok(())
    }

    /// Counts by the byte: two ranges may share a page (seen on driver 580.159.04).
    fn cuMemHostRegister_v2(address: u64, bytes: usize, flags: c_uint) {
        let mut world = begin("cuMemHostRegister");
        let current = world.current("cuMemHostRegister");
        let end = address.checked_add(bytes as u64);
        if address == 0 || bytes == 0 || end.is_none() || flags & !HOST_FLAGS != 0 {
            return Err(code::INVALID_VALUE);
        }
        // Of what it allocated itself it says no more than that (seen on driver 580.159.04).
        let is_pinned = |range: &Arc<Range>| matches!(range.kind, Kind::Pinned { .. });
        if world.memory.within(address, bytes as u64).any(is_pinned) {
            return Err(code::INVALID_VALUE);
        }
        if world.memory.within(address, bytes as u64).next().is_some() {
            return Err(code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        // Pinned to be written unless told otherwise (seen on driver 580.159.04).
        if flags & cu::CU_MEMHOSTREGISTER_READ_ONLY == 0 && has_fixed(address, bytes as u64) {
            return Err(code::INVALID_VALUE);
        }
        world.memory.add(address, bytes as u64, Kind::Registered, Some(current.context));
        Ok(())
    }

    fn cuMemHostUnregister(address: u64) {
        let mut world = begin("cuMemHostUnregister");
        let current = world.current("cuMemHostUnregister");
        let there = world.memory.at(address);
        if !there.is_some_and(|r| r.start == address && matches!(r.kind, Kind::Registered)) {
            return Err(code::HOST_MEMORY_NOT_REGISTERED);
        }
        world.memory.remove(address, "cuMemHostUnregister", |_| true);
        wait_for_all_alone(world, current);
        Ok(())
    }

    fn cuMemGetAddressRange_v2(start: Out<u64>, bytes: Out<usize>, address: u64) {
        let world = begin("cuMemGetAddressRange");
        world.current("cuMemGetAddressRange");
        let range = world.memory.at(address).ok_or(code::NOT_FOUND)?;
        if start.is_there().is_ok() {
            start.put(range.start)?;
        }
        if bytes.is_there().is_ok() {
            bytes.put(memory::size(range.bytes))?;
        }
        Ok(())
    }

    /// Host memory that is neither pinned nor registered is an invalid value, as it is to the driver.
    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, address: u64) {
        use cu::CUpointer_attribute as A;
        let world = begin("cuPointerGetAttribute");
        let range = world.memory.at(address).ok_or(code::INVALID_VALUE)?;
        let is = |known: A| attribute == known as c_uint;
        let number = Out::<c_int>(data.cast());
        if is(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
            // Managed memory is a GPU's, wherever it lies.
            let host = range.gpu().is_none() && !matches!(range.kind, Kind::Managed { .. });
            let (host_type, device_type) =
                (cu::CUmemorytype::CU_MEMORYTYPE_HOST, cu::CUmemorytype::CU_MEMORYTYPE_DEVICE);
            Out::<c_uint>(data.cast()).put(if host { host_type } else { device_type } as c_uint)
        } else if is(A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
            let context = range.context.and_then(|context| world.contexts.get(&context));
            let gpu = range.gpu().or(context.map(|context| context.gpu));
            number.put(gpu.map_or(0, ordinal))
        } else if is(A::CU_POINTER_ATTRIBUTE_IS_MANAGED) {
            number.put(c_int::from(matches!(range.kind, Kind::Managed { .. })))
        } else if is(A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) {
            number.put(c_int::from(matches!(range.kind, Kind::Allocated { .. })))
        } else if is(A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) {
            Out::<u64>(data.cast()).put(range_of(&world, range).0)
        } else if is(A::CU_POINTER_ATTRIBUTE_RANGE_SIZE) {
            Out::<usize>(data.cast()).put(memory::size(range_of(&world, range).1))
        } else if is(A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR) {
            Out::<u64>(data.cast()).put(mapping_of(range).0)
        } else if is(A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE) {
            Out::<usize>(data.cast()).put(memory::size(mapping_of(range).1))
        } else if is(A::CU_POINTER_ATTRIBUTE_BUFFER_ID) {
            Out::<u64>(data.cast()).put(range.number)
        } else {
            broken!(NotModelled, "cuPointerGetAttribute {attribute}");
        }
    }

    /// The handle is of the whole allocation that the address is in.
    fn cuIpcGetMemHandle(handle: Out<cu::CUipcMemHandle>, address: u64) {
        let world = begin("cuIpcGetMemHandle");
        world.current("cuIpcGetMemHandle");
        let range = world.memory.at(address).ok_or(code::INVALID_VALUE)?;
        let Kind::Allocated { backing, .. } = &range.kind else { return Err(code::INVALID_VALUE) };
        let named = Named {
            process: std::process::id(),
            descriptor: u32::try_from(backing.file.as_raw_fd()).map_err(|_| code::INVALID_VALUE)?,
            inode: backing.inode,
        };
        handle.put(named.write())
    }

    /// Opened again by the same context, it is at the same address, and to be closed as often.
    fn cuIpcOpenMemHandle_v2(address: Out<u64>, handle: cu::CUipcMemHandle, flags: c_uint) {
        let mut world = begin("cuIpcOpenMemHandle");
        let current = world.current("cuIpcOpenMemHandle");
        address.is_there()?;
        if flags != cu::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint {
            return Err(code::INVALID_VALUE);
        }
        let named = Named::read(&handle).ok_or(code::INVALID_HANDLE)?;
        if named.process == std::process::id() {
            return Err(code::INVALID_CONTEXT);
        }
        let is_it = |range: &&Arc<memory::Range>| {
            range.context == Some(current.context)
                && matches!(&range.kind, Kind::Opened { backing, .. } if backing.inode == named.inode)
        };
        let there = world.memory.all().find(is_it).map(|range| range.start);
        let start = match there {
            Some(start) => start,
            None => {
                let backing = Backing::of(open_file_of(named.process, named.descriptor)?)?;
                if backing.inode != named.inode || !backing.lock() {
                    return Err(code::INVALID_VALUE);
                }
                if !memory::can_reach(current.gpu, backing.gpu) {
                    return Err(code::PEER_ACCESS_UNSUPPORTED);
                }
                let (bytes, reserved) = (backing.bytes, Reserved::new(backing.bytes, GRANULE)?);
                let start = reserved.start;
                let kind = Kind::Opened {
                    backing: Arc::new(backing),
                    _reserved: reserved,
                    by: current.gpu,
                };
                world.memory.add(start, bytes, kind, Some(current.context));
                start
            }
        };
        *world.opened.entry(start).or_insert(0) += 1;
        address.put(start)
    }

    fn cuIpcCloseMemHandle(address: u64) {
        let mut world = begin("cuIpcCloseMemHandle");
        let current = world.current("cuIpcCloseMemHandle");
        let Some(times) = world.opened.get_mut(&address) else {
            broken!(FreedTwice, "cuIpcCloseMemHandle {address:#x}");
        };
        *times -= 1;
        if *times == 0 {
            world.opened.remove(&address);
            world
                .memory
                .remove(address, "cuIpcCloseMemHandle", |kind| matches!(kind, Kind::Opened { .. }));
        }
        wait_for_all_alone(world, current);
        Ok(())
    }
}

/// Whether the process maps some of a range so that it cannot write to it (proc(5), maps).
fn has_fixed(address: u64, bytes: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().any(|line| {
        let mut words = line.split([' ', '-']);
        let mut number = || u64::from_str_radix(words.next()?, 16).ok();
        let (Some(first), Some(end)) = (number(), number()) else { return false };
        let writes = words.next().is_some_and(|rights| rights.contains('w'));
        first < address.saturating_add(bytes) && address < end && !writes
    })
}
