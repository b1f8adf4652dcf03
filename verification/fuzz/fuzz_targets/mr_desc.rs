//! The bytes of a region's descriptor, and what it then lets through.
#![no_main]

use arbitrary::{Result, Unstructured};
use immwire_core::region::{MrDesc, RegionError};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut from = Unstructured::new(bytes);
    if let Some(there) = immwire_fuzz::frame::<MrDesc>(bytes) {
        for (offset, len) in [(0, there.len), (there.len, 0), (1, there.len), (there.len, 1)] {
            admits(&there, offset, len);
        }
        let _ = any_range(&there, &mut from);
    }
    if let Ok(there) = immwire_fuzz::descriptor(&mut from) {
        let frame = immwire_fuzz::round_trip(&there);
        let _ = any_range(&there, &mut from);
        let _ = immwire_fuzz::damaged::<MrDesc>(frame, &mut from);
    }
});

fn any_range(there: &MrDesc, from: &mut Unstructured<'_>) -> Result<()> {
    admits(there, immwire_fuzz::edge(from)?, immwire_fuzz::edge(from)?);
    Ok(())
}

/// Exactly what lies inside, in numbers that do not wrap.
fn admits(there: &MrDesc, offset: u64, len: u64) {
    let (base, region) = (u128::from(there.base), u128::from(there.len));
    let (first, bytes) = (u128::from(offset), u128::from(len));
    let inside = first + bytes <= region && base + first + bytes <= u128::from(u64::MAX);
    let expected = if !there.rights.remote_write() {
        Err(RegionError::NotWritable)
    } else if inside {
        Ok(there.base + offset)
    } else {
        Err(RegionError::OutOfBounds { offset, len, region_len: there.len })
    };
    assert_eq!(there.range(offset, len), expected);
}
