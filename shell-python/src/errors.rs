//! Errors of the engine as Python exceptions: a class for what can be done about it, fields for what
//! was found. The classes are in `immwire/_errors.py`.

use std::time::Duration;

use immwire::core::group;
use immwire::core::id::PeerId;
use immwire::core::mailbox::SendError;
use immwire::libfabric::LibfabricError;
use immwire::moe::{MoeError, SeatError};
use immwire::provider::RevokeError;
use immwire::staging::StagingError;
use immwire::verbs::VerbsError;
use immwire::{
    AccessError, AddPeerError, BuildError, CountError, CounterTaken, End, PeerError, PeerShare,
    RecvError, RegisterError, StreamWaitError, SubmitError, TransferError,
};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::sync::Entangled;
use crate::values;

/// Fields beyond the message, by name.
type Fields<'py> = Bound<'py, PyDict>;

/// An instance of class `name`; if that fails, what went wrong instead.
fn raise(name: &str, message: &str, fill: impl FnOnce(&Fields<'_>) -> PyResult<()>) -> PyErr {
    Python::attach(|py| {
        let make = || {
            let fields = PyDict::new(py);
            fill(&fields)?;
            let class = py.import(intern!(py, "immwire._errors"))?.getattr(name)?;
            class.call((message,), Some(&fields))
        };
        make().map_or_else(|error| error, PyErr::from_value)
    })
}

fn plain(name: &str, error: &impl ToString) -> PyErr {
    raise(name, &error.to_string(), |_| Ok(()))
}

fn set_peer(fields: &Fields<'_>, peer: PeerId) -> PyResult<()> {
    fields.set_item(intern!(fields.py(), "peer"), values::PeerId::from(peer))
}

fn set_deadline(fields: &Fields<'_>, deadline: Duration) -> PyResult<()> {
    fields.set_item(intern!(fields.py(), "deadline"), deadline.as_secs_f64())
}

pub(crate) fn config(message: &str) -> PyErr {
    raise("ConfigError", message, |_| Ok(()))
}

pub(crate) fn request(message: &str) -> PyErr {
    raise("RequestError", message, |_| Ok(()))
}

pub(crate) fn closed(what: &str) -> PyErr {
    raise("EngineClosed", &format!("the {what} is closed"), |_| Ok(()))
}

pub(crate) fn in_callback(entangled: Entangled) -> PyErr {
    let message = match entangled {
        Entangled::Own => {
            "an engine cannot be closed by one of its callbacks, which closing waits for"
        }
        Entangled::Mutual => {
            "the engine cannot be closed by this callback: closing waits for the engine's own callbacks, and one of \
             them is closing the engine whose callback this is"
        }
    };
    raise("ImmwireError", message, |_| Ok(()))
}

pub(crate) fn forked() -> PyErr {
    let message = "this was made before the process forked, and belongs to the parent: \
                   an engine's threads do not survive a fork; make a new engine in the child (one with GPUs in a process \
                   that was started by spawn, if the parent had used CUDA)";
    raise("ForkedError", message, |_| Ok(()))
}

pub(crate) fn unsupported(message: &str) -> PyErr {
    raise("UnsupportedMemory", message, |_| Ok(()))
}

pub(crate) fn region_closed() -> PyErr {
    raise("RegionError", "the region is closed", |_| Ok(()))
}

pub(crate) fn region_views(views: usize) -> PyErr {
    let message = format!(
        "the region cannot be closed while {views} views of its memory exist (memoryview, numpy \
         array, ...): delete them first"
    );
    raise("RegionInUse", &message, |_| Ok(()))
}

pub(crate) fn region(error: &impl ToString) -> PyErr {
    plain("RequestError", error)
}

pub(crate) fn access(error: &AccessError) -> PyErr {
    match error {
        AccessError::Region(error) => region(error),
        _ => plain("RegionError", error),
    }
}

pub(crate) fn build(error: &BuildError) -> PyErr {
    match error {
        BuildError::Config { .. }
        | BuildError::Group(_)
        | BuildError::Mailbox(_)
        | BuildError::Libfabric(
            LibfabricError::Pairing(_)
            | LibfabricError::NoSuchNic { .. }
            | LibfabricError::Peers { .. },
        )
        | BuildError::Verbs(VerbsError::Pairing(_))
        | BuildError::Staging(
            StagingError::NoGpus | StagingError::NoNics | StagingError::TooSmall { .. },
        ) => plain("ConfigError", error),
        _ => plain("ImmwireError", error),
    }
}

fn capacity(error: &impl ToString, capacity: usize) -> PyErr {
    raise("CapacityError", &error.to_string(), |fields| fields.set_item("capacity", capacity))
}

pub(crate) fn submit(error: &SubmitError) -> PyErr {
    match error {
        // All of them: what has ended was let go of.
        SubmitError::Full { capacity: room } => capacity(
            &format!(
                "all {room} transfers are under way; wait for one to end (wait_capacity), then submit again"
            ),
            *room,
        ),
        SubmitError::EngineStopped => plain("EngineClosed", error),
        _ => plain("RequestError", error),
    }
}

pub(crate) fn register(error: &RegisterError) -> PyErr {
    match error {
        RegisterError::Empty => plain("RequestError", error),
        RegisterError::TableFull { capacity: room } => capacity(error, *room),
        RegisterError::Capturing => plain("RequestError", error),
        RegisterError::NoGpu { .. } | RegisterError::NoGpus | RegisterError::NotDirect { .. } => {
            plain("UnsupportedMemory", error)
        }
        _ => plain("RegionError", error),
    }
}

pub(crate) fn stream(error: &StreamWaitError) -> PyErr {
    match error {
        StreamWaitError::Memory(error) => register(error),
        StreamWaitError::Count(error) => count(error),
        StreamWaitError::Capturing => plain("RequestError", error),
        _ => plain("RegionError", error),
    }
}

pub(crate) fn in_use() -> PyErr {
    let message = "the region is in use by another handle or by a transfer under way";
    raise("RegionInUse", message, |_| Ok(()))
}

pub(crate) fn being_closed() -> PyErr {
    raise(
        "RegionInUse",
        "another thread is closing the region, and has not done so yet",
        |_| Ok(()),
    )
}

pub(crate) fn still_writing(error: RevokeError) -> PyErr {
    raise("RegionInUse", &error.to_string(), |fields| set_peer(fields, error.peer))
}

pub(crate) fn add_peer(error: &AddPeerError) -> PyErr {
    match error {
        AddPeerError::Full(full) => capacity(error, full.capacity),
        AddPeerError::NoAnswer => plain("EngineClosed", error),
        _ => plain("PeerError", error),
    }
}

pub(crate) fn peer(error: PeerError) -> PyErr {
    let message = error.to_string();
    match error {
        PeerError::Timeout { peer, after } => raise("WaitTimeout", &message, |fields| {
            set_peer(fields, peer)?;
            set_deadline(fields, after)
        }),
        PeerError::Down { peer, .. } | PeerError::Unknown { peer } => {
            raise("PeerError", &message, |fields| set_peer(fields, peer))
        }
        _ => plain("PeerError", &message),
    }
}

pub(crate) fn counter_taken(error: CounterTaken) -> PyErr {
    match error {
        CounterTaken::AllTaken { capacity: room } => capacity(&error, room.into()),
        _ => plain("CounterError", &error),
    }
}

/// Of a wait that said of no peer what it is to send: nobody is named, for those who owe the rest may not be there yet.
pub(crate) fn count(error: &CountError) -> PyErr {
    counted(error, |_| None)
}

/// Of a wait for shares.
pub(crate) fn count_from(error: &CountError) -> PyErr {
    counted(error, late)
}

fn counted(error: &CountError, late: impl Fn(&[PeerShare]) -> Option<PeerId>) -> PyErr {
    match error {
        CountError::Timeout { target, missing, after, peers, .. } => {
            raise("WaitTimeout", &error.to_string(), |fields| {
                fields.set_item("target", target)?;
                fields.set_item("missing", missing)?;
                set_deadline(fields, *after)?;
                fields.set_item("shares", shares(fields.py(), peers)?)?;
                match late(peers) {
                    Some(peer) => set_peer(fields, peer),
                    None => Ok(()),
                }
            })
        }
        CountError::EngineStopped => plain("EngineClosed", error),
        _ => plain("CounterError", error),
    }
}

/// The peer that all of it waits for, if there is just one.
fn late(peers: &[PeerShare]) -> Option<PeerId> {
    let late = |share: &&PeerShare| share.expected.is_none_or(|writes| share.arrived < writes);
    let mut all = peers.iter().filter(late);
    match (all.next(), all.next()) {
        (Some(share), None) => Some(share.peer),
        _ => None,
    }
}

fn shares<'py>(py: Python<'py>, peers: &[PeerShare]) -> PyResult<Bound<'py, PyList>> {
    let class = py.import(intern!(py, "immwire._errors"))?.getattr("PeerShare")?;
    let shares = PyList::empty(py);
    for PeerShare { peer, arrived, expected, state } in peers {
        let state = state.map(|state| state.to_string());
        shares.append(class.call1((values::PeerId::from(*peer), arrived, expected, state))?)?;
    }
    Ok(shares)
}

pub(crate) fn recv(error: RecvError) -> PyErr {
    match error {
        RecvError::Timeout { after } => {
            raise("WaitTimeout", &error.to_string(), |fields| set_deadline(fields, after))
        }
        _ => plain("EngineClosed", &error),
    }
}

/// A wait for a transfer, or for something else that has no error of its own, took too long.
pub(crate) fn wait(message: &str, after: Duration) -> PyErr {
    raise("WaitTimeout", message, |fields| set_deadline(fields, after))
}

/// How a transfer ended, if not well.
pub(crate) fn end(end: End, deadline: Option<Duration>) -> Option<PyErr> {
    let (started, error) = match end {
        End::Done => return None,
        End::NeverStarted { error } => (false, error),
        End::Quiesced { error } => (true, error),
    };
    use group::{SubmitError as Refusal, TransferError as Stop, WorkError};
    let (class, peer, nic) = match error {
        TransferError::Stopped(Stop::Cancelled) => ("TransferCancelled", None, None),
        TransferError::Stopped(Stop::DeadlineExceeded { peer, .. }) => {
            ("DeadlineExceeded", peer, None)
        }
        TransferError::Stopped(Stop::PeerDown { peer, .. })
        | TransferError::Refused(Refusal::PeerDown { peer, .. } | Refusal::NoSuchPeer { peer }) => {
            ("PeerDown", Some(peer), None)
        }
        // Which one, whoever sent the message knows.
        TransferError::Message(SendError::Closed) => ("PeerDown", None, None),
        TransferError::Stopped(Stop::Piece { peer, nic, error }) => {
            let gone = matches!(error, WorkError::PeerGone | WorkError::Flushed);
            (if gone { "PeerDown" } else { "TransferError" }, Some(peer), Some(nic))
        }
        TransferError::Refused(Refusal::WrongOwner { peer, .. }) => {
            ("TransferError", Some(peer), None)
        }
        _ => ("TransferError", None, None),
    };
    Some(raise(class, &error.to_string(), |fields| {
        fields.set_item("started", started)?;
        if let Some(peer) = peer {
            set_peer(fields, peer)?;
        }
        if let Some(deadline) = deadline {
            set_deadline(fields, deadline)?;
        }
        nic.map_or(Ok(()), |nic| fields.set_item("nic", nic))
    }))
}

/// An exchange could not be made, or a round failed.
pub(crate) fn moe(error: &MoeError) -> PyErr {
    let message = error.to_string();
    let one = |rank: u32| vec![rank];
    let (class, ranks) = match error {
        MoeError::Placement(_)
        | MoeError::Sizes(_)
        | MoeError::Shape(_)
        | MoeError::Rank { .. } => {
            return config(&message);
        }
        // The call has changed nothing.
        MoeError::Seats { .. }
        | MoeError::Argument { .. }
        | MoeError::Routing(_)
        | MoeError::OutOfTurn { .. } => return request(&message),
        MoeError::Count(error) => return count(error),
        MoeError::Counter(error) => return counter_taken(*error),
        MoeError::Memory(error) => return register(error),
        MoeError::Access(error) => return access(error),
        MoeError::Late { ranks, .. } => ("MoeTimeout", ranks.clone()),
        MoeError::Gone { rank, .. }
        | MoeError::Write { rank, .. }
        | MoeError::LeftOut { rank }
        | MoeError::Unended { rank, .. }
        | MoeError::Submit { rank, .. }
        | MoeError::NotReached { rank, .. }
        | MoeError::Reach { rank, .. } => ("RankError", one(*rank)),
        MoeError::OtherShape { rank }
        | MoeError::PeerRouting { rank, .. }
        | MoeError::Table { rank, .. } => ("MoeError", one(*rank)),
        _ => ("MoeError", Vec::new()),
    };
    raise(class, &message, |fields| {
        fields.set_item("ranks", PyTuple::new(fields.py(), ranks)?)?;
        match error {
            MoeError::Late { phase, chunk, after, .. } => {
                fields.set_item("phase", phase)?;
                fields.set_item("chunk", chunk)?;
                set_deadline(fields, *after)
            }
            MoeError::Gone {
                error:
                    PeerError::Down { peer, .. }
                    | PeerError::Unknown { peer }
                    | PeerError::Timeout { peer, .. },
                ..
            } => set_peer(fields, *peer),
            _ => Ok(()),
        }
    })
}

/// What was given as the seat of `rank` is none.
pub(crate) fn seat(rank: usize, error: SeatError) -> PyErr {
    request(&format!("seat {rank}: {error}"))
}

/// Another thread is in a call on the same exchange.
pub(crate) fn exchange_busy() -> PyErr {
    request("another thread is in a call on this exchange, which takes one at a time")
}
