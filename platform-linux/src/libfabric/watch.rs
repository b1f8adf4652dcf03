//! One descriptor for all that an engine on libfabric sleeps on.
//!
//! It knows epoll(7), and nothing of queues but what [`Signs`] say. Whether to sleep is decided elsewhere.
//!
//! A queue's descriptors are those of `epoll`s, which the kernel marks with each packet; one that others are nested
//! around is handed on to each of these, at the sender's expense if it is on this host. So they are nested only while the
//! engine sleeps now and then: an engine that polls without a rest has nothing around them.
//!
//! # Invariants
//!
//! - The descriptor given out stays the same.
//! - What was watched is forgotten as a whole, by closing what watched it: never by the number of a descriptor, which may
//!   be another's by now.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use immwire_core::id::Time;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::ENDPOINTS_MAX;
use super::fabric::Signs;

/// An engine that has been awake for so long may go on so.
const AWAKE: Duration = Duration::from_millis(2);

/// What all queues of an engine are slept on by.
pub(super) type AllSigns = heapless::Vec<Signs, ENDPOINTS_MAX>;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Watch {
    /// Around what is always watched, and `queues`.
    outer: OwnedFd,
    /// Around the queues' descriptors, and what these are.
    queues: Option<(OwnedFd, AllSigns)>,
    /// Since when the engine has not slept, as far as is known.
    awake: Option<Time>,
    /// The queues could not be watched.
    is_blind: bool,
}

fn add(epoll: &OwnedFd, fd: BorrowedFd<'_>, events: EventFlags) -> io::Result<()> {
    Ok(epoll::add(epoll, fd, EventData::new_u64(0), events)?)
}

impl Watch {
    /// Watches `always`, which stay open as long as this.
    pub(super) fn new(always: &[BorrowedFd<'_>]) -> io::Result<Self> {
        let outer = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        always.iter().try_for_each(|fd| add(&outer, *fd, EventFlags::IN))?;
        Ok(Self { outer, queues: None, awake: None, is_blind: false })
    }

    /// Readable when anything is that is watched.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.outer.as_fd()
    }

    /// The engine is about to sleep: watches the queues with these signs, and no others. `false`: it cannot, and has said
    /// so. Costs a system call for each descriptor, but nothing if these are watched already.
    pub(super) fn queues(&mut self, signs: &AllSigns) -> bool {
        self.awake = None;
        if self.queues.as_ref().is_some_and(|(_, watched)| watched == signs) {
            return true;
        }
        self.queues = None;
        match self.nest(signs) {
            Ok(inner) => self.queues = Some((inner, signs.clone())),
            // Once: it is tried again each time.
            Err(error) if !self.is_blind => {
                tracing::warn!(%error, "no packet wakes the engine, its clock alone does");
            }
            Err(_) => {}
        }
        self.is_blind = self.queues.is_none();
        !self.is_blind
    }

    /// An `epoll` around the queues' descriptors.
    fn nest(&self, signs: &[Signs]) -> io::Result<OwnedFd> {
        let inner = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (fd, events) in signs.iter().flat_map(|signs| &signs.all) {
            // SAFETY: a descriptor of a queue of the caller's, which is open.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            let events = u32::from(events.unsigned_abs());
            add(&inner, fd, EventFlags::from_bits_truncate(events))?;
        }
        add(&self.outer, inner.as_fd(), EventFlags::IN)?;
        Ok(inner)
    }

    /// Watches no queue, until it is told again: some of those that were watched have been closed, or replaced.
    pub(super) fn forget(&mut self) {
        self.queues = None;
    }

    /// The engine is awake: if it has been for a while, no queue is watched.
    pub(super) fn awake(&mut self, now: Time) {
        let since = *self.awake.get_or_insert(now);
        if now.since(since) >= AWAKE {
            self.forget();
        }
    }
}
