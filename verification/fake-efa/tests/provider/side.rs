//! Engines on the model: two of this process, which the test polls, and one of another process.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use immwire::core::wire::Wire as _;
use immwire::{
    Builder, Driver, End, ImmCounter, LibfabricOptions, MrDesc, NetAddr, PeerId, PeerState, Region,
    SingleWrite, Transfer, TransferEngine, Transport,
};
use serde_json::Value;

/// How long anything may take here.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// Set in the environment of the other process.
const ROLE: &str = "FAKE_EFA_ROLE";

/// The model, as cargo has built it for these tests.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let deps = program.parent().unwrap();
    let found = [deps, deps.parent().unwrap()].map(|folder| folder.join("libfake_efa.so"));
    found.into_iter().find(|path| path.exists()).expect("cargo builds the library before its tests")
}

/// An engine on the model.
pub fn builder(nics: u8) -> Builder {
    let options = LibfabricOptions {
        library: Some(library()),
        provider: Some("efa".to_owned()),
        ..LibfabricOptions::default()
    };
    TransferEngine::builder().transport(Transport::Libfabric(options)).nics(nics)
}

/// The log's lines. The last one may be half written, by another process: it is left for the next look.
fn lines(log: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(log).unwrap();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The rules that the log says were broken.
pub fn violations(log: &Path) -> Vec<String> {
    let lines = lines(log);
    let broken = lines.iter().filter(|line| !line["violation"].is_null());
    broken.map(|line| format!("{}: {}", line["violation"], line["detail"])).collect()
}

/// A number of each of the log's events of a name.
pub fn logged(log: &Path, event: &str, number: &str) -> Vec<u64> {
    let lines = lines(log);
    let events = lines.iter().filter(|line| line["event"] == event);
    events.map(|line| line[number].as_u64().unwrap()).collect()
}

/// Fills a region with bytes that follow from `seed`.
pub fn pattern(region: &Region, offset: u64, len: u64, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2) | 1;
    let bytes: Vec<u8> = (0..len)
        .map(|_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            state.to_be_bytes()[0]
        })
        .collect();
    region.write(offset, &bytes).unwrap();
    bytes
}

/// A polled engine.
pub struct Side {
    pub engine: TransferEngine,
    pub driver: Driver,
}

impl Side {
    pub fn new(builder: Builder) -> Self {
        let (engine, driver) = builder.build_polled().unwrap();
        Self { engine, driver }
    }

    pub fn region(&self, bytes: usize) -> Region {
        self.engine.alloc(bytes).unwrap()
    }
}

/// Two engines that know each other.
pub struct Pair {
    pub here: Side,
    pub there: Side,
    /// The other, as `here` calls it.
    pub peer: PeerId,
    /// And the other way round.
    pub back: PeerId,
}

impl Pair {
    pub fn new(nics: (u8, u8), configure: impl Fn(Builder) -> Builder) -> Self {
        let (here, there) =
            (Side::new(configure(builder(nics.0))), Side::new(configure(builder(nics.1))));
        Self::of(here, there)
    }

    /// Two that have been on their own so far.
    pub fn of(here: Side, there: Side) -> Self {
        let nobody = PeerId { index: 0, generation: 0 };
        let mut pair = Self { here, there, peer: nobody, back: nobody };
        let address = pair.there.engine.address().clone();
        pair.peer = pair.here.driver.add_peer(&address).unwrap();
        let (one, other) = (pair.here.engine.clone(), pair.there.engine.clone());
        pair.until("connected", || {
            let back = *other.peers().first()?;
            (other.peer_state(back) == Some(PeerState::Up)).then_some(())
        });
        pair.back = pair.there.engine.peers()[0];
        let peer = pair.peer;
        pair.until("up", || (one.peer_state(peer) == Some(PeerState::Up)).then_some(()));
        pair
    }

    /// Connects to an engine of another process.
    pub fn connect(&mut self, other: &Other) -> PeerId {
        let peer = self.here.driver.add_peer(&other.address).unwrap();
        let engine = self.here.engine.clone();
        self.until("up", || (engine.peer_state(peer) == Some(PeerState::Up)).then_some(()));
        peer
    }

    /// A step of each.
    pub fn turn(&mut self) {
        self.here.driver.poll();
        self.there.driver.poll();
    }

    pub fn until<R>(&mut self, what: &str, mut done: impl FnMut() -> Option<R>) -> R {
        let start = Instant::now();
        loop {
            if let Some(result) = done() {
                return result;
            }
            assert!(start.elapsed() < PATIENCE, "never {what}");
            self.turn();
        }
    }

    pub fn end(&mut self, transfer: &Transfer) -> End {
        self.until("ended", || transfer.poll_end())
    }

    pub fn is_done(&mut self, transfer: &Transfer) {
        assert_eq!(self.end(transfer), End::Done);
    }

    pub fn counts(&mut self, counter: &ImmCounter, writes: u64) {
        self.until("counted", || counter.try_take(writes).unwrap().then_some(()));
    }

    /// Writes each length `times` times, all at once, each way; every byte is where it belongs when its count says so.
    pub fn write_both_ways(&mut self, times: usize, lens: &[usize]) {
        for forth in [true, false] {
            let (from, to, peer) = if forth {
                (&self.here, &self.there, self.peer)
            } else {
                (&self.there, &self.here, self.back)
            };
            let lens = lens.repeat(times);
            let total = lens.iter().sum::<usize>().max(1);
            let (src, dst) = (from.region(total), to.region(total));
            let bytes = pattern(&src, 0, lens.iter().sum::<usize>() as u64, total as u64);
            let counter = to.engine.counter().unwrap();
            let mut at = 0;
            let transfers: Vec<Transfer> = lens
                .iter()
                .map(|&len| {
                    let (offset, desc) = (at, dst.desc());
                    at += len as u64;
                    let write = SingleWrite {
                        peer,
                        src: &src,
                        src_offset: offset,
                        dst: &desc,
                        dst_offset: offset,
                        len: len as u64,
                        imm: Some(counter.tag()),
                    };
                    from.engine.submit_single_write(&write).unwrap()
                })
                .collect();
            self.counts(&counter, transfers.len() as u64);
            let mut came = vec![0; bytes.len()];
            dst.read(0, &mut came).unwrap();
            assert!(came == bytes, "not what was written");
            for transfer in &transfers {
                self.is_done(transfer);
            }
            assert_eq!(counter.available(), 0);
        }
    }

    /// The other engine ends; this one is not polled meanwhile.
    pub fn end_there(&mut self) {
        let unused = Side::new(builder(1));
        drop(std::mem::replace(&mut self.there, unused));
    }
}

/// An engine of another process, with a region. Killed when dropped.
pub struct Other {
    child: Child,
    pub address: NetAddr,
    pub desc: MrDesc,
}

impl Other {
    pub fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, "other")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (address, desc) = line.trim_end().split_once(' ').expect("an address and a region");
        let byte = |at: usize| u8::from_str_radix(&desc[at..at + 2], 16).unwrap();
        let desc: Vec<u8> = (0..desc.len()).step_by(2).map(byte).collect();
        Self { child, address: address.parse().unwrap(), desc: MrDesc::decode(&desc).unwrap() }
    }

    /// It is there, and does nothing; nor does its device.
    pub fn stop(&self) {
        // SAFETY: a signal, to a child that was not waited for.
        assert_eq!(unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGSTOP) }, 0);
        let mut status = 0;
        // SAFETY: as above; the status is written. It returns when every thread of it stands still.
        unsafe { libc::waitpid(self.child.id().cast_signed(), &raw mut status, libc::WUNTRACED) };
        assert!(libc::WIFSTOPPED(status), "{status:#x}");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// If this process is the other one, is that until nobody wants it any more, and returns `true` then.
pub fn serve_if_asked() -> bool {
    if std::env::var_os(ROLE).is_none() {
        return false;
    }
    let engine = builder(1).build().unwrap();
    let region = engine.alloc(64 << 10).unwrap();
    let mut bytes = [0; MrDesc::ENCODED_MAX];
    let len = region.desc().encode(&mut bytes).unwrap();
    let desc: String = bytes[..len].iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{} {desc}", engine.address());
    let _ = std::io::stdin().read(&mut [0]);
    true
}
