//! A group against a provider and an oracle that know nothing of its queues.
//!
//! [`World`] posts, completes, cancels and cuts in any order. After each step it holds the group to the
//! invariants of the module: it paints the bytes that arrived, counts what is in flight, and knows of
//! each transfer whether anything of it may still be posted.

mod parting;

use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::vec;
use std::vec::Vec;

use core::num::{NonZeroU16, NonZeroU64};

use proptest::prelude::*;
use proptest::test_runner::RngAlgorithm;

use super::list::NIL;
use super::paths::{MAX_BEATS, Note};
use super::slot::LATENCY_BURST;
use super::*;
use crate::imm::{ImmTag, WRITE_UNITS};
use crate::mailbox::{Control, Usage};
use crate::nic::SplitRule;
use crate::plan::{
    Barrier, ImmWrite, PageRun, PagedWrite, Pages, ScatterWrite, Side, SingleWrite, Target,
};
use crate::region::{Keys, LocalMr, Rights};
use crate::span::{self, side_of};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Numbers(Vec<u64>);

impl PageList for Numbers {
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

/// Targets of a scatter, or only the peers of a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Targets {
    Writes(Vec<Target>),
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

type Slot = TransferSlot<Numbers, Targets>;
type Group = DomainGroup<Numbers, Targets, Vec<Slot>, Vec<PeerSlot>, Vec<LostSlot>>;
type Asked = Request<Numbers, Targets>;

const SRC: u64 = 0x1000;
const DST: u64 = 0x10_0000;
const CONTROL: u64 = 0x9000;
const RECEIPTS: u64 = 0xa000;
const SRC_KEY: u64 = 100;
const DST_KEY: u64 = 200;
const DRAIN: Duration = Duration::from_nanos(10);
const DUE: Time = Time::from_nanos(5);
const NEVER: LivenessConfig = LivenessConfig {
    heartbeat: Duration::MAX,
    suspect_after: Duration::MAX,
    down_after: Duration::MAX,
    connect_deadline: Duration::MAX,
    idle_after: Duration::MAX,
};

fn keys(first: u64) -> Keys {
    Keys::new(&core::array::from_fn::<u64, MAX_NICS, _>(|nic| first + nic as u64)).unwrap()
}

fn source() -> LocalMr {
    LocalMr { base: SRC, len: 1 << 40, generation: 0, keys: keys(SRC_KEY) }
}

fn region(owner: EngineId, base: u64) -> MrDesc {
    MrDesc {
        owner,
        base,
        len: 1 << 40,
        generation: 0,
        rights: Rights::REMOTE_WRITE,
        keys: keys(DST_KEY),
    }
}

fn tag() -> ImmTag {
    ImmTag::new(3, 1).unwrap()
}

/// What a world is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Setup {
    nics: u8,
    peer_nics: u8,
    peers: u16,
    /// The first so many peers have not answered yet.
    connecting: u16,
    slots: usize,
    queue_depth: u16,
    peer_depth: u16,
    reserve: u16,
    max_message: u64,
    pages_per_piece: u16,
    /// Even peers are reached from our first NIC at theirs, odd ones from the others at the others; of these none takes
    /// runs of pages, or as much at once.
    spans: bool,
}

const SMALL: Setup = Setup {
    nics: 2,
    peer_nics: 2,
    peers: 2,
    connecting: 0,
    slots: 2,
    queue_depth: 2,
    peer_depth: 2,
    reserve: 1,
    max_message: 2,
    pages_per_piece: 1,
    spans: false,
};

/// What is submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// Two bytes by the latency lane.
    Tiny,
    /// Six bytes, several pieces.
    Split,
    /// So many that the immediate trails.
    Long,
    /// Three shuffled pages.
    Pages,
    /// Five, one of them from where another comes from.
    Many,
    /// Two bytes to each peer there is.
    Scatter,
    Barrier,
    Imm,
    /// No pages.
    Empty,
}

const KINDS: [Kind; 9] = [
    Kind::Tiny,
    Kind::Split,
    Kind::Long,
    Kind::Pages,
    Kind::Many,
    Kind::Scatter,
    Kind::Barrier,
    Kind::Imm,
    Kind::Empty,
];

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Do {
    Submit(Kind, u16),
    /// With a deadline that the next tick reaches.
    SubmitDue(Kind, u16),
    /// Submitted and posted in one, if nothing stands in the way.
    Express(Kind, u16),
    Post(u8),
    /// The n-th piece in flight completes.
    Complete(usize),
    Fail(usize),
    /// The n-th transfer.
    Cancel(usize),
    /// Time moves to the next timeout.
    Tick,
    Connect(u16),
    Lose(u16),
    Remove(u16),
    /// A peer that is gone connects to us again.
    Rejoin(u16),
    NicDown(u8),
    NicUp(u8),
    /// The path from our NIC to this peer's NIC breaks: nobody knows what became of what is in flight on it.
    Break(u16, u8, u8),
    /// It can be used again, if nothing is unsettled there.
    Restore(u16, u8, u8),
    /// The n-th piece on a broken path arrives after all.
    Land(usize),
    /// The peer deals with the n-th ask that reached it: fences, and answers.
    Answer(usize),
    /// The same, but it cannot know.
    Unfenced(usize),
    /// The peer asks about a path from its NIC to ours, once more or again.
    Asked(u16, u8, u8),
    AskedAgain(u16, u8),
    /// The peer is to hear of us.
    Beat(u16),
}

/// Peer, source address, destination address, length of each write; units to come, for each peer.
type Outcome = (Vec<(PeerId, u64, u64, u64)>, Vec<(PeerId, u32)>);

/// A transfer as the oracle knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Sent {
    id: TransferId,
    kind: Kind,
    deadline: Time,
    /// Peer, source address, destination address, length of each write.
    writes: Vec<(PeerId, u64, u64, u64)>,
    /// How often each byte of each write arrived.
    painted: Vec<Vec<u8>>,
    /// Units to come, for each peer.
    units: Vec<(PeerId, u32)>,
    started: bool,
    /// Nothing more of it may be posted.
    stopped: bool,
    failed: bool,
}

impl Sent {
    fn new(id: TransferId, kind: Kind, deadline: Time, (writes, units): Outcome) -> Self {
        let painted = writes.iter().map(|write| vec![0; index(write.3)]).collect();
        let (started, stopped, failed) = (false, false, false);
        Self { id, kind, deadline, painted, writes, units, started, stopped, failed }
    }

    fn all_painted(&self) -> bool {
        self.painted.iter().flatten().all(|&times| times == 1)
    }

    fn complete(&self) -> bool {
        self.all_painted() && self.units.iter().all(|&(_, units)| units == 0) && !self.failed
    }

    fn goes_to(&self, peer: PeerId) -> bool {
        self.units.iter().any(|&(other, _)| other == peer)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    setup: Setup,
    group: Group,
    now: Time,
    peers: Vec<Option<PeerId>>,
    nics_up: Vec<bool>,
    sent: Vec<Sent>,
    posted: Vec<WorkRequest>,
    /// So many of the next aborts have no effect.
    deaf: u8,
    /// At some time no NIC was up.
    dark: bool,
    broken: Vec<Way>,
    /// What was in flight on a path that broke, and whether it has arrived.
    limbo: Vec<(WorkRequest, bool)>,
    /// Asks that reached the peer.
    asks: Vec<(Way, Epoch)>,
    /// What the peer fenced last, for each NIC of ours, and whether it is still broken.
    fenced: Vec<(Way, Epoch, bool)>,
    theirs: Vec<Theirs>,
}

impl Setup {
    fn takes(&self, nic: u8) -> PieceLimits {
        match self.spans && side_of(nic) == span::Side::Far {
            true => PieceLimits {
                max_message_bytes: NonZeroU64::new(self.max_message.div_ceil(2)).unwrap(),
                pages_per_piece: NonZeroU16::MIN,
            },
            false => PieceLimits::ANY,
        }
    }
}

/// Where a peer is reached, if not all are reached alike.
fn side(peer: u16) -> span::Side {
    if peer.is_multiple_of(2) { span::Side::Near } else { span::Side::Far }
}

/// A path: peer, our NIC, its NIC.
type Way = (PeerId, u8, u8);

/// What a peer asks of us, about one NIC of its.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Theirs {
    peer: PeerId,
    from: u8,
    to: u8,
    epoch: Epoch,
    /// What we have fenced, laid out, and what has arrived of it.
    laid: Option<Epoch>,
    heard: Option<Epoch>,
}

const GOOD_NIC: NicState = NicState { speed: 100, healthy: true };

fn config(setup: Setup) -> GroupConfig {
    GroupConfig {
        limits: PlanLimits {
            max_message_bytes: NonZeroU64::new(setup.max_message).unwrap(),
            pages_per_piece: NonZeroU16::new(setup.pages_per_piece).unwrap(),
            rule: SplitRule {
                min_piece_bytes: NonZeroU64::new(2).unwrap(),
                granule_bytes: NonZeroU64::MIN,
            },
        },
        unreached: if setup.spans { span::unreached() } else { [0; MAX_NICS] },
        peer_depth: setup.peer_depth,
        latency_bytes: 2,
        latency_reserve: setup.reserve,
        turn_bytes: 2 * MIN_TURN_COST_BYTES,
        drain: DRAIN,
        liveness: NEVER,
    }
}

fn engine(peer: u16) -> EngineId {
    EngineId(u64::from(peer) + 1)
}

impl World {
    fn new(setup: Setup) -> Self {
        Self::with(setup, config(setup))
    }

    fn with(setup: Setup, config: GroupConfig) -> Self {
        let queue_depth = setup.queue_depth;
        let nic = |nic| NicConfig { state: GOOD_NIC, queue_depth, takes: setup.takes(nic) };
        let nics: Vec<NicConfig> = (0..setup.nics).map(nic).collect();
        let slots = vec![Slot::new(); setup.slots];
        let peers = vec![PeerSlot::new(); usize::from(setup.peers)];
        let lost = vec![LostSlot::new(); usize::from(setup.nics) * usize::from(setup.queue_depth)];
        let mut world = Self {
            setup,
            group: Group::with_failover(config, &nics, slots, peers, lost).unwrap(),
            now: Time::ZERO,
            peers: vec![None; usize::from(setup.peers)],
            nics_up: vec![true; usize::from(setup.nics)],
            sent: Vec::new(),
            posted: Vec::new(),
            deaf: 0,
            dark: false,
            broken: Vec::new(),
            limbo: Vec::new(),
            asks: Vec::new(),
            fenced: Vec::new(),
            theirs: Vec::new(),
        };
        for peer in 0..setup.peers {
            if peer < setup.connecting {
                let nics = world.nics(peer);
                let id = world.group.add_peer(Time::ZERO, engine(peer), &nics);
                world.peers[usize::from(peer)] = Some(id.unwrap());
            } else {
                world.rejoin(peer);
            }
        }
        world.events();
        world.check();
        world
    }

    fn nics(&self, peer: u16) -> Vec<NicState> {
        let leads = |nic: u8| !self.setup.spans || side_of(nic) == side(peer);
        let state =
            |nic| NicState { speed: if leads(nic) { GOOD_NIC.speed } else { 0 }, ..GOOD_NIC };
        (0..self.setup.peer_nics).map(state).collect()
    }

    /// Whether a NIC of ours that is up leads to the peer.
    fn is_lit(&self, peer: u16) -> bool {
        let leads = |nic: u8| !self.setup.spans || side_of(nic) == side(peer);
        let there = (0..self.setup.peer_nics).any(leads);
        there && (0..).zip(&self.nics_up).any(|(nic, up)| *up && leads(nic))
    }

    fn is_dark(&self) -> bool {
        let peers = || 0..self.setup.peers;
        // Where all are reached alike, whoever is there.
        peers().any(|peer| !self.is_lit(peer) && (!self.setup.spans || self.live(peer).is_some()))
    }

    fn number(&self, peer: PeerId) -> u16 {
        let at = self.peers.iter().position(|known| *known == Some(peer));
        index_of(at.expect("a peer that is there"))
    }

    fn rejoin(&mut self, peer: u16) -> bool {
        let nics = self.nics(peer);
        let answer = answer(peer, &nics);
        let id = self.group.accept_peer(self.now, engine(peer), &answer);
        // Full while the old tenant still has something in flight.
        self.peers[usize::from(peer)] = id.ok();
        id.iter().for_each(|id| self.group.set_receipts(*id, receipts()));
        id.is_ok()
    }

    fn live(&self, peer: u16) -> Option<PeerId> {
        self.peers.get(usize::from(peer)).copied().flatten()
    }

    fn everybody(&self) -> Vec<(PeerId, EngineId)> {
        let live = |peer| Some((self.live(peer)?, engine(peer)));
        (0..self.setup.peers).filter_map(live).collect()
    }

    fn request(&self, kind: Kind, peer: u16) -> Option<Asked> {
        let id = self.live(peer)?;
        let dst = region(engine(peer), DST);
        let target = |(peer, owner): (PeerId, EngineId)| Target {
            peer,
            dst: region(owner, DST),
            src_offset: 8 * u64::from(owner.0 == 2),
            dst_offset: 1,
            len: 2,
        };
        let single = |len| {
            Request::Single(SingleWrite {
                peer: id,
                src: source(),
                src_offset: 3,
                dst,
                dst_offset: 5,
                len,
                imm: Some(tag()),
            })
        };
        let pages =
            |indices: &[u64]| Pages { indices: Numbers(indices.to_vec()), stride: 2, offset: 0 };
        let paged = |from: &[u64], to: &[u64]| {
            Request::Paged(PagedWrite {
                peer: id,
                page_bytes: 2,
                src: source(),
                src_pages: pages(from),
                dst,
                dst_pages: pages(to),
                imm: Some(tag()),
            })
        };
        let everybody = self.everybody().into_iter();
        Some(match kind {
            Kind::Tiny => single(2),
            Kind::Split => single(6),
            Kind::Long => single(17 * self.setup.max_message + 1),
            Kind::Pages => paged(&[2, 0, 1], &[0, 3, 7]),
            Kind::Many => paged(&[2, 0, 1, 1, 5], &[0, 3, 7, 4, 8]),
            Kind::Empty => paged(&[], &[]),
            Kind::Scatter => Request::Scatter(ScatterWrite {
                src: source(),
                targets: Targets::Writes(everybody.map(target).collect()),
                imm: Some(tag()),
            }),
            Kind::Barrier => Request::Barrier(Barrier {
                targets: Targets::Peers(everybody.map(|(peer, _)| peer).collect()),
                imm: tag(),
            }),
            Kind::Imm => immediate(id),
        })
    }

    /// Does one step, if it makes sense now; then everything is checked.
    fn apply(&mut self, step: Do) -> bool {
        let done = self.step(step);
        if done {
            self.events();
            self.check();
        }
        done
    }

    fn step(&mut self, step: Do) -> bool {
        match step {
            Do::Submit(kind, peer) => self.submit(kind, peer, Time::NEVER),
            Do::SubmitDue(kind, peer) => self.submit(kind, peer, DUE),
            Do::Express(kind, peer) => self.express(kind, peer),
            Do::Post(nic) => self.post(nic),
            Do::Complete(n) => n < self.posted.len() && self.complete(n, Ok(())),
            Do::Fail(n) => n < self.posted.len() && self.complete(n, Err(WorkError::RemoteAccess)),
            Do::Cancel(n) => {
                let Some(sent) = self.sent.get_mut(n).filter(|sent| !sent.stopped) else {
                    return false;
                };
                sent.stopped = true;
                assert!(self.group.cancel(self.now, sent.id));
                true
            }
            Do::Tick => {
                let next = self.group.poll_timeout();
                if next == Time::NEVER {
                    return false;
                }
                self.now = self.now.max(next);
                for sent in &mut self.sent {
                    sent.stopped |= sent.deadline <= self.now;
                }
                self.group.handle_timeout(self.now);
                true
            }
            Do::Connect(peer) => self.connect(peer),
            Do::Lose(peer) | Do::Remove(peer) => {
                let Some(id) = self.live(peer) else {
                    return false;
                };
                self.gone(id);
                if matches!(step, Do::Lose(_)) {
                    let reason = DownReason::Disconnected;
                    self.group.handle_disconnected(self.now, id, reason);
                    self.fail_limbo(id, WorkError::PeerGone);
                } else {
                    self.group.remove_peer(self.now, id, DownReason::Removed);
                }
                true
            }
            Do::Rejoin(peer) => {
                usize::from(peer) < self.peers.len()
                    && self.live(peer).is_none()
                    && self.rejoin(peer)
            }
            Do::NicDown(nic) => self.set_nic(nic, false),
            Do::NicUp(nic) => self.set_nic(nic, true),
            Do::Break(peer, nic, remote) => self.break_path(peer, nic, remote),
            Do::Restore(peer, nic, remote) => self.restore_path(peer, nic, remote),
            Do::Land(n) => self.land(n),
            Do::Answer(n) => self.answer(n, true),
            Do::Unfenced(n) => self.answer(n, false),
            Do::Asked(peer, from, to) => self.asked(peer, from, to),
            Do::AskedAgain(peer, from) => self.asked_again(peer, from),
            Do::Beat(peer) => {
                let before = self.group.clone();
                self.live(peer).is_some_and(|id| {
                    self.group.beat(id);
                    self.check_beat(peer, id);
                    self.group != before
                })
            }
        }
    }

    // ---- paths ----

    fn break_path(&mut self, peer: u16, nic: u8, remote: u8) -> bool {
        let Some(id) = self.live(peer) else {
            return false;
        };
        let way = (id, nic, remote);
        let leads = |it: u8| !self.setup.spans || side_of(it) == side(peer);
        let known = nic < self.setup.nics && remote < self.setup.peer_nics;
        let known = known && leads(nic) && leads(remote);
        let connecting = self.group.peer_state(id) == Some(PeerState::Connecting);
        if !known || connecting || self.broken.contains(&way) {
            return false;
        }
        self.broken.push(way);
        self.broken.sort_unstable();
        let lost = self.posted.extract_if(.., |work| way_of(work) == way);
        self.limbo.extend(lost.map(|work| (work, false)));
        self.group.handle_path_broken(self.now, id, nic, remote);
        true
    }

    fn restore_path(&mut self, peer: u16, nic: u8, remote: u8) -> bool {
        let Some(id) = self.live(peer) else {
            return false;
        };
        let way = (id, nic, remote);
        let settled = !self.limbo.iter().any(|(work, _)| way_of(work) == way);
        let entry = self.group.peer_entry(id).unwrap();
        let asked = entry.paths.is_unsettled(nic, remote);
        if !settled || asked || !self.broken.contains(&way) {
            return false;
        }
        self.broken.retain(|broken| *broken != way);
        // What was fenced then says nothing of what is posted now.
        self.fenced.iter_mut().filter(|it| it.0 == way).for_each(|fence| fence.2 = false);
        self.group.handle_path_restored(self.now, id, nic, remote);
        true
    }

    /// Whether the peer lets nothing of this path land any more.
    fn is_fenced(&self, way: Way) -> bool {
        self.fenced.iter().any(|(fenced, _, valid)| *fenced == way && *valid)
    }

    fn land(&mut self, n: usize) -> bool {
        let Some((work, false)) = self.limbo.get(n).copied() else {
            return false;
        };
        if self.is_fenced(way_of(&work)) {
            return false;
        }
        self.limbo[n].1 = true;
        self.arrived(&work);
        true
    }

    /// The peer's side of a piece that lands, in whatever way.
    fn arrived(&mut self, work: &WorkRequest) {
        match work.token.note() {
            None => {
                let ranges = ranges(&self.group, work);
                arrive(find(&mut self.sent, work.token), work, &ranges);
            }
            Some(_) => match Control::decode(work.imm.unwrap().bits()) {
                Some(Ok(Control::Ask { from, to, epoch })) => {
                    self.asks.push(((work.peer, from, to), epoch));
                }
                Some(Ok(Control::Answer(from))) => {
                    assert_eq!((work.len, work.src), (64, RECEIPTS + 0x40 + 64 * u64::from(from)));
                    assert_eq!(work.dst, CONTROL + 0x40 + 64 * u64::from(from));
                    let theirs = self.theirs_of(work.peer, from).unwrap();
                    theirs.heard = theirs.laid;
                }
                Some(Ok(Control::Heartbeat(_))) => {
                    assert_eq!((work.len, work.dst), (0, CONTROL))
                }
                other => panic!("{other:?}"),
            },
        }
    }

    fn answer(&mut self, n: usize, knows: bool) -> bool {
        if n >= self.asks.len() {
            return false;
        }
        let (way, epoch) = self.asks.remove(n);
        let (peer, nic, _) = way;
        if !self.peers.contains(&Some(peer)) {
            return true;
        }
        if !knows {
            self.gone(peer);
            self.group.handle_unsettled(self.now, peer, nic);
            return true;
        }
        let last = self.fenced.iter().position(|((p, n, _), ..)| (*p, *n) == (peer, nic));
        match last.map(|last| self.fenced[last]) {
            Some((_, known, _)) if !epoch.is_after(known) => {
                if epoch != known {
                    return true;
                }
            }
            _ => {
                last.map(|last| self.fenced.remove(last));
                self.fenced.push((way, epoch, true));
            }
        }
        self.group.handle_answer(peer, nic);
        true
    }

    fn settle(&mut self, way: Way, epoch: Epoch) {
        let (peer, nic, remote) = way;
        let Some(fence) = self.fenced.iter().find(|it| (it.0, it.1) == (way, epoch)) else {
            return; // The answer to an earlier ask.
        };
        assert!(fence.2, "settled on the word of an earlier fence");
        let settled = self.limbo.extract_if(.., |(work, _)| way_of(work) == way);
        for (work, arrived) in settled.collect::<Vec<_>>() {
            if arrived {
                let (now, token) = (self.now, work.token);
                assert!(self.group.handle_completion(now, work.nic, token, Ok(())));
            } else {
                assert!(self.group.handle_undelivered(self.now, &work));
            }
        }
        self.group.handle_settled(self.now, peer, nic, remote);
    }

    fn theirs_of(&mut self, peer: PeerId, from: u8) -> Option<&mut Theirs> {
        self.theirs.iter_mut().find(|theirs| (theirs.peer, theirs.from) == (peer, from))
    }

    fn asked(&mut self, peer: u16, from: u8, to: u8) -> bool {
        let leads = |it: u8| !self.setup.spans || side_of(it) == side(peer);
        let known = from < self.setup.peer_nics && to < self.setup.nics;
        let known = known && leads(from) && leads(to);
        let Some(id) = self.live(peer).filter(|_| known) else {
            return false;
        };
        if self.group.peer_state(id) == Some(PeerState::Connecting) {
            return false;
        }
        if self.theirs_of(id, from).is_none() {
            let epoch = Epoch::new(2047).unwrap();
            self.theirs.push(Theirs { peer: id, from, to, epoch, laid: None, heard: None });
        }
        let theirs = self.theirs_of(id, from).unwrap();
        (theirs.epoch, theirs.to) = (theirs.epoch.next(), to);
        let epoch = theirs.epoch;
        self.group.handle_ask(id, from, to, epoch).unwrap();
        true
    }

    fn asked_again(&mut self, peer: u16, from: u8) -> bool {
        let Some(id) = self.live(peer) else {
            return false;
        };
        let Some(theirs) = self.theirs_of(id, from) else {
            return false;
        };
        let (to, epoch) = (theirs.to, theirs.epoch);
        self.group.handle_ask(id, from, to, epoch).unwrap();
        true
    }

    fn fence(&mut self, peer: PeerId, from: u8, to: u8, epoch: Epoch) {
        let theirs = self.theirs_of(peer, from).unwrap();
        assert!(theirs.laid.is_none_or(|laid| epoch.is_after(laid)), "fenced twice");
        assert!(epoch != theirs.epoch || to == theirs.to);
        theirs.laid = Some(epoch);
        self.group.handle_fenced(peer, from);
    }

    /// The NICs of ours that are up and reach the peer.
    fn leading(&self, peer: u16, id: PeerId) -> Vec<u8> {
        let leads = |it: u8| !self.setup.spans || side_of(it) == side(peer);
        let whole = |nic: u8| {
            let mut remotes = (0..self.setup.peer_nics).filter(|remote| leads(*remote));
            remotes.any(|remote| !self.broken.contains(&(id, nic, remote)))
        };
        let up = |nic: &u8| self.nics_up[usize::from(*nic)] && leads(*nic) && whole(*nic);
        (0..self.setup.nics).filter(up).collect()
    }

    /// How many heartbeats to the peer are under way on each of these NICs of ours.
    fn beats_on(&self, id: PeerId, nics: &[u8]) -> Vec<usize> {
        let limbo = self.limbo.iter().map(|(work, _)| work);
        let beats = self.posted.iter().chain(limbo);
        let beats = beats.filter(|it| it.peer == id && it.token.note() == Some(Note::Beat));
        let on = |nic: &u8| beats.clone().filter(|work| work.nic == *nic).count();
        nics.iter().map(on).collect()
    }

    /// The peer is to hear of us: by each NIC that no heartbeat to it is under way on, if one is by another, which may be stuck.
    fn check_beat(&self, peer: u16, id: PeerId) {
        let up = matches!(self.group.peer_state(id), Some(PeerState::Up | PeerState::Suspect));
        let leading = self.leading(peer, id);
        if !up || leading.is_empty() {
            return;
        }
        let (mut group, mut goes) = (self.group.clone(), Vec::new());
        for nic in 0..self.setup.nics {
            while let Some(work) = group.poll_work(nic) {
                let is_beat = work.peer == id && work.token.note() == Some(Note::Beat);
                goes.extend(is_beat.then_some(nic));
            }
        }
        let all: Vec<u8> = (0..self.setup.nics).collect();
        let under_way: usize = self.beats_on(id, &all).iter().sum();
        let free = self.beats_on(id, &leading).iter().filter(|count| **count == 0).count();
        let expected = match (under_way, free) {
            (0, _) => 1,
            (_, 0) => usize::from(under_way < MAX_BEATS as usize),
            (_, free) => free,
        };
        assert_eq!(goes.len(), expected, "{goes:?} of {leading:?}, {under_way} are under way");
    }

    /// A heartbeat is posted: where none is under way, or on the only NIC that there is.
    fn check_way(&self, work: &WorkRequest) {
        let leading = self.leading(self.number(work.peer), work.peer);
        let there = self.beats_on(work.peer, &[work.nic])[0];
        let alone = leading == [work.nic];
        assert!(there == 0 || alone && there < MAX_BEATS as usize, "{there} are stuck there");
    }

    fn submit(&mut self, kind: Kind, peer: u16, deadline: Time) -> bool {
        let Some(request) = self.request(kind, peer) else {
            return false;
        };
        let (writes, units) = outcome(&request);
        let checked = request.check().unwrap();
        let options = Options { deadline, user: kind as u64 };
        let full = self.sent.len() == self.setup.slots;
        let mut general = self.group.clone();
        let taken = general.submit_any(checked.clone(), options);
        let submitted = self.group.submit(checked.clone(), options);
        assert_eq!(submitted, taken);
        assert!(self.group == general, "the short way leads elsewhere");
        let to = |id: PeerId| units.iter().any(|(peer, _)| *peer == id);
        let unlit = |peer: u16| self.live(peer).is_some_and(to) && !self.is_lit(peer);
        let unlit = (0..self.setup.peers).any(unlit);
        match submitted {
            Ok(id) => {
                assert!(!full);
                assert!(!unlit || kind == Kind::Empty, "taken, though no NIC leads there");
                self.dark |= self.is_dark();
                self.sent.push(Sent::new(id, kind, deadline, (writes, units)));
                true
            }
            Err(rejected) => {
                match rejected.error {
                    SubmitError::Full { capacity } => {
                        assert!(full && capacity == self.setup.slots);
                        assert_eq!(rejected.request, Some(checked));
                    }
                    SubmitError::Plan(PlanError::NoRoute { .. }) => assert!(unlit),
                    error => panic!("{error}"),
                }
                false
            }
        }
    }

    fn express(&mut self, kind: Kind, peer: u16) -> bool {
        let Some(Request::Single(write)) = self.request(kind, peer) else {
            return false;
        };
        let before = self.group.clone();
        let options = Options { deadline: Time::NEVER, user: kind as u64 };
        let unhindered = self.group.unhindered(&write.by_ref());
        assert_eq!(self.group, before, "looked at, and yet something changed");
        let Some(work) = self.group.express(&write.by_ref(), options) else {
            assert_eq!(self.group, before, "refused, and yet something changed");
            assert!(unhindered.is_none() || self.sent.len() == self.setup.slots);
            return false;
        };
        let (nic, piece) = unhindered.expect("it can be expressed, so nothing stands before it");
        assert_eq!(work_of(work.token.transfer(), nic, &piece), work);
        let (mut written, mut expressed) = (before.clone(), self.group.clone());
        written.wrote(self.now, nic, &piece);
        assert!(expressed.handle_completion(self.now, nic, work.token, Ok(())));
        while expressed.poll_event().is_some() {}
        while written.poll_event().is_some() {}
        let what_it_leaves = |group: &Group| {
            let entry = group.peers[usize::from(peer)].entry.as_ref();
            let credits = group.nics.iter().map(|nic| nic.credits).collect::<Vec<_>>();
            (
                group.turn,
                group.active,
                credits,
                entry.map(|it| (it.sent, it.last_progress, it.over)),
            )
        };
        assert_eq!(what_it_leaves(&written), what_it_leaves(&expressed));
        // It passes bulk, as a small write may; nobody else who could go, and no bulk that is due.
        let mut polled = before;
        let due = !polled.nics[usize::from(work.nic)].credits.prefers(Lane::Latency);
        if let Some(passed) = polled.poll_work(work.nic) {
            let passed = &mut polled.transfers[usize::from(passed.token.transfer().index)];
            assert!(passed.active().unwrap().lane == Lane::Bulk && !due);
        }
        let request = Request::Single(write);
        let id = work.token.transfer();
        self.sent.push(Sent::new(id, kind, Time::NEVER, outcome(&request)));
        assert!(self.sent.len() <= self.setup.slots);
        self.note_posted(work);
        true
    }

    /// A batch is what as many pieces one by one are, and leaves the group as they do.
    fn check_batch(&self, nic: u8, pieces: usize, bytes: u64) {
        let (mut single, mut batch) = (self.group.clone(), self.group.clone());
        let (mut one_by_one, mut sum, mut together) = (vec![], 0, vec![]);
        while one_by_one.len() < pieces && sum < bytes {
            let Some(work) = single.poll_work(nic) else { break };
            sum += work.len;
            one_by_one.push(work);
        }
        batch.poll_batch(nic, pieces, bytes, |work| together.push(work));
        assert_eq!(together, one_by_one);
        assert!(batch == single, "the groups differ after {together:?}");
    }

    fn post(&mut self, nic: u8) -> bool {
        let limits = [(usize::MAX, u64::MAX), (2, u64::MAX), (usize::MAX, 1)];
        let (pieces, bytes) = limits[self.sent.len() % limits.len()];
        self.check_batch(nic, pieces, bytes);
        let before = self.places();
        let Some(work) = self.group.poll_work(nic) else {
            // A transfer that was only put aside is a step too: who is handed its credit later depends on it.
            return self.places() != before;
        };
        assert_eq!(work.nic, nic);
        self.note_posted(work);
        true
    }

    /// Where each transfer stands.
    fn places(&self) -> Vec<Option<[Place; MAX_NICS]>> {
        let slots = self.group.transfers.iter();
        slots.map(|slot| slot.active_ref().map(|active| active.place)).collect()
    }

    fn note_posted(&mut self, work: WorkRequest) {
        let nic = work.nic;
        assert!(self.nics_up[usize::from(nic)], "posted on a lost NIC");
        assert!(work.remote_nic < self.setup.peer_nics);
        assert!(!self.broken.contains(&way_of(&work)), "posted on a broken path");
        let side = side(self.number(work.peer));
        let leads = |nic| !self.setup.spans || side_of(nic) == side;
        assert!(leads(work.nic) && leads(work.remote_nic), "posted where no path leads");
        let up =
            matches!(self.group.peer_state(work.peer), Some(PeerState::Up | PeerState::Suspect));
        assert!(up && self.peers.contains(&Some(work.peer)), "posted to a peer that is not up");
        assert_eq!(work.dst_key, DST_KEY + u64::from(work.remote_nic));
        if work.len > 0 {
            assert_eq!(work.src_key, SRC_KEY + u64::from(nic));
        }
        if work.token.note() == Some(Note::Beat) {
            self.check_way(&work);
        }
        if work.token.note().is_some() {
            return self.posted.push(work);
        }
        let sent = find(&mut self.sent, work.token);
        assert!(!sent.stopped, "posted after stop");
        sent.started = true;
        let takes = self.setup.takes(nic);
        let most = u32::from(takes.pages_per_piece.get().min(self.setup.pages_per_piece));
        assert!(work.run.count <= most && (work.run.count == 0 || most > 1));
        if work.len > 0 {
            assert!(work.len <= self.setup.max_message.min(takes.max_message_bytes.get()));
        } else if !sent.writes.is_empty() {
            assert!(sent.all_painted(), "announced before all was written");
        }
        self.posted.push(work);
    }

    fn complete(&mut self, n: usize, outcome: Result<(), WorkError>) -> bool {
        let work = self.posted.remove(n);
        self.report(work, false, outcome)
    }

    /// The provider reports a piece, which may have `arrived` before.
    fn report(&mut self, work: WorkRequest, arrived: bool, outcome: Result<(), WorkError>) -> bool {
        if outcome.is_err() && work.token.note().is_some() {
            self.gone(work.peer);
        } else if outcome.is_err() {
            let sent = find(&mut self.sent, work.token);
            (sent.stopped, sent.failed) = (true, true);
        } else if !arrived {
            self.arrived(&work);
        }
        let (now, nic, token) = (self.now, work.nic, work.token);
        assert!(self.group.handle_completion(now, nic, token, outcome));
        true
    }

    fn fail_all(&mut self, peer: PeerId, error: WorkError) {
        while let Some(n) = self.posted.iter().position(|work| work.peer == peer) {
            self.complete(n, Err(error));
        }
        self.fail_limbo(peer, error);
    }

    /// The provider keeps these, and so it ends them with the connection.
    fn fail_limbo(&mut self, peer: PeerId, error: WorkError) {
        while let Some(n) = self.limbo.iter().position(|(work, _)| work.peer == peer) {
            let (work, arrived) = self.limbo.remove(n);
            self.report(work, arrived, Err(error));
        }
    }

    fn connect(&mut self, peer: u16) -> bool {
        let Some(id) = self.live(peer) else {
            return false;
        };
        if self.group.peer_state(id) != Some(PeerState::Connecting) {
            return false;
        }
        let nics = self.nics(peer);
        self.group.handle_connected(self.now, id, &answer(peer, &nics));
        self.group.set_receipts(id, receipts());
        true
    }

    fn gone(&mut self, peer: PeerId) {
        for known in &mut self.peers {
            known.take_if(|known| *known == peer);
        }
        let affected = self.sent.iter_mut().filter(|sent| sent.goes_to(peer));
        affected.for_each(|sent| sent.stopped = true);
        // Nothing of these is of anybody any more.
        self.broken.retain(|(broken, ..)| *broken != peer);
        self.fenced.retain(|((fenced, ..), ..)| *fenced != peer);
        self.asks.retain(|((asked, ..), _)| *asked != peer);
    }

    fn set_nic(&mut self, nic: u8, up: bool) -> bool {
        match self.nics_up.get_mut(usize::from(nic)) {
            Some(known) if *known != up => *known = up,
            _ => return false,
        }
        self.dark |= self.is_dark();
        self.group.set_nic_health(self.now, nic, up);
        true
    }

    fn events(&mut self) {
        while let Some(event) = self.group.poll_event() {
            match event {
                Event::Ended { id, user, end } => {
                    let at = self.sent.iter().position(|sent| sent.id == id);
                    let sent = self.sent.remove(at.expect("ended twice, or never submitted"));
                    assert_eq!(user, sent.kind as u64);
                    let in_flight = |work: &WorkRequest| work.token.transfer() == id;
                    assert!(!self.posted.iter().any(in_flight), "ended in flight");
                    let in_limbo = self.limbo.iter().any(|(work, _)| in_flight(work));
                    assert!(!in_limbo, "ended, and may yet be written");
                    let run = PageRun { first: 0, count: 1 };
                    let token = Token::new(id, PeerId { index: 0, generation: 0 });
                    let read = |group: &Group, work| group.page_run(&work, &mut [0], &mut [0]);
                    let ended = WorkRequest { token, run, ..NOTHING };
                    assert_eq!(read(&self.group, ended), None, "read after the end");
                    match end {
                        End::Done => assert!(sent.complete(), "{sent:?}"),
                        End::NeverStarted { .. } => assert!(!sent.started),
                        End::Quiesced { .. } => assert!(sent.started),
                    }
                }
                Event::Abort { .. } if self.deaf > 0 => self.deaf -= 1,
                Event::Abort { peer } => self.fail_all(peer, WorkError::Flushed),
                Event::Disconnect { peer } => self.fail_all(peer, WorkError::PeerGone),
                Event::Peer { peer, state } => {
                    if matches!(state, PeerState::Down(_)) {
                        self.gone(peer);
                    }
                }
                Event::Heartbeat { .. } => {}
                Event::Fence { peer, from, to, epoch } => self.fence(peer, from, to, epoch),
                Event::Settle { peer, nic, remote_nic, epoch } => {
                    self.settle((peer, nic, remote_nic), epoch);
                }
            }
        }
    }

    /// The invariants of the module, on its inside, against what the provider has in flight.
    fn check(&mut self) {
        assert_eq!(self.group.active(), self.sent.len());
        let (depth, peer_depth) = (self.setup.queue_depth, self.setup.peer_depth);
        let quota = |depth: u16| depth - self.setup.reserve;
        let group = &mut self.group;
        let lanes = group.transfers.iter_mut().map(|slot| slot.active().map(|active| active.lane));
        let lanes: Vec<Option<Lane>> = lanes.collect();
        let bulk = |index: u16| lanes[usize::from(index)] == Some(Lane::Bulk);
        let lost = group.lost.iter().take_while(|slot| slot.0.is_some());
        let lost: Vec<WorkRequest> = lost.filter_map(|slot| slot.0).collect();
        let limbo = self.limbo.iter().map(|(work, _)| work);
        let (notes, flying): (Vec<&WorkRequest>, Vec<&WorkRequest>) =
            self.posted.iter().chain(limbo).partition(|work| work.token.note().is_some());
        assert!(lost.len() + flying.len() <= group.lost.len(), "no room for what may be lost");
        for work in lost.iter().chain(flying.iter().copied()).filter(|work| work.run.count > 0) {
            assert_eq!(ranges(group, work).len(), work.run.count as usize);
        }
        assert_eq!(lost.len(), group.lost_count);
        let mut aside = lost.len();
        for (index, slot) in group.peers.iter().enumerate() {
            let Some(entry) = &slot.entry else {
                continue;
            };
            let to_it = lost.iter().filter(|work| usize::from(work.peer.index) == index);
            assert_eq!(usize::from(entry.paths.lost), to_it.count());
            assert!(group.next_timeout <= entry.paths.next_timeout() || entry.is_down());
            let goes = entry.is_usable() && entry.routes.is_some();
            let has_note = entry.paths.has_note(entry.leading(group.nics_usable()));
            assert_eq!(entry.paths.ready, goes && has_note);
            let peer = PeerId { index: index_of(index), generation: slot.generation };
            let usable = group.nics_usable();
            let polls = |nic| entry.clone().next_note(peer, nic, usable).is_some();
            let mut up = (0..self.setup.nics).filter(|nic| self.nics_up[usize::from(*nic)]);
            assert!(!entry.paths.ready || up.any(polls), "looked for without end");
            aside += usize::from(entry.paths.ready);
        }
        assert_eq!(group.aside, aside);
        for nic in 0..usize::from(self.setup.nics) {
            let here = flying.iter().filter(|work| usize::from(work.nic) == nic);
            let here: Vec<&WorkRequest> = here.copied().collect();
            let noted = |index: u16| {
                let to_it =
                    |work: &&&WorkRequest| work.peer.index == index && usize::from(work.nic) == nic;
                index_of(notes.iter().filter(to_it).count())
            };
            let count = |f: &dyn Fn(&WorkRequest) -> bool| {
                u16::try_from(here.iter().filter(|work| f(work)).count()).unwrap()
            };
            let credits = group.nics[nic].credits;
            assert_eq!(credits.used, count(&|_| true));
            assert_eq!(credits.bulk, count(&|work| bulk(work.token.transfer().index)));
            assert!(credits.used <= depth && credits.bulk <= quota(depth));

            let mut queues = vec![(None, group.nics[nic].lanes)];
            for peer in 0..group.peers.len() {
                let Some(entry) = &group.peers[peer].entry else {
                    continue;
                };
                let index = index_of(peer);
                let over = entry.over[nic];
                queues.push((Some(index), over.waiting));
                let to_it = |work: &WorkRequest| work.peer.index == index;
                assert_eq!(over.in_flight, count(&to_it) + noted(index));
                let granted = group.transfers.iter().enumerate().filter(|(_, slot)| {
                    matches!(&slot.state, SlotState::Active(active)
                        if active.place[nic] == Place::Granted(index))
                });
                let granted: Vec<u16> = granted.map(|(index, _)| index_of(index)).collect();
                let granted_bulk = granted.iter().filter(|&&index| bulk(index)).count();
                let bulk_here = count(&|work| to_it(work) && bulk(work.token.transfer().index));
                assert_eq!(over.credits.used, count(&to_it) + index_of(granted.len()));
                assert_eq!(over.credits.bulk, bulk_here + index_of(granted_bulk));
                assert!(over.credits.used <= peer_depth);
                assert!(over.credits.bulk <= quota(peer_depth));
                for lane in [Lane::Latency, Lane::Bulk] {
                    let left = over.credits.left(lane, group.peer_depth());
                    let waits = over.waiting.first(lane).is_some();
                    assert!(!(waits && left && entry.is_handing_out()), "a lost wake-up");
                }
            }
            let mut queued = vec![None; group.transfers.len()];
            for (peer, mut queues) in queues {
                for lane in [Lane::Latency, Lane::Bulk] {
                    let slots = &mut group.transfers[..];
                    for index in queues.of(lane).contents(&NicLinks { slots, nic }) {
                        let index = usize::from(index);
                        assert_eq!(lanes[index], Some(lane));
                        assert_eq!(queued[index].replace(peer), None, "in two queues");
                    }
                }
            }
            for (index, queued) in queued.into_iter().enumerate() {
                let Some(active) = group.transfers[index].active() else {
                    assert_eq!(queued, None);
                    continue;
                };
                match active.place[nic] {
                    Place::Nowhere => assert_eq!(queued, None),
                    Place::Lane | Place::Granted(_) => assert_eq!(queued, Some(None)),
                    Place::Blocked(peer) => assert_eq!(queued, Some(Some(peer))),
                }
                let to_post = active.plan.nic_mask() & (1 << nic) != 0;
                if active.stop.is_some() {
                    assert_eq!(queued, None, "stopped, but in a queue");
                } else if to_post {
                    assert!(queued.is_some(), "forgotten");
                    assert!(self.nics_up[nic], "waits for a lost NIC");
                }
            }
        }
        for sent in &self.sent {
            let slot = &mut group.transfers[usize::from(sent.id.index)];
            let active = slot.active().expect("its end was not told");
            let known = lost.iter().chain(flying.iter().copied());
            let outstanding = known.filter(|work| work.token.transfer() == sent.id);
            let to: Vec<u16> = outstanding.map(|work| work.peer.index).collect();
            assert_eq!(active.outstanding.count() as usize, to.len());
            // Of a transfer to one, the plan says it.
            let several = active.plan.sole_peer().is_none();
            let alike = to.first().filter(|first| to.iter().all(|peer| peer == *first));
            assert_eq!(active.outstanding.sole_peer(), alike.copied().filter(|_| several));
            let no_nic = active.stop == Some(TransferError::NoNic);
            assert_eq!(active.stop.is_some(), sent.stopped || no_nic);
            assert!(!no_nic || self.dark, "a NIC was left");
            let idle = active.stop.is_some() || active.plan.nic_mask() == 0;
            assert!(active.outstanding.count() > 0 || !idle, "over, but not ended");
            let due = active.next_timeout();
            assert!(group.next_timeout <= due, "a deadline is not watched");
        }
    }

    /// Every connection comes up, every piece completes, every ask is answered: then every transfer ends.
    /// Nothing waits for a timeout, unless no path is left.
    fn finish(mut self) -> Self {
        for peer in 0..self.setup.peers {
            self.apply(Do::Connect(peer));
        }
        let (mut ticks, mut rounds) = (0, 0);
        loop {
            rounds += 1;
            assert!(rounds < 1_000, "no end: {:?}", self.sent);
            let mut moved = false;
            for nic in 0..self.setup.nics {
                while self.apply(Do::Post(nic)) {
                    moved = true;
                }
            }
            while self.apply(Do::Complete(0)) || self.apply(Do::Answer(0)) {
                moved = true;
            }
            if moved {
                continue;
            }
            if self.sent.is_empty() && self.posted.is_empty() && self.limbo.is_empty() {
                break;
            }
            let pathless =
                |slot: &PeerSlot| slot.entry.as_ref().is_some_and(|entry| entry.pathless);
            let cut_off = self.group.peers.iter().any(pathless) || self.is_dark();
            assert!(cut_off, "stuck: {:?}", self.sent);
            ticks += 1;
            assert!(ticks < 20 && self.apply(Do::Tick), "nothing will ever end it");
        }
        let reached = !self.is_dark();
        let there = |theirs: &&Theirs| self.peers.contains(&Some(theirs.peer));
        for theirs in self.theirs.iter().filter(there) {
            if !self.is_lit(self.number(theirs.peer)) {
                continue;
            }
            if !self.group.view().entry(theirs.peer).unwrap().pathless {
                assert_eq!(theirs.heard, Some(theirs.epoch), "an ask was not answered");
            }
        }
        assert_eq!(self.group.lost_count, 0);
        for nic in 0..self.setup.nics {
            assert!(!self.group.has_work(nic) || !reached);
        }
        self
    }
}

fn receipts() -> Receipts {
    Receipts { src: LocalMr { base: RECEIPTS, ..source() }, offset: 0x40 }
}

fn way_of(work: &WorkRequest) -> Way {
    (work.peer, work.nic, work.remote_nic)
}

fn answer(peer: u16, nics: &[NicState]) -> Answer<'_> {
    Answer { nics, control: region(engine(peer), CONTROL), heartbeat: Duration::MAX }
}

fn immediate(peer: PeerId) -> Asked {
    Request::Imm(ImmWrite { peer, imm: tag(), writes: 2 })
}

fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap()
}

fn find(sent: &mut [Sent], token: Token) -> &mut Sent {
    let id = token.transfer();
    sent.iter_mut().find(|sent| sent.id == id).expect("no such transfer")
}

/// What a request does, by its definition: writes, and units for each peer.
fn outcome(request: &Asked) -> Outcome {
    let units = |writes: usize| u32::try_from(writes).unwrap() * u32::from(WRITE_UNITS);
    match request {
        Request::Single(write) => (
            vec![(write.peer, SRC + write.src_offset, DST + write.dst_offset, write.len)],
            vec![(write.peer, units(1))],
        ),
        Request::Paged(write) => {
            let pages = write.src_pages.indices.0.iter().zip(&write.dst_pages.indices.0);
            let writes = pages.map(|(from, to)| {
                let (from, to) =
                    (SRC + write.src_pages.stride * from, DST + write.dst_pages.stride * to);
                (write.peer, from, to, write.page_bytes)
            });
            (writes.collect(), vec![(write.peer, units(write.src_pages.indices.0.len()))])
        }
        Request::Scatter(write) => {
            let targets = (0..write.targets.len()).map(|i| write.targets.get(i).unwrap());
            let one = |target: Target| {
                (target.peer, SRC + target.src_offset, DST + target.dst_offset, target.len)
            };
            (
                targets.clone().map(one).collect(),
                targets.map(|target| (target.peer, units(1))).collect(),
            )
        }
        Request::Barrier(barrier) => {
            let peers = (0..barrier.targets.len()).map(|i| barrier.targets.peer(i).unwrap());
            (Vec::new(), peers.map(|peer| (peer, units(1))).collect())
        }
        Request::Control(write) => (Vec::new(), vec![(write.peer, u32::from(write.imm.units()))]),
        Request::Imm(write) => (Vec::new(), vec![(write.peer, units(usize::from(write.writes)))]),
    }
}

/// Source, destination and length of what a piece moves: of a run, page by page, as a provider finds them.
fn ranges(group: &Group, work: &WorkRequest) -> Vec<(u64, u64, u64)> {
    let count = work.run.count as usize;
    let (mut src, mut dst) = (vec![7; count], vec![7; count]);
    let layout = group.page_run(work, &mut src, &mut dst);
    assert_eq!(layout.is_some(), count > 0);
    let Some(layout) = layout else {
        return vec![(work.src, work.dst, work.len)];
    };
    let page = |(from, to): (&u32, &u32)| {
        let src = layout.src_base + layout.src_stride * u64::from(*from);
        (src, layout.dst_base + layout.dst_stride * u64::from(*to), layout.page_bytes)
    };
    let ranges: Vec<_> = src.iter().zip(&dst).map(page).collect();
    assert_eq!(work.len, ranges.iter().map(|range| range.2).sum::<u64>());
    ranges
}

/// No piece at all.
const NOTHING: WorkRequest = WorkRequest {
    token: Token::from_bits(0),
    nic: 0,
    remote_nic: 0,
    peer: PeerId { index: 0, generation: 0 },
    src: 0,
    src_key: 0,
    dst: 0,
    dst_key: 0,
    len: 0,
    run: PageRun::NONE,
    imm: None,
};

fn arrive(sent: &mut Sent, work: &WorkRequest, ranges: &[(u64, u64, u64)]) {
    if let Some(imm) = work.imm {
        assert_eq!(imm.tag(), tag());
        let units = sent.units.iter_mut().find(|(peer, _)| *peer == work.peer).unwrap();
        units.1 = units.1.checked_sub(u32::from(imm.units())).expect("announced too much");
    }
    // Pages may have merged: byte by byte.
    let bytes =
        ranges.iter().flat_map(|&(src, dst, len)| (0..len).map(move |at| (src + at, dst + at)));
    for (src, dst) in bytes {
        let write = sent.writes.iter().position(|&(peer, from, to, len)| {
            peer == work.peer && (to..to + len).contains(&dst) && src.wrapping_sub(from) == dst - to
        });
        let write = write.expect("wrote where it should not");
        let times = &mut sent.painted[write][index(dst - sent.writes[write].2)];
        *times += 1;
        assert_eq!(*times, 1, "written twice");
    }
}

/// Walks every program over `menu` of up to `length` steps, from each state once, after as few steps as lead to it, and has all
/// of it end from each of them. Returns how many states there are.
fn explore(setup: Setup, menu: &[Do], length: usize) -> usize {
    let mut seen = HashSet::new();
    let mut reached = vec![World::new(setup)];
    for left in (0..length).rev() {
        let mut beyond = Vec::new();
        for world in &reached {
            for &step in menu {
                let mut next = world.clone();
                if !next.apply(step) || !seen.insert(digest(&next)) {
                    continue;
                }
                drop(next.clone().finish());
                if left > 0 {
                    beyond.push(next);
                }
            }
        }
        reached = beyond;
    }
    seen.len()
}

/// 128 bits of what is hashed, in one pass and quickly: nobody chooses the states so that they collide.
struct Digest([u64; 2]);

impl Hasher for Digest {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "a product is folded into half its bits")]
    fn write_u64(&mut self, word: u64) {
        let folded = |factor: u64, by: u64| {
            let product = u128::from(factor) * u128::from(by);
            (product >> 64) as u64 ^ product as u64
        };
        let [a, b] = self.0;
        self.0 = [
            folded(a ^ word, 0x8bb8_4b93_962e_acc9).wrapping_add(b),
            folded(b ^ word, 0x4d5a_2da5_1de1_aa47) ^ a.rotate_left(29),
        ];
    }

    fn write_u8(&mut self, word: u8) {
        self.write_u64(word.into());
    }

    fn write_u16(&mut self, word: u16) {
        self.write_u64(word.into());
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        self.0[0]
    }
}

fn digest(world: &World) -> [u64; 2] {
    // Of zeros alone nothing would come.
    let mut hasher = Digest([0x2d35_8dcc_aa6c_78a5, 0x4b33_a62e_d433_d4a3]);
    world.hash(&mut hasher);
    hasher.0
}

/// Cancel, failure, deadline and lost NICs at any point of a write cut over two NICs.
#[test]
fn every_short_program_of_ends() {
    let menu = [
        Do::Submit(Kind::Split, 0),
        Do::SubmitDue(Kind::Tiny, 0),
        Do::Post(0),
        Do::Post(1),
        Do::Complete(0),
        Do::Complete(1),
        Do::Fail(0),
        Do::Cancel(0),
        Do::Tick,
        Do::NicDown(0),
        Do::NicDown(1),
        Do::NicUp(0),
    ];
    let states = explore(SMALL, &menu, 8);
    assert!(states > 28_000, "only {states} states");
}

/// Peers that connect, leave and return, under transfers to one and to all of them.
#[test]
fn every_short_program_of_peers() {
    let setup = Setup { nics: 1, connecting: 1, ..SMALL };
    let menu = [
        Do::Submit(Kind::Scatter, 1),
        Do::Submit(Kind::Pages, 0),
        Do::Submit(Kind::Imm, 1),
        Do::Post(0),
        Do::Complete(0),
        Do::Complete(1),
        Do::Cancel(0),
        Do::Connect(0),
        Do::Lose(0),
        Do::Remove(1),
        Do::Rejoin(0),
        Do::Rejoin(1),
        Do::Tick,
    ];
    let states = explore(setup, &menu, 9);
    assert!(states > 36_000, "only {states} states");
}

/// Three transfers for one credit.
#[test]
fn every_short_program_of_credits() {
    let setup = Setup { nics: 1, peers: 1, slots: 3, queue_depth: 3, peer_depth: 2, ..SMALL };
    let menu = [
        Do::Submit(Kind::Tiny, 0),
        Do::Submit(Kind::Split, 0),
        Do::Express(Kind::Tiny, 0),
        Do::Post(0),
        Do::Complete(0),
        Do::Complete(1),
        Do::Cancel(0),
        Do::Cancel(1),
        Do::Cancel(2),
        Do::NicDown(0),
    ];
    let states = explore(setup, &menu, 11);
    assert!(states > 19_000, "only {states} states");
}

/// All states of one NIC, one peer and two slots, for up to three transfers: finitely many, and from
/// each of them everything ends.
#[test]
fn every_state_of_the_smallest_group_leads_to_the_end() {
    let setup = Setup { nics: 1, peers: 1, connecting: 1, ..SMALL };
    let menu = [
        Do::Submit(Kind::Tiny, 0),
        Do::Express(Kind::Tiny, 0),
        Do::SubmitDue(Kind::Split, 0),
        Do::Post(0),
        Do::Complete(0),
        Do::Complete(1),
        Do::Fail(0),
        Do::Cancel(0),
        Do::Cancel(1),
        Do::Tick,
        Do::Connect(0),
        Do::Lose(0),
        Do::NicDown(0),
    ];
    let submitted = |world: &World| {
        let tenants = world.group.transfers.iter().map(|slot| slot.generation);
        tenants.sum::<u32>() as usize + world.group.active()
    };
    let mut seen: HashSet<Group> = HashSet::new();
    let mut frontier = vec![World::new(setup)];
    while let Some(world) = frontier.pop() {
        for step in menu {
            let mut next = world.clone();
            let full = submitted(&world) == 3;
            let submits = matches!(step, Do::Submit(..) | Do::SubmitDue(..) | Do::Express(..));
            if full && submits || !next.apply(step) {
                continue;
            }
            if seen.insert(next.group.clone()) {
                assert_eq!(next.clone().finish().group.active(), 0);
                frontier.push(next);
            }
        }
    }
    assert!(seen.len() > 30_500, "only {} states", seen.len());
}

/// A path that breaks under a write cut over two NICs, and a second one while it is settled.
#[test]
fn every_short_program_of_paths() {
    let setup = Setup { peers: 1, ..SMALL };
    let menu = [
        Do::Submit(Kind::Split, 0),
        Do::Post(0),
        Do::Post(1),
        Do::Complete(0),
        Do::Break(0, 0, 0),
        Do::Break(0, 1, 1),
        Do::Land(0),
        Do::Answer(0),
        Do::Unfenced(0),
        Do::Restore(0, 0, 0),
        Do::Cancel(0),
        Do::Tick,
        Do::NicDown(0),
    ];
    let states = explore(setup, &menu, 8);
    assert!(states > 95_000, "only {states} states");
}

/// One NIC after another loses all of its paths, while what is asked about them travels on the next.
#[test]
fn every_short_program_of_cut_off_nics() {
    let setup = Setup { peers: 1, peer_nics: 3, slots: 1, ..SMALL };
    let menu = [
        Do::Submit(Kind::Scatter, 0),
        Do::Post(0),
        Do::Post(1),
        Do::Complete(0),
        Do::Break(0, 0, 0),
        Do::Break(0, 0, 1),
        Do::Break(0, 0, 2),
        Do::Break(0, 1, 1),
        Do::Answer(0),
        Do::Restore(0, 0, 1),
        Do::NicDown(1),
        Do::Cancel(0),
    ];
    let states = explore(setup, &menu, 7);
    assert!(states > 19_000, "only {states} states");
}

/// Runs of two pages over two NICs, that are cancelled, fail, and are lost with their paths.
#[test]
fn every_short_program_of_runs() {
    let setup = Setup { peers: 1, max_message: 4, pages_per_piece: 2, ..SMALL };
    let menu = [
        Do::Submit(Kind::Many, 0),
        Do::Post(0),
        Do::Post(1),
        Do::Complete(0),
        Do::Complete(1),
        Do::Fail(0),
        Do::Break(0, 0, 0),
        Do::Break(0, 1, 1),
        Do::Land(0),
        Do::Answer(0),
        Do::Restore(0, 0, 0),
        Do::Cancel(0),
        Do::NicDown(0),
    ];
    let states = explore(setup, &menu, 8);
    assert!(states > 23_000, "only {states} states");
}

/// One peer near, one far over two NICs of which one and another break or are lost: what goes to both, and to each.
#[test]
fn every_short_program_of_two_sides() {
    let setup = Setup { nics: 3, peer_nics: 3, pages_per_piece: 2, max_message: 4, ..SMALL };
    let menu = [
        Do::Submit(Kind::Scatter, 0),
        Do::Submit(Kind::Many, 0),
        Do::Submit(Kind::Many, 1),
        Do::Post(0),
        Do::Post(1),
        Do::Post(2),
        Do::Complete(0),
        Do::Break(1, 1, 1),
        Do::Answer(0),
        Do::NicDown(0),
        Do::NicDown(1),
        Do::NicUp(1),
        Do::Lose(1),
    ];
    let states = explore(Setup { spans: true, ..setup }, &menu, 6);
    assert!(states > 1_000, "only {states} states");
}

/// Of a scatter to peers on two sides, what goes to one peer is spread over the NICs that lead there, whoever's turn was
/// before.
#[test]
fn each_lane_of_a_scatter_keeps_its_nic() {
    let depths = Setup { queue_depth: 8, peer_depth: 8, reserve: 0, ..SMALL };
    let setup = Setup { nics: 4, peer_nics: 4, max_message: 64, spans: true, ..depths };
    for order in [[0, 1], [1, 0]] {
        let mut world = World::new(setup);
        let target = |n: u16| {
            let owner = engine(n);
            let (peer, dst) = (world.live(n).unwrap(), region(owner, DST));
            Target { peer, dst, src_offset: 0, dst_offset: 0, len: 24 }
        };
        let targets = (0..10).flat_map(|_| order.map(target)).collect();
        let request = Request::Scatter(ScatterWrite {
            src: source(),
            targets: Targets::Writes(targets),
            imm: Some(tag()),
        });
        let mut bytes = [[0; 4]; 2];
        submit(&mut world, request);
        let mut idle = 0;
        while idle < 2 {
            idle += 1;
            for nic in 0..4_u8 {
                while let Some(work) = world.group.poll_work(nic) {
                    let peer = usize::from(world.number(work.peer));
                    bytes[peer][usize::from(nic)] += work.len;
                    let now = world.now;
                    assert!(world.group.handle_completion(now, nic, work.token, Ok(())));
                    idle = 0;
                }
            }
        }
        assert_eq!(bytes, [[240, 0, 0, 0], [0, 80, 80, 80]], "{order:?}");
    }
}

/// Small writes, taken and posted the short way and the general one, while paths and NICs are lost.
#[test]
fn every_short_program_of_small_writes() {
    let setup = Setup { peers: 1, slots: 3, ..SMALL };
    let menu = [
        Do::Submit(Kind::Tiny, 0),
        Do::Express(Kind::Tiny, 0),
        Do::Post(0),
        Do::Post(1),
        Do::Complete(0),
        Do::Break(0, 0, 0),
        Do::Break(0, 0, 1),
        Do::Answer(0),
        Do::Restore(0, 0, 0),
        Do::NicDown(0),
        Do::NicUp(0),
        Do::Lose(0),
    ];
    let states = explore(setup, &menu, 8);
    assert!(states > 13_000, "only {states} states");
}

/// A peer asks about its paths, over paths that break.
#[test]
fn every_short_program_of_asks() {
    let setup = Setup { peers: 1, slots: 1, ..SMALL };
    let menu = [
        Do::Asked(0, 0, 0),
        Do::Asked(0, 0, 1),
        Do::AskedAgain(0, 0),
        Do::Beat(0),
        Do::Post(0),
        Do::Post(1),
        Do::Complete(0),
        Do::Complete(1),
        Do::Break(0, 0, 0),
        Do::Land(0),
        Do::Answer(0),
        Do::Restore(0, 0, 0),
        Do::Fail(0),
        Do::Lose(0),
        Do::Rejoin(0),
    ];
    let states = explore(setup, &menu, 9);
    assert!(states > 60_000, "only {states} states");
}

fn any_setup() -> impl Strategy<Value = Setup> {
    let counts = (1..=4_u8, 1..=4_u8, 1..=3_u16, 0..=1_u16, 1..=8_usize);
    let depths = (0..=2_u16, 1..=4_u16, 1..=4_u16, 1..=8_u64, 1..=4_u16);
    (counts, depths).prop_map(|((nics, peer_nics, peers, connecting, slots), depths)| {
        let (reserve, queue, peer, max_message, pages_per_piece) = depths;
        Setup {
            nics,
            peer_nics,
            peers,
            connecting: connecting.min(peers),
            slots,
            queue_depth: reserve + queue,
            peer_depth: reserve + peer,
            reserve,
            max_message,
            pages_per_piece,
            spans: nics > 1 && peer_nics > 1 && slots % 2 == 0,
        }
    })
}

fn any_step() -> impl Strategy<Value = Do> {
    let kind = (0..KINDS.len()).prop_map(|kind| KINDS[kind]);
    prop_oneof![
        6 => (kind.clone(), 0..3_u16).prop_map(|(kind, peer)| Do::Submit(kind, peer)),
        1 => (kind.clone(), 0..3_u16).prop_map(|(kind, peer)| Do::SubmitDue(kind, peer)),
        4 => (kind, 0..3_u16).prop_map(|(kind, peer)| Do::Express(kind, peer)),
        16 => (0..4_u8).prop_map(Do::Post),
        12 => (0..8_usize).prop_map(Do::Complete),
        1 => (0..8_usize).prop_map(Do::Fail),
        1 => (0..8_usize).prop_map(Do::Cancel),
        1 => Just(Do::Tick),
        1 => (0..3_u16).prop_map(Do::Connect),
        1 => (0..3_u16).prop_map(Do::Lose),
        1 => (0..3_u16).prop_map(Do::Remove),
        1 => (0..3_u16).prop_map(Do::Rejoin),
        1 => (0..4_u8).prop_map(Do::NicDown),
        2 => (0..4_u8).prop_map(Do::NicUp),
        3 => (0..3_u16, 0..4_u8, 0..4_u8).prop_map(|(peer, nic, to)| Do::Break(peer, nic, to)),
        3 => (0..3_u16, 0..4_u8, 0..4_u8).prop_map(|(peer, nic, to)| Do::Restore(peer, nic, to)),
        4 => (0..8_usize).prop_map(Do::Land),
        6 => (0..4_usize).prop_map(Do::Answer),
        1 => (0..4_usize).prop_map(Do::Unfenced),
        1 => (0..3_u16, 0..4_u8, 0..4_u8).prop_map(|(peer, from, to)| Do::Asked(peer, from, to)),
        1 => (0..3_u16, 0..4_u8).prop_map(|(peer, from)| Do::AskedAgain(peer, from)),
        1 => (0..3_u16).prop_map(Do::Beat),
    ]
}

proptest! {
    // Numbers that nobody is to guess take longer to draw than programs to run.
    #![proptest_config(ProptestConfig {
        rng_algorithm: RngAlgorithm::XorShift,
        ..ProptestConfig::with_cases(1500)
    })]
    /// Long programs over groups of all shapes.
    #[test]
    fn long_programs(setup in any_setup(), steps in prop::collection::vec(any_step(), 0..300)) {
        let mut world = World::new(setup);
        for step in steps {
            world.apply(step);
        }
        world.finish();
    }
}

// ---- the rules one by one ----

#[test]
fn a_trailing_immediate_leaves_a_lost_nic() {
    let setup = Setup { queue_depth: 64, peer_depth: 64, ..SMALL };
    let mut world = World::new(setup);
    assert!(world.apply(Do::Submit(Kind::Long, 0)));
    for nic in [0, 1] {
        while world.apply(Do::Post(nic)) {}
    }
    assert!(world.posted.len() > 16);
    assert!(world.posted.iter().all(|work| work.imm.is_none() && work.is_bulk()));
    for lost in [0, 1] {
        let mut world = world.clone();
        world.apply(Do::NicDown(lost));
        while world.apply(Do::Complete(0)) {}
        assert!(!world.apply(Do::Post(lost)));
        // That of each way that the bytes took.
        while world.apply(Do::Post(1 - lost)) {}
        let notes = world.posted.iter();
        assert!(notes.clone().all(|work| work.len == 0 && work.nic == 1 - lost && work.is_bulk()));
        let units: Vec<_> = notes.filter_map(|work| work.imm.map(Imm::units)).collect();
        assert_eq!(units, [WRITE_UNITS / 2; 2]);
        world.finish();
    }
    // With no NIC left, what was not announced is not done.
    world.apply(Do::NicDown(0));
    world.apply(Do::NicDown(1));
    while world.apply(Do::Complete(0)) {}
    assert_eq!(world.group.active(), 0);
}

fn end_of(group: &mut Group) -> Option<End> {
    core::iter::from_fn(|| group.poll_event()).find_map(ended)
}

fn ended(event: Event) -> Option<End> {
    match event {
        Event::Ended { end, .. } => Some(end),
        _ => None,
    }
}

#[test]
fn the_first_reason_is_told() {
    let mut world = World::new(SMALL);
    world.apply(Do::Submit(Kind::Split, 0));
    world.apply(Do::Post(0));
    world.apply(Do::Cancel(0));
    let work = world.posted[0];
    let completed = |error| {
        let mut group = world.group.clone();
        assert!(group.handle_completion(world.now, work.nic, work.token, error));
        end_of(&mut group)
    };
    let error = TransferError::Cancelled;
    assert_eq!(completed(Ok(())), Some(End::Quiesced { error }));
    assert_eq!(completed(Err(WorkError::Flushed)), Some(End::Quiesced { error }));
}

#[test]
fn a_withdrawal_that_comes_too_late_changes_nothing() {
    for kind in [Kind::Tiny, Kind::Imm, Kind::Split] {
        let mut world = World::new(SMALL);
        world.apply(Do::Submit(kind, 0));
        for nic in [0, 1] {
            while world.apply(Do::Post(nic)) {}
        }
        let unposted = world.group.transfers[0].active().unwrap().plan.nic_mask() != 0;
        assert_eq!(unposted, kind == Kind::Split);
        world.apply(Do::Cancel(0));
        while world.posted.len() > 1 {
            world.apply(Do::Complete(0));
        }
        let last = world.posted[0];
        let complete = |outcome| {
            let mut group = world.group.clone();
            assert!(group.handle_completion(world.now, last.nic, last.token, outcome));
            end_of(&mut group)
        };
        let error = TransferError::Cancelled;
        let end = if unposted { End::Quiesced { error } } else { End::Done };
        assert_eq!(complete(Ok(())), Some(end));
        assert_eq!(complete(Err(WorkError::Flushed)), Some(End::Quiesced { error }));
    }
}

#[test]
fn an_abort_without_effect_is_repeated() {
    let mut world = World::new(SMALL);
    world.deaf = 3;
    world.apply(Do::Submit(Kind::Tiny, 0));
    world.apply(Do::Post(0));
    world.apply(Do::Post(1));
    world.apply(Do::Cancel(0));
    let mut ticks = 0;
    while world.group.active() > 0 {
        let before = world.now;
        assert!(world.apply(Do::Tick), "nothing will ever end it");
        assert!(world.now > before, "time stands still");
        ticks += 1;
    }
    assert_eq!((ticks, world.deaf), (4, 0));
}

#[test]
fn what_others_complete_delays_an_abort_once() {
    let setup = Setup { queue_depth: 8, peer_depth: 8, ..SMALL };
    let mut world = World::new(setup);
    world.deaf = 1;
    for _ in 0..2 {
        world.apply(Do::Submit(Kind::Tiny, 0));
        while world.apply(Do::Post(0)) || world.apply(Do::Post(1)) {}
    }
    world.now = Time::from_nanos(3);
    world.apply(Do::Cancel(0));
    world.now = Time::from_nanos(7);
    world.apply(Do::Complete(1));
    world.apply(Do::Tick);
    assert_eq!((world.now, world.deaf), (Time::from_nanos(13), 1), "the peer is at work");
    world.apply(Do::Tick);
    assert_eq!(world.deaf, 0, "but not at this");
}

/// A stopped transfer waits for one peer: others that it went to keep their connection, whatever else they have in flight.
#[test]
fn an_abort_is_of_whom_it_waits_for_alone() {
    for (late, progress) in [(0, false), (0, true), (2, false), (2, true)] {
        let setup = Setup { peers: 3, nics: 1, slots: 6, queue_depth: 16, peer_depth: 8, ..SMALL };
        let mut world = World::new(setup);
        let request = world.request(Kind::Scatter, 0).unwrap();
        let scattered = submit(&mut world, request);
        for peer in 0..3 {
            tiny(&mut world, peer);
        }
        while let Some(work) = world.group.poll_work(0) {
            world.posted.push(work);
        }
        let of = |work: &WorkRequest| work.token.transfer() == scattered;
        assert_eq!(world.posted.iter().filter(|work| of(work)).count(), 3);
        let ended = |work: &WorkRequest| of(work) && work.peer.index != late;
        for work in world.posted.extract_if(.., |work| ended(work)).collect::<Vec<_>>() {
            completed(&mut world, &work);
        }
        assert!(world.group.cancel(world.now, scattered));
        world.now = Time::from_nanos(1);
        if progress {
            // Of what is not to be waited for: that delays it once.
            let other = |work: &WorkRequest| !of(work) && work.peer.index == late;
            let at = world.posted.iter().position(other).unwrap();
            let work = world.posted.remove(at);
            completed(&mut world, &work);
        }
        let mut aborted = Vec::new();
        for _ in 0..3 {
            world.now = world.group.poll_timeout();
            world.group.handle_timeout(world.now);
            while let Some(event) = world.group.poll_event() {
                match event {
                    Event::Abort { peer } => aborted.push(peer.index),
                    Event::Ended { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        assert!(aborted.len() > 1 && aborted.iter().all(|peer| *peer == late), "{aborted:?}");
    }
}

/// A scatter to three peers, and small writes to each; all are posted, and one peer has taken its part of the scatter.
fn scatter_among_others(taken: u16) -> (World, TransferId, PeerId) {
    let setup = Setup { peers: 3, nics: 1, slots: 40, queue_depth: 64, peer_depth: 16, ..SMALL };
    let mut world = World::new(setup);
    let request = world.request(Kind::Scatter, 0).unwrap();
    let scattered = submit(&mut world, request);
    for peer in (0..3).cycle().take(3 * (2 * ROUNDS + 1)) {
        tiny(&mut world, peer);
    }
    while let Some(work) = world.group.poll_work(0) {
        world.posted.push(work);
    }
    let part = |work: &WorkRequest| work.token.transfer() == scattered && work.peer.index == taken;
    let at = world.posted.iter().position(part).unwrap();
    let work = world.posted.remove(at);
    completed(&mut world, &work);
    (world, scattered, work.peer)
}

/// How often a drain takes too long.
const ROUNDS: usize = 4;

/// Whom a stopped scatter has aborted each time that its drain takes too long, while to some peers other writes go on.
fn aborted(world: &mut World, scattered: TransferId, go_on: &[u16]) -> Vec<(usize, u16)> {
    let mut aborted = Vec::new();
    for round in 0..ROUNDS {
        world.now = Time::from_nanos(world.now.as_nanos() + 1);
        for peer in go_on {
            let moves =
                |work: &WorkRequest| work.token.transfer() != scattered && work.peer.index == *peer;
            let at = world.posted.iter().position(moves).unwrap();
            let work = world.posted.remove(at);
            completed(world, &work);
        }
        world.now = world.now.max(world.group.poll_timeout());
        world.group.handle_timeout(world.now);
        while let Some(event) = world.group.poll_event() {
            match event {
                Event::Abort { peer } => aborted.push((round, peer.index)),
                Event::Ended { .. } | Event::Peer { .. } | Event::Disconnect { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
    aborted.sort_unstable();
    aborted
}

/// A stopped scatter waits for two peers. A third, that took its part and goes on taking what others send, is let alone for as
/// long as one of the two stands still; if all go on, something of the two's is stuck beside what goes on, and all are aborted.
#[test]
fn an_abort_is_of_who_stands_still() {
    for (well, late_move) in (0..3).flat_map(|well| [(well, false), (well, true)]) {
        let (mut world, scattered, _) = scatter_among_others(well);
        assert!(world.group.cancel(world.now, scattered));
        let go_on: Vec<_> = (0..3).filter(|&peer| peer == well || late_move).collect();
        let expected: Vec<_> = (0..ROUNDS)
            .flat_map(|round| (0..3).map(move |peer| (round, peer)))
            .filter(|&(round, peer)| if late_move { round > 0 } else { peer != well })
            .collect();
        assert_eq!(aborted(&mut world, scattered, &go_on), expected, "{well} {late_move}");
    }
}

/// A stopped scatter waits for two peers, and a third has taken its part. Who is gone stands still until what was in flight to it is reported, and others
/// are let alone meanwhile; but it may be of another transfer that this takes so long, and then who goes on is aborted.
#[test]
fn who_is_gone_holds_up_no_abort() {
    for (taken, is_taker_gone) in (0..3).flat_map(|taken| [(taken, false), (taken, true)]) {
        let (mut world, scattered, peer) = scatter_among_others(taken);
        let gone: Vec<_> = (0..3).filter(|&it| (it == taken) == is_taker_gone).collect();
        let others: Vec<_> = (0..3).filter(|it| !gone.contains(it)).collect();
        for &index in &gone {
            let peer = PeerId { index, ..peer };
            world.group.handle_disconnected(world.now, peer, DownReason::Disconnected);
        }
        let mut soon = aborted(&mut world, scattered, &others);
        soon.retain(|(_, peer)| others.contains(peer));
        assert_eq!(soon, [], "{taken} {is_taker_gone}");
        world.now = world.now.after(CUT_OFF_WITHIN);
        let mut late = aborted(&mut world, scattered, &others);
        late.retain(|(_, peer)| others.contains(peer));
        let expected: Vec<_> =
            (0..ROUNDS).flat_map(|round| others.iter().map(move |&it| (round, it))).collect();
        assert_eq!(late, expected, "{taken} {is_taker_gone}");
    }
}

/// Whom pieces in flight go to is known while it is one, whatever went to others before.
#[test]
fn a_sole_peer_is_told_from_several() {
    const PEERS: [u16; 4] = [0, 1, 2, u16::MAX];
    for counts in (0..5_usize.pow(4)).map(|n| [n % 5, n / 5 % 5, n / 25 % 5, n / 125]) {
        let mut outstanding = Outstanding::none(true);
        for (peer, count) in PEERS.into_iter().zip(counts) {
            outstanding.add(peer, index_of(count + 3));
        }
        for (peer, _) in PEERS.into_iter().flat_map(|peer| [(peer, 0), (peer, 1), (peer, 2)]) {
            outstanding.remove(peer);
        }
        let some = PEERS.into_iter().zip(counts).filter(|(_, count)| *count > 0);
        let sole = some.clone().map(|(peer, _)| peer).next().filter(|_| some.count() == 1);
        assert_eq!(outstanding.sole_peer(), sole, "{counts:?}");
        assert_eq!(outstanding.count() as usize, counts.iter().sum::<usize>());
    }
}

/// Who is late of many is named, if all that is in flight goes to it.
#[test]
fn a_deadline_names_the_one_peer_that_is_late() {
    for late in 0..3 {
        let mut world = World::new(Setup { peers: 3, nics: 1, queue_depth: 8, ..SMALL });
        let request = world.request(Kind::Barrier, 0).unwrap().check().unwrap();
        world.group.submit(request, Options { deadline: DUE, user: 0 }).unwrap();
        let works: Vec<_> = core::iter::from_fn(|| world.group.poll_work(0)).collect();
        assert_eq!(works.len(), 3);
        for work in works.iter().filter(|work| work.peer.index != late) {
            completed(&mut world, work);
        }
        world.group.handle_timeout(DUE);
        let work = works.iter().find(|work| work.peer.index == late).unwrap();
        assert!(world.group.handle_completion(DUE, 0, work.token, Err(WorkError::Flushed)));
        let error = TransferError::DeadlineExceeded { outstanding: 1, peer: Some(work.peer) };
        assert_eq!(end_of(&mut world.group), Some(End::Quiesced { error }));
    }
}

/// Where nothing is in flight any more, it is who has to be waited for before the rest can be posted.
#[test]
fn a_deadline_names_who_is_waited_for_with_nothing_in_flight() {
    let mut world = World::new(Setup { peers: 3, nics: 1, connecting: 1, queue_depth: 8, ..SMALL });
    let request = world.request(Kind::Barrier, 0).unwrap().check().unwrap();
    world.group.submit(request, Options { deadline: DUE, user: 0 }).unwrap();
    let works: Vec<_> = core::iter::from_fn(|| world.group.poll_work(0)).collect();
    works.iter().for_each(|work| completed(&mut world, work));
    world.group.handle_timeout(DUE);
    let peer = world.peers[0];
    assert!(peer.is_some() && works.iter().all(|work| Some(work.peer) != peer));
    let error = TransferError::DeadlineExceeded { outstanding: 0, peer };
    assert_eq!(end_of(&mut world.group), Some(End::Quiesced { error }));
    let text = std::format!("{error}");
    assert!(text.ends_with("with nothing in flight, and more to be posted to peer 0.0"), "{text}");
}

/// A NIC is used while the caller and the transport both have it, whatever they say and in whatever order.
#[test]
fn a_nic_taken_out_of_use_stays_so_when_its_link_comes_back() {
    let mut ours = false;
    for said in 0..4_u32.pow(4) {
        let mut world = World::new(Setup { peers: 1, nics: 2, ..SMALL });
        let (mut used, mut alive) = (true, true);
        for step in (0..4).map(|at| said >> (2 * at) & 3) {
            let yes = step & 1 == 1;
            if step & 2 == 0 {
                used = yes;
                world.group.set_nic_use(Time::ZERO, 1, yes);
            } else {
                alive = yes;
                world.group.set_nic_health(Time::ZERO, 1, yes);
            }
            assert_eq!(world.group.nics[1].usable(), used && alive, "{said:#x}");
            let request = world.request(Kind::Split, 0).unwrap().check().unwrap();
            world.group.submit(request, Options { deadline: Time::NEVER, user: 0 }).unwrap();
            while let Some(work) = [0, 1].into_iter().find_map(|nic| world.group.poll_work(nic)) {
                assert!(work.nic == 0 || used && alive, "{said:#x}");
                ours |= work.nic == 1;
                assert!(world.group.handle_completion(Time::ZERO, work.nic, work.token, Ok(())));
            }
            assert_eq!(end_of(&mut world.group), Some(End::Done));
        }
    }
    assert!(ours, "it was never used");
}

/// One transfer's time is over, for somebody who has not listened to anybody meanwhile: no peer is silent for that, nor is another transfer late.
#[test]
fn a_deadline_is_looked_at_by_itself() {
    let ms = Duration::from_millis;
    let liveness = LivenessConfig { suspect_after: ms(2), down_after: ms(4), ..NEVER };
    let late = Time::ZERO.after(ms(9));
    for (deadline, is_over) in [(late, true), (late.after(ms(1)), false)] {
        let config = GroupConfig { liveness, ..config(SMALL) };
        let mut world = World::with(Setup { peers: 2, nics: 1, ..SMALL }, config);
        let mut submit = |peer| {
            let request = world.request(Kind::Imm, peer).unwrap().check().unwrap();
            world.group.submit(request, Options { deadline, user: peer.into() }).unwrap()
        };
        let [one, other] = [0, 1].map(&mut submit);
        world.group.handle_deadline(late, one);
        let peer = world.live(0).unwrap();
        let error = TransferError::DeadlineExceeded { outstanding: 0, peer: Some(peer) };
        let end = is_over.then_some(End::NeverStarted { error });
        assert_eq!(end_of(&mut world.group), end);
        assert_eq!(world.group.is_active(one), !is_over);
        assert!(world.group.is_active(other) && !world.group.is_stopped(other));
        for peer in [0, 1] {
            let peer = world.live(peer).unwrap();
            assert_eq!(world.group.peer_state(peer), Some(PeerState::Up));
        }
        // One that has ended is nobody's.
        world.group.handle_deadline(Time::NEVER, one);
        world.group.handle_timeout(late);
        let down = Some(PeerState::Down(DownReason::Silent { for_ms: 4 }));
        assert_eq!(world.group.peer_state(peer), down);
    }
}

#[test]
fn an_answer_that_comes_too_late_is_ignored() {
    let setup = Setup { connecting: 1, ..SMALL };
    let mut world = World::new(setup);
    let id = world.live(0).unwrap();
    world.group.remove_peer(world.now, id, DownReason::Removed);
    let before = world.group.clone();
    let nics = world.nics(0);
    world.group.handle_connected(world.now, id, &answer(0, &nics));
    assert_eq!(world.group, before);
    assert_eq!(world.group.peer_state(id), Some(PeerState::Down(DownReason::Removed)));
}

#[test]
fn what_names_nothing_in_flight_changes_nothing() {
    let mut world = World::new(SMALL);
    world.apply(Do::Submit(Kind::Split, 0));
    world.apply(Do::Post(0));
    let work = world.posted[0];
    let bits = work.token.bits();
    let tokens = [0, u64::MAX, bits ^ 1, bits ^ 1 << 32, bits ^ 1 << 48].map(Token::from_bits);
    let others = tokens.into_iter().filter(|token| *token != work.token);
    let mut cases: Vec<(NicIndex, Token)> = others.map(|token| (work.nic, token)).collect();
    cases.extend((0..=NicIndex::MAX).filter(|nic| *nic != work.nic).map(|nic| (nic, work.token)));
    let before = world.group.clone();
    for (nic, token) in cases {
        assert!(!world.group.handle_completion(world.now, nic, token, Ok(())));
        assert_eq!(world.group, before);
    }
    assert_eq!(world.group.poll_work(2), None);
    assert_eq!(world.group.poll_work(NicIndex::MAX), None);
}

#[test]
fn a_request_for_nobody_is_refused() {
    let mut world = World::new(SMALL);
    let request = |world: &World| world.request(Kind::Tiny, 0).unwrap().check().unwrap();
    let options = Options { deadline: Time::NEVER, user: 0 };
    let kept = request(&world);
    let peer = world.live(0).unwrap();
    let refused = |world: &mut World, request| {
        let rejected = world.group.submit(request, options).unwrap_err();
        assert_eq!(rejected.request, None);
        rejected.error
    };

    let Request::Single(mut write) = kept.request().clone() else { unreachable!() };
    write.dst.owner = EngineId(99);
    let wrong = SubmitError::WrongOwner { peer, expected: engine(0), found: EngineId(99) };
    assert_eq!(refused(&mut world, Request::Single(write).check().unwrap()), wrong);

    let other = world.live(1).unwrap();
    assert!(world.group.reaches(peer) && world.group.reaches(other));
    world.group.remove_peer(world.now, peer, DownReason::Removed);
    let down = SubmitError::PeerDown { peer, reason: DownReason::Removed };
    assert_eq!(refused(&mut world, kept.clone()), down);
    assert!(!world.group.reaches(peer) && world.group.reaches(other));
    let barrier = |peers: &[PeerId]| {
        let targets = Targets::Peers(peers.to_vec());
        Request::Barrier(Barrier { targets, imm: tag() }).check().unwrap()
    };
    assert_eq!(refused(&mut world, barrier(&[other, peer])), down);
    world.events();
    assert!(!world.group.reaches(peer));
    assert_eq!(refused(&mut world, kept.clone()), SubmitError::NoSuchPeer { peer });
    assert_eq!(refused(&mut world, barrier(&[peer])), SubmitError::NoSuchPeer { peer });
    assert!(world.apply(Do::Rejoin(0)));
    assert_ne!(world.live(0), Some(peer));
    assert_eq!(refused(&mut world, kept), SubmitError::NoSuchPeer { peer });
}

/// Whichever NIC would carry it: a write whose regions lack the key of any is refused.
#[test]
fn a_small_write_without_a_key_is_refused() {
    let mut world = World::new(SMALL);
    let options = Options { deadline: Time::NEVER, user: 0 };
    let Some(Request::Single(write)) = world.request(Kind::Tiny, 0) else { unreachable!() };
    let (mut ours, mut theirs) = (write, write);
    ours.src.keys = Keys::new(&[SRC_KEY]).unwrap();
    theirs.dst.keys = Keys::new(&[DST_KEY]).unwrap();
    for turn in 0..4 {
        for (write, side) in [(ours, Side::Source), (theirs, Side::Destination)] {
            world.group.turn = turn;
            let request = Request::Single(write).check().unwrap();
            let rejected = world.group.submit(request, options).unwrap_err();
            let missing = PlanError::KeyMissing { side, peer: write.peer, nic: 1 };
            assert_eq!(rejected.error, SubmitError::Plan(missing));
        }
    }
    assert_eq!(world.group.active(), 0);
}

#[test]
fn a_path_that_nobody_can_settle_is_named() {
    let mut world = World::new(SMALL);
    let peer = world.live(0).unwrap();
    world.apply(Do::Submit(Kind::Split, 0));
    world.apply(Do::Post(1));
    world.apply(Do::Break(0, 1, 1));
    let reason = DownReason::PathLost { nic: 1 };
    let mut group = world.group.clone();
    // Asked, and asked again, for as long as a drain may take.
    for _ in 0..8 {
        assert!(group.poll_timeout() <= Time::ZERO.after(DRAIN), "no end");
        group.handle_timeout(group.poll_timeout());
        if group.peer_state(peer) == Some(PeerState::Down(reason)) {
            break;
        }
    }
    assert_eq!(group.peer_state(peer), Some(PeerState::Down(reason)));
    let work = world.limbo[0].0;
    assert!(group.handle_completion(world.now, 1, work.token, Err(WorkError::PeerGone)));
    let error = TransferError::PeerDown { peer, reason };
    assert_eq!(end_of(&mut group), Some(End::Quiesced { error }));
    let told = std::string::ToString::to_string(&error);
    assert!(told.contains("peer 0.0") && told.contains("nic 1"), "{told}");
}

/// Whoever drives the group was not run until after the time for an answer, which has come meanwhile.
#[test]
fn an_answer_that_has_come_counts_however_late_it_is_looked_at() {
    for comes in [false, true] {
        let mut world = World::new(SMALL);
        let peer = world.live(0).unwrap();
        world.apply(Do::Submit(Kind::Split, 0));
        world.apply(Do::Post(1));
        world.apply(Do::Break(0, 1, 1));
        if comes {
            world.group.handle_answer(peer, 1);
        }
        let late = Time::ZERO.after(DRAIN).after(DRAIN);
        world.group.handle_timeout(late);
        let events: Vec<_> = core::iter::from_fn(|| world.group.poll_event()).collect();
        let settles = |event: &Event| matches!(event, Event::Settle { nic: 1, .. });
        assert_eq!((events.iter().any(settles), world.live(0).is_some()), (comes, true));
        let state = world.group.peer_state(peer);
        assert_eq!(matches!(state, Some(PeerState::Down(_))), !comes, "{state:?}");
        // If it was of another epoch, nothing was settled by it: the time is over at the next look, however many come.
        world.group.handle_answer(peer, 1);
        world.group.handle_timeout(late);
        let state = world.group.peer_state(peer);
        assert!(matches!(state, Some(PeerState::Down(_))), "{state:?}");
    }
}

#[test]
fn without_room_for_lost_pieces_their_transfer_ends() {
    let nic = NicConfig { state: GOOD_NIC, queue_depth: 4, takes: PieceLimits::ANY };
    let new = |lost: usize| {
        let (slots, peers) = (vec![Slot::new()], vec![PeerSlot::new()]);
        let lost = vec![LostSlot::new(); lost];
        Group::with_failover(config(SMALL), &[nic; 2], slots, peers, lost)
    };
    assert_eq!(new(7).err(), Some(ConfigError::LostSlots { found: 7, needed: 8 }));
    assert!(new(8).is_ok());
    let mut group = new(0).unwrap();
    let peer = group.accept_peer(Time::ZERO, engine(0), &answer(0, &[GOOD_NIC])).unwrap();
    let options = Options { deadline: Time::NEVER, user: 0 };
    group.submit(immediate(peer).check().unwrap(), options).unwrap();
    let work = (0..2).find_map(|nic| group.poll_work(nic)).unwrap();
    group.handle_path_broken(Time::ZERO, peer, work.nic, work.remote_nic);
    assert!(group.handle_undelivered(Time::ZERO, &work));
    assert!(!group.handle_undelivered(Time::ZERO, &work), "it is not in flight any more");
    let error = TransferError::Piece { peer, nic: work.nic, error: WorkError::Flushed };
    assert_eq!(end_of(&mut group), Some(End::Quiesced { error }));
}

#[test]
fn an_ask_that_cannot_be_is_refused() {
    let mut world = World::new(SMALL);
    let peer = world.live(0).unwrap();
    let epoch = Epoch::ZERO.next();
    for (from, to) in [(2, 0), (0, 2), (u8::MAX, 0), (0, u8::MAX)] {
        let before = world.group.clone();
        assert_eq!(world.group.handle_ask(peer, from, to, epoch), Err(AskError));
        assert_eq!(world.group, before);
    }
    assert_eq!(world.group.handle_ask(peer, 0, 0, epoch), Ok(()));
    assert_eq!(
        world.group.handle_ask(peer, 0, 1, epoch),
        Err(AskError),
        "another path, same epoch"
    );
    // Nobody has asked the peer anything, and nothing is in flight that it could answer.
    let before = world.group.clone();
    for nic in [0, 1, 8, u8::MAX] {
        world.group.handle_answer(peer, nic);
        world.group.handle_path_restored(world.now, peer, nic, 0);
        world.group.handle_fenced(peer, 1);
        world.group.handle_path_broken(world.now, peer, nic, 2);
    }
    // Only that somebody is to look at the peer is new.
    assert_eq!(core::mem::replace(&mut world.group.dirty, before.dirty), 0);
    world.group.peers[0].next_dirty = before.peers[0].next_dirty;
    assert_eq!(world.group, before);
}

#[test]
fn a_silent_peer_is_asked_then_lost() {
    let liveness = LivenessConfig {
        heartbeat: Duration::from_millis(2),
        suspect_after: Duration::from_millis(5),
        down_after: Duration::from_millis(9),
        connect_deadline: Duration::from_millis(20),
        idle_after: Duration::MAX,
    };
    let config = GroupConfig { liveness, ..config(SMALL) };
    let mut world = World::with(Setup { peers: 1, ..SMALL }, config);
    let peer = world.live(0).unwrap();
    world.apply(Do::Submit(Kind::Split, 0));
    world.apply(Do::Post(0));
    let mut told = Vec::new();
    while world.group.peer_state(peer).is_some_and(|state| !matches!(state, PeerState::Down(_))) {
        world.now = world.group.poll_timeout();
        world.group.handle_timeout(world.now);
        while let Some(event) = world.group.poll_event() {
            told.push((world.now.as_nanos() / 1_000_000, event));
        }
    }
    let down = PeerState::Down(DownReason::Silent { for_ms: 9 });
    let beat = Event::Heartbeat { peer };
    // At 2 ms the piece posted was sign enough.
    assert_eq!(
        told,
        [
            (4, beat),
            (5, Event::Peer { peer, state: PeerState::Suspect }),
            (6, beat),
            (8, beat),
            (9, Event::Disconnect { peer }),
            (9, Event::Peer { peer, state: down }),
        ]
    );
    world.gone(peer);
    world.fail_all(peer, WorkError::PeerGone);
    let error = TransferError::PeerDown { peer, reason: DownReason::Silent { for_ms: 9 } };
    assert_eq!(end_of(&mut world.group), Some(End::Quiesced { error }));
    assert_eq!(world.group.peer_state(peer), None);
}

/// Heartbeats that end or do not, over NICs and paths that come and go: what is checked at each of them, and when one is posted.
#[test]
fn every_short_program_of_heartbeats() {
    let setup = Setup { peers: 1, slots: 1, ..SMALL };
    let menu = [
        Do::Beat(0),
        Do::Post(0),
        Do::Post(1),
        Do::Complete(0),
        Do::Complete(1),
        Do::Complete(2),
        Do::NicDown(0),
        Do::NicUp(0),
        Do::NicDown(1),
        Do::NicUp(1),
        Do::Break(0, 0, 0),
        Do::Answer(0),
        Do::Restore(0, 0, 0),
    ];
    let states = explore(setup, &menu, 12);
    assert!(states > 4_000, "only {states} states");
}

/// Any of our NICs begin to stand still at once, whosever turn it is: what is posted there does not end. Each takes one heartbeat at most,
/// whichever is asked for work first; and as long as one goes on, the peer hears nothing for one interval, and only once.
#[test]
fn nics_that_stand_still_cost_one_interval_together() {
    for nics in 2..=4_u8 {
        let orders = (0..nics).flat_map(|first| (0..nics).map(move |sound| (first, sound)));
        for (still, (first, sound)) in
            (0..1_u8 << nics).flat_map(|still| orders.clone().map(move |order| (still, order)))
        {
            let mut world = World::new(Setup { nics, peers: 1, ..SMALL });
            let all = still.count_ones() == u32::from(nics);
            let mut silent = 0;
            for interval in 0..16 {
                let stands = |nic: u8| interval >= sound && still & 1 << nic != 0;
                let held = world.posted.len();
                let asked = world.apply(Do::Beat(0));
                assert!(asked || all, "of {nics} these stand still: {still:b}");
                let order = (0..nics).map(|nic| (nic + first) % nics);
                for nic in order {
                    while world.apply(Do::Post(nic)) {}
                }
                // Where one does not end, each that has none may be the only one that goes on.
                let goes = if held == 0 { 1 } else { usize::from(nics) - held };
                assert_eq!(world.posted.len() - held, goes, "{still:b} at {interval}");
                for at in (held..world.posted.len()).rev() {
                    if !stands(world.posted[at].nic) {
                        assert!(world.apply(Do::Complete(at)));
                    }
                }
                silent += usize::from(world.posted.len() - held == goes);
                assert!(all || silent <= 1, "of {nics} these stand still: {still:b}");
            }
            let mut held: Vec<_> = world.posted.iter().map(|work| work.nic).collect();
            held.sort_unstable();
            // It may be that it was never one's turn.
            let each: Vec<_> = (0..nics).filter(|nic| still & 1 << nic != 0).collect();
            assert!(held == each || held.is_empty() && !all, "{held:?} of {each:?}");
        }
    }
}

/// All of our NICs but one may stand still, unreported: what is posted there does not end. Whichever it is, what is asked goes by it before the
/// peer is given up, of four; and so does an answer that is asked for as often.
#[test]
fn asks_and_answers_go_by_each_nic_in_turn() {
    for nics in 1..=4_u8 {
        let setup = Setup { nics, peers: 1, ..SMALL };
        let post = |world: &mut World| {
            let from = world.posted.len();
            for nic in 0..nics {
                while world.apply(Do::Post(nic)) {}
            }
            world.posted[from..].iter().map(|work| work.nic).collect::<Vec<_>>()
        };
        let each = |mut vias: Vec<u8>| {
            assert!(vias.len() >= usize::from(nics), "{vias:?} of {nics}");
            assert!(nics == 1 || vias.windows(2).all(|two| two[0] != two[1]), "{vias:?}");
            vias.truncate(usize::from(nics));
            vias.sort_unstable();
            assert_eq!(vias, (0..nics).collect::<Vec<_>>());
        };
        let mut asks = World::new(setup);
        assert!(asks.apply(Do::Break(0, nics - 1, 0)));
        let mut vias = Vec::new();
        while asks.live(0).is_some() {
            vias.extend(post(&mut asks));
            asks.apply(Do::Tick);
        }
        each(vias);
        let mut answers = World::new(setup);
        assert!(answers.apply(Do::Asked(0, 0, 0)));
        let mut vias = post(&mut answers);
        for _ in 0..nics {
            assert!(answers.apply(Do::AskedAgain(0, 0)));
            vias.extend(post(&mut answers));
        }
        each(vias);
    }
}

/// Of several heartbeats that go together any may be the only one that is heard: all say the same, and the next says what is new.
#[test]
fn heartbeats_that_go_together_say_the_same() {
    let said = |world: &mut World| {
        let from = world.posted.len();
        world.apply(Do::Beat(0));
        for nic in 0..world.setup.nics {
            while world.apply(Do::Post(nic)) {}
        }
        let words = world.posted[from..].iter().map(|work| work.imm.unwrap().bits());
        words.map(|bits| Control::decode(bits).unwrap().unwrap()).collect::<Vec<_>>()
    };
    let [none, some, stays] = [Usage::None, Usage::Some, Usage::Stays(7)].map(Control::Heartbeat);
    let mut world = World::new(Setup { nics: 4, peers: 1, ..SMALL });
    let peer = world.live(0).unwrap();
    assert_eq!(said(&mut world), [none]);
    let mut used = world.clone();
    used.group.peer_entry(peer).unwrap().paths.tell_use();
    assert_eq!(said(&mut used), [some; 3]);
    assert!(used.group.is_used(peer), "none need have been heard");
    while used.posted.len() > 1 {
        assert!(used.apply(Do::Complete(1)));
    }
    assert_eq!(said(&mut used), [none; 3]);
    assert!(!used.group.is_used(peer));
    let mut asked = world;
    asked.group.handle_parting(asked.now, peer, 7, true);
    assert_eq!(said(&mut asked), [stays; 3]);
    // What has gone on by now is not stuck.
    while !asked.posted.is_empty() {
        assert!(asked.apply(Do::Complete(0)));
    }
    assert_eq!(said(&mut asked), [none]);
}

/// Peers that take nothing hold every credit of every NIC, and every transfer slot. What keeps the connection
/// to another is posted all the same: one heartbeat, more if that is stuck, over all other NICs if there are some;
/// and the answer to what it asks. None of that is a transfer's, before or after.
#[test]
fn what_keeps_a_connection_needs_nothing_that_others_hold() {
    for (nics, queue_depth, reserve) in (1..=3)
        .flat_map(|nics| (1..=3).flat_map(move |depth| (0..depth).map(move |it| (nics, depth, it))))
    {
        let slots = usize::from(nics) * usize::from(queue_depth);
        let setup = Setup { nics, queue_depth, peer_depth: queue_depth, reserve, slots, ..SMALL };
        let mut world = World::new(setup);
        let peer = world.live(1).unwrap();
        while world.apply(Do::Submit(Kind::Imm, 0)) {}
        for nic in 0..nics {
            while world.apply(Do::Post(nic)) {}
        }
        assert_eq!((world.posted.len(), world.group.active()), (slots, slots));
        assert!(
            !world.apply(Do::Submit(Kind::Imm, 1))
                && !(0..nics).any(|nic| world.apply(Do::Post(nic)))
        );
        let stuck = world.clone();

        let mut vias = Vec::new();
        for goes in [1, usize::from(nics.max(2)) - 1] {
            assert!(world.apply(Do::Beat(1)) && !world.apply(Do::Beat(1)));
            assert_eq!((0..nics).filter(|nic| world.apply(Do::Post(*nic))).count(), goes);
            assert!(!(0..nics).any(|nic| world.apply(Do::Post(nic))));
            for work in &world.posted[world.posted.len() - goes..] {
                let beat = Imm::from_bits(Control::Heartbeat(Usage::None).encode());
                assert_eq!((work.peer, work.imm, work.len), (peer, Some(beat), 0));
                assert!(work.token.is_note());
                vias.push(work.nic);
            }
        }
        assert!(!world.apply(Do::Beat(1)), "one more than can be of use");
        vias.dedup();
        assert_eq!(vias, (0..nics).collect::<Vec<_>>());
        assert!(world.apply(Do::Asked(1, 0, 0)));
        assert_eq!((0..nics).filter(|nic| world.apply(Do::Post(*nic))).count(), 1);
        while world.posted.len() > slots {
            assert!(world.apply(Do::Complete(slots)));
        }
        assert_eq!(world.theirs[0].heard, Some(world.theirs[0].epoch));
        let credits = |world: &World| world.group.nics.map(|nic| nic.credits);
        assert_eq!(credits(&world), credits(&stuck));
        assert!(world.posted.iter().all(|work| work.peer != peer && !work.token.is_note()));
        assert!(world.apply(Do::Beat(1)), "the next may go");
    }
}

/// A heartbeat that did not arrive is posted again, and one that failed is the end of the peer.
#[test]
fn heartbeats_outlast_their_path() {
    let mut world = World::new(Setup { peers: 1, ..SMALL });
    let peer = world.live(0).unwrap();
    assert!(world.apply(Do::Beat(0)) && world.apply(Do::Post(0)));
    let first = world.posted[0];
    assert!(world.apply(Do::Break(0, 0, first.remote_nic)));
    assert!(world.group.has_work(1) && world.apply(Do::Post(1)), "the ask");
    assert!(world.apply(Do::Complete(0)) && world.apply(Do::Answer(0)));
    assert!(world.limbo.is_empty() && world.group.has_work(1));
    assert!(!world.apply(Do::Post(0)) && world.apply(Do::Post(1)), "the heartbeat, over another");
    let again = world.posted[0];
    let beat = |usage| Some(Imm::from_bits(Control::Heartbeat(usage).encode()));
    assert_eq!(first.imm, beat(Usage::None));
    assert_eq!(again.imm, beat(Usage::Some), "the first may have said so");
    assert_eq!(again.token, first.token);
    let before = world.group.clone();
    let nobodys = Token::of_note(Note::Beat, PeerId { generation: peer.generation + 1, ..peer });
    for (nic, token) in [(0, again.token), (1, nobodys)] {
        assert!(!world.group.handle_completion(world.now, nic, token, Ok(())));
        assert_eq!(world.group, before, "it is not in flight there");
    }
    assert!(world.apply(Do::Fail(0)));
    assert_eq!(world.group.peer_state(peer), None);
    world.group.beat(peer);
    assert!(!world.group.has_work(0) && !world.group.has_work(1));
}

/// A note that fails costs the connection. Why it did so is told as it was: that the peer went, or the connection was cut, is
/// no news of a path.
#[test]
fn what_a_failed_note_says_of_its_peer() {
    use WorkError::{
        Device, Flushed, LocalAccess, NoGpus, NotConnected, PeerGone, RemoteAccess, Unopened,
        Unpinned,
    };
    for error in [
        Flushed,
        PeerGone,
        RemoteAccess,
        LocalAccess,
        Unpinned,
        NoGpus,
        Unopened,
        NotConnected,
        Device(5),
    ] {
        let mut world = World::new(Setup { peers: 1, ..SMALL });
        let peer = world.live(0).unwrap();
        assert!(world.apply(Do::Beat(0)) && world.apply(Do::Post(0)));
        let note = world.posted[0];
        assert!(world.group.handle_completion(world.now, 0, note.token, Err(error)));
        let reason = match error {
            PeerGone | Flushed => DownReason::Disconnected,
            _ => DownReason::PathLost { nic: 0 },
        };
        assert_eq!(world.group.peer_state(peer), Some(PeerState::Down(reason)), "{error:?}");
    }
}

/// What this side lacks is said as that, with what to do; no device is blamed for it, nor the source.
#[test]
fn a_lack_of_ones_own_names_its_remedy() {
    for (error, remedies) in [
        (WorkError::Unpinned, &["log", "source in host memory"][..]),
        (WorkError::NoGpus, &["`gpus`"]),
        (WorkError::Unopened, &["`gpus`", "`ulimit -n`", "log"]),
        (WorkError::NotConnected, &["no peer access", "`nvidia-smi topo -p2p r`", "host memory"]),
    ] {
        let said = std::format!("{error}");
        for remedy in remedies {
            assert!(said.contains(remedy), "{said}");
        }
        assert!(!said.contains("device reported") && !said.contains("not registered"), "{said}");
    }
}

/// The peer does not hear of bytes without an immediate, so they are no sign of life to it.
#[test]
fn bytes_alone_do_not_stand_for_a_heartbeat() {
    let heartbeat = Duration::from_millis(2);
    let liveness = LivenessConfig { heartbeat, ..config(SMALL).liveness };
    for (kind, expected) in [(Kind::Split, 4), (Kind::Long, 2)] {
        let config = GroupConfig { liveness, ..config(SMALL) };
        let mut world = World::with(Setup { peers: 1, ..SMALL }, config);
        let peer = world.live(0).unwrap();
        world.apply(Do::Submit(kind, 0));
        world.apply(Do::Post(0));
        let announced = world.posted.iter().any(|work| work.imm.is_some());
        assert_eq!(announced, kind == Kind::Split);
        let mut first = None;
        while first.is_none() {
            world.now = world.group.poll_timeout();
            world.group.handle_timeout(world.now);
            first = world.group.poll_event();
        }
        assert_eq!(first, Some(Event::Heartbeat { peer }));
        assert_eq!(world.now.as_nanos(), expected * 1_000_000, "{kind:?}");
    }
}

/// Whenever peers came, those within an eighth of an interval of each other are soon written to at one instant, and nobody
/// waits longer than the interval. What was posted since stands for a heartbeat, and none goes along with it.
#[test]
fn heartbeats_of_many_peers_go_together() {
    let ms = |count| Duration::from_millis(count);
    let liveness = LivenessConfig { heartbeat: ms(16), ..NEVER };
    let config = GroupConfig { liveness, ..config(SMALL) };
    let run = |came: [u64; 3], written: usize| {
        let mut world = World::with(Setup { peers: 3, ..SMALL }, config);
        let ids: Vec<_> = (0..3).map(|at| world.live(at).unwrap()).collect();
        for (at, slot) in world.group.peers.iter_mut().enumerate() {
            let entry = slot.entry.as_mut().unwrap();
            entry.machine.handle_sent(Time::ZERO.after(ms(came[at])));
            entry.sent = at < written;
        }
        let mut beats = [const { Vec::new() }; 3];
        world.group.next_timeout = Time::ZERO.after(ms(16));
        while world.now < Time::ZERO.after(ms(64)) {
            world.now = world.group.poll_timeout().max(world.now);
            world.group.handle_timeout(world.now);
            while let Some(event) = world.group.poll_event() {
                let Event::Heartbeat { peer } = event else { continue };
                let at = ids.iter().position(|id| *id == peer).unwrap();
                beats[at].push(world.now.as_nanos() / 1_000_000);
            }
        }
        beats
    };
    for (a, b) in (0..16).flat_map(|a| (0..16).map(move |b| (a, b))) {
        let beats = run([0, a, b], 0);
        for (beats, came) in beats.iter().zip([0, a, b]) {
            let mut last = came;
            for beat in beats {
                assert!((14..=16).contains(&(beat - last)), "{a} {b}: {beats:?}");
                last = *beat;
            }
        }
        if a <= 2 && b <= 2 {
            assert!(beats.iter().all(|it| *it == [16, 32, 48, 64]), "{a} {b}: {beats:?}");
        }
    }
    // The first look is at 16 ms, and finds who was written to.
    assert_eq!(run([0, 1, 2], 1), [vec![32, 48, 64], vec![17, 32, 48, 64], vec![17, 32, 48, 64]]);
    assert!(run([0, 1, 2], 3).iter().all(|it| *it == [32, 48, 64]));
}

/// One peer, over one NIC, that is asked to part after 7 ms.
fn idle_world() -> (World, PeerId) {
    let ms = Duration::from_millis;
    let liveness = LivenessConfig { heartbeat: ms(2), idle_after: ms(7), ..NEVER };
    let config = GroupConfig { liveness, ..config(SMALL) };
    let world = World::with(Setup { peers: 1, nics: 1, ..SMALL }, config);
    let peer = world.live(0).unwrap();
    (world, peer)
}

/// What the heartbeats of these milliseconds say. Each is in flight until the next goes.
fn beats(world: &mut World, times: core::ops::Range<u64>) -> Vec<Usage> {
    let (mut said, mut flying) = (Vec::new(), None::<WorkRequest>);
    let arrive = |world: &mut World, work: Option<WorkRequest>| {
        let token = work.map(|work| work.token);
        assert!(token.is_none_or(|it| world.group.handle_completion(world.now, 0, it, Ok(()))));
    };
    for now in times {
        world.now = Time::ZERO.after(Duration::from_millis(now));
        world.group.handle_timeout(world.now);
        while let Some(event) = world.group.poll_event() {
            let Event::Heartbeat { peer } = event else { continue };
            world.group.beat(peer);
            let work = world.group.poll_work(0).unwrap();
            arrive(world, flying.replace(work));
            match work.imm.and_then(|imm| Control::decode(imm.bits())) {
                Some(Ok(Control::Heartbeat(usage))) => said.push(usage),
                other => panic!("{other:?}"),
            }
        }
    }
    arrive(world, flying);
    said
}

/// What was submitted and has not ended, and what has completed, is use, whether the peer hears of it by itself or by the
/// next heartbeat; keeping the connection is none.
#[test]
fn a_peer_that_is_not_used_is_asked_to_part() {
    use Usage::{None, Over, Some};
    let (mut world, peer) = idle_world();
    assert_eq!(beats(&mut world, 0..7), [None; 3]);
    let mut heard = world.clone();
    assert_eq!(beats(&mut world, 7..11), [Over(1); 3]);
    heard.group.handle_heard(heard.now, peer, false);
    assert_eq!(beats(&mut heard, 7..8), [Over(1)], "a heartbeat is no use");

    let (mut world, _) = idle_world();
    assert_eq!(beats(&mut world, 0..6), [None; 2]);
    // It is used when that is looked at, whatever the time was when it came.
    world.group.handle_heard(Time::ZERO, peer, true);
    assert_eq!(beats(&mut world, 6..13), [None; 4]);
    assert_eq!(beats(&mut world, 13..14), [Over(1)]);

    // Bytes of which the peer hears nothing: in flight, completed, and no more.
    let (mut world, _) = idle_world();
    assert!(world.apply(Do::Submit(Kind::Long, 0)) && world.apply(Do::Post(0)));
    let piece = world.posted[0];
    assert_eq!(piece.imm, Option::None);
    assert_eq!(beats(&mut world, 0..20), [Some; 9]);
    world.group.handle_completion(world.now, 0, piece.token, Err(WorkError::LocalAccess));
    assert_eq!(beats(&mut world, 20..27), [Some, None, None, None]);
    assert_eq!(beats(&mut world, 27..28), [Over(1)]);

    // Not posted yet.
    let (mut world, _) = idle_world();
    assert!(world.apply(Do::Submit(Kind::Long, 0)));
    assert_eq!(beats(&mut world, 0..20), [Some; 9]);

    // What only the platform knows of.
    let (mut world, _) = idle_world();
    world.group.handle_used(peer);
    assert_eq!(beats(&mut world, 0..7), [Some, None, None]);
    let awaited = world.request(Kind::Long, 0).unwrap().check().unwrap();
    world.group.handle_awaited(&awaited);
    assert_eq!(beats(&mut world, 7..11), [Some, None]);
}

/// Nothing is written to a peer that is asked to part until it has said that it does not; when it does, nothing was.
#[test]
fn who_is_asked_to_part_is_not_written_to() {
    let (mut world, peer) = idle_world();
    beats(&mut world, 0..8);
    for kind in [Kind::Tiny, Kind::Split, Kind::Long, Kind::Imm] {
        let mut stays = world.clone();
        assert!(stays.apply(Do::Submit(kind, 0)), "{kind:?}");
        stays.apply(Do::Post(0));
        assert!(stays.posted.is_empty(), "{kind:?}");
        assert!(!stays.clone().apply(Do::Express(Kind::Tiny, 0)));
        let mut parts = stays.clone();
        // However often the clock is looked at.
        assert!(beats(&mut stays, 8..12).iter().all(|usage| *usage == Usage::Over(1)));
        // It may have written before it was asked, or answer what it was asked before.
        stays.group.handle_heard(stays.now, peer, true);
        stays.group.handle_stays(stays.now, peer, 0);
        assert!(!stays.apply(Do::Post(0)) && stays.posted.is_empty(), "{kind:?}");
        stays.group.handle_stays(stays.now, peer, 1);
        assert!(stays.apply(Do::Post(0)), "{kind:?}");

        parts.group.handle_disconnected(parts.now, peer, DownReason::Disconnected);
        let reason = DownReason::Idle;
        let told = core::iter::from_fn(|| parts.group.poll_event());
        let told: Vec<_> = told.filter(|event| !matches!(event, Event::Ended { .. })).collect();
        assert!(told.contains(&Event::Peer { peer, state: PeerState::Down(reason) }), "{told:?}");
    }
    world.apply(Do::Submit(Kind::Tiny, 0));
    world.group.handle_disconnected(world.now, peer, DownReason::Disconnected);
    let error = TransferError::PeerDown { peer, reason: DownReason::Idle };
    assert_eq!(end_of(&mut world.group), Some(End::NeverStarted { error }));
}

/// Who asks is let go if the connection is of no use here either; else it is told so.
#[test]
fn who_asks_to_part_is_told_if_it_is_used() {
    let stays = |world: &mut World, peer, round, used| {
        world.group.handle_parting(world.now, peer, round, used);
        assert_eq!(world.group.peer_state(peer), Some(PeerState::Up));
        let work = world.group.poll_work(0).unwrap();
        assert!(world.group.handle_completion(world.now, 0, work.token, Ok(())));
        let said = Control::Heartbeat(Usage::Stays(round)).encode();
        assert_eq!(work.imm.map(Imm::bits), Some(said));
    };
    let (world, peer) = idle_world();
    let mut used = world.clone();
    used.group.handle_used(peer);
    stays(&mut used, peer, 3, false);
    let mut submitted = world.clone();
    assert!(submitted.apply(Do::Submit(Kind::Imm, 0)));
    stays(&mut submitted, peer, 3, false);
    let mut done = world.clone();
    assert!(done.apply(Do::Submit(Kind::Imm, 0)) && done.apply(Do::Post(0)));
    assert!(done.apply(Do::Complete(0)));
    stays(&mut done, peer, 3, false);
    // What it was told once it is told again, used or not, and however late it asks.
    let mut told = world.clone();
    stays(&mut told, peer, 3, true);
    stays(&mut told, peer, 3, false);
    for late in [2, 0, 255, 3 + 129] {
        stays(&mut told, peer, late, false);
        stays(&mut told, peer, 3, false);
    }
    for next in [4, 3 + 128] {
        let mut told = told.clone();
        told.group.handle_parting(told.now, peer, next, false);
        assert_ne!(told.group.peer_state(peer), Some(PeerState::Up), "{next}");
    }
    // It has said that the connection was used, and need not have been heard.
    let mut said = world.clone();
    said.group.handle_used(peer);
    assert_eq!(beats(&mut said, 0..3), [Usage::Some]);
    assert!(said.group.is_used(peer));
    stays(&mut said, peer, 3, false);
    let mut said = world.clone();
    said.group.handle_used(peer);
    assert_eq!(beats(&mut said, 0..5), [Usage::Some, Usage::None]);
    assert!(!said.group.is_used(peer));
    said.group.handle_parting(said.now, peer, 3, false);
    assert_ne!(said.group.peer_state(peer), Some(PeerState::Up));

    let mut unused = world;
    unused.group.handle_parting(unused.now, peer, 3, false);
    let state = PeerState::Down(DownReason::Idle);
    let told: Vec<_> = core::iter::from_fn(|| unused.group.poll_event()).collect();
    assert_eq!(told, [Event::Disconnect { peer }, Event::Peer { peer, state }]);
}

/// A list of six pages that forgets the last ones once it was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Fickle(std::rc::Rc<core::cell::Cell<usize>>);

impl Fickle {
    fn new() -> Self {
        Self(std::rc::Rc::new(core::cell::Cell::new(6)))
    }
}

impl PageList for Fickle {
    fn len(&self) -> usize {
        6
    }
    fn get(&self, i: usize) -> Option<u64> {
        (i < self.0.get()).then_some(0)
    }
    fn max(&self) -> Option<u64> {
        Some(0)
    }
}

/// Whichever side forgets whatever number of its pages after whatever piece, and however many are a piece: no
/// more is posted, what was posted cannot be read where it is missing, and the transfer ends.
#[test]
fn a_list_that_changes_ends_its_transfer() {
    let cases = (0..6).flat_map(|left| (0..4).map(move |after| (left, after)));
    for ((left, after), (side, pages_per_piece)) in
        cases.flat_map(|case| (0..2).flat_map(move |side| [1, 2, 4].map(|n| (case, (side, n)))))
    {
        let setup = Setup { peer_depth: 8, queue_depth: 8, ..SMALL };
        let setup = Setup { max_message: 16, pages_per_piece, ..setup };
        let mut group = DomainGroup::<Fickle, Targets, _, _>::new(
            config(setup),
            &[NicConfig { state: GOOD_NIC, queue_depth: 8, takes: PieceLimits::ANY }],
            [const { TransferSlot::new() }; 1],
            [const { PeerSlot::new() }; 1],
        )
        .unwrap();
        let peer = group.accept_peer(Time::ZERO, engine(0), &answer(0, &[GOOD_NIC])).unwrap();
        let lists = [Fickle::new(), Fickle::new()];
        let pages = |side: usize| Pages { indices: lists[side].clone(), stride: 2, offset: 0 };
        let write = PagedWrite {
            peer,
            page_bytes: 2,
            src: source(),
            src_pages: pages(0),
            dst: region(engine(0), DST),
            dst_pages: pages(1),
            imm: None,
        };
        let options = Options { deadline: Time::NEVER, user: 0 };
        group.submit(Request::Paged(write).check().unwrap(), options).unwrap();
        let mut posted: Vec<_> = core::iter::from_fn(|| group.poll_work(0)).take(after).collect();
        lists[side].0.set(left);
        if left % 2 == 0 {
            posted.extend(core::iter::from_fn(|| group.poll_work(0)));
        } else {
            group.poll_batch(0, usize::MAX, u64::MAX, |work| posted.push(work));
        }
        let all = posted.iter().map(|work| work.len / 2).sum::<u64>() == 6;
        let end = |work: &WorkRequest| (work.run.first + work.run.count) as usize;
        for (n, work) in posted.iter().enumerate() {
            let read = group.page_run(work, &mut [0; 4], &mut [0; 4]).is_some();
            assert_eq!(read, pages_per_piece > 1 && end(work) <= left);
            assert!(n < after || pages_per_piece == 1 || read, "posted what is not there");
        }
        for work in &posted {
            assert!(group.handle_completion(Time::ZERO, 0, work.token, Ok(())));
            let read = group.page_run(work, &mut [0; 4], &mut [0; 4]);
            assert!(read.is_none() || group.active() > 0);
        }
        let error = TransferError::ListChanged;
        let wanted = match posted.len() {
            _ if all => End::Done,
            0 => End::NeverStarted { error },
            _ => End::Quiesced { error },
        };
        assert_eq!(core::iter::from_fn(|| group.poll_event()).find_map(ended), Some(wanted));
        assert_eq!(group.active(), 0);
    }
}

/// A transfer that is stopped in the middle of posting has as long to end as one that its caller stops, however old the group is.
#[test]
fn time_runs_from_the_stop_not_from_the_beginning() {
    let setup = Setup { peer_depth: 8, queue_depth: 8, ..SMALL };
    let mut group = DomainGroup::<Fickle, Targets, _, _>::new(
        config(setup),
        &[NicConfig { state: GOOD_NIC, queue_depth: 8, takes: PieceLimits::ANY }],
        [const { TransferSlot::new() }; 1],
        [const { PeerSlot::new() }; 1],
    )
    .unwrap();
    let peer = group.accept_peer(Time::ZERO, engine(0), &answer(0, &[GOOD_NIC])).unwrap();
    let (mine, theirs) = (Fickle::new(), Fickle::new());
    let write = PagedWrite {
        peer,
        page_bytes: 2,
        src: source(),
        src_pages: Pages { indices: mine.clone(), stride: 2, offset: 0 },
        dst: region(engine(0), DST),
        dst_pages: Pages { indices: theirs, stride: 2, offset: 0 },
        imm: None,
    };
    let options = Options { deadline: Time::NEVER, user: 0 };
    group.submit(Request::Paged(write).check().unwrap(), options).unwrap();
    let (first, _second) = (group.poll_work(0).unwrap(), group.poll_work(0).unwrap());
    mine.0.set(0);
    assert_eq!(group.poll_work(0), None);
    let mut now = Time::ZERO.after(DRAIN * 10);
    assert!(group.poll_timeout() <= now);
    let abort_at = |group: &mut DomainGroup<Fickle, Targets, _, _>, now| {
        group.handle_timeout(now);
        core::iter::from_fn(|| group.poll_event()).any(|it| matches!(it, Event::Abort { .. }))
    };
    assert!(!abort_at(&mut group, now), "no time has passed");
    assert_eq!(group.poll_timeout(), now.after(DRAIN));
    now = now.after(DRAIN / 2);
    assert!(group.handle_completion(now, 0, first.token, Ok(())));
    now = now.after(DRAIN / 2);
    assert!(!abort_at(&mut group, now), "the peer took something meanwhile");
    let again = group.poll_timeout();
    assert!(again >= now.after(DRAIN) && abort_at(&mut group, again));
}

/// Neither between its last completion and the poll of its end, nor when its slot has another tenant.
#[test]
fn a_run_of_an_ended_transfer_is_not_read() {
    let one = Setup { nics: 1, peer_nics: 1, peers: 1, slots: 1, ..SMALL };
    let setup = Setup { pages_per_piece: 8, max_message: 16, ..one };
    let mut world = World::new(setup);
    let many = world.request(Kind::Many, 0).unwrap();
    submit(&mut world, many.clone());
    let first = world.group.poll_work(0).unwrap();
    assert_eq!(first.run, PageRun { first: 0, count: 5 });
    let (mut src, mut dst) = ([0; 5], [0; 5]);
    let mut read = |group: &Group, work| group.page_run(work, &mut src, &mut dst).is_some();
    assert!(read(&world.group, &first));
    let nobody = WorkRequest { token: Token::from_bits(u64::MAX), ..first };
    assert!(!read(&world.group, &nobody));
    // Stopped, it is in flight still.
    world.group.cancel(world.now, first.token.transfer());
    assert!(read(&world.group, &first));
    assert!(world.group.handle_completion(world.now, 0, first.token, Ok(())));
    assert!(!read(&world.group, &first));
    while world.group.poll_event().is_some() {}
    submit(&mut world, many);
    assert!(!read(&world.group, &first), "of another transfer");
    let second = world.group.poll_work(0).unwrap();
    assert_ne!(first.token, second.token);
    assert!(read(&world.group, &second) && !read(&world.group, &first));
}

#[test]
fn a_group_that_cannot_work_is_not_made() {
    let nic = NicConfig { state: GOOD_NIC, queue_depth: 2, takes: PieceLimits::ANY };
    let new = |nics: &[NicConfig], slots: usize, peers: usize, setup| {
        let (slots, peers) = (vec![Slot::new(); slots], vec![PeerSlot::new(); peers]);
        DomainGroup::new(config(setup), nics, slots, peers).err()
    };
    let reserve = |reserve, peer_depth| Setup { reserve, peer_depth, ..SMALL };
    assert_eq!(new(&[nic], 1, 1, SMALL), None);
    assert_eq!(new(&[nic; 8], 1, 1, SMALL), None);
    assert_eq!(new(&[], 1, 1, SMALL), Some(ConfigError::NicCount { found: 0 }));
    assert_eq!(new(&[nic; 9], 1, 1, SMALL), Some(ConfigError::NicCount { found: 9 }));
    assert_eq!(new(&[nic], 0, 1, SMALL), Some(ConfigError::Capacity { found: 0 }));
    assert_eq!(new(&[nic], 1, 0, SMALL), Some(ConfigError::Capacity { found: 0 }));
    let most = usize::from(NIL);
    assert_eq!(new(&[nic], 1, most, SMALL), None);
    assert_eq!(new(&[nic], 1, most + 1, SMALL), Some(ConfigError::Capacity { found: most + 1 }));
    let too_large = |reserve, depth| Some(ConfigError::ReserveTooLarge { reserve, depth });
    assert_eq!(new(&[nic], 1, 1, reserve(2, 9)), too_large(2, 2));
    assert_eq!(new(&[nic], 1, 1, reserve(1, 1)), too_large(1, 1));
    assert_eq!(new(&[nic], 1, 1, reserve(0, 0)), too_large(0, 0));
}

// ---- who goes next ----

/// One NIC for two peers, with room for many transfers.
fn busy(slots: usize, queue_depth: u16, peer_depth: u16) -> World {
    World::new(busy_setup(slots, queue_depth, peer_depth))
}

const fn busy_setup(slots: usize, queue_depth: u16, peer_depth: u16) -> Setup {
    let max_message = 1 << 20;
    Setup { nics: 1, peer_nics: 1, slots, queue_depth, peer_depth, max_message, ..SMALL }
}

/// `count` pages of `page_bytes` that do not merge.
fn pages(world: &mut World, peer: u16, count: u64, page_bytes: u64) -> TransferId {
    let pages = || Pages {
        indices: Numbers((0..count).map(|page| page * 7919 % count).collect()),
        stride: page_bytes + 64,
        offset: 0,
    };
    let request = Request::Paged(PagedWrite {
        peer: world.live(peer).unwrap(),
        page_bytes,
        src: source(),
        src_pages: pages(),
        dst: region(engine(peer), DST),
        dst_pages: pages(),
        imm: None,
    });
    submit(world, request)
}

fn submit(world: &mut World, request: Asked) -> TransferId {
    let options = Options { deadline: Time::NEVER, user: 0 };
    world.group.submit(request.check().unwrap(), options).unwrap()
}

fn tiny(world: &mut World, peer: u16) -> TransferId {
    let request = world.request(Kind::Tiny, peer).unwrap();
    submit(world, request)
}

fn completed(world: &mut World, work: &WorkRequest) {
    assert!(world.group.handle_completion(world.now, 0, work.token, Ok(())));
    while world.group.poll_event().is_some() {}
}

/// However many pages are queued, a small write is the next to go, and finds a credit.
#[test]
fn a_batch_is_what_single_pieces_are() {
    // Turns that end within a run, credits of the peer and of the NIC that do, pages that merge.
    let menu = [(8, 4, 1 << 10), (8, 8, 64 << 10), (64, 5, 64 << 10), (64, 64, 256 << 10)];
    for ((queue, peer_depth, page_bytes), transfers, pages_per_piece) in menu
        .into_iter()
        .flat_map(|shape| (1..4).flat_map(move |n| [1, 2, 5].map(|runs| (shape, n, runs))))
    {
        // Turns of one page, of a few, and of all.
        let turns = [1, 5 * page_bytes, 1 << 30];
        let turn_bytes = turns[transfers as usize % turns.len()];
        let setup = Setup { pages_per_piece, ..busy_setup(8, queue, peer_depth) };
        let mut world = World::with(setup, GroupConfig { turn_bytes, ..config(setup) });
        for n in 0..transfers {
            pages(&mut world, n % 2, 7 + u64::from(n), page_bytes);
        }
        let mut flight = vec![];
        for bytes in [1, page_bytes, 3 * page_bytes, u64::MAX] {
            for pieces in [1, 2, 3, 5, usize::MAX] {
                world.check_batch(0, pieces, bytes);
            }
            flight.extend(world.group.poll_work(0));
        }
        assert!(!flight.is_empty());
        tiny(&mut world, 0);
        world.check_batch(0, usize::MAX, u64::MAX);
    }
}

/// Small writes to two peers, one of which has few credits, behind pages, more of them than are posted before
/// it is the pages' turn.
#[test]
fn a_batch_of_small_writes_leaves_pages_their_turn() {
    for (queue_depth, peer_depth) in [(64, 64), (64, 20), (40, 64), (21, 20)] {
        let mut world = busy(64, queue_depth, peer_depth);
        for n in 0..50 {
            if n % 20 == 0 {
                pages(&mut world, n % 2, 3, 4096);
            }
            tiny(&mut world, u16::from(n % 3 == 0));
        }
        for pieces in [1, 2, usize::from(LATENCY_BURST), 17, 18, 40, usize::MAX] {
            world.check_batch(0, pieces, u64::MAX);
            world.check_batch(0, usize::MAX, pieces as u64);
        }
        let mut flight = std::collections::VecDeque::new();
        while world.group.active() > 0 {
            world.check_batch(0, usize::MAX, u64::MAX);
            flight.extend(core::iter::from_fn(|| world.group.poll_work(0)).take(5));
            let work = flight.pop_front().expect("something is in flight");
            completed(&mut world, &work);
        }
    }
}

#[test]
fn pages_do_not_delay_a_small_write() {
    let mut world = busy(8, 16, 16);
    pages(&mut world, 0, 40_000, 4096);
    let mut flight = std::collections::VecDeque::new();
    let mut posted = 0;
    loop {
        flight.extend(core::iter::from_fn(|| world.group.poll_work(0)));
        if posted == 0 {
            assert_eq!(flight.len(), 15, "bulk leaves the reserve alone");
        }
        if posted % 100 == 0 {
            let id = tiny(&mut world, 0);
            let next = world.group.poll_work(0).expect("held up by pages");
            assert_eq!(next.token.transfer(), id);
            completed(&mut world, &next);
        }
        let Some(work) = flight.pop_front() else {
            break;
        };
        completed(&mut world, &work);
        posted += 1;
    }
    assert_eq!((posted, world.group.active()), (40_000, 0));
}

/// Two transfers of unlike pages stay within a turn, and a piece, of each other.
#[test]
fn transfers_take_turns_by_bytes() {
    let setup = Setup {
        nics: 1,
        peer_nics: 1,
        slots: 3,
        queue_depth: 4,
        peer_depth: 4,
        max_message: 1 << 20,
        ..SMALL
    };
    let turn_bytes = 256 << 10;
    let mut world = World::with(setup, GroupConfig { turn_bytes, ..config(setup) });
    let first = pages(&mut world, 0, 64, 64 << 10);
    pages(&mut world, 1, 1024, 4 << 10);
    let (mut a, mut b) = (0_u64, 0_u64);
    loop {
        // A small write between any two pages takes nobody's turn.
        let id = tiny(&mut world, 0);
        let small = world.group.poll_work(0).unwrap();
        assert_eq!(small.token.transfer(), id);
        completed(&mut world, &small);
        let Some(work) = world.group.poll_work(0) else {
            break;
        };
        *(if work.token.transfer() == first { &mut a } else { &mut b }) += work.len;
        assert!(a.abs_diff(b) <= turn_bytes + (64 << 10), "{a} against {b}");
        completed(&mut world, &work);
    }
    assert_eq!((a, b), (4 << 20, 4 << 20));
}

/// Where each transfer stands on NIC 0.
fn places(world: &mut World) -> Vec<Option<Place>> {
    let slots = world.group.transfers.iter_mut();
    slots.map(|slot| slot.active().map(|active| active.place[0])).collect()
}

/// A thousand transfers that wait for one peer cost another's nothing, and wait their turn at the
/// price of one step for each credit.
#[test]
fn a_slow_peer_holds_up_only_its_own() {
    let mut world = busy(1_001, 64, 4);
    for _ in 0..1_000 {
        pages(&mut world, 0, 2, 4096);
    }
    let mut slow: Vec<WorkRequest> = core::iter::from_fn(|| world.group.poll_work(0)).collect();
    assert_eq!(slow.len(), 3, "the quota of bulk");
    assert!(!world.group.has_work(0), "whoever waits for the peer is not in the way");
    for _ in 0..1_000 {
        let id = tiny(&mut world, 1);
        let next = world.group.poll_work(0).expect("held up by another peer's");
        assert_eq!(next.token.transfer(), id);
        completed(&mut world, &next);
    }
    let mut served = HashSet::new();
    for _ in 0..1_000 {
        let before = places(&mut world);
        let work = slow.remove(0);
        completed(&mut world, &work);
        slow.push(world.group.poll_work(0).expect("a credit came back"));
        assert_eq!(world.group.poll_work(0), None);
        served.insert(slow[slow.len() - 1].token.transfer().index);
        let after = places(&mut world);
        let moved = before.iter().zip(&after).filter(|(before, after)| before != after);
        assert!(moved.count() <= 3, "one returns, one leaves");
    }
    assert!(served.len() > 990, "in turn: {}", served.len());
}

/// Small writes without end, to the very peer: bulk still gets its share, with and without competition
/// from bulk to another peer, whichever credits run out first.
#[test]
fn a_flood_of_small_writes_does_not_starve_bulk() {
    for (queue_depth, peer_depth) in [(4, 64), (64, 4), (4, 4)] {
        for competition in [false, true] {
            let mut world = busy(64, queue_depth, peer_depth);
            let starved = pages(&mut world, 0, 500, 4096);
            if competition {
                pages(&mut world, 1, 40_000, 4096);
            }
            let mut flight = std::collections::VecDeque::new();
            let (mut bulk, mut small) = (0, 0);
            while bulk < 500 {
                while world.group.active() < 60 {
                    tiny(&mut world, 0);
                }
                flight.extend(core::iter::from_fn(|| world.group.poll_work(0)));
                let work: WorkRequest = flight.pop_front().unwrap();
                bulk += usize::from(work.token.transfer() == starved);
                small += usize::from(work.len == 2);
                let share = (bulk + 1) * (2 * usize::from(LATENCY_BURST) + 2) + 64;
                assert!(small <= share, "{bulk} of bulk, {small} small ones");
                completed(&mut world, &work);
            }
        }
    }
}

/// Bulk never holds the credits kept for small writes, even when small writes come first.
#[test]
fn bulk_does_not_creep_into_the_reserve() {
    let mut world = busy(64, 8, 64);
    pages(&mut world, 0, 40_000, 4096);
    for _ in 0..1_000 {
        let id = tiny(&mut world, 1);
        // Pages never complete, small writes at once.
        let posted: Vec<WorkRequest> = core::iter::from_fn(|| world.group.poll_work(0)).collect();
        let small = posted.iter().find(|work| work.token.transfer() == id);
        completed(&mut world, small.expect("no credit left"));
    }
    assert_eq!(world.group.nics[0].credits.bulk, 7);
}

/// A small write to an idle peer goes at once; behind another small one, or without a credit, never.
#[test]
fn an_express_write_passes_nobody_of_its_kind() {
    let mut world = busy(64, 8, 4);
    world.now = DUE;
    let express = Do::Express(Kind::Tiny, 0);
    assert!(world.apply(express));
    pages(&mut world, 0, 100, 4096);
    assert!(world.step(express), "bulk is no obstacle");
    let waiting = tiny(&mut world, 1);
    assert!(!world.step(express), "a small write was there before");
    let next = world.group.poll_work(0).unwrap();
    assert_eq!(next.token.transfer(), waiting);
    assert!(world.step(express) && world.step(express));
    assert!(!world.step(express), "the peer's credits are used up");
}
