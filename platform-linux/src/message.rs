//! Two-sided messages over one-sided writes: the memory they need, and their way through it.
//!
//! Which slot a message takes and when it is its turn is decided by the core's `mailbox`. Messages are
//! for control: they are copied, and allocate. They wait for their peer without a limit but the
//! transfers there can be, and none is dropped.

use std::collections::VecDeque;
use std::sync::Arc;

use immwire_core::group::{self as core_group, Options, Receipts};
use immwire_core::id::{MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::imm::Imm;
use immwire_core::mailbox::{
    Control, Delivery, Geometry, HEADER_BYTES, Inbox, MessageHeader, Outbox, Reserved, SendError,
    SlotIndex, Usage, credit_may_go,
};
use immwire_core::peer::DownReason;
use immwire_core::plan::{ControlWrite, Request as PlanRequest};
use immwire_core::receipt::{Epoch, SETTLEMENT_BYTES, Settlement, SettlementError};
use immwire_core::region::MrDesc;
use immwire_core::wake::Ticket;
use immwire_core::wire::NetAddr;

use crate::driver::{Group, State};
use crate::error::{End, TransferError};
use crate::provider::{Path, Receipt, RegisterError};
use crate::region::{Region, Registry};
use crate::request::Request;
use crate::shared::{Message, Shared};

/// A message on its way into a mailbox.
pub(crate) struct Outgoing {
    pub(crate) cell: u16,
    pub(crate) ticket: Ticket,
    pub(crate) bytes: Box<[u8]>,
    /// Until when it may wait for room. Once it has a slot it is sent, since later ones follow it.
    pub(crate) deadline: Time,
}

/// A message that has its place in its peer's mailbox, and so in the order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placed {
    pub(crate) peer: PeerId,
    reserved: Reserved,
    /// Bytes, with the header.
    len: u64,
}

/// A message that has its place, and was not written for want of a NIC: it goes when there is one again.
pub(crate) struct Again {
    pub(crate) cell: u16,
    pub(crate) ticket: Ticket,
    pub(crate) placed: Placed,
    /// What its last attempt ended in.
    pub(crate) end: core_group::End,
}

impl Again {
    /// Its end, if there is no further attempt because of `error`.
    const fn end(&self, error: TransferError) -> End {
        match self.end {
            core_group::End::NeverStarted { .. } => End::NeverStarted { error },
            _ => End::Quiesced { error },
        }
    }
}

/// What an engine keeps for the messages of one peer.
pub(crate) struct Link {
    peer: PeerId,
    /// The peer writes here.
    mailbox: Region,
    inbox: Inbox,
    /// Our messages and answers lie here until they are written, and stay until all are, whether or not the peer is gone
    /// ([`State::sources`]). As large as the peer's mailbox.
    staging: Option<Region>,
    outbox: Option<Outbox>,
    waiting: VecDeque<Outgoing>,
    again: Vec<Again>,
    /// Slots to be given back to the peer, a bit for each.
    credits: u64,
    /// Of these, so many are being given back.
    crediting: u16,
    registry: Arc<Registry>,
}

/// Whether something is left to deliver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Undelivered {
    None,
    Some,
}

impl Link {
    /// Whether a message waits to be sent or taken, or a slot to be given back.
    pub(crate) fn has_mail(&self) -> bool {
        let unsent = !self.waiting.is_empty() || !self.again.is_empty() || self.credits != 0;
        unsent || self.inbox.has_delivery()
    }

    /// Whether a slot may be given back now, where so many are being given back to whomever, and there is room for so many.
    pub(crate) fn may_credit(&self, to_all: u16, room: u16) -> bool {
        credit_may_go(to_all, self.crediting, room)
    }

    pub(crate) const fn credit_goes(&mut self) {
        self.crediting = self.crediting.saturating_add(1);
    }

    pub(crate) const fn credit_has_ended(&mut self) {
        self.crediting = self.crediting.saturating_sub(1);
    }

    pub(crate) fn new(
        registry: &Arc<Registry>,
        peer: PeerId,
        address: &NetAddr,
        geometry: Geometry,
    ) -> Result<Self, RegisterError> {
        let bytes = usize::try_from(geometry.bytes()).unwrap_or(usize::MAX);
        Ok(Self {
            peer,
            mailbox: registry.alloc_mailbox(bytes, address)?,
            inbox: Inbox::new(geometry),
            staging: None,
            outbox: None,
            waiting: VecDeque::new(),
            again: Vec::new(),
            credits: 0,
            crediting: 0,
            registry: Arc::clone(registry),
        })
    }

    pub(crate) const fn peer(&self) -> PeerId {
        self.peer
    }

    /// What the peer may write to.
    pub(crate) fn mailbox(&self) -> MrDesc {
        self.mailbox.desc()
    }

    /// The peer has told how its mailbox is divided.
    pub(crate) fn connected(&mut self, geometry: Geometry) {
        if self.outbox.is_some() {
            // Of two calls that crossed, both may say so; what was staged since the first is on its way.
            return;
        }
        let bytes = usize::try_from(geometry.bytes()).unwrap_or(usize::MAX);
        self.outbox = Some(Outbox::new(geometry));
        // Without memory messages cannot be sent, and say so; writes go all the same, but nobody answers when a path breaks, so
        // that the connection ends with the first.
        let peer = self.peer;
        let lacks = |error: &RegisterError| {
            tracing::warn!(%peer, %error, "no memory for messages to the peer, nor to keep it when a path breaks");
        };
        self.staging = self.registry.alloc_host(bytes).inspect_err(lacks).ok();
    }

    /// Where answers to the peer's asks lie, if there is memory for them.
    pub(crate) fn receipts(&self, geometry: Geometry) -> Option<Receipts> {
        let src = self.staging.as_ref()?.local();
        Some(Receipts { src, offset: geometry.receipts_offset() })
    }

    /// Reserves a slot and lays the message out for it.
    fn stage(
        outbox: &mut Option<Outbox>,
        staging: Option<&Region>,
        bytes: &[u8],
    ) -> Result<Reserved, SendError> {
        let Some(outbox) = outbox else { return Err(SendError::Full) };
        // The peer is there, and the memory was not to be had: waiting would be in vain.
        let Some(staging) = staging else { return Err(SendError::NoMemory) };
        let len = bytes.len() as u64;
        let reserved = outbox.reserve(len)?;
        let header = MessageHeader {
            len: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
            kind: 0,
            sequence: reserved.sequence,
        };
        let body = reserved.offset.saturating_add(HEADER_BYTES as u64);
        let staged = staging.write(reserved.offset, &header.to_bytes());
        if staged.and_then(|()| staging.write(body, bytes)).is_err() {
            // The staging memory is as large as the mailbox, so the slot lies inside; were it not,
            // the message would be refused rather than lost.
            let max = outbox.max_message_bytes();
            let _ = outbox.withdraw(reserved);
            return Err(SendError::TooLarge { len, max });
        }
        Ok(reserved)
    }

    /// Copies a message out of the mailbox, for whoever takes it next.
    fn hand_over(&self, delivery: &Delivery, to: &Arc<Shared>) {
        let Ok(len) = usize::try_from(delivery.len) else { return };
        let mut bytes = vec![0; len];
        if self.mailbox.read(delivery.offset, &mut bytes).is_ok() {
            to.deliver(Message { from: self.peer, bytes });
        }
    }
}

impl State {
    pub(crate) fn link(&mut self, peer: PeerId) -> Option<&mut Link> {
        let link = self.links.get_mut(usize::from(peer.index))?.as_mut()?;
        (link.peer == peer).then_some(link)
    }

    /// Sends a message, or keeps it until there is room for it.
    pub(crate) fn send_message(&mut self, peer: PeerId, outgoing: Outgoing) {
        let Some(link) = self.link(peer) else {
            let error = TransferError::Message(SendError::Closed);
            let end = End::NeverStarted { error };
            return self.shared.finish(outgoing.cell, outgoing.ticket, end);
        };
        link.waiting.push_back(outgoing);
        self.waiting_messages += 1;
        self.retry_messages(peer);
    }

    /// Whether a message could be handed over, or a credit sent, for which there had been no room.
    pub(crate) fn can_deliver(&self) -> bool {
        let links = self.unfinished.iter().filter_map(|&at| self.links.get(usize::from(at)));
        let mut links = links.flatten();
        links.any(|link| {
            let unsent = (link.credits != 0 && link.may_credit(self.own, self.own_room))
                || !link.again.is_empty();
            (unsent && self.group.reaches(link.peer))
                || (link.inbox.has_delivery() && self.shared.inbox.has_room(None))
        })
    }

    /// When the first of the messages that wait for room has waited too long.
    pub(crate) fn message_timeout(&self) -> Time {
        if self.waiting_messages == 0 {
            return Time::NEVER;
        }
        let waiting = self.links.iter().flatten().flat_map(|link| &link.waiting);
        waiting.map(|waiting| waiting.deadline).min().unwrap_or(Time::NEVER)
    }

    /// Takes back the messages that have waited for room until their deadline.
    pub(crate) fn expire_messages(&mut self) {
        if self.waiting_messages == 0 {
            return;
        }
        let now = self.now;
        for link in self.links.iter_mut().flatten() {
            while let Some(at) = link.waiting.iter().position(|waiting| waiting.deadline <= now) {
                let Some(late) = link.waiting.remove(at) else { break };
                self.waiting_messages = self.waiting_messages.saturating_sub(1);
                let error = core_group::TransferError::DeadlineExceeded {
                    outstanding: 0,
                    peer: Some(link.peer),
                };
                let end = End::NeverStarted { error: TransferError::Stopped(error) };
                self.shared.finish(late.cell, late.ticket, end);
            }
        }
    }

    /// Sends what waits, in order, as far as there is room and a NIC.
    pub(crate) fn retry_messages(&mut self, peer: PeerId) {
        // What waits for one that is down ends when that is told, and no sooner.
        let reached = self.group.reaches(peer);
        let Some(link) = self.link(peer) else { return };
        if !reached {
            if !(link.again.is_empty() && link.waiting.is_empty()) {
                self.unfinished(peer.index);
            }
            return;
        }
        for Again { cell, ticket, placed, .. } in std::mem::take(&mut link.again) {
            // It was taken before, and is no other now: what is refused is refused for its peer.
            if let Err(error) = self.post_message(cell, ticket, placed) {
                self.shared.finish(cell, ticket, End::NeverStarted { error });
                self.group.remove_peer(self.now, peer, DownReason::Disconnected);
            }
        }
        while let Some(link) = self.link(peer) {
            let Some(outgoing) = link.waiting.front() else { return };
            let staged = Link::stage(&mut link.outbox, link.staging.as_ref(), &outgoing.bytes);
            if staged == Err(SendError::Full) {
                return;
            }
            let Some(outgoing) = link.waiting.pop_front() else { return };
            self.waiting_messages = self.waiting_messages.saturating_sub(1);
            let Outgoing { cell, ticket, bytes, .. } = outgoing;
            match staged {
                Err(error) => {
                    let end = End::NeverStarted { error: TransferError::Message(error) };
                    self.shared.finish(cell, ticket, end);
                }
                Ok(reserved) => {
                    let len = HEADER_BYTES as u64 + bytes.len() as u64;
                    let placed = Placed { peer, reserved, len };
                    if let Err(error) = self.post_message(cell, ticket, placed) {
                        self.shared.finish(cell, ticket, End::NeverStarted { error });
                        self.give_up_place(placed);
                    }
                }
            }
        }
    }

    fn post_message(
        &mut self,
        cell: u16,
        ticket: Ticket,
        placed: Placed,
    ) -> Result<(), TransferError> {
        let Placed { peer, reserved: Reserved { slot, offset, .. }, len } = placed;
        let staging = self.link(peer).and_then(|link| link.staging.as_ref()).map(Region::local);
        let request: Request = PlanRequest::Control(ControlWrite {
            peer,
            src: staging,
            src_offset: offset,
            dst_offset: offset,
            len,
            imm: Imm::from_bits(Control::Message(slot).encode()),
        });
        let options = Options { deadline: Time::NEVER, user: u64::from(cell) };
        let request = request.check().map_err(|error| {
            tracing::error!(%error, "a message does not fit its own staging memory");
            TransferError::Message(SendError::Closed)
        })?;
        let submitted = self.group.submit(request, options);
        let id = submitted.map_err(|rejected| TransferError::Refused(rejected.error))?;
        self.hook_message(cell, ticket, id, placed);
        Ok(())
    }

    /// The message that took the last place in the order is not sent: the next one takes it.
    fn give_up_place(&mut self, placed: Placed) {
        let outbox = self.link(placed.peer).and_then(|link| link.outbox.as_mut());
        if outbox.is_none_or(|outbox| outbox.withdraw(placed.reserved).is_err()) {
            // Later ones would wait for it for ever.
            self.group.remove_peer(self.now, placed.peer, DownReason::Disconnected);
        }
    }

    /// A message that has its place was not written: it goes later. `false` if the peer is gone.
    pub(crate) fn send_again(&mut self, again: Again) -> bool {
        let peer = again.placed.peer;
        let Some(link) = self.link(peer) else { return false };
        link.again.push(again);
        self.retry_messages(peer);
        true
    }

    /// A credit did not get through. If it was not written it is sent again; else the peer may have it or not,
    /// and would be told twice of a slot, or never.
    pub(crate) fn credit_lost(&mut self, peer: PeerId, slot: SlotIndex, unwritten: bool) {
        let Some(link) = self.link(peer) else { return };
        if unwritten {
            link.credits |= 1_u64.checked_shl(u32::from(slot)).unwrap_or(0);
            if self.deliver(peer.index) == Undelivered::Some {
                self.unfinished(peer.index);
            }
        } else {
            self.group.remove_peer(self.now, peer, DownReason::Disconnected);
        }
    }

    /// A message that waits is taken back; one that was posted ends as every transfer does.
    pub(crate) fn cancel_message(&mut self, cell: u16, ticket: Ticket) {
        for link in self.links.iter_mut().flatten() {
            let ours = |waiting: &Outgoing| waiting.cell == cell && waiting.ticket == ticket;
            if let Some(at) = link.waiting.iter().position(ours) {
                link.waiting.remove(at);
                self.waiting_messages = self.waiting_messages.saturating_sub(1);
                let cancelled = core_group::TransferError::Cancelled;
                let error = TransferError::Stopped(cancelled);
                return self.shared.finish(cell, ticket, End::NeverStarted { error });
            }
        }
    }

    /// An immediate of the engine's own protocol.
    pub(crate) fn control_immediate(&mut self, peer: PeerId, control: Control) {
        let fault = match control {
            Control::Heartbeat(usage) => {
                match usage {
                    Usage::None | Usage::Some => {}
                    Usage::Over(round) => self.asked_to_part(peer, round),
                    Usage::Stays(round) => self.group.handle_stays(self.now, peer, round),
                }
                return;
            }
            Control::Ask { from, to, epoch } => {
                match self.group.handle_ask(peer, from, to, epoch) {
                    Ok(()) => return,
                    Err(_) => "an ask about a path that there is not",
                }
            }
            Control::Answer(nic) => return self.group.handle_answer(peer, nic),
            Control::Credit(slot) => {
                let Some(link) = self.link(peer) else { return };
                let released = link.outbox.as_mut().map(|outbox| outbox.release(slot));
                if let Some(Ok(())) = released {
                    return self.retry_messages(peer);
                }
                "a credit for a slot that was free"
            }
            Control::Message(slot) => {
                let Some(link) = self.link(peer) else { return };
                let mut header = [0; HEADER_BYTES];
                let offset = link.inbox.geometry().offset(slot);
                let read = offset.map(|offset| link.mailbox.read(offset, &mut header));
                match read.map(|_| link.inbox.handle_message(slot, &header)) {
                    Some(Ok(())) => {
                        if self.deliver(peer.index) == Undelivered::Some {
                            self.unfinished(peer.index);
                        }
                        return;
                    }
                    Some(Err(error)) => {
                        tracing::warn!(%peer, %error, "dropped");
                        "a message that breaks the rules"
                    }
                    None => "a message in a slot that does not exist",
                }
            }
        };
        tracing::warn!(%peer, fault, "the peer broke the protocol and is dropped");
        self.group.remove_peer(self.now, peer, DownReason::Protocol);
    }

    /// Lays an answer out for the peer; `false` if there is no memory for it.
    pub(crate) fn lay_out(&mut self, peer: PeerId, settlement: &Settlement) -> bool {
        let Some(link) = self.link(peer) else { return false };
        let Some((staging, outbox)) = link.staging.as_ref().zip(link.outbox.as_ref()) else {
            return false;
        };
        let offset = outbox.geometry().receipt_offset(settlement.from);
        offset.is_some_and(|offset| staging.write(offset, &settlement.to_bytes()).is_ok())
    }

    /// What the peer's answer says of this path of ours; `None` if it answers another ask.
    pub(crate) fn receipt(
        &mut self,
        peer: PeerId,
        path: Path,
        epoch: Epoch,
    ) -> Result<Option<Receipt>, SettlementError> {
        let Some(link) = self.link(peer) else { return Ok(None) };
        let Some(offset) = link.inbox.geometry().receipt_offset(path.nic) else { return Ok(None) };
        let mut bytes = [0; SETTLEMENT_BYTES];
        if link.mailbox.read(offset, &mut bytes).is_err() {
            return Ok(None);
        }
        match Settlement::from_bytes(&bytes) {
            Ok(found) => {
                let asked = (epoch, path.nic, path.remote_nic);
                let answers = (found.epoch, found.from, found.to) == asked;
                Ok(answers.then_some(Receipt(found.receipt)))
            }
            // The announcement of an earlier one, while this one is being written.
            Err(SettlementError::Torn) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Hands over what has arrived from the peer in this slot, and gives its slots back.
    pub(crate) fn deliver(&mut self, index: u16) -> Undelivered {
        let Some(Some(link)) = self.links.get_mut(usize::from(index)) else {
            return Undelivered::None;
        };
        let peer = link.peer;
        while self.shared.inbox.has_room(None) {
            let Some(delivery) = link.inbox.poll_delivery() else { break };
            link.hand_over(&delivery, &self.shared);
            if let Ok(Control::Credit(slot)) = link.inbox.handle_consumed(delivery.slot) {
                link.credits |= 1_u64.checked_shl(u32::from(slot)).unwrap_or(0);
            }
        }
        let full = link.inbox.has_delivery();
        let credits = std::mem::take(&mut link.credits);
        let left = self.give_credits(peer, credits);
        if let Some(link) = self.link(peer) {
            link.credits = left;
        }
        if full || left != 0 { Undelivered::Some } else { Undelivered::None }
    }

    /// Sends credits; returns those that there was no room for.
    fn give_credits(&mut self, peer: PeerId, mut credits: u64) -> u64 {
        while credits != 0 {
            let slot = SlotIndex::try_from(credits.trailing_zeros()).unwrap_or(0);
            let imm = Imm::from_bits(Control::Credit(slot).encode());
            if !self.submit_own(peer, imm, slot) {
                break;
            }
            credits &= credits - 1;
        }
        credits
    }

    /// The peer goes: what it has sent is handed over, with room or not, as far as memory for that is.
    pub(crate) fn deliver_all(&mut self, peer: PeerId) {
        let shared = Arc::clone(&self.shared);
        let Some(link) = self.link(peer) else { return };
        // Its sender was told that it lies here: it goes with the mailbox no more than with its sender.
        while let Some(delivery) = link.inbox.poll_delivery() {
            if !shared.inbox.has_room(Some(delivery.len.into())) {
                tracing::error!(%peer, "messages of a peer that is gone are dropped: nobody takes them");
                break;
            }
            link.hand_over(&delivery, &shared);
        }
    }

    /// The peer is gone, and with it what waits for it.
    pub(crate) fn close_link(&mut self, peer: PeerId) {
        if self.link(peer).is_none() {
            return;
        }
        let Some(link) = self.links.get_mut(usize::from(peer.index)).and_then(Option::take) else {
            return;
        };
        self.waiting_messages = self.waiting_messages.saturating_sub(link.waiting.len());
        for outgoing in link.waiting {
            let error = TransferError::Message(SendError::Closed);
            let end = End::NeverStarted { error };
            self.shared.finish(outgoing.cell, outgoing.ticket, end);
        }
        for again in link.again {
            let end = again.end(TransferError::Message(SendError::Closed));
            self.shared.finish(again.cell, again.ticket, end);
        }
        if let Some(staging) = link.staging
            && is_in_flight(&self.group, peer)
        {
            self.sources.push((peer, staging));
        }
    }

    /// Lets go of what was written from to peers that are gone, once the transport has reported all of it. O(peers that are gone).
    pub(crate) fn let_go_of_sources(&mut self) {
        let group = &self.group;
        self.sources.retain(|(peer, _)| is_in_flight(group, *peer));
    }

    /// The engine stops: messages that wait are not sent any more.
    pub(crate) fn drop_messages(&mut self) {
        self.waiting_messages = 0;
        for link in self.links.iter_mut().flatten() {
            for again in link.again.drain(..) {
                let end = again.end(TransferError::EngineStopped);
                self.shared.finish(again.cell, again.ticket, end);
            }
            for outgoing in link.waiting.drain(..) {
                let end = End::NeverStarted { error: TransferError::EngineStopped };
                self.shared.finish(outgoing.cell, outgoing.ticket, end);
            }
        }
    }
}

/// Whether a piece to the peer has not been reported: of transfers, messages among them, or an answer.
fn is_in_flight(group: &Group, peer: PeerId) -> bool {
    (0..MAX_NICS).any(|nic| NicIndex::try_from(nic).is_ok_and(|nic| group.in_flight(peer, nic) > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_staging_memory_a_message_does_not_wait() {
        let mut connected = Some(Outbox::new(Geometry::new(2, 128).unwrap()));
        assert_eq!(Link::stage(&mut None, None, b"1"), Err(SendError::Full));
        assert_eq!(Link::stage(&mut connected, None, b"1"), Err(SendError::NoMemory));
    }
}
