//! Warps that stand by, asked for short copies of every kind, bit by bit, while they come and go.
//!
//! Up to four at a time, from and to anywhere, with room around each, which is compared as well.

use crate::rig::{Gpu, LIMIT, Random};
use immwire::core::id::Time;
use immwire::core::standby::{Ended, Errand, IDLE, SEATS, SHIFT, SHORT_BYTES, Seat};
use immwire_cuda::{DeviceMemory, PinnedMemory, Standby};
use serde_json::{Value, json};
use std::error::Error;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Bytes around each target.
const ROOM: usize = 256;
/// What one copy has of each memory.
const PART: usize = SHORT_BYTES as usize + 2 * ROOM;
const SPAN: usize = SEATS * PART;
/// After so many rounds they are left to go.
const STAY: usize = 40;

struct Memories {
    source: PinnedMemory,
    before: PinnedMemory,
    landed: PinnedMemory,
    host: PinnedMemory,
    sources: Vec<DeviceMemory>,
    targets: Vec<DeviceMemory>,
}

/// A copy that was asked for: its bytes, where they are in the source, and where they go in its part.
struct Asked {
    seat: usize,
    bytes: usize,
    from: usize,
    at: usize,
}

/// So many rounds on each GPU.
pub(crate) fn run(gpus: &[Gpu], rounds: usize) -> Outcome<Value> {
    let mut random = Random(11);
    let mut source = gpus[0].pinned(SPAN)?;
    let mut before = gpus[0].pinned(SPAN)?;
    random.fill(source.as_mut_slice());
    random.fill(before.as_mut_slice());
    let each = || gpus.iter().map(|gpu| gpu.memory(SPAN)).collect::<Result<Vec<_>, _>>();
    let (sources, targets) = (each()?, each()?);
    for (gpu, memory) in gpus.iter().zip(&sources) {
        gpu.move_range(source.address(), memory.address(), SPAN)?;
    }
    let (landed, host) = (gpus[0].pinned(SPAN)?, gpus[0].pinned(SPAN)?);
    let mut memories = Memories { source, before, landed, host, sources, targets };
    let mut made = [0_u64; 2];
    for gpu in gpus {
        let standby = gpu.plain.standby()?;
        let done = round_after_round(gpu, &standby, &mut memories, &mut random, rounds)?;
        made = [made[0] + done[0], made[1] + done[1]];
    }
    Ok(json!({ "by_warps": made[0], "asked_too_late": made[1] }))
}

fn round_after_round(
    gpu: &Gpu,
    standby: &Standby,
    memories: &mut Memories,
    random: &mut Random,
    rounds: usize,
) -> Outcome<[u64; 2]> {
    let seats: Vec<Seat<'_>> =
        (0..SEATS).filter_map(|at| standby.seat(at).and_then(Seat::new)).collect();
    let mut asker = immwire::core::standby::Standby::new();
    let mut counts = [0; 2];
    // Two short copies at one time: from then on they are wanted whenever they have gone.
    let _ = asker.send(Time::ZERO, &seats);
    for round in 0..rounds {
        let places = 1 + memories.sources.len();
        let (from, to) = (random.below(places), random.below(places));
        let source =
            memories.sources.get(from).map_or(memories.source.address(), |it| it.address());
        let target = memories.targets.get(to).map_or(memories.host.address(), |it| it.address());
        gpu.move_range(memories.before.address(), target, SPAN)?;
        let mut asked = Vec::new();
        let wanted = 1 + random.below(SEATS);
        let started = Instant::now();
        while asked.len() < wanted {
            let bytes = match random.below(4) {
                0 => random.below(64),
                1 => 16 * random.below(PART / 16 - ROOM / 8),
                2 => random.below(SHORT_BYTES as usize + 1),
                _ => SHORT_BYTES as usize,
            };
            let step = random.pick(&[1, 4, 16]);
            let from = random.below((SPAN - bytes) / step + 1) * step;
            let at = random.below((PART - ROOM - bytes) / step + 1) * step;
            let part = target + (asked.len() * PART) as u64;
            let errand =
                Errand { src: source + from as u64, dst: part + at as u64, len: bytes.try_into()? };
            match asker.ask(errand, &seats) {
                Some(seat) => asked.push(Asked { seat, bytes, from, at }),
                // Those that have gone, and what was asked of them, are looked at below.
                None if !asked.is_empty() => break,
                None => {
                    if let Some(launch) = asker.send(Time::ZERO, &seats) {
                        // SAFETY: all that is asked for lies in memory that outlives the launch, which is waited for below and at the
                        // end; nobody else touches it meanwhile; the core's asker alone writes the seats.
                        unsafe { standby.launch(launch, IDLE, SHIFT)? };
                    }
                }
            }
            if started.elapsed() > LIMIT {
                return Err("no warp comes".into());
            }
        }
        let mut was_made = vec![None; asked.len()];
        while was_made.contains(&None) {
            for (made, asked) in was_made.iter_mut().zip(&asked) {
                if made.is_none() {
                    *made = asker.look(asked.seat, seats[asked.seat]);
                }
            }
            if started.elapsed() > LIMIT {
                return Err("a warp neither copies nor goes".into());
            }
        }
        gpu.move_range(target, memories.landed.address(), SPAN)?;
        let mut expected = memories.before.as_slice().to_vec();
        for (part, (made, asked)) in was_made.iter().zip(&asked).enumerate() {
            let Asked { bytes, from, at, .. } = *asked;
            if *made == Some(Ended::Done) {
                let to = part * PART + at;
                expected[to..to + bytes]
                    .copy_from_slice(&memories.source.as_slice()[from..from + bytes]);
            }
            counts[usize::from(*made != Some(Ended::Done))] += 1;
        }
        if expected != memories.landed.as_slice() {
            return Err(format!("round {round}: from {from} to {to}: wrong bytes").into());
        }
        if round % STAY == STAY - 1 {
            std::thread::sleep(2 * IDLE);
        }
    }
    Ok(counts)
}
