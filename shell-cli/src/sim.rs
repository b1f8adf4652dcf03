//! `immwire sim`: how long it would take on NICs that are not here, from the code that would run there.
//!
//! Each rank is an engine of `immwire::sim`, with its own core and driver; the fabric knows the NICs'
//! published figures and a virtual clock. Knows nothing of experts or kernels: what a step of an MoE
//! layer asks of the network is a scatter from each rank to all others and a barrier, and that is run.
//!
//! # Invariants
//!
//! A prediction is printed only if every transfer ended in `Done` and every count was exact.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use immwire::core::group::PeerSlot;
use immwire::core::id::Time;
use immwire::core::imm::Tally;
use immwire::sim::{Fabric, FabricConfig, NicModel};
use immwire::{
    AddPeerError, BuildError, CountError, CounterTaken, Driver, End, ImmCounter, ImmTag,
    LivenessConfig, PeerGroup, PeerId, Region, RegisterError, ScatterWrite, SubmitError, Target,
    Transfer, TransferEngine,
};
use serde::Serialize;

use crate::args::SimEpArgs;
use crate::report::table::{bytes_text, figure};
use crate::signals;

/// Ranks of one engine group at most: what the engine's counters of peers allow is far beyond.
pub const WORLD_MAX: u16 = 1024;
/// The counter that every rank counts its peers' writes on.
const COUNTERS: u16 = 1;
/// No step takes longer on the fabric, or something is wrong.
const PATIENCE: Duration = Duration::from_secs(100);
/// Bytes are moved, not only timed, if all of them together are no more than this.
const MOVED_MAX: u64 = 64 << 20;
/// GPUs of one node in the published measurements.
const PUBLISHED_NODE: u16 = 8;

/// Why there is no prediction.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// An engine could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// Memory could not be had.
    #[error(transparent)]
    Memory(#[from] RegisterError),
    /// A counter could not be had.
    #[error(transparent)]
    Counter(#[from] CounterTaken),
    /// A peer could not be called.
    #[error(transparent)]
    AddPeer(#[from] AddPeerError),
    /// A request was refused.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// A wait could not begin.
    #[error(transparent)]
    Count(#[from] CountError),
    /// Not all ranks came to know each other.
    #[error("rank {rank} knows {found} of {wanted} peers")]
    Peers {
        /// The rank.
        rank: usize,
        /// Peers it has.
        found: usize,
        /// Peers it should have.
        wanted: usize,
    },
    /// Nobody writes to anybody.
    #[error(
        "{world} ranks on nodes of {node} are one node, and leave each other out: there is nothing to predict; have more ranks, or a smaller --node-size"
    )]
    OneNode {
        /// The most ranks that were asked for.
        world: u16,
        /// Ranks of a node.
        node: u16,
    },
    /// The fabric's time was up.
    #[error("{what}: {done} of {wanted} had come after {PATIENCE:?} on the fabric's clock")]
    Stuck {
        /// What was waited for.
        what: &'static str,
        /// How many had come.
        done: u64,
        /// How many were to come.
        wanted: u64,
    },
    /// A transfer failed.
    #[error("{what}: {failed} transfers failed")]
    Failed {
        /// Of what kind.
        what: &'static str,
        /// How many.
        failed: u64,
    },
    /// Bytes that were moved are not those that were sent.
    #[error("rank {rank} received other bytes than were sent")]
    Bytes {
        /// Which rank.
        rank: usize,
    },
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

/// What is simulated.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Ranks.
    pub world: u16,
    /// Ranks of one node, which do not write to each other; 1 for all of them do.
    pub node: u16,
    /// NICs of each rank.
    pub nics: Vec<NicModel>,
    /// Bytes that each rank writes to each other one.
    pub bytes: u64,
    /// Whether all ranks begin with rank 0, and not each with the rank behind it.
    pub same_order: bool,
    /// How often barrier and scatter are run.
    pub rounds: u32,
    /// Of the fabric.
    pub seed: u64,
}

/// What came out, in microseconds of the fabric's clock if not said otherwise. Medians over rounds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    /// Ranks.
    pub world: u16,
    /// Model of the NICs.
    pub nic: &'static str,
    /// NICs of each rank.
    pub nics: usize,
    /// Bytes from each rank to each other one.
    pub bytes_per_pair: u64,
    /// Barrier: from its submission until the last rank has heard of all others.
    pub barrier_us: f64,
    /// Scatter from each rank to all others: until the last rank has everything.
    pub scatter_us: f64,
    /// The same, with nodes of 8 that do not write to each other.
    pub scatter_between_nodes_us: Option<f64>,
    /// Processor time of one rank until the last write of its scatter is posted; the median rank.
    pub post_us: f64,
    /// From the submission of the scatters until the first write of any has arrived.
    pub first_transfer_us: f64,
    /// Published time to post one scatter.
    pub published_post_us: Option<f64>,
    /// Published time of a decode dispatch, kernels included, nodes of 8.
    pub published_dispatch_us: Option<f64>,
    /// Whether bytes were moved and compared, or only timed.
    pub bytes_moved: bool,
    /// Seconds that it took here, set-up included.
    pub wall_s: f64,
    /// Of those, the set-up: building the engines and connecting all pairs.
    pub setup_s: f64,
    /// Events of the fabric.
    pub events: u64,
    /// Resident memory of this process that each engine accounts for, in KiB.
    pub rss_per_engine_kib: u64,
    /// What the core keeps for each peer, in bytes: its slot, and its share of the tallies.
    pub core_per_peer_bytes: usize,
}

/// Published figures: model, ranks, time to post one scatter (arXiv 2510.27656, table 9), decode dispatch
/// of 128 tokens (README of its repository).
const PUBLISHED: [(&str, u16, f64, f64); 8] = [
    ("cx7", 8, 0.842, 50.5),
    ("cx7", 16, 1.926, 110.2),
    ("cx7", 32, 4.140, 153.9),
    ("cx7", 64, 8.502, 187.5),
    ("efa200", 8, 3.081, 49.7),
    ("efa200", 16, 6.536, 214.8),
    ("efa200", 32, 13.374, 229.1),
    ("efa200", 64, 27.886, 266.7),
];

/// One rank.
struct Rank {
    engine: TransferEngine,
    src: Region,
    dst: Region,
    counter: Arc<ImmCounter>,
    /// In the order of ranks, without itself.
    peers: Vec<PeerId>,
    group: PeerGroup,
}

/// Ranks that know each other.
struct World {
    fabric: Fabric,
    drivers: Vec<Driver>,
    ranks: Vec<Rank>,
    tag: ImmTag,
    scatters: usize,
}

/// What callbacks of one step have seen.
#[derive(Default)]
struct Tallied {
    ended: AtomicU64,
    failed: AtomicU64,
    counted: AtomicU64,
    /// When the last rank had counted all.
    last: Mutex<Time>,
}

/// The figures of one step.
struct Step {
    took: Duration,
    /// Of each rank.
    post: Vec<Duration>,
    first: Duration,
}

impl Plan {
    /// Whom a rank writes to, in order.
    fn scatter_targets(&self, rank: u16) -> impl Iterator<Item = u16> {
        let (world, node) = (u32::from(self.world), self.node.max(1));
        let first = if self.same_order { 0 } else { u32::from(rank) + u32::from(node) };
        let others = (first..first + world).filter_map(move |it| u16::try_from(it % world).ok());
        others.filter(move |&it| it != rank && (node == 1 || it / node != rank / node))
    }

    fn moves_bytes(&self) -> bool {
        let pairs = u64::from(self.world) * u64::from(self.world);
        pairs.saturating_mul(self.bytes) <= MOVED_MAX
    }
}

impl World {
    fn new(plan: &Plan) -> Result<Self, SimError> {
        let config = FabricConfig { move_bytes: plan.moves_bytes(), ..FabricConfig::calm() };
        let fabric = Fabric::new(plan.seed, config);
        let world = usize::from(plan.world);
        let never = LivenessConfig {
            heartbeat: Duration::MAX,
            suspect_after: Duration::MAX,
            down_after: Duration::MAX,
            connect_deadline: Duration::MAX,
            idle_after: Duration::MAX,
        };
        // As little for each peer as there can be: one message slot, one counter's tally.
        let builder = TransferEngine::builder()
            .transfers(4)
            .counters(COUNTERS)
            .peers(plan.world)
            .mailbox(1, 64)
            .liveness(never);
        let (mut drivers, mut engines) = (Vec::new(), Vec::new());
        for _ in 0..world {
            let (engine, driver) = fabric.engine(builder.clone(), &plan.nics)?;
            engines.push(engine);
            drivers.push(driver);
        }
        for caller in 0..world {
            interrupted()?;
            for called in engines.get(caller + 1..).unwrap_or_default() {
                if let Some(driver) = drivers.get_mut(caller) {
                    driver.add_peer(called.address())?;
                }
            }
            // One rank's calls at a time: so peers are known in the order of ranks.
            fabric.run_for(&mut drivers, Duration::from_millis(1));
        }
        let length = usize::try_from(plan.bytes).unwrap_or(usize::MAX).max(1);
        let mut ranks = Vec::new();
        for (rank, engine) in engines.into_iter().enumerate() {
            let peers = engine.peers();
            let (found, wanted) = (peers.len(), world - 1);
            if found != wanted {
                return Err(SimError::Peers { rank, found, wanted });
            }
            let src = engine.alloc(length)?;
            let dst = engine.alloc(length.saturating_mul(world))?;
            let counter = Arc::new(engine.counter_at(0)?);
            let group = engine.add_peer_group(&peers);
            ranks.push(Rank { engine, src, dst, counter, peers, group });
        }
        // All are of slot 0 and of its first tenant, hence of one tag.
        let tag = ranks.first().map(|rank: &Rank| rank.counter.tag());
        let tag = tag.ok_or(SimError::Peers { rank: 0, found: 0, wanted: 1 })?;
        Ok(Self { fabric, drivers, ranks, tag, scatters: 0 })
    }

    /// Runs one step on all ranks at once: `submit` on each, then until each has counted as many writes
    /// as `expected` says, and every transfer has ended.
    fn step(
        &mut self,
        what: &'static str,
        expected: impl Fn(usize) -> u64,
        submit: impl Fn(&Rank, usize) -> Result<Transfer, SubmitError>,
    ) -> Result<Step, SimError> {
        let seen = Arc::new(Tallied::default());
        self.fabric.reset_stats();
        let start = self.fabric.now();
        for (at, rank) in self.ranks.iter().enumerate() {
            let (tallied, fabric) = (Arc::clone(&seen), self.fabric.clone());
            rank.engine.expect_imm_count(&rank.counter, expected(at), move |counted| {
                tallied.counted.fetch_add(u64::from(counted.is_ok()), Ordering::Relaxed);
                *tallied.last.lock().unwrap_or_else(PoisonError::into_inner) = fabric.now();
            })?;
            let tallied = Arc::clone(&seen);
            submit(rank, at)?.on_done(move |end| {
                tallied.failed.fetch_add(u64::from(end != End::Done), Ordering::Relaxed);
                tallied.ended.fetch_add(1, Ordering::Relaxed);
            });
        }
        let wanted = self.ranks.len() as u64;
        let both = || {
            let counted = seen.counted.load(Ordering::Relaxed);
            counted.min(seen.ended.load(Ordering::Relaxed))
        };
        let all = || (both() == wanted || signals::interrupted()).then_some(());
        let ended = self.fabric.run_until(&mut self.drivers, PATIENCE, all);
        interrupted()?;
        if ended.is_none() {
            return Err(SimError::Stuck { what, done: both(), wanted });
        }
        let failed = seen.failed.load(Ordering::Relaxed);
        if failed > 0 {
            return Err(SimError::Failed { what, failed });
        }
        let stats: Vec<_> =
            (0..).zip(&self.ranks).map(|(engine, _)| self.fabric.stats(engine)).collect();
        let first = stats.iter().map(|stats| stats.first_arrival).min();
        let first = first.filter(|first| *first != Time::NEVER).unwrap_or(start);
        let last = *seen.last.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Step {
            took: last.since(start),
            post: stats.iter().map(|stats| stats.last_post.since(start)).collect(),
            first: first.since(start),
        })
    }

    fn barrier(&mut self) -> Result<Step, SimError> {
        let (tag, others) = (self.tag, self.ranks.len().saturating_sub(1) as u64);
        self.step("barrier", |_| others, |rank, _| rank.engine.submit_barrier(&rank.group, tag))
    }

    fn scatter(&mut self, plan: &Plan) -> Result<Step, SimError> {
        let targets: Vec<Arc<[Target]>> =
            (0..plan.world).map(|rank| self.targets(plan, rank)).collect();
        let tag = self.tag;
        let expected = |at: usize| targets.get(at).map_or(0, |targets| targets.len() as u64);
        let submit = |rank: &Rank, at: usize| {
            let targets = targets.get(at).cloned().unwrap_or_default();
            rank.engine.submit_scatter(&ScatterWrite { src: &rank.src, targets, imm: Some(tag) })
        };
        // Other bytes each time: those of the last would pass for what did not come.
        self.scatters = self.scatters.wrapping_add(1);
        for (number, rank) in self.ranks.iter().enumerate().filter(|_| plan.moves_bytes()) {
            let length = usize::try_from(rank.src.len()).unwrap_or(0);
            // PROOF: as long as the region.
            let _ = rank.src.write(0, &vec![pattern(number, self.scatters); length]);
        }
        let step = self.step("scatter", expected, submit)?;
        if plan.moves_bytes() {
            self.compare(plan)?;
        }
        Ok(step)
    }

    fn targets(&self, plan: &Plan, rank: u16) -> Arc<[Target]> {
        let target = |other: u16| {
            let there = self.ranks.get(usize::from(other))?;
            let here = self.ranks.get(usize::from(rank))?;
            let place = usize::from(other) - usize::from(other > rank);
            Some(Target {
                peer: *here.peers.get(place)?,
                dst: there.dst.desc(),
                src_offset: 0,
                dst_offset: plan.bytes.saturating_mul(rank.into()),
                len: plan.bytes,
            })
        };
        plan.scatter_targets(rank).filter_map(target).collect()
    }

    /// Every rank has the bytes of every rank that wrote to it.
    fn compare(&self, plan: &Plan) -> Result<(), SimError> {
        let mut bytes = vec![0; usize::try_from(plan.bytes).unwrap_or(0)];
        for (rank, it) in (0..plan.world).zip(&self.ranks) {
            for other in plan.scatter_targets(rank) {
                let read = it.dst.read(plan.bytes.saturating_mul(other.into()), &mut bytes);
                let expected = pattern(other.into(), self.scatters);
                if read.is_err() || bytes.iter().any(|&byte| byte != expected) {
                    return Err(SimError::Bytes { rank: rank.into() });
                }
            }
        }
        Ok(())
    }
}

/// What rank `rank` writes in this scatter; never 0, and not what it wrote in the last.
fn pattern(rank: usize, scatter: usize) -> u8 {
    u8::try_from((rank + scatter) % 255).unwrap_or(0) + 1
}

fn interrupted() -> Result<(), SimError> {
    if signals::interrupted() { Err(SimError::Interrupted) } else { Ok(()) }
}

/// Runs barriers and scatters among the plan's ranks, and says how long they took on the fabric.
///
/// # Errors
///
/// [`SimError`]: something did not end, or not as it should.
pub fn predict(plan: &Plan) -> Result<Prediction, SimError> {
    let start = Instant::now();
    let mut world = World::new(plan)?;
    let setup = start.elapsed();
    let (mut barriers, mut scatters, mut between) = (Vec::new(), Vec::new(), Vec::new());
    let (mut posts, mut firsts) = (Vec::new(), Vec::new());
    let nodes = Plan { node: PUBLISHED_NODE, ..plan.clone() };
    for _ in 0..plan.rounds.max(1) {
        barriers.push(world.barrier()?.took);
        let mut step = world.scatter(plan)?;
        scatters.push(step.took);
        posts.extend(median(&mut step.post));
        firsts.push(step.first);
        if plan.node == 1 && plan.world > PUBLISHED_NODE {
            between.push(world.scatter(&nodes)?.took);
        }
    }
    let published = PUBLISHED.iter().find(|(nic, ranks, ..)| {
        let nics = if *nic == "efa200" { 2 } else { 1 };
        let model = plan.nics.first().map(|nic| nic.name);
        let alike = (Some(*nic), *ranks, nics) == (model, plan.world, plan.nics.len());
        // Times of one exchange say nothing of another.
        alike && plan.node == 1 && plan.bytes == published_bytes(*ranks)
    });
    Ok(Prediction {
        world: plan.world,
        nic: plan.nics.first().map_or("", |nic| nic.name),
        nics: plan.nics.len(),
        bytes_per_pair: plan.bytes,
        barrier_us: micros(median(&mut barriers)),
        scatter_us: micros(median(&mut scatters)),
        scatter_between_nodes_us: median(&mut between).map(|time| micros(Some(time))),
        post_us: micros(median(&mut posts)),
        first_transfer_us: micros(median(&mut firsts)),
        published_post_us: published.map(|(.., post, _)| *post),
        published_dispatch_us: published.map(|(.., dispatch)| *dispatch),
        bytes_moved: plan.moves_bytes(),
        wall_s: start.elapsed().as_secs_f64(),
        setup_s: setup.as_secs_f64(),
        events: world.fabric.events(),
        rss_per_engine_kib: resident_kib() / u64::from(plan.world.max(1)),
        core_per_peer_bytes: size_of::<PeerSlot>() + usize::from(COUNTERS) * size_of::<Tally>(),
    })
}

fn median(times: &mut [Duration]) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

fn micros(time: Option<Duration>) -> f64 {
    time.map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

/// Resident memory of this process; 0 if the kernel does not say.
fn resident_kib() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 =
        statm.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64 / 1024
}

/// What a rank writes to another in a dispatch: the rows of the tokens that are routed to it, each once,
/// however many of the rank's experts want it. Tokens are routed to `top_k` of all experts alike.
fn bytes_per_pair(args: &SimEpArgs, world: u16) -> u64 {
    let SimEpArgs { tokens, top_k, experts_per_rank, token_bytes, .. } = *args;
    args.bytes.unwrap_or_else(|| routed_bytes(world, tokens, top_k, experts_per_rank, token_bytes))
}

/// The same of the exchange whose times are published: of DeepSeek-V3's shape.
fn published_bytes(world: u16) -> u64 {
    routed_bytes(world, 128, 8, None, 7392)
}

fn routed_bytes(
    world: u16,
    tokens: u32,
    top_k: u32,
    experts_per_rank: Option<u32>,
    token_bytes: u64,
) -> u64 {
    let local = experts_per_rank.unwrap_or_else(|| (256 / u32::from(world)).max(1));
    let experts = f64::from(local) * f64::from(world);
    // The chance that none of the token's experts is one of the rank's.
    let missed: f64 = (0..top_k)
        .map(f64::from)
        .map(|taken| ((experts - f64::from(local) - taken) / (experts - taken)).max(0.0))
        .product();
    let rows = (f64::from(tokens) * (1.0 - missed)).ceil();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "up to 2^32 rows")]
    let rows = rows as u64;
    rows.max(1).saturating_mul(token_bytes)
}

/// `immwire sim ep`: prints each prediction as soon as it is there.
///
/// # Errors
///
/// [`SimError`].
pub fn ep(args: &SimEpArgs, mut print: impl FnMut(&str)) -> Result<(), SimError> {
    let worlds: &[u16] = if args.sweep { &[8, 16, 32, 64, 128, 256, 512] } else { &[args.world] };
    // What is one node writes nothing.
    let from = worlds.partition_point(|&world| world <= args.node_size);
    let worlds = worlds.get(from..).unwrap_or_default();
    if worlds.is_empty() {
        return Err(SimError::OneNode { world: args.world, node: args.node_size });
    }
    let nics = args.nics.map_or_else(|| usual_nics(&args.nic), usize::from);
    let mut rows = Vec::new();
    for &world in worlds {
        let prediction = predict(&Plan {
            world,
            node: args.node_size,
            same_order: args.same_order,
            nics: vec![args.nic; nics],
            bytes: bytes_per_pair(args, world),
            rounds: args.rounds,
            seed: args.seed,
        })?;
        if args.json {
            // PROOF: numbers and names only.
            print(&serde_json::to_string(&prediction).unwrap_or_default());
        } else if worlds.len() > 1 {
            crate::say(format_args!("{world} ranks: {:.1} s", prediction.wall_s));
        }
        rows.push(prediction);
    }
    if !args.json {
        print(&table(&rows));
    }
    Ok(())
}

/// How many of them one GPU has, where the figures come from.
fn usual_nics(nic: &NicModel) -> usize {
    match nic.name {
        "efa200" => 2,
        "efa100" => 4,
        _ => 1,
    }
}

fn table(rows: &[Prediction]) -> String {
    let dash = || "-".to_owned();
    let or_dash = |value: Option<f64>| value.map_or_else(dash, figure);
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "world", "pair", "barrier", "scatter", "between", "dispatch", "post", "post", "first",
        "wall", "RSS",
    ]);
    table.add_row([
        "",
        "",
        "predicted",
        "predicted",
        "nodes of 8",
        "published",
        "predicted",
        "published",
        "transfer",
        "here",
        "/ engine",
    ]);
    for row in rows {
        table.add_row([
            row.world.to_string(),
            bytes_text(row.bytes_per_pair),
            figure(row.barrier_us),
            figure(row.scatter_us),
            or_dash(row.scatter_between_nodes_us),
            or_dash(row.published_dispatch_us),
            figure(row.post_us),
            or_dash(row.published_post_us),
            figure(row.first_transfer_us),
            format!("{:.2} s", row.wall_s),
            format!("{} KiB", row.rss_per_engine_kib),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text: String =
        table.to_string().lines().map(|line| format!("{}\n", line.trim_end())).collect();
    if let Some(row) = rows.first() {
        text.push_str(&format!(
            "\nMicroseconds on the fabric's clock, {} x {} for each rank. post: processor time of one rank until its \
             scatter is\nposted; its cost for each write was taken from the published column, and a part that is cut over \
             NICs is\nposted once on each. dispatch: decode, 128 tokens, kernels and NVLink included, of which the \
             scatter between\nnodes is the network's part; its rows go once to each expert, ours once to each rank. first transfer: until the first write of any rank has arrived. \
             Published: arXiv 2510.27656,\ntable 9, and the README of its repository. In the core each peer takes {} \
             bytes.{}\n",
            row.nics,
            row.nic,
            row.core_per_peer_bytes,
            if rows.iter().any(|row| row.bytes_moved) {
                " Bytes were moved and compared\nwhere they fit 64 MiB."
            } else {
                " No bytes were moved."
            },
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command, SimArgs, SimCommand};
    use clap::Parser;

    fn plan(world: u16, bytes: u64) -> Plan {
        let nics = vec![NicModel::CONNECTX7];
        Plan { world, node: 1, nics, bytes, same_order: false, rounds: 1, seed: 1 }
    }

    fn ep_args(line: &str) -> SimEpArgs {
        match Cli::try_parse_from(line.split(' ')) {
            Ok(Cli { command: Command::Sim(SimArgs { command: SimCommand::Ep(args) }) }) => args,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn a_prediction_is_the_models_arithmetic() {
        let (nic, world, bytes) = (NicModel::CONNECTX7, 8_u16, 100_000);
        let got = predict(&plan(world, bytes)).unwrap();
        assert!(got.bytes_moved);
        let others = u32::from(world) - 1;
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        assert_eq!(got.post_us, us(nic.post * others));
        assert_eq!(got.first_transfer_us, us(nic.post + nic.occupancy(bytes) + nic.latency));
        // The wire is busy from the first post on, if nobody writes to whom another writes to.
        let (wire, scatter) = (us(nic.occupancy(bytes) * others), got.scatter_us);
        let fixed = us(nic.post + nic.latency);
        assert!(scatter >= wire + fixed && scatter < 1.02 * wire + fixed, "{scatter} {wire}");
        let incast = predict(&Plan { same_order: true, ..plan(world, bytes) }).unwrap().scatter_us;
        assert!(incast > 1.2 * scatter, "{incast} {scatter}");
        let barrier = us(nic.post * others + nic.latency);
        assert!(got.barrier_us >= barrier && got.barrier_us < barrier + 1.0, "{}", got.barrier_us);
    }

    #[test]
    fn the_same_plan_predicts_the_same_and_nodes_carry_less() {
        let plan = plan(16, published_bytes(16));
        let (a, b) = (predict(&plan).unwrap(), predict(&plan).unwrap());
        assert_eq!((a.scatter_us, a.barrier_us, a.events), (b.scatter_us, b.barrier_us, b.events));
        let between = a.scatter_between_nodes_us.unwrap();
        assert!(between < 0.7 * a.scatter_us, "{between} {}", a.scatter_us);
        assert_eq!(a.published_post_us, Some(1.926));
        // Of the same exchange only.
        let bytes = predict(&Plan { bytes: plan.bytes + 1, ..plan.clone() }).unwrap();
        let nodes = predict(&Plan { node: 8, ..plan }).unwrap();
        for other in [bytes, nodes] {
            assert_eq!((other.published_post_us, other.published_dispatch_us), (None, None));
        }
    }

    /// Only what crosses is predicted, and of nothing else is there a figure.
    #[test]
    fn one_node_is_nothing_to_predict() {
        let run = |line: &str| {
            let mut printed = Vec::new();
            let done = ep(&ep_args(line), |text| printed.push(text.to_owned()));
            (done.map_err(|error| error.to_string()), printed)
        };
        for line in ["--world 8 --node-size 8", "--world 2 --node-size 64"] {
            let (done, printed) = run(&format!("immwire sim ep --json {line}"));
            assert!(done.unwrap_err().contains("--node-size") && printed.is_empty(), "{line}");
        }
        // The last rank is a node of its own, and all write to it.
        let (done, printed) = run("immwire sim ep --json --world 9 --node-size 8 --bytes 4K");
        done.unwrap();
        let row: serde_json::Value = serde_json::from_str(&printed[0]).unwrap();
        let first = row["first_transfer_us"].as_f64().unwrap();
        assert!(first > 0.0 && first < 100.0, "{row}");
    }

    #[test]
    fn rows_go_once_to_each_rank() {
        let bytes = |line: &str, world| bytes_per_pair(&ep_args(line), world) / 7392;
        assert_eq!(bytes("immwire sim ep", 1), 128);
        // 256 experts, 8 of them: 5.295 of 8 ranks, 3.614 of 4 are hit.
        assert_eq!(bytes("immwire sim ep", 8), 85);
        assert_eq!(bytes("immwire sim ep", 4), 116);
        assert_eq!(bytes("immwire sim ep", 512), 2);
        assert_eq!(bytes("immwire sim ep --experts-per-rank 16 --tokens 4096", 64), 487);
        assert_eq!(bytes_per_pair(&ep_args("immwire sim ep --bytes 4K"), 64), 4096);
    }

    #[test]
    fn the_table_names_what_is_predicted_and_what_published() {
        let text = table(&[predict(&plan(8, published_bytes(8))).unwrap()]);
        assert!(text.contains("0.842") && text.contains("50.5") && text.contains("2510.27656"));
    }
}
