//! Atomics and shared cells, chosen once: no other module names `core::sync::atomic` or `loom`.
//!
//! Under `cfg(loom)` the same text runs on loom's types, so that a model explores the shipped code.
//! What loom does not know: accesses with `SeqCst` (it weakens them to `AcqRel`, which is why two-word
//! protocols here use `fence(SeqCst)`), a load that reads a store from its own future, and a NIC's
//! writes, whose order is the provider's promise.
//!
//! 64-bit atomics are required.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

/// A cell whose contents several threads reach by pointer; loom's twin checks every access.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(core::cell::UnsafeCell::new(value))
    }

    /// Calls `f` with a pointer for reading; whether it may be read is the caller's argument.
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Calls `f` with a pointer for writing; whether it may be written is the caller's argument.
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// Declares a function `const`, but for loom, whose constructors are not.
macro_rules! const_unless_loom {
    ($(#[$meta:meta])* $vis:vis fn $($rest:tt)*) => {
        #[cfg(not(loom))]
        $(#[$meta])*
        $vis const fn $($rest)*
        #[cfg(loom)]
        $(#[$meta])*
        $vis fn $($rest)*
    };
}
pub(crate) use const_unless_loom;
