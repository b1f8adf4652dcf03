//! Who is left out of an exchange, since when, and why; and the way to end the waits of a rank.
//!
//! Can be asked at any time, from any thread, and waits for nothing but another who asks. It refuses to know who is to be left out.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use immwire_core::moe::{RoutingError, TableError};

use crate::error::{PeerError, TransferError};
use crate::sync::lock;

/// Which part of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Before the first.
    SetUp,
    /// Choices and tokens. With the first chunk of tokens come the choices.
    Dispatch,
    /// Results.
    Combine,
}

impl Phase {
    /// "set-up", "dispatch", "combine".
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SetUp => "set-up",
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
        }
    }
}

/// Why a rank is left out.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    /// It sent nothing in time, and did not say that it is kept waiting itself.
    #[error("nothing came within {after:?}")]
    Late {
        /// The time given.
        after: Duration,
    },
    /// It sent what it owed, but did not take in time what was sent to it.
    #[error("what was sent to it was not taken within {after:?}")]
    NotTaken {
        /// The time given.
        after: Duration,
    },
    /// There was no room to write to it in time.
    #[error("no room to write to it within {after:?}")]
    NoRoom {
        /// The time given.
        after: Duration,
    },
    /// The wait for it was ended by [`Control::abort`].
    #[error("the wait for it was aborted")]
    Aborted,
    /// Its engine is gone.
    #[error("{0}")]
    Gone(PeerError),
    /// A write to it failed.
    #[error("a write to it failed: {0}")]
    Write(TransferError),
    /// It left this rank out: this one was late there, or it has failed.
    #[error("it left this rank out")]
    LeftUs,
    /// What came from it is no table of this round.
    #[error("{0}")]
    Table(TableError),
    /// Its choices are none.
    #[error("{0}")]
    Routing(RoutingError),
}

/// A rank that is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Absent {
    /// The rank.
    pub rank: u32,
    /// The round in which it was missed, from 1 on.
    pub round: u64,
    /// In which part of it.
    pub phase: Phase,
    /// Which chunk is the first that is missing.
    pub chunk: u32,
    /// Why.
    pub why: Why,
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, round, phase, chunk, why } = self;
        write!(f, "rank {rank}, from chunk {chunk} of {} of round {round} on: {why}", phase.name())
    }
}

/// What went wrong until now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Who is left out, in the order in which they were.
    pub absent: Vec<Absent>,
}

/// What is known of an exchange, and what can be asked of it, while another thread is in a call.
#[derive(Debug)]
pub struct Control {
    world: u32,
    is_aborted: AtomicBool,
    absent: Mutex<Vec<Absent>>,
}

impl Control {
    pub(super) fn new(world: u32) -> Self {
        // Each rank is left out once.
        let absent = Mutex::new(Vec::with_capacity(world as usize));
        Self { world, is_aborted: AtomicBool::new(false), absent }
    }

    /// What went wrong until now: who is left out, since when, and why.
    #[must_use]
    pub fn report(&self) -> Report {
        Report { absent: lock(&self.absent).clone() }
    }

    /// The ranks that are not left out, this one included.
    #[must_use]
    pub fn active_ranks(&self) -> Vec<u32> {
        let absent = lock(&self.absent);
        let is_active = |rank: &u32| !absent.iter().any(|absent| absent.rank == *rank);
        (0..self.world).filter(is_active).collect()
    }

    /// Ends all waits of this rank for others within some 20 ms, as if they had lasted too long: those to come, too. Who has not sent by
    /// then is left out. What is still read for writes to them is waited for nevertheless: two drain times of the engine at most.
    pub fn abort(&self) {
        // It tells no more than itself.
        self.is_aborted.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::Relaxed)
    }

    pub(super) fn put_down(&self, absent: Absent) {
        lock(&self.absent).push(absent);
    }
}
