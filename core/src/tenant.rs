//! Names of registrations inside remote keys, and which of them a peer has taken back.
//!
//! A transport whose devices do not refuse late writes cleanly (software ones drop the whole connection)
//! needs the *writer* to know that a region was withdrawn. So the lower half of each remote key
//! that we give out names the region's slot and which registration of that slot it is; a peer that
//! withdraws one says so, and whatever is older in the same slot went before it. What was withdrawn before
//! a session began is told at its start, in parts, before anything is written ([`Parts`]).
//!
//! ```text
//!   63                32 31        20 19                0
//!  +--------------------+------------+-------------------+
//!  | the device's key,  |    slot    |  serial: from 1,  |
//!  | or a random number |            |  grows            |
//!  +--------------------+------------+-------------------+
//! ```
//!
//! # Invariants
//!
//! A key gives back what it was made of. A withdrawn registration stays withdrawn; a later one of the
//! same slot is not touched by it. Checked over all small tenants below.

/// Regions that an engine may have at a time.
pub const SLOTS: usize = 1 << SLOT_BITS;

/// The last serial number of a slot; it is not used again after that.
pub const LAST_SERIAL: u32 = (1 << SERIAL_BITS) - 1;

const SLOT_BITS: u32 = 12;
const SERIAL_BITS: u32 = 20;

/// One registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tenant {
    slot: u16,
    serial: u32,
}

impl Tenant {
    /// Registration `serial` of `slot`; `None` unless `slot` is below [`SLOTS`], and `serial` in 1 to
    /// [`LAST_SERIAL`].
    #[must_use]
    pub const fn new(slot: u16, serial: u32) -> Option<Self> {
        if (slot as usize) < SLOTS && serial > 0 && serial <= LAST_SERIAL {
            Some(Self { slot, serial })
        } else {
            None
        }
    }

    /// Its slot.
    #[must_use]
    pub const fn slot(self) -> u16 {
        self.slot
    }

    /// Which registration of the slot.
    #[must_use]
    pub const fn serial(self) -> u32 {
        self.serial
    }

    /// Whether `other` is withdrawn with it: it is of the same slot, and no later.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        self.slot == other.slot && self.serial >= other.serial
    }

    /// The key that carries it beside 32 bits of the device's, or random ones.
    #[must_use]
    pub const fn key(self, device: u32) -> u64 {
        (device as u64) << 32 | (self.slot as u64) << SERIAL_BITS | self.serial as u64
    }

    /// The tenant that a key names; `None` if nobody here made it.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "both are masked to their widths")]
    pub const fn of(key: u64) -> Option<Self> {
        let slot = (key >> SERIAL_BITS) & (SLOTS as u64 - 1);
        Self::new(slot as u16, (key & LAST_SERIAL as u64) as u32)
    }
}

/// The device's part of a key.
#[must_use]
pub const fn device_key(key: u64) -> u32 {
    (key >> 32) as u32
}

/// What one peer has withdrawn of its regions, over [`SLOTS`] words lent by the caller, zero at first.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Withdrawn<S>(S);

impl<S: AsRef<[u32]> + AsMut<[u32]>> Withdrawn<S> {
    /// Nothing is withdrawn.
    pub fn new(mut words: S) -> Self {
        words.as_mut().fill(0);
        Self(words)
    }

    /// The peer withdraws a registration. O(1).
    pub fn withdraw(&mut self, tenant: Tenant) {
        if let Some(word) = self.0.as_mut().get_mut(usize::from(tenant.slot)) {
            *word = tenant.serial.max(*word);
        }
    }

    /// Whether `key` may still be written under. O(1).
    #[must_use]
    pub fn allows(&self, key: u64) -> bool {
        Tenant::of(key).is_some_and(|tenant| {
            self.0.as_ref().get(usize::from(tenant.slot)).is_some_and(|&last| tenant.serial > last)
        })
    }
}

/// Registrations told of in one part.
pub const PART: usize = 64;

/// Which parts have come of a list that is told at a session's start: one that comes later may name what was
/// withdrawn before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Parts {
    expected: Option<u8>,
    heard: u64,
}

impl Parts {
    /// The most that a list has: all slots, each once.
    pub const MAX: u8 = 64;

    /// How many parts `tenants` make.
    #[must_use]
    pub fn of(tenants: usize) -> Option<u8> {
        u8::try_from(tenants.div_ceil(PART)).ok().filter(|&parts| parts <= Self::MAX)
    }

    /// There are so many. Whether there can be: if not, the list is never complete.
    pub const fn expect(&mut self, parts: u8) -> bool {
        self.expected = Some(parts);
        parts <= Self::MAX
    }

    /// One has come. Whether there can be such a one.
    pub fn hear(&mut self, part: u8) -> bool {
        self.heard |= 1_u64.checked_shl(part.into()).unwrap_or(0);
        part < Self::MAX
    }

    /// Whether all have come. They may come before it is known how many they are.
    #[must_use]
    #[inline]
    pub fn is_complete(self) -> bool {
        let all = |parts: u8| match parts {
            0 => 0,
            1..=Self::MAX => u64::MAX >> (Self::MAX - parts),
            _ => return false,
        } & !self.heard == 0;
        self.expected.is_some_and(all)
    }
}

const _: () = assert!(Parts::MAX as usize * PART == SLOTS, "room for each slot");
const _: () = assert!(Parts::MAX as u32 == u64::BITS, "a bit for each part");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_gives_back_its_parts() {
        for slot in [0, 1, 7, 4094, 4095_u16] {
            for serial in [1, 2, LAST_SERIAL - 1, LAST_SERIAL] {
                for device in [0, 1, u32::MAX] {
                    let tenant = Tenant::new(slot, serial).unwrap();
                    let key = tenant.key(device);
                    assert_eq!(Tenant::of(key), Some(tenant));
                    assert_eq!(device_key(key), device);
                    assert_eq!((tenant.slot(), tenant.serial()), (slot, serial));
                }
            }
        }
        assert_eq!(Tenant::new(4096, 1), None);
        assert_eq!(Tenant::new(0, 0), None);
        assert_eq!(Tenant::new(0, LAST_SERIAL + 1), None);
        assert_eq!(Tenant::of(7 << 20), None);
    }

    #[test]
    fn a_list_is_complete_when_each_of_its_parts_has_come() {
        assert!(!Parts::default().is_complete());
        for parts in 0..=Parts::MAX {
            for missing in 0..=parts {
                let mut list = Parts::default();
                // Known at the first, or at the last.
                for first in [true, false] {
                    if first == (missing % 2 == 0) {
                        assert!(list.expect(parts));
                    }
                    (0..parts).filter(|&part| part != missing).for_each(|part| {
                        assert!(list.hear(part));
                    });
                }
                assert_eq!(list.is_complete(), missing == parts, "{missing} of {parts}");
                list.hear(missing);
                assert!(list.is_complete());
            }
        }
        let mut list = Parts::default();
        assert!(!list.expect(Parts::MAX + 1) && !list.expect(u8::MAX));
        (0..Parts::MAX).for_each(|part| assert!(list.hear(part)));
        assert!(!list.hear(Parts::MAX) && !list.hear(u8::MAX) && !list.is_complete());
        let counts = [0, 1, PART, PART + 1, SLOTS, SLOTS + 1].map(Parts::of);
        assert_eq!(counts, [Some(0), Some(1), Some(1), Some(2), Some(64), None]);
    }

    #[test]
    fn what_is_withdrawn_stays_so_and_takes_nothing_later_with_it() {
        for order in [[1, 3, 2], [3, 2, 1], [2, 1, 3]] {
            let mut withdrawn = Withdrawn::new([9_u32; SLOTS]);
            let mut last = 0;
            for serial in order {
                withdrawn.withdraw(Tenant::new(5, serial).unwrap());
                last = last.max(serial);
                for other in 1..6 {
                    let (here, beside) = (Tenant::new(5, other), Tenant::new(6, other));
                    assert_eq!(withdrawn.allows(here.unwrap().key(8)), other > last);
                    let one = Tenant::new(5, serial).unwrap();
                    assert_eq!(one.covers(here.unwrap()), other <= serial);
                    assert!(!one.covers(beside.unwrap()));
                    assert!(withdrawn.allows(beside.unwrap().key(8)));
                }
            }
        }
        assert!(!Withdrawn::new([0_u32; SLOTS]).allows(0));
        let mut short = Withdrawn::new([0_u32; 1]);
        short.withdraw(Tenant::new(1, 1).unwrap());
        assert!(!short.allows(Tenant::new(1, 2).unwrap().key(0)));
    }
}
