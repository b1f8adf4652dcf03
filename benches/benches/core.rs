//! The core alone: a counter against a bare `fetch_add`, a scheduled work request, a plan.
//!
//! Time is for orientation; `instructions` counts what does not depend on the machine's load.
#![allow(missing_docs, reason = "criterion's macros")]
#![allow(clippy::expect_used, reason = "a bench that cannot be set up is to stop")]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use immwire_benches::{drive, group, group_with_runs, paged, shuffled, single};
use immwire_core::group::{Event, Options, WorkRequest};
use immwire_core::id::Time;
use immwire_core::imm::{CounterSlot, CounterTable, ImmTag};
use immwire_core::lane::{Consumer, Entry, Producer, Word};
use immwire_core::plan::Request;
use immwire_core::ring::{Cell, Ring};

fn counter(c: &mut Criterion) {
    let mut bench = c.benchmark_group("counter");
    let bare = AtomicU64::new(0);
    bench.bench_function("fetch_add", |b| {
        b.iter(|| bare.fetch_add(black_box(16), Ordering::AcqRel));
    });
    let slots: Box<[CounterSlot]> = (0..64).map(|_| CounterSlot::new()).collect();
    let table = CounterTable::new(slots);
    let imm = ImmTag::new(7, 0).and_then(|tag| tag.with_units(16)).expect("slot 7 exists");
    bench.bench_function("add", |b| b.iter(|| table.add(black_box(imm))));
    bench.finish();
}

fn schedule(c: &mut Criterion) {
    let mut bench = c.benchmark_group("schedule");
    for nics in [1, 4] {
        let (mut group, peer) = group(nics);
        bench.throughput(Throughput::Elements(1));
        bench.bench_function(format!("write 8 B, {nics} nics"), |b| {
            b.iter(|| drive(&mut group, nics, black_box(single(peer, nics, 8))));
        });
    }
    let (src, dst) = (shuffled(40_000, 1), shuffled(40_000, 2));
    for nics in [1, 4] {
        let (mut group, peer) = group(nics);
        bench.throughput(Throughput::Elements(40_000));
        bench.bench_function(format!("40,000 pages, {nics} nics"), |b| {
            b.iter_batched(
                || paged(peer, nics, &src, &dst),
                |request| assert!(drive(&mut group, nics, request).0 > 39_000),
                BatchSize::SmallInput,
            );
        });
    }
    let (mut group_of_runs, peer) = group_with_runs(1, 255);
    bench.bench_function("40,000 pages in runs of 255, 1 nic", |b| {
        b.iter_batched(
            || paged(peer, 1, &src, &dst),
            |request| assert_eq!(drive(&mut group_of_runs, 1, request).0, 157),
            BatchSize::SmallInput,
        );
    });
    bench.throughput(Throughput::Elements(40_000));
    let (_, peer) = group(1);
    bench.bench_function("check 40,000 pages", |b| b.iter(|| paged(peer, 1, &src, &dst)));
    bench.finish();
}

/// Writes that are submitted and planned one after the other while the clock runs; completed when it does not.
const IN_FLIGHT: usize = 16;

/// How a write comes to be posted, from a request that lies ready.
#[derive(Clone, Copy)]
enum Way {
    /// At once, as nothing is before it.
    Express,
    /// Submitted into its lane, and polled from there.
    Queues,
    /// The same, and checked against its regions before that.
    CheckedToo,
}

fn submit(c: &mut Criterion) {
    let mut bench = c.benchmark_group("plan and submit");
    let options = Options { deadline: Time::NEVER, user: 0 };
    let ways = [
        (Way::Express, "8 B, nothing before it"),
        (Way::Queues, "8 B, by the queues"),
        (Way::CheckedToo, "8 B, by the queues, checked first"),
    ];
    for (way, name) in ways {
        let (mut group, peer) = group(1);
        let checked = single(peer, 1, 8);
        let Request::Single(write) = *checked.request() else { return };
        let mut work: Vec<WorkRequest> = Vec::with_capacity(IN_FLIGHT);
        bench.bench_function(name, |b| {
            b.iter_custom(|writes| {
                let (mut took, mut left) = (Duration::ZERO, writes);
                while left > 0 {
                    let now = left.min(IN_FLIGHT as u64);
                    let started = Instant::now();
                    for _ in 0..now {
                        let request = match way {
                            Way::Express => {
                                work.extend(group.express(&black_box(write.by_ref()), options));
                                continue;
                            }
                            Way::Queues => Some(checked),
                            Way::CheckedToo => black_box(Request::Single(write)).check().ok(),
                        };
                        let request = black_box(request);
                        let taken = request.is_some_and(|it| group.submit(it, options).is_ok());
                        assert!(taken, "a slot is free");
                        group.poll_batch(0, usize::MAX, u64::MAX, |piece| work.push(piece));
                    }
                    took += started.elapsed();
                    assert_eq!(work.len() as u64, now, "each is one piece, at once");
                    for piece in work.drain(..) {
                        group.handle_completion(Time::ZERO, piece.nic, piece.token, Ok(()));
                        assert!(matches!(group.poll_event(), Some(Event::Ended { .. })));
                    }
                    left -= now;
                }
                took
            });
        });
    }
    bench.finish();
}

fn queues(c: &mut Criterion) {
    let mut bench = c.benchmark_group("queue");
    let cells: [Cell<u64>; 64] = std::array::from_fn(|_| Cell::new());
    let ring = Ring::from_array(cells).expect("64 is a power of two");
    bench.bench_function("ring push and pop", |b| {
        b.iter(|| ring.try_push(black_box(1)).map(|()| ring.try_pop()));
    });
    let entries: Vec<Entry> = (0..1024).map(|_| [Word::new(0), Word::new(0)]).collect();
    let credit = Word::new(0);
    let mut producer = Producer::new(1024).expect("a power of two");
    let mut consumer = Consumer::new(1024).expect("a power of two");
    bench.bench_function("lane push and pop", |b| {
        b.iter(|| {
            let pushed = producer.push(&entries, &credit, black_box(7), black_box(8));
            pushed.map(|()| consumer.pop(&entries, &credit))
        });
    });
    bench.finish();
}

criterion_group!(benches, counter, schedule, submit, queues);
criterion_main!(benches);
