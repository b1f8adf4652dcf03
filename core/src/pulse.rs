//! When it is seen whether a peer is there, of which nothing is heard.
//!
//! A peer whose process is gone has no queue pairs any more, and what is sent to it fails; but it may be that nothing is
//! sent. So between each two NICs between which nothing has come or got through for a while, something is, that costs
//! the peer nothing. Knows no queue pair: what is heard comes in, what is to be asked comes out.
//!
//! # Invariants
//!
//! 1. What falls silent is asked within two times [`PERIOD`], or at once when there is reason to think that it broke.
//! 2. What was heard since the last look is not asked.
//!
//! The tests below run all short sequences.

use core::time::Duration;

use crate::id::{NicIndex, Time};

/// How often it is looked.
pub const PERIOD: Duration = Duration::from_secs(1);

/// One peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Pulse {
    due: Time,
    /// A bit for each NIC.
    heard: u8,
}

impl Pulse {
    /// Something has come or got through between the NICs of that number.
    #[inline]
    pub const fn hear(&mut self, nic: NicIndex) {
        self.heard |= 1_u8.unbounded_shl(nic as u32);
    }

    /// Something has broken: what else has is to be seen now, whatever was heard before.
    pub const fn doubt(&mut self, now: Time) {
        *self = Self { due: now, heard: 0 };
    }

    /// When it is next looked.
    #[must_use]
    pub const fn due(&self) -> Time {
        self.due
    }

    /// The NICs between which nothing was heard since it was last looked, a bit for each; `None` if it is not looked now.
    pub fn look(&mut self, now: Time) -> Option<u8> {
        if now < self.due {
            return None;
        }
        let silent = !self.heard;
        *self = Self { due: now.after(PERIOD), heard: 0 };
        Some(silent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks in a period.
    const TICKS: u32 = 3;

    /// Two NICs, either of which is heard in a tick or not, or something breaks, in all sequences of eight ticks.
    #[test]
    fn who_is_silent_is_asked_soon_and_nobody_else() {
        let (mut asked, mut spared) = (0, 0);
        for word in 0..5_usize.pow(8) {
            let mut pulse = Pulse::default();
            // When each was last heard, and last looked at.
            let (mut heard, mut looked) = ([None; 2], Time::ZERO);
            let mut silent_since = [Time::ZERO; 2];
            for tick in 0..8_u32 {
                let now = Time::ZERO.after(PERIOD * tick / TICKS);
                let event = word / 5_usize.pow(tick) % 5;
                for nic in 0..2_u8 {
                    let at = usize::from(nic);
                    if event < 4 && event & 1 << nic != 0 {
                        pulse.hear(nic);
                        (heard[at], silent_since[at]) = (Some(now), now);
                    }
                }
                if event == 4 {
                    pulse.doubt(now);
                    (heard, looked) = ([None; 2], now);
                }
                let due = pulse.due() <= now;
                let silent = pulse.look(now);
                assert_eq!(silent.is_some(), due);
                assert!(event != 4 || silent == Some(u8::MAX), "it is looked at once");
                for at in 0..2 {
                    let is_asked = silent.is_some_and(|silent| silent & 1 << at != 0);
                    if is_asked {
                        assert!(heard[at].is_none_or(|heard| heard < looked), "it was heard");
                        silent_since[at] = now;
                        asked += 1;
                    } else {
                        let limit = silent_since[at].after(PERIOD * 2);
                        assert!(now < limit, "{word}: nobody has asked");
                        spared += 1;
                    }
                }
                if silent.is_some() {
                    // What is heard in this tick from now on counts for the next look.
                    looked = now.after(Duration::from_nanos(1));
                }
            }
        }
        assert!(asked > 1000 && spared > 1000, "{asked} {spared}");
    }
}
