//! Which tokens travel together, into which part of the receiver's buffer, and when.
//!
//! Every rank cuts its tokens alike, and announces every chunk to every rank, those without bytes too: so a receiver's target
//! is the same in every round, whatever the routes, and who is missing can be named.
//!
//! Chunks are numbered through all rounds. Number `n` lies in slot `n % depth` of the receiver's buffer, and may be sent
//! once the receiver has taken number `n - depth`.

use core::fmt;
use core::num::NonZeroU32;
use core::ops::Range;

/// How the tokens of each rank are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunks {
    max_tokens: u32,
    chunk_tokens: NonZeroU32,
    depth: NonZeroU32,
}

/// Some tokens of one rank in one round.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// Which of the round.
    pub index: u32,
    /// Which tokens; none of those that this rank does not have.
    pub tokens: Range<u32>,
    /// Its number, through all rounds.
    pub number: u64,
    /// Where in the receiver's buffer it lies.
    pub slot: u32,
    /// How many chunks of this sender, through all rounds, the receiver must have taken before this one is sent.
    pub needs: u64,
}

/// Writes with immediate that arrive in one round from each other rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Expected {
    /// With choices.
    pub tables: u32,
    /// With tokens.
    pub dispatch: u32,
    /// With results.
    pub combine: u32,
}

/// Why there is no such chunk.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChunkError {
    /// A round has fewer chunks.
    NoChunk {
        /// The index.
        index: u32,
        /// How many there are.
        chunks: u32,
    },
    /// There are more tokens than a rank may have.
    Tokens {
        /// How many were given.
        tokens: u32,
        /// How many there may be.
        max: u32,
    },
    /// Its number does not fit 64 bits.
    Overflow,
}

impl fmt::Display for ChunkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoChunk { index, chunks } => write!(f, "chunk {index} of a round with {chunks}"),
            Self::Tokens { tokens, max } => write!(f, "{tokens} tokens, at most {max} may be"),
            Self::Overflow => f.write_str("the number of a chunk does not fit 64 bits"),
        }
    }
}

impl core::error::Error for ChunkError {}

impl Chunks {
    /// Cuts up to `max_tokens` tokens into chunks of `chunk_tokens`; `depth` of each sender find room at a receiver.
    #[must_use]
    pub const fn new(max_tokens: u32, chunk_tokens: NonZeroU32, depth: NonZeroU32) -> Self {
        Self { max_tokens, chunk_tokens, depth }
    }

    /// How many chunks each round has: as many as `max_tokens` need, and 1 at least.
    #[must_use]
    pub const fn count(&self) -> u32 {
        match self.max_tokens.div_ceil(self.chunk_tokens.get()) {
            0 => 1,
            count => count,
        }
    }

    /// Chunk `index` of round `round`, in which the rank has `tokens` tokens. O(1).
    ///
    /// # Errors
    ///
    /// [`ChunkError`].
    pub fn get(&self, round: u64, index: u32, tokens: u32) -> Result<Chunk, ChunkError> {
        let chunks = self.count();
        if index >= chunks {
            return Err(ChunkError::NoChunk { index, chunks });
        }
        if tokens > self.max_tokens {
            return Err(ChunkError::Tokens { tokens, max: self.max_tokens });
        }
        // Saturated, an edge is past all tokens.
        let edge = |index: u32| index.saturating_mul(self.chunk_tokens.get()).min(tokens);
        let first = round.checked_mul(chunks.into());
        let number = first.and_then(|first| first.checked_add(index.into()));
        let number = number.ok_or(ChunkError::Overflow)?;
        let depth = u64::from(self.depth.get());
        // A remainder of 32 bits.
        let slot = u32::try_from(number % depth).map_err(|_| ChunkError::Overflow)?;
        let needs = number.saturating_sub(depth - 1);
        Ok(Chunk { index, tokens: edge(index)..edge(index.saturating_add(1)), number, slot, needs })
    }

    /// What arrives in a round from each other rank.
    #[must_use]
    pub const fn expected(&self) -> Expected {
        Expected { tables: 1, dispatch: self.count(), combine: self.count() }
    }
}

impl Expected {
    /// All that arrives in a round at a rank of so many: the target of one counter for everything.
    #[must_use]
    pub fn of_world(&self, world: u32) -> u64 {
        let each = u64::from(self.tables) + u64::from(self.dispatch) + u64::from(self.combine);
        // Less than 2^34 from each of fewer than 2^32 others would not fit; ranks are at most 512.
        each.saturating_mul(world.saturating_sub(1).into())
    }
}
