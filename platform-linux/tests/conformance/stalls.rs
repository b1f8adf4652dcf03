//! How long processors stood still while something was measured: so much of its time is nobody's doing.
//!
//! On each processor that this process may use, a thread sleeps again and again for a moment, and notes when it is woken late. An engine makes
//! nobody late, whether it does too much, too late or nothing: who sleeps has the processor before who computes. All are late where a
//! virtual machine's host, or who limits what a container uses, does not let the processor run.
//!
//! It refuses to know what is measured.
//!
//! # Invariants
//!
//! - No moment is taken off twice, however many processors stood still in it.
//! - What is taken off was seen to its end: who asks waits until all have been woken since.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Slept at a time.
const NAP: Duration = Duration::from_millis(10);
/// Whoever is woken later than that after it was due was on a processor that stood still. What is shorter is the scheduler's.
const LATE: Duration = Duration::from_millis(20);
/// No processor stands still for so long.
const PATIENCE: Duration = Duration::from_secs(60);
/// Processors that are watched, the first of those there are.
const WATCHED_MAX: usize = 16;

/// What the sleepers have noted.
struct Seen {
    /// When each was woken last.
    woken: Vec<Instant>,
    /// From when one was due until it was woken.
    late: Vec<(Instant, Instant)>,
}

/// Watches from when it is made until it is dropped.
pub(super) struct Stalls {
    over: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    sleepers: Vec<JoinHandle<()>>,
}

impl Stalls {
    pub(super) fn watch() -> Self {
        let all = sched_getaffinity(None).expect("processors of its own");
        let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).take(WATCHED_MAX);
        let cpus: Vec<usize> = cpus.collect();
        let now = Instant::now();
        let seen = Arc::new(Mutex::new(Seen { woken: vec![now; cpus.len()], late: Vec::new() }));
        let over = Arc::new(AtomicBool::new(false));
        let mut sleepers = Vec::new();
        for (at, cpu) in cpus.into_iter().enumerate() {
            let (over, seen) = (Arc::clone(&over), Arc::clone(&seen));
            sleepers.push(std::thread::spawn(move || sleep(at, cpu, &over, &seen)));
        }
        Self { over, seen, sleepers }
    }

    /// How long it took since `start`, but for what a processor stood still, if that is `limit` or more. Waits for nobody if it took less anyway.
    pub(super) fn beyond(&self, start: Instant, limit: Duration) -> Option<Duration> {
        let may_be = start.elapsed() >= limit;
        may_be.then(|| self.ran(start)).filter(|ran| *ran >= limit)
    }

    /// The time from `start` until now, but for what a processor stood still. Waits for the sleepers.
    pub(super) fn ran(&self, start: Instant) -> Duration {
        self.between(start, Instant::now())
    }

    /// The time from one moment to another, which has been, but for what a processor stood still. Waits for the sleepers.
    pub(super) fn between(&self, start: Instant, end: Instant) -> Duration {
        let (mut ran, mut from) = (Duration::ZERO, start);
        for (due, woken) in self.late_by(end) {
            ran += due.min(end).saturating_duration_since(from);
            from = from.max(woken.min(end));
        }
        ran + end.saturating_duration_since(from)
    }

    /// All that anybody was late until `end`, in order.
    fn late_by(&self, end: Instant) -> Vec<(Instant, Instant)> {
        let mut late = loop {
            let seen = self.seen.lock().expect("not poisoned");
            if seen.woken.iter().all(|woken| *woken >= end) {
                break seen.late.clone();
            }
            drop(seen);
            assert!(end.elapsed() < PATIENCE, "a processor does not come back");
            std::thread::sleep(NAP / 8);
        };
        late.sort_unstable();
        late
    }
}

impl Drop for Stalls {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for sleeper in self.sleepers.drain(..) {
            let _ = sleeper.join();
        }
    }
}

/// Sleeper number `at`.
fn sleep(at: usize, cpu: usize, over: &AtomicBool, seen: &Mutex<Seen>) {
    let mut own = CpuSet::new();
    own.set(cpu);
    // If it was taken from us since, another does.
    let _ = sched_setaffinity(None, &own);
    // It may have been kept from beginning.
    let mut before = seen.lock().expect("not poisoned").woken[at];
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(NAP);
        let (due, now) = (before + NAP, Instant::now());
        let mut seen = seen.lock().expect("not poisoned");
        if now.saturating_duration_since(due) > LATE {
            seen.late.push((due, now));
        }
        seen.woken[at] = now;
        before = now;
    }
}
