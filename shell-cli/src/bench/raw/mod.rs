//! Transports without an engine: the loops that writes over NICs are compared with.
//!
//! One endpoint with a queue, polled by its thread: what a careful person would write who needs nothing but
//! this one benchmark. No peers to find, no credits, no counters, no thread, nothing to sleep on. It takes
//! raw memory, so that the bytes can be the very ones the benchmark moves.
//!
//! | module | what |
//! |---|---|
//! | `fabric` | an endpoint of libfabric's |
//! | `verbs` | a reliable connected queue pair of libibverbs' |
//! | `loops` | what is done with either |
//!
//! It decides nothing about what is measured.
//!
//! # Invariants
//!
//! - A write is counted as done once its completion was read, or a later one of its queue pair's, and a peer's once its
//!   data was.
//! - No wait is without a deadline; when one passes, the endpoint is of no use any more, only to be dropped.

mod fabric;
mod loops;
mod verbs;

use immwire::core::port::{Door, NoRoute};
use immwire::core::wire::ProviderKind;
use immwire::{Region, TransferEngine};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Operations in flight at most; no more than the engine has on a NIC.
pub const DEPTH_MAX: u32 = 256;

/// Why there is no baseline, or it stopped.
#[derive(Debug, thiserror::Error)]
pub enum RawError {
    /// No libfabric.
    #[error(transparent)]
    Fabric(#[from] libfabric_sys::LoadError),
    /// No libibverbs.
    #[error(transparent)]
    Verbs(#[from] ibverbs_sys::LoadError),
    /// It has no such device any more.
    #[error("{library} lists no device {device} for the baseline")]
    NoDevice {
        /// Which library.
        library: &'static str,
        /// The device; of libfabric's, its provider and domain.
        device: String,
    },
    /// A name cannot be passed on.
    #[error("{0:?} is no name of libfabric's")]
    Name(String),
    /// The library could not allocate.
    #[error("{0} is out of memory")]
    OutOfMemory(&'static str),
    /// A call failed.
    #[error("the baseline's {call}: {text} ({code})")]
    Call {
        /// Which.
        call: &'static str,
        /// libfabric's `FI_E*`, a completion's status, or an `errno`; positive.
        code: i32,
        /// The library's words.
        text: String,
    },
    /// The other side is on another transport, or its address is none.
    #[error("the baseline's other side cannot be reached at the address it gave")]
    Unreachable,
    /// Its port and ours do not hear each other.
    #[error("the baseline's other side cannot be reached: {0}")]
    NoRoute(#[from] NoRoute),
    /// The other side sent something else.
    #[error("the baseline expected {expected:#x} and got {found:#x}")]
    Wrong {
        /// What should have come.
        expected: u64,
        /// What did.
        found: u64,
    },
    /// The other side did nothing.
    #[error("the baseline's other side did nothing for {0:?}")]
    Silent(Duration),
    /// More than goes with one write.
    #[error("the baseline writes at most {most} bytes at once here, not {len}")]
    TooLong {
        /// Bytes.
        len: u64,
        /// What the device, or the endpoint, takes.
        most: u64,
    },
    /// A piece is not in the memory it was given for.
    #[error("the baseline's bytes {offset}..+{len} are outside of its memory of {memory} bytes")]
    Outside {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes there are.
        memory: u64,
    },
}

/// When a write of a software provider is done. A device's is, when the other device has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Done {
    /// When the bytes are in the peer's memory (`FI_DELIVERY_COMPLETE`), as the engine's are.
    Delivered,
    /// When the provider says so without being asked: the kernel has the bytes.
    Early,
}

/// Memory of a peer's, as its owner tells of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Far {
    /// The endpoint's address.
    pub endpoint: Vec<u8>,
    /// What is added to an offset.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// The key.
    pub key: u64,
}

/// One write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// In our memory.
    pub from: u64,
    /// In the peer's.
    pub to: u64,
    /// Bytes.
    pub len: u64,
}

impl Piece {
    /// Number `number` of the parts that it is written in, of at most `most` bytes: as engines cut theirs.
    #[must_use]
    pub fn part(self, number: u64, most: u64) -> Self {
        let at = number.saturating_mul(most).min(self.len);
        Self { from: self.from + at, to: self.to + at, len: most.min(self.len - at) }
    }
}

/// Of which device an endpoint without an engine is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// libfabric's provider, and its domain.
    Fabric {
        /// As `fi_info` has it.
        provider: String,
        /// As `fi_info` has it.
        domain: String,
    },
    /// libibverbs' device.
    Verbs {
        /// As `ibv_devices` has it.
        name: String,
        /// Its port, as the engine uses it.
        port: immwire::core::port::Port,
    },
}

/// What the engine's first NIC is on; none if that is no NIC.
#[must_use]
pub fn device(engine: &TransferEngine) -> Option<Device> {
    let name = &engine.nics().first()?.name;
    match engine.address().provider() {
        ProviderKind::Libfabric => {
            let (provider, domain) = name.split_once(':')?;
            Some(Device::Fabric { provider: provider.to_owned(), domain: domain.to_owned() })
        }
        ProviderKind::Verbs => {
            let door = Door::decode(&engine.address().nics().first()?.address)?;
            Some(Device::Verbs { name: name.clone(), port: door.port })
        }
        _ => None,
    }
}

/// What a registration is of.
enum Registered {
    Fabric(fabric::Registration),
    Verbs(verbs::Registration),
}

/// Memory known to a [`Raw`], which it is dropped before.
pub struct Memory {
    registered: Registered,
    at: *mut u8,
    len: u64,
    /// What is added to an offset by who writes here.
    base: u64,
    key: u64,
}

impl Memory {
    /// What the other side needs to write here.
    #[must_use]
    pub fn far(&self, endpoint: &[u8]) -> Far {
        Far { endpoint: endpoint.to_vec(), base: self.base, len: self.len, key: self.key }
    }

    /// Bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub const fn len(&self) -> u64 {
        self.len
    }

    fn inside(&self, offset: u64, len: u64) -> Result<*mut u8, RawError> {
        inside(offset, len, self.len)?;
        // Inside of an allocation, so it fits.
        Ok(self.at.wrapping_add(usize::try_from(offset).unwrap_or(0)))
    }

    /// The 8 bytes at `offset`, as they are now.
    fn word(&self, offset: u64) -> Result<u64, RawError> {
        let at = self.inside(offset, 8)?;
        // SAFETY: inside the memory, which its owner keeps (`Raw::register_region`). Volatile, since a device may
        // have written it; not aligned, since a message may have any length.
        Ok(u64::from_le_bytes(unsafe { at.cast::<[u8; 8]>().read_volatile() }))
    }

    fn set_word(&self, offset: u64, word: u64) -> Result<(), RawError> {
        let at = self.inside(offset, 8)?;
        // SAFETY: as in `word`; nothing that is under way reads it, or it has the same bytes.
        unsafe { at.cast::<[u8; 8]>().write_volatile(word.to_le_bytes()) };
        Ok(())
    }
}

fn fits(len: u64, most: u64) -> Result<(), RawError> {
    if len <= most { Ok(()) } else { Err(RawError::TooLong { len, most }) }
}

fn inside(offset: u64, len: u64, memory: u64) -> Result<(), RawError> {
    match offset.checked_add(len) {
        Some(end) if end <= memory => Ok(()),
        _ => Err(RawError::Outside { offset, len, memory }),
    }
}

/// An endpoint, and all that it needs. Used by one thread.
pub struct Raw {
    wire: Any,
    limit: Duration,
}

enum Any {
    Fabric(Box<fabric::Fabric>),
    Verbs(Box<verbs::Verbs>),
}

/// Calls a loop with the endpoint that there is.
macro_rules! with {
    ($raw:expr, $wire:ident => $call:expr) => {
        match &mut $raw.wire {
            Any::Fabric($wire) => $call,
            Any::Verbs($wire) => $call,
        }
    };
}

impl Raw {
    /// Opens an endpoint on the device, with the library that engines use. No wait is longer than `limit`.
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub fn open(device: &Device, limit: Duration) -> Result<Self, RawError> {
        let wire = match device {
            Device::Fabric { provider, domain } => {
                Any::Fabric(Box::new(fabric::Fabric::open(provider, domain)?))
            }
            Device::Verbs { name, port } => Any::Verbs(Box::new(verbs::Verbs::open(name, *port)?)),
        };
        Ok(Self { wire, limit })
    }

    /// Where the other side reaches it.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        match &self.wire {
            Any::Fabric(wire) => wire.name(),
            Any::Verbs(wire) => wire.name(),
        }
    }

    /// Whether a software provider moves the bytes: whether [`Done`] makes a difference.
    #[must_use]
    pub fn is_software(&self) -> bool {
        match &self.wire {
            Any::Fabric(wire) => wire.is_software(),
            Any::Verbs(_) => false,
        }
    }

    /// Bytes of one write at most.
    #[must_use]
    pub fn longest(&self) -> u64 {
        match &self.wire {
            Any::Fabric(wire) => wire.longest(),
            Any::Verbs(wire) => wire.longest(),
        }
    }

    /// Whether so many bytes go with one write.
    ///
    /// # Errors
    ///
    /// [`RawError::TooLong`].
    pub fn fits(&self, len: u64) -> Result<(), RawError> {
        fits(len, self.longest())
    }

    /// Gets to know the other side. Both must, before the first write.
    ///
    /// # Errors
    ///
    /// [`RawError`]: it has no address of this transport's.
    pub fn meet(&mut self, name: &[u8]) -> Result<(), RawError> {
        with!(self, wire => wire.meet(name))
    }

    /// Registers a region of an engine's here too.
    ///
    /// # Safety
    ///
    /// The region is dropped after the registration, that before the endpoint or after its last call. Nobody
    /// else in this process accesses it while a method of this endpoint runs; who is told of it writes there
    /// at any time.
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub unsafe fn register_region(&self, region: &Region) -> Result<Memory, RawError> {
        match &self.wire {
            // SAFETY: by the caller's promise.
            Any::Fabric(wire) => unsafe { wire.register(region) },
            // SAFETY: by the caller's promise.
            Any::Verbs(wire) => unsafe { wire.register(region) },
        }
    }

    /// As the initiator: `count` writes with `data`, the `n`th of them `piece(n)`, at most `depth` in flight,
    /// until the last bytes are there; how long that took. None is longer than [`Raw::longest`]. The other side is in
    /// [`Raw::take`].
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub fn stream(
        &mut self,
        memory: &Memory,
        far: &Far,
        count: u64,
        depth: u32,
        how: (u64, Done),
        piece: impl Fn(u64) -> Piece,
    ) -> Result<Duration, RawError> {
        let limit = self.limit;
        with!(self, wire => loops::stream(&mut **wire, limit, (memory, far), (count, depth), how, piece))
    }

    /// As the target: polls until `count` writes with `data` have come, and the initiator knows it.
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub fn take(&mut self, count: u64, data: u64) -> Result<(), RawError> {
        let limit = self.limit;
        with!(self, wire => loops::take(&mut **wire, limit, count, data))
    }

    /// As the side that starts: a ping-pong of `turns` turns, timed in batches of `batch`: seconds
    /// one way. Messages are as long as `out`, of at least 8 bytes; the other side's come to `inbox`.
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub fn ping(
        &mut self,
        ends: &Ends<'_>,
        turns: u64,
        batch: u64,
        how: (u64, Done),
    ) -> Result<Vec<f64>, RawError> {
        let limit = self.limit;
        with!(self, wire => loops::ping(&mut **wire, limit, ends, (turns, batch), how))
    }

    /// As the side that answers.
    ///
    /// # Errors
    ///
    /// [`RawError`].
    pub fn pong(&mut self, ends: &Ends<'_>, turns: u64, how: (u64, Done)) -> Result<(), RawError> {
        let limit = self.limit;
        with!(self, wire => loops::pong(&mut **wire, limit, ends, turns, how))
    }
}

/// What a ping-pong goes between, on one side.
pub struct Ends<'a> {
    /// Where the other side's messages come in.
    pub inbox: &'a Memory,
    /// What is sent.
    pub out: &'a Memory,
    /// Where to.
    pub far: &'a Far,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_piece_are_all_of_it_and_none_is_too_long() {
        for len in 0..40 {
            for most in 1..20 {
                let piece = Piece { from: 100, to: 7, len };
                let mut at = 0;
                for number in 0..len.div_ceil(most).max(1) {
                    let part = piece.part(number, most);
                    assert_eq!((part.from, part.to), (100 + at, 7 + at), "{len} in {most}");
                    assert!(part.len > 0 || len == 0, "{len} in {most}");
                    assert!(fits(part.len, most).is_ok(), "{len} in {most}");
                    at += part.len;
                }
                assert_eq!(at, len, "in parts of {most}");
                assert_eq!(fits(len, most).is_err(), len > most);
            }
        }
        let all = Piece { from: 0, to: 0, len: u64::MAX };
        assert_eq!(all.part(1, 1 << 63).len, (1 << 63) - 1);
    }
}
