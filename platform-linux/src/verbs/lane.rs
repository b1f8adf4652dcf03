//! Queue pairs that writes are posted on, what is in flight on them, and whose a queue pair is.
//!
//! Completions of one queue pair come in the order of posting, so that not every write needs one: a signalled one
//! tells of all before it.
//!
//! # Invariants
//!
//! - The last write of each post is signalled: each write has one behind it, or is one, that completes.
//! - A number that names a lane names none that was closed before ([`LaneId`] carries a generation).
//! - What was posted counts until its completion was read ([`Lane::unread`]), also when what is in flight outlives that.

use std::collections::VecDeque;
use std::time::Duration;

use immwire_core::group::WorkRequest;
use immwire_core::id::{NicIndex, Time};
use immwire_core::pulse::Watch;

use super::device::QueuePair;

/// Of so many writes in a row, one is signalled.
pub(super) const SIGNAL_EVERY: u16 = 16;

/// Names a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaneId {
    slot: u16,
    generation: u16,
}

const GENERATIONS: u16 = 1 << 14;

/// What a work request's number says: what has completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    /// The receive of this number.
    Receive { number: u32 },
    /// The write of this number, on this lane.
    Write { lane: LaneId, number: u32 },
    /// A letter, or a probe, of this session's, if its token ends so.
    Note { session: u16, token: u32 },
    /// The write without bytes with which this lane is tried.
    Trial { lane: LaneId },
}

impl Done {
    /// As a work request carries it.
    #[inline]
    pub(super) const fn encode(self) -> u64 {
        match self {
            Self::Receive { number } => number as u64,
            Self::Write { lane: LaneId { slot, generation }, number } => {
                1 << 62 | (generation as u64) << 48 | (slot as u64) << 32 | number as u64
            }
            Self::Note { session, token } => 2 << 62 | (session as u64) << 32 | token as u64,
            Self::Trial { lane: LaneId { slot, generation } } => {
                3 << 62 | (generation as u64) << 48 | (slot as u64) << 32
            }
        }
    }

    /// What a number says; `None` if none of ours says so.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "each part is cut to its width")]
    pub(super) const fn decode(id: u64) -> Option<Self> {
        let (middle, low) = ((id >> 32) as u16, id as u32);
        let lane = LaneId { slot: middle, generation: (id >> 48) as u16 & (GENERATIONS - 1) };
        match (id >> 62, low) {
            (0, number) => Some(Self::Receive { number }),
            (1, number) => Some(Self::Write { lane, number }),
            (2, token) => Some(Self::Note { session: middle, token }),
            (_, 0) => Some(Self::Trial { lane }),
            _ => None,
        }
    }
}

/// A queue pair for writes to one peer.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) pair: QueuePair,
    pub(super) nic: NicIndex,
    /// Which session's.
    pub(super) session: u16,
    /// The peer's NIC.
    pub(super) remote_nic: NicIndex,
    /// In the order of posting. Those of a broken path stay when they have completed as flushed.
    pub(super) flights: VecDeque<WorkRequest>,
    numbers: Numbers,
    unsignalled: u16,
    /// Immediates of writes that were done.
    pub(super) announced: u64,
    /// The completion of the write that it is tried with was not read.
    pub(super) is_tried: bool,
    /// It takes no more from the shared receive queue.
    pub(super) is_drained: bool,
    watch: Watch,
}

impl Lane {
    /// Over `pair`, from our NIC to the peer's, with room for so many writes.
    pub(super) fn new(
        pair: QueuePair,
        (nic, remote_nic): (NicIndex, NicIndex),
        session: u16,
        depth: usize,
    ) -> Self {
        Self {
            pair,
            nic,
            session,
            remote_nic,
            flights: VecDeque::with_capacity(depth),
            numbers: Numbers::default(),
            unsignalled: 0,
            announced: 0,
            is_tried: false,
            is_drained: false,
            watch: Watch::default(),
        }
    }

    /// Takes a write in; its number, and whether it is to be signalled wherever it stands.
    #[inline]
    pub(super) fn push(&mut self, work: &WorkRequest) -> (u32, bool) {
        let number = self.numbers.post();
        self.flights.push_back(*work);
        self.unsignalled += 1;
        let signalled = self.unsignalled >= SIGNAL_EVERY;
        if signalled {
            self.unsignalled = 0;
        }
        (number, signalled)
    }

    /// The last write taken in is signalled.
    pub(super) const fn signalled(&mut self) {
        self.unsignalled = 0;
    }

    /// Takes the last `count` writes out again: they were not posted.
    pub(super) fn retract(&mut self, count: usize) {
        for _ in 0..count {
            if self.flights.pop_back().is_some() {
                self.numbers.retract();
            }
        }
    }

    /// The completion of the write of this number was read: of how many it is the news.
    #[inline]
    pub(super) const fn read(&mut self, number: u32) -> u32 {
        self.numbers.read(number)
    }

    /// Writes, and trials, of which nothing was read.
    pub(super) const fn unread(&self) -> u32 {
        self.numbers.unread() + self.is_tried as u32
    }

    /// When it will be stuck, if nothing of what is under way completes until then. The trial has gone ahead of all writes.
    pub(super) fn look(&mut self, now: Time, patience: Duration) -> Time {
        let (completed, waits) = (self.numbers.unread, self.unread() > 0);
        self.watch.look(now, completed, waits, patience)
    }

    /// How many writes have ended when the one of this number has; none if it is not in flight.
    #[inline]
    pub(super) fn ended(&self, number: u32) -> usize {
        self.numbers.ended(number, self.flights.len())
    }
}

/// The numbers of a lane's writes, which begin again after 2^32: far more than there can be in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Numbers {
    /// Of the next write.
    next: u32,
    /// Of the first write whose completion, or a later one, was not read.
    unread: u32,
}

impl Numbers {
    const fn post(&mut self) -> u32 {
        let number = self.next;
        self.next = number.wrapping_add(1);
        number
    }

    /// The last one was not posted.
    const fn retract(&mut self) {
        self.next = self.next.wrapping_sub(1);
    }

    #[inline]
    const fn unread(&self) -> u32 {
        self.next.wrapping_sub(self.unread)
    }

    #[inline]
    const fn read(&mut self, number: u32) -> u32 {
        let ahead = number.wrapping_sub(self.unread);
        if ahead >= self.unread() {
            return 0;
        }
        self.unread = number.wrapping_add(1);
        ahead + 1
    }

    #[inline]
    fn ended(&self, number: u32, in_flight: usize) -> usize {
        let behind = usize::try_from(self.next.wrapping_sub(number)).unwrap_or(usize::MAX);
        // The last has one behind it: the next.
        if behind == 0 || behind > in_flight { 0 } else { in_flight - behind + 1 }
    }
}

#[derive(Debug)]
struct Slot {
    generation: u16,
    lane: Option<Box<Lane>>,
}

/// All lanes.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    slots: Vec<Slot>,
    free: Vec<u16>,
}

impl Lanes {
    /// Takes a lane in; `None` if there are 65,536.
    pub(super) fn open(&mut self, lane: Lane) -> Option<LaneId> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = u16::try_from(self.slots.len()).ok()?;
                self.slots.push(Slot { generation: 0, lane: None });
                slot
            }
        };
        let entry = self.slots.get_mut(usize::from(slot))?;
        entry.lane = Some(Box::new(lane));
        Some(LaneId { slot, generation: entry.generation })
    }

    #[inline]
    pub(super) fn get(&mut self, id: LaneId) -> Option<&mut Lane> {
        let slot = self.slots.get_mut(usize::from(id.slot))?;
        if slot.generation == id.generation { slot.lane.as_deref_mut() } else { None }
    }

    /// Takes a lane out; its name means nothing any more.
    pub(super) fn close(&mut self, id: LaneId) -> Option<Box<Lane>> {
        let slot = self.slots.get_mut(usize::from(id.slot))?;
        if slot.generation != id.generation {
            return None;
        }
        let lane = slot.lane.take()?;
        slot.generation = (slot.generation + 1) % GENERATIONS;
        self.free.push(id.slot);
        Some(lane)
    }

    pub(super) fn clear(&mut self) {
        self.slots.clear();
        self.free.clear();
    }
}

/// What a queue pair is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Letters.
    Line,
    /// Letters, before the line was made anew, which it is when this is done with the shared receive queue.
    OldLine { is_drained: bool },
    /// The peer's writes, from this NIC of its, on this lane.
    Inlet { from: NicIndex, lane: u8 },
    /// Our writes.
    Outlet { lane: LaneId },
}

/// Whose a queue pair is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    /// Which session's.
    pub(super) session: u16,
    pub(super) role: Role,
}

const LEAF: usize = 256;
type Leaf = [Option<Owner>; LEAF];

/// Whose each queue pair of a device is, by its number of 24 bits: two loads.
#[derive(Debug)]
pub(super) struct Owners(Vec<Option<Box<Leaf>>>);

impl Owners {
    pub(super) fn new() -> Self {
        Self((0..1 << 16).map(|_| None).collect())
    }

    const fn place(number: u32) -> (usize, usize) {
        ((number as usize >> 8) & 0xffff, number as usize % LEAF)
    }

    pub(super) fn set(&mut self, number: u32, owner: Option<Owner>) {
        let (high, low) = Self::place(number);
        let Some(leaf) = self.0.get_mut(high) else { return };
        if leaf.is_none() && owner.is_none() {
            return;
        }
        let leaf = leaf.get_or_insert_with(|| Box::new([None; LEAF]));
        if let Some(slot) = leaf.get_mut(low) {
            *slot = owner;
        }
    }

    #[inline]
    pub(super) fn get(&self, number: u32) -> Option<Owner> {
        let (high, low) = Self::place(number);
        *self.0.get(high)?.as_deref()?.get(low)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_say_what_they_were_made_of() {
        for slot in [0, 1, u16::MAX] {
            for generation in [0, 1, GENERATIONS - 1] {
                for number in [0, 1, u32::MAX] {
                    let lane = LaneId { slot, generation };
                    for done in [
                        Done::Receive { number },
                        Done::Write { lane, number },
                        Done::Note { session: slot, token: number },
                        Done::Trial { lane },
                    ] {
                        assert_eq!(Done::decode(done.encode()), Some(done));
                    }
                }
            }
        }
        assert_eq!(Done::decode(u64::MAX), None);
    }

    /// Up to six writes, of which every other completion may be skipped: each is counted once, wherever numbers begin.
    #[test]
    fn completions_tell_of_all_before_them_once() {
        for start in [0, u32::MAX - 2] {
            for signalled in 0..1_u32 << 6 {
                let mut numbers = Numbers { next: start, unread: start };
                let posted: Vec<u32> = (0..7).map(|_| numbers.post()).collect();
                numbers.retract();
                let (mut read, mut in_flight) = (0, 6);
                for at in (0..6_u32).filter(|at| signalled & 1 << at != 0) {
                    let number = posted[at as usize];
                    let ended = numbers.ended(number, in_flight);
                    assert_eq!(ended, (at + 1) as usize - (6 - in_flight));
                    in_flight -= ended;
                    read += numbers.read(number);
                    assert_eq!((read, numbers.unread()), (at + 1, 5 - at));
                    // A second time, as of one that was not posted, it says nothing.
                    assert_eq!((numbers.read(number), numbers.ended(number, in_flight)), (0, 0));
                    assert_eq!(numbers.read(posted[6]), 0);
                }
            }
        }
    }

    #[test]
    fn owners_are_found_by_all_bits_of_the_number() {
        let mut owners = Owners::new();
        let numbers = [0, 1, 255, 256, 65_535, 65_536, 0x00ff_ffff];
        let role = Role::Inlet { from: 7, lane: 1 };
        let owner = |session| Some(Owner { session, role });
        for (session, number) in (0..).zip(numbers) {
            owners.set(number, owner(session));
        }
        for (session, number) in (0..).zip(numbers) {
            assert_eq!(owners.get(number), owner(session));
            owners.set(number, None);
            assert_eq!(owners.get(number), None);
        }
        assert_eq!(owners.get(2), None);
        owners.set(77_000, None);
    }
}
