//! The twin of `shm/segment.rs`: the words of one direction, and a cell for the data of each record.

use std::cell::RefCell;

use immwire_core::hazard::NO_KEY;
use loom::cell::UnsafeCell;
use loom::sync::Arc;

use crate::sync::AtomicU64;

/// Room for two records of up to 64 bytes.
pub const BOUNCE_BYTES: usize = 2 * RECORD;
/// A head, and data.
const RECORD: usize = 128;

pub struct Segment {
    ring: Vec<AtomicU64>,
    head: AtomicU64,
    tail: AtomicU64,
    grant: AtomicU64,
    active: AtomicU64,
    /// What the data of the records stand for: the source that they were copied from.
    data: [UnsafeCell<usize>; BOUNCE_BYTES / RECORD],
}

// SAFETY: loom checks every access to the cells, and fails the model if two race.
unsafe impl Sync for Segment {}

thread_local! {
    /// The one of this execution: loom runs all threads of a model on one.
    static CURRENT: RefCell<Option<Arc<Segment>>> = const { RefCell::new(None) };
}

impl Segment {
    pub fn new() -> Arc<Self> {
        let segment = Arc::new(Self {
            ring: (0..BOUNCE_BYTES / 8).map(|_| AtomicU64::new(0)).collect(),
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            grant: AtomicU64::new(NO_KEY),
            active: AtomicU64::new(NO_KEY),
            data: [0, 0].map(UnsafeCell::new),
        });
        CURRENT.with(|current| current.replace(Some(segment.clone())));
        segment
    }

    /// The segment that is modelled now; it is let go of, or loom would miss the end of it.
    pub fn forget() {
        CURRENT.with(|current| current.replace(None));
    }

    pub fn half(&self) -> Half<'_> {
        Half(self)
    }

    /// Which cell stands for what lies at this address of the ring.
    fn cell(&self, at: *const u8) -> &UnsafeCell<usize> {
        let offset = at as usize - self.ring.as_ptr() as usize;
        assert_eq!(offset % RECORD, RECORD / 2, "data starts behind a head");
        &self.data[offset / RECORD]
    }
}

/// Copies to the ring.
pub fn put(src: *const u8, at: *mut u8) {
    CURRENT.with(|current| {
        let current = current.borrow();
        // SAFETY: loom fails the model if this races.
        current.as_ref().unwrap().cell(at).with_mut(|cell| unsafe { *cell = src as usize });
    });
}

/// Reads from the ring: what was copied there.
pub fn get(at: *const u8) -> usize {
    CURRENT.with(|current| {
        let current = current.borrow();
        // SAFETY: loom fails the model if this races.
        current.as_ref().unwrap().cell(at).with(|cell| unsafe { *cell })
    })
}

#[derive(Clone, Copy)]
pub struct Half<'a>(&'a Segment);

impl<'a> Half<'a> {
    pub fn bounce(self) -> &'a [AtomicU64] {
        &self.0.ring
    }

    pub fn bounce_head(self) -> &'a AtomicU64 {
        &self.0.head
    }

    pub fn bounce_tail(self) -> &'a AtomicU64 {
        &self.0.tail
    }

    pub fn bounce_grant(self) -> &'a AtomicU64 {
        &self.0.grant
    }

    pub fn bounce_active(self) -> &'a AtomicU64 {
        &self.0.active
    }
}
