//! `immwire.moe.GpuAllToAll`: the exchange among GPUs, in the order of the caller's streams. Arrays are looked at for where they
//! lie, how long they are, and of what type, where kernels take them for numbers; what is in them, the host does not see.
//!
//! # Invariants
//!
//! - No launch is told of more than the arrays have that were given: counts of tokens and rows follow from their bytes.
//! - Who closes an exchange waits for the GPU first: no kernel uses what is gone. What is asked meanwhile, and who ends the
//!   kernels' waits, is not kept waiting by that, nor by a call.

use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;
use std::time::Duration;

use immwire::moe::gpu::{
    self, Config, Control, Count, Geometry, Half, Number, Payload, Results, Rows, Scales, Shape,
    Tokens,
};
use immwire::moe::{Format, MoeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use super::{Common, Failure, MoeReport, format, placement};
use crate::engine::TransferEngine;
use crate::errors;
use crate::fork::Owned;
use crate::memory::{self, Item, Memory};
use crate::values::seconds;

/// Where an exchange stands.
#[derive(Default)]
enum State {
    Joining(Box<gpu::Joining>),
    Joined(Box<Joined>),
    #[default]
    Closed,
}

struct Joined {
    exchange: gpu::AllToAll,
    /// For how many tokens the dispatch before had memory.
    tokens: u32,
}

impl Joined {
    /// Which of these is not in this rank's GPU.
    fn not_here(&self, arrays: &[&Array]) -> Option<&'static str> {
        let lost = |array: &&&Array| array.bytes > 0 && !self.exchange.is_here(array.address);
        arrays.iter().find(lost).map(|array| array.what)
    }
}

/// Why results were not taken.
enum Refused {
    /// `out` needs so many bytes.
    Short(u64),
    /// This array lies elsewhere.
    Elsewhere(&'static str),
}

/// What both halves share.
struct Shared {
    common: Common<State>,
    shape: Shape,
    geometry: Geometry,
    gpu: u32,
}

impl Shared {
    /// This rank's experts.
    fn experts(&self) -> u64 {
        let at = |rank: u32| {
            let rank = usize::try_from(rank).unwrap_or(usize::MAX);
            self.shape.firsts.get(rank).copied().unwrap_or(0)
        };
        u64::from(at(self.common.rank + 1).saturating_sub(at(self.common.rank)))
    }

    /// Runs `run` on the exchange.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut Joined) -> Result<R, MoeError> + Send,
    ) -> PyResult<R> {
        self.common.call(py, |state| match state {
            State::Joined(joined) => Ok(run(joined)?),
            _ => Err(Failure::Closed),
        })
    }
}

/// An exchange whose buffers are there, and which waits to be told of the other ranks.
#[pyclass(module = "immwire.moe", frozen)]
pub(crate) struct GpuJoining {
    shared: Arc<Shared>,
    seat: Vec<u8>,
}

#[pymethods]
impl GpuJoining {
    /// What the other ranks need of this one: bytes, to be passed to all by whatever they find each other with.
    #[getter]
    fn seat<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.seat)
    }

    /// Connects to the others, and opens their inboxes. ``seats`` are those of all ranks, in their order, this one's included.
    ///
    /// It can be called once: if it fails, open anew, but for seats that cannot be right. Other threads run meanwhile.
    #[pyo3(signature = (seats, /, *, timeout = None))]
    fn join(
        &self,
        py: Python<'_>,
        seats: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<GpuAllToAll> {
        let common = &self.shared.common;
        let timeout = common.timeout(timeout)?;
        let seats = common.seats(seats)?;
        let control = common.call(py, |state| match std::mem::take(state) {
            State::Joining(joining) => {
                let exchange = joining.join(&seats, timeout)?;
                let control = Arc::clone(exchange.control());
                *state = State::Joined(Box::new(Joined { exchange, tokens: 0 }));
                Ok(control)
            }
            other => {
                let joined = matches!(other, State::Joined(_));
                *state = other;
                Err(if joined { Failure::Joined } else { Failure::Closed })
            }
        })?;
        Ok(GpuAllToAll { shared: Arc::clone(&self.shared), control: Owned::new(control) })
    }

    fn __repr__(&self) -> String {
        let (rank, gpu) = (self.shared.common.describe(), self.shared.gpu);
        format!("<GpuJoining {rank}, GPU {gpu}, {} bytes of seat>", self.seat.len())
    }
}

/// Dispatch and combine among GPUs of one host. Made by ``GpuAllToAll.open`` and ``join``.
///
/// Every rank enqueues ``dispatch`` and then ``combine``, round after round; nothing waits for the host, and nothing that is passed
/// need change from round to round, so that both can be captured in a CUDA graph. Arrays are anything of the GPU's that has
/// ``__cuda_array_interface__`` or DLPack, of whatever shape, or a tuple ``(address, nbytes)``; as with any kernel,
/// they stay as they are until the stream has come past. Tokens and scales are of whatever element type; results, and tokens that are
/// quantised, of 16 bits, of which those that are not of ``dtype`` are taken for it; indices, weights and
/// the numbers of tokens and rows of the one that is named, with or without a sign. All may be bytes. Where a framework's type has no such interface, pass a view of
/// its bytes (``tensor.view(torch.uint8)``).
///
/// One thread at a time is in a call, another one's raises ``RequestError``; ``report``, ``active_ranks`` and ``abort`` can be called at any
/// time.
#[pyclass(module = "immwire.moe", frozen)]
pub(crate) struct GpuAllToAll {
    shared: Arc<Shared>,
    /// Beside calls, which hold the rest, and beside who closes it.
    control: Owned<Arc<Control>>,
}

impl GpuAllToAll {
    /// What the kernels have reported until now.
    fn kernels(&self) -> PyResult<gpu::MoeReport> {
        self.control.get()?.report().ok_or_else(|| errors::closed("exchange"))
    }
}

#[pymethods]
impl GpuAllToAll {
    /// Makes the buffers of one rank on GPU ``device``, one of the engine's, and loads the kernels.
    ///
    /// All but ``rank``, ``device``, ``sms`` and ``patience`` must be the same at every rank:
    ///
    /// - ``experts`` and ``world``: so many experts over so many ranks, as evenly as can be; or ``firsts``: the first
    ///   expert of each rank, and the number of experts.
    /// - ``top_k``: choices of a token, 1 to 32. ``max_tokens``: the most tokens that any rank has.
    /// - ``hidden``: values of a result, a multiple of 8 (of 16 with ``quantize``), of ``dtype``, ``"bfloat16"`` or ``"float16"``.
    /// - ``quantize``: tokens are of ``hidden`` values of ``dtype``, and arrive as e4m3 with a scale for each 128: ``"float32"``, or
    ///   ``"ue8m0"`` for powers of two in a byte each. Compute capability 8.9.
    /// - else ``token_bytes``: bytes of a token, a multiple of 16; as a result has, unless told; and ``scale_bytes``: bytes of its
    ///   scales, a multiple of 4: pad each token's if they are fewer. Neither are looked at.
    /// - ``padding``: rows of an expert start on a multiple of this.
    /// - ``exact``: let each choice's result come back by itself, to be summed where the token is from, in the order of choices: sums
    ///   then do not depend on which rank has which experts. Up to ``top_k`` rows come back then, not one of each rank.
    ///
    /// ``sms`` is how many SMs a launch takes at most; 0 stands for all. ``patience``: for how many seconds kernels wait for tokens
    /// once all choices are there; twice that for results, three times for choices.
    #[staticmethod]
    #[pyo3(signature = (
        engine, /, *, rank, device, top_k, max_tokens, hidden, experts = None, world = None, firsts = None,
        dtype = "bfloat16", quantize = None, token_bytes = None, scale_bytes = 0, padding = 1, exact = false,
        sms = 0, patience = 5.0,
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword")]
    fn open(
        engine: &Bound<'_, TransferEngine>,
        rank: u32,
        device: u32,
        top_k: u32,
        max_tokens: u32,
        hidden: u32,
        experts: Option<u32>,
        world: Option<u32>,
        firsts: Option<Vec<u32>>,
        dtype: &str,
        quantize: Option<&str>,
        token_bytes: Option<u32>,
        scale_bytes: u32,
        padding: u32,
        exact: bool,
        sms: u32,
        patience: f64,
    ) -> PyResult<GpuJoining> {
        let number = match format(dtype)? {
            Format::Bf16 => Number::Bf16,
            Format::Fp16 => Number::Fp16,
        };
        let fp8 = |scales| Payload::Fp8 { from: number, scales };
        whole_words(scale_bytes)?;
        let payload = match (quantize, token_bytes, scale_bytes) {
            // What does not fit is no multiple of 16 either, and refused.
            (None, token_bytes, scale_bytes) => Payload::Raw {
                token_bytes: token_bytes.unwrap_or_else(|| hidden.checked_mul(2).unwrap_or(1)),
                scale_bytes,
            },
            (Some("float32"), None, 0) => fp8(Scales::Float),
            (Some("ue8m0"), None, 0) => fp8(Scales::Power),
            (Some("float32" | "ue8m0"), ..) => {
                let message = "token_bytes and scale_bytes are of tokens that are not quantised";
                return Err(errors::config(message));
            }
            (Some(other), ..) => {
                let message = format!("scales of {other:?}: \"float32\" and \"ue8m0\" can be");
                return Err(errors::config(&message));
            }
        };
        let firsts = placement(experts, world, firsts)?;
        let shape = Shape {
            firsts,
            top_k,
            max_tokens,
            payload,
            values: hidden,
            results: number,
            padding,
            exact,
        };
        let geometry =
            Geometry::new(&shape).map_err(|error| errors::moe(&MoeError::Shape(error)))?;
        let timeout = seconds(patience)?;
        let config = Config { rank, gpu: device, shape: shape.clone(), sms, timeout };
        let py = engine.py();
        let core = engine.get().core()?;
        let opened = py.detach(|| gpu::AllToAll::open(&core.engine, &config));
        let opened = opened.map_err(|error| errors::moe(&error))?;
        let seat = opened.seat().to_bytes();
        let state = State::Joining(Box::new(opened));
        let common = Common::new(engine, &core.exchanges, state, rank, &shape.firsts);
        Ok(GpuJoining { shared: Arc::new(Shared { common, shape, geometry, gpu: device }), seat })
    }

    /// Enqueues the way out: this rank's tokens, and those of all ranks that chose its experts. Every rank has to, those without
    /// tokens too.
    ///
    /// - ``x``: ``[tokens][token_bytes]``, or ``[tokens][hidden]`` of ``dtype`` if they are quantised. ``scales``:
    ///   ``[tokens][scale_bytes]``, if they are not, and have some.
    /// - ``indices``: ``int32`` or ``int64`` of ``[tokens][top_k]``: experts, each once for a token, or -1 for a choice that was
    ///   dropped. ``weights``: ``float32`` of the same shape.
    /// - ``count``: if given, the ``int32`` in it is the number of tokens when the stream comes here; the arrays say for how many
    ///   there is memory.
    /// - ``out`` and ``out_scales``: whole rows for what arrives; ``max_rows`` are always enough. ``counts``: ``int32``, tokens for
    ///   each of this rank's experts. ``offsets``: ``int32``, the first row of each, and one entry more: all rows, padding
    ///   included.
    /// - ``slots``: for experts that gather. If given, each token arrives once: token ``t`` of rank ``s`` at slot
    ///   ``s * max_tokens + t`` of ``out``, which has ``max_slots`` of them; and this, ``int32``, says of each row which slot it is,
    ///   or -1 where it only pads; ``max_rows`` are always enough. Slots of tokens that did not come are left as they are.
    /// - ``clear_padding``: write zeros to rows that only pad, or -1 to their slots.
    /// - ``stream``: an object that has ``__cuda_stream__``, or a handle. ``half``: ``"both"``, or first ``"send"``, which waits for nothing,
    ///   and later ``"receive"`` with the same arguments; no SM is taken in between.
    #[pyo3(signature = (
        x, indices, weights, scales = None, *, out, out_scales = None, slots = None, counts, offsets, count = None,
        clear_padding = true, stream, half = "both"
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is an array")]
    fn dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
        out_scales: Option<&Bound<'_, PyAny>>,
        slots: Option<&Bound<'_, PyAny>>,
        counts: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        count: Option<&Bound<'_, PyAny>>,
        clear_padding: bool,
        stream: &Bound<'_, PyAny>,
        half: &str,
    ) -> PyResult<()> {
        let Shared { shape, geometry, .. } = &*self.shared;
        let half = super::half(half)?;
        let stream = memory::stream(stream)?;
        let (scale_bytes, quantised) =
            (geometry.scale_bytes, matches!(shape.payload, Payload::Fp8 { .. }));
        needs("scales", scale_bytes != 0 && !quantised, scales.is_some())?;
        needs("out_scales", scale_bytes != 0, out_scales.is_some())?;
        let x_bytes = if quantised { shape.values * 2 } else { geometry.token_bytes };
        let x = Array::of("x", x)?;
        if let Payload::Fp8 { from, .. } = shape.payload {
            x.are_results(from)?;
        }
        let tokens = x.rows(x_bytes)?;
        let choices = u64::from(tokens) * u64::from(shape.top_k);
        let by_x = format!("of [tokens, top_k], and x has {tokens} rows of {x_bytes} bytes");
        let indices = Array::of("indices", indices)?;
        let wide_indices = match indices.memory.item {
            Some(item) if !item.are_bytes() => item.are_wide(),
            _ => choices > 0 && indices.bytes == choices * 8,
        };
        let needed = choices * if wide_indices { 8 } else { 4 };
        indices.exactly(needed, &format!("int32 or int64 {by_x}"))?;
        indices.is_of(if wide_indices { Item::INT64 } else { Item::INT32 })?;
        let weights = Array::of("weights", weights)?;
        weights.exactly(choices * 4, &format!("float32 {by_x}"))?;
        weights.is_of(Item::FLOAT32)?;
        let scales = scales.map(|scales| Array::of("scales", scales)).transpose()?;
        if let Some(scales) = &scales {
            let bytes = u64::from(tokens) * u64::from(scale_bytes);
            scales.exactly(bytes, "of [tokens, scale_bytes]")?;
        }
        let count = count.map(|count| Array::of("count", count)).transpose()?;
        if let Some(count) = &count {
            count.exactly(4, "one int32")?;
            count.is_of(Item::INT32)?;
        }
        let out = Array::to("out", out)?;
        let places = out.rows(geometry.token_bytes)?;
        let slots = slots.map(|slots| Array::to("slots", slots)).transpose()?;
        let rows = match &slots {
            None => places,
            Some(_) if places < self.max_slots() => {
                let message = format!(
                    "out has room for {places} tokens, there are {} slots",
                    self.max_slots()
                );
                return Err(errors::request(&message));
            }
            Some(slots) => slots.rows(4)?,
        };
        if let Some(slots) = &slots {
            slots.is_of(Item::INT32)?;
        }
        let out_scales = out_scales.map(|to| Array::to("out_scales", to)).transpose()?;
        if let Some(out_scales) = &out_scales {
            let places = if slots.is_some() { self.max_slots() } else { places };
            let bytes = u64::from(places) * u64::from(scale_bytes);
            out_scales.at_least(bytes, "of as many rows as out, of scale_bytes")?;
        }
        let experts = self.shared.experts();
        let (counts, offsets) = (Array::to("counts", counts)?, Array::to("offsets", offsets)?);
        counts.at_least(experts * 4, "int32, one for each of this rank's experts")?;
        offsets.at_least(
            (experts + 1) * 4,
            "int32, one for each of this rank's experts, and one more",
        )?;
        counts.is_of(Item::INT32)?;
        offsets.is_of(Item::INT32)?;
        let at = |array: &Option<Array>| array.as_ref().map_or(0, |array| array.address);
        let sent = Tokens {
            count: match &count {
                None => Count::Here(tokens),
                Some(count) => Count::At { address: count.address, most: tokens },
            },
            x: x.address,
            scales: at(&scales),
            indices: indices.address,
            wide_indices,
            weights: weights.address,
        };
        let received = Rows {
            x: out.address,
            scales: at(&out_scales),
            slots: at(&slots),
            rows,
            counts: counts.address,
            offsets: offsets.address,
            clear_padding,
        };
        if tokens > shape.max_tokens && count.is_none() {
            let message = format!("{tokens} tokens, max_tokens is {}", shape.max_tokens);
            return Err(errors::request(&message));
        }
        let all = [&x, &indices, &weights, &out, &counts, &offsets];
        let others = [&scales, &out_scales, &slots, &count].into_iter().flatten();
        let all: Vec<&Array> = all.into_iter().chain(others).collect();
        let launched = self.shared.call(py, |joined| {
            if let Some(what) = joined.not_here(&all) {
                return Ok(Err(what));
            }
            // SAFETY: a stream of the GPU, and arrays of its that stay as they are until it has come past, as the caller
            // promises; they are as long as is said here. Graphs, turns and SMs are the caller's, too.
            unsafe {
                joined.exchange.dispatch(
                    with_exposed_provenance_mut(stream),
                    half,
                    &sent,
                    &received,
                )?
            };
            if half != Half::Receive {
                joined.tokens = tokens.min(shape.max_tokens);
            }
            Ok(Ok(()))
        })?;
        launched.map_err(|what| elsewhere(what, self.shared.gpu))
    }

    /// Enqueues the way back: the results of the tokens received, and those of this rank's own: for each the sum of its
    /// choices' results, times their weights; zero for a token that chose none.
    ///
    /// ``y`` is ``[rows][hidden]`` of ``dtype``, in the rows of the dispatch before; ``out`` is ``[tokens][hidden]``, for as many
    /// tokens as that had memory for. ``accumulate``: add to what is there. ``stream`` and ``half`` as there.
    #[pyo3(signature = (y, *, out, accumulate = false, stream, half = "both"))]
    fn combine(
        &self,
        py: Python<'_>,
        y: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        accumulate: bool,
        stream: &Bound<'_, PyAny>,
        half: &str,
    ) -> PyResult<()> {
        let half = super::half(half)?;
        let stream = memory::stream(stream)?;
        let row = self.shared.shape.values * 2;
        let y = Array::of("y", y)?;
        y.are_results(self.shared.shape.results)?;
        let rows = y.rows(row)?;
        let out = Array::to("out", out)?;
        out.are_results(self.shared.shape.results)?;
        let room = out.rows(row)?;
        let launched = self.shared.call(py, |joined| {
            if room < joined.tokens {
                return Ok(Err(Refused::Short(u64::from(joined.tokens) * u64::from(row))));
            }
            if let Some(what) = joined.not_here(&[&y, &out]) {
                return Ok(Err(Refused::Elsewhere(what)));
            }
            let (y, out) = (y.address, out.address);
            let results = Results { y, rows, out, tokens: room, accumulate };
            // SAFETY: as for dispatch.
            unsafe {
                joined.exchange.combine(with_exposed_provenance_mut(stream), half, &results)?;
            };
            Ok(Ok(()))
        })?;
        launched.map_err(|refused| match refused {
            Refused::Short(needed) => short("out", out.bytes, needed, "of [tokens, hidden]"),
            Refused::Elsewhere(what) => elsewhere(what, self.shared.gpu),
        })
    }

    /// What went wrong in the kernels until now. Waits for nothing, also while another thread is in a call: what is under way may not be
    /// in it yet.
    fn report(&self) -> PyResult<MoeReport> {
        Ok(MoeReport::of_gpu(&self.kernels()?))
    }

    /// The ranks of which nothing was late until now. Who was, is left out from the next round on.
    #[getter]
    fn active_ranks(&self) -> PyResult<Vec<u32>> {
        let late = self.kernels()?.late();
        Ok((0..self.shared.geometry.world).filter(|rank| late >> rank & 1 == 0).collect())
    }

    /// Ends all waits of this rank's kernels, as if they had lasted too long: those of launches to come, too, until all start over. Also for
    /// another thread than one that waits for the GPU, in ``start_over`` or ``close``; for other ranks ``start_over`` waits all the same.
    ///
    /// It goes by a stream of its own, which may have to wait if it shares one of the GPU's connections with what waits: 8, unless
    /// ``CUDA_DEVICE_MAX_CONNECTIONS=32`` was in the environment before CUDA began. It was not measured with the default.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let control = self.control.get()?;
        // Which has nothing to end once it is closed.
        self.kernels()?;
        py.detach(|| control.abort()).map_err(|error| errors::moe(&error))
    }

    /// Begins with the first round again, after something went wrong: nobody is left out any more. All ranks have to call it. Waits
    /// for all that was given to this rank's GPU, as long as that takes, and then, for ``timeout``, for the others; other threads
    /// run meanwhile.
    ///
    /// If a rank is gone, or does not come in time, the exchange is over: open a new one with those who are left.
    #[pyo3(signature = (*, timeout = None))]
    fn start_over(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout: Duration = self.shared.common.timeout(timeout)?;
        self.shared.call(py, |joined| joined.exchange.start_over(timeout))
    }

    /// The most rows that a round can bring here.
    #[getter]
    fn max_rows(&self) -> u64 {
        self.shared.geometry.max_rows
    }

    /// Tokens of all ranks: slots for tokens that experts gather.
    #[getter]
    fn max_slots(&self) -> u32 {
        // Below 2^16.
        self.shared.geometry.world * self.shared.shape.max_tokens
    }

    /// Bytes of a row that arrives.
    #[getter]
    fn token_bytes(&self) -> u32 {
        self.shared.geometry.token_bytes
    }

    /// Bytes of its scales.
    #[getter]
    fn scale_bytes(&self) -> u32 {
        self.shared.geometry.scale_bytes
    }

    /// About how many bytes of the GPU's memory this rank takes, beside what is passed.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.shared.geometry.inbox_bytes + self.shared.geometry.plan_bytes
    }

    /// Ends the exchange, once the GPU has done all that it was given: ``abort`` hurries that. Closing its engine does so, too. Graphs that captured it must
    /// not be replayed any more.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.common.close(py)
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.shared.common.is_closed()
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let common = &self.shared.common;
        let state = if common.is_closed() { ", closed" } else { "" };
        format!("<GpuAllToAll {}, GPU {}{state}>", common.describe(), self.shared.gpu)
    }
}

/// Memory of the GPU, as it was given.
struct Array {
    what: &'static str,
    address: u64,
    bytes: u64,
    /// Held while it is looked at.
    memory: Memory,
}

impl Array {
    /// To be read.
    fn of(what: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let memory = memory::on_gpu(what, object)?;
        // An empty array may lie nowhere.
        let address = if memory.len == 0 { 0 } else { memory.ptr.as_ptr() as u64 };
        Ok(Self { what, address, bytes: memory.len as u64, memory })
    }

    /// To be written.
    fn to(what: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let array = Self::of(what, object)?;
        if array.memory.readonly {
            return Err(errors::request(&format!("{what} is read only")));
        }
        Ok(array)
    }

    /// Refuses other items than these, where it says of what type they are.
    fn is_of(&self, wanted: Item) -> PyResult<()> {
        match self.memory.item {
            // Of none it has none of a wrong type.
            Some(item) if self.bytes > 0 && !item.may_be(wanted) => {
                Err(errors::request(&memory::unlike(self.what, item, wanted)))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what cannot be the exchange's results, nor what tokens are quantised from.
    fn are_results(&self, number: Number) -> PyResult<()> {
        let wanted = match number {
            Number::Bf16 => "bfloat16",
            Number::Fp16 => "float16",
        };
        self.memory.are_results(self.what, wanted)
    }

    /// How many rows of so many bytes.
    fn rows(&self, row: u32) -> PyResult<u32> {
        let (bytes, what) = (self.bytes, self.what);
        if !bytes.is_multiple_of(u64::from(row)) {
            let message = format!("{what} has {bytes} bytes, which are no whole rows of {row}");
            return Err(errors::request(&message));
        }
        // More rows than a launch can be told of are never used.
        Ok(u32::try_from(bytes / u64::from(row)).unwrap_or(u32::MAX - 1))
    }

    fn exactly(&self, needed: u64, kind: &str) -> PyResult<()> {
        if self.bytes == needed { Ok(()) } else { Err(short(self.what, self.bytes, needed, kind)) }
    }

    fn at_least(&self, needed: u64, kind: &str) -> PyResult<()> {
        if self.bytes >= needed { Ok(()) } else { Err(short(self.what, self.bytes, needed, kind)) }
    }
}

fn short(what: &str, bytes: u64, needed: u64, kind: &str) -> PyErr {
    errors::request(&format!("{what} has {bytes} bytes instead of {needed}: {kind}"))
}

fn elsewhere(what: &str, gpu: u32) -> PyErr {
    errors::request(&format!("{what} is not in the memory of GPU {gpu}, which this rank's is"))
}

/// Refuses scales that kernels do not copy by whole words.
fn whole_words(scale_bytes: u32) -> PyResult<()> {
    if scale_bytes.is_multiple_of(4) {
        return Ok(());
    }
    let padded = u64::from(scale_bytes).next_multiple_of(4);
    let message = format!(
        "scale_bytes is {scale_bytes}, no multiple of 4: pad the scales of each token to {padded} bytes, and say \
         scale_bytes={padded}"
    );
    Err(errors::config(&message))
}

/// Refuses scales where there are none, and none where there are some: before anything is enqueued.
fn needs(what: &str, needed: bool, given: bool) -> PyResult<()> {
    match (needed, given) {
        (false, true) => {
            Err(errors::request(&format!("{what} was given, but there are none here")))
        }
        (true, false) => Err(errors::request(&format!("{what} is missing: tokens have scales"))),
        _ => Ok(()),
    }
}
