//! Ports that go down and up again while much is under way, both ways: nothing is lost, nothing counted twice, and what
//! was lost is in use again. A device that is removed; and a peer that is gone, which looks the same at first. And peers
//! that connect while a port is down: each device is one to be called at, and to call from.
//!
//! For devices whose ports can be taken down: those of `verification/rdma-guest`. Both ends are in one guest. Where they
//! are on the same devices, a port takes the same NIC of both along, and all paths but those between the others; where
//! there are four, each has its own, and the other end sees nothing but that it is not answered.

use std::collections::VecDeque;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use immwire::{
    DownReason, End, ImmCounter, ImmTag, MrDesc, NetAddr, PagedWrite, Pages, PeerId, PeerState,
    Transfer, TransferEngine, Transport, VerbsOptions,
};
use rustix::process::Signal;

use crate::agent::{Agent, Ask, Say, Write1, encode, plain};
use crate::host::{Host, Memory, Motor, Own, Pattern, Setup, names, patience, poison};
use crate::operations::{only_peer, write};
use crate::{Case, Facts, Spread, Test, verbs_options};

/// In a guest, with two devices or more.
const TWO_DEVICES: &[Test] = &[
    ("one_port_down", Spread::TwoNics, |case| ports_fail(case, SHARED, DOWN, &[1])),
    ("first_port_down", Spread::TwoNics, |case| ports_fail(case, SHARED, DOWN, &[0])),
    ("ports_down_in_turn", Spread::TwoNics, |case| ports_fail(case, SHARED, DOWN, &[1, 0, 1])),
    ("doors_of_both_closed", Spread::TwoNics, |case| doors_closed(case, SHARED, DOWN, &[0, 1])),
    ("addresses_given_back", Spread::TwoNics, addresses_given_back),
    ("peer_killed", Spread::TwoNics, peer_killed),
    ("device_removed", Spread::TwoNics, device_removed),
];

/// In a guest with four.
const FOUR_DEVICES: &[Test] = &[
    ("peers_port_down", Spread::TwoNics, |case| ports_fail(case, APART, DOWN, &[3, 2])),
    ("own_port_down", Spread::TwoNics, |case| ports_fail(case, APART, DOWN, &[1, 0])),
    ("acknowledgements_lost", Spread::TwoNics, |case| ports_fail(case, APART, MUTE, &[3])),
    ("peers_doors_closed", Spread::TwoNics, |case| doors_closed(case, APART, DOWN, &[2, 3])),
    ("own_doors_closed", Spread::TwoNics, |case| doors_closed(case, APART, DOWN, &[0, 1])),
    ("doors_whose_answers_are_lost", Spread::TwoNics, |case| {
        doors_closed(case, APART, MUTE, &[2, 0])
    }),
    ("doors_crosswise", Spread::TwoNics, doors_crosswise),
    ("leaves_before_it_is_answered", Spread::TwoNics, leaves_before_it_is_answered),
];
/// Of addresses of NICs alone.
const ALONE: &[Test] = &[("peers_address_taken", Spread::TwoNics, address_taken)];

/// What is done to a port, and what undoes it. Of one that is mute, what arrives is not acknowledged: it is counted all
/// the same, and must not be counted again.
type Fault = [&'static str; 2];
const DOWN: Fault = ["down", "up"];
const MUTE: Fault = ["netem loss 100%", "netem"];

/// Devices of each end.
pub type Devices = [&'static [&'static str]; 2];
const SHARED: Devices = [&["rxe0", "rxe1"]; 2];
pub const APART: Devices = [&["rxe0", "rxe1"], &["rxe2", "rxe3"]];

/// Those that the guest has devices for. Who has two kinds of address cannot say who is reached by NICs and absent.
pub fn tests(facts: &Facts) -> Vec<&'static [Test]> {
    let devices = std::env::var("IMMWIRE_GUEST_NICS").unwrap_or_default().parse().unwrap_or(0);
    let spans = facts.host.is_some();
    let is_alone = !spans && !facts.has_gpus;
    let tells = is_alone && crate::events::folder().is_some();
    let all = [
        (if spans { u8::MAX } else { 1 }, crate::absent::TESTS),
        (2, TWO_DEVICES),
        (4, FOUR_DEVICES),
        (if spans { u8::MAX } else { 4 }, ALONE),
        (4, crate::absent::FOUR_DEVICES),
        (if spans { u8::MAX } else { 4 }, crate::absent::ALONE),
        (4, crate::disturbed::TESTS),
        (if tells { 4 } else { u8::MAX }, crate::events::TESTS),
    ];
    all.into_iter().filter(|(needed, _)| *needed <= devices).map(|(_, tests)| tests).collect()
}

/// Takes a NIC's port down, or up again, or mute; and up, and not mute, when dropped by a test that failed: those after it find it as it was.
pub struct Port(pub u8);

impl Port {
    pub fn command(&self, what: &str) -> Command {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../verification/rdma-guest/nic");
        let mut command = Command::new(script);
        command.arg(self.0.to_string()).args(what.split_whitespace());
        command
    }

    pub fn set(&self, state: &str) {
        let done = self.command(state).status();
        assert!(done.is_ok_and(|status| status.success()), "nic {} {state}", self.0);
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Of one that is not mute there is nothing to be undone, which is an error.
            let _ = self.command("netem").stderr(Stdio::null()).status();
            self.set("up");
        }
    }
}

/// How long a port is of no use, and how long it has to be of use again.
const AWAY: Duration = Duration::from_secs(4);
const BACK: Duration = Duration::from_secs(6);
const PAGES: u32 = 256;
const PAGE: u64 = 4096;
/// Transfers under way, and places for them.
const DEPTH: usize = 8;
const PLACES: u32 = 12;

/// Writes of ours to another end, several under way, page by page, each to places of its own. When all have been written they are
/// looked at, each byte of them, and what is written next is other bytes.
struct Forth {
    case: Case,
    peer: PeerId,
    src: Memory,
    desc: MrDesc,
    there: usize,
    counter: usize,
    tag: ImmTag,
    flying: VecDeque<Transfer>,
    looks: u64,
    pattern: Pattern,
    /// That of the next transfer; those before it are taken.
    place: u32,
}

impl Forth {
    const BYTES: u64 = PLACES as u64 * PAGES as u64 * PAGE;

    fn new(case: &Case, me: &Host, other: &mut Agent, peer: PeerId) -> Self {
        let src = me.memory(Self::BYTES, Own::Engine);
        let (there, desc) = other.memory(me, Self::BYTES, Own::Engine);
        let (counter, tag) = other.counter(me);
        let pattern = case.pattern(0);
        pattern.fill(&src, 0, Self::BYTES, 0);
        let (flying, looks, place) = (VecDeque::new(), 0, 0);
        Self { case: *case, peer, src, desc, there, counter, tag, flying, looks, pattern, place }
    }

    /// Page i of a place goes to page 11 i of it: no two to the same.
    const fn to(page: u32) -> u32 {
        page * 11 % PAGES
    }

    fn submit(&mut self, me: &Host) {
        let offset = u64::from(self.place * PAGES) * PAGE;
        let pages = |indices: Vec<u32>| Pages { indices: indices.into(), stride: PAGE, offset };
        let write = PagedWrite {
            peer: self.peer,
            page_bytes: PAGE,
            src: &self.src,
            src_pages: pages((0..PAGES).collect()),
            dst: &self.desc,
            dst_pages: pages((0..PAGES).map(Self::to).collect()),
            imm: Some(self.tag),
        };
        self.flying.push_back(me.engine.submit_paged_writes(&write).expect("submit"));
        self.place += 1;
    }

    /// All that was written is done, was counted once, and is there.
    fn look(&mut self, me: &Host, other: &mut Agent) {
        self.flying.drain(..).for_each(|transfer| me.done(&transfer));
        other.count(me, self.counter, u64::from(self.place * PAGES));
        let more = other.number(me, Ask::Available { counter: self.counter });
        assert_eq!(more, 0, "counted twice");
        let mut pages = vec![0; usize::try_from(self.place * PAGES).expect("small")];
        for page in 0..self.place * PAGES {
            let (place, at) = (page / PAGES, page % PAGES);
            let to = usize::try_from(place * PAGES + Self::to(at)).expect("small");
            pages[to] = page;
        }
        let (region, pattern) = (self.there, self.pattern);
        let wrong = other.place(me, Ask::MismatchedPage { region, pages, pattern });
        assert_eq!(wrong, None, "a page that is not what was sent");
        self.looks += 1;
        self.pattern = self.case.pattern(self.looks);
        self.pattern.fill(&self.src, 0, Self::BYTES, 0);
        self.place = 0;
    }

    /// Writes for so long; returns how many transfers there were.
    fn go_on(&mut self, me: &Host, other: &mut Agent, time: Duration) -> u64 {
        let (start, mut submitted) = (Instant::now(), 0);
        while start.elapsed() < time {
            if self.place == PLACES {
                self.look(me, other);
            }
            self.submit(me);
            submitted += 1;
            if self.flying.len() > DEPTH {
                me.done(&self.flying.pop_front().expect("some"));
            }
        }
        submitted
    }
}

/// Writes of the other end's that are under way when something befalls a NIC: each has a place of its own, and every byte is
/// looked at.
pub struct Salvo {
    case: Case,
    back: PeerId,
    from: usize,
    mine: Memory,
    count: ImmCounter,
    rounds: u64,
}

impl Salvo {
    const WRITES: u64 = 32;
    const EACH: u64 = 64 << 10;
    const BYTES: u64 = Self::WRITES * Self::EACH;

    pub fn new(case: &Case, me: &Host, other: &mut Agent, back: PeerId) -> Self {
        let mine = me.memory(Self::BYTES, Own::Engine);
        let (from, _) = other.memory(me, Self::BYTES, Own::Engine);
        let count = me.engine.counter().expect("a counter");
        Self { case: *case, back, from, mine, count, rounds: 0 }
    }

    /// Bytes that were not there before.
    fn pattern(&self) -> Pattern {
        self.case.pattern(1000 + self.rounds)
    }

    pub fn begin(&mut self, me: &Host, other: &mut Agent) {
        self.rounds += 1;
        let (region, len, pattern) = (self.from, Self::BYTES, self.pattern());
        other.tell(me, Ask::Fill { region, offset: 0, len, pattern, at: 0 });
        let write = Write1 {
            peer: plain(self.back),
            src: self.from,
            src_offset: 0,
            dst: encode(&self.mine.desc()),
            dst_offset: 0,
            len: Self::EACH,
            tag: Some(self.count.tag().bits()),
        };
        other.tell(me, Ask::Salvo { write, writes: Self::WRITES });
    }

    /// All are done, were counted once, and are there.
    pub fn end(&self, me: &Host, other: &mut Agent) {
        let ms = u64::try_from(patience().as_millis()).expect("small");
        other.tell(me, Ask::SalvoDone { ms });
        me.count(&self.count, Self::WRITES, patience()).expect("as many as were done");
        assert_eq!(self.count.available(), 0, "counted twice");
        let wrong = self.pattern().mismatch(&self.mine, 0, Self::BYTES, 0);
        assert_eq!(wrong, None, "a byte that is not what was sent");
    }
}

fn ports_fail(case: &Case, devices: Devices, [fail, mend]: Fault, ports: &[u8]) {
    // What is in flight when a port goes down is settled when the device has given up, some seconds later.
    let [mine, theirs] = devices.map(|names| on(case, names));
    let me = Host::new(&mine);
    let mut other = case.bare_agent("other");
    let address = other.build(&theirs);
    let peer = me.peer(&address);
    let back = only_peer(&me, &mut other);
    let mut forth = Forth::new(case, &me, &mut other, peer);
    let mut salvo = Salvo::new(case, &me, &mut other, back);

    // The other way: writes of many pieces each.
    let (len, own_pattern) = (1 << 20, case.pattern(999));
    let mine = me.memory(len, Own::Engine);
    let (from, _) = other.memory(&me, len, Own::Engine);
    other.tell(&me, Ask::Fill { region: from, offset: 0, len, pattern: own_pattern, at: 0 });
    let count = me.engine.counter().expect("a counter");
    let flood = Write1 {
        peer: plain(back),
        src: from,
        src_offset: 0,
        dst: encode(&mine.desc()),
        dst_offset: 0,
        len,
        tag: Some(count.tag().bits()),
    };
    other.tell(&me, Ask::Flood(flood));

    assert!(forth.go_on(&me, &mut other, Duration::from_secs(1)) > 0);
    for &at in ports {
        let port = Port(at);
        salvo.begin(&me, &mut other);
        port.set(fail);
        // What is right in the end was written after this.
        poison(&mine, 0, len, 0xa5);
        let moved = forth.go_on(&me, &mut other, AWAY);
        forth.look(&me, &mut other);
        salvo.end(&me, &mut other);
        salvo.begin(&me, &mut other);
        port.set(mend);
        let then = forth.go_on(&me, &mut other, BACK);
        salvo.end(&me, &mut other);
        println!("port {at}: {moved} transfers while it was away, {then} after it came back");
        assert_eq!(me.stands(peer), Some(PeerState::Up));
    }
    forth.look(&me, &mut other);

    let flooded = other.number(&me, Ask::Flooded);
    let done = other.number(&me, Ask::Stop);
    assert!(done > 0 && flooded <= done);
    me.count(&count, done, patience()).expect("as many as were done");
    me.linger(Duration::from_millis(200));
    assert_eq!(count.available(), 0, "counted twice");
    assert_eq!(own_pattern.mismatch(&mine, 0, len, 0), None);
    // And it goes on.
    let Forth { src, desc, there, pattern, .. } = forth;
    me.done(&write(&me, peer, &src, &desc, (0, 0, Forth::BYTES), None));
    other.check(&me, there, 0, Forth::BYTES, pattern);
}

/// An engine of this process on two devices.
pub fn on(case: &Case, names: &[&str]) -> Setup {
    let devices = names.iter().map(|&name| name.to_owned()).collect();
    Setup { drain_ms: 10_000, devices, ..case.setup(2) }
}

/// A peer loses a NIC, asks what had arrived over it, and leaves; all of that is read at one time. It has left, and that is what is said
/// of it.
fn leaves_before_it_is_answered(case: &Case) {
    let [mine, theirs] = APART.map(|names| on(case, names));
    let me = Host::new(&Setup { motor: Motor::Polled, ..mine });
    let mut other = case.bare_agent("other");
    let address = other.build(&Setup { drain_ms: 500, ..theirs });
    let peer = me.peer(&address);
    let back = only_peer(&me, &mut other);
    let len = 1 << 20;
    let (from, _) = other.memory(&me, len, Own::Engine);
    let memory = me.memory(len, Own::Engine);
    let count = me.engine.counter().expect("a counter");
    let flood = Write1 {
        peer: plain(back),
        src: from,
        src_offset: 0,
        dst: encode(&memory.desc()),
        dst_offset: 0,
        len,
        tag: Some(count.tag().bits()),
    };
    other.tell(&me, Ask::Flood(flood));
    me.count(&count, 20, patience()).expect("the flood comes");
    // From here on nothing is read here.
    let port = Port(3);
    port.set("down");
    std::thread::sleep(Duration::from_secs(1));
    other.post(Ask::Drop);
    std::thread::sleep(Duration::from_secs(4));
    let state = me.peer_down(peer, patience());
    port.set("up");
    assert_eq!(state, Some(PeerState::Down(DownReason::Disconnected)));
}

/// Connects two engines that are there, and moves something each way.
fn meet(case: &Case, me: &Host, other: &mut Agent, address: &NetAddr) -> PeerId {
    let peer = me.peer(address);
    let back = only_peer(me, other);
    let (src, pattern) = (me.memory(1 << 20, Own::Engine), case.pattern(0));
    let (there, desc) = other.memory(me, 1 << 20, Own::Engine);
    let (counter, tag) = other.counter(me);
    pattern.fill(&src, 0, 1 << 20, 0);
    me.done(&write(me, peer, &src, &desc, (0, 0, 1 << 20), Some(tag)));
    other.count(me, counter, 1);
    other.check(me, there, 0, 1 << 20, pattern);
    let count = me.engine.counter().expect("a counter");
    let write = Write1 {
        peer: plain(back),
        src: there,
        src_offset: 0,
        dst: encode(&src.desc()),
        dst_offset: 0,
        len: 4096,
        tag: Some(count.tag().bits()),
    };
    assert_eq!(other.ask(me, Ask::Write(write)), Say::Text("Done".into()));
    me.count(&count, 1, patience()).expect("counted");
    peer
}

/// With each of these ports away in turn, two engines that were there before find each other; and with all there again.
fn doors_closed(case: &Case, devices: Devices, [fail, mend]: Fault, ports: &[u8]) {
    for &at in ports {
        let [mine, theirs] = devices.map(|names| on(case, names));
        let me = Host::new(&mine);
        let mut other = case.bare_agent("other");
        let address = other.build(&theirs);
        let port = Port(at);
        port.set(fail);
        let began = Instant::now();
        meet(case, &me, &mut other, &address);
        println!("port {at}: met after {} ms", began.elapsed().as_millis());
        port.set(mend);
        // One that calls now is let in, too.
        let late = Host::new(&mine);
        let peer = late.peer(&address);
        assert_eq!(late.stands(peer), Some(PeerState::Up));
    }
}

/// The first port of one end is down, and the second of the other: no two NICs of one number are left, and both learn that.
fn doors_crosswise(case: &Case) {
    let [mine, theirs] = APART.map(|names| on(case, names));
    let me = Host::new(&mine);
    let mut other = case.bare_agent("other");
    let address = other.build(&theirs);
    let ports = [Port(0), Port(3)];
    ports.iter().for_each(|port| port.set(DOWN[0]));
    let said = me.try_peer(&address).expect_err("no way");
    assert!(said.contains("no NIC reaches the other side's of the same number"), "{said}");
    ports.iter().for_each(|port| port.set(DOWN[1]));
    meet(case, &me, &mut other, &address);
}

/// Addresses that are taken from interfaces and given back, as when they are renewed. What is connected holds the entries of the ports' tables
/// as they were, so that the same addresses are new entries: who is there uses those for whoever comes later.
fn addresses_given_back(case: &Case) {
    let [mine, theirs] = SHARED.map(|names| on(case, names));
    let me = Host::new(&mine);
    let mut other = case.bare_agent("other");
    let address = other.build(&theirs);
    let peer = meet(case, &me, &mut other, &address);
    let (src, pattern) = (me.memory(1 << 20, Own::Engine), case.pattern(1));
    let (there, desc) = other.memory(&me, 1 << 20, Own::Engine);
    pattern.fill(&src, 0, 1 << 20, 0);
    for nic in 0..2 {
        Port(nic).set("renew");
        let mut late = case.bare_agent(&format!("late {nic}"));
        let address = late.build(&theirs);
        meet(case, &me, &mut late, &address);
        // Who knew each other goes on, by the other NIC; and by this one, when there are queue pairs of the new entry.
        for _ in 0..5 {
            me.done(&write(&me, peer, &src, &desc, (0, 0, 1 << 20), None));
            me.linger(Duration::from_millis(300));
        }
        other.check(&me, there, 0, 1 << 20, pattern);
    }
}

/// A peer with two NICs that is killed: what is under way to it ends, and it is down.
fn peer_killed(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let src = me.memory(1 << 20, Own::Engine);
    let (_, desc) = other.memory(&me, 1 << 20, Own::Engine);
    let (_, tag) = other.counter(&me);
    let transfers: Vec<_> =
        (0..200).map(|_| write(&me, peer, &src, &desc, (0, 0, 1 << 20), Some(tag))).collect();
    me.done(&transfers[0]);
    other.signal(Signal::KILL);
    let killed = Instant::now();
    let soon = case.soon() + Duration::from_secs(4);
    for transfer in &transfers {
        let end = me.end_within(transfer, soon).expect("ends soon");
        assert!(end == End::Done || names(end, peer), "{end:?}");
    }
    let state = me.peer_down(peer, soon);
    assert!(matches!(state, Some(PeerState::Down(_))), "{state:?}");
    assert!(killed.elapsed() < soon, "took {:?}", killed.elapsed());
    assert!(names(me.end(&write(&me, peer, &src, &desc, (0, 0, 8), None)), peer));
}

/// Linux removes a device of this kind when nobody uses it any more: until then all goes on, and at the end of the
/// engines it is gone.
fn device_removed(case: &Case) {
    let device = Port(1);
    let (me, mut other, peer) = case.pair();
    let src = me.memory(1 << 20, Own::Engine);
    let (there, desc) = other.memory(&me, 1 << 20, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, 1 << 20, 0);
    let transfers: Vec<_> =
        (0..50).map(|_| write(&me, peer, &src, &desc, (0, 0, 1 << 20), Some(tag))).collect();
    me.done(&transfers[0]);
    let mut removal = device.command("remove").spawn().expect("the guest's script");
    transfers.iter().for_each(|transfer| me.done(transfer));
    other.count(&me, counter, 50);
    other.check(&me, there, 0, 1 << 20, pattern);
    assert!(removal.try_wait().expect("a child").is_none(), "somebody uses it");
    drop((src, me, other));
    let start = Instant::now();
    let removed = loop {
        let ended = removal.try_wait().expect("a child");
        if ended.is_some() || start.elapsed() > patience() {
            break ended;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(removed.is_some_and(|status| status.success()), "something of it is still held");
    device.set("add");
}

/// The first address of the one who is called was taken away, which the caller's kernel has yet to find out: the two meet by the others. The
/// caller's device tries for longer than it has time to say that it is ready: it says so where it is heard.
fn address_taken(case: &Case) {
    let [mine, theirs] = APART.map(|names| on(case, names));
    // A timeout of half a second.
    let options = VerbsOptions { ack_timeout: 17, ..verbs_options(&mine) };
    let builder = TransferEngine::builder().transport(Transport::Verbs(options)).nics(mine.nics);
    let (engine, driver) = builder.transfers(mine.transfers).build_polled().expect("build_polled");
    let me = Host::polled(engine, driver);
    let mut other = case.bare_agent("other");
    let address = other.build(&theirs);
    let port = Port(2);
    port.set("take");
    let peer = meet(case, &me, &mut other, &address);
    me.linger(Duration::from_secs(5));
    assert_eq!(me.stands(peer), Some(PeerState::Up));
    port.set("up");
    other.tell(&me, Ask::Drop);
}
