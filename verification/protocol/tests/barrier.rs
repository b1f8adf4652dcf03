//! The barrier: each engine tells every other that it has come, and goes on when it has heard from all.
//!
//! What is shipped here: each engine's `DomainGroup` plans and posts its barriers, and its counter table and
//! tallies count what arrives. The network delivers immediates in any order, and an engine may crash at any
//! point. An engine that waits for the others waits on a counter; round after round takes turns on two of
//! them ([`Tags::TwoInTurn`]): nobody is more than a round ahead, so two keep the rounds apart.
//!
//! A time-out may come at any time, and so whom it would name is looked at in every state.

use immwire_core::group::{
    End, Event, Options, SubmitError, TransferError, WorkError, WorkRequest,
};
use immwire_core::id::{EngineId, PeerId, Time, TransferId};
use immwire_core::imm::{Added, Armed, ImmTag, WRITE_UNITS};
use immwire_core::peer::DownReason;
use immwire_core::plan::{Barrier as BarrierRequest, Request};
use immwire_verification_protocol::counter::Counters;
use immwire_verification_protocol::fixture::{self, Group, PATIENT, Sizes, Targets};
use immwire_verification_protocol::{Claim, Kept, explore, full, must_break};
use stateright::{Model, Property};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tags {
    /// Odd rounds count on one counter, even ones on the other.
    TwoInTurn,
    /// All rounds count on one.
    One,
}

#[derive(Debug, Clone)]
struct Barrier {
    engines: usize,
    rounds: u8,
    tags: Tags,
    crashes: u8,
    /// How many of the others an engine waits for; all of them, if it is right.
    waits_for: usize,
    /// Pieces in flight on an engine's NIC.
    depth: u16,
    /// Whether an engine posts all pieces, and waits, as it enters: fewer states, and fewer stories.
    at_once: bool,
    /// Barriers that may be under way in an engine: with 2 it enters a round before the last one's barrier
    /// has ended.
    room: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    /// Between rounds.
    Outside,
    /// Has told the others, and does not wait yet.
    Entered,
    Waiting,
    /// Cannot enter the next round, and knows who is to blame.
    Refused(usize),
    Dead,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Engine {
    group: Kept<Group>,
    counters: Kept<Counters>,
    /// By number; none for itself.
    peers: Vec<Option<PeerId>>,
    phase: Phase,
    /// The round that it entered last.
    round: u8,
    /// By number and round, which immediates have landed here: what the model knows.
    heard: Vec<Vec<bool>>,
    /// Units of each counter that belong to rounds that are over, for each of the others.
    baseline: Vec<u64>,
    /// Its barriers that have not ended, and their rounds.
    under_way: Vec<(TransferId, u8)>,
    /// Whom the end of a barrier blamed.
    blamed: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Flight {
    from: usize,
    to: usize,
    round: u8,
    work: WorkRequest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Broken {
    LeftEarly,
    LeftUnheard,
    NotCounted,
    WrongEnd,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    engines: Vec<Engine>,
    /// Sorted.
    flights: Vec<Flight>,
    crashes: u8,
    broken: Option<Broken>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Enter(usize),
    Post(usize),
    Wait(usize),
    /// A piece lands, and completes.
    Deliver(usize),
    /// A piece of a dead engine, or to one, is lost.
    Lose(usize),
    Crash(usize),
    /// An engine learns that another is gone.
    Notice(usize, usize),
}

fn id(engine: usize) -> EngineId {
    EngineId(engine as u64 + 1)
}

impl Barrier {
    fn slot(&self, round: u8) -> u16 {
        match self.tags {
            Tags::TwoInTurn => u16::from(round % 2),
            Tags::One => 0,
        }
    }

    fn tag(&self, round: u8) -> ImmTag {
        ImmTag::new(self.slot(round), 0).unwrap_or_else(|| unreachable!("two slots"))
    }

    fn others(&self, me: usize) -> impl Iterator<Item = usize> {
        (0..self.engines).filter(move |other| *other != me)
    }

    fn enter(&self, state: &mut State, me: usize) {
        let tag = self.tag(state.engines[me].round + 1);
        let engine = &mut state.engines[me];
        let peers: Vec<PeerId> = engine.peers.iter().copied().flatten().collect();
        let request = Request::Barrier(BarrierRequest { targets: Targets::Peers(peers), imm: tag });
        let options = Options { deadline: Time::NEVER, user: u64::from(engine.round + 1) };
        let submitted = request.check().map(|request| {
            engine.group.change(|it| it.submit(request, options).map_err(|refused| refused.error))
        });
        match submitted {
            Ok(Ok(id)) => {
                engine.round += 1;
                engine.under_way.push((id, engine.round));
                engine.phase = Phase::Entered;
            }
            Ok(Err(SubmitError::PeerDown { peer, .. } | SubmitError::NoSuchPeer { peer })) => {
                match engine.number_of(peer) {
                    Some(number) => engine.phase = Phase::Refused(number),
                    None => state.broken = Some(Broken::WrongEnd),
                }
            }
            _ => state.broken = Some(Broken::WrongEnd),
        }
    }

    /// Whether there was a piece to post.
    fn post(&self, state: &mut State, me: usize) -> bool {
        let engine = &mut state.engines[me];
        let Some(work) = engine.group.change(|group| group.poll_work(0)) else { return false };
        let whose = engine.under_way.iter().find(|(id, _)| *id == work.token.transfer());
        match (engine.number_of(work.peer), whose) {
            (Some(to), Some(&(_, round))) => {
                state.flights.push(Flight { from: me, to, round, work })
            }
            _ => state.broken = Some(Broken::WrongEnd),
        }
        true
    }

    fn wait(&self, state: &mut State, me: usize) {
        let writes = self.waits_for as u64;
        let engine = &mut state.engines[me];
        let tag = self.tag(engine.round);
        match engine.counters.change(|counters| counters.arm(tag, writes)) {
            Ok(Armed::Ready) => self.leave(state, me),
            Ok(Armed::Waiting { .. }) => engine.phase = Phase::Waiting,
            Err(_) => state.broken = Some(Broken::NotCounted),
        }
    }

    fn leave(&self, state: &mut State, me: usize) {
        let round = state.engines[me].round;
        let all_entered = state.engines.iter().all(|other| other.round >= round);
        let engine = &mut state.engines[me];
        let heard = |other: usize| engine.heard[other][usize::from(round)];
        if !all_entered {
            state.broken = Some(Broken::LeftEarly);
        } else if !self.others(me).all(heard) && self.tags == Tags::TwoInTurn {
            state.broken = Some(Broken::LeftUnheard);
        }
        engine.phase = Phase::Outside;
        engine.baseline[usize::from(self.slot(round))] += u64::from(WRITE_UNITS);
    }

    /// The immediate is counted, and the sender told, as far as they live.
    fn deliver(&self, state: &mut State, at: usize) {
        let flight = state.flights.remove(at);
        let Flight { from, to, round, work } = flight;
        let engine = &mut state.engines[to];
        if let (Some(imm), true) = (work.imm, engine.phase != Phase::Dead) {
            engine.heard[from][usize::from(round)] = true;
            let peer = u16::try_from(from).unwrap_or(u16::MAX);
            let waits = engine.phase == Phase::Waiting;
            match engine.counters.change(|counters| counters.add(imm, peer)) {
                Added::Counted => {}
                Added::Fired if waits => self.leave(state, to),
                _ => state.broken = Some(Broken::NotCounted),
            }
        }
        self.report(state, &flight, Ok(()));
    }

    fn report(&self, state: &mut State, flight: &Flight, outcome: Result<(), WorkError>) {
        let Flight { from, work, .. } = flight;
        let engine = &mut state.engines[*from];
        if engine.phase == Phase::Dead {
            return;
        }
        let done = |it: &mut Group| it.handle_completion(Time::ZERO, work.nic, work.token, outcome);
        if !engine.group.change(done) {
            state.broken = Some(Broken::WrongEnd);
        }
        self.events(state, *from);
    }

    fn events(&self, state: &mut State, me: usize) {
        let engine = &mut state.engines[me];
        while let Some(event) = engine.group.change(Group::poll_event) {
            let Event::Ended { id, end, .. } = event else { continue };
            engine.under_way.retain(|(known, _)| *known != id);
            match end {
                End::Done => {}
                End::NeverStarted { error } | End::Quiesced { error } => match error {
                    TransferError::PeerDown { peer, .. } | TransferError::Piece { peer, .. } => {
                        engine.blamed = engine.number_of(peer);
                    }
                    _ => state.broken = Some(Broken::WrongEnd),
                },
            }
        }
    }

    /// Whom a time-out would name: whoever the tallies say has not sent this round's immediate.
    fn named(&self, engine: &Engine, me: usize) -> Vec<usize> {
        let slot = self.slot(engine.round);
        let baseline = engine.baseline[usize::from(slot)];
        let silent = |other: &usize| {
            let units = engine.counters.tally(slot, u16::try_from(*other).unwrap_or(u16::MAX));
            units < baseline + u64::from(WRITE_UNITS)
        };
        self.others(me).filter(silent).collect()
    }

    fn own_steps(&self, state: &State, steps: &mut Vec<Step>) {
        for (me, engine) in state.engines.iter().enumerate() {
            match engine.phase {
                Phase::Dead => continue,
                Phase::Outside
                    if engine.round < self.rounds && engine.group.active() < self.room =>
                {
                    steps.push(Step::Enter(me));
                }
                Phase::Entered => steps.push(Step::Wait(me)),
                Phase::Outside | Phase::Waiting | Phase::Refused(_) => {}
            }
            if engine.group.has_work(0) {
                steps.push(Step::Post(me));
            }
            for other in self.others(me) {
                let known = engine.peers[other].and_then(|peer| engine.group.peer_state(peer));
                let known =
                    known.is_some_and(|it| !matches!(it, immwire_core::peer::PeerState::Down(_)));
                if state.engines[other].phase == Phase::Dead && known {
                    steps.push(Step::Notice(me, other));
                }
            }
        }
        for (at, flight) in state.flights.iter().enumerate() {
            let dead = |engine: usize| state.engines[engine].phase == Phase::Dead;
            if !dead(flight.to) {
                steps.push(Step::Deliver(at));
            }
            if dead(flight.from) || dead(flight.to) {
                steps.push(Step::Lose(at));
            }
        }
    }

    fn is_quiet(&self, state: &State) -> bool {
        let mut steps = Vec::new();
        self.own_steps(state, &mut steps);
        steps.iter().all(|step| match *step {
            Step::Post(me) => Group::clone(&state.engines[me].group).poll_work(0).is_none(),
            _ => false,
        })
    }

    /// At rest: whoever is named is dead, or has itself been told who is, or waits in an earlier round.
    fn blame_leads_to_the_dead(&self, state: &State) -> bool {
        let dead = |number: usize| state.engines[number].phase == Phase::Dead;
        state.engines.iter().enumerate().all(|(me, engine)| match engine.phase {
            Phase::Dead => true,
            Phase::Outside => engine.round == self.rounds,
            Phase::Entered => false,
            Phase::Refused(number) => dead(number),
            Phase::Waiting => {
                let named = self.named(engine, me);
                let accounted = |number: usize| {
                    let other = &state.engines[number];
                    dead(number)
                        || matches!(other.phase, Phase::Refused(_))
                        || other.blamed.is_some_and(dead)
                        || other.phase == Phase::Waiting && other.round < engine.round
                };
                !named.is_empty() && named.into_iter().all(accounted)
            }
        })
    }
}

impl Engine {
    fn number_of(&self, peer: PeerId) -> Option<usize> {
        self.peers.iter().position(|known| *known == Some(peer))
    }
}

impl Model for Barrier {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let sizes = Sizes {
            nics: 1,
            queue_depth: self.depth,
            peer_depth: self.depth,
            reserve: 0,
            transfers: self.room,
            peers: self.engines - 1,
        };
        let engine = |me: usize| {
            let mut group = fixture::group(sizes, PATIENT);
            let mut peers = vec![None; self.engines];
            for other in self.others(me) {
                peers[other] = fixture::accept(&mut group, Time::ZERO, id(other), 1).ok();
            }
            while group.poll_event().is_some() {}
            let engines = u16::try_from(self.engines).unwrap_or(u16::MAX);
            Engine {
                group: Kept::new(group),
                counters: Kept::new(Counters::new(2, engines)),
                peers,
                phase: Phase::Outside,
                round: 0,
                heard: vec![vec![false; usize::from(self.rounds) + 1]; self.engines],
                baseline: vec![0; 2],
                under_way: Vec::new(),
                blamed: None,
            }
        };
        let engines = (0..self.engines).map(engine).collect();
        vec![State { engines, flights: Vec::new(), crashes: self.crashes, broken: None }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.broken.is_none() {
            self.own_steps(state, steps);
            if state.crashes > 0 {
                steps.extend((0..self.engines).map(Step::Crash));
            }
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        match step {
            Step::Enter(me) => {
                self.enter(&mut next, me);
                if self.at_once && next.engines[me].phase == Phase::Entered {
                    while self.post(&mut next, me) {}
                    self.wait(&mut next, me);
                }
            }
            Step::Wait(me) => self.wait(&mut next, me),
            Step::Post(me) => {
                if !self.post(&mut next, me) && next.engines[me].group == state.engines[me].group {
                    return None;
                }
            }
            Step::Deliver(at) => self.deliver(&mut next, at),
            Step::Lose(at) => {
                let flight = next.flights.remove(at);
                self.report(&mut next, &flight, Err(WorkError::PeerGone));
            }
            Step::Crash(me) => {
                if next.engines[me].phase == Phase::Dead {
                    return None;
                }
                next.crashes -= 1;
                next.engines[me].phase = Phase::Dead;
            }
            Step::Notice(me, other) => {
                let engine = &mut next.engines[me];
                let peer = engine.peers[other]?;
                let reason = DownReason::Disconnected;
                engine.group.change(|it| it.handle_disconnected(Time::ZERO, peer, reason));
                self.events(&mut next, me);
            }
        }
        next.flights.sort_by_key(|it| (it.from, it.to, it.round));
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "nobody leaves a round before all have entered it",
                |_, state: &State| state.broken != Some(Broken::LeftEarly),
            ),
            Property::always(
                "whoever leaves a round has heard all others in it",
                |_, state: &State| state.broken != Some(Broken::LeftUnheard),
            ),
            Property::always(
                "what arrives is counted, and fires for whoever waits",
                |_, state: &State| state.broken != Some(Broken::NotCounted),
            ),
            Property::always("an end names who is to blame", |_, state: &State| {
                state.broken != Some(Broken::WrongEnd)
            }),
            Property::always(
                "a time-out names who has not been heard",
                |model: &Self, state: &State| {
                    let right = |(me, engine): (usize, &Engine)| {
                        let unheard =
                            |other: &usize| !engine.heard[*other][usize::from(engine.round)];
                        let unheard: Vec<usize> = model.others(me).filter(unheard).collect();
                        engine.phase != Phase::Waiting || model.named(engine, me) == unheard
                    };
                    model.tags == Tags::One || state.engines.iter().enumerate().all(right)
                },
            ),
            Property::always("at rest every barrier has ended", |model: &Self, state: &State| {
                let over = |it: &Engine| it.phase == Phase::Dead || it.group.active() == 0;
                state.broken.is_some() || state.engines.iter().all(over) || !model.is_quiet(state)
            }),
            Property::always(
                "without a crash all leave the last round",
                |model: &Self, state: &State| {
                    let over = |engine: &Engine| {
                        engine.phase == Phase::Outside && engine.round == model.rounds
                    };
                    state.broken.is_some()
                        || state.crashes < model.crashes
                        || state.engines.iter().all(over)
                        || !model.is_quiet(state)
                },
            ),
            Property::always(
                "after a crash the blame leads to the dead",
                |model: &Self, state: &State| {
                    state.broken.is_some()
                        || state.crashes == model.crashes
                        || !model.is_quiet(state)
                        || model.blame_leads_to_the_dead(state)
                },
            ),
            Property::sometimes("all leave the last round", |model: &Self, state: &State| {
                let over = |engine: &Engine| {
                    engine.phase == Phase::Outside && engine.round == model.rounds
                };
                state.engines.iter().all(over)
            }),
        ]
    }
}

fn barrier(engines: usize, rounds: u8, crashes: u8) -> Barrier {
    let depth = u16::try_from(engines).unwrap_or(u16::MAX);
    let (tags, waits_for, at_once, room) = (Tags::TwoInTurn, engines - 1, false, 1);
    Barrier { engines, rounds, tags, crashes, waits_for, depth, at_once, room }
}

fn check(claim: &'static str, model: Barrier, at_least: usize) {
    let Barrier { engines, rounds, crashes, depth, .. } = model;
    let bound = format!(
        "{engines} engines, {rounds} rounds, {crashes} crashes, {depth} pieces in flight and {} barriers under way each{}",
        model.room,
        if model.at_once { ", posted at once" } else { "" }
    );
    explore(Claim { clause: "2 Counting", claim, bound, at_least }, model);
}

const CLAIM: &str = "nobody leaves a barrier's round before all have entered it";

#[test]
fn two_engines() {
    check(CLAIM, Barrier { room: 2, ..barrier(2, 3, 1) }, 6_227);
}

#[test]
fn three_engines() {
    check(CLAIM, barrier(3, 3, 0), 13_343);
    if full() {
        check(CLAIM, Barrier { room: 2, ..barrier(3, 2, 0) }, 19_831);
    }
}

#[test]
fn four_engines() {
    let (rounds, at_least) = if full() { (3, 26_017) } else { (1, 6_561) };
    check(CLAIM, Barrier { at_once: true, ..barrier(4, rounds, 0) }, at_least);
}

#[test]
fn one_of_three_crashes() {
    let claim = "a time-out in a barrier names exactly those that were not heard";
    if full() {
        check(claim, barrier(3, 1, 1), 264_772);
    } else {
        check(claim, Barrier { at_once: true, ..barrier(3, 1, 1) }, 14_864);
    }
}

#[test]
fn one_of_three_crashes_while_pieces_wait_for_credit() {
    let (rounds, at_least) = if full() { (2, 144_012) } else { (1, 46_038) };
    let claim = "in a barrier whose pieces wait for credit, blame leads to the crashed";
    check(claim, Barrier { depth: 1, ..barrier(3, rounds, 1) }, at_least);
}

/// One counter for all rounds still holds the rounds apart, but not the immediates: a time-out on it could
/// not say whose is missing, nor a payload be trusted.
#[test]
fn one_counter_for_all_rounds_keeps_the_rounds_apart() {
    let claim = "one counter for all rounds of a barrier lets nobody leave early";
    check(claim, Barrier { tags: Tags::One, ..barrier(3, 2, 0) }, 9_591);
}

#[test]
fn waiting_for_too_few_is_seen() {
    let model = Barrier { waits_for: 1, ..barrier(3, 1, 0) };
    must_break(model, "nobody leaves a round before all have entered it");
}
