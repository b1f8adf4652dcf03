//! Completion queues: exactly as many entries as asked for, and nothing that protects them.
//!
//! # Invariants
//!
//! 1. A queue that gets one entry more than it has room for is dead: every read of it fails from then on.
//! 2. Its file descriptor becomes readable once after each time it was armed (at the open, and by `fi_trywait`), as a
//!    device's event channel does; who sleeps without arming sleeps on.
//! 3. A send or receive queue's slot, and a context, are the provider's until their completion was read.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use libfabric_sys as sys;

use crate::context::Context;
use crate::lock;
use crate::log::{Rule, violation};
use crate::memory::{InUse, Users};
use crate::packet::Address;
use crate::peers::Peers;
use crate::status::Status;

/// One completion.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The operation's, or `None` for a write of somebody else's.
    pub context: Option<Context>,
    /// `FI_SEND`, `FI_REMOTE_WRITE` and the like.
    pub flags: u64,
    pub len: usize,
    pub data: u64,
    /// Whose it was, and where its number is to be looked up, if the endpoint reports that.
    pub source: Option<(Address, Arc<Peers>)>,
    pub status: Status,
    /// The number of the endpoint that it is of.
    pub endpoint: u64,
    /// Its place in the send or receive queue.
    pub _slot: Option<InUse>,
}

#[derive(Debug)]
struct State {
    entries: VecDeque<Entry>,
    dead: bool,
    armed: bool,
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Queue {
    size: usize,
    /// How its entries are laid out.
    pub format: sys::fi_cq_format,
    /// The number of the domain it is of.
    pub domain: u64,
    /// Becomes readable; `None` without a wait object.
    pub wait: Option<OwnedFd>,
    /// Endpoints bound to it.
    pub users: Users,
    state: Mutex<State>,
}

impl Queue {
    /// Returns an empty queue of `size` entries.
    pub(crate) fn new(
        size: usize,
        format: sys::fi_cq_format,
        domain: u64,
        wait: Option<OwnedFd>,
    ) -> Self {
        let state = Mutex::new(State { entries: VecDeque::new(), dead: false, armed: true });
        Self { size, format, domain, wait, users: Users::default(), state }
    }

    /// Adds an entry; kills the queue if it is full.
    pub(crate) fn push(&self, entry: Entry) {
        let mut state = lock(&self.state);
        if state.dead {
            return;
        }
        if state.entries.len() == self.size {
            state.dead = true;
            violation(
                Rule::CqOverrun,
                &format!("one entry too many for a completion queue of {}", self.size),
            );
        } else {
            state.entries.push_back(entry);
        }
        if std::mem::take(&mut state.armed)
            && let Some(wait) = &self.wait
        {
            crate::wired::signal(wait);
        }
    }

    /// Takes up to `max` entries before the first that failed, calls `write` with the number and text of each, and
    /// returns how many; or an error, negated: there is none, the next failed, or the queue is dead.
    pub(crate) fn read(&self, max: usize, mut write: impl FnMut(usize, &Entry)) -> isize {
        let mut state = lock(&self.state);
        if state.dead {
            return -(sys::FI_EOVERRUN as isize);
        }
        let mut count = 0;
        while count < max
            && state.entries.front().is_some_and(|entry| entry.status == Status::Ok)
            && let Some(entry) = state.entries.pop_front()
        {
            write(count, &entry);
            count += 1;
        }
        match (count, state.entries.is_empty()) {
            (0, false) if max > 0 => -(sys::FI_EAVAIL as isize),
            (0, _) => -(sys::FI_EAGAIN as isize),
            _ => count as isize,
        }
    }

    /// Takes the next entry if it failed.
    pub(crate) fn read_error(&self) -> Result<Entry, i32> {
        let mut state = lock(&self.state);
        if state.dead {
            return Err(-sys::FI_EOVERRUN);
        }
        let failed = state.entries.front().is_some_and(|entry| entry.status != Status::Ok);
        failed.then(|| state.entries.pop_front()).flatten().ok_or(-sys::FI_EAGAIN)
    }

    /// Arms the file descriptor: `true` if the caller may sleep, `false` if there is something to read.
    pub(crate) fn arm(&self) -> bool {
        let mut state = lock(&self.state);
        if let Some(wait) = &self.wait {
            crate::wired::drain(wait);
        }
        state.armed = state.entries.is_empty() && !state.dead;
        state.armed
    }

    /// Drops the entries of an endpoint that `discard` picks, by their place in the queue.
    pub(crate) fn discard(&self, endpoint: u64, discard: impl Fn(u64) -> bool) -> u64 {
        let mut state = lock(&self.state);
        let (before, mut place) = (state.entries.len(), 0);
        state.entries.retain(|entry| {
            place += 1;
            entry.endpoint != endpoint || !discard(place)
        });
        (before - state.entries.len()) as u64
    }
}
