//! Sizes at which something could be cut wrong: around pieces, pages and 4 GiB; and many pages.

use immwire::{MrDesc, PagedWrite, Pages, Rights};

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::agent::{Ask, Write1, encode, plain};
use crate::host::{Lent, Own, patience, poison};
use crate::operations::{only_peer, write};
use crate::stalls::Stalls;
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[
    ("large_writes", Spread::Threads, large_writes),
    ("large_writes_at_once", Spread::ProcessesBothMotors, large_writes_at_once),
    ("layers_at_once", Spread::ProcessesBothMotors, layers_at_once),
    ("tails", Spread::Threads, tails),
    ("islands_beyond_four_gigabytes", Spread::Places, islands_beyond_four_gigabytes),
    ("forty_thousand_pages", Spread::Places, forty_thousand_pages),
    ("five_gigabytes", Spread::Once, five_gigabytes),
    ("from_read_only_memory", Spread::Threads, from_read_only_memory),
];

/// Where memory is pinned when it is registered, page by page.
pub const WHERE_IT_IS_PINNED: &[Test] =
    &[("registered_beside_traffic", Spread::Once, registered_beside_traffic)];

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn large_writes(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let size = 17 * MIB;
    let src = me.memory(size, Own::Engine);
    let (there, desc) = other.memory(&me, size, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, size, 0);
    for len in [MIB - 1, MIB, MIB + 1, 5 * MIB + 12_345, 16 * MIB, 16 * MIB + 1] {
        other.tell(&me, Ask::Poison { region: there, offset: 0, len: size, byte: 0xa5 });
        let (from, to) = (len % 61, len % 67 + 1);
        let transfer = write(&me, peer, &src, &desc, (from, to, len), Some(tag));
        other.count(&me, counter, 1);
        let ask = Ask::Mismatch { region: there, offset: to, len, pattern, at: from };
        assert_eq!(other.place(&me, ask), None, "first wrong byte of {len}");
        other.check_only(&me, there, 0, to, 0xa5);
        other.check_only(&me, there, to + len, size - to - len, 0xa5);
        me.done(&transfer);
    }
    assert_eq!(other.number(&me, Ask::Available { counter }), 0);
}

/// Several long writes under way at a time, whose pieces take turns: each byte is where it belongs, and no other was touched.
fn large_writes_at_once(case: &Case) {
    const APART: u64 = 13 * MIB;
    let (me, mut other, peer) = case.pair();
    let lengths = [9 * MIB, 12 * MIB + 4321, 9 * MIB];
    let size = APART * lengths.len() as u64;
    let src = me.memory(size, Own::Engine);
    let (there, desc) = other.memory(&me, size, Own::Engine);
    let (counter, tag) = other.counter(&me);
    for round in 0..2 {
        let pattern = case.pattern(round);
        pattern.fill(&src, 0, size, 0);
        other.tell(&me, Ask::Poison { region: there, offset: 0, len: size, byte: 0xa5 });
        let places = || (0..).step_by(APART.try_into().expect("small")).zip(lengths);
        let transfers: Vec<_> = places()
            .map(|(at, len)| write(&me, peer, &src, &desc, (at + round, at + 3, len), Some(tag)))
            .collect();
        other.count(&me, counter, lengths.len() as u64);
        for (place, len) in places() {
            let (offset, at) = (place + 3, place + round);
            let ask = Ask::Mismatch { region: there, offset, len, pattern, at };
            assert_eq!(other.place(&me, ask), None, "first wrong byte of {len} at {place}");
            other.check_only(&me, there, place, 3, 0xa5);
            other.check_only(&me, there, offset + len, APART - 3 - len, 0xa5);
        }
        transfers.iter().for_each(|transfer| me.done(transfer));
    }
}

/// Pages of several layers under way at a time, three in each of three regions, and all of them side by side here: so that each write counts
/// its pages from elsewhere, by a stride of its own.
fn layers_at_once(case: &Case) {
    const PAGES: u64 = 300;
    const PAGE: u64 = 4096;
    const LAYERS: u64 = 9;
    const REGIONS: u64 = 3;
    let (me, mut other, peer) = case.pair();
    let src = me.memory(LAYERS * PAGES * PAGE, Own::Engine);
    // The later a layer, the further apart its pages: on a grid of 128 bytes at first, then on one of 16.
    let apart = |layer: u64| PAGE + 128 * layer;
    let room = PAGES * apart(LAYERS) + 128;
    let size = LAYERS / REGIONS * room;
    let there: Vec<_> = (0..REGIONS).map(|_| other.memory(&me, size, Own::Engine)).collect();
    let place = |layer: u64| {
        let (at, desc) = &there[usize::try_from(layer % REGIONS).expect("few")];
        (*at, desc, layer / REGIONS * room)
    };
    let (counter, tag) = other.counter(&me);
    let far = |page: u64| page * 7 % PAGES;
    let list = |number: &dyn Fn(u64) -> u64| -> Vec<u32> {
        (0..PAGES).map(|page| u32::try_from(number(page)).expect("few")).collect()
    };
    for round in 0..2 {
        let pattern = case.pattern(round);
        pattern.fill(&src, 0, LAYERS * PAGES * PAGE, 0);
        for (region, _) in &there {
            other.tell(&me, Ask::Poison { region: *region, offset: 0, len: size, byte: 0xa5 });
        }
        let write = |layer: u64| {
            let (_, dst, first) = place(layer);
            let indices = (list(&|page| page).into(), list(&far).into());
            let (stride, offset) = (LAYERS * PAGE, layer * PAGE);
            let src_pages = Pages { indices: indices.0, stride, offset };
            let (stride, offset) = (apart(layer), first + 16 * round);
            let dst_pages = Pages { indices: indices.1, stride, offset };
            let (page_bytes, imm) = (PAGE, Some(tag));
            let write = PagedWrite { peer, page_bytes, src: &src, src_pages, dst, dst_pages, imm };
            me.engine.submit_paged_writes(&write).expect("submit")
        };
        let transfers: Vec<_> = (0..LAYERS).map(write).collect();
        other.count(&me, counter, LAYERS * PAGES);
        for layer in 0..LAYERS {
            let (region, _, first) = place(layer);
            for page in (0..PAGES).step_by(17).chain([PAGES - 1]) {
                let offset = first + 16 * round + far(page) * apart(layer);
                let at = (page * LAYERS + layer) * PAGE;
                let ask = Ask::Mismatch { region, offset, len: PAGE, pattern, at };
                assert_eq!(other.place(&me, ask), None, "page {page} of layer {layer}");
                other.check_only(&me, region, offset + PAGE, 128 * layer, 0xa5);
            }
            other.check_only(&me, region, first, 16 * round, 0xa5);
        }
        transfers.iter().for_each(|transfer| me.done(transfer));
    }
}

/// Lengths around those at which a write is cut over NICs, to the byte.
fn tails(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let size = 2 * MIB;
    let src = me.memory(size, Own::Engine);
    let (there, desc) = other.memory(&me, size, Own::Engine);
    let (counter, tag) = other.counter(&me);
    for (n, base) in
        [64_i64 << 10, 128 << 10, 256 << 10, 3 * (64 << 10), 1 << 20].into_iter().enumerate()
    {
        for (m, off) in [-65_i64, -64, -1, 0, 1, 63, 65].into_iter().enumerate() {
            let len = u64::try_from(base + off).expect("positive");
            let pattern = case.pattern((10 * n + m) as u64);
            pattern.fill(&src, 0, len, 0);
            other.tell(&me, Ask::Poison { region: there, offset: 0, len: len + 130, byte: 0x5a });
            let transfer = write(&me, peer, &src, &desc, (0, 65, len), Some(tag));
            other.count(&me, counter, 1);
            other.check(&me, there, 65, len, pattern);
            other.check_only(&me, there, 0, 65, 0x5a);
            other.check_only(&me, there, 65 + len, 65, 0x5a);
            me.done(&transfer);
        }
    }
}

/// Regions of 5 GiB that are nearly all holes: offsets that do not fit 32 bits.
fn islands_beyond_four_gigabytes(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let size = 5 * GIB + 4096;
    let src = me.memory(size, Own::Engine);
    let (there, desc) = other.memory(&me, size, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let len = 2 * MIB + 3;
    for (n, (from, to)) in [
        (0, 4 * GIB - MIB),
        (4 * GIB - MIB - 1, 4 * GIB + 4 * MIB),
        (4 * GIB + 4 * MIB, size - len),
        (size - len, 7),
    ]
    .into_iter()
    .enumerate()
    {
        let pattern = case.pattern(n as u64);
        pattern.fill(&src, from, len, 0);
        let transfer = write(&me, peer, &src, &desc, (from, to, len), Some(tag));
        other.count(&me, counter, 1);
        me.done(&transfer);
        other.check(&me, there, to, len, pattern);
        // What 32-bit offsets would have hit, all of it: nothing was written there before.
        let beyond = (to + len).saturating_sub(4 * GIB).min(len);
        other.check_only(&me, there, (to + len - beyond) % (4 * GIB), beyond, 0);
    }
    // Pages beyond 4 GiB, by their numbers.
    let first = u32::try_from(4 * GIB / 4096).expect("fits");
    let (from, to) = ([0, first + 9, first], [first + 1000, 3, first + 3000]);
    let pattern = case.pattern(9);
    for &page in &from {
        pattern.fill(&src, u64::from(page) * 4096, 4096, u64::from(page) * 4096);
    }
    let pages = |list: &[u32]| Pages { indices: list.into(), stride: 4096, offset: 0 };
    let transfer = me.engine.submit_paged_writes(&PagedWrite {
        peer,
        page_bytes: 4096,
        src: &src,
        src_pages: pages(&from),
        dst: &desc,
        dst_pages: pages(&to),
        imm: Some(tag),
    });
    other.count(&me, counter, 3);
    me.done(&transfer.expect("submit"));
    for (&from, &to) in from.iter().zip(&to) {
        let (at, offset) = (u64::from(from) * 4096, u64::from(to) * 4096);
        let ask = Ask::Mismatch { region: there, offset, len: 4096, pattern, at };
        assert_eq!(other.place(&me, ask), None, "page {from} to {to}");
    }
}

fn forty_thousand_pages(case: &Case) {
    const PAGES: u32 = 40_000;
    let (me, mut other, peer) = case.pair();
    let size = u64::from(PAGES) * 4096;
    let src = me.memory(size, Own::Engine);
    let (there, desc): (usize, MrDesc) = other.memory(&me, size, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, size, 0);
    let mut from: Vec<u32> = (0..PAGES).collect();
    let mut to = from.clone();
    case.random().shuffle(&mut from);
    case.random().shuffle(&mut to[100..]);
    let pages = |list: &[u32]| Pages { indices: list.into(), stride: 4096, offset: 0 };
    let transfer = me.engine.submit_paged_writes(&PagedWrite {
        peer,
        page_bytes: 4096,
        src: &src,
        src_pages: pages(&from),
        dst: &desc,
        dst_pages: pages(&to),
        imm: Some(tag),
    });
    other.count(&me, counter, PAGES.into());
    me.done(&transfer.expect("submit"));
    // In the order in which they lie there.
    let mut came_from = vec![0; from.len()];
    for (&from, &to) in from.iter().zip(&to) {
        came_from[usize::try_from(to).expect("small")] = from;
    }
    let wrong = other.place(&me, Ask::MismatchedPage { region: there, pages: came_from, pattern });
    assert_eq!(wrong, None, "the first page that is wrong");
    assert_eq!(other.number(&me, Ask::Available { counter }), 0);
}

/// One write of more than 4 GiB. The source is holes with islands; the destination is fresh memory, so
/// that the kernel knows which pages were written.
fn five_gigabytes(case: &Case) {
    let (me, mut other, peer) = case.pair();
    // 5 GiB where there is room for it, else the least that does not fit 32 bits.
    let size = if free_memory() > 8 * GIB { 5 * GIB + 65 } else { 4 * GIB + 65 };
    assert!(free_memory() > 5 * GIB, "this test needs 5 GiB of memory");
    let bytes = usize::try_from(size).expect("64-bit");
    let lent = Lent::new(bytes);
    // SAFETY: never unmapped, and no reference to it is made.
    let src = unsafe { me.engine.register(lent.ptr, bytes, Rights::LOCAL) }.expect("register");
    let (there, desc) = other.memory(&me, size, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let (island, pattern) = (2 * MIB + 1, case.pattern(0));
    let islands = [0, GIB - 7, 4 * GIB - MIB, size - island];
    for at in islands {
        pattern.fill(&src, at, island, at);
    }
    let transfer = write(&me, peer, &src, &desc, (0, 0, size), Some(tag));
    let end = me.end_within(&transfer, 3 * patience());
    assert_eq!(end, Some(immwire::End::Done));
    other.count(&me, counter, 1);
    assert_eq!(other.number(&me, Ask::Available { counter }), 0);
    if !case.facts().has_gpus {
        let missing = other.place(&me, Ask::FirstHole { region: there });
        assert_eq!(missing, None, "the first page that was not written");
    }
    for at in islands {
        let ask = Ask::Mismatch { region: there, offset: at, len: island, pattern, at };
        assert_eq!(other.place(&me, ask), None, "in the island at {at}");
    }
    poison(&src, 0, 1, 1);
}

/// Writes from memory that this process may not write itself, as of a file that is mapped to be read: no right of ours or of a
/// peer's to write there is asked for.
fn from_read_only_memory(case: &Case) {
    const BYTES: usize = 8192;
    let (me, mut other, peer) = case.pair();
    let (there, desc) = other.memory(&me, BYTES as u64, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let (lent, pattern) = (Lent::new(BYTES), case.pattern(0));
    // SAFETY: never unmapped, and no reference to it is made.
    let fill = unsafe { me.engine.register(lent.ptr, BYTES, Rights::LOCAL) }.expect("register");
    pattern.fill(&fill, 0, BYTES as u64, 0);
    me.close(fill, patience()).expect("close");
    lent.protect(BYTES);
    // SAFETY: as above.
    let src = unsafe { me.engine.register(lent.ptr, BYTES, Rights::LOCAL) }.expect("read only");
    assert_eq!(src.write(0, b"no"), Err(immwire::AccessError::ReadOnly));
    for len in [64, 4096, BYTES as u64] {
        let transfer = write(&me, peer, &src, &desc, (0, 0, len), Some(tag));
        other.count(&me, counter, 1);
        let ask = Ask::Mismatch { region: there, offset: 0, len, pattern, at: 0 };
        assert_eq!(other.place(&me, ask), None, "first wrong byte of {len}");
        me.done(&transfer);
    }
}

/// Bytes that programs could still have.
fn free_memory() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").expect("procfs");
    let line = info.lines().find(|line| line.starts_with("MemAvailable")).expect("a line");
    let kib: u64 = line.split_whitespace().nth(1).expect("a number").parse().expect("a number");
    kib * 1024
}

/// What has been counted since a moment: how much, the longest time without any, and how long it was; but for what processors stood still.
fn counted(counter: &immwire::ImmCounter, until: impl FnOnce()) -> (u64, Duration, Duration) {
    /// What is shorter is no longer than it looks.
    const SHORT: Duration = Duration::from_millis(50);
    let (is_over, stalls, start) = (AtomicBool::new(false), Stalls::watch(), Instant::now());
    let (writes, most, gaps) = std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let first = counter.available();
            let (mut last, mut at, mut most, mut gaps) = (first, start, Duration::ZERO, Vec::new());
            let mut ends = |at: Instant| {
                let now = Instant::now();
                if now - at > SHORT {
                    gaps.push((at, now));
                } else {
                    most = most.max(now - at);
                }
                now
            };
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_micros(200));
                let now = counter.available();
                if now != last {
                    (last, at) = (now, ends(at));
                }
            }
            ends(at);
            (last - first, most, gaps)
        });
        until();
        is_over.store(true, Ordering::Relaxed);
        watching.join().expect("it watches")
    });
    let all = start.elapsed();
    let ran = |&(from, to): &(Instant, Instant)| stalls.between(from, to);
    let longest = gaps.iter().map(ran).chain([most]).max().unwrap_or(most);
    (writes, longest, all)
}

/// Four gigabytes are registered, and closed, while a peer writes: it goes on writing, and we count.
fn registered_beside_traffic(case: &Case) {
    let (me, mut other, _) = case.pair();
    let back = only_peer(&me, &mut other);
    let dst = me.memory(MIB, Own::Engine);
    let counter = me.engine.counter().expect("a counter");
    let (there, _) = other.memory(&me, MIB, Own::Engine);
    let (dst, tag) = (encode(&dst.desc()), Some(counter.tag().bits()));
    let peer = plain(back);
    let (src, src_offset, dst_offset, len) = (there, 0, 0, 4096);
    other.tell(&me, Ask::Flood(Write1 { peer, src, src_offset, dst, dst_offset, len, tag }));
    assert_eq!(me.count(&counter, 50, patience()), Ok(()));
    let quiet = counted(&counter, || {
        std::thread::sleep(Duration::from_millis(500));
    });
    let lent = Lent::repeated(4 * GIB, 64 * MIB);
    let mut region = None;
    let bytes = usize::try_from(4 * GIB).expect("64-bit");
    let registering = counted(&counter, || {
        // SAFETY: never unmapped, and no reference to the bytes is ever made.
        let made = unsafe { me.engine.register(lent.ptr, bytes, Rights::REMOTE_WRITE) };
        region = Some(made.expect("register"));
    });
    let region = region.expect("registered");
    let closing = counted(&counter, || region.close(patience()).expect("nobody writes there"));
    for (what, (writes, longest, all)) in
        [("before", quiet), ("while registering", registering), ("while closing", closing)]
    {
        println!("    {what}: {writes} writes counted in {all:?}, none for {longest:?} at most");
    }
    // Pages are pinned one by one, which takes a while whoever does it.
    let (writes, longest, all) = registering;
    assert!(all > Duration::from_millis(20), "nothing was pinned: {all:?}");
    // A processor that others need, too.
    let hiccup = Duration::from_millis(100).max(4 * quiet.1);
    let limit = hiccup.max(all / 2);
    assert!(writes > 0 && longest < limit, "{writes} writes in {all:?}, none for {longest:?}");
    assert!(other.number(&me, Ask::Stop) > 50 + writes);
}
