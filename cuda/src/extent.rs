//! Ranges of a GPU's memory that lie over several allocations: which ones, and whether a region may lie over so many.
//!
//! PyTorch's expandable segments are such: one tensor over many allocations of 2 or 20 MiB that adjoin.
//!
//! Pure: what is known of an address comes from a function of the caller's. Knows no driver, and no process.
//!
//! # Invariants
//!
//! 1. What [`walk`] visits adjoins in the order of addresses, is one GPU's, and covers the range; each of it holds a byte of
//!    the range. A range of which that cannot be said is an error that names its first byte that is not.
//! 2. It ends, whatever it is told: each step goes on by a byte at least, or is the last.
//!
//! Tried below for every layout of a few bytes.

use crate::error::Error;

/// The most allocations that one region may lie over: 160 GiB by 20 MiB. Each is a reference that its owner keeps, and some
/// tenths of a millisecond to every peer that opens the region.
pub const ALLOCATIONS_MAX: u32 = 8192;

/// One allocation of a GPU, as it is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) ordinal: u32,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

/// A range of a GPU's memory, as the driver knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Which GPU has it, as this process numbers them.
    pub ordinal: u32,
    /// First byte of the first allocation that the range lies in.
    pub start: u64,
    /// Bytes from there to the end of the last.
    pub bytes: u64,
    /// How many allocations that is.
    pub allocations: u32,
}

impl Found {
    /// Itself, if a region may lie over so many allocations.
    pub(crate) fn for_a_region(self) -> Result<Self, Error> {
        let (count, most) = (self.allocations, ALLOCATIONS_MAX);
        if count > most { Err(Error::TooManyAllocations { count, most }) } else { Ok(self) }
    }
}

/// Calls `each` with every allocation that `bytes` bytes from `address` lie over. `None`: `address` is no GPU's.
///
/// # Errors
///
/// [`Error::Hole`], [`Error::OutOfBounds`] for a range that leaves the address space, or what the two functions answer.
pub(crate) fn walk(
    address: u64,
    bytes: u64,
    mut known: impl FnMut(u64) -> Result<Option<Allocation>, Error>,
    mut each: impl FnMut(Allocation) -> Result<(), Error>,
) -> Result<Option<Found>, Error> {
    let Some(first) = known(address)? else { return Ok(None) };
    let ordinal = first.ordinal;
    let end = address.checked_add(bytes).ok_or(Error::OutOfBounds { end: bytes, bytes: 0 })?;
    let (mut next, mut at, mut allocations) = (Some(first), address, 0_u32);
    loop {
        let inside = |one: &Allocation| {
            let begins = if allocations == 0 { one.start <= at } else { one.start == at };
            begins && at - one.start < one.bytes
        };
        let Some(one) = next.filter(|one| one.ordinal == ordinal).filter(inside) else {
            let other = next.map(|one| one.ordinal).filter(|other| *other != ordinal);
            return Err(Error::Hole { address: at, before: at - address, bytes, ordinal, other });
        };
        each(one)?;
        allocations = allocations.saturating_add(1);
        at = one.start.saturating_add(one.bytes);
        if at >= end {
            let (start, bytes) = (first.start, at - first.start);
            return Ok(Some(Found { ordinal, start, bytes, allocations }));
        }
        next = known(at)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All there is: bytes that are somebody's, in allocations of one to three bytes.
    const SPACE: u64 = 7;

    /// What begins at each byte: nothing, or an allocation of so many bytes of GPU 0 or 1.
    fn layouts() -> Vec<Vec<Allocation>> {
        let mut all = vec![(0, Vec::new())];
        let mut done = Vec::new();
        while let Some((at, layout)) = all.pop() {
            if at == SPACE {
                done.push(layout);
                continue;
            }
            all.push((at + 1, layout.clone()));
            for bytes in (1..=3).filter(|bytes| at + bytes <= SPACE) {
                for ordinal in 0..2 {
                    let mut layout = layout.clone();
                    layout.push(Allocation { ordinal, start: at, bytes });
                    all.push((at + bytes, layout));
                }
            }
        }
        done
    }

    #[test]
    fn a_range_is_found_exactly_if_one_gpu_has_each_of_its_bytes() {
        let mut several = 0;
        for layout in layouts() {
            let owner = |at: u64| {
                layout.iter().find(|one| one.start <= at && at < one.start + one.bytes).copied()
            };
            for address in 0..SPACE {
                for bytes in 1..=SPACE - address {
                    let mut visited = Vec::new();
                    let got = walk(
                        address,
                        bytes,
                        |at| Ok(owner(at)),
                        |one| {
                            visited.push(one);
                            Ok(())
                        },
                    );
                    let Some(first) = owner(address) else {
                        assert_eq!((got, visited), (Ok(None), Vec::new()));
                        continue;
                    };
                    let ordinal = first.ordinal;
                    let mine = |at: &u64| owner(*at).is_some_and(|one| one.ordinal == ordinal);
                    if let Some(at) = (address..address + bytes).find(|at| !mine(at)) {
                        let other = owner(at).map(|one| one.ordinal);
                        let hole = Error::Hole {
                            address: at,
                            before: at - address,
                            bytes,
                            ordinal,
                            other,
                        };
                        assert_eq!(got, Err(hole), "{bytes} from {address} in {layout:?}");
                        continue;
                    }
                    let mut touched: Vec<_> =
                        (address..address + bytes).filter_map(owner).collect();
                    touched.dedup();
                    let last = touched.last().map_or(0, |one| one.start + one.bytes);
                    let found = Found {
                        ordinal,
                        start: first.start,
                        bytes: last - first.start,
                        allocations: u32::try_from(touched.len()).unwrap(),
                    };
                    several += usize::from(touched.len() > 1);
                    assert_eq!(got, Ok(Some(found)), "{bytes} from {address} in {layout:?}");
                    assert_eq!(visited, touched);
                }
            }
        }
        assert!(several > 1000);
    }

    /// A driver that contradicts itself: no endless walk, and nothing is taken for whole.
    #[test]
    fn an_allocation_that_does_not_hold_its_address_is_a_hole() {
        let one = |start, bytes| Allocation { ordinal: 0, start, bytes };
        let walk_to = |second: Allocation| {
            let known = |at| Ok(Some(if at < 104 { one(100, 4) } else { second }));
            walk(102, 8, known, |_| Ok(()))
        };
        let hole = Error::Hole { address: 104, before: 2, bytes: 8, ordinal: 0, other: None };
        for second in [one(104, 0), one(103, 10), one(105, 10), one(0, 1), one(100, 100)] {
            assert_eq!(walk_to(second), Err(hole), "{second:?}");
        }
        let found = Found { ordinal: 0, start: 100, bytes: u64::MAX - 100, allocations: 2 };
        assert_eq!(walk_to(one(104, u64::MAX)), Ok(Some(found)));
        let first = Error::Hole { address: 5, before: 0, bytes: 1, ordinal: 0, other: None };
        for wrong in [one(6, 9), one(0, 5), one(5, 0)] {
            assert_eq!(walk(5, 1, |_| Ok(Some(wrong)), |_| Ok(())), Err(first));
        }
        let leaves = Error::OutOfBounds { end: u64::MAX, bytes: 0 };
        assert_eq!(walk(5, u64::MAX, |_| Ok(Some(one(0, 9))), |_| Ok(())), Err(leaves));
    }

    #[test]
    fn what_is_asked_or_done_may_fail() {
        let one = |at| Allocation { ordinal: 3, start: at, bytes: 1 };
        for fails_at in 0..3 {
            let known = |at| if at == fails_at { Err(Error::NoDriver) } else { Ok(Some(one(at))) };
            assert_eq!(walk(0, 3, known, |_| Ok(())), Err(Error::NoDriver));
            let each = |one: Allocation| {
                if one.start == fails_at { Err(Error::KernelsAbsent) } else { Ok(()) }
            };
            assert_eq!(walk(0, 3, |at| Ok(Some(one(at))), each), Err(Error::KernelsAbsent));
        }
    }

    #[test]
    fn a_region_may_lie_over_so_many_and_the_error_says_in_how_many_parts_it_goes() {
        let found = |allocations| Found { ordinal: 0, start: 0, bytes: 1, allocations };
        for count in [1, 2, ALLOCATIONS_MAX - 1, ALLOCATIONS_MAX] {
            assert_eq!(found(count).for_a_region(), Ok(found(count)));
        }
        for (count, parts) in
            [(ALLOCATIONS_MAX + 1, "2 parts"), (2 * ALLOCATIONS_MAX + 1, "3 parts")]
        {
            let refused = found(count).for_a_region().unwrap_err();
            assert_eq!(refused, Error::TooManyAllocations { count, most: ALLOCATIONS_MAX });
            let said = refused.to_string();
            for fact in [&count.to_string(), &ALLOCATIONS_MAX.to_string(), parts] {
                assert!(said.contains(fact), "{said}");
            }
        }
    }
}
