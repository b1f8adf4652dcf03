//! The queue pair that takes datagrams from anybody: where an engine is reached.
//!
//! It carries calls and their answers, each in one packet, any of which may be lost. Knows buffers and where they go;
//! what the bytes mean is `immwire_core::datagram`'s, and where a port is found `resolver`'s.
//!
//! # Invariants
//!
//! - A buffer is the device's from posting until its completion was read, or the queue pair is gone: the fields are
//!   dropped in that order.
//! - What is heard is looked at in its buffer's copy: nobody changes it meanwhile.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ibverbs_sys as sys;
use immwire_core::datagram::{Address, Message};
use immwire_core::id::Time;
use immwire_core::port::{
    Door as Place, HEADER_BYTES, Link, Number24, PACKET_MAX, Port, source_of,
};
use immwire_core::resolve::Asker;

use super::VerbsError;
use super::device::{AddressHandle, Completed, Completions, Depths, Domain, QueuePair};
use super::resolver::{Resolver, Way};
use super::slab::Slab;

/// Receives that are posted.
const RECEIVES: u16 = 256;
/// Sends under way at most.
const SENDS: u16 = 128;
/// What each datagram shows: that it means to be one of ours.
const KEY: u32 = 0x0049_5764;
const BUFFER: usize = HEADER_BYTES + PACKET_MAX;
const BUFFERS: usize = RECEIVES as usize + SENDS as usize;

/// What has come.
pub(super) type Packet = [u8; PACKET_MAX];

/// The door.
#[derive(Debug)]
pub(super) struct Door {
    pair: QueuePair,
    completed: Arc<Completed>,
    stash: Completions,
    buffers: Slab,
    place: Place,
    address: Address,
    /// By send buffer, while it is under way.
    sending: Vec<Option<Arc<AddressHandle>>>,
    free: Vec<u16>,
    /// Receives that could not be posted again yet.
    unposted: Vec<u16>,
}

/// Where a message came from, as the device says: nobody who sends can say otherwise, but within what the network lets
/// pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct From {
    header: [u8; HEADER_BYTES],
    lid: u16,
}

impl From {
    /// Whether it came from that port: whoever answers there disturbs nobody else.
    pub(super) fn is(&self, port: &Port) -> bool {
        match port.link {
            Link::Ethernet => source_of(&self.header) == Some(port.gid),
            Link::Infiniband => self.lid == port.lid,
        }
    }
}

/// What has become of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// It is under way, and may be lost.
    Posted,
    /// It is not sent: where it is to go is being looked up. Later it can be.
    Waits,
    /// It is not sent, for want of room or of a way there.
    Lost,
}

/// Whether the door hears anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    /// A message of so many bytes, and where it came from.
    Message { len: usize, from: From },
    /// The device has failed.
    Broken,
}

impl Door {
    /// Opens the door, with all receives posted.
    pub(super) fn open(domain: &Arc<Domain>) -> Result<Self, VerbsError> {
        let operations = u32::from(RECEIVES) + u32::from(SENDS);
        let completed = Completed::open(domain.device(), operations)?;
        let (sends, receives) = (u32::from(SENDS), u32::from(RECEIVES));
        let depths = Depths { sends, receives, inline: 0 };
        let pair = QueuePair::datagrams(domain, &completed, depths, KEY)?;
        let buffers = Slab::new(domain, BUFFER, BUFFERS)?;
        let port = domain.device().facts.port;
        let place = Place { port, number: Number24::new(pair.number()), key: KEY };
        let mut door = Self {
            pair,
            completed,
            stash: Completions::new(),
            buffers,
            place,
            address: place.encode(),
            sending: (0..SENDS).map(|_| None).collect(),
            free: (0..SENDS).rev().collect(),
            unposted: (0..RECEIVES).collect(),
        };
        door.post_receives();
        Ok(door)
    }

    /// Where it is.
    pub(super) const fn place(&self) -> &Place {
        &self.place
    }

    /// The same, as it travels.
    pub(super) const fn address(&self) -> &Address {
        &self.address
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.completed.fd()
    }

    fn post_receives(&mut self) {
        while let Some(index) = self.unposted.pop() {
            let into = self.buffers.sge(index.into(), BUFFER);
            // SAFETY: the buffer is registered, and not posted now; its number is its own.
            if !unsafe { self.pair.receive(index.into(), into) } {
                self.unposted.push(index);
                break;
            }
        }
    }

    /// Sends a message, which may be lost.
    pub(super) fn send(
        &mut self,
        resolver: &mut Resolver,
        (to, asker): (&Place, Asker),
        message: &Message<'_>,
        now: Time,
    ) -> Sent {
        let handle = match resolver.way(now, &to.port, asker) {
            Way::Known(handle) => handle,
            Way::Waits => return Sent::Waits,
            Way::Nowhere => return Sent::Lost,
        };
        self.post(to, handle, message).map_or(Sent::Lost, |()| Sent::Posted)
    }

    fn post(
        &mut self,
        to: &Place,
        handle: Arc<AddressHandle>,
        message: &Message<'_>,
    ) -> Option<()> {
        let &index = self.free.last()?;
        let buffer = RECEIVES + index;
        let fill = |bytes: &mut [u8]| message.encode(bytes.get_mut(..PACKET_MAX)?);
        // SAFETY: the buffer is free, so nothing is under way.
        let len = unsafe { self.buffers.write(buffer.into(), fill) }?;
        let from = self.buffers.sge(buffer.into(), len);
        // SAFETY: registered, and ours until the completion, as is the handle.
        let sent = unsafe { self.pair.send_to(&handle, to.number, to.key, buffer.into(), from) };
        if let Err(error) = sent {
            tracing::debug!(%error, "a message could not be sent");
            return None;
        }
        self.free.pop();
        if let Some(slot) = self.sending.get_mut(usize::from(index)) {
            *slot = Some(handle);
        }
        Some(())
    }

    /// What has come next, if anything; its bytes are put into `into`.
    pub(super) fn read(&mut self, into: &mut Packet) -> Option<Heard> {
        loop {
            if !self.completed.read(&mut self.stash) {
                return Some(Heard::Broken);
            }
            let done = self.stash.next()?;
            let index = u16::try_from(done.wr_id).ok()?;
            if index >= RECEIVES {
                let send = index - RECEIVES;
                if let Some(slot) = self.sending.get_mut(usize::from(send))
                    && slot.take().is_some()
                {
                    self.free.push(send);
                }
                continue;
            }
            let mut header = [0; HEADER_BYTES];
            let good = done.status == sys::IBV_WC_SUCCESS;
            let bytes = usize::try_from(done.byte_len).unwrap_or(0);
            let len = bytes.saturating_sub(HEADER_BYTES).min(PACKET_MAX);
            if good {
                // SAFETY: the receive has ended.
                unsafe {
                    self.buffers.read(index.into(), 0, &mut header);
                    self.buffers.read(index.into(), HEADER_BYTES, into);
                }
            }
            self.unposted.push(index);
            self.post_receives();
            if good {
                return Some(Heard::Message { len, from: From { header, lid: done.slid } });
            }
        }
    }

    /// Asks for a signal; `false` if there is something to read right now.
    pub(super) fn arm(&mut self) -> bool {
        self.completed.arm() && self.completed.read(&mut self.stash) && self.stash.is_empty()
    }

    pub(super) fn disarm(&self) {
        self.completed.disarm();
    }
}
