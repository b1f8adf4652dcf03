//! How long it takes until all GPUs have pages of all others: a process for each rank, each with an engine that its own thread polls,
//! and all begin at the same instant.
//!
//! Every rank writes to every other, first to the next one, so that none is written to by all at once. A round ends when the last rank has
//! counted all that it is written. All read the same clock (`CLOCK_MONOTONIC`). Pages of each request are compared by who
//! received them before it is timed.

use crate::ends::{COMPARED, LIMIT, ROUNDS, TURNS, engine};
use crate::processes::{Orders, Place, Process, ask, now};
use crate::rig::Random;
use immwire::{
    Driver, End, ImmCounter, PageIndices, PagedWrite, Pages, PeerId, Region, SingleWrite, Transfer,
    TransferEngine,
};
use immwire_cuda::Device;
use serde_json::{Value, json};
use std::error::Error;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// From the last order until all begin: pipes are read by then.
const LEAD_NS: u64 = 3_000_000;

/// What each rank writes to each other one.
#[derive(Clone, Copy)]
struct Shape {
    pages: u32,
    page_bytes: u64,
}

impl Shape {
    fn of_line(line: &str) -> Outcome<Self> {
        Ok(Self { pages: ask(line, 1)?, page_bytes: ask(line, 2)? })
    }
}

/// Who there is, and how much memory each has for either way.
#[derive(Clone, Copy)]
struct World {
    ranks: u32,
    pool: u64,
}

impl World {
    /// Ranks but the given one, the next first.
    fn others(self, rank: u32) -> impl Iterator<Item = u32> {
        (1..self.ranks).map(move |step| (rank + step) % self.ranks)
    }

    /// Bytes of a rank's pool that each other one writes to.
    fn part(self) -> u64 {
        self.pool / u64::from(self.ranks - 1) / (64 << 10) * (64 << 10)
    }

    /// Where in the pool of `to` that part begins.
    fn offset(self, from: u32, to: u32) -> u64 {
        u64::from((from + self.ranks - to) % self.ranks - 1) * self.part()
    }

    /// The pages of a request, in the one pool and in that part of the other: both ends draw alike.
    fn lists(self, from: u32, to: u32, shape: Shape, turn: usize) -> (Vec<u32>, Vec<u32>) {
        let seed = [from.into(), to.into(), shape.pages.into(), shape.page_bytes, turn as u64];
        let seed = seed.iter().fold(0, |seed, &word| Random(seed ^ word).next());
        let mut random = Random(seed);
        let mut list = |bytes: u64| {
            let room = usize::try_from(bytes / shape.page_bytes).unwrap_or(usize::MAX);
            random.distinct(shape.pages as usize, room)
        };
        (list(self.pool), list(self.part()))
    }
}

/// What the pool of `rank` holds from `offset`, a multiple of 8.
fn pattern(rank: u32, offset: u64, bytes: usize) -> Vec<u8> {
    let word = |at: u64| Random(at ^ (u64::from(rank) << 40)).next();
    (0..bytes as u64 / 8).flat_map(|i| word(offset + 8 * i).to_le_bytes()).collect()
}

/// A peer, and where to write to.
struct Other {
    rank: u32,
    peer: PeerId,
    place: Place,
}

/// What of each turn goes to each of the others.
type Requests = Vec<Vec<(PageIndices, PageIndices)>>;

struct Rank {
    number: u32,
    world: World,
    engine: TransferEngine,
    driver: Driver,
    source: Region,
    target: Region,
    counter: ImmCounter,
    others: Vec<Other>,
}

impl Rank {
    fn new(number: u32, world: World, sms: u32) -> Outcome<Self> {
        let gpu = number % Device::count()?.max(1);
        let (engine, driver) = engine(vec![gpu], sms)?;
        let pool = usize::try_from(world.pool)?;
        let (source, target) = (engine.alloc_gpu(gpu, pool)?, engine.alloc_gpu(gpu, pool)?);
        for at in (0..pool).step_by(64 << 20) {
            let bytes = (pool - at).min(64 << 20);
            source.write(at as u64, &pattern(number, at as u64, bytes))?;
        }
        let counter = engine.counter()?;
        Ok(Self { number, world, engine, driver, source, target, counter, others: Vec::new() })
    }

    fn place(&self) -> Place {
        let (desc, tag) = (self.target.desc(), self.counter.tag());
        Place { address: self.engine.address().clone(), desc, tag }
    }

    /// `places`: of all ranks, three words each.
    fn meet(&mut self, places: &str) -> Outcome<()> {
        let words: Vec<&str> = places.split_whitespace().skip(1).collect();
        for rank in self.world.others(self.number) {
            let words = words.chunks_exact(3).nth(rank as usize).ok_or("a rank is missing")?;
            let place = Place::of_line(&words.join(" "))?;
            let peer = self.driver.add_peer(&place.address)?;
            self.others.push(Other { rank, peer, place });
        }
        for other in &self.others {
            self.driver.wait_peer(other.peer, LIMIT)?;
        }
        Ok(())
    }

    fn prepare(&self, shape: Shape) -> Requests {
        let request = |to, turn| {
            let (from, to) = self.world.lists(self.number, to, shape, turn);
            (from.into(), to.into())
        };
        let turn = |turn| self.others.iter().map(|other| request(other.rank, turn)).collect();
        (0..TURNS).map(turn).collect()
    }

    fn submit(
        &mut self,
        to: usize,
        shape: Shape,
        lists: &(PageIndices, PageIndices),
    ) -> Outcome<Transfer> {
        let other = &self.others[to];
        let dst_offset = self.world.offset(self.number, other.rank);
        let (peer, imm) = (other.peer, Some(other.place.tag));
        let (src, dst) = (&self.source, &other.place.desc);
        if shape.pages == 1 {
            let (src_offset, len) = (dst_offset, shape.page_bytes);
            let write = SingleWrite { peer, src, src_offset, dst, dst_offset, len, imm };
            return Ok(self.driver.submit_single_write(&write)?);
        }
        let pages = |indices: &PageIndices, offset| Pages {
            indices: indices.clone(),
            stride: shape.page_bytes,
            offset,
        };
        Ok(self.engine.submit_paged_writes(&PagedWrite {
            peer,
            page_bytes: shape.page_bytes,
            src,
            src_pages: pages(&lists.0, 0),
            dst,
            dst_pages: pages(&lists.1, dst_offset),
            imm,
        })?)
    }

    /// Writes to all others at the instant `at`. When the calls had returned, when all was counted that others wrote, and when
    /// the own writes had ended, in nanoseconds after that.
    fn round(
        &mut self,
        shape: Shape,
        requests: &[(PageIndices, PageIndices)],
        at: u64,
    ) -> Outcome<[u64; 3]> {
        while now() < at {
            self.driver.poll();
        }
        let mut transfers = Vec::with_capacity(requests.len());
        for (to, lists) in requests.iter().enumerate() {
            transfers.push(self.submit(to, shape, lists)?);
        }
        let called = now();
        let expected = u64::from(shape.pages) * transfers.len() as u64;
        let (mut counted, mut ended) = (None, None);
        let begun = Instant::now();
        while counted.is_none() || ended.is_none() {
            self.driver.poll();
            if counted.is_none() && self.counter.try_take(expected)? {
                counted = Some(now());
            }
            if ended.is_none() && transfers.iter().all(|transfer| transfer.poll_end().is_some()) {
                ended = Some(now());
            }
            if begun.elapsed() > LIMIT {
                let available = self.counter.available();
                return Err(format!("{available} of {expected} writes within {LIMIT:?}").into());
            }
        }
        if let Some(end) = transfers.iter().filter_map(Transfer::poll_end).find(|&e| e != End::Done)
        {
            return Err(format!("a transfer ended so: {end:?}").into());
        }
        let after = |time: Option<u64>| time.map_or(0, |time| time.saturating_sub(at));
        Ok([after(Some(called)), after(counted), after(ended)])
    }

    /// Whether what all others wrote in that turn is theirs: some pages of each.
    fn compare(&self, shape: Shape, turn: usize) -> Outcome<()> {
        let mut random = Random(turn as u64);
        let bytes = shape.page_bytes.min(64 << 10);
        for rank in self.world.others(self.number) {
            let begin = self.world.offset(rank, self.number);
            let lists = self.world.lists(rank, self.number, shape, turn);
            for _ in 0..COMPARED {
                let (from, to) = if shape.pages == 1 {
                    let at = begin + random.next() % (shape.page_bytes - bytes + 1) / 8 * 8;
                    (at, at)
                } else {
                    let page = random.below(lists.0.len());
                    let place = |list: &[u32]| u64::from(list[page]) * shape.page_bytes;
                    (place(&lists.0), begin + place(&lists.1))
                };
                let mut found = vec![0; usize::try_from(bytes)?];
                self.target.read(to, &mut found)?;
                if found != pattern(rank, from, found.len()) {
                    return Err(format!("bytes at {to} are not rank {rank}'s at {from}").into());
                }
            }
        }
        Ok(())
    }
}

/// One rank's process. Answers one line for each that it reads.
pub(crate) fn rank(number: u32, ranks: u32, sms: u32, pool: u64) -> Outcome<()> {
    let mut rank = Rank::new(number, World { ranks, pool }, sms)?;
    println!("{}", rank.place().to_line()?);
    let orders = Orders::new();
    let mut requests = Requests::new();
    let mut shape = Shape { pages: 0, page_bytes: 0 };
    while let Some(line) = orders.next(|| {
        rank.driver.poll();
    }) {
        match line.split_whitespace().next() {
            Some("meet") => {
                rank.meet(&line)?;
                println!("met");
            }
            Some("prepare") => {
                shape = Shape::of_line(&line)?;
                requests = rank.prepare(shape);
                println!("ready");
            }
            Some("round") => {
                let turn: usize = ask(&line, 1)?;
                let lists = requests.get(turn).ok_or("a turn that is not prepared")?;
                let [called, counted, ended] = rank.round(shape, lists, ask(&line, 2)?)?;
                println!("{called} {counted} {ended}");
            }
            Some("compare") => {
                rank.compare(shape, ask(&line, 1)?)?;
                println!("right");
            }
            _ => return Err(format!("what is {line}?").into()),
        }
    }
    Ok(())
}

/// All ranks' processes.
struct Everybody(Vec<Process>);

impl Everybody {
    /// Says the same to all, and hears what they answer.
    fn ask(&mut self, line: &str) -> Outcome<Vec<String>> {
        for rank in &mut self.0 {
            rank.say(line)?;
        }
        self.0.iter_mut().map(Process::hear).collect()
    }

    /// What of a round took all ranks longest: calls, counts, ends. In microseconds.
    fn round(&mut self, turn: usize) -> Outcome<[f64; 3]> {
        let mut longest = [0_u64; 3];
        for answer in self.ask(&format!("round {turn} {}", now() + LEAD_NS))? {
            for (at, longest) in longest.iter_mut().enumerate() {
                *longest = ask::<u64>(&answer, at)?.max(*longest);
            }
        }
        Ok(longest.map(|ns| ns as f64 / 1e3))
    }

    fn measure(&mut self, shape: Shape) -> Outcome<Value> {
        self.ask(&format!("prepare {} {}", shape.pages, shape.page_bytes))?;
        for turn in 0..TURNS {
            self.round(turn)?;
            self.ask(&format!("compare {turn}"))?;
        }
        let rounds = (0..ROUNDS).map(|round| self.round(round % TURNS));
        let rounds = rounds.collect::<Outcome<Vec<_>>>()?;
        let sorted = |of: usize| {
            let mut all: Vec<f64> = rounds.iter().map(|round| round[of]).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let (called, counted, ended) = (sorted(0), sorted(1), sorted(2));
        let middle = |all: &[f64]| all[all.len() / 2];
        let bytes = u64::from(shape.pages) * shape.page_bytes * (self.0.len() as u64 - 1);
        let result = json!({
            "pages": shape.pages * (u32::try_from(self.0.len())? - 1), "page_bytes": shape.page_bytes,
            "call_us": middle(&called), "counted_us": middle(&counted), "ended_us": middle(&ended),
            "best_us": counted[0], "worst_us": counted[counted.len() - 1],
            "GBps": bytes as f64 / middle(&counted) / 1e3,
        });
        eprintln!("{result}");
        Ok(result)
    }
}

/// Measures rounds of so many ranks, that have the GPUs in turn, each with two pools of so many bytes. `GBps` and `pages` are what each rank
/// writes.
pub(crate) fn measure(ranks: u32, sms: u32, pool: u64) -> Outcome<Value> {
    if ranks < 2 || pool < 64 << 20 {
        return Err("an exchange is among two ranks or more, with 64 MiB each or more".into());
    }
    let start = |rank: u32| {
        let words = [rank, ranks, sms].map(|word| word.to_string());
        Process::start(&["exchange-rank", &words[0], &words[1], &words[2], &pool.to_string()])
    };
    let mut all = Everybody((0..ranks).map(start).collect::<Outcome<_>>()?);
    let places = all.0.iter_mut().map(Process::hear).collect::<Outcome<Vec<_>>>()?;
    all.ask(&format!(
        "meet {}",
        places.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
    ))?;
    let world = World { ranks, pool };
    // Of all others together, in so many pages; one range for each of them; and what there is room for.
    let paged = [1024, 16_384, 40_000].into_iter().flat_map(|pages| {
        [4 << 10, 16 << 10, 64 << 10]
            .map(|bytes| Shape { pages: pages / (ranks - 1), page_bytes: bytes })
    });
    let ranges = [1 << 20, 16 << 20, 256 << 20].map(|page_bytes| Shape { pages: 1, page_bytes });
    let shapes = ranges.into_iter().chain(paged);
    let shapes = shapes.filter(|one| u64::from(one.pages) * one.page_bytes <= world.part());
    let rows = shapes.map(|shape| all.measure(shape)).collect::<Outcome<Vec<_>>>()?;
    Ok(json!({ "ranks": ranks, "gpus": Device::count()?, "sms": sms, "writes": rows }))
}
