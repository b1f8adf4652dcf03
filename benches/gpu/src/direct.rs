//! What NICs would be given of a GPU's memory: files of the right length for any range of any allocation, and nothing for
//! ranges that leave it. No NIC is needed; what one does with the file is not shown here.

use crate::rig::Gpu;
use cudarc::driver::sys as cu;
use immwire_cuda::{DmaBuf, Error as CudaError, SharedMemory, owner_of, whole_pages};
use rustix::fs::{SeekFrom, seek};
use serde_json::{Value, json};
use std::error::Error;
use std::time::Instant;

/// Of one allocation of `cuMemCreate`, on all GPUs that there are.
const GRANULE: usize = 2 << 20;
/// How often a flush is measured.
const FLUSHES: usize = 1000;

/// Two allocations of one GPU, one behind the other, as frameworks make large tensors that grow.
struct Two {
    at: u64,
}

impl Two {
    fn new(gpu: &Gpu) -> Result<Self, Box<dyn Error>> {
        let location = cu::CUmemLocation {
            type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: i32::try_from(gpu.device.ordinal())?,
        };
        let wanted = cu::CUmemAllocationProp {
            type_: cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes:
                cu::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: cu::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 1,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let access = cu::CUmemAccessDesc {
            location,
            flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let mut at = 0;
        // SAFETY: the context is current for as long as this is built; numbers are written where they are kept, structures
        // read that are there. What is mapped lies in what was reserved.
        unsafe {
            cu::cuCtxPushCurrent_v2(gpu.device.context().cast()).result()?;
            cu::cuMemAddressReserve(&raw mut at, 2 * GRANULE, 0, 0, 0).result()?;
            for part in 0..2_u64 {
                let mut physical = 0;
                cu::cuMemCreate(&raw mut physical, GRANULE, &raw const wanted, 0).result()?;
                let there = at + part * GRANULE as u64;
                cu::cuMemMap(there, GRANULE, 0, physical, 0).result()?;
                cu::cuMemRelease(physical).result()?;
            }
            cu::cuMemSetAccess(at, 2 * GRANULE, &raw const access, 1).result()?;
            let mut popped = std::ptr::null_mut();
            cu::cuCtxPopCurrent_v2(&raw mut popped).result()?;
        }
        Ok(Self { at })
    }
}

impl Drop for Two {
    fn drop(&mut self) {
        // SAFETY: mapped and reserved by `new`; nobody uses it any more.
        unsafe {
            let _ = cu::cuMemUnmap(self.at, GRANULE);
            let _ = cu::cuMemUnmap(self.at + GRANULE as u64, GRANULE);
            let _ = cu::cuMemAddressFree(self.at, 2 * GRANULE);
        }
    }
}

/// Exports parts of `whole` bytes from `address`; returns how many, and how long each took at most, in microseconds.
fn export(gpu: &Gpu, address: u64, whole: u64) -> Result<(u32, f64), Box<dyn Error>> {
    let page = rustix::param::page_size() as u64;
    let ends = [0, 1, page - 1, page, whole / 2 - 3, whole / 2 + 5, whole - 1, whole];
    let (mut count, mut slowest) = (0, 0.0_f64);
    let fits = |(from, to): &(u64, u64)| from < to && *to <= whole;
    for (from, to) in ends.into_iter().flat_map(|from| ends.map(|to| (from, to))).filter(fits) {
        let (at, bytes) = (address + from, to - from);
        let owner = owner_of(&gpu.device, at, bytes)?;
        if owner != Some(gpu.device.ordinal()) {
            return Err(format!("{bytes} bytes at {from} of {whole} are {owner:?}'s").into());
        }
        let started = Instant::now();
        let file = DmaBuf::new(&gpu.device, at, bytes, page)
            .map_err(|why| format!("{bytes} bytes at {from} of {whole}: {why}"))?;
        slowest = slowest.max(started.elapsed().as_secs_f64() * 1e6);
        let expected = whole_pages(at, bytes, page).ok_or("no pages")?;
        let length = seek(&file, SeekFrom::End(0))?;
        if (file.start(), length) != expected || file.start() + file.offset() != at {
            return Err(format!("{bytes} bytes at {at:#x}: a file of {length} bytes from {:#x}, the range {} bytes into it",
                file.start(), file.offset()).into());
        }
        count += 1;
    }
    let past = owner_of(&gpu.device, address, (whole + 1).next_multiple_of(GRANULE as u64) + 1);
    match past {
        Err(CudaError::Hole { .. }) => Ok((count, slowest)),
        other => Err(format!("a range that leaves its allocation of {whole}: {other:?}").into()),
    }
}

/// What each GPU offers, and that ranges of its memory are exported as they should be.
pub(crate) fn run(gpus: &[Gpu]) -> Result<Value, Box<dyn Error>> {
    let mut found = Vec::new();
    for gpu in gpus {
        let offers = gpu.device.direct()?;
        let host = vec![0_u8; 4096];
        if owner_of(&gpu.device, host.as_ptr() as u64, 4096)?.is_some() {
            return Err("memory of the host is taken for a GPU's".into());
        }
        let mut times = Vec::with_capacity(FLUSHES);
        for _ in 0..FLUSHES {
            let started = Instant::now();
            gpu.device.flush_writes()?;
            times.push(started.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        let (mut ranges, mut slowest) = (0, 0.0_f64);
        let mut note = |(count, took): (u32, f64)| {
            ranges += count;
            slowest = slowest.max(took);
        };
        if offers.dma_buf {
            for bytes in [4096, 100_000, GRANULE, 3 * GRANULE + 512, 64 << 20] {
                let memory = gpu.memory(bytes)?;
                note(export(gpu, memory.address(), bytes as u64)?);
                let shared = SharedMemory::zeroed(&gpu.device, bytes)?;
                note(export(gpu, shared.address(), shared.bytes() as u64)?);
            }
            let two = Two::new(gpu)?;
            note(export(gpu, two.at, 2 * GRANULE as u64)?);
        }
        found.push(json!({
            "reachable": offers.reachable, "dma_buf": offers.dma_buf, "seen": format!("{:?}", offers.seen),
            "flushes": offers.flushes, "to_do": format!("{:?}", offers.visibility()), "ranges": ranges,
            "slowest_export_us": slowest, "flush_us": {"p50": times[FLUSHES / 2], "p99": times[FLUSHES * 99 / 100]},
        }));
    }
    Ok(json!(found))
}
