//! When a NIC is told of a small piece: at once, or together with others.
//!
//! To tell a NIC of work costs as much as all the rest of a small write: a store over the bus, on some transports a call of the kernel.
//! While it has enough to do nothing is lost by telling it of several pieces in one go; and of these only the last need ask for a
//! completion ([`crate::signal`]), so that fewer are read.
//!
//! Knows numbers of pieces; not what they are, nor who looks when.
//!
//! # Invariants
//!
//! 1. A piece waits only if, when it came, the NIC had so many to do that it knew of.
//! 2. Fewer wait than are told of together.
//! 3. What waits is told of when the engine next looks, whether or not others have come.
//! 4. No long piece waits.
//!
//! The test goes through all that can happen.

/// Longer pieces keep a NIC busy for longer than it takes to tell it of them: at 400 Gb/s 80 ns.
pub const SHORT_BYTES: u64 = 4096;

/// Whether a piece of `len` bytes that has just come waits for others. `posted` pieces are under way, of which the NIC knows; `unposted`
/// are those of which it does not, with this one; `together` are told of in one go, 1: each at once.
#[must_use]
#[inline]
pub const fn waits(len: u64, posted: usize, unposted: usize, together: u16) -> bool {
    let together = together as usize;
    len <= SHORT_BYTES && together > 1 && posted >= together && unposted < together
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::vec::Vec;

    use super::*;

    /// Every order in which short and long pieces come and end, and the engine looks, with up to nine pieces at a time.
    #[test]
    fn pieces_wait_for_few_others_and_only_while_there_is_enough_to_do() {
        for together in 0..=4_u16 {
            let (mut seen, mut open) = (BTreeSet::new(), Vec::from([(0_usize, 0_usize)]));
            let mut waited = false;
            while let Some((posted, unposted)) = open.pop() {
                if posted + unposted > 9 || !seen.insert((posted, unposted)) {
                    continue;
                }
                assert!(unposted < usize::from(together).max(1));
                waited |= unposted > 0;
                for len in [0, 1, SHORT_BYTES, SHORT_BYTES + 1, u64::MAX] {
                    if waits(len, posted, unposted + 1, together) {
                        assert!(posted >= usize::from(together) && len <= SHORT_BYTES);
                        open.push((posted, unposted + 1));
                    } else {
                        // It goes, and those that have waited with it.
                        open.push((posted + unposted + 1, 0));
                    }
                }
                // Some end, and then the engine looks, or does not yet.
                for ended in 0..=posted {
                    open.push((posted - ended, unposted));
                    open.push((posted - ended + unposted, 0));
                }
            }
            assert_eq!(waited, together > 1);
        }
    }
}
