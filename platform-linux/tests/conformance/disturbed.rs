//! Each fault of a network or a peer, under each operation: what can end, ends as it should; what was counted was written;
//! nothing is counted twice.
//!
//! Each transfer has places of its own. When all have been written they are looked at, each byte of them, and what is
//! written next is other bytes: so nothing that a fault has lost, or put elsewhere, is made good by what comes later.
//!
//! For NICs that can be disturbed: those of `verification/rdma-guest`, of which there must be four. We have two of them,
//! and our two peers the others, so that all goes over the network.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use immwire::{
    End, ImmTag, MrDesc, PagedWrite, Pages, PeerGroup, PeerId, PeerState, ScatterWrite, Target,
    Transfer,
};
use rustix::process::Signal;

use crate::agent::{Agent, Ask};
use crate::host::{Host, Memory, Own, Pattern, Setup, names, patience};
use crate::operations::write;
use crate::ports::{APART, Port};
use crate::{Case, Spread, Test};

macro_rules! tests {
    ($($fault:ident: $single:literal $pages:literal $scatter:literal $barrier:literal;)*) => {
        &[$(
            ($single, Spread::TwoNics, |case| run(case, Fault::$fault, Op::Single)),
            ($pages, Spread::TwoNics, |case| run(case, Fault::$fault, Op::Pages)),
            ($scatter, Spread::TwoNics, |case| run(case, Fault::$fault, Op::Scatter)),
            ($barrier, Spread::TwoNics, |case| run(case, Fault::$fault, Op::Barrier)),
        )*]
    };
}

pub const TESTS: &[Test] = tests! {
    Loss: "loss_under_writes" "loss_under_pages" "loss_under_scatters" "loss_under_barriers";
    Delay: "delay_under_writes" "delay_under_pages" "delay_under_scatters" "delay_under_barriers";
    Steady: "steady_delay_under_writes" "steady_delay_under_pages" "steady_delay_under_scatters" "steady_delay_under_barriers";
    Jitter: "jitter_under_writes" "jitter_under_pages" "jitter_under_scatters" "jitter_under_barriers";
    Reorder: "reorder_under_writes" "reorder_under_pages" "reorder_under_scatters" "reorder_under_barriers";
    Port: "port_down_under_writes" "port_down_under_pages" "port_down_under_scatters" "port_down_under_barriers";
    Kill: "kill_under_writes" "kill_under_pages" "kill_under_scatters" "kill_under_barriers";
    Removal: "removal_under_writes" "removal_under_pages" "removal_under_scatters" "removal_under_barriers";
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Loss,
    /// One that varies, by which most packets come before others that were sent earlier: all is to be done all the same. A queue pair takes
    /// packets in order only, and gives up after some that are not on end.
    Delay,
    /// One that does not.
    Steady,
    /// The first one again, where it is asked only that what ends other than done does so as it may: paths may break, all of them at once, too.
    Jitter,
    Reorder,
    /// A port goes down, and up again.
    Port,
    /// One of two peers.
    Kill,
    /// A device is removed, which Linux does to one of this kind when nobody uses it any more.
    Removal,
}

impl Fault {
    /// What tc-netem(8) is told, if that makes the fault.
    const fn netem(self) -> Option<&'static str> {
        match self {
            Self::Loss => Some("loss 1%"),
            Self::Delay | Self::Jitter => Some("delay 10ms 3ms"),
            Self::Steady => Some("delay 10ms"),
            Self::Reorder => Some("delay 5ms reorder 75% 50%"),
            Self::Port | Self::Kill | Self::Removal => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    /// A write to each peer.
    Single,
    Pages,
    Scatter,
    Barrier,
}

const PAGES: u32 = 64;
const PAGE: u64 = 4096;
const BYTES: u64 = PAGES as u64 * PAGE;
/// The guest's devices.
const ALL: [u8; 4] = [0, 1, 2, 3];
/// Transfers under way.
const DEPTH: usize = 8;
/// Places at each peer, each for one transfer between two looks.
const PLACES: u64 = 2 * DEPTH as u64;
/// How long all is well, how long it is disturbed, and how long it has to be well again.
const BEFORE: Duration = Duration::from_millis(500);
const DISTURBED: Duration = Duration::from_secs(3);
const AFTER: Duration = Duration::from_secs(2);

/// A peer, and what is written there.
struct There {
    agent: Agent,
    peer: PeerId,
    desc: MrDesc,
    region: usize,
    counter: usize,
    tag: ImmTag,
}

/// How a transfer may end other than done.
#[derive(Clone, Copy)]
enum OrElse {
    Nothing,
    /// For this peer's sake.
    Gone(PeerId),
    /// For the sake of any of its peers.
    Broken,
}

/// A transfer that is under way, to whom it is, and the place that it has there.
struct Flying {
    transfer: Transfer,
    peers: Vec<usize>,
    place: u64,
}

struct Work {
    case: Case,
    me: Host,
    src: Memory,
    op: Op,
    flying: VecDeque<Flying>,
    /// How often all has been looked at, and the bytes that are written since.
    looks: u64,
    pattern: Pattern,
    /// The place of the next transfer; those before it are taken.
    place: u64,
    /// By peer: places that have been written since the last look.
    written: Vec<Vec<u64>>,
    /// By peer: what the transfers to it will have counted, of those that were submitted; of those that are done; and of
    /// those whose bytes were looked at.
    submitted: Vec<u64>,
    done: Vec<u64>,
    counted: Vec<u64>,
    /// How many have ended other than done.
    ended_else: u32,
}

/// What a transfer of this kind counts at each of its peers.
const fn counts(op: Op) -> u64 {
    match op {
        Op::Pages => PAGES as u64,
        Op::Single | Op::Scatter | Op::Barrier => 1,
    }
}

impl Work {
    fn new(case: &Case, me: Host, op: Op) -> Self {
        let src = me.memory(PLACES * BYTES, Own::Engine);
        let pattern = case.pattern(0);
        pattern.fill(&src, 0, PLACES * BYTES, 0);
        Self {
            case: *case,
            me,
            src,
            op,
            flying: VecDeque::new(),
            looks: 0,
            pattern,
            place: 0,
            written: vec![Vec::new(); 2],
            submitted: vec![0; 2],
            done: vec![0; 2],
            counted: vec![0; 2],
            ended_else: 0,
        }
    }

    /// Submits one transfer, or one to each, to those of the peers that are `wanted`.
    fn submit(&mut self, all: &[There], wanted: &[usize]) {
        let (place, offset) = (self.place, self.place * BYTES);
        let to: Vec<&There> = wanted.iter().map(|&at| &all[at]).collect();
        let tag = all[0].tag;
        let engine = &self.me.engine;
        let list = |by: u32| (0..PAGES).map(|i| i * by % PAGES).collect::<Vec<_>>();
        let pages = |by| Pages { indices: list(by).into(), stride: PAGE, offset };
        let mut flying = Vec::new();
        match self.op {
            Op::Single => {
                for (there, &at) in to.iter().zip(wanted) {
                    let range = (offset, offset, BYTES);
                    let transfer =
                        write(&self.me, there.peer, &self.src, &there.desc, range, Some(tag));
                    flying.push(Flying { transfer, peers: vec![at], place });
                }
            }
            Op::Pages => {
                for (there, &at) in to.iter().zip(wanted) {
                    let write = PagedWrite {
                        peer: there.peer,
                        page_bytes: PAGE,
                        src: &self.src,
                        src_pages: pages(11),
                        dst: &there.desc,
                        dst_pages: pages(11),
                        imm: Some(tag),
                    };
                    let transfer = engine.submit_paged_writes(&write).expect("submit");
                    flying.push(Flying { transfer, peers: vec![at], place });
                }
            }
            Op::Scatter => {
                let target = |there: &&There| Target {
                    peer: there.peer,
                    src_offset: offset,
                    dst: there.desc,
                    dst_offset: offset,
                    len: BYTES,
                };
                let targets: Arc<[Target]> = to.iter().map(target).collect();
                let write = ScatterWrite { src: &self.src, targets, imm: Some(tag) };
                let transfer = engine.submit_scatter(&write).expect("submit");
                flying.push(Flying { transfer, peers: wanted.to_vec(), place });
            }
            Op::Barrier => {
                let peers: Vec<PeerId> = to.iter().map(|there| there.peer).collect();
                let group: PeerGroup = engine.add_peer_group(&peers);
                let transfer = engine.submit_barrier(&group, tag).expect("submit");
                flying.push(Flying { transfer, peers: wanted.to_vec(), place });
            }
        }
        for &at in flying.iter().flat_map(|it| &it.peers) {
            self.submitted[at] += counts(self.op);
        }
        self.flying.extend(flying);
        self.place += 1;
    }

    /// The end of the transfer that was submitted first: it is done, or it names a peer that it may name.
    fn end_first(&mut self, all: &[There], or_else: OrElse) {
        let Some(Flying { transfer, peers, place }) = self.flying.pop_front() else { return };
        let end = self.me.end(&transfer);
        if end == End::Done {
            for at in peers {
                self.done[at] += counts(self.op);
                self.written[at].push(place);
            }
        } else {
            let may_name = match or_else {
                OrElse::Nothing => false,
                OrElse::Gone(peer) => names(end, peer),
                OrElse::Broken => peers.iter().any(|&at| names(end, all[at].peer)),
            };
            assert!(may_name, "{end:?}");
            self.ended_else += 1;
        }
    }

    /// The end of all that is under way. What was done was counted at those of the peers that are `there`, and each byte of it
    /// is where it belongs; from now on all places are free, and other bytes are written.
    fn look(&mut self, all: &mut [There], there: &[usize], or_else: OrElse) {
        self.finish(all, or_else);
        for &at in there {
            let There { agent, region, counter, .. } = &mut all[at];
            // One that ended for another's sake may have written here, and counted, or not.
            let fresh = self.done[at] - self.counted[at];
            if fresh > 0 {
                agent.count(&self.me, *counter, fresh);
            }
            self.counted[at] = self.done[at];
            for place in std::mem::take(&mut self.written[at]) {
                if self.op != Op::Barrier {
                    let (region, offset, pattern) = (*region, place * BYTES, self.pattern);
                    let ask = Ask::Mismatch { region, offset, len: BYTES, pattern, at: offset };
                    let wrong = agent.place(&self.me, ask);
                    assert_eq!(wrong, None, "the first wrong byte of place {place}, peer {at}");
                }
            }
        }
        self.looks += 1;
        self.pattern = self.case.pattern(self.looks);
        self.pattern.fill(&self.src, 0, PLACES * BYTES, 0);
        self.place = 0;
    }

    fn go_on(&mut self, all: &mut [There], peers: &[usize], or_else: OrElse, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            if self.place == PLACES {
                self.look(all, peers, or_else);
            }
            // Where paths may break, peers may be down for it.
            let is_wanted = |&at: &usize| {
                !matches!(or_else, OrElse::Broken)
                    || self.me.engine.peer_state(all[at].peer) == Some(PeerState::Up)
            };
            let wanted: Vec<usize> = peers.iter().copied().filter(is_wanted).collect();
            if wanted.is_empty() {
                return;
            }
            self.submit(all, &wanted);
            while self.flying.len() > DEPTH {
                self.end_first(all, or_else);
            }
        }
    }

    fn finish(&mut self, all: &[There], or_else: OrElse) {
        while !self.flying.is_empty() {
            self.end_first(all, or_else);
        }
    }
}

fn meet(case: &Case, me: &Host, setup: &Setup, name: &str) -> There {
    let mut agent = case.bare_agent(name);
    let address = agent.build(setup);
    let peer = me.peer(&address);
    let (region, desc) = agent.memory(me, PLACES * BYTES, Own::Engine);
    // The first counter of each: the tags are the same.
    let (counter, tag) = agent.counter(me);
    There { agent, peer, desc, region, counter, tag }
}

fn run(case: &Case, fault: Fault, op: Op) {
    // What is in flight when a port goes down is settled when the device has given up, some seconds later.
    let [mine, theirs] = APART.map(|names| {
        let devices = names.iter().map(|&name| name.to_owned()).collect();
        Setup { drain_ms: 10_000, devices, ..case.setup(2) }
    });
    let me = Host::new(&mine);
    let mut all = [meet(case, &me, &theirs, "one"), meet(case, &me, &theirs, "two")];
    assert_eq!(all[0].tag, all[1].tag);
    let both = [0, 1];
    let mut work = Work::new(case, me, op);
    work.go_on(&mut all, &both, OrElse::Nothing, BEFORE);
    let gone = all[1].peer;
    let mut removal = None;
    let or_else = if fault == Fault::Jitter { OrElse::Broken } else { OrElse::Nothing };
    match fault {
        Fault::Loss | Fault::Delay | Fault::Steady | Fault::Jitter | Fault::Reorder => {
            let netem = fault.netem().expect("it is netem's");
            for at in ALL {
                Port(at).set(&format!("netem {netem}"));
            }
            work.go_on(&mut all, &both, or_else, DISTURBED);
            for at in ALL {
                Port(at).set("netem");
            }
            work.go_on(&mut all, &both, or_else, AFTER);
        }
        Fault::Port => {
            Port(1).set("down");
            work.go_on(&mut all, &both, or_else, DISTURBED);
            Port(1).set("up");
            work.go_on(&mut all, &both, or_else, AFTER);
        }
        Fault::Kill => {
            all[1].agent.signal(Signal::KILL);
            let (killed, soon) = (Instant::now(), case.soon() + Duration::from_secs(4));
            work.finish(&all, OrElse::Gone(gone));
            let state = work.me.peer_down(gone, soon);
            assert!(matches!(state, Some(PeerState::Down(_))), "{state:?}");
            assert!(killed.elapsed() < soon, "took {:?}", killed.elapsed());
            work.go_on(&mut all, &both[..1], or_else, AFTER);
        }
        Fault::Removal => {
            removal = Some(Port(1).command("remove").spawn().expect("the guest's script"));
            work.go_on(&mut all, &both, or_else, DISTURBED);
        }
    }
    let survivors = if fault == Fault::Kill { 1 } else { 2 };
    work.look(&mut all, &both[..survivors], or_else);
    for (at, there) in all.iter_mut().take(survivors).enumerate() {
        let (submitted, done) = (work.submitted[at], work.done[at]);
        let more = there.agent.number(&work.me, Ask::Available { counter: there.counter });
        assert!(done > 0 && more <= submitted - done, "{more} more than {done} of {submitted}");
        let state = work.me.stands(there.peer);
        assert!(state == Some(PeerState::Up) || fault == Fault::Jitter, "{state:?}");
    }
    let (done, ended_else) = (&work.done, work.ended_else);
    println!(
        "{fault:?} {op:?}, seed {:#x}: {done:?} counted, {} looks, {ended_else} transfers ended other than done",
        case.seed, work.looks
    );
    drop((work, all));
    if let Some(mut removal) = removal {
        let start = Instant::now();
        let ended = loop {
            let ended = removal.try_wait().expect("a child");
            if ended.is_some() || start.elapsed() > patience() {
                break ended;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(ended.is_some_and(|status| status.success()), "something of it is still held");
        Port(1).set("add");
    }
}
