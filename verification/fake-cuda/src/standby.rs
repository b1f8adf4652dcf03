//! immwire's warps that stand by, done by the CPU: each looks at its seat by the core's own steps, and copies in a mixed order.
//!
//! Time is slower here than on a GPU by [`SLOWER`]: others wait for a processor, too.

use crate::kernel::Size;
use crate::random::Random;
use crate::reach::Reach;
use crate::stream;
use crate::violation::broken;
use crate::world::World;
use immwire_core::standby::{Errand, SHORT_BYTES, Seat, Warp};
use immwire_cuda::args::{self, StandbyArgs};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SLOWER: u32 = 20;
const STATUS: u64 = args::SEAT_STATUS as u64 * 8;
const WORDS: usize = args::SEAT_BYTES as usize / size_of::<u64>();

/// Copies that were made so.
static MADE: AtomicU64 = AtomicU64::new(0);

/// No driver's: how many copies warps that stand by have made in this process.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_stood_by() -> u64 {
    MADE.load(Ordering::Acquire)
}

/// Warps of this process overlook what they are asked for.
static DEAF: AtomicBool = AtomicBool::new(false);

/// No driver's: has warps that stand by overlook what they are asked for, until they go, or no longer: as if it came too late for each.
#[unsafe(no_mangle)]
extern "C" fn immwire_fake_cuda_deaf(deaf: u32) {
    DEAF.store(deaf != 0, Ordering::Release);
}

fn look(warp: &Warp<'_>) -> Option<Errand> {
    if DEAF.load(Ordering::Acquire) { None } else { warp.look() }
}

/// One launch.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) args: StandbyArgs,
}

impl Launch {
    /// Everything that can be told from the numbers alone is as the header says; else a violation.
    pub(crate) fn check(&self, size: Size) {
        let a = &self.args;
        let threads = args::STANDBY_THREADS;
        if size.grid != [1, 1, 1] || size.block != [threads, 1, 1] || size.shared_bytes != 0 {
            broken!(Geometry, "standby: {size:?}");
        }
        if a.launch == 0 || a.launch >= 1 << 30 || a.reserved != 0 {
            broken!(Geometry, "standby: {a:?}");
        }
    }

    /// Claims the seats. What is asked for at them is claimed when a warp finds it.
    pub(crate) fn claim(&self, world: &World, reach: &mut Reach) {
        let (seats, each) = (u64::from(args::STANDBY_SEATS), u64::from(args::SEAT_BYTES));
        reach.claim_words(&world.memory, self.args.seats, (each, seats), true, "seats");
        if !reach.is_host(self.args.seats) {
            broken!(NotMemory, "seats at {:#x} are not the host's", self.args.seats);
        }
    }

    /// Stands by until its time is over.
    pub(crate) fn run(&self, reach: &mut Reach, random: &mut Random) {
        let a = &self.args;
        let each = u64::from(args::SEAT_BYTES);
        let mut warps = Vec::new();
        for at in (0..u64::from(args::STANDBY_SEATS)).map(|number| a.seats + number * each) {
            let words = reach.whole(at, each, true, "seat") as *const AtomicU64;
            // SAFETY: as many words of memory that is mapped while it is held, which is until this launch has ended; everybody uses
            // them atomically.
            let words = unsafe { std::slice::from_raw_parts(words, WORDS) };
            let Some(seat) = Seat::new(words) else { broken!(Geometry, "no seat at {at:#x}") };
            warps.push((at + STATUS, Warp::arrive(seat, a.launch)));
            random.delay();
        }
        let lasts = |nanos: u64| Duration::from_nanos(nanos) * SLOWER;
        let (idle, shift) = (lasts(a.idle_ns), lasts(a.shift_ns));
        let began = Instant::now();
        let mut last = began;
        while began.elapsed() < shift && last.elapsed() < idle {
            stream::wait_while_held();
            for (status, warp) in &mut warps {
                if let Some(errand) = look(warp) {
                    copy(reach.gpu, errand, random);
                    Reach::new(reach.gpu).announce(*status, |_| warp.done());
                    last = Instant::now();
                }
            }
            std::thread::yield_now();
        }
        // Each goes by itself: meanwhile others are up.
        let mut order = Vec::new();
        random.each(warps.len() as u64, |number| order.push(number));
        for number in order {
            let at = warps.iter().position(|(status, _)| (*status - a.seats) / each == number);
            if let Some((_, warp)) = at.map(|at| warps.swap_remove(at)) {
                warp.go();
                random.delay();
            }
        }
    }
}

/// Copies, in pieces. What was claimed for it is given up: before anybody can know that it is done.
fn copy(gpu: u8, errand: Errand, random: &mut Random) {
    let Errand { src, dst, len } = errand;
    if len > SHORT_BYTES {
        broken!(Geometry, "a warp that stands by is to copy {len} bytes");
    }
    random.delay();
    let mut reach = Reach::new(gpu);
    stream::pieces(random, u64::from(len), |at, bytes| reach.copy(dst + at, src + at, bytes));
    MADE.fetch_add(1, Ordering::Release);
}
