//! What NICs would be given of a GPU's memory: files of the right length for any range of any allocation, and nothing for
//! ranges that leave it. No NIC is needed; what one does with the file is not shown here.

use crate::rig::Gpu;
use crate::row::{GRANULE, Row};
use crate::signals::{call, within};
use cudarc::driver::sys as cu;
use immwire_cuda::{DmaBuf, Error as CudaError, Seen, SharedMemory, owner_of, whole_pages};
use rustix::fs::{SeekFrom, seek};
use serde_json::{Value, json};
use std::error::Error;
use std::time::Instant;

/// How often a flush is measured.
const FLUSHES: usize = 1000;

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

/// That memory which moves between the host and GPUs is refused, as a GPU's for NICs and for other processes.
fn managed(gpu: &Gpu) -> Result<(), Box<dyn Error>> {
    const BYTES: usize = 1 << 20;
    let mut address = 0;
    let flags = cu::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
    within(&gpu.device, || {
        // SAFETY: writes the one address.
        let made = unsafe { cu::cuMemAllocManaged(&raw mut address, BYTES, flags) };
        call("cuMemAllocManaged", made)
    })?;
    let owner = owner_of(&gpu.device, address + 4096, 4096);
    within(&gpu.device, || {
        // SAFETY: allocated above, and used by nobody.
        call("cuMemFree", unsafe { cu::cuMemFree_v2(address) })
    })?;
    match owner {
        Err(CudaError::Managed { .. }) => Ok(()),
        other => Err(format!("managed memory: {other:?}").into()),
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
        managed(gpu)?;
        // As an engine of all of them would have it.
        let by = if gpus.len() > 1 { Seen::ByAll } else { Seen::ByOwner };
        let mut times = Vec::with_capacity(FLUSHES);
        for _ in 0..FLUSHES {
            let started = Instant::now();
            gpu.device.flush_writes(by)?;
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
            let two = Row::new(&gpu.device, 2)?;
            note(export(gpu, two.at, 2 * GRANULE as u64)?);
        }
        found.push(json!({
            "reachable": offers.reachable, "dma_buf": offers.dma_buf, "seen": format!("{:?}", offers.seen),
            "flushes": offers.flushes, "to_do": format!("{:?}", offers.visibility(by)), "ranges": ranges,
            "slowest_export_us": slowest, "flush_us": {"p50": times[FLUSHES / 2], "p99": times[FLUSHES * 99 / 100]},
        }));
    }
    Ok(json!(found))
}
