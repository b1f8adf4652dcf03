//! What goes over the modelled wire, and the addresses it goes between.
//!
//! A packet is one datagram to an abstract Unix socket, so it stays on the host: a head of [`HEAD_BYTES`], then the
//! payload. It comes from a socket that its sender has for this peer alone, which has no name: the head says whose it is.

/// An endpoint's address, as the fabric's users carry it: device, queue pair and its key, and eight bytes of zero.
pub(crate) const ADDRESS_BYTES: usize = 32;

/// The head of each packet.
pub(crate) const HEAD_BYTES: usize = 44 + ADDRESS_BYTES;

/// The longest payload of a packet.
pub(crate) const PIECE_BYTES: usize = 64 << 10;

/// Where an endpoint is. A recreated one has another queue pair number, and another key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Address {
    pub gid: [u8; 16],
    pub qpn: u16,
    pub qkey: u32,
}

impl Address {
    /// Returns the GID of this host's device `nic`.
    pub(crate) fn gid(nic: u8) -> [u8; 16] {
        let mut gid = *b"\xfe\x80\0\0\0\0\0\0fake-efa";
        gid[7] = nic;
        gid
    }

    /// Returns whether the device is one that exists, as far as its GID tells: it then answers for a queue pair that it
    /// does not have.
    pub(crate) fn is_reachable(&self) -> bool {
        self.gid == Self::gid(self.gid[7])
    }

    /// Returns it as the fabric's users carry it.
    pub(crate) fn to_bytes(self) -> [u8; ADDRESS_BYTES] {
        let mut bytes = [0; ADDRESS_BYTES];
        bytes[..16].copy_from_slice(&self.gid);
        bytes[16..18].copy_from_slice(&self.qpn.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.qkey.to_le_bytes());
        bytes
    }

    /// Reads [`to_bytes`](Self::to_bytes). `None` if it is no address of an endpoint.
    pub(crate) fn from_bytes(bytes: &[u8; ADDRESS_BYTES]) -> Option<Self> {
        let (gid, rest) = bytes.split_first_chunk::<16>()?;
        let qpn = u16::from_le_bytes([rest[0], rest[1]]);
        let qkey = u32::from_le_bytes([rest[4], rest[5], rest[6], rest[7]]);
        let address = Self { gid: *gid, qpn, qkey };
        (address.to_bytes() == *bytes && *gid != [0; 16]).then_some(address)
    }

    /// Returns the abstract name of the endpoint's socket. The key is not in it: who has a stale one reaches the queue
    /// pair, and is turned away.
    pub(crate) fn socket_name(&self) -> Vec<u8> {
        [b"immwire-fake-efa/".as_slice(), &self.gid, &self.qpn.to_le_bytes()].concat()
    }
}

/// What a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One piece of a write; the payload is its bytes.
    Write(Piece),
    /// A message; the payload is all of it.
    Send { data: Option<u32> },
    /// The operation has ended at the target with this status.
    Reply { status: u8 },
    /// Is the queue pair there?
    Ping,
    /// It is.
    Pong,
    /// It is being destroyed.
    Bye,
}

/// One piece of a write. All pieces of a write say the same of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The write's immediate data.
    pub data: Option<u32>,
    /// Whether the initiator takes writes with data without a posted receive.
    pub unsolicited: bool,
    /// The write's length.
    pub total: u32,
    /// How many pieces it has.
    pub count: u32,
    /// Where in the write this piece starts.
    pub offset: u32,
    /// The target's key.
    pub key: u32,
    /// The target's address, where the write starts.
    pub address: u64,
}

/// The head of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    /// The sender.
    pub from: Address,
    /// The key of the queue pair that it is for.
    pub to: u32,
    /// The operation, numbered by its initiator.
    pub op: u64,
    pub kind: Kind,
}

const HAS_DATA: u8 = 1;
const UNSOLICITED: u8 = 2;

impl Head {
    /// Returns it as it travels.
    pub(crate) fn to_bytes(self) -> [u8; HEAD_BYTES] {
        let none = Piece {
            data: None,
            unsolicited: false,
            total: 0,
            count: 0,
            offset: 0,
            key: 0,
            address: 0,
        };
        let (code, status, piece) = match self.kind {
            Kind::Write(piece) => (1, 0, piece),
            Kind::Send { data } => (2, 0, Piece { data, ..none }),
            Kind::Reply { status } => (3, status, none),
            Kind::Ping => (4, 0, none),
            Kind::Pong => (5, 0, none),
            Kind::Bye => (6, 0, none),
        };
        let flags =
            piece.data.map_or(0, |_| HAS_DATA) | if piece.unsolicited { UNSOLICITED } else { 0 };
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&[code, flags, status, 0]);
        let words =
            [self.to, piece.data.unwrap_or(0), piece.total, piece.count, piece.offset, piece.key];
        for (place, word) in bytes[4..28].chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes[28..36].copy_from_slice(&self.op.to_le_bytes());
        bytes[36..44].copy_from_slice(&piece.address.to_le_bytes());
        bytes[44..].copy_from_slice(&self.from.to_bytes());
        bytes
    }

    /// Reads [`to_bytes`](Self::to_bytes). `None` for anything else.
    pub(crate) fn from_bytes(bytes: &[u8; HEAD_BYTES]) -> Option<Self> {
        let word = |at: usize| bytes.get(at..)?.first_chunk().map(|word| u32::from_le_bytes(*word));
        let long = |at: usize| bytes.get(at..)?.first_chunk().map(|long| u64::from_le_bytes(*long));
        let [code, flags, status, _] = *bytes.first_chunk()?;
        let data = if flags & HAS_DATA != 0 { Some(word(8)?) } else { None };
        let kind = match code {
            1 => Kind::Write(Piece {
                data,
                unsolicited: flags & UNSOLICITED != 0,
                total: word(12)?,
                count: word(16)?,
                offset: word(20)?,
                key: word(24)?,
                address: long(36)?,
            }),
            2 => Kind::Send { data },
            3 => Kind::Reply { status },
            4 => Kind::Ping,
            5 => Kind::Pong,
            6 => Kind::Bye,
            _ => return None,
        };
        let from = Address::from_bytes(bytes.last_chunk()?)?;
        let head = Self { from, to: word(4)?, op: long(28)?, kind };
        (head.to_bytes() == *bytes).then_some(head)
    }
}

/// Returns the length of the pieces of a write, but for its last: a device's MTU, or more, so that they stay few.
pub(crate) fn piece_bytes(total: usize) -> usize {
    (total / 4).clamp(8 << 10, PIECE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_packets_are_read_as_they_were_written() {
        let address = Address { gid: Address::gid(3), qpn: 0x1234, qkey: 0x5678_9abc };
        assert_eq!(Address::from_bytes(&address.to_bytes()), Some(address));
        assert!(address.is_reachable());
        assert!(!Address { gid: [1; 16], ..address }.is_reachable());
        assert_eq!(Address::from_bytes(&[0; 32]), None);
        let mut padded = address.to_bytes();
        padded[31] = 1;
        assert_eq!(Address::from_bytes(&padded), None);

        let piece = Piece {
            data: Some(0xdead_beef),
            unsolicited: true,
            total: 1 << 20,
            count: 16,
            offset: 1 << 19,
            key: 77,
            address: 1 << 40,
        };
        let kinds = [
            Kind::Write(piece),
            Kind::Write(Piece { data: None, unsolicited: false, ..piece }),
            Kind::Send { data: Some(0) },
            Kind::Reply { status: 14 },
            Kind::Ping,
            Kind::Pong,
            Kind::Bye,
        ];
        for kind in kinds {
            let head = Head { from: address, to: 2, op: u64::MAX, kind };
            assert_eq!(Head::from_bytes(&head.to_bytes()), Some(head));
        }
        assert_eq!(Head::from_bytes(&[0; HEAD_BYTES]), None);
    }

    #[test]
    fn pieces_are_an_mtu_or_few() {
        assert_eq!(
            (piece_bytes(0), piece_bytes(8192), piece_bytes(1 << 18), piece_bytes(1 << 30)),
            (8192, 8192, 65536, 65536)
        );
    }
}
