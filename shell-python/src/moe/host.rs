//! `immwire.moe.HostAllToAll`: the exchange in host memory. Arguments are copied in, the exchange runs detached, and results are
//! copied out.
//!
//! # Invariants
//!
//! - The exchange never sees memory of Python objects, which other threads may write to: it works on copies, and
//!   what the caller lent is written to when the call has succeeded, and only then, and only where something has come.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use immwire::moe::gpu::Half;
use immwire::moe::{Config, Control, Format, NO_SLOT, Results, Rows, Tokens};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use super::{Common, Failure, MoeReport, format, placement, writable};
use crate::buffer::View;
use crate::engine::TransferEngine;
use crate::errors;
use crate::fork::Owned;
use crate::memory::{self, Memory};

/// Where an exchange stands.
#[derive(Default)]
enum State {
    Joining(Box<immwire::moe::Joining>),
    Joined(Box<immwire::moe::AllToAll>),
    #[default]
    Closed,
}

/// Copies of what was lent; they keep their memory from round to round.
#[derive(Default)]
struct Stage {
    /// What a call sends, until the exchange has taken it: a call that is refused changes nothing.
    new: Sent,
    /// What a first half has sent, and the second goes on with.
    sent: Sent,
    rows: Vec<u8>,
    row_scales: Vec<u8>,
    slots: Vec<u32>,
    /// Rows of the dispatch before.
    received: usize,
}

/// Tokens and their scales, or results.
#[derive(Default)]
struct Sent {
    x: Vec<u8>,
    scales: Vec<u8>,
}

#[derive(Default)]
struct Held {
    state: State,
    stage: Stage,
}

/// What both halves share.
struct Shared {
    common: Common<Held>,
    config: Config,
    rounds: AtomicU64,
}

/// What was received: tokens for each of this rank's experts, and where their rows are.
#[pyclass(module = "immwire.moe", frozen)]
pub(crate) struct Received {
    /// Tokens for each of this rank's experts.
    #[pyo3(get)]
    counts: Vec<u32>,
    /// The first row of each, and one entry more: all rows, padding included.
    #[pyo3(get)]
    offsets: Vec<u32>,
}

#[pymethods]
impl Received {
    fn __repr__(&self) -> String {
        format!("Received(counts={:?}, offsets={:?})", self.counts, self.offsets)
    }
}

/// An exchange whose buffers are there, and which waits to be told of the other ranks.
#[pyclass(module = "immwire.moe", frozen)]
pub(crate) struct Joining {
    shared: Arc<Shared>,
    seat: Vec<u8>,
}

#[pymethods]
impl Joining {
    /// What the other ranks need of this one: bytes, to be passed to all by whatever they find each other with.
    #[getter]
    fn seat<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.seat)
    }

    /// Connects to the others. ``seats`` are those of all ranks, in their order, this one's included.
    ///
    /// It can be called once: if it fails, open anew, but for seats that cannot be right. Other threads run meanwhile.
    #[pyo3(signature = (seats, /, *, timeout = None))]
    fn join(
        &self,
        py: Python<'_>,
        seats: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<HostAllToAll> {
        let common = &self.shared.common;
        let timeout = common.timeout(timeout)?;
        let seats = common.seats(seats)?;
        let (max_rows, max_slots, control) =
            common.call(py, |held| match std::mem::take(&mut held.state) {
                State::Joining(joining) => {
                    let exchange = joining.join(&seats, timeout)?;
                    let control = Arc::clone(exchange.control());
                    let most = (exchange.max_rows(), exchange.max_slots(), control);
                    held.state = State::Joined(Box::new(exchange));
                    Ok(most)
                }
                other => {
                    let joined = matches!(other, State::Joined(_));
                    held.state = other;
                    Err(if joined { Failure::Joined } else { Failure::Closed })
                }
            })?;
        Ok(HostAllToAll {
            shared: Arc::clone(&self.shared),
            max_rows,
            max_slots,
            control: Owned::new(control),
        })
    }

    fn __repr__(&self) -> String {
        format!("<Joining {}, {} bytes of seat>", self.shared.common.describe(), self.seat.len())
    }
}

/// Dispatch and combine among ranks, in host memory, over any transport. Made by ``HostAllToAll.open`` and ``join``.
///
/// Every rank calls ``dispatch`` and then ``combine``, round after round. A rank that is gone, or of which nothing comes in time, is left out,
/// and the others go on with all the rest: ``active_ranks`` and ``report()`` say so, no exception does. To take everybody in again, open a
/// new exchange on the same engines. One thread at a time: a second call
/// meanwhile raises ``RequestError``; ``report``, ``active_ranks`` and ``abort`` can be called at any time. Whatever a round needs is copied in and out once more than in Rust, so that
/// other threads may do with the arrays what they like.
#[pyclass(module = "immwire.moe", frozen)]
pub(crate) struct HostAllToAll {
    shared: Arc<Shared>,
    max_rows: usize,
    max_slots: usize,
    /// Beside calls, which hold the rest.
    control: Owned<Arc<Control>>,
}

impl HostAllToAll {
    /// Refuses scales where there are none, and none where there are some: before anything is sent.
    fn needs(&self, what: &str, given: bool) -> PyResult<()> {
        match (self.shared.config.scale_bytes, given) {
            (0, true) => {
                Err(errors::request(&format!("{what} was given, but tokens have no scales")))
            }
            (1.., false) => Err(errors::request(&format!("{what} is missing: tokens have scales"))),
            _ => Ok(()),
        }
    }
}

#[pymethods]
impl HostAllToAll {
    /// Makes the buffers of one rank.
    ///
    /// All but ``rank`` must be the same at every rank:
    ///
    /// - ``experts`` and ``world``: so many experts over so many ranks, as evenly as can be; or ``firsts``: the first
    ///   expert of each rank, and the number of experts.
    /// - ``top_k``: choices of a token, 1 to 32. ``max_tokens``: the most tokens that any rank has.
    /// - ``hidden``: values of a result, a multiple of 8, of ``dtype``, ``"bfloat16"`` or ``"float16"``.
    /// - ``token_bytes``: bytes of a token on the way out, a multiple of 16; as a result has, unless told.
    ///   ``scale_bytes``: bytes of its scales. Neither are looked at.
    /// - ``padding``: rows of an expert start on a multiple of this, and are padded to it with zeros.
    /// - ``chunk_tokens``: tokens that travel together; all, unless told. Fewer bound the buffers.
    /// - ``exact``: let each choice's result come back by itself, to be summed where the token is from, in the order of choices: sums
    ///   then do not depend on which rank has which experts. Up to ``top_k`` rows come back then, not one of each rank.
    #[staticmethod]
    #[pyo3(signature = (
        engine, /, *, rank, top_k, max_tokens, hidden, experts = None, world = None, firsts = None,
        token_bytes = None, scale_bytes = 0, dtype = "bfloat16", padding = 1, chunk_tokens = None,
        exact = false,
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword")]
    fn open(
        engine: &Bound<'_, TransferEngine>,
        rank: u32,
        top_k: u32,
        max_tokens: u32,
        hidden: u32,
        experts: Option<u32>,
        world: Option<u32>,
        firsts: Option<Vec<u32>>,
        token_bytes: Option<u32>,
        scale_bytes: u32,
        dtype: &str,
        padding: u32,
        chunk_tokens: Option<u32>,
        exact: bool,
    ) -> PyResult<Joining> {
        let firsts = placement(experts, world, firsts)?;
        let format = format(dtype)?;
        let some = |what, number| {
            let none = || errors::config(&format!("{what} is 1 at least"));
            NonZeroU32::new(number).ok_or_else(none)
        };
        let config = Config {
            rank,
            firsts,
            top_k,
            max_tokens,
            // What does not fit is no multiple of 16 either, and refused.
            token_bytes: token_bytes.unwrap_or_else(|| hidden.checked_mul(2).unwrap_or(1)),
            scale_bytes,
            hidden,
            format,
            padding: some("padding", padding)?,
            chunk_tokens: some("chunk_tokens", chunk_tokens.unwrap_or(max_tokens.max(1)))?,
            exact,
        };
        let py = engine.py();
        let core = engine.get().core()?;
        let opened = py.detach(|| immwire::moe::AllToAll::open(&core.engine, &config));
        let opened = opened.map_err(|error| errors::moe(&error))?;
        let seat = opened.seat().to_bytes();
        let held = Held { state: State::Joining(Box::new(opened)), stage: Stage::default() };
        let common = Common::new(engine, &core.exchanges, held, rank, &config.firsts);
        let shared = Shared { common, config, rounds: AtomicU64::new(0) };
        Ok(Joining { shared: Arc::new(shared), seat })
    }

    /// Sends this rank's tokens, and receives those that chose its experts. Every rank has to call it, those without
    /// tokens too.
    ///
    /// - ``x``: ``[tokens][token_bytes]``, and ``scales``: ``[tokens][scale_bytes]``, of any element type.
    /// - ``indices``: ``int32`` of ``[tokens][top_k]``: experts, each once for a token, or -1 for a choice that was
    ///   dropped. ``weights``: ``float32`` of the same shape.
    /// - ``out`` and ``out_scales``: whole rows for what arrives; ``max_rows`` are always enough. Rows beyond those
    ///   that arrive are left as they are.
    /// - ``slots``: for experts that gather. If given, each token arrives once: token ``t`` of rank ``s`` at slot
    ///   ``s * max_tokens + t`` of ``out``, which has ``max_slots`` of them; and this, ``int32``, says of each row which slot it is,
    ///   or -1 where it only pads. Slots of tokens that did not come are left as they are.
    ///
    /// ``half``: ``"both"``, or first ``"send"``, which waits for nothing but room and returns None, and then, after other
    /// work and with the same arguments, ``"receive"``: what counts of the tokens is what they were at the first.
    ///
    /// ``timeout`` is how long a chunk of a rank is waited for that gives no sign; the same at every rank. Who is late, or gone, is left out,
    /// and the call returns without it: see ``report``. Who is kept waiting itself is waited for four times as long at most. Other threads
    /// run meanwhile; Ctrl-C is heard when it is over.
    #[pyo3(signature = (
        x, indices, weights, scales = None, *, out, out_scales = None, slots = None, half = "both",
        timeout = None
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
        half: &str,
        timeout: Option<f64>,
    ) -> PyResult<Option<Received>> {
        let Shared { common, config, .. } = &*self.shared;
        let (half, timeout) = (super::half(half)?, common.timeout(timeout)?);
        self.needs("scales", scales.is_some())?;
        self.needs("out_scales", out_scales.is_some())?;
        let top_k = config.top_k;
        let indices = words(indices, "indices", "int32", b"il", top_k, i32::from_ne_bytes)?;
        let weights = words(weights, "weights", "float32", b"f", top_k, f32::from_ne_bytes)?;
        let (x, scales) = (memory::lent(x)?, scales.map(memory::lent).transpose()?);
        let (out, out_scales) =
            (writable("out", out)?, out_scales.map(|out| writable("out_scales", out)).transpose()?);
        let bytes = |bytes: u32| usize::try_from(bytes).unwrap_or(usize::MAX);
        let (row, row_scales) = (bytes(config.token_bytes), bytes(config.scale_bytes));
        if let Some(slots) = slots {
            four_bytes(&View::typed(slots)?, "slots", "int32", b"il")?;
        }
        let slots = slots.map(|slots| writable("slots", slots)).transpose()?;
        let max_rows = self.max_rows;
        let max_places = if slots.is_some() { self.max_slots } else { max_rows };
        common.call(py, |held| {
            let Held { state: State::Joined(exchange), stage } = held else {
                return Err(Failure::Closed);
            };
            if half != Half::Receive {
                x.copy_to(&mut stage.new.x, usize::MAX);
                stage.new.scales.clear();
                if let Some(scales) = &scales {
                    scales.copy_to(&mut stage.new.scales, usize::MAX);
                }
            }
            let Sent { x, scales } = if half == Half::Receive { &stage.sent } else { &stage.new };
            let tokens = Tokens { x, scales, indices: &indices, weights: &weights };
            if half == Half::Send {
                exchange.dispatch_send(&tokens, timeout)?;
                std::mem::swap(&mut stage.new, &mut stage.sent);
                return Ok(None);
            }
            let lent = |memory: Option<&Memory>, row: usize| {
                memory.map_or(0, |memory| memory.len.min(max_places.saturating_mul(row)))
            };
            stage.slots.resize(slots.as_ref().map_or(0, |to| (to.len / 4).min(max_rows)), 0);
            stage.rows.resize(lent(Some(&out), row), 0);
            stage.row_scales.resize(lent(out_scales.as_ref(), row_scales), 0);
            let named = slots.is_some().then_some(stage.slots.as_mut_slice());
            let rows = Rows { x: &mut stage.rows, scales: &mut stage.row_scales, slots: named };
            let received = match half {
                Half::Receive => exchange.dispatch_receive(&tokens, rows, timeout)?,
                _ => exchange.dispatch(&tokens, rows, timeout)?,
            };
            let (counts, offsets) = (received.counts.to_vec(), received.offsets.to_vec());
            stage.received = bytes(offsets.last().copied().unwrap_or(0));
            let named = || stage.slots.iter().take(stage.received);
            let arrived = |from: &[u8], row: usize, to: &Memory| {
                if slots.is_none() {
                    to.copy_from(from.get(..stage.received * row).unwrap_or(from));
                }
                // Slots of tokens that did not come are whoever's; of `from` they are as some earlier round has left them. None are
                // named without `slots`.
                for slot in named().filter(|slot| **slot != NO_SLOT) {
                    let at = bytes(*slot) * row;
                    to.copy_from_at(at, from.get(at..at + row).unwrap_or_default());
                }
            };
            if let Some(slots) = &slots {
                slots.copy_from(&named().flat_map(|slot| slot.to_ne_bytes()).collect::<Vec<_>>());
            }
            arrived(&stage.rows, row, &out);
            if let Some(out_scales) = &out_scales {
                arrived(&stage.row_scales, row_scales, out_scales);
            }
            Ok(Some(Received { counts, offsets }))
        })
    }

    /// Sends the results of the tokens received, and receives those of this rank's own: for each the sum of its
    /// choices' results, times their weights; zero for a token that chose none.
    ///
    /// ``y`` is ``[rows][hidden]`` of ``dtype``, in the rows of the dispatch before; ``out`` is ``[tokens][hidden]``.
    /// ``accumulate``: add to what is there. ``half`` as in ``dispatch``.
    ///
    /// ``timeout`` is how long a chunk of a rank is waited for that gives no sign; the same at every rank. Who is late, or gone, is left out,
    /// and the call returns without it: see ``report``. Who is kept waiting itself is waited for four times as long at most. Other threads
    /// run meanwhile; Ctrl-C is heard when it is over.
    #[pyo3(signature = (y, *, out, accumulate = false, half = "both", timeout = None))]
    fn combine(
        &self,
        py: Python<'_>,
        y: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        accumulate: bool,
        half: &str,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let Shared { common, config, .. } = &*self.shared;
        let (half, timeout) = (super::half(half)?, common.timeout(timeout)?);
        let (y, out) = (memory::lent(y)?, writable("out", out)?);
        let wanted = match config.format {
            Format::Bf16 => "bfloat16",
            Format::Fp16 => "float16",
        };
        y.are_results("y", wanted)?;
        out.are_results("out", wanted)?;
        let hidden = usize::try_from(config.hidden).unwrap_or(usize::MAX);
        let rounds = common.call(py, |held| {
            let Held { state: State::Joined(exchange), stage } = held else {
                return Err(Failure::Closed);
            };
            // What lies behind the rows of this round need not be copied.
            let rows = stage.received.saturating_mul(hidden).saturating_mul(Format::BYTES);
            if half != Half::Receive {
                y.copy_to(&mut stage.new.x, rows);
            }
            if half == Half::Send {
                exchange.combine_send(&stage.new.x, timeout)?;
                std::mem::swap(&mut stage.new, &mut stage.sent);
                return Ok(exchange.rounds());
            }
            if accumulate {
                out.copy_to(&mut stage.rows, usize::MAX);
            } else {
                stage.rows.resize(out.len, 0);
            }
            let Sent { x: y, .. } = if half == Half::Receive { &stage.sent } else { &stage.new };
            let results = Results { y, out: &mut stage.rows, accumulate };
            match half {
                Half::Receive => exchange.combine_receive(results, timeout)?,
                _ => exchange.combine(results, timeout)?,
            }
            out.copy_from(&stage.rows);
            Ok(exchange.rounds())
        })?;
        self.shared.rounds.store(rounds, Ordering::Relaxed);
        Ok(())
    }

    /// What went wrong until now: who is left out, since when, and why. Waits for nothing, also while another thread is in a call.
    fn report(&self) -> PyResult<MoeReport> {
        Ok(MoeReport::of_host(&self.control.get()?.report()))
    }

    /// The ranks that are not left out, this one included.
    #[getter]
    fn active_ranks(&self) -> PyResult<Vec<u32>> {
        Ok(self.control.get()?.active_ranks())
    }

    /// Ends all waits of this rank for others, as if they had lasted too long: those of calls to come, too. Who has not sent by then is
    /// left out. For another thread than the one in a call.
    fn abort(&self) -> PyResult<()> {
        self.control.get()?.abort();
        Ok(())
    }

    /// The most rows that a round can bring here.
    #[getter]
    fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Tokens of all ranks: slots for tokens that experts gather.
    #[getter]
    fn max_slots(&self) -> usize {
        self.max_slots
    }

    /// How many rounds are complete.
    #[getter]
    fn rounds(&self) -> u64 {
        self.shared.rounds.load(Ordering::Relaxed)
    }

    /// Ends the exchange, once a call under way in another thread has. Closing its engine does so, too.
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
        let state = if self.shared.common.is_closed() { ", closed" } else { "" };
        format!("<HostAllToAll {}, {} rounds{state}>", self.shared.common.describe(), self.rounds())
    }
}

/// Refuses arrays of other items than of four bytes whose letter is one of `letters`.
fn four_bytes(view: &View, what: &str, dtype: &str, letters: &[u8]) -> PyResult<()> {
    if view.itemsize() == 4 && view.letter().is_some_and(|letter| letters.contains(&letter)) {
        return Ok(());
    }
    let (format, bytes) = (String::from_utf8_lossy(view.format()), view.itemsize());
    Err(PyTypeError::new_err(format!("{what} are {dtype}, not {format:?} of {bytes} bytes")))
}

/// A copy of an array of `[tokens][top_k]`, of items of four bytes whose letter is one of `letters`.
fn words<T>(
    object: &Bound<'_, PyAny>,
    what: &str,
    dtype: &str,
    letters: &[u8],
    top_k: u32,
    read: impl Fn([u8; 4]) -> T,
) -> PyResult<Vec<T>> {
    let view = View::typed(object)?;
    four_bytes(&view, what, dtype, letters)?;
    let shape = view.shape();
    if !matches!(shape[..], [_, choices] if u32::try_from(choices) == Ok(top_k)) {
        let message = format!("{what} have the shape {shape:?} instead of [tokens, {top_k}]");
        return Err(errors::request(&message));
    }
    let bytes = view.to_vec();
    let (items, _) = bytes.as_chunks();
    Ok(items.iter().map(|item| read(*item)).collect())
}
