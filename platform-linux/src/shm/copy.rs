//! The two ways in which bytes get to where a write goes: a plain copy, and one that the kernel makes.
//!
//! Neither checks whether it may: bounds, grants and lifetimes are the callers' to argue.

use rustix::io::Errno;

use super::socket::last_errno;

/// Copies `len` bytes from `src` to `dst`, which is part of `area` bytes that are written in turn.
///
/// Another process may access the same bytes at the same time: its program may break the rule that a
/// buffer under transfer is left alone, as it may with a NIC. The bytes are then a mixture of both, as
/// they are with a NIC, and nothing else happens: the copy is `memcpy` on memory that no Rust reference
/// covers, its result is not looked at, and what orders it are the atomics of lanes and hazard words.
///
/// # Safety
///
/// - `src..src + len` may be read, and `dst..dst + len` written, until the call returns.
/// - The two do not overlap, as addresses. (Two mappings of one file may; the bytes are then whichever
///   order the copy took, which is the caller's program's fault.)
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize, area: usize) {
    #[cfg(target_arch = "x86_64")]
    if past_caches(len, area) {
        // SAFETY: our caller's promise.
        return unsafe { stream(src, dst, len) };
    }
    let _ = area;
    // SAFETY: our caller's promise; bytes have no alignment.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
}

/// As [`copy`], for what fits the caches whatever the area; a word in one move.
///
/// # Safety
///
/// As for [`copy`].
#[inline(always)]
pub(super) unsafe fn copy_short(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: our caller's promise, of as many bytes; bytes have no alignment.
    unsafe {
        match len {
            8 => std::ptr::copy_nonoverlapping(src, dst, 8),
            len => std::ptr::copy_nonoverlapping(src, dst, len),
        }
    }
}

/// Whether a copy of `len` bytes into an area of `area` goes past the caches.
///
/// Where the lines are not cached anyway, it need not fetch them first: a fifth to a half more bytes
/// move in a second, whether the receiver reads them then or not. They are not if the area is larger
/// than the caches, and seldom if the copy is long. Short copies to a small area stay in the caches,
/// where a receiver finds them a quarter sooner.
#[cfg(target_arch = "x86_64")]
const fn past_caches(len: usize, area: usize) -> bool {
    /// From here on it pays whatever the area.
    const LONG: usize = 256 << 10;
    /// Below, the first and last lines and the fence cost as much as is won.
    const SHORT: usize = 8 << 10;
    /// More than one engine's share of the last-level cache on today's servers.
    const UNCACHED: usize = 32 << 20;
    len >= LONG || (len >= SHORT && area >= UNCACHED)
}

/// As [`copy`], past the caches.
///
/// # Safety
///
/// As for [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn stream(src: *const u8, dst: *mut u8, len: usize) {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };
    const LINE: usize = 64;
    const PART: usize = size_of::<__m128i>();
    /// How far ahead the source is asked for.
    const AHEAD: usize = 16 * LINE;
    let before = dst.align_offset(LINE).min(len);
    let lines = (len - before) / LINE;
    let after = before + lines * LINE;
    // SAFETY: for the plain copies, the loads and the stores:
    // - all offsets are below `len`, so the ranges are those that our caller promised;
    // - `dst + before` lies on a line, as the streaming stores need; loads need no alignment;
    // - SSE2 is part of x86-64;
    // - a prefetch may name any address.
    // The fence makes the streaming stores visible before any store that follows, such as the one
    // that announces the bytes: they are not ordered by themselves.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, before);
        for line in 0..lines {
            let (from, to) = (src.add(before + line * LINE), dst.add(before + line * LINE));
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
            for part in 0..LINE / PART {
                let bytes = _mm_loadu_si128(from.add(part * PART).cast());
                _mm_stream_si128(to.add(part * PART).cast(), bytes);
            }
        }
        _mm_sfence();
        std::ptr::copy_nonoverlapping(src.add(after), dst.add(after), len - after);
    }
}

/// Has the cache line at an address brought to this core while it does other things. A hint: what the address is does not
/// matter, not even that a peer made it up.
#[inline]
pub(super) fn bring(at: u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch may name any address; it changes nothing that a program can see, and never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at as *const i8);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Whether the processor knows [`claim`].
pub(super) fn can_claim() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__cpuid;
        const EXTENDED: u32 = 0x8000_0001;
        // CPUID 8000_0001h, ECX bit 8 (AMD64 Architecture Programmer's Manual, volume 3, appendix E; Intel SDM, volume 2A).
        __cpuid(0x8000_0000).eax >= EXTENDED && __cpuid(EXTENDED).ecx >> 8 & 1 == 1
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Has the cache line at an address brought to this core to be written, and taken from who has it: PREFETCHW (AMD64
/// Architecture Programmer's Manual, volume 3). A hint, as [`bring`] is; only where [`can_claim`] says so.
#[inline(always)]
pub(super) fn claim(at: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch may name any address; it changes nothing that a program can see, and never faults.
    unsafe {
        std::arch::asm!(
            "prefetchw [{at}]",
            at = in(reg) at,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Whether [`demote`] does anything here.
pub(super) fn can_demote() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        // CPUID leaf 7, ECX bit 25 (Intel SDM, volume 2A, CPUID).
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ecx >> 25 & 1 == 1
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Has the cache line at an address moved to the cache that all cores share, where the next reader finds it sooner than
/// in this core's: CLDEMOTE (Intel SDM, volume 2A). A hint, and nothing where [`can_demote`] says no.
#[inline]
pub(super) fn demote(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: encodes CLDEMOTE [rax], which changes nothing that a program can see, never faults, and is a no-operation
    // on a processor that does not know it.
    unsafe {
        std::arch::asm!(
            ".byte 0x0f, 0x1c, 0x00",
            in("rax") at,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Copies `len` bytes from `src` in this process to `dst` in process `pid`.
///
/// `FAULT` if part of either range is not mapped, or `dst` not writable; a prefix may have been written.
/// `PERM` if the kernel does not allow it, `SRCH` if there is no such process.
///
/// The pid is a number, and a process that died may have left it to another. Callers make sure just
/// before that the peer is alive; numbers are dealt out in turn, so that one would have to be freed and
/// all others used up in between.
pub(super) fn write_process(
    pid: i32,
    mut src: u64,
    mut dst: u64,
    mut len: usize,
) -> Result<(), Errno> {
    while len > 0 {
        let from = libc::iovec { iov_base: src as *mut libc::c_void, iov_len: len };
        let to = libc::iovec { iov_base: dst as *mut libc::c_void, iov_len: len };
        // SAFETY: the kernel checks both ranges itself and answers EFAULT; nothing of this process
        // is written. Both vectors are locals with one element.
        let done = unsafe { libc::process_vm_writev(pid, &raw const from, 1, &raw const to, 1, 0) };
        match usize::try_from(done) {
            // No progress and no error would repeat for ever.
            Ok(0) => return Err(Errno::FAULT),
            Ok(done) => {
                let step = done as u64;
                (src, dst) = (src.wrapping_add(step), dst.wrapping_add(step));
                len = len.saturating_sub(done);
            }
            Err(_) if last_errno() == Errno::INTR => {}
            Err(_) => return Err(last_errno()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> i32 {
        i32::try_from(std::process::id()).unwrap()
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_copy_past_the_caches_moves_all_bytes_and_no_other() {
        let (lens, edge) = ([0, 1, 15, 63, 64, 65, 127, 128, 129, 8191, 8192], 64);
        let from: Vec<u8> = (0..9000_u32).map(|i| (i % 251) as u8 + 1).collect();
        for (len, at, start) in lens
            .into_iter()
            .flat_map(|len| (0..65).flat_map(move |at| [0, 1, 17].map(|start| (len, at, start))))
        {
            let mut to = vec![0_u8; edge + len + 2 * edge];
            // SAFETY: both ranges lie inside their vectors, which are two.
            unsafe { stream(from.as_ptr().add(start), to.as_mut_ptr().add(at), len) };
            assert!(to[at..at + len] == from[start..start + len], "{len} {at} {start}");
            assert!(to[..at].iter().chain(&to[at + len..]).all(|byte| *byte == 0));
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn short_copies_and_small_areas_stay_in_the_caches() {
        assert!(past_caches(256 << 10, 256 << 10) && past_caches(8 << 10, 32 << 20));
        assert!(!past_caches((8 << 10) - 1, 1 << 40) && !past_caches(64 << 10, (32 << 20) - 1));
    }

    #[test]
    fn the_kernel_copies_all_of_it() {
        let from: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        let to = vec![0_u8; from.len()];
        write_process(me(), from.as_ptr() as u64, to.as_ptr() as u64, from.len()).unwrap();
        assert!(std::hint::black_box(&to) == &from);
    }

    #[test]
    fn memory_or_a_process_that_is_not_there_is_an_error() {
        let word = 7_u64;
        let src = (&raw const word) as u64;
        assert_eq!(write_process(me(), src, 8, 8), Err(Errno::FAULT));
        assert_eq!(write_process(me(), 8, src, 8), Err(Errno::FAULT));
        assert_eq!(write_process(i32::MAX, src, src, 8), Err(Errno::SRCH));
    }
}
