//! The endpoint that takes messages from anybody: where an engine is reached, and what keeps sessions up.
//!
//! It carries no writes, and is never replaced, so its address is the engine's. It has a domain to itself, in which no key is
//! valid that peers have: who writes to it all the same is refused by its device. That keeps its queue where the device checks the key
//! of a write without bytes, too, and leaves nothing of a refused one in the target's queue; it was tried over the model only. (Not yet
//! in libfabric 2.1.0, whose domains of one EFA device share a protection domain.) Knows buffers and who they go to; what the bytes mean
//! is `immwire_core::datagram`'s.
//!
//! # Invariants
//!
//! - A buffer is the device's from posting until its completion was read, or the endpoint is closed: the
//!   fields are dropped in that order.
//! - To one peer, one stranger, or all strangers together, at most so many messages are under way that others have
//!   room.
//! - Whatever comes, [`Door::read`] returns after so much of it.
//! - A farewell waits for its place, up to [`FAREWELL_PATIENCE`], as nobody says it again; so many wait at most as there may be peers.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use immwire_core::datagram::{Address, DATAGRAM_MAX, Message};
use immwire_core::id::Time;

use super::LibfabricError;
use super::fabric::{Access, Completions, Domain, Done, Endpoint, Failure, Registration};

/// Receives that are posted.
const RECEIVES: u16 = 128;
/// Sends under way at most.
const SENDS: u16 = 512;
/// To one peer.
const SENDS_TO_ONE: u8 = 8;
/// To strangers, all together.
const SENDS_TO_STRANGERS: u16 = 128;
/// How often a message is sent that never left, for its connection was closed.
const TRIES: u8 = 10;
/// How long libfabric may not take it again, until its receiver is given up: as a provider may wait for a connection that
/// it has lost for ever, this is what ends it.
const AGAIN_PATIENCE: Duration = Duration::from_secs(2);
/// How long a farewell waits for a place: longer than who has one can keep it.
const FAREWELL_PATIENCE: Duration = Duration::from_secs(5);

/// Whom a message goes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum To {
    /// A peer, or somebody who is called; by index, and the token that tells tenants apart.
    Peer { index: u16, token: u64 },
    /// Somebody who is answered, and asks again.
    Stranger,
    /// Somebody who is taken leave of: nobody says that again.
    Former,
}

impl To {
    const fn is_peer(&self) -> bool {
        matches!(self, Self::Peer { .. })
    }
}

/// What became of a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// A message has come; its bytes are in the buffer given to [`Door::read`].
    Message { len: usize },
    /// One of ours to a peer was not delivered, and from `untaken` on not taken once more.
    Undelivered { index: u16, token: u64, code: i32, untaken: Option<Time> },
    /// The door is shut for good: the device says so. Said once.
    Broken { code: i32 },
}

#[derive(Debug)]
struct Sending {
    to: To,
    address: Address,
    handle: u64,
    len: usize,
    tries: u8,
}

/// A farewell for which there is no place yet.
#[derive(Debug)]
struct Farewell {
    address: Address,
    bytes: Vec<u8>,
    since: Time,
}

/// The door.
#[derive(Debug)]
pub(super) struct Door {
    endpoint: Endpoint,
    /// Receive buffers, then send buffers.
    _registration: Registration,
    buffers: Buffers,
    desc: *mut c_void,
    /// By send buffer.
    sending: Vec<Option<Sending>>,
    free: Vec<u16>,
    /// Receives that could not be posted again yet.
    unposted: Vec<u16>,
    /// Messages that libfabric does not take now, or that are to be sent once more, and since when.
    unsent: Vec<(u16, Time)>,
    /// Whether a message ends with "not connected" when its connection was closed before it left. A provider of
    /// sockets closes one of two connections that cross, and sometimes (net of libfabric 1.17) the one in use; the
    /// next message makes another. To EFA the words mean that the peer is gone.
    loses_connections: bool,
    strangers: u16,
    /// In the order in which they are sent, but for those whose receivers take none.
    farewells: VecDeque<Farewell>,
    farewells_max: usize,
    /// Its queue or endpoint has failed: nothing comes, and nothing is sent, any more.
    is_shut: bool,
}

// SAFETY: `desc` is passed to libfabric only, by whoever owns the door.
unsafe impl Send for Door {}

/// Memory that the device reads and writes while its operations are under way: never a reference to it
/// then.
#[derive(Debug)]
struct Buffers(NonNull<[u8; DATAGRAM_MAX]>);

const BUFFERS: usize = RECEIVES as usize + SENDS as usize;

impl Buffers {
    fn new() -> Self {
        let all = vec![[0_u8; DATAGRAM_MAX]; BUFFERS].into_boxed_slice();
        Self(NonNull::from(Box::leak(all)).cast())
    }

    const fn at(&self, index: u16) -> *mut u8 {
        self.0.as_ptr().wrapping_add(index as usize).cast()
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: made so by `new`; the endpoint, and with it every operation, is gone.
        drop(unsafe { Box::from_raw(NonNull::slice_from_raw_parts(self.0, BUFFERS).as_ptr()) });
    }
}

/// The context of a send buffer is its number behind the receives'.
const fn context_of(send: u16) -> u16 {
    RECEIVES + send
}

impl Door {
    /// Opens the door, with all receives posted.
    pub(super) fn open(
        domain: &Arc<Domain>,
        peers: u16,
        loses_connections: bool,
    ) -> Result<Self, LibfabricError> {
        let contexts = RECEIVES + SENDS;
        let endpoint =
            Endpoint::open(domain, contexts, usize::from(contexts) * 2, peers, Completions::All)?;
        let buffers = Buffers::new();
        let key = u64::from_ne_bytes(super::random().map_err(LibfabricError::Random)?);
        let len = BUFFERS * DATAGRAM_MAX;
        let (at, access) = (buffers.0.cast(), Access::Received);
        // SAFETY: the buffers outlive the registration, whose field is dropped before theirs.
        let registration = unsafe { domain.register(at, len, access, key, None) }?;
        let desc = registration.desc();
        let mut door = Self {
            endpoint,
            _registration: registration,
            buffers,
            desc,
            sending: (0..SENDS).map(|_| None).collect(),
            free: (0..SENDS).rev().collect(),
            unposted: (0..RECEIVES).collect(),
            unsent: Vec::with_capacity(usize::from(SENDS)),
            loses_connections,
            strangers: 0,
            farewells: VecDeque::new(),
            farewells_max: usize::from(peers.max(SENDS)),
            is_shut: false,
        };
        door.post_receives();
        Ok(door)
    }

    /// Where it is.
    pub(super) const fn address(&self) -> &Address {
        self.endpoint.name()
    }

    /// What is slept on; nothing once it is shut.
    pub(super) fn endpoint_mut(&mut self) -> Option<&mut Endpoint> {
        (!self.is_shut).then_some(&mut self.endpoint)
    }

    /// Whether its queue or endpoint has failed, for good.
    pub(super) const fn is_shut(&self) -> bool {
        self.is_shut
    }

    fn post_receives(&mut self) {
        while let Some(index) = self.unposted.pop() {
            let to = self.buffers.at(index);
            // SAFETY: the buffer is registered, and not posted now; its context is its own.
            let posted = unsafe { self.endpoint.receive(to, DATAGRAM_MAX, self.desc, index) };
            if !matches!(posted, Ok(true)) {
                self.unposted.push(index);
                break;
            }
        }
    }

    /// Sends a message. `false`: there is no room now; or the address is none, and never will be.
    ///
    /// `under_way` counts the messages to this receiver.
    pub(super) fn send(
        &mut self,
        now: Time,
        to: &To,
        address: &Address,
        under_way: &mut u8,
        message: &Message<'_>,
    ) -> bool {
        let is_free = match to {
            To::Peer { .. } => *under_way < SENDS_TO_ONE,
            _ => self.has_place_for(address),
        };
        is_free && self.post(now, to, address, under_way, |bytes| message.encode(bytes))
    }

    /// Takes leave of somebody, as soon as there is a place for it.
    pub(super) fn part(&mut self, now: Time, address: &Address, message: &Message<'_>) {
        let mut bytes = [0; DATAGRAM_MAX];
        let Some(bytes) = message.encode(&mut bytes).and_then(|len| bytes.get(..len)) else {
            return;
        };
        if self.farewells.len() >= self.farewells_max {
            self.farewells.pop_front();
        }
        let (address, bytes) = (address.clone(), bytes.to_vec());
        self.farewells.push_back(Farewell { address, bytes, since: now });
        self.send_farewells(now);
    }

    /// Sends those that there are places for. Looks at so many only as there can be places.
    fn send_farewells(&mut self, now: Time) {
        for _ in 0..self.farewells.len().min(usize::from(SENDS_TO_STRANGERS)) {
            if self.strangers >= SENDS_TO_STRANGERS || self.free.is_empty() {
                return;
            }
            let Some(next) = self.farewells.pop_front() else { return };
            if now.since(next.since) >= FAREWELL_PATIENCE {
                continue;
            }
            if !self.has_place_for(&next.address) {
                self.farewells.push_back(next);
                continue;
            }
            // There is a place: who is not sent to never will be. It is tried for a while if only libfabric has no room.
            let Farewell { address, bytes, .. } = next;
            self.post(now, &To::Former, &address, &mut 0, |to| {
                to.get_mut(..bytes.len())?.copy_from_slice(&bytes);
                Some(bytes.len())
            });
        }
    }

    /// Whether a stranger may be sent something.
    fn has_place_for(&self, address: &Address) -> bool {
        self.strangers < SENDS_TO_STRANGERS && !self.is_full_of(address)
    }

    fn post(
        &mut self,
        now: Time,
        to: &To,
        address: &Address,
        under_way: &mut u8,
        fill: impl FnOnce(&mut [u8]) -> Option<usize>,
    ) -> bool {
        let Some(&send) = self.free.last().filter(|_| !self.is_shut) else { return false };
        let handle = match self.endpoint.learn(address) {
            Ok(handle) => handle,
            Err(error) => {
                tracing::debug!(%error, "an address is of no use");
                return false;
            }
        };
        let from = self.buffers.at(context_of(send));
        // SAFETY: the buffer is not under way, so it is ours, and nobody else refers to it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(from, DATAGRAM_MAX) };
        let Some(len) = fill(bytes) else {
            self.endpoint.forget(address);
            return false;
        };
        // SAFETY: registered, ours until the completion; the handle was just learnt.
        let sent = unsafe { self.endpoint.send(from, len, self.desc, handle, context_of(send)) };
        let is_sent = matches!(sent, Ok(true));
        if !is_sent && (*to != To::Former || sent.is_err()) {
            self.endpoint.forget(address);
            return false;
        }
        self.free.pop();
        if !is_sent {
            self.unsent.push((send, now));
        }
        match to {
            To::Peer { .. } => *under_way += 1,
            _ => self.strangers += 1,
        }
        if let Some(slot) = self.sending.get_mut(usize::from(send)) {
            *slot = Some(Sending {
                to: to.clone(),
                address: address.clone(),
                handle,
                len,
                tries: is_sent.into(),
            });
        }
        true
    }

    /// Posts what is to be sent once more, as far as it is taken. Returns one that is not, and will not be, if there is one, and since when it is not.
    fn send_again(&mut self, now: Time) -> Option<(u16, Time)> {
        let Self { unsent, sending, endpoint, buffers, desc, .. } = self;
        let mut refused = None;
        unsent.retain(|&(send, since)| {
            let Some(Some(it)) = sending.get_mut(usize::from(send)) else { return false };
            let (from, context) = (buffers.at(context_of(send)), context_of(send));
            // SAFETY: registered, and ours until the completion: nothing of it is under way. Its address is kept known.
            match unsafe { endpoint.send(from, it.len, *desc, it.handle, context) } {
                Ok(true) => it.tries += 1,
                Ok(false) if now.since(since) < AGAIN_PATIENCE => return true,
                Ok(false) | Err(_) if refused.is_none() => refused = Some((send, since)),
                // One at a time: the next call returns it.
                Ok(false) | Err(_) => return true,
            }
            false
        });
        refused
    }

    /// Whether something is to be sent that libfabric has not taken: it does not say when it does.
    pub(super) const fn is_held_up(&self) -> bool {
        !self.unsent.is_empty() && !self.is_shut
    }

    /// What was to be sent to the peer once more is not.
    pub(super) fn give_up(&mut self, token: u64) {
        let Self { unsent, sending, endpoint, free, .. } = self;
        unsent.retain(|&(send, _)| {
            let Some(slot) = sending.get_mut(usize::from(send)) else { return false };
            let of_it = |it: &Sending| matches!(it.to, To::Peer { token: its, .. } if its == token);
            if !slot.as_ref().is_some_and(of_it) {
                return true;
            }
            if let Some(it) = slot.take() {
                endpoint.forget(&it.address);
            }
            free.push(send);
            false
        });
    }

    /// Keeps an address known until [`Door::release`], and with it what libfabric has begun with it: some
    /// providers drop a connection with its address. Whether it is of use.
    pub(super) fn hold(&mut self, address: &Address) -> bool {
        self.endpoint.learn(address).is_ok()
    }

    /// Undoes one [`Door::hold`] that succeeded.
    pub(super) fn release(&mut self, address: &Address) {
        self.endpoint.forget(address);
    }

    /// Whether a stranger has so many answers under way that it does not seem to take them. O(sends).
    fn is_full_of(&self, address: &Address) -> bool {
        let same = |sending: &&Sending| !sending.to.is_peer() && sending.address == *address;
        let under_way = self.sending.iter().flatten().filter(same).count();
        under_way >= usize::from(SENDS_TO_ONE)
    }

    /// Whether an answer, or a leave-taking, has not left yet.
    pub(super) fn is_sending_to_strangers(&self) -> bool {
        (self.strangers > 0 || !self.farewells.is_empty()) && !self.is_shut
    }

    /// What has happened next, if anything; nothing, too, if receives keep failing, or somebody writes here. `ended` hears of each
    /// message to a peer that is not under way any more, and whether it was delivered.
    pub(super) fn read(
        &mut self,
        into: &mut [u8; DATAGRAM_MAX],
        now: Time,
        mut ended: impl FnMut(u16, u64, bool),
    ) -> Option<Heard> {
        let mut failed = 0;
        while !self.is_shut && failed < RECEIVES {
            // One at a time: what is read must be handled before the buffer is posted again.
            let mut batch = heapless::Vec::<Done, 1>::new();
            self.endpoint.read(&mut batch);
            let Some(done) = batch.pop() else {
                self.post_receives();
                self.send_farewells(now);
                let (refused, since) = self.send_again(now)?;
                let failure = Err(Failure { code: libc::ENOTCONN, detail: 0 });
                if let Some(heard) = self.end(refused, failure, Some(since), &mut ended) {
                    return Some(heard);
                }
                continue;
            };
            let (context, outcome, bytes) = match done {
                Done::Ours { context, outcome, bytes } => (context, outcome, bytes),
                Done::Theirs { .. } => {
                    // None is expected: whoever makes them does not keep us here.
                    failed += 1;
                    continue;
                }
                Done::Broken(failure) => {
                    self.is_shut = true;
                    return Some(Heard::Broken { code: failure.code });
                }
            };
            if context < RECEIVES {
                let len = bytes.min(DATAGRAM_MAX);
                if outcome.is_ok() {
                    let from = self.buffers.at(context);
                    // SAFETY: the receive has ended, so the buffer is ours; `len` of its bytes are copied.
                    unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), len) };
                }
                self.unposted.push(context);
                self.post_receives();
                if outcome.is_ok() {
                    return Some(Heard::Message { len });
                }
                // Posted again, it may fail again at once.
                failed += 1;
                continue;
            }
            let send = context - RECEIVES;
            let lost = outcome.is_err_and(|failure| failure.code == libc::ENOTCONN);
            if lost && self.loses_connections && self.may_try_again(send) {
                self.unsent.push((send, now));
            } else if let Some(heard) = self.end(send, outcome, None, &mut ended) {
                return Some(heard);
            }
        }
        None
    }

    fn may_try_again(&self, send: u16) -> bool {
        let it = self.sending.get(usize::from(send)).and_then(Option::as_ref);
        it.is_some_and(|it| it.to.is_peer() && it.tries < TRIES)
    }

    /// A message is under way no more.
    fn end(
        &mut self,
        send: u16,
        outcome: Result<(), Failure>,
        untaken: Option<Time>,
        ended: &mut impl FnMut(u16, u64, bool),
    ) -> Option<Heard> {
        let Sending { to, address, .. } = self.sending.get_mut(usize::from(send))?.take()?;
        self.free.push(send);
        self.endpoint.forget(&address);
        let To::Peer { index, token } = to else {
            self.strangers -= 1;
            return None;
        };
        ended(index, token, outcome.is_ok());
        let failure = outcome.err()?;
        Some(Heard::Undelivered { index, token, code: failure.code, untaken })
    }
}
