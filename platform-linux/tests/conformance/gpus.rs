//! What is there only where memory is of GPUs.

use std::time::Duration;

use immwire_cuda::{Device, PinnedMemory, Stream};

use crate::host::{Own, PATIENCE};
use crate::operations::write;
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[("after_stream", Spread::Places, after_stream)];

/// A write that is to come after what a stream does waits for that, and for nothing else.
fn after_stream(case: &Case) {
    use std::sync::atomic::Ordering;
    const BYTES: u64 = 64 << 10;
    let (me, mut other, peer) = case.pair();
    let src = me.memory(BYTES, Own::Engine);
    let (there, desc) = other.memory(&me, BYTES, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let (early, late) = (case.pattern(1), case.pattern(2));
    early.fill(&src, 0, BYTES, 0);
    me.done(&write(&me, peer, &src, &desc, (0, 0, BYTES), Some(tag)));
    other.count(&me, counter, 1);
    other.check(&me, there, 0, BYTES, early);
    // A stream that does not go on until a word says so.
    let device = Device::open(0).expect("GPU 0");
    let word = PinnedMemory::zeroed(&device, 8).expect("pinned");
    let stream = Stream::new(&device).expect("a stream");
    // SAFETY: the word is pinned memory that outlives the wait, which ends below.
    unsafe { stream.after_word(word.address(), 1) }.expect("a wait");
    // SAFETY: a stream of the GPU's primary context.
    unsafe { me.engine.after_stream(0, stream.raw()) }.expect("after_stream");
    late.fill(&src, 0, BYTES, 0);
    let transfer = write(&me, peer, &src, &desc, (0, 0, BYTES), Some(tag));
    assert_eq!(me.end_within(&transfer, Duration::from_millis(200)), None);
    other.check(&me, there, 0, BYTES, early);
    word.word(0).expect("a word").store(1, Ordering::Release);
    assert_eq!(me.end_within(&transfer, PATIENCE), Some(immwire::End::Done));
    other.count(&me, counter, 1);
    other.check(&me, there, 0, BYTES, late);
}
