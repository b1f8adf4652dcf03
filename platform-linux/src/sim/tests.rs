//! Engines on the fabric: every operation, the models' arithmetic, each fault, and the same run twice.

use std::time::Duration;

use immwire_core::group::{SubmitError, Token, TransferError as Stopped, WorkError, WorkRequest};
use immwire_core::imm::Imm;
use immwire_core::mailbox::{Geometry, HEADER_BYTES};
use immwire_core::plan::{PageRun, PlanError, RunLayout};
use immwire_core::wire::{Hello, Refusal};

use super::*;
use crate::provider::{
    ConnectError, Memory, Provider, Receipt, Registered, RemotePath, Sink, Unfenced,
};
use crate::{
    DownReason, ImmTag, LivenessConfig, MrDesc, PagedWrite, Pages, Region, ScatterWrite,
    SingleWrite, Target, TransferError,
};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const CX7: NicModel = NicModel::CONNECTX7;

/// Engines on a fabric, all of which know each other as far as they were connected.
struct World {
    fabric: Fabric,
    engines: Vec<TransferEngine>,
    drivers: Vec<Driver>,
}

fn builder() -> Builder {
    TransferEngine::builder().transfers(64).counters(80).peers(16).mailbox(4, 1024)
}

impl World {
    fn new(seed: u64, config: FabricConfig, nics: &[&[NicModel]]) -> Self {
        let fabric = Fabric::new(seed, config);
        let mut world = Self { fabric, engines: Vec::new(), drivers: Vec::new() };
        nics.iter().for_each(|nics| world.join(nics));
        world
    }

    fn join(&mut self, nics: &[NicModel]) {
        let (engine, driver) = self.fabric.engine(builder(), nics).unwrap();
        self.engines.push(engine);
        self.drivers.push(driver);
    }

    /// Two engines with such NICs, and the second as a peer of the first.
    fn pair(seed: u64, config: FabricConfig, nics: [&[NicModel]; 2]) -> (Self, PeerId) {
        let mut world = Self::new(seed, config, &nics);
        let peer = world.connect(0, 1);
        (world, peer)
    }

    fn call(&mut self, from: usize, to: usize) -> PeerId {
        let address = self.engines[to].address().clone();
        self.drivers[from].add_peer(&address).unwrap()
    }

    fn connect(&mut self, from: usize, to: usize) -> PeerId {
        let peer = self.call(from, to);
        let engine = self.engines[from].clone();
        self.fabric.wait_peer(&mut self.drivers, &engine, peer, SECOND).unwrap();
        peer
    }

    fn run(&mut self, time: Duration) {
        self.fabric.run_for(&mut self.drivers, time);
    }

    fn end(&mut self, transfer: &Transfer) -> End {
        self.fabric.wait(&mut self.drivers, transfer, MINUTE).unwrap()
    }

    fn done(&mut self, transfer: &Transfer) {
        assert_eq!(self.end(transfer), End::Done);
    }

    fn count(&mut self, counter: &ImmCounter, writes: u64) {
        self.fabric.wait_count(&mut self.drivers, counter, writes, MINUTE).unwrap();
    }

    fn now(&self) -> Duration {
        self.fabric.now().since(Time::ZERO)
    }

    /// Stops everything in order: what engines did was right.
    fn close(self) -> Vec<TraceEvent> {
        assert_eq!(self.fabric.breaches(), Breaches::default());
        self.fabric.trace()
    }
}

fn filled(engine: &TransferEngine, bytes: usize, seed: u64) -> (Region, Vec<u8>) {
    let region = engine.alloc(bytes).unwrap();
    let mut random = random::Random::new(seed);
    let content: Vec<u8> = (0..bytes).map(|_| u8::try_from(random.below(256)).unwrap()).collect();
    region.write(0, &content).unwrap();
    (region, content)
}

fn content(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(region.len()).unwrap()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

fn single<'a>(
    peer: PeerId,
    src: &'a Region,
    dst: &'a MrDesc,
    imm: Option<&ImmCounter>,
) -> SingleWrite<'a> {
    let len = src.len();
    let imm = imm.map(ImmCounter::tag);
    SingleWrite { peer, src, src_offset: 0, dst, dst_offset: 0, len, imm }
}

const HOSTILE: FabricConfig = FabricConfig::rough();

/// All kinds of NICs, in numbers that differ, on a fabric that is calm and on one that is not.
fn worlds() -> impl Iterator<Item = (World, PeerId)> {
    const NICS: [[&[NicModel]; 2]; 6] = [
        [&[CX7], &[CX7]],
        [&[CX7; 2], &[CX7; 2]],
        [&[NicModel::EFA_100; 4], &[NicModel::EFA_200; 2]],
        [&[CX7], &[NicModel::EFA_100; 4]],
        [&[NicModel::TCP; 3], &[NicModel::TCP]],
        [&[NicModel::NVLINK], &[NicModel::NVLINK]],
    ];
    let configs = [FabricConfig::calm(), HOSTILE];
    configs.into_iter().flat_map(|config| {
        NICS.into_iter().enumerate().map(move |(n, nics)| World::pair(n as u64, config, nics))
    })
}

#[test]
fn writes_of_all_sizes_arrive_whole_and_count_once() {
    for (mut world, peer) in worlds() {
        let counter = world.engines[1].counter().unwrap();
        for len in [1, 2, 63, 64, 4096, 100_001, 300_000] {
            let (src, bytes) = filled(&world.engines[0], len, len as u64);
            let dst = world.engines[1].alloc(len + 64).unwrap();
            let desc = dst.desc();
            let write = SingleWrite { dst_offset: 32, ..single(peer, &src, &desc, Some(&counter)) };
            let transfer = world.engines[0].submit_single_write(&write).unwrap();
            world.count(&counter, 1);
            let got = content(&dst);
            assert_eq!(got[32..32 + len], bytes);
            assert!(got[..32].iter().chain(&got[32 + len..]).all(|&byte| byte == 0));
            world.done(&transfer);
        }
        assert_eq!(counter.available(), 0);
        world.close();
    }
}

#[test]
fn shuffled_pages_arrive_each_in_its_place() {
    const PAGES: u32 = 500;
    const PAGE: u64 = 512;
    for (mut world, peer) in worlds() {
        let bytes = usize::try_from(u64::from(PAGES) * PAGE).unwrap();
        let (src, sent) = filled(&world.engines[0], bytes, 3);
        let dst = world.engines[1].alloc(bytes).unwrap();
        let counter = world.engines[1].counter().unwrap();
        let pages = |step: u32| {
            let indices: Vec<u32> = (0..PAGES).map(|page| page * step % PAGES).collect();
            Pages { indices: indices.into(), stride: PAGE, offset: 0 }
        };
        let transfer = world.engines[0].submit_paged_writes(&PagedWrite {
            peer,
            page_bytes: PAGE,
            src: &src,
            src_pages: pages(7),
            dst: &dst.desc(),
            dst_pages: pages(11),
            imm: Some(counter.tag()),
        });
        world.count(&counter, PAGES.into());
        let got = content(&dst);
        let page = |bytes: &[u8], n: u32| {
            let at = usize::try_from(u64::from(n % PAGES) * PAGE).unwrap();
            bytes[at..at + usize::try_from(PAGE).unwrap()].to_vec()
        };
        for n in 0..PAGES {
            assert_eq!(page(&got, n * 11), page(&sent, n * 7), "page {n}");
        }
        world.done(&transfer.unwrap());
        world.close();
    }
}

/// Runs of pages, over NICs and paths that are lost on the way: each page is in its place, once, and where it
/// was not to be nothing is.
#[test]
fn runs_of_pages_arrive_each_in_its_place() {
    const PAGES: u32 = 600;
    const PAGE: usize = 512;
    let pages = |step: u32| -> Vec<u32> { (0..PAGES).map(|n| n * step % PAGES * 2).collect() };
    let (from, to) = (pages(7), pages(11));
    let (mut moved, mut fewest) = (0, u64::MAX);
    for (seed, pages_per_piece) in (0..18).zip([2, 7, 255].into_iter().cycle()) {
        let runs = NicModel { pages_per_piece, ..CX7 };
        // The last NIC of the sender takes no runs every other time: then none is made.
        let last = if seed % 2 == 0 { runs } else { CX7 };
        let (mut world, peer) = World::pair(seed, HOSTILE, [&[runs, runs, last], &[runs; 2]]);
        world.fabric.keep_trace(1_000_000);
        let bytes = 2 * PAGE * PAGES as usize;
        let (src, sent) = filled(&world.engines[0], bytes, seed);
        let dst = world.engines[1].alloc(bytes).unwrap();
        let counter = world.engines[1].counter().unwrap();
        world.fabric.reset_stats();
        let paged = |indices: &[u32]| Pages { indices: indices.into(), stride: 512, offset: 0 };
        let transfer = world.engines[0].submit_paged_writes(&PagedWrite {
            peer,
            page_bytes: 512,
            src: &src,
            src_pages: paged(&from),
            dst: &dst.desc(),
            dst_pages: paged(&to),
            imm: Some(counter.tag()),
        });
        world.run(Duration::from_micros(3 * (seed % 6)));
        world.fabric.nic_down(u32::from(seed / 6 % 2 == 1), 1);
        world.count(&counter, PAGES.into());
        world.done(&transfer.unwrap());
        assert_eq!(counter.available(), 0);
        let posted = world.fabric.stats(0).posted;
        let pieces = u64::from(PAGES.div_ceil(pages_per_piece.into()));
        assert!(posted >= if seed % 2 == 0 { pieces } else { u64::from(PAGES) });
        fewest = fewest.min(posted);
        let page = |n: u32| n as usize * PAGE..(n as usize + 1) * PAGE;
        let mut expected = vec![0; bytes];
        for (from, to) in from.iter().zip(&to) {
            expected[page(*to)].copy_from_slice(&sent[page(*from)]);
        }
        assert!(content(&dst) == expected, "seed {seed}");
        world.run(SECOND);
        assert!(content(&dst) == expected && counter.available() == 0, "late, seed {seed}");
        let trace = world.close();
        moved += trace
            .iter()
            .map(|event| match event.what {
                What::Settled { undelivered, .. } => undelivered,
                _ => 0,
            })
            .sum::<u32>();
    }
    assert!(fewest < 20, "{fewest} messages at least");
    assert!(moved > 50, "{moved} were posted again");
}

/// Short writes are told of together while as many are under way, and none stays behind; long ones, and those on a NIC that is told of
/// each at once, do not wait.
#[test]
fn short_writes_are_posted_together_while_others_are_under_way() {
    const WRITES: u64 = 60;
    for (together, bytes) in [(16, 8), (16, 4096), (7, 64), (2, 64), (1, 64), (16, 4097), (61, 8)] {
        let nic = NicModel { together, ..CX7 };
        let (mut world, peer) = World::pair(together.into(), FabricConfig::calm(), [&[nic]; 2]);
        let (src, sent) = filled(&world.engines[0], bytes, 1);
        let dst = world.engines[1].alloc(bytes).unwrap();
        let counter = world.engines[1].counter().unwrap();
        world.fabric.reset_stats();
        let (desc, first) = (dst.desc(), u64::from(together).min(WRITES));
        let mut posted = Vec::new();
        let transfers: Vec<_> = (0..WRITES)
            .map(|_| {
                let write = single(peer, &src, &desc, Some(&counter));
                let transfer = world.drivers[0].submit_single_write(&write).unwrap();
                posted.push(world.fabric.stats(0).posted);
                transfer
            })
            .collect();
        let waiting = if bytes > 4096 { 0 } else { (WRITES - first) % u64::from(together) };
        let expected = |at: u64| match at + 1 {
            count if count <= first || bytes > 4096 => count,
            count => count - (count - first) % u64::from(together),
        };
        assert!(posted.iter().copied().eq((0..WRITES).map(expected)), "{together}: {posted:?}");
        assert_eq!(posted.last(), Some(&(WRITES - waiting)));
        // Whoever looks next has them posted, though nothing has ended.
        world.drivers[0].poll();
        assert_eq!(world.fabric.stats(0).posted, WRITES);
        assert!(transfers.iter().all(|transfer| transfer.poll_end().is_none()));
        world.count(&counter, WRITES);
        transfers.iter().for_each(|transfer| world.done(transfer));
        assert!(content(&dst) == sent && counter.available() == 0);
        world.close();
    }
}

/// Four engines with unequal NICs, all connected: by index, the peers of each in order of engines.
fn four(seed: u64, config: FabricConfig) -> (World, Vec<Vec<PeerId>>) {
    let nics: [&[NicModel]; 4] = [&[CX7; 2], &[CX7], &[NicModel::EFA_100; 4], &[NicModel::TCP; 3]];
    let mut world = World::new(seed, config, &nics);
    let mut peers = vec![vec![PeerId { index: 0, generation: 0 }; 4]; 4];
    // Half of them call, and some call each other at once: the same engine added twice is one peer.
    for (a, peers) in peers.iter_mut().enumerate() {
        for b in (0..4).filter(|&b| b != a) {
            peers[b] = world.call(a, b);
        }
    }
    world.run(SECOND / 100);
    for (a, peers) in peers.iter_mut().enumerate() {
        for b in (0..4).filter(|&b| b != a) {
            peers[b] = world.connect(a, b);
        }
        assert_eq!(world.engines[a].peers().len(), 3);
        peers.remove(a);
    }
    (world, peers)
}

#[test]
fn barriers_scatters_messages_and_immediates_reach_everybody() {
    for (seed, config) in [(1, FabricConfig::calm()), (2, HOSTILE), (3, HOSTILE)] {
        let (mut world, peers) = four(seed, config);
        let counters: Vec<_> =
            world.engines.iter().map(|engine| engine.counter_at(5).unwrap()).collect();
        let tag = counters[0].tag();
        let groups: Vec<_> =
            (0..4).map(|at| world.engines[at].add_peer_group(&peers[at])).collect();
        for round in 0..10 {
            let barriers: Vec<_> =
                (0..4).map(|at| world.engines[at].submit_barrier(&groups[at], tag)).collect();
            counters.iter().for_each(|counter| world.count(counter, 3));
            for barrier in barriers {
                world.done(&barrier.unwrap());
            }
            assert!(counters.iter().all(|counter| counter.available() == 0), "round {round}");
        }
        // Scatter: part n of the source goes to the n-th peer.
        let (src, sent) = filled(&world.engines[0], 3000, 9);
        let regions: Vec<_> = (1..4).map(|at| world.engines[at].alloc(1000).unwrap()).collect();
        let target = |n: usize| Target {
            peer: peers[0][n],
            dst: regions[n].desc(),
            src_offset: n as u64 * 1000,
            dst_offset: 0,
            len: 1000,
        };
        let targets: Vec<Target> = (0..3).map(target).collect();
        let write = ScatterWrite { src: &src, targets: targets.into(), imm: Some(tag) };
        let transfer = world.engines[0].submit_scatter(&write).unwrap();
        for n in 0..3 {
            world.count(&counters[n + 1], 1);
            assert_eq!(content(&regions[n]), sent[n * 1000..(n + 1) * 1000]);
        }
        world.done(&transfer);
        // Messages both ways, more than the mailbox has slots: in order, each once.
        let back = peers[1][0];
        let sends: Vec<_> = (0..20_u8)
            .flat_map(|n| {
                let there = world.engines[0].submit_send(peers[0][0], &[n]).unwrap();
                [there, world.engines[1].submit_send(back, &[100 + n]).unwrap()]
            })
            .collect();
        let mut got = [Vec::new(), Vec::new()];
        while got.iter().any(|got| got.len() < 20) {
            world.run(Duration::from_micros(100));
            for (driver, got) in world.drivers.iter_mut().zip(&mut got) {
                while let Ok(message) = driver.recv(Duration::ZERO) {
                    got.push(message.bytes[0]);
                }
            }
        }
        assert_eq!(got[1], (0..20).collect::<Vec<_>>());
        assert_eq!(got[0], (100..120).collect::<Vec<_>>());
        sends.iter().for_each(|send| world.done(send));
        let imm = world.engines[0].submit_imm(peers[0][2], tag, 255).unwrap();
        world.count(&counters[3], 255);
        world.done(&imm);
        world.close();
    }
}

#[test]
fn sixty_four_counters_count_what_is_theirs() {
    for (mut world, peer) in worlds() {
        let counters: Vec<_> = (0..64).map(|_| world.engines[1].counter().unwrap()).collect();
        let (src, _) = filled(&world.engines[0], 4096, 1);
        let region = world.engines[1].alloc(4096).unwrap();
        let (dst, mut transfers) = (region.desc(), Vec::new());
        for n in 0..64_usize {
            for counter in &counters[n..] {
                let write = single(peer, &src, &dst, Some(counter));
                transfers.push(world.engines[0].submit_single_write(&write).unwrap());
                if transfers.len() == 60 {
                    transfers.drain(..).for_each(|transfer| world.done(&transfer));
                }
            }
        }
        transfers.iter().for_each(|transfer| world.done(transfer));
        for (n, counter) in (1..).zip(&counters) {
            world.count(counter, n);
            assert_eq!(counter.available(), 0);
        }
        world.close();
    }
}

/// Both sides call at once, and have sent before either has answered.
#[test]
fn messages_that_wait_while_calls_cross_arrive_in_order() {
    for (seed, config) in [(1, FabricConfig::calm()), (2, FabricConfig::calm()), (3, HOSTILE)] {
        let mut world = World::new(seed, config, &[&[CX7], &[CX7; 2]]);
        let peers = [world.call(0, 1), world.call(1, 0)];
        let send = |at: usize, n: u8| world.engines[at].submit_send(peers[at], &[n; 50]).unwrap();
        let sends: Vec<_> = (0..6).flat_map(|n| [send(0, n), send(1, n)]).collect();
        for at in 0..2 {
            for n in 0..6 {
                let mut message = None;
                while message.is_none() {
                    world.run(Duration::from_micros(100));
                    message = world.drivers[at].recv(Duration::ZERO).ok();
                }
                assert_eq!(message.unwrap().bytes, [n; 50]);
            }
        }
        sends.iter().for_each(|send| world.done(send));
        world.close();
    }
}

/// A NIC of either side goes and comes back, again and again, while writes are under way: each arrives,
/// and counts once, on what is left.
#[test]
fn engines_carry_on_when_a_nic_is_lost() {
    let mut moved = 0;
    for seed in 0..20 {
        let (mut world, peer) = World::pair(seed, HOSTILE, [&[CX7; 3], &[CX7; 2]]);
        world.fabric.keep_trace(1_000_000);
        let counter = world.engines[1].counter().unwrap();
        let (src, bytes) = filled(&world.engines[0], 400_000, seed);
        let dst = world.engines[1].alloc(400_000).unwrap();
        let desc = dst.desc();
        for round in 0..6 {
            let write = single(peer, &src, &desc, Some(&counter));
            let transfers: Vec<_> =
                (0..20).map(|_| world.engines[0].submit_single_write(&write).unwrap()).collect();
            world.run(Duration::from_micros(7 * seed));
            let (engine, nic) = if round % 2 == 0 { (0, 1) } else { (1, 0) };
            world.fabric.nic_down(engine, nic);
            world.count(&counter, 20);
            transfers.iter().for_each(|transfer| world.done(transfer));
            assert_eq!((counter.available(), content(&dst) == bytes), (0, true));
            world.fabric.nic_up(engine, nic);
            world.run(SECOND);
            dst.write(0, &vec![0; 400_000]).unwrap();
        }
        let trace = world.close();
        let undelivered = trace.iter().map(|event| match event.what {
            What::Settled { undelivered, .. } => undelivered,
            _ => 0,
        });
        moved += undelivered.sum::<u32>();
    }
    assert!(moved > 100, "{moved} writes were posted again");
}

/// The same mixed program under every fault that happens by itself.
fn mixed(seed: u64) -> (Vec<TraceEvent>, Vec<u8>, Duration) {
    let (mut world, peers) = four(seed, HOSTILE);
    world.fabric.keep_trace(100_000);
    let (src, _) = filled(&world.engines[0], 200_000, 5);
    let dst = world.engines[1].alloc(200_000).unwrap();
    let counter = world.engines[1].counter().unwrap();
    let desc = dst.desc();
    let mut transfers = Vec::new();
    for n in 0..30_u64 {
        let len = n * 6_000 + 1;
        let write = SingleWrite { len, ..single(peers[0][0], &src, &desc, Some(&counter)) };
        transfers.push(world.engines[0].submit_single_write(&write).unwrap());
        let tag = counter.tag();
        transfers.push(world.engines[2].submit_imm(peers[2][1], tag, 1).unwrap());
        world.run(Duration::from_micros(n));
    }
    world.count(&counter, 60);
    transfers.iter().for_each(|transfer| world.done(transfer));
    let (time, bytes) = (world.now(), content(&dst));
    (world.close(), bytes, time)
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let runs: Vec<_> = [4, 4, 5].map(mixed).into();
    assert!(runs[0].0.len() > 200 && runs[0].0.is_sorted_by_key(|event| event.at));
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0].0, runs[2].0);
    assert_eq!(runs[0].1, runs[2].1, "the same bytes, in another order");
    let text = runs[0].0[0].to_string();
    assert!(text.contains(" us  engine "), "{text}");
}

#[test]
fn times_are_those_of_the_model() {
    let latency = CX7.latency;
    for nics in 1..=2_u32 {
        let all = vec![CX7; usize::try_from(nics).unwrap()];
        let (mut world, peer) = World::pair(1, FabricConfig::calm(), [&all, &all]);
        let len = 64 << 20;
        let (src, dst) =
            (world.engines[0].alloc(len).unwrap(), world.engines[1].alloc(len).unwrap());
        let counter = world.engines[1].counter().unwrap();
        let (small, start) = (world.engines[0].alloc(8).unwrap(), world.now());
        let transfer = world.engines[0].submit_single_write(&single(
            peer,
            &small,
            &dst.desc(),
            Some(&counter),
        ));
        world.count(&counter, 1);
        let took = world.now() - start;
        assert_eq!(took, CX7.post + CX7.occupancy(8) + latency);
        world.done(&transfer.unwrap());
        let start = world.now();
        let transfer =
            world.engines[0].submit_single_write(&single(peer, &src, &dst.desc(), Some(&counter)));
        world.count(&counter, 1);
        let (took, wire) = (world.now() - start, CX7.occupancy(len as u64 / u64::from(nics)));
        // Posting, and that the pieces come one after the other, are a few microseconds of 1.4 ms.
        assert!(took >= wire + latency && took <= wire + latency + Duration::from_micros(5));
        world.done(&transfer.unwrap());
        world.close();
    }
}

#[test]
fn incast_shares_what_the_receiver_takes() {
    let mut world = World::new(1, FabricConfig::calm(), &[[CX7].as_slice(); 5]);
    let len = 1 << 20;
    let dst = world.engines[0].alloc(len).unwrap();
    let counter = world.engines[0].counter().unwrap();
    let peers: Vec<_> = (1..5).map(|from| world.connect(from, 0)).collect();
    let start = world.now();
    let mut transfers = Vec::new();
    for (from, &peer) in (1..).zip(&peers) {
        let src = world.engines[from].alloc(len).unwrap();
        let write = single(peer, &src, &dst.desc(), Some(&counter)).len;
        let desc = dst.desc();
        let request = SingleWrite { len: write, ..single(peer, &src, &desc, Some(&counter)) };
        transfers.push(world.engines[from].submit_single_write(&request).unwrap());
    }
    world.count(&counter, 4);
    let (took, wire) = (world.now() - start, CX7.occupancy(len as u64) * 4);
    assert!(took >= wire && took < wire + Duration::from_micros(6), "{took:?} for {wire:?}");
    transfers.iter().for_each(|transfer| world.done(transfer));
    world.close();
}

/// Numbers of the messages from engine 0, in the order in which they arrived.
fn arrivals(trace: &[TraceEvent]) -> Vec<u64> {
    let number = |event: &TraceEvent| match event.what {
        What::Arrived { from: 0, number, .. } => Some(number),
        _ => None,
    };
    trace.iter().filter_map(number).collect()
}

#[test]
fn a_path_keeps_the_order_that_its_model_has() {
    for (model, ordered) in [(CX7, true), (NicModel::TCP, true), (NicModel::EFA_200, false)] {
        let (mut world, peer) = World::pair(6, HOSTILE, [&[model], &[model]]);
        world.fabric.keep_trace(10_000);
        let counter = world.engines[1].counter().unwrap();
        for _ in 0..5 {
            let sent: Vec<_> = (0..40)
                .map(|_| world.engines[0].submit_imm(peer, counter.tag(), 1).unwrap())
                .collect();
            world.count(&counter, 40);
            sent.iter().for_each(|transfer| world.done(transfer));
        }
        let order = arrivals(&world.close());
        assert_eq!(order.len(), 200);
        assert_eq!(order.is_sorted(), ordered, "{}", model.name);
    }
}

#[test]
fn full_queues_only_delay() {
    let config = FabricConfig { queue_full_one_in: 2, ..FabricConfig::calm() };
    let (mut world, peer) = World::pair(3, config, [&[CX7; 2], &[CX7]]);
    world.fabric.keep_trace(10_000);
    let counter = world.engines[1].counter().unwrap();
    let sent: Vec<_> =
        (0..60).map(|_| world.engines[0].submit_imm(peer, counter.tag(), 1).unwrap()).collect();
    world.count(&counter, 60);
    sent.iter().for_each(|transfer| world.done(transfer));
    let full = world.close().iter().filter(|event| event.what == What::QueueFull).count();
    assert!(full > 5, "{full}");
}

#[test]
fn a_cancelled_transfer_ends_and_its_memory_is_left_alone() {
    let mut quiesced = 0;
    for (seed, model) in [(1, CX7), (2, NicModel::EFA_100), (3, NicModel::TCP)] {
        // Many pieces, and few of them in flight.
        let model = NicModel { max_message_bytes: 64 << 10, queue_depth: 16, ..model };
        for after in [0, 1, 10, 60, 200_u64] {
            let (mut world, peer) = World::pair(seed, HOSTILE, [&[model; 2], &[model]]);
            let len = 4 << 20;
            let (src, _) = filled(&world.engines[0], len, 1);
            let dst = world.engines[1].alloc(len).unwrap();
            let transfer =
                world.engines[0].submit_single_write(&single(peer, &src, &dst.desc(), None));
            let transfer = transfer.unwrap();
            world.run(Duration::from_micros(after));
            transfer.cancel();
            let end = world.end(&transfer);
            assert!(end.ok().is_err(), "{end:?} after {after} us");
            quiesced += u32::from(matches!(end, End::Quiesced { .. }));
            let zeros = vec![0; len];
            dst.write(0, &zeros).unwrap();
            src.write(0, &zeros).unwrap();
            world.run(SECOND);
            assert!(content(&dst) == zeros, "written after its end");
            world.close();
        }
    }
    assert!(quiesced >= 12, "{quiesced}");
}

#[test]
fn a_deadline_and_the_drain_run_on_the_fabrics_clock() {
    let fabric = Fabric::new(1, FabricConfig::calm());
    let build = || fabric.engine(builder().drain(SECOND), &[CX7]).unwrap();
    let ((a, driver_a), (b, driver_b)) = (build(), build());
    let mut drivers = vec![driver_a, driver_b];
    let peer = drivers[0].add_peer(b.address()).unwrap();
    fabric.wait_peer(&mut drivers, &a, peer, SECOND).unwrap();
    let (src, dst) = (a.alloc(8).unwrap(), b.alloc(8).unwrap());
    // Nobody acknowledges: it is silently dead.
    fabric.kill(fabric.number_of(b.address()).unwrap(), Death::Silent);
    drop((drivers.pop(), b));
    let start = fabric.now();
    let late = a.with_deadline(SECOND).submit_single_write(&single(peer, &src, &dst.desc(), None));
    let end = fabric.wait(&mut drivers, &late.unwrap(), MINUTE).unwrap();
    assert!(matches!(end, End::Quiesced { .. }), "{end:?}");
    let took = fabric.now().since(start);
    assert!(took >= 2 * SECOND && took < 2 * SECOND + SECOND / 100, "{took:?}");
}

#[test]
fn a_dead_peer_is_noticed_in_time_or_by_its_silence() {
    let limit = Duration::from_millis(100);
    let liveness = LivenessConfig {
        heartbeat: limit,
        suspect_after: limit * 2,
        down_after: limit * 5,
        connect_deadline: SECOND,
        idle_after: Duration::MAX,
    };
    for death in [Death::NoticedWithin(limit), Death::Silent] {
        for seed in 0..20 {
            let mut world = World::new(seed, HOSTILE, &[]);
            for nics in [1, 2, 1] {
                let nics = vec![CX7; nics];
                let made = world.fabric.engine(builder().liveness(liveness), &nics).unwrap();
                world.engines.push(made.0);
                world.drivers.push(made.1);
            }
            let (peer, other) = (world.connect(0, 1), world.connect(0, 2));
            world.run(SECOND);
            assert_eq!(world.engines[0].peer_state(peer), Some(PeerState::Up), "heartbeats");
            let counter = world.engines[0].counter().unwrap();
            // The one that dies has posted a row of writes; some of them arrive after its death.
            let back = world.engines[1].peers()[0];
            let (src, _) = filled(&world.engines[1], 100_000, seed);
            let dst = world.engines[0].alloc(100_000).unwrap();
            let desc = dst.desc();
            let mut sent = Vec::new();
            for _ in 0..20 {
                let write = single(back, &src, &desc, Some(&counter));
                sent.push(world.engines[1].submit_single_write(&write).unwrap());
            }
            let (there, there_src) =
                (world.engines[1].alloc(64).unwrap().desc(), world.engines[0].alloc(64).unwrap());
            let towards = world.engines[0]
                .submit_single_write(&single(peer, &there_src, &there, None))
                .unwrap();
            world.run(Duration::from_micros(20));
            world.fabric.kill(1, death);
            let driver = world.drivers.remove(1);
            drop((driver, src, world.engines.remove(1)));
            for transfer in &sent {
                assert!(
                    transfer.poll_end().is_some(),
                    "the dead engine's own transfers have ended"
                );
            }
            let start = world.now();
            let (fabric, engine) = (world.fabric.clone(), world.engines[0].clone());
            let down =
                fabric.run_until(&mut world.drivers, MINUTE, || match engine.peer_state(peer) {
                    Some(PeerState::Down(reason)) => Some(reason),
                    _ => None,
                });
            let took = world.now() - start;
            match death {
                Death::NoticedWithin(_) => {
                    assert_eq!(down, Some(DownReason::Disconnected));
                    assert!(took <= limit + CX7.latency, "{took:?}");
                }
                Death::Silent => {
                    assert_eq!(down, Some(DownReason::Silent { for_ms: 500 }));
                    assert!(took <= limit * 6, "{took:?}");
                }
            }
            let _ended = world.end(&towards);
            let counted = counter.available();
            // Nothing comes any more, and the others carry on.
            let zeros = vec![0; 100_000];
            dst.write(0, &zeros).unwrap();
            world.run(SECOND);
            assert_eq!((counter.available(), content(&dst) == zeros), (counted, true));
            let alive = world.engines[0].submit_imm(other, ImmTag::new(1, 0).unwrap(), 1).unwrap();
            world.done(&alive);
            assert_eq!(world.fabric.breaches(), Breaches::default());
        }
    }
}

/// However many peers are gone and hold all of every queue: heartbeats, and what settles a broken path, get
/// through to the one that is not. Its transfers wait for those who are gone to be found out, if these are
/// enough to hold a queue, and for nobody if they are not.
#[test]
fn who_is_gone_costs_nobody_else_the_connection() {
    const DOWN: Duration = Duration::from_millis(16);
    let liveness = LivenessConfig {
        heartbeat: DOWN / 8,
        suspect_after: DOWN / 2,
        down_after: DOWN,
        connect_deadline: SECOND,
        idle_after: Duration::MAX,
    };
    let builder = || builder().liveness(liveness).drain(DOWN / 4);
    let (mut held, mut free) = (0, 0);
    for config in [FabricConfig::calm(), FabricConfig { late_one_in: 0, ..HOSTILE }] {
        for depth in [1, 2, 4, 8] {
            for gone in 0..=5 {
                for lost in [None, Some((0, 0)), Some((1, 1))] {
                    let case = format!("depth {depth}, {gone} gone, lost {lost:?}");
                    let detect = Duration::from_micros(20);
                    let nic = NicModel { queue_depth: depth, detect, ..CX7 };
                    let mut world = World::new(gone, config, &[]);
                    for _ in 0..gone + 2 {
                        let made = world.fabric.engine(builder(), &[nic; 2]).unwrap();
                        world.engines.push(made.0);
                        world.drivers.push(made.1);
                    }
                    let alive = world.connect(0, 1);
                    let silent = 2..usize::try_from(gone).unwrap() + 2;
                    let silent: Vec<_> = silent.map(|to| (to, world.connect(0, to))).collect();
                    for (to, _) in silent.iter().rev() {
                        world.fabric.kill(u32::try_from(*to).unwrap(), Death::Silent);
                        drop((world.drivers.remove(*to), world.engines.remove(*to)));
                    }
                    let (engine, tag) = (world.engines[0].clone(), ImmTag::new(1, 0).unwrap());
                    let stuck = silent.iter().flat_map(|(_, peer)| [*peer; 8]);
                    let _stuck: Vec<_> =
                        stuck.map(|peer| engine.submit_imm(peer, tag, 1).unwrap()).collect();
                    world.run(Duration::from_micros(100));
                    let write = engine.submit_imm(alive, tag, 1).unwrap();
                    if let Some((engine, nic)) = lost {
                        world.fabric.nic_down(engine, nic);
                    }
                    world.run(DOWN / 16);
                    let each = u64::from(depth / 4).max(1);
                    let all_held = gone * each >= depth.into();
                    let went = write.poll_end().is_some();
                    assert_eq!(went, !all_held, "{case}");
                    (held, free) = (held + u32::from(all_held), free + u32::from(went));
                    let back = world.engines[1].peers()[0];
                    for _ in 0..64 {
                        world.run(DOWN / 16);
                        let states =
                            [world.engines[0].peer_state(alive), world.engines[1].peer_state(back)];
                        assert_eq!(states, [Some(PeerState::Up); 2], "{case}");
                    }
                    world.done(&write);
                    world.close();
                }
            }
        }
    }
    assert!(held > 50 && free > 50, "{held} {free}");
}

#[test]
fn a_peer_that_returns_is_a_new_one() {
    let (mut world, peer) = World::pair(9, HOSTILE, [&[CX7], &[CX7]]);
    let old = world.engines[1].alloc(64).unwrap();
    let (desc, address) = (old.desc(), world.engines[1].address().clone());
    world.fabric.kill(1, Death::NoticedWithin(Duration::from_millis(1)));
    drop((world.drivers.remove(1), world.engines.remove(1)));
    world.join(&[CX7; 2]);
    world.run(SECOND / 10);
    assert!(matches!(world.engines[0].peer_state(peer), Some(PeerState::Down(_))));
    let again = world.connect(0, 1);
    assert_ne!(again, peer);
    let counter = world.engines[1].counter().unwrap();
    let (src, bytes) = filled(&world.engines[0], 64, 1);
    let new = world.engines[1].alloc(64).unwrap();
    let transfer =
        world.engines[0].submit_single_write(&single(again, &src, &new.desc(), Some(&counter)));
    world.count(&counter, 1);
    assert_eq!(content(&new), bytes);
    world.done(&transfer.unwrap());
    // The old one's memory is nobody's, and its address no longer answers.
    let stale = world.engines[0].submit_single_write(&single(again, &src, &desc, None)).unwrap();
    assert!(matches!(world.end(&stale), End::NeverStarted { .. }));
    let gone = world.drivers[0].add_peer(&address).unwrap();
    let engine = world.engines[0].clone();
    let error = world.fabric.wait_peer(&mut world.drivers, &engine, gone, MINUTE).unwrap_err();
    let reason = DownReason::NeverAnswered;
    assert_eq!(error, PeerError::Down { peer: gone, reason });
    world.close();
}

#[test]
fn calls_are_refused_and_slow_when_the_fabric_says_so() {
    let config = FabricConfig { refuse_one_in: 2, ..FabricConfig::calm() };
    let (mut refused, mut accepted) = (0, 0);
    for seed in 0..20 {
        let mut world = World::new(seed, config, &[&[CX7], &[CX7]]);
        let peer = world.call(0, 1);
        let engine = world.engines[0].clone();
        match world.fabric.wait_peer(&mut world.drivers, &engine, peer, SECOND) {
            Ok(()) => accepted += 1,
            Err(PeerError::Down { reason: DownReason::Refused(_), .. }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused > 3 && accepted > 3, "{refused} {accepted}");
    // One that takes longer than the deadline to connect.
    let config = FabricConfig { connect: MINUTE, ..FabricConfig::calm() };
    let mut world = World::new(1, config, &[&[CX7], &[CX7]]);
    let peer = world.call(0, 1);
    let engine = world.engines[0].clone();
    let error = world.fabric.wait_peer(&mut world.drivers, &engine, peer, MINUTE).unwrap_err();
    assert_eq!(error, PeerError::Down { peer, reason: DownReason::NeverAnswered });
    world.run(3 * MINUTE);
    assert!(world.engines.iter().all(|engine| engine.peers().is_empty()));
}

/// Messages of one byte each, numbered.
fn send_numbers(world: &World, peer: PeerId, numbers: std::ops::Range<u8>) -> Vec<Transfer> {
    numbers.map(|number| world.engines[0].submit_send(peer, &[number]).unwrap()).collect()
}

fn received(engine: &TransferEngine) -> Vec<u8> {
    std::iter::from_fn(|| engine.recv(Duration::ZERO).ok()).flat_map(|it| it.bytes).collect()
}

/// The last NIC of either side is taken away and given back while messages, and the credits for them, are on
/// their way: all are written in the end, once and in order, and nobody is dropped.
#[test]
fn messages_and_credits_outlast_the_last_nic() {
    // From before the first message is posted until after its credit has arrived.
    for (side, step) in [0, 1].into_iter().flat_map(|side| (0..80).map(move |step| (side, step))) {
        let (mut world, peer) = World::pair(1, FabricConfig::calm(), [&[CX7], &[CX7]]);
        let mut sent = send_numbers(&world, peer, 0..9);
        world.run(Duration::from_nanos(100 * step));
        world.engines[side].set_nic_health(0, false);
        world.run(Duration::from_micros(20));
        sent.extend(send_numbers(&world, peer, 9..12));
        world.run(Duration::from_micros(20));
        world.engines[side].set_nic_health(0, true);
        all_came(&mut world, peer, &sent, &format!("side {side}, after {step}"));
    }
}

/// The same, where one NIC is lost with what is in flight on it, and the other is taken away while the peer
/// is asked what arrived: what did not has nowhere to go until that is back.
#[test]
fn messages_and_credits_outlast_a_lost_nic_and_the_last_one() {
    for case in 0..2 * 40 * 16 {
        let (side, step, ask) = (case % 2, case / 2 % 40, case / 80);
        let nics: [&[NicModel]; 2] =
            if side == 0 { [&[CX7; 2], &[CX7]] } else { [&[CX7], &[CX7; 2]] };
        let (mut world, peer) = World::pair(case, FabricConfig::calm(), nics);
        let mut sent = send_numbers(&world, peer, 0..9);
        world.run(Duration::from_nanos(200 * step));
        let (number, at) = (u32::try_from(side).unwrap(), usize::try_from(side).unwrap());
        world.fabric.nic_down(number, 0);
        world.run(Duration::from_nanos(500 * ask));
        world.engines[at].set_nic_health(1, false);
        world.run(Duration::from_micros(20));
        sent.extend(send_numbers(&world, peer, 9..12));
        world.engines[at].set_nic_health(1, true);
        all_came(&mut world, peer, &sent, &format!("side {side}, after {step} and {ask}"));
    }
}

/// Twelve messages are done, and arrived once and in order; both sides are still connected, and no slot is
/// lost.
fn all_came(world: &mut World, peer: PeerId, sent: &[Transfer], case: &str) {
    for transfer in sent {
        assert_eq!(world.end(transfer), End::Done, "{case}");
    }
    assert_eq!(received(&world.engines[1]), Vec::from_iter(0..12), "{case}");
    assert_eq!(world.engines[0].peer_state(peer), Some(PeerState::Up), "{case}");
    // All four slots are free again, once a lost path has been noticed: who waited for a credit would take
    // another 5 us.
    world.run(SECOND);
    let last = send_numbers(world, peer, 0..4);
    world.run(Duration::from_nanos(7500));
    assert!(last.iter().all(|transfer| transfer.poll_end() == Some(End::Done)), "{case}");
    assert_eq!(world.fabric.breaches(), Breaches::default(), "{case}");
}

/// Without a NIC a message waits for one, until its deadline.
#[test]
fn a_message_waits_for_a_nic_until_its_deadline() {
    let (mut world, peer) = World::pair(1, FabricConfig::calm(), [&[CX7], &[CX7]]);
    world.engines[0].set_nic_health(0, false);
    let hasty = world.engines[0].with_deadline(Duration::from_millis(1));
    let late = hasty.submit_send(peer, b"late").unwrap();
    let cancelled = world.engines[0].submit_send(peer, b"cancelled").unwrap();
    let patient = send_numbers(&world, peer, 0..1);
    cancelled.cancel();
    let end = world.end(&late);
    let late = matches!(
        end,
        End::NeverStarted { error: TransferError::Stopped(Stopped::DeadlineExceeded { .. }) }
    );
    assert!(late, "{end:?}");
    let error = TransferError::Stopped(Stopped::Cancelled);
    assert_eq!(world.end(&cancelled), End::NeverStarted { error });
    world.engines[0].set_nic_health(0, true);
    world.done(&patient[0]);
    assert_eq!(received(&world.engines[1]), [0]);
    world.close();
}

/// A message that no NIC takes in one piece fails alone.
#[test]
fn a_message_too_long_for_the_nics_fails_alone() {
    let short = NicModel { max_message_bytes: 512, ..CX7 };
    let (mut world, peer) = World::pair(1, FabricConfig::calm(), [&[short], &[short]]);
    let mut sent = send_numbers(&world, peer, 0..2);
    let long = world.engines[0].submit_send(peer, &[0; 600]).unwrap();
    sent.extend(send_numbers(&world, peer, 2..9));
    let error = PlanError::ControlTooLong { len: 600 + HEADER_BYTES as u64, max: 512 };
    let error = TransferError::Refused(SubmitError::Plan(error));
    assert_eq!(world.end(&long), End::NeverStarted { error });
    sent.iter().for_each(|transfer| world.done(transfer));
    assert_eq!(received(&world.engines[1]), Vec::from_iter(0..9));
    assert_eq!(world.engines[0].peer_state(peer), Some(PeerState::Up));
    world.close();
}

/// A call that its caller has given up arrives when the next one has been answered: both peers stay, and
/// so does the connection.
#[test]
fn a_call_given_up_that_arrives_late_replaces_nobody() {
    for caller in [0, 1] {
        let mut world = World::new(1, FabricConfig::calm(), &[&[CX7], &[CX7]]);
        let called = 1 - caller;
        world.fabric.configure(|config| config.connect = SECOND);
        let given_up = world.call(caller, called);
        world.engines[caller].remove_peer(given_up);
        world.run(Duration::from_millis(1));
        world.fabric.configure(|config| config.connect = Duration::from_micros(50));
        let peer = world.connect(caller, called);
        let before: Vec<_> = world.engines.iter().map(TransferEngine::peers).collect();
        world.run(3 * SECOND);
        let after: Vec<_> = world.engines.iter().map(TransferEngine::peers).collect();
        assert_eq!(after, before, "and the late call was refused");
        assert!(after.iter().all(|peers| peers.len() == 1), "{after:?}");
        let tag = ImmTag::new(0, 0).unwrap();
        let imm = world.engines[caller].submit_imm(peer, tag, 1).unwrap();
        world.done(&imm);
        world.close();
    }
}

/// One that arrives when there is nobody makes a peer that is lost as soon as its caller hears of it.
#[test]
fn a_call_given_up_that_finds_nobody_comes_to_nothing() {
    let mut world = World::new(1, FabricConfig::calm(), &[&[CX7], &[CX7]]);
    world.fabric.configure(|config| config.connect = Duration::from_millis(5));
    let given_up = world.call(0, 1);
    world.engines[0].remove_peer(given_up);
    let mut seen = 0;
    for _ in 0..30 {
        world.run(Duration::from_millis(1));
        seen = seen.max(world.engines[1].peers().len());
    }
    assert_eq!(seen, 1, "it arrived");
    assert!(world.engines.iter().all(|engine| engine.peers().is_empty()));
    world.close();
}

#[test]
fn registrations_fail_and_cost_time_when_the_fabric_says_so() {
    let config = FabricConfig { register_fails_one_in: 2, ..FabricConfig::calm() };
    let world = World::new(1, config, &[&[CX7]]);
    let made: Vec<bool> = (0..50).map(|_| world.engines[0].alloc(10).is_ok()).collect();
    assert!(made.iter().any(|made| *made) && made.iter().any(|made| !*made));
    let slow = Duration::from_millis(3);
    let (mut world, peer) = World::pair(1, FabricConfig::calm(), [&[CX7], &[CX7]]);
    world.fabric.configure(|config| config.register = slow);
    let start = world.now();
    let _memory = world.engines[0].alloc(10).unwrap();
    let imm = world.engines[0].submit_imm(peer, ImmTag::new(0, 0).unwrap(), 1).unwrap();
    world.done(&imm);
    assert!(world.now() - start >= slow);
}

#[test]
fn what_comes_to_a_withdrawn_region_is_refused() {
    for seed in 0..10 {
        let (mut world, peer) = World::pair(seed, HOSTILE, [&[CX7], &[CX7]]);
        let counter = world.engines[1].counter().unwrap();
        let (src, _) = filled(&world.engines[0], 4096, 1);
        let mut memory = vec![0_u8; 4096];
        let ptr = std::ptr::NonNull::new(memory.as_mut_ptr()).unwrap();
        // SAFETY: `memory` outlives the registration, and is not looked at before it has ended.
        let dst =
            unsafe { world.engines[1].register(ptr, 4096, crate::Rights::REMOTE_WRITE) }.unwrap();
        let desc = dst.desc();
        let transfers: Vec<_> = (0..20)
            .map(|_| {
                let write = single(peer, &src, &desc, Some(&counter));
                world.engines[0].submit_single_write(&write).unwrap()
            })
            .collect();
        world.run(Duration::from_micros(15));
        dst.close(Duration::ZERO).unwrap();
        memory.fill(0);
        let ends: Vec<End> = transfers.iter().map(|transfer| world.end(transfer)).collect();
        assert!(memory.iter().all(|&byte| byte == 0));
        let done = ends.iter().filter(|end| **end == End::Done).count() as u64;
        assert!(done < 20);
        assert_eq!(counter.available(), done, "an end that is no Done was not counted");
        world.close();
    }
}

// ---- the provider alone: what engines do not ask of it yet, or only now and then ----

/// A sink that writes down what it is told, and lets in whoever calls.
struct Record {
    peer: PeerId,
    hello: Hello,
    connected: bool,
    done: Vec<(u64, Result<(), WorkError>)>,
    undelivered: Vec<u64>,
    immediates: Vec<u32>,
    nics: Vec<(NicIndex, bool)>,
    broken: Vec<Path>,
    restored: Vec<Path>,
    lost: Vec<DownReason>,
    /// What is told of every run: numbers here, numbers there, and where they lie.
    run: Option<(Vec<u32>, Vec<u32>, RunLayout)>,
}

impl Sink for Record {
    fn work_done(&mut self, _: NicIndex, token: Token, outcome: Result<(), WorkError>) {
        self.done.push((token.bits(), outcome));
    }
    fn immediate(&mut self, _: NicIndex, peer: PeerId, imm: u32) {
        assert_eq!(peer, self.peer);
        self.immediates.push(imm);
    }
    fn incoming(&mut self, _: &Hello) -> Result<(PeerId, Hello), Refusal> {
        self.connected = true;
        Ok((self.peer, self.hello.clone()))
    }
    fn connected(&mut self, _: PeerId, _: &Hello) {
        self.connected = true;
    }
    fn disconnected(&mut self, _: PeerId, reason: DownReason) {
        self.lost.push(reason);
    }
    fn nic_changed(&mut self, nic: NicIndex, healthy: bool) {
        self.nics.push((nic, healthy));
    }
    fn path_broken(&mut self, _: PeerId, path: Path) {
        self.broken.push(path);
    }
    fn path_restored(&mut self, _: PeerId, path: Path) {
        self.restored.push(path);
    }
    fn undelivered(&mut self, work: &WorkRequest) {
        self.undelivered.push(work.token.bits());
    }
    fn page_run(&self, _: &WorkRequest, src: &mut [u32], dst: &mut [u32]) -> Option<RunLayout> {
        let (from, to, layout) = self.run.as_ref()?;
        src.copy_from_slice(from);
        dst.copy_from_slice(to);
        Some(*layout)
    }

    fn has_more(&self, _: NicIndex) -> bool {
        false
    }
}

/// One end of a connection, without an engine.
struct Raw {
    provider: SimProvider,
    record: Record,
    memory: Registered,
}

impl Raw {
    fn new(fabric: &Fabric, nics: &[NicModel], index: u16) -> Self {
        let (provider, _clock) = fabric.provider(nics).unwrap();
        let memory = provider.memory().alloc(1 << 20).unwrap();
        let hello = Hello {
            address: provider.address(),
            mailbox: memory.desc,
            geometry: Geometry::new(1, 64).unwrap(),
            heartbeat_ms: 1000,
            call: 1,
        };
        let peer = PeerId { index, generation: 1 };
        let record = Record {
            peer,
            hello,
            connected: false,
            done: Vec::new(),
            undelivered: Vec::new(),
            immediates: Vec::new(),
            nics: Vec::new(),
            broken: Vec::new(),
            restored: Vec::new(),
            lost: Vec::new(),
            run: None,
        };
        Self { provider, record, memory }
    }

    fn poll(&mut self) {
        while self.provider.poll(Time::ZERO, &mut self.record) {}
    }

    /// Posts writes of 64 bytes, the n-th to the n-th line of the peer's memory, with n as immediate.
    fn post(&mut self, path: Path, to: &MrDesc, numbers: std::ops::Range<u64>) {
        for n in numbers {
            let bytes = [u8::try_from(n % 251).unwrap() + 1; 64];
            let line = self.memory.ptr.as_ptr().wrapping_add(usize::try_from(n * 64).unwrap());
            // SAFETY: line `n` of the memory, which is 1 MiB, and which nobody writes to.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), line, 64) };
            let work = WorkRequest {
                token: Token::from_bits(n),
                nic: path.nic,
                remote_nic: path.remote_nic,
                peer: self.record.peer,
                src: self.memory.local.base + n * 64,
                src_key: self.memory.local.keys.get(path.nic).unwrap(),
                dst: to.base + n * 64,
                dst_key: to.keys.get(path.remote_nic).unwrap(),
                len: 64,
                run: PageRun::NONE,
                imm: Some(Imm::from_bits(u32::try_from(n).unwrap())),
            };
            assert_eq!(self.provider.post(path.nic, &[work], &mut self.record), 1);
        }
    }

    /// Whether line `n` has what [`Raw::post`] of the peer writes there; panics if it has part of it.
    fn has(&self, n: u64) -> bool {
        let mut line = [0; 64];
        let from = self.memory.ptr.as_ptr().wrapping_add(usize::try_from(n * 64).unwrap());
        // SAFETY: as in `post`; whoever writes there is stepped by this thread.
        unsafe { std::ptr::copy_nonoverlapping(from, line.as_mut_ptr(), 64) };
        line[0] != 0 && line == [u8::try_from(n % 251).unwrap() + 1; 64]
    }
}

/// Two connected providers with two NICs each.
fn raw_pair(seed: u64, config: FabricConfig, model: NicModel) -> (Fabric, Raw, Raw) {
    let fabric = Fabric::new(seed, config);
    let (mut a, mut b) = (Raw::new(&fabric, &[model; 2], 3), Raw::new(&fabric, &[model; 2], 5));
    let (address, hello) = (b.provider.address(), a.record.hello.clone());
    a.provider.connect(Time::ZERO, a.record.peer, &address, &hello).unwrap();
    advance(&fabric, &mut a, &mut b, SECOND / 1000);
    assert!(a.record.connected && b.record.connected);
    (fabric, a, b)
}

fn advance(fabric: &Fabric, a: &mut Raw, b: &mut Raw, time: Duration) {
    let until = fabric.now().after(time);
    while fabric.next_event().is_some_and(|at| at <= until) {
        fabric.step();
        a.poll();
        b.poll();
    }
    fabric.core.stepper.advance(until);
    a.poll();
    b.poll();
}

const NO_FULL_QUEUES: FabricConfig = FabricConfig { queue_full_one_in: 0, ..HOSTILE };

/// A NIC of either side is lost with writes in flight; the path is fenced and settled, and restored when
/// the NIC is back.
#[test]
fn a_broken_path_is_settled_to_the_last_write() {
    let path = Path { nic: 1, remote_nic: 0 };
    let (mut some_arrived, mut in_flight, mut some_unreported) = (0, 0, 0);
    for seed in 0..200 {
        let (fabric, mut a, mut b) = raw_pair(seed, NO_FULL_QUEUES, CX7);
        let desc = b.memory.desc;
        let mut expected = 0;
        for round in 0..3 {
            let sent = expected..expected + 40;
            a.post(path, &desc, sent.clone());
            advance(&fabric, &mut a, &mut b, Duration::from_micros(5 * (seed % 60)));
            let (engine, nic) = if (seed + round) % 2 == 0 { (0, 1) } else { (1, 0) };
            let reported = a.record.done.len() as u64 - expected;
            fabric.nic_down(engine, nic);
            // The sender is told at once if the NIC is its own; the fence may come while writes that
            // nobody has heard of are on their way.
            let wait = if engine == 0 { Duration::from_micros(seed * 5) } else { SECOND };
            advance(&fabric, &mut a, &mut b, wait);
            assert!(a.record.broken.contains(&path));
            let counted = b.record.immediates.len() as u64;
            in_flight += counted - reported - expected;
            let remote = RemotePath { from: path.nic, to: path.remote_nic };
            let receipt = b.provider.fence(b.record.peer, remote, &mut b.record).unwrap();
            let fenced = b.record.immediates.len() as u64;
            assert_eq!(fenced, counted, "all that had arrived was polled");
            // Nothing comes after the fence, however long we wait.
            let lines = |b: &Raw| sent.clone().filter(|&n| b.has(n)).count();
            let before = lines(&b);
            advance(&fabric, &mut a, &mut b, SECOND);
            assert_eq!((b.record.immediates.len() as u64, lines(&b)), (fenced, before));
            // A fence again says the same.
            assert_eq!(b.provider.fence(b.record.peer, remote, &mut b.record).unwrap(), receipt);
            a.record.undelivered.clear();
            a.provider.settle(a.record.peer, path, &receipt, &mut a.record).unwrap();
            assert!(a.provider.settle(a.record.peer, path, &receipt, &mut a.record).is_err());
            let done = a.record.done.len() as u64;
            some_arrived += done - expected;
            some_unreported += done - expected - reported;
            // Done is what arrived, in bytes and in counts; the rest is undelivered; both a prefix and its rest.
            assert_eq!(done, fenced);
            let tokens: Vec<u64> = a.record.done.iter().map(|(token, _)| *token).collect();
            assert!(a.record.done.iter().all(|(_, outcome)| outcome.is_ok()));
            let arrived = done - expected;
            assert!(tokens.ends_with(&(expected..expected + arrived).collect::<Vec<_>>()));
            let rest: Vec<u64> = (expected + arrived..sent.end).collect();
            assert_eq!(a.record.undelivered, rest);
            assert!((expected..expected + arrived).all(|n| b.has(n)));
            expected += arrived;
            a.record.broken.clear();
            a.record.restored.clear();
            fabric.nic_up(engine, nic);
            advance(&fabric, &mut a, &mut b, SECOND);
            assert_eq!(a.record.restored, [path], "the only one that was settled");
        }
        assert_eq!(fabric.breaches(), Breaches::default());
        assert!(a.record.lost.is_empty() && b.record.lost.is_empty());
    }
    assert!(some_arrived > 1000 && some_unreported > 300, "{some_arrived} {some_unreported}");
    assert!(in_flight > 300, "{in_flight} had arrived unreported");
}

#[test]
fn nics_and_paths_are_reported_to_both_sides() {
    let (fabric, mut a, mut b) = raw_pair(1, NO_FULL_QUEUES, CX7);
    fabric.nic_down(0, 1);
    fabric.nic_down(0, 1);
    a.poll();
    assert_eq!(a.record.nics, [(1, false)], "at once");
    advance(&fabric, &mut a, &mut b, CX7.detect);
    let all = |nic, remote| [Path { nic, remote_nic: remote }];
    let mut broken = a.record.broken.clone();
    broken.sort_unstable_by_key(|path| path.remote_nic);
    assert_eq!(broken, [all(1, 0), all(1, 1)].concat());
    broken = b.record.broken.clone();
    broken.sort_unstable_by_key(|path| path.nic);
    assert_eq!(broken, [all(0, 1), all(1, 1)].concat());
    // Nothing was in flight: both sides fence and settle all, then the NIC comes back.
    for path in a.record.broken.clone() {
        let remote = RemotePath { from: path.nic, to: path.remote_nic };
        let receipt = b.provider.fence(b.record.peer, remote, &mut b.record).unwrap();
        a.provider.settle(a.record.peer, path, &receipt, &mut a.record).unwrap();
    }
    fabric.nic_up(0, 1);
    advance(&fabric, &mut a, &mut b, SECOND);
    assert_eq!((a.record.nics.as_slice(), b.record.nics.len()), (&[(1, false), (1, true)][..], 0));
    assert_eq!((a.record.restored.len(), b.record.restored.len()), (2, 0));
    // A path cut by hand comes back when it is mended and settled, whichever is last.
    let path = Path { nic: 0, remote_nic: 0 };
    for mend_first in [false, true] {
        a.record.restored.clear();
        fabric.cut_path(0, a.record.peer, path);
        advance(&fabric, &mut a, &mut b, SECOND);
        if mend_first {
            fabric.mend_path(0, a.record.peer, path);
        }
        let remote = RemotePath { from: 0, to: 0 };
        let receipt = b.provider.fence(b.record.peer, remote, &mut b.record).unwrap();
        a.provider.settle(a.record.peer, path, &receipt, &mut a.record).unwrap();
        advance(&fabric, &mut a, &mut b, SECOND);
        assert_eq!(a.record.restored.len(), usize::from(mend_first));
        fabric.mend_path(0, a.record.peer, path);
        advance(&fabric, &mut a, &mut b, SECOND);
        assert_eq!(a.record.restored, [path]);
    }
}

/// A source is the device's until its owner was told that the write is done, not only until it has landed.
#[test]
fn a_source_that_goes_before_the_completion_is_noticed() {
    for early in [true, false] {
        let (fabric, mut a, mut b) = raw_pair(1, NO_FULL_QUEUES, CX7);
        let desc = b.memory.desc;
        a.post(Path { nic: 0, remote_nic: 1 }, &desc, 0..1);
        let is_time = |a: &Raw, b: &Raw| if early { b.has(0) } else { !a.record.done.is_empty() };
        while !is_time(&a, &b) {
            fabric.step();
            a.poll();
            b.poll();
        }
        assert_eq!((early, fabric.breaches().sources_gone), (a.record.done.is_empty(), 0));
        a.provider.memory().revoke(&a.memory, Duration::ZERO).unwrap();
        advance(&fabric, &mut a, &mut b, SECOND);
        assert_eq!(fabric.breaches().sources_gone, u64::from(early));
    }
}

#[test]
fn without_order_nobody_can_say_what_arrived() {
    let (fabric, mut a, mut b) = raw_pair(1, NO_FULL_QUEUES, NicModel::EFA_200);
    let (path, desc) = (Path { nic: 0, remote_nic: 0 }, b.memory.desc);
    a.post(path, &desc, 0..40);
    advance(&fabric, &mut a, &mut b, Duration::from_micros(40));
    fabric.nic_down(1, 0);
    advance(&fabric, &mut a, &mut b, SECOND);
    let remote = RemotePath { from: 0, to: 0 };
    assert_eq!(b.provider.fence(b.record.peer, remote, &mut b.record), Err(Unfenced::Unknown));
    let settled = a.provider.settle(a.record.peer, path, &Receipt::default(), &mut a.record);
    assert_eq!(settled, Err(Unfenced::Unknown));
    // What is left is to abort: each piece is reported, and the connection is lost on both sides.
    a.provider.abort(a.record.peer, &mut a.record);
    advance(&fabric, &mut a, &mut b, SECOND);
    assert_eq!((a.record.done.len(), a.record.lost.len(), b.record.lost.len()), (40, 1, 1));
    let arrived: Vec<u64> = (0..40).filter(|&n| b.has(n)).collect();
    assert!(!arrived.is_empty() && arrived.len() < 40);
    assert!(arrived.iter().enumerate().any(|(place, &n)| place as u64 != n), "not a prefix");
}

#[test]
fn abort_and_disconnect_end_every_piece_and_nothing_comes_after() {
    for seed in 0..100 {
        for abort in [false, true] {
            let (fabric, mut a, mut b) = raw_pair(seed, NO_FULL_QUEUES, CX7);
            let (path, desc) = (Path { nic: 0, remote_nic: 1 }, b.memory.desc);
            a.post(path, &desc, 0..40);
            advance(&fabric, &mut a, &mut b, Duration::from_micros(seed % 50));
            if abort {
                a.provider.abort(a.record.peer, &mut a.record);
                advance(&fabric, &mut a, &mut b, config_flush() + Duration::from_micros(1));
                assert_eq!(a.record.lost, [DownReason::Disconnected]);
            } else {
                a.provider.disconnect(a.record.peer, &mut a.record);
                assert!(a.record.lost.is_empty());
            }
            let mut tokens: Vec<u64> = a.record.done.iter().map(|(token, _)| *token).collect();
            tokens.sort_unstable();
            assert_eq!(tokens, (0..40).collect::<Vec<_>>());
            let lines: Vec<u64> = (0..40).filter(|&n| b.has(n)).collect();
            advance(&fabric, &mut a, &mut b, SECOND);
            assert_eq!(lines, (0..40).filter(|&n| b.has(n)).collect::<Vec<_>>());
            assert_eq!((a.record.done.len(), b.record.lost.len()), (40, 1));
            let ok = a.record.done.iter().filter(|(_, outcome)| outcome.is_ok()).count();
            assert!(ok <= b.record.immediates.len());
            // A piece for whoever is gone fails.
            a.post(path, &desc, 40..41);
            a.poll();
            assert_eq!(a.record.done.last(), Some(&(40, Err(WorkError::PeerGone))));
        }
    }
}

const fn config_flush() -> Duration {
    HOSTILE.flush
}

#[test]
fn keys_of_other_nics_and_ranges_outside_are_refused() {
    let (fabric, mut a, mut b) = raw_pair(1, FabricConfig::calm(), CX7);
    let desc = b.memory.desc;
    let good = WorkRequest {
        token: Token::from_bits(7),
        nic: 0,
        remote_nic: 1,
        peer: a.record.peer,
        src: a.memory.local.base,
        src_key: a.memory.local.keys.get(0).unwrap(),
        dst: desc.base,
        dst_key: desc.keys.get(1).unwrap(),
        len: 8,
        run: PageRun::NONE,
        imm: None,
    };
    let (local, remote) = (Err(WorkError::LocalAccess), Err(WorkError::RemoteAccess));
    let cases = [
        (good, Ok(())),
        (WorkRequest { src_key: a.memory.local.keys.get(1).unwrap(), ..good }, local),
        (WorkRequest { src: good.src - 1, ..good }, local),
        (WorkRequest { src: good.src + (1 << 20) - 7, ..good }, local),
        (WorkRequest { dst_key: desc.keys.get(0).unwrap(), ..good }, remote),
        (WorkRequest { dst_key: good.dst_key + (1 << 32), ..good }, remote),
        (WorkRequest { dst: good.dst - 1, ..good }, remote),
        (WorkRequest { dst: u64::MAX - 3, ..good }, remote),
        (WorkRequest { remote_nic: 2, ..good }, remote),
    ];
    for (work, outcome) in cases {
        assert_eq!(a.provider.post(0, &[work], &mut a.record), 1);
        advance(&fabric, &mut a, &mut b, SECOND);
        assert_eq!(a.record.done.pop(), Some((7, outcome)), "{work:?}");
    }
    let elsewhere = Fabric::new(2, FabricConfig::calm());
    let stranger = Raw::new(&elsewhere, &[CX7], 1);
    let hello = a.record.hello.clone();
    let peer = PeerId { index: 9, generation: 0 };
    let (own, far) = (a.provider.address(), stranger.provider.address());
    assert!(matches!(
        a.provider.connect(Time::ZERO, peer, &own, &hello),
        Err(ConnectError::Myself)
    ));
    assert!(matches!(
        a.provider.connect(Time::ZERO, peer, &far, &hello),
        Err(ConnectError::Malformed { .. })
    ));
    assert!(matches!(fabric.provider(&[]), Err(BuildError::Config { found: 0, .. })));
    assert!(matches!(fabric.provider(&[CX7; 9]), Err(BuildError::Config { found: 9, .. })));
}

#[test]
fn runs_that_are_not_inside_are_refused() {
    let (fabric, mut a, mut b) = raw_pair(1, FabricConfig::calm(), CX7);
    let desc = b.memory.desc;
    let (len, page_bytes) = (1 << 20, 16);
    let layout = RunLayout {
        src_base: a.memory.local.base + 8,
        src_stride: 32,
        dst_base: desc.base,
        dst_stride: 16,
        page_bytes,
    };
    let work = WorkRequest {
        token: Token::from_bits(7),
        nic: 0,
        remote_nic: 1,
        peer: a.record.peer,
        src: layout.src_base,
        src_key: a.memory.local.keys.get(0).unwrap(),
        dst: layout.dst_base,
        dst_key: desc.keys.get(1).unwrap(),
        len: 3 * page_bytes,
        run: PageRun { first: 0, count: 3 },
        imm: None,
    };
    let (local, remote) = (Err(WorkError::LocalAccess), Err(WorkError::RemoteAccess));
    let (src_end, dst_end) = (len / 32, len / 16);
    let cases = [
        // The last pages that there are; each page before.
        (vec![0, src_end - 1, 5], vec![3, dst_end - 1, 0], layout, Ok(())),
        (vec![0, src_end, 5], vec![3, 1, 0], layout, local),
        (vec![0, 1, u32::MAX], vec![3, 1, 0], layout, local),
        (vec![0, 1, 5], vec![3, dst_end, 0], layout, remote),
        (vec![0, 1, 5], vec![u32::MAX, 1, 0], layout, remote),
        (vec![0, 1, 5], vec![3, 1, 0], RunLayout { page_bytes: 8, ..layout }, local),
        (vec![0, 1, 5], vec![3, 1, 0], RunLayout { src_stride: u64::MAX, ..layout }, local),
    ];
    for (from, to, layout, outcome) in cases {
        a.record.run = Some((from, to, layout));
        assert_eq!(a.provider.post(0, &[work], &mut a.record), 1);
        advance(&fabric, &mut a, &mut b, SECOND);
        assert_eq!(a.record.done.pop(), Some((7, outcome)), "{:?}", a.record.run);
    }
    // Nothing is told of it.
    a.record.run = None;
    assert_eq!(a.provider.post(0, &[work], &mut a.record), 1);
    advance(&fabric, &mut a, &mut b, SECOND);
    assert_eq!(a.record.done.pop(), Some((7, local)));
}

// ---- the fabric can be told to be wrong, and that shows ----

/// What a simple check of one sender and one receiver finds wrong.
fn suspicious(sabotage: Sabotage) -> bool {
    let (mut world, peer) = World::pair(1, NO_FULL_QUEUES, [&[CX7; 2], &[CX7]]);
    world.fabric.sabotage(Some((sabotage, 3)));
    let counter = world.engines[1].counter().unwrap();
    let (src, bytes) = filled(&world.engines[0], 5000, 1);
    let dst = world.engines[1].alloc(5000).unwrap();
    let zeros = vec![0; 5000];
    let mut wrong = false;
    for _ in 0..20 {
        let write = single(peer, &src, &dst.desc(), Some(&counter)).len;
        let desc = dst.desc();
        let request = SingleWrite { len: write, ..single(peer, &src, &desc, Some(&counter)) };
        let transfer = world.engines[0].submit_single_write(&request).unwrap();
        let counted = world.fabric.wait_count(&mut world.drivers, &counter, 1, SECOND);
        wrong |= counted.is_err() || content(&dst) != bytes;
        let end = world.fabric.wait(&mut world.drivers, &transfer, SECOND);
        wrong |= end != Ok(End::Done);
        dst.write(0, &zeros).unwrap();
        world.run(SECOND / 100);
        wrong |= content(&dst) != zeros || counter.available() != 0;
        let stats = world.engines[0].stats();
        wrong |= stats.completed != stats.posted;
    }
    assert!(world.fabric.sabotaged() > 0);
    wrong
}

#[test]
fn sabotage_shows() {
    for sabotage in [
        Sabotage::ImmediateFirst,
        Sabotage::ImmediateTwice,
        Sabotage::ImmediateLost,
        Sabotage::CompletionLost,
        Sabotage::CompletionTwice,
        Sabotage::WriteAfterDone,
        Sabotage::TailLost,
    ] {
        assert!(suspicious(sabotage), "{sabotage:?}");
    }
}

/// Fences, receipts and withdrawals that lie.
#[test]
fn sabotage_of_fences_and_withdrawals_shows() {
    let path = Path { nic: 1, remote_nic: 0 };
    let remote = RemotePath { from: 1, to: 0 };
    for sabotage in [Sabotage::FenceLeaks, Sabotage::ReceiptShort, Sabotage::RevokeIgnored] {
        let mut wrong = 0;
        for seed in 0..30 {
            let (fabric, mut a, mut b) = raw_pair(seed, NO_FULL_QUEUES, CX7);
            fabric.sabotage(Some((sabotage, 1)));
            let desc = b.memory.desc;
            a.post(path, &desc, 0..40);
            advance(&fabric, &mut a, &mut b, Duration::from_micros(40));
            if sabotage == Sabotage::RevokeIgnored {
                b.provider.memory().revoke(&b.memory, Duration::ZERO).unwrap();
                let before = (0..40).filter(|&n| b.has(n)).count();
                advance(&fabric, &mut a, &mut b, SECOND);
                wrong += u32::from((0..40).filter(|&n| b.has(n)).count() != before);
                continue;
            }
            fabric.nic_down(0, 1);
            a.poll();
            let receipt = b.provider.fence(b.record.peer, remote, &mut b.record).unwrap();
            a.provider.settle(a.record.peer, path, &receipt, &mut a.record).unwrap();
            advance(&fabric, &mut a, &mut b, SECOND);
            let done = a.record.done.iter().filter(|(_, outcome)| outcome.is_ok()).count();
            wrong += u32::from(done != b.record.immediates.len());
        }
        assert!(wrong > 0, "{sabotage:?}");
    }
}
