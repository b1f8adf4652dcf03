//! Dispatch and combine among GPUs of one host: the kernels of [`immwire_cuda::moe`], for ranks that find each other by an
//! engine, in one process or in many.
//!
//! The engine is needed to set up and to start over: inboxes are memory of its ([`TransferEngine::alloc_gpu`]), which the other
//! ranks' engines open for their GPUs. Rounds are the kernels' alone. It refuses to know what goes where (they do), and
//! which streams there are (the caller does).
//!
//! # Invariants
//!
//! - Nobody's first round begins before all inboxes are cleared, and opened by everybody.
//! - What other ranks' kernels write to stays while any of them may write: each keeps what it has opened.
//! - What our kernels use stays until they have ended: whoever drops an exchange waits for all of the GPU's work. All engines
//!   of the process know that the driver keeps others waiting meanwhile (`closer`).

use std::ffi::c_void;
use std::fmt;
use std::mem::{self, ManuallyDrop};
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use immwire_cuda::moe::{Exchange, NotMade};
use immwire_cuda::{Device, Error, Event, Stream};

pub use immwire_cuda::moe::args::MoeReport;
pub use immwire_cuda::moe::geometry::{Geometry, Number, Payload, Scales, Shape, ShapeError};
pub use immwire_cuda::moe::{Count, Half, Results, Rows, Tokens};

use immwire_core::group::{TransferError as Stop, WorkError};

use super::error::MoeError;
use super::others::{At, Circle, Others, Own, Until, digest};
use super::seat::Seat;
use crate::closer::Closing;
use crate::engine::TransferEngine;
use crate::error::TransferError;
use crate::provider::{GiveBack, Window};
use crate::region::Region;
use crate::sync::lock;

/// What each rank writes to the others when it joins, behind the inbox: it takes a write to open one.
const GREETING_BYTES: u64 = 16;

/// How long clearing an inbox may take.
const CLEAR_LIMIT: Duration = Duration::from_secs(10);

/// What an exchange is made for. The shape is the same at every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// This rank.
    pub rank: u32,
    /// Its GPU: one of the engine's ([`Builder::gpus`](crate::Builder::gpus)).
    pub gpu: u32,
    /// Experts, tokens, and what they are made of.
    pub shape: Shape,
    /// SMs that a launch takes at most; 0 stands for all. All ranks of one GPU together have no more than it has.
    pub sms: u32,
    /// How long kernels wait for tokens, once all choices are there; twice that for results, three times for choices.
    pub timeout: Duration,
}

/// An exchange whose buffers are there, and which waits to be told of the others.
#[derive(Debug)]
pub struct Joining {
    config: Config,
    exchange: Unused,
    stream: Stream,
    inbox: Region,
    own: Own,
}

/// Buffers that no kernel uses: whoever drops them does not wait until the GPU has nothing to do, which its driver does.
struct Unused {
    /// Until it is dropped, or taken.
    exchange: Option<Exchange>,
    /// The exchange's: while that is given back the driver may keep those waiting, too, who destroy a stream.
    stream: Stream,
    give_back: Option<GiveBack>,
}

impl fmt::Debug for Unused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.exchange.fmt(f)
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        match (self.exchange.take(), &self.give_back) {
            (Some(exchange), Some(give_back)) => {
                give_back(Box::new((exchange, self.stream.clone())));
            }
            (exchange, _) => drop(exchange),
        }
    }
}

/// Dispatch and combine among GPUs.
///
/// Dropping it waits for all that its GPU has to do, as [`AllToAll::start_over`] does. Meanwhile other threads of the process that launch or copy by that
/// GPU wait, too, another rank's of it as well, which therefore is to have launched before what this one's kernels wait for; [`Control::abort`] does
/// not wait. Graphs that are being captured do not mind.
#[derive(Debug)]
pub struct AllToAll {
    gpu: u32,
    /// Of our own, in the way of nobody.
    stream: Stream,
    others: Others,
    is_over: bool,
    control: Arc<Control>,
    /// Dropped only once no kernel uses it.
    used: ManuallyDrop<Used>,
}

/// What is known of an exchange, and what can be asked of it, while another thread is in a call, or waits for the GPU to drop it.
#[derive(Debug)]
pub struct Control {
    stream: Stream,
    going: Mutex<Going>,
}

/// What there is to report, and to end.
#[derive(Debug)]
struct Going {
    /// Until nobody waits for its kernels any more.
    exchange: Option<Arc<Exchange>>,
    /// It starts over, and no kernel waits: what is ended now would be the first round's waits.
    is_fresh: bool,
}

/// What kernels use.
#[derive(Debug)]
struct Used {
    exchange: Arc<Exchange>,
    inbox: Region,
    /// The other ranks' inboxes.
    windows: Vec<Window>,
}

impl AllToAll {
    /// Makes the buffers of one rank, and loads the kernels. The engine needs a thread, or somebody who polls it during the calls that
    /// take a timeout, and four counters that are free.
    ///
    /// # Errors
    ///
    /// [`MoeError::Shape`], [`MoeError::Rank`]: there can be no such exchange; [`MoeError::Gpu`]: the driver refused;
    /// [`MoeError::Memory`], [`MoeError::Counter`].
    pub fn open(engine: &TransferEngine, config: &Config) -> Result<Joining, MoeError> {
        let world = Geometry::new(&config.shape).map_err(MoeError::Shape)?.world;
        if config.rank >= world {
            return Err(MoeError::Rank { rank: config.rank, world });
        }
        // SAFETY: the default stream, which is always there.
        let default = unsafe { engine.stream(config.gpu, ptr::null_mut())? };
        let stream = Stream::new(default.device())?;
        let exchange =
            Exchange::new(&stream, &config.shape, config.rank, config.sms, config.timeout);
        let exchange = exchange.map_err(|NotMade { why, left }| {
            match (left, engine.give_back()) {
                // Whoever is refused does not wait for kernels of others.
                (Some(left), Some(give_back)) => give_back(Box::new(left)),
                (left, _) => drop(left),
            }
            match why {
                // Of so many SMs.
                Error::Shape(error) => MoeError::Shape(error),
                error => MoeError::Gpu(error),
            }
        })?;
        let geometry = exchange.geometry();
        let bytes = geometry.inbox_bytes + u64::from(geometry.world) * GREETING_BYTES;
        // Nor does who is refused the inbox, or a counter.
        let (exchange, give_back) = (Some(exchange), engine.give_back());
        let mut unused = Unused { exchange, stream: stream.clone(), give_back };
        let inbox = engine.alloc_gpu(config.gpu, usize::try_from(bytes).unwrap_or(usize::MAX))?;
        let own = Own::new(engine, config.rank)?;
        // It is there until it is taken.
        let exchange = unused.exchange.as_ref().ok_or(MoeError::Over)?;
        if let Err(error) = clear(exchange, &stream, &inbox) {
            // The GPU may be at it still.
            mem::forget((unused.exchange.take(), stream, inbox));
            return Err(error);
        }
        Ok(Joining { config: config.clone(), exchange: unused, stream, inbox, own })
    }

    /// Sizes of everything.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        self.used.exchange.geometry()
    }

    /// Enqueues the way out: this rank's tokens to the ranks of their experts, and those of all ranks to their rows here. Waits
    /// for nothing; some microseconds. Can be captured in a CUDA graph, and replayed.
    ///
    /// All ranks take turns with dispatch and combine, those without tokens too.
    ///
    /// # Safety
    ///
    /// - `stream` is a stream of the GPU's primary context (null: the default one);
    /// - the memory of `tokens` and `rows` is as long as they say, and the GPU reaches it; until the launch has ended the former is
    ///   not written, and the latter not used;
    /// - all launches of this exchange are ordered one after the other: dispatch and combine in turn, of both the same halves, and
    ///   sending before receiving, with the same arguments;
    /// - graphs that captured a launch are not replayed once this is dropped;
    /// - what this rank's GPU runs at the same time leaves room for all blocks of the launch.
    ///
    /// # Errors
    ///
    /// [`MoeError::Gpu`], [`MoeError::Over`]: nothing was enqueued.
    pub unsafe fn dispatch(
        &self,
        stream: *mut c_void,
        half: Half,
        tokens: &Tokens,
        rows: &Rows,
    ) -> Result<(), MoeError> {
        self.is_alive()?;
        // SAFETY: our caller's promise. Ranks are connected, and their inboxes cleared, since there is an exchange (`join`),
        // which compared their shapes; each keeps the inboxes that it writes to, and this one is kept by `self`.
        unsafe { self.used.exchange.dispatch(&self.borrow(stream), half, tokens, rows)? };
        Ok(())
    }

    /// Enqueues the way back: the results of the rows received, times their weights, to the tokens' ranks; and the sums of this
    /// rank's own tokens' results, zeros for tokens that chose nobody: added up in the order of ranks, in `f32`, and rounded once.
    /// Where sums are exact ([`Shape::exact`]), the results themselves go back, and are added up in the order of choices.
    ///
    /// # Safety
    ///
    /// As for [`AllToAll::dispatch`]: `y` has so many rows, and is not written, and `out` not used, until the launch has ended.
    ///
    /// # Errors
    ///
    /// [`MoeError::Gpu`], [`MoeError::Over`]: nothing was enqueued.
    pub unsafe fn combine(
        &self,
        stream: *mut c_void,
        half: Half,
        results: &Results,
    ) -> Result<(), MoeError> {
        self.is_alive()?;
        // SAFETY: as above.
        unsafe { self.used.exchange.combine(&self.borrow(stream), half, results)? };
        Ok(())
    }

    /// Whether memory is this rank's GPU's, or of the host and pinned by way of it; half a microsecond.
    #[must_use]
    pub fn is_here(&self, address: u64) -> bool {
        immwire_cuda::gpu_of(self.stream.device(), address) == Ok(Some(self.gpu))
    }

    /// What went wrong in the kernels until now: which ranks were late, in which round, and what was left out.
    #[must_use]
    pub fn report(&self) -> MoeReport {
        self.used.exchange.report()
    }

    /// Ends all waits of this rank's kernels, as if they had lasted too long: those of launches to come, too, until all start over. Of
    /// [`AllToAll::start_over`] it ends the wait for the GPU, not those for other ranks.
    ///
    /// It goes by a stream of its own. If that shares one of the GPU's connections with what waits, which are 8 unless
    /// `CUDA_DEVICE_MAX_CONNECTIONS=32` was in the environment before CUDA began, it may come only when the waits have ended by themselves. That
    /// was not measured with the default.
    ///
    /// # Errors
    ///
    /// [`MoeError::Gpu`].
    pub fn abort(&self) -> Result<(), MoeError> {
        self.control.abort()
    }

    /// What other threads may ask meanwhile, and when this is being dropped, which waits for the GPU.
    #[must_use]
    pub const fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Begins with the first round again, after something went wrong: nobody is left out any more, and the report is empty. All ranks have
    /// to call it. Waits for all that was given to this rank's GPU, as long as that takes, and then for the others, for `timeout`
    /// (for those who say that they are kept waiting themselves, four times that at most).
    ///
    /// # Errors
    ///
    /// [`MoeError`]. If a rank is gone, or does not come, or its GPU does not do what it has to ([`MoeError::LeftOut`]; at that rank
    /// [`MoeError::Gpu`]), the exchange is over: make a new one with those who are left. If this rank's GPU cannot be waited for
    /// ([`MoeError::Gpu`]), nothing has changed: `start_over` can be called again.
    pub fn start_over(&mut self, timeout: Duration) -> Result<(), MoeError> {
        self.is_alive()?;
        wait_for(self.stream.device())?;
        self.is_over = true;
        let until = Until::new(timeout);
        // Once all have come here, nobody's kernels write any more; and none again before all inboxes are cleared.
        self.meet(until)?;
        self.control.set_fresh(true);
        let begun = self.begin_anew().and_then(|()| self.meet(until));
        // Also if nothing came of it: then there are waits to be ended again.
        self.control.set_fresh(false);
        begun?;
        self.is_over = false;
        Ok(())
    }

    /// Forgets all rounds, and waits until the inbox is cleared.
    fn begin_anew(&mut self) -> Result<(), MoeError> {
        let Used { exchange, inbox, .. } = &*self.used;
        let begun = exchange.start_over(&self.stream).map_err(MoeError::Gpu);
        let begun = begun.and_then(|()| clear(exchange, &self.stream, inbox));
        // The others wait for this rank.
        begun.inspect_err(|_| self.others.stop())
    }

    /// Waits until all ranks are here.
    fn meet(&mut self, until: Until) -> Result<(), MoeError> {
        let met = self.others.meet(At::set_up(until));
        met.inspect_err(|_| self.others.stop())
    }

    fn is_alive(&self) -> Result<(), MoeError> {
        if self.is_over { Err(MoeError::Over) } else { Ok(()) }
    }

    /// # Safety
    ///
    /// A stream of the GPU's primary context, for as long as the borrowing lasts.
    unsafe fn borrow(&self, stream: *mut c_void) -> Stream {
        // SAFETY: our caller's promise.
        unsafe { Stream::borrow(self.stream.device(), stream) }
    }
}

impl Drop for AllToAll {
    fn drop(&mut self) {
        // SAFETY: it is taken nowhere else, and nothing uses it afterwards.
        let Used { exchange, inbox, windows } = unsafe { ManuallyDrop::take(&mut self.used) };
        let device = self.stream.device();
        // Kernels' waits have deadlines, and others may end them, so this ends unless the caller's own do not.
        let ended = wait_for(device);
        // Nobody else has anything written to the exchange from here on; what was on its way then comes first.
        self.control.end();
        let ended = ended.and_then(|()| wait_for(device));
        match ended {
            Ok(()) => {
                let _closing = Closing::of(device.ordinal());
                drop(exchange);
            }
            Err(why) => {
                // The GPU has failed: kernels may go on.
                mem::forget((exchange, inbox, windows));
                tracing::warn!(%why, "what kernels may use still is never freed");
            }
        }
    }
}

/// Waits for all that a GPU has to do. Engines that use it know that the driver keeps others waiting meanwhile.
fn wait_for(device: &Device) -> Result<(), Error> {
    let _closing = Closing::of(device.ordinal());
    device.synchronize()
}

impl Control {
    /// As [`AllToAll::report`]; [`None`] once that was dropped.
    #[must_use]
    pub fn report(&self) -> Option<MoeReport> {
        lock(&self.going).exchange.as_ref().map(|exchange| exchange.report())
    }

    /// As [`AllToAll::abort`]; once that was dropped, there is nothing to end.
    ///
    /// # Errors
    ///
    /// [`MoeError::Gpu`].
    pub fn abort(&self) -> Result<(), MoeError> {
        // Enqueued with the lock held: before what starts over, or not at all.
        match &*lock(&self.going) {
            Going { exchange: Some(exchange), is_fresh: false } => {
                Ok(exchange.abort(&self.stream)?)
            }
            _ => Ok(()),
        }
    }

    fn set_fresh(&self, is_fresh: bool) {
        lock(&self.going).is_fresh = is_fresh;
    }

    fn end(&self) {
        // It is not the last one: the exchange itself has another.
        lock(&self.going).exchange.take();
    }
}

/// Clears an inbox, and waits for it.
fn clear(exchange: &Exchange, stream: &Stream, inbox: &Region) -> Result<(), MoeError> {
    // SAFETY: of this GPU and as long as the geometry says, at the start of an allocation of its own; no rank writes to it: they do
    // not know it yet, or have all stopped.
    unsafe { exchange.clear_inbox(stream, inbox.as_ptr() as u64)? };
    let cleared = Event::new(stream.device())?;
    cleared.record(stream)?;
    Ok(cleared.wait(CLEAR_LIMIT)?)
}

impl Joining {
    /// What the other ranks need.
    #[must_use]
    pub fn seat(&self) -> Seat {
        self.own.seat(&self.inbox, shape_digest(&self.config.shape))
    }

    /// Connects to the others, of whose ranks `seats` are, this one's included, and opens their inboxes.
    ///
    /// # Errors
    ///
    /// [`MoeError`] names the rank that does not fit, or cannot be reached, or not in time.
    pub fn join(self, seats: &[Seat], timeout: Duration) -> Result<AllToAll, MoeError> {
        let Self { config, exchange: mut unused, stream, inbox, own } = self;
        let until = Until::new(timeout);
        let engine = own.engine().clone();
        // It is there, and taken below.
        let exchange = unused.exchange.as_mut().ok_or(MoeError::Over)?;
        let geometry = exchange.geometry();
        let circle = Circle {
            world: geometry.world,
            digest: shape_digest(&config.shape),
            inbox_bytes: inbox.len(),
        };
        let mut others = own.join(seats, &circle, until)?;
        let at = |rank: u32| geometry.inbox_bytes + u64::from(rank) * GREETING_BYTES;
        let (from, to) = (at(0), at(config.rank));
        let here = At::set_up(until);
        let mut greet = || {
            for peer in 0..others.len() {
                others.write(peer, (&inbox, from), to, GREETING_BYTES, here)?;
            }
            others.arrive(1, here)?;
            others.all(here)
        };
        if let Err(error) = greet() {
            others.stop();
            return Err(match error {
                MoeError::Write {
                    rank,
                    error:
                        TransferError::Stopped(Stop::Piece { error: WorkError::RemoteAccess, .. }),
                } => MoeError::NotReached { rank, gpu: config.gpu },
                error => error,
            });
        }
        let mut inboxes = vec![inbox.as_ptr() as u64; seats.len()];
        let mut windows = Vec::with_capacity(others.len());
        let mut open = || {
            for peer in 0..others.len() {
                let (rank, gpu) = (others.rank(peer), config.gpu);
                let window = others.inbox(peer).and_then(|(id, desc)| engine.window(id, desc, gpu));
                let window = window.ok_or(MoeError::NotReached { rank, gpu })?;
                // PROOF: as many seats as ranks.
                inboxes[rank as usize] = window.address();
                windows.push(window);
            }
            exchange.connect(&inboxes)?;
            // Who cannot open an inbox does not come here: then nobody begins.
            others.meet(At::set_up(until))
        };
        // The others need not wait for who does not come.
        open().inspect_err(|_| others.stop())?;
        let exchange = unused.exchange.take().ok_or(MoeError::Over)?;
        let exchange = Arc::new(exchange);
        let going = Going { exchange: Some(Arc::clone(&exchange)), is_fresh: false };
        let control = Arc::new(Control { stream: stream.clone(), going: Mutex::new(going) });
        let used = ManuallyDrop::new(Used { exchange, inbox, windows });
        Ok(AllToAll { gpu: config.gpu, stream, others, is_over: false, control, used })
    }
}

/// Tells two shapes apart that cannot work together.
fn shape_digest(shape: &Shape) -> u64 {
    // Other than that of an exchange in host memory, and than that of kernels that lay their slots out another way.
    const GPU: u32 = u32::from_le_bytes(*b"GPU2");
    let number = |number| u32::from(number == Number::Fp16);
    let payload = match shape.payload {
        Payload::Raw { token_bytes, scale_bytes } => [0, token_bytes, scale_bytes],
        Payload::Fp8 { from, scales } => [1, number(from), u32::from(scales == Scales::Power)],
    };
    let numbers = [
        GPU,
        shape.top_k,
        shape.max_tokens,
        shape.values,
        number(shape.results),
        shape.padding,
        shape.exact.into(),
    ];
    digest(numbers.iter().chain(&payload).chain(&shape.firsts))
}
