//! Where GPUs' memory goes by way of the host's.

use std::num::NonZeroU32;
use std::ptr::NonNull;
use std::time::Duration;

use immwire::core::staging::{Signal, StagedKey};
use immwire::staging::StagingError;
use immwire::{BuildError, DownReason, End, MrDesc, PeerState, Rights, Staging, TransferEngine};
use immwire_cuda::{Device, DeviceMemory, Stream};
use rustix::param::page_size;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::agent::{Ask, Say, Write1, encode, plain};
use crate::gpus::{GIVES_UP_WITHIN, goes_within, refuse};
use crate::host::{Host, Own, Setup, first_other, names, patience, poison};
use crate::operations::{only_peer, write};
use crate::segment::{go_on, held_up, stick};
use crate::{Case, Provider, Spread, Test};

pub const TESTS: &[Test] = &[
    ("copies_refused_at_either_end", Spread::Places, copies_refused_at_either_end),
    ("every_way_at_once", Spread::Places, every_way_at_once),
    ("a_broken_rule_costs_the_peer", Spread::ProcessesBothMotors, a_broken_rule_costs_the_peer),
    ("stuck_where_it_is_read", Spread::ProcessesBothMotors, stuck_where_it_is_read),
    ("stuck_where_it_is_written", Spread::ProcessesBothMotors, stuck_where_it_is_written),
    ("who_does_not_stage", Spread::ProcessesBothMotors, who_does_not_stage),
    ("what_is_not_to_be_written", Spread::ProcessesBothMotors, what_is_not_to_be_written),
    ("asked_for_in_vain", Spread::Once, asked_for_in_vain),
];

/// Among more than two, to none of which there is another way.
pub const ALL_STAGED: &[Test] = &[
    ("others_go_past_a_slow_gpu", Spread::ProcessesBothMotors, others_go_past_a_slow_gpu),
    ("nobody_gets_what_is_still_read", Spread::Once, nobody_gets_what_is_still_read),
    ("a_pool_has_room_for_so_many", Spread::Once, a_pool_has_room_for_so_many),
];

/// Whether peers write to a region by way of their and our slots.
pub fn is_staged(desc: &MrDesc) -> bool {
    // With shared memory beside them NICs come after it.
    desc.keys.as_slice().last().is_some_and(|key| StagedKey::of(*key).is_some())
}

/// A copy that a driver does not take, of the sender's or the receiver's, fails alone: it is not counted, and the next one
/// arrives and is.
fn copies_refused_at_either_end(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let (counter, tag) = other.counter(&me);
    assert!(refuse(0), "only the stand-in for the driver can be made to refuse");
    let src = me.engine.alloc_gpu(0, 64 << 10).expect("memory of GPU 0");
    let mut refused = 0;
    for (n, bytes) in [64, 64 << 10].into_iter().enumerate() {
        let (there, desc) = other.memory(&me, bytes, Own::Engine);
        let pattern = case.pattern(n as u64);
        pattern.fill(&src, 0, bytes, 0);
        let submit = || write(&me, peer, &src, &desc, (0, 0, bytes), Some(tag));
        // In one process both ends have one driver.
        for nth in 1..=4 {
            refuse(nth);
            let end = me.end(&submit());
            refuse(0);
            match end {
                End::Done => other.count(&me, counter, 1),
                End::Quiesced { error } => {
                    assert!(error.to_string().contains("the device reported"), "{error}");
                    refused += 1;
                }
                End::NeverStarted { error } => panic!("{error}"),
            }
            other.tell(&me, Ask::Poison { region: there, offset: 0, len: bytes, byte: 0xa5 });
            me.done(&submit());
            // No more than that one: the count is exact.
            other.count(&me, counter, 1);
            assert_eq!(other.number(&me, Ask::Available { counter }), 0);
            other.check(&me, there, 0, bytes, pattern);
        }
    }
    assert!(refused >= 2, "nothing was refused");
}

/// From a GPU's memory and the host's to both, more than there are slots, in both directions: all of it arrives, and is
/// counted.
fn every_way_at_once(case: &Case) {
    const BYTES: u64 = (5 << 20) + 13;
    let (me, mut other, peer) = case.pair();
    let back = plain(only_peer(&me, &mut other));
    let len = usize::try_from(BYTES).expect("small");
    let gpu = Device::count().expect("GPUs") - 1;
    let sources = [me.engine.alloc_gpu(gpu, len), me.engine.alloc(len)].map(|it| it.expect("it"));
    let ours = [me.engine.alloc_gpu(0, len), me.engine.alloc(len)].map(|it| it.expect("it"));
    let mine = me.engine.counter().expect("a counter");
    let (counter, tag) = other.counter(&me);
    // By turns of two GPUs and the host.
    let theirs: Vec<_> = (0..3).map(|_| other.memory(&me, BYTES, Own::Engine)).collect();
    assert!(theirs.iter().any(|it| is_staged(&it.1)) && theirs.iter().any(|it| !is_staged(&it.1)));
    for round in 0..3_u64 {
        let pattern = case.pattern(round);
        for source in &sources {
            pattern.fill(source, 0, BYTES, 0);
        }
        let all = || sources.iter().flat_map(|src| theirs.iter().map(move |it| (src, &it.1)));
        let begin = |(src, desc)| write(&me, peer, src, desc, (0, 0, BYTES), Some(tag));
        let transfers: Vec<_> = all().map(begin).collect();
        other.count(&me, counter, transfers.len() as u64);
        for transfer in &transfers {
            me.done(transfer);
        }
        for (there, _) in &theirs {
            other.check(&me, *there, 0, BYTES, pattern);
        }
        for (there, _) in &theirs {
            for region in &ours {
                poison(region, 0, BYTES, 0xa5);
                let (src, dst) = (*there, encode(&region.desc()));
                let tag = Some(mine.tag().bits());
                let (src_offset, dst_offset) = (3, 3);
                let len = BYTES - 3;
                let write = Write1 { peer: back, src, src_offset, dst, dst_offset, len, tag };
                assert_eq!(other.ask(&me, Ask::Write(write)), Say::Text("Done".into()));
                me.count(&mine, 1, patience()).expect("the write");
                assert_eq!(pattern.mismatch(region, 3, BYTES - 3, 3), None);
                assert_eq!(first_other(region, 0, 3, 0xa5), None);
            }
        }
    }
    assert_eq!(other.number(&me, Ask::Available { counter }), 0);
}

/// A region of the agent's that is staged, or is not.
fn theirs(me: &Host, other: &mut crate::Agent, bytes: u64, staged: bool) -> (usize, MrDesc) {
    loop {
        let (there, desc) = other.memory(me, bytes, Own::Engine);
        if is_staged(&desc) == staged {
            return (there, desc);
        }
    }
}

/// While a peer's GPU takes nothing, and pieces wait for landing slots, the peer is not lost; messages, writes to host memory
/// and counts reach it, and others' GPUs are written. Then all of what waited arrives.
fn others_go_past_a_slow_gpu(case: &Case) {
    const BYTES: u64 = 5 << 20;
    const SILENT_MS: u64 = 4000;
    let setup = Setup { silent_ms: Some(SILENT_MS), ..case.setup(case.nics.0) };
    let me = Host::new(&setup);
    let mut other = case.bare_agent("other");
    let address = other.build(&Setup { nics: case.nics.1, ..setup });
    let peer = me.peer(&address);
    let back = plain(only_peer(&me, &mut other));
    let (mut third, address) = case.agent("third");
    let other_peer = me.peer(&address);
    let src = me.engine.alloc(usize::try_from(BYTES).expect("small")).expect("memory");
    let pattern = case.pattern(1);
    pattern.fill(&src, 0, BYTES, 0);
    let (counter, tag) = other.counter(&me);
    let (small, small_tag) = other.counter(&me);
    let (on_gpu, gpu_desc) = theirs(&me, &mut other, BYTES, true);
    let (on_host, host_desc) = theirs(&me, &mut other, 4096, false);
    let (at_third, third_desc) = theirs(&me, &mut third, BYTES, true);
    let (third_counter, third_tag) = third.counter(&me);
    other.tell(&me, Ask::Hold { held: true });
    // Many times what there are landing slots for.
    let waiting: Vec<_> =
        (0..4).map(|_| write(&me, peer, &src, &gpu_desc, (0, 0, BYTES), Some(tag))).collect();
    for round in 0..20 {
        me.done(&write(&me, peer, &src, &host_desc, (0, 0, 64), Some(small_tag)));
        me.done(&me.engine.submit_imm(peer, small_tag, 1).expect("submit"));
        other.count(&me, small, 2);
        me.done(&me.engine.submit_send(peer, &[round]).expect("submit"));
        let ms = u64::try_from(patience().as_millis()).expect("small");
        let got = other.ask(&me, Ask::Recv { ms });
        assert_eq!(got, Say::Message { from: back, bytes: vec![round] });
    }
    other.check(&me, on_host, 0, 64, pattern);
    me.done(&write(&me, other_peer, &src, &third_desc, (0, 0, BYTES), Some(third_tag)));
    third.count(&me, third_counter, 1);
    third.check(&me, at_third, 0, BYTES, pattern);
    // Nothing else is sent: who hears nothing takes the other for gone.
    let seen = other.ask(&me, Ask::Down { peer: back, ms: SILENT_MS * 3 / 2 });
    assert!(matches!(&seen, Say::Text(state) if !state.contains("Down")), "{seen:?}");
    assert!(matches!(me.engine.peer_state(peer), Some(PeerState::Up | PeerState::Suspect)));
    assert!(waiting.iter().all(|transfer| transfer.poll_end().is_none()), "its GPU was held");
    assert_eq!(other.number(&me, Ask::Available { counter }), 0);
    other.tell(&me, Ask::Hold { held: false });
    waiting.iter().for_each(|transfer| me.done(transfer));
    other.count(&me, counter, 4);
    other.check(&me, on_gpu, 0, BYTES, pattern);
}

/// Who says that something lies in a landing slot where nothing does is lost, as by any other rule that it breaks, and what is in
/// flight to it ends first.
fn a_broken_rule_costs_the_peer(case: &Case) {
    const BYTES: u64 = 5 << 20;
    let (me, mut other, peer) = case.pair();
    let back = plain(only_peer(&me, &mut other));
    let src = me.engine.alloc(usize::try_from(BYTES).expect("small")).expect("memory");
    let (_, desc) = theirs(&me, &mut other, BYTES, true);
    other.tell(&me, Ask::Hold { held: true });
    let waiting: Vec<_> =
        (0..2).map(|_| write(&me, peer, &src, &desc, (0, 0, BYTES), None)).collect();
    let lie = Signal::Landed(16).encode().bits();
    let _ = other.ask(&me, Ask::Lie { peer: back, imm: lie });
    let down = me.peer_down(peer, patience());
    assert!(matches!(down, Some(PeerState::Down(DownReason::Protocol))), "{down:?}");
    for transfer in &waiting {
        assert!(names(me.end(transfer), peer));
    }
    other.tell(&me, Ask::Hold { held: false });
}

/// An engine that is dropped while its GPU is stuck does not wait for it for good; what the GPU was to read and write is
/// there when it goes on. The stand-in for the driver ends processes in which it is not.
fn stuck_where_it_is_read(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let (_, desc) = theirs(&me, &mut other, 64 << 10, true);
    let src = me.engine.alloc_gpu(0, 64 << 10).expect("memory of GPU 0");
    me.done(&write(&me, peer, &src, &desc, (0, 0, 64 << 10), None));
    assert!(stick(true), "only the stand-in for the driver can be held");
    let transfer = write(&me, peer, &src, &desc, (0, 0, 64 << 10), None);
    me.until(patience(), || (held_up() > 0).then_some(())).expect("it is to be read");
    goes_within(GIVES_UP_WITHIN, || _ = stick(false), move || drop((src, me)));
    assert!(transfer.poll_end().is_some_and(|end| end != End::Done));
    assert!(held_up() > 0, "it was waited for");
    stick(false);
    go_on();
}

/// The same where it is written.
fn stuck_where_it_is_written(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let (_, desc) = theirs(&me, &mut other, 64 << 10, true);
    let src = me.engine.alloc(64 << 10).expect("memory");
    me.done(&write(&me, peer, &src, &desc, (0, 0, 64 << 10), None));
    other.tell(&me, Ask::Hold { held: true });
    let transfer = write(&me, peer, &src, &desc, (0, 0, 64 << 10), None);
    let is_held = || (other.number(&me, Ask::HeldUp) > 0).then_some(());
    me.until(patience(), is_held).expect("it is to be written");
    other.tell(&me, Ask::Drop);
    assert_ne!(me.end(&transfer), End::Done);
    assert_ne!(other.number(&me, Ask::HeldUp), 0, "it was waited for");
    other.tell(&me, Ask::Hold { held: false });
    other.tell(&me, Ask::GoOn);
}

/// An area that a GPU still reads is no other peer's, and a region that it still writes is not closed, though who wrote it is gone.
fn nobody_gets_what_is_still_read(case: &Case) {
    let builder = (Provider::named(case.provider).builder)(&case.setup(1));
    let Err(BuildError::Staging(StagingError::TooSmall { least, .. })) =
        builder.clone().staging(Staging { bytes: 1 << 20 }).build_polled()
    else {
        panic!("a pool of 1 MiB will do")
    };
    let (engine, driver) =
        builder.staging(Staging { bytes: least }).build_polled().expect("an engine");
    let me = Host::polled(engine, driver);
    let (mut first, _) = case.agent("first");
    let (mut second, _) = case.agent("second");
    let there = Ask::TryPeer { address: me.engine.address().to_string() };
    let Say::Peer(one) = first.ask(&me, there.clone()) else { panic!("the first is refused") };
    let region = me.engine.alloc_gpu(0, 4096).expect("memory");
    let (src, _) = first.memory(&me, 4096, Own::Engine);
    assert!(stick(true), "only the stand-in for the driver can be held");
    let (dst, tag, src_offset, dst_offset, len) = (encode(&region.desc()), None, 0, 0, 4096);
    first.post(Ask::Write(Write1 { peer: one, src, src_offset, dst, dst_offset, len, tag }));
    let peer = me.engine.peers()[0];
    me.until(patience(), || (held_up() > 0).then_some(())).expect("it has landed");
    drop(first);
    let down = me.peer_down(peer, patience());
    assert!(matches!(down, Some(PeerState::Down(_))), "{down:?}");
    for _ in 0..5 {
        let refused = second.ask(&me, there.clone());
        assert!(matches!(&refused, Say::Text(why) if why.contains("no room")), "{refused:?}");
    }
    let kept = me.close(region, Duration::from_millis(100)).expect_err("it is written");
    stick(false);
    let in_ = me.until(patience(), || match second.ask(&me, there.clone()) {
        Say::Peer(peer) => Some(peer),
        _ => None,
    });
    assert!(in_.is_some(), "there is room again");
    drop(kept);
}

/// Who does not stage is written to by who does, from a GPU's memory too; the other way host memory goes, and a GPU's is
/// refused, which costs nobody the connection.
fn who_does_not_stage(case: &Case) {
    let plainly = case.facts().stages.expect("without staging").to_owned();
    let me = Host::new(&Setup { provider: plainly, ..case.setup(case.nics.0) });
    let (mut other, address) = case.agent("other");
    let peer = me.peer(&address);
    let back = plain(only_peer(&me, &mut other));
    let src = me.engine.alloc(4096).expect("memory of the host");
    let (counter, tag) = other.counter(&me);
    let mine = me.engine.counter().expect("a counter");
    let mut staged = 0;
    for n in 0..6 {
        let pattern = case.pattern(n);
        pattern.fill(&src, 0, 4096, 0);
        let (there, desc) = other.memory(&me, 4096, Own::Engine);
        let end = me.end(&write(&me, peer, &src, &desc, (0, 0, 4096), Some(tag)));
        if is_staged(&desc) {
            staged += 1;
            let End::Quiesced { error } = end else { panic!("{end:?}") };
            assert!(error.to_string().contains("the peer refused access"), "{error}");
        } else {
            assert_eq!(end, End::Done);
            other.count(&me, counter, 1);
            other.check(&me, there, 0, 4096, pattern);
        }
        let fill = Ask::Fill { region: there, offset: 0, len: 4096, pattern, at: 0 };
        other.tell(&me, fill);
        poison(&src, 0, 4096, 0);
        let (src_offset, dst_offset, len) = (0, 0, 4096);
        let (dst, tag) = (encode(&src.desc()), Some(mine.tag().bits()));
        let write = Write1 { peer: back, src: there, src_offset, dst, dst_offset, len, tag };
        assert_eq!(other.ask(&me, Ask::Write(write)), Say::Text("Done".into()));
        me.count(&mine, 1, patience()).expect("the write");
        assert_eq!(pattern.mismatch(&src, 0, 4096, 0), None);
    }
    assert!(staged >= 2, "none was a GPU's");
    assert_eq!(me.stands(peer), Some(PeerState::Up));
}

/// Memory for local use, or behind a region's end, or of a region that was closed, is not written, whatever a peer believes; nor
/// does it cost the connection.
fn what_is_not_to_be_written(case: &Case) {
    let (me, mut other, peer) = case.pair();
    let back = plain(only_peer(&me, &mut other));
    let (src, _) = other.memory(&me, 8192, Own::Engine);
    let pattern = case.pattern(0);
    other.tell(&me, Ask::Fill { region: src, offset: 0, len: 8192, pattern, at: 0 });
    let mut written = |desc: MrDesc, dst_offset, len| {
        let (dst, tag, src_offset) = (encode(&desc), None, 0);
        let write = Write1 { peer: back, src, src_offset, dst, dst_offset, len, tag };
        match other.ask(&me, Ask::Write(write)) {
            Say::Text(end) => end,
            said => panic!("{said:?}"),
        }
    };
    let device = Device::open(0).expect("GPU 0");
    let stream = Stream::new(&device).expect("a stream");
    let memory = DeviceMemory::zeroed(&stream, 8192).expect("memory of GPU 0");
    device.synchronize().expect("zeroed");
    let ptr = NonNull::new(memory.address() as *mut u8).expect("an address");
    let register = |len, rights| {
        // SAFETY: allocated as long as the engine is there.
        let region = unsafe { me.engine.register(ptr, len, rights) };
        let region = region.expect("register");
        assert!(is_staged(&region.desc()));
        region
    };
    let whole = register(8192, Rights::LOCAL);
    poison(&whole, 0, 8192, 0xa5);
    let refused = |end: String| assert!(end.contains("RemoteAccess"), "{end}");
    refused(written(MrDesc { rights: Rights::REMOTE_WRITE, ..whole.desc() }, 0, 8));
    let half = register(4096, Rights::REMOTE_WRITE);
    let longer = MrDesc { len: 8192, ..half.desc() };
    refused(written(longer, 4096, 1));
    refused(written(longer, 4000, 97));
    // Where the first byte is not called 0.
    if let Some(base) = longer.base.checked_sub(1) {
        refused(written(MrDesc { base, ..longer }, 0, 8));
    }
    assert_eq!(first_other(&whole, 0, 8192, 0xa5), None);
    assert_eq!(written(longer, 4000, 96), "Done");
    poison(&whole, 0, 8192, 0xa5);
    let (gone, desc) = (half.desc(), half);
    me.close(desc, patience()).expect("nobody writes");
    refused(written(gone, 0, 8));
    // Another takes its number.
    let next = register(4096, Rights::REMOTE_WRITE);
    refused(written(gone, 0, 8));
    assert_eq!(first_other(&whole, 0, 8192, 0xa5), None);
    assert_eq!(written(next.desc(), 0, 4096), "Done");
    assert_eq!(pattern.mismatch(&whole, 0, 4096, 0), None);
    assert_eq!(me.stands(peer), Some(PeerState::Up));
    for region in [next, whole] {
        me.close(region, patience()).expect("nobody writes");
    }
}

/// The smallest pool is for one peer. The next is refused, which costs the first nothing; when that is gone, it is let in.
fn a_pool_has_room_for_so_many(case: &Case) {
    let builder = (Provider::named(case.provider).builder)(&case.setup(1));
    let too_small = builder.clone().staging(Staging { bytes: 1 << 20 }).build_polled();
    let Err(BuildError::Staging(StagingError::TooSmall { bytes, least })) = too_small else {
        panic!("a pool of 1 MiB will do")
    };
    assert_eq!(bytes, 1 << 20);
    let smallest = builder.staging(Staging { bytes: least });
    let (engine, driver) = smallest.build_polled().expect("an engine");
    let me = Host::polled(engine, driver);
    let (mut first, _) = case.agent("first");
    let (mut second, _) = case.agent("second");
    let address = me.engine.address().to_string();
    let there = Ask::TryPeer { address: address.clone() };
    let Say::Peer(one) = first.ask(&me, there.clone()) else { panic!("the first is refused") };
    let why = match second.ask(&me, there.clone()) {
        Say::Text(why) => why,
        other => panic!("{other:?}"),
    };
    assert!(why.contains("no room, or no memory, for another peer"), "{why}");
    let region = me.engine.alloc_gpu(0, 4096).expect("memory");
    let counter = me.engine.counter().expect("a counter");
    let write = |agent: &mut crate::Agent, peer, n| {
        let (src, _) = agent.memory(&me, 4096, Own::Engine);
        let pattern = case.pattern(n);
        agent.tell(&me, Ask::Fill { region: src, offset: 0, len: 4096, pattern, at: 0 });
        let (dst, tag) = (encode(&region.desc()), Some(counter.tag().bits()));
        let (src_offset, dst_offset, len) = (0, 0, 4096);
        let write = Write1 { peer, src, src_offset, dst, dst_offset, len, tag };
        assert_eq!(agent.ask(&me, Ask::Write(write)), Say::Text("Done".into()));
        me.count(&counter, 1, patience()).expect("the write");
        assert_eq!(pattern.mismatch(&region, 0, 4096, 0), None);
    };
    write(&mut first, one, 1);
    drop(first);
    let peer = me.until(patience(), || match second.ask(&me, there.clone()) {
        Say::Peer(peer) => Some(peer),
        _ => None,
    });
    write(&mut second, peer.expect("there is room again"), 2);
}

/// Where there is nothing to be staged, or no way to, nobody gets an engine that does not.
fn asked_for_in_vain(case: &Case) {
    let builder = || (Provider::named(case.provider).builder)(&case.setup(1));
    let why = |builder: immwire::Builder| match builder.build_polled() {
        Err(BuildError::Staging(why)) => why,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("there is an engine"),
    };
    assert!(matches!(why(builder().gpus([])), StagingError::NoGpus));
    let shm = TransferEngine::builder().gpus([0]).staging(Staging::default());
    assert!(matches!(why(shm), StagingError::NoNics));
    // More than this process may have, on a machine with any memory. The GPUs' contexts, for which a driver reserves far more
    // addresses than any pool, are there already.
    let held = builder().build_polled().expect("an engine");
    let before = getrlimit(Resource::As);
    let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages: u64 = pages.split(' ').next().expect("a first word").parse().expect("a number");
    let most = pages * page_size() as u64 + (1 << 30);
    setrlimit(Resource::As, Rlimit { current: Some(most), ..before }).expect("less is allowed");
    let huge = why(builder().sms(NonZeroU32::MIN).staging(Staging { bytes: 1 << 60 }));
    setrlimit(Resource::As, before).expect("as before");
    assert!(matches!(huge, StagingError::Pool { .. }));
    // What has been built otherwise works, before and after.
    let (engine, _driver) = builder().build_polled().expect("an engine");
    for engine in [&engine, &held.0] {
        engine.alloc_gpu(0, 1).expect("memory").close(Duration::ZERO).expect("nobody writes");
    }
}
