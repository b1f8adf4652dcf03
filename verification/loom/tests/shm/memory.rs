//! The twin of `shm/memory.rs`: one region, whose content is the source of the last record.

use loom::cell::UnsafeCell;

use crate::segment;

/// What a record from the source `src` is to be written under.
pub fn destination(src: u64) -> u64 {
    src + 1000
}

/// The key of a region that is withdrawn.
pub const REFUSED_KEY: u64 = 13;

pub struct ShmMemory {
    pub content: UnsafeCell<u64>,
}

// SAFETY: loom checks every access to the cell, and fails the model if two race.
unsafe impl Sync for ShmMemory {}

impl ShmMemory {
    pub fn new() -> Self {
        Self { content: UnsafeCell::new(0) }
    }

    pub fn set(&self, value: u64) {
        // SAFETY: loom fails the model if this races.
        self.content.with_mut(|content| unsafe { *content = value });
    }

    pub fn deliver(&self, key: u64, dst: u64, parts: [(*mut u8, usize); 2]) -> bool {
        assert_eq!((parts[0].1, parts[1].1), (8, 0), "one run of eight bytes");
        let data = segment::get(parts[0].0) as u64;
        assert_eq!(destination(data), dst, "the data of this record");
        self.set(data);
        key != REFUSED_KEY
    }
}
