//! Warps that stand by for short copies: the kernel of them, and the words by which they are asked.
//!
//! # What it refuses to know
//!
//! What the words say, when warps are worth having, and who sees to it that none is sent while there are others (`immwire_core::standby`).
//!
//! # Invariants
//!
//! 1. Kernel and words live until every launch has ended: [`Standby`]'s drop waits, and as long as the stream is stuck nothing is freed
//!    ([`crate::stuck`]). Unless the GPU is stuck, a launch that has begun ends by itself.

use crate::args::{self, StandbyArgs};
use crate::copier::{Kernels, settle};
use crate::device::Stream;
use crate::driver::{check, cu};
use crate::error::Error;
use crate::memory::PinnedMemory;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Words of a seat.
const SEAT_WORDS: usize = args::SEAT_BYTES as usize / size_of::<u64>();

/// A GPU's seats, and the stream that warps come in.
#[derive(Debug)]
pub struct Standby {
    stream: Stream,
    kernels: Arc<Kernels>,
    seats: PinnedMemory,
    is_stuck: bool,
}

impl Standby {
    pub(crate) fn new(stream: Stream, kernels: Arc<Kernels>) -> Result<Self, Error> {
        let bytes = (args::STANDBY_SEATS * args::SEAT_BYTES) as usize;
        let seats = PinnedMemory::zeroed(stream.device(), bytes)?;
        Ok(Self { stream, kernels, seats, is_stuck: false })
    }

    /// The words of seat `at`, of [`args::STANDBY_SEATS`], which its warp and the CPU share.
    #[must_use]
    pub fn seat(&self, at: usize) -> Option<&[AtomicU64]> {
        let first = at.checked_mul(SEAT_WORDS)?;
        let words: Range<usize> = first..first.checked_add(SEAT_WORDS)?;
        self.seats.words(words)
    }

    /// The stream that launches are in.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Sends for warps, a block of them. They stay until nothing has been asked for at any seat for `idle`, and for `shift` at most. A few
    /// microseconds; when they come is up to the GPU.
    ///
    /// # Safety
    ///
    /// From now until the launch has ended, whatever is asked for at a seat may be copied, until its warp has said that it has gone:
    ///
    /// - source and target lie in memory that the GPU of the stream reaches, and that stays allocated and mapped, from before it is asked
    ///   for until the warp says that it has been done, or has gone;
    /// - nobody writes the source meanwhile, and nobody reads or writes the target; the two do not overlap;
    /// - nobody but the warp writes the status of a seat.
    ///
    /// # Errors
    ///
    /// Nobody comes.
    pub unsafe fn launch(&self, launch: u32, idle: Duration, shift: Duration) -> Result<(), Error> {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let (idle_ns, shift_ns) = (nanos(idle), nanos(shift));
        let seats = self.seats.address();
        let mut args = StandbyArgs { seats, idle_ns, shift_ns, launch, reserved: 0 };
        let mut parameters = [(&raw mut args).cast()];
        let _current = self.stream.device().enter()?;
        // SAFETY: the function takes one `StandbyArgs` by value (asserted equal on both sides), which the driver copies before it
        // returns; the block is the one that the kernel is for; the function and the stream are of the context that is current; the seats
        // live as long as `self`, whose drop waits; other memory is our caller's promise.
        let launched = unsafe {
            cu::cuLaunchKernel(
                self.kernels.standby().handle(),
                1,
                1,
                1,
                args::STANDBY_THREADS,
                1,
                1,
                0,
                self.stream.handle(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", launched)
    }

    /// As [`crate::Copier::settle`].
    pub fn settle(&mut self, limit: Duration) -> bool {
        self.is_stuck = !settle(&self.stream, limit);
        !self.is_stuck
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        /// Launches end by themselves.
        const LIMIT: Duration = Duration::from_secs(5);
        self.settle(if self.is_stuck { Duration::ZERO } else { LIMIT });
    }
}
