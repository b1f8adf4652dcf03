//! GPU memory over NICs that do not reach it: by way of slots of host memory at both ends.
//!
//! A piece whose source is in a GPU's memory is copied into a slot here, and written from there. One whose destination is,
//! is written into a *landing slot* of its receiver's, with a [`Note`] in front of it that says where it is to go, and an
//! immediate that names the slot ([`Signal::Landed`]). The receiver copies it to its place, counts the immediate that the
//! note carries, and gives the slot back ([`Signal::Returned`]), which says at once that the slot is free and what became of
//! the piece.
//!
//! ```text
//!  sender                                             receiver
//!   Copying ── source read ──▶ Ready
//!   Ready ── posted ──▶ Posted ─── note, bytes ─────▶ slot: Vacant ──▶ Copying
//!   Posted ── written ──▶ Landed                        copied; the note's immediate is counted
//!   Landed ── returned ──▶ ended ◀── Returned ──────── slot: Over ──▶ Vacant
//! ```
//!
//! Landing slots lie behind the mailbox that the receiver keeps for this sender ([`Geometry`]):
//! with it they are told of, and taken back.
//!
//! It knows no memory, no GPU and no NIC; a note's bytes come in copied, since a peer can change a slot at any time.
//!
//! # Invariants
//!
//! 1. A piece ends once. It does not end while its source is read; with success not before its bytes are at their place, and
//!    counted, if they are to be.
//! 2. A landing slot is written only between its being taken and its return. What was returned without having been
//!    taken, or lands in a slot that is not vacant, is an error value and changes nothing.
//! 3. No key of a staged region is one of a registration's ([`crate::tenant`]), and no [`Signal`] is a counter's immediate or
//!    a [`Control`](crate::mailbox::Control): who knows nothing of staging refuses both.
//!
//! The tests walk all orders of what can happen to a piece and its slot at both ends.

mod hold;

pub use hold::Hold;

use core::fmt;

use static_assertions::const_assert;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::group::{WorkError, WorkRequest};
use crate::id::NicIndex;
use crate::imm::{Imm, ImmTag};
use crate::mailbox::{Geometry, USER_COUNTERS};
use crate::region::MrDesc;
use crate::tenant::{LAST_SERIAL, SLOTS as REGIONS, Tenant};

/// Landing slots that a receiver has for each peer.
pub const LANDING_SLOTS: u8 = 32;
/// The longest piece that goes by way of a slot.
pub const PIECE_BYTES: u64 = 64 << 10;
/// Bytes in front of it.
pub const NOTE_BYTES: usize = 64;
/// From one slot to the next.
pub const SLOT_BYTES: u64 = PIECE_BYTES + NOTE_BYTES as u64;
/// Bytes that a mailbox has behind itself for landing slots.
pub const TAIL_BYTES: u64 = LANDING_SLOTS as u64 * SLOT_BYTES;

/// A landing slot: `0..LANDING_SLOTS`.
pub type SlotIndex = u8;

/// Where a landing slot begins in a mailbox that is divided so; `None`: there is none of that number, or the mailbox has no room for
/// any, since its owner does not stage.
#[must_use]
pub fn slot_offset(mailbox: &MrDesc, geometry: Geometry, slot: SlotIndex) -> Option<u64> {
    let start = geometry.bytes();
    mailbox.range(start, TAIL_BYTES).ok()?;
    (slot < LANDING_SLOTS).then(|| start + u64::from(slot) * SLOT_BYTES)
}

/// The name of a staged region, which is its key on all NICs: bit 63, a generation in bits 32 to 62, its number as a
/// [`Tenant`]'s slot, and no serial number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StagedKey {
    number: u16,
    generation: u32,
}

const STAGED: u64 = 1 << 63;
const NUMBER_SHIFT: u32 = LAST_SERIAL.count_ones();
const_assert!(REGIONS == 1 << (u32::BITS - NUMBER_SHIFT));

impl StagedKey {
    /// Staged regions that an engine may have.
    pub const NUMBERS: usize = REGIONS;
    /// Generations go from 0 to this.
    pub const LAST_GENERATION: u32 = u32::MAX >> 1;

    /// `None` unless both are in range.
    #[must_use]
    pub const fn new(number: u16, generation: u32) -> Option<Self> {
        if (number as usize) < Self::NUMBERS && generation <= Self::LAST_GENERATION {
            Some(Self { number, generation })
        } else {
            None
        }
    }

    /// The region's number.
    #[must_use]
    pub const fn number(self) -> u16 {
        self.number
    }

    /// Which region of that number.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.generation
    }

    /// The key.
    #[must_use]
    pub const fn bits(self) -> u64 {
        STAGED | (self.generation as u64) << 32 | (self.number as u64) << NUMBER_SHIFT
    }

    /// What a key is of; `None`: of a registration.
    #[inline]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "both are masked to their widths")]
    pub const fn of(key: u64) -> Option<Self> {
        if key & STAGED == 0 || Tenant::of(key).is_some() {
            return None;
        }
        let number = (key >> NUMBER_SHIFT) as u16 & (REGIONS as u16 - 1);
        Self::new(number, (key >> 32) as u32 & Self::LAST_GENERATION)
    }
}

/// What became of a piece that landed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It is at its place, and counted.
    Done,
    /// There is no such place, or it was withdrawn. Nothing was copied.
    Refused,
    /// The receiver's GPU failed. Part of it may have been copied; it was not counted.
    Failed,
}

impl Verdict {
    const ALL: [Self; 3] = [Self::Done, Self::Refused, Self::Failed];

    /// The same, as the sender's piece ends.
    ///
    /// # Errors
    ///
    /// What it says, if that is no success. Of the receiver's GPU no number is known here.
    pub const fn outcome(self) -> Result<(), WorkError> {
        match self {
            Self::Done => Ok(()),
            Self::Refused => Err(WorkError::RemoteAccess),
            Self::Failed => Err(WorkError::Device(0)),
        }
    }

    const fn number(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Refused => 1,
            Self::Failed => 2,
        }
    }
}

/// What two engines that stage tell each other by immediates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Signal {
    /// A piece lies in this slot of the receiver's.
    Landed(SlotIndex),
    /// This slot, that the receiver had taken, is free again.
    Returned(SlotIndex, Verdict),
}

/// Generations of the first reserved counter's tag, of which [`Control`](crate::mailbox::Control) uses none with these units.
const LANDED: u8 = 1;
const RETURNED: u8 = 2;

impl Signal {
    /// What an immediate says; `None`: it is none of these.
    #[inline]
    #[must_use]
    pub fn decode(imm_bits: u32) -> Option<Self> {
        let imm = Imm::from_bits(imm_bits);
        if imm.tag().slot() != USER_COUNTERS {
            return None;
        }
        let slot = SlotIndex::try_from(imm.units()).ok().filter(|slot| *slot < LANDING_SLOTS)?;
        match imm.tag().generation() {
            LANDED => Some(Self::Landed(slot)),
            generation => {
                let verdict = generation.checked_sub(RETURNED).map(usize::from)?;
                Some(Self::Returned(slot, Verdict::ALL.get(verdict).copied()?))
            }
        }
    }

    /// The immediate.
    #[must_use]
    pub fn encode(self) -> Imm {
        let (generation, slot) = match self {
            Self::Landed(slot) => (LANDED, slot),
            Self::Returned(slot, verdict) => (RETURNED + verdict.number(), slot),
        };
        // All fit their fields, so the other one is never returned: a constant below the number of counters, a generation of
        // at most 4, and eight bits of units.
        let imm = ImmTag::new(USER_COUNTERS, generation);
        imm.and_then(|tag| tag.with_units(slot.into())).unwrap_or(Imm::from_bits(0))
    }
}

/// What stands in front of a piece that has landed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Note {
    /// The sender's NIC, to which the slot is returned.
    pub nic: NicIndex,
    /// The region that the bytes are to go to.
    pub key: StagedKey,
    /// The address of the first byte, as the region's descriptor counts.
    pub dst: u64,
    /// Bytes: 1 to [`PIECE_BYTES`].
    pub len: u32,
    /// To be counted when they are there.
    pub imm: Option<Imm>,
}

/// Bytes in a landing slot are no note.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NoNote;

impl fmt::Display for NoNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no note lies in the landing slot")
    }
}

impl core::error::Error for NoNote {}

const NOTE_MAGIC: u32 = u32::from_le_bytes(*b"ImSt");
const NOTE_VERSION: u8 = 1;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct NoteBytes {
    magic: U32,
    version: u8,
    nic: u8,
    has_imm: U16,
    imm: U32,
    len: U32,
    key: U64,
    dst: U64,
    zero: [u8; 32],
}

const_assert!(size_of::<NoteBytes>() == NOTE_BYTES);

impl Note {
    /// The bytes that stand in front of the piece.
    #[must_use]
    pub fn to_bytes(self) -> [u8; NOTE_BYTES] {
        zerocopy::transmute!(NoteBytes {
            magic: NOTE_MAGIC.into(),
            version: NOTE_VERSION,
            nic: self.nic,
            has_imm: u16::from(self.imm.is_some()).into(),
            imm: self.imm.map_or(0, Imm::bits).into(),
            len: self.len.into(),
            key: self.key.bits().into(),
            dst: self.dst.into(),
            zero: [0; 32],
        })
    }

    /// The note that these bytes are. Whether there is such a region is for its owner to say.
    ///
    /// # Errors
    ///
    /// [`NoNote`]: nobody's [`Note::to_bytes`] made them, or it is of no bytes, or more than a slot has.
    pub fn from_bytes(bytes: &[u8; NOTE_BYTES]) -> Result<Self, NoNote> {
        let raw: NoteBytes = zerocopy::transmute!(*bytes);
        let imm = match raw.has_imm.get() {
            0 => None,
            _ => Some(Imm::from_bits(raw.imm.get())),
        };
        let key = StagedKey::of(raw.key.get()).ok_or(NoNote)?;
        let (nic, dst, len) = (raw.nic, raw.dst.get(), raw.len.get());
        let note = Self { nic, key, dst, len, imm };
        let is_one = len > 0 && u64::from(len) <= PIECE_BYTES && note.to_bytes() == *bytes;
        is_one.then_some(note).ok_or(NoNote)
    }
}

/// What a region's owner needs to know of a staged region to tell whether a piece may go there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bounds {
    /// The address of its first byte, as its descriptor counts.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

impl Bounds {
    /// How far into the region `len` bytes from `dst` begin; `None`: they are not all inside.
    #[must_use]
    pub const fn offset(&self, dst: u64, len: u32) -> Option<u64> {
        let Some(offset) = dst.checked_sub(self.base) else { return None };
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.len => Some(offset),
            _ => None,
        }
    }
}

/// In what state a piece that has ended leaves a slot that has not come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Leaves {
    /// Never written to, nor will it be: it is free.
    Unwritten,
    /// Its receiver has the piece, and will give it back.
    Written,
    /// The write has failed: it may have arrived, or part of it, or may yet.
    Doubtful,
}

/// What a piece needs besides its source and a route, in the order of how many wait for it: whoever needs less goes past who needs
/// more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Need {
    /// What keeps a connection has room of its own.
    Nothing,
    /// In its NIC's queue.
    Room,
    /// And a slot here.
    Slot,
    /// And a landing slot of its receiver's, which a GPU there empties.
    Landing,
}

impl Need {
    /// What this one needs.
    #[must_use]
    pub const fn of(work: &WorkRequest) -> Self {
        if work.token.is_note() {
            return Self::Nothing;
        }
        // A bare immediate touches no memory.
        match (work.len, StagedKey::of(work.src_key), StagedKey::of(work.dst_key)) {
            (0, ..) | (_, None, None) => Self::Room,
            (_, Some(_), None) => Self::Slot,
            (_, _, Some(_)) => Self::Landing,
        }
    }
}

/// Whether a piece is to wait while there is no room for another: both go to one peer, and it needs no less. Nobody relies on
/// the order of pieces.
#[must_use]
pub fn waits_behind(work: &WorkRequest, blocked: &WorkRequest) -> bool {
    work.peer == blocked.peer && Need::of(work) >= Need::of(blocked)
}

/// A peer has said what cannot be: of a slot that was not taken, or not vacant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Misuse {
    /// The slot.
    pub slot: SlotIndex,
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "landing slot {} is not in the state that it is used in", self.slot)
    }
}

impl core::error::Error for Misuse {}

const_assert!(LANDING_SLOTS as u32 == u32::BITS);

/// A peer's landing slots, as their sender sees them: free, taken, or in doubt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grants {
    free: u32,
    /// Taken, and perhaps for good.
    doubted: u32,
}

impl Default for Grants {
    fn default() -> Self {
        Self { free: u32::MAX, doubted: 0 }
    }
}

impl Grants {
    /// Takes a free slot, if there is one.
    pub const fn take(&mut self) -> Option<SlotIndex> {
        if self.free == 0 {
            return None;
        }
        #[expect(clippy::cast_possible_truncation, reason = "below 32")]
        let slot = self.free.trailing_zeros() as SlotIndex;
        self.free &= self.free - 1;
        Some(slot)
    }

    /// A slot that was taken is free again: it came back, or nothing was written to it.
    ///
    /// # Errors
    ///
    /// [`Misuse`]: it was not taken.
    pub fn give(&mut self, slot: SlotIndex) -> Result<(), Misuse> {
        let bit = 1_u32.checked_shl(slot.into()).ok_or(Misuse { slot })?;
        if self.free & bit != 0 {
            return Err(Misuse { slot });
        }
        self.free |= bit;
        self.doubted &= !bit;
        Ok(())
    }

    /// The write to a slot that was taken has failed. What of it arrives later would be taken for what is written there next:
    /// so it is not given out again, unless it comes back, which says that all of it has arrived.
    pub fn doubt(&mut self, slot: SlotIndex) {
        let bit = 1_u32.checked_shl(slot.into()).unwrap_or(0);
        self.doubted |= bit & !self.free;
    }

    /// Whether all slots are in doubt: then nobody is to wait for one.
    #[must_use]
    pub const fn are_lost(&self) -> bool {
        self.doubted == u32::MAX
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Landing {
    Vacant,
    Copying,
    Over(Verdict),
}

/// Our landing slots for one peer, as we see them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Landings {
    slots: [Landing; LANDING_SLOTS as usize],
}

impl Default for Landings {
    fn default() -> Self {
        Self { slots: [Landing::Vacant; LANDING_SLOTS as usize] }
    }
}

impl Landings {
    fn step(&mut self, slot: SlotIndex, from: Landing, to: Landing) -> Result<(), Misuse> {
        let state = self.slots.get_mut(usize::from(slot)).filter(|state| **state == from);
        state.map(|state| *state = to).ok_or(Misuse { slot })
    }

    /// A piece lies in this slot, and is to be copied: nothing else is to be in it until it was returned.
    ///
    /// # Errors
    ///
    /// [`Misuse`].
    pub fn landed(&mut self, slot: SlotIndex) -> Result<(), Misuse> {
        self.step(slot, Landing::Vacant, Landing::Copying)
    }

    /// What lay there is not needed any more.
    ///
    /// # Errors
    ///
    /// [`Misuse`]: nothing lay there.
    pub fn over(&mut self, slot: SlotIndex, verdict: Verdict) -> Result<(), Misuse> {
        self.step(slot, Landing::Copying, Landing::Over(verdict))
    }

    /// A slot that is to be returned, and what is to be said of it; from now on it counts as returned.
    pub fn give_back(&mut self) -> Option<(SlotIndex, Verdict)> {
        (0..).zip(&mut self.slots).find_map(|(slot, state)| {
            let Landing::Over(verdict) = *state else { return None };
            *state = Landing::Vacant;
            Some((slot, verdict))
        })
    }

    /// What [`Landings::give_back`] gave was not said, nor ever will be: it is to be said again.
    ///
    /// # Errors
    ///
    /// [`Misuse`]: something lies there, so it was said.
    pub fn unsaid(&mut self, slot: SlotIndex, verdict: Verdict) -> Result<(), Misuse> {
        self.step(slot, Landing::Vacant, Landing::Over(verdict))
    }

    /// Whether some are to be returned.
    #[must_use]
    pub fn owes(&self) -> bool {
        self.slots.iter().any(|state| matches!(state, Landing::Over(_)))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    /// A GPU reads its source.
    Copying,
    Ready,
    Posted,
    /// It lies in the receiver's slot.
    Landed,
}

/// What is to be done with a piece.
#[must_use]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Next {
    /// Something else is to happen first.
    Wait,
    /// It is to be posted.
    Post,
    /// It has ended so, and is to be reported and forgotten.
    End(Result<(), WorkError>),
}

/// A piece that goes by way of a slot of ours, from when its provider takes it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    step: Step,
    /// The receiver's slot; none if it goes to its place directly.
    slot: Option<SlotIndex>,
    /// It is not to go on: it ends so as soon as nothing reads or writes for it.
    stopped: Option<WorkError>,
    /// Said of its slot before we knew that it was written.
    verdict: Option<Verdict>,
}

impl Piece {
    /// A piece that a GPU is copying out of its source.
    #[must_use]
    pub const fn copying(slot: Option<SlotIndex>) -> Self {
        Self { step: Step::Copying, slot, stopped: None, verdict: None }
    }

    /// A piece that was copied by whoever took it.
    #[must_use]
    pub const fn ready(slot: Option<SlotIndex>) -> Self {
        Self { step: Step::Ready, slot, stopped: None, verdict: None }
    }

    /// The receiver's slot that it was given.
    #[must_use]
    pub const fn slot(&self) -> Option<SlotIndex> {
        self.slot
    }

    /// Whether it is to be posted.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.step == Step::Ready
    }

    /// What becomes of its slot, which has not come back, if it ends now.
    #[must_use]
    pub const fn leaves(&self) -> Leaves {
        match self.step {
            Step::Copying | Step::Ready => Leaves::Unwritten,
            Step::Posted => Leaves::Doubtful,
            Step::Landed => Leaves::Written,
        }
    }

    /// Nothing reads its source any more.
    pub const fn copied(&mut self, outcome: Result<(), WorkError>) -> Next {
        match (self.stopped, outcome) {
            (Some(error), _) | (None, Err(error)) => Next::End(Err(error)),
            (None, Ok(())) => {
                self.step = Step::Ready;
                Next::Post
            }
        }
    }

    /// It is handed over.
    pub const fn posted(&mut self) {
        self.step = Step::Posted;
    }

    /// There was no room for it, or it did not arrive, and never will.
    pub const fn unposted(&mut self) -> Next {
        self.step = Step::Ready;
        match self.stopped {
            Some(error) => Next::End(Err(error)),
            None => Next::Post,
        }
    }

    /// The write has ended.
    pub const fn written(&mut self, outcome: Result<(), WorkError>) -> Next {
        match (self.verdict, outcome, self.slot, self.stopped) {
            // The receiver has it, whatever the transport says.
            (Some(verdict), ..) => Next::End(verdict.outcome()),
            (None, Err(error), ..) => Next::End(Err(error)),
            (None, Ok(()), None, _) => Next::End(Ok(())),
            (None, Ok(()), Some(_), stopped) => {
                self.step = Step::Landed;
                match stopped {
                    Some(error) => Next::End(Err(error)),
                    None => Next::Wait,
                }
            }
        }
    }

    /// Its slot came back.
    ///
    /// # Errors
    ///
    /// [`Misuse`]: it was not written to, or has come back before.
    pub const fn returned(&mut self, slot: SlotIndex, verdict: Verdict) -> Result<Next, Misuse> {
        match (self.step, self.verdict) {
            (Step::Posted, None) => {
                self.verdict = Some(verdict);
                Ok(Next::Wait)
            }
            (Step::Landed, None) => Ok(Next::End(verdict.outcome())),
            _ => Err(Misuse { slot }),
        }
    }

    /// It is not to go on. What is under way ends first, which the transport forces.
    pub const fn stop(&mut self, error: WorkError) -> Next {
        match self.step {
            Step::Copying | Step::Posted => {
                self.stopped = Some(error);
                Next::Wait
            }
            Step::Ready | Step::Landed => Next::End(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests;
