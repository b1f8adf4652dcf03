//! NICs and paths lost in the middle of everything: two engines on the simulated fabric lose and regain
//! NICs and single paths while they write to each other. As long as one path is left, every transfer is
//! done, every write is counted exactly once, and the bytes are those that were sent.
//!
//! A failure names its seed. That the check has teeth is shown on a fabric whose fences leak, and on one
//! whose receipts lie.

#![expect(clippy::unwrap_used, reason = "tests may")]

use std::io::Write as _;
use std::time::{Duration, Instant};

use immwire::provider::Path;
use immwire::sim::{Breaches, Fabric, FabricConfig, NicModel, Sabotage, What};
use immwire::{
    DownReason, Driver, End, ImmCounter, PagedWrite, Pages, PeerId, PeerState, Region, SingleWrite,
    Transfer, TransferEngine,
};

const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);
const SEEDS: u64 = 150;
const STEPS: u64 = 80;

/// A xorshift generator: the same programs on every machine.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        (0..8).for_each(|_| {
            random.below(2);
        });
        random
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }

    fn nic(&mut self, end: usize) -> u8 {
        u8::try_from(self.below(end as u64)).unwrap()
    }
}

/// Message number `n` to one side.
fn message(n: usize) -> Vec<u8> {
    format!("message {n}").into_bytes()
}

/// One engine, and what the other one has sent it.
struct Side {
    engine: TransferEngine,
    peer: PeerId,
    counter: ImmCounter,
    nics: usize,
    /// Writes that the counter is to see.
    due: u64,
    /// Messages that were sent to it, by number.
    messages: usize,
}

/// From, to, how many bytes.
type Moved = (u64, u64, u64);

/// What was sent, and where it was to arrive.
struct Sent {
    transfer: Transfer,
    /// Source, destination, and which bytes of the one go where in the other.
    bytes: Option<(Region, Region, Vec<Moved>)>,
}

struct World {
    fabric: Fabric,
    drivers: Vec<Driver>,
    sides: [Side; 2],
    random: Random,
    sent: Vec<Sent>,
}

/// What happened in a run.
#[derive(Debug, Default, Clone, Copy)]
struct Figures {
    broken: usize,
    settled: usize,
    lost: u64,
    restored: usize,
}

impl World {
    fn new(seed: u64, model: NicModel, config: FabricConfig) -> Self {
        let mut random = Random::new(seed);
        let fabric = Fabric::new(seed, config);
        fabric.keep_trace(1_000_000);
        let counts = [2, 2].map(|least| least + usize::from(random.nic(3)));
        let builder =
            || TransferEngine::builder().transfers(64).counters(80).peers(4).mailbox(4, 1024);
        let made = counts.map(|nics| fabric.engine(builder(), &vec![model; nics]).unwrap());
        let (engines, mut drivers): (Vec<_>, Vec<_>) = made.into_iter().unzip();
        let there = drivers[0].add_peer(engines[1].address()).unwrap();
        fabric.wait_peer(&mut drivers, &engines[0], there, SECOND).unwrap();
        let back = drivers[1].add_peer(engines[0].address()).unwrap();
        fabric.wait_peer(&mut drivers, &engines[1], back, SECOND).unwrap();
        let side = |at: usize, peer| Side {
            engine: engines[at].clone(),
            peer,
            counter: engines[at].counter().unwrap(),
            nics: counts[at],
            due: 0,
            messages: 0,
        };
        let sides = [side(0, there), side(1, back)];
        Self { fabric, drivers, sides, random, sent: Vec::new() }
    }

    /// Memory with content, and as much of the other side's.
    fn regions(&mut self, from: usize, len: u64) -> (Region, Region) {
        let bytes: Vec<u8> = (0..len).map(|_| self.random.nic(256)).collect();
        let src = self.sides[from].engine.alloc(bytes.len()).unwrap();
        src.write(0, &bytes).unwrap();
        (src, self.sides[1 - from].engine.alloc(bytes.len()).unwrap())
    }

    fn single(&mut self, from: usize, len: u64) {
        let (src, dst) = self.regions(from, len);
        let (peer, imm) = (self.sides[from].peer, self.sides[1 - from].counter.tag());
        let desc = dst.desc();
        let write = SingleWrite {
            peer,
            src: &src,
            src_offset: 0,
            dst: &desc,
            dst_offset: 0,
            len,
            imm: Some(imm),
        };
        let Ok(transfer) = self.sides[from].engine.submit_single_write(&write) else { return };
        self.sides[1 - from].due += 1;
        self.sent.push(Sent { transfer, bytes: Some((src, dst, vec![(0, 0, len)])) });
    }

    fn pages(&mut self, from: usize, pages: u64) {
        const PAGE: u64 = 512;
        let (src, dst) = self.regions(from, pages * PAGE);
        let (peer, imm) = (self.sides[from].peer, self.sides[1 - from].counter.tag());
        let number = |page: u64| u32::try_from(page).unwrap();
        let here: Vec<u32> = (0..pages).map(number).collect();
        let there: Vec<u32> = (0..pages).map(|page| number((page * 7 + 3) % pages)).collect();
        let desc = dst.desc();
        let write = PagedWrite {
            peer,
            page_bytes: PAGE,
            src: &src,
            src_pages: Pages { indices: here.clone().into(), stride: PAGE, offset: 0 },
            dst: &desc,
            dst_pages: Pages { indices: there.clone().into(), stride: PAGE, offset: 0 },
            imm: Some(imm),
        };
        let Ok(transfer) = self.sides[from].engine.submit_paged_writes(&write) else { return };
        self.sides[1 - from].due += pages;
        let moved = here.iter().zip(&there);
        let moved = moved.map(|(from, to)| (u64::from(*from) * PAGE, u64::from(*to) * PAGE, PAGE));
        self.sent.push(Sent { transfer, bytes: Some((src, dst, moved.collect())) });
    }

    fn step(&mut self) {
        let from = usize::from(self.random.nic(2));
        match self.random.below(12) {
            0..3 => {
                let bits = 4 + self.random.below(16);
                let len = 1 + self.random.below(1 << bits);
                self.single(from, len);
            }
            3 => {
                // Pages go to places of their own: no multiple of 7.
                let pages = 1 + 7 * self.random.below(20) + self.random.below(6);
                self.pages(from, pages);
            }
            4 => {
                let (side, tag) = (&self.sides[from], self.sides[1 - from].counter.tag());
                let Ok(transfer) = side.engine.submit_imm(side.peer, tag, 3) else { return };
                self.sides[1 - from].due += 3;
                self.sent.push(Sent { transfer, bytes: None });
            }
            5 => {
                let side = &self.sides[from];
                let text = message(self.sides[1 - from].messages);
                let Ok(transfer) = side.engine.submit_send(side.peer, &text) else { return };
                self.sides[1 - from].messages += 1;
                self.sent.push(Sent { transfer, bytes: None });
            }
            // NIC 0 stays, and so does the path between both: there is always a way.
            6 => {
                let nic = 1 + self.random.nic(self.sides[from].nics - 1);
                self.fabric.nic_down(u32::try_from(from).unwrap(), nic);
            }
            7 => {
                let nic = self.random.nic(self.sides[from].nics);
                self.fabric.nic_up(u32::try_from(from).unwrap(), nic);
            }
            kind @ 8..10 => {
                let (a, b) = (self.sides[from].nics, self.sides[1 - from].nics);
                let path = Path { nic: self.random.nic(a), remote_nic: self.random.nic(b) };
                let (engine, peer) = (u32::try_from(from).unwrap(), self.sides[from].peer);
                if kind == 9 {
                    self.fabric.mend_path(engine, peer, path);
                } else if (path.nic, path.remote_nic) != (0, 0) {
                    self.fabric.cut_path(engine, peer, path);
                }
            }
            _ => {
                let bits = self.random.below(20);
                let time = Duration::from_nanos(self.random.below(1 << bits));
                self.fabric.run_for(&mut self.drivers, time);
            }
        }
    }

    /// Everything ends, or something is wrong: says what.
    fn finish(mut self) -> Result<Figures, String> {
        for (at, sent) in self.sent.iter().enumerate() {
            let end = self.fabric.wait(&mut self.drivers, &sent.transfer, MINUTE);
            if !matches!(end, Ok(End::Done)) {
                return Err(format!("transfer {at} of {} ended with {end:?}", self.sent.len()));
            }
        }
        // What comes late comes now.
        self.fabric.run_for(&mut self.drivers, SECOND);
        for side in &self.sides {
            let counted = side.counter.available();
            if counted != side.due {
                return Err(format!("{counted} writes were counted of {}", side.due));
            }
            let mut came = Vec::new();
            while let Ok(message) = side.engine.recv(Duration::ZERO) {
                came.push(message.bytes);
            }
            // In any order; each of them, once.
            came.sort();
            let mut due: Vec<_> = (0..side.messages).map(message).collect();
            due.sort();
            if came != due {
                return Err(format!("{} messages came, or others, of {}", came.len(), due.len()));
            }
        }
        for (at, sent) in self.sent.iter().enumerate() {
            let Some((src, dst, moved)) = &sent.bytes else { continue };
            for &(from, to, len) in moved {
                let mut bytes = [0, 1].map(|_| vec![0; usize::try_from(len).unwrap()]);
                src.read(from, &mut bytes[0]).unwrap();
                dst.read(to, &mut bytes[1]).unwrap();
                if bytes[0] != bytes[1] {
                    return Err(format!("transfer {at} wrote something else"));
                }
            }
        }
        if self.fabric.breaches() != Breaches::default() {
            return Err(format!("{:?}", self.fabric.breaches()));
        }
        let mut figures = Figures::default();
        for event in self.fabric.trace() {
            match event.what {
                What::PathBroken { .. } => figures.broken += 1,
                What::PathRestored { .. } => figures.restored += 1,
                What::Settled { undelivered, .. } => {
                    figures.settled += 1;
                    figures.lost += u64::from(undelivered);
                }
                _ => {}
            }
        }
        Ok(figures)
    }
}

fn run(seed: u64, sabotage: Option<(Sabotage, u32)>) -> (Result<Figures, String>, u64) {
    let model = if seed.is_multiple_of(2) { NicModel::CONNECTX7 } else { NicModel::TCP };
    let rough = seed % 4 < 2;
    let config = if rough { FabricConfig::rough() } else { FabricConfig::calm() };
    let mut world = World::new(seed, model, config);
    world.fabric.sabotage(sabotage);
    (0..STEPS).for_each(|_| world.step());
    let fabric = world.fabric.clone();
    (world.finish(), fabric.sabotaged())
}

#[test]
fn no_piece_is_lost_or_counted_twice_while_a_path_is_left() {
    let start = Instant::now();
    let mut all = Figures::default();
    for seed in 0..SEEDS {
        let figures = run(seed, None).0.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        all.broken += figures.broken;
        all.settled += figures.settled;
        all.lost += figures.lost;
        all.restored += figures.restored;
    }
    // Or the programs have become too tame to say anything.
    let enough = all.broken > 900 && all.settled > 2_000 && all.lost > 15_000 && all.restored > 300;
    assert!(enough, "{all:?}");
    let bound = format!(
        "{SEEDS} programs of {STEPS} steps: {} paths broken, {} settled, {} pieces posted again, {} paths restored",
        all.broken, all.settled, all.lost, all.restored
    );
    let faults = [Sabotage::FenceLeaks, Sabotage::ReceiptShort];
    let noticed = faults.iter().filter(|&&fault| is_noticed(fault)).count();
    report(&bound, &format!("{noticed}/{}", faults.len()), start.elapsed());
    assert_eq!(noticed, faults.len(), "a fence that leaks, or a receipt that lies, went unnoticed");
}

/// Whether some program goes wrong because of the fault.
fn is_noticed(fault: Sabotage) -> bool {
    (0..SEEDS).any(|seed| {
        let (outcome, times) = run(seed, Some((fault, 1)));
        outcome.is_err() && times > 0
    })
}

/// An unordered path cannot be fenced: what was in flight on it is the end of the peer, and named.
#[test]
fn where_nobody_can_know_the_peer_is_given_up() {
    for seed in 0..20 {
        let mut world = World::new(seed, NicModel::EFA_200, FabricConfig::calm());
        world.single(0, 1 << 20);
        world.fabric.run_for(&mut world.drivers, Duration::from_micros(10));
        let path = Path { nic: 1, remote_nic: 1 };
        world.fabric.cut_path(0, world.sides[0].peer, path);
        let (peer, sent) = (world.sides[0].peer, world.sent.remove(0));
        let end = world.fabric.wait(&mut world.drivers, &sent.transfer, MINUTE);
        world.fabric.run_for(&mut world.drivers, MINUTE);
        let state = world.sides[0].engine.peer_state(peer);
        let down = matches!(
            state,
            None | Some(PeerState::Down(DownReason::PathLost { .. } | DownReason::Disconnected))
        );
        assert!(down, "seed {seed}: {state:?}");
        // Which side was the first to give up is a matter of time.
        assert!(matches!(end, Ok(End::Quiesced { .. })), "seed {seed}: {end:?}");
    }
}

/// One line of JSON for whoever collects what was established.
fn report(bound: &str, mutants: &str, took: Duration) {
    let Some(path) = std::env::var_os("IMMWIRE_REPORT") else { return };
    let line = format!(
        "{{\"clause\":\"2 Counting\",\"claim\":\"no write is lost or counted twice when NICs and paths go\",\"method\":\"fault programs\",\"bound\":\"{bound}\",\"mutants\":\"{mutants}\",\"seconds\":{:.1}}}\n",
        took.as_secs_f64()
    );
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(line.as_bytes())).unwrap();
}
