//! What checks and measurements share: GPUs that reach each other, copiers, memory everywhere, random numbers.

use immwire_cuda::geometry::{Method, Tuning};
use immwire_cuda::{
    Copier, Device, DeviceMemory, Error, Event, PagedCopy, PinnedMemory, Release, Stream,
};
use std::num::NonZeroU32;
use std::time::Duration;

/// No single piece of work here takes a second.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// SM budgets are small positive numbers here.
pub(crate) fn sms(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap_or(NonZeroU32::MIN)
}

/// One GPU with a stream.
pub(crate) struct Gpu {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) event: Event,
    pub(crate) plain: Copier,
}

/// Opens up to so many GPUs, each with access to the others.
pub(crate) fn gpus(most: u32) -> Result<Vec<Gpu>, Error> {
    let count = Device::count()?.min(most);
    let devices = (0..count).map(Device::open).collect::<Result<Vec<_>, _>>()?;
    for one in &devices {
        for other in &devices {
            one.reach(other)?;
        }
    }
    let gpu = |device: Device| {
        let stream = Stream::new(&device)?;
        let plain = Copier::new(&stream, Tuning::default())?;
        Ok(Gpu { event: Event::new(&device)?, device, stream, plain })
    };
    devices.into_iter().map(gpu).collect()
}

impl Gpu {
    /// Zeroed memory, ready.
    pub(crate) fn memory(&self, bytes: usize) -> Result<DeviceMemory, Error> {
        let memory = DeviceMemory::zeroed(&self.stream, bytes)?;
        self.settle()?;
        Ok(memory)
    }

    pub(crate) fn pinned(&self, bytes: usize) -> Result<PinnedMemory, Error> {
        PinnedMemory::zeroed(&self.device, bytes)
    }

    /// Waits until the stream has done all.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        self.event.record(&self.stream)?;
        self.event.wait(LIMIT)
    }

    /// Copies a range by the copy engine, and waits for it.
    pub(crate) fn move_range(&self, source: u64, target: u64, bytes: usize) -> Result<(), Error> {
        let whole = PagedCopy::contiguous(source, target, bytes as u64);
        // SAFETY: callers name memory that they hold, and touch it again only after this has waited.
        unsafe { self.plain.submit(&whole, Release::Nothing, Method::CopyEngine, sms(1))? };
        self.settle()
    }
}

/// From one number's state to the next one's.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Splitmix64: the same numbers from the same seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// The numbers after the first `count` from a seed.
    pub(crate) fn after(seed: u64, count: u64) -> Self {
        Self(seed.wrapping_add(STEP.wrapping_mul(count)))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % (limit.max(1) as u64)).unwrap_or(0)
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        let (words, rest) = bytes.as_chunks_mut::<8>();
        words.iter_mut().for_each(|word| *word = self.next().to_le_bytes());
        if !rest.is_empty() {
            rest.copy_from_slice(&self.next().to_le_bytes()[..rest.len()]);
        }
    }

    /// `count` different numbers below `limit`, in random order.
    pub(crate) fn distinct(&mut self, count: usize, limit: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..u32::try_from(limit).unwrap_or(u32::MAX)).collect();
        for i in 0..count.min(limit) {
            let j = i + self.below(limit - i);
            all.swap(i, j);
        }
        all.truncate(count);
        all
    }
}

/// Writes a page table.
pub(crate) fn write_table(memory: &mut PinnedMemory, offset: usize, table: &[u32]) {
    let bytes = &mut memory.as_mut_slice()[offset..offset + table.len() * 4];
    for (place, index) in bytes.chunks_exact_mut(4).zip(table) {
        place.copy_from_slice(&index.to_le_bytes());
    }
}
