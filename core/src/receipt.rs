//! What a peer is told of a path that broke, and what it answers, as bytes.
//!
//! The *ask* is an immediate without bytes ([`Control::Ask`](crate::mailbox::Control::Ask)); the
//! *answer* is a [`Settlement`], written into the asker's mailbox behind the messages
//! ([`Geometry::receipt_offset`](crate::mailbox::Geometry::receipt_offset)) and announced by
//! [`Control::Answer`](crate::mailbox::Control::Answer). What the receipt in it means is known to the two
//! providers alone; when to ask is [`crate::group`]'s to decide.
//!
//! # Invariants
//!
//! 1. [`Settlement::from_bytes`] takes any bytes, and accepts only those that [`Settlement::to_bytes`] makes.
//! 2. A settlement of which only a part has been written is [`SettlementError::Torn`], never another one.
//!
//! The tests below cut, mix and corrupt.

use core::fmt;

use heapless::Vec;
use static_assertions::const_assert;
use zerocopy::byteorder::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::id::{MAX_NICS, NicIndex};

/// Bytes of an answer.
pub const SETTLEMENT_BYTES: usize = size_of::<SettlementBytes>();
const_assert!(SETTLEMENT_BYTES == 64);

/// The longest receipt, in bytes.
pub const MAX_RECEIPT_BYTES: usize = 48;

/// Which of the breaks that a NIC's paths suffer an ask is about: they are counted, modulo 2048.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Epoch(u16);

impl Epoch {
    const BITS: u32 = 11;
    const MASK: u16 = (1 << Self::BITS) - 1;

    /// The first.
    pub const ZERO: Self = Self(0);

    /// The epoch with this number; `None` from 2048 on.
    #[must_use]
    pub const fn new(number: u16) -> Option<Self> {
        if number <= Self::MASK { Some(Self(number)) } else { None }
    }

    /// Its number, below 2048.
    #[must_use]
    pub const fn number(self) -> u16 {
        self.0
    }

    /// The one after it.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1) & Self::MASK)
    }

    /// Whether it came after `earlier`, and not the other way round: half of all count as later.
    #[must_use]
    pub const fn is_after(self, earlier: Self) -> bool {
        let ahead = self.0.wrapping_sub(earlier.0) & Self::MASK;
        ahead != 0 && ahead <= Self::MASK / 2
    }
}

/// What arrived over a broken path, as the receiver's provider tells the sender's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Settlement {
    /// The ask that this answers.
    pub epoch: Epoch,
    /// The asker's NIC.
    pub from: NicIndex,
    /// The answerer's NIC.
    pub to: NicIndex,
    /// For the asker's provider.
    pub receipt: Vec<u8, MAX_RECEIPT_BYTES>,
}

/// Why bytes are no settlement.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SettlementError {
    /// Not [`SETTLEMENT_BYTES`] bytes.
    Length {
        /// Bytes given.
        found: usize,
    },
    /// Something else lies there.
    Magic {
        /// The first two bytes, as a little-endian number.
        found: u16,
    },
    /// A settlement of another version.
    Version {
        /// The version found.
        found: u8,
    },
    /// Parts of it are of another settlement: it is being written. Nobody's fault.
    Torn,
    /// A NIC, an epoch or a length that there cannot be, or bytes behind the receipt.
    Range,
}

impl fmt::Display for SettlementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { found } => {
                write!(f, "a settlement has {SETTLEMENT_BYTES} bytes, not {found}")
            }
            Self::Magic { found } => {
                write!(f, "no settlement lies there (it starts with {found:#06x})")
            }
            Self::Version { found } => {
                write!(f, "settlement version {found} is not understood, only {VERSION}")
            }
            Self::Torn => f.write_str("settlement is not written completely"),
            Self::Range => f.write_str("settlement names what there cannot be"),
        }
    }
}

impl core::error::Error for SettlementError {}

const MAGIC: u16 = u16::from_le_bytes(*b"Ip");
const VERSION: u8 = 1;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SettlementBytes {
    magic: U16,
    version: u8,
    len: u8,
    from: u8,
    to: u8,
    epoch: U16,
    receipt: [u8; MAX_RECEIPT_BYTES],
    /// Over all before it.
    sum: U64,
}

impl Settlement {
    /// The bytes that are written to the asker.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; SETTLEMENT_BYTES] {
        let mut receipt = [0; MAX_RECEIPT_BYTES];
        for (byte, from) in receipt.iter_mut().zip(&self.receipt) {
            *byte = *from;
        }
        let mut bytes = SettlementBytes {
            magic: MAGIC.into(),
            version: VERSION,
            // At most MAX_RECEIPT_BYTES.
            len: u8::try_from(self.receipt.len()).unwrap_or(u8::MAX),
            from: self.from,
            to: self.to,
            epoch: self.epoch.number().into(),
            receipt,
            sum: 0.into(),
        };
        bytes.sum = sum(&bytes).into();
        zerocopy::transmute!(bytes)
    }

    /// The settlement that `bytes` are.
    ///
    /// # Errors
    ///
    /// [`SettlementError`]. Whether it answers what was asked is for the group to say.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SettlementError> {
        let raw = SettlementBytes::read_from_bytes(bytes)
            .map_err(|_| SettlementError::Length { found: bytes.len() })?;
        if raw.magic.get() != MAGIC {
            return Err(SettlementError::Magic { found: raw.magic.get() });
        }
        if raw.version != VERSION {
            return Err(SettlementError::Version { found: raw.version });
        }
        if raw.sum.get() != sum(&raw) {
            return Err(SettlementError::Torn);
        }
        let nics = usize::from(raw.from) < MAX_NICS && usize::from(raw.to) < MAX_NICS;
        // Nothing lies behind the receipt: a settlement has one form.
        let parts = raw.receipt.split_at_checked(usize::from(raw.len)).filter(|_| nics);
        let parts = parts.filter(|(_, behind)| behind.iter().all(|byte| *byte == 0));
        let receipt = parts.and_then(|(receipt, _)| Vec::from_slice(receipt).ok());
        let (Some(receipt), Some(epoch)) = (receipt, Epoch::new(raw.epoch.get())) else {
            return Err(SettlementError::Range);
        };
        Ok(Self { epoch, from: raw.from, to: raw.to, receipt })
    }
}

/// FNV-1a: tells a mixture of two settlements from either. It is no protection against intent.
fn sum(bytes: &SettlementBytes) -> u64 {
    let all = bytes.as_bytes();
    let before = all.len().saturating_sub(size_of::<U64>());
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    all.iter().take(before).fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settlement(epoch: u16, receipt: &[u8]) -> Settlement {
        let (epoch, receipt) = (Epoch::new(epoch).unwrap(), Vec::from_slice(receipt).unwrap());
        Settlement { epoch, from: 7, to: 2, receipt }
    }

    #[test]
    fn a_settlement_survives_the_way() {
        for len in 0..=MAX_RECEIPT_BYTES {
            let sent = settlement(2047, &[0xa5; MAX_RECEIPT_BYTES][..len]);
            assert_eq!(Settlement::from_bytes(&sent.to_bytes()), Ok(sent));
        }
    }

    #[test]
    fn every_truncation_and_corruption_is_noticed() {
        let good = settlement(5, b"seen: 12 13 17").to_bytes();
        for len in 0..good.len() {
            let cut = Settlement::from_bytes(&good[..len]);
            assert_eq!(cut, Err(SettlementError::Length { found: len }));
        }
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bytes = good;
                bytes[at] ^= 1 << bit;
                let got = Settlement::from_bytes(&bytes).unwrap_err();
                let expected = match at {
                    0 | 1 => matches!(got, SettlementError::Magic { .. }),
                    2 => matches!(got, SettlementError::Version { .. }),
                    _ => got == SettlementError::Torn,
                };
                assert!(expected, "{at}: {got}");
            }
        }
    }

    /// Any part of one written over any part of another, as a copy in progress leaves it.
    #[test]
    fn a_mixture_of_two_is_neither() {
        let (old, new) = (settlement(5, b"12 13").to_bytes(), settlement(6, b"1 to 16").to_bytes());
        for start in 0..64 {
            for end in start..=64 {
                let mut mixed = old;
                mixed[start..end].copy_from_slice(&new[start..end]);
                let expected = mixed == old || mixed == new;
                let torn = Settlement::from_bytes(&mixed) == Err(SettlementError::Torn);
                assert_eq!(torn, !expected, "{start}..{end}");
            }
        }
    }

    #[test]
    fn what_there_cannot_be_is_refused() {
        let with = |change: fn(&mut SettlementBytes)| {
            let mut bytes: SettlementBytes = zerocopy::transmute!(settlement(1, b"1").to_bytes());
            change(&mut bytes);
            bytes.sum = sum(&bytes).into();
            Settlement::from_bytes(bytes.as_bytes())
        };
        assert!(with(|_| ()).is_ok());
        assert_eq!(with(|bytes| bytes.from = 8), Err(SettlementError::Range));
        assert_eq!(with(|bytes| bytes.to = 8), Err(SettlementError::Range));
        assert_eq!(with(|bytes| bytes.len = 49), Err(SettlementError::Range));
        assert_eq!(with(|bytes| bytes.epoch = 2048.into()), Err(SettlementError::Range));
        // Behind the receipt.
        for at in 1..MAX_RECEIPT_BYTES {
            let mut bytes: SettlementBytes = zerocopy::transmute!(settlement(1, b"1").to_bytes());
            bytes.receipt[at] = 1;
            bytes.sum = sum(&bytes).into();
            assert_eq!(Settlement::from_bytes(bytes.as_bytes()), Err(SettlementError::Range));
        }
    }

    #[test]
    fn of_two_epochs_at_most_one_is_later() {
        let all = || (0..2048).map(|number| Epoch::new(number).unwrap());
        assert_eq!(Epoch::new(2048), None);
        for a in all() {
            assert!(!a.is_after(a) && a.next().is_after(a) && !a.is_after(a.next()));
            assert!(all().all(|b| !(a.is_after(b) && b.is_after(a))));
        }
    }
}
