//! Where the disorder comes from: numbers that follow from the seed, the endpoint and the operation alone.
//!
//! No state: what happens to an operation does not depend on when a thread got to it. Two runs with one seed make the
//! same choices for the same operations; how these mix with the timing of threads is the machine's.

use std::time::Duration;

/// What a choice is for: the same operation gets another number for each.
#[derive(Debug, Clone, Copy)]
pub enum Choice {
    /// How long an operation waits before its first piece leaves.
    Start,
    /// How much later one piece leaves.
    Piece,
    /// Which of two things due at once is first.
    Tie,
    /// How late the target's event is.
    Event,
    /// How late the initiator's completion is.
    Reply,
    /// Whether, and how long, the last piece lands after the acknowledgement.
    Hold,
    /// Whether a post finds the queue full.
    Full,
    /// Whether a completion is discarded when its endpoint closes.
    Discard,
    /// Keys and numbers of endpoints.
    Name,
}

/// How often a delay is long.
pub const LATE_ONCE_IN: u64 = 4;

/// One endpoint's disorder.
#[derive(Debug, Clone, Copy)]
pub struct Disorder {
    root: u64,
    longest: Duration,
}

impl Disorder {
    /// Returns the disorder of a process's `endpoint`-th endpoint; no delay is longer than `longest`.
    #[must_use]
    pub fn new(seed: u64, endpoint: u64, longest: Duration) -> Self {
        Self { root: mix(mix(seed) ^ endpoint), longest }
    }

    /// Returns an evenly spread number for a choice about `a` (an operation) and `b` (one of its pieces, or zero).
    #[must_use]
    pub fn number(&self, choice: Choice, a: u64, b: u64) -> u64 {
        mix(mix(mix(self.root ^ choice as u64) ^ a) ^ b)
    }

    /// Returns 32 bits of [`number`](Self::number).
    #[must_use]
    pub fn word(&self, choice: Choice, a: u64, b: u64) -> u32 {
        (self.number(choice, a, b) >> 32).try_into().unwrap_or(u32::MAX)
    }

    /// Returns whether a choice falls on the one side that comes up once in `n` (at least 1).
    #[must_use]
    pub fn once_in(&self, n: u64, choice: Choice, a: u64) -> bool {
        self.number(choice, a, 1).is_multiple_of(n.max(1))
    }

    /// Returns a delay: mostly short, at most an eighth of the longest; once in [`LATE_ONCE_IN`], at least half of it. So
    /// what is late is overtaken by much of what comes after it.
    #[must_use]
    pub fn delay(&self, choice: Choice, a: u64, b: u64) -> Duration {
        let nanos = u64::try_from(self.longest.as_nanos()).unwrap_or(u64::MAX);
        let number = self.number(choice, a, b);
        let late = number.is_multiple_of(LATE_ONCE_IN);
        let (from, room) = if late { (nanos / 2, nanos / 2) } else { (0, nanos / 8) };
        // The upper half of the product: evenly spread, and no division.
        let part = (u128::from(number) * u128::from(room)) >> 64;
        Duration::from_nanos(from + u64::try_from(part).unwrap_or(room))
    }
}

/// A bijection of 64-bit numbers in which neighbours have nothing in common (SplitMix64's step).
fn mix(n: u64) -> u64 {
    let n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(seed: u64, endpoint: u64) -> Vec<u64> {
        let disorder = Disorder::new(seed, endpoint, Duration::from_micros(200));
        let mut order: Vec<u64> = (0..64).collect();
        order.sort_by_key(|&op| disorder.delay(Choice::Start, op, 0));
        order
    }

    #[test]
    fn the_order_follows_from_the_seed_and_the_endpoint() {
        assert_eq!(order(7, 0), order(7, 0));
        assert_ne!(order(7, 0), order(8, 0));
        assert_ne!(order(7, 0), order(7, 1));
        assert_ne!(order(7, 0), (0..64).collect::<Vec<_>>());
    }

    #[test]
    fn delays_fill_their_range_and_stay_in_it() {
        let longest = Duration::from_micros(200);
        let disorder = Disorder::new(3, 0, longest);
        let delays: Vec<_> = (0..1000).map(|op| disorder.delay(Choice::Event, op, 0)).collect();
        let between = |low: u32, high: u32| {
            delays
                .iter()
                .filter(|delay| (longest * low / 16..longest * high / 16).contains(*delay))
                .count()
        };
        assert_eq!((between(0, 16), between(2, 8)), (1000, 0));
        assert!((700..800).contains(&between(0, 2)), "{}", between(0, 2));
        assert!(
            between(0, 1) > 300
                && between(1, 2) > 300
                && between(8, 12) > 90
                && between(12, 16) > 90
        );
        let still = Disorder::new(3, 0, Duration::ZERO);
        assert_eq!(still.delay(Choice::Event, 1, 0), Duration::ZERO);
    }

    #[test]
    fn once_in_n_is_about_that_often() {
        let disorder = Disorder::new(5, 0, Duration::ZERO);
        let often = (0..32_000).filter(|&n| disorder.once_in(32, Choice::Full, n)).count();
        assert!((800..1200).contains(&often), "{often} of 32000");
    }
}
