//! Memory that is made, given addresses and mapped in steps of its own.

use super::device::{gpu, ordinal};
use super::{In, Out, calls};
use crate::code::{self, Answer};
use crate::memory::{self, Backing, GRANULE, Kind, Reserved, duplicate};
use crate::violation::broken;
use crate::world::{World, begin};
use cudarc::driver::sys as cu;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_A_GPU: c_uint = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_uint = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const BY_DESCRIPTOR: c_uint = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_NONE`, `_READ` and `_READWRITE`.
const ACCESSES: [c_uint; 3] = [0, 1, 3];

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    kind: c_uint,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    win32: u64,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    location: Location,
    flags: c_uint,
}

const _: () = assert!(size_of::<Properties>() == size_of::<cu::CUmemAllocationProp>());
const _: () = assert!(size_of::<Access>() == size_of::<cu::CUmemAccessDesc>());

impl Location {
    fn gpu(self) -> Answer<u8> {
        if self.kind == ON_A_GPU { gpu(self.id) } else { Err(code::NOT_SUPPORTED) }
    }
}

/// How long it takes to unmap something.
const UNMAPPING: Duration = Duration::from_micros(50);

impl Properties {
    /// Checked; returns the GPU.
    fn gpu(&self) -> Answer<u8> {
        if self.kind != PINNED {
            return Err(code::INVALID_VALUE);
        }
        if self.handle_types & !BY_DESCRIPTOR != 0 {
            return Err(code::NOT_SUPPORTED);
        }
        self.location.gpu()
    }
}

fn whole(bytes: u64) -> Answer {
    if bytes > 0 && bytes.is_multiple_of(GRANULE) { Ok(()) } else { Err(code::INVALID_VALUE) }
}

/// What is mapped in exactly `bytes` bytes from `start`, without a gap.
fn mapped(world: &World, start: u64, bytes: u64) -> Answer<Vec<u64>> {
    let (mut at, mut starts) = (start, Vec::new());
    for range in world.memory.within(start, bytes) {
        if range.start != at || !matches!(range.kind, Kind::Mapped { .. }) {
            return Err(code::INVALID_VALUE);
        }
        starts.push(at);
        at = range.end();
    }
    if bytes > 0 && start.checked_add(bytes) == Some(at) {
        Ok(starts)
    } else {
        Err(code::INVALID_VALUE)
    }
}

/// Gives out one more handle.
fn create(world: &mut World, backing: &Arc<Backing>) -> u64 {
    let handle = backing.handle;
    world.created.entry(handle).or_insert_with(|| (Arc::clone(backing), 0)).1 += 1;
    handle
}

fn created<'a>(world: &'a World, call: &str, handle: u64) -> &'a Arc<Backing> {
    match world.created.get(&handle) {
        Some((backing, _)) => backing,
        None => broken!(Handle, "{call}: memory {handle:#x}"),
    }
}

calls! {
    fn cuMemGetAllocationGranularity(
        bytes: Out<usize>,
        properties: In<Properties>,
        _which: c_uint,
    ) {
        drop(begin("cuMemGetAllocationGranularity"));
        properties.get()?.gpu()?;
        bytes.put(memory::size(GRANULE))
    }

    fn cuMemCreate(handle: Out<u64>, bytes: usize, properties: In<Properties>, flags: c_ulonglong) {
        let mut world = begin("cuMemCreate");
        handle.is_there()?;
        let properties = properties.get()?;
        let gpu = properties.gpu()?;
        whole(bytes as u64)?;
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let mut backing = Backing::new(gpu, bytes as u64)?;
        backing.by_descriptor = properties.handle_types == BY_DESCRIPTOR;
        handle.put(create(&mut world, &Arc::new(backing)))
    }

    /// The memory lives on while it is mapped.
    fn cuMemRelease(handle: u64) {
        let mut world = begin("cuMemRelease");
        created(&world, "cuMemRelease", handle);
        if world.unmapping.get(&handle).is_some_and(|by| *by != std::thread::current().id()) {
            broken!(ReleasedMeanwhile, "cuMemRelease: memory {handle:#x}");
        }
        if let Some((_, count)) = world.created.get_mut(&handle) {
            *count -= 1;
            if *count == 0 {
                world.created.remove(&handle);
            }
        }
        Ok(())
    }

    fn cuMemRetainAllocationHandle(handle: Out<u64>, address: u64) {
        let mut world = begin("cuMemRetainAllocationHandle");
        handle.is_there()?;
        let range = Arc::clone(world.memory.at(address).ok_or(code::INVALID_VALUE)?);
        let Kind::Mapped { backing, .. } = &range.kind else { return Err(code::INVALID_VALUE) };
        handle.put(create(&mut world, backing))
    }

    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<Properties>, handle: u64) {
        let world = begin("cuMemGetAllocationPropertiesFromHandle");
        let backing = created(&world, "cuMemGetAllocationPropertiesFromHandle", handle);
        properties.put(Properties {
            kind: PINNED,
            handle_types: if backing.by_descriptor { BY_DESCRIPTOR } else { 0 },
            location: Location { kind: ON_A_GPU, id: ordinal(backing.gpu) },
            win32: 0,
            flags: [0; 8],
        })
    }

    fn cuMemExportToShareableHandle(
        to: *mut c_void,
        handle: u64,
        kind: c_uint,
        flags: c_ulonglong,
    ) {
        let world = begin("cuMemExportToShareableHandle");
        let backing = created(&world, "cuMemExportToShareableHandle", handle);
        let to = Out::<c_int>(to.cast());
        to.is_there()?;
        if kind != BY_DESCRIPTOR || flags != 0 || !backing.by_descriptor {
            return Err(code::INVALID_VALUE);
        }
        to.put(duplicate(&backing.file)?.into_raw_fd())
    }

    /// The descriptor, which the "pointer" is, stays the caller's.
    fn cuMemImportFromShareableHandle(handle: Out<u64>, from: usize, kind: c_uint) {
        let mut world = begin("cuMemImportFromShareableHandle");
        handle.is_there()?;
        let descriptor = c_int::try_from(from).map_err(|_| code::INVALID_VALUE)?;
        if kind != BY_DESCRIPTOR {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: open while this call lasts: the caller's promise; if not, duplicating it fails.
        let file = duplicate(unsafe { BorrowedFd::borrow_raw(descriptor) })?;
        let mut backing = Backing::of(file)?;
        backing.by_descriptor = true;
        handle.put(create(&mut world, &Arc::new(backing)))
    }

    fn cuMemAddressReserve(
        address: Out<u64>,
        bytes: usize,
        multiple: usize,
        _hint: u64,
        flags: c_ulonglong,
    ) {
        let mut world = begin("cuMemAddressReserve");
        address.is_there()?;
        whole(bytes as u64)?;
        if flags != 0 || (multiple != 0 && !multiple.is_power_of_two()) {
            return Err(code::INVALID_VALUE);
        }
        let reserved = Reserved::new(bytes as u64, multiple as u64)?;
        let start = reserved.start;
        world.reserved.insert(start, reserved);
        address.put(start)
    }

    fn cuMemAddressFree(address: u64, bytes: usize) {
        let mut world = begin("cuMemAddressFree");
        match world.reserved.get(&address) {
            None => broken!(FreedTwice, "cuMemAddressFree {address:#x}"),
            Some(reserved) if reserved.bytes != bytes as u64 => {
                broken!(NotAsMapped, "cuMemAddressFree {address:#x}: {bytes} of {} bytes", reserved.bytes);
            }
            Some(_) => {}
        }
        if let Some(range) = world.memory.within(address, bytes as u64).next() {
            broken!(MemoryInUse, "cuMemAddressFree {address:#x}: {range}");
        }
        world.reserved.remove(&address);
        Ok(())
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) {
        let mut world = begin("cuMemMap");
        let backing = Arc::clone(created(&world, "cuMemMap", handle));
        whole(bytes as u64)?;
        let reserved = world.reserved.range(..=address).next_back();
        let end = address.checked_add(bytes as u64).ok_or(code::INVALID_VALUE)?;
        let fits = reserved.is_some_and(|(start, reserved)| end <= start + reserved.bytes);
        let right = address.is_multiple_of(GRANULE) && offset == 0 && flags == 0;
        if !fits || !right || bytes as u64 > backing.bytes {
            return Err(code::INVALID_VALUE);
        }
        if let Some(range) = world.memory.within(address, bytes as u64).next() {
            broken!(MappedOver, "cuMemMap {address:#x}, {bytes} bytes: {range}");
        }
        let kind = Kind::Mapped { backing, access: AtomicU64::new(0) };
        world.memory.add(address, bytes as u64, kind, None);
        Ok(())
    }

    /// What was mapped at once goes at once; several mappings may. It takes a while, in which other threads go on.
    fn cuMemUnmap(address: u64, bytes: usize) {
        let call = "cuMemUnmap";
        let find = |world: &World| match mapped(world, address, bytes as u64) {
            Ok(starts) => starts,
            Err(_) => broken!(NotAsMapped, "{call} {address:#x}, {bytes} bytes"),
        };
        let of = |world: &World, start: u64| match &world.memory.at(start)?.kind {
            Kind::Mapped { backing, .. } => Some(backing.handle),
            _ => None,
        };
        let mut world = begin(call);
        let handles: Vec<u64> = find(&world).iter().filter_map(|&start| of(&world, start)).collect();
        let this = std::thread::current().id();
        world.unmapping.extend(handles.iter().map(|&handle| (handle, this)));
        drop(world);
        std::thread::sleep(UNMAPPING);
        let mut world = begin(call);
        for start in find(&world) {
            world.memory.remove(start, call, |_| true);
        }
        world.unmapping.retain(|handle, _| !handles.contains(handle));
        Ok(())
    }

    fn cuMemSetAccess(address: u64, bytes: usize, list: *const Access, count: usize) {
        let world = begin("cuMemSetAccess");
        let starts = mapped(&world, address, bytes as u64)?;
        let mut wanted = Vec::new();
        for i in 0..count {
            let access = In(list.wrapping_add(i)).get()?;
            let gpu = access.location.gpu()?;
            if !ACCESSES.contains(&access.flags) {
                return Err(code::INVALID_VALUE);
            }
            wanted.push((gpu, u64::from(access.flags)));
        }
        let ranges = || starts.iter().filter_map(|&start| world.memory.at(start));
        let far = |owner: Option<u8>| {
            wanted.iter().any(|w| !memory::can_reach(w.0, owner.unwrap_or(w.0)))
        };
        if ranges().any(|range| far(range.gpu())) {
            return Err(code::INVALID_DEVICE);
        }
        for range in ranges() {
            let Kind::Mapped { access, .. } = &range.kind else { continue };
            for &(gpu, bits) in &wanted {
                let others = access.load(Ordering::Relaxed) & !(3 << (2 * gpu));
                access.store(others | bits << (2 * gpu), Ordering::Relaxed);
            }
        }
        Ok(())
    }
}
