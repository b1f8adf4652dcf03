//! Looks addresses up on threads of its own.
//!
//! On Ethernet the kernel asks the network which device has an address, when an address handle is made and when a queue
//! pair is connected. That takes microseconds if it knows or is told, and a second if nobody answers. So a handle is
//! made by a thread here; after that the kernel knows the address for a while, and a queue pair is connected at once. What
//! is looked up when, and how long it counts, is `immwire_core::resolve`'s. Knows addresses; knows nothing of peers.
//!
//! On InfiniBand nothing is looked up; handles are made here all the same.
//!
//! # Invariants
//!
//! - Who asks never waits: there is an answer, or there will be. Then the descriptor is readable, until the
//!   answers are taken.
//! - A queue pair is connected only to an address that was found less than [`FRESH`] ago.
//! - Threads are started when there is something to do, so many at most, and joined when this is dropped. That may take as
//!   long as a lookup that is under way: a second.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use immwire_core::id::{NicIndex, Time};
use immwire_core::port::{Gid, GidKind, Port, Queue, Route};
use immwire_core::resolve::{Asker, Known, Limits, Look, Reach, Resolve};
use rustix::event::EventfdFlags;

use super::device::{AddressHandle, Device, Domain, QueuePair};
use super::{VerbsError, VerbsOptions};
use crate::sync::lock;
use crate::thread;

/// Lookups at a time, each on a thread: so many addresses that nobody has keep others waiting for a second.
const AT_ONCE: usize = 8;
/// Addresses that are known at a time.
const ADDRESSES: usize = 512;
/// How long the kernel is believed to know an address that it was asked for. It does longer, unless it finds that nobody
/// answers there any more.
const FRESH: Duration = Duration::from_secs(3);
/// How long a handle is used before the address is looked up again: it may move to another device. The handle is used
/// until that has an answer.
const KNOWN_FOR: Duration = Duration::from_secs(10);

const LIMITS: Limits = Limits {
    at_once: AT_ONCE,
    strangers_at_once: AT_ONCE / 2,
    strangers_first: AT_ONCE / 4,
    heard_first: AT_ONCE / 2,
    strangers_waiting: 128,
    // Less than a call lasts: who comes up meanwhile is found.
    rest: Duration::from_secs(1),
    kept: Duration::from_secs(60),
};

/// An address, as one of our devices reaches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    /// The first NIC of that device.
    nic: NicIndex,
    dlid: u16,
    dgid: Option<Gid>,
}

/// A NIC.
#[derive(Debug)]
struct Here {
    port: Port,
    domain: Arc<Domain>,
    /// The first of the same device: they find what it finds.
    first: NicIndex,
}

/// An address that is to be looked up.
#[derive(Debug)]
struct Job {
    key: Key,
    route: Route,
    domain: Arc<Domain>,
}

type Answer = (Key, Result<AddressHandle, VerbsError>);

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    answers: Vec<Answer>,
    is_stopped: bool,
}

/// What the engine and the threads share.
#[derive(Debug)]
struct Desk {
    state: Mutex<State>,
    changed: Condvar,
    wake: OwnedFd,
    options: VerbsOptions,
}

impl Desk {
    /// The next job, once there is one; `None` when it is over.
    fn next(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        loop {
            if state.is_stopped {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            // Until there is a job, or the resolver is dropped, which says so.
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn serve(&self) {
        while let Some(Job { key, route, domain }) = self.next() {
            let found = AddressHandle::new(&domain, &route, &self.options);
            lock(&self.state).answers.push((key, found));
            // Full is as good: it is readable.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

/// The way of a datagram.
#[derive(Debug)]
pub(super) enum Way {
    Known(Arc<AddressHandle>),
    /// It is being looked up.
    Waits,
    /// Nobody answers there, or it is not ours to know now.
    Nowhere,
}

/// Looks addresses up. See the [module](self).
#[derive(Debug)]
pub(super) struct Resolver {
    table: Box<Resolve<Key, Arc<AddressHandle>, ADDRESSES>>,
    /// By NIC.
    here: Vec<Here>,
    desk: Arc<Desk>,
    threads: Vec<JoinHandle<()>>,
    /// Jobs whose answers were not taken.
    under_way: usize,
}

impl Resolver {
    /// For these NICs, each with the domain that handles are made in for its device: the door's.
    pub(super) fn new(
        domains: impl Iterator<Item = Arc<Domain>>,
        options: &VerbsOptions,
    ) -> Result<Self, VerbsError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags);
        let wake =
            wake.map_err(|errno| VerbsError::Os { call: "eventfd", source: errno.into() })?;
        let mut here: Vec<Here> = Vec::new();
        for (nic, domain) in (0..).zip(domains) {
            let device: &Arc<Device> = domain.device();
            let same = (0..).zip(&here).find(|(_, it)| Arc::ptr_eq(it.domain.device(), device));
            let first = same.map_or(nic, |(first, _)| first);
            here.push(Here { port: device.facts.port, first, domain });
        }
        let (state, changed, options) = (Mutex::default(), Condvar::new(), options.clone());
        Ok(Self {
            table: Box::new(Resolve::new(LIMITS)),
            here,
            desk: Arc::new(Desk { state, changed, wake, options }),
            threads: Vec::new(),
            under_way: 0,
        })
    }

    /// Becomes readable when there are answers to be taken.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.desk.wake.as_fd()
    }

    /// The descriptor is not readable any more, until there are more answers.
    pub(super) fn disarm(&self) {
        let mut word = [0; 8];
        // Empty is as good.
        let _ = rustix::io::read(&self.desk.wake, &mut word);
    }

    /// Takes the answers that there are; whether there were any.
    pub(super) fn take(&mut self, now: Time) -> bool {
        if self.under_way == 0 {
            return false;
        }
        let answers = std::mem::take(&mut lock(&self.desk.state).answers);
        let any = !answers.is_empty();
        for (key, found) in answers {
            self.under_way -= 1;
            let found = found
                .inspect_err(|error| tracing::debug!(?key, %error, "an address leads nowhere"));
            self.table.answered(now, key, found.ok().map(Arc::new));
        }
        if any {
            self.hand_out(now);
        }
        any
    }

    /// The way from the door of a NIC's device to a port.
    pub(super) fn way(&mut self, now: Time, nic: usize, there: &Port, asker: Asker) -> Way {
        let Some((key, _)) = self.key(nic, there) else { return Way::Nowhere };
        let waits = match self.table.look(now, key, asker, KNOWN_FOR) {
            Look::Found(handle) => return Way::Known(handle),
            Look::Failed => return Way::Nowhere,
            Look::Waits => Way::Waits,
            Look::Full => Way::Nowhere,
        };
        self.hand_out(now);
        // What it was is better than nothing.
        self.table.last(key).map_or(waits, Way::Known)
    }

    /// How much is known of the way from the door of a NIC's device to a port: nothing is looked up for that.
    pub(super) fn known(&self, now: Time, nic: usize, there: &Port) -> Known {
        self.key(nic, there).map_or(Known::Failed, |(key, _)| self.table.known(now, key))
    }

    /// Whether a queue pair of this NIC can be connected to a port, without waiting for the kernel.
    pub(super) fn reach(&mut self, now: Time, nic: usize, there: &Port, asker: Asker) -> Reach {
        let Some((key, _)) = self.key(nic, there) else { return Reach::NoRoute };
        if self.here.get(nic).is_some_and(|it| it.port.kind == GidKind::Infiniband) {
            return Reach::Reached;
        }
        match self.table.look(now, key, asker, FRESH) {
            Look::Found(_) => Reach::Reached,
            Look::Failed => Reach::Lost,
            Look::Waits => {
                self.hand_out(now);
                Reach::Waits
            }
            Look::Full => Reach::Full,
        }
    }

    /// Connects a queue pair of this NIC to one of a port that was found a moment ago; an error if it was not.
    pub(super) fn connect(
        &mut self,
        now: Time,
        (nic, pair): (usize, &QueuePair),
        (there, theirs): (&Port, Queue),
    ) -> Result<(), VerbsError> {
        let reached = self.reach(now, nic, there, Asker::Us) == Reach::Reached;
        let route = self.here.get(nic).and_then(|it| it.port.route(there).ok());
        let route = route.filter(|_| reached).ok_or(VerbsError::Unreachable)?;
        pair.connect(&route, theirs, &self.desk.options)
    }

    /// The NIC's port has changed: what was known by way of its device is not known any more.
    pub(super) fn forget_nic(&mut self, nic: usize) {
        let first = self.here.get(nic).map(|it| it.first);
        self.table.forget(|key| Some(key.nic) == first);
    }

    /// There is reason to think that a port is there again.
    pub(super) fn forget_port(&mut self, there: &Port) {
        self.table.forget(|key| key.dgid == Some(there.gid));
    }

    fn key(&self, nic: usize, there: &Port) -> Option<(Key, Route)> {
        let here = self.here.get(nic)?;
        let route = here.port.route(there).ok()?;
        Some((Key { nic: here.first, dlid: route.dlid, dgid: route.dgid }, route))
    }

    /// Has threads do what they may do now.
    fn hand_out(&mut self, now: Time) {
        while let Some(key) = self.table.begin() {
            let Some(here) = self.here.get(usize::from(key.nic)) else {
                self.table.answered(now, key, None);
                continue;
            };
            // Handles know nothing of the length of packets.
            let route = Route { mtu: here.port.mtu, dlid: key.dlid, dgid: key.dgid };
            let job = Job { key, route, domain: Arc::clone(&here.domain) };
            if self.threads.len() <= self.under_way
                && let Err(error) = self.start()
            {
                tracing::error!(%error, "a thread could not be started");
                if self.threads.is_empty() {
                    self.table.answered(now, key, None);
                    continue;
                }
            }
            self.under_way += 1;
            lock(&self.desk.state).jobs.push_back(job);
            self.desk.changed.notify_one();
        }
    }

    fn start(&mut self) -> std::io::Result<()> {
        let desk = Arc::clone(&self.desk);
        self.threads.push(thread::spawn("immwire-resolve", move || desk.serve())?);
        Ok(())
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        let mut state = lock(&self.desk.state);
        state.is_stopped = true;
        drop(state);
        self.desk.changed.notify_all();
        for thread in self.threads.drain(..) {
            // One that panicked has ended, too.
            let _ = thread.join();
        }
    }
}
