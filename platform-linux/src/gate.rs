//! Streams of GPUs that wait for counts.
//!
//! A gate is a word of pinned host memory that a stream waits for (`cuStreamWaitValue64`): no thread waits, and no SM is
//! taken. Whoever counts the last write opens it. At its deadline the engine does, and when the engine ends: a stream is
//! never held for good. Why it went on is in the [`StreamWait`].
//!
//! ```text
//!   caller                                      whoever counts, or the engine
//!   arm the counter
//!   leave the gate where a waker would be  ───▶ end it: settle the counter, note the result,
//!   enqueue the wait, then an event             then open the word
//!   use the word again: the event is done
//! ```
//!
//! # What it refuses to know
//!
//! What a count is (`counting`), what the clock says, and what the streams do besides.
//!
//! # Invariants
//!
//! - Each gate is ended once, by whoever takes its counter out of it, and its word is opened after the result is there: a
//!   caller that has waited for the stream finds it.
//! - A word is used again, and its page freed, only when the stream that waited for it is past it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use immwire_core::id::Time;
use immwire_core::wake::Ticket;
use immwire_cuda::{Event, PinnedMemory, Stream};

use crate::counter::ImmCounter;
use crate::error::CountError;
use crate::provider::RegisterError;
use crate::sync::{lock, sleep_locked};
use crate::words::Word;

const SHUT: u64 = 0;
const OPEN: u64 = 1;
/// Words that are looked at for one that is free, before another page is made.
const LOOKS: usize = 8;

/// Why a stream does not wait.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum StreamWaitError {
    /// The engine does not use the GPU, or memory could not be pinned for it.
    #[error(transparent)]
    Memory(#[from] RegisterError),
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

    /// The time is up.
    fn expire(&self) {
        self.end(|counter| counter.give_up(self.ticket, self.writes, &[], self.timeout));
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
struct Table {
    fresh: Vec<Word>,
    used: VecDeque<Used>,
    /// Gates with a deadline.
    timed: Vec<(Time, Weak<Gate>)>,
}

impl Table {
    /// A word that no stream waits for.
    fn take(
        &mut self,
        pin: impl FnOnce(usize) -> Result<PinnedMemory, RegisterError>,
    ) -> Result<Word, RegisterError> {
        for _ in 0..self.used.len().min(LOOKS) {
            let Some(used) = self.used.pop_front() else { break };
            if used.is_free() {
                used.word.set(SHUT);
                return Ok(used.word);
            }
            self.used.push_back(used);
        }
        if self.fresh.is_empty() {
            self.fresh.extend(Word::page(pin)?);
        }
        self.fresh.pop().ok_or(RegisterError::Empty)
    }
}

/// The gates of an engine.
pub(crate) struct Gates {
    table: Mutex<Table>,
    /// The first deadline there may be, in nanoseconds.
    due: AtomicU64,
}

impl Default for Gates {
    fn default() -> Self {
        Self { table: Mutex::default(), due: AtomicU64::new(Time::NEVER.as_nanos()) }
    }
}

impl Drop for Gates {
    fn drop(&mut self) {
        let table = self.table.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        for used in table.used.drain(..) {
            if !used.is_free() {
                used.word.leak();
            }
        }
    }
}

impl Gates {
    /// Holds `stream` back until `writes` have arrived at `counter`, or `deadline`, which is `timeout` from now.
    pub(crate) fn hold(
        &self,
        stream: &Stream,
        counter: &Arc<ImmCounter>,
        writes: u64,
        (deadline, timeout): (Time, Duration),
        pin: impl FnOnce(usize) -> Result<PinnedMemory, RegisterError>,
    ) -> Result<StreamWait, StreamWaitError> {
        if stream.is_capturing().map_err(StreamWaitError::Driver)? {
            return Err(StreamWaitError::Capturing);
        }
        let word = lock(&self.table).take(pin)?;
        let armed = counter.arm(writes).inspect_err(|_| self.give_back(word.clone(), None))?;
        let Some(ticket) = armed else {
            // What is there is there for whatever the stream is given next.
            self.give_back(word, None);
            return Ok(StreamWait(Outcome::There));
        };
        let state = Mutex::new(State::Waiting(Arc::clone(counter)));
        let over = Condvar::new();
        let gate = Arc::new(Gate { word, ticket, writes, timeout, state, over });
        if deadline != Time::NEVER {
            self.time(&gate, deadline);
        }
        let left = Arc::clone(&gate);
        counter.leave(ticket, move |code| left.reached(code));
        match self.enqueue(stream, &gate.word) {
            Ok(()) => Ok(StreamWait(Outcome::Gate(gate))),
            Err(why) => {
                let ended = gate.end(|counter| {
                    counter.abandon(ticket, writes);
                    Ok(())
                });
                if !ended && gate.outcome(Duration::MAX) == Some(Ok(())) {
                    // It was reached meanwhile, and nobody goes on for it.
                    counter.restore(writes);
                }
                self.give_back(gate.word.clone(), None);
                Err(StreamWaitError::Driver(why))
            }
        }
    }

    fn give_back(&self, word: Word, passed: Option<Event>) {
        lock(&self.table).used.push_back(Used { word, passed });
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

    /// Ends the gate at a time.
    fn time(&self, gate: &Arc<Gate>, deadline: Time) {
        let mut table = lock(&self.table);
        table.timed.retain(|(_, gate)| gate.strong_count() > 0);
        table.timed.push((deadline, Arc::downgrade(gate)));
        self.due.fetch_min(deadline.as_nanos(), Ordering::Release);
    }

    /// When [`Gates::expire`] has something to do, at the earliest. A load.
    pub(crate) fn due(&self) -> Time {
        Time::from_nanos(self.due.load(Ordering::Acquire))
    }

    /// Opens the gates whose time is up.
    pub(crate) fn expire(&self, now: Time) {
        let mut table = lock(&self.table);
        let late: Vec<_> = table.timed.extract_if(.., |(deadline, _)| *deadline <= now).collect();
        table.timed.retain(|(_, gate)| gate.strong_count() > 0);
        let next = table.timed.iter().map(|(deadline, _)| *deadline).min();
        self.due.store(next.unwrap_or(Time::NEVER).as_nanos(), Ordering::Release);
        drop(table);
        for gate in late.iter().filter_map(|(_, gate)| gate.upgrade()) {
            gate.expire();
        }
    }
}

impl Gate {
    /// The result, which is waited for for `timeout` at most.
    fn outcome(&self, timeout: Duration) -> Option<Result<(), CountError>> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = lock(&self.state);
        loop {
            if let State::Over(result) = &*state {
                return Some(result.clone());
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return None;
            }
            state = sleep_locked(&self.over, state, left.unwrap_or(Duration::MAX));
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
