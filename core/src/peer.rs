//! Is a peer there? A step machine fed with what was heard and what the time is.
//!
//! ```text
//!   Connecting ── connected ──▶ Up ◀── heard ── Suspect
//!       │                       │ └── silence ──▶ │
//!       └── deadline, refusal ─▶ Down ◀───────────┘   (also by loss, removal, disuse, a broken protocol)
//! ```
//!
//! Knows no clock, socket or address: instants come in as arguments, and what is to be done is polled.
//! The side that was called runs the same machine, from [`Peer::accepted`].
//!
//! # Invariants
//!
//! 1. `Down` is final: a peer that returns is another [`crate::id::PeerId`], with a machine of its own.
//! 2. `Down` is reported exactly once, and nothing is asked for after that report.
//! 3. A peer is suspected, or lost by silence, only if nothing was heard for the time configured.
//! 4. It is asked to part only if it was not said to be used for the time configured, and not used any more until it was
//!    answered ([`Peer::parting`]), that very question. Whether it parts is the other end's to decide: it alone knows what it is about to do.
//! 5. Calling `handle_timeout` late, or less often, ends in the same machine as calling it on time.
//! 6. Unless it is `Down`, or the configuration says "never", a timeout lies ahead: all waits end.
//!
//! The tests below walk every sequence of events over a few instants against a plain record of them.

use core::fmt;
use core::time::Duration;

use crate::id::{EngineId, NicIndex, Time};
use crate::mailbox::Round;
use crate::wire::Refusal;

/// The shortest heartbeat interval: a shorter one is taken for this.
pub const MIN_HEARTBEAT: Duration = Duration::from_millis(1);

/// How long to wait for what. `Duration::MAX` means for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LivenessConfig {
    /// When nothing was sent for so long, a heartbeat is, after a lone write up to so much later; at least [`MIN_HEARTBEAT`]. The shorter
    /// interval of both ends counts. Whoever gives a peer up must wait for two and more ([`LivenessConfig::gives_time`]).
    pub heartbeat: Duration,
    /// When nothing was heard for so long, the peer is suspected.
    pub suspect_after: Duration,
    /// When nothing was heard for so long, the peer is lost. Two intervals of heartbeats are the least; a NIC that begins to stand still costs one
    /// more, where others go on.
    pub down_after: Duration,
    /// A connection that was started ends in so long, one way or the other.
    pub connect_deadline: Duration,
    /// When the connection was of no use for so long, the peer is asked to end it, so that what it takes is free for others; at
    /// least [`LivenessConfig::heartbeat`]. A peer to whom it is of use says so, and is asked again after as long. Use is
    /// what transfers and messages do, from the time that they are submitted.
    pub idle_after: Duration,
}

impl LivenessConfig {
    /// Whether who lives is heard before it is given up: two intervals of heartbeats may pass without a word.
    #[must_use]
    pub fn gives_time(&self) -> bool {
        self.down_after >= self.heartbeat.max(MIN_HEARTBEAT).saturating_mul(2)
    }
}

impl Default for LivenessConfig {
    /// A heartbeat every 500 ms, suspicion after 2 s, loss after 10 s, 10 s to connect, as long without use as may be.
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(500),
            suspect_after: Duration::from_secs(2),
            down_after: Duration::from_secs(10),
            connect_deadline: Duration::from_secs(10),
            idle_after: Duration::MAX,
        }
    }
}

/// Where a peer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PeerState {
    /// It was called and has not answered yet.
    Connecting,
    /// It is there.
    Up,
    /// It has been silent for longer than it should.
    Suspect,
    /// It is gone, for good.
    Down(DownReason),
}

impl fmt::Display for PeerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connecting => f.write_str("connecting"),
            Self::Up => f.write_str("up"),
            Self::Suspect => f.write_str("suspect"),
            Self::Down(reason) => write!(f, "down: {reason}"),
        }
    }
}

/// Why a peer is gone.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DownReason {
    /// It did not answer before the deadline.
    NeverAnswered,
    /// It, or we, did not want the connection.
    Refused(Refusal),
    /// Nothing was heard of it.
    Silent {
        /// For how many milliseconds that was allowed.
        for_ms: u64,
    },
    /// Neither end had used the connection for as long as one of them allows.
    Idle,
    /// The connection was lost.
    Disconnected,
    /// We removed it.
    Removed,
    /// It broke the protocol.
    Protocol,
    /// It called again: the same engine is a new peer.
    Replaced,
    /// A path from this NIC of ours broke, and it was not to be known what had arrived over it.
    PathLost {
        /// Our NIC.
        nic: NicIndex,
    },
}

impl fmt::Display for DownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeverAnswered => f.write_str("never answered"),
            Self::Refused(refusal) => write!(f, "connection refused: {refusal}"),
            Self::Silent { for_ms } => write!(f, "silent for {for_ms} ms"),
            Self::Idle => f.write_str("not used for as long as one end allows"),
            Self::Disconnected => f.write_str("connection lost"),
            Self::Removed => f.write_str("removed"),
            Self::Protocol => f.write_str("broke the protocol"),
            Self::Replaced => f.write_str("replaced by a new connection of the same engine"),
            Self::PathLost { nic } => {
                write!(f, "its path over nic {nic} broke, and what had arrived is not known")
            }
        }
    }
}

/// What the machine asks its caller to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Cut the connection: nothing may be written to the peer any more.
    Disconnect,
    /// Tell whoever wants to know; the state differs from the one reported last.
    Report(PeerState),
    /// Send [`crate::mailbox::Control::Heartbeat`]. That it is sent is known here.
    SendHeartbeat,
}

/// What a peer was let off, since it was heard, for looks at the clock that came late.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Late {
    Never,
    /// What was heard of it may have come as late as the look.
    Moved,
    /// It was given time to be heard.
    Spared,
}

/// One peer's liveness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    config: LivenessConfig,
    state: PeerState,
    /// What the caller was told last; `Connecting` is told by calling.
    reported: PeerState,
    /// When the peer was heard last; when it was called, while connecting.
    heard: Time,
    /// Nobody could hear it for a while, and `heard` is later than it was for that.
    late: Late,
    /// When it was used last; when it was connected, if never. Kept only where that may end it.
    used: Time,
    /// It is asked to part, and how often it was.
    parting: bool,
    asked: Round,
    /// When something was sent last; later heartbeats due at whole intervals from there.
    sent: Time,
    heartbeat: bool,
    disconnect: bool,
}

impl Peer {
    /// A peer that we call at `now`.
    #[must_use]
    pub fn new(config: LivenessConfig, now: Time) -> Self {
        let heartbeat = config.heartbeat.max(MIN_HEARTBEAT);
        Self {
            config: LivenessConfig {
                heartbeat,
                idle_after: config.idle_after.max(heartbeat),
                ..config
            },
            state: PeerState::Connecting,
            reported: PeerState::Connecting,
            heard: now,
            late: Late::Never,
            used: Time::ZERO,
            parting: false,
            asked: 0,
            sent: now,
            heartbeat: false,
            disconnect: false,
        }
    }

    /// A peer that called us, and whom we answered at `now`: it is up.
    ///
    /// `asked` is how often it asks to hear from us ([`crate::wire::Hello::heartbeat_ms`]).
    #[must_use]
    pub fn accepted(config: LivenessConfig, asked: Duration, now: Time) -> Self {
        let mut peer = Self::new(config, now);
        peer.handle_connected(asked, now);
        peer
    }

    /// Where the peer stands.
    #[must_use]
    pub const fn state(&self) -> PeerState {
        self.state
    }

    /// The peer answered, and asks to hear from us every `asked`: the shorter interval counts.
    ///
    /// Changes nothing unless connecting.
    pub fn handle_connected(&mut self, asked: Duration, now: Time) {
        if self.state == PeerState::Connecting {
            self.state = PeerState::Up;
            self.config.heartbeat = self.config.heartbeat.min(asked).max(MIN_HEARTBEAT);
            (self.heard, self.sent) = (self.heard.max(now), self.sent.max(now));
            self.handle_used(now);
        }
    }

    /// Anything came from the peer. A few instructions; call it once for each batch.
    ///
    /// Call it before `handle_timeout`: what came while this engine slept is a sign of life.
    pub fn handle_heard(&mut self, now: Time) {
        match self.state {
            PeerState::Up => {}
            PeerState::Suspect => self.state = PeerState::Up,
            PeerState::Connecting | PeerState::Down(_) => return,
        }
        self.heard = self.heard.max(now);
        self.late = Late::Never;
    }

    /// The connection is of use: something was written to the peer, or the peer has written something, or says that it does. Whoever is
    /// asked to part may have done so before it heard of that, so this is no answer.
    pub fn handle_used(&mut self, now: Time) {
        let is_there = matches!(self.state, PeerState::Up | PeerState::Suspect);
        if is_there && self.config.idle_after < Duration::MAX {
            self.used = self.used.max(now);
        }
    }

    /// The peer answers that it stays, to what it was asked for the `round`th time. Returns whether it was waited for.
    #[must_use]
    pub fn handle_stays(&mut self, now: Time, round: Round) -> bool {
        let answers = self.parting && round == self.asked;
        if answers {
            self.parting = false;
            self.handle_used(now);
        }
        answers
    }

    /// For the how-manieth time the peer is asked to part, if it is, and has not answered: it is not written to.
    #[must_use]
    pub const fn parting(&self) -> Option<Round> {
        if self.parting { Some(self.asked) } else { None }
    }

    /// When it is to be asked to part.
    fn idle(&self) -> Time {
        if self.parting { Time::NEVER } else { self.used.after(self.config.idle_after) }
    }

    /// Nobody looked at the clock from `since` until `now`: what was heard in between may have come as late as that. Of whom nothing
    /// was, it may be on its way still, where all of a machine stood still, or what takes it in: it is not silent before two heartbeats' time. Once
    /// until it is heard: who is dead is given up all the same.
    pub fn handle_late(&mut self, since: Time, now: Time) {
        if !matches!(self.state, PeerState::Up | PeerState::Suspect) {
            return;
        }
        if self.heard >= since && self.late == Late::Never {
            self.heard = self.heard.max(now);
            self.late = Late::Moved;
            return;
        }
        let beats = self.config.heartbeat.saturating_mul(2).min(self.config.down_after);
        let missing = now.after(beats).since(self.heard.after(self.config.down_after));
        if self.late != Late::Spared && missing > Duration::ZERO {
            self.heard = self.heard.after(missing);
            self.late = Late::Spared;
        }
    }

    /// Anything was sent to the peer: the next heartbeat is an interval away.
    pub fn handle_sent(&mut self, now: Time) {
        if !matches!(self.state, PeerState::Down(_)) {
            self.sent = self.sent.max(now);
            self.heartbeat = false;
        }
    }

    /// The connection is gone, or never came to be.
    pub fn handle_disconnected(&mut self, reason: DownReason) {
        self.go_down(reason, false);
    }

    /// We end the connection: the caller is asked to cut it.
    pub fn close(&mut self, reason: DownReason) {
        self.go_down(reason, true);
    }

    /// It is `now`; does what has fallen due.
    pub fn handle_timeout(&mut self, now: Time) {
        match self.state {
            PeerState::Connecting => {
                if due(self.heard.after(self.config.connect_deadline), now) {
                    self.go_down(DownReason::NeverAnswered, true);
                }
            }
            PeerState::Up | PeerState::Suspect => {
                if due(self.heard.after(self.config.down_after), now) {
                    let for_ms = self.config.down_after.as_millis().try_into().unwrap_or(u64::MAX);
                    self.go_down(DownReason::Silent { for_ms }, true);
                    return;
                }
                if due(self.heard.after(self.config.suspect_after), now) {
                    self.state = PeerState::Suspect;
                }
                if due(self.idle(), now) {
                    (self.parting, self.heartbeat) = (true, true);
                    self.asked = self.asked.wrapping_add(1);
                }
                self.beat(now);
            }
            PeerState::Down(_) => {}
        }
    }

    /// When `handle_timeout` has something to do at the earliest; [`Time::NEVER`] if nothing.
    #[must_use]
    pub fn next_timeout(&self) -> Time {
        let soon = self.sent.after(self.config.heartbeat).min(self.idle());
        match self.state {
            PeerState::Connecting => self.heard.after(self.config.connect_deadline),
            PeerState::Up => {
                let silence = self.config.suspect_after.min(self.config.down_after);
                soon.min(self.heard.after(silence))
            }
            PeerState::Suspect => soon.min(self.heard.after(self.config.down_after)),
            PeerState::Down(_) => Time::NEVER,
        }
    }

    /// The next thing to do, if any; each is returned once.
    pub fn poll_action(&mut self) -> Option<Action> {
        if core::mem::take(&mut self.disconnect) {
            return Some(Action::Disconnect);
        }
        if self.reported != self.state {
            self.reported = self.state;
            return Some(Action::Report(self.state));
        }
        core::mem::take(&mut self.heartbeat).then_some(Action::SendHeartbeat)
    }

    /// Whether a heartbeat is due at `now`: [`Peer::handle_timeout`] would ask for one.
    #[must_use]
    pub fn is_beat_due(&self, now: Time) -> bool {
        let is_there = matches!(self.state, PeerState::Up | PeerState::Suspect);
        is_there && due(self.sent.after(self.config.heartbeat), now)
    }

    /// The heartbeat of another peer goes at `now`: this one's goes along if it is due within an eighth of the interval. So an
    /// engine wakes at most eight times an interval for the heartbeats of all its peers, however many they are and whenever
    /// they came.
    pub fn beat_along(&mut self, now: Time) {
        if self.is_beat_due(now.after(self.config.heartbeat / 8)) {
            self.sent = now;
            self.heartbeat = true;
        }
    }

    /// Asks for a heartbeat if an interval has passed, and moves to the last whole interval.
    fn beat(&mut self, now: Time) {
        let interval = self.config.heartbeat.as_nanos().max(1);
        let late = now.since(self.sent).as_nanos();
        if late >= interval {
            let whole = u64::try_from(late - late % interval).unwrap_or(u64::MAX);
            self.sent = self.sent.after(Duration::from_nanos(whole));
            self.heartbeat = true;
        }
    }

    fn go_down(&mut self, reason: DownReason, disconnect: bool) {
        if !matches!(self.state, PeerState::Down(_)) {
            let agreed = self.parting && reason == DownReason::Disconnected;
            self.state = PeerState::Down(if agreed { DownReason::Idle } else { reason });
            (self.heartbeat, self.parting, self.asked) = (false, false, 0);
            self.disconnect = disconnect;
            // No instant matters any more: machines with the same future compare equal.
            (self.heard, self.used, self.sent) = (Time::ZERO, Time::ZERO, Time::ZERO);
        }
    }
}

fn due(deadline: Time, now: Time) -> bool {
    deadline != Time::NEVER && deadline <= now
}

/// Which of two connections is kept, when both sides called each other at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Crossing {
    /// The one that we started; the other is answered with [`Refusal::Crossed`].
    KeepMine,
    /// The one that the peer started.
    KeepTheirs,
    /// Neither: an engine called itself ([`Refusal::Myself`]).
    Myself,
}

/// Decides which connection is kept: the one that the engine with the smaller identity started.
///
/// Both sides decide alike without a word.
#[must_use]
pub fn resolve_crossing(mine: EngineId, theirs: EngineId) -> Crossing {
    match mine.cmp(&theirs) {
        core::cmp::Ordering::Less => Crossing::KeepMine,
        core::cmp::Ordering::Greater => Crossing::KeepTheirs,
        core::cmp::Ordering::Equal => Crossing::Myself,
    }
}

#[cfg(test)]
mod tests;
