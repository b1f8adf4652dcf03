//! Ranks in host memory, what they send each other, and what must come of it, worked out another way.

#![allow(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "small numbers, and failed tests"
)]

use immwire_core::moe::{NO_SLOT, TableShape, slot_of};
use immwire_cuda::moe::args::{self, MoeArgs, MoeControl, MoeReport};
use immwire_cuda::moe::geometry::{Geometry, Many, Number, Payload, Scales, Shape};
use immwire_verification_moe::oracle::{Layout, Maker, Random, Round, Tokens, bytes_of};
use immwire_verification_moe::{Kernel, Launch};
use std::cell::UnsafeCell;

/// Memory that kernels write, in vectors.
pub(crate) struct Memory(Box<[UnsafeCell<[u32; 4]>]>);

impl Memory {
    pub(crate) fn filled(bytes: u64, byte: u8) -> Self {
        let word = u32::from_ne_bytes([byte; 4]);
        let vectors = (bytes as usize).div_ceil(16).max(1);
        Self((0..vectors).map(|_| UnsafeCell::new([word; 4])).collect())
    }

    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        let memory = Self::filled(bytes.len() as u64, 0);
        // SAFETY: as many bytes as were asked for, and nobody else has them yet.
        unsafe { std::ptr::copy(bytes.as_ptr(), memory.0.as_ptr() as *mut u8, bytes.len()) };
        memory
    }

    pub(crate) fn at(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    /// What is there. No kernel runs.
    pub(crate) fn bytes(&self, from: u64, len: usize) -> &[u8] {
        assert!(from as usize + len <= self.0.len() * 16);
        // SAFETY: inside, initialised, and no kernel runs.
        unsafe {
            std::slice::from_raw_parts((self.0.as_ptr() as *const u8).add(from as usize), len)
        }
    }

    pub(crate) fn words(&self, count: usize) -> Vec<u32> {
        let words = self.bytes(0, count * 4).chunks_exact(4);
        words.map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]])).collect()
    }

    pub(crate) fn write(&self, from: u64, bytes: &[u8]) {
        assert!(from as usize + bytes.len() <= self.0.len() * 16);
        // SAFETY: inside, and no kernel runs.
        unsafe {
            std::ptr::copy(
                bytes.as_ptr(),
                (self.0.as_ptr() as *mut u8).add(from as usize),
                bytes.len(),
            );
        }
    }
}

/// How launches are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Style {
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) split: bool,
    pub(crate) wide: bool,
    pub(crate) clear: bool,
    pub(crate) tokens_in_memory: bool,
    /// Whether dispatch is that for many tokens, and how many are counted together.
    pub(crate) many: bool,
    pub(crate) chunk_tokens: u32,
    /// Up to how many tokens of each rank that exchanges few as few are.
    pub(crate) few_tokens: u32,
    /// Whether each token is received once, in a slot.
    pub(crate) slots: bool,
}

/// Everything of a rank in one round, but for what it sends and answers.
pub(crate) struct Turn {
    inputs: Vec<Memory>,
    pub(crate) rows_x: Memory,
    pub(crate) rows_scales: Memory,
    pub(crate) slots: Memory,
    pub(crate) counts: Memory,
    pub(crate) offsets: Memory,
    pub(crate) out: Memory,
}

pub(crate) struct Rank {
    pub(crate) inbox: Memory,
    pub(crate) control: Memory,
    pub(crate) report: Memory,
    plan: Memory,
    masks: Memory,
    scratch: Memory,
    pub(crate) turns: Vec<Turn>,
}

pub(crate) struct World {
    pub(crate) shape: Shape,
    pub(crate) geometry: Geometry,
    pub(crate) ranks: Vec<Rank>,
    /// By round and rank: what each sends, and what its experts answer.
    pub(crate) tokens: Vec<Vec<Tokens>>,
    pub(crate) results: Vec<Vec<Vec<u8>>>,
    pub(crate) timeout_ns: u64,
    pub(crate) rows: u32,
}

/// What rows and results hold before anybody writes them.
pub(crate) const UNTOUCHED: u8 = 0xa5;

impl World {
    pub(crate) fn new(shape: &Shape) -> Self {
        let geometry = Geometry::new(shape).unwrap();
        let rank = |_| {
            let inbox = Memory::filled(geometry.inbox_bytes, 0xff);
            inbox.write(0, &vec![0; geometry.dispatch_at as usize]);
            let control = MoeControl { next_epoch: 1, ..MoeControl::default() };
            Rank {
                inbox,
                control: Memory::of_bytes(&bytes_of(&[control])),
                report: Memory::filled(size_of::<MoeReport>() as u64, 0),
                plan: Memory::filled(geometry.plan_bytes, UNTOUCHED),
                masks: Memory::filled(u64::from(shape.max_tokens) * 8, UNTOUCHED),
                // Chunks of one token at the least.
                scratch: Memory::filled(
                    4 * u64::from(geometry.world * shape.max_tokens)
                        * u64::from(geometry.most_local + 1),
                    UNTOUCHED,
                ),
                turns: Vec::new(),
            }
        };
        Self {
            ranks: (0..geometry.world).map(rank).collect(),
            tokens: Vec::new(),
            results: Vec::new(),
            shape: shape.clone(),
            // Much longer than any round takes.
            timeout_ns: 20_000_000,
            rows: u32::try_from(geometry.max_rows).unwrap(),
            geometry,
        }
    }

    pub(crate) fn maker(&self) -> Maker<'_> {
        Maker { shape: &self.shape }
    }

    pub(crate) fn report(&self, rank: usize) -> MoeReport {
        let bytes = self.ranks[rank].report.bytes(0, size_of::<MoeReport>());
        // SAFETY: as many bytes, of numbers only.
        unsafe { bytes.as_ptr().cast::<MoeReport>().read_unaligned() }
    }

    pub(crate) fn control(&self, rank: usize) -> MoeControl {
        let bytes = self.ranks[rank].control.bytes(0, size_of::<MoeControl>());
        // SAFETY: as many bytes, of numbers only.
        unsafe { bytes.as_ptr().cast::<MoeControl>().read_unaligned() }
    }

    pub(crate) fn set_control(&self, rank: usize, control: MoeControl) {
        self.ranks[rank].control.write(0, &bytes_of(&[control]));
    }

    /// Tokens of all ranks.
    fn slots(&self) -> u32 {
        self.geometry.world * self.shape.max_tokens
    }

    /// Adds a round: what each rank sends in it, and what its experts answer.
    pub(crate) fn add_turn(&mut self, tokens: Vec<Tokens>, random: &mut Random) {
        let mut all_results = Vec::new();
        for (rank, tokens) in tokens.iter().enumerate() {
            let results = self.maker().numbers(random, self.rows, self.shape.results);
            let local = self.shape.firsts[rank + 1] - self.shape.firsts[rank];
            let g = &self.geometry;
            let room = u64::from(self.rows.max(self.slots()));
            let out = u64::from(self.shape.max_tokens) * u64::from(self.shape.values) * 2;
            let wide: Vec<i64> = tokens.indices.iter().map(|index| i64::from(*index)).collect();
            let turn = Turn {
                inputs: vec![
                    Memory::of_bytes(&tokens.x),
                    Memory::of_bytes(&tokens.scales),
                    Memory::of_bytes(&bytes_of(&tokens.indices)),
                    Memory::of_bytes(&bytes_of(&wide)),
                    Memory::of_bytes(&bytes_of(&tokens.weights)),
                    Memory::of_bytes(&bytes_of(&[tokens.count])),
                    Memory::of_bytes(&results),
                ],
                rows_x: Memory::filled(room * u64::from(g.token_bytes), UNTOUCHED),
                rows_scales: Memory::filled(room * u64::from(g.scale_bytes), UNTOUCHED),
                slots: Memory::filled(4 * u64::from(self.rows), UNTOUCHED),
                counts: Memory::filled(u64::from(local) * 4, UNTOUCHED),
                offsets: Memory::filled(u64::from(local) * 4 + 4, UNTOUCHED),
                out: Memory::filled(out, UNTOUCHED),
            };
            turn.out.write(0, tokens.onto.as_deref().unwrap_or_default());
            self.ranks[rank].turns.push(turn);
            all_results.push(results);
        }
        self.tokens.push(tokens);
        self.results.push(all_results);
    }

    pub(crate) fn args(&self, rank: usize, turn: usize, style: Style) -> MoeArgs {
        let g = &self.geometry;
        let mut firsts = [[0; 2]; args::MAX_RANKS / 2 + 1];
        for (at, first) in self.shape.firsts.iter().enumerate() {
            firsts[at / 2][at % 2] = *first;
        }
        let mut inbox = [0; args::MAX_RANKS];
        for (to, rank) in inbox.iter_mut().zip(&self.ranks) {
            *to = rank.inbox.at();
        }
        let (me, own) = (&self.ranks[rank], &self.ranks[rank].turns[turn]);
        let mut flags = 0;
        for (wanted, flag) in [
            (style.wide, args::WIDE_INDICES),
            (style.clear, args::CLEAR_PADDING),
            (self.tokens[turn][rank].onto.is_some(), args::ACCUMULATE),
            (
                matches!(self.shape.payload, Payload::Fp8 { scales: Scales::Power, .. }),
                args::POWER_SCALES,
            ),
        ] {
            flags |= if wanted { flag } else { 0 };
        }
        MoeArgs {
            inbox,
            firsts,
            control: me.control.at(),
            report: me.report.at(),
            plan: me.plan.at(),
            masks: me.masks.at(),
            scratch: me.scratch.at(),
            tokens_at: if style.tokens_in_memory { own.inputs[5].at() } else { 0 },
            x: own.inputs[0].at(),
            scales: own.inputs[1].at(),
            indices: own.inputs[if style.wide { 3 } else { 2 }].at(),
            weights: own.inputs[4].at(),
            rows_x: own.rows_x.at(),
            rows_scales: own.rows_scales.at(),
            slots: if style.slots { own.slots.at() } else { 0 },
            counts: own.counts.at(),
            offsets: own.offsets.at(),
            y: own.inputs[6].at(),
            out: own.out.at(),
            timeout_ns: self.timeout_ns,
            table_bytes: g.table_bytes,
            dispatch_at: g.dispatch_at,
            combine_at: g.combine_at,
            dispatch_stride: g.dispatch_stride,
            combine_stride: g.combine_stride,
            plan_stride: g.plan_stride,
            rank: rank as u32,
            world: g.world,
            top_k: self.shape.top_k,
            max_tokens: self.shape.max_tokens,
            tokens: if style.tokens_in_memory {
                self.shape.max_tokens
            } else {
                self.tokens[turn][rank].count
            },
            token_bytes: g.token_bytes,
            scale_bytes: g.scale_bytes,
            values: self.shape.values,
            padding: self.shape.padding,
            rows: self.rows,
            flags,
            chunk_tokens: style.chunk_tokens,
            results_each: g.results_each,
            few_tokens: style.few_tokens.min(self.shape.max_tokens),
            reserved: 0,
        }
    }

    /// What must come of a round.
    pub(crate) fn round(&self, turn: usize) -> Round<'_> {
        Round {
            shape: &self.shape,
            geometry: &self.geometry,
            tokens: &self.tokens[turn],
            results: &self.results[turn],
        }
    }

    /// The launches of a rank's round.
    pub(crate) fn launches(&self, rank: usize, turn: usize, style: Style) -> Vec<Launch> {
        let dispatch = match self.shape.payload {
            Payload::Raw { .. } => Kernel::DispatchRaw,
            Payload::Fp8 { from: Number::Bf16, .. } => Kernel::DispatchFp8Bf16,
            Payload::Fp8 { from: Number::Fp16, .. } => Kernel::DispatchFp8Fp16,
        };
        let combine = match (self.shape.results, self.shape.exact) {
            (Number::Bf16, false) => Kernel::CombineBf16,
            (Number::Fp16, false) => Kernel::CombineFp16,
            (Number::Bf16, true) => Kernel::CombineExactBf16,
            (Number::Fp16, true) => Kernel::CombineExactFp16,
        };
        let args = self.args(rank, turn, style);
        let g = &self.geometry;
        let (dispatch, combine, dispatch_shared_bytes) = if style.many {
            let many = Many::of_chunks(g, &self.shape, style.blocks, style.chunk_tokens).unwrap();
            (dispatch.many(), combine.many(), many.dispatch_shared_bytes)
        } else {
            (dispatch, combine, g.dispatch_shared_bytes)
        };
        let mut all = Vec::new();
        for (kernel, shared_bytes) in
            [(dispatch, dispatch_shared_bytes), (combine, g.combine_shared_bytes)]
        {
            let halves: &[u32] = if style.split {
                &[args::SEND, args::RECEIVE]
            } else {
                &[args::SEND | args::RECEIVE]
            };
            for half in halves {
                all.push(Launch {
                    stream: rank as u32,
                    kernel,
                    blocks: style.blocks,
                    threads: style.threads,
                    shared_bytes,
                    missing: 0,
                    args: MoeArgs { flags: args.flags | half, ..args },
                });
            }
        }
        all
    }

    /// Rows and counts of a round are those of `layout`, with all that comes from ranks for which `whole` holds.
    pub(crate) fn check_rows(
        &self,
        rank: usize,
        turn: usize,
        layout: &Layout,
        style: Style,
        whole: impl Fn(usize) -> bool,
    ) {
        let own = &self.ranks[rank].turns[turn];
        assert_eq!(own.counts.words(layout.counts.len()), layout.counts, "counts at rank {rank}");
        assert_eq!(own.offsets.words(layout.offsets.len()), layout.offsets, "offsets at {rank}");
        let (x, scales) = (self.geometry.token_bytes as usize, self.geometry.scale_bytes as usize);
        let blank_word = u32::from_ne_bytes([UNTOUCHED; 4]);
        let mut slots = vec![blank_word; if style.slots { self.rows as usize } else { 0 }];
        if style.slots && style.clear {
            let end = layout.offsets[layout.offsets.len() - 1].min(self.rows) as usize;
            slots[..end].fill(NO_SLOT);
        }
        let places = if style.slots { self.slots() } else { self.rows };
        let mut used = vec![false; places as usize];
        for (&(source, token, _), &row) in &layout.rows {
            if style.slots {
                // A token whose rows have no room lies in its slot all the same.
                let slot = slot_of(source as u32, token, self.shape.max_tokens).unwrap();
                used[slot as usize] = true;
                if let Some(named) = slots.get_mut(row as usize) {
                    *named = slot;
                }
            }
            if row >= self.rows {
                continue;
            }
            let row = if style.slots { slots[row as usize] } else { row };
            used[row as usize] = true;
            if !whole(source) {
                continue;
            }
            let expected = self.round(turn).arrives(source, token);
            let found = (
                own.rows_x.bytes(u64::from(row) * x as u64, x).to_vec(),
                own.rows_scales.bytes(u64::from(row) * scales as u64, scales).to_vec(),
            );
            assert_eq!(found, expected, "row {row} at rank {rank}: token {token} of rank {source}");
        }
        assert_eq!(own.slots.words(slots.len()), slots, "slots of rows at rank {rank}");
        let last = if style.slots { 0 } else { layout.offsets[layout.offsets.len() - 1] };
        for (row, used) in used.iter().enumerate() {
            let pads = style.clear && (row as u32) < last;
            let byte = if pads { 0 } else { UNTOUCHED };
            let blank = own.rows_x.bytes((row * x) as u64, x).iter().all(|b| *b == byte)
                && own.rows_scales.bytes((row * scales) as u64, scales).iter().all(|b| *b == byte);
            assert!(*used || blank, "row {row} at rank {rank} belongs to nobody, and was written");
        }
    }

    /// The result of one token.
    pub(crate) fn found(&self, rank: usize, turn: usize, token: u32) -> Vec<u8> {
        let bytes = self.shape.values as usize * 2;
        let out = &self.ranks[rank].turns[turn].out;
        out.bytes(u64::from(token) * bytes as u64, bytes).to_vec()
    }

    /// All of a round in which everybody took part.
    pub(crate) fn check_whole(&self, turn: usize, style: Style) {
        let all: Vec<usize> = (0..self.ranks.len()).collect();
        for rank in &all {
            self.check_rows(*rank, turn, &self.round(turn).layout(*rank, &all), style, |_| true);
        }
        self.check_results(turn);
    }

    /// All results of such a round.
    pub(crate) fn check_results(&self, turn: usize) {
        let all: Vec<usize> = (0..self.ranks.len()).collect();
        let layouts: Vec<Option<Layout>> =
            all.iter().map(|rank| Some(self.round(turn).layout(*rank, &all))).collect();
        for rank in &all {
            let own = &self.ranks[*rank].turns[turn];
            for token in 0..self.tokens[turn][*rank].count {
                let expected = self.round(turn).result(*rank, token, &layouts);
                assert_eq!(self.found(*rank, turn, token), expected, "result {token} at {rank}");
            }
            let written = self.tokens[turn][*rank].count as usize * self.shape.values as usize * 2;
            let out = self.shape.max_tokens as usize * self.shape.values as usize * 2;
            let rest = own.out.bytes(written as u64, out - written);
            assert!(rest.iter().all(|byte| *byte == UNTOUCHED), "results of no token at {rank}");
        }
    }

    /// Every slot holds poison again.
    pub(crate) fn check_poison(&self) {
        self.check_poison_from(self.geometry.dispatch_at);
    }

    /// Every slot of results does.
    pub(crate) fn check_results_poison(&self) {
        self.check_poison_from(self.geometry.combine_at);
    }

    fn check_poison_from(&self, from: u64) {
        for (rank, memory) in self.ranks.iter().enumerate() {
            let slots = memory.inbox.bytes(from, (self.geometry.inbox_bytes - from) as usize);
            assert!(slots.iter().all(|byte| *byte == 0xff), "something is left at rank {rank}");
        }
    }

    /// A rank's table, as the core writes it, at `to`: as if it had sent nothing else.
    pub(crate) fn put_table(&self, from: usize, to: usize, turn: usize, epoch: u32, parity: u64) {
        let tokens = &self.tokens[turn][from];
        let table = TableShape { top_k: self.shape.top_k, max_tokens: self.shape.max_tokens };
        let mut vectors = vec![[0; 4]; table.vectors(self.shape.max_tokens).unwrap()];
        let count = table.encode(epoch, &tokens.indices, &tokens.weights, &mut vectors).unwrap();
        let at =
            (parity * u64::from(self.geometry.world) + from as u64) * self.geometry.table_bytes;
        self.ranks[to].inbox.write(at, &bytes_of(&vectors[..count]));
    }

    /// A rank's tokens of any bytes at `to`, each without its first key: as if that was still on its way.
    pub(crate) fn put_tokens_without_a_key(&self, from: usize, to: usize, random: &mut Random) {
        let g = &self.geometry;
        for token in 0..self.tokens[0][from].count {
            let number = from as u64 * u64::from(self.shape.max_tokens) + u64::from(token);
            let at = g.dispatch_at + number * u64::from(g.dispatch_stride);
            let bytes: Vec<u8> =
                (0..g.token_bytes + g.scale_bytes).map(|_| random.below(255) as u8).collect();
            self.ranks[to].inbox.write(at, &bytes);
            let keys = [0; 4 * (args::KEYS as usize - 1)];
            self.ranks[to].inbox.write(at + bytes.len() as u64 + 4, &keys);
        }
    }
}

/// Numbers of ranks that no slot has: the two sides agree on what is no row.
const _: () = assert!(NO_SLOT == args::NO_ROW);
