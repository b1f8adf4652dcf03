//! A rank's choices and weights as they travel: vectors of 16 bytes that each carry the epoch.
//!
//! ```text
//!   vector 0    tokens      max_tokens   epoch                          epoch
//!   then        weight      weight       expert | expert << 16          epoch      two choices, 0xffff = dropped
//! ```
//!
//! Each token starts a vector; where a token has an odd number of choices, its last vector's second half is dropped. So a vector says by
//! itself whether it is of this round, and none has to be cleared.

use core::fmt;

use super::{DROPPED, MAX_TOP_K, index};

/// Words of a vector.
pub const VECTOR_WORDS: usize = 4;

/// 16 bytes, as four words.
pub type Vector = [u32; VECTOR_WORDS];

/// The half of a word that is no expert.
const NONE: u16 = u16::MAX;

/// How large tables are; the same at every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TableShape {
    /// Choices of a token, 1 to [`MAX_TOP_K`].
    pub top_k: u32,
    /// The most tokens that any rank has.
    pub max_tokens: u32,
}

/// Why a table cannot be written, or is none of this round.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TableError {
    /// A token must choose 1 to [`MAX_TOP_K`] experts.
    TopK {
        /// How many were given.
        top_k: u32,
    },
    /// A slice is too short.
    TooSmall {
        /// Entries it must have.
        needed: usize,
        /// Entries it has.
        available: usize,
    },
    /// Indices are not of whole tokens, or there are not as many weights.
    Length {
        /// Indices.
        indices: usize,
        /// Weights.
        weights: usize,
    },
    /// More tokens than there may be.
    Tokens {
        /// How many.
        tokens: u32,
        /// How many there may be.
        max: u32,
    },
    /// An index that has no place in 16 bits, or that is negative and not [`DROPPED`].
    Index {
        /// Which one.
        at: usize,
        /// The index.
        index: i32,
    },
    /// The writer's tables are of another shape.
    OtherShape {
        /// The most tokens of a rank, as the writer has it.
        max_tokens: u32,
        /// As we have it.
        ours: u32,
    },
    /// A vector of another round.
    Stale {
        /// Which one.
        vector: usize,
        /// Its epoch.
        epoch: u32,
        /// That of this round.
        expected: u32,
    },
    /// The second half of a token's last vector carries a choice too many.
    Surplus {
        /// Which vector.
        vector: usize,
    },
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TopK { top_k } => write!(f, "{top_k} choices a token, 1 to {MAX_TOP_K} may be"),
            Self::TooSmall { needed, available } => {
                write!(f, "{needed} entries needed, {available} lent")
            }
            Self::Length { indices, weights } => {
                write!(f, "{indices} indices with {weights} weights are no whole tokens")
            }
            Self::Tokens { tokens, max } => write!(f, "{tokens} tokens, at most {max} may be"),
            Self::Index { at, index } => write!(f, "index {index} at {at} is no expert"),
            Self::OtherShape { max_tokens, ours } => {
                write!(f, "a table for up to {max_tokens} tokens instead of {ours}")
            }
            Self::Stale { vector, epoch, expected } => {
                write!(f, "vector {vector} is of epoch {epoch} instead of {expected}")
            }
            Self::Surplus { vector } => write!(f, "vector {vector} has one choice too many"),
        }
    }
}

impl core::error::Error for TableError {}

impl TableShape {
    /// Vectors of a table with so many tokens; `None` if they cannot be counted.
    #[must_use]
    pub fn vectors(&self, tokens: u32) -> Option<usize> {
        let of_tokens = usize::try_from(tokens).ok()?.checked_mul(self.per_token())?;
        of_tokens.checked_add(1)
    }

    /// Bytes of the largest table.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        u64::try_from(self.vectors(self.max_tokens)?).ok()?.checked_mul(16)
    }

    const fn per_token(&self) -> usize {
        index(self.top_k.div_ceil(2))
    }

    fn check(&self) -> Result<usize, TableError> {
        if self.top_k == 0 || self.top_k > MAX_TOP_K {
            return Err(TableError::TopK { top_k: self.top_k });
        }
        Ok(index(self.top_k))
    }

    /// Writes the table of a rank whose tokens chose `indices`, and returns how many vectors that took. O(indices).
    ///
    /// # Errors
    ///
    /// [`TableError`]; some vectors may have been written.
    pub fn encode(
        &self,
        epoch: u32,
        indices: &[i32],
        weights: &[f32],
        out: &mut [Vector],
    ) -> Result<usize, TableError> {
        let top_k = self.check()?;
        let length = TableError::Length { indices: indices.len(), weights: weights.len() };
        let rows = indices.chunks_exact(top_k);
        if indices.len() != weights.len() || !rows.remainder().is_empty() {
            return Err(length);
        }
        let tokens = u32::try_from(rows.len()).map_err(|_| length)?;
        if tokens > self.max_tokens {
            return Err(TableError::Tokens { tokens, max: self.max_tokens });
        }
        let needed = self.vectors(tokens).ok_or(length)?;
        let available = out.len();
        let Some((head, body)) = out.get_mut(..needed).and_then(<[_]>::split_first_mut) else {
            return Err(TableError::TooSmall { needed, available });
        };
        *head = [tokens, self.max_tokens, epoch, epoch];
        let body = body.chunks_exact_mut(self.per_token());
        for (token, ((row, weights), out)) in
            rows.zip(weights.chunks_exact(top_k)).zip(body).enumerate()
        {
            let pairs = row.chunks(2).zip(weights.chunks(2));
            for (pair, ((indices, weights), out)) in pairs.zip(out).enumerate() {
                let at = token * top_k + pair * 2;
                let half = |n: usize| indices.get(n).map_or(Ok(NONE), |index| pack(at + n, *index));
                let bits = |n: usize| weights.get(n).map_or(0, |weight| weight.to_bits());
                let experts = u32::from(half(0)?) | u32::from(half(1)?) << 16;
                *out = [bits(0), bits(1), experts, epoch];
            }
        }
        Ok(needed)
    }

    /// Reads a table of round `epoch` from a peer, and returns how many tokens there are. Whether indices are experts is for
    /// [`Routing::new`](super::Routing::new) to say. O(indices).
    ///
    /// # Errors
    ///
    /// [`TableError`]; some of the output may have been written.
    pub fn decode(
        &self,
        epoch: u32,
        table: &[Vector],
        indices: &mut [i32],
        weights: &mut [f32],
    ) -> Result<u32, TableError> {
        let top_k = self.check()?;
        let Some((&[tokens, max_tokens, first, second], body)) = table.split_first() else {
            return Err(TableError::TooSmall { needed: 1, available: 0 });
        };
        if let Some(other) = [first, second].into_iter().find(|found| *found != epoch) {
            return Err(TableError::Stale { vector: 0, epoch: other, expected: epoch });
        }
        if max_tokens != self.max_tokens {
            return Err(TableError::OtherShape { max_tokens, ours: self.max_tokens });
        }
        if tokens > self.max_tokens {
            return Err(TableError::Tokens { tokens, max: self.max_tokens });
        }
        let short = |needed, available| TableError::TooSmall { needed, available };
        let needed = self.vectors(tokens).ok_or_else(|| short(usize::MAX, table.len()))?;
        let body = body.get(..needed - 1).ok_or_else(|| short(needed, table.len()))?;
        // No more than twice the vectors, which are there.
        let entries = index(tokens) * top_k;
        let available = indices.len().min(weights.len());
        let (Some(indices), Some(weights)) =
            (indices.get_mut(..entries), weights.get_mut(..entries))
        else {
            return Err(short(entries, available));
        };
        let rows = indices.chunks_exact_mut(top_k).zip(weights.chunks_exact_mut(top_k));
        for (token, (vectors, (indices, weights))) in
            body.chunks_exact(self.per_token()).zip(rows).enumerate()
        {
            let pairs = indices.chunks_mut(2).zip(weights.chunks_mut(2));
            for (pair, (&[low, high, experts, found], (indices, weights))) in
                vectors.iter().zip(pairs).enumerate()
            {
                let vector = 1 + token * self.per_token() + pair;
                if found != epoch {
                    return Err(TableError::Stale { vector, epoch: found, expected: epoch });
                }
                if indices.len() == 1 && experts >> 16 != u32::from(NONE) {
                    return Err(TableError::Surplus { vector });
                }
                let halves = [experts & 0xffff, experts >> 16];
                for (index, half) in indices.iter_mut().zip(halves) {
                    *index = if half == u32::from(NONE) { DROPPED } else { half.cast_signed() };
                }
                for (weight, bits) in weights.iter_mut().zip([low, high]) {
                    *weight = f32::from_bits(bits);
                }
            }
        }
        Ok(tokens)
    }
}

fn pack(at: usize, index: i32) -> Result<u16, TableError> {
    match u16::try_from(index) {
        Ok(expert) if expert != NONE => Ok(expert),
        _ if index == DROPPED => Ok(NONE),
        _ => Err(TableError::Index { at, index }),
    }
}
