//! Runs plans to their end and compares what they yield with what the request says, byte by byte.
//!
//! The oracle ([`writes`]) reads the request and nothing of the plan: one entry for each write or page.

#![expect(clippy::cast_possible_truncation, reason = "small domains")]

use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::id::EngineId;
use crate::imm::{GENERATIONS, MAX_COUNTERS};
use crate::mailbox::USER_COUNTERS;
use crate::nic::NicState;
use crate::region::{Keys, RegionError, Rights};

type TestRequest<'a> = Request<&'a [u32], &'a [Target]>;
type TestPlan<'a> = Plan<&'a [u32], &'a [Target]>;

const SRC_BASE: u64 = 0x1000_0000;
const DST_BASE: u64 = 0x5000_0000;
const CONTROL_BASE: u64 = 0x9000_0000;
const HUGE: u64 = u64::MAX;

// ---- fixtures ----

fn peer(index: u16) -> PeerId {
    PeerId { index, generation: 1 }
}

fn tag() -> Option<ImmTag> {
    ImmTag::from_bits(0x2a55)
}

/// Keys that tell whose they are and for which NIC.
fn keys(owner: u64, nics: usize) -> Keys {
    let all: Vec<u64> = (0..nics as u64).map(|nic| owner * 100 + nic).collect();
    Keys::new(&all).unwrap()
}

fn local_at(base: u64, len: u64) -> LocalMr {
    LocalMr { base, len, generation: 0, keys: keys(1, MAX_NICS) }
}

fn local(len: u64) -> LocalMr {
    local_at(SRC_BASE, len)
}

fn remote_at(base: u64, len: u64) -> MrDesc {
    MrDesc {
        owner: EngineId(1),
        base,
        len,
        generation: 0,
        rights: Rights::REMOTE_WRITE,
        keys: keys(2, MAX_NICS),
    }
}

fn remote(len: u64) -> MrDesc {
    remote_at(DST_BASE, len)
}

fn speeds(speeds: &[u32]) -> Vec<NicState> {
    let nic = |speed: &u32| NicState { speed: *speed, healthy: true };
    speeds.iter().map(nic).collect()
}

/// Peer `i` has `routes[i]`.
#[derive(Clone)]
struct Table {
    routes: Vec<Routes>,
    connected: bool,
}

impl Table {
    /// We have `ours` NICs, peer `i` has `theirs[i]`; all equally fast.
    fn new(ours: usize, theirs: &[usize]) -> Self {
        let ours = speeds(&vec![100; ours]);
        let routes = |count: &usize| Routes::new(&ours, &speeds(&vec![100; *count])).unwrap();
        Self { routes: theirs.iter().map(routes).collect(), connected: true }
    }
}

impl PeerTable for Table {
    fn routes(&self, peer: PeerId) -> Option<Routes> {
        self.routes.get(usize::from(peer.index)).copied()
    }
    fn control(&self, peer: PeerId) -> Option<MrDesc> {
        let mut control = remote_at(CONTROL_BASE + u64::from(peer.index), 8);
        control.keys = keys(3 + u64::from(peer.index), MAX_NICS);
        self.connected.then_some(control)
    }
}

fn limits(max_message: u64, min_piece: u64, granule: u64) -> PlanLimits {
    PlanLimits {
        max_message_bytes: NonZeroU64::new(max_message).unwrap(),
        pages_per_piece: NonZeroU16::MIN,
        rule: SplitRule {
            min_piece_bytes: NonZeroU64::new(min_piece).unwrap(),
            granule_bytes: NonZeroU64::new(granule).unwrap(),
        },
    }
}

/// As `limits`, for NICs that take so many pages in a piece.
fn with_runs(limits: PlanLimits, pages: u16) -> PlanLimits {
    PlanLimits { pages_per_piece: NonZeroU16::new(pages).unwrap(), ..limits }
}

fn single(len: u64, dst_offset: u64, imm: Option<ImmTag>) -> TestRequest<'static> {
    Request::Single(SingleWrite {
        peer: peer(0),
        src: local(len + 3),
        src_offset: 3,
        dst: remote(len + dst_offset),
        dst_offset,
        len,
        imm,
    })
}

fn paged<'a>(page_bytes: u64, src: &'a [u32], dst: &'a [u32]) -> PagedWrite<&'a [u32]> {
    let pages = |indices: &'a [u32]| Pages { indices, stride: page_bytes, offset: 0 };
    let len = |pages: &[u32]| {
        let pages = pages.iter().max().map_or(0, |max| u64::from(*max) + 1);
        pages * page_bytes
    };
    PagedWrite {
        peer: peer(0),
        page_bytes,
        src: local(len(src)),
        src_pages: pages(src),
        dst: remote(len(dst)),
        dst_pages: pages(dst),
        imm: tag(),
    }
}

fn target(index: u16, len: u64, src_offset: u64, dst_offset: u64) -> Target {
    Target { peer: peer(index), dst: remote(dst_offset + len), src_offset, dst_offset, len }
}

/// One target for each entry of `lens`, peers by turns, each with its own bytes.
fn targets(lens: &[u64], peers: u16) -> Vec<Target> {
    let mut at = 0;
    let next = |(i, len): (usize, &u64)| {
        let target = target(i as u16 % peers, *len, at, at + 1);
        at += len;
        target
    };
    lens.iter().enumerate().map(next).collect()
}

fn scatter(targets: &[Target], imm: Option<ImmTag>) -> TestRequest<'_> {
    let len = targets.iter().map(|target| target.src_offset + target.len);
    Request::Scatter(ScatterWrite { src: local(len.max().unwrap_or(0)), targets, imm })
}

// ---- the oracle ----

/// A write or page, as the request says it.
#[derive(Debug, Clone, Copy)]
struct Write {
    peer: PeerId,
    src: u64,
    dst: u64,
    len: u64,
    /// How many writes the receiver counts for it.
    counts: u64,
    /// Where an immediate without bytes goes, and its key's owner.
    note_to: (u64, u64),
}

fn writes(request: &TestRequest<'_>) -> Vec<Write> {
    let to_control = |peer: PeerId, counts| Write {
        peer,
        src: 0,
        dst: 0,
        len: 0,
        counts,
        note_to: (CONTROL_BASE + u64::from(peer.index), 3 + u64::from(peer.index)),
    };
    match request {
        Request::Single(w) => vec![Write {
            peer: w.peer,
            src: w.src.base + w.src_offset,
            dst: w.dst.base + w.dst_offset,
            len: w.len,
            counts: u64::from(w.imm.is_some()),
            note_to: (w.dst.base, 2),
        }],
        Request::Paged(w) => {
            let pairs = w.src_pages.indices.iter().zip(w.dst_pages.indices);
            let page = |(src, dst): (&u32, &u32)| Write {
                peer: w.peer,
                src: w.src.base + w.src_pages.offset + w.src_pages.stride * u64::from(*src),
                dst: w.dst.base + w.dst_pages.offset + w.dst_pages.stride * u64::from(*dst),
                len: w.page_bytes,
                counts: u64::from(w.imm.is_some()),
                note_to: (w.dst.base, 2),
            };
            pairs.map(page).collect()
        }
        Request::Scatter(w) => {
            let write = |target: &Target| Write {
                peer: target.peer,
                src: w.src.base + target.src_offset,
                dst: target.dst.base + target.dst_offset,
                len: target.len,
                counts: u64::from(w.imm.is_some()),
                note_to: (target.dst.base, 2),
            };
            w.targets.iter().map(write).collect()
        }
        Request::Barrier(b) => b.targets.iter().map(|t| to_control(t.peer, 1)).collect(),
        Request::Imm(w) => vec![to_control(w.peer, u64::from(w.writes))],
        Request::Control(_) => panic!("a control write is one piece: compared as such"),
    }
}

/// A piece, the NIC it was yielded for, and whether that was after `drained`.
#[derive(Debug, Clone)]
struct Posted {
    nic: NicIndex,
    piece: Piece,
    trailing: bool,
    /// Of a run, where each page comes from and goes to.
    pages: Vec<(u64, u64)>,
}

impl Posted {
    fn new<P: PageList>(
        plan: &Plan<P, &[Target]>,
        nic: NicIndex,
        piece: Piece,
        trailing: bool,
    ) -> Self {
        let pages = read_run(plan, &piece).map_or_else(Vec::new, |(pages, _)| pages);
        Self { nic, piece, trailing, pages }
    }

    fn is_bulk(&self) -> bool {
        self.piece.run == PageRun::BULK
    }

    /// What it is in ranges: of a run one for each page, with the units of a page.
    fn ranges(&self) -> Vec<Self> {
        if self.pages.is_empty() {
            return vec![self.clone()];
        }
        let count = self.pages.len() as u64;
        assert_eq!(self.piece.len % count, 0);
        let units = |imm: Imm| {
            assert_eq!(u64::from(imm.units()), 16 * count);
            imm.tag().with_units(16).unwrap()
        };
        let (imm, len) = (self.piece.imm.map(units), self.piece.len / count);
        let page = |&(src, dst): &(u64, u64)| Self {
            piece: Piece { src, dst, len, imm, run: PageRun::NONE, ..self.piece },
            pages: vec![],
            ..*self
        };
        self.pages.iter().map(page).collect()
    }
}

/// Where the pages of a run come from and go to, as a provider finds them; `None` if it is no run.
fn read_run<P: PageList>(
    plan: &Plan<P, &[Target]>,
    piece: &Piece,
) -> Option<(Vec<(u64, u64)>, RunLayout)> {
    let count = piece.run.count as usize;
    let (mut src, mut dst) = (vec![7; count], vec![7; count]);
    let layout = plan.page_run(piece.run, &mut src, &mut dst);
    assert_eq!(layout.is_some(), count > 0);
    let layout = layout?;
    assert_eq!((layout.src_base, layout.dst_base), (piece.src, piece.dst));
    assert_eq!(piece.len, layout.page_bytes * u64::from(piece.run.count));
    let page = |(src, dst): (&u32, &u32)| {
        let src = layout.src_base + layout.src_stride * u64::from(*src);
        (src, layout.dst_base + layout.dst_stride * u64::from(*dst))
    };
    Some((src.iter().zip(&dst).map(page).collect(), layout))
}

/// Takes every piece out of `plan`, on the NIC that `pick` chooses from the mask each time.
fn run(
    plan: &mut TestPlan<'_>,
    table: &Table,
    mut pick: impl FnMut(u8) -> NicIndex,
) -> Vec<Posted> {
    let mut posted = Vec::new();
    for trailing in [false, true] {
        loop {
            let mask = plan.nic_mask();
            for nic in (0..=u8::MAX).filter(|nic| *nic > 7 || mask >> nic & 1 == 0).take(9) {
                assert_eq!(plan.peek(nic), None);
                assert_eq!(plan.next(nic, table), None);
            }
            if mask == 0 {
                break;
            }
            assert!(!plan.drained(), "there is work");
            let nic = pick(mask);
            let peer = plan.peek(nic).unwrap();
            let piece = plan.next(nic, table).unwrap();
            assert_eq!(piece.peer, peer);
            assert!(posted.len() < 100_000, "endless");
            posted.push(Posted::new(plan, nic, piece, trailing));
        }
        if !plan.drained() {
            break;
        }
        assert!(!trailing && plan.nic_mask() != 0);
    }
    assert!(!plan.drained());
    assert_eq!(plan.nic_mask(), 0);
    posted
}

/// Picks the lowest NIC, the highest, and by turns.
fn lowest(mask: u8) -> NicIndex {
    mask.trailing_zeros() as NicIndex
}
fn highest(mask: u8) -> NicIndex {
    7 - mask.leading_zeros() as NicIndex
}
fn by_turns() -> impl FnMut(u8) -> NicIndex {
    let mut last = 7;
    move |mask| {
        let mut after = (1..=8).map(|step| (last + step) % 8);
        last = after.find(|nic| mask >> nic & 1 == 1).unwrap();
        last
    }
}

/// Checks that `posted` is `request`: bytes, keys, units, and when they came.
fn verify(request: &TestRequest<'_>, limits: PlanLimits, table: &Table, posted: &[Posted]) {
    let expected = writes(request);
    for one in posted {
        let run = one.piece.run;
        assert_eq!(one.pages.len(), run.count as usize);
        assert!(run.count <= u32::from(limits.pages_per_piece.get().min(255)));
        assert!(run.count == 0 || limits.pages_per_piece.get() > 1);
        let (nic, piece) = (one.nic, &one.piece);
        assert!(piece.len <= limits.max_message_bytes.get());
        assert!(piece.len > 0 || piece.imm.is_some(), "a piece for nothing");
        assert!(piece.imm.is_none_or(|imm| Some(imm.tag()) == tag() && imm.units() > 0));
        let routes = table.routes(piece.peer).unwrap();
        let mut pairs = routes.as_slice().iter().map(|route| (route.local, route.remote));
        assert!(pairs.any(|pair| pair == (nic, piece.remote_nic)), "no such route");
    }
    let ranges: Vec<Posted> = posted.iter().flat_map(Posted::ranges).collect();
    bytes_are_exact(&expected, &ranges);
    units_are_exact(&expected, &ranges);
    immediates_follow_all_bytes(&expected, &ranges);
    edges_are_aligned(&expected, limits, &ranges);
}

/// Every byte once, from its place to its place, with the keys of both NICs.
fn bytes_are_exact(expected: &[Write], posted: &[Posted]) {
    // In order of destination, pieces and writes must be cut from the same cloth.
    let mut pieces: Vec<&Posted> = posted.iter().filter(|one| one.piece.len > 0).collect();
    pieces.sort_by_key(|one| (one.piece.peer, one.piece.dst));
    let mut writes: Vec<&Write> = expected.iter().filter(|write| write.len > 0).collect();
    writes.sort_by_key(|write| (write.peer, write.dst));
    let mut pieces = pieces.into_iter();
    let (mut src, mut dst, mut left) = (0, 0, 0);
    for write in writes {
        let mut done = 0;
        while done < write.len {
            if left == 0 {
                let Posted { nic, piece, .. } = pieces.next().expect("bytes are missing");
                assert_eq!(piece.peer, write.peer);
                assert_eq!(piece.src_key, 100 + u64::from(*nic));
                assert_eq!(piece.dst_key, 200 + u64::from(piece.remote_nic));
                (src, dst, left) = (piece.src, piece.dst, piece.len);
            }
            assert_eq!((src, dst), (write.src + done, write.dst + done));
            let both = left.min(write.len - done);
            (src, dst, left, done) = (src + both, dst + both, left - both, done + both);
        }
    }
    assert_eq!((left, pieces.count()), (0, 0), "more bytes than asked for");
}

/// Sixteen units for each write, and the right ones before and after the drain.
fn units_are_exact(expected: &[Write], posted: &[Posted]) {
    let units = |one: &Posted| one.piece.imm.map_or(0, |imm| u64::from(imm.units()));
    let mut owed = Vec::new();
    for write in expected {
        let within = |one: &&Posted| {
            let (start, end) = (one.piece.dst, one.piece.dst + one.piece.len);
            let apart = end <= write.dst || write.dst + write.len <= start;
            one.piece.peer == write.peer && one.piece.len > 0 && !apart
        };
        let mine: Vec<_> = posted.iter().filter(within).collect();
        assert!(mine.iter().all(|one| !one.trailing), "bytes after the drain");
        if write.len == 0 || mine.len() > 16 {
            assert_eq!(mine.iter().map(|one| units(one)).sum::<u64>(), 0);
            owed.push((write.peer, write.note_to, write.len > 0, write.counts));
        } else if mine.len() == 1 && mine[0].piece.len > write.len {
            let others = |other: &&Write| {
                let piece = &mine[0].piece;
                piece.peer == other.peer
                    && piece.dst <= other.dst
                    && other.dst + other.len <= piece.dst + piece.len
            };
            let merged = expected.iter().filter(others);
            let (count, bytes) = merged.fold((0, 0), |(n, len), w| (n + 1, len + w.len));
            assert_eq!(mine[0].piece.len, bytes, "merged writes are whole");
            assert_eq!(units(mine[0]), 16 * count * write.counts);
        } else {
            assert_eq!(mine.iter().map(|one| units(one)).sum::<u64>(), 16 * write.counts);
            assert!(write.counts == 0 || mine.iter().all(|one| units(one) > 0));
        }
    }
    // Immediates without bytes: what is owed to each peer, each phase, and no more.
    for &(peer, note_to, trailing, _) in &owed {
        let due = owed.iter().filter(|due| (due.0, due.1, due.2) == (peer, note_to, trailing));
        let due: u64 = due.map(|due| due.3).sum();
        let mut notes: Vec<_> = posted.iter().filter(|one| one.piece.len == 0).collect();
        notes.retain(|one| (one.piece.peer, one.trailing) == (peer, trailing));
        notes.retain(|one| one.piece.dst == note_to.0);
        assert_eq!(notes.iter().map(|one| units(one)).sum::<u64>(), 16 * due);
        for Posted { piece, .. } in notes {
            assert_eq!((piece.src, piece.src_key), (0, 0));
            assert_eq!(piece.dst_key, note_to.1 * 100 + u64::from(piece.remote_nic));
        }
    }
    let total: u64 = posted.iter().map(units).sum();
    assert_eq!(total, 16 * expected.iter().map(|write| write.counts).sum::<u64>());
}

/// Of a write whose immediates come after the drain, one goes by each way that a part of it went, and no other; all of it
/// is to keep to one queue of each. Nothing else is.
fn immediates_follow_all_bytes(expected: &[Write], posted: &[Posted]) {
    let way = |one: &Posted| (one.piece.peer, one.nic, one.piece.remote_nic);
    let (mut ways, mut bulk) = (Vec::new(), 0);
    for write in expected.iter().filter(|write| write.counts > 0) {
        let within = |one: &&Posted| {
            one.piece.peer == write.peer
                && one.piece.len > 0
                && write.dst <= one.piece.dst
                && one.piece.dst + one.piece.len <= write.dst + write.len
        };
        let mine: Vec<_> = posted.iter().filter(within).collect();
        if mine.len() > 16 {
            assert!(mine.iter().all(|one| one.is_bulk()));
            ways.extend(mine.iter().map(|one| way(one)));
            bulk += mine.len();
        }
    }
    let trailing: Vec<_> = posted.iter().filter(|one| one.trailing).collect();
    assert!(trailing.iter().all(|one| one.is_bulk()));
    assert_eq!(posted.iter().filter(|one| one.is_bulk()).count(), bulk + trailing.len());
    let mut notes: Vec<_> = trailing.into_iter().map(way).collect();
    for ways in [&mut ways, &mut notes] {
        ways.sort_unstable();
        ways.dedup();
    }
    assert_eq!(notes, ways);
}

/// Pieces start on a granule, but where a write starts or the largest message is below a granule.
fn edges_are_aligned(expected: &[Write], limits: PlanLimits, posted: &[Posted]) {
    let granule = limits.rule.granule_bytes.get();
    if limits.max_message_bytes.get() < granule {
        return;
    }
    for Posted { piece, .. } in posted.iter().filter(|one| one.piece.len > 0) {
        let starts = |write: &Write| (write.peer, write.dst) == (piece.peer, piece.dst);
        assert!(piece.dst % granule == 0 || expected.iter().any(starts));
    }
}

fn plan<'a>(
    request: &TestRequest<'a>,
    limits: PlanLimits,
    table: &Table,
    turn: u32,
) -> TestPlan<'a> {
    Plan::new(request.check().unwrap(), limits, table, turn).unwrap()
}

/// Plans, runs in three orders, verifies each; the pieces of the last.
fn check(request: &TestRequest<'_>, limits: PlanLimits, table: &Table, turn: u32) -> Vec<Posted> {
    let fresh = plan(request, limits, table, turn);
    for pick in [lowest as fn(u8) -> NicIndex, highest] {
        verify(request, limits, table, &run(&mut fresh.clone(), table, pick));
    }
    let posted = run(&mut fresh.clone(), table, by_turns());
    verify(request, limits, table, &posted);
    posted
}

// ---- single writes ----

#[test]
fn every_small_single_write_is_exact() {
    for ours in 1..=8 {
        for theirs in 1..=8 {
            let table = Table::new(ours, &[theirs]);
            let routes = ours.max(theirs) as u64;
            for len in 0..=3 * 4 * routes {
                // Not every alignment and order with every length: a prime's worth of them.
                let (dst_offset, turn) = (len % 5, len % 7);
                let imm = tag().filter(|_| len % 11 != 3);
                for max in [1 + len % 3, 4 + len % 2, HUGE] {
                    let request = single(len, dst_offset, imm);
                    check(&request, limits(max, 4, 4), &table, turn as u32);
                }
            }
        }
    }
}

#[test]
fn every_alignment_and_turn_of_a_single_write_is_exact() {
    let skewed = Routes::new(&speeds(&[400, 100, 300]), &speeds(&[200])).unwrap();
    for routes in [Table::new(3, &[2]).routes[0], skewed] {
        let table = Table { routes: vec![routes], connected: true };
        for len in 0..=30 {
            for dst_offset in 0..4 {
                for turn in [0, 1, 2, u32::MAX] {
                    for max in [3, 4, 7, 10] {
                        let request = single(len, dst_offset, tag());
                        check(&request, limits(max, 5, 4), &table, turn);
                    }
                }
            }
        }
    }
}

#[test]
fn a_single_write_has_one_piece_for_each_worthwhile_route() {
    let table = Table::new(4, &[4]);
    let count = |len, max, imm| {
        let posted = check(&single(len, 0, imm), limits(max, 64, 64), &table, 1);
        posted.len()
    };
    assert_eq!(count(127, HUGE, tag()), 1);
    assert_eq!(count(128, HUGE, tag()), 2);
    assert_eq!(count(4096, HUGE, tag()), 4);
    assert_eq!(count(4096, 256, tag()), 16); // Sixteen pieces still carry a unit each ..
    assert_eq!(count(4097, 256, tag()), 21); // .. seventeen need one immediate after them for each route ..
    assert_eq!(count(4097, 256, None), 17); // .. if there is one.
    assert_eq!(count(0, HUGE, tag()), 1);
    assert_eq!(count(0, HUGE, None), 0);
}

#[test]
fn small_writes_take_turns_over_the_nics() {
    let table = Table::new(3, &[3]);
    for turn in 0..9 {
        let posted = check(&single(8, 0, tag()), limits(HUGE, 64, 64), &table, turn);
        assert_eq!(u32::from(posted[0].nic), turn % 3);
        let control = Request::Imm(ImmWrite { peer: peer(0), imm: tag().unwrap(), writes: 1 });
        let posted = check(&control, limits(HUGE, 64, 64), &table, turn);
        assert_eq!(u32::from(posted[0].nic), turn % 3);
    }
}

#[test]
fn sizes_around_multiples_of_the_granule_and_beyond_32_bits_are_exact() {
    for nics in 1..=8_u64 {
        let table = Table::new(nics as usize, &[nics as usize]);
        let multiples = [0, 1, 2, 3, 1 << 19, 5 << 17, 1 << 30];
        for base in multiples.map(|multiple| 8192 * multiple * nics) {
            for len in base.saturating_sub(nics)..=base + nics {
                for max in [1 << 31, (1 << 30) + 1, HUGE] {
                    let max = max.max(len >> 6);
                    let limits = limits(max, 8192, 8192);
                    let request = single(len, len % 3, tag());
                    let posted = run(&mut plan(&request, limits, &table, 1), &table, lowest);
                    verify(&request, limits, &table, &posted);
                }
            }
        }
    }
}

#[test]
fn lanes_of_one_nic_take_turns() {
    // One NIC of ours feeds four of the peer's: none of them waits for another's last byte.
    let table = Table::new(1, &[4]);
    let posted = check(&single(64, 0, None), limits(4, 4, 4), &table, 0);
    let remotes: Vec<_> = posted.iter().map(|one| one.piece.remote_nic).collect();
    assert_eq!(remotes, [0, 1, 2, 3].repeat(4));
}

// ---- pages ----

fn permutations(items: &[u32]) -> Vec<Vec<u32>> {
    let Some((first, rest)) = items.split_first() else {
        return vec![vec![]];
    };
    let mut all = Vec::new();
    for shorter in permutations(rest) {
        for at in 0..=shorter.len() {
            let mut longer = shorter.clone();
            longer.insert(at, *first);
            all.push(longer);
        }
    }
    all
}

/// The pieces of one lane, by the definition: neighbours on both sides, up to `most` of them.
fn runs(request: &PagedWrite<&[u32]>, most: usize) -> Vec<u64> {
    let pages = writes(&Request::Paged(*request));
    let mut runs: Vec<Vec<Write>> = Vec::new();
    for page in pages {
        let joins = runs.last().is_some_and(|run| {
            let last = run[run.len() - 1];
            run.len() < most && (last.src + last.len, last.dst + last.len) == (page.src, page.dst)
        });
        if joins {
            runs.last_mut().unwrap().push(page);
        } else {
            runs.push(vec![page]);
        }
    }
    runs.iter().map(|run| run.len() as u64).collect()
}

#[test]
fn every_order_of_a_few_pages_is_exact_and_merges_neighbours() {
    let patterns = permutations(&[0, 1, 2, 4]);
    for src in &patterns {
        for dst in &patterns {
            for imm in [tag(), None] {
                let write = PagedWrite { imm, ..paged(8, src, dst) };
                let request = Request::Paged(write);
                for (max, most) in [(8, 1), (23, 2), (HUGE, 4)] {
                    let limits = limits(max, 64, 8);
                    let posted = check(&request, limits, &Table::new(1, &[1]), 0);
                    let lens: Vec<_> = posted.iter().map(|one| one.piece.len / 8).collect();
                    assert_eq!(lens, runs(&write, most));
                }
                check(&request, limits(HUGE, 64, 8), &Table::new(2, &[3]), 1);
            }
        }
    }
}

#[test]
fn adjacent_on_one_side_only_does_not_merge() {
    let table = Table::new(1, &[1]);
    let (near, far) = ([0, 1, 2, 3], [0, 2, 4, 6]);
    for (src, dst) in [(near, far), (far, near)] {
        let request = Request::Paged(paged(8, &src, &dst));
        assert_eq!(check(&request, limits(HUGE, 64, 8), &table, 0).len(), 4);
    }
    // A stride above the page's size leaves holes: nothing merges, and holes stay unwritten.
    let mut write = paged(8, &near, &near);
    write.src_pages.stride = 12;
    write.dst_pages.stride = 12;
    write.src.len = 44;
    write.dst.len = 44;
    assert_eq!(check(&Request::Paged(write), limits(HUGE, 64, 8), &table, 0).len(), 4);
    // A stride of 0 sends one page to many places.
    write.src_pages.stride = 0;
    assert_eq!(check(&Request::Paged(write), limits(HUGE, 64, 8), &table, 0).len(), 4);
}

#[test]
fn at_most_255_pages_merge() {
    let pages: Vec<u32> = (0..600).collect();
    let request = Request::Paged(paged(4, &pages, &pages));
    let limits = limits(HUGE, 64, 64);
    let posted = check(&request, limits, &Table::new(1, &[1]), 0);
    let lens: Vec<_> = posted.iter().map(|one| one.piece.len).collect();
    assert_eq!(lens, [1020, 1020, 360]);
    // Two routes: a run of 300 pages each.
    let posted = check(&request, limits, &Table::new(2, &[2]), 0);
    let mut lens: Vec<_> = posted.iter().map(|one| one.piece.len).collect();
    lens.sort_unstable();
    assert_eq!(lens, [180, 180, 1020, 1020]);
}

#[test]
fn every_number_of_pages_is_exact_over_any_nics() {
    for nics in 1..=8 {
        let table = Table::new(nics, &[9 - nics]);
        for count in 0..=20 {
            let src: Vec<u32> = (0..count).rev().collect();
            let dst: Vec<u32> = (0..count).map(|i| i ^ 1).collect();
            for page_bytes in [0, 1, 8, 40] {
                for (max, imm) in [(3, tag()), (16, tag()), (HUGE, tag()), (16, None)] {
                    let write = PagedWrite { imm, ..paged(page_bytes, &src, &dst) };
                    check(&Request::Paged(write), limits(max, 8, 4), &table, count);
                }
            }
        }
    }
}

#[test]
fn few_large_pages_are_cut_over_the_nics() {
    let table = Table::new(4, &[4]);
    let request = Request::Paged(paged(256, &[1, 0], &[0, 1]));
    assert_eq!(check(&request, limits(HUGE, 64, 64), &table, 0).len(), 8);
    // A page that finds no second worthwhile piece stays whole.
    assert_eq!(check(&request, limits(HUGE, 129, 64), &table, 0).len(), 2);
    // Pages enough for every NIC are not cut.
    let pages = [3, 2, 1, 0];
    let request = Request::Paged(paged(256, &pages, &[0, 1, 2, 3]));
    assert_eq!(check(&request, limits(HUGE, 64, 64), &table, 0).len(), 4);
}

#[test]
fn pages_in_too_many_pieces_are_announced_together_after_the_drain() {
    let pages: Vec<u32> = (0..600).collect();
    let request = Request::Paged(paged(17, &pages, &pages));
    for nics in [1, 3] {
        let table = Table::new(nics, &[nics]);
        let posted = run(&mut plan(&request, limits(1, 64, 64), &table, 0), &table, by_turns());
        let units = |one: &Posted| one.piece.imm.map(Imm::units);
        let (trailing, data): (Vec<&Posted>, Vec<&Posted>) =
            posted.iter().partition(|one| one.trailing);
        assert_eq!(data.len(), 600 * 17);
        assert!(data.iter().all(|one| one.piece.imm.is_none()));
        let mut units: Vec<_> = trailing.iter().filter_map(|one| units(one)).collect();
        units.sort_unstable();
        // Pages are not cut: each NIC announces its own.
        let pages = if nics == 1 { [90, 255, 255] } else { [200; 3] };
        assert_eq!(units, pages.map(|pages| 16 * pages));
        assert_eq!(trailing.iter().map(|one| one.nic).max(), Some(nics as u8 - 1));
    }
}

#[test]
fn pages_without_bytes_are_counted_without_bytes() {
    let pages = vec![0; 256];
    let table = Table::new(2, &[2]);
    let request = Request::Paged(paged(0, &pages, &pages));
    let posted = check(&request, limits(HUGE, 64, 64), &table, 0);
    assert_eq!(posted.len(), 2);
    let silent = PagedWrite { imm: None, ..paged(0, &pages, &pages) };
    assert!(check(&Request::Paged(silent), limits(HUGE, 64, 64), &table, 0).is_empty());
}

// ---- runs of pages ----

/// Checks runs against the request, page by page: a destination may be written more than once.
fn verify_runs(request: &TestRequest<'_>, limits: PlanLimits, posted: &[Posted], most: u64) {
    let mut expected: Vec<_> = writes(request).iter().map(|page| (page.src, page.dst)).collect();
    let mut found: Vec<(u64, u64)> = posted.iter().flat_map(|one| one.pages.clone()).collect();
    expected.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, expected);
    let Request::Paged(write) = request else { panic!("no pages") };
    for one in posted {
        let (piece, count) = (&one.piece, u64::from(one.piece.run.count));
        assert!((1..=most).contains(&count) && piece.len <= limits.max_message_bytes.get());
        assert_eq!(piece.len, count * write.page_bytes);
        let units = write.imm.map(|_| 16 * count);
        assert_eq!(piece.imm.map(|imm| u64::from(imm.units())), units);
        assert_eq!(piece.src_key, 100 + u64::from(one.nic));
        assert_eq!(piece.dst_key, 200 + u64::from(piece.remote_nic));
        let inside =
            |at: u64, base: u64, len: u64| at >= base && at + write.page_bytes <= base + len;
        assert!(one.pages.iter().all(|&(src, dst)| {
            inside(src, write.src.base, write.src.len) && inside(dst, write.dst.base, write.dst.len)
        }));
    }
}

/// Pages with gaps, repeats, neighbours and none of these, on either side, whose last ends with its region: all
/// page counts, run lengths and NICs.
#[test]
fn every_small_run_is_exact() {
    let lists: [fn(u32) -> u32; 5] = [|i| i, |i| 3 * i + 2, |i| i / 2, |i| 11 - i, |i| i * 5 % 7];
    // Bytes from one number to the next, and before number 0.
    let places = [(8, 0), (8, 5), (11, 3), (3, 1), (0, 2)];
    let mut cases = 0;
    for count in 0..=9_u32 {
        for (i, from) in lists.iter().enumerate() {
            for (j, to) in lists.iter().enumerate() {
                let src: Vec<u32> = (0..count).map(from).collect();
                let dst: Vec<u32> = (0..count).map(to).collect();
                let mut write = paged(8, &src, &dst);
                for (pages, len, (stride, offset)) in [
                    (&mut write.src_pages, &mut write.src.len, places[(i + 2 * j) % 5]),
                    (&mut write.dst_pages, &mut write.dst.len, places[(3 * i + j) % 5]),
                ] {
                    (pages.stride, pages.offset) = (stride, offset);
                    let last = pages.indices.iter().max().map(|last| u64::from(*last) * stride);
                    *len = last.map_or(0, |last| offset + last + 8);
                }
                write.imm = tag().filter(|_| (i + j) % 4 != 3);
                let request = Request::Paged(write);
                for (pages_per_piece, nics) in (2..=5).flat_map(|n| [(n, 1), (n, 2), (n, 3)]) {
                    // Room for one page, for three of them and not four, and for all.
                    for (max, room) in [(8, 1), (31, 3), (HUGE, u64::MAX)] {
                        let limits = with_runs(limits(max, 64, 8), pages_per_piece);
                        let (table, most) =
                            (Table::new(nics, &[nics]), room.min(pages_per_piece.into()));
                        let fresh = plan(&request, limits, &table, count);
                        for pick in [lowest as fn(u8) -> NicIndex, highest] {
                            let posted = run(&mut fresh.clone(), &table, pick);
                            verify_runs(&request, limits, &posted, most);
                            let on =
                                |nic| posted.iter().filter(move |one| usize::from(one.nic) == nic);
                            for nic in 0..nics {
                                // Only the last of a lane is shorter.
                                let mut counts = on(nic).map(|one| u64::from(one.piece.run.count));
                                assert!(
                                    counts.by_ref().skip_while(|count| *count == most).count() <= 1
                                );
                            }
                            cases += 1;
                        }
                    }
                }
            }
        }
    }
    assert_eq!(cases, 10 * 25 * 12 * 3 * 2);
}

#[test]
fn a_run_has_at_most_255_pages() {
    let pages: Vec<u32> = (0..600).map(|i| i * 7 % 600).collect();
    let request = Request::Paged(paged(4, &pages, &pages));
    let counts = |limits, nics| {
        let posted = check(&request, limits, &Table::new(nics, &[nics]), 0);
        let mut counts: Vec<_> = posted.iter().map(|one| one.piece.run.count).collect();
        counts.sort_unstable();
        counts
    };
    let limits = limits(HUGE, 64, 64);
    for pages_per_piece in [255, 256, u16::MAX] {
        assert_eq!(counts(with_runs(limits, pages_per_piece), 1), [90, 255, 255]);
    }
    assert_eq!(counts(with_runs(limits, 254), 1), [92, 254, 254]);
    assert_eq!(counts(with_runs(limits, 255), 2), [45, 45, 255, 255]);
    assert_eq!(counts(with_runs(limits, 1), 1), [0; 600], "one range each");
}

/// Pages that are cut over the NICs, or have no bytes, are planned as they are without runs.
#[test]
fn what_is_not_whole_pages_is_no_run() {
    let table = Table::new(4, &[4]);
    for (page_bytes, pages) in [(256, &[1, 0, 2][..]), (0, &[1, 0, 2, 5, 7]), (8, &[])] {
        let request = Request::Paged(paged(page_bytes, pages, pages));
        for max in [100, HUGE] {
            let limits = limits(max, 64, 64);
            let fresh = |limits| plan(&request, limits, &table, 0);
            let pieces = |limits| run(&mut fresh(limits), &table, by_turns()).into_iter();
            let pieces =
                |limits| pieces(limits).map(|one| (one.nic, one.piece)).collect::<Vec<_>>();
            let plain = pieces(limits);
            assert_eq!(pieces(with_runs(limits, 255)), plain);
            assert!(plain.iter().all(|(_, piece)| piece.run == PageRun::NONE));
        }
    }
}

/// Page numbers of more than 32 bits, on either side, are planned as they are without runs.
#[test]
fn numbers_of_more_than_32_bits_make_no_run() {
    let table = Table::new(1, &[1]);
    let edge = u64::from(u32::MAX);
    for (src, dst, runs) in [(edge, edge, 1), (edge + 1, edge, 0), (edge, edge + 1, 0)] {
        let (src, dst) = ([3, src, 1], [2, 0, dst]);
        let pages = |indices| Pages { indices, stride: 1, offset: 4 };
        let write = PagedWrite {
            peer: peer(0),
            page_bytes: 2,
            src: local(edge + 7),
            src_pages: pages(&src[..]),
            dst: remote(edge + 7),
            dst_pages: pages(&dst[..]),
            imm: tag(),
        };
        let request: Request<&[u64], &[Target]> = Request::Paged(write);
        let limits = with_runs(limits(HUGE, 64, 64), 8);
        let mut plan = Plan::new(request.check().unwrap(), limits, &table, 0).unwrap();
        let posted = core::iter::from_fn(|| {
            let piece = plan.next(0, &table)?;
            Some(Posted::new(&plan, 0, piece, false))
        });
        let posted: Vec<Posted> = posted.collect();
        assert_eq!(posted.iter().filter(|one| one.piece.run.count > 0).count(), runs);
        let ranges: Vec<_> = posted.iter().flat_map(Posted::ranges).collect();
        let found = ranges.iter().map(|one| (one.piece.src, one.piece.dst, one.piece.len));
        let page = |i: usize| (SRC_BASE + 4 + src[i], DST_BASE + 4 + dst[i], 2);
        assert_eq!(found.collect::<Vec<_>>(), [page(0), page(1), page(2)]);
        assert!(ranges.iter().all(|one| one.piece.imm.unwrap().units() == 16));
    }
}

#[test]
fn a_run_that_is_not_there_is_not_read() {
    let table = Table::new(1, &[1]);
    let pages = [4, 1, 3, 0, 2];
    let request = Request::Paged(paged(8, &pages, &pages));
    let runs = plan(&request, with_runs(limits(HUGE, 64, 64), 3), &table, 0);
    let (mut src, mut dst) = ([9; 6], [9; 6]);
    for (first, count) in (0..8).flat_map(|first| (0..8).map(move |count| (first, count))) {
        for (from, to) in (0..=6).flat_map(|from| (0..=6).map(move |to| (from, to))) {
            let run = PageRun { first, count };
            let layout = runs.page_run(run, &mut src[..from], &mut dst[..to]);
            let room = count as usize <= from.min(to);
            assert_eq!(layout.is_some(), (1..=5).contains(&count) && first + count <= 5 && room);
            if layout.is_some() {
                let wanted = &pages[first as usize..(first + count) as usize];
                assert_eq!((&src[..count as usize], &dst[..count as usize]), (wanted, wanted));
            }
        }
    }
    let run = PageRun { first: u32::MAX, count: u32::MAX };
    assert_eq!(runs.page_run(run, &mut src, &mut dst), None);
    // Nothing but pages, planned as runs, is any.
    let run = PageRun { first: 0, count: 1 };
    let plain = plan(&request, limits(HUGE, 64, 64), &table, 0);
    assert_eq!(plain.page_run(run, &mut src, &mut dst), None);
    for request in [single(8, 0, tag()), single(8 << 10, 0, tag())] {
        let other = plan(&request, with_runs(limits(HUGE, 64, 64), 3), &table, 0);
        assert_eq!(other.page_run(run, &mut src, &mut dst), None);
    }
    assert_eq!(TestPlan::taken(peer(0)).page_run(run, &mut src, &mut dst), None);
}

/// The numbers of a list, one by one.
struct OneByOne<'a>(&'a [u64]);

impl PageList for OneByOne<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn get(&self, i: usize) -> Option<u64> {
        self.0.get(i).copied()
    }
    fn max(&self) -> Option<u64> {
        self.0.iter().max().copied()
    }
}

#[test]
fn numbers_are_copied_if_they_are_there_and_fit() {
    let narrow = [5, u32::MAX, 0, 7];
    let wide = narrow.map(u64::from);
    let too_wide = [5, 1 << 32, 0, 7];
    for first in [0, 1, 2, 3, 4, 5, usize::MAX] {
        for count in 0..=5 {
            let there = first.checked_add(count).and_then(|end| narrow.get(first..end));
            let copied = |list: &dyn PageList| {
                let mut out = [9; 5];
                list.copy_to(first, &mut out[..count]).map(|()| out[..count].to_vec())
            };
            // Nothing is there of what lies behind the end; whether that counts as missing does not matter.
            let wanted = there.map(<[u32]>::to_vec).filter(|_| count > 0);
            let same = |got: Option<Vec<u32>>| got.filter(|got| !got.is_empty()) == wanted;
            assert!(same(copied(&narrow.as_slice())));
            assert!(same(copied(&wide.as_slice())));
            assert!(same(copied(&OneByOne(&wide))));
            let fits = first != 1 && !(first == 0 && count > 1);
            assert!(!fits || same(copied(&OneByOne(&too_wide))));
            assert!(fits || count == 0 || copied(&OneByOne(&too_wide)).is_none());
        }
    }
}

// ---- scatter, barrier, immediates ----

#[test]
fn every_small_scatter_is_exact() {
    let lens = [0, 1, 7, 9, 30];
    for theirs in [[1, 1], [2, 3], [4, 1], [3, 8]] {
        for ours in 1..=4 {
            let table = Table::new(ours, &theirs);
            for a in lens {
                for b in lens {
                    for c in lens {
                        let targets = targets(&[a, b, c], 2);
                        let max = [1, 4, HUGE][(a + b + c) as usize % 3];
                        let imm = tag().filter(|_| a != 7);
                        let turn = (a + b) as u32;
                        check(&scatter(&targets, imm), limits(max, 4, 4), &table, turn);
                    }
                }
            }
        }
    }
}

#[test]
fn small_targets_spread_over_the_nics() {
    for nics in 1..=8 {
        let table = Table::new(nics, &[nics; 16]);
        let targets = targets(&[8; 16], 16);
        let posted = check(&scatter(&targets, tag()), limits(HUGE, 64, 64), &table, u32::MAX);
        let on = |nic| posted.iter().filter(|one| usize::from(one.nic) == nic).count();
        for nic in 0..nics {
            assert!((16 / nics..=16_usize.div_ceil(nics)).contains(&on(nic)));
        }
    }
}

#[test]
fn a_scatter_uses_the_most_routes_that_any_peer_has() {
    for theirs in [[1, 4], [4, 1]] {
        let table = Table::new(1, &theirs);
        let targets = targets(&[64, 64], 2);
        let posted = check(&scatter(&targets, tag()), limits(HUGE, 4, 4), &table, 0);
        assert_eq!(posted.len(), 8);
        let used = posted.iter().fold(0, |used: u8, one| used | 1 << one.piece.remote_nic);
        assert_eq!(used, 0b1111);
    }
}

#[test]
fn each_peer_of_a_scatter_gets_its_own_trailing_immediate() {
    let table = Table::new(2, &[2, 2, 2]);
    let targets = targets(&[17, 16, 18], 3);
    let posted = check(&scatter(&targets, tag()), limits(1, 64, 1), &table, 0);
    let trailing: Vec<_> = posted.iter().filter(|one| one.trailing).collect();
    let mut peers: Vec<_> = trailing.iter().map(|one| one.piece.peer).collect();
    peers.sort_unstable();
    assert_eq!(peers, [peer(0), peer(2)]);
}

#[test]
fn what_announces_a_long_write_follows_on_every_way_it_took() {
    for nics in 1..=8 {
        let table = Table::new(nics, &[nics, nics]);
        for len in [16, 17, 18, 63, 64, 65, 200] {
            for least in [1, 8, 64] {
                let limits = limits(1, least, 1);
                let ways = if len <= 16 { 0 } else { nics.min((len / least).max(1) as usize) };
                let trailing = |request: &TestRequest<'_>| {
                    let posted = check(request, limits, &table, nics as u32 / 2);
                    posted.iter().filter(|one| one.trailing).count()
                };
                assert_eq!(trailing(&single(len, 5, tag())), ways);
                assert_eq!(trailing(&single(len, 5, None)), 0);
                let targets = targets(&[len, 7, len], 2);
                let others = if len <= 16 { 0 } else { 2 * ways };
                assert_eq!(trailing(&scatter(&targets, tag())), others);
                let _ = trailing(&Request::Paged(paged(len, &[2, 0, 1], &[0, 1, 2])));
            }
        }
    }
}

#[test]
fn a_barrier_is_one_immediate_for_each_target() {
    for nics in 1..=8 {
        for count in 0..=20 {
            let table = Table::new(nics, &[nics; 20]);
            let targets: Vec<_> = (0..count).map(|i| target(i, 99, 5, 0)).collect();
            let request =
                Request::Barrier(Barrier { targets: targets.as_slice(), imm: tag().unwrap() });
            let posted = check(&request, limits(HUGE, 64, 64), &table, u32::from(count));
            assert_eq!(posted.len(), usize::from(count));
            let used = posted.iter().fold(0_u8, |used, one| used | 1 << one.nic);
            assert_eq!(used.count_ones() as usize, nics.min(usize::from(count)));
        }
    }
}

#[test]
fn peers_alone_make_a_barrier_but_no_scatter() {
    let peers = [peer(0), peer(1)];
    let table = Table::new(2, &[1, 2]);
    let barrier: Request<&[u32], &[PeerId]> =
        Request::Barrier(Barrier { targets: &peers, imm: tag().unwrap() });
    let checked = barrier.check().unwrap();
    let mut plan = Plan::new(checked, limits(HUGE, 64, 64), &table, 0).unwrap();
    assert_eq!(plan.peek(0), Some(peer(0)));
    assert_eq!(plan.next(0, &table).unwrap().peer, peer(0));
    assert_eq!(plan.next(1, &table).unwrap().peer, peer(1));
    assert_eq!(plan.nic_mask(), 0);
    let scatter: Request<&[u32], &[PeerId]> =
        Request::Scatter(ScatterWrite { src: local(0), targets: &peers, imm: None });
    let incomplete = RequestError::ListIncomplete { list_index: 0 };
    assert_eq!(scatter.check(), Err(incomplete));
}

#[test]
fn an_immediate_counts_for_1_to_255_writes() {
    let table = Table::new(1, &[3]);
    for writes in 0..=300 {
        let request: TestRequest<'_> =
            Request::Imm(ImmWrite { peer: peer(0), imm: tag().unwrap(), writes });
        if (1..=255).contains(&writes) {
            check(&request, limits(HUGE, 64, 64), &table, 0);
        } else {
            assert_eq!(request.check(), Err(RequestError::Writes { writes }));
        }
    }
}

#[test]
fn what_engines_say_to_each_other_is_said_by_nobody_else() {
    let (to, pages) = ([target(0, 8, 0, 0)], [0]);
    for slot in USER_COUNTERS - 1..MAX_COUNTERS {
        for generation in [0, GENERATIONS - 1] {
            let tag = ImmTag::new(slot, generation).unwrap();
            let imm = Some(tag);
            let requests: [TestRequest<'_>; 5] = [
                single(8, 0, imm),
                Request::Paged(PagedWrite { imm, ..paged(8, &pages, &pages) }),
                scatter(&to, imm),
                Request::Barrier(Barrier { targets: &to, imm: tag }),
                Request::Imm(ImmWrite { peer: peer(0), imm: tag, writes: 1 }),
            ];
            for request in requests {
                let refused = request.check().err();
                let reserved = (slot >= USER_COUNTERS).then_some(RequestError::Reserved { slot });
                assert_eq!(refused, reserved, "{request:?}");
            }
        }
    }
}

#[test]
fn an_immediate_to_a_connecting_peer_waits() {
    let mut table = Table::new(1, &[1]);
    let request = Request::Imm(ImmWrite { peer: peer(0), imm: tag().unwrap(), writes: 1 });
    let mut plan = plan(&request, limits(HUGE, 64, 64), &table, 0);
    table.connected = false;
    for _ in 0..3 {
        assert_eq!(plan.peek(0), Some(peer(0)));
        assert_eq!(plan.next(0, &table), None);
        assert_eq!(plan.nic_mask(), 1);
    }
    table.connected = true;
    assert_eq!(run(&mut plan, &table, lowest).len(), 1);
}

fn control(src: Option<LocalMr>, dst_offset: u64, len: u64) -> ControlWrite {
    ControlWrite {
        peer: peer(1),
        src,
        src_offset: 3,
        dst_offset,
        len,
        imm: tag().unwrap().with_units(7).unwrap(),
    }
}

#[test]
fn a_control_write_is_one_piece_with_its_own_immediate() {
    for nics in 1..=8 {
        let table = Table::new(nics, &[1, nics]);
        for (src, len) in [(None, 0), (Some(local(9)), 0), (Some(local(9)), 6)] {
            for turn in 0..8 {
                let write = control(src, 2, len);
                // The rule would cut six bytes into as many pieces; it is not asked.
                let mut plan = plan(&Request::Control(write), limits(6, 1, 1), &table, turn);
                let nic = (turn % nics as u32) as u8;
                assert_eq!(plan.nic_mask(), 1 << nic);
                assert_eq!(plan.peek(nic), Some(peer(1)));
                let piece = Piece {
                    peer: peer(1),
                    remote_nic: nic,
                    src: src.map_or(0, |src| src.base + 3),
                    src_key: src.map_or(0, |_| 100 + u64::from(nic)),
                    dst: CONTROL_BASE + 1 + 2,
                    dst_key: 400 + u64::from(nic),
                    len,
                    run: PageRun::NONE,
                    imm: Some(write.imm),
                };
                assert_eq!(plan.next(nic, &table), Some(piece));
                assert_eq!((plan.nic_mask(), plan.drained()), (0, false));
            }
        }
    }
}

#[test]
fn a_control_write_that_cannot_be_posted_is_refused() {
    let mut table = Table::new(2, &[2, 2]);
    let new = |write: ControlWrite, table: &Table| {
        let request: TestRequest<'_> = Request::Control(write);
        Plan::new(request.check().unwrap(), limits(6, 1, 1), table, 0).err()
    };
    // The region has eight bytes.
    assert_eq!(new(control(Some(local(9)), 2, 6), &table), None);
    let refused = PlanError::ControlRegion {
        peer: peer(1),
        error: RegionError::OutOfBounds { offset: 3, len: 6, region_len: 8 },
    };
    assert_eq!(new(control(Some(local(9)), 3, 6), &table), Some(refused));
    let refused = PlanError::ControlTooLong { len: 7, max: 6 };
    assert_eq!(new(control(Some(local(10)), 0, 7), &table), Some(refused));
    let mut src = local(9);
    src.keys = keys(1, 1);
    let refused = PlanError::KeyMissing { side: Side::Source, peer: peer(1), nic: 1 };
    assert_eq!(new(control(Some(src), 0, 6), &table), Some(refused));
    assert_eq!(new(control(None, 0, 0), &table), None);
    // While the peer connects there is no region to look at yet.
    table.connected = false;
    assert_eq!(new(control(Some(local(9)), 3, 6), &table), None);
    for src in [None, Some(local(8))] {
        let request: TestRequest<'_> = Request::Control(control(src, 0, 6));
        assert!(matches!(
            request.check(),
            Err(RequestError::Region { side: Side::Source, target: 0, .. })
        ));
    }
}

// ---- NICs and peers that change ----

#[test]
fn rerouting_at_any_moment_loses_nothing() {
    let pages: Vec<u32> = (0..12).map(|i| i ^ 2).collect();
    let targets = targets(&[5, 40, 0, 3, 18], 2);
    let requests = [
        (single(41, 1, tag()), 2),
        (single(41, 1, tag()), 100),
        (Request::Paged(paged(4, &pages, &pages)), 8),
        (Request::Paged(paged(20, &pages[..2], &pages[..2])), 1),
        (scatter(&targets, tag()), 1),
        (scatter(&targets, tag()), 100),
    ];
    for (request, max) in requests {
        let limits = limits(max, 4, 4);
        for from in 0..3 {
            for to in 0..4 {
                for after in 0..50 {
                    reroute(&request, limits, from, to, after);
                    reroute(&request, with_runs(limits, 3), from, to, after);
                }
            }
        }
    }
}

fn reroute(
    request: &TestRequest<'_>,
    limits: PlanLimits,
    from: NicIndex,
    to: NicIndex,
    after: u32,
) {
    let table = Table::new(3, &[2, 3]);
    let mut plan = plan(request, limits, &table, 1);
    let (mut posted, mut trailing, mut lost) = (Vec::new(), false, false);
    let mut pick = by_turns();
    loop {
        if posted.len() as u32 >= after && !lost {
            assert!(plan.reroute(from, to));
            lost = true;
        }
        if plan.nic_mask() == 0 {
            if !plan.drained() {
                break;
            }
            trailing = true;
            continue;
        }
        let nic = pick(plan.nic_mask());
        assert!(!lost || from == to || nic != from, "work on a lost NIC");
        let piece = plan.next(nic, &table).unwrap();
        posted.push(Posted::new(&plan, nic, piece, trailing));
    }
    let posted: Vec<Posted> = posted.iter().flat_map(Posted::ranges).collect();
    bytes_are_exact(&writes(request), &posted);
    units_are_exact(&writes(request), &posted);
}

/// Where the peer has a route from `nic`, the piece takes one.
fn is_a_route(table: &Table, nic: NicIndex, piece: &Piece) {
    let routes = table.routes(piece.peer);
    let all = routes.as_ref().map_or(&[][..], Routes::as_slice);
    let mut from_nic = all.iter().filter(|route| route.local == nic).peekable();
    let none = from_nic.peek().is_none();
    assert!(none || from_nic.any(|route| route.remote == piece.remote_nic));
}

#[test]
fn a_rerouted_scatter_takes_the_routes_of_its_new_nic() {
    let table = Table::new(2, &[4, 4]);
    let targets = targets(&[64, 64, 8, 8], 2);
    let mut plan = plan(&scatter(&targets, tag()), limits(4, 4, 4), &table, 0);
    assert!(plan.reroute(0, 1));
    let mut remotes = 0_u8;
    while plan.nic_mask() != 0 {
        let piece = plan.next(1, &table).unwrap();
        is_a_route(&table, 1, &piece);
        remotes |= 1 << piece.remote_nic;
    }
    assert_eq!(remotes, 0b1010);
}

#[test]
fn a_remote_nic_without_a_key_is_replaced_by_one_with() {
    let targets = [1, 2, 3].map(|index| {
        let mut target = target(index % 2, 24, 0, 0);
        target.dst.keys = keys(2, 2);
        target
    });
    let (first, second) = (Table::new(4, &[2, 2]), Table::new(4, &[8, 8]));
    let mut plan = plan(&scatter(&targets, None), limits(4, 4, 4), &first, 0);
    let mut bytes = 0;
    for nic in 0..4 {
        while let Some(piece) = plan.next(nic, &second) {
            assert!(piece.remote_nic < 2);
            assert_eq!(piece.dst_key, 200 + u64::from(piece.remote_nic));
            bytes += piece.len;
        }
    }
    assert_eq!((bytes, plan.nic_mask()), (72, 0));
}

#[test]
fn no_reroute_to_a_nic_without_a_key() {
    let table = Table::new(2, &[2]);
    let Request::Single(mut write) = single(64, 0, tag()) else {
        panic!("not a single write");
    };
    write.src.keys = keys(1, 2);
    let mut planned = plan(&Request::Single(write), limits(HUGE, 4, 4), &table, 0);
    let before = planned.clone();
    for to in [2, 7, 8, 255] {
        assert!(!planned.reroute(0, to));
        assert_eq!(planned, before);
    }
    assert!(planned.reroute(200, 0), "nothing is on a NIC that does not exist");
    assert_eq!(planned, before);
    assert!(planned.reroute(0, 1));
    assert_eq!(planned.nic_mask(), 2);
}

/// A piece that kept no keys stays where it is; with them it is as if planned the long way.
#[test]
fn a_piece_without_its_keys_is_not_moved() {
    let table = Table::new(3, &[2]);
    let Request::Single(write) = single(8, 1, tag()) else {
        panic!("not a single write");
    };
    let routes = table.routes(write.peer).unwrap();
    for turn in 0..6 {
        let mut short = TestPlan::of(Whole::routed(&write, &routes, turn).unwrap());
        let nic = short.nic_mask().trailing_zeros() as NicIndex;
        let other = (nic + 1) % 3;
        assert!(!short.reroute(nic, other));
        assert_eq!(short.nic_mask(), 1 << nic);
        short.keep_whole(&write);
        let request = Request::Single(write);
        let mut long = plan(&request, limits(HUGE, 64, 64), &table, turn);
        assert_eq!(short, long);
        assert!(short.reroute(nic, other) && long.reroute(nic, other));
        assert_eq!(short.nic_mask(), 1 << other);
        let ready = short.as_whole().unwrap();
        assert_eq!((ready.ready(nic), ready.ready(other)), (None, Some(write.peer)));
        let piece = *ready.take();
        assert_eq!(piece.src_key, 100 + u64::from(other));
        assert_eq!(long.next(other, &table), Some(piece));
        assert_eq!(short, long);
        assert_eq!((short.nic_mask(), short.peek(other), short.peek(255)), (0, None, None));
    }
}

#[test]
fn routes_that_change_underway_lose_nothing() {
    // The table changes after each number of pieces; even a peer that vanishes keeps its bytes.
    let targets = targets(&[40, 33, 8, 64, 0, 17], 2);
    let request = scatter(&targets, tag());
    let limits = limits(5, 4, 4);
    let tables = [(1, vec![8, 1]), (4, vec![1, 1]), (3, vec![2]), (2, vec![])];
    for (ours, theirs) in tables {
        let (first, second) = (Table::new(4, &[3, 5]), Table::new(ours, &theirs));
        for after in 0..40 {
            let mut plan = plan(&request, limits, &first, 3);
            let (mut posted, mut pick) = (Vec::new(), by_turns());
            let mut trailing = false;
            while plan.nic_mask() != 0 || plan.drained() {
                let nic = pick(plan.nic_mask());
                let table = if posted.len() < after { &first } else { &second };
                let piece = plan.next(nic, table).unwrap();
                posted.push(Posted::new(&plan, nic, piece, trailing));
                trailing |= plan.nic_mask() == 0;
            }
            bytes_are_exact(&writes(&request), &posted);
            units_are_exact(&writes(&request), &posted);
        }
    }
}

// ---- refusals ----

#[test]
fn a_plan_needs_routes_and_keys() {
    let table = Table::new(2, &[3]);
    let new = |request: TestRequest<'static>| {
        Plan::new(request.check().unwrap(), limits(HUGE, 64, 64), &table, 0).err()
    };
    let Request::Single(write) = single(8, 0, tag()) else {
        panic!("not a single write");
    };
    let with = |change: fn(&mut SingleWrite)| {
        let mut changed = write;
        change(&mut changed);
        new(Request::Single(changed))
    };
    let missing = |side, nic| {
        let peer = peer(0);
        Some(PlanError::KeyMissing { side, peer, nic })
    };
    assert_eq!(with(|_| ()), None);
    assert_eq!(with(|w| w.peer = peer(1)), Some(PlanError::NoRoute { peer: peer(1) }));
    assert_eq!(with(|w| w.src.keys = keys(1, 1)), missing(Side::Source, 1));
    assert_eq!(with(|w| w.src.keys = keys(1, 2)), None);
    assert_eq!(with(|w| w.dst.keys = keys(2, 2)), missing(Side::Destination, 2));
    assert_eq!(with(|w| w.dst.keys = keys(2, 3)), None);
    let mut few = target(0, 8, 0, 0);
    few.dst.keys = keys(2, 2);
    let targets = [target(0, 8, 0, 0), few];
    let request = scatter(&targets, None).check().unwrap();
    let refused = Plan::new(request, limits(HUGE, 64, 64), &table, 0).err();
    assert_eq!(refused, missing(Side::Destination, 2));
    let none = Request::Imm(ImmWrite { peer: peer(7), imm: tag().unwrap(), writes: 1 });
    assert_eq!(new(none), Some(PlanError::NoRoute { peer: peer(7) }));
}

#[test]
fn ranges_outside_their_regions_are_refused() {
    for len in 0..4 {
        for offset in 0..6 {
            for side in [Side::Source, Side::Destination] {
                let mut write = SingleWrite {
                    peer: peer(0),
                    src: local(4),
                    src_offset: 0,
                    dst: remote(4),
                    dst_offset: 0,
                    len,
                    imm: None,
                };
                match side {
                    Side::Source => write.src_offset = offset,
                    Side::Destination => write.dst_offset = offset,
                }
                let targets = [
                    target(0, 0, 0, 0),
                    Target {
                        peer: peer(0),
                        dst: remote(4),
                        src_offset: write.src_offset,
                        dst_offset: write.dst_offset,
                        len,
                    },
                ];
                let scatter: TestRequest<'_> =
                    Request::Scatter(ScatterWrite { src: local(4), targets: &targets, imm: None });
                let single: TestRequest<'_> = Request::Single(write);
                let inside = offset + len <= 4;
                for (index, request) in [single, scatter].into_iter().enumerate() {
                    let refused = RequestError::Region {
                        side,
                        target: index,
                        error: RegionError::OutOfBounds { offset, len, region_len: 4 },
                    };
                    let got = request.check().map(|checked| checked.total_bytes());
                    assert_eq!(got, if inside { Ok(len) } else { Err(refused) });
                }
            }
        }
    }
}

#[test]
fn the_first_page_outside_is_named() {
    let pages = [0, 3, 1, 3];
    for side in [Side::Source, Side::Destination] {
        for region_len in 0..40 {
            let mut write = paged(8, &pages, &pages);
            let (mr, pages) = match side {
                Side::Source => (&mut write.src.len, &mut write.src_pages),
                Side::Destination => (&mut write.dst.len, &mut write.dst_pages),
            };
            (*mr, pages.offset) = (region_len, 2);
            let fits = |page: &u32| 2 + 8 * u64::from(*page) + 8 <= region_len;
            let outside = pages.indices.iter().position(|page| !fits(page));
            let other = match side {
                Side::Source => &mut write.dst,
                Side::Destination => &mut remote(0),
            };
            other.len = 32;
            let request: TestRequest<'_> = Request::Paged(write);
            let got = request.check().map(|checked| checked.total_bytes());
            let want = outside.map_or(Ok(32), |list_index| {
                Err(RequestError::PageOutOfRegion {
                    side,
                    list_index,
                    page: [0, 3, 1, 3][list_index],
                    page_bytes: 8,
                    region_len,
                })
            });
            assert_eq!(got, want);
        }
    }
}

#[test]
fn page_arithmetic_cannot_wrap() {
    let huge = [u64::MAX, u64::MAX / 2, 1 << 32, 1];
    for page in huge {
        for stride in huge {
            for offset in [0, 1, u64::MAX] {
                for page_bytes in [0, 1, u64::MAX] {
                    let indices = [page];
                    let pages = Pages { indices: indices.as_slice(), stride, offset };
                    let zero = Pages { stride: 0, offset: 0, ..pages };
                    let write = PagedWrite {
                        peer: peer(0),
                        page_bytes,
                        src: local_at(0, u64::MAX),
                        src_pages: pages,
                        dst: remote_at(0, u64::MAX),
                        dst_pages: zero,
                        imm: None,
                    };
                    let request: Request<&[u64], &[Target]> = Request::Paged(write);
                    let end = u128::from(stride) * u128::from(page)
                        + u128::from(offset)
                        + u128::from(page_bytes);
                    assert_eq!(request.check().is_ok(), end <= u128::from(u64::MAX));
                }
            }
        }
    }
}

#[test]
fn unequal_lists_and_regions_without_rights_are_refused() {
    let request: TestRequest<'_> = Request::Paged(paged(8, &[0, 1], &[0]));
    assert_eq!(request.check(), Err(RequestError::PagesUnequal { src: 2, dst: 1 }));
    let not_writable = |target| {
        Err(RequestError::Region {
            side: Side::Destination,
            target,
            error: RegionError::NotWritable,
        })
    };
    let mut write = paged(8, &[], &[]);
    assert!(Request::<_, &[Target]>::Paged(write).check().is_ok());
    write.dst.rights = Rights::LOCAL;
    assert_eq!(Request::<_, &[Target]>::Paged(write).check(), not_writable(0));
    let Request::Single(mut write) = single(0, 0, None) else {
        panic!("not a single write");
    };
    write.dst.rights = Rights::LOCAL;
    assert_eq!(TestRequest::Single(write).check(), not_writable(0));
    let mut targets = targets(&[1, 1], 1);
    targets[1].dst.rights = Rights::LOCAL;
    assert_eq!(scatter(&targets, None).check(), not_writable(1));
}

/// A list that says it has `len` pages, and has none.
#[derive(Debug, Clone, PartialEq)]
struct Boast(usize);

impl PageList for Boast {
    fn len(&self) -> usize {
        self.0
    }
    fn get(&self, _: usize) -> Option<u64> {
        None
    }
    fn max(&self) -> Option<u64> {
        None
    }
}

#[test]
fn lists_that_are_too_long_or_empty_inside_are_refused() {
    let boast = |len| {
        let pages = |len| Pages { indices: Boast(len), stride: 1, offset: 0 };
        let write = PagedWrite {
            peer: peer(0),
            page_bytes: 1,
            src: local(1),
            src_pages: pages(len),
            dst: remote(1),
            dst_pages: pages(len),
            imm: None,
        };
        Request::<Boast, &[Target]>::Paged(write).check().err()
    };
    assert_eq!(boast(0), None);
    assert!(matches!(boast(1), Some(RequestError::PageOutOfRegion { list_index: 1, .. })));
    let (len, max) = (MAX_ITEMS as usize + 1, MAX_ITEMS);
    assert_eq!(boast(len), Some(RequestError::TooMany { len, max }));
}

#[test]
fn totals_are_bytes_over_all_items() {
    let total = |request: &TestRequest<'_>| request.check().unwrap().total_bytes();
    assert_eq!(total(&single(9, 0, None)), 9);
    assert_eq!(total(&Request::Paged(paged(8, &[0, 1, 2], &[2, 1, 0]))), 24);
    assert_eq!(total(&scatter(&targets(&[1, 2, 3], 1), None)), 6);
    let far = Target { dst: remote_at(0, HUGE), ..target(0, HUGE, 0, 0) };
    let request: TestRequest<'_> =
        Request::Scatter(ScatterWrite { src: local_at(0, HUGE), targets: &[far, far], imm: None });
    assert_eq!(total(&request), u64::MAX);
}

#[test]
fn messages_name_what_was_found() {
    use std::string::ToString;
    let error = RequestError::PageOutOfRegion {
        side: Side::Source,
        list_index: 4,
        page: 9,
        page_bytes: 8,
        region_len: 72,
    };
    let text = "source page 9 of 8 bytes, number 4 in its list, does not fit a region of 72 bytes";
    assert_eq!(error.to_string(), text);
    let error = PlanError::NoRoute { peer: peer(3) };
    assert_eq!(error.to_string(), "no usable route to peer 3.1");
}

// ---- any width ----

#[test]
fn a_plan_is_compact() {
    assert!(size_of::<TestPlan<'_>>() <= 680, "{}", size_of::<TestPlan<'_>>());
}

/// Base, offset and length of a range within the address space, with widths of every magnitude.
fn place() -> impl Strategy<Value = (u64, u64, u64)> {
    let wide = || (any::<u64>(), 0..64_u32).prop_map(|(value, shift)| value >> shift);
    (wide(), wide(), wide()).prop_filter("past the address space", |(base, offset, len)| {
        base.checked_add(*offset).and_then(|sum| sum.checked_add(*len)).is_some()
    })
}

proptest! {
    #[test]
    fn any_single_write_is_exact(
        (src_base, src_offset, len) in place(),
        (dst_base, dst_offset, _) in place(),
        local in proptest::collection::vec(1..=u32::MAX, 1..=MAX_NICS),
        remote in proptest::collection::vec(1..=u32::MAX, 1..=MAX_NICS),
        pieces in 1..80_u64,
        min in 1..=u64::MAX,
        granule in 1..=u64::MAX,
        shift in 0..64_u32,
        turn in any::<u32>(),
    ) {
        let dst_base = dst_base.min(u64::MAX - dst_offset - len.min(u64::MAX - dst_offset));
        let len = len.min(u64::MAX - dst_offset - dst_base);
        let write = SingleWrite {
            peer: peer(0),
            src: local_at(src_base, src_offset + len),
            src_offset,
            dst: remote_at(dst_base, dst_offset + len),
            dst_offset,
            len,
            imm: tag(),
        };
        let table = Table {
            routes: vec![Routes::new(&speeds(&local), &speeds(&remote)).unwrap()],
            connected: true,
        };
        let max = (len / pieces).max(1);
        // A granule that the largest message just holds may halve the pieces, so not above that.
        let granule = (granule >> shift).max(1);
        let limits = limits(max, (min >> shift).max(1), granule);
        check(&Request::Single(write), limits, &table, turn);
    }

    #[test]
    fn any_pages_are_exact(
        order in Just((0..24_u32).collect::<Vec<_>>()).prop_shuffle(),
        count in 0..=24_usize,
        split in 0..24_usize,
        page_bytes in 1..60_u64,
        max in 1..200_u64,
        pages_per_piece in 1..30_u16,
        (ours, theirs) in (1..=8_usize, 1..=8_usize),
        turn in any::<u32>(),
    ) {
        // Runs of neighbours between shuffled pages.
        let mut src = order.clone();
        src[..split].sort_unstable();
        let mut dst = order;
        dst[..split].sort_unstable();
        dst[split..].reverse();
        let request = Request::Paged(paged(page_bytes, &src[..count], &dst[..count]));
        let limits = with_runs(limits(max, 16, 4), pages_per_piece);
        check(&request, limits, &Table::new(ours, &[theirs]), turn);
    }

    #[test]
    fn any_scatter_is_exact(
        lens in proptest::collection::vec(0..100_u64, 0..20),
        max in 1..120_u64,
        ours in 1..=8_usize,
        theirs in proptest::collection::vec(1..=8_usize, 5),
        turn in any::<u32>(),
    ) {
        let targets = targets(&lens, 5);
        let table = Table::new(ours, &theirs);
        check(&scatter(&targets, tag()), limits(max, 16, 4), &table, turn);
    }
}
