//! Which experts a rank has.
//!
//! Each rank has a contiguous range of them, of any length, none included.

use core::fmt;
use core::ops::Range;

use super::{MAX_EXPERTS, MAX_WORLD, index};

/// Experts on ranks: rank `r` has those from `firsts[r]` to before `firsts[r + 1]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Placement<'a> {
    /// Starts with 0, never falls, ends with the number of experts.
    firsts: &'a [u32],
}

/// Why experts cannot be placed so.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlacementError {
    /// There must be 1 to [`MAX_WORLD`] ranks.
    World {
        /// Entries of the list, one more than there are ranks.
        entries: usize,
    },
    /// The first rank does not start with expert 0.
    Start {
        /// What it starts with.
        first: u32,
    },
    /// A rank would end before it starts.
    Falls {
        /// The rank.
        rank: u32,
        /// Its first expert.
        first: u32,
        /// That of the next rank.
        next: u32,
    },
    /// There must be 1 to [`MAX_EXPERTS`] experts.
    Experts {
        /// How many were given.
        experts: u32,
    },
}

impl fmt::Display for PlacementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::World { entries } => {
                write!(
                    f,
                    "{entries} entries; one more than ranks, of which there are 1 to {MAX_WORLD}"
                )
            }
            Self::Start { first } => write!(f, "rank 0 starts with expert {first} instead of 0"),
            Self::Falls { rank, first, next } => {
                write!(f, "rank {rank} starts with expert {first}, the next one with {next}")
            }
            Self::Experts { experts } => write!(f, "{experts} experts, 1 to {MAX_EXPERTS} may be"),
        }
    }
}

impl core::error::Error for PlacementError {}

impl<'a> Placement<'a> {
    /// Rank `r` has the experts from `firsts[r]` to before `firsts[r + 1]`: one entry more than ranks. O(world).
    ///
    /// # Errors
    ///
    /// [`PlacementError`]: the list is none of that.
    pub fn new(firsts: &'a [u32]) -> Result<Self, PlacementError> {
        let entries = firsts.len();
        let (Some(&first), Some(&experts)) = (firsts.first(), firsts.last()) else {
            return Err(PlacementError::World { entries });
        };
        if entries < 2 || entries > index(MAX_WORLD) + 1 {
            return Err(PlacementError::World { entries });
        }
        if first != 0 {
            return Err(PlacementError::Start { first });
        }
        for (rank, pair) in (0..).zip(firsts.windows(2)) {
            if let &[first, next] = pair
                && next < first
            {
                return Err(PlacementError::Falls { rank, first, next });
            }
        }
        if experts == 0 || experts > MAX_EXPERTS {
            return Err(PlacementError::Experts { experts });
        }
        Ok(Self { firsts })
    }

    /// Spreads `experts` over `firsts.len() - 1` ranks as evenly as can be; the first ones have one more.
    ///
    /// # Errors
    ///
    /// [`PlacementError::World`], [`PlacementError::Experts`].
    pub fn even(experts: u32, firsts: &'a mut [u32]) -> Result<Self, PlacementError> {
        let entries = firsts.len();
        let world = entries.checked_sub(1).and_then(|world| u32::try_from(world).ok());
        let parts = |world| Some((experts.checked_div(world)?, experts.checked_rem(world)?));
        let Some((share, more)) = world.filter(|world| *world <= MAX_WORLD).and_then(parts) else {
            return Err(PlacementError::World { entries });
        };
        for (rank, first) in (0..).zip(firsts.iter_mut()) {
            // At most `experts`, since rank <= world.
            *first = share * rank + more.min(rank);
        }
        Self::new(firsts)
    }

    /// How many ranks there are, 1 to [`MAX_WORLD`].
    #[must_use]
    pub fn world(&self) -> u32 {
        // At most MAX_WORLD, as `new` has it.
        u32::try_from(self.firsts.len().saturating_sub(1)).unwrap_or(MAX_WORLD)
    }

    /// How many experts there are, 1 to [`MAX_EXPERTS`].
    #[must_use]
    pub fn experts(&self) -> u32 {
        self.firsts.last().copied().unwrap_or(0)
    }

    /// The experts of `rank`; none if there is no such rank.
    #[must_use]
    pub fn experts_of(&self, rank: u32) -> Range<u32> {
        match self.firsts.get(index(rank)..) {
            Some(&[first, next, ..]) => first..next,
            _ => 0..0,
        }
    }

    /// The rank that has `expert`; `None` if there is no such expert. O(log world).
    #[must_use]
    pub fn rank_of(&self, expert: u32) -> Option<u32> {
        if expert >= self.experts() {
            return None;
        }
        let starts_before = self.firsts.partition_point(|first| *first <= expert);
        u32::try_from(starts_before.checked_sub(1)?).ok()
    }

    /// The most experts that any rank has. O(world).
    #[must_use]
    pub fn most_local(&self) -> u32 {
        let len = |pair: &[u32]| match *pair {
            [first, next] => next.saturating_sub(first),
            _ => 0,
        };
        self.firsts.windows(2).map(len).max().unwrap_or(0)
    }
}
