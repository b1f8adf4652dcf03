//! What the messages on a session's socket mean, and how the two ends prove who they are.
//!
//! ```text
//!   initiator                                        acceptor
//!     Call { nonce, target }            ──▶
//!                                       ◀──   Challenge { nonce }
//!     Prove { proof, claim } + segment  ──▶
//!                                       ◀──   Accept { proof, claim }
//! ```
//!
//! Once they are up, either asks how it can write to a region of the other's:
//!
//! ```text
//!     MapRequest { key }                ──▶
//!                                       ◀──   MapReply { key, answer } + file
//!     FilesRequest { key, from }        ──▶                                     of GPU memory over several allocations:
//!                                       ◀──   FilesReply { key, from, sizes } + files      until all have come
//! ```
//!
//! `Refuse` may take the place of any answer. A proof is a keyed hash over both nonces, the name that
//! was called, and everything the prover claims: it can be neither replayed, nor reflected (the roles
//! differ), nor relayed to another engine of the group. Without a group key the proofs are not looked
//! at, and the ends go by the user id that the kernel reports.
//!
//! Pure: bytes in, values out. Opens nothing, sends nothing, knows no session.
//!
//! # Invariants
//!
//! [`Message::decode`] answers any bytes with a value or an error. A message has one encoding, which
//! fits [`MESSAGE_MAX`]; trailing bytes are refused. The tests below try every truncation and every
//! changed byte of each kind.

use std::fmt;

use immwire_core::wire::{PROTOCOL_VERSION, Refusal, Wire};
use immwire_cuda::{ALLOCATIONS_MAX, IPC_HANDLE_BYTES};

use super::gpu::Described;
use super::segment::Geometry;
use super::socket::{FILES_MAX, ListenerId, MESSAGE_MAX};

const MAGIC: [u8; 4] = *b"IWsm";

/// The secret that the engines of a group share, in place of a common user.
#[derive(Clone)]
pub struct GroupKey([u8; 32]);

impl GroupKey {
    /// The key that follows from `secret`: any bytes, hard to guess. One hash.
    #[must_use]
    pub fn derive(secret: &[u8]) -> Self {
        Self(blake3::derive_key("immwire 2026-11 group key of the shm provider", secret))
    }
}

impl GroupKey {
    /// Whether it was derived of no bytes, as everybody can.
    pub(crate) fn is_of_nothing(&self) -> bool {
        self.0 == Self::derive(&[]).0
    }

    /// A hash under the key. Whoever uses it begins with words of its own, so that no two uses meet.
    pub(crate) fn hasher(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.0)
    }
}

impl fmt::Debug for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupKey(..)")
    }
}

/// A random value that makes a proof good for one handshake only.
pub(super) type Nonce = [u8; 32];

/// What one end says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim<'a> {
    /// Where a word of its own memory lies, for the other end to try to write to.
    pub(super) probe_address: u64,
    /// The shape of the segment.
    pub(super) geometry: Geometry,
    /// An encoded `Hello`.
    pub(super) hello: &'a [u8],
}

/// Who proves something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prover {
    Initiator,
    Acceptor,
}

/// What a handshake is about, as both ends know it once the nonces are exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) initiator: Nonce,
    pub(super) acceptor: Nonce,
    pub(super) target: ListenerId,
}

impl Terms {
    /// What `prover` shows to prove that it holds `key` and claims `claim`.
    pub(super) fn proof(&self, key: &GroupKey, prover: Prover, claim: &Claim<'_>) -> blake3::Hash {
        let role = match prover {
            Prover::Initiator => b"initiator",
            Prover::Acceptor => b"acceptor.",
        };
        // All parts but the last have fixed lengths: no two claims hash the same bytes.
        blake3::Hasher::new_keyed(&key.0)
            .update(role)
            .update(&self.initiator)
            .update(&self.acceptor)
            .update(&self.target)
            .update(&claim.probe_address.to_le_bytes())
            .update(&[claim.geometry.initiator_nics, claim.geometry.acceptor_nics])
            .update(claim.hello)
            .finalize()
    }

    /// Whether `proof` is the right one; no key asks for none. Takes the same time for every proof.
    pub(super) fn verify(
        &self,
        key: Option<&GroupKey>,
        prover: Prover,
        claim: &Claim<'_>,
        proof: [u8; 32],
    ) -> bool {
        // `blake3::Hash` compares in constant time.
        key.is_none_or(|key| self.proof(key, prover, claim) == blake3::Hash::from_bytes(proof))
    }
}

/// How a peer's region can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// The file that comes with the message is the region.
    File { base: u64, len: u64 },
    /// It is memory of the peer's process only.
    Process { base: u64, len: u64 },
    /// It is memory of a GPU.
    Gpu { region: Described, by: By },
    /// There is no such region, or not any more, or peers may not write to it.
    Refused,
}

/// How memory of a GPU is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// By the file that comes with the message.
    File,
    /// By a handle of the driver's.
    Handle([u8; IPC_HANDLE_BYTES]),
    /// By so many files, 2 to [`ALLOCATIONS_MAX`], each of an allocation: they are asked for.
    Files(u32),
}

/// How long the allocations are whose files come with a message, in their order. None: they are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Sizes {
    all: [u64; FILES_MAX],
    count: usize,
}

impl Sizes {
    /// Adds one, if there is room.
    pub(super) fn push(&mut self, bytes: u64) {
        if let Some(place) = self.all.get_mut(self.count) {
            *place = bytes;
            self.count += 1;
        }
    }

    pub(super) fn as_slice(&self) -> &[u64] {
        self.all.get(..self.count).unwrap_or(&[])
    }
}

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Message<'a> {
    Call {
        nonce: Nonce,
        target: ListenerId,
    },
    Challenge {
        nonce: Nonce,
    },
    Prove {
        proof: [u8; 32],
        claim: Claim<'a>,
    },
    Accept {
        proof: [u8; 32],
        claim: Claim<'a>,
    },
    Refuse(Refusal),
    /// The sender has tried to write `nonce` to the receiver's probe word.
    Probe {
        nonce: u64,
    },
    /// Whether it arrived there.
    Probed {
        arrived: bool,
    },
    /// The sender wants to write to the region of `key`.
    MapRequest {
        key: u64,
    },
    MapReply {
        key: u64,
        answer: Answer,
    },
    /// Wake up: there is something in the segment.
    Kick,
    /// The sender wants the files of the region of `key` from number `from` on.
    FilesRequest {
        key: u64,
        from: u32,
    },
    /// Some of them, as many as sizes.
    FilesReply {
        key: u64,
        from: u32,
        sizes: Sizes,
    },
}

/// Why bytes are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Malformed {
    /// The sender speaks another version.
    Version { theirs: u16 },
    /// No version of ours has such a message.
    Message,
}

struct Writer<'a> {
    out: &'a mut [u8; MESSAGE_MAX],
    at: usize,
}

impl Writer<'_> {
    /// Appends `bytes`; what does not fit makes the length impossible, which `finish` sees.
    fn put(&mut self, bytes: &[u8]) {
        let end = self.at.saturating_add(bytes.len());
        if let Some(part) = self.out.get_mut(self.at..end) {
            part.copy_from_slice(bytes);
        }
        self.at = end;
    }

    fn head(&mut self, kind: u16) {
        self.put(&MAGIC);
        self.put(&PROTOCOL_VERSION.to_le_bytes());
        self.put(&kind.to_le_bytes());
    }

    fn claim(&mut self, proof: &[u8; 32], claim: &Claim<'_>) {
        self.put(proof);
        self.put(&claim.probe_address.to_le_bytes());
        self.put(&[claim.geometry.initiator_nics, claim.geometry.acceptor_nics]);
        self.put(claim.hello);
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk().ok_or(Malformed::Message)?;
        self.0 = rest;
        Ok(*head)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_le_bytes)
    }

    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    fn claim(&mut self) -> Result<Claim<'a>, Malformed> {
        let probe_address = self.u64()?;
        let [initiator_nics, acceptor_nics] = self.take()?;
        if !(1..=8).contains(&initiator_nics) || !(1..=8).contains(&acceptor_nics) {
            return Err(Malformed::Message);
        }
        let geometry = Geometry { initiator_nics, acceptor_nics };
        Ok(Claim { probe_address, geometry, hello: self.rest() })
    }

    fn sizes(&mut self) -> Result<Sizes, Malformed> {
        let [count] = self.take()?;
        if usize::from(count) > FILES_MAX {
            return Err(Malformed::Message);
        }
        let mut sizes = Sizes::default();
        for _ in 0..count {
            sizes.push(self.u64()?);
        }
        Ok(sizes)
    }

    fn answer(&mut self) -> Result<Answer, Malformed> {
        let [kind] = self.take()?;
        let (base, len) = (self.u64()?, self.u64()?);
        if (3..=5).contains(&kind) {
            let (start, whole, uuid) = (self.u64()?, self.u64()?, self.take()?);
            let by = match kind {
                3 => By::File,
                4 => By::Handle(self.take()?),
                _ => By::Files(self.u32()?),
            };
            if matches!(by, By::Files(count) if !(2..=ALLOCATIONS_MAX).contains(&count)) {
                return Err(Malformed::Message);
            }
            return Ok(Answer::Gpu { region: Described { uuid, base, len, start, whole }, by });
        }
        match kind {
            0 if (base, len) == (0, 0) => Ok(Answer::Refused),
            1 => Ok(Answer::File { base, len }),
            2 => Ok(Answer::Process { base, len }),
            _ => Err(Malformed::Message),
        }
    }
}

impl<'a> Message<'a> {
    /// Writes the message to the start of `out`; returns its length in bytes.
    ///
    /// `None` if it does not fit, which only a hello of impossible length brings about.
    pub(super) fn encode(&self, out: &mut [u8; MESSAGE_MAX]) -> Option<usize> {
        let mut to = Writer { out, at: 0 };
        match self {
            Self::Call { nonce, target } => {
                to.head(1);
                to.put(nonce);
                to.put(target);
            }
            Self::Challenge { nonce } => {
                to.head(2);
                to.put(nonce);
            }
            Self::Prove { proof, claim } => {
                to.head(3);
                to.claim(proof, claim);
            }
            Self::Accept { proof, claim } => {
                to.head(4);
                to.claim(proof, claim);
            }
            Self::Refuse(refusal) => {
                to.head(5);
                let mut frame = [0; Refusal::ENCODED_MAX];
                let len = refusal.encode(&mut frame).ok()?;
                to.put(frame.get(..len)?);
            }
            Self::Probe { nonce } => {
                to.head(6);
                to.put(&nonce.to_le_bytes());
            }
            Self::Probed { arrived } => {
                to.head(7);
                to.put(&[u8::from(*arrived)]);
            }
            Self::MapRequest { key } => {
                to.head(8);
                to.put(&key.to_le_bytes());
            }
            Self::MapReply { key, answer } => {
                to.head(9);
                to.put(&key.to_le_bytes());
                let (kind, base, len) = match *answer {
                    Answer::Refused => (0, 0, 0),
                    Answer::File { base, len } => (1, base, len),
                    Answer::Process { base, len } => (2, base, len),
                    Answer::Gpu { region, by: By::File } => (3, region.base, region.len),
                    Answer::Gpu { region, by: By::Handle(_) } => (4, region.base, region.len),
                    Answer::Gpu { region, by: By::Files(_) } => (5, region.base, region.len),
                };
                to.put(&[kind]);
                to.put(&base.to_le_bytes());
                to.put(&len.to_le_bytes());
                if let Answer::Gpu { region, by } = answer {
                    to.put(&region.start.to_le_bytes());
                    to.put(&region.whole.to_le_bytes());
                    to.put(&region.uuid);
                    match by {
                        By::File => {}
                        By::Handle(handle) => to.put(handle),
                        By::Files(count) => to.put(&count.to_le_bytes()),
                    }
                }
            }
            Self::Kick => to.head(10),
            Self::FilesRequest { key, from } => {
                to.head(11);
                to.put(&key.to_le_bytes());
                to.put(&from.to_le_bytes());
            }
            Self::FilesReply { key, from, sizes } => {
                to.head(12);
                to.put(&key.to_le_bytes());
                to.put(&from.to_le_bytes());
                to.put(&[u8::try_from(sizes.count).ok()?]);
                sizes.as_slice().iter().for_each(|bytes| to.put(&bytes.to_le_bytes()));
            }
        }
        (to.at <= MESSAGE_MAX).then_some(to.at)
    }

    /// The message that is all of `bytes`.
    pub(super) fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut from = Reader(bytes);
        if from.take()? != MAGIC {
            return Err(Malformed::Message);
        }
        let (version, kind) = (from.u16()?, from.u16()?);
        // A refusal is understood from every version: it is how one learns of the difference.
        if version != PROTOCOL_VERSION && kind != 5 {
            return Err(Malformed::Version { theirs: version });
        }
        let message = match kind {
            1 => Self::Call { nonce: from.take()?, target: from.take()? },
            2 => Self::Challenge { nonce: from.take()? },
            3 => Self::Prove { proof: from.take()?, claim: from.claim()? },
            4 => Self::Accept { proof: from.take()?, claim: from.claim()? },
            5 => Self::Refuse(Refusal::decode(from.rest()).map_err(|_| Malformed::Message)?),
            6 => Self::Probe { nonce: from.u64()? },
            7 => match from.take()? {
                [0] => Self::Probed { arrived: false },
                [1] => Self::Probed { arrived: true },
                _ => return Err(Malformed::Message),
            },
            8 => Self::MapRequest { key: from.u64()? },
            9 => Self::MapReply { key: from.u64()?, answer: from.answer()? },
            10 => Self::Kick,
            11 => Self::FilesRequest { key: from.u64()?, from: from.u32()? },
            12 => Self::FilesReply { key: from.u64()?, from: from.u32()?, sizes: from.sizes()? },
            _ => return Err(Malformed::Message),
        };
        if from.0.is_empty() { Ok(message) } else { Err(Malformed::Message) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { initiator_nics: 4, acceptor_nics: 1 };
    const CLAIM: Claim<'static> = Claim { probe_address: 9, geometry: GEOMETRY, hello: b"hello" };

    const GPU: Described = Described { uuid: [8; 16], base: 5, len: 6, start: 7, whole: 8 };

    fn sizes(count: usize) -> Sizes {
        let mut sizes = Sizes::default();
        (1..=count).for_each(|n| sizes.push(n as u64 * (2 << 20)));
        sizes
    }

    fn every_kind() -> Vec<Message<'static>> {
        vec![
            Message::Call { nonce: [1; 32], target: [2; 16] },
            Message::Challenge { nonce: [3; 32] },
            Message::Prove { proof: [4; 32], claim: CLAIM },
            Message::Accept { proof: [5; 32], claim: CLAIM },
            Message::Refuse(Refusal::Version { ours: 1, theirs: 2 }),
            Message::Refuse(Refusal::Crossed),
            Message::Probe { nonce: u64::MAX },
            Message::Probed { arrived: false },
            Message::Probed { arrived: true },
            Message::MapRequest { key: 6 },
            Message::MapReply { key: 7, answer: Answer::Refused },
            Message::MapReply { key: 7, answer: Answer::File { base: 1, len: 2 } },
            Message::MapReply { key: 7, answer: Answer::Process { base: 3, len: 4 } },
            Message::MapReply { key: 7, answer: Answer::Gpu { region: GPU, by: By::File } },
            Message::MapReply {
                key: 7,
                answer: Answer::Gpu { region: GPU, by: By::Handle([9; 64]) },
            },
            Message::MapReply { key: 7, answer: Answer::Gpu { region: GPU, by: By::Files(3) } },
            Message::Kick,
            Message::FilesRequest { key: 7, from: 16 },
            Message::FilesReply { key: 7, from: 16, sizes: sizes(0) },
            Message::FilesReply { key: 7, from: 16, sizes: sizes(1) },
            Message::FilesReply { key: 7, from: 16, sizes: sizes(FILES_MAX) },
        ]
    }

    #[test]
    fn every_kind_survives_the_journey_and_no_prefix_of_it_does() {
        let mut out = [0; MESSAGE_MAX];
        for message in every_kind() {
            let len = message.encode(&mut out).unwrap();
            assert_eq!(Message::decode(&out[..len]), Ok(message));
            // A claim ends in a hello, which has a length and a check of its own.
            let shortest = match message {
                Message::Prove { .. } | Message::Accept { .. } => len - CLAIM.hello.len(),
                _ => len,
            };
            for cut in 0..shortest {
                assert!(Message::decode(&out[..cut]).is_err(), "{message:?} cut at {cut}");
            }
            if shortest == len {
                assert!(Message::decode(&out[..=len]).is_err(), "{message:?} and a byte more");
            }
        }
    }

    #[test]
    fn any_changed_byte_is_another_message_or_none() {
        let mut out = [0; MESSAGE_MAX];
        for message in every_kind() {
            let len = message.encode(&mut out).unwrap();
            // The version of a refusal is not looked at.
            let versioned = !matches!(message, Message::Refuse(_));
            for at in (0..len).filter(|at| versioned || !(4..6).contains(at)) {
                for change in 1..=255 {
                    out[at] ^= change;
                    assert_ne!(Message::decode(&out[..len]), Ok(message), "{at} ^ {change}");
                    out[at] ^= change;
                }
            }
        }
    }

    #[test]
    fn one_file_is_not_several_and_no_message_has_more_than_can_come_with_it() {
        let mut out = [0; MESSAGE_MAX];
        for count in [0, 1, 2, 3, ALLOCATIONS_MAX, ALLOCATIONS_MAX + 1, u32::MAX] {
            let answer = Answer::Gpu { region: GPU, by: By::Files(count) };
            let message = Message::MapReply { key: 7, answer };
            let len = message.encode(&mut out).unwrap();
            let may = (2..=ALLOCATIONS_MAX).contains(&count);
            assert_eq!(Message::decode(&out[..len]).ok(), may.then_some(message), "{count}");
        }
        let mut full = sizes(FILES_MAX);
        full.push(9);
        assert_eq!(full, sizes(FILES_MAX));
        let message = Message::FilesReply { key: 7, from: 16, sizes: full };
        let len = message.encode(&mut out).unwrap();
        // One more is said than there can be.
        out[20] += 1;
        assert_eq!(Message::decode(&out[..len + 8]), Err(Malformed::Message));
    }

    /// What other builds send: it changes with the version, or not at all.
    #[test]
    fn what_is_said_of_several_allocations_has_these_bytes() {
        let golden = |message: Message<'_>, kind: u8, hex: &str| {
            let mut out = [0; MESSAGE_MAX];
            let len = message.encode(&mut out).unwrap();
            let [low, high] = PROTOCOL_VERSION.to_le_bytes();
            assert_eq!(out[..8], [b'I', b'W', b's', b'm', low, high, kind, 0]);
            let said: String = out[8..len].iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(said, hex.replace(' ', ""));
        };
        let region = Described { uuid: [0xab; 16], base: 1, len: 2, start: 3, whole: 0x0405 };
        golden(
            Message::MapReply { key: 0x0a, answer: Answer::Gpu { region, by: By::Files(300) } },
            9,
            "0a00000000000000 05 0100000000000000 0200000000000000 0300000000000000 0504000000000000 \
             abababababababababababababababab 2c010000",
        );
        golden(Message::FilesRequest { key: 0x0b, from: 16 }, 11, "0b00000000000000 10000000");
        golden(
            Message::FilesReply { key: 0x0b, from: 16, sizes: sizes(2) },
            12,
            "0b00000000000000 10000000 02 0000200000000000 0000400000000000",
        );
    }

    #[test]
    fn another_version_is_named_unless_it_refuses() {
        let mut out = [0; MESSAGE_MAX];
        for message in every_kind() {
            let len = message.encode(&mut out).unwrap();
            out[4..6].copy_from_slice(&77_u16.to_le_bytes());
            let got = Message::decode(&out[..len]);
            if matches!(message, Message::Refuse(_)) {
                assert_eq!(got, Ok(message));
            } else {
                assert_eq!(got, Err(Malformed::Version { theirs: 77 }));
            }
        }
    }

    #[test]
    fn a_hello_of_impossible_length_is_not_encoded() {
        let mut out = [0; MESSAGE_MAX];
        let claim = Claim { hello: &[0; MESSAGE_MAX], ..CLAIM };
        assert_eq!(Message::Prove { proof: [0; 32], claim }.encode(&mut out), None);
    }

    #[test]
    fn a_proof_is_good_for_one_key_role_handshake_and_claim() {
        let terms = Terms { initiator: [1; 32], acceptor: [2; 32], target: [3; 16] };
        let key = GroupKey::derive(b"one");
        let proof = *terms.proof(&key, Prover::Initiator, &CLAIM).as_bytes();
        let good = |terms: Terms, key: &GroupKey, prover, claim: Claim<'_>| {
            terms.verify(Some(key), prover, &claim, proof)
        };
        assert!(good(terms, &key, Prover::Initiator, CLAIM));
        assert!(!good(terms, &GroupKey::derive(b"two"), Prover::Initiator, CLAIM));
        assert!(!good(terms, &key, Prover::Acceptor, CLAIM));
        for other in [
            Terms { initiator: [9; 32], ..terms },
            Terms { acceptor: [9; 32], ..terms },
            Terms { target: [9; 16], ..terms },
        ] {
            assert!(!good(other, &key, Prover::Initiator, CLAIM));
        }
        let nics = Geometry { acceptor_nics: 2, ..GEOMETRY };
        for claim in [
            Claim { probe_address: 8, ..CLAIM },
            Claim { geometry: nics, ..CLAIM },
            Claim { hello: b"hellp", ..CLAIM },
        ] {
            assert!(!good(terms, &key, Prover::Initiator, claim));
        }
        assert!(terms.verify(None, Prover::Initiator, &CLAIM, [0; 32]));
        assert_eq!(format!("{key:?}"), "GroupKey(..)");
    }
}
