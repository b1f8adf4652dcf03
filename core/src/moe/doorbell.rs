//! Lines of host memory by which a kernel tells that a chunk is complete.
//!
//! One line of 64 bytes for each operation, parity of the epoch, chunk, and twelve destinations: nothing is shared, so there is
//! no head, no tail, and nothing to clear. The kernel writes a line when all rows of the chunk are visible to the NIC; the
//! host looks at the line that is next, and posts what it says.

use core::fmt;

use super::index;

/// Words of a line.
pub const LINE_WORDS: usize = 16;
/// Destinations that one line tells about.
pub const DESTINATIONS_PER_LINE: u32 = 12;

/// The way out or the way back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Tokens to experts.
    Dispatch,
    /// Results to tokens.
    Combine,
}

/// Where the lines of an exchange lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Doorbells {
    /// Chunks of a round.
    pub chunks: u32,
    /// Destinations behind NICs: nodes, or ranks.
    pub destinations: u32,
}

/// What one line says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Doorbell {
    /// The round, never 0: that is what a line holds which was never rung.
    pub epoch: u32,
    /// Which operation.
    pub op: Op,
    /// Which chunk of the round.
    pub chunk: u32,
    /// Which twelve of the destinations.
    pub part: u32,
    /// Rows for each of them.
    pub rows: [u32; DESTINATIONS_PER_LINE as usize],
}

/// A line says what it cannot say.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DoorbellError {
    /// It belongs elsewhere.
    Misplaced {
        /// Operation, part and chunk as they should be in words 1 and 2.
        expected: [u32; 2],
        /// What is there.
        found: [u32; 2],
    },
    /// More rows than the chunk has tokens.
    Rows {
        /// For which destination of the line.
        destination: u32,
        /// How many rows.
        rows: u32,
        /// How many there can be.
        max: u32,
    },
}

impl fmt::Display for DoorbellError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Misplaced { expected, found } => {
                write!(f, "a doorbell says {found:?} in the place of {expected:?}")
            }
            Self::Rows { destination, rows, max } => {
                write!(f, "{rows} rows for destination {destination} of a line, at most {max}")
            }
        }
    }
}

impl core::error::Error for DoorbellError {}

impl Doorbells {
    /// Lines for each chunk; none without destinations.
    #[must_use]
    pub const fn parts(&self) -> u32 {
        self.destinations.div_ceil(DESTINATIONS_PER_LINE)
    }

    /// How many lines there are; `None` if that does not fit 32 bits.
    #[must_use]
    pub fn lines(&self) -> Option<u32> {
        self.chunks.checked_mul(self.parts())?.checked_mul(4)
    }

    /// The line of a part of a chunk; `None` if there is none.
    #[must_use]
    pub fn line(&self, op: Op, epoch: u32, chunk: u32, part: u32) -> Option<u32> {
        if chunk >= self.chunks || part >= self.parts() {
            return None;
        }
        self.lines()?;
        // Below `lines()`, which fits.
        let group = op.number() * 2 + epoch % 2;
        Some((group * self.chunks + chunk) * self.parts() + part)
    }
}

impl Op {
    const fn number(self) -> u32 {
        match self {
            Self::Dispatch => 0,
            Self::Combine => 1,
        }
    }
}

impl Doorbell {
    /// The words of a line, epoch first and last: half of a new line over half of an old one is no new line.
    #[must_use]
    pub fn encode(&self) -> [u32; LINE_WORDS] {
        let [about, chunk] = place(self.op, self.chunk, self.part);
        let mut words = [self.epoch; LINE_WORDS];
        for (word, value) in
            words.iter_mut().skip(1).zip([about, chunk].into_iter().chain(self.rows))
        {
            *word = value;
        }
        words
    }

    /// Reads the line of this operation, chunk and part. `None` while `epoch` has not been rung there, as long as epochs are
    /// not 0. A chunk has `max_rows` tokens at most.
    ///
    /// # Errors
    ///
    /// [`DoorbellError`]: the line was rung with something that cannot be.
    pub fn read(
        words: &[u32; LINE_WORDS],
        epoch: u32,
        op: Op,
        chunk: u32,
        part: u32,
        max_rows: u32,
    ) -> Result<Option<Self>, DoorbellError> {
        let &[first, about, number, ref rows @ .., last] = words;
        if first != epoch || last != epoch {
            return Ok(None);
        }
        let (expected, found) = (place(op, chunk, part), [about, number]);
        if expected != found {
            return Err(DoorbellError::Misplaced { expected, found });
        }
        let many = (0..).zip(rows).find(|(_, rows)| **rows > max_rows);
        match many {
            Some((destination, &rows)) => {
                Err(DoorbellError::Rows { destination, rows, max: max_rows })
            }
            None => Ok(Some(Self { epoch, op, chunk, part, rows: *rows })),
        }
    }

    /// Rows for one of the exchange's destinations, if this line tells about it.
    #[must_use]
    pub fn rows_for(&self, destination: u32) -> Option<u32> {
        let first = self.part.checked_mul(DESTINATIONS_PER_LINE)?;
        self.rows.get(index(destination.checked_sub(first)?)).copied()
    }
}

/// Words 1 and 2: whose line it is.
const fn place(op: Op, chunk: u32, part: u32) -> [u32; 2] {
    [op.number() | part << 8, chunk]
}
