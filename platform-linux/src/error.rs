//! Errors of the engine: what was asked, what was found, and what may be done about it.

use std::fmt;
use std::time::Duration;

use immwire_core::group;
use immwire_core::id::PeerId;
use immwire_core::imm::{CounterError, ImmTag};
use immwire_core::mailbox;
use immwire_core::peer::{DownReason, PeerState};
use immwire_core::plan::RequestError;
use immwire_core::region::RegionError;
use immwire_core::wire::Refusal;

use crate::provider::{ConnectError, RegisterError};

/// Why an engine could not be built.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A number in the builder cannot be used.
    #[error("{what} must be {allowed}, not {found}")]
    Config {
        /// Which.
        what: &'static str,
        /// What was given.
        found: usize,
        /// What is possible.
        allowed: &'static str,
    },
    /// Mailboxes cannot be so.
    #[error("a mailbox must have {0}")]
    Mailbox(mailbox::GeometryError),
    /// The scheduler refused the configuration.
    #[error("{0}")]
    Group(group::ConfigError),
    /// The transport could not start.
    #[error("the shared-memory provider could not start: {0}")]
    Provider(#[source] crate::shm::ShmError),
    /// The same, of libfabric's.
    #[error("the libfabric provider could not start: {0}")]
    Libfabric(#[source] crate::libfabric::LibfabricError),
    /// The same, of verbs'.
    #[error("the verbs provider could not start: {0}")]
    Verbs(#[source] crate::verbs::VerbsError),
    /// Shared memory and the transport make no engine.
    #[error("shared memory beside another transport: {0}")]
    Span(#[source] crate::span::SpanBuildError),
    /// GPUs' memory cannot be staged.
    #[error("{0}")]
    Staging(#[source] crate::staging::StagingError),
    /// Memory for signals between GPUs and the CPU could not be had.
    #[error("memory for signals of GPUs: {0}")]
    Memory(#[source] crate::provider::RegisterError),
    /// The kernel refused something else that an engine needs.
    #[error("{call}: {source}")]
    Os {
        /// The call.
        call: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

/// Why a request was refused before anything was posted.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// All transfers are in use, each until it has ended and its handle is dropped: drop handles of those that have ended, wait for another to be
    /// so (`TransferEngine::wait_capacity`), then retry.
    #[error(
        "all {capacity} transfers are in use; drop the handles of those that have ended, or wait for one to end, then submit again"
    )]
    Full {
        /// Transfers that may be under way, or have a handle, at a time.
        capacity: usize,
    },
    /// The request contradicts itself or its regions.
    #[error("{0}")]
    Request(#[from] RequestError),
    /// A range lies outside its region.
    #[error("{0}")]
    Region(#[from] RegionError),
    /// The source was registered with another engine, or allocated by one: this one's devices do not know it.
    #[error("the source is a region of another engine: register the memory with this one, too")]
    ForeignRegion,
    /// The message is longer than this engine's mailboxes take.
    #[error(
        "a message of {len} bytes is longer than the {max} bytes of a mailbox slot; use a write"
    )]
    MessageTooLarge {
        /// Its length.
        len: usize,
        /// The most there can be.
        max: usize,
    },
    /// The engine has been shut down.
    #[error("the engine has stopped: build another, and add its peers again")]
    EngineStopped,
}

/// Why a transfer did not complete.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum TransferError {
    /// It was stopped on its way: by its caller, its deadline, its peer or a NIC.
    #[error("{0}")]
    Stopped(group::TransferError),
    /// The scheduler did not take it.
    #[error("{0}")]
    Refused(group::SubmitError),
    /// The message could not be handed over.
    #[error("{0}")]
    Message(mailbox::SendError),
    /// The engine was shut down first.
    #[error("the engine was stopped")]
    EngineStopped,
}

/// How a transfer ended. In every case its memory is the caller's again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "only `Done` means that the bytes arrived"]
pub enum End {
    /// Everything was written and, where asked for, announced.
    Done,
    /// Nothing of it was ever posted.
    NeverStarted {
        /// Why.
        error: TransferError,
    },
    /// Some of it may have been written; nothing more will be.
    Quiesced {
        /// Why.
        error: TransferError,
    },
}

impl End {
    /// `Ok` if everything arrived.
    ///
    /// # Errors
    ///
    /// The reason, of [`End::NeverStarted`] and [`End::Quiesced`] alike.
    pub const fn ok(self) -> Result<(), TransferError> {
        match self {
            Self::Done => Ok(()),
            Self::NeverStarted { error } | Self::Quiesced { error } => Err(error),
        }
    }
}

impl From<group::End> for End {
    fn from(end: group::End) -> Self {
        match end {
            group::End::Done => Self::Done,
            group::End::NeverStarted { error } => {
                Self::NeverStarted { error: TransferError::Stopped(error) }
            }
            group::End::Quiesced { error } => {
                Self::Quiesced { error: TransferError::Stopped(error) }
            }
        }
    }
}

/// A wait took longer than it was given. What was waited for goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not ended within {after:?}; its memory is still in use: wait again, or cancel it")]
pub struct WaitTimeout {
    /// The time that was given.
    pub after: Duration,
}

/// What one peer had sent when a wait for a count timed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerShare {
    /// The peer.
    pub peer: PeerId,
    /// Writes and pages of it that arrived, whole ones.
    pub arrived: u64,
    /// Writes and pages that were expected of it, if the caller said so.
    pub expected: Option<u64>,
    /// Where it stood then; none of one that nobody knows, or that went long ago.
    pub state: Option<PeerState>,
}

/// Immediates that came for no counter while one was waited for: whoever sends them may have the tag of one that is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strays {
    /// How many, since the counter was made that is waited for.
    pub count: u64,
    /// Who sent the last of them.
    pub peer: PeerId,
    /// What that was for.
    pub tag: ImmTag,
    /// The tag of the counter that is waited for.
    pub instead: ImmTag,
}

impl fmt::Display for Strays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, peer, tag, instead } = self;
        let (is, bits, own) =
            (if *count == 1 { "immediate" } else { "immediates" }, tag.bits(), instead.bits());
        write!(
            f,
            "; since it was made, {count} {is} came that no counter takes, the last from {peer} for {tag} ({bits:#x}), and this one \
             is {instead} ({own:#x}): has the sender the tag of one that is gone?"
        )
    }
}

/// Why a count was not reached.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CountError {
    /// It took longer than it was given. What has arrived is kept for the next wait.
    #[error(
        "{missing} of {target} writes had not arrived after {after:?}{}{}",
        shares(.peers), strays.map(|it| it.to_string()).unwrap_or_default(),
    )]
    Timeout {
        /// Writes waited for.
        target: u64,
        /// Writes that had not arrived, a part of one counted as one.
        missing: u64,
        /// The time that was given.
        after: Duration,
        /// Who had sent what.
        peers: Vec<PeerShare>,
        /// What has come for other counters, which are none any more, or never were.
        strays: Option<Strays>,
    },
    /// Somebody else waits on the same counter.
    #[error("another wait on this counter is under way: one waits at a time")]
    Busy,
    /// The counter cannot be used so.
    #[error("{0}")]
    Counter(CounterError),
    /// The engine was shut down.
    #[error("the engine has stopped: build another, and add its peers again")]
    EngineStopped,
}

impl From<CounterError> for CountError {
    fn from(error: CounterError) -> Self {
        match error {
            CounterError::AlreadyArmed { .. } => Self::Busy,
            other => Self::Counter(other),
        }
    }
}

/// Names who is missing; whoever is complete is not worth the reader's time.
fn shares(peers: &[PeerShare]) -> String {
    let late = peers.iter().filter(|share| share.expected.is_none_or(|n| share.arrived < n));
    let named: Vec<String> = late
        .map(|share| {
            let state = match share.state {
                Some(PeerState::Up) => String::new(),
                Some(state) => format!(", {state},"),
                None => ", of which nothing is known,".to_owned(),
            };
            let of = share.expected.map_or(String::new(), |expected| format!(" of {expected}"));
            format!("{}{state} sent {}{of}", share.peer, share.arrived)
        })
        .collect();
    if named.is_empty() { String::new() } else { format!(" ({})", named.join(", ")) }
}

/// Why a peer could not be added.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum AddPeerError {
    /// The transport cannot reach the address.
    #[error("{0}")]
    Connect(#[from] ConnectError),
    /// No room for another peer.
    #[error("{0}; build the engine with more `peers`")]
    Full(group::PeersFull),
    /// Memory for the peer's mailbox could not be had.
    #[error("{0}")]
    Memory(#[from] RegisterError),
    /// The engine did not answer: it has stopped, or nobody polls it.
    #[error("the engine does not answer: it has stopped, or nobody polls its driver")]
    NoAnswer,
}

/// What to do about it, where that does not go without saying.
const fn remedy(reason: DownReason) -> &'static str {
    match reason {
        DownReason::Idle => "; add it again when it is of use",
        DownReason::PathLost { .. } => "; add it again",
        DownReason::Refused(Refusal::Version { .. }) => "; run the same version at both ends",
        DownReason::Refused(Refusal::Busy) => {
            "; its log says what it lacks: have its engine built for more peers, or its limits raised"
        }
        DownReason::Refused(Refusal::Unauthorised) => {
            "; have both ends run as the same user of one host, or give both the same group key"
        }
        DownReason::Refused(Refusal::NoWay) => {
            "; see that the networks of both ends lead to each other, NIC by NIC"
        }
        DownReason::NeverAnswered
        | DownReason::Silent { .. }
        | DownReason::Disconnected
        | DownReason::Refused(Refusal::ShuttingDown | Refusal::Elsewhere) => {
            "; once it runs again, add it by its new address"
        }
        _ => "",
    }
}

/// Why a peer is not up.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// It is gone.
    #[error("{peer} is down: {reason}{}", remedy(*reason))]
    Down {
        /// Which.
        peer: PeerId,
        /// Why.
        reason: DownReason,
    },
    /// Nothing is known of it.
    #[error("there is no {peer}: it was removed, or was another engine's; add it")]
    Unknown {
        /// As asked.
        peer: PeerId,
    },
    /// It has not answered within the time given.
    #[error("{peer} has not answered within {after:?}: is it running, and polled?")]
    Timeout {
        /// Which.
        peer: PeerId,
        /// The time given.
        after: Duration,
    },
}

/// Why no message came.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecvError {
    /// None arrived within the time given.
    #[error("no message within {after:?}")]
    Timeout {
        /// The time given.
        after: Duration,
    },
    /// The engine has been shut down.
    #[error("the engine has stopped: build another, and add its peers again")]
    EngineStopped,
}

/// Why a counter could not be had.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CounterTaken {
    /// All are in use.
    #[error("all {capacity} counters are in use; drop some, or build the engine with more")]
    AllTaken {
        /// Counters there are.
        capacity: u16,
    },
    /// The one asked for is in use.
    #[error("counter {slot} is in use: drop it, or take any that is free")]
    InUse {
        /// Which.
        slot: u16,
    },
    /// There is no such counter.
    #[error("there is no counter {slot}, only 0 to {}", .capacity.saturating_sub(1))]
    NoSuchCounter {
        /// Which.
        slot: u16,
        /// Counters there are.
        capacity: u16,
    },
}
