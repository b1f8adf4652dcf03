//! Names for things: NICs, peers, transfers, instants.
//!
//! An index says *which slot*; the generation beside it says *which tenant of that slot*, so that a
//! name kept too long is refused instead of meaning somebody else.

use core::fmt;
use core::time::Duration;

/// The most NICs a domain group may own.
pub const MAX_NICS: usize = 8;

/// A NIC of this domain group, or of a peer's: `0..MAX_NICS`.
pub type NicIndex = u8;

/// A peer of one domain group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId {
    /// Slot in the group's peer storage.
    pub index: u16,
    /// Tenant of the slot: a peer that leaves and returns has another one.
    pub generation: u32,
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer {}.{}", self.index, self.generation)
    }
}

/// A transfer of one domain group, from `submit` until its end has been polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId {
    /// Slot in the group's transfer storage.
    pub index: u16,
    /// Tenant of the slot.
    pub generation: u32,
}

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "transfer {}.{}", self.index, self.generation)
    }
}

/// Identity of one running engine, drawn at random when it starts.
///
/// An engine that restarts on the same address is another engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineId(pub u64);

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// An instant: nanoseconds of a monotonic clock whose origin the platform chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Time(u64);

impl Time {
    /// The clock's origin.
    pub const ZERO: Self = Self(0);
    /// Later than every instant a wait can reach: "no deadline".
    pub const NEVER: Self = Self(u64::MAX);

    /// The instant `nanos` after the origin.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the origin.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The instant `delay` later; [`Time::NEVER`] if the clock cannot express it.
    #[must_use]
    pub fn after(self, delay: Duration) -> Self {
        let nanos = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }

    /// How long it is from `earlier` until `self`; zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_saturates_at_never() {
        assert_eq!(Time::from_nanos(5).after(Duration::MAX), Time::NEVER);
        assert_eq!(Time::NEVER.after(Duration::from_nanos(1)), Time::NEVER);
        assert_eq!(Time::from_nanos(3).since(Time::from_nanos(5)), Duration::ZERO);
        assert_eq!(Time::from_nanos(5).since(Time::from_nanos(3)).as_nanos(), 2);
    }
}
