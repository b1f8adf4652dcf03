//! The driver's own copies between GPUs, without an engine: what writes from and to their memory are compared with.
//!
//! One stream of the GPU that would write, and in it `cuMemcpyAsync` for each piece, to memory that this process has taken
//! for it: no peer, no immediate. It decides nothing about what is measured.
//!
//! # Invariants
//!
//! Every copy has ended when a method returns, or its memory is never freed.

use super::raw::Piece;
use crate::motor::{Motor, MotorError};
use crate::transport::GpuPair;
use immwire::{Place, Region};
use immwire_cuda::geometry::{Method, Tuning};
use immwire_cuda::{
    Copier, Device, DeviceMemory, Error, Event, PagedCopy, Release, Shuttle, Stream,
};
use std::mem::ManuallyDrop;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

/// How long a round may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why there is no such baseline, or it stopped.
#[derive(Debug, thiserror::Error)]
pub enum DriverCopyError {
    /// The driver.
    #[error("the driver's own copy: {0}")]
    Cuda(Error),
    /// The engine, which has the host's memory.
    #[error(transparent)]
    Motor(#[from] MotorError),
    /// A piece is not in the memory.
    #[error("the bytes {offset}..+{len} of the driver's own copy are outside of its memory")]
    Outside {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

impl From<Error> for DriverCopyError {
    fn from(error: Error) -> Self {
        Self::Cuda(error)
    }
}

/// Memory of the one or the other.
#[derive(Debug)]
enum Target {
    Host(Region),
    Gpu(Device, DeviceMemory),
}

/// Memory to copy to, and the stream that copies are made in.
#[derive(Debug)]
pub struct DriverCopy {
    copier: Copier,
    event: Event,
    target: ManuallyDrop<Target>,
    bytes: u64,
    /// A copy is under way that nobody waits for any more.
    stuck: bool,
}

impl DriverCopy {
    /// `bytes` bytes where `pair` says, and a stream of the GPU that has the source, or else the destination.
    ///
    /// # Errors
    ///
    /// [`DriverCopyError`]; a GPU may not reach the other's memory.
    pub fn new(motor: &Motor, pair: &GpuPair, bytes: u64) -> Result<Self, DriverCopyError> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let writer = Device::open(pair.writer())?;
        let copier = Copier::new(&Stream::new(&writer)?, Tuning::default())?;
        let event = Event::new(&writer)?;
        let target = match pair.dst {
            // Pinned, as all memory of an engine with GPUs.
            Place::Host => Target::Host(motor.engine().alloc(len).map_err(MotorError::from)?),
            Place::Gpu(ordinal) => {
                let owner = Device::open(ordinal)?;
                writer.reach(&owner)?;
                let stream = Stream::new(&owner)?;
                let memory = DeviceMemory::zeroed(&stream, len)?;
                let zeroed = Event::new(&owner)?;
                zeroed.record(&stream)?;
                zeroed.wait(PATIENCE)?;
                Target::Gpu(owner, memory)
            }
        };
        Ok(Self { copier, event, target: ManuallyDrop::new(target), bytes, stuck: false })
    }

    /// A copy of what has arrived.
    ///
    /// # Errors
    ///
    /// [`DriverCopyError`].
    pub fn arrived(&self) -> Result<Vec<u8>, DriverCopyError> {
        let mut bytes = vec![0; usize::try_from(self.bytes).unwrap_or(usize::MAX)];
        match &*self.target {
            Target::Host(region) => {
                let outside = |_| DriverCopyError::Outside { offset: 0, len: self.bytes };
                region.read(0, &mut bytes).map_err(outside)?;
            }
            Target::Gpu(owner, memory) => {
                let mut shuttle = Shuttle::new(owner)?;
                // SAFETY: of this length, and ours alone; it is not freed before its GPU has gone on.
                unsafe { shuttle.read(memory.address(), &mut bytes)? };
            }
        }
        Ok(bytes)
    }

    /// Copies pieces of `src` to places of the target, and waits: how long that took.
    ///
    /// # Errors
    ///
    /// [`DriverCopyError`]; after a time-out it is of no use any more.
    pub fn copy(
        &mut self,
        src: &Region,
        pieces: impl Iterator<Item = Piece>,
    ) -> Result<Duration, DriverCopyError> {
        let address = |region: &Region| region.as_ptr().expose_provenance() as u64;
        let source = (address(src), src.len());
        let target = match &*self.target {
            Target::Host(region) => (address(region), self.bytes),
            Target::Gpu(_, memory) => (memory.address(), self.bytes),
        };
        let at = |(base, bytes): (u64, u64), offset: u64, len: u64| {
            let inside = offset.checked_add(len).is_some_and(|end| end <= bytes);
            let address = base.checked_add(offset).filter(|_| inside);
            address.ok_or(DriverCopyError::Outside { offset, len })
        };
        let start = Instant::now();
        let mut enqueued = Ok(());
        for Piece { from, to, len } in pieces {
            let ends = at(source, from, len).and_then(|from| Ok((from, at(target, to, len)?)));
            enqueued = ends.and_then(|(from, to)| {
                let copy = PagedCopy::contiguous(from, to, len);
                // SAFETY: both ranges were checked, and stay: what fails is waited for below, and if that takes too long
                // never freed; the source's region is the caller's, who waits too. Pieces that overlap are in the order
                // of the stream. The engine writes to neither meanwhile: its rounds and these take turns.
                let submitted = unsafe {
                    self.copier.submit(&copy, Release::Nothing, Method::CopyEngine, NonZeroU32::MIN)
                };
                Ok(submitted.map(drop)?)
            });
            if enqueued.is_err() {
                break;
            }
        }
        let waited =
            self.event.record(self.copier.stream()).and_then(|()| self.event.wait(PATIENCE));
        let took = start.elapsed();
        self.stuck |= waited.is_err();
        enqueued.and(Ok(waited.map(|()| took)?))
    }
}

impl Drop for DriverCopy {
    fn drop(&mut self) {
        if !self.stuck {
            // SAFETY: this is the drop: it is not used again, and no copy to it is under way.
            unsafe { ManuallyDrop::drop(&mut self.target) };
        }
    }
}
