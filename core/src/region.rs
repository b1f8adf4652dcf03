//! Regions of memory: what may be written, and where exactly.
//!
//! A [`LocalMr`] is ours, an [`MrDesc`] is a peer's. Both carry base, length and rights, so that every
//! write is checked against them before it is posted; neither is ever dereferenced here.
//!
//! # Invariants
//!
//! [`MrDesc::range`] and [`LocalMr::range`] return an address only if all of `offset..offset + len`
//! lies inside the region; no sum in them can wrap.

use crate::id::{EngineId, MAX_NICS, NicIndex};

/// What peers may do with a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rights(u8);

impl Rights {
    /// The region is a source only.
    pub const LOCAL: Self = Self(0);
    /// Peers may write to the region.
    pub const REMOTE_WRITE: Self = Self(1);
    const KNOWN: u8 = 1;

    /// The bits as they travel.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Rights from bits that travelled; `None` if a bit is not known here.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if bits & !Self::KNOWN == 0 { Some(Self(bits)) } else { None }
    }

    /// Whether peers may write.
    #[must_use]
    pub const fn remote_write(self) -> bool {
        self.0 & Self::REMOTE_WRITE.0 != 0
    }
}

/// Why a range cannot be used.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RegionError {
    /// `offset + len` lies past the region's end, or past the end of the address space.
    OutOfBounds {
        /// First byte asked for, counted from the region's base.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes the region has.
        region_len: u64,
    },
    /// The region's owner does not let peers write to it.
    NotWritable,
}

impl core::fmt::Display for RegionError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::OutOfBounds { offset, len, region_len } => {
                write!(
                    f,
                    "{len} bytes at offset {offset} do not fit a region of {region_len} bytes"
                )
            }
            Self::NotWritable => {
                f.write_str("the region was registered without the right to write to it")
            }
        }
    }
}

impl core::error::Error for RegionError {}

/// The keys of a region, one for each NIC of its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Keys {
    keys: [u64; MAX_NICS],
    nics: NicIndex,
}

impl Keys {
    /// Keys for `keys.len()` NICs; `None` if there are none, or more than [`MAX_NICS`].
    #[must_use]
    pub fn new(keys: &[u64]) -> Option<Self> {
        if keys.is_empty() || keys.len() > MAX_NICS {
            return None;
        }
        let mut all = [0; MAX_NICS];
        for (slot, key) in all.iter_mut().zip(keys) {
            *slot = *key;
        }
        let nics = NicIndex::try_from(keys.len()).ok()?;
        Some(Self { keys: all, nics })
    }

    /// How many NICs the region is registered with.
    #[must_use]
    pub const fn nics(&self) -> NicIndex {
        self.nics
    }

    /// The key for NIC `nic`, if the region is registered with it.
    #[must_use]
    pub fn get(&self, nic: NicIndex) -> Option<u64> {
        self.as_slice().get(usize::from(nic)).copied()
    }

    /// All keys, in NIC order.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        self.keys.get(..usize::from(self.nics)).unwrap_or(&[])
    }
}

/// A region of this engine's own memory, as a source of writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LocalMr {
    /// Address of the first byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Which registration of the range this is.
    pub generation: u32,
    /// Local key for each NIC.
    pub keys: Keys,
}

impl LocalMr {
    /// The address of `offset`, if `len` bytes from there lie inside.
    ///
    /// # Errors
    ///
    /// [`RegionError::OutOfBounds`].
    pub fn range(&self, offset: u64, len: u64) -> Result<u64, RegionError> {
        range(self.base, self.len, offset, len)
    }
}

/// A region of a peer's memory: all that is needed to write to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MrDesc {
    /// The engine whose memory it is.
    pub owner: EngineId,
    /// Address of the first byte, in the owner's space.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Which registration of the range this is; a stale one is refused by the owner.
    pub generation: u32,
    /// What peers may do.
    pub rights: Rights,
    /// Remote key for each NIC of the owner.
    pub keys: Keys,
}

impl MrDesc {
    /// The owner's address of `offset`, if `len` bytes from there lie inside and may be written.
    ///
    /// # Errors
    ///
    /// [`RegionError`]: out of bounds, or not writable.
    pub fn range(&self, offset: u64, len: u64) -> Result<u64, RegionError> {
        if !self.rights.remote_write() {
            return Err(RegionError::NotWritable);
        }
        range(self.base, self.len, offset, len)
    }
}

fn range(base: u64, region_len: u64, offset: u64, len: u64) -> Result<u64, RegionError> {
    let fits = offset.checked_add(len).is_some_and(|end| end <= region_len);
    let address = base.checked_add(offset).filter(|first| first.checked_add(len).is_some());
    match address {
        Some(address) if fits => Ok(address),
        _ => Err(RegionError::OutOfBounds { offset, len, region_len }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desc(base: u64, len: u64, rights: Rights) -> MrDesc {
        let keys = Keys::new(&[7]).unwrap();
        MrDesc { owner: EngineId(1), base, len, generation: 0, rights, keys }
    }

    #[test]
    fn every_small_range_is_inside_or_refused() {
        for region_len in 0..6 {
            for offset in 0..8 {
                for len in 0..8 {
                    let got = desc(100, region_len, Rights::REMOTE_WRITE).range(offset, len);
                    if offset + len <= region_len {
                        assert_eq!(got, Ok(100 + offset));
                    } else {
                        assert_eq!(got, Err(RegionError::OutOfBounds { offset, len, region_len }));
                    }
                }
            }
        }
    }

    #[test]
    fn nothing_wraps_at_the_end_of_the_address_space() {
        let top = desc(u64::MAX - 3, u64::MAX, Rights::REMOTE_WRITE);
        assert_eq!(top.range(1, 2), Ok(u64::MAX - 2));
        for (offset, len) in [(1, 3), (4, 0), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
            assert!(top.range(offset, len).is_err(), "{offset} {len}");
        }
    }

    #[test]
    fn a_region_without_the_right_is_refused() {
        assert_eq!(desc(0, 8, Rights::LOCAL).range(0, 1), Err(RegionError::NotWritable));
        assert_eq!(Rights::from_bits(2), None);
        assert_eq!(Rights::from_bits(1), Some(Rights::REMOTE_WRITE));
    }

    #[test]
    fn keys_are_one_to_eight() {
        assert_eq!(Keys::new(&[]), None);
        assert_eq!(Keys::new(&[0; 9]), None);
        let keys = Keys::new(&[4, 5]).unwrap();
        assert_eq!((keys.nics(), keys.get(1), keys.get(2)), (2, Some(5), None));
        assert_eq!(keys.as_slice(), [4, 5]);
    }
}
