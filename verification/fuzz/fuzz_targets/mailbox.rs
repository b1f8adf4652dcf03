//! Control immediates, message headers, answers about a broken path, and a mailbox whose peer keeps no rule.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use immwire_core::mailbox::{
    Control, Geometry, HEADER_BYTES, Inbox, MAX_SLOTS, MessageHeader, Outbox, Reserved,
};
use immwire_core::receipt::{
    Epoch, MAX_RECEIPT_BYTES, SETTLEMENT_BYTES, Settlement, SettlementError,
};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Call {
    /// A message in that slot, with such a header.
    Message {
        slot: u8,
        len: u16,
        kind: u8,
        ahead: u8,
        far: Option<u64>,
    },
    /// A message in that slot, behind these bytes.
    Raw {
        slot: u8,
        bytes: [u8; HEADER_BYTES],
    },
    Poll,
    Consumed {
        slot: u8,
    },
    Reserve {
        len: u64,
    },
    Release {
        slot: u8,
    },
    Withdraw,
}

fuzz_target!(|bytes: &[u8]| {
    for part in bytes.chunks_exact(4) {
        immediate(u32::from_le_bytes(part.try_into().expect("four bytes")));
    }
    for part in bytes.windows(HEADER_BYTES).chain([bytes]) {
        header(part);
    }
    let mut from = Unstructured::new(bytes);
    answer(bytes);
    let _ = answers(&mut Unstructured::new(bytes));
    let parts: arbitrary::Result<(u8, u16, Vec<Call>)> = from.arbitrary();
    if let Ok((slots, lines, calls)) = parts {
        // Few slots, so that they are used up.
        let slots = slots % if slots & 64 == 0 { 5 } else { MAX_SLOTS } + 1;
        let slot_bytes = (u32::from(lines) + 1) * 64;
        let geometry = Geometry::new(slots, slot_bytes).expect("possible");
        inbox(geometry, &calls);
        outbox(geometry, &calls);
    }
});

fn immediate(bits: u32) {
    if let Some(Ok(control)) = Control::decode(bits) {
        assert_eq!(control.encode(), bits);
        if let Control::Message(slot) | Control::Credit(slot) = control {
            assert!(slot < MAX_SLOTS);
        }
    }
}

fn header(bytes: &[u8]) {
    if let Ok(header) = MessageHeader::from_bytes(bytes) {
        assert_eq!(header.to_bytes(), bytes);
    }
}

/// What is taken for an answer is one, and has one form.
fn answer(bytes: &[u8]) -> Option<Settlement> {
    let settlement = Settlement::from_bytes(bytes).ok()?;
    assert!(settlement.from < 8 && settlement.to < 8);
    assert_eq!(settlement.to_bytes(), bytes);
    Some(settlement)
}

fn settlement(from: &mut Unstructured<'_>) -> arbitrary::Result<Settlement> {
    let len = from.int_in_range(0..=MAX_RECEIPT_BYTES)?;
    let bytes = from.bytes(len.min(from.len()))?;
    Ok(Settlement {
        epoch: Epoch::new(from.int_in_range(0..=2047)?).expect("below 2048"),
        from: from.int_in_range(0..=7)?,
        to: from.int_in_range(0..=7)?,
        receipt: heapless::Vec::from_slice(bytes).expect("short enough"),
    })
}

/// An answer survives; half of one, and half of another, is neither; nor is one that was changed.
fn answers(from: &mut Unstructured<'_>) -> arbitrary::Result<()> {
    let (old, new) = (settlement(from)?, settlement(from)?);
    for settlement in [&old, &new] {
        assert_eq!(answer(&settlement.to_bytes()).as_ref(), Some(settlement));
    }
    let cut = from.int_in_range(0..=SETTLEMENT_BYTES)?;
    let mut mixed = old.to_bytes();
    mixed[..cut].copy_from_slice(&new.to_bytes()[..cut]);
    match Settlement::from_bytes(&mixed) {
        Ok(got) => assert!(got == old || got == new, "{got:?} of {old:?} and {new:?}"),
        Err(error) => assert_eq!(error, SettlementError::Torn),
    }
    // By somebody who knows how to sum up.
    let mut forged = old.to_bytes();
    let at = from.choose_index(SETTLEMENT_BYTES - 8)?;
    forged[at] = from.arbitrary()?;
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let sum = forged[..SETTLEMENT_BYTES - 8].iter().fold(0xcbf2_9ce4_8422_2325, step);
    forged[SETTLEMENT_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
    answer(&forged);
    Ok(())
}

/// Every message is delivered once, in order, inside its slot; what breaks the rules changes nothing.
fn inbox(geometry: Geometry, calls: &[Call]) {
    let mut inbox = Inbox::new(geometry);
    let (mut next, mut held, mut lent) = (0_u64, 0_u64, 0_u64);
    let mut waiting = std::collections::BTreeMap::new();
    for call in calls {
        let before = inbox.clone();
        match *call {
            Call::Message { slot, len, kind, ahead, far } => {
                let sequence = far.unwrap_or(next.wrapping_add(ahead.into()));
                let header = MessageHeader { len: len.into(), kind, sequence }.to_bytes();
                let possible = slot < geometry.slots()
                    && held >> slot & 1 == 0
                    && u32::from(len) <= geometry.max_message_bytes()
                    && (next..next + u64::from(geometry.slots())).contains(&sequence)
                    && !waiting.contains_key(&sequence);
                let taken = inbox.handle_message(slot, &header);
                assert_eq!(taken.is_ok(), possible, "{taken:?} for {sequence} in {slot}");
                if possible {
                    held |= 1 << slot;
                    waiting.insert(sequence, (slot, u32::from(len), kind));
                } else {
                    assert_eq!(inbox, before);
                }
            }
            Call::Raw { slot, bytes } if MessageHeader::from_bytes(&bytes).is_err() => {
                assert!(inbox.handle_message(slot, &bytes).is_err());
                assert_eq!(inbox, before);
            }
            Call::Poll => {
                assert_eq!(inbox.has_delivery(), waiting.contains_key(&next));
                match (inbox.poll_delivery(), waiting.remove(&next)) {
                    (None, None) => assert_eq!(inbox, before),
                    (Some(got), Some((slot, len, kind))) => {
                        assert_eq!(
                            (got.slot, got.len, got.kind, got.sequence),
                            (slot, len, kind, next)
                        );
                        let first = u64::from(slot) * u64::from(geometry.slot_bytes());
                        assert_eq!(got.offset, first + HEADER_BYTES as u64);
                        let end = got.offset + u64::from(len);
                        assert!(
                            end <= first + u64::from(geometry.slot_bytes())
                                && end <= geometry.bytes()
                        );
                        lent |= 1 << slot;
                        next += 1;
                    }
                    (got, expected) => panic!("{got:?} instead of {expected:?}"),
                }
            }
            Call::Consumed { slot } => {
                let possible = slot < 64 && lent >> slot & 1 == 1;
                let consumed = inbox.handle_consumed(slot);
                assert_eq!(consumed.ok(), possible.then_some(Control::Credit(slot)));
                if possible {
                    lent &= !(1 << slot);
                    held &= !(1 << slot);
                } else {
                    assert_eq!(inbox, before);
                }
            }
            _ => {}
        }
    }
}

/// A slot is lent to one message at a time, whatever the peer gives back.
fn outbox(geometry: Geometry, calls: &[Call]) {
    let mut outbox = Outbox::new(geometry);
    let (mut taken, mut next, mut latest) = (0_u64, 0_u64, None::<Reserved>);
    for call in calls {
        let before = outbox.clone();
        match *call {
            Call::Reserve { len } => {
                let fits = len <= u64::from(geometry.max_message_bytes());
                let free = taken.count_ones() < u32::from(geometry.slots());
                let reserved = outbox.reserve(len);
                assert_eq!(reserved.is_ok(), fits && free, "{reserved:?}");
                let Ok(reserved) = reserved else {
                    assert_eq!(outbox, before);
                    continue;
                };
                assert!(reserved.slot < geometry.slots() && taken >> reserved.slot & 1 == 0);
                let first = u64::from(reserved.slot) * u64::from(geometry.slot_bytes());
                assert_eq!((reserved.offset, reserved.sequence), (first, next));
                taken |= 1 << reserved.slot;
                next += 1;
                latest = Some(reserved);
            }
            Call::Release { slot } => {
                let possible = slot < geometry.slots() && taken >> slot & 1 == 1;
                assert_eq!(outbox.release(slot).is_ok(), possible);
                if possible {
                    taken &= !(1 << slot);
                } else {
                    assert_eq!(outbox, before);
                }
            }
            Call::Withdraw => {
                let Some(reserved) = latest.take() else { continue };
                // The peer may have given it back, which it must not, and somebody may have it now.
                let possible = taken >> reserved.slot & 1 == 1 && reserved.sequence + 1 == next;
                assert_eq!(outbox.withdraw(reserved).is_ok(), possible);
                if possible {
                    taken &= !(1 << reserved.slot);
                    next -= 1;
                } else {
                    assert_eq!(outbox, before);
                }
            }
            _ => {}
        }
        assert_eq!(outbox.free(), u32::from(geometry.slots()) - taken.count_ones());
    }
}
