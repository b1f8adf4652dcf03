//! A peer that keeps to what a test wants, and to no more: bare endpoints that speak to an engine's door, and write to its ports.
//!
//! Knows the messages, and proves nothing: there is no group key. Whatever it does not answer stays unanswered.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use immwire::core::datagram::{
    Address, Claim, DATAGRAM_MAX, Message, Nonces, Protocol, Say as Said,
};
use immwire::core::id::EngineId;
use immwire::core::mailbox::Geometry;
use immwire::core::recycle::Turn;
use immwire::core::region::{Keys, MrDesc, Rights};
use immwire::core::tenant::Tenant;
use immwire::core::wire::{Hello, NetAddr, NicAddr, ProviderKind, Refusal};
use libfabric_sys::{self as sys, Library};

use crate::rig::{self, Event, Fake, Node, Side, Write};
use crate::side;

/// Receives that are posted, and as many places for sends behind them.
const PLACES: usize = 32;

/// What an engine has said of itself in answer to a call.
pub struct Accepted {
    /// What it puts into messages to us.
    pub token: u64,
    pub theirs: Claim,
}

/// Bare endpoints: a door, and a port to write from. They are left open: the process ends with the test.
pub struct Rogue {
    node: Node,
    door: Side,
    pub port: Side,
    memory: ManuallyDrop<rig::Memory>,
    /// What engines are told to write messages to.
    mailbox: ManuallyDrop<rig::Memory>,
    contexts: ManuallyDrop<Vec<sys::fi_context2>>,
    free: Vec<usize>,
    pub heard: VecDeque<Vec<u8>>,
}

impl Rogue {
    pub fn new() -> Self {
        let fake = Fake { library: Library::load_from(side::library()).unwrap() };
        let node = Node::open(fake, fake.info());
        let (door, port) = (node.side(1024), node.side(4096));
        let memory = ManuallyDrop::new(node.memory(2 * PLACES * DATAGRAM_MAX, 0));
        let mailbox = ManuallyDrop::new(node.memory(1 << 20, 0));
        let contexts = ManuallyDrop::new((0..2 * PLACES).map(|_| *rig::context()).collect());
        let free = (PLACES..2 * PLACES).collect();
        let heard = VecDeque::new();
        let mut rogue = Self { node, door, port, memory, mailbox, contexts, free, heard };
        (0..PLACES).for_each(|at| rogue.listen(at));
        rogue
    }

    /// Another endpoint to write from.
    pub fn another_port(&self) -> Side {
        self.node.side(4096)
    }

    fn context(&mut self, at: usize) -> *mut c_void {
        rig::at(&mut self.contexts[at])
    }

    fn listen(&mut self, at: usize) {
        let (to, desc) =
            (self.memory.pointer().wrapping_byte_add(at * DATAGRAM_MAX), self.memory.desc());
        let context = self.context(at);
        // SAFETY: the place is registered and not posted now; so is its context.
        let code = unsafe {
            sys::fi_recv(self.door.ep, to, DATAGRAM_MAX, desc, sys::FI_ADDR_UNSPEC, context)
        };
        assert_eq!(code, 0, "fi_recv");
    }

    pub fn door(&self) -> Address {
        address(&self.door)
    }

    /// An address that leads here, of the engine that is asked for.
    pub fn as_engine(&self, engine: EngineId) -> NetAddr {
        let nic = NicAddr { speed_gbps: 100, address: self.door() };
        NetAddr::new(ProviderKind::Libfabric, engine, &[nic]).unwrap()
    }

    /// An engine that nobody else is.
    pub fn engine() -> EngineId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        EngineId(u64::from(std::process::id()) << 20 | NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Keeps what has come, and takes places of sends back.
    pub fn step(&mut self) {
        while let Some(event) = self.door.poll() {
            let (context, len) = match event {
                Event::Done { context, len, .. } => (context, Some(len)),
                Event::Failed { context, .. } => (context, None),
                Event::Dead => panic!("the door's queue is dead"),
            };
            let ours = self.contexts.iter();
            let mut places = ours.map(|one| std::ptr::from_ref(one) as usize);
            let at = places.position(|one| one == context).expect("ours");
            if at >= PLACES {
                self.free.push(at);
                continue;
            }
            if let Some(len) = len {
                let bytes = (0..len).map(|n| self.memory.byte(at * DATAGRAM_MAX + n)).collect();
                self.heard.push_back(bytes);
            }
            self.listen(at);
        }
    }

    /// Sends a message to a door, once there is a place for it.
    pub fn tell(&mut self, door: &Address, message: &Message<'_>) {
        let start = Instant::now();
        let at = loop {
            self.step();
            if let Some(at) = self.free.pop() {
                break at;
            }
            assert!(start.elapsed() < side::PATIENCE, "messages do not leave");
        };
        let mut bytes = [0; DATAGRAM_MAX];
        let len = message.encode(&mut bytes).unwrap();
        self.memory.fill(at * DATAGRAM_MAX, &bytes[..len]);
        let to = self.door.insert(door.as_slice().try_into().unwrap());
        let (from, desc) =
            (self.memory.pointer().wrapping_byte_add(at * DATAGRAM_MAX), self.memory.desc());
        let context = self.context(at);
        loop {
            // SAFETY: registered; nothing of the place is under way; the handle was just given out.
            let code = unsafe { sys::fi_send(self.door.ep, from, len, desc, to, context) };
            match code {
                0 => return,
                code if code == -(sys::FI_EAGAIN as isize) => self.step(),
                code => panic!("fi_send: {code}"),
            }
            assert!(start.elapsed() < side::PATIENCE, "messages are not taken");
        }
    }

    /// The first message that is wanted, while others move; what came before it is dropped.
    pub fn hear<R>(
        &mut self,
        what: &str,
        mut moves: impl FnMut(),
        mut want: impl FnMut(&Message<'_>) -> Option<R>,
    ) -> R {
        let start = Instant::now();
        loop {
            self.step();
            while let Some(bytes) = self.heard.pop_front() {
                if let Some(wanted) = Message::decode(&bytes).ok().and_then(|it| want(&it)) {
                    return wanted;
                }
            }
            assert!(start.elapsed() < side::PATIENCE, "never heard: {what}");
            moves();
        }
    }

    /// What it says of itself as an engine whose endpoints these are.
    pub fn claim(&self, engine: EngineId, ports: &[Address], turn: u32) -> Claim {
        let key = Tenant::new(1, 1).unwrap().key(u32::try_from(self.mailbox.key()).unwrap());
        let mailbox = MrDesc {
            owner: engine,
            base: self.mailbox.address(),
            len: 1 << 20,
            generation: 1,
            rights: Rights::REMOTE_WRITE,
            keys: Keys::new(&vec![key; ports.len()]).unwrap(),
        };
        let nic = NicAddr { speed_gbps: 100, address: self.door() };
        let nics = vec![nic; ports.len()];
        Claim {
            token: engine.0,
            grant: 256,
            protocol: Protocol { number: sys::FI_PROTO_EFA, version: 1, data_bytes: 4 },
            turn: Turn(turn),
            ports: ports.iter().cloned().collect(),
            gone: 0,
            hello: Hello {
                address: NetAddr::new(ProviderKind::Libfabric, engine, &nics).unwrap(),
                mailbox,
                geometry: Geometry::new(2, 4096).unwrap(),
                heartbeat_ms: 60_000,
                call: 1,
            },
        }
    }

    /// Calls an engine, which is polled meanwhile; what it answers.
    pub fn call(&mut self, host: &mut side::Side, claim: &Claim) -> Result<Accepted, Refusal> {
        let to = host.engine.address().nics()[0].address.clone();
        let target = host.engine.address().engine();
        let mut initiator = [0; 32];
        initiator[..8].copy_from_slice(&claim.token.to_le_bytes());
        let door = self.door();
        let call = Message::Call { nonce: initiator, target, door: door.clone() };
        let mut bytes = [0; DATAGRAM_MAX];
        let len = claim.encode(&mut bytes).unwrap();
        let mut nonces: Option<Nonces> = None;
        let (start, mut said) = (Instant::now(), None::<Instant>);
        loop {
            // As an engine does that is not answered.
            if said.is_none_or(|said| said.elapsed() > Duration::from_millis(50)) {
                said = Some(Instant::now());
                let (door, claim) = (door.clone(), &bytes[..len]);
                let prove =
                    nonces.map(|nonces| Message::Prove { nonces, door, proof: [0; 32], claim });
                self.tell(&to, prove.as_ref().unwrap_or(&call));
            }
            host.driver.poll();
            self.step();
            assert!(start.elapsed() < side::PATIENCE, "no answer");
            let Some(heard) = self.heard.pop_front() else { continue };
            match Message::decode(&heard) {
                Ok(Message::Challenge(of)) if of.initiator == initiator && nonces.is_none() => {
                    (nonces, said) = (Some(of), None);
                }
                Ok(Message::Accept { nonce, claim: theirs, .. }) if nonce == initiator => {
                    let theirs = Claim::decode(theirs).unwrap();
                    let token = theirs.token;
                    self.tell(&to, &Message::Session { token, say: Said::Ready { gone: 0 } });
                    return Ok(Accepted { token, theirs });
                }
                Ok(Message::Refuse { nonce, why }) if nonce == initiator => return Err(why),
                _ => {}
            }
        }
    }

    /// Says something in a session.
    pub fn say(&mut self, host: &side::Side, accepted: &Accepted, say: Said) {
        let to = host.engine.address().nics()[0].address.clone();
        self.tell(&to, &Message::Session { token: accepted.token, say });
    }

    /// Writes immediates without bytes from our door to the engine's, as [`Rogue::immediates`] does; what else comes to ours meanwhile is lost.
    pub fn knock(
        &self,
        host: &side::Side,
        accepted: &Accepted,
        imms: impl Iterator<Item = u32>,
    ) -> u32 {
        let door = host.engine.address().nics()[0].address.clone();
        let to = self.door.insert(door.as_slice().try_into().unwrap());
        self.immediates(&self.door, to, accepted, imms)
    }

    /// Writes immediates without bytes to the engine's first port, from one of ours that knows it as `to`; waits until the device has them, or
    /// says that it has not. Returns how many it has.
    pub fn immediates(
        &self,
        from: &Side,
        to: u64,
        accepted: &Accepted,
        imms: impl Iterator<Item = u32>,
    ) -> u32 {
        let mailbox = accepted.theirs.hello.mailbox;
        let key = mailbox.keys.get(0).unwrap() >> 32;
        let (mut arrived, mut context) = (0, rig::context());
        for imm in imms {
            let write = Write {
                memory: &self.memory,
                offset: 0,
                len: 0,
                data: Some(imm.into()),
                to,
                address: mailbox.base,
                key,
            };
            assert_eq!(from.post(&write, rig::at(&mut context)), 0);
            let ours = std::ptr::from_mut(&mut *context) as usize;
            loop {
                match from.next() {
                    Event::Done { context, .. } if context == ours => break arrived += 1,
                    Event::Failed { context, .. } if context == ours => break,
                    Event::Dead => panic!("our own queue is dead"),
                    _ => {}
                }
            }
        }
        arrived
    }
}

/// An endpoint's address, as messages have it.
pub fn address(side: &Side) -> Address {
    Address::from_slice(&side.address()).unwrap()
}

/// Makes our port know the engine's first, as that knows ours.
pub fn insert(from: &Side, accepted: &Accepted) -> u64 {
    from.insert(accepted.theirs.ports[0].as_slice().try_into().unwrap())
}
