//! The other side of a test: an engine that does what it is asked, in another process or thread.
//!
//! The other process is this binary started again with [`ROLE`] in its environment. Asks and answers
//! are lines of JSON on its standard input and output. It ends when its input does, so that none
//! outlives the test, and after [`LIFE`] whatever happens. One that dies before, of a signal that the test did not
//! send or with a thread that panics, fails the test, whenever it is.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use immwire::core::wire::Wire;
use immwire::{
    ImmCounter, ImmTag, MrDesc, NetAddr, PeerId, PeerState, Rights, SingleWrite, SubmitError,
};
use immwire_cuda::{Device, Handover};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde::{Deserialize, Serialize};

use crate::host::{Host, Lent, Memory, Motor, Own, Pattern, Setup, first_other, patience, poison};

/// Set in the environment of the other process.
pub const ROLE: &str = "IMMWIRE_CONFORMANCE_AGENT";
/// No agent lives longer.
const LIFE: Duration = Duration::from_secs(170);
/// A thread of the agent's process has panicked that nobody waits for: it ends with [`PANICKED_CODE`].
static PANICKED: AtomicBool = AtomicBool::new(false);
/// That of a program whose main thread panics.
const PANICKED_CODE: i32 = 101;

/// What an agent can be asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Ask {
    Build(Setup),
    /// Drops the engine and all that belongs to it.
    Drop,
    /// Threads and open files of the process.
    /// What a GPU's driver keeps in a process that has used it is there before the first.
    Census {
        gpus: bool,
    },
    /// Microseconds of processor time that the process has used.
    Cpu,
    /// How often a thread of the process has gone to sleep.
    Naps,
    Peer {
        address: String,
    },
    /// As [`Ask::Peer`], but answers with the error, if any.
    TryPeer {
        address: String,
    },
    /// The peers, once there are so many and they are up.
    Peers {
        count: usize,
    },
    Down {
        peer: (u16, u32),
        ms: u64,
    },
    Memory {
        bytes: u64,
        own: Own,
    },
    /// Memory that is registered for the engine alone.
    PrivateMemory {
        bytes: u64,
    },
    /// [`Host::segment`].
    Segment {
        ordinal: u32,
        parts: usize,
        offset: u64,
        bytes: u64,
    },
    /// [`Host::free`]s a region.
    Free {
        region: usize,
        ms: u64,
    },
    /// A handle for so much memory of GPU 0, which is never freed; answered as a message.
    Handle {
        bytes: u64,
    },
    /// How much of a GPU's memory the process has taken by hand; 0 where the driver does not say.
    Kept,
    /// [`crate::segment::stick`].
    Hold {
        held: bool,
    },
    /// [`crate::segment::held_up`].
    HeldUp,
    /// [`crate::segment::go_on`].
    GoOn,
    /// [`Host::reclaim`]s a region, which keeps its place.
    Reclaim {
        region: usize,
        ms: u64,
    },
    Fill {
        region: usize,
        offset: u64,
        len: u64,
        pattern: Pattern,
        at: u64,
    },
    Poison {
        region: usize,
        offset: u64,
        len: u64,
        byte: u8,
    },
    Mismatch {
        region: usize,
        offset: u64,
        len: u64,
        pattern: Pattern,
        at: u64,
    },
    /// The first page of 4 KiB, `i` say, that is not page `pages[i]` of the pattern.
    MismatchedPage {
        region: usize,
        pages: Vec<u32>,
        pattern: Pattern,
    },
    FirstOther {
        region: usize,
        offset: u64,
        len: u64,
        byte: u8,
    },
    /// The first byte of the region that is `byte`.
    Find {
        region: usize,
        byte: u8,
    },
    /// The first page of the region that the kernel has given no memory to.
    FirstHole {
        region: usize,
    },
    Counter {
        slot: Option<u16>,
    },
    DropCounter {
        counter: usize,
    },
    Count {
        counter: usize,
        writes: u64,
        ms: u64,
    },
    Available {
        counter: usize,
    },
    Write(Write1),
    /// Goes on writing in the background, until something fails or [`Ask::Stop`].
    Flood(Write1),
    /// Ends the flood; answers how many writes it did.
    Stop,
    /// How many writes the flood has done so far, if none has failed.
    Flooded,
    /// Writes so often in the background, some at a time: each time from and to the place behind the last.
    Salvo {
        write: Write1,
        writes: u64,
    },
    /// The end of the salvo: all of it is done.
    SalvoDone {
        ms: u64,
    },
    /// Waits until a write of the flood has failed; answers how.
    FloodFailed {
        ms: u64,
    },
    Imm {
        peer: (u16, u32),
        tag: u32,
        writes: u16,
    },
    /// Says to a peer what only engines say.
    Lie {
        peer: (u16, u32),
        imm: u32,
    },
    Barrier {
        peers: Vec<(u16, u32)>,
        tag: u32,
    },
    Send {
        peer: (u16, u32),
        bytes: Vec<u8>,
    },
    Recv {
        ms: u64,
    },
    /// Builds two engines, starts to write from one to the other, and drops everything; answers how the
    /// write ended.
    LoadAndDrop(Setup),
    /// Does nothing for so long: a polled engine is not polled.
    Doze {
        ms: u64,
    },
    /// Starts a child that does nothing, but holds all that the process has open, until the agent's input ends, or for so
    /// long.
    Fork {
        ms: i32,
    },
    /// Writes random words over everything that the process shares with its peers' sessions.
    Scribble {
        seed: u64,
        ms: u64,
    },
}

/// A write of an agent's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Write1 {
    pub peer: (u16, u32),
    pub src: usize,
    pub src_offset: u64,
    pub dst: Vec<u8>,
    pub dst_offset: u64,
    pub len: u64,
    pub tag: Option<u32>,
}

/// What an agent answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Say {
    Fine,
    Address(String),
    Peer((u16, u32)),
    Peers(Vec<(u16, u32)>),
    Region {
        at: usize,
        desc: Vec<u8>,
    },
    Counter {
        at: usize,
        tag: u32,
    },
    Number(u64),
    /// Threads, and what each open file is.
    Census {
        threads: u64,
        files: Vec<String>,
    },
    Place(Option<u64>),
    Text(String),
    Message {
        from: (u16, u32),
        bytes: Vec<u8>,
    },
    /// It could not be done.
    Failed(String),
}

pub const fn plain(peer: PeerId) -> (u16, u32) {
    (peer.index, peer.generation)
}

pub const fn peer_of((index, generation): (u16, u32)) -> PeerId {
    PeerId { index, generation }
}

pub fn encode(desc: &MrDesc) -> Vec<u8> {
    let mut bytes = [0; MrDesc::ENCODED_MAX];
    let len = desc.encode(&mut bytes).expect("fits");
    bytes[..len].to_vec()
}

// ---- the agent ----

/// If this process is an agent, is one, and returns `true` in the end.
pub fn serve_if_asked() -> bool {
    if std::env::var_os(ROLE).is_none() {
        return false;
    }
    std::thread::spawn(|| {
        std::thread::sleep(LIFE);
        eprintln!("agent {} has lived too long", std::process::id());
        std::process::exit(3);
    });
    // What panics while it does what it is asked is an answer.
    let (serving, print) = (std::thread::current().id(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().id() != serving {
            PANICKED.store(true, Ordering::Relaxed);
        }
        print(panic);
    }));
    let (asks, inbox) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            let ask = serde_json::from_str(&line).expect("an ask");
            if asks.send(ask).is_err() {
                return;
            }
        }
        // The test is over, or dead.
        std::process::exit(if PANICKED.load(Ordering::Relaxed) { PANICKED_CODE } else { 0 });
    });
    serve(&inbox, |say| {
        let mut out = std::io::stdout().lock();
        let line = serde_json::to_string(&say).expect("a line");
        let written = writeln!(out, "{line}").and_then(|()| out.flush());
        written.is_ok()
    });
    true
}

fn serve(inbox: &Receiver<Ask>, mut say: impl FnMut(Say) -> bool) {
    let mut agent = State::default();
    loop {
        let polled = agent.host.as_ref().is_some_and(Host::is_polled);
        let ask = if polled {
            inbox.try_recv()
        } else {
            inbox.recv().map_err(|_| TryRecvError::Disconnected)
        };
        match ask {
            Ok(ask) => {
                let doing = std::panic::AssertUnwindSafe(|| agent.act(ask));
                let done = std::panic::catch_unwind(doing).unwrap_or_else(|panic| {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text =
                        text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                    Say::Failed(text.unwrap_or_default())
                });
                if !say(done) {
                    return;
                }
            }
            Err(TryRecvError::Empty) => agent.host.iter().for_each(Host::step),
            Err(TryRecvError::Disconnected) => return,
        }
    }
}

#[derive(Default)]
struct State {
    flood: Option<Flood>,
    salvo: Option<JoinHandle<Result<(), String>>>,
    regions: Vec<Option<Memory>>,
    counters: Vec<Option<ImmCounter>>,
    host: Option<Host>,
}

impl State {
    fn host(&self) -> &Host {
        self.host.as_ref().expect("an engine")
    }

    fn region(&self, at: usize) -> &Memory {
        self.regions[at].as_ref().expect("a region")
    }

    fn counter(&self, at: usize) -> &ImmCounter {
        self.counters[at].as_ref().expect("a counter")
    }

    #[expect(clippy::too_many_lines, reason = "a list")]
    fn act(&mut self, ask: Ask) -> Say {
        match ask {
            Ask::Build(setup) => {
                let host = Host::new(&setup);
                let address = host.engine.address().to_string();
                self.host = Some(host);
                Say::Address(address)
            }
            Ask::Drop => {
                *self = Self::default();
                Say::Fine
            }
            Ask::Census { gpus } => census(gpus),
            Ask::Cpu => Say::Number(processor_time()),
            Ask::Naps => Say::Number(naps()),
            Ask::Peer { address } => Say::Peer(plain(self.host().peer(&parse(&address)))),
            Ask::TryPeer { address } => match self.host().try_peer(&parse(&address)) {
                Ok(peer) => Say::Peer(plain(peer)),
                Err(error) => Say::Text(error),
            },
            Ask::Peers { count } => {
                let host = self.host();
                let up = host.until(patience(), || {
                    let peers = host.engine.peers();
                    let up = |peer: &PeerId| host.engine.peer_state(*peer) == Some(PeerState::Up);
                    (peers.len() >= count && peers.iter().all(up)).then_some(peers)
                });
                let up = up.unwrap_or_else(|| panic!("only {:?} came", host.engine.peers()));
                Say::Peers(up.into_iter().map(plain).collect())
            }
            Ask::Down { peer, ms } => {
                let limit = Duration::from_millis(ms);
                Say::Text(format!("{:?}", self.host().peer_down(peer_of(peer), limit)))
            }
            Ask::Memory { bytes, own } => {
                let memory = self.host().memory(bytes, own);
                let desc = encode(&memory.desc());
                self.regions.push(Some(memory));
                Say::Region { at: self.regions.len() - 1, desc }
            }
            Ask::PrivateMemory { bytes } => {
                let memory = self.host().registered(bytes, Rights::LOCAL);
                let desc = encode(&memory.desc());
                self.regions.push(Some(memory));
                Say::Region { at: self.regions.len() - 1, desc }
            }
            Ask::Segment { ordinal, parts, offset, bytes } => {
                let memory = self.host().segment(ordinal, parts, offset, bytes);
                let desc = encode(&memory.desc());
                self.regions.push(Some(memory));
                Say::Region { at: self.regions.len() - 1, desc }
            }
            Ask::Free { region, ms } => {
                let memory = self.regions[region].take().expect("a region");
                match self.host().free(memory, Duration::from_millis(ms)) {
                    Ok(()) => Say::Fine,
                    Err(error) => Say::Text(error.to_string()),
                }
            }
            Ask::Hold { held } => {
                assert!(
                    crate::segment::stick(held),
                    "only the stand-in for the driver can be held"
                );
                Say::Fine
            }
            Ask::HeldUp => Say::Number(crate::segment::held_up()),
            Ask::GoOn => {
                crate::segment::go_on();
                Say::Fine
            }
            Ask::Handle { bytes } => {
                let lent = Lent::by_handle(0, usize::try_from(bytes).expect("64-bit"));
                let device = Device::open(0).expect("GPU 0");
                match immwire_cuda::hand_over(&device, lent.ptr.as_ptr() as u64) {
                    Ok(Handover::Handle(bytes)) => {
                        Say::Message { from: (0, 0), bytes: bytes.to_vec() }
                    }
                    other => panic!("{other:?}"),
                }
            }
            Ask::Kept => Say::Number(crate::segment::kept().unwrap_or(0)),
            Ask::Reclaim { region, ms } => {
                let memory = self.regions[region].take().expect("a region");
                match self.host().reclaim(memory, Duration::from_millis(ms)) {
                    Ok(memory) => {
                        self.regions[region] = Some(memory);
                        Say::Fine
                    }
                    Err(error) => Say::Text(error.to_string()),
                }
            }
            Ask::Fill { region, offset, len, pattern, at } => {
                pattern.fill(self.region(region), offset, len, at);
                Say::Fine
            }
            Ask::Poison { region, offset, len, byte } => {
                poison(self.region(region), offset, len, byte);
                Say::Fine
            }
            Ask::Mismatch { region, offset, len, pattern, at } => {
                Say::Place(pattern.mismatch(self.region(region), offset, len, at))
            }
            Ask::MismatchedPage { region, pages, pattern } => {
                let region = self.region(region);
                let right = |(to, &from): (u64, &u32)| {
                    pattern.mismatch(region, to * 4096, 4096, u64::from(from) * 4096).is_none()
                };
                let wrong = (0..).zip(&pages).position(|page| !right(page));
                Say::Place(wrong.map(|page| page as u64))
            }
            Ask::FirstOther { region, offset, len, byte } => {
                Say::Place(first_other(self.region(region), offset, len, byte))
            }
            Ask::Find { region, byte } => Say::Place(find(self.region(region), byte)),
            Ask::FirstHole { region } => Say::Place(first_hole(self.region(region))),
            Ask::Counter { slot } => {
                let engine = &self.host().engine;
                let counter = match slot {
                    Some(slot) => engine.counter_at(slot),
                    None => engine.counter(),
                };
                let counter = counter.expect("a counter");
                let tag = counter.tag().bits();
                self.counters.push(Some(counter));
                Say::Counter { at: self.counters.len() - 1, tag }
            }
            Ask::DropCounter { counter } => {
                self.counters[counter] = None;
                Say::Fine
            }
            Ask::Count { counter, writes, ms } => {
                let limit = Duration::from_millis(ms);
                match self.host().count(self.counter(counter), writes, limit) {
                    Ok(()) => Say::Fine,
                    Err(error) => Say::Text(error.to_string()),
                }
            }
            Ask::Available { counter } => Say::Number(self.counter(counter).available()),
            Ask::Write(write) => {
                let host = self.host();
                let write = Prepared::new(&write);
                match write.submit(host, self.region(write.src)) {
                    Ok(transfer) => Say::Text(format!("{:?}", host.end(&transfer))),
                    Err(error) => Say::Text(format!("{error:?}")),
                }
            }
            Ask::Flood(write) => {
                let region = self.region(write.src).region.clone();
                self.flood = Some(Flood::start(self.host(), Prepared::new(&write), region));
                Say::Fine
            }
            Ask::Stop => {
                let flood = self.flood.take().expect("a flood");
                Say::Number(flood.stop(self.host()))
            }
            Ask::Flooded => {
                let flood = self.flood.as_ref().expect("a flood");
                match flood.failure() {
                    None => Say::Number(flood.done()),
                    Some(why) => Say::Failed(format!("the flood has ended: {why}")),
                }
            }
            Ask::Salvo { write, writes } => {
                let region = self.region(write.src).region.clone();
                let (engine, write) = (self.host().engine.clone(), Prepared::new(&write));
                let fire = move || salvo(&engine, write, &region, writes);
                self.salvo = Some(std::thread::spawn(fire));
                Say::Fine
            }
            Ask::SalvoDone { ms } => {
                let salvo = self.salvo.take().expect("a salvo");
                let over = || salvo.is_finished().then_some(());
                assert!(self.host().until(Duration::from_millis(ms), over).is_some(), "not done");
                match salvo.join().expect("no panic") {
                    Ok(()) => Say::Fine,
                    Err(why) => Say::Failed(why),
                }
            }
            Ask::FloodFailed { ms } => {
                let flood = self.flood.as_ref().expect("a flood");
                let failure = || flood.failure().map(str::to_owned);
                match self.host().until(Duration::from_millis(ms), failure) {
                    Some(why) => Say::Text(why),
                    None => Say::Failed(format!("{} writes done, none has failed", flood.done())),
                }
            }
            Ask::Imm { peer, tag, writes } => {
                let host = self.host();
                let tag = ImmTag::from_bits(tag).expect("a tag");
                let transfer = host.engine.submit_imm(peer_of(peer), tag, writes).expect("submit");
                Say::Text(format!("{:?}", host.end(&transfer)))
            }
            Ask::Lie { peer, imm } => {
                let (host, imm) = (self.host(), immwire::core::imm::Imm::from_bits(imm));
                let transfer = host.engine.submit_lie(peer_of(peer), imm).expect("submit");
                Say::Text(format!("{:?}", host.end(&transfer)))
            }
            Ask::Barrier { peers, tag } => {
                let host = self.host();
                let peers: Vec<PeerId> = peers.into_iter().map(peer_of).collect();
                let group = host.engine.add_peer_group(&peers);
                let tag = ImmTag::from_bits(tag).expect("a tag");
                let transfer = host.engine.submit_barrier(&group, tag).expect("submit");
                Say::Text(format!("{:?}", host.end(&transfer)))
            }
            Ask::Send { peer, bytes } => {
                let host = self.host();
                let transfer = host.engine.submit_send(peer_of(peer), &bytes).expect("submit");
                Say::Text(format!("{:?}", host.end(&transfer)))
            }
            Ask::Recv { ms } => match self.host().recv(Duration::from_millis(ms)) {
                Ok(message) => Say::Message { from: plain(message.from), bytes: message.bytes },
                Err(error) => Say::Text(error.to_string()),
            },
            Ask::LoadAndDrop(setup) => load_and_drop(&setup),
            Ask::Doze { ms } => {
                std::thread::sleep(Duration::from_millis(ms));
                Say::Fine
            }
            Ask::Fork { ms } => {
                fork(ms);
                Say::Fine
            }
            Ask::Scribble { seed, ms } => scribble(seed, Duration::from_millis(ms)),
        }
    }
}

fn find(region: &immwire::Region, byte: u8) -> Option<u64> {
    let mut bytes = vec![0; usize::try_from(region.len()).expect("64-bit")];
    region.read(0, &mut bytes).expect("inside");
    bytes.iter().position(|&found| found == byte).map(|at| at as u64)
}

fn first_hole(region: &immwire::Region) -> Option<u64> {
    let len = usize::try_from(region.len()).expect("64-bit");
    let mut resident = vec![0_u8; len.div_ceil(4096)];
    // SAFETY: the range is mapped while the region lives, and there is a byte for each of its pages.
    let status = unsafe { libc::mincore(region.as_ptr().cast(), len, resident.as_mut_ptr()) };
    assert_eq!(status, 0, "mincore");
    resident.iter().position(|page| page & 1 == 0).map(|page| page as u64)
}

fn parse(address: &str) -> NetAddr {
    address.parse().expect("an address")
}

/// A write with everything decoded.
struct Prepared {
    peer: PeerId,
    src: usize,
    src_offset: u64,
    dst: MrDesc,
    dst_offset: u64,
    len: u64,
    imm: Option<ImmTag>,
}

impl Prepared {
    fn new(write: &Write1) -> Self {
        Self {
            peer: peer_of(write.peer),
            src: write.src,
            src_offset: write.src_offset,
            dst: MrDesc::decode(&write.dst).expect("a descriptor"),
            dst_offset: write.dst_offset,
            len: write.len,
            imm: write.tag.map(|tag| ImmTag::from_bits(tag).expect("a tag")),
        }
    }

    fn submit(&self, host: &Host, src: &Memory) -> Result<immwire::Transfer, SubmitError> {
        self.submit_on(&host.engine, &src.region)
    }

    fn submit_on(
        &self,
        engine: &immwire::TransferEngine,
        src: &immwire::Region,
    ) -> Result<immwire::Transfer, SubmitError> {
        engine.submit_single_write(&SingleWrite {
            peer: self.peer,
            src,
            src_offset: self.src_offset,
            dst: &self.dst,
            dst_offset: self.dst_offset,
            len: self.len,
            imm: self.imm,
        })
    }
}

/// See [`Ask::Salvo`].
fn salvo(
    engine: &immwire::TransferEngine,
    mut write: Prepared,
    src: &immwire::Region,
    writes: u64,
) -> Result<(), String> {
    let mut window = std::collections::VecDeque::<immwire::Transfer>::new();
    for left in (0..writes).rev() {
        window.push_back(write.submit_on(engine, src).map_err(|error| error.to_string())?);
        write.src_offset += write.len;
        write.dst_offset += write.len;
        while let Some(oldest) = window.front().filter(|_| window.len() >= 4 || left == 0) {
            match oldest.wait(patience()) {
                Ok(immwire::End::Done) => {}
                other => return Err(format!("{other:?}, with {left} to come")),
            }
            window.pop_front();
        }
    }
    Ok(())
}

/// Writes without end, several at a time. What fails ends it.
pub struct Flood {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    failure: Arc<OnceLock<String>>,
    thread: JoinHandle<()>,
}

impl Flood {
    /// From a region of the host's own, as `write` says of the rest.
    pub fn of(host: &Host, write: &Write1, src: immwire::Region) -> Self {
        Self::start(host, Prepared::new(write), src)
    }

    fn start(host: &Host, write: Prepared, src: immwire::Region) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let engine = host.engine.clone();
        let (stopping, counted) = (Arc::clone(&stop), Arc::clone(&done));
        let failure = Arc::new(OnceLock::new());
        let failed = Arc::clone(&failure);
        let thread = std::thread::spawn(move || {
            let mut window = std::collections::VecDeque::<immwire::Transfer>::new();
            loop {
                let over = failed.get().is_some() || stopping.load(Ordering::Relaxed);
                if !over && window.len() < 4 {
                    match write.submit_on(&engine, &src) {
                        Ok(transfer) => window.push_back(transfer),
                        Err(error) => {
                            let _ = failed.set(error.to_string());
                        }
                    }
                    continue;
                }
                // What is under way is waited for, so that the count is exact.
                let Some(oldest) = window.front() else { return };
                if let Ok(end) = oldest.wait(Duration::from_millis(1)) {
                    if end == immwire::End::Done {
                        counted.fetch_add(1, Ordering::Relaxed);
                    } else {
                        // The first failure is the one that matters.
                        let _ = failed.set(format!("{end:?}"));
                    }
                    window.pop_front();
                }
            }
        });
        Self { stop, done, failure, thread }
    }

    /// What ended it, if anything did.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Writes that have been done.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Ends it, and says how many writes were done in all.
    pub fn stop(self, host: &Host) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        host.until(patience(), || self.thread.is_finished().then_some(()));
        assert!(self.thread.is_finished(), "the flood does not stop");
        self.done()
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Threads and open files of this process.
fn census(gpus: bool) -> Say {
    static HELD: OnceLock<Vec<Device>> = OnceLock::new();
    if gpus {
        let all = || (0..Device::count().expect("GPUs")).map(|i| Device::open(i).expect("a GPU"));
        HELD.get_or_init(|| all().collect());
    }
    let threads = std::fs::read_dir("/proc/self/task").expect("procfs").count() as u64;
    let open = std::fs::read_dir("/proc/self/fd").expect("procfs");
    // The listing itself is one that is closed by then.
    let kind = |path: std::path::PathBuf| {
        let name = path.to_string_lossy().into_owned();
        name.split_once(":[").map_or(name.clone(), |(kind, _)| kind.to_owned())
    };
    let mut files: Vec<String> = open
        .filter_map(|entry| std::fs::read_link(entry.expect("procfs").path()).ok())
        .map(kind)
        // Nor is memory that a test takes from a driver in host memory, and never gives back.
        .filter(|name| !name.ends_with("/fd") && !name.contains("fake-cuda"))
        .collect();
    files.sort();
    Say::Census { threads, files }
}

/// Microseconds of processor time of this process, since its start.
pub fn processor_time() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: `usage` is writable and of the right size; the call fills it when it returns 0.
    let status = unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
    assert_eq!(status, 0);
    // SAFETY: filled, as just checked.
    let usage = unsafe { usage.assume_init() };
    let micros = |time: libc::timeval| {
        u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000
            + u64::try_from(time.tv_usec).unwrap_or(0)
    };
    micros(usage.ru_utime) + micros(usage.ru_stime)
}

/// How often a thread of this process went to sleep, of those that are there. Threads of a stand-in are left out: they do
/// what devices do, for which no processor wakes; and those of CUDA's driver, which look around some ten times a second for each GPU.
fn naps() -> u64 {
    let mut sum = 0;
    for thread in std::fs::read_dir("/proc/self/task").expect("proc(5)") {
        let thread = thread.expect("proc(5)").path();
        let read = |name| std::fs::read_to_string(thread.join(name)).unwrap_or_default();
        let name = read("comm");
        if !["fake-", "cuda"].iter().any(|whose| name.starts_with(whose)) {
            let status = read("status");
            let naps =
                status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            sum += naps.map_or(0, |count| count.trim().parse::<u64>().expect("a number"));
        }
    }
    sum
}

fn load_and_drop(setup: &Setup) -> Say {
    let (from, to) =
        (Host::new(setup), Host::new(&Setup { motor: Motor::Thread, ..setup.clone() }));
    let peer = from.peer(to.engine.address());
    let size = 64 << 20;
    let (src, dst) = (from.memory(size, Own::Engine), to.memory(size, Own::Engine));
    let write = |len| {
        let (src_offset, dst_offset, imm) = (0, 0, None);
        let (src, dst) = (&src.region, &dst.desc());
        let write = SingleWrite { peer, src, src_offset, dst, dst_offset, len, imm };
        from.engine.submit_single_write(&write).expect("submit")
    };
    from.done(&write(1));
    // Far more than can be written before the engines are told to stop, though who is to tell them be kept from running meanwhile.
    let transfers: Vec<_> = (0..800).map(|_| write(size)).collect();
    drop(to);
    drop(from);
    let last = transfers.last().and_then(immwire::Transfer::poll_end);
    last.map_or(Say::Failed("not ended".into()), |end| match end {
        immwire::End::Done => Say::Text("Done".into()),
        other => Say::Text(format!("{other:?}")),
    })
}

/// See [`Ask::Fork`].
fn fork(ms: i32) {
    let mut input = libc::pollfd { fd: libc::STDIN_FILENO, events: 0, revents: 0 };
    // SAFETY: the child makes system calls alone, on memory of its own, and ends by one.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: system calls, and `input` is one that is writable.
            unsafe {
                libc::poll(&raw mut input, 1, ms);
                libc::_exit(0);
            }
        }
        child => assert!(child > 0, "fork"),
    }
}

/// A peer gone mad: random words into every mapping of a session, for a while.
fn scribble(seed: u64, time: Duration) -> Say {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    let ranges: Vec<(usize, usize)> = maps
        .lines()
        .filter(|line| line.contains("memfd:immwire-session"))
        .filter_map(|line| {
            let (from, to) = line.split_whitespace().next()?.split_once('-')?;
            let number = |text| usize::from_str_radix(text, 16).ok();
            Some((number(from)?, number(to)?))
        })
        .collect();
    let (start, mut state, mut words) = (Instant::now(), seed | 1, 0_u64);
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    while start.elapsed() < time {
        for &(from, to) in &ranges {
            for _ in 0..64 {
                // The first pages hold the words that control everything.
                let span = if random() % 4 == 0 { to - from } else { (to - from).min(64 << 10) };
                let at = from + usize::try_from(random()).unwrap_or(0) % (span / 8) * 8;
                let value = match random() % 4 {
                    0 => 0,
                    1 => u64::MAX,
                    2 => random() % 4096,
                    _ => random(),
                };
                let word = std::ptr::with_exposed_provenance::<AtomicU64>(at);
                // SAFETY: an aligned word of a mapping that was listed as writable; the session that
                // owns it lives as long as the engine, which is not dropped meanwhile.
                unsafe { &*word }.store(value, Ordering::Relaxed);
                words += 1;
            }
        }
    }
    Say::Number(if ranges.is_empty() { 0 } else { words })
}

// ---- whoever asks ----

enum Line {
    Process { child: Child, stdin: Option<ChildStdin> },
    Thread { asks: Option<Sender<Ask>>, thread: Option<JoinHandle<()>> },
}

/// An agent, as the test sees it. Ends with it.
pub struct Agent {
    name: String,
    line: Line,
    says: Receiver<Say>,
    /// How its process ends is nobody's concern: the test has killed it, or it may die by itself.
    may_die: bool,
}

impl Agent {
    /// In another process, without an engine yet.
    pub fn process(name: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("a path"));
        command.env(ROLE, name).stdin(Stdio::piped()).stdout(Stdio::piped());
        // Libraries leave files open for programs that are started, which then hold their connections. What
        // the agent is to have is put in its place afterwards.
        // SAFETY: a system call, and nothing else, between fork and exec.
        unsafe {
            command.pre_exec(|| {
                let flags = libc::c_int::try_from(libc::CLOSE_RANGE_CLOEXEC).unwrap_or(0);
                match libc::close_range(3, libc::c_uint::MAX, flags) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        let mut child = command.spawn().expect("started");
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().expect("piped"));
        let (answers, says) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { return };
                let say = serde_json::from_str(&line).unwrap_or(Say::Failed(line));
                if answers.send(say).is_err() {
                    return;
                }
            }
        });
        Self { name: name.to_owned(), line: Line::Process { child, stdin }, says, may_die: false }
    }

    /// In this process, without an engine yet.
    pub fn thread(name: &str) -> Self {
        let ((asks, inbox), (answers, says)) = (channel(), channel());
        let body = move || serve(&inbox, |say| answers.send(say).is_ok());
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body);
        let line = Line::Thread { asks: Some(asks), thread: Some(thread.expect("started")) };
        Self { name: name.to_owned(), line, says, may_die: false }
    }

    /// Asks, and goes on.
    pub fn post(&mut self, ask: Ask) {
        let gone = match &mut self.line {
            Line::Process { stdin, .. } => {
                let line = serde_json::to_string(&ask).expect("a line");
                let stdin = stdin.as_mut().expect("alive");
                writeln!(stdin, "{line}").and_then(|()| stdin.flush()).is_err()
            }
            Line::Thread { asks, .. } => asks.as_ref().expect("alive").send(ask).is_err(),
        };
        assert!(!gone, "agent {} is gone", self.name);
    }

    /// The answer, while `me` moves.
    pub fn answer(&mut self, me: Option<&Host>) -> Say {
        let limit = patience() + patience();
        let say = match me.filter(|me| me.is_polled()) {
            None => self.says.recv_timeout(limit).map_err(|error| match error {
                RecvTimeoutError::Timeout => TryRecvError::Empty,
                RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
            }),
            Some(me) => {
                let got = me.until(limit, || match self.says.try_recv() {
                    Err(TryRecvError::Empty) => None,
                    other => Some(other),
                });
                got.unwrap_or(Err(TryRecvError::Empty))
            }
        };
        match say {
            Ok(Say::Failed(why)) => panic!("agent {}: {why}", self.name),
            Ok(say) => say,
            Err(TryRecvError::Empty) => panic!("agent {} does not answer", self.name),
            Err(TryRecvError::Disconnected) => panic!("agent {} is gone", self.name),
        }
    }

    /// From now on it may die by itself, of what it does to itself.
    pub fn may_die(&mut self) {
        self.may_die = true;
    }

    /// The answer, or `None` if the agent has died.
    pub fn answer_if_alive(&mut self, me: &Host) -> Option<Say> {
        let say = me.until(patience(), || match self.says.try_recv() {
            Err(TryRecvError::Empty) => None,
            other => Some(other.ok()),
        });
        say.unwrap_or_else(|| panic!("agent {} does not answer", self.name))
    }

    pub fn ask(&mut self, me: &Host, ask: Ask) -> Say {
        self.post(ask);
        self.answer(Some(me))
    }

    /// Asks for something that is answered by [`Say::Fine`].
    pub fn tell(&mut self, me: &Host, ask: Ask) {
        let asked = format!("{ask:.200?}");
        assert_eq!(self.ask(me, ask), Say::Fine, "agent {}: {asked}", self.name);
    }

    pub fn build(&mut self, setup: &Setup) -> NetAddr {
        self.post(Ask::Build(setup.clone()));
        match self.answer(None) {
            Say::Address(address) => parse(&address),
            other => panic!("{other:?}"),
        }
    }

    /// The number of its process.
    pub fn pid(&self) -> u32 {
        let Line::Process { child, .. } = &self.line else { panic!("not a process") };
        child.id()
    }

    /// Sends a signal to the process; waits for its death if it is a deadly one, and until all of its threads stand
    /// still if it is to stop.
    pub fn signal(&mut self, signal: Signal) {
        let Line::Process { child, .. } = &mut self.line else { panic!("not a process") };
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid")).expect("a pid");
        kill_process(pid, signal).expect("signalled");
        if signal == Signal::KILL {
            let status = child.wait().expect("reaped");
            let by_us = status.signal() == Some(libc::SIGKILL);
            let is_expected = std::mem::replace(&mut self.may_die, true) || by_us;
            assert!(is_expected, "agent {} had died before: {status}", self.name);
        }
        if signal == Signal::STOP {
            let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).expect("a child");
            assert!(stopped.is_some_and(|(_, status)| status.stopped()), "{stopped:?}");
        }
    }

    pub fn memory(&mut self, me: &Host, bytes: u64, own: Own) -> (usize, MrDesc) {
        self.region(me, Ask::Memory { bytes, own })
    }

    /// Memory of its own that nobody else may write to, and what describes it all the same.
    pub fn private_memory(&mut self, me: &Host, bytes: u64) -> (usize, MrDesc) {
        self.region(me, Ask::PrivateMemory { bytes })
    }

    fn region(&mut self, me: &Host, ask: Ask) -> (usize, MrDesc) {
        match self.ask(me, ask) {
            Say::Region { at, desc } => (at, MrDesc::decode(&desc).expect("a descriptor")),
            other => panic!("{other:?}"),
        }
    }

    /// Waits until a write of the agent's flood has failed; returns how.
    pub fn flood_failed(&mut self, me: &Host) -> String {
        let ms = u64::try_from(patience().as_millis()).expect("small");
        match self.ask(me, Ask::FloodFailed { ms }) {
            Say::Text(why) => why,
            other => panic!("{other:?}"),
        }
    }

    pub fn counter(&mut self, me: &Host) -> (usize, ImmTag) {
        self.counter_of(me, None)
    }

    pub fn counter_of(&mut self, me: &Host, slot: Option<u16>) -> (usize, ImmTag) {
        match self.ask(me, Ask::Counter { slot }) {
            Say::Counter { at, tag } => (at, ImmTag::from_bits(tag).expect("a tag")),
            other => panic!("{other:?}"),
        }
    }

    /// Waits at the agent's counter for writes that come.
    pub fn count(&mut self, me: &Host, counter: usize, writes: u64) {
        let ms = u64::try_from(patience().as_millis()).expect("small");
        self.tell(me, Ask::Count { counter, writes, ms });
    }

    pub fn peer(&mut self, me: &Host, address: &NetAddr) -> PeerId {
        match self.ask(me, Ask::Peer { address: address.to_string() }) {
            Say::Peer(peer) => peer_of(peer),
            other => panic!("{other:?}"),
        }
    }

    pub fn number(&mut self, me: &Host, ask: Ask) -> u64 {
        match self.ask(me, ask) {
            Say::Number(number) => number,
            other => panic!("{other:?}"),
        }
    }

    pub fn place(&mut self, me: &Host, ask: Ask) -> Option<u64> {
        match self.ask(me, ask) {
            Say::Place(place) => place,
            other => panic!("{other:?}"),
        }
    }

    /// Checks that the agent's memory has `len` bytes of the pattern at `offset`.
    pub fn check(&mut self, me: &Host, region: usize, offset: u64, len: u64, pattern: Pattern) {
        let wrong = self.place(me, Ask::Mismatch { region, offset, len, pattern, at: 0 });
        assert_eq!(wrong, None, "byte of the {len} at {offset} that is wrong ({pattern:x?})");
    }

    /// Checks that the agent's memory has nothing but `byte` there.
    pub fn check_only(&mut self, me: &Host, region: usize, offset: u64, len: u64, byte: u8) {
        let other = self.place(me, Ask::FirstOther { region, offset, len, byte });
        assert_eq!(other, None, "byte of the {len} at {offset} that is not {byte:#x}");
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        match &mut self.line {
            Line::Process { child, stdin } => {
                drop(stdin.take());
                let ended = end_of(child);
                if ended.is_none() {
                    // Stopped, or late.
                    eprintln!("agent {} does not end, and is killed", self.name);
                    let _ = child.kill();
                    let _ = child.wait();
                }
                let is_well = self.may_die || ended.is_none_or(|status| status.success());
                // What fails says more than what follows from it.
                let is_told = is_well || std::thread::panicking();
                assert!(is_told, "agent {} has died: {ended:?}", self.name);
            }
            Line::Thread { asks, thread } => {
                drop(asks.take());
                if let Some(thread) = thread.take().filter(|_| !std::thread::panicking()) {
                    let _ = thread.join();
                }
            }
        }
    }
}

/// How a process ends whose input has ended, if it does soon.
fn end_of(child: &mut Child) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        let ended = child.try_wait().expect("a child");
        if ended.is_some() || start.elapsed() > Duration::from_secs(2) {
            return ended;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}
