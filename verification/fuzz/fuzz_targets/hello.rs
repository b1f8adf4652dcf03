//! What each side says on connecting, and why it does not want to.
#![no_main]

use arbitrary::Unstructured;
use immwire_core::receipt::SETTLEMENT_BYTES;
use immwire_core::wire::{Hello, Refusal, Wire};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(hello) = immwire_fuzz::frame::<Hello>(bytes) {
        assert!(agrees(&hello));
    }
    immwire_fuzz::frame::<Refusal>(bytes);
    let mut from = Unstructured::new(bytes);
    if let Ok(refusal) = immwire_fuzz::refusal(&mut from) {
        let frame = immwire_fuzz::round_trip(&refusal);
        let _ = immwire_fuzz::damaged::<Refusal>(frame, &mut from);
    }
    if let Ok(hello) = immwire_fuzz::hello(&mut from) {
        let mut out = [0; Hello::ENCODED_MAX];
        assert_eq!(hello.encode(&mut out).is_ok(), agrees(&hello), "{hello:?}");
        if agrees(&hello) {
            let frame = immwire_fuzz::round_trip(&hello);
            let damaged = immwire_fuzz::damaged::<Hello>(frame, &mut from);
            assert!(damaged.iter().flatten().all(agrees));
        }
    }
});

/// The mailbox is the speaker's own, writable, large enough, and reached by each NIC.
fn agrees(hello: &Hello) -> bool {
    let (mailbox, geometry) = (&hello.mailbox, hello.geometry);
    // The slots, and room for eight answers.
    let slots = u128::from(geometry.slots()) * u128::from(geometry.slot_bytes());
    let needed = slots + 8 * SETTLEMENT_BYTES as u128;
    mailbox.owner == hello.address.engine()
        && usize::from(mailbox.keys.nics()) == hello.address.nics().len()
        && mailbox.rights.remote_write()
        && needed <= u128::from(mailbox.len)
        && u128::from(mailbox.base) + needed <= u128::from(u64::MAX)
}
