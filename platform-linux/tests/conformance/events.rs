//! Faults that a device tells of by itself, while much is under way both ways: of a queue pair, of a queue that many share, of all of it. Every
//! transfer ends; nothing is lost, nothing counted twice. What one NIC has lost, the other goes on with. Each transfer has places
//! of its own, which are looked at before others have them, and then other bytes are written.
//!
//! For devices that tell of what they are asked to: those of `verification/rdma-guest/events.c`, of which there must be four. Each end has
//! two of its own, so that what goes over a NIC can be seen at its network interface.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use immwire::core::group::{SubmitError, TransferError as Stopped};
use immwire::core::plan::PlanError;
use immwire::core::tenant::device_key;
use immwire::core::wire::Wire;
use immwire::{
    End, ImmCounter, ImmTag, MrDesc, PagedWrite, Pages, PeerId, PeerState, Transfer, TransferError,
};

use crate::agent::{Agent, Ask, Say, Write1, encode, plain, processor_time};
use crate::host::{Host, Memory, Motor, Own, Pattern, Setup, names, patience, poison};
use crate::operations::{only_peer, write};
use crate::ports::{APART, Salvo, on};
use crate::stalls::Stalls;
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[
    ("own_queue_fails", Spread::TwoNics, |case| nic_lost(case, 1, "srq_err")),
    ("peers_queue_fails", Spread::TwoNics, |case| nic_lost(case, 3, "cq_err")),
    ("own_device_fails", Spread::TwoNics, |case| nic_lost(case, 0, "device_fatal")),
    ("peers_device_fails", Spread::TwoNics, |case| nic_lost(case, 2, "device_fatal")),
    ("all_devices_fail", Spread::TwoNics, all_lost),
    ("what_came_is_counted_first", Spread::TwoNics, counted_first),
    ("queue_pairs_fail", Spread::TwoNics, queue_pairs_fail),
    ("peer_writes_where_it_may_not", Spread::TwoNics, access_error),
    ("registered_where_a_device_has_failed", Spread::TwoNics, registered_late),
    ("what_waits_leaves_a_port_that_is_down", Spread::TwoNics, port_left),
];

/// Where devices are asked to tell of something, if they can be.
pub fn folder() -> Option<PathBuf> {
    std::env::var_os("IMMWIRE_RDMA_EVENTS").map(PathBuf::from)
}

/// A device, by its number.
#[derive(Clone, Copy)]
struct Device(u8);

impl Device {
    fn file(self, ending: &str) -> PathBuf {
        folder().expect("a folder").join(format!("rxe{}{ending}", self.0))
    }

    /// Has it tell of this, to whoever uses it.
    fn tell(self, what: &str) {
        for ending in [".told", ".gone"] {
            let _ = std::fs::remove_file(self.file(ending));
        }
        std::fs::write(self.file(".new"), what).expect("written");
        std::fs::rename(self.file(".new"), self.file("")).expect("moved");
    }

    fn has_told(self) -> bool {
        self.file(".told").exists() || self.is_gone()
    }

    /// The queue pair that it has told of is destroyed.
    fn is_gone(self) -> bool {
        self.file(".gone").exists()
    }

    /// Bytes that its interface has sent.
    fn sent(self) -> u64 {
        self.count("tx_bytes")
    }

    /// And has received.
    fn received(self) -> u64 {
        self.count("rx_bytes")
    }

    fn count(self, what: &str) -> u64 {
        let path = format!("/sys/class/net/net{}/statistics/{what}", self.0);
        let text = std::fs::read_to_string(path).expect("a network interface");
        text.trim().parse().expect("a number")
    }
}

const ALL: [Device; 4] = [Device(0), Device(1), Device(2), Device(3)];
const PAGES: u32 = 64;
const PAGE: u64 = 4096;
const BYTES: u64 = PAGES as u64 * PAGE;
/// Transfers under way.
const DEPTH: usize = 8;
/// Places at the other end, each for one transfer.
const PLACES: u64 = 2 * DEPTH as u64;
/// What is looked at in one go.
const WHILE: Duration = Duration::from_millis(300);
/// More than goes over a NIC that is not in use, in that time; less than over one that is.
const FEW: u64 = 32 << 10;

/// Two ends that write to each other all the time.
struct Work {
    me: Host,
    other: Agent,
    peer: PeerId,
    src: Memory,
    mine: Memory,
    count: ImmCounter,
    desc: MrDesc,
    there: usize,
    counter: usize,
    case: Case,
    /// How often all was looked at, and what is written since.
    looks: u64,
    pattern: Pattern,
    /// That of the next transfer; those before it are taken.
    place: u64,
    own_pattern: Pattern,
    /// How many writes of the flood were done when [`Work::mine`] was last made other bytes.
    fresh_after: u64,
    salvo: Salvo,
    write_back: Write1,
    tag: ImmTag,
    flying: VecDeque<Transfer>,
    /// Since the last look.
    submitted: u64,
}

impl Work {
    fn begin(case: &Case) -> Self {
        forget_all();
        let [mine, theirs] = APART.map(|names| on(case, names));
        let me = Host::new(&mine);
        let mut other = case.bare_agent("other");
        let address = other.build(&theirs);
        let peer = me.peer(&address);
        let back = only_peer(&me, &mut other);
        let (pattern, own_pattern) = (case.pattern(0), case.pattern(999));
        let (src, mine) = (me.memory(PLACES * BYTES, Own::Engine), me.memory(BYTES, Own::Engine));
        pattern.fill(&src, 0, PLACES * BYTES, 0);
        let (there, desc) = other.memory(&me, PLACES * BYTES, Own::Engine);
        let (counter, tag) = other.counter(&me);
        let (from, _) = other.memory(&me, BYTES, Own::Engine);
        let fill = Ask::Fill { region: from, offset: 0, len: BYTES, pattern: own_pattern, at: 0 };
        other.tell(&me, fill);
        let count = me.engine.counter().expect("a counter");
        let write_back = Write1 {
            peer: plain(back),
            src: from,
            src_offset: 0,
            dst: encode(&mine.desc()),
            dst_offset: 0,
            len: BYTES,
            tag: Some(count.tag().bits()),
        };
        let salvo = Salvo::new(case, &me, &mut other, back);
        other.tell(&me, Ask::Flood(write_back.clone()));
        let (flying, submitted) = (VecDeque::new(), 0);
        let (case, looks, place, fresh_after) = (*case, 0, 0, 0);
        let mut work = Self {
            me,
            other,
            peer,
            src,
            mine,
            count,
            desc,
            there,
            counter,
            case,
            looks,
            pattern,
            place,
            own_pattern,
            fresh_after,
            salvo,
            write_back,
            tag,
            flying,
            submitted,
        };
        // All are in use.
        work.until("all NICs send", |work| {
            let before = ALL.map(Device::sent);
            work.go_on(WHILE);
            ALL.iter().zip(before).all(|(device, before)| device.sent() - before > FEW)
        });
        work
    }

    fn submit(&mut self) {
        // Where nobody looks, as long as a peer may be gone, they are written again.
        let offset = self.place % PLACES * BYTES;
        let places =
            || Pages { indices: (0..PAGES).collect::<Vec<_>>().into(), stride: PAGE, offset };
        let write = PagedWrite {
            peer: self.peer,
            page_bytes: PAGE,
            src: &self.src,
            src_pages: places(),
            dst: &self.desc,
            dst_pages: places(),
            imm: Some(self.tag),
        };
        self.flying.push_back(self.me.engine.submit_paged_writes(&write).expect("submit"));
        self.submitted += 1;
        self.place += 1;
    }

    /// All that was written is done, was counted, and is there; what is written next is other bytes.
    fn look(&mut self) {
        for transfer in std::mem::take(&mut self.flying) {
            self.me.done(&transfer);
        }
        self.other.count(&self.me, self.counter, self.submitted * u64::from(PAGES));
        let written = self.place.min(PLACES) * BYTES;
        self.other.check(&self.me, self.there, 0, written, self.pattern);
        (self.submitted, self.place) = (0, 0);
        self.looks += 1;
        self.pattern = self.case.pattern(self.looks);
        self.pattern.fill(&self.src, 0, PLACES * BYTES, 0);
    }

    /// Writes all the time, and every write is done.
    fn go_on(&mut self, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            if self.place >= PLACES {
                self.look();
            }
            self.submit();
            if self.flying.len() > DEPTH {
                let first = self.flying.pop_front().expect("some");
                self.me.done(&first);
            }
        }
    }

    /// Something has just befallen a NIC: what the flood had written before does not count for what it writes now.
    fn refresh(&mut self) {
        poison(&self.mine, 0, BYTES, 0xa5);
        self.fresh_after = self.other.number(&self.me, Ask::Flooded) + 2 * DEPTH as u64;
    }

    /// Goes on until something is so.
    fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !is_so(self) {
            assert!(start.elapsed() < patience(), "not in time: {what}");
            self.go_on(Duration::from_millis(20));
        }
        println!("{what}: after {} ms", start.elapsed().as_millis());
    }

    /// Nothing goes over this NIC any more, either way, and much over the other of the same end.
    fn leaves(&mut self, lost: Device) {
        let other = Device(lost.0 ^ 1);
        let look = || [lost.sent(), lost.received(), other.sent(), other.received()];
        self.until("the NIC is left", |work| {
            let before = look();
            work.go_on(WHILE);
            let after = look();
            let [sent, received, others, to_others] = [0, 1, 2, 3].map(|at| after[at] - before[at]);
            sent.max(received) < FEW && others.min(to_others) > FEW
        });
    }

    /// Writes, and does not wait for it, until a device has told of what it was asked to.
    fn until_told(&mut self, device: Device) {
        let start = Instant::now();
        while !device.has_told() {
            assert!(start.elapsed() < patience(), "not told in time");
            match self.flying.iter().filter(|it| it.poll_end().is_none()).count() {
                under_way if under_way < DEPTH => self.submit(),
                _ => self.me.linger(Duration::from_millis(1)),
            }
        }
    }

    /// The end of the writes both ways: all are done, were counted once, and are there.
    fn finish(&mut self) {
        self.until("the flood goes on", |work| {
            work.other.number(&work.me, Ask::Flooded) > work.fresh_after
        });
        self.fresh_after = 0;
        let looks = self.looks;
        self.look();
        let flooded = self.other.number(&self.me, Ask::Flooded);
        let done = self.other.number(&self.me, Ask::Stop);
        assert!(done > 0 && flooded <= done);
        self.me.count(&self.count, done, patience()).expect("as many as were done");
        self.me.linger(Duration::from_millis(200));
        let more = self.other.number(&self.me, Ask::Available { counter: self.counter });
        assert_eq!((more, self.count.available()), (0, 0), "counted twice");
        assert_eq!(self.own_pattern.mismatch(&self.mine, 0, BYTES, 0), None);
        assert_eq!(self.me.stands(self.peer), Some(PeerState::Up));
        println!("looked at {looks} times before, {done} writes back");
    }

    /// The end of the writes both ways, where the peer is given up: each write was done, or names the peer, or else ends for want of a NIC
    /// where `no_nic` is left; what was done was counted, and nothing was counted that was not written.
    fn give_up(&mut self, no_nic: bool) {
        let soon = patience();
        if no_nic {
            // Whoever comes later has no way either, until the peer is down.
            self.submit();
        }
        let no_route = SubmitError::Plan(PlanError::NoRoute { peer: self.peer });
        let (mut failed, mut refused) = (0, 0);
        for transfer in std::mem::take(&mut self.flying) {
            let end = self.me.end_within(&transfer, soon).expect("ends");
            let late = end == End::NeverStarted { error: TransferError::Refused(no_route) };
            let wants_nic = match end {
                End::NeverStarted { error } | End::Quiesced { error } => {
                    late || error == TransferError::Stopped(Stopped::NoNic)
                }
                End::Done => false,
            };
            let is_right = end == End::Done || names(end, self.peer) || no_nic && wants_nic;
            assert!(is_right, "{end:?}");
            failed += u64::from(end != End::Done);
            refused += usize::from(late);
        }
        // Nothing was submitted any more once the device had told, but for the last.
        assert!(refused <= DEPTH + 1, "{refused} refused");
        let (least, most) = (self.submitted - failed, self.submitted);
        let state = self.me.peer_down(self.peer, soon);
        assert!(matches!(state, Some(PeerState::Down(_))), "{state:?}");
        let peer = self.write_back.peer;
        let ms = u64::try_from(soon.as_millis()).expect("small");
        let down = self.other.ask(&self.me, Ask::Down { peer, ms });
        assert!(format!("{down:?}").contains("Down"), "{down:?}");
        self.other.count(&self.me, self.counter, least * u64::from(PAGES));
        let more = self.other.number(&self.me, Ask::Available { counter: self.counter });
        assert!(more <= (most - least) * u64::from(PAGES), "{more} more than {least} of {most}");
        println!("{least} of {most} writes were done");
    }

    /// Both processes leave their processors alone for a while, in which nothing is to be done. Who was there when a processor stood still may be
    /// charged for that: so are they that are emulated, whenever they wait for one that is real.
    fn must_sleep(&mut self) {
        let (stalls, start) = (Stalls::watch(), Instant::now());
        let before = [processor_time(), self.other.number(&self.me, Ask::Cpu)];
        std::thread::sleep(Duration::from_millis(500));
        let after = [processor_time(), self.other.number(&self.me, Ask::Cpu)];
        let (wall, ran) = (start.elapsed(), stalls.ran(start));
        let used = [0, 1].map(|end| Duration::from_micros(after[end] - before[end]));
        println!("{used:?} of {wall:?} while nothing is done; {ran:?} of it ran");
        let charged = used.map(|used| used.saturating_sub(wall.saturating_sub(ran)));
        assert!(charged.iter().all(|used| *used < ran / 2), "awake");
    }

    /// Both engines end.
    fn end(mut self) {
        self.other.tell(&self.me, Ask::Drop);
    }
}

/// A NIC is lost for good, for what its device tells.
fn nic_lost(case: &Case, device: u8, event: &str) {
    let (mut work, lost) = (Work::begin(case), Device(device));
    work.salvo.begin(&work.me, &mut work.other);
    lost.tell(event);
    work.until("told", |_| lost.has_told());
    work.refresh();
    work.leaves(lost);
    work.salvo.end(&work.me, &mut work.other);
    work.finish();
    // Neither end is awake for what it has left.
    work.must_sleep();
    work.end();
}

/// One NIC after the other, until none is left.
fn all_lost(case: &Case) {
    let mut work = Work::begin(case);
    let [first, second, ..] = ALL;
    work.salvo.begin(&work.me, &mut work.other);
    first.tell("cq_err");
    work.until("told", |_| first.has_told());
    work.refresh();
    work.leaves(first);
    work.salvo.end(&work.me, &mut work.other);
    work.finish();
    work.other.tell(&work.me, Ask::Flood(work.write_back.clone()));
    second.tell("device_fatal");
    work.until_told(second);
    work.give_up(true);
    // What the peer's devices were told is done came, though ours are lost.
    let done = work.other.number(&work.me, Ask::Stop);
    work.me.count(&work.count, done, patience()).expect("as many as were done");
    work.end();
}

/// The last NIC is lost while much has come that nobody has looked at: it is counted before its peer is given up.
fn counted_first(case: &Case) {
    let mut work = Work::begin(case);
    let [first, second, ..] = ALL;
    work.salvo.begin(&work.me, &mut work.other);
    first.tell("cq_err");
    work.until("told", |_| first.has_told());
    work.refresh();
    work.leaves(first);
    work.salvo.end(&work.me, &mut work.other);
    second.tell("hold");
    work.until_told(second);
    let done_of = |work: &mut Work| work.other.number(&work.me, Ask::Flooded);
    let (before, start) = (done_of(&mut work), Instant::now());
    // More than had come, and been looked at, before it was asked to hold back.
    let held = loop {
        let held = done_of(&mut work) - before;
        if held > 2 * DEPTH as u64 {
            break held;
        }
        assert!(start.elapsed() < patience(), "{held} came");
        work.me.linger(Duration::from_millis(1));
    };
    second.tell("device_fatal");
    work.until_told(second);
    work.give_up(true);
    let done = work.other.number(&work.me, Ask::Stop);
    println!("{held} of {done} that came were looked at last");
    work.me.count(&work.count, done, patience()).expect("as many as were done");
    work.end();
}

/// Queue pairs of each kind and of both ends, one after the other: each is made anew, and all NICs are in use again.
fn queue_pairs_fail(case: &Case) {
    let mut work = Work::begin(case);
    for (device, what) in [
        (0, "qp_fatal lane"),
        (3, "qp_req_err lane"),
        (1, "qp_fatal line"),
        (2, "qp_fatal lane cut"),
        (0, "qp_req_err line cut"),
    ] {
        let device = Device(device);
        work.salvo.begin(&work.me, &mut work.other);
        device.tell(what);
        work.until(what, |_| device.is_gone());
        work.refresh();
        work.salvo.end(&work.me, &mut work.other);
    }
    work.until("all NICs send", |work| {
        let before = ALL.map(Device::sent);
        work.go_on(WHILE);
        ALL.iter().zip(before).all(|(device, before)| device.sent() - before > FEW)
    });
    work.finish();
    work.end();
}

/// A queue pair that is written by is in error, because its peer wanted to write where it may not: that one is given up, by both ends.
fn access_error(case: &Case) {
    let mut work = Work::begin(case);
    ALL[2].tell("qp_access_err inlet");
    work.until_told(ALL[2]);
    work.give_up(false);
    work.end();
}

/// A peer's device has failed, and it registers memory before we know of that, while we still write to that device: what is for the new
/// memory gets there by the peer's other NIC.
fn registered_late(case: &Case) {
    let mut work = Work::begin(case);
    let lost = ALL[2];
    lost.tell("device_fatal");
    work.until_told(lost);
    let start = Instant::now();
    // Its engine hears of it a moment later. Until then it cannot register, or does so there, too.
    let (late, desc) = loop {
        assert!(start.elapsed() < patience(), "nothing is registered without that device");
        work.other.post(Ask::Memory { bytes: 4 * BYTES, own: Own::Engine });
        if let Some(Say::Region { at, desc }) = work.other.answer_if_alive(&work.me) {
            let desc = MrDesc::decode(&desc).expect("a descriptor");
            if desc.keys.get(0).map(device_key) == Some(0) {
                break (at, desc);
            }
        }
        work.me.linger(Duration::from_millis(1));
    };
    println!("registered after {} ms", start.elapsed().as_millis());
    let begin = |at| write(&work.me, work.peer, &work.src, &desc, (0, at * BYTES, BYTES), None);
    let transfers: Vec<_> = (0..4).map(begin).collect();
    transfers.iter().for_each(|transfer| work.me.done(transfer));
    println!("written after {} ms", start.elapsed().as_millis());
    for at in 0..4 {
        work.other.check(&work.me, late, at * BYTES, BYTES, work.pattern);
    }
    work.leaves(lost);
    work.finish();
    work.end();
}

/// Nothing is left of a test before.
fn forget_all() {
    std::fs::create_dir_all(folder().expect("a folder")).expect("made");
    for device in ALL {
        for ending in ["", ".new", ".told", ".gone"] {
            let _ = std::fs::remove_file(device.file(ending));
        }
    }
}

/// A port is said to be down while much waits for room at a peer that does not look, and nothing is in flight there. What waits goes by the
/// other port when there is room, though the first one would still take it; and by both when it is said to be up.
fn port_left(case: &Case) {
    forget_all();
    let [mine, theirs] = APART.map(|names| on(case, names));
    let me = Host::new(&mine);
    let mut other = case.bare_agent("other");
    let address = other.build(&Setup { motor: Motor::Polled, ..theirs });
    let peer = me.peer(&address);
    let (src, pattern) = (me.memory(BYTES, Own::Engine), case.pattern(0));
    pattern.fill(&src, 0, BYTES, 0);
    let (there, desc) = other.memory(&me, BYTES, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let [port, second, ..] = ALL;
    // Each page is a piece of its own, and has an immediate.
    let places = |indices: Vec<u32>| Pages { indices: indices.into(), stride: PAGE, offset: 0 };
    let submit = || {
        let src_pages = places((0..PAGES).map(|at| at * 11 % PAGES).collect());
        let dst_pages = places((0..PAGES).map(|at| at * 11 % PAGES).collect());
        let (dst, imm) = (&desc, Some(tag));
        let write =
            PagedWrite { peer, page_bytes: PAGE, src: &src, src_pages, dst, dst_pages, imm };
        me.engine.submit_paged_writes(&write).expect("submit")
    };
    let sent = || [port.sent(), second.sent()];
    let both_send = |what: &str, other: &mut Agent| {
        let (start, mut written) = (Instant::now(), 0);
        loop {
            let before = sent();
            for _ in 0..4 {
                me.done(&submit());
                written += 1;
            }
            if before.iter().zip(sent()).all(|(before, after)| after - before > FEW) {
                break;
            }
            assert!(start.elapsed() < patience(), "not in time: {what}");
        }
        other.count(&me, counter, written * u64::from(PAGES));
    };
    both_send("both ports send", &mut other);

    // Nobody looks at what comes, and more is written than anybody was granted.
    other.post(Ask::Doze { ms: 6000 });
    let transfers: Vec<_> = (0..32).map(|_| submit()).collect();
    // All that could be sent was: nothing more is done.
    let stalls = Stalls::watch();
    let (mut done, mut quiet) = (me.engine.stats().completed, Instant::now());
    while stalls.beyond(quiet, Duration::from_millis(500)).is_none() {
        me.linger(Duration::from_millis(10));
        let now = me.engine.stats().completed;
        if now != done {
            (done, quiet) = (now, Instant::now());
        }
    }
    assert!(transfers.iter().any(|it| it.poll_end().is_none()), "the peer has looked");
    port.tell("port_err");
    let start = Instant::now();
    while !port.has_told() {
        assert!(start.elapsed() < patience(), "not told in time");
        me.linger(Duration::from_millis(1));
    }
    me.linger(Duration::from_millis(100));
    let before = sent();
    assert_eq!(other.answer(Some(&me)), Say::Fine);
    transfers.iter().for_each(|transfer| me.done(transfer));
    let [by_port, by_second] = [0, 1].map(|at| sent()[at] - before[at]);
    println!("{by_port} bytes by the port that is down, {by_second} by the other");
    assert!(by_port < FEW && by_second > BYTES, "{by_port} {by_second}");
    other.count(&me, counter, 32 * u64::from(PAGES));
    other.check(&me, there, 0, BYTES, pattern);
    port.tell("port_active");
    both_send("both ports send again", &mut other);
    assert_eq!(other.number(&me, Ask::Available { counter }), 0, "counted twice");
    assert_eq!(me.stands(peer), Some(PeerState::Up));
    other.tell(&me, Ask::Drop);
}
