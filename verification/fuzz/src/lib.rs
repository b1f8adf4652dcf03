//! What several fuzz targets share: values made from fuzzer bytes, and the property of every frame.
//!
//! A target gets bytes, and uses them twice: as what arrived, and as a source of decisions from which a
//! well-formed value is made, since no fuzzer guesses a checksum or a consistent handshake.

use arbitrary::{Result, Unstructured};
use immwire_core::id::EngineId;
use immwire_core::mailbox::{Geometry, MAX_SLOTS_BYTES};
use immwire_core::region::{Keys, MrDesc, Rights};
use immwire_core::wire::{Hello, NIC_ADDRESS_MAX, NetAddr, NicAddr, ProviderKind, Refusal, Wire};

/// Decodes `bytes`. What decodes must be encoded to the very same bytes, which none shorter or longer are,
/// and must fit the promised buffer and no smaller one.
pub fn frame<T: Wire + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<T> {
    let value = match T::decode(bytes) {
        Ok(value) => value,
        Err(error) => {
            // Whatever is wrong can be said.
            assert!(!error.to_string().is_empty());
            return None;
        }
    };
    assert_encodes_to(&value, bytes);
    let longer = [bytes, &[0]].concat();
    assert!(T::decode(&longer).is_err(), "a byte more is the same");
    assert!(T::decode(&bytes[..bytes.len() - 1]).is_err(), "a byte less is the same");
    Some(value)
}

/// Encodes `value`; the bytes must decode to it. Returns them.
pub fn round_trip<T: Wire + PartialEq + std::fmt::Debug>(value: &T) -> Vec<u8> {
    let mut out = vec![0; T::ENCODED_MAX];
    let len = value.encode(&mut out).expect("the promised buffer holds it");
    out.truncate(len);
    assert_eq!(T::decode(&out).as_ref(), Ok(value));
    assert_encodes_to(value, &out);
    out
}

/// Cuts a frame, or makes it longer, and changes a few bytes; its head says how long it is now. Few random
/// bytes do that, and what gets past the head is where the checks are.
pub fn damaged<T: Wire + PartialEq + std::fmt::Debug>(
    mut bytes: Vec<u8>,
    from: &mut Unstructured<'_>,
) -> Result<Option<T>> {
    const LEN_AT: usize = 6;
    let len = from.int_in_range(LEN_AT + 2..=bytes.len() + 9)?;
    bytes.resize(len, 0);
    for _ in 0..from.int_in_range(0..=3)? {
        let at = from.choose_index(len)?;
        bytes[at] = from.arbitrary()?;
    }
    let said = u16::try_from(len).expect("frames are short").to_le_bytes();
    bytes[LEN_AT..LEN_AT + 2].copy_from_slice(&said);
    Ok(frame(&bytes))
}

fn assert_encodes_to<T: Wire>(value: &T, bytes: &[u8]) {
    let mut out = vec![0xa5; T::ENCODED_MAX];
    assert_eq!(value.encode(&mut out), Ok(bytes.len()));
    assert_eq!(&out[..bytes.len()], bytes);
    assert!(value.encode(&mut out[..bytes.len() - 1]).is_err(), "fits a smaller buffer");
}

/// An address of any provider, with 1 to 8 NICs.
pub fn address(from: &mut Unstructured<'_>) -> Result<NetAddr> {
    let provider = *from.choose(&ProviderKind::ALL)?;
    let engine = EngineId(from.arbitrary()?);
    let count = from.int_in_range(1..=8)?;
    let nics = (0..count).map(|_| nic(from)).collect::<Result<Vec<_>>>()?;
    Ok(NetAddr::new(provider, engine, &nics).expect("1 to 8 NICs"))
}

fn nic(from: &mut Unstructured<'_>) -> Result<NicAddr> {
    let len = from.int_in_range(0..=NIC_ADDRESS_MAX)?;
    let bytes = from.bytes(len.min(from.len()))?;
    let address = heapless::Vec::from_slice(bytes).expect("short enough");
    Ok(NicAddr { speed_gbps: from.arbitrary()?, address })
}

/// A descriptor; often of a region at an end of the address space.
pub fn descriptor(from: &mut Unstructured<'_>) -> Result<MrDesc> {
    let count = from.int_in_range(1..=8)?;
    let keys = (0..count).map(|_| from.arbitrary()).collect::<Result<Vec<u64>>>()?;
    Ok(MrDesc {
        owner: EngineId(from.arbitrary()?),
        base: edge(from)?,
        len: edge(from)?,
        generation: from.arbitrary()?,
        rights: if from.arbitrary()? { Rights::REMOTE_WRITE } else { Rights::LOCAL },
        keys: Keys::new(&keys).expect("1 to 8 keys"),
    })
}

/// A number that is small, or large, or anything.
pub fn edge(from: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match from.int_in_range(0..=3)? {
        0 => u64::from(from.arbitrary::<u8>()?),
        1 => u64::MAX - u64::from(from.arbitrary::<u8>()?),
        2 => u64::from(from.arbitrary::<u32>()?),
        _ => from.arbitrary()?,
    })
}

/// A hello of parts that may or may not agree.
pub fn hello(from: &mut Unstructured<'_>) -> Result<Hello> {
    let address = address(from)?;
    let mut mailbox = descriptor(from)?;
    if from.ratio(7, 8)? {
        mailbox.owner = address.engine();
    }
    if from.ratio(7, 8)? {
        let keys = vec![from.arbitrary()?; address.nics().len()];
        mailbox.keys = Keys::new(&keys).expect("1 to 8 keys");
    }
    let slots = from.int_in_range(1..=64)?;
    let lines = from.int_in_range(1..=MAX_SLOTS_BYTES / 64 / u64::from(slots))?;
    let slot_bytes = u32::try_from(lines * 64).expect("few");
    let geometry = Geometry::new(slots, slot_bytes).expect("possible");
    let (heartbeat_ms, call) = (from.arbitrary()?, from.arbitrary()?);
    Ok(Hello { address, mailbox, geometry, heartbeat_ms, call })
}

/// The same hello, in agreement with itself.
pub fn consistent(mut hello: Hello) -> Hello {
    let keys = vec![7; hello.address.nics().len()];
    hello.mailbox.owner = hello.address.engine();
    hello.mailbox.keys = Keys::new(&keys).expect("1 to 8 keys");
    hello.mailbox.rights = Rights::REMOTE_WRITE;
    (hello.mailbox.base, hello.mailbox.len) = (4096, 1 << 60);
    hello
}

/// Any refusal.
pub fn refusal(from: &mut Unstructured<'_>) -> Result<Refusal> {
    Ok(match from.int_in_range(0..=9)? {
        0 => Refusal::Version { ours: from.arbitrary()?, theirs: from.arbitrary()? },
        1 => Refusal::Busy,
        2 => Refusal::Unauthorised,
        3 => Refusal::Crossed,
        4 => Refusal::ShuttingDown,
        5 => Refusal::Myself,
        6 => Refusal::Malformed,
        7 => Refusal::Stale,
        8 => Refusal::NoWay,
        _ => Refusal::Elsewhere,
    })
}
