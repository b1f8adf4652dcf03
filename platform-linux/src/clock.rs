//! The clock that the core's instants are read from: the machine's, or one that somebody steps.
//!
//! Everything that an engine does by time (deadlines, drains, heartbeats, the time to connect) is read
//! here. On a stepped clock nothing passes by itself: whoever steps it polls the engines, and is told
//! which of them have been given something to do. Waits that block their caller (a futex, a socket)
//! know nothing of this clock; on a stepped one nobody should block.
//!
//! # Invariants
//!
//! A clock never goes back. An engine is on the list of those to be polled at most once.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use immwire_core::id::Time;

use crate::sync::lock;

/// Where an engine's instants come from. Cloning it is cheap, and yields the same clock.
#[derive(Clone)]
pub struct Clock(Source);

#[derive(Clone)]
enum Source {
    Monotonic { origin: Instant },
    Stepped { stepper: Arc<Stepper>, engine: u32 },
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.is_stepped() { "Stepped" } else { "Monotonic" };
        f.debug_tuple(name).field(&self.now()).finish()
    }
}

impl Clock {
    /// The machine's monotonic clock, from now on.
    #[must_use]
    pub fn monotonic() -> Self {
        Self(Source::Monotonic { origin: Instant::now() })
    }

    /// The clock of `stepper`, for its engine number `engine`.
    pub(crate) const fn stepped(stepper: Arc<Stepper>, engine: u32) -> Self {
        Self(Source::Stepped { stepper, engine })
    }

    /// How long it is since the origin. A system call at most, on a stepped clock a load.
    #[must_use]
    pub fn now(&self) -> Time {
        match &self.0 {
            Source::Monotonic { origin } => Time::ZERO.after(origin.elapsed()),
            Source::Stepped { stepper, .. } => stepper.now(),
        }
    }

    /// Another number once some milliseconds have passed, for less than [`Clock::now`] costs; on a stepped clock, whose engines are told, always
    /// the same.
    pub(crate) fn tick(&self) -> u64 {
        match &self.0 {
            Source::Monotonic { .. } => {
                let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
                (now.tv_sec.cast_unsigned() << 30) | now.tv_nsec.cast_unsigned()
            }
            Source::Stepped { .. } => 0,
        }
    }

    /// Whether time passes only as somebody steps it.
    pub(crate) const fn is_stepped(&self) -> bool {
        matches!(self.0, Source::Stepped { .. })
    }

    /// The number of the engine on `stepper`'s clock; `None` if this is another clock.
    pub(crate) fn engine_of(&self, of: &Arc<Stepper>) -> Option<u32> {
        match &self.0 {
            Source::Stepped { stepper, engine } if Arc::ptr_eq(stepper, of) => Some(*engine),
            _ => None,
        }
    }

    /// Tells whoever steps this clock that the engine is to be polled; `false` if nobody does.
    pub(crate) fn ring(&self) -> bool {
        match &self.0 {
            Source::Monotonic { .. } => false,
            Source::Stepped { stepper, engine } => {
                stepper.mark(*engine);
                true
            }
        }
    }

    /// The instant `timeout` from now; [`Time::NEVER`] for `None`.
    pub(crate) fn deadline(&self, timeout: Option<Duration>) -> Time {
        timeout.map_or(Time::NEVER, |timeout| self.now().after(timeout))
    }
}

/// A clock that is stepped, and the engines that want to be polled before the next step.
#[derive(Debug, Default)]
pub(crate) struct Stepper {
    nanos: AtomicU64,
    ready: Mutex<Ready>,
}

#[derive(Debug, Default)]
struct Ready {
    /// In the order in which they were marked.
    queue: std::collections::VecDeque<u32>,
    /// By engine.
    queued: Vec<bool>,
}

impl Stepper {
    pub(crate) fn now(&self) -> Time {
        // Relaxed: an instant publishes nothing; what happened by then is behind the fabric's lock.
        Time::from_nanos(self.nanos.load(Ordering::Relaxed))
    }

    /// It is `now`, if that is not past.
    pub(crate) fn advance(&self, now: Time) {
        self.nanos.fetch_max(now.as_nanos(), Ordering::Relaxed);
    }

    /// The engine wants to be polled.
    pub(crate) fn mark(&self, engine: u32) {
        let mut ready = lock(&self.ready);
        let at = usize::try_from(engine).unwrap_or(usize::MAX);
        if ready.queued.len() <= at {
            ready.queued.resize(at.saturating_add(1), false);
        }
        if let Some(queued) = ready.queued.get_mut(at)
            && !std::mem::replace(queued, true)
        {
            ready.queue.push_back(engine);
        }
    }

    /// The next engine that is to be polled.
    pub(crate) fn next(&self) -> Option<u32> {
        let mut ready = lock(&self.ready);
        let engine = ready.queue.pop_front()?;
        if let Some(queued) = ready.queued.get_mut(usize::try_from(engine).unwrap_or(usize::MAX)) {
            *queued = false;
        }
        Some(engine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stepped_clock_moves_when_it_is_stepped_and_never_back() {
        let stepper = Arc::new(Stepper::default());
        let clock = Clock::stepped(Arc::clone(&stepper), 3);
        assert_eq!(clock.now(), Time::ZERO);
        stepper.advance(Time::from_nanos(70));
        stepper.advance(Time::from_nanos(50));
        assert_eq!(clock.now(), Time::from_nanos(70));
        assert_eq!(clock.deadline(Some(Duration::from_nanos(5))), Time::from_nanos(75));
        assert_eq!(clock.deadline(None), Time::NEVER);
        assert_eq!(clock.engine_of(&stepper), Some(3));
        assert_eq!(clock.engine_of(&Arc::new(Stepper::default())), None);
        assert!(!Clock::monotonic().ring());
    }

    #[test]
    fn engines_are_listed_once_and_in_order() {
        let stepper = Arc::new(Stepper::default());
        for engine in [4, 1, 4, 2, 1] {
            assert!(Clock::stepped(Arc::clone(&stepper), engine).ring());
        }
        let listed: Vec<u32> = std::iter::from_fn(|| stepper.next()).collect();
        assert_eq!(listed, [4, 1, 2]);
        stepper.mark(1);
        assert_eq!(stepper.next(), Some(1));
    }
}
