//! Queue pairs that take datagrams from anybody, one on each device: where an engine is reached.
//!
//! They carry calls and their answers, each in one packet, any of which may be lost. Knows buffers and where they go;
//! what the bytes mean is `immwire_core::datagram`'s, which doors a call goes by `immwire_core::doors`'s, and where a port
//! is found `resolver`'s.
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
use immwire_core::port::{Door as Place, HEADER_BYTES, Number24, PACKET_MAX, Port};
use immwire_core::resolve::Asker;

use super::VerbsError;
use super::device::{AddressHandle, Completed, Completions, Depths, Device, Domain, QueuePair};
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

/// One door.
#[derive(Debug)]
struct Door {
    /// The first NIC of its device.
    nic: usize,
    pair: QueuePair,
    completed: Arc<Completed>,
    stash: Completions,
    buffers: Slab,
    place: Place,
    address: Address,
    /// Its device has failed.
    is_mute: bool,
    /// Its queue pair is in error: nothing is sent or received.
    is_failed: bool,
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
    /// By which of our doors it came.
    pub(super) door: u8,
    header: [u8; HEADER_BYTES],
    lid: u16,
    /// Whether the header is one, which of InfiniBand's datagrams not all have.
    has_header: bool,
}

impl From {
    /// Whether it came from that port: whoever answers there disturbs nobody else.
    pub(super) fn is(&self, port: &Port) -> bool {
        port.has_sent(&self.header, self.has_header, self.lid)
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
    /// Its queue pair was in error, as after a message that could not be sent, and is not any more. What was on its way is lost. Of the
    /// device whose first NIC this is.
    Mended { nic: usize },
    /// The device has failed, whose first NIC this is. It is said once.
    Broken { nic: usize },
}

impl Door {
    /// Opens a door, with all receives posted.
    fn open(nic: usize, domain: &Arc<Domain>) -> Result<Self, VerbsError> {
        let operations = u32::from(RECEIVES) + u32::from(SENDS);
        let completed = Completed::open(domain.device(), operations)?;
        let (sends, receives) = (u32::from(SENDS), u32::from(RECEIVES));
        let depths = Depths { sends, receives, inline: 0 };
        let pair = QueuePair::datagrams(domain, &completed, depths, KEY)?;
        let buffers = Slab::new(domain, BUFFER, BUFFERS)?;
        let port = domain.device().facts.port;
        let place = Place { port, number: Number24::new(pair.number()), key: KEY };
        let mut door = Self {
            nic,
            pair,
            completed,
            stash: Completions::new(),
            buffers,
            place,
            address: place.encode(),
            is_mute: false,
            is_failed: false,
            sending: (0..SENDS).map(|_| None).collect(),
            free: (0..SENDS).rev().collect(),
            unposted: (0..RECEIVES).collect(),
        };
        door.post_receives();
        Ok(door)
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

    fn post(
        &mut self,
        to: &Place,
        handle: Arc<AddressHandle>,
        message: &Message<'_>,
    ) -> Option<()> {
        let &index = self.free.last().filter(|_| !self.is_failed)?;
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

    /// What has come next, if anything; its bytes are put into `into`. `number` is which door this is.
    fn read(&mut self, number: u8, into: &mut Packet) -> Option<Heard> {
        loop {
            if self.is_mute {
                return None;
            }
            if !self.completed.read(&mut self.stash) {
                self.is_mute = true;
                return Some(Heard::Broken { nic: self.nic });
            }
            let Some(done) = self.stash.next() else {
                return self.is_failed.then(|| self.mend());
            };
            let index = u16::try_from(done.wr_id).ok()?;
            // A message that is too long to be received is none of it.
            let is_send = index >= RECEIVES && done.status != sys::IBV_WC_SUCCESS;
            self.is_failed |= is_send || done.status == sys::IBV_WC_WR_FLUSH_ERR;
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
            if !self.is_failed {
                self.post_receives();
            }
            if good {
                let has_header = done.wc_flags & sys::IBV_WC_GRH != 0;
                let from = From { door: number, header, lid: done.slid, has_header };
                return Some(Heard::Message { len, from });
            }
        }
    }
}

impl Door {
    /// Takes back all that is posted to a queue pair in error, and starts it anew.
    fn mend(&mut self) -> Heard {
        let nic = self.nic;
        let restarted = self.pair.reset().and_then(|()| {
            // What has ended before that; then nothing is under way, and all buffers are ours.
            while self.completed.read(&mut self.stash) && self.stash.next().is_some() {}
            self.pair.start(KEY)
        });
        if let Err(error) = restarted {
            tracing::error!(nic, %error, "a door cannot be opened again");
            self.is_mute = true;
            return Heard::Broken { nic };
        }
        self.sending.iter_mut().for_each(|slot| *slot = None);
        self.free = (0..SENDS).rev().collect();
        self.unposted = (0..RECEIVES).collect();
        self.is_failed = false;
        self.post_receives();
        Heard::Mended { nic }
    }
}

/// All doors of an engine: one for each of its devices, numbered in the order of the NICs.
#[derive(Debug)]
pub(super) struct Doors {
    all: Vec<Door>,
    /// By NIC: which door its device has.
    by_nic: Vec<u8>,
    /// Which door is heard next.
    next: usize,
}

impl Doors {
    /// Opens a door on each device, which are given by NIC, each in a domain of its own: what is let in here reaches no
    /// region. Returns them, and the domain of each NIC's door.
    pub(super) fn open(devices: &[Arc<Device>]) -> Result<(Self, Vec<Arc<Domain>>), VerbsError> {
        let (mut all, mut by_nic) = (Vec::new(), Vec::new());
        let mut domains: Vec<Arc<Domain>> = Vec::new();
        for (nic, device) in devices.iter().enumerate() {
            let known = devices.iter().take(nic).position(|other| Arc::ptr_eq(other, device));
            let opened = known.and_then(|at| Some((*by_nic.get(at)?, domains.get(at)?.clone())));
            let (number, domain) = match opened {
                Some(opened) => opened,
                None => {
                    let domain = Domain::open(device)?;
                    all.push(Door::open(nic, &domain)?);
                    (u8::try_from(all.len() - 1).unwrap_or(u8::MAX), domain)
                }
            };
            by_nic.push(number);
            domains.push(domain);
        }
        Ok((Self { all, by_nic, next: 0 }, domains))
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// The first NIC of a door's device.
    pub(super) fn nic(&self, number: usize) -> Option<usize> {
        self.all.get(number).map(|door| door.nic)
    }

    /// Where a door is; `None` if it is of no more use.
    pub(super) fn place(&self, number: usize) -> Option<&Place> {
        self.all.get(number).filter(|door| !door.is_mute).map(|door| &door.place)
    }

    /// Where each is.
    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        self.all.iter().map(|door| &door.place)
    }

    /// Where a door is, as it travels.
    pub(super) fn address(&self, number: usize) -> Option<&Address> {
        self.all.get(number).map(|door| &door.address)
    }

    /// The same, of the door that a NIC's device has.
    pub(super) fn address_of(&self, nic: usize) -> Option<&Address> {
        self.address((*self.by_nic.get(nic)?).into())
    }

    /// What becomes readable when there is something to hear.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all.iter().map(|door| door.completed.fd())
    }

    /// That of the door that a NIC's device has.
    pub(super) fn fd_of(&self, nic: usize) -> Option<BorrowedFd<'_>> {
        self.all.get(usize::from(*self.by_nic.get(nic)?)).map(|door| door.completed.fd())
    }

    /// Sends a message by a door, which may be lost.
    pub(super) fn send(
        &mut self,
        resolver: &mut Resolver,
        (number, to, asker): (u8, &Place, Asker),
        message: &Message<'_>,
        now: Time,
    ) -> Sent {
        let door = self.all.get_mut(usize::from(number)).filter(|door| !door.is_mute);
        let Some(door) = door else { return Sent::Lost };
        let handle = match resolver.way(now, door.nic, &to.port, asker) {
            Way::Known(handle) => handle,
            Way::Waits => return Sent::Waits,
            Way::Nowhere => return Sent::Lost,
        };
        door.post(to, handle, message).map_or(Sent::Lost, |()| Sent::Posted)
    }

    /// What has come next by any door, if anything; its bytes are put into `into`. Each has its turn.
    pub(super) fn read(&mut self, into: &mut Packet) -> Option<Heard> {
        for _ in 0..self.all.len() {
            let at = self.next % self.all.len();
            self.next = at + 1;
            let number = u8::try_from(at).unwrap_or(u8::MAX);
            let heard = self.all.get_mut(at).and_then(|door| door.read(number, into));
            if heard.is_some() {
                return heard;
            }
        }
        None
    }

    /// Asks for a signal; `false` if there is something to read right now.
    pub(super) fn arm(&mut self) -> bool {
        // All are asked, so that none is left out when they are asked for nothing the next time.
        let usable = self.all.iter_mut().filter(|door| !door.is_mute);
        usable.fold(true, |quiet, door| {
            let armed = door.completed.arm() && door.completed.read(&mut door.stash);
            quiet & (armed && door.stash.is_empty())
        })
    }

    pub(super) fn disarm(&self) {
        self.all.iter().for_each(|door| door.completed.disarm());
    }
}
