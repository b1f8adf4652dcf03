//! How long writes take from end to end: engines in two processes, each polled by its own thread, from before the submission
//! in the one until the other has taken the count.
//!
//! Both read the same clock (`CLOCK_MONOTONIC`). Places of each request are compared before it is timed, and of all that was timed: they
//! are cleared before, so that a count without bytes is noticed.

use crate::processes::{Orders, Place, Process, ask, now};
use crate::rig::Random;
use immwire::{
    Builder, Driver, End, ImmCounter, ImmTag, MrDesc, PageIndices, PagedWrite, Pages, PeerId,
    Region, SingleWrite, Transfer, TransferEngine,
};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::error::Error;
use std::io::{Write, stdout};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Bytes of each pool; more than the longest request.
const POOL: usize = 3 << 30;
/// No step takes longer.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
pub(crate) const ROUNDS: usize = 40;
/// Lists of pages that take turns, so that pages do not come from a cache.
pub(crate) const TURNS: usize = 4;
/// Requests that are under way at a time, where several are, and how often that is measured.
const AT_ONCE: [usize; 3] = [2, 8, 64];
const AGAIN: usize = 7;
/// Places that are compared of each request, and the most bytes at each.
pub(crate) const COMPARED: usize = 64;
const COMPARED_BYTES: u64 = 64 << 10;

/// What the sender's pool holds at `offset`, a multiple of 8.
fn word(offset: u64) -> u64 {
    Random(offset).next()
}

fn pattern(offset: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64 / 8).flat_map(|i| word(offset + 8 * i).to_le_bytes()).collect()
}

pub(crate) fn engine(gpus: Vec<u32>, sms: u32) -> Outcome<(TransferEngine, Driver)> {
    builder(gpus, sms).build_polled().map_err(Into::into)
}

fn builder(gpus: Vec<u32>, sms: u32) -> Builder {
    TransferEngine::builder().gpus(gpus).sms(NonZeroU32::new(sms).unwrap_or(NonZeroU32::MIN))
}

fn pool(engine: &TransferEngine, place: &str) -> Outcome<Region> {
    Ok(match place.parse() {
        Ok(gpu) => engine.alloc_gpu(gpu, POOL)?,
        Err(_) => engine.alloc(POOL)?,
    })
}

/// What is compared of a request: so many bytes at each of these places of the receiver's pool, which come from those of the sender's.
struct Marks {
    bytes: usize,
    places: Vec<(u64, u64)>,
}

impl Marks {
    fn to_order(&self, what: &str) -> String {
        let places: String = self.places.iter().map(|(to, from)| format!(" {to} {from}")).collect();
        format!("{what} {}{places}", self.bytes)
    }

    fn of_order(line: &str) -> Outcome<Self> {
        let places = line.split_whitespace().skip(2).map(str::parse);
        let places = places.collect::<Result<Vec<u64>, _>>()?;
        let places = places.chunks_exact(2).map(|place| (place[0], place[1])).collect();
        Ok(Self { bytes: ask(line, 1)?, places })
    }
}

/// The other process: `PLACE` is a GPU or `host`. Answers one line for each that it reads.
pub(crate) fn receive(place: &str) -> Outcome<()> {
    let gpus = place.parse().into_iter().collect::<Vec<u32>>();
    let (engine, driver) = engine(gpus, 8)?;
    let region = pool(&engine, place)?;
    let receiver = Receiver { counter: engine.counter()?, region, driver, engine };
    receiver.serve(&Orders::new(), &mut stdout())
}

struct Receiver {
    counter: ImmCounter,
    region: Region,
    driver: Driver,
    engine: TransferEngine,
}

impl Receiver {
    fn serve(mut self, orders: &Orders, answers: &mut impl Write) -> Outcome<()> {
        let (desc, tag) = (self.region.desc(), self.counter.tag());
        let place = Place { address: self.engine.address().clone(), desc, tag };
        writeln!(answers, "{}", place.to_line()?)?;
        while let Some(line) = orders.next(|| {
            self.driver.poll();
        }) {
            let answer = match line.split_whitespace().next() {
                Some("expect") => self.expect(answers, ask(&line, 1)?)?,
                Some("watch") => self.watch(answers, ask(&line, 1)?)?,
                Some("clear") => self.clear(&Marks::of_order(&line)?)?,
                Some("compare") => self.compare(&Marks::of_order(&line)?)?,
                _ => return Err(format!("what is {line}?").into()),
            };
            writeln!(answers, "{answer}")?;
        }
        Ok(())
    }

    fn expect(&mut self, answers: &mut impl Write, writes: u64) -> Outcome<String> {
        writeln!(answers, "ready")?;
        let started = Instant::now();
        while !self.counter.try_take(writes)? {
            self.driver.poll();
            if started.elapsed() > LIMIT {
                let available = self.counter.available();
                return Err(format!("{available} of {writes} writes within {LIMIT:?}").into());
            }
        }
        Ok(now().to_string())
    }

    /// When each of so many writes was counted, which come one after the other.
    fn watch(&mut self, answers: &mut impl Write, writes: usize) -> Outcome<String> {
        writeln!(answers, "ready")?;
        let (mut times, started) = (Vec::with_capacity(writes), Instant::now());
        while times.len() < writes {
            self.driver.poll();
            if self.counter.try_take(1)? {
                times.push(now().to_string());
            }
            if started.elapsed() > LIMIT {
                return Err(format!("{} of {writes} writes within {LIMIT:?}", times.len()).into());
            }
        }
        Ok(times.join(" "))
    }

    fn clear(&self, marks: &Marks) -> Outcome<String> {
        let nothing = vec![0; marks.bytes];
        for (to, _) in &marks.places {
            self.region.write(*to, &nothing)?;
        }
        Ok("clear".into())
    }

    fn compare(&self, marks: &Marks) -> Outcome<String> {
        let mut found = vec![0; marks.bytes];
        for (to, from) in &marks.places {
            self.region.read(*to, &mut found)?;
            if found != pattern(*from, marks.bytes) {
                return Ok(format!("bytes at {to} are not those of {from}"));
            }
        }
        Ok("right".into())
    }
}

/// The receiver, as the sender sees it.
struct There {
    process: Process,
    peer: PeerId,
    desc: MrDesc,
    tag: ImmTag,
}

impl There {
    fn meet(driver: &mut Driver, mut process: Process) -> Outcome<Self> {
        let Place { address, desc, tag } = Place::of_line(&process.hear()?)?;
        let peer = driver.add_peer(&address)?;
        driver.wait_peer(peer, LIMIT)?;
        Ok(Self { process, peer, desc, tag })
    }

    /// An error with the answer, if it is not this one.
    fn order(&mut self, line: &str, answer: &str) -> Outcome<()> {
        self.process.say(line)?;
        let heard = self.process.hear()?;
        if heard.trim() == answer { Ok(()) } else { Err(heard.trim().into()) }
    }
}

/// One request, in both directions of its memory.
struct Shape {
    pages: u32,
    page_bytes: u64,
}

/// The pages of one request, on both sides.
struct Lists {
    numbers: (Vec<u32>, Vec<u32>),
    indices: (PageIndices, PageIndices),
    /// The same, counted from this page of both pools on: no other request counts from there.
    own: (PageIndices, PageIndices),
    first: u32,
}

/// Where requests count their pages from: all from the pools' first, or, as those for several layers of a cache do, each from elsewhere.
#[derive(Clone, Copy, PartialEq)]
enum Counting {
    FromOne,
    FromItsOwn,
}

struct Bench {
    engine: TransferEngine,
    driver: Driver,
    source: Region,
    /// Bytes of either pool.
    pool: usize,
    there: There,
    random: Random,
    /// Several requests at a time are measured, too.
    several: bool,
}

/// Microseconds.
struct Took {
    /// Until the call of `submit` returned.
    call: f64,
    /// Until all was handed to the GPU.
    posted: f64,
    /// Until the receiver had taken the count.
    counted: f64,
}

impl Bench {
    fn new(from: &str, to: &str, sms: u32, stands_by: bool) -> Outcome<Self> {
        let gpus = from.parse().into_iter().chain(to.parse()).collect::<Vec<u32>>();
        // A GPU that only the other process uses is not opened here.
        let gpus = if from.parse::<u32>().is_ok() { gpus[..1].to_vec() } else { gpus };
        let (engine, driver) = builder(gpus, sms).stand_by(stands_by).build_polled()?;
        let source = pool(&engine, from)?;
        // Over PCIe one at a time fills the link.
        let several = from.parse::<u32>().is_ok() && to.parse::<u32>().is_ok();
        let process = Process::start(&["receive", to])?;
        Self::among((engine, driver), source, POOL, process, several)
    }

    fn among(
        (engine, mut driver): (TransferEngine, Driver),
        source: Region,
        pool: usize,
        receiver: Process,
        several: bool,
    ) -> Outcome<Self> {
        const STEP: usize = 64 << 20;
        for at in (0..pool).step_by(STEP) {
            source.write(at as u64, &pattern(at as u64, STEP.min(pool - at)))?;
        }
        let there = There::meet(&mut driver, receiver)?;
        Ok(Self { engine, driver, source, pool, there, random: Random(7), several })
    }

    /// All pages of a pool that each request can count, the first so many of them in no order.
    fn shuffled(&mut self, shape: &Shape, most: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..=u32::MAX)
            .skip(TURNS)
            .take_while(|i| u64::from(i + 1) * shape.page_bytes <= self.pool as u64)
            .collect();
        for i in 0..most.min(all.len()) {
            let other = i + self.random.below(all.len() - i);
            all.swap(i, other);
        }
        all
    }

    /// The lists of requests that take turns. A page is written from one page only, whichever request it is of.
    fn lists(&mut self, shape: &Shape) -> Vec<Option<Lists>> {
        if shape.pages == 1 {
            return vec![None];
        }
        let sources = self.shuffled(shape, usize::MAX);
        let mut one = |first: u32| {
            let mut to = self.shuffled(shape, shape.pages as usize);
            to.truncate(shape.pages as usize);
            let from: Vec<u32> = to.iter().map(|page| sources[*page as usize - TURNS]).collect();
            let indices = (from.clone().into(), to.clone().into());
            let own =
                |pages: &[u32]| pages.iter().map(|page| page - first).collect::<Vec<_>>().into();
            let own = (own(&from), own(&to));
            Some(Lists { numbers: (from, to), indices, own, first })
        };
        (0..).take(TURNS).map(&mut one).collect()
    }

    /// Submits a request, and says what its end and its count come from; when that began, and when the call returned.
    fn submit(
        &mut self,
        shape: &Shape,
        lists: Option<&Lists>,
        counting: Counting,
    ) -> Outcome<(Transfer, u64, u64)> {
        let side = |indices: &PageIndices, first: u32| Pages {
            indices: indices.clone(),
            stride: shape.page_bytes,
            offset: u64::from(first) * shape.page_bytes,
        };
        let (peer, imm) = (self.there.peer, Some(self.there.tag));
        Ok(match lists {
            Some(Lists { indices, own, first, .. }) => {
                let ((from, to), first) = match counting {
                    Counting::FromOne => (indices, 0),
                    Counting::FromItsOwn => (own, *first),
                };
                let write = PagedWrite {
                    peer,
                    page_bytes: shape.page_bytes,
                    src: &self.source,
                    src_pages: side(from, first),
                    dst: &self.there.desc,
                    dst_pages: side(to, first),
                    imm,
                };
                let started = now();
                let transfer = self.engine.submit_paged_writes(&write)?;
                (transfer, started, now())
            }
            None => {
                let write = SingleWrite {
                    peer,
                    src: &self.source,
                    src_offset: 0,
                    dst: &self.there.desc,
                    dst_offset: 0,
                    len: shape.page_bytes,
                    imm,
                };
                let started = now();
                let transfer = self.driver.submit_single_write(&write)?;
                (transfer, started, now())
            }
        })
    }

    fn once(&mut self, shape: &Shape, lists: Option<&Lists>) -> Outcome<Took> {
        self.there.process.say(&format!("expect {}", shape.pages))?;
        self.there.process.hear()?;
        let before = self.engine.stats().posted;
        let pieces = lists.map_or(1, |_| u64::from(shape.pages).div_ceil(255));
        let (transfer, started, called) = self.submit(shape, lists, Counting::FromOne)?;
        let mut posted = 0;
        let begun = Instant::now();
        while transfer.poll_end().is_none() {
            self.driver.poll();
            if posted == 0 && self.engine.stats().posted >= before + pieces {
                posted = now();
            }
            if begun.elapsed() > LIMIT {
                return Err("a transfer does not end".into());
            }
        }
        if transfer.poll_end() != Some(End::Done) {
            return Err(format!("a transfer ended so: {:?}", transfer.poll_end()).into());
        }
        let counted: u64 = self.there.process.hear()?.trim().parse()?;
        let us = |time: u64| (time.max(started) - started) as f64 / 1e3;
        Ok(Took { call: us(called), posted: us(posted), counted: us(counted) })
    }

    /// Many requests, of which so many are under way at a time: how long until the receiver has the last one's count, for each of them.
    fn at_once(
        &mut self,
        shape: &Shape,
        all: &[Option<Lists>],
        (most, counting): (usize, Counting),
    ) -> Outcome<f64> {
        const BYTES: u64 = 1 << 30;
        let requests = (BYTES / (shape.page_bytes * u64::from(shape.pages))).clamp(16, 256);
        self.there.process.say(&format!("expect {}", requests * u64::from(shape.pages)))?;
        self.there.process.hear()?;
        let mut under_way = VecDeque::with_capacity(most);
        let mut started = None;
        let mut turns = all.iter().cycle().take(usize::try_from(requests)?).peekable();
        let begun = Instant::now();
        while turns.peek().is_some() || !under_way.is_empty() {
            while under_way.len() < most
                && let Some(lists) = turns.next()
            {
                let (transfer, at, _) = self.submit(shape, lists.as_ref(), counting)?;
                started.get_or_insert(at);
                under_way.push_back(transfer);
            }
            self.driver.poll();
            while let Some(end) = under_way.front().and_then(Transfer::poll_end) {
                if end != End::Done {
                    return Err(format!("a transfer ended so: {end:?}").into());
                }
                under_way.pop_front();
            }
            if begun.elapsed() > LIMIT {
                return Err("a transfer does not end".into());
            }
        }
        let counted: u64 = self.there.process.hear()?.trim().parse()?;
        let took = counted.saturating_sub(started.unwrap_or(counted));
        Ok(took as f64 / 1e3 / requests as f64)
    }

    /// Draws what is to be compared of a request, and has it cleared.
    fn clear(&mut self, shape: &Shape, lists: Option<&Lists>) -> Outcome<Marks> {
        let bytes = shape.page_bytes.min(COMPARED_BYTES);
        let mut place = || match lists {
            Some(Lists { numbers: (from, to), .. }) => {
                let at = self.random.below(shape.pages as usize);
                let place = |list: &Vec<u32>| u64::from(list[at]) * shape.page_bytes;
                (place(to), place(from))
            }
            None => {
                let at = self.random.next() % (shape.page_bytes - bytes + 1) / 8 * 8;
                (at, at)
            }
        };
        let places = (0..COMPARED).map(|_| place()).collect();
        let marks = Marks { bytes: usize::try_from(bytes)?, places };
        self.there.order(&marks.to_order("clear"), "clear")?;
        Ok(marks)
    }

    fn clear_all(&mut self, shape: &Shape, all: &[Option<Lists>]) -> Outcome<Vec<Marks>> {
        all.iter().map(|lists| self.clear(shape, lists.as_ref())).collect()
    }

    fn compare(&mut self, marks: &[Marks]) -> Outcome<()> {
        marks.iter().try_for_each(|marks| self.there.order(&marks.to_order("compare"), "right"))
    }

    fn all_steady(&mut self) -> Outcome<Vec<Value>> {
        [8, 512, 4 << 10, 16 << 10, 32 << 10].into_iter().map(|bytes| self.steady(bytes)).collect()
    }

    /// Writes of one length one after the other, up to 40 us after the one before has ended, each from somewhere else.
    fn steady(&mut self, bytes: u64) -> Outcome<Value> {
        const WRITES: usize = 2000;
        const PAUSE_NS: usize = 40_000;
        let marks = self.clear(&Shape { pages: 1, page_bytes: bytes * WRITES as u64 }, None)?;
        self.there.process.say(&format!("watch {WRITES}"))?;
        self.there.process.hear()?;
        let (peer, imm) = (self.there.peer, Some(self.there.tag));
        let mut began = Vec::with_capacity(WRITES);
        for at in (0..).step_by(usize::try_from(bytes)?).take(WRITES) {
            let until = now() + self.random.below(PAUSE_NS) as u64;
            while now() < until {
                self.driver.poll();
            }
            let (src, dst, len) = (&self.source, &self.there.desc, bytes);
            let write = SingleWrite { peer, src, src_offset: at, dst, dst_offset: at, len, imm };
            began.push(now());
            let transfer = self.driver.submit_single_write(&write)?;
            let begun = Instant::now();
            while transfer.poll_end().is_none() {
                self.driver.poll();
                if begun.elapsed() > LIMIT {
                    return Err("a transfer does not end".into());
                }
            }
            if transfer.poll_end() != Some(End::Done) {
                return Err(format!("a transfer ended so: {:?}", transfer.poll_end()).into());
            }
        }
        let counted = self.there.process.hear()?;
        let counted =
            counted.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        self.compare(&[marks])?;
        let mut took: Vec<f64> = began
            .iter()
            .zip(&counted)
            .map(|(began, counted)| (counted - began) as f64 / 1e3)
            .collect();
        took.sort_by(f64::total_cmp);
        let part = |hundredths: usize| took[took.len() * hundredths / 100];
        Ok(json!({ "bytes": bytes, "p10_us": part(10), "p50_us": part(50), "p99_us": part(99) }))
    }

    fn all_at_once(&mut self, shape: &Shape, lists: &[Option<Lists>]) -> Outcome<Vec<Value>> {
        let froms: &[Counting] = if shape.pages > 1 {
            &[Counting::FromOne, Counting::FromItsOwn]
        } else {
            &[Counting::FromOne]
        };
        let bytes = shape.page_bytes * u64::from(shape.pages);
        let mut rows = Vec::new();
        for (most, from) in froms.iter().flat_map(|from| AT_ONCE.map(|most| (most, *from))) {
            let marks = self.clear_all(shape, lists)?;
            let took = (0..AGAIN).map(|_| self.at_once(shape, lists, (most, from)));
            let mut took = took.collect::<Outcome<Vec<_>>>()?;
            self.compare(&marks)?;
            took.sort_by(f64::total_cmp);
            let each = took[took.len() / 2];
            rows.push(json!({
                "at_once": most, "layers": from == Counting::FromItsOwn, "each_us": each, "best_us": took[0], "worst_us": took[took.len() - 1],
                "GBps": bytes as f64 / each / 1e3,
            }));
        }
        Ok(rows)
    }

    /// Requests one at a time.
    fn singly(&mut self, shape: &Shape, all: &[Option<Lists>]) -> Outcome<Vec<Took>> {
        for lists in all {
            let marks = self.clear(shape, lists.as_ref())?;
            self.once(shape, lists.as_ref())?;
            self.compare(&[marks])?;
        }
        let marks = self.clear_all(shape, all)?;
        let turns = all.iter().cycle().take(ROUNDS);
        let took = turns.map(|lists| self.once(shape, lists.as_ref())).collect::<Outcome<_>>()?;
        self.compare(&marks)?;
        Ok(took)
    }

    fn measure(&mut self, shape: &Shape) -> Outcome<Value> {
        let lists = self.lists(shape);
        let mut took = self.singly(shape, &lists)?;
        took.sort_by(|a, b| a.counted.total_cmp(&b.counted));
        let bytes = shape.page_bytes * u64::from(shape.pages);
        let several = if self.several { self.all_at_once(shape, &lists)? } else { Vec::new() };
        let middle = |of: fn(&Took) -> f64| {
            let mut all: Vec<f64> = took.iter().map(of).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let counted = middle(|took| took.counted);
        Ok(json!({
            "pages": shape.pages, "page_bytes": shape.page_bytes,
            "call_us": middle(|took| took.call), "posted_us": middle(|took| took.posted),
            "counted_us": counted, "best_us": took[0].counted, "worst_us": took[took.len() - 1].counted,
            "GBps": bytes as f64 / counted / 1e3, "several": several,
        }))
    }
}

/// Measures writes from one place to another: GPUs by number, or `host`.
pub(crate) fn measure(from: &str, to: &str, sms: u32) -> Outcome<Value> {
    let mut bench = Bench::new(from, to, sms, false)?;
    let without = bench.all_steady()?;
    drop(bench);
    let mut bench = Bench::new(from, to, sms, true)?;
    let with = bench.all_steady()?;
    let single = [8, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 256 << 20, 1 << 30];
    let single = single.map(|page_bytes| Shape { pages: 1, page_bytes });
    let paged = [1024, 16_384, 40_000].into_iter().flat_map(|pages| {
        [4 << 10, 16 << 10, 64 << 10].map(|page_bytes| Shape { pages, page_bytes })
    });
    let rows = single.into_iter().chain(paged).map(|shape| bench.measure(&shape));
    let rows = rows.collect::<Outcome<Vec<_>>>()?;
    let steady = json!({ "by_warps_that_stand_by": with, "by_copy_engine": without });
    Ok(json!({ "from": from, "to": to, "sms": sms, "writes": rows, "one_after_another": steady }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const BYTES: usize = 8 << 20;

    /// Each kind of figure, first of writes that arrive, then of the same where only counts do.
    #[test]
    fn counts_without_bytes_are_noticed() -> Outcome<()> {
        let (tell, elsewhere) = channel();
        let (process, receiver) = Process::thread(move |orders, answers| {
            let served = (|| -> Outcome<()> {
                let (engine, driver) = engine(Vec::new(), 1)?;
                let (region, other) = (engine.alloc(BYTES)?, engine.alloc(BYTES)?);
                tell.send(other.desc())?;
                let receiver = Receiver { counter: engine.counter()?, region, driver, engine };
                receiver.serve(orders, answers)
            })();
            served.map_err(|why| why.to_string())
        })?;
        let sender = engine(Vec::new(), 1)?;
        let source = sender.0.alloc(BYTES)?;
        let mut bench = Bench::among(sender, source, BYTES, process, true)?;
        let elsewhere = elsewhere.recv()?;
        let right = bench.there.desc;
        let few = Shape { pages: 20, page_bytes: 4 << 10 };
        for shape in [Shape { pages: 1, page_bytes: 64 << 10 }, few] {
            let lists = bench.lists(&shape);
            bench.singly(&shape, &lists)?;
            bench.all_at_once(&shape, &lists)?;
            bench.there.desc = elsewhere;
            noticed(bench.singly(&shape, &lists));
            noticed(bench.all_at_once(&shape, &lists));
            bench.there.desc = right;
        }
        bench.steady(512)?;
        bench.there.desc = elsewhere;
        noticed(bench.steady(512));
        drop(bench);
        Ok(receiver.join().map_err(|_| "the receiver panicked")??)
    }

    #[track_caller]
    fn noticed<T>(figure: Outcome<T>) {
        let why = figure.map(drop).unwrap_err().to_string();
        assert!(why.starts_with("bytes at "), "{why}");
    }
}
