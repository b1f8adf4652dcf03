//! Groups, regions and requests that the models share: small numbers, and nothing by chance.

use core::num::{NonZeroU16, NonZeroU64};
use std::time::Duration;

use immwire_core::group::{
    Answer, DomainGroup, GroupConfig, LostSlot, NicConfig, PeerSlot, PeersFull, PieceLimits,
    Storage, TransferSlot,
};
use immwire_core::id::{EngineId, MAX_NICS, PeerId, Time};
use immwire_core::nic::{NicState, SplitRule};
use immwire_core::peer::LivenessConfig;
use immwire_core::plan::{PageList, PlanLimits, Request, Target, TargetList};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};

/// Page lists: no model sends pages, which are cut and merged by the plan, not by a protocol.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NoPages;

impl PageList for NoPages {
    fn len(&self) -> usize {
        0
    }
    fn get(&self, _: usize) -> Option<u64> {
        None
    }
    fn max(&self) -> Option<u64> {
        None
    }
}

/// Targets of a scatter, or the peers of a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Targets {
    /// Of a scatter.
    Writes(Vec<Target>),
    /// Of a barrier.
    Peers(Vec<PeerId>),
}

impl TargetList for Targets {
    fn len(&self) -> usize {
        match self {
            Self::Writes(targets) => targets.len(),
            Self::Peers(peers) => peers.len(),
        }
    }
    fn get(&self, i: usize) -> Option<Target> {
        match self {
            Self::Writes(targets) => targets.get(i).copied(),
            Self::Peers(_) => None,
        }
    }
    fn peer(&self, i: usize) -> Option<PeerId> {
        match self {
            Self::Writes(targets) => targets.get(i).map(|target| target.peer),
            Self::Peers(peers) => peers.get(i).copied(),
        }
    }
}

/// The shipped scheduler, over storage that can be compared.
pub type Group<LS = [LostSlot; 0]> =
    DomainGroup<NoPages, Targets, Vec<TransferSlot<NoPages, Targets>>, Vec<PeerSlot>, LS>;
/// What is submitted to it.
pub type Asked = Request<NoPages, Targets>;

/// The longest message, in bytes: what is longer is cut.
pub const MAX_MESSAGE: u64 = 2;
/// How long a stopped transfer may drain; after that it is forced again and again, no sooner than this.
pub const DRAIN: Duration = Duration::from_millis(1);
/// Nobody is lost by silence, and nothing beats.
pub const PATIENT: LivenessConfig = LivenessConfig {
    heartbeat: Duration::MAX,
    suspect_after: Duration::MAX,
    down_after: Duration::MAX,
    connect_deadline: Duration::MAX,
    idle_after: Duration::MAX,
};

const SRC: u64 = 0x1000;
const CONTROL: u64 = 0x9000;
const NIC: NicState = NicState { speed: 100, healthy: true };

/// Sizes of a group.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// NICs, on either side.
    pub nics: usize,
    /// Pieces in flight on a NIC.
    pub queue_depth: u16,
    /// Pieces in flight to a peer over a NIC.
    pub peer_depth: u16,
    /// Of both, those kept for small writes.
    pub reserve: u16,
    /// Slots for transfers.
    pub transfers: usize,
    /// Slots for peers.
    pub peers: usize,
}

/// A group without peers, in which what is lost with its path ends its transfer.
///
/// # Panics
///
/// If the sizes cannot work.
#[must_use]
pub fn group(sizes: Sizes, liveness: LivenessConfig) -> Group {
    made(sizes, liveness, [])
}

/// A group without peers, in which what is lost with its path goes over another.
///
/// # Panics
///
/// If the sizes cannot work.
#[must_use]
pub fn failover_group(sizes: Sizes, liveness: LivenessConfig) -> Group<Vec<LostSlot>> {
    made(sizes, liveness, vec![LostSlot::new(); sizes.nics * usize::from(sizes.queue_depth)])
}

#[expect(clippy::expect_used, reason = "the models' own sizes")]
fn made<LS: Storage<LostSlot>>(sizes: Sizes, liveness: LivenessConfig, lost: LS) -> Group<LS> {
    let config = GroupConfig {
        limits: PlanLimits {
            max_message_bytes: NonZeroU64::new(MAX_MESSAGE).unwrap_or(NonZeroU64::MIN),
            pages_per_piece: NonZeroU16::MIN,
            rule: SplitRule {
                min_piece_bytes: NonZeroU64::new(2).unwrap_or(NonZeroU64::MIN),
                granule_bytes: NonZeroU64::MIN,
            },
        },
        unreached: [0; MAX_NICS],
        peer_depth: sizes.peer_depth,
        latency_bytes: MAX_MESSAGE,
        latency_reserve: sizes.reserve,
        turn_bytes: 512,
        drain: DRAIN,
        liveness,
    };
    let nic = NicConfig { state: NIC, queue_depth: sizes.queue_depth, takes: PieceLimits::ANY };
    let transfers = vec![TransferSlot::new(); sizes.transfers];
    let peers = vec![PeerSlot::new(); sizes.peers];
    let nics = vec![nic; sizes.nics];
    Group::with_failover(config, &nics, transfers, peers, lost).expect("sizes that work")
}

fn keys() -> Keys {
    let keys = Keys::new(&core::array::from_fn::<u64, MAX_NICS, _>(|nic| nic as u64));
    keys.unwrap_or_else(|| unreachable!("one key for each NIC"))
}

/// What every source is.
#[must_use]
pub fn source() -> LocalMr {
    LocalMr { base: SRC, len: 1 << 20, generation: 0, keys: keys() }
}

/// A region of `owner`'s from `base`.
#[must_use]
pub fn region(owner: EngineId, base: u64) -> MrDesc {
    MrDesc { owner, base, len: 1 << 20, generation: 0, rights: Rights::REMOTE_WRITE, keys: keys() }
}

/// Calls `engine`, which has `nics` NICs.
///
/// # Errors
///
/// [`PeersFull`].
pub fn add<LS: Storage<LostSlot>>(
    group: &mut Group<LS>,
    now: Time,
    engine: EngineId,
    nics: usize,
) -> Result<PeerId, PeersFull> {
    group.add_peer(now, engine, &vec![NIC; nics])
}

/// `engine`, which has `nics` NICs, has connected to us.
///
/// # Errors
///
/// [`PeersFull`].
pub fn accept(
    group: &mut Group,
    now: Time,
    engine: EngineId,
    nics: usize,
) -> Result<PeerId, PeersFull> {
    let nics = vec![NIC; nics];
    group.accept_peer(now, engine, &answer(engine, &nics))
}

/// `peer`, which is `engine` and has `nics` NICs, has answered.
pub fn connected<LS: Storage<LostSlot>>(
    group: &mut Group<LS>,
    now: Time,
    peer: PeerId,
    engine: EngineId,
    nics: usize,
) {
    let nics = vec![NIC; nics];
    group.handle_connected(now, peer, &answer(engine, &nics));
}

fn answer(engine: EngineId, nics: &[NicState]) -> Answer<'_> {
    Answer { nics, control: region(engine, CONTROL), heartbeat: Duration::MAX }
}
