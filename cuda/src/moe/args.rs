//! The structures of the kernels for mixtures of experts, as in `kernels/immwire_moe.h`.
//!
//! Plain numbers: addresses are those of the launching GPU's address space. Nothing here is checked against memory.
//!
//! # Invariants
//!
//! Names, sizes and offsets are those of the header; a C compiler compares them in `tests/header.rs`.

/// The most ranks: sets of them are words of 32 bits.
pub const MAX_RANKS: usize = 32;
/// The most experts that a token may choose: one for each lane of a warp.
pub const MAX_TOP_K: u32 = 32;
/// The most experts.
pub const MAX_EXPERTS: u32 = 1024;
/// Threads of a block on a GPU.
pub const THREADS: u32 = 512;
/// The same of a dispatch that has no more tokens than blocks, which is sooner done with fewer warps.
pub const FEW_THREADS: u32 = 256;
/// Tokens that a block receives at a time.
pub const BATCH: u32 = 4;
/// Tokens of one source that are counted together, where there are many.
pub const CHUNK: u32 = 64;
/// The last number of a round; 1 comes after it.
pub const LAST_EPOCH: u32 = 0x7fff_ffff;
/// Keys that payload may be combined with are multiples of this.
pub const KEY: u32 = 0x9e37_79b1;
/// So many of them a token has in its slot, if its words may be anything.
pub const KEYS: u32 = 16;
/// Values that share a scale, where the kernel quantises.
pub const SCALE_VALUES: u32 = 128;

/// Parts that the results of a token are cut into for different blocks, at the most, where there are few.
pub const PARTS: u32 = 8;

/// [`MoeArgs::flags`]: this launch sends.
pub const SEND: u32 = 1;
/// This launch receives; with [`SEND`], first the one and then the other.
pub const RECEIVE: u32 = 2;
/// Indices are `i64`, not `i32`.
pub const WIDE_INDICES: u32 = 4;
/// Rows that only pad are written with zeros.
pub const CLEAR_PADDING: u32 = 8;
/// Scales are powers of two, a byte each (UE8M0), not floats.
pub const POWER_SCALES: u32 = 16;
/// Combine adds to what is in `out`.
pub const ACCUMULATE: u32 = 32;

/// No row: in plans, of a choice that ends elsewhere.
pub const NO_ROW: u32 = u32::MAX;
/// And of one that there was no room for. Rows are less.
pub const LEFT_OUT: u32 = u32::MAX - 1;
/// Words of shared memory that every block has.
pub const FIXED_WORDS: u32 = 640;
/// The same where there are many tokens.
pub const MANY_WORDS: u32 = 16;

/// What of a rank lasts from launch to launch, in memory of its GPU.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MoeControl {
    /// Of the next dispatch's round, never 0.
    pub next_epoch: u32,
    /// Which half of tables that is.
    pub next_parity: u32,
    /// Ranks whose results did not come.
    pub missed: u32,
    /// Ranks whose choices or tokens did not, in the dispatch before.
    pub left_out: u32,
    /// Of this round.
    pub epoch: u32,
    /// Which half of tables.
    pub parity: u32,
    /// Ranks whose choices or tokens did not come.
    pub absent: u32,
    /// Tokens of this rank, in this round.
    pub tokens: u32,
    /// Tokens that this rank received, in this round.
    pub pairs: u32,
    /// Of these, where there are many: other ranks', which come first.
    pub of_others: u32,
    /// Of this rank's own, where there are many: how many slices the combine has taken to sum.
    pub summed: u32,
    /// Likewise, of other ranks': how many it has taken to send.
    pub sent: u32,
    /// Twice the epoch, and one if a round with room for many tokens was one of few.
    pub few: u32,
    /// Ranks whose table somebody has missed in this dispatch.
    pub suspects: u32,
    /// Blocks that have counted, where there are many tokens.
    pub gathered: u32,
    /// Of them, those that have planned.
    pub planned: u32,
    /// How many tokens have been taken to be received.
    pub received: u32,
    /// How many parts of tokens have been taken to be sent, where there are many.
    pub parts: u32,
    /// Ranks whose choices a block that counts has missed, where there are many tokens.
    pub unheard: u32,
    /// Set by the first who reports a choice that is none.
    pub refused: u32,
    /// Not 0: nobody waits any more.
    pub abort: u64,
    /// For each rank `2 * epoch + whether its table counts`.
    pub decisions: [u32; MAX_RANKS],
}

/// What went wrong, in pinned host memory: words that become the epoch of the round in which it did, the last one of some.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MoeReport {
    /// For each rank: its choices did not come in time.
    pub late_table: [u32; MAX_RANKS],
    /// For each rank: some of its tokens did not.
    pub late_tokens: [u32; MAX_RANKS],
    /// For each rank: some of its results did not.
    pub late_results: [u32; MAX_RANKS],
    /// A choice of this rank's was no expert, or one that the token names twice; it was dropped.
    pub refused: u32,
    /// Of which token, for the first of them.
    pub token: u32,
    /// Which of its choices.
    pub choice: u32,
    /// The index.
    pub index: i32,
    /// More rows came than there is room for.
    pub rows_left_out: u32,
    /// There were more tokens than there may be, or more than there is room for their sums.
    pub tokens_left_out: u32,
    /// Zero.
    pub reserved: [u32; 2],
}

impl MoeReport {
    /// The set of ranks of which something was late, a bit each.
    #[must_use]
    pub fn late(&self) -> u32 {
        (0..MAX_RANKS).fold(0, |late, rank| {
            let any = self.late_table[rank] | self.late_tokens[rank] | self.late_results[rank];
            late | u32::from(any != 0) << rank
        })
    }
}

/// The head of a token received; its rows and weights follow.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MoePair {
    /// Whose token it is.
    pub source: u32,
    /// Its number there.
    pub token: u32,
    /// Zero.
    pub reserved: [u32; 2],
}

/// One launch, of dispatch or of combine. The header says what is where.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "in the header, beside the kernels that read it")]
pub struct MoeArgs {
    pub inbox: [u64; MAX_RANKS],
    pub firsts: [[u32; 2]; MAX_RANKS / 2 + 1],
    pub control: u64,
    pub report: u64,
    pub plan: u64,
    pub masks: u64,
    pub scratch: u64,
    pub tokens_at: u64,
    pub x: u64,
    pub scales: u64,
    pub indices: u64,
    pub weights: u64,
    pub rows_x: u64,
    pub rows_scales: u64,
    pub slots: u64,
    pub counts: u64,
    pub offsets: u64,
    pub y: u64,
    pub out: u64,
    pub timeout_ns: u64,
    pub table_bytes: u64,
    pub dispatch_at: u64,
    pub combine_at: u64,
    pub dispatch_stride: u32,
    pub combine_stride: u32,
    pub plan_stride: u32,
    pub rank: u32,
    pub world: u32,
    pub top_k: u32,
    pub max_tokens: u32,
    pub tokens: u32,
    pub token_bytes: u32,
    pub scale_bytes: u32,
    pub values: u32,
    pub padding: u32,
    pub rows: u32,
    pub flags: u32,
    pub chunk_tokens: u32,
    pub results_each: u32,
    pub few_tokens: u32,
    pub reserved: u32,
}
