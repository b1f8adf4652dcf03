//! What the tokens of one rank chose.

use core::fmt;
use core::num::NonZeroU32;
use core::ops::Range;

use super::{MAX_EXPERTS, MAX_TOP_K, MAX_WORLD, Placement, index};

/// The index of a choice that was dropped: it goes nowhere.
pub const DROPPED: i32 = -1;

/// The choices of one rank's tokens, checked: token `t` chose `indices[t * top_k..][..top_k]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Routing<'a> {
    indices: &'a [i32],
    top_k: NonZeroU32,
    tokens: u32,
}

/// Why choices are no routing.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RoutingError {
    /// A token must choose 1 to [`MAX_TOP_K`] experts.
    TopK {
        /// How many were given.
        top_k: u32,
    },
    /// There must be 1 to [`MAX_EXPERTS`] experts.
    Experts {
        /// How many were given.
        experts: u32,
    },
    /// The number of indices is no multiple of the choices of a token, or there are more than 2^32 - 1 tokens.
    Length {
        /// Indices given.
        indices: usize,
        /// Choices of a token.
        top_k: u32,
    },
    /// An index that is neither an expert nor [`DROPPED`].
    NoExpert {
        /// The token.
        token: u32,
        /// Which of its choices.
        choice: u32,
        /// The index.
        index: i32,
        /// How many experts there are.
        experts: u32,
    },
    /// A token chose one expert twice.
    Twice {
        /// The token.
        token: u32,
        /// The later of the two choices.
        choice: u32,
        /// The expert.
        index: i32,
    },
    /// The caller's output is shorter than what is written there.
    OutputTooSmall {
        /// Entries it must have.
        needed: usize,
        /// Entries it has.
        available: usize,
    },
    /// A count does not fit 32 bits.
    Overflow,
}

impl fmt::Display for RoutingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TopK { top_k } => write!(f, "{top_k} choices a token, 1 to {MAX_TOP_K} may be"),
            Self::Experts { experts } => write!(f, "{experts} experts, 1 to {MAX_EXPERTS} may be"),
            Self::Length { indices, top_k } => {
                write!(f, "{indices} indices are no whole number of tokens with {top_k} choices")
            }
            Self::NoExpert { token, choice, index, experts } => {
                write!(f, "choice {choice} of token {token} is {index}, of {experts} experts")
            }
            Self::Twice { token, choice, index } => {
                write!(f, "choice {choice} of token {token} is expert {index} once more")
            }
            Self::OutputTooSmall { needed, available } => {
                write!(f, "{needed} entries needed, {available} lent")
            }
            Self::Overflow => f.write_str("a count does not fit 32 bits"),
        }
    }
}

impl core::error::Error for RoutingError {}

impl<'a> Routing<'a> {
    /// Takes the choices of a rank: `top_k` indices for each token, experts or [`DROPPED`]. No tokens are fine.
    ///
    /// O(indices x top_k): every index is looked at, and compared with its token's other choices.
    ///
    /// # Errors
    ///
    /// [`RoutingError`], with the first index that is wrong.
    pub fn new(indices: &'a [i32], top_k: u32, experts: u32) -> Result<Self, RoutingError> {
        let choices = NonZeroU32::new(top_k).filter(|top_k| top_k.get() <= MAX_TOP_K);
        let choices = choices.ok_or(RoutingError::TopK { top_k })?;
        if experts == 0 || experts > MAX_EXPERTS {
            return Err(RoutingError::Experts { experts });
        }
        let length = RoutingError::Length { indices: indices.len(), top_k };
        let rows = indices.chunks_exact(index(top_k));
        if !rows.remainder().is_empty() {
            return Err(length);
        }
        let tokens = u32::try_from(rows.len()).map_err(|_| length)?;
        for (token, row) in (0..tokens).zip(rows) {
            check(row, token, experts)?;
        }
        Ok(Self { indices, top_k: choices, tokens })
    }

    /// How many tokens there are.
    #[must_use]
    pub const fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Choices of each token, 1 to [`MAX_TOP_K`].
    #[must_use]
    pub const fn top_k(&self) -> u32 {
        self.top_k.get()
    }

    /// The choices of `token`, dropped ones too; none if there is no such token.
    #[must_use]
    pub fn choices(&self, token: u32) -> &'a [i32] {
        let top_k = index(self.top_k());
        let start = index(token).checked_mul(top_k);
        let row = start.and_then(|start| self.indices.get(start..)?.get(..top_k));
        row.unwrap_or(&[])
    }

    /// The routing of these tokens alone, which are numbered from 0 on then: a chunk. Cut at the last token there is.
    #[must_use]
    pub fn part(&self, tokens: Range<u32>) -> Self {
        let end = tokens.end.min(self.tokens);
        let start = tokens.start.min(end);
        let top_k = index(self.top_k());
        // Inside `indices`, whose length is `tokens * top_k`.
        let indices = self.indices.get(index(start) * top_k..index(end) * top_k).unwrap_or(&[]);
        Self { indices, top_k: self.top_k, tokens: end - start }
    }

    /// Adds to `counts[e - experts.start]` how many tokens chose expert `e`, for those in `experts`. O(indices).
    ///
    /// Called once for each source rank it counts what a rank receives; with all experts, what one sends.
    ///
    /// # Errors
    ///
    /// [`RoutingError::OutputTooSmall`]: nothing was counted. [`RoutingError::Overflow`]: some was.
    pub fn count_experts(
        &self,
        experts: Range<u32>,
        counts: &mut [u32],
    ) -> Result<(), RoutingError> {
        holds(experts.len(), counts.len())?;
        for expert in self.indices.iter().filter_map(|index| local(*index, &experts)) {
            if let Some(count) = counts.get_mut(index(expert)) {
                *count = count.checked_add(1).ok_or(RoutingError::Overflow)?;
            }
        }
        Ok(())
    }

    /// Writes to `counts[r]` how many tokens go to rank `r`: each once, however many of its experts are there.
    ///
    /// O(indices x log world). The exclusive prefix sum of this ([`padded_offsets`](super::padded_offsets) with 1) says where
    /// the rows for each rank start, if they lie one after the other.
    ///
    /// # Errors
    ///
    /// [`RoutingError::OutputTooSmall`]: nothing was written.
    pub fn count_ranks(
        &self,
        placement: &Placement<'_>,
        counts: &mut [u32],
    ) -> Result<(), RoutingError> {
        let counts = zeros(counts, index(placement.world()))?;
        for token in 0..self.tokens {
            for rank in self.ranks_of(token, placement).iter() {
                if let Some(count) = counts.get_mut(index(rank)) {
                    *count += 1; // At most `tokens`.
                }
            }
        }
        Ok(())
    }

    /// Writes to `counts[r]` how many choices are experts of rank `r`: as many rows as tokens have there, one for each expert.
    ///
    /// O(indices x log world).
    ///
    /// # Errors
    ///
    /// [`RoutingError::OutputTooSmall`]: nothing was written.
    pub fn count_choices(
        &self,
        placement: &Placement<'_>,
        counts: &mut [u32],
    ) -> Result<(), RoutingError> {
        let counts = zeros(counts, index(placement.world()))?;
        for token in 0..self.tokens {
            for choice in self.choices(token) {
                let expert = u32::try_from(*choice).ok();
                let rank = expert.and_then(|expert| placement.rank_of(expert));
                if let Some(count) = rank.and_then(|rank| counts.get_mut(index(rank))) {
                    *count += 1; // No more than there are choices, whose number fits.
                }
            }
        }
        Ok(())
    }

    /// The ranks that `token` goes to, a bit each. O(`top_k` x log world).
    #[must_use]
    pub fn ranks_of(&self, token: u32, placement: &Placement<'_>) -> RankMask {
        let mut ranks = RankMask::EMPTY;
        for choice in self.choices(token) {
            let expert = u32::try_from(*choice).ok();
            if let Some(rank) = expert.and_then(|expert| placement.rank_of(expert)) {
                ranks.insert(rank);
            }
        }
        ranks
    }

    /// Which choices of `token` are among `experts`: bit `k` for choice `k`. O(`top_k`).
    #[must_use]
    pub fn choices_among(&self, token: u32, experts: &Range<u32>) -> u32 {
        let choices = (0..).zip(self.choices(token));
        choices.fold(0, |mask, (choice, index)| {
            mask | u32::from(local(*index, experts).is_some()) << choice
        })
    }

    /// The tokens that go to the rank with `experts`, in order: row `n` for it is the `n`-th of these, and nobody has to
    /// send a list. O(indices) for all.
    pub fn tokens_at(&self, experts: Range<u32>) -> impl Iterator<Item = u32> + use<'a> {
        let rows = self.indices.chunks_exact(index(self.top_k()));
        (0..).zip(rows).filter_map(move |(token, row)| {
            row.iter().any(|choice| local(*choice, &experts).is_some()).then_some(token)
        })
    }
}

fn check(row: &[i32], token: u32, experts: u32) -> Result<(), RoutingError> {
    for (at, (choice, &index)) in (0..).zip(row).enumerate() {
        if index == DROPPED {
            continue;
        }
        if u32::try_from(index).is_ok_and(|expert| expert < experts) {
            if row.iter().take(at).any(|earlier| *earlier == index) {
                return Err(RoutingError::Twice { token, choice, index });
            }
        } else {
            return Err(RoutingError::NoExpert { token, choice, index, experts });
        }
    }
    Ok(())
}

/// The number of expert `index` among `experts`, if it is one.
pub(super) fn local(index: i32, experts: &Range<u32>) -> Option<u32> {
    let expert = u32::try_from(index).ok()?;
    if experts.contains(&expert) { Some(expert - experts.start) } else { None }
}

pub(super) const fn holds(needed: usize, available: usize) -> Result<(), RoutingError> {
    if available < needed {
        return Err(RoutingError::OutputTooSmall { needed, available });
    }
    Ok(())
}

/// The first `needed` entries of what the caller lent, set to zero.
fn zeros(lent: &mut [u32], needed: usize) -> Result<&mut [u32], RoutingError> {
    holds(needed, lent.len())?;
    let zeros = lent.get_mut(..needed).unwrap_or_default();
    zeros.fill(0);
    Ok(zeros)
}

const WORDS: usize = index(MAX_WORLD) / 64;

/// A set of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RankMask([u64; WORDS]);

impl RankMask {
    /// No rank.
    pub const EMPTY: Self = Self([0; WORDS]);

    /// Bit `r % 64` of word `r / 64` for rank `r`.
    #[must_use]
    pub const fn words(&self) -> &[u64; WORDS] {
        &self.0
    }

    /// Puts `rank` in. Nothing happens if there can be no such rank.
    pub fn insert(&mut self, rank: u32) {
        if let Some(word) = self.0.get_mut(index(rank / 64)) {
            *word |= 1 << (rank % 64);
        }
    }

    /// Whether `rank` is in it.
    #[must_use]
    pub fn contains(&self, rank: u32) -> bool {
        self.0.get(index(rank / 64)).is_some_and(|word| word >> (rank % 64) & 1 == 1)
    }

    /// How many ranks are in it.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether no rank is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// How many lower ranks are in it: where `rank` stands among those that a token goes to.
    #[must_use]
    pub fn below(&self, rank: u32) -> u32 {
        let whole = index(rank / 64);
        let full: u32 = self.0.iter().take(whole).map(|word| word.count_ones()).sum();
        let part = self.0.get(whole).map_or(0, |word| word & ((1 << (rank % 64)) - 1));
        full + part.count_ones()
    }

    /// The ranks from `first` on, then the lower ones: senders that begin each with another do not all write to one.
    pub fn iter_from(&self, first: u32) -> impl Iterator<Item = u32> + use<> {
        let later = self.iter().filter(move |rank| *rank >= first);
        later.chain(self.iter().filter(move |rank| *rank < first))
    }

    /// The ranks, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + use<> {
        (0..).step_by(64).zip(self.0).flat_map(|(first, word)| Bits { first, word })
    }
}

/// The numbers of the bits of a word.
struct Bits {
    first: u32,
    word: u64,
}

impl Iterator for Bits {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        if self.word == 0 {
            return None;
        }
        let bit = self.word.trailing_zeros();
        self.word &= self.word - 1;
        Some(self.first + bit)
    }
}
