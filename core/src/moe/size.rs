//! How many bytes each buffer of an exchange has.
//!
//! Whoever receives lends memory for the worst routes there are. A chunk and a depth bound that: of `max_tokens` tokens
//! only `depth` chunks from each rank are anywhere at a time.
//!
//! For 7,168 values a token, fp8 with 56 scales of 4 bytes out and bf16 back, the best 8 of 256 experts, rows by expert padded to 128;
//! MiB for each rank, all rounds together:
//!
//! | ranks | tokens | chunk x depth out; back | choices | dispatch | combine | sum | rows by expert, at most |
//! |---|---|---|---|---|---|---|---|
//! | 2 | 128 | 128 x 2; 128 x 1 | 0.0 | 3.6 | 3.5 | 7.2 | 18,304 |
//! | 4 | 128 | 128 x 2; 128 x 1 | 0.1 | 7.2 | 7.0 | 14.3 | 12,160 |
//! | 8 | 128 | 128 x 2; 128 x 1 | 0.1 | 14.5 | 14.0 | 28.6 | 12,160 |
//! | 64 | 128 | 128 x 2; 128 x 1 | 1.0 | 116.0 | 112.0 | 229.0 | 32,768 |
//! | 8 | 4,096 | 4096 x 2; 4096 x 1 | 4.0 | 464.0 | 448.0 | 916.0 | 266,112 |
//! | 8 | 4,096 | 512 x 2; 512 x 2 | 4.0 | 58.0 | 112.0 | 174.0 | 266,112 |
//! | 64 | 4,096 | 512 x 2; 512 x 2 | 32.0 | 464.0 | 896.0 | 1392.0 | 1,048,576 |
//!
//! A test computes this table. Rows by expert lie in the caller's memory; who reads the receive buffer by row numbers has none.

use core::fmt;
use core::num::NonZeroU32;

use super::{MAX_TOP_K, Placement, TableShape};

/// Rows start on this boundary: no two share a cache line of a GPU.
pub const ROW_ALIGN_BYTES: u64 = 128;

/// Payloads are multiples of this many bytes: what a thread moves at a time.
const VECTOR_BYTES: u32 = 16;

/// What an exchange is made for; the same at every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Choices of a token, 1 to [`MAX_TOP_K`].
    pub top_k: u32,
    /// The most tokens that any rank has.
    pub max_tokens: u32,
    /// Bytes of a token on the way out, a multiple of 16.
    pub token_bytes: u32,
    /// Bytes of the scales that travel with it; any number.
    pub scale_bytes: u32,
    /// Bytes of a token on the way back, a multiple of 16.
    pub result_bytes: u32,
    /// Rows of an expert start on a multiple of this, and are padded to it.
    pub padding: NonZeroU32,
    /// Tokens that travel together.
    pub chunk_tokens: NonZeroU32,
    /// Chunks from each rank for which there is room on the way out.
    pub dispatch_depth: NonZeroU32,
    /// Chunks for which there is room on the way back.
    pub combine_depth: NonZeroU32,
    /// Whether each choice's result comes back by itself, and all are summed where the token is from. If not, those of a rank
    /// come as one sum: fewer bytes, and a rounding more.
    pub exact: bool,
}

/// Bytes of the buffers of each rank, and what they follow from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Bytes of one rank's choices as they travel.
    pub table_bytes: u64,
    /// From one row to the next on the way out: payload, then scales, then up to a multiple of [`ROW_ALIGN_BYTES`].
    pub dispatch_row_bytes: u64,
    /// From one row to the next on the way back.
    pub combine_row_bytes: u64,
    /// The most ranks that a token goes to.
    pub fan: u32,
    /// The most results that one rank sends back for a token: one, or where sums are exact one for each choice that it can have.
    pub combine_each: u32,
    /// Choices of all ranks, of this round and the one before: `[2][world][table_bytes]`.
    pub tables_bytes: u64,
    /// Where tokens arrive: `[world][dispatch_depth][chunk_tokens][dispatch_row_bytes]`.
    pub dispatch_bytes: u64,
    /// Where results arrive: `[world][combine_depth][chunk_tokens * combine_each][combine_row_bytes]`. As for tokens, the place of each
    /// source is its own: what comes late of one that is left out is never in another's.
    pub combine_bytes: u64,
    /// The three together.
    pub total_bytes: u64,
    /// The most rows that any rank has in expert-major layout, padding included.
    pub expanded_rows: u64,
}

/// Why a shape has no sizes.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SizesError {
    /// A token must choose 1 to [`MAX_TOP_K`] experts.
    TopK {
        /// How many were given.
        top_k: u32,
    },
    /// A payload is empty, or no multiple of 16 bytes.
    Payload {
        /// Its bytes.
        bytes: u32,
    },
    /// A buffer would have more than 2^64 - 1 bytes.
    Overflow,
}

impl fmt::Display for SizesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TopK { top_k } => write!(f, "{top_k} choices a token, 1 to {MAX_TOP_K} may be"),
            Self::Payload { bytes } => {
                write!(f, "a payload of {bytes} bytes is not one or more times {VECTOR_BYTES}")
            }
            Self::Overflow => f.write_str("a buffer does not fit 64 bits"),
        }
    }
}

impl core::error::Error for SizesError {}

impl Sizes {
    /// The sizes of an exchange among the ranks of `placement`. O(world).
    ///
    /// # Errors
    ///
    /// [`SizesError`]: such a shape cannot be.
    pub fn new(shape: &Shape, placement: &Placement<'_>) -> Result<Self, SizesError> {
        let top_k = shape.top_k;
        if top_k == 0 || top_k > MAX_TOP_K {
            return Err(SizesError::TopK { top_k });
        }
        for bytes in [shape.token_bytes, shape.result_bytes] {
            if bytes == 0 || bytes % VECTOR_BYTES != 0 {
                return Err(SizesError::Payload { bytes });
            }
        }
        Self::of(shape, placement).ok_or(SizesError::Overflow)
    }

    fn of(shape: &Shape, placement: &Placement<'_>) -> Option<Self> {
        let world = u64::from(placement.world());
        let fan = shape.top_k.min(placement.world());
        let align = |bytes: u64| bytes.checked_next_multiple_of(ROW_ALIGN_BYTES);
        let dispatch_row_bytes =
            align(u64::from(shape.token_bytes) + u64::from(shape.scale_bytes))?;
        let combine_row_bytes = align(u64::from(shape.result_bytes))?;
        let chunk = u64::from(shape.chunk_tokens.get().min(shape.max_tokens));
        let table = TableShape { top_k: shape.top_k, max_tokens: shape.max_tokens };
        let table_bytes = table.bytes()?;
        let tables_bytes = product([2, world, table_bytes])?;
        let dispatch_depth = u64::from(shape.dispatch_depth.get());
        let dispatch_rows = product([world, dispatch_depth, chunk])?;
        let dispatch_bytes = dispatch_rows.checked_mul(dispatch_row_bytes)?;
        let combine_each = if shape.exact { shape.top_k.min(placement.most_local()) } else { 1 };
        let combine_depth = u64::from(shape.combine_depth.get());
        let combine_rows = product([world, combine_depth, chunk, combine_each.into()])?;
        let combine_bytes = combine_rows.checked_mul(combine_row_bytes)?;
        let total_bytes = tables_bytes.checked_add(dispatch_bytes)?.checked_add(combine_bytes)?;
        Some(Self {
            table_bytes,
            dispatch_row_bytes,
            combine_row_bytes,
            fan,
            combine_each,
            tables_bytes,
            dispatch_bytes,
            combine_bytes,
            total_bytes,
            expanded_rows: expanded_rows(shape, placement)?,
        })
    }
}

/// The most rows of any rank. Of two bounds the smaller: each token is there as often as it chooses, and each expert that it
/// chose pads less than `padding`; no expert has more than all tokens.
fn expanded_rows(shape: &Shape, placement: &Placement<'_>) -> Option<u64> {
    let padding = u64::from(shape.padding.get());
    let local = u64::from(placement.most_local());
    let tokens = u64::from(placement.world()).checked_mul(shape.max_tokens.into())?;
    let every_expert = tokens.checked_next_multiple_of(padding)?.checked_mul(local)?;
    let rows = tokens.checked_mul(local.min(shape.top_k.into()))?;
    // Only experts with rows pad.
    let padded = rows.checked_add(local.min(rows).checked_mul(padding - 1)?)?;
    Some(every_expert.min(padded / padding * padding))
}

fn product<const N: usize>(factors: [u64; N]) -> Option<u64> {
    factors.into_iter().try_fold(1_u64, u64::checked_mul)
}
