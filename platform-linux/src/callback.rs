//! The thread that runs callbacks, so that a slow one never stops progress.
//!
//! The engine hands a job over without waiting: the queue has room for one job of every transfer and
//! counter there can be, and for the messages that may be under way to posted receives; the rest goes to a list that grows.
//! In polled mode there is no thread, and the caller's `poll` runs them.
//!
//! # Invariants
//!
//! Every job that is pushed is run, once: by the runner, or, after [`Callbacks::end`], by whoever
//! pushes. No thread runs a job within another: a callback may hold its own locks when it asks for the next one. The tests below check it,
//! and the loom models of `verification/loom`, on this text. What one thread pushes is run in order, if one thread runs it: the tests alone
//! check that.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use immwire_core::wake::Doorbell;

use crate::ring::{self, Boxed};
use crate::sync::{
    AtomicBool, Mutex, OnceLock, Ordering, Thread, ThreadId, current, fence, lock, park,
};

/// A callback with its argument.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// Jobs on their way to whoever runs them.
pub(crate) struct Callbacks {
    jobs: Boxed<Job>,
    /// What found the queue full, and what came after that: callers may ask without end for counts that are there at once,
    /// and for ends of writes that were done when they were submitted.
    late: Mutex<VecDeque<Job>>,
    any_late: AtomicBool,
    bell: Doorbell,
    runner: OnceLock<Thread>,
    /// The engine has ended: nobody runs jobs but who pushes them.
    ended: AtomicBool,
    /// Threads that run jobs since.
    running: Mutex<Vec<ThreadId>>,
}

impl Callbacks {
    /// A queue with room for `capacity` jobs.
    pub(crate) fn new(capacity: usize) -> Option<Self> {
        Some(Self {
            jobs: ring::boxed(capacity)?,
            late: Mutex::new(VecDeque::new()),
            any_late: AtomicBool::new(false),
            bell: Doorbell::new(),
            runner: OnceLock::new(),
            ended: AtomicBool::new(false),
            running: Mutex::new(Vec::new()),
        })
    }

    /// Hands a job over; after the engine's end, runs it, unless this thread runs one: then it is run after that.
    pub(crate) fn push(&self, job: Job) {
        self.queue(job);
        self.ring();
    }

    /// The first half of [`Callbacks::push`]: runs nothing, so that a lock may be held.
    pub(crate) fn queue(&self, job: Job) {
        // Behind those that are late, so that what one thread pushes is run in order.
        let late =
            if self.any_late.load(Ordering::Acquire) { Err(job) } else { self.jobs.try_push(job) };
        if let Err(job) = late {
            lock(&self.late).push_back(job);
            self.any_late.store(true, Ordering::Release);
        }
    }

    /// The second half: has what was queued run.
    pub(crate) fn ring(&self) {
        if self.bell.ring()
            && let Some(runner) = self.runner.get()
        {
            runner.unpark();
        }
        // With the fence in `ring`, between the push and this look, and the one in `end`: either we see
        // the end, or whoever runs jobs after it sees ours.
        if self.ended.load(Ordering::Acquire) {
            self.run_after_the_end();
        }
    }

    /// Runs what is there, but not within a job: whoever runs that goes on with the next.
    fn run_after_the_end(&self) {
        let me = current().id();
        if self.runner.get().is_some_and(|runner| runner.id() == me) {
            return;
        }
        {
            let mut running = lock(&self.running);
            if running.contains(&me) {
                return;
            }
            running.push(me);
        }
        self.run_all();
        lock(&self.running).retain(|it| *it != me);
    }

    fn pop(&self) -> Option<Job> {
        self.jobs.try_pop().or_else(|| {
            if !self.any_late.load(Ordering::Acquire) {
                return None;
            }
            let mut late = lock(&self.late);
            let job = late.pop_front();
            self.any_late.store(!late.is_empty(), Ordering::Release);
            job
        })
    }

    fn is_empty(&self) -> bool {
        self.jobs.is_empty() && !self.any_late.load(Ordering::Acquire)
    }

    /// Whether jobs wait for a caller's `poll`: there is no thread that runs them.
    pub(crate) fn wait_for_poll(&self) -> bool {
        self.runner.get().is_none() && !self.is_empty()
    }

    /// Runs what is there. Returns whether there was anything.
    pub(crate) fn run_pending(&self) -> bool {
        if self.ended.load(Ordering::Acquire) {
            let any = !self.is_empty();
            self.run_after_the_end();
            return any;
        }
        self.run_all()
    }

    fn run_all(&self) -> bool {
        let mut any = false;
        while let Some(job) = self.pop() {
            any = true;
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                tracing::error!("a callback panicked");
            }
        }
        any
    }

    /// Runs jobs on this thread until [`Callbacks::end`], and nothing is left.
    pub(crate) fn serve(&self) {
        let _ = self.runner.set(current());
        loop {
            self.run_all();
            self.bell.prepare_sleep();
            if !self.is_empty() {
                self.bell.awake();
                continue;
            }
            if self.ended.load(Ordering::Acquire) {
                // What was pushed before the end, and seen by nobody until now. With the fence in `ring`:
                // either whoever pushed sees the end, as we have, or we see the job. (The fence in `end`
                // comes after what we have read of it, and so does not order us.)
                fence(Ordering::SeqCst);
                self.run_all();
                return;
            }
            park();
            self.bell.awake();
        }
    }

    /// The engine has ended, and has pushed its last job.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if let Some(runner) = self.runner.get() {
            runner.unpark();
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))] // The models have their own.
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    fn push_counting(callbacks: &Callbacks, ran: &Arc<AtomicU32>) {
        let ran = Arc::clone(ran);
        callbacks.push(Box::new(move || {
            ran.fetch_add(1, Ordering::Relaxed);
        }));
    }

    #[test]
    fn what_does_not_fit_is_run_all_the_same() {
        let (callbacks, ran) = (Callbacks::new(4).unwrap(), Arc::new(AtomicU32::new(0)));
        for pushed in 1..=100 {
            (0..pushed).for_each(|_| push_counting(&callbacks, &ran));
            assert!(callbacks.wait_for_poll());
            assert!(callbacks.run_pending());
            assert!(!callbacks.run_pending() && !callbacks.wait_for_poll());
            assert_eq!(ran.swap(0, Ordering::Relaxed), pushed);
        }
    }

    /// Jobs that push more, as callbacks that ask for the next one do, past the room that there is.
    #[test]
    fn what_one_thread_pushes_is_run_in_order() {
        let callbacks = Arc::new(Callbacks::new(4).unwrap());
        let ran = Arc::new(Mutex::new(Vec::new()));
        let (mut pushed, mut seed) = (0_u32, 1_u32);
        let push = |number: u32| {
            let ran = Arc::clone(&ran);
            callbacks.push(Box::new(move || lock(&ran).push(number)));
        };
        for _ in 0..2000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            if seed >> 16 & 1 == 0 {
                push(pushed);
                pushed += 1;
            } else if let Some(job) = callbacks.pop() {
                job();
            }
        }
        callbacks.run_pending();
        assert!(lock(&ran).iter().copied().eq(0..pushed), "{:?}", lock(&ran));
    }

    /// After the end each callback asks for the next one, as deep as any stack would be, with a lock of its own held.
    #[test]
    fn none_is_run_within_another() {
        const JOBS: u32 = 200_000;
        fn next(callbacks: &Arc<Callbacks>, own: &Arc<Mutex<u32>>, ran: &Arc<AtomicU32>) {
            let here = (Arc::clone(callbacks), Arc::clone(own), Arc::clone(ran));
            callbacks.push(Box::new(move || {
                let (callbacks, own, ran) = here;
                let mut number =
                    own.try_lock().expect("no job holds it: none has begun within another");
                *number += 1;
                if *number < JOBS {
                    next(&callbacks, &own, &ran);
                }
                ran.fetch_add(1, Ordering::Relaxed);
            }));
        }
        // By who pushes; by the thread that ran them before, which is in one when the end comes; and by who polls.
        for way in 0..3 {
            let callbacks = Arc::new(Callbacks::new(4).unwrap());
            let (own, ran) = (Arc::new(Mutex::new(0)), Arc::new(AtomicU32::new(0)));
            match way {
                0 => {
                    callbacks.end();
                    next(&callbacks, &own, &ran);
                }
                1 => {
                    let ender = Arc::clone(&callbacks);
                    callbacks.queue(Box::new(move || ender.end()));
                    next(&callbacks, &own, &ran);
                    let runner = Arc::clone(&callbacks);
                    std::thread::spawn(move || runner.serve()).join().unwrap();
                }
                _ => {
                    next(&callbacks, &own, &ran);
                    callbacks.end();
                    assert!(callbacks.run_pending() && !callbacks.run_pending());
                }
            }
            assert_eq!(ran.load(Ordering::Relaxed), JOBS, "{way}");
            assert!(lock(&callbacks.running).is_empty());
        }
    }

    /// Pushed before, while and after the runner ends: each job is run once, and soon.
    #[test]
    fn nothing_is_lost_at_the_end() {
        for round in 0..200 {
            let callbacks = Arc::new(Callbacks::new(4).unwrap());
            let ran = Arc::new(AtomicU32::new(0));
            let runner = std::thread::spawn({
                let callbacks = Arc::clone(&callbacks);
                move || callbacks.serve()
            });
            let pusher = std::thread::spawn({
                let (callbacks, ran) = (Arc::clone(&callbacks), Arc::clone(&ran));
                move || (0..20).for_each(|_| push_counting(&callbacks, &ran))
            });
            (0..round % 20).for_each(|_| push_counting(&callbacks, &ran));
            callbacks.end();
            (0..5).for_each(|_| push_counting(&callbacks, &ran));
            pusher.join().unwrap();
            runner.join().unwrap();
            assert_eq!(ran.load(Ordering::Relaxed), 25 + round % 20);
        }
    }
}
