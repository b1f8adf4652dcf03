//! Jobs that are pushed while a runner sleeps, works, and ends.

use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::sync::Arc;

use crate::Calls;
use crate::callback::Callbacks;
use crate::sync::{AtomicBool, Ordering, current, park};

fn callbacks() -> (Arc<Callbacks>, Calls) {
    (Arc::new(Callbacks::new(2).unwrap()), Calls::default())
}

fn push(callbacks: &Arc<Callbacks>, calls: &Calls, jobs: u32) -> thread::JoinHandle<()> {
    let (callbacks, calls) = (callbacks.clone(), calls.clone());
    thread::spawn(move || (0..jobs).for_each(|_| callbacks.push(calls.job())))
}

fn serve(callbacks: &Arc<Callbacks>) -> thread::JoinHandle<()> {
    let callbacks = callbacks.clone();
    thread::spawn(move || callbacks.serve())
}

/// A job is pushed while the runner starts, looks, and goes to sleep; the pusher waits for it.
///
/// *Fails if* the runner does not look again after it has announced its sleep, or if the pusher does
/// not ring (deadlock).
#[test]
fn a_sleeping_runner_is_woken_by_a_job() {
    explore(clause::TIME, Bound::Preemptions(3), 520, || {
        let (callbacks, _) = callbacks();
        let runner = serve(&callbacks);
        let ran = Arc::new(AtomicBool::new(false));
        let (set, waiter) = (ran.clone(), current());
        callbacks.push(Box::new(move || {
            set.store(true, Ordering::Release);
            waiter.unpark();
        }));
        while !ran.load(Ordering::Acquire) {
            park();
        }
        callbacks.end();
        runner.join().unwrap();
    });
}

/// A caller pushes before, while and after the engine ends.
///
/// *Fails if* the runner does not look once more when it has seen the end, if whoever pushes after
/// the end does not run the job, or if either side lacks its fence (a job is never run).
#[test]
fn a_job_pushed_around_the_end_runs_once() {
    explore(clause::ENDS, Bound::Preemptions(3), 6900, || {
        let (callbacks, calls) = callbacks();
        let threads = [serve(&callbacks), push(&callbacks, &calls, 1)];
        callbacks.end();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(calls.made(), 1);
    });
}

/// The same without a runner, as in polled mode: whoever polled looks once more after the end.
///
/// *Fails if* whoever pushes after the end does not run the job, or if either fence is missing.
#[test]
fn a_job_pushed_around_the_end_of_a_polled_engine_runs_once() {
    explore(clause::ENDS, Bound::None, 110, || {
        let (callbacks, calls) = callbacks();
        let pusher = push(&callbacks, &calls, 1);
        callbacks.end();
        callbacks.run_pending();
        pusher.join().unwrap();
        assert_eq!(calls.made(), 1);
    });
}

/// More jobs than the ring holds, while another thread runs them.
///
/// *Fails if* what finds the ring full is dropped, or if the sign that there are such jobs is taken
/// down over one that has just come.
#[test]
fn jobs_that_find_the_queue_full_run_too() {
    explore(clause::ENDS, Bound::Preemptions(3), 718, || {
        let (callbacks, calls) = callbacks();
        (0..2).for_each(|_| callbacks.push(calls.job()));
        let pusher = push(&callbacks, &calls, 3);
        callbacks.run_pending();
        pusher.join().unwrap();
        callbacks.run_pending();
        assert_eq!(calls.made(), 5);
    });
}
