//! What the other ranks must know of one, and the bytes of it.

use immwire_core::imm::ImmTag;
use immwire_core::region::MrDesc;
use immwire_core::wire::{NetAddr, Wire};

use super::error::SeatError;

/// Counters of each rank.
pub(super) const COUNTERS: usize = 4;

/// What the others need to write to a rank. Travels by whatever the ranks find each other with.
#[derive(Debug, Clone, PartialEq)]
pub struct Seat {
    pub(super) address: NetAddr,
    /// Where others write.
    pub(super) inbox: MrDesc,
    /// What they count at.
    pub(super) tags: [ImmTag; COUNTERS],
    /// Of shape and placement, which must be the same everywhere.
    pub(super) digest: u64,
}

impl Seat {
    /// The engine's address.
    #[must_use]
    pub const fn address(&self) -> &NetAddr {
        &self.address
    }

    /// Some hundred bytes: two frames, each behind its length, four tags, and a digest of the shape.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame(&self.address, &mut bytes);
        frame(&self.inbox, &mut bytes);
        for tag in self.tags {
            bytes.extend(tag.bits().to_le_bytes());
        }
        bytes.extend(self.digest.to_le_bytes());
        bytes
    }

    /// Reads them again.
    ///
    /// # Errors
    ///
    /// [`SeatError`]. Any bytes may be passed.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SeatError> {
        let length = SeatError::Length { found: bytes.len() };
        let framed = |bytes| -> Result<(&[u8], &[u8]), SeatError> {
            let (len, rest) = <[u8]>::split_first_chunk(bytes).ok_or(length)?;
            rest.split_at_checked(usize::from(u16::from_le_bytes(*len))).ok_or(length)
        };
        let (address, rest) = framed(bytes)?;
        let (inbox, rest) = framed(rest)?;
        let (words, digest) = rest.split_at_checked(4 * COUNTERS).ok_or(length)?;
        let digest: &[u8; 8] = digest.try_into().map_err(|_| length)?;
        let tag = |at: usize| {
            let word = words.get(4 * at..).and_then(<[u8]>::first_chunk).ok_or(length)?;
            let bits = u32::from_le_bytes(*word);
            ImmTag::from_bits(bits).ok_or(SeatError::Tag { bits })
        };
        Ok(Self {
            address: NetAddr::decode(address)?,
            inbox: MrDesc::decode(inbox)?,
            tags: [tag(0)?, tag(1)?, tag(2)?, tag(3)?],
            digest: u64::from_le_bytes(*digest),
        })
    }
}

fn frame<T: Wire>(value: &T, bytes: &mut Vec<u8>) {
    let mut buffer = vec![0; T::ENCODED_MAX];
    // Values of ours are consistent, and the buffer holds the longest.
    let len = value.encode(&mut buffer).unwrap_or(0);
    bytes.extend(u16::try_from(len).unwrap_or(0).to_le_bytes());
    bytes.extend(buffer.iter().take(len));
}
