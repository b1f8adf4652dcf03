//! What an exchange among GPUs is made for, and how large everything is that it needs.
//!
//! Pure arithmetic: no address, no device, no allocation.
//!
//! What one rank's exchange takes of its GPU, in MiB: 256 experts, the best 8, 7,168 values, e4m3 with `f32` scales out and bf16 back; with
//! pre-quantised tokens and scales it is the same, with tokens in bf16 an inbox has about as much for them as for results summed by rank. Counts are
//! those of 132 SMs; eight bytes for each token are left out. `rows` are those by expert that a
//! caller makes room for if it wants to be sure of any routes: 7,392 bytes each there, and as many of 14,336 bytes for what experts answer.
//! With slots (`Rows::slots`) it is one row for each token of all ranks, and a number for each of these rows.
//!
//! | ranks | tokens | sums of | inbox | plans and counts | both | rows |
//! |---|---|---|---|---|---|---|
//! | 2 | 128 | each rank | 5.3 | 0.0 | 5.4 | 2048 |
//! | 4 | 128 | each rank | 10.7 | 0.0 | 10.7 | 4096 |
//! | 8 | 128 | each rank | 21.4 | 0.1 | 21.5 | 8192 |
//! | 2 | 4096 | each rank | 171.0 | 0.6 | 171.6 | 65536 |
//! | 4 | 4096 | each rank | 342.0 | 1.3 | 343.3 | 131072 |
//! | 8 | 4096 | each rank | 684.0 | 2.5 | 686.5 | 262144 |
//! | 8 | 128 | each choice | 119.4 | 0.1 | 119.5 | 8192 |
//! | 8 | 4096 | each choice | 3820.0 | 2.5 | 3822.5 | 262144 |
//!
//! # Invariants
//!
//! 1. The parts of an inbox lie one after the other, none overlaps another, and all rows start on a cache line.
//! 2. What passes [`Geometry::new`] keeps every limit that `kernels/immwire_moe.h` names: counts of rows fit the kernels' halves of
//!    words, and their shared memory what a block may have.

use super::args::{self, MAX_EXPERTS, MAX_RANKS, MAX_TOP_K, SCALE_VALUES};
use std::fmt;
use std::mem::size_of;

/// Rows start on this boundary.
const ROW_ALIGN_BYTES: u64 = 128;
/// What a block may have of shared memory on Hopper; on what has less, [`fits`] tells.
const SHARED_BYTES: u64 = 224 << 10;

/// Whether a block that needs so much of shared memory can be had where it may have `available` bytes.
///
/// # Errors
///
/// [`ShapeError::Shared`].
pub(super) fn fits(needed: u32, available: u32) -> Result<(), ShapeError> {
    match needed <= available {
        true => Ok(()),
        false => Err(ShapeError::Shared { needed: needed.into(), available: available.into() }),
    }
}

/// More words than that a key need not be found for.
const MAX_TOKEN_BYTES: u64 = 64 << 20;

/// How results are stored, and tokens that the kernel quantises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Number {
    /// The upper half of an `f32`.
    Bf16,
    /// IEEE 754 binary16.
    Fp16,
}

/// What scales are made of, one for 128 values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scales {
    /// `f32`: the largest value of the 128, times the `f32` nearest to 1/448.
    Float,
    /// A byte for the least power of two that is not below that (UE8M0). Four make up a word; the last word is filled with zeros.
    Power,
}

/// What tokens are on the way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Payload {
    /// Any bytes, and any bytes of scales, which arrive as they are.
    Raw {
        /// Bytes of a token, a multiple of 16.
        token_bytes: u32,
        /// Bytes of its scales, a multiple of 4.
        scale_bytes: u32,
    },
    /// Values that the kernel makes e4m3 of. Compute capability 8.9.
    Fp8 {
        /// What they are made of.
        from: Number,
        /// What scales are made of.
        scales: Scales,
    },
}

/// What an exchange is made for; the same at every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Rank `r` has the experts from `firsts[r]` to before `firsts[r + 1]`: one entry more than ranks.
    pub firsts: Vec<u32>,
    /// Choices of a token, 1 to 32.
    pub top_k: u32,
    /// The most tokens that any rank has. With room for [`Many::FROM_TOKENS`] and more, rounds of few take some microseconds more than with less.
    pub max_tokens: u32,
    /// What tokens are on the way out.
    pub payload: Payload,
    /// Values of a result, and of a token that is quantised: a multiple of 8, there of 16.
    pub values: u32,
    /// How results are stored.
    pub results: Number,
    /// Rows of an expert start on a multiple of this.
    pub padding: u32,
    /// Whether each choice's result comes back by itself, to be summed where the token is from, in the order of choices: sums then do
    /// not depend on which rank has which experts, for up to `top_k` results on the way back in the place of one for each rank. An
    /// inbox has room for as many from each rank: see the table [above](self) for what that takes.
    pub exact: bool,
}

/// Why there can be no such exchange.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShapeError {
    /// There must be 1 to 32 ranks.
    World {
        /// Entries of `firsts`.
        entries: usize,
    },
    /// `firsts` must start with 0, never fall, and end with 1 to 1,024 experts.
    Placement {
        /// The entry that is wrong.
        entry: usize,
    },
    /// A token must choose 1 to 32 experts.
    TopK {
        /// What was given.
        top_k: u32,
    },
    /// A size is zero, or no multiple of what it must be.
    Multiple {
        /// Of what.
        what: &'static str,
        /// What was given.
        found: u32,
        /// What it must be a multiple of.
        of: u32,
    },
    /// More tokens may come for one expert than can be counted.
    Tokens {
        /// Of all ranks together.
        tokens: u64,
        /// How many there may be.
        most: u64,
    },
    /// What of the tokens' choices a block looks at does not fit its shared memory. It would with more blocks, or fewer tokens at a time.
    Shared {
        /// Bytes needed.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
    /// A token would have more than 64 MiB, or there would be more than 2^32 rows.
    Overflow,
}

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::World { entries } => write!(
                f,
                "{entries} first experts: one more are needed than ranks, of which there are 1 to {MAX_RANKS}"
            ),
            Self::Placement { entry } => write!(
                f,
                "entry {entry} of the first experts: they start with 0, never fall, and end with 1 to {MAX_EXPERTS}"
            ),
            Self::TopK { top_k } => write!(f, "{top_k} choices a token, 1 to {MAX_TOP_K} may be"),
            Self::Multiple { what, found, of } => {
                write!(f, "{what} is {found}, not one or more times {of}")
            }
            Self::Tokens { tokens, most } => {
                write!(f, "{tokens} tokens of all ranks, {most} may be: make it fewer at a time")
            }
            Self::Shared { needed, available } => write!(
                f,
                "{needed} bytes of shared memory for the choices of all tokens, there are {available}: make it fewer \
                 tokens at a time, or fewer experts a rank, or give it more SMs"
            ),
            Self::Overflow => {
                f.write_str("a token of more than 64 MiB, or more than 2^32 rows with padding")
            }
        }
    }
}

impl std::error::Error for ShapeError {}

/// Sizes and distances, in bytes where nothing else is said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Ranks.
    pub world: u32,
    /// The most experts of any rank.
    pub most_local: u32,
    /// A token's bytes on the way.
    pub token_bytes: u32,
    /// Bytes of its scales on the way.
    pub scale_bytes: u32,
    /// One rank's choices.
    pub table_bytes: u64,
    /// Where tokens begin in an inbox.
    pub dispatch_at: u64,
    /// From one token to the next there.
    pub dispatch_stride: u32,
    /// Where results begin.
    pub combine_at: u64,
    /// From one result to the next there.
    pub combine_stride: u32,
    /// Results of a token for which there is room from each rank.
    pub results_each: u32,
    /// An inbox.
    pub inbox_bytes: u64,
    /// From one received token's plan to the next.
    pub plan_stride: u32,
    /// All plans.
    pub plan_bytes: u64,
    /// The most rows that a round can bring to any rank, padding included.
    pub max_rows: u64,
    /// Shared memory of a block of dispatch.
    pub dispatch_shared_bytes: u32,
    /// Shared memory of a block of combine.
    pub combine_shared_bytes: u32,
}

/// What is different where there are many tokens: the kernels count in chunks, and every warp takes tokens by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Many {
    /// Tokens of one source in a chunk.
    pub chunk_tokens: u32,
    /// Chunks of all ranks.
    pub chunks: u32,
    /// Memory for their counts.
    pub scratch_bytes: u64,
    /// Shared memory of a block of dispatch.
    pub dispatch_shared_bytes: u32,
    /// Up to how many tokens of each rank make a round that is exchanged as few are, though there is room for more.
    pub few_tokens: u32,
}

/// Bytes of shared memory of a block of dispatch, where it looks at the choices of all of so many tokens of each rank.
const fn shared_of_few(world: u64, local: u64, tokens: u64) -> u64 {
    let words = world * tokens.div_ceil(32);
    // Odd: words of neighbours are in different banks.
    let all = local * (words | 1);
    4 * (args::FIXED_WORDS as u64 + local + 1 + all + all.div_ceil(2) + words)
}

/// How many of so many blocks receive tokens, at the least: every other one, or the only one; where rows are laid out, two of three.
const fn receivers(blocks: u32) -> u32 {
    if blocks > 1 { blocks / 2 } else { 1 }
}

impl Geometry {
    /// Threads of a block of dispatch. Where few tokens go each warp works out for itself, and warps of an SM seem to be in each other's
    /// way: with half of them one token of two ranks goes out in 5.0 us, not 5.5, and 64 in 6.9, not 7.2. Of more
    /// than there are blocks for there is something to do for all: with half of them 128 go out in 9.3 us, not 8.7.
    #[must_use]
    pub fn dispatch_threads(&self, shape: &Shape, blocks: u32) -> u32 {
        let are_few = self.world.saturating_mul(shape.max_tokens) <= blocks;
        if are_few && !Many::is_for(self, shape) { args::FEW_THREADS } else { args::THREADS }
    }
}

impl Many {
    /// From how many tokens on the kernels for many are the quicker ones. (Between two H100s 512 tokens go out in 34 us by those for
    /// few, in 51 by these.)
    pub const FROM_TOKENS: u32 = 1024;

    /// Up to how many tokens of each rank a round of theirs is one of few. (Between two H200s, with room for 4,096, 512 go out and back in 72 us
    /// like that, and in 80 as many do; 1,000 in 118 when few took 66 for 512, and in 111 as many do.)
    pub const FEW_TOKENS: u32 = 512;

    /// Whether the kernels for many are taken: they are the quicker ones, or those for few have no room in a block's memory for all
    /// tokens' choices, where one rank has most of many experts. It goes by the shape, so ranks agree on it, as they must: keys of any payload differ.
    #[must_use]
    pub fn is_for(geometry: &Geometry, shape: &Shape) -> bool {
        shape.max_tokens >= Self::FROM_TOKENS
            || u64::from(geometry.dispatch_shared_bytes) > SHARED_BYTES
    }

    /// For so many blocks.
    ///
    /// # Errors
    ///
    /// [`ShapeError::Shared`].
    pub fn new(geometry: &Geometry, shape: &Shape, blocks: u32) -> Result<Self, ShapeError> {
        // So many that each block has as many chunks as the others.
        let all = geometry.world.saturating_mul(shape.max_tokens);
        let each = all.div_ceil(receivers(blocks));
        let chunk = each.div_ceil(each.div_ceil(args::CHUNK)).max(1);
        Self::of_chunks(geometry, shape, blocks, chunk)
    }

    /// For so many blocks, and chunks of so many tokens, 1 to [`args::CHUNK`].
    ///
    /// # Errors
    ///
    /// [`ShapeError::Shared`].
    pub fn of_chunks(
        geometry: &Geometry,
        shape: &Shape,
        blocks: u32,
        chunk_tokens: u32,
    ) -> Result<Self, ShapeError> {
        let (blocks, chunk) = (u64::from(receivers(blocks.max(1))), u64::from(chunk_tokens.max(1)));
        let chunks = u64::from(geometry.world) * u64::from(shape.max_tokens).div_ceil(chunk);
        let (local, mine) = (u64::from(geometry.most_local), chunks.div_ceil(blocks));
        let words = u64::from(args::CHUNK / 32);
        let shared = u64::from(args::MANY_WORDS)
            + mine * (1 + words)
            + 2 * local
            + 1
            + mine * local * (1 + words)
            + chunks
            + 2 * u64::from(args::THREADS);
        let narrow = |number: u64| u32::try_from(number).map_err(|_| ShapeError::Overflow);
        if shared * 4 > SHARED_BYTES {
            return Err(ShapeError::Shared { needed: shared * 4, available: SHARED_BYTES });
        }
        let of_few = |tokens: u32| shared_of_few(geometry.world.into(), local, u64::from(tokens));
        let mut few_tokens = shape.max_tokens.min(Self::FEW_TOKENS);
        while few_tokens > 0 && of_few(few_tokens) > SHARED_BYTES {
            few_tokens = (few_tokens - 1) / 32 * 32; // Words of them are what takes room.
        }
        Ok(Self {
            chunk_tokens: narrow(chunk)?,
            chunks: narrow(chunks)?,
            scratch_bytes: chunks * (local.div_ceil(4) + 1) * 4,
            dispatch_shared_bytes: narrow(of_few(few_tokens).max(shared * 4))?,
            few_tokens,
        })
    }
}

impl Geometry {
    /// The geometry of an exchange. O(world).
    ///
    /// # Errors
    ///
    /// [`ShapeError`]: there can be no such exchange.
    pub fn new(shape: &Shape) -> Result<Self, ShapeError> {
        let entries = shape.firsts.len();
        if !(2..=MAX_RANKS + 1).contains(&entries) {
            return Err(ShapeError::World { entries });
        }
        let falls = shape.firsts.windows(2).position(|pair| pair[1] < pair[0]);
        let experts = shape.firsts[entries - 1];
        if shape.firsts[0] != 0 {
            return Err(ShapeError::Placement { entry: 0 });
        }
        if let Some(before) = falls {
            return Err(ShapeError::Placement { entry: before + 1 });
        }
        if experts == 0 || experts > MAX_EXPERTS {
            return Err(ShapeError::Placement { entry: entries - 1 });
        }
        if shape.top_k == 0 || shape.top_k > MAX_TOP_K {
            return Err(ShapeError::TopK { top_k: shape.top_k });
        }
        let (token_bytes, scale_bytes) = shape.payload(shape.values)?;
        multiple("values of a result", shape.values, 8)?;
        multiple("the padding", shape.padding, 1)?;
        multiple("the most tokens", shape.max_tokens, 1)?;

        let (world, tokens) = (entries as u64 - 1, u64::from(shape.max_tokens));
        let all = world * tokens;
        // Counts of an expert's rows are halves of words.
        let most = u64::from(u16::MAX);
        if all > most {
            return Err(ShapeError::Tokens { tokens: all, most });
        }
        let most_local =
            shape.firsts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default();
        let local = u64::from(most_local);
        let shared = shared_of_few(world, local, tokens);
        let keys = match shape.payload {
            Payload::Raw { .. } => args::KEYS,
            Payload::Fp8 { .. } => 0,
        };
        let dispatch_stride =
            (u64::from(token_bytes) + u64::from(scale_bytes) + 4 * u64::from(keys))
                .next_multiple_of(ROW_ALIGN_BYTES);
        let combine_stride = (u64::from(shape.values) * 2).next_multiple_of(ROW_ALIGN_BYTES);
        let table_bytes = 16 * (1 + tokens * u64::from(shape.top_k.div_ceil(2)));
        let dispatch_at = (2 * world * table_bytes).next_multiple_of(ROW_ALIGN_BYTES);
        let plan_stride =
            (size_of::<args::MoePair>() as u64 + 8 * u64::from(shape.top_k)).next_multiple_of(16);
        // Below 2^21 rows of at most 2^33 bytes: nothing wraps.
        let combine_at = dispatch_at + all * dispatch_stride;
        let results_each = if shape.exact { shape.top_k.min(most_local).max(1) } else { 1 };
        let results = all * u64::from(results_each);
        let padding = u64::from(shape.padding);
        // Of two bounds the smaller: each token is there as often as it chooses, and each expert that it chose pads less than
        // `padding`; no expert has more than all tokens.
        let rows = all * local.min(u64::from(shape.top_k));
        let padded = (rows + local.min(rows) * (padding - 1)) / padding * padding;
        let max_rows = padded.min(local * all.next_multiple_of(padding));
        let narrow = |bytes: u64| u32::try_from(bytes).map_err(|_| ShapeError::Overflow);
        // What rounds up to the padding does not wrap either.
        narrow(max_rows + padding)?;
        if u64::from(token_bytes) + u64::from(scale_bytes) > MAX_TOKEN_BYTES {
            return Err(ShapeError::Overflow);
        }
        Ok(Self {
            world: narrow(world)?,
            most_local,
            token_bytes,
            scale_bytes,
            table_bytes,
            dispatch_at,
            dispatch_stride: narrow(dispatch_stride)?,
            combine_at,
            combine_stride: narrow(combine_stride)?,
            results_each,
            inbox_bytes: combine_at + results * combine_stride,
            plan_stride: narrow(plan_stride)?,
            plan_bytes: all * plan_stride,
            max_rows,
            dispatch_shared_bytes: narrow(shared)?,
            combine_shared_bytes: 4 * args::FIXED_WORDS,
        })
    }
}

impl Shape {
    /// Bytes of a token and of its scales.
    fn payload(&self, values: u32) -> Result<(u32, u32), ShapeError> {
        match self.payload {
            Payload::Raw { token_bytes, scale_bytes } => {
                multiple("bytes of a token", token_bytes, 16)?;
                if scale_bytes != 0 {
                    multiple("bytes of scales", scale_bytes, 4)?;
                }
                Ok((token_bytes, scale_bytes))
            }
            Payload::Fp8 { scales, .. } => {
                multiple("values of a token", values, 16)?;
                let groups = values.div_ceil(SCALE_VALUES);
                Ok((
                    values,
                    match scales {
                        Scales::Float => 4 * groups,
                        Scales::Power => groups.next_multiple_of(4),
                    },
                ))
            }
        }
    }
}

const fn multiple(what: &'static str, found: u32, of: u32) -> Result<(), ShapeError> {
    if found == 0 || !found.is_multiple_of(of) {
        return Err(ShapeError::Multiple { what, found, of });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape {
            firsts: vec![0, 128, 256],
            top_k: 8,
            max_tokens: 128,
            payload: Payload::Fp8 { from: Number::Bf16, scales: Scales::Float },
            values: 7168,
            results: Number::Bf16,
            padding: 1,
            exact: false,
        }
    }

    #[test]
    fn parts_of_an_inbox_lie_one_after_the_other() {
        for world in 1..=5_u32 {
            for (max_tokens, top_k) in [(1, 1), (3, 3), (33, 32)] {
                let firsts = (0..=world).map(|rank| rank * 7).collect();
                let all = Shape { firsts, max_tokens, top_k, ..shape() };
                let g = Geometry::new(&all).unwrap();
                let (world, tokens) = (u64::from(world), u64::from(max_tokens));
                assert_eq!(g.table_bytes, 16 * (1 + tokens * u64::from(top_k.div_ceil(2))));
                assert!(g.dispatch_at >= 2 * world * g.table_bytes);
                let payload = Payload::Raw { token_bytes: 128, scale_bytes: 64 };
                let raw = Geometry::new(&Shape { payload, ..all.clone() }).unwrap();
                assert_eq!((raw.dispatch_stride, g.dispatch_stride), (256, 7424));
                assert!(g.dispatch_stride >= g.token_bytes + g.scale_bytes);
                assert!(
                    g.combine_at >= g.dispatch_at + world * tokens * u64::from(g.dispatch_stride)
                );
                assert!(
                    g.inbox_bytes >= g.combine_at + tokens * world * u64::from(g.combine_stride)
                );
                assert!(u64::from(g.combine_stride) >= u64::from(all.values) * 2);
                for at in
                    [g.dispatch_at, g.combine_at, g.dispatch_stride.into(), g.combine_stride.into()]
                {
                    assert_eq!(at % 128, 0, "{g:?}");
                }
                assert!(g.plan_stride >= 16 + 8 * top_k && g.plan_stride.is_multiple_of(16));
                assert_eq!(g.plan_bytes, world * tokens * u64::from(g.plan_stride));
            }
        }
    }

    /// All tokens are in chunks, no block is dealt much more than its part, and what a block has in shared memory fits.
    #[test]
    fn chunks_are_dealt_evenly() {
        for world in [1, 2, 3, 8] {
            for max_tokens in [1, 63, 64, 65, 1024, 1500, 4096, 8000] {
                let firsts = (0..=world).map(|rank| rank * 32).collect();
                let all = Shape { firsts, max_tokens, ..shape() };
                let Ok(g) = Geometry::new(&all) else { continue };
                for blocks in [1, 2, 3, 16, 131, 132] {
                    let many = match Many::new(&g, &all, blocks) {
                        Ok(many) => many,
                        Err(error) => {
                            assert!(blocks < 16, "{error}: {all:?} {blocks}");
                            continue;
                        }
                    };
                    assert!((1..=args::CHUNK).contains(&many.chunk_tokens), "{many:?}");
                    assert_eq!(many.chunks, world * max_tokens.div_ceil(many.chunk_tokens));
                    assert_eq!(many.scratch_bytes, u64::from(many.chunks) * 9 * 4);
                    assert!(u64::from(many.dispatch_shared_bytes) <= SHARED_BYTES);
                    // Of the tokens that a block may be dealt, less than a chunk and what rounding adds is above its part.
                    let dealt = many.chunks.div_ceil(receivers(blocks)) * many.chunk_tokens;
                    let part = (world * max_tokens).div_ceil(receivers(blocks));
                    let rounding = world * many.chunk_tokens;
                    assert!(dealt <= part + 2 * many.chunk_tokens + rounding, "{many:?} {blocks}");
                }
            }
        }
    }

    /// Up to so many tokens, and no fewer than fit.
    #[test]
    fn rounds_of_few_have_room_where_there_is_room_for_many() {
        let mut met = [false; 2];
        for (world, experts) in [(1, 8), (2, 256), (8, 1024), (32, 1024)] {
            for max_tokens in [1, 31, 100, 416, 640, 1024, 2000] {
                for most_local in [experts / world, experts] {
                    let mut firsts = vec![0; world as usize];
                    for (rank, first) in (0..).zip(&mut firsts) {
                        *first = rank * (experts - most_local) / world.max(2);
                    }
                    firsts.push(experts);
                    let all = Shape { firsts, max_tokens, ..shape() };
                    let Ok(g) = Geometry::new(&all) else { continue };
                    let Ok(many) = Many::new(&g, &all, 132) else { continue };
                    let needs = |tokens: u32| {
                        shared_of_few(world.into(), g.most_local.into(), tokens.into())
                    };
                    let most = max_tokens.min(Many::FEW_TOKENS);
                    assert!(many.few_tokens <= most);
                    assert!(many.few_tokens > 0);
                    assert!(needs(many.few_tokens) <= many.dispatch_shared_bytes.into());
                    assert!(many.few_tokens == most || needs(many.few_tokens + 1) > SHARED_BYTES);
                    met[usize::from(many.few_tokens == most)] = true;
                }
            }
        }
        assert_eq!(met, [true; 2]);
    }

    #[test]
    fn fewer_threads_where_there_is_a_block_for_each_token() {
        for (max_tokens, blocks, threads) in [
            (1, 16, args::FEW_THREADS),
            (66, 132, args::FEW_THREADS),
            (67, 132, args::THREADS),
            (128, 132, args::THREADS),
            (u32::MAX / 2, u32::MAX, args::THREADS),
        ] {
            let geometry = Geometry::new(&shape()).unwrap();
            let shape = Shape { max_tokens, ..shape() };
            assert_eq!(geometry.dispatch_threads(&shape, blocks), threads, "{max_tokens}");
        }
    }

    /// However the experts are dealt, all tokens' choices have room in a block's memory by one kind of kernel or the other.
    #[test]
    fn one_kind_of_kernel_has_room() {
        for world in [1, 2, 8, 32] {
            for (experts, first_of_last) in [(8, 0), (256, 0), (256, 128), (1024, 0), (1024, 992)] {
                for max_tokens in [1, 100, 146, 147, 148, 640, 1023, 1024, 2000] {
                    let mut firsts = vec![0; world];
                    firsts[1..].fill(first_of_last);
                    firsts.push(experts);
                    let all = Shape { firsts, max_tokens, ..shape() };
                    let Ok(g) = Geometry::new(&all) else { continue };
                    let needed = if Many::is_for(&g, &all) {
                        Many::new(&g, &all, 132).map(|many| many.dispatch_shared_bytes)
                    } else {
                        Ok(g.dispatch_shared_bytes)
                    };
                    assert!(
                        needed.is_ok_and(|it| u64::from(it) <= SHARED_BYTES),
                        "{all:?}: {needed:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn payloads_have_their_bytes() {
        let of = |payload, values| {
            let g = Geometry::new(&Shape { payload, values, ..shape() }).unwrap();
            (g.token_bytes, g.scale_bytes)
        };
        let fp8 = |scales| Payload::Fp8 { from: Number::Fp16, scales };
        assert_eq!(of(fp8(Scales::Float), 7168), (7168, 224));
        assert_eq!(of(fp8(Scales::Float), 144), (144, 8));
        assert_eq!(of(fp8(Scales::Power), 7168), (7168, 56));
        assert_eq!(of(fp8(Scales::Power), 16), (16, 4));
        assert_eq!(of(Payload::Raw { token_bytes: 48, scale_bytes: 12 }, 8), (48, 12));
    }

    /// No routes bring more rows than are foreseen, and some bring as many.
    #[test]
    fn rows_are_enough_and_not_too_many() {
        for world in 1..=3_u32 {
            for local in 1..=3_u32 {
                for top_k in 1..=3 {
                    for padding in [1, 3, 4] {
                        let firsts = (0..=world).map(|rank| rank * local).collect();
                        let all = Shape { firsts, top_k, max_tokens: 2, padding, ..shape() };
                        let found = Geometry::new(&all).unwrap().max_rows;
                        assert_eq!(found, most_rows(world * 2, local, top_k, padding), "{all:?}");
                    }
                }
            }
        }
    }

    /// The most rows of any numbers of tokens for each expert that tokens can make.
    fn most_rows(tokens: u32, local: u32, top_k: u32, padding: u32) -> u64 {
        // Each token chooses some of the experts, `top_k` at most: what matters is how many each expert has.
        let mut most = 0;
        let each = tokens + 1;
        for code in 0..each.pow(local) {
            let counts: Vec<u32> = (0..local).map(|e| code / each.pow(e) % each).collect();
            // Possible if no expert has more than all tokens, and all together no more than tokens choose.
            if counts.iter().sum::<u32>() <= tokens * top_k.min(local) {
                let rows = counts.iter().map(|count| u64::from(count.next_multiple_of(padding)));
                most = most.max(rows.sum());
            }
        }
        most
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let of = |change: &dyn Fn(&mut Shape)| {
            let mut all = shape();
            change(&mut all);
            Geometry::new(&all).unwrap_err()
        };
        let entries = |firsts: Vec<u32>| of(&|s| s.firsts.clone_from(&firsts));
        assert_eq!(entries(vec![]), ShapeError::World { entries: 0 });
        assert_eq!(entries(vec![0]), ShapeError::World { entries: 1 });
        assert_eq!(entries((0..34).collect()), ShapeError::World { entries: 34 });
        assert_eq!(entries(vec![1, 2]), ShapeError::Placement { entry: 0 });
        assert_eq!(entries(vec![0, 3, 2]), ShapeError::Placement { entry: 2 });
        assert_eq!(entries(vec![0, 0]), ShapeError::Placement { entry: 1 });
        assert_eq!(entries(vec![0, 1025]), ShapeError::Placement { entry: 1 });
        assert_eq!(of(&|s| s.top_k = 0), ShapeError::TopK { top_k: 0 });
        assert_eq!(of(&|s| s.top_k = 33), ShapeError::TopK { top_k: 33 });
        for values in [0, 8, 24] {
            assert!(matches!(of(&|s| s.values = values), ShapeError::Multiple { of: 16, .. }));
        }
        assert!(matches!(of(&|s| s.padding = 0), ShapeError::Multiple { .. }));
        assert!(matches!(of(&|s| s.max_tokens = 0), ShapeError::Multiple { .. }));
        let raw = |token_bytes, scale_bytes| Payload::Raw { token_bytes, scale_bytes };
        assert!(matches!(of(&|s| s.payload = raw(8, 0)), ShapeError::Multiple { .. }));
        assert!(matches!(of(&|s| s.payload = raw(16, 6)), ShapeError::Multiple { .. }));
        assert_eq!(
            of(&|s| s.max_tokens = 1 << 15),
            ShapeError::Tokens { tokens: 1 << 16, most: 65_535 }
        );
        let lopsided = Shape { firsts: vec![0, 1024, 1024], max_tokens: 1023, ..shape() };
        let geometry = Geometry::new(&lopsided).unwrap();
        let shared = Many::new(&geometry, &lopsided, 1).unwrap_err();
        assert!(matches!(shared, ShapeError::Shared { .. }));
        assert!(matches!(of(&|s| s.padding = u32::MAX), ShapeError::Overflow));
        let one = |s: &mut Shape| (s.firsts, s.padding) = (vec![0, 1, 2], u32::MAX);
        assert!(matches!(of(&one), ShapeError::Overflow));
        assert!(matches!(of(&|s| s.payload = raw(65 << 20, 0)), ShapeError::Overflow));
        for error in [entries(vec![]), shared] {
            assert!(!error.to_string().is_empty());
        }
    }

    /// The lines of the table in the documentation, anew.
    #[test]
    fn documented_sizes_are_these() {
        let text = include_str!("geometry.rs");
        let documented: Vec<_> = text.lines().filter_map(|it| it.strip_prefix("//! | ")).collect();
        let cases = [(2, 128), (4, 128), (8, 128), (2, 4096), (4, 4096), (8, 4096)];
        let cases = cases.map(|(world, tokens)| (world, tokens, false));
        let mut computed =
            vec!["ranks | tokens | sums of | inbox | plans and counts | both | rows |".to_owned()];
        for (world, max_tokens, exact) in cases.into_iter().chain([(8, 128, true), (8, 4096, true)])
        {
            let firsts = (0..=world).map(|rank| rank * 256 / world).collect();
            let all = Shape { firsts, max_tokens, exact, ..shape() };
            let geometry = Geometry::new(&all).unwrap();
            let is_many = max_tokens >= Many::FROM_TOKENS;
            let scratch =
                if is_many { Many::new(&geometry, &all, 132).unwrap().scratch_bytes } else { 0 };
            let rest = geometry.plan_bytes + scratch;
            let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
            computed.push(format!(
                "{world} | {max_tokens} | {} | {} | {} | {} | {} |",
                if exact { "each choice" } else { "each rank" },
                mib(geometry.inbox_bytes),
                mib(rest),
                mib(geometry.inbox_bytes + rest),
                geometry.max_rows,
            ));
        }
        assert_eq!(documented, computed, "{}", computed.join("\n//! | "));
    }

    /// 4,096 tokens of each of two ranks fit, at 256 experts.
    #[test]
    fn the_largest_shapes_fit() {
        let all = Shape { max_tokens: 4096, ..shape() };
        assert!(Geometry::new(&all).is_ok());
        let firsts = (0..=8).map(|rank| rank * 32).collect();
        let eight = Geometry::new(&Shape { firsts, max_tokens: 4096, ..shape() }).unwrap();
        assert!(eight.inbox_bytes + eight.plan_bytes < 3 << 28, "{eight:?}");
    }

    #[test]
    fn what_a_block_may_not_have_is_refused_with_both_numbers() {
        for (needed, available) in [(99 << 10, 99 << 10), (0, 0)] {
            assert_eq!(fits(needed, available), Ok(()));
            let refused =
                ShapeError::Shared { needed: u64::from(needed) + 1, available: available.into() };
            assert_eq!(fits(needed + 1, available), Err(refused));
        }
    }
}
