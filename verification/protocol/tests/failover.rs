//! Failover: two shipped `DomainGroup`s over paths that break, and a receiver that counts.
//!
//! What is shipped here: both groups, which decide what is asked, answered, posted again and given up. The
//! providers' part of `platform-linux/src/provider.rs`, clause 5, and the driver's (`fence`, `settle`,
//! `receipt`) are written out below. A path leads from a NIC of one side to a NIC of the other. When it
//! breaks, its sender knows at once; what is on its way may still land, at any time until the receiver
//! fences the path, or never. Nothing keeps an order: not even two pieces on one path.
//!
//! A run ends where neither side nor the network has anything left to do but wait for instants that are due
//! by themselves: each of them is waited for, until none is left.

use immwire_core::group::{
    End, Event, LostSlot, Options, Receipts, TransferError, WorkError, WorkRequest,
};
use immwire_core::id::{EngineId, NicIndex, PeerId, Time, TransferId};
use immwire_core::imm::{ImmTag, WRITE_UNITS};
use immwire_core::mailbox::Control;
use immwire_core::peer::{DownReason, PeerState};
use immwire_core::plan::{Request, SingleWrite};
use immwire_core::receipt::Settlement;
use immwire_verification_protocol::fixture::{self, Asked, DRAIN, PATIENT, Sizes};
use immwire_verification_protocol::{Claim, Kept, explore, full, must_break};
use stateright::{Model, Property};

type Group = fixture::Group<Vec<LostSlot>>;

/// Where transfer number `k` writes: 0x1000 bytes of its own.
const DST: u64 = 0x10_0000;

/// How often what may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Left {
    breaks: u8,
    restores: u8,
    /// Instants that come before everything is at rest.
    early: u8,
}

/// What the receiver's provider does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Provider {
    /// As it should.
    Honest,
    /// It says what has landed, and lets the rest land all the same.
    FenceLeaks,
    /// It does not count what landed late.
    ReceiptForgets,
}

#[derive(Debug, Clone)]
struct Failover {
    /// NICs of each side.
    nics: [u8; 2],
    /// Who writes how many bytes: two go into a piece.
    script: Vec<(usize, u64)>,
    provider: Provider,
    /// Whose paths break.
    fragile: [bool; 2],
    /// Asks and answers complete as they land; else a path may break in between.
    prompt: bool,
    left: Left,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Health {
    Whole,
    /// What is in flight there has an unknown fate.
    Broken,
    /// It has been told, and the path may be used again.
    Settled,
}

/// A path; of the two sides the sender's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Path {
    from: usize,
    nic: NicIndex,
    remote: NicIndex,
    health: Health,
    /// Nothing of it lands any more.
    fenced: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Flight {
    serial: u8,
    from: usize,
    work: WorkRequest,
    landed: bool,
    /// Of an answer, its bytes when it was posted.
    bytes: Option<Settlement>,
}

impl Flight {
    fn is_on(&self, path: &Path) -> bool {
        (self.from, self.work.nic, self.work.remote_nic) == (path.from, path.nic, path.remote)
    }

    fn control(&self) -> Option<Control> {
        Control::decode(self.work.imm?.bits())?.ok()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Wrong {
    CountedTwice,
    DoneUncounted,
    EndedTwice,
    WroteAfterEnd,
    /// On a path that is broken, or of a transfer that has ended.
    PostedWrongly,
    /// The sender uses it.
    FencedWhole,
    /// The group does not know what it posted.
    Unknown,
    Protocol,
    Refused,
    /// Nothing was cancelled.
    Aborted,
    Spins,
    /// The peer was still waited for.
    Late,
}

/// What has come up, a bit each.
mod seen {
    pub(super) const LATE: u8 = 1;
    pub(super) const AGAIN: u8 = 2;
    pub(super) const ASK_LOST: u8 = 4;
    pub(super) const ANSWER_LOST: u8 = 8;
    pub(super) const RESTORED: u8 = 16;
    pub(super) const PATHLESS: u8 = 32;
}

/// When a side is to have given its peer up, if nothing comes of what it waits for. The group has the same instants: they
/// tell no states apart.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Due {
    /// By our NIC: of the path of it that is asked about.
    asked: Vec<Time>,
    /// For want of any path.
    pathless: Time,
}

impl Due {
    fn never(nics: usize) -> Self {
        Self { asked: vec![Time::NEVER; nics], pathless: Time::NEVER }
    }

    fn first(&self) -> Time {
        self.asked.iter().copied().fold(self.pathless, Ord::min)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Side {
    group: Kept<Group>,
    peer: PeerId,
    now: Time,
    due: Due,
    /// Answers as they are laid out, by the asker's NIC.
    staging: Vec<Option<Settlement>>,
    /// Answers as they have come, by our NIC.
    mail: Vec<Option<Settlement>>,
    down: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Sent {
    from: usize,
    id: TransferId,
    units: u32,
    end: Option<End>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    sides: [Side; 2],
    paths: Vec<Path>,
    /// In the order of posting.
    flights: Vec<Flight>,
    serial: u8,
    sent: Vec<Sent>,
    left: Left,
    seen: u8,
    wrong: Option<Wrong>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Submit,
    Post(usize, NicIndex),
    Land(u8),
    Complete(u8),
    Break(usize),
    Restore(usize),
    Tick(usize),
}

fn engine(side: usize) -> EngineId {
    EngineId(side as u64 + 1)
}

fn tag(transfer: usize) -> ImmTag {
    let tag = u16::try_from(transfer).ok().and_then(|slot| ImmTag::new(slot, 0));
    tag.unwrap_or_else(|| unreachable!("few transfers"))
}

impl Failover {
    fn side(&self, side: usize) -> Side {
        let [ours, theirs] = [side, 1 - side].map(|it| usize::from(self.nics[it]));
        let sizes = Sizes {
            nics: ours,
            queue_depth: 4,
            peer_depth: 4,
            reserve: 0,
            transfers: self.script.len(),
            peers: 1,
        };
        let mut group = fixture::failover_group(sizes, PATIENT);
        let other = engine(1 - side);
        let peer = fixture::add(&mut group, Time::ZERO, other, theirs);
        let peer = peer.unwrap_or_else(|_| unreachable!("a slot for it"));
        fixture::connected(&mut group, Time::ZERO, peer, other, theirs);
        group.set_receipts(peer, Receipts { src: fixture::source(), offset: 0 });
        while group.poll_event().is_some() {}
        Side {
            group: Kept::new(group),
            peer,
            now: Time::ZERO,
            due: Due::never(ours),
            staging: vec![None; theirs],
            mail: vec![None; ours],
            down: false,
        }
    }

    fn submit(&self, state: &mut State) {
        let k = state.sent.len();
        let (from, len) = self.script[k];
        let side = &mut state.sides[from];
        let request: Asked = Request::Single(SingleWrite {
            peer: side.peer,
            src: fixture::source(),
            src_offset: 0,
            dst: fixture::region(engine(1 - from), DST + 0x1000 * k as u64),
            dst_offset: 0,
            len,
            imm: Some(tag(k)),
        });
        let options = Options { deadline: Time::NEVER, user: k as u64 };
        let request = request.check().unwrap_or_else(|_| unreachable!("in bounds"));
        match side.group.change(|group| group.submit(request, options).map_err(drop)) {
            Ok(id) => state.sent.push(Sent { from, id, units: 0, end: None }),
            // To a peer that is gone.
            Err(()) if side.down => {
                let error =
                    TransferError::PeerDown { peer: side.peer, reason: DownReason::Disconnected };
                let id = TransferId { index: u16::MAX, generation: 0 };
                state.sent.push(Sent {
                    from,
                    id,
                    units: 0,
                    end: Some(End::NeverStarted { error }),
                });
            }
            Err(()) => state.wrong = Some(Wrong::Refused),
        }
    }

    /// What the other side makes of a piece that lands.
    fn land(&self, state: &mut State, at: usize) {
        let Flight { from, work, bytes, .. } = state.flights[at].clone();
        let control = state.flights[at].control();
        state.flights[at].landed = true;
        let path = state.paths.iter().find(|path| state.flights[at].is_on(path));
        if path.is_some_and(|path| path.health != Health::Whole) {
            state.seen |= seen::LATE;
        }
        let to = 1 - from;
        let side = &mut state.sides[to];
        let (peer, now) = (side.peer, side.now);
        match control {
            None => count(state, from, &work),
            Some(Control::Ask { from, to, epoch }) => {
                let asked = side.group.change(|group| {
                    group.handle_heard(now, peer, true);
                    group.handle_ask(peer, from, to, epoch)
                });
                if asked.is_err() {
                    state.wrong = Some(Wrong::Protocol);
                }
            }
            Some(Control::Answer(nic)) => {
                if let Some(place) = side.mail.get_mut(usize::from(nic)) {
                    *place = bytes;
                }
                side.group.change(|group| {
                    group.handle_heard(now, peer, true);
                    group.handle_answer(peer, nic);
                });
            }
            Some(_) => state.wrong = Some(Wrong::Protocol),
        }
    }

    /// What the groups have to tell is done.
    fn events(&self, state: &mut State) {
        loop {
            let mut any = false;
            for side in 0..2 {
                while let Some(event) = state.sides[side].group.change(Group::poll_event) {
                    any = true;
                    self.event(state, side, event);
                }
            }
            if !any {
                return;
            }
        }
    }

    fn event(&self, state: &mut State, side: usize, event: Event) {
        match event {
            Event::Ended { user, end, .. } => {
                let k = usize::try_from(user).unwrap_or(usize::MAX);
                let sent = &mut state.sent[k];
                if sent.end.replace(end).is_some() {
                    state.wrong = Some(Wrong::EndedTwice);
                }
                let all = sent.units == u32::from(WRITE_UNITS);
                if end == End::Done && !all {
                    state.wrong = Some(Wrong::DoneUncounted);
                }
            }
            Event::Fence { from, to, epoch, .. } => {
                let path = state.path(1 - side, from, to);
                if state.paths[path].health == Health::Whole {
                    state.wrong = Some(Wrong::FencedWhole);
                }
                let path = &mut state.paths[path];
                path.fenced = self.provider != Provider::FenceLeaks;
                let forgets = self.provider == Provider::ReceiptForgets;
                let arrived = state.flights.iter().filter(|it| it.is_on(path) && it.landed);
                let arrived = arrived.map(|it| it.serial).filter(|_| !forgets);
                let receipt = arrived.collect();
                let answer = Settlement { epoch, from, to, receipt };
                let side = &mut state.sides[side];
                side.staging[usize::from(from)] = Some(answer);
                let peer = side.peer;
                side.group.change(|group| group.handle_fenced(peer, from));
            }
            Event::Settle { nic, remote_nic, epoch, .. } => {
                let found = state.sides[side].mail[usize::from(nic)].clone();
                let asked = (epoch, nic, remote_nic);
                if let Some(found) = found.filter(|it| (it.epoch, it.from, it.to) == asked) {
                    self.settle(state, side, &found);
                }
            }
            Event::Disconnect { .. } | Event::Peer { state: PeerState::Down(_), .. } => {
                state.disconnect();
            }
            Event::Peer { .. } => {}
            Event::Abort { .. } | Event::Heartbeat { .. } => state.wrong = Some(Wrong::Aborted),
        }
    }

    /// The sender's provider has the receipt: each piece has arrived, or never will.
    fn settle(&self, state: &mut State, side: usize, found: &Settlement) {
        let path = state.path(side, found.from, found.to);
        let (lost, rest): (Vec<Flight>, Vec<Flight>) = std::mem::take(&mut state.flights)
            .into_iter()
            .partition(|it| it.is_on(&state.paths[path]));
        state.flights = rest;
        state.paths[path].health = Health::Settled;
        // Of a NIC's paths one is asked about at a time: now the next.
        let broken = (side, found.from, Health::Broken);
        let is_next = |path: &Path| (path.from, path.nic, path.health) == broken;
        let more = state.paths.iter().any(is_next);
        let Side { group, peer, now, due, .. } = &mut state.sides[side];
        due.asked[usize::from(found.from)] = if more { now.after(DRAIN) } else { Time::NEVER };
        for flight in lost {
            let work = flight.work;
            let known = group.change(|group| {
                if found.receipt.contains(&flight.serial) {
                    group.handle_completion(*now, work.nic, work.token, Ok(()))
                } else {
                    group.handle_undelivered(*now, &work)
                }
            });
            if !known {
                state.wrong = Some(Wrong::Unknown);
            }
            if !found.receipt.contains(&flight.serial) {
                state.seen |= match flight.control() {
                    None => seen::AGAIN,
                    Some(Control::Ask { .. }) => seen::ASK_LOST,
                    Some(_) => seen::ANSWER_LOST,
                };
            }
            // It is nobody's any more, but it lands all the same if the fence leaks.
            if self.provider == Provider::FenceLeaks && !flight.landed {
                state.flights.push(Flight { serial: u8::MAX, ..flight });
            }
        }
        group.change(|group| group.handle_settled(*now, *peer, found.from, found.to));
    }

    /// What happens by itself, but for time.
    fn own_steps(&self, state: &State, steps: &mut Vec<Step>) {
        if state.sent.len() < self.script.len() {
            steps.push(Step::Submit);
        }
        for side in 0..2 {
            for nic in 0..self.nics[side] {
                let before = &state.sides[side].group;
                if !before.has_work(nic) {
                    continue;
                }
                let mut group = Group::clone(before);
                // It may move what is left of a transfer to another NIC, and post nothing.
                if group.poll_work(nic).is_some() || group != **before {
                    steps.push(Step::Post(side, nic));
                }
            }
        }
        for flight in &state.flights {
            let path = state.paths.iter().find(|path| flight.is_on(path));
            let Some(path) = path else { continue };
            if !flight.landed && !path.fenced {
                steps.push(Step::Land(flight.serial));
            }
            if flight.landed && path.health == Health::Whole {
                steps.push(Step::Complete(flight.serial));
            }
        }
    }

    fn is_at_rest(&self, state: &State) -> bool {
        let mut steps = Vec::new();
        self.own_steps(state, &mut steps);
        let waits = |side: &Side| side.group.poll_timeout() != Time::NEVER;
        steps.is_empty() && !state.sides.iter().any(waits)
    }
}

/// A piece of a write lands: its bytes are there, and its immediate counts.
fn count(state: &mut State, from: usize, work: &WorkRequest) {
    let tag_of = |k: usize| work.imm.is_some_and(|imm| imm.tag() == tag(k));
    let Some(k) = (0..state.sent.len()).find(|&k| tag_of(k)) else {
        state.wrong = Some(Wrong::Protocol);
        return;
    };
    if state.sent[k].end.is_some() {
        state.wrong = Some(Wrong::WroteAfterEnd);
        return;
    }
    state.sent[k].units += u32::from(work.imm.map_or(0, |imm| imm.units()));
    if state.sent[k].units > u32::from(WRITE_UNITS) {
        state.wrong = Some(Wrong::CountedTwice);
    }
    let side = &mut state.sides[1 - from];
    let (peer, now) = (side.peer, side.now);
    side.group.change(|group| group.handle_heard(now, peer, true));
}

impl State {
    fn path(&self, from: usize, nic: NicIndex, remote: NicIndex) -> usize {
        let named = |path: &Path| (path.from, path.nic, path.remote) == (from, nic, remote);
        let at = self.paths.iter().position(named);
        at.unwrap_or_else(|| unreachable!("a path from each NIC to each"))
    }

    fn has_path(&self, from: usize) -> bool {
        self.paths.iter().any(|path| path.from == from && path.health == Health::Whole)
    }

    /// The connection is gone, on both sides: what was in flight has failed.
    fn disconnect(&mut self) {
        for at in 0..2 {
            let (mine, rest) = std::mem::take(&mut self.flights)
                .into_iter()
                .partition::<Vec<Flight>, _>(|flight| flight.from == at);
            self.flights = rest;
            let Side { group, peer, now, due, down, .. } = &mut self.sides[at];
            *down = true;
            *due = Due::never(due.asked.len());
            for Flight { work, .. } in mine {
                let gone = Err(WorkError::PeerGone);
                group.change(|group| group.handle_completion(*now, work.nic, work.token, gone));
            }
            let reason = DownReason::Disconnected;
            group.change(|group| group.handle_disconnected(*now, *peer, reason));
        }
    }

    fn complete(&mut self, at: usize) {
        let Flight { from, work, .. } = self.flights.remove(at);
        let Side { group, now, .. } = &mut self.sides[from];
        if !group.change(|group| group.handle_completion(*now, work.nic, work.token, Ok(()))) {
            self.wrong = Some(Wrong::Unknown);
        }
    }

    fn post(&mut self, side: usize, nic: NicIndex) {
        let Some(work) = self.sides[side].group.change(|group| group.poll_work(nic)) else {
            return;
        };
        let path = &self.paths[self.path(side, nic, work.remote_nic)];
        let id = work.token.transfer();
        let ended = |sent: &Sent| (sent.from, sent.id) == (side, id) && sent.end.is_some();
        let flight = Flight { serial: self.serial, from: side, work, landed: false, bytes: None };
        let bytes = match flight.control() {
            Some(Control::Answer(of)) => self.sides[side].staging[usize::from(of)].clone(),
            _ => None,
        };
        let wrong = path.health != Health::Whole
            || flight.control().is_none() && self.sent.iter().any(ended);
        if wrong {
            self.wrong = Some(Wrong::PostedWrongly);
        }
        self.flights.push(Flight { bytes, ..flight });
        self.serial += 1;
    }
}

impl Model for Failover {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let ends = (0..2).flat_map(|from| (0..self.nics[from]).map(move |nic| (from, nic)));
        let paths = ends.flat_map(|(from, nic)| {
            let path =
                move |remote| Path { from, nic, remote, health: Health::Whole, fenced: false };
            (0..self.nics[1 - from]).map(path)
        });
        vec![State {
            sides: [0, 1].map(|side| self.side(side)),
            paths: paths.collect(),
            flights: Vec::new(),
            serial: 0,
            sent: Vec::new(),
            left: self.left,
            seen: 0,
            wrong: None,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.wrong.is_some() {
            return;
        }
        self.own_steps(state, steps);
        let rest = steps.is_empty();
        for side in 0..2 {
            if (rest || state.left.early > 0)
                && state.sides[side].group.poll_timeout() != Time::NEVER
            {
                steps.push(Step::Tick(side));
            }
        }
        if state.sides.iter().any(|side| side.down) {
            return;
        }
        for (at, path) in state.paths.iter().enumerate() {
            match path.health {
                Health::Whole if state.left.breaks > 0 && self.fragile[path.from] => {
                    steps.push(Step::Break(at));
                }
                Health::Settled if state.left.restores > 0 => steps.push(Step::Restore(at)),
                _ => {}
            }
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        let place = |serial| state.flights.iter().position(|flight| flight.serial == serial);
        match step {
            Step::Submit => self.submit(&mut next),
            Step::Post(side, nic) => next.post(side, nic),
            Step::Land(serial) => {
                let at = place(serial)?;
                self.land(&mut next, at);
                let flight = &next.flights[at];
                let whole = next
                    .paths
                    .iter()
                    .any(|path| flight.is_on(path) && path.health == Health::Whole);
                if serial == u8::MAX {
                    next.flights.remove(at);
                } else if self.prompt && whole && flight.control().is_some() {
                    next.complete(at);
                }
            }
            Step::Complete(serial) => next.complete(place(serial)?),
            Step::Break(at) => {
                next.left.breaks -= 1;
                next.paths[at].health = Health::Broken;
                let Path { from, nic, remote, .. } = next.paths[at];
                let is_pathless = !next.has_path(from);
                if is_pathless {
                    next.seen |= seen::PATHLESS;
                }
                let Side { group, now, peer, due, .. } = &mut next.sides[from];
                let until = now.after(DRAIN);
                let asked = &mut due.asked[usize::from(nic)];
                // Unless another is asked about.
                *asked = until.min(*asked);
                if is_pathless {
                    due.pathless = until.min(due.pathless);
                }
                group.change(|group| group.handle_path_broken(*now, *peer, nic, remote));
            }
            Step::Restore(at) => {
                next.left.restores -= 1;
                next.seen |= seen::RESTORED;
                next.paths[at].health = Health::Whole;
                next.paths[at].fenced = false;
                let Path { from, nic, remote, .. } = next.paths[at];
                let Side { group, now, peer, due, .. } = &mut next.sides[from];
                due.pathless = Time::NEVER;
                group.change(|group| group.handle_path_restored(*now, *peer, nic, remote));
            }
            Step::Tick(at) => {
                let mut steps = Vec::new();
                self.own_steps(state, &mut steps);
                next.left.early -= u8::from(!steps.is_empty());
                let side = &mut next.sides[at];
                side.now = side.now.max(side.group.poll_timeout());
                // Who is given up at the last moment is not given up late.
                let (now, is_late) = (side.now, side.due.first() < side.now);
                side.group.change(|group| group.handle_timeout(now));
                if is_late {
                    next.wrong = Some(Wrong::Late);
                } else if side.group.poll_timeout() <= now {
                    next.wrong = Some(Wrong::Spins);
                }
            }
        }
        self.events(&mut next);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always("each piece counts once, and an end is an end", |_, state: &State| {
                state.wrong.is_none()
            }),
            Property::always("at rest everything has ended", |model: &Self, state: &State| {
                let ended = state.sent.iter().all(|sent| sent.end.is_some());
                ended || state.wrong.is_some() || !model.is_at_rest(state)
            }),
            Property::always(
                "who always had a path is kept, and all is done",
                |model: &Self, state: &State| {
                    state.seen & seen::PATHLESS != 0
                        || state.sides.iter().all(|side| !side.down)
                            && (state.sent.iter().all(|sent| sent.end == Some(End::Done))
                                || !model.is_at_rest(state))
                },
            ),
            Property::always("a peer is given up within its drain", |_, state: &State| {
                // A path may break whenever another is settled.
                let most = DRAIN.saturating_mul(1 + u32::from(state.seen != 0) * 4);
                let ends = state.sides.iter().all(|side| side.now.since(Time::ZERO) <= most);
                // Nor is any path asked about for longer, or a peer without one waited for.
                ends && state.wrong != Some(Wrong::Late)
            }),
            Property::sometimes(
                "all is done over paths that broke",
                |model: &Self, state: &State| {
                    state.left.breaks == 0
                        && model.is_at_rest(state)
                        && state.sent.iter().all(|sent| sent.end == Some(End::Done))
                },
            ),
            Property::sometimes("a piece lands after its path broke", |_, state: &State| {
                state.seen & seen::LATE != 0
            }),
            Property::sometimes("a piece is posted again", |_, state: &State| {
                state.seen & seen::AGAIN != 0
            }),
        ];
        if self.left.breaks > 1 && self.nics[0] > 2 {
            properties.push(Property::sometimes("an ask is lost", |_, state: &State| {
                state.seen & seen::ASK_LOST != 0
            }));
        }
        if self.left.breaks > 1 && self.fragile[1] {
            properties.push(Property::sometimes("an answer is lost", |_, state: &State| {
                state.seen & seen::ANSWER_LOST != 0
            }));
        }
        if self.left.restores > 0 {
            properties.push(Property::sometimes("a path is used again", |_, state: &State| {
                state.seen & seen::RESTORED != 0
                    && state.flights.iter().any(|it| it.control().is_none() && !it.landed)
            }));
        }
        properties
    }
}

const CALM: Left = Left { breaks: 1, restores: 0, early: 0 };

fn model(nics: [u8; 2], script: &[(usize, u64)], left: Left) -> Failover {
    let (provider, fragile) = (Provider::Honest, [true; 2]);
    Failover { nics, script: script.to_vec(), provider, fragile, prompt: !full(), left }
}

fn check(text: &'static str, model: Failover, at_least: usize) {
    let Failover { nics: [a, b], script, left, .. } = &model;
    let pieces: u64 = script.iter().map(|(_, len)| len / 2).sum();
    let Left { breaks, restores, early } = left;
    let bound = format!(
        "2 engines, {a} and {b} NICs, {pieces} pieces, {breaks} breaks, {restores} restored, {early} early timeouts"
    );
    explore(Claim { clause: "3 Ends", claim: text, bound, at_least }, model);
}

fn floor(fast: usize, larger: usize) -> usize {
    if full() { larger } else { fast }
}

#[test]
fn one_path_breaks_at_any_point() {
    let model = model([2, 1], &[(0, 4)], CALM);
    check(
        "what a broken path leaves is written once, whatever arrives late",
        model,
        floor(2_099, 5_679),
    );
}

/// An ask is lost with a second path, and goes over a third.
#[test]
fn the_path_of_an_ask_breaks_too() {
    let model = model([3, 1], &[(0, 2)], Left { breaks: 2, ..CALM });
    let model = Failover { fragile: [true, false], prompt: true, ..model };
    check("an ask that is lost with a second path goes over a third", model, 35_441);
}

/// An answer is lost with a path of its own.
#[test]
fn the_path_of_an_answer_breaks_too() {
    let model = model([2, 1], &[(0, 2)], Left { breaks: 2, ..CALM });
    check("an answer that is lost with its path goes over another", model, floor(11_779, 119_508));
}

/// What is asked can be answered no more, and the asker has a path all the while.
#[test]
fn an_answer_that_cannot_come_is_waited_for_no_longer_than_a_drain() {
    let model = model([2, 1], &[(0, 2)], Left { breaks: 3, ..CALM });
    let model = Failover { prompt: true, ..model };
    check("an answer that cannot come is waited for no longer than a drain", model, 148_914);
}

/// A path is settled, used again, and breaks again: old asks and answers say nothing of it.
#[test]
fn a_path_is_restored_and_breaks_again() {
    let model = model([2, 1], &[(0, 2), (0, 2)], Left { breaks: 2, restores: 1, ..CALM });
    let model = Failover { fragile: [true, false], ..model };
    check(
        "a path that is back is not taken for the broken one that it was",
        model,
        floor(55_289, 306_039),
    );
}

#[test]
fn both_sides_write_and_their_paths_break() {
    let model = model([2, 1], &[(0, 2), (1, 2)], CALM);
    check("each side settles its own paths while the other does", model, floor(3_093, 8_482));
}

// ---- what the providers must do

/// What lands after the fence, and was posted again, counts twice.
#[test]
fn a_fence_that_leaks_is_seen() {
    let model = model([2, 1], &[(0, 2)], CALM);
    must_break(
        Failover { provider: Provider::FenceLeaks, ..model },
        "each piece counts once, and an end is an end",
    );
}

#[test]
fn a_receipt_that_forgets_is_seen() {
    let model = model([2, 1], &[(0, 2)], CALM);
    must_break(
        Failover { provider: Provider::ReceiptForgets, ..model },
        "each piece counts once, and an end is an end",
    );
}
