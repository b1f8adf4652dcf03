//! Streams of GPUs that wait for counts.
//!
//! A gate is a word of pinned host memory that a stream waits for (`cuStreamWaitValue64`): no thread waits, and no SM is
//! taken. Whoever counts the last write opens it; a thread of its own does at the deadline, and the engine's end does: a
//! stream is never held for good. Why it went on is in the [`StreamWait`]. CUDA does not see what it waits for, and may have other streams wait behind it
//! that share its connection (`TransferEngine::wait_on_stream`).
//!
//! ```text
//!   caller                                      whoever counts, the deadline, the end
//!   arm the counter
//!   leave the gate where a waker would be  ───▶ end it: settle the counter, note the result,
//!   enqueue the wait, then an event             then open the word
//!   use the word again: the event is done
//! ```
//!
//! # What it refuses to know
//!
//! What a count is (`counting`), and what the streams do besides.
//!
//! # Invariants
//!
//! - Each gate is ended once, by whoever takes its counter out of it, and its word is opened after the result is there: a
//!   caller that has waited for the stream finds it.
//! - A word is used again, and its page freed, only when the stream that waited for it is past it.
//! - Whoever ends gates calls nothing of CUDA's, nor waits for anybody who does: much of CUDA waits for streams, held ones
//!   too. So the words are made with the engine.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use immwire_core::wake::Ticket;
use immwire_cuda::{Event, Stream};

use crate::counter::ImmCounter;
use crate::error::CountError;
use crate::provider::{PinnedPage, RegisterError};
use crate::sync::{Timer, lock, sleep_locked};
use crate::thread;
use crate::wait::OnEnd;
use crate::words::Word;

const SHUT: u64 = 0;
const OPEN: u64 = 1;

/// Why a stream does not wait.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum StreamWaitError {
    /// The engine does not use the GPU, or the thread for deadlines could not be started.
    #[error(transparent)]
    Memory(#[from] RegisterError),
    /// As many waits as there can be are in streams that have not come so far.
    #[error(
        "all {capacity} waits of streams are in use: let some streams go on, or build the engine with more counters"
    )]
    Full {
        /// Twice the engine's counters, or a little more.
        capacity: usize,
    },
    /// The wait on the counter could not begin.
    #[error(transparent)]
    Count(#[from] CountError),
    /// The driver refused the wait. The counter is as it was.
    #[error("the stream cannot wait: {0}")]
    Driver(immwire_cuda::Error),
    /// The stream is being captured into a CUDA graph, whose every replay would wait for this one count.
    #[error(
        "the stream is being captured: have the stream that the graph is launched in wait, before the launch"
    )]
    Capturing,
}

enum State {
    /// For this counter.
    Waiting(Arc<ImmCounter>),
    /// Somebody is ending it.
    Ending,
    Over(Result<(), CountError>),
}

/// One wait of one stream.
struct Gate {
    word: Word,
    ticket: Ticket,
    writes: u64,
    timeout: Duration,
    state: Mutex<State>,
    over: Condvar,
}

impl Gate {
    /// Ends it, if nobody else does: `settle` says what has become of the count. Returns whether it did.
    fn end(&self, settle: impl FnOnce(&ImmCounter) -> Result<(), CountError>) -> bool {
        let taken = {
            let mut state = lock(&self.state);
            match std::mem::replace(&mut *state, State::Ending) {
                State::Waiting(counter) => counter,
                other => {
                    *state = other;
                    return false;
                }
            }
        };
        let result = settle(&taken);
        let mut state = lock(&self.state);
        *state = State::Over(result);
        self.word.set(OPEN);
        drop(state);
        self.over.notify_all();
        true
    }

    /// The wait for the count has ended with `code`.
    fn reached(&self, code: u8) {
        self.end(|counter| counter.settle(self.ticket, code, self.writes));
    }

    /// The engine ends.
    fn stop(&self) {
        self.end(|counter| {
            counter.abandon(self.ticket, self.writes);
            Err(CountError::EngineStopped)
        });
    }

    /// The time is up.
    fn expire(&self) {
        self.end(|counter| counter.give_up(self.ticket, self.writes, &[], self.timeout));
    }
}

impl OnEnd for Gate {
    fn ended(self: Arc<Self>, _ticket: Ticket, code: u8) {
        self.reached(code);
    }
}

/// A word, and what says that the stream that waited for it is past it; a word that nobody waited for has none.
struct Used {
    word: Word,
    passed: Option<Event>,
}

impl Used {
    fn is_free(&self) -> bool {
        // A driver that cannot say: the word is kept.
        self.passed.as_ref().is_none_or(|event| event.is_done().unwrap_or(false))
    }
}

#[derive(Default)]
struct Words {
    fresh: Vec<Word>,
    used: VecDeque<Used>,
    capacity: usize,
}

impl Words {
    /// A word that no stream waits for. O(waits that are held), of which each is asked of the driver.
    fn take(&mut self) -> Option<Word> {
        if let Some(word) = self.fresh.pop() {
            return Some(word);
        }
        for _ in 0..self.used.len() {
            let used = self.used.pop_front()?;
            if used.is_free() {
                used.word.set(SHUT);
                return Some(used.word);
            }
            self.used.push_back(used);
        }
        None
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        for used in self.used.drain(..) {
            if !used.is_free() {
                used.word.leak();
            }
        }
    }
}

#[derive(Default)]
struct Held {
    /// With their deadlines, if they have one; some that are over among them.
    gates: Vec<(Option<Instant>, Weak<Gate>)>,
    /// So many of them may there be before those that are over are looked for.
    room: usize,
    /// When the thread will look, if it sleeps.
    next: Option<Instant>,
    thread: Option<JoinHandle<()>>,
    is_stopped: bool,
}

/// The gates of an engine.
pub(crate) struct Gates {
    words: Mutex<Words>,
    held: Mutex<Held>,
    changed: Condvar,
}

impl Gates {
    /// Room for so many waits that streams have not come past.
    pub(crate) fn new(
        words: usize,
        pin: impl Fn(usize) -> Result<PinnedPage, RegisterError>,
    ) -> Result<Arc<Self>, RegisterError> {
        let mut fresh = Vec::new();
        while fresh.len() < words {
            fresh.extend(Word::page(&pin)?);
        }
        let words = Words { capacity: fresh.len(), fresh, used: VecDeque::new() };
        let (words, held, changed) = (Mutex::new(words), Mutex::default(), Condvar::new());
        Ok(Arc::new(Self { words, held, changed }))
    }

    /// Holds `stream` back until `writes` have arrived at `counter`, or `timeout` has passed.
    pub(crate) fn hold(
        self: &Arc<Self>,
        stream: &Stream,
        counter: &Arc<ImmCounter>,
        writes: u64,
        timeout: Duration,
    ) -> Result<StreamWait, StreamWaitError> {
        if stream.is_capturing().map_err(StreamWaitError::Driver)? {
            return Err(StreamWaitError::Capturing);
        }
        self.start()?;
        let word = {
            let mut words = lock(&self.words);
            let capacity = words.capacity;
            words.take().ok_or(StreamWaitError::Full { capacity })?
        };
        let armed = counter.arm(writes).inspect_err(|_| self.give_back(word.clone(), None))?;
        let Some(ticket) = armed else {
            // What is there is there for whatever the stream is given next.
            self.give_back(word, None);
            return Ok(StreamWait(Outcome::There));
        };
        let state = Mutex::new(State::Waiting(Arc::clone(counter)));
        let over = Condvar::new();
        let gate = Arc::new(Gate { word, ticket, writes, timeout, state, over });
        // Left first: once its time runs, its ticket may be anybody's, and who is left for a stale one is in the way of the next.
        if let Some(code) = counter.leave(ticket, Arc::clone(&gate) as _) {
            gate.reached(code);
        }
        self.time(&gate);
        match self.enqueue(stream, &gate.word) {
            Ok(()) => Ok(StreamWait(Outcome::Gate(gate))),
            Err(why) => {
                let ended = gate.end(|counter| {
                    counter.abandon(ticket, writes);
                    Ok(())
                });
                // Somebody else is ending it, and waits for nobody meanwhile: there is no deadline to miss.
                if !ended && gate.outcome(Duration::MAX) == Some(Ok(())) {
                    // It was reached, and nobody goes on for it.
                    counter.restore(writes);
                }
                self.give_back(gate.word.clone(), None);
                Err(StreamWaitError::Driver(why))
            }
        }
    }

    fn give_back(&self, word: Word, passed: Option<Event>) {
        lock(&self.words).used.push_back(Used { word, passed });
    }

    /// Has the stream wait for the word.
    fn enqueue(&self, stream: &Stream, word: &Word) -> Result<(), immwire_cuda::Error> {
        let passed = Event::new(stream.device())?;
        // SAFETY: pinned memory, which is left alone and not freed before `passed` is done; or for good, if nobody can say
        // when that is.
        unsafe { stream.after_word(word.address(), OPEN) }?;
        match passed.record(stream) {
            Ok(()) => self.give_back(word.clone(), Some(passed)),
            Err(_) => word.clone().leak(),
        }
        Ok(())
    }

    /// Starts the thread, the first time.
    fn start(self: &Arc<Self>) -> Result<(), RegisterError> {
        let mut held = lock(&self.held);
        if held.thread.is_none() && !held.is_stopped {
            let gates = Arc::clone(self);
            let os = |source| RegisterError::Os { call: "starting a thread", bytes: 0, source };
            let serve = move || gates.serve();
            held.thread = Some(thread::spawn("immwire-gates", serve).map_err(os)?);
        }
        Ok(())
    }

    /// Notes the gate, to be ended in time.
    fn time(&self, gate: &Arc<Gate>) {
        let deadline = Instant::now().checked_add(gate.timeout);
        let mut held = lock(&self.held);
        if held.is_stopped {
            drop(held);
            return gate.stop();
        }
        if held.gates.len() >= held.room {
            held.gates.retain(|(_, gate)| gate.upgrade().is_some_and(|gate| !gate.is_over()));
            held.room = 2 * held.gates.len() + 64;
        }
        held.gates.push((deadline, Arc::downgrade(gate)));
        let later = |at| held.next.is_none_or(|next| at < next);
        if deadline.is_some_and(later) {
            self.changed.notify_all();
        }
    }

    /// Ends gates whose time is up, until the engine ends.
    fn serve(&self) {
        let mut held = lock(&self.held);
        while !held.is_stopped {
            let now = Instant::now();
            let is_late = |at: &Option<Instant>| at.is_some_and(|at| at <= now);
            let late: Vec<_> = held.gates.extract_if(.., |(at, _)| is_late(at)).collect();
            if !late.is_empty() {
                drop(held);
                late.iter().filter_map(|(_, gate)| gate.upgrade()).for_each(|gate| gate.expire());
                held = lock(&self.held);
                continue;
            }
            held.next = held.gates.iter().filter_map(|&(at, _)| at).min();
            let left = held.next.map_or(Duration::MAX, |at| at.saturating_duration_since(now));
            held = sleep_locked(&self.changed, held, left);
        }
    }

    /// Ends the thread and all gates: the engine ends, and holds no streams any more. The second time, it does nothing.
    pub(crate) fn stop(&self) {
        let mut held = lock(&self.held);
        held.is_stopped = true;
        let (thread, gates) = (held.thread.take(), std::mem::take(&mut held.gates));
        self.changed.notify_all();
        drop(held);
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that opens gates panicked");
        }
        gates.iter().filter_map(|(_, gate)| gate.upgrade()).for_each(|gate| gate.stop());
    }
}

impl Gate {
    fn is_over(&self) -> bool {
        matches!(*lock(&self.state), State::Over(_))
    }

    /// The result, which is waited for for `timeout` at most.
    fn outcome(&self, timeout: Duration) -> Option<Result<(), CountError>> {
        let timer = Timer::start(timeout);
        let mut state = lock(&self.state);
        loop {
            if let State::Over(result) = &*state {
                return Some(result.clone());
            }
            state = sleep_locked(&self.over, state, timer.left()?);
        }
    }
}

enum Outcome {
    /// Nothing had to be waited for.
    There,
    Gate(Arc<Gate>),
}

/// A stream's wait for a count, as [`TransferEngine::wait_on_stream`](crate::TransferEngine::wait_on_stream) began it: why
/// the stream goes on. Dropping it changes nothing for the stream.
pub struct StreamWait(Outcome);

impl StreamWait {
    /// Why the stream goes on, or [`None`] while it is held. It is there before the stream goes on. A lock that nobody holds for
    /// longer than it takes to count.
    ///
    /// # Errors
    ///
    /// Inside: [`CountError::Timeout`] and [`CountError::EngineStopped`], and the stream goes on all the same: what it
    /// waited for may not be there.
    #[must_use]
    pub fn poll(&self) -> Option<Result<(), CountError>> {
        self.wait(Duration::ZERO)
    }

    /// As [`StreamWait::poll`], waiting for it: `timeout` at most.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<Result<(), CountError>> {
        match &self.0 {
            Outcome::There => Some(Ok(())),
            Outcome::Gate(gate) => gate.outcome(timeout),
        }
    }
}

impl fmt::Debug for StreamWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StreamWait").field(&self.poll()).finish()
    }
}
