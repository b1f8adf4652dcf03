//! A provider and a hostile peer: the handshake, the socket's messages, and every word of the segment.
//!
//! The peer is played in this process, by what the private parts offer to `cfg(fuzzing)`. Whatever it does,
//! the provider must not crash; what was accepted is reported once; memory that the peer was not granted, or
//! no longer is, keeps its bytes; and what is reported of the peer is reported while it is connected.
#![no_main]

use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arbitrary::Arbitrary;
use immwire::provider::{Memory, Path, Provider, Registered, Sink};
use immwire::shm::fuzzing::{Impostor, Parts, Place, Rogue};
use immwire::shm::{ForeignPath, ShmConfig, ShmProvider};
use immwire_core::group::{Token, WorkError, WorkRequest};
use immwire_core::id::{EngineId, NicIndex, PeerId, Time};
use immwire_core::imm::Imm;
use immwire_core::mailbox::Geometry;
use immwire_core::peer::DownReason;
use immwire_core::plan::{PageRun, RunLayout};
use immwire_core::region::{Keys, MrDesc, Rights};
use immwire_core::wire::{Hello, NetAddr, NicAddr, ProviderKind, Refusal, Wire};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input {
    /// Who calls.
    rogue_calls: bool,
    nics: (u8, u8),
    /// In place of the n-th message of the handshake.
    noise: Option<(u8, Vec<u8>)>,
    acts: Vec<Act>,
}

#[derive(Debug, Arbitrary)]
enum Act {
    /// What the provider's owner does.
    Poll,
    Look,
    Sleep,
    Post {
        nic: u8,
        remote: u8,
        key: u8,
        dst: u16,
        len: u16,
        imm: Option<u32>,
    },
    Revoke,
    Abort,
    Disconnect,
    /// What the peer does.
    Say {
        bytes: Vec<u8>,
        file: Option<u16>,
    },
    Message {
        kind: u8,
        word: u64,
        base: u64,
        len: u64,
        file: Option<u16>,
    },
    Hear,
    Answer {
        how: u8,
        base: u16,
        len: u16,
        file: Option<u16>,
    },
    Write {
        outbound: bool,
        place: Where,
        value: Value,
    },
    Immediate {
        lane: u8,
        value: u32,
    },
    Record {
        key: u8,
        dst: u16,
        len: u32,
        flags: u8,
        nic: u8,
        imm: u32,
    },
    Leave,
}

#[derive(Debug, Arbitrary)]
enum Where {
    Control(u8),
    Credit(u8),
    Grant(u16),
    Lane(u8, u16),
    Bounce(u16),
}

#[derive(Debug, Arbitrary)]
enum Value {
    Small(u8),
    /// In the bounce ring, a position; in a grant, a key.
    Lines(u16),
    Key(u8),
    Any(u64),
}

impl Value {
    fn word(&self, keys: &[u64; 2]) -> u64 {
        match *self {
            Self::Small(value) => value.into(),
            Self::Lines(value) => u64::from(value) * 64,
            Self::Key(key) => keys[usize::from(key) % 2],
            Self::Any(value) => value,
        }
    }
}

const PEER: PeerId = PeerId { index: 1, generation: 1 };
const US: EngineId = EngineId(1);
const THEM: EngineId = EngineId(2);
const OPEN_BYTES: usize = 4096;
const SECRET_BYTES: usize = 256;
const SECRET: u8 = 0x5c;

fuzz_target!(|input: Input| {
    let mut world = World::new(input.nics);
    if world.shake_hands(input.rogue_calls, input.noise.as_ref()).is_some() {
        for act in &input.acts {
            world.act(act);
        }
    }
    world.end();
});

/// The provider's owner: keeps account of what is reported.
struct Ears {
    hello: Hello,
    connected: bool,
    outstanding: BTreeSet<u64>,
    /// What was not begun is given back.
    is_aborting: bool,
    nics: u8,
}

impl Sink for Ears {
    fn has_more(&self, _: u8) -> bool {
        false
    }

    fn work_done(&mut self, nic: NicIndex, token: Token, _: Result<(), WorkError>) {
        assert!(nic < 16);
        assert!(self.outstanding.remove(&token.bits()), "{} was reported twice", token.bits());
    }

    fn immediate(&mut self, nic: NicIndex, peer: PeerId, _: u32) {
        assert!(nic < self.nics && peer == PEER, "nic {nic} of {}, {peer}", self.nics);
        assert!(self.connected, "an immediate of a peer that is not connected");
    }

    fn incoming(&mut self, hello: &Hello) -> Result<(PeerId, Hello), Refusal> {
        assert!(hello.mailbox.range(0, hello.geometry.bytes()).is_ok());
        // Only what is there already is of another opinion.
        if self.connected { Err(Refusal::Busy) } else { self.admit() }
    }

    fn connected(&mut self, peer: PeerId, _: &Hello) {
        assert_eq!(peer, PEER);
        self.connected = true;
    }

    fn disconnected(&mut self, peer: PeerId, _: DownReason) {
        assert_eq!(peer, PEER);
        assert!(self.outstanding.is_empty(), "a peer went before its pieces were reported");
        self.connected = false;
    }

    fn nic_changed(&mut self, nic: NicIndex, _: bool) {
        panic!("nic {nic} changed, of a provider whose NICs do not");
    }

    fn path_broken(&mut self, _: PeerId, path: Path) {
        panic!("{path:?} broke, of a provider whose paths do not");
    }

    fn path_restored(&mut self, _: PeerId, path: Path) {
        panic!("{path:?} was restored, and never broke");
    }

    fn undelivered(&mut self, work: &WorkRequest) {
        assert!(self.is_aborting, "{work:?} is undelivered, and no path broke");
        self.work_done(work.nic, work.token, Err(WorkError::Flushed));
    }

    fn page_run(&self, _: &WorkRequest, _: &mut [u32], _: &mut [u32]) -> Option<RunLayout> {
        None
    }
}

impl Ears {
    fn admit(&mut self) -> Result<(PeerId, Hello), Refusal> {
        // As for one that delivers before it says that it is connected.
        self.connected = true;
        Ok((PEER, self.hello.clone()))
    }
}

struct World {
    provider: ShmProvider,
    ears: Ears,
    rogue: Option<Rogue>,
    impostor: Option<Impostor>,
    nics: (u8, u8),
    now: u64,
    open: (Box<[u8]>, Registered),
    secret: (Box<[u8]>, Registered),
    source: Box<[u8]>,
    /// What the open region held when it was withdrawn for good.
    withdrawn: Option<Vec<u8>>,
    posted: u64,
    asked: Vec<u64>,
    /// Where the rogue is in its lanes, and in its bounce ring.
    lanes: [u64; 64],
    bounce: u64,
}

/// What an engine says of itself, with so many NICs at that name.
fn hello(engine: EngineId, nics: u8, name: &[u8; 16]) -> Hello {
    let address = heapless::Vec::from_slice(name).expect("short");
    let nic = NicAddr { speed_gbps: 100, address };
    let all = vec![nic; nics.into()];
    let address = NetAddr::new(ProviderKind::Shm, engine, &all).expect("1 to 8");
    let keys = Keys::new(&[7; 8][..nics.into()]).expect("1 to 8");
    let rights = Rights::REMOTE_WRITE;
    let geometry = Geometry::new(1, 64).expect("possible");
    let (base, len) = (4096, geometry.bytes());
    let mailbox = MrDesc { owner: engine, base, len, generation: 1, rights, keys };
    Hello { address, mailbox, geometry, heartbeat_ms: 100, call: 1 }
}

fn encoded(hello: &Hello) -> Vec<u8> {
    let mut out = vec![0; Hello::ENCODED_MAX];
    let len = hello.encode(&mut out).expect("it agrees with itself");
    out.truncate(len);
    out
}

/// A name that nobody listens at.
fn fresh_name() -> [u8; 16] {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    let number = NAMES.fetch_add(1, Ordering::Relaxed);
    let mut name = *b"immwire fuzz....";
    name[..4].copy_from_slice(&std::process::id().to_le_bytes());
    name[8..].copy_from_slice(&number.to_le_bytes());
    name
}

fn register(provider: &ShmProvider, bytes: &mut [u8], rights: Rights) -> Registered {
    let ptr = NonNull::new(bytes.as_mut_ptr()).expect("memory");
    // SAFETY: the memory is on the heap, and outlives the provider: `World` drops the provider first.
    unsafe { provider.memory().register(ptr, bytes.len(), rights) }.expect("there is room")
}

impl World {
    fn new(nics: (u8, u8)) -> Self {
        // Of the eight, mostly few.
        let (ours, theirs) = (nics.0 % 8 + 1, nics.1 % 8 + 1);
        // The other paths would write to addresses of this very process that a fuzzer made up.
        let foreign = ForeignPath::BounceOnly;
        let config = ShmConfig { nics: ours, foreign, ..ShmConfig::new(US) };
        let provider = ShmProvider::new(config).expect("a provider");
        let mut open = vec![1; OPEN_BYTES].into_boxed_slice();
        let mut secret = vec![SECRET; SECRET_BYTES].into_boxed_slice();
        let rights = (Rights::REMOTE_WRITE, Rights::LOCAL);
        let registered =
            (register(&provider, &mut open, rights.0), register(&provider, &mut secret, rights.1));
        let name = provider.address().nics()[0].address.as_slice().try_into().expect("16 bytes");
        let hello = hello(US, ours, &name);
        Self {
            ears: Ears { hello, connected: false, outstanding: BTreeSet::new(), is_aborting: false, nics: ours },
            provider,
            rogue: None,
            impostor: None,
            nics: (ours, theirs),
            now: 0,
            open: (open, registered.0),
            secret: (secret, registered.1),
            source: vec![3; 70_000].into_boxed_slice(),
            withdrawn: None,
            posted: 0,
            asked: Vec::new(),
            lanes: [0; 64],
            bounce: 0,
        }
    }

    fn look(&mut self) {
        self.provider.disarm();
        self.poll();
    }

    fn poll(&mut self) {
        self.now += 1_000_000;
        self.provider.poll(Time::from_nanos(self.now), &mut self.ears);
        if let Some(bytes) = &self.withdrawn {
            assert!(self.open.0[..] == bytes[..], "written to after it was withdrawn");
        }
    }

    /// The rogue's `n`-th message: the right one, or noise in its place.
    fn say(&mut self, n: u8, noise: Option<&(u8, Vec<u8>)>, right: Vec<u8>) -> Option<bool> {
        let wrong = noise.filter(|(at, _)| *at % 4 == n).map(|(_, bytes)| bytes.clone());
        Some(self.rogue.as_ref()?.say(&wrong.unwrap_or(right), None))
    }

    /// Goes through the handshake; `None` if somebody does not want to go on.
    fn shake_hands(&mut self, rogue_calls: bool, noise: Option<&(u8, Vec<u8>)>) -> Option<()> {
        let (ours, theirs) = self.nics;
        let name = fresh_name();
        let hello = hello(THEM, theirs, &name);
        let parts = Parts { hello: encoded(&hello), ..Parts::default() };
        if rogue_calls {
            let rogue = Rogue::call(&self.provider.address())?;
            let parts = Parts { target: rogue.target(), nics: (theirs, ours), ..parts };
            self.rogue = Some(rogue);
            self.say(0, noise, parts.encode(0)?.0)?;
            self.look();
            self.look();
            self.rogue.as_mut()?.hear(parts.nics);
            let prove = match noise {
                Some((1, bytes)) => bytes.clone(),
                _ => parts.encode(2)?.0,
            };
            self.rogue.as_mut()?.prove(&prove, parts.nics);
            self.look();
        } else {
            let impostor = Impostor::listen(&hello.address)?;
            let ours_hello = self.ears.hello.clone();
            self.provider
                .connect(Time::ZERO, PEER, &hello.address, &ours_hello)
                .expect("somebody listens");
            self.rogue = Some(impostor.accept()?);
            self.impostor = Some(impostor);
            let parts = Parts { nics: (ours, theirs), ..parts };
            self.rogue.as_mut()?.hear(parts.nics);
            self.say(0, noise, parts.encode(1)?.0)?;
            self.look();
            self.rogue.as_mut()?.hear(parts.nics);
            self.say(1, noise, parts.encode(3)?.0)?;
            // Delivered before it is said to be connected, or not at all.
            self.look();
        }
        self.rogue.as_mut()?.hear(self.nics);
        Some(())
    }

    fn keys(&self) -> [u64; 2] {
        [&self.open.1, &self.secret.1].map(|region| region.desc.keys.get(0).expect("a key"))
    }

    fn act(&mut self, act: &Act) {
        match act {
            Act::Poll => self.poll(),
            Act::Look => self.look(),
            Act::Sleep => {
                self.provider.arm();
            }
            Act::Post { nic, remote, key, dst, len, imm } => {
                self.post(*nic, *remote, *key, *dst, *len, *imm);
            }
            Act::Revoke => {
                let revoked = self.provider.memory().revoke(&self.open.1, Duration::ZERO);
                if revoked.is_ok() {
                    self.withdrawn = Some(self.open.0.to_vec());
                }
            }
            Act::Abort => {
                self.ears.is_aborting = true;
                self.provider.abort(PEER, &mut self.ears);
                self.ears.is_aborting = false;
            }
            Act::Disconnect => self.disconnect(),
            Act::Leave => self.rogue = None,
            _ => {
                if let Some(mut rogue) = self.rogue.take() {
                    self.misbehave(&mut rogue, act);
                    self.rogue = Some(rogue);
                }
            }
        }
    }

    fn post(&mut self, nic: u8, remote: u8, key: u8, dst: u16, len: u16, imm: Option<u32>) {
        self.posted += 1;
        let token = Token::from_bits(self.posted);
        let work = WorkRequest {
            token,
            // Mostly there is such a NIC.
            nic: nic % (self.nics.0 + u8::from(nic > 250)),
            remote_nic: remote % (self.nics.1 + u8::from(remote > 250)),
            peer: PEER,
            src: self.source.as_ptr() as u64,
            src_key: 0,
            dst: u64::from(dst),
            dst_key: 1 << 32 | u64::from(key % 4),
            len: len.into(),
            run: PageRun::NONE,
            imm: imm.map(Imm::from_bits),
        };
        // As engines do with what is short.
        if self.provider.write_at_once(work.nic, &work.piece()) {
            return;
        }
        // It may be reported before it is said to be accepted.
        self.ears.outstanding.insert(self.posted);
        if self.provider.post(work.nic, &[work], &mut self.ears) == 0 {
            assert!(self.ears.outstanding.remove(&self.posted), "reported, and not accepted");
        }
    }

    fn misbehave(&mut self, rogue: &mut Rogue, act: &Act) {
        let nics = if self.impostor.is_some() { self.nics } else { (self.nics.1, self.nics.0) };
        match act {
            Act::Say { bytes, file } => {
                rogue.say(bytes, file.map(usize::from));
            }
            Act::Message { kind, word, base, len, file } => {
                let (word, base, len) = (*word, *base, *len);
                let parts = Parts { word, base, len, nics, ..Parts::default() };
                if let Some((bytes, _)) = parts.encode(*kind) {
                    rogue.say(&bytes, file.map(usize::from));
                }
            }
            Act::Hear => {
                while let Some(bytes) = rogue.hear(nics) {
                    // A question about a region.
                    if let (Some([8, 0]), Some(key)) = (bytes.get(6..8), bytes.get(8..16)) {
                        self.asked.push(u64::from_le_bytes(key.try_into().expect("8 bytes")));
                    }
                }
            }
            Act::Answer { how, base, len, file } => {
                let Some(word) = self.asked.pop() else { return };
                let (base, len) = (u64::from(*base), u64::from(*len));
                let parts = Parts { word, base, len, nics, ..Parts::default() };
                if let Some((bytes, _)) = parts.encode(9 + how % 3) {
                    rogue.say(&bytes, file.map(usize::from));
                }
            }
            Act::Write { outbound, place, value } => {
                let place = match *place {
                    Where::Control(number) => Place::Control(number),
                    Where::Credit(lane) => Place::Credit(lane),
                    Where::Grant(id) => Place::Grant(id),
                    Where::Lane(lane, entry) => Place::Lane(lane, entry),
                    Where::Bounce(word) => Place::Bounce(word.into()),
                };
                if let Some(word) = rogue.word(*outbound, place) {
                    word.store(value.word(&self.keys()), Ordering::Release);
                }
            }
            Act::Immediate { lane, value } => self.immediate(rogue, *lane, *value),
            Act::Record { key, dst, len, flags, nic, imm } => {
                self.record(rogue, (*key, *dst, *len), (*flags, *nic, *imm));
            }
            _ => {}
        }
    }

    /// Pushes an immediate as an honest peer does.
    fn immediate(&mut self, rogue: &Rogue, lane: u8, value: u32) {
        let lane = lane % (self.nics.0 * self.nics.1);
        let position = &mut self.lanes[usize::from(lane)];
        let (entry, lap) = (*position % 1024, *position / 1024 + 1);
        let entry = u16::try_from(entry).expect("small");
        if let Some(word) = rogue.word(true, Place::Lane(lane, entry)) {
            word.store(u64::from(value) << 32 | lap, Ordering::Release);
            *position += 1;
        }
        if let Some(word) = rogue.word(true, Place::Control(1)) {
            word.fetch_or(1 << lane, Ordering::Release);
        }
    }

    /// Puts a record into the bounce ring, well formed but for what the fuzzer chose.
    fn record(&mut self, rogue: &Rogue, to: (u8, u16, u32), how: (u8, u8, u32)) {
        let ((key, dst, len), (flags, nic, imm)) = (to, how);
        // Mostly short.
        let len = match len % 8 {
            0 => len,
            1 | 2 => len % 6000,
            _ => len % 200,
        };
        // Mostly an immediate.
        let imm = u64::from(imm) << if flags & 0x80 == 0 { 0 } else { 8 };
        let region = if key % 2 == 0 { &self.open.1 } else { &self.secret.1 };
        let dst = region.desc.base.wrapping_add_signed(i64::from(dst) % 5000 - 400);
        // Mostly a NIC that there is.
        let nic = if nic > 220 { nic } else { nic % self.nics.0 };
        let shape = u64::from(len) | u64::from(flags) << 32 | u64::from(nic) << 40;
        let key = self.keys()[usize::from(key) % 2].wrapping_add(u64::from(key > 200));
        for (n, value) in (0..).zip([key, dst, shape, imm, 0]) {
            let at = u32::try_from((self.bounce / 8 + n) % (1 << 17)).expect("small");
            if let Some(word) = rogue.word(true, Place::Bounce(at)) {
                word.store(value, Ordering::Relaxed);
            }
        }
        self.bounce += 64 + u64::from(len).next_multiple_of(64);
        for (control, value) in [(2, self.bounce), (3, 1)] {
            if let Some(word) = rogue.word(true, Place::Control(control)) {
                word.store(value, Ordering::Release);
            }
        }
    }

    fn disconnect(&mut self) {
        self.provider.disconnect(PEER, &mut self.ears);
        assert!(self.ears.outstanding.is_empty(), "a piece was never reported");
        self.ears.connected = false;
    }

    /// A last try at what is withdrawn, and at what was never granted; then everybody leaves.
    fn end(mut self) {
        self.look();
        self.act(&Act::Revoke);
        if let Some(rogue) = self.rogue.take() {
            for key in [0, 1] {
                self.record(&rogue, (key, 400, 64), (7, 0, 5));
            }
            self.rogue = Some(rogue);
        }
        self.poll();
        self.disconnect();
        self.look();
        assert!(self.secret.0.iter().all(|byte| *byte == SECRET), "the secret was written to");
        assert!(self.source.iter().all(|byte| *byte == 3), "the source was written to");
        drop(self.provider);
    }
}
