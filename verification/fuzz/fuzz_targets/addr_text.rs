//! The text of an address, as people paste it.
#![no_main]

use arbitrary::{Result, Unstructured};
use immwire_core::wire::NetAddr;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match std::str::from_utf8(bytes).map(str::parse::<NetAddr>) {
        // One address has one text.
        Ok(Ok(address)) => assert_eq!(address.to_string().as_bytes(), bytes),
        Ok(Err(error)) => assert!(!error.to_string().is_empty()),
        Err(_) => {}
    }
    let _ = mistyped(&mut Unstructured::new(bytes));
});

/// A text survives, and with one wrong character, or two neighbours swapped, is refused.
fn mistyped(from: &mut Unstructured<'_>) -> Result<()> {
    let at: usize = from.arbitrary()?;
    let wrong = *from.choose(b"abcdefghijklmnopqrstuvwxyz234567:1 A-")?;
    let address = immwire_fuzz::address(from)?;
    let text = address.to_string();
    assert_eq!(text.parse().as_ref(), Ok(&address));
    let mut changed = text.clone().into_bytes();
    let at = at % changed.len();
    changed[at] = wrong;
    let mut swapped = text.clone().into_bytes();
    swapped.swap(at, (at + 1) % text.len().max(1));
    let last = at + 1 == text.len();
    for (other, counts) in [(changed, true), (swapped, !last)] {
        let other = String::from_utf8(other).expect("ASCII");
        if counts && other != text {
            assert!(other.parse::<NetAddr>().is_err(), "{text} and {other}");
        }
    }
    let missing = &text[..text.len() - 1];
    assert!(missing.parse::<NetAddr>().is_err(), "the last character is not needed");
    Ok(())
}
