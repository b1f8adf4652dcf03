//! The rules of EFA, one by one, against immwire's own provider: each is kept while the engine works, or the model
//! says so in its log.
//!
//! Two engines of this process are polled by the test, so that what one does while the other looks away is the test's
//! to say. Each test runs in a process of its own, since libfabric's environment is read once; its body is on that
//! process's only thread. Afterwards the log must name no broken rule. `FAKE_EFA_SEED` chooses the disorder (1).
//!
//! That each test fails when its rule is broken is shown by mutants (`verification/mutants`, kind `efa`).

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test says what is wrong by panicking"
)]

mod rogue;
mod rogues;
mod side;

#[allow(dead_code, reason = "what tests of the model itself stand on")]
#[path = "../rules/rig.rs"]
mod rig;

use std::collections::BTreeMap;
use std::env::{self, VarError};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use immwire::core::group::{TransferError as Stopped, WorkError};
use immwire::libfabric::{LibfabricError, Unfit};
use immwire::{
    BuildError, End, MrDesc, PagedWrite, Pages, PeerId, PeerState, SingleWrite, Transfer,
    TransferError,
};
use libtest_mimic::{Arguments, Trial};

use crate::rogues::*;
use crate::side::{Other, PATIENCE, Pair, Side, builder, logged, pattern, violations};

/// In the environment of a process that runs one test.
const INSIDE: &str = "FAKE_EFA_TEST";
/// No test takes longer.
const LIFE: Duration = Duration::from_secs(60);
/// What the provider may set for libfabric.
const SETTINGS: [(&str, &str); 3] =
    [("FI_MR_CACHE_MONITOR", "disabled"), ("FI_OFI_RXM_MSG_RX_SIZE", "128"), ("FI_HMEM", "system")];

struct Test {
    name: &'static str,
    environment: &'static [(&'static str, &'static str)],
    body: fn(),
}

macro_rules! tests {
    ($($name:ident $environment:expr,)*) => {
        [$(Test { name: stringify!($name), environment: &$environment, body: $name },)*]
    };
}

/// Tests in which somebody breaks a rule on purpose who is no engine of ours, and which.
const ON_PURPOSE: [(&str, &str); 1] = [("a_lost_queue_is_replaced", "cq overrun")];

const TESTS: [Test; 36] = tests! {
    contexts_and_descriptors [],
    the_other_fabric [("FAKE_EFA_FABRICS", "efa")],
    both_sides_insert_before_the_first_write [],
    replaced_endpoints_know_their_peers [],
    a_session_begins_whatever_overtakes_the_answer [("FAKE_EFA_DELAY_US", "2000")],
    sessions_begin_while_memory_is_registered [("FAKE_EFA_PIN_UNTIL", "pinned")],
    // A seed by which something was late in each run.
    what_was_done_before_a_farewell_counts [("FAKE_EFA_DELAY_US", "10000"), ("FAKE_EFA_SEED", "2")],
    what_was_done_counts_before_its_end_is_noticed [("FAKE_EFA_LATE_US", "8000"), ("FAKE_EFA_SEED", "5")],
    // And one by which a farewell finds the queue full.
    what_was_done_counts_though_endpoints_are_replaced [("FAKE_EFA_LATE_WRITES_US", "150000"), ("FAKE_EFA_SEED", "12")],
    what_was_sent_before_a_peer_came_back_is_not_of_its_new_session [("FAKE_EFA_LATE_WRITES_US", "50000")],
    endpoints_of_others_are_nobodys_to_claim [],
    a_lost_queue_is_replaced [],
    a_broken_endpoint_is_replaced [("FAKE_EFA_BREAKS", "broken")],
    who_comes_while_a_broken_endpoint_is_replaced_is_kept [("FAKE_EFA_BREAKS", "broken")],
    nobody_writes_to_a_door [],
    a_broken_door_ends_all_and_no_poll_stays [("FAKE_EFA_BREAKS", "broken")],
    everybody_hears_a_farewell [],
    who_moves_to_where_it_is_loses_nothing [],
    who_withdrew_more_than_there_can_be_is_no_peer [],
    who_is_ready_has_said_where_it_is [("FAKE_EFA_DELAY_US", "2000")],
    who_was_told_of_older_endpoints_is_not_lost [("FAKE_EFA_DELAY_US", "2000")],
    an_older_move_does_not_count [],
    what_has_come_is_not_lost_among_failures [],
    what_nobody_hears_is_not_kept_again_and_again [],
    queues_are_credited [],
    writes_are_cut_to_the_longest [("FAKE_EFA_MAX_RMA", "65536")],
    writes_of_nothing_name_a_region [],
    nothing_in_flight_is_forgotten [("FAKE_EFA_DELAY_US", "20000")],
    writes_must_be_native [("FAKE_EFA_EMULATED_WRITE", "1")],
    peers_beyond_the_queue_are_refused [],
    writes_need_no_receive [("FAKE_EFA_UNSOLICITED", "0")],
    no_cuda_and_no_shared_memory [],
    the_users_environment_stays [
        ("FI_MR_CACHE_MONITOR", "userfaultfd"), ("FI_OFI_RXM_MSG_RX_SIZE", "64"), ("FI_HMEM", "cuda")
    ],
    what_is_not_set_is_set [],
    nothing_is_set_under_threads [],
    errors_say_whose_they_are [("FAKE_EFA_DEAD_MS", "50")],
};

fn main() -> ExitCode {
    if let Ok(inside) = env::var(INSIDE) {
        if side::serve_if_asked() {
            return ExitCode::SUCCESS;
        }
        let test = TESTS.iter().find(|test| test.name == inside).expect("a test");
        (test.body)();
        return ExitCode::SUCCESS;
    }
    let trials = TESTS.map(|test| Trial::test(test.name, move || apart(&test).map_err(Into::into)));
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit_code()
}

/// Runs one test in a process of its own; then no rule may be broken.
fn apart(test: &Test) -> Result<(), String> {
    let log = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    let said = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    let place = tempfile::tempdir().map_err(|error| error.to_string())?;
    let mut command = Command::new(env::current_exe().map_err(|error| error.to_string())?);
    for (name, _) in SETTINGS {
        command.env_remove(name);
    }
    command
        .current_dir(place.path())
        .env(INSIDE, test.name)
        .env("FAKE_EFA_LOG", log.path())
        .env("FAKE_EFA_SEED", env::var("FAKE_EFA_SEED").unwrap_or_else(|_| "1".to_owned()))
        .envs(test.environment.iter().copied())
        .stderr(said.reopen().map_err(|error| error.to_string())?);
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let start = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if start.elapsed() > LIFE => {
                let _ = child.kill();
                break child.wait().map_err(|error| error.to_string())?;
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let said = std::fs::read_to_string(said.path()).unwrap_or_default();
    let mut broken = violations(log.path());
    let on_purpose = ON_PURPOSE.iter().find(|(name, _)| *name == test.name);
    if let Some((_, rule)) = on_purpose {
        let before = broken.len();
        broken.retain(|said| !said.contains(rule));
        if broken.len() == before {
            return Err(format!("nobody broke {rule}"));
        }
    }
    if !broken.is_empty() {
        return Err(format!("rules were broken: {broken:?}\n{said}"));
    }
    if !status.success() {
        return Err(format!("{status}\n{said}"));
    }
    // Whatever else was loaded keeps no log.
    if logged(log.path(), "start", "seed").is_empty() {
        return Err("the model was not loaded".to_owned());
    }
    Ok(())
}

fn log() -> std::path::PathBuf {
    env::var_os("FAKE_EFA_LOG").expect("set").into()
}

// ---- what every operation has ----

/// All operations, both ways, many at a time, over several NICs.
fn everything(nics: (u8, u8)) {
    let mut pair = Pair::new(nics, |builder| builder);
    pair.write_both_ways(40, &[1, 64, 4097, 200_000]);
    let (src, dst) = (pair.here.region(64 << 12), pair.there.region(64 << 12));
    pattern(&src, 0, 64 << 12, 5);
    let counter = pair.there.engine.counter().unwrap();
    let list = |indices: Vec<u32>| Pages { indices: indices.into(), stride: 4096, offset: 0 };
    let pages = pair.here.engine.submit_paged_writes(&PagedWrite {
        peer: pair.peer,
        page_bytes: 4096,
        src: &src,
        src_pages: list((0..64).rev().collect()),
        dst: &dst.desc(),
        dst_pages: list((0..64).collect()),
        imm: Some(counter.tag()),
    });
    pair.is_done(&pages.unwrap());
    pair.counts(&counter, 64);
    for page in 0..64 {
        let (mut sent, mut came) = (vec![0; 4096], vec![0; 4096]);
        src.read((63 - page) * 4096, &mut sent).unwrap();
        dst.read(page * 4096, &mut came).unwrap();
        assert!(sent == came, "page {page}");
    }
    let message = pair.here.engine.submit_send(pair.peer, b"a message").unwrap();
    pair.is_done(&message);
    let start = Instant::now();
    let message = loop {
        match pair.there.engine.recv(Duration::ZERO) {
            Ok(message) => break message,
            Err(_) => assert!(start.elapsed() < PATIENCE, "no message"),
        }
        pair.turn();
    };
    assert_eq!((message.from, message.bytes.as_slice()), (pair.back, &b"a message"[..]));
}

fn contexts_and_descriptors() {
    everything((2, 2));
}

/// A libfabric whose efa has the older fabric alone is none of ours, and it is said what is missing.
fn the_other_fabric() {
    let error = match builder(1).build_polled() {
        Err(BuildError::Libfabric(error)) => error,
        other => panic!("{:?}", other.map(drop)),
    };
    assert!(matches!(error, LibfabricError::OlderEfa { .. }), "{error}");
    for words in ["only fabric `efa`", "`efa-direct`", "2.1 or later", "unsolicited write receives"]
    {
        assert!(error.to_string().contains(words), "{error}");
    }
    let found = immwire::libfabric::survey(Some(&side::library())).unwrap();
    let efa = found.providers.iter().find(|it| it.name == "efa").unwrap();
    assert_eq!((&efa.devices[..], &efa.unfit), (&[][..], &Some(Unfit::OlderFabric)));
}

// ---- who knows whom ----

/// The first thing that either side does is to write, over every pair of NICs.
fn both_sides_insert_before_the_first_write() {
    for nics in [(1, 4), (4, 1)] {
        let mut pair = Pair::new(nics, |builder| builder);
        // Long enough that each NIC has its part.
        pair.write_both_ways(1, &[1 << 20]);
    }
}

/// One peer is got rid of by replacing the endpoints, while another is written to and writes: from old endpoints to old
/// ones, and from new ones to new ones. Nothing of that fails, and every count is exact.
fn replaced_endpoints_know_their_peers() {
    let mut pair = Pair::new((2, 1), |builder| builder.drain(Duration::from_millis(50)));
    for round in 0..8 {
        let stopped = Other::start();
        let peer = pair.connect(&stopped);
        let src = pair.here.region(1 << 20);
        stopped.stop();
        let submit = |_| submit(&pair.here.engine, peer, &src, &stopped.desc, (0, 64 << 10));
        let stuck: Vec<Transfer> = (0..32).map(submit).collect();
        // Some are in flight: what has a deadline may be over before it is, if this thread is late.
        pair.here.driver.poll();
        stuck.iter().for_each(Transfer::cancel);
        let closed = logged(&log(), "endpoint", "ops").len();
        let mut ended = false;
        while !ended {
            // The one that does not run is in nobody's way.
            pair.write_both_ways(4, &[4096, 64, 65_536]);
            ended = stuck.iter().all(|transfer| transfer.poll_end().is_some());
        }
        let cut = |transfer: &Transfer| matches!(transfer.poll_end(), Some(End::Quiesced { .. }));
        assert!(stuck.iter().any(cut), "round {round}: nothing was in flight");
        // What was replaced has been closed, and says what it did.
        assert!(logged(&log(), "endpoint", "ops").len() >= closed + 2, "nothing was replaced");
        pair.write_both_ways(8, &[4096, 200_000]);
        assert_eq!(pair.here.engine.peer_state(pair.peer), Some(PeerState::Up));
    }
}

/// What either side has to say at once, of regions that it withdrew before, is heard whatever overtakes what.
fn a_session_begins_whatever_overtakes_the_answer() {
    for _ in 0..20 {
        let sides = [(); 2].map(|()| {
            let mut side = Side::new(builder(1));
            let withdrawn = side.region(4096);
            side.driver.close_region(withdrawn, PATIENCE).unwrap();
            side
        });
        let [here, there] = sides;
        Pair::of(here, there).write_both_ways(1, &[64]);
    }
}

/// Long memory takes its time to register. Meanwhile peers come, write, and take memory back.
fn sessions_begin_while_memory_is_registered() {
    let (here, there) = (Side::new(builder(2)), Side::new(builder(1)));
    let engine = here.engine.clone();
    let registers = std::thread::spawn(move || engine.alloc(3 << 20).unwrap());
    // It may not have begun yet; then this passes for nothing, as it hardly ever does.
    std::thread::sleep(Duration::from_millis(50));
    let mut pair = Pair::of(here, there);
    pair.write_both_ways(4, &[1, 4096, 100_000]);
    assert!(!registers.is_finished(), "nothing took its time");
    std::fs::write("pinned", []).unwrap();
    pair.until("registered", || registers.is_finished().then_some(()));
    let long = registers.join().unwrap();
    let short = pair.there.region(1 << 10);
    let bytes = pattern(&short, 0, 1 << 10, 7);
    let transfer = submit(&pair.there.engine, pair.back, &short, &long.desc(), (2 << 20, 1 << 10));
    pair.is_done(&transfer);
    let mut came = vec![0; bytes.len()];
    pair.until("there", || {
        long.read(2 << 20, &mut came).unwrap();
        (came == bytes).then_some(())
    });
}

/// A peer leaves when all that it wrote is done. The network keeps no order: its farewell comes before some of that.
fn what_was_done_before_a_farewell_counts() {
    let mut took = Duration::ZERO;
    for round in 0..20 {
        let mut pair = Pair::new((2, 1), |builder| builder);
        let (src, dst) = (pair.here.region(1 << 10), pair.there.region(1 << 10));
        let counter = pair.there.engine.counter().unwrap();
        let (peer, desc) = (pair.peer, dst.desc());
        let write = |n: u64| {
            let (src, dst, imm) = (&src, &desc, Some(counter.tag()));
            let (src_offset, dst_offset, len) = (n, n, 1);
            SingleWrite { peer, src, src_offset, dst, dst_offset, len, imm }
        };
        let submit = |n| pair.here.engine.submit_single_write(&write(n)).unwrap();
        let transfers: Vec<Transfer> = (0..100).map(submit).collect();
        for transfer in &transfers {
            pair.is_done(transfer);
        }
        if round % 2 == 0 {
            pair.here.engine.remove_peer(peer);
        } else {
            drop(transfers);
            // It is gone altogether.
            drop(std::mem::replace(&mut pair.here, Side::new(builder(1))));
        }
        let start = Instant::now();
        while !pair.there.engine.peers().is_empty() {
            assert!(start.elapsed() < PATIENCE, "it never left");
            pair.turn();
        }
        assert_eq!(counter.available(), 100, "round {round}");
        took += start.elapsed();
    }
    // A few steps each; were something missing, it would be half a second.
    assert!(took < Duration::from_secs(5), "as if something were missing: {took:?}");
}

/// The same; but who stays has writes under way to who leaves. They fail, as nobody is there any more, and that is known before the
/// farewell is, and before what had been written.
fn what_was_done_counts_before_its_end_is_noticed() {
    for round in 0..10 {
        let mut pair = Pair::new((1, 1), |builder| builder);
        let counters = [&pair.here, &pair.there].map(|side| side.engine.counter().unwrap());
        let [of_here, of_there] = &counters;
        let another = Side::new(builder(1));
        let (here, peer) = (pair.here.engine.clone(), pair.peer);
        let submit = |_| here.submit_imm(peer, of_there.tag(), 1).unwrap();
        let transfers: Vec<Transfer> = (0..100).map(submit).collect();
        for transfer in &transfers {
            pair.is_done(transfer);
        }
        let (there, back) = (pair.there.engine.clone(), pair.back);
        let submit = |_| there.submit_imm(back, of_here.tag(), 1).unwrap();
        let late: Vec<Transfer> = (0..8).map(submit).collect();
        pair.there.driver.poll();
        drop((here, transfers));
        drop(std::mem::replace(&mut pair.here, another));
        pair.until("gone", || there.peers().is_empty().then_some(()));
        assert_eq!(of_there.available(), 100, "round {round}");
        for transfer in &late {
            // Done, if it was still there.
            _ = pair.end(transfer);
        }
    }
}

/// The same; but endpoints are replaced, to be rid of another peer, while what had been written is still to come to the old ones.
fn what_was_done_counts_though_endpoints_are_replaced() {
    for round in 0..4 {
        let mut pair = Pair::new((1, 1), |builder| builder.drain(Duration::from_millis(1)));
        let stopped = Other::start();
        let there = pair.there.engine.clone();
        let of_there = there.counter().unwrap();
        // Known to who stays, and no more there.
        let stuck = {
            let peer = pair.there.driver.add_peer(&stopped.address).unwrap();
            let up = || (there.peer_state(peer) == Some(PeerState::Up)).then_some(());
            pair.until("up", up);
            let src = pair.there.region(64 << 10);
            stopped.stop();
            let submit = |_| submit(&there, peer, &src, &stopped.desc, (0, 64 << 10));
            let stuck: Vec<Transfer> = (0..8).map(submit).collect();
            pair.there.driver.poll();
            (peer, src, stuck)
        };
        let submit = |_| pair.here.engine.submit_imm(pair.peer, of_there.tag(), 1).unwrap();
        let transfers: Vec<Transfer> = (0..20).map(submit).collect();
        // Who stays does not look meanwhile: what has come, if this takes longer than the model is late, is found with what is late.
        let all = || transfers.iter().all(|it| it.poll_end().is_some()).then_some(());
        until(&mut pair.here, "done", all);
        assert!(transfers.iter().all(|it| it.poll_end() == Some(End::Done)));
        assert_eq!(of_there.available(), 0, "round {round}: nothing was late");
        let replaced = logged(&log(), "endpoint", "ops").len();
        there.remove_peer(stuck.0);
        drop(transfers);
        drop(std::mem::replace(&mut pair.here, Side::new(builder(1))));
        pair.until("gone", || there.peers().is_empty().then_some(()));
        assert_eq!(of_there.available(), 20, "round {round}");
        assert!(logged(&log(), "endpoint", "ops").len() > replaced, "nothing was replaced");
        let cut = |transfer: &Transfer| matches!(transfer.poll_end(), Some(End::Quiesced { .. }));
        assert!(stuck.2.iter().any(cut), "round {round}: nothing was in flight");
    }
}

// ---- room ----

/// The receiver looks away. Its queue has room for what it granted, and no more comes.
fn queues_are_credited() {
    const GRANTED: usize = 256;
    let mut pair = Pair::new((1, 1), |builder| builder.peers(2).transfers(2000));
    let counter = pair.there.engine.counter().unwrap();
    let submit = |_| pair.here.engine.submit_imm(pair.peer, counter.tag(), 1).unwrap();
    let transfers: Vec<Transfer> = (0..1500).map(submit).collect();
    let done = || transfers.iter().filter(|transfer| transfer.poll_end().is_some()).count();
    let (mut seen, mut since) = (0, Instant::now());
    // Until some have come, however late the device is, and then for as long as more do.
    while since.elapsed() < Duration::from_millis(300) || seen < GRANTED / 2 {
        pair.here.driver.poll();
        if done() > seen {
            (seen, since) = (done(), Instant::now());
        }
        assert!(since.elapsed() < PATIENCE, "{seen} sent to one who looks away");
    }
    assert!((GRANTED / 2..=GRANTED).contains(&seen), "{seen} sent to one who looks away");
    pair.counts(&counter, 1500);
    for transfer in &transfers {
        pair.is_done(transfer);
    }
    assert_eq!(counter.available(), 0);
}

/// As long as the device takes, and up to sixteen times that: as many pieces as can carry an immediate each.
fn writes_are_cut_to_the_longest() {
    let mut pair = Pair::new((1, 1), |builder| builder);
    pair.write_both_ways(2, &[65_536, 65_537, 1 << 20]);
}

/// A write of nothing, an immediate and a barrier are checked by the device as any other write.
fn writes_of_nothing_name_a_region() {
    let mut pair = Pair::new((1, 1), |builder| builder);
    pair.write_both_ways(1, &[0]);
    let counter = pair.there.engine.counter().unwrap();
    let imm = pair.here.engine.submit_imm(pair.peer, counter.tag(), 3).unwrap();
    pair.is_done(&imm);
    let group = pair.here.engine.add_peer_group(&[pair.peer]);
    let barrier = pair.here.engine.submit_barrier(&group, counter.tag()).unwrap();
    pair.is_done(&barrier);
    pair.counts(&counter, 4);
}

/// A peer is left with writes to it in flight.
fn nothing_in_flight_is_forgotten() {
    let mut pair = Pair::new((2, 1), |builder| builder);
    let (src, dst) = (pair.here.region(1 << 20), pair.there.region(1 << 20));
    let submit = |_| submit(&pair.here.engine, pair.peer, &src, &dst.desc(), (0, 1 << 20));
    let transfers: Vec<Transfer> = (0..20).map(submit).collect();
    pair.here.driver.poll();
    assert!(transfers.iter().all(|transfer| transfer.poll_end().is_none()), "none in flight");
    pair.here.engine.remove_peer(pair.peer);
    for transfer in &transfers {
        let _: End = pair.end(transfer);
    }
    let start = Instant::now();
    while !pair.here.engine.peers().is_empty() || !pair.there.engine.peers().is_empty() {
        assert!(start.elapsed() < PATIENCE, "{:?}", pair.here.engine.peers());
        pair.turn();
    }
}

// ---- what is asked of the device ----

fn writes_must_be_native() {
    match builder(1).build_polled() {
        Err(BuildError::Libfabric(LibfabricError::EmulatedWrites { domain })) => {
            assert!(!domain.is_empty());
        }
        other => panic!("{:?}", other.map(drop)),
    }
}

/// Of more peers than its queue has room for one of each.
fn peers_beyond_the_queue_are_refused() {
    match builder(1).peers(20_000).build_polled() {
        Err(BuildError::Libfabric(LibfabricError::Peers { peers: 20_000, most })) => {
            assert!(builder(1).peers(most).build_polled().is_ok());
            let beyond = builder(1).peers(most + 1).build_polled();
            assert!(beyond.is_err(), "{most} and one more");
        }
        other => panic!("{:?}", other.map(drop)),
    }
}

/// A device that wants a receive for each write with data is none of ours.
fn writes_need_no_receive() {
    match builder(1).build_polled() {
        Err(BuildError::Libfabric(LibfabricError::NoDevice { .. })) => {}
        other => panic!("{:?}", other.map(drop)),
    }
}

fn no_cuda_and_no_shared_memory() {
    let _pair = Pair::new((2, 1), |builder| builder);
    for permitted in ["cuda", "shared_memory"] {
        // Two engines' NICs, and the door of each.
        assert_eq!(logged(&log(), "enabled", permitted), [0; 5], "{permitted}");
    }
}

// ---- the environment ----

fn environment() -> BTreeMap<String, String> {
    env::vars().collect()
}

fn the_users_environment_stays() {
    let before = environment();
    assert!(SETTINGS.iter().all(|(name, _)| before.contains_key(*name)));
    drop(Pair::new((1, 1), |builder| builder));
    assert_eq!(environment(), before);
}

fn what_is_not_set_is_set() {
    let mut expected = environment();
    for (name, value) in SETTINGS {
        assert_eq!(env::var(name), Err(VarError::NotPresent));
        expected.insert(name.to_owned(), value.to_owned());
    }
    drop(Pair::new((1, 1), |builder| builder));
    assert_eq!(environment(), expected);
}

/// Another thread may be reading the environment.
fn nothing_is_set_under_threads() {
    let before = environment();
    let (end, wait) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || wait.recv().is_err());
    drop(Pair::new((1, 1), |builder| builder));
    assert_eq!(environment(), before);
    drop(end);
    assert!(thread.join().unwrap());
}

// ---- failures ----

fn submit(
    engine: &immwire::TransferEngine,
    peer: PeerId,
    src: &immwire::Region,
    dst: &MrDesc,
    (dst_offset, len): (u64, u64),
) -> Transfer {
    let write = SingleWrite { peer, src, src_offset: 0, dst, dst_offset, len, imm: None };
    engine.submit_single_write(&write).unwrap()
}

/// Writes a little, and returns the error that it ends with. Nobody else is polled meanwhile, and the queue is read
/// before messages are: it is the device that says so.
fn failure_of(pair: &mut Pair, peer: PeerId, dst: &MrDesc, dst_offset: u64) -> Option<WorkError> {
    let src = pair.here.region(64);
    let write = SingleWrite { peer, src: &src, src_offset: 0, dst, dst_offset, len: 64, imm: None };
    let transfer = pair.here.driver.submit_single_write(&write).unwrap();
    let start = Instant::now();
    while transfer.poll_end().is_none() {
        assert!(start.elapsed() < PATIENCE, "it does not end");
        std::thread::sleep(Duration::from_millis(20));
        pair.here.driver.poll();
    }
    match transfer.poll_end() {
        Some(End::Quiesced { error: TransferError::Stopped(Stopped::Piece { error, .. }) }) => {
            Some(error)
        }
        Some(End::Done) => None,
        other => panic!("{other:?}"),
    }
}

/// Codes 7, 9, 13 and 14 of the device.
fn errors_say_whose_they_are() {
    // Heartbeats would hear of an end as well.
    let quiet = |builder: immwire::Builder| {
        builder.liveness(immwire::LivenessConfig {
            heartbeat: Duration::from_secs(30),
            suspect_after: Duration::from_secs(60),
            down_after: Duration::from_secs(60),
            ..immwire::LivenessConfig::default()
        })
    };
    let codes = || logged(&log(), "failed", "prov_errno");
    // Several, if messages failed as well.
    let only = |before: usize, code: u64| {
        let codes = codes().split_off(before);
        assert!(!codes.is_empty() && codes.iter().all(|&it| it == code), "{code}: {codes:?}");
    };
    // 7: past the end of what is registered. The peer stays.
    let mut pair = Pair::new((1, 1), quiet);
    let dst = pair.there.region(4096);
    let (peer, desc) = (pair.peer, dst.desc());
    let longer = MrDesc { len: desc.len + (1 << 20), ..desc };
    assert_eq!(failure_of(&mut pair, peer, &longer, 512 << 10), Some(WorkError::RemoteAccess));
    only(0, 7);
    assert_eq!(failure_of(&mut pair, peer, &desc, 0), None);
    // 14: it knows us no more.
    let before = codes().len();
    pair.there.engine.remove_peer(pair.back);
    let start = Instant::now();
    while !pair.there.engine.peers().is_empty() {
        assert!(start.elapsed() < PATIENCE, "it does not go");
        pair.there.driver.poll();
    }
    for _ in 0..10 {
        pair.there.driver.poll();
    }
    assert_eq!(failure_of(&mut pair, peer, &desc, 0), Some(WorkError::PeerGone));
    only(before, 14);
    // 9: its endpoint is closed.
    let mut pair = Pair::new((1, 1), quiet);
    let dst = pair.there.region(4096);
    let (peer, desc) = (pair.peer, dst.desc());
    assert_eq!(failure_of(&mut pair, peer, &desc, 0), None);
    let before = codes().len();
    pair.end_there();
    assert_eq!(failure_of(&mut pair, peer, &desc, 0), Some(WorkError::PeerGone));
    only(before, 9);
    // 13: its process is gone, and was there.
    let mut pair = Pair::new((1, 1), quiet);
    let other = Other::start();
    let peer = pair.connect(&other);
    let desc = other.desc;
    assert_eq!(failure_of(&mut pair, peer, &desc, 0), None);
    let before = codes().len();
    drop(other);
    assert_eq!(failure_of(&mut pair, peer, &desc, 0), Some(WorkError::PeerGone));
    only(before, 13);
}
