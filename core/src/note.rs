//! What the two ends of a verbs session tell each other, over reliable queue pairs of its own: its *lines*.
//!
//! Messages that arrive, once and in order, as long as a line is left ([`crate::courier`]). Each fits a small receive,
//! so that it takes one from the same queue as immediates do. Those that wait for room have an [`order`]. How a session comes
//! to be is [`crate::datagram`]'s.
//!
//! A *path* leads from a NIC of the writer's to one of the receiver's, over [`LANES`] queue pairs of its own: one for
//! long writes, one for short ones, which do not wait behind the long.
//!
//! # Invariants
//!
//! [`Note::decode`] answers any bytes with a note or nothing, and a note has one encoding: all truncations, and all
//! changes of one bit, are tried below.

use crate::id::{MAX_NICS, NicIndex};
use crate::port::Queue;
use crate::tenant::Tenant;

/// The longest note, in bytes.
pub const NOTE_BYTES: usize = 24;

/// Queue pairs of a path, at each end.
pub const LANES: usize = 2;

/// A path's queue pairs at one end.
pub type Queues = [Queue; LANES];

/// Which path, and which of those that there have been between its NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Passage {
    /// The writer's NIC.
    pub from: NicIndex,
    /// The receiver's.
    pub to: NicIndex,
    /// Counted from 1.
    pub epoch: u32,
}

/// The notes that wait until there is room to say them, by what they are for. [`Note::Bye`] does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// [`Note::Ready`].
    Ready,
    /// [`Note::Taken`].
    Taken,
    /// [`Note::Withdraw`].
    Withdraw,
    /// [`Note::Back`].
    Back,
    /// [`Note::Declined`].
    Declined,
    /// [`Note::Link`].
    Link,
    /// [`Note::Linked`].
    Linked,
    /// [`Note::Connect`].
    Connect,
    /// [`Note::Connected`].
    Connected,
    /// [`Note::Withdrawn`].
    Withdrawn,
}

/// In which order those that wait are said: first that the session is open, then what lets a peer go on that can post nothing
/// more; what is not to be written to before any path that may be written over.
#[must_use]
pub const fn order() -> [Kind; 10] {
    [
        Kind::Ready,
        Kind::Taken,
        Kind::Withdraw,
        Kind::Back,
        Kind::Declined,
        Kind::Link,
        Kind::Linked,
        Kind::Connect,
        Kind::Connected,
        Kind::Withdrawn,
    ]
}

/// A message within a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Note {
    /// The initiator's side is open.
    Ready,
    /// The sender ends the session, and writes no more.
    Bye,
    /// The sender has taken so many immediates over its NIC since the start.
    Taken {
        /// The sender's NIC.
        nic: NicIndex,
        /// How many.
        count: u64,
    },
    /// Nothing more is to be written to this registration of the sender's.
    Withdraw(Tenant),
    /// Nothing more will be, and nothing is under way.
    Withdrawn(Tenant),
    /// The sender wants to write over this path, and these are its ends.
    Connect(Passage, Queues),
    /// The receiver's ends, ready to receive: the answer to `Connect`.
    Connected(Passage, Queues),
    /// The receiver cannot open its ends now: the other answer.
    Declined(Passage),
    /// The line between these NICs is to be made anew, and this is the sender's end: of the one who has called.
    Link(Passage, Queue),
    /// The other end, ready to receive: the answer to `Link`. None, if it cannot be opened now.
    Linked(Passage, Queue),
    /// This NIC of the sender's can be reached again.
    Back {
        /// The sender's NIC.
        nic: NicIndex,
    },
}

/// Bytes put one behind the other.
struct Writer {
    bytes: [u8; NOTE_BYTES],
    len: usize,
}

impl Writer {
    fn put(&mut self, part: &[u8]) {
        let room = self.bytes.get_mut(self.len..).unwrap_or(&mut []);
        for (byte, from) in room.iter_mut().zip(part) {
            *byte = *from;
        }
        self.len = self.len.saturating_add(part.len()).min(NOTE_BYTES);
    }

    fn passage(&mut self, kind: u8, passage: &Passage, queues: &[Queue]) {
        self.put(&[kind, passage.from, passage.to]);
        self.put(&passage.epoch.to_be_bytes());
        for queue in queues {
            self.put(&queue.to_bytes());
        }
    }
}

/// Bytes taken one behind the other.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (part, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*part)
    }

    fn nic(&mut self) -> Option<NicIndex> {
        let [nic] = self.take()?;
        (usize::from(nic) < MAX_NICS).then_some(nic)
    }

    fn tenant(&mut self) -> Option<Tenant> {
        let key = u64::from(u32::from_be_bytes(self.take()?));
        Tenant::of(key).filter(|tenant| tenant.key(0) == key)
    }

    fn passage<const N: usize>(&mut self) -> Option<(Passage, [Queue; N])> {
        let (from, to) = (self.nic()?, self.nic()?);
        let epoch = u32::from_be_bytes(self.take()?);
        let mut queues = [Queue::default(); N];
        for queue in &mut queues {
            *queue = Queue::from_bytes(self.take()?);
        }
        (epoch > 0).then_some((Passage { from, to, epoch }, queues))
    }
}

impl Note {
    /// The bytes, and how many of them count.
    #[must_use]
    pub fn encode(&self) -> ([u8; NOTE_BYTES], usize) {
        let mut to = Writer { bytes: [0; NOTE_BYTES], len: 0 };
        match self {
            Self::Ready => to.put(&[1]),
            Self::Bye => to.put(&[2]),
            Self::Taken { nic, count } => {
                to.put(&[3, *nic]);
                to.put(&count.to_be_bytes());
            }
            Self::Withdraw(tenant) | Self::Withdrawn(tenant) => {
                to.put(&[if matches!(self, Self::Withdraw(_)) { 4 } else { 5 }]);
                // A tenant is the lower half of its key.
                let [.., a, b, c, d] = tenant.key(0).to_be_bytes();
                to.put(&[a, b, c, d]);
            }
            Self::Connect(passage, queues) => to.passage(6, passage, queues),
            Self::Connected(passage, queues) => to.passage(7, passage, queues),
            Self::Declined(passage) => to.passage(8, passage, &[]),
            Self::Link(passage, queue) => to.passage(9, passage, &[*queue]),
            Self::Linked(passage, queue) => to.passage(10, passage, &[*queue]),
            Self::Back { nic } => to.put(&[11, *nic]),
        }
        (to.bytes, to.len)
    }

    /// The note that all of `bytes` are; `None` if they are none.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let [kind] = from.take()?;
        let note = match kind {
            1 => Self::Ready,
            2 => Self::Bye,
            3 => Self::Taken { nic: from.nic()?, count: u64::from_be_bytes(from.take()?) },
            4 => Self::Withdraw(from.tenant()?),
            5 => Self::Withdrawn(from.tenant()?),
            6 | 7 => {
                let (passage, queues) = from.passage()?;
                if kind == 6 {
                    Self::Connect(passage, queues)
                } else {
                    Self::Connected(passage, queues)
                }
            }
            8 => Self::Declined(from.passage::<0>()?.0),
            9 | 10 => {
                let (passage, [queue]) = from.passage()?;
                if kind == 9 { Self::Link(passage, queue) } else { Self::Linked(passage, queue) }
            }
            11 => Self::Back { nic: from.nic()? },
            _ => return None,
        };
        from.0.is_empty().then_some(note)
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::port::Number24;

    fn all() -> Vec<Note> {
        let tenant = Tenant::new(4095, 7).unwrap();
        let queue = |n| Queue { number: Number24::new(n), psn: Number24::new(n << 8) };
        let (passage, queues) = (Passage { from: 7, to: 2, epoch: u32::MAX }, [queue(1), queue(2)]);
        Vec::from([
            Note::Ready,
            Note::Bye,
            Note::Taken { nic: 5, count: u64::MAX },
            Note::Withdraw(tenant),
            Note::Withdrawn(tenant),
            Note::Connect(passage, queues),
            Note::Connected(passage, queues),
            Note::Declined(passage),
            Note::Link(passage, queue(3)),
            Note::Linked(passage, queue(4)),
            Note::Back { nic: 6 },
        ])
    }

    #[test]
    fn each_kind_has_its_turn_and_what_others_wait_for_comes_first() {
        let kind = |note| match note {
            Note::Bye => None,
            Note::Ready => Some(Kind::Ready),
            Note::Taken { .. } => Some(Kind::Taken),
            Note::Withdraw(_) => Some(Kind::Withdraw),
            Note::Withdrawn(_) => Some(Kind::Withdrawn),
            Note::Connect(..) => Some(Kind::Connect),
            Note::Connected(..) => Some(Kind::Connected),
            Note::Declined(_) => Some(Kind::Declined),
            Note::Link(..) => Some(Kind::Link),
            Note::Linked(..) => Some(Kind::Linked),
            Note::Back { .. } => Some(Kind::Back),
        };
        let kinds: Vec<_> = all().into_iter().filter_map(kind).collect();
        let turn = |kind| order().iter().position(|it| *it == kind).unwrap();
        let mut turns: Vec<_> = kinds.iter().map(|kind| turn(*kind)).collect();
        turns.sort_unstable();
        assert_eq!(turns, (0..order().len()).collect::<Vec<_>>(), "each has one turn");
        for kind in kinds {
            assert!(turn(Kind::Ready) <= turn(kind));
            assert!(turn(Kind::Taken) <= turn(kind) || kind == Kind::Ready);
        }
        // By this a peer comes to write.
        assert!(turn(Kind::Withdraw) < turn(Kind::Connected));
    }

    #[test]
    fn notes_survive_the_way() {
        for note in all() {
            let (bytes, len) = note.encode();
            assert!(len <= NOTE_BYTES);
            assert_eq!(Note::decode(&bytes[..len]), Some(note));
        }
    }

    #[test]
    fn every_truncation_and_change_is_none_or_another() {
        let mut others = 0;
        for note in all() {
            let (bytes, len) = note.encode();
            for short in 0..len {
                assert_eq!(Note::decode(&bytes[..short]), None, "{note:?}");
            }
            assert_eq!(Note::decode(&[&bytes[..len], &[0]].concat()), None);
            for at in 0..len {
                for bit in 0..8 {
                    let mut changed = bytes;
                    changed[at] ^= 1 << bit;
                    if let Some(other) = Note::decode(&changed[..len]) {
                        assert_ne!(other, note);
                        assert_eq!(other.encode(), (changed, len));
                        others += 1;
                    }
                }
            }
        }
        assert!(others > 200, "{others}");
        assert_eq!(Note::decode(&[]), None);
    }
}
