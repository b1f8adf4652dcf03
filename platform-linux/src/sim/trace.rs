//! What happened, when and where: for people, and to compare runs.

use std::collections::VecDeque;
use std::fmt;

use immwire_core::id::{NicIndex, Time};

/// One thing that happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceEvent {
    /// When.
    pub at: Time,
    /// Number of the engine that it happened to.
    pub engine: u32,
    /// Its NIC, if one was concerned.
    pub nic: Option<NicIndex>,
    /// What.
    pub what: What,
}

/// What can happen. Engines are named by number, in the order in which they were made; messages by
/// their number on their path.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the fields are what they are called")]
pub enum What {
    /// It posted a message.
    Posted { to: u32, number: u64, bytes: u64, imm: Option<u32> },
    /// A message to it arrived; with an immediate, that is there to be polled.
    Arrived { from: u32, number: u64, bytes: u64, imm: Option<u32> },
    /// A message to it was refused: its region is not, or no longer, what the sender believes.
    Refused { from: u32, number: u64 },
    /// A message of its was completed.
    Completed { to: u32, number: u64, ok: bool },
    /// A message of its was lost with its path.
    Lost { to: u32, number: u64 },
    /// A message of its ended without arriving, or nobody knows.
    Failed { to: u32, number: u64 },
    /// A post found the queue full.
    QueueFull,
    /// It calls.
    Calls { to: u32 },
    /// It answered a call.
    Answered { to: u32 },
    /// It was refused.
    CallRefused { by: u32 },
    /// A connection of its is over.
    Disconnected { from: u32 },
    /// A NIC of its went down.
    NicDown,
    /// It is back.
    NicUp,
    /// A path of its broke.
    PathBroken { to: u32, remote: NicIndex },
    /// It fenced a peer's path, on which so many messages had arrived since the connection was made.
    Fenced { from: u32, remote: NicIndex, arrived: u64 },
    /// A broken path of its was settled.
    Settled { to: u32, remote: NicIndex, done: u32, undelivered: u32 },
    /// A path of its can be used again.
    PathRestored { to: u32, remote: NicIndex },
    /// It is no more, and did not say so.
    Killed,
    /// It stopped.
    Left,
    /// A registration failed.
    RegistrationFailed,
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.at.as_nanos();
        write!(f, "{:>10}.{:03} us  engine {}", nanos / 1000, nanos % 1000, self.engine)?;
        if let Some(nic) = self.nic {
            write!(f, " nic {nic}")?;
        }
        f.write_str(": ")?;
        let imm = |f: &mut fmt::Formatter<'_>, imm: Option<u32>| match imm {
            Some(imm) => write!(f, ", imm {imm:#010x}"),
            None => Ok(()),
        };
        match self.what {
            What::Posted { to, number, bytes, imm: bits } => {
                write!(f, "posted #{number} to engine {to}, {bytes} bytes")?;
                imm(f, bits)
            }
            What::Arrived { from, number, bytes, imm: bits } => {
                write!(f, "#{number} of engine {from} arrived, {bytes} bytes")?;
                imm(f, bits)
            }
            What::Refused { from, number } => write!(f, "refused #{number} of engine {from}"),
            What::Completed { to, number, ok } => {
                let how = if ok { "" } else { " with an error" };
                write!(f, "#{number} to engine {to} completed{how}")
            }
            What::Lost { to, number } => write!(f, "#{number} to engine {to} is lost"),
            What::Failed { to, number } => write!(f, "#{number} to engine {to} reported as failed"),
            What::QueueFull => f.write_str("found the queue full"),
            What::Calls { to } => write!(f, "calls engine {to}"),
            What::Answered { to } => write!(f, "answered engine {to}"),
            What::CallRefused { by } => write!(f, "was refused by engine {by}"),
            What::Disconnected { from } => write!(f, "lost its connection to engine {from}"),
            What::NicDown => f.write_str("went down"),
            What::NicUp => f.write_str("is back"),
            What::PathBroken { to, remote } => {
                write!(f, "path to engine {to} nic {remote} broke")
            }
            What::Fenced { from, remote, arrived } => {
                write!(f, "fenced the path from engine {from} nic {remote}, {arrived} had arrived")
            }
            What::Settled { to, remote, done, undelivered } => write!(
                f,
                "settled the path to engine {to} nic {remote}: {done} done, {undelivered} undelivered"
            ),
            What::PathRestored { to, remote } => {
                write!(f, "path to engine {to} nic {remote} is restored")
            }
            What::Killed => f.write_str("was killed"),
            What::Left => f.write_str("stopped"),
            What::RegistrationFailed => f.write_str("could not register memory"),
        }
    }
}

/// The last events, as many as there is room for; none costs a comparison.
#[derive(Debug, Default)]
pub(super) struct Trace {
    capacity: usize,
    events: VecDeque<TraceEvent>,
}

impl Trace {
    pub(super) fn keep(&mut self, capacity: usize) {
        self.capacity = capacity;
        let excess = self.events.len().saturating_sub(capacity);
        self.events.drain(..excess);
    }

    pub(super) fn record(&mut self, event: TraceEvent) {
        if self.capacity == 0 {
            return;
        }
        if self.events.len() >= self.capacity {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    pub(super) fn events(&self) -> Vec<TraceEvent> {
        self.events.iter().copied().collect()
    }
}
