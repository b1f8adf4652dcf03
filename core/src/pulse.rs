//! When it is seen whether a peer is there, of which nothing is heard.
//!
//! A peer whose process is gone has no queue pairs any more, and what is sent to it fails; but it may be that nothing is
//! sent. So between each two NICs between which nothing has come or got through for a while, something is, that costs
//! the peer nothing. Knows no queue pair: what is heard comes in, what is to be asked comes out.
//!
//! A queue pair fails when its device has tried often enough. Some devices try without end (Soft-RoCE does with a retry count
//! of 7), and then it is the [`Watch`] that says when nothing goes on there.
//!
//! # Invariants
//!
//! 1. What falls silent is asked within two times [`PERIOD`], or at once when there is reason to think that it broke.
//! 2. What was heard since the last look is not asked.
//! 3. Something that completes within each [`patience`] is never taken for stuck, and what nothing completes of is so by the
//!    first look after that.
//!
//! The tests below run all short sequences.

use core::time::Duration;

use crate::id::{NicIndex, Time};

/// How often it is looked.
pub const PERIOD: Duration = Duration::from_secs(1);

/// The shortest [`patience`].
pub const PATIENCE_MIN: Duration = Duration::from_secs(1);

/// So many times [`patience`] a path may stand still between NICs of which nobody knows whether they reach each other: sixteen
/// of its longest pieces may have one completion, and a slow network takes a second for them.
pub const UNSEEN: u32 = 8;

/// How long nothing may complete of what is under way on a queue pair: twice as long as a device tries that gives up by itself after
/// the timeouts that it was told, so that it is the first to say so. Of a timeout of 4.096 us times two to `ack_timeout`, after which it is
/// tried again `retry_count` times. A device may take up to four times each timeout (`InfiniBand` Architecture Specification, volume 1, 9.7.6.1.3); for one
/// that takes more than two it is not waited: what it may still do is settled as for any path that broke.
#[must_use]
pub fn patience(ack_timeout: u8, retry_count: u8) -> Duration {
    let timeout = Duration::from_nanos(4096 << ack_timeout.min(31));
    (timeout * (u32::from(retry_count) + 1) * 2).max(PATIENCE_MIN)
}

/// How long a path may stand still until it is given up: without end, as slow, while the lines of both its NICs are whole and its port can be
/// used. Of each NIC's line it is told whether it is whole; `None`: that NIC has none.
#[must_use]
pub const fn standstill(patience: Duration, lines: [Option<bool>; 2], is_usable: bool) -> Duration {
    match lines {
        [Some(true), Some(true)] if is_usable => Duration::MAX,
        [Some(_), Some(_)] => patience,
        _ => patience.saturating_mul(UNSEEN),
    }
}

/// Whether what is under way on a queue pair goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Watch {
    completed: u32,
    /// Since when nothing has; `None` if nothing was under way when it was last looked.
    since: Option<Time>,
}

impl Watch {
    /// Looks: so much has completed up to now, from whatever number it is counted, and `waits` says whether anything is under way. All that has
    /// completed is to be read before that. When it will be stuck, if nothing completes until then; [`Time::NEVER`] if nothing is under way.
    pub fn look(&mut self, now: Time, completed: u32, waits: bool, patience: Duration) -> Time {
        let goes_on = completed != self.completed;
        self.completed = completed;
        self.since = waits.then(|| self.since.filter(|_| !goes_on).unwrap_or(now));
        self.since.map_or(Time::NEVER, |since| since.after(patience))
    }
}

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

    /// It is looked then, at the latest.
    pub fn expect(&mut self, due: Time) {
        self.due = self.due.min(due);
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

    #[test]
    fn it_is_looked_sooner_if_something_is_to_be_seen() {
        let mut pulse = Pulse::default();
        assert_eq!(pulse.look(Time::ZERO), Some(u8::MAX));
        let (sooner, later) = (Time::from_nanos(7), Time::ZERO.after(PERIOD * 2));
        pulse.expect(later);
        assert_eq!(pulse.due(), Time::ZERO.after(PERIOD));
        pulse.expect(sooner);
        assert_eq!((pulse.due(), pulse.look(Time::from_nanos(6))), (sooner, None));
        assert_eq!(pulse.look(sooner), Some(u8::MAX));
        assert_eq!(pulse.due(), sooner.after(PERIOD));
    }

    /// A queue pair that in each tick is posted on, or completes what is under way, or none of it, and is looked at in that tick or
    /// not: all sequences of six ticks.
    #[test]
    fn what_does_not_go_on_is_stuck_and_nothing_else() {
        let patience = Duration::from_secs(2);
        let at = |tick: u32| Time::ZERO.after(Duration::from_secs(tick.into()));
        let (mut stuck, mut sound) = (0, 0);
        for start in [0, u32::MAX] {
            for word in 0..6_usize.pow(6) {
                let mut watch = Watch { completed: start, since: None };
                let (mut posted, mut completed) = (0_u32, start);
                // Since when nothing has completed, of what was there to complete, as the looks have seen it, and as it is.
                let (mut seen, mut waiting) = (None, None);
                let mut last = completed;
                for tick in 0..6_u32 {
                    let event = word / 6_usize.pow(tick) % 6;
                    match event % 3 {
                        1 => posted += 1,
                        2 if posted > 0 => {
                            posted -= 1;
                            completed = completed.wrapping_add(1);
                            waiting = None;
                        }
                        _ => {}
                    }
                    waiting = if posted == 0 { None } else { waiting.or(Some(tick)) };
                    if event < 3 {
                        continue;
                    }
                    let due = watch.look(at(tick), completed, posted > 0, patience);
                    seen = if posted == 0 || completed != last { None } else { seen };
                    seen = if posted == 0 { None } else { seen.or(Some(tick)) };
                    last = completed;
                    assert_eq!(due, seen.map_or(Time::NEVER, |since| at(since + 2)), "{word}");
                    let is_stuck = due <= at(tick);
                    let since = waiting.unwrap_or(tick);
                    assert!(!is_stuck || tick - since >= 2, "{word}: something has completed");
                    if is_stuck { stuck += 1 } else { sound += 1 }
                }
            }
        }
        assert!(stuck > 100 && sound > 10_000, "{stuck} {sound}");
    }

    /// All that can be known of a path's NICs.
    #[test]
    fn a_path_is_slow_as_long_as_its_nics_reach_each_other() {
        let patience = Duration::from_secs(2);
        let all = [None, Some(false), Some(true)];
        for (here, there) in all.into_iter().flat_map(|here| all.map(|there| (here, there))) {
            for is_usable in [false, true] {
                let expected = match (here.zip(there), is_usable) {
                    (None, _) => patience * UNSEEN,
                    (Some((true, true)), true) => Duration::MAX,
                    (Some(_), _) => patience,
                };
                assert_eq!(standstill(patience, [here, there], is_usable), expected);
            }
        }
        let mut watch = Watch::default();
        assert_eq!(watch.look(Time::ZERO, 0, true, Duration::MAX), Time::NEVER);
        // When the line breaks, what it has stood still before counts.
        let later = Time::from_nanos(9);
        assert_eq!(watch.look(later, 0, true, patience), Time::ZERO.after(patience));
    }

    #[test]
    fn patience_is_longer_than_a_device_tries() {
        assert_eq!(patience(14, 7), Duration::from_nanos(4096 << 14) * 16);
        assert_eq!(patience(1, 0), PATIENCE_MIN);
        for (timeout, retries) in (0..=u8::MAX).flat_map(|it| (0..=7).map(move |n| (it, n))) {
            let device = Duration::from_nanos(4096 << timeout.min(31)) * (u32::from(retries) + 1);
            assert!(patience(timeout, retries) > device, "{timeout} {retries}");
        }
    }
}
