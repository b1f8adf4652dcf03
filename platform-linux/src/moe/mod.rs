//! Tokens to the ranks of their experts, and results back: dispatch and combine in host memory, over any transport.
//!
//! Every rank calls [`AllToAll::dispatch`] and then [`AllToAll::combine`], round after round. Dispatch gives each rank the
//! tokens that chose one of its experts, by expert and padded for a grouped GEMM, or each once with a list of which row is which;
//! combine brings the results back, weighted and summed. Each can be called in two halves, with other work between them: what was sent travels
//! meanwhile. What goes where is decided by [`immwire_core::moe`]; here bytes are copied, written and
//! waited for.
//!
//! It needs no GPU and no NIC. It is what kernels are compared with, and is not made for speed: each row is
//! copied once on either side.
//!
//! ```
//! use std::num::NonZeroU32;
//! use std::time::Duration;
//! use immwire::TransferEngine;
//! use immwire::moe::{AllToAll, Config, Format, Joining, Results, Rows, Seat, Tokens};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! const SECOND: Duration = Duration::from_secs(5);
//! // Two ranks, two experts each; a token chooses two, and has 8 values of bf16.
//! let config = |rank| Config {
//!     rank, firsts: vec![0, 2, 4], top_k: 2, max_tokens: 4, token_bytes: 16, scale_bytes: 0,
//!     hidden: 8, format: Format::Bf16,
//!     padding: NonZeroU32::MIN, chunk_tokens: NonZeroU32::new(4).unwrap(), exact: false,
//! };
//! let engines = [TransferEngine::builder().build()?, TransferEngine::builder().build()?];
//! let joining = [
//!     AllToAll::open(&engines[0], &config(0))?, AllToAll::open(&engines[1], &config(1))?,
//! ];
//! // Seats travel as bytes, by whatever the ranks find each other with.
//! let seats: Vec<Seat> = joining.iter().map(Joining::seat).collect();
//!
//! std::thread::scope(|scope| {
//!     for joining in joining {
//!         let seats = &seats;
//!         scope.spawn(move || {
//!             let mut exchange = joining.join(seats, SECOND).unwrap();
//!             let mut x = vec![0; exchange.max_rows() * 16];
//!             // One token of ones, to an expert of each rank. 0x3f80 is 1 in bf16.
//!             let token = [0x3f80_u16; 8].map(u16::to_le_bytes).concat();
//!             let tokens = Tokens { x: &token, scales: &[], indices: &[1, 2], weights: &[0.5, 0.25] };
//!             let rows = Rows { x: &mut x, scales: &mut [], slots: None };
//!             let received = exchange.dispatch(&tokens, rows, SECOND).unwrap();
//!             assert_eq!(received.counts.iter().sum::<u32>(), 2); // One from each rank.
//!             // The experts do nothing: 0.5 * 1 + 0.25 * 1.
//!             let mut out = vec![0; 16];
//!             let results = Results { y: &x, out: &mut out, accumulate: false };
//!             exchange.combine(results, SECOND).unwrap();
//!             assert_eq!(out, [0x3f40_u16; 8].map(u16::to_le_bytes).concat());
//!         });
//!     }
//! });
//! # Ok(())
//! # }
//! ```
//!
//! # Invariants
//!
//! - Rows and results are the same bytes in every run: rows by expert, source and token; a rank's part of a result is summed
//!   in `f32` in the order of the token's choices and rounded once, the parts in the order of ranks and rounded once more. Where
//!   sums are exact ([`Config::exact`]) there are no parts: all choices in their order, rounded once.
//! - A round goes in steps, and in each step every rank sends every other one the same number of writes, whatever the routes.
//!   Of two ranks that go on with each other neither begins a step before the other has begun the one before, so two counters in turn tell
//!   steps apart, and two slots in turn are enough for every buffer. Tables carry the number of their round besides.
//! - Every wait has a deadline, and a rank that does not come is left out, by the rules of [`Patience`](immwire_core::moe::Patience).
//!   The others' rounds go on: its tokens are zeros where its choices came, and not there where they did not; results of its experts
//!   are left out of sums. [`AllToAll::control`] says who it is, since when, and why, and ends waits ([`Control::abort`]).
//! - Ranks need not agree on who is left out. Each source has places of its own in every buffer of everybody, so what comes late of a
//!   rank that is left out lies where nobody looks; what it adds to counters is added to nobody else's. Whoever was left out learns of it
//!   by the end of its next call, and goes on with those who are left, if any.
//! - A step ends when what was sent in it has ended, to ranks that are left out, too. So nothing is written over that is still read.
//! - Who is left out stays out. To take everybody in again, or another in its place, make a new exchange of the same engines: what is still
//!   under way of the old one is counted nowhere (its counters are retired) and lies in its own memory.
//! - Dispatch and combine allocate nothing that grows with tokens.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use immwire_core::moe::{
    Arrival, Chunks, Layout, Placement, Routing, RoutingError, Shape, Sizes, SizesError,
    TableShape, Vector,
};
pub use immwire_core::moe::{NO_SLOT, slot_of};

use self::others::{At, Circle, Others, Own, Until, digest};
use crate::engine::TransferEngine;
use crate::region::Region;

pub use error::{MoeError, SeatError};
pub use number::Format;
pub use report::{Absent, Control, Phase, Report, Why};
pub use seat::Seat;

pub mod gpu;

mod error;
mod number;
mod others;
mod report;
mod seat;
#[cfg(test)]
mod tests;

/// Chunks from each rank for which there is room: one that is read, and one that comes already.
const DEPTH: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);

/// What an exchange is made for; the same at every rank but for `rank`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// This rank.
    pub rank: u32,
    /// The first expert of each rank, and the number of experts: see [`Placement::new`].
    pub firsts: Vec<u32>,
    /// Choices of a token, 1 to 32.
    pub top_k: u32,
    /// The most tokens that any rank has.
    pub max_tokens: u32,
    /// Bytes of a token on the way out, a multiple of 16. They are not looked at.
    pub token_bytes: u32,
    /// Bytes of its scales. They are not looked at either.
    pub scale_bytes: u32,
    /// Values of a result, a multiple of 8.
    pub hidden: u32,
    /// What results are made of.
    pub format: Format,
    /// Rows of an expert start on a multiple of this, and are padded to it with zeros.
    pub padding: NonZeroU32,
    /// Tokens that travel together: fewer bound the buffers.
    pub chunk_tokens: NonZeroU32,
    /// Whether each choice's result comes back by itself, to be summed where the token is from: sums then do not depend on which
    /// rank has which experts, for up to `top_k` rows on the way back in the place of one for each rank.
    pub exact: bool,
}

/// One rank's tokens.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// `[tokens][token_bytes]`.
    pub x: &'a [u8],
    /// `[tokens][scale_bytes]`.
    pub scales: &'a [u8],
    /// `[tokens][top_k]`: experts, each once for a token, or -1 for a choice that was dropped.
    pub indices: &'a [i32],
    /// `[tokens][top_k]`: what results are multiplied with.
    pub weights: &'a [f32],
}

/// Where received tokens go: each to a row for each expert that it chose, or once to a slot of its own, for experts that gather.
/// Memory for [`AllToAll::max_rows`] rows is always enough, and for [`AllToAll::max_slots`] slots needed.
#[derive(Debug)]
pub struct Rows<'a> {
    /// `[rows][token_bytes]`, whole rows; or `[slots][token_bytes]`.
    pub x: &'a mut [u8],
    /// `[rows][scale_bytes]`, of at least as many rows; or `[slots][scale_bytes]`.
    pub scales: &'a mut [u8],
    /// If given, tokens lie in slots, and this says of each row which one it is: [`slot_of`], or [`NO_SLOT`] where it only pads. Slots
    /// of tokens that did not come are left as they are.
    pub slots: Option<&'a mut [u32]>,
}

/// The results of the tokens that were received, and memory for those of this rank's own.
#[derive(Debug)]
pub struct Results<'a> {
    /// `[rows][hidden]`, in the rows of the dispatch before; what pads is not read.
    pub y: &'a [u8],
    /// `[tokens][hidden]`.
    pub out: &'a mut [u8],
    /// Adds to what is in `out`, before the parts of the ranks.
    pub accumulate: bool,
}

/// What was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received<'a> {
    /// Tokens for each of this rank's experts.
    pub counts: &'a [u32],
    /// The first row of each, and one entry more: all rows, padding included.
    pub offsets: &'a [u32],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Dispatch,
    ReceiveTokens,
    Combine,
    ReceiveResults,
    Over,
}

/// Where the parts of the receiving region begin.
#[derive(Debug, Clone, Copy)]
struct Places {
    dispatch: u64,
    combine: u64,
    len: u64,
}

/// An exchange whose buffers are there, and which waits to be told of the others.
#[derive(Debug)]
pub struct Joining {
    config: Config,
    sizes: Sizes,
    places: Places,
    inbox: Region,
    outbox: Region,
    own: Own,
}

/// What one rank's tokens chose in this round, and where their rows lie here.
#[derive(Debug)]
struct Source {
    tokens: u32,
    indices: Box<[i32]>,
    weights: Box<[f32]>,
    rows: Box<[u32]>,
}

/// Dispatch and combine among ranks, in host memory.
#[derive(Debug)]
pub struct AllToAll {
    others: Others,
    config: Config,
    sizes: Sizes,
    places: Places,
    chunks: Chunks,
    inbox: Region,
    outbox: Region,
    turn: Turn,
    round: u64,
    sources: Vec<Source>,
    counts: Vec<u32>,
    offsets: Vec<u32>,
    given: Vec<u32>,
    /// Results of each rank that were taken of a chunk.
    taken: Vec<u32>,
    vectors: Vec<Vector>,
    bytes: Vec<u8>,
    sum: Vec<f32>,
    total: Vec<f32>,
}

impl AllToAll {
    /// Makes the buffers of one rank. The engine needs a thread, or somebody who polls it during every call here and between
    /// halves, and four counters that are free.
    ///
    /// # Errors
    ///
    /// [`MoeError`]: such an exchange cannot be, or memory or counters cannot be had.
    pub fn open(engine: &TransferEngine, config: &Config) -> Result<Joining, MoeError> {
        let placement = Placement::new(&config.firsts)?;
        let (rank, world) = (config.rank, placement.world());
        if rank >= world {
            return Err(MoeError::Rank { rank, world });
        }
        let sizes = Sizes::new(&config.shape(), &placement)?;
        let places = Places::new(&sizes)?;
        // What is sent: this rank's table, and behind it the rows of one chunk, out or back. Out, a token goes to
        // no more than `fan` ranks; back, any rank's tokens may all have been here, as often as one can be.
        let chunk = u64::from(config.chunk_tokens.get().min(config.max_tokens));
        let out = chunk * u64::from(sizes.fan) * sizes.dispatch_row_bytes;
        let back = chunk * u64::from(world) * u64::from(sizes.combine_each);
        let back = back.checked_mul(sizes.combine_row_bytes);
        let outbox = back.and_then(|back| out.max(back).checked_add(sizes.table_bytes));
        let bytes = |len: u64| usize::try_from(len).unwrap_or(usize::MAX).max(1);
        Ok(Joining {
            config: config.clone(),
            sizes,
            places,
            inbox: engine.alloc(bytes(places.len))?,
            outbox: engine.alloc(bytes(outbox.unwrap_or(u64::MAX)))?,
            own: Own::new(engine, rank)?,
        })
    }

    /// The most rows that a round can bring here.
    #[must_use]
    pub fn max_rows(&self) -> usize {
        usize::try_from(self.sizes.expanded_rows).unwrap_or(usize::MAX)
    }

    /// Tokens of all ranks: slots for tokens that experts gather.
    #[must_use]
    pub fn max_slots(&self) -> usize {
        self.sources.len().saturating_mul(index(self.config.max_tokens))
    }

    /// How many rounds are complete.
    #[must_use]
    pub const fn rounds(&self) -> u64 {
        self.round
    }

    /// Who is left out, since when, and why; and the way to end waits. Can be asked while another thread is in a call.
    #[must_use]
    pub const fn control(&self) -> &Arc<Control> {
        self.others.control()
    }

    /// Sends this rank's tokens, and receives those that chose its experts.
    ///
    /// Every rank has to call it, those without tokens too. `timeout` is how long a chunk of a rank is waited for that gives no sign; the
    /// same at every rank. Who is late is left out, and the call succeeds without it ([`AllToAll::control`]). A rank that is kept waiting
    /// itself is waited for longer, four times as long at most. Copies each row once to send it and once for each expert that it is for.
    ///
    /// # Errors
    ///
    /// [`MoeError`], which says after which of them the exchange can be used further.
    pub fn dispatch(
        &mut self,
        tokens: &Tokens<'_>,
        rows: Rows<'_>,
        timeout: Duration,
    ) -> Result<Received<'_>, MoeError> {
        // Before anything is sent.
        self.check_slots(&rows)?;
        self.begin_dispatch(tokens, timeout)?;
        self.end_dispatch(tokens, rows, timeout)
    }

    /// The first half of [`AllToAll::dispatch`]: sends a first chunk of this rank's tokens, and waits for nothing but room to
    /// send it.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn dispatch_send(
        &mut self,
        tokens: &Tokens<'_>,
        timeout: Duration,
    ) -> Result<(), MoeError> {
        self.begin_dispatch(tokens, timeout)
    }

    /// The second half: sends the other chunks, and receives. `tokens` are those of the first half; of their routes what was
    /// sent then counts.
    ///
    /// Two exchanges can take turns by halves, as two micro-batches do: if there is one chunk, every rank in an order of its own, as
    /// long as both have sent before either receives. Where there are more, ranks wait for each other in the second half: all call
    /// those of the two in the same order.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn dispatch_receive(
        &mut self,
        tokens: &Tokens<'_>,
        rows: Rows<'_>,
        timeout: Duration,
    ) -> Result<Received<'_>, MoeError> {
        self.end_dispatch(tokens, rows, timeout)
    }

    fn begin_dispatch(&mut self, tokens: &Tokens<'_>, limit: Duration) -> Result<(), MoeError> {
        self.is_turn(Turn::Dispatch)?;
        let count = self.check_tokens(tokens)?;
        self.turn = Turn::Over;
        self.send_table(tokens, count, limit)
            .and_then(|()| self.send_tokens(tokens, 0, limit))
            .inspect_err(|_| self.others.stop())?;
        self.turn = Turn::ReceiveTokens;
        Ok(())
    }

    fn end_dispatch(
        &mut self,
        tokens: &Tokens<'_>,
        rows: Rows<'_>,
        limit: Duration,
    ) -> Result<Received<'_>, MoeError> {
        self.is_turn(Turn::ReceiveTokens)?;
        self.check_slots(&rows)?;
        self.check_payload(tokens, self.own().map_or(0, |own| own.tokens))?;
        self.turn = Turn::Over;
        self.receive_tokens(tokens, rows, limit).inspect_err(|_| self.others.stop())?;
        self.others.heed(self.at(Phase::Combine, 0, limit));
        self.turn = Turn::Combine;
        Ok(Received { counts: &self.counts, offsets: &self.offsets })
    }

    /// Sends the results of the tokens received, and receives those of this rank's own: for each the sum of its choices'
    /// results, times their weights; zero for a token that chose none.
    ///
    /// # Errors
    ///
    /// [`MoeError`], which says after which of them the exchange can be used further.
    pub fn combine(&mut self, results: Results<'_>, timeout: Duration) -> Result<(), MoeError> {
        self.begin_combine(results.y, Some(results.out), timeout)?;
        self.end_combine(results, timeout)
    }

    /// The first half of [`AllToAll::combine`]: sends the results of a first chunk of every rank's tokens, and waits for
    /// nothing but room to send them.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn combine_send(&mut self, y: &[u8], timeout: Duration) -> Result<(), MoeError> {
        self.begin_combine(y, None, timeout)
    }

    /// The second half: sends the results of the other chunks, and receives. `results.y` is that of the first half.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn combine_receive(
        &mut self,
        results: Results<'_>,
        timeout: Duration,
    ) -> Result<(), MoeError> {
        self.end_combine(results, timeout)
    }

    /// `out` if it is known by now: it is checked before anything is sent.
    fn begin_combine(
        &mut self,
        y: &[u8],
        out: Option<&[u8]>,
        limit: Duration,
    ) -> Result<(), MoeError> {
        self.is_turn(Turn::Combine)?;
        self.check_results(y, out)?;
        self.turn = Turn::Over;
        self.send_results(y, 0, limit).inspect_err(|_| self.others.stop())?;
        self.turn = Turn::ReceiveResults;
        Ok(())
    }

    fn end_combine(&mut self, results: Results<'_>, limit: Duration) -> Result<(), MoeError> {
        self.is_turn(Turn::ReceiveResults)?;
        self.check_results(results.y, Some(results.out))?;
        self.turn = Turn::Over;
        self.receive_results(results, limit).inspect_err(|_| self.others.stop())?;
        self.turn = Turn::Dispatch;
        self.round += 1;
        self.others.heed(self.at(Phase::Dispatch, 0, limit));
        Ok(())
    }

    const fn at(&self, phase: Phase, chunk: u32, limit: Duration) -> At {
        At { round: self.round.saturating_add(1), phase, chunk, limit, given: limit }
    }

    fn own(&self) -> Option<&Source> {
        self.sources.get(index(self.config.rank))
    }

    fn is_turn(&self, called: Turn) -> Result<(), MoeError> {
        match self.turn {
            Turn::Over => Err(MoeError::Over),
            turn if turn == called => Ok(()),
            turn => Err(MoeError::OutOfTurn { found: called.name(), expected: turn.name() }),
        }
    }

    fn check_tokens(&self, tokens: &Tokens<'_>) -> Result<u32, MoeError> {
        let config = &self.config;
        let experts = config.firsts.last().copied().unwrap_or(0);
        let routing =
            Routing::new(tokens.indices, config.top_k, experts).map_err(MoeError::Routing)?;
        let count = routing.tokens();
        if count > config.max_tokens {
            return Err(argument("tokens", index(count), index(config.max_tokens)));
        }
        exact("weights", tokens.weights.len(), tokens.indices.len())?;
        self.check_payload(tokens, count)?;
        Ok(count)
    }

    fn check_payload(&self, tokens: &Tokens<'_>, count: u32) -> Result<(), MoeError> {
        let count = index(count);
        exact("x", tokens.x.len(), count * index(self.config.token_bytes))?;
        exact("scales", tokens.scales.len(), count * index(self.config.scale_bytes))
    }

    fn check_results(&self, y: &[u8], out: Option<&[u8]>) -> Result<(), MoeError> {
        let row = index(self.config.hidden) * Format::BYTES;
        let rows = index(self.offsets.last().copied().unwrap_or(0));
        if y.len() < rows * row {
            return Err(argument("y", y.len(), rows * row));
        }
        let tokens = index(self.own().map_or(0, |own| own.tokens));
        out.map_or(Ok(()), |out| exact("out", out.len(), tokens * row))
    }

    // ---- the way out ----

    fn receive_tokens(
        &mut self,
        tokens: &Tokens<'_>,
        mut rows: Rows<'_>,
        limit: Duration,
    ) -> Result<(), MoeError> {
        for at in 0..self.chunks.count() {
            if at > 0 {
                self.send_tokens(tokens, at, limit)?;
            }
            // With the first chunk come the tables.
            let here = self.at(Phase::Dispatch, at, limit);
            self.others.arrive(if at == 0 { 2 } else { 1 }, here)?;
            if at == 0 {
                self.read_tables(here)?;
                self.lay_out()?;
                self.prepare(&mut rows)?;
            }
            self.take_tokens(tokens, at, &mut rows)?;
        }
        Ok(())
    }

    /// What tables of this round carry: never 0, which is what memory holds that nobody has written to.
    fn epoch(&self) -> u32 {
        // A remainder of 32 bits; rounds so far apart do not meet.
        u32::try_from(self.round % u64::from(u32::MAX)).map_or(u32::MAX, |round| round + 1)
    }

    fn table(&self) -> TableShape {
        TableShape { top_k: self.config.top_k, max_tokens: self.config.max_tokens }
    }

    /// Where the table of `rank` lies at every receiver.
    fn table_at(&self, rank: u32) -> u64 {
        let world = u64::from(self.world());
        (self.round % 2 * world + u64::from(rank)) * self.sizes.table_bytes
    }

    fn world(&self) -> u32 {
        // As many as sources, at most 512.
        u32::try_from(self.sources.len()).unwrap_or(0)
    }

    fn send_table(
        &mut self,
        tokens: &Tokens<'_>,
        count: u32,
        limit: Duration,
    ) -> Result<(), MoeError> {
        let rank = self.config.rank;
        let (table, epoch) = (self.table(), self.epoch());
        let vectors = table.encode(epoch, tokens.indices, tokens.weights, &mut self.vectors);
        let vectors = vectors.map_err(|error| MoeError::Table { rank, error })?;
        if let Some(own) = self.sources.get_mut(index(rank)) {
            own.tokens = count;
            own.indices[..tokens.indices.len()].copy_from_slice(tokens.indices);
            own.weights[..tokens.weights.len()].copy_from_slice(tokens.weights);
        }
        self.bytes.clear();
        let words = self.vectors.iter().take(vectors).flatten();
        self.bytes.extend(words.flat_map(|word| word.to_le_bytes()));
        self.outbox.write(0, &self.bytes)?;
        let len = self.bytes.len() as u64;
        let (to, here) = (self.table_at(rank), self.at(Phase::Dispatch, 0, limit));
        for peer in 0..self.others.len() {
            self.others.write(peer, (&self.outbox, 0), to, len, here)?;
        }
        Ok(())
    }

    /// Where rows of `rank` in a slot begin at every receiver.
    fn tokens_at(&self, rank: u32, slot: u32) -> u64 {
        let slots = u64::from(rank) * u64::from(DEPTH.get()) + u64::from(slot);
        self.places.dispatch + slots * self.chunk_rows() * self.sizes.dispatch_row_bytes
    }

    fn chunk_rows(&self) -> u64 {
        u64::from(self.config.chunk_tokens.get().min(self.config.max_tokens))
    }

    fn send_tokens(
        &mut self,
        tokens: &Tokens<'_>,
        at: u32,
        limit: Duration,
    ) -> Result<(), MoeError> {
        let config = &self.config;
        let placement = Placement::new(&config.firsts)?;
        let Some(own) = self.sources.get(index(config.rank)) else { return Ok(()) };
        let routing = own.routing(config.top_k, placement.experts()).map_err(MoeError::Routing)?;
        let chunk = self.chunks.get(self.round, at, own.tokens)?;
        let part = routing.part(chunk.tokens.clone());
        let (token_bytes, scale_bytes) = (index(config.token_bytes), index(config.scale_bytes));
        let stride = self.sizes.dispatch_row_bytes;
        let to = self.tokens_at(config.rank, chunk.slot);
        let here = self.at(Phase::Dispatch, at, limit);
        let mut next = self.sizes.table_bytes;
        for peer in 0..self.others.len() {
            if self.others.is_absent(peer) {
                continue;
            }
            let local = placement.experts_of(self.others.rank(peer));
            let first = next;
            for token in part.tokens_at(local) {
                let token = index(chunk.tokens.start + token);
                self.outbox.write(next, nth(tokens.x, token, token_bytes))?;
                let scales = nth(tokens.scales, token, scale_bytes);
                self.outbox.write(next + token_bytes as u64, scales)?;
                next += stride;
            }
            self.others.write(peer, (&self.outbox, first), to, next - first, here)?;
        }
        Ok(())
    }

    /// Reads the tables of all who are not left out; whose is none is, from now on. Who is has no tokens in this round.
    fn read_tables(&mut self, here: At) -> Result<(), MoeError> {
        let (table, epoch) = (self.table(), self.epoch());
        let (top_k, experts) = (self.config.top_k, self.config.firsts.last().copied().unwrap_or(0));
        for peer in 0..self.others.len() {
            let rank = self.others.rank(peer);
            let at = self.table_at(rank);
            let Some(source) = self.sources.get_mut(index(rank)) else { continue };
            source.tokens = 0;
            if self.others.is_absent(peer) {
                continue;
            }
            // The largest is there whatever its head says; the core says how much of it counts.
            self.bytes.resize(index_of(self.sizes.table_bytes), 0);
            self.inbox.read(at, &mut self.bytes)?;
            for (vector, bytes) in self.vectors.iter_mut().zip(self.bytes.chunks_exact(16)) {
                for (word, bytes) in vector.iter_mut().zip(bytes.chunks_exact(4)) {
                    *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
                }
            }
            let decoded =
                table.decode(epoch, &self.vectors, &mut source.indices, &mut source.weights);
            let read = decoded.map_err(Why::Table).and_then(|tokens| {
                routing(&source.indices, tokens, top_k, experts).map_err(Why::Routing)?;
                Ok(tokens)
            });
            match read {
                Ok(tokens) => source.tokens = tokens,
                Err(why) => self.others.leave(peer, here, why),
            }
        }
        Ok(())
    }

    /// Finds the row of every choice that ends here.
    fn lay_out(&mut self) -> Result<(), MoeError> {
        let placement = Placement::new(&self.config.firsts)?;
        let (experts, top_k) = (placement.experts(), self.config.top_k);
        let mine = placement.experts_of(self.config.rank);
        self.counts.fill(0);
        for (rank, source) in (0..).zip(&self.sources) {
            let wrong = |error| MoeError::PeerRouting { rank, error };
            let routing = source.routing(top_k, experts).map_err(wrong)?;
            routing.count_experts(mine.clone(), &mut self.counts).map_err(wrong)?;
        }
        let padding = self.config.padding;
        let mut layout =
            Layout::new(mine, &self.counts, padding, &mut self.offsets, &mut self.given)?;
        for (rank, source) in (0..).zip(&mut self.sources) {
            let Source { tokens, indices, rows, .. } = source;
            let routing = routing(indices, *tokens, top_k, experts);
            let routing = routing.map_err(|error| MoeError::PeerRouting { rank, error })?;
            layout.place(&routing, |arrival: Arrival| {
                let choice = index(arrival.token) * index(top_k) + index(arrival.choice);
                if let Some(row) = rows.get_mut(choice) {
                    *row = arrival.row;
                }
            })?;
        }
        Ok(())
    }

    /// Checks that all rows fit what the caller lent, and writes zeros to those that only pad; or says which slot each is.
    fn prepare(&self, rows: &mut Rows<'_>) -> Result<(), MoeError> {
        let total = self.offsets.last().copied().unwrap_or(0);
        if let Some(slots) = &mut rows.slots {
            let lent = slots.len();
            let slots = slots.get_mut(..index(total));
            let slots = slots.ok_or(MoeError::RowsTooMany { rows: total, lent })?;
            return self.name_slots(slots);
        }
        let sized = [
            (&mut *rows.x, index(self.config.token_bytes)),
            (&mut *rows.scales, index(self.config.scale_bytes)),
        ];
        for (memory, bytes) in sized {
            let lent = memory.len().checked_div(bytes).unwrap_or(usize::MAX);
            if index(total) > lent {
                return Err(MoeError::RowsTooMany { rows: total, lent });
            }
            let edges = self.offsets.iter().zip(self.offsets.iter().skip(1));
            for ((first, next), count) in edges.zip(&self.counts) {
                let padding = index(first + count) * bytes..index(*next) * bytes;
                memory.get_mut(padding).unwrap_or_default().fill(0);
            }
        }
        Ok(())
    }

    /// Says of each row which slot its token is in.
    fn name_slots(&self, slots: &mut [u32]) -> Result<(), MoeError> {
        let config = &self.config;
        let placement = Placement::new(&config.firsts)?;
        let mine = placement.experts_of(config.rank);
        slots.fill(NO_SLOT);
        for (rank, source) in (0..).zip(&self.sources) {
            let wrong = |error| MoeError::PeerRouting { rank, error };
            let routing = source.routing(config.top_k, placement.experts()).map_err(wrong)?;
            for token in routing.tokens_at(mine.clone()) {
                // There is memory for all: `check_slots`.
                let slot = slot_of(rank, token, config.max_tokens).unwrap_or(NO_SLOT);
                for row in source.rows_at(&routing, token, &mine) {
                    if let Some(to) = slots.get_mut(index(row)) {
                        *to = slot;
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that there is memory for all slots, if tokens are to lie in such.
    fn check_slots(&self, rows: &Rows<'_>) -> Result<(), MoeError> {
        if rows.slots.is_none() {
            return Ok(());
        }
        let config = &self.config;
        let needed = |bytes: u32| self.max_slots().saturating_mul(index(bytes));
        for (what, found, needed) in [
            ("bytes of slots for tokens", rows.x.len(), needed(config.token_bytes)),
            ("bytes of slots for scales", rows.scales.len(), needed(config.scale_bytes)),
        ] {
            if found < needed {
                return Err(argument(what, found, needed));
            }
        }
        Ok(())
    }

    /// Copies the tokens of one chunk of all ranks to their rows, or slots.
    fn take_tokens(&self, own: &Tokens<'_>, at: u32, rows: &mut Rows<'_>) -> Result<(), MoeError> {
        let config = &self.config;
        let (top_k, experts) = (config.top_k, config.firsts.last().copied().unwrap_or(0));
        let mine = Placement::new(&config.firsts)?.experts_of(config.rank);
        let (x, scales) = (index(config.token_bytes), index(config.scale_bytes));
        for (rank, source) in (0..).zip(&self.sources) {
            let wrong = |error| MoeError::PeerRouting { rank, error };
            let routing = source.routing(top_k, experts).map_err(wrong)?;
            let chunk = self.chunks.get(self.round, at, source.tokens)?;
            let mut from = self.tokens_at(rank, chunk.slot);
            let part = routing.part(chunk.tokens.clone());
            for token in part.tokens_at(mine.clone()) {
                let token = chunk.tokens.start + token;
                let slot =
                    rows.slots.as_ref().and_then(|_| slot_of(rank, token, config.max_tokens));
                let by_expert = slot.is_none().then(|| source.rows_at(&routing, token, &mine));
                for row in slot.into_iter().chain(by_expert.into_iter().flatten()) {
                    let to_x = nth_mut(rows.x, row, x);
                    let to_scales = nth_mut(rows.scales, row, scales);
                    if rank == config.rank {
                        to_x.copy_from_slice(nth(own.x, index(token), x));
                        to_scales.copy_from_slice(nth(own.scales, index(token), scales));
                    } else if self.others.is_rank_absent(rank) {
                        // Its choices came, and the tokens did not.
                        to_x.fill(0);
                        to_scales.fill(0);
                    } else {
                        self.inbox.read(from, to_x)?;
                        self.inbox.read(from + x as u64, to_scales)?;
                    }
                }
                from += self.sizes.dispatch_row_bytes;
            }
        }
        Ok(())
    }

    // ---- the way back ----

    fn receive_results(
        &mut self,
        mut results: Results<'_>,
        limit: Duration,
    ) -> Result<(), MoeError> {
        for at in 0..self.chunks.count() {
            if at > 0 {
                self.send_results(results.y, at, limit)?;
            }
            self.others.arrive(1, self.at(Phase::Combine, at, limit))?;
            self.take_results(&mut results, at)?;
        }
        Ok(())
    }

    /// Where the results of `rank` in a slot begin at every receiver.
    fn results_at(&self, rank: u32, slot: u32) -> u64 {
        let slots = u64::from(rank) * u64::from(DEPTH.get()) + u64::from(slot);
        let rows = slots * self.chunk_rows() * u64::from(self.sizes.combine_each);
        self.places.combine + rows * self.sizes.combine_row_bytes
    }

    fn send_results(&mut self, y: &[u8], at: u32, limit: Duration) -> Result<(), MoeError> {
        let here = self.at(Phase::Combine, at, limit);
        let mut from = self.sizes.table_bytes;
        for peer in 0..self.others.len() {
            if self.others.is_absent(peer) {
                continue;
            }
            let (first, rank) = (from, self.others.rank(peer));
            let config = &self.config;
            let placement = Placement::new(&config.firsts)?;
            let mine = placement.experts_of(config.rank);
            let Some(source) = self.sources.get(index(rank)) else { continue };
            let wrong = |error| MoeError::PeerRouting { rank, error };
            let routing = source.routing(config.top_k, placement.experts()).map_err(wrong)?;
            let chunk = self.chunks.get(self.round, at, source.tokens)?;
            let part = routing.part(chunk.tokens.clone());
            for token in part.tokens_at(mine.clone()) {
                let token = chunk.tokens.start + token;
                if config.exact {
                    let row_bytes = index(config.hidden) * Format::BYTES;
                    for row in source.rows_at(&routing, token, &mine) {
                        self.outbox.write(from, nth(y, index(row), row_bytes))?;
                        from += self.sizes.combine_row_bytes;
                    }
                    continue;
                }
                source.partial(&routing, token, &mine, y, config.format, &mut self.sum);
                self.bytes.clear();
                let stored = self.sum.iter().map(|value| config.format.store(*value));
                self.bytes.extend(stored.flat_map(u16::to_le_bytes));
                self.outbox.write(from, &self.bytes)?;
                from += self.sizes.combine_row_bytes;
            }
            let to = self.results_at(config.rank, chunk.slot);
            self.others.write(peer, (&self.outbox, first), to, from - first, here)?;
        }
        Ok(())
    }

    /// Adds up what came for this rank's own tokens of a chunk.
    fn take_results(&mut self, taken: &mut Results<'_>, at: u32) -> Result<(), MoeError> {
        let config = &self.config;
        let placement = Placement::new(&config.firsts)?;
        let (rank, format) = (config.rank, config.format);
        let mine = placement.experts_of(rank);
        let Some(own) = self.sources.get(index(rank)) else { return Ok(()) };
        let routing = own.routing(config.top_k, placement.experts()).map_err(MoeError::Routing)?;
        let chunk = self.chunks.get(self.round, at, own.tokens)?;
        let row_bytes = index(config.hidden) * Format::BYTES;
        let mut total = std::mem::take(&mut self.total);
        let mut sum = std::mem::take(&mut self.sum);
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.resize(row_bytes, 0);
        // Where the next row lies that a rank sent; nowhere, if it is left out.
        let mut taken_of = std::mem::take(&mut self.taken);
        taken_of.fill(0);
        let mut next_of = |rank: u32| {
            let row =
                taken_of.get_mut(index(rank)).filter(|_| !self.others.is_rank_absent(rank))?;
            *row += 1;
            let before = u64::from(*row - 1) * self.sizes.combine_row_bytes;
            Some(self.results_at(rank, chunk.slot) + before)
        };
        for token in chunk.tokens.clone() {
            let to = nth_mut(taken.out, token, row_bytes);
            total.fill(0.0);
            if taken.accumulate {
                for (total, value) in total.iter_mut().zip(values(to)) {
                    *total = format.load(value);
                }
            }
            if config.exact {
                for (rank_of, row, weight) in own.all_chosen(&routing, token, &placement) {
                    let row = if rank_of == rank {
                        nth(taken.y, index(row), row_bytes)
                    } else if let Some(from) = next_of(rank_of) {
                        self.inbox.read(from, &mut bytes)?;
                        &bytes
                    } else {
                        continue;
                    };
                    for (total, value) in total.iter_mut().zip(values(row)) {
                        *total += weight * format.load(value);
                    }
                }
            } else {
                for from in routing.ranks_of(token, &placement).iter() {
                    if from == rank {
                        own.partial(&routing, token, &mine, taken.y, format, &mut sum);
                        for (total, value) in total.iter_mut().zip(&sum) {
                            // Rounded as what comes from elsewhere: results do not depend on who holds an expert.
                            *total += format.load(format.store(*value));
                        }
                    } else if let Some(from) = next_of(from) {
                        self.inbox.read(from, &mut bytes)?;
                        for (total, value) in total.iter_mut().zip(values(&bytes)) {
                            *total += format.load(value);
                        }
                    }
                }
            }
            for (to, value) in to.chunks_exact_mut(Format::BYTES).zip(&total) {
                to.copy_from_slice(&format.store(*value).to_le_bytes());
            }
        }
        (self.total, self.sum, self.bytes, self.taken) = (total, sum, bytes, taken_of);
        Ok(())
    }
}

impl Turn {
    const fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::ReceiveTokens => "the second half of dispatch",
            Self::Combine => "combine",
            Self::ReceiveResults => "the second half of combine",
            Self::Over => "nothing",
        }
    }
}

impl Joining {
    /// What the other ranks need.
    #[must_use]
    pub fn seat(&self) -> Seat {
        self.own.seat(&self.inbox, self.config.digest())
    }

    /// Connects to the others, of whose ranks `seats` are, this one's included.
    ///
    /// # Errors
    ///
    /// [`MoeError`] names the rank that does not fit, or cannot be reached in time.
    pub fn join(self, seats: &[Seat], timeout: Duration) -> Result<AllToAll, MoeError> {
        let Self { config, sizes, places, inbox, outbox, own } = self;
        let placement = Placement::new(&config.firsts)?;
        let world = placement.world();
        let circle = Circle { world, digest: config.digest(), inbox_bytes: places.len };
        let others = own.join(seats, &circle, Until::new(timeout))?;
        let local = placement.experts_of(config.rank).len();
        let world = index(world);
        let choices = index(config.max_tokens) * index(config.top_k);
        let source = |_| Source {
            tokens: 0,
            indices: vec![0; choices].into(),
            weights: vec![0.0; choices].into(),
            rows: vec![0; choices].into(),
        };
        Ok(AllToAll {
            chunks: Chunks::new(config.max_tokens, config.chunk_tokens, DEPTH),
            turn: Turn::Dispatch,
            round: 0,
            sources: (0..world).map(source).collect(),
            counts: vec![0; local],
            offsets: vec![0; local + 1],
            given: vec![0; local],
            taken: vec![0; world],
            vectors: vec![[0; 4]; index_of(sizes.table_bytes / 16)],
            bytes: Vec::new(),
            sum: vec![0.0; index(config.hidden)],
            total: vec![0.0; index(config.hidden)],
            others,
            config,
            sizes,
            places,
            inbox,
            outbox,
        })
    }
}

impl Source {
    fn routing(&self, top_k: u32, experts: u32) -> Result<Routing<'_>, RoutingError> {
        routing(&self.indices, self.tokens, top_k, experts)
    }

    /// The rows of a token's choices among `experts`, in the order of choices.
    fn rows_at(
        &self,
        routing: &Routing<'_>,
        token: u32,
        experts: &Range<u32>,
    ) -> impl Iterator<Item = u32> + use<'_> {
        self.chosen(routing, token, experts).map(|(row, _)| row)
    }

    fn chosen(
        &self,
        routing: &Routing<'_>,
        token: u32,
        experts: &Range<u32>,
    ) -> impl Iterator<Item = (u32, f32)> + use<'_> {
        let first = index(token) * index(routing.top_k());
        let mask = routing.choices_among(token, experts);
        let chosen = (0..routing.top_k()).filter(move |choice| mask >> choice & 1 == 1);
        chosen.filter_map(move |choice| {
            let at = first + index(choice);
            Some((*self.rows.get(at)?, *self.weights.get(at)?))
        })
    }

    /// Of each of a token's choices, in their order, its rank, the row that it has if that is this one, and its weight.
    fn all_chosen<'a>(
        &'a self,
        routing: &Routing<'a>,
        token: u32,
        placement: &'a Placement<'_>,
    ) -> impl Iterator<Item = (u32, u32, f32)> + use<'a> {
        let first = index(token) * index(routing.top_k());
        let all = self.rows.iter().zip(&self.weights).skip(first);
        routing.choices(token).iter().zip(all).filter_map(|(expert, (row, weight))| {
            let rank = placement.rank_of(u32::try_from(*expert).ok()?)?;
            Some((rank, *row, *weight))
        })
    }

    /// The weighted sum of a token's rows here, in the order of its choices.
    fn partial(
        &self,
        routing: &Routing<'_>,
        token: u32,
        experts: &Range<u32>,
        y: &[u8],
        format: Format,
        sum: &mut [f32],
    ) {
        sum.fill(0.0);
        let bytes = sum.len() * Format::BYTES;
        for (row, weight) in self.chosen(routing, token, experts) {
            for (sum, value) in sum.iter_mut().zip(values(nth(y, index(row), bytes))) {
                *sum += weight * format.load(value);
            }
        }
    }
}

fn routing(
    indices: &[i32],
    tokens: u32,
    top_k: u32,
    experts: u32,
) -> Result<Routing<'_>, RoutingError> {
    let len = index(tokens) * index(top_k);
    Routing::new(indices.get(..len).unwrap_or_default(), top_k, experts)
}

impl Config {
    fn shape(&self) -> Shape {
        Shape {
            top_k: self.top_k,
            max_tokens: self.max_tokens,
            token_bytes: self.token_bytes,
            scale_bytes: self.scale_bytes,
            // What does not fit is no multiple of 16 either, and refused.
            result_bytes: self.hidden.checked_mul(2).unwrap_or(1),
            padding: self.padding,
            chunk_tokens: self.chunk_tokens,
            dispatch_depth: DEPTH,
            combine_depth: DEPTH,
            exact: self.exact,
        }
    }

    /// Tells two configurations apart that cannot work together: of all but the rank.
    fn digest(&self) -> u64 {
        let format = if self.format == Format::Bf16 { 0 } else { 1 };
        let numbers = [
            self.top_k,
            self.max_tokens,
            self.token_bytes,
            self.scale_bytes,
            self.hidden,
            format,
            self.padding.get(),
            self.chunk_tokens.get(),
            self.exact.into(),
        ];
        digest(numbers.iter().chain(&self.firsts))
    }
}

impl Places {
    fn new(sizes: &Sizes) -> Result<Self, MoeError> {
        // Tables end on 16 bytes, rows start on a cache line.
        let dispatch = sizes.tables_bytes.checked_next_multiple_of(128);
        let combine = dispatch.and_then(|at| at.checked_add(sizes.dispatch_bytes));
        let len = combine.and_then(|at| at.checked_add(sizes.combine_bytes));
        match (dispatch, combine, len) {
            (Some(dispatch), Some(combine), Some(len)) => Ok(Self { dispatch, combine, len }),
            _ => Err(SizesError::Overflow.into()),
        }
    }
}

const fn argument(what: &'static str, found: usize, needed: usize) -> MoeError {
    MoeError::Argument { what, found, needed }
}

const fn exact(what: &'static str, found: usize, needed: usize) -> Result<(), MoeError> {
    if found == needed { Ok(()) } else { Err(argument(what, found, needed)) }
}

const fn index(number: u32) -> usize {
    number as usize
}

/// A size of memory that was had.
fn index_of(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Row `n` of rows of so many bytes; empty if it is not there.
fn nth(rows: &[u8], n: usize, bytes: usize) -> &[u8] {
    rows.get(n * bytes..(n + 1) * bytes).unwrap_or_default()
}

fn nth_mut(rows: &mut [u8], n: u32, bytes: usize) -> &mut [u8] {
    rows.get_mut(index(n) * bytes..(index(n) + 1) * bytes).unwrap_or_default()
}

fn values(bytes: &[u8]) -> impl Iterator<Item = u16> + '_ {
    let words = bytes.chunks_exact(Format::BYTES);
    words.map(|word| word.iter().rev().fold(0, |value, byte| value << 8 | u16::from(*byte)))
}
