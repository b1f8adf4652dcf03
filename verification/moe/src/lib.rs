//! The kernels for mixtures of experts, run on a CPU.
//!
//! `cuda/kernels/moe.cu` is compiled as it is, with `machine.h` in the place of the GPU. Every thread of every block of every
//! rank takes its turn when a seed says so, stores to memory that ranks share are performed late and in any order, word by
//! word, and shared memory holds anything at first. It is no model of a GPU: stores are weaker there than on any, loads and
//! atomics as strong as on none.
//!
//! The stand-in for the CUDA driver, `verification/fake-cuda`, runs launches by it as well, each beside others.
//!
//! What it cannot tell: whether a fence is missing between loads, what a compiler for GPUs makes of the text, and how long anything takes.

#[cfg(feature = "oracle")]
pub mod oracle;

use immwire_cuda::moe::args::MoeArgs;
use std::ffi::{CStr, c_char, c_int};

/// The kernels, in the order of `emulate.cpp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, reason = "named as in immwire_moe.h")]
pub enum Kernel {
    DispatchRaw = 0,
    DispatchFp8Bf16 = 1,
    DispatchFp8Fp16 = 2,
    CombineBf16 = 3,
    CombineFp16 = 4,
    DispatchManyRaw = 5,
    DispatchManyFp8Bf16 = 6,
    DispatchManyFp8Fp16 = 7,
    CombineExactBf16 = 8,
    CombineExactFp16 = 9,
    CombineManyBf16 = 10,
    CombineManyFp16 = 11,
}

impl Kernel {
    /// The kernel for many tokens in the place of one for few; exact sums have one for both.
    #[must_use]
    pub const fn many(self) -> Self {
        match self {
            Self::DispatchRaw => Self::DispatchManyRaw,
            Self::DispatchFp8Bf16 => Self::DispatchManyFp8Bf16,
            Self::DispatchFp8Fp16 => Self::DispatchManyFp8Fp16,
            Self::CombineBf16 => Self::CombineManyBf16,
            Self::CombineFp16 => Self::CombineManyFp16,
            other => other,
        }
    }

    /// Whether it is a combine.
    #[must_use]
    pub const fn combines(self) -> bool {
        let plain = matches!(self, Self::CombineBf16 | Self::CombineFp16);
        plain || matches!(self, Self::CombineManyBf16 | Self::CombineManyFp16) || self.is_exact()
    }

    /// Whether it is a combine of exact sums.
    #[must_use]
    pub const fn is_exact(self) -> bool {
        matches!(self, Self::CombineExactBf16 | Self::CombineExactFp16)
    }
}

/// One launch.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// Launches of one stream are done one after the other.
    pub stream: u32,
    /// Of what.
    pub kernel: Kernel,
    /// Blocks.
    pub blocks: u32,
    /// Threads of each, a multiple of 32.
    pub threads: u32,
    /// Dynamic shared memory of each.
    pub shared_bytes: u32,
    /// How many of the blocks, the last ones, find no room: they never start.
    pub missing: u32,
    /// What the kernel is handed.
    pub args: MoeArgs,
}

unsafe extern "C" {
    fn immwire_moe_emulate(
        launches: *const Launch,
        count: u32,
        streams: u32,
        seed: u64,
        among_others: u32,
        why: *mut c_char,
        why_bytes: u32,
    ) -> c_int;
}

/// Runs all launches to their end, those of different streams at the same time. A nanosecond passes now and then.
///
/// # Errors
///
/// Why it could not go on: threads that wait for each other, or shared memory that was not asked for.
///
/// # Safety
///
/// The addresses in all `args` are of live memory, as the kernels' header asks for.
pub unsafe fn emulate(launches: &[Launch], streams: u32, seed: u64) -> Result<(), String> {
    // SAFETY: our caller's promise.
    unsafe { run(launches, streams, seed, false) }
}

/// Runs one launch to its end, while others of other ranks run in other threads and processes. Time is the machine's, and whoever
/// only waits leaves the CPU to others.
///
/// # Errors
///
/// As [`emulate`].
///
/// # Safety
///
/// As for [`emulate`]; what others write meanwhile they write as whole words.
pub unsafe fn emulate_among_others(launch: &Launch, seed: u64) -> Result<(), String> {
    // SAFETY: our caller's promise.
    unsafe { run(&[Launch { stream: 0, ..*launch }], 1, seed, true) }
}

/// # Safety
///
/// As for [`emulate`].
unsafe fn run(
    launches: &[Launch],
    streams: u32,
    seed: u64,
    among_others: bool,
) -> Result<(), String> {
    let mut why: [c_char; 256] = [0; 256];
    let count = u32::try_from(launches.len()).map_err(|e| e.to_string())?;
    // SAFETY: the list has so many entries, the text so much room; memory is our caller's promise.
    let failed = unsafe {
        immwire_moe_emulate(
            launches.as_ptr(),
            count,
            streams,
            seed,
            u32::from(among_others),
            why.as_mut_ptr(),
            256,
        )
    };
    if failed == 0 {
        return Ok(());
    }
    // SAFETY: it was filled with a text that ends in a zero.
    Err(unsafe { CStr::from_ptr(why.as_ptr()) }.to_string_lossy().into_owned())
}
