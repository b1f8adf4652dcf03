//! What goes wrong at the other end, and how it is said.

use std::time::{Duration, Instant};

use fake_efa::disorder::{Choice, Disorder};
use libfabric_sys as sys;

use crate::delivery::{hex, unhex};
use crate::rig::*;

#[test]
fn a_target_takes_writes_of_whom_it_inserted() {
    alone("failures::a_target_takes_writes_of_whom_it_inserted", &[], |fake| {
        let node = Node::open(fake, fake.info());
        let (a, b) = (node.side(64), node.side(64));
        let (to, source, target) = (a.insert(b.address()), node.memory(64, 1), node.memory(64, 0));
        let (address, key) = (target.address(), target.key());
        let write = Write { memory: &source, offset: 0, len: 64, data: Some(1), to, address, key };
        let mut mine = context();
        let mine = at(&mut mine);
        assert_eq!(a.post(&write, mine), 0);
        assert_eq!(a.failure(), (sys::FI_ENOTCONN, 14));
        fake.broken(&["initiator not inserted at the target"]);
        b.quiet(Duration::from_millis(20));
        assert!((0..64).all(|at| target.byte(at) == 0));
        let number = b.insert(a.address());
        assert_eq!(a.post(&write, mine), 0);
        assert!(matches!(a.next(), Event::Done { .. }));
        assert!(matches!(b.next(), Event::Done { from, .. } if from == number));
        // It may take it out again: then it fails, and nobody did wrong.
        assert_eq!(b.remove(number), 0);
        assert_eq!(a.post(&write, mine), 0);
        assert_eq!(a.failure(), (sys::FI_ENOTCONN, 14));
        fake.broken(&["initiator not inserted at the target"]);
        drop((source, target));
        a.close();
        b.close();
        node.close();
    });
}

#[test]
fn keys_and_ranges_are_checked_at_the_target() {
    alone("failures::keys_and_ranges_are_checked_at_the_target", &[], |fake| {
        let pair = Pair::new(fake);
        let (source, target) = (pair.node.memory(64, 1), pair.node.memory(64, 0));
        let readable = pair.node.memory_for(64, 0, sys::FI_REMOTE_READ);
        let elsewhere = Node::open(fake, fake.info());
        let foreign = elsewhere.memory(64, 0);
        let (to, address, key) = (pair.to_b, target.address(), target.key());
        let write = Write { memory: &source, offset: 0, len: 64, data: Some(1), to, address, key };
        let mut mine = context();
        let mine = at(&mut mine);
        let wrong = [
            Write { key: key ^ 1, ..write },
            Write { key: 0, ..write },
            Write { address: address + 1, ..write },
            Write { address: address - 1, ..write },
            Write { address: u64::MAX - 3, ..write },
            Write { address: 0, ..write },
            Write { len: 0, key: key ^ 1, ..write },
            Write { len: 0, address: 0, ..write },
            Write { data: None, key: key ^ 1, ..write },
            Write { key: readable.key(), address: readable.address(), ..write },
            Write { key: foreign.key(), address: foreign.address(), ..write },
        ];
        for write in wrong {
            assert_eq!(pair.a.post(&write, mine), 0);
            assert_eq!(pair.a.failure(), (sys::FI_EINVAL, 7));
        }
        pair.b.quiet(Duration::from_millis(20));
        for memory in [&target, &readable, &foreign] {
            assert!((0..64).all(|at| memory.byte(at) == 0));
        }
        // All of a write is checked before any of it lands.
        let (long, short) = (pair.node.memory(1 << 16, 1), pair.node.memory((1 << 16) - 1, 0));
        let most = Write {
            memory: &long,
            len: 1 << 16,
            address: short.address(),
            key: short.key(),
            ..write
        };
        assert_eq!(pair.a.post(&most, mine), 0);
        assert_eq!(pair.a.failure(), (sys::FI_EINVAL, 7));
        assert!((0..(1 << 16) - 1).all(|at| short.byte(at) == 0));
        assert_eq!(pair.a.post(&Write { len: 0, address: address + 64, ..write }, mine), 0);
        assert!(matches!(pair.b.next(), Event::Done { len: 0, .. }));
        assert!(matches!(pair.a.next(), Event::Done { .. }));
        drop((source, target, readable, foreign, long, short));
        pair.close();
        elsewhere.close();
        fake.broken(&[]);
    });
}

#[test]
fn no_byte_lands_after_the_registration_is_closed() {
    alone("failures::no_byte_lands_after_the_registration_is_closed", &[], |fake| {
        const LEN: usize = 1 << 18;
        let pair = Pair::new(fake);
        let source = pair.node.memory(LEN, 1);
        let (mut failed, mut done) = (0, 0);
        // Each round closes after another while; and on until both were met often enough, however fast the machine is.
        for round in 0..2000 {
            if round >= 40 && failed >= 10 && done >= 1 {
                break;
            }
            let mut target = pair.node.memory(LEN, 0);
            let (to, address, key) = (pair.to_b, target.address(), target.key());
            let write =
                Write { memory: &source, offset: 0, len: LEN, data: None, to, address, key };
            let mut contexts: Vec<_> = (0..4).map(|_| context()).collect();
            contexts.iter_mut().for_each(|context| assert_eq!(pair.a.post(&write, at(context)), 0));
            std::thread::sleep(Duration::from_micros(round % 40 * 40));
            // What was acknowledged before it closes has landed once it is closed.
            let before = pair.a.poll();
            target.close();
            if matches!(before, Some(Event::Done { .. })) {
                done += 1;
                assert!((0..LEN).all(|at| target.byte(at) == 1));
            }
            target.fill(0, &vec![7; LEN]);
            let mut events: Vec<_> = before.into_iter().collect();
            while events.len() < 4 {
                events.push(pair.a.next());
            }
            for event in events {
                if let Event::Failed { err, prov, .. } = event {
                    assert_eq!((err, prov), (sys::FI_EINVAL, 7));
                    failed += 1;
                }
            }
            assert!((0..LEN).all(|at| target.byte(at) == 7));
        }
        assert!(failed >= 10 && done >= 1, "{failed} failed, {done} done before the close");
        drop(source);
        pair.close();
        fake.broken(&[]);
    });
}

#[test]
fn a_closed_endpoint_is_no_queue_pair_and_a_new_one_another() {
    alone("failures::a_closed_endpoint_is_no_queue_pair_and_a_new_one_another", &[], |fake| {
        let node = Node::open(fake, fake.info());
        let (a, b) = (node.side(64), node.side(64));
        let (old, memory) = (b.address(), node.memory(64, 1));
        let (to, address, key) = (a.insert(old), memory.address() + 32, memory.key());
        b.insert(a.address());
        let write = Write { memory: &memory, offset: 0, len: 8, data: Some(1), to, address, key };
        let mut mine = context();
        let mine = at(&mut mine);
        assert_eq!(a.post(&write, mine), 0);
        assert!(matches!(a.next(), Event::Done { .. }));
        b.close();
        let c = node.side(64);
        let new = c.address();
        assert!(old[..16] == new[..16] && old[16..18] != new[16..18] && old[20..24] != new[20..24]);
        assert_eq!(a.post(&write, mine), 0);
        assert_eq!(a.failure(), (sys::FI_ENOTCONN, 9));
        // The right number with another key is nobody either.
        let mut stale = new;
        stale[20] ^= 1;
        let number = a.insert(stale);
        assert_eq!(a.post(&Write { to: number, ..write }, mine), 0);
        assert_eq!(a.failure(), (sys::FI_ENOTCONN, 9));
        let number = a.insert(new);
        c.insert(a.address());
        assert_eq!(a.post(&Write { to: number, ..write }, mine), 0);
        assert!(matches!(a.next(), Event::Done { .. }));
        drop(memory);
        a.close();
        c.close();
        node.close();
        fake.broken(&[]);
    });
}

#[test]
fn who_was_never_there_is_said_to_be_so_late() {
    alone("failures::who_was_never_there_is_said_to_be_so_late", &[], |fake| {
        let node = Node::open(fake, fake.info());
        let (side, memory) = (node.side(64), node.memory(64, 1));
        let mut nobody = side.address();
        nobody[16] ^= 0x55;
        let mut nowhere = nobody;
        nowhere[0] ^= 0x55;
        for (address, expected) in
            [(nobody, (sys::FI_ENOTCONN, 9)), (nowhere, (sys::FI_EHOSTUNREACH, 15))]
        {
            let (to, key) = (side.insert(address), memory.key());
            let address = memory.address() + 32;
            let write =
                Write { memory: &memory, offset: 0, len: 8, data: Some(1), to, address, key };
            let (mut mine, start) = (context(), Instant::now());
            assert_eq!(side.post(&write, at(&mut mine)), 0);
            assert_eq!(side.failure(), expected);
            assert!(start.elapsed() >= Duration::from_millis(300));
        }
        drop(memory);
        side.close();
        node.close();
        fake.broken(&[]);
    });
}

/// A process that has received one write of this one, and what more to write to it.
struct Target<'a> {
    process: Peer,
    side: Side,
    memory: &'a Memory,
    to: u64,
    address: u64,
    key: u64,
}

impl<'a> Target<'a> {
    /// Does not return in the other process, which is to be killed.
    fn start(side: Side, memory: &'a Memory) -> Self {
        if role().is_some() {
            side.insert(unhex(&hear()));
            say(&format!("{} {} {}", hex(&side.address()), memory.address(), memory.key()));
            hear();
            panic!("it was to be killed");
        }
        let mut process = peer("target", &[]);
        process.tell(&hex(&side.address()));
        let answer = process.hear();
        let words: Vec<_> = answer.split(' ').collect();
        let to = side.insert(unhex(words[0]));
        let (address, key) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        let target = Self { process, side, memory, to, address, key };
        let mut mine = context();
        assert_eq!(target.side.post(&target.write(), at(&mut mine)), 0);
        assert!(matches!(target.side.next(), Event::Done { .. }));
        target
    }

    fn write(&self) -> Write<'a> {
        let Self { memory, to, address, key, .. } = *self;
        Write { memory, offset: 0, len: 8, data: Some(5), to, address, key }
    }
}

#[test]
fn a_dead_process_is_reported_late() {
    let name = "failures::a_dead_process_is_reported_late";
    alone(name, &[("FAKE_EFA_DEAD_MS", "400")], |fake| {
        let node = Node::open(fake, fake.info());
        let memory = node.memory(64, 1);
        let target = Target::start(node.side(64), &memory);
        let write = target.write();
        let Target { process, side, .. } = target;
        process.kill();
        let mut contexts: Vec<_> = (0..8).map(|_| context()).collect();
        let start = Instant::now();
        contexts.iter_mut().for_each(|context| assert_eq!(side.post(&write, at(context)), 0));
        for _ in 0..8 {
            assert_eq!(side.failure(), (sys::FI_ECONNABORTED, 13));
            assert!(start.elapsed() >= Duration::from_millis(400));
        }
        // And so again.
        assert_eq!(side.post(&write, at(&mut contexts[0])), 0);
        assert_eq!(side.failure(), (sys::FI_ECONNABORTED, 13));
        assert!(start.elapsed() >= Duration::from_millis(800));
        drop(memory);
        side.close();
        node.close();
        fake.broken(&[]);
    });
}

#[test]
fn a_stopped_process_is_unresponsive() {
    let name = "failures::a_stopped_process_is_unresponsive";
    // Longer than a process is kept from running that nobody stops.
    alone(name, &[("FAKE_EFA_SILENT_MS", "3000")], |fake| {
        let node = Node::open(fake, fake.info());
        let memory = node.memory(64, 1);
        let target = Target::start(node.side(64), &memory);
        let write = target.write();
        let Target { process, side, .. } = target;
        process.stop();
        let (mut mine, start) = (context(), Instant::now());
        assert_eq!(side.post(&write, at(&mut mine)), 0);
        assert_eq!(side.failure(), (sys::FI_ECONNABORTED, 13));
        assert!(start.elapsed() >= Duration::from_millis(3000));
        process.kill();
        drop(memory);
        side.close();
        node.close();
        fake.broken(&[]);
    });
}

#[test]
fn a_close_waits_for_nobody() {
    // Some of what is in flight takes longer than a thread is kept from running, as the model's own numbers say: it has landed if it was waited for.
    let longest = Duration::from_secs(5);
    let (from, to) = (longest / 2, longest / 2 + Duration::from_millis(200));
    let start = |seed, op| Disorder::new(seed, 0, longest).delay(Choice::Start, op, 0);
    let seed = (1..).find(|seed| (0..32).any(|op| (from..to).contains(&start(*seed, op)))).unwrap();
    let text = seed.to_string();
    let late = [
        ("FAKE_EFA_SEED", text.as_str()),
        ("FAKE_EFA_DELAY_US", "5000000"),
        ("FAKE_EFA_EARLY_ACK", "0"),
    ];
    alone("failures::a_close_waits_for_nobody", &late, |fake| {
        let node = Node::open(fake, fake.info());
        let (a, b) = (node.side(64), node.side(64));
        let (to, source, target) = (a.insert(b.address()), node.memory(1, 1), node.memory(32, 0));
        b.insert(a.address());
        let mut contexts: Vec<_> = (0..32).map(|_| context()).collect();
        for (index, context) in contexts.iter_mut().enumerate() {
            let (address, key) = (target.address() + index as u64, target.key());
            let write = Write { memory: &source, offset: 0, len: 1, data: None, to, address, key };
            assert_eq!(a.post(&write, at(context)), 0);
        }
        a.close_ep();
        let landed: Vec<_> =
            (0..32_usize).filter(|&at| target.byte(at) == 1).map(|at| at as u64).collect();
        let waited_for = landed.iter().any(|&op| start(seed, op) >= from);
        assert!(!waited_for, "it has waited for what was in flight: {landed:?}");
        let landed = landed.len();
        contexts.iter_mut().for_each(|context| context.internal = [std::ptr::null_mut(); 8]);
        drop(source);
        let mut reported = 0;
        while a.poll().is_some() {
            reported += 1;
        }
        assert!(reported <= landed, "{reported} reported, {landed} landed");
        // SAFETY: both are open, and no endpoint is on them.
        unsafe {
            fine(sys::fi_close(&raw mut (*a.cq).fid));
            fine(sys::fi_close(&raw mut (*a.av).fid));
        }
        b.close();
        drop(target);
        node.close();
        fake.broken(&[]);
    });
}

#[test]
fn closing_an_endpoint_drops_what_is_in_flight() {
    alone(
        "failures::closing_an_endpoint_drops_what_is_in_flight",
        &[("FAKE_EFA_DELAY_US", "100000")],
        |fake| {
            let (mut kept, mut landed) = (0, 0);
            let node = Node::open(fake, fake.info());
            for _ in 0..8 {
                let (a, b) = (node.side(64), node.side(64));
                let (to, source, target) =
                    (a.insert(b.address()), node.memory(1, 1), node.memory(32, 0));
                b.insert(a.address());
                let mut contexts: Vec<_> = (0..32).map(|_| context()).collect();
                for (index, context) in contexts.iter_mut().enumerate() {
                    let (address, key) = (target.address() + index as u64, target.key());
                    let write =
                        Write { memory: &source, offset: 0, len: 1, data: None, to, address, key };
                    assert_eq!(a.post(&write, at(context)), 0);
                }
                std::thread::sleep(Duration::from_millis(100));
                a.close_ep();
                // The contexts are the caller's again, and so is the source.
                contexts
                    .iter_mut()
                    .for_each(|context| context.internal = [std::ptr::null_mut(); 8]);
                drop(source);
                while let Some(event) = a.poll() {
                    assert!(matches!(event, Event::Done { .. }), "{event:?}");
                    kept += 1;
                }
                std::thread::sleep(Duration::from_millis(1));
                landed += (0..32).filter(|&at| target.byte(at) == 1).count();
                // SAFETY: both are open, and no endpoint is on them.
                unsafe {
                    fine(sys::fi_close(&raw mut (*a.cq).fid));
                    fine(sys::fi_close(&raw mut (*a.av).fid));
                }
                b.close();
                drop(target);
            }
            node.close();
            fake.broken(&[]);
            assert!(
                0 < kept && kept < landed && landed < 8 * 32,
                "{kept} reported, {landed} landed"
            );
            assert!(logged("discarded", "completions") > 0);
        },
    );
}
