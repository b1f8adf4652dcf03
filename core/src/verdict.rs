//! What a receiver says had arrived over a path of reliable queue pairs that broke, and which writes that settles.
//!
//! Queue pairs keep the order of writes, and the receiver is told of each immediate. So their number says all: of the
//! writes on a lane all up to the one with the last immediate that was taken have arrived, and none behind it was
//! counted, nor will be, once the receiver has destroyed its ends. Bytes of a write without an immediate behind it may
//! have arrived; they are written again, and are the same.
//!
//! # Invariants
//!
//! 1. [`Verdict::decode`] takes any bytes, and accepts only those that [`Verdict::encode`] makes.
//! 2. Each immediate counts once: those that the receiver took are of writes that have arrived, the others of writes
//!    that are posted again. A verdict that says otherwise than what is known is none ([`arrived`]).
//!
//! The tests below try all short lanes, and what of them may have been taken and acknowledged.

use heapless::Vec;

use crate::note::LANES;
use crate::receipt::MAX_RECEIPT_BYTES;

/// Bytes of a verdict.
pub const VERDICT_BYTES: usize = 4 + 8 * LANES;

/// What had arrived over a path when its ends were destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Verdict {
    /// Which of the paths between its NICs: 0 if there was none, or the sender's attempt to open one.
    pub epoch: u32,
    /// Immediates since it was opened, on each lane.
    pub arrived: [u64; LANES],
}

impl Verdict {
    /// As it travels.
    #[must_use]
    pub fn encode(&self) -> Vec<u8, MAX_RECEIPT_BYTES> {
        let counts = self.arrived.iter().flat_map(|count| count.to_be_bytes());
        self.epoch.to_be_bytes().into_iter().chain(counts).collect()
    }

    /// Immediates that came over the path of this epoch, the last that was asked for, on each lane: none, if the receiver
    /// has not opened its ends of it. `None` if it speaks of one that was never asked for.
    #[must_use]
    pub const fn of(&self, epoch: u32) -> Option<[u64; LANES]> {
        if self.epoch == epoch {
            Some(self.arrived)
        } else if self.epoch < epoch {
            Some([0; LANES])
        } else {
            None
        }
    }

    /// What the bytes say; `None` if they are no verdict.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (epoch, mut rest) = bytes.split_first_chunk()?;
        let mut arrived = [0; LANES];
        for count in &mut arrived {
            let (bytes, behind) = rest.split_first_chunk()?;
            (*count, rest) = (u64::from_be_bytes(*bytes), behind);
        }
        rest.is_empty().then_some(Self { epoch: u32::from_be_bytes(*epoch), arrived })
    }
}

/// How many of the writes in flight on a lane, from the first on, have arrived, if the receiver took `claimed`
/// immediates since the lane was opened, of which `acknowledged` were of writes that are not in flight any more.
/// `announced` says of each in flight, in the order of posting, whether it has an immediate. O(writes).
///
/// `None` if that cannot be: the receiver would have taken less than its device acknowledged, or more than was sent.
#[must_use]
pub fn arrived(
    acknowledged: u64,
    claimed: u64,
    announced: impl IntoIterator<Item = bool>,
) -> Option<usize> {
    let mut left = claimed.checked_sub(acknowledged)?;
    if left == 0 {
        return Some(0);
    }
    for (at, has_immediate) in announced.into_iter().enumerate() {
        left = left.saturating_sub(u64::from(has_immediate));
        if left == 0 {
            return at.checked_add(1);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All lanes of up to seven writes, with and without immediates; of which the first `read` were acknowledged, and the
    /// first `landed` have arrived.
    #[test]
    fn every_immediate_counts_once() {
        let mut cases = 0;
        for len in 0..=7_usize {
            for pattern in 0..1_u32 << len {
                let announced = |at: usize| pattern & 1 << at != 0;
                let count = |to: usize| (0..to).filter(|at| announced(*at)).count();
                for read in 0..=len {
                    let flights = || (read..len).map(announced);
                    for landed in read..=len {
                        let claimed = count(landed) as u64;
                        let settled = arrived(count(read) as u64, claimed, flights()).unwrap();
                        let settled = read + settled;
                        // What is done had arrived; what is posted again has no immediate that was taken.
                        assert!(settled <= landed.max(read));
                        assert_eq!(count(settled), count(landed));
                        assert!(settled == read || announced(settled - 1));
                        cases += 1;
                    }
                    let all = count(len) as u64;
                    assert_eq!(arrived(count(read) as u64, all + 1, flights()), None);
                    let less = (count(read) as u64).checked_sub(1);
                    let too_few = |less| arrived(count(read) as u64, less, flights());
                    assert_eq!(less.and_then(too_few), None);
                }
            }
        }
        assert!(cases > 5_000, "{cases}");
    }

    #[test]
    fn a_verdict_counts_for_the_last_attempt_alone() {
        let arrived = [3, 4];
        for said in 0..4 {
            for asked in 0..4 {
                let expected =
                    (said <= asked).then_some(if said == asked { arrived } else { [0; 2] });
                assert_eq!(Verdict { epoch: said, arrived }.of(asked), expected);
            }
        }
    }

    #[test]
    fn verdicts_survive_the_way_and_nothing_else_does() {
        let verdict = Verdict { epoch: 7, arrived: [u64::MAX, 1] };
        let bytes = verdict.encode();
        assert_eq!(bytes.len(), VERDICT_BYTES);
        assert_eq!(Verdict::decode(&bytes), Some(verdict));
        for len in 0..bytes.len() {
            assert_eq!(Verdict::decode(&bytes[..len]), None);
        }
        assert_eq!(Verdict::decode(&[&bytes[..], &[0]].concat()), None);
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 1;
            let other = Verdict::decode(&other).unwrap();
            assert!(other != verdict && other.encode() != bytes);
        }
    }
}
