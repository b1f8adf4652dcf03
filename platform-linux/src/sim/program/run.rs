//! Carries operations out: turns each number into a call of the engine's public interface.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use immwire_core::id::PeerId;
use immwire_core::imm::ImmTag;
use immwire_core::plan::Target;
use immwire_core::region::MrDesc;

use super::ledger::{Ledger, Sent, Stream};
use super::memory::{Check, Claim, Source, Window};
use super::operation::{Kind, Numbers, Operation};
use super::side::{Count, Counter, Door, Flight, Handle, Known, Left, Part, Side, Wait, Way};
use super::world::{Fault, World};
use super::{Config, Totals};
use crate::region::CloseError;
use crate::sync::lock;
use crate::{
    AddPeerError, CountError, DownReason, End, Expected, LivenessConfig, PageIndices, PagedWrite,
    Pages, PeerState, ScatterWrite, SingleWrite, SubmitError, Transfer, TransferEngine,
};

/// Whoever has a NIC for less than that may not have been heard: what was due leaves at once, but takes its way.
const HEARD_AFTER: Duration = Duration::from_micros(250);
/// Between two looks at paths, and at who is connected.
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// An engine that has no NIC to be heard by.
#[derive(Debug, Clone, Copy)]
struct Mute {
    since: Duration,
    /// It has one again, since then.
    speaks: Option<Duration>,
}

/// A program under way.
pub(super) struct Program<'w, W> {
    pub(super) world: &'w mut W,
    pub(super) config: Config,
    pub(super) sides: Vec<Option<Side>>,
    pub(super) doors: Vec<Option<Door>>,
    pub(super) flights: Vec<Flight>,
    pub(super) ledger: Ledger,
    pub(super) streams: BTreeMap<(u32, PeerId), Stream>,
    /// Writes that were done, and must have been counted by the next time that all has settled.
    pub(super) done: Vec<(usize, u32, Part, Count)>,
    /// Connections that an end has found ended by agreement, by that end.
    parted: BTreeSet<(usize, u32, PeerId)>,
    /// When something last went wrong between two engines.
    pub(super) disturbed: BTreeMap<(u32, u32), Duration>,
    /// What is wrong now.
    pub(super) faults: BTreeSet<Fault>,
    /// NICs taken out of use by their owner.
    pub(super) unhealthy: BTreeSet<(usize, u8)>,
    pub(super) health_changed: Duration,
    /// Engines that have no NIC to send by, and since when.
    mute: BTreeMap<usize, Mute>,
    /// When each path (from, NIC there, to, NIC there) was last cut, or without one of its NICs.
    hurt: BTreeMap<(usize, u8, usize, u8), Duration>,
    /// The same, not counting NICs that their owner took out of use: nothing breaks by that.
    broken: BTreeMap<(usize, u8, usize, u8), Duration>,
    /// When two engines last lost a path between them.
    struck: BTreeMap<(u32, u32), Duration>,
    next_look: Duration,
    /// Some time or other.
    pub(super) registrations_failed: bool,
    pub(super) totals: Totals,
    /// What was done, a line each, if somebody wants to know.
    pub(super) lines: Option<Vec<String>>,
    /// Killed engines. Their memory stays where it is.
    pub(super) graves: Vec<Side>,
    next_serial: u32,
    next_flight: u64,
    next_instance: u64,
}

/// What a write is to be submitted with.
struct Asked {
    parts: Vec<Part>,
    /// Of the source, and of each part's window.
    claims: Vec<(Claim, Option<(usize, Claim)>)>,
    within: Option<Duration>,
}

impl<'w, W: World> Program<'w, W> {
    pub(super) fn new(world: &'w mut W, config: Config, traced: bool) -> Self {
        let places = config.engines;
        Self {
            world,
            config,
            sides: (0..places).map(|_| None).collect(),
            doors: vec![None; places],
            flights: Vec::new(),
            ledger: Ledger::default(),
            streams: BTreeMap::new(),
            done: Vec::new(),
            parted: BTreeSet::new(),
            disturbed: BTreeMap::new(),
            faults: BTreeSet::new(),
            unhealthy: BTreeSet::new(),
            health_changed: Duration::ZERO,
            mute: BTreeMap::new(),
            hurt: BTreeMap::new(),
            broken: BTreeMap::new(),
            struck: BTreeMap::new(),
            next_look: Duration::ZERO,
            registrations_failed: false,
            totals: Totals::default(),
            lines: traced.then(Vec::new),
            graves: Vec::new(),
            next_serial: 0,
            next_flight: 0,
            next_instance: 0,
        }
    }

    pub(super) fn say(&mut self, line: impl FnOnce() -> String) {
        let now = self.world.now();
        if let Some(lines) = &mut self.lines {
            let happened = self.world.trace();
            lines.extend(happened.into_iter().map(|line| format!("              {line}")));
            lines.push(format!("{:>12.3} us  {}", now.as_secs_f64() * 1e6, line()));
        }
    }

    pub(super) fn side(&self, at: usize) -> Option<&Side> {
        self.sides.get(at)?.as_ref()
    }

    pub(super) fn side_mut(&mut self, at: usize) -> Option<&mut Side> {
        self.sides.get_mut(at)?.as_mut()
    }

    /// Carries one operation out; `Ok(false)`: there was nothing for it to do.
    pub(super) fn execute(&mut self, operation: Operation) -> Result<bool, String> {
        let mut numbers = Numbers::new(operation.number);
        let n = &mut numbers;
        match operation.kind {
            Kind::Single => self.single(n),
            Kind::Paged => self.paged(n),
            Kind::Scatter => self.scatter(n),
            Kind::Barrier => self.barrier(n),
            Kind::Imm => self.imm(n),
            Kind::StaleWrite => self.stale_write(n),
            Kind::Send => self.send(n),
            Kind::Receive => self.receive(n),
            Kind::PostReceives => self.post_receives(n),
            Kind::Expect => self.expect(n),
            Kind::Reach => self.reach(n),
            Kind::Shares => self.shares(n),
            Kind::Take => self.take(n),
            Kind::Cancel => Ok(self.cancel(n)),
            Kind::AddPeer => {
                let (from, to) = self.pair(n);
                self.add_peer(from, to)
            }
            Kind::RemovePeer => Ok(self.remove_peer(n)),
            Kind::Kill => self.kill(n),
            Kind::Revive => self.revive(n),
            Kind::LoseNic => Ok(self.lose_nic(n)),
            Kind::ReturnNic => Ok(self.mend(n, |fault| matches!(fault, Fault::Nic { .. }))),
            Kind::CutLink => Ok(self.cut_link(n)),
            Kind::MendLink => Ok(self.mend(n, |fault| matches!(fault, Fault::Path { .. }))),
            Kind::Health => Ok(self.health(n)),
            Kind::Registration => Ok(self.registration(n)),
            Kind::Retire => self.retire(n),
            Kind::CloseWindow => self.close_window(n),
            Kind::CloseSource => self.close_source(n),
            Kind::Pass => {
                let nanos = n.size(u64::try_from(self.config.pass.as_nanos()).unwrap_or(u64::MAX));
                self.say(|| format!("let {nanos} ns pass"));
                self.pass(Duration::from_nanos(nanos))?;
                Ok(true)
            }
            Kind::Settle => {
                self.say(|| "let everything arrive".into());
                self.settle()?;
                Ok(true)
            }
        }
    }

    /// Lets time pass, looking at everything after each event.
    pub(super) fn pass(&mut self, time: Duration) -> Check {
        let until = self.world.now() + time;
        while self.world.step(until) {
            self.totals.events += 1;
            self.observe()?;
        }
        self.observe()
    }

    /// Lets some events happen, not later than soon.
    pub(super) fn events(&mut self, events: u64) -> Check {
        let until = self.world.now() + self.config.pass;
        for _ in 0..events {
            if !self.world.step(until) {
                break;
            }
            self.totals.events += 1;
            self.observe()?;
        }
        self.observe()
    }

    // ---- engines ----

    fn alive(&self, numbers: &mut Numbers) -> Option<usize> {
        let alive: Vec<usize> =
            (0..self.sides.len()).filter(|&at| self.side(at).is_some()).collect();
        alive.get(numbers.index(alive.len())).copied()
    }

    /// Two engines, the first alive; the same twice if there is no other.
    fn pair(&self, numbers: &mut Numbers) -> (usize, usize) {
        let from = self.alive(numbers).unwrap_or(0);
        let others: Vec<usize> = (0..self.sides.len()).filter(|&at| at != from).collect();
        let live: Vec<usize> =
            others.iter().copied().filter(|&at| self.side(at).is_some()).collect();
        // Mostly to the living.
        let among = if live.is_empty() || numbers.percent(3) { &others } else { &live };
        (from, among.get(numbers.index(among.len())).copied().unwrap_or(from))
    }

    pub(super) fn start(&mut self, at: usize, nics: u8) -> Check {
        let config = &self.config;
        let builder = self
            .world
            .builder()
            .transfers(config.transfers)
            .peers(config.peers)
            .counters(config.counters)
            .drain(config.drain)
            .mailbox(config.mailbox_slots, config.mailbox_slot_bytes)
            .latency_bytes(config.latency_bytes)
            .liveness(LivenessConfig {
                heartbeat: config.silence / 8,
                suspect_after: config.silence / 2,
                down_after: config.silence,
                connect_deadline: config.silence,
                idle_after: config.idle_after,
            });
        let engine = self.world.start(at, nics, builder).map_err(|error| error.to_string())?;
        let serial = self.next_serial;
        self.next_serial += 1;
        let address = engine.address().clone();
        if let Some(door) = self.doors.get_mut(at) {
            *door = Some(Door { serial, address });
        }
        let bytes = self.config.window_bytes;
        let mut side = Side {
            serial,
            nics,
            counters: (0..self.config.counters).map(|_| None).collect(),
            peers: vec![None; self.sides.len()],
            received: Left::default(),
            senders: BTreeMap::new(),
            met: BTreeMap::new(),
            windows: (0..self.config.windows).map(|i| Window::new(bytes, i % 2 == 1)).collect(),
            source: Source::new(bytes),
            engine,
        };
        let opened = side.source.open(&side.engine);
        let windows = side.windows.iter_mut().map(|window| window.open(&side.engine));
        let opened = opened.and(windows.fold(Ok(()), Result::and));
        for slot in 0..self.config.counters {
            let counter = side.engine.counter_at(slot).map_err(|error| error.to_string())?;
            let handle = Arc::new(counter);
            if let Some(place) = side.counters.get_mut(usize::from(slot)) {
                *place = Some(self.counter(handle));
            }
        }
        if let Some(place) = self.sides.get_mut(at) {
            *place = Some(side);
        }
        if opened.is_err() && !self.registrations_fail() {
            return Err(format!("engine {at} could not register its memory: {opened:?}"));
        }
        Ok(())
    }

    fn counter(&mut self, handle: Arc<crate::ImmCounter>) -> Counter {
        self.next_instance += 1;
        let (tag, instance) = (handle.tag(), self.next_instance);
        Counter { tag, instance, wait: None, shares: BTreeMap::new(), handle }
    }

    pub(super) fn registrations_fail(&self) -> bool {
        self.faults.contains(&Fault::Registration { fails: true })
    }

    pub(super) fn add_peer(&mut self, from: usize, to: usize) -> Result<bool, String> {
        let Some(door) = self.doors.get(to).cloned().flatten() else { return Ok(false) };
        if from == to {
            return Ok(false);
        }
        self.look_at_partings();
        let now = self.world.now();
        let Some(driver) = self.world.driver(from) else { return Ok(false) };
        let added = driver.add_peer(&door.address);
        self.say(|| format!("engine {from} adds {to}: {added:?}"));
        let reachable = self.side(to).is_some_and(|side| side.serial == door.serial);
        let Some(serial) = self.side(from).map(|side| side.serial) else { return Ok(false) };
        match added {
            Ok(id) => {
                // It may have been connected for long, by the other's call.
                let met = self.side(from).and_then(|side| side.met.get(&id)).copied();
                let since = now.saturating_sub(self.config.news).min(met.unwrap_or(now));
                if let Some(old) = self.side(from).and_then(|side| side.known(to))
                    && old.id != id
                    && !self.has_parted(from, serial, old.id)
                    && !self.was_disturbed((from, serial), (to, old.serial), old.since)
                {
                    return Err(format!("engine {from} lost {}, and nothing has happened", old.id));
                }
                let Some(side) = self.side_mut(from) else { return Ok(false) };
                let old = side.known(to).filter(|known| known.id == id);
                if old.is_some_and(|known| known.serial != door.serial) {
                    return Err(format!("engine {from} knows two engines by the name {id}"));
                }
                if let Some(place) = side.peers.get_mut(to) {
                    *place = Some(old.unwrap_or(Known { id, serial: door.serial, since }));
                }
                Ok(true)
            }
            // Peers that go away keep their places for a while.
            Err(AddPeerError::Full(_)) => Ok(true),
            Err(AddPeerError::Memory(_)) if self.registrations_fail() => Ok(true),
            Err(AddPeerError::Connect(_))
                if !reachable || self.was_disturbed((from, serial), (to, door.serial), now) =>
            {
                Ok(true)
            }
            Err(error) => Err(format!("engine {from} could not add {to}: {error}")),
        }
    }

    fn remove_peer(&mut self, numbers: &mut Numbers) -> bool {
        let (from, to) = self.pair(numbers);
        let Some(side) = self.side(from) else { return false };
        let Some(known) = side.known(to) else { return false };
        side.engine.remove_peer(known.id);
        let serial = side.serial;
        self.disturb(serial, known.serial);
        self.say(|| format!("engine {from} removes {to}, {}", known.id));
        true
    }

    fn kill(&mut self, numbers: &mut Numbers) -> Result<bool, String> {
        let alive = self.sides.iter().flatten().count();
        let Some(at) = self.alive(numbers) else { return Ok(false) };
        if alive < 2 || (alive == 2 && numbers.percent(70)) {
            return Ok(false);
        }
        self.say(|| format!("engine {at} is killed"));
        self.world.kill(at);
        self.bury(at, !self.world.is_virtual())?;
        Ok(true)
    }

    /// What becomes of an engine that is gone.
    pub(super) fn bury(&mut self, at: usize, in_order: bool) -> Check {
        let Some(side) = self.sides.get_mut(at).and_then(Option::take) else { return Ok(()) };
        let serials: Vec<u32> = self.sides.iter().flatten().map(|other| other.serial).collect();
        let dead = side.serial;
        self.graves.push(side);
        serials.into_iter().for_each(|other| self.disturb(dead, other));
        self.faults.retain(|fault| match fault {
            Fault::Nic { engine, .. } => *engine != at,
            Fault::Path { engine, to, .. } => *engine != at && *to != at,
            Fault::Registration { .. } => true,
        });
        self.unhealthy.retain(|(engine, _)| *engine != at);
        // Where the end is in order, so are those of its transfers. Otherwise what is on its way may still
        // arrive, until whoever receives it withdraws the region.
        let (ended, rest): (Vec<Flight>, Vec<Flight>) =
            std::mem::take(&mut self.flights).into_iter().partition(|flight| flight.serial == dead);
        self.flights = rest;
        for flight in ended {
            if let (true, Some(end)) = (in_order, flight.handle.end()?) {
                self.finish(flight, end)?;
            }
        }
        Ok(())
    }

    fn revive(&mut self, numbers: &mut Numbers) -> Result<bool, String> {
        let empty: Vec<usize> =
            (0..self.sides.len()).filter(|&at| self.side(at).is_none()).collect();
        let Some(&at) = empty.get(numbers.index(empty.len())) else { return Ok(false) };
        let nics = self.some_nics(numbers);
        self.say(|| format!("engine {at} starts, with {nics} NICs"));
        self.start(at, nics)?;
        Ok(true)
    }

    pub(super) fn some_nics(&self, numbers: &mut Numbers) -> u8 {
        1 + u8::try_from(numbers.below(u64::from(self.config.nics))).unwrap_or(0)
    }

    // ---- faults ----

    pub(super) fn disturb(&mut self, a: u32, b: u32) {
        let now = self.world.now();
        self.disturbed.insert((a.min(b), a.max(b)), now);
    }

    /// Who has had no NIC for so long that others may have missed its heartbeats is lost by rights: those
    /// before and after that time are an eighth of the silence apart, and may be late.
    pub(super) fn listen(&mut self) {
        let now = self.world.now();
        let enough = self.config.silence * 5 / 8;
        let usable = |at: usize, nic: u8| {
            let lost = Fault::Nic { engine: at, nic, lost: true };
            !self.unhealthy.contains(&(at, nic)) && !self.faults.contains(&lost)
        };
        let speaks = |at: usize, side: &Side| (0..side.nics).any(|nic| usable(at, nic));
        let mut lost = Vec::new();
        for (at, side) in self.sides.iter().enumerate() {
            match side {
                None => drop(self.mute.remove(&at)),
                Some(side) if speaks(at, side) => {
                    if let Some(mute) = self.mute.get_mut(&at) {
                        mute.speaks.get_or_insert(now);
                    }
                }
                Some(side) => {
                    let mute = self.mute.entry(at).or_insert(Mute { since: now, speaks: None });
                    if mute.speaks.take().is_some_and(|since| now >= since + HEARD_AFTER) {
                        mute.since = now;
                    }
                    if now >= mute.since + enough {
                        lost.push(side.serial);
                    }
                }
            }
        }
        let others: Vec<u32> = self.sides.iter().flatten().map(|side| side.serial).collect();
        for mute in lost {
            others.iter().for_each(|other| self.disturb(mute, *other));
        }
        self.look_at_partings();
        if now >= self.next_look {
            self.look_at_paths();
            for side in self.sides.iter_mut().flatten() {
                for id in side.engine.peers() {
                    side.met.entry(id).or_insert(now.saturating_sub(LOOK_EVERY));
                }
            }
            self.next_look = now + LOOK_EVERY;
        }
    }

    /// Notes whom engines have let go.
    fn look_at_partings(&mut self) {
        if self.config.idle_after == Duration::MAX {
            return;
        }
        for (at, side) in self.sides.iter().enumerate() {
            let Some(side) = side else { continue };
            for known in side.peers.iter().flatten() {
                let is_down =
                    side.engine.peer_state(known.id) == Some(PeerState::Down(DownReason::Idle));
                if is_down && self.parted.insert((at, side.serial, known.id)) {
                    self.totals.partings += 1;
                }
            }
        }
    }

    /// Whether this end of a connection has found it ended by agreement.
    pub(super) fn has_parted(&self, at: usize, serial: u32, id: PeerId) -> bool {
        self.parted.contains(&(at, serial, id))
    }

    /// Whether connections outlast the loss of a path. Without memory for answers they do not.
    pub(super) fn fails_over(&self) -> bool {
        self.world.fails_over() && !self.registrations_failed
    }

    fn is_broken(&self, (from, nic, to, remote): (usize, u8, usize, u8)) -> bool {
        self.faults.iter().any(|fault| match *fault {
            Fault::Nic { engine, nic: lost, .. } => {
                (engine, lost) == (from, nic) || (engine, lost) == (to, remote)
            }
            Fault::Path { engine, to: other, nic: near, remote_nic, .. } => {
                (engine, near, other, remote_nic) == (from, nic, to, remote)
            }
            Fault::Registration { .. } => false,
        })
    }

    /// Two engines may lose each other of whose paths, either way, one broke, while none was whole for long enough to be
    /// in use: one that is back is first settled, and then connected anew. That the owner takes all NICs out of use is
    /// no reason; only the silence that may come of it is.
    fn look_at_paths(&mut self) {
        if self.faults.is_empty() && self.unhealthy.is_empty() && self.hurt.is_empty() {
            return;
        }
        let (now, back) = (self.world.now(), self.config.silence);
        self.hurt.retain(|_, at| now < *at + back);
        self.broken.retain(|_, at| now < *at + back);
        // Each two engines once: what breaks one way is settled by the other.
        for (a, b) in self.pairs().into_iter().filter(|(a, b)| a < b) {
            let (Some(one), Some(other)) = (self.side(a), self.side(b)) else { continue };
            let (serials, nics) = ((one.serial, other.serial), (one.nics, other.nics));
            let (mut whole, mut broke) = ([false; 2], false);
            for (nic, remote) in (0..nics.0).flat_map(|nic| (0..nics.1).map(move |it| (nic, it))) {
                let ways = [(a, nic, b, remote), (b, remote, a, nic)];
                for (path, whole) in ways.into_iter().zip(&mut whole) {
                    let is_broken = self.is_broken(path);
                    if is_broken {
                        self.broken.insert(path, now);
                    }
                    if is_broken || self.unhealthy.contains(&(path.0, path.1)) {
                        self.hurt.insert(path, now);
                    }
                    broke |= self.broken.contains_key(&path);
                    *whole |= !self.hurt.contains_key(&path);
                }
            }
            if broke && whole != [true; 2] {
                self.disturb(serials.0, serials.1);
            }
        }
    }

    /// Two engines have lost a path. If they had just lost another, there was not the time to settle both.
    fn strike(&mut self, a: u32, b: u32) {
        let now = self.world.now();
        let last = self.struck.insert((a.min(b), a.max(b)), now);
        if last.is_some_and(|last| now < last + self.config.drain) {
            self.disturb(a, b);
        }
    }

    fn fault(&mut self, fault: Fault) -> bool {
        if !self.world.fault(fault) {
            return false;
        }
        self.say(|| format!("{fault:?}"));
        self.registrations_failed |= matches!(fault, Fault::Registration { .. });
        let opposite = opposite(fault);
        if !self.faults.remove(&opposite) {
            self.faults.insert(fault);
        }
        // It may be put right before the next look.
        self.look_at_paths();
        let pairs = self.pairs();
        let hit = |(a, b): &(usize, usize)| match fault {
            Fault::Nic { engine, .. } => engine == *a || engine == *b,
            Fault::Path { engine, to, .. } => (engine, to) == (*a, *b),
            Fault::Registration { .. } => true,
        };
        for (a, b) in pairs.into_iter().filter(hit) {
            let serials =
                (self.side(a).map(|side| side.serial), self.side(b).map(|side| side.serial));
            if let (Some(a), Some(b)) = serials {
                match fault {
                    Fault::Registration { .. } => self.disturb(a, b),
                    _ if !self.fails_over() => self.disturb(a, b),
                    Fault::Nic { lost: true, .. } | Fault::Path { cut: true, .. } => {
                        self.strike(a, b);
                    }
                    Fault::Nic { .. } | Fault::Path { .. } => {}
                }
            }
        }
        true
    }

    /// All pairs of living engines, both ways.
    pub(super) fn pairs(&self) -> Vec<(usize, usize)> {
        let alive = (0..self.sides.len()).filter(|&at| self.side(at).is_some());
        let pairs = alive.clone().flat_map(|a| alive.clone().map(move |b| (a, b)));
        pairs.filter(|(a, b)| a != b).collect()
    }

    fn lose_nic(&mut self, numbers: &mut Numbers) -> bool {
        let Some(at) = self.alive(numbers) else { return false };
        let nics = self.side(at).map_or(1, |side| side.nics);
        let nic = u8::try_from(numbers.below(u64::from(nics))).unwrap_or(0);
        let fault = Fault::Nic { engine: at, nic, lost: true };
        !self.faults.contains(&fault) && self.fault(fault)
    }

    /// Cuts one path, or all between two engines.
    fn cut_link(&mut self, numbers: &mut Numbers) -> bool {
        let (from, to) = self.pair(numbers);
        let (Some(side), Some(other)) = (self.side(from), self.side(to)) else { return false };
        let (nics, others) = (side.nics, other.nics);
        let (ours, theirs) = (side.up(to, other.serial), other.up(from, side.serial));
        let any = |numbers: &mut Numbers, nics: u8| {
            u8::try_from(numbers.below(u64::from(nics))).unwrap_or(0)
        };
        let one = (any(numbers, nics), any(numbers, others));
        let all = numbers.percent(40);
        let mut cut = false;
        for (nic, remote_nic) in
            (0..nics).flat_map(|nic| (0..others).map(move |other| (nic, other)))
        {
            if !all && (nic, remote_nic) != one {
                continue;
            }
            if let Some(peer) = ours {
                cut |=
                    self.fault(Fault::Path { engine: from, to, peer, nic, remote_nic, cut: true });
            }
            if let Some(peer) = theirs.filter(|_| all) {
                let (nic, remote_nic) = (remote_nic, nic);
                let fault = Fault::Path { engine: to, to: from, peer, nic, remote_nic, cut: true };
                cut |= self.fault(fault);
            }
        }
        cut
    }

    fn registration(&mut self, numbers: &mut Numbers) -> bool {
        let fails = !self.registrations_fail() && numbers.percent(60);
        fails != self.registrations_fail() && self.fault(Fault::Registration { fails })
    }

    /// Puts one thing right.
    fn mend(&mut self, numbers: &mut Numbers, which: impl Fn(&Fault) -> bool) -> bool {
        let faults: Vec<Fault> = self.faults.iter().copied().filter(which).collect();
        let fault = faults.get(numbers.index(faults.len()));
        fault.is_some_and(|&fault| self.fault(opposite(fault)))
    }

    /// Puts everything right.
    pub(super) fn mend_all(&mut self) {
        for fault in self.faults.clone() {
            self.fault(opposite(fault));
        }
        if !self.unhealthy.is_empty() {
            self.health_changed = self.world.now();
        }
        for (at, nic) in std::mem::take(&mut self.unhealthy) {
            if let Some(side) = self.side(at) {
                side.engine.set_nic_health(nic, true);
            }
        }
    }

    fn health(&mut self, numbers: &mut Numbers) -> bool {
        let Some(at) = self.alive(numbers) else { return false };
        let Some(side) = self.side(at) else { return false };
        let nics = side.nics;
        let nic = u8::try_from(numbers.below(u64::from(nics))).unwrap_or(0);
        let healthy = self.unhealthy.contains(&(at, nic));
        side.engine.set_nic_health(nic, healthy);
        if healthy {
            self.unhealthy.remove(&(at, nic));
        } else {
            self.unhealthy.insert((at, nic));
        }
        self.health_changed = self.world.now();
        self.look_at_paths();
        self.say(|| format!("engine {at} sets the health of NIC {nic} to {healthy}"));
        true
    }

    // ---- transfers ----

    fn part(
        &self,
        from: usize,
        to: usize,
        window: Option<usize>,
        count: Option<Count>,
    ) -> Option<Part> {
        let known = self.side(from)?.known(to)?;
        let receiver = self.side(to)?;
        let registration = |at: usize| Some((at, receiver.windows.get(at)?.serial));
        Some(Part {
            to,
            serial: receiver.serial,
            id: known.id,
            peer_serial: known.serial,
            theirs: receiver.up(from, self.side(from)?.serial),
            window: window.and_then(registration),
            count,
        })
    }

    /// What `writes` for counter slot `slot` of engine `at` are to count, by the tag it has now.
    fn count(&self, at: usize, slot: usize, writes: u64) -> Option<Count> {
        let counter = self.side(at)?.counters.get(slot)?.as_ref()?;
        Some(Count { tag: counter.tag, writes, instance: Some(counter.instance) })
    }

    /// The same for a tag that may not be what the engine has now.
    fn count_of(&self, at: usize, tag: ImmTag, writes: u64) -> Count {
        let counter = self.side(at).and_then(|side| side.counters.get(usize::from(tag.slot())));
        let counter = counter.and_then(Option::as_ref).filter(|counter| counter.tag == tag);
        Count { tag, writes, instance: counter.map(|counter| counter.instance) }
    }

    fn slot(&self, numbers: &mut Numbers) -> usize {
        numbers.index(usize::from(self.config.counters))
    }

    fn within(&self, numbers: &mut Numbers) -> Option<Duration> {
        let longest = u64::try_from(self.config.pass.as_nanos()).unwrap_or(u64::MAX);
        numbers.percent(25).then(|| Duration::from_nanos(numbers.size(longest)))
    }

    /// A free range of a window of `to`'s, of up to `len` bytes.
    fn room(
        &self,
        to: usize,
        window: usize,
        len: u64,
        numbers: &mut Numbers,
    ) -> Option<(u64, u64)> {
        let window = self.side(to)?.windows.get(window)?;
        window.desc()?;
        let len = len.min(window.len());
        (0..4).find_map(|_| {
            let start = numbers.below(window.len() - len + 1);
            window.is_free(start, len).then_some((start, len))
        })
    }

    fn source_room(&self, from: usize, len: u64, numbers: &mut Numbers) -> Option<u64> {
        let source = &self.side(from)?.source;
        source.region.as_ref()?;
        let last = source.len().checked_sub(len)?;
        (0..4).map(|_| numbers.below(last + 1)).find(|&start| source.is_free(start, len))
    }

    fn window(&self, numbers: &mut Numbers) -> usize {
        numbers.index(self.config.windows)
    }

    fn single(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let (from, to) = self.pair(n);
        let (window, len) = (self.window(n), n.size(self.config.write_bytes));
        let Some((start, len)) = self.room(to, window, len, n) else { return Ok(false) };
        let Some(at) = self.source_room(from, len, n) else { return Ok(false) };
        let slot = self.slot(n);
        let count = if n.percent(80) { self.count(to, slot, 1) } else { None };
        let Some(part) = self.part(from, to, Some(window), count) else { return Ok(false) };
        let claim = Claim { flight: self.next_flight, start: at, len, salt: n.next() };
        let there = Claim { start, ..claim };
        let within = self.within(n);
        let Some(dst) = self.desc(to, window) else { return Ok(false) };
        let asked =
            Asked { parts: vec![part], claims: vec![(claim, Some((window, there)))], within };
        let express = within.is_none() && n.percent(50);
        let text = || format!("single {from} -> {to}, {len} bytes at {start} of window {window}");
        self.submit(from, asked, n, text, |engine, driver, source| {
            let write = SingleWrite {
                peer: part.id,
                src: source,
                src_offset: at,
                dst: &dst,
                dst_offset: start,
                len,
                imm: count.map(|count| count.tag),
            };
            match driver {
                Some(driver) if express => driver.submit_single_write(&write),
                _ => engine.submit_single_write(&write),
            }
        })
    }

    fn desc(&self, at: usize, window: usize) -> Option<MrDesc> {
        self.side(at)?.windows.get(window)?.desc()
    }

    fn paged(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let (from, to) = self.pair(n);
        let (window, bytes) = (self.window(n), n.size(self.config.page_bytes));
        let (gap, dst_gap) = (n.below(2) * n.below(9), n.below(2) * n.below(9));
        let pages =
            n.size(self.config.pages).min(self.config.window_bytes as u64 / (bytes + 9) / 2);
        if pages == 0 {
            return Ok(false);
        }
        let (stride, dst_stride) = (bytes + gap, bytes + dst_gap);
        let span = stride * pages;
        let Some(offset) = self.source_room(from, span, n) else { return Ok(false) };
        // More places than pages, of which some are taken: in runs, or shuffled.
        let Some(there) = self.side(to).and_then(|side| side.windows.get(window)) else {
            return Ok(false);
        };
        let Some(dst) = there.desc() else { return Ok(false) };
        let dst_offset = n.below(dst_stride.min(there.len()));
        let places = (there.len() - dst_offset) / dst_stride;
        let first = n.below(places.max(1));
        let mut to_pages: Vec<u64> = (0..places)
            .map(|i| (first + i) % places)
            .filter(|i| there.is_free(dst_offset + i * dst_stride, bytes))
            .collect();
        if n.percent(40) {
            shuffle(&mut to_pages, n);
        }
        to_pages.truncate(usize::try_from(pages).unwrap_or(0));
        let mut from_pages: Vec<u64> = (0..pages).collect();
        if n.percent(40) {
            shuffle(&mut from_pages, n);
        }
        from_pages.truncate(to_pages.len());
        if to_pages.is_empty() {
            return Ok(false);
        }
        let (slot, pages) = (self.slot(n), to_pages.len() as u64);
        let count = if n.percent(80) { self.count(to, slot, pages) } else { None };
        let Some(part) = self.part(from, to, Some(window), count) else { return Ok(false) };
        let (flight, salt) = (self.next_flight, n.next());
        let claims = (0_u64..).zip(from_pages.iter().zip(&to_pages)).map(|(i, (here, there))| {
            let salt = salt.wrapping_add(i);
            let claim = Claim { flight, start: offset + here * stride, len: bytes, salt };
            (claim, Some((window, Claim { start: dst_offset + there * dst_stride, ..claim })))
        });
        let asked = Asked { parts: vec![part], claims: claims.collect(), within: self.within(n) };
        let text = || format!("paged {from} -> {to}, {pages} pages of {bytes} in window {window}");
        self.submit(from, asked, n, text, |engine, _, source| {
            engine.submit_paged_writes(&PagedWrite {
                peer: part.id,
                page_bytes: bytes,
                src: source,
                src_pages: Pages { indices: indices(&from_pages), stride, offset },
                dst: &dst,
                dst_pages: Pages {
                    indices: indices(&to_pages),
                    stride: dst_stride,
                    offset: dst_offset,
                },
                imm: count.map(|count| count.tag),
            })
        })
    }

    /// The engines that `from` knows by name, some of them.
    fn some_peers(&self, from: usize, n: &mut Numbers) -> Vec<usize> {
        let known = |at: &usize| {
            self.side(*at).is_some()
                && self.side(from).is_some_and(|side| side.known(*at).is_some())
        };
        let mut peers: Vec<usize> = (0..self.sides.len()).filter(known).collect();
        shuffle(&mut peers, n);
        peers.truncate(1 + n.index(peers.len().max(1)));
        peers
    }

    fn scatter(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let Some(from) = self.alive(n) else { return Ok(false) };
        let slot = self.slot(n);
        let (mut targets, mut parts, mut claims) = (Vec::new(), Vec::new(), Vec::new());
        let mut tag = None;
        let mut taken: Vec<(u64, u64)> = Vec::new();
        for to in self.some_peers(from, n) {
            let (window, len) = (self.window(n), n.size(self.config.write_bytes / 2));
            let Some((start, len)) = self.room(to, window, len, n) else { continue };
            let Some(at) = self.source_room(from, len, n) else { continue };
            if taken.iter().any(|&(start, other)| at < start + other && start < at + len) {
                continue;
            }
            taken.push((at, len));
            // The first target's tag; at the others it may be another counter, or none.
            tag = tag.or_else(|| self.count(to, slot, 1).map(|count| count.tag));
            let count = tag.map(|tag| self.count_of(to, tag, 1));
            let (Some(part), Some(dst)) =
                (self.part(from, to, Some(window), count), self.desc(to, window))
            else {
                continue;
            };
            let claim = Claim { flight: self.next_flight, start: at, len, salt: n.next() };
            claims.push((claim, Some((window, Claim { start, ..claim }))));
            parts.push(part);
            targets.push(Target { peer: part.id, dst, src_offset: at, dst_offset: start, len });
        }
        if targets.is_empty() {
            return Ok(false);
        }
        let asked = Asked { parts, claims, within: self.within(n) };
        let brief = |target: &Target| (target.peer, target.len, target.dst_offset);
        let list: Vec<_> = targets.iter().map(brief).collect();
        let text = || format!("scatter {from} -> {list:?}");
        let targets: Arc<[Target]> = targets.clone().into();
        self.submit(from, asked, n, text, |engine, _, source| {
            engine.submit_scatter(&ScatterWrite { src: source, targets, imm: tag })
        })
    }

    fn barrier(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let Some(from) = self.alive(n) else { return Ok(false) };
        let (peers, slot) = (self.some_peers(from, n), self.slot(n));
        let Some(count) = peers.first().and_then(|&to| self.count(to, slot, 1)) else {
            return Ok(false);
        };
        let part = |&to: &usize| self.part(from, to, None, Some(self.count_of(to, count.tag, 1)));
        let parts: Vec<Part> = peers.iter().filter_map(part).collect();
        let ids: Vec<PeerId> = parts.iter().map(|part| part.id).collect();
        let asked = Asked { parts, claims: Vec::new(), within: self.within(n) };
        let text = || format!("barrier {from} -> {peers:?}, {}", count.tag);
        self.submit(from, asked, n, text, |engine, _, _| {
            engine.submit_barrier(&engine.add_peer_group(&ids), count.tag)
        })
    }

    fn imm(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let (from, to) = self.pair(n);
        let (slot, writes) = (self.slot(n), n.size(255));
        let Some(count) = self.count(to, slot, writes) else { return Ok(false) };
        let Some(part) = self.part(from, to, None, Some(count)) else { return Ok(false) };
        let within = self.within(n);
        let asked = Asked { parts: vec![part], claims: Vec::new(), within };
        let express = within.is_none() && n.percent(50);
        let writes = u16::try_from(writes).unwrap_or(1);
        let text = || format!("imm {from} -> {to}, {} by {writes}", count.tag);
        self.submit(from, asked, n, text, |engine, driver, _| match driver {
            Some(driver) if express => driver.submit_imm(part.id, count.tag, writes),
            _ => engine.submit_imm(part.id, count.tag, writes),
        })
    }

    fn stale_write(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let (from, to) = self.pair(n);
        let window = self.window(n);
        let Some(there) = self.side(to).and_then(|side| side.windows.get(window)) else {
            return Ok(false);
        };
        let Some(dst) = there.stale.filter(|_| self.world.refuses_softly()) else {
            return Ok(false);
        };
        let len = n.size(self.config.write_bytes).min(dst.len);
        let start = n.below(dst.len - len + 1);
        let Some(at) = self.source_room(from, len, n) else { return Ok(false) };
        let Some(part) = self.part(from, to, None, None) else { return Ok(false) };
        // Nobody may write there: no claim. That it is refused is told by a registration of number 0.
        let part = Part { window: Some((window, 0)), ..part };
        let claim = Claim { flight: self.next_flight, start: at, len, salt: n.next() };
        let asked = Asked { parts: vec![part], claims: vec![(claim, None)], within: None };
        let text = || format!("stale write {from} -> {to}, {len} bytes at {start}");
        self.submit(from, asked, n, text, |engine, _, source| {
            engine.submit_single_write(&SingleWrite {
                peer: part.id,
                src: source,
                src_offset: at,
                dst: &dst,
                dst_offset: start,
                len,
                imm: None,
            })
        })
    }

    /// Submits, and keeps account of what that may do.
    fn submit(
        &mut self,
        from: usize,
        asked: Asked,
        numbers: &mut Numbers,
        text: impl FnOnce() -> String,
        call: impl FnOnce(
            &TransferEngine,
            Option<&mut crate::Driver>,
            &crate::Region,
        ) -> Result<Transfer, SubmitError>,
    ) -> Result<bool, String> {
        let Asked { parts, claims, within } = asked;
        let now = self.world.now();
        let Some(side) = self.sides.get_mut(from).and_then(Option::as_mut) else {
            return Ok(false);
        };
        let Some(region) = side.source.region.clone() else { return Ok(false) };
        claims.iter().for_each(|(here, _)| side.source.claim(*here));
        let engine = match within {
            Some(within) => side.engine.with_deadline(within),
            None => side.engine.clone(),
        };
        let serial = side.serial;
        let flight = self.next_flight;
        for (part, claim) in parts.iter().cycle().zip(&claims) {
            let Some((window, there)) = claim.1 else { continue };
            // One part has all claims, or each has its own.
            let receiver = self.sides.get_mut(part.to).and_then(Option::as_mut);
            if let Some(window) = receiver.and_then(|side| side.windows.get_mut(window)) {
                window.claim(there);
            }
        }
        let submitted = call(&engine, self.world.driver(from), &region);
        drop(region);
        match submitted {
            Err(error) => {
                self.unclaim(from, flight, &parts)?;
                let under_way = self.flights.iter().filter(|other| other.serial == serial).count();
                // One may be held in reserve for a small write.
                let full = under_way + 1 >= usize::from(self.config.transfers);
                match error {
                    SubmitError::Full { .. } if full => Ok(false),
                    error => Err(format!("{}: refused: {error}", text())),
                }
            }
            Ok(transfer) => {
                self.next_flight += 1;
                self.say(|| format!("transfer {flight}: {}", text()));
                for part in &parts {
                    if let Some(count) = part.count {
                        let sender = (serial, part.id);
                        self.ledger.submit(part.serial, count.tag, sender, count.writes);
                    }
                }
                let handle = watch(transfer, numbers);
                // A callback that is due at once waits for whoever polls.
                let _polled_soon = self.world.driver(from);
                self.flights.push(Flight {
                    number: flight,
                    from,
                    serial,
                    handle,
                    parts,
                    deadline: within.map(|within| now + within),
                    cancelled: None,
                    submitted: now,
                    message: None,
                });
                Ok(true)
            }
        }
    }

    /// Lets go of what was claimed for a transfer that was refused.
    fn unclaim(&mut self, from: usize, flight: u64, parts: &[Part]) -> Check {
        if let Some(side) = self.side_mut(from) {
            side.source.end(flight);
        }
        for part in parts {
            let Some((window, _)) = part.window else { continue };
            let window = self.side_mut(part.to).and_then(|side| side.windows.get_mut(window));
            if let Some(window) = window {
                window.end(flight, super::memory::Left::Old)?;
            }
        }
        Ok(())
    }

    fn cancel(&mut self, numbers: &mut Numbers) -> bool {
        let at = numbers.index(self.flights.len());
        let now = self.world.now();
        let Some(flight) = self.flights.get_mut(at) else { return false };
        let Handle::Polled(transfer) = &flight.handle else { return false };
        transfer.cancel();
        flight.cancelled = flight.cancelled.or(Some(now));
        let number = flight.number;
        self.say(|| format!("transfer {number} is cancelled"));
        true
    }

    // ---- messages ----

    fn send(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let (from, to) = self.pair(n);
        let Some(part) = self.part(from, to, None, None) else { return Ok(false) };
        let now = self.world.now();
        let within = self.within(n);
        let most = u64::from(self.config.mailbox_slot_bytes).saturating_sub(64);
        let len = n.size(most).max(32);
        let Some(side) = self.side(from) else { return Ok(false) };
        let (serial, flight) = (side.serial, self.next_flight);
        let engine = match within {
            Some(within) => side.engine.with_deadline(within),
            None => side.engine.clone(),
        };
        let stream = self.streams.entry((serial, part.id)).or_default();
        let number = stream.sent.len();
        let bytes = super::judge::message(serial, part.id, number, len);
        match engine.submit_send(part.id, &bytes) {
            Err(SubmitError::Full { .. }) => Ok(false),
            Err(error) => Err(format!("a message of {len} bytes was refused: {error}")),
            Ok(transfer) => {
                stream.sent.push(Sent::UnderWay);
                self.next_flight += 1;
                let _polled_soon = self.world.driver(from);
                self.say(|| {
                    format!("transfer {flight}: message {number} {from} -> {to}, {len} bytes")
                });
                self.flights.push(Flight {
                    number: flight,
                    from,
                    serial,
                    handle: watch(transfer, n),
                    parts: vec![part],
                    deadline: within.map(|within| now + within),
                    cancelled: None,
                    submitted: now,
                    message: Some(number),
                });
                Ok(true)
            }
        }
    }

    fn receive(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let (Some(at), most) = (self.alive(n), n.size(16)) else { return Ok(false) };
        self.say(|| format!("engine {at} receives {most}"));
        self.take_messages(at, most)?;
        Ok(true)
    }

    fn post_receives(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let Some(at) = self.alive(n) else { return Ok(false) };
        let count = n.index(8);
        let Some(side) = self.side(at) else { return Ok(false) };
        let received = Arc::clone(&side.received);
        side.engine.submit_recvs(count, move |message| lock(&received).push(message));
        // Callbacks run now: what is received otherwise comes after them.
        if let Some(driver) = self.world.driver(at) {
            driver.poll();
        }
        self.say(|| format!("engine {at} posts {count} receives"));
        self.take_messages(at, 0)?;
        Ok(true)
    }

    // ---- counts ----

    /// A counter of some engine's that nobody waits for, and how much to ask of it.
    fn idle_counter(&self, n: &mut Numbers) -> Option<(usize, usize, u64)> {
        let (at, slot) = (self.alive(n)?, self.slot(n));
        let counter = self.side(at)?.counters.get(slot)?.as_ref()?;
        let available = counter.handle.available();
        let writes = n.below(available.saturating_add(4)).max(1);
        counter.wait.is_none().then_some((at, slot, writes))
    }

    fn counter_at(&mut self, at: usize, slot: usize) -> Option<&mut Counter> {
        self.side_mut(at)?.counters.get_mut(slot)?.as_mut()
    }

    fn expect(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let Some((at, slot, writes)) = self.idle_counter(n) else { return Ok(false) };
        self.say(|| format!("engine {at} expects {writes} at counter {slot}"));
        let Some(engine) = self.side(at).map(|side| side.engine.clone()) else { return Ok(false) };
        let Some(counter) = self.counter_at(at, slot) else { return Ok(false) };
        let left = Left::default();
        let call = {
            let left = Arc::clone(&left);
            move |result| lock(&left).push(result)
        };
        engine
            .expect_imm_count(&counter.handle, writes, call)
            .map_err(|error| format!("nobody waited, and yet: {error}"))?;
        counter.wait = Some(Wait { writes, way: Way::Callback(left) });
        let _polled_soon = self.world.driver(at);
        Ok(true)
    }

    fn reach(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let Some((at, slot, writes)) = self.idle_counter(n) else { return Ok(false) };
        let within = self.config.pass.saturating_mul(u32::try_from(n.size(8)).unwrap_or(1));
        let deadline = self.world.now() + within;
        self.say(|| format!("engine {at} waits for {writes} at counter {slot} within {within:?}"));
        let Some(counter) = self.counter_at(at, slot) else { return Ok(false) };
        let handle = Arc::clone(&counter.handle);
        let future = Box::pin(async move { handle.reached(writes).await });
        counter.wait = Some(Wait { writes, way: Way::Future { deadline, future } });
        self.observe()?;
        Ok(true)
    }

    fn take(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let Some((at, slot, writes)) = self.idle_counter(n) else { return Ok(false) };
        let Some(counter) = self.counter_at(at, slot) else { return Ok(false) };
        let there = counter.handle.available();
        let taken = counter.handle.try_take(writes).map_err(|error| error.to_string())?;
        if taken != (there >= writes) {
            return Err(format!("taking {writes} of {there} said {taken}"));
        }
        self.say(|| format!("engine {at} takes {writes} of {there} at counter {slot}"));
        if taken {
            self.consumed(at, slot, writes)?;
        }
        Ok(true)
    }

    fn shares(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let Some((at, slot, writes)) = self.idle_counter(n) else { return Ok(false) };
        let Some(side) = self.side(at) else { return Ok(false) };
        let up = |other: usize| side.up(other, self.side(other)?.serial);
        let peers: Vec<PeerId> = (0..self.sides.len()).filter_map(up).collect();
        let each = writes.div_ceil(peers.len().max(1) as u64);
        let share = |peer| Expected { peer, writes: n.below(each + 1) };
        let expected: Vec<Expected> = peers.into_iter().map(share).collect();
        let total: u64 = expected.iter().map(|share| share.writes).sum();
        if total == 0 {
            return Ok(false);
        }
        let Some(counter) = self.counter_at(at, slot) else { return Ok(false) };
        let waited = counter.handle.wait_from(&expected, Duration::ZERO);
        self.say(|| format!("engine {at} asks counter {slot} for {expected:?}: {waited:?}"));
        match waited {
            Ok(()) => {
                let Some(counter) = self.counter_at(at, slot) else { return Ok(false) };
                for share in &expected {
                    *counter.shares.entry(share.peer).or_default() += share.writes;
                }
                self.consumed(at, slot, total)?;
            }
            Err(CountError::Timeout { target, missing, peers, .. }) => {
                if target != total || missing == 0 || missing > total {
                    return Err(format!(
                        "{missing} of {target} are missing, when {total} were asked"
                    ));
                }
                self.named(at, slot, &expected, &peers)?;
            }
            Err(error) => return Err(format!("nobody waited, and yet: {error}")),
        }
        Ok(true)
    }

    fn retire(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let Some((at, slot, _)) = self.idle_counter(n) else { return Ok(false) };
        self.audit(at, slot, false)?;
        let Some(side) = self.side_mut(at) else { return Ok(false) };
        let serial = side.serial;
        let Some(old) = side.counters.get_mut(slot).and_then(Option::take) else {
            return Ok(false);
        };
        let tag = old.tag;
        let engine = side.engine.clone();
        drop(old);
        self.ledger.retire(serial, tag);
        let asked = u16::try_from(slot).unwrap_or(u16::MAX);
        let next = engine.counter_at(asked).map_err(|error| error.to_string())?;
        if next.tag() == tag {
            return Err(format!("{tag} was retired, and is used again at once"));
        }
        self.say(|| format!("engine {at} retires {tag}; {} comes next", next.tag()));
        let counter = self.counter(Arc::new(next));
        if let Some(place) = self.side_mut(at).and_then(|side| side.counters.get_mut(slot)) {
            *place = Some(counter);
        }
        Ok(true)
    }

    // ---- regions ----

    fn close_window(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let (Some(at), window) = (self.alive(n), self.window(n)) else { return Ok(false) };
        let fails = self.registrations_fail();
        let salt = n.next();
        let Some(side) = self.side_mut(at) else { return Ok(false) };
        let engine = side.engine.clone();
        let Some(place) = side.windows.get_mut(window) else { return Ok(false) };
        let closed = place.close(salt)?;
        let opened = place.open(&engine);
        if let (Err(error), false) = (&opened, fails) {
            return Err(format!("a window could not be registered again: {error}"));
        }
        self.say(|| {
            format!("engine {at} closes window {window}: {closed}; again: {}", opened.is_ok())
        });
        Ok(true)
    }

    /// Whether transfers go on reading from the source of an engine's. A thread lets go of a region before it says that the
    /// transfer has ended, and may not run in between; and a callback is run at the next step of its engine.
    fn is_source_in_use(&mut self, at: usize) -> Result<bool, String> {
        let is_virtual = self.world.is_virtual();
        for _ in 0..if is_virtual { 2 } else { 1000 } {
            self.observe()?;
            let Some(source) = self.side(at).map(|side| &side.source) else { return Ok(false) };
            let reads = |flight: &Flight| source.is_read_by(flight.number);
            let is_asked = |flight: &Flight| matches!(flight.handle, Handle::Polled(_));
            if !source.in_use() {
                return Ok(false);
            }
            if is_virtual && self.flights.iter().any(|flight| is_asked(flight) && reads(flight)) {
                return Ok(true);
            }
            self.pass(Duration::from_millis(1))?;
        }
        Ok(true)
    }

    fn close_source(&mut self, n: &mut Numbers) -> Result<bool, String> {
        let Some(at) = self.alive(n) else { return Ok(false) };
        // Whatever has ended is known to have.
        self.pass(Duration::ZERO)?;
        let fails = self.registrations_fail();
        let Some(side) = self.side_mut(at) else { return Ok(false) };
        let (engine, in_use) = (side.engine.clone(), side.source.in_use());
        if let Some(region) = side.source.region.take() {
            let left = match region.close(Duration::ZERO) {
                Ok(()) if in_use && self.is_source_in_use(at)? => {
                    return Err("a region that transfers read from was closed".into());
                }
                Ok(()) => None,
                Err(CloseError::InUse { region }) if in_use => Some(region),
                Err(CloseError::StillWriting { region, .. }) => Some(region),
                Err(error) => return Err(format!("a source that nobody reads: {error}")),
            };
            if let Some(side) = self.side_mut(at) {
                side.source.region = left;
            }
        }
        let Some(side) = self.side_mut(at) else { return Ok(false) };
        let opened = side.source.open(&engine);
        if let (Err(error), false) = (opened, fails) {
            return Err(format!("a source could not be registered again: {error}"));
        }
        self.say(|| format!("engine {at} closes its source, in use: {in_use}"));
        Ok(true)
    }

    /// A fresh batch fills every place of an engine's, and all of it is done.
    pub(super) fn fill(&mut self, from: usize, to: usize) -> Check {
        let Some(known) = self.side(from).and_then(|side| side.known(to)) else { return Ok(()) };
        let Some(count) = self.count(to, 0, 1) else { return Ok(()) };
        let capacity = usize::from(self.config.transfers);
        let Some(engine) = self.side(from).map(|side| side.engine.clone()) else { return Ok(()) };
        let mut batch = Vec::new();
        let refused = loop {
            match engine.submit_imm(known.id, count.tag, 1) {
                Ok(transfer) => batch.push(transfer),
                Err(error) => break error,
            }
            if batch.len() > capacity {
                return Err(format!("engine {from} took more than {capacity} transfers"));
            }
        };
        // One may be kept for the next small write.
        if !matches!(refused, SubmitError::Full { .. }) || batch.len() + 1 < capacity {
            return Err(format!(
                "engine {from} has {capacity} places, none in use, and took {}: {refused}",
                batch.len()
            ));
        }
        let Some(serial) = self.side(from).map(|side| side.serial) else { return Ok(()) };
        if let Some(part) = self.part(from, to, None, None) {
            let sender = (serial, known.id);
            self.ledger.submit(part.serial, count.tag, sender, batch.len() as u64);
        }
        let until = self.world.now() + self.config.patience();
        let under_way = || batch.iter().filter(|transfer| transfer.poll_end().is_none()).count();
        while under_way() > 0 {
            let more = self.world.step(until);
            self.totals.events += u64::from(more);
            if !more && under_way() > 0 {
                let left = under_way();
                return Err(format!("{left} of a last {} transfers have not ended", batch.len()));
            }
        }
        match batch.iter().filter_map(Transfer::poll_end).find(|end| *end != End::Done) {
            None => Ok(()),
            Some(end) => Err(format!("a last transfer {from} -> {to} ended as {end:?}")),
        }
    }
}

/// What puts the fault right, or makes it again.
const fn opposite(fault: Fault) -> Fault {
    match fault {
        Fault::Nic { engine, nic, lost } => Fault::Nic { engine, nic, lost: !lost },
        Fault::Path { engine, to, peer, nic, remote_nic, cut } => {
            Fault::Path { engine, to, peer, nic, remote_nic, cut: !cut }
        }
        Fault::Registration { fails } => Fault::Registration { fails: !fails },
    }
}

fn watch(transfer: Transfer, numbers: &mut Numbers) -> Handle {
    if numbers.percent(80) {
        return Handle::Polled(transfer);
    }
    let ends = Left::default();
    let left = Arc::clone(&ends);
    transfer.on_done(move |end| lock(&left).push(end));
    Handle::Callback(ends)
}

fn shuffle<T>(things: &mut [T], numbers: &mut Numbers) {
    for last in (1..things.len()).rev() {
        things.swap(last, numbers.index(last + 1));
    }
}

fn indices(pages: &[u64]) -> PageIndices {
    let narrow = pages.iter().map(|&page| u32::try_from(page).unwrap_or(u32::MAX));
    narrow.collect::<Vec<u32>>().into()
}
