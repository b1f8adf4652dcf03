//! Where threads meet, chosen once: locks, flags, reference counts, and the ways a thread sleeps.
//!
//! The files that share memory between threads or processes (`callback`, `cells`, `counting`, `intake`,
//! `region`, `ring`, `wait`, `shm/bounce`, `shm/withdrawals`) take these from here alone, so that `verification/loom` compiles their very text
//! against a twin of this file whose locks, flags and clocks a model checker drives. What the twin
//! cannot show: that the kernel's futex sleeps and wakes as its manual says, and that time passes.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
/// A reference count that frees what it counts, and one that does not.
pub(crate) use std::sync::{Arc as Counted, Weak as Uncounted};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
pub(crate) use std::thread::{Thread, ThreadId, current, park, yield_now};
use std::time::{Duration, Instant};

use immwire_core::wake::WakeWord;
use rustix::thread::futex;

/// How long a waiter spins before it sleeps. A sleep and a wake-up cost about as much.
const SPIN: Duration = Duration::from_micros(20);
/// How often a spinning waiter looks at the clock.
const SPINS_PER_LOOK: u32 = 64;

/// Locks, whatever happened to an earlier holder: what these locks guard is whole at every step.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sleeps until notified, or until `left` has passed; or for no reason.
pub(crate) fn sleep_locked<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    left: Duration,
) -> MutexGuard<'a, T> {
    condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0
}

/// Sleeps while `word` is `seen`, until woken, or until `left` has passed; or for no reason.
pub(crate) fn sleep_on(word: &WakeWord, seen: u32, left: Duration) {
    let seconds = i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
    let left = futex::Timespec { tv_sec: seconds, tv_nsec: i64::from(left.subsec_nanos()) };
    // Every outcome (woken, word changed, interrupted, timed out) makes the caller look again.
    let _ = futex::wait(word, futex::Flags::PRIVATE, seen, Some(&left));
}

/// Wakes all who sleep on `word`, which has changed.
pub(crate) fn wake_all(word: &WakeWord) {
    // The word is ours and mapped; waking nobody is no error.
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX.unsigned_abs());
}

/// A wait that has begun, and its limit.
pub(crate) struct Timer {
    start: Instant,
    limit: Duration,
}

impl Timer {
    /// Begins now.
    pub(crate) fn start(limit: Duration) -> Self {
        Self { start: Instant::now(), limit }
    }

    /// The time that is left; `None` once it is over.
    pub(crate) fn left(&self) -> Option<Duration> {
        self.limit.checked_sub(self.start.elapsed())
    }

    /// Looks again and again, for as long as a sleep would cost; `None` if nothing was seen.
    pub(crate) fn spin<R>(&self, look: impl Fn() -> Option<R>) -> Option<R> {
        loop {
            for _ in 0..SPINS_PER_LOOK {
                if let Some(seen) = look() {
                    return Some(seen);
                }
                std::hint::spin_loop();
            }
            if self.start.elapsed() >= SPIN.min(self.limit) {
                return None;
            }
        }
    }
}
