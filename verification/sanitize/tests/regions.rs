//! Bytes that go into a region and come out again, to and from memory that ends where they do.

use immwire::TransferEngine;

/// Every length, through heap memory of just that size: one byte too many is outside it.
#[test]
fn regions_are_read_and_written_exactly() {
    let engine = TransferEngine::builder().build().unwrap();
    let region = engine.alloc(4096).unwrap();
    for len in 0..=130_u8 {
        let put: Box<[u8]> = (0..len).map(|at| at ^ len).collect();
        region.write(u64::from(len), &put).unwrap();
        let mut got = vec![0; usize::from(len)].into_boxed_slice();
        region.read(u64::from(len), &mut got).unwrap();
        assert_eq!(got, put);
    }
}
