//! What engines tell each other where there is no connection: calls, and the upkeep of sessions.
//!
//! For transports whose addresses take messages from anybody: libfabric's reliable datagrams, and the
//! unreliable ones of verbs.
//!
//! ```text
//!   initiator                                            acceptor
//!     Call { nonce, target, door }         ──▶             keeps nothing
//!                                          ◀──           Challenge { both nonces }
//!     Prove { both nonces, proof, claim }  ──▶             opens its side
//!                                          ◀──           Accept { nonce, proof, claim }
//!     opens its side, may post
//!     Ready                                ──▶             may post
//!
//! Whoever has withdrawn registrations before says which (`Gone`) before the other end posts.
//! ```
//!
//! `Refuse` may take the place of any answer. Every message may be lost, repeated, late, or made up: the
//! initiator repeats what is not answered ([`Retry`]), the acceptor answers a repeated `Prove` with the same
//! `Accept`. The acceptor's nonce follows from the call and a secret of the acceptor's, so that it
//! keeps nothing of who has not shown that it is reached at its door. What a proof is, is the platform's.
//!
//! An initiator that gives its call up once it has proven it refuses the call itself, as stale, and again each time
//! that it is answered ([`GivenUp`]): the acceptor has opened its side, for nobody, and would take a later call for the
//! news that this session is lost.
//!
//! Afterwards each message carries the token that its receiver handed out in its claim: nobody else knows it.
//!
//! # Invariants
//!
//! [`Message::decode`] answers any bytes with a value or an error, and a message has one encoding: all
//! truncations, and all changes of one byte, are tried below.

use core::fmt;
use core::time::Duration;

use heapless::Vec;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::id::{EngineId, MAX_NICS, NicIndex, Time};
use crate::opening::{Pairs, Turns};
use crate::recycle::Turn;
use crate::tenant::{PART, Parts, Tenant};
use crate::wire::{Hello, NIC_ADDRESS_MAX, PROTOCOL_VERSION, Refusal, Wire};

/// The longest message, in bytes.
pub const DATAGRAM_MAX: usize = 1536;

const MAGIC: [u8; 4] = *b"IWdg";

/// A random value that makes a proof good for one handshake only.
pub type Nonce = [u8; 32];

/// What shows that its maker holds the group's key.
pub type Proof = [u8; 32];

/// An endpoint's address, in the provider's own form.
pub type Address = Vec<u8, NIC_ADDRESS_MAX>;

/// An address for each NIC.
pub type Addresses = Vec<Address, MAX_NICS>;

/// A count for each NIC.
pub type Counts = Vec<u64, MAX_NICS>;

/// Some registrations.
pub type Tenants = Vec<Tenant, PART>;

/// Both sides' nonces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonces {
    /// Of the one who called.
    pub initiator: Nonce,
    /// Of the other.
    pub acceptor: Nonce,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "there is no allocator, and none is kept")]
pub enum Message<'a> {
    /// Somebody wants to connect.
    Call {
        /// Its nonce.
        nonce: Nonce,
        /// Whom it wants.
        target: EngineId,
        /// Where it takes answers.
        door: Address,
    },
    /// The answer to a call.
    Challenge(Nonces),
    /// The caller is reached at its door.
    Prove {
        /// As in the challenge.
        nonces: Nonces,
        /// Where it takes answers, as in the call.
        door: Address,
        /// Over all of this.
        proof: Proof,
        /// An encoded [`Claim`].
        claim: &'a [u8],
    },
    /// The acceptor has opened its side.
    Accept {
        /// The initiator's nonce.
        nonce: Nonce,
        /// As in `Prove`, the roles exchanged.
        proof: Proof,
        /// An encoded [`Claim`].
        claim: &'a [u8],
    },
    /// Takes the place of an answer.
    Refuse {
        /// The initiator's nonce.
        nonce: Nonce,
        /// Why.
        why: Refusal,
    },
    /// Of a session.
    Session {
        /// The receiver's.
        token: u64,
        /// What is said.
        say: Say,
    },
}

/// What is said within a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Say {
    /// The initiator's side is open.
    Ready {
        /// So many parts `Gone` are to come.
        gone: u8,
    },
    /// The sender withdrew these before.
    Gone {
        /// Which part.
        part: u8,
        /// The last of each slot.
        tenants: Tenants,
    },
    /// The sender has ended the session.
    Bye {
        /// It has nothing in flight, and never will have.
        quiet: bool,
        /// Immediates sent since the start, by NIC of the receiver. Some may be under way still, if the network keeps no order,
        /// though they are done for the sender.
        sent: Counts,
    },
    /// The sender has taken so many immediates over its NIC since the start.
    Taken {
        /// The sender's NIC.
        nic: NicIndex,
        /// How many.
        count: u64,
    },
    /// Nothing more is to be written to this registration of the sender's.
    Withdraw(Tenant),
    /// Nothing more will be.
    Withdrawn(Tenant),
    /// The sender's endpoints are replaced.
    Move {
        /// For the how-manieth time.
        turn: Turn,
        /// The new ones, by NIC.
        ports: Addresses,
    },
    /// The sender writes to the new ones, and nothing of it is in flight to the old.
    Moved {
        /// Which of the receiver's replacements it is about.
        turn: Turn,
        /// Immediates sent since the start, by NIC of the receiver: so many are to be taken before the old
        /// ones are closed.
        sent: Counts,
    },
    /// The sender wants to write to the receiver over these, and waits until they are open.
    Open {
        /// Between which endpoints.
        turns: Turns,
        /// Of NICs: the sender's, and the receiver's.
        pairs: Pairs,
    },
    /// These are open: the answer to `Open`, all at once or in parts.
    Opened {
        /// Between which endpoints.
        turns: Turns,
        /// Of NICs: the receiver's, and the sender's.
        pairs: Pairs,
    },
}

/// What one end says of itself in a handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// To be put into each message for the one who claims; its lower half into each immediate, where
    /// these are wide enough.
    pub token: u64,
    /// Immediates that the listener may have under way to each NIC of the one who claims.
    pub grant: u16,
    /// The transport's protocol, its version, and how memory is addressed: both ends must agree.
    pub protocol: Protocol,
    /// The endpoints' number.
    pub turn: Turn,
    /// The endpoints, by NIC.
    pub ports: Addresses,
    /// The acceptor's: so many parts `Gone` are to come.
    pub gone: u8,
    /// Who is speaking.
    pub hello: Hello,
}

/// What both ends of a session must have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Protocol {
    /// The provider's own number for its wire protocol.
    pub number: u32,
    /// Its version.
    pub version: u32,
    /// Bytes of an immediate's data: 4, or 8 with the token's half.
    pub data_bytes: u8,
}

/// Why bytes are no message, or no claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Malformed {
    /// The sender speaks another version of the protocol.
    Version {
        /// Which.
        theirs: u16,
    },
    /// No version of ours has such bytes.
    Bytes,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { theirs } => {
                write!(f, "protocol version {theirs} is not understood, only {PROTOCOL_VERSION}")
            }
            Self::Bytes => f.write_str("not a message"),
        }
    }
}

impl core::error::Error for Malformed {}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 4],
    version: U16,
    kind: u8,
    spare: u8,
}

struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, part: &(impl IntoBytes + Immutable + ?Sized)) -> Option<()> {
        let part = part.as_bytes();
        let end = self.at.checked_add(part.len())?;
        self.out.get_mut(self.at..end)?.copy_from_slice(part);
        self.at = end;
        Some(())
    }

    fn address(&mut self, address: &Address) -> Option<()> {
        self.put(&u8::try_from(address.len()).ok()?)?;
        self.put(address.as_slice())
    }

    fn addresses(&mut self, addresses: &Addresses) -> Option<()> {
        self.put(&u8::try_from(addresses.len()).ok()?)?;
        addresses.iter().try_for_each(|address| self.address(address))
    }

    fn counts(&mut self, counts: &Counts) -> Option<()> {
        self.put(&u8::try_from(counts.len()).ok()?)?;
        counts.iter().try_for_each(|count| self.put(&U64::new(*count)))
    }

    fn tenant(&mut self, tenant: Tenant) -> Option<()> {
        self.put(&U64::new(tenant.key(0)))
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take<T: FromBytes>(&mut self) -> Result<T, Malformed> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| Malformed::Bytes)?;
        self.0 = rest;
        Ok(value)
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (part, rest) = self.0.split_at_checked(len).ok_or(Malformed::Bytes)?;
        self.0 = rest;
        Ok(part)
    }

    fn rest(&mut self) -> &'a [u8] {
        core::mem::take(&mut self.0)
    }

    fn address(&mut self) -> Result<Address, Malformed> {
        let len: u8 = self.take()?;
        Address::from_slice(self.bytes(len.into())?).map_err(|_| Malformed::Bytes)
    }

    fn addresses(&mut self) -> Result<Addresses, Malformed> {
        let count: u8 = self.take()?;
        let mut all = Addresses::new();
        for _ in 0..count {
            all.push(self.address()?).map_err(|_| Malformed::Bytes)?;
        }
        if all.is_empty() { Err(Malformed::Bytes) } else { Ok(all) }
    }

    fn counts(&mut self) -> Result<Counts, Malformed> {
        let mut counts = Counts::new();
        for _ in 0..self.take::<u8>()? {
            counts.push(self.take::<U64>()?.get()).map_err(|_| Malformed::Bytes)?;
        }
        Ok(counts)
    }

    fn tenant(&mut self) -> Result<Tenant, Malformed> {
        let key = self.take::<U64>()?.get();
        Tenant::of(key).filter(|tenant| tenant.key(0) == key).ok_or(Malformed::Bytes)
    }

    fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed::Bytes) }
    }
}

impl Say {
    const fn kind(&self) -> u8 {
        match self {
            Self::Ready { .. } => 16,
            Self::Bye { .. } => 17,
            Self::Taken { .. } => 18,
            Self::Withdraw(_) => 19,
            Self::Withdrawn(_) => 20,
            Self::Move { .. } => 21,
            Self::Moved { .. } => 22,
            Self::Open { .. } => 23,
            Self::Opened { .. } => 24,
            Self::Gone { .. } => 25,
        }
    }

    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        match self {
            Self::Ready { gone } => to.put(gone),
            Self::Bye { quiet, sent } => {
                to.put(&u8::from(*quiet))?;
                to.counts(sent)
            }
            Self::Taken { nic, count } => {
                to.put(nic)?;
                to.put(&U64::new(*count))
            }
            Self::Withdraw(tenant) | Self::Withdrawn(tenant) => to.tenant(*tenant),
            Self::Move { turn, ports } => {
                to.put(&U32::new(turn.0))?;
                to.addresses(ports)
            }
            Self::Moved { turn, sent } => {
                to.put(&U32::new(turn.0))?;
                to.counts(sent)
            }
            Self::Open { turns, pairs } | Self::Opened { turns, pairs } => {
                to.put(&U32::new(turns.asks.0))?;
                to.put(&U32::new(turns.opens.0))?;
                to.put(&pairs.to_bytes())
            }
            Self::Gone { part, tenants } => {
                to.put(part)?;
                to.put(&u8::try_from(tenants.len()).ok()?)?;
                tenants.iter().try_for_each(|&tenant| to.tenant(tenant))
            }
        }
    }

    fn take(kind: u8, from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match kind {
            16 => Self::Ready { gone: from.take()? },
            17 => {
                let quiet = match from.take::<u8>()? {
                    0 => false,
                    1 => true,
                    _ => return Err(Malformed::Bytes),
                };
                Self::Bye { quiet, sent: from.counts()? }
            }
            18 => Self::Taken { nic: from.take()?, count: from.take::<U64>()?.get() },
            19 => Self::Withdraw(from.tenant()?),
            20 => Self::Withdrawn(from.tenant()?),
            21 => {
                let turn = Turn(from.take::<U32>()?.get());
                Self::Move { turn, ports: from.addresses()? }
            }
            22 => {
                let turn = Turn(from.take::<U32>()?.get());
                Self::Moved { turn, sent: from.counts()? }
            }
            23 | 24 => {
                let asks = Turn(from.take::<U32>()?.get());
                let opens = Turn(from.take::<U32>()?.get());
                let (turns, pairs) = (Turns { asks, opens }, Pairs::from_bytes(from.take()?));
                if kind == 23 { Self::Open { turns, pairs } } else { Self::Opened { turns, pairs } }
            }
            25 => {
                let part = from.take()?;
                let mut tenants = Tenants::new();
                for _ in 0..from.take::<u8>()? {
                    tenants.push(from.tenant()?).map_err(|_| Malformed::Bytes)?;
                }
                Self::Gone { part, tenants }
            }
            _ => return Err(Malformed::Bytes),
        })
    }
}

impl<'a> Message<'a> {
    const fn kind(&self) -> u8 {
        match self {
            Self::Call { .. } => 1,
            Self::Challenge(_) => 2,
            Self::Prove { .. } => 3,
            Self::Accept { .. } => 4,
            Self::Refuse { .. } => 5,
            Self::Session { say, .. } => say.kind(),
        }
    }

    /// Writes the message to the start of `out`; returns its length in bytes. `None` if it does not fit;
    /// [`DATAGRAM_MAX`] bytes always suffice.
    #[must_use]
    pub fn encode(&self, out: &mut [u8]) -> Option<usize> {
        let mut to = Writer { out, at: 0 };
        let version = PROTOCOL_VERSION.into();
        to.put(&Head { magic: MAGIC, version, kind: self.kind(), spare: 0 })?;
        match self {
            Self::Call { nonce, target, door } => {
                to.put(nonce)?;
                to.put(&U64::new(target.0))?;
                to.address(door)?;
            }
            Self::Challenge(nonces) => {
                to.put(&nonces.initiator)?;
                to.put(&nonces.acceptor)?;
            }
            Self::Prove { nonces, door, proof, claim } => {
                to.put(&nonces.initiator)?;
                to.put(&nonces.acceptor)?;
                to.put(proof)?;
                to.address(door)?;
                to.put(*claim)?;
            }
            Self::Accept { nonce, proof, claim } => {
                to.put(nonce)?;
                to.put(proof)?;
                to.put(*claim)?;
            }
            Self::Refuse { nonce, why } => {
                to.put(nonce)?;
                let mut frame = [0; Refusal::ENCODED_MAX];
                let len = why.encode(&mut frame).ok()?;
                to.put(frame.get(..len)?)?;
            }
            Self::Session { token, say } => {
                to.put(&U64::new(*token))?;
                say.put(&mut to)?;
            }
        }
        Some(to.at)
    }

    /// Reads a message.
    ///
    /// # Errors
    ///
    /// [`Malformed`].
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let (version, kind, body) = Self::head(bytes)?;
        if version != PROTOCOL_VERSION {
            return Err(Malformed::Version { theirs: version });
        }
        Self::body(kind, body)
    }

    /// Reads what is the same in all versions, so that both ends can say why they do not come together: a call, and a refusal. Returns
    /// whose version it is, too.
    ///
    /// # Errors
    ///
    /// [`Malformed`]: it is neither.
    pub fn decode_of_any_version(bytes: &'a [u8]) -> Result<(u16, Self), Malformed> {
        let (version, kind, body) = Self::head(bytes)?;
        match kind {
            1 | 5 => Ok((version, Self::body(kind, body)?)),
            _ => Err(Malformed::Version { theirs: version }),
        }
    }

    /// Whose version it is, of what kind, and the rest.
    fn head(bytes: &'a [u8]) -> Result<(u16, u8, Reader<'a>), Malformed> {
        let mut from = Reader(bytes);
        let head: Head = from.take()?;
        if head.magic != MAGIC || head.spare != 0 {
            return Err(Malformed::Bytes);
        }
        Ok((head.version.get(), head.kind, from))
    }

    fn body(kind: u8, mut from: Reader<'a>) -> Result<Self, Malformed> {
        let message = match kind {
            1 => Self::Call {
                nonce: from.take()?,
                target: EngineId(from.take::<U64>()?.get()),
                door: from.address()?,
            },
            2 => Self::Challenge(Nonces { initiator: from.take()?, acceptor: from.take()? }),
            3 => {
                let nonces = Nonces { initiator: from.take()?, acceptor: from.take()? };
                let proof = from.take()?;
                Self::Prove { nonces, proof, door: from.address()?, claim: from.rest() }
            }
            4 => Self::Accept { nonce: from.take()?, proof: from.take()?, claim: from.rest() },
            5 => {
                let nonce = from.take()?;
                let why = Refusal::decode(from.rest()).map_err(|_| Malformed::Bytes)?;
                Self::Refuse { nonce, why }
            }
            kind => {
                let token = from.take::<U64>()?.get();
                Self::Session { token, say: Say::take(kind, &mut from)? }
            }
        };
        from.end()?;
        Ok(message)
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ClaimBody {
    token: U64,
    protocol: U32,
    protocol_version: U32,
    turn: U32,
    grant: U16,
    data_bytes: u8,
    gone: u8,
    // Then the ports, and the hello's frame.
}

impl Claim {
    /// Writes the claim to the start of `out`; returns its length in bytes. `None` if it does not fit,
    /// or its hello contradicts itself.
    #[must_use]
    pub fn encode(&self, out: &mut [u8]) -> Option<usize> {
        let mut to = Writer { out, at: 0 };
        to.put(&ClaimBody {
            token: self.token.into(),
            protocol: self.protocol.number.into(),
            protocol_version: self.protocol.version.into(),
            turn: self.turn.0.into(),
            grant: self.grant.into(),
            data_bytes: self.protocol.data_bytes,
            gone: self.gone,
        })?;
        to.addresses(&self.ports)?;
        let len = self.hello.encode(to.out.get_mut(to.at..)?).ok()?;
        Some(to.at + len)
    }

    /// Reads a claim. It has a port for each NIC of its hello, a grant, and no more parts of what was withdrawn than there can be.
    ///
    /// # Errors
    ///
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut from = Reader(bytes);
        let body: ClaimBody = from.take()?;
        let ports = from.addresses()?;
        let hello = Hello::decode(from.rest()).map_err(|_| Malformed::Bytes)?;
        let grant = body.grant.get();
        if grant == 0 || body.gone > Parts::MAX {
            return Err(Malformed::Bytes);
        }
        if ports.len() != hello.address.nics().len() {
            return Err(Malformed::Bytes);
        }
        let number = body.protocol.get();
        let version = body.protocol_version.get();
        let protocol = Protocol { number, version, data_bytes: body.data_bytes };
        let turn = Turn(body.turn.get());
        let gone = body.gone;
        Ok(Self { token: body.token.get(), grant, protocol, turn, ports, gone, hello })
    }
}

/// When to repeat what was not answered: soon at first, then twice as late each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Retry {
    next: Time,
    wait: Duration,
}

impl Retry {
    /// The first wait.
    pub const FIRST: Duration = Duration::from_millis(50);
    /// The longest.
    pub const LONGEST: Duration = Duration::from_secs(1);

    /// Something was sent for the first time.
    #[must_use]
    pub fn start(now: Time) -> Self {
        Self { next: now.after(Self::FIRST), wait: Self::FIRST }
    }

    /// When it is to be sent again.
    #[must_use]
    pub const fn due(&self) -> Time {
        self.next
    }

    /// Whether it is to be sent again now; if so, it counts as sent.
    pub fn is_due(&mut self, now: Time) -> bool {
        if now < self.next {
            return false;
        }
        self.wait = self.wait.saturating_mul(2).min(Self::LONGEST);
        self.next = now.after(self.wait);
        true
    }
}

/// Whether what is said to somebody leaves, where the transport may take nothing for a receiver that is not there, and says no more than that it
/// is busy (libfabric's `tcp`, while it connects). One that at times takes a message, and then does not deliver it, is no nearer to being there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Uptake {
    /// Nothing has been delivered since, and not everything was taken.
    since: Option<Time>,
    /// When what was not taken is said again.
    again: Option<Time>,
}

impl Uptake {
    /// How soon it is asked again.
    pub const ASK_AGAIN: Duration = Duration::from_millis(1);
    /// For how long, until nobody is believed to be there.
    pub const PATIENCE: Duration = Duration::from_secs(2);

    /// A message was taken, or waits behind one that was: which is no sign of anything.
    pub const fn taken(&mut self) {
        self.again = None;
    }

    /// A message was not taken.
    pub fn refused(&mut self, now: Time) {
        self.since.get_or_insert(now);
        self.again = Some(now.after(Self::ASK_AGAIN));
    }

    /// A message that had been taken was delivered.
    pub const fn delivered(&mut self) {
        self.since = None;
    }

    /// A message that had been taken was not delivered, and from `since` on it was not taken once more.
    pub fn undelivered(&mut self, since: Time) {
        self.since.get_or_insert(since);
    }

    /// When it is to be said again because it was not taken.
    #[must_use]
    pub const fn again(&self) -> Option<Time> {
        self.again
    }

    /// Whether nobody is there: nothing is taken now, and for so long nothing was delivered.
    #[must_use]
    pub fn is_over(&self, now: Time) -> bool {
        let long = self.since.is_some_and(|since| now.since(since) > Self::PATIENCE);
        long && self.again.is_some()
    }
}

/// Calls of ours that were given up after they had been proven, and the doors they went to: the last `N`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GivenUp<D, const N: usize>(Vec<(Nonce, D), N>);

impl<D, const N: usize> GivenUp<D, N> {
    /// None.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// One more. The oldest is forgotten if there is no room; nothing is kept if there is room for none. O(N).
    pub fn note(&mut self, call: Nonce, door: D) {
        if self.0.is_full() && !self.0.is_empty() {
            self.0.remove(0);
        }
        // Full only if there is room for none.
        let _ = self.0.push((call, door));
    }

    /// Whom to tell that the call is given up, if it is one of these: it was answered. O(N).
    #[must_use]
    pub fn answered(&self, call: &Nonce) -> Option<&D> {
        self.0.iter().find(|(nonce, _)| nonce == call).map(|(_, door)| door)
    }
}

impl<D, const N: usize> Default for GivenUp<D, N> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests;
