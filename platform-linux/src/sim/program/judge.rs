//! Judges what happens: ends and their reasons, counts, messages, waits, and what is left at the end.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use immwire_core::group;
use immwire_core::id::PeerId;
use immwire_core::plan::PlanError;

use super::ledger::Sent;
use super::memory::{Check, Left, pattern};
use super::run::Program;
use super::side::{Count, Flight, Part, Side, Way};
use super::world::{Fault, World};
use crate::sync::lock;
use crate::{End, Expected, Message, PeerShare, PeerState, TransferError};

/// Bytes of a message before what it says: who sent it, over which connection, and its number there.
const MESSAGE_HEAD: usize = 20;

/// A message that tells all about itself.
pub(super) fn message(serial: u32, id: PeerId, number: usize, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0).max(MESSAGE_HEAD)];
    let number = number as u64;
    pattern(u64::from(serial) << 32 | number, &mut bytes);
    let head = serial.to_le_bytes().into_iter().chain(u32::from(id.index).to_le_bytes());
    let head = head.chain(id.generation.to_le_bytes()).chain(number.to_le_bytes());
    bytes.iter_mut().zip(head).for_each(|(byte, head)| *byte = head);
    bytes
}

/// Who sent the message, over which connection, and its number there; `None` if it is damaged.
fn parse(bytes: &[u8]) -> Option<(u32, PeerId, usize)> {
    let word = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    let (serial, index, generation) = (word(0)?, u16::try_from(word(4)?).ok()?, word(8)?);
    let number = u64::from_le_bytes(*bytes.get(12..)?.first_chunk()?);
    let (id, number) = (PeerId { index, generation }, usize::try_from(number).ok()?);
    (message(serial, id, number, bytes.len() as u64) == bytes).then_some((serial, id, number))
}

impl<W: World> Program<'_, W> {
    // ---- after each event ----

    /// Looks for ends of transfers and of waits, and for those that are overdue.
    pub(super) fn observe(&mut self) -> Check {
        let mut at = 0;
        let now = self.world.now();
        // What is not drained in time costs the connection, whoever was to blame.
        let drain = self.config.drain;
        // Who is refused a region that was taken back is stopped, too, and who lost one of several peers, or the NICs
        // that it had left. On a machine nobody can tell when that was, and threads may not run for as long.
        let real = !self.world.is_virtual();
        let stopped = |flight: &Flight| {
            let refused = flight.parts.iter().any(|part| self.was_withdrawn(part));
            let bereaved = flight.parts.iter().any(|part| self.pair_failed(flight, part).is_ok());
            let muted = self.health_changed >= flight.submitted;
            let perhaps = (real && (refused || bereaved || muted)).then_some(flight.submitted);
            flight.stopped().into_iter().chain(perhaps).min()
        };
        // Where a refusal costs the connection, it does so at once.
        let hard = real && !self.world.refuses_softly();
        let cut = |flight: &Flight| hard && flight.parts.iter().any(|it| self.was_withdrawn(it));
        let forced =
            |flight: &&Flight| cut(flight) || stopped(flight).is_some_and(|at| now >= at + drain);
        let pairs = |flight: &Flight| {
            let serial = flight.serial;
            let peers: Vec<u32> = flight.parts.iter().map(|part| part.peer_serial).collect();
            peers.into_iter().map(move |peer| (serial, peer))
        };
        let forced: Vec<_> = self.flights.iter().filter(forced).flat_map(pairs).collect();
        forced.into_iter().for_each(|(one, other)| self.disturb(one, other));
        self.listen();
        while let Some(flight) = self.flights.get(at) {
            match flight.handle.end()? {
                Some(end) => {
                    let flight = self.flights.swap_remove(at);
                    self.finish(flight, end)?;
                }
                None => {
                    if self.limit(flight).is_some_and(|limit| now > limit) {
                        let Flight { number, deadline, cancelled, .. } = flight;
                        return Err(format!(
                            "transfer {number} has not ended: deadline {deadline:?}, cancelled \
                             {cancelled:?}, drain {:?}, and it is {now:?}",
                            self.config.drain
                        ));
                    }
                    at += 1;
                }
            }
        }
        for at in 0..self.sides.len() {
            for slot in 0..usize::from(self.config.counters) {
                self.look_at_wait(at, slot)?;
            }
        }
        Ok(())
    }

    /// When a transfer that was stopped has ended at the latest.
    fn limit(&self, flight: &Flight) -> Option<Duration> {
        // A message that has its place in the order is sent, whatever its sender wants by then.
        if flight.message.is_some() || !self.world.is_virtual() {
            return None;
        }
        // Peers that make progress are aborted later than those that make none: by as much again, or 1 ms.
        let drain = self.config.drain;
        let forced = drain + drain.max(Duration::from_millis(1));
        flight.stopped().map(|stopped| stopped + forced + self.config.slack)
    }

    fn look_at_wait(&mut self, at: usize, slot: usize) -> Check {
        let now = self.world.now();
        let Some(side) = self.sides.get_mut(at).and_then(Option::as_mut) else { return Ok(()) };
        let Some(Some(counter)) = side.counters.get_mut(slot) else { return Ok(()) };
        let Some(wait) = &mut counter.wait else { return Ok(()) };
        let writes = wait.writes;
        let over = match &mut wait.way {
            Way::Callback(results) => match lock(results).as_slice() {
                [] => return Ok(()),
                [Ok(())] => Some(Ok(())),
                [Err(error)] => Some(Err(error.clone())),
                more => return Err(format!("a wait ended {} times", more.len())),
            },
            Way::Future { deadline, future } => {
                match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                    Poll::Ready(result) => Some(result),
                    Poll::Pending if now >= *deadline => None,
                    Poll::Pending => return Ok(()),
                }
            }
        };
        // A future whose time is up is dropped, and gives back what it had.
        counter.wait = None;
        match over {
            None => self.audit(at, slot, false),
            Some(Ok(())) => {
                self.say(|| format!("engine {at} has {writes} at counter {slot}"));
                self.consumed(at, slot, writes)
            }
            Some(Err(error)) => Err(format!("a wait for {writes} writes of engine {at}: {error}")),
        }
    }

    // ---- counts ----

    /// A wait has consumed writes.
    pub(super) fn consumed(&mut self, at: usize, slot: usize, writes: u64) -> Check {
        let Some(side) = self.side(at) else { return Ok(()) };
        let Some(Some(counter)) = side.counters.get(slot) else { return Ok(()) };
        let (serial, tag) = (side.serial, counter.tag);
        self.ledger.account(serial, tag).consumed += writes;
        self.audit(at, slot, false)
    }

    /// A counter has seen what it may have and, if all has `settled`, what it must have.
    pub(super) fn audit(&mut self, at: usize, slot: usize, settled: bool) -> Check {
        let Some(side) = self.side(at) else { return Ok(()) };
        let Some(Some(counter)) = side.counters.get(slot) else { return Ok(()) };
        let (serial, tag) = (side.serial, counter.tag);
        // An armed counter does not tell what it has; that it has enough shows by the wait's end.
        let waited = counter.wait.as_ref().map(|wait| wait.writes);
        let available = if waited.is_some() { 0 } else { counter.handle.available() };
        let account = self.ledger.account(serial, tag);
        let who = |error: String| format!("engine {at}, {tag}: {error}");
        if let Some(writes) = waited {
            let there = account.all.certain.saturating_sub(account.consumed);
            if settled && there >= writes {
                let consumed = account.consumed;
                return Err(who(format!(
                    "a wait for {writes} writes goes on, when {} arrived and {consumed} are consumed",
                    account.all.certain
                )));
            }
            return account.check(0, false).map_err(who);
        }
        account.check(available, settled).map_err(who)?;
        if account.is_complete(available) {
            self.all_came(at, serial, tag.bits())?;
        }
        Ok(())
    }

    /// Everything sent for a counter was counted: the bytes of all of it are there.
    fn all_came(&mut self, at: usize, serial: u32, tag: u32) -> Check {
        let Self { flights, sides, .. } = self;
        let Some(side) = sides.get_mut(at).and_then(Option::as_mut) else { return Ok(()) };
        for flight in flights.iter() {
            for part in flight.parts.iter().filter(|part| part.serial == serial) {
                let counts = part.count.is_some_and(|count| count.tag.bits() == tag);
                let Some((window, registration)) = part.window.filter(|_| counts) else { continue };
                let window = side.windows.get_mut(window);
                let Some(window) = window.filter(|window| window.serial == registration) else {
                    continue;
                };
                window.has_come(flight.number).map_err(|error| format!("counted, and {error}"))?;
            }
        }
        Ok(())
    }

    /// A wait that timed out has named who sent what.
    pub(super) fn named(
        &mut self,
        at: usize,
        slot: usize,
        expected: &[Expected],
        named: &[PeerShare],
    ) -> Check {
        let Self { sides, ledger, .. } = self;
        let Some(side) = sides.get(at).and_then(Option::as_ref) else { return Ok(()) };
        let Some(Some(counter)) = side.counters.get(slot) else { return Ok(()) };
        for (share, expected) in named.iter().zip(expected) {
            if share.peer != expected.peer || share.expected != Some(expected.writes) {
                return Err(format!("{expected:?} was expected, and {share:?} named"));
            }
            let named = |(_, other): &(usize, &Side)| {
                side.peers
                    .iter()
                    .flatten()
                    .any(|known| (known.id, known.serial) == (share.peer, other.serial))
            };
            let mut live =
                sides.iter().enumerate().filter_map(|(at, side)| Some((at, side.as_ref()?)));
            let Some((other, sender)) = live.find(named) else { continue };
            // What it sent over this connection; it may not know us by it yet.
            let Some(id) = sender.up(at, side.serial) else { continue };
            let account = ledger.account(side.serial, counter.tag);
            let sent = account.by.get(&(sender.serial, id)).copied().unwrap_or_default();
            let before = counter.shares.get(&share.peer).copied().unwrap_or(0);
            let (least, most) =
                (sent.certain.saturating_sub(before), sent.possible.saturating_sub(before));
            if share.arrived < least || share.arrived > most {
                return Err(format!(
                    "engine {at} says that engine {other} ({}) sent {} to {}, not {least} to {most}",
                    share.peer, share.arrived, counter.tag
                ));
            }
        }
        if named.len() == expected.len() { Ok(()) } else { Err("a peer was not named".into()) }
    }

    // ---- ends ----

    /// A transfer has ended.
    pub(super) fn finish(&mut self, flight: Flight, end: End) -> Check {
        let number = flight.number;
        self.say(|| format!("transfer {number} has ended: {end:?}"));
        self.totals.ended += 1;
        self.judge(&flight, end)
            .map_err(|error| format!("transfer {number} ended as {end:?}: {error}"))
    }

    fn judge(&mut self, flight: &Flight, end: End) -> Check {
        let (left, error) = match end {
            End::Done => (Left::New, None),
            End::NeverStarted { error } => (Left::Old, Some(error)),
            End::Quiesced { error } => (Left::Either, Some(error)),
        };
        if let Some(error) = error {
            self.has_cause(flight, error, left)?;
        }
        if let Some(number) = flight.message {
            let sent = match end {
                End::Done => Sent::Done,
                End::NeverStarted { .. } => Sent::NeverStarted,
                End::Quiesced { .. } => Sent::Unknown,
            };
            let Some(part) = flight.parts.first() else { return Ok(()) };
            let stream = self.streams.entry((flight.serial, part.id)).or_default();
            return stream.end(number, sent);
        }
        let sides = self.sides.iter_mut().flatten();
        if let Some(sender) =
            sides.chain(&mut self.graves).find(|side| side.serial == flight.serial)
        {
            sender.source.end(flight.number);
        }
        // What was cut off may land yet: its bytes stay open, one way or the other.
        let lands_yet = left == Left::Either && !self.world.flushes_at_the_receiver();
        for part in &flight.parts {
            let receiver = self.sides.get_mut(part.to).and_then(Option::as_mut);
            let receiver = receiver.filter(|side| side.serial == part.serial);
            if let (Some(side), Some((window, registration))) = (receiver, part.window)
                && let Some(window) = side.windows.get_mut(window)
            {
                if registration == 0 && end == End::Done {
                    return Err("a write to a region that was withdrawn was done".into());
                }
                if window.serial == registration && !lands_yet {
                    window.end(flight.number, left)?;
                }
            }
            if let Some(count) = part.count {
                let sender = (flight.serial, part.id);
                match left {
                    Left::Old => {
                        self.ledger.withdraw(part.serial, count.tag, sender, count.writes);
                    }
                    Left::New => self.done.push((flight.from, flight.serial, *part, count)),
                    Left::Either => {}
                }
            }
        }
        Ok(())
    }

    /// What a transfer ended by has happened.
    fn has_cause(&self, flight: &Flight, error: TransferError, left: Left) -> Check {
        let now = self.world.now();
        let sender = self.side(flight.from).filter(|side| side.serial == flight.serial);
        let Some(sender) = sender else { return Ok(()) };
        let named = |peer: PeerId| {
            let part = flight.parts.iter().find(|part| part.id == peer);
            part.ok_or_else(|| format!("{peer} is none of its peers"))
        };
        // Who parts has nothing under way to that peer: what waited was never started. To others it may have been.
        let others = flight.parts.len() > 1;
        let lost = |part: &Part| {
            let parted = self.has_parted(flight.from, flight.serial, part.id);
            if parted && (others || left == Left::Old) {
                Ok(())
            } else {
                self.pair_failed(flight, part)
            }
        };
        let down = |part: &Part| match sender.engine.peer_state(part.id) {
            None | Some(PeerState::Down(_)) => lost(part),
            Some(state) => Err(format!("{} is {state}", part.id)),
        };
        let stopped = match error {
            TransferError::Stopped(stopped) => stopped,
            TransferError::Refused(group::SubmitError::WrongOwner { peer, .. }) => {
                let part = named(peer)?;
                let same = part.peer_serial == part.serial;
                return if same { Err("the region is the peer's".into()) } else { Ok(()) };
            }
            TransferError::Refused(
                group::SubmitError::NoSuchPeer { peer } | group::SubmitError::PeerDown { peer, .. },
            ) => return down(named(peer)?),
            // Where memory for messages was not to be had, none can be sent.
            TransferError::Message(_) if self.registrations_failed => {
                return flight.parts.iter().try_for_each(lost);
            }
            TransferError::Message(_) => return flight.parts.iter().try_for_each(down),
            TransferError::Refused(group::SubmitError::Plan(PlanError::NoRoute { .. })) => {
                group::TransferError::NoNic
            }
            TransferError::Refused(other) => return Err(format!("nothing was wrong: {other}")),
            TransferError::EngineStopped => return Err("the engine has not stopped".into()),
        };
        match stopped {
            group::TransferError::Cancelled if flight.cancelled.is_some() => Ok(()),
            group::TransferError::DeadlineExceeded { .. }
                if flight.deadline.is_some_and(|deadline| now >= deadline) =>
            {
                Ok(())
            }
            group::TransferError::PeerDown { peer, .. } => down(named(peer)?),
            group::TransferError::Piece { peer, nic, error } => {
                let part = named(peer)?;
                if nic >= sender.nics {
                    return Err(format!("there is no NIC {nic}"));
                }
                if error == group::WorkError::RemoteAccess && self.was_withdrawn(part) {
                    return Ok(());
                }
                self.pair_failed(flight, part)
            }
            group::TransferError::NoNic => {
                // On a machine the news of a NIC take a while to come to a peer.
                let news = if self.world.is_virtual() { Duration::ZERO } else { self.config.news };
                let lost =
                    self.health_changed + news >= flight.submitted || !self.unhealthy.is_empty();
                let failed = |part: &Part| self.pair_failed(flight, part).is_ok();
                if lost || flight.parts.iter().any(failed) {
                    return Ok(());
                }
                Err("no NIC was lost".into())
            }
            _ => Err("nothing of the kind has happened".into()),
        }
    }

    fn was_withdrawn(&self, part: &Part) -> bool {
        let Some(side) = self.side(part.to).filter(|side| side.serial == part.serial) else {
            return true;
        };
        part.window.is_some_and(|(window, registration)| {
            let window = side.windows.get(window);
            window.is_none_or(|window| {
                window.serial != registration || window.desc().is_none() || window.closing
            })
        })
    }

    /// Something went wrong between the two engines since they were connected.
    fn pair_failed(&self, flight: &Flight, part: &Part) -> Check {
        let known = self.side(flight.from).and_then(|side| side.known(part.to));
        // Where another connection has taken its place, it was looked at then.
        let Some(known) = known.filter(|known| known.id == part.id) else { return Ok(()) };
        let (from, to) = ((flight.from, flight.serial), (part.to, part.peer_serial));
        if self.was_disturbed(from, to, known.since) {
            return Ok(());
        }
        Err(format!("nothing has happened between engines {} and {}", flight.from, part.to))
    }

    /// Whether anything has gone wrong between two engines since then.
    pub(super) fn was_disturbed(&self, a: (usize, u32), b: (usize, u32), since: Duration) -> bool {
        let pair = (a.1.min(b.1), a.1.max(b.1));
        let wrong_now = self.faults.iter().any(|fault| match *fault {
            // Where connections fail over, it depends on what was left: see `look_at_paths`.
            Fault::Nic { .. } | Fault::Path { .. } if self.fails_over() => false,
            Fault::Nic { engine, .. } => engine == a.0 || engine == b.0,
            Fault::Path { engine, to, .. } => {
                (engine, to) == (a.0, b.0) || (engine, to) == (b.0, a.0)
            }
            Fault::Registration { .. } => true,
        });
        let gone = self.side(b.0).is_none_or(|side| side.serial != b.1);
        wrong_now || gone || self.disturbed.get(&pair).is_some_and(|&at| at >= since)
    }

    // ---- messages ----

    /// Takes up to `most` messages, after those that went to posted receives.
    pub(super) fn take_messages(&mut self, at: usize, most: u64) -> Check {
        let Some(side) = self.side(at) else { return Ok(()) };
        let mut messages = std::mem::take(&mut *lock(&side.received));
        for _ in 0..most {
            let Ok(message) = side.engine.recv(Duration::ZERO) else { break };
            messages.push(message);
        }
        messages.into_iter().try_for_each(|message| self.message_came(at, &message))
    }

    fn message_came(&mut self, at: usize, message: &Message) -> Check {
        self.totals.messages += 1;
        let (serial, id, number) = parse(&message.bytes).ok_or("a message came damaged")?;
        self.say(|| format!("engine {at} has message {number} of engine {serial}"));
        let Some(side) = self.sides.get_mut(at).and_then(Option::as_mut) else { return Ok(()) };
        let sender = *side.senders.entry(message.from).or_insert((serial, id));
        if sender != (serial, id) {
            return Err(format!(
                "{} is two senders: {sender:?} and {:?}",
                message.from,
                (serial, id)
            ));
        }
        let stream =
            self.streams.get_mut(&(serial, id)).ok_or("a message came that nobody sent")?;
        stream.deliver(number).map_err(|error| format!("to engine {at}, of {serial}: {error}"))
    }

    // ---- when all has settled ----

    /// Whether a connection stands, on both sides; with both names.
    fn connection(&self, from: usize, to: usize) -> Option<(PeerId, PeerId)> {
        let (a, b) = (self.side(from)?, self.side(to)?);
        Some((a.up(to, b.serial)?, b.up(from, a.serial)?))
    }

    fn connections(&self) -> Vec<(usize, usize, PeerId, PeerId)> {
        let places = 0..self.sides.len();
        let pairs = places.clone().flat_map(|from| places.clone().map(move |to| (from, to)));
        let standing =
            |(from, to)| self.connection(from, to).map(|(id, theirs)| (from, to, id, theirs));
        pairs.filter_map(standing).collect()
    }

    /// Lets everything arrive that is on its way, and requires that it has.
    pub(super) fn settle(&mut self) -> Check {
        let before = self.connections();
        let done = std::mem::take(&mut self.done);
        let missing: Vec<_> = self
            .streams
            .iter()
            .filter_map(|(key, stream)| Some((*key, stream.missing()?)))
            .collect();
        // Each round brings at most as many messages as a mailbox has slots.
        for _ in 0..4 {
            self.pass(self.config.settle / 4)?;
            for at in 0..self.sides.len() {
                self.take_messages(at, u64::MAX)?;
            }
        }
        let after = self.connections();
        for (from, serial, part, count) in done {
            let stood = |list: &[(usize, usize, PeerId, PeerId)]| {
                let stands = |&(a, b, id, theirs): &(usize, usize, PeerId, PeerId)| {
                    (a, b, id, Some(theirs)) == (from, part.to, part.id, part.theirs)
                };
                list.iter().any(stands)
            };
            // Ends that part have counted all that was done.
            let parted = self.has_parted(from, serial, part.id)
                && part.theirs.is_some_and(|id| self.has_parted(part.to, part.serial, id));
            self.confirm(serial, part, count, parted || stood(&before) && stood(&after));
        }
        for at in 0..self.sides.len() {
            for slot in 0..usize::from(self.config.counters) {
                self.audit(at, slot, true)?;
            }
        }
        for ((serial, id), number) in missing {
            let of = |entry: &&(usize, usize, PeerId, PeerId)| {
                entry.2 == id && self.side(entry.0).is_some_and(|side| side.serial == serial)
            };
            let stands = before.iter().find(of).is_some_and(|entry| after.contains(entry));
            let stream = self.streams.get(&(serial, id));
            if stands && stream.is_some_and(|stream| stream.missing() == Some(number)) {
                return Err(format!(
                    "message {number} of engine {serial} to {id} is done, and lost"
                ));
            }
        }
        self.sweep()?;
        self.survivors()
    }

    fn confirm(&mut self, serial: u32, part: Part, count: Count, stood: bool) {
        let receiver = self.side(part.to).filter(|side| side.serial == part.serial);
        let counters = receiver.map(|side| side.counters.as_slice()).unwrap_or_default();
        let there =
            counters.iter().flatten().any(|counter| Some(counter.instance) == count.instance);
        if stood && there {
            self.ledger.confirm(part.serial, count.tag, (serial, part.id), count.writes);
        }
    }

    /// Looks at all memory.
    pub(super) fn sweep(&mut self) -> Check {
        for (at, side) in self.sides.iter_mut().enumerate() {
            let windows = side.iter_mut().flat_map(|side| &mut side.windows);
            for (number, window) in windows.enumerate() {
                window.check().map_err(|error| format!("engine {at}, window {number}: {error}"))?;
            }
        }
        Ok(())
    }

    /// Engines between which nothing went wrong are connected still.
    fn survivors(&self) -> Check {
        for (from, side) in self.sides.iter().enumerate() {
            let Some(side) = side else { continue };
            for (to, known) in side.peers.iter().enumerate() {
                let Some(known) = known else { continue };
                if self.was_disturbed((from, side.serial), (to, known.serial), known.since)
                    || self.has_parted(from, side.serial, known.id)
                {
                    continue;
                }
                if let Some(state @ PeerState::Down(_)) = side.engine.peer_state(known.id) {
                    return Err(format!(
                        "engine {from} lost engine {to}, and nothing has happened between them: {state}"
                    ));
                }
            }
        }
        Ok(())
    }

    // ---- the end ----

    /// Everything is put right: everything ends, everybody finds together again, nothing is left over.
    pub(super) fn conclude(&mut self) -> Check {
        self.say(|| "everything is put right".into());
        self.mend_all();
        let until = self.world.now() + self.config.patience();
        while !self.flights.is_empty() {
            let more = self.world.step(until);
            self.totals.events += u64::from(more);
            self.observe()?;
            if !more && !self.flights.is_empty() {
                let numbers: Vec<u64> = self.flights.iter().map(|flight| flight.number).collect();
                return Err(format!("transfers {numbers:?} never end"));
            }
            // Messages wait for room until somebody takes those before them.
            for at in 0..self.sides.len() {
                self.take_messages(at, u64::MAX)?;
            }
        }
        self.pass(self.config.news)?;
        self.finish_closing()?;
        let pairs = self.pairs();
        for &(from, to) in &pairs {
            self.meet(from, to)?;
        }
        self.settle()?;
        for &(from, to) in &pairs {
            // Those that nobody has used since may have parted.
            self.meet(from, to)?;
            self.fill(from, to)?;
        }
        self.settle()?;
        if let Some(breach) = self.world.breach() {
            return Err(format!(
                "an engine did what its provider relies on it not to do: {breach}"
            ));
        }
        // Without their waits counters tell what they have.
        for side in self.sides.iter_mut().flatten() {
            side.counters.iter_mut().flatten().for_each(|counter| counter.wait = None);
        }
        for at in 0..self.sides.len() {
            if self.side(at).is_none() {
                continue;
            }
            self.say(|| format!("engine {at} stops"));
            self.world.stop(at);
            self.bury(at, true)?;
            self.sweep()?;
        }
        Ok(())
    }

    /// Nobody writes any more: windows that were to be closed can be.
    fn finish_closing(&mut self) -> Check {
        let until = self.world.now() + self.config.patience();
        for at in 0..self.sides.len() {
            for number in 0..self.config.windows {
                while let Some(side) = self.side_mut(at) {
                    let engine = side.engine.clone();
                    let window = side.windows.get_mut(number).filter(|window| window.closing);
                    let Some(window) = window else { break };
                    if window.close(0)? {
                        let opened = window.open(&engine);
                        opened.map_err(|error| format!("not registered again: {error}"))?;
                        break;
                    }
                    if !self.world.step(until) {
                        return Err(format!("engine {at} never closes window {number}"));
                    }
                }
            }
        }
        Ok(())
    }

    fn meet(&mut self, from: usize, to: usize) -> Check {
        self.add_peer(from, to)?;
        let until = self.world.now() + self.config.patience();
        loop {
            let Some(side) = self.side(from) else { return Ok(()) };
            let Some(other) = self.side(to) else { return Ok(()) };
            if side.up(to, other.serial).is_some() {
                return Ok(());
            }
            let state = side.known(to).map(|known| side.engine.peer_state(known.id));
            if let Some(None | Some(PeerState::Down(_))) | None = state {
                // The other side may have called at the same time, or just have given up.
                self.add_peer(from, to)?;
            }
            if !self.world.step(until) {
                return Err(format!("engines {from} and {to} do not find together: {state:?}"));
            }
            self.totals.events += 1;
            self.observe()?;
        }
    }
}
