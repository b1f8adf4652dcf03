//! Where rows lie for the experts of one rank.
//!
//! The order is (expert, source rank, token), and each expert starts on a multiple of the padding.

use core::fmt;
use core::num::NonZeroU32;
use core::ops::Range;

use super::routing::local;
use super::{Routing, index};

/// In a list of slots: a row that only pads.
pub const NO_SLOT: u32 = u32::MAX;

/// The slot of a token in memory that has one for each of every source, `[world][max_tokens]`: for experts that gather, each
/// token lies there once, and a list says of each row which slot it is. `None` if that is no number of 32 bits below
/// [`NO_SLOT`], or `token` is none of so many.
#[must_use]
pub const fn slot_of(source: u32, token: u32, max_tokens: u32) -> Option<u32> {
    if token >= max_tokens {
        return None;
    }
    match source.checked_mul(max_tokens) {
        Some(first) => match first.checked_add(token) {
            Some(NO_SLOT) | None => None,
            slot => slot,
        },
        None => None,
    }
}

/// Rows of local experts, filled source by source.
#[derive(Debug)]
pub struct Layout<'a> {
    experts: Range<u32>,
    counts: &'a [u32],
    offsets: &'a [u32],
    /// Rows given out so far, for each expert.
    given: &'a mut [u32],
}

/// One row of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Arrival {
    /// The token, as its source numbers it.
    pub token: u32,
    /// Which of its choices.
    pub choice: u32,
    /// The expert, from the first one of this rank.
    pub local_expert: u32,
    /// Where the row lies, of all rows of this rank.
    pub row: u32,
}

/// Why rows cannot be laid out.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayoutError {
    /// A slice that the caller lends is too short.
    TooSmall {
        /// Entries it must have.
        needed: usize,
        /// Entries it has.
        available: usize,
    },
    /// There are more than 2^32 - 1 rows, padding included.
    Overflow {
        /// The expert, from the first one of this rank, at which they do not fit any more.
        local_expert: u32,
    },
    /// More tokens come for an expert than were counted.
    Uncounted {
        /// The expert, from the first one of this rank.
        local_expert: u32,
        /// How many were counted.
        counted: u32,
    },
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooSmall { needed, available } => {
                write!(f, "{needed} entries needed, {available} lent")
            }
            Self::Overflow { local_expert } => {
                write!(f, "rows up to local expert {local_expert} do not fit 32 bits")
            }
            Self::Uncounted { local_expert, counted } => {
                write!(f, "more than the {counted} tokens counted for local expert {local_expert}")
            }
        }
    }
}

impl core::error::Error for LayoutError {}

/// Writes the exclusive prefix sum of `counts`, each rounded up to a multiple of `padding`, and returns the total, which is also
/// the last of the `counts.len() + 1` entries written. O(counts).
///
/// # Errors
///
/// [`LayoutError::TooSmall`], [`LayoutError::Overflow`].
pub fn padded_offsets(
    counts: &[u32],
    padding: NonZeroU32,
    offsets: &mut [u32],
) -> Result<u32, LayoutError> {
    holds(counts.len().saturating_add(1), offsets.len())?;
    let mut total = 0_u32;
    for ((local_expert, count), offset) in (0..).zip(counts).zip(offsets.iter_mut()) {
        *offset = total;
        let rows = count.checked_next_multiple_of(padding.get());
        total = rows
            .and_then(|rows| total.checked_add(rows))
            .ok_or(LayoutError::Overflow { local_expert })?;
    }
    if let Some(last) = offsets.get_mut(counts.len()) {
        *last = total;
    }
    Ok(total)
}

const fn holds(needed: usize, available: usize) -> Result<(), LayoutError> {
    if available < needed {
        return Err(LayoutError::TooSmall { needed, available });
    }
    Ok(())
}

impl<'a> Layout<'a> {
    /// Lays out the rows of `experts`, of which `counts[e - experts.start]` tokens come from all ranks together.
    ///
    /// Writes `offsets` as [`padded_offsets`] does. `given` is for its own use, an entry for each expert. O(experts).
    ///
    /// # Errors
    ///
    /// [`LayoutError::TooSmall`], [`LayoutError::Overflow`].
    pub fn new(
        experts: Range<u32>,
        counts: &'a [u32],
        padding: NonZeroU32,
        offsets: &'a mut [u32],
        given: &'a mut [u32],
    ) -> Result<Self, LayoutError> {
        let len = experts.len();
        holds(len, counts.len())?;
        holds(len, given.len())?;
        let counts = counts.get(..len).unwrap_or_default();
        padded_offsets(counts, padding, offsets)?;
        given.fill(0);
        Ok(Self { experts, counts, offsets, given })
    }

    /// Where each expert starts, and one entry more: all rows, padding included.
    #[must_use]
    pub fn offsets(&self) -> &[u32] {
        self.offsets.get(..=self.experts.len()).unwrap_or(self.offsets)
    }

    /// All rows, padding included.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.offsets.get(self.experts.len()).copied().unwrap_or(0)
    }

    /// Tells `visit` each row that comes from the next source, by token and then by choice. To be called once for
    /// each source, in the order of their ranks: that order is the order of rows. O(indices).
    ///
    /// # Errors
    ///
    /// [`LayoutError::Uncounted`]: the counts were not of these sources; some rows were visited.
    pub fn place(
        &mut self,
        source: &Routing<'_>,
        mut visit: impl FnMut(Arrival),
    ) -> Result<(), LayoutError> {
        for token in 0..source.tokens() {
            for (choice, expert) in (0..).zip(source.choices(token)) {
                if let Some(local_expert) = local(*expert, &self.experts) {
                    let row = self.next_row(local_expert)?;
                    visit(Arrival { token, choice, local_expert, row });
                }
            }
        }
        Ok(())
    }

    fn next_row(&mut self, local_expert: u32) -> Result<u32, LayoutError> {
        let expert = index(local_expert);
        let counted = self.counts.get(expert).copied().unwrap_or(0);
        match (self.given.get_mut(expert), self.offsets.get(expert)) {
            (Some(given), Some(offset)) if *given < counted => {
                let row = *offset + *given; // Below the total, which fits.
                *given += 1;
                Ok(row)
            }
            _ => Err(LayoutError::Uncounted { local_expert, counted }),
        }
    }
}
