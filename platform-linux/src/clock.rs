//! The clock that the core's instants are read from.

use std::time::{Duration, Instant};

use immwire_core::id::Time;

/// A monotonic clock whose origin is the start of its engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    origin: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { origin: Instant::now() }
    }

    pub(crate) fn now(&self) -> Time {
        Time::ZERO.after(self.origin.elapsed())
    }

    /// The instant `timeout` from now; [`Time::NEVER`] for `None`.
    pub(crate) fn deadline(&self, timeout: Option<Duration>) -> Time {
        timeout.map_or(Time::NEVER, |timeout| self.now().after(timeout))
    }
}
