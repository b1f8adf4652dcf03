//! Regions over several allocations, between engines of two processes: ranges over all of them, and pages over their borders, both
//! ways, every byte compared.

use crate::rig::{Gpu, Random};
use crate::row::{GRANULE, Row};
use cudarc::driver::sys as cu;
use immwire::{
    MrDesc, NetAddr, PagedWrite, Pages, PeerId, Region, Rights, SingleWrite, TransferEngine,
    core::wire::Wire,
};
use immwire_cuda::{Device, look_up};
use serde_json::{Value, json};
use std::error::Error;
use std::io::{BufRead, BufReader, Write, stdin};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// No step takes longer.
const LIMIT: Duration = Duration::from_secs(20);
/// Allocations of each region.
const PARTS: [usize; 4] = [2, 3, 17, 300];
/// What of them lies before the region, and behind it.
const AROUND: (usize, usize) = (4096 + 16, 8192 + 48);
/// No whole number of them in an allocation.
const PAGE: usize = 96 << 10;
/// What is filled and compared at a time: whole pages. Regions are of hundreds of MiB, and both processes would have them in several copies.
const PART: usize = 32 * PAGE;

/// A region over so many allocations of a GPU, which go when it is closed.
struct Held {
    region: Option<Region>,
    row: Row,
}

impl Held {
    fn new(engine: &TransferEngine, gpu: u32, parts: usize) -> Outcome<Self> {
        let device = Device::open(gpu)?;
        let row = Row::new(&device, parts)?;
        let (at, bytes) = (row.at + AROUND.0 as u64, row.bytes() - AROUND.0 - AROUND.1);
        let found = look_up(&device, at, bytes as u64)?.ok_or("no memory of a GPU")?;
        let expected = (gpu, row.at, row.bytes() as u64, u32::try_from(parts)?);
        if (found.ordinal, found.start, found.bytes, found.allocations) != expected {
            return Err(format!("{found:?}, not {expected:x?}").into());
        }
        let ptr = NonNull::new(at as *mut u8).ok_or("no address")?;
        // SAFETY: mapped until the region is closed; no reference to the bytes is made.
        let region = unsafe { engine.register(ptr, bytes, Rights::REMOTE_WRITE)? };
        Ok(Self { region: Some(region), row })
    }

    fn region(&self) -> Outcome<&Region> {
        Ok(self.region.as_ref().ok_or("it is closed")?)
    }

    fn close(mut self) -> Outcome<()> {
        self.region.take().ok_or("it is closed")?.close(LIMIT)?;
        drop(self.row);
        Ok(())
    }

    fn fill(&self, seed: u64) -> Outcome<()> {
        let region = self.region()?;
        let len = usize::try_from(region.len())?;
        let mut part = vec![0; PART];
        for at in (0..len).step_by(PART) {
            let part = &mut part[..PART.min(len - at)];
            content(seed, at, part);
            region.write(at as u64, part)?;
        }
        Ok(())
    }

    /// Where it is not what is `expected`, which gives the bytes from one on.
    fn differs(&self, expected: impl Fn(usize, &mut [u8])) -> Outcome<Option<usize>> {
        let region = self.region()?;
        let len = usize::try_from(region.len())?;
        let (mut found, mut wanted) = (vec![0; PART], vec![0; PART]);
        for at in (0..len).step_by(PART) {
            let bytes = PART.min(len - at);
            let (found, wanted) = (&mut found[..bytes], &mut wanted[..bytes]);
            region.read(at as u64, found)?;
            expected(at, wanted);
            if found != wanted {
                let first = found.iter().zip(wanted.iter()).position(|(a, b)| a != b);
                return Ok(first.map(|first| at + first));
            }
        }
        Ok(None)
    }
}

/// What is filled with from a seed, from a byte on whose number is a multiple of eight.
fn content(seed: u64, at: usize, bytes: &mut [u8]) {
    Random::after(seed, at as u64 / 8).fill(bytes);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn encode(desc: &MrDesc) -> Outcome<String> {
    let mut bytes = [0; 1024];
    let len = desc.encode(&mut bytes)?;
    Ok(hex(&bytes[..len]))
}

fn decode(hex: &str) -> Outcome<MrDesc> {
    let bytes = (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16));
    Ok(MrDesc::decode(&bytes.collect::<Result<Vec<_>, _>>()?)?)
}

fn write(
    engine: &TransferEngine,
    peer: PeerId,
    src: &Region,
    dst: &MrDesc,
    len: u64,
) -> Outcome<()> {
    let (src_offset, dst_offset, imm) = (0, 0, None);
    let one = SingleWrite { peer, src, src_offset, dst, dst_offset, len, imm };
    match engine.submit_single_write(&one)?.wait(LIMIT)? {
        immwire::End::Done => Ok(()),
        end => Err(format!("{end:?}").into()),
    }
}

/// Where each page goes.
fn places(bytes: usize) -> Vec<u32> {
    let count = bytes / PAGE;
    Random(count as u64).distinct(count, count)
}

/// The other process, on this GPU. Answers one line for each that it reads.
pub(crate) fn hold(gpu: &str) -> Outcome<()> {
    let gpu = gpu.parse()?;
    let engine = TransferEngine::builder().gpus(vec![gpu]).build()?;
    println!("{}", engine.address());
    let mut peer = None;
    let mut held = None;
    for line in stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match (words.as_slice(), held.as_ref()) {
            (["peer", address], _) => {
                let there = engine.add_peer(&address.parse::<NetAddr>()?)?;
                engine.wait_peer(there, LIMIT)?;
                peer = Some(there);
                "up".into()
            }
            (["hold", parts], None) => {
                let new = Held::new(&engine, gpu, parts.parse()?)?;
                let desc = encode(&new.region()?.desc())?;
                held = Some(new);
                desc
            }
            (["fill", seed], Some(held)) => {
                held.fill(seed.parse()?)?;
                "filled".into()
            }
            (["compare", seed, paged], Some(held)) => {
                let (seed, len) = (seed.parse::<u64>()?, usize::try_from(held.region()?.len())?);
                let from = if paged.parse()? { sources(len) } else { Vec::new() };
                let differs = held.differs(|at, bytes| turned(seed, &from, at, bytes))?;
                format!("{differs:?}")
            }
            (["write", desc], Some(held)) => {
                let (there, region) = (peer.ok_or("no peer")?, held.region()?);
                write(&engine, there, region, &decode(desc)?, region.len())?;
                "done".into()
            }
            (["close"], Some(_)) => {
                held.take().ok_or("nothing is held")?.close()?;
                "closed".into()
            }
            _ => return Err(format!("what is {line}?").into()),
        };
        println!("{answer}");
    }
    Ok(())
}

/// Which page came to each place.
fn sources(bytes: usize) -> Vec<usize> {
    let mut sources = vec![0; bytes / PAGE];
    for (from, to) in places(bytes).into_iter().enumerate() {
        sources[to as usize] = from;
    }
    sources
}

/// The content whose pages were written each to another place, from the first byte of one on; what is no whole page stays.
fn turned(seed: u64, sources: &[usize], at: usize, bytes: &mut [u8]) {
    for (page, bytes) in (at / PAGE..).zip(bytes.chunks_mut(PAGE)) {
        let from = sources.get(page).copied().unwrap_or(page);
        content(seed, from * PAGE, bytes);
    }
}

/// The other process, as this one sees it.
struct There {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl There {
    fn start(gpu: u32) -> Outcome<(Self, String)> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["hold", &gpu.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take().ok_or("no pipe")?;
        let answers = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        let mut there = Self { child, orders, answers };
        let address = there.hear()?;
        Ok((there, address))
    }

    fn tell(&mut self, line: &str) -> Outcome<()> {
        writeln!(self.orders, "{line}")?;
        Ok(())
    }

    fn ask(&mut self, line: &str) -> Outcome<String> {
        self.tell(line)?;
        self.hear()
    }

    fn hear(&mut self) -> Outcome<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() {
            return Err("the other process has ended".into());
        }
        Ok(line.trim_end().to_owned())
    }

    fn expect(&mut self, line: &str, answer: &str) -> Outcome<()> {
        let said = self.ask(line)?;
        if said == answer { Ok(()) } else { Err(format!("{line}: {said}").into()) }
    }
}

impl Drop for There {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the driver writes for a call, or its answer.
fn told<T: Default + Into<Value>>(ask: impl FnOnce(&mut T) -> cu::CUresult) -> Value {
    let mut told = T::default();
    match ask(&mut told) {
        cu::CUresult::CUDA_SUCCESS => told.into(),
        answer => json!(format!("{answer:?}")),
    }
}

/// What the driver says of an address, word by word. A context is current.
fn facts(address: u64) -> Value {
    use cu::CUpointer_attribute as A;
    // An `int` is as long as a half of what it is written to, the lower one.
    let ask = |which| {
        // SAFETY: writes a number of up to eight bytes.
        told::<u64>(|to| unsafe {
            cu::cuPointerGetAttribute((&raw mut *to).cast(), which, address)
        })
    };
    let mut bytes = 0_usize;
    // SAFETY: writes the two numbers.
    let start =
        told::<u64>(|to| unsafe { cu::cuMemGetAddressRange_v2(to, &raw mut bytes, address) });
    let handle = told::<u64>(|to| {
        // SAFETY: writes the one handle.
        let kept = unsafe { cu::cuMemRetainAllocationHandle(to, address as *mut _) };
        if kept == cu::CUresult::CUDA_SUCCESS {
            // SAFETY: a reference of ours, given back once.
            let _ = unsafe { cu::cuMemRelease(*to) };
        }
        kept
    });
    json!({
        "address": address,
        "range": [ask(A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR), ask(A::CU_POINTER_ATTRIBUTE_RANGE_SIZE)],
        "mapping": [ask(A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR), ask(A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE)],
        "address_range": [start, bytes],
        "legacy_ipc": ask(A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE),
        "handle": handle,
    })
}

/// Within which bounds an address lies, to this driver: of memory of `cudaMalloc`, and of two allocations side by side, in the midst
/// of reserved addresses. Said at once, as what is checked afterwards may fail for it.
pub(crate) fn bounds(gpu: &Gpu) -> Outcome<Value> {
    let (small, large) = (gpu.memory(3 << 20)?, gpu.memory(100 << 20)?);
    let two = Row::within(&gpu.device, 1, 2, 1)?;
    // SAFETY: the context is alive as long as the device; it is taken off below.
    unsafe { cu::cuCtxPushCurrent_v2(gpu.device.context().cast()) }.result()?;
    let said = json!({
        "malloc_3_MiB": facts(small.address() + (3 << 20) - 1),
        "malloc_100_MiB": facts(large.address() + (100 << 20) - 1),
        "two_reserved": two.reserved,
        "two_first_byte": facts(two.at),
        "two_last_byte": facts(two.at + two.bytes() as u64 - 1),
    });
    let mut popped = std::ptr::null_mut();
    // SAFETY: takes off what was pushed above.
    unsafe { cu::cuCtxPopCurrent_v2(&raw mut popped) }.result()?;
    eprintln!("bounds: {said}");
    Ok(said)
}

/// From GPU 0 to the last, and back.
pub(crate) fn run(gpus: usize) -> Outcome<Value> {
    let far = u32::try_from(gpus.saturating_sub(1))?;
    let engine = TransferEngine::builder().gpus(vec![0]).build()?;
    let (mut there, address) = There::start(far)?;
    let peer = engine.add_peer(&address.parse::<NetAddr>()?)?;
    engine.wait_peer(peer, LIMIT)?;
    there.expect(&format!("peer {}", engine.address()), "up")?;
    let mut results = Vec::new();
    for (parts, seed) in PARTS.into_iter().zip((1_u64..).step_by(10)) {
        let started = Instant::now();
        let near = Held::new(&engine, 0, parts)?;
        let registered_us = started.elapsed().as_secs_f64() * 1e6;
        let desc = decode(&there.ask(&format!("hold {parts}"))?)?;
        let src = near.region()?;
        let len = usize::try_from(src.len())?;
        // Both at once.
        there.tell(&format!("fill {}", seed + 1))?;
        near.fill(seed)?;
        let said = there.hear()?;
        if said != "filled" {
            return Err(format!("fill: {said}").into());
        }
        // The first write opens the region; the second finds it open.
        let mut took = [0.0; 2];
        for took in &mut took {
            let started = Instant::now();
            write(&engine, peer, src, &desc, 8)?;
            *took = started.elapsed().as_secs_f64() * 1e6;
        }
        let started = Instant::now();
        write(&engine, peer, src, &desc, src.len())?;
        let whole_us = started.elapsed().as_secs_f64() * 1e6;
        there.expect(&format!("compare {seed} false"), "None")?;
        let count = u32::try_from(len / PAGE)?;
        let list =
            |indices: Vec<u32>| Pages { indices: indices.into(), stride: PAGE as u64, offset: 0 };
        let paged = PagedWrite {
            peer,
            page_bytes: PAGE as u64,
            src,
            src_pages: list((0..count).collect()),
            dst: &desc,
            dst_pages: list(places(len)),
            imm: None,
        };
        match engine.submit_paged_writes(&paged)?.wait(LIMIT)? {
            immwire::End::Done => {}
            end => return Err(format!("pages: {end:?}").into()),
        }
        there.expect(&format!("compare {seed} true"), "None")?;
        // And back, over allocations of ours.
        there.expect(&format!("fill {}", seed + 2), "filled")?;
        there.expect(&format!("write {}", encode(&src.desc())?), "done")?;
        if let Some(at) = near.differs(|at, bytes| content(seed + 2, at, bytes))? {
            return Err(format!("byte {at} of what came over {parts} allocations").into());
        }
        there.expect("close", "closed")?;
        near.close()?;
        results.push(json!({
            "allocations": parts, "bytes": len, "of_each": GRANULE, "pages": count, "registered_us": registered_us,
            "first_write_us": took[0], "second_write_us": took[1], "whole_GBps": len as f64 / whole_us / 1e3,
            "differences": 0,
        }));
    }
    Ok(json!(results))
}
