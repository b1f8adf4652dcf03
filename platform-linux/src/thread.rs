//! Threads of an engine's, and where they run.
//!
//! It refuses to know what they do.
//!
//! # Invariants
//!
//! A thread runs where its process may, but for one that was pinned: what that one starts does not have to share its CPU. (Linux gives a new
//! thread the mask of whoever makes it: `sched_setaffinity(2)`.)

use std::cell::Cell;
use std::io;
use std::thread::{Builder, JoinHandle};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

thread_local! {
    /// Where this thread might run before it was pinned.
    static BEFORE: Cell<Option<CpuSet>> = const { Cell::new(None) };
}

/// Pins the calling thread.
pub(crate) fn pin(cpu: usize) -> rustix::io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(rustix::io::Errno::INVAL);
    }
    let before = sched_getaffinity(None)?;
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)?;
    BEFORE.set(Some(before));
    Ok(())
}

/// Starts a thread that is not pinned, whoever starts it.
///
/// # Errors
///
/// What the system says.
pub(crate) fn spawn<R: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> R + Send + 'static,
) -> io::Result<JoinHandle<R>> {
    let before = BEFORE.get();
    Builder::new().name(name.to_owned()).spawn(move || {
        let unpinned = before.map_or(Ok(()), |before| sched_setaffinity(None, &before));
        if let Err(error) = unpinned {
            tracing::debug!(%error, "a thread shares the CPU of the one that started it");
        }
        body()
    })
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn what_a_pinned_thread_starts_is_not_pinned() {
        let all = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
        let pinned = spawn("pinned", move || {
            pin(first).unwrap();
            let own = sched_getaffinity(None).unwrap();
            (own, spawn("beside", || sched_getaffinity(None).unwrap()).unwrap().join().unwrap())
        });
        let (own, beside) = pinned.unwrap().join().unwrap();
        assert_eq!((own.count(), own.is_set(first), beside), (1, true, all));
        assert!(pin(CpuSet::MAX_CPU).is_err());
    }
}
