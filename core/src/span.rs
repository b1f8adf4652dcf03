//! Engines with two transports: one to the peers of their own host, one to all others.
//!
//! Such an engine has one *near* NIC, number 0, and its *far* NICs after it. To each peer one side leads, and both
//! ends find the same one: near if their [`Host`]s are the same. Each transport goes on seeing an engine of its own
//! kind, with its own NICs alone, counted from 0; this module turns what the one sees into what the other does.
//!
//! It opens nothing, and does not know what a host is: the platform says by which facts two engines are on one.
//!
//! # Invariants
//!
//! - A number of a NIC, an address or a hello that is narrowed to a side and widened again is what it was, but for what
//!   the other side alone knows: NICs that do not lead to this peer have no speed, and keys that nobody may use are 0.
//! - Nothing from outside is taken for an address of both sides that has not both.

use heapless::Vec;

use crate::id::{MAX_NICS, NicIndex};
use crate::nic::NicState;
use crate::region::{Keys, MrDesc};
use crate::wire::{Hello, NIC_ADDRESS_MAX, NetAddr, NicAddr, ProviderKind};

/// What is the same for engines of one host, and no others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Host(pub [u8; HOST_BYTES]);

/// Bytes of a [`Host`]: a digest of whatever the platform finds.
pub const HOST_BYTES: usize = 32;
/// The near transport's address of a NIC: what is left of an address beside the host.
pub const NEAR_ADDRESS_MAX: usize = NIC_ADDRESS_MAX - HOST_BYTES;
/// NICs of the far transport, at most.
pub const FAR_NICS_MAX: usize = MAX_NICS - 1;

/// Which transport leads to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The one to peers of the own host.
    Near,
    /// The one to all others.
    Far,
}

/// Why two addresses make no address of both sides, or an address does not have them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SpanError {
    /// There is no kind of engine that has these two transports.
    Kinds {
        /// Of the near side.
        near: ProviderKind,
        /// Of the far one.
        far: ProviderKind,
    },
    /// One near NIC and 1 to [`FAR_NICS_MAX`] far ones are possible.
    Nics {
        /// Near NICs that were given.
        near: usize,
        /// Far ones.
        far: usize,
    },
    /// The near address is longer than [`NEAR_ADDRESS_MAX`].
    Address,
}

impl core::fmt::Display for SpanError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Kinds { near, far } => write!(f, "no engine has both {near} and {far}"),
            Self::Nics { near, far } => write!(
                f,
                "{near} nics to the own host and {far} to others: 1 and 1 to {FAR_NICS_MAX} are possible"
            ),
            Self::Address => f.write_str("the address on the own host is too long"),
        }
    }
}

impl core::error::Error for SpanError {}

impl ProviderKind {
    /// The transports of an engine that has two: near, far.
    #[must_use]
    pub const fn sides(self) -> Option<(Self, Self)> {
        match self {
            Self::ShmLibfabric => Some((Self::Shm, Self::Libfabric)),
            Self::ShmVerbs => Some((Self::Shm, Self::Verbs)),
            _ => None,
        }
    }

    /// The kind of engine that has both.
    #[must_use]
    pub fn of_sides(near: Self, far: Self) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.sides() == Some((near, far)))
    }
}

impl Side {
    /// The number among all of an engine's NICs of what is NIC `nic` to this side.
    #[must_use]
    pub const fn widen(self, nic: NicIndex) -> NicIndex {
        match self {
            Self::Near => nic,
            Self::Far => nic.saturating_add(1),
        }
    }

    /// The number that NIC `nic` of an engine has for this side; `None` if it is the other one's.
    #[must_use]
    pub const fn narrow(self, nic: NicIndex) -> Option<NicIndex> {
        match self {
            Self::Near if nic == 0 => Some(0),
            Self::Near => None,
            Self::Far => nic.checked_sub(1),
        }
    }
}

/// The side that NIC `nic` of an engine is of.
#[must_use]
pub const fn side_of(nic: NicIndex) -> Side {
    if nic == 0 { Side::Near } else { Side::Far }
}

/// For [`GroupConfig::unreached`](crate::group::GroupConfig::unreached): no path leads from one side to the other.
#[must_use]
pub const fn unreached() -> [u8; MAX_NICS] {
    let mut unreached = [1; MAX_NICS];
    unreached[0] = !1;
    unreached
}

/// The address of an engine that is reached at `near` from its own `host`, and at `far` from elsewhere.
///
/// # Errors
///
/// [`SpanError`].
pub fn join(near: &NetAddr, host: &Host, far: &NetAddr) -> Result<NetAddr, SpanError> {
    let (kinds, counts) = ((near.provider(), far.provider()), (near.nics(), far.nics()));
    let kind = ProviderKind::of_sides(kinds.0, kinds.1);
    let kind = kind.ok_or(SpanError::Kinds { near: kinds.0, far: kinds.1 })?;
    let wrong = SpanError::Nics { near: counts.0.len(), far: counts.1.len() };
    let [nic] = near.nics() else { return Err(wrong) };
    if nic.address.len() > NEAR_ADDRESS_MAX {
        return Err(SpanError::Address);
    }
    let mut address = nic.address.clone();
    // PROOF: it was no longer than what `HOST_BYTES` leave.
    let _ = address.extend_from_slice(&host.0);
    let near = NicAddr { speed_gbps: nic.speed_gbps, address };
    let mut nics: Vec<NicAddr, MAX_NICS> = Vec::new();
    let all = core::iter::once(&near).chain(far.nics());
    let fits = all.cloned().try_for_each(|nic| nics.push(nic)).is_ok();
    let address = NetAddr::new(kind, far.engine(), &nics);
    address.ok().filter(|_| fits).ok_or(wrong)
}

/// The host of the engine that is reached there; `None` if it has not two sides.
#[must_use]
pub fn host(address: &NetAddr) -> Option<Host> {
    Some(split_near(address)?.1)
}

fn split_near(address: &NetAddr) -> Option<(NicAddr, Host)> {
    address.provider().sides()?;
    let nic = address.nics().first()?;
    let at = nic.address.len().checked_sub(HOST_BYTES)?;
    let (near, host) = nic.address.split_at_checked(at)?;
    let near = NicAddr { speed_gbps: nic.speed_gbps, address: Vec::from_slice(near).ok()? };
    Some((near, Host(host.try_into().ok()?)))
}

/// The side that leads from the one engine to the other, or back; `None` if they are not of one kind.
#[must_use]
pub fn side(ours: &NetAddr, theirs: &NetAddr) -> Option<Side> {
    let hosts = host(ours)?.eq(&host(theirs)?);
    let side = if hosts { Side::Near } else { Side::Far };
    (ours.provider() == theirs.provider()).then_some(side)
}

/// The side that leads to a peer by what is known of its address: all of it, when it is called; one side's, [widened](widen_hello), when
/// it has called. `None` if they are not of one kind.
#[must_use]
pub fn towards(ours: &NetAddr, theirs: &NetAddr) -> Option<Side> {
    match theirs.nics() {
        _ if ours.provider() != theirs.provider() => None,
        // Who is reached by both has at least one NIC for each, and a host behind the address of the first.
        [_] => Some(Side::Near),
        [near, ..] if near.address.is_empty() => Some(Side::Far),
        _ => side(ours, theirs),
    }
}

/// As that side sees the address; `None` if the engine has not both sides.
#[must_use]
pub fn narrow(address: &NetAddr, side: Side) -> Option<NetAddr> {
    let (near, far) = address.provider().sides()?;
    let (nic, _) = split_near(address)?;
    let narrowed = match side {
        Side::Near => NetAddr::new(near, address.engine(), &[nic]),
        Side::Far => NetAddr::new(far, address.engine(), address.nics().get(1..)?),
    };
    narrowed.ok()
}

/// The NICs of an address, with speed 0 for those of the other side.
#[must_use]
pub fn states(address: &NetAddr, side: Side) -> Vec<NicState, MAX_NICS> {
    let of_side = |nic: NicIndex| side_of(nic) == side;
    let nics = (0..).zip(address.nics());
    nics.map(|(nic, it)| NicState {
        speed: if of_side(nic) { it.speed_gbps } else { 0 },
        healthy: true,
    })
    .collect()
}

/// What an engine says on connecting, as that side says it; `None` if the engine, or its mailbox, has not both sides.
#[must_use]
pub fn narrow_hello(hello: &Hello, side: Side) -> Option<Hello> {
    let keys = hello.mailbox.keys.as_slice();
    let keys = match side {
        Side::Near => keys.get(..1)?,
        Side::Far => keys.get(1..)?,
    };
    let mailbox = MrDesc { keys: Keys::new(keys)?, ..hello.mailbox };
    Some(Hello { address: narrow(&hello.address, side)?, mailbox, ..hello.clone() })
}

/// What an engine of this `kind` has said on that side, as all of it would say it: nothing is known of its other side,
/// whose NICs have no speed. `None` if no such engine says that.
#[must_use]
pub fn widen_hello(kind: ProviderKind, hello: &Hello, side: Side) -> Option<Hello> {
    let (near, far) = kind.sides()?;
    let said = hello.address.nics();
    let mut nics: Vec<NicAddr, MAX_NICS> = Vec::new();
    let mut keys: Vec<u64, MAX_NICS> = Vec::new();
    match side {
        Side::Near if hello.address.provider() == near && said.len() == 1 => {}
        Side::Far if hello.address.provider() == far => {
            nics.push(NicAddr { speed_gbps: 0, address: Vec::new() }).ok()?;
            keys.push(0).ok()?;
        }
        _ => return None,
    }
    said.iter().cloned().try_for_each(|nic| nics.push(nic)).ok()?;
    keys.extend_from_slice(hello.mailbox.keys.as_slice()).ok()?;
    let address = NetAddr::new(kind, hello.engine(), &nics).ok()?;
    let mailbox = MrDesc { keys: Keys::new(&keys)?, ..hello.mailbox };
    Some(Hello { address, mailbox, ..hello.clone() })
}

#[cfg(test)]
mod tests {
    use std::vec::Vec as List;

    use super::*;
    use crate::id::EngineId;
    use crate::mailbox::Geometry;
    use crate::region::Rights;
    use crate::wire::Wire;

    const HERE: Host = Host([7; HOST_BYTES]);
    const THERE: Host = Host([8; HOST_BYTES]);

    fn nic(speed: u32, address: &[u8]) -> NicAddr {
        NicAddr { speed_gbps: speed, address: Vec::from_slice(address).unwrap() }
    }

    fn address(kind: ProviderKind, nics: usize, bytes: usize) -> NetAddr {
        let nics: List<_> =
            (1..).map(|n| nic(n, &[3; NIC_ADDRESS_MAX][..bytes])).take(nics).collect();
        NetAddr::new(kind, EngineId(5), &nics).unwrap()
    }

    fn hello(address: NetAddr) -> Hello {
        let keys: List<u64> = (40..).take(address.nics().len()).collect();
        let geometry = Geometry::new(1, 64).unwrap();
        let mailbox = MrDesc {
            owner: address.engine(),
            base: 4096,
            len: 1 << 20,
            generation: 1,
            rights: Rights::REMOTE_WRITE,
            keys: Keys::new(&keys).unwrap(),
        };
        Hello { address, mailbox, geometry, heartbeat_ms: 9, call: 2 }
    }

    /// Each kind, number of NICs and length of address that there can be, and those next to them.
    #[test]
    fn an_address_of_both_sides_is_taken_apart_again() {
        for near in ProviderKind::ALL {
            for far in ProviderKind::ALL {
                for (near_nics, far_nics) in (1..3).flat_map(|n| (1..=8).map(move |f| (n, f))) {
                    for bytes in [0, 1, NEAR_ADDRESS_MAX, NEAR_ADDRESS_MAX + 1] {
                        let sides = (address(near, near_nics, bytes), address(far, far_nics, 9));
                        let joined = join(&sides.0, &HERE, &sides.1);
                        let kind = ProviderKind::of_sides(near, far);
                        let possible = near_nics == 1 && far_nics <= FAR_NICS_MAX;
                        let Ok(joined) = joined else {
                            let fits = possible && bytes <= NEAR_ADDRESS_MAX;
                            assert!(kind.is_none() || !fits, "{joined:?}");
                            continue;
                        };
                        assert!(possible);
                        assert_eq!(Some(joined.provider()), kind);
                        assert_eq!(narrow(&joined, Side::Near), Some(sides.0));
                        assert_eq!(narrow(&joined, Side::Far), Some(sides.1));
                        assert_eq!(host(&joined), Some(HERE));
                        let text: std::string::String = std::format!("{joined}");
                        assert_eq!(text.parse(), Ok(joined));
                    }
                }
            }
        }
    }

    #[test]
    fn both_ends_find_the_same_side() {
        let make = |far, host| {
            let near = address(ProviderKind::Shm, 1, 16);
            join(&near, &host, &address(far, 2, 9)).unwrap()
        };
        let all = [ProviderKind::Libfabric, ProviderKind::Verbs]
            .into_iter()
            .flat_map(|kind| [HERE, THERE].map(|host| (kind, host)));
        let all: List<_> = all.collect();
        for (a, b) in all.iter().flat_map(|a| all.iter().map(move |b| (*a, *b))) {
            let (ours, theirs) = (make(a.0, a.1), make(b.0, b.1));
            let found = side(&ours, &theirs);
            assert_eq!(found, side(&theirs, &ours));
            let near = if a.1 == b.1 { Side::Near } else { Side::Far };
            assert_eq!(found, (a.0 == b.0).then_some(near));
            assert_eq!(towards(&ours, &theirs), found);
        }
        let plain = address(ProviderKind::Libfabric, 2, NIC_ADDRESS_MAX);
        let joined = make(ProviderKind::Libfabric, HERE);
        assert_eq!((side(&plain, &joined), side(&joined, &plain)), (None, None));
        assert_eq!((host(&plain), narrow(&plain, Side::Near)), (None, None));
        let damaged = address(ProviderKind::ShmVerbs, 2, HOST_BYTES - 1);
        assert_eq!((host(&damaged), narrow(&damaged, Side::Far)), (None, None));
    }

    /// What one engine says on a side is what the other hears, and nothing leads to the NICs of the other side.
    #[test]
    fn a_hello_goes_through_either_side() {
        for far_nics in 1..=FAR_NICS_MAX {
            let near = address(ProviderKind::Shm, 1, 16);
            let joined = join(&near, &HERE, &address(ProviderKind::Verbs, far_nics, 9)).unwrap();
            let whole = hello(joined.clone());
            for side in [Side::Near, Side::Far] {
                let said = narrow_hello(&whole, side).unwrap();
                let mut bytes = [0; Hello::ENCODED_MAX];
                let len = said.encode(&mut bytes).unwrap();
                let said = Hello::decode(&bytes[..len]).unwrap();
                let heard = widen_hello(ProviderKind::ShmVerbs, &said, side).unwrap();
                assert_eq!((heard.engine(), heard.call), (whole.engine(), whole.call));
                // Who has called is known to be on that side, whatever is not known of it.
                for ours in [HERE, THERE].map(|host| {
                    let near = address(ProviderKind::Shm, 1, 16);
                    join(&near, &host, &address(ProviderKind::Verbs, 1, 9)).unwrap()
                }) {
                    assert_eq!(towards(&ours, &heard.address), Some(side));
                }
                let other_kind = address(ProviderKind::ShmLibfabric, 2, 30);
                assert_eq!(towards(&other_kind, &heard.address), None);
                assert_eq!(heard.address.provider(), joined.provider());
                for nic in 0..=NicIndex::try_from(far_nics).unwrap() {
                    let at = usize::from(nic);
                    let (heard_nic, key) =
                        (heard.address.nics().get(at), heard.mailbox.keys.get(nic));
                    let speed = states(&joined, side)[at].speed;
                    if side_of(nic) == side {
                        assert_eq!(heard_nic.unwrap().speed_gbps, speed);
                        assert_eq!(speed, joined.nics()[at].speed_gbps);
                        assert_eq!(key, whole.mailbox.keys.get(nic));
                    } else {
                        assert_eq!((speed, key.unwrap_or(0)), (0, 0));
                        assert_eq!(heard_nic.map_or(0, |nic| nic.speed_gbps), 0);
                    }
                }
                let other = if side == Side::Near { Side::Far } else { Side::Near };
                assert_eq!(widen_hello(ProviderKind::ShmVerbs, &said, other), None);
                assert_eq!(widen_hello(ProviderKind::ShmLibfabric, &said, Side::Far), None);
                assert_eq!(widen_hello(ProviderKind::Verbs, &said, side), None);
            }
        }
        let too_many = hello(address(ProviderKind::Verbs, MAX_NICS, 9));
        assert_eq!(widen_hello(ProviderKind::ShmVerbs, &too_many, Side::Far), None);
        let two = hello(address(ProviderKind::Shm, 2, 9));
        assert_eq!(widen_hello(ProviderKind::ShmVerbs, &two, Side::Near), None);
    }

    #[test]
    fn nics_are_of_one_side_each() {
        for (nic, unreached) in (0..).zip(unreached()) {
            let side = side_of(nic);
            let narrow = side.narrow(nic).unwrap();
            assert_eq!(side.widen(narrow), nic);
            let other = if side == Side::Near { Side::Far } else { Side::Near };
            assert_eq!(other.narrow(nic), None);
            for remote in 0..8_u8 {
                let leads = unreached & 1 << remote == 0;
                assert_eq!(leads, side_of(remote) == side, "{nic} {remote}");
            }
        }
    }
}
