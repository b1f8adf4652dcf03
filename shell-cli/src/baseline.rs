//! What the machine does without an engine: the loops that ours are compared with.
//!
//! Each loop does a benchmark's work and nothing else: no queue, no counter, no peer to find. They
//! take raw memory, so that the bytes can be the very ones the benchmark moves.
//!
//! # Invariants
//!
//! - A copy loop writes exactly the bytes that the same number of transfers would.
//! - Nothing here waits without a deadline.

use crate::shared::SharedMemory;
use std::hint::{black_box, spin_loop};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

/// A source and a destination of `slots` pieces of `slot_bytes` each, apart from one another.
///
/// Transfers in flight have a slot each, so a loop walks the slots as the transfers do.
#[derive(Debug, Clone, Copy)]
pub struct Slots {
    src: *const u8,
    dst: *mut u8,
    slot_bytes: usize,
    slots: usize,
}

impl Slots {
    /// The two areas as slots. `None` if there is no slot or the areas' size overflows.
    ///
    /// # Safety
    ///
    /// Until the value and its copies are gone: `src` is valid for reads and `dst` for writes of
    /// `slot_bytes * slots` bytes, the areas do not overlap, and no other thread of this process
    /// accesses them while a method runs.
    #[must_use]
    pub unsafe fn new(
        src: *const u8,
        dst: *mut u8,
        slot_bytes: usize,
        slots: usize,
    ) -> Option<Self> {
        let total = slot_bytes.checked_mul(slots)?;
        (slots > 0 && isize::try_from(total).is_ok()).then_some(Self {
            src,
            dst,
            slot_bytes,
            slots,
        })
    }

    /// Copies the first `bytes` (at most a slot's) of `count` slots, wrapping around; returns how long
    /// that took. Allocates nothing.
    #[must_use]
    pub fn copy(&self, bytes: usize, count: usize) -> Duration {
        let bytes = bytes.min(self.slot_bytes);
        let start = Instant::now();
        let mut slot = 0;
        for _ in 0..count {
            let offset = slot * self.slot_bytes;
            // SAFETY: `slot < self.slots`, so the piece is inside both areas, which `new`'s caller
            // promised to be valid and apart.
            unsafe {
                self.src.add(offset).copy_to_nonoverlapping(self.dst.add(offset), bytes);
            }
            slot += 1;
            if slot == self.slots {
                slot = 0;
            }
        }
        start.elapsed()
    }

    /// As [`copy`](Self::copy), and after each slot adds one to `arrivals` with release: the least
    /// that tells a receiver of each write. Returns how long `count` took.
    #[must_use]
    pub fn copy_and_count(&self, bytes: usize, count: usize, arrivals: &AtomicU64) -> Duration {
        let bytes = bytes.min(self.slot_bytes);
        let start = Instant::now();
        let mut slot = 0;
        for _ in 0..count {
            let offset = slot * self.slot_bytes;
            // SAFETY: as in `copy`.
            unsafe {
                self.src.add(offset).copy_to_nonoverlapping(self.dst.add(offset), bytes);
            }
            // Release: who sees the count sees the slot.
            arrivals.fetch_add(1, Release);
            slot += 1;
            if slot == self.slots {
                slot = 0;
            }
        }
        start.elapsed()
    }

    /// Copies slot `from[i]` to slot `to[i]` for every `i` of the shorter list, in order, all of it `count` times;
    /// returns how long that took, or `None`, having copied nothing, if a number is not a slot.
    #[must_use]
    pub fn copy_pages(&self, from: &[u32], to: &[u32], count: u64) -> Option<Duration> {
        let inside = |list: &[u32]| list.iter().all(|slot| (*slot as usize) < self.slots);
        if !inside(from) || !inside(to) {
            return None;
        }
        let start = Instant::now();
        for _ in 0..count {
            // Or all times could be made one.
            let Self { src, dst, slot_bytes, .. } = *black_box(self);
            for (from, to) in from.iter().zip(to) {
                let (from, to) = (*from as usize * slot_bytes, *to as usize * slot_bytes);
                // SAFETY: all numbers were checked above to be slots, so both pieces are inside.
                unsafe {
                    src.add(from).copy_to_nonoverlapping(dst.add(to), slot_bytes);
                }
            }
        }
        Some(start.elapsed())
    }

    /// Copies the first `bytes` (at most a slot's) of the first slot of each of `all`, all of it `count` times; returns
    /// how long that took.
    #[must_use]
    pub fn scatter(all: &[Self], bytes: usize, count: u64) -> Duration {
        let start = Instant::now();
        for _ in 0..count {
            for Self { src, dst, slot_bytes, .. } in black_box(all) {
                // SAFETY: `new` gives no value without a slot, and its caller promised both to be valid and apart.
                unsafe { src.copy_to_nonoverlapping(*dst, bytes.min(*slot_bytes)) };
            }
        }
        start.elapsed()
    }
}

/// Why a ping-pong stopped early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PingPongError {
    /// The other side did not answer.
    #[error("the other side of the baseline did not answer turn {turn} within {within:?}")]
    Silent {
        /// The turn that was waited for.
        turn: u64,
        /// For how long.
        within: Duration,
    },
    /// The flag came before its payload, or the payload was another's.
    #[error("turn {turn} of the baseline carried {found:#x} instead")]
    WrongPayload {
        /// The turn that was waited for.
        turn: u64,
        /// What was in its place.
        found: u64,
    },
    /// The payload does not fit the shared memory.
    #[error(
        "a payload of {payload_bytes} bytes does not fit {memory_bytes} bytes of shared memory"
    )]
    DoesNotFit {
        /// Bytes of one message.
        payload_bytes: usize,
        /// Bytes there are.
        memory_bytes: usize,
    },
}

/// Which of the two processes this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Sends first.
    Ping,
    /// Answers.
    Pong,
}

/// Bytes between a flag and what follows, so that neighbours do not share a line that is prefetched
/// in pairs.
const LINE: usize = 128;

/// A bare ping-pong over shared memory: payload stored into its own lines, then a flag in another
/// line with release; the other side polls the flag with acquire, checks the payload, answers.
///
/// The least that two processes can do to hand bytes to each other, hence the baseline of latency.
#[derive(Debug)]
pub struct PingPong<'a> {
    memory: &'a SharedMemory,
    mine: usize,
    theirs: usize,
    payload: Vec<u8>,
    turn: u64,
}

impl<'a> PingPong<'a> {
    /// Bytes of shared memory that messages of `payload_bytes` need.
    #[must_use]
    pub fn memory_bytes(payload_bytes: usize) -> usize {
        Self::half_bytes(payload_bytes).saturating_mul(2)
    }

    fn half_bytes(payload_bytes: usize) -> usize {
        payload_bytes.max(8).div_ceil(LINE).saturating_mul(LINE).saturating_add(LINE)
    }

    /// One side over `memory`, which is all zero before the first of the two is made. A message has
    /// at least 8 bytes; its first 8 carry the turn.
    ///
    /// # Errors
    ///
    /// [`PingPongError::DoesNotFit`].
    pub fn new(
        memory: &'a SharedMemory,
        payload_bytes: usize,
        side: Side,
    ) -> Result<Self, PingPongError> {
        let half = Self::half_bytes(payload_bytes);
        if Self::memory_bytes(payload_bytes) > memory.len() {
            return Err(PingPongError::DoesNotFit { payload_bytes, memory_bytes: memory.len() });
        }
        let (mine, theirs) = if side == Side::Ping { (0, half) } else { (half, 0) };
        let payload = vec![0x5a; payload_bytes.max(8)];
        Ok(Self { memory, mine, theirs, payload, turn: 0 })
    }

    /// Sends this turn's message.
    fn send(&mut self) {
        let (Some(flag), Some(first)) =
            (self.memory.word(self.mine), self.memory.word(self.mine + LINE))
        else {
            return; // PROOF: `new` checked that both halves fit; halves and lines are multiples of 8.
        };
        // The turn goes through an atomic, the rest by a plain copy: no one reads it before the flag.
        first.store(self.turn, Relaxed);
        if let Some(rest) = self.payload.get(8..).filter(|rest| !rest.is_empty()) {
            // SAFETY: `new` checked that the half, of which this is a part, is inside the mapping;
            // `payload` is private memory; the other side reads only between flag and answer.
            unsafe {
                let to = self.memory.as_ptr().add(self.mine + LINE + 8);
                rest.as_ptr().copy_to_nonoverlapping(to, rest.len());
            }
        }
        // Release: who sees the flag sees the payload.
        flag.store(self.turn, Release);
    }

    /// Waits for this turn's message and takes it.
    fn receive(&mut self, within: Duration) -> Result<(), PingPongError> {
        const SPINS_PER_LOOK: u32 = 1 << 14;
        let (Some(flag), Some(first)) =
            (self.memory.word(self.theirs), self.memory.word(self.theirs + LINE))
        else {
            return Ok(()); // PROOF: as in `send`.
        };
        let mut deadline = None;
        let mut spins = 0;
        while flag.load(Acquire) != self.turn {
            spin_loop();
            spins += 1;
            if spins == SPINS_PER_LOOK {
                spins = 0;
                let now = Instant::now();
                if now >= *deadline.get_or_insert(now + within) {
                    return Err(PingPongError::Silent { turn: self.turn, within });
                }
            }
        }
        let found = first.load(Relaxed);
        if found != self.turn {
            return Err(PingPongError::WrongPayload { turn: self.turn, found });
        }
        Ok(())
    }

    /// One round trip as the side that starts.
    ///
    /// # Errors
    ///
    /// [`PingPongError`]: no answer `within` that time, or a wrong one.
    pub fn ping(&mut self, within: Duration) -> Result<(), PingPongError> {
        self.turn += 1;
        self.send();
        self.receive(within)
    }

    /// One round trip as the side that answers.
    ///
    /// # Errors
    ///
    /// As [`ping`](Self::ping).
    pub fn pong(&mut self, within: Duration) -> Result<(), PingPongError> {
        self.turn += 1;
        self.receive(within)?;
        self.send();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn slots(src: &[u8], dst: &mut [u8], slot_bytes: usize) -> Slots {
        assert_eq!(src.len(), dst.len());
        // SAFETY: both slices live for the whole of each test, and are used by its thread alone.
        unsafe { Slots::new(src.as_ptr(), dst.as_mut_ptr(), slot_bytes, src.len() / slot_bytes) }
            .unwrap()
    }

    #[test]
    fn a_loop_copies_the_slots_that_transfers_would() {
        let src: Vec<u8> = (1..=24).collect();
        for count in 0..8 {
            let mut dst = vec![0; 24];
            let arrivals = AtomicU64::new(0);
            let _ = slots(&src, &mut dst, 6).copy(6, count);
            let done = (count * 6).min(24);
            assert_eq!(dst[..done], src[..done]);
            assert!(dst[done..].iter().all(|byte| *byte == 0));
            dst.fill(0);
            let _ = slots(&src, &mut dst, 6).copy_and_count(7, count, &arrivals);
            assert_eq!(dst[..done], src[..done]);
            assert_eq!(arrivals.into_inner(), count as u64);
            dst.fill(0);
            let _ = slots(&src, &mut dst, 6).copy(2, count);
            let expected = |at: usize| if at % 6 < 2 && at < done { src[at] } else { 0 };
            assert!(dst.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
        }
    }

    #[test]
    fn pages_land_where_the_lists_say_and_bad_lists_copy_nothing() {
        let src: Vec<u8> = (0..16).collect();
        let mut dst = vec![99; 16];
        let before = dst.clone();
        assert!(slots(&src, &mut dst, 4).copy_pages(&[3, 0, 1], &[0, 2, 3], 0).is_some());
        assert_eq!(dst, before);
        assert!(slots(&src, &mut dst, 4).copy_pages(&[3, 0, 1], &[0, 2, 3], 2).is_some());
        assert_eq!(dst, [12, 13, 14, 15, 99, 99, 99, 99, 0, 1, 2, 3, 4, 5, 6, 7]);
        let before = dst.clone();
        assert!(slots(&src, &mut dst, 4).copy_pages(&[0, 4], &[1, 1], 1).is_none());
        assert!(slots(&src, &mut dst, 4).copy_pages(&[0, 1], &[1, u32::MAX], 1).is_none());
        assert_eq!(dst, before);
    }

    #[test]
    fn a_scatter_copies_the_first_slot_of_each() {
        let src: Vec<u8> = (1..=12).collect();
        for (bytes, count) in [(4, 2), (6, 1), (9, 1), (12, 3), (9, 0)] {
            let (mut one, mut other) = ([0; 12], [0; 12]);
            let all = [slots(&src, &mut one, 6), slots(&src, &mut other, 12)];
            let _ = Slots::scatter(&all, bytes, count);
            for (dst, slot_bytes) in [(one, 6), (other, 12)] {
                let copied = if count > 0 { bytes.min(slot_bytes) } else { 0 };
                assert_eq!(dst[..copied], src[..copied], "{bytes} bytes, {count} times");
                assert!(
                    dst[copied..].iter().all(|byte| *byte == 0),
                    "{bytes} bytes, {count} times"
                );
            }
        }
    }

    #[test]
    fn no_slots_and_sizes_that_overflow_are_refused() {
        let (src, dst) = (std::ptr::dangling(), std::ptr::dangling_mut());
        for (bytes, slots) in [(8, 0), (usize::MAX, 2), (usize::MAX, 1)] {
            // SAFETY: nothing is accessed; a value would not be used.
            assert!(unsafe { Slots::new(src, dst, bytes, slots) }.is_none());
        }
    }

    #[test]
    fn ping_pong_carries_every_turn_both_ways() {
        for payload in [0, 8, 9, 128, 4096] {
            let memory =
                SharedMemory::create(PingPong::memory_bytes(payload) as u64, false).unwrap();
            let within = Duration::from_secs(20);
            thread::scope(|scope| {
                scope.spawn(|| {
                    let mut pong = PingPong::new(&memory, payload, Side::Pong).unwrap();
                    for _ in 0..50 {
                        pong.pong(within).unwrap();
                    }
                });
                let mut ping = PingPong::new(&memory, payload, Side::Ping).unwrap();
                for _ in 0..50 {
                    ping.ping(within).unwrap();
                }
            });
            let half = PingPong::half_bytes(payload);
            for message in [LINE, half + LINE] {
                for at in message + 8..message + payload {
                    // SAFETY: inside of the memory, which nobody writes any more.
                    assert_eq!(unsafe { memory.as_ptr().add(at).read() }, 0x5a, "{payload}: {at}");
                }
            }
        }
    }

    #[test]
    fn silence_a_wrong_payload_and_too_little_memory_are_told() {
        let memory = SharedMemory::create(PingPong::memory_bytes(8) as u64, false).unwrap();
        let within = Duration::from_millis(5);
        let mut ping = PingPong::new(&memory, 8, Side::Ping).unwrap();
        assert_eq!(ping.ping(within), Err(PingPongError::Silent { turn: 1, within }));
        let (theirs, turn) = (ping.theirs, ping.turn + 1);
        memory.word(theirs).unwrap().store(turn, Relaxed);
        assert_eq!(ping.ping(within), Err(PingPongError::WrongPayload { turn, found: 0 }));
        assert_eq!(
            PingPong::new(&memory, 4096, Side::Ping).map(|_| ()),
            Err(PingPongError::DoesNotFit { payload_bytes: 4096, memory_bytes: memory.len() })
        );
    }
}
