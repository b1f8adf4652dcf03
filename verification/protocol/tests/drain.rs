//! Cancel and drain: the shipped `DomainGroup` above a provider that does all that its contract allows.
//!
//! A few transfers are submitted, cancelled, overtaken by their deadlines and by the loss of their peers,
//! at any moment. The provider lands, completes and fails pieces in any order, lets some get stuck, even
//! through an abort. The model knows the network: what is in flight, and which bytes have landed.
//!
//! What is claimed of every state: see [`Drain::properties`]. "Always comes to an end" is claimed of the
//! states in which neither the group nor the provider has anything left to do; each step uses something up
//! (a piece, an instant, one of a few blows of fate), so that every run reaches one.

use immwire_core::group::{End, Event, Options, Token, WorkError, WorkRequest};
use immwire_core::id::{EngineId, NicIndex, PeerId, Time, TransferId};
use immwire_core::imm::{ImmTag, WRITE_UNITS};
use immwire_core::peer::{DownReason, PeerState};
use immwire_core::plan::{Barrier, Piece, Request, ScatterWrite, SingleWrite, Target};
use immwire_verification_protocol::fixture::{
    self, Asked, DRAIN, Group, MAX_MESSAGE, PATIENT, Sizes, Targets,
};
use immwire_verification_protocol::{Claim, Kept, explore, full, must_break};
use stateright::{Model, Property};

/// Where transfer number `k` writes: 0x1000 bytes of its own.
const DST: u64 = 0x10_0000;
const DUE: Time = Time::from_nanos(5);
/// What the group never knew.
const NOBODY: TransferId = TransferId { index: u16::MAX, generation: 0 };

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// Two bytes, one piece.
    Tiny,
    /// The same, offered to `express` first.
    Express,
    /// The same, written at once if nothing stands before it.
    AtOnce,
    /// Six bytes, three pieces.
    Split,
    /// So many pieces that the immediate trails.
    Long,
    /// Two bytes to each peer.
    Scatter,
    /// An immediate to each peer.
    Barrier,
}

/// A transfer of the script.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Work {
    kind: Kind,
    /// Its peer, where there is one.
    peer: usize,
    due: bool,
}

const fn work(kind: Kind, peer: usize) -> Work {
    Work { kind, peer, due: false }
}

const fn due(kind: Kind, peer: usize) -> Work {
    Work { kind, peer, due: true }
}

/// How often fate may strike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Blows {
    /// In all; and of each kind:
    all: u8,
    cancels: u8,
    /// Pieces that fail without a reason the group knows.
    fails: u8,
    /// Pieces that get stuck until they are aborted.
    stalls: u8,
    /// Stuck pieces that the first abort does not free.
    deaf: u8,
    losses: u8,
    removals: u8,
    returns: u8,
}

/// How far the provider keeps its contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Provider {
    /// What it reported as ended writes nothing any more.
    Honest,
    /// It reports aborted pieces at once, and the network may still deliver them.
    LandsLate,
    /// It answers no abort.
    IgnoresAborts,
    /// It loses the report of a piece that it was given.
    LosesReports,
}

#[derive(Debug, Clone)]
struct Drain {
    sizes: Sizes,
    /// The first so many peers have not answered yet.
    connecting: usize,
    script: Vec<Work>,
    blows: Blows,
    provider: Provider,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Flight {
    transfer: usize,
    work: WorkRequest,
    landed: bool,
    /// So many aborts until it moves.
    stuck: u8,
    /// The provider was told to end it: it does so before a drain time has passed.
    ending: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Sent {
    token: Option<Token>,
    id: TransferId,
    end: Option<End>,
    /// Something was posted.
    started: bool,
    /// Nothing more may be posted.
    stopped: bool,
    /// Bytes that landed, a bit each.
    painted: u64,
    /// Units that each peer counted.
    units: Vec<u32>,
    /// Peers it was submitted to.
    peers: Vec<PeerId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Broken {
    EndedTwice,
    EndedInFlight,
    WroteAfterEnd,
    WroteAskew,
    NotDone,
    WrongEnd,
    PostedWrongly,
    Refused,
    /// A timeout was handled, and is due all the same.
    Spins,
    /// A path is asked about that did not break.
    Uncalled,
    /// It takes longer than deadlines and drains allow.
    Lasts,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    group: Kept<Group>,
    now: Time,
    /// Who is there now, or becoming it.
    peers: Vec<Option<PeerId>>,
    sent: Vec<Sent>,
    /// Sorted: their order means nothing.
    flights: Vec<Flight>,
    /// Reported as ended, and on their way all the same.
    ghosts: Vec<Flight>,
    left: Blows,
    aborted: bool,
    broken: Option<Broken>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Submit,
    Connect(usize),
    Post(NicIndex),
    Land(usize),
    LandLate(usize),
    Complete(usize),
    Fail(usize),
    Stick(usize, u8),
    LoseReport(usize),
    Cancel(usize),
    Tick,
    Lose(usize),
    Remove(usize),
    Return(usize),
}

fn spend(all: &mut u8, one: &mut u8) {
    (*all, *one) = (*all - 1, *one - 1);
}

fn engine(peer: usize) -> EngineId {
    EngineId(peer as u64 + 1)
}

fn tag(transfer: usize) -> ImmTag {
    let tag = u16::try_from(transfer).ok().and_then(|slot| ImmTag::new(slot, 0));
    tag.unwrap_or_else(|| unreachable!("few transfers"))
}

fn bytes_of(kind: Kind, peers: usize) -> u64 {
    match kind {
        Kind::Tiny | Kind::Express | Kind::AtOnce => 2,
        Kind::Split => 6,
        Kind::Long => 17 * MAX_MESSAGE - 1,
        Kind::Scatter => 2 * peers as u64,
        Kind::Barrier => 0,
    }
}

impl Drain {
    fn transfers(&self) -> u8 {
        u8::try_from(self.script.len()).unwrap_or(u8::MAX)
    }

    fn request(&self, state: &State, k: usize) -> Option<Asked> {
        let work = self.script[k];
        let dst = |peer: usize| fixture::region(engine(peer), DST + 0x1000 * k as u64);
        let single = |len| {
            Some(Request::Single(SingleWrite {
                peer: state.peers[work.peer]?,
                src: fixture::source(),
                src_offset: 0,
                dst: dst(work.peer),
                dst_offset: 0,
                len,
                imm: Some(tag(k)),
            }))
        };
        let live: Vec<(usize, PeerId)> =
            state.peers.iter().enumerate().filter_map(|(at, peer)| Some((at, (*peer)?))).collect();
        match work.kind {
            Kind::Tiny | Kind::Express | Kind::AtOnce | Kind::Split | Kind::Long => {
                single(bytes_of(work.kind, 0))
            }
            Kind::Scatter => {
                let target = |&(at, peer): &(usize, PeerId)| Target {
                    peer,
                    dst: dst(at),
                    src_offset: 2 * at as u64,
                    dst_offset: 2 * at as u64,
                    len: 2,
                };
                let targets = Targets::Writes(live.iter().map(target).collect());
                let (src, imm) = (fixture::source(), Some(tag(k)));
                (live.len() == self.sizes.peers).then_some(Request::Scatter(ScatterWrite {
                    src,
                    targets,
                    imm,
                }))
            }
            Kind::Barrier => {
                let targets = Targets::Peers(live.iter().map(|(_, peer)| *peer).collect());
                (live.len() == self.sizes.peers)
                    .then_some(Request::Barrier(Barrier { targets, imm: tag(k) }))
            }
        }
    }

    fn submit(&self, state: &mut State) -> Option<()> {
        let k = state.sent.len();
        let request = self.request(state, k)?;
        let deadline = if self.script[k].due { DUE } else { Time::NEVER };
        let options = Options { deadline, user: k as u64 };
        let peers: Vec<PeerId> = match self.script[k].kind {
            Kind::Scatter | Kind::Barrier => state.peers.iter().copied().flatten().collect(),
            _ => state.peers[self.script[k].peer].into_iter().collect(),
        };
        let new = |id| Sent {
            token: None,
            id,
            end: None,
            started: false,
            stopped: false,
            painted: 0,
            units: vec![0; self.sizes.peers],
            peers,
        };
        if let (Kind::Express, Request::Single(write)) = (self.script[k].kind, &request)
            && let Some(work) = state.group.change(|group| group.express(&write.by_ref(), options))
        {
            state.sent.push(new(work.token.transfer()));
            self.posted(state, work);
            return Some(());
        }
        if let (Kind::AtOnce, Request::Single(write)) = (self.script[k].kind, &request)
            && let Some((nic, piece)) = state.group.unhindered(&write.by_ref())
        {
            self.written(state, new(NOBODY), nic, &piece);
            return Some(());
        }
        let request = request.check().ok()?;
        match state.group.change(|group| group.submit(request, options).map_err(drop)) {
            Ok(id) => state.sent.push(new(id)),
            // There is a slot for each transfer of the script, and the peers are there.
            Err(_) => state.broken = Some(Broken::Refused),
        }
        Some(())
    }

    /// Written when the call returns, and so ended.
    fn written(&self, state: &mut State, sent: Sent, nic: NicIndex, piece: &Piece) {
        let (now, transfer) = (state.now, state.sent.len());
        let up = matches!(state.group.peer_state(piece.peer), Some(PeerState::Up));
        if !up || !state.peers.contains(&Some(piece.peer)) {
            state.broken = Some(Broken::PostedWrongly);
        }
        let work = WorkRequest::new(Token::from_bits(0), nic, piece);
        state.sent.push(Sent { started: true, ..sent });
        self.land(state, &Flight { transfer, work, landed: true, stuck: 0, ending: false });
        let sent = &mut state.sent[transfer];
        sent.end = Some(End::Done);
        if !self.all_landed(transfer, &state.sent[transfer]) {
            state.broken = Some(Broken::NotDone);
        }
        state.group.change(|group| group.wrote(now, nic, piece));
    }

    fn posted(&self, state: &mut State, work: WorkRequest) {
        let up = matches!(state.group.peer_state(work.peer), Some(PeerState::Up));
        let id = work.token.transfer();
        let sent =
            state.sent.iter_mut().enumerate().find(|(_, it)| it.id == id && it.end.is_none());
        match sent {
            Some((transfer, sent))
                if up && !sent.stopped && state.peers.contains(&Some(work.peer)) =>
            {
                sent.started = true;
                let flight = Flight { transfer, work, landed: false, stuck: 0, ending: false };
                state.flights.push(flight);
            }
            _ => state.broken = Some(Broken::PostedWrongly),
        }
    }

    /// The bytes become visible, and the immediate is counted.
    fn land(&self, state: &mut State, flight: &Flight) {
        let Flight { transfer, work, .. } = flight;
        let sent = &mut state.sent[*transfer];
        if sent.end.is_some() {
            state.broken = Some(Broken::WroteAfterEnd);
            return;
        }
        let kind = self.script[*transfer].kind;
        let len = bytes_of(kind, self.sizes.peers);
        let first =
            if work.len > 0 { work.dst.wrapping_sub(DST + 0x1000 * *transfer as u64) } else { 0 };
        if first + work.len > len {
            state.broken = Some(Broken::WroteAskew);
            return;
        }
        let bits = ((1_u64 << work.len) - 1) << first;
        if sent.painted & bits != 0 {
            state.broken = Some(Broken::WroteAskew);
        }
        sent.painted |= bits;
        if let Some(imm) = work.imm {
            let at = sent.peers.iter().position(|peer| *peer == work.peer);
            match at.and_then(|at| sent.units.get_mut(at)) {
                Some(units) if imm.tag() == tag(*transfer) => *units += u32::from(imm.units()),
                _ => state.broken = Some(Broken::WroteAskew),
            }
        }
    }

    fn all_landed(&self, k: usize, sent: &Sent) -> bool {
        let len = bytes_of(self.script[k].kind, self.sizes.peers);
        let units = &sent.units[..sent.peers.len()];
        sent.painted == (1_u64 << len) - 1
            && units.iter().all(|units| *units == u32::from(WRITE_UNITS))
    }

    fn report(&self, state: &mut State, at: usize, outcome: Result<(), WorkError>) {
        let flight = state.flights.remove(at);
        if outcome.is_err() {
            state.sent[flight.transfer].stopped = true;
            if self.provider == Provider::LandsLate && !flight.landed {
                state.ghosts.push(flight);
            }
        }
        let (now, work) = (state.now, flight.work);
        let known =
            state.group.change(|group| group.handle_completion(now, work.nic, work.token, outcome));
        if !known {
            state.broken = Some(Broken::EndedInFlight);
        }
    }

    /// Nothing more comes of this peer; what is in flight to it ends soon.
    fn gone(&self, state: &mut State, peer: PeerId) {
        for known in &mut state.peers {
            known.take_if(|known| *known == peer);
        }
        for sent in state.sent.iter_mut().filter(|sent| sent.peers.contains(&peer)) {
            sent.stopped = true;
        }
        for flight in state.flights.iter_mut().filter(|flight| flight.work.peer == peer) {
            (flight.ending, flight.stuck) = (true, 0);
        }
    }

    fn events(&self, state: &mut State) {
        while let Some(event) = state.group.change(Group::poll_event) {
            match event {
                Event::Ended { id, user, end } => self.ended(state, id, user, end),
                Event::Abort { peer } => {
                    state.aborted = true;
                    if self.provider == Provider::IgnoresAborts {
                        continue;
                    }
                    for flight in state.flights.iter_mut().filter(|it| it.work.peer == peer) {
                        flight.stuck = flight.stuck.saturating_sub(1);
                        flight.ending = flight.stuck == 0;
                    }
                }
                Event::Disconnect { peer } => self.gone(state, peer),
                Event::Peer { peer, state: PeerState::Down(_) } => self.gone(state, peer),
                Event::Peer { .. } | Event::Heartbeat { .. } => {}
                Event::Fence { .. } | Event::Settle { .. } => {
                    state.broken = Some(Broken::Uncalled);
                }
            }
        }
        state
            .flights
            .sort_by_key(|flight| (flight.work.token.bits(), flight.work.nic, flight.work.dst));
    }

    fn ended(&self, state: &mut State, id: TransferId, user: u64, end: End) {
        let k = usize::try_from(user).unwrap_or(usize::MAX);
        let Some(sent) = state.sent.get_mut(k).filter(|sent| sent.id == id && sent.end.is_none())
        else {
            state.broken = Some(Broken::EndedTwice);
            return;
        };
        sent.end = Some(end);
        let (started, sent) = (sent.started, sent.clone());
        let right = match end {
            End::Done => true,
            End::NeverStarted { .. } => !started,
            End::Quiesced { .. } => started,
        };
        if state.flights.iter().any(|flight| flight.transfer == k) {
            state.broken = Some(Broken::EndedInFlight);
        } else if end == End::Done && !self.all_landed(k, &sent) {
            state.broken = Some(Broken::NotDone);
        } else if !right {
            state.broken = Some(Broken::WrongEnd);
        }
    }

    /// What the group and the provider do by themselves.
    fn own_steps(&self, state: &State, steps: &mut Vec<Step>) {
        for (at, peer) in state.peers.iter().enumerate() {
            let waits = |peer| state.group.peer_state(peer) == Some(PeerState::Connecting);
            if peer.is_some_and(waits) {
                steps.push(Step::Connect(at));
            }
        }
        for nic in 0..self.sizes.nics {
            let nic = NicIndex::try_from(nic).unwrap_or(0);
            // A transfer without credit is put aside by being asked; then nothing is left to ask.
            if state.group.has_work(nic) {
                steps.push(Step::Post(nic));
            }
        }
        for (at, flight) in state.flights.iter().enumerate() {
            if at > 0 && state.flights[at - 1] == *flight || flight.stuck > 0 {
                continue;
            }
            steps.push(if flight.landed { Step::Complete(at) } else { Step::Land(at) });
            if flight.ending {
                steps.push(Step::Fail(at));
            }
        }
        let ending = state.flights.iter().any(|flight| flight.ending);
        let forced = self.provider == Provider::IgnoresAborts && state.aborted;
        if state.group.poll_timeout() != Time::NEVER && !ending && !forced {
            steps.push(Step::Tick);
        }
    }

    /// What befalls them.
    fn blows(&self, state: &State, steps: &mut Vec<Step>) {
        if state.sent.len() < self.script.len() && self.request(state, state.sent.len()).is_some() {
            steps.push(Step::Submit);
        }
        for at in 0..state.ghosts.len() {
            steps.push(Step::LandLate(at));
        }
        if state.left.all == 0 {
            return;
        }
        for (at, flight) in state.flights.iter().enumerate() {
            if !flight.ending && flight.stuck == 0 && state.left.fails > 0 {
                steps.push(Step::Fail(at));
            }
            if !flight.ending && flight.stuck == 0 && state.left.stalls > 0 {
                steps.push(Step::Stick(at, 1));
                if state.left.deaf > 0 {
                    steps.push(Step::Stick(at, 2));
                }
            }
            if self.provider == Provider::LosesReports {
                steps.push(Step::LoseReport(at));
            }
        }
        for (k, sent) in state.sent.iter().enumerate() {
            if state.left.cancels > 0 && sent.end.is_none() && !sent.stopped {
                steps.push(Step::Cancel(k));
            }
        }
        for (at, peer) in state.peers.iter().enumerate() {
            if peer.is_some() && state.left.losses > 0 {
                steps.push(Step::Lose(at));
            }
            if peer.is_some() && state.left.removals > 0 {
                steps.push(Step::Remove(at));
            }
            if peer.is_none() && state.left.returns > 0 {
                steps.push(Step::Return(at));
            }
        }
    }

    fn may_go_on(&self, state: &State) -> bool {
        state.sent.iter().any(|sent| sent.end.is_none()) && !self.is_quiet(state)
    }

    /// Whether all has ended that must: what was stopped; and the rest, unless some piece is stuck, which
    /// nobody gives up who was not asked to.
    fn has_ended(&self, state: &State) -> bool {
        let stuck = state.flights.iter().any(|flight| flight.stuck > 0);
        state.sent.iter().all(|sent| sent.end.is_some() || stuck && !sent.stopped)
    }

    /// Whether neither the group nor the provider has anything left to do.
    fn is_quiet(&self, state: &State) -> bool {
        let mut steps = Vec::new();
        self.own_steps(state, &mut steps);
        // Asking for work that has no credit changes the group once, and yields nothing.
        steps.retain(|step| !matches!(step, Step::Post(_)));
        let idle = |nic: usize| {
            let nic = NicIndex::try_from(nic).unwrap_or(0);
            !state.group.has_work(nic)
                || state.group.clone().change(|it| it.poll_work(nic)).is_none()
        };
        steps.is_empty() && (0..self.sizes.nics).all(idle)
    }

    /// Whether a long write to each peer that is up finds every credit that bulk may hold.
    fn has_all_credits(&self, state: &State) -> bool {
        let quota = self.sizes.queue_depth.min(self.sizes.peer_depth) - self.sizes.reserve;
        state.peers.iter().enumerate().all(|(at, peer)| {
            let up = |peer: &PeerId| state.group.peer_state(*peer) == Some(PeerState::Up);
            let Some(peer) = peer.filter(up) else { return true };
            let mut group = Group::clone(&state.group);
            let write = SingleWrite {
                peer,
                src: fixture::source(),
                src_offset: 0,
                dst: fixture::region(engine(at), DST),
                dst_offset: 0,
                len: 1 << 10,
                imm: None,
            };
            let options = Options { deadline: Time::NEVER, user: 0 };
            let Ok(request) = Request::Single(write).check() else { return false };
            let submitted = group.submit(request, options).is_ok();
            submitted
                && (0..self.sizes.nics).all(|nic| {
                    let nic = NicIndex::try_from(nic).unwrap_or(0);
                    let posted = std::iter::from_fn(|| group.poll_work(nic)).count();
                    posted == usize::from(quota)
                })
        })
    }
}

impl Model for Drain {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let mut group = fixture::group(self.sizes, PATIENT);
        let nics = self.sizes.nics;
        let mut peers = Vec::new();
        for at in 0..self.sizes.peers {
            let id = if at < self.connecting {
                fixture::add(&mut group, Time::ZERO, engine(at), nics)
            } else {
                fixture::accept(&mut group, Time::ZERO, engine(at), nics)
            };
            peers.push(id.ok());
        }
        while group.poll_event().is_some() {}
        vec![State {
            group: Kept::new(group),
            now: Time::ZERO,
            peers,
            sent: Vec::new(),
            flights: Vec::new(),
            ghosts: Vec::new(),
            left: self.blows,
            aborted: false,
            broken: None,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.broken.is_none() {
            self.own_steps(state, steps);
            self.blows(state, steps);
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        let now = next.now;
        match step {
            Step::Submit => self.submit(&mut next)?,
            Step::Connect(at) => {
                let peer = next.peers[at]?;
                let nics = self.sizes.nics;
                next.group.change(|it| fixture::connected(it, now, peer, engine(at), nics));
            }
            Step::Post(nic) => match next.group.change(|group| group.poll_work(nic)) {
                Some(work) => self.posted(&mut next, work),
                None if next.group == state.group => return None,
                None => {}
            },
            Step::Land(at) => {
                let flight = next.flights[at];
                next.flights[at].landed = true;
                self.land(&mut next, &flight);
            }
            Step::LandLate(at) => {
                let flight = next.ghosts.remove(at);
                self.land(&mut next, &flight);
            }
            Step::Complete(at) => self.report(&mut next, at, Ok(())),
            Step::Fail(at) => {
                let error = if next.flights[at].ending {
                    WorkError::Flushed
                } else {
                    spend(&mut next.left.all, &mut next.left.fails);
                    WorkError::RemoteAccess
                };
                self.report(&mut next, at, Err(error));
            }
            Step::Stick(at, aborts) => {
                next.flights[at].stuck = aborts;
                spend(&mut next.left.all, &mut next.left.stalls);
                next.left.deaf -= aborts - 1;
            }
            Step::LoseReport(at) => drop(next.flights.remove(at)),
            Step::Cancel(k) => {
                spend(&mut next.left.all, &mut next.left.cancels);
                next.sent[k].stopped = true;
                let id = next.sent[k].id;
                if !next.group.change(|group| group.cancel(now, id)) {
                    next.broken = Some(Broken::EndedTwice);
                }
            }
            Step::Tick => {
                let due = next.group.poll_timeout();
                next.now = now.max(due);
                let now = next.now;
                for (sent, work) in next.sent.iter_mut().zip(&self.script) {
                    sent.stopped |= work.due && DUE <= now;
                }
                next.group.change(|group| group.handle_timeout(now));
                if next.group.poll_timeout() <= now {
                    next.broken = Some(Broken::Spins);
                }
                // Each may stop only when the one before has ended, and is aborted twice at most.
                let patience = DRAIN.saturating_mul(5) * u32::from(self.transfers());
                if now > Time::ZERO.after(patience) {
                    next.broken = Some(Broken::Lasts);
                }
            }
            Step::Lose(at) => {
                spend(&mut next.left.all, &mut next.left.losses);
                let peer = next.peers[at]?;
                let reason = DownReason::Disconnected;
                next.group.change(|group| group.handle_disconnected(now, peer, reason));
                self.gone(&mut next, peer);
            }
            Step::Remove(at) => {
                spend(&mut next.left.all, &mut next.left.removals);
                let peer = next.peers[at]?;
                let reason = DownReason::Removed;
                next.group.change(|group| group.remove_peer(now, peer, reason));
            }
            Step::Return(at) => {
                let nics = self.sizes.nics;
                let id = next.group.change(|it| fixture::accept(it, now, engine(at), nics));
                // No room while the old tenant has pieces in flight.
                next.peers[at] = Some(id.ok()?);
                spend(&mut next.left.all, &mut next.left.returns);
            }
        }
        self.events(&mut next);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("each transfer ends once", |_, state: &State| {
                state.broken != Some(Broken::EndedTwice)
            }),
            Property::always(
                "a transfer ends only when nothing of it is in flight",
                |_, state: &State| state.broken != Some(Broken::EndedInFlight),
            ),
            Property::always("nothing is written after the end", |_, state: &State| {
                state.broken != Some(Broken::WroteAfterEnd)
            }),
            Property::always("bytes land once, where they were asked for", |_, state: &State| {
                state.broken != Some(Broken::WroteAskew)
            }),
            Property::always(
                "done means that all has landed and was counted",
                |_, state: &State| state.broken != Some(Broken::NotDone),
            ),
            Property::always("never started means that nothing was posted", |_, state: &State| {
                state.broken != Some(Broken::WrongEnd)
            }),
            Property::always("nothing is posted when it may not be", |_, state: &State| {
                state.broken != Some(Broken::PostedWrongly)
            }),
            Property::always("what there is room for is taken", |_, state: &State| {
                state.broken != Some(Broken::Refused)
            }),
            Property::always("a timeout that was handled lies ahead", |_, state: &State| {
                state.broken != Some(Broken::Spins)
            }),
            Property::always("an end comes within deadline and drains", |_, state: &State| {
                state.broken != Some(Broken::Lasts)
            }),
            Property::always("no path is asked about that did not break", |_, state: &State| {
                state.broken != Some(Broken::Uncalled)
            }),
            Property::always("always comes to an end", |model: &Self, state: &State| {
                state.broken.is_some() || model.may_go_on(state) || model.has_ended(state)
            }),
            Property::always("all credits return", |model: &Self, state: &State| {
                state.broken.is_some()
                    || state.group.active() > 0
                    || !state.flights.is_empty()
                    || model.has_all_credits(state)
            }),
            Property::sometimes("all is done", |model: &Self, state: &State| {
                state.sent.len() == model.script.len()
                    && state.sent.iter().all(|sent| sent.end == Some(End::Done))
            }),
            Property::sometimes("something never started", |_, state: &State| {
                state.sent.iter().any(|sent| matches!(sent.end, Some(End::NeverStarted { .. })))
            }),
            Property::sometimes("something was quiesced", |_, state: &State| {
                state.sent.iter().any(|sent| matches!(sent.end, Some(End::Quiesced { .. })))
            }),
            Property::sometimes("a peer was aborted", |_, state: &State| state.aborted),
        ]
    }
}

const ONE_NIC: Sizes =
    Sizes { nics: 1, queue_depth: 2, peer_depth: 2, reserve: 0, transfers: 3, peers: 1 };
const TWO_NICS: Sizes = Sizes { nics: 2, peers: 2, queue_depth: 1, peer_depth: 1, ..ONE_NIC };
/// A peer's credits run out before the NIC's; one of both is for small writes alone.
const TIGHT: Sizes = Sizes { queue_depth: 3, reserve: 1, ..ONE_NIC };

/// `all` of whatever can go wrong; the same twice only where it says so.
const fn blows(all: u8) -> Blows {
    let (cancels, fails, stalls, deaf, losses, removals, returns) = (2, 1, 1, 1, 1, 1, 1);
    Blows { all, cancels, fails, stalls, deaf, losses, removals, returns }
}

fn drain(sizes: Sizes, script: &[Work], all: u8) -> Drain {
    let (script, blows, provider) = (script.to_vec(), blows(all), Provider::Honest);
    Drain { sizes, connecting: 0, script, blows, provider }
}

fn check(claim: &'static str, model: Drain, at_least: usize) {
    let Sizes { nics, peers, .. } = model.sizes;
    let (script, all) =
        (model.script.iter().map(|work| work.kind).collect::<Vec<_>>(), model.blows.all);
    let bound =
        format!("NICs: {nics}, peers: {peers}, transfers: {script:?}, blows of fate: {all}");
    explore(Claim { clause: "3 Ends", claim, bound, at_least }, model);
}

#[test]
fn transfers_to_one_peer_over_one_nic() {
    let script = [work(Kind::Split, 0), due(Kind::Express, 0)];
    let (all, at_least) = if full() { (3, 344_230) } else { (2, 127_290) };
    let model = drain(ONE_NIC, &script, all);
    check("a transfer ends once, and only when nothing of it is in flight", model, at_least);
}

#[test]
fn writes_at_once_beside_transfers() {
    let script = [work(Kind::Split, 0), work(Kind::AtOnce, 0), work(Kind::AtOnce, 0)];
    let (all, at_least) = if full() { (2, 305_153) } else { (1, 27_824) };
    let model = drain(ONE_NIC, &script, all);
    check("what is written at once ends nothing else, and keeps nobody's credit", model, at_least);
}

#[test]
fn transfers_to_two_peers_over_two_nics() {
    let script = [work(Kind::Split, 0), work(Kind::Scatter, 0)];
    let (all, at_least) = if full() { (2, 310_860) } else { (1, 33_814) };
    let model = Drain { connecting: 1, ..drain(TWO_NICS, &script, all) };
    check("a lost peer ends what goes to it, and nothing else", model, at_least);
}

#[test]
fn transfers_that_wait_for_credit() {
    let script = [work(Kind::Split, 0), due(Kind::Split, 0), work(Kind::Tiny, 0)];
    let (used, all, at_least) = if full() { (3, 1, 130_829) } else { (2, 2, 30_178) };
    let model = drain(TIGHT, &script[..used], all);
    check("every credit returns, and whoever waits for one gets it", model, at_least);
}

#[test]
fn a_long_write_with_a_trailing_immediate() {
    let script = [work(Kind::Long, 0), due(Kind::Barrier, 0)];
    let (used, all, at_least) = if full() { (2, 1, 478_485) } else { (1, 2, 53_820) };
    let model = drain(ONE_NIC, &script[..used], all);
    check("a trailing immediate follows all bytes, or never comes", model, at_least);
}

/// What an end promises rests on the provider: nothing of what it reported as ended is written any more.
#[test]
fn a_provider_that_lands_late_is_seen() {
    let model = drain(ONE_NIC, &[due(Kind::Tiny, 0)], 2);
    let model = Drain { provider: Provider::LandsLate, ..model };
    must_break(model, "nothing is written after the end");
}

/// Without aborts a stuck piece holds its transfer for ever: the drain deadline is needed.
#[test]
fn a_provider_that_ignores_aborts_is_seen() {
    let model = drain(ONE_NIC, &[due(Kind::Tiny, 0)], 2);
    let model = Drain { provider: Provider::IgnoresAborts, ..model };
    must_break(model, "always comes to an end");
}

#[test]
fn a_provider_that_loses_a_report_is_seen() {
    let model = drain(ONE_NIC, &[work(Kind::Tiny, 0)], 1);
    let model = Drain { provider: Provider::LosesReports, ..model };
    must_break(model, "always comes to an end");
}
