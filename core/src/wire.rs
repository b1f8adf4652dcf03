//! What bytes mean that come from outside: addresses, region descriptors, handshakes, refusals.
//!
//! Every value travels as one frame: magic (4 bytes), version (`u16`), length of the whole frame
//! (`u16`), body; integers little-endian. The frame's head keeps its layout for ever, so that any
//! version can tell what it was sent and by whom to be understood. Nothing here knows a socket, a
//! provider's address format, or whom to trust: a frame that decodes is well formed, not honest.
//!
//! # Invariants
//!
//! - `decode` accepts exactly the bytes that `encode` writes for the value it returns; everything
//!   else (cut short, trailing bytes, reserved bits, another version) is an error with the values found.
//! - No byte string makes `decode` or `parse` panic, or store more than a fixed size.
//! - An address's text form with one wrong character, or two neighbours swapped, is refused.
//!
//! The tests below check the first two on every truncation and every single-byte change of sample
//! frames, and on random bytes; the third on every character of sample texts.

use core::fmt;
use core::str::FromStr;

use heapless::{String, Vec};
use static_assertions::const_assert;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::id::{EngineId, MAX_NICS};
use crate::mailbox::{Geometry, GeometryError};
use crate::region::{Keys, MrDesc, Rights};

/// The version of the protocol spoken between engines: a [`Hello`] of another one is refused.
pub const PROTOCOL_VERSION: u16 = 3;

/// The longest address a provider may give a NIC, in bytes.
pub const NIC_ADDRESS_MAX: usize = 48;

/// Bytes of the head that starts every frame.
pub const FRAME_HEAD_BYTES: usize = size_of::<Head>();

/// Values that travel as one frame. Implemented here only.
pub trait Wire: body::Body {
    /// A buffer of this many bytes holds every value's frame.
    const ENCODED_MAX: usize = FRAME_HEAD_BYTES + Self::BODY_MAX;

    /// Writes the frame to the start of `out`; returns its length in bytes. O(length).
    ///
    /// # Errors
    ///
    /// [`WireError::BufferTooSmall`], or what is inconsistent in the value; `out` is then undefined.
    fn encode(&self, out: &mut [u8]) -> Result<usize, WireError> {
        let mut writer = Writer { out, at: 0 };
        writer.frame(self)?;
        Ok(writer.at)
    }

    /// The value whose frame is all of `bytes`. O(length).
    ///
    /// # Errors
    ///
    /// [`WireError`]: what was expected and what was found. Any bytes may be passed.
    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader { bytes, at: 0 };
        let value = reader.frame()?;
        reader.end()?;
        Ok(value)
    }
}

impl Wire for NetAddr {}
impl Wire for MrDesc {}
impl Wire for Hello {}
impl Wire for Refusal {}

/// Why bytes are not the value asked for, or why a value cannot be written.
///
/// On `decode` it is the sender's fault (or its version's); nothing was stored.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WireError {
    /// The bytes end too early.
    Truncated {
        /// Where the missing item starts, in bytes from the start of the frame read.
        offset: usize,
        /// Bytes the item needs.
        needed: usize,
        /// Bytes that are left.
        found: usize,
    },
    /// There are bytes behind the end.
    TrailingBytes {
        /// Where the value ended.
        offset: usize,
        /// Bytes behind it.
        extra: usize,
    },
    /// Another kind of frame, or no frame at all.
    Magic {
        /// First bytes of the kind asked for.
        expected: [u8; 4],
        /// First bytes found.
        found: [u8; 4],
    },
    /// The frame is of another version.
    Version {
        /// The version understood here.
        expected: u16,
        /// The version found.
        found: u16,
    },
    /// The caller's buffer cannot hold the frame.
    BufferTooSmall {
        /// Bytes needed so far.
        needed: usize,
        /// Bytes there are.
        available: usize,
    },
    /// The number names no provider known here.
    Provider {
        /// The number found.
        found: u8,
    },
    /// An address has no NIC, or more than [`MAX_NICS`].
    NicCount {
        /// The number found.
        found: usize,
    },
    /// A NIC's address is longer than [`NIC_ADDRESS_MAX`].
    AddressTooLong {
        /// Which NIC.
        nic: usize,
        /// Its address's length in bytes.
        found: usize,
    },
    /// The region's rights have bits that are not known here.
    Rights {
        /// The bits found.
        found: u8,
    },
    /// The region has no key, or more than [`MAX_NICS`].
    KeyCount {
        /// The number found.
        found: usize,
    },
    /// Bits that have no meaning in this version are set.
    Reserved {
        /// The bits found.
        found: u32,
    },
    /// The mailbox belongs to another engine than the one that says hello.
    MailboxOwner {
        /// The engine that says hello.
        engine: EngineId,
        /// The mailbox's owner.
        owner: EngineId,
    },
    /// The mailbox is not registered with each NIC of the address.
    MailboxKeys {
        /// NICs of the address.
        nics: usize,
        /// Keys of the mailbox.
        keys: usize,
    },
    /// The mailbox cannot be written to.
    MailboxNotWritable,
    /// The mailbox's slots do not fit its memory.
    MailboxTooSmall {
        /// Bytes the slots need.
        needed: u64,
        /// Bytes the region has.
        found: u64,
    },
    /// The mailbox's slots are not possible ones.
    Geometry(GeometryError),
    /// The number names no refusal known here.
    RefusalCode {
        /// The number found.
        found: u8,
    },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Truncated { offset, needed, found } => {
                write!(f, "{needed} bytes expected at offset {offset}, {found} found")
            }
            Self::TrailingBytes { offset, extra } => {
                write!(f, "{extra} bytes behind the end at offset {offset}")
            }
            Self::Magic { expected, found } => write!(
                f,
                "frame starts with \"{}\" instead of \"{}\"",
                found.escape_ascii(),
                expected.escape_ascii()
            ),
            Self::Version { expected, found } => {
                write!(f, "version {found} is not understood, only version {expected}")
            }
            Self::BufferTooSmall { needed, available } => {
                write!(f, "{needed} bytes do not fit a buffer of {available}")
            }
            Self::Provider { found } => write!(f, "provider number {found} is not known"),
            Self::NicCount { found } => {
                write!(f, "an address has 1 to {MAX_NICS} nics, not {found}")
            }
            Self::AddressTooLong { nic, found } => {
                write!(f, "address of nic {nic} has {found} bytes, more than {NIC_ADDRESS_MAX}")
            }
            Self::Rights { found } => write!(f, "rights {found:#04x} are not known"),
            Self::KeyCount { found } => {
                write!(f, "a region has 1 to {MAX_NICS} keys, not {found}")
            }
            Self::Reserved { found } => write!(f, "reserved bits {found:#x} are set"),
            Self::MailboxOwner { engine, owner } => {
                write!(f, "engine {engine} offers a mailbox of engine {owner}")
            }
            Self::MailboxKeys { nics, keys } => {
                write!(f, "mailbox has {keys} keys for {nics} nics")
            }
            Self::MailboxNotWritable => f.write_str("mailbox cannot be written to"),
            Self::MailboxTooSmall { needed, found } => {
                write!(f, "mailbox needs {needed} bytes and has {found}")
            }
            Self::Geometry(error) => write!(f, "mailbox: {error}"),
            Self::RefusalCode { found } => write!(f, "refusal number {found} is not known"),
        }
    }
}

impl core::error::Error for WireError {}

// ---------------------------------------------------------------------------------------------
// Addresses

/// How an engine is reached. The numbers travel and never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ProviderKind {
    /// Shared memory of one host.
    Shm = 1,
    /// Reliable connected queue pairs of libibverbs.
    Verbs = 2,
    /// Endpoints of libfabric.
    Libfabric = 3,
    /// GPUs of one host over NVLink.
    Nvlink = 4,
    /// The simulated fabric of one process.
    Sim = 5,
    /// Shared memory to peers of the own host, libfabric to others ([`crate::span`]).
    ShmLibfabric = 6,
    /// Shared memory to peers of the own host, libibverbs to others.
    ShmVerbs = 7,
}

impl ProviderKind {
    /// All kinds, by number.
    pub const ALL: [Self; 7] = [
        Self::Shm,
        Self::Verbs,
        Self::Libfabric,
        Self::Nvlink,
        Self::Sim,
        Self::ShmLibfabric,
        Self::ShmVerbs,
    ];

    /// The name in an address's text form.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Verbs => "verbs",
            Self::Libfabric => "libfabric",
            Self::Nvlink => "nvlink",
            Self::Sim => "sim",
            Self::ShmLibfabric => "shm-libfabric",
            Self::ShmVerbs => "shm-verbs",
        }
    }

    /// The number as it travels.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The kind of that number; `None` if it is not known here.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }

    /// The kind of that name; `None` if it is not known here.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for ProviderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One NIC of an engine, as peers see it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NicAddr {
    /// Speed in Gbit/s, by which transfers are split; 0 if it is not usable now.
    pub speed_gbps: u32,
    /// The address in the provider's own form.
    pub address: Vec<u8, NIC_ADDRESS_MAX>,
}

/// All one needs to reach an engine: its provider, its identity, and 1 to [`MAX_NICS`] NICs.
///
/// Travels as a frame ([`Wire`]) or as a line of text ([`fmt::Display`], [`FromStr`]):
/// `iw1:shm:` and then lower-case letters and digits only, so that it survives copying and shells.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NetAddr {
    provider: ProviderKind,
    engine: EngineId,
    nics: Vec<NicAddr, MAX_NICS>,
}

impl NetAddr {
    /// An address; NIC number `n` is `nics[n]`.
    ///
    /// # Errors
    ///
    /// [`WireError::NicCount`] unless there are 1 to [`MAX_NICS`] NICs.
    pub fn new(
        provider: ProviderKind,
        engine: EngineId,
        nics: &[NicAddr],
    ) -> Result<Self, WireError> {
        let found = nics.len();
        match Vec::from_slice(nics) {
            Ok(nics) if found > 0 => Ok(Self { provider, engine, nics }),
            _ => Err(WireError::NicCount { found }),
        }
    }

    /// How the engine is reached.
    #[must_use]
    pub const fn provider(&self) -> ProviderKind {
        self.provider
    }

    /// Which engine answers there.
    #[must_use]
    pub const fn engine(&self) -> EngineId {
        self.engine
    }

    /// Its NICs, at least one.
    #[must_use]
    pub fn nics(&self) -> &[NicAddr] {
        &self.nics
    }
}

/// The text form's start, with its version.
const SCHEME: &str = "iw1:";
/// The digits of the text form (RFC 4648's alphabet, lower case, unpadded).
const DIGITS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
/// Bytes of a frame that the text form spells with words instead: the head and the provider.
const SPELLED: usize = FRAME_HEAD_BYTES + 1;
const CHECKSUM_BYTES: usize = 4;

impl fmt::Display for NetAddr {
    /// `iw1:PROVIDER:` and, in base 32, the frame behind the provider's number with the CRC-32C of
    /// the whole frame.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut frame = [0; <Self as Wire>::ENCODED_MAX];
        let len = self.encode(&mut frame).map_err(|_| fmt::Error)?;
        let frame = frame.get(..len).ok_or(fmt::Error)?;
        write!(f, "{SCHEME}{}:", self.provider)?;
        let checksum = crc32c(frame).to_le_bytes();
        let (mut bits, mut held) = (0_u16, 0_u8); // Fewer than 5 bits are held between bytes.
        for byte in frame.iter().skip(SPELLED).chain(&checksum) {
            bits = (bits << 8) | u16::from(*byte);
            held += 8;
            while held >= 5 {
                held -= 5;
                fmt::Write::write_char(f, digit(bits >> held))?;
            }
        }
        if held > 0 {
            fmt::Write::write_char(f, digit(bits << (5 - held)))?;
        }
        Ok(())
    }
}

fn digit(bits: u16) -> char {
    DIGITS.get(usize::from(bits % 32)).copied().map_or('a', char::from)
}

/// Why a text is not an address: the text is wrong, or made by another version.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ParseAddrError {
    /// The text does not start with `iw1:`.
    Scheme,
    /// The provider's name is not known here.
    Provider {
        /// Its first characters.
        name: String<16>,
    },
    /// A character that no address has.
    Character {
        /// The character.
        found: char,
        /// How many bytes stand before it.
        offset: usize,
    },
    /// More characters than the longest address has.
    TooLong {
        /// Characters behind the provider's name.
        found: usize,
        /// The most there can be.
        max: usize,
    },
    /// The characters do not match their checksum.
    Checksum,
    /// The checksum is right, and yet it is no address: made by something else.
    Wire(WireError),
}

impl fmt::Display for ParseAddrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scheme => write!(f, "an address starts with \"{SCHEME}\""),
            Self::Provider { name } => {
                write!(f, "provider \"{}\" is not known, only", name.escape_debug())?;
                ProviderKind::ALL.iter().try_for_each(|kind| write!(f, " {kind}"))
            }
            Self::Character { found, offset } => write!(
                f,
                "character {found:?} at offset {offset}: an address has only lower-case letters \
                 and the digits 2 to 7 there"
            ),
            Self::TooLong { found, max } => {
                write!(f, "{found} characters, more than the {max} of the longest address")
            }
            Self::Checksum => f.write_str("checksum does not match: mistyped or truncated"),
            Self::Wire(error) => write!(f, "checksum matches, but {error}"),
        }
    }
}

impl core::error::Error for ParseAddrError {}

impl From<WireError> for ParseAddrError {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

/// Characters of the longest address, behind the provider's name.
const TEXT_MAX: usize = ((NetAddr::ENCODED_MAX - SPELLED + CHECKSUM_BYTES) * 8).div_ceil(5);

impl FromStr for NetAddr {
    type Err = ParseAddrError;

    /// The address of that text, which has no space around it. O(length).
    fn from_str(text: &str) -> Result<Self, ParseAddrError> {
        let rest = text.strip_prefix(SCHEME).ok_or(ParseAddrError::Scheme)?;
        let (name, digits) = rest.split_once(':').unwrap_or((rest, ""));
        let provider = ProviderKind::from_name(name).ok_or_else(|| {
            let mut known: String<16> = String::new();
            // Cut at the capacity: what does not fit is not needed to recognise the name.
            let _ = name.chars().try_for_each(|c| known.push(c));
            ParseAddrError::Provider { name: known }
        })?;
        if digits.len() > TEXT_MAX {
            return Err(ParseAddrError::TooLong { found: digits.len(), max: TEXT_MAX });
        }
        let before = text.len() - digits.len();
        let behind = from_digits(digits, before)?;
        let Some((body, checksum)) = behind.split_last_chunk::<CHECKSUM_BYTES>() else {
            return Err(ParseAddrError::Checksum);
        };
        let mut frame: Vec<u8, { NetAddr::ENCODED_MAX }> = Vec::new();
        let len = SPELLED + body.len();
        let head = Head::new::<Self>(len)?;
        for part in [head.as_bytes(), &[provider.number()], body] {
            frame
                .extend_from_slice(part)
                .map_err(|_| WireError::BufferTooSmall { needed: len, available: frame.len() })?;
        }
        if crc32c(&frame) != u32::from_le_bytes(*checksum) {
            return Err(ParseAddrError::Checksum);
        }
        Ok(Self::decode(&frame)?)
    }
}

/// The bytes of a text in base 32, which starts at `offset` of what the user typed.
fn from_digits(
    digits: &str,
    offset: usize,
) -> Result<Vec<u8, { NetAddr::ENCODED_MAX }>, ParseAddrError> {
    let mut bytes: Vec<u8, { NetAddr::ENCODED_MAX }> = Vec::new();
    let (mut bits, mut held) = (0_u16, 0_u8); // Fewer than 8 bits are held between characters.
    for (at, found) in digits.char_indices() {
        let value = match found {
            'a'..='z' => found as u16 - 'a' as u16,
            '2'..='7' => found as u16 - '2' as u16 + 26,
            _ => {
                return Err(ParseAddrError::Character { found, offset: offset + at });
            }
        };
        bits = (bits << 5) | value;
        held += 5;
        if held >= 8 {
            held -= 8;
            let byte = (bits >> held).to_le_bytes()[0];
            let max = TEXT_MAX;
            bytes.push(byte).map_err(|_| ParseAddrError::TooLong { found: digits.len(), max })?;
        }
    }
    // What is left is padding: less than a character, and zero. Otherwise a character is missing,
    // or two texts would mean the same address.
    if held >= 5 || bits & ((1 << held) - 1) != 0 {
        return Err(ParseAddrError::Checksum);
    }
    Ok(bytes)
}

/// CRC-32C (Castagnoli): polynomial 0x1EDC6F41, reflected, start and final xor all ones.
///
/// Finds every wrong run of up to 32 bits, so every wrong character and every swapped pair.
fn crc32c(bytes: &[u8]) -> u32 {
    const REFLECTED: u32 = 0x1EDC_6F41_u32.reverse_bits();
    let mut crc = !0_u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (REFLECTED & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

// ---------------------------------------------------------------------------------------------
// Handshake

/// What each side says on connecting, whatever the provider.
///
/// Its frame's version is [`PROTOCOL_VERSION`]. `encode` and `decode` check that the parts agree: the
/// mailbox is the engine's own, writable, large enough, and has a key for each NIC of the address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Hello {
    /// Where the speaker is reached, and who it is.
    pub address: NetAddr,
    /// The speaker's memory that the listener may write messages to. Immediates without bytes point
    /// there too.
    pub mailbox: MrDesc,
    /// How that memory is divided.
    pub geometry: Geometry,
    /// How often the speaker asks to hear from the listener, in milliseconds.
    pub heartbeat_ms: u32,
    /// How many calls the speaker has made, to whomever: this one's number if this is a call. All of them
    /// up to here are answered by this, or given up ([`crate::calls`]).
    pub call: u64,
}

impl Hello {
    /// Who is speaking.
    #[must_use]
    pub const fn engine(&self) -> EngineId {
        self.address.engine
    }

    fn check(&self) -> Result<(), WireError> {
        let (engine, owner) = (self.engine(), self.mailbox.owner);
        if engine != owner {
            return Err(WireError::MailboxOwner { engine, owner });
        }
        let (nics, keys) = (self.address.nics.len(), usize::from(self.mailbox.keys.nics()));
        if nics != keys {
            return Err(WireError::MailboxKeys { nics, keys });
        }
        if !self.mailbox.rights.remote_write() {
            return Err(WireError::MailboxNotWritable);
        }
        let needed = self.geometry.bytes();
        if self.mailbox.range(0, needed).is_err() {
            return Err(WireError::MailboxTooSmall { needed, found: self.mailbox.len });
        }
        Ok(())
    }
}

/// Why one side does not want a connection. The frame keeps its layout in every version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The other side speaks another version of the protocol.
    Version {
        /// The version of the side that refuses.
        ours: u16,
        /// The version of the side that is refused.
        theirs: u16,
    },
    /// No room, or no memory, for another peer.
    Busy,
    /// The other side did not show that it may connect.
    Unauthorised,
    /// Both sides called each other at once, and the other connection is kept.
    Crossed,
    /// The engine is going away.
    ShuttingDown,
    /// An engine called itself.
    Myself,
    /// What was received is no hello.
    Malformed,
    /// The call is one that its caller has given up, and arrives late.
    Stale,
    /// No two NICs of the same number reach each other, of those that are up.
    NoWay,
    /// The address is another engine's now.
    Elsewhere,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { ours, theirs } => write!(
                f,
                "protocol version {theirs} is not understood by the side that refuses, only {ours}"
            ),
            Self::Busy => f.write_str("no room, or no memory, for another peer"),
            Self::Unauthorised => f.write_str("not authorised"),
            Self::Crossed => f.write_str("both sides connected at once, the other way is kept"),
            Self::ShuttingDown => f.write_str("shutting down"),
            Self::Myself => f.write_str("an engine cannot be its own peer"),
            Self::Malformed => f.write_str("handshake not understood"),
            Self::Stale => f.write_str("the call is older than one that was answered since"),
            Self::NoWay => f.write_str(
                "no NIC reaches the other side's of the same number; see which are down",
            ),
            Self::Elsewhere => f.write_str(
                "another engine has the address by now, the one that was called is gone",
            ),
        }
    }
}

impl core::error::Error for Refusal {}

// ---------------------------------------------------------------------------------------------
// Frames

/// The start of every frame, in every version.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 4],
    version: U16,
    len: U16,
}

impl Head {
    fn new<T: body::Body>(len: usize) -> Result<Self, WireError> {
        let available = usize::from(u16::MAX);
        let len =
            u16::try_from(len).map_err(|_| WireError::BufferTooSmall { needed: len, available })?;
        Ok(Self { magic: T::MAGIC, version: T::VERSION.into(), len: len.into() })
    }
}

use body::{Reader, Writer};

/// Keeps [`Wire`] to the types of this module.
mod body {
    use super::WireError;

    /// Fills a buffer from its start.
    pub struct Writer<'a> {
        pub(super) out: &'a mut [u8],
        pub(super) at: usize,
    }

    /// Reads a frame from its start.
    pub struct Reader<'a> {
        pub(super) bytes: &'a [u8],
        pub(super) at: usize,
    }

    /// What differs between frames.
    pub trait Body: Sized {
        const MAGIC: [u8; 4];
        const VERSION: u16;
        const BODY_MAX: usize;
        fn put(&self, to: &mut Writer<'_>) -> Result<(), WireError>;
        fn take(from: &mut Reader<'_>) -> Result<Self, WireError>;
    }
}

impl Writer<'_> {
    fn put(&mut self, part: &(impl IntoBytes + Immutable + ?Sized)) -> Result<(), WireError> {
        let part = part.as_bytes();
        let (available, needed) = (self.out.len(), self.at.saturating_add(part.len()));
        // In two steps: so the compiler, too, knows that the lengths are equal.
        let rest = self.out.get_mut(self.at..);
        let room = rest
            .and_then(|rest| rest.get_mut(..part.len()))
            .ok_or(WireError::BufferTooSmall { needed, available })?;
        room.copy_from_slice(part);
        self.at = needed;
        Ok(())
    }

    fn frame<T: body::Body>(&mut self, value: &T) -> Result<(), WireError> {
        let start = self.at;
        self.put(&Head::new::<T>(0)?)?;
        value.put(self)?;
        let end = self.at;
        self.at = start;
        self.put(&Head::new::<T>(end - start)?)?;
        self.at = end;
        Ok(())
    }
}

impl<'a> Reader<'a> {
    fn take_bytes(&mut self, needed: usize) -> Result<&'a [u8], WireError> {
        let (offset, found) = (self.at, self.bytes.len().saturating_sub(self.at));
        let end = offset.saturating_add(needed);
        let part =
            self.bytes.get(offset..end).ok_or(WireError::Truncated { offset, needed, found })?;
        self.at = end;
        Ok(part)
    }

    fn take<T: FromBytes>(&mut self) -> Result<T, WireError> {
        let (offset, needed) = (self.at, size_of::<T>());
        let part = self.take_bytes(needed)?;
        T::read_from_bytes(part).map_err(|_| WireError::Truncated {
            offset,
            needed,
            found: part.len(),
        })
    }

    fn frame<T: body::Body>(&mut self) -> Result<T, WireError> {
        let start = self.at;
        let head: Head = self.take()?;
        if head.magic != T::MAGIC {
            return Err(WireError::Magic { expected: T::MAGIC, found: head.magic });
        }
        if head.version.get() != T::VERSION {
            return Err(WireError::Version { expected: T::VERSION, found: head.version.get() });
        }
        self.at = start;
        let mut frame = Reader { bytes: self.take_bytes(head.len.get().into())?, at: 0 };
        frame.take::<Head>()?; // A length that is less than the head's own is caught here.
        let value = T::take(&mut frame)?;
        frame.end()?;
        Ok(value)
    }

    fn end(&self) -> Result<(), WireError> {
        let extra = self.bytes.len().saturating_sub(self.at);
        if extra == 0 { Ok(()) } else { Err(WireError::TrailingBytes { offset: self.at, extra }) }
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct NetAddrBody {
    provider: u8,
    engine: U64,
    nics: u8,
    // Then for each NIC a `NicBody` and its address.
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct NicBody {
    speed_gbps: U32,
    len: u8,
}

impl body::Body for NetAddr {
    const MAGIC: [u8; 4] = *b"IWna";
    const VERSION: u16 = 1;
    const BODY_MAX: usize =
        size_of::<NetAddrBody>() + MAX_NICS * (size_of::<NicBody>() + NIC_ADDRESS_MAX);

    fn put(&self, to: &mut Writer<'_>) -> Result<(), WireError> {
        let found = self.nics.len();
        let nics = u8::try_from(found).map_err(|_| WireError::NicCount { found })?;
        let (provider, engine) = (self.provider.number(), self.engine.0.into());
        to.put(&NetAddrBody { provider, engine, nics })?;
        for (nic, entry) in self.nics.iter().enumerate() {
            let found = entry.address.len();
            let len = u8::try_from(found).map_err(|_| WireError::AddressTooLong { nic, found })?;
            to.put(&NicBody { speed_gbps: entry.speed_gbps.into(), len })?;
            to.put(entry.address.as_slice())?;
        }
        Ok(())
    }

    fn take(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let NetAddrBody { provider, engine, nics: found } = from.take()?;
        let provider =
            ProviderKind::from_number(provider).ok_or(WireError::Provider { found: provider })?;
        let found = usize::from(found);
        let mut nics: Vec<NicAddr, MAX_NICS> = Vec::new();
        for nic in 0..found {
            let NicBody { speed_gbps, len } = from.take()?;
            let len = usize::from(len);
            if len > NIC_ADDRESS_MAX {
                return Err(WireError::AddressTooLong { nic, found: len });
            }
            let address = Vec::from_slice(from.take_bytes(len)?)
                .map_err(|_| WireError::AddressTooLong { nic, found: len })?;
            nics.push(NicAddr { speed_gbps: speed_gbps.get(), address })
                .map_err(|_| WireError::NicCount { found })?;
        }
        if nics.is_empty() {
            return Err(WireError::NicCount { found });
        }
        Ok(Self { provider, engine: EngineId(engine.get()), nics })
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct MrDescBody {
    owner: U64,
    base: U64,
    len: U64,
    generation: U32,
    rights: u8,
    keys: u8,
    // Then a `U64` for each key.
}

impl body::Body for MrDesc {
    const MAGIC: [u8; 4] = *b"IWmr";
    const VERSION: u16 = 1;
    const BODY_MAX: usize = size_of::<MrDescBody>() + MAX_NICS * size_of::<U64>();

    fn put(&self, to: &mut Writer<'_>) -> Result<(), WireError> {
        to.put(&MrDescBody {
            owner: self.owner.0.into(),
            base: self.base.into(),
            len: self.len.into(),
            generation: self.generation.into(),
            rights: self.rights.bits(),
            keys: self.keys.nics(),
        })?;
        self.keys.as_slice().iter().try_for_each(|key| to.put(&U64::new(*key)))
    }

    fn take(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let body: MrDescBody = from.take()?;
        let rights =
            Rights::from_bits(body.rights).ok_or(WireError::Rights { found: body.rights })?;
        let found = usize::from(body.keys);
        let mut keys: Vec<u64, MAX_NICS> = Vec::new();
        for _ in 0..found {
            let key: U64 = from.take()?;
            keys.push(key.get()).map_err(|_| WireError::KeyCount { found })?;
        }
        Ok(Self {
            owner: EngineId(body.owner.get()),
            base: body.base.get(),
            len: body.len.get(),
            generation: body.generation.get(),
            rights,
            keys: Keys::new(&keys).ok_or(WireError::KeyCount { found })?,
        })
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HelloBody {
    slots: u8,
    reserved: [u8; 3],
    slot_bytes: U32,
    heartbeat_ms: U32,
    call: U64,
    // Then the frames of the address and of the mailbox.
}

impl body::Body for Hello {
    const MAGIC: [u8; 4] = *b"IWhi";
    const VERSION: u16 = PROTOCOL_VERSION;
    const BODY_MAX: usize = size_of::<HelloBody>() + NetAddr::ENCODED_MAX + MrDesc::ENCODED_MAX;

    fn put(&self, to: &mut Writer<'_>) -> Result<(), WireError> {
        self.check()?;
        to.put(&HelloBody {
            slots: self.geometry.slots(),
            reserved: [0; 3],
            slot_bytes: self.geometry.slot_bytes().into(),
            heartbeat_ms: self.heartbeat_ms.into(),
            call: self.call.into(),
        })?;
        to.frame(&self.address)?;
        to.frame(&self.mailbox)
    }

    fn take(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let body: HelloBody = from.take()?;
        let HelloBody { slots, reserved: [a, b, c], slot_bytes, heartbeat_ms, call } = body;
        reserved(u32::from_le_bytes([a, b, c, 0]))?;
        let hello = Self {
            address: from.frame()?,
            mailbox: from.frame()?,
            geometry: Geometry::new(slots, slot_bytes.get()).map_err(WireError::Geometry)?,
            heartbeat_ms: heartbeat_ms.get(),
            call: call.get(),
        };
        hello.check()?;
        Ok(hello)
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RefusalBody {
    code: u8,
    reserved: u8,
    ours: U16,
    theirs: U16,
}

impl body::Body for Refusal {
    const MAGIC: [u8; 4] = *b"IWno";
    const VERSION: u16 = 1;
    const BODY_MAX: usize = size_of::<RefusalBody>();

    fn put(&self, to: &mut Writer<'_>) -> Result<(), WireError> {
        let (code, ours, theirs) = match *self {
            Self::Version { ours, theirs } => (1, ours, theirs),
            Self::Busy => (2, 0, 0),
            Self::Unauthorised => (3, 0, 0),
            Self::Crossed => (4, 0, 0),
            Self::ShuttingDown => (5, 0, 0),
            Self::Myself => (6, 0, 0),
            Self::Malformed => (7, 0, 0),
            Self::Stale => (8, 0, 0),
            Self::NoWay => (9, 0, 0),
            Self::Elsewhere => (10, 0, 0),
        };
        to.put(&RefusalBody { code, reserved: 0, ours: ours.into(), theirs: theirs.into() })
    }

    fn take(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let RefusalBody { code, reserved: spare, ours, theirs } = from.take()?;
        reserved(spare.into())?;
        let (ours, theirs) = (ours.get(), theirs.get());
        let refusal = match code {
            1 => return Ok(Self::Version { ours, theirs }),
            2 => Self::Busy,
            3 => Self::Unauthorised,
            4 => Self::Crossed,
            5 => Self::ShuttingDown,
            6 => Self::Myself,
            7 => Self::Malformed,
            8 => Self::Stale,
            9 => Self::NoWay,
            10 => Self::Elsewhere,
            found => return Err(WireError::RefusalCode { found }),
        };
        reserved((u32::from(theirs) << 16) | u32::from(ours))?;
        Ok(refusal)
    }
}

fn reserved(found: u32) -> Result<(), WireError> {
    if found == 0 { Ok(()) } else { Err(WireError::Reserved { found }) }
}

// The longest frame's length fits the head.
const_assert!(Hello::ENCODED_MAX <= u16::MAX as usize);
const_assert!(NIC_ADDRESS_MAX <= u8::MAX as usize);

#[cfg(test)]
mod tests;
