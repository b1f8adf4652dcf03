//! How a caller waits for one thing that happens once: by polling, sleeping, a waker or a callback.
//!
//! The states, and why no wake-up is missed, are the core's ([`Completion`]); here is the place where a
//! waker or callback is kept. How a thread sleeps on a word is `sync`'s.
//!
//! # Invariants
//!
//! 1. Whoever waits is woken by the completion of its own tenancy: a sleeper, the waker that was left
//!    last, or the function, which runs once. By the completer, or by who ends a complete tenancy before that has come to it.
//! 2. A completer that is slow to wake touches no waiter of a later tenancy.
//!
//! The tests below check 2 step by step, the loom models of `verification/loom` both, on this text.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use immwire_core::wake::{Completed, Completion, Progress, Ticket};

use crate::callback::{Callbacks, Job};
use crate::sync::{Mutex, Timer, lock, sleep_on, wake_all};

/// What is to be done on completion.
pub(crate) enum Waiter {
    /// A future was polled.
    Waker(Waker),
    /// A function was left, to be called by whoever runs callbacks.
    Callback(Job),
    /// To be told by whoever completes, then and there.
    Inline(Arc<dyn OnEnd>),
}

/// Whoever is told of a completion at once.
pub(crate) trait OnEnd: Send + Sync {
    /// The tenancy has ended with `code`. It is short, and waits for nothing.
    fn ended(self: Arc<Self>, ticket: Ticket, code: u8);
}

/// A completion, and who waits for it.
pub(crate) struct WaitCell {
    pub(crate) completion: Completion,
    /// With the tenancy that it waits for: a slow completer leaves the next tenant's alone.
    waiter: Mutex<Option<(Ticket, Waiter)>>,
}

impl Default for WaitCell {
    fn default() -> Self {
        Self { completion: Completion::new(), waiter: Mutex::new(None) }
    }
}

impl WaitCell {
    /// Ends the tenancy with `code`, and wakes whoever waits.
    pub(crate) fn complete(&self, ticket: Ticket, code: u8, callbacks: &Callbacks) -> bool {
        match self.completion.complete(ticket, code) {
            Completed::TooLate => return false,
            Completed::Quiet => {}
            Completed::Wake => self.wake(ticket, code, callbacks),
        }
        true
    }

    /// Wakes whoever waits for the tenancy. By now it may have ended, and another have begun.
    fn wake(&self, ticket: Ticket, code: u8, callbacks: &Callbacks) {
        wake_all(self.completion.word());
        match self.take_waiter(ticket) {
            Some(Waiter::Waker(waker)) => waker.wake(),
            Some(Waiter::Callback(job)) => callbacks.push(job),
            Some(Waiter::Inline(told)) => told.ended(ticket, code),
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

    /// Takes the waiter of a tenancy that is about to be over. If that is complete, the waker that the completer has not come to: it is to be
    /// woken. Other waiters keep the tenancy as long as they wait.
    pub(crate) fn untold(&self, ticket: Ticket) -> Option<Waker> {
        let waiter = lock(&self.waiter).take();
        match waiter {
            Some((tenancy, Waiter::Waker(waker)))
                if tenancy == ticket && self.poll(ticket).is_some() =>
            {
                Some(waker)
            }
            _ => None,
        }
    }

    /// Forgets a waiter that was left.
    pub(crate) fn forget(&self) {
        let forgotten = lock(&self.waiter).take();
        drop(forgotten);
    }

    /// For a future's poll: the code, or [`None`] and `waker` is left to be woken on completion.
    pub(crate) fn watch(&self, ticket: Ticket, waker: &Waker) -> Option<u8> {
        if let Some(code) = self.poll(ticket) {
            return Some(code);
        }
        match self.leave(ticket, Waiter::Waker(waker.clone())) {
            // The completer may have come, and have woken the waker, in between.
            Ok(()) => self.poll(ticket),
            Err((_, code)) => Some(code),
        }
    }

    /// Waits until complete, or until `timeout` has passed: spins a little, then sleeps.
    pub(crate) fn wait(&self, ticket: Ticket, timeout: Duration) -> Option<u8> {
        let timer = Timer::start(timeout);
        if let Some(code) = timer.spin(|| self.poll(ticket)) {
            return Some(code);
        }
        loop {
            let word = match self.completion.announce_sleeper(ticket) {
                Progress::Done { code } => return Some(code),
                Progress::Stale => return None,
                Progress::Pending { word } => word,
            };
            sleep_on(self.completion.word(), word, timer.left()?);
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))] // The models have their own.
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
        cell.wake(first, 0, &callbacks);
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
