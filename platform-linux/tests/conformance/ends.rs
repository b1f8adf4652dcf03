//! After the end of a transfer its memory is the caller's: the source may be overwritten, and the
//! destination is not written any more.
//!
//! Each test fills the source with [`OLD`] and the destination with [`EMPTY`], starts a transfer long
//! enough to be caught on its way, and ends it in one of the ways there are. From then on nothing of
//! what the source is overwritten with ([`NEW`]) may come through, and what the destination is
//! overwritten with ([`CANARY`]) stays: at once, or, where a network may still hold something of a connection
//! that was cut, once the receiver has closed the region.

use std::time::{Duration, Instant};

use immwire::{
    End, MrDesc, PageIndices, PagedWrite, Pages, PeerId, Region, SubmitError, Transfer,
    TransferEngine, TransferError,
};
use rustix::process::Signal;

use crate::agent::{Agent, Ask, Write1, encode, plain};
use crate::host::{Host, Memory, Own, Setup, first_other, names, patience, poison};
use crate::operations::only_peer;
use crate::stalls::Stalls;
use crate::{Case, Place, Spread, Test, Way, foreign};

pub const TESTS: &[Test] = &[
    ("done_and_quiet", Spread::Places, |case| every_way(case, after_done)),
    ("cancelled_and_quiet", Spread::Places, |case| every_way(case, after_cancel)),
    ("cancelled_and_quiet_polled", Spread::ProcessesBothMotors, |case| {
        every_way(case, after_cancel);
    }),
    ("late_and_quiet", Spread::Places, |case| every_way(case, after_deadline)),
    ("peer_removed_and_quiet", Spread::Places, |case| every_way(case, after_remove)),
    ("stopped_and_quiet", Spread::Places, |case| every_way(case, after_shutdown)),
    ("stopped_and_quiet_polled", Spread::ProcessesBothMotors, |case| {
        every_way(case, after_shutdown);
    }),
    ("never_started_and_quiet", Spread::Places, |case| every_way(case, never_started)),
    ("killed_and_quiet", Spread::Processes, |case| every_way(case, after_kill)),
    ("receiver_stopped_and_quiet", Spread::Places, |case| every_way(case, receiver_stopped)),
    ("receiver_stopped_without_a_drain_and_quiet", Spread::Places, |case| {
        every_way(case, receiver_stopped_without_a_drain);
    }),
];

const OLD: u8 = 0x11;
const EMPTY: u8 = 0xcc;
const NEW: u8 = 0xee;
const CANARY: u8 = 0xdd;
/// Bytes of both regions.
const SIZE: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// So many long transfers take a second, where GPUs are at it, and many seconds else; they have turns, so that none is done long before the last.
const MANY: usize = 100;
/// How long something that must not happen is waited for.
const WATCH: Duration = Duration::from_millis(25);

fn every_way(case: &Case, test: fn(&Case, Way)) {
    for &way in case.facts().ways {
        eprintln!("    {way:?}");
        test(case, way);
    }
}

/// Two sides, and memory on each, filled.
struct Scene {
    own: Own,
    /// Pages of a long transfer, here and there.
    lists: (PageIndices, PageIndices),
    me: Host,
    other: Agent,
    peer: PeerId,
    src: Memory,
    there: usize,
    desc: MrDesc,
}

impl Scene {
    fn new(case: &Case, (way, own): Way) -> Self {
        let (me, mut other, peer) = foreign::pair(case, way);
        let src = me.memory(SIZE, Own::Engine);
        let (there, desc) = other.memory(&me, SIZE, own);
        poison(&src, 0, SIZE, OLD);
        other.tell(&me, Ask::Poison { region: there, offset: 0, len: SIZE, byte: EMPTY });
        let pages = u32::try_from(SIZE / PAGE).expect("small");
        let list = |by| {
            (0..case.facts().pages_for_a_while).map(|i| i % pages * by % pages).collect::<Vec<_>>()
        };
        let lists = (list(7).into(), list(11).into());
        Self { own, lists, me, other, peer, src, there, desc }
    }

    /// A transfer that takes a while: each page of the region many times.
    fn long(&self, engine: &TransferEngine) -> Result<Transfer, SubmitError> {
        let pages = |list: &PageIndices| Pages { indices: list.clone(), stride: PAGE, offset: 0 };
        engine.submit_paged_writes(&PagedWrite {
            peer: self.peer,
            page_bytes: PAGE,
            src: &self.src,
            src_pages: pages(&self.lists.0),
            dst: &self.desc,
            dst_pages: pages(&self.lists.1),
            imm: None,
        })
    }

    /// As many of them as an engine does not get done while whoever is to catch them is kept from running. Some of it has been written.
    fn many(&self) -> Vec<Transfer> {
        let before = self.me.engine.stats().completed;
        let transfers = (0..MANY).map(|_| self.long(&self.me.engine).expect("submit")).collect();
        let moved = || (self.me.engine.stats().completed > before + 64).then_some(());
        assert!(self.me.until(patience(), moved).is_some(), "{:?}", self.me.engine.stats());
        transfers
    }

    /// The transfer has ended: nothing of the source comes through any more.
    fn check(self, quiet: Quiet) {
        let Self { own, me, mut other, src, there, .. } = self;
        poison(&src, 0, SIZE, NEW);
        check(&me, &mut other, there, quiet, own);
    }
}

/// When a receiver's memory is its own again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quiet {
    Now,
    /// Once the region is closed, which memory of the test's outlives.
    Closed,
}

impl Quiet {
    /// After a connection was cut.
    fn of(case: &Case) -> Self {
        if case.facts().flushes_at_the_receiver { Self::Now } else { Self::Closed }
    }
}

/// Nothing new is in the agent's region, and nothing is written to it any more.
fn check(me: &Host, other: &mut Agent, there: usize, quiet: Quiet, own: Own) {
    match (quiet, own) {
        (Quiet::Now, _) => {}
        // Whoever would look has given the memory up.
        (Quiet::Closed, Own::Engine) => me.linger(WATCH),
        (Quiet::Closed, Own::Test) => {
            other.tell(me, Ask::Reclaim { region: there, ms: 5000 });
        }
    }
    me.linger(WATCH);
    let leaked = other.place(me, Ask::Find { region: there, byte: NEW });
    assert_eq!(leaked, None, "was written from memory that had been released");
    if (quiet, own) == (Quiet::Closed, Own::Engine) {
        return;
    }
    other.tell(me, Ask::Poison { region: there, offset: 0, len: SIZE, byte: CANARY });
    me.linger(WATCH);
    other.check_only(me, there, 0, SIZE, CANARY);
}

fn is_stopped(end: End, why: impl Fn(&immwire::core::group::TransferError) -> bool) -> bool {
    match end {
        End::Quiesced { error: TransferError::Stopped(error) }
        | End::NeverStarted { error: TransferError::Stopped(error) } => why(&error),
        _ => false,
    }
}

fn after_done(case: &Case, way: Way) {
    let mut scene = Scene::new(case, way);
    let transfer = scene.long(&scene.me.engine).expect("submit");
    scene.me.done(&transfer);
    scene.other.check_only(&scene.me, scene.there, 0, SIZE, OLD);
    scene.check(Quiet::Now);
}

fn after_cancel(case: &Case, way: Way) {
    use immwire::core::group::TransferError::Cancelled;
    let scene = Scene::new(case, way);
    let transfers = scene.many();
    let (stalls, asked) = (Stalls::watch(), Instant::now());
    transfers.iter().for_each(Transfer::cancel);
    let ends: Vec<_> = transfers.iter().map(|transfer| scene.me.end(transfer)).collect();
    assert_eq!(stalls.beyond(asked, Duration::from_secs(2)), None);
    // Who had no turn yet has never started; some are done, where we were kept from running.
    let cancelled = |end: &End| is_stopped(*end, |error| *error == Cancelled);
    assert!(ends.iter().all(|end| *end == End::Done || cancelled(end)), "{ends:?}");
    let caught = |end: &End| matches!(end, End::Quiesced { .. });
    assert!(ends.iter().any(caught), "{ends:?}: not caught on their way");
    scene.check(Quiet::Now);
}

fn after_deadline(case: &Case, way: Way) {
    use immwire::core::group::TransferError::DeadlineExceeded;
    let scene = Scene::new(case, way);
    let hurried = scene.me.engine.with_deadline(Duration::from_millis(3));
    // Ten of them cannot be done by then.
    let submit = |_| scene.long(&hurried).expect("submit");
    let transfers: Vec<_> = (0..10).map(submit).collect();
    let ends: Vec<_> = transfers.iter().map(|transfer| scene.me.end(transfer)).collect();
    let peer = scene.peer;
    let late = |end: &&End| {
        is_stopped(
            **end,
            |error| matches!(error, DeadlineExceeded { peer: Some(p), .. } if *p == peer),
        )
    };
    assert!(ends.iter().any(|end| late(&end)), "{ends:?}");
    assert!(ends.iter().all(|end| *end == End::Done || late(&end)), "{ends:?}");
    scene.check(Quiet::Now);
}

fn after_remove(case: &Case, way: Way) {
    let scene = Scene::new(case, way);
    let transfers = scene.many();
    scene.me.engine.remove_peer(scene.peer);
    let gone = scene.peer;
    let ends: Vec<_> = transfers.iter().map(|transfer| scene.me.end(transfer)).collect();
    assert!(ends.iter().all(|end| *end == End::Done || names(*end, gone)), "{ends:?}");
    let is_caught = ends.last().is_some_and(|end| *end != End::Done);
    assert!(is_caught, "{ends:?}: not caught on their way");
    scene.check(Quiet::of(case));
}

fn after_shutdown(case: &Case, way: Way) {
    let scene = Scene::new(case, way);
    let transfers = scene.many();
    let Scene { own, me, mut other, src, there, .. } = scene;
    drop(me);
    let end = |transfer: &Transfer| transfer.poll_end().expect("ended with its engine");
    let ends: Vec<_> = transfers.iter().map(end).collect();
    let is_caught = ends.last().is_some_and(|end| *end != End::Done);
    assert!(is_caught, "{ends:?}: not caught on their way");
    poison(&src, 0, SIZE, NEW);
    check(&case.me(), &mut other, there, Quiet::of(case), own);
}

fn never_started(case: &Case, way: Way) {
    let scene = Scene::new(case, way);
    let nobody = PeerId { index: 200, generation: 3 };
    let lost = Scene { peer: nobody, ..scene };
    let transfer = lost.long(&lost.me.engine).expect("submit");
    let end = lost.me.end(&transfer);
    assert!(matches!(end, End::NeverStarted { .. }), "{end:?}");
    let Scene { own, me, mut other, src, there, .. } = lost;
    poison(&src, 0, SIZE, NEW);
    other.check_only(&me, there, 0, SIZE, EMPTY);
    check(&me, &mut other, there, Quiet::Now, own);
}

/// The other side floods our memory and is killed: when it is down, our memory is ours; or, where what it sent
/// may still be on its way, when we have taken it back.
fn after_kill(case: &Case, (way, own): Way) {
    assert_eq!(case.place, Place::TwoProcesses);
    let me = case.me();
    let mut other = case.bare_agent("killed");
    let address = other.build(&Setup { foreign: way, ..case.setup(case.nics.1) });
    let peer = me.peer(&address);
    let mine = me.memory(SIZE, own);
    flood(&me, &mut other, &mine);
    other.signal(Signal::KILL);
    let (stalls, killed) = (Stalls::watch(), Instant::now());
    let state = me.peer_down(peer, patience());
    assert!(matches!(state, Some(immwire::PeerState::Down(_))), "{state:?}");
    assert_eq!(stalls.beyond(killed, case.soon()), None);
    if Quiet::of(case) == Quiet::Now {
        still(&me, &mine);
    }
    let asked = Instant::now();
    let at_once = || assert_eq!(stalls.beyond(asked, Duration::from_secs(1)), None);
    match own {
        Own::Engine => {
            me.close(mine.region, patience()).expect("nobody writes");
            at_once();
        }
        Own::Test => {
            let mine = me.reclaim(mine, patience()).expect("nobody writes");
            at_once();
            still(&me, &mine);
        }
    }
}

/// Our engine stops while the other side floods our memory: when it has stopped, our memory is ours.
fn receiver_stopped(case: &Case, way: Way) {
    stopped_while_written_to(case, way, &case.setup(case.nics.0));
}

/// How long its own writes may take is nothing to those who write to it.
fn receiver_stopped_without_a_drain(case: &Case, way: Way) {
    stopped_while_written_to(case, way, &Setup { drain_ms: 0, ..case.setup(case.nics.0) });
}

fn stopped_while_written_to(case: &Case, (way, own): Way, setup: &Setup) {
    for _ in 0..4 {
        let me = Host::new(setup);
        let mut other = case.bare_agent("flooding");
        let address = other.build(&Setup { foreign: way, ..case.setup(case.nics.1) });
        me.peer(&address);
        let mine = me.memory(SIZE, own);
        flood(&me, &mut other, &mine);
        drop(me);
        let region: Region = mine.region.clone();
        poison(&region, 0, SIZE, CANARY);
        std::thread::sleep(WATCH);
        assert_eq!(
            first_other(&region, 0, SIZE, CANARY),
            None,
            "written after the engine had stopped"
        );
        drop(region);
        mine.region.close(Duration::from_secs(1)).expect("nobody writes there");
    }
}

/// Lets the other side write all over the region for ever, and waits until it does.
pub fn flood(me: &Host, other: &mut Agent, mine: &Region) {
    let back = only_peer(me, other);
    let (src, _) = other.memory(me, SIZE, Own::Engine);
    other.tell(me, Ask::Poison { region: src, offset: 0, len: SIZE, byte: OLD });
    poison(mine, SIZE - 1, 1, EMPTY);
    let (dst, peer) = (encode(&mine.desc()), plain(back));
    let write = Write1 { peer, src, src_offset: 0, dst, dst_offset: 0, len: SIZE, tag: None };
    other.tell(me, Ask::Flood(write));
    let came = || first_other(mine, SIZE - 1, 1, OLD).is_none().then_some(());
    assert!(me.until(patience(), came).is_some(), "the flood does not come");
}

/// Nobody writes to the region.
pub fn still(me: &Host, mine: &Region) {
    poison(mine, 0, SIZE, CANARY);
    me.linger(WATCH);
    assert_eq!(first_other(mine, 0, SIZE, CANARY), None, "written by somebody who is gone");
}
