//! Messages, and those who wait for them: tasks, threads and callbacks, first come, first served.
//!
//! The engine is asked for as many messages as somebody waits for, so that the rest stay with their
//! senders. What it is asked for cannot be taken back: if whoever waited has gone, the message is kept
//! for the next.
//!
//! # Invariants
//!
//! - Messages come by the thread on which the engine itself calls back: no Python code runs there.
//! - Nobody waits here for a message of an engine that is being stopped.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::CStr;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::engine::Running;
use crate::errors;
use crate::sync::{call_back, fresh_id, lock, wait};
use crate::transfer::{Caller, Job};
use crate::values;
use crate::waiting::{Bell, Op, Outcome, Waiter};

/// Who takes the next message, or the next few.
enum Taker {
    Waiter(u64, Waiter),
    Call { call: Arc<Py<PyAny>>, left: usize },
}

impl Taker {
    /// Messages.
    const fn wants(&self) -> usize {
        match self {
            Self::Waiter(..) => 1,
            Self::Call { left, .. } => *left,
        }
    }
}

/// See the [module](self).
pub(crate) struct Mailbox {
    state: Mutex<State>,
    caller: Arc<Caller>,
}

/// Either nobody waits, or nothing is kept.
#[derive(Default)]
struct State {
    /// Messages that the engine was asked for, and have not come.
    asked: u128,
    /// Messages that all takers together want: more than memory has addresses, where callers ask for as many as there may be.
    wanted: u128,
    /// Each wants one or more.
    takers: VecDeque<Taker>,
    /// Messages that have come.
    arrived: u64,
    /// Came when nobody waited any more, or were given back: by the order in which they came.
    kept: BTreeMap<u64, immwire::Message>,
    /// Whose they are, by the waiter's number; and the order in which they came.
    given: HashMap<u64, (u64, immwire::Message)>,
    closed: bool,
}

impl State {
    /// A message behind all that came before.
    fn keep(&mut self, message: immwire::Message) {
        self.kept.insert(self.arrived, message);
        self.arrived += 1;
    }
}

/// What is left to be done once the lock is free.
#[derive(Default)]
struct Aftermath {
    wake: Vec<Waiter>,
    run: Vec<Job>,
}

impl Aftermath {
    fn settle(self) {
        self.wake.iter().for_each(Waiter::wake);
        self.run.into_iter().for_each(|job| job());
    }
}

impl Mailbox {
    pub(crate) fn new(caller: Arc<Caller>) -> Self {
        Self { state: Mutex::default(), caller }
    }

    /// Gives what is kept to those who wait. Callbacks are queued under the lock, so that messages keep their
    /// order.
    fn hand_out(&self, state: &mut State) -> Aftermath {
        let mut after = Aftermath::default();
        while !state.kept.is_empty() && !state.takers.is_empty() {
            let Some((taker, kept)) = state.takers.pop_front().zip(state.kept.pop_first()) else {
                break;
            };
            state.wanted = state.wanted.saturating_sub(1);
            match taker {
                Taker::Waiter(id, waiter) => {
                    state.given.insert(id, kept);
                    after.wake.push(waiter);
                }
                Taker::Call { call, left } => {
                    let (_, message) = kept;
                    if let left @ 1.. = left.saturating_sub(1) {
                        state.takers.push_front(Taker::Call { call: Arc::clone(&call), left });
                    }
                    let engine = self.caller.engine();
                    let job = move || {
                        call_back(engine, &call, |py| {
                            (values::Message::new(py, &message),).into_pyobject(py)
                        });
                    };
                    after.run.extend(self.caller.queue(Box::new(job)).err());
                }
            }
        }
        after
    }

    /// A message that the engine was asked for.
    fn arrived(&self, message: immwire::Message) {
        let mut state = lock(&self.state);
        state.asked = state.asked.saturating_sub(1);
        state.keep(message);
        let after = self.hand_out(&mut state);
        drop(state);
        after.settle();
    }

    /// Puts a taker in line, gives it what there is, here or in the engine, and asks the engine for the rest: one that is on its way to stop
    /// cannot be asked, and tells who stands here when it has. Once it has, nobody stands in line.
    fn line_up(self: &Arc<Self>, engine: Option<&immwire::TransferEngine>, taker: Taker) {
        let mut state = lock(&self.state);
        if state.closed || taker.wants() == 0 {
            drop(state);
            return drop(taker);
        }
        state.wanted = state.wanted.saturating_add(taker.wants() as u128);
        let is_waiter = matches!(taker, Taker::Waiter(..));
        state.takers.push_back(taker);
        // What was asked for comes first, by the engine's callbacks, which calls are left to altogether.
        if is_waiter && state.kept.is_empty() && state.asked == 0 {
            let lies_there = engine.and_then(|engine| engine.recv(Duration::ZERO).ok());
            lies_there.into_iter().for_each(|message| state.keep(message));
        }
        let after = self.hand_out(&mut state);
        let more = state.wanted.saturating_sub(state.asked);
        let more = if engine.is_some() { usize::try_from(more).unwrap_or(usize::MAX) } else { 0 };
        state.asked = state.asked.saturating_add(more as u128);
        drop(state);
        after.settle();
        if let Some(engine) = engine.filter(|_| more > 0) {
            let mailbox = Arc::clone(self);
            engine.submit_recvs(more, move |message| mailbox.arrived(message));
        }
    }

    /// Each of the next `count` messages is for `call`.
    pub(crate) fn call(
        self: &Arc<Self>,
        engine: &immwire::TransferEngine,
        count: usize,
        call: Py<PyAny>,
    ) -> std::io::Result<()> {
        self.caller.start()?;
        self.line_up(Some(engine), Taker::Call { call: Arc::new(call), left: count });
        Ok(())
    }

    fn take(&self, id: u64) -> Option<immwire::Message> {
        lock(&self.state).given.remove(&id).map(|(_, message)| message)
    }

    /// The waiter goes: what was given to it is for the next.
    fn withdraw(&self, id: u64) {
        let mut state = lock(&self.state);
        let is_it = |taker: &Taker| matches!(taker, Taker::Waiter(other, _) if *other == id);
        let gone = state.takers.iter().position(is_it).and_then(|at| state.takers.remove(at));
        state.wanted = state.wanted.saturating_sub(gone.as_ref().map_or(0, Taker::wants) as u128);
        if let Some((order, message)) = state.given.remove(&id) {
            // Before those that came later, whoever gives them back first.
            state.kept.insert(order, message);
        }
        let after = self.hand_out(&mut state);
        drop(state);
        after.settle();
        // After the lock: the last of a loop's waiters takes the loop's futures with it.
        drop(gone);
    }

    /// The engine is about to stop: who waits looks once more, and finds that it is. What has come is for callbacks still.
    pub(crate) fn dismiss(&self) {
        let waiter = |taker: &Taker| match taker {
            Taker::Waiter(_, waiter) => Some(waiter.clone()),
            Taker::Call { .. } => None,
        };
        let waiters: Vec<Waiter> = lock(&self.state).takers.iter().filter_map(waiter).collect();
        waiters.iter().for_each(Waiter::wake);
    }

    /// The engine has stopped: nobody is left waiting.
    pub(crate) fn close(&self) {
        let takers = {
            let mut state = lock(&self.state);
            (state.closed, state.wanted) = (true, 0);
            std::mem::take(&mut state.takers)
        };
        for taker in takers {
            if let Taker::Waiter(_, waiter) = taker {
                waiter.wake();
            }
        }
    }

    fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }
}

/// A wait for one message.
pub(crate) struct Recv {
    mailbox: Arc<Mailbox>,
    core: Weak<Running>,
    /// Once it stands in line.
    id: Option<u64>,
}

impl Recv {
    pub(crate) fn new(core: &Arc<Running>) -> Self {
        Self { mailbox: Arc::clone(&core.mailbox), core: Arc::downgrade(core), id: None }
    }

    fn found(&mut self) -> Option<PyResult<immwire::Message>> {
        let given = self.id.and_then(|id| self.mailbox.take(id));
        match given {
            Some(message) => Some(Ok(message)),
            // An engine that is being stopped may be waiting for this one to go.
            None if self.core.strong_count() == 0 || self.mailbox.is_closed() => {
                Some(Err(errors::closed("engine")))
            }
            None => None,
        }
    }

    fn stand_in_line(&mut self, id: u64, waiter: Waiter) {
        if let Some(id) = self.id.replace(id) {
            self.mailbox.withdraw(id);
        }
        let core = self.core.upgrade();
        let engine = core.as_ref().map(|core| &core.engine);
        self.mailbox.line_up(engine, Taker::Waiter(id, waiter));
    }

    /// Waits without an event loop.
    pub(crate) fn block(mut self, py: Python<'_>, timeout: Duration) -> PyResult<values::Message> {
        let message = wait(py, timeout, |slice| {
            if self.id.is_none() {
                self.stand_in_line(fresh_id(), Waiter::Thread(std::thread::current()));
            }
            let from = Instant::now();
            loop {
                let found = self.found();
                let left = slice.saturating_sub(from.elapsed());
                if found.is_some() || left.is_zero() {
                    return found;
                }
                std::thread::park_timeout(left);
            }
        })?;
        let timed_out = || errors::recv(immwire::RecvError::Timeout { after: timeout });
        let message = message.unwrap_or_else(|| Err(timed_out()))?;
        Ok(values::Message::new(py, &message))
    }
}

impl Op for Recv {
    fn forgotten(&self) -> &'static CStr {
        c"TransferEngine.recv was never awaited"
    }

    fn look(&mut self, py: Python<'_>) -> Option<Outcome> {
        let found = self.found()?;
        Some(found.and_then(|message| {
            Bound::new(py, values::Message::new(py, &message)).map(|m| m.into_any().unbind())
        }))
    }

    fn watch(&mut self, py: Python<'_>, bell: &Arc<Bell>) -> Option<Outcome> {
        self.stand_in_line(bell.id(), Waiter::Task(Arc::clone(bell)));
        self.look(py)
    }

    fn late(&mut self, py: Python<'_>, after: Duration) -> Outcome {
        if self.id.is_none() {
            // There was no time to wait at all: what lies there is taken all the same.
            self.stand_in_line(fresh_id(), Waiter::Thread(std::thread::current()));
        }
        let timed_out = || Err(errors::recv(immwire::RecvError::Timeout { after }));
        self.look(py).unwrap_or_else(timed_out)
    }
}

impl Drop for Recv {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.mailbox.withdraw(id);
        }
    }
}
