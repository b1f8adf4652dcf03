//! What `python` (the script beside these benches) compares the Python package with: the same work, asked of
//! the engine in Rust. Two engines of one process; prints one line of JSON.
//!
//! Every figure is a median; each round checks that the bytes have arrived.

use std::time::{Duration, Instant};

use immwire::{
    IdlePolicy, ImmCounter, PageIndices, PagedWrite, Pages, PeerId, Region, SingleWrite,
    TransferEngine,
};

/// How long an idle engine spins and yields, each, unless told.
const SPIN: Duration = Duration::from_micros(50);
const SECOND: Duration = Duration::from_secs(10);

type Failure = Box<dyn std::error::Error>;

/// A sender, a receiver, and memory of either.
struct Pair {
    sender: TransferEngine,
    _receiver: TransferEngine,
    peer: PeerId,
    src: Region,
    dst: Region,
    counter: ImmCounter,
}

impl Pair {
    fn new(bytes: usize, idle: Duration) -> Result<Self, Failure> {
        let idle = IdlePolicy { spin: idle, yielding: idle, block: true };
        let sender = TransferEngine::builder().idle(idle).build()?;
        let receiver = TransferEngine::builder().idle(idle).build()?;
        let (src, dst) = (sender.alloc(bytes)?, receiver.alloc(bytes)?);
        let counter = receiver.counter()?;
        let peer = sender.add_peer(receiver.address())?;
        sender.wait_peer(peer, SECOND)?;
        Ok(Self { sender, _receiver: receiver, peer, src, dst, counter })
    }

    fn paged<'a>(
        &'a self,
        page_bytes: u64,
        pages: &PageIndices,
        dst: &'a immwire::MrDesc,
    ) -> PagedWrite<'a> {
        let side = || Pages { indices: pages.clone(), stride: page_bytes, offset: 0 };
        PagedWrite {
            peer: self.peer,
            page_bytes,
            src: &self.src,
            src_pages: side(),
            dst,
            dst_pages: side(),
            imm: Some(self.counter.tag()),
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn micros(from: Instant) -> f64 {
    from.elapsed().as_secs_f64() * 1e6
}

/// An 8-byte write, and the wait for its count: microseconds.
fn write_and_wait(rounds: u32, idle: Duration) -> Result<f64, Failure> {
    let pair = Pair::new(4096, idle)?;
    let dst = pair.dst.desc();
    let mut took = Vec::new();
    for round in 0..rounds {
        pair.src.write(0, &round.to_le_bytes())?;
        let start = Instant::now();
        let transfer = pair.sender.submit_single_write(&SingleWrite {
            peer: pair.peer,
            src: &pair.src,
            src_offset: 0,
            dst: &dst,
            dst_offset: 0,
            len: 8,
            imm: Some(pair.counter.tag()),
        })?;
        pair.counter.wait(1, SECOND)?;
        took.push(micros(start));
        let mut bytes = [0; 4];
        pair.dst.read(0, &mut bytes)?;
        if u32::from_le_bytes(bytes) != round {
            return Err("the bytes did not arrive".into());
        }
        drop(transfer);
    }
    Ok(median(took))
}

/// Pages, each to a place of its own: gigabytes per second, of the median round and of the best.
fn paged_throughput(rounds: u32, pages: u32, page_bytes: u64) -> Result<(f64, f64), Failure> {
    let bytes = u64::from(pages) * page_bytes;
    let pair = Pair::new(usize::try_from(bytes)?, SPIN)?;
    let dst = pair.dst.desc();
    let indices: Vec<u32> = (0..pages).collect();
    let mut rates = Vec::new();
    for round in 0..rounds {
        pair.src.write(bytes - 4, &round.to_le_bytes())?;
        let start = Instant::now();
        let write = pair.paged(page_bytes, &indices.as_slice().into(), &dst);
        let transfer = pair.sender.submit_paged_writes(&write)?;
        pair.counter.wait(pages.into(), SECOND)?;
        transfer.wait(SECOND)?.ok()?;
        #[expect(clippy::cast_precision_loss, reason = "bytes of one round")]
        rates.push(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
        let mut read = [0; 4];
        pair.dst.read(bytes - 4, &mut read)?;
        if u32::from_le_bytes(read) != round {
            return Err("the last page did not arrive".into());
        }
    }
    let best = rates.iter().copied().fold(0.0, f64::max);
    Ok((median(rates), best))
}

/// The submission alone of 40,000 small pages: microseconds.
fn submit_pages(rounds: u32) -> Result<f64, Failure> {
    const PAGES: u32 = 40_000;
    let pair = Pair::new(PAGES as usize * 64, SPIN)?;
    let dst = pair.dst.desc();
    let indices: Vec<u32> = (0..PAGES).collect();
    let mut took = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        let write = pair.paged(64, &indices.as_slice().into(), &dst);
        let transfer = pair.sender.submit_paged_writes(&write)?;
        took.push(micros(start));
        pair.counter.wait(PAGES.into(), SECOND)?;
        transfer.wait(SECOND)?.ok()?;
    }
    Ok(median(took))
}

fn main() -> Result<(), Failure> {
    let sleepy = write_and_wait(3_000, Duration::ZERO)?;
    let write = write_and_wait(3_000, SPIN)?;
    let (rate, best) = paged_throughput(25, 4096, 16 << 10)?;
    let submit = submit_pages(50)?;
    println!(
        r#"{{"write_us": {write:.3}, "write_sleepy_us": {sleepy:.3}, "paged_gbs": {rate:.3}, "paged_best_gbs": {best:.3}, "submit_us": {submit:.3}}}"#
    );
    Ok(())
}
