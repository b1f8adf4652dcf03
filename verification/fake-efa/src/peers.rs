//! Address vectors: the numbers that stand for peers, and the device's list of who may write here.
//!
//! A number is the lowest that is free, so a stale one soon means somebody else.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use crate::lock;
use crate::memory::{InUse, Users};
use crate::packet::Address;

#[derive(Debug, Default)]
struct State {
    places: Vec<Option<(Address, Users)>>,
    numbers: HashMap<([u8; 16], u16), usize>,
    ever: HashSet<([u8; 16], u16)>,
}

/// An address vector.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    /// The number of the domain it is of.
    pub domain: u64,
    /// Endpoints bound to it: one at most.
    pub users: Users,
    state: Mutex<State>,
}

impl Peers {
    /// Returns an empty one.
    pub(crate) fn new(domain: u64) -> Self {
        Self { domain, ..Self::default() }
    }

    /// Returns the number of `address`, a new one if it has none. A queue pair number that came back with another key
    /// is another peer: the old one's place is gone.
    pub(crate) fn insert(&self, address: Address) -> u64 {
        let mut state = lock(&self.state);
        let place = (address.gid, address.qpn);
        if let Some(&number) = state.numbers.get(&place)
            && let Some(Some((known, _))) = state.places.get(number)
            && *known == address
        {
            return number as u64;
        }
        let free = state.places.iter().position(Option::is_none).unwrap_or(state.places.len());
        if free == state.places.len() {
            state.places.push(None);
        }
        if let Some(slot) = state.places.get_mut(free) {
            *slot = Some((address, Users::default()));
        }
        state.numbers.insert(place, free);
        state.ever.insert(place);
        free as u64
    }

    /// Takes a number out, and returns how many operations to it were in flight; `None` if it stands for nobody.
    pub(crate) fn remove(&self, number: u64) -> Option<usize> {
        let mut state = lock(&self.state);
        let number = usize::try_from(number).ok()?;
        let (address, users) = state.places.get_mut(number)?.take()?;
        let place = (address.gid, address.qpn);
        if state.numbers.get(&place) == Some(&number) {
            state.numbers.remove(&place);
        }
        Some(users.count())
    }

    /// Returns the address that a number stands for.
    pub(crate) fn address(&self, number: u64) -> Option<Address> {
        let state = lock(&self.state);
        state.places.get(usize::try_from(number).ok()?)?.as_ref().map(|(address, _)| *address)
    }

    /// Returns the address for an operation, and what stands for it until it has ended.
    pub(crate) fn destination(&self, number: u64) -> Option<(Address, InUse)> {
        let state = lock(&self.state);
        state
            .places
            .get(usize::try_from(number).ok()?)?
            .as_ref()
            .map(|(address, users)| (*address, users.enter()))
    }

    /// Returns the number of whoever a packet came from.
    pub(crate) fn number(&self, address: Address) -> Option<u64> {
        lock(&self.state).numbers.get(&(address.gid, address.qpn)).map(|&number| number as u64)
    }

    /// Returns whether it was ever inserted.
    pub(crate) fn knew(&self, address: Address) -> bool {
        lock(&self.state).ever.contains(&(address.gid, address.qpn))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_reused_and_stand_for_one_address() {
        let peers = Peers::new(0);
        let address = |qpn, qkey| Address { gid: Address::gid(0), qpn, qkey };
        assert_eq!(
            (peers.insert(address(1, 1)), peers.insert(address(2, 1)), peers.insert(address(1, 1))),
            (0, 1, 0)
        );
        let (to, in_use) = peers.destination(0).unwrap();
        assert_eq!(to, address(1, 1));
        assert_eq!(peers.remove(0), Some(1));
        drop(in_use);
        assert_eq!(
            (peers.remove(0), peers.number(address(1, 1)), peers.knew(address(1, 1))),
            (None, None, true)
        );
        assert_eq!(peers.insert(address(3, 1)), 0);
        assert_eq!(peers.insert(address(2, 9)), 2);
        assert_eq!((peers.remove(1), peers.number(address(2, 9))), (Some(0), Some(2)));
        assert!(
            !peers.knew(address(4, 1))
                && peers.address(99).is_none()
                && peers.address(u64::MAX).is_none()
        );
    }
}
