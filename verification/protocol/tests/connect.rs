//! Connect and reconnect: two engines that call each other, over connections that break at any point.
//!
//! What is shipped here: both `DomainGroup`s with their `Peer` machines, and `Calls`, which judges each call.
//! What the engine's driver and its provider do between them and the network is written out below, in
//! [`Engine::incoming`] and [`State`]'s steps: it follows `platform-linux/src/driver.rs` (`connect`,
//! `incoming`, `crossed`, `answer`) and the provider's contract, and must be kept like them.
//!
//! A connection carries its messages in order; what goes over different connections arrives in any order
//! ([`Network::Unordered`]), or, between two processes of a host at their best, in the order in which it was
//! sent ([`Network::InOrder`]). Each end learns by itself, and at any time later, that it was lost.

use std::time::Duration;

use immwire_core::calls::{CallSlot, Calls, Taken};
use immwire_core::group::Event;
use immwire_core::id::{EngineId, PeerId, Time};
use immwire_core::peer::{DownReason, LivenessConfig, PeerState};
use immwire_core::wire::Refusal;
use immwire_verification_protocol::fixture::{self, Group, PATIENT, Sizes};
use immwire_verification_protocol::{Claim, Kept, explore, full, must_break};
use stateright::{Model, Property};

const SIZES: Sizes =
    Sizes { nics: 1, queue_depth: 2, peer_depth: 2, reserve: 0, transfers: 1, peers: 2 };
const DEADLINE: Duration = Duration::from_nanos(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Network {
    Unordered,
    InOrder,
}

/// How a call is answered by who is connected to the caller already, or is calling it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// As the driver does.
    Shipped,
    /// Both sides keep their own call.
    KeepMine,
    /// Calls are taken without a look at who is there.
    TakeAll,
}

/// How often what may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Left {
    /// Calls by each side.
    calls: [u8; 2],
    /// Of what follows, in all; and of each kind:
    faults: u8,
    breaks: u8,
    refusals: u8,
    removals: u8,
    restarts: u8,
}

#[derive(Debug, Clone)]
struct Connect {
    network: Network,
    rule: Rule,
    liveness: LivenessConfig,
    left: Left,
    /// Engines whose calls are remembered; by the driver more than there can be peers.
    remembered: usize,
}

/// A connection's number: its place among those that are there, by age.
type Wire = u8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    Hello {
        from: u64,
        to: u64,
        number: u64,
    },
    /// All calls of the side that accepts up to this number are given up.
    Accept {
        number: u64,
    },
    Refuse(Why),
    /// The other end is closed, or the connection was lost: nothing follows.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Why {
    Crossed,
    Busy,
    Malformed,
    Stale,
}

impl Why {
    const fn of(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Crossed => Self::Crossed,
            Refusal::Busy => Self::Busy,
            Refusal::Stale => Self::Stale,
            _ => Self::Malformed,
        }
    }

    const fn refusal(self) -> Refusal {
        match self {
            Self::Crossed => Refusal::Crossed,
            Self::Busy => Refusal::Busy,
            Self::Malformed => Refusal::Malformed,
            Self::Stale => Refusal::Stale,
        }
    }
}

/// What a provider has for one peer slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Link {
    Vacant,
    Calling(PeerId, Wire),
    Up(PeerId, Wire),
}

/// What was told of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Told {
    peer: PeerId,
    down: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Engine {
    id: EngineId,
    group: Kept<Group>,
    now: Time,
    links: [Link; 2],
    /// Calls made so far.
    called: u64,
    /// Whose calls count no more.
    calls: Calls<Vec<CallSlot>>,
    told: Vec<Told>,
    /// Something was told of a peer that was down.
    spoke_of_the_dead: bool,
    /// A timeout was handled, and is due all the same.
    spins: bool,
    /// A call takes longer than its deadline allows.
    lasts: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Wiring {
    wire: Wire,
    caller: usize,
    /// Which ends are open.
    open: [bool; 2],
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    sides: [Engine; 2],
    wires: Vec<Wiring>,
    /// What is under way to each side.
    queues: [Vec<(Wire, Message)>; 2],
    left: Left,
    /// A connection was replaced that its other side had not lost.
    killed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Call(usize),
    /// The next message of a connection arrives at a side.
    Deliver(usize, Wire),
    /// The same, and the side has no room for whoever calls.
    DeliverToBusy(usize, Wire),
    /// The connection is lost, with all that is under way on it.
    Break(Wire),
    Tick(usize),
    Remove(usize),
    /// The engine dies, and another starts in its place.
    Restart(usize),
}

fn spend(all: &mut u8, one: &mut u8) {
    (*all, *one) = (*all - 1, *one - 1);
}

impl Engine {
    fn new(id: u64, liveness: LivenessConfig, remembered: usize) -> Self {
        Self {
            id: EngineId(id),
            group: Kept::new(fixture::group(SIZES, liveness)),
            now: Time::ZERO,
            links: [Link::Vacant; 2],
            called: 0,
            calls: Calls::new(vec![CallSlot::VACANT; remembered]),
            told: Vec::new(),
            spoke_of_the_dead: false,
            spins: false,
            lasts: false,
        }
    }

    /// The peer that is, or is becoming, this engine.
    fn live_peer(&self, engine: EngineId) -> Option<PeerId> {
        live_peer(&self.group, engine)
    }

    fn up(&self) -> impl Iterator<Item = (PeerId, Wire)> {
        self.links.iter().filter_map(|link| match link {
            Link::Up(peer, wire) => Some((*peer, *wire)),
            Link::Vacant | Link::Calling(..) => None,
        })
    }

    fn down(&mut self, peer: PeerId, reason: DownReason) {
        let now = self.now;
        self.group.change(|group| group.handle_disconnected(now, peer, reason));
    }

    /// Who calls becomes which peer, if any.
    fn incoming(
        &mut self,
        (from, to): (EngineId, EngineId),
        number: u64,
        rule: Rule,
    ) -> Result<PeerId, Why> {
        if to != self.id {
            return Err(Why::Malformed);
        }
        let now = self.now;
        let live = self.live_peer(from).filter(|_| rule != Rule::TakeAll);
        let state = live.and_then(|peer| self.group.peer_state(peer));
        match (self.calls.judge(self.id, from, number, state).map_err(Why::of)?, live) {
            (Taken::Crossed, Some(_)) if rule == Rule::KeepMine => return Err(Why::Crossed),
            (Taken::Crossed, Some(peer)) => {
                self.answered(peer, from, number);
                return Ok(peer);
            }
            (Taken::Replaces, Some(peer)) => {
                self.group.change(|group| group.remove_peer(now, peer, DownReason::Replaced));
            }
            (Taken::New | Taken::Crossed | Taken::Replaces, _) => {}
        }
        let peer = self.group.change(|group| fixture::add(group, now, from, 1));
        let peer = peer.map_err(|_| Why::Busy)?;
        self.told.push(Told { peer, down: false });
        self.answered(peer, from, number);
        Ok(peer)
    }

    /// The peer has called, or answered, and made so many calls.
    fn answered(&mut self, peer: PeerId, engine: EngineId, number: u64) {
        let now = self.now;
        let group = &self.group;
        self.calls.note(engine, number, |engine| live_peer(group, engine).is_some());
        self.group.change(|group| fixture::connected(group, now, peer, engine, 1));
    }
}

fn live_peer(group: &Group, engine: EngineId) -> Option<PeerId> {
    let mut peers = group.peers();
    let live =
        peers.find(|(_, other, state)| *other == engine && !matches!(state, PeerState::Down(_)));
    live.map(|(peer, ..)| peer)
}

impl State {
    fn wiring(&mut self, wire: Wire) -> &mut Wiring {
        let known = self.wires.iter_mut().find(|known| known.wire == wire);
        known.unwrap_or_else(|| unreachable!("a connection that has an open end or a message"))
    }

    fn send(&mut self, to: usize, wire: Wire, message: Message) {
        // Whoever writes to a closed end learns so from the `Closed` that is on its way.
        if self.wiring(wire).open[to] {
            self.queues[to].push((wire, message));
        }
    }

    /// `side` closes its end: it reads nothing more; the other end is told.
    fn close(&mut self, side: usize, wire: Wire) {
        if std::mem::take(&mut self.wiring(wire).open[side]) {
            self.queues[side].retain(|(other, _)| *other != wire);
            self.send(1 - side, wire, Message::Closed);
        }
    }

    /// Ends a call of ours without a report.
    fn hang_up(&mut self, side: usize, index: u16) {
        let link = &mut self.sides[side].links[usize::from(index)];
        if let Link::Calling(_, wire) = *link {
            *link = Link::Vacant;
            self.close(side, wire);
        }
    }

    fn call(&mut self, side: usize) -> Option<()> {
        let to = self.sides[1 - side].id;
        let engine = &mut self.sides[side];
        if engine.live_peer(to).is_some() {
            return None;
        }
        let now = engine.now;
        let wire = self.wires.last().map_or(0, |youngest| youngest.wire + 1);
        let peer = engine.group.change(|group| fixture::add(group, now, to, 1)).ok()?;
        engine.told.push(Told { peer, down: false });
        engine.links[usize::from(peer.index)] = Link::Calling(peer, wire);
        engine.called += 1;
        let (from, number) = (engine.id.0, engine.called);
        self.wires.push(Wiring { wire, caller: side, open: [true; 2] });
        self.send(1 - side, wire, Message::Hello { from, to: to.0, number });
        Some(())
    }

    fn deliver(&mut self, side: usize, wire: Wire, busy: bool, rule: Rule) -> Option<()> {
        let at = self.queues[side].iter().position(|(other, _)| *other == wire)?;
        let (_, message) = self.queues[side].remove(at);
        let link = self.sides[side].links.into_iter().find(
            |link| matches!(link, Link::Calling(_, other) | Link::Up(_, other) if *other == wire),
        );
        match (message, link) {
            (Message::Hello { from, to, number }, None) => {
                let who = (EngineId(from), EngineId(to));
                self.admit(side, wire, who, number, if busy { None } else { Some(rule) });
            }
            (Message::Accept { number }, Some(Link::Calling(peer, _))) => {
                let engine = self.sides[1 - side].id;
                let side = &mut self.sides[side];
                side.links[usize::from(peer.index)] = Link::Up(peer, wire);
                side.answered(peer, engine, number);
            }
            (Message::Refuse(why), Some(Link::Calling(peer, _))) => {
                self.hang_up(side, peer.index);
                // The peer keeps its own call to us, which is answered, or has been already.
                if why != Why::Crossed {
                    self.sides[side].down(peer, DownReason::Refused(why.refusal()));
                }
            }
            (Message::Closed, Some(Link::Calling(peer, _) | Link::Up(peer, _))) => {
                self.sides[side].links[usize::from(peer.index)] = Link::Vacant;
                self.close(side, wire);
                self.sides[side].down(peer, DownReason::Disconnected);
            }
            (Message::Closed, _) => self.close(side, wire),
            (Message::Hello { .. } | Message::Accept { .. } | Message::Refuse(_), _) => {
                return None;
            }
        }
        Some(())
    }

    /// Answers a call; by no rule if there is no room.
    fn admit(
        &mut self,
        side: usize,
        wire: Wire,
        who: (EngineId, EngineId),
        number: u64,
        rule: Option<Rule>,
    ) {
        let stands = |state: &Self, wire| state.sides[1 - side].up().any(|(_, up)| up == wire);
        let before: Vec<(PeerId, Wire)> = self.sides[side].up().collect();
        let incoming = match rule {
            None => Err(Why::Busy),
            Some(rule) => self.sides[side].incoming(who, number, rule),
        };
        // Who was up, and is not any more, was replaced.
        let group = &self.sides[side].group;
        let gone = |peer| group.peer_state(peer) != Some(PeerState::Up);
        self.killed |= before.into_iter().any(|(peer, wire)| gone(peer) && stands(self, wire));
        match incoming {
            Ok(peer) => {
                // A call of our own to the same peer has crossed with this one, and is given up for it.
                self.hang_up(side, peer.index);
                let engine = &mut self.sides[side];
                engine.links[usize::from(peer.index)] = Link::Up(peer, wire);
                let number = engine.called;
                self.send(1 - side, wire, Message::Accept { number });
            }
            Err(why) => {
                self.send(1 - side, wire, Message::Refuse(why));
                self.close(side, wire);
            }
        }
    }

    /// What the groups have to tell is done, and noted.
    fn events(&mut self, before: &Self) {
        for side in 0..2 {
            if self.sides[side].group.is(&before.sides[side].group) {
                continue;
            }
            while let Some(event) = self.sides[side].group.change(Group::poll_event) {
                let peer = match event {
                    Event::Disconnect { peer } => {
                        self.disconnect(side, peer);
                        peer
                    }
                    Event::Peer { peer, .. }
                    | Event::Abort { peer }
                    | Event::Heartbeat { peer }
                    | Event::Fence { peer, .. }
                    | Event::Settle { peer, .. } => peer,
                    Event::Ended { .. } => continue,
                };
                let down = matches!(event, Event::Peer { state: PeerState::Down(_), .. });
                let engine = &mut self.sides[side];
                match engine.told.iter_mut().find(|told| told.peer == peer) {
                    Some(told) if !told.down => told.down = down,
                    _ => engine.spoke_of_the_dead = true,
                }
            }
        }
    }

    /// Gives what behaves alike the same name: connections are numbered anew, peers listed in order.
    fn rename(&mut self, network: Network) {
        self.wires.retain(|it| it.open != [false; 2]);
        let old: Vec<Wire> = self.wires.iter().map(|it| it.wire).collect();
        let new = |wire: &mut Wire| {
            let at = old.iter().position(|other| other == wire);
            *wire = at.and_then(|at| Wire::try_from(at).ok()).unwrap_or(Wire::MAX);
        };
        self.wires.iter_mut().for_each(|it| new(&mut it.wire));
        for queue in &mut self.queues {
            queue.iter_mut().for_each(|(wire, _)| new(wire));
            // Between connections there is no order to remember, but on a network that keeps it.
            if network == Network::Unordered {
                queue.sort_by_key(|(wire, _)| *wire);
            }
        }
        for side in &mut self.sides {
            for link in &mut side.links {
                if let Link::Calling(_, wire) | Link::Up(_, wire) = link {
                    new(wire);
                }
            }
            side.told.sort_by_key(|told| told.peer);
        }
    }

    fn disconnect(&mut self, side: usize, peer: PeerId) {
        let link = &mut self.sides[side].links[usize::from(peer.index)];
        match *link {
            Link::Up(other, wire) | Link::Calling(other, wire) if other == peer => {
                *link = Link::Vacant;
                self.close(side, wire);
            }
            _ => {}
        }
    }
}

impl Connect {
    /// What happens by itself.
    fn own_steps(&self, state: &State, steps: &mut Vec<Step>) {
        for side in 0..2 {
            let mut seen = Vec::new();
            for (wire, _) in &state.queues[side] {
                if !seen.contains(wire) && (self.network == Network::Unordered || seen.is_empty()) {
                    steps.push(Step::Deliver(side, *wire));
                }
                seen.push(*wire);
            }
            if state.sides[side].group.poll_timeout() != Time::NEVER {
                steps.push(Step::Tick(side));
            }
        }
    }
}

impl Model for Connect {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            sides: [1, 2].map(|id| self.engine(id)),
            wires: Vec::new(),
            queues: [Vec::new(), Vec::new()],
            left: self.left,
            killed: false,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        self.own_steps(state, steps);
        let left = &state.left;
        for side in 0..2 {
            let engine = &state.sides[side];
            let live = engine.live_peer(state.sides[1 - side].id).is_some();
            if left.calls[side] > 0 && !live {
                steps.push(Step::Call(side));
            }
            if left.faults.min(left.removals) > 0 && live {
                steps.push(Step::Remove(side));
            }
            if left.faults.min(left.restarts) > 0 {
                steps.push(Step::Restart(side));
            }
        }
        if left.faults.min(left.refusals) > 0 {
            let busy: Vec<Step> = steps
                .iter()
                .filter_map(|step| match *step {
                    Step::Deliver(side, wire) => {
                        let next = state.queues[side].iter().find(|(other, _)| *other == wire);
                        let called = matches!(next, Some((_, Message::Hello { .. })));
                        called.then_some(Step::DeliverToBusy(side, wire))
                    }
                    _ => None,
                })
                .collect();
            steps.extend(busy);
        }
        if left.faults.min(left.breaks) > 0 {
            steps.extend(state.wires.iter().map(|it| Step::Break(it.wire)));
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        match step {
            Step::Call(side) => {
                next.left.calls[side] -= 1;
                next.call(side)?;
            }
            Step::Deliver(side, wire) => next.deliver(side, wire, false, self.rule)?,
            Step::DeliverToBusy(side, wire) => {
                spend(&mut next.left.faults, &mut next.left.refusals);
                next.deliver(side, wire, true, self.rule)?;
            }
            Step::Break(wire) => {
                spend(&mut next.left.faults, &mut next.left.breaks);
                for side in 0..2 {
                    next.queues[side].retain(|(other, _)| *other != wire);
                    next.send(side, wire, Message::Closed);
                }
            }
            Step::Tick(side) => {
                let engine = &mut next.sides[side];
                engine.now = engine.now.max(engine.group.poll_timeout());
                let now = engine.now;
                engine.group.change(|group| group.handle_timeout(now));
                engine.spins |= engine.group.poll_timeout() <= now;
                // Each call may start, or arrive, when the one before was given up.
                let calls = self.left.calls.map(u32::from).iter().sum();
                engine.lasts |= now > Time::ZERO.after(DEADLINE.saturating_mul(calls));
            }
            Step::Remove(side) => {
                spend(&mut next.left.faults, &mut next.left.removals);
                let other = next.sides[1 - side].id;
                let engine = &mut next.sides[side];
                let (now, peer) = (engine.now, engine.live_peer(other)?);
                engine.group.change(|group| group.remove_peer(now, peer, DownReason::Removed));
            }
            Step::Restart(side) => {
                spend(&mut next.left.faults, &mut next.left.restarts);
                let id = next.sides[side].id.0 + 2;
                let wires: Vec<Wire> = next.wires.iter().map(|it| it.wire).collect();
                wires.into_iter().for_each(|wire| next.close(side, wire));
                next.sides[side] = self.engine(id);
            }
        }
        next.events(state);
        next.rename(self.network);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no engine is two live peers", |_, state: &State| {
                state.sides.iter().all(|side| {
                    let live = |engine: EngineId| {
                        let peers = side.group.peers();
                        let live = peers.filter(|(_, other, state)| {
                            *other == engine && !matches!(state, PeerState::Down(_))
                        });
                        live.count()
                    };
                    side.group.peers().all(|(_, engine, _)| live(engine) <= 1)
                })
            }),
            Property::always("down is final, and told once", |_, state: &State| {
                state.sides.iter().all(|side| !side.spoke_of_the_dead)
            }),
            Property::always("a connection that stands is not replaced", |_, state: &State| {
                !state.killed
            }),
            Property::always("a late word of an old peer changes nothing", |_, state: &State| {
                state.sides.iter().all(|side| {
                    side.told.iter().filter(|told| told.down).all(|told| {
                        let (peer, now) = (told.peer, side.now);
                        let mut group = Group::clone(&side.group);
                        fixture::connected(&mut group, now, peer, EngineId(1), 1);
                        group.handle_heard(now, peer, true);
                        group.handle_disconnected(now, peer, DownReason::Protocol);
                        group.remove_peer(now, peer, DownReason::Removed);
                        group == *side.group
                    })
                })
            }),
            Property::always("a timeout that was handled lies ahead", |_, state: &State| {
                state.sides.iter().all(|side| !side.spins)
            }),
            Property::always(
                "a call is answered, or given up, by its deadline",
                |_, state: &State| state.sides.iter().all(|side| !side.lasts),
            ),
            Property::always(
                "at rest both sides agree, on one connection or none",
                |model, state| !model.is_quiet(state) || agree(state),
            ),
            Property::always("at rest nobody is forgotten", |model: &Self, state: &State| {
                !model.is_quiet(state)
                    || state.sides.iter().all(|side| {
                        // Who is down and was told so has left its slot.
                        side.group.peers().count() == side.up().count()
                            && side.told.iter().filter(|told| !told.down).count()
                                == side.up().count()
                    })
            }),
            Property::always(
                "without a fault who calls is connected",
                |model: &Self, state: &State| {
                    let called = state.left.calls != model.left.calls;
                    let calm =
                        model.left.faults == 0 && model.liveness.connect_deadline == Duration::MAX;
                    !(calm && called && model.is_quiet(state))
                        || state.sides.iter().all(|side| side.up().count() == 1)
                },
            ),
            Property::sometimes("both call at once", |_, state: &State| {
                state
                    .sides
                    .iter()
                    .all(|side| side.links.iter().any(|link| matches!(link, Link::Calling(..))))
            }),
            Property::sometimes("both are up", |_, state: &State| {
                state.sides.iter().all(|side| side.up().count() == 1)
            }),
        ]
    }
}

impl Connect {
    fn engine(&self, id: u64) -> Engine {
        Engine::new(id, self.liveness, self.remembered)
    }

    fn is_quiet(&self, state: &State) -> bool {
        let mut steps = Vec::new();
        self.own_steps(state, &mut steps);
        steps.is_empty()
    }
}

/// Whether each side is up on the same connection as the other, or not at all; and nobody still calls.
fn agree(state: &State) -> bool {
    let [a, b] = &state.sides;
    let up = |side: &Engine| side.up().map(|(_, wire)| wire).collect::<Vec<_>>();
    let peers_up = |side: &Engine| {
        side.group
            .peers()
            .all(|(peer, _, at)| at == PeerState::Up && side.up().any(|(other, _)| other == peer))
    };
    let open: Vec<Wire> = state.wires.iter().map(|it| it.wire).collect();
    up(a) == up(b) && up(a).len() <= 1 && up(a) == open && peers_up(a) && peers_up(b)
}

const CALM: Left =
    Left { calls: [1, 1], faults: 0, breaks: 0, refusals: 0, removals: 0, restarts: 0 };
const BOTH_CALL: Connect = Connect {
    network: Network::Unordered,
    rule: Rule::Shipped,
    liveness: PATIENT,
    left: CALM,
    remembered: SIZES.peers,
};

/// So many faults of any kind, two of one kind at most; and calls that may have to be given up.
fn stormy(calls: [u8; 2], faults: u8) -> Connect {
    let liveness = LivenessConfig { connect_deadline: DEADLINE, ..PATIENT };
    let left = Left { calls, faults, breaks: 2, refusals: 1, removals: 1, restarts: 1 };
    Connect { liveness, left, ..BOTH_CALL }
}

fn claim(claim: &'static str, model: &Connect, at_least: usize) -> Claim {
    let Left { calls: [a, b], faults, .. } = model.left;
    let network = model.network;
    let bound = format!("2 engines, {network:?}, {a} and {b} calls, {faults} faults");
    Claim { clause: "6 Peers", claim, bound, at_least }
}

fn check(text: &'static str, model: Connect, at_least: usize) {
    explore(claim(text, &model, at_least), model);
}

#[test]
fn both_call_at_once_over_one_host() {
    let left = Left { calls: [2, 2], ..CALM };
    let model = Connect { network: Network::InOrder, left, ..BOTH_CALL };
    check("two engines that call each other at once are connected once", model, 15);
}

#[test]
fn connections_break_at_any_point() {
    let (calls, faults, at_least) = if full() { ([2, 2], 1, 277_283) } else { ([2, 1], 1, 27_501) };
    let claim = "two engines are connected on both sides or on neither, whatever is lost";
    check(claim, stormy(calls, faults), at_least);
}

/// If both keep their own call, each refuses the other's, and nobody is connected.
#[test]
fn both_sides_keeping_their_own_call_is_seen() {
    let model = Connect { rule: Rule::KeepMine, ..BOTH_CALL };
    must_break(model, "at rest both sides agree, on one connection or none");
}

#[test]
fn taking_every_call_is_seen() {
    let model = Connect { rule: Rule::TakeAll, ..BOTH_CALL };
    must_break(model, "no engine is two live peers");
}

// ---- calls that overtake each other
//
// A call from somebody it is connected to is for the driver the news that the connection was lost. Over a
// network a call that was given up may arrive after the connection that it was given up for: were it taken,
// that connection would be dropped for a dead one, and both sides would end down though nothing failed.

#[test]
fn a_call_given_up_that_arrives_late_changes_nothing() {
    let model = Connect { left: Left { calls: [2, 2], ..CALM }, ..BOTH_CALL };
    check("a call that was given up, and arrives late, replaces no connection", model, 18);
}

/// With one place for two peers, one that is connected is forgotten for another.
#[test]
fn remembering_fewer_engines_than_there_are_peers_is_seen() {
    let model = Connect { remembered: 1, ..stormy([2, 1], 1) };
    must_break(model, "a connection that stands is not replaced");
}
