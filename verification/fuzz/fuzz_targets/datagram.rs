//! What engines tell each other where there is no connection: calls, claims, and the upkeep of sessions.
#![no_main]

use arbitrary::{Result, Unstructured};
use immwire_core::datagram::{
    Address, Addresses, Claim, Counts, DATAGRAM_MAX, Message, Nonces, Protocol, Say, Tenants,
};
use immwire_core::id::EngineId;
use immwire_core::opening::{Pairs, Turns};
use immwire_core::recycle::Turn;
use immwire_core::tenant::{LAST_SERIAL, PART, SLOTS, Tenant};
use immwire_core::wire::NIC_ADDRESS_MAX;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    message(bytes);
    claim(bytes);
    let _ = made(&mut Unstructured::new(bytes));
});

/// What is a message is encoded to the very same bytes, and to nothing shorter.
fn message(bytes: &[u8]) {
    let message = match Message::decode(bytes) {
        Ok(message) => message,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    is_encoded_to(bytes, |out| message.encode(out));
    match message {
        // The rest of the message is the claim, whatever it says.
        Message::Prove { claim: bytes, .. } | Message::Accept { claim: bytes, .. } => claim(bytes),
        _ => {
            let longer = [bytes, &[0]].concat();
            assert!(Message::decode(&longer).is_err(), "a byte more is the same");
            let shorter = &bytes[..bytes.len() - 1];
            assert!(Message::decode(shorter).is_err(), "a byte less is the same");
        }
    }
}

/// So is what is a claim; and its parts agree.
fn claim(bytes: &[u8]) {
    let Ok(claim) = Claim::decode(bytes) else { return };
    is_encoded_to(bytes, |out| claim.encode(out));
    assert_eq!(claim.ports.len(), claim.hello.address.nics().len());
    assert!(claim.grant > 0, "nothing may be written");
    let longer = [bytes, &[0]].concat();
    assert!(Claim::decode(&longer).is_err(), "a byte more is the same");
    assert!(Claim::decode(&bytes[..bytes.len() - 1]).is_err(), "a byte less is the same");
}

fn is_encoded_to(bytes: &[u8], encode: impl Fn(&mut [u8]) -> Option<usize>) {
    let mut out = vec![0xa5; bytes.len()];
    assert_eq!(encode(&mut out), Some(bytes.len()));
    assert_eq!(out, bytes);
    assert_eq!(encode(&mut out[..bytes.len() - 1]), None, "fits a smaller buffer");
}

/// A message comes back; damaged, it is another one or none.
fn made(from: &mut Unstructured<'_>) -> Result<()> {
    let encoded = a_claim(from)?;
    let message = a_message(from, &encoded)?;
    let mut out = [0; DATAGRAM_MAX];
    let len = message.encode(&mut out).expect("every message fits");
    assert_eq!(Message::decode(&out[..len]).as_ref(), Ok(&message));
    let mut bytes = out[..len].to_vec();
    bytes.resize(from.int_in_range(0..=len + 9)?, 0);
    for _ in 0..from.int_in_range(0..=3)? {
        if !bytes.is_empty() {
            let at = from.choose_index(bytes.len())?;
            bytes[at] = from.arbitrary()?;
        }
    }
    self::message(&bytes);
    Ok(())
}

/// The bytes of a claim whose parts agree more often than not.
fn a_claim(from: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut hello = immwire_fuzz::hello(from)?;
    let nics = hello.address.nics().len();
    if from.ratio(7, 8)? {
        hello = immwire_fuzz::consistent(hello);
    }
    let ports = if from.ratio(7, 8)? { nics } else { from.int_in_range(1..=8)? };
    let made = Claim {
        token: from.arbitrary()?,
        grant: from.arbitrary()?,
        protocol: Protocol {
            number: from.arbitrary()?,
            version: from.arbitrary()?,
            data_bytes: from.arbitrary()?,
        },
        turn: Turn(from.arbitrary()?),
        ports: addresses(from, ports)?,
        gone: from.arbitrary()?,
        hello,
    };
    let mut out = [0; DATAGRAM_MAX];
    // Of a hello that contradicts itself there is none.
    let Some(len) = made.encode(&mut out) else { return Ok(Vec::new()) };
    let agrees = made.grant > 0 && ports == nics;
    assert_eq!(Claim::decode(&out[..len]).ok(), agrees.then_some(made));
    claim(&out[..len]);
    Ok(out[..len].to_vec())
}

fn address(from: &mut Unstructured<'_>) -> Result<Address> {
    let len = from.int_in_range(0..=NIC_ADDRESS_MAX)?;
    let bytes = from.bytes(len.min(from.len()))?;
    Ok(Address::from_slice(bytes).expect("short enough"))
}

fn addresses(from: &mut Unstructured<'_>, count: usize) -> Result<Addresses> {
    (0..count).map(|_| address(from)).collect()
}

fn a_message<'a>(from: &mut Unstructured<'_>, claim: &'a [u8]) -> Result<Message<'a>> {
    let nonces = Nonces { initiator: from.arbitrary()?, acceptor: from.arbitrary()? };
    let (nonce, proof) = (nonces.initiator, from.arbitrary()?);
    Ok(match from.int_in_range(0..=5)? {
        0 => Message::Call { nonce, target: EngineId(from.arbitrary()?), door: address(from)? },
        1 => Message::Challenge(nonces),
        2 => Message::Prove { nonces, door: address(from)?, proof, claim },
        3 => Message::Accept { nonce, proof, claim },
        4 => Message::Refuse { nonce, why: immwire_fuzz::refusal(from)? },
        _ => Message::Session { token: from.arbitrary()?, say: say(from)? },
    })
}

fn say(from: &mut Unstructured<'_>) -> Result<Say> {
    let turn = Turn(from.arbitrary()?);
    let turns = Turns { asks: turn, opens: Turn(from.arbitrary()?) };
    Ok(match from.int_in_range(0..=9)? {
        0 => Say::Ready { gone: from.arbitrary()? },
        1 => Say::Bye { quiet: from.arbitrary()?, sent: counts(from)? },
        2 => Say::Taken { nic: from.arbitrary()?, count: from.arbitrary()? },
        3 => Say::Withdraw(tenant(from)?),
        4 => Say::Withdrawn(tenant(from)?),
        5 => {
            let count = from.int_in_range(1..=8)?;
            Say::Move { turn, ports: addresses(from, count)? }
        }
        6 => {
            Say::Moved { turn, sent: counts(from)? }
        }
        7 => Say::Open { turns, pairs: Pairs::from_bytes(from.arbitrary()?) },
        8 => {
            let count = from.int_in_range(0..=PART)?;
            let tenants = (0..count).map(|_| tenant(from)).collect::<Result<Tenants>>()?;
            Say::Gone { part: from.arbitrary()?, tenants }
        }
        _ => Say::Opened { turns, pairs: Pairs::from_bytes(from.arbitrary()?) },
    })
}

fn counts(from: &mut Unstructured<'_>) -> Result<Counts> {
    let count = from.int_in_range(0..=8)?;
    (0..count).map(|_| from.arbitrary()).collect()
}

fn tenant(from: &mut Unstructured<'_>) -> Result<Tenant> {
    let slot = from.int_in_range(0..=SLOTS - 1)?;
    let serial = from.int_in_range(1..=LAST_SERIAL)?;
    Ok(Tenant::new(u16::try_from(slot).expect("16 bits"), serial).expect("possible"))
}
