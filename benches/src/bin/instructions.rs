//! The hot paths, each in a function of its own for `instructions` (the script) to count under
//! callgrind. The argument names the path; each runs [`ROUNDS`] times, or once over 40,000 pages.

use std::hint::black_box;

use immwire_benches::{
    BenchRequest, Group, group, group_with_runs, paged, read_run, shuffled, single,
};
use immwire_core::group::{Event, Options, WorkRequest};
use immwire_core::id::Time;
use immwire_core::imm::{Added, CounterSlot, CounterTable, Imm, ImmTag};
use immwire_core::plan::{Request, SingleRef};

const ROUNDS: u32 = 1000;

#[inline(never)]
fn hot_counter_add(table: &CounterTable<Box<[CounterSlot]>>, imm: Imm) -> Added {
    table.add(imm)
}

/// Counted with [`hot_poll`]: submission, planning, scheduling.
#[inline(never)]
fn hot_submit<'a>(group: &mut Group<'a>, request: BenchRequest<'a>) {
    let options = Options { deadline: Time::NEVER, user: 0 };
    let _ = group.submit(request, options).is_ok();
}

#[inline(never)]
fn hot_express<'a>(group: &mut Group<'a>, write: &SingleRef<'_>) -> Option<WorkRequest> {
    group.express(write, Options { deadline: Time::NEVER, user: 0 })
}

/// As somebody does who writes while it is called.
#[inline(never)]
fn hot_at_once(group: &mut Group<'_>, write: &SingleRef<'_>) -> bool {
    let Some((nic, piece)) = group.unhindered(write) else { return false };
    group.wrote(Time::ZERO, nic, black_box(&piece));
    true
}

#[inline(never)]
fn hot_poll(group: &mut Group<'_>, nics: u8, work: &mut Vec<WorkRequest>) {
    for nic in 0..nics {
        group.poll_batch(nic, usize::MAX, u64::MAX, |piece| work.push(piece));
    }
}

/// Counted by itself: completions, and the end.
#[inline(never)]
fn hot_complete(group: &mut Group<'_>, work: &mut Vec<WorkRequest>) -> bool {
    for piece in work.drain(..) {
        group.handle_completion(Time::ZERO, piece.nic, piece.token, Ok(()));
    }
    matches!(group.poll_event(), Some(Event::Ended { .. }))
}

fn transfer<'a>(
    group: &mut Group<'a>,
    nics: u8,
    request: BenchRequest<'a>,
    work: &mut Vec<WorkRequest>,
) -> u64 {
    let mut pieces = 0;
    hot_submit(group, request);
    loop {
        hot_poll(group, nics, work);
        pieces += work.len() as u64;
        if hot_complete(group, work) {
            return pieces;
        }
    }
}

/// Counted with [`hot_submit`] and [`hot_poll`]: what a provider asks of a run.
#[inline(never)]
fn hot_read(group: &Group<'_>, work: &[WorkRequest]) -> u64 {
    work.iter().map(|piece| read_run(group, piece)).sum()
}

#[inline(never)]
fn hot_check_pages<'a>(
    peer: immwire_core::id::PeerId,
    src: &'a [u32],
    dst: &'a [u32],
) -> BenchRequest<'a> {
    paged(peer, 1, src, dst)
}

fn main() {
    let mut work = Vec::with_capacity(4096);
    let path = std::env::args().nth(1).unwrap_or_default();
    let done = match path.as_str() {
        "counter_add" => {
            let table = CounterTable::new((0..64).map(|_| CounterSlot::new()).collect());
            let imm = ImmTag::new(7, 0).and_then(|tag| tag.with_units(16));
            let Some(imm) = imm else { return };
            (0..ROUNDS).for_each(|_| {
                let _ = black_box(hot_counter_add(black_box(&table), imm));
            });
            u64::from(ROUNDS)
        }
        "write" | "write_4_nics" => {
            let nics = if path == "write" { 1 } else { 4 };
            let (mut group, peer) = group(nics);
            let request = || single(peer, nics, 8);
            (0..ROUNDS).map(|_| transfer(&mut group, nics, request(), &mut work)).sum()
        }
        "express" => {
            let (mut group, peer) = group(1);
            let request = single(peer, 1, 8);
            let Request::Single(write) = *request.request() else { return };
            let ended = |_| {
                work.extend(hot_express(&mut group, &black_box(write.by_ref())));
                u64::from(hot_complete(&mut group, &mut work))
            };
            (0..ROUNDS).map(ended).sum()
        }
        "at_once" => {
            let (mut group, peer) = group(1);
            let request = single(peer, 1, 8);
            let Request::Single(write) = *request.request() else { return };
            let written = |_| u64::from(hot_at_once(&mut group, &black_box(write.by_ref())));
            (0..ROUNDS).map(written).sum()
        }
        "pages" | "pages_4_nics" => {
            let nics = if path == "pages" { 1 } else { 4 };
            let (src, dst) = (shuffled(40_000, 1), shuffled(40_000, 2));
            let (mut group, peer) = group(nics);
            transfer(&mut group, nics, paged(peer, nics, &src, &dst), &mut work)
        }
        "runs" => {
            let (src, dst) = (shuffled(40_000, 1), shuffled(40_000, 2));
            let (mut group, peer) = group_with_runs(1, 255);
            hot_submit(&mut group, paged(peer, 1, &src, &dst));
            let mut pages = 0;
            while pages < 40_000 {
                hot_poll(&mut group, 1, &mut work);
                pages += hot_read(&group, &work);
                hot_complete(&mut group, &mut work);
            }
            pages
        }
        "check_pages" => {
            let (src, dst) = (shuffled(40_000, 1), shuffled(40_000, 2));
            let (_, peer) = group(1);
            black_box(hot_check_pages(peer, &src, &dst).total_bytes()) / 4096
        }
        other => {
            eprintln!("no such path: {other:?}");
            std::process::exit(2);
        }
    };
    println!("{done}");
}
