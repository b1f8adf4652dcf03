//! What the benches share: a domain group of ordinary size, and requests for it.

use std::hint::black_box;
use std::num::{NonZeroU16, NonZeroU64};
use std::time::Duration;

use immwire_core::group::{
    Answer, DomainGroup, Event, GroupConfig, NicConfig, Options, PeerSlot, PieceLimits,
    TransferSlot, WorkRequest,
};
use immwire_core::id::{EngineId, MAX_NICS, PeerId, Time};
use immwire_core::imm::ImmTag;
use immwire_core::nic::{NicState, SplitRule};
use immwire_core::peer::LivenessConfig;
use immwire_core::plan::{Checked, PagedWrite, Pages, PlanLimits, Request, SingleWrite, Target};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};

/// Page lists and targets are borrowed here.
pub type Group<'a> = DomainGroup<
    &'a [u32],
    &'a [Target],
    Box<[TransferSlot<&'a [u32], &'a [Target]>]>,
    Box<[PeerSlot]>,
>;
/// A request of such a group.
pub type BenchRequest<'a> = Checked<&'a [u32], &'a [Target]>;

/// Bytes of either region.
pub const REGION_BYTES: u64 = 1 << 30;

const OWNER: EngineId = EngineId(2);

fn keys(nics: u8) -> Keys {
    let all = [1, 2, 3, 4, 5, 6, 7, 8];
    let keys = all.get(..usize::from(nics)).and_then(Keys::new);
    keys.unwrap_or_else(|| unreachable!("1 to 8 nics"))
}

/// A peer's region with a key for each of `nics` NICs.
#[must_use]
pub fn remote(nics: u8) -> MrDesc {
    MrDesc {
        owner: OWNER,
        base: 1 << 40,
        len: REGION_BYTES,
        generation: 0,
        rights: Rights::REMOTE_WRITE,
        keys: keys(nics),
    }
}

/// A source region registered with `nics` NICs.
#[must_use]
pub fn local(nics: u8) -> LocalMr {
    LocalMr { base: 1 << 41, len: REGION_BYTES, generation: 0, keys: keys(nics) }
}

/// A group of `nics` equal NICs with one peer that has as many, and is up.
#[must_use]
pub fn group<'a>(nics: u8) -> (Group<'a>, PeerId) {
    group_with_runs(nics, 1)
}

/// The same, of NICs that take so many pages in a piece.
#[must_use]
pub fn group_with_runs<'a>(nics: u8, pages_per_piece: u16) -> (Group<'a>, PeerId) {
    let bytes = |n: u64| NonZeroU64::new(n).unwrap_or(NonZeroU64::MIN);
    let state = NicState { speed: 400, healthy: true };
    let config = GroupConfig {
        limits: PlanLimits {
            max_message_bytes: bytes(1 << 20),
            pages_per_piece: NonZeroU16::new(pages_per_piece).unwrap_or(NonZeroU16::MIN),
            rule: SplitRule { min_piece_bytes: bytes(64 << 10), granule_bytes: bytes(64) },
        },
        unreached: [0; MAX_NICS],
        peer_depth: 256,
        latency_bytes: 8 << 10,
        latency_reserve: 16,
        turn_bytes: 256 << 10,
        drain: Duration::from_secs(1),
        liveness: LivenessConfig::default(),
    };
    let nic_configs =
        vec![NicConfig { state, queue_depth: 256, takes: PieceLimits::ANY }; usize::from(nics)];
    let transfers = (0..1024).map(|_| TransferSlot::new()).collect();
    let peers = (0..64).map(|_| PeerSlot::new()).collect();
    let made = DomainGroup::new(config, &nic_configs, transfers, peers);
    let mut group = made.unwrap_or_else(|error| unreachable!("{error}"));
    let states = vec![state; usize::from(nics)];
    let answer = Answer { nics: &states, control: remote(nics), heartbeat: Duration::from_secs(1) };
    let added = group.accept_peer(Time::ZERO, OWNER, &answer);
    let peer = added.unwrap_or_else(|error| unreachable!("{error}"));
    while group.poll_event().is_some() {}
    (group, peer)
}

/// One write of `len` bytes with an immediate.
#[must_use]
pub fn single<'a>(peer: PeerId, nics: u8, len: u64) -> BenchRequest<'a> {
    let request = Request::Single(SingleWrite {
        peer,
        src: local(nics),
        src_offset: 0,
        dst: remote(nics),
        dst_offset: 64,
        len,
        imm: ImmTag::new(5, 0),
    });
    request.check().unwrap_or_else(|error| unreachable!("{error}"))
}

/// Pages of 4 KiB with an immediate each.
#[must_use]
pub fn paged<'a>(peer: PeerId, nics: u8, src: &'a [u32], dst: &'a [u32]) -> BenchRequest<'a> {
    let pages = |indices| Pages { indices, stride: 4096, offset: 0 };
    let request = Request::Paged(PagedWrite {
        peer,
        page_bytes: 4096,
        src: local(nics),
        src_pages: pages(src),
        dst: remote(nics),
        dst_pages: pages(dst),
        imm: ImmTag::new(5, 0),
    });
    request.check().unwrap_or_else(|error| unreachable!("{error}"))
}

/// Numbers `0..count` in an order that has no neighbours to merge.
#[must_use]
pub fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count).collect();
    let mut state = seed;
    for at in (1..numbers.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let other = usize::try_from((state >> 33) % (at as u64 + 1)).unwrap_or(0);
        numbers.swap(at, other);
    }
    numbers
}

/// Reads where the pages of a run lie, as a provider would; returns how many there are.
pub fn read_run(group: &Group<'_>, work: &WorkRequest) -> u64 {
    let (mut src, mut dst) = ([0; 255], [0; 255]);
    let count = u64::from(work.run.count);
    group.page_run(black_box(work), &mut src, &mut dst).map_or(0, |layout| {
        black_box((&src, &dst, layout));
        count
    })
}

/// Takes `request` through the group as an engine would: submits it, posts in batches of 32 on each
/// NIC, completes each piece, polls the end. Returns the pieces and bytes that were posted.
pub fn drive<'a>(group: &mut Group<'a>, nics: u8, request: BenchRequest<'a>) -> (u64, u64) {
    let options = Options { deadline: Time::NEVER, user: 0 };
    if group.submit(request, options).is_err() {
        return (0, 0);
    }
    let (mut pieces, mut bytes) = (0, 0);
    let mut batch: [Option<WorkRequest>; 32] = [None; 32];
    loop {
        for nic in 0..nics {
            let mut taken = 0;
            group.poll_batch(nic, batch.len(), u64::MAX, |work| {
                if let Some(slot) = batch.get_mut(taken) {
                    *slot = Some(work);
                }
                taken += 1;
            });
            for work in batch.iter_mut().take(taken).filter_map(Option::take) {
                pieces += 1;
                bytes += work.len;
                if work.run.count > 0 {
                    read_run(group, &work);
                }
                group.handle_completion(Time::ZERO, nic, work.token, Ok(()));
            }
        }
        if let Some(Event::Ended { .. }) = group.poll_event() {
            return (pieces, bytes);
        }
    }
}
