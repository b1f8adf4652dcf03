//! How a writer learns that its reader has withdrawn grants: a count of them, which it looks at now and then.
//!
//! ```text
//!   owner                                writer
//!     grant = NO_KEY  (hazard)             take:     count changed? then look at every grant
//!     count += 1                           is_news:  the same, before it sleeps
//!     ring the doorbell
//! ```
//!
//! # Invariants
//!
//! - Whoever sees a count sees the grants that were withdrawn before it: one look at all of them, after each
//!   change, finds every one.
//! - A withdrawal whose count a writer does not see as it goes to sleep wakes it.
//!
//! The model in `verification/loom` checks both, with the core's hazard word and doorbell.

use immwire_core::hazard;

use crate::sync::{AtomicU64, Ordering};

/// Withdraws a grant, and counts that. The writer's doorbell is to be rung then.
pub(super) fn withdraw(grant: &AtomicU64, count: &AtomicU64) {
    hazard::withdraw(grant);
    // Release: whoever sees the count sees the grant.
    count.fetch_add(1, Ordering::Release);
}

/// The count that a writer has acted on.
#[derive(Debug, Default)]
pub(super) struct Seen(u64);

impl Seen {
    /// Whether there is something to take. For a last look before sleep, behind the doorbell's fence.
    pub(super) fn is_news(&self, count: &AtomicU64) -> bool {
        count.load(Ordering::Relaxed) != self.0
    }

    /// Whether grants were withdrawn since the last call: they are all to be looked at. A load.
    pub(super) fn take(&mut self, count: &AtomicU64) -> bool {
        // Acquire: the withdrawn grants come with their count.
        let now = count.load(Ordering::Acquire);
        std::mem::replace(&mut self.0, now) != now
    }
}
