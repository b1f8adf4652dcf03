//! Launches of dispatch and combine, and what of a rank lasts between them.
//!
//! # Invariants
//!
//! 1. What a launch is handed is checked by [`Geometry`], but for addresses: those are the callers' promise.
//! 2. Nothing that changes from round to round is an argument but [`Count::Here`], so that a launch that was captured in a CUDA graph
//!    can be replayed.

use super::QUANTISES_FROM;
use super::args::{self, MAX_RANKS, MoeArgs, MoeControl, MoeReport};
use super::geometry::{Geometry, Many, Number, Payload, Scales, Shape, fits};
use crate::device::{Device, Event, Stream};
use crate::driver::{check, cu};
use crate::error::Error;
use crate::memory::{DeviceMemory, PinnedMemory};
use crate::module::{Function, Module};
use std::ffi::CStr;
use std::fmt;
use std::mem::{self, offset_of};
use std::num::NonZeroU32;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/moe.fatbin"));

/// How long the memory of a rank may take to be cleared.
const SET_UP_LIMIT: Duration = Duration::from_secs(10);

/// Thirty years: three times as much added to any clock does not wrap.
const LONGEST_NS: u64 = 1 << 60;

/// What a launch is to do. Both in one, or first the one and later the other, with no SM taken in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Half {
    /// Send, then receive.
    #[default]
    Both,
    /// Send what this rank has; waits for nothing.
    Send,
    /// Receive what was sent to it.
    Receive,
}

/// How many tokens there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// So many.
    Here(u32),
    /// As many as the 32 bits at this address of the GPU's memory say when the launch starts; none if they are an `i32` below zero, which is
    /// reported as tokens that were left out.
    At {
        /// Where.
        address: u64,
        /// For how many there is memory, which may be read whatever the number is. More are left out, and reported.
        most: u32,
    },
}

/// This rank's tokens, by addresses that the GPU reaches.
#[derive(Debug, Clone, Copy)]
pub struct Tokens {
    /// How many; more than the shape allows are left out, and reported.
    pub count: Count,
    /// `[tokens][token_bytes]`, or `[tokens][values]` of 16 bits that are to be quantised. A multiple of 16.
    pub x: u64,
    /// `[tokens][scale_bytes]`, a multiple of 4; not looked at where tokens are quantised.
    pub scales: u64,
    /// `[tokens][top_k]`: experts, each once for a token, or -1. What is neither is dropped, and reported.
    pub indices: u64,
    /// Whether indices are `i64`, not `i32`.
    pub wide_indices: bool,
    /// `f32[tokens][top_k]`.
    pub weights: u64,
}

/// Where received tokens go, by addresses of the GPU's memory: each to a row for each expert that it chose, or once to a slot of its
/// own, for experts that gather.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// `[rows][token_bytes]`, or `[world][max_tokens][token_bytes]`; a multiple of 16.
    pub x: u64,
    /// `[rows][scale_bytes]`, or `[world][max_tokens][scale_bytes]`; a multiple of 4.
    pub scales: u64,
    /// Not 0: tokens lie in slots, token `t` of rank `s` in slot `s * max_tokens + t`, and this is `u32[rows]`, which says of each
    /// row which slot it is; [`NO_ROW`](args::NO_ROW) where it only pads. Slots of tokens that did not come are left as they are.
    pub slots: u64,
    /// Room in `x` and `scales`, or in `slots`. More rows than that are left out, and reported; [`Geometry::max_rows`] is always enough.
    pub rows: u32,
    /// `u32[local experts]`: tokens for each.
    pub counts: u64,
    /// `u32[local experts + 1]`: the first row of each, and all rows.
    pub offsets: u64,
    /// Whether rows that only pad are written with zeros, or are said to have no slot. Else they stay as they are.
    pub clear_padding: bool,
}

/// What the experts made of the rows received, and where the sums go, by addresses of the GPU's memory.
#[derive(Debug, Clone, Copy)]
pub struct Results {
    /// `[rows][values]`, in the rows of the dispatch before. What pads is not read.
    pub y: u64,
    /// Rows of it. Those behind them count as zeros, and are reported.
    pub rows: u32,
    /// `[tokens][values]`.
    pub out: u64,
    /// Room in it. Tokens of the dispatch before beyond that are left out, and reported.
    pub tokens: u32,
    /// Add to what is there already, instead of putting the sums in its place.
    pub accumulate: bool,
}

/// Dispatch and combine for one rank.
#[derive(Debug)]
pub struct Exchange {
    device: Device,
    geometry: Geometry,
    args: MoeArgs,
    sms: NonZeroU32,
    dispatch: Function,
    combine: Function,
    dispatch_threads: u32,
    dispatch_shared_bytes: u32,
    /// Whether launches may begin before those before them have ended.
    begins_early: bool,
    held: Held,
}

/// What an exchange has of the GPU's driver. Whoever drops it waits until the GPU has nothing to do.
#[derive(Debug, Default)]
struct Held {
    memory: Vec<DeviceMemory>,
    report: Option<PinnedMemory>,
    /// After what waits for the GPU when it is freed.
    module: Option<Module>,
}

impl Held {
    /// Takes so much of the GPU's memory, zeroed in the order of `stream`; returns where it is.
    fn take(&mut self, stream: &Stream, bytes: u64) -> Result<u64, Error> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let memory = DeviceMemory::taken(stream.device(), bytes)?;
        let (address, zeroed) = (memory.address(), memory.zero(stream));
        self.memory.push(memory);
        zeroed.map(|()| address)
    }
}

/// What an exchange that came to nothing had of the GPU's driver. Whoever drops it waits until the GPU has nothing to do.
#[derive(Debug)]
pub struct Left {
    held: Held,
    /// Last: while memory is given back the driver may keep those waiting, too, who destroy a stream.
    stream: Stream,
}

impl Drop for Left {
    fn drop(&mut self) {
        // It may be being zeroed still.
        let zeroed = Event::new(self.stream.device()).and_then(|zeroed| {
            zeroed.record(&self.stream)?;
            zeroed.wait(SET_UP_LIMIT)
        });
        if zeroed.is_err() {
            mem::forget(mem::take(&mut self.held));
        }
    }
}

/// Why there is no exchange.
#[derive(Debug)]
pub struct NotMade {
    /// [`Error::Shape`], [`Error::NoRank`], [`Error::TimedOut`], [`Error::KernelsAbsent`], [`Error::NoKernelsFor`] (quantising needs
    /// compute capability 8.9), or what the driver answers.
    pub why: Error,
    /// What was had by then, of no use but to be dropped.
    pub left: Option<Left>,
}

impl fmt::Display for NotMade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)
    }
}

impl std::error::Error for NotMade {}

impl Exchange {
    /// Loads the kernels into the GPU of `stream`, and takes what memory a rank needs beside its inbox. `sms` is how many SMs
    /// are taken at most, and no more than there are; 0 stands for all. Waits until the memory is ready, after all that is in `stream`.
    ///
    /// A launch waits for other ranks' with all of its blocks: where several ranks share a GPU, give each its part of it.
    ///
    /// # Errors
    ///
    /// [`NotMade`].
    pub fn new(
        stream: &Stream,
        shape: &Shape,
        rank: u32,
        sms: u32,
        timeout: Duration,
    ) -> Result<Self, NotMade> {
        let mut held = Held::default();
        let made = Self::make(stream, shape, rank, sms, timeout, &mut held);
        made.map_err(|why| {
            let is_any = held.module.is_some();
            NotMade { why, left: is_any.then(|| Left { held, stream: stream.clone() }) }
        })
    }

    /// What it has when it fails is in `held`.
    fn make(
        stream: &Stream,
        shape: &Shape,
        rank: u32,
        sms: u32,
        timeout: Duration,
        held: &mut Held,
    ) -> Result<Self, Error> {
        let device = stream.device();
        let geometry = Geometry::new(shape).map_err(Error::Shape)?;
        if rank >= geometry.world {
            return Err(Error::NoRank { rank, world: geometry.world });
        }
        let gpu = device.gpu();
        let module = held.module.insert(Module::load(device, IMAGE)?);
        let sms = NonZeroU32::new(sms).map_or(gpu.sms, |sms| sms.get().min(gpu.sms));
        // No more than there can be parts of results: a block without any waits, too.
        let sms = sms.min((geometry.world * shape.max_tokens).saturating_mul(args::PARTS));
        let many = if Many::is_for(&geometry, shape) {
            Some(Many::new(&geometry, shape, sms).map_err(Error::Shape)?)
        } else {
            None
        };
        if matches!(shape.payload, Payload::Fp8 { .. }) && gpu.capability < QUANTISES_FROM {
            return Err(Error::NoKernelsFor { capability: gpu.capability });
        }
        let (dispatch_name, combine_name) = names(shape, many.is_some());
        let dispatch_shared_bytes =
            many.map_or(geometry.dispatch_shared_bytes, |many| many.dispatch_shared_bytes);
        fits(dispatch_shared_bytes, gpu.shared_bytes).map_err(Error::Shape)?;
        let dispatch = module.function(dispatch_name)?;
        let combine = module.function(combine_name)?;
        module.allow_shared(dispatch, dispatch_shared_bytes)?;
        let control = held.take(stream, size_of::<MoeControl>() as u64)?;
        let plan = held.take(stream, geometry.plan_bytes)?;
        let masks = held.take(stream, u64::from(shape.max_tokens) * 8)?;
        let scratch = many.map(|many| held.take(stream, many.scratch_bytes)).transpose()?;
        let report = PinnedMemory::zeroed(device, size_of::<MoeReport>())?;
        let report = held.report.insert(report).address();
        let mut firsts = [[0; 2]; MAX_RANKS / 2 + 1];
        for (place, first) in firsts.as_flattened_mut().iter_mut().zip(&shape.firsts) {
            *place = *first;
        }
        let powers = matches!(shape.payload, Payload::Fp8 { scales: Scales::Power, .. });
        let args = MoeArgs {
            firsts,
            control,
            report,
            plan,
            masks,
            scratch: scratch.unwrap_or(0),
            timeout_ns: u64::try_from(timeout.as_nanos())
                .map_or(LONGEST_NS, |ns| ns.min(LONGEST_NS)),
            table_bytes: geometry.table_bytes,
            dispatch_at: geometry.dispatch_at,
            combine_at: geometry.combine_at,
            dispatch_stride: geometry.dispatch_stride,
            combine_stride: geometry.combine_stride,
            plan_stride: geometry.plan_stride,
            rank,
            world: geometry.world,
            top_k: shape.top_k,
            max_tokens: shape.max_tokens,
            token_bytes: geometry.token_bytes,
            scale_bytes: geometry.scale_bytes,
            values: shape.values,
            padding: shape.padding,
            flags: if powers { args::POWER_SCALES } else { 0 },
            chunk_tokens: many.map_or(0, |many| many.chunk_tokens),
            results_each: geometry.results_each,
            few_tokens: many.map_or(0, |many| many.few_tokens),
            ..MoeArgs::default()
        };
        let dispatch_threads = geometry.dispatch_threads(shape, sms);
        let exchange = Self {
            device: device.clone(),
            geometry,
            args,
            sms: NonZeroU32::new(sms).unwrap_or(NonZeroU32::MIN),
            dispatch,
            combine,
            dispatch_shared_bytes,
            dispatch_threads,
            begins_early: gpu.capability >= (9, 0),
            held: mem::take(held),
        };
        // The first launch may be in another stream.
        let begun = exchange.start_over(stream).and_then(|()| Event::new(device));
        let ready = match begun.and_then(|ready| ready.record(stream).map(|()| ready)) {
            Ok(ready) => ready,
            Err(error) => {
                *held = exchange.held;
                return Err(error);
            }
        };
        if let Err(error) = ready.wait(SET_UP_LIMIT) {
            // The GPU may be at it still, and whoever gives its memory back waits for all that it does.
            mem::forget(exchange);
            return Err(error);
        }
        Ok(exchange)
    }

    /// Sizes of everything.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Prepares memory of [`Geometry::inbox_bytes`] to be written to by all ranks, in the order of `stream`. To be done before
    /// any of them begins its first round.
    ///
    /// # Safety
    ///
    /// The memory is this GPU's, aligned to 128 bytes, and nobody uses it meanwhile.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub unsafe fn clear_inbox(&self, stream: &Stream, inbox: u64) -> Result<(), Error> {
        self.device.must_be(stream.device())?;
        let _current = self.device.enter()?;
        let tables = self.geometry.dispatch_at;
        for (at, bytes, byte) in
            [(inbox, tables, 0), (inbox + tables, self.geometry.inbox_bytes - tables, u8::MAX)]
        {
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            // SAFETY: our caller's promise.
            let set = unsafe { cu::cuMemsetD8Async(at, byte, bytes, stream.handle()) };
            check("cuMemsetD8Async", set)?;
        }
        Ok(())
    }

    /// Says where the inboxes of all ranks are, this one's too, as this GPU reaches them.
    ///
    /// # Errors
    ///
    /// [`Error::NoRank`] if they are not as many as ranks; [`Error::Misaligned`].
    pub fn connect(&mut self, inboxes: &[u64]) -> Result<(), Error> {
        let world = self.geometry.world;
        if inboxes.len() != world as usize {
            let rank = u32::try_from(inboxes.len()).unwrap_or(u32::MAX);
            return Err(Error::NoRank { rank, world });
        }
        if let Some(&address) = inboxes.iter().find(|inbox| !inbox.is_multiple_of(128)) {
            return Err(Error::Misaligned { what: "inbox", address, multiple: 128 });
        }
        for (place, inbox) in self.args.inbox.iter_mut().zip(inboxes) {
            *place = *inbox;
        }
        Ok(())
    }

    /// Enqueues the way out: this rank's tokens to the ranks of their experts, and those of all ranks to their rows here. Waits
    /// for nothing; some microseconds.
    ///
    /// All ranks take turns with dispatch and combine, those without tokens too.
    ///
    /// From compute capability 9.0 on a kernel behind it in the stream may begin before it has ended, if it was launched to (programmatic dependent
    /// launch): it has to wait (`griddepcontrol.wait`) before it uses memory that this one does. So with [`Exchange::combine`].
    ///
    /// # Safety
    ///
    /// - all ranks have the same [`Shape`], and each a number of its own;
    /// - [`Exchange::connect`] was called, with the ranks' inboxes in their order, each of [`Geometry::inbox_bytes`], cleared
    ///   ([`Exchange::clear_inbox`]) before any rank began, and mapped until this launch and all others of all ranks have ended;
    /// - the memory of `tokens` and `rows` is as long as they say; until the launch has ended the former is not written, and the
    ///   latter not used;
    /// - all launches of this exchange are ordered one after the other: dispatch and combine in turn, of both the same halves, and
    ///   sending before receiving, with the same arguments;
    /// - this exchange is kept until the launch has ended, and so have all replays of graphs that captured it;
    /// - what this rank's GPU runs at the same time leaves room for all blocks of the launch.
    ///
    /// # Errors
    ///
    /// [`Error::Misaligned`], or what the driver answers: nothing was enqueued.
    pub unsafe fn dispatch(
        &self,
        stream: &Stream,
        half: Half,
        tokens: &Tokens,
        rows: &Rows,
    ) -> Result<(), Error> {
        let index_bytes = if tokens.wide_indices { 8 } else { 4 };
        for (what, address, multiple) in [
            ("tokens", tokens.x, 16),
            ("scales", tokens.scales, 4),
            ("indices", tokens.indices, index_bytes),
            ("weights", tokens.weights, 4),
            ("rows", rows.x, 16),
            ("scales of rows", rows.scales, 4),
            ("slots", rows.slots, 4),
            ("counts", rows.counts, 4),
            ("offsets", rows.offsets, 4),
        ] {
            aligned(what, address, multiple)?;
        }
        let (count, tokens_at) = match tokens.count {
            Count::Here(count) => (count, 0),
            Count::At { address, most } => (most, address),
        };
        aligned("the number of tokens", tokens_at, 4)?;
        let mut flags = half.flags();
        flags |= if tokens.wide_indices { args::WIDE_INDICES } else { 0 };
        flags |= if rows.clear_padding { args::CLEAR_PADDING } else { 0 };
        let args = MoeArgs {
            tokens_at,
            tokens: count,
            x: tokens.x,
            scales: tokens.scales,
            indices: tokens.indices,
            weights: tokens.weights,
            rows_x: rows.x,
            rows_scales: rows.scales,
            slots: rows.slots,
            rows: rows.rows.min(args::LEFT_OUT),
            counts: rows.counts,
            offsets: rows.offsets,
            flags: self.args.flags | flags,
            ..self.args
        };
        // SAFETY: our caller's promise.
        unsafe {
            self.launch(
                stream,
                self.dispatch,
                self.dispatch_threads,
                self.dispatch_shared_bytes,
                args,
            )
        }
    }

    /// Enqueues the way back: the results of the rows received, times their weights, to the tokens' ranks; and the sums of this
    /// rank's own tokens' results, zeros for tokens that chose nobody: added up in the order of ranks, in `f32`, and rounded once.
    /// Where sums are exact, the results themselves go back, and are added up, times their weights, in the order of choices.
    ///
    /// # Safety
    ///
    /// As for [`Exchange::dispatch`]: `y` has so many rows, and is not written, and `out` not used, until the launch has ended.
    ///
    /// # Errors
    ///
    /// [`Error::Misaligned`], or what the driver answers: nothing was enqueued.
    pub unsafe fn combine(
        &self,
        stream: &Stream,
        half: Half,
        results: &Results,
    ) -> Result<(), Error> {
        let Results { y, rows, out, tokens, accumulate } = *results;
        aligned("results", y, 16)?;
        aligned("sums", out, 16)?;
        let flags = half.flags() | if accumulate { args::ACCUMULATE } else { 0 };
        let rows = rows.min(args::LEFT_OUT);
        let args = MoeArgs { y, rows, out, tokens, flags, ..self.args };
        // SAFETY: our caller's promise.
        unsafe {
            let shared = self.geometry.combine_shared_bytes;
            self.launch(stream, self.combine, args::THREADS, shared, args)
        }
    }

    /// # Safety
    ///
    /// As for [`Exchange::dispatch`].
    unsafe fn launch(
        &self,
        stream: &Stream,
        function: Function,
        threads: u32,
        shared_bytes: u32,
        mut args: MoeArgs,
    ) -> Result<(), Error> {
        self.device.must_be(stream.device())?;
        let _current = self.device.enter()?;
        let mut parameters = [(&raw mut args).cast()];
        // May begin before the launches before it in the stream have ended: it waits for them itself, before it looks at any memory.
        let mut early = cu::CUlaunchAttribute {
            id: cu::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: cu::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = cu::CUlaunchConfig {
            gridDimX: self.sms.get(),
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: stream.handle(),
            attrs: &raw mut early,
            numAttrs: u32::from(self.begins_early),
        };
        // SAFETY: the function takes one `MoeArgs` by value (compared on both sides), which the driver copies before it
        // returns; threads and shared memory are what the header asks for; where it may begin early, its code waits; function and
        // stream are of the context that is current; memory is our caller's promise.
        let launched = unsafe {
            cu::cuLaunchKernelEx(
                &raw const config,
                function.handle(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("cuLaunchKernelEx", launched)
    }

    /// What went wrong until now, with the number of the round, from 1: see [`MoeReport`].
    #[must_use]
    pub fn report(&self) -> MoeReport {
        let read = |offset: usize, order| {
            // SAFETY: inside of the pinned report, aligned, alive with `self`; the GPU writes it word by word.
            unsafe { AtomicU32::from_ptr((self.args.report as *mut u32).add(offset / 4)) }
                .load(order)
        };
        // What belongs to it was there before.
        let refused = read(offset_of!(MoeReport, refused), Ordering::Acquire);
        let at = |offset: usize| read(offset, Ordering::Relaxed);
        let all = |offset: usize| std::array::from_fn(|rank| at(offset + rank * 4));
        MoeReport {
            late_table: all(offset_of!(MoeReport, late_table)),
            late_tokens: all(offset_of!(MoeReport, late_tokens)),
            late_results: all(offset_of!(MoeReport, late_results)),
            refused,
            token: at(offset_of!(MoeReport, token)),
            choice: at(offset_of!(MoeReport, choice)),
            index: at(offset_of!(MoeReport, index)).cast_signed(),
            rows_left_out: at(offset_of!(MoeReport, rows_left_out)),
            tokens_left_out: at(offset_of!(MoeReport, tokens_left_out)),
            reserved: [0; 2],
        }
    }

    /// Ends all waits of this rank's launches, those that go on too, as if they had lasted too long. `stream` is another one than
    /// theirs. Takes no SM: they may all be waiting.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn abort(&self, stream: &Stream) -> Result<(), Error> {
        self.device.must_be(stream.device())?;
        let _current = self.device.enter()?;
        let at = self.args.control + offset_of!(MoeControl, abort) as u64;
        let fenced = cu::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: a word of `control`, at a multiple of 8; the stream is alive.
        let written = unsafe { cu::cuStreamWriteValue64_v2(stream.handle(), at, 1, fenced) };
        check("cuStreamWriteValue64", written)
    }

    /// Begins with the first round again, in the order of `stream`: after something went wrong, at all ranks, each with its
    /// inbox cleared. No launch of any rank goes on, and none is queued.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn start_over(&self, stream: &Stream) -> Result<(), Error> {
        self.device.must_be(stream.device())?;
        self.set(stream, 0, 0, size_of::<MoeControl>())?;
        self.set(stream, offset_of!(MoeControl, next_epoch), 1, 1)?;
        for word in 0..size_of::<MoeReport>() / 4 {
            // SAFETY: inside of the pinned report, aligned, alive with `self`.
            unsafe { AtomicU32::from_ptr((self.args.report as *mut u32).add(word)) }
                .store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sets bytes of the control structure, in the order of `stream`.
    fn set(&self, stream: &Stream, offset: usize, byte: u8, bytes: usize) -> Result<(), Error> {
        let _current = self.device.enter()?;
        let at = self.args.control + offset as u64;
        // SAFETY: inside of `control`, which outlives the stream's work by the callers' promises.
        check("cuMemsetD8Async", unsafe { cu::cuMemsetD8Async(at, byte, bytes, stream.handle()) })
    }
}

/// The kernels for a shape: of dispatch, and of combine.
const fn names(shape: &Shape, many: bool) -> (&'static CStr, &'static CStr) {
    let dispatch = match (shape.payload, many) {
        (Payload::Raw { .. }, false) => c"immwire_moe_dispatch_raw",
        (Payload::Fp8 { from: Number::Bf16, .. }, false) => c"immwire_moe_dispatch_fp8_bf16",
        (Payload::Fp8 { from: Number::Fp16, .. }, false) => c"immwire_moe_dispatch_fp8_fp16",
        (Payload::Raw { .. }, true) => c"immwire_moe_dispatch_many_raw",
        (Payload::Fp8 { from: Number::Bf16, .. }, true) => c"immwire_moe_dispatch_many_fp8_bf16",
        (Payload::Fp8 { from: Number::Fp16, .. }, true) => c"immwire_moe_dispatch_many_fp8_fp16",
    };
    let combine = match (shape.results, shape.exact, many) {
        (Number::Bf16, false, false) => c"immwire_moe_combine_bf16",
        (Number::Fp16, false, false) => c"immwire_moe_combine_fp16",
        (Number::Bf16, false, true) => c"immwire_moe_combine_many_bf16",
        (Number::Fp16, false, true) => c"immwire_moe_combine_many_fp16",
        (Number::Bf16, true, _) => c"immwire_moe_combine_exact_bf16",
        (Number::Fp16, true, _) => c"immwire_moe_combine_exact_fp16",
    };
    (dispatch, combine)
}

impl Half {
    const fn flags(self) -> u32 {
        match self {
            Self::Both => args::SEND | args::RECEIVE,
            Self::Send => args::SEND,
            Self::Receive => args::RECEIVE,
        }
    }
}

const fn aligned(what: &'static str, address: u64, multiple: u64) -> Result<(), Error> {
    if address.is_multiple_of(multiple) {
        Ok(())
    } else {
        Err(Error::Misaligned { what, address, multiple })
    }
}
