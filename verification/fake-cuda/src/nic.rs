//! A GPU's memory as NICs reach it: DMA-BUFs, and what lies on the way to a GPU that has not been flushed.
//!
//! A DMA-BUF is a memfd that says which memory it stands for. Models of NICs import it by the functions at the end, which are
//! no driver's, and read and write through what they are given.
//!
//! # Invariants
//!
//! 1. What was imported keeps its memory: to free that is a violation until it is released.
//! 2. On a machine whose writes are unordered, what a NIC has written is seen by nobody before the GPU is flushed, a NIC reads
//!    there, or the import is released.

use crate::code::{self, Answer};
use crate::config;
use crate::memory::{Range, Table, size};
use crate::violation::broken;
use crate::world::world;
use cudarc::driver::sys as cu;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::ffi::c_int;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The host's pages, of which DMA-BUFs are made.
const PAGE: u64 = 4096;
/// Copies of a context are over when their calls return.
const ALL_COPIES: u32 = cu::CUctx_flags::CU_CTX_SYNC_MEMOPS as u32;
/// What the file begins with.
const MAGIC: [u8; 16] = *b"fake-cuda-dmabuf";
/// Of the file: [`MAGIC`], start, bytes, and how many pieces of memory that is; then the number of each.
const WORD: usize = 8;

/// Memory that a NIC has.
#[derive(Debug)]
struct Imported {
    start: u64,
    bytes: u64,
    ranges: Vec<Arc<Range>>,
}

/// Bytes on their way.
#[derive(Debug)]
struct OnTheWay {
    gpu: u8,
    import: u64,
    range: Arc<Range>,
    address: u64,
    bytes: Vec<u8>,
}

static ON_THE_WAY: Mutex<Vec<OnTheWay>> = Mutex::new(Vec::new());

fn on_the_way() -> MutexGuard<'static, Vec<OnTheWay>> {
    ON_THE_WAY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has all arrive that `is` chosen, in order.
fn land(is: impl Fn(&OnTheWay) -> bool) {
    for write in on_the_way().extract_if(.., |write| is(write)) {
        // SAFETY: the range is mapped as long as it is held, and the write lies in it (`Imported::each`); whoever else uses
        // it then breaks a rule of CUDA's, not of ours: these are bytes of a file.
        unsafe {
            let to = write.range.shadow(write.address);
            ptr::copy(write.bytes.as_ptr(), to, write.bytes.len());
        }
    }
}

/// How often somebody has asked for it.
static FLUSHES: AtomicU64 = AtomicU64::new(0);

/// No driver's: that number.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_flushes() -> u64 {
    FLUSHES.load(Ordering::Relaxed)
}

/// Has what NICs have written to a GPU's memory arrive.
pub(crate) fn flush(gpu: u8) {
    FLUSHES.fetch_add(1, Ordering::Relaxed);
    land(|write| write.gpu == gpu);
}

/// Makes a DMA-BUF of whole pages, all of them in memory of one GPU, but for what is behind the last piece on its last page.
pub(crate) fn export(memory: &Table, start: u64, bytes: u64) -> Answer<OwnedFd> {
    if bytes == 0 || !start.is_multiple_of(PAGE) || !bytes.is_multiple_of(PAGE) {
        return Err(code::INVALID_VALUE);
    }
    let (mut at, mut numbers, mut gpu) = (start, Vec::new(), None);
    for range in memory.within(start, bytes) {
        let owner = range.gpu().ok_or(code::INVALID_VALUE)?;
        if range.start > at || *gpu.get_or_insert(owner) != owner {
            return Err(code::INVALID_VALUE);
        }
        at = range.end();
        numbers.push(range.number);
    }
    if at.next_multiple_of(PAGE) < start + bytes {
        return Err(code::INVALID_VALUE);
    }
    let file = rustix::fs::memfd_create("fake-cuda-dma-buf", MemfdFlags::CLOEXEC);
    let file = file.map_err(|_| code::OPERATING_SYSTEM)?;
    rustix::fs::ftruncate(&file, bytes).map_err(|_| code::OPERATING_SYSTEM)?;
    let words =
        [start, bytes, numbers.len() as u64].into_iter().chain(numbers).flat_map(u64::to_ne_bytes);
    let said: Vec<u8> = MAGIC.into_iter().chain(words).collect();
    match rustix::io::pwrite(&file, &said, 0) {
        Ok(written) if written == said.len() => Ok(file),
        _ => Err(code::OPERATING_SYSTEM),
    }
}

impl Imported {
    /// `None`: it is no DMA-BUF of ours. That its memory is gone, or was not prepared, is a violation.
    fn of(file: BorrowedFd<'_>) -> Option<Self> {
        let mut said = vec![0; MAGIC.len() + 4096 * WORD];
        let read = rustix::io::pread(file, &mut said, 0).ok()?;
        said.truncate(read);
        let words = said.strip_prefix(&MAGIC)?;
        let mut words = words.as_chunks::<WORD>().0.iter().map(|word| u64::from_ne_bytes(*word));
        let (start, bytes, count) = (words.next()?, words.next()?, words.next()?);
        let world = world();
        let ranges: Vec<_> = world.memory.within(start, bytes).cloned().collect();
        if !ranges.iter().map(|range| range.number).eq(words.take(size(count))) {
            broken!(NotMemory, "a DMA-BUF of {bytes} bytes from {start:#x}, freed since");
        }
        let all_of = |gpu: Option<u8>| {
            let mut of_it = world.contexts.values().filter(|context| Some(context.gpu) == gpu);
            of_it.any(|context| context.flags & ALL_COPIES != 0)
        };
        let is_prepared =
            |range: &Arc<Range>| range.synchronous.load(Ordering::Relaxed) || all_of(range.gpu());
        if let Some(range) = ranges.iter().find(|range| !is_prepared(range)) {
            broken!(NotSynchronous, "{range}");
        }
        Some(Self { start, bytes, ranges })
    }

    /// Calls `each` with every piece of `len` bytes from `offset`, where it lies, and how far from the beginning of them.
    /// `false`: some of it is nowhere, and nothing was called.
    fn each(
        &self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(&Arc<Range>, u64, u64, u64),
    ) -> bool {
        let Some(end) = offset.checked_add(len).filter(|&end| end <= self.bytes) else {
            return false;
        };
        let (from, to) = (self.start + offset, self.start + end);
        let last = self.ranges.last().map_or(self.start, |range| range.end());
        if to > last {
            return false;
        }
        for range in &self.ranges {
            let (first, end) = (range.start.max(from), range.end().min(to));
            if first < end {
                each(range, first, end - first, first - from);
            }
        }
        true
    }
}

/// No driver's: imports a DMA-BUF, for a model of a NIC; 0 if it is none. To be released.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_import(file: c_int) -> u64 {
    if file < 0 {
        return 0;
    }
    // SAFETY: open, by the caller's promise, for the length of the call.
    let imported = Imported::of(unsafe { BorrowedFd::borrow_raw(file) });
    imported.map_or(0, |imported| Box::into_raw(Box::new(imported)) as u64)
}

/// No driver's: where the CPU finds bytes of a DMA-BUF, for a NIC that is the kernel's and takes no other memory; 0 if they
/// cannot be had in one range of addresses. Nobody keeps them from being freed meanwhile.
///
/// Bytes of several pieces of memory are mapped once more, one piece behind the other: `mapped` is how many bytes of
/// address space the caller has to unmap then, from the page on that the first byte is in; 0: none.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_shadow(
    file: c_int,
    offset: u64,
    bytes: u64,
    mapped: *mut u64,
) -> u64 {
    // SAFETY: the caller has a word there.
    unsafe { mapped.write(0) };
    if file < 0 {
        return 0;
    }
    // SAFETY: open, by the caller's promise, for the length of the call.
    let Some(imported) = Imported::of(unsafe { BorrowedFd::borrow_raw(file) }) else { return 0 };
    let mut pieces = Vec::new();
    imported.each(offset, bytes, |range, address, len, _| {
        pieces.push((Arc::clone(range), address, len));
    });
    if let [(range, address, _)] = &pieces[..] {
        return range.shadow(*address) as u64;
    }
    let Some((first, whole)) = join(&pieces) else { return 0 };
    // SAFETY: as above.
    unsafe { mapped.write(whole) };
    first
}

/// Maps pieces that adjoin once more, one behind the other. Where the first byte is then, and how many bytes of address space
/// that takes from its page on; `None` if there are no pieces, or some do not begin and end with a page of their file.
fn join(pieces: &[(Arc<Range>, u64, u64)]) -> Option<(u64, u64)> {
    let (_, first, _) = pieces.first()?;
    let (_, last, len) = pieces.last()?;
    let start = first / PAGE * PAGE;
    let whole = (last + len).next_multiple_of(PAGE) - start;
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let room = unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        mmap_anonymous(ptr::null_mut(), size(whole), ProtFlags::empty(), flags)
    };
    let room = room.ok()?;
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let is_mapped = pieces.iter().all(|(range, address, len)| {
        let from = address / PAGE * PAGE;
        let Some(backing) = range.backing() else { return false };
        let is_whole = range.start.is_multiple_of(PAGE)
            && (address + len).is_multiple_of(PAGE) | (address == last)
            && address.is_multiple_of(PAGE) | (address == first);
        let bytes = size((address + len).next_multiple_of(PAGE) - from);
        // SAFETY: the place is within the room above, which nobody else knows of.
        is_whole
            && unsafe {
                let place = room.byte_add(size(from - start));
                let flags = MapFlags::SHARED | MapFlags::FIXED;
                mmap(place, bytes, both, flags, &backing.file, from - range.start).is_ok()
            }
    });
    if !is_mapped {
        // SAFETY: mapped above, and given to nobody.
        let _ = unsafe { munmap(room, size(whole)) };
        return None;
    }
    Some((room as u64 + (first - start), whole))
}

/// No driver's: gives an import back. What is on its way there arrives.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_release(import: u64) {
    land(|write| write.import == import);
    // SAFETY: from `immwire_fake_cuda_import`, and not used again: the caller's promise.
    drop(unsafe { Box::from_raw(import as *mut Imported) });
}

/// No driver's: what a NIC writes. 0: some of it is outside, and nothing was written.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_nic_write(
    import: u64,
    offset: u64,
    from: *const u8,
    bytes: u64,
) -> c_int {
    // SAFETY: from `immwire_fake_cuda_import`, and not released: the caller's promise.
    let imported = unsafe { &*(import as *const Imported) };
    let unordered = config::get().is_ok_and(|config| config.unordered);
    let mut writes = Vec::new();
    let whole = imported.each(offset, bytes, |range, address, len, after| {
        let mut copy = vec![0; size(len)];
        // SAFETY: the caller has `bytes` bytes there, of which these are a part.
        unsafe { ptr::copy_nonoverlapping(from.add(size(after)), copy.as_mut_ptr(), size(len)) };
        let (range, gpu) = (Arc::clone(range), range.gpu().unwrap_or(u8::MAX));
        writes.push(OnTheWay { gpu, import, range, address, bytes: copy });
    });
    on_the_way().extend(writes);
    if !unordered {
        land(|write| write.import == import);
    }
    c_int::from(whole)
}

/// No driver's: what a NIC reads, which has writes arrive before. 0: some of it is outside, and nothing was read.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_nic_read(
    import: u64,
    offset: u64,
    to: *mut u8,
    bytes: u64,
) -> c_int {
    land(|write| write.import == import);
    // SAFETY: from `immwire_fake_cuda_import`, and not released: the caller's promise.
    let imported = unsafe { &*(import as *const Imported) };
    c_int::from(imported.each(offset, bytes, |range, address, len, after| {
        // SAFETY: the range is mapped as long as it is held; the caller has room for `bytes` bytes, of which these are a part.
        unsafe { ptr::copy(range.shadow(address), to.add(size(after)), size(len)) };
    }))
}
