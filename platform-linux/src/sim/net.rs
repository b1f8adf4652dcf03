//! The fabric itself: engines, connections, messages in flight, and what happens next.
//!
//! A message ("flight") leaves its NIC after those before it, travels, and occupies the receiving NIC
//! from its head on, in order of arrival; its bytes are moved in parts until it has landed; then its
//! immediate is there to be polled, and a latency later its sender's completion. What is to be polled
//! lies in the engine's inbox. Everything is an event on one queue, by time and then by order of
//! scheduling, so that a run follows from the seed and the calls alone.
//!
//! # Invariants
//!
//! - An event names its flight with a turn: after the flight has ended, or its fate has changed, events
//!   of earlier turns do nothing.
//! - A flight is reported once: completed, failed, or undelivered. Then it is gone, and with it all that
//!   could still have been written for it. The exception are those of an engine that was killed: they
//!   are nobody's to report, and arrive until the receiver has ended the connection.
//! - From the moment a path breaks or its engine dies, what flies on carries its own copy of its bytes.
//! - On a path in order, what arrives is a prefix of what was posted.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use immwire_core::group::{NOTES_PER_PEER, Token, WorkError, WorkRequest};
use immwire_core::id::{EngineId, MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::peer::DownReason;
use immwire_core::wire::{Hello, NetAddr, Refusal};

use super::memory::{Regions, Use};
use super::model::{FabricConfig, NicModel, Order};
use super::places::Places;
use super::random::Random;
use super::trace::{Trace, TraceEvent, What};
use super::{Breaches, Death, EngineStats, Sabotage};
use crate::clock::Stepper;
use crate::provider::{ConnectError, Path, Receipt, RemotePath, Unfenced};

/// How late at most what was on its way arrives after its path broke or its sender died, if the
/// configuration does not say longer.
const AFTERLIFE: Duration = Duration::from_millis(1);

/// What an engine is to be told, before it is known whether it still wants to hear it.
#[derive(Debug)]
pub(super) enum Note {
    Done { conn: u32, nic: NicIndex, token: Token, outcome: Result<(), WorkError> },
    Immediate { conn: u32, nic: NicIndex, imm: u32 },
    Call { conn: u32, hello: Box<Hello> },
    Answer { conn: u32, hello: Box<Hello> },
    Refused { conn: u32, why: Refusal },
    Lost { conn: u32, reason: DownReason },
    Nic { nic: NicIndex, healthy: bool },
    Broken { conn: u32, path: Path },
    Restored { conn: u32, path: Path },
}

/// What an engine is told.
#[derive(Debug)]
pub(super) enum Said {
    Done { nic: NicIndex, token: Token, outcome: Result<(), WorkError> },
    Undelivered { work: WorkRequest },
    Immediate { nic: NicIndex, peer: PeerId, imm: u32 },
    Called { conn: u32, hello: Box<Hello> },
    Connected { peer: PeerId, hello: Box<Hello> },
    Disconnected { peer: PeerId, reason: DownReason },
    Nic { nic: NicIndex, healthy: bool },
    PathBroken { peer: PeerId, path: Path },
    PathRestored { peer: PeerId, path: Path },
}

#[derive(Debug)]
struct Nic {
    model: NicModel,
    egress_free: Time,
    ingress_free: Time,
    /// Pieces of transfers. Notes have room of their own, each side of a connection.
    in_flight: u16,
    up: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Alive,
    /// It stopped, or its death is seen: callers are told.
    Gone,
    /// It died, and nobody notices.
    Silent,
}

/// One engine.
#[derive(Debug)]
pub(super) struct Endpoint {
    id: EngineId,
    life: Life,
    nics: Vec<Nic>,
    pub(super) memory: Regions,
    inbox: VecDeque<Note>,
    said: VecDeque<Said>,
    /// Connection and side, by index of the peer.
    links: Vec<Option<(u32, usize)>>,
    /// Its processor is busy until then.
    busy_until: Time,
    /// It is woken then; [`Time::NEVER`] if it is not.
    wake_at: Time,
    stats: EngineStats,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Up,
    /// What was in flight awaits settlement.
    Broken,
    Settled,
}

/// What leads from a NIC of one side to one of the other.
#[derive(Debug)]
struct PathState {
    nic: NicIndex,
    remote: NicIndex,
    health: Health,
    /// The engine has been told that it broke.
    told: bool,
    /// Cut by hand, until it is mended.
    cut: bool,
    posted: u64,
    /// On a path in order: how many have arrived.
    arrived: u64,
    last_head: Time,
    last_land: Time,
    last_done: Time,
}

#[derive(Debug)]
struct Side {
    engine: u32,
    /// The other side, as this engine names it.
    peer: Option<PeerId>,
    open: bool,
    aborting: bool,
    in_flight: u32,
    /// Those that are notes, for each NIC.
    notes: [u16; MAX_NICS],
    paths: Vec<PathState>,
}

#[derive(Debug)]
struct Conn {
    /// The caller, and the called.
    sides: [Side; 2],
    connected: bool,
    /// Nothing reaches the caller before it has the answer.
    ready_at: Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Flying,
    Arrived,
    Lost,
}

#[derive(Debug)]
struct Flight {
    conn: u32,
    side: usize,
    /// Index into the side's paths.
    path: usize,
    number: u64,
    work: WorkRequest,
    places: Places,
    fate: Fate,
    outcome: Result<(), WorkError>,
    /// Not before then, however fast the receiver is.
    earliest_end: Time,
    /// Parts that were moved, a bit for each.
    moved: u64,
    /// The bytes, once the source may not be read any more.
    bytes: Option<Box<[u8]>>,
    /// Its engine is dead: nobody is to be told.
    orphan: bool,
}

#[derive(Debug, Default)]
struct Slot {
    turn: u32,
    flight: Option<Flight>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FlightId {
    index: u32,
    turn: u32,
}

#[derive(Debug)]
enum Event {
    /// The first byte is at the receiver's NIC.
    Head(FlightId),
    /// A part of the bytes is moved.
    Part(FlightId, u8),
    /// All of it is there.
    Land(FlightId),
    /// The sender learns of it.
    Done(FlightId),
    /// It is taken back, if it has not arrived.
    Flush(FlightId),
    Note(u32, Note),
    Wake(u32),
    Restore {
        conn: u32,
        side: usize,
        path: usize,
    },
    /// Sabotage: bytes that are written when nobody expects it.
    Stray {
        engine: u32,
        nic: NicIndex,
        work: Box<WorkRequest>,
        places: Box<Places>,
        bytes: Box<[u8]>,
    },
}

#[derive(Debug)]
struct Entry {
    at: Time,
    serial: u64,
    event: Event,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.serial) == (other.at, other.serial)
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.serial).cmp(&(other.at, other.serial))
    }
}

/// The fabric's state, behind its lock.
#[derive(Debug)]
pub(super) struct Net {
    stepper: Arc<Stepper>,
    config: FabricConfig,
    random: Random,
    /// Tells addresses of this fabric from others'.
    nonce: u32,
    endpoints: Vec<Endpoint>,
    by_id: HashMap<EngineId, u32>,
    conns: Vec<Conn>,
    flights: Vec<Slot>,
    free_flights: Vec<u32>,
    events: BinaryHeap<Reverse<Entry>>,
    serial: u64,
    delivered: u64,
    trace: Trace,
    sabotage: Option<(Sabotage, u32)>,
    sabotaged: u64,
    breaches: Breaches,
}

fn at(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

fn index(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

impl Net {
    pub(super) fn new(seed: u64, config: FabricConfig, stepper: Arc<Stepper>) -> Self {
        let mut random = Random::new(seed);
        let nonce = u32::try_from(random.number() >> 32).unwrap_or(0);
        Self {
            stepper,
            config,
            random,
            nonce,
            endpoints: Vec::new(),
            by_id: HashMap::new(),
            conns: Vec::new(),
            flights: Vec::new(),
            free_flights: Vec::new(),
            events: BinaryHeap::new(),
            serial: 0,
            delivered: 0,
            trace: Trace::default(),
            sabotage: None,
            sabotaged: 0,
            breaches: Breaches::default(),
        }
    }

    // ---- engines ----

    /// A new engine: its number, identity, and the address of each of its NICs.
    pub(super) fn join(&mut self, models: &[NicModel]) -> (u32, EngineId, [u8; 8]) {
        let engine = index(self.endpoints.len());
        let id = EngineId(self.random.number());
        let nic = |&model: &NicModel| Nic {
            model,
            egress_free: Time::ZERO,
            ingress_free: Time::ZERO,
            in_flight: 0,
            up: true,
        };
        self.endpoints.push(Endpoint {
            id,
            life: Life::Alive,
            nics: models.iter().map(nic).collect(),
            memory: Regions::default(),
            inbox: VecDeque::new(),
            said: VecDeque::new(),
            links: Vec::new(),
            busy_until: Time::ZERO,
            wake_at: Time::NEVER,
            stats: EngineStats::default(),
        });
        self.by_id.insert(id, engine);
        let mut address = [0; 8];
        let (nonce, number) = address.split_at_mut(4);
        nonce.copy_from_slice(&self.nonce.to_le_bytes());
        number.copy_from_slice(&engine.to_le_bytes());
        (engine, id, address)
    }

    pub(super) fn endpoint(&mut self, engine: u32) -> Option<&mut Endpoint> {
        self.endpoints.get_mut(at(engine))
    }

    fn peek(&self, engine: u32) -> Option<&Endpoint> {
        self.endpoints.get(at(engine))
    }

    pub(super) fn number_of(&self, id: EngineId) -> Option<u32> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn config_mut(&mut self) -> &mut FabricConfig {
        &mut self.config
    }

    pub(super) fn trace_mut(&mut self) -> &mut Trace {
        &mut self.trace
    }

    pub(super) fn trace(&self) -> &Trace {
        &self.trace
    }

    pub(super) const fn breaches(&self) -> Breaches {
        self.breaches
    }

    pub(super) const fn delivered(&self) -> u64 {
        self.delivered
    }

    pub(super) fn stats(&self, engine: u32) -> EngineStats {
        self.peek(engine).map_or_else(EngineStats::default, |endpoint| endpoint.stats)
    }

    pub(super) fn reset_stats(&mut self) {
        self.endpoints.iter_mut().for_each(|endpoint| endpoint.stats = EngineStats::default());
    }

    pub(super) const fn sabotage(&mut self, sabotage: Option<(Sabotage, u32)>) {
        self.sabotage = sabotage;
    }

    pub(super) const fn sabotaged(&self) -> u64 {
        self.sabotaged
    }

    fn sabotages(&mut self, kind: Sabotage) -> bool {
        let Some((chosen, one_in)) = self.sabotage else { return false };
        let hit = chosen == kind && self.random.one_in(one_in);
        self.sabotaged += u64::from(hit);
        hit
    }

    pub(super) fn record(&mut self, engine: u32, nic: Option<NicIndex>, what: What) {
        let at = self.stepper.now();
        self.trace.record(TraceEvent { at, engine, nic, what });
    }

    /// Whether this registration fails; charges the engine for it.
    pub(super) fn registration_fails(&mut self, engine: u32) -> bool {
        self.charge(engine, self.config.register);
        self.random.one_in(self.config.register_fails_one_in)
    }

    /// Keeps the engine's processor busy; returns until when.
    fn charge(&mut self, engine: u32, cost: Duration) -> Time {
        let now = self.stepper.now();
        let Some(endpoint) = self.endpoint(engine) else { return now };
        endpoint.busy_until = endpoint.busy_until.max(now).after(cost);
        endpoint.busy_until
    }

    /// Until when the engine cannot be polled, if it cannot now; it is woken then.
    pub(super) fn busy(&mut self, engine: u32) -> bool {
        let now = self.stepper.now();
        let until = self.peek(engine).map_or(now, |endpoint| endpoint.busy_until);
        if until <= now {
            return false;
        }
        self.wake_at(engine, until);
        true
    }

    /// Has the engine polled at that instant, or earlier.
    pub(super) fn wake_at(&mut self, engine: u32, when: Time) {
        let Some(endpoint) = self.endpoint(engine) else { return };
        if when < endpoint.wake_at {
            endpoint.wake_at = when;
            self.schedule(when, Event::Wake(engine));
        }
    }

    pub(super) fn is_alive(&self, engine: u32) -> bool {
        self.peek(engine).is_some_and(|endpoint| endpoint.life == Life::Alive)
    }

    pub(super) fn is_idle(&self, engine: u32) -> bool {
        self.peek(engine).is_none_or(|endpoint| endpoint.inbox.is_empty())
    }

    fn nic(&self, engine: u32, nic: NicIndex) -> Option<&Nic> {
        self.peek(engine)?.nics.get(usize::from(nic))
    }

    fn nic_mut(&mut self, engine: u32, nic: NicIndex) -> Option<&mut Nic> {
        self.endpoint(engine)?.nics.get_mut(usize::from(nic))
    }

    /// From one NIC to another: the mean of what the two say.
    fn latency(&self, (a, nic_a): (u32, NicIndex), (b, nic_b): (u32, NicIndex)) -> Duration {
        let of =
            |engine, nic| self.nic(engine, nic).map_or(Duration::ZERO, |nic| nic.model.latency);
        of(a, nic_a).saturating_add(of(b, nic_b)) / 2
    }

    fn tell(&mut self, engine: u32, note: Note) {
        let Some(endpoint) = self.endpoint(engine) else { return };
        if endpoint.life == Life::Alive {
            endpoint.inbox.push_back(note);
            self.stepper.mark(engine);
        }
    }

    fn tell_after(&mut self, delay: Duration, engine: u32, note: Note) {
        let when = self.stepper.now().after(delay);
        self.schedule(when, Event::Note(engine, note));
    }

    // ---- events ----

    fn schedule(&mut self, at: Time, event: Event) {
        let serial = self.serial;
        self.serial += 1;
        self.events.push(Reverse(Entry { at, serial, event }));
    }

    pub(super) fn next_event(&self) -> Option<Time> {
        self.events.peek().map(|Reverse(entry)| entry.at)
    }

    /// Lets the next event happen; returns when that was.
    pub(super) fn step(&mut self) -> Option<Time> {
        let Reverse(Entry { at, event, .. }) = self.events.pop()?;
        self.stepper.advance(at);
        self.delivered += 1;
        match event {
            Event::Head(id) => self.head(id),
            Event::Part(id, part) => self.part(id, part),
            Event::Land(id) => self.land(id),
            Event::Done(id) => self.done(id),
            Event::Flush(id) => self.flush(id),
            Event::Note(engine, note) => self.arrive(engine, note),
            Event::Wake(engine) => {
                if let Some(endpoint) = self.endpoint(engine)
                    && endpoint.wake_at <= at
                {
                    endpoint.wake_at = Time::NEVER;
                    self.stepper.mark(engine);
                }
            }
            Event::Restore { conn, side, path } => self.restore(conn, side, path),
            Event::Stray { engine, nic, work, places, bytes } => {
                let memory = self.peek(engine).map(|endpoint| &endpoint.memory);
                if memory.is_some_and(|memory| memory.is_registered(work.dst_key, nic)) {
                    let mut from = bytes.as_ptr() as u64;
                    for (_, dst, len) in places.ranges(0, bytes.len() as u64) {
                        // SAFETY: the region is registered, so its memory is there, and the ranges were
                        // checked when the message landed; together they are as long as `bytes`. That
                        // nobody expects it is the purpose.
                        unsafe { copy(from, dst, len) };
                        from += len;
                    }
                }
            }
        }
        Some(at)
    }

    /// A note reaches its engine, or what is left of it.
    fn arrive(&mut self, engine: u32, note: Note) {
        let life = self.peek(engine).map(|endpoint| endpoint.life);
        match (life, &note) {
            (Some(Life::Alive), _) => self.tell(engine, note),
            (Some(Life::Gone), &Note::Call { conn, .. }) => self.nobody_listens(conn),
            _ => {}
        }
    }

    fn nobody_listens(&mut self, conn: u32) {
        let Some((caller, called)) = self.ends(conn) else { return };
        let back = self.latency((called, 0), (caller, 0));
        self.tell_after(back, caller, Note::lost(conn, DownReason::NeverAnswered));
    }

    // ---- connections ----

    fn ends(&self, conn: u32) -> Option<(u32, u32)> {
        let conn = self.conns.get(at(conn))?;
        let [caller, called] = &conn.sides;
        Some((caller.engine, called.engine))
    }

    fn side(&self, conn: u32, side: usize) -> Option<&Side> {
        self.conns.get(at(conn))?.sides.get(side)
    }

    fn side_mut(&mut self, conn: u32, side: usize) -> Option<&mut Side> {
        self.conns.get_mut(at(conn))?.sides.get_mut(side)
    }

    /// The open connection of an engine to its peer, and which side of it the engine is.
    fn link(&self, engine: u32, peer: PeerId) -> Option<(u32, usize)> {
        let (conn, side) = (*self.peek(engine)?.links.get(usize::from(peer.index))?)?;
        let found = self.side(conn, side)?;
        (found.open && found.peer == Some(peer)).then_some((conn, side))
    }

    fn set_link(&mut self, engine: u32, peer: PeerId, link: Option<(u32, usize)>) {
        let Some(endpoint) = self.endpoint(engine) else { return };
        let at = usize::from(peer.index);
        if endpoint.links.len() <= at {
            endpoint.links.resize(at + 1, None);
        }
        if let Some(place) = endpoint.links.get_mut(at) {
            *place = link;
        }
    }

    /// Which side of a connection the engine is.
    fn side_of(&self, conn: u32, engine: u32) -> Option<usize> {
        let conn = self.conns.get(at(conn))?;
        conn.sides.iter().position(|side| side.engine == engine)
    }

    pub(super) fn call(
        &mut self,
        engine: u32,
        peer: PeerId,
        address: &NetAddr,
        hello: &Hello,
    ) -> Result<(), ConnectError> {
        let malformed = |what| ConnectError::Malformed { what };
        let bytes = address.nics().first().map(|nic| nic.address.as_slice());
        let bytes: [u8; 8] = bytes
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or(malformed("a simulated NIC's address has 8 bytes"))?;
        let word = u64::from_le_bytes(bytes);
        let target = u32::try_from(word >> 32).unwrap_or(u32::MAX);
        if word & u64::from(u32::MAX) != u64::from(self.nonce) {
            return Err(malformed("it is of another simulated fabric"));
        }
        if self.peek(target).is_none_or(|endpoint| endpoint.id != address.engine()) {
            return Err(malformed("no engine of this fabric has it"));
        }
        if !self.is_alive(engine) {
            let source = std::io::Error::from(std::io::ErrorKind::NetworkDown);
            return Err(ConnectError::Unreachable { source });
        }
        if self.endpoint(engine).is_some_and(|endpoint| {
            endpoint.links.get(usize::from(peer.index)).is_some_and(Option::is_some)
        }) {
            return Err(malformed("the peer's slot is in use"));
        }
        let conn = index(self.conns.len());
        let side = |engine, peer, open| Side {
            engine,
            peer,
            open,
            aborting: false,
            in_flight: 0,
            notes: [0; MAX_NICS],
            paths: Vec::new(),
        };
        let sides = [side(engine, Some(peer), true), side(target, None, false)];
        self.conns.push(Conn { sides, connected: false, ready_at: Time::NEVER });
        self.set_link(engine, peer, Some((conn, 0)));
        self.record(engine, None, What::Calls { to: target });
        let there = self.latency((engine, 0), (target, 0)).saturating_add(self.config.connect);
        if self.random.one_in(self.config.refuse_one_in) {
            self.record(engine, None, What::CallRefused { by: target });
            let why = Refusal::Busy;
            self.tell_after(there.saturating_mul(2), engine, Note::Refused { conn, why });
        } else {
            let hello = Box::new(hello.clone());
            self.tell_after(there, target, Note::Call { conn, hello });
        }
        Ok(())
    }

    /// The engine's answer to a call.
    pub(super) fn answer(
        &mut self,
        engine: u32,
        conn: u32,
        answer: Result<(PeerId, Hello), Refusal>,
    ) {
        let Some((caller, _)) = self.ends(conn) else { return };
        let back = self.latency((engine, 0), (caller, 0)).saturating_add(self.config.connect);
        let answer = match answer {
            Err(why) => {
                self.record(caller, None, What::CallRefused { by: engine });
                Err(why)
            }
            Ok((peer, hello)) => {
                // A call of our own to the same peer has crossed with this one, and is given up.
                let place = self.peek(engine).and_then(|it| it.links.get(usize::from(peer.index)));
                if let Some(Some((old, side))) = place.copied() {
                    self.close_side(old, side);
                }
                if let Some(side) = self.side_mut(conn, 1) {
                    side.peer = Some(peer);
                    side.open = true;
                }
                self.set_link(engine, peer, Some((conn, 1)));
                let ready_at = self.stepper.now().after(back);
                if let Some(conn) = self.conns.get_mut(at(conn)) {
                    conn.ready_at = ready_at;
                }
                self.record(engine, None, What::Answered { to: caller });
                Ok(hello)
            }
        };
        self.tell_after(back, caller, Note::answer(conn, answer));
    }

    fn close_side(&mut self, conn: u32, side: usize) {
        let Some(it) = self.side_mut(conn, side) else { return };
        it.open = false;
        let (engine, peer) = (it.engine, it.peer);
        let Some(peer) = peer else { return };
        let links = self.peek(engine).map(|endpoint| &endpoint.links);
        let current = links.and_then(|links| links.get(usize::from(peer.index)));
        if current == Some(&Some((conn, side))) {
            self.set_link(engine, peer, None);
        }
    }

    /// Ends this engine's side of a connection: what it is still to be told of what it posted.
    fn end_side(&mut self, conn: u32, side: usize, error: WorkError) -> Vec<Said> {
        let Some(engine) = self.side(conn, side).map(|side| side.engine) else {
            return Vec::new();
        };
        let mut said = Vec::new();
        let mut alive = false;
        if let Some(endpoint) = self.endpoint(engine) {
            alive = endpoint.life == Life::Alive;
            for note in std::mem::take(&mut endpoint.inbox) {
                match note {
                    Note::Done { conn: of, nic, token, outcome } if of == conn => {
                        said.push(Said::Done { nic, token, outcome });
                    }
                    note if note.conn() == Some(conn) => {}
                    note => endpoint.inbox.push_back(note),
                }
            }
        }
        for at in self.flights_of(conn, side, None) {
            let Some((nic, token, to, number)) = self.flight(at).map(|flight| {
                (flight.work.nic, flight.work.token, flight.peer_side(), flight.number)
            }) else {
                continue;
            };
            let to = self.side(conn, to).map_or(u32::MAX, |side| side.engine);
            self.record(engine, Some(nic), What::Failed { to, number });
            said.push(Said::Done { nic, token, outcome: Err(error) });
            let flies = self.flight(at).is_some_and(|flight| flight.fate == Fate::Flying);
            if alive || !flies {
                self.remove(at);
            } else {
                self.orphan(at);
            }
        }
        self.close_side(conn, side);
        said
    }

    /// What the far side of a connection is told, after the way there.
    fn tell_far(&mut self, conn: u32, side: usize, after: Duration) {
        let far = 1 - side;
        let (Some(near), Some(other)) = (self.side(conn, side), self.side(conn, far)) else {
            return;
        };
        let (engine, to, open) = (near.engine, other.engine, other.open);
        if open {
            let way = self.latency((engine, 0), (to, 0));
            self.tell_after(
                after.saturating_add(way),
                to,
                Note::lost(conn, DownReason::Disconnected),
            );
        }
    }

    pub(super) fn disconnect(&mut self, engine: u32, peer: PeerId, error: WorkError) -> Vec<Said> {
        let Some((conn, side)) = self.link(engine, peer) else { return Vec::new() };
        let far = self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine);
        self.record(engine, None, What::Disconnected { from: far });
        let said = self.end_side(conn, side, error);
        if self.is_alive(engine) {
            self.tell_far(conn, side, Duration::ZERO);
        }
        said
    }

    pub(super) fn abort(&mut self, engine: u32, peer: PeerId) {
        let Some((conn, side)) = self.link(engine, peer) else { return };
        let flights = self.flights_of(conn, side, None);
        if flights.is_empty() {
            return;
        }
        if let Some(side) = self.side_mut(conn, side) {
            side.aborting = true;
        }
        let now = self.stepper.now();
        let mut last = Duration::ZERO;
        for at in flights {
            let delay = self.random.delay(self.config.flush);
            last = last.max(delay);
            if let Some(id) = self.id_of(at) {
                self.schedule(now.after(delay), Event::Flush(id));
            }
        }
        // Whatever the flushes have missed is flushed with the connection.
        let last = last.saturating_add(Duration::from_nanos(1));
        self.tell_after(last, engine, Note::lost(conn, DownReason::Disconnected));
        self.tell_far(conn, side, last);
    }

    /// An engine stops, and says so.
    pub(super) fn leave(&mut self, engine: u32) {
        let Some(endpoint) = self.endpoint(engine) else { return };
        if endpoint.life != Life::Alive {
            return;
        }
        for (conn, side) in self.open_links(engine) {
            let _nobody = self.end_side(conn, side, WorkError::Flushed);
            self.tell_far(conn, side, Duration::ZERO);
        }
        self.bury(engine, Life::Gone);
        self.record(engine, None, What::Left);
    }

    /// The end of an engine: those that call, or have called, and were not answered are told, if
    /// anybody notices.
    fn bury(&mut self, engine: u32, life: Life) {
        let Some(endpoint) = self.endpoint(engine) else { return };
        endpoint.life = life;
        let unread = std::mem::take(&mut endpoint.inbox);
        endpoint.said.clear();
        for note in unread {
            if let (Note::Call { conn, .. }, Life::Gone) = (note, life) {
                self.nobody_listens(conn);
            }
        }
    }

    fn open_links(&self, engine: u32) -> Vec<(u32, usize)> {
        let links = self.peek(engine).map(|endpoint| endpoint.links.as_slice()).unwrap_or_default();
        links.iter().copied().flatten().collect()
    }

    pub(super) fn kill(&mut self, engine: u32, death: Death) {
        if !self.is_alive(engine) {
            return;
        }
        self.record(engine, None, What::Killed);
        for (conn, side) in self.open_links(engine) {
            let paths = self.side(conn, side).map_or(0, |side| side.paths.len());
            for path in 0..paths {
                self.decide_fates(conn, side, path);
            }
            if let Death::NoticedWithin(limit) = death {
                let delay = self.random.delay(limit);
                self.tell_far(conn, side, delay);
            }
        }
        let life = if death == Death::Silent { Life::Silent } else { Life::Gone };
        self.bury(engine, life);
    }

    // ---- what an engine is told ----

    /// The next thing to tell the engine. `budget` counts what was taken from its inbox.
    pub(super) fn next_said(&mut self, engine: u32, budget: &mut usize) -> Option<Said> {
        loop {
            let endpoint = self.endpoint(engine)?;
            if let Some(said) = endpoint.said.pop_front() {
                return Some(said);
            }
            if *budget == 0 {
                if !endpoint.inbox.is_empty() {
                    self.stepper.mark(engine);
                }
                return None;
            }
            let note = endpoint.inbox.pop_front()?;
            *budget -= 1;
            let said = self.say(engine, note);
            let endpoint = self.endpoint(engine)?;
            endpoint.said.extend(said);
        }
    }

    fn say(&mut self, engine: u32, note: Note) -> Option<Said> {
        // Nothing but what became of its work concerns an engine that has left a connection.
        let conn = note.conn().unwrap_or(u32::MAX);
        let side = self.side_of(conn, engine).unwrap_or(0);
        let open = self.side(conn, side).and_then(|side| side.peer.filter(|_| side.open));
        match note {
            Note::Done { nic, token, outcome, .. } => {
                let cost = self.nic(engine, nic).map_or(Duration::ZERO, |nic| nic.model.poll);
                self.charge(engine, cost);
                Some(Said::Done { nic, token, outcome })
            }
            Note::Immediate { nic, imm, .. } => {
                let cost = self.nic(engine, nic).map_or(Duration::ZERO, |nic| nic.model.poll);
                self.charge(engine, cost);
                Some(Said::Immediate { nic, peer: open?, imm })
            }
            // Also if the caller has hung up: it takes longer to say so.
            Note::Call { conn, hello } => Some(Said::Called { conn, hello }),
            Note::Answer { conn, hello } => {
                let Some(peer) = open else {
                    self.tell_far(conn, side, Duration::ZERO);
                    return None;
                };
                self.conns.get_mut(at(conn))?.connected = true;
                Some(Said::Connected { peer, hello })
            }
            Note::Refused { conn, why } => {
                let peer = open?;
                self.close_side(conn, side);
                // The peer keeps its own call to us, which is answered, or has been already.
                let reason = DownReason::Refused(why);
                (why != Refusal::Crossed).then_some(Said::Disconnected { peer, reason })
            }
            Note::Lost { conn, reason } => {
                let peer = open?;
                let far = self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine);
                self.record(engine, None, What::Disconnected { from: far });
                let ended = self.end_side(conn, side, WorkError::PeerGone);
                let endpoint = self.endpoint(engine)?;
                endpoint.said.extend(ended);
                endpoint.said.push_back(Said::Disconnected { peer, reason });
                endpoint.said.pop_front()
            }
            Note::Nic { nic, healthy } => Some(Said::Nic { nic, healthy }),
            Note::Broken { conn, path } => {
                let peer = open?;
                let state = self.path_mut(conn, side, path.nic, path.remote_nic)?;
                state.told = true;
                Some(Said::PathBroken { peer, path })
            }
            Note::Restored { path, .. } => Some(Said::PathRestored { peer: open?, path }),
        }
    }

    // ---- messages ----

    /// Posts a prefix of `work`, whose bytes lie where `places` says.
    pub(super) fn post(
        &mut self,
        engine: u32,
        nic: NicIndex,
        work: &[WorkRequest],
        places: impl Fn(&WorkRequest) -> Option<Places>,
    ) -> usize {
        let full = self.random.one_in(self.config.queue_full_one_in);
        let room = if full {
            self.record(engine, Some(nic), What::QueueFull);
            usize::try_from(self.random.below(work.len() as u64)).unwrap_or(0)
        } else {
            usize::MAX
        };
        let mut accepted = 0;
        for work in work.iter().take(room) {
            if !self.has_room(engine, nic, work) {
                break;
            }
            self.launch(engine, nic, work, places(work));
            accepted += 1;
        }
        if accepted < work.len() {
            // There is room again soon, and nobody else would say so.
            let soon = self.random.delay(self.config.jitter.max(Duration::from_micros(1)));
            let soon = soon.saturating_add(Duration::from_nanos(1));
            self.wake_at(engine, self.stepper.now().after(soon));
        }
        if accepted > 0 {
            self.stepper.mark(engine);
        }
        accepted
    }

    /// As unkind as a provider may be: no more than it must take.
    fn has_room(&self, engine: u32, nic: NicIndex, work: &WorkRequest) -> bool {
        let Some(state) = self.nic(engine, nic) else { return false };
        if !work.token.is_note() {
            return state.in_flight < state.model.queue_depth;
        }
        let link = self.link(engine, work.peer);
        let side = link.and_then(|(conn, side)| self.side(conn, side));
        let notes = side.and_then(|side| side.notes.get(usize::from(nic)));
        notes.is_none_or(|notes| *notes < NOTES_PER_PEER)
    }

    fn launch(&mut self, engine: u32, nic: NicIndex, work: &WorkRequest, places: Option<Places>) {
        let model = self.nic(engine, nic).map_or(NicModel::CONNECTX7, |nic| nic.model);
        let begun = self.charge(engine, Duration::ZERO);
        let posted = self.charge(engine, model.post);
        let refuse = |error, conn| Note::Done { conn, nic, token: work.token, outcome: Err(error) };
        if let Some(endpoint) = self.endpoint(engine) {
            let stats = &mut endpoint.stats;
            stats.first_post = stats.first_post.min(begun);
            stats.last_post = stats.last_post.max(posted);
            stats.posted += 1;
            stats.bytes = stats.bytes.saturating_add(work.len);
        }
        let link = self.link(engine, work.peer);
        let Some((conn, side)) =
            link.filter(|&(conn, side)| self.side(conn, side).is_some_and(|side| !side.aborting))
        else {
            let conn = link.map_or(u32::MAX, |(conn, _)| conn);
            return self.tell(engine, refuse(WorkError::PeerGone, conn));
        };
        let places = places.filter(|places| self.source_is_there(conn, side, work, places));
        let Some(places) = places else {
            return self.tell(engine, refuse(WorkError::LocalAccess, conn));
        };
        let to = self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine);
        let path = self.path_at(conn, side, nic, work.remote_nic);
        let Some(state) = self.side_mut(conn, side).and_then(|it| it.paths.get_mut(path)) else {
            return self.tell(engine, refuse(WorkError::RemoteAccess, conn));
        };
        let (number, health, told) = (state.posted, state.health, state.told);
        state.posted += 1;
        let lost = health != Health::Up;
        let flight = Flight {
            conn,
            side,
            path,
            number,
            work: *work,
            places,
            fate: if lost { Fate::Lost } else { Fate::Flying },
            outcome: Ok(()),
            earliest_end: Time::ZERO,
            moved: 0,
            bytes: None,
            orphan: false,
        };
        let id = self.insert(flight);
        if work.token.is_note() {
            let notes = self.side_mut(conn, side).and_then(|it| it.notes.get_mut(usize::from(nic)));
            notes.into_iter().for_each(|notes| *notes = notes.saturating_add(1));
        } else if let Some(nic) = self.nic_mut(engine, nic) {
            nic.in_flight = nic.in_flight.saturating_add(1);
        }
        if let Some(side) = self.side_mut(conn, side) {
            side.in_flight += 1;
        }
        let imm = work.imm.map(|imm| imm.bits());
        self.record(engine, Some(nic), What::Posted { to, number, bytes: work.len, imm });
        if lost {
            self.breaches.posted_on_broken_paths += u64::from(told);
            self.record(engine, Some(nic), What::Lost { to, number });
            return;
        }
        self.depart(id, engine, to, posted, &model);
    }

    /// Puts a message on the wire.
    fn depart(&mut self, id: FlightId, engine: u32, to: u32, posted: Time, model: &NicModel) {
        let Some(flight) = self.flight(id.index) else { return };
        let (conn, side, path, work) = (flight.conn, flight.side, flight.path, flight.work);
        let ready_at = self.conns.get(at(conn)).map_or(Time::NEVER, |conn| conn.ready_at);
        let occupancy = model.occupancy(work.len);
        let Some(nic) = self.nic_mut(engine, work.nic) else { return };
        let departs = posted.max(nic.egress_free).max(ready_at);
        nic.egress_free = departs.after(occupancy);
        let left = nic.egress_free;
        let latency = self.latency((engine, work.nic), (to, work.remote_nic));
        let jitter = self.random.delay(self.config.jitter);
        let way = latency.saturating_add(jitter);
        let (mut head, mut end) = (departs.after(way), left.after(way));
        if self.is_ordered(engine, work.nic, to, work.remote_nic)
            && let Some(path) = self.side_mut(conn, side).and_then(|it| it.paths.get_mut(path))
        {
            head = head.max(path.last_head);
            path.last_head = head;
            end = end.max(head);
        }
        if let Some(flight) = self.flight_mut(id.index) {
            flight.earliest_end = end;
        }
        self.schedule(head, Event::Head(id));
    }

    fn is_ordered(&self, a: u32, nic_a: NicIndex, b: u32, nic_b: NicIndex) -> bool {
        let fifo =
            |engine, nic| self.nic(engine, nic).is_none_or(|nic| nic.model.order == Order::Fifo);
        fifo(a, nic_a) && fifo(b, nic_b)
    }

    /// The receiver's NIC takes the message, after those that came before it.
    fn head(&mut self, id: FlightId) {
        let Some(flight) = self.current(id) else { return };
        let (conn, side, path, work) = (flight.conn, flight.side, flight.path, flight.work);
        let earliest_end = flight.earliest_end;
        let (Some(from), Some(to)) = (
            self.side(conn, side).map(|side| side.engine),
            self.side(conn, 1 - side).map(|side| side.engine),
        ) else {
            return;
        };
        let now = self.stepper.now();
        let Some(nic) = self.nic_mut(to, work.remote_nic) else { return };
        let occupancy = nic.model.occupancy(work.len);
        nic.ingress_free = nic.ingress_free.max(now).after(occupancy);
        let mut end = nic.ingress_free.max(earliest_end);
        if self.random.one_in(self.config.late_one_in) {
            end = end.after(self.random.delay(self.config.late));
        }
        if self.is_ordered(from, work.nic, to, work.remote_nic)
            && let Some(path) = self.side_mut(conn, side).and_then(|it| it.paths.get_mut(path))
        {
            end = end.max(path.last_land);
            path.last_land = end;
        }
        if self.sabotages(Sabotage::ImmediateFirst) {
            self.report_immediate(conn, side, &work);
            if let Some(flight) = self.flight_mut(id.index) {
                flight.work.imm = None;
            }
        }
        for part in 0..self.parts() {
            if work.len > 1 && self.parts() > 1 {
                let moment = now.after(self.random.delay(end.since(now)));
                self.schedule(moment, Event::Part(id, part));
            }
        }
        self.schedule(end, Event::Land(id));
    }

    fn parts(&self) -> u8 {
        self.config.parts.clamp(1, 64)
    }

    fn part(&mut self, id: FlightId, part: u8) {
        if self.current(id).is_some() {
            self.move_part(id.index, part);
        }
    }

    /// Moves one part of a message's bytes, unless it was moved; returns whether the receiver lets it.
    fn move_part(&mut self, at: u32, part: u8) -> bool {
        let parts = u64::from(self.parts());
        let Some(flight) = self.flight(at) else { return false };
        let bit = 1_u64.checked_shl(part.into()).unwrap_or(0);
        if flight.moved & bit != 0 {
            return true;
        }
        let (work, side, conn) = (flight.work, flight.side, flight.conn);
        let places = flight.places.clone();
        let edge = |part: u64| {
            let edge = u128::from(work.len) * u128::from(part) / u128::from(parts);
            u64::try_from(edge).unwrap_or(work.len)
        };
        let (start, end) = (edge(part.into()), edge(u64::from(part) + 1));
        let lies = self.sabotage.is_some_and(|(kind, _)| kind == Sabotage::RevokeIgnored);
        if !self.may_land(conn, side, &work, &places, lies) {
            return false;
        }
        let end = if end == work.len && end > start && self.sabotages(Sabotage::TailLost) {
            end - 1
        } else {
            end
        };
        if self.config.move_bytes && end > start {
            let captured = self.flight(at).and_then(|flight| flight.bytes.as_deref());
            let captured = captured.and_then(|bytes| {
                bytes.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
            });
            let mut captured = captured.map(|bytes| bytes.as_ptr() as u64);
            if captured.is_none() && !self.source_is_there(conn, side, &work, &places) {
                self.breaches.sources_gone += 1;
                return true;
            }
            for (src, dst, len) in places.ranges(start, end) {
                // SAFETY: the source is the flight's own copy of `start..end`, which the ranges take piece by
                // piece, or lies in a region of the sender's that is registered and not withdrawn; the
                // destination lies in such a region of the receiver's (`may_land`; with sabotage, in one
                // that is registered at least). Both stay mapped until they are withdrawn
                // (`Memory::register`), which takes the lock that we hold.
                unsafe { copy(captured.unwrap_or(src), dst, len) };
                captured = captured.map(|from| from + len);
            }
        }
        if let Some(flight) = self.flight_mut(at) {
            flight.moved |= bit;
        }
        true
    }

    /// Whether all of the message's source may be read; also if it has no bytes.
    fn source_is_there(&self, conn: u32, side: usize, work: &WorkRequest, places: &Places) -> bool {
        let engine = self.side(conn, side).map_or(u32::MAX, |side| side.engine);
        let memory = self.peek(engine).map(|endpoint| &endpoint.memory);
        memory.is_some_and(|memory| {
            let (key, nic) = (work.src_key, work.nic);
            let mut ranges = places.ranges(0, work.len);
            ranges.all(|(src, _, len)| memory.admits(key, nic, src, len, Use::Source))
        })
    }

    fn may_land(
        &self,
        conn: u32,
        side: usize,
        work: &WorkRequest,
        places: &Places,
        lies: bool,
    ) -> bool {
        if work.len == 0 {
            return true;
        }
        let engine = self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine);
        let memory = self.peek(engine).map(|endpoint| &endpoint.memory);
        memory.is_some_and(|memory| {
            let (key, nic) = (work.dst_key, work.remote_nic);
            let mut ranges = places.ranges(0, work.len);
            ranges.all(|(_, dst, len)| memory.admits(key, nic, dst, len, Use::Destination))
                || lies && memory.is_registered(key, nic)
        })
    }

    fn report_immediate(&mut self, conn: u32, side: usize, work: &WorkRequest) {
        let to = self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine);
        if let Some(imm) = work.imm {
            let (nic, imm) = (work.remote_nic, imm.bits());
            self.tell(to, Note::Immediate { conn, nic, imm });
        }
    }

    /// All of the message is there.
    fn land(&mut self, id: FlightId) {
        let Some(flight) = self.current(id) else { return };
        let (conn, side, path, work) = (flight.conn, flight.side, flight.path, flight.work);
        let (number, orphan) = (flight.number, flight.orphan);
        let (Some(from), Some(other)) =
            (self.side(conn, side).map(|side| side.engine), self.side(conn, 1 - side))
        else {
            return;
        };
        let (to, open) = (other.engine, other.open);
        let alive = self.is_alive(to);
        let ordered = self.is_ordered(from, work.nic, to, work.remote_nic);
        if !alive || !open && ordered {
            // Nobody is there to acknowledge it: the sender learns of that with the connection's end.
            return self.lose(id.index);
        }
        let mut outcome = Ok(());
        let first = u8::try_from(self.random.below(self.parts().into())).unwrap_or(0);
        for part in 0..self.parts() {
            let part = (part + first) % self.parts();
            if !self.move_part(id.index, part) {
                outcome = Err(WorkError::RemoteAccess);
                break;
            }
        }
        if !open {
            // Datagrams reach the memory of whoever has left us, as long as it is registered.
            return self.lose(id.index);
        }
        let nic = Some(work.remote_nic);
        match outcome {
            Ok(()) => {
                let imm = work.imm.map(|imm| imm.bits());
                self.record(to, nic, What::Arrived { from, number, bytes: work.len, imm });
                let now = self.stepper.now();
                if let Some(endpoint) = self.endpoint(to) {
                    endpoint.stats.first_arrival = endpoint.stats.first_arrival.min(now);
                }
                if !self.sabotages(Sabotage::ImmediateLost) {
                    self.report_immediate(conn, side, &work);
                }
                if self.sabotages(Sabotage::ImmediateTwice) {
                    self.report_immediate(conn, side, &work);
                }
            }
            Err(_) => self.record(to, nic, What::Refused { from, number }),
        }
        let mut broken = false;
        if let Some(path) = self.side_mut(conn, side).and_then(|it| it.paths.get_mut(path)) {
            path.arrived = path.arrived.max(number + 1);
            broken = path.health != Health::Up;
        }
        if let Some(flight) = self.flight_mut(id.index) {
            flight.fate = Fate::Arrived;
            flight.outcome = outcome;
        }
        if orphan {
            return self.remove(id.index);
        }
        if !broken && !self.sabotages(Sabotage::CompletionLost) {
            self.acknowledge(id, from, to, ordered);
        }
    }

    fn acknowledge(&mut self, id: FlightId, from: u32, to: u32, ordered: bool) {
        let Some(flight) = self.flight(id.index) else { return };
        let (conn, side, path, work) = (flight.conn, flight.side, flight.path, flight.work);
        let latency = self.latency((to, work.remote_nic), (from, work.nic));
        let jitter = self.random.delay(self.config.jitter);
        let mut done = self.stepper.now().after(latency.saturating_add(jitter));
        if ordered
            && let Some(path) = self.side_mut(conn, side).and_then(|it| it.paths.get_mut(path))
        {
            done = done.max(path.last_done);
            path.last_done = done;
        }
        self.schedule(done, Event::Done(id));
    }

    fn lose(&mut self, at: u32) {
        let Some(flight) = self.flight_mut(at) else { return };
        flight.fate = Fate::Lost;
        let (orphan, side, conn) = (flight.orphan, flight.side, flight.conn);
        let (nic, number) = (flight.work.nic, flight.number);
        self.turn(at);
        if orphan {
            self.remove(at);
        }
        let to = self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine);
        if let Some(engine) = self.side(conn, side).map(|side| side.engine) {
            self.record(engine, Some(nic), What::Lost { to, number });
        }
    }

    /// The sender learns that its message arrived, or was refused.
    fn done(&mut self, id: FlightId) {
        let Some(flight) = self.current(id) else { return };
        let (conn, side, work) = (flight.conn, flight.side, flight.work);
        let (number, outcome, places) = (flight.number, flight.outcome, flight.places.clone());
        let (own_copy, moves) = (flight.bytes.is_some(), self.config.move_bytes);
        let engine = self.side(conn, side).map_or(u32::MAX, |side| side.engine);
        let to = self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine);
        let ok = outcome.is_ok();
        // A device may have had to send it once more, until now.
        if ok
            && moves
            && work.len > 0
            && !own_copy
            && !self.source_is_there(conn, side, &work, &places)
        {
            self.breaches.sources_gone += 1;
        }
        self.record(engine, Some(work.nic), What::Completed { to, number, ok });
        let note = || Note::Done { conn, nic: work.nic, token: work.token, outcome };
        if self.sabotages(Sabotage::CompletionTwice) {
            self.tell(engine, note());
        }
        if ok && work.len > 0 && self.sabotages(Sabotage::WriteAfterDone) {
            self.write_again(to, &work, places);
        }
        self.remove(id.index);
        self.tell(engine, note());
    }

    /// Sabotage: the bytes of a message are written once more, when it is long over.
    fn write_again(&mut self, engine: u32, work: &WorkRequest, places: Places) {
        // SAFETY: the message has just landed from there, and its sender has not been told yet, so
        // that its source is still registered.
        let bytes = unsafe { gather(work, &places) };
        let late = self.config.late.max(AFTERLIFE);
        let delay = self.random.delay(late).saturating_add(Duration::from_micros(1));
        let when = self.stepper.now().after(delay);
        let (nic, work, places) = (work.remote_nic, Box::new(*work), Box::new(places));
        self.schedule(when, Event::Stray { engine, nic, work, places, bytes });
    }

    fn flush(&mut self, id: FlightId) {
        let Some(flight) = self.current(id) else { return };
        let (conn, side, work, number) = (flight.conn, flight.side, flight.work, flight.number);
        let engine = self.side(conn, side).map_or(u32::MAX, |side| side.engine);
        let to = self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine);
        self.record(engine, Some(work.nic), What::Failed { to, number });
        self.remove(id.index);
        let outcome = Err(WorkError::Flushed);
        self.tell(engine, Note::Done { conn, nic: work.nic, token: work.token, outcome });
    }

    // ---- flights ----

    fn insert(&mut self, flight: Flight) -> FlightId {
        let index = match self.free_flights.pop() {
            Some(index) => index,
            None => {
                self.flights.push(Slot::default());
                index(self.flights.len() - 1)
            }
        };
        let mut turn = 0;
        if let Some(slot) = self.flights.get_mut(at(index)) {
            slot.flight = Some(flight);
            turn = slot.turn;
        }
        FlightId { index, turn }
    }

    fn flight(&self, index: u32) -> Option<&Flight> {
        self.flights.get(at(index))?.flight.as_ref()
    }

    fn flight_mut(&mut self, index: u32) -> Option<&mut Flight> {
        self.flights.get_mut(at(index))?.flight.as_mut()
    }

    fn current(&self, id: FlightId) -> Option<&Flight> {
        let slot = self.flights.get(at(id.index))?;
        slot.flight.as_ref().filter(|_| slot.turn == id.turn)
    }

    fn id_of(&self, index: u32) -> Option<FlightId> {
        self.flights.get(at(index)).map(|slot| FlightId { index, turn: slot.turn })
    }

    /// Makes all events void that were scheduled for the flight.
    fn turn(&mut self, index: u32) {
        if let Some(slot) = self.flights.get_mut(at(index)) {
            slot.turn = slot.turn.wrapping_add(1);
        }
    }

    /// Takes a flight off the books of its NIC and its connection.
    fn discount(&mut self, flight: &Flight) {
        let (engine, nic) = (
            self.side(flight.conn, flight.side).map_or(u32::MAX, |side| side.engine),
            flight.work.nic,
        );
        let is_note = flight.work.token.is_note();
        if let Some(side) = self.side_mut(flight.conn, flight.side) {
            side.in_flight = side.in_flight.saturating_sub(1);
            let notes = side.notes.get_mut(usize::from(nic)).filter(|_| is_note);
            notes.into_iter().for_each(|notes| *notes = notes.saturating_sub(1));
        }
        if let Some(nic) = self.nic_mut(engine, nic).filter(|_| !is_note) {
            nic.in_flight = nic.in_flight.saturating_sub(1);
        }
    }

    fn remove(&mut self, index: u32) {
        self.turn(index);
        let Some(flight) = self.flights.get_mut(at(index)).and_then(|slot| slot.flight.take())
        else {
            return;
        };
        self.free_flights.push(index);
        if !flight.orphan {
            self.discount(&flight);
        }
    }

    /// Nobody is to be told of the flight any more; it flies on.
    fn orphan(&mut self, index: u32) {
        let Some(slot) = self.flights.get_mut(at(index)) else { return };
        let Some(mut flight) = slot.flight.take() else { return };
        self.discount(&flight);
        flight.orphan = true;
        if let Some(slot) = self.flights.get_mut(at(index)) {
            slot.flight = Some(flight);
        }
    }

    /// The flights of one side of a connection that its engine has not been told of, in the order of
    /// posting. O(all flights), if there is any: for the rare cases.
    fn flights_of(&self, conn: u32, side: usize, path: Option<usize>) -> Vec<u32> {
        if self.side(conn, side).is_none_or(|side| side.in_flight == 0) {
            return Vec::new();
        }
        let mut found: Vec<(usize, u64, u32)> = Vec::new();
        for (index, slot) in (0..).zip(&self.flights) {
            if let Some(flight) = &slot.flight
                && (flight.conn, flight.side, flight.orphan) == (conn, side, false)
                && path.is_none_or(|path| path == flight.path)
            {
                found.push((flight.path, flight.number, index));
            }
        }
        found.sort_unstable();
        found.into_iter().map(|(.., index)| index).collect()
    }

    // ---- paths ----

    /// The place of a path among its side's; made if it was not there.
    fn path_at(&mut self, conn: u32, side: usize, nic: NicIndex, remote: NicIndex) -> usize {
        let ends = (
            self.side(conn, side).map_or(u32::MAX, |side| side.engine),
            self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine),
        );
        let up = |engine, nic| self.nic(engine, nic).is_some_and(|nic| nic.up);
        let usable = up(ends.0, nic) && up(ends.1, remote);
        let exists = self.nic(ends.0, nic).is_some() && self.nic(ends.1, remote).is_some();
        let Some(it) = self.side_mut(conn, side).filter(|_| exists) else { return usize::MAX };
        let known = it.paths.iter().position(|path| (path.nic, path.remote) == (nic, remote));
        if let Some(known) = known {
            return known;
        }
        it.paths.push(PathState {
            nic,
            remote,
            health: if usable { Health::Up } else { Health::Broken },
            told: false,
            cut: false,
            posted: 0,
            arrived: 0,
            last_head: Time::ZERO,
            last_land: Time::ZERO,
            last_done: Time::ZERO,
        });
        let made = it.paths.len() - 1;
        if !usable {
            let path = Path { nic, remote_nic: remote };
            self.tell_after(Duration::ZERO, ends.0, Note::Broken { conn, path });
        }
        made
    }

    fn path_mut(
        &mut self,
        conn: u32,
        side: usize,
        nic: NicIndex,
        remote: NicIndex,
    ) -> Option<&mut PathState> {
        let paths = &mut self.side_mut(conn, side)?.paths;
        paths.iter_mut().find(|path| (path.nic, path.remote) == (nic, remote))
    }

    /// Decides what becomes of what is on its way on a path that is no more: some of it arrives, in
    /// order if there is one, the rest is lost.
    fn decide_fates(&mut self, conn: u32, side: usize, path: usize) {
        let flights = self.flights_of(conn, side, Some(path));
        let flies = |net: &Self, at| net.flight(at).is_some_and(|it| it.fate == Fate::Flying);
        let flying: Vec<u32> = flights.iter().copied().filter(|&at| flies(self, at)).collect();
        let (Some(from), Some(to)) = (
            self.side(conn, side).map(|side| side.engine),
            self.side(conn, 1 - side).map(|side| side.engine),
        ) else {
            return;
        };
        let Some(state) = self.side(conn, side).and_then(|side| side.paths.get(path)) else {
            return;
        };
        let ordered = self.is_ordered(from, state.nic, to, state.remote);
        let cut = self.random.below(flying.len() as u64 + 1);
        let mut next = self.stepper.now();
        for (place, at) in (0..).zip(flying) {
            let arrives = if ordered { place < cut } else { self.random.one_in(2) };
            if !arrives {
                self.lose(at);
                continue;
            }
            self.capture(at);
            self.turn(at);
            let delay = self.random.delay(self.config.late.max(AFTERLIFE));
            let land = self.stepper.now().after(delay);
            next = if ordered { next.max(land) } else { land };
            if let Some(id) = self.id_of(at) {
                self.schedule(next, Event::Land(id));
            }
        }
        // What has arrived is not acknowledged any more.
        for at in flights {
            if self.flight(at).is_some_and(|it| it.fate == Fate::Arrived) {
                self.turn(at);
            }
        }
    }

    /// Gives a flight its own copy of its bytes.
    fn capture(&mut self, at: u32) {
        let Some(flight) = self.flight(at) else { return };
        let (conn, side, work) = (flight.conn, flight.side, flight.work);
        let places = flight.places.clone();
        if flight.bytes.is_some() || work.len == 0 || !self.config.move_bytes {
            return;
        }
        if !self.source_is_there(conn, side, &work, &places) {
            self.breaches.sources_gone += 1;
            return;
        }
        // SAFETY: the source is registered and not withdrawn, hence mapped.
        let bytes = unsafe { gather(&work, &places) };
        if let Some(flight) = self.flight_mut(at) {
            flight.bytes = Some(bytes);
        }
    }

    /// Breaks a path, and has its engine told after a while.
    fn break_path(&mut self, conn: u32, side: usize, path: usize, told_after: Duration) {
        let to = self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine);
        let Some(it) = self.side_mut(conn, side) else { return };
        let engine = it.engine;
        // One that is settled is broken still.
        let Some(state) = it.paths.get_mut(path).filter(|path| path.health == Health::Up) else {
            return;
        };
        state.health = Health::Broken;
        let (nic, remote) = (state.nic, state.remote);
        self.record(engine, Some(nic), What::PathBroken { to, remote });
        self.decide_fates(conn, side, path);
        let path = Path { nic, remote_nic: remote };
        self.tell_after(told_after, engine, Note::Broken { conn, path });
    }

    /// Every path to and from this NIC, as (connection, side, NIC, remote NIC, whether it is the engine's
    /// own).
    fn paths_of(&self, engine: u32, nic: NicIndex) -> Vec<(u32, usize, NicIndex, NicIndex, bool)> {
        let mut paths = Vec::new();
        for (conn, side) in self.open_links(engine) {
            let Some(far) = self.side(conn, 1 - side).filter(|far| far.peer.is_some()) else {
                continue;
            };
            let remotes = self.peek(far.engine).map_or(0, |endpoint| endpoint.nics.len());
            for remote in (0..remotes).filter_map(|nic| NicIndex::try_from(nic).ok()) {
                paths.push((conn, side, nic, remote, true));
                paths.push((conn, 1 - side, remote, nic, false));
            }
        }
        paths
    }

    pub(super) fn nic_down(&mut self, engine: u32, nic: NicIndex) {
        let Some(state) = self.nic_mut(engine, nic).filter(|nic| nic.up) else { return };
        state.up = false;
        self.record(engine, Some(nic), What::NicDown);
        self.tell(engine, Note::Nic { nic, healthy: false });
        for (conn, side, nic, remote, own) in self.paths_of(engine, nic) {
            let sender = self.side(conn, side).map_or(u32::MAX, |side| side.engine);
            let detect = self.nic(sender, nic).map_or(Duration::ZERO, |nic| nic.model.detect);
            let told = if own { Duration::ZERO } else { self.random.delay(detect) };
            // Of a path that is made now, the engine is told by that.
            let path = self.path_at(conn, side, nic, remote);
            self.break_path(conn, side, path, told);
        }
    }

    pub(super) fn nic_up(&mut self, engine: u32, nic: NicIndex) {
        let now = self.stepper.now();
        let Some(state) = self.nic_mut(engine, nic).filter(|nic| !nic.up) else { return };
        state.up = true;
        state.egress_free = state.egress_free.max(now);
        state.ingress_free = now;
        self.record(engine, Some(nic), What::NicUp);
        self.tell(engine, Note::Nic { nic, healthy: true });
        for (conn, side, nic, remote, _) in self.paths_of(engine, nic) {
            let path = self.path_at(conn, side, nic, remote);
            self.reconnect(conn, side, path);
        }
    }

    /// Cuts one path by hand; it stays cut until it is mended.
    pub(super) fn cut(&mut self, engine: u32, peer: PeerId, path: Path) {
        let Some((conn, side)) = self.link(engine, peer) else { return };
        let detect = self.nic(engine, path.nic).map_or(Duration::ZERO, |nic| nic.model.detect);
        let told = self.random.delay(detect);
        let at = self.path_at(conn, side, path.nic, path.remote_nic);
        if let Some(state) = self.path_mut(conn, side, path.nic, path.remote_nic) {
            state.cut = true;
        }
        self.break_path(conn, side, at, told);
    }

    pub(super) fn mend(&mut self, engine: u32, peer: PeerId, path: Path) {
        let Some((conn, side)) = self.link(engine, peer) else { return };
        if let Some(state) = self.path_mut(conn, side, path.nic, path.remote_nic) {
            state.cut = false;
        }
        let at = self.path_at(conn, side, path.nic, path.remote_nic);
        self.reconnect(conn, side, at);
    }

    fn can_restore(&self, conn: u32, side: usize, path: usize) -> Option<Duration> {
        let (near, far) = (self.side(conn, side)?, self.side(conn, 1 - side)?);
        let state = near.paths.get(path)?;
        let (a, b) = (self.nic(near.engine, state.nic)?, self.nic(far.engine, state.remote)?);
        let fine = state.health == Health::Settled && !state.cut && a.up && b.up && near.open;
        fine.then(|| a.model.reconnect.max(b.model.reconnect))
    }

    /// Has a settled path restored, if nothing is in the way any more.
    fn reconnect(&mut self, conn: u32, side: usize, path: usize) {
        if let Some(after) = self.can_restore(conn, side, path) {
            let late = self.random.delay(self.config.late);
            let when = self.stepper.now().after(after.saturating_add(late));
            self.schedule(when, Event::Restore { conn, side, path });
        }
    }

    fn restore(&mut self, conn: u32, side: usize, path: usize) {
        if self.can_restore(conn, side, path).is_none() {
            return;
        }
        let to = self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine);
        let Some(it) = self.side_mut(conn, side) else { return };
        let engine = it.engine;
        let Some(state) = it.paths.get_mut(path) else { return };
        state.health = Health::Up;
        state.told = false;
        let (nic, remote) = (state.nic, state.remote);
        self.record(engine, Some(nic), What::PathRestored { to, remote });
        let path = Path { nic, remote_nic: remote };
        self.tell(engine, Note::Restored { conn, path });
    }

    pub(super) fn fence(
        &mut self,
        engine: u32,
        peer: PeerId,
        path: RemotePath,
    ) -> Result<(Vec<Said>, Receipt), Unfenced> {
        let (conn, side) = self.link(engine, peer).ok_or(Unfenced::Unknown)?;
        let (far, sender) =
            (1 - side, self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine));
        if !self.is_ordered(sender, path.from, engine, path.to) {
            return Err(Unfenced::Unknown);
        }
        let at = self.path_at(conn, far, path.from, path.to);
        // Whoever fences a path breaks it, if it was not broken.
        let way = self.latency((engine, path.to), (sender, path.from));
        self.break_path(conn, far, at, way);
        let leaks = self.sabotages(Sabotage::FenceLeaks);
        for at in self.flights_of(conn, far, Some(at)) {
            if !leaks && self.flight(at).is_some_and(|flight| flight.fate == Fate::Flying) {
                self.lose(at);
            }
        }
        let mut said = Vec::new();
        if let Some(endpoint) = self.endpoint(engine) {
            for note in std::mem::take(&mut endpoint.inbox) {
                match note {
                    Note::Immediate { conn: of, nic, imm } if of == conn => {
                        said.push(Said::Immediate { nic, peer, imm });
                    }
                    note => endpoint.inbox.push_back(note),
                }
            }
        }
        let mut arrived =
            self.path_mut(conn, far, path.from, path.to).ok_or(Unfenced::Unknown)?.arrived;
        self.record(
            engine,
            Some(path.to),
            What::Fenced { from: sender, remote: path.from, arrived },
        );
        if self.sabotages(Sabotage::ReceiptShort) {
            arrived = arrived.saturating_sub(1);
        }
        Ok((said, receipt_of(conn, path.from, path.to, arrived)))
    }

    pub(super) fn settle(
        &mut self,
        engine: u32,
        peer: PeerId,
        path: Path,
        receipt: &Receipt,
    ) -> Result<Vec<Said>, Unfenced> {
        let (conn, side) = self.link(engine, peer).ok_or(Unfenced::Unknown)?;
        let (of, from, to, arrived) = read_receipt(receipt).ok_or(Unfenced::Unknown)?;
        let at = self.path_at(conn, side, path.nic, path.remote_nic);
        let state =
            self.path_mut(conn, side, path.nic, path.remote_nic).ok_or(Unfenced::Unknown)?;
        let fits = (of, from, to) == (conn, path.nic, path.remote_nic) && arrived <= state.posted;
        if !fits || state.health != Health::Broken {
            return Err(Unfenced::Unknown);
        }
        state.health = Health::Settled;
        let flights = self.flights_of(conn, side, Some(at));
        let (mut said, mut done, mut undelivered) = (Vec::new(), 0, 0);
        for at in flights {
            let Some(flight) = self.flight(at) else { continue };
            let (work, outcome) = (flight.work, flight.outcome);
            if flight.number < arrived {
                done += 1;
                said.push(Said::Done { nic: work.nic, token: work.token, outcome });
            } else {
                undelivered += 1;
                said.push(Said::Undelivered { work });
            }
            if self.flight(at).is_some_and(|flight| flight.fate == Fate::Flying) {
                // A fence that leaks, or a receipt without a fence.
                self.orphan(at);
            } else {
                self.remove(at);
            }
        }
        let far = self.side(conn, 1 - side).map_or(u32::MAX, |side| side.engine);
        let what = What::Settled { to: far, remote: path.remote_nic, done, undelivered };
        self.record(engine, Some(path.nic), what);
        self.reconnect(conn, side, at);
        Ok(said)
    }
}

impl Note {
    const fn conn(&self) -> Option<u32> {
        match self {
            Self::Done { conn, .. }
            | Self::Immediate { conn, .. }
            | Self::Call { conn, .. }
            | Self::Answer { conn, .. }
            | Self::Refused { conn, .. }
            | Self::Lost { conn, .. }
            | Self::Broken { conn, .. }
            | Self::Restored { conn, .. } => Some(*conn),
            Self::Nic { .. } => None,
        }
    }
}

impl Flight {
    const fn peer_side(&self) -> usize {
        1 - self.side
    }
}

/// Connection, both NICs, and how many had arrived.
fn receipt_of(conn: u32, from: NicIndex, to: NicIndex, arrived: u64) -> Receipt {
    let mut bytes = heapless::Vec::new();
    let [c0, c1, c2, c3] = conn.to_le_bytes();
    // 14 of 48 bytes.
    let _ = bytes.extend_from_slice(&[c0, c1, c2, c3, from, to]);
    let _ = bytes.extend_from_slice(&arrived.to_le_bytes());
    Receipt(bytes)
}

fn read_receipt(receipt: &Receipt) -> Option<(u32, NicIndex, NicIndex, u64)> {
    let bytes: [u8; 14] = receipt.0.as_slice().try_into().ok()?;
    let [c0, c1, c2, c3, from, to, arrived @ ..] = bytes;
    Some((u32::from_le_bytes([c0, c1, c2, c3]), from, to, u64::from_le_bytes(arrived)))
}

/// The bytes of a message, in order.
///
/// # Safety
///
/// Those of the source are mapped.
unsafe fn gather(work: &WorkRequest, places: &Places) -> Box<[u8]> {
    let mut bytes = vec![0; usize::try_from(work.len).unwrap_or(0)].into_boxed_slice();
    let mut to = bytes.as_mut_ptr() as u64;
    for (src, _, len) in places.ranges(0, bytes.len() as u64) {
        // SAFETY: the source is our caller's promise; the ranges are together at most as long as `bytes`,
        // which is ours.
        unsafe { copy(src, to, len) };
        to += len;
    }
    bytes
}

/// Copies bytes between addresses.
///
/// # Safety
///
/// `len` bytes from `from` are mapped, and from `to` mapped and writable. Nobody holds a reference to
/// the latter (the registrants' promise, see [`crate::provider::Memory::register`]).
unsafe fn copy(from: u64, to: u64, len: u64) {
    let (from, to) = (usize::try_from(from), usize::try_from(to));
    let (Ok(from), Ok(to), Ok(len)) = (from, to, usize::try_from(len)) else { return };
    let from = std::ptr::with_exposed_provenance::<u8>(from);
    let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
    // SAFETY: our caller's promise; they may overlap.
    unsafe { std::ptr::copy(from, to, len) };
}
