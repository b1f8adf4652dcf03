//! Disorder: the order in which pieces are copied, and delays, from a seed.

use crate::config;
use std::time::Duration;

/// The longest delay.
const LONGEST: Duration = Duration::from_micros(200);
/// Delays within one copy, about.
const PAUSES: u64 = 4;

/// Numbers of one stream (splitmix64).
#[derive(Debug)]
pub(crate) struct Random {
    state: u64,
    delays: bool,
}

impl Random {
    /// Of the process's `stream`-th stream.
    pub(crate) fn new(stream: u64) -> Self {
        let seed = config::get().ok().and_then(|config| config.seed);
        let state = seed.unwrap_or(0).wrapping_add(stream.wrapping_mul(0xD134_2543_DE82_EF95));
        Self { state, delays: seed.is_some() }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// What another generator may start from.
    pub(crate) fn seed(&mut self) -> u64 {
        self.next()
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// Waits a while, if there is a seed.
    pub(crate) fn delay(&mut self) {
        if self.delays {
            let most = u64::try_from(LONGEST.as_nanos()).unwrap_or(0);
            std::thread::sleep(Duration::from_nanos(self.below(most + 1)));
        }
    }

    /// Calls `f` once with each number below `count`, in a mixed order, with a few delays in between.
    pub(crate) fn each(&mut self, count: u64, mut f: impl FnMut(u64)) {
        // A step that has no factor in common with the count comes by every number.
        let mut step = self.below(count) | 1;
        while greatest_common_factor(step, count) > 1 {
            step += 2;
        }
        let mut at = self.below(count);
        for _ in 0..count {
            if self.delays && self.below(count) < PAUSES {
                self.delay();
            }
            f(at);
            at = (at + step) % count;
        }
    }
}

fn greatest_common_factor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_factor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn every_number_once_and_not_in_order() {
        let mut mixed = 0;
        for count in 0..200 {
            let mut random = Random { state: count, delays: false };
            let mut seen = Vec::new();
            random.each(count, |i| seen.push(i));
            mixed += u32::from(!seen.is_sorted());
            seen.sort_unstable();
            assert_eq!(seen, (0..count).collect::<Vec<_>>());
        }
        assert!(mixed > 190);
    }
}
