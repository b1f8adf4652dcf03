//! immwire's kernels for mixtures of experts, run by `verification/moe`: their very text, every thread of every block a fiber.
//!
//! What `cuda/kernels/immwire_moe.h` asks of a launch is asked here, of this launch alone: whether ranks have the same shape, and
//! take turns, is for whoever looks at their results. Kernels are handed the addresses at which we find the memory, so that
//! each part must lie in memory that was mapped as one. Past its end they are not watched.
//!
//! # Invariants
//!
//! Memory whose size is known when a launch is enqueued is claimed then. The rest is once the launch runs, as the number of tokens may
//! lie in memory, and that of rows does; until then the memory at its first byte is taken to be used.

use crate::config::{MOST_GPUS, SMS};
use crate::kernel::Size;
use crate::random::Random;
use crate::reach::{Reach, must_be_aligned};
use crate::violation::broken;
use crate::world::World;
use immwire_cuda::moe::args::{self, MoeArgs, MoeControl, MoePair, MoeReport};
pub(crate) use immwire_verification_moe::Kernel;
use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicU32, Ordering};

/// Choices of an expert are counted in halves of words.
const MOST_TOKENS: u64 = u16::MAX as u64;
const FLAGS: u32 = args::SEND
    | args::RECEIVE
    | args::WIDE_INDICES
    | args::CLEAR_PADDING
    | args::POWER_SCALES
    | args::ACCUMULATE;

/// Blocks of launches that receive, by GPU.
static TAKEN: [AtomicU32; MOST_GPUS as usize] = [const { AtomicU32::new(0) }; MOST_GPUS as usize];

pub(crate) fn named(name: &[u8]) -> Option<Kernel> {
    match name {
        b"immwire_moe_dispatch_raw" => Some(Kernel::DispatchRaw),
        b"immwire_moe_dispatch_fp8_bf16" => Some(Kernel::DispatchFp8Bf16),
        b"immwire_moe_dispatch_fp8_fp16" => Some(Kernel::DispatchFp8Fp16),
        b"immwire_moe_dispatch_many_raw" => Some(Kernel::DispatchManyRaw),
        b"immwire_moe_dispatch_many_fp8_bf16" => Some(Kernel::DispatchManyFp8Bf16),
        b"immwire_moe_dispatch_many_fp8_fp16" => Some(Kernel::DispatchManyFp8Fp16),
        b"immwire_moe_combine_bf16" => Some(Kernel::CombineBf16),
        b"immwire_moe_combine_fp16" => Some(Kernel::CombineFp16),
        b"immwire_moe_combine_many_bf16" => Some(Kernel::CombineManyBf16),
        b"immwire_moe_combine_many_fp16" => Some(Kernel::CombineManyFp16),
        b"immwire_moe_combine_exact_bf16" => Some(Kernel::CombineExactBf16),
        b"immwire_moe_combine_exact_fp16" => Some(Kernel::CombineExactFp16),
        _ => None,
    }
}

/// One launch.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) kernel: Kernel,
    pub(crate) size: Size,
    pub(crate) args: MoeArgs,
}

/// What is known only once the launch runs.
#[derive(Debug, Clone, Copy)]
struct Counts {
    tokens: u64,
    /// Of results, as many as are read.
    rows: u64,
}

/// A part of memory that the arguments name.
struct Part {
    what: &'static str,
    field: fn(&mut MoeArgs) -> &mut u64,
    /// None: not known yet.
    bytes: Option<u64>,
    multiple: u64,
    write: bool,
}

impl Launch {
    fn combines(&self) -> bool {
        self.kernel.combines()
    }

    fn is_raw(&self) -> bool {
        matches!(self.kernel, Kernel::DispatchRaw | Kernel::DispatchManyRaw)
    }

    /// Whether it is the dispatch for many tokens.
    fn is_many(&self) -> bool {
        !self.combines() && self.kernel == self.kernel.many()
    }

    /// Chunks of all ranks, where there are many tokens.
    fn chunks(&self) -> u64 {
        let a = &self.args;
        u64::from(a.world) * u64::from(a.max_tokens.div_ceil(a.chunk_tokens.max(1)))
    }

    fn receives(&self) -> bool {
        self.args.flags & args::RECEIVE != 0
    }

    /// Everything that can be told from the numbers alone is as the header says; else a violation.
    pub(crate) fn check(&self, most_shared_bytes: u32) {
        let (a, kernel, size) = (&self.args, self.kernel, self.size);
        let must = |right: bool, what: &str| {
            if !right {
                broken!(Geometry, "{what}: {kernel:?}, {size:?}, {a:?}");
            }
        };
        must(size.grid[0] > 0 && size.grid[1..] == [1, 1], "grid");
        must(!self.receives() || size.grid[0] <= SMS, "more blocks than there is room for");
        let may_be_few = !self.combines() && !self.is_many();
        let threads = size.block[0];
        must(threads == args::THREADS || may_be_few && threads == args::FEW_THREADS, "threads");
        must(size.block[1..] == [1, 1], "threads");
        must(size.shared_bytes <= most_shared_bytes, "more shared memory than was asked for");

        let firsts = a.firsts.as_flattened();
        let most_ranks = u32::try_from(args::MAX_RANKS).unwrap_or(u32::MAX);
        must((1..=most_ranks).contains(&a.world) && a.rank < a.world, "ranks");
        let placed = firsts.get(..=a.world as usize).unwrap_or_default();
        must(placed.is_sorted() && placed.first() == Some(&0), "firsts");
        let experts = placed.last().copied().unwrap_or(0);
        must((1..=args::MAX_EXPERTS).contains(&experts), "experts");
        must((1..=args::MAX_TOP_K).contains(&a.top_k), "top_k");
        let slots = u64::from(a.world) * u64::from(a.max_tokens);
        must(slots > 0 && slots <= MOST_TOKENS, "max_tokens");
        must(a.token_bytes > 0 && a.token_bytes.is_multiple_of(16), "token_bytes");
        must(a.scale_bytes.is_multiple_of(4), "scale_bytes");
        let quantises = !self.combines() && !self.is_raw();
        must(a.values > 0 && a.values.is_multiple_of(if quantises { 16 } else { 8 }), "values");
        if quantises {
            let groups = a.values.div_ceil(args::SCALE_VALUES);
            let powers = a.flags & args::POWER_SCALES != 0;
            let scales = if powers { groups.next_multiple_of(4) } else { 4 * groups };
            must(a.token_bytes == a.values && a.scale_bytes == scales, "bytes of e4m3");
        }
        must(a.padding > 0, "padding");
        let most_local = placed.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        let most = if self.kernel.is_exact() { a.top_k.min(most_local).max(1) } else { 1 };
        must(!self.combines() || a.results_each >= most, "results_each");
        must(a.flags & !FLAGS == 0 && a.flags & (args::SEND | args::RECEIVE) != 0, "flags");

        let [tokens, scales, values, top_k] =
            [a.token_bytes, a.scale_bytes, a.values, a.top_k].map(u64::from);
        let keys = if self.is_raw() { 4 * u64::from(args::KEYS) } else { 0 };
        let rows = [
            (a.dispatch_stride, tokens + scales + keys, 128, "dispatch_stride"),
            (a.combine_stride, values * 2, 128, "combine_stride"),
            (a.plan_stride, size_of::<MoePair>() as u64 + 8 * top_k, 16, "plan_stride"),
        ];
        for (stride, bytes, multiple, what) in rows {
            must(u64::from(stride) >= bytes && stride.is_multiple_of(multiple), what);
        }
        let vectors = 1 + u64::from(a.max_tokens) * top_k.div_ceil(2);
        must(a.table_bytes >= 16 * vectors && a.table_bytes.is_multiple_of(16), "table_bytes");
        let tables = (2 * u64::from(a.world)).checked_mul(a.table_bytes);
        must(tables.is_some_and(|end| end <= a.dispatch_at), "dispatch_at");
        let tokens_end = a.dispatch_at.checked_add(slots * u64::from(a.dispatch_stride));
        must(tokens_end.is_some_and(|end| end <= a.combine_at), "combine_at");
        must((a.dispatch_at | a.combine_at).is_multiple_of(16), "parts of an inbox");
        must(a.combine_at < 1 << 60, "combine_at");

        let local = self.local();
        let few = |tokens: u32| {
            let words = u64::from(a.world) * u64::from(tokens.div_ceil(32));
            let chosen = local * (words | 1);
            let of_tables = local + 1 + chosen + chosen.div_ceil(2) + words;
            4 * (u64::from(args::FIXED_WORDS) + of_tables)
        };
        let is_both = a.flags & args::SEND != 0 && self.receives() && size.grid[0] > 1;
        let receiving = if is_both { size.grid[0] / 2 } else { size.grid[0] };
        let mine = self.chunks().div_ceil(u64::from(receiving));
        let of_chunks = mine * 3 + 2 * local + 1 + mine * local * 3 + self.chunks();
        let many = 4 * (u64::from(args::MANY_WORDS) + of_chunks + 2 * u64::from(args::THREADS));
        must(a.few_tokens <= a.max_tokens, "few_tokens");
        must(!self.is_many() || (1..=args::CHUNK).contains(&a.chunk_tokens), "chunk_tokens");
        let needed = match () {
            () if self.combines() => 4 * u64::from(args::FIXED_WORDS),
            () if self.is_many() => many.max(few(a.few_tokens)),
            () => few(a.max_tokens),
        };
        must(u64::from(size.shared_bytes) >= needed, "shared memory");
    }

    /// Claims all memory that is known now.
    pub(crate) fn claim(&self, world: &World, reach: &mut Reach) {
        let (a, memory) = (&self.args, &world.memory);
        for inbox in self.inboxes() {
            must_be_aligned(*inbox, 128, "inbox");
            reach.claim(memory, *inbox, self.inbox_bytes(), true, "inbox");
        }
        let counts = (!self.combines() && a.tokens_at == 0)
            .then(|| Counts { tokens: u64::from(a.tokens.min(a.max_tokens)), rows: 0 });
        let mut args = self.args;
        for part in self.parts(counts) {
            let address = *(part.field)(&mut args);
            must_be_aligned(address, part.multiple, part.what);
            match part.bytes {
                Some(bytes) => reach.claim(memory, address, bytes, part.write, part.what),
                None => reach.claim_if_any(memory, address, part.write),
            }
        }
        let own = [("control", a.control), ("its own inbox", a.inbox[a.rank as usize])];
        let own = own.into_iter().chain((a.tokens_at != 0).then_some(("tokens_at", a.tokens_at)));
        for (what, address) in own {
            if !reach.is_own(address) {
                broken!(Misplaced, "{what} {address:#x} is not of GPU {}", reach.gpu);
            }
        }
        if !reach.is_host(a.report) {
            broken!(Misplaced, "report {:#x} is not in host memory", a.report);
        }
    }

    /// Runs the kernel.
    pub(crate) fn run(&self, reach: &mut Reach, random: &mut Random) {
        let taken = &TAKEN[usize::from(reach.gpu)];
        let blocks = if self.receives() { self.size.grid[0] } else { 0 };
        let before = taken.fetch_add(blocks, Ordering::AcqRel);
        if blocks > 0 && before + blocks > SMS {
            broken!(
                Geometry,
                "{blocks} blocks that wait for other ranks, on GPU {} of {SMS} SMs, which runs {before} such",
                reach.gpu
            );
        }
        let counts = self.counts(reach);
        let mut args = self.args;
        for part in self.parts(Some(counts)) {
            let place = (part.field)(&mut args);
            let bytes = part.bytes.unwrap_or(0);
            *place = reach.whole(*place, bytes, part.write, part.what);
        }
        for (place, inbox) in args.inbox.iter_mut().zip(self.inboxes()) {
            *place = reach.whole(*inbox, self.inbox_bytes(), true, "inbox");
        }
        let launch = immwire_verification_moe::Launch {
            stream: 0,
            kernel: self.kernel,
            blocks: self.size.grid[0],
            threads: self.size.block[0],
            shared_bytes: self.size.shared_bytes,
            missing: 0,
            args,
        };
        // SAFETY: each address is of as many bytes as the header says, mapped while `reach` holds them; what others write there they
        // write as words: other launches by what runs this one, and streams' words as such.
        let done =
            unsafe { immwire_verification_moe::emulate_among_others(&launch, random.seed()) };
        if let Err(why) = done {
            broken!(WentWrong, "{:?}: {why}", self.kernel);
        }
        taken.fetch_sub(blocks, Ordering::AcqRel);
    }

    fn inboxes(&self) -> &[u64] {
        &self.args.inbox[..self.args.world as usize]
    }

    /// As far as the kernel reaches: of a dispatch nothing says how many results there will be.
    fn inbox_bytes(&self) -> u64 {
        let each = if self.combines() { u64::from(self.args.results_each) } else { 0 };
        let results = self.slots() * each;
        self.args.combine_at + results * u64::from(self.args.combine_stride)
    }

    /// Experts of this rank.
    fn local(&self) -> u64 {
        let (firsts, rank) = (self.args.firsts.as_flattened(), self.args.rank as usize);
        u64::from(firsts[rank + 1] - firsts[rank])
    }

    /// Tokens of all ranks.
    fn slots(&self) -> u64 {
        u64::from(self.args.world) * u64::from(self.args.max_tokens)
    }

    /// What is known now that the launch runs.
    fn counts(&self, reach: &mut Reach) -> Counts {
        let a = &self.args;
        let mut word = |address: u64, what: &str| {
            u64::from(reach.half_word(address, false, what).load(Ordering::Relaxed))
        };
        let of_control = |field: usize| a.control + field as u64;
        if !self.combines() {
            let given = match a.tokens_at {
                0 => u64::from(a.tokens),
                at => word(at, "tokens_at"),
            };
            return Counts { tokens: given.min(u64::from(a.tokens.min(a.max_tokens))), rows: 0 };
        }
        let tokens = word(of_control(offset_of!(MoeControl, tokens)), "control");
        let mut rows = 0;
        if a.flags & args::SEND != 0 {
            let pairs = word(of_control(offset_of!(MoeControl, pairs)), "control");
            for pair in 0..pairs.min(self.slots()) {
                let plan = a.plan + pair * u64::from(a.plan_stride) + size_of::<MoePair>() as u64;
                for choice in 0..u64::from(a.top_k) {
                    let row = word(plan + 4 * choice, "plan");
                    if row < u64::from(a.rows) {
                        rows = rows.max(row + 1);
                    }
                }
            }
        }
        Counts { tokens: tokens.min(u64::from(a.tokens.min(a.max_tokens))), rows }
    }

    /// All memory but inboxes.
    fn parts(&self, counts: Option<Counts>) -> Vec<Part> {
        let a = &self.args;
        let mut all = Vec::new();
        let mut part = |what, field, bytes, multiple, write| {
            all.push(Part { what, field, bytes, multiple, write });
        };
        let plan = self.slots() * u64::from(a.plan_stride);
        part("control", |a| &mut a.control, Some(size_of::<MoeControl>() as u64), 8, true);
        part("report", |a| &mut a.report, Some(size_of::<MoeReport>() as u64), 4, true);
        part("plan", |a| &mut a.plan, Some(plan), 16, true);
        part("masks", |a| &mut a.masks, Some(8 * u64::from(a.max_tokens)), 4, true);
        let tokens = |each: u64| counts.map(|counts| counts.tokens * each);
        let values = u64::from(a.values) * 2;
        if self.combines() {
            part("y", |a| &mut a.y, counts.map(|counts| counts.rows * values), 16, false);
            part("out", |a| &mut a.out, tokens(values), 16, true);
            return all;
        }
        let counted = if a.tokens_at == 0 { 0 } else { 4 };
        part("tokens_at", |a| &mut a.tokens_at, Some(counted), 4, false);
        let raw = self.is_raw();
        let (token_bytes, scale_bytes) = (u64::from(a.token_bytes), u64::from(a.scale_bytes));
        // Read before it is known how many tokens there are.
        let first = |each: u64| Some(u64::from(a.tokens) * each);
        part("x", |a| &mut a.x, first(if raw { token_bytes } else { values }), 16, false);
        let scales = if raw { tokens(scale_bytes) } else { Some(0) };
        part("scales", |a| &mut a.scales, scales, 4, false);
        let index = if a.flags & args::WIDE_INDICES != 0 { 8 } else { 4 };
        let top_k = u64::from(a.top_k);
        part("indices", |a| &mut a.indices, first(top_k * index), index, false);
        part("weights", |a| &mut a.weights, first(top_k * 4), 4, false);
        let (local, rows) = (self.local(), u64::from(a.rows));
        if self.is_many() {
            let scratch = self.chunks() * (self.local().div_ceil(4) + 1) * 4;
            part("scratch", |a| &mut a.scratch, Some(scratch), 4, true);
        }
        let (listed, rows) = if a.slots == 0 { (0, rows) } else { (4 * rows, self.slots()) };
        part("slots", |a| &mut a.slots, Some(listed), 4, true);
        part("rows_x", |a| &mut a.rows_x, Some(rows * token_bytes), 16, true);
        part("rows_scales", |a| &mut a.rows_scales, Some(rows * scale_bytes), 4, true);
        part("counts", |a| &mut a.counts, Some(4 * local), 4, true);
        part("offsets", |a| &mut a.offsets, Some(4 * local + 4), 4, true);
        all
    }
}
