//! What is there only where memory is of GPUs.

use std::time::Duration;

use immwire_cuda::{Device, PinnedMemory, Stream};

use crate::agent::Ask;
use crate::host::{Host, Own, PATIENCE, Setup};
use crate::operations::write;
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[
    ("after_stream", Spread::Places, after_stream),
    ("refused_copies", Spread::Places, refused_copies),
    ("the_end_waits_for_the_gpu", Spread::Once, the_end_waits_for_the_gpu),
];

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

/// Has the driver refuse the `nth` command from now on; 0: none. Only the stand-in for it can: `false` elsewhere.
fn refuse(nth: u32) -> bool {
    // SAFETY: it is loaded, by us; nothing is loaded by this.
    let driver =
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    assert!(!driver.is_null(), "an engine has loaded the driver");
    // SAFETY: a library's handle, and a name.
    let found = unsafe { libc::dlsym(driver, c"immwire_fake_cuda_refuse".as_ptr()) };
    if found.is_null() {
        return false;
    }
    // SAFETY: the function of that name has this type (`verification/fake-cuda/src/api.rs`).
    let call = unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(u32)>(found) };
    call(nth);
    true
}

/// A copy that the driver does not take, or takes half of, fails alone: it is not counted, and the
/// next one arrives and is.
fn refused_copies(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let (counter, tag) = other.counter(&me);
    if !refuse(0) {
        eprintln!("    only the stand-in for the driver can be made to refuse");
        return;
    }
    let mut halves = 0;
    for (n, bytes) in [64, 64 << 10, 3 << 20].into_iter().enumerate() {
        for nth in [1, 2] {
            let len = usize::try_from(bytes).expect("small");
            let src = me.engine.alloc_gpu(0, len).expect("memory of GPU 0");
            let (there, desc) = other.memory(&me, bytes, Own::Engine);
            let pattern = case.pattern(n as u64);
            pattern.fill(&src, 0, bytes, 0);
            let submit = || write(&me, peer, &src, &desc, (0, 0, bytes), Some(tag));
            // The peer tells where the memory is, first.
            me.done(&submit());
            other.count(&me, counter, 1);
            refuse(nth);
            let end = me.end(&submit());
            refuse(0);
            match end {
                immwire::End::Done => {
                    assert_eq!(nth, 2, "nothing was refused");
                    other.count(&me, counter, 1);
                }
                end => {
                    let immwire::End::Quiesced { error } = end else { panic!("{end:?}") };
                    assert!(error.to_string().contains("error 2"), "{error}");
                    halves += u32::from(nth == 2);
                }
            }
            other.tell(&me, Ask::Poison { region: there, offset: 0, len: bytes, byte: 0xa5 });
            me.done(&submit());
            // No more than that one: the count is exact.
            other.count(&me, counter, 1);
            other.check(&me, there, 0, bytes, pattern);
        }
    }
    assert!(halves > 0, "no copy has two commands");
}

/// An engine is dropped while a GPU has not begun to read: the transfer ends when the GPU is through, not before.
fn the_end_waits_for_the_gpu(case: &Case) {
    use std::sync::atomic::Ordering;
    const BYTES: u64 = 64 << 10;
    let setup = Setup { drain_ms: 20, ..case.setup(case.nics.0) };
    let me = Host::new(&setup);
    let (mut other, address) = case.agent("other");
    let peer = me.peer(&address);
    let src = me.memory(BYTES, Own::Engine);
    let (_, desc) = other.memory(&me, BYTES, Own::Engine);
    me.done(&write(&me, peer, &src, &desc, (0, 0, BYTES), None));
    let device = Device::open(0).expect("GPU 0");
    let word = PinnedMemory::zeroed(&device, 8).expect("pinned");
    let stream = Stream::new(&device).expect("a stream");
    // SAFETY: the word is pinned memory that outlives the wait, which ends below.
    unsafe { stream.after_word(word.address(), 1) }.expect("a wait");
    // SAFETY: a stream of the GPU's primary context.
    unsafe { me.engine.after_stream(0, stream.raw()) }.expect("after_stream");
    let transfer = write(&me, peer, &src, &desc, (0, 0, BYTES), None);
    assert_eq!(me.end_within(&transfer, Duration::from_millis(50)), None);
    let early = std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            // Many times what it drains for.
            let early = transfer.wait(Duration::from_secs(1)).ok();
            word.word(0).expect("a word").store(1, Ordering::Release);
            early
        });
        drop((me, src));
        watching.join().expect("no panic")
    });
    assert_eq!(early, None, "the GPU was still to read");
    assert!(transfer.poll_end().is_some());
}
