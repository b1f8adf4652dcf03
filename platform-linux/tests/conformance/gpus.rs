//! What is there only where memory is of GPUs.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::num::{NonZeroU32, NonZeroU64};
use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use immwire::core::group;
use immwire::core::wire::Wire;
use immwire::provider::NicInfo;
use immwire::topology::{Pairing, Table};
use immwire::{
    AccessError, CloseError, CountError, End, FlagPlace, GpuFlag, ImmCounter, MrDesc, PagedWrite,
    Pages, PeerId, PeerState, Place, RegisterError, Rights, ScatterWrite, SingleWrite, StreamWait,
    StreamWaitError, Target, TransferEngine, TransferError, UvmWatcher,
};
use immwire_cuda::geometry::{Method, Tuning};
use immwire_cuda::{
    ALLOCATIONS_MAX, Copier, Device, DeviceMemory, Error, PagedCopy, Pinned, PinnedMemory, Release,
    Seen, Stream, Visibility,
};

use crate::agent::{Agent, Ask, Say, Write1, encode, plain};
use crate::host::{Host, Lent, Own, Setup, first_other, names, patience, poison};
use crate::lacks::without_descriptors;
use crate::operations::{only_peer, write};
use crate::segment::{
    PART, Part, Segment, driver_s, go_on, held_up, kept, pin, stick, unpin, until_kept_waiting,
};
use crate::stalls::Stalls;
use crate::{Case, Provider, Random, Spread, Test};

pub const TESTS: &[Test] = &[
    ("after_stream", Spread::Places, after_stream),
    ("after_stream_short", Spread::Places, after_stream_short),
    ("host_memory_of_several", Spread::Processes, host_memory_of_several),
    ("host_memory_of_the_driver", Spread::Processes, host_memory_of_the_driver),
    ("host_memory_pinned_in_part", Spread::Processes, host_memory_pinned_in_part),
    ("late_copies_of_the_host", Spread::Once, late_copies_of_the_host),
    ("late_zeroes", Spread::Once, late_zeroes),
    ("regions_that_adjoin", Spread::Processes, regions_that_adjoin),
    ("streams_wait_for_counts", Spread::Places, streams_wait_for_counts),
    ("waits_of_streams_end", Spread::ProcessesBothMotors, waits_of_streams_end),
    ("watched_words", Spread::Once, watched_words),
    ("watchers_come_and_go", Spread::Once, watchers_come_and_go),
    ("flags_reach_their_gpu", Spread::Once, flags_reach_their_gpu),
    ("flags_go_while_it_is_busy", Spread::Once, flags_go_while_it_is_busy),
    ("flags_follow_counters", Spread::ProcessesBothMotors, flags_follow_counters),
    ("captures_of_graphs", Spread::ProcessesBothMotors, captures_of_graphs),
    ("several_allocations", Spread::Places, several_allocations),
    ("three_hundred_allocations", Spread::Processes, three_hundred_allocations),
    ("joined_while_the_driver_waits", Spread::ProcessesBothMotors, joined_while_the_driver_waits),
];

/// A GPU finds in a flag what was stored there, and the next one who has it finds zero. By GDRCopy, if that is there.
fn flags_reach_their_gpu(case: &Case) {
    let me = case.me();
    let device = Device::open(0).expect("GPU 0");
    let stream = Stream::new(&device).expect("a stream");
    let copier = Copier::new(&stream, Tuning::default()).expect("a copier");
    let seen = PinnedMemory::zeroed(&device, 16).expect("pinned");
    let [value, done] = [0, 8].map(|at| seen.word(at).expect("a word"));
    let mut rounds = 0;
    // What kernels find where the flag is.
    let mut look = |address| {
        rounds += 1;
        let copy = PagedCopy::contiguous(address, seen.address(), 8);
        let release = Release::Store { word: seen.address() + 8, value: rounds };
        // SAFETY: both words are there until the copy is done, which is waited for; nobody else uses the second.
        unsafe { copier.submit(&copy, release, Method::Auto, NonZeroU32::MIN) }.expect("submit");
        let there = || (done.load(Ordering::Acquire) == rounds).then_some(());
        me.until(patience(), there).expect("a copy");
        value.load(Ordering::Acquire)
    };
    let flags: Vec<_> = (0..3).map(|_| me.engine.alloc_gpu_flag(0).expect("a flag")).collect();
    let by_gdrcopy = std::env::var_os("IMMWIRE_GDRAPI").is_some();
    for flag in &flags {
        match flag.place() {
            FlagPlace::Gpu => assert!(by_gdrcopy),
            FlagPlace::Host { why } => assert!(!by_gdrcopy && why.contains("libgdrapi"), "{why}"),
        }
        assert!(flag.address().is_multiple_of(8) && look(flag.address()) == 0);
    }
    for number in [1, 7, u64::MAX, 0, 3] {
        for (n, flag) in (0..).zip(&flags) {
            flag.set(number ^ n);
        }
        for (n, flag) in (0..).zip(&flags) {
            assert_eq!((flag.value(), look(flag.address())), (number ^ n, number ^ n));
        }
    }
    // A stream waits for one.
    let held = &flags[1];
    held.set(0);
    // SAFETY: the flag outlives the wait, which ends below.
    unsafe { stream.after_word(held.address(), 5) }.expect("a wait");
    me.linger(Duration::from_millis(5));
    assert!(!stream.is_done().expect("no error"));
    held.set(5);
    passes(&me, &stream);
    let places: Vec<_> = flags.iter().map(GpuFlag::address).collect();
    flags.iter().for_each(|flag| flag.set(9));
    drop(flags);
    let next = me.engine.alloc_gpu_flag(0).expect("a flag");
    assert!(places.contains(&next.address()) && look(next.address()) == 0 && next.value() == 0);
    assert!(matches!(me.engine.alloc_gpu_flag(99), Err(RegisterError::NoGpu { ordinal: 99 })));
    // It may outlive its engine.
    drop(me);
    next.set(1);
}

/// An engine goes while its GPU does not come to an end, and takes its flags with it: nobody waits for the GPU.
fn flags_go_while_it_is_busy(case: &Case) {
    let (me, later) = (case.me(), case.me());
    let [flag, held] = [&me, &later].map(|it| it.engine.alloc_gpu_flag(0).expect("a flag"));
    let stream = Stream::new(&Device::open(0).expect("GPU 0")).expect("a stream");
    // SAFETY: the flag outlives the wait, which ends below.
    unsafe { stream.after_word(held.address(), 5) }.expect("a wait");
    goes_within(GIVES_UP_WITHIN, || held.set(5), move || drop((flag, me)));
    assert!(!stream.is_done().expect("no error"));
    held.set(5);
    passes(&later, &stream);
}

/// Where GPUs copy.
pub const COPYING: &[Test] = &[
    ("refused_copies", Spread::Places, refused_copies),
    ("refused_among_others", Spread::Places, refused_among_others),
    ("short_writes", Spread::Places, short_writes),
    ("stuck", Spread::ProcessesBothMotors, stuck),
    ("closed_beside_another", Spread::ProcessesBothMotors, closed_beside_another),
    ("all_shapes_at_once", Spread::ProcessesBothMotors, all_shapes_at_once),
    (
        "taken_back_while_the_gpu_is_busy",
        Spread::ProcessesBothMotors,
        taken_back_while_the_gpu_is_busy,
    ),
    (
        "beside_an_engine_that_waits_for_the_gpu",
        Spread::ProcessesBothMotors,
        beside_an_engine_that_waits_for_the_gpu,
    ),
    ("closed_while_the_gpu_is_busy", Spread::Once, closed_while_the_gpu_is_busy),
    (
        "closed_after_its_engine_while_the_gpu_is_busy",
        Spread::Once,
        closed_after_its_engine_while_the_gpu_is_busy,
    ),
    ("opened_while_the_gpu_is_busy", Spread::ProcessesBothMotors, opened_while_the_gpu_is_busy),
    ("dropped_beside_one_that_waits", Spread::Once, dropped_beside_one_that_waits),
    ("each_with_a_gpu_of_its_own", Spread::Once, each_with_a_gpu_of_its_own),
    (
        "first_write_to_host_memory_while_the_gpu_is_busy",
        Spread::ProcessesBothMotors,
        first_write_to_host_memory_while_the_gpu_is_busy,
    ),
    ("host_memory_in_parts", Spread::Processes, host_memory_in_parts),
    ("host_memory_after_its_engine", Spread::ProcessesBothMotors, host_memory_after_its_engine),
    ("pages_that_were_let_go_of", Spread::Once, pages_that_were_let_go_of),
    ("host_memory_that_is_left_behind", Spread::Once, host_memory_that_is_left_behind),
    ("the_end_waits_for_the_gpu", Spread::Once, the_end_waits_for_the_gpu),
    ("what_is_not_one_range", Spread::Once, what_is_not_one_range),
    (
        "more_allocations_than_a_region_may_have",
        Spread::Once,
        more_allocations_than_a_region_may_have,
    ),
    ("freed_while_it_is_opened", Spread::ProcessesBothMotors, freed_while_it_is_opened),
    ("no_file_for_an_allocation", Spread::Once, no_file_for_an_allocation),
    ("memory_of_one_process_alone", Spread::Processes, memory_of_one_process_alone),
];

/// The last GPU's number: another than the first, if there are two.
fn last_gpu() -> u32 {
    Device::count().expect("GPUs") - 1
}

/// Memory of the agent's over so many allocations of the last GPU, but for some bytes at both ends.
fn segment(me: &Host, other: &mut Agent, parts: usize) -> (usize, MrDesc, u64) {
    let bytes = PART * parts as u64 - AROUND.0 - AROUND.1;
    let ask = Ask::Segment { ordinal: last_gpu(), parts, offset: AROUND.0, bytes };
    match other.ask(me, ask) {
        Say::Region { at, desc } => (at, MrDesc::decode(&desc).expect("a descriptor"), bytes),
        other => panic!("{other:?}"),
    }
}

/// What of a segment lies before a region and behind it.
const AROUND: (u64, u64) = (4160, 12_352);

/// Has the agent give it back; all that was taken for it goes, here too.
fn free(me: &Host, other: &mut Agent, region: usize, before: [Option<u64>; 2]) {
    let ms = u64::try_from(patience().as_millis()).expect("small");
    other.tell(me, Ask::Free { region, ms });
    let all_gone = || {
        let theirs = other.number(me, Ask::Kept);
        (kept() == before[0] && Some(theirs) == before[1]).then_some(())
    };
    let gone = me.until(patience(), all_gone);
    assert!(gone.is_some(), "{before:?} before, now {:?}, {}", kept(), other.number(me, Ask::Kept));
}

/// Ranges that begin and end in one allocation, and go over the border of two, or over all; pages that do; from them and to them.
/// Each byte arrives, and no other is written. Nothing is left when they are given back.
fn several_allocations(case: &Case) {
    const NEAR: u64 = 150_000;
    const PAGE: u64 = 64 << 10;
    let (me, mut other, peer) = case.pair();
    let theirs = plain(other.peer(&me, me.engine.address()));
    let (counter, tag) = other.counter(&me);
    let back = me.engine.counter().expect("a counter");
    // With one message, with two, with three.
    for (n, parts) in (0..).zip([2, 3, 16, 17, 40]) {
        let before = [kept(), Some(other.number(&me, Ask::Kept))];
        let (there, desc, bytes) = segment(&me, &mut other, parts);
        let src = me.segment(0, 3, AROUND.0, 3 * PART - AROUND.0 - AROUND.1);
        assert_eq!(src.place(), Place::Gpu(0));
        let pattern = case.pattern(n);
        pattern.fill(&src, 0, src.len(), 0);
        // Where the region has borders of allocations.
        let border = |n: u64| n * PART - AROUND.0;
        let last = parts as u64 - 1;
        let mut borders = vec![1, last / 2, last];
        borders.retain(|n| *n > 0);
        borders.dedup();
        for (at, odd) in borders.iter().flat_map(|n| [(border(*n), 0), (border(*n), 4097)]) {
            let (from, len) = (at - NEAR + odd, 2 * NEAR);
            // The source has a border in the middle, too.
            let src_offset = border(1) - NEAR - odd;
            let around = [(from - 4096, 4096), (from + len, 4096)];
            let (first, whole) = (from - 4096, len + 8192);
            other.tell(&me, Ask::Poison { region: there, offset: first, len: whole, byte: 0xa5 });
            me.done(&write(&me, peer, &src, &desc, (src_offset, from, len), Some(tag)));
            other.count(&me, counter, 1);
            let (region, offset, at) = (there, from, src_offset);
            let wrong = other.place(&me, Ask::Mismatch { region, offset, len, pattern, at });
            assert_eq!(wrong, None, "byte of {len} at {from}, over {parts} allocations");
            for (offset, len) in around {
                other.check_only(&me, there, offset, len, 0xa5);
            }
        }
        // Both ends, and one byte more.
        for (from, len) in [(0, 1), (bytes - 1, 1), (0, 4096), (bytes - 4096, 4096)] {
            me.done(&write(&me, peer, &src, &desc, (7, from, len), Some(tag)));
            other.count(&me, counter, 1);
            let (region, offset, at) = (there, from, 7);
            assert_eq!(other.place(&me, Ask::Mismatch { region, offset, len, pattern, at }), None);
        }
        // Pages, some of which go over a border.
        let pages = u32::try_from(src.len() / PAGE).expect("few");
        let places = u32::try_from(bytes / PAGE).expect("few");
        let target = |page: u32| (page * 13 + places / 2) % places;
        let count = pages.min(places);
        let list = |indices: Vec<u32>| Pages { indices: indices.into(), stride: PAGE, offset: 0 };
        if places % 13 != 0 {
            let paged = PagedWrite {
                peer,
                page_bytes: PAGE,
                src: &src,
                src_pages: list((0..count).collect()),
                dst: &desc,
                dst_pages: list((0..count).map(target).collect()),
                imm: Some(tag),
            };
            me.done(&me.engine.submit_paged_writes(&paged).expect("submit"));
            other.count(&me, counter, u64::from(count));
            for page in 0..count {
                let (region, at) = (there, u64::from(page) * PAGE);
                let (offset, len) = (u64::from(target(page)) * PAGE, PAGE);
                let wrong = other.place(&me, Ask::Mismatch { region, offset, len, pattern, at });
                assert_eq!(wrong, None, "page {page} of {count}, over {parts} allocations");
            }
        }
        // From there, over every border of ours.
        let (offset, len) = (border(last) - NEAR, 2 * NEAR);
        let fresh = case.pattern(100 + n);
        other.tell(&me, Ask::Fill { region: there, offset, len, pattern: fresh, at: 0 });
        for at in [border(1), border(2)] {
            poison(&src, at - NEAR - 64, len + 128, 0x5a);
            let tag = Some(back.tag().bits());
            let (dst, dst_offset) = (encode(&src.desc()), at - NEAR);
            other.post(Ask::Write(Write1 {
                peer: theirs,
                src: there,
                src_offset: offset,
                dst,
                dst_offset,
                len,
                tag,
            }));
            me.count(&back, 1, patience()).expect("it arrives");
            assert_eq!(other.answer(Some(&me)), Say::Text("Done".into()));
            assert_eq!(fresh.mismatch(&src, dst_offset, len, 0), None, "at {dst_offset}");
            assert_eq!(first_other(&src, dst_offset - 64, 64, 0x5a), None);
            assert_eq!(first_other(&src, dst_offset + len, 64, 0x5a), None);
        }
        me.free(src, patience()).expect("nobody writes");
        free(&me, &mut other, there, before);
    }
    // Within one, from there and to there, that has neighbours on both sides.
    let before = [kept(), Some(other.number(&me, Ask::Kept))];
    let (offset, len) = (PART + AROUND.0, PART - AROUND.0 - AROUND.1);
    let ask = Ask::Segment { ordinal: last_gpu(), parts: 3, offset, bytes: len };
    let Say::Region { at: there, desc } = other.ask(&me, ask) else { panic!("no region") };
    let desc = MrDesc::decode(&desc).expect("a descriptor");
    let src = me.segment(0, 3, offset, len);
    let pattern = case.pattern(200);
    pattern.fill(&src, 0, len, 0);
    me.done(&write(&me, peer, &src, &desc, (0, 0, len), Some(tag)));
    other.count(&me, counter, 1);
    let (region, offset, at) = (there, 0, 0);
    assert_eq!(other.place(&me, Ask::Mismatch { region, offset, len, pattern, at }), None);
    me.free(src, patience()).expect("nobody writes");
    free(&me, &mut other, there, before);
}

/// As many as a large tensor has.
fn three_hundred_allocations(case: &Case) {
    const PARTS: u64 = 300;
    let (me, mut other, peer) = case.pair();
    let (counter, tag) = other.counter(&me);
    let before = [kept(), Some(other.number(&me, Ask::Kept))];
    let (there, desc, bytes) = segment(&me, &mut other, 300);
    let src = me.engine.alloc_gpu(0, 8192).expect("memory");
    let pattern = case.pattern(1);
    pattern.fill(&src, 0, 8192, 0);
    // A page behind each border, then a range over each.
    let borders = 1..u32::try_from(PARTS).expect("few");
    let paged = PagedWrite {
        peer,
        page_bytes: 8192,
        src: &src,
        src_pages: Pages { indices: vec![0; borders.len()].into(), stride: 8192, offset: 0 },
        dst: &desc,
        dst_pages: Pages {
            indices: borders.clone().collect::<Vec<_>>().into(),
            stride: PART,
            offset: 0,
        },
        imm: Some(tag),
    };
    me.done(&me.engine.submit_paged_writes(&paged).expect("submit"));
    other.count(&me, counter, PARTS - 1);
    let len = 8192;
    for border in borders.map(u64::from) {
        let (region, offset, at) = (there, border * PART, 0);
        let wrong = other.place(&me, Ask::Mismatch { region, offset, len, pattern, at });
        assert_eq!(wrong, None, "behind border {border}");
        let at = border * PART - AROUND.0;
        me.done(&write(&me, peer, &src, &desc, (0, at - 4096, len), None));
    }
    for border in (1..PARTS).rev() {
        let (region, offset, at) = (there, border * PART - AROUND.0 - 4096, 0);
        let wrong = other.place(&me, Ask::Mismatch { region, offset, len, pattern, at });
        assert_eq!(wrong, None, "over border {border} of {bytes} bytes");
    }
    drop(src);
    // The engine's own memory is taken by hand, too, and goes when nobody uses it.
    free(&me, &mut other, there, before);
}

/// Ranges that are not one in other processes are refused, with what is wrong, where, and what to do.
fn what_is_not_one_range(case: &Case) {
    let me = case.me();
    let far = last_gpu();
    assert_ne!(far, 0, "two GPUs are needed");
    let before = kept();
    let register = |ptr, bytes: u64| {
        let bytes = usize::try_from(bytes).expect("64-bit");
        // SAFETY: nobody is told of it, and it is closed before it is freed.
        unsafe { me.engine.register(ptr, bytes, Rights::REMOTE_WRITE) }
    };
    let refused = |parts: &[Part], offset: u64, bytes: u64| {
        let segment = Segment::of(parts);
        let RegisterError::Gpu(why) = register(segment.ptr(offset), bytes).expect_err("no range")
        else {
            panic!("another reason")
        };
        println!("{why}");
        let first = segment.ptr(0).addr().get() as u64;
        segment.free();
        (why, first)
    };
    let (near, far) = (Part::Of(0), Part::Of(far));
    let (why, at) = refused(&[near, Part::Hole, near], 4096, 2 * PART);
    let (address, before_it, bytes) = (at + PART, PART - 4096, 2 * PART);
    let hole = |other| Error::Hole { address, before: before_it, bytes, ordinal: 0, other };
    assert_eq!(why, hole(None));
    let (why, at) = refused(&[near, far, near], 4096, 2 * PART);
    let address = at + PART;
    let other = Some(last_gpu());
    assert_eq!(why, Error::Hole { address, before: before_it, bytes, ordinal: 0, other });
    let (why, at) = refused(&[near, near, Part::Private(0), near], 0, 4 * PART);
    assert_eq!(why, Error::NotShareable { address: at + 2 * PART });
    // Past the end.
    let (why, at) = refused(&[near, near], PART, PART + 1);
    let (address, before_it, bytes) = (at + 2 * PART, PART, PART + 1);
    assert_eq!(why, Error::Hole { address, before: before_it, bytes, ordinal: 0, other: None });
    // By chance one allocation of cuMemAlloc begins where another ends.
    let behind: Option<extern "C" fn(u64, u64) -> u64> =
        driver_s(c"immwire_fake_cuda_alloc_behind");
    if let Some(behind) = behind {
        let device = Device::open(0).expect("GPU 0");
        let stream = Stream::new(&device).expect("a stream");
        let memory =
            std::mem::ManuallyDrop::new(DeviceMemory::zeroed(&stream, 8192).expect("some"));
        let mut next = 0;
        Captured::within(&stream, || {
            next = behind(memory.address(), 4096);
            0
        });
        assert_eq!(next, memory.address() + 8192);
        let ptr = |at: u64| NonNull::new(at as *mut u8).expect("an address");
        let why = register(ptr(next - 4096), 8192).expect_err("two");
        let separate = Error::Separate { address: memory.address(), allocations: 2 };
        assert!(matches!(why, RegisterError::Gpu(why) if why == separate), "{why:?}");
        for at in [next - 4096, next] {
            me.close(register(ptr(at), 4096).expect("one"), patience()).expect("nobody writes");
        }
    }
    me.until(patience(), || (kept() == before).then_some(())).expect("it is all given back");
}

/// One more than a region may lie over: its parts may.
fn more_allocations_than_a_region_may_have(case: &Case) {
    let me = case.me();
    let before = kept();
    let register = |ptr, bytes: u64| {
        let bytes = usize::try_from(bytes).expect("64-bit");
        // SAFETY: nobody is told of it, and it is closed before it is freed.
        unsafe { me.engine.register(ptr, bytes, Rights::REMOTE_WRITE) }
    };
    let most = usize::try_from(ALLOCATIONS_MAX).expect("64-bit");
    let mut parts = vec![Part::Again; most + 1];
    parts[0] = Part::Of(0);
    let segment = Segment::of(&parts);
    let whole = PART * (most as u64 + 1);
    let why = register(segment.ptr(0), whole).expect_err("too many");
    let count = ALLOCATIONS_MAX + 1;
    assert!(
        matches!(why, RegisterError::Gpu(Error::TooManyAllocations { count: said, most: ALLOCATIONS_MAX }) if said == count),
        "{why:?}"
    );
    for (offset, bytes) in [(0, whole - PART), (whole - PART, PART)] {
        let region = register(segment.ptr(offset), bytes).expect("a part of it");
        me.close(region, patience()).expect("nobody writes");
    }
    segment.free();
    me.until(patience(), || (kept() == before).then_some(())).expect("it is all given back");
}

/// Memory is given back while a peer's GPUs are mapping one part of it after the other: the write ends, and nothing is left.
fn freed_while_it_is_opened(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let src = me.engine.alloc_gpu(0, 8192).expect("memory");
    let (_, near) = other.memory(&me, 8192, Own::Engine);
    me.done(&write(&me, peer, &src, &near, (0, 0, 8192), None));
    let before = [kept(), Some(other.number(&me, Ask::Kept))];
    let (mut done, mut refused) = (0, 0);
    let start = Instant::now();
    for round in 0.. {
        if round >= 24 && refused > 0 {
            break;
        }
        let in_time = round < 24 || start.elapsed() < patience();
        assert!(in_time, "nothing of {done} was taken back in time");
        let (there, desc, bytes) = segment(&me, &mut other, 40);
        let transfer = write(&me, peer, &src, &desc, (0, bytes - 8192, 8192), None);
        me.linger(Duration::from_micros(round % 24 * 100));
        free(&me, &mut other, there, before);
        match me.end(&transfer) {
            End::Done => done += 1,
            End::Quiesced { error } | End::NeverStarted { error } => {
                assert!(names(End::Quiesced { error }, peer), "{error}");
                refused += 1;
            }
        }
    }
    println!("{done} were done, {refused} refused");
    assert_eq!(me.stands(peer), Some(PeerState::Up));
}

/// The process has no more files when memory of a GPU is to be handed over, which takes one for each allocation: that is not said to be the
/// memory's fault, which can be registered when there are.
fn no_file_for_an_allocation(case: &Case) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::os::fd::AsRawFd;
    let me = case.me();
    for parts in 1..3 {
        let segment = Segment::new(0, parts);
        let len = parts * usize::try_from(PART).expect("small");
        // SAFETY: freed below, when nobody uses it.
        let register = || unsafe { me.engine.register(segment.ptr(0), len, Rights::REMOTE_WRITE) };
        let before = getrlimit(Resource::Nofile);
        let next = std::fs::File::open("/dev/null").expect("a file").as_raw_fd();
        let most = u64::try_from(next).expect("a number");
        setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..before }).expect("less");
        let refused = register();
        setrlimit(Resource::Nofile, before).expect("as before");
        let Err(RegisterError::Gpu(why @ Error::Driver { .. })) = refused else {
            panic!("{:?}", refused.err());
        };
        assert!(why.to_string().contains("ulimit -n"), "{why}");
        me.close(register().expect("register"), patience()).expect("closed");
        segment.free();
    }
}

/// Memory that the driver hands to no other process, by itself and among other, is registered if peers do not write there, and written
/// from. It takes no descriptor, nor does other memory then. What peers are to write to is refused.
fn memory_of_one_process_alone(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let (counter, tag) = other.counter(&me);
    let (shareable, private) = (Part::Of(0), Part::Private(0));
    let kinds = [&[private][..], &[shareable], &[shareable, private, shareable]];
    for (n, parts) in (0..).zip(kinds) {
        let segment = Segment::of(parts);
        let bytes = PART * parts.len() as u64;
        let len = usize::try_from(bytes).expect("small");
        // SAFETY: freed below, when nobody uses it.
        let register = |rights| unsafe { me.engine.register(segment.ptr(0), len, rights) };
        if parts.contains(&private) {
            let why = register(Rights::REMOTE_WRITE).expect_err("nobody else gets at it");
            assert!(matches!(why, RegisterError::Gpu(Error::NotShareable { .. })), "{why:?}");
        }
        let src = without_descriptors(|| register(Rights::LOCAL)).expect("register");
        assert_eq!(src.place(), Place::Gpu(0));
        let (there, desc) = other.memory(&me, bytes, Own::Engine);
        let pattern = case.pattern(n);
        pattern.fill(&src, 0, bytes, 0);
        me.done(&write(&me, peer, &src, &desc, (0, 0, bytes), Some(tag)));
        other.count(&me, counter, 1);
        other.check(&me, there, 0, bytes, pattern);
        me.close(src, patience()).expect("nobody writes");
        segment.free();
    }
}

/// Where NICs read and write.
pub const BY_NICS: &[Test] = &[
    ("any_part_of_a_gpu_s_memory", Spread::Places, any_part_of_a_gpu_s_memory),
    ("a_later_stream_holds_nothing_earlier", Spread::Places, a_later_stream_holds_nothing_earlier),
];

/// Among more than two, none of which is near another: what GPUs copy themselves waits in their queues.
pub const ALL_BY_NICS: &[Test] = &[
    ("a_stream_holds_nothing_else", Spread::Places, a_stream_holds_nothing_else),
    ("what_is_held_ends", Spread::ProcessesBothMotors, what_is_held_ends),
];

/// By NICs that reach their memory.
pub const THEMSELVES: &[Test] = &[
    ("counts_come_after_a_flush", Spread::Processes, counts_come_after_a_flush),
    ("gpus_have_their_nics", Spread::Once, gpus_have_their_nics),
];

/// An engine takes the NICs that are nearest to its GPUs, of those that it can use, or those that somebody says; in turn, if
/// they are fewer than it is to have; all that there are if nobody knows.
fn gpus_have_their_nics(case: &Case) {
    let take = |gpus: &[u32], nics, table: &str, overrides: &str| {
        let pairing = Pairing {
            table: Some(Table::from_text(table).expect("a table")),
            overrides: overrides.into(),
        };
        let builder = (Provider::named(case.provider).builder)(&case.setup(nics));
        let built = builder.nics(nics).gpus(gpus).pairing(pairing).build_polled();
        let (engine, _driver) = built.map_err(|error| error.to_string())?;
        // libfabric's have its provider before, and a kind of endpoint behind.
        let name = |nic: &NicInfo| nic.name.replace("efa:", "").replace("-rdm", "");
        let names = engine.nics().iter().map(name);
        Ok::<Vec<_>, String>(names.filter(|name| !name.starts_with("shm")).collect())
    };
    let gpu = |ordinal| Device::open(ordinal).expect("a GPU").pci_address().expect("its address");
    let gpus = [gpu(0), gpu(1)];
    assert_ne!(gpus[0], gpus[1], "two GPUs are needed");
    let all = take(&[1, 0], 2, "# nothing is known", "").expect("an engine");
    let [a, b] = all.as_slice() else { panic!("{all:?}") };
    assert_ne!(a, b, "two devices are needed");

    // One that cannot be used is the nearest, under a switch with GPU 0.
    let mut table =
        "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0 rdma=nobody0 mbit=400000\n".to_owned();
    for (number, (gpu, nic)) in gpus.iter().zip([b, a]).enumerate() {
        let root = format!("pci0000:0{number}/0000:0{number}:01.0");
        let switch = if number == 0 { "/0000:01:00.0" } else { "" };
        let address = gpu.to_ascii_lowercase();
        table += &format!("{root}{switch}/{address} vendor=10de class=030200\n");
        table += &format!("{root}/0000:a{number}:00.0 rdma={nic} mbit=200000\n");
    }
    for (gpus, nics, overrides, expected) in [
        (&[0][..], 1, "", &[b][..]),
        (&[1], 1, "", &[a]),
        (&[0], 3, "", &[b, b, b]),
        (&[0, 1], 2, "", &[b, a]),
        (&[1, 0], 3, "", &[a, b, a]),
        (&[0], 2, &format!("gpu0={a},{b}"), &[a, b]),
        (&[1, 0], 2, &format!("gpu0={a}"), &[a, a]),
        (&[1], 2, &format!("gpu0={a}"), &[a, a]),
    ] {
        let taken = take(gpus, nics, &table, overrides).expect("an engine");
        assert_eq!(
            taken.iter().collect::<Vec<_>>(),
            expected,
            "GPUs {gpus:?}, {overrides:?}\n{table}"
        );
    }
    let one_of_two = format!("gpu0={a},nobody0");
    for (overrides, said) in [
        (&*one_of_two, "nobody0"),
        ("gpu0=nobody1", "column 6: no such NIC"),
        ("gpu0=nobody0", "nobody0"),
        ("gpu7=x", "column 1"),
    ] {
        let refused = take(&[0], 1, &table, overrides).expect_err("it is not there");
        assert!(refused.contains(said), "{refused}");
    }
}

/// A stream of GPU 0 that goes on when a word has a number.
struct Gated {
    stream: Stream,
    /// Never given back: that would wait for other gated streams.
    word: ManuallyDrop<PinnedMemory>,
}

impl Gated {
    fn new() -> Self {
        let device = Device::open(0).expect("GPU 0");
        let word = PinnedMemory::zeroed(&device, 8).expect("pinned");
        Self { stream: Stream::new(&device).expect("a stream"), word: ManuallyDrop::new(word) }
    }

    /// Has the stream wait for the number, and the engine for the stream.
    fn hold(&self, me: &Host, number: u64) {
        // SAFETY: the word is pinned memory that outlives the wait, which each test ends.
        unsafe { self.stream.after_word(self.word.address(), number) }.expect("a wait");
        // SAFETY: a stream of the GPU's primary context.
        unsafe { me.engine.after_stream(0, self.stream.raw()) }.expect("after_stream");
    }

    fn open(&self, number: u64) {
        self.word.word(0).expect("a word").store(number, Ordering::Release);
    }
}

impl Drop for Gated {
    /// Whoever gives something of CUDA's back waits for all streams: a test that fails is to end.
    fn drop(&mut self) {
        self.open(u64::MAX >> 1);
    }
}

/// What a stream waits for may be what was submitted before the engine was told to wait for that stream.
fn a_later_stream_holds_nothing_earlier(case: &Case) {
    const BYTES: u64 = 300_000;
    let len = usize::try_from(BYTES).expect("small");
    let (me, mut other, peer) = case.pair();
    let (there, desc) = other.memory(&me, 2 * BYTES, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let [first, second] = [(); 2].map(|()| me.engine.alloc_gpu(0, len).expect("memory"));
    let (one, two) = (case.pattern(1), case.pattern(2));
    let gated = [Gated::new(), Gated::new()];
    for round in 1..4 {
        other.tell(&me, Ask::Poison { region: there, offset: 0, len: 2 * BYTES, byte: 0xa5 });
        gated[0].hold(&me, round);
        let early = write(&me, peer, &first, &desc, (0, 0, BYTES), Some(tag));
        gated[1].hold(&me, round);
        let late = write(&me, peer, &second, &desc, (0, BYTES, BYTES), Some(tag));
        assert_eq!(me.end_within(&early, Duration::from_millis(20)), None);
        one.fill(&first, 0, BYTES, 0);
        gated[0].open(round);
        me.done(&early);
        other.count(&me, counter, 1);
        other.check(&me, there, 0, BYTES, one);
        assert_eq!(me.end_within(&late, Duration::from_millis(20)), None);
        other.check_only(&me, there, BYTES, BYTES, 0xa5);
        two.fill(&second, 0, BYTES, 0);
        gated[1].open(round);
        me.done(&late);
        other.count(&me, counter, 1);
        other.check(&me, there, BYTES, BYTES, two);
    }
}

/// Cancelled, at its deadline, or with its peer; and nothing else with it.
fn what_is_held_ends(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let (mut third, address) = case.agent("third");
    let doomed = me.peer(&address);
    let (there, desc) = other.memory(&me, 8192, Own::Engine);
    let (_, of_third) = third.memory(&me, 8192, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let src = me.engine.alloc_gpu(0, 8192).expect("memory");
    let pattern = case.pattern(1);
    pattern.fill(&src, 0, 8192, 0);
    other.tell(&me, Ask::Poison { region: there, offset: 0, len: 8192, byte: 0xa5 });
    let gated = Gated::new();
    gated.hold(&me, 1);
    // Whoever polls posts such a write at once, if he may.
    let submit = |peer, dst| {
        let (src, dst_offset, len, imm) = (&src, 0, 8192, Some(tag));
        me.submit(&SingleWrite { peer, src, src_offset: 0, dst, dst_offset, len, imm })
    };
    let [kept, cancelled] = [(); 2].map(|()| submit(peer, &desc));
    let lost = submit(doomed, &of_third);
    assert_eq!(me.end_within(&cancelled, Duration::from_millis(5)), None);
    cancelled.cancel();
    let stopped = |error| End::NeverStarted { error: TransferError::Stopped(error) };
    assert_eq!(me.end(&cancelled), stopped(group::TransferError::Cancelled));
    if !me.is_polled() {
        let hurried = me.engine.with_deadline(Duration::from_millis(30));
        let one = SingleWrite {
            peer,
            src: &src,
            src_offset: 0,
            dst: &desc,
            dst_offset: 0,
            len: 8192,
            imm: Some(tag),
        };
        let late = hurried.submit_single_write(&one).expect("submit");
        let (outstanding, peer) = (0, Some(peer));
        let error = group::TransferError::DeadlineExceeded { outstanding, peer };
        assert_eq!(me.end(&late), stopped(error));
    }
    drop(third);
    let end = me.end(&lost);
    assert!(matches!(end, End::NeverStarted { .. }) && names(end, doomed), "{end:?}");
    assert_eq!(me.stands(peer), Some(PeerState::Up));
    assert_eq!(me.end_within(&kept, Duration::from_millis(5)), None);
    other.check_only(&me, there, 0, 8192, 0xa5);
    gated.open(1);
    me.done(&kept);
    other.count(&me, counter, 1);
    other.check(&me, there, 0, 8192, pattern);
    // And with the engine.
    gated.hold(&me, 2);
    let last = submit(peer, &desc);
    assert_eq!(me.end_within(&last, Duration::from_millis(5)), None);
    let end = std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let end = last.wait(patience()).ok();
            // What an engine's end gives back of CUDA's waits for all streams, after that.
            gated.open(2);
            end
        });
        drop((me, src));
        watching.join().expect("no panic")
    });
    assert_eq!(end, Some(End::NeverStarted { error: TransferError::EngineStopped }));
}

/// How often the stand-in for the driver was asked to flush what NICs wrote; `None`: it is NVIDIA's.
fn flushes() -> Option<u64> {
    let call: extern "C" fn() -> u64 = driver_s(c"immwire_fake_cuda_flushes")?;
    Some(call())
}

/// A GPU whose memory not all of the engine's GPUs see NICs write by themselves is flushed before each count, and others never are.
fn counts_come_after_a_flush(case: &Case) {
    let (me, mut other, _) = case.pair();
    let landing = me.engine.alloc_gpu(0, 4096).expect("memory");
    let (src, _) = other.memory(&me, 4096, Own::Engine);
    let counter = me.engine.counter().expect("a counter");
    let peer = plain(other.peer(&me, me.engine.address()));
    let mut before =
        flushes().expect("only the stand-in for the driver says how often it was asked");
    let direct = Device::open(0).expect("GPU 0").direct().expect("what it offers");
    // The engine has all of them.
    let by = if last_gpu() == 0 { Seen::ByOwner } else { Seen::ByAll };
    let wants = direct.visibility(by) == Visibility::Flush;
    for _ in 0..20 {
        let (dst, tag) = (encode(&landing.desc()), Some(counter.tag().bits()));
        let write = Write1 { peer, src, src_offset: 0, dst, dst_offset: 0, len: 4096, tag };
        other.post(Ask::Write(write));
        me.count(&counter, 1, patience()).expect("it arrives");
        let now = flushes().expect("as before");
        assert_eq!(now > before, wants, "{before} and {now} flushes");
        before = now;
        assert_eq!(other.answer(Some(&me)), Say::Text("Done".into()));
    }
}

/// Where no NIC reaches it.
pub const UNREACHED: &[Test] =
    &[("memory_that_no_nic_reaches", Spread::Processes, memory_that_no_nic_reaches)];

/// It is refused with the reason, whosever it is; and the host's goes on being written.
fn memory_that_no_nic_reaches(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let refused = |error: RegisterError| {
        let RegisterError::NotDirect { ordinal: 0, nics, why } = error else { panic!("{error}") };
        println!("{nics}: {why}");
        assert!(!nics.is_empty() && why.len() > 20, "{nics}: {why}");
    };
    for _ in 0..3 {
        refused(me.engine.alloc_gpu(0, 4096).expect_err("no way"));
    }
    let device = Device::open(0).expect("GPU 0");
    let stream = Stream::new(&device).expect("a stream");
    let memory = DeviceMemory::zeroed(&stream, 4096).expect("memory of GPU 0");
    let ptr = NonNull::new(memory.address() as *mut u8).expect("an address");
    // SAFETY: allocated as long as the engine is there.
    refused(unsafe { me.engine.register(ptr, 4096, Rights::REMOTE_WRITE) }.expect_err("no way"));
    let src = me.engine.alloc(4096).expect("memory of the host");
    let (there, desc) = other.memory(&me, 4096, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, 4096, 0);
    me.done(&write(&me, peer, &src, &desc, (0, 0, 4096), Some(tag)));
    other.count(&me, counter, 1);
    other.check(&me, there, 0, 4096, pattern);
}

/// Parts that begin and end anywhere in pages are registered, and written from and to: each of their bytes and no other.
fn any_part_of_a_gpu_s_memory(case: &Case) {
    const WHOLE: u64 = 64 << 10;
    let (me, mut other, peer) = case.pair();
    let theirs = plain(other.peer(&me, me.engine.address()));
    let device = Device::open(0).expect("GPU 0");
    let stream = Stream::new(&device).expect("a stream");
    let memory = DeviceMemory::zeroed(&stream, usize::try_from(WHOLE).expect("small"));
    let memory = memory.expect("memory of GPU 0");
    // A part of what is registered would be that registration, so only one is at a time.
    let register = |offset: u64, bytes: u64| {
        let (ptr, len) = (NonNull::new((memory.address() + offset) as *mut u8), bytes.try_into());
        let (ptr, len) = (ptr.expect("an address"), len.expect("small"));
        // SAFETY: allocated until after the region is closed; no reference to it is made.
        let region = unsafe { me.engine.register(ptr, len, Rights::REMOTE_WRITE) };
        let region = region.expect("a part of it");
        assert_eq!((region.place(), region.len()), (Place::Gpu(0), bytes));
        region
    };
    let close = |region| me.close(region, patience()).expect("nobody writes");
    let (there, desc) = other.memory(&me, WHOLE, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let ends = [(0, 1), (1, 4096), (4095, 2), (4096, 4096), (511, 8 << 10), (12_289, 333)];
    for (n, (offset, bytes)) in ends.into_iter().chain([(WHOLE - 7, 7), (0, WHOLE)]).enumerate() {
        let whole = register(0, WHOLE);
        poison(&whole, 0, WHOLE, 0x5a);
        close(whole);
        let part = register(offset, bytes);
        let pattern = case.pattern(n as u64);
        pattern.fill(&part, 0, bytes, 0);
        other.tell(&me, Ask::Poison { region: there, offset: 0, len: WHOLE, byte: 0xa5 });
        me.done(&write(&me, peer, &part, &desc, (0, offset, bytes), Some(tag)));
        other.count(&me, counter, 1);
        other.check(&me, there, offset, bytes, pattern);
        // And back.
        poison(&part, 0, bytes, 0x5a);
        let back = me.engine.counter().expect("a counter");
        let (src_offset, tag) = (offset, Some(back.tag().bits()));
        let dst = encode(&part.desc());
        let write =
            Write1 { peer: theirs, src: there, src_offset, dst, dst_offset: 0, len: bytes, tag };
        other.post(Ask::Write(write));
        me.count(&back, 1, patience()).expect("it arrives");
        assert_eq!(other.answer(Some(&me)), Say::Text("Done".into()));
        assert_eq!(pattern.mismatch(&part, 0, bytes, 0), None, "{bytes} bytes from {offset}");
        close(part);
        let whole = register(0, WHOLE);
        let around = [(0, offset), (offset + bytes, WHOLE - offset - bytes)];
        for (from, len) in around.into_iter().filter(|(_, len)| *len > 0) {
            assert_eq!(first_other(&whole, from, len, 0x5a), None, "{bytes} from {offset}");
        }
        close(whole);
    }
}

/// What is held for a stream is what reads its GPU's memory: others go on, to the same peer and to another one, though as
/// much is held as all queues are long.
fn a_stream_holds_nothing_else(case: &Case) {
    const PAGE: u64 = 4096;
    const PAGES: u32 = 2000;
    let len = usize::try_from(PAGE).expect("small") * PAGES as usize;
    let bytes = PAGE * u64::from(PAGES);
    let (me, mut other, peer) = case.pair();
    let (mut third, address) = case.agent("third");
    let another = me.peer(&address);
    let (there, desc) = other.memory(&me, bytes, Own::Engine);
    let places = [other.memory(&me, PAGE, Own::Engine), third.memory(&me, PAGE, Own::Engine)];
    let (counter, tag) = other.counter(&me);
    let [gpu, host] = [me.engine.alloc_gpu(0, len), me.engine.alloc(4096)].map(Result::unwrap);
    let (early, late) = (case.pattern(1), case.pattern(2));
    early.fill(&host, 0, PAGE, 0);
    // No page next to the last one's.
    let pages: Vec<u32> = (0..PAGES).map(|page| page * 999 % PAGES).collect();
    let gated = Gated::new();
    for round in 1..4 {
        other.tell(&me, Ask::Poison { region: there, offset: 0, len: bytes, byte: 0xa5 });
        gated.hold(&me, round);
        let list = || Pages { indices: pages.clone().into(), stride: PAGE, offset: 0 };
        let paged = PagedWrite {
            peer,
            page_bytes: PAGE,
            src: &gpu,
            src_pages: list(),
            dst: &desc,
            dst_pages: list(),
            imm: Some(tag),
        };
        let held = me.engine.submit_paged_writes(&paged).expect("submit");
        assert_eq!(me.end_within(&held, Duration::from_millis(20)), None);
        for (who, (_, desc)) in [peer, another].into_iter().zip(&places) {
            me.done(&write(&me, who, &host, desc, (0, 0, PAGE), None));
        }
        other.check_only(&me, there, 0, bytes, 0xa5);
        late.fill(&gpu, 0, bytes, 0);
        gated.open(round);
        me.done(&held);
        other.count(&me, counter, u64::from(PAGES));
        other.check(&me, there, 0, bytes, late);
        poison(&gpu, 0, bytes, 0);
    }
    let [(near, _), (far, _)] = places;
    other.check(&me, near, 0, PAGE, early);
    third.check(&me, far, 0, PAGE, early);
}

/// A write that is to come after what a stream does waits for that, and for nothing else.
fn after_stream(case: &Case) {
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
    assert_eq!(me.end_within(&transfer, patience()), Some(immwire::End::Done));
    other.count(&me, counter, 1);
    other.check(&me, there, 0, BYTES, late);
}

/// The same of short writes, for which a warp may stand by: it is in no stream.
fn after_stream_short(case: &Case) {
    const BYTES: u64 = 4096;
    let (me, mut other, peer) = case.pair();
    let src = me.memory(BYTES, Own::Engine);
    let (there, desc) = other.memory(&me, BYTES, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, BYTES, 0);
    let device = Device::open(0).expect("GPU 0");
    let word = PinnedMemory::zeroed(&device, 8).expect("pinned");
    let stream = Stream::new(&device).expect("a stream");
    let half = |at| write(&me, peer, &src, &desc, (at, at, BYTES / 2), Some(tag));
    for round in 1..=40 {
        other.tell(&me, Ask::Poison { region: there, offset: 0, len: BYTES, byte: 0xa5 });
        // SAFETY: the word is pinned memory that outlives the wait, which ends below.
        unsafe { stream.after_word(word.address(), round) }.expect("a wait");
        // Soon after one another: so a warp is sent for, and is there for a while.
        for _ in 0..8 {
            me.done(&half(BYTES / 2));
        }
        // SAFETY: a stream of the GPU's primary context.
        unsafe { me.engine.after_stream(0, stream.raw()) }.expect("after_stream");
        let held = half(0);
        assert_eq!(me.end_within(&held, Duration::from_millis(20)), None, "round {round}");
        other.check_only(&me, there, 0, BYTES / 2, 0xa5);
        word.word(0).expect("a word").store(round, Ordering::Release);
        assert_eq!(me.end_within(&held, patience()), Some(immwire::End::Done));
        other.count(&me, counter, 9);
        other.check(&me, there, 0, BYTES, pattern);
    }
}

/// Host memory that two engines of a process have registered, and one of them twice, in ranges that overlap: GPUs read it as long as any
/// of these is there. What is not pinned they cannot read at all.
fn host_memory_of_several(case: &Case) {
    const PART: u64 = 64 << 10;
    const PAGE: u64 = 4096;
    let (me, also) = (case.me(), case.me());
    let (mut other, address) = case.agent("other");
    let peers = [me.peer(&address), also.peer(&address)];
    let all = usize::try_from(3 * PART).expect("small");
    let mine = Lent::new(all);
    let pattern = case.pattern(0);
    // In turn a GPU's and the host's.
    let there: Vec<_> = (0..2).map(|_| other.memory(&me, 2 * PART, Own::Engine)).collect();
    let register = |host: &Host, parts: std::ops::Range<u64>, rights| {
        let (from, to) = (parts.start * PART, parts.end * PART);
        let at = mine.ptr.as_ptr().wrapping_add(usize::try_from(from).expect("small"));
        let len = usize::try_from(to - from).expect("small");
        // SAFETY: never unmapped, and no reference to the bytes is ever made.
        let region = unsafe { host.engine.register(NonNull::new(at).expect("some"), len, rights) };
        region.expect("register")
    };
    let whole = register(&me, 0..3, Rights::LOCAL);
    pattern.fill(&whole, 0, 3 * PART, 0);
    me.close(whole, patience()).expect("closed");
    let shuffled: Vec<u32> = (0..32).map(|page| page * 5 % 32).collect();
    let pages = Pages { indices: shuffled.into(), stride: PAGE, offset: 0 };
    // In turn the first, the second and the last goes first.
    for first in 0..3 {
        let mut regions: Vec<_> = [
            (&me, 0_u64, register(&me, 0..2, Rights::LOCAL)),
            (&also, 0, register(&also, 0..2, Rights::LOCAL)),
            (&me, 1, register(&me, 1..3, Rights::REMOTE_WRITE)),
        ]
        .into();
        regions.rotate_left(first);
        while !regions.is_empty() {
            for (host, part, region) in &regions {
                let peer = peers[usize::from(!std::ptr::eq(*host, &me))];
                // By a warp, if one is up, by the copy engine, and by a kernel; and over what was pinned at different times.
                for (there, desc) in &there {
                    for (len, paged) in [(100, false), (2 * PART, false), (2 * PART, true)] {
                        let (there, offset, at) = (*there, 0, part * PART);
                        let whole =
                            Ask::Poison { region: there, offset, len: 2 * PART, byte: 0xa5 };
                        other.tell(&me, whole);
                        for _ in 0..3 {
                            let transfer = if paged {
                                host.engine.submit_paged_writes(&PagedWrite {
                                    peer,
                                    page_bytes: PAGE,
                                    src: region,
                                    src_pages: pages.clone(),
                                    dst: desc,
                                    dst_pages: pages.clone(),
                                    imm: None,
                                })
                            } else {
                                Ok(write(host, peer, region, desc, (0, 0, len), None))
                            };
                            host.done(&transfer.expect("submit"));
                        }
                        let ask = Ask::Mismatch { region: there, offset, len, pattern, at };
                        let wrong = other.place(&me, ask);
                        assert_eq!(wrong, None, "{len} bytes of part {part}, by pages: {paged}");
                    }
                }
            }
            let (host, _, region) = regions.remove(0);
            host.close(region, patience()).expect("closed");
        }
    }
}

/// Host memory that the application had the driver allocate, which is pinned from the beginning (`cudaHostAlloc`, a tensor in pinned memory): a region
/// of all of it, or of a part, as of any other.
fn host_memory_of_the_driver(case: &Case) {
    const BYTES: usize = 128 << 10;
    let (me, mut other, peer) = case.pair();
    let device = Device::open(0).expect("GPU 0");
    let memory = PinnedMemory::zeroed(&device, BYTES).expect("pinned");
    // In turn a GPU's and the host's.
    let there: Vec<_> = (0..2).map(|_| other.memory(&me, BYTES as u64, Own::Engine)).collect();
    let ranges = [(0, BYTES), (0, 4096), (8192, 4096), (100, BYTES - 200), (BYTES - 64, 64)];
    for (n, (from, len)) in (0..).zip(ranges) {
        // None of these bytes is there before, and none of another range's is right.
        let pattern = case.pattern(n);
        let at = NonNull::new((memory.address() + from as u64) as *mut u8).expect("some");
        // SAFETY: freed below, when the region has been closed, and no reference to the bytes is ever made.
        let mine = unsafe { me.engine.register(at, len, Rights::LOCAL) };
        let (mine, len) = (mine.expect("register"), len as u64);
        pattern.fill(&mine, 0, len, 0);
        for (there, desc) in &there {
            let whole = BYTES as u64;
            other.tell(&me, Ask::Poison { region: *there, offset: 0, len: whole, byte: 0xa5 });
            me.done(&write(&me, peer, &mine, desc, (0, 0, len), None));
            other.check(&me, *there, 0, len, pattern);
            other.check_only(&me, *there, len, whole - len, 0xa5);
        }
        me.close(mine, patience()).expect("closed");
    }
}

/// Host memory of which the application has pinned some: by pages, by bytes within one, over an end of the region, all of it in two goes. GPUs
/// reach every byte; what is unpinned then is what the application had not pinned.
fn host_memory_pinned_in_part(case: &Case) {
    const BYTES: u64 = 128 << 10;
    const PAGE: u64 = 4096;
    let (me, mut other, peer) = case.pair();
    let mine = Lent::new(usize::try_from(BYTES).expect("small"));
    let first = mine.ptr.as_ptr() as u64;
    // In turn a GPU's and the host's.
    let there: Vec<_> = (0..2).map(|_| other.memory(&me, BYTES, Own::Engine)).collect();
    let whole = 0..BYTES;
    let all: [(_, &[(u64, u64)]); 9] = [
        (whole.clone(), &[(2 * PAGE, PAGE)]),
        (whole.clone(), &[(0, PAGE)]),
        (whole.clone(), &[(BYTES - PAGE, PAGE)]),
        (whole.clone(), &[(PAGE, PAGE), (9 * PAGE, 3 * PAGE)]),
        (whole.clone(), &[(5000, 50), (5100, 10_001)]),
        (whole.clone(), &[(1, 1), (BYTES - 2, 1)]),
        (100..BYTES - 100, &[(0, 100), (BYTES - 100, 100)]),
        (PAGE..BYTES - 100, &[(0, 2 * PAGE), (BYTES - PAGE, PAGE)]),
        (whole, &[(0, BYTES / 2), (BYTES / 2, BYTES / 2)]),
    ];
    for (n, (range, theirs)) in (0..).zip(all) {
        for (from, bytes) in theirs {
            // SAFETY: never unmapped.
            assert!(unsafe { pin(first + from, *bytes) });
        }
        let (at, len) = (first + range.start, range.end - range.start);
        let ptr = NonNull::new(at as *mut u8).expect("some");
        // SAFETY: never unmapped, and no reference to the bytes is ever made.
        let region =
            unsafe { me.engine.register(ptr, usize::try_from(len).expect("small"), Rights::LOCAL) };
        let region = region.expect("register");
        let pattern = case.pattern(n);
        pattern.fill(&region, 0, len, 0);
        for (there, desc) in &there {
            me.done(&write(&me, peer, &region, desc, (0, 0, len), None));
            other.check(&me, *there, 0, len, pattern);
        }
        me.close(region, patience()).expect("closed");
        let mut at = 0;
        for (from, bytes) in theirs.iter().copied().chain([(BYTES, 0)]) {
            if at < from {
                // SAFETY: never unmapped.
                assert!(unsafe { pin(first + at, from - at) }, "{theirs:?}: {at} to {from}");
                unpin(first + at);
            }
            at = from + bytes;
        }
        theirs.iter().for_each(|(from, _)| unpin(first + from));
    }
}

/// A GPU that is stuck when the application reads from a region, or writes: that is given up, and what the GPU does of it when it goes on is none
/// of the host's memory. Until then nobody can close the region.
fn late_copies_of_the_host(case: &Case) {
    const BYTES: usize = 3 << 20;
    const PIECE: usize = 1 << 20;
    let me = case.me();
    let region = me.engine.alloc_gpu(0, BYTES).expect("memory of GPU 0");
    region.write(0, &vec![1; BYTES]).expect("no error");
    let is_late = |done: Result<(), AccessError>| {
        assert!(matches!(done, Err(AccessError::Gpu(Error::TimedOut { .. }))), "{done:?}");
    };
    let in_time = |work: &mut (dyn FnMut() + Send)| {
        goes_within(GIVES_UP_WITHIN, || _ = stick(false), work);
    };
    assert!(stick(true), "only the stand-in for the driver can be held");
    let mut read = vec![2; BYTES];
    in_time(&mut || is_late(region.read(0, &mut read)));
    assert!(read.iter().all(|&byte| byte == 2));
    read.fill(3);
    // The first is not over.
    in_time(&mut || is_late(region.write(0, &[4; 64])));
    let Err(CloseError::InUse { region }) = me.close(region, Duration::ZERO) else {
        panic!("it is read");
    };
    stick(false);
    go_on();
    assert!(read.iter().all(|&byte| byte == 3), "read after it was given up");
    region.read(0, &mut read).expect("no error");
    assert!(read.iter().all(|&byte| byte == 1), "the second was not begun");

    stick(true);
    let mut written = vec![5; BYTES];
    in_time(&mut || is_late(region.write(0, &written)));
    written.fill(6);
    stick(false);
    go_on();
    region.read(0, &mut read).expect("no error");
    let (begun, rest) = read.split_at(PIECE);
    assert!(begun.iter().all(|&byte| byte == 5) && rest.iter().all(|&byte| byte == 1));
}

/// A GPU that is stuck when it is to zero memory for the engine: that is given up, and the memory comes back when the GPU has gone on.
fn late_zeroes(case: &Case) {
    let me = case.me();
    let alloc = || me.engine.alloc_gpu(0, 64 << 10);
    // Whoever closes a region waits half a second for the driver to have it back, and all that was given back before. If it was sooner, it has.
    let gives_back = || {
        let region = alloc().expect("memory of GPU 0");
        let start = Instant::now();
        me.close(region, patience()).expect("nobody uses it");
        (start.elapsed() < Duration::from_millis(400)).then_some(())
    };
    me.until(patience(), gives_back).expect("it is given back");
    let before = kept();
    assert!(stick(true), "only the stand-in for the driver can be held");
    goes_within(
        GIVES_UP_WITHIN,
        || _ = stick(false),
        || {
            let late = me.engine.alloc_gpu(0, 64 << 10);
            assert!(
                matches!(late, Err(RegisterError::Gpu(Error::TimedOut { .. }))),
                "{:?}",
                late.err()
            );
        },
    );
    stick(false);
    go_on();
    drop(alloc().expect("memory of GPU 0"));
    me.until(patience(), || (kept() == before).then_some(())).expect("both are given back");
}

/// Two regions of host memory, pinned one after the other, that adjoin, at an end of a page and within one; and so do the places that they are
/// written to. Where both writes become one copy, its source lies in both. Pages, too.
fn regions_that_adjoin(case: &Case) {
    const PART: u64 = 64 << 10;
    const PAGE: u64 = 4096;
    let (me, mut other, peer) = case.pair();
    let (there, desc) = other.memory(&me, 2 * PART, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let poison = Ask::Poison { region: there, offset: 0, len: 2 * PART, byte: 0xa5 };
    for split in [PART, PART + 100] {
        let mine = Lent::new(usize::try_from(2 * PART).expect("small"));
        let register = |from: u64, to: u64| {
            let [from, len] = [from, to - from].map(|it| usize::try_from(it).expect("small"));
            let at = NonNull::new(mine.ptr.as_ptr().wrapping_add(from)).expect("some");
            // SAFETY: never unmapped, and no reference to the bytes is ever made.
            unsafe { me.engine.register(at, len, Rights::LOCAL) }.expect("register")
        };
        let both = [register(0, split), register(split, 2 * PART)];
        let rest = 2 * PART - split;
        for round in 0..16 {
            let pattern = case.pattern(round);
            for (region, (at, len)) in both.iter().zip([(0, split), (split, rest)]) {
                pattern.fill(region, 0, len, at);
            }
            other.tell(&me, poison.clone());
            // The end of the first and the beginning of the second, of any lengths.
            let (before, after) = (PART - 16 * round, rest - 7 * round);
            let (first, second) = ((split - before, split - before, before), (0, split, after));
            let transfers = [first, second].into_iter().zip(&both);
            let transfers: Vec<_> = transfers
                .map(|(range, region)| write(&me, peer, region, &desc, range, Some(tag)))
                .collect();
            other.count(&me, counter, 2);
            transfers.iter().for_each(|transfer| me.done(transfer));
            let (offset, len) = (split - before, before + after);
            let wrong =
                other.place(&me, Ask::Mismatch { region: there, offset, len, pattern, at: offset });
            assert_eq!(wrong, None, "{split}, round {round}");
            other.check_only(&me, there, 0, offset, 0xa5);
            other.check_only(&me, there, offset + len, 2 * PART - offset - len, 0xa5);
        }
        let pattern = case.pattern(16);
        let [_, second] = &both;
        pattern.fill(second, 0, rest, split);
        other.tell(&me, poison.clone());
        let pages = u32::try_from(rest / PAGE).expect("small");
        let from =
            Pages { indices: (0..pages).collect::<Vec<_>>().into(), stride: PAGE, offset: 0 };
        let transfer = me.engine.submit_paged_writes(&PagedWrite {
            peer,
            page_bytes: PAGE,
            src: second,
            src_pages: from.clone(),
            dst: &desc,
            dst_pages: Pages { offset: split, ..from },
            imm: None,
        });
        me.done(&transfer.expect("submit"));
        let (offset, len) = (split, u64::from(pages) * PAGE);
        let wrong =
            other.place(&me, Ask::Mismatch { region: there, offset, len, pattern, at: offset });
        assert_eq!(wrong, None, "{split}, by pages");
        other.check_only(&me, there, 0, split, 0xa5);
    }
}

/// Has the driver refuse the `nth` command from now on; 0: none. Only the stand-in for it can: `false` elsewhere.
pub fn refuse(nth: u32) -> bool {
    let call: Option<extern "C" fn(u32)> = driver_s(c"immwire_fake_cuda_refuse");
    call.inspect(|call| call(nth)).is_some()
}

/// Does it on a thread that ends in time, though GPUs are stuck until `let_go`.
pub fn goes_within(limit: Duration, let_go: impl FnOnce(), work: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let working = scope.spawn(work);
        let start = Instant::now();
        while !working.is_finished() {
            if start.elapsed() > limit {
                let_go();
                panic!("it has not ended in {limit:?}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// How long an engine takes to end whose GPU is stuck, at most: its own time for that, and what a slow machine adds.
pub const GIVES_UP_WITHIN: Duration = Duration::from_secs(40);

/// An engine that is dropped while its GPUs are stuck does not wait for them for good; what they were to read and write is there when
/// they go on, GPUs' memory and the host's. The stand-in for the driver ends processes in which it is not.
fn stuck(case: &Case) {
    const BYTES: u64 = 64 << 10;
    let (me, mut other, peer) = case.pair();
    // Before anything is stuck: the driver waits for that before it pins.
    let later = case.me();
    let mine = Lent::new(64 << 10);
    // SAFETY: never unmapped, and no reference to the bytes is ever made.
    let pinned = unsafe { later.engine.register(mine.ptr, 64 << 10, Rights::LOCAL) };
    let pinned = pinned.expect("register");
    let gpu = |ordinal| me.engine.alloc_gpu(ordinal, 64 << 10).expect("a GPU's memory");
    let from = [gpu(0), gpu(last_gpu()), me.engine.alloc(64 << 10).expect("memory")];
    // In turn a GPU's and the host's.
    let mut to: Vec<_> = (0..4).map(|_| other.memory(&me, BYTES, Own::Engine).1).collect();
    // Nothing goes there later: it is open by a handle, that is all.
    let (idle, idle_desc) = other.memory(&me, BYTES, Own::Test);
    me.done(&write(&me, peer, &from[0], &idle_desc, (0, 0, BYTES), None));
    let (region, desc, _) = segment(&me, &mut other, 1);
    to.push(desc);
    let all = || {
        let both = from.iter().flat_map(|src| to.iter().map(move |dst| (src, dst)));
        let submit = |(src, dst)| write(&me, peer, src, dst, (0, 0, BYTES), None);
        both.map(submit).collect::<Vec<_>>()
    };
    // The peer tells where its memory is, first.
    all().iter().for_each(|transfer| me.done(transfer));
    assert!(stick(true), "only the stand-in for the driver can be held");
    let transfers = all();
    me.until(patience(), || (held_up() > 0).then_some(())).expect("something is to be copied");
    goes_within(GIVES_UP_WITHIN, || _ = stick(false), move || drop((from, me)));
    let ends: Vec<_> =
        transfers.iter().map(|transfer| transfer.poll_end().expect("it ends")).collect();
    assert!(ends.iter().any(|end| *end != End::Done), "{ends:?}");
    assert!(held_up() > 0, "it was waited for");
    // The one is still written to, and the driver has the other open.
    for ask in [Ask::Free { region, ms: 100 }, Ask::Reclaim { region: idle, ms: 100 }] {
        let kept_there = other.ask(&later, ask);
        assert!(matches!(kept_there, Say::Text(_)), "{kept_there:?}");
    }
    // The driver is nobody's who waits for the GPU, and nobody else waits.
    goes_within(
        GIVES_UP_WITHIN,
        || _ = stick(false),
        move || {
            drop(pinned);
            let device = Device::open(0).expect("GPU 0");
            Stream::new(&device).expect("a stream");
        },
    );
    // Something else may be mapped where memory stayed pinned.
    // SAFETY: never unmapped, and no reference to the bytes is ever made.
    let again = || unsafe { later.engine.register(mine.ptr, 64 << 10, Rights::LOCAL) };
    later
        .until(patience(), || {
            let refused = again();
            matches!(refused, Err(RegisterError::Gpu(Error::Busy { .. }))).then_some(())
        })
        .expect("a GPU is stuck");
    stick(false);
    go_on();
    // What stayed pinned is pinned anew.
    let again = again().expect("register");
    assert!(later.close(again, patience()).is_ok());
    // SAFETY: never unmapped.
    assert!(unsafe { pin(mine.ptr.as_ptr() as u64, 64 << 10) }, "it is pinned still");
    unpin(mine.ptr.as_ptr() as u64);
    // What is dropped now is not kept.
    let settles = |before: &mut Option<u64>| {
        let last = std::mem::replace(before, kept());
        later.linger(Duration::from_millis(300));
        (last == kept() && last == *before).then_some(last)
    };
    let mut before = None;
    let before = later.until(patience(), || settles(&mut before)).expect("the other goes");
    drop(later.engine.alloc_gpu(0, 64 << 10).expect("memory of GPU 0"));
    // Fewer, where something was slow to go when they were counted.
    later.until(patience(), || (kept() <= before).then_some(())).expect("it is given back");
}

/// One copy goes to several regions: each of them is its owner's again when that has ended, and not before.
fn closed_beside_another(case: &Case) {
    const PAGES: u32 = 300;
    const BYTES: u64 = PAGES as u64 * 4096;
    let (me, mut other, peer) = case.pair();
    let src = me.engine.alloc_gpu(0, 2 << 20).expect("memory of GPU 0");
    // In turn a GPU's and the host's: three of one GPU's.
    let kinds = Device::count().expect("GPUs") as usize + 1;
    let there: Vec<_> = (0..3 * kinds).map(|_| other.memory(&me, BYTES, Own::Engine)).collect();
    let there: Vec<_> = there.into_iter().step_by(kinds).collect();
    let pages =
        |offset| Pages { indices: (0..PAGES).collect::<Vec<_>>().into(), stride: 4096, offset };
    let submit = |dst| {
        let (page_bytes, src, imm) = (4096, &src, None);
        let (src_pages, dst_pages) = (pages(0), pages(0));
        let write = PagedWrite { peer, page_bytes, src, src_pages, dst, dst_pages, imm };
        me.engine.submit_paged_writes(&write).expect("submit")
    };
    // The peer tells where its memory is, first.
    there.iter().for_each(|(_, dst)| me.done(&submit(dst)));
    assert!(stick(true), "only the stand-in for the driver can be held");
    let before = me.engine.stats().posted;
    let transfers: Vec<_> = there.iter().map(|(_, dst)| submit(dst)).collect();
    let all = 2 * there.len() as u64;
    me.until(patience(), || (me.engine.stats().posted >= before + all).then_some(()))
        .expect("all of it is handed over");
    for (region, _) in &there {
        let still = other.ask(&me, Ask::Free { region: *region, ms: 30 });
        assert!(matches!(still, Say::Text(_)), "{region}: {still:?}");
    }
    stick(false);
    go_on();
    transfers.iter().for_each(|transfer| me.done(transfer));
}

/// What one of the writes below has: one range, or pages. Where it begins, on both sides, is from its slot on.
struct Shape {
    slot: u64,
    starts: (u64, u64),
    len: u64,
    /// Strides, and the numbers of its pages, if there are several.
    pages: Option<((u64, u64), Vec<u32>)>,
}

impl Shape {
    /// Of any kind, in a slot of so many bytes.
    fn any(random: &mut Random, slot: u64, room: u64) -> Self {
        let mut below = |end| random.below(end);
        let one_of = |list: &[u64], number: u64| list[usize::try_from(number).expect("small")];
        let grid = one_of(&[1, 4, 16, 128, 512], below(5));
        let starts = (below(8) * grid, below(8) * grid);
        let room = room - 4096;
        let longest = one_of(&[8 << 10, 64 << 10, 1 << 20, room], below(4));
        if below(2) == 0 {
            return Self { slot, starts, len: 1 + below(longest), pages: None };
        }
        let len = one_of(&[100, 128, 1000, 1024, 4096, 16 << 10], below(6));
        let strides = (len + below(3) * grid, len + below(3) * grid);
        let count = 2 + below((room / strides.0.max(strides.1)).min(300) - 2);
        let mut numbers: Vec<_> = (0..u32::try_from(count).expect("few")).collect();
        random.shuffle(&mut numbers);
        Self { slot, starts, len, pages: Some((strides, numbers)) }
    }

    /// Where its ranges are, on both sides.
    fn places(&self) -> Vec<(u64, u64)> {
        let (from, to) = self.starts;
        let Some(((near, far), numbers)) = &self.pages else { return vec![(from, to)] };
        // The first page goes to the last place.
        let count = numbers.len() as u64;
        let place = |n: &u32| (from + near * u64::from(*n), to + far * (count - 1 - u64::from(*n)));
        numbers.iter().map(place).collect()
    }
}

/// Many writes of all lengths and kinds under way at a time, to several regions, whichever are put together: each byte is where it belongs.
fn all_shapes_at_once(case: &Case) {
    const SLOT: u64 = 3 << 20;
    const SLOTS: u64 = 3;
    let (me, mut other, peer) = case.pair();
    let kinds = u64::from(Device::count().expect("GPUs")) + 1;
    let there: Vec<_> =
        (0..2 * kinds).map(|_| other.memory(&me, SLOTS * SLOT, Own::Engine)).collect();
    let all = there.len() as u64 * SLOTS;
    let bytes = usize::try_from(all * SLOT).expect("small");
    let near = [0, last_gpu()].map(|gpu| me.engine.alloc_gpu(gpu, bytes).expect("memory"));
    let (counter, tag) = other.counter(&me);
    let mut random = case.random();
    for round in 0..2 {
        let pattern = case.pattern(round);
        near.iter().for_each(|src| pattern.fill(src, 0, all * SLOT, 0));
        for (region, _) in &there {
            let poison = Ask::Poison { region: *region, offset: 0, len: SLOTS * SLOT, byte: 0xa5 };
            other.tell(&me, poison);
        }
        let shapes: Vec<_> = (0..all).map(|slot| Shape::any(&mut random, slot, SLOT)).collect();
        let place = |slot: u64| {
            let (region, desc) = &there[usize::try_from(slot / SLOTS).expect("few")];
            (*region, desc, slot % SLOTS * SLOT)
        };
        let mut order: Vec<_> = shapes.iter().collect();
        if round % 2 == 1 {
            random.shuffle(&mut order);
        }
        let mut writes = 0;
        let mut submit = |shape: &Shape| {
            let src = &near[usize::from(random.below(2) == 0)];
            let (_, dst, at) = place(shape.slot);
            let (from, to) = (shape.slot * SLOT + shape.starts.0, at + shape.starts.1);
            let Some(((near, far), numbers)) = &shape.pages else {
                writes += 1;
                return write(&me, peer, src, dst, (from, to, shape.len), Some(tag));
            };
            let count = u32::try_from(numbers.len()).expect("few");
            writes += u64::from(count);
            let turned: Vec<u32> = numbers.iter().map(|n| count - 1 - n).collect();
            let pages = |indices: &[u32], stride, offset| Pages {
                indices: indices.to_vec().into(),
                stride,
                offset,
            };
            let (src_pages, dst_pages) = (pages(numbers, *near, from), pages(&turned, *far, to));
            let (page_bytes, imm) = (shape.len, Some(tag));
            let write = PagedWrite { peer, page_bytes, src, src_pages, dst, dst_pages, imm };
            me.engine.submit_paged_writes(&write).expect("submit")
        };
        let transfers: Vec<_> = order.into_iter().map(&mut submit).collect();
        other.count(&me, counter, writes);
        transfers.iter().for_each(|transfer| me.done(transfer));
        for shape in &shapes {
            let (region, _, at) = place(shape.slot);
            let mut places = shape.places();
            for (from, to) in places.iter().step_by(7).chain(places.last()) {
                let (offset, len, from) = (at + to, shape.len, shape.slot * SLOT + from);
                let ask = Ask::Mismatch { region, offset, len, pattern, at: from };
                assert_eq!(other.place(&me, ask), None, "round {round}, slot {}", shape.slot);
            }
            // What lies between them, and around, is as it was.
            places.sort_by_key(|(_, to)| *to);
            let ends = std::iter::once(0).chain(places.iter().map(|(_, to)| to + shape.len));
            let begins = places.iter().map(|(_, to)| *to).chain([SLOT]);
            let gaps = ends.zip(begins).filter(|(end, begin)| end < begin).collect::<Vec<_>>();
            for (end, begin) in gaps.iter().step_by(7).chain(gaps.last()) {
                other.check_only(&me, region, at + end, begin - end, 0xa5);
            }
        }
    }
}

/// A stream of each GPU, which waits for a word until this is dropped: also when a test fails, or nothing would end.
struct Busy {
    streams: Vec<(Stream, PinnedMemory)>,
}

impl Busy {
    fn all() -> Self {
        let busy = |gpu| {
            let device = Device::open(gpu).expect("a GPU");
            let word = PinnedMemory::zeroed(&device, 8).expect("pinned");
            let stream = Stream::new(&device).expect("a stream");
            // SAFETY: the word is pinned memory that is freed when the wait has ended: `drop` waits for that.
            unsafe { stream.after_word(word.address(), 1) }.expect("a wait");
            (stream, word)
        };
        Self { streams: (0..Device::count().expect("GPUs")).map(busy).collect() }
    }

    fn go_on(&self) {
        for (_, word) in &self.streams {
            word.word(0).expect("eight bytes").store(1, Ordering::Release);
        }
    }
}

impl Drop for Busy {
    /// All of them first: what is freed is waited for by the driver. Then until no stream looks at its word any more, or a test that
    /// fails has waited long enough.
    fn drop(&mut self) {
        self.go_on();
        let start = Instant::now();
        for (stream, _) in &self.streams {
            while matches!(stream.is_done(), Ok(false)) && start.elapsed() < patience() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// A peer takes back regions while one of our GPUs is busy with the application's own work, for which the driver waits before it
/// closes what it has opened by a handle, or unpins: that waits, and so does who takes them back, but nobody else; and so it is when the
/// engine ends meanwhile.
fn taken_back_while_the_gpu_is_busy(case: &Case) {
    const BYTES: u64 = 64 << 10;
    let (me, mut other, peer) = case.pair();
    let (counter, tag) = other.counter(&me);
    let src = me.engine.alloc_gpu(0, 64 << 10).expect("memory of GPU 0");
    let wants = |other: &mut Agent, me: &Host, own| {
        let (region, desc) = other.memory(me, BYTES, own);
        me.done(&write(me, peer, &src, &desc, (0, 0, BYTES), None));
        region
    };
    // All that there are: by a handle, by files of two allocations, by a file, and the host's.
    let gpus = Device::count().expect("GPUs");
    let (by_handle, by_files): (Vec<_>, Vec<_>) = (0..3)
        .map(|_| (wants(&mut other, &me, Own::Test), wants(&mut other, &me, Own::Test)))
        .unzip();
    let others: Vec<_> = (0..=gpus).map(|_| wants(&mut other, &me, Own::Engine)).collect();
    // Before anything is busy: the driver waits for that before it pins.
    let later = case.me();
    let busy = Busy::all();
    let goes_on = |other: &mut Agent| {
        for _ in 0..20 {
            me.done(&me.engine.submit_imm(peer, tag, 1).expect("submit"));
            other.count(&me, counter, 1);
        }
    };
    let (last, first) = by_handle.split_last().expect("some");
    for &region in first {
        let still = other.ask(&me, Ask::Reclaim { region, ms: 50 });
        assert!(matches!(still, Say::Text(_)), "{still:?}");
        goes_on(&mut other);
    }
    // Of the rest nothing is claimed.
    let ms = u64::try_from(patience().as_millis()).expect("small");
    let files = by_files.iter().map(|&region| Ask::Reclaim { region, ms });
    for ask in files.chain(others.iter().map(|&region| Ask::Free { region, ms })) {
        assert_eq!(other.ask(&me, ask), Say::Fine);
        goes_on(&mut other);
    }
    goes_within(GIVES_UP_WITHIN, || busy.go_on(), move || drop((src, me)));
    let still = other.ask(&later, Ask::Reclaim { region: *last, ms: 100 });
    assert!(matches!(still, Say::Text(_)), "{still:?}");
    drop(busy);
    go_on();
}

/// Two engines of one process use one GPU. While the driver keeps the one waiting that gives back what it had opened, since the GPU has
/// something to do, the other goes on with all that needs no driver; and with what does, when the GPU has done that.
fn beside_an_engine_that_waits_for_the_gpu(case: &Case) {
    const BYTES: u64 = 64 << 10;
    let me = case.me();
    let (mut other, address) = case.agent("other");
    let (peer, beside) = (me.peer(&address), case.me());
    let its_peer = beside.peer(&address);
    let (counter, tag) = other.counter(&beside);
    let len = usize::try_from(BYTES).expect("small");
    let [src, from] = [&me, &beside].map(|host| host.engine.alloc_gpu(0, len).expect("memory"));
    let (region, desc) = other.memory(&me, BYTES, Own::Test);
    me.done(&write(&me, peer, &src, &desc, (0, 0, BYTES), None));
    let (there, desc) = other.memory(&beside, BYTES, Own::Engine);
    let copy = || write(&beside, its_peer, &from, &desc, (0, 0, BYTES), Some(tag));
    beside.done(&copy());
    other.count(&beside, counter, 1);
    let busy = Busy::all();
    let still = other.ask(&me, Ask::Reclaim { region, ms: 50 });
    assert!(matches!(still, Say::Text(_)), "{still:?}");
    until_kept_waiting(|nap| me.linger(nap));
    let pattern = case.pattern(0);
    for _ in 0..20 {
        beside.done(&beside.engine.submit_imm(its_peer, tag, 1).expect("submit"));
        other.count(&beside, counter, 1);
    }
    let later = copy();
    beside.done(&beside.engine.submit_imm(its_peer, tag, 1).expect("submit"));
    other.count(&beside, counter, 1);
    drop(busy);
    beside.done(&later);
    other.count(&beside, counter, 1);
    go_on();
    pattern.fill(&from, 0, BYTES, 0);
    beside.done(&copy());
    other.count(&beside, counter, 1);
    other.check(&beside, there, 0, BYTES, pattern);
}

/// While a caller takes host memory back that the engine had pinned, which takes as long as the GPU is busy, the engine goes on with all that needs no
/// driver, though a copy waits.
fn closed_while_the_gpu_is_busy(case: &Case) {
    const BYTES: u64 = 64 << 10;
    let (me, mut other, peer) = case.pair();
    let (counter, tag) = other.counter(&me);
    let src = me.engine.alloc_gpu(0, 64 << 10).expect("memory of GPU 0");
    let (there, desc) = other.memory(&me, BYTES, Own::Engine);
    let copy = || write(&me, peer, &src, &desc, (0, 0, BYTES), Some(tag));
    me.done(&copy());
    other.count(&me, counter, 1);
    let lent = Lent::new(4096);
    // SAFETY: the memory is unmapped after the region is closed, or the test has failed; no reference to its bytes is made.
    let region = unsafe { me.engine.register(lent.ptr, 4096, Rights::REMOTE_WRITE) };
    let region = region.expect("register");
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, BYTES, 0);
    std::thread::scope(|scope| {
        let busy = Busy::all();
        let closing = scope.spawn(|| region.close(patience()).is_ok());
        until_kept_waiting(std::thread::sleep);
        let later = copy();
        for _ in 0..20 {
            me.done(&me.engine.submit_imm(peer, tag, 1).expect("submit"));
            other.count(&me, counter, 1);
        }
        assert!(!closing.is_finished(), "it is pinned while the GPU is busy");
        drop(busy);
        go_on();
        assert!(closing.join().expect("closes"));
        me.done(&later);
    });
    other.count(&me, counter, 1);
    other.check(&me, there, 0, BYTES, pattern);
}

/// An engine has ended while a GPU was busy, so that the driver has the caller's memory pinned still: who closes the regions waits until it has not.
fn closed_after_its_engine_while_the_gpu_is_busy(case: &Case) {
    const BYTES: usize = 4096;
    let me = case.me();
    let lent = Lent::new(BYTES);
    let regions = [Rights::LOCAL, Rights::REMOTE_WRITE].map(|rights| {
        // SAFETY: never unmapped, and no reference to the bytes is ever made.
        unsafe { me.engine.register(lent.ptr, BYTES, rights) }.expect("register")
    });
    std::thread::scope(|scope| {
        let busy = Busy::all();
        goes_within(GIVES_UP_WITHIN, || busy.go_on(), move || drop(me));
        let closing = regions.map(|region| scope.spawn(move || region.close(patience()).is_ok()));
        std::thread::sleep(Duration::from_millis(50));
        let is_over = closing.iter().any(|closing| closing.is_finished());
        assert!(!is_over, "it is pinned while the GPU is busy");
        drop(busy);
        go_on();
        assert!(closing.into_iter().all(|closing| closing.join().expect("closes")));
    });
    // SAFETY: never unmapped.
    assert!(unsafe { pin(lent.ptr.as_ptr() as u64, BYTES as u64) }, "it is pinned still");
    unpin(lent.ptr.as_ptr() as u64);
}

/// While the driver keeps its callers waiting, as a GPU is busy and something of the engine's is to be unpinned, it is to write to regions of a peer's
/// GPUs that it has not opened yet, and is asked for files of its own memory: that waits, and nobody else does.
fn opened_while_the_gpu_is_busy(case: &Case) {
    const BYTES: u64 = 64 << 10;
    let (me, mut other, peer) = case.pair();
    let back = only_peer(&me, &mut other);
    let [(counter, tag), came] = [(); 2].map(|()| other.counter(&me));
    let all = me.engine.counter().expect("a counter");
    let src = me.engine.alloc_gpu(0, 64 << 10).expect("memory of GPU 0");
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, BYTES, 0);
    // By a handle, by a file, by files of two allocations.
    let (joined, desc, _) = segment(&me, &mut other, 2);
    let there = [
        other.memory(&me, BYTES, Own::Test),
        other.memory(&me, BYTES, Own::Engine),
        (joined, desc),
    ];
    // From memory of a GPU of its own, to ours.
    let (from, _) = other.memory(&me, BYTES, Own::Test);
    let mine = me.segment(0, 2, 0, 2 * PART);
    let lent = Lent::new(4096);
    // SAFETY: the memory is never unmapped; no reference to its bytes is made.
    let region = unsafe { me.engine.register(lent.ptr, 4096, Rights::REMOTE_WRITE) };
    let region = region.expect("register");
    std::thread::scope(|scope| {
        let busy = Busy::all();
        let closing = scope.spawn(|| region.close(patience()).is_ok());
        until_kept_waiting(|nap| me.linger(nap));
        let submit =
            |(_, dst): &(usize, MrDesc)| write(&me, peer, &src, dst, (0, 0, BYTES), Some(tag));
        let transfers = there.each_ref().map(submit);
        let (dst, tag) = (encode(&mine.desc()), Some(all.tag().bits()));
        let write = Write1 {
            peer: plain(back),
            src: from,
            src_offset: 0,
            dst,
            dst_offset: PART - 100,
            len: BYTES,
            tag,
        };
        other.post(Ask::Write(write));
        me.linger(Duration::from_millis(50));
        for _ in 0..20 {
            me.done(&me.engine.submit_imm(peer, came.1, 1).expect("submit"));
        }
        assert!(!closing.is_finished(), "nobody was kept waiting");
        for transfer in &transfers {
            assert_eq!(me.end_within(transfer, Duration::from_millis(5)), None);
        }
        drop(busy);
        go_on();
        assert!(closing.join().expect("closes"));
        transfers.iter().for_each(|transfer| me.done(transfer));
    });
    me.count(&all, 1, patience()).expect("it arrives");
    assert_eq!(other.answer(Some(&me)), Say::Text("Done".into()));
    other.count(&me, came.0, 20);
    other.count(&me, counter, 3);
    for (region, _) in there {
        other.check(&me, region, 0, BYTES, pattern);
    }
}

/// An engine is dropped while the driver keeps its callers waiting for what another engine of the process gives back, since the GPU is busy: that takes
/// no longer than if it were its own. Nor does who wants to read a GPU's memory wait for longer than he is told.
fn dropped_beside_one_that_waits(case: &Case) {
    const BYTES: u64 = 64 << 10;
    let me = case.me();
    let (mut other, address) = case.agent("other");
    let (peer, beside) = (me.peer(&address), case.me());
    let its_peer = beside.peer(&address);
    let len = usize::try_from(BYTES).expect("small");
    let [src, from] = [&me, &beside].map(|host| host.engine.alloc_gpu(0, len).expect("memory"));
    let (region, desc) = other.memory(&me, BYTES, Own::Test);
    me.done(&write(&me, peer, &src, &desc, (0, 0, BYTES), None));
    let (_, desc) = other.memory(&beside, BYTES, Own::Engine);
    let copy = || write(&beside, its_peer, &from, &desc, (0, 0, BYTES), None);
    beside.done(&copy());
    let busy = Busy::all();
    // Enqueued before the driver waits, and not begun.
    // SAFETY: a stream of the GPU's primary context.
    unsafe { beside.engine.after_stream(0, busy.streams[0].0.raw()) }.expect("after_stream");
    let held = copy();
    assert_eq!(beside.end_within(&held, Duration::from_millis(50)), None);
    let still = other.ask(&me, Ask::Reclaim { region, ms: 50 });
    assert!(matches!(still, Say::Text(_)), "{still:?}");
    until_kept_waiting(|nap| me.linger(nap));
    goes_within(
        patience(),
        || busy.go_on(),
        || {
            let read = src.read(0, &mut [0; 64]);
            let kept =
                |error| matches!(error, AccessError::Gpu(Error::KeptWaiting { ordinal: 0, .. }));
            assert!(read.is_err_and(kept), "{read:?}");
        },
    );
    goes_within(GIVES_UP_WITHIN, || busy.go_on(), move || drop((from, beside)));
    assert!(held.poll_end().is_some(), "its engine is gone");
    drop(busy);
    go_on();
}

/// Two engines of one process, each with a GPU of its own: each writes to what the other has of `cudaMalloc`.
fn each_with_a_gpu_of_its_own(case: &Case) {
    const BYTES: u64 = 64 << 10;
    if last_gpu() == 0 {
        return;
    }
    let len = usize::try_from(BYTES).expect("small");
    let sides = [0, 1].map(|gpu| {
        let engine = TransferEngine::builder().gpus([gpu]).build().expect("build");
        let lent = Lent::by_handle(gpu, len);
        // SAFETY: never unmapped, and never freed; no reference to the bytes is ever made.
        let region = unsafe { engine.register(lent.ptr, len, Rights::REMOTE_WRITE) };
        (engine, region.expect("register"))
    });
    for (n, (from, to)) in (0..).zip([(0, 1), (1, 0)]) {
        let ((engine, src), (other, there)) = (&sides[from], &sides[to]);
        let peer = engine.add_peer(other.address()).expect("add_peer");
        engine.wait_peer(peer, patience()).expect("up");
        let pattern = case.pattern(n);
        pattern.fill(src, 0, BYTES, 0);
        let dst = &there.desc();
        let write =
            SingleWrite { peer, src, src_offset: 0, dst, dst_offset: 0, len: BYTES, imm: None };
        let transfer = engine.submit_single_write(&write).expect("submit");
        assert_eq!(transfer.wait(patience()).expect("it ends"), End::Done);
        assert_eq!(pattern.mismatch(there, 0, BYTES, 0), None);
    }
}

/// An engine has ended, and a handle of its to a region is there: the memory is the application's, which maps something else in its place. That is
/// pinned anew for the next engine, for as long as that has it registered, and the next engine alone.
fn host_memory_after_its_engine(case: &Case) {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    const BYTES: usize = 64 << 10;
    let (mut other, address) = case.agent("other");
    let mine = Lent::new(BYTES);
    let first = mine.ptr.as_ptr() as u64;
    let register = |engine: &TransferEngine| {
        // SAFETY: mapped anew only when the engine has ended, and no reference to the bytes is ever made.
        unsafe { engine.register(mine.ptr, BYTES, Rights::LOCAL) }.expect("register")
    };
    let is_pinned = || {
        // SAFETY: never unmapped.
        let is_free = unsafe { pin(first, BYTES as u64) };
        if is_free {
            unpin(first);
        }
        !is_free
    };
    let gone = case.me();
    let old = [register(&gone.engine), register(&gone.engine).slice(100, 8).expect("a part")];
    assert!(is_pinned());
    drop(gone);
    assert!(!is_pinned(), "for handles of an engine that has ended");
    let (both, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
    // SAFETY: over a mapping of ours that nobody uses any more.
    let mapped = unsafe { mmap_anonymous(mine.ptr.as_ptr().cast(), BYTES, both, flags) };
    assert_eq!(mapped.expect("mmap"), mine.ptr.as_ptr().cast());
    let me = case.me();
    let peer = me.peer(&address);
    // In turn a GPU's and the host's.
    let there: Vec<_> = (0..2).map(|_| other.memory(&me, BYTES as u64, Own::Engine)).collect();
    let region = register(&me.engine);
    let [whole, part] = old;
    drop(part);
    whole.close(Duration::ZERO).expect("nobody uses it");
    assert!(is_pinned());
    let pattern = case.pattern(0);
    pattern.fill(&region, 0, BYTES as u64, 0);
    for (there, desc) in &there {
        me.done(&write(&me, peer, &region, desc, (0, 0, BYTES as u64), None));
        other.check(&me, *there, 0, BYTES as u64, pattern);
    }
    me.close(region, patience()).expect("closed");
    assert!(!is_pinned());
    // A handle of the engine may be there when it has ended, if it is polled: what is registered then is nobody's to keep pinned.
    let (handle, is_polled) = (me.engine.clone(), me.is_polled());
    drop(me);
    if is_polled {
        let late = register(&handle);
        assert!(!is_pinned());
        drop(late);
    }
}

/// Memory that is to be unpinned: whoever pins it waits for that, and has it pinned anew, since something else may be mapped there by then.
fn pages_that_were_let_go_of(_: &Case) {
    let (page, device) = (rustix::param::page_size(), Device::open(0).expect("GPU 0"));
    let mine = Lent::new(page).ptr.as_ptr() as u64;
    let new = || {
        // SAFETY: the page is never unmapped.
        unsafe { Pinned::new(&device, mine, page, page as u64, false) }
            .expect("a pin")
            .expect("new")
    };
    let (mut first, second) = (new(), new());
    first.let_go();
    // The other has it still.
    drop(new());
    drop(first);
    let mut first = second;
    first.let_go();
    let begun = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let again = scope.spawn(|| {
            begun.store(true, Ordering::Release);
            new()
        });
        while !begun.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(100));
        let shares = again.is_finished();
        drop(first);
        let again = again.join().expect("pins");
        assert!(!shares, "it has what was pinned before");
        // SAFETY: as above.
        assert!(!unsafe { pin(mine, page as u64) });
        drop(again);
    });
    // SAFETY: as above.
    assert!(unsafe { pin(mine, page as u64) });
    unpin(mine);
}

/// A region of memory that is pinned is closed, of which another engine's has half: the other half is the application's, which maps something else
/// there. What is pinned there is what was, so nobody registers it, until the other is closed, too.
fn host_memory_that_is_left_behind(case: &Case) {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    const BYTES: usize = 64 << 10;
    const HALF: usize = BYTES / 2;
    let (me, also) = (case.me(), case.me());
    let mine = Lent::new(BYTES);
    let register = |host: &Host, from: usize, len| {
        let at = NonNull::new(mine.ptr.as_ptr().wrapping_add(from)).expect("some");
        // SAFETY: mapped anew only where all regions are closed, and no reference to the bytes is ever made.
        unsafe { host.engine.register(at, len, Rights::LOCAL) }
    };
    let whole = register(&me, 0, BYTES).expect("register");
    let half = register(&also, HALF, HALF).expect("register");
    me.close(whole, patience()).expect("closed");
    let (both, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
    // SAFETY: over a mapping of ours that nobody uses any more.
    let mapped = unsafe { mmap_anonymous(mine.ptr.as_ptr().cast(), HALF, both, flags) };
    assert_eq!(mapped.expect("mmap"), mine.ptr.as_ptr().cast());
    let first = mine.ptr.as_ptr() as u64;
    for len in [1, HALF, BYTES] {
        match register(&me, 0, len) {
            Err(RegisterError::Gpu(Error::LeftBehind { address })) => assert_eq!(address, first),
            other => panic!("{other:?}"),
        }
    }
    // What the other has is what it was.
    let shared = register(&me, HALF, HALF).expect("register");
    me.close(shared, patience()).expect("closed");
    also.close(half, patience()).expect("closed");
    let anew = register(&me, 0, BYTES).expect("register");
    let pattern = case.pattern(0);
    pattern.fill(&anew, 0, BYTES as u64, 0);
    let (mut other, address) = case.agent("other");
    let peer = me.peer(&address);
    // In turn a GPU's and the host's.
    for (there, desc) in [(); 2].map(|()| other.memory(&me, BYTES as u64, Own::Engine)) {
        me.done(&write(&me, peer, &anew, &desc, (0, 0, BYTES as u64), None));
        other.check(&me, there, 0, BYTES as u64, pattern);
    }
    me.close(anew, patience()).expect("closed");
}

/// Pins a page of the host's for GPU 0.
fn pin_page() -> Pinned {
    let page = rustix::param::page_size();
    let device = Device::open(0).expect("GPU 0");
    let start = Lent::new(page).ptr.as_ptr() as u64;
    // SAFETY: the page is never unmapped.
    unsafe { Pinned::new(&device, start, page, page as u64, false) }.expect("a pin").expect("new")
}

/// Messages and counts, both ways.
fn speak(me: &Host, other: &mut Agent, peer: PeerId, back: PeerId) {
    let (counter, tag) = other.counter(me);
    for n in 0..20_u8 {
        me.done(&me.engine.submit_send(peer, &[n; 100]).expect("submit"));
        let ms = u64::try_from(patience().as_millis()).expect("small");
        let got = other.ask(me, Ask::Recv { ms });
        assert_eq!(got, Say::Message { from: plain(back), bytes: vec![n; 100] });
        let said = other.ask(me, Ask::Send { peer: plain(back), bytes: vec![n] });
        assert_eq!(said, Say::Text("Done".into()));
        assert_eq!(me.recv(patience()).expect("a message").bytes, [n]);
        me.done(&me.engine.submit_imm(peer, tag, 1).expect("submit"));
        other.count(me, counter, 1);
    }
}

/// While the driver keeps all its callers waiting, as a GPU is busy and something is to be unpinned, engines that have GPUs call others and
/// are called, and both sides send messages and count.
fn joined_while_the_driver_waits(case: &Case) {
    let me = case.me();
    let [(mut called, address), (mut caller, _)] = ["called", "caller"].map(|it| case.agent(it));
    let pinned = pin_page();
    let busy = Busy::all();
    let unpins = std::thread::spawn(move || pinned.unpin());
    until_kept_waiting(|nap| me.linger(nap));
    let peer = me.peer(&address);
    let back = only_peer(&me, &mut called);
    speak(&me, &mut called, peer, back);
    let back = caller.peer(&me, me.engine.address());
    let calls = me.until(patience(), || me.engine.peers().into_iter().find(|&it| it != peer));
    speak(&me, &mut caller, calls.expect("the caller"), back);
    assert!(!unpins.is_finished(), "nobody was kept waiting");
    drop(busy);
    assert!(unpins.join().expect("no panic"));
    go_on();
}

/// Memory of the host's, of an agent that has had none yet: whose it is goes round, first the GPUs', and then the host's.
fn host_memory(other: &mut Agent, me: &Host, bytes: u64) -> (usize, MrDesc) {
    for _ in 0..Device::count().expect("GPUs") {
        other.memory(me, 4096, Own::Engine);
    }
    other.memory(me, bytes, Own::Engine)
}

/// A GPU writes here and there to much host memory of a peer's, which is pinned part by part: to one that is new, over the border of two, and
/// pages to several at a time.
fn host_memory_in_parts(case: &Case) {
    const PINNED: u64 = 256 << 20;
    const BYTES: u64 = 3 * PINNED + 4096 + 100;
    const LEN: u64 = 64 << 10;
    let (me, mut other, peer) = case.pair();
    let (there, desc) = host_memory(&mut other, &me, BYTES);
    let (counter, tag) = other.counter(&me);
    let src = me.engine.alloc_gpu(0, usize::try_from(LEN).expect("small")).expect("memory");
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, LEN, 0);
    let border = PINNED - LEN / 2;
    for at in [BYTES - LEN, border, border + 100, 0] {
        me.done(&write(&me, peer, &src, &desc, (0, at, LEN), Some(tag)));
        other.count(&me, counter, 1);
        other.check(&me, there, at, LEN, pattern);
    }
    let (srcs, dsts) = (vec![3_u32, 0, 2, 1], vec![5_u32, 0, 1, 2]);
    let (stride, offset, page_bytes) = (PINNED / 2, 3072, 4096);
    let write = PagedWrite {
        peer,
        page_bytes,
        src: &src,
        src_pages: Pages { indices: srcs.clone().into(), stride: page_bytes, offset: 0 },
        dst: &desc,
        // One of them alone goes to the third part.
        dst_pages: Pages { indices: dsts.clone().into(), stride, offset },
        imm: Some(tag),
    };
    me.done(&me.engine.submit_paged_writes(&write).expect("submit"));
    other.count(&me, counter, 4);
    for (from, to) in srcs.into_iter().zip(dsts) {
        let (offset, at) = (offset + u64::from(to) * stride, u64::from(from) * page_bytes);
        let ask = Ask::Mismatch { region: there, offset, len: page_bytes, pattern, at };
        assert_eq!(other.place(&me, ask), None, "page {from}");
    }
}

/// A GPU is to write to host memory of a peer's where none has written before, while the driver waits for that GPU: it is written when the GPU
/// is free, and all that needs no GPU goes on meanwhile.
fn first_write_to_host_memory_while_the_gpu_is_busy(case: &Case) {
    const BYTES: u64 = 64 << 10;
    let me = case.me();
    let (mut other, address) = case.agent("other");
    let (peer, beside) = (me.peer(&address), case.me());
    let its_peer = beside.peer(&address);
    let (there, desc) = host_memory(&mut other, &me, BYTES);
    let [(counter, tag), (writes, wrote)] = [(); 2].map(|()| other.counter(&beside));
    let len = usize::try_from(BYTES).expect("small");
    let [src, from] = [&me, &beside].map(|host| host.engine.alloc_gpu(0, len).expect("memory"));
    let pattern = case.pattern(0);
    pattern.fill(&from, 0, BYTES, 0);
    let (region, opened) = other.memory(&me, BYTES, Own::Test);
    me.done(&write(&me, peer, &src, &opened, (0, 0, BYTES), None));
    let busy = Busy::all();
    let still = other.ask(&me, Ask::Reclaim { region, ms: 50 });
    assert!(matches!(still, Say::Text(_)), "{still:?}");
    until_kept_waiting(|nap| me.linger(nap));
    let later = write(&beside, its_peer, &from, &desc, (0, 0, BYTES), Some(wrote));
    for n in 0..20_u8 {
        beside.done(&beside.engine.submit_send(its_peer, &[n]).expect("submit"));
        let ms = u64::try_from(patience().as_millis()).expect("small");
        let got = other.ask(&beside, Ask::Recv { ms });
        assert!(matches!(&got, Say::Message { bytes, .. } if *bytes == [n]), "{got:?}");
        beside.done(&beside.engine.submit_imm(its_peer, tag, 1).expect("submit"));
        other.count(&beside, counter, 1);
    }
    assert!(beside.end_within(&later, Duration::from_millis(20)).is_none(), "the GPU is busy");
    drop(busy);
    beside.done(&later);
    other.count(&beside, writes, 1);
    other.check(&beside, there, 0, BYTES, pattern);
    go_on();
}

/// A copy that the driver does not take, or takes half of, fails alone: it is not counted, and the
/// next one arrives and is.
fn refused_copies(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let (counter, tag) = other.counter(&me);
    assert!(refuse(0), "only the stand-in for the driver can be made to refuse");
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
            // Nor does a warp stand by, which is given no command; nor is one sent for, as so long after the last.
            me.linger(Duration::from_millis(5));
            go_on();
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

/// The first of several copies that one request begins is refused, while others of it are still to be put together: none of them passes
/// for it.
fn refused_among_others(case: &Case) {
    const PART: u64 = 64 << 10;
    const PARTS: u64 = 6;
    let (me, mut other, peer) = case.pair();
    assert!(refuse(0), "only the stand-in for the driver can be made to refuse");
    let src = me.engine.alloc_gpu(0, usize::try_from(PARTS * PART).expect("small"));
    let src = src.expect("memory of GPU 0");
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, PARTS * PART, 0);
    let there: Vec<_> = (0..PARTS).map(|_| other.memory(&me, PART, Own::Engine)).collect();
    // The peer tells where the memory is, first.
    for (at, (_, desc)) in (0..).zip(&there) {
        me.done(&write(&me, peer, &src, desc, (at * PART, 0, PART), None));
    }
    let target = |(at, (_, desc)): (u64, &(_, MrDesc))| Target {
        peer,
        dst: *desc,
        src_offset: at * PART,
        dst_offset: 0,
        len: PART,
    };
    let targets: Arc<[Target]> = (0..).zip(&there).map(target).collect();
    let mut refused = 0;
    for nth in 1..=12 {
        for (region, _) in &there {
            let (region, offset) = (*region, 0);
            other.tell(&me, Ask::Poison { region, offset, len: PART, byte: 0xa5 });
        }
        refuse(nth);
        let scatter = ScatterWrite { src: &src, targets: Arc::clone(&targets), imm: None };
        let end = me.end(&me.engine.submit_scatter(&scatter).expect("submit"));
        refuse(0);
        match end {
            immwire::End::Done => {
                for (at, (region, _)) in (0..).zip(&there) {
                    let (region, offset, len, at) = (*region, 0, PART, at * PART);
                    let wrong =
                        other.place(&me, Ask::Mismatch { region, offset, len, pattern, at });
                    assert_eq!(wrong, None, "command {nth}: the copy to {region}");
                }
            }
            immwire::End::Quiesced { error } => {
                assert!(error.to_string().contains("error 2"), "{error}");
                refused += 1;
            }
            end => panic!("{end:?}"),
        }
    }
    assert!(refused > 2, "{refused} were refused");
}

/// How many copies were made in this process by warps that stand by; `None`: the driver is not the stand-in, which counts.
fn stood_by() -> Option<u64> {
    let call: extern "C" fn() -> u64 = driver_s(c"immwire_fake_cuda_stood_by")?;
    Some(call())
}

/// Has warps of this process overlook what they are asked for. Only the stand-in for the driver can.
fn overlook(deaf: bool) {
    let call: Option<extern "C" fn(u32)> = driver_s(c"immwire_fake_cuda_deaf");
    if let Some(call) = call {
        call(u32::from(deaf));
    }
}

/// Short writes of any size, from and to anywhere, some by warps that come and go meanwhile, and sometimes have gone when they are asked:
/// each byte arrives, no other is written, and the count is exact.
fn short_writes(case: &Case) {
    const ROOM: u64 = 96 << 10;
    const SIZES: [u64; 9] = [1, 8, 15, 100, 4096, 4099, 32 << 10, (32 << 10) + 1, 20_000];
    const ENOUGH: u64 = 40;
    let (me, mut other, peer) = case.pair();
    let (there, desc) = other.memory(&me, ROOM, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let src = me.engine.alloc_gpu(0, usize::try_from(ROOM).expect("small")).expect("memory");
    let pattern = case.pattern(0);
    pattern.fill(&src, 0, ROOM, 0);
    let before = stood_by();
    let (stalls, start) = (Stalls::watch(), Instant::now());
    for round in 0_u64.. {
        // Until they have gone once more, what comes is too late for them.
        overlook(round % 16 == 13);
        // Two at once: so the second comes soon after the first, and warps are sent for. Two more, for those that are up by then: they stand by
        // for two milliseconds, and whoever looks at what has come takes longer where processors are shared.
        let size = |n: u64| SIZES[usize::try_from((round + n) % 9).expect("small")];
        let mut next = round % 64;
        let places = [0, 4, 2, 6].map(|n| {
            let (at, len) = (next, size(n));
            next += len + 64 + round % 5;
            (at, len)
        });
        let all = next;
        other.tell(&me, Ask::Poison { region: there, offset: 0, len: all, byte: 0xa5 });
        for pair in places.chunks(2) {
            let submit =
                |&(at, len): &(u64, u64)| write(&me, peer, &src, &desc, (at, at, len), Some(tag));
            let transfers: Vec<_> = pair.iter().map(submit).collect();
            transfers.iter().for_each(|transfer| me.done(transfer));
        }
        other.count(&me, counter, 4);
        let mut end = 0;
        for (at, len) in places {
            other.check_only(&me, there, end, at - end, 0xa5);
            let (region, offset) = (there, at);
            let wrong = other.place(&me, Ask::Mismatch { region, offset, len, pattern, at });
            assert_eq!(wrong, None, "round {round}: byte of {len} at {at}");
            end = at + len;
        }
        other.check_only(&me, there, end, all - end, 0xa5);
        // After some, they have gone.
        if round % 16 == 15 {
            me.linger(Duration::from_millis(10));
        }
        let by_warps = stood_by().zip(before).map(|(now, before)| now - before);
        if round >= 100 && by_warps.is_none_or(|made| made >= ENOUGH) {
            break;
        }
        let late = stalls.beyond(start, patience());
        assert_eq!(late, None, "{by_warps:?} of {} by warps", 4 * round);
    }
}

/// A stream that is captured, until it is told to end.
struct Captured<'a> {
    stream: &'a Stream,
}

impl<'a> Captured<'a> {
    /// `mode` is one of `CUstreamCaptureMode`.
    fn begin(stream: &'a Stream, mode: u32) -> Self {
        let begin: Option<extern "C" fn(*mut c_void, u32) -> u32> =
            driver_s(c"cuStreamBeginCapture_v2");
        let begun = Self::within(stream, || begin.expect("of the driver's")(stream.raw(), mode));
        assert_eq!(begun, 0, "cuStreamBeginCapture");
        Self { stream }
    }

    /// Makes the stream's context current for a call.
    fn within(stream: &Stream, call: impl FnOnce() -> u32) -> u32 {
        let push: Option<extern "C" fn(*mut c_void) -> u32> = driver_s(c"cuCtxPushCurrent_v2");
        let pop: Option<extern "C" fn(&mut *mut c_void) -> u32> = driver_s(c"cuCtxPopCurrent_v2");
        assert_eq!(push.expect("of the driver's")(stream.device().context()), 0);
        let answer = call();
        assert_eq!(pop.expect("of the driver's")(&mut std::ptr::null_mut()), 0);
        answer
    }

    /// How many nodes were captured.
    fn end(self) -> usize {
        type End = extern "C" fn(*mut c_void, &mut *mut c_void) -> u32;
        type Nodes = extern "C" fn(*mut c_void, *mut c_void, &mut usize) -> u32;
        let end: Option<End> = driver_s(c"cuStreamEndCapture");
        let nodes: Option<Nodes> = driver_s(c"cuGraphGetNodes");
        let destroy: Option<extern "C" fn(*mut c_void) -> u32> = driver_s(c"cuGraphDestroy");
        let (mut graph, mut count) = (std::ptr::null_mut(), 0);
        let ended = Self::within(self.stream, || {
            end.expect("of the driver's")(self.stream.raw(), &mut graph)
        });
        assert_eq!(ended, 0, "cuStreamEndCapture: the capture has failed");
        let there = nodes.expect("of the driver's")(graph, std::ptr::null_mut(), &mut count);
        assert_eq!((there, destroy.expect("of the driver's")(graph)), (0, 0));
        count
    }
}

/// An application captures a graph, in each of CUDA's modes: neither what is asked of its engine meanwhile nor what the engine does
/// disturbs that, and nothing of the engine's gets into the graph.
fn captures_of_graphs(case: &Case) {
    const LEN: usize = 64 << 10;
    const BYTES: u64 = LEN as u64;
    let (me, mut other, peer) = case.pair();
    let src = me.engine.alloc_gpu(0, LEN).expect("memory of GPU 0");
    let scratch = me.engine.alloc_gpu(0, LEN).expect("memory of GPU 0");
    let (there, desc) = other.memory(&me, BYTES, Own::Engine);
    let (counter, tag) = other.counter(&me);
    let awaited = Arc::new(me.engine.counter().expect("a counter"));
    let device = Device::open(0).expect("GPU 0");
    let stream = Stream::new(&device).expect("a stream");
    let copier = Copier::new(&stream, Tuning::default()).expect("a copier");
    let copy = PagedCopy::contiguous(src.as_ptr() as u64, scratch.as_ptr() as u64, BYTES);
    for mode in 0..3_u32 {
        let captured = Captured::begin(&stream, mode);
        // SAFETY: it is captured, and never done.
        unsafe { copier.submit(&copy, Release::Nothing, Method::CopyEngine, NonZeroU32::MIN) }
            .expect("submit");
        for round in 0..3 {
            let pattern = case.pattern(u64::from(3 * mode + round));
            pattern.fill(&src, 0, BYTES, 0);
            me.done(&write(&me, peer, &src, &desc, (0, 0, BYTES), Some(tag)));
            other.count(&me, counter, 1);
            other.check(&me, there, 0, BYTES, pattern);
            // SAFETY: a stream of the GPU's primary context.
            let behind = unsafe { me.engine.after_stream(0, stream.raw()) };
            assert!(matches!(behind, Err(RegisterError::Capturing)), "{behind:?}");
            let waits = hold(&me, &stream, &awaited, 1, patience()).map(drop);
            assert!(matches!(waits, Err(StreamWaitError::Capturing)), "{waits:?}");
            drop(me.engine.alloc_gpu(0, LEN).expect("memory of GPU 0"));
            drop(me.memory(BYTES, Own::Engine));
            drop(me.engine.alloc_gpu_flag(0).expect("a flag"));
            drop(me.engine.alloc_uvm_watcher(|_, _| {}).expect("a word"));
            device.synchronize().expect("what is captured is not to be waited for");
        }
        assert_eq!(captured.end(), 1, "the copy of ours, and nothing else");
    }
}

/// An engine is dropped while a GPU has not begun to read: the transfer ends when the GPU is through, not before.
fn the_end_waits_for_the_gpu(case: &Case) {
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

/// Stores numbers to words, as kernels do.
struct Storing {
    copier: Copier,
    bytes: DeviceMemory,
}

impl Storing {
    fn new() -> Self {
        let device = Device::open(0).expect("GPU 0");
        let stream = Stream::new(&device).expect("a stream");
        let bytes = DeviceMemory::zeroed(&stream, 128).expect("memory");
        Self { copier: Copier::new(&stream, Tuning::default()).expect("a copier"), bytes }
    }

    fn store(&self, watcher: &UvmWatcher, value: u64) {
        let (from, to) = (self.bytes.address(), self.bytes.address() + 64);
        let (copy, word) = (PagedCopy::contiguous(from, to, 64), watcher.address());
        let release = Release::Store { word, value };
        // SAFETY: memory and word are there until `drain`, which comes before they go; nobody else uses the memory.
        unsafe { self.copier.submit(&copy, release, Method::Auto, NonZeroU32::MIN) }
            .expect("submit");
    }

    fn drain(&self, host: &Host) {
        let is_done = || self.copier.stream().is_done().expect("no error").then_some(());
        host.until(patience(), is_done).expect("the GPU is through");
    }
}

/// What a callback was told.
type Told = Vec<(u64, u64)>;

/// Changes of words are told in order, each with the number told before, none twice, and the last one always.
fn watched_words(case: &Case) {
    const LAST: u64 = 500;
    let me = case.me();
    let storing = Storing::new();
    let told: Arc<[Mutex<Told>; 3]> = Arc::default();
    let watch = |n: usize| {
        let told = Arc::clone(&told);
        let note = move |old, new| told[n].lock().unwrap().push((old, new));
        me.engine.alloc_uvm_watcher(note).expect("a watcher")
    };
    let watchers = [watch(0), watch(1), watch(2)];
    for value in 1..=LAST {
        storing.store(&watchers[usize::try_from(value % 2).expect("small")], value);
    }
    storing.drain(&me);
    for (n, last) in [(0, LAST), (1, LAST - 1)] {
        let has_all = || told[n].lock().unwrap().last().is_some_and(|told| told.1 == last);
        me.until(patience(), || has_all().then_some(())).expect("the last is told");
        assert_eq!(watchers[n].value(), last);
        let told = told[n].lock().unwrap();
        let old = std::iter::once(0).chain(told.iter().map(|told| told.1));
        assert!(old.zip(told.iter()).all(|(before, &(old, new))| old == before && new > old));
    }
    assert!(told[2].lock().unwrap().is_empty());
}

/// Watchers are dropped while others are watched, by their own callback too; their places are used again, and a callback
/// that holds the engine ends it.
fn watchers_come_and_go(case: &Case) {
    let (me, _other, peer) = case.pair();
    let storing = Storing::new();
    // More than a page has, and that twice.
    let calls = Arc::new(AtomicU64::new(0));
    for round in 1..=2 {
        let watchers: Vec<_> = (0..600)
            .map(|_| {
                let calls = Arc::clone(&calls);
                let count = move |old, _| {
                    assert_eq!(old, 0);
                    calls.fetch_add(1, Ordering::Relaxed);
                };
                me.engine.alloc_uvm_watcher(count).expect("a watcher")
            })
            .collect();
        assert!(watchers.iter().all(|it| it.value() == 0 && it.address().is_multiple_of(8)));
        let mut addresses: Vec<_> = watchers.iter().map(UvmWatcher::address).collect();
        addresses.sort_unstable();
        addresses.dedup();
        assert_eq!(addresses.len(), 600);
        for watcher in watchers.iter().step_by(100) {
            storing.store(watcher, 7);
        }
        storing.drain(&me);
        let all = || (calls.load(Ordering::Relaxed) == 6 * round).then_some(());
        me.until(patience(), all).expect("all are told");
    }
    // One whose callback panics is told again; one whose callback drops it is not.
    let seat: Arc<Mutex<Option<UvmWatcher>>> = Arc::default();
    let (mine, engine) = (Arc::clone(&seat), me.engine.clone());
    let calls = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&calls);
    let leave = move |_, new| {
        count.fetch_add(1, Ordering::Relaxed);
        assert_ne!(new, 1, "what a callback panics with");
        // Who was kept from running is suspected.
        let state = engine.peer_state(peer);
        assert!(matches!(state, Some(PeerState::Up | PeerState::Suspect)), "{state:?}");
        drop(mine.lock().unwrap().take());
    };
    *seat.lock().unwrap() = Some(me.engine.alloc_uvm_watcher(leave).expect("a watcher"));
    for value in 1..=2 {
        storing.store(seat.lock().unwrap().as_ref().expect("not yet"), value);
        storing.drain(&me);
        let told = || (calls.load(Ordering::Relaxed) == value).then_some(());
        me.until(patience(), told).expect("told");
    }
    let gone = || seat.lock().unwrap().is_none().then_some(());
    me.until(patience(), gone).expect("dropped");
    // An engine that only a callback keeps goes with its watcher.
    let third = case.me();
    let known = me.engine.peers();
    third.peer(me.engine.address());
    let new = || me.engine.peers().into_iter().find(|peer| !known.contains(peer));
    let theirs = me.until(patience(), new).expect("the third");
    let held = third.engine.clone();
    let last = third
        .engine
        .alloc_uvm_watcher(move |_, _| assert!(!held.nics().is_empty()))
        .expect("a watcher");
    drop(third);
    me.linger(Duration::from_millis(100));
    assert_eq!(me.stands(theirs), Some(PeerState::Up));
    drop(last);
    let state = me.peer_down(theirs, patience());
    assert!(matches!(state, Some(PeerState::Down(_))), "{state:?}");
    // Where one callback ends the engine, none follows it, though its word has changed.
    let fourth = case.me();
    let late = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&late);
    let call = move |_, _| _ = count.fetch_add(1, Ordering::Relaxed);
    let kept = Arc::new(Mutex::new(None));
    let (mine, ended) = (Arc::clone(&kept), Arc::new(AtomicU64::new(0)));
    let end = Arc::clone(&ended);
    let first = fourth.engine.alloc_uvm_watcher(move |_, _| {
        let (engine, second): (TransferEngine, Arc<UvmWatcher>) =
            mine.lock().unwrap().take().expect("called once");
        let word = with_exposed_provenance_mut(usize::try_from(second.address()).unwrap());
        // SAFETY: the watcher's word, which is the CPU's, too, and aligned; all who use it do so atomically.
        unsafe { AtomicU64::from_ptr(word) }.store(1, Ordering::Relaxed);
        drop(engine);
        end.store(1, Ordering::Relaxed);
    });
    let first = first.expect("a watcher");
    let second = Arc::new(fourth.engine.alloc_uvm_watcher(call).expect("a watcher"));
    *kept.lock().unwrap() = Some((fourth.engine.clone(), Arc::clone(&second)));
    drop(fourth);
    storing.store(&first, 1);
    storing.drain(&me);
    me.until(patience(), || (ended.load(Ordering::Relaxed) == 1).then_some(())).expect("ended");
    me.linger(Duration::from_millis(20));
    assert_eq!((late.load(Ordering::Relaxed), second.value()), (0, 1));
}

/// Has a stream of GPU 0 wait.
fn hold(
    me: &Host,
    stream: &Stream,
    counter: &Arc<ImmCounter>,
    writes: u64,
    limit: Duration,
) -> Result<StreamWait, StreamWaitError> {
    // SAFETY: a stream of the GPU's primary context; it outlives the call.
    unsafe { me.engine.wait_on_stream(0, stream.raw(), counter, writes, limit) }
}

fn passes(me: &Host, stream: &Stream) {
    let is_done = || stream.is_done().expect("no error").then_some(());
    me.until(patience(), is_done).expect("the stream goes on");
}

/// What a stream is given behind a wait finds the bytes that were counted, whether they came before or after.
fn streams_wait_for_counts(case: &Case) {
    const LEN: usize = 64 << 10;
    const BYTES: u64 = LEN as u64;
    let (me, mut other, _) = case.pair();
    let src = other.memory(&me, BYTES, Own::Engine).0;
    let [landing, seen] = [(); 2].map(|()| me.engine.alloc_gpu(0, LEN).expect("memory"));
    let counter = Arc::new(me.engine.counter().expect("a counter"));
    let device = Device::open(0).expect("GPU 0");
    let stream = Stream::new(&device).expect("a stream");
    let copier = Copier::new(&stream, Tuning::default()).expect("a copier");
    let copy = PagedCopy::contiguous(landing.as_ptr() as u64, seen.as_ptr() as u64, BYTES);
    let word = PinnedMemory::zeroed(&device, 8).expect("pinned");
    let peer = plain(other.peer(&me, me.engine.address()));
    for round in 0..20 {
        let pattern = case.pattern(round);
        let writes = 1 + round % 3;
        other.tell(&me, Ask::Fill { region: src, offset: 0, len: BYTES, pattern, at: 0 });
        let (dst, tag) = (encode(&landing.desc()), Some(counter.tag().bits()));
        let write = Write1 { peer, src, src_offset: 0, dst, dst_offset: 0, len: BYTES, tag };
        // None, some or all of them are there when the stream begins to wait.
        let early = (round / 3) % (writes + 1);
        let mut arrive = |count| {
            for _ in 0..count {
                assert_eq!(other.ask(&me, Ask::Write(write.clone())), Say::Text("Done".into()));
            }
        };
        arrive(early);
        let there = || (counter.available() == early).then_some(());
        me.until(patience(), there).expect("early ones");
        let wait = hold(&me, &stream, &counter, writes, patience()).expect("a wait");
        let release = Release::Store { word: word.address(), value: round + 1 };
        // SAFETY: regions and word are there until the stream is through, which is waited for; nobody else uses `seen`.
        unsafe { copier.submit(&copy, release, Method::Auto, NonZeroU32::MIN) }.expect("submit");
        if early < writes {
            let second = hold(&me, &stream, &counter, 1, patience()).map(drop);
            assert!(matches!(second, Err(StreamWaitError::Count(CountError::Busy))), "{second:?}");
            arrive(writes - early - 1);
            me.linger(Duration::from_millis(5));
            assert!(!stream.is_done().expect("no error") && wait.poll().is_none());
            assert_eq!(word.word(0).expect("a word").load(Ordering::Acquire), round);
            arrive(1);
        }
        passes(&me, &stream);
        assert_eq!(wait.poll(), Some(Ok(())));
        assert_eq!((pattern.mismatch(&seen, 0, BYTES, 0), counter.available()), (None, 0));
    }
}

/// A stream that waits for a flag to be so large goes on when as many writes have arrived, and finds their bytes; step after step,
/// with nothing that the application does in between.
fn flags_follow_counters(case: &Case) {
    const LEN: usize = 64 << 10;
    const BYTES: u64 = LEN as u64;
    let (me, mut other, _) = case.pair();
    let src = other.memory(&me, BYTES, Own::Engine).0;
    let [landing, seen] = [(); 2].map(|()| me.engine.alloc_gpu(0, LEN).expect("memory"));
    let counter = Arc::new(me.engine.counter().expect("a counter"));
    let flag = Arc::new(me.engine.alloc_gpu_flag(0).expect("a flag"));
    let device = Device::open(0).expect("GPU 0");
    let stream = Stream::new(&device).expect("a stream");
    let copier = Copier::new(&stream, Tuning::default()).expect("a copier");
    let copy = PagedCopy::contiguous(landing.as_ptr() as u64, seen.as_ptr() as u64, BYTES);
    let word = PinnedMemory::zeroed(&device, 8).expect("pinned");
    let peer = plain(other.peer(&me, me.engine.address()));
    let two = NonZeroU64::new(2).expect("two");
    let following = flag.follow(&counter, two).expect("a counter that nobody waits for");
    for step in 1..=20 {
        let pattern = case.pattern(step);
        other.tell(&me, Ask::Fill { region: src, offset: 0, len: BYTES, pattern, at: 0 });
        let (dst, tag) = (encode(&landing.desc()), Some(counter.tag().bits()));
        let write = Write1 { peer, src, src_offset: 0, dst, dst_offset: 0, len: BYTES, tag };
        let mut arrive =
            || assert_eq!(other.ask(&me, Ask::Write(write.clone())), Say::Text("Done".into()));
        let release = Release::Store { word: word.address(), value: step };
        // SAFETY: flag, regions and word are there until the stream is through, which is waited for; nobody else uses `seen`.
        unsafe {
            stream.after_word(flag.address(), step).expect("a wait");
            copier.submit(&copy, release, Method::Auto, NonZeroU32::MIN).expect("submit");
        }
        arrive();
        me.linger(Duration::from_millis(2));
        assert!(!stream.is_done().expect("no error") && flag.value() == step - 1);
        assert_eq!(word.word(0).expect("a word").load(Ordering::Acquire), step - 1);
        arrive();
        passes(&me, &stream);
        assert_eq!((pattern.mismatch(&seen, 0, BYTES, 0), flag.value()), (None, step));
    }
    assert!(following.why_over().is_none());
    drop(following);
    let (dst, tag) = (encode(&landing.desc()), Some(counter.tag().bits()));
    let write = Write1 { peer, src, src_offset: 0, dst, dst_offset: 0, len: BYTES, tag };
    for arrived in 1..=2 {
        assert_eq!(other.ask(&me, Ask::Write(write.clone())), Say::Text("Done".into()));
        let there = || (counter.available() == arrived).then_some(());
        me.until(patience(), there).expect("a write that is nobody's step");
    }
    assert_eq!(flag.value(), 20);
}

/// A stream goes on at its deadline, when the engine ends, and when the driver does not take the wait; its counter is as
/// good as before.
fn waits_of_streams_end(case: &Case) {
    let (me, mut other, _) = case.pair();
    let device = Device::open(0).expect("GPU 0");
    let stream = Stream::new(&device).expect("a stream");
    let counter = || Arc::new(me.engine.counter().expect("a counter"));
    // More than a page has words, and words that are used again.
    for _ in 0..2 {
        let limit = Duration::from_millis(50);
        let waits: Vec<_> =
            (0..600).map(|_| hold(&me, &stream, &counter(), 1, limit).expect("a wait")).collect();
        passes(&me, &stream);
        for wait in &waits {
            let end = wait.poll().expect("it is there before the stream goes on");
            let Err(CountError::Timeout { target: 1, missing: 1, after, .. }) = end else {
                panic!("{end:?}")
            };
            assert_eq!(after, limit);
        }
    }
    let (first, second) = (counter(), counter());
    // SAFETY: the stream is not used: there is no such GPU.
    let absent = unsafe { me.engine.wait_on_stream(9, stream.raw(), &first, 1, patience()) };
    assert!(
        matches!(absent, Err(StreamWaitError::Memory(RegisterError::NoGpu { ordinal: 9 }))),
        "{absent:?}"
    );
    // A GPU's driver may have whoever gives a stream so much wait for the stream.
    if refuse(0) {
        let held = hold(&me, &stream, &second, 1, Duration::MAX).expect("a wait");
        let mut words = 1;
        let full = loop {
            match hold(&me, &stream, &first, 1, Duration::ZERO) {
                Ok(wait) => assert!(me.until(patience(), || wait.poll()).is_some()),
                Err(why) => break why,
            }
            words += 1;
            assert!(words < 10_000, "a word was used twice");
        };
        assert!(
            matches!(full, StreamWaitError::Full { capacity } if capacity == words),
            "{full:?}"
        );
        assert!(held.poll().is_none());
        let peer = plain(other.peer(&me, me.engine.address()));
        let tag = second.tag().bits();
        let done = other.ask(&me, Ask::Imm { peer, tag, writes: 1 });
        assert_eq!((done, held.wait(patience())), (Say::Text("Done".into()), Some(Ok(()))));
        passes(&me, &stream);
        // However many of another stream are held, those that are over are free.
        let beside = Stream::new(&device).expect("a stream");
        let many: Vec<_> = (0..40).map(|_| counter()).collect();
        let at = |counter| hold(&me, &beside, counter, 1, Duration::MAX).expect("a wait");
        let held: Vec<_> = many.iter().map(at).collect();
        for round in 0..words {
            let wait = hold(&me, &stream, &first, 1, Duration::ZERO);
            let wait = wait.unwrap_or_else(|why| panic!("{why} after {round} of {words}"));
            assert!(me.until(patience(), || wait.poll()).is_some());
            passes(&me, &stream);
        }
        for counter in &many {
            let tag = counter.tag().bits();
            let done = other.ask(&me, Ask::Imm { peer, tag, writes: 1 });
            assert_eq!(done, Say::Text("Done".into()));
        }
        assert!(held.iter().all(|wait| wait.wait(patience()) == Some(Ok(()))));
        passes(&me, &beside);
    }
    if refuse(1) {
        let refused = hold(&me, &stream, &first, 1, patience());
        refuse(0);
        assert!(matches!(refused, Err(StreamWaitError::Driver(_))), "{refused:?}");
        passes(&me, &stream);
    }
    // What timed out, or was refused, can be waited for again; whether anybody looks or not.
    let late = hold(&me, &stream, &first, 2, Duration::from_millis(20)).expect("a wait");
    passes(&me, &stream);
    assert!(matches!(late.wait(patience()), Some(Err(CountError::Timeout { missing: 2, .. }))));
    drop(hold(&me, &stream, &first, 2, patience()).expect("a wait"));
    let peer = plain(other.peer(&me, me.engine.address()));
    let tag = first.tag().bits();
    let mut arrive = || {
        let done = other.ask(&me, Ask::Imm { peer, tag, writes: 1 });
        assert_eq!(done, Say::Text("Done".into()));
    };
    arrive();
    me.linger(Duration::from_millis(5));
    assert!(!stream.is_done().expect("no error"));
    arrive();
    passes(&me, &stream);
    let wait = hold(&me, &stream, &second, 1, Duration::MAX).expect("a wait");
    assert!(!stream.is_done().expect("no error"));
    drop((first, second, late));
    me.drop_driver_first();
    assert_eq!(wait.poll(), Some(Err(CountError::EngineStopped)));
    let start = std::time::Instant::now();
    while !stream.is_done().expect("no error") {
        assert!(start.elapsed() < patience(), "the stream goes on");
    }
}
