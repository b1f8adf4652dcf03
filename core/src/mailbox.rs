//! Two-sided messages on one-sided writes: which slot a message takes, and when it is its turn.
//!
//! Each direction of a pair of peers has a mailbox in the receiver's memory: up to [`MAX_SLOTS`] slots
//! of equal size. The sender writes header and bytes with one write into a slot that it knows to be
//! free, with an immediate that names the slot ([`Control::Message`]); the receiver gives the slot back
//! with an immediate without bytes ([`Control::Credit`]). Writes arrive in any order; messages are
//! delivered in the order in which their slots were reserved, by the sequence number in the header.
//!
//! Knows no memory: offsets go out, header bytes come in. The platform copies a message out before it
//! lets anybody look at it, because a hostile peer can change a slot at any time.
//!
//! # Invariants
//!
//! 1. A slot is written only between its reservation and the next; no free slot means waiting, never a drop.
//! 2. Every message is delivered once, in the order of reservation.
//! 3. What a peer sends that breaks the rules is an error value and changes nothing.
//! 4. Whoever takes no credits keeps none from others, as long as they are fewer than there is room for: [`credit_room`].
//!
//! The tests below walk every order of arrival of a few messages through small mailboxes.

use core::fmt;

use static_assertions::const_assert;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::id::{MAX_NICS, NicIndex};
use crate::imm::{Imm, ImmTag, MAX_COUNTERS};
use crate::receipt::{Epoch, SETTLEMENT_BYTES};

/// The most slots a mailbox may have: a sender keeps them in one word.
pub const MAX_SLOTS: u8 = 64;

/// The most bytes of all slots of a mailbox: whoever is called makes room for as many as its caller says, and may have to pin it.
pub const MAX_SLOTS_BYTES: u64 = 256 << 20;

/// Slots are a multiple of this: no two share a cache line.
pub const SLOT_ALIGN: u32 = 64;

/// Bytes in front of each message.
pub const HEADER_BYTES: usize = size_of::<HeaderBytes>();
const HEADER: u32 = 16;
const_assert!(HEADER as usize == HEADER_BYTES && HEADER < SLOT_ALIGN);

/// How many counter slots, `0..USER_COUNTERS`, are for users; those above carry [`Control`].
pub const USER_COUNTERS: u16 = CONTROL_NOTE;

const CONTROL_NOTE: u16 = 16381;
const CONTROL_CREDIT: u16 = 16382;
const CONTROL_MESSAGE: u16 = 16383;
const NOTE_HEARTBEAT: u16 = 1;
const NOTE_USED: u16 = 2;
/// With the round in the lowest eight bits, as the next.
const NOTE_OVER: u16 = 1 << 8;
const NOTE_STAYS: u16 = 1 << 9;
const ROUND_MASK: u16 = 0xff;
/// With the NIC in the lowest three bits.
const NOTE_ANSWER: u16 = 1 << 10;
/// With the two NICs in three bits each, and five bits of the epoch above them.
const NOTE_ASK: u16 = 1 << 11;
const NIC_BITS: u32 = 3;
const_assert!(MAX_NICS == 1 << NIC_BITS);
const_assert!(CONTROL_MESSAGE < MAX_COUNTERS);

/// A slot of a mailbox: `0..MAX_SLOTS`.
pub type SlotIndex = u8;

/// Which time it is that an end would let a connection go, from 1 on; after 255 it is 0's turn.
pub type Round = u8;

/// Of what use a connection is to one of its ends, as that end's heartbeats say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Usage {
    /// It has written nothing since its last heartbeat, and has nothing to write.
    None,
    /// It has, or is about to.
    Some,
    /// None for so long that it would let the connection go: it writes nothing until the other end has answered this, by
    /// [`Usage::Stays`] of the same number, or by ending the connection.
    Over(Round),
    /// To the other end's [`Usage::Over`] of this number: it is, and stays.
    Stays(Round),
}

/// What an immediate of a reserved counter says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Control {
    /// A message lies in this slot of the receiver's mailbox.
    Message(SlotIndex),
    /// This slot of the sender's messages is free again.
    Credit(SlotIndex),
    /// I am here; and of what use the connection is to the sender.
    Heartbeat(Usage),
    /// The path from the sender's NIC `from` to the receiver's NIC `to` broke: what arrived over it?
    Ask {
        /// The sender's NIC.
        from: NicIndex,
        /// The receiver's NIC.
        to: NicIndex,
        /// Which break of a path of `from`.
        epoch: Epoch,
    },
    /// The answer to what the receiver asked of this NIC of its lies in its mailbox, as a
    /// [`Settlement`](crate::receipt::Settlement).
    Answer(NicIndex),
}

impl Control {
    /// Whether it is said because the connection is used, and not to keep it or to mend it.
    #[must_use]
    pub const fn is_use(self) -> bool {
        match self {
            // Who asks has pieces that it is to post again, or not.
            Self::Message(_) | Self::Credit(_) | Self::Ask { .. } => true,
            Self::Heartbeat(usage) => matches!(usage, Usage::Some | Usage::Stays(_)),
            Self::Answer(_) => false,
        }
    }

    /// What these bits say: `None` if they are of a user's counter, `Err` with the bits if they are of
    /// a reserved one and mean nothing.
    #[must_use]
    pub fn decode(imm_bits: u32) -> Option<Result<Self, u32>> {
        let imm = Imm::from_bits(imm_bits);
        let (tag, units) = (imm.tag(), imm.units());
        if tag.slot() < USER_COUNTERS {
            return None;
        }
        let slot = SlotIndex::try_from(units).ok().filter(|slot| *slot < MAX_SLOTS);
        let control = match (tag.slot(), slot) {
            (CONTROL_NOTE, _) if units & NOTE_ASK != 0 => ask(units, tag.generation()),
            _ if tag.generation() != 0 => None,
            (CONTROL_MESSAGE, Some(slot)) => Some(Self::Message(slot)),
            (CONTROL_CREDIT, Some(slot)) => Some(Self::Credit(slot)),
            (CONTROL_NOTE, _) if units == NOTE_HEARTBEAT => Some(Self::Heartbeat(Usage::None)),
            (CONTROL_NOTE, _) if units == NOTE_USED => Some(Self::Heartbeat(Usage::Some)),
            (CONTROL_NOTE, _) if units & !ROUND_MASK == NOTE_OVER => {
                Some(Self::Heartbeat(Usage::Over(round(units))))
            }
            (CONTROL_NOTE, _) if units & !ROUND_MASK == NOTE_STAYS => {
                Some(Self::Heartbeat(Usage::Stays(round(units))))
            }
            (CONTROL_NOTE, _) if units & !NIC_MASK == NOTE_ANSWER => Some(Self::Answer(nic(units))),
            _ => None,
        };
        Some(control.ok_or(imm_bits))
    }

    /// The bits of the immediate.
    #[must_use]
    pub fn encode(self) -> u32 {
        let (counter, generation, units) = match self {
            Self::Message(slot) => (CONTROL_MESSAGE, 0, slot.into()),
            Self::Credit(slot) => (CONTROL_CREDIT, 0, slot.into()),
            Self::Heartbeat(Usage::None) => (CONTROL_NOTE, 0, NOTE_HEARTBEAT),
            Self::Heartbeat(Usage::Some) => (CONTROL_NOTE, 0, NOTE_USED),
            Self::Heartbeat(Usage::Over(round)) => (CONTROL_NOTE, 0, NOTE_OVER | u16::from(round)),
            Self::Heartbeat(Usage::Stays(round)) => {
                (CONTROL_NOTE, 0, NOTE_STAYS | u16::from(round))
            }
            Self::Answer(of) => (CONTROL_NOTE, 0, NOTE_ANSWER | u16::from(of) & NIC_MASK),
            Self::Ask { from, to, epoch } => {
                let nics = (u16::from(from) & NIC_MASK) << NIC_BITS | u16::from(to) & NIC_MASK;
                let high = (epoch.number() >> EPOCH_LOW_BITS) << (2 * NIC_BITS);
                (
                    CONTROL_NOTE,
                    epoch.number().to_le_bytes()[0] & EPOCH_LOW_MASK,
                    NOTE_ASK | high | nics,
                )
            }
        };
        // All fit their fields, so the 0 is never returned: the counters are constants below
        // `MAX_COUNTERS`, the units come from a `u8` or have twelve bits, the generation has six.
        let imm = ImmTag::new(counter, generation).and_then(|tag| tag.with_units(units));
        imm.map_or(0, Imm::bits)
    }
}

/// The epoch is an immediate's generation, and these bits of its units.
const EPOCH_LOW_BITS: u32 = 6;
const EPOCH_LOW_MASK: u8 = (1 << EPOCH_LOW_BITS) - 1;
const NIC_MASK: u16 = (1 << NIC_BITS) - 1;

fn nic(units: u16) -> NicIndex {
    // Three bits.
    (units & NIC_MASK).to_le_bytes()[0]
}

fn round(units: u16) -> Round {
    // Eight bits.
    (units & ROUND_MASK).to_le_bytes()[0]
}

fn ask(units: u16, epoch_low: u8) -> Option<Control> {
    let high = (units & !NOTE_ASK) >> (2 * NIC_BITS) << EPOCH_LOW_BITS;
    let epoch = Epoch::new(high | u16::from(epoch_low))?;
    Some(Control::Ask { from: nic(units >> NIC_BITS), to: nic(units), epoch })
}

/// How a mailbox is divided: slots for messages, and behind them room for an answer to what was asked of
/// each NIC. The answers need no slot, since a user who takes no messages may leave all of them full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    slots: u8,
    slot_bytes: u32,
}

/// Why a mailbox cannot be divided so.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GeometryError {
    /// No slot, or more than [`MAX_SLOTS`].
    Slots {
        /// The number given.
        found: u8,
    },
    /// Slots of no bytes, or not of a multiple of [`SLOT_ALIGN`].
    SlotBytes {
        /// The size given.
        found: u32,
    },
    /// Slots of more than [`MAX_SLOTS_BYTES`] together.
    Bytes {
        /// How many they are.
        found: u64,
    },
}

impl fmt::Display for GeometryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slots { found } => write!(f, "1 to {MAX_SLOTS} slots, not {found}"),
            Self::SlotBytes { found } => {
                write!(f, "slots of a multiple of {SLOT_ALIGN} bytes, not {found}")
            }
            Self::Bytes { found } => {
                write!(f, "slots of {MAX_SLOTS_BYTES} bytes together at most, not {found}")
            }
        }
    }
}

impl core::error::Error for GeometryError {}

impl Geometry {
    /// `slots` slots of `slot_bytes` bytes each, headers included.
    ///
    /// # Errors
    ///
    /// [`GeometryError`] if either number is not possible, or both together.
    pub const fn new(slots: u8, slot_bytes: u32) -> Result<Self, GeometryError> {
        if slots == 0 || slots > MAX_SLOTS {
            return Err(GeometryError::Slots { found: slots });
        }
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(SLOT_ALIGN) {
            return Err(GeometryError::SlotBytes { found: slot_bytes });
        }
        let found = slots as u64 * slot_bytes as u64; // No `From` in a const function.
        if found > MAX_SLOTS_BYTES {
            return Err(GeometryError::Bytes { found });
        }
        Ok(Self { slots, slot_bytes })
    }

    /// How many slots.
    #[must_use]
    pub const fn slots(self) -> u8 {
        self.slots
    }

    /// Bytes of a slot, header included.
    #[must_use]
    pub const fn slot_bytes(self) -> u32 {
        self.slot_bytes
    }

    /// Bytes of the mailbox.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.receipts_offset() + (MAX_NICS * SETTLEMENT_BYTES) as u64
    }

    /// Where the answers start in the mailbox, in bytes: one for each NIC of its owner.
    #[must_use]
    pub fn receipts_offset(self) -> u64 {
        u64::from(self.slots) * u64::from(self.slot_bytes)
    }

    /// Where the answer to what its owner asked of `nic` lies, in bytes; `None` if there is no such NIC.
    #[must_use]
    pub fn receipt_offset(self, nic: NicIndex) -> Option<u64> {
        let inside = usize::from(nic) < MAX_NICS;
        inside.then(|| self.receipts_offset() + u64::from(nic) * SETTLEMENT_BYTES as u64)
    }

    /// The longest message, in bytes.
    #[must_use]
    pub const fn max_message_bytes(self) -> u32 {
        self.slot_bytes.saturating_sub(HEADER)
    }

    /// Where the slot starts in the mailbox, in bytes; `None` if there is no such slot.
    #[must_use]
    pub fn offset(self, slot: SlotIndex) -> Option<u64> {
        (slot < self.slots).then(|| u64::from(slot) * u64::from(self.slot_bytes))
    }
}

/// What stands in front of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MessageHeader {
    /// Bytes of the message, header not included.
    pub len: u32,
    /// What the message is for; the mailbox carries it and does not look.
    pub kind: u8,
    /// Place in the order of this peer's messages, from 0.
    pub sequence: u64,
}

/// Why bytes are no header.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeaderError {
    /// Not [`HEADER_BYTES`] bytes.
    Length {
        /// Bytes given.
        found: usize,
    },
    /// Something else lies there.
    Magic {
        /// The first two bytes, as a little-endian number.
        found: u16,
    },
    /// A header of another version.
    Version {
        /// The version found.
        found: u8,
    },
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { found } => {
                write!(f, "message header has {HEADER_BYTES} bytes, not {found}")
            }
            Self::Magic { found } => {
                write!(f, "no message lies there (it starts with {found:#06x})")
            }
            Self::Version { found } => {
                write!(f, "message header version {found} is not understood, only {HEADER_VERSION}")
            }
        }
    }
}

impl core::error::Error for HeaderError {}

const HEADER_MAGIC: u16 = u16::from_le_bytes(*b"Im");
const HEADER_VERSION: u8 = 1;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HeaderBytes {
    magic: U16,
    version: u8,
    kind: u8,
    len: U32,
    sequence: U64,
}

impl MessageHeader {
    /// The bytes that stand in front of the message.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        zerocopy::transmute!(HeaderBytes {
            magic: HEADER_MAGIC.into(),
            version: HEADER_VERSION,
            kind: self.kind,
            len: self.len.into(),
            sequence: self.sequence.into(),
        })
    }

    /// The header that `bytes` are.
    ///
    /// # Errors
    ///
    /// [`HeaderError`]. Whether length and sequence are possible is for [`Inbox`] to say.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, HeaderError> {
        let header = HeaderBytes::read_from_bytes(bytes)
            .map_err(|_| HeaderError::Length { found: bytes.len() })?;
        if header.magic.get() != HEADER_MAGIC {
            return Err(HeaderError::Magic { found: header.magic.get() });
        }
        if header.version != HEADER_VERSION {
            return Err(HeaderError::Version { found: header.version });
        }
        let (len, kind, sequence) = (header.len.get(), header.kind, header.sequence.get());
        Ok(Self { len, kind, sequence })
    }
}

/// The sender's view of a peer's mailbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Outbox {
    geometry: Geometry,
    /// Bit for each slot that is reserved and has not come back.
    taken: u64,
    next: u64,
    closed: bool,
}

/// A slot to write a message to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "a reserved slot is written to, or withdrawn: later messages wait for it"]
pub struct Reserved {
    /// The slot, for [`Control::Message`].
    pub slot: SlotIndex,
    /// Where its header goes, in bytes from the start of the peer's mailbox; the message follows.
    pub offset: u64,
    /// For its header.
    pub sequence: u64,
}

/// Why a message cannot be sent now.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SendError {
    /// The message is longer than a slot.
    TooLarge {
        /// Bytes of the message.
        len: u64,
        /// The most there can be.
        max: u32,
    },
    /// All slots are in use: wait for the peer to take messages out.
    Full,
    /// The peer is gone.
    Closed,
    /// There was no memory for messages to the peer when it connected.
    NoMemory,
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { len, max } => {
                write!(f, "message of {len} bytes is longer than the peer's slots of {max}")
            }
            Self::Full => f.write_str("peer has not taken out earlier messages"),
            Self::Closed => f.write_str("peer is gone"),
            Self::NoMemory => {
                f.write_str("there was no memory for messages to the peer when it connected")
            }
        }
    }
}

impl core::error::Error for SendError {}

/// What is wrong with a slot that is given back.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CreditError {
    /// The mailbox has no such slot.
    NoSuchSlot {
        /// The slot named.
        slot: SlotIndex,
        /// How many there are.
        slots: u8,
    },
    /// The slot is free already.
    NotTaken {
        /// The slot named.
        slot: SlotIndex,
    },
    /// A later slot was reserved since: the order has no gap to spare.
    NotLast {
        /// The slot named.
        slot: SlotIndex,
    },
}

impl fmt::Display for CreditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchSlot { slot, slots } => write!(f, "slot {slot} of {slots} given back"),
            Self::NotTaken { slot } => write!(f, "slot {slot} given back, but it is free"),
            Self::NotLast { slot } => {
                write!(f, "slot {slot} withdrawn, but a later message was reserved")
            }
        }
    }
}

impl core::error::Error for CreditError {}

/// Slots that may be on their way back at a time, whoever's they are; and one for each peer besides.
const CREDITS_SHARED: u16 = 32;

/// How many slots may be on their way back at a time, to as many peers as there can be, over NICs whose queues take `queue_depth` at least:
/// half of that at most, as writes go there, too.
#[must_use]
pub const fn credit_room(peers: u16, queue_depth: u16) -> u16 {
    let (room, half) = (CREDITS_SHARED.saturating_add(peers), queue_depth / 2);
    match if room < half { room } else { half } {
        0 => 1,
        room => room,
    }
}

/// Whether a slot may be given back to a peer to whom so many are being given back, of so many to all peers, where there is room for
/// `room`: [`credit_room`].
///
/// What is on its way to a peer that takes nothing stays there until it is found out. So a part of the room, half at most, is whoever comes
/// first's; of the rest each peer has one.
#[must_use]
pub const fn credit_may_go(to_all: u16, to_peer: u16, room: u16) -> bool {
    let shared = if room / 2 < CREDITS_SHARED { room / 2 } else { CREDITS_SHARED };
    to_all < if to_peer == 0 { room } else { shared }
}

impl Outbox {
    /// A mailbox that is empty.
    #[must_use]
    pub const fn new(geometry: Geometry) -> Self {
        Self { geometry, taken: 0, next: 0, closed: false }
    }

    /// How the mailbox is divided.
    #[must_use]
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The longest message, in bytes.
    #[must_use]
    pub const fn max_message_bytes(&self) -> u32 {
        self.geometry.max_message_bytes()
    }

    /// How many slots are free.
    #[must_use]
    pub fn free(&self) -> u32 {
        u32::from(self.geometry.slots()).saturating_sub(self.taken.count_ones())
    }

    /// Takes a slot for a message of `len` bytes. O(1).
    ///
    /// # Errors
    ///
    /// [`SendError`]; nothing was taken.
    pub fn reserve(&mut self, len: u64) -> Result<Reserved, SendError> {
        if self.closed {
            return Err(SendError::Closed);
        }
        let max = self.max_message_bytes();
        if len > u64::from(max) {
            return Err(SendError::TooLarge { len, max });
        }
        let slot = SlotIndex::try_from(self.taken.trailing_ones()).unwrap_or(MAX_SLOTS);
        let offset = self.geometry.offset(slot).ok_or(SendError::Full)?;
        let sequence = self.next;
        self.taken |= bit(slot);
        self.next = sequence.wrapping_add(1);
        Ok(Reserved { slot, offset, sequence })
    }

    /// Undoes the latest reservation, of which nothing was posted.
    ///
    /// # Errors
    ///
    /// [`CreditError`] if it is not the latest one; later messages could never be delivered.
    pub fn withdraw(&mut self, reserved: Reserved) -> Result<(), CreditError> {
        let slot = reserved.slot;
        if reserved.sequence.wrapping_add(1) != self.next {
            return Err(CreditError::NotLast { slot });
        }
        self.release(slot)?;
        self.next = reserved.sequence;
        Ok(())
    }

    /// The peer gives a slot back. O(1).
    ///
    /// # Errors
    ///
    /// [`CreditError`] if the slot was not in use: the peer broke the protocol; nothing changed.
    pub fn release(&mut self, slot: SlotIndex) -> Result<(), CreditError> {
        let slots = self.geometry.slots();
        if slot >= slots {
            return Err(CreditError::NoSuchSlot { slot, slots });
        }
        if self.taken & bit(slot) == 0 {
            return Err(CreditError::NotTaken { slot });
        }
        self.taken &= !bit(slot);
        Ok(())
    }

    /// The peer is gone: nothing can be reserved any more.
    pub fn close(&mut self) {
        self.closed = true;
    }
}

/// The receiver's view of its mailbox for one peer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Inbox {
    geometry: Geometry,
    /// Bit for each slot that a message lies in, until it is consumed.
    held: u64,
    /// Bit for each of these that was delivered.
    lent: u64,
    /// The sequence number that is delivered next.
    next: u64,
    /// What has arrived, at its sequence number modulo the array's length.
    arrived: [Option<Arrived>; MAX_SLOTS as usize],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Arrived {
    slot: SlotIndex,
    kind: u8,
    len: u32,
}

/// A message whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "the slot is lost to the peer until it is consumed"]
pub struct Delivery {
    /// The slot, for [`Inbox::handle_consumed`].
    pub slot: SlotIndex,
    /// Where the message starts, behind its header, in bytes from the start of the mailbox.
    pub offset: u64,
    /// Its length in bytes; the range lies inside the slot.
    pub len: u32,
    /// What it is for.
    pub kind: u8,
    /// Its place in the order of this peer's messages.
    pub sequence: u64,
}

/// What is wrong with a message that arrived, or with a slot that was consumed.
///
/// But for `NotLent`, the peer broke the protocol. Nothing changed.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InboxError {
    /// The mailbox has no such slot.
    NoSuchSlot {
        /// The slot named.
        slot: SlotIndex,
        /// How many there are.
        slots: u8,
    },
    /// The slot's last message was not consumed yet.
    SlotInUse {
        /// The slot named.
        slot: SlotIndex,
    },
    /// No header lies in the slot.
    Header(HeaderError),
    /// The message is longer than a slot.
    TooLong {
        /// The length its header gives, in bytes.
        len: u32,
        /// The most there can be.
        max: u32,
    },
    /// The sequence number was seen already, or lies further ahead than there are slots.
    Sequence {
        /// The number found.
        found: u64,
        /// The number that is delivered next.
        next: u64,
    },
    /// The slot was consumed without having been delivered, or twice: our caller's fault.
    NotLent {
        /// The slot named.
        slot: SlotIndex,
    },
}

impl fmt::Display for InboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchSlot { slot, slots } => write!(f, "message in slot {slot} of {slots}"),
            Self::SlotInUse { slot } => {
                write!(f, "message in slot {slot}, whose last one was not consumed")
            }
            Self::Header(error) => error.fmt(f),
            Self::TooLong { len, max } => {
                write!(f, "message of {len} bytes in a slot for {max}")
            }
            Self::Sequence { found, next } => {
                write!(f, "message number {found} while number {next} is next")
            }
            Self::NotLent { slot } => write!(f, "slot {slot} consumed, but not delivered"),
        }
    }
}

impl core::error::Error for InboxError {}

impl Inbox {
    /// A mailbox that is empty.
    #[must_use]
    pub const fn new(geometry: Geometry) -> Self {
        Self { geometry, held: 0, lent: 0, next: 0, arrived: [None; MAX_SLOTS as usize] }
    }

    /// How the mailbox is divided.
    #[must_use]
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Whether [`Inbox::poll_delivery`] has something.
    #[must_use]
    pub fn has_delivery(&self) -> bool {
        self.arrived.get(place(self.next)).is_some_and(Option::is_some)
    }

    /// A message lies in `slot`; `header` are the slot's first [`HEADER_BYTES`] bytes, copied. O(1).
    ///
    /// # Errors
    ///
    /// [`InboxError`]: the peer broke the protocol; nothing changed.
    pub fn handle_message(&mut self, slot: SlotIndex, header: &[u8]) -> Result<(), InboxError> {
        let slots = self.geometry.slots();
        if slot >= slots {
            return Err(InboxError::NoSuchSlot { slot, slots });
        }
        if self.held & bit(slot) != 0 {
            return Err(InboxError::SlotInUse { slot });
        }
        let MessageHeader { len, kind, sequence } =
            MessageHeader::from_bytes(header).map_err(InboxError::Header)?;
        let max = self.geometry.max_message_bytes();
        if len > max {
            return Err(InboxError::TooLong { len, max });
        }
        // All from `next` to `sequence` are not delivered, so each takes a slot.
        let out_of_order = InboxError::Sequence { found: sequence, next: self.next };
        if sequence.checked_sub(self.next).is_none_or(|ahead| ahead >= u64::from(slots)) {
            return Err(out_of_order);
        }
        let place = self.arrived.get_mut(place(sequence)).ok_or(out_of_order)?;
        if place.is_some() {
            return Err(out_of_order);
        }
        *place = Some(Arrived { slot, kind, len });
        self.held |= bit(slot);
        Ok(())
    }

    /// The next message in order, if it has arrived; each is returned once. O(1).
    pub fn poll_delivery(&mut self) -> Option<Delivery> {
        let sequence = self.next;
        let Arrived { slot, kind, len } = self.arrived.get_mut(place(sequence))?.take()?;
        let offset = self.geometry.offset(slot)?.saturating_add(HEADER_BYTES as u64);
        self.next = sequence.wrapping_add(1);
        self.lent |= bit(slot);
        Some(Delivery { slot, offset, len, kind, sequence })
    }

    /// The message in `slot` was taken out; returns what to send to its peer. O(1).
    ///
    /// # Errors
    ///
    /// [`InboxError::NotLent`] if no message was delivered from there; nothing changed.
    pub fn handle_consumed(&mut self, slot: SlotIndex) -> Result<Control, InboxError> {
        if self.lent & bit(slot) == 0 {
            return Err(InboxError::NotLent { slot });
        }
        self.lent &= !bit(slot);
        self.held &= !bit(slot);
        Ok(Control::Credit(slot))
    }
}

/// The slot's bit; none for what is no slot.
fn bit(slot: SlotIndex) -> u64 {
    1_u64.checked_shl(slot.into()).unwrap_or(0)
}

/// Where in `arrived` a sequence number is kept: those in flight are fewer than its length.
fn place(sequence: u64) -> usize {
    const_assert!(256 % MAX_SLOTS as usize == 0); // So that the lowest byte is enough.
    usize::from(sequence.to_le_bytes()[0] % MAX_SLOTS)
}

#[cfg(test)]
mod tests;
