//! One engine as a program sees it: its memory, counters and peers, and the transfers it has under way.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use immwire_core::id::PeerId;
use immwire_core::imm::ImmTag;

use super::memory::{Source, Window};
use crate::{CountError, End, ImmCounter, Message, NetAddr, PeerState, Transfer, TransferEngine};

/// What a callback leaves, to be found later.
pub(super) type Left<T> = Arc<Mutex<Vec<T>>>;

/// An engine and what is known of it.
pub(super) struct Side {
    /// Which of all engines ever started.
    pub(super) serial: u32,
    pub(super) nics: u8,
    pub(super) counters: Vec<Option<Counter>>,
    /// By number of the other engine.
    pub(super) peers: Vec<Option<Known>>,
    /// By posted receives.
    pub(super) received: Left<Message>,
    /// Who a `PeerId` of ours is, as messages told.
    pub(super) senders: BTreeMap<PeerId, (u32, PeerId)>,
    /// Since when a `PeerId` of ours names somebody, whoever called.
    pub(super) met: BTreeMap<PeerId, Duration>,
    pub(super) windows: Vec<Window>,
    pub(super) source: Source,
    pub(super) engine: TransferEngine,
}

/// A peer, by the connection that there last was.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known {
    pub(super) id: PeerId,
    /// The engine that was there then.
    pub(super) serial: u32,
    /// Whatever went wrong before can do nothing to this connection any more.
    pub(super) since: Duration,
}

impl Side {
    /// The peer's name, if its connection stands; and was made to the engine that is there now.
    pub(super) fn up(&self, other: usize, serial: u32) -> Option<PeerId> {
        let known = self.known(other).filter(|known| known.serial == serial)?;
        let state = self.engine.peer_state(known.id);
        matches!(state, Some(PeerState::Up | PeerState::Suspect)).then_some(known.id)
    }

    pub(super) fn known(&self, other: usize) -> Option<Known> {
        *self.peers.get(other)?
    }
}

/// A counter and who waits for it.
pub(super) struct Counter {
    pub(super) tag: ImmTag,
    /// Which of all counters ever taken.
    pub(super) instance: u64,
    pub(super) wait: Option<Wait>,
    /// Consumed by waits that named peers.
    pub(super) shares: BTreeMap<PeerId, u64>,
    pub(super) handle: Arc<ImmCounter>,
}

/// A wait under way.
pub(super) struct Wait {
    pub(super) writes: u64,
    pub(super) way: Way,
}

/// How it is waited.
pub(super) enum Way {
    Callback(Left<Result<(), CountError>>),
    Future { deadline: Duration, future: Pin<Box<dyn Future<Output = Result<(), CountError>>>> },
}

/// Where an engine can be reached, dead or alive.
#[derive(Clone)]
pub(super) struct Door {
    pub(super) serial: u32,
    pub(super) address: NetAddr,
}

/// A transfer under way.
pub(super) struct Flight {
    pub(super) number: u64,
    pub(super) from: usize,
    pub(super) serial: u32,
    pub(super) handle: Handle,
    pub(super) parts: Vec<Part>,
    /// It is to be stopped then, if it has not ended.
    pub(super) deadline: Option<Duration>,
    /// It was cancelled then.
    pub(super) cancelled: Option<Duration>,
    pub(super) submitted: Duration,
    /// Its place in its stream, if it is a message.
    pub(super) message: Option<usize>,
}

impl Flight {
    /// When it was to be stopped.
    pub(super) fn stopped(&self) -> Option<Duration> {
        self.deadline.into_iter().chain(self.cancelled).min()
    }
}

/// How the end of a transfer is learned.
pub(super) enum Handle {
    Polled(Transfer),
    Callback(Left<End>),
}

impl Handle {
    pub(super) fn end(&self) -> Result<Option<End>, String> {
        match self {
            Self::Polled(transfer) => Ok(transfer.poll_end()),
            Self::Callback(ends) => {
                let ends = crate::sync::lock(ends);
                match ends.as_slice() {
                    [] => Ok(None),
                    [end] => Ok(Some(*end)),
                    _ => Err(format!("a transfer ended {} times", ends.len())),
                }
            }
        }
    }
}

/// What goes to one peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) to: usize,
    /// The engine whose memory was named.
    pub(super) serial: u32,
    pub(super) id: PeerId,
    /// The engine that the sender took for `id`.
    pub(super) peer_serial: u32,
    /// What the receiver calls the sender.
    pub(super) theirs: Option<PeerId>,
    /// Window and registration.
    pub(super) window: Option<(usize, u32)>,
    pub(super) count: Option<Count>,
}

/// What a part counts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Count {
    pub(super) tag: ImmTag,
    pub(super) writes: u64,
    /// The counter of the receiver's that had the tag then.
    pub(super) instance: Option<u64>,
}
