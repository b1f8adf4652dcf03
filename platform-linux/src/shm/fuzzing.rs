//! The other end of a session, played by a fuzz target: what a hostile peer can do, and no more.
//!
//! Compiled under `cfg(fuzzing)` alone. It opens doors to what the parent keeps private (message codec,
//! socket, segment) and decides nothing; the properties are stated in `verification/fuzz`.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use immwire_core::wire::{NetAddr, Refusal};

use super::gpu::Described;
use super::handshake::{Answer, By, Claim, Message, Sizes};
use super::segment::{BOUNCE_BYTES, Geometry, Half, LANE_ENTRIES, Segment, sealed_file};
use super::socket::{self, ListenerId, MESSAGE_MAX};

/// The fields that messages are made of; a kind takes those that it has.
#[derive(Debug, Clone, Default)]
pub struct Parts {
    /// Nonce, or proof.
    pub bytes: [u8; 32],
    /// The name that is called.
    pub target: ListenerId,
    /// Key, word, or address.
    pub word: u64,
    /// Base of a region.
    pub base: u64,
    /// Its length.
    pub len: u64,
    /// NICs of the initiator and of the acceptor.
    pub nics: (u8, u8),
    /// An encoded `Hello`.
    pub hello: Vec<u8>,
    /// Why not.
    pub refusal: Option<Refusal>,
}

impl Parts {
    /// The message of that kind (modulo the number of kinds), if it can be made of these parts.
    fn message(&self, kind: u8) -> Option<Message<'_>> {
        let (initiator_nics, acceptor_nics) = self.nics;
        let geometry = Geometry { initiator_nics, acceptor_nics };
        let claim = Claim { probe_address: self.word, geometry, hello: &self.hello };
        let (nonce, proof, target, key) = (self.bytes, self.bytes, self.target, self.word);
        let (base, len) = (self.base, self.len);
        // What a peer says of a GPU's memory: the numbers that there are, in other places.
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&self.bytes[..16]);
        let region = Described { uuid, base, len, start: base & !0xffff, whole: len | 0xffff };
        let low = |word: u64| u32::try_from(word & 0xffff_ffff).unwrap_or(0);
        let mut sizes = Sizes::default();
        self.bytes.iter().take(usize::from(self.bytes[0] % 17)).for_each(|byte| {
            sizes.push(u64::from(*byte) << 21);
        });
        Some(match kind % 18 {
            0 => Message::Call { nonce, target },
            1 => Message::Challenge { nonce },
            2 => Message::Prove { proof, claim },
            3 => Message::Accept { proof, claim },
            4 => Message::Refuse(self.refusal?),
            5 => Message::Probe { nonce: key },
            6 => Message::Probed { arrived: false },
            7 => Message::Probed { arrived: true },
            8 => Message::MapRequest { key },
            9 => Message::MapReply { key, answer: Answer::Refused },
            10 => Message::MapReply { key, answer: Answer::File { base, len } },
            11 => Message::MapReply { key, answer: Answer::Process { base, len } },
            12 => Message::Kick,
            13 => Message::MapReply { key, answer: Answer::Gpu { region, by: By::File } },
            14 => {
                let by = By::Handle([self.bytes[0]; immwire_cuda::IPC_HANDLE_BYTES]);
                Message::MapReply { key, answer: Answer::Gpu { region, by } }
            }
            15 => {
                let by = By::Files((low(len) % immwire_cuda::ALLOCATIONS_MAX).max(2));
                Message::MapReply { key, answer: Answer::Gpu { region, by } }
            }
            16 => Message::FilesRequest { key, from: low(base) },
            _ => Message::FilesReply { key, from: low(base), sizes },
        })
    }

    /// The message's bytes, if it fits; and whether they decode to the same message.
    #[must_use]
    pub fn encode(&self, kind: u8) -> Option<(Vec<u8>, bool)> {
        let message = self.message(kind)?;
        let mut out = [0; MESSAGE_MAX];
        let len = message.encode(&mut out)?;
        let bytes = out.get(..len)?;
        Some((bytes.to_vec(), Message::decode(bytes) == Ok(message)))
    }
}

/// What the message that is all of `bytes` is encoded to; `None` if there is no such message.
#[must_use]
pub fn recode(bytes: &[u8]) -> Option<Vec<u8>> {
    let message = Message::decode(bytes).ok()?;
    let mut out = [0; MESSAGE_MAX];
    let len = message.encode(&mut out)?;
    out.get(..len).map(<[u8]>::to_vec)
}

/// A word of a segment that the peer can write to.
#[derive(Debug, Clone, Copy)]
pub enum Place {
    /// The control words, by number.
    Control(u8),
    /// How far a lane was read.
    Credit(u8),
    /// The key of a region.
    Grant(u16),
    /// An entry of a lane.
    Lane(u8, u16),
    /// A word of the bounce ring.
    Bounce(u32),
}

/// A peer that keeps no rule.
#[derive(Debug)]
pub struct Rogue {
    socket: OwnedFd,
    target: ListenerId,
    segment: Option<Segment>,
}

fn id_of(address: &NetAddr) -> Option<ListenerId> {
    address.nics().first()?.address.as_slice().try_into().ok()
}

/// A socket that pretends to be the engine at `address`.
#[derive(Debug)]
pub struct Impostor(OwnedFd);

impl Impostor {
    /// Listens there; `None` if the address has no name that can be listened on.
    #[must_use]
    pub fn listen(address: &NetAddr) -> Option<Self> {
        socket::listen(&id_of(address)?).ok().map(Self)
    }

    /// Takes the call that is waiting.
    #[must_use]
    pub fn accept(&self) -> Option<Rogue> {
        let socket = socket::accept(&self.0).ok()?;
        Some(Rogue { socket, target: ListenerId::default(), segment: None })
    }
}

impl Rogue {
    /// Calls the engine at `address`.
    #[must_use]
    pub fn call(address: &NetAddr) -> Option<Self> {
        let target = id_of(address)?;
        let socket = socket::call(&target).ok()?;
        Some(Self { socket, target, segment: None })
    }

    /// The name that was called.
    #[must_use]
    pub fn target(&self) -> ListenerId {
        self.target
    }

    /// Sends `bytes`, with a sealed file of so many bytes if asked; whether it went out.
    pub fn say(&self, bytes: &[u8], file_bytes: Option<usize>) -> bool {
        let file = file_bytes.and_then(|bytes| sealed_file("rogue", bytes).ok());
        socket::send(&self.socket, bytes, file.as_ref().map(AsFd::as_fd).as_slice()).is_ok()
    }

    /// Makes a segment for so many NICs, and sends it with `bytes`; whether it went out.
    pub fn prove(&mut self, bytes: &[u8], nics: (u8, u8)) -> bool {
        let (initiator_nics, acceptor_nics) = nics;
        let made = Segment::create(Geometry { initiator_nics, acceptor_nics });
        let Ok((segment, file)) = made else { return false };
        self.segment = Some(segment);
        socket::send(&self.socket, bytes, &[file.as_fd()]).is_ok()
    }

    /// Takes a message; if it brings a segment for so many NICs, maps it.
    pub fn hear(&mut self, nics: (u8, u8)) -> Option<Vec<u8>> {
        let mut buffer = [0; MESSAGE_MAX];
        let received = socket::receive(&self.socket, &mut buffer).ok()?;
        let (initiator_nics, acceptor_nics) = nics;
        if let Some(file) = received.files.first() {
            let geometry = Geometry { initiator_nics, acceptor_nics };
            self.segment = Segment::open(geometry, file).ok().or(self.segment.take());
        }
        buffer.get(..received.len).map(<[u8]>::to_vec)
    }

    /// A word of the segment: of the half that it writes immediates to, or of the other.
    #[must_use]
    pub fn word(&self, outbound: bool, place: Place) -> Option<&AtomicU64> {
        let segment = self.segment.as_ref()?;
        let half = if outbound { segment.outbound() } else { segment.inbound() };
        let lane = |lane: u8| usize::from(lane) % segment.lanes();
        Some(match place {
            Place::Control(number) => control(half, number),
            Place::Credit(number) => half.credit(lane(number)),
            Place::Grant(id) => half.grant(u32::from(id) % 16)?,
            Place::Lane(number, entry) => {
                let at = usize::from(entry) % (2 * LANE_ENTRIES);
                half.lane(lane(number)).as_flattened().get(at)?
            }
            Place::Bounce(number) => {
                let at = usize::try_from(number).ok()? % (BOUNCE_BYTES / 8);
                half.bounce().get(at)?
            }
        })
    }
}

fn control(half: Half<'_>, number: u8) -> &AtomicU64 {
    match number % 7 {
        0 => half.active(),
        1 => half.lanes_used(),
        2 => half.bounce_head(),
        3 => half.bounce_grant(),
        4 => half.bounce_active(),
        5 => half.bounce_tail(),
        _ => half.withdrawals(),
    }
}
