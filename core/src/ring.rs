//! A bounded queue of values between any number of threads: how callers reach an engine.
//!
//! Each cell carries a sequence number that says whose turn it is. Cell `i` of `n` starts at `i`.
//! With `p` a position that grows forever, and `p mod n` its cell:
//!
//! ```text
//!   sequence = p      empty, for the producer of position p
//!   sequence = p + 1  full, for the consumer of position p
//!   sequence = p + n  empty again, for the producer of the next lap
//! ```
//!
//! A producer claims a position by moving `tail`, writes the cell, and publishes by storing the
//! sequence number; a consumer does the same with `head`. No lock, no waiting: a full or empty ring is
//! an answer. A thread that is stopped between claim and publication holds up its own cell only: to
//! the others the ring looks full, or empty, there.
//!
//! # Invariants
//!
//! 1. A cell is written and read only by the thread whose claim succeeded at the position that the
//!    cell's sequence number names, and no position is claimed twice.
//! 2. A cell holds a value if and only if its sequence number is a position plus 1.
//! 3. Values come out in the order of their positions: first in, first out, for each producer.
//!
//! The tests below drive short sequences against a `VecDeque`; the loom models of `verification/loom`
//! check 1 and 2 for interleavings and weak memory.
//!
//! # Unsafe
//!
//! The only module of this crate with unsafe code: cells are shared, and initialised only in part.
//! Every block rests on invariants 1 and 2, and they on nobody else using the cells: see
//! [`Ring::from_storage`].
#![allow(unsafe_code)]

use core::fmt;
use core::marker::PhantomData;
use core::mem::MaybeUninit;

use crate::sync::{AtomicUsize, Ordering, UnsafeCell, const_unless_loom};

/// Storage for one value of a [`Ring`].
pub struct Cell<T> {
    sequence: AtomicUsize,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: a `Cell` offers nothing but `new`. Its value is reached through a `Ring` only, which gives
// each value to one thread at a time (invariant 1), so that `T: Send` is enough.
unsafe impl<T: Send> Sync for Cell<T> {}

impl<T> Cell<T> {
    const_unless_loom! {
        /// An empty cell.
        #[must_use]
        pub fn new() -> Self {
            Self { sequence: AtomicUsize::new(0), value: UnsafeCell::new(MaybeUninit::uninit()) }
        }
    }
}

impl<T> Default for Cell<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for Cell<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cell").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

/// Why a ring cannot be made of so many cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RingError {
    /// The cells lent: not a power of two, or fewer than 2 (with one cell, full for this lap and
    /// empty for the next would be the same number).
    pub capacity: usize,
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a ring needs a power of two of cells, 2 or more, not {}", self.capacity)
    }
}

impl core::error::Error for RingError {}

/// A position on lines of its own, so that producers and consumers do not share one: 128 bytes,
/// because ARM servers have such lines, and x86 fetches lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Position(AtomicUsize);

/// A bounded queue, first in, first out, for any number of producers and consumers.
///
/// Values that are left in it when it is dropped are dropped.
pub struct Ring<T, S: AsRef<[Cell<T>]>> {
    /// Where the next value goes.
    tail: Position,
    /// Where the next value comes from.
    head: Position,
    mask: usize,
    storage: S,
    cells: PhantomData<Cell<T>>,
}

impl<T, const N: usize> Ring<T, [Cell<T>; N]> {
    /// A ring that owns its cells.
    ///
    /// # Errors
    ///
    /// [`RingError`] if `N` is not a power of two, or below 2.
    pub fn from_array(cells: [Cell<T>; N]) -> Result<Self, RingError> {
        // SAFETY: an array's `as_ref` is the array, which the ring owns from now on.
        unsafe { Self::from_storage(cells) }
    }
}

impl<'a, T> Ring<T, &'a mut [Cell<T>]> {
    /// A ring over cells that are lent to it alone.
    ///
    /// # Errors
    ///
    /// [`RingError`] if there is not a power of two of them, or fewer than 2.
    pub fn from_slice(cells: &'a mut [Cell<T>]) -> Result<Self, RingError> {
        // SAFETY: the `as_ref` of an exclusive reference is the slice it refers to, which nobody else
        // can reach while the reference lives.
        unsafe { Self::from_storage(cells) }
    }
}

impl<T, S: AsRef<[Cell<T>]>> Ring<T, S> {
    /// A ring over the cells of `storage`, such as a `Box<[Cell<T>]>`.
    ///
    /// # Errors
    ///
    /// [`RingError`] if there is not a power of two of them, or fewer than 2.
    ///
    /// # Safety
    ///
    /// As long as the ring lives, `storage.as_ref()` returns the same cells, wherever the ring is
    /// moved, and they are reached through this ring only.
    pub unsafe fn from_storage(storage: S) -> Result<Self, RingError> {
        let cells = storage.as_ref();
        let capacity = cells.len();
        if capacity < 2 || !capacity.is_power_of_two() {
            return Err(RingError { capacity });
        }
        for (index, cell) in cells.iter().enumerate() {
            // Relaxed: the ring is not shared yet, and whoever shares it publishes this with it.
            cell.sequence.store(index, Ordering::Relaxed);
        }
        Ok(Self {
            tail: Position(AtomicUsize::new(0)),
            head: Position(AtomicUsize::new(0)),
            mask: capacity - 1,
            storage,
            cells: PhantomData,
        })
    }

    /// Appends `value`; a full ring gives it back. Lock-free: one exchange where nobody competes.
    ///
    /// # Errors
    ///
    /// The value itself, if the ring is full.
    pub fn try_push(&self, value: T) -> Result<(), T> {
        let Some((cell, position)) = self.claim(&self.tail, 0) else {
            return Err(value);
        };
        cell.value.with_mut(|slot| {
            // SAFETY: `claim` made `position` ours, and the cell's sequence number was `position`:
            // nobody else touches the cell until we publish (invariant 1), and it holds no value
            // that this would overwrite (invariant 2).
            unsafe { (*slot).write(value) };
        });
        // Release: the consumer that reads this number sees the value.
        cell.sequence.store(position.wrapping_add(1), Ordering::Release);
        Ok(())
    }

    /// Takes the oldest value; `None` if there is none. Lock-free: one exchange where nobody competes.
    pub fn try_pop(&self) -> Option<T> {
        let (cell, position) = self.claim(&self.head, 1)?;
        let value = cell.value.with(|slot| {
            // SAFETY: `claim` made `position` ours, and the cell's sequence number was `position` + 1:
            // the cell holds a value (invariant 2), which its producer has published (`claim` read
            // the number with acquire), and nobody else reads it (invariant 1).
            unsafe { (*slot).assume_init_read() }
        });
        // Release: the producer of the next lap writes after we have read.
        cell.sequence.store(position.wrapping_add(self.mask + 1), Ordering::Release);
        Some(value)
    }

    /// How many values are in the ring: exact when nobody uses it, a hint when others do.
    #[must_use]
    pub fn len(&self) -> usize {
        let head = self.head.0.load(Ordering::Relaxed);
        let len = self.tail.0.load(Ordering::Relaxed).wrapping_sub(head);
        // A consumer may have moved `head` past the `tail` that was read after it: not below 0.
        if len > self.capacity() { 0 } else { len }
    }

    /// Whether there is nothing that [`Ring::try_pop`] would take now.
    ///
    /// A value whose producer has claimed its place and not published it is not there yet: to look
    /// again and again until it is would be of no use, and whoever pushes says so afterwards.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let cells = self.storage.as_ref();
        loop {
            let position = self.head.0.load(Ordering::Relaxed);
            let Some(cell) = cells.get(position & self.mask) else { return true };
            let full = position.wrapping_add(1);
            let ahead = cell.sequence.load(Ordering::Acquire).wrapping_sub(full).cast_signed();
            // Above 0: other consumers took this position, and `head` has moved on.
            if ahead <= 0 {
                return ahead < 0;
            }
        }
    }

    /// How many values fit.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.mask + 1
    }

    /// Claims the next position of `end` whose cell is at sequence number position + `phase`; `None`
    /// if the cell is not there yet (full to a producer, empty to a consumer).
    fn claim(&self, end: &Position, phase: usize) -> Option<(&Cell<T>, usize)> {
        let cells = self.storage.as_ref();
        let mut position = end.0.load(Ordering::Relaxed);
        loop {
            let cell = cells.get(position & self.mask)?;
            // Acquire: pairs with the release of whoever had the cell before; its reads and writes
            // of the value happen before ours.
            let sequence = cell.sequence.load(Ordering::Acquire);
            let ahead = sequence.wrapping_sub(position.wrapping_add(phase)).cast_signed();
            if ahead < 0 {
                return None;
            }
            if ahead > 0 {
                // Others took this position and published; `sequence` was read with acquire, so
                // this sees their claim, and the loop moves on.
                position = end.0.load(Ordering::Relaxed);
                continue;
            }
            let next = position.wrapping_add(1);
            // Relaxed: the claim orders nothing but claims; the value travels with `sequence`.
            match end.0.compare_exchange_weak(position, next, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return Some((cell, position)),
                Err(seen) => position = seen,
            }
        }
    }
}

impl<T, S: AsRef<[Cell<T>]>> Drop for Ring<T, S> {
    fn drop(&mut self) {
        while self.try_pop().is_some() {}
    }
}

impl<T, S: AsRef<[Cell<T>]>> fmt::Debug for Ring<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (len, capacity) = (self.len(), self.capacity());
        f.debug_struct("Ring").field("len", &len).field("capacity", &capacity).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::vec::Vec;

    use super::*;

    fn cells<T>(capacity: usize) -> Vec<Cell<T>> {
        (0..capacity).map(|_| Cell::new()).collect()
    }

    fn boxed<T>(capacity: usize) -> Ring<T, Box<[Cell<T>]>> {
        // SAFETY: a box keeps its cells where they are, and nobody else has them.
        unsafe { Ring::from_storage(cells(capacity).into_boxed_slice()) }.unwrap()
    }

    #[test]
    fn only_powers_of_two_from_two_on_make_a_ring() {
        for capacity in 0..70usize {
            let mut lent = cells::<u8>(capacity);
            let made = Ring::from_slice(&mut lent).map(|ring| ring.capacity());
            let fits = [2, 4, 8, 16, 32, 64].contains(&capacity);
            assert_eq!(made, if fits { Ok(capacity) } else { Err(RingError { capacity }) });
        }
    }

    #[test]
    fn every_schedule_of_pushes_and_pops_agrees_with_a_deque() {
        for capacity in [2, 4] {
            for schedule in 0..1u32 << 14 {
                let ring = boxed(capacity);
                let mut deque = VecDeque::new();
                for step in 0..14u32 {
                    if schedule >> step & 1 == 0 {
                        let fits = deque.len() < capacity;
                        assert_eq!(ring.try_push(step), if fits { Ok(()) } else { Err(step) });
                        if fits {
                            deque.push_back(step);
                        }
                    } else {
                        assert_eq!(ring.try_pop(), deque.pop_front());
                    }
                    assert_eq!((ring.len(), ring.is_empty()), (deque.len(), deque.is_empty()));
                }
            }
        }
    }

    #[test]
    fn positions_may_wrap() {
        let mut ring = boxed(4);
        let first = usize::MAX - 5;
        ring.tail = Position(AtomicUsize::new(first));
        ring.head = Position(AtomicUsize::new(first));
        for ahead in 0..4 {
            let position = first + ahead;
            ring.storage[position & 3].sequence.store(position, Ordering::Relaxed);
        }
        for round in 0..20 {
            for value in 0..4 {
                assert_eq!(ring.try_push(round * 4 + value), Ok(()));
            }
            assert_eq!((ring.try_push(99), ring.len()), (Err(99), 4));
            for value in 0..4 {
                assert_eq!(ring.try_pop(), Some(round * 4 + value));
            }
            assert_eq!((ring.try_pop(), ring.len()), (None, 0));
        }
    }

    #[test]
    fn values_left_in_the_ring_are_dropped_once() {
        for pushed in 0..=4 {
            for popped in 0..=pushed {
                let value = Arc::new(());
                let mut lent = cells(4);
                let ring = Ring::from_slice(&mut lent).unwrap();
                for _ in 0..pushed {
                    ring.try_push(Arc::clone(&value)).unwrap();
                }
                for _ in 0..popped {
                    ring.try_pop().unwrap();
                }
                assert_eq!(Arc::strong_count(&value), 1 + pushed - popped);
                drop(ring);
                assert_eq!(Arc::strong_count(&value), 1);
                // The cells are as good as new for the next ring.
                let ring = Ring::from_slice(&mut lent).unwrap();
                assert!(ring.try_pop().is_none());
                assert!((0..4).all(|_| ring.try_push(Arc::clone(&value)).is_ok()));
            }
        }
    }

    #[test]
    fn threads_get_every_value_once_and_each_producers_in_order() {
        const EACH: u32 = 5000;
        let ring: Ring<(u32, u32), _> = Ring::from_array([const { Cell::new() }; 8]).unwrap();
        let taken: Vec<Vec<(u32, u32)>> = std::thread::scope(|scope| {
            for producer in 0..2 {
                let ring = &ring;
                scope.spawn(move || {
                    for number in 0..EACH {
                        while ring.try_push((producer, number)).is_err() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let consumers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        let mut taken = Vec::new();
                        while taken.len() < EACH as usize {
                            match ring.try_pop() {
                                Some(value) => taken.push(value),
                                None => std::thread::yield_now(),
                            }
                        }
                        taken
                    })
                })
                .collect();
            consumers.into_iter().map(|consumer| consumer.join().unwrap()).collect()
        });
        for values in &taken {
            for producer in 0..2 {
                let of = values.iter().filter(|value| value.0 == producer);
                assert!(of.clone().zip(of.skip(1)).all(|(a, b)| a.1 < b.1));
            }
        }
        let mut all: Vec<_> = taken.concat();
        all.sort_unstable();
        let expected: Vec<_> = (0..2).flat_map(|p| (0..EACH).map(move |n| (p, n))).collect();
        assert_eq!(all, expected);
    }
}
