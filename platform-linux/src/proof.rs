//! How both ends of a handshake over datagrams show that they hold the group's key, and that a caller is reached
//! where it says: for every transport that uses the messages of `immwire_core::datagram`.
//!
//! Knows no message and no peer. A proof is a keyed hash over both nonces, the engine that was called, and everything
//! the prover claims; the roles differ, so it can be neither reflected nor relayed. The claim names the transport's
//! protocol, so one of another transport is of no use.

use immwire_core::datagram::{Address, Nonce, Nonces, Proof};
use immwire_core::id::EngineId;

use crate::shm::GroupKey;

/// Who proves something.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Prover {
    Initiator,
    Acceptor,
}

/// What `prover` shows to prove that it holds `key`; nothing without one.
pub(crate) fn proof(
    key: Option<&GroupKey>,
    prover: Prover,
    nonces: &Nonces,
    target: EngineId,
    claim: &[u8],
) -> blake3::Hash {
    let Some(key) = key else { return blake3::Hash::from_bytes([0; 32]) };
    let role = match prover {
        Prover::Initiator => b"datagram initiator",
        Prover::Acceptor => b"datagram acceptor.",
    };
    // All parts but the last have fixed lengths: no two claims hash the same bytes.
    key.hasher()
        .update(role)
        .update(&nonces.initiator)
        .update(&nonces.acceptor)
        .update(&target.0.to_le_bytes())
        .update(claim)
        .finalize()
}

/// Compares in constant time.
pub(crate) fn is_proven(expected: blake3::Hash, found: Proof) -> bool {
    expected == blake3::Hash::from_bytes(found)
}

/// What a caller has to show that it has received. It follows from the call, so nothing is kept.
pub(crate) fn challenge(secret: &[u8; 32], initiator: &Nonce, door: &Address) -> Nonces {
    let mut hasher = blake3::Hasher::new_keyed(secret);
    let acceptor = hasher.update(initiator).update(door).finalize();
    Nonces { initiator: *initiator, acceptor: *acceptor.as_bytes() }
}
