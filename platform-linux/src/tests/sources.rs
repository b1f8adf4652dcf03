//! What messages and answers are written from stays registered until all of it is reported, over a transport that does as it is told.
//!
//! Knows of no network: when a piece ends, and what the peer says, is the test's to choose.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU8;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use immwire_core::group::{WorkError, WorkRequest};
use immwire_core::id::{EngineId, NicIndex, PeerId, Time};
use immwire_core::mailbox::{Control, Geometry};
use immwire_core::receipt::Epoch;
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire_core::wire::{Hello, NetAddr, NicAddr, ProviderKind};

use super::LONG;
use crate::provider::{
    ConnectError, Memory, NicInfo, NicLimits, Place, Provider, Receipt, RegisterError, Registered,
    RemotePath, RevokeError, Sink, Unfenced,
};
use crate::{Clock, Driver, PeerState, TransferEngine};

/// What there is of memory: each region's key is its number.
#[derive(Default)]
struct Regions {
    last: u32,
    /// Kept until nobody can refer to it.
    all: Vec<Arc<[AtomicU8]>>,
    /// Withdrawn, or released.
    gone: Vec<u64>,
}

#[derive(Default)]
struct Plain(Mutex<Regions>);

impl Plain {
    fn regions(&self) -> MutexGuard<'_, Regions> {
        self.0.lock().unwrap()
    }
}

impl Memory for Plain {
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError> {
        let memory: Arc<[AtomicU8]> = (0..bytes).map(|_| AtomicU8::new(0)).collect();
        let ptr = NonNull::from(&*memory).cast();
        self.regions().all.push(memory);
        // SAFETY: kept as long as this is.
        unsafe { self.register(ptr, bytes, Rights::REMOTE_WRITE) }
    }

    unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Registered, RegisterError> {
        let mut regions = self.regions();
        regions.last += 1;
        let (id, base, bytes) = (regions.last, ptr.as_ptr() as u64, len as u64);
        let keys = Keys::new(&[id.into()]).unwrap();
        let local = LocalMr { base, len: bytes, generation: id, keys };
        let desc = MrDesc { owner: EngineId(1), base, len: bytes, generation: id, rights, keys };
        Ok(Registered { ptr, len, local, desc, id, place: Place::Host })
    }

    fn revoke(&self, region: &Registered, _: Duration) -> Result<(), RevokeError> {
        self.regions().gone.push(region.id.into());
        Ok(())
    }

    fn release(&self, region: Registered) {
        self.regions().gone.push(region.id.into());
    }
}

/// What is told at the next poll.
enum Tell {
    Hello(Box<Hello>),
    Ended(WorkRequest, Result<(), WorkError>),
    Imm(PeerId, u32),
}

#[derive(Default)]
struct Script {
    posted: Vec<WorkRequest>,
    tell: Vec<Tell>,
}

struct Told {
    nics: Vec<NicInfo>,
    memory: Arc<Plain>,
    script: Arc<Mutex<Script>>,
    fd: File,
}

impl Provider for Told {
    type Memory = Plain;

    fn nics(&self) -> &[NicInfo] {
        &self.nics
    }

    fn memory(&self) -> &Arc<Plain> {
        &self.memory
    }

    fn address(&self) -> NetAddr {
        address(1)
    }

    fn post<S: Sink>(&mut self, _: NicIndex, work: &[WorkRequest], _: &mut S) -> usize {
        self.script.lock().unwrap().posted.extend(work);
        work.len()
    }

    fn poll<S: Sink>(&mut self, _: Time, sink: &mut S) -> bool {
        let tell = std::mem::take(&mut self.script.lock().unwrap().tell);
        let any = !tell.is_empty();
        for one in tell {
            match one {
                Tell::Hello(hello) => _ = sink.incoming(&hello).unwrap(),
                Tell::Ended(work, outcome) => sink.work_done(work.nic, work.token, outcome),
                Tell::Imm(peer, imm) => sink.immediate(0, peer, imm),
            }
        }
        any
    }

    fn connect(&mut self, _: Time, _: PeerId, _: &NetAddr, _: &Hello) -> Result<(), ConnectError> {
        Ok(())
    }

    /// What is in flight ends when the test says so.
    fn disconnect<S: Sink>(&mut self, _: PeerId, _: &mut S) {}

    fn abort<S: Sink>(&mut self, _: PeerId, _: &mut S) {}

    fn fence<S: Sink>(&mut self, _: PeerId, _: RemotePath, _: &mut S) -> Result<Receipt, Unfenced> {
        Ok(Receipt::default())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}
}

fn address(engine: u64) -> NetAddr {
    let nic = NicAddr { speed_gbps: 1, address: heapless::Vec::new() };
    NetAddr::new(ProviderKind::Sim, EngineId(engine), &[nic]).unwrap()
}

/// An engine with a peer.
struct World {
    engine: TransferEngine,
    driver: Driver,
    memory: Arc<Plain>,
    script: Arc<Mutex<Script>>,
    peer: PeerId,
}

impl World {
    fn new() -> Self {
        let limits = NicLimits {
            max_message_bytes: 1 << 30,
            min_piece_bytes: 1,
            queue_depth: 64,
            inline_bytes: 0,
            max_sge: 1,
            batch_bytes: 1 << 20,
            together: 1,
            pages_per_piece: 1,
        };
        let nics = vec![NicInfo { name: "none".to_owned(), speed_gbps: 1, limits }];
        let (memory, script) = (Arc::new(Plain::default()), Arc::new(Mutex::default()));
        let fd = File::open("/dev/null").unwrap();
        let provider = Told { nics, memory: Arc::clone(&memory), script: Arc::clone(&script), fd };
        let geometry = Geometry::new(2, 128).unwrap();
        // Nothing goes to the peer but what the test wants.
        let builder = TransferEngine::builder().mailbox(2, 128);
        let builder = builder.liveness_with(|usual| usual.heartbeat = 6 * LONG);
        let (engine, driver) = builder.build_polled_on(provider, Clock::monotonic()).unwrap();
        let mailbox = MrDesc {
            owner: EngineId(2),
            base: 1 << 20,
            len: geometry.bytes(),
            generation: 1,
            rights: Rights::REMOTE_WRITE,
            keys: Keys::new(&[77]).unwrap(),
        };
        let hello = Hello { address: address(2), mailbox, geometry, heartbeat_ms: 60_000, call: 1 };
        let nobody = PeerId { index: 0, generation: 0 };
        let mut world = Self { engine, driver, memory, script, peer: nobody };
        world.tell(Tell::Hello(Box::new(hello)));
        world.peer = world.engine.peers()[0];
        world
    }

    fn tell(&mut self, tell: Tell) {
        self.script.lock().unwrap().tell.push(tell);
        self.poll_for(Duration::ZERO);
    }

    fn poll_for(&mut self, time: Duration) {
        let (start, mut steps) = (Instant::now(), 0);
        // More steps than go by between two looks at the clock.
        while steps < 40 || start.elapsed() < time {
            self.driver.poll();
            steps += 1;
        }
    }

    /// The piece that is posted next.
    fn posted(&mut self) -> WorkRequest {
        self.poll_for(Duration::ZERO);
        let posted = std::mem::take(&mut self.script.lock().unwrap().posted);
        assert_eq!(posted.len(), 1, "{posted:?}");
        posted[0]
    }

    fn is_gone(&self, key: u64) -> bool {
        self.memory.regions().gone.contains(&key)
    }
}

/// A peer is removed, or breaks the protocol, while the transport has a message to it, and an answer to what it asked: it may read them
/// until it has reported both, in whichever order. Then their memory is let go.
#[test]
fn what_messages_are_written_from_stays_until_they_are_reported() {
    for (removed, message_first) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut world = World::new();
        let peer = world.peer;
        let transfer = world.engine.submit_send(peer, b"a message").unwrap();
        let message = world.posted();
        let ask = Control::Ask { from: 0, to: 0, epoch: Epoch::ZERO };
        world.tell(Tell::Imm(peer, ask.encode()));
        let answer = world.posted();
        assert_ne!(message.src, answer.src);
        assert_eq!(message.src_key, answer.src_key, "both from the same memory");
        let key = message.src_key;
        if removed {
            world.engine.remove_peer(peer);
        } else {
            // Of a path that there is not.
            let ask = Control::Ask { from: 3, to: 0, epoch: Epoch::ZERO };
            world.tell(Tell::Imm(peer, ask.encode()));
        }
        // Longer than between two looks at what was dropped.
        world.poll_for(Duration::from_millis(50));
        assert!(matches!(world.engine.peer_state(peer), None | Some(PeerState::Down(_))));
        assert!(!world.is_gone(key), "while both are in flight");
        let (first, last) = if message_first { (message, answer) } else { (answer, message) };
        world.tell(Tell::Ended(first, Err(WorkError::PeerGone)));
        world.poll_for(Duration::from_millis(50));
        assert!(!world.is_gone(key), "while one is in flight");
        world.tell(Tell::Ended(last, Err(WorkError::PeerGone)));
        assert!(world.is_gone(key), "it is kept for nobody");
        assert!(transfer.poll_end().is_some());
    }
}

/// Where nothing is in flight it goes with the peer.
#[test]
fn what_nothing_is_written_from_goes_with_its_peer() {
    let mut world = World::new();
    let transfer = world.engine.submit_send(world.peer, b"a message").unwrap();
    let message = world.posted();
    world.tell(Tell::Ended(message, Ok(())));
    assert!(transfer.poll_end().is_some());
    assert!(!world.is_gone(message.src_key), "the peer is there");
    world.engine.remove_peer(world.peer);
    world.poll_for(Duration::ZERO);
    assert!(world.is_gone(message.src_key));
}
