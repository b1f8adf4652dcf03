//! Where an RDMA port is, in bytes that peers exchange; and what two ports have in common.
//!
//! For verbs: a *port* is reached by its LID (InfiniBand; and its GID, if it asks for that) or its GID (RoCE); a queue pair
//! on it by a number, and what is sent there counts packets from a number that both sides know. Which of a port's
//! GIDs is used, and the length of packets, follow from what both ends have. Knows no device and no system call.
//!
//! # Invariants
//!
//! - `decode` accepts exactly the bytes that `encode` writes; any others are refused. Every truncation and every
//!   change of one bit is tried below.
//! - A queue pair's number and a packet's have 24 bits, here and on the wire.
//! - [`choose_gid`] depends on the table's entries, not on their order, but to tell equals apart.

use core::fmt;

use heapless::Vec;

use crate::datagram::Address;

/// A port's global name: an IPv6 address, or an IPv4 one mapped into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Nobody's.
    pub const NONE: Self = Self([0; 16]);

    const fn is_ipv4(&self) -> bool {
        matches!(self.0, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, ..])
    }

    const fn is_link_local(&self) -> bool {
        matches!(self.0, [0xfe, second, ..] if second & 0xc0 == 0x80)
    }

    /// The first half: of InfiniBand's, the subnet.
    #[must_use]
    pub const fn subnet(&self) -> [u8; 8] {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        [a, b, c, d, e, f, g, h]
    }
}

/// What packets a GID stands for. Each is received by ports that have a GID of the same, and by no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GidKind {
    /// InfiniBand's own.
    Infiniband,
    /// RoCE version 1: Ethernet without IP, within one link.
    RoceV1,
    /// RoCE version 2: UDP.
    RoceV2,
}

/// An entry of a port's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GidEntry {
    /// Where it is in the table.
    pub index: u8,
    /// The name.
    pub gid: Gid,
    /// What it stands for.
    pub kind: GidKind,
}

/// What a port is connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Link {
    /// InfiniBand: peers are found by LID within a subnet.
    Infiniband,
    /// Ethernet: RoCE.
    Ethernet,
}

/// The GID to use, of a port on `link`: on Ethernet the first of RoCE v2 that routers can carry, IPv4 before IPv6
/// before link-local, and RoCE v1 only where there is nothing else; on InfiniBand the first. Empty entries are
/// none. O(entries).
#[must_use]
pub fn choose_gid(link: Link, table: impl IntoIterator<Item = GidEntry>) -> Option<GidEntry> {
    let rank = |entry: &GidEntry| match (link, entry.kind) {
        (Link::Infiniband, GidKind::Infiniband) => Some(0),
        (Link::Ethernet, GidKind::RoceV2) if entry.gid.is_ipv4() => Some(0),
        (Link::Ethernet, GidKind::RoceV2) if !entry.gid.is_link_local() => Some(1),
        (Link::Ethernet, GidKind::RoceV2) => Some(2),
        (Link::Ethernet, GidKind::RoceV1) => Some(3),
        _ => None,
    };
    let named = table.into_iter().filter(|entry| entry.gid != Gid::NONE);
    let ranked = named.filter_map(|entry| Some((rank(&entry)?, entry.index, entry)));
    ranked.min_by_key(|(rank, index, _)| (*rank, *index)).map(|(_, _, entry)| entry)
}

/// Where an entry is now: it moves when its address is taken from an interface and given back, for as long as anything holds the old one.
/// `None`: it is not there. O(entries).
#[must_use]
pub fn find_gid(wanted: &GidEntry, table: impl IntoIterator<Item = GidEntry>) -> Option<u8> {
    let is_it = |entry: &GidEntry| (entry.gid, entry.kind) == (wanted.gid, wanted.kind);
    table.into_iter().find(is_it).map(|entry| entry.index)
}

/// The longest payload of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes: what a link with Ethernet's usual 1500 has.
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes.
    B4096,
}

impl Mtu {
    const ALL: [Self; 5] = [Self::B256, Self::B512, Self::B1024, Self::B2048, Self::B4096];

    /// The number that verbs has for it, 1 to 5.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8 + 1
    }

    /// What verbs means by `code`.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code.checked_sub(1)?)).copied()
    }

    /// In bytes.
    #[must_use]
    pub const fn bytes(self) -> u16 {
        128 << self.code()
    }
}

/// Gigabits per second of a port, as verbs codes its width and speed; 1 if a code is not known here.
#[must_use]
pub const fn speed_gbps(active_width: u8, active_speed: u8) -> u32 {
    let lanes = match active_width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return 1,
    };
    // Tenths of a lane: what is left after coding.
    let lane = match active_speed {
        1 => 20,
        2 => 40,
        4 => 80,
        8 => 100,
        16 => 140,
        32 => 250,
        64 => 500,
        128 => 1000,
        _ => return 1,
    };
    lanes * lane / 10
}

/// A number of 24 bits: a queue pair's, or the first packet's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Number24(u32);

impl Number24 {
    /// The lowest 24 bits of `number`.
    #[must_use]
    pub const fn new(number: u32) -> Self {
        Self(number & 0xff_ffff)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// As it travels.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 3] {
        let [_, bytes @ ..] = self.0.to_be_bytes();
        bytes
    }

    /// From what travelled.
    #[must_use]
    pub const fn from_bytes([a, b, c]: [u8; 3]) -> Self {
        Self(u32::from_be_bytes([0, a, b, c]))
    }
}

/// One end of a connected queue pair; the default is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Queue {
    /// Its number on its port.
    pub number: Number24,
    /// The number of the first packet that it sends.
    pub psn: Number24,
}

impl Queue {
    /// Whether it is one: number 0 is the subnet manager's.
    #[must_use]
    pub const fn is_some(self) -> bool {
        self.number.get() != 0
    }

    /// Bytes of its encoding.
    pub const BYTES: usize = 6;

    /// As it travels.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        let ([a, b, c], [d, e, f]) = (self.number.to_bytes(), self.psn.to_bytes());
        [a, b, c, d, e, f]
    }

    /// From what travelled; any bytes are a queue pair's.
    #[must_use]
    pub const fn from_bytes([a, b, c, d, e, f]: [u8; Self::BYTES]) -> Self {
        Self { number: Number24::from_bytes([a, b, c]), psn: Number24::from_bytes([d, e, f]) }
    }
}

/// How a port is reached, and what of it both ends of a connection must take into account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Port {
    /// What packets its name stands for; by that, what it is connected to.
    pub kind: GidKind,
    /// Its longest packets.
    pub mtu: Mtu,
    /// Its local name; zero on Ethernet.
    pub lid: u16,
    /// Its global name.
    pub gid: Gid,
    /// Of InfiniBand: whether all packets to and from it must carry global names, as where ports share a LID. On Ethernet all do
    /// anyway, and this says no.
    pub is_global: bool,
}

/// How one port sends to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// The longest packets that both take.
    pub mtu: Mtu,
    /// The other's local name.
    pub dlid: u16,
    /// If packets carry global names: the other's.
    pub dgid: Option<Gid>,
}

/// Why there is no way from one port to another. Of several pairs of ports, the greatest is the one that lacks least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NoRoute {
    /// One is on Ethernet, the other on InfiniBand.
    OtherLink,
    /// The other has no name that would do.
    Unnamed,
    /// One sends RoCE v1, the other takes RoCE v2, or the other way round: packets would leave, and nobody would take them.
    OtherRoce,
    /// Of RoCE v2: one has the name of an IPv4 address, the other that of an IPv6 one.
    OtherFamily,
    /// Of InfiniBand: they are in different subnets.
    OtherSubnet,
}

impl fmt::Display for NoRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OtherLink => "one is on Ethernet, the other on InfiniBand",
            Self::Unnamed => "the peer's has no address",
            Self::OtherRoce => {
                "one has a GID of RoCE v1, the other of RoCE v2; give both one of v2, or choose by gid_index"
            }
            Self::OtherFamily => {
                "one has the GID of an IPv4 address, the other of an IPv6 one; choose one of the same family by gid_index"
            }
            Self::OtherSubnet => "they are in different InfiniBand subnets",
        })
    }
}

impl core::error::Error for NoRoute {}

/// Whether there is a way from any port of `ours` to any of `theirs`. O(ours * theirs).
///
/// # Errors
///
/// What the pair of ports lacks that lacks least; [`NoRoute::Unnamed`] where there is no pair.
pub fn reaches<'a>(
    ours: impl IntoIterator<Item = &'a Port>,
    theirs: impl IntoIterator<Item = &'a Port> + Clone,
) -> Result<(), NoRoute> {
    let mut ways = ours
        .into_iter()
        .flat_map(|here| theirs.clone().into_iter().map(|there| here.route(there).map(drop)));
    let first = ways.next().unwrap_or(Err(NoRoute::Unnamed));
    // `Ok` of any is `Ok`.
    ways.fold(first, |best, way| best.or_else(|least| way.map_err(|why| why.max(least))))
}

impl Port {
    /// The way from here to there.
    ///
    /// # Errors
    ///
    /// [`NoRoute`].
    pub fn route(&self, there: &Self) -> Result<Route, NoRoute> {
        use GidKind::{Infiniband, RoceV1, RoceV2};
        let mtu = self.mtu.min(there.mtu);
        let named = there.gid != Gid::NONE;
        match (self.kind, there.kind) {
            (RoceV1 | RoceV2, RoceV1 | RoceV2) if !named => Err(NoRoute::Unnamed),
            (RoceV1, RoceV2) | (RoceV2, RoceV1) => Err(NoRoute::OtherRoce),
            // The kernel asks the network for addresses of its own family alone.
            (RoceV2, RoceV2) if self.gid.is_ipv4() != there.gid.is_ipv4() => {
                Err(NoRoute::OtherFamily)
            }
            (RoceV1, RoceV1) | (RoceV2, RoceV2) => {
                Ok(Route { mtu, dlid: 0, dgid: Some(there.gid) })
            }
            (Infiniband, Infiniband) => {
                let must = self.is_global || there.is_global;
                if there.lid == 0 || (must && !named) {
                    return Err(NoRoute::Unnamed);
                }
                // The way to another subnet begins at a router, whose LID nobody has asked for.
                if named && self.gid.subnet() != there.gid.subnet() {
                    return Err(NoRoute::OtherSubnet);
                }
                Ok(Route { mtu, dlid: there.lid, dgid: must.then_some(there.gid) })
            }
            (Infiniband, RoceV1 | RoceV2) | (RoceV1 | RoceV2, Infiniband) => {
                Err(NoRoute::OtherLink)
            }
        }
    }

    /// Whether a datagram came from here, by what stands before it and the local name of its sender, as a device says both. `has_header`:
    /// whether the former is a header, which not all of InfiniBand's datagrams have, and not what lay there before. Where there is one it
    /// is believed, whether this port needs it or not: others that do may share its LID.
    #[must_use]
    pub fn has_sent(&self, header: &[u8; HEADER_BYTES], has_header: bool, lid: u16) -> bool {
        match (self.kind, has_header) {
            (GidKind::RoceV1 | GidKind::RoceV2, _) => source_of(header) == Some(self.gid),
            (GidKind::Infiniband, true) => {
                self.lid == lid && header.get(8..24) == Some(&self.gid.0)
            }
            (GidKind::Infiniband, false) => self.lid == lid && !self.is_global,
        }
    }
}

/// The longest message that goes through a door: one packet of a link that has Ethernet's usual 1500 bytes. The tests
/// see to it that every message of a handshake fits.
pub const PACKET_MAX: usize = Mtu::B1024.bytes() as usize;

/// Bytes before a received datagram that say where it came from.
pub const HEADER_BYTES: usize = 40;

/// Whose a received datagram is, by what stands before it: an IPv6 header, or InfiniBand's of the same form; or an IPv4
/// header behind 20 bytes of no meaning, which may look like the start of the other. `None` if it is neither.
#[must_use]
pub fn source_of(header: &[u8; HEADER_BYTES]) -> Option<Gid> {
    let (_, behind) = header.split_at_checked(20)?;
    let first = behind.first().copied();
    // Of the two that it looks like, an IPv4 header is the one with a right sum.
    let is_ipv4 = match (header.first().map(|byte| byte >> 4), first.map(|byte| byte >> 4)) {
        (Some(6), _) => first == Some(0x45) && ones_sum(behind) == 0xffff,
        (_, Some(4)) => true,
        _ => return None,
    };
    if !is_ipv4 {
        return Some(Gid(header.get(8..24)?.try_into().ok()?));
    }
    let mut gid = [0; 16];
    let address = [0xff, 0xff].iter().chain(behind.get(12..16)?);
    for (byte, value) in gid.iter_mut().skip(10).zip(address) {
        *byte = *value;
    }
    Some(Gid(gid))
}

/// The sum of IPv4 (RFC 791): of 16-bit words, in ones' complement. `0xffff` over a header with its sum in it.
fn ones_sum(bytes: &[u8]) -> u16 {
    let words = bytes.as_chunks().0.iter().map(|word| u32::from(u16::from_be_bytes(*word)));
    // Ten words: the carries of one round fit.
    let sum = words.fold(0_u32, u32::wrapping_add);
    let folded = (sum & 0xffff).wrapping_add(sum >> 16);
    let folded = (folded & 0xffff).wrapping_add(folded >> 16);
    u16::try_from(folded).unwrap_or(0)
}

const VERSION: u8 = 1;
const PORT_BYTES: usize = 21;

fn put_port(port: &Port) -> [u8; PORT_BYTES] {
    let mut bytes = [0; PORT_BYTES];
    let kind = match (port.kind, port.is_global) {
        (GidKind::Infiniband, false) => 0,
        (GidKind::RoceV2, _) => 1,
        (GidKind::Infiniband, true) => 2,
        (GidKind::RoceV1, _) => 3,
    };
    let [high, low] = port.lid.to_be_bytes();
    let all = [VERSION, kind, port.mtu.code(), high, low].into_iter().chain(port.gid.0);
    for (byte, value) in bytes.iter_mut().zip(all) {
        *byte = value;
    }
    bytes
}

fn take_port(bytes: [u8; PORT_BYTES]) -> Option<Port> {
    let [version, kind, mtu, high, low, gid @ ..] = bytes;
    let (kind, is_global) = match kind {
        0 => (GidKind::Infiniband, false),
        1 => (GidKind::RoceV2, false),
        2 => (GidKind::Infiniband, true),
        3 => (GidKind::RoceV1, false),
        _ => return None,
    };
    let mtu = Mtu::from_code(mtu).filter(|_| version == VERSION)?;
    Some(Port { kind, mtu, lid: u16::from_be_bytes([high, low]), gid: Gid(gid), is_global })
}

fn joined(head: &[u8], tail: &[u8]) -> Address {
    // Shorter than the longest address, by the constants here: nothing is left out.
    head.iter().chain(tail).copied().collect::<Vec<u8, { crate::wire::NIC_ADDRESS_MAX }>>()
}

/// A queue pair that takes datagrams from anybody who knows its key: where an engine is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Door {
    /// Its port.
    pub port: Port,
    /// Its number.
    pub number: Number24,
    /// What a datagram must show; no secret.
    pub key: u32,
}

impl Door {
    const BYTES: usize = PORT_BYTES + 3 + 4;

    /// As an address.
    #[must_use]
    pub fn encode(&self) -> Address {
        let ([a, b, c], [d, e, f, g]) = (self.number.to_bytes(), self.key.to_be_bytes());
        joined(&put_port(&self.port), &[a, b, c, d, e, f, g])
    }

    /// The door at an address; `None` if that is none.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; Self::BYTES] = bytes.try_into().ok()?;
        let [port @ .., a, b, c, d, e, f, g] = bytes;
        Some(Self {
            port: take_port(port)?,
            number: Number24::from_bytes([a, b, c]),
            key: u32::from_be_bytes([d, e, f, g]),
        })
    }
}

/// A port, and a queue pair on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stand {
    /// The port.
    pub port: Port,
    /// The queue pair; of no meaning where none is asked for.
    pub queue: Queue,
}

impl Stand {
    const BYTES: usize = PORT_BYTES + Queue::BYTES;

    /// As an address.
    #[must_use]
    pub fn encode(&self) -> Address {
        joined(&put_port(&self.port), &self.queue.to_bytes())
    }

    /// What an address says; `None` if it is none.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; Self::BYTES] = bytes.try_into().ok()?;
        let [port @ .., a, b, c, d, e, f] = bytes;
        Some(Self { port: take_port(port)?, queue: Queue::from_bytes([a, b, c, d, e, f]) })
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    const IPV4: Gid = Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]);
    const IPV6: Gid = Gid([0x20, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    const LOCAL: Gid = Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);

    fn port(kind: GidKind) -> Port {
        let lid = if kind == GidKind::Infiniband { 7 } else { 0 };
        Port { kind, mtu: Mtu::B1024, lid, gid: IPV4, is_global: false }
    }

    /// All tables of up to three entries, of all kinds and names: the choice is the best there is, and the first of
    /// its like, wherever it stands.
    #[test]
    fn the_best_gid_is_chosen_wherever_it_stands() {
        use GidKind::{Infiniband, RoceV1, RoceV2};
        let order = [
            (RoceV2, IPV4),
            (RoceV2, IPV6),
            (RoceV2, LOCAL),
            (RoceV1, IPV4),
            (RoceV1, LOCAL),
            (RoceV2, Gid::NONE),
            (Infiniband, LOCAL),
        ];
        // RoCE v1 is one rank, whatever its name; the last two are of no use on Ethernet.
        let rank = |at: usize| [0, 1, 2, 3, 3, 9, 9][at];
        let mut tables = 0;
        for len in 0..=3_u32 {
            for word in 0..order.len().pow(len) {
                let pick = |n: u32| word / order.len().pow(n) % order.len();
                let picks: Vec<usize> = (0..len).map(pick).collect();
                let entry = |(index, &at): (usize, &usize)| {
                    let (kind, gid) = order[at];
                    GidEntry { index: u8::try_from(index).unwrap(), gid, kind }
                };
                let table: Vec<_> = picks.iter().enumerate().map(entry).collect();
                let best = picks.iter().copied().map(rank).filter(|rank| *rank < 9).min();
                let expected = best.and_then(|best| {
                    table.iter().zip(&picks).find(|(_, at)| rank(**at) == best).map(|(it, _)| *it)
                });
                assert_eq!(choose_gid(Link::Ethernet, table.iter().copied()), expected);
                let ib = table.iter().copied().find(|it| it.kind == Infiniband);
                assert_eq!(choose_gid(Link::Infiniband, table.iter().rev().copied()), ib);
                for (kind, gid) in order {
                    // Wherever it was.
                    let wanted = GidEntry { index: 9, gid, kind };
                    let there = table.iter().position(|it| (it.gid, it.kind) == (gid, kind));
                    let there = there.map(|at| u8::try_from(at).unwrap());
                    assert_eq!(find_gid(&wanted, table.iter().copied()), there);
                }
                tables += 1;
            }
        }
        assert_eq!(tables, 1 + 7 + 49 + 343);
    }

    #[test]
    fn packets_are_as_long_as_both_take() {
        for (n, ours) in Mtu::ALL.into_iter().enumerate() {
            assert_eq!(Mtu::from_code(ours.code()), Some(ours));
            assert_eq!(usize::from(ours.bytes()), 256 << n);
            for theirs in Mtu::ALL {
                let (here, there) = (port(GidKind::RoceV2), port(GidKind::RoceV2));
                let (here, there) = (Port { mtu: ours, ..here }, Port { mtu: theirs, ..there });
                let route = here.route(&there).unwrap();
                assert_eq!(route.mtu.bytes(), ours.bytes().min(theirs.bytes()));
                assert_eq!(there.route(&here).unwrap().mtu, route.mtu);
            }
        }
        assert_eq!((Mtu::from_code(0), Mtu::from_code(6)), (None, None));
    }

    #[test]
    fn speeds_are_those_of_the_book() {
        // EDR 100, HDR 200, NDR 400, two lanes of HDR, and what Soft-RoCE says it has.
        for (width, speed, gbps) in
            [(2, 32, 100), (2, 64, 200), (2, 128, 400), (16, 64, 100), (1, 8, 10)]
        {
            assert_eq!(speed_gbps(width, speed), gbps);
        }
        assert!((0..=255).all(|width| (0..=255).all(|speed| speed_gbps(width, speed) > 0)));
    }

    /// The example of RFC 1071, and headers of both kinds, also where one looks like the other.
    #[test]
    fn datagrams_say_where_they_come_from() {
        assert_eq!(ones_sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), 0xddf2);
        let mut header = [0; HEADER_BYTES];
        assert_eq!(source_of(&header), None);
        header[20] = 0x45;
        header[32..36].copy_from_slice(&[10, 0, 0, 1]);
        assert_eq!(source_of(&header), Some(IPV4));
        // Garbage before it that looks like IPv6: it is the right sum that tells.
        header[0] = 0x60;
        assert_ne!(source_of(&header), Some(IPV4));
        let sum = !ones_sum(&header[20..]);
        header[30..32].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(source_of(&header), Some(IPV4));
        let mut header = [0; HEADER_BYTES];
        header[0] = 0x6f;
        header[8..24].copy_from_slice(&IPV6.0);
        assert_eq!(source_of(&header), Some(IPV6));
        // An IPv6 address may have the byte with which IPv4 begins.
        header[20] = 0x45;
        assert_eq!(source_of(&header).unwrap().0[12], 0x45);
        for version in (0..16_u8).filter(|it| *it != 6) {
            header[0] = version << 4;
            assert!(source_of(&header).is_some_and(|gid| gid.is_ipv4()));
        }
    }

    /// All pairs of ports, of all kinds and names: there is a way where both send and take the same packets, and can find each
    /// other; and where there is none, it is said which.
    #[test]
    fn routes_lead_where_both_speak_the_same() {
        use GidKind::{Infiniband, RoceV1, RoceV2};
        let mut ports = Vec::new();
        for kind in [Infiniband, RoceV1, RoceV2] {
            for gid in [Gid::NONE, IPV4, IPV6, LOCAL] {
                for (lid, is_global) in [(0, false), (7, false), (7, true)] {
                    ports.push(Port { kind, gid, lid, is_global, mtu: Mtu::B1024 });
                }
            }
        }
        let mut seen = std::collections::BTreeMap::new();
        for here in &ports {
            for there in &ports {
                let (named, must) = (there.gid != Gid::NONE, here.is_global || there.is_global);
                let same = here.gid.is_ipv4() == there.gid.is_ipv4();
                let roce = Ok(Some(there.gid));
                let expected = match (here.kind, there.kind) {
                    (Infiniband, Infiniband) if there.lid == 0 => Err(NoRoute::Unnamed),
                    (Infiniband, Infiniband) if !named && must => Err(NoRoute::Unnamed),
                    (Infiniband, Infiniband) if !named => Ok(None),
                    (Infiniband, Infiniband) if here.gid.0[..8] != there.gid.0[..8] => {
                        Err(NoRoute::OtherSubnet)
                    }
                    (Infiniband, Infiniband) => Ok(must.then_some(there.gid)),
                    (Infiniband, _) | (_, Infiniband) => Err(NoRoute::OtherLink),
                    _ if !named => Err(NoRoute::Unnamed),
                    (RoceV1, RoceV1) => roce,
                    (RoceV2, RoceV2) if same => roce,
                    (RoceV2, RoceV2) => Err(NoRoute::OtherFamily),
                    _ => Err(NoRoute::OtherRoce),
                };
                let found = here.route(there);
                assert_eq!(found.map(|route| route.dgid), expected, "{here:?} {there:?}");
                if let Ok(route) = found {
                    let lid = if here.kind == Infiniband { there.lid } else { 0 };
                    assert_eq!((route.mtu, route.dlid), (Mtu::B1024, lid));
                }
                *seen.entry(found.err()).or_insert(0) += 1;
            }
        }
        // The way, and each reason.
        assert_eq!(seen.len(), 6, "{seen:?}");
    }

    /// All pairs of up to two ports at either end: any way is enough, and of reasons the nearest is said.
    #[test]
    fn of_many_ports_the_reason_is_that_of_the_nearest_pair() {
        use GidKind::{Infiniband, RoceV1, RoceV2};
        let named = |kind, gid| Port { gid, ..port(kind) };
        let ports = [
            named(Infiniband, IPV4),
            named(Infiniband, IPV6),
            named(RoceV1, LOCAL),
            named(RoceV2, IPV4),
            named(RoceV2, IPV6),
        ];
        let lists = || {
            let ones = ports.iter().map(|one| [one].to_vec());
            ones.chain(ports.iter().flat_map(|a| ports.iter().map(move |b| [a, b].to_vec())))
        };
        for ours in lists() {
            for theirs in lists() {
                let all = ours.iter().flat_map(|a| theirs.iter().map(move |b| a.route(b)));
                let all: Vec<_> = all.collect();
                let expected = match all.iter().any(Result::is_ok) {
                    true => Ok(()),
                    false => Err(all.iter().filter_map(|way| way.err()).max().unwrap()),
                };
                let found = reaches(ours.iter().copied(), theirs.iter().copied());
                assert_eq!(found, expected, "{ours:?} {theirs:?}");
            }
        }
        assert_eq!(reaches([], ports.iter()), Err(NoRoute::Unnamed));
        // By how little is missing.
        assert!(
            NoRoute::OtherFamily > NoRoute::OtherRoce && NoRoute::OtherRoce > NoRoute::OtherLink
        );
    }

    /// All of whom a datagram may be, what may stand before it, and where it may come from.
    #[test]
    fn who_has_sent_is_told_by_name() {
        let from = |gid: Gid| {
            let mut header = [0; HEADER_BYTES];
            header[0] = 0x60;
            header[8..24].copy_from_slice(&gid.0);
            header
        };
        let ib = Port { gid: IPV6, ..port(GidKind::Infiniband) };
        let global = Port { is_global: true, ..ib };
        let eth = Port { gid: IPV6, ..port(GidKind::RoceV2) };
        for (gid, has_header, lid) in [IPV6, LOCAL]
            .into_iter()
            .flat_map(|gid| [(gid, false), (gid, true)])
            .flat_map(|(gid, has_header)| [(gid, has_header, 7), (gid, has_header, 8)])
        {
            let (header, is_named) = (from(gid), gid == IPV6);
            assert_eq!(eth.has_sent(&header, has_header, lid), is_named);
            // Who shares the LID is told apart by the name, where there is one.
            assert_eq!(
                ib.has_sent(&header, has_header, lid),
                lid == 7 && (is_named || !has_header)
            );
            let known = lid == 7 && has_header && is_named;
            assert_eq!(global.has_sent(&header, has_header, lid), known);
        }
        // What might be IPv4's behind 20 bytes of no meaning is none on InfiniBand.
        let mut header = from(Gid([0x45; 16]));
        header[20] = 0x45;
        let sum = !ones_sum(&header[20..]);
        header[30..32].copy_from_slice(&sum.to_be_bytes());
        let port = Port { gid: Gid(header[8..24].try_into().unwrap()), ..global };
        assert_ne!(source_of(&header), Some(port.gid));
        assert!(port.has_sent(&header, true, 7));
    }

    #[test]
    fn addresses_give_back_what_they_were_made_of() {
        use GidKind::{Infiniband, RoceV1, RoceV2};
        for (kind, is_global) in
            [(Infiniband, false), (Infiniband, true), (RoceV1, false), (RoceV2, false)]
        {
            for mtu in Mtu::ALL {
                let port = Port { mtu, is_global, ..port(kind) };
                let door = Door { port, number: Number24::new(0x12_3456), key: 0x89ab_cdef };
                assert_eq!(Door::decode(&door.encode()), Some(door));
                let queue = Queue { number: Number24::new(u32::MAX), psn: Number24::new(1) };
                let stand = Stand { port, queue };
                assert_eq!(Stand::decode(&stand.encode()), Some(stand));
                assert_eq!(Door::decode(&stand.encode()), None);
            }
        }
        assert_eq!(Number24::new(u32::MAX).get(), 0xff_ffff);
    }

    /// Whatever is not an encoding is refused; whatever is not refused is the encoding of what it is taken for.
    #[test]
    fn every_truncation_and_change_is_refused_or_means_another() {
        let door = Door { port: port(GidKind::RoceV2), number: Number24::new(9), key: 3 };
        let good = door.encode();
        for len in 0..good.len() {
            assert_eq!(Door::decode(&good[..len]), None);
        }
        let mut refused = 0;
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bytes = good.clone();
                bytes[at] ^= 1 << bit;
                match Door::decode(&bytes) {
                    Some(other) => assert!(other != door && other.encode() == bytes),
                    None => refused += 1,
                }
            }
        }
        // Of the version all, of the kind's but two: 0 and 3, where 1 stood; of the MTU's but two: 1 and 2, where 3 stood.
        assert_eq!(refused, 8 + 6 + 6);
    }

    /// The longest there are: of engines with all NICs, and of a call between them.
    #[test]
    fn every_message_of_a_handshake_is_one_packet() {
        use crate::datagram::{Claim, DATAGRAM_MAX, Message, Nonces, Protocol};
        use crate::id::{EngineId, MAX_NICS};
        use crate::mailbox::Geometry;
        use crate::recycle::Turn;
        use crate::region::{Keys, MrDesc, Rights};
        use crate::wire::{Hello, NetAddr, NicAddr, ProviderKind};

        let port = port(GidKind::RoceV2);
        let door = Door { port, number: Number24::new(u32::MAX), key: u32::MAX }.encode();
        let nic = NicAddr { speed_gbps: 400, address: door.clone() };
        let geometry = Geometry::new(64, 1 << 20).unwrap();
        let engine = EngineId(u64::MAX);
        let mailbox = MrDesc {
            owner: engine,
            base: 1 << 60,
            len: geometry.bytes(),
            generation: u32::MAX,
            rights: Rights::REMOTE_WRITE,
            keys: Keys::new(&[u64::MAX; MAX_NICS]).unwrap(),
        };
        let nics = std::vec![nic; MAX_NICS];
        let address = NetAddr::new(ProviderKind::Verbs, engine, &nics).unwrap();
        let stand = Stand { port, queue: Queue::default() }.encode();
        let claim = Claim {
            token: u64::MAX,
            grant: u16::MAX,
            protocol: Protocol { number: u32::MAX, version: 1, data_bytes: 4 },
            turn: Turn(0),
            ports: (0..MAX_NICS).map(|_| stand.clone()).collect(),
            gone: 0,
            hello: Hello { address, mailbox, geometry, heartbeat_ms: u32::MAX, call: u64::MAX },
        };
        let mut bytes = [0; DATAGRAM_MAX];
        let len = claim.encode(&mut bytes).unwrap();
        let nonces = Nonces { initiator: [1; 32], acceptor: [2; 32] };
        let claim = &bytes[..len];
        for message in [
            Message::Call { nonce: [1; 32], target: engine, door: door.clone() },
            Message::Challenge(nonces),
            Message::Prove { nonces, door, proof: [3; 32], claim },
            Message::Accept { nonce: [1; 32], proof: [3; 32], claim },
        ] {
            let fits = message.encode(&mut [0; PACKET_MAX]);
            assert!(fits.is_some(), "{}: {len}", message.encode(&mut [0; DATAGRAM_MAX]).unwrap());
        }
    }
}
