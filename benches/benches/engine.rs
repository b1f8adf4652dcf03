//! Two engines of one process over shared memory, polled by one thread: what a transfer costs from
//! submission to the peer's counter, without the noise of threads.
#![allow(missing_docs, reason = "criterion's macros")]
#![allow(clippy::expect_used, reason = "a bench that cannot be set up is to stop")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use immwire::{
    Driver, ImmCounter, MrDesc, PagedWrite, Pages, PeerId, Region, SingleWrite, TransferEngine,
};
use immwire_benches::shuffled;

const REGION_BYTES: usize = 256 << 20;

struct Pair {
    sender: TransferEngine,
    receiver: TransferEngine,
    send: Driver,
    receive: Driver,
    peer: PeerId,
    src: Region,
    dst: Region,
    counter: ImmCounter,
}

impl Pair {
    fn new(nics: u8) -> Self {
        let build = || TransferEngine::builder().nics(nics).build_polled().expect("an engine");
        let ((sender, mut send), (receiver, mut receive)) = (build(), build());
        let peer = send.add_peer(receiver.address()).expect("a peer");
        let up = send.run_until(Duration::from_secs(5), || {
            receive.poll();
            sender.wait_peer(peer, Duration::ZERO).ok()
        });
        up.expect("the peer answers");
        let src = sender.alloc(REGION_BYTES).expect("memory");
        let dst = receiver.alloc(REGION_BYTES).expect("memory");
        let counter = receiver.counter().expect("a counter");
        Self { sender, receiver, send, receive, peer, src, dst, counter }
    }

    fn write(&mut self, desc: &MrDesc, len: u64) {
        let transfer = self.sender.submit_single_write(&SingleWrite {
            peer: self.peer,
            src: &self.src,
            src_offset: 0,
            dst: desc,
            dst_offset: 0,
            len,
            imm: Some(self.counter.tag()),
        });
        let transfer = transfer.expect("room");
        while transfer.poll_end().is_none() || !self.counter.try_take(1).expect("unarmed") {
            self.send.poll();
            self.receive.poll();
        }
    }
}

fn engine(c: &mut Criterion) {
    let mut bench = c.benchmark_group("engine");
    for nics in [1, 4] {
        let mut pair = Pair::new(nics);
        let desc = pair.dst.desc();
        for len in [8, 4096, 65_536, 1 << 20] {
            bench.throughput(Throughput::Bytes(len));
            bench.bench_function(format!("write {len} B, {nics} nics"), |b| {
                b.iter(|| pair.write(&desc, black_box(len)));
            });
        }
        let pages =
            |seed| Pages { indices: shuffled(10_000, seed).into(), stride: 4096, offset: 0 };
        let (src_pages, dst_pages) = (pages(1), pages(2));
        bench.throughput(Throughput::Bytes(10_000 * 4096));
        bench.bench_function(format!("10,000 pages of 4 KiB, {nics} nics"), |b| {
            b.iter(|| {
                let write = PagedWrite {
                    peer: pair.peer,
                    page_bytes: 4096,
                    src: &pair.src,
                    src_pages: src_pages.clone(),
                    dst: &desc,
                    dst_pages: dst_pages.clone(),
                    imm: Some(pair.counter.tag()),
                };
                let transfer = pair.sender.submit_paged_writes(&write).expect("room");
                while !pair.counter.try_take(10_000).expect("unarmed") {
                    pair.send.poll();
                    pair.receive.poll();
                }
                black_box(transfer.poll_end());
            });
        });
        assert_eq!(pair.receiver.stats().refused_immediates, 0);
    }
    bench.finish();
}

criterion_group!(benches, engine);
criterion_main!(benches);
