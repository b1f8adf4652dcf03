//! The messages on a session's socket.
#![no_main]

use arbitrary::{Result, Unstructured};
use immwire::shm::fuzzing::{Parts, recode};
use libfuzzer_sys::fuzz_target;

/// The longest message.
const MESSAGE_MAX: usize = 4096;

fuzz_target!(|bytes: &[u8]| {
    if let Some(same) = recode(bytes) {
        // A refusal is understood from every version; what it is encoded to is of ours.
        let refusal = bytes[6..8] == [5, 0];
        let version = if refusal { 4..6 } else { 0..0 };
        let other = |at: &usize| !version.contains(at);
        assert_eq!(same.len(), bytes.len());
        assert!((0..bytes.len()).filter(other).all(|at| same[at] == bytes[at]));
        assert!(bytes.len() <= MESSAGE_MAX);
    }
    let _ = made(&mut Unstructured::new(bytes));
});

fn made(from: &mut Unstructured<'_>) -> Result<()> {
    let kind: u8 = from.arbitrary()?;
    let parts = Parts {
        bytes: from.arbitrary()?,
        target: from.arbitrary()?,
        word: from.arbitrary()?,
        base: from.arbitrary()?,
        len: from.arbitrary()?,
        nics: (from.int_in_range(1..=8)?, from.int_in_range(1..=8)?),
        refusal: Some(immwire_fuzz::refusal(from)?),
        hello: {
            let len = from.int_in_range(0..=5000)?;
            vec![from.arbitrary()?; len]
        },
    };
    // Head, proof, address and NICs come before a hello.
    let fits = parts.hello.len() + 8 + 32 + 8 + 2 <= MESSAGE_MAX;
    match parts.encode(kind) {
        Some((bytes, same)) => {
            assert!(same, "kind {kind} decodes to something else");
            assert_eq!(recode(&bytes).as_deref(), Some(&bytes[..]));
        }
        None => assert!(!fits, "kind {kind} was not encoded"),
    }
    Ok(())
}
