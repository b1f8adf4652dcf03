//! A counter's slot, and the memory beside it, pass to the next tenant while writes of the last one fly.
//!
//! A receiver owns one counter and one buffer. It asks for a write, waits, gives up at any time, retires the
//! tag and asks again, for the same buffer. The sender is a shipped `DomainGroup`, the counter the shipped
//! table. A piece's bytes land, are counted and complete at three instants, each at any time.
//!
//! Retiring a tag makes late *immediates* stale. It does nothing about late *bytes*: before the buffer is
//! used again the sender's transfer must have ended ([`Reuse::AfterTheEnd`]), or the bytes go where nobody
//! looks ([`Reuse::AnotherBuffer`]). The tests show that one of both is needed, and is enough.

use immwire_core::group::{End, Event, Options, WorkError, WorkRequest};
use immwire_core::id::{EngineId, PeerId, Time, TransferId};
use immwire_core::imm::{Added, Armed, Disarmed, GENERATIONS, ImmTag, WRITE_UNITS};
use immwire_core::plan::{Request, SingleWrite};
use immwire_verification_protocol::counter::Counters;
use immwire_verification_protocol::fixture::{self, Group, MAX_MESSAGE, PATIENT, Sizes};
use immwire_verification_protocol::{Claim, Kept, explore, full, must_break};
use stateright::{Model, Property};

const BUFFER: u64 = 0x10_0000;
const RECEIVER: EngineId = EngineId(1);

/// When the receiver asks again after it gave up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reuse {
    /// When the sender has said that its transfer ended.
    AfterTheEnd,
    /// At once, for another buffer.
    AnotherBuffer,
    /// At once, for the same buffer.
    AtOnce,
}

#[derive(Debug, Clone)]
struct Tenants {
    tenants: u8,
    pieces: u64,
    reuse: Reuse,
    /// Whether the tag is retired with its tenant.
    retire: bool,
    /// Tenancies of others between two of ours.
    between: u8,
    fails: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Word {
    /// Write for this tenant, with this tag.
    Ask(u8, ImmTag),
    Cancel(u8),
    /// The transfer for this tenant has ended.
    Ended(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Flight {
    tenant: u8,
    work: WorkRequest,
    landed: bool,
    counted: bool,
    ending: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    /// Between tenants.
    Free,
    /// Asked, not waiting yet.
    Asked,
    Waiting,
    /// Gave up, and waits for the sender's transfer to end.
    Draining,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Broken {
    CountedStale,
    NotCounted,
    FiredEarly,
    OverwroteTheNext,
    Lost,
    /// A timeout was handled, and is due all the same.
    Spins,
    /// A path is asked about that did not break.
    Uncalled,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    group: Kept<Group>,
    peer: Option<PeerId>,
    now: Time,
    /// The sender's transfer for each tenant, while it lasts.
    transfers: Vec<Option<TransferId>>,
    flights: Vec<Flight>,
    to_sender: Vec<Word>,
    to_receiver: Vec<Word>,
    counters: Kept<Counters>,
    phase: Phase,
    /// The tenant now, or the last.
    tenant: u8,
    tag: Option<ImmTag>,
    /// Whose bytes the buffer holds, piece by piece; 0 for nobody's.
    buffer: Vec<u8>,
    /// Tenants whose transfer is known to have ended.
    ended: Vec<bool>,
    reached: u8,
    fails: u8,
    broken: Option<Broken>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Ask,
    Wait,
    GiveUp,
    Hear,
    Tell,
    Post,
    Land(usize),
    Count(usize),
    Complete(usize),
    Fail(usize),
    Tick,
}

impl Tenants {
    fn ask(&self, state: &mut State) {
        for _ in 0..self.between {
            self.retire(state);
        }
        if state.counters.available(0) > 0 {
            state.broken = Some(Broken::CountedStale);
        }
        state.tenant += 1;
        state.phase = Phase::Asked;
        state.tag = state.counters.tag(0);
        if self.reuse != Reuse::AnotherBuffer || state.tenant == 1 {
            // Its owner clears it, and takes everything that is there later for its tenant's.
            state.buffer.fill(0);
        } else {
            state.buffer = vec![0; state.buffer.len()];
        }
        if let Some(tag) = state.tag {
            state.to_sender.push(Word::Ask(state.tenant, tag));
        }
    }

    fn wait(&self, state: &mut State) -> Option<()> {
        let tag = state.tag?;
        match state.counters.change(|counters| counters.arm(tag, 1)) {
            Ok(Armed::Ready) => self.reached(state),
            Ok(Armed::Waiting { .. }) => state.phase = Phase::Waiting,
            Err(_) => state.broken = Some(Broken::NotCounted),
        }
        Some(())
    }

    fn reached(&self, state: &mut State) {
        if state.buffer.iter().any(|tenant| *tenant != state.tenant) {
            state.broken = Some(Broken::FiredEarly);
        }
        state.reached += 1;
        self.over(state);
    }

    /// The tenant goes: nothing of it is counted any more.
    fn over(&self, state: &mut State) {
        state.phase = Phase::Free;
        if self.retire {
            self.retire(state);
        }
    }

    fn retire(&self, state: &mut State) {
        let tag = state.counters.tag(0);
        if tag.is_none_or(|tag| state.counters.change(|it| it.retire(tag)).is_err()) {
            state.broken = Some(Broken::NotCounted);
        }
    }

    fn give_up(&self, state: &mut State) -> Option<()> {
        let tag = state.tag?;
        match state.counters.change(|counters| counters.disarm(tag, 1)) {
            Ok(Disarmed::Withdrawn { .. }) => {
                state.to_sender.push(Word::Cancel(state.tenant));
                self.over(state);
                let ended = state.ended[usize::from(state.tenant)];
                if self.reuse == Reuse::AfterTheEnd && !ended {
                    state.phase = Phase::Draining;
                }
            }
            // Who fired has told already: the phase would not be `Waiting`.
            Ok(Disarmed::AlreadyFired) | Err(_) => state.broken = Some(Broken::NotCounted),
        }
        Some(())
    }

    fn hear(&self, state: &mut State) -> Option<()> {
        let now = state.now;
        match state.to_sender.remove(0) {
            Word::Ask(tenant, tag) => {
                let write = SingleWrite {
                    peer: state.peer?,
                    src: fixture::source(),
                    src_offset: 0,
                    dst: fixture::region(RECEIVER, BUFFER),
                    dst_offset: 0,
                    len: self.pieces * MAX_MESSAGE,
                    imm: Some(tag),
                };
                let options = Options { deadline: Time::NEVER, user: u64::from(tenant) };
                let request = Request::Single(write).check().ok()?;
                match state.group.change(|it| it.submit(request, options).map_err(drop)) {
                    Ok(id) => state.transfers[usize::from(tenant)] = Some(id),
                    Err(()) => state.broken = Some(Broken::Lost),
                }
            }
            Word::Cancel(tenant) => {
                if let Some(id) = state.transfers[usize::from(tenant)] {
                    state.group.change(|group| group.cancel(now, id));
                }
            }
            Word::Ended(_) => return None,
        }
        Some(())
    }

    fn tell(&self, state: &mut State) -> Option<()> {
        let Word::Ended(tenant) = state.to_receiver.remove(0) else { return None };
        state.ended[usize::from(tenant)] = true;
        if state.phase == Phase::Draining && tenant == state.tenant {
            state.phase = Phase::Free;
        }
        Some(())
    }

    /// The bytes of a piece become visible in the buffer.
    fn land(&self, state: &mut State, at: usize) {
        let flight = &mut state.flights[at];
        flight.landed = true;
        let piece = usize::try_from((flight.work.dst - BUFFER) / MAX_MESSAGE).unwrap_or(usize::MAX);
        let elsewhere = self.reuse == Reuse::AnotherBuffer && flight.tenant != state.tenant;
        if elsewhere {
            return;
        }
        if flight.tenant != state.tenant {
            state.broken = Some(Broken::OverwroteTheNext);
        }
        match state.buffer.get_mut(piece) {
            Some(whose) => *whose = flight.tenant,
            None => state.broken = Some(Broken::Lost),
        }
    }

    /// The immediate of a piece that landed arrives at the counter.
    fn count(&self, state: &mut State, at: usize) -> Option<()> {
        let flight = &mut state.flights[at];
        flight.counted = true;
        let (imm, tenant) = (flight.work.imm?, flight.tenant);
        // Between tenants the last one's tag is retired, if it is at all.
        let there = matches!(state.phase, Phase::Asked | Phase::Waiting) || !self.retire;
        let current = tenant == state.tenant && there;
        let units = state.counters.available(0);
        match state.counters.change(|counters| counters.add(imm, 0)) {
            Added::Stale if current => state.broken = Some(Broken::NotCounted),
            Added::Stale => {
                if state.counters.available(0) != units {
                    state.broken = Some(Broken::CountedStale);
                }
            }
            Added::Counted | Added::Fired if !current => state.broken = Some(Broken::CountedStale),
            Added::Counted => {}
            Added::Fired if state.phase == Phase::Waiting => self.reached(state),
            Added::Fired | Added::NoSuchSlot | Added::Overflow => {
                state.broken = Some(Broken::NotCounted);
            }
        }
        Some(())
    }

    fn report(&self, state: &mut State, at: usize, outcome: Result<(), WorkError>) {
        let flight = state.flights.remove(at);
        let (now, work) = (state.now, flight.work);
        let done = |it: &mut Group| it.handle_completion(now, work.nic, work.token, outcome);
        if !state.group.change(done) {
            state.broken = Some(Broken::Lost);
        }
    }

    fn events(&self, state: &mut State) {
        while let Some(event) = state.group.change(Group::poll_event) {
            match event {
                Event::Ended { id, user, end } => {
                    let tenant = u8::try_from(user).unwrap_or(u8::MAX);
                    let known = state.transfers.get_mut(usize::from(tenant));
                    if known.and_then(|known| known.take_if(|it| *it == id)).is_none() {
                        state.broken = Some(Broken::Lost);
                    }
                    if end == End::Done && state.flights.iter().any(|it| it.tenant == tenant) {
                        state.broken = Some(Broken::Lost);
                    }
                    state.to_receiver.push(Word::Ended(tenant));
                }
                Event::Abort { .. } => {
                    state.flights.iter_mut().for_each(|flight| flight.ending = true);
                }
                Event::Disconnect { .. } | Event::Peer { .. } | Event::Heartbeat { .. } => {}
                Event::Fence { .. } | Event::Settle { .. } => {
                    state.broken = Some(Broken::Uncalled);
                }
            }
        }
        state.flights.sort_by_key(|it| (it.tenant, it.work.dst));
    }

    fn own_steps(&self, state: &State, steps: &mut Vec<Step>) {
        match state.phase {
            Phase::Free if state.tenant < self.tenants => steps.push(Step::Ask),
            Phase::Asked => steps.push(Step::Wait),
            Phase::Waiting => steps.push(Step::GiveUp),
            Phase::Free | Phase::Draining => {}
        }
        if !state.to_sender.is_empty() {
            steps.push(Step::Hear);
        }
        if !state.to_receiver.is_empty() {
            steps.push(Step::Tell);
        }
        if state.group.has_work(0) {
            steps.push(Step::Post);
        }
        for (at, flight) in state.flights.iter().enumerate() {
            steps.push(match (flight.landed, flight.counted) {
                (false, _) => Step::Land(at),
                (true, false) => Step::Count(at),
                (true, true) => Step::Complete(at),
            });
            // Its bytes are visible: what is left is to be counted.
            if flight.ending && flight.landed == flight.counted {
                steps.push(Step::Fail(at));
            }
        }
        let ending = state.flights.iter().any(|flight| flight.ending);
        if state.group.poll_timeout() != Time::NEVER && !ending {
            steps.push(Step::Tick);
        }
    }
}

impl Model for Tenants {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let tenants = usize::from(self.tenants) + 1;
        let sizes = Sizes {
            nics: 1,
            queue_depth: 2,
            peer_depth: 2,
            reserve: 0,
            transfers: tenants,
            peers: 1,
        };
        let mut group = fixture::group(sizes, PATIENT);
        let peer = fixture::accept(&mut group, Time::ZERO, RECEIVER, 1).ok();
        while group.poll_event().is_some() {}
        vec![State {
            group: Kept::new(group),
            peer,
            now: Time::ZERO,
            transfers: vec![None; tenants],
            flights: Vec::new(),
            to_sender: Vec::new(),
            to_receiver: Vec::new(),
            counters: Kept::new(Counters::new(1, 1)),
            phase: Phase::Free,
            tenant: 0,
            tag: None,
            buffer: vec![0; usize::try_from(self.pieces).unwrap_or(0)],
            ended: vec![false; tenants],
            reached: 0,
            fails: self.fails,
            broken: None,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.broken.is_none() {
            self.own_steps(state, steps);
            if state.fails > 0 {
                let free = |at: &usize| {
                    let flight = &state.flights[*at];
                    !flight.ending && flight.landed == flight.counted
                };
                steps.extend((0..state.flights.len()).filter(free).map(Step::Fail));
            }
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        match step {
            Step::Ask => self.ask(&mut next),
            Step::Wait => self.wait(&mut next)?,
            Step::GiveUp => self.give_up(&mut next)?,
            Step::Hear => self.hear(&mut next)?,
            Step::Tell => self.tell(&mut next)?,
            Step::Post => match next.group.change(|group| group.poll_work(0)) {
                Some(work) => {
                    let id = work.token.transfer();
                    let tenant = next.transfers.iter().position(|it| *it == Some(id))?;
                    let tenant = u8::try_from(tenant).ok()?;
                    let (landed, counted, ending) = (false, false, false);
                    next.flights.push(Flight { tenant, work, landed, counted, ending });
                }
                None if next.group == state.group => return None,
                None => {}
            },
            Step::Land(at) => self.land(&mut next, at),
            Step::Count(at) => self.count(&mut next, at)?,
            Step::Complete(at) => self.report(&mut next, at, Ok(())),
            Step::Fail(at) => {
                if !next.flights[at].ending {
                    next.fails -= 1;
                }
                self.report(&mut next, at, Err(WorkError::Flushed));
            }
            Step::Tick => {
                next.now = next.now.max(next.group.poll_timeout());
                let now = next.now;
                next.group.change(|group| group.handle_timeout(now));
                if next.group.poll_timeout() <= now {
                    next.broken = Some(Broken::Spins);
                }
            }
        }
        self.events(&mut next);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "an immediate of an earlier tenant is never counted",
                |_, state: &State| state.broken != Some(Broken::CountedStale),
            ),
            Property::always("one of the tenant's own always is", |_, state: &State| {
                state.broken != Some(Broken::NotCounted)
            }),
            Property::always(
                "a target is reached when all its bytes are there",
                |_, state: &State| state.broken != Some(Broken::FiredEarly),
            ),
            Property::always(
                "no byte of an earlier tenant lands in a later one's",
                |_, state: &State| state.broken != Some(Broken::OverwroteTheNext),
            ),
            Property::always("nothing is lost on the way", |_, state: &State| {
                state.broken != Some(Broken::Lost)
            }),
            Property::always("no tenant holds more than it is sent", |_, state: &State| {
                state.counters.available(0) <= u64::from(WRITE_UNITS)
            }),
            Property::always("a timeout that was handled lies ahead", |_, state: &State| {
                state.broken != Some(Broken::Spins)
            }),
            Property::always("no path is asked about that did not break", |_, state: &State| {
                state.broken != Some(Broken::Uncalled)
            }),
            Property::always("always comes to an end", |model: &Self, state: &State| {
                let mut steps = Vec::new();
                model.own_steps(state, &mut steps);
                let over = state.phase == Phase::Free && state.tenant == model.tenants;
                state.broken.is_some() || over || !steps.is_empty()
            }),
            Property::sometimes("all are reached", |model: &Self, state: &State| {
                state.reached == model.tenants
            }),
            Property::sometimes("a late immediate is refused", |model: &Self, state: &State| {
                state.counters.stale() > 0 || !model.retire
            }),
        ]
    }
}

fn tenants(tenants: u8, pieces: u64, reuse: Reuse) -> Tenants {
    Tenants { tenants, pieces, reuse, retire: true, between: 0, fails: 1 }
}

fn check(claim: &'static str, model: Tenants, at_least: usize) {
    let Tenants { tenants, pieces, fails, between, .. } = model;
    let bound = format!(
        "{tenants} tenants of a slot, {between} of others between them, {pieces} pieces each, \
         {fails} failures"
    );
    explore(Claim { clause: "2 Counting", claim, bound, at_least }, model);
}

#[test]
fn a_buffer_is_used_again_after_the_end() {
    let (count, at_least) = if full() { (3, 285_840) } else { (2, 21_088) };
    let claim =
        "after the end of its writes a buffer, and its counter, are the next tenant's alone";
    check(claim, tenants(count, 2, Reuse::AfterTheEnd), at_least);
}

#[test]
fn another_buffer_is_used_at_once() {
    let (pieces, at_least) = if full() { (3, 234_558) } else { (2, 65_668) };
    let claim = "while old writes fly the counter counts the new tenant's alone";
    check(claim, tenants(2, pieces, Reuse::AnotherBuffer), at_least);
}

/// Generations repeat: with a drain between tenants that does no harm.
#[test]
fn generations_come_round() {
    let model = Tenants { between: GENERATIONS - 1, ..tenants(2, 2, Reuse::AfterTheEnd) };
    check("after a drain a generation may come round", model, 21_088);
}

/// A tag keeps stale counts away, not stale bytes.
#[test]
fn reuse_without_a_drain_is_seen() {
    let model = tenants(2, 2, Reuse::AtOnce);
    must_break(model, "no byte of an earlier tenant lands in a later one's");
}

#[test]
fn a_tag_that_is_not_retired_is_seen() {
    let model = Tenants { retire: false, ..tenants(2, 2, Reuse::AnotherBuffer) };
    must_break(model, "an immediate of an earlier tenant is never counted");
}

/// What the contract does not promise: a tag that was retired as often as there are generations is current.
#[test]
fn a_generation_that_comes_round_without_a_drain_is_seen() {
    let model = Tenants { between: GENERATIONS - 1, ..tenants(2, 1, Reuse::AnotherBuffer) };
    must_break(model, "an immediate of an earlier tenant is never counted");
}
