//! The bytes of an address.
#![no_main]

use arbitrary::Unstructured;
use immwire_core::wire::{NIC_ADDRESS_MAX, NetAddr};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    immwire_fuzz::frame::<NetAddr>(bytes).iter().for_each(check);
    let mut from = Unstructured::new(bytes);
    if let Ok(address) = immwire_fuzz::address(&mut from) {
        let frame = immwire_fuzz::round_trip(&address);
        let damaged = immwire_fuzz::damaged::<NetAddr>(frame, &mut from);
        damaged.iter().flatten().for_each(check);
    }
});

fn check(address: &NetAddr) {
    assert!((1..=8).contains(&address.nics().len()));
    assert!(address.nics().iter().all(|nic| nic.address.len() <= NIC_ADDRESS_MAX));
    assert_eq!(address.to_string().parse().as_ref(), Ok(address));
}
