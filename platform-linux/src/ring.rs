//! The core's ring over memory of its own.

use immwire_core::ring::{Cell, Ring};

/// A ring that owns its cells.
pub(crate) type Boxed<T> = Ring<T, Box<[Cell<T>]>>;

/// A ring with room for at least `capacity` values; [`None`] if so many cannot be counted.
pub(crate) fn boxed<T>(capacity: usize) -> Option<Boxed<T>> {
    let cells = capacity.checked_next_power_of_two()?.max(2);
    let cells: Box<[Cell<T>]> = (0..cells).map(|_| Cell::new()).collect();
    // SAFETY: a boxed slice's `as_ref` is the same memory wherever the box is moved, and the ring owns
    // the box.
    unsafe { Ring::from_storage(cells) }.ok()
}
