//! What a forked child may do with what its parent made: nothing, not even drop it.
//!
//! The threads of an engine are not there in a child, so that waiting for one would never end; and to
//! unmap or withdraw anything is the parent's to do. A handle of the parent's is refused in the child,
//! and left as it is when the child drops it.

use std::mem::ManuallyDrop;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::PyResult;

use crate::errors;

/// How many forks lie between the process that loaded this module and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    // Relaxed: a child begins with one thread.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Starts to notice forks. Call before anything is [`Owned`].
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: pthread_atfork(3): the handler is a function of this library, which Python never
        // unloads, and does what a child of a threaded process may: it adds to an atomic. Failing, for
        // lack of memory, is not to be helped here, and leaves children unrefused.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// Which process this is, counted in forks.
pub(crate) fn generation() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// A value that only the process that made it uses and drops. One relaxed load to look.
pub(crate) struct Owned<T> {
    value: ManuallyDrop<T>,
    made_in: u32,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), made_in: generation() }
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.made_in == generation()
    }

    /// The value, or the error that says what a child may do.
    pub(crate) fn get(&self) -> PyResult<&T> {
        if self.is_ours() { Ok(&self.value) } else { Err(errors::forked()) }
    }

    /// The value, whatever process this is: to look at what does not change.
    pub(crate) fn peek(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: `drop` runs once, and nothing uses the field after it.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
