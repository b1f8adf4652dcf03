//! How a caller waits for one thing that happens once: by polling, sleeping, a waker or a callback.
//!
//! The states, and why no wake-up is missed, are the core's ([`Completion`]); here are the futex that
//! puts a thread to sleep, and the place where a waker or callback is kept.

use std::sync::Mutex;
use std::task::Waker;
use std::time::{Duration, Instant};

use immwire_core::wake::{Completed, Completion, Progress, Ticket};
use rustix::thread::futex;

use crate::callback::{Callbacks, Job};
use crate::region::lock;

/// How long a waiter spins before it sleeps. A sleep and a wake-up cost about as much.
const SPIN: Duration = Duration::from_micros(20);
/// How often a spinning waiter looks at the clock.
const SPINS_PER_LOOK: u32 = 64;

/// What is to be done on completion.
pub(crate) enum Waiter {
    /// A future was polled.
    Waker(Waker),
    /// A function was left.
    Callback(Job),
}

/// A completion, and who waits for it.
#[derive(Default)]
pub(crate) struct WaitCell {
    pub(crate) completion: Completion,
    /// With the tenancy that it waits for: a slow completer leaves the next tenant's alone.
    waiter: Mutex<Option<(Ticket, Waiter)>>,
}

impl WaitCell {
    /// Ends the tenancy with `code`, and wakes whoever waits.
    pub(crate) fn complete(&self, ticket: Ticket, code: u8, callbacks: &Callbacks) -> bool {
        match self.completion.complete(ticket, code) {
            Completed::TooLate => return false,
            Completed::Quiet => {}
            Completed::Wake => self.wake(ticket, callbacks),
        }
        true
    }

    /// Wakes whoever waits for the tenancy. By now it may have ended, and another have begun.
    fn wake(&self, ticket: Ticket, callbacks: &Callbacks) {
        let all = i32::MAX.unsigned_abs();
        // The word is ours and mapped; waking nobody is no error.
        let _ = futex::wake(self.completion.word(), futex::Flags::PRIVATE, all);
        match self.take_waiter(ticket) {
            Some(Waiter::Waker(waker)) => waker.wake(),
            Some(Waiter::Callback(job)) => callbacks.push(job),
            None => {}
        }
    }

    fn take_waiter(&self, ticket: Ticket) -> Option<Waiter> {
        let waiter = lock(&self.waiter).take_if(|(tenancy, _)| *tenancy == ticket);
        waiter.map(|(_, waiter)| waiter)
    }

    /// The code, if complete; [`None`] while pending. A stale ticket was waited for too often.
    pub(crate) fn poll(&self, ticket: Ticket) -> Option<u8> {
        match self.completion.poll(ticket) {
            Progress::Done { code } => Some(code),
            Progress::Pending { .. } | Progress::Stale => None,
        }
    }

    /// Leaves `waiter` to be taken on completion; gives it back with the code if that has come.
    pub(crate) fn leave(&self, ticket: Ticket, waiter: Waiter) -> Result<(), (Waiter, u8)> {
        // What it replaces is dropped after the lock: a waker's drop may run code of others.
        let _replaced = lock(&self.waiter).replace((ticket, waiter));
        if let Progress::Done { code } = self.completion.announce_sleeper(ticket) {
            // The completer may have taken it already: then it is being dealt with.
            if let Some(waiter) = self.take_waiter(ticket) {
                return Err((waiter, code));
            }
        }
        Ok(())
    }

    /// Forgets a waiter that was left.
    pub(crate) fn forget(&self) {
        let forgotten = lock(&self.waiter).take();
        drop(forgotten);
    }

    /// Waits until complete, or until `timeout` has passed: spins a little, then sleeps.
    pub(crate) fn wait(&self, ticket: Ticket, timeout: Duration) -> Option<u8> {
        let start = Instant::now();
        loop {
            for _ in 0..SPINS_PER_LOOK {
                if let Some(code) = self.poll(ticket) {
                    return Some(code);
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= SPIN.min(timeout) {
                break;
            }
        }
        loop {
            let word = match self.completion.announce_sleeper(ticket) {
                Progress::Done { code } => return Some(code),
                Progress::Stale => return None,
                Progress::Pending { word } => word,
            };
            let left = timeout.checked_sub(start.elapsed())?;
            let seconds = i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
            let nanos = i64::from(left.subsec_nanos());
            let left = futex::Timespec { tv_sec: seconds, tv_nsec: nanos };
            // Every outcome (woken, word changed, interrupted, timed out) is looked at above.
            let _ = futex::wait(self.completion.word(), futex::Flags::PRIVATE, word, Some(&left));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn count_in(ran: &Arc<AtomicU32>) -> Job {
        let ran = Arc::clone(ran);
        Box::new(move || {
            ran.fetch_add(1, Ordering::Relaxed);
        })
    }

    /// A waiter sees `Done` by itself and begins anew, before its completer has come to waking it.
    #[test]
    fn a_slow_completer_leaves_the_next_tenants_callback_alone() {
        let (cell, callbacks) = (WaitCell::default(), Callbacks::new(4).unwrap());
        let ran = Arc::new(AtomicU32::new(0));
        let first = cell.completion.begin().unwrap();
        assert!(matches!(cell.completion.announce_sleeper(first), Progress::Pending { .. }));
        assert_eq!(cell.completion.complete(first, 0), Completed::Wake);
        assert!(cell.completion.reset(first));
        let second = cell.completion.begin().unwrap();
        assert!(cell.leave(second, Waiter::Callback(count_in(&ran))).is_ok());
        cell.wake(first, &callbacks);
        callbacks.run_pending();
        assert_eq!(ran.load(Ordering::Relaxed), 0, "called before its own completion");
        assert!(cell.complete(second, 0, &callbacks));
        callbacks.run_pending();
        assert_eq!(ran.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn the_longest_timeout_does_not_overflow() {
        let (cell, callbacks) = (WaitCell::default(), Callbacks::new(4).unwrap());
        let ticket = cell.completion.begin().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| cell.wait(ticket, Duration::MAX));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished());
            assert!(cell.complete(ticket, 9, &callbacks));
            assert_eq!(waiting.join().unwrap(), Some(9));
        });
    }
}
